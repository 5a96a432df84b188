//! Calls without a lane: the shard answers them at once from the kernel's memory.
//!
//! Each is a short cut for the lane operation of the same name, and answers as that one does. `None`: the caller runs the
//! operation on a lane. A shard must not wait, so a call is answered here only if
//!
//! - the file system is a local one ([`Export::is_warm`]), which has the inode of an open object in memory;
//! - the object is already open: opening a handle may read the disk;
//! - names resolve with RESOLVE_CACHED, which fails with EAGAIN instead of waiting;
//! - the page cache has all bytes (cachestat(2), since Linux 6.5), with those of the kernel's readahead: RWF_NOWAIT alone
//!   starts the I/O before it fails with EAGAIN, and waits for a place in the disk's queue;
//! - the read does not change the access time, which reserves space in the journal;
//! - the shard closes no descriptor that may be the last one of an inode ([`Closing`](crate::closing::Closing)).
//!
//! A shard never takes a caller's identity. It uses the kernel's earlier answers on a lane to that caller, while they hold
//! ([`rights`](crate::rights)).
//!
//! A connection has a share of each turn of its shard ([`WarmShare`]). Its requests beyond that run on lanes.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Mode as Permissions, ResolveFlags};
use rustix::io::Errno;

use crate::attr::{ASKED, Attr, FileType, Found, Seen};
use crate::credential::Credential;
use crate::descriptors::{Gone, Mode};
use crate::export::{AccessTimes, Export};
use crate::handle::Handle;
use crate::layer::{Fs, INSIDE, OBJECT, checked_name};
use crate::ops::{Access, FILE_SIZE_MAX, OpenFile, ReadDone, possible};
use crate::sys;

/// Most bytes that a shard copies for one call: about 10 us.
pub const WARM_READ_BYTES_MAX: usize = 64 << 10;

/// Share of a connection in a turn of its shard, in steps of about 5 us: a millisecond.
const SHARE_STEPS: u32 = 200;
/// Share of all connections of a file server in a turn of a shard, which has other services, too.
const TURN_STEPS: u32 = 600;
/// Bytes read in the time of a step.
const STEP_BYTES: u32 = 32 << 10;

/// A turn of a shard.
#[derive(Clone, Copy, Debug, Default)]
pub struct WarmTurn {
    number: u64,
    steps: u32,
}

impl WarmTurn {
    /// The turn is over.
    pub fn end(&mut self) {
        *self = Self { number: self.number + 1, steps: 0 };
    }
}

/// Use of a connection's share in a turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct WarmShare {
    turn: u64,
    steps: u32,
}

/// The file layer as a shard uses it, for one call of a connection.
pub struct Warm<'a> {
    fs: &'a Fs,
    turn: &'a mut WarmTurn,
    share: &'a mut WarmShare,
}

impl Fs {
    /// The short cuts of this layer. `turn` is that of the shard; `share` belongs to the connection.
    pub fn warm<'a>(&'a self, turn: &'a mut WarmTurn, share: &'a mut WarmShare) -> Warm<'a> {
        if share.turn != turn.number {
            *share = WarmShare { turn: turn.number, steps: 0 };
        }
        Warm { fs: self, turn, share }
    }

    /// Counts a call that was answered without a lane.
    pub fn count_warm(&self) {
        self.warm.fetch_add(1, Ordering::Relaxed);
    }

    /// Cached attributes of an object; makes no system call.
    ///
    /// Objects of [exclusive](crate::ExportOptions::exclusive) exports are cached from a `getattr` or a listing until the next change
    /// begins. A call that begins after another operation of this layer has ended never gets older attributes than that
    /// operation returned. An object's allocated bytes (`used`) may lag: file systems allocate blocks at write-back.
    pub(crate) fn known_attr(&self, handle: &Handle) -> Option<Attr> {
        self.attrs.get(handle)
    }
}

impl Warm<'_> {
    /// [`Fs::getattr`].
    pub fn getattr(&mut self, handle: &Handle) -> Option<Attr> {
        if let Some(attr) = self.fs.known_attr(handle) {
            return Some(attr);
        }
        self.step(0)?;
        let is_exclusive = self.fs.export_of(handle)?.options().exclusive;
        let filling = is_exclusive.then(|| self.fs.attrs.filling(handle)).flatten();
        let attr = self.open(handle, Mode::Path, attr_now)?;
        if let Some(filling) = filling {
            filling.keep(handle, &attr);
        }
        Some(attr)
    }

    /// [`Fs::access`].
    pub fn access(&mut self, credential: &Credential, handle: &Handle, want: Access) -> Option<Seen<Access>> {
        self.step(0)?;
        self.open(handle, Mode::Path, |export, object| {
            let attr = attr_now(export, object)?;
            let granted = self.granted(export, credential, handle, &attr, possible(want, export))?;
            Some(Seen { after: Some(attr), result: Ok(granted) })
        })
    }

    /// [`Fs::lookup`].
    pub fn lookup(&mut self, credential: &Credential, dir: &Handle, name: &[u8]) -> Option<Seen<Found>> {
        let name = checked_name(name).ok().filter(|name| !matches!(name.as_bytes(), b"." | b".."))?;
        self.step(0)?;
        self.open(dir, Mode::Path, |export, folder| {
            let attr = attr_now(export, folder).filter(|attr| attr.file_type == FileType::Directory)?;
            let may = self.granted(export, credential, dir, &attr, Access::EXECUTE)? == Access::EXECUTE;
            (may && export.closing.has_room()).then_some(())?;
            let resolve = INSIDE.union(ResolveFlags::CACHED);
            let result = match rustix::fs::openat2(folder, name.as_c_str(), OBJECT, Permissions::empty(), resolve) {
                Ok(object) => Ok(self.found(export, object, (dir, &name))?),
                Err(errno @ Errno::NOENT) => Err(errno.into()),
                Err(_) => return None,
            };
            Some(Seen { after: Some(attr), result })
        })
    }

    /// [`Fs::read`]. Without an answer, discard appended bytes. `None` for more than [`WARM_READ_BYTES_MAX`] bytes, too.
    pub fn read(
        &mut self,
        credential: &Credential,
        file: &Handle,
        offset: u64,
        wanted: usize,
        into: &mut Vec<u8>,
    ) -> Option<Seen<ReadDone>> {
        self.step(wanted)?;
        self.open(file, Mode::Read, |export, content| {
            let right = Access::READ_BY_HANDLE;
            let attr = attr_now(export, content)?;
            (self.granted(export, credential, file, &attr, right)? == right).then_some(())?;
            let count = read_cached(export, content, &attr, (offset, wanted), into)?;
            let eof = offset.saturating_add(count as u64) >= attr.size;
            Some(Seen { after: Some(attr), result: Ok(ReadDone { count, eof }) })
        })
    }

    /// [`Fs::read_open`]. Without an answer, discard appended bytes. `None` for more than [`WARM_READ_BYTES_MAX`] bytes, too.
    pub fn read_open(&mut self, file: &OpenFile, offset: u64, wanted: usize, into: &mut Vec<u8>) -> Option<usize> {
        let export = self.fs.export_of(file.handle()).filter(|export| export.is_warm())?;
        (file.file_type() == FileType::Regular && file.is_read()).then_some(())?;
        self.step(wanted)?;
        let descriptor = file.descriptor().ok()?;
        // The file may have lost its name.
        let attr = attr_of_open(export, descriptor)?;
        read_cached(export, descriptor, &attr, (offset, wanted), into)
    }

    /// Takes one step, and those for `bytes`, from the connection's share; `None` if none is left.
    fn step(&mut self, bytes: usize) -> Option<()> {
        (self.share.steps < SHARE_STEPS && self.turn.steps < TURN_STEPS).then_some(())?;
        let steps = 1 + bytes.min(WARM_READ_BYTES_MAX) as u32 / STEP_BYTES;
        self.share.steps += steps;
        self.turn.steps += steps;
        Some(())
    }

    /// Calls `work` with the cached descriptor of an object.
    fn open<T>(&self, handle: &Handle, mode: Mode, work: impl FnOnce(&Export, &OwnedFd) -> Option<T>) -> Option<T> {
        let export = self.fs.export_of(handle).filter(|export| export.is_warm())?;
        let descriptor = self.fs.descriptors.peek(handle, mode)?;
        let done = work(export, &descriptor);
        release(export, descriptor);
        done
    }

    /// The rights of a caller by the kernel's earlier answer.
    fn granted(
        &self,
        export: &Export,
        credential: &Credential,
        handle: &Handle,
        attr: &Attr,
        wanted: Access,
    ) -> Option<Access> {
        let caller = self.fs.known_caller(credential, export)?;
        self.fs.descriptors.granted(handle, self.fs.who_keys.who(&caller), attr.ctime, wanted)
    }

    /// Handle and attributes of a newly opened object. Caches its descriptor.
    fn found(&self, export: &Export, object: OwnedFd, (dir, name): (&Handle, &CStr)) -> Option<Found> {
        let attr = attr_now(export, &object);
        let handle = attr.and_then(|_| export.handle_of(&object).ok());
        let (Some(attr), Some(handle)) = (attr, handle) else {
            export.closing.add(Gone::of(object));
            return None;
        };
        export.learn(&handle, dir, name);
        match self.fs.descriptors.peek(&handle, Mode::Path) {
            Some(kept) => {
                // Not the last descriptor of the inode: `kept` is closed later.
                drop(object);
                release(export, kept);
            }
            None => export.closing.add(self.fs.descriptors.put(&handle, Mode::Path, &Arc::new(object))),
        }
        Some(Found { handle, attr })
    }
}

/// Ends the use of a cached descriptor; the cache may have evicted it meanwhile.
fn release(export: &Export, descriptor: Arc<OwnedFd>) {
    if let Some(last) = Arc::into_inner(descriptor) {
        export.closing.add(Gone::of(last));
    }
}

/// Attributes of an open object that still has a name, from its inode alone.
fn attr_now(export: &Export, object: &OwnedFd) -> Option<Attr> {
    attr_of_open(export, object).filter(|attr| attr.nlink > 0)
}

/// Attributes of an open object that may have no name, from its inode alone.
fn attr_of_open(export: &Export, object: &OwnedFd) -> Option<Attr> {
    let stat = rustix::fs::statx(object, c"", AtFlags::EMPTY_PATH, ASKED).ok()?;
    // A subvolume has another device number; its fsid takes more than the inode.
    let is_known = (stat.stx_dev_major, stat.stx_dev_minor) == export.device;
    is_known.then(|| Attr::of(&stat, export.id(), 0))
}

/// Appends up to `wanted` bytes of a file, if the page cache has them. `attr`: current attributes, from before the read.
fn read_cached(
    export: &Export,
    file: &OwnedFd,
    attr: &Attr,
    (offset, wanted): (u64, usize),
    into: &mut Vec<u8>,
) -> Option<usize> {
    (wanted <= WARM_READ_BYTES_MAX && offset <= FILE_SIZE_MAX).then_some(())?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (wanted == 0 || !changes_access_time(export.access_times, attr, now)).then_some(())?;
    let end = offset.saturating_add(wanted as u64).min(attr.size);
    let Some(length) = end.checked_sub(offset).filter(|length| *length > 0) else { return Some(0) };
    let ahead = end.saturating_add(export.ahead_bytes?).min(attr.size);
    let page = rustix::param::page_size() as u64;
    let pages = ahead.div_ceil(page) - offset / page;
    (sys::cached_pages(file, offset, ahead - offset).ok()? >= pages).then_some(())?;
    let count = sys::read_behind(file, offset, length as usize, into, libc::RWF_NOWAIT).ok()?;
    // Shorter: the file was truncated, or pages were reclaimed meanwhile.
    (count as u64 == length).then_some(count)
}

/// The kernel's rule (`relatime_need_update` of fs/inode.c, Linux 6.18).
fn changes_access_time(access_times: AccessTimes, attr: &Attr, now: Duration) -> bool {
    let is_old = || i64::try_from(now.as_secs()).is_ok_and(|now| now - attr.atime.seconds >= 24 * 60 * 60);
    match access_times {
        AccessTimes::Never => false,
        AccessTimes::AfterChanges => attr.mtime >= attr.atime || attr.ctime >= attr.atime || is_old(),
        AccessTimes::Always => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::Time;
    use crate::common::{Served, root};
    use crate::lane::Lane;
    use crate::ops::OpenHow;

    #[test]
    fn a_read_changes_the_access_time_as_the_mount_says() {
        const DAY: i64 = 24 * 60 * 60;
        let attr = |atime, mtime, ctime| {
            let time = |seconds| Time { seconds, nanos: 0 };
            let (atime, mtime, ctime) = (time(atime), time(mtime), time(ctime));
            let device = (0, 0);
            Attr {
                file_type: FileType::Regular,
                mode: 0,
                nlink: 1,
                uid: 0,
                gid: 0,
                size: 1,
                used: 0,
                device,
                fsid: 0,
                fileid: 1,
                atime,
                mtime,
                ctime,
            }
        };
        for (atime, mtime, ctime, now, after_changes) in [
            (100, 99, 99, 101, false),
            (100, 100, 99, 101, true),
            (100, 99, 100, 101, true),
            (100, 99, 99, 100 + DAY - 1, false),
            (100, 99, 99, 100 + DAY, true),
        ] {
            let changes = |how| changes_access_time(how, &attr(atime, mtime, ctime), Duration::from_secs(now as u64));
            assert!(!changes(AccessTimes::Never) && changes(AccessTimes::Always));
            assert_eq!(changes(AccessTimes::AfterChanges), after_changes, "{atime} {mtime} {ctime} {now}");
        }
    }

    /// A thread that is a shard and a lane, with an export of one file, open for reading.
    struct Shard {
        served: Served,
        lane: Lane,
        file: OpenFile,
        attr: Attr,
    }

    impl Shard {
        fn with_file(bytes: &[u8]) -> Self {
            let served = Served::open_to_all();
            std::fs::write(served.path("file"), bytes).unwrap();
            let mut lane = Lane::attach().unwrap();
            let found = served.find(&mut lane, "file");
            let (file, attr) = served.fs.open(&mut lane, &root(), &found.handle, OpenHow::READ).unwrap();
            Self { served, lane, file, attr }
        }

        /// `None`: shards do not read on this file system.
        fn that_reads(bytes: &[u8]) -> Option<Self> {
            let shard = Self::with_file(bytes);
            ksf_test::reads_at_once(shard.served.export.path()).then_some(shard)
        }

        fn read_at_once(&self, offset: u64, wanted: usize) -> Option<usize> {
            let (mut turn, mut share) = (WarmTurn::default(), WarmShare::default());
            let mut warm = self.served.fs.warm(&mut turn, &mut share);
            warm.read_open(&self.file, offset, wanted, &mut Vec::new())
        }

        fn read_on_the_lane(&self, offset: u64, wanted: usize) {
            self.served.fs.read_open(&self.lane, &self.file, offset, wanted, &mut Vec::new()).unwrap();
        }
    }

    #[test]
    fn a_shard_does_not_have_the_medium_read() {
        const STEP: usize = 64 << 10;
        let Some(shard) = Shard::that_reads(&[7; 4 << 20]) else { return };
        let content = shard.file.descriptor().unwrap();
        rustix::fs::fsync(content).unwrap();
        // Of this file alone, with those that are being read: they are in memory before a read of the lane ends.
        let cached_pages = || sys::cached_pages(content, 0, 4 << 20).unwrap();
        let forget = |from| rustix::fs::fadvise(content, from, None, rustix::fs::Advice::DontNeed).unwrap();
        for offset in (0..1 << 20).step_by(STEP) {
            // Behind a read in order, the kernel has read ahead, and marked where a read makes it go on.
            forget(0);
            (0..offset).step_by(STEP).for_each(|before| shard.read_on_the_lane(before, STEP));
            forget(offset + STEP as u64);
            let before = cached_pages();
            shard.read_at_once(offset, STEP);
            let after = cached_pages();
            // The kernel may have taken some back.
            assert!(after <= before, "{offset}: {before} pages, then {after}");
        }
    }

    /// The page cache may lose a page between the question for it and the read.
    #[test]
    fn a_shard_does_not_wait_for_the_medium() {
        let reads_at_once = || {
            let Some(shard) = Shard::that_reads(b"text") else { return true };
            shard.read_on_the_lane(0, 4);
            ksf_test::refuse_waiting_reads();
            shard.read_at_once(0, 4) == Some(4)
        };
        // The filter stays with its thread. The kernel may take the page back, or have set the time of access in the tick of
        // the change.
        ksf_test::wait_until("the shard reads", || std::thread::spawn(reads_at_once).join().unwrap());
    }

    #[test]
    fn reads_go_to_a_lane_where_the_kernel_refuses_cachestat() {
        for errno in [Errno::PERM, Errno::NOSYS] {
            let test = move || {
                let shard = Shard::with_file(b"text");
                sys::refuse_cachestat(errno);
                let Shard { served: Served { fs, export, .. }, lane, file, attr } = &shard;
                assert_eq!(sys::cached_pages(file.descriptor().unwrap(), 0, 4), Err(errno));
                let (mut turn, mut share, mut into) = (WarmTurn::default(), WarmShare::default(), Vec::new());
                let mut warm = fs.warm(&mut turn, &mut share);
                assert_eq!((warm.read_open(file, 0, 4, &mut into), into.len()), (None, 0));
                let known = warm.getattr(file.handle());
                assert_eq!(known, export.is_warm().then_some(*attr), "other calls do not need it");
                assert_eq!(fs.read_open(lane, file, 0, 4, &mut into), Ok(4));
                assert_eq!(into, b"text");
            };
            // The filter stays with its thread.
            std::thread::spawn(test).join().unwrap();
        }
    }
}
