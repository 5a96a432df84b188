//! Listening sockets: one per shard, and each connection goes to the shard whose CPU received its SYN.
//!
//! The first socket of an address is bound without SO_REUSEPORT, so that an address that another program listens on is
//! reported as busy instead of being shared in silence; the option is set right after, and the other shards' sockets
//! join. A classic BPF program on the group maps the receiving CPU to the shard of that CPU
//! (SO_ATTACH_REUSEPORT_CBPF, Linux 4.5); packets from CPUs without a shard are spread.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, mem};

use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, TcpKeepalive, Type};

use crate::error::Error;

/// A connection of TCP on which nothing was sent for this time is asked for (tcp(7)), and ended after this many questions without
/// an answer, or when the peer's kernel does not know it: two minutes after the peer has vanished.
const KEEPALIVE_IDLE: Duration = Duration::from_mins(1);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;

/// Where a service listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ListenAddr {
    /// TCP; port 0 lets the kernel choose.
    Tcp(SocketAddr),
    /// UDP; port 0 lets the kernel choose.
    Udp(SocketAddr),
    /// A Unix-domain stream socket at this path.
    Unix(PathBuf),
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => write!(f, "tcp {addr}"),
            Self::Udp(addr) => write!(f, "udp {addr}"),
            Self::Unix(path) => write!(f, "unix {}", path.display()),
        }
    }
}

impl FromStr for ListenAddr {
    type Err = String;

    /// `tcp:ADDR:PORT`, `udp:ADDR:PORT`, `unix:PATH`, or `ADDR:PORT` for TCP; IPv6 addresses in brackets.
    fn from_str(text: &str) -> Result<Self, String> {
        let inet = |addr: &str| {
            let hint = "want ADDR:PORT, with IPv6 addresses in brackets, as in 127.0.0.1:60007 or [::1]:60007";
            addr.parse().map_err(|_| format!("cannot read the address {addr:?}: {hint}"))
        };
        match text.split_once(':') {
            Some(("unix", "")) => Err("unix: needs a path, as in unix:/run/ksf/echo.sock".into()),
            Some(("unix", path)) => Ok(Self::Unix(path.into())),
            Some(("tcp", addr)) => inet(addr).map(Self::Tcp),
            Some(("udp", addr)) => inet(addr).map(Self::Udp),
            _ => inet(text).map(Self::Tcp),
        }
    }
}

/// Source and destination of a datagram: what is needed to answer it from the right address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramPeer {
    /// The sender.
    pub addr: SocketAddr,
    /// The address the datagram was sent to and the interface it came from, where the socket is bound to a wildcard. Of a
    /// broadcast or a multicast it is an address of that interface, or unspecified: the kernel then chooses one.
    pub local: Option<(IpAddr, u32)>,
}

/// True if `from` is the address of a socket that is bound to one of `bound`. Of one that is bound to a wildcard these are all
/// addresses of this machine with its port.
pub(crate) fn is_own(from: SocketAddr, bound: &[SocketAddr]) -> bool {
    let ip = from.ip().to_canonical();
    bound.iter().filter(|own| own.port() == from.port()).any(|own| match own.ip().to_canonical() {
        own if own.is_unspecified() => (ip.is_ipv4() || own.is_ipv6()) && is_of_this_machine(from),
        own => own == ip,
    })
}

/// Asks the kernel: only an address of this machine can be bound. Where others can be, too (`ip_nonlocal_bind`), all are.
fn is_of_this_machine(addr: SocketAddr) -> bool {
    let ip = addr.ip().to_canonical();
    let any_port = match addr {
        SocketAddr::V6(addr) if ip.is_ipv6() => SocketAddrV6::new(*addr.ip(), 0, 0, addr.scope_id()).into(),
        _ => SocketAddr::new(ip, 0),
    };
    ip.is_loopback() || UdpSocket::bind(any_port).is_ok()
}

/// The sockets of one listener, one per shard.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) addr: ListenAddr,
    pub(crate) sockets: Vec<OwnedFd>,
    /// Another process may listen on them, too, now or later.
    pub(crate) handed_over: bool,
    pub(crate) unlink: Option<UnlinkOnDrop>,
}

/// Removes a Unix-domain socket's path when its listener ends.
#[derive(Debug)]
pub(crate) struct UnlinkOnDrop(PathBuf);

impl Drop for UnlinkOnDrop {
    fn drop(&mut self) {
        // Another process may have removed it already.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Options for new listening sockets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SocketOptions {
    /// Send buffer that accepted connections inherit; 0 leaves the kernel's own sizing.
    pub(crate) send_buffer_bytes: usize,
    /// Connections are accepted with their first bytes.
    pub(crate) defer_accept: bool,
}

/// Opens one socket per CPU of `cpus`, in that order.
pub(crate) fn open(addr: &ListenAddr, cpus: &[usize], options: SocketOptions) -> Result<Sockets, Error> {
    match addr {
        ListenAddr::Tcp(at) | ListenAddr::Udp(at) => open_inet(addr, *at, cpus, options),
        ListenAddr::Unix(path) => open_unix(addr, path, cpus.len()),
    }
}

/// Takes over a socket that another process made (socket activation): all shards accept from it. Accepted TCP connections have
/// keepalive: that of the socket, or ours if it has none.
pub(crate) fn inherit(socket: OwnedFd, shards: usize) -> Result<Sockets, Error> {
    let addr = describe(&socket);
    let fail = |step| {
        let addr = addr.clone();
        move |source| Error::Listen { addr, step, source }
    };
    if matches!(addr, ListenAddr::Tcp(_)) && !SockRef::from(&socket).keepalive().map_err(fail("SO_KEEPALIVE"))? {
        keep_alive(&SockRef::from(&socket)).map_err(fail("SO_KEEPALIVE"))?;
    }
    let mut sockets = Vec::with_capacity(shards);
    for _ in 1..shards {
        sockets.push(socket.try_clone().map_err(fail("dup"))?);
    }
    sockets.push(socket);
    Ok(Sockets { addr, sockets, handed_over: true, unlink: None })
}

fn describe(socket: &OwnedFd) -> ListenAddr {
    let socket = SockRef::from(socket);
    let addr = socket.local_addr().ok();
    let datagram = socket.r#type().is_ok_and(|kind| kind == Type::DGRAM);
    match addr.as_ref().and_then(SockAddr::as_socket) {
        Some(addr) if datagram => ListenAddr::Udp(addr),
        Some(addr) => ListenAddr::Tcp(addr),
        None => ListenAddr::Unix(addr.and_then(|addr| addr.as_pathname().map(Path::to_owned)).unwrap_or_default()),
    }
}

/// Checks that `addr` can be bound, for a start that takes long before it listens: binds it and closes the socket at once, so
/// no connection is accepted. Of a Unix-domain path it checks only that no server listens there.
///
/// # Errors
///
/// [`Error::AddrInUse`] and [`Error::Listen`], as [`Builder::start`](crate::server::Builder::start) returns them.
pub fn check(addr: &ListenAddr) -> Result<(), Error> {
    let (at, stream) = match addr {
        ListenAddr::Tcp(at) => (*at, true),
        ListenAddr::Udp(at) => (*at, false),
        ListenAddr::Unix(path) if UnixStream::connect(path).is_ok() => {
            return Err(Error::AddrInUse { addr: addr.clone() });
        }
        ListenAddr::Unix(_) => return Ok(()),
    };
    let socket = inet_socket(addr, at, stream)?;
    bind(&socket, at, true).map_err(inet_error(addr, "bind"))
}

fn inet_error(addr: &ListenAddr, step: &'static str) -> impl FnOnce(io::Error) -> Error {
    let addr = addr.clone();
    move |source| match source.raw_os_error() {
        Some(libc::EADDRINUSE) => Error::AddrInUse { addr },
        _ => Error::Listen { addr, step, source },
    }
}

/// A socket for `at` with the options that it has before it is bound.
fn inet_socket(addr: &ListenAddr, at: SocketAddr, stream: bool) -> Result<Socket, Error> {
    let (kind, protocol) = if stream { (Type::STREAM, Protocol::TCP) } else { (Type::DGRAM, Protocol::UDP) };
    let socket = Socket::new(Domain::for_address(at), kind, Some(protocol)).map_err(inet_error(addr, "socket"))?;
    if at.is_ipv6() {
        socket.set_only_v6(true).map_err(inet_error(addr, "IPV6_V6ONLY"))?;
    }
    if stream {
        socket.set_reuse_address(true).map_err(inet_error(addr, "SO_REUSEADDR"))?;
    }
    Ok(socket)
}

fn open_inet(addr: &ListenAddr, mut at: SocketAddr, cpus: &[usize], options: SocketOptions) -> Result<Sockets, Error> {
    let fail = |step| inet_error(addr, step);
    let stream = matches!(addr, ListenAddr::Tcp(_));
    let mut sockets: Vec<OwnedFd> = Vec::with_capacity(cpus.len());
    for _ in cpus {
        let first = sockets.is_empty();
        let socket = inet_socket(addr, at, stream)?;
        if stream {
            // Inherited by accepted connections: replies are batched by the shard, not by Nagle.
            socket.set_tcp_nodelay(true).map_err(fail("TCP_NODELAY"))?;
            keep_alive(&socket).map_err(fail("SO_KEEPALIVE"))?;
            if options.send_buffer_bytes > 0 {
                set_send_buffer(&socket, options.send_buffer_bytes).map_err(fail("SO_SNDBUF"))?;
            }
        } else if at.ip().is_unspecified() {
            set_pktinfo(&socket, at.is_ipv6()).map_err(fail("IP_PKTINFO"))?;
        }
        if stream && options.defer_accept {
            // In seconds, rounded up to retransmissions of the SYN-ACK (inet_csk_reqsk_queue_hash_add): one.
            let seconds: libc::c_int = 1;
            set_option(&socket, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &seconds)
                .map_err(fail("TCP_DEFER_ACCEPT"))?;
        }
        if !first {
            socket.set_reuse_port(true).map_err(fail("SO_REUSEPORT"))?;
        }
        bind(&socket, at, first).map_err(fail("bind"))?;
        socket.set_reuse_port(true).map_err(fail("SO_REUSEPORT"))?;
        if stream {
            socket.listen(BACKLOG).map_err(fail("listen"))?;
        }
        if first {
            let bound = socket.local_addr().map_err(fail("getsockname"))?;
            at = bound.as_socket().unwrap_or(at);
        }
        sockets.push(socket.into());
    }
    if cpus.len() > 1 {
        attach_steering(&sockets[0], cpus).map_err(fail("SO_ATTACH_REUSEPORT_CBPF"))?;
    }
    let addr = if stream { ListenAddr::Tcp(at) } else { ListenAddr::Udp(at) };
    Ok(Sockets { addr, sockets, handed_over: false, unlink: None })
}

/// Sets the keepalive that accepted connections inherit. By default nothing else ends an idle connection whose peer has
/// vanished.
fn keep_alive(socket: &Socket) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_PROBES))
}

/// Binds; the first socket of a listener is patient, because a server that was killed releases its sockets a little
/// after its end (io_uring closes its ring from a work queue).
fn bind(socket: &Socket, at: SocketAddr, patient: bool) -> io::Result<()> {
    let mut tries = if patient { BIND_TRIES } else { 1 };
    loop {
        tries -= 1;
        match socket.bind(&at.into()) {
            Err(error) if tries > 0 && error.kind() == io::ErrorKind::AddrInUse => std::thread::sleep(BIND_PAUSE),
            result => return result,
        }
    }
}

const BIND_TRIES: u32 = 10;
const BIND_PAUSE: std::time::Duration = std::time::Duration::from_millis(25);

/// The kernel caps it at net.core.somaxconn.
const BACKLOG: i32 = 4096;

fn open_unix(addr: &ListenAddr, path: &Path, shards: usize) -> Result<Sockets, Error> {
    let fail = |step| {
        let addr = addr.clone();
        move |source| Error::Listen { addr, step, source }
    };
    remove_stale(path).map_err(|busy| match busy {
        Some(source) => fail("removing a stale socket")(source),
        None => Error::AddrInUse { addr: addr.clone() },
    })?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(fail("socket"))?;
    let name = SockAddr::unix(path).map_err(fail("socket path"))?;
    socket.bind(&name).map_err(fail("bind"))?;
    let unlink = Some(UnlinkOnDrop(path.to_owned()));
    socket.listen(BACKLOG).map_err(fail("listen"))?;
    let shared = inherit(socket.into(), shards)?;
    Ok(Sockets { addr: addr.clone(), sockets: shared.sockets, handed_over: false, unlink })
}

/// Lets a listening TCP socket begin no further handshake; those that were begun can still be completed. A connection
/// request is dropped, and asked again by its TCP a second later, when this socket is closed and another one, or none, has
/// the port. For sockets that are about to be closed: a connection whose handshake ended behind the last accept would be
/// reset with them, and one that is refused is not. Connections accepted from now on inherit the filter, and receive no
/// such segment.
pub(crate) fn begin_no_handshake(socket: &OwnedFd) -> io::Result<()> {
    // A socket filter of a TCP socket sees the segment from its header on (tcp_filter). The flags of RFC 9293, 3.1.
    const FLAGS_AT: u32 = 13;
    const SYN: u32 = 0x02;
    const WHOLE: u32 = u32::MAX;
    let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, FLAGS_AT),
        instruction(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 0, 1, SYN),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, WHOLE),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
}

/// Removes a socket that a dead server left at `path`. `Err(None)`: a server listens there.
fn remove_stale(path: &Path) -> Result<(), Option<io::Error>> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Some(error)),
        Ok(meta) if !meta.file_type().is_socket() => {
            Err(Some(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket has this name")))
        }
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path).map_err(Some),
            Ok(_) => Err(None),
            Err(error) => Err(Some(error)),
        },
    }
}

/// Beyond net.core.wmem_max where the process may (CAP_NET_ADMIN), else up to it.
fn set_send_buffer(socket: &Socket, bytes: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    if set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &value).is_ok() {
        return Ok(());
    }
    socket.set_send_buffer_size(bytes)
}

/// Asks for the destination address of each datagram.
fn set_pktinfo(socket: &Socket, v6: bool) -> io::Result<()> {
    let on: libc::c_int = 1;
    if v6 {
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, &on)
    } else {
        set_option(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, &on)
    }
}

/// "Return the place of the receiving CPU among `cpus`" in classic BPF.
fn attach_steering(socket: &OwnedFd, cpus: &[usize]) -> io::Result<()> {
    // SKF_AD_OFF + SKF_AD_CPU, Documentation/networking/filter.rst.
    const LOAD_CPU: u32 = (-0x1000i32 + 36) as u32;
    let instruction = |code: u32, jt, k| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let mut program = vec![instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, LOAD_CPU)];
    for (shard, cpu) in cpus.iter().enumerate() {
        let mut test = instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, *cpu as u32);
        test.jf = 1;
        program.push(test);
        program.push(instruction(libc::BPF_RET | libc::BPF_K, 0, shard as u32));
    }
    program.push(instruction(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, 0, cpus.len() as u32));
    program.push(instruction(libc::BPF_RET | libc::BPF_A, 0, 0));
    let len = u16::try_from(program.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let filter = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, &filter)
}

pub(crate) fn set_option<T>(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: `value` is a live reference and the length is its size; the kernel copies it (and, for a filter, the
    // program it points to, which the caller keeps alive) before it returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            mem::size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_and_say_what_is_wrong() {
        assert_eq!("127.0.0.1:7".parse(), Ok(ListenAddr::Tcp("127.0.0.1:7".parse().unwrap())));
        assert_eq!("udp:[::1]:7".parse(), Ok(ListenAddr::Udp("[::1]:7".parse().unwrap())));
        assert_eq!("unix:/a:b".parse(), Ok(ListenAddr::Unix("/a:b".into())));
        assert!("::1:7".parse::<ListenAddr>().is_err());
        assert!("localhost".parse::<ListenAddr>().unwrap_err().contains("ADDR:PORT"));
    }

    #[test]
    fn a_busy_port_is_reported_even_if_its_owner_shares_it() {
        let cpus = crate::cpus::allowed().unwrap();
        let any = ListenAddr::Tcp("127.0.0.1:0".parse().unwrap());
        let first = open(&any, &cpus, SocketOptions::default()).unwrap();
        assert_eq!(first.sockets.len(), cpus.len());
        let second = open(&first.addr, &cpus, SocketOptions::default());
        assert!(matches!(second, Err(Error::AddrInUse { addr }) if addr == first.addr));
        let any = ListenAddr::Udp("[::1]:0".parse().unwrap());
        let first = open(&any, &cpus, SocketOptions::default()).unwrap();
        assert!(matches!(open(&first.addr, &cpus, SocketOptions::default()), Err(Error::AddrInUse { .. })));
    }

    #[test]
    fn a_listener_that_begins_no_handshake_loses_no_connection_when_it_closes() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let mut before = std::net::TcpStream::connect(at).unwrap();
        let listener = OwnedFd::from(listener);
        begin_no_handshake(&listener).unwrap();
        // Without the filter the kernel would end this handshake before the call returns.
        let after = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        after.set_nonblocking(true).unwrap();
        assert_eq!(after.connect(&at.into()).unwrap_err().raw_os_error(), Some(libc::EINPROGRESS));
        let mut accepted = std::net::TcpListener::from(listener.try_clone().unwrap()).accept().unwrap().0;
        drop(listener);
        use std::io::{Read, Write};
        let mut got = [0; 5];
        before.write_all(b"hello").unwrap();
        accepted.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        // Asked again by TCP, and refused.
        let mut ends = [rustix::event::PollFd::new(&after, rustix::event::PollFlags::OUT)];
        rustix::event::poll(&mut ends, None).unwrap();
        let error = after.take_error().unwrap().expect("a connection that nobody accepted");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_stale_unix_socket_is_replaced_and_a_live_one_is_not() {
        let folder = ksf_test::Folder::new();
        let addr = ListenAddr::Unix(folder.path("socket"));
        drop(std::os::unix::net::UnixListener::bind(folder.path("socket")).unwrap());
        let live = open(&addr, &[0], SocketOptions::default()).unwrap();
        assert!(matches!(open(&addr, &[0], SocketOptions::default()), Err(Error::AddrInUse { .. })));
        drop(live);
        assert!(!folder.path("socket").exists(), "the path is left behind");
        std::fs::write(folder.path("socket"), "data").unwrap();
        assert!(matches!(open(&addr, &[0], SocketOptions::default()), Err(Error::Listen { .. })));
    }

    #[test]
    fn own_addresses_are_told_from_others() {
        for (from, bound, own) in [
            ("127.0.0.1:9", "127.0.0.1:9", true),
            ("127.0.0.1:8", "127.0.0.1:9", false),
            ("127.0.0.2:9", "127.0.0.1:9", false),
            ("[::ffff:127.0.0.1]:9", "127.0.0.1:9", true),
            ("127.0.0.1:9", "[::ffff:127.0.0.1]:9", true),
            ("[::1]:9", "[::1]:9", true),
            ("127.0.0.1:9", "[::1]:9", false),
            ("127.0.0.7:9", "0.0.0.0:9", true),
            ("127.0.0.1:8", "0.0.0.0:9", false),
            ("192.0.2.1:9", "0.0.0.0:9", false),
            ("[::1]:9", "[::]:9", true),
            ("[2001:db8::1]:9", "[::]:9", false),
            ("[::ffff:127.0.0.1]:9", "[::]:9", true),
            ("[::ffff:192.0.2.1]:9", "[::]:9", false),
            ("[::1]:9", "0.0.0.0:9", false),
        ] {
            let (from, bound): (SocketAddr, SocketAddr) = (from.parse().unwrap(), bound.parse().unwrap());
            let other = "127.0.0.1:7".parse().unwrap();
            assert_eq!(is_own(from, &[other, bound]), own, "{from} at {bound}");
        }
    }
}
