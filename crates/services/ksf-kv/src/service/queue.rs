//! Commands that wait, each in the order of its connection, and the values that are read for them.
//!
//! ```text
//!   waiting   in the order in which they came ── for room in the log, for the medium, for memory ─────────┐
//!   lines     of each connection: the first command waits for values or a time, the others for it ──────┐ │
//!                 │ reads, at most so many at a time, with so many bytes                                │ │
//!                 ▼                                                                                     ▼ ▼
//!             has_read ─► values, and the index if it has room ─► the line goes on ─────────────────► resumed
//! ```
//!
//! A command that asks for a value that is on a medium alone has changed nothing. It is carried out again, from its beginning,
//! with the values that it asked for; if it asks for others then (a key was overwritten), once more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ksf::deferred::Deferred;
use ksf::files::{File, FileDone, FileOp, Files};
use ksf::logged::Logged;
use ksf::service::ConnKey;
use ksf_store::away::{NotThere, ReadAt, Values, Wanted};
use ksf_store::format::Lsn;
use ksf_store::store::Store;

use super::{Asked, Kept};
use crate::clients::Clients;
use crate::disk::BLOCK_BYTES;

/// Reads of values of a shard under way at a time.
const READS_MAX: usize = 64;
/// Bytes of records that a shard reads, or has read, for commands that were not carried out yet. The command that comes first
/// may have more.
pub(super) const FETCH_BYTES_MAX: usize = 16 << 20;
/// Commands of one line that go on in a turn: those behind a dear one wait once more.
const LINE_TURN_MAX: usize = 64;
/// How often a shard looks whether a pause was ended before its time: by another shard, of which it does not hear.
const PAUSE_LOOK_MS: u64 = 10;

/// Commands that wait.
#[derive(Default)]
pub(super) struct Queue {
    next_place: u64,
    /// For room in the log, for the medium or for memory, and those of their connections behind them.
    waiting: BTreeMap<u64, Waiting>,
    /// Connections whose first command waits for values, or for a time. None of their commands is in `waiting`.
    lines: BTreeMap<ConnKey, BTreeMap<u64, Waiting>>,
    /// When lines are to be looked at, by [`monotonic_ms`](crate::clients::monotonic_ms).
    timers: BTreeSet<(u64, ConnKey)>,
    /// Lines whose first command may go on.
    to_look_at: Vec<ConnKey>,
    /// Lines that go on in the next turn.
    next_turn: Vec<ConnKey>,
    /// Reads that have not begun.
    jobs: VecDeque<Job>,
    /// Those that have, by their tokens.
    under_way: BTreeMap<u64, Job>,
}

/// A command that waits.
pub(super) struct Waiting {
    /// Its connection.
    pub(super) from: ConnKey,
    pub(super) deferred: Deferred<Logged>,
    pub(super) command: Kept,
    pub(super) fetch: Fetch,
}

/// What a command waits for.
#[derive(Default)]
pub(super) enum Fetch {
    /// Its turn.
    #[default]
    Nothing,
    /// The next turn of the shard: the connection has had its [share](super::TURN_WORK_MAX) of this one.
    Turn,
    /// Values, of which so many are still to be read.
    Values { values: Values, left: usize, failed: Option<String>, room: Room },
    /// A record that cleaning has written anew, and that is not on the medium yet.
    Promise { log: u16, lsn: Lsn },
    /// Room for what is to be read for it.
    Room { bytes: usize },
    /// A time, by [`monotonic_ms`](crate::clients::monotonic_ms), when this reply leaves: it was carried out.
    Until { at_ms: u64, reply: Vec<u8> },
    /// The end of a [pause](Clients::waits), of commands that write or of all.
    Pause { writes: bool },
}

/// Bytes of a shard's [`FETCH_BYTES_MAX`], until this is dropped.
pub(super) struct Room {
    taken: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A command that goes on.
pub(super) struct Resumed {
    pub(super) place: u64,
    pub(super) command: Kept,
    pub(super) fetch: Fetch,
}

/// A read.
struct Job {
    from: ConnKey,
    place: u64,
    wanted: Wanted,
    at: ReadAt,
}

impl Job {
    /// The first byte of the record in the file of its log.
    fn first_byte(&self, segment_bytes: u64) -> u64 {
        u64::from(self.at.place) * segment_bytes + self.at.offset
    }
}

/// What a command waits for that asked for these, which may have `bytes_max` bytes together; `taken` is what other commands of
/// the shard have of its [`FETCH_BYTES_MAX`].
///
/// # Errors
///
/// It cannot be carried out: the text of the reply.
pub(super) fn plan(wanted: &[Wanted], bytes_max: usize, taken: &Arc<AtomicUsize>) -> Result<Fetch, String> {
    let mut bytes = 0;
    for one in wanted {
        match one.read_at() {
            Ok(at) => bytes += at.bytes,
            Err(NotThere::Unwritten { log, lsn }) => return Ok(Fetch::Promise { log, lsn }),
            Err(NotThere::Nowhere { log, lsn }) => {
                return Err(format!("a value is lost: no segment of log-{log:03} has the record at {}", lsn.0));
            }
        }
    }
    if bytes > bytes_max {
        return Err(format!(
            "the command needs {bytes} bytes of values that are not in memory, and may need {bytes_max}: ask for a part"
        ));
    }
    if !has_room(taken.load(Ordering::Relaxed), bytes) {
        return Ok(Fetch::Room { bytes });
    }
    taken.fetch_add(bytes, Ordering::Relaxed);
    let room = Room { taken: Arc::clone(taken), bytes };
    Ok(Fetch::Values { values: Values::default(), left: wanted.len(), failed: None, room })
}

fn has_room(taken: usize, bytes: usize) -> bool {
    taken == 0 || taken + bytes <= FETCH_BYTES_MAX
}

impl Queue {
    /// A place behind all others.
    pub(super) fn next_place(&mut self) -> u64 {
        self.next_place += 1;
        self.next_place
    }

    /// Commands that wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.lines.values().map(BTreeMap::len).sum::<usize>()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.lines.is_empty() && self.jobs.is_empty()
    }

    /// Whether some of it goes on only if it is looked at again, though nothing else happens.
    pub(super) fn needs_a_look(&self) -> bool {
        self.under_way.is_empty() && !(self.waiting.is_empty() && self.to_look_at.is_empty() && self.jobs.is_empty())
    }

    /// Adds a command in its place.
    pub(super) fn add(&mut self, place: u64, waiting: Waiting) {
        let line = self.lines.get_mut(&waiting.from).unwrap_or(&mut self.waiting);
        line.insert(place, waiting);
    }

    /// Adds a command that waits for memory, before any other of its connection.
    pub(super) fn add_first(&mut self, place: u64, waiting: Waiting) {
        if let Some(mut line) = self.lines.remove(&waiting.from) {
            self.waiting.append(&mut line);
        }
        self.waiting.insert(place, waiting);
    }

    /// Adds a command that waits for values, or for a time, before any other of its connection. `has_others`: there may be some in `waiting`.
    pub(super) fn line_up(&mut self, place: u64, waiting: Waiting, wanted: Vec<Wanted>, has_others: bool) {
        let from = waiting.from;
        if matches!(waiting.fetch, Fetch::Values { .. }) {
            let job = |wanted: Wanted| wanted.read_at().ok().map(|at| Job { from, place, wanted, at });
            self.jobs.extend(wanted.into_iter().filter_map(job));
        } else if let Fetch::Until { at_ms, .. } = waiting.fetch {
            self.timers.insert((at_ms, from));
        } else {
            self.to_look_at.push(from);
        }
        let line = self.lines.entry(from).or_default();
        line.insert(place, waiting);
        if has_others {
            line.extend(self.waiting.extract_if(.., |_, waiting| waiting.from == from));
        }
    }

    /// Whether an earlier command of the connection waits.
    pub(super) fn is_behind(&self, from: ConnKey, place: u64) -> bool {
        let first = self.lines.get(&from).and_then(|line| line.keys().next());
        // Of those that went on together, one may wait for room once more.
        first.is_some_and(|first| *first < place)
            || self.waiting.range(..place).any(|(_, waiting)| waiting.from == from)
    }

    /// Forgets the commands of a connection.
    pub(super) fn forget(&mut self, from: ConnKey) {
        self.waiting.retain(|_, waiting| waiting.from != from);
        self.lines.remove(&from);
        self.timers.retain(|(_, of)| *of != from);
        self.jobs.retain(|job| job.from != from);
    }

    /// When it is to be looked at by the clock, in milliseconds since 1970.
    pub(super) fn next_ms(&self) -> Option<u64> {
        self.timers.first().map(|(at_ms, _)| *at_ms).filter(|at_ms| *at_ms != u64::MAX)
    }

    /// Looks at the lines whose time has come.
    fn look_by_clock(&mut self, now_ms: u64) {
        while let Some((_, from)) = self.timers.first().copied().filter(|(at_ms, _)| *at_ms <= now_ms) {
            self.timers.pop_first();
            self.to_look_at.push(from);
        }
    }

    /// Begins reads, as many as there may be.
    pub(super) fn begin_reads(&mut self, files: &Files, logs: &[File], segment_bytes: u64, next_token: &mut u64) {
        while self.under_way.len() < READS_MAX {
            let Some(job) = self.jobs.pop_front() else { return };
            let first = job.first_byte(segment_bytes);
            let from = first / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            let bytes = (first - from) as usize + job.at.bytes;
            // A segment is whole blocks.
            let bytes = bytes.next_multiple_of(BLOCK_BYTES);
            let read = FileOp::read(&logs[usize::from(job.at.log)], from, bytes, files.buffer(bytes));
            if files.begin(read, *next_token).is_err() {
                // It is tried again when there is room.
                self.jobs.push_front(job);
                return;
            }
            self.under_way.insert(*next_token, job);
            *next_token += 1;
        }
    }

    /// Takes what a read brought, if it was one of a value; `None` if not. `Some(true)`: the value is right.
    pub(super) fn has_read(&mut self, done: &FileDone, store: &Store, segment_bytes: u64) -> Option<bool> {
        let job = self.under_way.remove(&done.token)?;
        let first = job.first_byte(segment_bytes);
        let read = match (&done.result, &done.op) {
            (Err(error), _) => Err(error.to_string()),
            (Ok(_), FileOp::Read { into, .. }) => {
                let skipped = (first % BLOCK_BYTES as u64) as usize;
                let record = job.wanted.record(into.get(skipped..).unwrap_or_default());
                record.map_err(|malformed| malformed.to_string())
            }
            (Ok(_), _) => Err("no read".to_owned()),
        };
        let value = read.map(|record| {
            let value: Arc<[u8]> = record.value.into();
            store.take_in(record.key, record.version, &value);
            value
        });
        let is_right = value.is_ok();
        let waiting = self.lines.get_mut(&job.from).and_then(|line| line.get_mut(&job.place));
        if let Some(Waiting { fetch: Fetch::Values { values, left, failed, .. }, .. }) = waiting {
            *left -= 1;
            match value {
                Ok(value) => values.insert(job.wanted.version(), value),
                Err(why) => {
                    let log = job.at.log;
                    *failed = Some(format!("a value in log-{log:03} at byte {first} cannot be read: {why}"));
                }
            }
            if *left == 0 {
                self.to_look_at.push(job.from);
            }
        }
        Some(is_right)
    }

    /// Commands of lines that go on, at most so many bytes of them. `taken`: bytes that were read, or are, for others.
    pub(super) fn take_ready(
        &mut self,
        (store, clients, now_ms): (&Store, &Clients, u64),
        mut taken: usize,
        bytes_left: &mut usize,
        must_wait: impl Fn(Asked<'_>) -> bool,
    ) -> Vec<(Deferred<Logged>, Resumed)> {
        self.look_by_clock(now_ms);
        self.to_look_at.append(&mut self.next_turn);
        let (mut ready, mut again) = (Vec::new(), Vec::new());
        for from in mem::take(&mut self.to_look_at) {
            let Some(line) = self.lines.get_mut(&from) else { continue };
            let mut taken_of_line = 0;
            while let Some(first) = line.first_entry() {
                if taken_of_line == LINE_TURN_MAX {
                    // What goes on now has the shard called again.
                    self.next_turn.push(from);
                    break;
                }
                let Waiting { command, fetch, .. } = first.get();
                let goes_on = match fetch {
                    Fetch::Nothing | Fetch::Turn => true,
                    Fetch::Values { left, .. } => *left == 0,
                    Fetch::Promise { log, lsn } => *lsn < store.promised(*log),
                    Fetch::Room { bytes } => has_room(taken, *bytes),
                    Fetch::Until { at_ms, .. } => *at_ms <= now_ms,
                    Fetch::Pause { writes } => !clients.waits(*writes, now_ms),
                };
                if !goes_on || *bytes_left == 0 {
                    match fetch {
                        _ if goes_on => again.push(from),
                        // The end of a read looks again.
                        Fetch::Values { .. } => {}
                        Fetch::Until { at_ms, .. } => drop(self.timers.insert((*at_ms, from))),
                        Fetch::Pause { .. } => drop(self.timers.insert((now_ms + PAUSE_LOOK_MS, from))),
                        _ => again.push(from),
                    }
                    break;
                }
                if must_wait(command.asked()) {
                    self.waiting.append(line);
                    break;
                }
                if let Fetch::Room { bytes } = fetch {
                    taken += bytes;
                }
                taken_of_line += 1;
                *bytes_left = bytes_left.saturating_sub(command.bytes.len());
                let (place, Waiting { deferred, command, fetch, .. }) = first.remove_entry();
                ready.push((deferred, Resumed { place, command, fetch }));
            }
            if line.is_empty() {
                self.lines.remove(&from);
            }
        }
        self.to_look_at = again;
        ready
    }

    /// The command that has waited longest, and no longer must.
    pub(super) fn take_waiting(
        &mut self,
        must_wait: impl Fn(Asked<'_>) -> bool,
    ) -> Option<(Deferred<Logged>, Resumed)> {
        let first = self.waiting.first_entry()?;
        if must_wait(first.get().command.asked()) {
            return None;
        }
        let (place, Waiting { deferred, command, fetch, .. }) = first.remove_entry();
        Some((deferred, Resumed { place, command, fetch }))
    }
}
