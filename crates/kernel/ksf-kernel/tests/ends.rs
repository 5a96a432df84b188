//! How connections end, as their peers see it: soon after the server decided it, on every engine, also for a peer that goes on
//! sending.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use crate::common::*;
use crate::rig::*;
use ksf::Server;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_services::rpc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What makes a connection end.
struct Way {
    what: &'static str,
    /// What the peer sends.
    sends: Vec<u8>,
    /// What it sends on, without an end.
    goes_on: Vec<u8>,
    reads: bool,
    server_ends: Option<fn(Ending)>,
    limits: Limits,
}

/// A server on a base engine, with the kernel half or without.
enum Ending {
    Kernel(Rig),
    Base(Server),
}

impl Ending {
    fn start(engine: EngineKind, kernel: bool, limits: Limits) -> Self {
        if kernel {
            return Self::Kernel(Rig::start_with(Spoken::Rpc, engine, "127.0.0.1:0", limits));
        }
        let mut table = rpc::ProgramTable::new();
        table.register(rpc::Program::NFS_V3).unwrap();
        let service = Arc::new(rpc::NullService::new("rpc", table));
        let listen = ListenAddr::Tcp("127.0.0.1:0".parse().unwrap());
        Self::Base(Server::builder().engine(engine).limits(limits).listen(listen, service, None).start().unwrap())
    }

    fn server(&self) -> &Server {
        match self {
            Self::Kernel(rig) => &rig.server,
            Self::Base(server) => server,
        }
    }

    fn connect(&self) -> TcpStream {
        match self {
            Self::Kernel(rig) => rig.connect(),
            Self::Base(server) => {
                let ListenAddr::Tcp(at) = server.listeners()[0].addr else { panic!("no port") };
                connect(at)
            }
        }
    }

    fn drain(self) {
        match self {
            Self::Kernel(Rig { server, kernel, .. }) => {
                server.drain().unwrap();
                drop(kernel);
            }
            Self::Base(server) => {
                server.drain().unwrap();
            }
        }
    }
}

fn ways() -> Vec<Way> {
    let call = || Spoken::Rpc.request(1);
    let limits = Limits { linger_timeout_ms: 200, drain_timeout_ms: 300, ..Limits::default() };
    let way = |what, sends: &[u8], goes_on: &[u8]| Way {
        what,
        sends: sends.to_vec(),
        goes_on: goes_on.to_vec(),
        reads: true,
        server_ends: None,
        limits: limits.clone(),
    };
    let slow = |way: Way| Way { limits: Limits { assembly_timeout_ms: 200, ..limits.clone() }, ..way };
    let (endless, zeros) = (u32::MAX.to_be_bytes(), [0; 64 << 10]);
    let unread = Limits { send_timeout_ms: 200, ..limits.clone() };
    let idle = Limits { idle_timeout_ms: 200, ..limits.clone() };
    let of_server = |way: Way, ends: fn(Ending)| Way { server_ends: Some(ends), ..way };
    vec![
        way("a record that is too long", &endless, &[]),
        way("a record that is too long, on and on", &endless, &zeros),
        way("too many fragments", &[], &[0, 0, 0, 1, 7].repeat(10_000)),
        slow(way("a record that stops", &call()[..20], &[])),
        slow(way("a call that stops in its mark", &[0x80, 0], &[])),
        Way { reads: false, limits: unread, ..way("replies that are not read", &[], &call().repeat(1_000)) },
        Way { limits: idle, ..way("nothing more", &[], &[]) },
        of_server(way("a drain", &[], &[]), Ending::drain),
        of_server(way("a drain in a record", &call()[..20], &[]), Ending::drain),
        of_server(way("a drain under load", &[], &call().repeat(1_000)), Ending::drain),
        of_server(way("the end of the server", &[], &[]), drop),
        of_server(way("the end of the server in a record", &call()[..20], &[]), drop),
        of_server(way("the end of the server under load", &[], &call().repeat(1_000)), drop),
    ]
}

/// Sends and reads until the connection has ended: for one that sends, until it cannot any more.
fn until_end(peer: &mut TcpStream, way: &Way, what: &str) {
    peer.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    let (mut saw_end, mut block) = (false, &way.goes_on[..]);
    while !(saw_end && way.goes_on.is_empty()) {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, way.reads && !saw_end);
        flags.set(PollFlags::OUT, !way.goes_on.is_empty());
        // Far less than the kernel's own patience with a peer that is not answered.
        let left =
            PATIENCE.checked_sub(begun.elapsed()).unwrap_or_else(|| panic!("{what}: the connection does not end"));
        poll(&mut [PollFd::new(&*peer, flags)], Some(&Timespec::try_from(left).unwrap())).unwrap();
        let mut buf = [0; 16 << 10];
        if way.reads && !saw_end {
            match peer.read(&mut buf) {
                Ok(bytes) => saw_end = bytes == 0,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        if !way.goes_on.is_empty() {
            match peer.write(block) {
                Ok(bytes) => block = if bytes < block.len() { &block[bytes..] } else { &way.goes_on[..] },
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }
}

#[test]
fn every_end_reaches_its_peer_soon() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for engine in engines() {
        for kernel in [true, false] {
            for way in ways() {
                let what = format!("{} on {engine}, kernel half: {kernel}", way.what);
                in_new_network(|| {
                    let server = Ending::start(engine, kernel, Limits::default());
                    let mut peers: Vec<TcpStream> = (0..4).map(|_| server.connect()).collect();
                    for (number, peer) in peers.iter_mut().enumerate() {
                        // Some have been with the kernel half for a while.
                        for _ in 0..number * 4 {
                            send_all(peer, &Spoken::Rpc.request(1));
                            assert_eq!(read_exactly(peer, Spoken::Rpc.reply(1).len()), Spoken::Rpc.reply(1), "{what}");
                        }
                        send_all(peer, &way.sends);
                    }
                    // Only now: no pause of this test ends a connection before.
                    server.server().set_limits(&way.limits.clone().into());
                    thread::scope(|scope| {
                        let (way, what) = (&way, &what[..]);
                        let spawn = |peer| scope.spawn(move || until_end(peer, way, what));
                        let ends: Vec<_> = peers.iter_mut().map(spawn).collect();
                        let kept = match way.server_ends {
                            Some(ends) => {
                                ends(server);
                                None
                            }
                            None => Some(server),
                        };
                        ends.into_iter().for_each(|end| end.join().unwrap());
                        drop(kept);
                    });
                });
            }
        }
    }
}
