//! The last resort: every record of a log that can still be read, also behind damage.
//!
//! Recovery trusts nothing behind the first byte that makes no sense. This takes each batch by itself, with its own
//! checksums, so it may find what was never acknowledged; and a key that was deleted may be back, where the record that
//! said so is damaged.

use std::iter;

use crate::format::{Batch, Lsn, Record, Standing};
use crate::log::Geometry;
use crate::recover::{Places, RecoverError, header_at};

/// What was found in a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Salvaged {
    /// Batches that are whole.
    pub batches: u64,
    /// Records in them.
    pub records: u64,
    /// Places that cannot be read, or have a segment of another log or store.
    pub unreadable: u32,
}

/// Hands out every record of every whole batch of a log, in no order: of a key, the largest version counts.
///
/// # Errors
///
/// [`RecoverError::Foreign`]: headers are of another log or store, and nothing is of this one, so this is not the log.
pub fn salvage(
    log: u16,
    geometry: Geometry,
    medium: &impl Places,
    mut take: impl FnMut(Record<'_>),
) -> Result<Salvaged, RecoverError> {
    let mut salvaged = Salvaged::default();
    let (mut bytes, mut has_header, mut foreign) = (Vec::new(), false, None);
    for place in 0..medium.places() {
        if medium.read(place, &mut bytes).is_err() {
            salvaged.unreadable += 1;
            continue;
        }
        let header = match header_at(geometry, log, place, &bytes) {
            Ok(header) => header,
            Err(error) => {
                salvaged.unreadable += 1;
                foreign.get_or_insert(error);
                continue;
            }
        };
        has_header |= header.is_some();
        let number = match header {
            // What is in it was written again elsewhere, or was never acknowledged.
            Some(header) if header.standing != Standing::Counts => continue,
            Some(header) => Some(header.number),
            // Batches of an earlier segment may lie behind those of the last one in this place.
            None => batches(log, geometry, &bytes).map(|(lsn, _)| geometry.segment_of(lsn)).max(),
        };
        for (lsn, batch) in batches(log, geometry, &bytes) {
            if Some(geometry.segment_of(lsn)) == number {
                salvaged.batches += 1;
                batch.records().flatten().for_each(|(_, record)| {
                    salvaged.records += 1;
                    take(record);
                });
            }
        }
    }
    foreign.filter(|_| !has_header && salvaged.batches == 0).map_or(Ok(salvaged), Err)
}

/// Every whole batch in a place that was written for this log and this part of a place. The body of one is passed by: clients choose
/// the bytes of their values, also such that are batches.
fn batches(log: u16, geometry: Geometry, place: &[u8]) -> impl Iterator<Item = (Lsn, Batch<'_>)> {
    let mut next = 0;
    iter::from_fn(move || {
        loop {
            let (at, bytes) = (next, place.get(next..).filter(|bytes| !bytes.is_empty())?);
            let is_ours = |Batch { header, .. }: &Batch<'_>| {
                let is_here = header.lsn.0 % geometry.segment_bytes == at as u64;
                (header.store, header.log) == (geometry.store, log) && is_here
            };
            let batch = Batch::decode(bytes).ok().filter(is_ours);
            let Some(batch) = batch else {
                next += geometry.block_bytes.get();
                continue;
            };
            next += batch.header.total_bytes(geometry.block_bytes);
            return Some((batch.header.lsn, batch));
        }
    })
}
