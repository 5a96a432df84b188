//! Bringing names and attributes to the medium before a call is answered (RFC 1813, section 4.7).

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::attr::FileType;
use crate::error::{ErrorKind, FsError};
use crate::export::Export;
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::{Fs, Node};
use crate::owed::What;

impl Fs {
    /// What an operation has changed of a folder's entries, or of an object's attributes, is to be brought to the medium.
    pub(crate) fn owe_names(&self, lane: &mut Lane, handle: &Handle) -> Result<(), FsError> {
        if self.export(handle)?.options().sync_names { self.owe(lane, handle, What::Names) } else { Ok(()) }
    }

    /// Brings a folder's entries, or a file's attributes, to the medium. To be called without a lock: calls that wait for the medium
    /// at the same time share one commit of the file system's journal.
    ///
    /// Symbolic links and special files cannot be opened without an effect on them. What a caller changed of their attributes later
    /// than at their creation comes to the medium with the file system's next commit.
    pub(crate) fn settle(&self, lane: &Lane, handle: &Handle) -> Result<(), FsError> {
        // A descriptor of its own: an error of earlier writes is told once to each, and must not be taken from COMMIT.
        let export = self.export(handle)?;
        let opened = self.node(lane, handle).and_then(|node| match node.attr.file_type {
            FileType::Directory => self.reopen(export, &node.descriptor, OFlags::RDONLY | OFlags::DIRECTORY).map(Some),
            FileType::Regular => self.reopen_file(export, &node).map(Some),
            _ => Ok(None),
        });
        let synced = match opened {
            Ok(Some(object)) => rustix::fs::fsync(object),
            Ok(None) => return Ok(()),
            // Stale: another call or a local program has removed the object, before the change of an open file or after any change; or a
            // local program has renamed it, and the server is not root and has lost its place. A crash may undo a removal that is not
            // durable yet: the object would come back without the change, which was answered. Nothing tells the folder whose sync brings
            // both to the medium.
            // Access: the server is not root, and may change the object but not read it.
            // TryLater: there are no descriptors, and a client that is told to come later would make the change twice.
            Err(error) if matches!(error.kind(), ErrorKind::Access | ErrorKind::Stale | ErrorKind::TryLater) => {
                rustix::fs::syncfs(&export.root_descriptor)
            }
            Err(error) => return Err(error),
        };
        self.settled.fetch_add(1, Ordering::Relaxed);
        match synced {
            // The file system has no medium.
            Err(Errno::INVAL) => Ok(()),
            other => other.map_err(|errno| changed_for_good(errno.into())),
        }
    }

    fn reopen_file(&self, export: &Export, node: &Node) -> Result<OwnedFd, FsError> {
        let open = |access| self.reopen(export, &node.descriptor, access);
        open(OFlags::RDONLY).or_else(|_| open(OFlags::WRONLY))
    }
}

/// The error of a call that has changed something: the client must not take it for one to be sent again.
pub(crate) fn changed_for_good(error: FsError) -> FsError {
    if error.kind() == ErrorKind::TryLater { ErrorKind::Io.into() } else { error }
}

#[cfg(test)]
mod tests {
    use ksf_test::root_or_skip;

    use super::*;
    use crate::attr::SetAttr;
    use crate::common::{Served, root};
    use crate::export::HandleSource;
    use crate::ops::CreateHow;

    /// Syncs made for a new file whose directory a local program changes before they begin.
    fn synced_after(handles: HandleSource, change: impl FnOnce(&Served)) -> u64 {
        let (served, mut lane) = (Served::open_to_all(), Lane::attach().unwrap());
        assert_eq!(served.export.handles(), handles);
        std::fs::create_dir(served.path("directory")).unwrap();
        let (fs, directory) = (&served.fs, served.find(&mut lane, "directory").handle);
        let how = CreateHow::Guarded(SetAttr::default());
        let (made, owed) = lane.owing(|lane| fs.create(lane, &root(), &directory, b"file", &how).result);
        made.unwrap();
        change(&served);
        fs.descriptors.forget(&directory);
        fs.settle_owed(&lane, &owed).unwrap();
        fs.counters().settled
    }

    /// Runs a test on a lane to which the kernel opens no handles, as without root.
    fn without_kernel_handles(test: impl FnOnce() + Send) {
        let test = || {
            ksf_test::refuse_call(libc::SYS_open_by_handle_at, Errno::PERM);
            test();
        };
        std::thread::scope(|scope| scope.spawn(test).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    #[test]
    fn change_is_durable_though_the_place_of_its_object_is_lost() {
        without_kernel_handles(|| {
            assert_eq!(synced_after(HandleSource::Table, |_| ()), 1);
            let rename = |served: &Served| std::fs::rename(served.path("directory"), served.path("moved")).unwrap();
            assert_eq!(synced_after(HandleSource::Table, rename), 1);
        });
    }

    /// A crash may undo the removal, which is not durable yet.
    #[test]
    fn change_is_durable_though_its_object_was_removed_after_it() {
        let remove = |served: &Served| std::fs::remove_dir_all(served.path("directory")).unwrap();
        without_kernel_handles(|| assert_eq!(synced_after(HandleSource::Table, remove), 1));
        let Some(()) = root_or_skip("file handles") else { return };
        assert_eq!(synced_after(HandleSource::Kernel, remove), 1);
    }
}
