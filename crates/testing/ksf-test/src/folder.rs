//! Files of a test.

use std::cell::RefCell;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{run, skip};

/// The folder of the repository that these tests were built in.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// A folder that every user may enter, and that is removed with the value.
#[derive(Debug)]
pub struct Folder(tempfile::TempDir);

impl Folder {
    /// An empty folder.
    #[expect(clippy::new_without_default, reason = "it makes something outside of itself")]
    pub fn new() -> Self {
        // Programs under test give up their rights, and read on.
        let readable = std::fs::Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().prefix("ksf-test-").permissions(readable).tempdir();
        Self(folder.expect("a temporary folder"))
    }

    /// The same in memory (tmpfs), where there is one; `None`: the test is skipped.
    #[track_caller]
    pub fn in_memory_or_skip() -> Option<Self> {
        // TMPFS_MAGIC of statfs(2).
        let is_tmpfs = rustix::fs::statfs("/dev/shm").is_ok_and(|about| about.f_type == 0x0102_1994);
        let folder = is_tmpfs.then(|| tempfile::Builder::new().prefix("ksf-test-").tempdir_in("/dev/shm"));
        let folder = folder.and_then(Result::ok).map(Self);
        if folder.is_none() {
            skip("needs a tmpfs to write to at /dev/shm");
        }
        folder
    }

    /// Does not remove it.
    pub fn keep(self) -> PathBuf {
        self.0.keep()
    }

    /// Of a file in it, which need not be there; "" for its own.
    pub fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.0.path().to_path_buf() } else { self.0.path().join(name) }
    }

    /// Writes a file in it.
    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).expect("a temporary file");
        path
    }
}

/// An empty folder likewise, which is removed when the calling thread ends.
pub fn folder() -> PathBuf {
    thread_local! {
        static FOLDERS: RefCell<Vec<Folder>> = const { RefCell::new(Vec::new()) };
    }
    let folder = Folder::new();
    let path = folder.path("");
    FOLDERS.with_borrow_mut(|folders| folders.push(folder));
    path
}

/// A copy of a program that every user may run. It is made by another process: a descriptor open for writing in this
/// one could be inherited by a child that another test starts meanwhile, and then the copy would be busy (ETXTBSY).
pub fn install(program: impl AsRef<Path>, copy: &Path) {
    run(Command::new("install").args(["-D", "-m", "755"]).arg(program.as_ref()).arg(copy));
}
