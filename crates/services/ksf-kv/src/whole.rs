//! A file that gets its name when it is whole and on the disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

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

/// Writes a file for its owner alone. It is `PATH.partial` until it is on the disk, and replaces one that is there then.
///
/// # Errors
///
/// That of `write`, or [`FileError`]: the file is not there, and nothing is left of it.
pub fn write_whole<T, E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let partial = with_suffix(path, ".partial");
    let mut to = BufWriter::with_capacity(BUFFER_BYTES, make_file(&partial)?);
    let written = write(&mut to).and_then(|written| {
        let on_disk = to.flush().and_then(|()| to.get_ref().sync_all());
        on_disk.map_err(file_error("writing", &partial))?;
        fs::rename(&partial, path).map_err(file_error("renaming to", path))?;
        let folder = parent(path);
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(file_error("syncing", folder))?;
        Ok(written)
    });
    if written.is_err() {
        // It is of no use to anybody; what cannot be removed the next one overwrites.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// A new file, in place of one that a process which was killed has left.
pub(crate) fn make_file(path: &Path) -> Result<File, FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file_error("removing", path)(error)),
        _ => {}
    }
    // Nobody else reads what the password keeps from them.
    let file = OpenOptions::new().create_new(true).read(true).write(true).mode(0o600).open(path);
    file.map_err(file_error("making", path))
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
