//! What a worker has taken from the queues and not worked on, and how it is taken from a worker that is held up.
//!
//! A worker that goes through cheap messages where they lie is given a few at a time, a [`Grant`], and goes through them
//! without a lock: it counts them with plain stores. The keeper that finds it held up closes the grant, and a barrier in
//! all threads (membarrier(2)) makes both agree on which message was the last one begun.

use std::collections::VecDeque;
use std::ops::Range;

use ksf::pool::Chunk;

use crate::run::Run;
use crate::scheduler::{Source, Taken};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering, heavy_barrier, light_barrier};

/// Lists of places, to be used again.
pub(crate) type Spares = Vec<Vec<Range<u32>>>;

/// Runs that were taken, the first one perhaps in place.
pub(crate) struct Hand<S: Source> {
    pub(crate) runs: VecDeque<Taken<S>>,
    /// The first run is worked on in place, by whoever has this number; 0: none is.
    in_place: u64,
    /// How many messages of that run are granted: they are still in it.
    granted: usize,
    /// How many of them remain with the worker, of a grant that was closed.
    kept: usize,
    cursor: Arc<Cursor>,
    /// Counts what the worker took from the hand; and how much it was when the keeper last looked.
    progress: u64,
    progress_seen: u64,
}

/// A run that is worked on where it lies.
pub(crate) struct InPlace<S> {
    pub(crate) source: S,
    pub(crate) chunk: Chunk,
    pub(crate) class: Option<usize>,
    number: u64,
}

/// One message out of the hand.
pub(crate) struct One<S> {
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

/// Where the worker and the keeper meet. A cache line to itself: the worker writes it for each message.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Cursor {
    /// Messages of the grant that the worker began.
    begun: AtomicUsize,
    /// The keeper took the rest.
    closed: AtomicBool,
}

/// What the keeper found.
pub(crate) struct Look<S: Source> {
    /// The worker took nothing since the last look.
    pub(crate) held_up: bool,
    /// There is still something in the hand.
    pub(crate) has_hand: bool,
    /// What was taken from it, for others.
    pub(crate) taken: Vec<Taken<S>>,
    /// It had more than one message granted when it was held up.
    pub(crate) surprised: bool,
}

impl<S: Source<Message = Run> + Clone> Hand<S> {
    pub(crate) fn new() -> Self {
        Self {
            runs: VecDeque::new(),
            in_place: 0,
            granted: 0,
            kept: 0,
            cursor: Arc::default(),
            progress: 0,
            progress_seen: 0,
        }
    }

    /// Messages in it.
    pub(crate) fn messages(&self) -> usize {
        self.runs.iter().map(|taken| taken.message.len()).sum()
    }

    /// The next message.
    pub(crate) fn pop(&mut self, spares: &mut Spares) -> Option<One<S>> {
        self.progress += 1;
        let more_runs = self.runs.len() > 1;
        let first = self.runs.front_mut()?;
        let range = first.message.pop()?;
        let bytes = first.message.chunk().slice(range);
        let more = first.more || more_runs || first.message.len() > 0;
        let one = One { source: first.source.clone(), bytes, class: first.class, more };
        if first.message.len() == 0 {
            self.drop_first(spares);
        }
        Some(one)
    }

    /// Leaves the first run where it is, to be worked on there.
    pub(crate) fn begin_in_place(&mut self) -> Option<InPlace<S>> {
        let first = self.runs.front()?;
        self.progress += 1;
        // The count never goes back, so it names this run.
        self.in_place = self.progress;
        self.granted = 0;
        let (source, chunk) = (first.source.clone(), first.message.chunk().clone());
        Some(InPlace { source, chunk, class: first.class, number: self.in_place })
    }

    /// The lock-free side, for the one thread that works in place.
    pub(crate) fn grant(&self) -> Grant {
        Grant { cursor: Arc::clone(&self.cursor), places: Vec::new(), begun: 0 }
    }

    /// Grants up to `max` messages more; those of the last grant are gone through. False: there are none left, or the
    /// keeper gave them to others.
    pub(crate) fn grant_more(&mut self, run: &InPlace<S>, max: usize, grant: &mut Grant, spares: &mut Spares) -> bool {
        grant.places.clear();
        grant.begun = 0;
        if self.in_place != run.number {
            return false;
        }
        self.progress += 1;
        let Some(first) = self.runs.front_mut() else { return false };
        first.message.skip(self.granted);
        first.message.peek(max, &mut grant.places);
        self.granted = grant.places.len();
        if self.granted == 0 {
            self.in_place = 0;
            self.drop_first(spares);
            return false;
        }
        // Both sides of the next look see these: it is made under the same lock.
        self.cursor.begun.store(0, Ordering::Relaxed);
        self.cursor.closed.store(false, Ordering::Relaxed);
        true
    }

    /// How many messages of a closed grant are the worker's.
    pub(crate) fn kept(&self) -> usize {
        self.kept
    }

    /// Called by the keeper, from time to time. Takes the hand of a worker that took nothing from it since the last time.
    pub(crate) fn look(&mut self) -> Look<S> {
        let held_up = std::mem::replace(&mut self.progress_seen, self.progress) == self.progress;
        if !held_up {
            return Look { held_up, has_hand: !self.runs.is_empty(), taken: Vec::new(), surprised: false };
        }
        let surprised = self.in_place != 0 && self.granted > 1;
        Look { held_up, has_hand: false, taken: self.take_all(), surprised }
    }

    /// Takes all that the worker has not begun.
    pub(crate) fn take_all(&mut self) -> Vec<Taken<S>> {
        if std::mem::take(&mut self.in_place) != 0
            && let Some(first) = self.runs.front_mut()
        {
            self.kept = if self.granted > 0 { self.cursor.close(self.granted, heavy_barrier) } else { 0 };
            first.message.skip(self.kept);
        }
        self.runs.drain(..).filter(|taken| taken.message.len() > 0).collect()
    }

    fn drop_first(&mut self, spares: &mut Spares) {
        const SPARES_MAX: usize = 16;
        if let Some(taken) = self.runs.pop_front() {
            let ranges = taken.message.into_ranges();
            if ranges.capacity() > 0 && spares.len() < SPARES_MAX {
                spares.push(ranges);
            }
        }
    }
}

impl Grant {
    /// Begins the next message: where in the chunk it lies. `None`: all are begun, or the rest was given to others.
    /// `kept` tells [`Hand::kept`], under the lock of the hand.
    #[inline]
    pub(crate) fn next(&mut self, kept: impl FnOnce() -> usize) -> Option<Range<u32>> {
        let place = self.places.get(self.begun)?.clone();
        // Whoever closed the grant saw this, or not: it knows which.
        if !self.cursor.begin(self.begun) && self.begun >= kept() {
            self.places.truncate(self.begun);
            return None;
        }
        self.begun += 1;
        Some(place)
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
    use crate::scheduler::Lane;

    #[derive(Clone)]
    struct Nobody;

    impl Source for Nobody {
        type Message = Run;

        fn is_same(&self, _: &Self) -> bool {
            true
        }

        fn lane(&self) -> Option<&Lane<Run>> {
            None
        }

        fn class(&self, _: &Run) -> Option<usize> {
            None
        }
    }

    fn hand(messages: usize) -> Hand<Nobody> {
        let mut hand = Hand::new();
        let message = Run::of(&Chunk::from_vec(vec![7; messages]), (0..messages as u32).map(|at| at..at + 1).collect());
        hand.runs.push_back(Taken { source: Nobody, message, class: None, more: false });
        hand
    }

    fn next(grant: &mut Grant) -> Option<u32> {
        grant.next(|| unreachable!("the grant is open")).map(|place| place.start)
    }

    #[test]
    fn grants_go_through_the_run() {
        let (mut hand, mut spares) = (hand(5), Spares::new());
        let run = hand.begin_in_place().unwrap();
        let mut grant = hand.grant();
        let mut seen = Vec::new();
        while hand.grant_more(&run, 2, &mut grant, &mut spares) {
            seen.push(std::iter::from_fn(|| next(&mut grant)).collect::<Vec<_>>());
        }
        assert_eq!(seen, [&[0, 1][..], &[2, 3], &[4]]);
        assert_eq!((hand.runs.len(), spares.len()), (0, 1));
        assert!(!hand.grant_more(&run, 2, &mut grant, &mut spares));
    }

    #[test]
    fn the_keeper_takes_what_is_not_begun() {
        for begun in 0..=3 {
            let (mut hand, mut spares) = (hand(5), Spares::new());
            let run = hand.begin_in_place().unwrap();
            let mut grant = hand.grant();
            assert!(hand.grant_more(&run, 3, &mut grant, &mut spares));
            (0..begun).for_each(|at| assert_eq!(next(&mut grant), Some(at)));
            assert!(!hand.look().held_up, "it came by since the last look");
            let look = hand.look();
            assert!(look.held_up && look.surprised && !look.has_hand);
            let [taken] = &mut { look.taken }[..] else { panic!("one run") };
            assert_eq!(taken.message.pop(), Some(begun as usize..begun as usize + 1));
            assert_eq!(taken.message.len(), 4 - begun as usize);
            // The worker comes back.
            let kept = hand.kept();
            assert_eq!(grant.next(|| kept), None);
            assert!(!hand.grant_more(&run, 3, &mut grant, &mut spares));
        }
    }

    #[test]
    fn nothing_is_taken_of_a_run_whose_last_message_is_begun() {
        let (mut hand, mut spares) = (hand(2), Spares::new());
        let run = hand.begin_in_place().unwrap();
        let mut grant = hand.grant();
        assert!(hand.grant_more(&run, 9, &mut grant, &mut spares));
        assert_eq!((next(&mut grant), next(&mut grant)), (Some(0), Some(1)));
        assert!(hand.take_all().is_empty());
        assert_eq!(grant.next(|| unreachable!("none is left")), None);
        assert!(!hand.grant_more(&run, 9, &mut grant, &mut spares));
    }

    #[test]
    fn a_message_that_was_begun_as_the_grant_closed_is_the_workers_if_it_was_seen() {
        let (mut hand, mut spares) = (hand(3), Spares::new());
        let run = hand.begin_in_place().unwrap();
        let mut grant = hand.grant();
        assert!(hand.grant_more(&run, 9, &mut grant, &mut spares));
        assert_eq!(next(&mut grant), Some(0));
        let taken = hand.take_all();
        assert_eq!((taken.len(), taken[0].message.len(), hand.kept()), (1, 2, 1));
        // As if the keeper had seen one more.
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

    /// On real CPUs, which keep stores to themselves for a while: without the barrier in `close` the keeper misses
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
