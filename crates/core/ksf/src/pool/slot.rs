//! A slot: in the hands of an engine, or counted.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::{fmt, slice};

use super::chunk::Chunk;
use super::region::Region;

/// A slot that no other code can see: the engine's, while the kernel writes into it.
pub struct SlotMut {
    pub(super) region: Arc<Region>,
    pub(super) index: u32,
}

impl SlotMut {
    /// First byte behind the headroom, for the kernel to write to. Valid as long as this value lives.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_mut_slice().as_mut_ptr()
    }

    /// The slot's bytes behind the headroom.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let headroom = self.region.headroom_bytes as usize;
        let len = self.region.slot_bytes as usize;
        // SAFETY: `index` names a slot inside the region, which `region` keeps mapped; no other `SlotMut` or `Slot`
        // has this index while `self` lives (`Pool::take` or `Region::keep_copy` took it from the free ones), so `&mut` is
        // exclusive.
        let slot = unsafe { slice::from_raw_parts_mut(self.region.slot_ptr(self.index).as_ptr(), len) };
        &mut slot[headroom..]
    }

    /// Bytes in the slot behind the headroom.
    pub fn capacity(&self) -> usize {
        (self.region.slot_bytes - self.region.headroom_bytes) as usize
    }

    /// Ends writing: `len` bytes from the slot's start can now be read and shared.
    pub fn freeze(self, len: usize) -> Chunk {
        let len = len.min(self.capacity());
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the reference count it holds moves into the slot made here.
        let region = unsafe { std::ptr::read(&this.region) };
        region.meta[this.index as usize].holders.store(1, Ordering::Relaxed);
        let offset = region.headroom_bytes as usize;
        Chunk::of_slot(region, this.index, offset, len)
    }
}

impl Drop for SlotMut {
    fn drop(&mut self) {
        self.region.give_back(self.index);
    }
}

impl fmt::Debug for SlotMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotMut").field("index", &self.index).finish_non_exhaustive()
    }
}

/// A counted, read-only holder of a slot.
pub(super) struct Slot {
    pub(super) region: Arc<Region>,
    pub(super) index: u32,
}

impl Slot {
    pub(super) fn as_slice(&self) -> &[u8] {
        let len = self.region.slot_bytes as usize;
        // SAFETY: the region stays mapped while `region` is held; a frozen slot has no `SlotMut`, so no code writes to
        // it until the last `Slot` is dropped, which cannot happen during this borrow.
        unsafe { slice::from_raw_parts(self.region.slot_ptr(self.index).as_ptr(), len) }
    }

    /// Counts this slot as kept until its last holder drops it. False: it is not, and too many others are.
    pub(super) fn keep(&self) -> bool {
        let meta = &self.region.meta[self.index as usize];
        // The last holder to drop the slot sees the mark: the holder that set it drops its own hold later, with Release.
        if meta.kept.load(Ordering::Relaxed) {
            return true;
        }
        let max = self.region.kept_max;
        let reserve = |kept| (kept < max).then_some(kept + 1);
        if self.region.kept.fetch_update(Ordering::Acquire, Ordering::Relaxed, reserve).is_err() {
            return false;
        }
        if meta.kept.swap(true, Ordering::Relaxed) {
            // Another thread was quicker, and has counted it.
            self.region.kept.fetch_sub(1, Ordering::Relaxed);
        }
        true
    }
}

impl Clone for Slot {
    fn clone(&self) -> Self {
        self.region.meta[self.index as usize].holders.fetch_add(1, Ordering::Relaxed);
        Self { region: Arc::clone(&self.region), index: self.index }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let holders = &self.region.meta[self.index as usize].holders;
        // Mostly this is the only holder, and stays it: another one would be made from this one. Acquire: the reads of former
        // holders happen before the slot is written again.
        if holders.load(Ordering::Acquire) == 1 {
            return self.region.give_back(self.index);
        }
        // Release: this holder's reads happen before the slot is written again; the fence below pairs with it.
        if holders.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            self.region.give_back(self.index);
        }
    }
}
