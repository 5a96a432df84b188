//! HTTP/1.1 on the port of RESP: keys as resources.
//!
//! ```text
//!   first line ─► spoken ─► reader.rs: cuts requests ─► request.rs: what one says ─► plan.rs: what it asks for
//!                       ─► answer.rs: the same reads and updates that commands use ─► response.rs, behind the same gates
//! ```

mod answer;
mod conditions;
mod plan;
mod reader;
mod request;
mod response;
mod shown;

pub(crate) use answer::{execute, fail, refuse, welcome};
pub(crate) use reader::{Reader, Taken};
pub(crate) use request::Request;
pub use shown::Requests;

use ksf_proto::resp::INLINE_BYTES_MAX;

/// Bytes of a response that has no value and no list in it, and of the head of one that has.
pub(crate) const SHORT_REPLY_BYTES: usize = 512;

/// What a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spoken {
    Resp,
    Http,
}

const METHODS: [&[u8]; 9] =
    [b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE ", b"CONNECT "];

/// What the first bytes of a connection are, of which `scanned` were looked at before; `None` while they may be either. No
/// inline command begins as a request does: of the methods only GET is a command, and that has one argument.
pub(crate) fn spoken(buf: &[u8], scanned: usize) -> Option<Spoken> {
    if METHODS.iter().any(|method| method.len() > buf.len() && method.starts_with(buf)) {
        return None;
    }
    if !METHODS.iter().any(|method| buf.starts_with(method)) {
        return Some(Spoken::Resp);
    }
    if !buf.starts_with(b"GET ") {
        return Some(Spoken::Http);
    }
    let from = scanned.min(buf.len());
    let is_http = match buf[from..].iter().position(|byte| *byte == b'\n') {
        Some(behind) => {
            let mut words = buf[..from + behind].split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
            words.nth(2).is_some_and(|version| version.starts_with(b"HTTP/"))
        }
        // An inline command is never so long.
        None if buf.len() >= INLINE_BYTES_MAX => buf[4] == b'/',
        None => return None,
    };
    Some(if is_http { Spoken::Http } else { Spoken::Resp })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_from_commands() {
        for (text, wanted) in [
            ("*1\r\n$4\r\nPING\r\n", Spoken::Resp),
            ("PING\r\n", Spoken::Resp),
            ("PUTTY x\r\n", Spoken::Resp),
            ("\r\n", Spoken::Resp),
            ("GET key\r\n", Spoken::Resp),
            ("GET /key\r\n", Spoken::Resp),
            ("GET HTTP/1.1\r\n", Spoken::Resp),
            ("GET  HTTP/1.1\r\n", Spoken::Resp),
            ("get /key HTTP/1.1\r\n", Spoken::Resp),
            ("GET /key HTTP/1.1\r\nHost: x\r\n", Spoken::Http),
            ("GET /key HTTP/1.0\n", Spoken::Http),
            ("PUT /key HTTP/1.1\r\n", Spoken::Http),
            ("POST / HTTP/1.1\r\n", Spoken::Http),
            ("OPTIONS * HTTP/1.1\r\n", Spoken::Http),
        ] {
            let (text, mut scanned) = (text.as_bytes(), 0);
            assert_eq!(spoken(text, 0), Some(wanted), "{}", text.escape_ascii());
            // In steps: once it is told, it is the same.
            let told = (0..=text.len()).find_map(|bytes| {
                let told = spoken(&text[..bytes], scanned);
                scanned = bytes;
                told
            });
            assert_eq!(told, Some(wanted), "{}", text.escape_ascii());
        }
        let long = |start: &str| [start.as_bytes(), &vec![b'x'; INLINE_BYTES_MAX][..]].concat();
        assert_eq!(spoken(&long("GET /"), 0), Some(Spoken::Http));
        assert_eq!(spoken(&long("GET "), 0), Some(Spoken::Resp));
    }
}
