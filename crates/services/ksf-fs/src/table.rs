//! Where inodes were seen, for servers that may not open kernel handles (no CAP_DAC_READ_SEARCH).
//!
//! Each inode is known by the folder and the name under which it was seen last. To open a handle its names are walked from the
//! root, and what is found must have the handle's kernel handle; anything else is stale. So a handle survives renames by this
//! server, not renames by local programs (until the object is looked up again), and not the end of the server.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{ErrorKind, FsError};
use crate::handle::Handle;
use crate::lru::Lru;

/// Folders between an object and the root, at most: each use of a handle opens them all.
const DEPTH_MAX: usize = 2048;

/// The table, bounded in entries; an entry takes about 250 bytes and its name.
#[derive(Debug)]
pub(crate) struct Table {
    places: Mutex<Lru<Handle, Place>>,
    places_max: usize,
}

#[derive(Clone, Debug)]
struct Place {
    folder: Handle,
    name: CString,
}

impl Table {
    pub(crate) fn new(places_max: usize) -> Self {
        Self { places: Mutex::default(), places_max: places_max.max(1) }
    }

    fn lock(&self) -> MutexGuard<'_, Lru<Handle, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An object was seen under this name.
    pub(crate) fn learn(&self, object: &Handle, folder: &Handle, name: CString) {
        let mut places = self.lock();
        places.insert(object.clone(), Place { folder: folder.clone(), name });
        while places.len() > self.places_max {
            places.pop_oldest();
        }
    }

    /// Opens the object by the names that lead to it from `root`. `step` opens a name in a folder.
    pub(crate) fn open(
        &self,
        object: &Handle,
        root: (&Handle, &OwnedFd),
        step: impl Fn(&OwnedFd, &CString) -> Result<OwnedFd, FsError>,
    ) -> Result<OwnedFd, FsError> {
        let names = self.names(object, root.0)?;
        let clone = || root.1.as_fd().try_clone_to_owned().map_err(|_| FsError::new(ErrorKind::TryLater));
        names.iter().rev().try_fold(clone()?, |folder, name| match step(&folder, name) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => {
                Err(ErrorKind::Stale.into())
            }
            other => other,
        })
    }

    /// The names from the object up to the root.
    fn names(&self, object: &Handle, root: &Handle) -> Result<Vec<CString>, FsError> {
        let mut places = self.lock();
        let mut names = Vec::new();
        let mut at = object.clone();
        while at != *root {
            let place = places.get(&at).filter(|_| names.len() < DEPTH_MAX).ok_or(ErrorKind::Stale)?;
            names.push(place.name.clone());
            at = place.folder.clone();
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    fn handle(number: u8) -> Handle {
        Handle::new(1, &Key([3; 16]), &KernelHandle::new(1, &[number; 8]).unwrap()).unwrap()
    }

    fn name(text: &str) -> CString {
        CString::new(text).unwrap()
    }

    #[test]
    fn names_lead_to_the_root_and_follow_a_renamed_folder() {
        let table = Table::new(10);
        table.learn(&handle(2), &handle(1), name("folder"));
        table.learn(&handle(3), &handle(2), name("file"));
        assert_eq!(table.names(&handle(3), &handle(1)).unwrap(), [name("file"), name("folder")]);
        table.learn(&handle(2), &handle(1), name("renamed"));
        assert_eq!(table.names(&handle(3), &handle(1)).unwrap(), [name("file"), name("renamed")]);
        assert!(table.names(&handle(1), &handle(1)).unwrap().is_empty());
        assert_eq!(table.names(&handle(4), &handle(1)).unwrap_err().kind(), ErrorKind::Stale);
    }

    #[test]
    fn the_table_is_bounded_and_a_ring_ends() {
        let table = Table::new(2);
        table.learn(&handle(2), &handle(3), name("a"));
        table.learn(&handle(3), &handle(2), name("b"));
        assert_eq!(table.names(&handle(2), &handle(1)).unwrap_err().kind(), ErrorKind::Stale);
        table.learn(&handle(4), &handle(1), name("c"));
        assert_eq!(table.lock().len(), 2);
    }
}
