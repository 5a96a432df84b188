//! Which signals end a blocking `accept()`.
//!
//! The kernel goes on with an `accept()` that a handler has interrupted, if the handler was installed with SA_RESTART.
//! Here a thread waits in `ppoll()`, which is never restarted and does not tell which handler has run. So where a
//! program has handlers of both kinds, those with SA_RESTART are held back while it waits, and a signalfd says that one
//! of them is due: `ppoll()` returns, the handler runs, and the waiting goes on. What interrupts it is of the other kind.
//!
//! The handlers are looked up once, and again after each interruption: 64 system calls.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ksf_interpose::{Handlers, Signals};

use crate::descriptor;
use crate::process::enter;
use crate::table::Descriptor;

/// Signals (a bit each, 1 << number - 1) whose handlers have SA_RESTART, and those whose handlers have not, as they were
/// last found. A child of `fork()` has its parent's, and this too.
static RESTARTING: AtomicU64 = AtomicU64::new(0);
static ENDING: AtomicU64 = AtomicU64::new(0);
static LOOKED: AtomicBool = AtomicBool::new(false);
/// The process's signalfd, and what it was made for.
static FD: Descriptor = Descriptor::none();
static FD_SIGNALS: AtomicU64 = AtomicU64::new(0);

/// For `ppoll()`: the mask to wait with, and a descriptor that becomes readable when a signal is held back by it.
pub(crate) struct MaskedSignals {
    pub(crate) mask: libc::sigset_t,
    pub(crate) fd: c_int,
}

/// None: nothing has to be held back, because all handlers are of one kind; or it cannot be.
pub(crate) fn hold() -> Option<MaskedSignals> {
    if !LOOKED.load(Ordering::Acquire) {
        look();
    }
    let restarting = RESTARTING.load(Ordering::Relaxed);
    if restarting == 0 || ENDING.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let fd = signalfd(restarting)?;
    // SAFETY: a set of signals is plain numbers, and the call writes to the set that it gets.
    let mask = unsafe {
        let mut mask = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
        Signals(restarting).add_to(&mut mask);
        mask
    };
    Some(MaskedSignals { mask, fd })
}

/// After an interruption by a handler that was not held back: does the kernel go on with `accept()`?
pub(crate) fn restarts() -> bool {
    let before = ENDING.load(Ordering::Relaxed);
    look();
    // One that has taken itself away (SA_RESETHAND) was there when it ran. A handler that has been installed since the
    // last look may be the one, of whatever kind: then it is taken for an end, which programs with handlers of both
    // kinds know.
    ENDING.load(Ordering::Relaxed) == 0 && before & !RESTARTING.load(Ordering::Relaxed) == 0
}

/// The descriptor has another number now.
pub(crate) fn moved(from: c_int, to: c_int) {
    if FD.load() == Some(from) {
        FD.store(Some(to));
    }
}

fn look() {
    let handlers = Handlers::of_process();
    RESTARTING.store(handlers.restarting.0, Ordering::Relaxed);
    ENDING.store(handlers.ending.0, Ordering::Relaxed);
    LOOKED.store(true, Ordering::Release);
}

/// The process's signalfd for these signals. None: no descriptor is left.
fn signalfd(signals: u64) -> Option<c_int> {
    let known = || FD.load().filter(|fd| descriptor::is_intact(*fd) && FD_SIGNALS.load(Ordering::Acquire) == signals);
    if let Some(fd) = known() {
        return Some(fd);
    }
    let _entered = enter()?;
    if let Some(fd) = known() {
        return Some(fd);
    }
    let fd = descriptor::keep(Signals(signals).watch().ok()?).ok()?;
    if let Some(last) = FD.load() {
        descriptor::release(last);
    }
    FD.store(Some(fd));
    FD_SIGNALS.store(signals, Ordering::Release);
    Some(fd)
}
