//! RESP2 and RESP3: the protocol of Redis (redis.io/docs/reference/protocol-spec).
//!
//! ```text
//!   *2\r\n$3\r\nGET\r\n$5\r\nhello\r\n     a command: an array of bulk strings
//!   GET hello\r\n                          the same inline, for people at a terminal
//! ```
//!
//! [`scan`] finds where a command ends, without taking memory, and keeps where the arguments of a short one are: [`Spans`];
//! [`Arguments`] goes over the arguments of any command where they lie; [`Writer`] writes replies in the version that the client asked for. That is the server's side; a client writes its commands
//! as arrays of strings with a [`Writer`], too, and reads what comes back with [`reply`].

pub mod reply;

use crate::looked;

/// What a client may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RespLimits {
    /// Most arguments of a command.
    pub arguments_max: usize,
    /// Longest argument, in bytes.
    pub argument_bytes_max: usize,
    /// Longest command, in bytes, headers included.
    pub command_bytes_max: usize,
}

/// Longest inline command: Redis' own limit.
pub const INLINE_BYTES_MAX: usize = 64 << 10;

/// What is wrong with a command; the text is Redis' own, which clients look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The number of arguments is no number, or above the limit.
    #[error("Protocol error: invalid multibulk length")]
    Count,
    /// The length of an argument is no number, or above the limit.
    #[error("Protocol error: invalid bulk length")]
    Length,
    /// A peer that has not authenticated sends more arguments than it may.
    #[error("Protocol error: unauthenticated multibulk length")]
    UnauthenticatedCount,
    /// A peer that has not authenticated sends more bytes than it may.
    #[error("Protocol error: unauthenticated bulk length")]
    UnauthenticatedLength,
    /// An argument does not begin with `$`.
    #[error("Protocol error: expected '$', got '{}'", char::from(*.0))]
    NoBulk(u8),
    /// An inline command without an end.
    #[error("Protocol error: too big inline request")]
    LongInline,
    /// A header line without an end.
    #[error("Protocol error: too big mbulk count string")]
    LongHeader,
    /// Quotes of an inline command do not match.
    #[error("Protocol error: unbalanced quotes in request")]
    Quotes,
    /// An inline command has a zero byte, at which Redis stops looking for its end.
    #[error("Protocol error: zero byte in inline request")]
    Zero,
    /// The command is longer than the limit.
    #[error("Protocol error: command above {limit} bytes")]
    LongCommand {
        /// The limit.
        limit: usize,
    },
}

/// What lies at the front of what arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// A command of so many bytes.
    Command(usize),
    /// More is needed: at least so many bytes in all.
    Incomplete(usize),
}

/// Longest line with a number in it, without its end.
const NUMBER_BYTES_MAX: usize = 20;

/// A line up to its `\r\n`, and where the next one begins.
fn line(buf: &[u8], at: usize) -> Result<Option<(&[u8], usize)>, Malformed> {
    let rest = &buf[at.min(buf.len())..];
    let look = &rest[..rest.len().min(NUMBER_BYTES_MAX + 3)];
    match look.iter().position(|byte| *byte == b'\r') {
        // As if it had arrived without its end.
        Some(end) if end > NUMBER_BYTES_MAX => Err(Malformed::LongHeader),
        Some(end) if end + 1 < rest.len() => Ok(Some((&rest[..end], at + end + 2))),
        Some(_) => Ok(None),
        None if look.len() > NUMBER_BYTES_MAX => Err(Malformed::LongHeader),
        None => Ok(None),
    }
}

/// A number as Redis reads it: digits without zeros in front, behind a minus sign if it is below zero.
fn number(text: &[u8], otherwise: Malformed) -> Result<i64, Malformed> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let is_plain = match digits {
        [b'0'] => digits.len() == text.len(),
        [first, ..] => (b'1'..=b'9').contains(first),
        [] => false,
    };
    let text = std::str::from_utf8(text).ok().filter(|_| is_plain);
    text.and_then(|text| text.parse().ok()).ok_or(otherwise)
}

/// Digits of a number that cannot be too large.
const PLAIN_DIGITS_MAX: usize = 18;

/// The number of a header line, and where what follows begins. `None`: the line is not whole yet.
#[inline]
fn header(buf: &[u8], at: usize, otherwise: Malformed) -> Result<Option<(i64, usize)>, Malformed> {
    let rest = &buf[at.min(buf.len())..];
    let mut plain = 0;
    for (digits, byte) in rest.iter().take(PLAIN_DIGITS_MAX + 1).enumerate() {
        match byte {
            b'0'..=b'9' if digits < PLAIN_DIGITS_MAX => plain = plain * 10 + i64::from(byte - b'0'),
            b'\r' if digits > 0 && digits + 1 < rest.len() && (rest[0] != b'0' || digits == 1) => {
                return Ok(Some((plain, at + digits + 2)));
            }
            _ => break,
        }
    }
    // It has a sign, or more digits, or is not whole, or is no number.
    match line(buf, at)? {
        Some((digits, next)) => Ok(Some((number(digits, otherwise)?, next))),
        None => Ok(None),
    }
}

/// Looks for the end of the command at the front of `buf`. With `resume`, the place up to which an earlier look at the same
/// command came, a long command is looked at once; it begins with 0.
///
/// # Errors
///
/// [`Malformed`]: the connection gets the text as an error, and is closed.
pub fn scan(buf: &[u8], limits: &RespLimits, resume: &mut Progress) -> Result<Scan, Malformed> {
    let Some(first) = buf.first() else { return Ok(Scan::Incomplete(1)) };
    if *first != b'*' {
        resume.spans = Spans::default();
        let end = inline_end(buf, resume.inline_at);
        resume.inline_at = if let Ok(Scan::Incomplete(_)) = end { buf.len() } else { 0 };
        return end;
    }
    if resume.at == 0 {
        let Some((count, next)) = header(buf, 1, Malformed::Count)? else {
            return Ok(Scan::Incomplete(buf.len() + 1));
        };
        if count > limits.arguments_max as i64 {
            return Err(Malformed::Count);
        }
        // No arguments, or less: nothing to do, and no reply.
        (resume.at, resume.left) = (next, count.max(0) as usize);
        (resume.spans.command_bytes, resume.spans.count) = (0, 0);
    }
    while resume.left > 0 {
        match buf.get(resume.at) {
            None => return Ok(Scan::Incomplete(resume.at + 4)),
            Some(b'$') => {}
            Some(other) => return Err(Malformed::NoBulk(*other)),
        }
        let Some((bytes, next)) = header(buf, resume.at + 1, Malformed::Length)? else {
            return Ok(Scan::Incomplete(buf.len() + 1));
        };
        if bytes < 0 || bytes > limits.argument_bytes_max as i64 {
            return Err(Malformed::Length);
        }
        let end = next + bytes as usize + 2;
        if end > limits.command_bytes_max {
            return Err(Malformed::LongCommand { limit: limits.command_bytes_max });
        }
        if buf.len() < end {
            return Ok(Scan::Incomplete(end));
        }
        resume.spans.push(next, bytes as usize);
        (resume.at, resume.left) = (end, resume.left - 1);
    }
    let end = std::mem::take(&mut resume.at);
    resume.spans.command_bytes = end;
    Ok(Scan::Command(end))
}

/// How far the look for the end of a command came, and where its arguments are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    at: usize,
    left: usize,
    /// Bytes of an inline command without its end.
    inline_at: usize,
    spans: Spans,
}

impl Progress {
    /// Where the arguments are of the command that [`scan`] found last.
    pub fn spans(&self) -> Spans {
        self.spans
    }
}

/// Most arguments of a command whose places are kept: `SET` with a value and an end has as many.
pub const SPANS_MAX: usize = 5;

/// Where the arguments of a short command are, so that nobody looks for them again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    /// Bytes of the command; 0 if there is none.
    command_bytes: usize,
    /// Arguments that it has; above [`SPANS_MAX`] their places were not kept.
    count: usize,
    /// Of each argument, where it begins and how long it is.
    places: [(u32, u32); SPANS_MAX],
}

impl Spans {
    fn push(&mut self, at: usize, bytes: usize) {
        match (self.places.get_mut(self.count), u32::try_from(at), u32::try_from(bytes)) {
            (Some(place), Ok(at), Ok(bytes)) => {
                *place = (at, bytes);
                self.count += 1;
            }
            _ => self.count = SPANS_MAX + 1,
        }
    }

    /// The arguments of this command, if they were kept: it is the one that [`scan`] found last. `None`: [`Arguments`] tells them.
    pub fn arguments<'a>(&self, command: &'a [u8]) -> Option<impl ExactSizeIterator<Item = &'a [u8]>> {
        if self.command_bytes == 0 || self.command_bytes != command.len() {
            return None;
        }
        let argument = move |(at, bytes): &(u32, u32)| &command[*at as usize..][..*bytes as usize];
        Some(self.places.get(..self.count)?.iter().map(argument))
    }
}

/// The end of an inline command, which is not among the first `from` bytes.
fn inline_end(buf: &[u8], from: usize) -> Result<Scan, Malformed> {
    let front = &buf[..buf.len().min(INLINE_BYTES_MAX)];
    let from = from.min(front.len());
    let end = front[from..].iter().position(|byte| *byte == b'\n');
    looked::add(end.map_or(front.len() - from, |end| end + 1));
    match end {
        Some(end) => Ok(Scan::Command(from + end + 1)),
        None if front.len() == INLINE_BYTES_MAX => Err(Malformed::LongInline),
        None => Ok(Scan::Incomplete(buf.len() + 1)),
    }
}

/// The arguments of a command that [`scan`] found whole, where they lie.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Arguments<'a> {
    /// The arguments of an array. `None`: the command is inline, see [`inline`].
    pub fn of(command: &'a [u8]) -> Option<Self> {
        if command.first() != Some(&b'*') {
            return None;
        }
        let (count, next) = header(command, 1, Malformed::Count).ok().flatten()?;
        Some(Self { rest: &command[next..], left: count.max(0) as usize })
    }

    /// Arguments that are left.
    pub fn len(&self) -> usize {
        self.left
    }

    /// True if none is left.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}

impl<'a> Iterator for Arguments<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        let (bytes, next) = header(self.rest, 1, Malformed::Length).ok().flatten()?;
        let bytes = usize::try_from(bytes).ok()?;
        let argument = self.rest.get(next..next.checked_add(bytes)?)?;
        self.rest = self.rest.get(next + bytes + 2..).unwrap_or_default();
        Some(argument)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

/// The arguments of an inline command, with quotes as Redis takes them, which may begin inside a word and end it:
/// `"a\n\x41"` with escapes, `'a\'b'` without.
///
/// # Errors
///
/// [`Malformed::Quotes`], and [`Malformed::Zero`] where Redis would wait for an end that it does not see.
pub fn inline(command: &[u8]) -> Result<Vec<Vec<u8>>, Malformed> {
    if command.contains(&0) {
        return Err(Malformed::Zero);
    }
    let mut arguments = Vec::new();
    let mut rest = command;
    loop {
        while let [space, after @ ..] = rest
            && is_space(*space)
        {
            rest = after;
        }
        if rest.is_empty() {
            return Ok(arguments);
        }
        let mut argument = Vec::new();
        rest = word(rest, &mut argument)?;
        arguments.push(argument);
    }
}

/// C's `isspace`.
fn is_space(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

/// A word up to the blank behind it, or behind its quotes.
fn word<'a>(mut rest: &'a [u8], argument: &mut Vec<u8>) -> Result<&'a [u8], Malformed> {
    loop {
        rest = match rest {
            [] | [b' ' | b'\t' | b'\r' | b'\n', ..] => return Ok(rest),
            [b'"', quoted @ ..] => return double_quoted(quoted, argument),
            [b'\'', quoted @ ..] => return single_quoted(quoted, argument),
            [byte, after @ ..] => {
                argument.push(*byte);
                after
            }
        };
    }
}

/// What is behind a closing quote: the end, or a blank.
fn behind_quote(rest: &[u8]) -> Result<&[u8], Malformed> {
    if rest.first().is_none_or(|byte| is_space(*byte)) { Ok(rest) } else { Err(Malformed::Quotes) }
}

fn double_quoted<'a>(mut rest: &'a [u8], argument: &mut Vec<u8>) -> Result<&'a [u8], Malformed> {
    loop {
        rest = match rest {
            [b'"', after @ ..] => return behind_quote(after),
            [b'\\', b'x', high, low, after @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                let digit = |byte: &u8| char::from(*byte).to_digit(16).unwrap_or(0) as u8;
                argument.push(digit(high) << 4 | digit(low));
                after
            }
            [b'\\', escaped, after @ ..] => {
                argument.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'b' => 8,
                    b'a' => 7,
                    other => *other,
                });
                after
            }
            [byte, after @ ..] => {
                argument.push(*byte);
                after
            }
            [] => return Err(Malformed::Quotes),
        };
    }
}

fn single_quoted<'a>(mut rest: &'a [u8], argument: &mut Vec<u8>) -> Result<&'a [u8], Malformed> {
    loop {
        rest = match rest {
            [b'\'', after @ ..] => return behind_quote(after),
            [b'\\', b'\'', after @ ..] => {
                argument.push(b'\'');
                after
            }
            [byte, after @ ..] => {
                argument.push(*byte);
                after
            }
            [] => return Err(Malformed::Quotes),
        };
    }
}

/// The version a client speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// The one every client begins with.
    #[default]
    Resp2,
    /// After `HELLO 3`.
    Resp3,
}

/// Writes replies behind what a buffer has.
#[derive(Debug)]
pub struct Writer<'a> {
    to: &'a mut Vec<u8>,
    version: Version,
}

impl<'a> Writer<'a> {
    /// Writes to this buffer, in this version.
    pub fn new(to: &'a mut Vec<u8>, version: Version) -> Self {
        Self { to, version }
    }

    fn line(&mut self, kind: u8, text: &str) {
        self.to.push(kind);
        self.to.extend_from_slice(text.as_bytes());
        self.to.extend_from_slice(b"\r\n");
    }

    fn number(&mut self, kind: u8, number: i64) {
        // The kind, a sign, 19 digits at most, and the end, from behind.
        let mut line = [0; 23];
        let mut at = line.len() - 2;
        line[at..].copy_from_slice(b"\r\n");
        let mut left = number.unsigned_abs();
        loop {
            at -= 1;
            line[at] = b'0' + (left % 10) as u8;
            left /= 10;
            if left == 0 {
                break;
            }
        }
        if number < 0 {
            at -= 1;
            line[at] = b'-';
        }
        at -= 1;
        line[at] = kind;
        self.to.extend_from_slice(&line[at..]);
    }

    fn head(&mut self, kind: u8, count: usize) {
        // No slice, and no count of anything in memory, is longer.
        self.number(kind, count as i64);
    }

    /// `+text`: a status. It has no line end in it.
    pub fn simple(&mut self, text: &str) {
        self.line(b'+', text);
    }

    /// `+OK`.
    pub fn ok(&mut self) {
        self.to.extend_from_slice(b"+OK\r\n");
    }

    /// `-text`: an error, which begins with its kind, as in `ERR syntax error`. Line ends become spaces.
    pub fn error(&mut self, text: &str) {
        self.error_bytes(text.as_bytes());
    }

    /// The same with any bytes.
    pub fn error_bytes(&mut self, text: &[u8]) {
        self.to.push(b'-');
        self.to.extend(text.iter().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte }));
        self.to.extend_from_slice(b"\r\n");
    }

    /// `:number`.
    pub fn integer(&mut self, number: i64) {
        self.number(b':', number);
    }

    /// A string with any bytes.
    pub fn bulk(&mut self, bytes: &[u8]) {
        self.to.reserve(bytes.len() + 25);
        self.head(b'$', bytes.len());
        self.to.extend_from_slice(bytes);
        self.to.extend_from_slice(b"\r\n");
    }

    /// The head of a string whose bytes the caller sends from elsewhere, and `\r\n` behind them.
    pub fn bulk_head(&mut self, bytes: usize) {
        self.head(b'$', bytes);
    }

    /// No value: a null string in RESP2.
    pub fn null(&mut self) {
        self.to.extend_from_slice(match self.version {
            Version::Resp2 => b"$-1\r\n",
            Version::Resp3 => b"_\r\n",
        });
    }

    /// A string, or no value.
    pub fn bulk_or_null(&mut self, bytes: Option<&[u8]>) {
        match bytes {
            Some(bytes) => self.bulk(bytes),
            None => self.null(),
        }
    }

    /// No array, as of an aborted EXEC.
    pub fn null_array(&mut self) {
        self.to.extend_from_slice(match self.version {
            Version::Resp2 => b"*-1\r\n",
            Version::Resp3 => b"_\r\n",
        });
    }

    /// The head of an array of so many replies.
    pub fn array(&mut self, count: usize) {
        self.head(b'*', count);
    }

    /// The head of a map of so many pairs: in RESP2 an array of twice as many.
    pub fn map(&mut self, pairs: usize) {
        match self.version {
            Version::Resp2 => self.head(b'*', 2 * pairs),
            Version::Resp3 => self.head(b'%', pairs),
        }
    }

    /// The head of a set: in RESP2 an array.
    pub fn set(&mut self, count: usize) {
        self.head(if self.version == Version::Resp2 { b'*' } else { b'~' }, count);
    }

    /// A truth value: in RESP2 1 or 0.
    pub fn boolean(&mut self, truth: bool) {
        match self.version {
            Version::Resp2 => self.integer(i64::from(truth)),
            Version::Resp3 => self.to.extend_from_slice(if truth { b"#t\r\n" } else { b"#f\r\n" }),
        }
    }

    /// A number with a fraction: in RESP2 a string. `inf`, `-inf` and `nan` are spelled as Redis does.
    pub fn double(&mut self, number: f64) {
        // Minus zero loses its sign.
        self.signed_double(number + 0.0);
    }

    /// The same, where zero keeps its sign: a sum that Redis has not packed.
    pub fn signed_double(&mut self, number: f64) {
        let is_minus_zero = number == 0.0 && number.is_sign_negative();
        let text = if is_minus_zero { "-0".to_owned() } else { format_double(number) };
        match self.version {
            Version::Resp2 => self.bulk(text.as_bytes()),
            Version::Resp3 => self.line(b',', &text),
        }
    }

    /// A text for people, `txt`: in RESP2 a string.
    pub fn verbatim(&mut self, text: &str) {
        match self.version {
            Version::Resp2 => self.bulk(text.as_bytes()),
            Version::Resp3 => {
                self.head(b'=', text.len() + 4);
                self.to.extend_from_slice(b"txt:");
                self.to.extend_from_slice(text.as_bytes());
                self.to.extend_from_slice(b"\r\n");
            }
        }
    }
}

/// A number as Redis 7.0 prints it, by C's `%.17g`: 17 digits without zeros at the end, with an exponent where there would be
/// more digits in front of the point, or more than three zeros behind it.
pub fn format_double(number: f64) -> String {
    const DIGITS: i32 = 17;
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    if number == number.trunc() && number.abs() < 1e17 {
        // Redis packs a zero without its sign.
        return format!("{:.0}", number + 0.0);
    }
    let text = format!("{number:.*e}", DIGITS as usize - 1);
    // Rust always prints the exponent, as in "1.0000000000000000e100".
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let without_zeros = |text: &str| text.trim_end_matches('0').trim_end_matches('.').to_owned();
    if (-4..DIGITS).contains(&exponent) {
        without_zeros(&format!("{number:.*}", (DIGITS - 1 - exponent) as usize))
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{}e{sign}{:02}", without_zeros(digits), exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RespLimits = RespLimits { arguments_max: 4, argument_bytes_max: 100, command_bytes_max: 200 };

    /// The texts are those of Redis 7.0.15, as `ZSCORE` tells them.
    #[test]
    fn numbers_are_printed_as_by_redis() {
        for (number, text) in [
            (0.1, "0.10000000000000001"),
            (1e100, "1e+100"),
            (-1e100, "-1e+100"),
            (1e17, "1e+17"),
            (1e16, "10000000000000000"),
            (99_999_999_999_999_999.0, "1e+17"),
            (123_456_789_012_345_678.0, "1.2345678901234568e+17"),
            (1e-7, "9.9999999999999995e-08"),
            (0.0001, "0.0001"),
            (0.3, "0.29999999999999999"),
            (5e-324, "4.9406564584124654e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            (0.1 + 0.2, "0.30000000000000004"),
            (100.0, "100"),
            (-0.0, "0"),
            (0.0, "0"),
            (1e21, "1e+21"),
            (12345.678, "12345.678"),
            (-2.5, "-2.5"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(format_double(number), text);
            assert!(number.is_nan() || text.parse() == Ok(number));
        }
    }

    fn scan_whole(bytes: &[u8]) -> Result<Scan, Malformed> {
        scan(bytes, &LIMITS, &mut Progress::default())
    }

    #[test]
    fn a_command_is_found_at_any_split() {
        let command = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$12\r\nvalue\r\n12345\r\n";
        let behind = [&command[..], b"*1\r\n$4\r\nPING\r\n"].concat();
        assert_eq!(scan_whole(&behind), Ok(Scan::Command(command.len())));
        let mut progress = Progress::default();
        for length in 0..command.len() {
            let fresh = scan_whole(&command[..length]);
            let resumed = scan(&command[..length], &LIMITS, &mut progress);
            let Ok(Scan::Incomplete(need)) = resumed else { panic!("{length}: {resumed:?}") };
            assert!(
                matches!(fresh, Ok(Scan::Incomplete(_))) && need > length && need <= command.len(),
                "{length}: {need}"
            );
        }
        assert_eq!(scan(command, &LIMITS, &mut progress), Ok(Scan::Command(command.len())));
        let arguments: Vec<_> = Arguments::of(command).unwrap().collect();
        assert_eq!(arguments, [&b"SET"[..], b"k", b"value\r\n12345"]);
    }

    #[test]
    fn limits_and_nonsense_are_told_in_the_words_of_redis() {
        for (bytes, text) in [
            (&b"*5\r\n"[..], "Protocol error: invalid multibulk length"),
            (b"*x\r\n", "Protocol error: invalid multibulk length"),
            (b"*1\r\n$101\r\n", "Protocol error: invalid bulk length"),
            (b"*1\r\n$-1\r\n", "Protocol error: invalid bulk length"),
            (b"*1\r\n:1\r\n", "Protocol error: expected '$', got ':'"),
            (b"*1\r\n$000000000000000000000000001", "Protocol error: too big mbulk count string"),
            (b"*3\r\n$90\r\n", "incomplete"),
        ] {
            let told = scan_whole(bytes).map_or_else(|error| error.to_string(), |_| "incomplete".to_owned());
            assert_eq!(told, text, "{}", bytes.escape_ascii());
        }
        let long = [b"*3\r\n$90\r\n", &[b'x'; 90][..], b"\r\n$100\r\n"].concat();
        assert_eq!(scan_whole(&long), Err(Malformed::LongCommand { limit: 200 }));
        assert_eq!(scan_whole(&[b'a'; INLINE_BYTES_MAX]), Err(Malformed::LongInline));
        assert_eq!(scan_whole(b"*0\r\nrest"), Ok(Scan::Command(4)));
        assert_eq!(scan_whole(b"*-1\r\n"), Ok(Scan::Command(5)));
    }

    /// What is read byte by byte is the same as what a slow look at the line makes of it.
    #[test]
    fn headers_are_numbers_as_the_standard_library_reads_them() {
        let mut digits: Vec<String> =
            ["", "-", "+", "-0", "+1", "1-", "x", " 1", "1 ", "00", "007", "1\n"].map(str::to_owned).to_vec();
        for length in 1..=22 {
            digits.extend(["1", "9", "0"].map(|digit| digit.repeat(length)));
            digits.push(format!("-{}", "9".repeat(length)));
        }
        digits.extend([i64::MAX, i64::MIN].map(|number| number.to_string()));
        digits.push((i64::MAX as u64 + 1).to_string());
        for text in digits {
            let whole = format!("{text}\r\n");
            for cut in 0..=whole.len() {
                let part = &whole.as_bytes()[..cut];
                let slow = line(part, 0).and_then(|line| {
                    line.map(|(digits, next)| number(digits, Malformed::Count).map(|number| (number, next))).transpose()
                });
                assert_eq!(header(part, 0, Malformed::Count), slow, "{}", part.escape_ascii());
            }
        }
    }

    /// The verdicts are those of Redis 7.0.15.
    #[test]
    fn numbers_of_headers_are_those_that_redis_takes() {
        let limits = RespLimits { arguments_max: i32::MAX as usize, ..LIMITS };
        let scan = |text: &str| scan(text.as_bytes(), &limits, &mut Progress::default());
        for text in [
            "*01",
            "*+1",
            "*-0",
            "*00",
            "*",
            "*-",
            "*--1",
            "*1 ",
            "* 1",
            "*0x1",
            "*12345678901234567890",
            "*2147483648",
        ] {
            assert_eq!(scan(&format!("{text}\r\n$4\r\nPING\r\n")), Err(Malformed::Count), "{text}");
        }
        for text in ["*0", "*-1", "*-9999999999"] {
            assert_eq!(scan(&format!("{text}\r\n")), Ok(Scan::Command(text.len() + 2)), "{text}");
        }
        assert!(matches!(scan("*2147483647\r\n"), Ok(Scan::Incomplete(_))));
        for text in ["$-1", "$-0", "$04", "$+4", "$00", "$", "$12345678901234567890", "$999999999999"] {
            assert_eq!(scan(&format!("*1\r\n{text}\r\nPING\r\n")), Err(Malformed::Length), "{text}");
        }
        assert_eq!(scan("*1\r\n$0\r\n\r\n"), Ok(Scan::Command(10)));
    }

    /// However small the pieces are, a byte is looked at once.
    #[test]
    fn resumed_search_for_the_end_of_an_inline_command_looks_at_each_byte_once() {
        for (line, is_whole) in
            [([&vec![b'a'; 60_000][..], b"\r\n"].concat(), true), (vec![b'a'; INLINE_BYTES_MAX], false)]
        {
            for step in [1, 4, 1000] {
                let mut progress = Progress::default();
                let looked = looked::bytes_of(|| {
                    for end in (step..line.len()).step_by(step) {
                        let told = scan(&line[..end], &LIMITS, &mut progress);
                        assert_eq!(told, Ok(Scan::Incomplete(end + 1)));
                    }
                    let told = scan(&line, &LIMITS, &mut progress);
                    assert_eq!(told.is_ok_and(|told| told == Scan::Command(line.len())), is_whole);
                });
                assert_eq!(looked, line.len(), "by {step}");
                // The next one begins anew.
                assert!(!is_whole || scan(b"PING\r\n", &LIMITS, &mut progress) == Ok(Scan::Command(6)));
            }
        }
    }

    #[test]
    fn the_places_of_few_arguments_are_kept() {
        let mut progress = Progress::default();
        let set = b"*3\r\n$3\r\nSET\r\n$0\r\n\r\n$7\r\nva\r\nlue\r\n";
        // In two pieces, with another command behind it.
        assert!(matches!(scan(&set[..20], &LIMITS, &mut progress), Ok(Scan::Incomplete(_))));
        assert!(progress.spans().arguments(&set[..20]).is_none(), "it is not whole");
        assert_eq!(scan(&[&set[..], b"PING\r\n"].concat(), &LIMITS, &mut progress), Ok(Scan::Command(set.len())));
        let kept: Vec<&[u8]> = progress.spans().arguments(set).unwrap().collect();
        assert_eq!(kept, [&b"SET"[..], b"", b"va\r\nlue"]);
        assert!(progress.spans().arguments(&set[1..]).is_none(), "another length");
        assert_eq!(scan(b"PING\r\n", &LIMITS, &mut progress), Ok(Scan::Command(6)));
        assert!(progress.spans().arguments(b"PING\r\n").is_none(), "inline");
        assert_eq!(scan(b"*0\r\n", &LIMITS, &mut progress), Ok(Scan::Command(4)));
        assert_eq!(progress.spans().arguments(b"*0\r\n").unwrap().len(), 0);
        let limits = RespLimits { arguments_max: 10, ..LIMITS };
        for count in 1..=10 {
            let command = [format!("*{count}\r\n").into_bytes(), b"$1\r\nx\r\n".repeat(count)].concat();
            assert_eq!(scan(&command, &limits, &mut progress), Ok(Scan::Command(command.len())));
            let spans = progress.spans();
            let kept = spans.arguments(&command);
            assert_eq!(kept.map(Iterator::count), (count <= SPANS_MAX).then_some(count));
        }
    }

    #[test]
    fn numbers_are_written_as_the_standard_library_writes_them() {
        let powers = (0..19).map(|power| 10_i64.pow(power));
        let edges = powers.flat_map(|power| [power - 1, power, -power, 1 - power]);
        for number in edges.chain([i64::MAX, i64::MIN]) {
            let mut written = Vec::new();
            Writer::new(&mut written, Version::Resp2).integer(number);
            assert_eq!(written, format!(":{number}\r\n").into_bytes());
        }
    }

    #[test]
    fn inline_commands_take_quotes() {
        let parsed = |text: &str| {
            inline(text.as_bytes()).map(|all| all.iter().map(|one| one.escape_ascii().to_string()).collect::<Vec<_>>())
        };
        assert_eq!(scan_whole(b"GET a\r\nmore"), Ok(Scan::Command(7)));
        assert_eq!(
            parsed(" SET  key \"a b\\x41\\n\" 'it\\'s'\r\n"),
            Ok(vec!["SET".into(), "key".into(), "a bA\\n".into(), "it\\'s".into()])
        );
        assert_eq!(parsed("\r\n"), Ok(vec![]));
        // As Redis 7.0.15 takes them.
        for (text, words) in [
            ("PING a\"b c\"\r\n", &["PING", "ab c"][..]),
            ("PING a'b c' d\r\n", &["PING", "ab c", "d"]),
            ("\"PI\\x4eG\"\r\n", &["PING"]),
            ("\x0bPING a\x0cb\r\n", &["PING", "a\\x0cb"]),
            ("PING\rx\n", &["PING", "x"]),
            ("PING ''\n", &["PING", ""]),
            ("PING \"\\xzz\\q\"\r\n", &["PING", "xzzq"]),
        ] {
            assert_eq!(parsed(text), Ok(words.iter().map(|word| (*word).to_owned()).collect()), "{text:?}");
        }
        assert_eq!(parsed("PING a\0b\r\n"), Err(Malformed::Zero));
        for wrong in ["\"a", "'a", "\"a\"b", "'a'b", "a\"b", "a'b", "\"\r\n", "a\"b\"c"] {
            assert_eq!(parsed(wrong), Err(Malformed::Quotes), "{wrong}");
        }
    }

    #[test]
    fn replies_differ_by_version() {
        let written = |version, write: fn(&mut Writer<'_>)| {
            let mut bytes = Vec::new();
            write(&mut Writer::new(&mut bytes, version));
            String::from_utf8(bytes).unwrap()
        };
        let both = |write: fn(&mut Writer<'_>)| (written(Version::Resp2, write), written(Version::Resp3, write));
        let pair = |two: &str, three: &str| (two.to_owned(), three.to_owned());
        assert_eq!(both(|to| to.null()), pair("$-1\r\n", "_\r\n"));
        assert_eq!(both(|to| to.null_array()), pair("*-1\r\n", "_\r\n"));
        assert_eq!(both(|to| to.map(2)), pair("*4\r\n", "%2\r\n"));
        assert_eq!(both(|to| to.set(2)), pair("*2\r\n", "~2\r\n"));
        assert_eq!(both(|to| to.boolean(true)), pair(":1\r\n", "#t\r\n"));
        assert_eq!(both(|to| to.double(1.5)), pair("$3\r\n1.5\r\n", ",1.5\r\n"));
        assert_eq!(both(|to| to.double(f64::NEG_INFINITY)), pair("$4\r\n-inf\r\n", ",-inf\r\n"));
        assert_eq!(both(|to| to.verbatim("hi")), pair("$2\r\nhi\r\n", "=6\r\ntxt:hi\r\n"));
        assert_eq!(both(|to| to.error("ERR a\r\nb")), pair("-ERR a  b\r\n", "-ERR a  b\r\n"));
        assert_eq!(both(|to| to.bulk(b"x")), pair("$1\r\nx\r\n", "$1\r\nx\r\n"));
        assert_eq!(both(|to| to.double(3.0)), pair("$1\r\n3\r\n", ",3\r\n"));
    }
}
