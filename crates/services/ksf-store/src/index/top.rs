//! The leaves by their first keys: what a search for a leaf goes through.
//!
//! ```text
//!   groups   a           k           t             first keys of groups, each of at most 128 leaves
//!            │           └► k  l  nn  o  s         first keys of the leaves of a group, and the leaves
//!            └► a  c  g
//! ```
//!
//! Of each key, the eight bytes behind those that all of its level begin with lie beside each other as numbers. So a search
//! goes through numbers of a few cache lines and seldom looks at a key; and a leaf that is added moves the leaves of one
//! group, and the groups once in 64 times.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::{cmp, mem};

use super::Position;
use super::hint::{count_below, hint_of, shared_by};
use super::leaf::Leaf;

/// Leaves of a group, above which it is split.
const GROUP_MAX: usize = 128;
/// Leaves that were taken away and are remembered, so that a walk that was there goes on instead of beginning anew.
const GONE_MAX: usize = 1024;
/// The longest first key of such a leaf.
const GONE_BYTES_MAX: usize = 256;

/// Keys in order, and what each of them has.
#[derive(Debug)]
struct Level<T> {
    keys: Vec<Box<[u8]>>,
    items: Vec<T>,
    /// Bytes at the start of the second key with which every key but the first begins.
    shared: usize,
    /// Of each key but the first, the number of what is behind the bytes that are shared. The first one is that of no search.
    hints: Vec<u64>,
}

impl<T> Level<T> {
    fn of(keys: Vec<Box<[u8]>>, items: Vec<T>) -> Self {
        // They are in order: what the second and the last one share, all between them do.
        let shared = keys.get(1).zip(keys.last()).map_or(0, |(second, last)| shared_by(second, last));
        let mut level = Self { keys, items, shared, hints: Vec::new() };
        level.find_hints();
        level
    }

    fn find_hints(&mut self) {
        let shared = self.shared;
        self.hints.clear();
        self.hints.extend(self.keys.iter().skip(1).map(|key| hint_of(&key[shared..])));
    }

    /// The place of the last key that is not behind this one; 0 also if there is none.
    fn find(&self, key: &[u8]) -> usize {
        let Some(second) = self.keys.get(1) else { return 0 };
        let (front, rest) = key.split_at(key.len().min(self.shared));
        // A key that is shorter is in front of all that begin with it.
        match front.cmp(&second[..self.shared]) {
            cmp::Ordering::Less => return 0,
            cmp::Ordering::Equal => {}
            cmp::Ordering::Greater => return self.keys.len() - 1,
        }
        let hint = hint_of(rest);
        let before = count_below(&self.hints, hint);
        let alike = self.hints[before..].iter().take_while(|of_key| **of_key == hint).count();
        let keys = &self.keys[1 + before..][..alike];
        before + keys.partition_point(|key| key[self.shared..] <= *rest)
    }

    /// Adds a key at a place behind the first one, where it belongs.
    fn insert(&mut self, at: usize, key: Box<[u8]>, item: T) {
        let shared = self.keys.get(1).map_or(key.len(), |second| shared_by(second, &key).min(self.shared));
        if shared != self.shared {
            self.shared = shared;
            self.find_hints();
        }
        self.hints.insert(at - 1, hint_of(&key[shared..]));
        self.keys.insert(at, key);
        self.items.insert(at, item);
    }

    /// Takes the key at a place out. What all others share they still do.
    fn remove(&mut self, at: usize) -> T {
        if self.keys.len() > 1 {
            // The first key has no hint. When it goes, the second one takes its place.
            self.hints.remove(at.saturating_sub(1));
        }
        self.keys.remove(at);
        self.items.remove(at)
    }

    /// Gives the upper half away.
    fn split(&mut self) -> Self {
        let half = self.items.len() / 2;
        let (keys, items) = (self.keys.split_off(half), self.items.split_off(half));
        let (lower_keys, lower_items) = (mem::take(&mut self.keys), mem::take(&mut self.items));
        *self = Self::of(lower_keys, lower_items);
        Self::of(keys, items)
    }
}

/// A leaf, with the number by which a [`Position`] names it. It is never 0.
#[derive(Debug)]
pub(super) struct Numbered {
    pub(super) number: u32,
    pub(super) leaf: Arc<Mutex<Leaf>>,
}

/// Where a leaf is: its group, and its place in that. Places are in the order of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LeafIndex(usize, usize);

/// The leaves in order. The first one begins with the empty key.
#[derive(Debug)]
pub(super) struct Top {
    groups: Level<Level<Numbered>>,
    /// The first key of each leaf, which it keeps as long as it is there, by the number of the leaf.
    firsts: BTreeMap<u32, Box<[u8]>>,
    /// The number that was given last.
    last_number: u32,
    /// Leaves that were taken away lately, with their first keys: a [`Position`] may still name them.
    gone: VecDeque<(u32, Box<[u8]>)>,
}

impl Top {
    /// One leaf without a key; numbers go on behind this one.
    pub(super) fn new(last_number: u32) -> Self {
        let groups = Level::of(Vec::new(), Vec::new());
        let mut top = Self { groups, firsts: BTreeMap::new(), last_number, gone: VecDeque::new() };
        let number = top.give_number(&[]);
        let group = Level::of(vec![Box::default()], vec![Numbered { number, leaf: Arc::default() }]);
        top.groups = Level::of(vec![Box::default()], vec![group]);
        top
    }

    /// Takes all leaves out. Those that come get other numbers.
    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(self.last_number);
        mem::replace(self, empty)
    }

    /// A number for the leaf with this first key.
    fn give_number(&mut self, first: &[u8]) -> u32 {
        loop {
            self.last_number = self.last_number.wrapping_add(1).max(1);
            if !self.firsts.contains_key(&self.last_number) {
                break;
            }
        }
        self.firsts.insert(self.last_number, first.into());
        self.last_number
    }

    /// Adds a leaf. None has this first key, which is not empty.
    pub(super) fn insert(&mut self, first: Box<[u8]>, leaf: Leaf) {
        let number = self.give_number(&first);
        let LeafIndex(group, at) = self.place(&first);
        let of_group = &mut self.groups.items[group];
        of_group.insert(at + 1, first, Numbered { number, leaf: Arc::new(Mutex::new(leaf)) });
        if of_group.items.len() > GROUP_MAX {
            let right = of_group.split();
            self.groups.insert(group + 1, right.keys[0].clone(), right);
        }
    }

    /// Puts these leaves, each with its first key, in the place of all that are there. They are in order, the first one begins with
    /// the empty key, and they get numbers behind those that were given.
    pub(super) fn load(&mut self, leaves: Vec<(Box<[u8]>, Leaf)>) {
        self.firsts.clear();
        let numbers = (self.last_number + 1..).take(leaves.len());
        // In order, which fills the map faster than one after the other.
        self.firsts = numbers.clone().zip(leaves.iter().map(|(first, _)| first.clone())).collect();
        self.last_number += leaves.len() as u32;
        let numbered = leaves.into_iter().zip(numbers).map(|((first, leaf), number)| {
            let numbered = Numbered { number, leaf: Arc::new(Mutex::new(leaf)) };
            (first, numbered)
        });
        self.groups = groups_of(numbered, GROUP_MAX / 4 * 3);
    }

    /// Takes the leaf with this first key away, which is not empty. False if there is none.
    pub(super) fn remove(&mut self, first: &[u8]) -> bool {
        let LeafIndex(group, at) = self.place(first);
        let of_group = &mut self.groups.items[group];
        if first.is_empty() || of_group.keys.get(at).is_none_or(|found| **found != *first) {
            return false;
        }
        let numbered = of_group.remove(at);
        if of_group.items.is_empty() {
            self.groups.remove(group);
        } else if at == 0 {
            // What lies between the two keys belongs to the group in front from now on.
            let key = of_group.keys[0].clone();
            let groups = mem::replace(&mut self.groups, Level::of(Vec::new(), Vec::new()));
            let (mut keys, items) = (groups.keys, groups.items);
            keys[group] = key;
            self.groups = Level::of(keys, items);
        }
        if let Some(first) = self.firsts.remove(&numbered.number)
            && first.len() <= GONE_BYTES_MAX
        {
            if self.gone.len() == GONE_MAX {
                self.gone.pop_front();
            }
            self.gone.push_back((numbered.number, first));
        }
        true
    }

    /// Where a walk goes on that is at this position: a key, and the least hash from it on.
    pub(super) fn place_of(&self, position: Position) -> Option<(&[u8], u16)> {
        if let Some(first) = self.firsts.get(&position.leaf) {
            return Some((&**first, position.hash));
        }
        // What comes where the leaf was lies in the one in front of it.
        let (_, first) = self.gone.iter().rev().find(|(number, _)| *number == position.leaf)?;
        Some((&**first, 0))
    }

    /// Where the leaf is that has, or would have, a key.
    pub(super) fn place(&self, key: &[u8]) -> LeafIndex {
        let group = self.groups.find(key);
        LeafIndex(group, self.groups.items[group].find(key))
    }

    /// The leaf at a place, with its first key.
    pub(super) fn at(&self, LeafIndex(group, at): LeafIndex) -> Option<(&[u8], &Numbered)> {
        let group = self.groups.items.get(group)?;
        Some((group.keys.get(at)?, group.items.get(at)?))
    }

    /// The leaf that has, or would have, a key, with its first key.
    pub(super) fn leaf_of(&self, key: &[u8]) -> Option<(&[u8], &Numbered)> {
        self.at(self.place(key))
    }

    /// The leaf with this first key.
    pub(super) fn get(&self, first: &[u8]) -> Option<&Numbered> {
        self.leaf_of(first).filter(|(found, _)| *found == first).map(|(_, numbered)| numbered)
    }

    /// The leaf that follows the one with this first key.
    pub(super) fn behind(&self, first: &[u8]) -> Option<(&[u8], &Numbered)> {
        let LeafIndex(group, at) = self.place(first);
        self.at(LeafIndex(group, at + 1)).or_else(|| self.at(LeafIndex(group + 1, 0)))
    }

    /// Leaves.
    pub(super) fn len(&self) -> usize {
        self.firsts.len()
    }

    /// The leaves from that of a key on, each with its first key.
    pub(super) fn leaves_from<'t>(&'t self, key: &[u8]) -> impl Iterator<Item = (&'t [u8], &'t Numbered)> + use<'t> {
        let LeafIndex(group, at) = self.place(key);
        self.groups.items.iter().skip(group).flat_map(Level::<Numbered>::pairs).skip(at)
    }

    /// All leaves, each with its first key.
    pub(super) fn leaves(&self) -> impl Iterator<Item = (&[u8], &Numbered)> {
        self.groups.items.iter().flat_map(Level::<Numbered>::pairs)
    }

    /// The first key of each leaf, by its number.
    pub(super) fn firsts(&self) -> &BTreeMap<u32, Box<[u8]>> {
        &self.firsts
    }

    /// Takes a leaf out, whichever it is, after which none is looked for.
    pub(super) fn pop(&mut self) -> Option<(Box<[u8]>, Numbered)> {
        let last = loop {
            let group = self.groups.items.last_mut()?;
            if let Some(last) = group.keys.pop().zip(group.items.pop()) {
                break last;
            }
            self.groups.items.pop();
        };
        self.firsts.remove(&last.1.number);
        Some(last)
    }
}

/// Groups of so many leaves each, which are in order.
fn groups_of(leaves: impl Iterator<Item = (Box<[u8]>, Numbered)>, of_each: usize) -> Level<Level<Numbered>> {
    let (mut group_keys, mut groups) = (Vec::new(), Vec::new());
    let (mut keys, mut items) = (Vec::<Box<[u8]>>::new(), Vec::new());
    let mut leaves = leaves.peekable();
    while let Some((first, numbered)) = leaves.next() {
        keys.push(first);
        items.push(numbered);
        if keys.len() == of_each || leaves.peek().is_none() {
            group_keys.push(keys[0].clone());
            groups.push(Level::of(mem::take(&mut keys), mem::take(&mut items)));
        }
    }
    Level::of(group_keys, groups)
}

impl Level<Numbered> {
    fn pairs(&self) -> impl Iterator<Item = (&[u8], &Numbered)> {
        self.keys.iter().map(|key| &**key).zip(&self.items)
    }
}

/// Bytes that a leaf with this first key takes beside its own vectors.
pub(crate) fn bytes_of_leaf(first: &[u8]) -> usize {
    const LEVEL_BYTES: usize = size_of::<(Box<[u8]>, Numbered)>() + size_of::<u64>();
    LEVEL_BYTES + size_of::<(u32, Box<[u8]>)>() + size_of::<Mutex<Leaf>>() + 2 * first.len()
}

#[cfg(test)]
mod tests {
    use std::collections::btree_map::Entry as MapEntry;
    use std::ops::Bound;

    use ksf_test::{Random, TestRandom};

    use super::*;

    fn all<'t>(leaves: impl Iterator<Item = (&'t [u8], &'t Numbered)>) -> Vec<(Vec<u8>, u32)> {
        leaves.map(|(first, numbered)| (first.to_vec(), numbered.number)).collect()
    }

    /// Any number of groups, the last of which is short.
    #[test]
    fn leaves_that_are_loaded_are_found_and_others_fit_between_them() {
        for count in [1, 2, GROUP_MAX / 4 * 3, GROUP_MAX, 3 * GROUP_MAX + 1] {
            let key = |at: usize| if at == 0 { Vec::new() } else { format!("key:{at:06}").into_bytes() };
            let mut top = Top::new(7);
            top.load((0..count).map(|at| (key(at).into(), Leaf::default())).collect());
            let mut wanted: Vec<_> = (0..count).map(|at| (key(at), 9 + at as u32)).collect();
            assert_eq!((all(top.leaves()), top.len()), (wanted.clone(), count));
            for (at, (first, number)) in wanted.clone().into_iter().enumerate() {
                let found =
                    top.leaf_of(&[&first[..], b"!"].concat()).map(|(first, found)| (first.to_vec(), found.number));
                assert_eq!(found, Some((first, number)));
                let between = [&key(at)[..], b"+"].concat();
                top.insert(between.clone().into(), Leaf::default());
                wanted.insert(2 * at + 1, (between, (9 + count + at) as u32));
            }
            assert_eq!(all(top.leaves()), wanted, "{count}");
        }
    }

    /// Against the standard library's map: keys of many kinds, among them such that begin alike.
    #[test]
    fn leaves_are_found_as_in_a_map() {
        for seed in 0..20 {
            let mut random = Random::of_test(seed);
            let fronts = [&b""[..], b"user:0000000", b"user:0000000\0\0\0\0\0\0\0\0\0", b"\xff"];
            let fronts = &fronts[..random.within(1..=fronts.len())];
            let draw = |random: &mut TestRandom| {
                let mut key = fronts[random.below(fronts.len() as u64) as usize].to_vec();
                let more = random.within(0..=14);
                key.extend((0..more).map(|_| [0, 1, b'0', 0xff][random.below(4) as usize]));
                key
            };
            let (mut top, mut map) = (Top::new(0), BTreeMap::from([(Vec::new(), 1)]));
            for round in 0..4_000 {
                let key = draw(&mut random);
                let range = (Bound::Unbounded, Bound::Included(&key[..]));
                let (wanted, number) = map.range::<[u8], _>(range).next_back().unwrap();
                let (first, numbered) = top.leaf_of(&key).unwrap();
                assert_eq!((first, numbered.number), (&wanted[..], *number), "seed {seed}: {}", key.escape_ascii());
                let behind = map.range::<[u8], _>((Bound::Excluded(first), Bound::Unbounded)).next();
                assert_eq!(top.behind(first).map(|(next, _)| next), behind.map(|(next, _)| &next[..]), "seed {seed}");
                assert_eq!(top.get(&key).map(|numbered| numbered.number), map.get(&key).copied());
                if let MapEntry::Vacant(place) = map.entry(key) {
                    top.insert(place.key().clone().into(), Leaf::default());
                    place.insert(top.last_number);
                }
                // Now and then most leaves go, in any order, so that groups lose their first leaf and their last one.
                if round % 1_000 == 999 {
                    let mut firsts: Vec<Vec<u8>> = map.keys().skip(1).cloned().collect();
                    for _ in 0..firsts.len() * 3 / 4 {
                        let first = firsts.swap_remove(random.below(firsts.len() as u64) as usize);
                        let number = map.remove(&first).unwrap();
                        assert!(top.remove(&first), "seed {seed}: {}", first.escape_ascii());
                        assert_eq!(top.place_of(Position { leaf: number, hash: 7 }), Some((&first[..], 0)));
                    }
                    assert!(!top.remove(b""), "the first leaf stays");
                    assert!(top.gone.len() <= GONE_MAX);
                }
            }
            let wanted: Vec<(Vec<u8>, u32)> = map.iter().map(|(first, number)| (first.clone(), *number)).collect();
            assert_eq!((all(top.leaves()), top.len()), (wanted.clone(), wanted.len()), "seed {seed}");
            for at in (0..wanted.len()).step_by(97) {
                assert_eq!(all(top.leaves_from(&wanted[at].0)), wanted[at..], "seed {seed}");
            }
            for left in (0..wanted.len()).rev() {
                let (first, numbered) = top.pop().unwrap();
                assert_eq!(
                    (first.to_vec(), numbered.number, top.len()),
                    (wanted[left].0.clone(), wanted[left].1, left)
                );
            }
            assert!(top.pop().is_none());
        }
    }
}
