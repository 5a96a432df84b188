//! A folder of cgroup2 for one program, removed with the value.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// One cgroup below that of this process. Resource limits of that hold for it, too.
#[derive(Debug)]
pub(super) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    pub(super) fn new() -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let missing = || io::Error::new(io::ErrorKind::NotFound, "no cgroup2 is mounted");
        let parent = folder_of(&mounts, &own).ok_or_else(missing)?;
        remove_abandoned(&parent);
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        match fs::create_dir(&path) {
            // Of an earlier process with this id, whose program is not gone.
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        Ok(Self { path })
    }

    /// For programs to be attached to.
    pub(super) fn folder(&self) -> io::Result<OwnedFd> {
        File::open(&self.path).map(OwnedFd::from)
    }

    /// A process that writes `0` there is in it from then on.
    pub(super) fn entrance(&self) -> io::Result<OwnedFd> {
        OpenOptions::new().write(true).open(self.path.join("cgroup.procs")).map(OwnedFd::from)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Where a process of the program lives on, so does its cgroup; the next one to come removes it.
        let _ = fs::remove_dir(&self.path);
    }
}

const PREFIX: &str = "ksf-accel-";

/// Removes what is left of those who were killed. A cgroup with processes cannot be removed.
fn remove_abandoned(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Where the cgroup of this process is mounted: proc_pid_mountinfo(5), cgroups(7).
fn folder_of(mounts: &str, own: &str) -> Option<PathBuf> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mount = mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut words = mount.split_ascii_whitespace().skip(3);
        let (root, point) = (words.next()?, words.next()?);
        (kind.starts_with("cgroup2 ") && root == "/").then_some(point)
    })?;
    Some(Path::new(mount).join(own.trim_start_matches('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
25 1 0:23 / /proc rw - proc proc rw
30 1 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu
31 1 0:27 /some/part /mnt rw - cgroup2 cgroup2 rw
32 1 0:28 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 none rw
";

    #[test]
    fn the_folder_of_this_process_is_found() {
        let own = "5:cpu:/other\n0::/system.slice/web.service\n";
        let expected = "/sys/fs/cgroup/unified/system.slice/web.service";
        assert_eq!(folder_of(MOUNTS, own), Some(expected.into()));
        assert_eq!(folder_of(MOUNTS, "0::/\n"), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(folder_of(MOUNTS, "5:cpu:/other\n"), None);
        assert_eq!(folder_of("25 1 0:23 / /proc rw - proc proc rw\n", own), None);
    }
}
