//! Servers on loopback, their counters, and peers that never wait for ever.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;

pub(crate) use super::calls::calls;
use ksf::engine::EngineKind;
use ksf::framing::Framing;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::{Message, Profile, Reply, Server, Service};
pub use ksf_test::stream::*;
pub use ksf_test::*;

/// The engines of this machine. Without io_uring (a container, a sysctl) half of the tests' meaning is gone, so CI
/// must have it.
pub fn engines() -> Vec<EngineKind> {
    working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe)
}

/// The same, for servers in a network of the test's own.
pub fn engines_in_own_network() -> Vec<EngineKind> {
    own_network();
    engines()
}

/// Sends back what comes.
pub struct Echo;

impl Service for Echo {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("echo", Framing::Raw)
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.chunk(message.keep());
    }
}

/// One shard, so that counts are exact and places are reused in a known order.
pub fn one_shard<S: Service>(engine: EngineKind, addr: &str, limits: Limits, service: Arc<S>) -> Server {
    assert_own_network();
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let addr = addr.parse().unwrap();
    Server::builder().engine(engine).cpus(Some(cpus)).limits(limits).listen(addr, service, None).start().unwrap()
}

/// A shard on every CPU.
pub fn all_shards<S: Service>(engine: EngineKind, addr: &str, limits: Limits, service: Arc<S>) -> Server {
    assert_own_network();
    Server::builder().engine(engine).limits(limits).listen(addr.parse().unwrap(), service, None).start().unwrap()
}

pub const ANY: &str = "tcp:127.0.0.1:0";

pub fn addr(server: &Server) -> SocketAddr {
    match server.listeners()[0].addr {
        ListenAddr::Tcp(addr) | ListenAddr::Udp(addr) => addr,
        _ => panic!("no port"),
    }
}

pub fn connect(server: &Server) -> TcpStream {
    connect_to(addr(server))
}

pub fn connect_to(addr: SocketAddr) -> TcpStream {
    assert_own_network();
    ksf_test::stream::connect(addr)
}

/// A receive buffer that fills soon, set before the window is announced.
pub fn connect_with_small_window(server: &Server) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&addr(server).into()).unwrap();
    let peer = TcpStream::from(socket);
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    peer.set_write_timeout(Some(PATIENCE)).unwrap();
    peer
}

pub fn count(server: &Server, name: &str) -> u64 {
    let counters = server.counters();
    counters.iter().find(|counter| counter.name == name).unwrap_or_else(|| panic!("no counter {name}")).value
}

/// Waits until a counter has this value, and fails if it is past it.
pub fn until_count(server: &Server, name: &str, value: u64) {
    wait_until(name, || count(server, name) >= value);
    assert_eq!(count(server, name), value, "{name}");
}

/// Lets this process have `files` descriptors, if the administrator does.
pub fn raise_files(files: u64) -> Result<(), String> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= files) {
        return Ok(());
    }
    let maximum = limit.maximum.map(|maximum| maximum.max(files));
    // Beyond the hard limit only where we are privileged.
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum })
        .map_err(|error| format!("RLIMIT_NOFILE {files}, hard limit {:?}: {error}", limit.maximum))
}

/// True when the descriptor is in non-blocking mode.
pub fn is_nonblocking(fd: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(fd).unwrap().contains(rustix::fs::OFlags::NONBLOCK)
}
