//! Files with uncommitted data: written, but not yet durable.
//!
//! The kernel reports a failed write-back once for each open descriptor (errseq_t; since Linux 4.13), and clients share
//! descriptors. So each such file has an entry here, with a descriptor that was open before the first write and that nothing
//! else syncs. When its fsync fails, the verifier of the export changes, and every client writes its data again.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, Result};

use crate::account::Account;
use crate::handle::Handle;
use crate::lru::Lru;
use crate::shares::{Shares, Slot};

/// Age in seconds at which data without a COMMIT is synced, so that its file can be closed.
const AGE_SECONDS: u64 = 30;

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
    files: Mutex<Files>,
    shares: Arc<Shares>,
    /// Seconds since the start.
    seconds: AtomicU64,
    failures: AtomicU64,
}

#[derive(Debug, Default)]
struct Files {
    known: HashMap<Handle, Arc<File>>,
    /// Files with a slot, by the number of its account and their export, in the order of their last use.
    by_owner: HashMap<(u64, u32), Lru<Handle, ()>>,
}

fn owner(slot: &Slot, handle: &Handle) -> (u64, u32) {
    (slot.account().number(), handle.export_id())
}

impl Files {
    /// The file, which counts as used.
    fn get(&mut self, handle: &Handle) -> Option<Arc<File>> {
        let file = self.known.get(handle)?;
        if let Some(slot) = &file.slot
            && let Some(files) = self.by_owner.get_mut(&owner(slot, handle))
        {
            files.get(handle);
        }
        Some(Arc::clone(file))
    }

    /// Inserts a new file. Returns the oldest other one of its connection in the same export, whose disk alone the caller may wait for, if
    /// slots are getting scarce for the connection.
    fn insert(&mut self, handle: &Handle, file: &Arc<File>) -> Option<(Handle, Arc<File>)> {
        self.known.insert(handle.clone(), Arc::clone(file));
        let slot = file.slot.as_ref()?;
        let files = self.by_owner.entry(owner(slot, handle)).or_default();
        let oldest = if slot.is_late() { files.pop_oldest() } else { None };
        files.insert(handle.clone(), ());
        let (oldest, ()) = oldest?;
        // It stays known: a COMMIT must find the file until it is durable. The next one to be synced is another.
        files.insert(oldest.clone(), ());
        let file = Arc::clone(self.known.get(&oldest)?);
        Some((oldest, file))
    }

    fn remove(&mut self, handle: &Handle) -> Option<Arc<File>> {
        let file = self.known.remove(handle)?;
        if let Some(slot) = &file.slot
            && let Entry::Occupied(mut files) = self.by_owner.entry(owner(slot, handle))
        {
            files.get_mut().remove(handle);
            if files.get().len() == 0 {
                files.remove();
            }
        }
        Some(file)
    }
}

/// A file with data that is not durable.
#[derive(Debug)]
struct File {
    /// `None`: its connection had no slot left, so each of its writes is synced by the thread that makes it.
    slot: Option<Slot>,
    /// Open since before the first of the writes.
    descriptor: Arc<OwnedFd>,
    verifier: Verifier,
    /// Time of its entry here, in seconds since the start.
    since: u64,
    /// It was returned to be synced for its age, and no sync of it has begun since.
    is_due: AtomicBool,
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

    /// True if the writes must be synced before their thread does anything else: [`Uncommitted::writing`].
    pub(crate) fn has_no_slot(&self) -> bool {
        self.file.slot.is_none()
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
            shares: Arc::new(Shares::new(files_max, Account::uncommitted_files)),
            seconds: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Begins a write of a connection. Returns the connection's oldest file in the export, for the caller to sync, if slots are getting
    /// scarce for the connection.
    ///
    /// `None`: a slot is needed and the connection has its share, so the caller must not write. A caller with `syncs_itself` needs
    /// none: it syncs the write before it does anything else if [`Written::has_no_slot`], so there are at most as many such files as
    /// such threads.
    pub(crate) fn writing(
        &self,
        handle: &Handle,
        descriptor: &Arc<OwnedFd>,
        verifier: &Verifier,
        account: &Account,
        syncs_itself: bool,
    ) -> Option<(Writing, Option<(Handle, Written)>)> {
        let mut files = lock(&self.files);
        let (file, oldest) = match files.get(handle) {
            Some(file) => (file, None),
            None => {
                let slot = self.shares.take(account);
                if slot.is_none() && !syncs_itself {
                    return None;
                }
                let file = Arc::new(File {
                    slot,
                    descriptor: Arc::clone(descriptor),
                    verifier: verifier.clone(),
                    since: self.seconds.load(Ordering::Relaxed),
                    is_due: AtomicBool::new(false),
                    writes: Mutex::default(),
                    synced: Mutex::default(),
                });
                let oldest = files.insert(handle, &file);
                (file, oldest)
            }
        };
        if file.slot.is_none() && !syncs_itself {
            return None;
        }
        lock(&file.writes).under_way += 1;
        Some((Writing(file), oldest.map(|(handle, file)| (handle, Written::now(file)))))
    }

    /// Syncs the writes to a file that were done before the call, if they are not durable; ignores an unknown file. The
    /// verifier shows whether accepted data is lost.
    ///
    /// # Errors
    ///
    /// This call has detected the loss.
    pub(crate) fn sync(&self, handle: &Handle, sync: impl Fn(&OwnedFd) -> Result<()>) -> Result<()> {
        let Some(file) = lock(&self.files).get(handle) else { return Ok(()) };
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
        written.file.is_due.store(false, Ordering::Relaxed);
        let synced = self.sync_file(written, sync);
        self.drop_clean(handle, &written.file);
        synced
    }

    /// Drops the entry of a file whose data is all durable.
    fn drop_clean(&self, handle: &Handle, file: &Arc<File>) {
        let mut files = lock(&self.files);
        let is_same = files.known.get(handle).is_some_and(|known| Arc::ptr_eq(known, file));
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

    /// Called once a second: returns old files for the caller to sync, each once until that begins. So a file on a disk that hangs has one
    /// sync in progress and one that waits for it ([`Syncs`](crate::syncs::Syncs)), which takes no thread. Makes no system call.
    pub(crate) fn age(&self) -> Vec<(Handle, Written)> {
        let now = self.seconds.fetch_add(1, Ordering::Relaxed) + 1;
        // Every `AGE_SECONDS` only: a sync may be slow.
        let is_old = |file: &File| now > file.since && (now - file.since).is_multiple_of(AGE_SECONDS);
        let files = lock(&self.files);
        let old = files.known.iter().filter(|(_, file)| is_old(file) && !file.is_due.swap(true, Ordering::Relaxed));
        old.map(|(handle, file)| (handle.clone(), Written::now(Arc::clone(file)))).collect()
    }

    /// Drops the entries of an export's deleted files. To be called by a thread of the export: the file system may be slow.
    pub(crate) fn forget_gone(&self, export_id: u32, is_gone: impl Fn(&OwnedFd) -> bool) {
        let files = lock(&self.files);
        let of_export = files.known.iter().filter(|(handle, _)| handle.export_id() == export_id);
        let looked_at: Vec<_> = of_export.map(|(handle, file)| (handle.clone(), Arc::clone(file))).collect();
        drop(files);
        let gone = looked_at.into_iter().filter(|(_, file)| is_gone(&file.descriptor));
        gone.for_each(|(handle, _)| self.forget(&handle));
    }

    /// Plays a disk on which a sync of a file takes as long as `work`.
    #[cfg(test)]
    pub(crate) fn hang<T>(&self, handle: &Handle, work: impl FnOnce() -> T) -> T {
        let file = lock(&self.files).get(handle).unwrap();
        let _synced = lock(&file.synced);
        work()
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.files).known.len()
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
            self.failures.fetch_add(1, Ordering::Relaxed);
            file.verifier.change();
            let first = synced.lost.as_ref().map_or(synced.writes + 1, |(lost, _)| *lost.start());
            synced.lost = Some((first..=done, errno));
        }
        // Lost data needs no sync either.
        synced.writes = done;
        result
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

    fn writing(uncommitted: &Uncommitted, handle: &Handle, fd: &Arc<OwnedFd>, verifier: &Verifier) -> Writing {
        let (writing, oldest) = uncommitted.writing(handle, fd, verifier, &Account::default(), false).unwrap();
        assert!(oldest.is_none());
        writing
    }

    fn write(uncommitted: &Uncommitted, handle: &Handle, fd: &Arc<OwnedFd>, verifier: &Verifier) -> Written {
        writing(uncommitted, handle, fd, verifier).end()
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
        let across = writing(&uncommitted, &file, &fd, &verifier);
        let fourth = write(&uncommitted, &file, &fd, &verifier);
        assert_eq!(uncommitted.sync_written(&file, &third, |_| counted(Err(Errno::IO))), Err(Errno::IO));
        let fifth = across.end();
        assert_eq!(uncommitted.sync_written(&file, &fifth, |_| counted(Ok(()))), Ok(()));
        assert_eq!(uncommitted.sync_written(&file, &fourth, |_| counted(Ok(()))), Err(Errno::IO), "found by another");
        assert_eq!((synced.get(), uncommitted.failures(), uncommitted.len()), (3, 1, 0));
    }

    #[test]
    fn a_connection_syncs_its_oldest_files_before_its_share_is_taken_and_others_have_theirs() {
        // Of 20 files 10 are the reserve. Of the others one connection gets 5.
        let uncommitted = Uncommitted::new(20);
        let (first, fd, verifier) = (descriptor(), descriptor(), Verifier::new(5));
        let [flooding, other] = [(); 2].map(|()| Account::default());
        let begin = |account: &Account, number: u8, syncs_itself| {
            let fd = if number == 0 { &first } else { &fd };
            uncommitted.writing(&handle(number), fd, &verifier, account, syncs_itself)
        };
        let mut due = Vec::new();
        for number in 0..8 + 5 {
            let (writing, oldest) = begin(&flooding, number, false).unwrap();
            assert!(!writing.end().has_no_slot());
            due.extend(oldest);
            if number == 1 {
                // It is not the oldest any more.
                assert!(begin(&flooding, 0, false).is_some());
            }
        }
        assert_eq!(due.iter().map(|(due, _)| due.clone()).collect::<Vec<_>>(), [handle(1), handle(0)]);
        // The share is taken. What has a slot is written on.
        assert!(begin(&flooding, 13, false).is_none());
        assert!(begin(&flooding, 0, false).is_some());
        assert!(begin(&other, 0, false).is_some());
        assert!((20..22).all(|number| begin(&other, number, false).is_some()));
        // Without a slot the writing thread syncs.
        let without = begin(&flooding, 13, true).unwrap().0;
        assert!(begin(&other, 13, false).is_none());
        let written = without.end();
        assert!(written.has_no_slot());
        assert_eq!((uncommitted.len(), verifier.get()), (16, 5_u64.to_be_bytes()));
        assert_eq!(uncommitted.sync_written(&handle(13), &written, badly), Err(Errno::IO));
        assert_eq!((uncommitted.len(), verifier.get()), (15, 6_u64.to_be_bytes()));
        let sync = |fd: &OwnedFd| {
            assert!(std::ptr::eq(fd, &*first), "its descriptor is the one from before the first write");
            Err(Errno::NOSPC)
        };
        let (oldest, written) = due.remove(1);
        assert_eq!(uncommitted.sync_written(&oldest, &written, sync), Err(Errno::NOSPC));
        assert_eq!((uncommitted.len(), verifier.get()), (14, 7_u64.to_be_bytes()));
        // Its slot is free.
        drop(written);
        assert!(begin(&flooding, 13, false).is_some_and(|(writing, _)| !writing.end().has_no_slot()));
    }

    #[test]
    fn what_is_written_while_a_commit_waits_is_not_taken_for_committed() {
        let uncommitted = Uncommitted::new(10);
        let (file, fd, verifier) = (handle(1), descriptor(), Verifier::new(5));
        write(&uncommitted, &file, &fd, &verifier);
        // Begun and done during the sync; begun before it and done after it.
        let within = |_: &OwnedFd| {
            write(&uncommitted, &file, &fd, &verifier);
            Ok(())
        };
        assert_eq!(uncommitted.sync(&file, within), Ok(()));
        assert_eq!(uncommitted.len(), 1);
        let across = writing(&uncommitted, &file, &fd, &verifier);
        assert_eq!(uncommitted.sync(&file, well), Ok(()));
        drop(across);
        assert_eq!(uncommitted.len(), 1);
        assert_eq!(uncommitted.sync(&file, badly), Err(Errno::IO));
        assert_eq!(uncommitted.sync(&file, well), Ok(()));
        assert_eq!(uncommitted.len(), 0);
    }

    /// The thread of a write may sync the other file, and must not wait for the disk of another export.
    #[test]
    fn a_write_to_one_export_has_no_file_of_another_synced() {
        let uncommitted = Uncommitted::new(100);
        let (account, fd, verifier) = (Account::default(), descriptor(), Verifier::new(5));
        let of = |export, number: u8| {
            let kernel = KernelHandle::new(1, &[number; 8]).unwrap();
            Handle::new(export, &Key([3; 16]), &kernel).unwrap()
        };
        let begin = |handle| uncommitted.writing(&handle, &fd, &verifier, &account, false).unwrap().1;
        // The next ones have others synced.
        let files_before = (0..u8::MAX).find(|number| begin(of(1, *number)).is_some()).unwrap();
        assert!(begin(of(2, files_before + 1)).is_none());
        let (oldest, _) = begin(of(2, files_before + 2)).unwrap();
        assert_eq!(oldest, of(2, files_before + 1));
    }

    #[test]
    fn files_that_are_old_are_to_be_synced_and_those_that_are_gone_are_forgotten() {
        let uncommitted = Uncommitted::new(10);
        let (fd, verifier) = (descriptor(), Verifier::new(5));
        write(&uncommitted, &handle(1), &fd, &verifier);
        for _ in 1..AGE_SECONDS {
            assert!(uncommitted.age().is_empty());
        }
        let across = writing(&uncommitted, &handle(1), &fd, &verifier);
        let due = uncommitted.age();
        assert_eq!(due[0].0, handle(1));
        assert_eq!((0..2 * AGE_SECONDS).flat_map(|_| uncommitted.age()).count(), 0, "no sync has begun");
        assert_eq!(uncommitted.sync_written(&due[0].0, &due[0].1, well), Ok(()));
        assert_eq!((due.len(), uncommitted.len()), (1, 1), "a write is under way");
        drop(across);
        let due: Vec<_> = (0..AGE_SECONDS).flat_map(|_| uncommitted.age()).collect();
        assert_eq!(due.len(), 1, "not each second");
        assert_eq!(uncommitted.sync_written(&due[0].0, &due[0].1, well), Ok(()));
        assert_eq!(uncommitted.len(), 0);
        write(&uncommitted, &handle(1), &fd, &verifier);
        uncommitted.forget_gone(1, |_| false);
        uncommitted.forget_gone(2, |_| true);
        assert_eq!(uncommitted.len(), 1);
        uncommitted.forget_gone(1, |_| true);
        assert_eq!((uncommitted.failures(), uncommitted.len()), (0, 0));
    }
}
