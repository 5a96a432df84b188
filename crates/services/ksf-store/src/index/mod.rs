//! The index: every key of the store in order, shared by all shards.
//!
//! ```text
//!   top: first key of each leaf ─► leaf (locked alone)      a get or a set: one look, one leaf
//!        (read by all, written by a split)  leaf
//!                                           leaf            a range: one leaf after the other
//! ```
//!
//! A command on several keys locks the leaves of all of them, in the order of the keys, so that others see it whole and no
//! two commands wait for each other.

pub mod leaf;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard, ShardedLockWriteGuard};

use self::leaf::{ENTRIES_MAX, Entry, Leaf};
use crate::format::Lsn;

type Top = BTreeMap<Box<[u8]>, Arc<Mutex<Leaf>>>;

/// All keys in order.
#[derive(Debug)]
pub struct Index {
    top: ShardedLock<Top>,
    keys: AtomicUsize,
}

impl Default for Index {
    fn default() -> Self {
        let first: Box<[u8]> = Box::default();
        Self { top: ShardedLock::new(BTreeMap::from([(first, Arc::default())])), keys: AtomicUsize::new(0) }
    }
}

/// A panic while a leaf was locked leaves it whole: a leaf is changed only by its own functions, which do not panic between
/// two of its steps.
fn lock(leaf: &Mutex<Leaf>) -> MutexGuard<'_, Leaf> {
    leaf.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The leaf that has, or would have, a key. The first leaf begins with the empty key, so there is one.
fn leaf_of<'a>(top: &'a Top, key: &[u8]) -> Option<(&'a [u8], &'a Mutex<Leaf>)> {
    let range = (Bound::Unbounded, Bound::Included(key));
    top.range::<[u8], _>(range).next_back().map(|(first, leaf)| (&**first, &**leaf))
}

/// The leaves of a command's keys, locked.
#[derive(Debug)]
pub struct Locked<'a> {
    /// Each with its first key, in order.
    leaves: Vec<(&'a [u8], MutexGuard<'a, Leaf>)>,
    added: isize,
    keys: &'a AtomicUsize,
    /// First keys of those that became too long.
    long: &'a RefCell<Vec<Box<[u8]>>>,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // Wraps as a difference of counts does.
        self.keys.fetch_add(self.added as usize, Ordering::Relaxed);
        let long = self.leaves.iter().filter(|(_, leaf)| leaf.len() > ENTRIES_MAX);
        self.long.borrow_mut().extend(long.map(|(first, _)| Box::from(*first)));
    }
}

impl Locked<'_> {
    fn place(&self, key: &[u8]) -> Option<usize> {
        self.leaves.partition_point(|(first, _)| *first <= key).checked_sub(1)
    }

    /// What a key has. `None` for a key that the command did not name, too.
    pub fn get(&self, key: &[u8]) -> Option<Entry<'_>> {
        let leaf = &self.leaves[self.place(key)?].1;
        leaf.entry(leaf.find(key).ok()?)
    }

    /// Sets what a key has; it is one that the command named.
    pub fn set(&mut self, entry: &Entry<'_>) {
        if let Some(at) = self.place(entry.key) {
            let leaf = &mut self.leaves[at].1;
            let before = leaf.len();
            leaf.set(entry);
            self.added += leaf.len() as isize - before as isize;
        }
    }

    /// The record of a key was written again elsewhere.
    pub fn moved(&mut self, key: &[u8], log: u16, lsn: Lsn) {
        if let Some(at) = self.place(key) {
            self.leaves[at].1.moved(key, log, lsn);
        }
    }

    /// One more older record of a key is on a medium.
    pub fn add_older(&mut self, key: &[u8]) {
        if let Some(at) = self.place(key) {
            self.leaves[at].1.add_older(key);
        }
    }

    /// An older record of a key is on no medium any more. True if the entry is [settled](Entry::is_settled) by that.
    pub fn forget_older(&mut self, key: &[u8]) -> bool {
        self.place(key).is_some_and(|at| self.leaves[at].1.forget_older(key))
    }

    /// Takes a key out. True if it was there.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let removed = self.place(key).is_some_and(|at| self.leaves[at].1.remove(key));
        self.added -= isize::from(removed);
        removed
    }
}

impl Index {
    /// Number of keys.
    pub fn len(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    /// True without a key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory that it takes, but for what the allocator needs.
    pub fn memory_bytes(&self) -> usize {
        let top = self.read();
        let of_top = size_of::<(Box<[u8]>, Arc<Mutex<Leaf>>)>() + size_of::<Mutex<Leaf>>();
        top.iter().map(|(first, leaf)| first.len() + of_top + lock(leaf).memory_bytes()).sum()
    }

    fn read(&self) -> ShardedLockReadGuard<'_, Top> {
        self.top.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> ShardedLockWriteGuard<'_, Top> {
        self.top.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the leaves of these keys, and calls `command` with them: nobody sees less, or more, than all that it does.
    pub fn with<R>(&self, keys: &[&[u8]], command: impl FnOnce(&mut Locked<'_>) -> R) -> R {
        self.with_own(keys, |mut locked| command(&mut locked))
    }

    /// The same for a command that keeps what is locked among what is its own.
    pub fn with_own<R>(&self, keys: &[&[u8]], command: impl FnOnce(Locked<'_>) -> R) -> R {
        let long = RefCell::default();
        let result = {
            let top = self.read();
            let mut places: Vec<_> = keys.iter().filter_map(|key| leaf_of(&top, key)).collect();
            places.sort_unstable_by_key(|(first, _)| *first);
            places.dedup_by_key(|(first, _)| *first);
            let leaves = places.into_iter().map(|(first, leaf)| (first, lock(leaf))).collect();
            command(Locked { leaves, added: 0, keys: &self.keys, long: &long })
        };
        for first in long.into_inner() {
            self.split(&first);
        }
        result
    }

    /// Splits a leaf, if it is still too long.
    fn split(&self, first: &[u8]) {
        let mut top = self.write();
        let Some(leaf) = top.get(first) else { return };
        let mut leaf = lock(leaf);
        if leaf.len() <= ENTRIES_MAX {
            return;
        }
        let right = leaf.split();
        drop(leaf);
        let Some(first) = right.entry(0).map(|entry| Box::from(entry.key)) else { return };
        top.insert(first, Arc::new(Mutex::new(right)));
    }

    /// Goes through the keys from `from` on, in order, one leaf at a time, until `take` returns false. Keys that come or
    /// go meanwhile are seen or not; all others are seen once.
    pub fn scan(&self, from: &[u8], mut take: impl FnMut(&Entry<'_>) -> bool) {
        let mut from = from.to_vec();
        loop {
            let top = self.read();
            let Some((first, leaf)) = leaf_of(&top, &from) else { return };
            let leaf = lock(leaf);
            let start = leaf.find(&from).unwrap_or_else(|at| at);
            if !leaf.entries(start).all(|entry| take(&entry)) {
                return;
            }
            let next = top.range::<[u8], _>((Bound::Excluded(first), Bound::Unbounded)).next();
            let Some((next, _)) = next else { return };
            from.clear();
            from.extend_from_slice(next);
        }
    }

    /// Looks for keys that ended before `now_ms`, and that `counts` takes, from `from` on and at the end from the first key
    /// again: in at most `leaves_max` leaves, until there are `keys_max`. `from` becomes the place to go on at. A leaf in which
    /// no key ends so soon costs one look, however many keys it has.
    pub fn find_ended(
        &self,
        from: &mut Vec<u8>,
        now_ms: u64,
        (leaves_max, keys_max): (usize, usize),
        counts: impl Fn(&Entry<'_>) -> bool,
    ) -> Vec<Vec<u8>> {
        let mut ended = Vec::new();
        let top = self.read();
        for _ in 0..leaves_max.min(top.len()) {
            let Some((first, leaf)) = leaf_of(&top, from) else { break };
            let mut leaf = lock(leaf);
            if leaf.soonest_ms() <= now_ms {
                // Of keys that are taken out, the end stays until it is looked for again.
                leaf.find_soonest(&counts);
                let is_over = |entry: &Entry<'_>| entry.expires_ms.is_some_and(|end| end <= now_ms) && counts(entry);
                let found = leaf.entries(0).filter(is_over).map(|entry| entry.key.to_vec());
                ended.extend(found.take(keys_max - ended.len()));
                if ended.len() == keys_max {
                    // There may be more in this leaf.
                    break;
                }
            }
            let next = top.range::<[u8], _>((Bound::Excluded(first), Bound::Unbounded)).next();
            from.clear();
            from.extend_from_slice(next.map_or(&[][..], |(next, _)| next));
        }
        ended
    }

    /// Takes leaves away that have no key left, but for the first one.
    pub fn shrink(&self) {
        let mut top = self.write();
        top.retain(|first, leaf| first.is_empty() || !lock(leaf).is_empty());
    }
}
