//! Where a server keeps its data: an empty folder, on the disk or in memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::process::output;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Room beside the logs of a server: its other files.
const BESIDE_BYTES: u64 = 16 << 20;

/// The folder of one server, removed with this value.
pub(super) struct Home {
    folder: TempDir,
    data: PathBuf,
    is_mounted: bool,
}

impl Home {
    /// A folder below `scratch`; with so many bytes for logs, on a file system in memory, which only root can have.
    pub(super) fn make(scratch: &Path, memory_bytes: Option<u64>) -> Result<Home> {
        let folder = tempfile::Builder::new().prefix("store-").tempdir_in(scratch)?;
        let data = folder.path().join("data");
        fs::create_dir(&data).context("cannot make a folder for data")?;
        let mut home = Home { folder, data, is_mounted: false };
        if let Some(bytes) = memory_bytes {
            // In the bench's own mount namespace: it ends with the bench, however that ends.
            let mut mount = Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", &format!("size={}", bytes + BESIDE_BYTES), "tmpfs"]).arg(&home.data);
            output(&mut mount, TIMEOUT).context("cannot mount a file system in memory")?;
            home.is_mounted = true;
        }
        Ok(home)
    }

    /// For the server.
    pub(super) fn data(&self) -> &Path {
        &self.data
    }

    /// For its client; always on the disk.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if self.is_mounted
            && let Err(error) = output(Command::new("umount").arg(&self.data), TIMEOUT)
        {
            eprintln!("bench: {}: {error:#}", self.data.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_on_the_disk_is_empty_and_leaves_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let home = Home::make(scratch.path(), None).unwrap();
        assert_eq!(fs::read_dir(home.data()).unwrap().count(), 0);
        fs::write(home.data().join("log"), "x").unwrap();
        drop(home);
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}
