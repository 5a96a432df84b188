//! Ends of connections of whole servers, as their peers see them: an end of stream or a reset, whatever ended the connection.
//! `ksf-kernel tests/ends.rs` has the ways of echo and RPC on every engine with and without the kernel half.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{Folder, Server, engines};
use ksf_test::stream::{connect, expect, read_rest, serve};
use ksf_test::{PATIENCE, effort, rpc};
use rustix::process::Signal;

/// A protocol of a service, in the bytes of its peers.
struct Spoken {
    service: &'static str,
    request: Vec<u8>,
    /// The first bytes of the response.
    response: Vec<u8>,
    /// The beginning of a request.
    part: Vec<u8>,
    /// The beginning of a request that is longer than any may be.
    endless: Vec<u8>,
}

/// Those of [`start`]: the store's two, the demo server, the proxy, RPC and work with workers, and the file servers.
fn all_spoken() -> Vec<Spoken> {
    let spoken = |service, request: &[u8], response: &[u8], part: &[u8], endless: &[u8]| Spoken {
        service,
        request: request.to_vec(),
        response: response.to_vec(),
        part: part.to_vec(),
        endless: endless.to_vec(),
    };
    let http = |service, target: &str, response: &[u8]| {
        let head = format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n");
        let endless = format!("{head}X: {}", "x".repeat(1 << 20));
        spoken(service, format!("{head}\r\n").as_bytes(), response, head.as_bytes(), endless.as_bytes())
    };
    let call = rpc::record(&rpc::call(7, 100_003, 3, 0));
    let done = rpc::record(&rpc::accepted(7, &[0]));
    // A message of 9P that begins the session, or answers that: its size, type, tag, msize and version.
    let version = |kind: u8| [&b"\x15\0\0\0"[..], &[kind], b"\xff\xff\0\x20\0\0\x08\x009P2000.L"].concat();
    let work = rpc::words(&[8, 0, 0]);
    let endless = [0xff; 4];
    vec![
        spoken("store", b"PING\r\n", b"+PONG\r\n", b"*2\r\n$3\r\nGET\r\n$3", b"*1\r\n$99999999999\r\n"),
        http("store", "/none", b"HTTP/1.1 404 "),
        http("page", "/", b"HTTP/1.1 200 "),
        http("proxy", "/", b"HTTP/1.1 200 "),
        spoken("calls", &call, &done, &call[..20], &endless),
        spoken("nfs", &call, &done, &call[..20], &endless),
        spoken("9p", &version(100), &version(101), &version(100)[..4], &endless),
        spoken("work", &work, b"\0\0\0", &work[..6], &endless),
    ]
}

/// Starts all services with these limits.
fn start(folder: &Folder, engine: &str, backend: SocketAddr, limits: &str) -> Server {
    let text = format!(
        r#"
        engine = "{engine}"
        [limits]
        {limits}
        [[service]]
        name = "store"
        kind = "store"
        listen = ["tcp:127.0.0.1:0"]
        data = "store"
        log_bytes = "8m"
        [[service]]
        name = "page"
        kind = "http"
        listen = ["tcp:127.0.0.1:0"]
        keep_alive = true
        [[service]]
        name = "proxy"
        kind = "http"
        listen = ["tcp:127.0.0.1:0"]
        backends = ["{backend}"]
        keep_alive = true
        [[service]]
        name = "calls"
        kind = "rpc"
        listen = ["tcp:127.0.0.1:0"]
        workers = 2
        [[service]]
        name = "nfs"
        kind = "nfs"
        listen = ["tcp:127.0.0.1:0"]
        exports = ["export"]
        state = "nfs"
        [[service]]
        name = "9p"
        kind = "9p"
        listen = ["tcp:127.0.0.1:0"]
        exports = ["export"]
        state = "9p"
        [[service]]
        name = "work"
        kind = "work"
        listen = ["tcp:127.0.0.1:0"]
        workers = 2
        "#
    );
    std::fs::create_dir(folder.path("export")).unwrap();
    Server::start(&["serve", folder.write("ksf.toml", text).to_str().unwrap()], 7)
}

/// A backend that answers each head.
fn answer_heads(mut stream: TcpStream) -> io::Result<()> {
    let mut seen = Vec::new();
    let mut block = [0; 4096];
    loop {
        let count = stream.read(&mut block)?;
        if count == 0 {
            return Ok(());
        }
        seen.extend_from_slice(&block[..count]);
        while let Some(end) = seen.windows(4).position(|four| four == b"\r\n\r\n") {
            seen.drain(..end + 4);
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?;
        }
    }
}

fn connected(server: &Server, spoken: &Spoken) -> TcpStream {
    connect(server.address(&format!("{} tcp", spoken.service)))
}

/// A peer whose connection the service has accepted.
fn served(server: &Server, spoken: &Spoken) -> TcpStream {
    let mut peer = connected(server, spoken);
    peer.write_all(&spoken.request).unwrap();
    expect(&mut peer, &spoken.response);
    peer
}

/// Of the limits below, each of which ends a connection within a second.
const LIMIT: Duration = Duration::from_millis(100);
/// For as long TCP keeps a client that says nothing from the server (TCP_DEFER_ACCEPT).
const DEFERRED: Duration = Duration::from_secs(1);

/// Reads them to their ends. In a soak these come within a second after what ends them.
fn read_rests(peers: impl IntoIterator<Item = TcpStream>, after: Duration) -> Vec<Vec<u8>> {
    let begun = Instant::now();
    let told = peers.into_iter().map(read_rest).collect();
    assert!(begun.elapsed() < effort(PATIENCE, Duration::from_secs(1) + after), "{:?}", begun.elapsed());
    told
}

/// Has a backend, and tries this on every engine, side by side.
fn on_every_engine(limits: &str, act: impl Fn(Server) + Sync) {
    let backend = serve(TcpListener::bind("127.0.0.1:0").unwrap(), answer_heads);
    thread::scope(|scope| {
        for engine in engines() {
            let act = &act;
            scope.spawn(move || {
                let folder = Folder::to_export();
                act(start(&folder, engine, backend, limits));
            });
        }
    });
}

#[test]
fn limits_of_a_message_and_of_silence_end_connections() {
    type Sends = fn(&Spoken) -> &[u8];
    let ways: [(&str, Sends, Duration); 4] = [
        ("assembly_timeout_ms = 60000", |spoken| &spoken.endless, Duration::ZERO),
        ("assembly_timeout_ms = 100", |spoken| &spoken.part, LIMIT),
        ("idle_timeout_ms = 100", |spoken| &spoken.request, LIMIT),
        ("idle_timeout_ms = 100", |_| &[], LIMIT + DEFERRED),
    ];
    for (limits, sends, after) in ways {
        on_every_engine(limits, |server| {
            let mut peers: Vec<_> =
                all_spoken().iter().map(|spoken| (connected(&server, spoken), sends(spoken).to_vec())).collect();
            for (peer, bytes) in &mut peers {
                // The end may come before all is sent.
                let _ = peer.write_all(bytes);
            }
            read_rests(peers.into_iter().map(|(peer, _)| peer), after);
            server.stop();
        });
    }
}

#[test]
fn connections_beyond_the_maximum_end() {
    on_every_engine("connections_max = 1", |server| {
        let mut first: Vec<(&str, TcpStream)> = Vec::new();
        for spoken in all_spoken() {
            if !first.iter().any(|(service, _)| *service == spoken.service) {
                first.push((spoken.service, served(&server, &spoken)));
            }
            let mut peer = connected(&server, &spoken);
            let _ = peer.write_all(&spoken.part);
            let told = read_rests([peer], Duration::ZERO).concat();
            assert!(!told.starts_with(&spoken.response), "{}: {}", spoken.service, told.escape_ascii());
        }
        drop(first);
        server.stop();
    });
}

#[test]
fn connections_end_with_their_server() {
    for signal in [Signal::TERM, Signal::KILL] {
        on_every_engine("drain_timeout_ms = 100", |mut server| {
            let all = all_spoken();
            let idle = all.iter().map(|spoken| served(&server, spoken));
            let in_a_message = all.iter().map(|spoken| {
                let mut peer = served(&server, spoken);
                peer.write_all(&spoken.part).unwrap();
                peer
            });
            let peers: Vec<TcpStream> = idle.chain(in_a_message).collect();
            server.signal(signal);
            read_rests(peers, LIMIT);
            server.wait();
        });
    }
}
