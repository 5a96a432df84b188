//! Responses, written behind what a buffer has.

use std::fmt;
use std::io::Write;

use ksf_proto::http1;

use super::Request;

/// A value.
pub(super) const BYTES: &str = "application/octet-stream";
/// A list.
pub(super) const JSON: &str = "application/json";
/// Words for people.
const TEXT: &str = "text/plain; charset=utf-8";

/// What the head of a response says beside its status and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Says {
    Nothing,
    /// The methods that a target takes.
    Allow(&'static str),
    /// How the password is told.
    Authenticate,
    /// Parts may be asked for.
    Ranges,
    /// Which part this is.
    Part {
        first: usize,
        last: usize,
        length: usize,
    },
    /// How long the value is of which the part is none.
    Length(usize),
}

/// The entity tag of a version.
pub(super) fn tag(version: u64) -> impl fmt::Display {
    fmt::from_fn(move |f| write!(f, "\"{version:x}\""))
}

/// What a request is answered with.
#[derive(Debug)]
pub(super) struct Response<'o> {
    out: &'o mut Vec<u8>,
    now_s: u64,
    minor: u8,
    /// The response has no body, whatever its head says.
    to_head: bool,
    pub(super) keep_alive: bool,
}

impl<'o> Response<'o> {
    pub(super) fn to(request: &Request, now_ns: u64, out: &'o mut Vec<u8>) -> Self {
        let to_head = request.method == super::request::Method::Head;
        let (minor, keep_alive) = (request.minor(), request.keep_alive());
        Self { out, now_s: now_ns / 1_000_000_000, minor, to_head, keep_alive }
    }

    /// To what is no request.
    pub(super) fn to_nonsense(now_ns: u64, out: &'o mut Vec<u8>) -> Self {
        Self { out, now_s: now_ns / 1_000_000_000, minor: 1, to_head: false, keep_alive: false }
    }

    pub(super) fn to_head(&self) -> bool {
        self.to_head
    }

    /// Writes a response that has no content, as 201, 204 and 304.
    pub(super) fn empty(&mut self, status: u16, version: Option<u64>) {
        self.start(status, Says::Nothing, version);
        if status == 201 {
            self.out.extend_from_slice(b"Content-Length: 0\r\n");
        }
        self.out.extend_from_slice(b"\r\n");
    }

    /// Writes a response with this content.
    pub(super) fn content(&mut self, status: u16, says: Says, version: Option<u64>, kind: &str, content: &[u8]) {
        self.head(status, says, version, kind, content.len());
        if !self.to_head {
            self.out.extend_from_slice(content);
        }
    }

    /// Writes the head of a response with a content of so many bytes.
    pub(super) fn head(&mut self, status: u16, says: Says, version: Option<u64>, kind: &str, length: usize) {
        self.start(status, says, version);
        // A browser must not take a value for a page or a program.
        self.out.extend_from_slice(b"X-Content-Type-Options: nosniff\r\n");
        // Writing to a vector does not fail.
        let _ = write!(self.out, "Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n");
    }

    /// Writes a response with a line for people.
    pub(super) fn text(&mut self, status: u16, says: Says, text: &str) {
        self.content(status, says, None, TEXT, format!("{text}\n").as_bytes());
    }

    fn start(&mut self, status: u16, says: Says, version: Option<u64>) {
        let Self { out, now_s, minor, keep_alive, .. } = self;
        let _ = write!(out, "HTTP/1.1 {status} {}\r\nDate: {}\r\n", http1::reason(status), date(*now_s));
        if let Some(version) = version {
            let _ = write!(out, "ETag: {}\r\n", tag(version));
        }
        let _ = match says {
            Says::Nothing => Ok(()),
            Says::Allow(methods) => write!(out, "Allow: {methods}\r\n"),
            Says::Authenticate => {
                write!(out, "WWW-Authenticate: Basic realm=\"ksf store\"\r\nWWW-Authenticate: Bearer\r\n")
            }
            Says::Ranges => write!(out, "Accept-Ranges: bytes\r\n"),
            Says::Part { first, last, length } => write!(out, "Content-Range: bytes {first}-{last}/{length}\r\n"),
            Says::Length(length) => write!(out, "Content-Range: bytes */{length}\r\n"),
        };
        match (*keep_alive, *minor) {
            (false, _) => out.extend_from_slice(b"Connection: close\r\n"),
            (true, 0) => out.extend_from_slice(b"Connection: keep-alive\r\n"),
            (true, _) => {}
        }
    }
}

/// A time in seconds since 1970 as RFC 9110 has it, section 5.6.7.
fn date(seconds: u64) -> impl fmt::Display {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March, in cycles of 400: the leap day is the last one.
    let from_march = days + 719_468;
    let (cycle, day) = (from_march / 146_097, from_march % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = (month + 2) % 12;
    let year = cycle * 400 + year + u64::from(month < 2);
    let (weekday, month) = (DAYS[(days % 7) as usize], MONTHS[month as usize]);
    fmt::from_fn(move |f| {
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{weekday}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_as_rfc_9110_has_them() {
        for (seconds, text) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (951_782_400, "Tue, 29 Feb 2000 00:00:00 GMT"),
            (951_868_800, "Wed, 01 Mar 2000 00:00:00 GMT"),
            (4_107_542_399, "Sun, 28 Feb 2100 23:59:59 GMT"),
            (4_107_542_400, "Mon, 01 Mar 2100 00:00:00 GMT"),
            (1_798_761_599, "Thu, 31 Dec 2026 23:59:59 GMT"),
        ] {
            assert_eq!(date(seconds).to_string(), text);
        }
    }
}
