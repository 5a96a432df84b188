//! Commands that wait, each in the order of its connection, and the values that are read for them.
//!
//! ```text
//!   heads     in the order in which they came ── for room in the log, for the medium, for memory ─────────┐
//!   lines     of each connection: the first command waits for values or a time, the others for it ──────┐ │
//!                 │ reads, at most so many at a time, with so many bytes                                │ │
//!                 ▼                                                                                     ▼ ▼
//!             has_read ─► values, and the index if it has room ─► the line goes on ─────────────────► resumed
//! ```
//!
//! A command that asks for a value that is on a medium alone has changed nothing. It is carried out again, from its beginning,
//! with the values that it asked for; if it asks for others then (a key was overwritten), once more.
//!
//! What is done for one connection looks at commands of that connection alone: others may have any number.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
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

use super::{ALL_WORK_MAX, Asked, Kept, TURN_WORK_MAX};
use crate::clients::Clients;
use crate::disk::BLOCK_BYTES;

/// Reads of values of a shard under way at a time.
const READS_MAX: usize = 64;
/// Bytes of records that a shard reads, or has read, for commands that were not carried out yet. The command that comes first
/// may have more.
pub(super) const FETCH_BYTES_MAX: usize = 16 << 20;
/// Commands of one line that go on in a turn: those behind a dear one wait once more.
pub(super) const LINE_TURN_MAX: usize = 64;
/// How often a shard looks whether a pause was ended before its time: by another shard, of which it does not hear.
const PAUSE_LOOK_MS: u64 = 10;

/// A command's connection, and its place among all that wait.
pub(super) type At = (ConnKey, u64);

/// Commands that wait.
#[derive(Default)]
pub(super) struct Queue {
    next_place: u64,
    commands: BTreeMap<At, Waiting>,
    /// The first commands of those connections whose commands wait for room in the log, for the medium or for memory. Those of
    /// any other are a line: its first command waits for values, or for a time.
    heads: BTreeSet<(u64, ConnKey)>,
    /// When lines are to be looked at, by [`monotonic_ms`](crate::clients::monotonic_ms).
    timers: BTreeSet<(u64, ConnKey)>,
    /// Lines that wait for the end of a pause: of one of all commands, and of one of those that write.
    paused: [BTreeSet<ConnKey>; 2],
    /// Lines whose first commands, which have these places, wait for [room](Fetch::Room).
    for_room: BTreeSet<(u64, ConnKey)>,
    /// Lines whose first command may go on.
    to_look_at: Vec<ConnKey>,
    /// Lines that go on in the next turn.
    next_turn: Vec<ConnKey>,
    /// Lines that were to go on, and go on first in the next turn.
    passed_over: Vec<ConnKey>,
    /// Reads that have not begun, by the places of their commands.
    jobs: BTreeMap<(u64, usize), Job>,
    /// Those that have, by their tokens.
    under_way: BTreeMap<u64, Job>,
}

/// How many lines go on in a turn. Work ends a turn of theirs ([`Lines::are_done`]); as many as had their turn in the last one are
/// taken, so that few are taken in vain.
pub(super) struct Lines {
    max: usize,
    /// Those that go on in this turn.
    taken: usize,
    /// Of these, those that did not have their turn.
    passed_over: usize,
    /// What commands that waited have done in this turn.
    worked: u64,
    /// What all commands have.
    all_worked: u64,
}

/// Lines of a turn, at least.
const LINES_MIN: usize = (ALL_WORK_MAX / TURN_WORK_MAX) as usize;

impl Default for Lines {
    fn default() -> Self {
        Self { max: LINES_MIN, taken: 0, passed_over: 0, worked: 0, all_worked: 0 }
    }
}

impl Lines {
    pub(super) fn begin_turn(&mut self) {
        let max = match self.passed_over {
            0 if self.taken == self.max => self.max.saturating_mul(2),
            0 => self.max,
            passed_over => self.taken.saturating_sub(passed_over).max(LINES_MIN),
        };
        *self = Self { max, ..Self::default() };
    }

    /// A command did so much work.
    pub(super) fn work(&mut self, units: u64, has_waited: bool) {
        self.all_worked += units;
        self.worked += if has_waited { units } else { 0 };
    }

    /// True if commands that waited have done all their work of this turn.
    pub(super) fn are_done(&self) -> bool {
        self.worked >= ALL_WORK_MAX
    }

    /// A line goes on in the next turn; `has_worked`: it did so in this one, too.
    pub(super) fn pass_over(&mut self, has_worked: bool) {
        self.passed_over += usize::from(!has_worked);
    }

    /// True if connections that have worked wait for the next turn: others do.
    pub(super) fn is_full(&self) -> bool {
        self.taken == self.max || self.all_worked >= ALL_WORK_MAX
    }

    /// How many more go on in this turn at most.
    pub(super) fn left(&self) -> usize {
        self.max - self.taken
    }

    pub(super) fn leave(&mut self, left: usize) {
        self.taken = self.max - left;
    }
}

/// A command that waits.
pub(super) struct Waiting {
    pub(super) deferred: Deferred<Logged>,
    pub(super) resumed: Box<Resumed>,
}

/// What a command waits for.
#[derive(Default)]
pub(super) enum Fetch {
    /// Its turn.
    #[default]
    Nothing,
    /// The next turn of the shard: the connection has had its [share](super::TURN_WORK_MAX) of this one.
    Turn,
    /// The same, before all others: the connection has had none.
    FirstTurn,
    Values(Box<Fetched>),
    /// A record that cleaning has written anew, and that is not on the medium yet.
    Promise {
        log: u16,
        lsn: Lsn,
    },
    /// Room for what is to be read for it.
    Room {
        bytes: usize,
    },
    /// A time, by [`monotonic_ms`](crate::clients::monotonic_ms), when this reply leaves: it was carried out.
    Until {
        at_ms: u64,
        reply: Box<[u8]>,
    },
    /// The end of a [pause](Clients::waits), of commands that write or of all.
    Pause {
        writes: bool,
    },
}

/// Values that were read for a command.
pub(super) struct Fetched {
    pub(super) values: Values,
    /// How many are still to be read.
    left: usize,
    pub(super) failed: Option<String>,
    pub(super) room: Room,
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

/// A command, as it goes on.
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
    Ok(Fetch::Values(Box::new(Fetched { values: Values::default(), left: wanted.len(), failed: None, room })))
}

pub(super) fn has_room(taken: usize, bytes: usize) -> bool {
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
        self.commands.len()
    }

    #[cfg(test)]
    pub(super) fn reads_to_begin(&self) -> usize {
        self.jobs.len()
    }

    /// What is kept of commands that wait, and of lines.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        let of_lines = self.timers.len() + self.for_room.len() + self.paused.iter().map(BTreeSet::len).sum::<usize>();
        let looks = self.to_look_at.len() + self.next_turn.len() + self.passed_over.len();
        self.commands.len() + self.heads.len() + of_lines + looks + self.jobs.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commands.is_empty()
            && self.to_look_at.is_empty()
            && self.next_turn.is_empty()
            && self.passed_over.is_empty()
    }

    /// Whether some of it goes on only if it is looked at again, though nothing else happens.
    pub(super) fn needs_a_look(&self) -> bool {
        let must_be_asked = !(self.heads.is_empty() && self.for_room.is_empty() && self.to_look_at.is_empty());
        self.under_way.is_empty() && (must_be_asked || !self.jobs.is_empty())
    }

    /// The place of the first command of a connection.
    fn first(&self, from: ConnKey) -> Option<u64> {
        look();
        self.commands.range((from, 0)..=(from, u64::MAX)).next().map(|((_, place), _)| *place)
    }

    /// The commands of a connection wait for room from now on, if there are some.
    fn put_up(&mut self, from: ConnKey) {
        self.heads.extend(self.first(from).map(|place| (place, from)));
    }

    /// They no longer do. False if they did not: they are a line.
    fn take_down(&mut self, from: ConnKey) -> bool {
        self.first(from).is_none_or(|place| self.heads.remove(&(place, from)))
    }

    /// Adds a command in its place.
    pub(super) fn add(&mut self, at: At, waiting: Waiting) {
        let is_line = !self.take_down(at.0);
        self.commands.insert(at, waiting);
        if !is_line {
            self.put_up(at.0);
        }
    }

    /// Adds a command that waits for memory, before any other of its connection.
    pub(super) fn add_first(&mut self, at: At, waiting: Waiting) {
        self.take_down(at.0);
        self.commands.insert(at, waiting);
        self.put_up(at.0);
    }

    /// Adds a command that waits for values, or for a time, before any other of its connection.
    pub(super) fn line_up(&mut self, at: At, waiting: Waiting, wanted: Vec<Wanted>) {
        let (from, place) = at;
        self.take_down(from);
        match waiting.resumed.fetch {
            Fetch::Values(_) => {
                let job = |wanted: Wanted| wanted.read_at().ok().map(|at| Job { from, place, wanted, at });
                self.jobs.extend((0..).map(|number| (place, number)).zip(wanted.into_iter().filter_map(job)));
            }
            Fetch::Until { at_ms, .. } => drop(self.timers.insert((at_ms, from))),
            Fetch::Pause { writes } => drop(self.paused[usize::from(writes)].insert(from)),
            Fetch::Room { .. } => drop(self.for_room.insert((place, from))),
            Fetch::Nothing | Fetch::Turn | Fetch::Promise { .. } => self.to_look_at.push(from),
            Fetch::FirstTurn => self.passed_over.push(from),
        }
        self.commands.insert(at, waiting);
    }

    /// Whether an earlier command of the connection waits.
    pub(super) fn is_behind(&self, from: ConnKey, place: u64) -> bool {
        // Of those that went on together, one may wait once more.
        self.first(from).is_some_and(|first| first < place)
    }

    /// Forgets the commands of a connection.
    pub(super) fn forget(&mut self, from: ConnKey) {
        self.take_down(from);
        for ((_, place), waiting) in self.commands.extract_if((from, 0)..=(from, u64::MAX), |_, _| true) {
            look();
            match waiting.resumed.fetch {
                Fetch::Values(_) => {
                    self.jobs.extract_if((place, 0)..=(place, usize::MAX), |_, _| true).for_each(drop);
                }
                Fetch::Until { at_ms, .. } => drop(self.timers.remove(&(at_ms, from))),
                Fetch::Pause { writes } => drop(self.paused[usize::from(writes)].remove(&from)),
                Fetch::Room { .. } => drop(self.for_room.remove(&(place, from))),
                Fetch::Nothing | Fetch::Turn | Fetch::FirstTurn | Fetch::Promise { .. } => {}
            }
        }
    }

    /// When it is to be looked at by the clock, by [`monotonic_ms`](crate::clients::monotonic_ms), which tells this time.
    pub(super) fn next_ms(&self, now_ms: u64) -> Option<u64> {
        let timer = self.timers.first().map(|(at_ms, _)| *at_ms).filter(|at_ms| *at_ms != u64::MAX);
        let is_paused = self.paused.iter().any(|lines| !lines.is_empty());
        timer.into_iter().chain(is_paused.then_some(now_ms + PAUSE_LOOK_MS)).min()
    }

    /// Looks at the lines whose time has come, and at those whose pause has ended.
    fn look_by_clock(&mut self, clients: &Clients, now_ms: u64) {
        while let Some((_, from)) = self.timers.first().copied().filter(|(at_ms, _)| *at_ms <= now_ms) {
            self.timers.pop_first();
            self.to_look_at.push(from);
        }
        for (writes, lines) in [false, true].into_iter().zip(&mut self.paused) {
            if !lines.is_empty() && !clients.waits(writes, now_ms) {
                self.to_look_at.extend(mem::take(lines));
            }
        }
    }

    /// Looks at the lines for which there is room, in the order in which they came.
    fn look_by_room(&mut self, mut taken: usize) {
        while let Some((place, from)) = self.for_room.first().copied() {
            if let Some(Fetch::Room { bytes }) = self.commands.get(&(from, place)).map(|first| &first.resumed.fetch) {
                if !has_room(taken, *bytes) {
                    return;
                }
                taken += bytes;
            }
            self.for_room.pop_first();
            self.to_look_at.push(from);
        }
    }

    /// Begins reads, as many as there may be.
    pub(super) fn begin_reads(&mut self, files: &Files, logs: &[File], segment_bytes: u64, next_token: &mut u64) {
        while self.under_way.len() < READS_MAX {
            let Some(next) = self.jobs.first_entry() else { return };
            let job = next.get();
            let first = job.first_byte(segment_bytes);
            let from = first / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            let bytes = (first - from) as usize + job.at.bytes;
            // A segment is whole blocks.
            let bytes = bytes.next_multiple_of(BLOCK_BYTES);
            let read = FileOp::read(&logs[usize::from(job.at.log)], from, bytes, files.buffer(bytes));
            if files.begin(read, *next_token).is_err() {
                // It is tried again when there is room.
                return;
            }
            self.under_way.insert(*next_token, next.remove());
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
        let fetch = self.commands.get_mut(&(job.from, job.place)).map(|waiting| &mut waiting.resumed.fetch);
        if let Some(Fetch::Values(fetched)) = fetch {
            let Fetched { values, left, failed, .. } = &mut **fetched;
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

    /// Commands of lines that go on, at most so many bytes of them, of so many lines. The others are first in the next turn. `taken`:
    /// bytes that were read, or are, for others.
    pub(super) fn take_ready(
        &mut self,
        (store, clients, now_ms): (&Store, &Clients, u64),
        taken: usize,
        (bytes_left, lines_left): (&mut usize, &mut usize),
        must_wait: impl Fn(Asked<'_>) -> bool,
    ) -> Vec<Waiting> {
        self.look_by_clock(clients, now_ms);
        self.look_by_room(taken);
        self.to_look_at.append(&mut self.next_turn);
        self.to_look_at.splice(0..0, self.passed_over.drain(..));
        let (mut ready, mut again, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
        for from in mem::take(&mut self.to_look_at) {
            // There may be more than one reason to look at it.
            if !seen.insert(from) {
                continue;
            }
            if *lines_left == 0 {
                let first = self.first(from).map(|place| (place, self.commands.get(&(from, place))));
                match first {
                    Some((place, Some(Waiting { resumed, .. }))) if matches!(resumed.fetch, Fetch::Room { .. }) => {
                        // What there is room for goes to others until it goes on.
                        self.for_room.insert((place, from));
                    }
                    _ => again.push(from),
                }
                continue;
            }
            let mut taken_of_line = 0;
            while let Some(place) = self.first(from).filter(|place| !self.heads.contains(&(*place, from))) {
                if taken_of_line == LINE_TURN_MAX {
                    // What goes on now has the shard called again.
                    self.next_turn.push(from);
                    break;
                }
                let Entry::Occupied(first) = self.commands.entry((from, place)) else { break };
                let Resumed { command, fetch, .. } = &*first.get().resumed;
                let goes_on = match fetch {
                    Fetch::Nothing | Fetch::Turn | Fetch::FirstTurn => true,
                    Fetch::Values(fetched) => fetched.left == 0,
                    Fetch::Promise { log, lsn } => *lsn < store.promised(*log),
                    Fetch::Room { .. } => !self.for_room.contains(&(place, from)),
                    Fetch::Until { at_ms, .. } => *at_ms <= now_ms,
                    Fetch::Pause { writes } => !self.paused[usize::from(*writes)].contains(&from),
                };
                if !goes_on || *bytes_left == 0 {
                    match fetch {
                        _ if goes_on => again.push(from),
                        // What it waits for has it looked at again.
                        Fetch::Values(_) | Fetch::Room { .. } | Fetch::Until { .. } | Fetch::Pause { .. } => {}
                        _ => again.push(from),
                    }
                    break;
                }
                if must_wait(command.asked()) {
                    self.heads.insert((place, from));
                    break;
                }
                taken_of_line += 1;
                *bytes_left = bytes_left.saturating_sub(command.bytes.len());
                ready.push(first.remove());
            }
            *lines_left -= usize::from(taken_of_line > 0);
        }
        self.to_look_at = again;
        ready
    }

    /// The command that has waited longest, and no longer must.
    pub(super) fn take_waiting(&mut self, must_wait: impl Fn(Asked<'_>) -> bool) -> Option<Waiting> {
        let (place, from) = *self.heads.first()?;
        let Entry::Occupied(first) = self.commands.entry((from, place)) else { return None };
        if must_wait(first.get().resumed.command.asked()) {
            return None;
        }
        let waiting = first.remove();
        self.heads.pop_first();
        self.put_up(from);
        Some(waiting)
    }
}

/// Counts what is looked at, for tests.
fn look() {
    #[cfg(test)]
    LOOKS.set(LOOKS.get() + 1);
}

#[cfg(test)]
thread_local! {
    /// Looks at the commands of one connection, by this thread.
    pub(super) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}
