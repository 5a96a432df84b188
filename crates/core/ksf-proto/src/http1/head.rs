//! Heads: the first line and the fields, up to the empty line.

use super::body::BodyLength;
use super::fields::{Fields, Trouble, read_fields};

/// Most fields a head may have.
pub const FIELDS_MAX: usize = 100;

/// Why a head is refused. [`BadHead::status`] is what a server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHead {
    /// It does not follow the grammar, or its fields contradict each other.
    #[error("the head is malformed: {0}")]
    Malformed(&'static str),
    /// More fields than [`FIELDS_MAX`].
    #[error("the head has more than {FIELDS_MAX} fields")]
    TooManyFields,
    /// A transfer coding other than `chunked` alone.
    #[error("the transfer coding is not chunked alone")]
    UnknownCoding,
    /// A version other than 1.0 and 1.1.
    #[error("the version is neither HTTP/1.0 nor HTTP/1.1")]
    Version,
    /// A method this reader cannot frame: CONNECT turns the connection into a tunnel.
    #[error("the method cannot be served")]
    Method,
    /// An expectation other than `100-continue`.
    #[error("the expectation cannot be met")]
    Expectation,
}

impl BadHead {
    /// The status to answer a request with (RFC 9110, section 15).
    pub fn status(self) -> u16 {
        match self {
            Self::Malformed(_) => 400,
            Self::TooManyFields => 431,
            Self::UnknownCoding => 501,
            Self::Version => 505,
            Self::Method => 405,
            Self::Expectation => 417,
        }
    }
}

/// Length of the head at the front of `buf`, its empty line included; `None` while that has not arrived. Empty lines
/// in front of the head belong to it (RFC 9112, section 2.2). The first `scanned` bytes were looked at before.
pub fn head_bytes(buf: &[u8], scanned: usize) -> Option<usize> {
    let start = buf.iter().position(|byte| !matches!(byte, b'\r' | b'\n'))?;
    // Three bytes back: the end may have begun before.
    let mut at = scanned.saturating_sub(3).max(start);
    loop {
        at += find_lf(buf.get(at..)?)?;
        match &buf[at + 1..] {
            [b'\n', ..] => return Some(at + 2),
            [b'\r', b'\n', ..] => return Some(at + 3),
            _ => at += 1,
        }
    }
}

/// The first line feed, eight bytes at a time: heads are searched once per request.
fn find_lf(buf: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const TOPS: u64 = u64::from_ne_bytes([0x80; 8]);
    const LINE_FEEDS: u64 = u64::from_ne_bytes([b'\n'; 8]);
    let mut words = buf.chunks_exact(8);
    for (at, word) in words.by_ref().enumerate() {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        // Zero where there is a line feed; the sum borrows from a byte only below one that is zero.
        let word = u64::from_le_bytes(bytes) ^ LINE_FEEDS;
        let zeros = word.wrapping_sub(ONES) & !word & TOPS;
        if zeros != 0 {
            return Some(at * 8 + zeros.trailing_zeros() as usize / 8);
        }
    }
    let rest = words.remainder();
    rest.iter().position(|byte| *byte == b'\n').map(|at| buf.len() - rest.len() + at)
}

/// What a request's head says about the connection and about the body that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// 0 or 1: HTTP/1.0 or HTTP/1.1.
    pub minor: u8,
    /// The answer has no body, whatever its head says.
    pub is_head: bool,
    /// Repeating it does no harm (RFC 9110, section 9.2.2).
    pub idempotent: bool,
    /// The client wants to send another request on this connection.
    pub keep_alive: bool,
    /// The client waits for status 100 before it sends the body.
    pub expects_continue: bool,
    /// Length of the body.
    pub body: BodyLength,
}

/// What a request asks for, where it lies in the head.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'r, 'h> {
    /// The method.
    pub method: &'h str,
    /// The target, as the request line has it.
    pub target: &'h str,
    fields: &'r [httparse::Header<'h>],
}

impl<'h> Asked<'_, 'h> {
    /// Names and values of the fields, in their order.
    pub fn fields(&self) -> impl Iterator<Item = (&'h str, &'h [u8])> {
        self.fields.iter().map(|field| (field.name, field.value))
    }
}

impl Request {
    /// Reads a whole head, as [`head_bytes`] found it.
    ///
    /// # Errors
    ///
    /// [`BadHead`]: the end of the request, or what it wants, cannot be told.
    pub fn parse(head: &[u8]) -> Result<Self, BadHead> {
        Ok(Self::parse_with(head, |_| ())?.0)
    }

    /// The same, with what `look` makes of the rest of the head.
    ///
    /// # Errors
    ///
    /// [`BadHead`]: the end of the request, or what it wants, cannot be told.
    pub fn parse_with<'h, R>(head: &'h [u8], look: impl FnOnce(Asked<'_, 'h>) -> R) -> Result<(Self, R), BadHead> {
        let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut request = httparse::Request::new(&mut room);
        match request.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) => return Err(BadHead::Malformed("it ends early")),
            Err(error) => return Err(bad(error)),
        }
        let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version) else {
            return Err(BadHead::Malformed("no request line"));
        };
        if method == "CONNECT" {
            return Err(BadHead::Method);
        }
        if target.is_empty() {
            return Err(BadHead::Malformed("no target"));
        }
        let request_fields = &*request.headers;
        let fields = read_fields(request_fields).map_err(trouble)?;
        if minor == 1 && fields.hosts != 1 || fields.hosts > 1 {
            return Err(BadHead::Malformed("a request has one Host"));
        }
        if fields.expects_other {
            return Err(BadHead::Expectation);
        }
        if minor == 0 && fields.chunked {
            return Err(BadHead::Malformed("HTTP/1.0 has no transfer codings"));
        }
        let request = Self {
            minor,
            is_head: method == "HEAD",
            idempotent: matches!(method, "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "TRACE"),
            keep_alive: fields.keep_alive(minor),
            expects_continue: fields.expects_continue && minor == 1,
            body: fields.body().unwrap_or(BodyLength::Fixed(0)),
        };
        Ok((request, look(Asked { method, target, fields: request_fields })))
    }
}

/// What a response's head says about the connection and about the body that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// 0 or 1: HTTP/1.0 or HTTP/1.1.
    pub minor: u8,
    /// Status code, 100 to 599. Below 200 it is an interim response: the final one follows.
    pub status: u16,
    /// The server lets the client send another request on this connection.
    pub keep_alive: bool,
    /// Length of the body.
    pub body: BodyLength,
}

impl Response {
    /// Reads a whole head, as [`head_bytes`] found it. `to_head`: the request was HEAD, so there is no body.
    pub fn parse(head: &[u8], to_head: bool) -> Result<Self, BadHead> {
        let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut response = httparse::Response::new(&mut room);
        match response.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) => return Err(BadHead::Malformed("it ends early")),
            Err(error) => return Err(bad(error)),
        }
        let (Some(minor), Some(status)) = (response.version, response.code) else {
            return Err(BadHead::Malformed("no status line"));
        };
        if !(100..600).contains(&status) || status == 101 {
            // 101 answers an Upgrade, which is not forwarded.
            return Err(BadHead::Malformed("a status nobody asked for"));
        }
        let fields = read_fields(response.headers).map_err(trouble)?;
        let bodiless = to_head || status < 200 || matches!(status, 204 | 304);
        let body = match fields.body() {
            _ if bodiless => BodyLength::Fixed(0),
            Some(length) => length,
            None => BodyLength::UntilClose,
        };
        let keep_alive = fields.keep_alive(minor) && body != BodyLength::UntilClose;
        Ok(Self { minor, status, keep_alive, body })
    }
}

impl Fields {
    /// RFC 9112, section 9.3.
    fn keep_alive(&self, minor: u8) -> bool {
        !self.close && (minor == 1 || self.keep_alive)
    }
}

fn bad(error: httparse::Error) -> BadHead {
    match error {
        httparse::Error::TooManyHeaders => BadHead::TooManyFields,
        httparse::Error::Version => BadHead::Version,
        _ => BadHead::Malformed("not the grammar of RFC 9112"),
    }
}

fn trouble(trouble: Trouble) -> BadHead {
    match trouble {
        Trouble::Length => BadHead::Malformed("Content-Length is no single number"),
        Trouble::TwoLengths => BadHead::Malformed("both Content-Length and Transfer-Encoding"),
        Trouble::Coding => BadHead::UnknownCoding,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Result<Request, BadHead> {
        assert_eq!(head_bytes(text.as_bytes(), 0), Some(text.len()), "{text:?}");
        Request::parse(text.as_bytes())
    }

    fn status(text: &str) -> u16 {
        request(text).map_or_else(BadHead::status, |_| 200)
    }

    #[test]
    fn the_end_of_a_head_is_found_at_once_and_in_steps() {
        for text in
            ["GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/1.1\nHost: a\n\n", "\r\n\r\nGET / HTTP/1.1\r\n\r\n"]
        {
            let with_more = format!("{text}\r\nmore\n\n");
            let more = with_more.as_bytes();
            for scanned in 0..text.len() {
                assert_eq!(head_bytes(&more[..scanned], 0), None, "{scanned} bytes of {text:?}");
                assert_eq!(head_bytes(more, scanned), Some(text.len()), "{text:?} from {scanned}");
            }
        }
        assert_eq!(head_bytes(b"\r\n\r\n\r\n", 0), None, "empty lines are no head");
    }

    #[test]
    fn requests_say_what_follows() {
        let get = request("GET /a HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        assert!(get.keep_alive && get.idempotent && !get.is_head && !get.expects_continue);
        assert_eq!(get.body, BodyLength::Fixed(0));
        let old = request("HEAD / HTTP/1.0\r\n\r\n").unwrap();
        assert!(!old.keep_alive && old.is_head);
        assert!(request("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").unwrap().keep_alive);
        assert!(!request("GET / HTTP/1.1\r\nHost: x\r\nConnection: foo, Close\r\n\r\n").unwrap().keep_alive);
        let post = request("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-Continue\r\n\r\n").unwrap();
        assert!(post.expects_continue && !post.idempotent);
        assert_eq!(post.body, BodyLength::Fixed(5));
        let chunked = request("PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\n\r\n").unwrap();
        assert_eq!(chunked.body, BodyLength::Chunked);
    }

    #[test]
    fn what_two_readers_could_read_in_two_ways_is_refused() {
        for (fields, wanted) in [
            ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
            ("Content-Length: 5\r\nContent-Length: 6\r\n", 400),
            ("Content-Length: 5\r\nContent-Length: 5\r\n", 400),
            ("Content-Length: 5, 5\r\n", 400),
            ("Content-Length: +5\r\n", 400),
            ("Content-Length: 0x5\r\n", 400),
            ("Content-Length:\r\n", 400),
            ("Content-Length: 99999999999999999999\r\n", 400),
            ("Transfer-Encoding: gzip, chunked\r\n", 501),
            ("Transfer-Encoding: chunked, gzip\r\n", 501),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 501),
            ("Transfer-Encoding: xchunked\r\n", 501),
            ("Transfer-Encoding : chunked\r\n", 400),
            ("A: 1\r\n folded\r\n", 400),
            ("Host: y\r\n", 400),
            ("Expect: more\r\n", 417),
            ("A\x01: 1\r\n", 400),
        ] {
            assert_eq!(status(&format!("POST / HTTP/1.1\r\nHost: x\r\n{fields}\r\n")), wanted, "{fields:?}");
        }
        assert_eq!(status("GET / HTTP/1.1\r\n\r\n"), 400, "no Host");
        assert_eq!(status("GET / HTTP/2.0\r\nHost: x\r\n\r\n"), 505);
        assert_eq!(status("GET /\r\n\r\n"), 400);
        assert_eq!(status("nonsense\r\n\r\n"), 400);
        assert_eq!(status("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"), 405);
        assert_eq!(status("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
        let many = "a: b\r\n".repeat(FIELDS_MAX);
        assert_eq!(status(&format!("GET / HTTP/1.1\r\nHost: x\r\n{many}\r\n")), 431);
    }

    #[test]
    fn the_rest_of_a_head_is_shown_where_it_lies() {
        let head = b"PUT /a%20b?c HTTP/1.1\r\nHost: x\r\nIf-Match: \"1\"\r\n\r\n";
        let (request, asked) = Request::parse_with(head, |asked| {
            let fields: Vec<_> = asked.fields().collect();
            (asked.method, asked.target, fields)
        })
        .unwrap();
        assert!(request.keep_alive);
        assert_eq!(asked, ("PUT", "/a%20b?c", vec![("Host", &b"x"[..]), ("If-Match", b"\"1\"")]));
    }

    #[test]
    fn responses_say_what_follows() {
        let parse = |text: &str, to_head| Response::parse(text.as_bytes(), to_head);
        let body = |text: &str, to_head| parse(text, to_head).unwrap().body;
        assert_eq!(body("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", false), BodyLength::Fixed(7));
        assert_eq!(body("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n", true), BodyLength::Fixed(0));
        assert_eq!(body("HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", false), BodyLength::Fixed(0));
        assert_eq!(body("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", false), BodyLength::Chunked);
        let endless = parse("HTTP/1.1 200 OK\r\n\r\n", false).unwrap();
        assert_eq!((endless.body, endless.keep_alive), (BodyLength::UntilClose, false));
        assert!(parse("HTTP/1.1 204 No Content\r\n\r\n", false).unwrap().keep_alive);
        assert!(!parse("HTTP/1.0 204 No Content\r\n\r\n", false).unwrap().keep_alive);
        for bad in ["HTTP/1.1 99 x\r\n\r\n", "HTTP/1.1 101 x\r\n\r\n", "HTTP/1.1 600 x\r\n\r\n", "ICY 200 OK\r\n\r\n"] {
            assert!(parse(bad, false).is_err(), "{bad}");
        }
    }
}
