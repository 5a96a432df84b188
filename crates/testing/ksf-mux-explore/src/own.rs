//! What a worker has to itself, and the keeper that looks at it: `Own` of a message socket and `look_at_hands()` of the
//! keeper, the same steps in the same order. The hand is the real one.

use ksf::pool::Chunk;
use shuttle::thread;

use crate::hand::{self, Hand, Spares};
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
pub(crate) type InPlace = hand::InPlace<Arc<Connection>>;

/// A worker's own.
pub(crate) struct Own {
    pub(crate) hand: Hand<Arc<Connection>>,
    /// Answers to messages of the run in place.
    held: Vec<u8>,
    held_for: Option<Arc<Connection>>,
    /// Kept for their memory.
    pub(crate) spares: Spares,
}

impl Own {
    pub(crate) fn new() -> Self {
        Self { hand: Hand::new(), held: Vec::new(), held_for: None, spares: Vec::new() }
    }

    /// What a read brought, as runs: messages are of one byte.
    pub(crate) fn gather(&mut self, messages: Vec<u8>, run_len: usize) -> Vec<Run> {
        let mut found = Found::default();
        (0..messages.len()).for_each(|at| found.in_place(at..at + 1));
        let mut runs = Vec::new();
        found.gather(&Chunk::from_vec(messages), run_len, &mut self.spares, &mut runs);
        runs
    }

    pub(crate) fn pop(&mut self) -> Option<Message> {
        let one = self.hand.pop(&mut self.spares)?;
        Some(Message { number: one.bytes[0], connection: one.source, class: one.class })
    }

    pub(crate) fn begin_in_place(&mut self) -> Option<InPlace> {
        let run = self.hand.begin_in_place()?;
        self.held_for = Some(Arc::clone(&run.source));
        Some(run)
    }

    /// `MessageSocket::grant_more`.
    pub(crate) fn grant_more(
        &mut self,
        run: &InPlace,
        max: usize,
        answers: &mut Vec<u8>,
        grant: &mut hand::Grant,
    ) -> bool {
        self.held.append(answers);
        self.hand.grant_more(run, max, grant, &mut self.spares)
    }

    /// `MessageSocket::done_in_place`.
    pub(crate) fn done_in_place(&mut self, run: &InPlace) {
        self.held_for = None;
        run.source.answer(&mut self.held);
    }

    /// The keeper's look. Whether there is still something, and what it takes away.
    fn look(&mut self) -> (bool, Vec<Taken<Arc<Connection>>>) {
        let look = self.hand.look();
        if !look.held_up {
            return (look.has_hand || !self.held.is_empty(), Vec::new());
        }
        if let Some(connection) = &self.held_for {
            connection.answer(&mut self.held);
        }
        (look.has_hand, look.taken)
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
