//! Where inodes were seen, for servers that may not open kernel handles (no CAP_DAC_READ_SEARCH).
//!
//! Each inode is known by the folder and the name under which it was seen last, and by other names that it had before or that a link
//! of this server gave it. To open a handle its names are walked from the root, and what is found must have the handle's kernel
//! handle; anything else is stale. So a handle survives renames by this server, and the removal of that name if the object has one of
//! the others; not renames by local programs (until the object is looked up again), and not the end of the server.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{ErrorKind, FsError};
use crate::handle::Handle;
use crate::lru::Lru;

/// Folders between an object and the root, at most: each use of a handle opens them all.
const DEPTH_MAX: usize = 2048;
/// Other places of an object, at most: each is looked at before its handle is stale.
const OTHERS_MAX: usize = 4;

/// The table, bounded in entries; an entry takes about 250 bytes and its name.
#[derive(Debug)]
pub(crate) struct Table {
    places: Mutex<Places>,
    places_max: usize,
    /// Other places, the newest last, of objects that may not be found in theirs any more.
    others: Mutex<Lru<Handle, Vec<Place>>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    folder: Handle,
    name: CString,
}

/// Source of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A request that named the object.
    Lookup,
    /// It is there instead of in the place that is known.
    Moved,
    /// A listing of its folder, whose client may use none of the entries.
    Listing,
}

/// Places by object. Without the place of its folder an object has no names to the root, so only a place that no other one names
/// as its folder is evicted.
#[derive(Debug, Default)]
struct Places {
    /// Places that name no folder of another one, in the order of their last use.
    used: Lru<Handle, Place>,
    /// The same, of objects that were listed and not used since.
    listed: Lru<Handle, Place>,
    /// The folders that places name.
    folders: HashMap<Handle, Folder>,
    /// Places in `folders`.
    folder_places: usize,
}

#[derive(Debug, Default)]
struct Folder {
    /// Places that name this folder.
    children: usize,
    /// `None`: the root, or a folder whose own place is not known.
    place: Option<Place>,
}

impl Places {
    fn len(&self) -> usize {
        self.used.len() + self.listed.len() + self.folder_places
    }

    /// The place of an object, which counts as used.
    fn get(&mut self, object: &Handle) -> Option<&Place> {
        if let Some(place) = self.listed.remove(object) {
            self.used.insert(object.clone(), place);
        }
        if let Some(folder) = self.folders.get(object) {
            return folder.place.as_ref();
        }
        self.used.get(object).map(|place| &*place)
    }

    fn insert(&mut self, object: &Handle, place: Place, origin: Origin) {
        let folder = place.folder.clone();
        let mut is_moved = false;
        let old = if let Some(known) = self.folders.get_mut(object) {
            let old = known.place.replace(place);
            self.folder_places += usize::from(old.is_none());
            is_moved = old.as_ref().is_none_or(|old| old.folder != folder);
            old
        } else if origin == Origin::Listing && self.used.get(object).is_none() {
            self.listed.insert(object.clone(), place)
        } else {
            let listed = self.listed.remove(object);
            self.used.insert(object.clone(), place).or(listed)
        };
        // The new folder first: often it is the old one.
        self.add_child(folder.clone());
        if let Some(old) = old {
            self.remove_child(&old.folder);
        }
        if is_moved {
            self.break_ring(object, folder);
        }
    }

    /// Forgets a place between `folder` and the root if the new place of `object` has made them a ring, of which none would be evicted:
    /// a local program has moved that folder.
    fn break_ring(&mut self, object: &Handle, folder: Handle) {
        let mut at = folder;
        for depth in 1..=DEPTH_MAX {
            let Some(known) = self.folders.get_mut(&at) else { return };
            let Some(above) = known.place.as_ref().map(|place| place.folder.clone()) else { return };
            // No names lead from deeper places to the root either.
            if above == *object || depth == DEPTH_MAX {
                known.place = None;
                self.folder_places -= 1;
                return self.remove_child(&above);
            }
            at = above;
        }
    }

    fn add_child(&mut self, folder: Handle) {
        match self.folders.entry(folder) {
            Entry::Occupied(mut known) => known.get_mut().children += 1,
            Entry::Vacant(unknown) => {
                let place = self.used.remove(unknown.key()).or_else(|| self.listed.remove(unknown.key()));
                self.folder_places += usize::from(place.is_some());
                unknown.insert(Folder { children: 1, place });
            }
        }
    }

    fn remove_child(&mut self, folder: &Handle) {
        let Some(known) = self.folders.get_mut(folder) else { return };
        known.children -= 1;
        if known.children > 0 {
            return;
        }
        if let Some(place) = self.folders.remove(folder).and_then(|known| known.place) {
            self.folder_places -= 1;
            self.used.insert(folder.clone(), place);
        }
    }

    /// Removes the oldest place that no other one needs: of a listed object while there are more than `listed_min`. False: there is none.
    fn evict(&mut self, listed_min: usize) -> bool {
        let evicted = match self.listed.len() > listed_min {
            true => self.listed.pop_oldest(),
            false => self.used.pop_oldest().or_else(|| self.listed.pop_oldest()),
        };
        let Some((_, place)) = evicted else { return false };
        self.remove_child(&place.folder);
        true
    }
}

impl Table {
    pub(crate) fn new(places_max: usize) -> Self {
        Self { places: Mutex::default(), places_max: places_max.max(1), others: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An object was seen under this name. While the table is full, a listed object takes the place of one that was only listed, but for
    /// a quarter of the table.
    pub(crate) fn learn(&self, object: &Handle, folder: &Handle, name: CString, origin: Origin) {
        if object == folder {
            return;
        }
        let mut places = self.lock();
        let place = Place { folder: folder.clone(), name };
        let known = if origin == Origin::Lookup { places.get(object) } else { None };
        let other = known.filter(|known| **known != place).cloned();
        places.insert(object, place, origin);
        while places.len() > self.places_max && places.evict(self.places_max / 4) {}
        drop(places);
        if let Some(Place { folder, name }) = other {
            self.learn_other(object, &folder, name);
        }
    }

    /// The object has this name, too; it keeps the one that it has.
    pub(crate) fn learn_other(&self, object: &Handle, folder: &Handle, name: CString) {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = others.remove(object).unwrap_or_default();
        let place = Place { folder: folder.clone(), name };
        known.retain(|other| *other != place);
        known.drain(..(known.len() + 1).saturating_sub(OTHERS_MAX));
        known.push(place);
        others.insert(object.clone(), known);
        while others.len() > (self.places_max / 16).max(1) && others.pop_oldest().is_some() {}
    }

    /// Opens the object by the names that lead to it from `root`. `step` opens a name in a folder; `is_it` tells whether that is the
    /// object.
    pub(crate) fn open(
        &self,
        object: &Handle,
        root: (&Handle, &OwnedFd),
        step: impl Fn(&OwnedFd, &CString) -> Result<OwnedFd, FsError>,
        is_it: impl Fn(&OwnedFd) -> Result<bool, FsError>,
    ) -> Result<OwnedFd, FsError> {
        let walk = |names: Vec<CString>| {
            let start = root.1.as_fd().try_clone_to_owned().map_err(|_| FsError::new(ErrorKind::TryLater))?;
            let found = names.iter().rev().try_fold(start, |folder, name| step(&folder, name));
            match found {
                Ok(found) if is_it(&found)? => Ok(found),
                Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotDirectory) => Err(error),
                _ => Err(FsError::new(ErrorKind::Stale)),
            }
        };
        let is_stale = |found: &Result<_, FsError>| found.as_ref().is_err_and(|error| error.kind() == ErrorKind::Stale);
        let found = self.names(object, root.0).and_then(walk);
        if !is_stale(&found) {
            return found;
        }
        for Place { folder, name } in self.others_of(object).into_iter().rev() {
            let found = self.names(&folder, root.0).and_then(|above| walk([vec![name.clone()], above].concat()));
            if is_stale(&found) {
                continue;
            }
            if found.is_ok() {
                self.learn(object, &folder, name, Origin::Moved);
            }
            return found;
        }
        found
    }

    fn others_of(&self, object: &Handle) -> Vec<Place> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner).get(object).cloned().unwrap_or_default()
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
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    const ROOT: u8 = 0;

    fn handle(number: u8) -> Handle {
        Handle::new(1, &Key([3; 16]), &KernelHandle::new(1, &[number; 8]).unwrap()).unwrap()
    }

    fn name(text: &str) -> CString {
        CString::new(text).unwrap()
    }

    impl Table {
        fn put(&self, object: u8, folder: u8, origin: Origin) {
            self.learn(&handle(object), &handle(folder), name(&object.to_string()), origin);
        }

        fn knows(&self, object: u8) -> bool {
            self.names(&handle(object), &handle(ROOT)).is_ok()
        }

        /// The folder of each object with a place. The indexes are right.
        fn folders(&self) -> HashMap<Handle, Handle> {
            let mut places = self.lock();
            let mut found = HashMap::new();
            let (mut used, mut listed) = (Vec::new(), Vec::new());
            while let Some(leaf) = places.used.pop_oldest() {
                used.push(leaf);
            }
            while let Some(leaf) = places.listed.pop_oldest() {
                listed.push(leaf);
            }
            let leaves = used.iter().chain(&listed).map(|(object, place)| (object.clone(), place.folder.clone()));
            let folders = places.folders.iter().filter_map(|(object, folder)| Some((object, folder.place.as_ref()?)));
            for (object, folder) in leaves.chain(folders.map(|(object, place)| (object.clone(), place.folder.clone())))
            {
                assert_eq!(found.insert(object, folder), None, "each has one place");
            }
            used.into_iter().for_each(|(object, place)| drop(places.used.insert(object, place)));
            listed.into_iter().for_each(|(object, place)| drop(places.listed.insert(object, place)));
            let mut children: HashMap<&Handle, usize> = HashMap::new();
            found.values().for_each(|folder| *children.entry(folder).or_default() += 1);
            assert_eq!(children, places.folders.iter().map(|(object, folder)| (object, folder.children)).collect());
            assert_eq!(found.len(), places.len());
            assert!(found.len() <= self.places_max, "{} places", found.len());
            found
        }
    }

    #[test]
    fn names_lead_to_the_root_and_follow_a_renamed_folder() {
        let table = Table::new(10);
        table.learn(&handle(2), &handle(1), name("folder"), Origin::Lookup);
        table.learn(&handle(3), &handle(2), name("file"), Origin::Lookup);
        assert_eq!(table.names(&handle(3), &handle(1)).unwrap(), [name("file"), name("folder")]);
        table.learn(&handle(2), &handle(1), name("renamed"), Origin::Lookup);
        assert_eq!(table.names(&handle(3), &handle(1)).unwrap(), [name("file"), name("renamed")]);
        assert!(table.names(&handle(1), &handle(1)).unwrap().is_empty());
        assert_eq!(table.names(&handle(4), &handle(1)).unwrap_err().kind(), ErrorKind::Stale);
    }

    #[test]
    fn an_object_whose_name_was_removed_is_found_by_another_one() {
        let folder = ksf_test::Folder::new();
        let root = OwnedFd::from(std::fs::File::open(folder.path("")).unwrap());
        let inode = |name: &str| std::fs::metadata(folder.path(name)).unwrap().ino();
        std::fs::write(folder.path("made"), "").unwrap();
        let wanted = inode("made");
        let table = Table::new(64);
        let step = |folder: &OwnedFd, name: &CString| {
            let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::NOFOLLOW;
            Ok(rustix::fs::openat(folder, name.as_c_str(), flags, rustix::fs::Mode::empty())?)
        };
        let is_it = |object: &OwnedFd| Ok(rustix::fs::fstat(object)?.st_ino == wanted);
        let open = || table.open(&handle(1), (&handle(ROOT), &root), step, is_it).map_err(|error| error.kind());
        table.learn(&handle(1), &handle(ROOT), name("made"), Origin::Lookup);
        let link = |of: &str, to: &str| {
            std::fs::hard_link(folder.path(of), folder.path(to)).unwrap();
            table.learn_other(&handle(1), &handle(ROOT), name(to));
        };
        // The new name goes, as that of a lock file does; and the old one, which is another object's then.
        link("made", "lock");
        std::fs::remove_file(folder.path("lock")).unwrap();
        assert!(open().is_ok());
        link("made", "final");
        std::fs::write(folder.path("other"), "").unwrap();
        std::fs::rename(folder.path("other"), folder.path("made")).unwrap();
        assert!(open().is_ok());
        assert_eq!(table.names(&handle(1), &handle(ROOT)).unwrap(), [name("final")]);
        std::fs::rename(folder.path("final"), folder.path("kept")).unwrap();
        assert_eq!(open().unwrap_err(), ErrorKind::Stale);
        // Names that were looked up count, too, and each of them that is there.
        std::fs::remove_file(folder.path("made")).unwrap();
        std::fs::hard_link(folder.path("kept"), folder.path("made")).unwrap();
        for to in ["made", "second", "third"] {
            table.learn(&handle(1), &handle(ROOT), name(to), Origin::Lookup);
        }
        link("made", "fourth");
        std::fs::remove_file(folder.path("fourth")).unwrap();
        assert!(open().is_ok());
        assert_eq!(table.names(&handle(1), &handle(ROOT)).unwrap(), [name("made")]);
        // They are bounded.
        for number in 0..100 {
            table.learn_other(&handle(1), &handle(ROOT), name(&number.to_string()));
        }
        assert_eq!(table.others_of(&handle(1)).len(), OTHERS_MAX);
        for number in 2..100 {
            table.learn_other(&handle(number), &handle(ROOT), name("x"));
        }
        assert_eq!(table.others.lock().unwrap().len(), 4);
    }

    #[test]
    fn a_ring_ends_and_is_evicted() {
        let table = Table::new(2);
        table.put(2, 3, Origin::Lookup);
        table.put(3, 2, Origin::Lookup);
        assert!(!table.knows(2));
        table.put(4, ROOT, Origin::Lookup);
        table.put(5, ROOT, Origin::Lookup);
        assert!(table.knows(4) && table.knows(5));
        assert_eq!(table.folders().len(), 2);
    }

    #[test]
    fn a_folder_stays_known_while_a_place_in_it_is() {
        let table = Table::new(10);
        table.put(1, ROOT, Origin::Lookup);
        for file in 2..200 {
            table.put(file, 1, Origin::Lookup);
        }
        assert_eq!(table.folders().len(), 10);
        assert!((1..200).map(|object| table.knows(object)).eq((1..200).map(|object| object == 1 || object > 190)));
        for file in 200..220 {
            table.put(file, ROOT, Origin::Lookup);
        }
        assert!(!table.knows(1), "it goes after its last file");
    }

    #[test]
    fn listed_objects_evict_no_used_ones_and_are_evicted_after_a_while() {
        let table = Table::new(16);
        table.put(1, ROOT, Origin::Lookup);
        for file in 2..=10 {
            table.put(file, 1, Origin::Lookup);
        }
        table.put(11, 1, Origin::Listing);
        assert!(table.knows(11), "it is used now");
        for file in 20..200 {
            table.put(file, 1, Origin::Listing);
        }
        assert!((1..=11).all(|object| table.knows(object)));
        assert!((195..200).all(|file| table.lock().listed.remove(&handle(file)).is_some()), "the last ones are known");
        // Used ones leave a quarter to them.
        let table = Table::new(16);
        for file in 1..=16 {
            table.put(file, ROOT, Origin::Lookup);
        }
        for file in 20..100 {
            table.put(file, ROOT, Origin::Listing);
        }
        assert!((1..=16).map(|file| table.knows(file)).eq((1..=16).map(|file| file > 4)));
        assert!((96..100).all(|file| table.lock().listed.remove(&handle(file)).is_some()));
    }

    proptest! {
        /// A place is evicted before those of its folders, whatever is seen, listed and used.
        #[test]
        fn what_is_known_has_names_to_the_root(
            places_max in 1_usize..12,
            steps in proptest::collection::vec((1_u8..40, any::<prop::sample::Index>(), 0..3), 0..300),
        ) {
            let table = Table::new(places_max);
            let mut all: HashMap<u8, u8> = HashMap::new();
            for (object, at, how) in steps {
                let known: Vec<u8> = (1..object).filter(|object| table.folders().contains_key(&handle(*object))).collect();
                if how == 2 {
                    prop_assert_eq!(table.knows(object), table.folders().contains_key(&handle(object)));
                    continue;
                }
                // Folders have lower numbers, so there are no rings; a request names one that is known.
                let folder = if known.is_empty() { ROOT } else { *at.get(&known) };
                table.put(object, folder, if how == 0 { Origin::Lookup } else { Origin::Listing });
                all.insert(object, folder);
                for (object, folder) in table.folders() {
                    let number = (1..40).find(|number| handle(*number) == object).unwrap();
                    prop_assert_eq!(&folder, &handle(all[&number]));
                    prop_assert!(folder == handle(ROOT) || table.folders().contains_key(&folder));
                }
            }
        }

        /// Also when local programs move folders into each other.
        #[test]
        fn the_table_is_bounded(
            places_max in 1_usize..12,
            steps in proptest::collection::vec((0_u8..15, 0_u8..15, any::<bool>()), 0..200),
        ) {
            let table = Table::new(places_max);
            for (object, folder, is_listed) in steps {
                table.put(object, folder, if is_listed { Origin::Listing } else { Origin::Lookup });
                let folders = table.folders();
                for object in folders.keys() {
                    let above = std::iter::successors(Some(object), |object| folders.get(object));
                    prop_assert!(above.take(20).count() < 20, "a ring");
                }
            }
        }
    }
}
