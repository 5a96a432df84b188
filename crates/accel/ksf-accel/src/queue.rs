//! A queue: a listening socket like the program's own, for one worker.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

use crate::address::{self, Address};
use crate::{sockopt as copied, sys};

/// Where queues are bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Placement {
    /// On a loopback port that only steering leads to; 0: the first of a listener chooses the port.
    Hidden(u16),
    /// On the listener's own address, as members of its reuseport group.
    Sibling,
}

/// Why there is no queue; the reason is for status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    #[error(transparent)]
    NotCopied(#[from] copied::NotCopied),
    #[error("{action} failed for a queue of {address}: {error}")]
    System { action: &'static str, address: Address, error: io::Error },
}

/// A new queue of `listener`, listening.
pub(crate) fn make(
    listener: BorrowedFd<'_>,
    address: &Address,
    place: Placement,
    backlog: i32,
) -> Result<OwnedFd, QueueError> {
    let failed =
        |action| move |error: rustix::io::Errno| QueueError::System { action, address: *address, error: error.into() };
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    // Non-blocking whatever the program's listener is: the library asks several queues in turn.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let queue =
        rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP)).map_err(failed("socket()"))?;
    take_owner(listener, &queue);
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&queue, !address.dual).map_err(failed("IPV6_V6ONLY"))?;
    }
    // Also where queues are hidden: SYN cookies are believed by all members of a group, not only by the one that sent
    // them (net/ipv4/tcp.h, tcp_synq_no_recent_overflow). Steering may choose another queue for the client's answer.
    sockopt::set_socket_reuseport(&queue, true).map_err(failed("SO_REUSEPORT"))?;
    match place {
        Placement::Sibling => {
            copied::copy_before_bind(listener, queue.as_fd())?;
            rustix::net::bind(&queue, &address.socket).map_err(failed("bind()"))?;
        }
        Placement::Hidden(port) => {
            // A namespace may have no loopback address.
            sockopt::set_ip_freebind(&queue, true).map_err(failed("IP_FREEBIND"))?;
            rustix::net::bind(&queue, &address::hidden(address, port)).map_err(failed("bind()"))?;
            copied::copy_before_bind(listener, queue.as_fd())?;
        }
    }
    copied::copy_inherited(listener, queue.as_fd(), address.is_ipv6())?;
    rustix::net::listen(&queue, backlog).map_err(failed("listen()"))?;
    Ok(queue)
}

/// Takes over what the program has set on its listener since the queue was made.
pub(crate) fn refresh(listener: BorrowedFd<'_>, queue: BorrowedFd<'_>, address: &Address) -> Result<(), QueueError> {
    // The device is part of the address that steering knows.
    if copied::bound_device(listener) != copied::bound_device(queue) {
        let error = io::Error::other("SO_BINDTODEVICE was changed after listen()");
        return Err(QueueError::System { action: "refresh", address: *address, error });
    }
    copied::copy_before_bind(listener, queue)?;
    Ok(copied::copy_inherited(listener, queue, address.is_ipv6())?)
}

/// Ends a queue for everybody who has a descriptor of it: connections that wait in it are reset.
pub(crate) fn close(queue: OwnedFd) {
    // Other processes may have its descriptor; it must not stay a listener because of them.
    let _ = rustix::net::shutdown(&queue, rustix::net::Shutdown::Both);
}

/// Resets up to `count` connections that wait in a queue. Returns how many it were.
pub(crate) fn reset_waiting(queue: BorrowedFd<'_>, count: u32) -> usize {
    let take = || rustix::net::accept_with(queue, SocketFlags::CLOEXEC).ok();
    std::iter::from_fn(take)
        .take(count as usize)
        .inspect(|taken| {
            // close() then resets.
            let _ = sockopt::set_socket_linger(taken, Some(Duration::ZERO));
        })
        .count()
}

/// The port that a queue is bound to.
pub(crate) fn port(queue: BorrowedFd<'_>) -> io::Result<u16> {
    let socket = rustix::net::getsockname(queue)?;
    std::net::SocketAddr::try_from(socket).map(|socket| socket.port()).map_err(io::Error::from)
}

/// Sockets belong to who makes them: firewall rules look at it, and a reuseport group has one owner. Without the right
/// to give a socket away it stays the holder's, and where that matters `bind()` will say so.
fn take_owner(listener: BorrowedFd<'_>, queue: &OwnedFd) {
    let (Ok(theirs), Ok(ours)) = (rustix::fs::fstat(listener), rustix::fs::fstat(queue)) else { return };
    if theirs.st_uid != ours.st_uid {
        let _ = rustix::fs::fchown(queue, Some(rustix::fs::Uid::from_raw(theirs.st_uid)), None);
    }
}

/// What the holder checks of a descriptor before it believes that it is a listener.
pub(crate) fn is_listening_tcp(socket: BorrowedFd<'_>) -> bool {
    let number = |name| sys::option_i32(socket, libc::SOL_SOCKET, name).ok();
    matches!(number(libc::SO_DOMAIN), Some(libc::AF_INET | libc::AF_INET6))
        && number(libc::SO_TYPE) == Some(libc::SOCK_STREAM)
        && number(libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
        && number(libc::SO_ACCEPTCONN) == Some(1)
}
