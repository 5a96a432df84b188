//! Proof that nothing stays behind: eBPF programs and maps, XDP on lo, processes.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
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
/// All our programs and maps are named like this; others on the machine come and go as they like.
const NAME_PREFIX: &str = "ksf";
/// They list what is loaded, and what is attached to lo (iproute2).
const TOOLS: [&str; 2] = ["bpftool", "ip"];

/// What servers of the kernel engine have in the kernel while they run. Other servers with such objects may come and
/// go beside them.
#[derive(Debug)]
pub(crate) enum Watch {
    /// Nothing can be listed.
    Blind {
        /// The reason.
        why: String,
        /// Whether a server of the kernel engine ran, so that there was something to list.
        kernel_ran: bool,
    },
    /// "prog 12 ksf_verdict" and the like, of all servers so far; `None`: no server of the kernel engine ran.
    Sees { ours: Option<BTreeSet<String>> },
}

impl Watch {
    pub(crate) fn new() -> Watch {
        let missing = missing_tools(&env::var_os("PATH").unwrap_or_default());
        if !rustix::process::geteuid().is_root() {
            Watch::Blind { why: "only root may list it".into(), kernel_ran: false }
        } else if !missing.is_empty() {
            let why = format!("{} is missing; run scripts/setup.sh", missing.join(", "));
            Watch::Blind { why, kernel_ran: false }
        } else {
            Watch::Sees { ours: None }
        }
    }

    /// What is there before a server of the kernel engine starts, to be given to [`Watch::note`].
    pub(crate) fn before(&self) -> Result<BTreeSet<String>> {
        match self {
            Watch::Blind { .. } => Ok(BTreeSet::new()),
            Watch::Sees { .. } => objects(),
        }
    }

    /// Takes what appeared since `before` for the server's, which runs.
    pub(crate) fn note(&mut self, before: &BTreeSet<String>) -> Result<()> {
        match self {
            Watch::Blind { kernel_ran, .. } => *kernel_ran = true,
            Watch::Sees { ours } => ours.get_or_insert_default().extend(objects()?.difference(before).cloned()),
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

fn both(ours: &BTreeSet<String>, now: &BTreeSet<String>) -> Vec<String> {
    ours.intersection(now).cloned().collect()
}

/// The tools that are in none of these folders.
fn missing_tools(path: &OsStr) -> Vec<&'static str> {
    let is_there = |tool: &str| env::split_paths(path).any(|folder| folder.join(tool).is_file());
    TOOLS.into_iter().filter(|tool| !is_there(tool)).collect()
}

/// All programs and maps of servers of ours that there are now, and the XDP program on lo.
fn objects() -> Result<BTreeSet<String>> {
    let mut objects = BTreeSet::new();
    for kind in ["prog", "map"] {
        let listed = json(Command::new("bpftool").args(["-j", kind, "show"]))?;
        objects.extend(named_objects(kind, &listed));
    }
    let links = json(Command::new("ip").args(["-j", "link", "show", "lo"]))?;
    objects.extend(xdp_on(&links).map(|program| format!("XDP on lo: {program}")));
    Ok(objects)
}

fn json(command: &mut Command) -> Result<Value> {
    let text = output(command, TOOL_TIMEOUT)?;
    serde_json::from_str(&text).with_context(|| format!("{command:?} did not print JSON"))
}

fn named_objects(kind: &str, listed: &Value) -> Vec<String> {
    let objects = listed.as_array().map(Vec::as_slice).unwrap_or_default();
    objects
        .iter()
        .filter_map(|object| {
            let name = object["name"].as_str()?;
            name.starts_with(NAME_PREFIX).then(|| format!("{kind} {} {name}", object["id"]))
        })
        .collect()
}

fn xdp_on(links: &Value) -> Option<String> {
    let xdp = &links[0]["xdp"];
    (!xdp.is_null()).then(|| xdp["prog"].to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_our_objects_count() {
        let listed = json!([
            { "id": 3, "type": "sk_skb", "name": "ksf_verdict" },
            { "id": 4, "type": "xdp", "name": "somebody" },
            { "id": 5, "type": "xdp" },
        ]);
        assert_eq!(named_objects("prog", &listed), ["prog 3 ksf_verdict"]);
        assert!(named_objects("prog", &json!({ "error": "no" })).is_empty());
    }

    #[test]
    fn xdp_is_seen_on_the_link() {
        let with = json!([{ "ifname": "lo", "xdp": { "mode": 2, "prog": { "id": 9 } } }]);
        assert_eq!(xdp_on(&with).unwrap(), r#"{"id":9}"#);
        assert_eq!(xdp_on(&json!([{ "ifname": "lo" }])), None);
    }

    fn set(objects: &[&str]) -> BTreeSet<String> {
        objects.iter().map(|object| (*object).to_owned()).collect()
    }

    #[test]
    fn only_what_appeared_while_a_server_ran_is_left_behind() {
        let ours = set(&["map 8 ksf_stats", "XDP on lo: 9"]);
        assert!(both(&ours, &set(&["prog 3 ksf_verdict", "map 12 ksf_stats"])).is_empty());
        assert_eq!(both(&ours, &set(&["prog 3 ksf_verdict", "map 8 ksf_stats"])), ["map 8 ksf_stats"]);
    }

    #[test]
    fn a_kernel_engine_that_was_not_seen_is_an_error() {
        assert!(Watch::Sees { ours: Some(BTreeSet::new()) }.check(&[]).is_err());
    }

    #[test]
    fn missing_tools_are_named_and_are_no_failure() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(missing_tools(folder.path().as_os_str()), TOOLS);
        std::fs::write(folder.path().join("ip"), "").unwrap();
        assert_eq!(missing_tools(folder.path().as_os_str()), ["bpftool"]);
        let mut watch = Watch::Blind { why: "bpftool is missing".into(), kernel_ran: false };
        assert_eq!(watch.check(&[]).unwrap(), "left behind: nothing (no process; no kernel engine ran)");
        let before = watch.before().unwrap();
        watch.note(&before).unwrap();
        assert_eq!(watch.check(&[]).unwrap(), "left behind: no process; eBPF was not looked at: bpftool is missing");
    }

    #[test]
    fn a_running_process_is_left_behind() {
        let watch = Watch::Sees { ours: None };
        assert!(watch.check(&[std::process::id()]).is_err());
        assert!(watch.check(&[]).unwrap().contains("no kernel engine ran"));
    }
}
