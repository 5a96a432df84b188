//! What each descriptor number means here: one number in a table for each, zero for nearly all.
//!
//! The tables are plain memory, so a `fork()` child knows its parent's listeners and epoll instances, as it has
//! inherited their descriptors. They are changed under [`crate::process::enter`] only, and read without.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use ksf_accel_proto::state::{LISTENERS_MAX, WORKERS_MAX};
use ksf_interpose::Marks;

/// Descriptors with a higher number are left alone.
pub(crate) const FDS_MAX: usize = 1 << 16;
/// Epoll instances, and threads that block in `accept()`, of one process.
pub(crate) const INSTANCES_MAX: usize = 256;

/// What a descriptor number is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DescriptorKind {
    /// Not looked at.
    None,
    /// Looked at: no TCP socket, or a listener too many.
    Foreign,
    /// A TCP socket that did not listen when it was looked at. Another process that has it may call `listen()`.
    MayListen,
    /// This library's own: the program does not know of it.
    Own,
    /// A TCP listener: index into [`LISTENERS`].
    Listener(usize),
    /// An epoll instance that watches a listener: index into [`INSTANCES`].
    Epoll(usize),
}

const LISTENER: u16 = 0x100;
const EPOLL: u16 = 0x200;

static KINDS: Marks<FDS_MAX> = Marks::new();

/// What the table says of a number: a load and a compare for those that are nothing here.
#[inline]
pub(crate) fn kind(fd: c_int) -> DescriptorKind {
    of_mark(KINDS.get(fd).unwrap_or(0))
}

fn of_mark(mark: u16) -> DescriptorKind {
    match mark {
        0 => DescriptorKind::None,
        1 => DescriptorKind::Foreign,
        2 => DescriptorKind::Own,
        3 => DescriptorKind::MayListen,
        kind if kind >= EPOLL => DescriptorKind::Epoll((kind - EPOLL) as usize),
        kind => DescriptorKind::Listener((kind - LISTENER) as usize),
    }
}

/// False where the number is too high for the table.
pub(crate) fn set_kind(fd: c_int, kind: DescriptorKind) -> bool {
    let number = match kind {
        DescriptorKind::None => 0,
        DescriptorKind::Foreign => 1,
        DescriptorKind::Own => 2,
        DescriptorKind::MayListen => 3,
        DescriptorKind::Listener(slot) => LISTENER + slot as u16,
        DescriptorKind::Epoll(instance) => EPOLL + instance as u16,
    };
    KINDS.set(fd, number)
}

/// The marked numbers from `first` to `last`, both included.
pub(crate) fn marked(first: u32, last: u32) -> impl Iterator<Item = (c_int, DescriptorKind)> {
    KINDS.marked(first, last).map(|(fd, mark)| (fd, of_mark(mark)))
}

/// A descriptor, or none. All zeros is none.
pub(crate) struct Descriptor(AtomicI32);

impl Descriptor {
    pub(crate) const fn none() -> Descriptor {
        Descriptor(AtomicI32::new(0))
    }

    #[inline]
    pub(crate) fn load(&self) -> Option<c_int> {
        Some(self.0.load(Ordering::Acquire) - 1).filter(|fd| *fd >= 0)
    }

    pub(crate) fn store(&self, fd: Option<c_int>) {
        self.0.store(fd.map_or(0, |fd| fd + 1), Ordering::Release);
    }

    pub(crate) fn take(&self) -> Option<c_int> {
        Some(self.0.swap(0, Ordering::AcqRel) - 1).filter(|fd| *fd >= 0)
    }
}

/// A listener of the program, whatever descriptors it has.
pub(crate) struct Listener {
    /// `SO_COOKIE`; 0: free.
    pub(crate) cookie: AtomicU64,
    /// Marked descriptors.
    pub(crate) descriptors: AtomicU32,
    /// Its bit in `Worker::ready`.
    pub(crate) index: AtomicU32,
    /// 1: the holder will not have it; not asked again before the next `listen()`.
    pub(crate) refused: AtomicU32,
    /// 1: it was seen non-blocking; 2: blocking.
    pub(crate) mode: AtomicU32,
    /// As given to `listen()`; 0: not known.
    pub(crate) backlog: AtomicI32,
    /// Another worker's queue that was taken from last.
    pub(crate) stolen: Descriptor,
    /// 1: the last descriptor is being closed, and the holder is to be told.
    pub(crate) closed: AtomicU32,
    /// Workers (a bit each) that served it until then.
    pub(crate) left: [AtomicU64; WORKERS_MAX / 64],
}

/// The program's listeners.
pub(crate) static LISTENERS: [Listener; LISTENERS_MAX] = [const {
    Listener {
        cookie: AtomicU64::new(0),
        descriptors: AtomicU32::new(0),
        index: AtomicU32::new(0),
        refused: AtomicU32::new(0),
        mode: AtomicU32::new(0),
        backlog: AtomicI32::new(0),
        stolen: Descriptor::none(),
        closed: AtomicU32::new(0),
        left: [const { AtomicU64::new(0) }; WORKERS_MAX / 64],
    }
}; LISTENERS_MAX];

/// An epoll instance that watches listeners, or a thread that blocks in `accept()`: a worker.
pub(crate) struct Instance {
    /// 0: free.
    pub(crate) used: AtomicU32,
    /// Number of the epoll descriptor; none for a thread.
    pub(crate) epoll: Descriptor,
    /// Index of the worker, plus 1; 0: none yet.
    pub(crate) worker: AtomicU32,
    /// `Worker::generation` as it was given.
    pub(crate) generation: AtomicU32,
    /// CPU to bind its thread to, plus 1; 0: leave it.
    pub(crate) cpu: AtomicI32,
    /// Counts calls of `accept()`.
    pub(crate) turn: AtomicU32,
    /// Listeners (a bit for each slot) whose queue is watched beside the listener.
    pub(crate) armed: AtomicU64,
    /// For each listener.
    pub(crate) entries: [Entry; LISTENERS_MAX],
}

/// How an instance serves a listener.
pub(crate) struct Entry {
    /// One of the `ENTRY_` values.
    pub(crate) stage: AtomicU32,
    /// The queue; none: the listener itself is it (a program that uses SO_REUSEPORT itself).
    pub(crate) queue: Descriptor,
    /// Readable where another worker's queue needs somebody.
    pub(crate) rescue: Descriptor,
    /// An epoll instance of this library's that stands in the program's for the listener (EPOLLONESHOT).
    pub(crate) inner: Descriptor,
    /// The number under which the program added the listener.
    pub(crate) listener: Descriptor,
    /// What the program asked for.
    pub(crate) events: AtomicU32,
    /// The program's event data.
    pub(crate) data: AtomicU64,
}

/// Nothing known.
pub(crate) const ENTRY_NONE: u32 = 0;
/// There is a queue.
pub(crate) const ENTRY_JOINED: u32 = 1;
/// The queue is watched, the ready bit is set.
pub(crate) const ENTRY_ARMED: u32 = 2;

/// The process's workers.
pub(crate) static INSTANCES: [Instance; INSTANCES_MAX] = [const {
    Instance {
        used: AtomicU32::new(0),
        epoll: Descriptor::none(),
        worker: AtomicU32::new(0),
        generation: AtomicU32::new(0),
        cpu: AtomicI32::new(0),
        turn: AtomicU32::new(0),
        armed: AtomicU64::new(0),
        entries: [const {
            Entry {
                stage: AtomicU32::new(ENTRY_NONE),
                queue: Descriptor::none(),
                rescue: Descriptor::none(),
                inner: Descriptor::none(),
                listener: Descriptor::none(),
                events: AtomicU32::new(0),
                data: AtomicU64::new(0),
            }
        }; LISTENERS_MAX],
    }
}; INSTANCES_MAX];
/// All used instances are below: the end of every search.
static INSTANCES_END: AtomicU32 = AtomicU32::new(0);

/// The instances in use.
pub(crate) fn instances() -> impl Iterator<Item = (usize, &'static Instance)> {
    let end = INSTANCES_END.load(Ordering::Acquire) as usize;
    INSTANCES[..end].iter().enumerate().filter(|(_, instance)| instance.used.load(Ordering::Acquire) != 0)
}

/// A new one. None: all are in use.
pub(crate) fn new_instance(epoll: Option<c_int>) -> Option<usize> {
    let index = INSTANCES.iter().position(|instance| instance.used.load(Ordering::Relaxed) == 0)?;
    let instance = &INSTANCES[index];
    instance.epoll.store(epoll);
    instance.worker.store(0, Ordering::Relaxed);
    instance.cpu.store(0, Ordering::Relaxed);
    instance.armed.store(0, Ordering::Relaxed);
    instance.used.store(1, Ordering::Release);
    INSTANCES_END.fetch_max(index as u32 + 1, Ordering::Release);
    Some(index)
}

/// The listener with this cookie.
pub(crate) fn find_listener(cookie: u64) -> Option<usize> {
    LISTENERS.iter().position(|listener| listener.cookie.load(Ordering::Acquire) == cookie)
}

/// A new one. None: there are too many.
pub(crate) fn new_listener(cookie: u64) -> Option<usize> {
    let slot = find_listener(0)?;
    let listener = &LISTENERS[slot];
    listener.descriptors.store(0, Ordering::Relaxed);
    listener.index.store(0, Ordering::Relaxed);
    listener.refused.store(0, Ordering::Relaxed);
    listener.mode.store(0, Ordering::Relaxed);
    listener.backlog.store(0, Ordering::Relaxed);
    listener.cookie.store(cookie, Ordering::Release);
    Some(slot)
}
