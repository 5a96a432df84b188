//! Proof that nothing stays behind: processes, and the eBPF programs and maps that they had, attached to lo or not.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::process::output;

const TOOL_TIMEOUT: Duration = Duration::from_secs(20);
/// The kernel frees programs and maps some moments after their last user is gone (RCU, work queue).
const FREE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Lists what is loaded.
const TOOL: &str = "bpftool";

/// What servers of the kernel engine have in the kernel while they run: by the descriptors of the processes, so
/// that other servers with such objects may come and go beside them.
#[derive(Debug)]
pub(crate) enum Watch {
    /// Nothing can be listed.
    Blind {
        /// The reason.
        why: String,
        /// Whether a server of the kernel engine ran, so that there was something to list.
        kernel_ran: bool,
    },
    /// Of all servers so far; `None`: no server of the kernel engine ran.
    Sees { ours: Option<BTreeSet<Object>> },
}

/// A program or a map: "prog" or "map", and its number, which the kernel does not use again.
type Object = (&'static str, u64);

impl Watch {
    pub(crate) fn new() -> Watch {
        if !rustix::process::geteuid().is_root() {
            Watch::Blind { why: "only root may list it".into(), kernel_ran: false }
        } else if !is_in(&env::var_os("PATH").unwrap_or_default()) {
            Watch::Blind { why: format!("{TOOL} is missing; run scripts/setup.sh"), kernel_ran: false }
        } else {
            Watch::Sees { ours: None }
        }
    }

    /// Takes down what the server has, which runs.
    pub(crate) fn note(&mut self, pid: u32) -> Result<()> {
        match self {
            Watch::Blind { kernel_ran, .. } => *kernel_ran = true,
            Watch::Sees { ours } => {
                let held = held_by(pid)?;
                let maps = maps_of(&held, &listed("prog")?);
                ours.get_or_insert_default().extend(held.into_iter().chain(maps));
            }
        }
        Ok(())
    }

    /// What the check has found, in a sentence.
    ///
    /// # Errors
    ///
    /// Names what is still there after the servers have ended: one of the processes, or an object of theirs.
    pub(crate) fn check(&self, pids: &[u32]) -> Result<String> {
        let running: Vec<_> = pids.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).collect();
        if !running.is_empty() {
            bail!("processes left behind: {running:?}");
        }
        let ours = match self {
            Watch::Sees { ours: None } | Watch::Blind { kernel_ran: false, .. } => {
                return Ok("left behind: nothing (no process; no kernel engine ran)".into());
            }
            Watch::Blind { why, .. } => {
                return Ok(format!("left behind: no process; eBPF was not looked at: {why}"));
            }
            Watch::Sees { ours: Some(ours) } => ours,
        };
        // Else the check would pass because it looks for the wrong names.
        ensure!(!ours.is_empty(), "the check for leftovers did not see the running kernel engine");
        let deadline = Instant::now() + FREE_TIMEOUT;
        loop {
            let left = both(ours, &objects()?);
            if left.is_empty() {
                return Ok("left behind: nothing (no process, no eBPF program or map, no XDP on lo)".into());
            }
            if Instant::now() >= deadline {
                bail!("left behind: {}", left.join(", "));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Those of `ours` that are still there, with their names. A program that is attached is there.
fn both(ours: &BTreeSet<Object>, now: &BTreeMap<Object, String>) -> Vec<String> {
    let named = |object: &Object| now.get(object).map(|name| format!("{} {} {name}", object.0, object.1));
    ours.iter().filter_map(named).collect()
}

fn is_in(path: &OsStr) -> bool {
    env::split_paths(path).any(|folder| folder.join(TOOL).is_file())
}

/// All programs and maps that there are now, and their names.
fn objects() -> Result<BTreeMap<Object, String>> {
    Ok(named("prog", &listed("prog")?).chain(named("map", &listed("map")?)).collect())
}

fn listed(kind: &str) -> Result<Value> {
    let command = &mut Command::new(TOOL);
    let text = output(command.args(["-j", kind, "show"]), TOOL_TIMEOUT)?;
    serde_json::from_str(&text).with_context(|| format!("{command:?} did not print JSON"))
}

fn named(kind: &'static str, listed: &Value) -> impl Iterator<Item = (Object, String)> {
    let objects = listed.as_array().map(Vec::as_slice).unwrap_or_default();
    let name = |object: &Value| object["name"].as_str().unwrap_or_default().to_owned();
    objects.iter().filter_map(move |object| Some(((kind, object["id"].as_u64()?), name(object))))
}

/// Programs and maps that the process has open: `/proc/PID/fdinfo` has their numbers (Linux 4.13).
fn held_by(pid: u32) -> Result<BTreeSet<Object>> {
    let folder = format!("/proc/{pid}/fdinfo");
    let mut held = BTreeSet::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("listing {folder}"))? {
        // A descriptor that was closed meanwhile is no fault.
        held.extend(numbers(&fs::read_to_string(entry?.path()).unwrap_or_default()));
    }
    Ok(held)
}

fn numbers(info: &str) -> impl Iterator<Item = Object> {
    info.lines().filter_map(|line| {
        let (key, number) = line.split_once(':')?;
        let kind = match key {
            "prog_id" => "prog",
            "map_id" => "map",
            _ => return None,
        };
        Some((kind, number.trim().parse().ok()?))
    })
}

/// The maps of these programs, which the process may have closed.
fn maps_of(ours: &BTreeSet<Object>, programs: &Value) -> Vec<Object> {
    let programs = programs.as_array().map(Vec::as_slice).unwrap_or_default();
    let is_ours = |program: &&Value| program["id"].as_u64().is_some_and(|id| ours.contains(&("prog", id)));
    let maps = programs.iter().filter(is_ours).filter_map(|program| program["map_ids"].as_array()).flatten();
    maps.filter_map(Value::as_u64).map(|id| ("map", id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_what_the_server_had_is_left_behind() {
        let info = "pos:\t0\nflags:\t02000002\nprog_type:\t6\nprog_id:\t3\n";
        let mut ours: BTreeSet<_> = numbers(info).chain(numbers("map_type:\t1\nmap_id:\t8\n")).collect();
        assert_eq!(ours, BTreeSet::from([("map", 8), ("prog", 3)]));

        let programs = json!([{ "id": 3, "name": "ksf_verdict", "map_ids": [8, 9] }, { "id": 4, "map_ids": [12] }]);
        ours.extend(maps_of(&ours, &programs));
        let now = |maps: &Value| named("map", maps).collect();
        let theirs = json!([{ "id": 12, "name": "ksf_stats" }, { "id": 3 }]);
        assert!(both(&ours, &now(&theirs)).is_empty());
        let both = both(&ours, &now(&json!([{ "id": 12 }, { "id": 9, "name": "ksf_slots" }, { "id": 8 }])));
        assert_eq!(both, ["map 8 ", "map 9 ksf_slots"]);
        assert_eq!(named("prog", &programs).count(), 2);
        assert_eq!(named("prog", &json!({ "error": "no" })).count(), 0);
    }

    #[test]
    fn a_kernel_engine_that_was_not_seen_is_an_error() {
        assert!(Watch::Sees { ours: Some(BTreeSet::new()) }.check(&[]).is_err());
    }

    #[test]
    fn a_missing_tool_is_named_and_is_no_failure() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_in(folder.path().as_os_str()));
        std::fs::write(folder.path().join(TOOL), "").unwrap();
        assert!(is_in(folder.path().as_os_str()));
        let mut watch = Watch::Blind { why: "bpftool is missing".into(), kernel_ran: false };
        assert_eq!(watch.check(&[]).unwrap(), "left behind: nothing (no process; no kernel engine ran)");
        watch.note(std::process::id()).unwrap();
        assert_eq!(watch.check(&[]).unwrap(), "left behind: no process; eBPF was not looked at: bpftool is missing");
    }

    #[test]
    fn a_running_process_is_left_behind() {
        let watch = Watch::Sees { ours: None };
        assert!(watch.check(&[std::process::id()]).is_err());
        assert!(watch.check(&[]).unwrap().contains("no kernel engine ran"));
    }
}
