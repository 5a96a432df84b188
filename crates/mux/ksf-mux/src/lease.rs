//! Messages a worker has dequeued but not started, and their revocation when it stalls.
//!
//! A worker holds batches of messages on a *lease*, which the timer thread revokes if the worker makes no progress. A service's
//! worker processes a batch in place: it gets a few messages at a time, a [`Grant`], and processes them without a lock. It counts
//! them with plain stores. To revoke the lease the timer thread closes the grant. A barrier in all threads (membarrier(2)) then
//! makes both agree on the last message that was started.

use std::collections::VecDeque;
use std::ops::Range;

use ksf::pool::Chunk;

use crate::batch::MessageBatch;
use crate::scheduler::{Source, Taken};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering, heavy_barrier, light_barrier};

/// Lists of places, to be used again.
pub(crate) type FreeLists = Vec<Vec<Range<u32>>>;

/// Batches that were taken, the first one perhaps in place.
pub(crate) struct Lease<S: Source> {
    pub(crate) batches: VecDeque<Taken<S>>,
    /// The first batch is worked on in place, by the worker that has this number; 0: by none.
    in_place: u64,
    /// How many messages of that batch are granted: they are still in it.
    granted: usize,
    /// How many of them remain with the worker, of a grant that was closed.
    kept: usize,
    cursor: Arc<Cursor>,
    /// Counts what the worker took from the lease; and how much it was at the last check of the timer thread.
    progress: u64,
    progress_checked: u64,
}

/// A batch that is worked on where it lies.
pub(crate) struct InPlaceBatch<S> {
    pub(crate) source: S,
    pub(crate) chunk: Chunk,
    pub(crate) class: Option<usize>,
    number: u64,
}

/// One message out of the lease.
pub(crate) struct LeasedMessage<S> {
    pub(crate) source: S,
    pub(crate) bytes: Chunk,
    pub(crate) class: Option<usize>,
    /// Another one follows.
    pub(crate) more: bool,
}

/// Messages a worker goes through without a lock. The worker's alone.
pub(crate) struct Grant {
    cursor: Arc<Cursor>,
    places: Vec<Range<u32>>,
    begun: usize,
}

/// Where the worker and the timer thread meet. A cache line to itself: the worker writes it for each message.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Cursor {
    /// Messages of the grant that the worker began.
    begun: AtomicUsize,
    /// The timer thread took the rest.
    closed: AtomicBool,
}

/// What the timer thread found.
pub(crate) struct LeaseCheck<S: Source> {
    /// The worker took nothing since the last check: the lease is revoked.
    pub(crate) is_stalled: bool,
    /// There is still something in the lease.
    pub(crate) has_batches: bool,
    /// What was taken from it, for others.
    pub(crate) revoked: Vec<Taken<S>>,
    /// It had more than one message granted when it was held up.
    pub(crate) was_granted_many: bool,
}

impl<S: Source<Message = MessageBatch> + Clone> Lease<S> {
    pub(crate) fn new() -> Self {
        Self {
            batches: VecDeque::new(),
            in_place: 0,
            granted: 0,
            kept: 0,
            cursor: Arc::default(),
            progress: 0,
            progress_checked: 0,
        }
    }

    /// Messages in it.
    pub(crate) fn messages(&self) -> usize {
        self.batches.iter().map(|taken| taken.message.len()).sum()
    }

    /// The next message.
    pub(crate) fn pop(&mut self, free: &mut FreeLists) -> Option<LeasedMessage<S>> {
        self.progress += 1;
        let more_batches = self.batches.len() > 1;
        let first = self.batches.front_mut()?;
        let range = first.message.pop()?;
        let bytes = first.message.chunk().slice(range);
        let more = first.more || more_batches || first.message.len() > 0;
        let message = LeasedMessage { source: first.source.clone(), bytes, class: first.class, more };
        if first.message.len() == 0 {
            self.drop_first(free);
        }
        Some(message)
    }

    /// Leaves the first batch where it is, to be worked on there.
    pub(crate) fn begin_in_place(&mut self) -> Option<InPlaceBatch<S>> {
        let first = self.batches.front()?;
        self.progress += 1;
        // The count never goes back, so it names this batch.
        self.in_place = self.progress;
        self.granted = 0;
        let (source, chunk) = (first.source.clone(), first.message.chunk().clone());
        Some(InPlaceBatch { source, chunk, class: first.class, number: self.in_place })
    }

    /// The lock-free side, for the one thread that works in place.
    pub(crate) fn grant(&self) -> Grant {
        Grant { cursor: Arc::clone(&self.cursor), places: Vec::new(), begun: 0 }
    }

    /// Grants up to `max` messages more; those of the last grant that were not begun among them. False: there are none
    /// left, or the lease was revoked.
    pub(crate) fn grant_more(
        &mut self,
        batch: &InPlaceBatch<S>,
        max: usize,
        grant: &mut Grant,
        free: &mut FreeLists,
    ) -> bool {
        if self.is_revoked(batch) {
            return self.keep_granted(grant);
        }
        let begun = grant.end();
        self.progress += 1;
        let Some(first) = self.batches.front_mut() else { return false };
        first.message.skip(begun);
        first.message.peek(max, &mut grant.places);
        self.granted = grant.places.len();
        if self.granted == 0 {
            self.in_place = 0;
            self.drop_first(free);
            return false;
        }
        // Both sides of the next check see these: it is made under the same lock.
        self.cursor.begun.store(0, Ordering::Relaxed);
        self.cursor.closed.store(false, Ordering::Relaxed);
        true
    }

    /// True if the batch in place was taken from the worker, apart from what it keeps.
    pub(crate) fn is_revoked(&self, batch: &InPlaceBatch<S>) -> bool {
        self.in_place != batch.number
    }

    /// Of a lease that was revoked: what the worker has to work on still. False: nothing.
    pub(crate) fn keep_granted(&self, grant: &mut Grant) -> bool {
        grant.places.truncate(self.kept.max(grant.begun));
        let goes_on = grant.begun < grant.places.len();
        if !goes_on {
            grant.end();
        }
        goes_on
    }

    /// Ends the work in place. Returns all that the worker has not begun. The lease must not be revoked.
    pub(crate) fn end_in_place(&mut self, grant: &mut Grant) -> Vec<Taken<S>> {
        let begun = grant.end();
        self.progress += 1;
        self.in_place = 0;
        if let Some(first) = self.batches.front_mut() {
            first.message.skip(begun);
        }
        self.batches.drain(..).filter(|taken| taken.message.len() > 0).collect()
    }

    /// How many messages of a closed grant are the worker's.
    pub(crate) fn kept(&self) -> usize {
        self.kept
    }

    /// Called by the timer thread at its intervals. Revokes the lease of a worker that took nothing from it since the
    /// last check.
    pub(crate) fn check(&mut self) -> LeaseCheck<S> {
        let is_stalled = std::mem::replace(&mut self.progress_checked, self.progress) == self.progress;
        if !is_stalled {
            let has_batches = !self.batches.is_empty();
            return LeaseCheck { is_stalled, has_batches, revoked: Vec::new(), was_granted_many: false };
        }
        let was_granted_many = self.in_place != 0 && self.granted > 1;
        LeaseCheck { is_stalled, has_batches: false, revoked: self.revoke(), was_granted_many }
    }

    /// Takes all that the worker has not begun.
    pub(crate) fn revoke(&mut self) -> Vec<Taken<S>> {
        if std::mem::take(&mut self.in_place) != 0
            && let Some(first) = self.batches.front_mut()
        {
            self.kept = if self.granted > 0 { self.cursor.close(self.granted, heavy_barrier) } else { 0 };
            first.message.skip(self.kept);
        }
        self.batches.drain(..).filter(|taken| taken.message.len() > 0).collect()
    }

    fn drop_first(&mut self, free: &mut FreeLists) {
        const FREE_MAX: usize = 16;
        if let Some(taken) = self.batches.pop_front() {
            let ranges = taken.message.into_ranges();
            if ranges.capacity() > 0 && free.len() < FREE_MAX {
                free.push(ranges);
            }
        }
    }
}

impl Grant {
    /// Begins the next message: where in the chunk it lies. `None`: all are begun, or the rest was given to others.
    /// `kept` tells [`Lease::kept`], under the lock of the lease.
    #[inline]
    pub(crate) fn next(&mut self, kept: impl FnOnce() -> usize) -> Option<Range<u32>> {
        let place = self.places.get(self.begun)?.clone();
        // The thread that closed the grant saw this, or not: it knows which.
        if !self.cursor.begin(self.begun) && self.begun >= kept() {
            self.places.truncate(self.begun);
            return None;
        }
        self.begun += 1;
        Some(place)
    }

    /// Forgets what was granted. Returns how many messages were begun.
    fn end(&mut self) -> usize {
        self.places.clear();
        std::mem::take(&mut self.begun)
    }
}

impl Cursor {
    /// The worker begins message `at`. False: the grant was closed, perhaps before that.
    #[inline]
    fn begin(&self, at: usize) -> bool {
        self.begun.store(at + 1, Ordering::Relaxed);
        light_barrier();
        !self.closed.load(Ordering::Relaxed)
    }

    /// Closes a grant of so many messages. Those the worker keeps: the ones it began before, or all where the two cannot
    /// agree on those.
    fn close(&self, granted: usize, barrier: impl FnOnce() -> bool) -> usize {
        self.closed.store(true, Ordering::Relaxed);
        // After the barrier the worker sees that it is closed at the next message it begins, and this thread sees those it
        // began without seeing that. What it begins after the load below it asks for under the lock.
        if barrier() { self.begun.load(Ordering::Relaxed) } else { granted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::{OrderedQueue, Parked};

    #[derive(Clone)]
    struct NoSource;

    impl Source for NoSource {
        type Message = MessageBatch;

        fn key(&self) -> usize {
            0
        }

        fn ordered_queue(&self) -> Option<&OrderedQueue<MessageBatch>> {
            None
        }

        fn class(&self, _: &MessageBatch) -> Option<usize> {
            None
        }

        fn is_throttled(&self) -> bool {
            false
        }

        fn parked(&self) -> &Parked<MessageBatch> {
            unreachable!("it is never throttled")
        }
    }

    fn lease(messages: usize) -> Lease<NoSource> {
        let mut lease = Lease::new();
        let message =
            MessageBatch::of(&Chunk::from_vec(vec![7; messages]), (0..messages as u32).map(|at| at..at + 1).collect());
        lease.batches.push_back(Taken { source: NoSource, message, class: None, more: false });
        lease
    }

    fn next(grant: &mut Grant) -> Option<u32> {
        grant.next(|| unreachable!("the grant is open")).map(|place| place.start)
    }

    #[test]
    fn grants_go_through_the_batch() {
        let (mut lease, mut free) = (lease(5), FreeLists::new());
        let batch = lease.begin_in_place().unwrap();
        let mut grant = lease.grant();
        let mut seen = Vec::new();
        while lease.grant_more(&batch, 2, &mut grant, &mut free) {
            seen.push(std::iter::from_fn(|| next(&mut grant)).collect::<Vec<_>>());
        }
        assert_eq!(seen, [&[0, 1][..], &[2, 3], &[4]]);
        assert_eq!((lease.batches.len(), free.len()), (0, 1));
        assert!(!lease.grant_more(&batch, 2, &mut grant, &mut free));
    }

    #[test]
    fn the_timer_thread_takes_what_is_not_begun() {
        for begun in 0..=3 {
            let (mut lease, mut free) = (lease(5), FreeLists::new());
            let batch = lease.begin_in_place().unwrap();
            let mut grant = lease.grant();
            assert!(lease.grant_more(&batch, 3, &mut grant, &mut free));
            (0..begun).for_each(|at| assert_eq!(next(&mut grant), Some(at)));
            assert!(!lease.check().is_stalled, "it took something since the last check");
            let check = lease.check();
            assert!(check.is_stalled && check.was_granted_many && !check.has_batches);
            let [taken] = &mut { check.revoked }[..] else { panic!("one batch") };
            assert_eq!(taken.message.pop(), Some(begun as usize..begun as usize + 1));
            assert_eq!(taken.message.len(), 4 - begun as usize);
            // The worker comes back.
            let kept = lease.kept();
            assert_eq!(grant.next(|| kept), None);
            assert!(!lease.grant_more(&batch, 3, &mut grant, &mut free));
        }
    }

    #[test]
    fn a_grant_that_ends_early_goes_on_or_is_given_back() {
        let (mut lease, mut free) = (lease(5), FreeLists::new());
        let batch = lease.begin_in_place().unwrap();
        let mut grant = lease.grant();
        assert!(lease.grant_more(&batch, 3, &mut grant, &mut free));
        assert_eq!(next(&mut grant), Some(0));
        assert!(lease.grant_more(&batch, 3, &mut grant, &mut free));
        assert_eq!((next(&mut grant), next(&mut grant)), (Some(1), Some(2)));
        assert!(!lease.is_revoked(&batch));
        let [rest] = &mut lease.end_in_place(&mut grant)[..] else { panic!("one batch") };
        assert_eq!((rest.message.len(), rest.message.pop()), (2, Some(3..4)));
        assert!(lease.revoke().is_empty() && lease.is_revoked(&batch));
        assert!(!lease.grant_more(&batch, 3, &mut grant, &mut free));
    }

    #[test]
    fn what_a_worker_keeps_of_a_revoked_lease_it_works_on_also_when_its_grant_ended_early() {
        let (mut lease, mut free) = (lease(5), FreeLists::new());
        let batch = lease.begin_in_place().unwrap();
        let mut grant = lease.grant();
        assert!(lease.grant_more(&batch, 3, &mut grant, &mut free));
        assert_eq!(next(&mut grant), Some(0));
        lease.revoke();
        // As if there had been no barrier: the worker keeps all that was granted.
        lease.kept = 3;
        assert!(lease.grant_more(&batch, 3, &mut grant, &mut free));
        assert_eq!([grant.next(|| 3), grant.next(|| 3), grant.next(|| 3)], [Some(1..2), Some(2..3), None]);
        assert!(!lease.grant_more(&batch, 3, &mut grant, &mut free));
        assert_eq!((grant.begun, grant.places.len()), (0, 0), "the next batch begins at its beginning");
    }

    #[test]
    fn nothing_is_taken_of_a_batch_whose_last_message_is_begun() {
        let (mut lease, mut free) = (lease(2), FreeLists::new());
        let batch = lease.begin_in_place().unwrap();
        let mut grant = lease.grant();
        assert!(lease.grant_more(&batch, 9, &mut grant, &mut free));
        assert_eq!((next(&mut grant), next(&mut grant)), (Some(0), Some(1)));
        assert!(lease.revoke().is_empty());
        assert_eq!(grant.next(|| unreachable!("none is left")), None);
        assert!(!lease.grant_more(&batch, 9, &mut grant, &mut free));
    }

    #[test]
    fn a_message_that_was_begun_as_the_grant_closed_is_the_workers_if_it_was_seen() {
        let (mut lease, mut free) = (lease(3), FreeLists::new());
        let batch = lease.begin_in_place().unwrap();
        let mut grant = lease.grant();
        assert!(lease.grant_more(&batch, 9, &mut grant, &mut free));
        assert_eq!(next(&mut grant), Some(0));
        let taken = lease.revoke();
        assert_eq!((taken.len(), taken[0].message.len(), lease.kept()), (1, 2, 1));
        // As if the timer thread had seen one more.
        assert_eq!(grant.next(|| 2), Some(1..2));
        assert_eq!(grant.next(|| 2), None);
    }

    #[test]
    fn without_a_barrier_the_worker_keeps_its_grant() {
        let cursor = Cursor::default();
        assert!(cursor.begin(0) && cursor.begin(1));
        // The worker may have begun more than this thread sees.
        assert_eq!(cursor.close(8, || false), 8);
        assert_eq!(cursor.close(8, || true), 2);
    }

    /// On real CPUs, which keep stores to themselves for a while: without the barrier in `close` the timer thread misses
    /// messages that the worker began without seeing that the grant was closed.
    #[test]
    fn both_agree_on_the_last_message_begun() {
        const ROUNDS: usize = 1_000;
        const MESSAGES: usize = 200;
        let wait_for = |count: &AtomicUsize, round: usize| {
            while count.load(Ordering::SeqCst) < round {
                std::thread::yield_now();
            }
        };
        let cursor = Cursor::default();
        let (opened, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let begun = AtomicUsize::new(0);
        let (mut in_the_middle, mut wrong) = (0, Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    wait_for(&opened, round);
                    begun.store((0..MESSAGES).take_while(|at| cursor.begin(*at)).count(), Ordering::SeqCst);
                    ended.store(round, Ordering::SeqCst);
                }
            });
            for round in 1..=ROUNDS {
                cursor.begun.store(0, Ordering::Relaxed);
                cursor.closed.store(false, Ordering::Relaxed);
                opened.store(round, Ordering::SeqCst);
                // At another message each time.
                while cursor.begun.load(Ordering::Relaxed) < round % 16 {
                    std::hint::spin_loop();
                }
                let kept = cursor.close(MESSAGES, heavy_barrier);
                wait_for(&ended, round);
                let begun = begun.load(Ordering::SeqCst);
                if !(begun..=begun + 1).contains(&kept) {
                    wrong.push((round, begun, kept));
                }
                in_the_middle += usize::from(kept < MESSAGES);
            }
        });
        assert_eq!(wrong.first(), None, "(round, begun for sure, kept)");
        assert!(in_the_middle > 0, "no grant was closed in the middle");
    }
}
