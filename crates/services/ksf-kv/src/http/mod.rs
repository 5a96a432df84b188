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

pub(crate) use answer::{execute, fail, refuse, reply_bytes, welcome};
pub(crate) use reader::{Reader, STRANGER_BYTES_MAX, Taken};
pub(crate) use request::Request;
pub use shown::Requests;

use ksf_proto::resp::{INLINE_BYTES_MAX, inline};

/// Bytes of a response that has no value and no list in it, and of the head of one that has.
pub(crate) const SHORT_REPLY_BYTES: usize = 512;

/// What the first line of a connection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spoken {
    Resp,
    Http,
    /// An empty line, of so many bytes: the next one tells.
    Empty,
    /// Neither: a line without a command of this server, of so many bytes. Nothing of the connection is carried out.
    Unknown(usize),
}

pub(crate) const METHODS: [&[u8]; 9] =
    [b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"TRACE ", b"CONNECT "];

/// Tells what the first bytes of a connection begin, of which `scanned` were looked at before; `None` while that is open.
/// `is_command`: whether a name is one of a command.
///
/// HTTP is a line that begins with a method that is no command, or has a version behind a target; a version alone is
/// enough where the first word is no command. A line that is neither that nor RESP must not be taken for an inline
/// command: what follows it may be the body of a request that another person's browser or server was made to send.
pub(crate) fn spoken(buf: &[u8], scanned: usize, is_command: impl Fn(&[u8]) -> bool) -> Option<Spoken> {
    if buf.first()? == &b'*' {
        return Some(Spoken::Resp);
    }
    // Of the methods GET alone is a command. A path may be longer than an inline command.
    if METHODS[1..].iter().any(|method| buf.starts_with(method)) {
        return Some(Spoken::Http);
    }
    let front = &buf[..buf.len().min(INLINE_BYTES_MAX)];
    let from = scanned.min(front.len());
    let Some(behind) = front[from..].iter().position(|byte| *byte == b'\n') else {
        if front.len() < INLINE_BYTES_MAX {
            return None;
        }
        // An inline command is never so long.
        return Some(if buf.starts_with(b"GET /") { Spoken::Http } else { Spoken::Resp });
    };
    let line = &buf[..=from + behind];
    let words: Vec<&[u8]> = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).collect();
    let Some(first) = words.first() else { return Some(Spoken::Empty) };
    let has_version = words.iter().skip(2).any(|word| has_prefix(word, b"HTTP/"));
    let is_target = |word: &[u8]| word.starts_with(b"/") || word == b"*" || word.windows(3).any(|part| part == b"://");
    let is_method = *first == b"GET" || !is_command(first);
    if has_version && (is_method || is_target(words[1])) {
        return Some(Spoken::Http);
    }
    match inline(line) {
        Ok(arguments) => Some(match arguments.first() {
            Some(name) if !is_command(name) => Spoken::Unknown(line.len()),
            _ => Spoken::Resp,
        }),
        // What is wrong with it is told where commands are cut.
        Err(_) => Some(Spoken::Resp),
    }
}

fn has_prefix(word: &[u8], prefix: &[u8]) -> bool {
    word.get(..prefix.len()).is_some_and(|front| front.eq_ignore_ascii_case(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_from_commands() {
        let is_command = |name: &[u8]| crate::commands::is_command(name);
        for (text, wanted) in [
            ("*1\r\n$4\r\nPING\r\n", Spoken::Resp),
            ("PING\r\n", Spoken::Resp),
            ("PUTTY x\r\n", Spoken::Unknown(9)),
            ("\r\n", Spoken::Empty),
            (" \t\r\n", Spoken::Empty),
            ("\n", Spoken::Empty),
            (" ping\n", Spoken::Resp),
            ("\"PING\" x\r\n", Spoken::Resp),
            ("PING \"\r\n", Spoken::Resp),
            ("PING\0\r\n", Spoken::Resp),
            ("SET version HTTP/1.1\r\n", Spoken::Resp),
            ("SET /key HTTP/1.1\r\n", Spoken::Http),
            ("del * http/1.1\r\n", Spoken::Http),
            ("DEL http://x/ HTTP/1.1\r\n", Spoken::Http),
            ("DEL HTTPS://x/ HTTP/1.1\r\n", Spoken::Http),
            ("PROPFIND / HTTP/1.1\r\n", Spoken::Http),
            ("propfind\t/\tHTTP/1.1\r\n", Spoken::Http),
            (" POST / HTTP/1.1\r\n", Spoken::Http),
            ("x / HTTP/1.1 more\r\n", Spoken::Http),
            ("PROPFIND /\r\n", Spoken::Unknown(12)),
            ("post /\r\n", Spoken::Unknown(8)),
            ("Host: x\r\n", Spoken::Unknown(9)),
            ("{\"a\": 1}\n", Spoken::Resp),
            ("\x16\x03\x01\n", Spoken::Unknown(4)),
            ("\0\n", Spoken::Resp),
            ("GET key\r\n", Spoken::Resp),
            ("GET /key\r\n", Spoken::Resp),
            ("GET HTTP/1.1\r\n", Spoken::Resp),
            ("GET  HTTP/1.1\r\n", Spoken::Resp),
            ("get /key HTTP/1.1\r\n", Spoken::Http),
            ("GET /key HTTP/1.1\r\nHost: x\r\n", Spoken::Http),
            ("GET /key HTTP/1.0\n", Spoken::Http),
            ("PUT /key HTTP/1.1\r\n", Spoken::Http),
            ("POST / HTTP/1.1\r\n", Spoken::Http),
            ("OPTIONS * HTTP/1.1\r\n", Spoken::Http),
        ] {
            let (text, mut scanned) = (text.as_bytes(), 0);
            assert_eq!(spoken(text, 0, is_command), Some(wanted), "{}", text.escape_ascii());
            // In steps: once it is told, it is the same.
            let told = (0..=text.len()).find_map(|bytes| {
                let told = spoken(&text[..bytes], scanned, is_command);
                scanned = bytes;
                told
            });
            assert_eq!(told, Some(wanted), "{}", text.escape_ascii());
        }
        // What was looked at is not looked at again, or a line that comes byte by byte costs the square of its length.
        assert_eq!(spoken(b"PING\r\nPI", 6, is_command), None);
        let long = |start: &str| [start.as_bytes(), &vec![b'x'; INLINE_BYTES_MAX][..]].concat();
        assert_eq!(spoken(&long("GET /"), 0, is_command), Some(Spoken::Http));
        assert_eq!(spoken(&long("GET "), 0, is_command), Some(Spoken::Resp));
    }
}
