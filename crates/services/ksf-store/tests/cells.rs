//! Keys with cells on media that lose power: every key shows a state that it had, none older than what replies told of.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::common::Medium;
use crate::opened::{open, seeds};
use ksf_store::backup::Backup;
use ksf_store::cells::{Shape, place_key, score_value};
use ksf_store::format::{Lsn, RecordKind};
use ksf_store::log::{AppendError, Geometry};
use ksf_store::recover::Found;
use ksf_store::store::{CleanError, Cleaning, Clock, Needs, Shard, Store, SweepBudget, UpdateError};
use ksf_store::update::{Update, View};
use ksf_test::{Random, TestRandom};

const SHARDS: usize = 3;
const KEYS: u64 = 12;

/// What a key has: its shape, its cells (a string has one), and when it ends.
type State = Option<(Shape, BTreeMap<Vec<u8>, Vec<u8>>, Option<u64>)>;

struct Write {
    key: Vec<u8>,
    state: State,
    needs: Needs,
    told: bool,
}

struct World {
    random: TestRandom,
    geometry: Geometry,
    media: Vec<Medium>,
    store: Arc<Store>,
    shards: Vec<Shard>,
    epoch: u32,
    writes: Vec<Write>,
    /// What was written so often.
    number: u64,
    cleaning: Vec<Option<Cleaning>>,
    /// Whether segments are cleaned that nobody needs the room of.
    cleans_early: bool,
    /// Keeps segments from being erased, so that they are not erased in the order in which they were cleaned.
    backup: Option<Backup>,
    backups: usize,
    crashes: usize,
    cleaned: usize,
    /// The clock by which keys end. It may be set back while the store does not run.
    now_ms: u64,
    swept: usize,
    renamed: usize,
    flushed: usize,
}

fn state(view: &mut View<'_, '_>, key: &[u8]) -> State {
    let got = view.get(key)?;
    let (shape, expires_ms, count, first) = (got.shape, got.expires_ms, got.count, got.first);
    let cells = match shape {
        Shape::String => BTreeMap::from([(Vec::new(), got.value().to_vec())]),
        _ => view.cells(key).into_iter().collect(),
    };
    assert_eq!(cells.len() as u64, count);
    if shape == Shape::List {
        let places = (first..).take(cells.len()).map(place_key);
        assert!(cells.keys().zip(places).all(|(one, other)| **one == other), "the places of a list have no gap");
    }
    if shape == Shape::SortedSet {
        let mut ordered = Vec::new();
        view.walk_scores(key, f64::NEG_INFINITY, |score, member| {
            ordered.push((score, member.to_vec()));
            true
        });
        assert!(ordered.is_sorted_by(|one, next| (one.0, &one.1) < (next.0, &next.1)));
        assert_eq!(ordered.len(), cells.len());
        assert!(ordered.iter().all(|(score, member)| cells[member] == score_value(*score)));
    }
    Some((shape, cells, expires_ms))
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::of_test(seed);
        let block_bytes = NonZeroUsize::new(512).unwrap();
        let geometry =
            Geometry { store: 9, block_bytes, segment_bytes: (random.within(16..=32) * block_bytes.get()) as u64 };
        let places = random.within(4..=10);
        let cleans_early = random.one_in(2);
        let mut media: Vec<_> = (0..SHARDS).map(|_| Medium::new(places, geometry.segment_bytes as usize)).collect();
        let (store, shards) = open(geometry, &mut media, &mut 1, None);
        let cleaning = (0..SHARDS).map(|_| None).collect();
        Self {
            random,
            geometry,
            media,
            store,
            shards,
            epoch: 1,
            writes: Vec::new(),
            number: 0,
            cleaning,
            cleans_early,
            backup: None,
            backups: 0,
            crashes: 0,
            cleaned: 0,
            now_ms: 1000,
            swept: 0,
            renamed: 0,
            flushed: 0,
        }
    }

    fn write(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let number = self.random.below(KEYS);
        let key = format!("key {number}").into_bytes();
        self.number += 1;
        let mut value = self.number.to_le_bytes().to_vec();
        value.resize(self.random.pick(&[8, 30, 200]), 7);
        let (what, field) = (self.random.below(20), self.random.below(8));
        let shape = [Shape::Hash, Shape::Set, Shape::List, Shape::SortedSet][number as usize % 4];
        self.now_ms += self.random.below(3);
        let end = self.random.one_in(2).then(|| self.now_ms + self.random.below(60));
        let clock = Clock { now_ms: self.now_ms, received_ns: None };
        let done = self.shards[shard].update(&[&key], clock, |update| {
            let got = update.get(&key).map(|got| (got.shape, got.count as i64, got.first));
            let subkey = format!("{field}").into_bytes();
            match (what, got) {
                (0, _) => {
                    update.remove(&key);
                }
                (1, _) => update.set(&key, value, None),
                (2 | 3, Some(_)) => update.expire(&key, end),
                (_, Some((Shape::String, ..))) => {
                    update.remove(&key);
                }
                (4..9, Some((Shape::List, count, first))) => {
                    let place = if what < 6 { first } else { first + count - 1 };
                    assert!(update.remove_cell(&key, &place_key(place)));
                }
                (4..9, Some(_)) => {
                    update.remove_cell(&key, &subkey);
                }
                (_, got) => match shape {
                    Shape::List => {
                        let (_, count, first) = got.unwrap_or((shape, 0, 0));
                        let place = if what < 14 { first - 1 } else { first + count };
                        assert!(update.set_cell(&key, shape, &place_key(place), &value));
                    }
                    Shape::Set => {
                        update.set_cell(&key, shape, &subkey, &[]);
                    }
                    Shape::SortedSet => {
                        update.set_cell(&key, shape, &subkey, &score_value(what as f64 - 12.0));
                    }
                    Shape::Hash | Shape::String => {
                        update.set_cell(&key, shape, &subkey, &value);
                    }
                },
            }
            state(update.view(), &key)
        });
        match done {
            Ok((wanted, needs)) => {
                let (is, _) = self.shards[0].read(&[&key], self.now_ms, |view| state(view, &key));
                assert_eq!(is, wanted, "what a command saw of its own changes is what is there");
                // A key that has ended is there until that is written.
                let (is, _) = self.shards[0].read(&[&key], 0, |view| state(view, &key));
                self.writes.push(Write { key, state: is, needs, told: false });
            }
            Err(UpdateError::Append(AppendError::Full)) => {}
            Err(UpdateError::Undone) => drop(self.shards[shard].undone()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Gives a key the name of another one of its shape, which is a write to both.
    fn rename(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let number = self.random.below(KEYS);
        let other = (number + 4 * (1 + self.random.below(2))) % KEYS;
        let (from, to) = (format!("key {number}").into_bytes(), format!("key {other}").into_bytes());
        let clock = Clock { now_ms: self.now_ms, received_ns: None };
        let bytes_max = self.geometry.append_bytes_max();
        let states = |view: &mut View<'_, '_>, keys: [&[u8]; 2]| keys.map(|key| state(view, key));
        let done = self.shards[shard].update(&[&from, &to], clock, |update| {
            let [before, _] = states(update.view(), [&from, &to]);
            let renamed = update.rename(&from, &to, bytes_max);
            let [was_from, is_to] = states(update.view(), [&from, &to]);
            match renamed {
                Ok(true) => assert!(was_from.is_none() && is_to == before && before.is_some()),
                Ok(false) => assert!(before.is_none()),
                Err(_) => assert!(was_from == before),
            }
            renamed == Ok(true)
        });
        match done {
            Ok((false, _)) => {}
            Ok((true, needs)) => {
                self.renamed += 1;
                // A key that has ended is there until that is written.
                let (states, _) = self.shards[0].read(&[&from, &to], 0, |view| states(view, [&from, &to]));
                for (key, state) in [from, to].into_iter().zip(states) {
                    self.writes.push(Write { key, state, needs: needs.clone(), told: false });
                }
            }
            Err(UpdateError::Append(AppendError::Full | AppendError::TooLong { .. })) => {}
            Err(UpdateError::Undone) => drop(self.shards[shard].undone()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes every key out, which is a write to all of them.
    fn flush(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        self.flush_by(shard);
    }

    /// When all shards go on, every key can be taken out, however the process ended.
    fn must_flush(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let flushed = self.flushed;
        for _ in 0..10_000 {
            self.flush_by(shard);
            if self.flushed > flushed {
                return;
            }
            self.step_of_the_medium();
            self.clean();
        }
        panic!("it waits for ever: {:?}", self.shards[shard].log());
    }

    fn flush_by(&mut self, shard: usize) {
        let clock = Clock { now_ms: self.now_ms, received_ns: None };
        match self.shards[shard].flush(clock) {
            Ok(needs) => {
                self.flushed += 1;
                for key in (0..KEYS).map(|number| format!("key {number}").into_bytes()) {
                    let (is, _) = self.shards[0].read(&[&key], 0, |view| state(view, &key));
                    assert_eq!(is, None);
                    self.writes.push(Write { key, state: None, needs: needs.clone(), told: false });
                }
                assert_eq!(self.store.keys(), 0);
            }
            Err(UpdateError::Append(AppendError::Full)) => {}
            Err(UpdateError::Undone) => drop(self.shards[shard].undone()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes ended keys out: to each that is a write like any other.
    fn sweep(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let clock = Clock { now_ms: self.now_ms, received_ns: None };
        let Self { shards, writes, swept, store, .. } = self;
        let budget = SweepBudget { leaves_max: 2, keys_max: 3, work_max: 20 };
        let done = shards[shard].sweep(clock, budget, |key, needs| {
            let mut cells = 0;
            store.walk(key, |_, _| cells += 1);
            assert_eq!(cells, 0, "its cells go, too");
            writes.push(Write { key: key.to_vec(), state: None, needs, told: false });
            *swept += 1;
        });
        assert!(matches!(done, Ok(_) | Err(UpdateError::Append(AppendError::Full))), "{done:?}");
    }

    fn step_of_the_medium(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let at_once = self.random.within(1..=4);
        while let Some(write) = self.shards[shard].next_write(at_once, 0) {
            self.media[shard].under_way.push(write);
        }
        let medium = &mut self.media[shard];
        if let Some(last) = medium.under_way.len().checked_sub(1) {
            let write = medium.under_way.swap_remove(self.random.within(0..=last));
            medium.put(write.place, write.offset as usize, &write.bytes);
            self.shards[shard].written(write.id, true, write.bytes);
        }
    }

    fn tell(&mut self) {
        let store = &self.store;
        for write in &mut self.writes {
            write.told |= write.needs.iter().all(|(log, lsn)| lsn <= store.promised(log));
        }
    }

    fn clean(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let slot = &mut self.cleaning[shard];
        if slot.is_none() && (self.cleans_early || self.shards[shard].log().free_places() <= 2) {
            *slot = self.shards[shard].log().next_to_clean().map(|(number, _)| Cleaning::new(number));
        }
        if slot.is_none() {
            *slot = self.shards[shard].due_to_clean().map(|(number, _)| Cleaning::new(number));
        }
        let Some(cleaning) = slot else { return };
        let place = self.shards[shard].log().segments()[&cleaning.number].place;
        let bytes = self.media[shard].places[place as usize].clone();
        match self.shards[shard].clean(cleaning, &bytes, 4096) {
            Ok(true) => {
                *slot = None;
                self.cleaned += 1;
            }
            Ok(false) | Err(CleanError::Append(AppendError::Full)) => {}
            Err(error) => panic!("{error}"),
        }
        self.shards[shard].erase_cleaned();
    }

    /// Begins a backup, goes on with it, or ends it: copies are not looked at here, only what the backup keeps.
    fn back_up(&mut self) {
        match &self.backup {
            None => {
                self.backup = Backup::begin(&self.store);
                self.backups += 1;
            }
            Some(backup) if !backup.is_held() || self.random.one_in(6) => self.backup = None,
            Some(backup) => {
                let shard = self.random.within(0..=SHARDS - 1);
                let numbers: Vec<u64> = self.shards[shard].log().segments().keys().copied().collect();
                if !numbers.is_empty() {
                    backup.copied(shard as u16, self.random.pick(&numbers));
                }
            }
        }
    }

    /// No key and no cell has more records that could bring something back on the media than its entry counts, copies that cleaning made
    /// among them.
    fn count_records(&mut self) {
        let flushed = self.store.flushed();
        /// A key, or a cell of it.
        type Counted = (Vec<u8>, Option<Vec<u8>>);
        let mut records: BTreeMap<Counted, BTreeSet<(u16, Lsn)>> = BTreeMap::new();
        let (mut bases, mut cells) = (BTreeMap::new(), BTreeMap::new());
        self.store.index().scan(b"", |entry| {
            bases.insert(entry.key.to_vec(), (entry.origin, entry.older));
            true
        });
        self.store.cells().scan(b"", |entry| {
            cells.insert(entry.key.to_vec(), (entry.origin, entry.older));
            true
        });
        for (log, medium) in (0..).zip(&self.media) {
            let found = Found::read(log, self.geometry, medium).unwrap();
            let done = found.records(medium, |lsn, record| {
                let part = match record.kind {
                    RecordKind::Drop | RecordKind::Remove | RecordKind::Flush => return,
                    RecordKind::Expire if record.expires_ms.is_none() => return,
                    RecordKind::String => None,
                    RecordKind::Expire => Some(0),
                    RecordKind::Field | RecordKind::Member | RecordKind::Element | RecordKind::Scored => Some(1),
                };
                if record.version < flushed {
                    return;
                }
                let is_buried = bases.get(record.key).is_some_and(|(origin, _)| origin.version > record.version);
                let name = part.filter(|_| !is_buried).map(|part| {
                    let length = (record.key.len() as u16).to_be_bytes();
                    [&length[..], record.key, &[part], record.subkey].concat()
                });
                records.entry((record.key.to_vec(), name)).or_default().insert((log, lsn));
            });
            done.unwrap();
        }
        for ((key, cell), mut places) in records {
            let entry = cell.as_ref().map_or_else(|| bases.get(&key), |name| cells.get(name));
            let (origin, older) = *entry.unwrap_or_else(|| panic!("{}: nobody knows of it", key.escape_ascii()));
            places.remove(&(origin.log, origin.lsn));
            assert!(older as usize >= places.len(), "{} {cell:?}: {older} of {places:?}", key.escape_ascii());
        }
    }

    fn crash(&mut self) {
        self.count_records();
        self.tell();
        self.crashes += 1;
        self.backup = None;
        for (medium, shard) in self.media.iter_mut().zip(&self.shards) {
            medium.lose_power(shard.log().promised(), &mut self.random);
        }
        self.epoch += 1;
        (self.store, self.shards) = open(self.geometry, &mut self.media, &mut self.epoch, Some(&mut self.random));
        self.cleaning = (0..SHARDS).map(|_| None).collect();
        if self.random.one_in(3) {
            self.now_ms = 1000;
        }
        let (mut kept, mut there) = (Vec::new(), 0);
        // Each value was written once, so the half of a renaming would show it twice.
        let mut values = BTreeSet::new();
        for key in (0..KEYS).map(|number| format!("key {number}").into_bytes()) {
            let (shown, _) = self.shards[0].read(&[&key], 0, |view| state(view, &key));
            there += usize::from(shown.is_some());
            if let Some((Shape::String | Shape::Hash | Shape::List, cells, _)) = &shown {
                assert!(cells.values().all(|value| values.insert(value.clone())), "{}: twice", key.escape_ascii());
            }
            let history: Vec<_> = self.writes.iter().filter(|write| write.key == key).collect();
            let told = history.iter().rposition(|write| write.told);
            let may_show = &history[told.unwrap_or(0)..];
            let found = may_show.iter().any(|write| write.state == shown) || told.is_none() && shown.is_none();
            assert!(found, "{}: shows {shown:?}, told of {told:?}", key.escape_ascii());
            kept.push(Write { key, state: shown, needs: Needs::default(), told: true });
        }
        assert_eq!(self.store.keys(), there);
        self.writes = kept;
    }
}

#[test]
fn expired_write_is_absent_to_its_own_update() {
    const NOW_MS: u64 = 1000;
    let block_bytes = NonZeroUsize::new(512).unwrap();
    let geometry = Geometry { store: 9, block_bytes, segment_bytes: 32 * 512 };
    let mut media = [Medium::new(8, geometry.segment_bytes as usize)];
    let (_store, mut shards) = open(geometry, &mut media, &mut 1, None);
    let (key, other): (&[u8], &[u8]) = (b"key", b"other");
    let clock = Clock { now_ms: NOW_MS, received_ns: None };
    // The second one of each finds a set in the index.
    for shape in [Shape::String, Shape::String, Shape::Set, Shape::Set] {
        let done = shards[0].update(&[key, other], clock, |update| {
            if shape == Shape::String {
                update.set(key, b"value", Some(NOW_MS));
            } else {
                update.set_cell(key, shape, b"old", &[]);
                update.expire(key, Some(NOW_MS));
            }
            assert_eq!(state(update.view(), key), None);
            assert_eq!(update.cell(key, b"old"), None);
            assert_eq!(update.copy(key, other, usize::MAX), Ok(false));
            assert_eq!(update.rename(key, other, usize::MAX), Ok(false));
            assert!(update.set_cell(key, Shape::Set, b"new", &[]));
            state(update.view(), key)
        });
        let (seen, _) = done.unwrap();
        assert_eq!(seen, Some((Shape::Set, BTreeMap::from([(b"new".to_vec(), Vec::new())]), None)));
        let (is, _) = shards[0].read(&[key, other], NOW_MS, |view| [key, other].map(|key| state(view, key)));
        assert_eq!(is, [seen, None]);
    }
}

const NOW: Clock = Clock { now_ms: 1000, received_ns: None };

/// A log with room for long values, and its medium.
fn long_log() -> (Geometry, [Medium; 1]) {
    let block_bytes = NonZeroUsize::new(512).unwrap();
    let geometry = Geometry { store: 9, block_bytes, segment_bytes: 4 << 20 };
    (geometry, [Medium::new(8, geometry.segment_bytes as usize)])
}

/// Carries out a command, and brings it to the medium.
fn carry_out(
    shard: &mut Shard,
    medium: &mut Medium,
    keys: &[&'static [u8]],
    command: impl FnOnce(&mut Update<'_, 'static>),
) {
    shard.update(keys, NOW, command).unwrap();
    while let Some(write) = shard.next_write(4, 0) {
        medium.put(write.place, write.offset as usize, &write.bytes);
        shard.written(write.id, true, write.bytes);
    }
    assert_eq!(shard.store().memory().sizes(), shard.store().measure());
}

/// Elements of one key lie in many leaves, and those of its neighbours in the first and the last of them.
#[test]
fn long_values_are_copied_renamed_and_removed_whole() {
    const CELLS: i64 = 2_000;
    const NAMES: [&[u8]; 6] = [b"k0", b"k1", b"k2", b"k3", b"k4", b"k5"];
    let [before, long, between, copied, moved, behind] = NAMES;
    let (geometry, mut media) = long_log();
    let mut epoch = 1;
    let (_, mut shards) = open(geometry, &mut media, &mut epoch, None);
    for shape in [Shape::Hash, Shape::Set, Shape::List, Shape::SortedSet] {
        let cell = |at: i64| match shape {
            Shape::Set => (at.to_string().into_bytes(), Vec::new()),
            Shape::List => (place_key(at).to_vec(), at.to_le_bytes().to_vec()),
            // In another order than their scores, which several members share.
            Shape::SortedSet => (at.to_string().into_bytes(), score_value((at % 500 * 7 % 11) as f64).to_vec()),
            _ => (at.to_string().into_bytes(), at.to_le_bytes().to_vec()),
        };
        let neighbours = [before, between, copied, behind];
        carry_out(&mut shards[0], &mut media[0], &NAMES, |update| {
            for key in neighbours {
                assert!(update.set_cell(key, Shape::Hash, b"field", key));
            }
            for (subkey, value) in (0..CELLS).map(cell) {
                assert!(update.set_cell(long, shape, &subkey, &value));
            }
        });
        let gone: Vec<i64> = if shape == Shape::List { (0..300).collect() } else { (0..CELLS).step_by(7).collect() };
        let changed = || (CELLS / 2..CELLS).step_by(3).map(|at| (cell(at).0, cell(at + i64::from(at % 2 == 0)).1));
        carry_out(&mut shards[0], &mut media[0], &NAMES, |update| {
            gone.iter().for_each(|at| assert!(update.remove_cell(long, &cell(*at).0)));
            for (subkey, value) in changed() {
                update.set_cell(long, shape, &subkey, &value);
            }
        });
        let mut expected: BTreeMap<_, _> = (0..CELLS).map(cell).collect();
        gone.iter().for_each(|at| assert!(expected.remove(&cell(*at).0).is_some()));
        expected.extend(changed());
        let expected = Some((shape, expected, None));
        let field = |key: &[u8]| Some((Shape::Hash, BTreeMap::from([(b"field".to_vec(), key.to_vec())]), None));
        let read = |shard: &mut Shard| NAMES.map(|key| shard.read(&[key], NOW.now_ms, |view| state(view, key)).0);
        let others = [field(before), field(between), field(behind)];
        let [first, second, third] = others.clone();
        assert_eq!(read(&mut shards[0]), [first, expected.clone(), second, field(copied), None, third]);

        carry_out(&mut shards[0], &mut media[0], &NAMES, |update| {
            assert_eq!(update.copy(long, copied, usize::MAX), Ok(true));
        });
        let [first, second, third] = others.clone();
        assert_eq!(read(&mut shards[0]), [first, expected.clone(), second, expected.clone(), None, third]);
        carry_out(&mut shards[0], &mut media[0], &NAMES, |update| {
            assert_eq!(update.rename(copied, moved, usize::MAX), Ok(true));
        });
        let [first, second, third] = others;
        let all = [first, expected.clone(), second, None, expected, third];
        assert_eq!(read(&mut shards[0]), all);
        epoch += 1;
        let store;
        (store, shards) = open(geometry, &mut media, &mut epoch, None);
        assert_eq!(read(&mut shards[0]), all);

        carry_out(&mut shards[0], &mut media[0], &NAMES, |update| {
            for key in NAMES {
                update.remove(key);
            }
        });
        assert_eq!((store.keys(), store.cells().len()), (0, 0));
    }
}

#[test]
fn sweep_of_long_keys_stops_after_its_work() {
    const KEYS: [&[u8]; 6] = [b"0", b"1", b"2", b"3", b"4", b"5"];
    const CELLS: u64 = 1_000;
    // In many leaves behind theirs.
    const OTHERS: usize = 3_000;
    let (geometry, mut media) = long_log();
    let (store, mut shards) = open(geometry, &mut media, &mut 1, None);
    for at in 0..OTHERS {
        let key: &[u8] = format!("other{at:05}").leak().as_bytes();
        carry_out(&mut shards[0], &mut media[0], &[key], |update| update.set(key, &b""[..], None));
    }
    carry_out(&mut shards[0], &mut media[0], &KEYS, |update| {
        for key in KEYS {
            (0..CELLS).for_each(|at| assert!(update.set_cell(key, Shape::Set, &at.to_be_bytes(), &[])));
            update.expire(key, Some(NOW.now_ms + 1));
        }
    });
    let clock = Clock { now_ms: NOW.now_ms + 1, ..NOW };
    // Nearly that of two keys.
    let budget = SweepBudget { leaves_max: 3, keys_max: 100, work_max: 2 * CELLS - 1 };
    for left in [4, 2, 0] {
        assert_eq!(shards[0].sweep(clock, budget, |_, _| {}), Ok(left > 0));
        assert_eq!(store.keys(), OTHERS + left);
    }
}

#[test]
fn what_was_told_of_cells_is_there_after_every_crash() {
    let (mut crashes, mut cleaned, mut swept, mut renamed, mut flushed) = (0, 0, 0, 0, 0);
    let mut backups = 0;
    let seeds = seeds(24);
    let count = (seeds.end - seeds.start) as usize;
    for seed in seeds {
        let mut world = World::new(seed);
        for _ in 0..2000 {
            match world.random.within(0..=999) {
                0..378 => world.write(),
                378..380 => world.flush(),
                380..400 => world.rename(),
                400..420 => world.sweep(),
                420..900 => world.step_of_the_medium(),
                900..950 => world.tell(),
                950..988 => world.clean(),
                988..995 => world.back_up(),
                _ => world.crash(),
            }
        }
        world.crash();
        world.must_flush();
        (crashes, cleaned, swept) = (crashes + world.crashes, cleaned + world.cleaned, swept + world.swept);
        (renamed, flushed) = (renamed + world.renamed, flushed + world.flushed);
        backups += world.backups;
    }
    // `wanted` with a hundred seeds.
    let enough = |seen: usize, wanted: usize| seen * 100 > wanted * count;
    assert!(
        enough(crashes, 600) && enough(cleaned, 200) && enough(swept, 200),
        "{crashes} crashes, {cleaned} cleaned, {swept} swept"
    );
    assert!(enough(renamed, 600) && enough(flushed, 130), "{renamed} renamed, {flushed} flushes");
    assert!(enough(backups, 130), "{backups} backups");
}
