//! One file, from its beginning to its end: a snapshot, if it begins as one, and the commands behind it.

use std::io::{self, Read};

use ksf_proto::rdb::{self, Part};
use ksf_proto::resp::{self, Arguments, Malformed, Progress, RespLimits, Scan};

use super::Fault;
use super::snapshot::Converter;
use crate::seal;

/// What is told of the commands: their bytes, and how many they are.
pub(super) type Sink<'s> = dyn FnMut(&[u8], u64) -> io::Result<()> + 's;

/// Why a file was not gone through.
pub(super) enum Stop {
    /// It is wrong.
    Fault(Fault),
    /// Its commands are not taken.
    Sink(io::Error),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// Bytes that are read at a time.
const PIECE_BYTES: u64 = 256 << 10;
/// Longest command of a file, and longest string of a snapshot: twice what Redis takes in one string by default.
const STRING_BYTES_MAX: usize = 1 << 30;

/// What was read of a file and not used.
struct Input<R> {
    from: R,
    buffer: Vec<u8>,
    start: usize,
    /// Where in the file that begins.
    at: u64,
}

impl<R: Read> Input<R> {
    fn rest(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    fn advance(&mut self, bytes: usize) {
        self.start += bytes;
        self.at += bytes as u64;
    }

    /// Reads more; false at the end.
    fn more(&mut self) -> Result<bool, Stop> {
        self.buffer.drain(..self.start);
        self.start = 0;
        let read = Read::by_ref(&mut self.from).take(PIECE_BYTES).read_to_end(&mut self.buffer);
        Ok(read.map_err(Fault::from)? > 0)
    }
}

/// Hands out what a file has.
pub(super) fn go_through(file: impl Read, now_ms: u64, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let mut input = Input { from: file, buffer: Vec::new(), start: 0, at: 0 };
    input.more()?;
    if input.rest().starts_with(b"REDIS") {
        snapshot(&mut input, now_ms, sink)?;
    }
    commands(&mut input, sink)
}

fn snapshot<R: Read>(input: &mut Input<R>, now_ms: u64, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let mut reader = rdb::Reader::new(STRING_BYTES_MAX);
    let mut converter = Converter::new(now_ms);
    while !reader.is_ended() {
        match reader.read(input.rest()) {
            Ok(Some((Part::Database(number), _))) if number != 0 => {
                return Err(Fault::Database { at: input.at, number: number.to_string() }.into());
            }
            Ok(Some((part, used))) => {
                input.advance(used);
                converter.take(part);
                converter.hand_out(sink, PIECE_BYTES as usize).map_err(Stop::Sink)?;
            }
            Ok(None) => {
                if !input.more()? {
                    return Err(Fault::CutSnapshot { at: input.at }.into());
                }
            }
            Err(bad) => return Err(Fault::Snapshot { at: input.at, bad }.into()),
        }
    }
    converter.hand_out(sink, 1).map_err(Stop::Sink)
}

fn commands<R: Read>(input: &mut Input<R>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let limits = RespLimits {
        arguments_max: 1 << 24,
        argument_bytes_max: STRING_BYTES_MAX,
        command_bytes_max: STRING_BYTES_MAX,
    };
    let (mut order, mut progress) = (Order::default(), Progress::default());
    loop {
        // Commands from `run` up to `at` are handed out together.
        let (rest, mut run, mut at, mut count) = (input.rest(), 0, 0, 0);
        loop {
            let here = input.at + at as u64;
            let malformed = |malformed| Fault::Malformed { at: here, malformed };
            let bytes = match resp::scan(&rest[at..], &limits, &mut progress).map_err(malformed)? {
                Scan::Command(bytes) => bytes,
                Scan::Incomplete(_) => break,
            };
            match rest[at] {
                b'*' => {
                    order.see(here, &rest[at..at + bytes])?;
                    count += 1;
                }
                // A line of an AOF that tells the time.
                b'#' => {
                    sink(&rest[run..at], count).map_err(Stop::Sink)?;
                    (run, count) = (at + bytes, 0);
                }
                other => return Err(malformed(Malformed::NoBulk(other)).into()),
            }
            at += bytes;
        }
        sink(&rest[run..at], count).map_err(Stop::Sink)?;
        input.advance(at);
        if !input.more()? {
            let at = input.at;
            return if input.rest().is_empty() { Ok(order.end(at)?) } else { Err(Fault::Cut { at }.into()) };
        }
    }
}

/// What must be right of the commands of a file together.
#[derive(Debug, Default)]
struct Order {
    began: bool,
    /// It is a backup, and what is before has this checksum.
    backup_crc: Option<u32>,
    /// The end of the backup was there, and was right.
    ended: bool,
    /// Where the transaction begins that is open.
    transaction: Option<u64>,
}

impl Order {
    fn see(&mut self, at: u64, command: &[u8]) -> Result<(), Fault> {
        let backup = |what| Fault::Backup { at, what };
        if self.ended {
            return Err(backup("has something behind its end"));
        }
        let mut words = Arguments::of(command).into_iter().flatten();
        // A server does not answer a command without words.
        let name = words.next().ok_or(Fault::Malformed { at, malformed: Malformed::Count })?;
        let is = |wanted: &str| name.eq_ignore_ascii_case(wanted.as_bytes());
        if is("ECHO") {
            let text = words.next().unwrap_or_default();
            match self.backup_crc {
                None if !self.began && text.starts_with(seal::NAME) => {
                    if text != seal::BEGIN {
                        return Err(backup("begins as one of another version, or not as one"));
                    }
                    self.backup_crc = Some(0);
                }
                None => {}
                Some(crc) => {
                    let keys = seal::keys_of(text).ok_or_else(|| backup("has what belongs to no backup"))?;
                    if seal::end(keys, at, crc) != command {
                        return Err(backup("ends, and what is before is not what was written"));
                    }
                    self.ended = true;
                }
            }
        } else if is("SELECT") {
            let number = words.next().unwrap_or_default();
            if number != b"0" {
                return Err(Fault::Database { at, number: String::from_utf8_lossy(number).into_owned() });
            }
        } else if is("MULTI") {
            self.transaction = Some(at);
        } else if is("EXEC") || is("DISCARD") {
            self.transaction = None;
        }
        self.began = true;
        self.backup_crc = self.backup_crc.map(|crc| crc32c::crc32c_append(crc, command));
        Ok(())
    }

    /// The file ends here.
    fn end(&self, at: u64) -> Result<(), Fault> {
        if self.backup_crc.is_some() && !self.ended {
            return Err(Fault::Backup { at, what: "is cut: its end is missing" });
        }
        self.transaction.map_or(Ok(()), |at| Err(Fault::CutTransaction { at }))
    }
}
