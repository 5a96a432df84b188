//! What was written and is not on the medium yet, and who must be told when it is lost.
//!
//! The kernel tells of a failed write-back once for each open descriptor (errseq_t; since Linux 4.13), and clients share
//! descriptors. So each file with such data is kept here with the descriptor that was open before the first write, and with the
//! clients that wrote. When fsync fails, the verifier changes, which has clients write all their data again; and besides each of
//! those clients is told once, by the commit that it sends.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, Result};
use smallvec::SmallVec;

use crate::handle::Handle;
use crate::lru::Lru;

/// Clients with unsynced data in one file; for another one the file is synced first.
const CLIENTS_MAX: usize = 64;
/// Losses that clients were not told of yet. A client that is forgotten here still learns it by the verifier.
const LOSSES_MAX: usize = 16_384;

/// Files with data that is not on the medium.
#[derive(Debug)]
pub(crate) struct Uncommitted {
    files: Mutex<Lru<Handle, Arc<File>>>,
    files_max: usize,
    /// Who must be told of which file.
    losses: Mutex<Losses>,
    verifier: AtomicU64,
    failures: AtomicU64,
}

#[derive(Debug, Default)]
struct Losses {
    known: HashSet<(Handle, u64)>,
    order: std::collections::VecDeque<(Handle, u64)>,
}

/// One file.
#[derive(Debug)]
struct File {
    /// Open since before the first of the writes.
    descriptor: Arc<OwnedFd>,
    /// One at a time waits for the medium: who comes second must see what the first was told.
    syncing: Mutex<()>,
    /// Client and the number of its last write.
    writers: Mutex<Writers>,
}

#[derive(Debug, Default)]
struct Writers {
    clients: SmallVec<[(u64, u64); 2]>,
    writes: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uncommitted {
    pub(crate) fn new(files_max: usize, verifier: u64) -> Self {
        Self {
            files: Mutex::default(),
            files_max: files_max.max(1),
            losses: Mutex::default(),
            verifier: AtomicU64::new(verifier),
            failures: AtomicU64::new(0),
        }
    }

    /// Ask before the write that it is told of: a loss between both must show.
    pub(crate) fn verifier(&self) -> [u8; 8] {
        self.verifier.load(Ordering::SeqCst).to_be_bytes()
    }

    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// A client is about to write without waiting for the medium. Where there are too many files or clients, the oldest file,
    /// or this one, is synced first by `sync`.
    pub(crate) fn note(
        &self,
        handle: &Handle,
        client: u64,
        descriptor: &Arc<OwnedFd>,
        sync: impl Fn(&OwnedFd) -> Result<()>,
    ) {
        loop {
            let mut files = lock(&self.files);
            let file = match files.get(handle) {
                Some(file) => Arc::clone(file),
                None => {
                    let descriptor = Arc::clone(descriptor);
                    let file = Arc::new(File { descriptor, syncing: Mutex::default(), writers: Mutex::default() });
                    files.insert(handle.clone(), Arc::clone(&file));
                    file
                }
            };
            let oldest = if files.len() > self.files_max { files.pop_oldest() } else { None };
            let noted = lock(&file.writers).note(client);
            drop(files);
            if let Some((oldest, file)) = oldest {
                // Its descriptor leaves with it, so what the medium says must be heard now.
                self.sync_file(&oldest, &file, None, &sync).ok();
            }
            if noted {
                return;
            }
            self.sync_file(handle, &file, None, &sync).ok();
        }
    }

    /// Brings a file to the medium for a client; `descriptor` for a file without unsynced data.
    ///
    /// # Errors
    ///
    /// Data of this client in this file may be lost: by this call, or by an earlier one of which it was not told.
    pub(crate) fn commit(
        &self,
        handle: &Handle,
        client: u64,
        descriptor: &Arc<OwnedFd>,
        sync: impl Fn(&OwnedFd) -> Result<()>,
    ) -> Result<()> {
        let known = lock(&self.files).get(handle).map(|file| Arc::clone(file));
        let file = known.unwrap_or_else(|| {
            let descriptor = Arc::clone(descriptor);
            Arc::new(File { descriptor, syncing: Mutex::default(), writers: Mutex::default() })
        });
        let synced = self.sync_file(handle, &file, Some(client), &sync);
        let mut files = lock(&self.files);
        let is_same = files.get(handle).is_some_and(|known| Arc::ptr_eq(known, &file));
        if is_same && lock(&file.writers).clients.is_empty() {
            files.remove(handle);
        }
        drop(files);
        synced
    }

    /// A write that waits for the medium failed there, which may have taken the news of other lost writes.
    pub(crate) fn stable_write_failed(&self, handle: &Handle, client: u64) {
        let file = lock(&self.files).get(handle).map(|file| Arc::clone(file));
        self.lost(handle, file.as_deref(), Some(client));
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

    pub(crate) fn len(&self) -> usize {
        lock(&self.files).len()
    }

    fn sync_file(
        &self,
        handle: &Handle,
        file: &File,
        client: Option<u64>,
        sync: impl Fn(&OwnedFd) -> Result<()>,
    ) -> Result<()> {
        let _alone = lock(&file.syncing);
        let before = lock(&file.writers).writes;
        match sync(&file.descriptor) {
            Ok(()) => {
                // Those that wrote meanwhile stay.
                lock(&file.writers).clients.retain(|(_, write)| *write > before);
            }
            Err(error) => {
                self.lost(handle, Some(file), client);
                if let Some(client) = client {
                    lock(&self.losses).take(handle, client);
                }
                return Err(error);
            }
        }
        let is_told = client.is_some_and(|client| lock(&self.losses).take(handle, client));
        if is_told { Err(Errno::IO) } else { Ok(()) }
    }

    /// `told`: the client that gets the error by the call that found it.
    fn lost(&self, handle: &Handle, file: Option<&File>, told: Option<u64>) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let writers = file.map(|file| std::mem::take(&mut lock(&file.writers).clients)).unwrap_or_default();
        let mut losses = lock(&self.losses);
        for (client, _) in writers {
            if Some(client) != told {
                losses.add(handle, client);
            }
        }
        drop(losses);
        self.verifier.fetch_add(1, Ordering::SeqCst);
    }
}

impl Writers {
    /// False: there is no room for another client.
    fn note(&mut self, client: u64) -> bool {
        self.writes += 1;
        if let Some(known) = self.clients.iter_mut().find(|(known, _)| *known == client) {
            known.1 = self.writes;
            return true;
        }
        if self.clients.len() == CLIENTS_MAX {
            return false;
        }
        self.clients.push((client, self.writes));
        true
    }
}

impl Losses {
    fn add(&mut self, handle: &Handle, client: u64) {
        if self.known.insert((handle.clone(), client)) {
            self.order.push_back((handle.clone(), client));
        }
        while self.order.len() > LOSSES_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }

    /// True if the client was to be told.
    fn take(&mut self, handle: &Handle, client: u64) -> bool {
        let key = (handle.clone(), client);
        let was_known = self.known.remove(&key);
        if was_known {
            self.order.retain(|known| *known != key);
        }
        was_known
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

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
    fn a_loss_is_told_once_to_each_client_that_wrote() {
        let uncommitted = Uncommitted::new(10, 5);
        let (file, fd) = (handle(1), descriptor());
        for client in [1, 2, 3, 2] {
            uncommitted.note(&file, client, &fd, well);
        }
        let before = uncommitted.verifier();
        assert_eq!(uncommitted.commit(&file, 2, &fd, badly), Err(Errno::IO));
        assert_ne!(uncommitted.verifier(), before);
        let after = uncommitted.verifier();
        assert_eq!(uncommitted.commit(&file, 1, &fd, well), Err(Errno::IO));
        assert_eq!(uncommitted.commit(&file, 2, &fd, well), Ok(()), "it was told");
        assert_eq!(uncommitted.commit(&file, 1, &fd, well), Ok(()), "it was told");
        assert_eq!(uncommitted.commit(&file, 4, &fd, well), Ok(()), "it wrote nothing");
        assert_eq!(uncommitted.commit(&file, 3, &fd, well), Err(Errno::IO));
        assert_eq!(uncommitted.commit(&file, 3, &fd, well), Ok(()));
        assert_eq!((uncommitted.verifier(), uncommitted.failures(), uncommitted.len()), (after, 1, 0));
    }

    #[test]
    fn the_loss_of_one_file_is_not_told_of_another() {
        let uncommitted = Uncommitted::new(10, 5);
        let fd = descriptor();
        uncommitted.note(&handle(1), 1, &fd, well);
        uncommitted.note(&handle(2), 1, &fd, well);
        assert_eq!(uncommitted.commit(&handle(1), 9, &fd, badly), Err(Errno::IO));
        assert_eq!(uncommitted.commit(&handle(2), 1, &fd, well), Ok(()));
        assert_eq!(uncommitted.commit(&handle(1), 1, &fd, well), Err(Errno::IO));
    }

    #[test]
    fn a_failed_stable_write_tells_the_others() {
        let uncommitted = Uncommitted::new(10, 5);
        let (file, fd) = (handle(1), descriptor());
        uncommitted.note(&file, 1, &fd, well);
        uncommitted.note(&file, 2, &fd, well);
        uncommitted.stable_write_failed(&file, 2);
        assert_eq!(uncommitted.commit(&file, 2, &fd, well), Ok(()), "the write told it");
        assert_eq!(uncommitted.commit(&file, 1, &fd, well), Err(Errno::IO));
        assert_ne!(uncommitted.verifier(), 5_u64.to_be_bytes());
    }

    #[test]
    fn a_file_that_is_displaced_is_synced_with_its_first_descriptor() {
        let uncommitted = Uncommitted::new(2, 5);
        let (first, other) = (descriptor(), descriptor());
        let synced = Cell::new(0);
        let sync = |fd: &OwnedFd| {
            assert!(std::ptr::eq(fd, &*first));
            synced.set(synced.get() + 1);
            Err(Errno::NOSPC)
        };
        uncommitted.note(&handle(1), 1, &first, sync);
        uncommitted.note(&handle(1), 1, &other, sync);
        uncommitted.note(&handle(2), 1, &other, sync);
        assert_eq!(synced.get(), 0);
        uncommitted.note(&handle(3), 1, &other, sync);
        assert_eq!((synced.get(), uncommitted.len()), (1, 2));
        assert_eq!(uncommitted.commit(&handle(1), 1, &other, well), Err(Errno::IO));
        assert_eq!(uncommitted.commit(&handle(2), 1, &other, well), Ok(()));
    }

    #[test]
    fn clients_of_a_file_are_bounded() {
        let uncommitted = Uncommitted::new(2, 5);
        let fd = descriptor();
        let synced = Cell::new(0);
        let sync = |_: &OwnedFd| {
            synced.set(synced.get() + 1);
            Ok(())
        };
        for client in 0..1000 {
            uncommitted.note(&handle(1), client, &fd, sync);
        }
        assert_eq!(synced.get(), 999 / CLIENTS_MAX);
        let files = lock(&uncommitted.files).get(&handle(1)).map(|file| lock(&file.writers).clients.len());
        assert!(files.unwrap() <= CLIENTS_MAX);
    }

    #[test]
    fn who_writes_while_a_commit_waits_is_not_taken_for_committed() {
        let uncommitted = Uncommitted::new(2, 5);
        let (file, fd) = (handle(1), descriptor());
        uncommitted.note(&file, 1, &fd, well);
        let writes_meanwhile = |_: &OwnedFd| {
            uncommitted.note(&file, 2, &fd, well);
            Ok(())
        };
        assert_eq!(uncommitted.commit(&file, 1, &fd, writes_meanwhile), Ok(()));
        assert_eq!(uncommitted.len(), 1);
        assert_eq!(uncommitted.commit(&file, 1, &fd, badly), Err(Errno::IO));
        assert_eq!(uncommitted.commit(&file, 2, &fd, well), Err(Errno::IO));
    }
}
