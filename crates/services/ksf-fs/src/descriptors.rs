//! Descriptors that are kept open between calls.
//!
//! A descriptor names an inode, as a handle does, so renames do not matter to it; whether the inode still has a name is asked of
//! the kernel with each use (`stx_nlink`). What may be done with it is asked, too, for each caller: descriptors are opened as the
//! server, so that callers share them.
//!
//! Exports share the bound, and none waits for the disk of another: an object that gives way to one of another export is closed by a
//! thread of its own ([`Closing`]). An export of which too many wait there keeps its objects, and those of others give way.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use crate::attr::Time;
use crate::closing::{Closing, Passed, WAITING_MAX};
use crate::handle::Handle;
use crate::lru::Lru;
use crate::ops::Access;
use crate::rights::{Question, Rights, Who};

/// Parts of the cache, each with its own lock.
const PARTS: usize = 16;

/// How long a descriptor for writing is kept: a file that is open for writing cannot be executed.
const WRITABLE_SECONDS: u64 = 2;
/// Share of the bound for what waits to be closed, of all exports together.
const WAITING_SHARE: usize = 8;

/// What a descriptor was opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The object itself (O_PATH): attributes, names in a folder.
    Path,
    /// Reading the bytes of a file.
    Read,
    /// Writing them.
    Write,
}

/// The descriptors of one object.
#[derive(Debug, Default)]
struct Open {
    modes: [Option<Arc<OwnedFd>>; 3],
    /// For reading entries. It has a position, so one call at a time has it.
    entries: Option<OwnedFd>,
    /// Used since the last look for idle ones.
    is_used: bool,
    /// Time since that for writing was opened.
    writable_seconds: u64,
    /// What callers may do with the object, as far as the kernel was asked.
    rights: Rights,
}

impl Open {
    fn count(&self) -> usize {
        self.modes.iter().flatten().count() + usize::from(self.entries.is_some())
    }

    /// One that was opened for this; for [`Mode::Path`] any will do.
    fn of(&self, mode: Mode) -> Option<&Arc<OwnedFd>> {
        let any = || self.modes.iter().flatten().next().filter(|_| mode == Mode::Path);
        self.modes[mode as usize].as_ref().or_else(any)
    }
}

/// What the cache has let go of one export. Dropping it closes descriptors, which may wait for the disk.
#[derive(Debug, Default)]
#[must_use = "dropping it may wait for a disk"]
pub(crate) struct Gone {
    descriptor: Option<Arc<OwnedFd>>,
    objects: Vec<Open>,
}

impl Gone {
    pub(crate) fn of(descriptor: OwnedFd) -> Self {
        Self { descriptor: Some(Arc::new(descriptor)), objects: Vec::new() }
    }

    pub(crate) fn count(&self) -> usize {
        usize::from(self.descriptor.is_some()) + self.objects.iter().map(Open::count).sum::<usize>()
    }

    /// True if a file in it is open for writing, so that nobody executes it.
    pub(crate) fn is_writable(&self) -> bool {
        self.objects.iter().any(|open| open.modes[Mode::Write as usize].is_some())
    }
}

#[derive(Debug, Default)]
struct Part {
    objects: Lru<Handle, Open>,
    count: usize,
}

/// The exports, which share the bound.
#[derive(Debug)]
struct Exports {
    part_max: usize,
    /// By the id of the export.
    closing: Vec<(u32, Arc<Closing>)>,
}

impl Exports {
    fn closing_of(&self, handle: &Handle) -> Option<&Closing> {
        let id = handle.export_id();
        self.closing.iter().find(|(export_id, _)| *export_id == id).map(|(_, closing)| &**closing)
    }
}

/// The cache, bounded in descriptors.
#[derive(Debug)]
pub(crate) struct Descriptors {
    parts: [Mutex<Part>; PARTS],
    max: usize,
    exports: RwLock<Exports>,
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) evicted: AtomicU64,
}

impl Descriptors {
    /// For at most `descriptors_max`, with those that wait to be closed, but 16 and one of each export.
    pub(crate) fn new(descriptors_max: usize) -> Self {
        Self {
            parts: Default::default(),
            max: descriptors_max,
            exports: RwLock::new(Exports { part_max: (descriptors_max / PARTS).max(1), closing: Vec::new() }),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Adds an export, and divides the bound anew.
    pub(crate) fn add_export(&self, export_id: u32, closing: &Arc<Closing>) {
        let mut exports = self.exports.write().unwrap_or_else(PoisonError::into_inner);
        exports.closing.push((export_id, Arc::clone(closing)));
        let count = exports.closing.len();
        let waiting_max = (self.max / WAITING_SHARE / count).clamp(1, WAITING_MAX);
        exports.closing.iter().for_each(|(_, closing)| closing.set_max(waiting_max));
        exports.part_max = (self.max.saturating_sub(count * waiting_max) / PARTS).max(1);
    }

    fn exports(&self) -> RwLockReadGuard<'_, Exports> {
        self.exports.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn part(&self, handle: &Handle) -> MutexGuard<'_, Part> {
        self.lock((handle.number() % PARTS as u64) as usize)
    }

    fn lock(&self, part: usize) -> MutexGuard<'_, Part> {
        self.parts[part].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that was opened for this; for [`Mode::Path`] any will do.
    pub(crate) fn get(&self, handle: &Handle, mode: Mode) -> Option<Arc<OwnedFd>> {
        let mut part = self.part(handle);
        let found = part.objects.get(handle).and_then(|open| {
            open.is_used = true;
            open.of(mode).map(Arc::clone)
        });
        drop(part);
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// [`Descriptors::get`], but never one for writing, and without a count of what is not there.
    pub(crate) fn peek(&self, handle: &Handle, mode: Mode) -> Option<Arc<OwnedFd>> {
        let mut part = self.part(handle);
        let open = part.objects.get(handle)?;
        let read = || open.modes[Mode::Read as usize].as_ref();
        let found =
            Arc::clone(if mode == Mode::Path { open.modes[mode as usize].as_ref().or_else(read) } else { read() }?);
        open.is_used = true;
        drop(part);
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(found)
    }

    /// Keeps a descriptor. The one before of the same mode, and what of the same export has no room any more, is closed with what is
    /// returned.
    pub(crate) fn put(&self, handle: &Handle, mode: Mode, descriptor: &Arc<OwnedFd>) -> Gone {
        let mut before = None;
        let gone = self.change(handle, |open| {
            before = open.modes[mode as usize].replace(Arc::clone(descriptor));
            if mode == Mode::Write {
                open.writable_seconds = 0;
            }
        });
        Gone { descriptor: before, ..gone }
    }

    /// Which of the wanted rights a caller has to an object, if the kernel said so.
    pub(crate) fn granted(&self, handle: &Handle, who: Who, ctime: Time, wanted: Access) -> Option<Access> {
        self.part(handle).objects.get(handle)?.rights.granted(who, ctime, wanted)
    }

    /// Keeps what the kernel said.
    pub(crate) fn keep_rights(
        &self,
        handle: &Handle,
        who: Who,
        question: Question,
        asked_for: Access,
        granted: Access,
    ) {
        if question.is_settled
            && let Some(open) = self.part(handle).objects.get(handle)
        {
            open.rights.keep(who, question, asked_for, granted);
        }
    }

    /// That for reading entries, which the caller then has alone.
    pub(crate) fn take_entries(&self, handle: &Handle) -> Option<OwnedFd> {
        let mut part = self.part(handle);
        let taken = part.objects.get(handle)?.entries.take();
        part.count -= usize::from(taken.is_some());
        taken
    }

    pub(crate) fn put_entries(&self, handle: &Handle, descriptor: OwnedFd) {
        let mut before = None;
        let gone = self.change(handle, |open| before = open.entries.replace(descriptor));
        drop((before, gone));
    }

    /// Changes the entry of an object, and lets the oldest objects go for it: outside of the lock, closing may wait for a disk.
    fn change(&self, handle: &Handle, change: impl FnOnce(&mut Open)) -> Gone {
        let mut gone = Gone::default();
        let exports = self.exports();
        let mut part = self.part(handle);
        if part.objects.get(handle).is_none() {
            part.objects.insert(handle.clone(), Open::default());
        }
        if let Some(open) = part.objects.get(handle) {
            let before = open.count();
            change(open);
            open.is_used = true;
            let after = open.count();
            part.count = part.count + after - before;
        }
        while part.count > exports.part_max && part.objects.len() > 1 {
            let is_gone = self.evict(&exports, &mut part, handle.export_id(), Some(handle), &mut gone);
            // None of the others may go: this one is not kept.
            if !is_gone && !self.evict(&exports, &mut part, handle.export_id(), None, &mut gone) {
                break;
            }
        }
        drop(part);
        gone
    }

    /// Lets the oldest object go that may, but not `kept`: one of this export into `gone`, another to the thread of its own. False: there
    /// is none.
    fn evict(
        &self,
        exports: &Exports,
        part: &mut Part,
        export_id: u32,
        kept: Option<&Handle>,
        gone: &mut Gone,
    ) -> bool {
        let other = |handle: &Handle| exports.closing_of(handle).filter(|_| handle.export_id() != export_id);
        let may_go = |handle: &Handle| Some(handle) != kept && other(handle).is_none_or(Closing::has_room);
        let Some((handle, oldest)) = part.objects.pop_oldest_if(may_go) else { return false };
        part.count -= oldest.count();
        self.evicted.fetch_add(1, Ordering::Relaxed);
        match other(&handle) {
            Some(closing) => closing.add(Gone { descriptor: None, objects: vec![oldest] }),
            None => gone.objects.push(oldest),
        }
        true
    }

    /// Closes those of an object that has lost a name, or is gone.
    pub(crate) fn forget(&self, handle: &Handle) {
        let mut part = self.part(handle);
        let gone = part.objects.remove(handle);
        part.count -= gone.as_ref().map_or(0, Open::count);
        drop(part);
        drop(gone);
    }

    /// Closes that for writing.
    pub(crate) fn close_writable(&self, handle: &Handle) {
        let mut part = self.part(handle);
        let Some(open) = part.objects.get(handle) else { return };
        let closed = open.modes[Mode::Write as usize].take();
        if open.count() == 0 {
            part.objects.remove(handle);
        }
        part.count -= usize::from(closed.is_some());
        drop(part);
        drop(closed);
    }

    /// Lets a quarter of each part go, for a lane of this export: the process has no descriptors left.
    pub(crate) fn make_room(&self, export_id: u32) {
        let (exports, mut all) = (self.exports(), Vec::new());
        for at in 0..PARTS {
            let mut gone = Gone::default();
            let mut part = self.lock(at);
            for _ in 0..part.objects.len().div_ceil(4) {
                if !self.evict(&exports, &mut part, export_id, None, &mut gone) {
                    break;
                }
            }
            drop(part);
            all.push(gone);
        }
        exports.closing.iter().for_each(|(_, closing)| closing.flush());
        // Without a lock.
        drop(exports);
        drop(all);
    }

    /// Closes those of an export for writing that are open for two seconds, whoever uses them, and at each look those that were not
    /// used since the look before: a file that a local program removed keeps its space until then. To be called by a thread of the
    /// export.
    pub(crate) fn close_idle(&self, export_id: u32, passed: Passed) {
        let (seconds, looks) = (passed.seconds(), passed.looks());
        for at in 0..PARTS {
            let mut closed = Vec::new();
            let mut part = self.lock(at);
            let gone = part.objects.take_if(|handle, open| {
                if handle.export_id() != export_id {
                    return false;
                }
                open.writable_seconds = open.writable_seconds.saturating_add(seconds);
                if open.writable_seconds >= WRITABLE_SECONDS {
                    closed.extend(open.modes[Mode::Write as usize].take());
                }
                open.count() == 0 || looks > 1 || looks == 1 && !std::mem::take(&mut open.is_used)
            });
            drop(part);
            let count = closed.len() + gone.iter().map(Open::count).sum::<usize>();
            drop((closed, gone));
            // They count until they are closed.
            self.lock(at).count -= count;
        }
    }

    pub(crate) fn count(&self) -> usize {
        (0..PARTS).map(|part| self.lock(part).count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Key;
    use crate::sys::KernelHandle;

    fn handle(number: u32) -> Handle {
        let kernel = KernelHandle::new(1, &number.to_be_bytes()).unwrap();
        Handle::new(1, &Key([3; 16]), &kernel).unwrap()
    }

    fn descriptor() -> Arc<OwnedFd> {
        Arc::new(std::fs::File::open("/dev/null").unwrap().into())
    }

    #[test]
    fn they_are_kept_by_handle_and_mode() {
        let cache = Descriptors::new(1000);
        let (read, write) = (descriptor(), descriptor());
        drop(cache.put(&handle(1), Mode::Read, &read));
        drop(cache.put(&handle(1), Mode::Write, &write));
        assert!(Arc::ptr_eq(&cache.get(&handle(1), Mode::Read).unwrap(), &read));
        assert!(Arc::ptr_eq(&cache.get(&handle(1), Mode::Write).unwrap(), &write));
        assert!(cache.get(&handle(1), Mode::Path).is_some(), "any will do");
        assert!(cache.get(&handle(2), Mode::Path).is_none());
        drop(cache.put(&handle(2), Mode::Path, &descriptor()));
        assert!(cache.get(&handle(2), Mode::Read).is_none());
        assert_eq!(cache.count(), 3);
        cache.forget(&handle(1));
        assert!(cache.get(&handle(1), Mode::Read).is_none());
        assert_eq!((cache.count(), Arc::strong_count(&read)), (1, 1));
    }

    #[test]
    fn there_are_never_more_than_the_bound() {
        let cache = Descriptors::new(64);
        let shared = descriptor();
        for number in 0..2000 {
            drop(cache.put(&handle(number), Mode::Path, &shared));
            drop(cache.put(&handle(number), Mode::Read, &shared));
            assert!(cache.get(&handle(number), Mode::Read).is_some(), "the newest stays");
            assert!(cache.count() <= 64);
        }
        assert_eq!(Arc::strong_count(&shared), 1 + cache.count());
        cache.make_room(1);
        assert!(cache.count() < 64);
    }

    #[test]
    fn entries_belong_to_one_call_at_a_time() {
        let cache = Descriptors::new(64);
        assert!(cache.take_entries(&handle(1)).is_none());
        cache.put_entries(&handle(1), std::fs::File::open("/").unwrap().into());
        assert_eq!(cache.count(), 1);
        assert!(cache.take_entries(&handle(1)).is_some());
        assert_eq!(cache.count(), 0);
        assert!(cache.take_entries(&handle(1)).is_none());
    }

    #[test]
    fn what_nothing_used_is_closed() {
        let cache = Descriptors::new(64);
        let (one, two) = (descriptor(), descriptor());
        drop(cache.put(&handle(1), Mode::Read, &one));
        drop(cache.put(&handle(2), Mode::Read, &two));
        let pass = |before| cache.close_idle(1, Passed { before, now: before + 1 });
        (0..10).for_each(pass);
        assert_eq!(cache.count(), 2, "used before the first look");
        assert!(cache.get(&handle(2), Mode::Read).is_some());
        (10..20).for_each(pass);
        assert_eq!((Arc::strong_count(&one), Arc::strong_count(&two)), (1, 2));
        // The thread was busy for two looks.
        cache.close_idle(1, Passed { before: 20, now: 40 });
        assert_eq!((cache.count(), Arc::strong_count(&two)), (0, 1));
    }

    #[test]
    fn those_for_writing_are_closed_however_much_they_are_used() {
        let cache = Descriptors::new(64);
        let (read, write) = (descriptor(), descriptor());
        drop(cache.put(&handle(1), Mode::Read, &read));
        drop(cache.put(&handle(1), Mode::Write, &write));
        drop(cache.put(&handle(2), Mode::Write, &write));
        cache.close_idle(1, Passed { before: 0, now: 1 });
        assert!(cache.get(&handle(1), Mode::Write).is_some());
        cache.close_idle(1, Passed { before: 1, now: 2 });
        assert_eq!((cache.count(), Arc::strong_count(&write)), (1, 1));
        drop(cache.put(&handle(1), Mode::Write, &write));
        cache.close_writable(&handle(1));
        cache.close_writable(&handle(2));
        assert_eq!((cache.count(), Arc::strong_count(&write), Arc::strong_count(&read)), (1, 1, 2));
    }
}
