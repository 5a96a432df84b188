//! Cleaning comes to an end: what it writes anew is bounded by what was written, whatever lengths the values have.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::common::Medium;
use crate::opened::{open, seeds};
use ksf_store::log::{AppendError, Geometry};
use ksf_store::store::{Cleaning, Clock, Shard, Store, UpdateError};
use ksf_test::{Random, TestRandom};

const BLOCK_BYTES: usize = 512;
const SEGMENT_BYTES: usize = 256 * BLOCK_BYTES;
const PLACES: usize = 24;

/// A store of one log, whose medium is as fast as it is asked.
struct World {
    random: TestRandom,
    geometry: Geometry,
    media: Vec<Medium>,
    store: Arc<Store>,
    shard: Shard,
    epoch: u32,
    /// Bytes of values that commands wrote.
    written: usize,
    /// Bytes that counted in the segments that were cleaned.
    cleaned: usize,
    /// Bytes that the medium took.
    put: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        Self::of(PLACES, seed)
    }

    fn of(places: usize, seed: u64) -> Self {
        let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
        let geometry = Geometry { store: 5, block_bytes, segment_bytes: SEGMENT_BYTES as u64 };
        let mut media = vec![Medium::new(places, SEGMENT_BYTES)];
        let (store, mut shards) = open(geometry, &mut media, &mut 1, None);
        let (shard, random) = (shards.remove(0), Random::of_test(seed));
        Self { random, geometry, media, store, shard, epoch: 1, written: 0, cleaned: 0, put: 0 }
    }

    /// Starts the store anew: what a log knows of its segments it knows again.
    fn restart(&mut self) {
        let (store, mut shards) = open(self.geometry, &mut self.media, &mut self.epoch, None);
        (self.store, self.shard) = (store, shards.remove(0));
        self.epoch += 1;
    }

    fn drain(&mut self) {
        while let Some(write) = self.shard.next_write(4, 0) {
            self.media[0].put(write.place, write.offset as usize, &write.bytes);
            self.put += write.bytes.len();
            self.shard.written(write.id, true, write.bytes);
        }
    }

    /// Cleans as long as a server would.
    fn clean(&mut self) {
        for segments in 0.. {
            self.drain();
            self.shard.erase_cleaned();
            self.drain();
            let Some((number, segment)) = self.shard.due_to_clean() else { return };
            let log = self.shard.log();
            assert!(segments < 4 * PLACES, "it cleans for ever: {:?}", log.segments());
            self.cleaned += segment.live_bytes as usize;
            let bytes = self.media[0].places[segment.place as usize].clone();
            let mut cleaning = Cleaning::new(number);
            assert_eq!(self.shard.clean(&mut cleaning, &bytes, usize::MAX), Ok(true));
        }
    }

    fn set(&mut self, key: u64, bytes: usize) -> bool {
        let (key, value) = (format!("key {key}").into_bytes(), vec![7; bytes]);
        let set = self.shard.update(&[&key], Clock::default(), |update| update.set(&key, &value, None));
        match set {
            Ok(_) => self.written += bytes,
            Err(UpdateError::Append(AppendError::Full)) => {}
            Err(error) => panic!("{error}"),
        }
        set.is_ok()
    }

    fn remove(&mut self, key: u64) {
        let key = format!("key {key}").into_bytes();
        self.shard.update(&[&key], Clock::default(), |update| update.remove(&key)).unwrap();
    }
}

/// Two records fill three quarters of a segment, and a third one has no room: no cleaning makes that denser.
#[test]
fn segments_that_cannot_be_packed_denser_are_left_alone() {
    let mut world = World::new(0);
    let mut keys = 0;
    while world.set(keys, SEGMENT_BYTES / 8 * 3) {
        keys += 1;
        world.clean();
    }
    assert_eq!(world.cleaned, 0, "nothing was out of date");
    assert!(!world.shard.log().can_be_cleaned(), "a command would wait for ever");
    world.restart();
    assert!(!world.shard.log().can_be_cleaned(), "nor after a start");
    // Every second one is gone: now there is something to gain.
    (0..keys).filter(|key| key % 2 == 0).for_each(|key| world.remove(key));
    world.drain();
    assert!(world.shard.log().can_be_cleaned());
    world.clean();
    assert!(world.set(keys, SEGMENT_BYTES / 8 * 3), "and so there is room");
}

/// Values of all lengths, overwritten at random, in a store that is up to two thirds full.
#[test]
fn what_is_cleaned_is_bounded_by_what_is_written() {
    for seed in seeds(10) {
        let mut world = World::new(seed);
        let lengths = [100, 3_000, SEGMENT_BYTES / 16 * 3, SEGMENT_BYTES / 8 * 3, SEGMENT_BYTES / 16 * 9];
        let some = world.random.within(1..=lengths.len());
        let lengths: Vec<usize> = (0..some).map(|_| world.random.pick(&lengths)).collect();
        let mean = lengths.iter().sum::<usize>() / some;
        let keys = (PLACES * SEGMENT_BYTES / mean * world.random.within(1..=6) / 10).clamp(2, 2_000) as u64;
        let mut writes = 0;
        while writes < 3_000 && world.written < 40 * PLACES * SEGMENT_BYTES {
            writes += 1;
            let (key, bytes) = (world.random.below(keys), world.random.pick(&lengths));
            if !world.set(key, bytes) {
                world.clean();
                assert!(!world.shard.log().can_be_cleaned() || world.set(key, bytes), "a command would wait for ever");
                // Long values leave room that they cannot use.
                world.remove(key);
            }
            if world.random.one_in(3) {
                world.clean();
            }
            if world.random.one_in(200) {
                world.drain();
                world.restart();
            }
        }
        let World { written, cleaned, .. } = world;
        assert!(cleaned <= 8 * written, "{cleaned} bytes were cleaned for {written} that were written");
    }
}

/// A log of as many segments as is common, full to seven tenths with records that are overwritten at random.
#[test]
fn a_log_that_is_full_to_seven_tenths_writes_three_bytes_for_one_at_most() {
    const PLACES: usize = 64;
    const VALUE_BYTES: usize = 1_000;
    for seed in seeds(1) {
        let mut world = World::of(PLACES, seed);
        let full = |world: &World| {
            let live: u64 = world.shard.log().segments().values().map(|segment| segment.live_bytes).sum();
            live >= (PLACES * SEGMENT_BYTES / 10 * 7) as u64
        };
        let set = |world: &mut World, key| {
            assert!(world.set(key, VALUE_BYTES), "{:?}", world.shard.log().segments());
            // What comes while a write is under way becomes one.
            if world.random.one_in(16) {
                world.clean();
            }
        };
        let mut keys = 0;
        while !full(&world) {
            set(&mut world, keys);
            keys += 1;
        }
        (0..3 * keys).for_each(|_| {
            let key = world.random.below(keys);
            set(&mut world, key);
        });
        let (put, written) = (world.put, world.written);
        for _ in 0..3 * keys {
            let key = world.random.below(keys);
            set(&mut world, key);
        }
        let (put, written) = (world.put - put, world.written - written);
        let times = put as f64 / written as f64;
        assert!(times <= 3.0, "seed {seed}: {put} bytes for {written}, {times} times");
    }
}

/// The writer of commands looks at it, so that it does not take memory for what a slow medium has not taken.
#[test]
fn what_is_not_on_the_medium_is_counted() {
    const VALUE_BYTES: usize = 10_000;
    let mut world = World::new(0);
    world.drain();
    assert_eq!(world.shard.log().unwritten_bytes(), 0);
    let (mut under_way, mut bytes) = (Vec::new(), 0);
    for key in 0..6 {
        assert!(world.set(key, VALUE_BYTES));
        let before = bytes;
        bytes = world.shard.log().unwritten_bytes();
        assert!((VALUE_BYTES..VALUE_BYTES + 4 * BLOCK_BYTES).contains(&(bytes - before)), "{bytes} after {before}");
        under_way.extend(world.shard.next_write(4, 0));
    }
    assert_eq!(under_way.len(), 4);
    // The last ones first: what is done needs no memory, also if it is not durable.
    while let Some(write) = under_way.pop() {
        let before = world.shard.log().unwritten_bytes();
        let bytes = write.bytes.len();
        world.shard.written(write.id, true, write.bytes);
        assert_eq!(world.shard.log().unwritten_bytes(), before - bytes);
    }
    assert!((2 * VALUE_BYTES..3 * VALUE_BYTES).contains(&world.shard.log().unwritten_bytes()));
    world.drain();
    assert_eq!(world.shard.log().unwritten_bytes(), 0);
}
