//! How fast a store is recovered from logs that lie in memory. `cargo bench -p ksf-store --bench recovery` prints it.
//!
//! * read: all segments are read, every checksum is held against them, and the chains of batches are followed.
//! * open: they are read again, and become the index.
//!
//! Both together are what a start does, but for the disk. Batches are those of a busy server: some hundred records each, or
//! one, for a server with a lone client. Medians are printed: keys and bytes of log per second, all threads together.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use ksf_store::format::{Lsn, Record, RecordKind};
use ksf_store::log::{Geometry, Log, News};
use ksf_store::recover::{Found, Places, cut_by_links};
use ksf_store::store::{Opening, Store};
use ksf_test::Random;

const ROUNDS: usize = 5;
const SEGMENT_BYTES: u64 = 16 << 20;
const BLOCK_BYTES: usize = 4096;

/// A log in memory.
struct Medium(Vec<Vec<u8>>);

impl Places for Medium {
    fn places(&self) -> u32 {
        self.0.len() as u32
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()> {
        // As a read of a file does, also where nothing was written.
        into.resize(SEGMENT_BYTES as usize, 0);
        let place = &self.0[place as usize];
        into[..place.len()].copy_from_slice(place);
        into[place.len()..].fill(0);
        Ok(())
    }

    fn read_front(&self, place: u32, bytes: usize, into: &mut Vec<u8>) -> std::io::Result<()> {
        into.clear();
        into.extend(self.0[place as usize].iter().take(bytes));
        into.resize(bytes, 0);
        Ok(())
    }
}

struct Case {
    name: &'static str,
    records: u64,
    /// Keys are drawn among so many.
    keys: u64,
    value_bytes: usize,
    /// Records of a batch.
    batch: u64,
    /// Whether keys are written as text with the same front.
    has_long_keys: bool,
}

fn main() {
    let (four, all) = (1 << 22, u64::MAX);
    let case =
        |name, records, keys, value_bytes| Case { name, records, keys, value_bytes, batch: 300, has_long_keys: false };
    let cases = [
        case("8 bytes, values of 8", four, all, 8),
        Case { has_long_keys: true, ..case("20 bytes with one front, values of 64", four / 2, all, 64) },
        case("8 bytes, values of 8, four records of each", four, four / 4, 8),
        case("8 bytes, values of 1,400", four / 8, all, 1400),
        Case { batch: 1, ..case("8 bytes, values of 8, a batch for each", four / 32, all, 8) },
    ];
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "{:44} {:>7} {:>10} {:>10} {:>12} {:>10}",
        "keys of", "threads", "read ms", "open ms", "records/s", "MB/s"
    );
    for case in cases {
        let geometry = geometry();
        let media = [written(&case, geometry)];
        for threads in [1, cpus].iter().take(cpus.min(2)).filter_map(|threads| NonZeroUsize::new(*threads)) {
            let mut times: Vec<(Duration, Duration)> =
                (0..ROUNDS).map(|_| recover(&case, geometry, &media, threads)).collect();
            times.sort_unstable_by_key(|(read, open)| *read + *open);
            let (read, open) = times[ROUNDS / 2];
            let bytes: usize = media[0].0.iter().map(Vec::len).sum();
            let seconds = (read + open).as_secs_f64();
            println!(
                "{:44} {threads:>7} {:>10} {:>10} {:>12.0} {:>10.0}",
                case.name,
                read.as_millis(),
                open.as_millis(),
                case.records as f64 / seconds,
                bytes as f64 / seconds / 1e6
            );
        }
    }
}

fn geometry() -> Geometry {
    let block_bytes = NonZeroUsize::MIN.saturating_add(BLOCK_BYTES - 1);
    Geometry { store: 5, block_bytes, segment_bytes: SEGMENT_BYTES }
}

/// How long the two parts of a start take.
fn recover(case: &Case, geometry: Geometry, media: &[Medium], threads: NonZeroUsize) -> (Duration, Duration) {
    let began = Instant::now();
    let mut found = Found::read_all(geometry, media, threads).expect("it is whole");
    cut_by_links(&mut found).expect("nothing is lost");
    let read = began.elapsed();
    let began = Instant::now();
    let (store, _shards) = Store::open(found, media, Opening::new(1, usize::MAX, threads)).expect("it is whole");
    let open = began.elapsed();
    assert!(store.keys() > 0 && store.keys() as u64 <= case.records.min(case.keys));
    (read, open)
}

/// A log with the records of a case, of which only what was written is kept.
fn written(case: &Case, geometry: Geometry) -> Medium {
    const PLACES: u32 = 500;
    let mut medium = Medium(vec![Vec::new(); PLACES as usize]);
    let mut log = Log::create(geometry, 0, PLACES);
    let mut random = Random::new(case.records);
    let value = vec![7; case.value_bytes];
    for version in 1..=case.records {
        let number = random.below(case.keys);
        let key =
            if case.has_long_keys { format!("k:{number:018x}").into_bytes() } else { number.to_be_bytes().to_vec() };
        let (kind, subkey) = (RecordKind::String, &[][..]);
        let record = Record { kind, version, expires_ms: None, received_ns: None, key: &key, subkey, value: &value };
        log.append(&[record], [], |_, _| {}).expect("there is room");
        if version.is_multiple_of(case.batch) || version == case.records {
            write(&mut log, &mut medium);
        }
    }
    medium.0.retain(|place| !place.is_empty());
    medium
}

fn write(log: &mut Log, medium: &mut Medium) {
    while let Some(write) = log.next_write(8, 0) {
        let (place, end) = (&mut medium.0[write.place as usize], write.offset as usize + write.bytes.len());
        place.resize(place.len().max(end), 0);
        place[write.offset as usize..end].copy_from_slice(&write.bytes);
        let mut durable = Lsn::default();
        log.written(write.id, true, write.bytes, |news| {
            if let News::Durable { end, .. } = news {
                durable = end;
            }
        });
        log.promise(durable);
    }
}
