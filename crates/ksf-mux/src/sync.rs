//! The primitives that threads meet at. `ksf-mux-explore` compiles the files that use them against others, which try
//! schedules one after the other.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, RwLock, TryLockError};
