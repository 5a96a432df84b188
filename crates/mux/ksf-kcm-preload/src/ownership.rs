//! Which process a message socket belongs to.
//!
//! The multiplexor behind it lives in the memory and the threads of the process that opened it. A child has neither: it
//! must not read from connections whose other half of a message the parent holds, nor answer where the parent does. So
//! what a child inherits over fork or exec, or gets over a Unix socket ([`crate::passed`]), is refused, aloud
//! ([`refuse`]), and the parent goes on undisturbed.
//!
//! After fork the table says so ([`in_child`]); after exec there is no table any more, but a mark on the open file
//! ([`mark`]), which is looked for when this library is loaded. A child of vfork has the parent's very table: it is known
//! by its process number, and changes nothing.

use std::cell::RefCell;
use std::ffi::c_int;
use std::io::Write as _;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::signals::Blocked;
use crate::table::{self, Entry};
use crate::{descriptor, events, kcm, keeper, notice, program};

/// The process whose memory this is.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// True if the caller is the process whose memory this is, not a child of it that borrows it (vfork) or has copied it
/// without a word (clone).
pub(crate) fn is_owner() -> bool {
    rustix::process::getpid().as_raw_nonzero().get() == PROCESS.load(Ordering::Relaxed)
}

/// The error for a message socket of another process. The first is explained.
pub(crate) fn refuse(fd: c_int) -> c_int {
    static TOLD: AtomicBool = AtomicBool::new(false);
    notice::once(
        &TOLD,
        format_args!(
            "descriptor {fd} is a message socket of the process that opened it, and of no other: it cannot be used \
             after fork or exec, nor where it was passed to (EOPNOTSUPP)"
        ),
    );
    libc::EOPNOTSUPP
}

/// A signal number that has no use for an epoll set, which sends none: F_SETSIG belongs to the open file, so it survives
/// fork, exec and dup, and nothing comes of it.
const MARK: c_int = 59;

/// `F_SETSIG` and `F_GETSIG` (include/uapi/asm-generic/fcntl.h), which the crate libc does not have.
const SETSIG: c_int = 10;
const GETSIG: c_int = 11;

/// Marks a message socket as one, for programs that this process may become.
pub(crate) fn mark(fd: BorrowedFd<'_>) {
    // SAFETY: sets a number of the open file. No memory is involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), SETSIG, MARK) };
}

/// True if a descriptor is a marked one.
pub(crate) fn is_marked(fd: RawFd) -> bool {
    // SAFETY: reads a number of the open file. No memory is involved.
    let mark = unsafe { libc::fcntl(fd, GETSIG) };
    mark == MARK && is_epoll_set(fd).unwrap_or(false)
}

/// Without memory of the allocator, whose lock a thread may hold that a child of `_Fork` has not.
fn is_epoll_set(fd: RawFd) -> std::io::Result<bool> {
    let mut path = [0; 32];
    let mut rest = &mut path[..];
    write!(rest, "/proc/self/fd/{fd}")?;
    let left = rest.len();
    let path = &path[..path.len() - left];
    let mut name = [std::mem::MaybeUninit::uninit(); 32];
    let (name, _) = rustix::fs::readlinkat_raw(rustix::fs::CWD, path, &mut name)?;
    Ok(name == b"anon_inode:[eventpoll]")
}

/// Called by the loader, before the program's own code.
extern "C" fn loaded() {
    let _blocked = Blocked::all();
    ksf_interpose::abort_on_panic("ksf kcm-run");
    ksf_mux::place_descriptors(descriptor::keep);
    #[cfg(debug_assertions)]
    ksf_mux::check_locks(crate::signals::check_lock);
    crate::real::look_up_all();
    crate::hooks::look_up_all();
    kcm::routing();
    PROCESS.store(rustix::process::getpid().as_raw_nonzero().get(), Ordering::Relaxed);
    // SAFETY: the functions live as long as this library, which is never unloaded (LD_PRELOAD). The allocator's come first:
    // its lock is then taken after those below, and free in the child before `in_child` allocates.
    unsafe {
        // The allocator of the program registers its own first, too: `in_child` starts a thread, for which libc allocates.
        libc::free(std::hint::black_box(libc::malloc(1)));
        dlmalloc::enable_alloc_after_fork();
        libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child));
    }
    for fd in open_descriptors().into_iter().filter(|fd| is_marked(*fd)) {
        table::insert(fd, Entry::Inherited);
    }
    // The constructor of another library may have installed one.
    keeper::start_for_handlers();
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

fn open_descriptors() -> Vec<RawFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = rustix::fs::open("/proc/self/fd", flags, Mode::empty()) else { return Vec::new() };
    let mut buffer = Vec::with_capacity(4096);
    let mut entries = rustix::fs::RawDir::new(&folder, buffer.spare_capacity_mut());
    let mut found = Vec::new();
    while let Some(Ok(entry)) = entries.next() {
        found.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<RawFd>().ok()));
    }
    found
}

/// Every lock of this library's own is held over fork, so that none is held in the child by a thread that it has not. No
/// handler runs meanwhile.
struct ForkGuard {
    locks: Locks,
    _blocked: Blocked,
}

struct Locks {
    table: table::Locked,
    registered: events::Locked,
    groups: kcm::Locked,
    keeper: keeper::Locked,
    own: descriptor::Locked,
    _programs: program::Locked,
    _attached: ksf_mux::AttachedLocked,
}

thread_local! {
    // libc would allocate for what is dropped at the end of the thread.
    static HELD: RefCell<ManuallyDrop<Option<ForkGuard>>> = const { RefCell::new(ManuallyDrop::new(None)) };
}

// No thread waits for one of these locks while it holds another, so their order does not matter.
extern "C" fn before_fork() {
    let blocked = Blocked::all();
    let locks = Locks {
        table: table::locked(),
        registered: events::locked(),
        groups: kcm::locked(),
        keeper: keeper::locked(),
        own: descriptor::locked(),
        _programs: program::locked(),
        _attached: ksf_mux::AttachedLocked::new(),
    };
    let held = ForkGuard { locks, _blocked: blocked };
    let _ = HELD.try_with(|place| **place.borrow_mut() = Some(held));
}

fn take_held() -> Option<ForkGuard> {
    HELD.try_with(|place| place.borrow_mut().take()).ok().flatten()
}

extern "C" fn in_parent() {
    drop(take_held());
}

/// Takes leave of the parent's multiplexors without touching them: their locks may be held for ever, and to end them
/// would send, and would take connections out of the parent's epoll sets.
extern "C" fn in_child() {
    PROCESS.store(rustix::process::getpid().as_raw_nonzero().get(), Ordering::Relaxed);
    let Some(ForkGuard { mut locks, _blocked }) = take_held() else { return };
    descriptor::leave(&mut locks.own);
    table::leave(&mut locks.table);
    events::leave(&mut locks.registered);
    kcm::leave(&mut locks.groups);
    keeper::leave(&mut locks.keeper);
    drop(locks);
    keeper::start_for_handlers();
}
