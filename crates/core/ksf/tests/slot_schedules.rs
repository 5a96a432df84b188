//! The stack of free slots in sampled schedules of the threads that take slots and give them back.
//!
//! `src/pool/free.rs` is compiled here unchanged against primitives that run one schedule after the other ([shuttle]).
//! `KSF_EXPLORE_REPLAY=<schedule>` runs the schedule of a failure again. Shuttle interleaves whole operations, as if every
//! access were sequentially consistent: a memory order that is too weak goes unnoticed.

#[path = "../src/pool/free.rs"]
mod free;

/// The primitives of `src/pool/sync.rs`, with a place to switch threads in front of each operation.
mod sync {
    pub(super) use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}

use free::FreeStack;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use shuttle::{Config, Runner, thread};

/// The same schedules every time.
const SEED: u64 = 3;
/// Preemptions that PCT places in a schedule.
const PREEMPTIONS: usize = 3;
const SCHEDULES: usize = 5_000;

fn explore(scenario: impl Fn() + Send + Sync + Copy + 'static) {
    if let Ok(schedule) = std::env::var("KSF_EXPLORE_REPLAY") {
        return shuttle::replay(scenario, &schedule);
    }
    let mut config = Config::new();
    config.silence_warnings = true;
    Runner::new(RandomScheduler::new_from_seed(SEED, SCHEDULES), config.clone()).run(scenario);
    Runner::new(PctScheduler::new_from_seed(SEED, PREEMPTIONS, SCHEDULES), config).run(scenario);
}

/// Slots, of which each knows whether somebody has it.
struct Slots {
    free: FreeStack,
    links: Vec<AtomicU32>,
    taken: Vec<AtomicBool>,
}

impl Slots {
    fn new(slots: u32) -> Arc<Self> {
        let links = (0..slots).map(|_| AtomicU32::new(0)).collect();
        let taken = (0..slots).map(|_| AtomicBool::new(true)).collect();
        let slots = Self { free: FreeStack::default(), links, taken };
        (0..slots.links.len() as u32).for_each(|index| slots.give_back(index));
        Arc::new(slots)
    }

    fn take(&self) -> Option<u32> {
        let index = self.free.pop(|index| &self.links[index as usize])?;
        self.is_taken(index);
        Some(index)
    }

    fn take_all(&self) -> Vec<u32> {
        let mut all = Vec::new();
        self.free.take_all(&mut all, |index| &self.links[index as usize]);
        all.iter().for_each(|index| self.is_taken(*index));
        all
    }

    fn is_taken(&self, index: u32) {
        let before = self.taken[index as usize].swap(true, Ordering::SeqCst);
        assert!(!before, "slot {index} was given out twice");
    }

    fn give_back(&self, index: u32) {
        self.taken[index as usize].store(false, Ordering::SeqCst);
        self.free.push(index, |index| &self.links[index as usize]);
    }

    fn assert_whole(&self) {
        let mut all = self.take_all();
        all.sort_unstable();
        assert_eq!(all, (0..self.links.len() as u32).collect::<Vec<_>>(), "a slot was lost");
    }
}

/// Each thread holds two slots at a time and gives the first back first: the order of the stack changes, and the same
/// slot is on top again above other ones.
#[test]
fn a_slot_is_given_out_once_at_a_time_and_none_is_lost() {
    explore(|| {
        let slots = Slots::new(3);
        let work = |slots: Arc<Slots>| {
            move || {
                for _ in 0..2 {
                    let held = [slots.take(), slots.take()];
                    held.into_iter().flatten().for_each(|index| slots.give_back(index));
                }
            }
        };
        let threads: Vec<_> = (0..3).map(|_| thread::spawn(work(Arc::clone(&slots)))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        slots.assert_whole();
    });
}

/// The owner of long slots takes all that came back, while others give back and take.
#[test]
fn all_that_came_back_is_taken_at_once() {
    explore(|| {
        let slots = Slots::new(3);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let slots = Arc::clone(&slots);
                thread::spawn(move || {
                    for _ in 0..2 {
                        slots.take().into_iter().for_each(|index| slots.give_back(index));
                    }
                })
            })
            .collect();
        for _ in 0..2 {
            slots.take_all().into_iter().for_each(|index| slots.give_back(index));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        slots.assert_whole();
    });
}
