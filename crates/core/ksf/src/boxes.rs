//! Boxes for state that few connections have at a time: a connection without it takes a pointer's room for it.

use std::fmt;

/// Boxes to use again, at most `COUNT_MAX`, so that state which comes and goes with messages costs no allocation.
pub(crate) struct Boxes<T, const COUNT_MAX: usize>(Vec<Box<T>>);

impl<T: Default, const COUNT_MAX: usize> Boxes<T, COUNT_MAX> {
    /// Boxes in it.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// A box whose value is as new, but for memory that it kept.
    #[inline]
    pub(crate) fn take(&mut self) -> Box<T> {
        self.pop().unwrap_or_default()
    }

    pub(crate) fn pop(&mut self) -> Option<Box<T>> {
        self.0.pop()
    }

    /// Takes a box back whose value is as new.
    #[inline]
    pub(crate) fn give(&mut self, spare: Box<T>) {
        if self.0.len() < COUNT_MAX {
            self.0.push(spare);
        }
    }
}

impl<T, const COUNT_MAX: usize> Default for Boxes<T, COUNT_MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const COUNT_MAX: usize> fmt::Debug for Boxes<T, COUNT_MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Boxes").field("kept", &self.0.len()).finish()
    }
}
