//! What the loops need to know of a protocol. No socket and no clock in here.

use crate::record::Sink;

/// The client side of a protocol on one connection.
///
/// The loops call [`encode`](Protocol::encode) once per request, and around every receive first
/// [`window`](Protocol::window), then [`received`](Protocol::received).
pub(crate) trait Protocol {
    /// The bytes of request number `index` with identifier `id`. Called with `index` 0, 1, 2, ...
    fn encode(&mut self, id: u32, index: u64) -> &[u8];

    /// Where the next received bytes go. The window is never longer than what completes one reply (and on a
    /// record-marked stream the next record's mark), unless `batch` allows more.
    fn window(&mut self, batch: bool) -> &mut [u8];

    /// `len` bytes were received into the window: some bytes of a stream, or one datagram.
    fn received(&mut self, len: usize, sink: &mut Sink<'_>);
}

/// Makes the protocol state of each connection.
pub(crate) trait Factory: Sync {
    /// The protocol this makes.
    type Protocol: Protocol;

    /// Fresh state for one connection.
    fn make(&self) -> Self::Protocol;

    /// Bits of a request's identifier on the wire.
    fn id_bits(&self) -> u32;

    /// Length of a request in bytes as it goes to the socket.
    fn request_bytes(&self) -> usize;
}
