//! The memory of a pool, and the state of its slots.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::{Memory, PoolSpec};
use crate::buffers::Buffers;

/// The mapping, and who holds which slot.
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
    /// Top of the stack of returned slots; `NONE` when empty.
    returned: AtomicU32,
    pub(super) in_use: AtomicU32,
    /// Slots with the mark, and those of them that are about to be given back.
    pub(super) kept: AtomicU32,
    pub(super) copies: AtomicU64,
    /// For these copies.
    pub(super) buffers: Buffers,
}

#[derive(Debug)]
pub(super) struct SlotMeta {
    pub(super) holders: AtomicU32,
    pub(super) kept: AtomicBool,
    next: AtomicU32,
}

const NONE: u32 = u32::MAX;

// SAFETY: `base` is only dereferenced through `SlotMut` (one holder) and `Slot` (readers only), and the holder counts
// and the returned stack are atomics; nothing in a region is tied to a thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub(super) fn map(spec: PoolSpec) -> io::Result<Self> {
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

    pub(super) fn slot_ptr(&self, index: u32) -> NonNull<u8> {
        debug_assert!((index as usize) < self.meta.len());
        // SAFETY: `index` is below the number of slots (indexes are only made in `Pool::new`), so the offset is inside
        // the mapping, which is at least `slot_bytes * slots` long.
        unsafe { self.base.add(index as usize * self.slot_bytes as usize) }
    }

    /// Any thread: puts a slot on the stack. Only the owner takes from it, and takes all of it, so there is no ABA.
    pub(super) fn give_back(&self, index: u32) {
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

    pub(super) fn drain_returned(&self, free: &mut Vec<u32>) {
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
