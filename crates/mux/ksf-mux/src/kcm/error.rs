//! Errors, with the numbers AF_KCM gives.

use std::io;

use rustix::io::Errno;

use crate::error::{ConnectionError, RecvError, SendError};
use crate::mux::ConnectionId;

/// A socket of this kind does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Neither SOCK_DGRAM nor SOCK_SEQPACKET.
    #[error("message sockets are of type SOCK_DGRAM or SOCK_SEQPACKET, not {0}")]
    Type(i32),
    /// Not KCMPROTO_CONNECTED.
    #[error("the protocol of message sockets is 0 (KCMPROTO_CONNECTED), not {0}")]
    Protocol(i32),
}

impl OpenError {
    /// The error number of `socket`.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Type(_) => Errno::SOCKTNOSUPPORT,
            Self::Protocol(_) => Errno::PROTONOSUPPORT,
        }
        .raw_os_error()
    }
}

/// The connection is not attached to this multiplexor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection is not attached to this multiplexor")]
pub struct NotAttached;

impl NotAttached {
    /// The error number of `SIOCKCMUNATTACH`.
    pub fn errno(&self) -> i32 {
        Errno::NOENT.raw_os_error()
    }
}

/// A call on a message socket failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KcmSocketError {
    /// It would have to wait, or waited for its time.
    #[error("nothing to receive, or no room to send, within the time given")]
    WouldBlock,
    /// There is no connection to send on. AF_KCM keeps the message for the connection that is attached next: another client.
    #[error("no connection is attached that takes messages")]
    NotConnected,
    /// The connection that was to be answered is gone.
    #[error("connection {0} is gone")]
    Gone(ConnectionId),
    /// The connection whose message was to be answered, by a message that names none, is gone.
    #[error("connection {0}, whose message this answers, is gone")]
    SenderGone(ConnectionId),
    /// A message longer than this multiplexor takes.
    #[error("a message of {bytes} bytes, more than message_bytes_max ({limit})")]
    TooLong {
        /// Its length so far.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A connection ended: for sockets that asked for it.
    #[error("connection {connection} ended: {error}")]
    Connection {
        /// Which one.
        connection: ConnectionId,
        /// Why.
        error: ConnectionError,
    },
    /// A system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

impl KcmSocketError {
    /// The error number AF_KCM gives, or would give.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::WouldBlock => Errno::AGAIN,
            Self::NotConnected => Errno::NOTCONN,
            Self::Gone(_) => Errno::PIPE,
            Self::SenderGone(_) => Errno::CONNRESET,
            Self::TooLong { .. } => Errno::MSGSIZE,
            Self::Connection { error, .. } => return error.errno(),
            Self::System(error) => return error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        };
        errno.raw_os_error()
    }
}

impl From<RecvError> for KcmSocketError {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::WouldBlock | RecvError::TimedOut(_) | RecvError::Disabled | RecvError::Stopped => {
                Self::WouldBlock
            }
            RecvError::Connection { connection, error } => Self::Connection { connection, error },
            RecvError::System(error) => Self::System(error),
        }
    }
}

impl From<SendError> for KcmSocketError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Gone(connection) => Self::Gone(connection),
            SendError::NotConnected => Self::NotConnected,
            SendError::WouldBlock | SendError::TimedOut(_) => Self::WouldBlock,
            // Programs write messages as they are: nothing has to fit.
            SendError::Unframable(error) => Self::System(io::Error::new(io::ErrorKind::InvalidInput, error)),
        }
    }
}
