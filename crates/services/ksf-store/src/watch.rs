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
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::store::lock;

/// Missing keys that are watched. The caller of each function but [`leave`](Self::leave) has the leaf of the key locked.
#[derive(Debug, Default)]
pub(crate) struct Absent {
    keys: Mutex<BTreeMap<Arc<[u8]>, Absence>>,
    /// Number of `keys`, changed under their lock. While it is 0, cleaning takes that lock for no tombstone.
    count: AtomicUsize,
}

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
        let mut keys = lock(&self.keys);
        keys.entry(Arc::clone(key)).or_default().watches += 1;
        self.count.store(keys.len(), Ordering::Relaxed);
    }

    /// Removes a watch.
    fn leave(&self, key: &[u8]) {
        let mut keys = lock(&self.keys);
        if let Some(absence) = keys.get_mut(key) {
            absence.watches -= 1;
            if absence.watches == 0 {
                keys.remove(key);
                self.count.store(keys.len(), Ordering::Relaxed);
            }
        }
    }

    /// Notes that the index loses the tombstone of a key.
    pub(crate) fn forget(&self, key: &[u8], version: u64) {
        // The lock of the leaf orders this after the watches of the key; those of other keys do not matter.
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(absence) = lock(&self.keys).get_mut(key) {
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
        let forgotten = |absent: &Arc<Absent>| lock(&absent.keys).get(&self.key).map_or(0, |absence| absence.forgotten);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgetting_takes_no_lock_while_nothing_is_watched() {
        let absent = Arc::new(Absent::default());
        let forget = |version| {
            // A second lock of this thread would never return.
            let _locked = lock(&absent.keys);
            absent.forget(b"key", version);
        };
        forget(1);
        let seen = Seen::new(b"key", None, 2, &absent);
        absent.forget(b"key", 3);
        assert_eq!(seen.forgotten(), 3);
        drop(seen);
        forget(4);
        assert_eq!(Seen::new(b"key", None, 5, &absent).forgotten(), 0);
    }
}
