//! Whose connections are joined.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::HopError;

/// statfs(2)
const CGROUP2_SUPER_MAGIC: i64 = 0x6367_7270;

/// Whose connections are joined, within the network namespace of the thread that starts the hop. Both ends of a
/// connection must be in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Folders of cgroup2: sockets of processes in them and below. Empty: of all processes.
    pub cgroups: Vec<PathBuf>,
    /// Ports of services: connections one of whose ends has one of them. Empty: all.
    pub ports: Vec<u16>,
}

impl Scope {
    /// The folders to attach to, open.
    pub(crate) fn open(&self) -> Result<Vec<(PathBuf, File)>, HopError> {
        if self.cgroups.is_empty() && self.ports.is_empty() {
            return Err(HopError::NothingChosen);
        }
        let folders = if self.cgroups.is_empty() { vec![root()?] } else { self.cgroups.clone() };
        folders.into_iter().map(|folder| open(&folder).map(|file| (folder, file))).collect()
    }
}

pub(crate) fn open(folder: &Path) -> Result<File, HopError> {
    File::open(folder).map_err(|error| HopError::Unreadable { path: folder.to_owned(), error })
}

/// Where cgroup2 is mounted, with all that this process may see of it.
fn root() -> Result<PathBuf, HopError> {
    let all = mounts();
    let whole = all.iter().find(|mount| mount.root == "/").or(all.first());
    whole.map(|mount| mount.folder.clone()).ok_or(HopError::NoCgroup)
}

/// The cgroup of this process.
pub(crate) fn own_cgroup() -> Result<PathBuf, HopError> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = path_of(&groups).ok_or(HopError::NoCgroup)?;
    mounts().iter().find_map(|mount| mount.folder_of(path)).ok_or(HopError::NoCgroup)
}

/// A mount of cgroup2.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    folder: PathBuf,
    /// The cgroup that is its root.
    root: String,
}

impl Mount {
    /// Where a cgroup is, if it is below the root.
    fn folder_of(&self, cgroup: &str) -> Option<PathBuf> {
        let below = Path::new(cgroup).strip_prefix(&self.root).ok()?;
        Some(self.folder.join(below)).filter(|folder| folder.is_dir())
    }
}

/// The mounts that can be reached: another one may be in front of them.
fn mounts() -> Vec<Mount> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut mounts = mounts_of(&text);
    mounts.retain(|mount| rustix::fs::statfs(&mount.folder).is_ok_and(|found| found.f_type == CGROUP2_SUPER_MAGIC));
    mounts
}

/// proc_pid_mountinfo(5): the fourth word is the root, the fifth the folder; the type is behind a dash.
fn mounts_of(text: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(3);
        let (root, folder) = (words.next()?.to_owned(), words.next()?.into());
        kind.starts_with("cgroup2 ").then_some(Mount { folder, root })
    };
    text.lines().filter_map(mount).collect()
}

/// The path in the hierarchy: cgroups(7), the line of hierarchy 0.
fn path_of(groups: &str) -> Option<&str> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    // It leads out of what this process may see.
    (!path.split('/').any(|part| part == "..")).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_must_be_chosen() {
        assert!(matches!(Scope::default().open(), Err(HopError::NothingChosen)));
    }

    #[test]
    fn the_cgroup_is_that_of_hierarchy_0() {
        assert_eq!(path_of("4:memory:/a\n0::/system.slice/x.service\n"), Some("/system.slice/x.service"));
        assert_eq!(path_of("0::/\n"), Some("/"));
        assert_eq!(path_of("0::/../../x\n"), None);
        assert_eq!(path_of("4:memory:/a\n"), None);
    }

    #[test]
    fn mounts_are_read_with_their_roots() {
        let text = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n\
                    31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                    32 23 0:26 /docker/a /mnt rw - cgroup2 cgroup2 rw\n";
        let mount = |folder: &str, root: &str| Mount { folder: folder.into(), root: root.to_owned() };
        assert_eq!(mounts_of(text), [mount("/sys/fs/cgroup", "/"), mount("/mnt", "/docker/a")]);
        let here = mount("/", "/docker/a");
        assert_eq!(here.folder_of("/docker/a/proc"), Some("/proc".into()));
        assert_eq!(here.folder_of("/docker/a"), Some("/".into()));
        assert_eq!(here.folder_of("/docker/b"), None);
    }
}
