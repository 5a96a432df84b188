//! Attributes that are answered without asking the kernel, of exports that nothing but this server changes.
//!
//! ```text
//!   change:  changing(object) ── the change, and the attributes after it ── drop
//!              │ forgets the entry, and no other is kept until the drop
//!   fill:    filling(object) ── statx ── keep: only if no change began since
//! ```
//!
//! An entry is there only while no change of its object is under way, so the attributes in it are those of every moment at which it
//! is there. A call that arrives after a reply left is therefore never answered with older attributes than that reply showed.
//!
//! The exception is a removal or a rename of a name for whose object the kernel gives no handle: all entries are forgotten after the
//! change ([`AttrCache::changing_unknown`]) instead of before it, since calls that fail must not empty the cache. An entry of that object
//! may be answered for this moment. The change itself is not answered before; another reply may show it earlier, and a later call may
//! then get the older attributes.
//!
//! The table has a fixed number of slots, and an object has one of them, by its inode. Objects that share a slot push each other
//! out, and a change of one forgets the other: the cache then answers less than it could, and never anything wrong. The export
//! has no part in the choice of the slot, so a change by the handle of one export forgets the entry of another export, too, which
//! has the same file by a hard link.

use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::attr::Attr;
use crate::handle::Handle;

/// The attributes of objects, for all exports of a layer.
#[derive(Debug, Default)]
pub(crate) struct AttrCache {
    /// Empty where nothing is kept.
    slots: Box<[Mutex<Slot>]>,
    hits: AtomicU64,
}

#[derive(Debug, Default)]
struct Slot {
    /// Changes that have begun, ever.
    begun: u64,
    /// Changes that are under way.
    under_way: u32,
    kept: Option<(Handle, Attr)>,
}

impl AttrCache {
    /// A cache with this many slots; 0 keeps nothing.
    pub(crate) fn new(slots: usize) -> Self {
        Self { slots: (0..slots).map(|_| Mutex::default()).collect(), hits: AtomicU64::new(0) }
    }

    /// The attributes of an object, if they are known.
    pub(crate) fn get(&self, handle: &Handle) -> Option<Attr> {
        let slot = self.lock(self.slot_of(handle)?);
        let attr = slot.kept.as_ref().filter(|(kept, _)| kept == handle).map(|(_, attr)| *attr)?;
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(attr)
    }

    /// How often attributes were known.
    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// A change of this object begins. It ends when what is returned is dropped, which must be before the change is answered.
    pub(crate) fn changing(&self, handle: &Handle) -> Changing<'_> {
        self.begin(self.slot_of(handle).map_or(0..0, |at| at..at + 1))
    }

    /// A change of an object begins, or has just been made, whose handle is not known. This looks at every slot.
    pub(crate) fn changing_unknown(&self) -> Changing<'_> {
        self.begin(0..self.slots.len())
    }

    fn begin(&self, slots: Range<usize>) -> Changing<'_> {
        let mut first = None;
        for at in slots.clone() {
            let mut slot = self.lock(at);
            slot.begun += 1;
            first = (slot.under_way == 0).then_some(slot.begun);
            slot.under_way += 1;
            slot.kept = None;
        }
        Changing { cache: self, slots, first }
    }

    /// To be called before the attributes of an object are read. `None` while a change is under way.
    pub(crate) fn filling(&self, handle: &Handle) -> Option<Filling<'_>> {
        let at = self.slot_of(handle)?;
        let slot = self.lock(at);
        (slot.under_way == 0).then_some(Filling { cache: self, at, begun: slot.begun })
    }

    fn slot_of(&self, handle: &Handle) -> Option<usize> {
        let mut hasher = DefaultHasher::new();
        hasher.write(handle.inode_bytes());
        let at = hasher.finish().checked_rem(self.slots.len() as u64)?;
        Some(at as usize)
    }

    fn lock(&self, at: usize) -> MutexGuard<'_, Slot> {
        self.slots[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A change under way.
#[derive(Debug)]
#[must_use = "the change ends when this is dropped"]
pub(crate) struct Changing<'a> {
    cache: &'a AttrCache,
    slots: Range<usize>,
    /// Which change it is, of its one object or of the last of many, if no other was under way.
    first: Option<u64>,
}

impl Changing<'_> {
    /// True if no other change of the object was under way since this one began. False where that is not known: there is no
    /// cache, or the other change was of an object in the same slot.
    pub(crate) fn is_alone(&self) -> bool {
        self.slots.len() == 1 && self.first == Some(self.cache.lock(self.slots.start).begun)
    }

    /// True if this is a change of that object, too, as far as the cache tells them apart.
    pub(crate) fn is_of(&self, handle: &Handle) -> bool {
        self.cache.slot_of(handle).is_some_and(|at| self.slots.contains(&at))
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        for at in self.slots.clone() {
            self.cache.lock(at).under_way -= 1;
        }
    }
}

/// Attributes that are being read.
#[derive(Debug)]
pub(crate) struct Filling<'a> {
    cache: &'a AttrCache,
    at: usize,
    begun: u64,
}

impl Filling<'_> {
    /// Keeps attributes that were read since, unless a change has begun meanwhile.
    pub(crate) fn keep(self, handle: &Handle, attr: &Attr) {
        let mut slot = self.cache.lock(self.at);
        if slot.begun == self.begun {
            slot.kept = Some((handle.clone(), *attr));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::{FileType, Time};
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    fn handle(export: u32, inode: u8) -> Handle {
        Handle::new(export, &Key([export as u8; 16]), &KernelHandle::new(1, &[inode; 8]).unwrap()).unwrap()
    }

    fn attr(size: u64) -> Attr {
        let time = Time::default();
        Attr {
            file_type: FileType::Regular,
            mode: 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            size,
            used: 0,
            device: (0, 0),
            fsid: 1,
            fileid: 2,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    fn fill(cache: &AttrCache, handle: &Handle, size: u64) {
        cache.filling(handle).unwrap().keep(handle, &attr(size));
        assert_eq!(cache.get(handle), Some(attr(size)));
    }

    #[test]
    fn nothing_is_known_from_the_beginning_of_a_change_until_the_next_fill() {
        let (cache, file) = (AttrCache::new(64), handle(1, 7));
        assert_eq!(cache.get(&file), None);
        fill(&cache, &file, 5);
        let (one, two) = (cache.changing(&file), cache.changing(&file));
        assert_eq!(cache.get(&file), None, "at the beginning, not at the end");
        drop(one);
        assert!(cache.filling(&file).is_none(), "another change is under way");
        drop(two);
        assert_eq!(cache.get(&file), None);
        fill(&cache, &file, 6);
        assert_eq!(cache.hits(), 2);
    }

    #[test]
    fn what_was_read_before_a_change_is_not_kept_after_it() {
        let (cache, file) = (AttrCache::new(64), handle(1, 7));
        let before = cache.filling(&file).unwrap();
        drop(cache.changing(&file));
        before.keep(&file, &attr(5));
        assert_eq!(cache.get(&file), None);
        let before = cache.filling(&file).unwrap();
        let change = cache.changing_unknown();
        before.keep(&file, &attr(5));
        assert_eq!(cache.get(&file), None);
        drop(change);
        fill(&cache, &file, 6);
    }

    #[test]
    fn a_change_is_alone_unless_another_was_under_way_meanwhile() {
        let (cache, file) = (AttrCache::new(64), handle(1, 7));
        let one = cache.changing(&file);
        assert!(one.is_alone());
        let two = cache.changing(&file);
        assert!(!one.is_alone() && !two.is_alone());
        drop(two);
        assert!(!one.is_alone(), "the other came between");
        drop(one);
        let three = cache.changing(&file);
        assert!(three.is_alone());
        drop(cache.changing_unknown());
        assert!(!three.is_alone());
        assert!(!AttrCache::new(0).changing(&file).is_alone(), "nothing is known");
    }

    #[test]
    fn a_change_by_the_handle_of_one_export_is_one_of_the_inode() {
        let cache = AttrCache::new(1 << 12);
        let (here, there) = (handle(1, 7), handle(2, 7));
        fill(&cache, &here, 5);
        assert_eq!(cache.get(&there), None, "another handle");
        drop(cache.changing(&there));
        assert_eq!(cache.get(&here), None);
    }

    #[test]
    fn objects_that_share_a_slot_push_each_other_out() {
        let cache = AttrCache::new(1);
        fill(&cache, &handle(1, 7), 5);
        fill(&cache, &handle(1, 8), 6);
        assert_eq!(cache.get(&handle(1, 7)), None);
    }

    #[test]
    fn a_cache_without_slots_keeps_nothing() {
        let (cache, file) = (AttrCache::new(0), handle(1, 7));
        drop((cache.changing(&file), cache.changing_unknown()));
        assert!(cache.filling(&file).is_none());
        assert_eq!(cache.get(&file), None);
    }
}
