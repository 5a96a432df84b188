//! What `crate::sync` is here: primitives whose every operation is a place where the schedule may turn.

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, TryLockError};

/// A place where the schedule may turn is all that a barrier is here: every access is sequentially consistent.
pub(crate) fn light_barrier() {}

/// See [`light_barrier`].
pub(crate) fn heavy_barrier() -> bool {
    true
}
