//! The choice between ksf's own multiplexor and the kernel's, made when a program runs.

use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use ksf::limits::Limits;
use ksf_mux::backend::{Endpoint, Event, Multiplexor, Received};
use ksf_mux::kcm::{ConnectionStats, MuxStats};
use ksf_mux::{
    AttachError, ConnectionId, Detached, Message, MessageFraming, MessageSocket, Mux, MuxOptions, RecvError, SendError,
    SendOptions,
};

use crate::error::KcmError;
use crate::mux::{KernelMessage, KernelMux, KernelSocket};
use crate::probe::probe;

/// Whose multiplexor message sockets stand on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// That of ksf, in user space, on every kernel.
    #[default]
    Ksf,
    /// The kernel's AF_KCM; an error where there is none.
    Kernel,
    /// The kernel's where it works (tried with a connection of its own) and can do all that is asked for, else ksf's.
    Auto,
}

/// A multiplexor of either kind.
///
/// ```
/// use ksf::framing::{Framing, LengthPrefix};
/// use ksf_kcm::{AnyMux, Backend};
/// use ksf_mux::MuxOptions;
///
/// let mux = AnyMux::open(Backend::Auto, MuxOptions::new(Framing::LengthPrefix(LengthPrefix::big_endian(4))))?;
/// println!("on {}", if mux.backend() == Backend::Kernel { "AF_KCM" } else { "ksf's own" });
/// # Ok::<(), ksf_kcm::KcmError>(())
/// ```
///
/// With AF_KCM's contract: `ksf_mux::kcm::KcmSocket::on(mux, kind, options)`.
#[derive(Clone, Debug)]
pub enum AnyMux {
    /// ksf's.
    Ksf(Mux),
    /// The kernel's.
    Kernel(KernelMux),
}

/// One worker's side of an [`AnyMux`].
#[derive(Debug)]
pub enum AnySocket {
    /// Of ksf's.
    Ksf(MessageSocket),
    /// Of the kernel's.
    Kernel(KernelSocket),
}

/// A message out of an [`AnySocket`].
#[derive(Debug)]
pub enum AnyMessage {
    /// Cut by ksf.
    Ksf(Message),
    /// Cut by the kernel.
    Kernel(KernelMessage),
}

impl AnyMux {
    /// A multiplexor without connections.
    pub fn open(backend: Backend, options: MuxOptions) -> Result<Self, KcmError> {
        let ours = |options| match Mux::new(options) {
            Ok(mux) => Ok(Self::Ksf(mux)),
            Err(error) => Err(KcmError::Os { call: "make a multiplexor", error }),
        };
        match backend {
            Backend::Ksf => ours(options),
            Backend::Kernel => KernelMux::new(options).map(Self::Kernel),
            Backend::Auto => match probe().and_then(|_| KernelMux::new(options.clone())) {
                Ok(mux) => Ok(Self::Kernel(mux)),
                Err(_) => ours(options),
            },
        }
    }

    /// Which kind it is: never [`Backend::Auto`].
    pub fn backend(&self) -> Backend {
        match self {
            Self::Ksf(_) => Backend::Ksf,
            Self::Kernel(_) => Backend::Kernel,
        }
    }

    /// A message socket: one worker's side.
    pub fn socket(&self) -> std::io::Result<AnySocket> {
        match self {
            Self::Ksf(mux) => mux.socket().map(AnySocket::Ksf),
            Self::Kernel(mux) => mux.socket().map(AnySocket::Kernel),
        }
    }

    /// Attaches a connection, with the framing, order and limits of the multiplexor.
    pub fn attach(&self, socket: OwnedFd) -> Result<ConnectionId, AttachError> {
        match self {
            Self::Ksf(mux) => mux.attach(socket),
            Self::Kernel(mux) => mux.attach(socket),
        }
    }
}

/// Has both kinds do the same.
macro_rules! either {
    ($this:expr, $of:ident => $do:expr) => {
        match $this {
            Self::Ksf($of) => $do,
            Self::Kernel($of) => $do,
        }
    };
}

impl Multiplexor for AnyMux {
    type Socket = AnySocket;

    fn socket(&self) -> std::io::Result<AnySocket> {
        match self {
            Self::Ksf(mux) => Multiplexor::socket(mux).map(AnySocket::Ksf),
            Self::Kernel(mux) => Multiplexor::socket(mux).map(AnySocket::Kernel),
        }
    }

    fn attach_limited(
        &self,
        socket: OwnedFd,
        framing: MessageFraming,
        limits: Limits,
    ) -> Result<ConnectionId, AttachError> {
        either!(self, mux => mux.attach_limited(socket, framing, limits))
    }

    fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        either!(self, mux => Multiplexor::detach(mux, connection))
    }

    fn connections(&self) -> Vec<ConnectionId> {
        either!(self, mux => Multiplexor::connections(mux))
    }

    fn event(&self) -> Option<Event> {
        either!(self, mux => Multiplexor::event(mux))
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        either!(self, mux => Multiplexor::event_fd(mux))
    }

    fn has_room(&self, connection: Option<ConnectionId>) -> bool {
        either!(self, mux => mux.has_room(connection))
    }

    fn flush(&self, connection: ConnectionId) {
        either!(self, mux => mux.flush(connection));
    }

    fn kcm_stats(&self) -> MuxStats {
        either!(self, mux => Multiplexor::kcm_stats(mux))
    }

    fn connection_stats(&self) -> Vec<ConnectionStats> {
        either!(self, mux => mux.connection_stats())
    }
}

impl Endpoint for AnySocket {
    type Message = AnyMessage;

    fn receive(&self, timeout: Option<Duration>) -> Result<AnyMessage, RecvError> {
        match self {
            Self::Ksf(socket) => Endpoint::receive(socket, timeout).map(AnyMessage::Ksf),
            Self::Kernel(socket) => socket.receive(timeout).map(AnyMessage::Kernel),
        }
    }

    /// A message of another multiplexor, of the other kind, is dropped.
    fn give_back(&self, message: AnyMessage) {
        match (self, message) {
            (Self::Ksf(socket), AnyMessage::Ksf(message)) => socket.give_back(message),
            (Self::Kernel(socket), AnyMessage::Kernel(message)) => socket.give_back(message),
            _ => {}
        }
    }

    fn look(&self) -> std::io::Result<()> {
        either!(self, socket => Endpoint::look(socket))
    }

    fn announce(&self) {
        either!(self, socket => Endpoint::announce(socket));
    }

    fn send(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError> {
        either!(self, socket => Endpoint::send(socket, body, options))
    }

    fn send_to(&self, connection: ConnectionId, body: &[u8]) -> Result<(), SendError> {
        either!(self, socket => Endpoint::send_to(socket, connection, body))
    }

    fn set_receiving(&self, receiving: bool) {
        either!(self, socket => Endpoint::set_receiving(socket, receiving));
    }

    fn is_receiving(&self) -> bool {
        either!(self, socket => Endpoint::is_receiving(socket))
    }

    fn report_ends(&self) {
        either!(self, socket => Endpoint::report_ends(socket));
    }

    fn poll_fd(&self) -> std::io::Result<BorrowedFd<'_>> {
        either!(self, socket => Endpoint::poll_fd(socket))
    }
}

impl Received for AnyMessage {
    fn connection(&self) -> ConnectionId {
        either!(self, message => Received::connection(message))
    }

    fn reply(&self, body: &[u8]) -> Result<(), SendError> {
        either!(self, message => Received::reply(message, body))
    }
}

impl Deref for AnyMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        either!(self, message => message.bytes())
    }
}
