//! Starting a store on media that lose power, also while it starts.

#[allow(dead_code, reason = "not every test opens a store")]
pub(crate) mod oracle;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use ksf_store::away::{Values, Wanted};
use ksf_store::cells::Shape;
use ksf_store::index::leaf::Value;
use ksf_store::log::Geometry;
use ksf_store::recover::{Found, RecoverError, Repair, cut_by_links};
use ksf_store::store::{Opening, Shard, Store};
use ksf_test::{Random, effort};

use crate::common::Medium;

const ONE: NonZeroUsize = NonZeroUsize::MIN;
const SEVERAL: NonZeroUsize = ONE.saturating_add(2);

/// Reads the logs on several threads. One finds the same, and so does a reader that goes through each log in order.
pub(crate) fn read_all(geometry: Geometry, media: &[Medium]) -> Result<Vec<Found>, RecoverError> {
    let found = Found::read_all(geometry, media, SEVERAL);
    let by_one = Found::read_all(geometry, media, ONE);
    assert_eq!(format!("{found:?}"), format!("{by_one:?}"));
    let verdict = |(log, medium): (usize, &Medium)| oracle::read(log as u16, geometry, medium);
    let verdicts: Result<Vec<_>, _> = media.iter().enumerate().map(verdict).collect();
    let found_verdicts = found.as_ref().map(|found| {
        let verdict = |(found, medium): (&Found, &Medium)| oracle::Verdict::of(found, medium);
        found.iter().zip(media).map(verdict).collect::<Vec<_>>()
    });
    assert_eq!(format!("{found_verdicts:?}"), format!("{:?}", verdicts.as_ref()));
    found
}

/// What a store has, in words: also what only a later start, or the cleaner, would ask for. Where values are is left out.
#[allow(dead_code, reason = "not every test opens a store")]
pub(crate) fn dump(store: &Store, shards: &mut [Shard]) -> Vec<String> {
    let mut lines = vec![format!("{} keys, flushed at {}", store.keys(), store.flushed())];
    for (name, index) in [("key", store.index()), ("cell", store.cells())] {
        let before = lines.len();
        index.scan(b"", |entry| {
            let value = match entry.value {
                Value::Here(value) => format!("{} bytes", value.len()),
                Value::OnMedium(bytes) => format!("{bytes} bytes"),
                Value::Cells(_) => "cells".to_owned(),
                Value::Gone => "gone".to_owned(),
            };
            let (key, origin, end, older) = (entry.key.escape_ascii(), entry.origin, entry.expires_ms, entry.older);
            lines.push(format!("{name} {key}: {value} {origin:?} ends {end:?}, {older} older"));
            true
        });
        assert_eq!(index.len(), lines.len() - before);
    }
    store.scan(b"", 0, |key, got| {
        let (shape, count, version) = (got.shape, got.count, got.version);
        let first = if shape == Shape::List { got.first } else { 0 };
        lines.push(format!("{}: {shape:?} of {count} from {first}, version {version}", key.escape_ascii()));
        true
    });
    for shard in shards {
        // It hears of what is out of date.
        assert!(shard.next_write(1, 0).is_none(), "nothing is to be written");
        lines.push(format!("log {}: {:?}", shard.number(), shard.log().segments()));
    }
    lines
}

/// Makes a store of logs on several threads, of all that they have at once or of one segment after the other. One thread makes
/// the same, and so does a look at all records of each key.
#[allow(dead_code, reason = "not every test opens a store")]
pub(crate) fn open_all(
    found: Vec<Found>,
    media: &[Medium],
    epoch: u32,
    memory_bytes_max: usize,
) -> (Arc<Store>, Vec<Shard>) {
    let opening = Opening::new(epoch, memory_bytes_max, ONE);
    let (by_one, mut shards_by_one) = Store::open(found.clone(), media, opening).unwrap();
    let unsorted_bytes_max = if epoch.is_multiple_of(2) { 1 } else { opening.unsorted_bytes_max };
    let opening = Opening { threads: SEVERAL, unsorted_bytes_max, ..opening };
    let (store, mut shards) = Store::open(found.clone(), media, opening).unwrap();
    assert_eq!(dump(&store, &mut shards), dump(&by_one, &mut shards_by_one));
    assert_eq!(store.memory().sizes(), store.measure());
    oracle::compare(&store, &shards, &found, media);
    (store, shards)
}

/// Reads the logs, and repairs them. With `random`, the power goes now and then while that is done, and `epoch` grows.
#[allow(dead_code, reason = "not every test starts a store")]
pub(crate) fn recover(
    geometry: Geometry,
    media: &mut [Medium],
    epoch: &mut u32,
    mut random: Option<&mut Random>,
) -> Vec<Found> {
    loop {
        // The other ways to read find the same. They take most of the time, so with many power cuts they are tried at some.
        let is_compared = random.as_mut().is_none_or(|random| random.one_in(8));
        let read = if is_compared { read_all(geometry, media) } else { Found::read_all(geometry, media, ONE) };
        let mut found = read.unwrap();
        cut_by_links(&mut found).unwrap();
        for (found, medium) in found.iter().zip(&mut *media) {
            let (log, reached) = (found.log(), found.reached());
            assert!(reached >= medium.reached, "log {log} ends at {reached:?}, and was at {:?}", medium.reached);
            medium.reached = reached;
        }
        let mut is_cut_off = false;
        for (found, medium) in found.iter_mut().zip(&mut *media) {
            for Repair { place, offset, bytes } in found.repairs(*epoch) {
                if is_cut_off {
                    continue;
                }
                is_cut_off = random.as_mut().is_some_and(|random| random.one_in(4));
                match &mut random {
                    Some(random) if is_cut_off => medium.put_in_part(place, offset as usize, &bytes, random),
                    _ => medium.put(place, offset as usize, &bytes),
                }
            }
        }
        if !is_cut_off {
            return found;
        }
        *epoch += 1;
    }
}

/// The seeds of a random test: 0 up to `count`, ten times as many in `make soak`, or `FROM..TO` of the environment variable `KSF_STORE_SEEDS`.
#[allow(dead_code, reason = "the schedules are not random")]
pub(crate) fn seeds(count: u64) -> Range<u64> {
    let given = std::env::var("KSF_STORE_SEEDS").ok();
    let range = given.as_deref().map(|text| {
        let (from, to) = text.split_once("..").expect("KSF_STORE_SEEDS is FROM..TO");
        from.parse().expect("a number")..to.parse().expect("a number")
    });
    range.unwrap_or(0..effort(count, 10 * count))
}

/// Starts the store.
#[allow(dead_code, reason = "not every test has more than logs")]
pub(crate) fn open(
    geometry: Geometry,
    media: &mut [Medium],
    epoch: &mut u32,
    random: Option<&mut Random>,
) -> (Arc<Store>, Vec<Shard>) {
    open_within(geometry, media, epoch, random, usize::MAX)
}

/// Starts the store with so much memory.
#[allow(dead_code, reason = "not every test has more than logs")]
pub(crate) fn open_within(
    geometry: Geometry,
    media: &mut [Medium],
    epoch: &mut u32,
    random: Option<&mut Random>,
    memory_bytes_max: usize,
) -> (Arc<Store>, Vec<Shard>) {
    let found = recover(geometry, media, epoch, random);
    open_all(found, media, *epoch, memory_bytes_max)
}

/// What is on the media of values that a command asked for; `None`: one of them is not there yet.
#[allow(dead_code, reason = "not every test has values on media alone")]
pub(crate) fn fetch(media: &[Medium], wanted: &[Wanted]) -> Option<Values> {
    let mut values = Values::default();
    for one in wanted {
        let at = one.read_at().ok()?;
        let place = &media[usize::from(at.log)].places[at.place as usize];
        let record = one.record(&place[at.offset as usize..][..at.bytes]).unwrap();
        values.insert(one.version(), record.value.into());
    }
    Some(values)
}
