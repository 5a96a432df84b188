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
//! Where the region lives (anonymous memory, huge pages, a file, persistent memory) is a property of the pool, not of the
//! engine. [`SlotName`] is a slot's name that stays valid over restarts: what a store needs to find its data again. A pool
//! that is opened with the slots that are live ([`Pool::open`]) never receives into them.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::{fmt, io, ops, slice};

use rustix::mm::{MapFlags, ProtFlags};

use crate::buffers::{Buffer, Buffers, Shared};
use crate::error::Error;

/// Where the memory of a pool lives.
#[derive(Debug)]
#[non_exhaustive]
pub enum Memory {
    /// Private anonymous memory, given out by the kernel as slots are first used.
    Anonymous,
    /// Anonymous memory on huge pages reserved by the administrator (`vm.nr_hugepages`).
    HugePages,
    /// A shared mapping of this file, which must be at least `slot_bytes * slots` long. What is received is in the page
    /// cache, not on the medium. The file is locked for as long as the pool lives (flock(2)); a process that cuts it all
    /// the same kills this one with SIGBUS.
    File(OwnedFd),
    /// The same on a DAX file system, mapped with MAP_SYNC (mmap(2), Linux 4.15): a store that is flushed from the CPU's
    /// caches is on the medium. Refused where the file system or the medium cannot do that.
    Dax(OwnedFd),
}

/// A pool before it is opened.
#[derive(Debug)]
pub struct PoolSpec {
    /// Where its memory lives.
    pub memory: Memory,
    /// The pool's part of its slots' [names](SlotName).
    pub id: u16,
    /// Size of a slot in bytes.
    pub slot_bytes: u32,
    /// Number of slots.
    pub slots: u32,
    /// Bytes at the beginning of each slot that nothing is received into: room for the owner to write a header in front of
    /// the data, where it lies. 0 by default.
    pub headroom_bytes: u32,
    /// Most slots that may be kept beyond the turn that received into them; half of the slots by default. The rest is
    /// what the engine receives into, so an owner that keeps more slots than this gets copies.
    pub kept_max: u32,
    /// Slots whose bytes are live: they are handed out as [`Opened::live`], and received into only after the last holder
    /// dropped them. They count as kept, also beyond `kept_max`.
    pub live: Vec<SlotName>,
}

impl PoolSpec {
    /// Slots of `slot_bytes` bytes each, without headroom, of which half may be kept.
    pub fn new(memory: Memory, slot_bytes: u32, slots: u32) -> Self {
        Self { memory, id: 0, slot_bytes, slots, headroom_bytes: 0, kept_max: slots / 2, live: Vec::new() }
    }
}

/// A place in a pool. It stays valid as long as the pool's memory: over restarts, for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotName {
    /// The pool: [`PoolSpec::id`].
    pub pool: u16,
    /// The slot in its pool.
    pub index: u32,
    /// First byte in the slot.
    pub offset: u32,
    /// Number of bytes.
    pub len: u32,
}

/// A pool with what was live in it.
#[derive(Debug)]
pub struct Opened {
    /// The pool.
    pub pool: Pool,
    /// The live bytes, in the order in which they were named.
    pub live: Vec<Chunk>,
}

/// Slots of one shard. Slots may travel to other threads; the pool stays with its shard.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    /// Free slots only this thread knows; the last one freed is the first one used, while it is warm in the cache.
    free: Vec<u32>,
}

impl Pool {
    /// Cuts `slots` slots of `slot_bytes` bytes from one region, none of them live.
    ///
    /// # Errors
    ///
    /// As [`Pool::open`].
    pub fn new(memory: Memory, slot_bytes: u32, slots: u32) -> Result<Self, Error> {
        Ok(Self::open(PoolSpec::new(memory, slot_bytes, slots))?.pool)
    }

    /// Opens a pool and holds its live slots.
    ///
    /// # Errors
    ///
    /// [`Error::Pool`]: the memory cannot be had, another process has locked the file, the file is too short, it is not on
    /// persistent memory, or a name is outside of the pool.
    pub fn open(spec: PoolSpec) -> Result<Opened, Error> {
        let bytes = spec.slot_bytes as usize * spec.slots as usize;
        let live = spec.live.clone();
        let region = Arc::new(Region::map(spec).map_err(|source| Error::Pool { bytes, source })?);
        let outside = |name: &SlotName| {
            let text = format!("{name:?} is outside of the pool, or of another one");
            Error::Pool { bytes, source: io::Error::new(io::ErrorKind::InvalidInput, text) }
        };
        let mut chunks: Vec<Chunk> = Vec::with_capacity(live.len());
        for name in &live {
            let end = name.offset.checked_add(name.len).filter(|end| *end <= region.slot_bytes);
            let inside = name.pool == region.id && (name.index as usize) < region.meta.len();
            if !inside || end.is_none() {
                return Err(outside(name));
            }
            let meta = &region.meta[name.index as usize];
            if meta.holders.fetch_add(1, Ordering::Relaxed) == 0 {
                meta.kept.store(true, Ordering::Relaxed);
                region.in_use.fetch_add(1, Ordering::Relaxed);
                region.kept.fetch_add(1, Ordering::Relaxed);
            }
            let slot = Slot { region: Arc::clone(&region), index: name.index };
            chunks.push(Chunk { bytes: Bytes::Slot(slot), offset: name.offset as usize, len: name.len as usize });
        }
        let is_free = |index: &u32| region.meta[*index as usize].holders.load(Ordering::Relaxed) == 0;
        let free = (0..region.meta.len() as u32).rev().filter(is_free).collect();
        Ok(Opened { pool: Self { region, free }, live: chunks })
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

    /// Bytes at the beginning of each slot that nothing is received into.
    pub fn headroom_bytes(&self) -> usize {
        self.region.headroom_bytes as usize
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.region.meta.len() as u32
    }

    /// Slots somebody holds now.
    pub fn in_use(&self) -> u32 {
        self.region.in_use.load(Ordering::Relaxed)
    }

    /// Slots kept beyond the turn that received into them: at most [`PoolSpec::kept_max`], and those that were live.
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
    /// First byte behind the headroom, for the kernel to write to. Valid as long as this value lives.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_mut_slice().as_mut_ptr()
    }

    /// The slot's bytes behind the headroom.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let headroom = self.region.headroom_bytes as usize;
        let len = self.region.slot_bytes as usize;
        // SAFETY: `index` names a slot inside the region, which `region` keeps mapped; no other `SlotMut` or `Slot`
        // has this index while `self` lives (`Pool::take` removed it from the free list), so `&mut` is exclusive.
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
        Chunk { bytes: Bytes::Slot(Slot { region, index: this.index }), offset, len }
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
        // SAFETY: the count says that this is the only holder, and `&mut self` that nobody clones it during the borrow, so
        // no other reference into the slot exists; the slot is longer than its headroom (`Region::map`).
        Some(unsafe { slice::from_raw_parts_mut(slot.region.slot_ptr(slot.index).as_ptr(), bytes) })
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
    id: u16,
    slot_bytes: u32,
    headroom_bytes: u32,
    kept_max: u32,
    meta: Box<[SlotMeta]>,
    /// Keeps the lock on the file.
    _file: Option<OwnedFd>,
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
    fn map(spec: PoolSpec) -> io::Result<Self> {
        let PoolSpec { memory, id, slot_bytes, slots, headroom_bytes, kept_max, live: _ } = spec;
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
                let flags = if is_dax { MapFlags::SHARED_VALIDATE | MapFlags::SYNC } else { MapFlags::SHARED };
                // SAFETY: a new mapping at an address the kernel chooses aliases nothing. The lock keeps other pools out;
                // another process that writes to the file without a lock could change received bytes, as it could change
                // any durable data: the file's mode keeps others out.
                let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) };
                let base = base.map_err(|error| match error {
                    rustix::io::Errno::OPNOTSUPP if is_dax => io::Error::new(
                        io::ErrorKind::Unsupported,
                        "the file is not on persistent memory with DAX (MAP_SYNC is refused); mount the file system \
                         with dax=always on a pmem device, or use another kind of memory",
                    ),
                    error => error.into(),
                })?;
                let (Memory::File(file) | Memory::Dax(file)) = memory else { return Err(invalid("no file")) };
                (bytes, base, Some(file))
            }
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let free = || SlotMeta { holders: AtomicU32::new(0), kept: AtomicBool::new(false), next: AtomicU32::new(NONE) };
        Ok(Self {
            base,
            map_bytes,
            id,
            slot_bytes,
            headroom_bytes,
            kept_max,
            _file: file,
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

    /// Most machines reserve none: then the pool is refused by name, which is all that can be seen there.
    #[test]
    fn huge_pages_are_used_or_refused_by_name() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let free = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Free:")).map_or("0", str::trim);
        match Pool::new(Memory::HugePages, 4096, 16) {
            Err(error) => {
                let text = format!("{error} {:?}", std::error::Error::source(&error));
                assert!(text.contains("vm.nr_hugepages"), "{text}");
                eprintln!("no memory on huge pages was tried: {free} are free");
            }
            Ok(mut pool) => {
                let mut slot = pool.take().unwrap();
                slot.as_mut_slice().fill(7);
                let at = slot.as_mut_slice().as_ptr().addr();
                let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
                let range = |line: &str| {
                    let (from, to) = line.split(' ').next()?.split_once('-')?;
                    Some(usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?)
                };
                let mut lines = smaps.lines().skip_while(|line| !range(line).is_some_and(|range| range.contains(&at)));
                let page = lines.find_map(|line| line.strip_prefix("KernelPageSize:")).unwrap();
                assert_eq!(page.trim(), "2048 kB");
                assert_eq!(slot.freeze(4096)[4095], 7);
            }
        }
    }

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
        let again = || file.try_clone().unwrap();
        let mut pool = Pool::new(Memory::File(again()), 64, 2).unwrap();
        let mut slot = pool.take().unwrap();
        slot.as_mut_slice()[0] = 7;
        let (index, _) = slot.freeze(1).slot().unwrap();
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, u64::from(index) * 64).unwrap();
        assert_eq!(byte, [7]);
        assert!(Pool::new(Memory::File(again()), 64, 3).is_err());
    }

    fn temporary_file(bytes: u64) -> (tempfile::TempDir, impl Fn() -> OwnedFd) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("slots");
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        (folder, move || std::fs::File::options().read(true).write(true).open(&path).unwrap().into())
    }

    #[test]
    fn live_slots_are_found_by_name_and_not_received_into() {
        let (_folder, open) = temporary_file(4 * 64);
        let spec = || PoolSpec { id: 7, headroom_bytes: 8, ..PoolSpec::new(Memory::File(open()), 64, 4) };
        let mut pool = Pool::open(spec()).unwrap().pool;
        let mut names = Vec::new();
        let mut held = Vec::new();
        for text in [b"one", b"two"] {
            let mut slot = pool.take().unwrap();
            slot.as_mut_slice()[..3].copy_from_slice(text);
            let chunk = slot.freeze(3);
            names.push(chunk.name().unwrap());
            held.push(chunk);
        }
        assert_eq!(names.iter().map(|name| (name.pool, name.offset, name.len)).collect::<Vec<_>>(), [(7, 8, 3); 2]);
        assert!(Pool::open(spec()).is_err(), "the file is locked");
        drop((pool, held));

        // After a restart: the live ones are there, and only the others are given out.
        let Opened { mut pool, live } = Pool::open(PoolSpec { live: names.clone(), ..spec() }).unwrap();
        assert_eq!(live.iter().map(|chunk| &**chunk).collect::<Vec<_>>(), [b"one", b"two"]);
        assert_eq!(live.iter().map(|chunk| chunk.name().unwrap()).collect::<Vec<_>>(), names);
        assert_eq!((pool.in_use(), pool.kept()), (2, 2));
        let free: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(free.len(), 2);
        drop((free, live));
        assert_eq!((pool.in_use(), pool.kept()), (0, 0));
        let all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(all.len(), 4, "what is no longer live is received into again");
    }

    #[test]
    fn names_outside_of_the_pool_are_refused() {
        let name = SlotName { pool: 0, index: 0, offset: 0, len: 64 };
        let wrong = [
            SlotName { pool: 1, ..name },
            SlotName { index: 4, ..name },
            SlotName { offset: 1, ..name },
            SlotName { offset: u32::MAX, ..name },
        ];
        for name in wrong {
            let spec = PoolSpec { live: vec![name], ..PoolSpec::new(Memory::Anonymous, 64, 4) };
            let error = Pool::open(spec).unwrap_err().to_string();
            assert!(error.contains("outside of the pool"), "{error}");
        }
        let twice = PoolSpec { live: vec![name; 2], ..PoolSpec::new(Memory::Anonymous, 64, 4) };
        let Opened { pool, live } = Pool::open(twice).unwrap();
        assert_eq!((pool.in_use(), live.len()), (1, 2));
    }

    #[test]
    fn headroom_is_written_by_the_only_holder() {
        let spec = PoolSpec { headroom_bytes: 16, ..PoolSpec::new(Memory::Anonymous, 64, 1) };
        let mut pool = Pool::open(spec).unwrap().pool;
        let mut slot = pool.take().unwrap();
        assert_eq!((slot.capacity(), slot.as_mut_slice().len()), (48, 48));
        slot.as_mut_slice()[..4].copy_from_slice(b"data");
        let mut chunk = slot.freeze(4);
        assert_eq!((chunk.slot(), &*chunk), (Some((0, 16)), &b"data"[..]));
        let other = chunk.clone();
        assert!(chunk.headroom_mut().is_none());
        drop(other);
        chunk.headroom_mut().unwrap().copy_from_slice(b"a header of 16 b");
        assert_eq!(&*chunk, b"data");
        let all = PoolSpec { headroom_bytes: 64, ..PoolSpec::new(Memory::Anonymous, 64, 1) };
        assert!(Pool::open(all).is_err());
    }

    #[test]
    fn the_owner_sets_how_many_are_kept() {
        let spec = PoolSpec { kept_max: 3, ..PoolSpec::new(Memory::Anonymous, 64, 4) };
        let mut pool = Pool::open(spec).unwrap().pool;
        let chunks: Vec<_> = (0..4).map(|_| pool.take().unwrap().freeze(1).into_kept()).collect();
        assert_eq!(chunks.iter().filter(|chunk| chunk.name().is_some()).count(), 3);
    }

    /// This machine's file systems are on disks, or in memory without DAX.
    #[test]
    fn what_is_no_persistent_memory_is_refused_by_name() {
        let (_folder, open) = temporary_file(4096);
        match Pool::new(Memory::Dax(open()), 4096, 1) {
            Ok(_) => println!("the temporary folder is on persistent memory"),
            Err(error) => assert!(error.to_string().contains("MAP_SYNC"), "{error}"),
        }
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
