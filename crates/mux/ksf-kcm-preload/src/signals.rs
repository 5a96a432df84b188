//! Signals during calls that wait: which end the call with EINTR, and which do not (signal(7), "Interruption of system
//! calls").
//!
//! The multiplexor waits with system calls that any handler interrupts, and goes on. Where a handler is to end the call,
//! this waits in its place. The kernel decides by the flag SA_RESTART of the handler that ran, which the kernel does not tell
//! afterwards. So the signals whose handlers have it are kept from interrupting, and a signalfd, which only looks, says
//! when one of them is there: its handler then runs, and the wait goes on. The others interrupt.
//!
//! Signals come only while this waits in the kernel: one that came between two looks would be handled, and then nothing
//! would end the call.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use ksf_mux::kcm::KcmSocketError;
use libc::{pollfd, sigset_t};

use crate::kcm::{Answer, Kcm, readiness};

/// What a call waits for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum For {
    Message,
    Room,
}

/// Where no descriptor tells that the wait is over, one looks so often.
pub(crate) const SLICE: Duration = Duration::from_millis(5);

/// What `attempt` returns once it need not wait; EAGAIN when the socket's time is over; EINTR. None if no signal can end
/// the call: then the multiplexor may wait itself.
pub(crate) fn wait<T>(
    kcm: &Kcm,
    what: For,
    mut attempt: impl FnMut() -> Result<T, KcmSocketError>,
) -> Option<Answer<T>> {
    let timeout = if what == For::Message { kcm.socket.receive_timeout() } else { kcm.socket.send_timeout() };
    let blocked = Blocked::all();
    // With a timeout all of them interrupt (sock_intr_errno of include/net/sock.h).
    let handlers = Handlers::of_process(&blocked.before, timeout.is_some());
    if !handlers.some_interrupt {
        return None;
    }
    let restarting = match handlers.restarting() {
        Ok(restarting) => restarting,
        Err(errno) => return Some(Err(errno)),
    };
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
        let slice = (!watched).then_some(SLICE);
        let left = left.map_or(slice, |left| Some(slice.map_or(left, |slice| left.min(slice))));
        let mut set = [
            polled(if watched { readiness(kcm) } else { -1 }),
            polled(restarting.as_ref().map_or(-1, AsRawFd::as_raw_fd)),
        ];
        if let Err(errno) = poll_with(&mut set, left, &blocked.plus(&handlers.restart)) {
            return Some(Err(errno));
        }
        if set[1].revents != 0 {
            blocked.let_through(&handlers.restart);
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
    let result = unsafe { crate::real::ppoll(set.as_mut_ptr(), set.len() as libc::nfds_t, timeout, signals) };
    if result < 0 { Err(crate::hooks::errno()) } else { Ok(result) }
}

/// Signals that have handlers and are not blocked by the program.
struct Handlers {
    /// Their calls go on.
    restart: sigset_t,
    some_restart: bool,
    some_interrupt: bool,
}

impl Handlers {
    fn of_process(blocked: &sigset_t, all_interrupt: bool) -> Self {
        let mut handlers = Self { restart: empty(), some_restart: false, some_interrupt: false };
        for signal in (1..=libc::SIGRTMAX()).filter(|signal| !SYNCHRONOUS.contains(signal)) {
            // SAFETY: the set is a value.
            if unsafe { libc::sigismember(blocked, signal) } == 1 {
                continue;
            }
            let mut action = MaybeUninit::<libc::sigaction>::uninit();
            // SAFETY: asks only; libc refuses the signals that are its own.
            if unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } != 0 {
                continue;
            }
            // SAFETY: the call has succeeded, so it is filled in.
            let action = unsafe { action.assume_init() };
            if matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
                continue;
            }
            if action.sa_flags & libc::SA_RESTART == 0 || all_interrupt {
                handlers.some_interrupt = true;
            } else {
                handlers.some_restart = true;
                // SAFETY: the set is a value, the signal exists.
                unsafe { libc::sigaddset(&mut handlers.restart, signal) };
            }
        }
        handlers
    }

    /// A descriptor that is readable while one of those waits whose calls go on. It takes none.
    fn restarting(&self) -> Answer<Option<OwnedFd>> {
        if !self.some_restart {
            return Ok(None);
        }
        // SAFETY: makes a descriptor, from a set that is a value.
        let fd = unsafe { libc::signalfd(-1, &self.restart, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        // SAFETY: it was just made, and no other code knows it.
        if fd < 0 { Err(crate::hooks::errno()) } else { Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })) }
    }
}

/// Signals by which the kernel reports an error of the code that runs: blocked, they would end the program.
const SYNCHRONOUS: [c_int; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT];

fn empty() -> sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: fills the set in.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    }
}

/// No signal comes to this thread, nor to threads it starts, while this lives.
pub(crate) struct Blocked {
    /// What the program had blocked.
    pub(crate) before: sigset_t,
}

impl Blocked {
    pub(crate) fn all() -> Self {
        let (mut all, mut before) = (empty(), empty());
        // SAFETY: the sets are values, and the signals exist.
        unsafe {
            libc::sigfillset(&mut all);
            for signal in SYNCHRONOUS {
                libc::sigdelset(&mut all, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        }
        Self { before }
    }

    /// What the program had blocked, and these.
    fn plus(&self, others: &sigset_t) -> sigset_t {
        let mut set = self.before;
        for signal in 1..=libc::SIGRTMAX() {
            // SAFETY: the sets are values; a signal that does not exist changes nothing.
            unsafe {
                if libc::sigismember(others, signal) == 1 {
                    libc::sigaddset(&mut set, signal);
                }
            }
        }
        set
    }

    /// Lets the handlers of these run, if they wait.
    fn let_through(&self, signals: &sigset_t) {
        let mut now = empty();
        // SAFETY: the sets are values. What waits is delivered before the first call returns.
        unsafe {
            libc::pthread_sigmask(libc::SIG_UNBLOCK, signals, &mut now);
            libc::pthread_sigmask(libc::SIG_SETMASK, &now, std::ptr::null_mut());
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is what the program had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}
