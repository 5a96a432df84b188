//! Binds the thread that waits on an epoll instance, or blocks in `accept()`, to the CPU whose connections its queue gets.
//!
//! Threads and processes that it makes are not bound: they inherit the mask that the thread had before. A thread that
//! the program has bound itself is left alone, and so are several threads that wait on one instance.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

use crate::process::{MANY, Process, process, thread_id};
use crate::table::INSTANCES;

/// How a thread was bound.
#[derive(Clone, Copy)]
struct Bound {
    /// Its mask before.
    mask: CpuSet,
    cpu: usize,
    /// The instance it was bound for.
    index: usize,
}

thread_local! {
    static BOUND: Cell<Option<Bound>> = const { Cell::new(None) };
}

/// How this thread is bound, unless the program has given it another mask since.
fn bound() -> Option<Bound> {
    let bound = BOUND.get()?;
    if only_cpu() != Some(bound.cpu) {
        BOUND.set(None);
        return None;
    }
    Some(bound)
}

/// The CPU this thread is bound to, if it may not run on others.
pub(crate) fn only_cpu() -> Option<usize> {
    let mask = sched_getaffinity(None).ok()?;
    (mask.count() == 1).then(|| (0..CpuSet::MAX_CPU).find(|cpu| mask.is_set(*cpu))).flatten()
}

/// This thread waits on the instance, for the first time since it last waited on another, or blocks in `accept()`. An
/// instance that is the parent's may be waited on by many children: those are not bound to the parent's CPU.
#[cold]
pub(crate) fn arrive(process: &Process, index: usize) {
    let (thread, tid) = (&process.thread[index], thread_id());
    match thread.compare_exchange(0, tid, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) if process.owns(index) => bind(index),
        Ok(_) => {}
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
        BOUND.set(Some(Bound { mask, cpu, index }));
    }
}

/// The instance serves nothing any more: this thread, if it was bound for it, may run where it might before.
pub(crate) fn leave(process: &Process, index: usize) {
    if let Some(bound) = BOUND.get().filter(|bound| bound.index == index) {
        if self::bound().is_some() {
            let _ = sched_setaffinity(None, &bound.mask);
        }
        BOUND.set(None);
        // Where it waits for a listener again, it is bound again.
        process.thread[index].store(0, Ordering::Relaxed);
    }
}

fn set_only(cpu: usize) -> bool {
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(None, &one).is_ok()
}

/// Does what makes a thread or process, with the mask it would have had without this library.
pub(crate) fn unbound<T>(make: impl FnOnce() -> T) -> T {
    let Some(Bound { mask, cpu, index }) = bound() else { return make() };
    let is_bound = process().is_some_and(|process| process.thread[index].load(Ordering::Relaxed) == thread_id());
    let _ = sched_setaffinity(None, &mask);
    let result = make();
    if is_bound {
        set_only(cpu);
    }
    result
}

/// In a `fork()` child: it is no worker yet.
pub(crate) extern "C" fn forked() {
    if let Some(bound) = bound() {
        let _ = sched_setaffinity(None, &bound.mask);
    }
    BOUND.set(None);
}
