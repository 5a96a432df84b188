//! Waiting for what another thread, another process or the kernel does.

use std::thread;
use std::time::{Duration, Instant};

/// Far more than anything takes on a loaded machine: a guard against hanging, not a measure.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Looks again and again until `done`.
///
/// # Panics
/// If that is not so within [`PATIENCE`]; `what` was waited for.
#[track_caller]
pub fn wait_until(what: impl std::fmt::Display, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    for looks in 0u32.. {
        if done() {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "never happened: {what}");
        if looks < 100 {
            thread::yield_now();
        } else {
            // Leaves the CPU to what is waited for.
            thread::sleep(Duration::from_millis(1));
        }
    }
}
