//! Errors, grouped by the party at fault: the caller ([`AttachError`], [`RecvError`], [`SendError`]) or a connection
//! ([`ConnectionError`]).

use std::io;
use std::time::Duration;

use ksf::adopt::OnShardsOnly;
use ksf::error::FramingError;
use ksf_bpf_framing::RunError;
use rustix::io::Errno;

use crate::mux::ConnectionId;

/// Why workers were not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// They cannot run this service.
    #[error(transparent)]
    OnShardsOnly(#[from] OnShardsOnly),
    /// No thread, descriptor or memory for them.
    #[error("cannot start the workers: {0}")]
    System(#[from] io::Error),
}

/// Why a connection brings no more messages. It reaches a reader of messages that asked for it, and the monitor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The peer ended its direction between two messages: the normal end.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// The peer ended its direction inside a message.
    #[error("the peer closed the connection inside a message, after {bytes} bytes of it")]
    PeerClosedMidMessage {
        /// Bytes of the message that arrived.
        bytes: usize,
    },
    /// A system call failed: reset, timed out, unreachable.
    #[error("the connection failed: {}", io::Error::from_raw_os_error(*errno))]
    Socket {
        /// What the kernel said.
        errno: i32,
    },
    /// A message longer than the limit; also one whose delimiter does not come.
    #[error("a message of {bytes} bytes, more than message_bytes_max ({limit})")]
    OversizedMessage {
        /// Its length as far as it is known.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The length of a message is still unknown after too many bytes.
    #[error("{bytes} bytes without the length of a message, more than header_bytes_max ({limit})")]
    EndlessHeader {
        /// Bytes looked at.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A message of too many fragments.
    #[error("a message of more than fragments_max ({limit}) fragments")]
    EndlessFragments {
        /// The limit.
        limit: u32,
    },
    /// A message took too long to arrive.
    #[error("a message did not arrive within assembly_timeout_ms ({limit_ms})")]
    AssemblyTimeout {
        /// The limit.
        limit_ms: u64,
    },
    /// The peer does not take what is queued for it.
    #[error("the peer took nothing for send_timeout_ms ({limit_ms})")]
    SendTimeout {
        /// The limit.
        limit_ms: u64,
    },
    /// The peer is owed too much: answers that came later were much longer than those before them.
    #[error("replies of more than {limit} bytes, twice the budget of a connection, wait for the peer")]
    ReplyLimit {
        /// The limit.
        limit: usize,
    },
    /// The bytes do not follow the framing.
    #[error("the bytes do not follow the framing: {0}")]
    Malformed(FramingError),
    /// The framing program did something it must not, or returned what no message can have.
    #[error("the framing program failed: {0}")]
    Program(RunError),
    /// The framing program returned this error.
    #[error("the framing program refused the stream: {}", io::Error::from_raw_os_error(*errno))]
    Refused {
        /// The error number it returned, positive.
        errno: i32,
    },
    /// The framing program handed the stream back (it returned `-ESTRPIPE`); detach returns it from its next message on.
    #[error("the framing program handed the stream back")]
    HandedBack,
    /// Memory for messages that have not arrived in full was short, and the peer of this one sent nothing more of it for
    /// pressure_timeout_ms.
    #[error("messages in part need more than assembly_bytes_max ({limit}), and the peer did not go on with its own")]
    MemoryLimit {
        /// The limit.
        limit: usize,
    },
    /// No byte moved for too long.
    #[error("no byte moved for idle_timeout_ms ({limit_ms})")]
    IdleTimeout {
        /// The limit.
        limit_ms: u64,
    },
    /// The service that works on its messages wanted it closed.
    #[error("the service closed the connection")]
    ClosedByService,
    /// The multiplexor takes no more messages: it is being stopped.
    #[error("the server stops")]
    Stopping,
    /// A worker panicked while it worked on a message of this connection.
    #[error("a worker failed while it worked on a message of this connection")]
    WorkerPanicked,
    /// A deferred reply was dropped without an answer.
    #[error("a reply was dropped without an answer")]
    Abandoned,
}

impl ConnectionError {
    /// The error number AF_KCM reports for this, where it has the case, or the nearest one.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::PeerClosed | Self::PeerClosedMidMessage { .. } => Errno::PIPE,
            Self::Socket { errno } | Self::Refused { errno } => return *errno,
            Self::OversizedMessage { .. } | Self::EndlessHeader { .. } | Self::EndlessFragments { .. } => {
                Errno::MSGSIZE
            }
            Self::AssemblyTimeout { .. } | Self::SendTimeout { .. } => Errno::TIMEDOUT,
            Self::Malformed(_) => Errno::BADMSG,
            Self::Program(_) => Errno::PROTO,
            Self::HandedBack => Errno::NODATA,
            Self::MemoryLimit { .. } => Errno::NOMEM,
            Self::ReplyLimit { .. } => Errno::NOBUFS,
            Self::IdleTimeout { .. } => Errno::TIMEDOUT,
            Self::WorkerPanicked | Self::Abandoned | Self::ClosedByService | Self::Stopping => Errno::CANCELED,
        };
        errno.raw_os_error()
    }
}

/// A connection could not be attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// Not a stream socket of TCP (or of the Unix domain).
    #[error("only a connected TCP or Unix stream socket can be attached, and this is {what}")]
    NotAStream {
        /// What it is.
        what: &'static str,
    },
    /// The same socket is attached already.
    #[error("the socket is attached already")]
    Already,
    /// There are too many connections.
    #[error("the multiplexor has connections_max ({limit}) connections")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// A system call failed.
    #[error("cannot attach: {step}: {source}")]
    System {
        /// The step that failed.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl AttachError {
    /// The error number AF_KCM gives.
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotAStream { .. } => Errno::OPNOTSUPP.raw_os_error(),
            Self::Already => Errno::ALREADY.raw_os_error(),
            Self::TooMany { .. } => Errno::NOBUFS.raw_os_error(),
            Self::System { source, .. } => source.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        }
    }
}

/// No message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// None is there, and the call does not wait.
    #[error("no message is there")]
    WouldBlock,
    /// None came in time.
    #[error("no message came within {0:?}")]
    TimedOut(Duration),
    /// Receiving is disabled on this socket, and the call does not wait.
    #[error("receiving is disabled on this socket")]
    Disabled,
    /// The multiplexor was stopped, and no message is left.
    #[error("the multiplexor was stopped")]
    Stopped,
    /// A connection ended; its messages came before this. Only for sockets that asked for it.
    #[error("connection {connection} ended: {error}")]
    Connection {
        /// Which one.
        connection: ConnectionId,
        /// Why.
        error: ConnectionError,
    },
    /// Waiting failed.
    #[error("cannot wait for messages: {0}")]
    System(#[from] io::Error),
}

/// A message was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The connection is detached, or failed.
    #[error("connection {0} is gone")]
    Gone(ConnectionId),
    /// No connection is attached that takes messages.
    #[error("no connection is attached")]
    NotConnected,
    /// Too much is queued for it already, and the call does not wait: its peer does not read. It can be tried again when
    /// some of that has left, or waited for ([`SendOptions::wait`](crate::SendOptions::wait)).
    #[error("the queue is full: the peer does not take its messages")]
    WouldBlock,
    /// The queue did not empty in time.
    #[error("the queue was full for {0:?}")]
    TimedOut(Duration),
    /// The message cannot be expressed by the framing.
    #[error("the message does not fit the framing: {0}")]
    Unframable(FramingError),
}
