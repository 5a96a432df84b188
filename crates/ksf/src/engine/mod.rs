//! What moves the bytes. An engine carries out operations on sockets and reports what came of them; it knows nothing
//! of messages. The shard drives any engine through [`Engine`].
//!
//! * [`uring`]: one io_uring per shard; the kernel receives straight into slots.
//! * [`epoll`]: the same on plain system calls, where io_uring is not allowed.
//!
//! The third engine, `kernel`, is one of these two with a [kernel half](crate::assist) in front.

use std::os::fd::{OwnedFd, RawFd};
use std::time::Duration;
use std::{fmt, io};

use crate::env::Env;
use crate::error::Error;
use crate::listener::DatagramPeer;
use crate::output::SendBatch;
use crate::pool::Chunk;
use crate::service::ConnKey;

mod buffer_ring;
pub(crate) mod epoll;
pub(crate) mod msg;
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
    /// Bytes arrived.
    Received { conn: ConnKey, chunk: Chunk },
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
    /// A datagram arrived; `truncated` is set when it did not fit into a slot.
    Datagram { socket: u32, peer: DatagramPeer, chunk: Chunk, truncated: bool },
}

/// Whether an engine looks for bytes of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Not at all: the peer must take its replies first.
    #[default]
    Off,
    /// As they come.
    On,
    /// Only for the end of the stream: the kernel half has the bytes.
    Parked,
}

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

/// Operations on sockets. Descriptors stay open until [`Event::Released`]: the shard keeps them.
pub(crate) trait Engine: Sized {
    /// Sets the engine up on the calling thread, which will be the only one to use it.
    fn new(env: &mut Env) -> Result<Self, Error>;

    /// Accepts connections from a listening socket until it fails or [`Engine::unlisten`].
    fn listen(&mut self, listener: u32, socket: RawFd);

    /// Stops accepting. A connection that was accepted meanwhile is still reported.
    fn unlisten(&mut self, listener: u32);

    /// Receives datagrams from a bound socket, for good. Fails if that cannot be started.
    fn listen_datagrams(&mut self, socket: u32, fd: RawFd) -> io::Result<()>;

    /// Takes over a connected socket and starts to receive from it.
    fn open(&mut self, conn: ConnKey, socket: RawFd);

    /// Receives, or stops to. Bytes already under way are still reported.
    fn set_reading(&mut self, conn: ConnKey, reading: Reading);

    /// Reports [`Event::Watched`] when `fd` becomes readable; whoever handles that takes all there is.
    /// Fails if it cannot be watched: the shard would never hear of what it is about.
    fn watch(&mut self, watch: u32, fd: RawFd) -> Result<(), Error>;

    /// Sends a batch; at most one per connection at a time. What TCP takes at once is sent before this returns: a
    /// plain system call is cheaper than a submission (13.1 against 14.3 us of round trip, Linux 6.18). Returns how many
    /// bytes that were, and whether it was all; the rest is reported by [`Event::Sent`], a failure by
    /// [`Event::Failed`].
    fn send(&mut self, conn: ConnKey, batch: SendBatch, env: &mut Env) -> (usize, bool);

    /// Sends one datagram, or gives it up and counts that if `datagram_queue_max` wait already.
    fn send_datagram(&mut self, socket: u32, peer: DatagramPeer, batch: SendBatch, env: &mut Env);

    /// Ends every operation of a connection; [`Event::Released`] follows.
    fn release(&mut self, conn: ConnKey);

    /// Ends every operation, and waits until the kernel is done with all of them. The last call before sockets are
    /// closed and the engine is dropped.
    fn shutdown(&mut self);

    /// Carries out what was asked for, waits for events and reports them.
    fn wait(&mut self, env: &mut Env, wait: Wait, events: &mut Vec<Event>) -> io::Result<()>;
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::os::fd::AsRawFd;
    use std::time::Instant;

    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

    use super::*;
    use crate::limits::Limits;
    use crate::output::Output;
    use crate::pool::{Memory, Pool};

    const QUEUE_MAX: usize = 3;

    /// Far more than anything here takes: a guard against hanging, not a measure.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn datagram(env: &mut Env) -> SendBatch {
        let mut output = Output::default();
        output.tail(&mut env.spares).extend_from_slice(b"datagram");
        output.take()
    }

    /// A Unix socket of packets stands in for one of UDP: it ignores the address it is to send to (unix(7)), and is full
    /// when its peer does not read. One of UDP is full only while a network is slow.
    fn a_full_socket_holds_so_many_datagrams<E: Engine>() {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (full, reader) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
        let mut fillers = 0;
        while send(&full, b"datagram", SendFlags::DONTWAIT).is_ok() {
            fillers += 1;
        }
        let limits = Limits { datagram_queue_max: QUEUE_MAX, ..Limits::default() };
        let mut env = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
        let mut engine = E::new(&mut env).unwrap();
        engine.listen_datagrams(0, full.as_raw_fd()).unwrap();
        let peer = DatagramPeer { addr: SocketAddr::from(([127, 0, 0, 1], 9)), local: None };
        for _ in 0..QUEUE_MAX + 2 {
            let batch = datagram(&mut env);
            engine.send_datagram(0, peer, batch, &mut env);
        }
        assert_eq!((env.stats.datagrams_out.value(), env.stats.datagrams_unsent.value()), (0, 2));
        // Those that wait leave when there is room, and then there is room for others.
        let read = |packets: usize| {
            for _ in 0..packets {
                let mut got = [0; 20];
                let (length, _) = recv(&reader, &mut got[..], RecvFlags::DONTWAIT).unwrap();
                assert_eq!(&got[..length], b"datagram");
            }
        };
        read(fillers);
        let mut events = Vec::new();
        let start = Instant::now();
        while env.stats.datagrams_out.value() < QUEUE_MAX as u64 {
            assert!(start.elapsed() < PATIENCE, "those that wait do not leave");
            engine.wait(&mut env, Wait { timeout: Some(PATIENCE), gather: None }, &mut events).unwrap();
        }
        let batch = datagram(&mut env);
        engine.send_datagram(0, peer, batch, &mut env);
        assert_eq!((env.stats.datagrams_out.value(), env.stats.datagrams_unsent.value()), (QUEUE_MAX as u64 + 1, 2));
        read(QUEUE_MAX + 1);
        engine.shutdown();
    }

    #[test]
    fn datagrams_that_wait_for_a_full_socket_are_bounded() {
        a_full_socket_holds_so_many_datagrams::<epoll::Epoll>();
        match EngineKind::Uring.probe() {
            Ok(()) => a_full_socket_holds_so_many_datagrams::<uring::Uring>(),
            Err(error) => {
                assert!(std::env::var_os("CI").is_none(), "skipped in CI: needs io_uring ({error})");
                println!("skipped: needs io_uring ({error})");
            }
        }
    }
}
