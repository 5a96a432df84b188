//! Signals during calls that wait: which end the call with EINTR, and which do not (signal(7), "Interruption of system
//! calls").
//!
//! The multiplexor waits with system calls that any handler interrupts, and goes on. Where a handler is to end the call,
//! this waits in its place. The kernel decides by the flag SA_RESTART of the handler that ran, which the kernel does not tell
//! afterwards. So the signals whose handlers have it are kept from interrupting, and a signalfd, which only looks, says
//! when one of them is there: its handler then runs, and the wait goes on. The others interrupt.
//!
//! Signals come only while this waits in the kernel: one that came between two looks would be handled, and then nothing
//! would end the call. A handler also finds no lock held ([`Blocked`]).

use std::cell::Cell;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ksf_interpose::errno::errno;
#[cfg(debug_assertions)]
use ksf_interpose::errno::set_errno;
use ksf_interpose::{Handlers, Signals};
use ksf_mux::kcm::KcmSocketError;
use libc::{pollfd, sigset_t};

use crate::descriptor::keep_now;
use crate::kcm::{Answer, Kcm, readiness};

/// What a call waits for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum For {
    Message,
    Room,
}

/// Where no descriptor tells that the wait is over, one looks so often.
pub(crate) const SLICE: Duration = Duration::from_millis(5);

/// The first of them, where none was needed yet: they double.
const SLICE_MIN: Duration = Duration::from_micros(100);

/// What `attempt` returns once it need not wait; EAGAIN when the socket's time is over; EINTR. None if no handler can run
/// in this thread: then the multiplexor may wait itself, with signals open.
pub(crate) fn wait<T>(
    kcm: &Kcm,
    what: For,
    blocked: &Blocked,
    mut attempt: impl FnMut() -> Result<T, KcmSocketError>,
) -> Option<Answer<T>> {
    let timeout = if what == For::Message { kcm.socket.receive_timeout() } else { kcm.socket.send_timeout() };
    let handlers = Handlers::of_process();
    let held_back = SYNCHRONOUS.iter().fold(Signals::of(&blocked.before), |set, signal| set.with(*signal));
    let restarting = handlers.restarting.without(held_back);
    if restarting.is_empty() && handlers.ending.without(held_back).is_empty() {
        return None;
    }
    // With a timeout all of them interrupt (sock_intr_errno of include/net/sock.h).
    let restart = if timeout.is_none() { restarting } else { Signals::default() };
    // Where no descriptor is left for it, they are let through after each slice.
    let due = if restart.is_empty() { None } else { restart.watch().ok().and_then(keep_now) };
    let is_blind = due.is_none() && !restart.is_empty();
    let restart = restart.to_set();
    let mut slice = SLICE_MIN;
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        match attempt() {
            Err(KcmSocketError::WouldBlock) => {}
            other => return Some(other.map_err(|error| error.errno())),
        }
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Some(Err(libc::EAGAIN));
        }
        // A disabled socket is not readable, whatever comes; room shows to a thread that looks.
        let watched = what == For::Message && kcm.socket.is_receiving();
        if what == For::Room {
            let _ = kcm.socket.look();
        }
        let pause = (!watched || is_blind).then_some(slice);
        slice = (slice * 2).min(SLICE);
        let pause = left.map_or(pause, |left| Some(pause.map_or(left, |pause| left.min(pause))));
        let mut set =
            [polled(if watched { readiness(kcm) } else { -1 }), polled(due.as_ref().map_or(-1, AsRawFd::as_raw_fd))];
        if let Err(errno) = poll_with(&mut set, pause, &blocked.plus(&restart)) {
            return Some(Err(errno));
        }
        if set[1].revents != 0 || is_blind {
            blocked.let_through(&restart);
        }
    }
}

fn polled(fd: RawFd) -> pollfd {
    pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// `ppoll` of libc's.
pub(crate) fn poll_with(set: &mut [pollfd], timeout: Option<Duration>, signals: &sigset_t) -> Answer<c_int> {
    let timeout = timeout.map(crate::hooks::to_timespec);
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the list is as long as it says, and all of it lives during the call.
    let result =
        outside(|| unsafe { crate::real::ppoll(set.as_mut_ptr(), set.len() as libc::nfds_t, timeout, signals) });
    if result < 0 { Err(errno()) } else { Ok(result) }
}

/// Signals by which the kernel reports an error of the code that runs: blocked, they would end the program.
const SYNCHRONOUS: [c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// No signal comes to this thread, nor to threads it starts, while this lives, but for [`SYNCHRONOUS`] ones.
///
/// Code of this library and of the multiplexor holds locks, and allocates, only while one of these lives, or in the keeper
/// ([`crate::keeper`]), which is started so. A handler that the program runs therefore never waits for the thread that it has
/// interrupted. The places where the library's code begins make one: the hooks ([`crate::table::with`]), and what libc
/// calls at the start and around fork ([`crate::ownership`]).
pub(crate) struct Blocked {
    /// What the program had blocked.
    pub(crate) before: sigset_t,
    /// False but where one lives already.
    was_inside: bool,
}

thread_local! {
    /// The code of this thread is the library's, not the program's.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// True in code of the library's and of the multiplexor's, which may close their own descriptors.
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}

/// Does what handlers of the program may interrupt.
pub(crate) fn outside<T>(call: impl FnOnce() -> T) -> T {
    let was_inside = INSIDE.replace(false);
    let result = call();
    INSIDE.set(was_inside);
    result
}

impl Blocked {
    pub(crate) fn all() -> Self {
        Self { before: block(), was_inside: INSIDE.replace(true) }
    }

    /// Does what may wait in the kernel, with signals as the program has them. The caller holds no lock.
    pub(crate) fn open<T>(&self, wait: impl FnOnce() -> T) -> T {
        // SAFETY: the set is what the program had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
        let result = wait();
        block();
        result
    }

    /// What the program had blocked, and these.
    fn plus(&self, others: &sigset_t) -> sigset_t {
        let mut set = self.before;
        Signals::of(others).add_to(&mut set);
        set
    }

    /// Lets the handlers of these run, if they wait.
    fn let_through(&self, signals: &sigset_t) {
        let mut now = Signals::default().to_set();
        // SAFETY: the sets are values. What waits is delivered before the first call returns.
        outside(|| unsafe {
            libc::pthread_sigmask(libc::SIG_UNBLOCK, signals, &mut now);
            libc::pthread_sigmask(libc::SIG_SETMASK, &now, std::ptr::null_mut());
        });
    }
}

/// Signals for which the process has installed a handler at some time, as bits; those of debug builds, which check with them.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// The process installs a handler.
pub(crate) fn note_handler(signal: c_int) {
    if cfg!(debug_assertions) && (1..=64).contains(&signal) {
        HANDLED.fetch_or(1 << (signal - 1), Ordering::Relaxed);
    }
}

/// True if a handler may interrupt this thread, but for one of a [`SYNCHRONOUS`] signal.
#[cfg(debug_assertions)]
pub(crate) fn may_come() -> bool {
    let handled = HANDLED.load(Ordering::Relaxed);
    if handled == 0 {
        return false;
    }
    let mut now = Signals::default().to_set();
    // SAFETY: the set is a value.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut now) };
    let held_back = SYNCHRONOUS.iter().fold(Signals::of(&now), |set, signal| set.with(*signal));
    let handled = (1..=64).filter(|signal| handled >> (signal - 1) & 1 != 0);
    if handled.fold(Signals::default(), |set, signal| set.with(signal)).without(held_back).is_empty() {
        return false;
    }
    // The program may have taken its handler back. The caller may have set errno for the program.
    let before = errno();
    let handlers = Handlers::of_process();
    set_errno(before);
    [handlers.restarting, handlers.ending].into_iter().any(|signals| !signals.without(held_back).is_empty())
}

/// Of the library's locks and those of the multiplexor.
#[cfg(debug_assertions)]
pub(crate) fn check_lock() {
    assert!(!may_come(), "a lock is taken while a handler may come");
}

/// Blocks signals. Returns those that were.
fn block() -> sigset_t {
    // For each call: quicker than adding those that are blocked.
    let (mut all, mut before) = (Signals::default().to_set(), Signals::default().to_set());
    // SAFETY: the sets are values, and the signals exist.
    unsafe {
        libc::sigfillset(&mut all);
        for signal in SYNCHRONOUS {
            libc::sigdelset(&mut all, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
    }
    before
}

impl Drop for Blocked {
    fn drop(&mut self) {
        INSIDE.set(self.was_inside);
        // SAFETY: the set is what the program had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}
