//! Who listens in this network namespace.

mod diag;
mod proc;

use std::io;
use std::net::IpAddr;

/// A listening TCP socket of anybody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listening {
    /// A mapped address comes as IPv4, as requests to it do.
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
    pub(crate) inode: u64,
}

/// All listening TCP sockets of this thread's network namespace.
pub(crate) fn listening() -> io::Result<Vec<Listening>> {
    match diag::listening() {
        // The kernel lacks the module, or a filter of system calls forbids the socket.
        Err(_) => proc::listening(),
        found => found,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn both_ways_tell_of_the_same_listeners() {
        let listeners = ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"].map(|it| TcpListener::bind(it).unwrap());
        for listener in listeners {
            let inode = rustix::fs::fstat(&listener).unwrap().st_ino;
            let address = listener.local_addr().unwrap();
            let expected = Listening { address: address.ip().to_canonical(), port: address.port(), inode };
            for found in [diag::listening().unwrap(), proc::listening().unwrap()] {
                assert!(found.contains(&expected), "{expected:?} is not in {found:?}");
            }
        }
    }

    #[test]
    fn connections_are_not_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let inode = rustix::fs::fstat(&client).unwrap().st_ino;
        assert!(!diag::listening().unwrap().iter().any(|socket| socket.inode == inode));
    }
}
