//! A combining lock: any thread may ask for work on a state, and one thread at a time does it for all.
//!
//! Both directions of a connection are worked on under one. A thread that learns that there is something to do marks the
//! state as pending; the thread that then finds the state free does the work, again until nothing is pending (the idea of
//! flat combining, Hendler et al., SPAA'10). No thread that has work waits for the work of another; one that
//! needs the state itself does ([`CombiningLock::lock`]).

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, TryLockError};

/// A state, and whether work on it is pending.
#[derive(Debug, Default)]
pub(crate) struct CombiningLock<T> {
    pending: AtomicBool,
    /// The thread that holds the state works, and will look at `pending` once more when it has let go.
    working: AtomicBool,
    state: Mutex<T>,
}

impl<T> CombiningLock<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { pending: AtomicBool::new(false), working: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Asks for work. `work` runs at least once after this call began, here or on the thread that works on the state
    /// now, and never on two threads at once.
    pub(crate) fn run(&self, mut work: impl FnMut(&mut T)) {
        self.pending.store(true, Ordering::SeqCst);
        loop {
            let mut state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The flag goes down before that thread's last look at `pending`, so the look is yet to come.
                Err(TryLockError::WouldBlock) if self.working.load(Ordering::SeqCst) => return,
                // A thread that accesses the state only, and never looks at `pending`: this is short.
                Err(TryLockError::WouldBlock) => self.lock(),
            };
            let working = Working::new(&self.working);
            if self.pending.swap(false, Ordering::SeqCst) {
                work(&mut state);
            }
            drop(working);
            drop(state);
            if !self.pending.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// The state, once no thread works on it: this waits for the work of the thread that has it. For a short access that waits
    /// for nothing else. Work that becomes pending meanwhile is done by the thread that asks for it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Keeps the flag up, and takes it down also when the work panics.
struct Working<'a>(&'a AtomicBool);

impl<'a> Working<'a> {
    fn new(flag: &'a AtomicBool) -> Self {
        flag.store(true, Ordering::SeqCst);
        Self(flag)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_asked_for_during_the_work_is_done_after_it() {
        let lock = CombiningLock::new(());
        let mut runs = 0;
        lock.run(|()| {
            runs += 1;
            if runs == 1 {
                // As another thread would: it finds the state taken and leaves.
                lock.run(|()| unreachable!("two at once"));
            }
        });
        assert_eq!(runs, 2);
    }

    #[test]
    fn a_request_waits_for_an_access_to_end() {
        let lock = CombiningLock::new(0);
        let (asks, asked) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let state = lock.lock();
            scope.spawn(|| {
                asks.send(()).unwrap();
                lock.run(|state| *state += 1);
            });
            asked.recv().unwrap();
            drop(state);
        });
        assert_eq!(*lock.lock(), 1);
    }

    #[test]
    fn a_panic_in_the_work_leaves_the_state_usable() {
        let lock = CombiningLock::new(0);
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.run(|_| std::panic::resume_unwind(Box::new(())));
        }));
        assert!(died.is_err());
        lock.run(|state| *state += 1);
        assert_eq!(*lock.lock(), 1);
        let _access = lock.lock();
        assert!(!lock.working.load(Ordering::SeqCst), "a request would rely on a dead thread");
    }
}
