//! Receive slots: fixed-size pieces of one memory region.
//!
//! The engine receives into a slot, the connection finds messages in it, and code that still needs the bytes keeps the
//! slot: a reply that forwards them, a worker on another thread, a store that makes them durable where they landed.
//! What is long is not copied. A slot goes back to its shard when its last holder drops it, from any thread.
//!
//! A short message that is kept is copied into a short slot, if the pool has some ([`PoolSpec::with_short`]) and one is
//! free: a message of 100 bytes then occupies 2 KiB instead of the slot that it was received into, which is received
//! into again. Nothing is received into short slots, and any thread takes one.
//!
//! At most half of the long slots may be kept at a time; what is kept beyond that is a copy on the heap. Slots the
//! engine receives into, and those whose bytes are looked at in this turn, do not count. So when a turn begins, half of
//! the slots are with the engine or free for it, whatever peers and services do, and a shard never waits for a slot
//! that are kept.
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
mod free;
mod region;
mod slot;
mod sync;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

pub use self::chunk::Chunk;
use self::region::Region;
pub use self::slot::SlotMut;
use crate::buffers::Buffers;
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

/// Size of a short slot.
pub const SHORT_SLOT_BYTES: u32 = 2 << 10;

/// Id of a pool of short slots, unless said otherwise.
pub const SHORT_ID: u16 = u16::MAX;

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
    /// Most slots that may be kept beyond the turn that received into them; half of the slots by default, all of them for
    /// short ones. The rest is what the engine receives into, so an owner that keeps more slots than this gets copies. A
    /// kept slot is occupied as a whole, so this bounds `kept_max * slot_bytes` bytes.
    pub kept_max: u32,
    /// Slots whose bytes are live: they are handed out as [`Opened::live`], and received into only after the last holder
    /// dropped them. They count as kept, also beyond `kept_max`.
    pub live: Vec<SlotName>,
    /// Slots that short messages are kept in; none by default, and messages are kept in the slots they were received into.
    pub short: Option<Box<PoolSpec>>,
    /// Memory of copies, which are made when `kept_max` slots are kept; by default a source of its own, which keeps
    /// [`KEEP_BYTES_PER_CLASS`](crate::buffers::KEEP_BYTES_PER_CLASS). A server takes its own one instead.
    pub buffers: Buffers,
}

impl PoolSpec {
    /// Slots of `slot_bytes` bytes each, without headroom, of which half may be kept.
    pub fn new(memory: Memory, slot_bytes: u32, slots: u32) -> Self {
        let (kept_max, buffers) = (slots / 2, Buffers::default());
        Self { memory, id: 0, slot_bytes, slots, headroom_bytes: 0, kept_max, live: Vec::new(), short: None, buffers }
    }

    /// Slots of [`SHORT_SLOT_BYTES`] bytes each for [`PoolSpec::with_short`]: their id is [`SHORT_ID`], and all of them may be
    /// kept.
    pub fn short(memory: Memory, slots: u32) -> Self {
        Self { id: SHORT_ID, kept_max: slots, ..Self::new(memory, SHORT_SLOT_BYTES, slots) }
    }

    /// Keeps short messages in these slots: a pool of its own, with an id, a place, headroom, a budget and live slots of its
    /// own. Nothing is received into it.
    pub fn with_short(self, short: Self) -> Self {
        Self { short: Some(Box::new(short)), ..self }
    }

    fn bytes(&self) -> usize {
        (self.slot_bytes as usize).saturating_mul(self.slots as usize)
    }

    fn refused(&self, why: &str) -> Error {
        Error::Pool { bytes: self.bytes(), source: io::Error::new(io::ErrorKind::InvalidInput, why) }
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
    /// The live bytes, in the order in which they were named; those in short slots behind the others.
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
    pub fn open(mut spec: PoolSpec) -> Result<Opened, Error> {
        let opened_short = match spec.short.take() {
            None => None,
            Some(short) if short.id == spec.id => {
                return Err(short.refused("the pools of long and of short slots have the same id; give each its own"));
            }
            Some(short) if short.short.is_some() => return Err(short.refused("short slots have no shorter ones")),
            Some(short) => Some(Self::open_region(*short, None)?),
        };
        let (short, live_short) = opened_short.unzip();
        if let Some(short) = &short {
            short.offer(short.never_used());
        }
        let (region, mut live) = Self::open_region(spec, short)?;
        live.extend(live_short.unwrap_or_default());
        let free = region.never_used().collect();
        Ok(Opened { pool: Self { region, free }, live })
    }

    fn open_region(spec: PoolSpec, short: Option<Arc<Region>>) -> Result<(Arc<Region>, Vec<Chunk>), Error> {
        let bytes = spec.bytes();
        let failed = |source| Error::Pool { bytes, source };
        let live = spec.live.clone();
        let region = Arc::new(Region::map(spec, short).map_err(failed)?);
        let live = region.hold(&live).map_err(failed)?;
        Ok((region, live))
    }

    /// A free slot, or `None` when all are in use.
    pub fn take(&mut self) -> Option<SlotMut> {
        if self.free.is_empty() {
            self.region.take_free(&mut self.free);
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

    /// Long slots somebody holds now; of short ones [`Pool::usage`] tells.
    pub fn in_use(&self) -> u32 {
        self.region.in_use.load(Ordering::Relaxed)
    }

    /// Long slots kept beyond the turn that received into them: at most [`PoolSpec::kept_max`], and those that were live.
    pub fn kept(&self) -> u32 {
        self.region.kept.load(Ordering::Relaxed)
    }

    /// Slots that are in use and kept now, of both sizes. Any thread may ask [`Watch`] instead.
    pub fn usage(&self) -> PoolUsage {
        self.watch().usage()
    }

    pub(crate) fn watch(&self) -> Watch {
        let short = self.region.short.as_ref().map(Arc::downgrade).unwrap_or_default();
        Watch { long: Arc::downgrade(&self.region), short }
    }

    /// A copy of a message of at most the size of a short slot, in one. `None`: it is longer, or as many short slots are
    /// kept as may be.
    pub(crate) fn keep_short(&self, message: &[u8]) -> Option<Chunk> {
        self.region.short.as_ref()?.keep_copy(message)
    }

    /// How often [`Message::keep`](crate::Message::keep) copied to the heap, since the last time this was asked.
    pub(crate) fn take_copies(&self) -> u64 {
        match self.region.copies.load(Ordering::Relaxed) {
            // Nearly always; the exchange is for the rare case.
            0 => 0,
            _ => self.region.copies.swap(0, Ordering::Relaxed),
        }
    }
}

/// Slots of one size: how many there are, and what they are used for now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotUsage {
    /// Bytes in a slot.
    pub slot_bytes: u32,
    /// Number of slots.
    pub slots: u64,
    /// Slots that are held.
    pub in_use: u64,
    /// Those of them that are kept beyond the turn that received into them.
    pub kept: u64,
}

impl SlotUsage {
    /// Bytes that are occupied by what is kept: a kept message occupies all of its slot.
    pub fn kept_bytes(&self) -> u64 {
        self.kept * u64::from(self.slot_bytes)
    }

    fn of(region: &Weak<Region>) -> Self {
        let Some(region) = region.upgrade() else { return Self::default() };
        Self {
            slot_bytes: region.slot_bytes,
            slots: region.meta.len() as u64,
            in_use: region.in_use.load(Ordering::Relaxed).into(),
            kept: region.kept.load(Ordering::Relaxed).into(),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            slot_bytes: self.slot_bytes.max(other.slot_bytes),
            slots: self.slots + other.slots,
            in_use: self.in_use + other.in_use,
            kept: self.kept + other.kept,
        }
    }
}

/// The slots of a pool, of both sizes; zeros for a size that it has none of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Slots that are received into.
    pub long: SlotUsage,
    /// Slots that short messages are kept in.
    pub short: SlotUsage,
}

impl PoolUsage {
    /// The same for two pools together, as those of two shards.
    pub fn plus(self, other: Self) -> Self {
        Self { long: self.long.plus(other.long), short: self.short.plus(other.short) }
    }
}

/// Tells from any thread how a pool is used, and does not keep its memory.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    long: Weak<Region>,
    short: Weak<Region>,
}

impl Watch {
    pub(crate) fn usage(&self) -> PoolUsage {
        PoolUsage { long: SlotUsage::of(&self.long), short: SlotUsage::of(&self.short) }
    }
}

#[cfg(test)]
mod tests;
