//! Descriptors that a shard is done with: closing the last one of a removed file frees its blocks, which may wait for a disk.

use std::sync::{Mutex, PoisonError};

use crate::descriptors::Gone;

/// What is closed together, on a lane.
const BATCH: usize = 64;

/// What is to be closed where that may wait: fewer than [`BATCH`] at a time.
#[derive(Debug, Default)]
pub(crate) struct Closing(Mutex<Vec<Gone>>);

impl Closing {
    /// Takes what is to be closed. Returns all there is when that is enough for a job of a lane.
    pub(crate) fn add(&self, gone: Gone) -> Option<Vec<Gone>> {
        if gone.is_empty() {
            return None;
        }
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push(gone);
        (waiting.len() >= BATCH).then(|| std::mem::take(&mut *waiting))
    }

    /// Closes all there is, after the last call of many.
    pub(crate) fn close_all(&self) {
        // The lock is free when they are dropped.
        let waiting = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(waiting);
    }
}
