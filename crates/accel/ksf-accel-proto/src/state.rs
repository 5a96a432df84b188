//! The memory that the program's threads write, the steering program reads and the holder oversees.
//!
//! It is the one value of a `BPF_MAP_TYPE_ARRAY` with `BPF_F_MMAPABLE` (kernel 5.5); where there is no right to make
//! one, it is a memfd and only threads and holder use it. `crates/accel/ksf-accel/bpf/state.h` is its twin in C; a test
//! holds sizes and offsets against each other.
//!
//! Every field but [`Control::rescue_pending`] is written by one side: the table says which. Every process of the program can
//! write all of it, so steering programs and holder take it for hints: whom to prefer, whom to wake. Wrong values cost the
//! program locality. They give no process a queue or another program's connections, and they keep no rule alive.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// Changes with every change of the layout or of the messages.
pub const VERSION: u32 = 3;
/// Listeners of one accelerated program. One bit each in [`Worker::ready`].
pub const LISTENERS_MAX: usize = 64;
/// Workers of one accelerated program. A worker is an epoll instance, or a thread that blocks in `accept()`.
pub const WORKERS_MAX: usize = 256;
/// CPUs the steering program knows; more are folded onto these.
pub const CPUS_MAX: usize = 1024;
/// Workers that a CPU lists as its own; further ones are found by the search over all.
pub const HOME_MAX: usize = 15;
/// [`Worker::cpu`] of a worker without a home.
pub const NO_CPU: i32 = -1;

/// The whole value.
#[repr(C, align(64))]
pub struct State {
    /// Written by the holder.
    pub control: Control,
    /// Who lives on which CPU. Written by the holder.
    pub homes: [Home; CPUS_MAX],
    /// Written by each worker for itself, but for the fields marked otherwise.
    pub workers: [Worker; WORKERS_MAX],
}

/// Settings of the whole program. Written by the holder only, but for `rescue_pending`.
#[repr(C, align(64))]
pub struct Control {
    /// [`VERSION`].
    pub version: AtomicU32,
    /// 1: steer. 0: loaded but off, everything goes to the program's own listener.
    pub on: AtomicU32,
    /// Workers beyond this index have never been used: the end of every search.
    pub workers_end: AtomicU32,
    /// Unused.
    pub _pad: AtomicU32,
    /// A worker that has been away from its wait longer than this (ns) is passed over where another is not.
    pub busy_limit_ns: AtomicU64,
    /// Unused.
    pub _pad2: AtomicU64,
    /// Listeners (a bit each) whose rescue eventfd may be readable: a hint that saves the look. Set by the holder before
    /// it asks for a rescue, and by a worker that passes that on; cleared by the holder when none is asked for.
    pub rescue_pending: AtomicU64,
}

/// The workers whose home is one CPU: as many of `worker` as `len` says.
#[repr(C)]
pub struct Home {
    /// Used entries.
    pub len: std::sync::atomic::AtomicU8,
    /// Indexes into [`State::workers`].
    pub worker: [std::sync::atomic::AtomicU8; HOME_MAX],
}

/// One worker: a cache line that its thread writes, and one of counters.
#[repr(C, align(128))]
pub struct Worker {
    /// Listeners (a bit each) whose queue this worker serves now. Set after the queue is in the epoll instance,
    /// cleared before it is taken out.
    pub ready: AtomicU64,
    /// `CLOCK_MONOTONIC` (ns) when the worker left its wait; 0 while it waits.
    pub busy_since_ns: AtomicU64,
    /// Counts the uses of this index. Written by the holder when it gives the index away.
    pub generation: AtomicU32,
    /// CPU this worker is at home on, or [`NO_CPU`]. Written by the holder.
    pub cpu: AtomicI32,
    /// Process id of its owner; 0: free. Written by the holder.
    pub pid: AtomicU32,
    /// 1: the holder has found this worker's queue untouched; steering passes it over. The worker clears it when it
    /// comes out of its wait.
    pub stalled: AtomicU32,
    /// Unused.
    pub _pad: [AtomicU64; 4],

    /// Connections accepted from its own queue.
    pub accepted_own: AtomicU64,
    /// Connections accepted from the program's own listener: the fallback.
    pub accepted_fallback: AtomicU64,
    /// Connections accepted from other workers' queues.
    pub accepted_stolen: AtomicU64,
    /// Connection requests that arrived on the worker's CPU. Written by the steering program.
    pub steered_local: AtomicU64,
    /// Connection requests that arrived on another CPU. Written by the steering program.
    pub steered_remote: AtomicU64,
    /// Unused.
    pub _pad2: [AtomicU64; 3],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_not_shared_between_workers() {
        assert_eq!(size_of::<Worker>(), 128);
        assert_eq!(std::mem::offset_of!(Worker, accepted_own), 64);
        assert_eq!(size_of::<Control>(), 64);
        assert_eq!(size_of::<Home>(), 16);
        assert_eq!(std::mem::offset_of!(State, workers) % 128, 0);
    }
}
