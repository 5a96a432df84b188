//! The service manager: sockets it passes, and what it is told (sd_listen_fds(3), sd_notify(3)).

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use ksf::threads;
use rustix::time::{ClockId, clock_gettime};
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

/// Time that the manager gives a start after the last sign of progress, beyond `TimeoutStartSec=`. As long as the disk may
/// take for one sync of a log, which takes no CPU time.
const EXTENSION: Duration = Duration::from_secs(300);
const EXTEND_EVERY: Duration = Duration::from_secs(10);
/// CPU time between two looks that counts as progress: more than the looks themselves take.
const PROGRESS_MIN: Duration = Duration::from_millis(1);

/// Asks the service manager for more time while the services start: recovery of a large log takes longer than
/// `TimeoutStartSec=`. A start that hangs uses no CPU time and gets none. Dropping it ends that.
#[derive(Debug)]
pub(crate) struct Starting {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Reports that these services start; `None` without a service manager.
pub(crate) fn starting(names: &[&str]) -> Option<Starting> {
    std::env::var_os("NOTIFY_SOCKET")?;
    let status = format!("starting {}", names.join(", "));
    let ask = || tell(&[NotifyState::ExtendTimeoutUsec(EXTENSION.as_micros() as u32)]);
    tell(&[NotifyState::Status(&status)]);
    ask();
    Some(Starting::begin(EXTEND_EVERY, cpu_time, ask))
}

impl Starting {
    /// Calls `ask` as [`extend`] does, until it is dropped.
    fn begin(
        every: Duration,
        used: impl FnMut() -> Duration + Send + 'static,
        ask: impl FnMut() + Send + 'static,
    ) -> Self {
        let (stop, stopped) = mpsc::channel();
        let work = move || extend(&stopped, every, used, ask);
        let thread = threads::start("ksf-starting", work);
        let thread = thread.inspect_err(|error| say(&format_args!("warning: cannot ask for a longer start: {error}")));
        Self { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Calls `ask` after each period in which `used` grew by [`PROGRESS_MIN`], until the sender of `stopped` is dropped.
fn extend(stopped: &Receiver<()>, every: Duration, mut used: impl FnMut() -> Duration, mut ask: impl FnMut()) {
    let mut before = used();
    while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
        let now = used();
        if now.saturating_sub(before) >= PROGRESS_MIN {
            ask();
        }
        before = now;
    }
}

/// CPU time of all threads of this process.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use ksf_test::PATIENCE;

    use super::*;

    const SHORT: Duration = Duration::from_micros(1);

    /// A recovery of several periods, of which the test decides what CPU time it has used at each look.
    #[test]
    fn start_asks_again_while_it_makes_progress_and_ends_with_it() {
        let (looked, looks) = mpsc::sync_channel(0);
        let (asks, asked) = mpsc::channel();
        let used = move || looks.recv().unwrap_or(Duration::ZERO);
        let starting = Starting::begin(SHORT, used, move || asks.send(()).expect("the test waits"));
        // Returns when the one before it was judged.
        let look = |used_us| looked.send(Duration::from_micros(used_us)).expect("it looks");
        look(0);
        for used_us in [5_000, 10_000, 15_000] {
            look(used_us);
            asked.recv_timeout(PATIENCE).expect("it asks once for each period");
        }
        // It hangs; then it does less than the looks themselves.
        [15_000, 15_000, 15_900].into_iter().for_each(look);
        // It goes on.
        look(20_000);
        asked.recv_timeout(PATIENCE).expect("it asks again");
        look(20_000);
        assert_eq!(asked.try_recv(), Err(mpsc::TryRecvError::Empty), "it asked without progress");
        drop(looked);
        // The services are ready.
        drop(starting);
        assert_eq!(asked.try_recv(), Err(mpsc::TryRecvError::Disconnected), "its thread has ended");
    }

    #[test]
    fn work_of_any_thread_is_progress() {
        let (asks, asked) = mpsc::channel();
        let (every, ask) = (Duration::from_millis(5), move || asks.send(()).expect("the test waits"));
        let starting = Starting::begin(every, cpu_time, ask);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let all = (0..3).all(|_| asked.recv_timeout(PATIENCE).is_ok());
            is_over.store(true, Ordering::Relaxed);
            assert!(all, "it asks while a thread works");
        });
        drop(starting);
    }
}
