//! Index of a connection's fids by the names under which they were found.
//!
//! A rename changes the name once for all fids that were found under it. Fids of two names that become one are moved, the fewer to the
//! more: per Twalk, renames move at most log2(fids) of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ksf_fs::Handle;

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) dir: Handle,
    pub(crate) name: Box<[u8]>,
}

/// Key of a name in [`Names`]; renames keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NameId(u64);

#[derive(Debug)]
struct Name {
    place: Arc<Place>,
    /// Number of its fids, at least 1.
    fids: usize,
}

/// The index. Its size is bounded by the number of fids; trees free the memory of removed entries.
#[derive(Debug, Default)]
pub(crate) struct Names {
    names: BTreeMap<NameId, Name>,
    ids: BTreeMap<Arc<Place>, NameId>,
    fids: BTreeSet<(NameId, u32)>,
    last_id: u64,
}

impl Names {
    pub(crate) fn place(&self, id: NameId) -> Option<&Arc<Place>> {
        Some(&self.names.get(&id)?.place)
    }

    /// Adds a fid that was found at `place`.
    pub(crate) fn add(&mut self, place: Place, fid: u32) -> NameId {
        let id = self.ids.get(&place).copied().unwrap_or_else(|| {
            self.last_id += 1;
            let (id, place) = (NameId(self.last_id), Arc::new(place));
            self.ids.insert(Arc::clone(&place), id);
            self.names.insert(id, Name { place, fids: 0 });
            id
        });
        self.join(id, fid);
        id
    }

    /// Adds a fid to a name that has others.
    pub(crate) fn join(&mut self, id: NameId, fid: u32) {
        if let Some(name) = self.names.get_mut(&id) {
            name.fids += usize::from(self.fids.insert((id, fid)));
        }
    }

    /// Removes a fid, and its name with the last one.
    pub(crate) fn remove(&mut self, id: NameId, fid: u32) {
        let Some(name) = self.names.get_mut(&id) else { return };
        name.fids -= usize::from(self.fids.remove(&(id, fid)));
        if name.fids == 0 {
            self.ids.remove(&name.place);
            self.names.remove(&id);
        }
    }

    /// Renames `from` to `to`. Returns the fids that have another key now, and this key.
    pub(crate) fn rename(&mut self, from: &Place, to: Place) -> Option<(Vec<u32>, NameId)> {
        let id = self.ids.remove(from)?;
        let Some(&other) = self.ids.get(&to) else {
            let to = Arc::new(to);
            self.names.get_mut(&id)?.place = Arc::clone(&to);
            self.ids.insert(to, id);
            return None;
        };
        let place = Arc::clone(self.place(other)?);
        let (few, many) =
            if self.names.get(&id)?.fids < self.names.get(&other)?.fids { (id, other) } else { (other, id) };
        self.ids.insert(Arc::clone(&place), many);
        self.names.remove(&few);
        let moved: Vec<u32> = self.fids.range((few, 0)..=(few, u32::MAX)).map(|(_, fid)| *fid).collect();
        for fid in &moved {
            self.fids.remove(&(few, *fid));
            self.fids.insert((many, *fid));
        }
        let name = self.names.get_mut(&many)?;
        name.fids += moved.len();
        name.place = place;
        Some((moved, many))
    }
}
