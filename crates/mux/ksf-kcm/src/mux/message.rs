//! A message that AF_KCM has cut and a worker has received.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ksf::pool::Chunk;
use ksf_mux::backend::Received;
use ksf_mux::{ConnectionError, ConnectionId, SendError};

use super::connection::KernelConnection;

/// A message. Until it is dropped it counts against the limits of its connection.
pub struct KernelMessage {
    conn: Arc<KernelConnection>,
    bytes: Chunk,
}

impl KernelMessage {
    pub(super) fn new(conn: Arc<KernelConnection>, bytes: Chunk) -> Self {
        conn.waiting_messages.fetch_add(1, Ordering::SeqCst);
        conn.waiting_bytes.fetch_add(bytes.len(), Ordering::SeqCst);
        Self { conn, bytes }
    }

    /// The message.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The connection it came on.
    pub fn connection(&self) -> ConnectionId {
        self.conn.id
    }

    /// Answers. Success means that the answer is queued, whole, behind what was queued for this connection before.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`] while the replies queued for the connection use up its budget; [`SendError::Gone`].
    pub fn reply(&self, body: &[u8]) -> Result<(), SendError> {
        let shared = self.conn.shared().ok_or(SendError::Gone(self.conn.id))?;
        shared.reply(&self.conn, self.conn.answer_bytes_max(), body)
    }
}

impl Received for KernelMessage {
    fn connection(&self) -> ConnectionId {
        self.connection()
    }

    fn reply(&self, body: &[u8]) -> Result<(), SendError> {
        self.reply(body)
    }
}

impl Deref for KernelMessage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for KernelMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelMessage").field("connection", &self.conn.id).field("len", &self.bytes.len()).finish()
    }
}

impl Drop for KernelMessage {
    fn drop(&mut self) {
        self.conn.waiting_bytes.fetch_sub(self.bytes.len(), Ordering::SeqCst);
        self.conn.waiting_messages.fetch_sub(1, Ordering::SeqCst);
        let Some(shared) = self.conn.shared() else { return };
        if std::thread::panicking() {
            shared.refuse(&self.conn, ConnectionError::WorkerPanicked);
        }
        shared.resume(&self.conn);
        shared.settle(&self.conn);
    }
}
