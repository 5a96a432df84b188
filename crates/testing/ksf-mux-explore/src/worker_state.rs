//! What a worker has to itself, and the timer thread that checks it: `WorkerState` of a message socket and
//! `check_leases()` of the timer thread, the same steps in the same order. The lease is the real one.

use ksf::pool::Chunk;
use shuttle::thread;

use crate::batch::{CutMessages, MessageBatch};
use crate::lease::{self, FreeLists, Lease};
use crate::queue::Connection;
use crate::scheduler::Taken;
use crate::sync::{Arc, AtomicBool, Condvar, Mutex, Ordering, TryLockError};

/// A message that was received.
pub(crate) struct Message {
    pub(crate) connection: Arc<Connection>,
    pub(crate) number: u8,
    pub(crate) class: Option<usize>,
}

/// A batch that is worked on where it lies.
pub(crate) type InPlaceBatch = lease::InPlaceBatch<Arc<Connection>>;

/// A worker's state.
pub(crate) struct WorkerState {
    pub(crate) lease: Lease<Arc<Connection>>,
    /// Answers to messages of the batch in place.
    held: Vec<u8>,
    held_for: Option<Arc<Connection>>,
    /// Kept for their memory.
    pub(crate) free: FreeLists,
}

impl WorkerState {
    pub(crate) fn new() -> Self {
        Self { lease: Lease::new(), held: Vec::new(), held_for: None, free: Vec::new() }
    }

    /// What a read brought, as batches: messages are of one byte.
    pub(crate) fn gather(&mut self, messages: Vec<u8>, batch_len: usize) -> Vec<MessageBatch> {
        let mut found = CutMessages::default();
        (0..messages.len()).for_each(|at| found.in_place(at..at + 1));
        let mut batches = Vec::new();
        found.gather(&Chunk::from_vec(messages), batch_len, &mut self.free, &mut batches);
        batches
    }

    pub(crate) fn pop(&mut self) -> Option<Message> {
        let one = self.lease.pop(&mut self.free)?;
        Some(Message { number: one.bytes[0], connection: one.source, class: one.class })
    }

    pub(crate) fn begin_in_place(&mut self) -> Option<InPlaceBatch> {
        let batch = self.lease.begin_in_place()?;
        self.held_for = Some(Arc::clone(&batch.source));
        Some(batch)
    }

    /// Keeps answers until they leave, with others.
    pub(crate) fn hold(&mut self, answers: &mut Vec<u8>) {
        self.held.append(answers);
    }

    /// They leave.
    pub(crate) fn queue_held(&mut self, batch: &InPlaceBatch) {
        batch.source.answer(&mut self.held);
    }

    pub(crate) fn grant_more(&mut self, batch: &InPlaceBatch, max: usize, grant: &mut lease::Grant) -> bool {
        self.lease.grant_more(batch, max, grant, &mut self.free)
    }

    /// `MessageSocket::done_in_place`.
    pub(crate) fn done_in_place(&mut self, batch: &InPlaceBatch) {
        self.held_for = None;
        batch.source.answer(&mut self.held);
    }

    /// The check of the timer thread. Whether there is still something, and what it revokes.
    fn check(&mut self) -> (bool, Vec<Taken<Arc<Connection>>>) {
        let check = self.lease.check();
        if !check.is_stalled {
            return (check.has_batches || !self.held.is_empty(), Vec::new());
        }
        if let Some(connection) = &self.held_for {
            connection.answer(&mut self.held);
        }
        (check.has_batches, check.revoked)
    }
}

/// The timer thread, as far as it checks leases. Its time passes as the schedule says: it may check again at once, or
/// when the worker is through.
#[derive(Default)]
pub(crate) struct TimerThread {
    leases: AtomicBool,
    list: Mutex<List>,
    changed: Condvar,
    pub(crate) workers: Mutex<Vec<Arc<Mutex<WorkerState>>>>,
}

#[derive(Default)]
struct List {
    hurried: bool,
    stop: bool,
}

impl TimerThread {
    /// A worker took several messages.
    pub(crate) fn watch_leases(&self) {
        if !self.leases.load(Ordering::SeqCst) && !self.leases.swap(true, Ordering::SeqCst) {
            self.list.lock().unwrap().hurried = true;
            self.changed.notify_one();
        }
    }

    pub(crate) fn stop(&self) {
        self.list.lock().unwrap().stop = true;
        self.changed.notify_one();
    }

    /// The thread; `give_back` is told what it revokes.
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
            while self.check_leases(&give_back) {
                if self.list.lock().unwrap().stop {
                    return;
                }
                thread::yield_now();
            }
        }
    }

    fn check_leases(&self, give_back: &impl Fn(Vec<Taken<Arc<Connection>>>)) -> bool {
        self.leases.store(false, Ordering::SeqCst);
        let workers = self.workers.lock().unwrap().clone();
        let mut any = false;
        for state in workers {
            let mut state = match state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::WouldBlock) => {
                    any = true;
                    continue;
                }
                Err(TryLockError::Poisoned(_)) => panic!("a worker died"),
            };
            let (has_lease, revoked) = state.check();
            drop(state);
            any |= has_lease;
            if !revoked.is_empty() {
                give_back(revoked);
            }
        }
        if any {
            self.leases.store(true, Ordering::SeqCst);
        }
        any
    }
}
