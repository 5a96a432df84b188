//! The multiplexor's scheduler, batches, leases, wait set, combining lock and out-queue, compiled against primitives that
//! try one schedule of their threads after the other.
//!
//! The files of `ksf-mux` are compiled here unchanged; only `crate::sync` differs. Each module of scenarios plays what
//! surrounds them (workers, epoll, sockets) with few threads and few messages, and checks rules that must hold in every
//! schedule:
//!
//! | module | rules |
//! |---|---|
//! | [`queue`] | every message is taken once; nothing waits in a queue while a worker sleeps and no other looks; at most one wake-up per entry; batches of messages, also revoked by the timer thread from the middle of a grant; ordered queues and classes; what a throttled peer or the reservation of a reply parks |
//! | [`event_loops`] | one event loop is told of an event; nothing waits while a program does, whichever does not come |
//! | [`combining`] | work follows every request for it, on one thread at a time |
//! | [`sending`] | bytes leave whole, in order, once; what is not sent is returned or refused, once |
//!
//! A worker that should have been woken shows as a deadlock, which [shuttle] reports as a failure with its schedule.
//! `KSF_EXPLORE_REPLAY=<schedule> cargo test -p ksf-mux-explore <test>` runs that schedule again, and
//! `KSF_EXPLORE_FACTOR=100` tries a hundred times as many.
//!
//! What this does not show: shuttle interleaves whole operations, as if every access were sequentially consistent. The
//! scheduler, the combining lock and the out-queue use `SeqCst` where they rely on that; a weaker order would go unnoticed here.
//! The grants of a lease rely on a pair of barriers instead, which are nothing here (the lease's own tests meet them on
//! real CPUs). Schedules are sampled (uniformly, and by PCT with few preemptions), not enumerated.

#![forbid(unsafe_code)]
// A test build would also build the unit tests of the borrowed files, which are written for real threads.
#![cfg(not(test))]

#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/batch.rs"]
mod batch;
#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/combining_lock.rs"]
mod combining_lock;
#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/lease.rs"]
mod lease;
#[allow(dead_code, unreachable_pub, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/options.rs"]
mod options;
#[allow(dead_code, unreachable_pub, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/out_queue.rs"]
mod out_queue;
#[allow(dead_code, unreachable_pub, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/scheduler.rs"]
mod scheduler;
#[allow(dead_code, reason = "borrowed whole; the scenarios use a part")]
#[path = "../../../mux/ksf-mux/src/wait_set.rs"]
mod wait_set;

pub mod combining;
mod epoll;
pub mod event_loops;
pub mod queue;
pub mod sending;
mod sync;
mod worker_state;

use ksf_test::effort;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

/// Preemptions that PCT places in a schedule: bugs of more than three are rare (Burckhardt et al., ASPLOS'10).
const PREEMPTIONS: usize = 3;

/// Runs a scenario in a tenth of `schedules` schedules, in all of them in `make soak`: half of them uniformly random, half by
/// PCT. The same ones every time.
pub fn explore(schedules: usize, scenario: impl Fn() + Send + Sync + Copy + 'static) {
    if let Ok(schedule) = std::env::var("KSF_EXPLORE_REPLAY") {
        return shuttle::replay(scenario, &schedule);
    }
    let factor = std::env::var("KSF_EXPLORE_FACTOR").ok().and_then(|factor| factor.parse().ok());
    let half = (schedules * factor.unwrap_or(effort(1, 10))).div_ceil(20);
    let mut config = Config::new();
    config.silence_warnings = true;
    Runner::new(RandomScheduler::new_from_seed(SEED, half), config.clone()).run(scenario);
    Runner::new(PctScheduler::new_from_seed(SEED, PREEMPTIONS, half), config).run(scenario);
}

const SEED: u64 = 3;
