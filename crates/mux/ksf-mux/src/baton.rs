//! One at a time, and never forgotten: a state that any thread may be asked to look after, but only one does.
//!
//! Both directions of a connection are looked after like this. Whoever learns that there is something to do announces
//! it; whoever then finds the state free does it, again until nothing is announced. Nobody waits for somebody's work,
//! only for somebody's look ([`Baton::lock`]).

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, TryLockError};

/// A state with an announcement board.
#[derive(Debug, Default)]
pub(crate) struct Baton<T> {
    announced: AtomicBool,
    /// Whoever holds the state works, and will look at the board once more when it has let go.
    working: AtomicBool,
    state: Mutex<T>,
}

impl<T> Baton<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { announced: AtomicBool::new(false), working: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Announces that there is something to do. `work` runs at least once after this call began, here or on the
    /// thread that works with the state now, and never on two threads at once.
    pub(crate) fn run(&self, mut work: impl FnMut(&mut T)) {
        self.announced.store(true, Ordering::SeqCst);
        loop {
            let mut state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The flag goes down before that thread's last look at the board, so the look is yet to come.
                Err(TryLockError::WouldBlock) if self.working.load(Ordering::SeqCst) => return,
                // Somebody who looks at the state only, and never at the board: this is short.
                Err(TryLockError::WouldBlock) => self.lock(),
            };
            let working = Working::new(&self.working);
            if self.announced.swap(false, Ordering::SeqCst) {
                work(&mut state);
            }
            drop(working);
            drop(state);
            if !self.announced.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// The state, once nobody works on it, for a short look that does not wait for anything. What is announced
    /// meanwhile is done by whoever announces it.
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
    fn what_is_announced_during_the_work_is_done_after_it() {
        let baton = Baton::new(());
        let mut runs = 0;
        baton.run(|()| {
            runs += 1;
            if runs == 1 {
                // As another thread would: it finds the state taken and leaves.
                baton.run(|()| unreachable!("two at once"));
            }
        });
        assert_eq!(runs, 2);
    }

    #[test]
    fn an_announcement_waits_for_a_look_to_end() {
        let baton = Baton::new(0);
        let (looks, looked) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let state = baton.lock();
            scope.spawn(|| {
                looks.send(()).unwrap();
                baton.run(|state| *state += 1);
            });
            looked.recv().unwrap();
            drop(state);
        });
        assert_eq!(*baton.lock(), 1);
    }

    #[test]
    fn a_panic_in_the_work_leaves_the_state_usable() {
        let baton = Baton::new(0);
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            baton.run(|_| std::panic::resume_unwind(Box::new(())));
        }));
        assert!(died.is_err());
        baton.run(|state| *state += 1);
        assert_eq!(*baton.lock(), 1);
        let _look = baton.lock();
        assert!(!baton.working.load(Ordering::SeqCst), "an announcement would rely on a dead thread");
    }
}
