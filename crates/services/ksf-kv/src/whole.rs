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

/// Writes a file for its owner alone. It is `PATH.partial`, and locked, until it is on the disk.
///
/// # Errors
///
/// That of `write`, or [`FileError`]: the file is not there, and nothing is left of it, unless only the folder could not be synced:
/// then the file is there, and a loss of power may take its name. [`io::ErrorKind::WouldBlock`]: another process writes it.
pub fn write_whole<T, E: From<FileError>>(
    path: &Path,
    name: Name,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let partial = with_suffix(path, ".partial");
    // Its lock is held until it has its name.
    let mut to = BufWriter::with_capacity(BUFFER_BYTES, make_file(&partial)?);
    let written = write(&mut to).and_then(|written| {
        let on_disk = to.flush().and_then(|()| to.get_ref().sync_all());
        on_disk.map_err(file_error("writing", &partial))?;
        rename(&partial, path, name).map_err(file_error("renaming to", path))?;
        Ok(written)
    });
    match written {
        Ok(written) => {
            let folder = parent(path);
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("syncing", folder))?;
            Ok(written)
        }
        Err(error) => {
            // It is of no use to anybody; what cannot be removed the next one overwrites.
            let _ = fs::remove_file(&partial);
            Err(error)
        }
    }
}

fn rename(from: &Path, to: &Path, name: Name) -> io::Result<()> {
    match name {
        Name::Any => fs::rename(from, to),
        Name::New => match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // The file system, for example NFS, knows no flags.
            Err(Errno::INVAL) => fs::hard_link(from, to).and_then(|()| fs::remove_file(from)),
            renamed => Ok(renamed?),
        },
    }
}

/// A new file, in place of one that a process which was killed has left. It is locked until it is closed: nobody else takes its name.
pub(crate) fn make_file(path: &Path) -> Result<File, FileError> {
    let mut options = OpenOptions::new();
    // NFS locks only a file that is open for writing.
    options.read(true).write(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    loop {
        // Nobody else reads what the password keeps from them.
        let (file, is_new) = match options.clone().create_new(true).mode(0o600).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match options.open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                left => (left.map_err(file_error("opening", path))?, false),
            },
            made => (made.map_err(file_error("making", path))?, true),
        };
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                let why = "another process is writing it";
                file_error("locking", path)(io::Error::new(io::ErrorKind::WouldBlock, why))
            }
            TryLockError::Error(error) => file_error("locking", path)(error),
        })?;
        // Before it was locked, another process may have given it its name, or made a new one in its place.
        if !has_name(&file, path).map_err(file_error("looking at", path))? {
            continue;
        }
        if is_new {
            return Ok(file);
        }
        fs::remove_file(path).map_err(file_error("removing", path))?;
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

    #[test]
    fn a_new_file_replaces_none_that_came_meanwhile() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let refused = write(&path, Name::New, "new", || fs::write(&path, "other").unwrap()).unwrap_err();
        assert_eq!((refused.source.kind(), &read(&path)[..]), (io::ErrorKind::AlreadyExists, "other"));
        write(&path, Name::Any, "new", || {}).unwrap();
        assert_eq!((&read(&path)[..], fs::read_dir(&folder).unwrap().count()), ("new", 1));
    }
}
