//! What user space asks a TCP socket.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

// Offsets in struct tcp_info (linux/tcp.h), stable since the fields came, the last ones in Linux 4.1.
const TOTAL_RETRANS: usize = 100;
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;
const TCP_INFO_BYTES: usize = 136;

/// Bytes received in order, the FIN counted as one. Takes the socket's lock: no verdict program is running on it any
/// more when this returns.
pub(crate) fn received(socket: BorrowedFd<'_>) -> io::Result<u64> {
    count(socket, BYTES_RECEIVED)
}

/// Whether TCP has taken `bytes` for sending in all, sent or not.
///
/// By sequence numbers. `tcpi_bytes_sent` less `tcpi_bytes_retrans` is more than was sent where a queueing discipline
/// of this machine drops: TCP sends such a segment again and does not call that a retransmission (seen on 6.18).
pub(crate) fn has_taken(socket: BorrowedFd<'_>, bytes: u64) -> io::Result<bool> {
    // Acknowledged first: what is acknowledged between the two calls is missing in the sum, and never in it twice.
    let acknowledged = count(socket, BYTES_ACKED)?;
    Ok(acknowledged >= bytes || acknowledged + unacknowledged(socket)? >= bytes)
}

/// Segments that were sent more than once.
pub(crate) fn sent_again(socket: BorrowedFd<'_>) -> io::Result<u32> {
    // The first of two numbers of 32 bits.
    let [a, b, c, d, ..] = count(socket, TOTAL_RETRANS)?.to_ne_bytes();
    Ok(u32::from_ne_bytes([a, b, c, d]))
}

fn count(socket: BorrowedFd<'_>, at: usize) -> io::Result<u64> {
    let mut info = [0u8; TCP_INFO_BYTES];
    let got = sockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    if got < TCP_INFO_BYTES {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "struct tcp_info ends before tcpi_bytes_received"));
    }
    Ok(u64::from_ne_bytes(info[at..at + 8].try_into().expect("eight bytes")))
}

/// SIOCOUTQ: from the first byte that is not acknowledged to the last TCP has taken.
fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which is TIOCOUTQ, writes an int, and `bytes` lives for the call.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes as u64) }
}

/// The socket's cookie: a number the kernel never uses twice.
pub(crate) fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut cookie = [0u8; 8];
    sockopt(socket, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    Ok(u64::from_ne_bytes(cookie))
}

pub(crate) fn set_rcvlowat(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    set_int(socket, libc::SO_RCVLOWAT, bytes as i32)
}

/// SO_RCVLOWAT.
pub(crate) fn rcvlowat(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut value = [0; size_of::<u32>()];
    sockopt(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &mut value)?;
    Ok(u32::from_ne_bytes(value))
}

/// Sets SO_SNDBUF beyond the system's limit (needs CAP_NET_ADMIN), or up to it.
pub(crate) fn set_sndbuf(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    set_int(socket, libc::SO_SNDBUFFORCE, bytes as i32).or_else(|_| set_int(socket, libc::SO_SNDBUF, bytes as i32))
}

fn set_int(socket: BorrowedFd<'_>, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the option value is an int that lives for the call, and its size is given.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_ref(&value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn sockopt(socket: BorrowedFd<'_>, level: i32, option: i32, value: &mut [u8]) -> io::Result<usize> {
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: `value` is writable for `len` bytes; the kernel writes no more and says how much.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(len as usize) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::thread;

    use ksf_test::{own_network_or_skip, tc};

    use super::*;

    #[test]
    fn what_this_machine_drops_is_not_taken_twice() {
        const PIECE: usize = 20_000;
        const PIECES: usize = 500;
        let Some(()) = own_network_or_skip("a queueing discipline") else { return };
        // A queue too short for what TCP sends in one go.
        tc("qdisc add dev lo root tbf rate 400mbit burst 128kb limit 140kb");
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let reader = thread::spawn(move || client.read_to_end(&mut Vec::new()).unwrap());
        for piece in 1..=PIECES {
            server.write_all(&[7; PIECE]).unwrap();
            let bytes = (piece * PIECE) as u64;
            assert!(!has_taken(server.as_fd(), bytes + 1).unwrap(), "more than {bytes} bytes");
        }
        let statistics = tc("-s qdisc show dev lo");
        assert!(!statistics.contains("dropped 0,"), "nothing was dropped: {statistics}");
        // An acknowledgement between its two questions makes it say no for once.
        while !has_taken(server.as_fd(), (PIECES * PIECE) as u64).unwrap() {}
        drop(server);
        assert_eq!(reader.join().unwrap(), PIECES * PIECE);
    }
}
