//! Cells: the fields of a hash, the members of a set, the elements of a list, each a record and an entry of its own.
//!
//! ```text
//!   index   key ─► head: shape, number of cells, who wrote last          locked by every command that names the key
//!   cells   key, 0            ─► when the key ends
//!           key, 1, subkey    ─► value                                   read and changed only under that lock
//!           key, 2, score, member ─► nothing: the order of a sorted set, which has no record
//! ```
//!
//! A key is a base (a string or a drop, or nothing) and the cells that are newer than it. So one record takes a key away
//! however many cells it has, and the order in which records are read at a start makes no difference. The records of cells
//! that a base outweighs count as older records of the key, as those of strings do.

use smallvec::SmallVec;

use crate::format::{Lsn, Record, RecordKind};
use crate::index::leaf::{ENTRY_BYTES, Entry, OLDER_MAX, Origin, Value};
use crate::index::{Index, Locked};
use crate::store::Store;

/// What a key is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shape {
    /// A string.
    #[default]
    String,
    /// Fields, each with a value.
    Hash,
    /// Members.
    Set,
    /// Elements by their place.
    List,
    /// Members, each with a score.
    SortedSet,
}

impl Shape {
    /// The kind of the records of its cells.
    pub(crate) fn kind(self) -> RecordKind {
        match self {
            Self::String => RecordKind::String,
            Self::Hash => RecordKind::Field,
            Self::Set => RecordKind::Member,
            Self::List => RecordKind::Element,
            Self::SortedSet => RecordKind::Scored,
        }
    }

    fn of(kind: RecordKind) -> Option<Self> {
        match kind {
            RecordKind::Field => Some(Self::Hash),
            RecordKind::Member => Some(Self::Set),
            RecordKind::Element => Some(Self::List),
            RecordKind::Scored => Some(Self::SortedSet),
            RecordKind::String | RecordKind::Drop | RecordKind::Remove | RecordKind::Expire | RecordKind::Flush => None,
        }
    }
}

/// The subkey of the element at a place of a list.
pub fn place_key(place: i64) -> [u8; 8] {
    (place as u64 ^ 1 << 63).to_be_bytes()
}

/// The place that a subkey of a list names.
pub fn place_of(subkey: &[u8]) -> i64 {
    let mut bytes = [0; 8];
    let length = subkey.len().min(8);
    bytes[..length].copy_from_slice(&subkey[..length]);
    (u64::from_be_bytes(bytes) ^ 1 << 63) as i64
}

/// The value of a member of a sorted set.
pub fn score_value(score: f64) -> [u8; 8] {
    score.to_le_bytes()
}

/// The score that the value of a member is.
pub fn score_of(value: &[u8]) -> f64 {
    let mut bytes = [0; 8];
    let length = value.len().min(8);
    bytes[..length].copy_from_slice(&value[..length]);
    f64::from_le_bytes(bytes)
}

/// Eight bytes that are ordered as scores are.
pub fn score_order(score: f64) -> [u8; 8] {
    // Minus zero is zero.
    let bits = (score + 0.0).to_bits();
    (if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }).to_be_bytes()
}

/// The score of which these are the ordered bytes.
fn score_of_order(bytes: [u8; 8]) -> f64 {
    let bits = u64::from_be_bytes(bytes);
    f64::from_bits(if bits >> 63 == 1 { bits ^ 1 << 63 } else { !bits })
}

/// What the parts of a key in the index of cells are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Part {
    End = 0,
    Cell = 1,
    Order = 2,
}

/// Bytes of the key of a cell beside the key and the subkey.
pub(crate) const EXTRA_BYTES: usize = 3;
/// Bytes that the order of a sorted set takes beside that.
pub(crate) const ORDER_BYTES: usize = 8;

/// The key of a cell in the index of cells.
pub(crate) fn cell_key(key: &[u8], part: Part, subkey: &[u8]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(EXTRA_BYTES + key.len() + subkey.len());
    whole.extend_from_slice(&(key.len() as u16).to_be_bytes());
    whole.extend_from_slice(key);
    whole.push(part as u8);
    whole.extend_from_slice(subkey);
    whole
}

/// The key in the index of cells that a record is about.
pub(crate) fn cell_key_of(record: &Record<'_>) -> Vec<u8> {
    let part = if record.kind == RecordKind::Expire { Part::End } else { Part::Cell };
    cell_key(record.key, part, record.subkey)
}

/// True for a record of a key as a whole.
pub(crate) fn is_base(kind: RecordKind) -> bool {
    matches!(kind, RecordKind::String | RecordKind::Drop)
}

/// What is known of a key that has cells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) shape: Shape,
    /// Cells that are there.
    pub(crate) count: u64,
    /// The place of the first element of a list, of which the places have no gaps.
    pub(crate) first: i64,
    /// The version of the last write.
    pub(crate) version: u64,
    /// Of each log that wrote to it, the end of the last record that was not promised then.
    pub(crate) seen: Vec<(u16, Lsn)>,
}

impl Head {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.shape as u8];
        bytes.extend_from_slice(&self.count.to_le_bytes());
        bytes.extend_from_slice(&self.first.to_le_bytes());
        bytes.extend_from_slice(&self.version.to_le_bytes());
        for (log, lsn) in &self.seen {
            bytes.extend_from_slice(&log.to_le_bytes());
            bytes.extend_from_slice(&lsn.0.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`encode`](Self::encode) made; nothing else is in the index.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(number)
        };
        let shape = [Shape::String, Shape::Hash, Shape::Set, Shape::List, Shape::SortedSet][usize::from(bytes[0])];
        let seen = (25..bytes.len()).step_by(10);
        let seen = seen.map(|at| (u16::from_le_bytes([bytes[at], bytes[at + 1]]), Lsn(number(at + 2)))).collect();
        Self { shape, count: number(1), first: number(9) as i64, version: number(17), seen }
    }
}

/// Goes through the cells of a key from a subkey on, in order, until `take` returns false.
pub(crate) fn walk(cells: &Index, key: &[u8], from: &[u8], mut take: impl FnMut(&[u8], &[u8]) -> bool) {
    let front = cell_key(key, Part::Cell, &[]);
    cells.scan(&cell_key(key, Part::Cell, from), |entry| {
        let Some(subkey) = entry.key.strip_prefix(&front[..]) else { return false };
        let Value::Here(value) = entry.value else { return true };
        take(subkey, value)
    });
}

/// The same in the order of the scores of a sorted set, from a score on, or from a place on behind that.
pub(crate) fn walk_scores(
    cells: &Index,
    key: &[u8],
    from: f64,
    skipped: usize,
    mut take: impl FnMut(f64, &[u8]) -> bool,
) {
    let front = cell_key(key, Part::Order, &[]);
    let take = |entry: &Entry<'_>| {
        let Some((score, member)) = entry.key.strip_prefix(&front[..]).and_then(<[u8]>::split_first_chunk::<8>) else {
            return false;
        };
        take(score_of_order(*score), member)
    };
    let from = cell_key(key, Part::Order, &score_order(from));
    if skipped == 0 { cells.scan(&from, take) } else { cells.scan_behind(&from, skipped, take) }
}

/// Eight bytes that are ordered behind all members of a score.
pub(crate) fn order_behind(score: f64) -> [u8; 8] {
    (u64::from_be_bytes(score_order(score)) + 1).to_be_bytes()
}

/// How many members of a sorted set lie between two places of its order, each of which is the ordered bytes of a score, with
/// the begin of a member.
pub(crate) fn count_order(cells: &Index, key: &[u8], from: &[u8], to: &[u8]) -> usize {
    cells.count(&cell_key(key, Part::Order, from), &cell_key(key, Part::Order, to))
}

/// How often a cell is drawn before they are gone through one by one: many that are gone may lie among them.
const DRAWS_MAX: usize = 8;

/// A cell that is drawn at random among those of a key, of which `count` are there: each is as likely as any other.
pub(crate) fn draw(
    cells: &Index,
    key: &[u8],
    count: u64,
    mut random: impl FnMut() -> u64,
) -> Option<(Vec<u8>, Vec<u8>)> {
    let front = cell_key(key, Part::Cell, &[]);
    let all = cells.count(&front, &cell_key(key, Part::Order, &[]));
    let mut found = None;
    for _ in 0..DRAWS_MAX {
        cells.scan_behind(&front, (random() % all.max(1) as u64) as usize, |entry| {
            if let (Some(subkey), Value::Here(value)) = (entry.key.strip_prefix(&front[..]), entry.value) {
                found = Some((subkey.to_vec(), value.to_vec()));
            }
            false
        });
        if found.is_some() {
            return found;
        }
    }
    let mut left = random() % count.max(1);
    walk(cells, key, &[], |subkey, value| {
        if left == 0 {
            found = Some((subkey.to_vec(), value.to_vec()));
        }
        left = left.wrapping_sub(1);
        found.is_none()
    });
    found
}

/// Bytes of memory that the cells of a key take, and their order.
pub(crate) fn bytes(cells: &Index, key: &[u8]) -> usize {
    let front = cell_key(key, Part::End, &[]);
    let (front, mut bytes) = (&front[..front.len() - 1], 0);
    cells.scan(front, |entry| {
        let is_of_key = entry.key.starts_with(front);
        if is_of_key {
            let value = if let Value::Here(value) = entry.value { value.len() } else { 0 };
            bytes += ENTRY_BYTES + entry.key.len() + value;
        }
        is_of_key
    });
    bytes
}

impl Store {
    /// Goes through some of the cells of a key from a cursor on: as [`Store::scan_some`] does.
    pub(crate) fn walk_some(&self, key: &[u8], cursor: u64, count: usize, mut take: impl FnMut(&[u8], &[u8])) -> u64 {
        let front = cell_key(key, Part::Cell, &[]);
        let counts = |entry: &Entry<'_>| matches!(entry.value, Value::Here(_));
        let next = self.cells().step(&front, self.position(cursor), count, counts, |entry| {
            if let (Some(subkey), Value::Here(value)) = (entry.key.strip_prefix(&front[..]), entry.value) {
                take(subkey, value);
            }
        });
        self.cursor(next)
    }

    /// Brings records of cells of one key, which one log has in this order, into the index. A record that is older than its cell, or
    /// than the base of the key, is dead.
    pub(crate) fn apply_cells<'r>(
        &self,
        locked: &mut Locked<'_>,
        key: &[u8],
        records: impl IntoIterator<Item = (&'r Record<'r>, Origin)>,
    ) {
        let base = locked.get(key);
        let was_there = base.is_some_and(|base| self.is_there(&base));
        let (mut head, mut expires_ms) = match base {
            Some(Entry { value: Value::Cells(head), expires_ms, .. }) => (Head::decode(head), expires_ms),
            _ => (Head::default(), None),
        };
        let (base_origin, older) = base.map_or((Origin::default(), 0), |base| (base.origin, base.older));
        let mut outweighed = 0_u32;
        let counting = records.into_iter().filter_map(|(record, origin)| {
            if base_origin.version > record.version {
                outweighed += 1;
                self.outdate_at(origin, record.encoded_bytes());
                return None;
            }
            Some((cell_key_of(record), (record, origin)))
        });
        let mut last = None;
        let mut places = SmallVec::new();
        self.cells().with_each(counting, |cells, name, (record, origin)| {
            let before = cells.get(name);
            if before.is_some_and(|before| before.origin.version > record.version) {
                cells.add_older(name);
                self.outdate_at(origin, record.encoded_bytes());
                return;
            }
            let is_live = match record.kind {
                RecordKind::Remove => false,
                RecordKind::Expire => record.expires_ms.is_some(),
                _ => true,
            };
            let was_live = before.is_some_and(|before| before.value != Value::Gone);
            let score = before.and_then(|before| match before.value {
                Value::Here(value) if head.shape == Shape::SortedSet => Some(score_of(value)),
                _ => None,
            });
            let cell_older = before.map_or(0, |before| (before.older + 1).min(OLDER_MAX));
            if let Some(before) = before.filter(|before| !before.is_settled()) {
                self.outdate_at(before.origin, cell_bytes(&before));
            }
            let value = if is_live { Value::Here(record.value) } else { Value::Gone };
            // A tombstone weighs only against what is older.
            cells.set(&Entry { key: name, value, origin, expires_ms: record.expires_ms, older: cell_older });
            last = Some(origin);
            head.version = head.version.max(record.version);
            if let Some(shape) = Shape::of(record.kind) {
                head.shape = shape;
            }
            if record.kind == RecordKind::Expire {
                expires_ms = record.expires_ms;
                return;
            }
            moved_place(record, score, &mut places);
            let place = place_of(record.subkey);
            match (was_live, is_live) {
                (false, true) => {
                    head.first = if head.count == 0 { place } else { head.first.min(place) };
                    head.count += 1;
                }
                (true, false) => {
                    head.first += i64::from(head.shape == Shape::List && place == head.first);
                    head.count -= 1;
                }
                _ => {}
            }
        });
        (0..outweighed).for_each(|_| locked.add_older(key));
        let Some(last) = last else { return };
        self.reorder(places);
        head.seen.retain(|(log, lsn)| *log != last.log && *lsn > self.promised(*log));
        head.seen.push((last.log, Lsn(last.lsn.0 + 1)));
        let (is_there, older) = (head.count > 0, older.saturating_add(outweighed).min(OLDER_MAX));
        let head = head.encode();
        locked.set(&Entry { key, value: Value::Cells(&head), origin: base_origin, expires_ms, older });
        self.count_key(was_there, is_there);
    }

    /// Changes the order of sorted sets.
    fn reorder(&self, mut places: Places) {
        // Removals sort before insertions of the same key. Each member is there once.
        places.sort_unstable();
        self.cells().with_each(places, |cells, name, comes| {
            if !comes {
                cells.remove(name);
                return;
            }
            let (value, origin) = (Value::Here(&[]), Origin::default());
            cells.set(&Entry { key: name, value, origin, expires_ms: None, older: 0 });
        });
    }

    /// A base outweighs the cells of a key: takes them out. Returns how many of their records are on a medium.
    pub(crate) fn bury_cells(&self, key: &[u8]) -> u32 {
        let mut older = 0_u32;
        let front = cell_key(key, Part::End, &[]);
        self.cells().remove_front(&front[..front.len() - 1], |entry| {
            if entry.origin.lsn != Lsn::default() {
                older = older.saturating_add(entry.older + 1);
                if !entry.is_settled() {
                    self.outdate_at(entry.origin, cell_bytes(entry));
                }
            }
        });
        older.min(OLDER_MAX)
    }

    /// Marks tombstones of cells that were just written as dead if nothing older is left: the same command had written that.
    pub(crate) fn settle_cells(&self, records: &[Record<'_>]) {
        let tombstones = records.iter().filter(|record| matches!(record.kind, RecordKind::Remove | RecordKind::Expire));
        self.cells().with_each(tombstones.map(|record| (cell_key_of(record), ())), |cells, name, ()| {
            let settled = cells.get(name).filter(Entry::is_settled);
            settled.iter().for_each(|cell| self.outdate_at(cell.origin, cell_bytes(cell)));
        });
    }

    /// After a start, the first place of a list, of which the records came in no order.
    pub(crate) fn find_first(&self, key: &[u8]) {
        self.index().with(&[key], |locked| {
            let Some(entry) = locked.get(key) else { return };
            let Value::Cells(head) = entry.value else { return };
            let mut head = Head::decode(head);
            walk(self.cells(), key, &[], |subkey, _| {
                head.first = place_of(subkey);
                false
            });
            let head = head.encode();
            let Entry { origin, expires_ms, older, .. } = entry;
            locked.set(&Entry { key, value: Value::Cells(&head), origin, expires_ms, older });
        });
    }
}

/// Keys of the order of sorted sets, each with whether it comes or goes.
type Places = SmallVec<[(Vec<u8>, bool); 2]>;

/// Adds the changes of a sorted set's order by a record; `before`: the score of its member until now.
fn moved_place(record: &Record<'_>, before: Option<f64>, places: &mut Places) {
    let after = (record.kind == RecordKind::Scored).then(|| score_order(score_of(record.value)));
    let before = before.map(score_order);
    if before != after {
        let place = |order: [u8; 8]| cell_key(record.key, Part::Order, &[&order[..], record.subkey].concat());
        places.extend(before.map(|order| (place(order), false)));
        places.extend(after.map(|order| (place(order), true)));
    }
}

/// Bytes of the record of a cell, but for the time of receipt.
pub(crate) fn cell_bytes(entry: &Entry<'_>) -> usize {
    let value_bytes = if let Value::Here(value) = entry.value { value.len() } else { 0 };
    Record::bytes_of(entry.key.len() - EXTRA_BYTES, value_bytes, entry.expires_ms.is_some())
}
