//! Leaves made of many entries at once, which come in no order.
//!
//! ```text
//!   entry ─► Router: which range of keys ─► Heap of the range ┐
//!   entry ─► Router ───────────────────────► Heap ────────────┴► merge: sort, newest of each key, leaves filled in order
//! ```
//!
//! A search for each key is what makes an index slow to fill: here each key is looked for among the ranges alone, whose first keys
//! lie beside each other, and then sorted among those of its range, which fit into a cache. Ranges share nothing, so any
//! number of threads fills them.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{
    APART, ENTRIES_MAX, FILLED, GONE, HAS_EXPIRY, Leaf, NUMBER_BYTES, OLDER_MAX, OLDER_SHIFT, ON_MEDIUM, Origin,
    PACKED_BYTES_MAX, Slot, hint_of, shared_by,
};
use crate::format::{Lsn, Record, RecordKind};

/// Ranges at most: the ends of so many heaps, to which entries are added by turns, fit into the caches of a CPU.
const RANGES_MAX: usize = 512;

/// Into which range a key belongs.
#[derive(Debug, Default)]
pub(crate) struct Router {
    /// The first keys of all ranges but the first one, in order.
    firsts: Vec<Box<[u8]>>,
    /// Bytes with which all of these begin.
    shared: usize,
    /// Of each, the hint of what is behind them.
    hints: Vec<u64>,
}

impl Router {
    /// Ranges that have about as many of these keys each.
    pub(crate) fn new(mut samples: Vec<Box<[u8]>>) -> Self {
        samples.sort_unstable();
        samples.dedup();
        let step = samples.len().div_ceil(RANGES_MAX - 1).max(1);
        let firsts: Vec<Box<[u8]>> = samples.into_iter().step_by(step).collect();
        let ends = firsts.first().zip(firsts.last());
        let shared = ends.map_or(0, |(first, last)| shared_by(first, last));
        let hints = firsts.iter().map(|first| hint_of(&first[shared..])).collect();
        Self { firsts, shared, hints }
    }

    /// Number of ranges.
    pub(crate) fn ranges(&self) -> usize {
        self.firsts.len() + 1
    }

    /// The range of a key.
    pub(crate) fn range_of(&self, key: &[u8]) -> usize {
        let Some(first) = self.firsts.first() else { return 0 };
        let (front, rest) = key.split_at(key.len().min(self.shared));
        match front.cmp(&first[..self.shared]) {
            Ordering::Less => return 0,
            Ordering::Equal => {}
            Ordering::Greater => return self.firsts.len(),
        }
        let hint = hint_of(rest);
        let from = self.hints.partition_point(|of_first| *of_first < hint);
        if self.hints.get(from) != Some(&hint) {
            return from;
        }
        let to = from + self.hints[from..].partition_point(|of_first| *of_first == hint);
        from + self.firsts[from..to].partition_point(|first| &first[self.shared..] <= rest)
    }
}

/// Entries of a range of keys in no order, a key any number of times.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    slots: Vec<Slot>,
    bytes: Vec<u8>,
    apart: Vec<Arc<[u8]>>,
}

impl Heap {
    /// What a record of a key as a whole says of it. `is_away`: its value, if it would have memory of its own, is left on
    /// the medium. The heap has less than 4 GiB: no more than the records that were read for it.
    pub(crate) fn push(&mut self, record: &Record<'_>, log: u16, lsn: Lsn, is_away: bool) {
        let at = self.bytes.len() as u32;
        let mut flags = if record.expires_ms.is_some() { HAS_EXPIRY } else { 0 };
        if let Some(time) = record.expires_ms {
            self.bytes.extend_from_slice(&time.to_le_bytes());
        }
        self.bytes.extend_from_slice(record.key);
        let value = record.value;
        let mut value_len = value.len() as u32;
        if record.kind == RecordKind::Drop {
            flags |= GONE;
            value_len = 0;
        } else if value.len() <= PACKED_BYTES_MAX {
            self.bytes.extend_from_slice(value);
        } else if is_away {
            flags |= ON_MEDIUM;
        } else {
            flags |= APART;
            self.bytes.extend_from_slice(&(self.apart.len() as u32).to_le_bytes());
            self.apart.push(Arc::from(value));
        }
        let (key_len, version) = (record.key.len() as u16, record.version);
        self.slots.push(Slot { at, value_len, key_len, log, flags, lsn: lsn.0, version });
    }

    /// True without an entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    fn key(&self, slot: &Slot) -> &[u8] {
        &self.bytes[slot.key_at()..][..usize::from(slot.key_len)]
    }
}

/// An entry of a heap.
#[derive(Clone, Copy, Debug)]
struct Ref {
    /// The hint of its key behind what all keys of the range share.
    hint: u64,
    heap: u32,
    at: u32,
}

/// The heaps of a range, and what is sorted of them.
struct Sorted {
    heaps: Vec<Heap>,
    /// Bytes with which all keys begin.
    shared: usize,
}

impl Sorted {
    fn slot(&self, of: Ref) -> &Slot {
        &self.heaps[of.heap as usize].slots[of.at as usize]
    }

    fn key(&self, of: Ref) -> &[u8] {
        let heap = &self.heaps[of.heap as usize];
        heap.key(&heap.slots[of.at as usize])
    }

    fn compare_keys(&self, one: Ref, other: Ref) -> Ordering {
        let by_hint = one.hint.cmp(&other.hint);
        by_hint.then_with(|| self.key(one)[self.shared..].cmp(&self.key(other)[self.shared..]))
    }

    /// Of each key, in order, the entry that counts, which knows then how many older ones there are. The others are told.
    /// Of one version there may be two records: cleaning writes it anew, and the later one counts.
    fn newest(&mut self, outdated: &mut impl FnMut(Origin, usize)) -> Vec<Ref> {
        let shared = self.shared;
        let all = (0..).zip(&self.heaps);
        let mut refs: Vec<Ref> = all
            .flat_map(|(heap, of_heap): (u32, &Heap)| {
                let keys = (0..).zip(&of_heap.slots);
                keys.map(move |(at, slot)| Ref { hint: hint_of(&of_heap.key(slot)[shared..]), heap, at })
            })
            .collect();
        let age = |of: Ref| {
            let slot = self.slot(of);
            (slot.version, slot.log, slot.lsn)
        };
        refs.sort_unstable_by(|one, other| self.compare_keys(*one, *other).then_with(|| age(*one).cmp(&age(*other))));
        let (mut kept, mut older) = (0, 0);
        for at in 0..refs.len() {
            let of = refs[at];
            let is_newest = refs.get(at + 1).is_none_or(|next| self.compare_keys(of, *next) != Ordering::Equal);
            if !is_newest {
                outdate(self.slot(of), outdated);
                older = (older + 1).min(OLDER_MAX);
                continue;
            }
            if older > 0 {
                self.heaps[of.heap as usize].slots[of.at as usize].flags |= older << OLDER_SHIFT;
                older = 0;
            }
            refs[kept] = of;
            kept += 1;
        }
        refs.truncate(kept);
        refs
    }
}

fn outdate(slot: &Slot, outdated: &mut impl FnMut(Origin, usize)) {
    let is_gone = slot.flags & GONE != 0;
    let value_bytes = if is_gone { 0 } else { slot.value_len as usize };
    let expires = !is_gone && slot.flags & HAS_EXPIRY != 0;
    let origin = Origin { log: slot.log, lsn: Lsn(slot.lsn), version: slot.version };
    outdated(origin, Record::bytes_of(usize::from(slot.key_len), value_bytes, expires));
}

/// An entry on its way into a leaf.
struct Moved<'s> {
    slot: Slot,
    /// As they lie at the slot.
    bytes: &'s [u8],
    /// The value, if it has memory of its own.
    apart: Option<&'s Arc<[u8]>>,
}

impl<'s> Moved<'s> {
    fn new(slot: &Slot, bytes: &'s [u8], apart: &'s [Arc<[u8]>]) -> Self {
        let bytes = &bytes[slot.at as usize..][..slot.len()];
        let apart = (slot.flags & APART != 0).then(|| {
            let mut number = [0; NUMBER_BYTES];
            number.copy_from_slice(&bytes[bytes.len() - NUMBER_BYTES..]);
            &apart[u32::from_le_bytes(number) as usize]
        });
        Self { slot: *slot, bytes, apart }
    }

    fn key(&self) -> &'s [u8] {
        &self.bytes[self.slot.expiry_len()..][..usize::from(self.slot.key_len)]
    }

    /// Of two entries of a key, the one that counts is the later one if it has no smaller version.
    fn or_later(self, later: Self, outdated: &mut impl FnMut(Origin, usize)) -> Self {
        let older = (self.slot.flags >> OLDER_SHIFT) + (later.slot.flags >> OLDER_SHIFT) + 1;
        let (mut counts, other) = if self.slot.version > later.slot.version { (self, later) } else { (later, self) };
        outdate(&other.slot, outdated);
        counts.slot.flags = counts.slot.flags & ((1 << OLDER_SHIFT) - 1) | older.min(OLDER_MAX) << OLDER_SHIFT;
        counts
    }
}

/// Leaves of these entries, which are in order: as few as there may be, all of about the same number.
fn fill(entries: &[Moved<'_>], entries_max: usize, to: &mut Vec<Leaf>) {
    let leaves = entries.len().div_ceil(entries_max).max(1);
    let (of_each, more) = (entries.len() / leaves, entries.len() % leaves);
    let mut rest = entries;
    for at in 0..leaves {
        let (of_leaf, behind) = rest.split_at(of_each + usize::from(at < more));
        if !of_leaf.is_empty() {
            to.push(leaf_of(of_leaf));
        }
        rest = behind;
    }
}

fn leaf_of(entries: &[Moved<'_>]) -> Leaf {
    let mut leaf = Leaf {
        slots: Vec::with_capacity(entries.len()),
        bytes: Vec::with_capacity(entries.iter().map(|entry| entry.bytes.len()).sum()),
        apart: Vec::with_capacity(entries.iter().filter(|entry| entry.apart.is_some()).count()),
        ..Leaf::default()
    };
    for Moved { slot, bytes, apart } in entries {
        let at = leaf.bytes.len() as u32;
        leaf.bytes.extend_from_slice(bytes);
        if let Some(value) = apart {
            let number_at = leaf.bytes.len() - NUMBER_BYTES;
            leaf.bytes[number_at..].copy_from_slice(&(leaf.apart.len() as u32).to_le_bytes());
            leaf.apart.push(Arc::clone(value));
        }
        if slot.flags & HAS_EXPIRY != 0 {
            let mut time = [0; 8];
            time.copy_from_slice(&bytes[..8]);
            leaf.soonest_ms = leaf.soonest_ms.min(u64::from_le_bytes(time));
        }
        leaf.values += Leaf::size_of_value(slot);
        leaf.slots.push(Slot { at, ..*slot });
    }
    let ends = entries.first().zip(entries.last());
    leaf.shared = ends.map_or(0, |(first, last)| shared_by(first.key(), last.key()));
    leaf.hints = leaf.hints_of(&leaf.slots, leaf.shared);
    leaf
}

/// Brings entries into the leaves of their range, and tells of each record that it found to be out of date. Records that were
/// brought in before were read before. Leaves to which nothing comes stay as they are.
pub(crate) fn merge(leaves: Vec<Leaf>, heaps: Vec<Heap>, mut outdated: impl FnMut(Origin, usize)) -> Vec<Leaf> {
    let mut keys = heaps.iter().flat_map(|heap| heap.slots.iter().map(|slot| heap.key(slot)));
    let Some(first) = keys.next() else { return leaves };
    let shared = keys.fold(first.len(), |shared, key| shared_by(&first[..shared], key));
    let mut sorted = Sorted { heaps, shared };
    let refs = sorted.newest(&mut outdated);
    let moved = |of: Ref| {
        let heap = &sorted.heaps[of.heap as usize];
        Moved::new(&heap.slots[of.at as usize], &heap.bytes, &heap.apart)
    };
    let mut merged = Vec::with_capacity(leaves.len() + refs.len() / FILLED + 1);
    if leaves.is_empty() {
        let count = refs.len().div_ceil(FILLED);
        let (of_each, more) = (refs.len() / count, refs.len() % count);
        let (mut rest, mut entries) = (&refs[..], Vec::with_capacity(FILLED));
        for at in 0..count {
            let (of_leaf, behind) = rest.split_at(of_each + usize::from(at < more));
            entries.clear();
            entries.extend(of_leaf.iter().map(|of| moved(*of)));
            merged.push(leaf_of(&entries));
            rest = behind;
        }
        return merged;
    }
    let mut rest = &refs[..];
    let mut old = leaves.into_iter().peekable();
    while let Some(leaf) = old.next() {
        let next = old.peek().and_then(|next| next.slots.first().map(|slot| next.key(slot)));
        let count = next.map_or(rest.len(), |next| rest.partition_point(|of| sorted.key(*of) < next));
        let (new, behind) = rest.split_at(count);
        rest = behind;
        if new.is_empty() {
            merged.push(leaf);
            continue;
        }
        let entries = merge_one(&leaf, new.iter().map(|of| moved(*of)), &mut outdated);
        // One that has room for them stays one.
        let entries_max = if entries.len() <= ENTRIES_MAX { ENTRIES_MAX } else { FILLED };
        fill(&entries, entries_max, &mut merged);
    }
    merged
}

/// Makes one leaf of neighbours that have room in one: ranges may have few keys each. All are in order, and none is empty.
pub(crate) fn join(leaves: impl IntoIterator<Item = Leaf>) -> Vec<Leaf> {
    let (mut joined, mut small): (Vec<Leaf>, Vec<Leaf>) = (Vec::new(), Vec::new());
    let mut count = 0;
    for leaf in leaves {
        if count + leaf.len() > FILLED {
            joined.extend(join_all(&mut small));
            count = 0;
        }
        count += leaf.len();
        small.push(leaf);
    }
    joined.extend(join_all(&mut small));
    joined
}

fn join_all(small: &mut Vec<Leaf>) -> Option<Leaf> {
    if small.len() < 2 {
        return small.pop();
    }
    let moved = small.iter().flat_map(|Leaf { slots, bytes, apart, .. }| {
        let moved = |slot| Moved::new(slot, bytes, apart);
        slots.iter().map(moved)
    });
    let entries: Vec<Moved<'_>> = moved.collect();
    let leaf = leaf_of(&entries);
    small.clear();
    Some(leaf)
}

/// The entries of a leaf with others, both in order.
fn merge_one<'s>(
    leaf: &'s Leaf,
    new: impl Iterator<Item = Moved<'s>>,
    outdated: &mut impl FnMut(Origin, usize),
) -> Vec<Moved<'s>> {
    let mut entries = Vec::with_capacity(leaf.len() + new.size_hint().0);
    let mut old = leaf.slots.iter().map(|slot| Moved::new(slot, &leaf.bytes, &leaf.apart)).peekable();
    for later in new {
        while let Some(before) = old.next_if(|before| before.key() < later.key()) {
            entries.push(before);
        }
        match old.next_if(|before| before.key() == later.key()) {
            Some(before) => entries.push(before.or_later(later, outdated)),
            None => entries.push(later),
        }
    }
    entries.extend(old);
    entries
}
