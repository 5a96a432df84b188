//! What a worker has in its hand, and the keeper that takes it away: `Own` of a message socket and `look_at_hands()` of
//! the keeper, the same steps in the same order.

use std::collections::VecDeque;
use std::ops::Range;

use ksf::pool::Chunk;
use shuttle::thread;

use crate::queue::Connection;
use crate::run::{Found, Run};
use crate::scheduler::Taken;
use crate::sync::{Arc, AtomicBool, Condvar, Mutex, Ordering, TryLockError};

/// A message that was received.
pub(crate) struct Message {
    pub(crate) connection: Arc<Connection>,
    pub(crate) number: u8,
    pub(crate) class: Option<usize>,
}

/// A run that is worked on where it lies.
pub(crate) struct InPlace {
    pub(crate) connection: Arc<Connection>,
    chunk: Chunk,
    number: u64,
}

/// A worker's own.
#[derive(Default)]
pub(crate) struct Own {
    pub(crate) hand: VecDeque<Taken<Arc<Connection>>>,
    in_place: u64,
    /// Answers to messages of the run in place.
    held: Vec<u8>,
    held_for: Option<Arc<Connection>>,
    progress: u64,
    progress_seen: u64,
    /// Kept for their memory.
    ranges: Vec<Vec<Range<u32>>>,
}

impl Own {
    /// What a read brought, as runs: messages are of one byte.
    pub(crate) fn gather(&mut self, messages: Vec<u8>, run_len: usize) -> Vec<Run> {
        let mut found = Found::default();
        (0..messages.len()).for_each(|at| found.in_place(at..at + 1));
        let mut runs = Vec::new();
        found.gather(&Chunk::from_vec(messages), run_len, &mut self.ranges, &mut runs);
        runs
    }

    /// Messages in the hand.
    pub(crate) fn messages(&self) -> usize {
        self.hand.iter().map(|taken| taken.message.len()).sum()
    }

    pub(crate) fn pop(&mut self) -> Option<Message> {
        self.progress += 1;
        let first = self.hand.front_mut()?;
        let range = first.message.pop()?;
        let number = first.message.chunk()[range.start];
        let message = Message { connection: Arc::clone(&first.source), number, class: first.class };
        if first.message.len() == 0 {
            self.drop_first();
        }
        Some(message)
    }

    fn drop_first(&mut self) {
        if let Some(taken) = self.hand.pop_front() {
            self.ranges.push(taken.message.into_ranges());
        }
    }

    pub(crate) fn begin_in_place(&mut self) -> Option<InPlace> {
        let first = self.hand.front()?;
        self.progress += 1;
        self.in_place = self.progress;
        let (connection, chunk) = (Arc::clone(&first.source), first.message.chunk().clone());
        self.held_for = Some(Arc::clone(&connection));
        Some(InPlace { connection, chunk, number: self.in_place })
    }

    /// `MessageSocket::piece`: the next message of the run.
    pub(crate) fn piece(&mut self, run: &InPlace, answer: Option<u8>) -> Option<u8> {
        self.held.extend(answer);
        if self.in_place != run.number {
            return None;
        }
        self.progress += 1;
        let first = self.hand.front_mut()?;
        let range = first.message.pop()?;
        if first.message.len() == 0 {
            self.in_place = 0;
            self.drop_first();
        }
        Some(run.chunk[range.start])
    }

    /// `MessageSocket::done_in_place`.
    pub(crate) fn done_in_place(&mut self, run: &InPlace) {
        self.held_for = None;
        run.connection.answer(&mut self.held);
    }

    /// The keeper's look. Whether there is still something, and what it takes away.
    fn look(&mut self) -> (bool, Vec<Taken<Arc<Connection>>>) {
        let held_up = std::mem::replace(&mut self.progress_seen, self.progress) == self.progress;
        if !held_up {
            return (!self.hand.is_empty() || !self.held.is_empty(), Vec::new());
        }
        if let Some(connection) = &self.held_for {
            connection.answer(&mut self.held);
        }
        self.in_place = 0;
        (false, self.hand.drain(..).collect())
    }
}

/// The keeper, as far as it looks after hands. Its time passes as the schedule says: it may look again at once, or
/// when the worker is through.
#[derive(Default)]
pub(crate) struct Keeper {
    hands: AtomicBool,
    list: Mutex<List>,
    changed: Condvar,
    pub(crate) workers: Mutex<Vec<Arc<Mutex<Own>>>>,
}

#[derive(Default)]
struct List {
    hurried: bool,
    stop: bool,
}

impl Keeper {
    /// A worker took several messages.
    pub(crate) fn come_by(&self) {
        if !self.hands.load(Ordering::SeqCst) && !self.hands.swap(true, Ordering::SeqCst) {
            self.list.lock().unwrap().hurried = true;
            self.changed.notify_one();
        }
    }

    pub(crate) fn stop(&self) {
        self.list.lock().unwrap().stop = true;
        self.changed.notify_one();
    }

    /// The thread; `give_back` is told what it takes away.
    pub(crate) fn run(&self, give_back: impl Fn(Vec<Taken<Arc<Connection>>>)) {
        loop {
            let mut list = self.list.lock().unwrap();
            while !list.hurried && !list.stop {
                list = self.changed.wait(list).unwrap();
            }
            if list.stop {
                return;
            }
            list.hurried = false;
            drop(list);
            while self.look_at_hands(&give_back) {
                if self.list.lock().unwrap().stop {
                    return;
                }
                thread::yield_now();
            }
        }
    }

    fn look_at_hands(&self, give_back: &impl Fn(Vec<Taken<Arc<Connection>>>)) -> bool {
        self.hands.store(false, Ordering::SeqCst);
        let workers = self.workers.lock().unwrap().clone();
        let mut any = false;
        for own in workers {
            let mut own = match own.try_lock() {
                Ok(own) => own,
                Err(TryLockError::WouldBlock) => {
                    any = true;
                    continue;
                }
                Err(TryLockError::Poisoned(_)) => panic!("a worker died"),
            };
            let (has_hand, left) = own.look();
            drop(own);
            any |= has_hand;
            if !left.is_empty() {
                give_back(left);
            }
        }
        if any {
            self.hands.store(true, Ordering::SeqCst);
        }
        any
    }
}
