//! Receive slots: fixed-size pieces of one memory region.
//!
//! The engine receives into a slot, the connection finds messages in it, and whoever still needs the bytes keeps the
//! slot: a reply that forwards them, a worker on another thread, a store that makes them durable where they landed.
//! Nobody copies. A slot goes back to its shard when its last holder drops it, from any thread.
//!
//! At most half of the slots may be kept like this at a time; who wants to keep more gets a copy on the heap. Slots the
//! engine receives into, and those whose bytes are looked at in this turn, do not count. So when a turn begins, half of
//! the slots are with the engine or free for it, whatever peers and services do, and a shard never waits for a slot
//! that somebody keeps.
//!
//! ```text
//!   Pool ──take──► SlotMut ──freeze──► Slot ──clone──► Slot      (counted)
//!    ▲               │                   │               │
//!    └───────────────┴────── drop ───────┴───────────────┘
//!         lock-free stack: any thread pushes one index, the owner takes the whole stack
//! ```
//!
//! Where the region lives (anonymous memory, huge pages, a file) is a property of the pool, not of the engine, and an
//! index is a slot's stable name within its region: what a store needs to find its data again.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::{fmt, io, ops, slice};

use rustix::mm::{MapFlags, ProtFlags};

use crate::buffers::{Buffer, Buffers, Shared};
use crate::error::Error;

/// Where the memory of a pool lives.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Memory<'a> {
    /// Private anonymous memory, given out by the kernel as slots are first used.
    Anonymous,
    /// Anonymous memory on huge pages reserved by the administrator (`vm.nr_hugepages`).
    HugePages,
    /// A shared mapping of this file (also on DAX), which must be at least `slot_bytes * slots` long.
    File(BorrowedFd<'a>),
}

/// Slots of one shard. Slots may travel to other threads; the pool stays with its shard.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    /// Free slots only this thread knows; the last one freed is the first one used, while it is warm in the cache.
    free: Vec<u32>,
}

impl Pool {
    /// Cuts `slots` slots of `slot_bytes` bytes from one region.
    pub fn new(memory: Memory<'_>, slot_bytes: u32, slots: u32) -> Result<Self, Error> {
        let region = Region::map(memory, slot_bytes, slots)
            .map_err(|source| Error::Pool { bytes: slot_bytes as usize * slots as usize, source })?;
        Ok(Self { region: Arc::new(region), free: (0..slots).rev().collect() })
    }

    /// A free slot, or `None` when all are in use.
    pub fn take(&mut self) -> Option<SlotMut> {
        if self.free.is_empty() {
            self.region.drain_returned(&mut self.free);
        }
        let index = self.free.pop()?;
        self.region.in_use.fetch_add(1, Ordering::Relaxed);
        Some(SlotMut { region: Arc::clone(&self.region), index })
    }

    /// Bytes in a slot.
    pub fn slot_bytes(&self) -> usize {
        self.region.slot_bytes as usize
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.region.meta.len() as u32
    }

    /// Slots somebody holds now.
    pub fn in_use(&self) -> u32 {
        self.region.in_use.load(Ordering::Relaxed)
    }

    /// Slots kept beyond the turn that received into them; never more than half of all.
    pub fn kept(&self) -> u32 {
        self.region.kept.load(Ordering::Relaxed)
    }

    /// How often [`Message::keep`](crate::Message::keep) copied, since the last time this was asked.
    pub(crate) fn take_copies(&self) -> u64 {
        match self.region.copies.load(Ordering::Relaxed) {
            // Nearly always; the exchange is for the rare case.
            0 => 0,
            _ => self.region.copies.swap(0, Ordering::Relaxed),
        }
    }
}

/// A slot nobody else can see: the engine's, while the kernel writes into it.
pub struct SlotMut {
    region: Arc<Region>,
    index: u32,
}

impl SlotMut {
    /// First byte of the slot, for the kernel to write to. Valid as long as this value lives.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.region.slot_ptr(self.index).as_ptr()
    }

    /// The slot's bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.region.slot_bytes as usize;
        // SAFETY: `index` names a slot inside the region, which `region` keeps mapped; no other `SlotMut` or `Slot`
        // has this index while `self` lives (`Pool::take` removed it from the free list), so `&mut` is exclusive.
        unsafe { slice::from_raw_parts_mut(self.region.slot_ptr(self.index).as_ptr(), len) }
    }

    /// Bytes in the slot.
    pub fn capacity(&self) -> usize {
        self.region.slot_bytes as usize
    }

    /// Ends writing: `len` bytes from the slot's start can now be read and shared.
    pub fn freeze(self, len: usize) -> Chunk {
        let len = len.min(self.capacity());
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the reference count it holds moves into the slot made here.
        let region = unsafe { std::ptr::read(&this.region) };
        region.meta[this.index as usize].holders.store(1, Ordering::Relaxed);
        Chunk { bytes: Bytes::Slot(Slot { region, index: this.index }), offset: 0, len }
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
struct Slot {
    region: Arc<Region>,
    index: u32,
}

impl Slot {
    fn as_slice(&self) -> &[u8] {
        let len = self.region.slot_bytes as usize;
        // SAFETY: the region stays mapped while `region` is held; a frozen slot has no `SlotMut`, so nobody writes to
        // it until the last `Slot` is dropped, which cannot happen during this borrow.
        unsafe { slice::from_raw_parts(self.region.slot_ptr(self.index).as_ptr(), len) }
    }

    /// Counts this slot as kept until its last holder drops it. False: it is not, and too many others are.
    fn keep(&self) -> bool {
        let meta = &self.region.meta[self.index as usize];
        // Whoever drops the slot last sees the mark: the holder that set it drops its own hold later, with Release.
        if meta.kept.load(Ordering::Relaxed) {
            return true;
        }
        let max = self.region.meta.len() as u32 / 2;
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
        // Release: this holder's reads happen before the slot is written again; the fence below pairs with it.
        if self.region.meta[self.index as usize].holders.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            self.region.give_back(self.index);
        }
    }
}

/// Bytes somebody may keep: a range of a slot, or of a heap block where a slot would not do (a message longer than a
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

    /// Index of the slot in its pool and offset of the first byte in the slot; `None` for a heap block.
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

/// The mapping, and who holds which slot.
#[derive(Debug)]
struct Region {
    base: NonNull<u8>,
    map_bytes: usize,
    slot_bytes: u32,
    meta: Box<[SlotMeta]>,
    /// Top of the stack of returned slots; `NONE` when empty.
    returned: AtomicU32,
    in_use: AtomicU32,
    /// Slots with the mark, and those of them that are about to be given back.
    kept: AtomicU32,
    copies: AtomicU64,
    /// For these copies.
    buffers: Buffers,
}

#[derive(Debug)]
struct SlotMeta {
    holders: AtomicU32,
    kept: AtomicBool,
    next: AtomicU32,
}

const NONE: u32 = u32::MAX;

// SAFETY: `base` is only dereferenced through `SlotMut` (one holder) and `Slot` (readers only), and the holder counts
// and the returned stack are atomics; nothing in a region is tied to a thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn map(memory: Memory<'_>, slot_bytes: u32, slots: u32) -> io::Result<Self> {
        let bytes = (slot_bytes as usize).checked_mul(slots as usize).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let (map_bytes, base) = match memory {
            Memory::Anonymous | Memory::HugePages => {
                let (flags, align) = match memory {
                    Memory::HugePages => (MapFlags::PRIVATE | MapFlags::HUGETLB, 2 << 20),
                    _ => (MapFlags::PRIVATE | MapFlags::NORESERVE, 4096),
                };
                let map_bytes = bytes.next_multiple_of(align);
                // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
                (map_bytes, unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), map_bytes, protection, flags) }?)
            }
            Memory::File(file) => {
                let length = rustix::fs::fstat(file)?.st_size;
                if u64::try_from(length).unwrap_or(0) < bytes as u64 {
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is shorter than the slots"));
                }
                // SAFETY: a new mapping at an address the kernel chooses aliases nothing. Another process that writes
                // to the file could change received bytes, as it could change any durable data: the file's mode keeps
                // others out.
                let base =
                    unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) }?;
                (bytes, base)
            }
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let free = || SlotMeta { holders: AtomicU32::new(0), kept: AtomicBool::new(false), next: AtomicU32::new(NONE) };
        Ok(Self {
            base,
            map_bytes,
            slot_bytes,
            meta: (0..slots).map(|_| free()).collect(),
            returned: AtomicU32::new(NONE),
            in_use: AtomicU32::new(0),
            kept: AtomicU32::new(0),
            copies: AtomicU64::new(0),
            buffers: Buffers::default(),
        })
    }

    fn slot_ptr(&self, index: u32) -> NonNull<u8> {
        debug_assert!((index as usize) < self.meta.len());
        // SAFETY: `index` is below the number of slots (indexes are only made in `Pool::new`), so the offset is inside
        // the mapping, which is at least `slot_bytes * slots` long.
        unsafe { self.base.add(index as usize * self.slot_bytes as usize) }
    }

    /// Any thread: puts a slot on the stack. Only the owner takes from it, and takes all of it, so there is no ABA.
    fn give_back(&self, index: u32) {
        let kept = &self.meta[index as usize].kept;
        let was_kept = kept.load(Ordering::Relaxed);
        if was_kept {
            kept.store(false, Ordering::Relaxed);
        }
        let mut top = self.returned.load(Ordering::Relaxed);
        loop {
            self.meta[index as usize].next.store(top, Ordering::Relaxed);
            // Release: what this thread did with the slot happens before the owner's next use of it.
            match self.returned.compare_exchange_weak(top, index, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => top = now,
            }
        }
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        if was_kept {
            // Last, and seen to be last by who takes the place: until then the slot is not back.
            self.kept.fetch_sub(1, Ordering::Release);
        }
    }

    fn drain_returned(&self, free: &mut Vec<u32>) {
        let mut at = self.returned.swap(NONE, Ordering::Acquire);
        let start = free.len();
        while at != NONE {
            free.push(at);
            at = self.meta[at as usize].next.load(Ordering::Relaxed);
        }
        // The stack's top was freed last: it shall be used first.
        free[start..].reverse();
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `map` with this length; every slot holds the region, so none is left.
        // An error would mean a wrong address or length, which cannot be.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.map_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(slots: u32) -> Pool {
        Pool::new(Memory::Anonymous, 64, slots).unwrap()
    }

    #[test]
    fn a_slot_comes_back_only_when_its_last_holder_drops_it() {
        let mut pool = pool(1);
        let mut slot = pool.take().unwrap();
        slot.as_mut_slice()[..5].copy_from_slice(b"hello");
        let chunk = slot.freeze(5);
        let tail = chunk.slice(1..5);
        drop(chunk);
        assert!(pool.take().is_none());
        assert_eq!(&*tail, b"ello");
        assert_eq!(tail.slot(), Some((0, 1)));
        drop(tail);
        assert_eq!(pool.in_use(), 0);
        assert!(pool.take().is_some());
    }

    #[test]
    fn slots_freed_by_other_threads_are_found_again_and_each_once() {
        let mut pool = pool(64);
        for _ in 0..200 {
            let chunks: Vec<_> = std::iter::from_fn(|| pool.take()).map(|slot| slot.freeze(64)).collect();
            assert_eq!(chunks.len(), 64);
            let mut indexes: Vec<_> = chunks.iter().map(|chunk| chunk.slot().unwrap().0).collect();
            indexes.sort_unstable();
            indexes.dedup();
            assert_eq!(indexes.len(), 64, "a slot was given out twice");
            std::thread::scope(|scope| {
                let mut chunks = chunks.into_iter();
                for _ in 0..4 {
                    let part: Vec<_> = chunks.by_ref().take(16).collect();
                    scope.spawn(move || drop(part));
                }
            });
        }
    }

    #[test]
    fn the_pool_survives_in_its_slots() {
        let chunk = pool(2).take().unwrap().freeze(64);
        assert_eq!(&*chunk, [0; 64]);
    }

    #[test]
    fn a_pool_in_a_file_writes_through() {
        let file = rustix::fs::memfd_create("slots", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 128).unwrap();
        use std::os::fd::AsFd;
        let mut pool = Pool::new(Memory::File(file.as_fd()), 64, 2).unwrap();
        let mut slot = pool.take().unwrap();
        slot.as_mut_slice()[0] = 7;
        let (index, _) = slot.freeze(1).slot().unwrap();
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, u64::from(index) * 64).unwrap();
        assert_eq!(byte, [7]);
        assert!(Pool::new(Memory::File(file.as_fd()), 64, 3).is_err());
    }

    /// What an engine holds to receive into does not count, and neither does what is only looked at.
    #[test]
    fn half_of_the_slots_are_kept_and_then_copies_are_made() {
        let mut pool = pool(8);
        let ring: Vec<_> = (0..4).map(|_| pool.take().unwrap()).collect();
        let received: Vec<_> = (0..4).map(|_| pool.take().unwrap().freeze(64)).collect();
        assert_eq!((pool.in_use(), pool.kept()), (8, 0));
        let mut kept: Vec<_> = received.iter().map(|chunk| chunk.slice(1..9).into_kept()).collect();
        assert!(kept.iter().all(|chunk| chunk.slot().is_some()));
        // Again, and another part: a slot counts once.
        kept.push(received[0].clone().into_kept());
        assert!(received[0].slice(9..64).keep());
        assert_eq!((pool.kept(), pool.take_copies()), (4, 0));

        let mut slot = ring.into_iter().next().unwrap();
        slot.as_mut_slice()[..4].copy_from_slice(b"more");
        let more = slot.freeze(4);
        assert!(!more.keep());
        let copy = more.clone().into_kept();
        assert_eq!((copy.slot(), &*copy), (None, &b"more"[..]));
        assert_eq!((pool.kept(), pool.take_copies(), pool.take_copies()), (4, 1, 0));
        // One hold less on a slot is none less; the last one makes room.
        drop(received);
        assert!(!more.keep());
        kept.swap_remove(1);
        assert_eq!(pool.kept(), 3);
        assert!(more.keep());
        drop((kept, more));
        assert_eq!((pool.kept(), pool.in_use()), (0, 0));
        // A slot that comes back has lost its mark.
        let again: Vec<_> = (0..8).map(|_| pool.take().unwrap().freeze(1)).collect();
        assert_eq!((pool.kept(), again.iter().filter(|chunk| chunk.keep()).count()), (0, 4));
    }

    #[test]
    fn of_one_slot_none_is_kept() {
        let chunk = pool(1).take().unwrap().freeze(64);
        assert_eq!(chunk.into_kept().slot(), None);
    }

    /// Holders on several threads keep the same slots and let go of them, and nothing is counted twice or forgotten.
    #[test]
    fn what_is_kept_is_counted_right_from_many_threads() {
        let mut pool = pool(16);
        for _ in 0..200 {
            let chunks: Vec<_> = std::iter::from_fn(|| pool.take()).map(|slot| slot.freeze(64)).collect();
            assert_eq!(chunks.len(), 16);
            let barrier = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    let (chunks, barrier) = (chunks.clone(), &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        for chunk in chunks {
                            let _ = chunk.into_kept();
                        }
                    });
                }
                assert!(pool.kept() <= 8);
            });
            assert_eq!(pool.kept(), 8, "this thread still holds all of them");
            drop(chunks);
            assert_eq!(pool.kept(), 0);
        }
    }
}
