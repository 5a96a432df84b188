//! Starting a store on media that lose power, also while it starts.

use std::ops::Range;
use std::sync::Arc;

use ksf_store::away::{Values, Wanted};
use ksf_store::log::Geometry;
use ksf_store::recover::{Found, Repair, cut_by_links};
use ksf_store::store::{Shard, Store};
use ksf_test::Random;

use crate::common::Medium;

/// Reads the logs, and repairs them. With `random`, the power goes now and then while that is done, and `epoch` grows.
pub(crate) fn recover(
    geometry: Geometry,
    media: &mut [Medium],
    epoch: &mut u32,
    mut random: Option<&mut Random>,
) -> Vec<Found> {
    loop {
        let read = |(log, medium): (usize, &mut Medium)| Found::read(log as u16, geometry, &mut { medium });
        let mut found: Vec<Found> = media.iter_mut().enumerate().map(|one| read(one).unwrap()).collect();
        cut_by_links(&mut found).unwrap();
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

/// The seeds of a random test: 0 up to `count`, or `FROM..TO` of the environment variable `KSF_STORE_SEEDS`.
#[allow(dead_code, reason = "the schedules are not random")]
pub(crate) fn seeds(count: u64) -> Range<u64> {
    let given = std::env::var("KSF_STORE_SEEDS").ok();
    let range = given.as_deref().map(|text| {
        let (from, to) = text.split_once("..").expect("KSF_STORE_SEEDS is FROM..TO");
        from.parse().expect("a number")..to.parse().expect("a number")
    });
    range.unwrap_or(0..count)
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
    let mut media: Vec<&mut Medium> = media.iter_mut().collect();
    Store::open(found, &mut media, *epoch, memory_bytes_max).unwrap()
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
