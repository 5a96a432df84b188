//! One XDP program per interface, and several services on it.
//!
//! The kernel takes one program per interface. The services of a process share it: the first is attached, and each
//! hands what is not for it to the next by a tail call (`ksf_xdp_next`). The link, and with it everything, ends with the
//! process.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::service::ServiceState;
use crate::{KernelError, XdpMode, sys};

/// `KSF_INTERFACES_MAX`
const INTERFACES_MAX: u32 = 1024;

/// An interface: its network namespace and its index there.
type Interface = (u64, u32);

static ROWS: Mutex<Option<HashMap<Interface, Row>>> = Mutex::new(None);

/// The services on an interface, in the order in which they see a frame.
struct Row {
    link: OwnedFd,
    mode: XdpMode,
    members: Vec<Member>,
}

struct Member {
    shared: Arc<ServiceState>,
    /// Places that this service has taken: it runs once, however many links it has.
    places: u32,
}

/// A service, attached to an interface.
#[derive(Debug)]
pub(crate) struct XdpAttachment {
    interface: Interface,
    shared: Arc<ServiceState>,
    pub(crate) mode: XdpMode,
}

impl XdpAttachment {
    pub(crate) fn take(shared: &Arc<ServiceState>, name: &str, index: u32) -> Result<Self, KernelError> {
        let interface = (namespace().map_err(|error| KernelError::system("looking at the namespace", error))?, index);
        let mut rows = rows();
        let rows = rows.get_or_insert_default();
        let mode = match rows.get_mut(&interface) {
            Some(row) => {
                row.join(shared, index)?;
                row.mode
            }
            None => {
                let row = Row::attach(shared, name, index)?;
                let mode = row.mode;
                rows.insert(interface, row);
                mode
            }
        };
        Ok(Self { interface, shared: Arc::clone(shared), mode })
    }
}

impl Drop for XdpAttachment {
    fn drop(&mut self) {
        let mut rows = rows();
        let rows = rows.get_or_insert_default();
        if let Some(row) = rows.get_mut(&self.interface) {
            row.leave(&self.shared, self.interface.1);
            if row.members.is_empty() {
                rows.remove(&self.interface);
            }
        }
    }
}

impl Row {
    fn attach(shared: &Arc<ServiceState>, name: &str, index: u32) -> Result<Self, KernelError> {
        let program = shared.loaded.xdp.as_fd();
        // Native first: lo and some drivers say EOPNOTSUPP, and drivers that need other settings (LRO, MTU) EINVAL.
        let (link, mode) = match sys::attach_xdp(program, index, sys::XDP_NATIVE) {
            Ok(link) => (link, XdpMode::Native),
            Err(error) if is_busy(&error) => return Err(busy(name, index)),
            Err(_) => match sys::attach_xdp(program, index, sys::XDP_GENERIC) {
                Ok(link) => (link, XdpMode::Generic),
                Err(error) if is_busy(&error) => return Err(busy(name, index)),
                Err(error) => return Err(KernelError::system("attaching XDP", error)),
            },
        };
        Ok(Self { link, mode, members: vec![Member { shared: Arc::clone(shared), places: 1 }] })
    }

    fn join(&mut self, shared: &Arc<ServiceState>, index: u32) -> Result<(), KernelError> {
        if let Some(member) = self.members.iter_mut().find(|member| Arc::ptr_eq(&member.shared, shared)) {
            member.places += 1;
            return Ok(());
        }
        if index >= INTERFACES_MAX {
            let detail = format!("its index is {index}; a second service can join up to index {}", INTERFACES_MAX - 1);
            return Err(KernelError::Unsupported { feature: "a second service on this interface", detail });
        }
        let last = self.members.last().expect("a row has a member");
        set_next(&last.shared, index, Some(shared))
            .map_err(|error| KernelError::system("adding a service to an interface's XDP program", error))?;
        self.members.push(Member { shared: Arc::clone(shared), places: 1 });
        Ok(())
    }

    fn leave(&mut self, shared: &Arc<ServiceState>, index: u32) {
        let Some(at) = self.members.iter().position(|member| Arc::ptr_eq(&member.shared, shared)) else { return };
        self.members[at].places -= 1;
        if self.members[at].places > 0 {
            return;
        }
        let left = self.members.remove(at);
        let next = self.members.get(at).map(|member| &member.shared);
        // Errors here mean that the interface is gone, and its link with it.
        let _ = match at.checked_sub(1).map(|before| &self.members[before].shared) {
            Some(before) => set_next(before, index, next),
            None => next.map_or(Ok(()), |first| sys::update_link(self.link.as_fd(), first.loaded.xdp.as_fd())),
        };
        let _ = set_next(&left.shared, index, None);
    }
}

fn set_next(service: &ServiceState, index: u32, next: Option<&Arc<ServiceState>>) -> io::Result<()> {
    let map = &service.loaded.maps.xdp_next;
    match next {
        Some(next) => map.update(&index.to_ne_bytes(), &next.loaded.xdp.as_raw_fd().to_ne_bytes()),
        // Nothing was there: fine.
        None => map.delete(&index.to_ne_bytes()).or(Ok(())),
    }
}

fn rows() -> MutexGuard<'static, Option<HashMap<Interface, Row>>> {
    // Every change is made by one call that leaves the table whole.
    ROWS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The network namespace of this thread.
fn namespace() -> io::Result<u64> {
    std::fs::metadata("/proc/thread-self/ns/net").map(|metadata| metadata.ino())
}

fn is_busy(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST))
}

fn busy(interface: &str, index: u32) -> KernelError {
    let ids = sys::xdp_programs(index).unwrap_or_default();
    let names: Vec<String> = ids
        .iter()
        .map(|&id| match ksf_bpf::program_name(id) {
            Ok(name) if !name.is_empty() => format!("{name} (id {id})"),
            _ => format!("id {id}"),
        })
        .collect();
    let program = if names.is_empty() { "of somebody else".into() } else { names.join(", ") };
    KernelError::XdpBusy { interface: interface.to_owned(), program }
}
