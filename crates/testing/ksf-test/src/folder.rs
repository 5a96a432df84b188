//! Files of a test.

use std::cell::RefCell;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::StatVfsMountFlags;

use crate::{run, skip};

/// The folder of the repository that these tests were built in.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// TMPFS_MAGIC of statfs(2).
const TMPFS: i64 = 0x0102_1994;
/// Local file systems that can be exported, with reads that do not wait (RWF_NOWAIT): ext4, xfs, btrfs.
const DISKS: [i64; 3] = [0xef53, 0x5846_5342, 0x9123_683e];

/// Longest directory for temporary folders: behind it a Unix-domain socket has 107 bytes less these for its path (unix(7)).
const PATH_BYTES_MAX: usize = 60;

/// A folder that every user may enter, and that is removed with the value.
#[derive(Debug)]
pub struct Folder(tempfile::TempDir);

impl Folder {
    /// An empty folder.
    #[expect(clippy::new_without_default, reason = "it makes something outside of itself")]
    pub fn new() -> Self {
        Self::inside(&temporary())
    }

    /// An empty folder whose file system has file handles: in memory (/dev/shm) where temporary folders have none, as on
    /// overlayfs.
    pub fn to_export() -> Self {
        let temporary = temporary();
        let has_handles = [&DISKS[..], &[TMPFS]].concat().contains(&kind(&temporary));
        Self::inside(if has_handles { &temporary } else { Path::new("/dev/shm") })
    }

    fn inside(directory: &Path) -> Self {
        // Programs under test give up their rights, and read on.
        let readable = std::fs::Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().prefix("ksf-test-").permissions(readable).tempdir_in(directory);
        Self(folder.expect("a temporary folder"))
    }

    /// The same in memory (tmpfs), where there is one; `None`: the test is skipped.
    #[track_caller]
    pub fn in_memory_or_skip() -> Option<Self> {
        let is_tmpfs = rustix::fs::statfs("/dev/shm").is_ok_and(|about| about.f_type == TMPFS);
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

/// The directory for temporary folders. `TMPDIR` may be too long for sockets in it.
fn temporary() -> PathBuf {
    let directory = std::env::temp_dir();
    if directory.as_os_str().len() > PATH_BYTES_MAX { "/tmp".into() } else { directory }
}

/// Type of the file system of a path (statfs(2), `f_type`).
fn kind(path: &Path) -> i64 {
    rustix::fs::statfs(path).expect("a directory of the machine").f_type
}

/// True if the kernel remembers that a name in this folder is absent: tmpfs forgets that at once.
pub fn keeps_absent_names(folder: &Path) -> bool {
    kind(folder) != TMPFS
}

/// True if a server can read the files of an exported folder without waiting for the disk: the kernel tells which pages are
/// cached (cachestat(2), since Linux 6.5), and a read does not change the time of the last access each time.
pub fn reads_at_once(folder: &Path) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("/proc is mounted");
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let mount = rustix::fs::statvfs(folder).expect("a folder of the test").f_flag;
    let lazy = StatVfsMountFlags::RELATIME | StatVfsMountFlags::NOATIME;
    (numbers.next(), numbers.next()) >= (Some(6), Some(5)) && mount.intersects(lazy) && DISKS.contains(&kind(folder))
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
