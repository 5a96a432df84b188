//! One at a time, and never forgotten: a state that any thread may be asked to look after, but only one does.
//!
//! Both directions of a connection are looked after like this. Whoever learns that there is something to do announces
//! it; whoever then finds the state free does it, again until nothing is announced. Nobody waits for anybody.

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, TryLockError, fence};

/// A state with an announcement board.
#[derive(Debug, Default)]
pub(crate) struct Baton<T> {
    announced: AtomicBool,
    state: Mutex<T>,
}

impl<T> Baton<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { announced: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Announces that there is something to do. `work` runs at least once after this call began, here or on the
    /// thread that holds the state now, and never on two threads at once.
    pub(crate) fn run(&self, mut work: impl FnMut(&mut T)) {
        self.announced.store(true, Ordering::SeqCst);
        loop {
            // Pairs with the fence of the holder below: either it sees the announcement, or this sees the state free.
            fence(Ordering::SeqCst);
            let mut state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            if self.announced.swap(false, Ordering::SeqCst) {
                work(&mut state);
            }
            drop(state);
            fence(Ordering::SeqCst);
            if !self.announced.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// The state, once nobody works on it. What is announced meanwhile is left to the caller: it calls [`Self::run`]
    /// afterwards if that matters.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
