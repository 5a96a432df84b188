//! What `crate::sync` is here: primitives whose every operation is a place where the schedule may turn.

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, TryLockError};
