//! Watched keys, and what becomes of missing ones among them when their tombstones are removed.
//!
//! ```text
//!   see a missing key ─► Absent: key, watches ◄─ version of its tombstone ─ cleaning removes that from the index
//!                                  │
//!                                  └─► has_changed: the version of the last write, of the index or, without an entry, from here
//! ```
//!
//! A write looks nothing up here: the index keeps its version until cleaning removes the last trace of the key.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::store::lock;

/// Missing keys that are watched. A caller has the leaf of the key locked, but to [leave](Self::leave).
#[derive(Debug, Default)]
pub(crate) struct Absent(Mutex<BTreeMap<Arc<[u8]>, Absence>>);

#[derive(Debug, Default)]
struct Absence {
    /// Number of watches.
    watches: usize,
    /// Version of the last tombstone that was removed since the first watch; 0 without one.
    forgotten: u64,
}

impl Absent {
    /// Adds a watch.
    fn join(&self, key: &Arc<[u8]>) {
        lock(&self.0).entry(Arc::clone(key)).or_default().watches += 1;
    }

    /// Removes a watch.
    fn leave(&self, key: &[u8]) {
        let mut absent = lock(&self.0);
        if let Some(absence) = absent.get_mut(key) {
            absence.watches -= 1;
            if absence.watches == 0 {
                absent.remove(key);
            }
        }
    }

    /// Notes that the index loses the tombstone of a key.
    pub(crate) fn forget(&self, key: &[u8], version: u64) {
        if let Some(absence) = lock(&self.0).get_mut(key) {
            absence.forgotten = absence.forgotten.max(version);
        }
    }
}

/// A key as it was seen. One that was missing is registered with the store for as long as this value lives.
#[derive(Debug)]
pub struct Seen {
    pub(crate) key: Arc<[u8]>,
    /// The version of its last write; `None`: it was missing.
    pub(crate) version: Option<u64>,
    /// What is written later has this version, or a larger one.
    pub(crate) before: u64,
    /// The register of a missing key.
    absent: Option<Arc<Absent>>,
}

impl Seen {
    pub(crate) fn new(key: &[u8], version: Option<u64>, before: u64, absent: &Arc<Absent>) -> Self {
        let key = Arc::from(key);
        let absent = version.is_none().then(|| Arc::clone(absent));
        if let Some(absent) = &absent {
            absent.join(&key);
        }
        Self { key, version, before, absent }
    }

    /// The key.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Version of the last tombstone of the missing key that the index has lost.
    pub(crate) fn forgotten(&self) -> u64 {
        let forgotten = |absent: &Arc<Absent>| lock(&absent.0).get(&self.key).map_or(0, |absence| absence.forgotten);
        self.absent.as_ref().map_or(0, forgotten)
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        if let Some(absent) = &self.absent {
            absent.leave(&self.key);
        }
    }
}
