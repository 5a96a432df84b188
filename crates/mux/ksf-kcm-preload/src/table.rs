//! Which descriptors of the process are not what the kernel takes them for.
//!
//! A handler of the program's may make any call on a descriptor, wherever it interrupts this library. So a call on a
//! descriptor that is nothing here takes no lock ([`MARKS`]), and no handler runs during one on any other ([`with`]).

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ksf_bpf_framing::FramingProgram;
use ksf_interpose::Marks;

use crate::attached::Attached;
use crate::kcm::{Answer, Kcm};
use crate::ownership;
use crate::signals::Blocked;

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

static TABLE: Mutex<BTreeMap<c_int, Entry>> = Mutex::new(BTreeMap::new());
/// 1 for those in the table. Changed under its lock.
static MARKS: Marks<{ 1 << 16 }> = Marks::new();
/// A descriptor was entered whose number is too high for a mark.
static HIGH: AtomicBool = AtomicBool::new(false);

/// False for nearly all descriptors of most programs.
pub(crate) fn may_have(fd: c_int) -> bool {
    MARKS.get(fd).map_or_else(|| HIGH.load(Ordering::Acquire), |mark| mark != 0)
}

/// Does a call on a descriptor of the table, with signals blocked. None for any other, and if `call` returns it: then the
/// call is libc's.
pub(crate) fn with<T>(fd: c_int, call: impl FnOnce(Entry, &Blocked) -> Option<T>) -> Option<T> {
    if !may_have(fd) {
        return None;
    }
    let blocked = Blocked::all();
    call(find(fd)?, &blocked)
}

/// The entry of a descriptor. Signals stay blocked as long as the caller has it: to drop it may end a multiplexor.
pub(crate) fn find(fd: c_int) -> Option<Entry> {
    if !may_have(fd) {
        return None;
    }
    if !ownership::is_owner() {
        // A child of vfork or `_Fork`. Its descriptor may be another than the table's. A thread that it has not may hold the
        // lock for ever, and it must not become the last holder of an entry of the parent's.
        return ownership::is_marked(fd).then_some(Entry::Inherited);
    }
    lock(&TABLE).get(&fd).cloned()
}

/// Does a call on a message socket: refuses it on one of another process. None for any other descriptor.
pub(crate) fn on_kcm<T>(fd: c_int, call: impl FnOnce(&Arc<Kcm>, &Blocked) -> Answer<T>) -> Option<Answer<T>> {
    with(fd, |entry, blocked| match entry {
        Entry::Kcm(kcm) => Some(call(&kcm, blocked)),
        Entry::Inherited => Some(Err(ownership::refuse(fd))),
        _ => None,
    })
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
    let table = lock(&TABLE);
    table.iter().filter(|(_, entry)| matches!(entry, Entry::Kcm(_))).map(|(fd, _)| *fd).collect()
}

pub(crate) fn insert(fd: c_int, entry: Entry) {
    if !ownership::is_owner() {
        return;
    }
    let mut table = lock(&TABLE);
    if !MARKS.set(fd, 1) {
        HIGH.store(true, Ordering::Release);
    }
    let old = table.insert(fd, entry);
    drop(table);
    // This is not done under the lock: it may close descriptors, which looks into the table.
    drop(old);
}

pub(crate) fn remove(fd: c_int) {
    remove_range(fd..=fd);
}

/// False if none of these is in the table.
pub(crate) fn may_have_any(range: &RangeInclusive<c_int>) -> bool {
    let ends = (u32::try_from(*range.start()).unwrap_or(0), u32::try_from(*range.end()));
    HIGH.load(Ordering::Acquire) || ends.1.is_ok_and(|last| MARKS.marked(ends.0, last).next().is_some())
}

/// Forgets all of these.
pub(crate) fn remove_range(closed: RangeInclusive<c_int>) {
    if !may_have_any(&closed) || !ownership::is_owner() {
        return;
    }
    let mut table = lock(&TABLE);
    let old: Vec<_> = table.extract_if(closed, |_, _| true).collect();
    for (fd, _) in &old {
        MARKS.set(*fd, 0);
    }
    drop(table);
    // As in `insert`.
    drop(old);
}

/// A descriptor was duplicated.
pub(crate) fn copy(from: c_int, to: c_int) {
    match find(from) {
        Some(entry) => insert(to, entry),
        None => remove(to),
    }
}

/// The table, locked while no handler can run.
pub(crate) type Locked = MutexGuard<'static, BTreeMap<c_int, Entry>>;

pub(crate) fn locked() -> Locked {
    lock(&TABLE)
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
                std::mem::forget(tcp);
                MARKS.set(fd, 0);
                continue;
            }
            entry => entry,
        };
        table.insert(fd, entry);
    }
}

/// Locks, in a thread that has signals blocked ([`Blocked`]): a handler that needs the lock would wait for the thread that
/// it has interrupted.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(debug_assertions)]
    crate::signals::check_lock();
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
