//! Cleaning comes to an end: what it writes anew is bounded by what was written, whatever lengths the values have.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::common::Medium;
use crate::opened::{open, open_within, seeds};
use ksf_store::cells::{Shape, place_key, score_value};
use ksf_store::format::{HEADER_BYTES, Record};
use ksf_store::log::{AppendError, CLEANED_AT_ONCE_BYTES, COPIED_PER_FREED_MAX, Geometry, Purpose, Segment};
use ksf_store::store::{CleanError, Cleaning, Clock, Shard, Store, SweepBudget, Undone, UpdateError};
use ksf_store::update::Update;
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
            Err(UpdateError::Undone) => assert!(matches!(self.shard.undone(), Some(Undone::Short))),
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
            if !world.set(key, VALUE_BYTES) {
                // As a server does with a command that waits for room.
                world.clean();
                assert!(world.set(key, VALUE_BYTES), "{:?}", world.shard.log().segments());
            }
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

const SMALL_SEGMENT_BYTES: usize = 64 * BLOCK_BYTES;

/// A store of some logs that are served as a server does it: what must wait waits while all logs are cleaned.
struct Served {
    random: TestRandom,
    geometry: Geometry,
    memory_bytes_max: usize,
    media: Vec<Medium>,
    store: Arc<Store>,
    shards: Vec<Shard>,
    cleaning: Vec<Option<Cleaning>>,
    epoch: u32,
    /// Bytes that the media took.
    put: usize,
}

impl Served {
    fn new(logs: usize, places: usize, memory_bytes_max: usize) -> Self {
        Self::of(logs, (places, SMALL_SEGMENT_BYTES), memory_bytes_max)
    }

    fn of(logs: usize, (places, segment_bytes): (usize, usize), memory_bytes_max: usize) -> Self {
        let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
        let geometry = Geometry { store: 5, block_bytes, segment_bytes: segment_bytes as u64 };
        let mut media: Vec<_> = (0..logs).map(|_| Medium::new(places, segment_bytes)).collect();
        let (store, shards) = open_within(geometry, &mut media, &mut 1, None, memory_bytes_max);
        let (random, cleaning) = (Random::of_test(7), (0..logs).map(|_| None).collect());
        Self { random, geometry, memory_bytes_max, media, store, shards, cleaning, epoch: 1, put: 0 }
    }

    /// The process is killed: what was not written by then is lost.
    fn kill(&mut self) {
        self.epoch += 1;
        let Self { geometry, media, epoch, memory_bytes_max, .. } = self;
        (self.store, self.shards) = open_within(*geometry, media, epoch, None, *memory_bytes_max);
        self.cleaning.fill_with(|| None);
    }

    fn drain(&mut self) {
        for (shard, medium) in self.shards.iter_mut().zip(&mut self.media) {
            while let Some(write) = shard.next_write(4, 0) {
                medium.put(write.place, write.offset as usize, &write.bytes);
                self.put += write.bytes.len();
                shard.written(write.id, true, write.bytes);
            }
        }
    }

    /// A turn of each shard.
    fn turn(&mut self) {
        self.drain();
        for (at, shard) in self.shards.iter_mut().enumerate() {
            shard.erase_cleaned();
            let slot = &mut self.cleaning[at];
            if slot.is_none() {
                *slot = shard.due_to_clean().map(|(number, _)| Cleaning::new(number));
            }
            let Some(cleaning) = slot else { continue };
            let place = shard.log().segments()[&cleaning.number].place;
            match shard.clean(cleaning, &self.media[at].places[place as usize], usize::MAX) {
                Ok(true) => *slot = None,
                Ok(false) | Err(CleanError::Append(AppendError::Full)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        self.drain();
    }

    /// Carries a command on a key out by a shard, when it need not wait any more. False if there is no room or memory for it.
    fn carry_out(&mut self, shard: usize, key: &[u8], command: impl for<'k> Fn(&mut Update<'_, 'k>, &'k [u8])) -> bool {
        for _ in 0..2_000 {
            match self.shards[shard].update(&[key], Clock::default(), |update| command(update, key)) {
                Ok(_) => {
                    if self.random.one_in(8) {
                        self.turn();
                    }
                    return true;
                }
                Err(UpdateError::Undone) => assert!(matches!(self.shards[shard].undone(), Some(Undone::Short))),
                Err(UpdateError::Memory { .. }) => return false,
                Err(UpdateError::Append(AppendError::Full)) => {
                    if !self.shards[shard].log().can_be_cleaned() {
                        return false;
                    }
                }
                Err(error) => panic!("{error}"),
            }
            self.turn();
        }
        panic!("it waits for ever: {:?}", self.shards[shard].log().segments());
    }

    fn set(&mut self, shard: usize, key: u64, bytes: usize) -> bool {
        let value = vec![7; bytes];
        self.carry_out(shard, format!("key {key}").as_bytes(), |update, key| update.set(key, value.clone(), None))
    }

    fn remove(&mut self, shard: usize, key: u64) {
        let key = format!("key {key}").into_bytes();
        assert!(self.carry_out(shard, &key, |update, key| {
            update.remove(key);
        }));
        let (is_there, _) = self.shards[shard].read(&[&key], 0, |view| view.get(&key).is_some());
        assert!(!is_there);
    }

    /// Sets keys from one on until there is no room, and returns the one behind them.
    fn fill(&mut self, shard: usize, from: u64, bytes: usize) -> u64 {
        (from..).find(|key| !self.set(shard, *key, bytes)).unwrap()
    }

    /// The same, where batches are full: what small ones leave unused would be room, too.
    fn fill_at_once(&mut self, from: u64, bytes: usize) -> u64 {
        let value = vec![7; bytes];
        let at_once = |served: &mut Self, key: u64| {
            let name = format!("key {key}").into_bytes();
            let set = served.shards[0].update(&[&name], Clock::default(), |update| update.set(&name, &value[..], None));
            served.shards[0].undone();
            set.is_ok()
        };
        (from..).find(|key| !at_once(self, *key) && !self.set(0, *key, bytes)).unwrap()
    }

    fn shuffled(&mut self, range: std::ops::Range<u64>) -> Vec<u64> {
        let mut all: Vec<u64> = range.collect();
        for at in (1..all.len()).rev() {
            all.swap(at, self.random.within(0..=at));
        }
        all
    }

    fn flush(&mut self, shard: usize) {
        for _ in 0..100 {
            match self.shards[shard].flush(Clock::default()) {
                Ok(_) => return assert_eq!(self.store.keys(), 0),
                Err(UpdateError::Undone) => assert!(matches!(self.shards[shard].undone(), Some(Undone::Short))),
                Err(error) => panic!("{error}"),
            }
            self.turn();
        }
        panic!("it waits for ever");
    }
}

/// Small values, of which the records are hardly longer than those that take them out, go in any order: also one by one, each on the medium
/// before the next, and also when the process is killed meanwhile.
#[test]
fn a_full_log_takes_every_removal() {
    for places in [8, 40] {
        let mut served = Served::new(1, places, usize::MAX);
        let keys = served.fill(0, 0, 64);
        let mut left = keys;
        for key in served.shuffled(0..keys) {
            served.remove(0, key);
            left -= 1;
            if served.random.one_in(8) {
                served.drain();
            }
            if served.random.one_in(800) {
                served.drain();
                served.kill();
                assert_eq!(served.store.keys() as u64, left);
            }
        }
        assert_eq!(served.store.keys(), 0);
        let again = served.fill(0, 0, 64);
        assert!(again > keys / 10 * 9, "{again} of {keys} keys");
    }
}

/// Records that are as long as those that take them out, in an order that spreads the removals: when the reserve is used up no segment is
/// worth its cleaning, and each has something that is out of date.
#[test]
fn a_full_log_takes_removals_that_leave_little_in_each_segment() {
    let mut served = Served::of(1, (32, SEGMENT_BYTES), usize::MAX);
    let keys = served.fill(0, 0, 0);
    for key in served.shuffled(0..keys) {
        served.remove(0, key);
    }
    assert_eq!(served.store.keys(), 0);
    assert!(served.fill(0, 0, 0) > keys / 10 * 9);
}

/// Keys in an order in which each is as far as can be from those before it.
fn spread(keys: u64) -> impl Iterator<Item = u64> {
    let bits = u64::BITS - keys.leading_zeros();
    (0..1_u64 << bits).map(move |at| at.reverse_bits() >> (u64::BITS - bits)).filter(move |key| *key < keys)
}

/// The more segments there are, the more removals it takes until each of them has enough out of date: the reserve grows with the log. All
/// come faster than the medium takes them, so batches are full: what small ones leave unused would be room, too.
#[test]
fn a_full_log_of_many_segments_takes_removals_spread_evenly() {
    let mut served = Served::of(1, (128, SMALL_SEGMENT_BYTES / 2 * 3), usize::MAX);
    let at_once = |served: &mut Served, key: u64, removes: bool| {
        let name = format!("key {key}").into_bytes();
        let done = served.shards[0].update(&[&name], Clock::default(), |update| {
            if removes {
                update.remove(&name);
            } else {
                update.set(&name, b"", None);
            }
        });
        done.is_ok()
    };
    let keys = (0..).find(|key| !at_once(&mut served, *key, false)).unwrap();
    let keys = served.fill(0, keys, 0);
    for key in spread(keys).take(keys as usize / 8) {
        if !at_once(&mut served, key, true) {
            served.remove(0, key);
        }
    }
}

const LONG_SEGMENT_BYTES: usize = 4 * SEGMENT_BYTES;
const NEW_VALUE_BYTES: usize = 1_000;

/// Bytes of a segment that cleaning it may lose to new values: batches of its copy and the one behind, and the longest record.
fn lost_by_copy(geometry: &Geometry, longest_bytes: u64) -> u64 {
    let batches = geometry.segment_bytes / CLEANED_AT_ONCE_BYTES as u64 + 4;
    batches * (geometry.block_bytes.get() + 2 * HEADER_BYTES) as u64 + longest_bytes
}

/// A full log of which one of `part` keys was deleted, spread evenly.
fn with_deleted(places: usize, part: u64) -> (Served, u64, u64) {
    let mut served = Served::of(1, (places, LONG_SEGMENT_BYTES), usize::MAX);
    let keys = served.fill_at_once(0, NEW_VALUE_BYTES);
    let deleted = keys / part;
    spread(keys).take(deleted as usize).for_each(|key| served.remove(0, key));
    (served, keys, deleted)
}

/// Deletes that are spread evenly leave little in each segment. Its space comes back for new values nevertheless: where a segment has enough
/// for the cleaner to free a byte by each [`COPIED_PER_FREED_MAX`] that it copies, all but what the copy may lose.
#[test]
fn a_full_log_gives_new_values_the_room_of_what_was_deleted() {
    for (places, part) in [4, 16, 64].into_iter().flat_map(|places| [8, 16, 20].map(|part| (places, part))) {
        let (mut served, keys, deleted) = with_deleted(places, part);
        let log = served.shards[0].log();
        let gives = |segment: &Segment| {
            let lost = lost_by_copy(log.geometry(), segment.longest_bytes);
            let freed = segment.dead_bytes().saturating_sub(lost);
            if segment.live_bytes <= COPIED_PER_FREED_MAX * freed { freed } else { 0 }
        };
        let record_bytes = |value_bytes| Record::bytes_of("key 0000".len(), value_bytes, false) as u64;
        let tombstones = deleted * record_bytes(0);
        let least =
            log.segments().values().map(gives).sum::<u64>().saturating_sub(tombstones) / record_bytes(NEW_VALUE_BYTES);
        assert!(least > deleted / 2, "{places} places, one of {part}: {least} of {deleted} are promised");
        let again = served.fill_at_once(keys, NEW_VALUE_BYTES) - keys;
        assert!(again >= least, "{places} places, one of {part}: {again} of {deleted}, and {least} are promised");
    }
}

/// Where little is out of date in each segment, new values are refused: their room would cost more copies than it is worth.
#[test]
fn a_full_log_copies_no_more_for_new_values_than_is_stated() {
    for part in [8, 16, 24, 32, 48, 64, 128] {
        let (mut served, keys, deleted) = with_deleted(64, part);
        let put_before = served.put;
        let again = served.fill_at_once(keys, NEW_VALUE_BYTES) - keys;
        let (put, most) =
            ((served.put - put_before) as u64, (COPIED_PER_FREED_MAX + 1) * again * NEW_VALUE_BYTES as u64);
        // The last copies may leave room that is too short for a value.
        let most = most + 2 * LONG_SEGMENT_BYTES as u64;
        assert!(put <= most, "one of {part}: {put} bytes for {again} values of {deleted}, {most} are stated");
    }
}

/// What takes the place of the same again and again leaves nothing out of date but in the last segment. Its cleaning waited for ever until
/// the next one had a record.
#[test]
fn a_full_log_takes_what_keeps_one_key_for_ever() {
    let mut served = Served::new(1, 16, usize::MAX);
    // Other segments have nothing that pays, or what counts of one would go on from last to last.
    served.fill(0, 0, 1_000);
    for number in 0..4 * SMALL_SEGMENT_BYTES / 64 {
        let is_kept = served.carry_out(0, b"key 0", |update, key| {
            update.takes_room_for(Purpose::Keeping);
            update.set(key, vec![8; 64], None);
        });
        assert!(is_kept, "{number}: {:?}", served.shards[0].log().segments());
        if number % 64 == 0 {
            served.drain();
            served.kill();
        }
    }
}

/// Removals have used up all that they may, and no cleaning is hoped for: one record still takes all keys away.
#[test]
fn a_flush_has_a_place_that_removals_leave() {
    let mut served = Served::new(1, 8, usize::MAX);
    let keys = served.fill(0, 0, 64);
    served.shards[0].set_giving_up(true);
    let remove = |shard: &mut Shard, key: u64| {
        let key = format!("key {key}").into_bytes();
        shard.update(&[&key], Clock::default(), |update| update.remove(&key)).map(|_| ())
    };
    let refused = (0..keys).find_map(|key| remove(&mut served.shards[0], key).err());
    assert_eq!(refused, Some(UpdateError::Append(AppendError::Full)));
    served.shards[0].flush(Clock::default()).unwrap();
    assert_eq!(served.store.keys(), 0);
    served.shards[0].set_giving_up(false);
    assert!(served.fill(0, 0, 64) > keys / 10 * 9);
}

/// A command on another shard writes the removals into its own log, where nothing is out of date.
#[test]
fn a_full_log_takes_every_removal_of_keys_in_other_logs() {
    let mut served = Served::new(2, 12, usize::MAX);
    let of_first = served.fill(0, 0, 64);
    let keys = served.fill(1, of_first, 64);
    for key in served.shuffled(0..of_first) {
        served.remove(1, key);
    }
    assert_eq!(served.store.keys() as u64, keys - of_first);
    (of_first..keys).for_each(|key| served.remove(1, key));
    for shard in 0..2 {
        assert!(served.fill(shard, keys * (1 + shard as u64), 64) > keys / 3);
    }
}

/// Elements go until none is left, of each shape.
#[test]
fn a_full_log_takes_every_removal_of_elements() {
    for shape in [Shape::Set, Shape::Hash, Shape::List, Shape::SortedSet] {
        let mut served = Served::new(1, 12, usize::MAX);
        let value = |element: u64| match shape {
            Shape::Set => Vec::new(),
            Shape::SortedSet => score_value(element as f64).to_vec(),
            Shape::Hash | Shape::List | Shape::String => vec![7; 20],
        };
        let fill = |served: &mut Served| {
            let set = |served: &mut Served, element: u64| {
                let (subkey, value) = (place_key(element as i64), value(element));
                served.carry_out(0, b"all", |update, key| {
                    update.set_cell(key, shape, &subkey, &value);
                })
            };
            (0..).find(|element| !set(served, *element)).unwrap()
        };
        let elements = fill(&mut served);
        let order = if shape == Shape::List { (0..elements).collect() } else { served.shuffled(0..elements) };
        for element in order {
            assert!(
                served.carry_out(0, b"all", |update, key| {
                    update.remove_cell(key, &place_key(element as i64));
                }),
                "{shape:?}: {element} of {elements}"
            );
        }
        assert_eq!(served.store.keys(), 0);
        let again = fill(&mut served);
        assert!(again > elements / 10 * 9, "{shape:?}: {again} of {elements}");
    }
}

/// Whenever the process is killed, all keys can be taken out at once, and the log has its room back.
#[test]
fn a_full_log_takes_a_flush_after_a_kill() {
    let mut served = Served::new(2, 8, usize::MAX);
    for round in 0..20 {
        let keys = served.fill(0, 0, 64);
        assert!(keys > 1_000, "round {round}: {keys} keys");
        for key in served.shuffled(0..keys).into_iter().take(50 * round) {
            served.remove(0, key);
        }
        (0..served.random.within(0..=3)).for_each(|_| served.kill());
        served.flush(round % 2);
    }
}

/// Keys that end fill a log. The sweep removes each of them, though no command comes, and their space comes back.
#[test]
fn a_full_log_of_keys_that_have_ended_is_swept_and_filled_again() {
    const ENDED: Clock = Clock { now_ms: 2, received_ns: None };
    const BUDGET: SweepBudget = SweepBudget { leaves_max: 16, keys_max: 64, work_max: u64::MAX };
    for (places, bytes) in [8, 40].into_iter().flat_map(|places| [0, 64, 1_000].map(|bytes| (places, bytes))) {
        let mut served = Served::new(1, places, usize::MAX);
        let value = vec![7; bytes];
        let set = |served: &mut Served, key: u64, expires_ms| {
            let key = format!("key {key}").into_bytes();
            served.carry_out(0, &key, |update, key| update.set(key, value.clone(), Some(expires_ms)))
        };
        let keys = (0..).find(|key| !set(&mut served, *key, 1)).unwrap();
        assert_eq!(served.store.keys() as u64, keys, "none has ended by then");
        let is_swept = |served: &mut Served| {
            match served.shards[0].sweep(ENDED, BUDGET, |_, _| {}) {
                Ok(_) | Err(UpdateError::Append(AppendError::Full)) => {}
                Err(error) => panic!("{error}"),
            }
            served.turn();
            served.store.keys() == 0
        };
        let left =
            |served: &Served| format!("{} of {keys}: {:?}", served.store.keys(), served.shards[0].log().segments());
        let done = (0..10 * keys).any(|_| is_swept(&mut served));
        assert!(done, "{places} places, values of {bytes} bytes: {}", left(&served));
        let again = (0..).find(|key| !set(&mut served, *key, 1_000)).unwrap();
        assert!(again > keys / 10 * 8, "{places} places, values of {bytes} bytes: {again} of {keys} keys");
    }
}

/// What is in memory of keys that are gone goes, too: when nothing is left as much can be written as before.
#[test]
fn keys_that_are_gone_give_their_memory_back() {
    let mut served = Served::new(1, 40, 200_000);
    for part in [1, 3] {
        let keys = served.fill(0, 0, 64);
        assert!(keys > 300);
        let gone: Vec<u64> = served.shuffled(0..keys).into_iter().take((keys / part) as usize).collect();
        gone.iter().for_each(|key| served.remove(0, *key));
        // Leaves that are no longer full have some slack.
        let some = gone.len() / 3;
        for key in gone.into_iter().take(some) {
            assert!(served.set(0, key, 64), "of {keys} keys one in {part} was gone");
        }
        served.flush(0);
        while served.shards[0]
            .sweep(Clock::default(), SweepBudget { leaves_max: 100, keys_max: 1, work_max: 1 }, |_, _| {})
            .unwrap()
        {}
    }
}

#[test]
fn a_short_queue_never_runs_out_of_memory() {
    let mut served = Served::new(1, 12, 60_000);
    let value = [7; 20];
    for number in 0..20_000 {
        let subkey = place_key(number);
        assert!(
            served.carry_out(0, b"queue", |update, key| {
                update.set_cell(key, Shape::List, &subkey, &value);
            }),
            "{number}: {:?}",
            served.store.memory().sizes()
        );
        if number >= 50 {
            assert!(served.carry_out(0, b"queue", |update, key| {
                update.remove_cell(key, &place_key(number - 50));
            }));
        }
    }
}
