//! Backups of a store that goes on: what is copied piece by piece, whenever, is the store as it was when the backup began.

use std::collections::BTreeMap;
use std::mem;
use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::common::Medium;
use crate::opened::{open, seeds};
use ksf_store::backup::{Backup, CopiedLog, CopyError, Wanted, recover, wanted};
use ksf_store::format::Lsn;
use ksf_store::log::{AppendError, Geometry};
use ksf_store::recover::Places;
use ksf_store::store::{CleanError, Cleaning, Clock, Opening, Shard, Store, UpdateError};
use ksf_test::{Random, TestRandom};

const SHARDS: usize = 3;
const PLACES: usize = 8;
const KEYS: u64 = 16;
const STEPS: usize = 4000;
const CLOCK: Clock = Clock { now_ms: 1000, received_ns: None };

/// Keys and their values.
type Shown = BTreeMap<Vec<u8>, Vec<u8>>;

fn shown(store: &Store) -> Shown {
    let mut shown = Shown::new();
    store.scan(b"", 0, |key, got| {
        shown.insert(key.to_vec(), got.value().to_vec());
        true
    });
    shown
}

/// A log that is being copied.
struct Copied {
    end: Lsn,
    places: Vec<Vec<u8>>,
}

/// What was copied of its places.
struct Kept(Vec<Vec<u8>>);

impl Places for Kept {
    fn places(&self) -> u32 {
        self.0.len() as u32
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()> {
        into.clone_from(&self.0[place as usize]);
        Ok(())
    }
}

/// What a place gives to a copy of its log up to `end`, read at once.
fn copy_of_place(geometry: &Geometry, log: u16, end: Lsn, place: &[u8]) -> Vec<u8> {
    let block = &place[..geometry.block_bytes.get()];
    match wanted(geometry, log, end, block) {
        Wanted::Header => block.to_vec(),
        Wanted::Segment { bytes, .. } => place[..bytes as usize].to_vec(),
    }
}

/// What a store has that is made of these copies.
fn try_store_of(geometry: Geometry, copies: Vec<Copied>) -> Result<Shown, CopyError> {
    let block_bytes = geometry.block_bytes.get();
    let copy = |Copied { end, places }| {
        let headers = places.iter().map(|place: &Vec<u8>| place[..block_bytes].to_vec()).collect();
        CopiedLog { end, headers, content: Kept(places) }
    };
    let mut copies: Vec<_> = copies.into_iter().map(copy).collect();
    let found = recover(geometry, &mut copies)?;
    let opening = Opening::new(100, usize::MAX, NonZeroUsize::MIN);
    let (store, _) = Store::open(found, &copies, opening)?;
    Ok(shown(&store))
}

fn store_of(geometry: Geometry, copies: Vec<Copied>) -> Shown {
    try_store_of(geometry, copies).unwrap()
}

struct World {
    random: TestRandom,
    geometry: Geometry,
    media: Vec<Medium>,
    store: Arc<Store>,
    shards: Vec<Shard>,
    epoch: u32,
    cleaning: Vec<Option<Cleaning>>,
    written: u64,
    cleaned: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::of_test(seed);
        let block_bytes = NonZeroUsize::new(512).unwrap();
        let geometry = Geometry { store: 9, block_bytes, segment_bytes: (random.within(40..=64) * 512) as u64 };
        let mut media: Vec<_> = (0..SHARDS).map(|_| Medium::new(PLACES, geometry.segment_bytes as usize)).collect();
        let (store, shards) = open(geometry, &mut media, &mut 1, None);
        let cleaning = (0..SHARDS).map(|_| None).collect();
        Self { random, geometry, media, store, shards, epoch: 1, cleaning, written: 0, cleaned: 0 }
    }

    /// Ends the store in order, and starts it again.
    fn restart(&mut self) {
        self.drain();
        self.shards.clear();
        self.epoch += 1;
        (self.store, self.shards) = open(self.geometry, &mut self.media, &mut self.epoch, None);
        self.cleaning = (0..SHARDS).map(|_| None).collect();
    }

    /// Gives one key, or two of them, a value, or takes them out; one time in a hundred all keys.
    fn write(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        self.written += 1;
        if self.random.one_in(100) {
            let flushed = self.shards[shard].flush(CLOCK);
            let waits = self.shards[shard].undone().is_some();
            assert!(waits || matches!(flushed, Ok(_) | Err(UpdateError::Append(AppendError::Full))));
            return;
        }
        let first = self.random.below(KEYS);
        let keys = [first, (first + 1 + self.random.below(KEYS - 1)) % KEYS].map(|key| format!("key {key:02}"));
        let keys: Vec<&[u8]> = keys.iter().take(self.random.within(1..=2)).map(|key| key.as_bytes()).collect();
        let mut value = self.written.to_le_bytes().to_vec();
        value.resize(self.random.pick(&[8, 100, 900]), 7);
        let removes = self.random.one_in(5);
        let done = self.shards[shard].update(&keys, CLOCK, |update| {
            for key in &keys {
                if removes {
                    update.remove(key);
                } else {
                    update.set(key, value.clone(), None);
                }
            }
        });
        let waits = self.shards[shard].undone().is_some();
        assert!(waits || matches!(done, Ok(_) | Err(UpdateError::Append(AppendError::Full))));
    }

    fn step_of_the_medium(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        while let Some(write) = self.shards[shard].next_write(3, 0) {
            self.media[shard].under_way.push(write);
        }
        if let Some(last) = self.media[shard].under_way.len().checked_sub(1) {
            let at = self.random.within(0..=last);
            self.arrives(shard, at);
        }
    }

    fn arrives(&mut self, shard: usize, at: usize) {
        let medium = &mut self.media[shard];
        let write = medium.under_way.swap_remove(at);
        medium.put(write.place, write.offset as usize, &write.bytes);
        self.shards[shard].written(write.id, true, write.bytes);
    }

    /// Everything that was written is on the media.
    fn drain(&mut self) {
        let mut is_busy = true;
        while is_busy {
            is_busy = false;
            for shard in 0..SHARDS {
                while let Some(write) = self.shards[shard].next_write(3, 0) {
                    self.media[shard].under_way.push(write);
                }
                while !self.media[shard].under_way.is_empty() {
                    self.arrives(shard, 0);
                    is_busy = true;
                }
            }
        }
    }

    fn clean(&mut self) {
        let shard = self.random.within(0..=SHARDS - 1);
        self.shards[shard].erase_cleaned();
        let slot = &mut self.cleaning[shard];
        if slot.is_none() && self.shards[shard].log().free_places() <= PLACES / 2 {
            *slot = self.shards[shard].next_to_clean().map(|(number, _)| Cleaning::new(number));
        }
        let Some(cleaning) = slot else { return };
        let place = self.shards[shard].log().segments()[&cleaning.number].place;
        let bytes = self.media[shard].places[place as usize].clone();
        match self.shards[shard].clean(cleaning, &bytes, self.random.pick(&[4096, usize::MAX])) {
            Ok(true) => {
                *slot = None;
                self.cleaned += 1;
            }
            Ok(false) | Err(CleanError::Append(AppendError::Full)) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Begins a backup, of which is known what it must show: the media are looked at at once.
    fn begin(&mut self) -> Copying {
        let is_still = self.random.one_in(3);
        if is_still {
            self.drain();
        }
        let backup = Backup::begin(&self.store).unwrap();
        assert!(Backup::begin(&self.store).is_none(), "one at a time");
        let ends = (0..).zip(backup.ends().to_vec());
        let copies = ends.clone().zip(&self.media).map(|((log, end), medium)| {
            let places = medium.places.iter().map(|place| copy_of_place(&self.geometry, log, end, place));
            Copied { end, places: places.collect() }
        });
        let expected = store_of(self.geometry, copies.collect());
        if is_still {
            assert!(expected == shown(&self.store), "something that was told is missing");
        }
        let copies = ends.map(|(_, end)| Copied { end, places: Vec::new() }).collect();
        Copying { backup, expected, copies, step: Step::Header }
    }
}

/// A backup that is being copied, place by place.
struct Copying {
    backup: Backup,
    expected: Shown,
    copies: Vec<Copied>,
    step: Step,
}

/// What comes next at a place, which is that behind those that the copies have.
enum Step {
    Header,
    /// With this header.
    Content(Vec<u8>),
    /// Of this segment, with what was copied.
    HeaderAgain(u64, Vec<u8>),
}

enum Progress {
    GoesOn,
    GivenUp,
    Done,
}

impl Copying {
    fn step(&mut self, geometry: &Geometry, media: &[Medium]) -> Progress {
        let Some(log) = self.copies.iter().position(|copy| copy.places.len() < PLACES) else {
            return if self.backup.is_held() { Progress::Done } else { Progress::GivenUp };
        };
        let (number, copy) = (log as u16, &mut self.copies[log]);
        let place = &media[log].places[copy.places.len()];
        let block = &place[..geometry.block_bytes.get()];
        match mem::replace(&mut self.step, Step::Header) {
            Step::Header => match wanted(geometry, number, copy.end, block) {
                Wanted::Header => copy.places.push(block.to_vec()),
                Wanted::Segment { .. } => self.step = Step::Content(block.to_vec()),
            },
            Step::Content(header) => {
                if let Wanted::Segment { number, bytes } = wanted(geometry, number, copy.end, &header) {
                    let content = [&header[..], &place[header.len()..bytes as usize]].concat();
                    self.step = Step::HeaderAgain(number, content);
                }
            }
            Step::HeaderAgain(segment, content) => {
                let is_same = content.starts_with(block);
                copy.places.push(if is_same { content } else { block.to_vec() });
                if !self.backup.copied(number, segment) {
                    return Progress::GivenUp;
                }
            }
        }
        Progress::GoesOn
    }
}

#[test]
fn what_is_copied_while_the_store_goes_on_is_what_it_was() {
    let (mut done, mut given_up, mut cleaned) = (0, 0, 0);
    for seed in seeds(8) {
        let mut world = World::new(seed);
        let copies_one_in = world.random.pick(&[2, 5, 20, 200]);
        let mut copying: Option<Copying> = None;
        for _ in 0..STEPS {
            match world.random.below(8) {
                0..3 => world.write(),
                3..7 => world.step_of_the_medium(),
                _ => world.clean(),
            }
            match &mut copying {
                None if world.random.one_in(300) => {
                    if world.random.one_in(4) {
                        world.restart();
                    }
                    copying = Some(world.begin());
                }
                Some(one) if world.random.one_in(copies_one_in) => match one.step(&world.geometry, &world.media) {
                    Progress::GoesOn => {}
                    Progress::GivenUp => {
                        assert!(!one.backup.is_held());
                        given_up += 1;
                        copying = None;
                    }
                    Progress::Done => {
                        let Copying { expected, copies, .. } = copying.take().unwrap();
                        assert!(store_of(world.geometry, copies) == expected, "seed {seed}: the copy is another store");
                        done += 1;
                    }
                },
                _ => {}
            }
        }
        cleaned += world.cleaned;
    }
    println!("{done} backups, {given_up} given up, {cleaned} segments cleaned");
    assert!(done > 20 && given_up > 2 && cleaned > 100, "{done} {given_up} {cleaned}");
}

impl World {
    /// Sets a key by the first shard, and has it on the medium. False if the log is full.
    fn set(&mut self, key: &str) -> bool {
        let done = self.shards[0].update(&[key.as_bytes()], CLOCK, |update| {
            update.set(key.as_bytes(), vec![7; 900], None);
        });
        self.drain();
        assert!(matches!(done, Ok(_) | Err(UpdateError::Append(AppendError::Full))));
        done.is_ok()
    }

    /// Cleans the log of the first shard as a server does when room is short.
    fn make_room(&mut self) {
        self.shards[0].erase_cleaned();
        self.drain();
        while self.shards[0].log().free_places() <= 2 {
            let Some((number, segment)) = self.shards[0].next_to_clean() else { break };
            let bytes = self.media[0].places[segment.place as usize].clone();
            assert!(self.shards[0].clean(&mut Cleaning::new(number), &bytes, usize::MAX).unwrap());
            self.drain();
            self.shards[0].erase_cleaned();
            self.drain();
        }
    }
}

impl World {
    /// Overwrites one key by the first shard until its log has this segment.
    fn fill_to(&mut self, segment: u64) {
        while self.shards[0].log().segments().keys().next_back().is_none_or(|last| *last < segment) {
            assert!(self.set("filler"));
        }
    }

    fn remove(&mut self, key: &str) {
        let (removed, _) =
            self.shards[0].update(&[key.as_bytes()], CLOCK, |update| update.remove(key.as_bytes())).unwrap();
        assert!(removed);
        self.drain();
    }

    /// Goes on with cleaning a segment of the first shard, and puts what is written anew on the medium. True when it is done.
    fn clean_on(&mut self, cleaning: &mut Cleaning, budget_bytes: usize) -> bool {
        let place = self.shards[0].log().segments()[&cleaning.number].place;
        let bytes = self.media[0].places[place as usize].clone();
        let is_done = self.shards[0].clean(cleaning, &bytes, budget_bytes).unwrap();
        self.drain();
        is_done
    }

    /// Cleans a segment of the first shard, and erases all that were cleaned and may be erased.
    fn clean_and_erase(&mut self, segment: u64) {
        assert!(self.clean_on(&mut Cleaning::new(segment), usize::MAX));
        self.shards[0].erase_cleaned();
        self.drain();
    }

    fn has_segments(&self, wanted: &[u64]) -> bool {
        self.shards[0].log().segments().keys().eq(wanted)
    }
}

/// A backup keeps the segment from which a record was copied, and not that of the copy. A tombstone that goes with the copy brings the key
/// back at the next start.
#[test]
fn a_key_that_was_deleted_stays_away_when_a_backup_keeps_what_it_was_copied_from() {
    let mut world = World::new(3);
    assert!(world.set("doomed"));
    world.fill_to(1);
    assert!(world.clean_on(&mut Cleaning::new(0), usize::MAX), "the copy is in segment 1");
    let backup = Backup::begin(&world.store).unwrap();
    assert!(backup.copied(0, 1));
    world.fill_to(3);
    world.remove("doomed");
    world.fill_to(4);
    world.clean_and_erase(1);
    world.clean_and_erase(3);
    assert!(world.has_segments(&[0, 2, 4]) && backup.is_held());
    drop(backup);
    world.restart();
    assert!(!shown(&world.store).contains_key(&b"doomed"[..]));
}

/// The same where nothing was copied by the backup, which began while the segment was cleaned.
#[test]
fn a_key_that_was_deleted_stays_away_when_a_backup_begins_while_a_segment_is_cleaned() {
    let mut world = World::new(4);
    assert!(world.set("doomed"));
    world.fill_to(1);
    let mut cleaning = Cleaning::new(0);
    assert!(!world.clean_on(&mut cleaning, 0), "it has begun");
    let backup = Backup::begin(&world.store).unwrap();
    world.fill_to(2);
    assert!(world.clean_on(&mut cleaning, usize::MAX), "the copy is in segment 2, which the backup does not need");
    world.fill_to(3);
    world.remove("doomed");
    world.fill_to(4);
    world.clean_and_erase(2);
    world.clean_and_erase(3);
    assert!(world.has_segments(&[0, 1, 4]) && backup.is_held());
    drop(backup);
    world.restart();
    assert!(!shown(&world.store).contains_key(&b"doomed"[..]));
}

/// A backup that nobody goes on with costs a writer nothing but the room that is there.
#[test]
fn a_backup_that_stands_still_gives_way() {
    let mut world = World::new(1);
    assert!((0..40).all(|_| world.set("key")));
    let backup = Backup::begin(&world.store).unwrap();
    for round in 0..1000 {
        assert!(world.set("key"), "round {round}");
        world.make_room();
    }
    assert!(!backup.is_held(), "it kept all of its segments");
    drop(backup);
    let mut number = 0;
    while world.set(&format!("more {number}")) {
        number += 1;
        world.make_room();
    }
    let backup = Backup::begin(&world.store).unwrap();
    world.make_room();
    assert!(backup.is_held(), "a store that is full of what counts has nothing to clean");
    for number in 0..25 {
        let key = format!("more {number}");
        let done = world.shards[0].update(&[key.as_bytes()], CLOCK, |update| update.remove(key.as_bytes()));
        assert!(done.is_ok(), "{number}: {done:?}");
        world.drain();
    }
    world.make_room();
    assert!(!backup.is_held() && !backup.copied(0, 0), "what it kept brings room");
    assert!(world.shards[0].log().free_places() > 2);
    assert!(Backup::begin(&world.store).is_some(), "one that was given up is none");
}

#[test]
fn a_copy_that_lacks_what_was_promised_is_refused() {
    let mut world = World::new(2);
    for _ in 0..200 {
        world.write();
        world.drain();
    }
    let backup = Backup::begin(&world.store).unwrap();
    let copies = || -> Vec<Copied> {
        let ends = (0..).zip(backup.ends().iter().copied()).zip(&world.media);
        let copy = ends.map(|((log, end), medium)| {
            let places = medium.places.iter().map(|place| copy_of_place(&world.geometry, log, end, place));
            Copied { end, places: places.collect() }
        });
        copy.collect()
    };
    assert!(store_of(world.geometry, copies()) == shown(&world.store));
    for log in 0..SHARDS {
        // The last batch of the log is damaged, then its last segment is gone.
        let end = backup.ends()[log];
        let last_segment = world.geometry.segment_of(Lsn(end.0 - 1));
        let mut damaged = copies();
        let is_last = |place: &Vec<u8>| {
            let found = wanted(&world.geometry, log as u16, end, &place[..512]);
            matches!(found, Wanted::Segment { number, .. } if number == last_segment)
        };
        let at = damaged[log].places.iter().position(is_last).unwrap();
        let last = damaged[log].places[at].len() - 512;
        damaged[log].places[at][last] ^= 1;
        assert!(matches!(try_store_of(world.geometry, damaged), Err(CopyError::Short { .. } | CopyError::Recover(_))));
        let mut lost = copies();
        lost[log].places[at] = vec![0; 512];
        assert!(matches!(try_store_of(world.geometry, lost), Err(CopyError::Short { .. } | CopyError::Recover(_))));
        let mut damaged = copies();
        damaged[log].places[at][20] ^= 1;
        let told = try_store_of(world.geometry, damaged).unwrap_err();
        assert!(
            matches!(told, CopyError::Header { log: of, place } if (usize::from(of), place) == (log, at)),
            "{told}"
        );
    }
}
