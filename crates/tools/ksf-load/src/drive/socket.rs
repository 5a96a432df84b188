//! Sockets: connecting to the first address that answers, and the options the methods need.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt;
use socket2::{Domain, SockAddr, Socket as RawSocket, Type};

use crate::error::LoadError;
use crate::options::target::{Endpoint, Target};

/// How messages travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Udp,
    Unix,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Udp => "udp",
            Transport::Unix => "unix",
        }
    }

    pub(crate) fn is_datagram(self) -> bool {
        self == Transport::Udp
    }
}

/// Options of every connection.
#[derive(Debug, Clone)]
pub(crate) struct SocketOptions {
    pub(crate) transport: Transport,
    pub(crate) nodelay: bool,
    /// How long a connect may take.
    pub(crate) connect_timeout: Duration,
    /// How long a blocking receive waits before the loop looks at its time limits.
    pub(crate) tick: Duration,
    /// SO_SNDBUF and SO_RCVBUF; the system's own sizes where absent.
    pub(crate) send_buffer_bytes: Option<usize>,
    pub(crate) receive_buffer_bytes: Option<usize>,
}

impl SocketOptions {
    /// The system's sizes; no TCP_NODELAY.
    pub(crate) fn new(transport: Transport, connect_timeout: Duration) -> SocketOptions {
        SocketOptions {
            transport,
            nodelay: false,
            connect_timeout,
            tick: connect_timeout,
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
        }
    }
}

/// A connected socket.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
    pub(crate) peer: Endpoint,
}

impl Socket {
    /// Tries the endpoints in turn; the first connection wins.
    pub(crate) fn connect(
        target: &Target,
        endpoints: &[Endpoint],
        options: &SocketOptions,
    ) -> Result<Socket, LoadError> {
        let mut reasons = Vec::new();
        for endpoint in endpoints {
            match Socket::connect_to(endpoint, options) {
                Ok(socket) => return Ok(socket),
                Err(error) => reasons.push(format!("{endpoint}: {error}")),
            }
        }
        Err(LoadError::Unreachable { target: target.to_string(), reasons: reasons.join(", ") })
    }

    /// Connects to one endpoint.
    pub(crate) fn connect_to(endpoint: &Endpoint, options: &SocketOptions) -> io::Result<Socket> {
        let socket = match endpoint {
            Endpoint::Inet(address) => {
                let kind = if options.transport.is_datagram() { Type::DGRAM } else { Type::STREAM };
                let socket = RawSocket::new(Domain::for_address(*address), kind, None)?;
                // Before the handshake, which announces the window.
                set_buffers(&socket, options)?;
                socket.connect_timeout(&SockAddr::from(*address), options.connect_timeout)?;
                if options.transport == Transport::Tcp && options.nodelay {
                    socket.set_tcp_nodelay(true)?;
                }
                socket
            }
            Endpoint::Unix(path) => {
                let socket = RawSocket::new(Domain::UNIX, Type::STREAM, None)?;
                set_buffers(&socket, options)?;
                // A full backlog makes connect wait; for Unix-domain sockets the send timeout bounds that (unix(7)).
                socket.set_write_timeout(Some(options.connect_timeout))?;
                socket.connect(&SockAddr::unix(path)?)?;
                socket
            }
        };
        let fd = OwnedFd::from(socket);
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(options.tick))?;
        Ok(Socket { fd, peer: endpoint.clone() })
    }
}

impl Socket {
    /// Exchanges messages one by one before the loop begins: every call waits for at most the time that a connect may take.
    pub(crate) fn converse<T>(
        &self,
        options: &SocketOptions,
        talk: impl FnOnce(&mut RawSocket) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut stream = RawSocket::from(self.fd.try_clone()?);
        stream.set_read_timeout(Some(options.connect_timeout))?;
        stream.set_write_timeout(Some(options.connect_timeout))?;
        let result = talk(&mut stream)?;
        // The timeout is that of the socket, not of the descriptor.
        stream.set_read_timeout(Some(options.tick))?;
        Ok(result)
    }
}

/// Whether what comes in on a socket is handled on another CPU than this thread's (SO_INCOMING_CPU, socket(7)). On
/// loopback and between network namespaces that is the CPU of the server. `None` where it cannot be told: nothing has
/// come yet, or the socket is a Unix-domain one.
pub(crate) fn is_apart(socket: &OwnedFd) -> Option<bool> {
    let cpu = sockopt::socket_incoming_cpu(socket).ok()?;
    (cpu <= i32::MAX as u32).then(|| cpu as usize != rustix::thread::sched_getcpu())
}

/// Datagrams the kernel dropped because this socket's receive buffer was full, from /proc/net/udp{,6}.
pub(crate) fn dropped_datagrams(socket: &OwnedFd) -> Option<u64> {
    let inode = rustix::fs::fstat(socket).ok()?.st_ino.to_string();
    ["/proc/net/udp", "/proc/net/udp6"].iter().find_map(|file| {
        let table = std::fs::read_to_string(file).ok()?;
        dropped_in(&table, &inode)
    })
}

fn set_buffers(socket: &RawSocket, options: &SocketOptions) -> io::Result<()> {
    if let Some(bytes) = options.send_buffer_bytes {
        socket.set_send_buffer_size(bytes)?;
    }
    if let Some(bytes) = options.receive_buffer_bytes {
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(())
}

/// The `drops` column (the last) of the line whose `inode` column (the tenth) matches.
fn dropped_in(table: &str, inode: &str) -> Option<u64> {
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        if columns.get(9) == Some(&inode) { columns.last()?.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn drops_are_read_from_the_kernel_table() {
        // Two lines as Linux prints them.
        let table = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n\
             1031: 0100007F:EA67 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4242 2 0000000000000000 17\n\
             1032: 0100007F:EA68 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4243 2 0000000000000000 0\n";
        assert_eq!(dropped_in(table, "4242"), Some(17));
        assert_eq!(dropped_in(table, "4243"), Some(0));
        assert_eq!(dropped_in(table, "99"), None);
    }

    #[test]
    fn a_full_receive_buffer_is_seen_as_our_own_drops() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut options = SocketOptions::new(Transport::Udp, Duration::from_secs(5));
        options.receive_buffer_bytes = Some(1);
        let peer = Endpoint::Inet(server.local_addr().unwrap());
        let socket = Socket::connect_to(&peer, &options).unwrap();
        rustix::net::send(&socket.fd, b"hello", rustix::net::SendFlags::empty()).unwrap();
        let (_, client) = server.recv_from(&mut [0; 16]).unwrap();
        for _ in 0..1000 {
            server.send_to(&[0; 1000], client).unwrap();
        }
        assert!(dropped_datagrams(&socket.fd).unwrap() > 0);
    }

    #[test]
    fn the_second_address_is_tried_and_all_failures_are_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let open = Endpoint::Inet(listener.local_addr().unwrap());
        // A port that was free a moment ago: bound and closed again without listening.
        let closed = {
            let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            Endpoint::Inet(probe.local_addr().unwrap())
        };
        let target = Target::parse("some.host", 1).unwrap();
        let options = SocketOptions::new(Transport::Tcp, Duration::from_secs(5));
        let socket = Socket::connect(&target, &[closed.clone(), open.clone()], &options).unwrap();
        assert_eq!(socket.peer, open);
        let error = Socket::connect(&target, &[closed.clone(), closed.clone()], &options).unwrap_err();
        assert_eq!(error.exit_code(), 69);
        assert_eq!(error.to_string().matches("refused").count(), 2, "{error}");
    }
}
