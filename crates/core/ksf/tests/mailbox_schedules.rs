//! The shard's mailbox in sampled schedules of the threads that post and of the shard that takes.
//!
//! `src/deferred/queue.rs` is compiled here unchanged against primitives that run one schedule after the other
//! ([shuttle]). `KSF_EXPLORE_REPLAY=<schedule>` runs the schedule of a failure again. Shuttle interleaves whole
//! operations, as if every access were sequentially consistent: a memory order that is too weak goes unnoticed.

#[path = "../src/deferred/queue.rs"]
mod queue;

/// The primitives of `src/deferred/sync.rs`, with a place to switch threads in front of each operation.
mod sync {
    use shuttle::sync::Condvar;

    pub(super) use shuttle::sync::atomic::{AtomicBool, Ordering};
    pub(super) use shuttle::sync::{Mutex, MutexGuard, PoisonError};

    /// An event descriptor under a poller that is level-triggered, as epoll is.
    #[derive(Debug, Default)]
    pub(crate) struct Event {
        count: Mutex<u64>,
        written: Condvar,
    }

    impl Event {
        pub(crate) fn write(&self) {
            *self.count.lock().unwrap() += 1;
            self.written.notify_all();
        }

        pub(crate) fn read(&self) {
            *self.count.lock().unwrap() = 0;
        }

        pub(crate) fn is_readable(&self) -> bool {
            *self.count.lock().unwrap() > 0
        }

        /// Sleeps until it is readable. One that stays so although items are left to take is a deadlock, which shuttle
        /// reports.
        pub(crate) fn wait(&self) {
            let mut count = self.count.lock().unwrap();
            while *count == 0 {
                count = self.written.wait(count).unwrap();
            }
        }
    }
}

use queue::Queue;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Arc;
use shuttle::{Config, Runner, thread};

/// The same schedules every time.
const SEED: u64 = 3;
/// Preemptions that PCT places in a schedule.
const PREEMPTIONS: usize = 3;

fn explore(schedules: usize, scenario: impl Fn() + Send + Sync + Copy + 'static) {
    if let Ok(schedule) = std::env::var("KSF_EXPLORE_REPLAY") {
        return shuttle::replay(scenario, &schedule);
    }
    let mut config = Config::new();
    config.silence_warnings = true;
    Runner::new(RandomScheduler::new_from_seed(SEED, schedules), config.clone()).run(scenario);
    Runner::new(PctScheduler::new_from_seed(SEED, PREEMPTIONS, schedules), config).run(scenario);
}

/// `producers` post `items` each, while the consumer takes `turns` turns that something else caused, and then one per
/// wake-up until it has everything.
fn every_item_is_taken_and_no_wake_up_is_left(producers: u32, items: u32, turns: u32) {
    let queue = Arc::new(Queue::new(sync::Event::default()));
    let threads: Vec<_> = (0..producers)
        .map(|producer| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || (0..items).for_each(|item| queue.push((producer, item))))
        })
        .collect();
    let mut taken = Vec::new();
    let turn = |taken: &mut Vec<_>| queue.take(queue.event().is_readable(), taken);
    for _ in 0..turns {
        turn(&mut taken);
    }
    while taken.len() < (producers * items) as usize {
        queue.event().wait();
        turn(&mut taken);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for producer in 0..producers {
        let of_this = taken.iter().filter(|(from, _)| *from == producer).map(|(_, item)| *item);
        assert!(of_this.eq(0..items), "lost, doubled or out of order: {taken:?}");
    }
    if queue.event().is_readable() {
        turn(&mut taken);
    }
    assert!(!queue.event().is_readable(), "every further wait would end at once, for nothing");
}

#[test]
fn no_schedule_loses_mail_or_leaves_a_wake_up_that_nobody_takes() {
    explore(5_000, || every_item_is_taken_and_no_wake_up_is_left(1, 1, 1));
    explore(5_000, || every_item_is_taken_and_no_wake_up_is_left(1, 3, 2));
    explore(5_000, || every_item_is_taken_and_no_wake_up_is_left(2, 2, 2));
    explore(5_000, || every_item_is_taken_and_no_wake_up_is_left(3, 1, 3));
}
