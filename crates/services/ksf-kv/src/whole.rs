//! A file that gets its name when it is whole and on the disk.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags};
use rustix::io::Errno;

const BUFFER_BYTES: usize = 1 << 20;

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}: {source}", .path.display())]
pub struct FileError {
    /// What was tried.
    pub action: &'static str,
    /// With what.
    pub path: PathBuf,
    /// What the system says.
    pub source: io::Error,
}

pub(crate) fn file_error<'p>(action: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> FileError + use<'p> {
    move |source| FileError { action, path: path.to_owned(), source }
}

/// Whether a file may have the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// One that has it is replaced.
    Any,
    /// One that has it stays, and is an error.
    New,
}

/// Writes a file for its owner alone. It is `PATH.partial`, and locked where the file system has
/// locks, until it is on the disk.
///
/// # Errors
///
/// That of `write`, or [`FileError`]: the file is not there, and nothing is left of it, unless only the folder could not be synced:
/// then the file is there, and a loss of power may take its name. [`io::ErrorKind::WouldBlock`]: another process writes it.
pub fn write_whole<T, E: From<FileError>>(
    path: &Path,
    name: Name,
    write: impl FnOnce(&mut BufWriter<&File>) -> Result<T, E>,
) -> Result<T, E> {
    Partial::new(path)?.write(name, write)
}

/// `PATH.partial`, of this process alone. Dropping it without a [`Partial::write`] that succeeds
/// removes it.
pub(crate) struct Partial<'p> {
    file: File,
    path: PathBuf,
    to: &'p Path,
    has_name: bool,
}

impl<'p> Partial<'p> {
    pub(crate) fn new(to: &'p Path) -> Result<Self, FileError> {
        let path = with_suffix(to, ".partial");
        Ok(Self { file: make_file(&path)?, path, to, has_name: false })
    }

    /// [`write_whole`].
    pub(crate) fn write<T, E: From<FileError>>(
        mut self,
        name: Name,
        write: impl FnOnce(&mut BufWriter<&File>) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut to = BufWriter::with_capacity(BUFFER_BYTES, &self.file);
        let written = write(&mut to)?;
        let on_disk = to.flush().and_then(|()| self.file.sync_all());
        on_disk.map_err(file_error("writing", &self.path))?;
        drop(to);
        rename(&self.path, self.to, name).map_err(file_error("renaming to", self.to))?;
        self.has_name = true;
        let folder = parent(self.to);
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("syncing", folder))?;
        Ok(written)
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        if !self.has_name {
            // The next process that writes the file replaces one that cannot be removed.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn rename(from: &Path, to: &Path, name: Name) -> io::Result<()> {
    if name == Name::Any {
        return fs::rename(from, to);
    }
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system, for example NFS or exFAT, knows no flags.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        renamed => return Ok(renamed?),
    }
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(error),
        // Nor has it links, for example exFAT: a file that appears behind this check is replaced.
        Err(_) => match fs::symlink_metadata(to) {
            Ok(_) => Err(Errno::EXIST.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
            Err(error) => Err(error),
        },
    }
}

/// A new file of this process alone, until it is closed or renamed. It replaces one that a killed
/// process left.
pub(crate) fn make_file(path: &Path) -> Result<File, FileError> {
    let mut options = OpenOptions::new();
    // NFS locks only a file that is open for writing.
    options.read(true).write(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    loop {
        // Nobody else reads what the password keeps from them.
        let (file, is_new) = match options.clone().create_new(true).mode(0o600).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match options.open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                left => (left.map_err(left_error("opening", path))?, false),
            },
            made => (made.map_err(file_error("making", path))?, true),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let why = "another process is writing it";
                return Err(file_error("locking", path)(io::Error::new(io::ErrorKind::WouldBlock, why)));
            }
            // The file system has no locks: no other process removes this file.
            Err(TryLockError::Error(_)) if is_new => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(left_error("locking", path)(error)),
        }
        // Before it was locked, another process may have given it its name, or made a new one in its place.
        if !has_name(&file, path).map_err(file_error("looking at", path))? {
            continue;
        }
        if is_new {
            return Ok(file);
        }
        fs::remove_file(path).map_err(left_error("removing", path))?;
    }
}

/// The error of a file that was there before and cannot be replaced.
fn left_error<'p>(action: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> FileError + use<'p> {
    move |error| {
        let why = format!("{error}; if no process is writing it, remove it; else choose another name for the file");
        file_error(action, path)(io::Error::new(error.kind(), why))
    }
}

/// Whether this file is the one of that name.
fn has_name(file: &File, path: &Path) -> io::Result<bool> {
    let file = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (file.dev(), file.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A name with something behind it.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The folder that a name is in.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::ffi::c_long;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::thread;

    use ksf_test::refuse_call;

    use super::*;

    fn write(path: &Path, name: Name, content: &str, meanwhile: impl FnOnce()) -> Result<(), FileError> {
        write_whole(path, name, |to| {
            meanwhile();
            to.write_all(content.as_bytes()).map_err(file_error("writing", path))
        })
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap()
    }

    /// On a thread of its own: a restriction of a thread has no end.
    fn on_thread(test: impl FnOnce() + Send) {
        thread::scope(|scope| scope.spawn(test).join().unwrap());
    }

    /// As on a file system without these calls.
    fn without(calls: &[(c_long, Errno)], test: impl FnOnce() + Send) {
        on_thread(|| {
            calls.iter().for_each(|(call, errno)| refuse_call(*call, *errno));
            test();
        });
    }

    /// What a process that was killed has left is replaced.
    #[test]
    fn a_file_that_is_being_written_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (path, partial) = (folder.path().join("file"), folder.path().join("file.partial"));
        fs::write(&partial, "left").unwrap();
        for (name, content) in [(Name::New, "first"), (Name::Any, "second")] {
            let meanwhile = || {
                for name in [Name::New, Name::Any] {
                    let refused = write(&path, name, "meanwhile", || panic!("it is written twice")).unwrap_err();
                    assert_eq!((&refused.path, refused.source.kind()), (&partial, io::ErrorKind::WouldBlock));
                }
            };
            write(&path, name, content, meanwhile).unwrap();
            assert_eq!((read(&path), partial.exists()), (content.to_owned(), false));
        }
    }

    /// Without locks, a partial file that is there may be one that another process writes.
    #[test]
    fn file_system_without_locks_takes_a_new_file_and_keeps_a_partial_one() {
        for errno in [Errno::NOLCK, Errno::OPNOTSUPP, Errno::NOSYS] {
            let folder = tempfile::tempdir().unwrap();
            let (path, partial) = (folder.path().join("file"), folder.path().join("file.partial"));
            let is_refused = || {
                let refused = write(&path, Name::Any, "meanwhile", || panic!("it is written twice")).unwrap_err();
                assert!(refused.path == partial && refused.to_string().contains("remove it"), "{errno}: {refused}");
            };
            without(&[(libc::SYS_flock, errno)], || {
                for (name, content) in [(Name::New, "first"), (Name::Any, "second")] {
                    write(&path, name, content, is_refused).unwrap();
                    assert_eq!((read(&path), partial.exists()), (content.to_owned(), false), "{errno}");
                }
                fs::write(&partial, "left").unwrap();
                is_refused();
                assert_eq!(read(&partial), "left", "{errno}");
                fs::remove_file(&partial).unwrap();
                let failed = |_: &mut BufWriter<&File>| Err(file_error("writing", &path)(Errno::NOSPC.into()));
                assert!(write_whole::<(), FileError>(&path, Name::Any, failed).is_err());
                assert!(!partial.exists(), "{errno}: a part is left");
            });
        }
    }

    #[test]
    fn a_new_file_replaces_none_that_came_meanwhile() {
        let no_flags = (libc::SYS_renameat2, Errno::INVAL);
        let no_links = [Errno::PERM, Errno::OPNOTSUPP, Errno::MLINK].map(|errno| (libc::SYS_linkat, errno));
        let [one, two, three] = no_links.map(|no_links| [no_flags, no_links]);
        let all: [&[(c_long, Errno)]; 5] = [&[], &[no_flags], &one, &two, &three];
        for lacks in all {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            without(lacks, || {
                let refused = write(&path, Name::New, "new", || fs::write(&path, "other").unwrap()).unwrap_err();
                let found = (refused.source.kind(), read(&path));
                assert_eq!(found, (io::ErrorKind::AlreadyExists, "other".to_owned()), "{lacks:?}");
                write(&path, Name::Any, "replaced", || {}).unwrap();
                assert_eq!(read(&path), "replaced", "{lacks:?}");
                fs::remove_file(&path).unwrap();
                write(&path, Name::New, "new", || {}).unwrap();
                assert_eq!((&read(&path)[..], fs::read_dir(&folder).unwrap().count()), ("new", 1), "{lacks:?}");
            });
        }
    }

    /// One that this process may not open, and as root also one that it may not remove.
    #[test]
    fn partial_file_of_another_user_is_an_error_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        let (path, partial) = (folder.path().join("file"), folder.path().join("file.partial"));
        fs::write(&partial, "left").unwrap();
        let is_root = rustix::process::geteuid().is_root();
        for mode in [Some(0), is_root.then_some(0o666)].into_iter().flatten() {
            fs::set_permissions(&partial, Permissions::from_mode(mode)).unwrap();
            on_thread(|| {
                if is_root {
                    let user = rustix::process::Uid::from_raw(65534);
                    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                }
                let refused = write(&path, Name::Any, "new", || panic!("it is written twice")).unwrap_err();
                assert_eq!((&refused.path, refused.source.kind()), (&partial, io::ErrorKind::PermissionDenied));
                assert!(refused.to_string().contains("remove it"), "{refused}");
            });
        }
        fs::set_permissions(&partial, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&partial), "left");
    }
}
