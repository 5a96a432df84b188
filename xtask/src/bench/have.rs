//! What of the peers and rights is here.

use super::case::Case;
use super::contestant::{Contestant, ROOT};
use super::measure::SyscallCounter;
use super::{vm, watch};

/// What of the peers and rights is here, or why not.
pub(super) struct Have {
    strace: Result<(), String>,
    perf: Result<(), String>,
    pub(super) vm: Result<(), String>,
}

impl Have {
    pub(super) fn look() -> Have {
        Have { strace: look_for("strace"), perf: watch::look_for_perf(), vm: vm::look() }
    }

    /// What counts system calls: perf, or where it may not, strace.
    pub(super) fn counter(&self) -> Result<SyscallCounter, String> {
        match (&self.perf, &self.strace) {
            (Ok(()), _) => Ok(SyscallCounter::Perf),
            (_, Ok(())) => Ok(SyscallCounter::Strace),
            (Err(perf), Err(strace)) => Err(format!("{perf}; {strace}")),
        }
    }

    pub(super) fn case(&self, case: &Case) -> Result<(), String> {
        case.needs().iter().try_for_each(|needed| look_for(needed))
    }

    pub(super) fn contestant(&self, contestant: Contestant) -> Result<(), String> {
        contestant.needs().iter().try_for_each(|needed| look_for(needed))
    }
}

fn look_for(needed: &str) -> Result<(), String> {
    if needed == ROOT {
        return if rustix::process::geteuid().is_root() { Ok(()) } else { Err("needs root".into()) };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&path).any(|dir| dir.join(needed).is_file()) {
        true => Ok(()),
        false => Err(format!("{needed} is not installed; run: scripts/setup.sh bench")),
    }
}
