//! Runs the tools in this process, and servers that misbehave on demand.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "every test file uses its own part")]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::AtomicBool;

use clap::Parser;
use ksf_load::report::document::Document;
use ksf_load::{Io, LoadError, calls, echo, http, kv, rpc, work};
pub use ksf_test::rpc::{accepted, read_record, record, words as message, xid};
pub use ksf_test::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub mod store;

/// What a run of a tool left behind.
pub struct Ran<B> {
    pub code: u8,
    pub stdout: String,
    pub stderr: String,
    document: Option<Document<B>>,
}

pub type RanCalls = Ran<calls::report::CallBody>;
pub type RanWork = Ran<work::report::WorkBody>;
pub type RanHttp = Ran<http::report::HttpBody>;
pub type RanKv = Ran<kv::report::KvBody>;

/// Members whose names are data: options, statuses, values, counters of the kernel.
const NAMED_BY_DATA: &[&str] = &["config", "kernel", "statuses", "tally"];

/// Asserts that docs/formats/load-json.md has the name of each member.
fn assert_described(value: &Value, docs: &str) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                assert!(docs.contains(&format!("`{name}`")), "{name} is not described");
                if !NAMED_BY_DATA.contains(&name.as_str()) {
                    assert_described(member, docs);
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| assert_described(item, docs)),
        _ => {}
    }
}

/// Every kind that occurred, with its count.
fn occurred(counts: &std::collections::BTreeMap<String, u64>) -> Vec<(&str, u64)> {
    counts.iter().filter(|(_, count)| **count > 0).map(|(kind, count)| (kind.as_str(), *count)).collect()
}

impl<B: Serialize> Ran<B> {
    fn of(run: impl FnOnce(&mut Io<'_>) -> Result<Document<B>, LoadError>, stop: &AtomicBool) -> Ran<B> {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let result = run(&mut Io { out: &mut out, err: &mut err, stop });
        let mut stderr = String::from_utf8(err).unwrap();
        let (code, document) = match result {
            Ok(document) => (document.exit_code(), Some(document)),
            Err(error) => {
                stderr += &error.to_string();
                (error.exit_code(), None)
            }
        };
        Ran { code, stdout: String::from_utf8(out).unwrap(), stderr, document }
    }

    pub fn document(&self) -> &Document<B> {
        self.document.as_ref().expect(&self.stderr)
    }

    /// What was asked for and measured.
    pub fn report(&self) -> &B {
        &self.document().body
    }

    pub fn warns(&self, code: &str) -> bool {
        self.document().warnings.iter().any(|warning| warning.code == code)
    }

    /// Asserts that stdout is one document that reads back as what was measured, that a member more in it or in one
    /// of its objects is an error, and that each member is described. Returns the document.
    #[track_caller]
    pub fn assert_reads_back(&self) -> Value
    where
        B: DeserializeOwned + PartialEq + std::fmt::Debug,
    {
        let report: Document<B> = serde_json::from_str(&self.stdout).expect("stdout is one document");
        assert_eq!((&report, report.ok), (self.document(), self.code == 0));
        let document: Value = serde_json::from_str(&self.stdout).unwrap();
        assert_described(&document, include_str!("../../../../../docs/formats/load-json.md"));
        for place in ["", "/machine", "/config", "/run", "/run/latency", "/runs/0", "/runs/0/latency", "/total"] {
            let mut grown = document.clone();
            let Some(Value::Object(members)) = grown.pointer_mut(place) else { continue };
            members.insert("surplus_member".to_owned(), Value::Null);
            assert!(serde_json::from_value::<Document<B>>(grown).is_err(), "{place}");
        }
        document
    }

    #[track_caller]
    fn assert_right(&self, faults: &[(&str, u64)], replies: u64, expected: u64) {
        assert_eq!(self.code, 0, "{}", self.stderr);
        assert_eq!(faults, []);
        assert_eq!(replies, expected);
    }
}

impl RanCalls {
    /// Faults of one kind over all runs.
    pub fn faults(&self, kind: &str) -> u64 {
        self.report().runs.iter().map(|run| run.faults[kind]).sum()
    }

    /// Every kind of fault that occurred, with its count, for comparison as a whole.
    pub fn all_faults(&self) -> Vec<(&str, u64)> {
        let kinds = self.report().runs[0].faults.keys();
        kinds.map(|kind| (kind.as_str(), self.faults(kind))).filter(|(_, count)| *count > 0).collect()
    }

    pub fn reordered(&self) -> u64 {
        self.report().runs.iter().map(|run| run.reordered).sum()
    }

    #[track_caller]
    pub fn assert_clean(&self, messages: u64) {
        self.assert_right(&self.all_faults(), self.report().total.messages, messages);
    }
}

impl RanWork {
    /// Every kind of fault that occurred, with its count.
    pub fn faults(&self) -> Vec<(&str, u64)> {
        occurred(&self.report().run.faults)
    }

    #[track_caller]
    pub fn assert_clean(&self, messages: u64) {
        self.assert_right(&self.faults(), self.report().run.messages, messages);
    }
}

impl RanHttp {
    pub fn run(&self) -> &http::report::HttpRunReport {
        &self.report().run
    }

    /// Every kind of failure that occurred, with its count.
    pub fn failures(&self) -> Vec<(&str, u64)> {
        occurred(&self.run().failures)
    }

    #[track_caller]
    pub fn assert_clean(&self, requests: u64) {
        self.assert_right(&self.failures(), self.run().requests.answered, requests);
    }
}

impl RanKv {
    /// Every kind of fault that occurred, with its count.
    pub fn faults(&self) -> Vec<(&str, u64)> {
        occurred(&self.report().run.faults)
    }

    #[track_caller]
    pub fn assert_clean(&self, replies: u64) {
        self.assert_right(&self.faults(), self.report().run.replies, replies);
    }
}

#[derive(Parser)]
struct Tool<A: clap::Args> {
    #[command(flatten)]
    args: A,
}

fn parse<A: clap::Args>(words: impl IntoIterator<Item = impl Into<std::ffi::OsString> + Clone>) -> A {
    Tool::<A>::parse_from(words).args
}

/// The option of a load that waits for replies that never come. With it, a reply that the machine delays may count as lost, too.
pub fn short_timeout(faults: &[(&str, u64)]) -> &'static str {
    if faults.iter().any(|(kind, _)| *kind == "lost") { "--timeout 300ms" } else { "" }
}

/// Runs rpctest with words split at blanks; one iteration, not pinned and at normal priority unless told.
pub fn run_rpctest(options: &str) -> RanCalls {
    Ran::of(|io| rpctest_with(options, io), &AtomicBool::new(false))
}

/// Runs rpctest with output and stop flag of the caller's.
pub fn rpctest_with(options: &str, io: &mut Io<'_>) -> Result<calls::report::CallReport, LoadError> {
    rpc::run_with(&parse(words("rpctest", options)), io)
}

/// Runs echotest likewise.
pub fn run_echotest(options: &str) -> RanCalls {
    Ran::of(|io| echo::run_with(&parse(words("echotest", options)), io), &AtomicBool::new(false))
}

/// Runs echotest on the CPUs that the options name.
pub fn run_pinned_echotest(options: &str) -> RanCalls {
    let words = ["echotest"].into_iter().chain(options.split_whitespace());
    Ran::of(|io| echo::run_with(&parse(words), io), &AtomicBool::new(false))
}

/// Runs worktest likewise.
pub fn run_pinned_worktest(options: &str) -> RanWork {
    let words = ["worktest"].into_iter().chain(options.split_whitespace());
    Ran::of(|io| work::run_with(&parse(words), io), &AtomicBool::new(false))
}

fn words(tool: &str, options: &str) -> Vec<String> {
    let mut words: Vec<String> = [tool, "--no-pin", "--nice", "0"].map(String::from).into();
    if !options.contains("-i ") && !options.contains("--rate") {
        words.extend(["-i", "1"].map(String::from));
    }
    words.extend(options.split_whitespace().map(String::from));
    words
}

/// Runs worktest with words split at blanks, not pinned.
pub fn run_worktest(options: &str) -> RanWork {
    run_pinned_worktest(&format!("--no-pin {options}"))
}

/// Runs kv with words split at blanks, not pinned.
pub fn run_kv(options: &str) -> RanKv {
    let words = ["kv", "--no-pin"].into_iter().chain(options.split_whitespace());
    Ran::of(|io| kv::run_with(&parse(words), io), &AtomicBool::new(false))
}

/// Runs http with words split at blanks, not pinned.
pub fn run_http(options: &str) -> RanHttp {
    run_http_until(options, &[], &AtomicBool::new(false))
}

/// Runs http with further words, which may have blanks, until it is done or `stop` is set.
pub fn run_http_until(options: &str, words: &[&str], stop: &AtomicBool) -> RanHttp {
    let pinning = if options.contains("--cpu") { None } else { Some("--no-pin") };
    let words = ["http"].into_iter().chain(pinning).chain(options.split_whitespace()).chain(words.iter().copied());
    let ran = Ran::of(|io| http::run_with(&parse(words), io), stop);
    if ran.document.is_some() {
        // Whatever the server does.
        let (requests, connections) = (&ran.run().requests, &ran.run().connections);
        assert_eq!(requests.started, requests.answered + requests.failed + requests.unanswered, "{}", ran.stderr);
        assert_eq!(requests.failed, ran.run().failures.values().sum::<u64>());
        assert_eq!(connections.attempted, connections.established + connections.not_established);
        assert_eq!(connections.established, connections.ended.values().sum::<u64>());
        assert!(!ran.warns("accounting"), "{}", ran.stderr);
    }
    ran
}

/// Reads the head of a request; `None` at the end of the stream.
pub fn read_head(stream: &mut impl Read) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte)? {
            0 if head.is_empty() => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => head.push(byte[0]),
        }
    }
    Ok(Some(String::from_utf8_lossy(&head).into_owned()))
}

/// An answer with a body that keeps the connection.
pub fn ok_with(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A server that answers request number `n` (from 0, per connection) with the bytes `answer` makes of its head, and
/// closes when it was asked to.
pub fn http_server(answer: impl FnMut(u64, &str) -> Vec<u8> + Send + Clone + 'static) -> SocketAddr {
    http_server_on("127.0.0.1:0", answer)
}

pub fn http_server_on(at: &str, answer: impl FnMut(u64, &str) -> Vec<u8> + Send + Clone + 'static) -> SocketAddr {
    tcp_server_on(at, move |mut stream| {
        let mut answer = answer.clone();
        let mut number = 0;
        while let Some(head) = read_head(&mut stream)? {
            stream.write_all(&answer(number, &head))?;
            number += 1;
            if head.contains("Connection: close") {
                break;
            }
        }
        Ok(())
    })
}

/// Reads a message of the work service, its length word included; `None` at the end of the stream.
pub fn read_work(stream: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut message = vec![0; 4];
    match stream.read_exact(&mut message) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let length = u32::from_be_bytes(*message.first_chunk().unwrap()) as usize;
    message.resize(4 + length, 0);
    stream.read_exact(&mut message[4..])?;
    Ok(Some(message))
}

/// The reply to a request of the work service.
pub fn work_reply(request: &[u8]) -> Vec<u8> {
    let payload = if request[7] == 3 { &[][..] } else { &request[12..] };
    [&(4 + payload.len() as u32).to_be_bytes()[..], &[0; 4], payload].concat()
}

/// A work server that sends, for request number `n` (from 0, per connection), the bytes `answer` makes of it.
pub fn work_server(answer: impl FnMut(u64, &[u8]) -> Vec<u8> + Send + Clone + 'static) -> SocketAddr {
    tcp_server(move |mut stream| {
        let mut answer = answer.clone();
        let mut number = 0;
        while let Some(request) = read_work(&mut stream)? {
            stream.write_all(&answer(number, &request))?;
            number += 1;
        }
        Ok(())
    })
}

/// Starts a TCP server on loopback whose every connection is given to `serve` in a thread of its own.
pub fn tcp_server(serve: impl Fn(TcpStream) -> io::Result<()> + Send + Clone + 'static) -> SocketAddr {
    tcp_server_on("127.0.0.1:0", serve)
}

pub fn tcp_server_on(at: &str, serve: impl Fn(TcpStream) -> io::Result<()> + Send + Clone + 'static) -> SocketAddr {
    stream::serve(TcpListener::bind(at).unwrap(), serve)
}

/// Ends a connection by a reset.
pub fn reset(stream: TcpStream) -> io::Result<()> {
    stream::reset(stream);
    Ok(())
}

/// Starts a UDP server on loopback: `serve` gets every datagram's number (from 0) and bytes, and returns the datagrams
/// to send back.
pub fn udp_server(mut serve: impl FnMut(u64, &[u8]) -> Vec<Vec<u8>> + Send + 'static) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        for number in 0.. {
            let Ok((len, peer)) = socket.recv_from(&mut buffer) else { return };
            for reply in serve(number, &buffer[..len]) {
                let _ = socket.send_to(&reply, peer);
            }
        }
    });
    address
}

/// A successful reply without a record mark.
pub fn success(xid: u32) -> Vec<u8> {
    accepted(xid, &[0])
}

/// A server that answers call number `n` (from 0, per connection) with the bytes `answer` makes for it.
pub fn rpc_server(answer: impl FnMut(u64, u32) -> Vec<u8> + Send + Clone + 'static) -> SocketAddr {
    tcp_server(move |mut stream| {
        let mut answer = answer.clone();
        let mut number = 0;
        while let Some(call) = read_record(&mut stream)? {
            stream.write_all(&answer(number, xid(&call)))?;
            number += 1;
        }
        Ok(())
    })
}

/// A server that answers every call correctly.
pub fn good_rpc_server() -> SocketAddr {
    rpc_server(|_, xid| record(&success(xid)))
}

/// A server that passes every chunk of `len` bytes through `spoil`, which gets its number from 0.
pub fn echo_server(len: usize, spoil: impl FnMut(u64, Vec<u8>) -> Vec<u8> + Send + Clone + 'static) -> SocketAddr {
    tcp_server(move |mut stream| {
        let mut spoil = spoil.clone();
        for number in 0.. {
            let mut message = vec![0; len];
            match stream.read_exact(&mut message) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                result => result?,
            }
            stream.write_all(&spoil(number, message))?;
        }
        Ok(())
    })
}
