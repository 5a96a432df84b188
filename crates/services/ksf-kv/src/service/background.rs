//! The work of a shard after the messages of a turn: removal of expired keys, eviction, cleaning, writes of the log, and commands that
//! waited.

use std::sync::atomic::Ordering;

use ksf::files::{FileOp, FileRefused, Refusal};
use ksf::limits::Time;
use ksf::{Turn, Waker};
use ksf_store::format::Lsn;
use ksf_store::index::leaf::LetGo;
use ksf_store::log::Purpose;
use ksf_store::store::{Clock, SweepBudget};

use super::queue::Waiting;
use super::{Hope, Kv, KvShard, TURN_WORK_MAX, now_ns};
use crate::clients::monotonic_ms;
use crate::disk::BLOCK_BYTES;

/// Writes of a log under way at a time: while one is waited for the next ones are on their way.
const WRITES_MAX: usize = 4;
/// Values that a shard lets go of in a turn at most.
const LET_GO: LetGo = LetGo { leaves: 256, looks: 1024, bytes: 8 << 20 };
/// How often a shard looks for keys that have ended; at once in the next turn if it left some.
const SWEEP_INTERVAL_NS: u64 = 1_000_000;
/// What it does then at most: it looks at about 4,000 keys, and takes 128 out, or fewer long ones.
const SWEEP_BUDGET: SweepBudget = SweepBudget { leaves_max: 16, keys_max: 128, work_max: TURN_WORK_MAX };
/// How often it looks while it waits for room in its log, and nothing else happens.
const SWEEP_AGAIN_MS: u64 = 100;
/// The longest that it sleeps while keys end later: the clock by which they end may be set.
pub(super) const SWEEP_SLEEP_MS_MAX: u64 = 60_000;
/// How often the shards of other logs are woken while room or memory is waited for that cleaning them brings.
const CALL_MS: u64 = 10;
/// What waits for room or memory is refused when no segment was cleaned, and no tombstone went, for so long; and so is what comes within
/// the next second.
pub(super) const HOPE_MS: u64 = 5_000;
pub(super) const NO_HOPE_MS: u64 = 1_000;
/// Without a write for so long a log is idle, and says how far replies told of it.
pub(super) const IDLE_MS: u64 = 50;

impl Kv {
    /// Takes some of the keys out that have ended, if it is time to.
    fn sweep(&self, shard: &mut KvShard) {
        let now_ns = now_ns();
        // Also if the clock was set back.
        let is_early = (1..=SWEEP_INTERVAL_NS).contains(&shard.sweep_at_ns.saturating_sub(now_ns));
        if is_early || shard.is_behind() || shard.waits_for_room(Purpose::Removing) {
            return;
        }
        let clock = Clock { now_ms: now_ns / 1_000_000, received_ns: None };
        let mut ended = 0;
        // What an error leaves is found again, and a log that takes nothing says so to the next command.
        let has_more = shard.shard.sweep(clock, SWEEP_BUDGET, |_, _| ended += 1).unwrap_or(false);
        self.ended.fetch_add(ended, Ordering::Relaxed);
        shard.sweep_at_ns = if has_more { now_ns } else { now_ns + SWEEP_INTERVAL_NS };
    }

    /// Wakes the shards of other logs if cleaning those is waited for, and gives up what waits if cleaning has brought nothing for long.
    fn hope(&self, shard: &mut KvShard, now: Time) {
        if shard.shard.needs_others() && now >= shard.call_again_at {
            shard.call_again_at = now.plus_ms(CALL_MS);
            let own = usize::from(shard.shard.number());
            let others = self.wakers.iter().enumerate().filter(|(log, _)| *log != own);
            others.filter_map(|(_, waker)| waker.get()).for_each(Waker::wake);
        }
        let (cleaned, tombstones) = (self.cleaned.load(Ordering::Relaxed), self.store.memory().sizes().tombstones);
        shard.hope = match shard.hope {
            Hope::Lost { until } if now < until => return,
            Hope::Lost { .. } => {
                shard.shard.set_giving_up(false);
                Hope::None
            }
            _ if !shard.shard.needs_others() => Hope::None,
            Hope::Since { at, cleaned: was_cleaned, tombstones: there_were }
                if (was_cleaned, there_were) == (cleaned, tombstones) =>
            {
                if now < at.plus_ms(HOPE_MS) {
                    return;
                }
                shard.shard.set_giving_up(true);
                Hope::Lost { until: now.plus_ms(NO_HOPE_MS) }
            }
            Hope::None | Hope::Since { .. } => Hope::Since { at: now, cleaned, tombstones },
        };
    }

    /// Lets replies go that wait for these.
    pub(super) fn release(&self, moved: &[(u16, Lsn)], turn: &mut Turn<'_>) {
        for (log, lsn) in moved {
            if let Some(name) = self.names[usize::from(*log)].get() {
                turn.release(*name, lsn.0);
            }
        }
    }

    /// Stores what the log has to write. One fence makes all of it durable, and what waits for it goes on in this turn.
    fn store_and_fence(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        let Some(mapped) = &mut shard.mapped else { return };
        let now_ns = now_ns();
        while let Some(write) = shard.shard.next_write(usize::MAX, now_ns) {
            mapped.write(write.place, write.offset, &write.bytes);
            shard.stored.push((write.id, write.bytes));
        }
        if shard.stored.is_empty() {
            return;
        }
        mapped.commit();
        for (id, bytes) in shard.stored.drain(..) {
            self.release(&shard.shard.written(id, true, bytes), turn);
        }
        shard.quiet_since = turn.now();
        // No end of a write will have the shard look at these again.
        let log = shard.shard.log();
        shard.goes_on = shard.cleaner.is_at_work() || log.has_cleaned_segments() || !shard.queue.is_empty();
    }

    /// Begins the writes of the log.
    fn write(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        if shard.mapped.is_some() {
            return self.store_and_fence(shard, turn);
        }
        loop {
            let (op, token) = match shard.not_begun.take() {
                Some(not_begun) => not_begun,
                None => {
                    let Some(write) = shard.shard.next_write(WRITES_MAX, now_ns()) else { return };
                    let mut data = shard.files.buffer(write.bytes.len());
                    data.fill(&write.bytes);
                    let offset = u64::from(write.place) * self.segment_bytes + write.offset;
                    let token = shard.next_token;
                    shard.next_token += 1;
                    shard.writes.push((token, write.id));
                    shard.shard.reuse(write.bytes);
                    (FileOp::write_durably(&shard.file, offset, data), token)
                }
            };
            if let Err(refused) = shard.files.begin(op, token) {
                if refused.reason == Refusal::Stopping {
                    (self.failed)(&refused.to_string());
                }
                let FileRefused { op, .. } = *refused;
                shard.not_begun = Some((op, token));
                return;
            }
        }
    }

    /// What is done between the messages of a turn: cleaning, and writing what they left in the log.
    pub(super) fn work(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        self.work_off(shard, turn);
        self.rest(shard, turn);
    }

    /// Says when there is something to do though nothing happens until then.
    fn rest(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        let now = turn.now();
        let now_ms = monotonic_ms();
        let in_queue = shard.queue.next_ms(now_ms).map(|at_ms| now.plus_ms(at_ms.saturating_sub(now_ms).max(1)));
        let hope_again = if let Hope::Lost { until } = shard.hope { Some(until) } else { None };
        let mut wake: Option<Time> = self.next_sweep(shard, now).into_iter().chain(in_queue).chain(hope_again).min();
        if shard.shard.must_say() {
            // A lone client that writes again at once finds the medium free.
            let idle_at = shard.quiet_since.plus_ms(IDLE_MS);
            if now < idle_at {
                wake = wake.into_iter().chain([idle_at]).min();
            } else if shard.shard.say(now_ns()) {
                self.write(shard, turn);
            } else {
                // What it saw of another log is not promised, of which this shard does not hear.
                wake = wake.into_iter().chain([now.plus_ms(IDLE_MS)]).min();
            }
        }
        if std::mem::take(&mut shard.goes_on) {
            wake = Some(now);
        }
        if let Some(at) = wake {
            turn.wake_at(at);
        }
    }

    /// When this shard is to look for keys that have ended, though nothing happens until then. Each shard does: one that sleeps
    /// does not hear of a key that another one set.
    fn next_sweep(&self, shard: &KvShard, now: Time) -> Option<Time> {
        let next_ms = shard.shard.next_sweep_ms()?;
        let now_ns = now_ns();
        let wait_ns = next_ms.saturating_mul(1_000_000).max(shard.sweep_at_ns).saturating_sub(now_ns);
        let wait_ms = wait_ns.div_ceil(1_000_000).clamp(1, SWEEP_SLEEP_MS_MAX);
        let waits = shard.is_behind() || shard.waits_for_room(Purpose::Removing);
        Some(now.plus_ms(if waits { wait_ms.max(SWEEP_AGAIN_MS) } else { wait_ms }))
    }

    fn work_off(&self, shard: &mut KvShard, turn: &mut Turn<'_>) {
        self.sweep(shard);
        self.store.let_go(LET_GO);
        let cleaned_before = shard.cleaner.cleaned;
        if let Err(error) = shard.cleaner.clean(&mut shard.shard) {
            (self.failed)(&error.to_string());
        }
        if shard.cleaner.step(&mut shard.shard, &shard.file, &shard.files, shard.next_token) {
            shard.next_token += 1;
        }
        self.cleaned.fetch_add(shard.cleaner.cleaned - cleaned_before, Ordering::Relaxed);
        self.hope(shard, turn.now());
        self.write(shard, turn);
        if shard.queue.is_empty() {
            return;
        }
        let mut queue = std::mem::take(&mut shard.queue);
        // What fits into a quarter of a segment: then it is looked again whether there is room for more. It is carried out
        // behind this, so that none of it counts yet.
        let mut left = (self.segment_bytes as usize / 4).min(shard.unwritten_bytes_max);
        let taken = shard.fetched_bytes.load(Ordering::Relaxed);
        let sources = (&*self.store, &*self.clients, monotonic_ms());
        let mut lines_left = shard.lines.left();
        let lefts = (&mut left, &mut lines_left);
        for Waiting { deferred, resumed } in queue.take_ready(sources, taken, lefts, |asked| shard.must_wait(asked)) {
            turn.resume(deferred, resumed);
        }
        shard.lines.leave(lines_left);
        while left > 0
            && let Some(Waiting { deferred, resumed }) = queue.take_waiting(|asked| shard.must_wait(asked))
        {
            self.waits.fetch_add(1, Ordering::Relaxed);
            left = left.saturating_sub(resumed.command.bytes.len());
            turn.resume(deferred, resumed);
        }
        queue.begin_reads(&shard.files, &self.logs, self.segment_bytes, &mut shard.next_token);
        let needs_a_look = queue.needs_a_look();
        shard.queue = queue;
        // What they wait for may be a promise that another shard makes, of which this one does not hear.
        let is_idle = shard.writes.is_empty() && !shard.cleaner.is_reading() && !shard.ticking;
        if needs_a_look && is_idle {
            let read = FileOp::read(&shard.file, 0, BLOCK_BYTES, shard.files.buffer(BLOCK_BYTES));
            shard.ticking = shard.files.begin(read, shard.next_token).is_ok();
            shard.next_token += 1;
        }
    }
}
