//! Heads: the first line and the fields, up to the empty line.

use super::body::BodyLength;
use super::fields::{Fields, Trouble, read_fields};
use super::target::{Authority, Target, has_target_bytes};
use crate::looked;

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
    /// A method this reader cannot frame: CONNECT turns the connection into a tunnel, PRI into one of HTTP/2 (RFC 9113, section
    /// 3.4).
    #[error("the method cannot be served")]
    Method,
    /// A method with a small letter: readers differ on whether `get` is GET.
    #[error("the method is unknown")]
    UnknownMethod,
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
            Self::UnknownCoding | Self::UnknownMethod => 501,
            Self::Version => 505,
            Self::Method => 405,
            Self::Expectation => 417,
        }
    }
}

/// Most bytes of empty lines in front of a head. RFC 9112, section 2.2, asks for one line.
const EMPTY_BYTES_MAX: usize = 32;

/// Counts the empty lines in front of a request, for a reader that takes them off the stream as they come: such a line alone
/// begins no request.
#[derive(Clone, Copy, Debug, Default)]
pub struct EmptyLines(u8);

impl EmptyLines {
    /// Bytes of the empty lines at the front of `buf`, which is what follows the bytes returned before. What is no such line ends
    /// the count.
    ///
    /// # Errors
    ///
    /// [`BadHead`]: they have more than 32 bytes together.
    pub fn take(&mut self, buf: &[u8]) -> Result<usize, BadHead> {
        let mut at = 0;
        loop {
            let bytes = match &buf[at..] {
                [b'\r', b'\n', ..] => 2,
                [b'\n', ..] => 1,
                // The rest of the line is to come.
                [] | [b'\r'] => return Ok(at),
                _ => {
                    self.0 = 0;
                    return Ok(at);
                }
            };
            at += bytes;
            self.0 += bytes as u8;
            if usize::from(self.0) > EMPTY_BYTES_MAX {
                return Err(BadHead::Malformed("too many empty lines"));
            }
        }
    }
}

/// Length of the head at the front of `buf`, its empty line included; `None` while that has not arrived. Empty lines
/// in front of the head belong to it (RFC 9112, section 2.2), of which [`Response::parse`] refuses any; more than 32 bytes of
/// them are returned as a head, which [`Request::parse`] refuses. The first `scanned` bytes were looked at before, and are not looked at again.
pub fn head_bytes(buf: &[u8], scanned: usize) -> Option<usize> {
    let front = &buf[..buf.len().min(EMPTY_BYTES_MAX + 1)];
    let start = front.iter().position(|byte| !matches!(byte, b'\r' | b'\n'));
    looked::add(start.unwrap_or(front.len()));
    let Some(start) = start else { return (front.len() > EMPTY_BYTES_MAX).then_some(front.len()) };
    // Three bytes back: the end may have begun before.
    let mut at = scanned.saturating_sub(3).max(start);
    loop {
        let line = find_lf(buf.get(at..)?);
        looked::add(line.map_or(buf.len() - at, |end| end + 1));
        at += line?;
        match &buf[at + 1..] {
            [b'\n', ..] => return Some(at + 2),
            [b'\r', b'\n', ..] => return Some(at + 3),
            _ => at += 1,
        }
    }
}

/// True if a line of a head ends with a line feed alone. RFC 9112, section 2.2, lets a recipient take that for an end,
/// and a sender in front of it may not have. Empty lines in front do not count.
fn has_bare_lf(head: &[u8]) -> bool {
    let start = head.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(head.len());
    let mut rest = &head[start..];
    while let Some(end) = find_lf(rest) {
        if rest[..end].last() != Some(&b'\r') {
            return true;
        }
        rest = &rest[end + 1..];
    }
    false
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
    /// Proxies that an OPTIONS or a TRACE may still pass; `None` without `Max-Forwards`, and for other methods.
    pub max_forwards: Option<u64>,
}

/// What a request asks for, where it lies in the head.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'r, 'h> {
    /// The method.
    pub method: &'h str,
    /// The target; `None` if the request line has none of the forms of RFC 9112, section 3.2.
    pub target: Option<Target<'h>>,
    /// The value of `Host`; `None` in HTTP/1.0 without one.
    pub host: Option<Authority<'h>>,
    pub(super) minor: u8,
    pub(super) max_forwards: Option<u64>,
    pub(super) fields: &'r [httparse::Header<'h>],
}

impl<'h> Asked<'_, 'h> {
    /// The host that is asked: of a target in absolute form its own, whatever `Host` says (RFC 9112, section 3.2.2).
    pub fn authority(&self) -> Option<Authority<'h>> {
        self.target.and_then(|target| target.authority).or(self.host)
    }

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
    /// [`BadHead`]: the end of the request, or its target, cannot be told.
    pub fn parse(head: &[u8]) -> Result<Self, BadHead> {
        let (request, has_target) = Self::parse_with(head, |asked| asked.target.is_some())?;
        if has_target { Ok(request) } else { Err(NO_TARGET) }
    }

    /// Reads a whole head as [`Request::parse`] does, and returns what `look` makes of it. The target may have none of
    /// the known forms: `look` decides.
    ///
    /// # Errors
    ///
    /// [`BadHead`]: the end of the request cannot be told.
    pub fn parse_with<'h, R>(head: &'h [u8], look: impl FnOnce(Asked<'_, 'h>) -> R) -> Result<(Self, R), BadHead> {
        let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut request = httparse::Request::new(&mut room);
        match request.parse(head) {
            Ok(httparse::Status::Complete(bytes)) if bytes == head.len() => {}
            Ok(_) => return Err(BadHead::Malformed("it ends elsewhere")),
            Err(error) => return Err(bad(error)),
        }
        let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version) else {
            return Err(BadHead::Malformed("no request line"));
        };
        if has_bare_lf(head) {
            return Err(BARE_LF);
        }
        if method.bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Err(BadHead::UnknownMethod);
        }
        if matches!(method, "CONNECT" | "PRI") {
            return Err(BadHead::Method);
        }
        if target.is_empty() || !has_target_bytes(target) {
            return Err(NO_TARGET);
        }
        let request_fields = &*request.headers;
        let fields = read_fields(request_fields).map_err(trouble)?;
        if minor == 1 && fields.hosts != 1 || fields.hosts > 1 {
            return Err(BadHead::Malformed("a request has one Host"));
        }
        let host = std::str::from_utf8(fields.host.trim_ascii()).ok().and_then(Authority::parse);
        let host = host.ok_or(BadHead::Malformed("Host is no host"))?;
        if fields.expects_other {
            return Err(BadHead::Expectation);
        }
        if minor == 0 && fields.chunked {
            return Err(BadHead::Malformed("HTTP/1.0 has no transfer codings"));
        }
        let body = fields.body().unwrap_or(BodyLength::Fixed(0));
        if method == "TRACE" && body != BodyLength::Fixed(0) {
            return Err(BadHead::Malformed("TRACE has no body"));
        }
        let counts_forwards = matches!(method, "OPTIONS" | "TRACE");
        let max_forwards = if counts_forwards { fields.max_forwards().map_err(trouble)? } else { None };
        let request = Self {
            minor,
            is_head: method == "HEAD",
            idempotent: matches!(method, "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "TRACE"),
            keep_alive: fields.keep_alive(minor),
            expects_continue: fields.expects_continue && minor == 1,
            body,
            max_forwards,
        };
        let host = (fields.hosts > 0).then_some(host);
        let target = Target::parse(method, target);
        Ok((request, look(Asked { method, target, host, minor, max_forwards, fields: request_fields })))
    }
}

const BARE_LF: BadHead = BadHead::Malformed("a line ends with a line feed alone");

pub(super) const NO_TARGET: BadHead = BadHead::Malformed("the target has none of the forms of RFC 9112");

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
    /// The framing is one that RFC 9110 and 9112 forbid: a length or chunks where no body may be, or chunks of HTTP/1.0.
    /// [`Response::keep_alive`] is false.
    pub misframed: bool,
}

/// True for statuses whose responses have no body and no fields that frame one (RFC 9110, section 8.6; RFC 9112, section 6.1).
pub(super) fn is_unframed(status: u16) -> bool {
    status < 200 || status == 204
}

impl Response {
    /// Reads a whole head, as [`head_bytes`] found it. `to_head`: the request was HEAD, so there is no body.
    ///
    /// # Errors
    ///
    /// [`BadHead`]: the end of the response cannot be told, or nothing asked for its status.
    pub fn parse(head: &[u8], to_head: bool) -> Result<Self, BadHead> {
        let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut response = httparse::Response::new(&mut room);
        match response.parse(head) {
            Ok(httparse::Status::Complete(bytes)) if bytes == head.len() => {}
            Ok(_) => return Err(BadHead::Malformed("it ends elsewhere")),
            Err(error) => return Err(bad(error)),
        }
        let (Some(minor), Some(status)) = (response.version, response.code) else {
            return Err(BadHead::Malformed("no status line"));
        };
        if matches!(head, [b'\r' | b'\n', ..]) {
            return Err(BadHead::Malformed("an empty line in front of a status line"));
        }
        if has_bare_lf(head) {
            return Err(BARE_LF);
        }
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
        // `Content-Length: 0` says no more than the status does.
        let is_framed = !matches!(fields.body(), None | Some(BodyLength::Fixed(0)));
        let misframed = is_unframed(status) && is_framed || minor == 0 && fields.chunked;
        let keep_alive = fields.keep_alive(minor) && body != BodyLength::UntilClose && !misframed;
        Ok(Self { minor, status, keep_alive, body, misframed })
    }
}

impl Fields<'_> {
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
        Trouble::MaxForwards => BadHead::Malformed("Max-Forwards is no single number"),
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
        let many = [&b"\r\n".repeat(17)[..], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"].concat();
        let bytes = head_bytes(&many, 0).expect("too many of them are one");
        assert!(Request::parse(&many[..bytes]).is_err());
    }

    /// However small the pieces are, a byte is looked at a few times.
    #[test]
    fn resumed_search_for_the_end_of_a_head_looks_at_each_byte_a_few_times() {
        let fields = "X-Field: value\r\n".repeat(2000);
        for head in [
            format!("GET / HTTP/1.1\r\n{fields}\r\n"),
            format!("\r\n\r\nGET /{} HTTP/1.1\r\n\r\n", "a".repeat(30_000)),
            "\r\n".repeat(15_000),
        ] {
            for step in [1, 4, 1000] {
                let looked = looked::bytes_of(|| {
                    let ends = (step..head.len()).step_by(step);
                    let found = ends.clone().find_map(|end| head_bytes(&head.as_bytes()[..end], end - step));
                    assert!(found.is_none_or(|bytes| bytes <= 33));
                });
                // Where it resumes, it looks three bytes back, and at the empty lines in front.
                let most = head.len() + head.len() / step * 40;
                assert!(looked <= most, "{looked} of {} by {step}", head.len());
            }
        }
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
            ("Content-Length: 00000000000000000000005\r\n", 400),
            ("A: 1\nB: 2\r\n", 400),
            ("A: 1\rB: 2\r\n", 400),
            ("A: 1\0\r\n", 400),
            ("Transfer-Encoding:\r\n", 501),
            ("Transfer-Encoding: chunked, chunked\r\n", 501),
            ("Transfer-Encoding: identity\r\n", 501),
            ("Transfer-Encoding: chunked;q=1\r\n", 501),
            ("Transfer-Encoding: \x0bchunked\r\n", 400),
            ("Expect: 100-continue, 100-continue\r\n", 417),
            ("Expect:\r\n", 417),
        ] {
            assert_eq!(status(&format!("POST / HTTP/1.1\r\nHost: x\r\n{fields}\r\n")), wanted, "{fields:?}");
        }
        assert_eq!(status("GET / HTTP/1.1\r\n\r\n"), 400, "no Host");
        assert_eq!(status("GET / HTTP/2.0\r\nHost: x\r\n\r\n"), 505);
        assert_eq!(status("GET /\r\n\r\n"), 400);
        assert_eq!(status("nonsense\r\n\r\n"), 400);
        assert_eq!(status("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"), 405);
        assert_eq!(status("PRI / HTTP/1.1\r\nHost: a\r\n\r\n"), 405, "it begins HTTP/2");
        assert_eq!(status("PRI * HTTP/1.1\r\nHost: a\r\n\r\n"), 405, "it begins HTTP/2");
        assert_eq!(status("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
        for method in ["get", "Get", "head", "connect", "pOST"] {
            assert_eq!(status(&format!("{method} / HTTP/1.1\r\nHost: x\r\n\r\n")), 501, "{method}");
        }
        for line in [
            "GET  / HTTP/1.1",
            " GET / HTTP/1.1",
            "GET\t/ HTTP/1.1",
            "GET / HTTP/1.1 ",
            "GET / http/1.1",
            "GET / HTTP/1.1\r",
        ] {
            assert!(request(&format!("{line}\r\nHost: x\r\n\r\n")).is_err(), "{line:?}");
        }
        assert_eq!(status("GET / HTTP/1.1\nHost: x\n\n"), 400, "line feeds alone");
        assert_eq!(status("GET / HTTP/1.1\r\nHost: x\r\n\n"), 400, "a line feed alone");
        let many = "a: b\r\n".repeat(FIELDS_MAX);
        assert_eq!(status(&format!("GET / HTTP/1.1\r\nHost: x\r\n{many}\r\n")), 431);
    }

    #[test]
    fn host_is_a_host_and_the_target_has_a_known_form() {
        for (target, host, wanted) in [
            ("/", "a b", 400),
            ("/", "a,b", 400),
            ("/", "u@h", 400),
            ("/", "h:99999", 400),
            ("/", "[::1].evil.example:80", 400),
            ("/", "localhost:80:evil", 400),
            ("/", "[fe80::1%25lo]", 400),
            ("/", "\u{fc}", 400),
            ("/", "", 200),
            ("/", "[::1]:80", 200),
            ("http://a/", "b", 200),
            ("http://u@a/", "a", 400),
            ("https://a/", "a", 400),
            ("http://", "a", 400),
            ("a:80", "a", 400),
            ("*", "a", 400),
            ("/#f", "a", 400),
            ("/\u{fc}", "a", 400),
        ] {
            assert_eq!(status(&format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n")), wanted, "{target} {host:?}");
            // What the version does not ask for is looked at all the same.
            assert_eq!(status(&format!("GET {target} HTTP/1.0\r\nHost: {host}\r\n\r\n")), wanted, "{target} {host:?}");
        }
        assert_eq!(status("GET / HTTP/1.0\r\n\r\n"), 200);
        assert_eq!(status("OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"), 200);
        let authority = |text: &str| {
            let (_, asked) = Request::parse_with(text.as_bytes(), |asked| asked.authority()).unwrap();
            asked.map(|authority| authority.text().to_owned())
        };
        assert_eq!(authority("GET http://a:1/ HTTP/1.1\r\nHost: b\r\n\r\n").as_deref(), Some("a:1"));
        assert_eq!(authority("GET / HTTP/1.1\r\nHost: b\r\n\r\n").as_deref(), Some("b"));
        assert_eq!(authority("GET / HTTP/1.0\r\n\r\n"), None);
    }

    #[test]
    fn max_forwards_counts_for_options_and_trace() {
        let forwards = |method: &str, fields: &str| {
            request(&format!("{method} / HTTP/1.1\r\nHost: x\r\n{fields}\r\n")).map(|request| request.max_forwards)
        };
        for method in ["OPTIONS", "TRACE"] {
            assert_eq!(forwards(method, ""), Ok(None));
            assert_eq!(forwards(method, "Max-Forwards: 0\r\n"), Ok(Some(0)));
            assert_eq!(forwards(method, "max-forwards: 007\r\n"), Ok(Some(7)));
            assert_eq!(forwards(method, "Max-Forwards: 99999999999999999999999\r\n"), Ok(Some(u64::MAX)));
            for wrong in ["", "x", "-1", "+1", "1, 1", "0x1", "1\r\nMax-Forwards: 1"] {
                assert!(forwards(method, &format!("Max-Forwards: {wrong}\r\n")).is_err(), "{wrong}");
            }
        }
        assert_eq!(forwards("GET", "Max-Forwards: x\r\n"), Ok(None));
        assert!(forwards("TRACE", "Content-Length: 1\r\n").is_err());
    }

    #[test]
    fn responses_with_forbidden_framing_end_their_connection() {
        for (head, misframed) in [
            ("HTTP/1.1 204 No Content\r\n\r\n", false),
            ("HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", false),
            ("HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", true),
            ("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", true),
            ("HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\n", true),
            ("HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", false),
            ("HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", false),
            ("HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n", true),
            ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\n", false),
        ] {
            let read = Response::parse(head.as_bytes(), false).unwrap();
            assert_eq!((read.misframed, read.keep_alive), (misframed, !misframed), "{head:?}");
        }
    }

    #[test]
    fn the_rest_of_a_head_is_shown_where_it_lies() {
        let head = b"PUT /a%20b?c HTTP/1.1\r\nHost: x\r\nIf-Match: \"1\"\r\n\r\n";
        let (request, asked) = Request::parse_with(head, |asked| {
            let fields: Vec<_> = asked.fields().collect();
            (asked.method, asked.target.map(|target| (target.path, target.query)), fields)
        })
        .unwrap();
        assert!(request.keep_alive);
        assert_eq!(asked, ("PUT", Some(("/a%20b", Some("c"))), vec![("Host", &b"x"[..]), ("If-Match", b"\"1\"")]));
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
        // Empty lines in front are for requests, and a line feed alone ends no line here, either.
        for bad in [
            "\r\nHTTP/1.1 200 OK\r\n\r\n",
            "\nHTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\n\r\n",
            "HTTP/1.1 200 OK\r\nA: b\n\r\n",
            "HTTP/1.1 200 OK\r\n\n",
        ] {
            assert!(parse(bad, false).is_err(), "{bad:?}");
        }
    }
}
