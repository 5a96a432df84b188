//! A store of several shards on media that lose power: what replies told of is there, whole, after every start.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::common::Medium;
use crate::opened::{fetch, open_within, seeds};
use ksf_store::away::Wanted;
use ksf_store::backup::Backup;
use ksf_store::format::{Lsn, RecordKind};
use ksf_store::index::leaf::LetGo;
use ksf_store::log::{AppendError, Geometry};
use ksf_store::recover::Found;
use ksf_store::store::{CleanError, Cleaning, Clock, Needs, Shard, Store, SweepBudget, Undone, UpdateError};
use ksf_test::{Random, TestRandom};

const SHARDS: usize = 3;

/// A write that was carried out, and whose reply may have left.
struct Write {
    /// Each of these has this value, or is gone.
    keys: Vec<Vec<u8>>,
    value: Option<Vec<u8>>,
    needs: Needs,
    told: bool,
}

/// What a run does more often than others.
struct Habits {
    keys: u64,
    /// One write in so many takes keys away.
    removes_one_in: usize,
    /// One write in so many has read another key before.
    reads_one_in: usize,
    /// Whether segments are cleaned that nobody needs the room of.
    cleans_early: bool,
    /// Medium steps between two choices of the shard whose medium stands still meanwhile.
    stalls_for: usize,
    crashes_per_mille: usize,
    /// Above it values are on the media alone.
    memory_bytes_max: usize,
}

/// A look at a key, whose value is being read.
struct Look {
    shard: usize,
    key: Vec<u8>,
    wanted: Vec<Wanted>,
}

struct World {
    random: TestRandom,
    habits: Habits,
    /// The shard whose medium takes nothing for now, and for how many more steps.
    stalled: (Option<usize>, usize),
    geometry: Geometry,
    media: Vec<Medium>,
    store: Arc<Store>,
    shards: Vec<Shard>,
    epoch: u32,
    /// The clock by which keys end. It may be set back while the store does not run.
    now_ms: u64,
    /// In the order in which they were carried out.
    writes: Vec<Write>,
    /// Of each key, the writes that it may show at the next start.
    history: BTreeMap<Vec<u8>, Vec<usize>>,
    cleaning: Vec<Option<Cleaning>>,
    /// Keeps segments from being erased, so that they are not erased in the order in which they were cleaned.
    backup: Option<Backup>,
    backups: usize,
    crashes: usize,
    cleaned: usize,
    full: usize,
    swept: usize,
    flushed: usize,
    looks: Vec<Look>,
    /// Values that were read from a medium.
    fetched: usize,
    /// Writes that waited for memory, and those for which there is none.
    short: usize,
    refused: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::of_test(seed);
        let block_bytes = NonZeroUsize::new(random.pick(&[512, 4096])).unwrap();
        let geometry =
            Geometry { store: 9, block_bytes, segment_bytes: (random.within(40..=64) * block_bytes.get()) as u64 };
        let places = random.within(4..=7);
        let mut media: Vec<_> = (0..SHARDS).map(|_| Medium::new(places, geometry.segment_bytes as usize)).collect();
        let memory_bytes_max = random.pick(&[usize::MAX, 2_000, 3_000, 5_000]);
        let (store, shards) = open_within(geometry, &mut media, &mut 1, None, memory_bytes_max);
        let habits = Habits {
            memory_bytes_max,
            keys: random.pick(&[4, 12, 40]),
            removes_one_in: random.pick(&[2, 5]),
            reads_one_in: random.pick(&[2, 8]),
            cleans_early: random.one_in(2),
            stalls_for: random.pick(&[0, 100, 400]),
            crashes_per_mille: random.pick(&[1, 5, 20]),
        };
        let stalled = (None, 0);
        let cleaning = (0..SHARDS).map(|_| None).collect();
        let (writes, history, crashes, cleaned, full) = (Vec::new(), BTreeMap::new(), 0, 0, 0);
        Self {
            random,
            habits,
            stalled,
            geometry,
            media,
            store,
            shards,
            epoch: 1,
            now_ms: 1000,
            writes,
            history,
            cleaning,
            backup: None,
            backups: 0,
            crashes,
            cleaned,
            full,
            swept: 0,
            flushed: 0,
            looks: Vec::new(),
            fetched: 0,
            short: 0,
            refused: 0,
        }
    }

    /// What a key has, whether it has ended or not.
    fn live(&self, key: &[u8]) -> Option<&Vec<u8>> {
        self.writes[*self.history.get(key)?.last()?].value.as_ref()
    }

    /// What became of a command that was not carried out.
    fn note_undone(&mut self, shard: usize, key: &[u8]) {
        match self.shards[shard].undone() {
            Some(Undone::Away(wanted)) => {
                if self.looks.len() == 8 {
                    self.looks.swap_remove(0);
                }
                self.looks.push(Look { shard, key: key.to_vec(), wanted });
            }
            Some(Undone::Short) => {
                self.short += 1;
                self.full += usize::from(self.shards[shard].waits_for_room().is_some());
            }
            None => panic!("it says that it is to be tried again"),
        }
    }

    /// Looks at a key on any shard. A value that is on a medium alone is read later, whatever happens meanwhile.
    fn look(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let key = format!("key {:02}", self.random.below(self.habits.keys)).into_bytes();
        self.see(shard, &key);
    }

    fn see(&mut self, shard: usize, key: &[u8]) {
        let (seen, _) = self.shards[shard]
            .read(&[key], 0, |view| view.get(key).map(|got| (got.value_bytes(), got.value().to_vec())));
        self.shards[shard].set_values(None);
        let live = self.live(key);
        assert_eq!(seen.as_ref().map(|(bytes, _)| *bytes), live.map(Vec::len), "{}", key.escape_ascii());
        if self.shards[shard].is_undone() {
            self.note_undone(shard, key);
        } else {
            assert_eq!(seen.as_ref().map(|(_, value)| value), live, "{}", key.escape_ascii());
        }
    }

    /// A value was read: the same look again, with it.
    fn look_again(&mut self) {
        let Some(last) = self.looks.len().checked_sub(1) else { return };
        let Look { shard, key, wanted } = self.looks.swap_remove(self.random.within(0..=last));
        let Some(values) = fetch(&self.media, &wanted) else { return };
        self.fetched += 1;
        if self.random.one_in(2) {
            let Medium { places, .. } = &self.media[usize::from(wanted[0].read_at().unwrap().log)];
            let at = wanted[0].read_at().unwrap();
            let record = wanted[0].record(&places[at.place as usize][at.offset as usize..]).unwrap();
            let max = self.habits.memory_bytes_max;
            let taken = self.store.take_in(record.key, record.version, &record.value.into());
            assert!(
                !taken || self.store.memory().sizes().used <= max.saturating_add(1_000),
                "what is taken in has room"
            );
        }
        self.shards[shard].set_values(Some(Arc::new(values)));
        self.see(shard, &key);
    }

    /// What is counted is what there is, and no more than may be.
    fn measure(&self) {
        let sizes = self.store.memory().sizes();
        assert_eq!(sizes, self.store.measure());
        assert!(sizes.values <= sizes.used);
    }

    fn write(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let gives_up = self.random.one_in(2);
        self.shards[shard].set_giving_up(gives_up);
        let count = self.random.pick(&[1, 1, 1, 2, 4]);
        let number = self.writes.len() as u64;
        let mut keys = BTreeSet::new();
        while keys.len() < count {
            keys.insert(format!("key {:02}", self.random.below(self.habits.keys)).into_bytes());
        }
        let keys: Vec<Vec<u8>> = keys.into_iter().collect();
        let value = (!self.random.one_in(self.habits.removes_one_in)).then(|| {
            let mut value = number.to_le_bytes().to_vec();
            value.resize(self.random.pick(&[8, 20, 300, 1000]), number as u8);
            value
        });
        let names: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        let seen = format!("key {:02}", self.random.below(self.habits.keys)).into_bytes();
        let seen = self.random.one_in(self.habits.reads_one_in).then_some(&seen[..]);
        let locked: Vec<&[u8]> = names.iter().copied().chain(seen).collect();
        self.now_ms += self.random.below(3);
        let clock = Clock { now_ms: self.now_ms, received_ns: None };
        let end = self.random.one_in(3).then(|| self.now_ms + self.random.below(100));
        let done = self.shards[shard].update(&locked, clock, |update| {
            seen.map(|seen| update.get(seen).is_some());
            for key in &names {
                match &value {
                    Some(value) => update.set(key, value, end),
                    None => {
                        update.remove(key);
                    }
                }
            }
        });
        match done {
            Ok(((), needs)) => {
                for key in &keys {
                    self.history.entry(key.clone()).or_default().push(self.writes.len());
                }
                self.writes.push(Write { keys, value, needs, told: false });
            }
            Err(UpdateError::Append(AppendError::Full)) => self.full += 1,
            Err(UpdateError::Undone) => self.note_undone(shard, &keys[0]),
            Err(UpdateError::Memory { .. }) => {
                self.refused += 1;
                let sizes = self.store.memory().sizes();
                assert!(value.is_some() && sizes.used - sizes.values > self.habits.memory_bytes_max, "{sizes:?}");
            }
            Err(error) => panic!("{error}"),
        }
        let slack = 4 * 1_100 + 4_000;
        assert!(self.store.memory().sizes().used <= self.habits.memory_bytes_max.saturating_add(slack));
    }

    /// Puts a number in front of what a key has, which must be seen for that.
    fn change(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let key = format!("key {:02}", self.random.below(self.habits.keys)).into_bytes();
        let Some(live) = self.live(&key).cloned() else { return };
        let number = (self.writes.len() as u64).to_le_bytes();
        let clock = Clock { now_ms: 0, received_ns: None };
        let done = self.shards[shard].update(&[&key], clock, |update| {
            let got = update.get(&key).expect("it is there");
            let (mut value, end) = (got.value().to_vec(), got.expires_ms);
            drop(value.splice(..value.len().min(8), number));
            update.set(&key, value.clone(), end);
            value
        });
        match done {
            Ok((value, needs)) => {
                assert_eq!(value, [&number, &live[8..]].concat(), "{}", key.escape_ascii());
                self.history.entry(key.clone()).or_default().push(self.writes.len());
                self.writes.push(Write { keys: vec![key], value: Some(value), needs, told: false });
            }
            Err(UpdateError::Append(AppendError::Full)) => self.full += 1,
            Err(UpdateError::Undone) => self.note_undone(shard, &key),
            Err(UpdateError::Memory { .. }) => self.refused += 1,
            Err(error) => panic!("{error}"),
        }
    }

    fn let_go(&mut self) {
        let bytes = self.random.pick(&[1, 2_000, usize::MAX]);
        self.store.let_go(LetGo { leaves: 4, looks: self.random.within(1..=50), bytes });
        self.measure();
    }

    /// Takes every key out, which is a write to all of them.
    fn flush(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        self.flush_by(shard);
    }

    fn flush_by(&mut self, shard: usize) {
        let clock = Clock { now_ms: self.now_ms, received_ns: None };
        match self.shards[shard].flush(clock) {
            Ok(needs) => {
                let keys: Vec<Vec<u8>> = self.history.keys().cloned().collect();
                self.history.values_mut().for_each(|history| history.push(self.writes.len()));
                self.writes.push(Write { keys, value: None, needs, told: false });
                self.flushed += 1;
                self.store.scan(b"", 0, |_, _| panic!("a key is left"));
                assert_eq!((self.store.keys(), self.store.index().len()), (0, 0));
            }
            Err(UpdateError::Append(AppendError::Full)) => self.full += 1,
            Err(UpdateError::Undone) => self.note_undone(shard, b""),
            Err(error) => panic!("{error}"),
        }
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

    /// Takes ended keys out: to each that is a write like any other.
    fn sweep(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let clock = Clock { now_ms: self.now_ms, received_ns: None };
        let budget = SweepBudget { leaves_max: 2, keys_max: self.random.within(1..=5), work_max: u64::MAX };
        let Self { shards, writes, history, .. } = self;
        let before = writes.len();
        let done = shards[shard].sweep(clock, budget, |key, needs| {
            history.entry(key.to_vec()).or_default().push(writes.len());
            writes.push(Write { keys: vec![key.to_vec()], value: None, needs, told: false });
        });
        let removed = self.writes.len() - before;
        self.swept += removed;
        assert!(removed <= budget.keys_max);
        match done {
            // All of the index was looked at: nothing is left that has ended.
            Ok(false) => {
                let mut keys = 0;
                self.store.scan(b"", self.now_ms, |_, _| {
                    keys += 1;
                    true
                });
                assert_eq!(keys, self.store.keys());
            }
            Ok(true) => {}
            Err(UpdateError::Append(AppendError::Full)) => self.full += 1,
            Err(error) => panic!("{error}"),
        }
    }

    fn step_of_the_medium(&mut self) {
        if self.stalled.1 == 0 {
            let shard = self.random.within(0..=SHARDS - 1);
            self.stalled = (Some(shard).filter(|_| self.habits.stalls_for > 0), self.habits.stalls_for);
        }
        self.stalled.1 = self.stalled.1.saturating_sub(1);
        let shard = self.random.within(0..=SHARDS - 1);
        if self.stalled.0 == Some(shard) {
            return;
        }
        let at_once = self.random.within(1..=4);
        while let Some(write) = self.shards[shard].next_write(at_once, 0) {
            self.media[shard].under_way.push(write);
        }
        let medium = &mut self.media[shard];
        if let Some(last) = medium.under_way.len().checked_sub(1) {
            let write = medium.under_way.swap_remove(self.random.within(0..=last));
            medium.put(write.place, write.offset as usize, &write.bytes);
            let moved = self.shards[shard].written(write.id, true, write.bytes);
            assert!(moved.iter().all(|(log, lsn)| self.store.promised(*log) >= *lsn));
        }
    }

    /// Replies leave: what they told of must be there from now on.
    fn tell(&mut self) {
        let store = &self.store;
        for write in &mut self.writes {
            write.told |= write.needs.iter().all(|(log, lsn)| lsn <= store.promised(log));
        }
    }

    fn clean(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        let slot = &mut self.cleaning[shard];
        if slot.is_none() && (self.habits.cleans_early || self.shards[shard].log().free_places() <= 2) {
            *slot = self.shards[shard].log().next_to_clean().map(|(number, _)| Cleaning::new(number));
        }
        if slot.is_none() {
            *slot = self.shards[shard].due_to_clean().map(|(number, _)| Cleaning::new(number));
        }
        let Some(cleaning) = slot else { return };
        let place = self.shards[shard].log().segments()[&cleaning.number].place;
        let bytes = self.media[shard].places[place as usize].clone();
        let budget_bytes = self.random.pick(&[4096, usize::MAX]);
        match self.shards[shard].clean(cleaning, &bytes, budget_bytes) {
            Ok(true) => {
                *slot = None;
                self.cleaned += 1;
            }
            Ok(false) => {}
            Err(CleanError::Append(AppendError::Full)) => self.full += 1,
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

    /// No key has more records with values on the media than its entry knows of, copies that cleaning made among them: what is known
    /// last of a key that is gone goes when the count ends.
    fn count_values(&mut self) {
        let mut values: BTreeMap<Vec<u8>, BTreeSet<(u16, Lsn)>> = BTreeMap::new();
        for (log, medium) in self.media.iter().enumerate() {
            let found = Found::read(log as u16, self.geometry, medium).unwrap();
            let done = found.records(medium, |lsn, record| {
                if record.kind == RecordKind::String && record.version >= self.store.flushed() {
                    values.entry(record.key.to_vec()).or_default().insert((log as u16, lsn));
                }
            });
            done.unwrap();
        }
        self.store.index().scan(b"", |entry| {
            let mut records = values.remove(entry.key).unwrap_or_default();
            records.remove(&(entry.origin.log, entry.origin.lsn));
            let count = records.len();
            assert!(entry.older as usize >= count, "{}: {count} values, {entry:?}", entry.key.escape_ascii());
            true
        });
        assert!(values.is_empty(), "nobody knows of these values: {values:?}");
    }

    fn crash(&mut self) {
        self.count_values();
        self.tell();
        self.crashes += 1;
        for (medium, shard) in self.media.iter_mut().zip(&self.shards) {
            medium.lose_power(shard.log().promised(), &mut self.random);
        }
        self.epoch += 1;
        self.looks.clear();
        self.backup = None;
        let (random, max) = (Some(&mut *self.random), self.habits.memory_bytes_max);
        (self.store, self.shards) = open_within(self.geometry, &mut self.media, &mut self.epoch, random, max);
        self.measure();
        self.cleaning = (0..SHARDS).map(|_| None).collect();
        if self.random.one_in(3) {
            self.now_ms = 1000;
        }
        self.compare();
    }

    /// Each key shows the last write that was told of, or a later one; a write on several keys is seen on all of those
    /// that no later write hides, or on none.
    fn compare(&mut self) {
        let mut shown: BTreeMap<Vec<u8>, Option<Vec<u8>>> = BTreeMap::new();
        self.store.scan(b"", 0, |key, got| {
            let value = match self.store.locate(&got) {
                Some(wanted) => {
                    let at = wanted.read_at().unwrap();
                    let place = &self.media[usize::from(at.log)].places[at.place as usize];
                    wanted.record(&place[at.offset as usize..][..at.bytes]).unwrap().value.to_vec()
                }
                None => got.value().to_vec(),
            };
            shown.insert(key.to_vec(), Some(value));
            true
        });
        assert_eq!(shown.len(), self.store.keys());
        let number_of = |value: &Option<Vec<u8>>| {
            value.as_ref().map(|value| u64::from_le_bytes(value[..8].try_into().unwrap()) as usize)
        };
        let mut kept = BTreeSet::new();
        for (key, history) in &mut self.history {
            let value = shown.get(key).cloned().flatten();
            let told = history.iter().rposition(|write| self.writes[*write].told);
            // Those before the last one that was told of are hidden for good.
            history.drain(..told.unwrap_or(0));
            let shows = match number_of(&value) {
                Some(number) => history.iter().find(|write| **write == number && self.writes[**write].value == value),
                None => history.iter().rev().find(|write| self.writes[**write].value.is_none()),
            };
            let shows = shows.copied();
            let lost = shows.is_none() && (told.is_some() || value.is_some());
            assert!(!lost, "{}: shows {:?} and may show {history:?}", key.escape_ascii(), number_of(&value));
            // It is on the media now, and what is not will never be.
            history.clear();
            history.extend(shows);
            kept.extend(shows.map(|write| (key.clone(), write)));
        }
        for (_, write) in &kept {
            self.writes[*write].told = true;
        }
        // Whole or not at all. Of a key that is gone nobody can tell which write took it.
        for (_, write) in kept.iter().filter(|(_, write)| self.writes[*write].value.is_some()) {
            for key in &self.writes[*write].keys {
                let at_least = kept.range((key.clone(), *write)..).next().is_some_and(|(other, _)| other == key);
                assert!(at_least, "write {write} is seen in part: {} is missing", key.escape_ascii());
            }
        }
    }
}

#[test]
fn what_was_told_is_there_after_every_crash() {
    let (mut crashes, mut cleaned, mut full, mut swept, mut flushed) = (0, 0, 0, 0, 0);
    let (mut fetched, mut short, mut refused, mut backups) = (0, 0, 0, 0);
    let seeds = seeds(32);
    let count = (seeds.end - seeds.start) as usize;
    for seed in seeds {
        let mut world = World::new(seed);
        for _ in 0..2600 {
            match world.random.within(0..=999) {
                0..200 => world.write(),
                200..220 => world.change(),
                220..250 => world.look(),
                250..275 => world.look_again(),
                275..298 => world.let_go(),
                298..300 => world.flush(),
                300..330 => world.sweep(),
                330..800 => world.step_of_the_medium(),
                800..850 => world.tell(),
                850..972 => world.clean(),
                972..980 => world.back_up(),
                at if at < 980 + world.habits.crashes_per_mille => world.crash(),
                _ => world.step_of_the_medium(),
            }
        }
        world.crash();
        world.must_flush();
        (crashes, cleaned, full) = (crashes + world.crashes, cleaned + world.cleaned, full + world.full);
        swept += world.swept;
        flushed += world.flushed;
        backups += world.backups;
        (fetched, short, refused) = (fetched + world.fetched, short + world.short, refused + world.refused);
    }
    // `wanted` with a hundred seeds.
    let enough = |seen: usize, wanted: usize| seen * 100 > wanted * count;
    assert!(
        enough(fetched, 150) && enough(short, 150) && enough(refused, 50),
        "{fetched} read, {short} waited, {refused} refused"
    );
    assert!(enough(flushed, 150) && enough(backups, 150), "{flushed} flushes, {backups} backups");
    assert!(
        enough(crashes, 500) && enough(cleaned, 500) && enough(full, 50),
        "{crashes} crashes, {cleaned} cleaned, {full} full"
    );
    assert!(enough(swept, 500), "{swept} keys were swept");
}
