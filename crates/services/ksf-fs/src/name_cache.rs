//! Names of small folders that listings read, so that the next listing asks the kernel for the attributes of entries alone.
//!
//! The names hold while the folder's ctime is the same: each change of an entry changes it. Two changes may have one ctime if they
//! are a step of the kernel's clock apart ([`is_settled_at`](crate::rights::is_settled_at)). Therefore names are only kept of a
//! folder whose ctime was settled before they were read.
//!
//! The cache is emptied each second, and names that were begun to be read before then are not kept. That bounds its harm where names
//! change without the ctime: after the clock went back, and when the key of an encrypted folder is added.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::attr::{FileType, Time};
use crate::handle::Handle;

/// Bytes of a folder's names, and of what is kept with them, at most.
const FOLDER_BYTES_MAX: usize = 16 << 10;
/// Folders at most, of all exports: 4 MB in all.
const FOLDERS_MAX: usize = 256;

/// An entry of a folder as the kernel returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawEntry<'a> {
    pub(crate) name: &'a CStr,
    pub(crate) inode: u64,
    /// Where a listing goes on behind this entry.
    pub(crate) cookie: u64,
    pub(crate) file_type: Option<FileType>,
}

/// All entries of a folder, in the order of the file system.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// One behind the other, each with its NUL.
    text: Vec<u8>,
    entries: Vec<Kept>,
}

#[derive(Debug)]
struct Kept {
    inode: u64,
    cookie: u64,
    file_type: Option<FileType>,
    /// Of its name in the text, behind the NUL.
    end: usize,
}

impl Names {
    /// Adds the next entry. False: the folder is too large for the cache, or two entries have one cookie (ext4, names of one hash):
    /// where a listing goes on then is the file system's to say.
    pub(crate) fn push(&mut self, entry: &RawEntry<'_>) -> bool {
        if self.entries.last().is_some_and(|last| last.cookie == entry.cookie) {
            return false;
        }
        self.text.extend_from_slice(entry.name.to_bytes_with_nul());
        let RawEntry { inode, cookie, file_type, .. } = *entry;
        self.entries.push(Kept { inode, cookie, file_type, end: self.text.len() });
        self.text.len() + self.entries.len() * size_of::<Kept>() <= FOLDER_BYTES_MAX
    }

    /// The entries behind the one with this cookie, all with 0. `None`: there is no such entry.
    pub(crate) fn behind(&self, cookie: u64) -> Option<impl Iterator<Item = RawEntry<'_>>> {
        let first = match cookie {
            0 => 0,
            cookie => self.entries.iter().position(|entry| entry.cookie == cookie)? + 1,
        };
        let mut begin = first.checked_sub(1).map_or(0, |before| self.entries[before].end);
        Some(self.entries[first..].iter().map(move |&Kept { inode, cookie, file_type, end }| {
            let text = &self.text[std::mem::replace(&mut begin, end)..end];
            RawEntry { name: CStr::from_bytes_with_nul(text).unwrap_or_default(), inode, cookie, file_type }
        }))
    }
}

/// The names of a folder with its ctime.
type Known = (Time, Arc<Names>);

/// The cache, bounded in folders and bytes.
#[derive(Debug, Default)]
pub(crate) struct NameCache(Mutex<Folders>);

#[derive(Debug, Default)]
struct Folders {
    known: HashMap<Handle, Known>,
    /// Grows when the cache is emptied.
    period: u64,
}

impl NameCache {
    /// `ctime`: the folder's current one.
    pub(crate) fn get(&self, folder: &Handle, ctime: Time) -> Option<Arc<Names>> {
        self.lock().known.get(folder).filter(|(known, _)| *known == ctime).map(|(_, names)| Arc::clone(names))
    }

    /// To be asked for before names are read.
    pub(crate) fn period(&self) -> u64 {
        self.lock().period
    }

    /// Keeps the names of a folder that were read after its ctime was settled, if this is still the period in which that was begun. A
    /// cache without room starts anew.
    pub(crate) fn keep(&self, folder: &Handle, ctime: Time, period: u64, mut names: Names) {
        names.text.shrink_to_fit();
        names.entries.shrink_to_fit();
        let mut folders = self.lock();
        if folders.period != period {
            return;
        }
        if folders.known.len() == FOLDERS_MAX {
            folders.known.clear();
        }
        folders.known.insert(folder.clone(), (ctime, Arc::new(names)));
    }

    /// To be called once a second.
    pub(crate) fn expire(&self) {
        let mut folders = self.lock();
        folders.period += 1;
        let gone = std::mem::take(&mut folders.known);
        drop(folders);
        drop(gone);
    }

    fn lock(&self) -> MutexGuard<'_, Folders> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    fn handle(number: u32) -> Handle {
        Handle::new(1, &Key([3; 16]), &KernelHandle::new(1, &number.to_be_bytes()).unwrap()).unwrap()
    }

    fn entry(name: &CStr, number: u64) -> RawEntry<'_> {
        RawEntry { name, inode: number, cookie: number * 10, file_type: Some(FileType::Regular) }
    }

    #[test]
    fn a_listing_goes_on_behind_each_entry() {
        let entries = [entry(c"a", 1), entry(c"bcd", 2), entry(c"ef", 3)];
        let mut names = Names::default();
        assert!(entries.iter().all(|entry| names.push(entry)));
        let behind = |cookie| names.behind(cookie).map(Iterator::collect::<Vec<_>>);
        for (at, cookie) in [0, 10, 20, 30].into_iter().enumerate() {
            assert_eq!(behind(cookie).unwrap(), entries[at..]);
        }
        assert_eq!(behind(15), None);
        assert!(!names.push(&RawEntry { name: c"g", ..entries[2] }), "its cookie is that of the one before");
    }

    #[test]
    fn names_are_those_of_a_folder_with_this_ctime_until_the_second_ends() {
        let cache = NameCache::default();
        let time = |seconds| Time { seconds, nanos: 1 };
        let period = cache.period();
        cache.keep(&handle(1), time(5), period, Names::default());
        assert!(cache.get(&handle(1), time(5)).is_some());
        assert!(cache.get(&handle(1), time(6)).is_none() && cache.get(&handle(2), time(5)).is_none());
        cache.expire();
        assert!(cache.get(&handle(1), time(5)).is_none());
        cache.keep(&handle(1), time(5), period, Names::default());
        assert!(cache.get(&handle(1), time(5)).is_none(), "they were begun to be read before");
    }

    #[test]
    fn there_are_never_more_than_the_bounds() {
        let cache = NameCache::default();
        for number in 0..=FOLDERS_MAX as u32 {
            cache.keep(&handle(number), Time::default(), cache.period(), Names::default());
            assert!(cache.lock().known.len() <= FOLDERS_MAX && cache.get(&handle(number), Time::default()).is_some());
        }
        let (mut names, long) = (Names::default(), [b'n'; 255]);
        let long = std::ffi::CString::new(long).unwrap();
        let count = (1..1000).take_while(|number| names.push(&entry(&long, *number))).count();
        assert!((50..FOLDER_BYTES_MAX / 256).contains(&count), "{count}");
    }
}
