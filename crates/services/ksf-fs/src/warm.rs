//! Calls that need no lane: what the kernel has in memory is answered on the shard, at once.
//!
//! Each is a short cut for an operation of the same name on a lane, answers as that one does, and answers `None` where it
//! cannot: then the operation runs on a lane. A shard must not wait, so a call is taken here only if
//!
//! - the file system is one of this machine's own ([`Export::is_warm`]), where attributes of an open object are read from memory;
//! - the object is open already: opening a handle may read the medium;
//! - names are looked up by RESOLVE_CACHED, bytes read by RWF_NOWAIT, which end with EAGAIN where they would wait;
//! - nothing is closed here: [`Closing`](crate::closing::Closing).
//!
//! A shard does not change its identity. What a caller may do is what the kernel said on a lane before, while that holds
//! ([`rights`](crate::rights)).

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{AtFlags, Mode as Permissions, ResolveFlags};
use rustix::io::Errno;

use crate::attr::{ASKED, Attr, FileType, Found, Seen};
use crate::credential::{Credential, Identity};
use crate::descriptors::{Gone, Mode};
use crate::export::Export;
use crate::handle::Handle;
use crate::lane::Identities;
use crate::lanes::Lanes;
use crate::layer::{Fs, INSIDE, OBJECT, READ_BIT, checked_name, permit};
use crate::ops::{Access, FILE_SIZE_MAX, OpenFile, ReadDone, granted, possible};
use crate::pool::Length;
use crate::sys;

/// Bytes that a shard copies for one call, at most: about 10 us.
pub const WARM_READ_BYTES_MAX: usize = 64 << 10;

/// The file layer for a shard.
#[derive(Clone, Copy)]
pub struct Warm<'a> {
    fs: &'a Fs,
    lanes: &'a Lanes,
}

impl Fs {
    /// The short cuts of this layer. `lanes` close what a shard is done with.
    pub fn warm<'a>(&'a self, lanes: &'a Lanes) -> Warm<'a> {
        Warm { fs: self, lanes }
    }

    /// The attributes of an object, if they are known without a system call.
    ///
    /// Known are those of exports that are [exclusive](crate::ExportOptions::exclusive), from a `getattr` until the next change
    /// begins. A call that begins after another operation of this layer has ended is never told older attributes than that one told.
    /// The bytes that an object takes (`used`) may lag behind: file systems choose blocks when they write data out.
    pub(crate) fn known_attr(&self, handle: &Handle) -> Option<Attr> {
        self.attrs.get(handle)
    }
}

impl<'a> Warm<'a> {
    /// [`Fs::getattr`].
    pub fn getattr(self, handle: &Handle) -> Option<Attr> {
        if let Some(attr) = self.fs.known_attr(handle) {
            return Some(attr);
        }
        let is_exclusive = self.fs.export_of(handle)?.options().exclusive;
        let filling = is_exclusive.then(|| self.fs.attrs.filling(handle)).flatten();
        let attr = self.open(handle, Mode::Path, attr_now)?;
        if let Some(filling) = filling {
            filling.keep(handle, &attr);
        }
        self.answer(attr)
    }

    /// [`Fs::access`].
    pub fn access(self, credential: &Credential, handle: &Handle, want: Access) -> Option<Seen<Access>> {
        self.open(handle, Mode::Path, |export, object| {
            let attr = attr_now(export, object)?;
            let want = possible(want, export);
            let granted = match self.fs.identities {
                Identities::Own => granted(object, want),
                Identities::Callers => self.granted(export, credential, handle, &attr, want)?,
            };
            self.answer(Seen { after: Some(attr), result: Ok(granted) })
        })
    }

    /// [`Fs::lookup`].
    pub fn lookup(self, credential: &Credential, dir: &Handle, name: &[u8]) -> Option<Seen<Found>> {
        let name = checked_name(name).ok().filter(|name| !matches!(name.as_bytes(), b"." | b".."))?;
        self.open(dir, Mode::Path, |export, folder| {
            let attr = attr_now(export, folder).filter(|attr| attr.file_type == FileType::Directory)?;
            // As its own user the server is checked by the lookup itself.
            if self.fs.identities == Identities::Callers
                && self.granted(export, credential, dir, &attr, Access::EXECUTE)? != Access::EXECUTE
            {
                return None;
            }
            let resolve = INSIDE.union(ResolveFlags::CACHED);
            let result = match rustix::fs::openat2(folder, name.as_c_str(), OBJECT, Permissions::empty(), resolve) {
                Ok(object) => Ok(self.found(export, object, (dir, &name))?),
                Err(errno @ Errno::NOENT) => Err(errno.into()),
                Err(_) => return None,
            };
            self.answer(Seen { after: Some(attr), result })
        })
    }

    /// [`Fs::read`]; what was appended counts with an answer only. `None` for more than [`WARM_READ_BYTES_MAX`] bytes, too.
    pub fn read(
        self,
        credential: &Credential,
        file: &Handle,
        offset: u64,
        wanted: usize,
        into: &mut Vec<u8>,
    ) -> Option<Seen<ReadDone>> {
        // The time of the last access.
        let changing = self.fs.attrs.changing(file);
        let read = self.open(file, Mode::Read, |export, content| {
            let count = read_cached(content, offset, wanted, into)?;
            // After it: what was read goes to nobody if the rights changed meanwhile.
            let attr = attr_now(export, content)?;
            let may = match self.fs.identities {
                Identities::Own => permit(content, READ_BIT, &Identity::own()).is_ok(),
                Identities::Callers => {
                    let right = Access::READ_BY_HANDLE;
                    self.granted(export, credential, file, &attr, right)? == right
                }
            };
            may.then_some((attr, count))
        });
        drop(changing);
        let (attr, count) = read?;
        let is_at_end = offset.saturating_add(count as u64) >= attr.size;
        // The rest of a longer file is not in memory.
        (is_at_end || count == wanted).then_some(())?;
        self.answer(Seen { after: Some(attr), result: Ok(ReadDone { count, eof: is_at_end }) })
    }

    /// [`Fs::read_open`]; what was appended counts with an answer only. `None` for more than [`WARM_READ_BYTES_MAX`] bytes, too.
    pub fn read_open(self, file: &OpenFile, offset: u64, wanted: usize, into: &mut Vec<u8>) -> Option<usize> {
        if file.file_type() != FileType::Regular || !file.is_read() || !self.fs.export_of(file.handle())?.is_warm() {
            return None;
        }
        // The time of the last access.
        let _changing = self.fs.attrs.changing(file.handle());
        let count = read_cached(file.descriptor(), offset, wanted, into)?;
        if count < wanted {
            // The rest of a longer file is not in memory.
            let attr = attr_now(self.fs.export_of(file.handle())?, file.descriptor())?;
            (offset.saturating_add(count as u64) >= attr.size).then_some(())?;
        }
        self.answer(count)
    }

    /// Calls `work` with what is open of an object.
    fn open<T>(self, handle: &Handle, mode: Mode, work: impl FnOnce(&Export, &OwnedFd) -> Option<T>) -> Option<T> {
        let export = self.fs.export_of(handle).filter(|export| export.is_warm())?;
        let descriptor = self.fs.descriptors.peek(handle, mode)?;
        let done = work(export, &descriptor);
        if let Some(last) = Arc::into_inner(descriptor) {
            // The cache has let it go meanwhile.
            self.close(handle, Gone::of(last));
        }
        done
    }

    /// What the kernel said of a caller's rights.
    fn granted(
        self,
        export: &Export,
        credential: &Credential,
        handle: &Handle,
        attr: &Attr,
        wanted: Access,
    ) -> Option<Access> {
        let caller = self.fs.known_caller(credential, export)?;
        self.fs.descriptors.granted(handle, self.fs.who_keys.who(&caller), attr.ctime, wanted)
    }

    /// The handle and the attributes of an object that was just opened, which is kept open.
    fn found(self, export: &Export, object: OwnedFd, (dir, name): (&Handle, &CStr)) -> Option<Found> {
        let attr = attr_now(export, &object);
        let handle = attr.and_then(|_| export.handle_of(&object).ok());
        let (Some(attr), Some(handle)) = (attr, handle) else {
            self.close(dir, Gone::of(object));
            return None;
        };
        export.learn(&handle, dir, name);
        let gone = match self.fs.descriptors.peek(&handle, Mode::Path) {
            Some(_) => Gone::of(object),
            None => self.fs.descriptors.put(&handle, Mode::Path, &Arc::new(object)),
        };
        self.close(dir, gone);
        Some(Found { handle, attr })
    }

    /// Closes on a lane of the object's export.
    fn close(self, of: &Handle, gone: Gone) {
        if let Some(batch) = self.fs.closing.add(gone) {
            self.lanes.submit(self.fs.share_of(of), Length::Long, 0, move |_| drop(batch));
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "the last step of each call")]
    fn answer<T>(self, answer: T) -> Option<T> {
        self.fs.warm.fetch_add(1, Ordering::Relaxed);
        Some(answer)
    }
}

/// The attributes of an open object that has a name still, without asking more than the inode.
fn attr_now(export: &Export, object: &OwnedFd) -> Option<Attr> {
    let stat = rustix::fs::statx(object, c"", AtFlags::EMPTY_PATH, ASKED).ok()?;
    let is_known = (stat.stx_dev_major, stat.stx_dev_minor) == export.device && stat.stx_nlink > 0;
    is_known.then(|| Attr::of(&stat, export.id(), 0))
}

/// Appends what is in memory, by one call.
fn read_cached(file: &OwnedFd, offset: u64, wanted: usize, into: &mut Vec<u8>) -> Option<usize> {
    let end = offset.checked_add(wanted as u64)?;
    (wanted <= WARM_READ_BYTES_MAX && end <= FILE_SIZE_MAX).then_some(())?;
    sys::read_behind(file, offset, wanted, into, libc::RWF_NOWAIT).ok()
}
