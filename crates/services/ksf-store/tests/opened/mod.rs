//! A store on media that lose power.

use std::sync::Arc;

use ksf_store::log::Geometry;
use ksf_store::recover::{Found, cut_by_links};
use ksf_store::store::{Shard, Store};

use crate::common::Medium;

/// Opens the store on its media.
pub(crate) fn open(geometry: Geometry, media: &mut [Medium], epoch: u32) -> (Arc<Store>, Vec<Shard>) {
    let read = |(log, medium): (usize, &mut Medium)| Found::read(log as u16, geometry, &mut { medium });
    let mut found: Vec<Found> = media.iter_mut().enumerate().map(|one| read(one).unwrap()).collect();
    cut_by_links(&mut found).unwrap();
    Store::open(found, epoch)
}
