//! HTTP/1: the demo server, which answers every request with one page ([`PageServer`]), or asks a backend ([`Proxy`]).
//!
//! The stream is cut by the service itself ([`Framing::Custom`]): a head is a message, and a body passes in pieces as
//! they arrive, so that its length costs no memory. Requests that make no sense are answered with the status that says
//! so, the connection is closed, and both are counted.

mod counts;
mod page;
mod proxy;
mod reader;

use std::sync::Arc;

use ksf::error::FramingError;
use ksf::framing::{Frame, Framing};
use ksf::limits::Limits;
use ksf::{CloseReason, Message, Peer, Profile, Refused, Reply, Service, SessionState};

pub use counts::{Counts, WorkerCounts};
use page::{Page, refusal};
pub use proxy::Proxy;
use reader::Piece;
pub use reader::Reader;

/// Answers every request with the same page.
#[derive(Debug)]
pub struct PageServer {
    page: Page,
    keep_alive: bool,
    counts: Arc<Counts>,
}

impl PageServer {
    /// A page of `body_bytes` bytes, served by so many shards. Without `keep_alive` each connection is closed after
    /// its first answer, as Fastsocket's demo server does without its option -k.
    pub fn new(body_bytes: usize, keep_alive: bool, shards: usize) -> Self {
        Self { page: Page::new(body_bytes), keep_alive, counts: Arc::new(Counts::new(shards)) }
    }

    /// What each shard counted.
    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }
}

impl Service for PageServer {
    ksf::stateless!(shard);
    type Conn = Reader;

    fn profile(&self) -> Profile<'_> {
        Profile { peer_speaks_first: true, needs_peer_addresses: false, ..Profile::new("demo", Framing::Custom) }
    }

    fn cut(&self, conn: &mut Reader, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        conn.cut(buf, scanned, limits)
    }

    fn session(&self, conn: &Reader) -> SessionState {
        SessionState { awaits_rest: conn.is_mid_body(), ..SessionState::default() }
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<Reader, Refused> {
        Ok(Reader::default())
    }

    fn call(&self, (): &mut (), conn: &mut Reader, _: &Message<'_>, reply: &mut Reply<'_>) {
        conn.shard = reply.shard();
        let counts = self.counts.of(conn.shard);
        let piece = conn.take_piece();
        if let Piece::Head(request) = piece {
            counts.requests.add(1);
            if request.expects_continue && !conn.is_at_end() {
                reply.bytes(b"HTTP/1.1 100 Continue\r\n\r\n");
            }
        }
        if !conn.is_at_end() {
            return;
        }
        let Some(request) = conn.finish_request() else { return };
        let keep_alive = self.keep_alive && request.keep_alive;
        self.page.answer(&request, keep_alive, reply);
        if keep_alive {
            return;
        }
        // A client that did not ask for the end may have sent the next request already: its bytes must not reset the
        // connection before it has read this answer.
        if request.keep_alive { reply.close() } else { reply.close_at_once() }
    }

    fn reply_bytes(&self, (): &mut (), conn: &mut Reader, _: &[u8]) -> usize {
        conn.whole_request().map_or(0, |request| self.page.answer_bytes_max(request))
    }

    fn refuse(&self, (): &mut (), conn: &mut Reader, reason: CloseReason, reply: &mut Reply<'_>) {
        refuse(conn, reason, reply, self.counts.of(reply.shard()));
    }

    fn close(&self, (): &mut (), conn: Reader) {
        if conn.is_mid_body() {
            // Its shard's thread is the one that closes it.
            self.counts.of(conn.shard).clients_gone.add(1);
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.counts.sum()
    }
}

/// Tells a client what was wrong, and counts it.
fn refuse(conn: &mut Reader, reason: CloseReason, reply: &mut Reply<'_>, counts: &WorkerCounts) {
    let status = match reason {
        CloseReason::EndlessHeader => 431,
        CloseReason::AssemblyTimeout => 408,
        _ => conn.refusal_status(),
    };
    // Counted as refused, and not once more when the connection ends.
    conn.finish_request();
    counts.count_refusal(status);
    reply.message(|out| refusal(status, out));
}
