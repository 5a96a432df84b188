//! Real sockets on every engine: bytes come back as they were sent, in order, whatever the peer does.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ksf::engine::EngineKind;
use ksf::framing::Framing;
use ksf::listener::ListenAddr;
use ksf::service::Reply;
use ksf::{Message, Peer, Refused, Server, Service};

struct Echo;

impl Service for Echo {
    type Conn = ();

    fn name(&self) -> &str {
        "echo"
    }

    fn framing(&self) -> Framing {
        Framing::Raw
    }

    fn accept(&self, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.chunk(message.keep());
    }
}

fn engines() -> Vec<EngineKind> {
    let mut engines = vec![EngineKind::Epoll];
    match EngineKind::Uring.probe() {
        Ok(()) => engines.push(EngineKind::Uring),
        Err(error) => println!("skipped: uring: {error}"),
    }
    engines
}

fn start(engine: EngineKind, addr: &str) -> Server {
    Server::builder().engine(engine).listen(addr.parse().unwrap(), Arc::new(Echo), None).start().unwrap()
}

fn port(server: &Server) -> std::net::SocketAddr {
    match server.listeners()[0].addr {
        ListenAddr::Tcp(addr) | ListenAddr::Udp(addr) => addr,
        _ => panic!("no port"),
    }
}

#[test]
fn tcp_echo_of_many_sizes_then_half_close() {
    for engine in engines() {
        for addr in ["tcp:127.0.0.1:0", "tcp:[::1]:0"] {
            let server = start(engine, addr);
            let mut peer = TcpStream::connect(port(&server)).unwrap();
            for size in [1, 2, 3, 100, 2047, 2048, 2049, 16_383, 16_384, 16_385, 70_000, 300_000] {
                let sent: Vec<u8> = (0..size).map(|at: usize| (at * 31 + size) as u8).collect();
                let mut reader = peer.try_clone().unwrap();
                let expected = sent.clone();
                let reader = std::thread::spawn(move || {
                    let mut got = vec![0; expected.len()];
                    reader.read_exact(&mut got).unwrap();
                    assert!(got == expected, "{} bytes came back changed", expected.len());
                });
                peer.write_all(&sent).unwrap();
                reader.join().unwrap();
            }
            peer.write_all(b"last words").unwrap();
            peer.shutdown(std::net::Shutdown::Write).unwrap();
            let mut rest = Vec::new();
            peer.read_to_end(&mut rest).unwrap();
            assert_eq!(rest, b"last words", "{engine}");
            server.drain().unwrap();
        }
    }
}

#[test]
fn udp_and_unix_echo() {
    for engine in engines() {
        for addr in ["udp:127.0.0.1:0", "udp:0.0.0.0:0", "udp:[::1]:0"] {
            let server = start(engine, addr);
            let mut to = port(&server);
            if to.ip().is_unspecified() {
                to.set_ip("127.0.0.3".parse().unwrap());
            }
            let peer = UdpSocket::bind(if to.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" }).unwrap();
            // Connected: a reply from another address than the one asked would not arrive.
            peer.connect(to).unwrap();
            peer.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
            for size in [0, 1, 1000, 9000] {
                let sent = vec![size as u8; size];
                peer.send(&sent).unwrap();
                let mut got = vec![0; 10_000];
                let length = peer.recv(&mut got).unwrap_or_else(|error| panic!("{engine} {addr} {size}: {error}"));
                assert_eq!(got[..length], sent);
            }
        }
        let path = std::env::temp_dir().join(format!("ksf-server-{}-{engine}", std::process::id()));
        let server = start(engine, &format!("unix:{}", path.display()));
        let mut peer = UnixStream::connect(&path).unwrap();
        peer.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        peer.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        drop(server);
        assert!(!path.exists());
    }
}
