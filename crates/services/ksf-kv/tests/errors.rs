//! Errors quote arguments as they came, and not more of them than is stated.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;

use crate::common::table::{self, Driven, Size};
use crate::common::*;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_kv::cluster::{Cluster, NodeSpec};
use ksf_test::stream;

/// Elements of keys, and their bytes.
const TRIED: Size = (64, 64);
/// Longest error reply.
const ERROR_BYTES_MAX: usize = 1 << 10;
/// An argument that no command accepts and that is no text.
static LONG: [u8; 4096] = [0xff; 4096];
/// Behind the command of a request, so that the end of its reply is found.
const END: &[u8] = b"*2\r\n$4\r\nECHO\r\n$5\r\n--END\r\n";
const END_REPLY: &[u8] = b"$5\r\n--END\r\n";

/// A node that has all slots, so that `CLUSTER` is answered.
fn start(folder: &Path) -> Serving {
    let node = NodeSpec { address: "192.0.2.1:6379".into(), slots: "0-16383".into() };
    let cluster = Some(Cluster::new(&[node], "192.0.2.1:6379").unwrap());
    let settings = Settings { cluster, ..Settings::default() };
    Serving::start_set(EngineKind::Epoll, folder, Limits::default(), settings)
}

fn encoded(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(&[format!("${}\r\n", word.len()).as_bytes(), word, b"\r\n"].concat());
    }
    bytes
}

/// The reply to a command, on a connection of its own; shorter if the connection ended.
fn reply(address: SocketAddr, words: &[&[u8]]) -> Vec<u8> {
    let mut peer = BufReader::new(stream::connect(address));
    peer.get_mut().write_all(&[encoded(words), END.to_vec()].concat()).unwrap();
    let mut replies = Vec::new();
    while !replies.ends_with(END_REPLY) && peer.read_until(b'\n', &mut replies).unwrap_or(0) > 0 {}
    let end_bytes = if replies.ends_with(END_REPLY) { END_REPLY.len() } else { 0 };
    replies.truncate(replies.len() - end_bytes);
    replies
}

/// All replies to these commands.
fn converse(address: SocketAddr, commands: &[u8]) -> String {
    let mut peer: TcpStream = stream::connect(address);
    peer.write_all(commands).unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    let mut replies = Vec::new();
    let _ = peer.read_to_end(&mut replies);
    String::from_utf8_lossy(&replies).into_owned()
}

/// Words of the options of a command, by its documentation.
fn tokens(address: SocketAddr, name: &str) -> Vec<String> {
    let docs = converse(address, &encoded(&[b"COMMAND", b"DOCS", name.as_bytes()]));
    let lines: Vec<&str> = docs.lines().collect();
    let named = lines.windows(3).filter(|lines| lines[0] == "token");
    named.map(|lines| lines[2].to_owned()).filter(|token| !token.is_empty()).collect()
}

/// The command with the long argument in each place, with and without the words behind it, and behind each of its options.
fn variants<'a>(words: &[&'a [u8]], tokens: &'a [String]) -> Vec<Vec<&'a [u8]>> {
    let mut all = Vec::new();
    for at in 0..=words.len() {
        let front = &words[..at];
        all.push([front, &[&LONG[..]]].concat());
        all.push([front, &[&LONG[..]], words.get(at + 1..).unwrap_or_default()].concat());
        if at > 0 {
            all.extend(tokens.iter().map(|token| [front, &[token.as_bytes(), &LONG]].concat()));
        }
    }
    all
}

#[test]
fn no_error_reply_is_long_whichever_argument_is() {
    let serving = Serving::in_new_folder(start);
    let address = serving.address();
    let all: Vec<Driven> = table::all(TRIED, |commands| converse(address, commands));
    converse(address, &table::encoded(&table::make_all(TRIED)));
    let (mut errors, mut long) = (0, Vec::new());
    for one in &all {
        let tokens = tokens(address, &one.name);
        let words: Vec<&[u8]> = one.words().iter().map(String::as_bytes).collect();
        for words in variants(&words, &tokens) {
            let reply = reply(address, &words);
            if reply.first() == Some(&b'-') {
                errors += 1;
                if reply.len() > ERROR_BYTES_MAX {
                    long.push(format!("{}: {} bytes", reply[..60].escape_ascii(), reply.len()));
                }
            }
        }
    }
    assert!(errors > 1000, "{errors} errors");
    assert!(long.is_empty(), "{} of {errors} are long:\n{}", long.len(), long.join("\n"));
    serving.stop();
}

#[test]
fn errors_quote_the_bytes_of_an_argument() {
    let serving = Serving::in_new_folder(start);
    let cut = [b"-ERR Unsupported option ", &[0xff; 128][..], b"\r\n"].concat();
    let told: [(&[&[u8]], &[u8]); 6] = [
        (&[b"EXPIRE", b"k", b"1", &LONG], &cut),
        (&[b"EXPIRE", b"k", b"1", b"\xff\xfe\0x"], b"-ERR Unsupported option \xff\xfe\r\n"),
        (&[b"CLIENT", b"KILL", b"TYPE", b"a\r\n+OK"], b"-ERR Unknown client type 'a  +OK'\r\n"),
        (&[b"HELLO", b"3", b"\xe4"], b"-ERR Syntax error in HELLO option '\xe4'\r\n"),
        (&[b"CLUSTER", b"REPLICAS", b"\xe4"], b"-ERR Unknown node \xe4\r\n"),
        (&[b"KSF.BACKUP", b"HELP"], b"-ERR unknown subcommand 'HELP': there are BEGIN, READ, DONE and END\r\n"),
    ];
    for (words, wanted) in told {
        let told = reply(serving.address(), words);
        assert_eq!(told.escape_ascii().to_string(), wanted.escape_ascii().to_string());
    }
    serving.stop();
}
