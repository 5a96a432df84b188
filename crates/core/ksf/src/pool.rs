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

mod chunk;
mod region;
mod slot;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use self::chunk::Chunk;
use self::region::Region;
pub use self::slot::SlotMut;
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
            chunks.push(Chunk::of_slot(Arc::clone(&region), name.index, name.offset as usize, name.len as usize));
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

#[cfg(test)]
mod tests;
