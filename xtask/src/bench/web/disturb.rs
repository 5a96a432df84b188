//! What is done to nginx while it is loaded.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::super::measure::Effort;
use super::nginx::Nginx;
use super::servers::Web;
use crate::process::output;

/// What is done to the server again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// A reload: new workers take over from the old ones.
    Reload,
    /// A reload with one worker more or less than before.
    Resize,
    /// SIGKILL of a worker without a request in hand; connections may wait for it.
    Kill,
    /// SIGSTOP of a worker for [`STALL`].
    Stall,
}

/// How long a worker is stopped.
const STALL: Duration = Duration::from_millis(200);

/// Pauses between two disturbances. A stall takes a fifth of the time.
const PAUSE: Duration = Duration::from_millis(20);
const STALL_PAUSE: Duration = Duration::from_millis(800);

/// A tenth as many stalls as other disturbances: they take longer, and each is met by many requests.
const STALL_SHARE: u64 = 10;

const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// A worker that was stopped for a look runs this many times as long before the next look. Connections pile up in
/// front of it during a look, which lasts tens of milliseconds on a slow machine, and it can be seen without a
/// request only after it has served these.
const RUN_PER_LOOK: u32 = 4;

/// Disturbs the server so often, in a smoke run for a moment; returns how often.
pub(super) fn disturb(disturbance: Disturbance, web: &Web, count: u64, effort: Effort) -> Result<u64> {
    let nginx = web.nginx()?;
    let stall_pause = if effort.seconds > 0.0 { STALL_PAUSE } else { PAUSE };
    let count = match disturbance {
        Disturbance::Stall => count.div_ceil(STALL_SHARE),
        _ => count,
    };
    std::thread::sleep(PAUSE);
    for number in 0..count {
        match disturbance {
            Disturbance::Reload => reload(nginx, nginx.size())?,
            Disturbance::Resize => {
                ensure!(nginx.size() > 1, "a single worker cannot become fewer");
                reload(nginx, nginx.size() - usize::from(number % 2 == 0))?;
            }
            Disturbance::Kill => kill(nginx, number as usize)?,
            Disturbance::Stall => {
                let workers = nginx.workers()?;
                let stopped = Stopped::stop(workers[number as usize % workers.len()])?;
                std::thread::sleep(STALL);
                drop(stopped);
                std::thread::sleep(stall_pause);
            }
        }
        std::thread::sleep(PAUSE);
    }
    Ok(count)
}

/// Until the new workers are there and the old ones have gone.
fn reload(nginx: &Nginx, size: usize) -> Result<()> {
    let old = nginx.workers()?;
    nginx.resize(size)?;
    signal(nginx.master(), Signal::HUP)?;
    nginx.wait_for("new workers", |now| now.len() == size && now.iter().all(|pid| !old.contains(pid)))
}

/// Until the master has started another worker.
fn kill(nginx: &Nginx, number: usize) -> Result<()> {
    let workers = nginx.workers()?;
    ensure!(!workers.is_empty(), "there is no worker to kill");
    let deadline = Instant::now() + TIMEOUT;
    // A worker can have a request at every look; another one has none meanwhile.
    for victim in workers.iter().copied().cycle().skip(number % workers.len()) {
        let look = Instant::now();
        let stopped = Stopped::stop(victim)?;
        // A request that a worker has taken dies with it, however connections came to it: that says nothing.
        if client_sockets(nginx, victim)? == 0 {
            // SIGKILL ends a stopped process, too.
            signal(victim, Signal::KILL)?;
            return nginx.wait_for("another worker", |now| now.len() == workers.len() && !now.contains(&victim));
        }
        drop(stopped);
        ensure!(Instant::now() < deadline, "each worker had a request at every look");
        std::thread::sleep(RUN_PER_LOOK * look.elapsed());
    }
    unreachable!("a cycle of workers has no end")
}

/// A stopped worker; it goes on when this is dropped.
struct Stopped(u32);

impl Stopped {
    fn stop(pid: u32) -> Result<Stopped> {
        signal(pid, Signal::STOP)?;
        let stopped = Stopped(pid);
        let deadline = Instant::now() + TIMEOUT;
        while state(pid)? != 'T' {
            ensure!(Instant::now() < deadline, "process {pid} did not stop");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = signal(self.0, Signal::CONT);
    }
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).context("no process has this number")?;
    kill_process(raw, signal).with_context(|| format!("cannot send {signal:?} to {pid}"))
}

/// The letter of proc_pid_stat(5).
fn state(pid: u32) -> Result<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("{pid} has gone"))?;
    let letter = stat.rsplit_once(") ").and_then(|(_, fields)| fields.chars().next());
    letter.with_context(|| format!("no state of {pid}"))
}

/// Connections of clients that a worker has taken.
fn client_sockets(nginx: &Nginx, pid: u32) -> Result<usize> {
    // ss(8), because /proc/net/tcp has a line for each of a hundred thousand sockets in TIME_WAIT.
    let mut ss = Command::new("ss");
    ss.args(["-Htne", "state", "established", "state", "close-wait", "sport", "=", &format!(":{}", nginx.port())]);
    let connected = inodes(&output(&mut ss, TIMEOUT)?);
    let mut count = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let link = link.to_string_lossy();
        let inode = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
        count += usize::from(inode.is_some_and(|inode| connected.contains(inode)));
    }
    Ok(count)
}

/// The inodes that `ss -e` prints; a connection that waits to be accepted has none.
fn inodes(text: &str) -> BTreeSet<String> {
    let words = text.split_whitespace().filter_map(|word| word.strip_prefix("ino:"));
    words.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_are_found_in_what_ss_prints() {
        let text = "ESTAB 0 0 127.0.0.1:80 127.0.0.1:5 uid:33 ino:4711 sk:1 cgroup:/ <->\n\
                    ESTAB 74 0 127.0.0.1:80 127.0.0.1:6 sk:2 cgroup:unreachable:1 <->\n";
        assert_eq!(inodes(text), BTreeSet::from(["4711".to_owned()]));
    }

    #[test]
    fn a_stopped_process_goes_on() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stopped = Stopped::stop(child.id()).unwrap();
        assert_eq!(state(child.id()).unwrap(), 'T');
        drop(stopped);
        let deadline = Instant::now() + TIMEOUT;
        while state(child.id()).unwrap() == 'T' {
            assert!(Instant::now() < deadline, "it did not go on");
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
