//! Answers, written once.

use ksf_proto::http1::{Request, reason};

/// One page in the four forms in which it is asked for.
#[derive(Debug)]
pub(super) struct Page {
    close: Answer,
    keep_alive: Answer,
    /// For HTTP/1.0, where the connection stays only if that is said.
    keep_alive_told: Answer,
}

#[derive(Debug)]
struct Answer {
    bytes: Vec<u8>,
    head_bytes: usize,
}

impl Page {
    pub(super) fn new(body_bytes: usize) -> Self {
        let answer = |connection: &str| {
            let head = format!(
                "HTTP/1.1 200 OK\r\nServer: ksf\r\nContent-Type: text/plain\r\nContent-Length: {body_bytes}\r\n\
                 {connection}\r\n"
            );
            let mut bytes = head.into_bytes();
            let head_bytes = bytes.len();
            bytes.extend((0..body_bytes).map(body_byte));
            Answer { bytes, head_bytes }
        };
        Self {
            close: answer("Connection: close\r\n"),
            keep_alive: answer(""),
            keep_alive_told: answer("Connection: keep-alive\r\n"),
        }
    }

    /// Most bytes of [`Page::answer`].
    pub(super) fn answer_bytes_max(&self, request: &Request) -> usize {
        let longest = &self.keep_alive_told;
        if request.is_head { longest.head_bytes } else { longest.bytes.len() }
    }

    /// The bytes to send.
    pub(super) fn answer(&self, request: &Request, keep_alive: bool) -> &[u8] {
        let answer = match (keep_alive, request.minor) {
            (false, _) => &self.close,
            (true, 0) => &self.keep_alive_told,
            (true, _) => &self.keep_alive,
        };
        if request.is_head { &answer.bytes[..answer.head_bytes] } else { &answer.bytes }
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
