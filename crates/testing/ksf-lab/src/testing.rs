//! Machines for tests: whether they can be had here, and who may run one now.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::kernel::Kernel;
use crate::tools;

/// The right of a test to run machines; others of this process wait until it is dropped.
#[derive(Debug)]
#[must_use = "the turn is over when this is dropped"]
pub struct LabTurn(#[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

/// Waits for this test's turn to run machines. None if this host cannot run them: that has been said on standard
/// error, and the test is to return, skipped visibly.
///
/// One test at a time, because an emulated processor keeps one of the host's busy: machines that share one take longer
/// together than in turn, and their clocks suffer.
///
/// # Panics
///
/// Where the environment variable `CI` is set, instead of None: there a test that nobody runs is a failure. And if the
/// kernel is there but broken.
pub fn turn() -> Option<LabTurn> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed during its turn has left nothing behind that the next one could meet.
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let error = match available() {
        Ok(()) => return Some(LabTurn(turn)),
        Err(error) if error.is_unavailable() => error,
        Err(error) => panic!("{error}"),
    };
    ksf_test::skip(error);
    None
}

/// Whether machines can be had here: the tools, and the kernel, which is fetched if it is not there yet.
pub fn available() -> Result<(), Error> {
    for (tool, package) in [("qemu-system-x86_64", "qemu-system-x86"), ("gcc", "gcc"), ("ldd", "libc-bin")] {
        tools::find(tool).ok_or_else(|| Error::MissingTool { tool: tool.into(), package })?;
    }
    Kernel::from_environment().map(drop)
}
