//! Reading and writing the bytes of files, and bringing them to the medium.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::{Errno, Result as SysResult, pwrite, retry_on_intr};

use super::{Access, FILE_SIZE_MAX, ReadDone, Stable};
use crate::attr::{Changed, Seen, Wcc};
use crate::credential::Credential;
use crate::descriptors::Mode;
use crate::error::{ErrorKind, FsError};
use crate::export::Export;
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::{Call, Fs, Node, READ_BIT, WRITE_BIT, attr_of, permit};
use crate::owed::{Debt, What};
use crate::rights::Question;
use crate::sys;
use crate::uncommitted::Written;

/// Reads at one offset below the size of the file before it has its end there: files of sysfs have fewer bytes than their size.
const READS_MAX: usize = 3;

/// Bytes written, the verifier, and what is to be synced.
type Put = (SysResult<usize>, [u8; 8], Option<Written>);

impl Fs {
    /// Reads up to `wanted` bytes of a regular file, and appends them. A file that shrinks meanwhile gives fewer.
    pub fn read(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        handle: &Handle,
        offset: u64,
        wanted: usize,
        into: &mut Vec<u8>,
    ) -> Seen<ReadDone> {
        self.read_by(lane, handle, (offset, wanted), |lane| self.get(lane, credential, handle, offset, wanted, into))
    }

    /// [`Fs::read`], where `get` appends the bytes.
    fn read_by(
        &self,
        lane: &mut Lane,
        handle: &Handle,
        (offset, wanted): (u64, usize),
        mut get: impl FnMut(&mut Lane) -> Result<usize, FsError>,
    ) -> Seen<ReadDone> {
        let mut reads = 0;
        loop {
            // The time of the last access.
            let changing = self.attrs.changing(handle);
            let read = get(lane);
            drop(changing);
            reads += 1;
            let node = match self.node(lane, handle) {
                Ok(node) => node,
                Err(error) => return Seen::failed(error),
            };
            let done = match read {
                // The file has grown since: the attributes of the reply would contradict its end.
                Ok(0) if wanted > 0 && offset < node.attr.size && reads < READS_MAX => continue,
                Ok(count) => {
                    // A short count alone is no end: the medium may have failed behind these bytes, or the file has grown. The
                    // next read tells.
                    let end = offset.saturating_add(count as u64);
                    let eof = end >= node.attr.size || count == 0 && wanted > 0;
                    Ok(ReadDone { count, eof })
                }
                Err(error) => Err(error),
            };
            return Seen { after: Some(node.attr), result: done };
        }
    }

    fn get(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        handle: &Handle,
        offset: u64,
        wanted: usize,
        into: &mut Vec<u8>,
    ) -> Result<usize, FsError> {
        let call = self.begin(lane, credential, handle, false)?;
        let file = self.content(lane, &call.caller, handle, Mode::Read)?;
        let room = usize::try_from(FILE_SIZE_MAX.saturating_sub(offset)).unwrap_or(usize::MAX);
        let wanted = wanted.min(room);
        let before = call.export.is_warm().then(|| attr_of(call.export, &file)).transpose()?;
        let question = before.as_ref().map(Question::about);
        let mut is_permitted = false;
        let read = || {
            permit(&file, READ_BIT, &call.caller)?;
            is_permitted = true;
            read_whole(&file, offset, wanted, into)
        };
        let read = lane.as_caller(&call.caller, read)?;
        if let Some(question) = question.filter(|_| is_permitted) {
            self.keep_rights(&call, handle, question, (Access::READ_BY_HANDLE, Access::READ_BY_HANDLE));
        }
        Ok(read?)
    }

    /// Writes bytes to a regular file. Writes of one file happen one after the other.
    ///
    /// Writes beyond the end of a full medium may be short; the caller sends the rest again, as after any short write.
    pub fn write(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        handle: &Handle,
        offset: u64,
        data: &[u8],
        stable: Stable,
    ) -> Changed<super::Written> {
        let order = self.lock(handle);
        let mut attr = None;
        let result = self.begin(lane, credential, handle, true).and_then(|call| {
            let file = self.content(lane, &call.caller, handle, Mode::Write)?;
            attr = Some(self.live(call.export, handle, &file)?);
            if offset.checked_add(data.len() as u64).is_none_or(|end| end > FILE_SIZE_MAX) {
                return Err(ErrorKind::TooBig.into());
            }
            self.put(lane, &call, (handle, &file), offset, data)
        });
        let after = self.node(lane, handle).ok().map(|node| node.attr);
        let before = attr.and_then(|attr| self.before(&order, handle, &attr));
        // Nobody waits for the lock while this waits for the medium.
        drop(order);
        let result = result.and_then(|(count, verifier, written)| {
            let has_no_slot = written.as_ref().is_some_and(Written::has_no_slot);
            let committed = if has_no_slot { Stable::FileSync } else { stable };
            // Without a slot also after a failure: the sync drops the entry of the file.
            let is_synced = has_no_slot || count.is_ok() && stable != Stable::Unstable;
            if let Some(written) = written.filter(|_| is_synced) {
                self.owe(lane, handle, What::Written(written))?;
            }
            Ok(super::Written { count: count?, committed, verifier })
        });
        Changed { wcc: Wcc { before, after }, result }
    }

    /// Writes the bytes of a call.
    fn put(
        &self,
        lane: &mut Lane,
        call: &Call<'_>,
        (handle, file): (&Handle, &Arc<OwnedFd>),
        offset: u64,
        data: &[u8],
    ) -> Result<Put, FsError> {
        // What tells of a failed write-back must be open before the write, and is not that for writing, which is soon closed.
        let told_by = (!data.is_empty()).then(|| self.tells_of_losses(lane, handle, file)).transpose()?;
        // Asked for before the write: what is lost after this changes it.
        let verifier = call.export.verifier();
        let (account, syncs_itself) = (lane.account.clone(), lane.syncs().is_none());
        let write = || -> Result<_, FsError> {
            permit(file, WRITE_BIT, &call.caller)?;
            let Some(told_by) = told_by else { return Ok(Some((Ok(0), None, None))) };
            let begun = self.uncommitted.writing(handle, &told_by, &call.export.verifier, &account, syncs_itself);
            let Some((writing, oldest)) = begun else { return Ok(None) };
            Ok(Some((write_whole(file, offset, data), Some(writing.end()), oldest)))
        };
        let Some((count, written, oldest)) = lane.as_caller(&call.caller, write)?? else {
            if let Some(owed) = &mut lane.owed {
                owed.has_no_room = true;
            }
            return Err(ErrorKind::TryLater.into());
        };
        if let Some((handle, written)) = oldest {
            self.owe_of_another(lane, Debt { handle, what: What::Written(written) });
        }
        Ok((count, verifier, written))
    }

    /// Brings what was written to a file to the medium, all of it. Tells the verifier.
    ///
    /// When data that was accepted is lost, the call that finds it fails, and the verifier is another one for all. No right is
    /// needed: RFC 1813 (section 3.3.21) has no error for it. So nothing is opened for writing; where nothing can be written, nothing
    /// is brought anywhere.
    ///
    /// It is [`Owed::commit`] and then this with the result.
    ///
    /// [`Owed::commit`]: crate::Owed::commit
    pub fn committed(&self, lane: &Lane, handle: &Handle, synced: Result<(), FsError>) -> Changed<[u8; 8]> {
        let result = synced.and_then(|()| {
            // The client is done with it.
            self.descriptors.close_writable(handle);
            // Asked for after the sync: a loss that another call found has changed it.
            Ok(self.export(handle)?.verifier())
        });
        let after = self.node(lane, handle).ok().map(|node| node.attr);
        Changed { wcc: Wcc { before: None, after }, result }
    }

    /// [`Fs::committed`] after a sync on this thread.
    pub fn commit(&self, lane: &Lane, handle: &Handle) -> Changed<[u8; 8]> {
        self.committed(lane, handle, self.bring(lane, handle))
    }

    fn tells_of_losses(&self, lane: &Lane, handle: &Handle, written: &Arc<OwnedFd>) -> Result<Arc<OwnedFd>, FsError> {
        if let Some(known) = self.uncommitted.descriptor(handle) {
            return Ok(known);
        }
        match self.regular(lane, handle).and_then(|node| self.to_sync(&node, handle)) {
            // The server is not root, and may write the file but not read it.
            Err(error) if error.kind() == ErrorKind::Access => Ok(Arc::clone(written)),
            opened => opened,
        }
    }

    pub(crate) fn bring(&self, lane: &Lane, handle: &Handle) -> Result<(), FsError> {
        // The blocks that the file takes.
        let _changing = self.attrs.changing(handle);
        let node = self.regular(lane, handle)?;
        let export = self.export(handle)?;
        if export.options().read_only {
            return Ok(());
        }
        if self.uncommitted.descriptor(handle).is_some() {
            Ok(self.uncommitted.sync(handle, |file| rustix::fs::fsync(file))?)
        } else {
            self.sync_others_data(export, &node, |file| rustix::fs::fsync(file))
        }
    }

    /// Syncs a file without uncommitted data: local programs may have written to it.
    ///
    /// A WRITE may begin meanwhile. The kernel reports a failed write-back once for each open descriptor, so this uses one of its own:
    /// the error stays on that of [`Uncommitted`], which changes the verifier before it answers any COMMIT.
    ///
    /// [`Uncommitted`]: crate::uncommitted::Uncommitted
    fn sync_others_data(
        &self,
        export: &Export,
        node: &Node,
        sync: impl FnOnce(&OwnedFd) -> SysResult<()>,
    ) -> Result<(), FsError> {
        match self.reopen(export, &node.descriptor, OFlags::RDONLY) {
            Ok(file) => Ok(sync(&file)?),
            // The server is not root, and may write the file but not read it.
            Err(error) if error.kind() == ErrorKind::Access => Ok(rustix::fs::syncfs(&export.root_descriptor)?),
            Err(error) => Err(error),
        }
    }
}

/// Appends bytes until there are as many as wanted or the file ends.
pub(super) fn read_whole(file: &OwnedFd, offset: u64, wanted: usize, into: &mut Vec<u8>) -> SysResult<usize> {
    let mut count = 0;
    while count < wanted {
        match retry_on_intr(|| sys::read_behind(file, offset + count as u64, wanted - count, into, 0)) {
            Ok(0) => break,
            Ok(read) => count += read,
            Err(_) if count > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

/// Writes until all is written or an error stops it, which is told if nothing was written.
pub(super) fn write_whole(file: &OwnedFd, offset: u64, data: &[u8]) -> SysResult<usize> {
    let mut count = 0;
    while count < data.len() {
        match retry_on_intr(|| pwrite(file, &data[count..], offset + count as u64)) {
            Ok(0) if count == 0 => return Err(Errno::IO),
            Ok(0) => break,
            Ok(written) => count += written,
            Err(_) if count > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::common::{Served, on_lane, root};

    /// The reply has attributes from after the read.
    #[test]
    fn a_file_that_grows_after_a_read_at_its_end_is_read_again() {
        let served = Served::open_to_all();
        on_lane(|lane| {
            let file = served.make(lane, "file").handle;
            let (mut reads, mut bytes) = (0, Vec::new());
            let read = served.fs.read_by(lane, &file, (0, 9), |lane| {
                let count = served.fs.get(lane, &root(), &file, 0, 9, &mut bytes);
                std::fs::write(served.path("file"), "grown").unwrap();
                reads += 1;
                count
            });
            assert_eq!((read.after.unwrap().size, reads), (5, 2));
            assert_eq!((read.result.unwrap(), &*bytes), (ReadDone { count: 5, eof: true }, &b"grown"[..]));
            // Its size is always that of bytes which are not there.
            let read = served.fs.read_by(lane, &file, (0, 9), |_| Ok(0));
            assert_eq!(read.result.unwrap(), ReadDone { count: 0, eof: true });
        });
    }

    /// A WRITE may begin just after COMMIT has found no uncommitted data. On its descriptor, this COMMIT would take the error of the
    /// write-back, and the next one would succeed with the old verifier.
    #[test]
    fn commit_without_uncommitted_data_uses_its_own_descriptor() {
        let served = Served::open_to_all();
        on_lane(|lane| {
            let file = served.make(lane, "file").handle;
            served.fs.write(lane, &root(), &file, 0, b"text", Stable::Unstable).result.unwrap();
            let reports_losses = served.fs.uncommitted.descriptor(&file).unwrap();
            let node = served.fs.regular(lane, &file).unwrap();
            let mut synced = Vec::new();
            let sync = |file: &OwnedFd| {
                synced.push(file.as_raw_fd());
                Ok(())
            };
            served.fs.sync_others_data(&served.export, &node, sync).unwrap();
            assert!(synced.len() == 1 && synced[0] != reports_losses.as_raw_fd());
        });
    }
}
