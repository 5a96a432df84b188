//! Bytes that change on the medium: what was acknowledged is there, or the store says what is damaged, and never anything
//! else.

use crate::opened;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use crate::common::Medium;
use ksf_store::format::{BatchHeader, Lsn, Record, RecordKind, SegmentHeader, Standing};
use ksf_store::log::{Geometry, Log, News};
use ksf_store::recover::{Found, RecoverError};
use ksf_store::salvage::{Salvaged, salvage};
use ksf_test::Random;

const BLOCK_BYTES: usize = 512;
const RECORDS: u64 = 60;

/// A log of which all records but the last one are promised, and whose last batch says so.
fn written(random: &mut Random) -> (Geometry, Medium, Lsn) {
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: 48 * BLOCK_BYTES as u64 };
    let mut medium = Medium::new(6, geometry.segment_bytes as usize);
    let mut log = Log::create(geometry, 0, 6);
    for number in 0..=RECORDS {
        let key = number.to_be_bytes();
        let value = vec![number as u8; random.within(0..=1200)];
        let (kind, subkey) = (RecordKind::String, &[][..]);
        let record =
            Record { kind, version: number, expires_ms: None, received_ns: None, key: &key, subkey, value: &value };
        log.append(&[record], [], |_, _| {}).unwrap();
        while let Some(write) = log.next_write(8, 0) {
            medium.put(write.place, write.offset as usize, &write.bytes);
            let mut end = Lsn::default();
            log.written(write.id, true, write.bytes, |news| {
                if let News::Durable { end: durable, .. } = news {
                    end = durable;
                }
            });
            if number < RECORDS {
                log.promise(end);
            }
        }
    }
    let promised = log.promised();
    (geometry, medium, promised)
}

fn numbers(geometry: Geometry, medium: &Medium) -> Result<BTreeMap<u64, usize>, RecoverError> {
    let found = opened::read_all(geometry, std::slice::from_ref(medium)).map(|mut logs| logs.remove(0))?;
    let mut numbers = BTreeMap::new();
    found.records(medium, |_, record| {
        let number = u64::from_be_bytes(record.key.try_into().unwrap());
        assert!(record.value.iter().all(|byte| *byte == number as u8), "a wrong value");
        numbers.insert(number, record.value.len());
    })?;
    Ok(numbers)
}

#[test]
fn a_byte_that_changed_is_found_or_does_not_matter() {
    let mut random = Random::of_test(3);
    let (geometry, mut medium, _) = written(&mut random);
    let whole = numbers(geometry, &medium).unwrap();
    assert_eq!(whole.len() as u64, RECORDS + 1);
    let (mut refused, mut cut) = (0, 0);
    for _ in 0..4_000 {
        let place = random.within(0..=medium.places.len() - 1);
        let at = random.within(0..=medium.places[place].len() - 1);
        let flipped = 1 << random.within(0..=7);
        medium.places[place][at] ^= flipped;
        match numbers(geometry, &medium) {
            Ok(there) => {
                cut += u64::from(there != whole);
                assert!(
                    (0..RECORDS).all(|number| there.get(&number) == whole.get(&number)),
                    "byte {at} of place {place}: what was acknowledged is lost, and nobody says so"
                );
            }
            Err(RecoverError::Damaged { .. } | RecoverError::Missing { .. }) => refused += 1,
            Err(error) => panic!("byte {at} of place {place}: {error}"),
        }
        medium.places[place][at] ^= flipped;
    }
    assert!(refused > 1_000 && cut > 0, "{refused} refused, {cut} cut");
}

/// No crash leaves a whole header of another log, another store or other sizes: it is no place without data.
#[test]
fn a_whole_header_of_another_log_is_no_empty_place() {
    let mut random = Random::of_test(7);
    let (geometry, mut medium, _) = written(&mut random);
    let header = SegmentHeader {
        store: geometry.store,
        log: 0,
        number: 1,
        epoch: 0,
        segment_bytes: geometry.segment_bytes,
        block_bytes: BLOCK_BYTES as u32,
        standing: Standing::Counts,
        live: Some(Vec::new()),
    };
    let others = [
        SegmentHeader { store: 6, ..header.clone() },
        SegmentHeader { log: 1, ..header.clone() },
        SegmentHeader { segment_bytes: 2 * geometry.segment_bytes, ..header.clone() },
        SegmentHeader { standing: Standing::Cleaned, log: 3, ..header.clone() },
        SegmentHeader { standing: Standing::GivenUp, block_bytes: 4096, ..header },
    ];
    let header_of_another = others[0].clone();
    let whole = medium.places.clone();
    for (place, other) in (0..).zip(others) {
        let bytes = other.encode();
        medium.put(place, 0, &bytes[..BLOCK_BYTES]);
        match numbers(geometry, &medium) {
            Err(RecoverError::Foreign { log: 0, place: found, header, .. }) => {
                assert_eq!((found, *header), (place, other.clone()));
            }
            result => panic!("{other:?}: {result:?}"),
        }
        // What else is in the log is there for the last resort.
        let salvaged = salvage(0, geometry, &medium, |_| {}).unwrap();
        assert!(salvaged.unreadable == 1 && salvaged.records > 0, "{other:?}: {salvaged:?}");
        medium.places.clone_from(&whole);
    }
    // Of a log that is another one nothing is.
    assert!(matches!(salvage(1, geometry, &medium, |_| {}), Err(RecoverError::Foreign { log: 1, place: 0, .. })));
    // Where the only header that is left is one of another log, batches without a header are those of this one.
    medium.places.iter_mut().for_each(|place| place[..BLOCK_BYTES].fill(0));
    medium.put(0, 0, &header_of_another.encode()[..BLOCK_BYTES]);
    let salvaged = salvage(0, geometry, &medium, |_| {}).unwrap();
    assert!(salvaged.unreadable == 1 && salvaged.records > 0, "{salvaged:?}");
}

/// A client chooses the bytes of its values. In a batch that is whole they say nothing of the log, whatever they look like.
#[test]
fn a_value_that_looks_like_batches_promises_nothing() {
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: 24 * BLOCK_BYTES as u64 };
    let mut medium = Medium::new(8, geometry.segment_bytes as usize);
    let mut log = Log::create(geometry, 0, 8);
    let value_at = |blocks: std::ops::Range<u64>| {
        // The headers of the batch and of the record, and the key.
        let mut value = vec![0; BLOCK_BYTES - 64 - 32 - 8];
        blocks.for_each(|block| value.extend_from_slice(&batch_at(block)));
        value
    };
    append(&mut log, 1, &value_at(2..5));
    write_all(&mut log, &mut medium);
    let first = medium.places.iter().find(|bytes| bytes[4..8] == *b"ksfS").unwrap();
    assert_eq!(first[2 * BLOCK_BYTES..3 * BLOCK_BYTES], batch_at(2), "it is not at the beginning of a block");
    let found = Found::read(0, geometry, &medium).unwrap();
    assert_eq!((found.record_count(), found.end()), (1, log.durable()));
    // The last resort takes no batch from there, though these are whole: not even where the header of the segment is gone.
    let whole = Salvaged { batches: 1, records: 1, unreadable: 0 };
    assert_eq!(salvage(0, geometry, &medium, |_| {}).unwrap(), whole);
    medium.places.iter_mut().for_each(|place| place[..BLOCK_BYTES].fill(0));
    assert_eq!(salvage(0, geometry, &medium, |_| {}).unwrap(), whole);
}

/// No log writes a batch that promises what is behind its begin, or one of a later segment than that of its place: such bytes are what is
/// left of a value.
#[test]
fn remains_that_no_log_wrote_promise_nothing() {
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: 24 * BLOCK_BYTES as u64 };
    let mut medium = Medium::new(8, geometry.segment_bytes as usize);
    let mut log = Log::create(geometry, 0, 8);
    for number in 0..4 {
        append(&mut log, number, &[number as u8; 5 * BLOCK_BYTES]);
        write_all(&mut log, &mut medium);
    }
    let end = log.durable();
    assert_eq!(geometry.segment_of(end), 1);
    let place_of = |number| {
        let is_it = |bytes: &Vec<u8>| SegmentHeader::decode(bytes).is_ok_and(|header| header.number == number);
        medium.places.iter().position(is_it).unwrap() as u32
    };
    let (first, last, last_block) = (place_of(0), place_of(1), 23);
    for (place, header) in [
        (first, batch_at(last_block)),
        (last, batch_at(24 + last_block)),
        (last, batch_with(100 * 24 + last_block, 100 * 24)),
        (first, batch_with(24 + last_block, 24 + last_block)),
    ] {
        medium.put(place, last_block as usize * BLOCK_BYTES, &header);
        let found = opened::read_all(geometry, std::slice::from_ref(&medium)).unwrap().remove(0);
        assert_eq!((found.record_count(), found.end()), (4, end));
        medium.put(place, last_block as usize * BLOCK_BYTES, &[0; BLOCK_BYTES]);
    }
    // One of its own segment may be what is left behind damage.
    medium.put(last, last_block as usize * BLOCK_BYTES, &batch_with(24 + last_block, 24 + last_block));
    assert!(matches!(numbers(geometry, &medium), Err(RecoverError::Damaged { .. })));
}

/// A header of the log of these tests.
fn batch_at(block: u64) -> [u8; BLOCK_BYTES] {
    batch_with(block, 1 << 31)
}

fn batch_with(block: u64, promised_block: u64) -> [u8; BLOCK_BYTES] {
    let header = BatchHeader {
        store: 5,
        log: 0,
        lsn: Lsn(block * BLOCK_BYTES as u64),
        promised: Lsn(promised_block * BLOCK_BYTES as u64),
        epoch: 0,
        records: 0,
        links: 0,
        body_bytes: 0,
        body_crc: 0,
        time_ns: 0,
        ends_segment: false,
    };
    let mut bytes = [0; BLOCK_BYTES];
    header.encode(&mut bytes);
    bytes
}

/// After a loss of power some file systems show zeros where data was written last.
#[test]
fn a_tail_of_zeros_is_cut() {
    let mut random = Random::of_test(4);
    let (geometry, mut medium, promised) = written(&mut random);
    let segment = geometry.segment_of(promised);
    let place = medium.places.iter().position(|bytes| {
        let header = ksf_store::format::SegmentHeader::decode(bytes);
        header.is_ok_and(|header| header.number == segment)
    });
    let from = (promised.0 % geometry.segment_bytes) as usize;
    medium.places[place.unwrap()][from..].fill(0);
    let there = numbers(geometry, &medium).unwrap();
    assert_eq!(there.len() as u64, RECORDS);
    // One block more, and something is missing that was acknowledged.
    medium.places[place.unwrap()][from - BLOCK_BYTES..].fill(0);
    let left = numbers(geometry, &medium).map(|there| there.len() as u64);
    assert!(left.is_err() || left.is_ok_and(|left| left == RECORDS - 1), "the last batch alone says how far it was");
}

/// A log that is idle says what was acknowledged of its last batch, by one block: no damage to that passes for a torn end, and
/// what says it is no data that could be lost.
#[test]
fn an_idle_log_says_what_was_acknowledged_of_its_last_batch() {
    let mut random = Random::of_test(5);
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
    // So short that some last batches leave room for the end of the segment alone.
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: 24 * BLOCK_BYTES as u64 };
    let mut at_ends = 0;
    for records in 1..=30 {
        let mut medium = Medium::new(8, geometry.segment_bytes as usize);
        let mut log = Log::create(geometry, 0, 8);
        for number in 0..records {
            let value = vec![number as u8; random.within(0..=600)];
            append(&mut log, number, &value);
            assert!(!log.must_say(), "it is busy");
            write_all(&mut log, &mut medium);
        }
        let last_end = log.durable();
        let before = medium.places.clone();
        assert!(log.must_say());
        assert!(log.say(0));
        write_all(&mut log, &mut medium);
        assert!(!log.must_say(), "it is said once");
        let changed = (0..8).flat_map(|place| (0..24).map(move |block| (place, block * BLOCK_BYTES)));
        let is_changed = |(place, at): &(usize, usize)| {
            medium.places[*place][*at..at + BLOCK_BYTES] != before[*place][*at..at + BLOCK_BYTES]
        };
        assert_eq!(changed.filter(is_changed).count(), 1, "it takes one block");
        at_ends += u64::from(ends_its_segment(geometry, &medium));

        let whole = numbers(geometry, &medium).unwrap();
        assert_eq!(whole.len() as u64, records);
        let segment = geometry.segment_of(Lsn(last_end.0 - 1));
        let header = |bytes: &Vec<u8>| ksf_store::format::SegmentHeader::decode(bytes);
        let is_last = |bytes: &Vec<u8>| header(bytes).is_ok_and(|header| header.number == segment);
        let place = medium.places.iter().position(is_last).unwrap();
        let from = ((last_end.0 - 1) % geometry.segment_bytes) as usize / BLOCK_BYTES * BLOCK_BYTES;
        // The header of the last block of data, which has that of its batch if it is the only one, and what says so.
        for at in (0..64).chain([70, 100]) {
            for block in [from, from + BLOCK_BYTES] {
                medium.places[place][block + at] ^= 1;
                match numbers(geometry, &medium) {
                    Ok(there) => assert_eq!(there, whole, "block {block}, byte {at} of {records} records"),
                    Err(RecoverError::Damaged { .. }) => assert_eq!(block, from),
                    Err(error) => panic!("{error}"),
                }
                medium.places[place][block + at] ^= 1;
            }
        }
        // It goes on after a start, which says nothing once more.
        let mut found = Found::read(0, geometry, &medium).unwrap();
        assert!(found.repairs(1).is_empty());
        let mut log = found.into_log(1);
        assert!(!log.must_say());
        append(&mut log, records, &[records as u8; 4]);
        write_all(&mut log, &mut medium);
        assert_eq!(numbers(geometry, &medium).unwrap().len() as u64, records + 1);
    }
    assert!(at_ends > 0, "none had room for the end of its segment alone");
}

/// The next batch of a log that said so at the end of a segment begins in the next segment, which may be long after. A segment
/// that was cleaned does not wait for it.
#[test]
fn a_segment_that_was_cleaned_is_erased_while_the_log_is_idle() {
    let mut random = Random::of_test(6);
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: 24 * BLOCK_BYTES as u64 };
    let mut at_ends = 0;
    for records in 20..=60 {
        let mut medium = Medium::new(12, geometry.segment_bytes as usize);
        let mut log = Log::create(geometry, 0, 12);
        for number in 0..records {
            append(&mut log, number, &vec![number as u8; random.within(0..=600)]);
            write_all(&mut log, &mut medium);
        }
        assert!(log.say(0));
        write_all(&mut log, &mut medium);
        at_ends += u64::from(ends_its_segment(geometry, &medium));
        assert!(log.segments().contains_key(&0));
        log.cleaned(0);
        log.erase_cleaned(|_| true);
        write_all(&mut log, &mut medium);
        assert!(!log.segments().contains_key(&0), "after {records} records");
    }
    assert!(at_ends > 0, "none had room for the end of its segment alone");
}

/// Whether the last batch with a header that counts says that its segment ends.
fn ends_its_segment(geometry: Geometry, medium: &Medium) -> bool {
    let blocks = medium.places.iter().flat_map(|place| place.chunks(BLOCK_BYTES));
    let headers = blocks.filter_map(|block| BatchHeader::decode(block).ok());
    let last = headers.filter(|header| header.store == geometry.store).max_by_key(|header| header.lsn);
    last.is_some_and(|header| header.ends_segment)
}

fn append(log: &mut Log, number: u64, value: &[u8]) {
    let key = number.to_be_bytes();
    let (kind, subkey) = (RecordKind::String, &[][..]);
    let record = Record { kind, version: number, expires_ms: None, received_ns: None, key: &key, subkey, value };
    log.append(&[record], [], |_, _| {}).unwrap();
}

fn write_all(log: &mut Log, medium: &mut Medium) {
    while let Some(write) = log.next_write(8, 0) {
        medium.put(write.place, write.offset as usize, &write.bytes);
        log.written(write.id, true, write.bytes, |_| {});
    }
    log.promise(log.durable());
}
