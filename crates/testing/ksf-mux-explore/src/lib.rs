//! The multiplexor's scheduler, runs, hand, herd, baton and out-queue, compiled against primitives that try one schedule
//! of their threads after the other.
//!
//! The files of `ksf-mux` are compiled here unchanged; only `crate::sync` differs. Each module of scenarios plays what
//! surrounds them (workers, epoll, sockets) with few threads and few messages, and checks rules that must hold in every
//! schedule:
//!
//! | module | rules |
//! |---|---|
//! | [`queue`] | every message is taken once; nothing waits in a queue while a worker sleeps and nobody looks; at most one wake-up per entry; runs of messages, also taken back by the keeper from the middle of a grant; lanes and classes |
//! | [`event_loops`] | one event loop hears of an event; nothing waits while a program does, whoever does not come |
//! | [`announcements`] | work follows every announcement, on one thread at a time |
//! | [`sending`] | bytes leave whole, in order, once; what is not sent is returned or refused, once |
//!
//! A worker that should have been woken shows as a deadlock, which [shuttle] reports as a failure with its schedule.
//! `KSF_EXPLORE_REPLAY=<schedule> cargo test -p ksf-mux-explore <test>` runs that schedule again, and
//! `KSF_EXPLORE_FACTOR=100` tries a hundred times as many.
//!
//! What this does not show: shuttle interleaves whole operations, as if every access were sequentially consistent. The
//! scheduler, the baton and the out-queue use `SeqCst` where they rely on that; a weaker order would go unnoticed here.
//! The hand's grants rely on a pair of barriers instead, which are nothing here (the hand's own tests meet them on real
//! CPUs). Schedules are sampled (uniformly, and by PCT with few preemptions), not enumerated.

#![forbid(unsafe_code)]
// A test build would also build the unit tests of the borrowed files, which are written for real threads.
#![cfg(not(test))]

#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/baton.rs"]
mod baton;
#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/hand.rs"]
mod hand;
#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/herd.rs"]
mod herd;
#[allow(dead_code, unreachable_pub, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/options.rs"]
mod options;
#[allow(dead_code, unreachable_pub, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/outbox.rs"]
mod outbox;
#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/run.rs"]
mod run;
#[allow(dead_code, unreachable_pub, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/scheduler.rs"]
mod scheduler;

pub mod announcements;
mod epoll;
pub mod event_loops;
mod own;
pub mod queue;
pub mod sending;
mod sync;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

/// Preemptions that PCT places in a schedule: bugs of more than three are rare (Burckhardt et al., ASPLOS'10).
const PREEMPTIONS: usize = 3;

/// Runs a scenario in `schedules` schedules, half of them uniformly random, half by PCT. The same ones every time.
pub fn explore(schedules: usize, scenario: impl Fn() + Send + Sync + Copy + 'static) {
    if let Ok(schedule) = std::env::var("KSF_EXPLORE_REPLAY") {
        return shuttle::replay(scenario, &schedule);
    }
    let factor = std::env::var("KSF_EXPLORE_FACTOR").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1);
    let half = (schedules * factor).div_ceil(2);
    let mut config = Config::new();
    config.silence_warnings = true;
    Runner::new(RandomScheduler::new_from_seed(SEED, half), config.clone()).run(scenario);
    Runner::new(PctScheduler::new_from_seed(SEED, PREEMPTIONS, half), config).run(scenario);
}

const SEED: u64 = 3;
