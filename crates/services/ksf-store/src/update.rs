//! Keys as a command sees them, and what it changes: nothing of it is in the index until all of it is in the log.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::away::{Missing, Values, Wanted};
use crate::cells::{self, Head, Part, Shape, cell_key, place_of, score_of, score_order};
use crate::format::{Record, RecordKind};
use crate::index::Locked;
use crate::index::leaf::{Entry, Value};
use crate::log::{AppendError, Purpose};
use crate::store::{Got, Needs, Sources, Store, StringValue, got, is_expired};
use crate::watch::Seen;
use crate::work;

/// Keys as a read sees them.
#[derive(Debug)]
pub struct View<'l, 'k> {
    store: &'l Store,
    locked: Locked<'l>,
    now_ms: u64,
    needs: Needs,
    /// What the command itself changed: nothing, if it only reads.
    changes: Changes<'k>,
    /// What was read for it.
    values: Option<Arc<Values>>,
    /// What it asked for in vain.
    missing: Missing<'l>,
}

/// A change of one key.
#[derive(Debug)]
pub(crate) enum Change<'k> {
    Set { value: Cow<'k, [u8]>, expires_ms: Option<u64> },
    Remove,
    Cells(Cells),
}

/// The records of a command. Most commands have one, which takes no memory.
pub(crate) type Records<'r> = SmallVec<[Record<'r>; 1]>;

/// What a command changes, by key. Most commands change one, which takes no memory of its own.
#[derive(Debug, Default)]
pub(crate) struct Changes<'k> {
    /// The only one; `None` if there are several.
    only: Option<(&'k [u8], Change<'k>)>,
    several: BTreeMap<&'k [u8], Change<'k>>,
}

impl<'k> Changes<'k> {
    pub(crate) fn is_empty(&self) -> bool {
        self.only.is_none() && self.several.is_empty()
    }

    /// In the order of the keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'k [u8], &Change<'k>)> {
        let only = self.only.iter().map(|(key, change)| (*key, change));
        only.chain(self.several.iter().map(|(key, change)| (*key, change)))
    }

    fn get(&self, key: &[u8]) -> Option<&Change<'k>> {
        match &self.only {
            Some((only, change)) => (*only == key).then_some(change),
            None => self.several.get(key),
        }
    }

    fn get_mut(&mut self, key: &[u8]) -> Option<&mut Change<'k>> {
        match &mut self.only {
            Some((only, change)) => (*only == key).then_some(change),
            None => self.several.get_mut(key),
        }
    }

    fn contains_key(&self, key: &[u8]) -> bool {
        self.get(key).is_some()
    }

    fn insert(&mut self, key: &'k [u8], change: Change<'k>) {
        if self.several.is_empty() && self.only.as_ref().is_none_or(|(only, _)| *only == key) {
            self.only = Some((key, change));
        } else {
            self.several.extend(self.only.take());
            self.several.insert(key, change);
        }
    }
}

/// A change of cells of one key.
#[derive(Debug)]
pub(crate) struct Cells {
    shape: Shape,
    count: u64,
    first: i64,
    /// Nothing of what the index has counts.
    fresh: bool,
    /// The index has something that must be outweighed.
    drop: bool,
    expires_ms: Option<u64>,
    expiry_changed: bool,
    /// Those that are `None` are taken out.
    cells: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Change<'_> {
    /// State of the key after the change, whether it is expired or not.
    fn got(&self) -> Option<Got<'_>> {
        let (shape, held, count, first, expires_ms) = match self {
            Change::Set { value, expires_ms } => (Shape::String, StringValue::Here(value), 1, 0, *expires_ms),
            Change::Cells(Cells { shape, count, first, expires_ms, .. }) if *count > 0 => {
                (*shape, StringValue::Here(&[]), *count, *first, *expires_ms)
            }
            Change::Cells(_) | Change::Remove => return None,
        };
        Some(Got { shape, held, count, first, version: 0, expires_ms })
    }

    /// The records of the change, but for their versions.
    pub(crate) fn records<'r>(&'r self, key: &'r [u8], received_ns: Option<u64>, to: &mut Records<'r>) {
        if let Change::Cells(change) = self {
            to.reserve(change.cells.len());
        }
        let mut push = |kind, expires_ms, subkey, value| {
            to.push(Record { kind, version: 0, expires_ms, received_ns, key, subkey, value });
        };
        match self {
            Change::Set { value, expires_ms } => push(RecordKind::String, *expires_ms, &[], value),
            Change::Remove => push(RecordKind::Drop, None, &[], &[]),
            Change::Cells(change) => {
                if change.drop {
                    push(RecordKind::Drop, None, &[], &[]);
                }
                for (subkey, value) in &change.cells {
                    match value {
                        Some(value) => push(change.shape.kind(), None, subkey, value),
                        None => push(RecordKind::Remove, None, subkey, &[]),
                    }
                }
                if change.expiry_changed {
                    push(RecordKind::Expire, change.expires_ms, &[], &[]);
                }
            }
        }
    }
}

impl<'l, 'k> View<'l, 'k> {
    pub(crate) fn new(store: &'l Store, values: Option<Arc<Values>>, locked: Locked<'l>, now_ms: u64) -> Self {
        let mut needs = Needs::default();
        store.note_flush(&mut needs);
        Self { store, locked, now_ms, needs, changes: Changes::default(), values, missing: store.missing() }
    }

    pub(crate) fn done(self) -> (Needs, BTreeMap<u64, Wanted>) {
        (self.needs, self.missing.into_wanted())
    }

    /// What a key has, if it is there, also by this command. It is one that the command named.
    pub fn get(&mut self, key: &[u8]) -> Option<Got<'_>> {
        if let Some(change) = self.changes.get(key) {
            let now_ms = self.now_ms;
            let got = change.got().filter(|got| !is_expired(got.expires_ms, now_ms))?;
            work::add(1 + work::of_bytes(got.value_bytes()));
            return Some(got);
        }
        work::add(1);
        let entry = self.locked.get_to_use(key)?;
        self.store.note(&mut self.needs, &entry);
        let sources = Sources { values: self.values.as_deref(), missing: Some(&self.missing) };
        let got = got(&entry, self.now_ms, sources)?;
        work::add(work::of_bytes(got.value_bytes()));
        Some(got)
    }

    /// Sees a key as it is now, for [`has_changed`](Self::has_changed).
    pub(crate) fn see(&mut self, key: &[u8]) -> Seen {
        let version = self.get(key).map(|got| got.version);
        Seen::new(key, version, self.store.next_version(), self.store.absent())
    }

    /// True if a key was written since it was [seen](crate::store::Shard::watch), or has expired: also if it was missing then and is
    /// missing now. A missing key counts as changed, too, if any key was written before a flush: the store does not know which.
    pub fn has_changed(&mut self, seen: &Seen) -> bool {
        let key = seen.key();
        let version = self.get(key).map(|got| got.version);
        if version.is_some() || version != seen.version {
            return version != seen.version;
        }
        let last = match self.locked.get(key) {
            Some(entry) => match entry.value {
                Value::Cells(head) => Head::decode(head).version.max(entry.origin.version),
                _ => entry.origin.version,
            },
            // A flush itself changes no key that is not there; what was written before it has a smaller version.
            None => seen.forgotten().max(self.store.flushed().saturating_sub(1)),
        };
        last >= seen.before
    }

    /// Bytes of memory that a key takes with what it has there: those of every cell among them.
    pub fn memory_of(&mut self, key: &[u8]) -> Option<usize> {
        let shape = self.get(key)?.shape;
        // What the command itself changed is not in the index yet.
        let mut bytes = self.locked.entry_bytes(key).unwrap_or(0);
        if shape != Shape::String {
            bytes += cells::bytes(self.store.cells(), key);
        }
        Some(bytes)
    }

    /// The value of a cell of a key.
    pub fn cell(&mut self, key: &[u8], subkey: &[u8]) -> Option<Vec<u8>> {
        self.get(key).filter(|got| got.shape != Shape::String)?;
        if let Some(Change::Cells(change)) = self.changes.get(key) {
            match change.cells.get(subkey) {
                Some(value) => return value.clone(),
                None if change.fresh => return None,
                None => {}
            }
        }
        work::add(1);
        let name = cell_key(key, Part::Cell, subkey);
        self.store.cells().with(&[&name], |cells| match cells.get(&name)?.value {
            Value::Here(value) => Some(value.to_vec()),
            _ => None,
        })
    }

    /// Goes through the cells of a key from a subkey on, in order, until `take` returns false.
    pub fn walk(&mut self, key: &[u8], from: &[u8], mut take: impl FnMut(&[u8], &[u8]) -> bool) {
        if self.get(key).is_none_or(|got| got.shape == Shape::String) {
            return;
        }
        let Some(Change::Cells(change)) = self.changes.get(key) else {
            cells::walk(self.store.cells(), key, from, take);
            return;
        };
        let mut all: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        if !change.fresh {
            cells::walk(self.store.cells(), key, from, |subkey, value| {
                all.insert(subkey.to_vec(), value.to_vec());
                true
            });
        }
        for (subkey, value) in change.cells.range(from.to_vec()..) {
            match value {
                Some(value) => drop(all.insert(subkey.clone(), value.clone())),
                None => drop(all.remove(subkey)),
            }
        }
        work::add(all.len() as u64);
        let _ = all.iter().all(|(subkey, value)| take(subkey, value));
    }

    /// All cells of a key, in order.
    pub fn cells(&mut self, key: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut all = Vec::new();
        self.walk(key, &[], |subkey, value| {
            all.push((subkey.to_vec(), value.to_vec()));
            true
        });
        all
    }

    /// Goes through some of the cells of a key, about `count` of them, from a cursor on; 0 begins. Returns the cursor to go on from,
    /// which is 0 at the end. A cell that is there from the first step to the last is shown once, or more often if others come
    /// or go meanwhile. What the command itself changed is shown whole.
    pub fn walk_some(&mut self, key: &[u8], cursor: u64, count: usize, mut take: impl FnMut(&[u8], &[u8])) -> u64 {
        if self.get(key).is_none_or(|got| got.shape == Shape::String) {
            return 0;
        }
        if !self.changes.contains_key(key) {
            return self.store.walk_some(key, cursor, count, take);
        }
        self.walk(key, &[], |subkey, value| {
            take(subkey, value);
            true
        });
        0
    }

    /// Goes through the members of a sorted set in their order, from a score on, until `take` returns false.
    pub fn walk_scores(&mut self, key: &[u8], from: f64, mut take: impl FnMut(f64, &[u8]) -> bool) {
        if self.get(key).is_none_or(|got| got.shape != Shape::SortedSet) {
            return;
        }
        if !self.changes.contains_key(key) {
            cells::walk_scores(self.store.cells(), key, from, 0, take);
            return;
        }
        let scored = self.in_order(key);
        let mut scored = scored.iter().skip_while(|(score, _)| *score < from);
        let _ = scored.all(|(score, member)| take(*score, member));
    }

    /// Goes through the members of a sorted set in their order, from a place on, until `take` returns false. Those in front of it
    /// are not looked at one by one.
    pub fn walk_places(&mut self, key: &[u8], first: u64, mut take: impl FnMut(f64, &[u8]) -> bool) {
        if self.get(key).is_none_or(|got| got.shape != Shape::SortedSet) {
            return;
        }
        let skipped = usize::try_from(first).unwrap_or(usize::MAX);
        if !self.changes.contains_key(key) {
            cells::walk_scores(self.store.cells(), key, f64::NEG_INFINITY, skipped, take);
            return;
        }
        let scored = self.in_order(key);
        let _ = scored.iter().skip(skipped).all(|(score, member)| take(*score, member));
    }

    /// The members of a sorted set in their order.
    fn in_order(&mut self, key: &[u8]) -> Vec<(f64, Vec<u8>)> {
        let mut all: Vec<_> = self.cells(key).into_iter().map(|(member, value)| (score_of(&value), member)).collect();
        all.sort_by_cached_key(|(score, member)| (score_order(*score), member.clone()));
        all
    }

    /// How many members of a sorted set come in front of this one, which has this score. They are not looked at one by one.
    pub fn members_before(&mut self, key: &[u8], score: f64, member: &[u8]) -> u64 {
        self.count_order(key, &[], &[&score_order(score)[..], member].concat())
    }

    /// How many members of a sorted set have a score from one to another. An end that is open is not among them.
    pub fn count_scores(&mut self, key: &[u8], from: (f64, bool), to: (f64, bool)) -> u64 {
        let behind = |(score, is_behind): (f64, bool)| {
            if is_behind { cells::order_behind(score) } else { score_order(score) }
        };
        self.count_order(key, &behind(from), &behind((to.0, !to.1)))
    }

    fn count_order(&mut self, key: &[u8], from: &[u8], to: &[u8]) -> u64 {
        if self.get(key).is_none_or(|got| got.shape != Shape::SortedSet) {
            return 0;
        }
        if !self.changes.contains_key(key) {
            return cells::count_order(self.store.cells(), key, from, to) as u64;
        }
        let is_between = |(member, value): &(Vec<u8>, Vec<u8>)| {
            let place = [&score_order(score_of(value))[..], member].concat();
            from <= &place[..] && &place[..] < to
        };
        self.cells(key).iter().filter(|cell| is_between(cell)).count() as u64
    }

    /// A cell of a key that is drawn at random, each as likely as any other: subkey and value. Others are not looked at one by one.
    pub fn draw(&mut self, key: &[u8], mut random: impl FnMut() -> u64) -> Option<(Vec<u8>, Vec<u8>)> {
        let count = self.get(key).filter(|got| got.shape != Shape::String)?.count;
        if !self.changes.contains_key(key) {
            return cells::draw(self.store.cells(), key, count, random);
        }
        let mut all = self.cells(key);
        let at = (random() % all.len().max(1) as u64) as usize;
        (at < all.len()).then(|| all.swap_remove(at))
    }

    /// Whether this command has changed a key already: then each walk through it copies all of it.
    pub fn is_changed(&self, key: &[u8]) -> bool {
        self.changes.contains_key(key)
    }
}

/// What is left of an update: what is locked, what the reply needs, what is to change, and what was asked for in vain.
pub(crate) type Done<'l, 'k> = (Locked<'l>, Needs, Changes<'k>, BTreeMap<u64, Wanted>);

/// Keys as a command sees and changes them.
#[derive(Debug)]
pub struct Update<'l, 'k> {
    view: View<'l, 'k>,
    /// Bytes of the records of what was copied.
    copied_bytes: usize,
    purpose: Option<Purpose>,
}

impl<'l, 'k> Update<'l, 'k> {
    pub(crate) fn new(store: &'l Store, values: Option<Arc<Values>>, locked: Locked<'l>, now_ms: u64) -> Self {
        Self { view: View::new(store, values, locked, now_ms), copied_bytes: 0, purpose: None }
    }

    /// It, or a part of it, takes room in the log for this. Without a word it is for [writing](Purpose::Writing), and what only takes
    /// away is for [removing](Purpose::Removing), whatever is said.
    pub fn takes_room_for(&mut self, purpose: Purpose) {
        self.purpose = self.purpose.max(Some(purpose));
    }

    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose.unwrap_or(Purpose::Writing)
    }

    pub(crate) fn done(self) -> Done<'l, 'k> {
        let View { locked, needs, changes, missing, .. } = self.view;
        (locked, needs, changes, missing.into_wanted())
    }

    /// The keys as they are by now.
    pub fn view(&mut self) -> &mut View<'l, 'k> {
        &mut self.view
    }

    /// What a key has, also by this command. It is one that the command named.
    pub fn get(&mut self, key: &[u8]) -> Option<Got<'_>> {
        self.view.get(key)
    }

    /// The value of a cell of a key.
    pub fn cell(&mut self, key: &[u8], subkey: &[u8]) -> Option<Vec<u8>> {
        self.view.cell(key, subkey)
    }

    /// All cells of a key, in order.
    pub fn cells(&mut self, key: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
        self.view.cells(key)
    }

    /// Makes a key a string, and says when it ends.
    pub fn set(&mut self, key: &'k [u8], value: impl Into<Cow<'k, [u8]>>, expires_ms: Option<u64>) {
        self.view.changes.insert(key, Change::Set { value: value.into(), expires_ms });
    }

    /// Gives a key all that another one has, with the time of its end; what the key had is gone. False if there is no other one.
    /// Both are keys that the command named.
    ///
    /// # Errors
    ///
    /// [`AppendError::TooLong`]: all that the update copies has more than `bytes_max` bytes of records, which are those that
    /// [an append](crate::log::Geometry::append_bytes_max) may have. Nothing was changed by this call.
    pub fn copy(&mut self, from: &[u8], to: &'k [u8], bytes_max: usize) -> Result<bool, AppendError> {
        let Some(got) = self.get(from) else { return Ok(false) };
        let (shape, count, first, expires_ms) = (got.shape, got.count, got.first, got.expires_ms);
        let value_bytes = got.value_bytes();
        if from == to {
            return Ok(true);
        }
        let (mut bytes, mut cells) = (self.copied_bytes, Vec::new());
        if shape == Shape::String {
            bytes += Record::bytes_of(to.len(), value_bytes, expires_ms.is_some());
        }
        // What does not fit takes no memory.
        self.view.walk(from, &[], |subkey, value| {
            bytes += Record::bytes_of(to.len() + subkey.len(), value.len(), false);
            if bytes <= bytes_max {
                cells.push((subkey.to_vec(), Some(value.to_vec())));
            }
            bytes <= bytes_max
        });
        if bytes > bytes_max {
            return Err(AppendError::TooLong { bytes, limit: bytes_max });
        }
        self.copied_bytes = bytes;
        if shape == Shape::String {
            let value = self.get(from).map(|got| got.value().to_vec()).unwrap_or_default();
            self.set(to, value, expires_ms);
            return Ok(true);
        }
        self.remove(to);
        let change = self.change(to, shape);
        // In order, which fills the map faster than one after the other.
        (change.count, change.first, change.cells) = (count, first, cells.into_iter().collect());
        (change.expires_ms, change.expiry_changed) = (expires_ms, expires_ms.is_some());
        Ok(true)
    }

    /// Gives a key the name of another one, which is gone if it was there. False if the key is not there.
    ///
    /// # Errors
    ///
    /// Those of [`copy`](Self::copy).
    pub fn rename(&mut self, from: &'k [u8], to: &'k [u8], bytes_max: usize) -> Result<bool, AppendError> {
        let is_there = self.copy(from, to, bytes_max)?;
        if is_there && from != to {
            self.remove(from);
        }
        Ok(is_there)
    }

    /// Has those who watch a key that has cells see a write, though there is nothing to change. It is no write: nothing is logged.
    pub fn touch(&mut self, key: &[u8]) {
        let View { store, locked, .. } = &mut self.view;
        let Some(Entry { value: Value::Cells(head), origin, expires_ms, older, .. }) = locked.get(key) else { return };
        let head = Head { version: store.take_version(), ..Head::decode(head) }.encode();
        locked.set(&Entry { key, value: Value::Cells(&head), origin, expires_ms, older });
    }

    /// Takes a key out. True if it was there.
    pub fn remove(&mut self, key: &'k [u8]) -> bool {
        let was_there = self.get(key).is_some();
        // Also of a key that has ended, whose record is still there.
        if was_there || self.view.changes.contains_key(key) || self.has_ended(key) {
            self.view.changes.insert(key, Change::Remove);
        }
        was_there
    }

    /// Takes a key out if its time is over. True if it was.
    pub fn remove_ended(&mut self, key: &'k [u8]) -> bool {
        let has_ended = !self.view.changes.contains_key(key) && self.has_ended(key);
        if has_ended {
            self.view.changes.insert(key, Change::Remove);
        }
        has_ended
    }

    /// Whether the index has a key whose time is over.
    fn has_ended(&self, key: &[u8]) -> bool {
        let View { store, locked, now_ms, .. } = &self.view;
        let is_over = |entry: &Entry<'_>| got(entry, *now_ms, Sources::default()).is_none();
        locked.get(key).is_some_and(|entry| store.is_there(&entry) && is_over(&entry))
    }

    /// What is to change of the cells of a key, which becomes one of this shape if it is not there.
    fn change(&mut self, key: &'k [u8], shape: Shape) -> &mut Cells {
        let got = self.view.get(key).filter(|got| got.shape != Shape::String);
        let found = got.map(|got| (got.shape, got.count, got.first, got.expires_ms));
        // Elements that this update wrote and that are expired are not written.
        if found.is_none() || !matches!(self.view.changes.get(key), Some(Change::Cells(_))) {
            let changed = self.view.changes.contains_key(key);
            let (fresh, (shape, count, first, expires_ms)) = (found.is_none(), found.unwrap_or((shape, 0, 0, None)));
            let there = self.view.locked.get(key).is_some_and(|entry| entry.value != Value::Gone);
            let drop = fresh && (changed || there);
            let change =
                Cells { shape, count, first, fresh, drop, expires_ms, expiry_changed: false, cells: BTreeMap::new() };
            self.view.changes.insert(key, Change::Cells(change));
        }
        match self.view.changes.get_mut(key) {
            Some(Change::Cells(change)) => change,
            _ => unreachable!("it was put there"),
        }
    }

    /// Sets a cell of a key, which is of this shape or not there. True if the cell is new.
    pub fn set_cell(&mut self, key: &'k [u8], shape: Shape, subkey: &[u8], value: &[u8]) -> bool {
        let is_new = self.cell(key, subkey).is_none();
        let change = self.change(key, shape);
        if is_new {
            let place = place_of(subkey);
            change.first = if change.count == 0 { place } else { change.first.min(place) };
            change.count += 1;
        }
        change.cells.insert(subkey.to_vec(), Some(value.to_vec()));
        is_new
    }

    /// Takes a cell of a key out, and the key with the last one. True if it was there.
    pub fn remove_cell(&mut self, key: &'k [u8], subkey: &[u8]) -> bool {
        if self.cell(key, subkey).is_none() {
            return false;
        }
        let change = self.change(key, Shape::default());
        change.count -= 1;
        change.first += i64::from(change.shape == Shape::List && place_of(subkey) == change.first);
        change.cells.insert(subkey.to_vec(), None);
        if change.count == 0 {
            self.view.changes.insert(key, Change::Remove);
        }
        true
    }

    /// Says when a key ends that is there.
    pub fn expire(&mut self, key: &'k [u8], expires_ms: Option<u64>) {
        match self.get(key).map(|got| (got.shape, got.value().to_vec())) {
            Some((Shape::String, value)) => self.set(key, value, expires_ms),
            Some((shape, _)) => {
                let change = self.change(key, shape);
                (change.expires_ms, change.expiry_changed) = (expires_ms, true);
            }
            None => {}
        }
    }
}
