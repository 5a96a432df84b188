//! Logs with many records of every kind: any number of threads makes the same store of them, and so does a look at all records of
//! each key.

use std::num::NonZeroUsize;

use crate::common::Medium;
use crate::opened::{dump, open_all, read_all};
use ksf_store::cells::{place_key, score_value};
use ksf_store::format::{Lsn, Record, RecordKind};
use ksf_store::index::leaf::Value;
use ksf_store::log::{Geometry, Log, News};
use ksf_store::recover::{Found, Places, RecoverError, cut_by_links};
use ksf_store::store::{Opening, Store};
use ksf_test::{Random, TestRandom};

const BLOCK_BYTES: usize = 512;
const LOGS: u16 = 3;
const PLACES: u32 = 40;

fn geometry() -> Geometry {
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
    Geometry { store: 5, block_bytes, segment_bytes: 128 * BLOCK_BYTES as u64 }
}

/// Logs that are written without a store: nothing of them is ever cleaned.
struct Writer {
    media: Vec<Medium>,
    logs: Vec<Log>,
    version: u64,
}

impl Writer {
    fn new() -> Self {
        let medium = || Medium::new(PLACES as usize, geometry().segment_bytes as usize);
        let logs = (0..LOGS).map(|log| Log::create(geometry(), log, PLACES)).collect();
        Self { media: (0..LOGS).map(|_| medium()).collect(), logs, version: 0 }
    }

    fn write(&mut self, log: usize, record: &Record<'_>) {
        self.logs[log].append(std::slice::from_ref(record), [], |_, _| {}).unwrap();
        while let Some(write) = self.logs[log].next_write(8, 0) {
            self.media[log].put(write.place, write.offset as usize, &write.bytes);
            let mut end = Lsn::default();
            self.logs[log].written(write.id, true, write.bytes, |news| {
                if let News::Durable { end: durable, .. } = news {
                    end = durable;
                }
            });
            self.logs[log].promise(end);
        }
    }

    /// A record of a version that is above all others, or, now and then, of one of before.
    fn any_version(&mut self, random: &mut TestRandom) -> u64 {
        self.version += 1;
        if random.one_in(4) { random.below(self.version) + 1 } else { self.version }
    }
}

/// Keys of all lengths, of which many begin with the same bytes, and the empty one.
fn key(random: &mut TestRandom, keys: u64) -> Vec<u8> {
    let number = random.below(keys);
    match number % 4 {
        0 => number.to_be_bytes().to_vec(),
        1 => format!("user:profile:{number:010}").into_bytes(),
        2 => vec![b'a'; (number % 60) as usize],
        _ => format!("{number}").into_bytes(),
    }
}

fn strings(seed: u64, records: usize, keys: u64, flushes: bool) -> Writer {
    let mut random = Random::of_test(seed);
    let mut writer = Writer::new();
    for _ in 0..records {
        let log = random.within(0..=usize::from(LOGS) - 1);
        let key = key(&mut random, keys);
        let version = writer.any_version(&mut random);
        let bytes = random.pick(&[0, 8, 8, 8, 256, 257, 700]);
        let value = vec![version as u8; bytes];
        let expires_ms = random.one_in(5).then(|| random.below(1 << 40));
        let record = if flushes && random.one_in(records / 3) {
            let (kind, key, value) = (RecordKind::Flush, &[][..], &[][..]);
            Record { kind, version, expires_ms: None, received_ns: None, key, subkey: &[], value }
        } else if random.one_in(5) {
            let (kind, value) = (RecordKind::Drop, &[][..]);
            Record { kind, version, expires_ms: None, received_ns: None, key: &key, subkey: &[], value }
        } else {
            let kind = RecordKind::String;
            Record { kind, version, expires_ms, received_ns: None, key: &key, subkey: &[], value: &value }
        };
        writer.write(log, &record);
    }
    writer
}

/// Epochs say in which steps a store is made: an odd one of all at once, an even one of one segment after the other.
fn open_in_both_ways(media: &[Medium], memory_bytes_max: usize) {
    for epoch in [1, 2] {
        let mut found = read_all(geometry(), media).unwrap();
        cut_by_links(&mut found).unwrap();
        open_all(found, media, epoch, memory_bytes_max);
    }
}

#[test]
fn strings_are_found_whatever_reads_them() {
    for (seed, keys) in (0..).zip([1, 30, 3_000, 1 << 40]) {
        for flushes in [false, true] {
            let writer = strings(seed, 6_000, keys, flushes);
            for memory_bytes_max in [0, 200_000, usize::MAX] {
                open_in_both_ways(&writer.media, memory_bytes_max);
            }
        }
    }
}

/// Cells of a key are of the shape that its number says.
#[test]
fn cells_are_found_whatever_reads_them() {
    for (seed, keys) in (10..).zip([1, 20, 2_000]) {
        let mut random = Random::of_test(seed);
        let mut writer = Writer::new();
        for _ in 0..5_000 {
            let log = random.within(0..=usize::from(LOGS) - 1);
            let number = random.below(keys);
            let key = format!("key {number}").into_bytes();
            let version = writer.any_version(&mut random);
            let place = random.below(50);
            let (subkey, score) = (place_key(place as i64), score_value(random.below(9) as f64));
            let value = vec![version as u8; random.pick(&[0, 8, 300])];
            let mut record = Record {
                kind: RecordKind::Remove,
                version,
                expires_ms: None,
                received_ns: None,
                key: &key,
                subkey: &subkey,
                value: &[],
            };
            match (random.below(20), number % 4) {
                (0..4, _) => {}
                (4, _) => (record.kind, record.subkey) = (RecordKind::Drop, &[]),
                (5, _) => (record.kind, record.subkey, record.value) = (RecordKind::String, &[], &value),
                (6, _) => {
                    (record.kind, record.subkey) = (RecordKind::Expire, &[]);
                    record.expires_ms = random.one_in(2).then_some(version);
                }
                (7, _) if random.one_in(600) => {
                    (record.kind, record.key, record.subkey) = (RecordKind::Flush, &[], &[]);
                }
                (_, 0) => (record.kind, record.value) = (RecordKind::Field, &value),
                (_, 1) => record.kind = RecordKind::Member,
                (_, 2) => (record.kind, record.value) = (RecordKind::Element, &value),
                (_, _) => (record.kind, record.value) = (RecordKind::Scored, &score),
            }
            writer.write(log, &record);
        }
        open_in_both_ways(&writer.media, usize::MAX);
    }
}

/// Long values take no more memory than there is, and those for which there is room are there.
#[test]
fn values_without_room_stay_on_the_medium() {
    let writer = strings(20, 4_000, 2_000, false);
    let mut all = read_all(geometry(), &writer.media).unwrap();
    cut_by_links(&mut all).unwrap();
    let open = |memory_bytes_max| open_all(all.clone(), &writer.media, 1, memory_bytes_max).0;
    let whole = open(usize::MAX).memory().sizes();
    assert!(whole.away == 0 && whole.values > 100_000, "{whole:?}");
    let keys_alone = open(0).memory().sizes();
    assert_eq!((keys_alone.values, keys_alone.away_bytes > 100_000), (0, true));
    let bytes_max = keys_alone.used + 1_500_000;
    let some = open(bytes_max).memory().sizes();
    assert!(some.values > 0 && some.used <= bytes_max, "{some:?} of {bytes_max}");
}

/// A medium of which a place cannot be read, but for its header.
struct Broken<'m> {
    medium: &'m Medium,
    unreadable: Option<u32>,
}

impl Places for Broken<'_> {
    fn places(&self) -> u32 {
        self.medium.places()
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()> {
        if self.unreadable == Some(place) {
            return Err(std::io::Error::other("it is broken"));
        }
        self.medium.read(place, into)
    }

    fn read_front(&self, place: u32, bytes: usize, into: &mut Vec<u8>) -> std::io::Result<()> {
        self.medium.read_front(place, bytes, into)
    }
}

#[test]
fn the_first_thing_that_is_wrong_is_told_on_any_number_of_threads() {
    let mut writer = strings(30, 3_000, 1_000, false);
    let threads = [NonZeroUsize::MIN, NonZeroUsize::new(4).unwrap()];
    let broken = |from: u16| -> Vec<Broken<'_>> {
        let media = (0..).zip(&writer.media);
        let unreadable = |log: u16| (log >= from).then_some(3 + u32::from(log));
        media.map(|(log, medium)| Broken { medium, unreadable: unreadable(log) }).collect()
    };
    for (threads, first) in threads.into_iter().flat_map(|threads| [(threads, 0), (threads, 1), (threads, 2)]) {
        let error = Found::read_all(geometry(), &broken(first), threads).unwrap_err();
        let RecoverError::Unreadable { log, place, .. } = error else { panic!("{error}") };
        assert_eq!((log, place), (first, 3 + u32::from(first)));
    }
    // What changes between the two times that it is read is found, in the first log and the first place where it did.
    let found = read_all(geometry(), &writer.media).unwrap();
    for (log, number) in [(1, 4), (1, 1), (0, 2)] {
        // The header of its first batch.
        segment(&mut writer.media[log], number)[BLOCK_BYTES + 40] ^= 1;
    }
    for threads in threads {
        let opening = Opening::new(1, usize::MAX, threads);
        let error = Store::open(found.clone(), &writer.media, opening).unwrap_err();
        let RecoverError::Damaged { log: 0, from, .. } = error else { panic!("{error}") };
        assert_eq!(geometry().segment_of(from), 2);
    }
}

/// A log of strings of the same keys and lengths, so that its batches lie where those of another one lie.
fn same_places(epoch: u32, byte: u8) -> Medium {
    let mut new = Found::of_new(0, geometry(), PLACES);
    assert!(new.repairs(epoch).is_empty());
    let mut writer = Writer::new();
    writer.logs[0] = new.into_log(epoch);
    for version in 1..=1_000_u64 {
        let (kind, key, value) = (RecordKind::String, version.to_be_bytes(), [byte; 100]);
        let key = &key[..];
        writer
            .write(0, &Record { kind, version, expires_ms: None, received_ns: None, key, subkey: &[], value: &value });
    }
    writer.media.swap_remove(0)
}

/// The bytes of a segment.
fn segment(medium: &mut Medium, number: u64) -> &mut Vec<u8> {
    let is_it = |place: &&mut Vec<u8>| place[..8] != [0; 8] && place[8..16] == number.to_le_bytes();
    medium.places.iter_mut().find(is_it).unwrap()
}

/// A start cut the log before it, so what is there behind later batches is no part of the log.
#[test]
fn a_segment_of_an_earlier_epoch_does_not_follow_one_of_a_later_epoch() {
    let (mut medium, mut later) = (same_places(3, 1), same_places(4, 1));
    segment(&mut medium, 1).clone_from(segment(&mut later, 1));
    let error = read_all(geometry(), &[medium]).unwrap_err();
    let RecoverError::Damaged { log: 0, from, .. } = error else { panic!("{error}") };
    assert_eq!(from, geometry().first_batch(2));
}

/// Batches that are whole, at the same places, are not those that were looked at.
#[test]
fn other_batches_than_were_found_are_not_brought_in() {
    let (mut media, mut other) = ([same_places(3, 1)], same_places(3, 2));
    let found = read_all(geometry(), &media).unwrap();
    segment(&mut media[0], 1).clone_from(segment(&mut other, 1));
    for threads in [NonZeroUsize::MIN, NonZeroUsize::new(4).unwrap()] {
        let error = Store::open(found.clone(), &media, Opening::new(4, usize::MAX, threads)).unwrap_err();
        let RecoverError::Damaged { log: 0, from, .. } = error else { panic!("{error}") };
        assert_eq!(from, geometry().first_batch(1));
    }
}

#[test]
fn a_store_without_a_record_has_no_key() {
    let media: Vec<Medium> = Writer::new().media;
    let found = read_all(geometry(), &media).unwrap();
    let (store, mut shards) = open_all(found, &media, 1, usize::MAX);
    assert_eq!(dump(&store, &mut shards)[0], "0 keys, flushed at 0");
    let new = (0..LOGS).map(|log| Found::of_new(log, geometry(), PLACES)).collect();
    let (new, mut new_shards) = open_all(new, &media, 1, usize::MAX);
    assert_eq!(dump(&store, &mut shards), dump(&new, &mut new_shards));
    let mut entries = 0;
    store.index().scan(b"", |entry| {
        entries += usize::from(entry.value == Value::Gone);
        true
    });
    assert_eq!(entries, 0);
}
