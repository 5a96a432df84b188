//! `KSF.BACKUP`: the logs as they are at one moment, for a client that makes a backup of them while the store is served.
//!
//! ```text
//!   BEGIN                        store, bytes of a segment, bytes of a block, places, and of each log where it ends
//!   READ log place offset bytes  bytes of a place, from where they lie
//!   DONE log segment             the segment was copied: it may be erased
//!   END                          so may all others, as when the connection ends
//! ```
//!
//! [`ksf_store::backup`] says what a copy is made of; [`crate::backup`] makes one.

use std::sync::Arc;

use ksf::files::{File, FileRange};
use ksf_store::backup::Backup;
use ksf_store::log::Geometry;

use super::{Call, Failed, NOT_AN_INTEGER, Result, integer};
use crate::disk::BLOCK_BYTES;

/// The logs, to be read by any shard.
#[derive(Debug)]
pub(crate) struct LogFiles {
    pub(crate) geometry: Geometry,
    pub(crate) places: u32,
    /// Of each log.
    pub(crate) files: Vec<File>,
}

const UNDER_WAY: &str = "ERR a backup is under way: there is one at a time";
const NONE: &str = "ERR there is no backup on this connection: it begins with KSF.BACKUP BEGIN";
const GIVEN_UP: &str = "ERR the backup was given up: a log needed the room of what the backup kept from being erased. Begin \
                        another one when less is written";
const NO_RANGE: &str = "ERR there are no such blocks in the logs";

pub(super) fn ksf_backup(call: &mut Call<'_, '_>) -> Result {
    let args = call.args;
    let subcommand = args[1].to_ascii_uppercase();
    match (&subcommand[..], &args[2..]) {
        (b"BEGIN", []) => begin(call),
        (b"READ", [log, place, offset, bytes]) => read(call, [log, place, offset, bytes]),
        (b"DONE", [log, segment]) => done(call, log, segment),
        (b"END", []) => end(call),
        (b"BEGIN" | b"READ" | b"DONE" | b"END", _) => {
            let subcommand = String::from_utf8_lossy(&subcommand).to_ascii_lowercase();
            Err(Failed::from(format!("ERR wrong number of arguments for 'ksf.backup|{subcommand}' command")))
        }
        _ => Err(Failed::quoting("ERR unknown subcommand '", args[1], "': there are BEGIN, READ, DONE and END")),
    }
}

fn number(text: &[u8]) -> Result<u64> {
    integer(text).and_then(|number| u64::try_from(number).ok()).ok_or_else(|| NOT_AN_INTEGER.into())
}

/// The backup of the connection, unless it was given up.
fn held<'c>(call: &'c Call<'_, '_>) -> Result<&'c Backup> {
    let backup = call.session.backup.as_ref().ok_or(NONE)?;
    if backup.is_held() { Ok(backup) } else { Err(GIVEN_UP.into()) }
}

fn begin(call: &mut Call<'_, '_>) -> Result {
    let backup = Backup::begin(call.shard.shard.store()).ok_or(UNDER_WAY)?;
    let LogFiles { geometry, places, .. } = &*call.shard.for_backups;
    let head = [geometry.store, geometry.segment_bytes, geometry.block_bytes.get() as u64, u64::from(*places)];
    let numbers: Vec<u64> = head.into_iter().chain(backup.ends().iter().map(|end| end.0)).collect();
    call.session.backup = Some(backup);
    let mut to = call.write();
    to.array(numbers.len());
    numbers.iter().for_each(|number| to.bulk(number.to_string().as_bytes()));
    Ok(())
}

fn read(call: &mut Call<'_, '_>, args: [&[u8]; 4]) -> Result {
    held(call)?;
    let [log, place, offset, bytes] = args.map(number);
    let (log, place, offset, bytes) = (log?, place?, offset?, bytes?);
    let logs = Arc::clone(&call.shard.for_backups);
    let segment_bytes = logs.geometry.segment_bytes;
    let is_there = place < u64::from(logs.places)
        && bytes > 0
        && offset.checked_add(bytes).is_some_and(|end| end <= segment_bytes)
        && [offset, bytes].iter().all(|number| number.is_multiple_of(BLOCK_BYTES as u64));
    let file = usize::try_from(log).ok().and_then(|log| logs.files.get(log)).filter(|_| is_there).ok_or(NO_RANGE)?;
    let bytes = usize::try_from(bytes).map_err(|_| NO_RANGE)?;
    call.write().bulk_head(bytes);
    call.done.file = Some(FileRange { file: file.clone(), offset: place * segment_bytes + offset, bytes });
    Ok(())
}

fn done(call: &mut Call<'_, '_>, log: &[u8], segment: &[u8]) -> Result {
    let (log, segment) = (number(log)?, number(segment)?);
    let log = u16::try_from(log).map_err(|_| NO_RANGE)?;
    let backup = held(call)?;
    // The backup keeps the numbers that it is told.
    let begin = segment.checked_mul(call.shard.for_backups.geometry.segment_bytes).ok_or(NO_RANGE)?;
    if backup.ends().get(usize::from(log)).is_none_or(|end| begin >= end.0) {
        return Err(NO_RANGE.into());
    }
    if !backup.copied(log, segment) {
        return Err(GIVEN_UP.into());
    }
    call.write().ok();
    Ok(())
}

fn end(call: &mut Call<'_, '_>) -> Result {
    held(call)?;
    call.session.backup = None;
    call.write().ok();
    Ok(())
}
