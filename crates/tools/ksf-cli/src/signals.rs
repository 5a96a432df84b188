//! Signals as events: SIGTERM and SIGINT stop, SIGHUP reloads, a second stop is at once.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use ksf::threads;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::output::{Failure, Status, say};

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Drain and end.
    Stop,
    /// Read the limits again.
    Reload,
}

/// The signals of this process, taken over.
#[derive(Debug)]
pub(crate) struct Events {
    receiver: Receiver<Event>,
}

impl Events {
    /// Takes over the signals. To be called before other threads start, so that no signal can
    /// end the process by its default action in between. (SIGPIPE is ignored by Rust's runtime.)
    ///
    /// SIGXFSZ has no effect: a write beyond RLIMIT_FSIZE fails (EFBIG), and that is for the client which has asked for it.
    pub(crate) fn take() -> io::Result<Self> {
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
        let (sender, receiver) = mpsc::channel();
        threads::start("ksf-signals", move || {
            let mut stopping = false;
            for signal in signals.forever() {
                let event = if signal == SIGHUP { Event::Reload } else { Event::Stop };
                if event == Event::Stop && stopping {
                    stop_at_once();
                }
                stopping |= event == Event::Stop;
                // Nobody listens any more once the server drains.
                let _ = sender.send(event);
            }
        })?;
        Ok(Events { receiver })
    }

    /// Waits for the next event; `None` if there is none within `timeout`.
    pub(crate) fn next(&self, timeout: Duration) -> Option<Event> {
        match self.receiver.recv_timeout(timeout) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            // The thread above never ends; without it the process could not be stopped.
            Err(RecvTimeoutError::Disconnected) => Some(Event::Stop),
        }
    }
}

fn stop_at_once() -> ! {
    let failure = Failure::new(Status::Os, "stopped at once by a second signal")
        .remedy("connections that were still draining were reset");
    say(&failure);
    // The kernel closes every socket and detaches every program with the process.
    std::process::exit(i32::from(failure.status as u8))
}
