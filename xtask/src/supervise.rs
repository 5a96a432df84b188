//! Nothing that a task has started outlives it, however the task ends: not a peer, not a daemon that forked twice, no
//! temporary file.
//!
//! ```text
//!   outer ─── pipe ───► inner ───────► task ──► servers, clients, daemons
//!   (what was started)  (the same)     (does the work)
//! ```
//!
//! Outer and inner are child subreapers, so a process whose parent has ended becomes theirs, and each kills all that it
//! has when what it watches ends: inner when the task ends or outer does (the pipe closes), outer when inner ends. So
//! one of the three can be killed, by SIGKILL as well, and the other two or one see to the rest. Inner has a process group
//! of its own: Ctrl-C in a terminal ends outer alone.
//!
//! Temporary files of the task and of all that it starts are in one folder (TMPDIR), which outer makes, and which both
//! remove after the last process has ended.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};

use crate::process::{descendants, die_with_parent};

/// Says to a program started anew which of the three it is.
const ROLE: &str = "KSF_XTASK_ROLE";
const INNER: &str = "inner";
const TASK: &str = "task";
const FOLDER_PREFIX: &str = "xtask-";

/// Runs a task in a process of its own, as said above.
pub(crate) fn supervised(task: impl FnOnce() -> Result<()>) -> Result<ExitCode> {
    match std::env::var(ROLE).as_deref() {
        Ok(TASK) => task().map(|()| ExitCode::SUCCESS),
        Ok(INNER) => watch(&mut anew(TASK)?, &std::env::temp_dir(), true),
        _ => {
            // Peers are compiled there, and /tmp may be mounted without the right to execute.
            let place = crate::target_dir().unwrap_or_else(|_| std::env::temp_dir());
            let folder = tempfile::Builder::new().prefix(FOLDER_PREFIX).tempdir_in(&place);
            let folder = folder.with_context(|| format!("cannot make a folder in {}", place.display()))?;
            let mut inner = anew(INNER)?;
            inner.env("TMPDIR", folder.path()).process_group(0).stdin(Stdio::piped());
            watch(&mut inner, folder.path(), false)
        }
    }
}

/// This program with the same arguments, in a role.
fn anew(role: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot find the running program")?);
    command.args(std::env::args_os().skip(1)).env(ROLE, role).stdin(Stdio::null());
    Ok(command)
}

/// Runs the command to its end, and then ends all that is left, and removes the folder. With `for_parent` it ends when
/// standard input does.
fn watch(command: &mut Command, folder: &Path, for_parent: bool) -> Result<ExitCode> {
    set_child_subreaper(Some(getpid())).context("cannot become a child subreaper")?;
    if for_parent {
        die_with_parent(command, Signal::KILL); // the task; inner lives on to end what there is
    }
    // Standard input of inner stays open in this process, and in no other, until this process ends.
    let mut child = command.spawn().context("cannot start this program anew")?;
    if for_parent {
        let child = Pid::from_child(&child);
        std::thread::spawn(move || {
            let _ = std::io::stdin().read(&mut [0]);
            let _ = kill_process(child, Signal::KILL);
        });
    }
    let code = wait_for(&mut child)?;
    end_all()?;
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(code),
    }
}

/// Waits for the child, and for orphans on the way.
fn wait_for(child: &mut Child) -> Result<ExitCode> {
    loop {
        let Some((pid, status)) = wait(WaitOptions::empty()).context("cannot wait for a child")? else { continue };
        if pid == Pid::from_child(child) {
            let status = std::process::ExitStatus::from_raw(status.as_raw());
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)));
        }
    }
}

/// Kills all descendants. Those of one that is killed become children of this process, so none escapes.
fn end_all() -> Result<()> {
    loop {
        for pid in descendants(std::process::id()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        match wait(WaitOptions::empty()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CHILD) => return Ok(()),
            Err(error) => return Err(error).context("cannot wait for what was left"),
        }
    }
}
