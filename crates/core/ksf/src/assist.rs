//! The seam to the half of a service that runs in the kernel.
//!
//! A kernel half answers messages before user space sees them, and leaves the rest, in order, to the shard. The
//! two agree on one rule: the kernel half answers only while user space owes this connection nothing, and user space
//! sends only when TCP has taken everything the kernel half queued. So replies keep their order, no half cuts into the
//! other's message, and under pipelining, where user space always owes something, user space does the batching.
//!
//! # Parking
//!
//! A socket under a sockmap verdict wakes the thread that polls it for input at every segment, also at those the kernel half
//! answered (`sk_psock_verdict_data_ready`, Linux 6.18): measured, that costs an eighth of the round trip and a
//! core's worth of empty wake-ups. So a settled connection can be parked: the engine stops polling it for input
//! (epoll: `EPOLL_CTL_MOD` to `EPOLLRDHUP`; io_uring: cancel the receive, keep a poll for `POLLRDHUP`), and the kernel
//! half wakes the shard through [`Assist::wake_fd`] with the connection's token when something was passed to it. Then
//! the engine calls [`AssistConn::unpark`] and polls for input as before. The wake-up is sent just before the bytes
//! become readable, so the engine must arm its poll or receive and not conclude anything from a first `EAGAIN`.
//! An engine that never parks is correct, only slower.

use std::os::fd::BorrowedFd;

/// A kernel half that may answer messages of stream connections before user space sees them.
pub trait Assist: Send + Sync + 'static {
    /// Puts a connected TCP socket under the kernel half; `None` (counted) when it has no room or refuses. The engine
    /// reads the socket once after this, because bytes that had arrived before wait for the next segment otherwise.
    /// Attach before the first receive, or when all that has arrived was read: the kernel would give the kernel half a
    /// segment that was read in part as a whole (tcp_read_skb, Linux 6.18).
    fn attach(&self, socket: BorrowedFd<'_>) -> Option<Box<dyn AssistConn>>;

    /// Counters of the kernel half: name and value.
    fn counters(&self) -> Vec<(&'static str, u64)>;

    /// Readable (level-triggered) while parked connections of `shard` wait for user space; poll it like any descriptor.
    /// `None`: this half does not park for that shard.
    fn wake_fd(&self, _shard: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes the wake-ups that wait for `shard` and calls `wake` with the [`AssistConn::token`] of each connection.
    /// One thread per shard calls this. A token may belong to a connection that is gone: ignore it.
    fn take_wakes(&self, _shard: usize, _wake: &mut dyn FnMut(u64)) {}
}

/// One connection under a kernel half. Dropping it takes the socket out. `socket` is always
/// the socket it was made for.
pub trait AssistConn: Send {
    /// Reply bytes the kernel half has queued so far: a plain load from shared memory.
    fn replied_bytes(&self) -> u64;

    /// True when TCP has taken every byte the kernel half queued. Costs a system call only when
    /// [`AssistConn::replied_bytes`] changed since the last time it returned true. `sent_bytes`: what user space has
    /// sent on this socket so far, completed sends only.
    fn drained(&mut self, socket: BorrowedFd<'_>, sent_bytes: u64) -> bool;

    /// User space has answered everything it received and sent every answer: the kernel half may take over.
    /// Both counts are totals since the connection was accepted. Called with zeros right after `attach`, it gives the
    /// kernel half the very first message.
    fn settle(&mut self, socket: BorrowedFd<'_>, received_bytes: u64, sent_bytes: u64);

    /// As [`AssistConn::settle`], told just before the send that ends the debt: `sent_after_bytes` counts that send in
    /// full. The client is woken by the send and may send its next request before this thread runs on, above all when
    /// both share a core; settled only afterwards, the connection would stay with user space for ever. The kernel half
    /// goes by TCP's sequence numbers, so a send that comes late, in parts, or never does no harm. Call it when
    /// [`AssistConn::drained`] was true and everything received is answered by what is sent now; go on to call `settle`
    /// when all is done (a plain comparison then).
    fn settle_ahead(&mut self, _socket: BorrowedFd<'_>, _received_bytes: u64, _sent_after_bytes: u64) {}

    /// A receive returned no bytes: is it the end of the stream? False: bytes passed to user space still wait in the
    /// kernel behind a reply of the kernel half, and the socket says "end" too early (Linux 6.18, tcp_bpf_recvmsg
    /// looks at RCV_SHUTDOWN before the work queue is through). Receive again in a moment.
    fn is_end(&mut self, _socket: BorrowedFd<'_>, _received_bytes: u64) -> bool {
        true
    }

    /// True if bytes wait in the kernel that user space has not received, or if that cannot be told. While user space does
    /// not receive on the socket, the shard asks this before it takes the peer for silent.
    fn has_unread(&mut self, _socket: BorrowedFd<'_>, _received_bytes: u64) -> bool {
        true
    }

    /// True, once, when the kernel half passed a message that it could have answered: user space is to find out
    /// whether the peer has more than one in flight.
    fn is_trial(&mut self) -> bool {
        false
    }

    /// Mean length of what the kernel half answered at a time, in bytes; `None`: too few to tell.
    fn typical_bytes(&self) -> Option<u64> {
        None
    }

    /// True when a reply of the kernel half was lost. Nothing may follow it: the connection must end.
    fn is_broken(&self) -> bool {
        false
    }

    /// Names the connection in wake-ups; never used twice.
    fn token(&self) -> u64 {
        0
    }

    /// Leaves a settled connection to the kernel half until it wakes `shard`. False: not settled, or something was
    /// passed in the meantime, or this half does not park: go on polling for input.
    fn park(&mut self, _socket: BorrowedFd<'_>, _shard: usize) -> bool {
        false
    }

    /// User space polls this socket for input again. Call it at a wake-up, before sending by itself on a parked
    /// connection (a deferred reply), and again when a poll said "readable" but a receive said `EAGAIN`.
    fn unpark(&mut self, _socket: BorrowedFd<'_>) {}
}
