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

mod hint;
pub mod leaf;
mod top;

use std::cell::{Cell, RefCell};
use std::slice;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;
use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard, ShardedLockWriteGuard};

use self::leaf::{ENTRIES_MAX, Entry, Leaf, LetGo, NOWHERE, Origin};
pub(crate) use self::top::bytes_of_leaf;
use self::top::{LeafIndex, Top};
use crate::format::Lsn;
use crate::memory::{Memory, Sizes};
use crate::work;

/// Leaves that were taken out. Their memory is given back in steps, and counts until then.
#[derive(Debug)]
pub(crate) struct Cleared(Top);

impl Cleared {
    /// Bytes of memory that are not given back yet.
    pub(crate) fn used(&self) -> usize {
        self.0.leaves().map(|(first, numbered)| bytes_of_leaf(first) + lock(&numbered.leaf).sizes().used).sum()
    }

    /// Gives the memory of a leaf back; false if there is none left.
    pub(crate) fn free_one(&mut self, memory: &Memory) -> bool {
        let Some((first, numbered)) = self.0.pop() else { return false };
        let used = bytes_of_leaf(&first) + lock(&numbered.leaf).sizes().used;
        drop(numbered);
        memory.count(Sizes::default() - Sizes { used, values: used, ..Sizes::default() });
        true
    }
}

/// Where an index counts its memory.
#[derive(Debug)]
struct Counted {
    memory: Arc<Memory>,
    /// Its values may be let go of.
    lets_go: bool,
}

impl Counted {
    fn count(&self, more: Sizes) {
        self.memory.count(self.of(more));
    }

    /// What of these sizes counts.
    fn of(&self, sizes: Sizes) -> Sizes {
        let Sizes { used, tombstones, .. } = sizes;
        if self.lets_go { sizes } else { Sizes { used, tombstones, ..Sizes::default() } }
    }
}

/// A place in a [walk in steps](Index::step), which no change of the index moves: in front of it are the keys of the leaves
/// before this one, and those of this one whose hash is below that of the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    leaf: u32,
    hash: u16,
}

impl Position {
    /// Bits of the number of a position.
    pub const BITS: u32 = u32::BITS + HASH_BITS;

    /// The position as a number, which is not 0.
    pub fn number(self) -> u64 {
        u64::from(self.leaf) << HASH_BITS | u64::from(self.hash)
    }

    /// The position that has this number, of which the lowest [`BITS`](Self::BITS) count. It may be one that there never was:
    /// then a walk begins anew.
    pub fn of_number(number: u64) -> Self {
        Self { leaf: (number >> HASH_BITS) as u32, hash: (number & ((1 << HASH_BITS) - 1)) as u16 }
    }
}

/// Bits of the hash of a key: so many that few keys of a leaf share one.
const HASH_BITS: u32 = 13;

/// The order in which a walk in steps shows the keys of a leaf. It must not depend on what else is in the leaf.
fn hash_of(key: &[u8]) -> u16 {
    (crc32c::crc32c(key) & ((1 << HASH_BITS) - 1)) as u16
}

/// Keys that one step of a walk looks at for each that it is to show.
const LOOKS_PER_KEY: usize = 10;
/// Leaves that one look at the list of leaves is good for; those that split a leaf wait for it.
const LEAVES_AT_ONCE: usize = 64;
/// How often a key is drawn before any is taken.
const DRAWS_MAX: usize = 128;

/// All keys in order.
#[derive(Debug)]
pub struct Index {
    top: ShardedLock<Top>,
    keys: AtomicUsize,
    /// No key ends before this time, in milliseconds since 1970, but for those that the [round](Round) has passed that is under
    /// way.
    soonest_ms: CachePadded<AtomicU64>,
    counted: Counted,
}

/// A look at all leaves for keys that have ended, in steps.
#[derive(Debug)]
pub struct Round {
    /// The key to go on from.
    from: Vec<u8>,
    is_under_way: bool,
    /// When the first of the keys ends that it has passed.
    soonest_ms: u64,
}

impl Round {
    /// True if it goes on.
    pub fn is_under_way(&self) -> bool {
        self.is_under_way
    }

    /// Goes on from this key, which has ended and is not taken out, if the round has passed it.
    pub fn go_back(&mut self, key: &[u8]) {
        if !self.is_under_way {
            // It is over, and the index has kept that a key ended: another round follows this rest.
            *self = Self { is_under_way: true, ..Self::default() };
        } else if *self.from <= *key {
            return;
        }
        self.from.clear();
        self.from.extend_from_slice(key);
    }
}

impl Default for Round {
    fn default() -> Self {
        Self { from: Vec::new(), is_under_way: false, soonest_ms: u64::MAX }
    }
}

/// With memory without bound.
impl Default for Index {
    fn default() -> Self {
        Self::new(Arc::new(Memory::new(usize::MAX)), true)
    }
}

/// A panic while a leaf was locked leaves it whole: a leaf is changed only by its own functions, which do not panic between
/// two of its steps.
fn lock(leaf: &Mutex<Leaf>) -> MutexGuard<'_, Leaf> {
    leaf.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The leaf that has, or would have, a key.
fn leaf_of<'a>(top: &'a Top, key: &[u8]) -> Option<(&'a [u8], &'a Mutex<Leaf>)> {
    top.leaf_of(key).map(|(first, numbered)| (first, &*numbered.leaf))
}

/// A leaf that is locked, with its first key.
type Guard<'a> = (&'a [u8], MutexGuard<'a, Leaf>);

/// Those of a command, in order. Most commands have one, which takes no memory.
#[derive(Debug)]
enum Guards<'a> {
    One(Guard<'a>),
    Several(Several<'a>),
}

/// Several leaves that are locked. The list of leaves does not change meanwhile.
#[derive(Debug)]
struct Several<'a> {
    top: &'a Top,
    /// Where each of them is in the list: numbers are faster to search than first keys.
    places: Vec<LeafIndex>,
    guards: Vec<Guard<'a>>,
}

impl<'a> Guards<'a> {
    /// Locks the leaves of these keys.
    fn of(top: &'a Top, keys: &[&[u8]]) -> Self {
        let held = |(first, leaf)| (first, lock(leaf));
        if let [key] = keys
            && let Some(place) = leaf_of(top, key)
        {
            return Self::One(held(place));
        }
        let mut places: Vec<_> = keys.iter().map(|key| top.place(key)).collect();
        places.sort_unstable();
        places.dedup();
        let leaf_at = |place: &LeafIndex| top.at(*place).map(|(first, numbered)| held((first, &*numbered.leaf)));
        let guards = places.iter().filter_map(leaf_at).collect();
        Self::Several(Several { top, places, guards })
    }

    fn all(&self) -> &[Guard<'a>] {
        match self {
            Self::One(guard) => slice::from_ref(guard),
            Self::Several(several) => &several.guards,
        }
    }

    /// The place of the leaf of a key that the command named, without a search if the key is where the `last` one was found.
    fn place(&self, key: &[u8], last: Found) -> Option<usize> {
        let Self::Several(Several { top, places, guards }) = self else { return Some(0) };
        let is_at = |at| guards.get(last.leaf).is_some_and(|(_, leaf)| leaf.is_at(at, key));
        if last.at.is_ok_and(is_at) { Some(last.leaf) } else { places.binary_search(&top.place(key)).ok() }
    }

    fn leaf(&self, place: usize) -> &Leaf {
        &self.all()[place].1
    }

    fn leaf_mut(&mut self, place: usize) -> &mut Leaf {
        match self {
            Self::One((_, leaf)) => leaf,
            Self::Several(several) => &mut several.guards[place].1,
        }
    }
}

/// Where a key was found, or would have been: its leaf among those of the command, and the place in that.
#[derive(Clone, Copy, Debug)]
struct Found {
    leaf: usize,
    at: Result<usize, usize>,
}

/// The leaves of a command's keys, locked.
#[derive(Debug)]
pub struct Locked<'a> {
    guards: Guards<'a>,
    /// The last key that was looked for: a command asks for the same key several times.
    last: Cell<Found>,
    added: isize,
    /// What the leaves have more of than before.
    more: Sizes,
    index: &'a Index,
    /// First keys of those that became too long, or have nothing left.
    odd: &'a RefCell<Vec<Box<[u8]>>>,
}

/// Whether a leaf is to be split, or to be taken away: the first one stays.
fn is_odd(first: &[u8], leaf: &Leaf) -> bool {
    leaf.len() > ENTRIES_MAX || leaf.is_empty() && !first.is_empty()
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.added != 0 {
            // Wraps as a difference of counts does.
            self.index.keys.fetch_add(self.added as usize, Ordering::Relaxed);
        }
        self.index.counted.count(self.more);
        let odd = self.guards.all().iter().filter(|(first, leaf)| is_odd(first, leaf));
        self.odd.borrow_mut().extend(odd.map(|(first, _)| Box::from(*first)));
    }
}

impl Locked<'_> {
    /// The place of the leaf of a key that the command named.
    fn place(&self, key: &[u8]) -> Option<usize> {
        self.guards.place(key, self.last.get())
    }

    /// The leaf of a key, and the entry of it that the key has.
    fn find(&self, key: &[u8]) -> Option<(usize, usize)> {
        let leaf = self.place(key)?;
        let at = self.guards.leaf(leaf).find_near(key, self.last.get().at);
        self.last.set(Found { leaf, at });
        Some((leaf, at.ok()?))
    }

    /// What a key has. `None` for a key that the command did not name, too.
    pub fn get(&self, key: &[u8]) -> Option<Entry<'_>> {
        let (place, at) = self.find(key)?;
        self.guards.leaf(place).entry(at)
    }

    /// The same, and its value is used now.
    pub fn get_to_use(&mut self, key: &[u8]) -> Option<Entry<'_>> {
        let (place, at) = self.find(key)?;
        let leaf = self.guards.leaf_mut(place);
        leaf.touch(at);
        leaf.entry(at)
    }

    /// Bytes of memory that a key and its value take.
    pub fn entry_bytes(&self, key: &[u8]) -> Option<usize> {
        let (place, at) = self.find(key)?;
        Some(self.guards.leaf(place).entry_bytes(at))
    }

    /// Changes a leaf, and counts what it takes.
    fn change<R>(&mut self, at: usize, change: impl FnOnce(&mut Leaf) -> R) -> R {
        let leaf = self.guards.leaf_mut(at);
        let (before, soonest_ms) = (leaf.sizes(), leaf.soonest_ms());
        let result = change(leaf);
        self.more += leaf.sizes() - before;
        if leaf.soonest_ms() < soonest_ms {
            self.index.soonest_ms.fetch_min(leaf.soonest_ms(), Ordering::Relaxed);
        }
        result
    }

    /// Sets what a key has; it is one that the command named.
    pub fn set(&mut self, entry: &Entry<'_>) {
        if let Some(at) = self.place(entry.key) {
            debug_assert!(self.guards.all()[at].0 <= entry.key, "the command named another key");
            let near = self.last.get().at;
            self.added += self.change(at, |leaf| {
                let before = leaf.len();
                leaf.set_near(entry, near);
                leaf.len() as isize - before as isize
            });
        }
    }

    /// The record of a key was written again elsewhere.
    pub fn moved(&mut self, key: &[u8], log: u16, lsn: Lsn) {
        if let Some(at) = self.place(key) {
            self.guards.leaf_mut(at).moved(key, log, lsn);
        }
    }

    /// One more older record of a key is on a medium.
    pub fn add_older(&mut self, key: &[u8]) {
        if let Some(at) = self.place(key) {
            self.guards.leaf_mut(at).add_older(key);
        }
    }

    /// An older record of a key is on no medium any more. True if the entry is [settled](Entry::is_settled) by that.
    pub fn forget_older(&mut self, key: &[u8]) -> bool {
        self.place(key).is_some_and(|at| self.guards.leaf_mut(at).forget_older(key))
    }

    /// Takes a key out. True if it was there.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let Some(at) = self.place(key) else { return false };
        let removed = self.change(at, |leaf| leaf.remove(key));
        self.added -= isize::from(removed);
        removed
    }

    /// Removes the keys of the only leaf that begin with `front`.
    fn remove_front(&mut self, front: &[u8], take: impl FnMut(&Entry<'_>)) {
        if let Some(at) = self.place(front) {
            let removed = self.change(at, |leaf| leaf.remove_front(front, take));
            self.added -= removed as isize;
            work::add(removed as u64);
        }
    }

    /// True if the only leaf may have a key in front of its [`end`](Self::end), and may still grow.
    fn takes(&self, key: &[u8]) -> bool {
        let [(first, leaf)] = self.guards.all() else { return false };
        !is_odd(first, leaf) && *first <= key
    }

    /// The first key behind the range of the only leaf; `None`: it is the last one.
    fn end<'t>(&self, top: &'t Top) -> Option<&'t [u8]> {
        let guard = self.guards.all().first()?;
        top.behind(guard.0).map(|(next, _)| next)
    }
}

impl Index {
    /// An empty index, whose memory is counted there. `lets_go`: its values may be [let go of](Index::let_go).
    pub fn new(memory: Arc<Memory>, lets_go: bool) -> Self {
        memory.count(Sizes { used: bytes_of_leaf(&[]), ..Sizes::default() });
        let (keys, soonest_ms) = (AtomicUsize::new(0), CachePadded::new(AtomicU64::new(u64::MAX)));
        Self { top: ShardedLock::new(Top::new(0)), keys, soonest_ms, counted: Counted { memory, lets_go } }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    /// True without a key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory that it takes, but for what the allocator needs, and what is in them: by a look at every leaf, as a
    /// check of what is counted.
    pub fn measure(&self) -> Sizes {
        let top = self.read();
        top.leaves().fold(Sizes::default(), |sum, (first, numbered)| {
            let sizes = lock(&numbered.leaf).sizes();
            let used = sizes.used + bytes_of_leaf(first);
            sum + self.counted.of(Sizes { used, ..sizes })
        })
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
        let odd = RefCell::default();
        let result = {
            let top = self.read();
            command(self.lock(&top, keys, &odd))
        };
        self.reshape_all(odd);
        result
    }

    /// Calls `each` for items with the leaf of their key locked. In the order of their keys, those of one leaf cost one search for it,
    /// and one lock.
    pub(crate) fn with_each<T>(
        &self,
        items: impl IntoIterator<Item = (Vec<u8>, T)>,
        mut each: impl FnMut(&mut Locked<'_>, &[u8], T),
    ) {
        let mut items = items.into_iter();
        let mut next = items.next();
        while let Some((key, item)) = next.take() {
            let odd = RefCell::default();
            {
                let top = self.read();
                let mut locked = self.lock(&top, &[&key], &odd);
                each(&mut locked, &key, item);
                next = items.next();
                let end = next.as_ref().and_then(|_| locked.end(&top));
                let is_of_leaf = |locked: &Locked<'_>, key: &[u8]| locked.takes(key) && end.is_none_or(|end| key < end);
                while let Some((key, item)) = next.take_if(|(key, _)| is_of_leaf(&locked, key)) {
                    each(&mut locked, &key, item);
                    next = items.next();
                }
            }
            self.reshape_all(odd);
        }
    }

    /// Removes the keys that begin with `front`, and hands each entry to `take` before.
    pub(crate) fn remove_front(&self, front: &[u8], mut take: impl FnMut(&Entry<'_>)) {
        let mut from: Option<Box<[u8]>> = Some(front.into());
        while let Some(key) = from {
            let odd = RefCell::default();
            from = {
                let top = self.read();
                let mut locked = self.lock(&top, &[&key], &odd);
                locked.remove_front(front, &mut take);
                locked.end(&top).filter(|next| next.starts_with(front)).map(Box::from)
            };
            self.reshape_all(odd);
        }
    }

    fn lock<'a>(&'a self, top: &'a Top, keys: &[&[u8]], odd: &'a RefCell<Vec<Box<[u8]>>>) -> Locked<'a> {
        let guards = Guards::of(top, keys);
        let last = Cell::new(Found { leaf: 0, at: NOWHERE });
        Locked { guards, last, added: 0, more: Sizes::default(), index: self, odd }
    }

    fn reshape_all(&self, odd: RefCell<Vec<Box<[u8]>>>) {
        for first in odd.into_inner() {
            self.reshape(&first);
        }
    }

    /// Splits a leaf if it is still too long, into as many as it takes, and takes it away if it is still empty.
    fn reshape(&self, first: &[u8]) {
        let mut top = self.write();
        let Some(numbered) = top.get(first) else { return };
        let mut leaf = lock(&numbered.leaf);
        if !is_odd(first, &leaf) {
            return;
        }
        if leaf.is_empty() {
            let less = leaf.sizes() + Sizes { used: bytes_of_leaf(first), ..Sizes::default() };
            drop(leaf);
            top.remove(first);
            self.counted.count(Sizes::default() - less);
            return;
        }
        let before = leaf.sizes();
        let others = leaf.split();
        let mut more = leaf.sizes() - before;
        drop(leaf);
        for other in others {
            let Some(first) = other.entry(0).map(|entry| Box::<[u8]>::from(entry.key)) else { continue };
            more += other.sizes() + Sizes { used: bytes_of_leaf(&first), ..Sizes::default() };
            top.insert(first, other);
        }
        self.counted.count(more);
    }

    /// Lets go of values from the key `hand` on, and at the end from the first one again; `hand` becomes the key to go on from.
    /// `may` says whether the record of a value is on a medium.
    pub fn let_go(&self, hand: &mut Vec<u8>, mut left: LetGo, may: impl Fn(Origin) -> bool) {
        let top = self.read();
        for _ in 0..left.leaves.min(top.len()) {
            let Some((first, leaf)) = leaf_of(&top, hand) else { return };
            let mut leaf = lock(leaf);
            let before = leaf.sizes();
            if before.values > 0 {
                let from = leaf.find(hand).unwrap_or_else(|at| at);
                let next = leaf.let_go(from, &mut left, &may);
                self.counted.count(leaf.sizes() - before);
                if let Some(next) = leaf.entry(next) {
                    hand.clear();
                    hand.extend_from_slice(next.key);
                    return;
                }
            }
            let next = top.behind(first);
            hand.clear();
            hand.extend_from_slice(next.map_or(&[][..], |(next, _)| next));
            if left.looks == 0 || left.bytes == 0 {
                return;
            }
        }
    }

    /// Takes a value that was read from its medium, if the key still has this version and no value. True if it did.
    pub fn take_in(&self, key: &[u8], version: u64, value: &Arc<[u8]>) -> bool {
        self.with(&[key], |locked| {
            let Some(at) = locked.place(key) else { return false };
            locked.change(at, |leaf| leaf.take_in(key, version, value))
        })
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
            let mut visited = 0;
            let goes_on = leaf.entries(start).all(|entry| {
                visited += 1;
                take(&entry)
            });
            work::add(visited);
            if !goes_on {
                return;
            }
            let Some((next, _)) = top.behind(first) else { return };
            from.clear();
            from.extend_from_slice(next);
        }
    }

    /// Hands leaves to `take`, from that of a key on, each with the first key of the next one, until it returns false.
    fn each_leaf(&self, from: &[u8], mut take: impl FnMut(&Leaf, Option<&[u8]>) -> bool) {
        let mut from = from.to_vec();
        loop {
            let top = self.read();
            let mut leaves = top.leaves_from(&from).peekable();
            let mut next: Option<&[u8]> = None;
            for _ in 0..LEAVES_AT_ONCE {
                let Some((_, numbered)) = leaves.next() else { return };
                work::add(1);
                next = leaves.peek().map(|(first, _)| *first);
                if !take(&lock(&numbered.leaf), next) {
                    return;
                }
            }
            let Some(next) = next else { return };
            from = next.to_vec();
        }
    }

    /// How many keys there are from one (with it) to another (without it). It looks at each leaf between them, and not at each
    /// key. Keys that come or go meanwhile count or not.
    pub fn count(&self, from: &[u8], to: &[u8]) -> usize {
        let mut count = 0;
        self.each_leaf(from, |leaf, next| {
            let place = |key: &[u8]| leaf.find(key).unwrap_or_else(|at| at);
            let goes_on = next.is_some_and(|next| next < to);
            let end = if goes_on { leaf.len() } else { place(to) };
            count += end.saturating_sub(place(from));
            goes_on
        });
        count
    }

    /// [`scan`](Self::scan) without the first `skipped` keys, of which it does not look at each.
    pub fn scan_behind(&self, from: &[u8], skipped: usize, take: impl FnMut(&Entry<'_>) -> bool) {
        let (mut left, mut start) = (skipped, None);
        self.each_leaf(from, |leaf, _| {
            let first = leaf.find(from).unwrap_or_else(|at| at);
            let of_leaf = leaf.len().saturating_sub(first);
            if left < of_leaf {
                start = leaf.entry(first + left).map(|entry| entry.key.to_vec());
                return false;
            }
            left -= of_leaf;
            true
        });
        if let Some(start) = start {
            self.scan(&start, take);
        }
    }

    /// Goes through some of the keys that begin with `front`, from a position on or from the first one: hands about `count` of
    /// those that `counts` takes to `take`. Returns the position to go on from; `None`: there are no more.
    ///
    /// From the first step to the last, a key that is there all the time is shown, whatever else comes or goes: once, or
    /// again if its leaf is split or taken away meanwhile. A position of a leaf that is gone for long begins anew.
    pub fn step(
        &self,
        front: &[u8],
        from: Option<Position>,
        count: usize,
        mut counts: impl FnMut(&Entry<'_>) -> bool,
        mut take: impl FnMut(&Entry<'_>),
    ) -> Option<Position> {
        let (mut from, mut hash) = {
            let top = self.read();
            match from.and_then(|from| top.place_of(from)) {
                Some((first, hash)) if first.starts_with(front) => (first.to_vec(), hash),
                // The leaf in which the keys begin has others in front of them.
                Some((first, hash)) if first < front => (front.to_vec(), hash),
                _ => (front.to_vec(), 0),
            }
        };
        let mut left = count.max(1);
        let mut looks = left.saturating_mul(LOOKS_PER_KEY);
        loop {
            let top = self.read();
            let (first, leaf) = leaf_of(&top, &from)?;
            let number = top.get(first)?.number;
            let leaf = lock(leaf);
            let start = leaf.find(&from).unwrap_or_else(|at| at);
            let (mut found, mut is_end) = (Vec::new(), false);
            for (at, entry) in (start..).zip(leaf.entries(start)) {
                if !entry.key.starts_with(front) {
                    is_end = true;
                    break;
                }
                looks = looks.saturating_sub(1);
                let of_key = hash_of(entry.key);
                if of_key >= hash && counts(&entry) {
                    found.push((of_key, at));
                }
            }
            work::add(found.len() as u64 + 1);
            // Those of one hash are shown together.
            let mut hashes: Vec<u16> = found.iter().map(|(hash, _)| *hash).collect();
            hashes.sort_unstable();
            let last = hashes.get(left - 1).copied().unwrap_or(u16::MAX);
            let shown = found.iter().filter(|(hash, _)| *hash <= last);
            shown.filter_map(|(_, at)| leaf.entry(*at)).for_each(|entry| take(&entry));
            if hashes.last().is_some_and(|highest| *highest > last) {
                return Some(Position { leaf: number, hash: last + 1 });
            }
            left = left.saturating_sub(found.len());
            let next = top.behind(first).filter(|(next, _)| !is_end && next.starts_with(front));
            let (next, numbered) = next?;
            if left == 0 || looks == 0 {
                return Some(Position { leaf: numbered.number, hash: 0 });
            }
            (from, hash) = (next.to_vec(), 0);
        }
    }

    /// What `take` makes of an entry that is drawn at random among those of which it makes something, each as likely as any
    /// other; only where nearly all are of the other kind, those behind them are likelier.
    pub fn draw<R>(&self, mut random: impl FnMut() -> u64, mut take: impl FnMut(&Entry<'_>) -> Option<R>) -> Option<R> {
        let top = self.read();
        let lowest = top.firsts().keys().next().copied()?;
        let numbers = u64::from(top.firsts().keys().next_back().copied()? - lowest) + 1;
        for _ in 0..DRAWS_MAX {
            let number = lowest + (random() % numbers) as u32;
            let Some(numbered) = top.firsts().get(&number).and_then(|first| top.get(first)) else { continue };
            work::add(1);
            let leaf = lock(&numbered.leaf);
            // All leaves are drawn from as if they had the same length, so that keys of a short one are not likelier.
            let places = if top.len() == 1 { leaf.len() } else { leaf.len().max(ENTRIES_MAX) };
            let at = (random() % places.max(1) as u64) as usize;
            if let Some(taken) = leaf.entry(at).and_then(|entry| take(&entry)) {
                return Some(taken);
            }
        }
        let number = lowest + (random() % numbers) as u32;
        let from = top.firsts().range(number..).next();
        let from = from.map_or(&[][..], |(_, first)| &**first);
        let before = top.leaves().take_while(|(first, _)| *first < from);
        for (_, numbered) in top.leaves_from(from).chain(before) {
            let leaf = lock(&numbered.leaf);
            work::add(leaf.len() as u64);
            if let Some(taken) = leaf.entries(0).find_map(|entry| take(&entry)) {
                return Some(taken);
            }
        }
        None
    }

    /// Looks for keys that ended before `now_ms`, and that `counts` takes: goes on with a round over all keys, or begins one if
    /// a key may have ended, in at most `leaves_max` leaves, until there are `keys_max`. A leaf in which no key ends so soon
    /// costs one look, however many keys it has.
    pub fn find_ended(
        &self,
        round: &mut Round,
        now_ms: u64,
        (leaves_max, keys_max): (usize, usize),
        counts: impl Fn(&Entry<'_>) -> bool,
    ) -> Vec<Vec<u8>> {
        let mut ended = Vec::new();
        if !round.is_under_way {
            if self.soonest_ms.load(Ordering::Relaxed) > now_ms {
                return ended;
            }
            *round = Round { is_under_way: true, ..Round::default() };
            // From here on it says of the keys whose leaves were passed when they end sooner than these said then.
            self.soonest_ms.store(u64::MAX, Ordering::Relaxed);
        }
        let top = self.read();
        for _ in 0..leaves_max {
            let Some((first, leaf)) = leaf_of(&top, &round.from) else { break };
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
            round.soonest_ms = round.soonest_ms.min(leaf.soonest_ms());
            round.from.clear();
            let Some((next, _)) = top.behind(first) else {
                self.soonest_ms.fetch_min(round.soonest_ms, Ordering::Relaxed);
                round.is_under_way = false;
                break;
            };
            round.from.extend_from_slice(next);
        }
        ended
    }

    /// A time before which no key ends, in milliseconds since 1970, but for those that a round has passed that is under way;
    /// `None`: no key ends.
    pub fn soonest_ms(&self) -> Option<u64> {
        Some(self.soonest_ms.load(Ordering::Relaxed)).filter(|soonest_ms| *soonest_ms != u64::MAX)
    }

    /// Takes every key out, if `command` succeeds. While it is carried out, and until they are out, nobody looks at any.
    pub(crate) fn clear_if<R, E>(&self, command: impl FnOnce() -> Result<R, E>) -> Result<(R, Cleared), E> {
        let mut top = self.write();
        let result = command()?;
        let cleared = top.take();
        self.keys.store(0, Ordering::Relaxed);
        self.counted.memory.count(Sizes { used: bytes_of_leaf(&[]), ..Sizes::default() });
        Ok((result, Cleared(cleared)))
    }

    /// Makes these leaves all that it has, which has no key yet. They are in order, and none of them is empty.
    pub(crate) fn load(&self, leaves: Vec<Leaf>) {
        let mut top = self.write();
        if leaves.is_empty() {
            return;
        }
        let (mut keys, mut soonest_ms) = (0, u64::MAX);
        let mut more = Sizes::default() - Sizes { used: bytes_of_leaf(&[]), ..Sizes::default() };
        let keyed = leaves.into_iter().enumerate().map(|(at, leaf)| {
            // The first leaf begins with the empty key.
            let first = leaf.entry(0).filter(|_| at > 0).map_or_else(Box::default, |entry| Box::from(entry.key));
            keys += leaf.len();
            more += leaf.sizes() + Sizes { used: bytes_of_leaf(&first), ..Sizes::default() };
            soonest_ms = soonest_ms.min(leaf.soonest_ms());
            (first, leaf)
        });
        top.load(keyed.collect());
        self.keys.store(keys, Ordering::Relaxed);
        self.soonest_ms.store(soonest_ms, Ordering::Relaxed);
        self.counted.count(more);
    }

    /// First keys of leaves that cut the index into at most so many ranges of about the same number of leaves. The first range
    /// begins with the empty key.
    pub(crate) fn ranges(&self, count: usize) -> Vec<Box<[u8]>> {
        let top = self.read();
        let step = top.len().div_ceil(count.max(1)).max(1);
        top.leaves().map(|(first, _)| first).step_by(step).map(Box::from).collect()
    }
}
