//! Buffers and lists that replies use again.

use crate::boxes::Boxes;

use super::Front;

/// Lists of pieces kept per shard for those that have none.
const FRONTS_MAX: usize = 256;

/// Buffers to use again, so that a connection without replies holds none and one with replies allocates none.
#[derive(Debug)]
pub struct Spares {
    small: Vec<Vec<u8>>,
    small_bytes: usize,
    small_bytes_max: usize,
    /// Buffers above [`Spares::SMALL_BYTES_MAX`], for batches that outgrow a small one.
    large: Vec<Vec<u8>>,
    large_bytes: usize,
    large_bytes_max: usize,
    pub(super) fronts: Boxes<Front, FRONTS_MAX>,
}

impl Default for Spares {
    fn default() -> Self {
        Self::within(usize::MAX)
    }
}

impl Spares {
    /// Small buffers kept per shard: as many connections may have replies behind gates at a time without an allocation.
    const COUNT_MAX: usize = 1024;
    /// Bytes of them.
    const ALL_SMALL_BYTES_MAX: usize = 16 << 20;
    pub(super) const BYTES_MIN: usize = 4 << 10;
    pub(super) const SMALL_BYTES_MAX: usize = 64 << 10;
    /// A larger buffer is given back to the allocator.
    const BYTES_MAX: usize = 4 << 20;
    /// Bytes of large buffers kept per shard.
    const LARGE_BYTES_MAX: usize = 32 << 20;
    /// Pieces in a list that is kept: a longer one is given back, too.
    const PIECES_MAX: usize = 256;

    /// Keeps at most a sixteenth of `shard_bytes_max` in small buffers, and an eighth in large ones: what is kept does not count
    /// among the replies. By default, and with the default limit, that is 16 MiB and 32 MiB.
    pub fn within(shard_bytes_max: usize) -> Self {
        Self {
            small: Vec::new(),
            small_bytes: 0,
            small_bytes_max: Self::ALL_SMALL_BYTES_MAX.min(shard_bytes_max / 16),
            large: Vec::new(),
            large_bytes: 0,
            large_bytes_max: Self::LARGE_BYTES_MAX.min(shard_bytes_max / 8),
            fronts: Boxes::default(),
        }
    }

    /// Small buffers, and lists of pieces, that other threads find for their answers.
    const REFILL_COUNT: usize = 32;

    /// Takes as many from another one as threads need for some answers in pieces.
    pub(crate) fn refill(&mut self, from: &mut Self) {
        while self.small.len() < Self::REFILL_COUNT
            && let Some(buffer) = from.take_small()
        {
            self.give(buffer);
        }
        while self.fronts.len() < Self::REFILL_COUNT
            && let Some(front) = from.fronts.pop()
        {
            self.fronts.give(front);
        }
    }

    /// Takes all of another one.
    pub(crate) fn add(&mut self, mut other: Self) {
        if self.small.is_empty() && self.large.is_empty() && self.fronts.len() == 0 {
            return *self = other;
        }
        other.small.drain(..).chain(other.large.drain(..)).for_each(|buffer| self.give(buffer));
        while let Some(front) = other.fronts.pop() {
            self.fronts.give(front);
        }
    }

    /// An empty buffer with some room.
    pub fn take(&mut self) -> Vec<u8> {
        self.take_small().unwrap_or_else(|| Vec::with_capacity(Self::BYTES_MIN))
    }

    #[inline]
    fn take_small(&mut self) -> Option<Vec<u8>> {
        let buffer = self.small.pop()?;
        self.small_bytes -= buffer.capacity();
        Some(buffer)
    }

    /// The smallest of the large buffers that hold `bytes` bytes.
    pub(super) fn take_larger(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let fitting = self.large.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= bytes);
        let (at, _) = fitting.min_by_key(|(_, buffer)| buffer.capacity())?;
        let buffer = self.large.swap_remove(at);
        self.large_bytes -= buffer.capacity();
        Some(buffer)
    }

    #[inline]
    pub(super) fn give_front(&mut self, front: Option<Box<Front>>) {
        if let Some(front) = front {
            self.keep_front(front);
        }
    }

    fn keep_front(&mut self, front: Box<Front>) {
        if front.pieces.is_empty() && front.pieces.capacity() <= Self::PIECES_MAX {
            self.fronts.give(front);
        }
    }

    /// Frees the large buffers, and of the small ones what is more than `bytes_max` bytes.
    pub fn free_beyond(&mut self, bytes_max: usize) {
        (self.large, self.large_bytes) = (Vec::new(), 0);
        while self.small_bytes > bytes_max && self.take_small().is_some() {}
    }

    /// Takes a buffer back.
    pub fn give(&mut self, mut buffer: Vec<u8>) {
        let capacity = buffer.capacity();
        buffer.clear();
        if capacity > Self::SMALL_BYTES_MAX {
            if capacity <= Self::BYTES_MAX && self.large_bytes + capacity <= self.large_bytes_max {
                self.large_bytes += capacity;
                self.large.push(buffer);
            }
        } else if capacity >= Self::BYTES_MIN
            && self.small.len() < Self::COUNT_MAX
            && self.small_bytes + capacity <= self.small_bytes_max
        {
            self.small_bytes += capacity;
            self.small.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::env::Env;
    use crate::limits::Limits;
    use crate::pool::{Memory, Pool};

    #[test]
    fn small_buffers_are_kept_for_a_thousand_connections_and_up_to_a_bound() {
        let mut spares = Spares::default();
        let mut take_and_give = || {
            let taken: Vec<Vec<u8>> = (0..1000).map(|_| spares.take()).collect();
            let addresses: BTreeSet<_> = taken.iter().map(|buffer| buffer.as_ptr()).collect();
            taken.into_iter().for_each(|buffer| spares.give(buffer));
            addresses
        };
        assert!(take_and_give() == take_and_give(), "others came in their place");
        assert_eq!((spares.small.len(), spares.small_bytes), (1000, 1000 * Spares::BYTES_MIN));
        (0..1000).for_each(|_| drop(spares.take()));
        assert_eq!((spares.small.len(), spares.small_bytes), (0, 0));
        (0..2000).for_each(|_| spares.give(Vec::with_capacity(Spares::BYTES_MIN)));
        assert_eq!(spares.small.len(), Spares::COUNT_MAX);
        (0..Spares::COUNT_MAX).for_each(|_| drop(spares.take()));
        (0..1000).for_each(|_| spares.give(Vec::with_capacity(Spares::SMALL_BYTES_MAX)));
        let kept: usize = spares.small.iter().map(Vec::capacity).sum();
        assert!(kept == spares.small_bytes && kept <= Spares::ALL_SMALL_BYTES_MAX, "{kept}");
    }

    #[test]
    fn large_buffers_are_kept_up_to_a_bound() {
        let mut spares = Spares::default();
        (0..100).for_each(|_| spares.give(Vec::with_capacity(1 << 20)));
        assert!(spares.large_bytes <= Spares::LARGE_BYTES_MAX && spares.large.len() > 16);
        spares.give(Vec::with_capacity(64 << 20));
        assert!(spares.large.iter().all(|buffer| buffer.capacity() <= Spares::BYTES_MAX));
    }

    /// A reply of each length, one after the other, leaves buffers of all lengths behind.
    #[test]
    fn a_shard_with_small_limits_keeps_few_buffers() {
        let limits = Limits { shard_bytes_max: 4 << 20, ..Limits::default() };
        let mut spares = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 1).unwrap()).unwrap().spares;
        for kib in 4..4096 {
            spares.give(Vec::with_capacity(kib << 10));
        }
        let kept: usize = spares.small.iter().chain(&spares.large).map(Vec::capacity).sum();
        assert!(kept > 256 << 10 && kept <= 768 << 10, "{kept} bytes");
    }
}
