//! What belongs to one process, and how a child is told from its parent.
//!
//! All of it is in memory that a `fork()` child finds filled with zeros (`MADV_WIPEONFORK`, Linux 4.14): the lock is
//! free there whoever held it in the parent, and nothing that the parent owns is taken for the child's. This holds for
//! every way to make a process, a bare `clone` as well. A `vfork()` or `posix_spawn()` child runs in its parent's
//! memory instead: the mark is there, but the process id is not its own.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use ksf_accel_proto::state::State;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;

use crate::table::INSTANCES_MAX;

/// See the head of this file. All zeros is its first state.
#[repr(C)]
pub(crate) struct Process {
    /// 1: this process has filled in the rest.
    mark: AtomicU32,
    /// 0: free, 1: taken, 2: taken and waited for.
    lock: AtomicU32,
    pid: AtomicU32,
    /// Questions to the holder that failed, one after the other.
    pub(crate) failures: AtomicU32,
    /// `CLOCK_MONOTONIC` (ms): the holder is not asked before.
    pub(crate) ask_again_ms: AtomicU64,
    /// Listeners (a bit for each slot) that this process has told the holder of.
    pub(crate) told: AtomicU64,
    /// Instances (a bit each) that are this process's own; others came with `fork()`.
    owned: [AtomicU64; INSTANCES_MAX / 64],
    /// Threads that wait on each instance now.
    pub(crate) waiting: [AtomicU32; INSTANCES_MAX],
    /// The thread that waits on each instance; [`MANY`] if it is more than one.
    pub(crate) thread: [AtomicU32; INSTANCES_MAX],
}

/// See [`Process::thread`].
pub(crate) const MANY: u32 = u32::MAX;

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
static STATE: AtomicPtr<State> = AtomicPtr::new(std::ptr::null_mut());

/// This process's memory; none where the program is not accelerated: then nothing at all is done here.
pub(crate) fn process() -> Option<&'static Process> {
    // SAFETY: null, or mapped when the library started and never unmapped; all of it is atomic.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

/// The memory shared with holder and steering program; none until the holder has answered a first time.
pub(crate) fn state() -> Option<&'static State> {
    // SAFETY: null, or mapped for as long as the process lives; all of it is atomic.
    unsafe { STATE.load(Ordering::Acquire).as_ref() }
}

/// True while the holder steers, and while it has not answered: then who wants a queue asks. Loaded but off: nothing is
/// done beside the program's own calls, and who has a queue looks into it last.
#[inline]
pub(crate) fn is_on() -> bool {
    state().is_none_or(|state| state.control.on.load(Ordering::Relaxed) != 0)
}

pub(crate) fn set_state(state: *mut State) {
    STATE.store(state, Ordering::Release);
}

/// Makes [`process`] find something. Called once, when the library starts.
pub(crate) fn begin() -> Option<()> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a mapping of its own, at an address that the kernel chooses.
    let memory = unsafe {
        let bytes = size_of::<Process>();
        let memory = rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE).ok()?;
        rustix::mm::madvise(memory, bytes, Advice::LinuxWipeOnFork).ok()?;
        memory
    };
    PROCESS.store(memory.cast(), Ordering::Release);
    Some(())
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// The right to change tables and to ask the holder. All signals wait meanwhile, as does `pthread_cancel`: a handler that
/// calls `accept()` or `close()` would wait for the thread it interrupts.
pub(crate) struct Entered {
    pub(crate) process: &'static Process,
    signals: libc::sigset_t,
    cancelling: c_int,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// True while this thread has an [`Entered`]: it would wait for itself in [`enter`].
#[inline]
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// None: not accelerated, or this is a `vfork()` child.
pub(crate) fn enter() -> Option<Entered> {
    let process = process()?;
    let mut cancelling = 0;
    // SAFETY: a set of signals is plain numbers, and the calls write to the sets that they get.
    let signals = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut cancelling);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    process.lock();
    INSIDE.set(true);
    process.sign();
    let entered = Entered { process, signals, cancelling };
    process.is_own().then_some(entered)
}

/// In a `fork()` child: nothing is done but to note who this is, before a `vfork()` child of its own could do that.
pub(crate) fn forked() {
    if let Some(process) = process() {
        process.sign();
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        INSIDE.set(false);
        self.process.unlock();
        // SAFETY: both were written by the calls in `enter`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.signals, std::ptr::null_mut());
            pthread_setcancelstate(self.cancelling, std::ptr::null_mut());
        }
    }
}

impl Process {
    /// False in a `vfork()` child, which runs in the memory of its parent.
    pub(crate) fn is_own(&self) -> bool {
        self.mark.load(Ordering::Acquire) == 0 || self.pid.load(Ordering::Relaxed) == std::process::id()
    }

    /// Puts the process id into memory that has none yet.
    fn sign(&self) {
        if self.mark.load(Ordering::Relaxed) == 0 {
            self.pid.store(std::process::id(), Ordering::Relaxed);
            self.mark.store(1, Ordering::Release);
        }
    }

    /// True where this instance was made by this process.
    pub(crate) fn owns(&self, instance: usize) -> bool {
        self.owned[instance / 64].load(Ordering::Relaxed) & (1 << (instance % 64)) != 0
    }

    pub(crate) fn set_owned(&self, instance: usize, owned: bool) {
        let bit = 1 << (instance % 64);
        if owned {
            self.owned[instance / 64].fetch_or(bit, Ordering::Relaxed);
        } else {
            self.owned[instance / 64].fetch_and(!bit, Ordering::Relaxed);
        }
        self.waiting[instance].store(0, Ordering::Relaxed);
        self.thread[instance].store(0, Ordering::Relaxed);
    }

    // A mutex of std would be left taken in a child.
    fn lock(&self) {
        if self.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return;
        }
        while self.lock.swap(2, Ordering::Acquire) != 0 {
            let _ = futex::wait(&self.lock, futex::Flags::PRIVATE, 2, None);
        }
    }

    fn unlock(&self) {
        if self.lock.swap(0, Ordering::Release) == 2 {
            let _ = futex::wake(&self.lock, futex::Flags::PRIVATE, 1);
        }
    }
}

/// Id of the calling thread.
pub(crate) fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// `CLOCK_MONOTONIC` in nanoseconds, without a system call.
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the given structure; this clock always exists.
    let _: c_int = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
