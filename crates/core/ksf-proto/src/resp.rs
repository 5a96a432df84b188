//! RESP2 and RESP3: the protocol of Redis (redis.io/docs/reference/protocol-spec).
//!
//! ```text
//!   *2\r\n$3\r\nGET\r\n$5\r\nhello\r\n     a command: an array of bulk strings
//!   GET hello\r\n                          the same inline, for people at a terminal
//! ```
//!
//! [`scan`] finds where a command ends, without taking memory; [`Arguments`] goes over its arguments where they lie;
//! [`Writer`] writes replies in the version that the client asked for. That is the server's side; a client writes its commands
//! as arrays of strings with a [`Writer`], too, and reads what comes back with [`reply`].

use std::io::Write;

pub mod reply;

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

fn number(digits: &[u8], otherwise: Malformed) -> Result<i64, Malformed> {
    let text = std::str::from_utf8(digits).map_err(|_| otherwise)?;
    // `parse` takes a plus sign, which Redis does not.
    if text.starts_with('+') { Err(otherwise) } else { text.parse().map_err(|_| otherwise) }
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
        return inline_end(buf);
    }
    if resume.at == 0 {
        let Some((digits, next)) = line(buf, 1)? else { return Ok(Scan::Incomplete(buf.len() + 1)) };
        let count = number(digits, Malformed::Count)?;
        if count > limits.arguments_max as i64 {
            return Err(Malformed::Count);
        }
        // No arguments, or less: nothing to do, and no reply.
        (resume.at, resume.left) = (next, count.max(0) as usize);
    }
    while resume.left > 0 {
        match buf.get(resume.at) {
            None => return Ok(Scan::Incomplete(resume.at + 4)),
            Some(b'$') => {}
            Some(other) => return Err(Malformed::NoBulk(*other)),
        }
        let Some((digits, next)) = line(buf, resume.at + 1)? else { return Ok(Scan::Incomplete(buf.len() + 1)) };
        let bytes = number(digits, Malformed::Length)?;
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
        (resume.at, resume.left) = (end, resume.left - 1);
    }
    let end = std::mem::take(resume).at;
    Ok(Scan::Command(end))
}

/// How far the look for the end of a command came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    at: usize,
    left: usize,
}

fn inline_end(buf: &[u8]) -> Result<Scan, Malformed> {
    let look = &buf[..buf.len().min(INLINE_BYTES_MAX)];
    match look.iter().position(|byte| *byte == b'\n') {
        Some(end) => Ok(Scan::Command(end + 1)),
        None if look.len() == INLINE_BYTES_MAX => Err(Malformed::LongInline),
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
        let (digits, next) = line(command, 1).ok().flatten()?;
        let left = number(digits, Malformed::Count).ok()?.max(0) as usize;
        Some(Self { rest: &command[next..], left })
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
        let (digits, next) = line(self.rest, 1).ok().flatten()?;
        let bytes = usize::try_from(number(digits, Malformed::Length).ok()?).ok()?;
        let argument = self.rest.get(next..next.checked_add(bytes)?)?;
        self.rest = self.rest.get(next + bytes + 2..).unwrap_or_default();
        Some(argument)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

/// The arguments of an inline command, with quotes as Redis takes them: `"a\n\x41"` with escapes, `'a\'b'` without.
///
/// # Errors
///
/// [`Malformed::Quotes`].
pub fn inline(command: &[u8]) -> Result<Vec<Vec<u8>>, Malformed> {
    let mut arguments = Vec::new();
    let mut rest = command;
    loop {
        while let [space, after @ ..] = rest
            && (space.is_ascii_whitespace() || *space == 0x0b)
        {
            rest = after;
        }
        if rest.is_empty() {
            return Ok(arguments);
        }
        let mut argument = Vec::new();
        rest = match rest {
            [b'"', quoted @ ..] => double_quoted(quoted, &mut argument)?,
            [b'\'', quoted @ ..] => single_quoted(quoted, &mut argument)?,
            _ => {
                let end = rest.iter().position(|byte| byte.is_ascii_whitespace()).unwrap_or(rest.len());
                argument.extend_from_slice(&rest[..end]);
                &rest[end..]
            }
        };
        arguments.push(argument);
    }
}

/// What is behind a closing quote: the end, or a space.
fn behind_quote(rest: &[u8]) -> Result<&[u8], Malformed> {
    if rest.first().is_none_or(u8::is_ascii_whitespace) { Ok(rest) } else { Err(Malformed::Quotes) }
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

    fn head(&mut self, kind: u8, number: impl std::fmt::Display) {
        self.to.push(kind);
        // Writing to a vector does not fail.
        let _ = write!(self.to, "{number}\r\n");
    }

    /// `+text`: a status. It has no line end in it.
    pub fn simple(&mut self, text: &str) {
        self.head(b'+', text);
    }

    /// `+OK`.
    pub fn ok(&mut self) {
        self.to.extend_from_slice(b"+OK\r\n");
    }

    /// `-text`: an error, which begins with its kind, as in `ERR syntax error`. Line ends become spaces.
    pub fn error(&mut self, text: &str) {
        self.to.push(b'-');
        self.to.extend(text.bytes().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { byte }));
        self.to.extend_from_slice(b"\r\n");
    }

    /// `:number`.
    pub fn integer(&mut self, number: i64) {
        self.head(b':', number);
    }

    /// A string with any bytes.
    pub fn bulk(&mut self, bytes: &[u8]) {
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
        let text = format_double(number);
        match self.version {
            Version::Resp2 => self.bulk(text.as_bytes()),
            Version::Resp3 => self.head(b',', text),
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

/// A number as Redis prints it: without an exponent where none is needed, whole numbers without a point.
pub fn format_double(number: f64) -> String {
    if number.is_nan() {
        "nan".to_owned()
    } else if number.is_infinite() {
        if number > 0.0 { "inf" } else { "-inf" }.to_owned()
    } else if number == number.trunc() && number.abs() < 1e17 {
        format!("{number:.0}")
    } else {
        format!("{number}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RespLimits = RespLimits { arguments_max: 4, argument_bytes_max: 100, command_bytes_max: 200 };

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
        for wrong in ["\"a", "'a", "\"a\"b", "'a'b"] {
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
