//! Files with uncommitted data: written, but not yet durable.
//!
//! The kernel reports a failed write-back once for each open descriptor (errseq_t; since Linux 4.13), and clients share
//! descriptors. So each such file has an entry here, with a descriptor that was open before the first write and that nothing
//! else syncs. When its fsync fails, the verifier of the export changes, and every client writes its data again.

use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, Result};

use crate::handle::Handle;
use crate::lru::Lru;

/// Age in seconds at which data without a COMMIT is synced, so that its file can be closed.
const AGE_SECONDS: u64 = 30;
/// Seconds between two scans for removed files.
const LOOK_SECONDS: u64 = 10;

/// Write verifier of an export. It changes at each start of the server, and after each loss of data.
#[derive(Clone, Debug)]
pub(crate) struct Verifier(Arc<AtomicU64>);

impl Verifier {
    pub(crate) fn new(first: u64) -> Self {
        Self(Arc::new(AtomicU64::new(first)))
    }

    /// The verifier. Read it before the write whose reply carries it: a loss in between must show.
    pub(crate) fn get(&self) -> [u8; 8] {
        self.0.load(Ordering::SeqCst).to_be_bytes()
    }

    fn change(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Files with data that is not durable.
#[derive(Debug)]
pub(crate) struct Uncommitted {
    files: Mutex<Lru<Handle, Arc<File>>>,
    files_max: usize,
    /// Seconds since the start.
    seconds: AtomicU64,
    failures: AtomicU64,
}

/// A file with data that is not durable.
#[derive(Debug)]
struct File {
    /// Open since before the first of the writes.
    descriptor: Arc<OwnedFd>,
    verifier: Verifier,
    /// Time of its entry here, in seconds since the start.
    since: u64,
    writes: Mutex<Writes>,
    /// Held during a sync; the next holder may find that nothing is left to sync.
    synced: Mutex<Synced>,
}

#[derive(Debug, Default)]
struct Synced {
    /// Writes done when the last sync began.
    writes: u64,
    /// Writes covered by failed syncs, and the last error.
    lost: Option<(RangeInclusive<u64>, Errno)>,
}

#[derive(Debug, Default)]
struct Writes {
    under_way: u32,
    done: u64,
}

/// A write in progress.
#[derive(Debug)]
#[must_use = "the write is done when this is dropped"]
pub(crate) struct Writing(Arc<File>);

/// The writes to a file up to a certain one.
#[derive(Debug)]
pub(crate) struct Written {
    file: Arc<File>,
    /// Writes done by then.
    number: u64,
}

impl Writing {
    /// Ends the write.
    pub(crate) fn end(self) -> Written {
        let file = Arc::clone(&self.0);
        drop(self);
        Written::now(file)
    }
}

impl Written {
    fn now(file: Arc<File>) -> Self {
        let number = lock(&file.writes).done;
        Self { file, number }
    }
}

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

    /// Begins a write. Returns the oldest file, for the caller to sync, if there are more than `files_max`. `None`: there are
    /// twice as many, because their syncs are slow, and the caller must not write.
    pub(crate) fn writing(
        &self,
        handle: &Handle,
        descriptor: &Arc<OwnedFd>,
        verifier: &Verifier,
    ) -> Option<(Writing, Option<(Handle, Written)>)> {
        let mut files = lock(&self.files);
        let mut oldest = None;
        let known = files.get(handle).map(|file| Arc::clone(file));
        let file = match known {
            Some(file) => file,
            None if files.len() >= 2 * self.files_max => return None,
            None => {
                let file = Arc::new(File {
                    descriptor: Arc::clone(descriptor),
                    verifier: verifier.clone(),
                    since: self.seconds.load(Ordering::Relaxed),
                    writes: Mutex::default(),
                    synced: Mutex::default(),
                });
                files.insert(handle.clone(), Arc::clone(&file));
                oldest = if files.len() > self.files_max { files.pop_oldest() } else { None };
                file
            }
        };
        lock(&file.writes).under_way += 1;
        if let Some((oldest, file)) = &oldest {
            // A COMMIT must find the file until it is durable.
            files.insert(oldest.clone(), Arc::clone(file));
        }
        Some((Writing(file), oldest.map(|(handle, file)| (handle, Written::now(file)))))
    }

    /// Syncs the writes to a file that were done before the call, if they are not durable; ignores an unknown file. The
    /// verifier shows whether accepted data is lost.
    ///
    /// # Errors
    ///
    /// This call has detected the loss.
    pub(crate) fn sync(&self, handle: &Handle, sync: impl Fn(&OwnedFd) -> Result<()>) -> Result<()> {
        let Some(file) = lock(&self.files).get(handle).map(|file| Arc::clone(file)) else { return Ok(()) };
        self.sync_written(handle, &Written::now(file), sync)
    }

    /// Syncs the writes to a file up to `written`, if they are not durable.
    ///
    /// # Errors
    ///
    /// The data may be lost, whichever call has detected it.
    pub(crate) fn sync_written(
        &self,
        handle: &Handle,
        written: &Written,
        sync: impl Fn(&OwnedFd) -> Result<()>,
    ) -> Result<()> {
        let synced = self.sync_file(written, sync);
        self.drop_clean(handle, &written.file);
        synced
    }

    /// Drops the entry of a file whose data is all durable.
    fn drop_clean(&self, handle: &Handle, file: &Arc<File>) {
        let mut files = lock(&self.files);
        let is_same = files.get(handle).is_some_and(|known| Arc::ptr_eq(known, file));
        let is_clean = {
            let writes = lock(&file.writes);
            // The holder of the lock, in its sync, drops the entry itself.
            writes.under_way == 0 && file.synced.try_lock().is_ok_and(|synced| synced.writes == writes.done)
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

    /// Drops the entry of a deleted file; its unsynced data is gone.
    pub(crate) fn forget(&self, handle: &Handle) {
        let gone = lock(&self.files).remove(handle);
        drop(gone);
    }

    /// Called once a second: drops the entries of deleted files, and returns old files for the caller to sync.
    pub(crate) fn age(&self, is_gone: impl Fn(&OwnedFd) -> bool) -> Vec<(Handle, Written)> {
        let now = self.seconds.fetch_add(1, Ordering::Relaxed) + 1;
        let looks = now.is_multiple_of(LOOK_SECONDS);
        let mut looked_at = Vec::new();
        lock(&self.files).take_if(|handle, file| {
            // Every `AGE_SECONDS` only: a sync may be slow.
            let age = now - file.since;
            let is_old = age > 0 && age.is_multiple_of(AGE_SECONDS);
            if is_old || looks {
                looked_at.push((handle.clone(), Arc::clone(file), is_old));
            }
            false
        });
        // Outside of the lock: the file system may be slow.
        let mut due = Vec::new();
        for (handle, file, is_old) in looked_at {
            if is_gone(&file.descriptor) {
                self.forget(&handle);
            } else if is_old {
                due.push((handle, Written::now(file)));
            }
        }
        due
    }

    /// Plays a disk on which a sync of a file takes as long as `work`.
    #[cfg(test)]
    pub(crate) fn hang<T>(&self, handle: &Handle, work: impl FnOnce() -> T) -> T {
        let file = lock(&self.files).get(handle).map(|file| Arc::clone(file)).unwrap();
        let _synced = lock(&file.synced);
        work()
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.files).len()
    }

    fn sync_file(&self, written: &Written, sync: impl Fn(&OwnedFd) -> Result<()>) -> Result<()> {
        let file = &written.file;
        // One call at a time syncs: the second one must see that the verifier has changed.
        let mut synced = lock(&file.synced);
        if synced.writes >= written.number {
            return match &synced.lost {
                Some((lost, errno)) if lost.contains(&written.number) => Err(*errno),
                _ => Ok(()),
            };
        }
        let done = lock(&file.writes).done;
        let result = sync(&file.descriptor);
        if let Err(errno) = result {
            self.lost(&file.verifier);
            let first = synced.lost.as_ref().map_or(synced.writes + 1, |(lost, _)| *lost.start());
            synced.lost = Some((first..=done, errno));
        }
        // Lost data needs no sync either.
        synced.writes = done;
        result
    }

    /// Accepted data may be lost.
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

    fn write(uncommitted: &Uncommitted, handle: &Handle, fd: &Arc<OwnedFd>, verifier: &Verifier) -> Written {
        let (writing, oldest) = uncommitted.writing(handle, fd, verifier).unwrap();
        assert!(oldest.is_none());
        writing.end()
    }

    #[test]
    fn a_loss_changes_the_verifier_of_its_export_once() {
        let uncommitted = Uncommitted::new(10);
        let (fd, here, there) = (descriptor(), Verifier::new(5), Verifier::new(5));
        write(&uncommitted, &handle(1), &fd, &here);
        write(&uncommitted, &handle(2), &fd, &there);
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
    fn one_sync_serves_all_writes_before_it_and_its_failure_is_told_to_each() {
        let uncommitted = Uncommitted::new(10);
        let (file, fd, verifier) = (handle(1), descriptor(), Verifier::new(5));
        let synced = Cell::new(0);
        let counted = |result: Result<()>| {
            synced.set(synced.get() + 1);
            result
        };
        let [first, second] = [(); 2].map(|()| write(&uncommitted, &file, &fd, &verifier));
        assert_eq!(uncommitted.sync_written(&file, &second, |_| counted(Ok(()))), Ok(()));
        // The file's entry was removed; a new one takes its place.
        let third = write(&uncommitted, &file, &fd, &verifier);
        assert_eq!(uncommitted.sync_written(&file, &first, |_| counted(Ok(()))), Ok(()));
        assert_eq!((synced.get(), uncommitted.len()), (1, 1));
        let across = uncommitted.writing(&file, &fd, &verifier).unwrap().0;
        let fourth = write(&uncommitted, &file, &fd, &verifier);
        assert_eq!(uncommitted.sync_written(&file, &third, |_| counted(Err(Errno::IO))), Err(Errno::IO));
        let fifth = across.end();
        assert_eq!(uncommitted.sync_written(&file, &fifth, |_| counted(Ok(()))), Ok(()));
        assert_eq!(uncommitted.sync_written(&file, &fourth, |_| counted(Ok(()))), Err(Errno::IO), "found by another");
        assert_eq!((synced.get(), uncommitted.failures(), uncommitted.len()), (3, 1, 0));
    }

    #[test]
    fn the_oldest_of_too_many_files_is_to_be_synced_and_twice_as_many_are_the_end() {
        let uncommitted = Uncommitted::new(2);
        let (first, other, verifier) = (descriptor(), descriptor(), Verifier::new(5));
        for (number, descriptor) in [(1, &first), (1, &other), (2, &other)] {
            write(&uncommitted, &handle(number), descriptor, &verifier);
        }
        let mut due = Vec::new();
        for number in [3, 4] {
            let (writing, oldest) = uncommitted.writing(&handle(number), &other, &verifier).unwrap();
            drop(writing);
            due.push(oldest.unwrap());
        }
        assert!(uncommitted.writing(&handle(5), &other, &verifier).is_none());
        // A file with an entry can be written.
        write(&uncommitted, &handle(1), &other, &verifier);
        assert_eq!(due.iter().map(|(due, _)| due.clone()).collect::<Vec<_>>(), [handle(1), handle(2)]);
        let sync = |fd: &OwnedFd| {
            assert!(std::ptr::eq(fd, &*first), "its descriptor is the one from before the first write");
            Err(Errno::NOSPC)
        };
        assert_eq!(uncommitted.sync_written(&due[0].0, &due[0].1, sync), Err(Errno::NOSPC));
        assert_eq!((uncommitted.len(), verifier.get()), (3, 6_u64.to_be_bytes()));
        assert!(uncommitted.writing(&handle(5), &other, &verifier).is_some());
    }

    #[test]
    fn what_is_written_while_a_commit_waits_is_not_taken_for_committed() {
        let uncommitted = Uncommitted::new(2);
        let (file, fd, verifier) = (handle(1), descriptor(), Verifier::new(5));
        write(&uncommitted, &file, &fd, &verifier);
        // Begun and done during the sync; begun before it and done after it.
        let within = |_: &OwnedFd| {
            write(&uncommitted, &file, &fd, &verifier);
            Ok(())
        };
        assert_eq!(uncommitted.sync(&file, within), Ok(()));
        assert_eq!(uncommitted.len(), 1);
        let across = uncommitted.writing(&file, &fd, &verifier).unwrap().0;
        assert_eq!(uncommitted.sync(&file, well), Ok(()));
        drop(across);
        assert_eq!(uncommitted.len(), 1);
        assert_eq!(uncommitted.sync(&file, badly), Err(Errno::IO));
        assert_eq!(uncommitted.sync(&file, well), Ok(()));
        assert_eq!(uncommitted.len(), 0);
    }

    #[test]
    fn files_that_are_old_are_to_be_synced_and_those_that_are_gone_are_forgotten() {
        let uncommitted = Uncommitted::new(10);
        let (fd, verifier) = (descriptor(), Verifier::new(5));
        write(&uncommitted, &handle(1), &fd, &verifier);
        for _ in 1..AGE_SECONDS {
            assert!(uncommitted.age(|_| false).is_empty());
        }
        let across = uncommitted.writing(&handle(1), &fd, &verifier).unwrap().0;
        let due = uncommitted.age(|_| false);
        assert_eq!(due[0].0, handle(1));
        assert_eq!(uncommitted.sync_written(&due[0].0, &due[0].1, well), Ok(()));
        assert_eq!((due.len(), uncommitted.len()), (1, 1), "a write is under way");
        drop(across);
        let due: Vec<_> = (0..AGE_SECONDS).flat_map(|_| uncommitted.age(|_| false)).collect();
        assert_eq!(due.len(), 1, "not each second");
        assert_eq!(uncommitted.sync_written(&due[0].0, &due[0].1, well), Ok(()));
        assert_eq!(uncommitted.len(), 0);
        write(&uncommitted, &handle(1), &fd, &verifier);
        (0..LOOK_SECONDS).for_each(|_| assert!(uncommitted.age(|_| true).is_empty()));
        assert_eq!((uncommitted.failures(), uncommitted.len()), (0, 0));
    }
}
