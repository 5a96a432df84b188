//! Writes an initramfs: a cpio archive in the "newc" format (the kernel's Documentation/driver-api/early-userspace/
//! buffer-format.rst), not compressed, since unpacking would take an emulated processor longer than reading.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use crate::error::Error;

const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;

/// Files by their absolute path in the machine.
#[derive(Debug, Default)]
pub(crate) struct Initramfs {
    // Ordered, so that equal machines give equal archives and a directory precedes what is in it.
    entries: BTreeMap<PathBuf, (u32, Vec<u8>)>,
}

impl Initramfs {
    /// Adds a file and the directories above it. The last file of a path wins. `mode` is the permissions.
    pub(crate) fn add(&mut self, path: impl AsRef<Path>, mode: u32, contents: Vec<u8>) -> Result<(), Error> {
        let path = path.as_ref();
        self.add_directory(path.parent().unwrap_or(Path::new("/")))?;
        self.insert(path, REGULAR | (mode & 0o7777), contents)
    }

    /// Adds a directory and those above it.
    pub(crate) fn add_directory(&mut self, path: &Path) -> Result<(), Error> {
        let above = path.ancestors().filter(|dir| dir.file_name().is_some());
        for dir in above {
            if !self.contains(dir) {
                self.insert(dir, DIRECTORY, Vec::new())?;
            }
        }
        Ok(())
    }

    /// Whether there is something at this path.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        self.entries.contains_key(path)
    }

    fn insert(&mut self, path: &Path, mode: u32, contents: Vec<u8>) -> Result<(), Error> {
        let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if !path.is_absolute() || !plain {
            let what = format!("a path in the machine must be absolute and without '..': {}", path.display());
            return Err(Error::Description { what });
        }
        if u32::try_from(contents.len()).is_err() {
            return Err(Error::Description { what: format!("{} is longer than 4 GiB", path.display()) });
        }
        self.entries.insert(path.to_owned(), (mode, contents));
        Ok(())
    }

    /// The archive.
    pub(crate) fn archive(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, (path, (mode, contents))) in (1..).zip(&self.entries) {
            let name = path.as_os_str().as_encoded_bytes();
            write_entry(&mut out, number, *mode, name.strip_prefix(b"/").unwrap_or(name), contents);
        }
        write_entry(&mut out, 0, 0, b"TRAILER!!!", b"");
        out
    }
}

/// One entry: a header of thirteen numbers of eight hexadecimal digits, the name, the contents; the last two are
/// padded to a multiple of four bytes. Everything belongs to root, at time 0.
fn write_entry(out: &mut Vec<u8>, inode: u32, mode: u32, name: &[u8], contents: &[u8]) {
    let (name_len, len) = (name.len() as u32 + 1, contents.len() as u32);
    let (uid, gid, links, mtime, device, checksum) = (0, 0, 1, 0, 0, 0);
    out.extend_from_slice(b"070701");
    for number in [inode, mode, uid, gid, links, mtime, len, device, device, device, device, name_len, checksum] {
        out.extend_from_slice(format!("{number:08x}").as_bytes());
    }
    out.extend_from_slice(name);
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(contents);
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an archive back: (name, mode, contents).
    fn entries(mut archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        loop {
            assert_eq!(&archive[..6], b"070701");
            let number = |index: usize| {
                let digits = std::str::from_utf8(&archive[6 + 8 * index..14 + 8 * index]).unwrap();
                u32::from_str_radix(digits, 16).unwrap()
            };
            let (mode, len, name_len) = (number(1), number(6) as usize, number(11) as usize);
            let name = String::from_utf8(archive[110..110 + name_len - 1].to_vec()).unwrap();
            let start = (110 + name_len).next_multiple_of(4);
            let contents = archive[start..start + len].to_vec();
            if name == "TRAILER!!!" {
                return found;
            }
            found.push((name, mode, contents));
            archive = &archive[(start + len).next_multiple_of(4)..];
        }
    }

    #[test]
    fn an_archive_has_directories_before_their_files_and_each_once() {
        let mut files = Initramfs::default();
        files.add("/lib/a/one", 0o644, b"1".to_vec()).unwrap();
        files.add("/lib/a/two", 0o755, b"twelve bytes".to_vec()).unwrap();
        files.add("/init", 0o755, Vec::new()).unwrap();
        files.add_directory(Path::new("/lib/empty")).unwrap();

        assert_eq!(
            entries(&files.archive()),
            [
                ("init".to_owned(), 0o100_755, vec![]),
                ("lib".to_owned(), 0o040_755, vec![]),
                ("lib/a".to_owned(), 0o040_755, vec![]),
                ("lib/a/one".to_owned(), 0o100_644, b"1".to_vec()),
                ("lib/a/two".to_owned(), 0o100_755, b"twelve bytes".to_vec()),
                ("lib/empty".to_owned(), 0o040_755, vec![]),
            ]
        );
    }

    #[test]
    fn a_path_that_leaves_the_machine_is_refused() {
        let mut files = Initramfs::default();
        assert!(files.add("etc/passwd", 0o644, Vec::new()).is_err());
        assert!(files.add("/lib/../../x", 0o644, Vec::new()).is_err());
    }
}
