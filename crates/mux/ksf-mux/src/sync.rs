//! The primitives that threads meet at. `ksf-mux-explore` compiles the files that use them against others, which try
//! schedules one after the other.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, MutexGuard, TryLockError};
#[cfg(not(debug_assertions))]
pub(crate) use std::sync::{Mutex, RwLock};

use std::sync::OnceLock;
use std::sync::atomic::{compiler_fence, fence};

use rustix::thread::{MembarrierCommand, membarrier};

#[cfg(debug_assertions)]
pub(crate) use crate::watched::{Mutex, RwLock};

/// membarrier(2) makes one thread pay for the barriers of all (since 4.14; a filter of system calls may forbid it).
fn has_membarrier() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok())
}

/// The side of a pair of barriers that is passed often. Before this, stores are seen by a thread that
/// passes [`heavy_barrier`] later; after it, loads see what was stored before an earlier one.
#[inline]
pub(crate) fn light_barrier() {
    if has_membarrier() {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The side that is passed seldom: some microseconds, and an interrupt on each CPU that runs a thread of this process.
/// False: it was no barrier. The kernel may lack memory for a moment, and a filter of system calls may have come since.
#[must_use]
pub(crate) fn heavy_barrier() -> bool {
    fence(Ordering::SeqCst);
    !has_membarrier() || membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}
