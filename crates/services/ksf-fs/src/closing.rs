//! Threads that close the descriptors of an export. The last close of a removed file frees its blocks and may wait for the disk, for
//! which no other export may wait. A lane closes the descriptors of its own export itself. Shards, the clock and lanes of other
//! exports hand them over. So does the drop of an open file: its answer may come after its connection has ended, its job after the lanes.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use ksf::threads;

use crate::descriptors::Gone;

/// Most cached descriptors of an export that wait to be closed. Beyond that shards open nothing, and others do not evict them.
pub(crate) const WAITING_MAX: usize = 256;
/// Times that the thread is woken while as many are released.
const BATCHES: usize = 4;
/// Seconds between two looks for what nothing used and what was removed.
const LOOK_SECONDS: u64 = 10;

type Job = Box<dyn FnOnce() + Send>;

/// The way to the threads that close descriptors of an export and release locks. They end after the last clone.
#[derive(Clone, Debug)]
pub(crate) struct Closer {
    closes: Sender<Job>,
    unlocks: Sender<Job>,
}

impl Closer {
    /// Starts the threads.
    pub(crate) fn start() -> io::Result<Self> {
        let start = |name: &str| {
            let (sender, jobs) = mpsc::channel::<Job>();
            threads::start(name, move || jobs.into_iter().for_each(|job| job()))?;
            Ok::<_, io::Error>(sender)
        };
        Ok(Self { closes: start("ksf-fs-closer")?, unlocks: start("ksf-fs-unlocker")? })
    }

    /// Has the thread that closes drop a value.
    pub(crate) fn drop_there(&self, value: impl Send + 'static) {
        self.run(move || drop(value));
    }

    /// Has the thread that closes run a job.
    fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The thread outlives this.
        drop(self.closes.send(Box::new(job)));
    }

    /// Has the other thread release locks: they do not wait for descriptors that are being closed.
    pub(crate) fn unlock(&self, job: impl FnOnce() + Send + 'static) {
        drop(self.unlocks.send(Box::new(job)));
    }
}

/// Time that has passed since the last look, in seconds since the start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    pub(crate) before: u64,
    pub(crate) now: u64,
}

impl Passed {
    pub(crate) fn seconds(self) -> u64 {
        self.now - self.before
    }

    /// Looks for what nothing used that are due.
    pub(crate) fn looks(self) -> u64 {
        self.now / LOOK_SECONDS - self.before / LOOK_SECONDS
    }
}

/// Cached descriptors of one export that its thread has to close.
#[derive(Debug)]
pub(crate) struct Closing {
    next: Mutex<Vec<Gone>>,
    waiting: Arc<AtomicUsize>,
    max: AtomicUsize,
    closer: Closer,
    /// Seconds since the start.
    seconds: AtomicU64,
    /// Those for which the thread has looked.
    looked: AtomicU64,
    /// The thread has been told that seconds have passed, and has not begun to look.
    is_told: AtomicBool,
}

/// Descriptors that wait; dropping it closes them.
struct Waiting {
    gone: Vec<Gone>,
    waiting: Arc<AtomicUsize>,
}

impl Closing {
    pub(crate) fn new(closer: Closer) -> Self {
        Self {
            next: Mutex::default(),
            waiting: Arc::default(),
            max: AtomicUsize::new(WAITING_MAX),
            closer,
            seconds: AtomicU64::new(0),
            looked: AtomicU64::new(0),
            is_told: AtomicBool::new(false),
        }
    }

    pub(crate) fn closer(&self) -> &Closer {
        &self.closer
    }

    /// Bounds those that wait.
    pub(crate) fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// False: too many descriptors wait.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < self.max.load(Ordering::Relaxed)
    }

    /// Adds descriptors. The thread gets all that wait when they are enough to wake it, or when one is open for writing and prevents
    /// execution of its file.
    pub(crate) fn add(&self, gone: Gone) {
        let count = gone.count();
        if count == 0 {
            return;
        }
        self.waiting.fetch_add(count, Ordering::Relaxed);
        let is_urgent = gone.is_writable();
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        next.push(gone);
        if is_urgent || next.len() >= self.max.load(Ordering::Relaxed) / BATCHES {
            self.hand_over(std::mem::take(&mut *next));
        }
    }

    /// Gives the thread all that wait, after the last call of many.
    pub(crate) fn flush(&self) {
        let gone = std::mem::take(&mut *self.next.lock().unwrap_or_else(PoisonError::into_inner));
        if !gone.is_empty() {
            self.hand_over(gone);
        }
    }

    fn hand_over(&self, gone: Vec<Gone>) {
        self.closer.drop_there(Waiting { gone, waiting: Arc::clone(&self.waiting) });
    }

    /// To be called once a second: the thread closes what waits, and runs `look`. A thread that hangs gets one such job.
    pub(crate) fn tick(self: &Arc<Self>, look: impl FnOnce(Passed) + Send + 'static) {
        self.flush();
        self.seconds.fetch_add(1, Ordering::SeqCst);
        if self.is_told.swap(true, Ordering::SeqCst) {
            return;
        }
        let closing = Arc::clone(self);
        self.closer.run(move || {
            // In this order: a second that passes after the load is told of anew.
            closing.is_told.store(false, Ordering::SeqCst);
            let now = closing.seconds.load(Ordering::SeqCst);
            let before = closing.looked.swap(now, Ordering::SeqCst);
            look(Passed { before, now });
        });
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let count = self.gone.iter().map(Gone::count).sum();
        self.gone.clear();
        self.waiting.fetch_sub(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::Receiver;

    use super::*;
    use crate::common::{kind, on_lane, open_for_writing, root};
    use crate::credential::Squash;
    use crate::error::ErrorKind;
    use crate::export::{Export, ExportOptions};
    use crate::handle::Handle;
    use crate::lane::Lane;
    use crate::layer::{Fs, FsOptions};
    use crate::ops::{Access, Stable};
    use crate::warm::{WarmShare, WarmTurn};

    fn gone() -> Gone {
        Gone::of(std::fs::File::open("/dev/null").unwrap().into())
    }

    #[test]
    fn what_waits_is_bounded_until_it_is_closed() {
        let closing = Closing::new(Closer::start().unwrap());
        closing.add(Gone::default());
        let hang = closing.closer().hang();
        for _ in 0..WAITING_MAX {
            assert!(closing.has_room());
            closing.add(gone());
        }
        assert!(!closing.has_room(), "the thread has not closed them yet");
        drop(hang);
        ksf_test::wait_until("there is room", || closing.has_room());
        ksf_test::wait_until("all are closed", || closing.waiting.load(Ordering::Relaxed) == 0);
        closing.add(gone());
        assert_eq!(closing.waiting.load(Ordering::Relaxed), 1, "the first of the next ones");
        closing.flush();
        ksf_test::wait_until("it is closed", || closing.waiting.load(Ordering::Relaxed) == 0);
    }

    #[test]
    fn a_thread_that_hangs_gets_one_job_for_all_seconds() {
        let closing = Arc::new(Closing::new(Closer::start().unwrap()));
        let hang = closing.closer().hang();
        let (looked, looks) = mpsc::channel();
        for _ in 0..25 {
            let looked = looked.clone();
            closing.tick(move |passed| looked.send((passed.seconds(), passed.looks())).unwrap());
        }
        assert!(looks.try_recv().is_err());
        drop(hang);
        assert_eq!(looks.recv().unwrap(), (25, 2));
        drop(looked);
        assert!(looks.recv().is_err());
    }

    /// Its drop hangs until the other end is dropped.
    struct Hangs(Receiver<()>);

    impl Drop for Hangs {
        fn drop(&mut self) {
            self.0.recv().unwrap_err();
        }
    }

    impl Closer {
        /// Plays a disk that hangs until the result is dropped.
        pub(crate) fn hang(&self) -> Sender<()> {
            let (hang, hangs) = mpsc::channel();
            self.drop_there(Hangs(hangs));
            hang
        }
    }

    /// Two exports of a layer, the first of which can hang.
    struct Two {
        _folder: ksf_test::Folder,
        fs: Fs,
        hung: Arc<Export>,
        other: Arc<Export>,
    }

    impl Two {
        fn new(bounds: FsOptions) -> Self {
            let folder = ksf_test::Folder::to_export();
            let mut fs = Fs::new(bounds).unwrap();
            let [hung, other] = ["hung", "other"].map(|name| {
                std::fs::create_dir(folder.path(name)).unwrap();
                let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
                fs.add_export(&folder.path(name), &folder.path("state"), options).unwrap()
            });
            Self { _folder: folder, fs, hung, other }
        }

        /// Makes a file with this content and finds it.
        fn make(&self, lane: &mut Lane, export: &Export, name: &str) -> Handle {
            std::fs::write(export.path().join(name), "text").unwrap();
            self.find(lane, export, name)
        }

        fn find(&self, lane: &mut Lane, export: &Export, name: &str) -> Handle {
            self.fs.lookup(lane, &root(), export.root(), name.as_bytes()).result.unwrap().handle
        }

        fn read(&self, lane: &mut Lane, file: &Handle) {
            self.fs.read(lane, &root(), file, 0, 4, &mut Vec::new()).result.unwrap();
        }

        fn write(&self, lane: &mut Lane, file: &Handle, stable: Stable) {
            self.fs.write(lane, &root(), file, 0, b"text", stable).result.unwrap();
        }

        /// Descriptors of this process for what has, or had, a name in an export or below one.
        fn open_in(&self, path: &Path) -> usize {
            let of = |fd: std::io::Result<std::fs::DirEntry>| std::fs::read_link(fd.unwrap().path()).ok();
            let all = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(of);
            all.filter(|target| target.starts_with(path) && target != path).count()
        }
    }

    #[test]
    fn a_disk_that_hangs_stops_the_clock_for_no_other_export() {
        let two = Two::new(FsOptions::default());
        on_lane(|lane| {
            let [read, written] = ["read", "written"].map(|name| two.make(lane, &two.hung, name));
            let tool = two.make(lane, &two.other, "tool");
            two.read(lane, &read);
            two.write(lane, &written, Stable::Unstable);
            two.write(lane, &tool, Stable::FileSync);
            ["read", "written"].iter().for_each(|name| std::fs::remove_file(two.hung.path().join(name)).unwrap());
            let (hung, tool) = (two.hung.path(), two.other.path().join("tool"));
            let (open, hang) = (two.open_in(hung), two.hung.closing.closer().hang());
            assert_eq!(open_for_writing(&tool), 1);
            (0..20).for_each(|_| drop(two.fs.close_idle()));
            ksf_test::wait_until("the file of the other can be executed", || open_for_writing(&tool) == 0);
            assert_eq!(two.open_in(hung), open, "none is closed by a thread that serves both");
            assert_eq!(two.fs.counters().uncommitted_files, 1, "nor looked at");
            drop(hang);
            ksf_test::wait_until("all are closed", || two.open_in(hung) == 0);
            assert_eq!(two.fs.counters().uncommitted_files, 0);
        });
    }

    #[test]
    fn descriptors_that_give_way_to_another_export_are_closed_by_a_thread_of_their_own() {
        const MAX: usize = 256;
        let two = Two::new(FsOptions { descriptors_max: MAX, ..FsOptions::default() });
        on_lane(|lane| {
            for number in 0..MAX {
                let file = two.make(lane, &two.hung, &number.to_string());
                two.read(lane, &file);
            }
            let (hung, other) = (two.hung.path(), two.other.path());
            (0..MAX).for_each(|number| std::fs::remove_file(hung.join(number.to_string())).unwrap());
            let (open, hang) = (two.open_in(hung), two.hung.closing.closer().hang());
            for number in 0..2 * MAX {
                let file = two.make(lane, &two.other, &number.to_string());
                two.read(lane, &file);
                assert_eq!(two.open_in(hung), open, "none is closed by a lane of the other");
                assert!(open + two.open_in(other) <= MAX);
            }
            assert!(two.open_in(other) > 0, "some have given way");
            drop(hang);
            for number in 0..2 * MAX {
                two.find(lane, &two.other, &number.to_string());
            }
            ksf_test::wait_until("they are closed", || two.open_in(hung) < open);
        });
    }

    #[test]
    fn a_name_that_is_to_go_to_another_export_has_nothing_looked_at_there() {
        let two = Two::new(FsOptions::default());
        on_lane(|lane| {
            let file = two.make(lane, &two.hung, "file");
            std::fs::create_dir(two.other.path().join("gone")).unwrap();
            let gone = two.find(lane, &two.other, "gone");
            std::fs::remove_dir(two.other.path().join("gone")).unwrap();
            let renamed = two.fs.rename(lane, &root(), two.hung.root(), b"file", &gone, b"file");
            assert_eq!(kind(renamed.result), ErrorKind::CrossesDevice);
            for (file, folder) in [(&file, &gone), (&gone, two.hung.root())] {
                let linked = two.fs.link(lane, &root(), file, folder, b"link");
                assert_eq!(kind(linked.result), ErrorKind::CrossesDevice);
            }
        });
    }

    #[test]
    fn shards_open_nothing_while_too_much_waits_to_be_closed() {
        const FILES: usize = 2000;
        let (mut turn, mut share) = (WarmTurn::default(), WarmShare::default());
        let two = Two::new(FsOptions { descriptors_max: 256, ..FsOptions::default() });
        on_lane(|lane| {
            (0..FILES).for_each(|number| std::fs::write(two.hung.path().join(number.to_string()), "").unwrap());
            let mut look = |number: usize| {
                // A lane keeps the folder open, and its rights known.
                two.fs.access(lane, &root(), two.hung.root(), Access::EXECUTE).result.unwrap();
                turn.end();
                let name = number.to_string();
                two.fs.warm(&mut turn, &mut share).lookup(&root(), two.hung.root(), name.as_bytes()).is_some()
            };
            ksf_test::wait_until("the rights are kept", || look(0));
            let hang = two.hung.closing.closer().hang();
            let answered = (0..FILES).filter(|number| look(*number)).count();
            assert!((100..=256).contains(&answered), "{answered}");
            drop(hang);
            ksf_test::wait_until("there is room", || look(FILES - 1));
        });
    }
}
