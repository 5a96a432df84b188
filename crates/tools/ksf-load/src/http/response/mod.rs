//! Reads answers: the head by httparse, the body by its framing, cut at any byte. No socket and no clock.

use std::mem::MaybeUninit;

use self::chunked::Chunked;

mod chunked;

/// The longest head that is read, and the longest trailer section.
pub(crate) const HEAD_BYTES_MAX: usize = 32 * 1024;

const TOO_LONG: Malformed = "the head is longer than 32 KiB";

/// The most header fields of a head.
const FIELDS_MAX: usize = 128;

/// Why bytes are no answer; the connection cannot be read any further.
pub(crate) type Malformed = &'static str;

/// What an answer must be.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    /// Statuses that are right; empty for all of 200 to 299.
    pub(crate) statuses: Vec<u16>,
    /// The whole body.
    pub(crate) body: Option<Box<[u8]>>,
    /// Length of the body.
    pub(crate) body_bytes: Option<u64>,
    /// The name of a field whose values are counted.
    pub(crate) tally: Option<String>,
}

impl Expected {
    pub(crate) fn is_right_status(&self, status: u16) -> bool {
        if self.statuses.is_empty() { (200..300).contains(&status) } else { self.statuses.contains(&status) }
    }
}

/// Reads one answer after the other.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    state: State,
    /// A head of which only a part has come.
    head: Vec<u8>,
    status: u16,
    /// The connection lasts beyond this answer.
    keeps: bool,
    body_bytes: u64,
    /// So far the body is the expected one.
    same_body: bool,
    /// The value of the field that is counted; empty if the head has none.
    tally: Vec<u8>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Head,
    /// So many bytes of the body are to come.
    Length(u64),
    Chunked(Chunked),
    /// The body lasts until the end of the stream.
    Stream,
    Done,
}

impl Reader {
    /// Makes ready for the next answer.
    pub(crate) fn start(&mut self) {
        self.state = State::Head;
        self.head.clear();
        self.body_bytes = 0;
        self.same_body = true;
        self.tally.clear();
    }

    /// Takes bytes of the answer; returns how many belong to it. All do unless it [is done](Reader::is_done).
    pub(crate) fn read(&mut self, bytes: &[u8], expected: &Expected) -> Result<usize, Malformed> {
        let mut used = 0;
        while used < bytes.len() && self.state != State::Done {
            let rest = &bytes[used..];
            used += match &mut self.state {
                State::Head => self.read_head(rest, expected)?,
                State::Length(left) => {
                    let take = (*left).min(rest.len() as u64);
                    *left -= take;
                    if *left == 0 {
                        self.state = State::Done;
                    }
                    self.take_body(&rest[..take as usize], expected);
                    take as usize
                }
                State::Chunked(chunked) => {
                    let (skip, data) = chunked.next(rest)?;
                    if chunked.is_done() {
                        self.state = State::Done;
                    }
                    self.take_body(&rest[skip..skip + data], expected);
                    skip + data
                }
                State::Stream => {
                    self.take_body(rest, expected);
                    rest.len()
                }
                State::Done => 0,
            };
        }
        Ok(used)
    }

    /// The stream has ended; returns whether that completes the answer.
    pub(crate) fn end(&mut self) -> bool {
        if self.state == State::Stream {
            self.state = State::Done;
        }
        self.is_done()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Of the answer that is done.
    pub(crate) fn status(&self) -> u16 {
        self.status
    }

    /// Whether the connection lasts beyond the answer that is done.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Whether the body of the answer that is done is the expected one.
    pub(crate) fn is_right_body(&self, expected: &Expected) -> bool {
        let whole = expected.body.as_ref().map(|body| body.len() as u64);
        let lengths = [whole, expected.body_bytes];
        self.same_body && lengths.iter().flatten().all(|&bytes| bytes == self.body_bytes)
    }

    pub(crate) fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    /// The value of the field that is counted, of the answer that is done.
    pub(crate) fn tally(&self) -> &[u8] {
        &self.tally
    }

    #[inline]
    fn take_body(&mut self, part: &[u8], expected: &Expected) {
        if let Some(body) = &expected.body {
            let rest = body.get(self.body_bytes as usize..).unwrap_or_default();
            self.same_body &= rest.starts_with(part);
        }
        self.body_bytes += part.len() as u64;
    }

    /// Takes bytes of a head; returns how many belong to it.
    fn read_head(&mut self, bytes: &[u8], expected: &Expected) -> Result<usize, Malformed> {
        let held = self.head.len();
        // The usual case: the whole head is here, and nothing is copied.
        if held == 0
            && let Some(length) = self.parse_head(bytes, expected)?
        {
            return Ok(length);
        }
        self.head.extend_from_slice(bytes);
        // A head ends with a line: looking at every piece would cost the square of its length.
        if held > 0 && bytes.contains(&b'\n') {
            let head = std::mem::take(&mut self.head);
            if let Some(length) = self.parse_head(&head, expected)? {
                return Ok(length - held);
            }
            self.head = head;
        }
        if self.head.len() > HEAD_BYTES_MAX { Err(TOO_LONG) } else { Ok(bytes.len()) }
    }

    /// Reads a whole head and chooses the framing of what follows (RFC 9112, section 6.3); `None` if it is not whole.
    fn parse_head(&mut self, bytes: &[u8], expected: &Expected) -> Result<Option<usize>, Malformed> {
        let mut fields = [MaybeUninit::uninit(); FIELDS_MAX];
        let mut response = httparse::Response::new(&mut []);
        let parser = httparse::ParserConfig::default();
        let length = match parser.parse_response_with_uninit_headers(&mut response, bytes, &mut fields) {
            Ok(httparse::Status::Complete(length)) if length > HEAD_BYTES_MAX => return Err(TOO_LONG),
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err("the head has more than 128 fields"),
            Err(httparse::Error::Version) => return Err("the head does not begin with HTTP/1.1 or HTTP/1.0"),
            Err(httparse::Error::Status) => return Err("the status is no number of three digits"),
            Err(_) => return Err("the head is no HTTP"),
        };
        let status = response.code.unwrap_or(0);
        if (100..200).contains(&status) {
            // Nobody asked for another protocol; all others are followed by the answer proper (RFC 9110, 15.2).
            return match status {
                101 => Err("the server switches to another protocol"),
                _ => Ok(Some(length)),
            };
        }
        self.status = status;
        self.keeps = response.version == Some(1);
        let (mut content_length, mut chunked, mut other_coding) = (None, false, false);
        for field in response.headers.iter() {
            if expected.tally.as_ref().is_some_and(|name| field.name.eq_ignore_ascii_case(name)) {
                self.tally.clear();
                self.tally.extend_from_slice(field.value.trim_ascii());
            }
            if field.name.eq_ignore_ascii_case("content-length") {
                let bytes = parse_length(field.value)?;
                if content_length.is_some_and(|have| have != bytes) {
                    return Err("the head has two lengths");
                }
                content_length = Some(bytes);
            } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
                for coding in tokens(field.value) {
                    other_coding |= chunked;
                    chunked = coding.eq_ignore_ascii_case(b"chunked");
                    other_coding |= !chunked;
                }
            } else if field.name.eq_ignore_ascii_case("connection") {
                for option in tokens(field.value) {
                    if option.eq_ignore_ascii_case(b"close") {
                        self.keeps = false;
                    } else if option.eq_ignore_ascii_case(b"keep-alive") && response.version == Some(0) {
                        self.keeps = true;
                    }
                }
            }
        }
        self.state = match (chunked || other_coding, content_length) {
            _ if status == 204 || status == 304 => State::Done,
            (true, Some(_)) => return Err("the head has both a length and a transfer coding"),
            (true, None) if chunked && !other_coding => State::Chunked(Chunked::default()),
            (true, None) => return Err("the body has a transfer coding that was not asked for"),
            (false, Some(0)) => State::Done,
            (false, Some(bytes)) => State::Length(bytes),
            (false, None) => State::Stream,
        };
        if self.state == State::Stream {
            self.keeps = false;
        }
        Ok(Some(length))
    }
}

/// The members of a list (RFC 9110, section 5.6.1).
fn tokens(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|token| !token.is_empty())
}

fn parse_length(value: &[u8]) -> Result<u64, Malformed> {
    const WRONG: Malformed = "the length is no number";
    let mut length: Option<u64> = None;
    // A list of equal numbers is allowed (RFC 9110, section 8.6).
    for token in tokens(value) {
        if !token.iter().all(u8::is_ascii_digit) {
            return Err(WRONG);
        }
        let text = std::str::from_utf8(token).map_err(|_| WRONG)?;
        let number = text.parse().map_err(|_| WRONG)?;
        if length.is_some_and(|have| have != number) {
            return Err("the head has two lengths");
        }
        length = Some(number);
    }
    length.ok_or(WRONG)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What was read: status, length of the body, whether the connection lasts, and how many bytes were used.
    type Got = Result<Option<(u16, u64, bool, usize)>, Malformed>;

    /// Reads `bytes` in pieces that end at `cuts`.
    fn read_cut(bytes: &[u8], cuts: &[usize], expected: &Expected) -> (Got, bool) {
        let mut reader = Reader::default();
        reader.start();
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).chain([bytes.len()]).collect();
        ends.sort_unstable();
        let mut at = 0;
        for end in ends {
            if reader.is_done() {
                break;
            }
            match reader.read(&bytes[at..end], expected) {
                Ok(used) => {
                    assert!(used == end - at || reader.is_done());
                    at += used;
                }
                Err(reason) => return (Err(reason), false),
            }
        }
        let got = reader.is_done().then(|| (reader.status(), reader.body_bytes(), reader.keeps(), at));
        (Ok(got), reader.is_right_body(expected))
    }

    fn read(bytes: &[u8]) -> Got {
        read_cut(bytes, &[], &Expected::default()).0
    }

    fn done(status: u16, body_bytes: u64, keeps: bool, used: usize) -> Got {
        Ok(Some((status, body_bytes, keeps, used)))
    }

    /// Answers that end by themselves, with status, length of the body, and whether the connection lasts.
    const WHOLE: &[(&[u8], u16, u64, bool)] = &[
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", 200, 3, true),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3, 3\r\nConnection: foo, Close\r\n\r\nabc", 200, 3, false),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, 1, false),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\nx", 200, 1, true),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 9\r\n\r\n", 204, 0, true),
        (b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", 304, 0, true),
        (b"HTTP/1.1 404 \r\nContent-Length: 0\r\n\r\n", 404, 0, true),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny", 200, 1, true),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0;x=y\r\n\r\n", 200, 3, true),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\nA ; name=\"v\"\r\n0123456789\r\n1\r\n\n\r\n000\r\nTrailer: t\r\nB: c\r\n\r\n",
            200,
            11,
            true,
        ),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nab", 200, 2, true),
    ];

    #[test]
    fn every_framing_is_read() {
        for (bytes, status, body_bytes, keeps) in WHOLE {
            let text = String::from_utf8_lossy(bytes);
            assert_eq!(read(bytes), done(*status, *body_bytes, *keeps, bytes.len()), "{text}");
            let more = [bytes, &b"HTTP/1.1 "[..]].concat();
            assert_eq!(read(&more), done(*status, *body_bytes, *keeps, bytes.len()), "{text}");
            for cut in 0..bytes.len() {
                assert_eq!(read(&bytes[..cut]), Ok(None), "{} bytes of {text}", cut);
            }
        }
    }

    #[test]
    fn a_body_without_a_length_lasts_until_the_end() {
        let mut reader = Reader::default();
        reader.start();
        reader.read(b"HTTP/1.1 200 OK\r\n\r\nabc", &Expected::default()).unwrap();
        assert!(!reader.is_done());
        assert!(reader.end() && !reader.keeps());
        assert_eq!(reader.body_bytes(), 3);
        for short in ["", "HTTP/1.1 200 OK\r\n\r", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc"] {
            reader.start();
            reader.read(short.as_bytes(), &Expected::default()).unwrap();
            assert!(!reader.end(), "{short}");
        }
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let long = [b"HTTP/1.1 200 OK\r\nA: ".to_vec(), vec![b'a'; HEAD_BYTES_MAX], b"\r\n\r\n".to_vec()].concat();
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "A: b\r\n".repeat(FIELDS_MAX + 1));
        for (bytes, reason) in [
            (&b"HTTP/2.0 200 OK\r\n\r\n"[..], "begin"),
            (b"SSH-2.0-x\r\n\r\n", "begin"),
            (b"HTTP/1.1 20 OK\r\n\r\n", "status"),
            (b"HTTP/1.1 200 OK\r\nA b\r\n\r\n", "no HTTP"),
            (b"HTTP/1.1 101 Switching\r\n\r\n", "protocol"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\n", "no number"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", "no number"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", "two lengths"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 3, 4\r\n\r\n", "two lengths"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", "both"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "not asked"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", "not asked"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", "chunk"),
            (&long, "32 KiB"),
            (many.as_bytes(), "128 fields"),
        ] {
            let text = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).into_owned();
            let error = read(bytes).expect_err(&text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn bodies_are_compared() {
        let answer = |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let expected = |body: &str| Expected { body: Some(body.as_bytes().into()), ..Expected::default() };
        for (body, wanted, right) in
            [("abc", "abc", true), ("abd", "abc", false), ("ab", "abc", false), ("abcd", "abc", false), ("", "", true)]
        {
            for cut in 0..60 {
                let (_, is_right) = read_cut(answer(body).as_bytes(), &[cut, cut + 1], &expected(wanted));
                assert_eq!(is_right, right, "{body} for {wanted}, cut at {cut}");
            }
        }
        let three = Expected { body_bytes: Some(3), ..Expected::default() };
        assert!(read_cut(answer("xyz").as_bytes(), &[], &three).1);
        assert!(!read_cut(answer("xyzz").as_bytes(), &[], &three).1);
    }

    proptest! {
        #[test]
        fn cuts_change_nothing(which in 0..WHOLE.len(), cuts in prop::collection::vec(0usize..400, 0..12), spoil in any::<Option<(usize, u8)>>()) {
            let mut bytes = WHOLE[which].0.to_vec();
            if let Some((at, byte)) = spoil {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            let expected = Expected { body: Some((*b"abc").into()), ..Expected::default() };
            let (whole, right) = read_cut(&bytes, &[], &expected);
            let (cut, right_cut) = read_cut(&bytes, &cuts, &expected);
            // What is wrong may be found later, or not before more has come; never is a wrong answer taken for right.
            match (&whole, &cut) {
                (Err(_), Ok(None)) | (Ok(None), Err(_)) | (Err(_), Err(_)) => {}
                _ => {
                    prop_assert_eq!(&whole, &cut);
                    prop_assert_eq!(right, right_cut);
                }
            }
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..200) {
            let _ = read_cut(&bytes, &[cut], &Expected::default());
            let after_head = [&b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"[..], &bytes].concat();
            let _ = read_cut(&after_head, &[cut], &Expected::default());
        }
    }
}
