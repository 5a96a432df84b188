//! Replies while they are sent.

use super::{Output, Piece, Spares};

/// Replies that the engine owns.
#[derive(Debug, Default)]
pub struct SendBatch {
    pub(super) output: Output,
    /// Bytes of the first piece (or of the tail, when there is no piece) that are sent.
    pub(super) sent: usize,
}

impl SendBatch {
    /// Bytes left to send.
    pub fn len(&self) -> usize {
        self.output.len() - self.sent
    }

    /// True when everything is sent.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The unsent bytes, if they lie in one buffer.
    #[inline]
    pub(crate) fn as_slice(&self) -> Option<&[u8]> {
        if self.output.has_no_pieces() { self.output.tail.get(self.sent..) } else { None }
    }

    /// The unsent bytes in order, as far as `slices` has room; returns how many slices were filled. Their addresses
    /// stay valid while the batch is not changed, also when it is moved.
    pub fn slices<'a>(&'a self, slices: &mut [&'a [u8]]) -> usize {
        let pieces = self.output.pieces().map(Piece::as_slice);
        let parts = pieces.chain([self.output.tail.as_slice()]);
        let mut filled = 0;
        for (at, part) in parts.enumerate() {
            let part = if at == 0 { &part[self.sent..] } else { part };
            if part.is_empty() {
                continue;
            }
            let Some(slot) = slices.get_mut(filled) else { break };
            *slot = part;
            filled += 1;
        }
        filled
    }

    /// Marks `bytes` more bytes as sent and lets go of what is sent completely.
    pub fn advance(&mut self, bytes: usize, spares: &mut Spares) {
        self.sent += bytes;
        while let Some(front) = &mut self.output.front
            && let Some(piece) = front.pieces.front()
        {
            let len = piece.len();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            if let Some(Piece::Bytes(bytes)) = front.pop_front() {
                spares.give(bytes);
            }
        }
        debug_assert!(self.sent <= self.output.tail.len(), "more bytes sent than there were");
    }

    /// Gives the buffers back for reuse.
    pub fn recycle(self, spares: &mut Spares) {
        let Output { mut front, tail } = self.output;
        spares.give(tail);
        while let Some(piece) = front.as_mut().and_then(|front| front.pop_front()) {
            if let Piece::Bytes(bytes) = piece {
                spares.give(bytes);
            }
        }
        spares.give_front(front);
    }
}
