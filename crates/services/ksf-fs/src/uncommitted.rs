//! What was written and is not on the medium yet.
//!
//! The kernel tells of a failed write-back once for each open descriptor (errseq_t; since Linux 4.13), and clients share
//! descriptors. So each file with such data is kept here with a descriptor that was open before the first write, and that nothing
//! else brings to the medium. When fsync fails on it, the verifier of the export changes, which has every client write its data again.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Result;

use crate::handle::Handle;
use crate::lru::Lru;

/// Seconds after which data that nobody commits is brought to the medium, so that the file need not be kept open.
const AGE_SECONDS: u64 = 30;
/// Seconds between two looks for files that are gone.
const LOOK_SECONDS: u64 = 10;

/// What WRITE and COMMIT tell of an export: another one at each start of the server, and after each loss.
#[derive(Clone, Debug)]
pub(crate) struct Verifier(Arc<AtomicU64>);

impl Verifier {
    pub(crate) fn new(first: u64) -> Self {
        Self(Arc::new(AtomicU64::new(first)))
    }

    /// Ask before the write that it is told of: a loss between both must show.
    pub(crate) fn get(&self) -> [u8; 8] {
        self.0.load(Ordering::SeqCst).to_be_bytes()
    }

    fn change(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Files with data that is not on the medium.
#[derive(Debug)]
pub(crate) struct Uncommitted {
    files: Mutex<Lru<Handle, Arc<File>>>,
    files_max: usize,
    /// Seconds since the start.
    seconds: AtomicU64,
    failures: AtomicU64,
}

/// One file.
#[derive(Debug)]
struct File {
    /// Open since before the first of the writes.
    descriptor: Arc<OwnedFd>,
    verifier: Verifier,
    /// When it came here.
    since: u64,
    writes: Mutex<Writes>,
    /// Writes that were done when the last sync began. Who waits for the medium holds it, and who comes meanwhile may find
    /// that nothing is left to do.
    synced: Mutex<u64>,
}

#[derive(Debug, Default)]
struct Writes {
    under_way: u32,
    done: u64,
}

/// A write under way.
#[derive(Debug)]
#[must_use = "the write is done when this is dropped"]
pub(crate) struct Writing(Arc<File>);

impl Drop for Writing {
    fn drop(&mut self) {
        let mut writes = lock(&self.0.writes);
        writes.under_way -= 1;
        writes.done += 1;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uncommitted {
    pub(crate) fn new(files_max: usize) -> Self {
        Self {
            files: Mutex::default(),
            files_max: files_max.max(1),
            seconds: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// A write begins that does not wait for the medium. Where there are too many files the oldest is brought there by `sync` first.
    pub(crate) fn writing(
        &self,
        handle: &Handle,
        descriptor: &Arc<OwnedFd>,
        verifier: &Verifier,
        sync: impl Fn(&OwnedFd) -> Result<()>,
    ) -> Writing {
        let mut files = lock(&self.files);
        let file = match files.get(handle) {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(File {
                    descriptor: Arc::clone(descriptor),
                    verifier: verifier.clone(),
                    since: self.seconds.load(Ordering::Relaxed),
                    writes: Mutex::default(),
                    synced: Mutex::default(),
                });
                files.insert(handle.clone(), Arc::clone(&file));
                file
            }
        };
        lock(&file.writes).under_way += 1;
        let oldest = if files.len() > self.files_max { files.pop_oldest() } else { None };
        if let Some((oldest, file)) = &oldest {
            // Until it is on the medium a commit must find it.
            files.insert(oldest.clone(), Arc::clone(file));
        }
        drop(files);
        if let Some((oldest, file)) = oldest {
            self.sync_file(&file, &sync).ok();
            self.drop_clean(&oldest, &file);
        }
        Writing(file)
    }

    /// Brings what was written to a file before the call to the medium, if it is not there; a file that is not known is left
    /// alone. The verifier tells whether data that was accepted is lost.
    ///
    /// # Errors
    ///
    /// This call found that it is.
    pub(crate) fn sync(&self, handle: &Handle, sync: impl Fn(&OwnedFd) -> Result<()>) -> Result<()> {
        let Some(file) = lock(&self.files).get(handle).map(|file| Arc::clone(file)) else { return Ok(()) };
        let synced = self.sync_file(&file, sync);
        self.drop_clean(handle, &file);
        synced
    }

    /// Forgets a file if all of it is on the medium.
    fn drop_clean(&self, handle: &Handle, file: &Arc<File>) {
        let mut files = lock(&self.files);
        let is_same = files.get(handle).is_some_and(|known| Arc::ptr_eq(known, file));
        let is_clean = {
            let writes = lock(&file.writes);
            // One who waits for the medium looks after it by itself.
            writes.under_way == 0 && file.synced.try_lock().is_ok_and(|synced| *synced == writes.done)
        };
        let gone = if is_same && is_clean { files.remove(handle) } else { None };
        drop(files);
        // Outside of the lock: closing may wait for a disk.
        drop(gone);
    }

    /// The descriptor of a file with unsynced data.
    pub(crate) fn descriptor(&self, handle: &Handle) -> Option<Arc<OwnedFd>> {
        lock(&self.files).get(handle).map(|file| Arc::clone(&file.descriptor))
    }

    /// The file is gone, and with it what was unsynced.
    pub(crate) fn forget(&self, handle: &Handle) {
        let gone = lock(&self.files).remove(handle);
        drop(gone);
    }

    /// To be called once a second: forgets files that are gone, and brings those to the medium that came here long ago.
    pub(crate) fn age(&self, is_gone: impl Fn(&OwnedFd) -> bool, sync: impl Fn(&OwnedFd) -> Result<()>) {
        let now = self.seconds.fetch_add(1, Ordering::Relaxed) + 1;
        let looks = now.is_multiple_of(LOOK_SECONDS);
        let mut due = Vec::new();
        lock(&self.files).take_if(|handle, file| {
            let is_old = now - file.since >= AGE_SECONDS;
            if is_old || looks {
                due.push((handle.clone(), Arc::clone(file), is_old));
            }
            false
        });
        // Outside of the lock: a file system may take its time.
        for (handle, file, is_old) in due {
            if is_gone(&file.descriptor) {
                self.forget(&handle);
            } else if is_old {
                self.sync_file(&file, &sync).ok();
                self.drop_clean(&handle, &file);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.files).len()
    }

    fn sync_file(&self, file: &File, sync: impl Fn(&OwnedFd) -> Result<()>) -> Result<()> {
        let wanted = lock(&file.writes).done;
        // One at a time waits for the medium: who comes second must see that the verifier has changed.
        let mut synced = lock(&file.synced);
        if *synced >= wanted {
            return Ok(());
        }
        let done = lock(&file.writes).done;
        let result = sync(&file.descriptor);
        if result.is_err() {
            self.lost(&file.verifier);
        }
        // What is lost is not to be synced either.
        *synced = done;
        result
    }

    /// Data that was accepted may be lost.
    pub(crate) fn lost(&self, verifier: &Verifier) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        verifier.change();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustix::io::Errno;

    use super::*;
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    fn handle(number: u8) -> Handle {
        Handle::new(1, &Key([3; 16]), &KernelHandle::new(1, &[number; 8]).unwrap()).unwrap()
    }

    fn descriptor() -> Arc<OwnedFd> {
        Arc::new(std::fs::File::open("/dev/null").unwrap().into())
    }

    fn well(_: &OwnedFd) -> Result<()> {
        Ok(())
    }

    fn badly(_: &OwnedFd) -> Result<()> {
        Err(Errno::IO)
    }

    #[test]
    fn a_loss_changes_the_verifier_of_its_export_once() {
        let uncommitted = Uncommitted::new(10);
        let (fd, here, there) = (descriptor(), Verifier::new(5), Verifier::new(5));
        drop(uncommitted.writing(&handle(1), &fd, &here, well));
        drop(uncommitted.writing(&handle(2), &fd, &there, well));
        assert_eq!(uncommitted.sync(&handle(1), badly), Err(Errno::IO));
        assert_eq!(uncommitted.len(), 1, "there is nothing to be kept of it");
        assert_eq!(here.get(), 6_u64.to_be_bytes());
        assert_eq!(uncommitted.sync(&handle(1), well), Ok(()), "the verifier tells the others");
        assert_eq!(uncommitted.sync(&handle(2), well), Ok(()));
        assert_eq!((here.get(), there.get()), (6_u64.to_be_bytes(), 5_u64.to_be_bytes()));
        assert_eq!((uncommitted.failures(), uncommitted.len()), (1, 0));
    }

    #[test]
    fn a_file_that_was_not_written_is_left_alone() {
        let uncommitted = Uncommitted::new(10);
        assert_eq!(uncommitted.sync(&handle(1), badly), Ok(()));
        assert_eq!(uncommitted.failures(), 0);
    }

    #[test]
    fn a_file_that_is_displaced_is_synced_with_its_first_descriptor() {
        let uncommitted = Uncommitted::new(2);
        let (first, other, verifier) = (descriptor(), descriptor(), Verifier::new(5));
        let synced = Cell::new(0);
        let sync = |fd: &OwnedFd| {
            assert!(std::ptr::eq(fd, &*first));
            synced.set(synced.get() + 1);
            Err(Errno::NOSPC)
        };
        for (number, descriptor) in [(1, &first), (1, &other), (2, &other)] {
            drop(uncommitted.writing(&handle(number), descriptor, &verifier, sync));
        }
        assert_eq!(synced.get(), 0);
        drop(uncommitted.writing(&handle(3), &other, &verifier, sync));
        assert_eq!((synced.get(), uncommitted.len()), (1, 2));
        assert_eq!(verifier.get(), 6_u64.to_be_bytes());
    }

    #[test]
    fn what_is_written_while_a_commit_waits_is_not_taken_for_committed() {
        let uncommitted = Uncommitted::new(2);
        let (file, fd, verifier) = (handle(1), descriptor(), Verifier::new(5));
        let write = || uncommitted.writing(&file, &fd, &verifier, well);
        drop(write());
        // Begun and done during the sync; begun before it and done after it.
        let within = |_: &OwnedFd| {
            drop(write());
            Ok(())
        };
        assert_eq!(uncommitted.sync(&file, within), Ok(()));
        assert_eq!(uncommitted.len(), 1);
        let across = write();
        assert_eq!(uncommitted.sync(&file, well), Ok(()));
        drop(across);
        assert_eq!(uncommitted.len(), 1);
        assert_eq!(uncommitted.sync(&file, badly), Err(Errno::IO));
        assert_eq!(uncommitted.sync(&file, well), Ok(()));
        assert_eq!(uncommitted.len(), 0);
    }

    #[test]
    fn files_are_brought_to_the_medium_when_they_are_old_and_forgotten_when_they_are_gone() {
        let uncommitted = Uncommitted::new(10);
        let (fd, verifier) = (descriptor(), Verifier::new(5));
        let synced = Cell::new(0);
        let sync = |_: &OwnedFd| {
            synced.set(synced.get() + 1);
            Ok(())
        };
        drop(uncommitted.writing(&handle(1), &fd, &verifier, well));
        (1..AGE_SECONDS).for_each(|_| uncommitted.age(|_| false, sync));
        assert_eq!((synced.get(), uncommitted.len()), (0, 1));
        let across = uncommitted.writing(&handle(1), &fd, &verifier, well);
        uncommitted.age(|_| false, sync);
        assert_eq!((synced.get(), uncommitted.len()), (1, 1), "a write is under way");
        drop(across);
        uncommitted.age(|_| false, sync);
        assert_eq!((synced.get(), uncommitted.len()), (2, 0));
        drop(uncommitted.writing(&handle(1), &fd, &verifier, well));
        (0..LOOK_SECONDS).for_each(|_| uncommitted.age(|_| true, badly));
        assert_eq!((uncommitted.failures(), uncommitted.len()), (0, 0));
    }
}
