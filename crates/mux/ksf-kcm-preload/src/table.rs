//! Which descriptors of the process are not what the kernel takes them for.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use ksf_bpf_framing::FramingProgram;

use crate::attached::Attached;
use crate::kcm::{Answer, Kcm};
use crate::ownership;

/// What a descriptor is.
#[derive(Clone)]
pub(crate) enum Entry {
    /// A message socket.
    Kcm(Arc<Kcm>),
    /// A TCP socket that is attached, or was.
    Tcp(Arc<Attached>),
    /// A framing program.
    Program(Arc<FramingProgram>),
    /// A message socket of the process that opened it, which is another.
    Inherited,
}

static TABLE: RwLock<BTreeMap<c_int, Entry>> = RwLock::new(BTreeMap::new());
/// False while the table was never used: most calls of most programs.
static USED: AtomicBool = AtomicBool::new(false);

pub(crate) fn find(fd: c_int) -> Option<Entry> {
    if !USED.load(Ordering::Acquire) {
        return None;
    }
    let entry = TABLE.read().unwrap_or_else(PoisonError::into_inner).get(&fd).cloned()?;
    match entry {
        // In a child of vfork or clone, which may have closed it since and uses the number for something else.
        Entry::Kcm(_) | Entry::Tcp(_) if !ownership::is_owner() => ownership::is_marked(fd).then_some(Entry::Inherited),
        entry => Some(entry),
    }
}

/// Does a call on a message socket: refuses it on one of another process. None for any other descriptor.
pub(crate) fn on_kcm<T>(fd: c_int, call: impl FnOnce(&Arc<Kcm>) -> Answer<T>) -> Option<Answer<T>> {
    match find(fd)? {
        Entry::Kcm(kcm) => Some(call(&kcm)),
        Entry::Inherited => Some(Err(ownership::refuse(fd))),
        _ => None,
    }
}

pub(crate) fn tcp(fd: c_int) -> Option<Arc<Attached>> {
    match find(fd)? {
        Entry::Tcp(tcp) => Some(tcp),
        _ => None,
    }
}

/// Descriptors of this process's own message sockets.
pub(crate) fn message_sockets() -> Vec<c_int> {
    if !ownership::is_owner() {
        return Vec::new();
    }
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    table.iter().filter(|(_, entry)| matches!(entry, Entry::Kcm(_))).map(|(fd, _)| *fd).collect()
}

pub(crate) fn insert(fd: c_int, entry: Entry) {
    if !ownership::is_owner() {
        return;
    }
    USED.store(true, Ordering::Release);
    let old = TABLE.write().unwrap_or_else(PoisonError::into_inner).insert(fd, entry);
    // This is not done under the lock: it may close descriptors, which looks into the table.
    drop(old);
}

pub(crate) fn remove(fd: c_int) {
    remove_range(fd..=fd);
}

/// Forgets all of these.
pub(crate) fn remove_range(closed: RangeInclusive<c_int>) {
    if USED.load(Ordering::Acquire) && ownership::is_owner() {
        let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
        let old: Vec<_> = table.extract_if(closed, |_, _| true).collect();
        drop(table);
        // As in `insert`.
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

/// The table, locked.
pub(crate) type Locked = RwLockWriteGuard<'static, BTreeMap<c_int, Entry>>;

pub(crate) fn locked() -> Locked {
    TABLE.write().unwrap_or_else(PoisonError::into_inner)
}

/// In a child: what was the parent's is not the child's. Nothing is dropped, because that would end it.
pub(crate) fn leave(table: &mut Locked) {
    for (fd, entry) in std::mem::take(&mut **table) {
        let entry = match entry {
            Entry::Kcm(kcm) => {
                std::mem::forget(kcm);
                Entry::Inherited
            }
            Entry::Tcp(tcp) => {
                tcp.close_alarm();
                std::mem::forget(tcp);
                continue;
            }
            entry => entry,
        };
        table.insert(fd, entry);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
