//! What message sockets stand on: the multiplexor of this crate, or another one with the same contract. `ksf-kcm` has
//! the kernel's AF_KCM as such.
//!
//! Programs need [`Mux`], or the choice that `ksf-kcm` offers, and use the traits to be written for both. A crate that
//! makes a multiplexor of its own finds parts of this one here.

use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use ksf::Order;
use ksf::limits::Limits;

use crate::connection::Admission;
use crate::error::{AttachError, RecvError, SendError};
use crate::kcm::{ConnectionStats, MuxStats};
use crate::mux::{ConnectionId, Detached, Mux};
use crate::options::MessageFraming;
use crate::socket::{Message, MessageSocket, SendOptions};

pub use crate::kcm::EndCounts;
pub use crate::monitor::{Event, Events, UNREAD_MAX};
pub use crate::mux::check_stream;
pub use crate::out_queue::{Leftover, OutQueue, Pushed, SendProgress, Sent, Transmit};
pub use crate::reply_order::{CALL_MESSAGES_MAX, ReplyOrder, Unanswered};

/// A multiplexor: connections on one side, message sockets on the other. Clones are handles of the same one.
pub trait Multiplexor: Clone + Send + Sync {
    /// One worker's side of it.
    type Socket: Endpoint;

    /// Makes a message socket.
    fn socket(&self) -> std::io::Result<Self::Socket>;

    /// Attaches a connection, with a framing and limits of its own, in free order.
    fn attach_limited(
        &self,
        socket: OwnedFd,
        framing: MessageFraming,
        limits: Limits,
    ) -> Result<ConnectionId, AttachError>;

    /// Takes a connection away. Whole messages of it can still be received. `None`: there is no such connection.
    fn detach(&self, connection: ConnectionId) -> Option<Detached>;

    /// Connections attached.
    fn connections(&self) -> Vec<ConnectionId>;

    /// The next event of a connection. From the first call of this or [`Self::event_fd`] on events are kept.
    fn event(&self) -> Option<Event>;

    /// Readable while there are events.
    fn event_fd(&self) -> BorrowedFd<'_>;

    /// True if this connection has room for an answer; `None`: if some connection has room for a message. Also true where
    /// there is no such connection: sending fails at once.
    fn has_room(&self, connection: Option<ConnectionId>) -> bool;

    /// Sends what waits for this connection, as far as TCP takes it.
    fn flush(&self, connection: ConnectionId);

    /// Counters under the names of AF_KCM.
    fn kcm_stats(&self) -> MuxStats;

    /// The same of each connection.
    fn connection_stats(&self) -> Vec<ConnectionStats>;
}

/// One worker's side of a multiplexor; see [`MessageSocket`] for each call.
pub trait Endpoint: Send + Sync {
    /// A message that was received.
    type Message: Received;

    /// The next message. `None` waits for ever; [`Duration::ZERO`] does not wait.
    fn receive(&self, timeout: Option<Duration>) -> Result<Self::Message, RecvError>;

    /// Gives a message back that was not worked on; this or another socket receives it again.
    fn give_back(&self, message: Self::Message);

    /// Has connections looked at, so that their errors are found, without receiving a message.
    fn look(&self) -> std::io::Result<()>;

    /// Makes [`Self::poll_fd`] readable: something that was received is not worked on.
    fn announce(&self);

    /// Sends a message on some connection.
    fn send(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError>;

    /// Sends a message on this connection. Never waits: [`SendError::WouldBlock`] while its out-queue is full.
    fn send_to(&self, connection: ConnectionId, body: &[u8]) -> Result<(), SendError>;

    /// Stops receiving, or starts again. What waits for this socket goes to others.
    fn set_receiving(&self, receiving: bool);

    /// Whether it receives.
    fn is_receiving(&self) -> bool;

    /// From now on the end of a connection is received as an error, after its last message.
    fn report_ends(&self);

    /// A descriptor that is readable while there may be something to receive.
    fn poll_fd(&self) -> std::io::Result<BorrowedFd<'_>>;
}

/// A message that was received. Until it is dropped it counts against the limits of its connection.
pub trait Received: Deref<Target = [u8]> + Send + Sync {
    /// The connection it came on.
    fn connection(&self) -> ConnectionId;

    /// Answers to that connection and to no other. Never waits: [`SendError::WouldBlock`] while its budget is used up.
    fn reply(&self, body: &[u8]) -> Result<(), SendError>;
}

impl Multiplexor for Mux {
    type Socket = MessageSocket;

    fn socket(&self) -> std::io::Result<MessageSocket> {
        let socket = self.socket()?;
        // A socket that may be polled takes one message at a time, so that the others stay free for all workers.
        socket.poll_fd()?;
        Ok(socket)
    }

    fn attach_limited(
        &self,
        socket: OwnedFd,
        framing: MessageFraming,
        limits: Limits,
    ) -> Result<ConnectionId, AttachError> {
        self.shared().attach_limited(socket, framing, Order::Free, None, Some(limits))
    }

    fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        self.detach(connection)
    }

    fn connections(&self) -> Vec<ConnectionId> {
        self.connections()
    }

    fn event(&self) -> Option<Event> {
        self.event()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.event_fd()
    }

    fn has_room(&self, connection: Option<ConnectionId>) -> bool {
        let shared = self.shared();
        if let Some(connection) = connection {
            return shared.find(connection).is_none_or(|conn| conn.takes(Admission::Answer));
        }
        let table = shared.read_table();
        table.all.is_empty() || table.all.iter().any(|conn| conn.takes(Admission::Send))
    }

    fn flush(&self, connection: ConnectionId) {
        let shared = self.shared();
        if let Some(conn) = shared.find(connection) {
            shared.send(&conn);
        }
    }

    fn kcm_stats(&self) -> MuxStats {
        self.kcm_stats()
    }

    fn connection_stats(&self) -> Vec<ConnectionStats> {
        self.kcm_connection_stats()
    }
}

impl Endpoint for MessageSocket {
    type Message = Message;

    fn receive(&self, timeout: Option<Duration>) -> Result<Message, RecvError> {
        match timeout {
            None => self.recv(),
            Some(Duration::ZERO) => self.try_recv(),
            Some(timeout) => self.recv_timeout(timeout),
        }
    }

    fn give_back(&self, message: Message) {
        self.give_back(message);
    }

    fn look(&self) -> std::io::Result<()> {
        self.look()
    }

    fn announce(&self) {
        self.announce();
    }

    fn send(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError> {
        self.send(body, options)
    }

    fn send_to(&self, connection: ConnectionId, body: &[u8]) -> Result<(), SendError> {
        self.send_to(connection, body)
    }

    fn set_receiving(&self, receiving: bool) {
        self.set_receiving(receiving);
    }

    fn is_receiving(&self) -> bool {
        self.is_receiving()
    }

    fn report_ends(&self) {
        self.report_ends();
    }

    fn poll_fd(&self) -> std::io::Result<BorrowedFd<'_>> {
        self.poll_fd()
    }
}

impl Received for Message {
    fn connection(&self) -> ConnectionId {
        self.connection()
    }

    fn reply(&self, body: &[u8]) -> Result<(), SendError> {
        self.reply(body)
    }
}
