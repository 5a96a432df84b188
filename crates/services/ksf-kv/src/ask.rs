//! A client that asks one thing after the other.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;

use ksf::listener::ListenAddr;

use crate::offline::write_command;

/// A connection to a server.
#[derive(Debug)]
pub enum Socket {
    /// By TCP.
    Tcp(TcpStream),
    /// By a Unix socket.
    Unix(UnixStream),
}

impl Socket {
    /// Connects to what a server listens on.
    ///
    /// # Errors
    ///
    /// Nobody is there; and there are no connections by UDP.
    pub fn connect(address: &ListenAddr) -> io::Result<Self> {
        match address {
            ListenAddr::Tcp(address) => TcpStream::connect(address).map(Self::Tcp),
            ListenAddr::Unix(path) => UnixStream::connect(path).map(Self::Unix),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Ends the connection, also for those that wait for it.
    pub fn end(&self) {
        // It may have ended.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl Read for &Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => {
                let mut stream = stream;
                stream.read(into)
            }
            Socket::Unix(stream) => {
                let mut stream = stream;
                stream.read(into)
            }
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => {
                let mut stream = stream;
                stream.write(bytes)
            }
            Socket::Unix(stream) => {
                let mut stream = stream;
                stream.write(bytes)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why there is no answer, or none that is of use.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The server says no.
    #[error("the server says: {0}")]
    Refused(String),
    /// It says something else than an answer to this.
    #[error("the server gives an answer of another kind: is it ksf store?")]
    Unexpected,
}

/// Asks over a connection.
#[derive(Debug)]
pub struct Asker<S> {
    stream: BufReader<S>,
}

/// Longest line of an answer.
const LINE_BYTES_MAX: u64 = 64 << 10;

impl<S: Read + Write> Asker<S> {
    /// Over this connection, on which nothing was asked.
    pub fn new(stream: S) -> Self {
        Self { stream: BufReader::new(stream) }
    }

    /// Tells the password.
    ///
    /// # Errors
    ///
    /// [`AskError::Refused`]: it is wrong, or none is wanted.
    pub fn authenticate(&mut self, password: &[u8]) -> Result<(), AskError> {
        self.status(&[b"AUTH", password])
    }

    /// A line, which begins with this.
    fn line(&mut self, kind: u8) -> Result<String, AskError> {
        let mut line = Vec::new();
        Read::by_ref(&mut self.stream).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        let text = line.strip_suffix(b"\r\n").ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        match text.split_first() {
            Some((first, text)) if *first == kind => Ok(String::from_utf8_lossy(text).into_owned()),
            Some((b'-', text)) => Err(AskError::Refused(String::from_utf8_lossy(text).into_owned())),
            _ => Err(AskError::Unexpected),
        }
    }

    fn count(&mut self, kind: u8) -> Result<usize, AskError> {
        self.line(kind)?.parse().map_err(|_| AskError::Unexpected)
    }

    fn send(&mut self, words: &[&[u8]]) -> Result<(), AskError> {
        let mut command = Vec::new();
        write_command(&mut command, words.iter().copied())?;
        Ok(self.stream.get_mut().write_all(&command)?)
    }

    /// Asks for something whose answer is `OK`.
    pub(crate) fn status(&mut self, words: &[&[u8]]) -> Result<(), AskError> {
        self.send(words)?;
        self.line(b'+').map(drop)
    }

    /// Asks for strings that are numbers, at most so many.
    pub(crate) fn numbers(&mut self, words: &[&[u8]], count_max: usize) -> Result<Vec<u64>, AskError> {
        self.send(words)?;
        let count = self.count(b'*')?;
        if count > count_max {
            return Err(AskError::Unexpected);
        }
        let mut numbers = Vec::with_capacity(count);
        for _ in 0..count {
            let mut text = Vec::new();
            self.string(20, &mut text)?;
            let number = std::str::from_utf8(&text).ok().and_then(|text| text.parse().ok());
            numbers.push(number.ok_or(AskError::Unexpected)?);
        }
        Ok(numbers)
    }

    /// Asks for so many bytes, and puts them behind what `into` has.
    pub(crate) fn bytes(&mut self, words: &[&[u8]], bytes: usize, into: &mut Vec<u8>) -> Result<(), AskError> {
        self.send(words)?;
        let before = into.len();
        self.string(bytes, into)?;
        if into.len() - before == bytes { Ok(()) } else { Err(AskError::Unexpected) }
    }

    /// A string of at most so many bytes.
    fn string(&mut self, bytes_max: usize, into: &mut Vec<u8>) -> Result<(), AskError> {
        let bytes = self.count(b'$')?;
        if bytes > bytes_max {
            return Err(AskError::Unexpected);
        }
        let read = Read::by_ref(&mut self.stream).take(bytes as u64).read_to_end(into)?;
        let mut end = [0; 2];
        self.stream.read_exact(&mut end)?;
        if read == bytes && end == *b"\r\n" { Ok(()) } else { Err(AskError::Unexpected) }
    }
}

/// Reads a reply; the text if it is an error.
///
/// # Errors
///
/// The connection ends early, or brings something else.
pub(crate) fn read_reply(from: &mut impl BufRead) -> io::Result<Option<String>> {
    let (mut left, mut error) = (1_u64, None);
    while left > 0 {
        left -= 1;
        let mut line = Vec::new();
        from.take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        let Some([kind, text @ ..]) = line.strip_suffix(b"\r\n") else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let text = String::from_utf8_lossy(text);
        let count = || text.parse::<i64>().map(|count| count.max(0) as u64).map_err(io::Error::other);
        match kind {
            b'-' => error = error.or_else(|| Some(text.into_owned())),
            b'$' if !text.starts_with('-') => {
                let bytes = count()? + 2;
                if io::copy(&mut from.take(bytes), &mut io::sink())? < bytes {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            b'*' => left += count()?,
            _ => {}
        }
    }
    Ok(error)
}
