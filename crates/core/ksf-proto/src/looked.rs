//! Bytes that scanners looked at, counted in tests alone: one that is resumed must not begin anew.

/// Counts `bytes` that were looked at.
#[cfg(not(test))]
pub(crate) fn add(_bytes: usize) {}

#[cfg(test)]
pub(crate) use counted::{add, bytes_of};

#[cfg(test)]
mod counted {
    use std::cell::Cell;

    thread_local!(static LOOKED: Cell<usize> = const { Cell::new(0) });

    pub(crate) fn add(bytes: usize) {
        LOOKED.set(LOOKED.get() + bytes);
    }

    /// Bytes that `work` looks at.
    pub(crate) fn bytes_of(work: impl FnOnce()) -> usize {
        LOOKED.set(0);
        work();
        LOOKED.get()
    }
}
