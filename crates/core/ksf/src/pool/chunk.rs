//! Bytes that are counted instead of copied.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::{fmt, ops, slice};

use super::SlotName;
use super::region::Region;
use super::slot::Slot;
use crate::buffers::{Buffer, Shared};

/// Bytes that may be kept: a range of a slot, or of a heap block where a slot would not do (a message longer than a
/// slot, or a short rest that should not occupy one).
#[derive(Clone)]
pub struct Chunk {
    bytes: Bytes,
    offset: usize,
    len: usize,
}

#[derive(Clone)]
enum Bytes {
    Slot(Slot),
    Heap(Arc<Vec<u8>>),
    Buffer(Shared),
}

impl Chunk {
    /// A range of a slot that the caller counted as a holder of it.
    pub(super) fn of_slot(region: Arc<Region>, index: u32, offset: usize, len: usize) -> Self {
        Self { bytes: Bytes::Slot(Slot { region, index }), offset, len }
    }

    /// A chunk in a heap block.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        Self { bytes: Bytes::Heap(Arc::new(bytes)), offset: 0, len }
    }

    /// A chunk of the bytes that are filled in a buffer.
    pub fn from_buffer(buffer: Buffer) -> Self {
        let len = buffer.len();
        Self { bytes: Bytes::Buffer(buffer.share()), offset: 0, len }
    }

    /// The part of this chunk in `range`, sharing the same memory.
    ///
    /// # Panics
    /// If the range is not inside the chunk.
    pub fn slice(&self, range: ops::Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} is outside of {}", self.len);
        Self { bytes: self.bytes.clone(), offset: self.offset + range.start, len: range.len() }
    }

    /// Drops the first `bytes` bytes from view.
    pub fn advance(&mut self, bytes: usize) {
        let bytes = bytes.min(self.len);
        self.offset += bytes;
        self.len -= bytes;
    }

    /// Lets these bytes stay where they are beyond this turn. False: too many slots are kept already, copy them.
    pub(crate) fn keep(&self) -> bool {
        match &self.bytes {
            Bytes::Slot(slot) => slot.keep(),
            Bytes::Heap(_) | Bytes::Buffer(_) => true,
        }
    }

    /// The same bytes to keep beyond this turn: where they are if [that may be](Self::keep), else a copy.
    pub(crate) fn into_kept(self) -> Self {
        match &self.bytes {
            Bytes::Slot(slot) if !slot.keep() => {
                slot.region.copies.fetch_add(1, Ordering::Relaxed);
                let mut copy = slot.region.buffers.take(self.len());
                copy.fill(&self);
                Self::from_buffer(copy)
            }
            _ => self,
        }
    }

    /// The same for a message: [in a short slot](Self::into_short), if that may be.
    pub(crate) fn into_kept_message(self) -> Self {
        self.into_short().into_kept()
    }

    /// A copy of these bytes in a short slot of the pool that they were received into, so that they occupy no more than that
    /// when they are kept. As they are, if they are longer, lie in no long slot, or no short slot is free.
    pub fn into_short(self) -> Self {
        if let Bytes::Slot(slot) = &self.bytes
            && let Some(short) = &slot.region.short
            && let Some(copy) = short.keep_copy(&self)
        {
            return copy;
        }
        self
    }

    /// Memory that nothing else can be in while these bytes are held: the whole slot, all that their buffer takes, or a
    /// heap block. Holders of parts of the same memory share it.
    pub fn occupied_bytes(&self) -> usize {
        match &self.bytes {
            Bytes::Slot(slot) => slot.region.slot_bytes as usize,
            Bytes::Heap(block) => block.capacity(),
            Bytes::Buffer(shared) => shared.touched_bytes(),
        }
    }

    /// Memory that these bytes keep: all that their buffer takes. Slots are there anyway, and are kept up to a number.
    pub(crate) fn memory_bytes(&self) -> usize {
        match &self.bytes {
            Bytes::Buffer(shared) => shared.touched_bytes().max(self.len()),
            Bytes::Slot(_) | Bytes::Heap(_) => self.len(),
        }
    }

    /// The name of these bytes in their pool; `None` for a heap block.
    pub fn name(&self) -> Option<SlotName> {
        match &self.bytes {
            Bytes::Slot(slot) => Some(SlotName {
                pool: slot.region.id,
                index: slot.index,
                offset: self.offset as u32,
                len: self.len as u32,
            }),
            Bytes::Heap(_) | Bytes::Buffer(_) => None,
        }
    }

    /// The headroom of the slot, to be written by the only holder of the slot. `None` if there are others, or for a heap
    /// block.
    pub fn headroom_mut(&mut self) -> Option<&mut [u8]> {
        let Bytes::Slot(slot) = &mut self.bytes else { return None };
        // Acquire: what former holders did with the slot happens before this write.
        if slot.region.meta[slot.index as usize].holders.load(Ordering::Acquire) != 1 {
            return None;
        }
        let bytes = slot.region.headroom_bytes as usize;
        // SAFETY: the count says that this is the only holder, and `&mut self` that no code clones it during the borrow, so
        // no other reference into the slot exists; the slot is longer than its headroom (`Region::map`).
        Some(unsafe { slice::from_raw_parts_mut(slot.region.slot_ptr(slot.index).as_ptr(), bytes) })
    }

    /// Index of the slot in its pool and offset of the first byte in the slot; `None` for a heap block. Which pool it is, of
    /// long or of short slots, [`Chunk::name`] tells.
    pub fn slot(&self) -> Option<(u32, usize)> {
        match &self.bytes {
            Bytes::Slot(slot) => Some((slot.index, self.offset)),
            Bytes::Heap(_) | Bytes::Buffer(_) => None,
        }
    }
}

impl ops::Deref for Chunk {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all = match &self.bytes {
            Bytes::Slot(slot) => slot.as_slice(),
            Bytes::Heap(vec) => vec,
            Bytes::Buffer(buffer) => buffer,
        };
        &all[self.offset..][..self.len]
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk").field("slot", &self.slot()).field("len", &self.len).finish()
    }
}
