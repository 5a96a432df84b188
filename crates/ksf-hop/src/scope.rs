//! Whose connections are joined.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::HopError;

/// `SO_NETNS_COOKIE` of asm-generic/socket.h, kernel 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

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

/// Where cgroup2 is mounted.
fn root() -> Result<PathBuf, HopError> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mount_of(&mounts).map(PathBuf::from).ok_or(HopError::NoCgroup)
}

/// The cgroup of this process.
pub(crate) fn own_cgroup() -> Result<PathBuf, HopError> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let folder = root()?.join(path_of(&groups).ok_or(HopError::NoCgroup)?);
    // In a container the path may lead out of what is mounted; the root then holds this process, too.
    if folder.is_dir() { Ok(folder) } else { root() }
}

fn mount_of(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let folder = words.next()?;
        (words.next() == Some("cgroup2")).then_some(folder)
    })
}

/// The path below the mount: cgroups(7), the line of hierarchy 0.
fn path_of(groups: &str) -> Option<&str> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    (!path.split('/').any(|part| part == "..")).then_some(path)
}

/// The cookie of this thread's network namespace.
pub(crate) fn network_cookie() -> io::Result<u64> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    let mut cookie = 0u64;
    let mut bytes = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: the kernel writes at most eight bytes to `cookie`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
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
        assert_eq!(path_of("4:memory:/a\n0::/system.slice/x.service\n"), Some("system.slice/x.service"));
        assert_eq!(path_of("0::/\n"), Some(""));
        assert_eq!(path_of("0::/../../x\n"), None);
        assert_eq!(path_of("4:memory:/a\n"), None);
        let mounts = "sysfs /sys sysfs rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(mount_of(mounts), Some("/sys/fs/cgroup/unified"));
        assert_eq!(mount_of("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n"), None);
    }
}
