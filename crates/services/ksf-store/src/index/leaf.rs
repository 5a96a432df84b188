//! A leaf of the index: some hundred keys in order, packed.
//!
//! Keys, short values and expiry times lie in one piece of memory; an entry is 32 bytes that point there. So a key of eight
//! bytes with a value of eight bytes takes 56 bytes and the slack of three vectors.
//!
//! ```text
//!   keys    user:0001  user:0002  user:0017  ...      the first bytes, here `user:00`, are those of all keys
//!   hints   01         02         17                  the eight bytes behind them, as a number
//! ```
//!
//! The hints of a leaf lie beside each other, so a search compares numbers of a few cache lines, and then one key.

pub(crate) mod bulk;

use std::sync::Arc;
use std::{cmp, mem};

use super::hint::{count_below, hint_of, shared_by};
use crate::format::Lsn;
use crate::memory::Sizes;

/// Entries of a leaf, above which it is split.
pub const ENTRIES_MAX: usize = 256;
/// Entries of each leaf that a split or a start makes: some more fit before it is split again.
const FILLED: usize = ENTRIES_MAX / 4 * 3;
/// Longest value that is packed among the keys; longer ones have memory of their own, and may be let go of.
pub const PACKED_BYTES_MAX: usize = 256;
/// What a value with memory of its own takes beside its bytes: the counts of an [`Arc`].
const APART_BYTES: usize = 2 * size_of::<usize>();

/// Where the record of an entry lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The log.
    pub log: u16,
    /// The place of the record in it.
    pub lsn: Lsn,
    /// The version of the write.
    pub version: u64,
}

/// A string of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// It is here.
    Here(&'a [u8]),
    /// It is this long, and only on the medium.
    OnMedium(u32),
    /// What is known of a key that has cells, which are entries of their own: a head, packed.
    Cells(&'a [u8]),
    /// The key is gone. Its record still matters while there are older ones, which it outweighs at the next start.
    Gone,
}

/// What an entry tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Its value.
    pub value: Value<'a>,
    /// Where its record lies.
    pub origin: Origin,
    /// When it ends: milliseconds since 1970.
    pub expires_ms: Option<u64>,
    /// Older records of the key that are still on a medium; no more than [`OLDER_MAX`].
    pub older: u32,
}

impl Entry<'_> {
    /// True if the key is gone, or was gone before its cells came, and no older record of it is left: its record is out of
    /// date. The entry stays until that record is on no medium any more, so that a record that follows counts it among the
    /// older ones.
    pub fn is_settled(&self) -> bool {
        matches!(self.value, Value::Gone | Value::Cells(_)) && self.older == 0
    }
}

/// Where the count of older records ends: a key that reaches it is taken to have some for ever.
pub const OLDER_MAX: u32 = (1 << 24) - 1;

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Where its bytes begin: expiry time if it has one, key, value if it is here.
    at: u32,
    value_len: u32,
    key_len: u16,
    log: u16,
    /// The lowest eight bits are flags, the others count older records.
    flags: u32,
    lsn: u64,
    version: u64,
}

/// What an entry takes beside its key and its value.
pub const ENTRY_BYTES: usize = size_of::<Slot>() + size_of::<u64>();

const HAS_EXPIRY: u32 = 1;
const ON_MEDIUM: u32 = 2;
const GONE: u32 = 4;
const APART: u32 = 8;
const CELLS: u32 = 16;
/// The value was used since the hand came by.
const USED: u32 = 32;
/// Bytes of the number of a value that has memory of its own.
const NUMBER_BYTES: usize = 4;
const OLDER_SHIFT: u32 = 8;

impl Slot {
    fn expiry_len(&self) -> usize {
        if self.flags & HAS_EXPIRY != 0 { 8 } else { 0 }
    }

    fn inline_len(&self) -> usize {
        match self.flags & (ON_MEDIUM | GONE | APART) {
            0 => self.value_len as usize,
            APART => NUMBER_BYTES,
            _ => 0,
        }
    }

    fn len(&self) -> usize {
        self.expiry_len() + usize::from(self.key_len) + self.inline_len()
    }

    fn key_at(&self) -> usize {
        self.at as usize + self.expiry_len()
    }
}

/// No guess where a key is.
pub const NOWHERE: Result<usize, usize> = Ok(usize::MAX);

/// Keys of a range, in order.
#[derive(Debug)]
pub struct Leaf {
    slots: Vec<Slot>,
    /// Of each slot, [the hint](hint_of) of its key behind the bytes that are shared.
    hints: Vec<u64>,
    /// Bytes at the start of the first key with which every key begins. There may be more of them than this.
    shared: usize,
    bytes: Vec<u8>,
    /// Bytes in `bytes` that no slot points to any more.
    dead: usize,
    /// Long values, by number.
    apart: Vec<Arc<[u8]>>,
    /// Numbers of `apart` that are free.
    free: Vec<u32>,
    /// No entry ends before this time, in milliseconds since 1970.
    soonest_ms: u64,
    /// What `apart` has, and what is on a medium alone: but for the memory of the vectors.
    values: Sizes,
}

/// What [letting go](Leaf::let_go) may still do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LetGo {
    /// Leaves to look at.
    pub leaves: usize,
    /// Values to look at.
    pub looks: usize,
    /// Bytes of values to let go of; the last one may have more.
    pub bytes: usize,
}

impl Default for Leaf {
    fn default() -> Self {
        let (slots, hints, bytes, apart, free) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let values = Sizes::default();
        Self { slots, hints, shared: 0, bytes, dead: 0, apart, free, soonest_ms: u64::MAX, values }
    }
}

impl Leaf {
    /// What a value with memory of its own takes beside its bytes.
    pub(crate) const APART_BYTES: usize = APART_BYTES;

    /// A time before which no entry ends, in milliseconds since 1970. It may be too early:
    /// [`Leaf::find_soonest`] makes it exact.
    pub fn soonest_ms(&self) -> u64 {
        self.soonest_ms
    }

    /// Looks at the ends of all entries that `counts` takes.
    pub fn find_soonest(&mut self, counts: impl Fn(&Entry<'_>) -> bool) {
        let ends = self.entries(0).filter(counts).filter_map(|entry| entry.expires_ms);
        self.soonest_ms = ends.min().unwrap_or(u64::MAX);
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// True without a key.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Bytes of memory that it takes, and what is in them: as it is counted while it changes.
    pub fn sizes(&self) -> Sizes {
        let vectors = self.slots.capacity() * size_of::<Slot>()
            + self.hints.capacity() * size_of::<u64>()
            + self.bytes.capacity()
            + self.apart.capacity() * size_of::<Arc<[u8]>>()
            + self.free.capacity() * size_of::<u32>();
        Sizes { used: vectors + self.values.used, ..self.values }
    }

    /// What a slot has beside its bytes in the vectors.
    fn size_of_value(slot: &Slot) -> Sizes {
        let bytes = slot.value_len as usize;
        if slot.flags & GONE != 0 {
            return Sizes { tombstones: 1, ..Sizes::default() };
        }
        match slot.flags & (ON_MEDIUM | APART | CELLS) {
            ON_MEDIUM => Sizes { away: 1, away_bytes: bytes, ..Sizes::default() },
            APART => Sizes { used: bytes + APART_BYTES, values: bytes + APART_BYTES, ..Sizes::default() },
            flags if flags == APART | CELLS => Sizes { used: bytes + APART_BYTES, ..Sizes::default() },
            _ => Sizes::default(),
        }
    }

    /// Bytes of memory that an entry takes, but for the slack of the vectors.
    pub fn entry_bytes(&self, at: usize) -> usize {
        self.slots.get(at).map_or(0, |slot| ENTRY_BYTES + slot.len() + Self::size_of_value(slot).used)
    }

    fn key(&self, slot: &Slot) -> &[u8] {
        &self.bytes[slot.key_at()..][..usize::from(slot.key_len)]
    }

    /// The place of a key: where it is, or where it would be.
    pub fn find(&self, key: &[u8]) -> Result<usize, usize> {
        let Some(rest) = key.get(self.shared..) else {
            // It is shorter than what all keys begin with.
            let is_first = self.slots.first().is_none_or(|first| key < self.key(first));
            return Err(if is_first { 0 } else { self.len() });
        };
        let hint = hint_of(rest);
        let from = count_below(&self.hints, hint);
        let is_alike = self.hints.get(from) == Some(&hint);
        // Mostly it is this one. It is compared whole, so nobody looks at what is shared.
        if is_alike && self.key(&self.slots[from]) == key {
            return Ok(from);
        }
        let Some(first) = self.slots.first() else { return Err(0) };
        match key[..self.shared].cmp(&self.key(first)[..self.shared]) {
            cmp::Ordering::Less => return Err(0),
            cmp::Ordering::Equal => {}
            cmp::Ordering::Greater => return Err(self.len()),
        }
        if !is_alike {
            return Err(from);
        }
        let to = from + self.hints[from..].partition_point(|of_key| *of_key == hint);
        let found = self.slots[from..to].binary_search_by(|slot| self.key(slot)[self.shared..].cmp(rest));
        found.map(|at| from + at).map_err(|at| from + at)
    }

    /// True if the entry at a place is that of a key.
    pub(super) fn is_at(&self, at: usize, key: &[u8]) -> bool {
        self.slots.get(at).is_some_and(|slot| self.key(slot) == key)
    }

    /// [`find`](Self::find), without a search if `near` is right: the key is there, or would be.
    pub fn find_near(&self, key: &[u8], near: Result<usize, usize>) -> Result<usize, usize> {
        let is_right = match near {
            Ok(at) => self.is_at(at, key),
            Err(at) => {
                at <= self.len()
                    && at.checked_sub(1).is_none_or(|before| self.key(&self.slots[before]) < key)
                    && self.slots.get(at).is_none_or(|slot| key < self.key(slot))
            }
        };
        if is_right { near } else { self.find(key) }
    }

    /// Makes the shared bytes so few that this key has them, too.
    fn share_with(&mut self, key: &[u8]) {
        let shared = self.slots.first().map_or(key.len(), |first| shared_by(self.key(first), key).min(self.shared));
        if mem::replace(&mut self.shared, shared) != shared {
            self.hints = self.hints_of(&self.slots, shared);
        }
    }

    fn hints_of(&self, slots: &[Slot], shared: usize) -> Vec<u64> {
        slots.iter().map(|slot| hint_of(&self.key(slot)[shared..])).collect()
    }

    /// The entry at a place.
    pub fn entry(&self, at: usize) -> Option<Entry<'_>> {
        let slot = self.slots.get(at)?;
        let key_at = slot.key_at();
        let value_at = key_at + usize::from(slot.key_len);
        let expires_ms = (slot.flags & HAS_EXPIRY != 0).then(|| {
            let mut time = [0; 8];
            time.copy_from_slice(&self.bytes[slot.at as usize..][..8]);
            u64::from_le_bytes(time)
        });
        let value = if slot.flags & GONE != 0 {
            Value::Gone
        } else if slot.flags & ON_MEDIUM != 0 {
            Value::OnMedium(slot.value_len)
        } else if slot.flags & CELLS != 0 {
            Value::Cells(self.value(slot, value_at))
        } else {
            Value::Here(self.value(slot, value_at))
        };
        let origin = Origin { log: slot.log, lsn: Lsn(slot.lsn), version: slot.version };
        let older = slot.flags >> OLDER_SHIFT;
        Some(Entry { key: &self.bytes[key_at..value_at], value, origin, expires_ms, older })
    }

    fn value(&self, slot: &Slot, at: usize) -> &[u8] {
        match self.number(slot, at) {
            Some(number) => &self.apart[number as usize],
            None => &self.bytes[at..][..slot.value_len as usize],
        }
    }

    /// The number of the value of a slot, if it has memory of its own.
    fn number(&self, slot: &Slot, at: usize) -> Option<u32> {
        if slot.flags & APART == 0 {
            return None;
        }
        let mut number = [0; NUMBER_BYTES];
        number.copy_from_slice(&self.bytes[at..][..NUMBER_BYTES]);
        Some(u32::from_le_bytes(number))
    }

    /// Counts the bytes of a slot as dead, and gives up its value.
    fn bury(&mut self, at: usize) {
        let slot = self.slots[at];
        self.dead += slot.len();
        self.values = self.values - Self::size_of_value(&slot);
        self.free_apart(&slot);
    }

    /// Gives the memory of a value back, if it has some of its own.
    fn free_apart(&mut self, slot: &Slot) {
        if let Some(number) = self.number(slot, slot.key_at() + usize::from(slot.key_len)) {
            self.apart[number as usize] = Arc::default();
            self.free.push(number);
        }
    }

    fn keep_apart(&mut self, value: Arc<[u8]>) -> u32 {
        match self.free.pop() {
            Some(number) => {
                self.apart[number as usize] = value;
                number
            }
            None => {
                self.apart.push(value);
                self.apart.len() as u32 - 1
            }
        }
    }

    /// The value of an entry is used: the hand passes it by once.
    pub fn touch(&mut self, at: usize) {
        if let Some(slot) = self.slots.get_mut(at)
            && slot.flags & (APART | USED) == APART
        {
            slot.flags |= USED;
        }
    }

    /// Lets go of values from an entry on, of which `may` says that their records are on a medium. One that was used since the
    /// last time stays until the next. Returns the entry to go on from, which is behind the last one at the end.
    pub fn let_go(&mut self, from: usize, left: &mut LetGo, may: impl Fn(Origin) -> bool) -> usize {
        let mut at = from;
        while at < self.slots.len() && left.looks > 0 && left.bytes > 0 {
            let slot = self.slots[at];
            at += 1;
            if slot.flags & (APART | CELLS) != APART {
                continue;
            }
            left.looks -= 1;
            if slot.flags & USED != 0 {
                self.slots[at - 1].flags &= !USED;
                continue;
            }
            if !may(Origin { log: slot.log, lsn: Lsn(slot.lsn), version: slot.version }) {
                continue;
            }
            self.free_apart(&slot);
            let gone = Slot { flags: slot.flags & !APART | ON_MEDIUM, ..slot };
            self.values = self.values - Self::size_of_value(&slot) + Self::size_of_value(&gone);
            self.dead += NUMBER_BYTES;
            self.slots[at - 1] = gone;
            left.bytes = left.bytes.saturating_sub(slot.value_len as usize + APART_BYTES);
        }
        self.tidy();
        at
    }

    /// Takes a value that was read from its medium, if the entry still has this version and no value. True if it did.
    pub fn take_in(&mut self, key: &[u8], version: u64, value: &Arc<[u8]>) -> bool {
        let Ok(at) = self.find(key) else { return false };
        let slot = self.slots[at];
        if slot.flags & ON_MEDIUM == 0 || slot.version != version || slot.value_len as usize != value.len() {
            return false;
        }
        let number = self.keep_apart(Arc::clone(value));
        let start = self.bytes.len();
        grow(&mut self.bytes, slot.len() + NUMBER_BYTES);
        self.bytes.extend_from_within(slot.at as usize..slot.at as usize + slot.len());
        self.bytes.extend_from_slice(&number.to_le_bytes());
        self.dead += slot.len();
        let here = Slot { at: start as u32, flags: slot.flags & !ON_MEDIUM | APART, ..slot };
        self.values = self.values - Self::size_of_value(&slot) + Self::size_of_value(&here);
        self.slots[at] = here;
        self.tidy();
        true
    }

    /// The entries from a place on.
    pub fn entries(&self, from: usize) -> impl Iterator<Item = Entry<'_>> {
        (from..self.len()).filter_map(|at| self.entry(at))
    }

    /// Sets what a key has.
    pub fn set(&mut self, entry: &Entry<'_>) {
        self.set_near(entry, NOWHERE);
    }

    /// The same, without a search if `near` is [right](Self::find_near).
    pub fn set_near(&mut self, entry: &Entry<'_>, near: Result<usize, usize>) {
        let found = self.find_near(entry.key, near);
        if let Ok(at) = found {
            if self.replace(at, entry) {
                return;
            }
            self.bury(at);
        }
        let number;
        let (flags, value_len, inline): (u32, u32, &[u8]) = match entry.value {
            Value::Here(value) if value.len() > PACKED_BYTES_MAX => {
                number = self.keep_apart(Arc::from(value)).to_le_bytes();
                (APART, value.len() as u32, &number)
            }
            Value::Here(value) => (0, value.len() as u32, value),
            Value::Cells(head) if head.len() > PACKED_BYTES_MAX => {
                number = self.keep_apart(Arc::from(head)).to_le_bytes();
                (CELLS | APART, head.len() as u32, &number)
            }
            Value::Cells(head) => (CELLS, head.len() as u32, head),
            Value::OnMedium(len) => (ON_MEDIUM, len, &[]),
            Value::Gone => (GONE, 0, &[]),
        };
        let start = self.bytes.len();
        let bytes = 8 * usize::from(entry.expires_ms.is_some()) + entry.key.len() + inline.len();
        grow(&mut self.bytes, bytes);
        if let Some(time) = entry.expires_ms {
            self.soonest_ms = self.soonest_ms.min(time);
            self.bytes.extend_from_slice(&time.to_le_bytes());
        }
        self.bytes.extend_from_slice(entry.key);
        self.bytes.extend_from_slice(inline);
        let slot = Slot {
            at: start as u32,
            value_len,
            key_len: entry.key.len() as u16,
            log: entry.origin.log,
            flags: flags
                | if entry.expires_ms.is_some() { HAS_EXPIRY } else { 0 }
                | entry.older.min(OLDER_MAX) << OLDER_SHIFT,
            lsn: entry.origin.lsn.0,
            version: entry.origin.version,
        };
        self.values += Self::size_of_value(&slot);
        match found {
            Ok(at) => self.slots[at] = slot,
            Err(at) => {
                self.share_with(entry.key);
                grow(&mut self.slots, 1);
                grow(&mut self.hints, 1);
                self.slots.insert(at, slot);
                self.hints.insert(at, hint_of(&entry.key[self.shared..]));
            }
        }
        self.tidy();
    }

    /// Writes a value of the same length over the one that is there, if both lie among the keys. False if not: nothing was
    /// changed.
    fn replace(&mut self, at: usize, entry: &Entry<'_>) -> bool {
        let Value::Here(value) = entry.value else { return false };
        let slot = &mut self.slots[at];
        let is_packed = slot.flags & (ON_MEDIUM | GONE | APART | CELLS) == 0;
        let has_expiry = slot.flags & HAS_EXPIRY != 0;
        if !is_packed || slot.value_len as usize != value.len() || has_expiry != entry.expires_ms.is_some() {
            return false;
        }
        if let Some(time) = entry.expires_ms {
            self.soonest_ms = self.soonest_ms.min(time);
            self.bytes[slot.at as usize..][..8].copy_from_slice(&time.to_le_bytes());
        }
        let value_at = slot.key_at() + usize::from(slot.key_len);
        self.bytes[value_at..][..value.len()].copy_from_slice(value);
        slot.flags = slot.flags & ((1 << OLDER_SHIFT) - 1) | entry.older.min(OLDER_MAX) << OLDER_SHIFT;
        (slot.log, slot.lsn, slot.version) = (entry.origin.log, entry.origin.lsn.0, entry.origin.version);
        true
    }

    /// Takes a key out. True if it was there.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        let Ok(at) = self.find(key) else { return false };
        self.bury(at);
        self.slots.remove(at);
        self.hints.remove(at);
        self.shrink();
        true
    }

    /// Removes the keys that begin with `front`, and hands each entry to `take` before. Returns their number.
    pub(crate) fn remove_front(&mut self, front: &[u8], mut take: impl FnMut(&Entry<'_>)) -> usize {
        let from = self.find(front).unwrap_or_else(|at| at);
        let count = self.slots[from..].partition_point(|slot| self.key(slot).starts_with(front));
        for at in from..from + count {
            self.entry(at).iter().for_each(&mut take);
            self.bury(at);
        }
        self.slots.drain(from..from + count);
        self.hints.drain(from..from + count);
        self.shrink();
        count
    }

    /// Gives memory back after entries went.
    fn shrink(&mut self) {
        // The slack of many that went is memory that no other leaf can use.
        if self.slots.capacity() > self.len() + self.len() / 4 + 16 {
            self.pack();
        }
        self.tidy();
    }

    /// The record of a key was written again elsewhere.
    pub fn moved(&mut self, key: &[u8], log: u16, lsn: Lsn) {
        if let Ok(at) = self.find(key) {
            (self.slots[at].log, self.slots[at].lsn) = (log, lsn.0);
        }
    }

    /// One more older record of a key is on a medium.
    pub fn add_older(&mut self, key: &[u8]) {
        if let Ok(at) = self.find(key)
            && self.slots[at].flags >> OLDER_SHIFT < OLDER_MAX
        {
            self.slots[at].flags += 1 << OLDER_SHIFT;
        }
    }

    /// An older record of a key is on no medium any more. True if the entry [is out of date](Entry::is_settled) by that.
    pub fn forget_older(&mut self, key: &[u8]) -> bool {
        let Ok(at) = self.find(key) else { return false };
        let slot = &mut self.slots[at];
        let older = slot.flags >> OLDER_SHIFT;
        if (1..OLDER_MAX).contains(&older) {
            slot.flags -= 1 << OLDER_SHIFT;
        }
        older == 1 && slot.flags & (GONE | CELLS) != 0
    }

    /// Splits the leaf into parts of the same length, each with room for more. Keeps the first part and returns the others, in order.
    pub fn split(&mut self) -> Vec<Self> {
        let parts = self.len().div_ceil(FILLED).max(1);
        let slots = mem::take(&mut self.slots);
        let (first, others) = slots.split_at(slots.len().div_ceil(parts));
        let others = others.chunks(first.len().max(1)).map(|slots| self.packed(slots)).collect();
        *self = self.packed(first);
        others
    }

    /// Packs the bytes anew when a quarter of them is dead: what is gone is memory that others need.
    fn tidy(&mut self) {
        if self.dead > 512 && self.dead > self.bytes.len() / 4 {
            self.pack();
        }
    }

    fn pack(&mut self) {
        let slots = mem::take(&mut self.slots);
        *self = self.packed(&slots);
    }

    fn packed(&self, slots: &[Slot]) -> Self {
        let mut bytes: Vec<u8> = Vec::with_capacity(slots.iter().map(Slot::len).sum());
        let mut apart: Vec<Arc<[u8]>> = Vec::new();
        let mut values = Sizes::default();
        let moved = slots.iter().map(|slot| {
            let at = bytes.len();
            values += Self::size_of_value(slot);
            bytes.extend_from_slice(&self.bytes[slot.at as usize..][..slot.len()]);
            let value_at = slot.key_at() + usize::from(slot.key_len);
            if let Some(number) = self.number(slot, value_at) {
                let here = at + slot.len() - NUMBER_BYTES;
                bytes[here..].copy_from_slice(&(apart.len() as u32).to_le_bytes());
                apart.push(Arc::clone(&self.apart[number as usize]));
            }
            Slot { at: at as u32, ..*slot }
        });
        // The keys are in order: what the first and the last one share, all do.
        let ends = slots.first().zip(slots.last());
        let shared = ends.map_or(0, |(first, last)| shared_by(self.key(first), self.key(last)));
        let hints = self.hints_of(slots, shared);
        let slots = moved.collect();
        Self { slots, hints, shared, bytes, dead: 0, apart, free: Vec::new(), soonest_ms: self.soonest_ms, values }
    }
}

/// Room for more, an eighth ahead: doubling would leave a third of the index empty.
fn grow<T>(vec: &mut Vec<T>, more: usize) {
    if vec.capacity() - vec.len() < more {
        vec.reserve_exact(more.max(vec.len() / 8).max(8));
    }
}
