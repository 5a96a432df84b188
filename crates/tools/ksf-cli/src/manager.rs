//! The service manager: sockets it passes, and what it is told (sd_listen_fds(3), sd_notify(3)).

use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

use sd_notify::NotifyState;

use crate::output::{Failure, Status, say};

/// A socket passed by the service manager.
#[derive(Debug)]
pub(crate) struct Passed {
    /// `FileDescriptorName=` of the socket unit, or the unit's name.
    pub(crate) name: String,
    pub(crate) socket: OwnedFd,
}

/// Takes over the passed sockets. To be called once, before any other thread starts.
pub(crate) fn passed_sockets() -> Result<Vec<Passed>, Failure> {
    // SAFETY: `main` calls this before it starts a thread, so nobody reads the environment.
    let listed = unsafe { sd_notify::listen_fds_with_names_and_unset_env() };
    let listed = listed.map_err(|error| {
        Failure::new(Status::Usage, format!("LISTEN_FDS, LISTEN_PID or LISTEN_FDNAMES is wrong: {error}"))
            .remedy("unset them, or start the server from a socket unit")
    })?;
    let passed = listed.map(|(fd, name)| Passed {
        name,
        // SAFETY: the service manager passed `fd` to this process, and the variables that name
        // it were removed, so nobody else takes it.
        socket: unsafe { OwnedFd::from_raw_fd(fd) },
    });
    Ok(passed.collect())
}

/// Tells the service manager that the server answers.
pub(crate) fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Tells that the limits are being read again; [`ready`] ends it.
pub(crate) fn reloading() {
    // RELOADING must carry the time, so that the manager knows which READY ends it.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => say(&format_args!("warning: no monotonic clock for sd_notify: {error}")),
    }
}

/// Tells that the server drains.
pub(crate) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("draining")]);
}

/// How often the manager's watchdog wants [`alive`]; `None` where no watchdog is set. Half of
/// its period, as sd_watchdog_enabled(3) recommends.
pub(crate) fn watchdog_period() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|period| (period / 2).max(Duration::from_millis(1)))
}

/// Keeps the manager's watchdog quiet.
pub(crate) fn alive() {
    tell(&[NotifyState::Watchdog]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        say(&format_args!("warning: cannot tell the service manager: {error}"));
    }
}
