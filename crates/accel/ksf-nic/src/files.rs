//! The files of /sys and /proc, below a root that tests choose.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Files by their path below the root, without a slash in front: `sys/class/net/eth0/ifindex`.
pub trait SystemFiles {
    /// The whole text.
    fn read(&self, path: &str) -> io::Result<String>;
    /// Writes a value, in one call as the kernel wants it.
    fn write(&mut self, path: &str, text: &str) -> io::Result<()>;
    /// Whether [`SystemFiles::write`] would be let in. Changes nothing.
    fn writable(&self, path: &str) -> io::Result<()>;
    /// Names in a folder, in no order.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;
    /// The path with symbolic links followed.
    fn canonical(&self, path: &str) -> io::Result<String>;
}

/// Files of the running system, or of a test.
#[derive(Debug, Clone)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The files below `root`, which is `/` for the running system.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

impl SystemFiles for Tree {
    fn read(&self, path: &str) -> io::Result<String> {
        /// More than any of these files has: a mask of 65536 CPUs has 18 KiB.
        const BYTES_MAX: u64 = 1 << 20;
        let mut text = String::new();
        std::fs::File::open(self.path(path))?.take(BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    }

    fn write(&mut self, path: &str, text: &str) -> io::Result<()> {
        // Not created: what is missing is a setting this kernel does not have. Truncated for tests' sake.
        let mut file = std::fs::OpenOptions::new().write(true).truncate(true).open(self.path(path))?;
        file.write_all(text.as_bytes())
    }

    fn writable(&self, path: &str) -> io::Result<()> {
        std::fs::OpenOptions::new().write(true).open(self.path(path)).map(drop)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        std::fs::read_dir(self.path(path))?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn canonical(&self, path: &str) -> io::Result<String> {
        let root = self.root.canonicalize()?;
        let found = self.path(path).canonicalize()?;
        let below: &Path = found.strip_prefix(&root).map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
        Ok(below.to_string_lossy().into_owned())
    }
}
