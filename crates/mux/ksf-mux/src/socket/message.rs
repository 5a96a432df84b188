//! A message that was received.

use std::fmt;
use std::ops::Range;

use ksf::pool::Chunk;

use super::InPlaceBatch;
use crate::connection::{Admission, Connection};
use crate::error::{ConnectionError, SendError};
use crate::mux::ConnectionId;
use crate::sync::Arc;

/// A message. Until it is dropped it counts against the limits of its connection, and in a connection that keeps its
/// order the next message waits for that.
pub struct Message {
    conn: Option<Arc<Connection>>,
    bytes: Chunk,
    class: Option<usize>,
    more: bool,
}

impl Message {
    pub(super) fn of_lease(source: Arc<Connection>, bytes: Chunk, class: Option<usize>, more: bool) -> Self {
        Self { conn: Some(source), bytes, class, more }
    }

    /// A message of a batch that is worked on in place, to be kept for longer. It is done with on its own.
    pub(crate) fn of_batch(batch: &InPlaceBatch, range: Range<usize>) -> Self {
        Self { conn: Some(Arc::clone(&batch.source)), bytes: batch.chunk.slice(range), class: batch.class, more: false }
    }

    /// The message.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its bytes, to be kept for longer than the message. At most 2 KiB that were received in one piece are copied into a
    /// short slot while the socket that received them has one of its 1024 free, and occupy no more than that; anything else
    /// stays where it was received.
    pub fn keep(&self) -> Chunk {
        self.bytes.clone().into_short()
    }

    /// Its bytes where they were received.
    pub(super) fn chunk(&self) -> Chunk {
        self.bytes.clone()
    }

    /// The connection it came on.
    pub fn connection(&self) -> ConnectionId {
        self.conn.as_ref().map_or(ConnectionId { index: u32::MAX, generation: u32::MAX }, |conn| conn.id)
    }

    /// Answers. Success means that the answer is queued, whole, behind what was queued for this connection before.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`] while the replies queued for the connection use up its budget
    /// ([`Limits::connection_bytes_max`](ksf::limits::Limits::connection_bytes_max)): try again, or wait with
    /// [`MessageSocket::send`] and [`SendOptions::to`]. A program that answers each message before it receives many others
    /// does not meet it, because messages of a connection whose replies wait are not received. [`SendError::Gone`].
    pub fn reply(&self, body: &[u8]) -> Result<(), SendError> {
        self.reply_with(|tail| tail.extend_from_slice(body))
    }

    /// Answers with what `write` appends to the buffer it is given. It must not touch what is there already.
    pub fn reply_with(&self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), SendError> {
        let Some(conn) = &self.conn else { return Err(SendError::Gone(self.connection())) };
        conn.mux.reply(conn, Admission::Answer, self.more, write)
    }

    /// Answers with bytes that are sent from where they lie.
    pub fn reply_chunk(&self, body: Chunk) -> Result<(), SendError> {
        let Some(conn) = &self.conn else { return Err(SendError::Gone(self.connection())) };
        conn.mux.reply_chunk(conn, Admission::Answer, self.more, body)
    }

    pub(crate) fn conn(&self) -> Option<&Arc<Connection>> {
        self.conn.as_ref()
    }

    pub(super) fn take_end(&mut self) -> Option<(Arc<Connection>, usize, Option<usize>)> {
        Some((self.conn.take()?, self.bytes.len(), self.class))
    }
}

impl std::ops::Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message").field("connection", &self.connection()).field("len", &self.bytes.len()).finish()
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        let Some((conn, bytes, class)) = self.take_end() else { return };
        if std::thread::panicking() {
            conn.mux.end(&conn, ConnectionError::WorkerPanicked);
        }
        conn.mux.finish(None, &conn, 1, bytes, class);
    }
}
