//! A server starts whole or not at all, and says why.

use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::net::*;
use ksf::assist::{Assist, AssistConn};
use ksf::engine::EngineKind;
use ksf::framing::Framing;
use ksf::listener::ListenAddr;
use ksf::{Error, Message, Peer, Profile, Refused, Reply, Server, Service};

/// Takes so many datagram sockets, and refuses further ones. Counts what it got back.
struct Takes {
    sockets: u64,
    taken: AtomicU64,
    returned: AtomicU64,
}

impl Takes {
    fn new(sockets: u64) -> Arc<Self> {
        Arc::new(Self { sockets, taken: AtomicU64::new(0), returned: AtomicU64::new(0) })
    }
}

impl Service for Takes {
    ksf::stateless!(shard);
    type Conn = ();

    fn profile(&self) -> Profile<'_> {
        Profile::new("takes", Framing::Raw)
    }

    fn accept(&self, (): &mut (), peer: &Peer) -> Result<(), Refused> {
        assert!(matches!(peer, Peer::Udp(_)), "nobody connects");
        let taken = self
            .taken
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |taken| (taken < self.sockets).then_some(taken + 1));
        taken.map(drop).map_err(|_| Refused)
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.bytes(message.bytes());
    }

    fn close(&self, (): &mut (), (): ()) {
        self.returned.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_datagram_socket_that_the_service_refuses_is_an_error_at_the_start() {
    for engine in engines_in_own_network() {
        let service = Takes::new(1);
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let udp = || "udp:127.0.0.1:0".parse().unwrap();
        let builder =
            Server::builder().engine(engine).cpus(Some(cpus)).listen(ANY.parse().unwrap(), Arc::new(Echo), None);
        let builder = builder.listen(udp(), Arc::clone(&service), None).listen(udp(), Arc::clone(&service), None);
        let error = builder.start().err().expect("a listener without a service must not start");
        let Error::RefusedByService { service: name, addr: ListenAddr::Udp(addr) } = error else {
            panic!("{engine}: {error}")
        };
        assert_eq!(name, "takes");
        assert_eq!(service.returned.load(Ordering::SeqCst), 1, "{engine}: the state of the first socket is lost");
        assert_eq!(Arc::strong_count(&service), 1, "{engine}: something is left of the server");
        // Its port is real, and free again.
        assert_ne!(addr.port(), 0);
        UdpSocket::bind(addr).unwrap();
    }
}

/// A kernel half whose descriptor for wake-ups cannot be waited for.
struct Silent(File);

impl Assist for Silent {
    fn attach(&self, _: BorrowedFd<'_>) -> Option<Box<dyn AssistConn>> {
        None
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn wake_fd(&self, _: usize) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

/// Only epoll knows beforehand: io_uring takes a regular file for one that is always ready.
#[test]
fn a_descriptor_that_cannot_be_watched_is_an_error_at_the_start() {
    own_network();
    let half = Arc::new(Silent(File::open(std::env::current_exe().unwrap()).unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let builder = Server::builder().engine(EngineKind::Epoll).inherit(listener.into(), Arc::new(Echo), Some(half));
    match builder.start() {
        Err(Error::Engine { engine, step, source }) => {
            assert_eq!((engine, step), ("epoll", "epoll_ctl"));
            assert_eq!(source.raw_os_error(), Some(libc::EPERM));
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it would never hear of what the kernel half passes on"),
    }
}
