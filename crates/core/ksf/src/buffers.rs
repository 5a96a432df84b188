//! Buffers for what is longer than a receive slot: page-aligned memory in size classes, used again.
//!
//! A message whose length is known is received straight into a [`Buffer`] of its size, so it is never copied into a
//! growing vector, and a service hands the same memory on to a file. Buffers travel between threads: a task fills one
//! with what it read, and the shard sends it. One set of classes serves all shards; taking and giving back is a
//! lock-free queue operation per class.
//!
//! ```text
//!   Buffers ──take(bytes)──► Buffer ──share──► Shared ──clone──► Shared     (counted; read-only)
//!      ▲                       │                 │                 │
//!      └───────────────────────┴────── drop ─────┴─────────────────┘
//! ```
//!
//! The memory of a buffer is zeroed when it is made and stale when it is used again, never uninitialized. From 64 KiB on
//! it is taken from the machine page by page, as it is written: [`Buffer::touched_bytes`].

mod memory;

use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::{fmt, slice};

use crossbeam_queue::ArrayQueue;

use self::memory::Memory;
use crate::limits::Limits;

/// Alignment of every buffer: a page, and the largest logical block of common disks (O_DIRECT, open(2)).
pub const ALIGN_BYTES: usize = 4096;

/// Size of the smallest class; each further class is twice as large.
pub const CLASS_BYTES_MIN: usize = 4 << 10;

/// Size of the largest class. Longer buffers are allocated as asked for, and freed instead of kept.
pub const CLASS_BYTES_MAX: usize = 4 << 20;

const CLASSES: usize = (CLASS_BYTES_MAX / CLASS_BYTES_MIN).ilog2() as usize + 1;

/// Free memory that one class keeps, by default; the largest one keeps four buffers, 16 MiB.
pub const KEEP_BYTES_PER_CLASS: usize = 8 << 20;

/// A source of buffers, shared by all threads that hold a clone.
#[derive(Clone)]
pub struct Buffers(Arc<Classes>);

struct Classes {
    free: [ArrayQueue<Box<Block>>; CLASSES],
}

/// Memory, and how many share it. Boxed once per allocation of memory, so sharing a buffer allocates nothing.
struct Block {
    memory: Memory,
    holders: AtomicU32,
    /// Where the block goes when its last holder drops it; `None` while it is free, or if it is too long for a class.
    home: Option<Arc<Classes>>,
}

// SAFETY: `memory` belongs to the block alone; it is written through the one `Buffer` or read through `Shared`
// holders, which count themselves atomically. Nothing in a block is tied to a thread.
unsafe impl Send for Block {}
// SAFETY: a shared block is only read (`Shared` gives out `&[u8]`), and its count is atomic.
unsafe impl Sync for Block {}

impl Default for Buffers {
    fn default() -> Self {
        Self::new(KEEP_BYTES_PER_CLASS)
    }
}

impl Buffers {
    /// Classes that keep up to `keep_bytes_per_class` bytes each in free buffers; twice that for up to four buffers, and one
    /// buffer in any case.
    pub fn new(keep_bytes_per_class: usize) -> Self {
        let queue = |class: usize| {
            let bytes = CLASS_BYTES_MIN << class;
            let (within, twice) = (keep_bytes_per_class / bytes, 2 * keep_bytes_per_class / bytes);
            ArrayQueue::new(within.max(twice.min(4)).max(1))
        };
        Self(Arc::new(Classes { free: std::array::from_fn(queue) }))
    }

    /// Classes that keep up to a thirty-second of the limits together, and no more than by default: what is kept counts for none of
    /// them.
    pub fn within(limits: &Limits) -> Self {
        let bytes = limits.shard_bytes_max.saturating_add(limits.assembly_bytes_max);
        Self::new(KEEP_BYTES_PER_CLASS.min(bytes / 32))
    }

    /// An empty buffer with room for at least `bytes` bytes.
    pub fn take(&self, bytes: usize) -> Buffer {
        let Some(class) = class_of(bytes) else {
            return Buffer { block: Block::allocate(bytes.next_multiple_of(ALIGN_BYTES), None), len: 0 };
        };
        let block = match self.0.free[class].pop() {
            Some(mut block) => {
                block.home = Some(Arc::clone(&self.0));
                NonNull::from(Box::leak(block))
            }
            None => Block::allocate(CLASS_BYTES_MIN << class, Some(Arc::clone(&self.0))),
        };
        Buffer { block, len: 0 }
    }

    /// Bytes of memory that a buffer for `bytes` bytes takes.
    pub fn capacity_for(bytes: usize) -> usize {
        class_of(bytes).map_or_else(|| bytes.next_multiple_of(ALIGN_BYTES), |class| CLASS_BYTES_MIN << class)
    }

    /// Frees the buffers that are kept for later.
    pub fn free_kept(&self) {
        self.0.free.iter().for_each(|class| while class.pop().is_some() {});
    }

    /// Free buffers that are kept now, over all classes.
    pub fn kept(&self) -> usize {
        self.0.free.iter().map(ArrayQueue::len).sum()
    }
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffers").field("kept", &self.kept()).finish()
    }
}

/// The smallest class that holds `bytes`; `None` above the largest.
fn class_of(bytes: usize) -> Option<usize> {
    let classes = bytes.max(1).div_ceil(CLASS_BYTES_MIN).next_power_of_two().ilog2() as usize;
    (classes < CLASSES).then_some(classes)
}

impl Block {
    fn allocate(capacity: usize, home: Option<Arc<Classes>>) -> NonNull<Self> {
        let memory = Memory::zeroed(capacity);
        NonNull::from(Box::leak(Box::new(Self { memory, holders: AtomicU32::new(1), home })))
    }

    /// Gives the block back to its class, or frees it.
    ///
    /// # Safety
    ///
    /// `block` comes from [`Block::allocate`] or [`Buffers::take`], and the caller is its last holder.
    unsafe fn release(block: NonNull<Self>) {
        // SAFETY: by the contract, the box was leaked by `allocate` or `take` and no other code uses it any more.
        let mut block = unsafe { Box::from_raw(block.as_ptr()) };
        if let Some(home) = block.home.take()
            && let Some(class) = class_of(block.memory.bytes())
        {
            // A full class drops the block here, which frees the memory.
            drop(home.free[class].push(block));
        }
    }
}

/// Memory for one owner, which fills it: `len` bytes are filled, the rest is room.
pub struct Buffer {
    block: NonNull<Block>,
    len: usize,
}

// SAFETY: a buffer is the only holder of its block, which may be used by any thread.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` only reads the block.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn block(&self) -> &Block {
        // SAFETY: the block lives until its last holder releases it, and `self` is a holder.
        unsafe { self.block.as_ref() }
    }

    fn memory(&mut self) -> &mut Memory {
        // SAFETY: as above, and a buffer is the only holder of its block.
        unsafe { &mut self.block.as_mut().memory }
    }

    /// Bytes of memory, filled or not.
    pub fn capacity(&self) -> usize {
        self.block().memory.bytes()
    }

    /// Bytes that may still be filled.
    pub fn room(&self) -> usize {
        self.capacity() - self.len
    }

    /// Bytes of memory that are taken from the machine: all of a short buffer, and of a long one what was written, also
    /// when it was used before.
    pub fn touched_bytes(&self) -> usize {
        self.block().memory.touched_bytes()
    }

    /// Gives what a long buffer takes of memory back to the machine; nothing is filled then. False for a short one, which
    /// stays as it is.
    pub fn forget(&mut self) -> bool {
        let forgotten = self.memory().forget();
        self.len = if forgotten { 0 } else { self.len };
        forgotten
    }

    /// First byte of the memory, for the kernel to read or write. Valid as long as this value lives, also when it moves.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.memory_mut().as_mut_ptr()
    }

    /// All of the memory: the filled bytes, then zeros or stale bytes.
    pub fn memory_mut(&mut self) -> &mut [u8] {
        let capacity = self.capacity();
        self.part_mut(0..capacity)
    }

    /// A part of the memory, which ends within the capacity.
    pub fn part_mut(&mut self, part: Range<usize>) -> &mut [u8] {
        let capacity = self.capacity();
        self.memory().touch(part.end);
        // SAFETY: the block's memory is `capacity` initialized bytes, and `self` is its only holder.
        let memory = unsafe { slice::from_raw_parts_mut(self.memory().base().as_ptr(), capacity) };
        &mut memory[part]
    }

    /// The room behind the filled bytes.
    pub fn room_mut(&mut self) -> &mut [u8] {
        let range = self.len..self.capacity();
        self.part_mut(range)
    }

    /// The first `bytes` bytes behind the filled ones, or all of the room if that is less. What is behind them is not
    /// touched.
    pub fn room_for(&mut self, bytes: usize) -> &mut [u8] {
        let range = self.len..self.len + bytes.min(self.room());
        self.part_mut(range)
    }

    /// Says that the first `len` bytes are filled; no more than the capacity.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity());
    }

    /// Appends as many of `bytes` as there is room for, and returns how many.
    pub fn fill(&mut self, bytes: &[u8]) -> usize {
        let take = bytes.len().min(self.room());
        let range = self.len..self.len + take;
        self.part_mut(range).copy_from_slice(&bytes[..take]);
        self.len += take;
        take
    }

    /// Shares it among readers; it cannot be written any more.
    pub fn share(self) -> Shared {
        let this = std::mem::ManuallyDrop::new(self);
        Shared { block: this.block, len: this.len }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the first `len` bytes of the block are initialized, and only `&mut self` writes them.
        unsafe { slice::from_raw_parts(self.block().memory.base().as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the block comes from `Buffers::take`, and a buffer is its only holder.
        unsafe { Block::release(self.block) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).field("capacity", &self.capacity()).finish()
    }
}

/// One of those that read a buffer.
pub struct Shared {
    block: NonNull<Block>,
    len: usize,
}

// SAFETY: a shared block is only read, and its holders count themselves atomically.
unsafe impl Send for Shared {}
// SAFETY: `&Shared` only reads the block.
unsafe impl Sync for Shared {}

impl Shared {
    fn block(&self) -> &Block {
        // SAFETY: the block lives until its last holder releases it, and `self` is a holder.
        unsafe { self.block.as_ref() }
    }
}

impl Shared {
    /// Bytes of memory that are taken from the machine.
    pub fn touched_bytes(&self) -> usize {
        self.block().memory.touched_bytes()
    }
}

impl Deref for Shared {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are initialized, and no code writes a shared block.
        unsafe { slice::from_raw_parts(self.block().memory.base().as_ptr(), self.len) }
    }
}

impl Clone for Shared {
    fn clone(&self) -> Self {
        self.block().holders.fetch_add(1, Ordering::Relaxed);
        Self { block: self.block, len: self.len }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Release: this holder's reads happen before the memory is written again; the fence below pairs with it.
        if self.block().holders.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            self.block().holders.store(1, Ordering::Relaxed);
            // SAFETY: the count says that this was the last holder; the block comes from `Buffers::take`.
            unsafe { Block::release(self.block) }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_has_the_size_of_its_class() {
        let buffers = Buffers::default();
        let cases = [(0, 4 << 10), (1, 4 << 10), (4096, 4 << 10), (4097, 8 << 10), (1 << 20, 1 << 20)];
        let long = [((1 << 20) + 1, 2 << 20), (4 << 20, 4 << 20), ((4 << 20) + 1, (4 << 20) + 4096)];
        for (bytes, capacity) in cases.into_iter().chain(long) {
            let mut buffer = buffers.take(bytes);
            assert_eq!((buffer.capacity(), buffer.len()), (capacity, 0), "{bytes}");
            assert_eq!(Buffers::capacity_for(bytes), capacity, "{bytes}");
            assert_eq!(buffer.as_mut_ptr() as usize % ALIGN_BYTES, 0);
        }
    }

    #[test]
    fn memory_is_used_again_by_whoever_asks_next() {
        let buffers = Buffers::default();
        let mut first = buffers.take(5000);
        let place = first.as_mut_ptr();
        assert_eq!(first.fill(b"abc"), 3);
        let shared = first.share();
        let second = shared.clone();
        drop(shared);
        assert_eq!((&*second, buffers.kept()), (&b"abc"[..], 0));
        std::thread::spawn(move || drop(second)).join().unwrap();
        assert_eq!(buffers.kept(), 1);
        let mut again = buffers.take(8192);
        assert_eq!((again.as_mut_ptr(), again.len(), buffers.kept()), (place, 0, 0));
    }

    #[test]
    fn a_class_keeps_a_bounded_number_and_long_buffers_are_freed() {
        let buffers = Buffers::new(0);
        let taken: Vec<_> = (0..10).map(|_| buffers.take(1)).collect();
        drop(taken);
        assert_eq!(buffers.kept(), 1);
        drop(buffers.take(CLASS_BYTES_MAX + 1));
        assert_eq!(buffers.kept(), 1);
        buffers.free_kept();
        assert_eq!(buffers.kept(), 0);
    }

    #[test]
    fn small_limits_keep_little() {
        let kept_bytes = |limits: &Limits, bytes_max: usize| {
            let buffers = Buffers::within(limits);
            let lengths = || (0..CLASSES).map(|class| CLASS_BYTES_MIN << class).filter(|bytes| *bytes <= bytes_max);
            for bytes in lengths() {
                drop((0..(16 << 20) / bytes).map(|_| buffers.take(bytes)).collect::<Vec<_>>());
            }
            lengths().enumerate().map(|(class, bytes)| buffers.0.free[class].len() * bytes).sum::<usize>()
        };
        let small = Limits { shard_bytes_max: 4 << 20, assembly_bytes_max: 4 << 20, ..Limits::default() };
        assert!(kept_bytes(&small, 128 << 10) <= 6 * (512 << 10));
        assert!(kept_bytes(&small, CLASS_BYTES_MAX) <= 12 << 20);
        assert_eq!(kept_bytes(&Limits::default(), CLASS_BYTES_MAX), 10 * KEEP_BYTES_PER_CLASS + (16 << 20));
    }

    #[test]
    fn a_long_buffer_is_touched_as_far_as_it_was_written() {
        let buffers = Buffers::default();
        let mut short = buffers.take(32 << 10);
        assert_eq!((short.touched_bytes(), short.forget()), (32 << 10, false));
        for bytes in [64 << 10, CLASS_BYTES_MAX + 1] {
            let mut long = buffers.take(bytes);
            assert_eq!(long.touched_bytes(), 0, "{bytes}");
            long.fill(&[7; 5000]);
            long.part_mut(6000..6001)[0] = 7;
            assert_eq!((long.touched_bytes(), long[4999]), (6001, 7));
            assert!(long.forget());
            assert_eq!((long.touched_bytes(), long.len()), (0, 0));
            long.set_len(6001);
            assert!(long.iter().all(|byte| *byte == 0));
        }
        let mut again = buffers.take(64 << 10);
        again.fill(&[7; 5000]);
        drop(again);
        assert_eq!(buffers.take(64 << 10).touched_bytes(), 5000, "its memory is used again");
    }

    #[test]
    fn a_full_buffer_takes_no_more() {
        let mut buffer = Buffers::default().take(1);
        assert_eq!(buffer.fill(&[7; 5000]), 4096);
        assert_eq!((buffer.fill(b"x"), buffer.len(), buffer.room()), (0, 4096, 0));
        buffer.set_len(9999);
        assert_eq!(buffer.len(), 4096);
    }
}
