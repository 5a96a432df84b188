//! The buffers io_uring receives into: a ring of entries shared with the kernel (provided buffers, Linux 5.19), behind
//! each of which is a slot of the pool. The kernel takes the entry at the head and says in the completion which one it
//! filled; another slot takes its place.

use std::sync::atomic::{AtomicU16, Ordering};
use std::{mem, ptr};

use io_uring::IoUring;
use io_uring::types::BufRingEntry;
use rustix::mm::{MapFlags, ProtFlags};

use super::ring::failed;
use crate::error::Error;
use crate::pool::{Pool, SlotMut};

/// Entries of the buffer ring: data the kernel may deliver between two turns.
pub(super) const BUFFERS: u16 = 128;
/// Names the ring in requests.
pub(super) const BUFFER_GROUP: u16 = 0;

/// The ring of receive buffers that the kernel takes from.
pub(super) struct BufferRing {
    base: *mut BufRingEntry,
    map_bytes: usize,
    /// The slot behind each entry id, while the kernel may write to it.
    slots: Vec<Option<SlotMut>>,
    /// Entry ids without a slot.
    empty: Vec<u16>,
    tail: u16,
}

impl BufferRing {
    /// Tells the kernel of a ring of [`BUFFERS`] entries, and fills it with free slots.
    pub(super) fn register(ring: &IoUring, pool: &mut Pool) -> Result<Self, Error> {
        let map_bytes = (usize::from(BUFFERS) * mem::size_of::<BufRingEntry>()).next_multiple_of(4096);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address the kernel chooses aliases nothing.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), map_bytes, protection, MapFlags::PRIVATE) };
        let base: *mut BufRingEntry = base.map_err(|error| failed("mmap")(error.into()))?.cast();
        let slots = (0..BUFFERS).map(|_| None).collect();
        let mut buffers = Self { base, map_bytes, slots, empty: (0..BUFFERS).rev().collect(), tail: 0 };
        // SAFETY: the mapping is page-aligned, large enough for `BUFFERS` entries, and lives in `buffers`, which is
        // dropped after the ring (or, on the error path, after the registration failed).
        unsafe { ring.submitter().register_buf_ring_with_flags(base as u64, BUFFERS, BUFFER_GROUP, 0) }
            .map_err(failed("registering a buffer ring (needs Linux 5.19)"))?;
        buffers.refill(pool);
        Ok(buffers)
    }

    /// Takes the slot the kernel has filled out of entry `id`, and puts a free one in its place.
    pub(super) fn take(&mut self, id: u16, pool: &mut Pool) -> Option<SlotMut> {
        let place = self.slots.get_mut(usize::from(id))?;
        let Some(slot) = pool.take() else {
            self.empty.push(id);
            return place.take();
        };
        let filled = place.replace(slot);
        self.offer(id);
        self.publish();
        filled
    }

    /// Gives the kernel free slots for the entries that have none, as far as there are any.
    #[inline]
    pub(super) fn refill(&mut self, pool: &mut Pool) {
        if !self.empty.is_empty() {
            self.refill_empty(pool);
        }
    }

    fn refill_empty(&mut self, pool: &mut Pool) {
        while !self.empty.is_empty() {
            let Some(slot) = pool.take() else { break };
            let Some(id) = self.empty.pop() else { break };
            self.slots[usize::from(id)] = Some(slot);
            self.offer(id);
        }
        self.publish();
    }

    /// Writes the entry for the slot of this id; the kernel sees it when the tail is published.
    fn offer(&mut self, id: u16) {
        let Some(slot) = &mut self.slots[usize::from(id)] else { return };
        let at = usize::from(self.tail & (BUFFERS - 1));
        // SAFETY: `at` is below `BUFFERS`, the number of entries in the mapping. The kernel reads an entry only after the
        // published tail says so, and has no entry beyond it.
        let entry = unsafe { &mut *self.base.add(at) };
        entry.set_addr(slot.as_mut_ptr() as u64);
        entry.set_len(slot.capacity() as u32);
        entry.set_bid(id);
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        // SAFETY: `base` is the first entry of the mapping; the tail lies in its reserved field, two bytes that only this
        // thread writes and the kernel reads.
        let tail = unsafe { &*BufRingEntry::tail(self.base).cast::<AtomicU16>() };
        // Release: the entries are written before the kernel sees them.
        tail.store(self.tail, Ordering::Release);
    }

    /// Never gives the slots back: the kernel may still write to them.
    pub(super) fn leak_slots(&mut self) {
        mem::forget(mem::take(&mut self.slots));
    }

    /// True while the kernel has no buffer to receive into.
    pub(super) fn is_starved(&self) -> bool {
        self.empty.len() == usize::from(BUFFERS)
    }
}

impl Drop for BufferRing {
    fn drop(&mut self) {
        // SAFETY: mapped in `register` with this length; the ring that knew it is closed by now.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.map_bytes) };
    }
}
