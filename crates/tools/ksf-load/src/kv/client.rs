//! One connection: commands out, replies checked. No socket, no clock and no file.
//!
//! Replies come in the order of the commands. A connection that writes a key is the only one that does, so a read of one of
//! its own keys must see exactly the last write in front of it that was acknowledged, or one behind that was answered by an
//! error. A read of another's key must see what [`Space`] says.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use ksf_proto::resp::reply::{self, Reply};
use ksf_proto::resp::{Version, Writer};

use super::mix::Command;
use super::space::Space;
use super::values::{Values, Wrong};
use crate::drive::protocol::{Client, Ticket};
use crate::drive::table::Request;
use crate::record::{Counters, Fault, Sink};

/// Longest string of a reply: nobody's value is longer than what Redis takes by default.
const STRING_BYTES_MAX: usize = 512 << 20;

/// Digits of a key's number.
const KEY_DIGITS: usize = 12;

/// The most acknowledgments that are written down together.
const WRITTEN_TOGETHER: usize = 256;

/// What is counted beside requests.
#[derive(Debug, Clone, Default)]
pub(super) struct KvCounters {
    /// Reads that found a value of this run.
    pub(super) hits: u64,
    /// Reads that found nothing, where no write was acknowledged.
    pub(super) misses: u64,
    /// Reads that found something of others, where no write was acknowledged.
    pub(super) unchecked: u64,
    /// Of the hits, those of keys with an acknowledged write...
    pub(super) held: u64,
    /// ...and those that saw a later write than any that was acknowledged before the read.
    pub(super) newer: u64,
    /// Acknowledgments that were written down.
    pub(super) journaled: u64,
}

impl Counters for KvCounters {
    fn merge(&mut self, other: &KvCounters) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.unchecked += other.unchecked;
        self.held += other.held;
        self.newer += other.newer;
        self.journaled += other.journaled;
    }
}

/// A write that was acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) key: u64,
    pub(super) version: u64,
}

/// Writes down what was acknowledged.
pub(super) trait Witness: Debug + Send + Sync {
    /// When it returns, these are written down. After an error nothing more is.
    fn write_down(&self, acknowledged: &[Written]) -> io::Result<()>;
}

/// The bytes that all commands are made of.
#[derive(Debug)]
pub(super) struct Frames {
    prefix: String,
    /// Up to the number of the key.
    get: Vec<u8>,
    set: Vec<u8>,
    /// Between key and value, with the length of the value.
    sizes: Vec<(Vec<u8>, usize)>,
    /// What each connection begins with; its reply comes before all others.
    greeting: Vec<u8>,
}

impl Frames {
    /// `login`: the words of AUTH, if there are any.
    pub(super) fn new(prefix: &str, sizes: &[usize], login: &[Vec<u8>]) -> Frames {
        let to_key = |words: usize, name: &[u8]| {
            let mut bytes = Vec::new();
            let mut command = Writer::new(&mut bytes, Version::Resp2);
            command.array(words);
            command.bulk(name);
            command.bulk_head(prefix.len() + KEY_DIGITS);
            bytes.extend_from_slice(prefix.as_bytes());
            bytes
        };
        let to_value = |bytes: usize| (format!("\r\n${bytes}\r\n").into_bytes(), bytes);
        let mut greeting = Vec::new();
        if !login.is_empty() {
            let mut command = Writer::new(&mut greeting, Version::Resp2);
            command.array(1 + login.len());
            command.bulk(b"AUTH");
            login.iter().for_each(|word| command.bulk(word));
        }
        Frames {
            prefix: prefix.to_owned(),
            get: to_key(2, b"GET"),
            set: to_key(3, b"SET"),
            sizes: sizes.iter().map(|bytes| to_value(*bytes)).collect(),
            greeting,
        }
    }

    /// The longest command.
    pub(super) fn command_bytes_max(&self) -> usize {
        let value = self.sizes.iter().map(|(head, bytes)| head.len() + bytes).max().unwrap_or(0);
        self.greeting.len() + self.set.len() + KEY_DIGITS + value + 2
    }

    fn put_get(&self, out: &mut Vec<u8>, key: u64) {
        out.extend_from_slice(&self.get);
        out.extend_from_slice(&digits(key));
        out.extend_from_slice(b"\r\n");
    }

    fn put_set(&self, out: &mut Vec<u8>, values: &Values, written: Written, size: u16) {
        let (head, bytes) = &self.sizes[size as usize];
        out.extend_from_slice(&self.set);
        out.extend_from_slice(&digits(written.key));
        out.extend_from_slice(head);
        values.write(out, written.key, written.version, *bytes);
        out.extend_from_slice(b"\r\n");
    }

    fn name(&self, key: u64) -> String {
        format!("{}{key:0KEY_DIGITS$}", self.prefix)
    }
}

/// A number with leading zeros.
fn digits(number: u64) -> [u8; KEY_DIGITS] {
    let (mut digits, mut rest) = ([b'0'; KEY_DIGITS], number);
    for digit in digits.iter_mut().rev() {
        *digit += (rest % 10) as u8;
        rest /= 10;
    }
    digits
}

/// What the connections of a run share.
#[derive(Debug)]
pub(super) struct KvWorkload {
    pub(super) space: Space,
    pub(super) values: Values,
    pub(super) frames: Frames,
    pub(super) witness: Option<Arc<dyn Witness>>,
    /// How many there are: key `k` is written by connection `k % connections`.
    pub(super) connections: u64,
}

/// A command whose reply is awaited.
#[derive(Debug, Clone, Copy)]
enum Asked {
    /// The version must be in these bounds; `ceiling` is of one's own keys.
    Get {
        key: u64,
        floor: u64,
        ceiling: u64,
    },
    Set(Written),
}

/// One connection.
#[derive(Debug)]
pub(super) struct KvClient {
    shared: Arc<KvWorkload>,
    connection: u64,
    request: Vec<u8>,
    asked: VecDeque<Asked>,
    /// Bytes of a reply without the end of its line.
    scanned: usize,
    /// The reply to the greeting has not come.
    is_greeting: bool,
    /// To be written down.
    acknowledged: Vec<Written>,
}

impl KvClient {
    /// At most `in_flight` commands are sent before their replies.
    pub(super) fn new(shared: Arc<KvWorkload>, connection: u32, in_flight: usize) -> KvClient {
        let together = if shared.witness.is_some() { WRITTEN_TOGETHER.min(in_flight) } else { 0 };
        KvClient {
            request: Vec::with_capacity(shared.frames.command_bytes_max()),
            asked: VecDeque::with_capacity(in_flight),
            scanned: 0,
            is_greeting: false,
            acknowledged: Vec::with_capacity(together),
            shared,
            connection: connection.into(),
        }
    }

    fn is_own(&self, key: u64) -> bool {
        key % self.shared.connections == self.connection
    }

    /// The key of this connection that is about as popular as the one of this rank.
    fn own_key(&self, rank: u64) -> u64 {
        let connections = self.shared.connections;
        let key = rank - rank % connections + self.connection;
        if key < self.shared.space.len() { key } else { key - connections }
    }

    fn put_write(&mut self, key: u64, size: u16) -> Asked {
        let KvWorkload { space, values, frames, .. } = &*self.shared;
        let written = Written { key, version: space.next_version(key) };
        frames.put_set(&mut self.request, values, written, size);
        Asked::Set(written)
    }

    /// A reply is here.
    fn take(&mut self, reply: Reply<'_>, sink: &mut Sink<'_, KvCounters>) {
        if std::mem::take(&mut self.is_greeting) {
            return match reply {
                Reply::Status(b"OK") => {}
                other => sink.break_off(Fault::Rejected, || format!("AUTH was answered by {}", in_words(other))),
            };
        }
        let Some(request) = sink.settle_oldest() else {
            return sink.break_off(Fault::Unsolicited, || format!("{}, and nothing is in flight", in_words(reply)));
        };
        let Some(asked) = self.asked.pop_front() else { return sink.settled_wrong() };
        match (asked, reply) {
            (Asked::Set(written), Reply::Status(b"OK")) => {
                self.shared.space.acknowledge(written.key, written.version);
                if self.shared.witness.is_some() {
                    self.acknowledged.push(written);
                    if self.acknowledged.len() >= WRITTEN_TOGETHER {
                        self.write_down(sink);
                    }
                }
                sink.complete(request);
            }
            (Asked::Get { key, floor, ceiling }, Reply::Bulk(value)) => {
                self.check(key, floor, ceiling, value, request, sink);
            }
            (Asked::Get { key, floor, .. }, Reply::Null) => match self.floor_by_now(key, floor) {
                0 => {
                    sink.counters().misses += 1;
                    sink.complete(request);
                }
                floor => sink.reject(Fault::Missing, || {
                    format!("{} is not there, and {} was acknowledged", self.name(key), version_in_words(floor))
                }),
            },
            (asked, Reply::Error(_)) => sink.reject(Fault::Rejected, || {
                format!("{} was answered by {}", self.command_in_words(asked), in_words(reply))
            }),
            (asked, reply) => sink.reject(Fault::Malformed, || {
                format!("{} was answered by {}", self.command_in_words(asked), in_words(reply))
            }),
        }
    }

    /// Whether a value may be what a read found.
    fn check(
        &self,
        key: u64,
        floor: u64,
        ceiling: u64,
        value: &[u8],
        request: Request,
        sink: &mut Sink<'_, KvCounters>,
    ) {
        let KvWorkload { space, values, .. } = &*self.shared;
        let floor = self.floor_by_now(key, floor);
        let ceiling = if self.is_own(key) { ceiling } else { space.ceiling(key) };
        let name = || self.name(key);
        let version = match values.read(value, key) {
            Ok(version) => version,
            Err(Wrong::Foreign) if floor == 0 => {
                sink.counters().unchecked += 1;
                return sink.complete(request);
            }
            Err(Wrong::Foreign) => {
                let what = || format!("{} has a value of {} bytes that is not of this run", name(), value.len());
                return sink.reject(Fault::Foreign, what);
            }
            Err(Wrong::Damaged) => {
                let what = || format!("{} has a value of {} bytes with a wrong checksum", name(), value.len());
                return sink.reject(Fault::Damaged, what);
            }
            Err(Wrong::OtherKey(other)) => {
                let what = || format!("{} has the value of {}", name(), self.name(other));
                return sink.reject(Fault::Misdirected, what);
            }
        };
        if version < floor {
            let [version, floor] = [version, floor].map(version_in_words);
            return sink.reject(Fault::Old, || format!("{} has {version}, and {floor} was acknowledged", name()));
        }
        if version > ceiling {
            let what = || format!("{} has {}, which was not sent", name(), version_in_words(version));
            return sink.reject(Fault::Unknown, what);
        }
        space.see(key, version);
        let counters = sink.counters();
        counters.hits += 1;
        counters.held += u64::from(floor > 0);
        counters.newer += u64::from(version > floor);
        sink.complete(request);
    }

    /// Of one's own keys, writes in front of the read have been acknowledged since it was sent.
    fn floor_by_now(&self, key: u64, floor: u64) -> u64 {
        if self.is_own(key) { floor.max(self.shared.space.acknowledged(key)) } else { floor }
    }

    /// Has what was acknowledged written down.
    fn write_down(&mut self, sink: &mut Sink<'_, KvCounters>) {
        let Some(witness) = self.shared.witness.as_ref().filter(|_| !self.acknowledged.is_empty()) else { return };
        match witness.write_down(&self.acknowledged) {
            Ok(()) => sink.counters().journaled += self.acknowledged.len() as u64,
            Err(error) => sink.break_off(Fault::Journal, || error.to_string()),
        }
        self.acknowledged.clear();
    }

    fn name(&self, key: u64) -> String {
        self.shared.frames.name(key)
    }

    fn command_in_words(&self, asked: Asked) -> String {
        match asked {
            Asked::Get { key, .. } => format!("GET {}", self.name(key)),
            Asked::Set(written) => format!("SET {}", self.name(written.key)),
        }
    }
}

impl Client for KvClient {
    type Operation = Command;
    type Counters = KvCounters;

    fn open(&mut self, _route: usize) {
        self.asked.clear();
        self.is_greeting = false;
    }

    #[inline]
    fn encode(&mut self, ticket: &Ticket, command: &Command) -> &[u8] {
        self.request.clear();
        if ticket.index == 0 && !self.shared.frames.greeting.is_empty() {
            self.request.extend_from_slice(&self.shared.frames.greeting);
            self.is_greeting = true;
        }
        let asked = match *command {
            Command::Get { key } => {
                let KvWorkload { space, frames, .. } = &*self.shared;
                frames.put_get(&mut self.request, key);
                Asked::Get { key, floor: space.floor(key), ceiling: space.ceiling(key) }
            }
            Command::Set { rank, size } => self.put_write(self.own_key(rank), size),
            Command::Fill { key, size } => self.put_write(key, size),
        };
        self.asked.push_back(asked);
        &self.request
    }

    #[inline]
    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, KvCounters>) -> usize {
        let mut used = 0;
        while !sink.is_broken() {
            match reply::resume(&bytes[used..], STRING_BYTES_MAX, &mut self.scanned) {
                Ok(None) => break,
                Ok(Some((reply, length))) => {
                    used += length;
                    self.take(reply, sink);
                }
                Err(error) => sink.break_off(Fault::Malformed, || error.to_string()),
            }
        }
        self.write_down(sink);
        used
    }
}

/// "write 7 of session 1": how many versions a session has sent for a key before is part of each version.
fn version_in_words(version: u64) -> String {
    let (session, number) = Space::in_parts(version);
    format!("write {number} of session {session}")
}

/// A reply, shortened.
fn in_words(reply: Reply<'_>) -> String {
    let text = |bytes: &[u8]| bytes[..bytes.len().min(100)].escape_ascii().to_string();
    match reply {
        Reply::Status(status) => format!("+{}", text(status)),
        Reply::Error(error) => format!("-{}", text(error)),
        Reply::Integer(number) => format!(":{number}"),
        Reply::Bulk(string) => format!("a string of {} bytes", string.len()),
        Reply::Null => "nothing".into(),
        Reply::Array(count) => format!("an array of {count}"),
    }
}

#[cfg(test)]
mod tests;
