//! The memory of a pool, and the state of its slots.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::chunk::Chunk;
use super::free::FreeStack;
use super::slot::SlotMut;
use super::{Memory, PoolSpec, SlotName};
use crate::buffers::Buffers;
use crate::mapped::{self, Mapping};

/// The mapping, and how often each slot is held.
#[derive(Debug)]
pub(super) struct Region {
    base: NonNull<u8>,
    map_bytes: usize,
    pub(super) id: u16,
    pub(super) slot_bytes: u32,
    pub(super) headroom_bytes: u32,
    pub(super) kept_max: u32,
    pub(super) meta: Box<[SlotMeta]>,
    /// Keeps the lock on the file.
    _file: Option<OwnedFd>,
    /// Slots that came back. Of long ones the pool takes all at a time, of short ones any thread takes one.
    free: FreeStack,
    pub(super) in_use: AtomicU32,
    /// Slots with the mark, and those of them that are about to be given back.
    pub(super) kept: AtomicU32,
    pub(super) copies: AtomicU64,
    /// Where short messages are kept that were received into this region.
    pub(super) short: Option<Arc<Region>>,
    /// For these copies.
    pub(super) buffers: Buffers,
}

#[derive(Debug)]
pub(super) struct SlotMeta {
    pub(super) holders: AtomicU32,
    pub(super) kept: AtomicBool,
    next: AtomicU32,
}

// SAFETY: `base` is only dereferenced through `SlotMut` (one holder) and `Slot` (readers only), and the holder counts
// and the returned stack are atomics; nothing in a region is tied to a thread.
unsafe impl Send for Region {}
// SAFETY: shared access is to atomics and, through `Slot`, to bytes that have no writer while a `Slot` is held.
unsafe impl Sync for Region {}

impl Region {
    pub(super) fn map(spec: PoolSpec, short: Option<Arc<Region>>) -> io::Result<Self> {
        let PoolSpec { memory, id, slot_bytes, slots, headroom_bytes, kept_max, live: _, short: _, buffers } = spec;
        let invalid = |text| io::Error::new(io::ErrorKind::InvalidInput, text);
        let bytes = (slot_bytes as usize).checked_mul(slots as usize).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| invalid("a pool has at least one slot of at least one byte"))?;
        if headroom_bytes >= slot_bytes {
            return Err(invalid("the headroom leaves nothing of the slot"));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let (map_bytes, base, file) = match memory {
            Memory::Anonymous | Memory::HugePages => {
                let (flags, align) = match memory {
                    Memory::HugePages => (MapFlags::PRIVATE | MapFlags::HUGETLB, 2 << 20),
                    _ => (MapFlags::PRIVATE | MapFlags::NORESERVE, 4096),
                };
                let map_bytes = bytes.next_multiple_of(align);
                // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
                let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), map_bytes, protection, flags) };
                let base = base.map_err(|error| match (error, memory) {
                    (rustix::io::Errno::NOMEM, Memory::HugePages) => io::Error::new(
                        io::ErrorKind::OutOfMemory,
                        "there are not enough free huge pages; reserve more (vm.nr_hugepages), or use anonymous memory",
                    ),
                    (error, _) => error.into(),
                })?;
                let base: Option<NonNull<u8>> = NonNull::new(base.cast());
                let base = base.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
                (map_bytes, base, None)
            }
            Memory::File(ref file) | Memory::Dax(ref file) => {
                rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|error| {
                    let text = "another process uses the file of the pool; end it, or choose another file";
                    if error == rustix::io::Errno::WOULDBLOCK { io::Error::other(text) } else { error.into() }
                })?;
                let length = rustix::fs::fstat(file)?.st_size;
                if u64::try_from(length).unwrap_or(0) < bytes as u64 {
                    return Err(invalid("the file is shorter than the slots"));
                }
                let is_dax = matches!(memory, Memory::Dax(_));
                // The lock keeps other pools out; another process that writes to the file without a lock could change received
                // bytes, as it could change any durable data: the file's mode keeps others out.
                let base = mapped::map(file, bytes, if is_dax { Mapping::Synchronous } else { Mapping::Shared })?;
                let (Memory::File(file) | Memory::Dax(file)) = memory else { return Err(invalid("no file")) };
                (bytes, base, Some(file))
            }
        };
        let free = || SlotMeta { holders: AtomicU32::new(0), kept: AtomicBool::new(false), next: AtomicU32::new(0) };
        Ok(Self {
            base,
            map_bytes,
            id,
            slot_bytes,
            headroom_bytes,
            kept_max,
            _file: file,
            meta: (0..slots).map(|_| free()).collect(),
            free: FreeStack::default(),
            in_use: AtomicU32::new(0),
            kept: AtomicU32::new(0),
            copies: AtomicU64::new(0),
            short,
            buffers,
        })
    }

    pub(super) fn slot_ptr(&self, index: u32) -> NonNull<u8> {
        debug_assert!((index as usize) < self.meta.len());
        // SAFETY: `index` is below the number of slots (indexes are only made in `never_used` and `hold`), so the offset is inside
        // the mapping, which is at least `slot_bytes * slots` long.
        unsafe { self.base.add(index as usize * self.slot_bytes as usize) }
    }

    /// Takes back a slot without a holder, from any thread.
    pub(super) fn give_back(&self, index: u32) {
        let kept = &self.meta[index as usize].kept;
        let was_kept = kept.load(Ordering::Relaxed);
        if was_kept {
            kept.store(false, Ordering::Relaxed);
        }
        self.free.push(index, |index| &self.meta[index as usize].next);
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        if was_kept {
            // Last, and seen to be last by the thread that takes the place: until then the slot is not back.
            self.kept.fetch_sub(1, Ordering::Release);
        }
    }

    pub(super) fn take_free(&self, into: &mut Vec<u32>) {
        self.free.take_all(into, |index| &self.meta[index as usize].next);
    }

    /// The slots with these names, counted as kept.
    pub(super) fn hold(self: &Arc<Self>, names: &[SlotName]) -> io::Result<Vec<Chunk>> {
        let hold = |name: &SlotName| {
            let end = name.offset.checked_add(name.len).filter(|end| *end <= self.slot_bytes);
            let inside = name.pool == self.id && (name.index as usize) < self.meta.len();
            if !inside || end.is_none() {
                let text = format!("{name:?} is outside of the pool, or of another one");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            let meta = &self.meta[name.index as usize];
            if meta.holders.fetch_add(1, Ordering::Relaxed) == 0 {
                meta.kept.store(true, Ordering::Relaxed);
                self.in_use.fetch_add(1, Ordering::Relaxed);
                self.kept.fetch_add(1, Ordering::Relaxed);
            }
            Ok(Chunk::of_slot(Arc::clone(self), name.index, name.offset as usize, name.len as usize))
        };
        names.iter().map(hold).collect()
    }

    /// Slots without a holder, the first one last. To be called once, when the live ones are held.
    pub(super) fn never_used(&self) -> impl Iterator<Item = u32> {
        let is_free = |index: &u32| self.meta[*index as usize].holders.load(Ordering::Relaxed) == 0;
        (0..self.meta.len() as u32).rev().filter(is_free)
    }

    /// Makes slots available to [`Self::keep_copy`].
    pub(super) fn offer(&self, indexes: impl Iterator<Item = u32>) {
        indexes.for_each(|index| self.free.push(index, |index| &self.meta[index as usize].next));
    }

    /// Any thread: a copy of these bytes in a slot of this region, kept. `None`: they do not fit into a slot, or as many
    /// slots are kept as may be.
    pub(super) fn keep_copy(self: &Arc<Self>, bytes: &[u8]) -> Option<Chunk> {
        let fits = bytes.len() <= (self.slot_bytes - self.headroom_bytes) as usize;
        if !fits || self.kept.load(Ordering::Relaxed) >= self.kept_max {
            return None;
        }
        let index = self.free.pop(|index| &self.meta[index as usize].next)?;
        self.in_use.fetch_add(1, Ordering::Relaxed);
        let mut slot = SlotMut { region: Arc::clone(self), index };
        slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let chunk = slot.freeze(bytes.len());
        // Others may have kept the last ones meanwhile; then the slot goes back here.
        chunk.keep().then_some(chunk)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `map` with this length; every slot holds the region, so none is left.
        // An error would mean a wrong address or length, which cannot be.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.map_bytes) };
    }
}
