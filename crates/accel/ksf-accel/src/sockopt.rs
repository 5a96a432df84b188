//! Options that accepted sockets inherit from their listener, copied from the program's own listener to a queue.
//!
//! A child is a copy of its listener (net/core/sock.c, `sk_clone_lock`), so whatever the program has set there, it
//! expects on what it accepts. An option is set only where it differs: setting a value can do more than its getter
//! shows (`SO_RCVBUF` fixes the size, `TCP_CONGESTION` loads a module).

use std::io;
use std::os::fd::BorrowedFd;

use crate::address::SO_BINDTOIFINDEX;
use crate::sys;

/// One option: level, number, name, and the most bytes its value has.
struct Opt(i32, i32, &'static str, usize);

macro_rules! options {
    ($($level:ident $name:ident $(= $number:literal)? $([$bytes:literal])?;)*) => {
        &[$(Opt(libc::$level, options!(@number $name $($number)?), stringify!($name), options!(@bytes $($bytes)?))),*]
    };
    (@number $name:ident $number:literal) => { $number };
    (@number $name:ident) => { libc::$name };
    (@bytes $bytes:literal) => { $bytes };
    (@bytes) => { 4 };
}

/// They decide how `bind()` goes, so they are copied before it; harmless to copy again.
const BEFORE_BIND: &[Opt] = options! {
    SOL_SOCKET SO_REUSEADDR;
    SOL_SOCKET SO_BINDTOIFINDEX = 62;
    IPPROTO_IP IP_TRANSPARENT;
    IPPROTO_IP IP_FREEBIND;
};

/// Numbers without a name in libc's crate are of `linux/tcp.h`, `linux/in6.h` and `asm-generic/socket.h`.
const INHERITED: &[Opt] = options! {
    SOL_SOCKET SO_DEBUG;
    SOL_SOCKET SO_DONTROUTE;
    SOL_SOCKET SO_KEEPALIVE;
    SOL_SOCKET SO_OOBINLINE;
    SOL_SOCKET SO_LINGER [8];
    SOL_SOCKET SO_RCVLOWAT;
    SOL_SOCKET SO_RCVTIMEO [16];
    SOL_SOCKET SO_SNDTIMEO [16];
    SOL_SOCKET SO_TIMESTAMP;
    SOL_SOCKET SO_TIMESTAMPNS;
    SOL_SOCKET SO_MARK;
    SOL_SOCKET SO_BUSY_POLL;
    SOL_SOCKET SO_PREFER_BUSY_POLL = 69;
    SOL_SOCKET SO_BUSY_POLL_BUDGET = 70;
    SOL_SOCKET SO_MAX_PACING_RATE [8];
    SOL_SOCKET SO_ZEROCOPY;
    SOL_SOCKET SO_TXREHASH = 74;
    SOL_SOCKET SO_RCVMARK = 75;
    IPPROTO_TCP TCP_NODELAY;
    IPPROTO_TCP TCP_MAXSEG;
    IPPROTO_TCP TCP_CORK;
    IPPROTO_TCP TCP_KEEPIDLE;
    IPPROTO_TCP TCP_KEEPINTVL;
    IPPROTO_TCP TCP_KEEPCNT;
    IPPROTO_TCP TCP_SYNCNT;
    IPPROTO_TCP TCP_LINGER2;
    IPPROTO_TCP TCP_DEFER_ACCEPT;
    IPPROTO_TCP TCP_WINDOW_CLAMP;
    IPPROTO_TCP TCP_QUICKACK;
    IPPROTO_TCP TCP_CONGESTION [16];
    IPPROTO_TCP TCP_THIN_LINEAR_TIMEOUTS;
    IPPROTO_TCP TCP_USER_TIMEOUT;
    IPPROTO_TCP TCP_FASTOPEN;
    IPPROTO_TCP TCP_FASTOPEN_NO_COOKIE = 34;
    IPPROTO_TCP TCP_NOTSENT_LOWAT;
    IPPROTO_TCP TCP_SAVE_SYN;
    IPPROTO_TCP TCP_INQ = 36;
    IPPROTO_TCP TCP_TX_DELAY = 37;
    IPPROTO_TCP TCP_RTO_MAX_MS = 44;
    IPPROTO_TCP TCP_RTO_MIN_US = 45;
    IPPROTO_TCP TCP_DELACK_MAX_US = 46;
    IPPROTO_IP IP_TOS;
    IPPROTO_IP IP_TTL;
    IPPROTO_IP IP_MINTTL;
    IPPROTO_IP IP_MTU_DISCOVER;
    IPPROTO_IP IP_RECVERR;
    IPPROTO_IP IP_RECVTOS;
    IPPROTO_IP IP_RECVTTL;
    IPPROTO_IP IP_PKTINFO;
    IPPROTO_IP IP_BIND_ADDRESS_NO_PORT;
    IPPROTO_IP IP_LOCAL_PORT_RANGE = 51;
    // After IP_TOS, which sets it too (net/ipv4/ip_sockglue.c, __ip_sock_set_tos).
    SOL_SOCKET SO_PRIORITY;
};

const INHERITED_IPV6: &[Opt] = options! {
    IPPROTO_IPV6 IPV6_UNICAST_HOPS;
    IPPROTO_IPV6 IPV6_MINHOPCOUNT;
    IPPROTO_IPV6 IPV6_MTU_DISCOVER;
    IPPROTO_IPV6 IPV6_DONTFRAG;
    IPPROTO_IPV6 IPV6_TCLASS;
    IPPROTO_IPV6 IPV6_AUTOFLOWLABEL = 70;
    IPPROTO_IPV6 IPV6_FLOWINFO_SEND = 33;
    IPPROTO_IPV6 IPV6_ADDR_PREFERENCES = 72;
    IPPROTO_IPV6 IPV6_RECVERR;
    IPPROTO_IPV6 IPV6_RECVTCLASS;
    IPPROTO_IPV6 IPV6_RECVHOPLIMIT;
    IPPROTO_IPV6 IPV6_RECVPKTINFO;
    SOL_SOCKET SO_PRIORITY;
};

/// An option that could not be copied: a queue without it would give the program other sockets than its own listener.
#[derive(Debug, thiserror::Error)]
#[error("{option} of the listener cannot be copied: {error}")]
pub(crate) struct NotCopied {
    option: &'static str,
    error: io::Error,
}

/// Makes `bind()` of the queue go as the listener's.
pub(crate) fn copy_before_bind(listener: BorrowedFd<'_>, queue: BorrowedFd<'_>) -> Result<(), NotCopied> {
    copy(BEFORE_BIND, listener, queue)
}

/// Makes what the queue's children inherit equal to what the listener's do.
pub(crate) fn copy_inherited(listener: BorrowedFd<'_>, queue: BorrowedFd<'_>, ipv6: bool) -> Result<(), NotCopied> {
    for (name, forced, option) in
        [(libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, "SO_RCVBUF"), (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE, "SO_SNDBUF")]
    {
        copy_buffer(listener, queue, name, forced).map_err(|error| NotCopied { option, error })?;
    }
    copy(INHERITED, listener, queue)?;
    if ipv6 {
        copy(INHERITED_IPV6, listener, queue)?;
    }
    copy_fastopen_key(listener, queue).map_err(|error| NotCopied { option: "TCP_FASTOPEN_KEY", error })?;
    copy_filter(listener, queue).map_err(|error| NotCopied { option: "SO_ATTACH_FILTER", error })
}

/// The device, which may have been chosen after the queue was made.
pub(crate) fn bound_device(socket: BorrowedFd<'_>) -> i32 {
    sys::option_i32(socket, libc::SOL_SOCKET, SO_BINDTOIFINDEX).unwrap_or(0)
}

fn copy(options: &[Opt], listener: BorrowedFd<'_>, queue: BorrowedFd<'_>) -> Result<(), NotCopied> {
    for &Opt(level, number, option, bytes) in options {
        // What the kernel does not know, the program cannot have set.
        let Ok(wanted) = sys::option(listener, level, number, bytes) else { continue };
        if sys::option(queue, level, number, bytes).is_ok_and(|present| present == wanted) {
            continue;
        }
        sys::set_option(queue, level, number, &wanted).map_err(|error| NotCopied { option, error })?;
    }
    Ok(())
}

/// The kernel doubles what it is given (`socket(7)`) and tells the double.
fn copy_buffer(listener: BorrowedFd<'_>, queue: BorrowedFd<'_>, name: i32, forced: i32) -> io::Result<()> {
    let wanted = sys::option_i32(listener, libc::SOL_SOCKET, name)?;
    if sys::option_i32(queue, libc::SOL_SOCKET, name)? == wanted {
        return Ok(());
    }
    let half = (wanted / 2).to_ne_bytes();
    // Without CAP_NET_ADMIN the limit of the machine holds, which then held for the program too.
    sys::set_option(queue, libc::SOL_SOCKET, forced, &half)
        .or_else(|_| sys::set_option(queue, libc::SOL_SOCKET, name, &half))
}

/// A listener of its own key answers cookies that only it knows; clients bring back cookies to any queue.
fn copy_fastopen_key(listener: BorrowedFd<'_>, queue: BorrowedFd<'_>) -> io::Result<()> {
    // Two keys of 16 bytes, linux/tcp.h.
    let key = |socket| sys::option(socket, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_KEY, 32);
    let Ok(wanted) = key(listener) else { return Ok(()) };
    if wanted.is_empty() || key(queue).is_ok_and(|present| present == wanted) {
        return Ok(());
    }
    sys::set_option(queue, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_KEY, &wanted)
}

fn copy_filter(listener: BorrowedFd<'_>, queue: BorrowedFd<'_>) -> io::Result<()> {
    let same = |a: &[libc::sock_filter], b: &[libc::sock_filter]| {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a.code, a.jt, a.jf, a.k) == (b.code, b.jt, b.jf, b.k))
    };
    // An eBPF filter cannot be read back: EACCES ends the copy, and with it the acceleration of this listener.
    let wanted = sys::filter(listener)?;
    if same(&wanted, &sys::filter(queue)?) {
        return Ok(());
    }
    if wanted.is_empty() {
        return sys::set_option(queue, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0i32.to_ne_bytes());
    }
    sys::attach_classic(queue, libc::SO_ATTACH_FILTER, &wanted)
}
