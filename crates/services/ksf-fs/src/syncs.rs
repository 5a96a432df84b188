//! Syncs on separate threads, so that a slow disk blocks only the operations that wait for it.
//!
//! Operations on the same object share a sync that begins after all their changes. Operations that arrive during a sync share
//! the next one. Connections take turns on the threads: a sync begins at the turn of any connection that waits for it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::account::Account;
use crate::error::FsError;
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::Fs;
use crate::owed::{Debt, Owed, What};
use crate::pool::{Length, Queue};

/// Operations share syncs by object; true: a sync of names and attributes, not of bytes.
type Key = (Handle, bool);

type Then = Box<dyn FnOnce(&Lane, Result<(), FsError>) + Send>;

/// A waiting operation.
struct Waiter {
    fs: Arc<Fs>,
    account: Account,
    debt: Debt,
    /// Syncs after that of `debt`, the next one last.
    more: Vec<Debt>,
    bytes: usize,
    then: Then,
}

/// The waiting operations, and the queue of the threads.
pub(crate) struct Syncs {
    queue: Queue,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    by_key: HashMap<Key, Object>,
    count: usize,
    bytes: usize,
}

impl Waiting {
    /// One more operation waits.
    fn began(&mut self, bytes: usize) {
        self.count += 1;
        self.bytes += bytes;
    }

    /// One of them waits no longer. After the end of the threads nothing is counted any more.
    fn ended(&mut self, bytes: usize) {
        self.count = self.count.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// An object with waiters or a sync in progress.
#[derive(Default)]
struct Object {
    waiters: Vec<Waiter>,
    is_syncing: bool,
}

impl fmt::Debug for Syncs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Syncs").field("count", &self.count()).finish_non_exhaustive()
    }
}

impl Syncs {
    pub(crate) fn new(queue: Queue) -> Self {
        Self { queue, waiting: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of waiting operations, and the bytes that they keep.
    pub(crate) fn count(&self) -> (usize, usize) {
        let waiting = self.lock();
        (waiting.count, waiting.bytes)
    }

    /// Makes syncs one after the other; `then` gets the first failure. `bytes`: memory that `then` holds.
    pub(crate) fn submit(
        self: &Arc<Self>,
        fs: &Arc<Fs>,
        account: &Account,
        mut owed: Vec<Debt>,
        bytes: usize,
        then: Then,
    ) {
        owed.reverse();
        if let Some(debt) = owed.pop() {
            self.enqueue(Waiter { fs: Arc::clone(fs), account: account.clone(), debt, more: owed, bytes, then });
        }
    }

    /// Makes syncs without a waiting operation, each by itself.
    pub(crate) fn submit_others(self: &Arc<Self>, fs: &Arc<Fs>, account: &Account, owed: Vec<Debt>) {
        owed.into_iter().for_each(|debt| self.submit(fs, account, vec![debt], 0, Box::new(|_, _| ())));
    }

    /// Drops the waiting operations. Called after the threads have ended.
    pub(crate) fn clear(&self) {
        let dropped = std::mem::take(&mut *self.lock());
        // Outside of the lock: captured values may call back.
        drop(dropped);
    }

    /// Has a thread run a job of an export, which makes its own syncs. `bytes`: memory that the job keeps.
    fn run(
        self: &Arc<Self>,
        account: &Account,
        export: usize,
        bytes: usize,
        job: impl FnOnce(&mut Lane) + Send + 'static,
    ) {
        let syncs = Arc::clone(self);
        self.lock().began(bytes);
        self.queue.submit(account.clone(), export, Length::Long, 0, move |lane| {
            syncs.lock().ended(bytes);
            job(lane);
        });
    }

    fn enqueue(self: &Arc<Self>, waiter: Waiter) {
        let key = (waiter.debt.handle.clone(), matches!(waiter.debt.what, What::Names));
        let (share, account) = (waiter.fs.share_of(&key.0), waiter.account.clone());
        let mut waiting = self.lock();
        waiting.began(waiter.bytes);
        let object = waiting.by_key.entry(key.clone()).or_default();
        // A sync in progress begins the next one.
        let is_begun =
            object.is_syncing || object.waiters.last().is_some_and(|last| last.account.number() == account.number());
        object.waiters.push(waiter);
        drop(waiting);
        if !is_begun {
            self.begin(share, key, account);
        }
    }

    /// Has a thread sync an object at the turn of this account, unless another has begun by then.
    fn begin(self: &Arc<Self>, share: usize, key: Key, account: Account) {
        let (syncs, of) = (Arc::clone(self), key.clone());
        if !self.queue.submit(account, share, Length::Short, 0, move |lane| syncs.sync(share, &of, lane)) {
            let dropped = self.lock().by_key.remove(&key);
            drop(dropped);
        }
    }

    /// Syncs an object for all its current waiters.
    fn sync(self: &Arc<Self>, share: usize, key: &Key, lane: &Lane) {
        let batch = {
            let mut waiting = self.lock();
            let object = waiting.by_key.get_mut(key).filter(|object| !object.is_syncing);
            let Some(Object { waiters, is_syncing }) = object else { return };
            *is_syncing = true;
            let batch = std::mem::take(waiters);
            batch.iter().for_each(|waiter| waiting.ended(waiter.bytes));
            batch
        };
        // Also after a panic.
        let _next = Next { syncs: self, share, key };
        let mut joint = None;
        for Waiter { fs, account, debt, mut more, bytes, then } in batch {
            let paid = match debt.what {
                // `Written` checks if a sync has covered it; `Opened` learns of losses by its own descriptor.
                What::Written(_) | What::Opened { .. } => fs.pay(lane, &debt),
                What::Names | What::Content => *joint.get_or_insert_with(|| fs.pay(lane, &debt)),
            };
            match more.pop().filter(|_| paid.is_ok()) {
                Some(debt) => self.enqueue(Waiter { fs, account, debt, more, bytes, then }),
                None => then(lane, paid),
            }
        }
    }
}

/// Guard of a sync: its drop starts the next one, for the operations that arrived meanwhile.
struct Next<'a> {
    syncs: &'a Arc<Syncs>,
    share: usize,
    key: &'a Key,
}

impl Drop for Next<'_> {
    fn drop(&mut self) {
        let mut waiting = self.syncs.lock();
        let Some(object) = waiting.by_key.get_mut(self.key) else { return };
        object.is_syncing = false;
        let mut accounts: Vec<Account> = object.waiters.iter().map(|waiter| waiter.account.clone()).collect();
        if accounts.is_empty() {
            waiting.by_key.remove(self.key);
        }
        drop(waiting);
        accounts.dedup_by_key(|account| account.number());
        accounts.into_iter().for_each(|account| self.syncs.begin(self.share, self.key.clone(), account));
    }
}

impl Lane {
    /// Has the sync threads make the `owed` syncs, or makes them here if there are no such threads; then calls `then`. `bytes`:
    /// memory that `then` holds.
    pub fn settle(
        &self,
        fs: &Arc<Fs>,
        owed: Owed,
        bytes: usize,
        then: impl FnOnce(&Self, Result<(), FsError>) + Send + 'static,
    ) {
        match self.syncs() {
            Some(syncs) => {
                syncs.submit_others(fs, &self.account, owed.others);
                if owed.own.is_empty() {
                    then(self, Ok(()));
                } else {
                    syncs.submit(fs, &self.account, owed.own, bytes, Box::new(then));
                }
            }
            None => then(self, fs.settle_owed(self, &owed)),
        }
    }

    /// Has a sync thread run `job` at the turn of the lane's connection, or runs it here if there are no such threads. Operations
    /// there make their own syncs. `export`: [`Fs::share_of`]; `bytes`: memory that `job` keeps.
    pub fn leave(&mut self, export: usize, bytes: usize, job: impl FnOnce(&mut Self) + Send + 'static) {
        match self.syncs() {
            Some(syncs) => syncs.run(&self.account, export, bytes, job),
            None => job(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    use super::*;
    use crate::credential::{Credential, Squash};
    use crate::export::ExportOptions;
    use crate::lanes::{LaneOptions, Lanes};
    use crate::layer::FsOptions;
    use crate::{CreateHow, Resize, SetAttr, Stable, Written};

    /// A served directory with its threads.
    struct Served {
        folder: ksf_test::Folder,
        fs: Arc<Fs>,
        lanes: Lanes,
    }

    impl Served {
        fn new(threads: usize) -> Self {
            Self::with(threads, FsOptions::default())
        }

        fn with(threads: usize, options: FsOptions) -> Self {
            Self::of(threads, options, &["data"])
        }

        fn of(threads: usize, options: FsOptions, exports: &[&str]) -> Self {
            let folder = ksf_test::Folder::to_export();
            let mut fs = Fs::new(options).unwrap();
            for name in exports {
                std::fs::create_dir(folder.path(name)).unwrap();
                let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
                fs.add_export(&folder.path(name), &folder.path("state"), options).unwrap();
            }
            let lanes = Lanes::start(&LaneOptions { threads }, exports.len()).unwrap();
            Self { folder, fs: Arc::new(fs), lanes }
        }

        /// Runs an operation on a lane, and its syncs where a server has them.
        fn run<T: Send + 'static>(
            &self,
            work: impl FnOnce(&Fs, &mut Lane) -> T + Send + 'static,
        ) -> Receiver<(T, Result<(), FsError>)> {
            let (sender, receiver) = channel();
            let fs = Arc::clone(&self.fs);
            self.lanes.submit(0, Length::Short, 0, move |lane| {
                let (done, owed) = lane.owing(|lane| work(&fs, lane));
                lane.settle(&fs, owed, 10, move |_, settled| sender.send((done, settled)).unwrap());
            });
            receiver
        }

        fn create(&self, name: impl AsRef<[u8]> + Send + 'static) -> Receiver<(Handle, Result<(), FsError>)> {
            self.create_in(0, name)
        }

        fn create_in(
            &self,
            export: usize,
            name: impl AsRef<[u8]> + Send + 'static,
        ) -> Receiver<(Handle, Result<(), FsError>)> {
            self.run(move |fs, lane| {
                let how = CreateHow::Guarded(SetAttr::default());
                let root = fs.exports()[export].root().clone();
                fs.create(lane, &root_user(), &root, name.as_ref(), &how).result.unwrap().handle
            })
        }

        fn write(&self, file: &Handle, stable: Stable) -> Receiver<(Written, Result<(), FsError>)> {
            self.write_for(&Account::default(), file, stable)
        }

        fn write_for(
            &self,
            account: &Account,
            file: &Handle,
            stable: Stable,
        ) -> Receiver<(Written, Result<(), FsError>)> {
            let (sender, receiver) = channel();
            let (fs, file) = (Arc::clone(&self.fs), file.clone());
            self.lanes.submit_for(account, 0, Length::Long, 0, move |lane| write_on(fs, lane, file, stable, sender));
            receiver
        }

        /// Jobs done, with that of the last answer: a job is counted after its answer.
        fn done_so_far(&self) -> u64 {
            self.until(|counters| counters.running_jobs == 0);
            self.lanes.counters().done
        }

        fn until(&self, is_so: impl Fn(&crate::LaneCounters) -> bool) {
            while !is_so(&self.lanes.counters()) {
                thread::yield_now();
            }
        }
    }

    /// Writes to a file, on this lane or another one.
    fn write_on(
        fs: Arc<Fs>,
        lane: &mut Lane,
        file: Handle,
        stable: Stable,
        sender: Sender<(Written, Result<(), FsError>)>,
    ) {
        let (written, owed) = lane.owing(|lane| fs.write(lane, &root_user(), &file, 0, b"text", stable).result);
        if owed.has_no_room() {
            return lane.leave(0, 10, move |lane| write_on(fs, lane, file, stable, sender));
        }
        lane.settle(&fs, owed, 10, move |_, settled| sender.send((written.unwrap(), settled)).unwrap());
    }

    /// A write whose sync hangs on a thread.
    fn hanging_write(served: &Served, file: &Handle) -> Receiver<(Written, Result<(), FsError>)> {
        let before = served.done_so_far();
        let write = served.write(file, Stable::FileSync);
        served.until(|counters| counters.done > before && counters.queued_syncs == 0);
        write
    }

    fn root_user() -> Credential {
        Credential::unix(0, 0, &[])
    }

    fn done<T>(receiver: &Receiver<(T, Result<(), FsError>)>) -> T {
        let (done, settled) = receiver.recv().unwrap();
        settled.unwrap();
        done
    }

    #[test]
    fn a_sync_that_hangs_holds_up_those_who_wait_for_it_alone() {
        let served = Served::new(2);
        let [slow, other] = ["slow", "other"].map(|name| done(&served.create(name)));
        done(&served.write(&slow, Stable::Unstable));
        let (waiting, committed) = served.fs.uncommitted.hang(&slow, || {
            let mut waiting = vec![hanging_write(&served, &slow)];
            waiting.extend((0..9).map(|_| served.write(&slow, Stable::FileSync)));
            served.until(|counters| counters.queued_syncs == 9);
            let (sender, receiver) = channel();
            let (fs, file) = (Arc::clone(&served.fs), slow.clone());
            served.lanes.submit(0, Length::Short, 0, move |lane| {
                let fs = &fs;
                lane.settle(fs, Owed::commit(file.clone()), 0, move |_, synced| sender.send((0, synced)).unwrap());
            });
            served.until(|counters| counters.queued_syncs == 10 && counters.queued_bytes == 90);
            // Other requests are served: their syncs, and other operations on the file.
            assert_eq!(done(&served.write(&other, Stable::FileSync)).count, 4);
            assert_eq!(done(&served.write(&slow, Stable::Unstable)).count, 4);
            let size = done(&served.run({
                let slow = slow.clone();
                move |fs, lane| fs.getattr(lane, &slow).unwrap().size
            }));
            assert_eq!(size, 4);
            assert!(waiting.iter().all(|write| write.try_recv().is_err()));
            assert!(receiver.try_recv().is_err());
            (waiting, receiver)
        });
        for write in &waiting {
            done(write);
        }
        done(&committed);
        served.until(|counters| (counters.queued_syncs, counters.queued_bytes) == (0, 0));
        assert_eq!(std::fs::read(served.folder.path("data/slow")).unwrap(), b"text");
    }

    #[test]
    fn connections_take_turns_on_the_sync_threads_and_share_syncs() {
        let served = Served::new(1);
        let slow = done(&served.create("slow"));
        done(&served.write(&slow, Stable::Unstable));
        let files = ["a", "b", "c", "d"].map(|name| (name, done(&served.create(name))));
        let [flooding, other] = [(); 2].map(|()| Account::default());
        let (sender, order) = channel();
        // A change of attributes, whose sync is that of the file.
        let change = |account: &Account, who: &'static str, at: usize| {
            let (fs, sender, (name, file)) = (Arc::clone(&served.fs), sender.clone(), files[at].clone());
            served.lanes.submit_for(account, 0, Length::Short, 0, move |lane| {
                let to = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                let (changed, owed) =
                    lane.owing(|lane| fs.setattr(lane, &root_user(), &file, &to, None, Resize::Writer).result);
                changed.unwrap();
                lane.settle(&fs, owed, 0, move |_, settled| sender.send((who, name, settled)).unwrap());
            });
        };
        let write = served.fs.uncommitted.hang(&slow, || {
            let write = hanging_write(&served, &slow);
            (0..4).for_each(|at| change(&flooding, "flooding", at));
            served.until(|counters| counters.queued_syncs == 4);
            [3, 1].into_iter().for_each(|at| change(&other, "other", at));
            served.until(|counters| counters.queued_syncs == 6);
            write
        });
        done(&write);
        let order: Vec<_> = order.iter().take(6).map(|(who, name, settled)| (who, name, settled.is_ok())).collect();
        let wanted = [
            ("flooding", "a"),
            ("flooding", "d"),
            ("other", "d"),
            ("flooding", "b"),
            ("other", "b"),
            ("flooding", "c"),
        ];
        assert_eq!(order, wanted.map(|(who, name)| (who, name, true)));
    }

    #[test]
    fn one_sync_of_a_folder_serves_all_who_wait_for_it() {
        let served = Served::new(1);
        let slow = done(&served.create("slow"));
        done(&served.write(&slow, Stable::Unstable));
        let before = served.fs.counters().settled;
        let (write, creates) = served.fs.uncommitted.hang(&slow, || {
            let write = hanging_write(&served, &slow);
            let creates: Vec<_> = ["a", "b", "c", "d", "e"].iter().map(|name| served.create(name)).collect();
            served.until(|counters| counters.queued_syncs == 5);
            (write, creates)
        });
        done(&write);
        for create in &creates {
            done(create);
        }
        assert_eq!(served.fs.counters().settled - before, 1);
    }

    #[test]
    fn an_unstable_write_does_not_wait_for_the_sync_of_another_file() {
        // Two of the reserve, and one of the others.
        let served = Served::with(1, FsOptions { uncommitted_files_max: 4, ..FsOptions::default() });
        let files = ["slow", "b", "c", "d"].map(|name| done(&served.create(name)));
        let account = Account::default();
        let write = |file| served.write_for(&account, file, Stable::Unstable);
        done(&write(&files[0]));
        let last = served.fs.uncommitted.hang(&files[0], || {
            // The third has the first synced, which hangs.
            (1..3).for_each(|at| assert_eq!(done(&write(&files[at])).committed, Stable::Unstable));
            let last = write(&files[3]);
            served.until(|counters| counters.queued_syncs == 1 && counters.queued_bytes == 10);
            assert!(last.try_recv().is_err());
            last
        });
        done(&last);
        ksf_test::wait_until("the next ones are synced", || served.fs.counters().uncommitted_files <= 2);
    }

    #[test]
    fn old_file_on_hung_disk_has_one_waiting_sync_and_blocks_no_other_export() {
        let served = Served::of(4, FsOptions::default(), &["data", "other"]);
        let [slow, other] = [0, 1].map(|export| done(&served.create_in(export, "file")));
        let write = |file| assert_eq!(done(&served.write(file, Stable::Unstable)).count, 4);
        [&slow, &other].into_iter().for_each(write);
        served.fs.uncommitted.hang(&slow, || {
            for _ in 0..10 {
                // Both files are old once.
                (0..30).for_each(|_| served.lanes.settle(&served.fs, served.fs.close_idle()));
                ksf_test::wait_until("the other file is synced", || served.fs.counters().uncommitted_files == 1);
                assert!(served.lanes.counters().queued_syncs <= 1);
                write(&other);
            }
            // A sync that waits has no thread.
            served.until(|counters| counters.queued_syncs == 1);
        });
        served.until(|counters| counters.queued_syncs == 0);
    }

    #[test]
    fn a_connection_that_commits_nothing_leaves_room_to_others() {
        /// Of 64 files: 8 of the reserve, and half of the others.
        const SHARE: usize = 8 + 16;
        const LEFT: usize = 8 + 8;
        let served = Served::with(1, FsOptions { uncommitted_files_max: 64, ..FsOptions::default() });
        let files: Vec<Handle> = (0..300).map(|at| done(&served.create(at.to_string()))).collect();
        let [flooding, other] = [(); 2].map(|()| Account::default());
        let write = |account: &Account, file: &Handle| served.write_for(account, file, Stable::Unstable);
        let write_all =
            |account: &Account, files: &[Handle]| files.iter().map(|file| write(account, file)).collect::<Vec<_>>();
        done(&write(&flooding, &files[0]));
        let (hanging, waiting) = served.fs.uncommitted.hang(&files[0], || {
            // The only thread for syncs hangs.
            let hanging = hanging_write(&served, &files[0]);
            for write in write_all(&flooding, &files[1..SHARE]) {
                assert_eq!(done(&write).committed, Stable::Unstable);
            }
            let waiting = write_all(&flooding, &files[SHARE + LEFT..]);
            served.until(|counters| (counters.queued_jobs, counters.running_jobs) == (0, 0));
            assert!(waiting.iter().all(|write| write.try_recv().is_err()));
            for write in write_all(&other, &files[SHARE..SHARE + LEFT]) {
                assert_eq!(done(&write).committed, Stable::Unstable);
            }
            assert_eq!(served.fs.counters().uncommitted_files, SHARE + LEFT);
            (hanging, waiting)
        });
        done(&hanging);
        for write in &waiting {
            done(write);
        }
        assert!(served.fs.counters().uncommitted_files <= 64);
    }

    #[test]
    fn a_server_that_ends_waits_for_the_syncs_of_what_was_begun() {
        let served = Served::new(1);
        let slow = done(&served.create("slow"));
        done(&served.write(&slow, Stable::Unstable));
        let deadline = std::time::Instant::now();
        let (write, left) = served.fs.uncommitted.hang(&slow, || {
            let write = [hanging_write(&served, &slow), served.write(&slow, Stable::FileSync)];
            served.until(|counters| counters.queued_syncs == 1);
            (write, served.lanes.close(deadline))
        });
        assert_eq!(left, 1);
        // The operation on a thread is answered, the queued one is dropped.
        assert_eq!(write.iter().filter(|write| write.recv().is_ok()).count(), 1);

        let served = Served::new(1);
        let file = done(&served.create("file"));
        let before = served.done_so_far();
        let writes: Vec<_> = (0..10).map(|_| served.write(&file, Stable::FileSync)).collect();
        served.until(|counters| counters.done == before + 10);
        assert_eq!(served.lanes.close(deadline + std::time::Duration::from_secs(600)), 0);
        assert!(writes.iter().all(|write| write.try_recv().is_ok()));
    }
}
