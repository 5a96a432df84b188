//! What moves the bytes. An engine carries out operations on sockets and reports what came of them; it knows nothing
//! of messages. The shard drives any engine through [`Engine`].
//!
//! * [`uring`]: one io_uring per shard; the kernel receives straight into slots.
//! * [`epoll`]: the same on plain system calls, where io_uring is not allowed.
//!
//! The third engine, `kernel`, is one of these two with a [kernel half](crate::assist) in front.

use std::net::SocketAddr;
use std::os::fd::{OwnedFd, RawFd};
use std::time::Duration;
use std::{fmt, io};

use crate::cutter::Direct;
use crate::datagram_output::DatagramOutput;
use crate::env::Env;
use crate::error::Error;
use crate::files::Begun;
use crate::listener::DatagramPeer;
use crate::output::SendBatch;
use crate::pool::Chunk;
use crate::service::ConnKey;

mod datagram_receiver;
#[cfg(test)]
mod datagram_tests;
mod datagrams;
pub(crate) mod epoll;
mod files;
pub(crate) mod msg;
mod no_memory;
pub(crate) mod syscalls;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod uring;

/// Which engine a server uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// Plain system calls.
    Epoll,
    /// io_uring.
    #[default]
    Uring,
}

impl EngineKind {
    /// The engine's name on the command line and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Epoll => "epoll",
            Self::Uring => "uring",
        }
    }

    /// Tries whether the engine works on this machine.
    pub fn probe(self) -> Result<(), Error> {
        match self {
            Self::Epoll => Ok(()),
            Self::Uring => uring::probe(),
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What an engine reports.
#[derive(Debug)]
pub(crate) enum Event {
    /// A connection was accepted.
    Accepted { listener: u32, socket: OwnedFd },
    /// Accepting failed and has stopped; [`Engine::listen`] starts it again.
    AcceptFailed { listener: u32, error: io::Error },
    /// An outgoing connection is there, or cannot be made.
    Connected { conn: ConnKey, error: Option<io::Error> },
    /// Bytes arrived.
    Received { conn: ConnKey, chunk: Chunk },
    /// A lent buffer comes back, with `bytes` bytes that were received into it; maybe none, when it was called back.
    ReceivedDirect { conn: ConnKey, direct: Direct, bytes: usize },
    /// Nothing of a connection that is read by [`Reading::Direct`] is under way any more: its buffer may be lent.
    Quiet { conn: ConnKey },
    /// The peer ended its direction.
    Eof { conn: ConnKey },
    /// Receiving or sending failed for good.
    Failed { conn: ConnKey },
    /// More bytes of a batch that did not go out at once were sent; `done`: all of them.
    Sent { conn: ConnKey, bytes: usize, done: bool },
    /// The engine is done with a connection after [`Engine::release`]: its socket may be closed.
    Released { conn: ConnKey },
    /// A parked connection has something for user space: its peer ended it.
    Unparked { conn: ConnKey },
    /// A watched descriptor became readable.
    Watched { watch: u32 },
    /// An operation on a file ended.
    File(Box<Begun>),
    /// A datagram arrived; `truncated` is set when it did not fit into a slot.
    Datagram { socket: u32, peer: DatagramPeer, chunk: Chunk, truncated: bool },
}

/// Whether an engine looks for bytes of a connection, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Not at all: the peer must take its replies first. A reset is reported ([`Event::Failed`]).
    #[default]
    Off,
    /// As they come.
    On,
    /// As they come, but at most one slot in a turn: a shard that wants no more can say so behind each.
    Sparing,
    /// As they come, but at most [`HEAD_BYTES`] in a turn: the head of a long message, whose rest is then received into the
    /// buffer that has its size.
    Head,
    /// Only into the buffers that are lent.
    Direct,
    /// Only for the end of the stream: the kernel half has the bytes.
    Parked,
}

impl Reading {
    /// True if bytes are received into slots.
    pub(crate) fn receives(self) -> bool {
        matches!(self, Self::On | Self::Sparing | Self::Head)
    }

    /// Most bytes of one receive into a slot.
    pub(crate) fn bytes_max(self) -> usize {
        if self == Self::Head { HEAD_BYTES } else { usize::MAX }
    }
}

/// Bytes received of a message that is expected to be long: its header, and not much that has to be copied.
pub(crate) const HEAD_BYTES: usize = 4 << 10;

/// Boxes for batches that are kept for those which do not leave at once.
const SPARES_MAX: usize = 1024;

/// How long to wait for events.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wait {
    /// Return after this time even without an event; `None`: never.
    pub(crate) timeout: Option<Duration>,
    /// Let events gather for this time before returning with the first, to form a batch.
    pub(crate) gather: Option<Duration>,
}

/// Sleeps. A signal only makes the pause, and the batch that forms in it, smaller.
pub(crate) fn pause(time: Duration, env: &Env) {
    env.stats.syscalls.add(1);
    let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
        tv_sec: time.as_secs() as _,
        tv_nsec: time.subsec_nanos().into(),
    });
}

/// Operations on sockets. Descriptors stay open until [`Engine::release`] or [`Event::Released`] says that
/// they may be closed: the shard keeps them.
pub(crate) trait Engine: Sized {
    /// What an engine keeps for each connection.
    #[cfg(test)]
    const CONN_BYTES: usize;

    /// Sets the engine up on the calling thread, which will be the only one to use it. `spins`: it will often be asked
    /// to wait for no time, to see whether there is something.
    fn new(env: &mut Env, spins: bool) -> Result<Self, Error>;

    /// Accepts connections from a listening socket until it fails or [`Engine::unlisten`].
    fn listen(&mut self, listener: u32, socket: RawFd);

    /// Stops accepting. A connection that was accepted meanwhile is still reported.
    fn unlisten(&mut self, listener: u32);

    /// Receives datagrams from a bound socket. Fails if that cannot be started, or the socket was shut down. One that is shut
    /// down later is not read any more once it is empty.
    fn listen_datagrams(&mut self, socket: u32, fd: RawFd) -> io::Result<()>;

    /// Receives datagrams from a socket, or stops to. Those already under way are still reported.
    fn set_datagrams_reading(&mut self, socket: u32, reads: bool);

    /// Takes over a connected socket, and starts to receive from it if it is to be read.
    fn open(&mut self, conn: ConnKey, socket: RawFd, reading: Reading);

    /// Connects a socket that was opened without reading; [`Event::Connected`] follows, unless it is released before.
    fn connect(&mut self, conn: ConnKey, to: SocketAddr);

    /// Receives what is there, once, without waiting; for a socket that is not read otherwise now. `None`: nothing yet,
    /// or something that a receive by [`Reading::On`] will report.
    fn receive_now(&mut self, socket: RawFd, env: &mut Env) -> Option<Chunk> {
        let mut slot = env.pool.take()?;
        env.stats.syscalls.add(1);
        match syscalls::receive_into(socket, slot.as_mut_slice()) {
            // The end and errors are final: they will be met again.
            Ok(0) | Err(_) => None,
            Ok(bytes) => Some(slot.freeze(bytes)),
        }
    }

    /// True if nothing of a connection is received now, and nothing that was received is still to be reported.
    fn is_quiet(&mut self, conn: ConnKey) -> bool;

    /// Receives the next bytes of a [quiet](Self::is_quiet) connection that is read by [`Reading::Direct`] into this buffer.
    /// [`Event::ReceivedDirect`] gives it back once some are there, or when the connection is read in another way. A
    /// connection that is released drops it, when the kernel is done with it.
    fn receive_direct(&mut self, conn: ConnKey, direct: Direct);

    /// Receives, or stops to. Bytes already under way are still reported.
    fn set_reading(&mut self, conn: ConnKey, reading: Reading);

    /// Reports [`Event::Watched`] when `fd` becomes readable; the handler takes all there is.
    /// Fails if it cannot be watched: the shard would never hear of what it is about.
    fn watch(&mut self, watch: u32, fd: RawFd) -> Result<(), Error>;

    /// Sends a batch; at most one per connection at a time. What TCP takes at once is sent before this returns: a
    /// plain system call is cheaper than a submission (13.1 against 14.3 us of round trip, Linux 6.18). Returns how many
    /// bytes that were, and whether it was all; the rest is reported by [`Event::Sent`], a failure by
    /// [`Event::Failed`].
    ///
    /// `last`: the caller shuts down the sending direction next, so that the end of the batch may wait for that and leave
    /// in one segment with the FIN.
    fn send(&mut self, conn: ConnKey, batch: SendBatch, last: bool, env: &mut Env) -> (usize, bool);

    /// Where replies to datagrams of a socket go, which leave with the others of the turn.
    fn datagram_output(&mut self, socket: u32) -> &mut DatagramOutput;

    /// Replies were added there. Those that came last are given up and counted if the socket is full and more than
    /// `datagram_queue_max` wait.
    fn datagrams_added(&mut self, socket: u32, env: &mut Env);

    /// Sends what waits for more of its turn. Every wait begins with it.
    fn flush(&mut self, env: &mut Env);

    /// Ends every operation of a connection. True: there is none, and the socket may be closed now; else
    /// [`Event::Released`] follows.
    fn release(&mut self, conn: ConnKey) -> bool;

    /// Begins an operation on a file; [`Event::File`] follows, or mail where a thread carries it out. Operations may end in
    /// another order. Files and memory in it stay alive until then.
    fn begin_file(&mut self, begun: Box<Begun>, env: &mut Env);

    /// Cancels the operations on files that can be, waits a while for the others, and returns all that ended. In the last
    /// place before [`Engine::shutdown`].
    fn end_files(&mut self, env: &mut Env) -> Vec<Begun>;

    /// Ends every operation, and waits until the kernel is done with all of them. The last call before sockets are
    /// closed and the engine is dropped.
    fn shutdown(&mut self);

    /// Carries out what was asked for, waits for events and reports them.
    fn wait(&mut self, env: &mut Env, wait: Wait, events: &mut Vec<Event>) -> io::Result<()>;
}
