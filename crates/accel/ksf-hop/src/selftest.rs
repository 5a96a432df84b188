//! Is a joined connection what TCP is? Found out on connections of this process to itself, before anybody else's are
//! joined.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::SpliceFlags;

use crate::hop::Programs;
use crate::{HopError, Options};

/// How long something may take that should take microseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection to this machine may take.
const CONNECTING: Duration = Duration::from_secs(2);

/// Sizes of messages that are handed over: a byte, odd ones, a page and more. Larger ones than a quarter of the usual
/// SO_RCVBUF are not.
const SIZES: [usize; 7] = [1, 2, 100, 1460, 4097, 16_384, 30_001];

/// More than a writer may get rid of while nobody reads.
const TOO_MUCH: usize = 64 << 20;

/// Runs all checks. `attach` attaches to the cgroup of this process; the programs end as they were, with other settings.
pub(crate) fn run(
    programs: &Programs,
    options: &Options,
    attach: impl FnOnce() -> Result<OwnedFd, HopError>,
) -> Result<(), HopError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| HopError::system("listening", error))?;
    let port = listener.local_addr().map_err(|error| HopError::system("listening", error))?.port();
    // Whatever the caller wants for others: here every size is to be handed over.
    let options = Options { limit_bytes: 256 * 1024, warm_up: options.warm_up.min(1), ..*options };
    programs.choose(&[port], &options)?;
    let link = attach()?;
    let test = Test { programs, listener, no_fionread: options.no_fionread };
    let result = test.all().map_err(|problem| HopError::SelfTest { problem });
    drop(link);
    result
}

struct Test<'a> {
    programs: &'a Programs,
    listener: TcpListener,
    no_fionread: bool,
}

impl Test<'_> {
    fn all(&self) -> Result<(), String> {
        if self.programs.is_guarded() {
            self.the_guard_notices_splice()?;
        }
        self.bytes_arrive()?;
        if !self.no_fionread {
            self.waiting_bytes_are_counted()?;
        }
        self.a_slow_reader_slows_the_writer()?;
        self.an_end_is_behind_the_bytes()?;
        self.the_way_back_keeps_the_order()
    }

    fn bytes_arrive(&self) -> Result<(), String> {
        let (mut one, mut other) = self.joined()?;
        for size in SIZES {
            let sent = pattern(0, size);
            let before = self.count("messages")?;
            write(&mut one, &sent)?;
            if self.count("messages")? == before {
                return Err(self.why_not(size));
            }
            same(&sent, &read(&mut other, size)?)?;
            // And in the other direction.
            write(&mut other, &sent)?;
            same(&sent, &read(&mut one, size)?)?;
        }
        Ok(())
    }

    /// A program may ask how many bytes wait. One that is told 0 while there are some, as nginx asks behind a read that
    /// filled its buffer, waits for bytes that have come already.
    fn waiting_bytes_are_counted(&self) -> Result<(), String> {
        let (mut one, mut other) = self.joined()?;
        let limit = 100_000;
        for (size, how) in [(1000, "handed over"), (limit, "by TCP behind others that were handed over")] {
            write(&mut one, &pattern(0, size))?;
            wait(&other, PollFlags::IN)?;
            let expected = if size == limit { 1000 + limit } else { size };
            self.counts(&other, expected, how)?;
        }
        read(&mut other, 1000 + limit)?;
        let (mut one, other) = self.connected()?;
        write(&mut one, &[1; 50])?;
        wait(&other, PollFlags::IN)?;
        self.counts(&other, 50, "by TCP")
    }

    fn counts(&self, reader: &TcpStream, expected: usize, how: &str) -> Result<(), String> {
        let waiting = rustix::io::ioctl_fionread(reader).map_err(|error| format!("FIONREAD: {error}"))?;
        if waiting == expected as u64 {
            return Ok(());
        }
        Err(format!(
            "FIONREAD says that {waiting} of {expected} bytes wait, which came {how}: programs that ask, as nginx does, \
             would wait for what has come already. If no program of the scope asks, say so (--no-fionread)"
        ))
    }

    fn the_guard_notices_splice(&self) -> Result<(), String> {
        let (mut one, other) = self.connected()?;
        write(&mut one, &[1])?;
        wait(&other, PollFlags::IN)?;
        let system = |error: rustix::io::Errno| format!("splice: {error}");
        let (_reader, writer) = rustix::pipe::pipe().map_err(system)?;
        rustix::pipe::splice(&other, None, &writer, None, 1, SpliceFlags::NONBLOCK).map_err(system)?;
        match self.count("spliced")? {
            1 => Ok(()),
            count => Err(format!("the guard has seen {count} sockets read by splice(), not 1")),
        }
    }

    fn a_slow_reader_slows_the_writer(&self) -> Result<(), String> {
        let (mut writer, mut reader) = self.joined()?;
        let mut sent = 0;
        loop {
            match writer.write(&pattern(sent, 10_000)) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(format!("a writer whose reader is slow gets: {error}")),
            }
            if sent > TOO_MUCH {
                return Err(format!("nothing slows a writer down: {sent} bytes wait"));
            }
        }
        let mut received = 0;
        while received < sent {
            let some = read(&mut reader, (sent - received).min(7000))?;
            same(&pattern(received, some.len()), &some)?;
            received += some.len();
        }
        Ok(())
    }

    fn an_end_is_behind_the_bytes(&self) -> Result<(), String> {
        let (mut one, mut other) = self.joined()?;
        let sent = pattern(3, 10_000);
        write(&mut one, &sent)?;
        one.shutdown(Shutdown::Write).map_err(|error| format!("shutdown: {error}"))?;
        same(&sent, &read(&mut other, sent.len())?)?;
        if !read(&mut other, 1)?.is_empty() {
            return Err("there are bytes behind the end".to_owned());
        }
        if one.write(&sent).is_ok() {
            return Err("bytes can be sent behind the end".to_owned());
        }
        write(&mut other, &sent)?;
        drop(other);
        same(&sent, &read(&mut one, sent.len())?)?;
        if read(&mut one, 1)?.is_empty() { Ok(()) } else { Err("there are bytes behind the end".to_owned()) }
    }

    fn the_way_back_keeps_the_order(&self) -> Result<(), String> {
        let (mut writer, mut reader) = self.joined()?;
        let sent = pattern(5, 3000);
        write(&mut writer, &sent[..1000])?;
        self.programs.stop().map_err(|error| error.to_string())?;
        let before = self.count("messages")?;
        write(&mut writer, &sent[1000..2000])?;
        write(&mut writer, &sent[2000..])?;
        if self.count("messages")? != before {
            return Err("messages are handed over after the end".to_owned());
        }
        same(&sent, &read(&mut reader, sent.len())?)
    }

    /// A connection both of whose directions are joined.
    fn joined(&self) -> Result<(TcpStream, TcpStream), String> {
        let (mut one, mut other) = self.connected()?;
        for _ in 0..2 {
            write(&mut one, &[1])?;
            read(&mut other, 1)?;
            write(&mut other, &[1])?;
            read(&mut one, 1)?;
        }
        Ok((one, other))
    }

    fn connected(&self) -> Result<(TcpStream, TcpStream), String> {
        let connect = || -> io::Result<_> {
            let one = TcpStream::connect_timeout(&self.listener.local_addr()?, CONNECTING)?;
            let (other, _) = self.listener.accept()?;
            for end in [&one, &other] {
                end.set_nonblocking(true)?;
                // Without it the end of a message that goes by TCP waits for more.
                end.set_nodelay(true)?;
            }
            Ok((one, other))
        };
        connect().map_err(|error| format!("cannot connect on loopback: {error}"))
    }

    /// Why a message went by TCP.
    fn why_not(&self, size: usize) -> String {
        let counters = self.programs.counters().unwrap_or_default();
        let known = ["watched", "joined", "left", "messages", "bytes", "tcp_young", "tcp_unread"];
        let why: Vec<String> = counters
            .iter()
            .filter(|counter| counter.value > 0 && !known.contains(&counter.name))
            .map(|counter| format!("{} {} times", counter.help, counter.value))
            .collect();
        let why = if why.is_empty() { "no connection was noticed".to_owned() } else { why.join("; ") };
        format!("a message of {size} bytes went by TCP: {why}")
    }

    fn count(&self, name: &str) -> Result<u64, String> {
        let counters = self.programs.counters().map_err(|error| error.to_string())?;
        Ok(counters.iter().filter(|counter| counter.name == name).map(|counter| counter.value).sum())
    }
}

/// `size` bytes of a stream that tells its place.
fn pattern(from: usize, size: usize) -> Vec<u8> {
    (from..from + size).map(|place| (place ^ place >> 8 ^ place >> 16) as u8).collect()
}

fn same(sent: &[u8], received: &[u8]) -> Result<(), String> {
    match sent.iter().zip(received).position(|(one, other)| one != other) {
        Some(place) => Err(format!("byte {place} of {} is another one", sent.len())),
        None if sent.len() != received.len() => Err(format!("{} of {} bytes arrived", received.len(), sent.len())),
        None => Ok(()),
    }
}

fn write(stream: &mut TcpStream, mut bytes: &[u8]) -> Result<(), String> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, PollFlags::OUT)?,
            Err(error) => return Err(format!("send: {error}")),
        }
    }
    Ok(())
}

/// As many bytes, or less if the stream ends.
fn read(stream: &mut TcpStream, size: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; size];
    let mut filled = 0;
    while filled < size {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(received) => filled += received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, PollFlags::IN)?,
            Err(error) => return Err(format!("recv: {error}")),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn wait(stream: &TcpStream, what: PollFlags) -> Result<(), String> {
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let mut ends = [PollFd::new(stream, what)];
    match poll(&mut ends, Some(&patience)) {
        Ok(0) => Err(format!("nothing happens for {PATIENCE:?} ({what:?})")),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(format!("poll: {error}")),
    }
}
