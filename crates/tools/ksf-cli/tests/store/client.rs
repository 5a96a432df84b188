//! A client of the store, as plain as can be.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use ksf_test::stream;

pub(crate) struct Client {
    stream: BufReader<TcpStream>,
    /// Bytes of the replies that were read.
    pub(crate) reply_bytes: u64,
}

/// What a command is on the wire.
pub(crate) fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

impl Client {
    #[track_caller]
    pub(crate) fn connect(address: SocketAddr) -> Self {
        Self { stream: BufReader::new(stream::connect(address)), reply_bytes: 0 }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// The next reply in one line: strings as they are, `nil`, and lists in brackets.
    pub(crate) fn read(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 || !line.ends_with("\r\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.reply_bytes += line.len() as u64;
        let (kind, rest) = line.trim_end().split_at(1);
        let count = || rest.parse::<usize>().map_err(io::Error::other);
        Ok(match kind {
            "$" | "*" if rest == "-1" => "nil".to_owned(),
            "$" => {
                let mut body = vec![0; count()? + 2];
                self.stream.read_exact(&mut body)?;
                self.reply_bytes += body.len() as u64;
                body.truncate(body.len() - 2);
                String::from_utf8_lossy(&body).into_owned()
            }
            "*" | "%" | "~" => {
                let count = count()? * if kind == "%" { 2 } else { 1 };
                let parts = (0..count).map(|_| self.read()).collect::<io::Result<Vec<_>>>()?;
                format!("[{}]", parts.join(" "))
            }
            _ => line.trim_end().to_owned(),
        })
    }

    /// Asks and waits for the reply; the words are parted by spaces.
    #[track_caller]
    pub(crate) fn ask(&mut self, words: &str) -> String {
        let words: Vec<&[u8]> = words.split(' ').map(str::as_bytes).collect();
        self.write(&command(&words)).expect("the server reads");
        self.read().unwrap_or_else(|error| panic!("no reply to {words:?}: {error}"))
    }
}
