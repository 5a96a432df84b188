//! What the stack of free slots is made of. In a file of its own, so that it can also be compiled against other primitives.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
