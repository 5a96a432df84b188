//! CPUs that a test may use.

use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::skip;

/// Numbers of the CPUs that the calling thread may use, in order.
pub fn cpus() -> Vec<usize> {
    let set = sched_getaffinity(None).expect("a thread may ask for its CPUs");
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// The first two of [`cpus`]; `None`: the test is skipped.
#[track_caller]
pub fn two_cpus_or_skip() -> Option<[usize; 2]> {
    let two = cpus().first_chunk().copied();
    if two.is_none() {
        skip("needs two CPUs");
    }
    two
}

/// Binds the calling thread, and what it starts from now on, to a CPU.
pub fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("the CPU is there");
}

/// Runs `action` on a CPU, in the network namespace of the calling thread.
pub fn on_cpu<T: Send>(cpu: usize, action: impl FnOnce() -> T + Send) -> T {
    let pinned = || {
        pin(cpu);
        action()
    };
    thread::scope(|scope| scope.spawn(pinned).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
