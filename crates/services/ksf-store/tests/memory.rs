//! What is let go of, and what keeps a segment while a value of it is read.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::common::Medium;
use crate::opened::{fetch, open_within};
use ksf_store::index::leaf::LetGo;
use ksf_store::log::Geometry;
use ksf_store::store::{Cleaning, Clock, Shard, Store, Undone, UpdateError};

const BLOCK_BYTES: usize = 512;
const VALUE_BYTES: usize = 600;
const ALL: LetGo = LetGo { leaves: usize::MAX, looks: usize::MAX, bytes: usize::MAX };

/// A store of one log.
struct Stage {
    media: Vec<Medium>,
    store: Arc<Store>,
    shard: Shard,
}

impl Stage {
    fn new(memory_bytes_max: usize) -> Self {
        let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
        let geometry = Geometry { store: 3, block_bytes, segment_bytes: 32 * BLOCK_BYTES as u64 };
        let mut media = vec![Medium::new(12, geometry.segment_bytes as usize)];
        let (store, mut shards) = open_within(geometry, &mut media, &mut 1, None, memory_bytes_max);
        Self { media, store, shard: shards.remove(0) }
    }

    fn try_set(&mut self, key: usize, bytes: usize) -> Result<(), UpdateError> {
        let (key, value) = (name(key), value(key, bytes));
        let set = self.shard.update(&[&key], Clock::default(), |update| update.set(&key, &value, None));
        set.map(|_| ())
    }

    fn set(&mut self, key: usize) {
        self.try_set(key, VALUE_BYTES).unwrap();
    }

    /// Sets keys of one length until values are to be let go of, and returns how many.
    fn fill(&mut self) -> usize {
        let bytes_max = self.store.memory().bytes_max();
        let mut keys = 0;
        while self.store.memory().sizes().used <= bytes_max - bytes_max / 16 {
            self.set(keys);
            keys += 1;
        }
        keys
    }

    fn drain(&mut self) {
        while let Some(write) = self.shard.next_write(8, 0) {
            self.media[0].put(write.place, write.offset as usize, &write.bytes);
            self.shard.written(write.id, true, write.bytes);
        }
    }

    /// The value of a key, if it is in memory; else what is to be read.
    fn get(&mut self, key: usize) -> Result<Option<Vec<u8>>, Undone> {
        let key = name(key);
        let (value, _) = self.shard.read(&[&key], 0, |view| view.get(&key).map(|got| got.value().to_vec()));
        self.shard.set_values(None);
        self.shard.undone().map_or(Ok(value), Err)
    }

    /// How many of the first keys are in memory. To look at a value is to use it; to look where it is is not.
    fn in_memory(&self) -> Vec<bool> {
        let mut found = Vec::new();
        self.store.scan(b"", 0, |_, got| {
            found.push(self.store.locate(&got).is_none());
            true
        });
        found
    }

    fn assert_counted(&self) {
        assert_eq!(self.store.memory().sizes(), self.store.measure());
    }

    /// Writes anew what counts of a segment, and erases it if that may be.
    fn clean(&mut self, number: u64) {
        let place = self.shard.log().segments()[&number].place;
        let bytes = self.media[0].places[place as usize].clone();
        assert_eq!(self.shard.clean(&mut Cleaning::new(number), &bytes, usize::MAX), Ok(true));
        self.drain();
        self.shard.erase_cleaned();
        self.drain();
    }

    fn has_segment(&self, number: u64) -> bool {
        self.shard.log().segments().contains_key(&number)
    }
}

fn name(key: usize) -> Vec<u8> {
    format!("key {key:03}").into_bytes()
}

fn value(key: usize, bytes: usize) -> Vec<u8> {
    vec![key as u8; bytes]
}

fn wanted(undone: Undone) -> Vec<ksf_store::away::Wanted> {
    match undone {
        Undone::Away(wanted) => wanted,
        Undone::Short => panic!("it only reads"),
    }
}

#[test]
fn only_what_is_on_the_medium_and_was_not_used_is_let_go_of() {
    let bytes_max = 20 * VALUE_BYTES;
    let mut stage = Stage::new(bytes_max);
    (0..6).for_each(|key| stage.set(key));
    stage.drain();
    stage.assert_counted();
    stage.store.let_go(ALL);
    assert_eq!(stage.in_memory(), [true; 6], "there is room");
    let mut stage = Stage::new(bytes_max);
    let keys = stage.fill();
    stage.store.let_go(ALL);
    assert_eq!(stage.in_memory(), vec![true; keys], "nothing is on the medium");
    stage.drain();
    assert_eq!(stage.get(0).unwrap(), Some(value(0, VALUE_BYTES)));
    stage.store.let_go(LetGo { bytes: 1, ..ALL });
    let now = stage.in_memory();
    assert!(now[0] && !now[1] && now[2], "the first one was used, the second one goes, and that is enough: {now:?}");
    stage.assert_counted();
    // Short ones stay, however much more comes; others go when the hand is there.
    for (key, bytes) in [(100, 256), (101, 257)] {
        stage.store.let_go(ALL);
        stage.try_set(key, bytes).unwrap();
    }
    for key in 102..111 {
        stage.drain();
        stage.store.let_go(ALL);
        assert!(stage.store.memory().sizes().used <= bytes_max - bytes_max / 16);
        stage.try_set(key, 10 * VALUE_BYTES).unwrap();
    }
    let now = stage.in_memory();
    assert!(now[keys] && !now[keys + 1], "{now:?}");
    let sizes = stage.store.memory().sizes();
    assert_eq!(sizes.away, now.iter().filter(|is_here| !**is_here).count());
    stage.assert_counted();
}

#[test]
fn a_value_is_the_same_when_it_comes_back_and_is_taken_in_if_it_still_counts() {
    let mut stage = Stage::new(10 * VALUE_BYTES);
    stage.fill();
    stage.drain();
    stage.store.let_go(ALL);
    let before = stage.in_memory();
    assert!(!before[0] && before[1], "{before:?}");
    let first = wanted(stage.get(0).unwrap_err());
    let values = fetch(&stage.media, &first).unwrap();
    stage.shard.set_values(Some(Arc::new(values)));
    assert_eq!(stage.get(0).unwrap(), Some(value(0, VALUE_BYTES)));
    assert_eq!(stage.in_memory(), before, "the command had it for itself");
    let version = first[0].version();
    let here: Arc<[u8]> = value(0, VALUE_BYTES).into();
    assert!(!stage.store.take_in(&name(0), version + 1_000, &here), "another one");
    assert!(stage.store.take_in(&name(0), version, &here));
    assert!(!stage.store.take_in(&name(0), version, &here), "it is there");
    assert_eq!(stage.get(0).unwrap(), Some(value(0, VALUE_BYTES)));
    stage.assert_counted();
}

/// A reader of a value keeps its segment, also when cleaning has written the record anew.
#[test]
fn a_segment_is_not_erased_while_a_value_of_it_is_read() {
    let mut stage = Stage::new(8 * VALUE_BYTES);
    let mut keys = 0;
    while stage.shard.log().segments().len() < 3 {
        while let Err(error) = stage.try_set(keys, VALUE_BYTES) {
            assert_eq!(error, UpdateError::Undone);
            assert!(matches!(stage.shard.undone(), Some(Undone::Short)));
            stage.drain();
            stage.store.let_go(ALL);
        }
        keys += 1;
    }
    stage.drain();
    stage.store.let_go(ALL);
    let reading = wanted(stage.get(0).unwrap_err());
    stage.clean(0);
    assert!(stage.has_segment(0), "it is being read");
    let other = wanted(stage.get(0).unwrap_err());
    assert_ne!(other[0].read_at(), reading[0].read_at(), "it was written anew");
    for wanted in [&reading, &other] {
        let values = fetch(&stage.media, wanted).unwrap();
        stage.shard.set_values(Some(Arc::new(values)));
        assert_eq!(stage.get(0).unwrap(), Some(value(0, VALUE_BYTES)));
    }
    drop(reading);
    stage.shard.erase_cleaned();
    stage.drain();
    assert!(!stage.has_segment(0));
    stage.assert_counted();
}

/// A value whose record was copied a moment ago is on no medium where it says that it is.
#[test]
fn a_value_that_was_just_moved_is_waited_for() {
    let mut stage = Stage::new(8 * VALUE_BYTES);
    let mut keys = 0;
    while stage.shard.log().segments().len() < 3 {
        stage.drain();
        stage.store.let_go(ALL);
        keys += usize::from(stage.try_set(keys, VALUE_BYTES).is_ok());
        stage.shard.undone();
    }
    stage.drain();
    stage.store.let_go(ALL);
    let place = stage.shard.log().segments()[&0].place;
    let bytes = stage.media[0].places[place as usize].clone();
    assert_eq!(stage.shard.clean(&mut Cleaning::new(0), &bytes, usize::MAX), Ok(true));
    let moved = wanted(stage.get(0).unwrap_err());
    assert!(moved[0].read_at().is_err() && fetch(&stage.media, &moved).is_none());
    stage.drain();
    let moved = wanted(stage.get(0).unwrap_err());
    let values = fetch(&stage.media, &moved).unwrap();
    stage.shard.set_values(Some(Arc::new(values)));
    assert_eq!(stage.get(0).unwrap(), Some(value(0, VALUE_BYTES)));
}

#[test]
fn keys_without_room_are_refused_until_a_flush() {
    let mut stage = Stage::new(6_000);
    let mut keys = 0;
    let error = loop {
        match stage.try_set(keys, 8) {
            Ok(()) => keys += 1,
            Err(error) => break error,
        }
        stage.drain();
    };
    assert_eq!(error, UpdateError::Memory { bytes_max: 6_000 });
    assert!(stage.shard.undone().is_none(), "it is not tried again");
    assert_eq!((stage.store.keys(), stage.get(0).unwrap()), (keys, Some(value(0, 8))));
    let last = name(keys - 1);
    stage.shard.update(&[&last], Clock::default(), |update| assert!(update.remove(&last))).unwrap();
    stage.shard.flush(Clock::default()).unwrap();
    stage.assert_counted();
    assert_eq!(stage.try_set(0, 8), Err(UpdateError::Undone), "the memory comes back in steps");
    assert!(matches!(stage.shard.undone(), Some(Undone::Short)));
    let budget = ksf_store::store::SweepBudget { leaves_max: 1, keys_max: 1, work_max: 1 };
    while stage.shard.sweep(Clock::default(), budget, |_, _| {}).unwrap() {
        stage.assert_counted();
    }
    stage.try_set(0, 8).unwrap();
    stage.assert_counted();
}
