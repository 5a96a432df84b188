//! Answers, written once.

use ksf::Reply;
use ksf::pool::Chunk;
use ksf_proto::http1::{Request, reason};

/// Longest page that is copied behind each head. Copying it costs less than a holder of memory that all shards count.
const COPIED_BYTES_MAX: usize = 4 << 10;

/// One page in the four forms in which it is asked for.
#[derive(Debug)]
pub(super) struct Page {
    close: Answer,
    keep_alive: Answer,
    /// For HTTP/1.0, where the connection stays only if that is said.
    keep_alive_told: Answer,
    body_bytes: usize,
    /// The body, unless it is short: all responses send it from where it lies.
    shared: Option<Chunk>,
}

#[derive(Debug)]
struct Answer {
    /// The head, and a short body.
    bytes: Vec<u8>,
    head_bytes: usize,
}

impl Page {
    pub(super) fn new(body_bytes: usize) -> Self {
        let body: Vec<u8> = (0..body_bytes).map(body_byte).collect();
        let is_short = body_bytes <= COPIED_BYTES_MAX;
        let answer = |connection: &str| {
            let head = format!(
                "HTTP/1.1 200 OK\r\nServer: ksf\r\nContent-Type: text/plain\r\nContent-Length: {body_bytes}\r\n\
                 {connection}\r\n"
            );
            let mut bytes = head.into_bytes();
            let head_bytes = bytes.len();
            if is_short {
                bytes.extend_from_slice(&body);
            }
            Answer { bytes, head_bytes }
        };
        Self {
            close: answer("Connection: close\r\n"),
            keep_alive: answer(""),
            keep_alive_told: answer("Connection: keep-alive\r\n"),
            body_bytes,
            shared: (!is_short).then(|| Chunk::from_vec(body)),
        }
    }

    /// Most bytes of [`Page::answer`].
    pub(super) fn answer_bytes_max(&self, request: &Request) -> usize {
        let body_bytes = if request.is_head { 0 } else { self.body_bytes };
        self.keep_alive_told.head_bytes + body_bytes
    }

    /// Sends the response to a request.
    pub(super) fn answer(&self, request: &Request, keep_alive: bool, reply: &mut Reply<'_>) {
        let answer = match (keep_alive, request.minor) {
            (false, _) => &self.close,
            (true, 0) => &self.keep_alive_told,
            (true, _) => &self.keep_alive,
        };
        match &self.shared {
            _ if request.is_head => reply.bytes(&answer.bytes[..answer.head_bytes]),
            Some(body) => reply.parts(|out| out.extend_from_slice(&answer.bytes), body.clone(), b""),
            None => reply.bytes(&answer.bytes),
        }
    }
}

/// Lines of 63 letters, so that a page can be looked at, and a missing byte is seen.
fn body_byte(at: usize) -> u8 {
    if at % 64 == 63 { b'\n' } else { b'a' + (at % 64 % 26) as u8 }
}

/// Appends an answer that ends the connection.
pub(super) fn refusal(status: u16, out: &mut Vec<u8>) {
    let text = format!("HTTP/1.1 {status} {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", reason(status));
    out.extend_from_slice(text.as_bytes());
}
