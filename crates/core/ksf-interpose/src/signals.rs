//! Which signals end a call that waits.
//!
//! The kernel goes on with a call that a handler has interrupted if the handler was installed with SA_RESTART. `ppoll`
//! is never restarted, and does not tell which handler has run. So who waits in `ppoll` in place of such a call holds
//! back the signals whose handlers have the flag; a signalfd ([`Signals::watch`]) says that one of them is due.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use libc::sigset_t;

use crate::errno::errno;

/// The numbers of Linux: 1 to 64.
const NUMBERS: std::ops::RangeInclusive<c_int> = 1..=64;

/// A set of signals: the bit `1 << (number - 1)` for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals(pub u64);

impl Signals {
    /// Those of a set of libc's.
    pub fn of(set: &sigset_t) -> Self {
        // SAFETY: the set is a value.
        let is_in = |signal: &c_int| unsafe { libc::sigismember(set, *signal) } == 1;
        Self(NUMBERS.filter(is_in).fold(0, |bits, signal| bits | 1 << (signal - 1)))
    }

    /// True if there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Those, and this one: a number from 1 to 64.
    pub fn with(self, signal: c_int) -> Self {
        Self(self.0 | 1 << (signal - 1))
    }

    /// Those that are not in the other set.
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Adds them to a set of libc's.
    pub fn add_to(self, set: &mut sigset_t) {
        for signal in NUMBERS.filter(|signal| self.0 & 1 << (signal - 1) != 0) {
            // SAFETY: the set is a value; what is no signal is refused.
            unsafe { libc::sigaddset(set, signal) };
        }
    }

    /// The same as a set of libc's.
    pub fn to_set(self) -> sigset_t {
        let mut set = std::mem::MaybeUninit::uninit();
        // SAFETY: sigemptyset fills it in.
        let mut set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            set.assume_init()
        };
        self.add_to(&mut set);
        set
    }

    /// A signalfd: readable while one of them is held back. Reading from it would take the signal.
    ///
    /// # Errors
    ///
    /// The error number: no descriptor, or no memory, is left.
    pub fn watch(self) -> Result<OwnedFd, c_int> {
        // SAFETY: makes a descriptor, from a set that is a value.
        let fd = unsafe { libc::signalfd(-1, &self.to_set(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        // SAFETY: it was just made, and no other code knows it.
        if fd < 0 { Err(errno()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
    }
}

/// Signals that have handlers in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handlers {
    /// With SA_RESTART: calls go on.
    pub restarting: Signals,
    /// Without: calls end with EINTR.
    pub ending: Signals,
}

impl Handlers {
    /// Asks the kernel: a system call for each signal.
    pub fn of_process() -> Self {
        let mut handlers = Self::default();
        for signal in NUMBERS {
            // SAFETY: writes the action where it is told to; signals that are libc's own are refused.
            let action = unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                if libc::sigaction(signal, std::ptr::null(), &mut action) != 0 {
                    continue;
                }
                action
            };
            let bit = 1u64 << (signal - 1);
            match action.sa_sigaction {
                libc::SIG_DFL | libc::SIG_IGN => {}
                _ if action.sa_flags & libc::SA_RESTART != 0 => handlers.restarting.0 |= bit,
                _ => handlers.ending.0 |= bit,
            }
        }
        handlers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_the_same_as_bits_and_as_a_set() {
        let signals = Signals(1 << (libc::SIGUSR1 - 1) | 1 << 63);
        assert_eq!(Signals::of(&signals.to_set()), signals);
        assert_eq!(signals.without(Signals(1 << 63)), Signals(1 << (libc::SIGUSR1 - 1)));
        assert!(Signals::of(&Signals::default().to_set()).is_empty());
    }
}
