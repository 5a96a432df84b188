//! Binds the thread that waits on an epoll instance to the CPU whose connections its queue gets.
//!
//! Threads and processes that it makes are not bound: they inherit the mask that the thread had before. A thread that
//! the program has bound itself is left alone, and so are several threads that wait on one instance.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

use crate::process::{MANY, Process, process, thread_id};
use crate::table::INSTANCES;

thread_local! {
    /// The mask before this thread was bound, and the instance it was bound for.
    static BOUND: Cell<Option<(CpuSet, usize)>> = const { Cell::new(None) };
}

/// The CPU this thread is bound to, if it may not run on others.
pub(crate) fn only_cpu() -> Option<usize> {
    let mask = sched_getaffinity(None).ok()?;
    (mask.count() == 1).then(|| (0..CpuSet::MAX_CPU).find(|cpu| mask.is_set(*cpu))).flatten()
}

/// This thread waits on the instance, for the first time since it last waited on another.
#[cold]
pub(crate) fn arrive(process: &Process, index: usize) {
    let (thread, tid) = (&process.thread[index], thread_id());
    match thread.compare_exchange(0, tid, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => bind(index),
        Err(other) if other == tid || other == MANY => {}
        Err(other) => {
            thread.store(MANY, Ordering::Relaxed);
            if let (Ok(mask), Some(other)) = (sched_getaffinity(None), Pid::from_raw(other as i32)) {
                let _ = sched_setaffinity(Some(other), &mask);
            }
        }
    }
}

/// The instance has got its CPU while this thread, which waits on it, is at work.
pub(crate) fn settle(process: &Process, index: usize) {
    if process.thread[index].load(Ordering::Relaxed) == thread_id() {
        bind(index);
    }
}

fn bind(index: usize) {
    let Some(cpu) = INSTANCES[index].cpu.load(Ordering::Relaxed).checked_sub(1) else { return };
    let Ok(mask) = sched_getaffinity(None) else { return };
    let cpu = cpu as usize;
    if cpu < CpuSet::MAX_CPU && mask.count() > 1 && mask.is_set(cpu) && set_only(cpu) {
        BOUND.set(Some((mask, index)));
    }
}

fn set_only(cpu: usize) -> bool {
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(None, &one).is_ok()
}

/// Does what makes a thread or process, with the mask it would have had without this library.
pub(crate) fn unbound(make: impl FnOnce() -> c_int) -> c_int {
    let Some((mask, index)) = BOUND.get() else { return make() };
    let is_bound = process().is_some_and(|process| process.thread[index].load(Ordering::Relaxed) == thread_id());
    let _ = sched_setaffinity(None, &mask);
    let result = make();
    if let Some(cpu) = INSTANCES[index].cpu.load(Ordering::Relaxed).checked_sub(1)
        && is_bound
    {
        set_only(cpu as usize);
    }
    result
}

/// In a `fork()` child: it is no worker yet.
pub(crate) extern "C" fn forked() {
    if let Some((mask, _)) = BOUND.take() {
        let _ = sched_setaffinity(None, &mask);
    }
}
