//! A mark for each descriptor number.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

/// A number for each of the descriptors 0 to `N` - 1: 0, until it is set. Reading takes no lock, so a handler that
/// interrupts a writer finds the number before or after. Writers agree among themselves.
#[derive(Debug)]
pub struct Marks<const N: usize> {
    marks: [AtomicU16; N],
    /// All that are not 0 are below.
    end: AtomicU32,
}

impl<const N: usize> Marks<N> {
    /// All of them 0.
    #[allow(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self { marks: [const { AtomicU16::new(0) }; N], end: AtomicU32::new(0) }
    }

    /// The mark of a descriptor: a load and a compare. `None`: the number is too high, or negative.
    #[inline]
    pub fn get(&self, fd: c_int) -> Option<u16> {
        self.marks.get(fd as usize).map(|mark| mark.load(Ordering::Acquire))
    }

    /// Sets it. False where the number is too high, or negative.
    pub fn set(&self, fd: c_int, mark: u16) -> bool {
        let Some(place) = self.marks.get(fd as usize) else { return false };
        if mark != 0 {
            self.end.fetch_max(fd as u32 + 1, Ordering::Relaxed);
        }
        place.store(mark, Ordering::Release);
        true
    }

    /// The descriptors from `first` to `last`, both included, whose marks are not 0, with these.
    pub fn marked(&self, first: u32, last: u32) -> impl Iterator<Item = (c_int, u16)> {
        let end = last.saturating_add(1).min(self.end.load(Ordering::Relaxed));
        (first..end).filter_map(move |fd| Some((fd as c_int, self.get(fd as c_int).filter(|mark| *mark != 0)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_in_their_range() {
        static MARKS: Marks<16> = Marks::new();
        assert!(MARKS.set(3, 7) && MARKS.set(9, 8) && MARKS.set(9, 0) && MARKS.set(15, 1));
        assert!(!MARKS.set(16, 1) && !MARKS.set(-1, 1));
        assert_eq!((MARKS.get(3), MARKS.get(9), MARKS.get(16), MARKS.get(-1)), (Some(7), Some(0), None, None));
        assert_eq!(MARKS.marked(0, u32::MAX).collect::<Vec<_>>(), [(3, 7), (15, 1)]);
        assert_eq!(MARKS.marked(4, 14).count(), 0);
    }
}
