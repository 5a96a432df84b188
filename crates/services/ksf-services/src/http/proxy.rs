//! The proxy: each request is passed to a backend, and its answer to the client.
//!
//! ```text
//!   client ── head, body pieces ──► Reader ──► Reply::pass ──► backend       requests of a connection one by one
//!          ◄─ head, body pieces ── Answer ◄── Upstream::Received ──┘
//! ```
//!
//! Heads are read and written anew without what is for one hop only; bodies pass in pieces, as they are on the wire. A response
//! that ends with its connection is whole only if the connection ends in order (RFC 9112, section 8). To a client of HTTP/1.1 it
//! goes in chunks, the last of them after that end; the connection of an older client is reset where the rest is missing.
//! Backends take turns. Connections to them are kept, per shard, as far as they allow it. A request is repeated, on the
//! next backend, if no byte of an answer was seen and that does no harm: it never reached a backend, or it is
//! idempotent (RFC 9110, section 9.2.2), and nothing of its body is gone.
//!
//! The state of a connection keeps the head of a request that may be repeated, and the head of an answer that has arrived
//! in part. Both count as session state. A head longer than [`EXPECTED_REPLY_BYTES`] is kept only while the shard has room:
//! without room a request is not repeated, and the exchange ends with 503 for an answer.

use std::net::SocketAddr;
use std::sync::Arc;

use ksf::error::FramingError;
use ksf::framing::{Frame, Framing};
use ksf::limits::Limits;
use ksf::outgoing::{Failure, HangUp, Upstream};
use ksf::pool::Chunk;
use ksf::service::EXPECTED_REPLY_BYTES;
use ksf::stats::Counter;
use ksf::{CloseReason, Message, Peer, Profile, Refused, Reply, ReplyEnd, Service, SessionState};
use ksf_proto::http1::{
    Body, BodyLength, CHUNK_END, LAST_CHUNK, Request, Response, begin_chunk, forward_request, forward_response,
    head_bytes,
};

use super::counts::{Counts, WorkerCounts};
use super::page::refusal;
use super::reader::{Piece, Reader};
use super::refuse;

/// Longest head of an answer, in bytes. Backends are trusted with more than clients are: cookies are made there.
const ANSWER_HEAD_BYTES_MAX: usize = 64 << 10;

/// Most interim answers (RFC 9110, section 15.2) of one exchange. Each costs a shard the work of a head, and a receive slot
/// has room for thousands.
const INTERIM_ANSWERS_MAX: u32 = 16;

/// Bytes that a head that is passed on has more than it had, at most as a rule.
const ADDED_BYTES: usize = 64;

/// Passes every request to one of several backends.
#[derive(Debug)]
pub struct Proxy {
    backends: Vec<SocketAddr>,
    keep_alive: bool,
    counts: Arc<Counts>,
    /// Whose turn it is, for each shard.
    turns: Box<[Counter]>,
}

/// A client's connection.
#[derive(Debug, Default)]
pub struct ProxyClient {
    reader: Reader,
    exchange: Option<Exchange>,
    reply_end: ReplyEnd,
}

impl ProxyClient {
    /// Nothing more of a response comes that may have begun.
    fn cut_short(&mut self) {
        if self.reply_end == ReplyEnd::Close {
            self.reply_end = ReplyEnd::CutShort;
        }
    }
}

/// A request that is with a backend.
#[derive(Debug)]
struct Exchange {
    request: Request,
    /// The head as it was passed on, for another backend. Empty if the request cannot be repeated: there is no room to keep
    /// the head, a backend may have acted on the request, a part of the body was passed on, or an answer has begun.
    head: Vec<u8>,
    /// Whose turn it was.
    turn: usize,
    attempts: usize,
    answer: Answer,
    interim_answers: u32,
    /// The client may send another request when the answer is complete.
    keep_alive: bool,
    backend_keeps_alive: bool,
    /// An interim answer said to have a body: bytes may follow that belong to nothing.
    is_misframed: bool,
}

/// How far the answer has come.
#[derive(Debug)]
enum Answer {
    /// No byte yet.
    Nothing,
    /// In a head that did not arrive in one piece.
    Head(Vec<u8>),
    Body(Body),
}

/// An answer that cannot be passed on.
enum BadAnswer {
    Malformed,
    /// The shard has no room to keep its head.
    NoRoom,
}

/// True if the state of a connection may keep `bytes` of a head, `more_bytes` more than before. Each connection may keep a
/// short head without room, as it may have a short reply.
fn has_room(bytes: usize, more_bytes: usize, reply: &Reply<'_>) -> bool {
    bytes <= EXPECTED_REPLY_BYTES || more_bytes <= reply.session_room()
}

impl Proxy {
    /// A proxy of so many shards. With `keep_alive` clients may send more than one request on a connection.
    ///
    /// # Panics
    /// If there is no backend.
    pub fn new(backends: Vec<SocketAddr>, keep_alive: bool, shards: usize) -> Self {
        assert!(!backends.is_empty(), "a proxy has at least one backend");
        // Shards begin with different backends.
        let turns: Box<[Counter]> = (0..shards.max(1)).map(|_| Counter::default()).collect();
        turns.iter().zip(0..).for_each(|(turn, shard)| turn.add(shard));
        Self { backends, keep_alive, counts: Arc::new(Counts::new(shards)), turns }
    }

    /// What each shard counted.
    pub fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    fn begin(&self, client: &mut ProxyClient, request: Request, head: &[u8], reply: &mut Reply<'_>) {
        let counts = self.counts.of(client.reader.shard);
        counts.requests.add(1);
        if request.max_forwards == Some(0) {
            return self.answer_as_last(client, head, reply);
        }
        let mut passed = Vec::with_capacity(head.len() + ADDED_BYTES);
        // It was read before, so it can be written.
        if forward_request(head, true, &mut passed).is_err() {
            return self.fail(client, 400, reply);
        }
        let turn = &self.turns[client.reader.shard.min(self.turns.len() - 1)];
        let first = turn.value() as usize;
        turn.add(1);
        let is_kept = has_room(passed.len(), passed.len(), reply);
        client.exchange = Some(Exchange {
            request,
            head: if is_kept { passed.clone() } else { Vec::new() },
            turn: first,
            attempts: 0,
            answer: Answer::Nothing,
            interim_answers: 0,
            keep_alive: self.keep_alive && request.keep_alive,
            backend_keeps_alive: false,
            is_misframed: false,
        });
        self.ask(client, passed, true, reply);
    }

    /// Answers an OPTIONS or a TRACE that may pass no further proxy (RFC 9110, section 7.6.2).
    fn answer_as_last(&self, client: &mut ProxyClient, head: &[u8], reply: &mut Reply<'_>) {
        const ALLOW: &[u8] = b"Allow: GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH\r\n";
        const END: &[u8] = b"Content-Length: 0\r\nConnection: close\r\n\r\n";
        // A proxy that sent the request back would show fields that the client's page must not see.
        let is_trace = head.starts_with(b"TRACE ");
        let line = if is_trace { &b"HTTP/1.1 405 Method Not Allowed\r\n"[..] } else { b"HTTP/1.1 200 OK\r\n" };
        client.reader.finish_request();
        reply.message(|out| [line, ALLOW, END].iter().for_each(|part| out.extend_from_slice(part)));
        reply.close();
    }

    /// Sends the head to the backend whose turn it is.
    fn ask(&self, client: &mut ProxyClient, head: Vec<u8>, reuse: bool, reply: &mut Reply<'_>) {
        let Some(exchange) = &mut client.exchange else { return };
        let backend = self.backends[(exchange.turn + exchange.attempts) % self.backends.len()];
        exchange.attempts += 1;
        if reply.dial(backend, reuse).is_err() {
            // Not on a shard. Who checked `needs_shards` does not come here.
            return self.failed(client, Failure::NoResources, reply);
        }
        if reply.pass(Chunk::from_vec(head)).is_err() {
            // Not so soon behind a dial.
            self.failed(client, Failure::NotTaken, reply);
        }
    }

    /// Bytes of an answer.
    fn received(&self, client: &mut ProxyClient, chunk: &Chunk, reply: &mut Reply<'_>) {
        let counts = self.counts.of(client.reader.shard);
        let request_over = client.reader.is_at_end();
        let Some(exchange) = &mut client.exchange else { return };
        if !chunk.is_empty() {
            exchange.head = Vec::new();
        }
        let mut at = 0;
        while at < chunk.len() {
            let step = match &mut exchange.answer {
                Answer::Body(body) if body.is_done() => break,
                Answer::Body(body) => match body.take(&chunk[at..]) {
                    Ok(bytes) => {
                        let piece = chunk.slice(at..at + bytes);
                        if body.is_until_close() && exchange.request.minor > 0 {
                            reply.parts(|head| begin_chunk(bytes, head), piece, CHUNK_END);
                        } else {
                            reply.chunk(piece);
                        }
                        Ok(bytes)
                    }
                    Err(_) => Err(BadAnswer::Malformed),
                },
                _ => exchange.take_head(&chunk[at..], request_over, reply),
            };
            match step {
                Ok(bytes) => at += bytes,
                Err(BadAnswer::Malformed) => {
                    counts.backend_malformed.add(1);
                    return self.give_up(client, 502, reply);
                }
                Err(BadAnswer::NoRoom) => {
                    counts.count_failure(Failure::NoResources);
                    return self.give_up(client, 503, reply);
                }
            }
        }
        if exchange.request.minor == 0 && exchange.is_until_close() {
            client.reply_end = ReplyEnd::Close;
        }
        // Bytes behind the answer belong to nothing that was asked.
        let surplus = at < chunk.len();
        if matches!(&exchange.answer, Answer::Body(body) if body.is_done()) {
            self.complete(client, !surplus, reply);
        }
    }

    /// The answer was passed on in full.
    fn complete(&self, client: &mut ProxyClient, in_step: bool, reply: &mut Reply<'_>) {
        let Some(exchange) = client.exchange.take() else { return };
        let request_over = client.reader.is_at_end();
        if exchange.request.minor > 0 && exchange.is_until_close() {
            reply.bytes(LAST_CHUNK);
        }
        reply.hang_up(match exchange.backend_keeps_alive && in_step {
            _ if !request_over => HangUp::Reset,
            true => HangUp::Keep,
            false => HangUp::Close,
        });
        reply.hold(false);
        client.reader.finish_request();
        if exchange.keep_alive {
            return;
        }
        if exchange.request.keep_alive || !request_over { reply.close() } else { reply.close_at_once() }
    }

    /// The backend will not answer, or not to the end.
    fn failed(&self, client: &mut ProxyClient, failure: Failure, reply: &mut Reply<'_>) {
        let counts = self.counts.of(client.reader.shard);
        let Some(exchange) = &client.exchange else { return };
        let awaits_body = client.reader.is_mid_body() && exchange.awaits_body(client.reader.has_begun_body());
        if failure == Failure::Silent && awaits_body {
            return self.give_up(client, 408, reply);
        }
        if !matches!(exchange.answer, Answer::Nothing) {
            counts.backend_truncated.add(1);
            return self.give_up(client, 502, reply);
        }
        counts.count_failure(failure);
        let (may_repeat, status) = match failure {
            Failure::ConnectTimeout => (true, 504),
            Failure::Silent | Failure::NotTaken => (false, 504),
            Failure::NoResources => (false, 503),
            _ => (true, 502),
        };
        // One attempt more than there are backends: the first may have been a kept connection that had ended.
        if may_repeat && !exchange.head.is_empty() && exchange.attempts <= self.backends.len() {
            counts.repeated.add(1);
            let head = exchange.head.clone();
            // On a new connection: kept ones may all have ended when the backend was started anew.
            return self.ask(client, head, false, reply);
        }
        self.give_up(client, status, reply);
    }

    /// Tells the client, if nothing of an answer was passed on, and closes.
    fn give_up(&self, client: &mut ProxyClient, status: u16, reply: &mut Reply<'_>) {
        reply.hang_up(HangUp::Reset);
        let begun = matches!(&client.exchange, Some(Exchange { answer: Answer::Body(_), .. }));
        client.exchange = None;
        if begun {
            // The client sees that the answer ends early.
            client.cut_short();
            client.reader.finish_request();
            reply.hold(false);
            return reply.close();
        }
        self.fail(client, status, reply);
    }

    fn fail(&self, client: &mut ProxyClient, status: u16, reply: &mut Reply<'_>) {
        self.counts.of(client.reader.shard).count_refusal(status);
        client.reader.finish_request();
        reply.message(|out| refusal(status, out));
        reply.hold(false);
        reply.close();
    }
}

impl Exchange {
    /// True while a body is passed on that ends with the backend's connection.
    fn is_until_close(&self) -> bool {
        matches!(&self.answer, Answer::Body(body) if body.is_until_close())
    }

    /// True while the next move is the client's, if it has not sent all of its body: the backend has not begun its final answer,
    /// and the client, which has `begun` to send it, does not wait for an interim one.
    fn awaits_body(&self, begun: bool) -> bool {
        let is_unanswered = match &self.answer {
            Answer::Nothing => true,
            Answer::Head(kept) => kept.is_empty(),
            Answer::Body(_) => false,
        };
        is_unanswered && (begun || !self.request.expects_continue || self.interim_answers > 0)
    }

    /// Memory of the heads that are kept.
    fn kept_bytes(&self) -> usize {
        let answer_bytes = if let Answer::Head(kept) = &self.answer { kept.capacity() } else { 0 };
        self.head.capacity() + answer_bytes
    }

    /// Goes on with the head of the answer, and passes it on when it is whole. How many bytes it took.
    fn take_head(&mut self, bytes: &[u8], request_over: bool, reply: &mut Reply<'_>) -> Result<usize, BadAnswer> {
        let mut kept = match std::mem::replace(&mut self.answer, Answer::Nothing) {
            Answer::Head(kept) => kept,
            _ => Vec::new(),
        };
        let scanned = kept.len();
        if scanned == 0
            && let Some(length) = head_bytes(bytes, 0)
        {
            self.pass_head(&bytes[..length], request_over, reply)?;
            return Ok(length);
        }
        let left = ANSWER_HEAD_BYTES_MAX - scanned;
        let taken = bytes.len().min(left);
        if scanned + taken > kept.capacity() {
            // A power of two, so that a head in many pieces is not copied for each of them.
            let capacity = (scanned + taken).next_power_of_two();
            if !has_room(capacity, capacity - kept.capacity(), reply) {
                return Err(BadAnswer::NoRoom);
            }
            kept.reserve_exact(capacity - scanned);
        }
        kept.extend_from_slice(&bytes[..taken]);
        match head_bytes(&kept, scanned) {
            Some(length) => {
                self.pass_head(&kept[..length], request_over, reply)?;
                Ok(length - scanned)
            }
            None if taken == left => Err(BadAnswer::Malformed),
            None => {
                self.answer = Answer::Head(kept);
                Ok(bytes.len())
            }
        }
    }

    fn pass_head(&mut self, head: &[u8], request_over: bool, reply: &mut Reply<'_>) -> Result<(), BadAnswer> {
        let minor = self.request.minor;
        let response = Response::parse(head, self.request.is_head).map_err(|_| BadAnswer::Malformed)?;
        let in_chunks = minor > 0 && response.body == BodyLength::UntilClose;
        // A buffer that grew by doubling would take twice the room of the head that was kept.
        let mut pass = |keep_alive| {
            reply.message(|out| {
                out.reserve(head.len() + ADDED_BYTES);
                forward_response(head, minor, keep_alive, in_chunks, out).map_err(|_| BadAnswer::Malformed)
            })
        };
        if response.status < 200 {
            // Not the end: the final head follows. Clients of HTTP/1.0 do not know interim answers.
            self.answer = Answer::Head(Vec::new());
            self.is_misframed |= response.misframed;
            self.interim_answers += 1;
            if self.interim_answers > INTERIM_ANSWERS_MAX {
                return Err(BadAnswer::Malformed);
            }
            return if minor == 0 { Ok(()) } else { pass(true) };
        }
        if minor == 0 && response.body == BodyLength::Chunked {
            return Err(BadAnswer::Malformed);
        }
        // An answer to half a request: the other half is not waited for.
        self.keep_alive &= request_over && (in_chunks || response.body != BodyLength::UntilClose);
        self.backend_keeps_alive = response.keep_alive && !self.is_misframed;
        pass(self.keep_alive)?;
        self.answer = Answer::Body(Body::new(response.body));
        Ok(())
    }
}

impl Service for Proxy {
    ksf::stateless!(shard);
    type Conn = ProxyClient;

    fn profile(&self) -> Profile<'_> {
        Profile {
            peer_speaks_first: true,
            needs_peer_addresses: false,
            needs_shards: true,
            ..Profile::new("demo", Framing::Custom)
        }
    }

    fn cut(&self, conn: &mut ProxyClient, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        conn.reader.cut(buf, scanned, limits)
    }

    fn session(&self, conn: &ProxyClient) -> SessionState {
        let bytes = conn.exchange.as_ref().map_or(0, Exchange::kept_bytes);
        SessionState { bytes, reply_end: conn.reply_end, ..SessionState::default() }
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<ProxyClient, Refused> {
        Ok(ProxyClient::default())
    }

    fn call(&self, (): &mut (), conn: &mut ProxyClient, message: &Message<'_>, reply: &mut Reply<'_>) {
        conn.reader.shard = reply.shard();
        match conn.reader.take_piece() {
            Piece::Head(request) => self.begin(conn, request, message.bytes(), reply),
            Piece::Body => {
                if let Some(exchange) = &mut conn.exchange {
                    exchange.head = Vec::new();
                    if reply.pass(message.keep()).is_err() {
                        // No message comes while a backend takes nothing.
                        self.failed(conn, Failure::NotTaken, reply);
                    }
                }
            }
            Piece::Empty => {}
        }
        if conn.exchange.is_some() && conn.reader.is_at_end() {
            // The next request waits for this answer.
            reply.hold(true);
        }
    }

    fn upstream(&self, (): &mut (), conn: &mut ProxyClient, event: Upstream, reply: &mut Reply<'_>) {
        match event {
            Upstream::Connected { .. } => {
                // From now on the backend may have acted on the request.
                if let Some(exchange) = conn.exchange.as_mut().filter(|exchange| !exchange.request.idempotent) {
                    exchange.head = Vec::new();
                }
            }
            Upstream::Received(chunk) => self.received(conn, &chunk, reply),
            Upstream::Ended => {
                if conn.exchange.as_ref().is_some_and(Exchange::is_until_close) {
                    self.complete(conn, false, reply);
                } else {
                    self.failed(conn, Failure::Reset, reply);
                }
            }
            Upstream::Failed(failure) => self.failed(conn, failure, reply),
            // Half a request will never be whole; for a whole one the client still reads.
            Upstream::ClientEnded if conn.reader.is_mid_body() => {
                conn.cut_short();
                reply.hang_up(HangUp::Reset);
            }
            _ => {}
        }
    }

    fn refuse(&self, (): &mut (), conn: &mut ProxyClient, reason: CloseReason, reply: &mut Reply<'_>) {
        reply.hang_up(HangUp::Reset);
        let begun = matches!(&conn.exchange, Some(Exchange { answer: Answer::Body(_), .. }));
        conn.exchange = None;
        let counts: &WorkerCounts = self.counts.of(reply.shard());
        if begun {
            counts.bad_requests.add(1);
            conn.reader.finish_request();
        } else {
            refuse(&mut conn.reader, reason, reply, counts);
        }
    }

    fn close(&self, (): &mut (), conn: ProxyClient) {
        if conn.exchange.is_some() || conn.reader.is_mid_body() {
            self.counts.of(conn.reader.shard).clients_gone.add(1);
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.counts.sum()
    }
}
