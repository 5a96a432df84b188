//! The two files of AF_KCM under /proc/net.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use ksf_mux::kcm::{KcmStats, proc_net_kcm, proc_net_kcm_stats};

use crate::kcm::GROUPS;
use crate::ownership;
use crate::signals::Blocked;
use crate::table::lock;

fn stats() -> Vec<KcmStats> {
    let groups: Vec<_> = lock(&GROUPS).iter().filter_map(Weak::upgrade).collect();
    let sockets: Vec<Arc<_>> = groups.iter().filter_map(|group| group.socket()).collect();
    sockets.iter().map(|kcm| kcm.socket.stats()).collect()
}

/// True if a path names one of them. Never in a child of vfork or `_Fork`: it may not wait for the locks.
///
/// # Safety
///
/// `path` is null or a string.
pub(crate) unsafe fn is_ours(path: *const c_char) -> bool {
    if path.is_null() || !ownership::is_owner() {
        return false;
    }
    // SAFETY: it is a string.
    matches!(unsafe { CStr::from_ptr(path) }.to_bytes(), b"/proc/net/kcm" | b"/proc/net/kcm_stats")
}

/// Opens one of them, as it is now.
///
/// # Safety
///
/// `path` is null or a string.
pub(crate) unsafe fn open(path: *const c_char) -> Option<Result<c_int, c_int>> {
    // SAFETY: handed on from the caller.
    if !unsafe { is_ours(path) } {
        return None;
    }
    let _blocked = Blocked::all();
    // SAFETY: it is a string.
    let all = unsafe { CStr::from_ptr(path) }.to_bytes() == b"/proc/net/kcm";
    let text = if all { proc_net_kcm(&stats()) } else { proc_net_kcm_stats(&stats()) };
    let make = || -> rustix::io::Result<OwnedFd> {
        let file = rustix::fs::memfd_create("kcm", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let written = rustix::io::write(&file, rest)?;
            rest = &rest[written..];
        }
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
        Ok(file)
    };
    Some(make().map(IntoRawFd::into_raw_fd).map_err(|errno| errno.raw_os_error()))
}
