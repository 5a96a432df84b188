//! Handles of objects that listings met, so that the next listing asks the kernel for attributes alone.
//!
//! A file system gives the number of a removed inode to a new one, whose handle is another. The time of birth (`stx_btime`) tells
//! the two apart if it is older than any step of the kernel's clock when the kernel is asked for the handle: an inode that takes the
//! number later is younger. Therefore the cache has no younger inodes, and none of a file system that tells no time of birth.
//!
//! A handle stays for a minute at most. That bounds the harm of a clock that goes back, and of an inode whose generation somebody
//! sets (FS_IOC_SETVERSION): handles of listings are stale until then.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::attr::Time;
use crate::handle::Handle;

/// Parts of the cache, each with its own lock. One is emptied each second.
const PARTS: usize = 60;
/// Handles of a part: those that its table has room for with 2048 buckets. About 110 bytes each, 12 MB in all.
const PART_MAX: usize = 1792;

/// The inode's time of birth, and its handle.
type Known = (Time, Handle);

/// By the id of an export and the number of an inode on its root's device.
type Part = HashMap<(u32, u64), Known>;

/// The cache, bounded in handles.
#[derive(Debug)]
pub(crate) struct HandleCache {
    parts: Box<[Mutex<Part>]>,
    seconds: AtomicUsize,
}

impl Default for HandleCache {
    fn default() -> Self {
        Self { parts: (0..PARTS).map(|_| Mutex::default()).collect(), seconds: AtomicUsize::new(0) }
    }
}

impl HandleCache {
    pub(crate) fn get(&self, export_id: u32, inode: u64) -> Option<Known> {
        self.part(inode).get(&(export_id, inode)).cloned()
    }

    /// Keeps the handle of an inode whose time of birth is settled. A part without room starts anew.
    pub(crate) fn keep(&self, export_id: u32, inode: u64, known: Known) {
        let mut part = self.part(inode);
        if part.len() == PART_MAX {
            part.clear();
        }
        part.insert((export_id, inode), known);
    }

    /// To be called once a second.
    pub(crate) fn expire(&self) {
        let at = self.seconds.fetch_add(1, Ordering::Relaxed) % PARTS;
        let gone = std::mem::take(&mut *self.lock(at));
        drop(gone);
    }

    fn part(&self, inode: u64) -> MutexGuard<'_, Part> {
        self.lock((inode % PARTS as u64) as usize)
    }

    fn lock(&self, at: usize) -> MutexGuard<'_, Part> {
        self.parts[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    fn known(inode: u64) -> Known {
        let kernel = KernelHandle::new(1, &inode.to_ne_bytes()).unwrap();
        (Time { seconds: inode as i64, nanos: 1 }, Handle::new(1, &Key([3; 16]), &kernel).unwrap())
    }

    #[test]
    fn a_handle_is_kept_for_a_minute_and_for_its_export() {
        let cache = HandleCache::default();
        (0..200).for_each(|inode| cache.keep(1, inode, known(inode)));
        assert!((0..200).all(|inode| cache.get(1, inode) == Some(known(inode)) && cache.get(2, inode).is_none()));
        (1..PARTS).for_each(|_| cache.expire());
        assert!(cache.get(1, PARTS as u64 - 1).is_some());
        cache.expire();
        assert!((0..200).all(|inode| cache.get(1, inode).is_none()));
    }

    #[test]
    fn there_are_never_more_than_the_bound() {
        let cache = HandleCache::default();
        let count = 3 * (PARTS * PART_MAX) as u64 / 2;
        (0..count).for_each(|inode| cache.keep(1, inode, known(inode)));
        let all: usize = (0..PARTS).map(|at| cache.lock(at).len()).sum();
        assert!(all <= PARTS * PART_MAX && cache.get(1, count - 1).is_some(), "{all}");
    }
}
