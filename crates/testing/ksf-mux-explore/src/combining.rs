//! The combining lock: threads ask for work, access the state, and leave.

use shuttle::thread;

use crate::combining_lock::CombiningLock;
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering};

/// `askers` threads each ask for work twice, `visitors` access the state meanwhile. Every request must be followed by
/// work, and no work runs beside another.
pub fn requests_are_followed_by_work(askers: usize, visitors: usize) {
    let posted = Arc::new(AtomicUsize::new(0));
    let inside = Arc::new(AtomicBool::new(false));
    let lock = Arc::new(CombiningLock::new(0));
    let mut threads = Vec::new();
    for _ in 0..askers {
        let (posted, inside, lock) = (Arc::clone(&posted), Arc::clone(&inside), Arc::clone(&lock));
        threads.push(thread::spawn(move || {
            for _ in 0..2 {
                posted.fetch_add(1, Ordering::SeqCst);
                lock.run(|seen| {
                    assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                    *seen = posted.load(Ordering::SeqCst);
                    inside.store(false, Ordering::SeqCst);
                });
            }
        }));
    }
    for _ in 0..visitors {
        let (inside, lock) = (Arc::clone(&inside), Arc::clone(&lock));
        threads.push(thread::spawn(move || {
            let seen = lock.lock();
            assert!(!inside.load(Ordering::SeqCst), "an access while another thread works");
            drop(seen);
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(*lock.lock(), 2 * askers, "a request was forgotten");
}
