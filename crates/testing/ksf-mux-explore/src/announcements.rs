//! The baton: threads announce work, look at the state, and leave.

use shuttle::thread;

use crate::baton::Baton;
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering};

/// `announcers` threads each announce twice, `visitors` look at the state meanwhile. Every announcement must be
/// followed by work, and no work runs beside another.
pub fn are_followed_by_work(announcers: usize, visitors: usize) {
    let posted = Arc::new(AtomicUsize::new(0));
    let inside = Arc::new(AtomicBool::new(false));
    let baton = Arc::new(Baton::new(0));
    let mut threads = Vec::new();
    for _ in 0..announcers {
        let (posted, inside, baton) = (Arc::clone(&posted), Arc::clone(&inside), Arc::clone(&baton));
        threads.push(thread::spawn(move || {
            for _ in 0..2 {
                posted.fetch_add(1, Ordering::SeqCst);
                baton.run(|seen| {
                    assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                    *seen = posted.load(Ordering::SeqCst);
                    inside.store(false, Ordering::SeqCst);
                });
            }
        }));
    }
    for _ in 0..visitors {
        let (inside, baton) = (Arc::clone(&inside), Arc::clone(&baton));
        threads.push(thread::spawn(move || {
            let seen = baton.lock();
            assert!(!inside.load(Ordering::SeqCst), "a look while somebody works");
            drop(seen);
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(*baton.lock(), 2 * announcers, "an announcement was forgotten");
}
