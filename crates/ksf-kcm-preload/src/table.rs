//! Which descriptors of the process are not what the kernel takes them for.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use ksf_bpf_framing::FramingProgram;

use crate::attached::Attached;
use crate::kcm::Kcm;

/// What a descriptor is.
#[derive(Clone)]
pub(crate) enum Entry {
    /// A message socket.
    Kcm(Arc<Kcm>),
    /// A TCP socket that is attached, or was.
    Tcp(Arc<Attached>),
    /// A framing program.
    Program(Arc<FramingProgram>),
}

static TABLE: RwLock<BTreeMap<c_int, Entry>> = RwLock::new(BTreeMap::new());
/// False while the table was never used: most calls of most programs.
static USED: AtomicBool = AtomicBool::new(false);

pub(crate) fn find(fd: c_int) -> Option<Entry> {
    if !USED.load(Ordering::Acquire) {
        return None;
    }
    TABLE.read().unwrap_or_else(PoisonError::into_inner).get(&fd).cloned()
}

pub(crate) fn kcm(fd: c_int) -> Option<Arc<Kcm>> {
    match find(fd)? {
        Entry::Kcm(kcm) => Some(kcm),
        _ => None,
    }
}

pub(crate) fn tcp(fd: c_int) -> Option<Arc<Attached>> {
    match find(fd)? {
        Entry::Tcp(tcp) => Some(tcp),
        _ => None,
    }
}

pub(crate) fn insert(fd: c_int, entry: Entry) {
    USED.store(true, Ordering::Release);
    let old = TABLE.write().unwrap_or_else(PoisonError::into_inner).insert(fd, entry);
    // Not under the lock: it may close descriptors, which looks into the table.
    drop(old);
}

pub(crate) fn remove(fd: c_int) {
    if USED.load(Ordering::Acquire) {
        let old = TABLE.write().unwrap_or_else(PoisonError::into_inner).remove(&fd);
        drop(old);
    }
}

/// A descriptor was duplicated.
pub(crate) fn copy(from: c_int, to: c_int) {
    match find(from) {
        Some(entry) => insert(to, entry),
        None => remove(to),
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
