//! Notes when a worker waits for events and when it has come out of its wait: the steering program prefers those who
//! wait.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

use libc::epoll_event;

use crate::process::{Process, now_ns, process};
use crate::table::{self, DescriptorKind, INSTANCES};
use crate::{pin, worker};

thread_local! {
    /// The instance this thread last waited on, plus 1; 0: none.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
    /// The epoll descriptor this thread last waited on, plus 1; 0: none.
    static LAST: Cell<c_int> = const { Cell::new(0) };
}

/// The worker that the calling thread is.
#[inline]
pub(crate) fn current() -> Option<usize> {
    (CURRENT.get() as usize).checked_sub(1)
}

/// The epoll descriptor that the calling thread last waited on, a worker's or not.
#[inline]
pub(crate) fn last_epoll() -> Option<c_int> {
    Some(LAST.get() - 1).filter(|epoll| *epoll >= 0)
}

/// The calling thread waits on this instance.
pub(crate) fn arrive(process: &Process, index: usize) {
    CURRENT.set(index as u32 + 1);
    pin::arrive(process, index);
}

/// Waits, with notes around it if the instance is a worker. Nothing is held while it waits: the thread may be cancelled
/// there, or jump out of a signal handler.
///
/// # Safety
///
/// `wait` has written as many events to `events` as it returns.
#[inline]
pub(crate) unsafe fn wait(epoll: c_int, events: *mut epoll_event, wait: impl FnOnce() -> c_int) -> c_int {
    LAST.set(epoll.saturating_add(1));
    match table::kind(epoll) {
        DescriptorKind::Epoll(index) => {
            let count = noted(index, wait);
            if count < 2 {
                return count;
            }
            // SAFETY: handed on from the caller.
            let events = unsafe { std::slice::from_raw_parts_mut(events, count as usize) };
            worker::merge(&INSTANCES[index], events) as c_int
        }
        _ => wait(),
    }
}

fn noted(index: usize, wait: impl FnOnce() -> c_int) -> c_int {
    let Some(process) = process() else { return wait() };
    // An index is used again: by a child that has closed its parent's instance, by a thread that has made a new one.
    if current() != Some(index) || process.thread[index].load(Ordering::Relaxed) == 0 {
        arrive(process, index);
    }
    let Some(worker) = worker::shared(&INSTANCES[index]) else { return wait() };
    // Several threads may wait on one instance: it is busy when all of them are.
    let waiting = &process.waiting[index];
    waiting.fetch_add(1, Ordering::Relaxed);
    worker.busy_since_ns.store(0, Ordering::Relaxed);
    let result = wait();
    let before = waiting.load(Ordering::Relaxed);
    if before == 0 || waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
        worker.busy_since_ns.store(now_ns(), Ordering::Relaxed);
    }
    if worker.stalled.load(Ordering::Relaxed) != 0 {
        worker.stalled.store(0, Ordering::Relaxed);
    }
    result
}
