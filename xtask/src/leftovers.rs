//! Proof that nothing stays behind: eBPF programs and maps, XDP on lo, processes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::process::output;

const TOOL_TIMEOUT: Duration = Duration::from_secs(20);
/// The kernel frees programs and maps some moments after their last user is gone (RCU, work queue).
const FREE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// All our programs and maps are named like this; others on the machine come and go as they like.
const NAME_PREFIX: &str = "ksf";

/// What was there at one moment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Snapshot {
    /// "prog 12 ksf_verdict" and the like.
    objects: BTreeSet<String>,
    /// The XDP program on lo, as `ip -j link` shows it.
    xdp: Option<String>,
}

impl Snapshot {
    /// Looks; None without root, where nothing can be loaded nor listed.
    pub(crate) fn take() -> Result<Option<Snapshot>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let mut objects = BTreeSet::new();
        for kind in ["prog", "map"] {
            let listed = json(Command::new("bpftool").args(["-j", kind, "show"]))?;
            objects.extend(named_objects(kind, &listed));
        }
        let links = json(Command::new("ip").args(["-j", "link", "show", "lo"]))?;
        Ok(Some(Snapshot { objects, xdp: xdp_on(&links) }))
    }

    /// Whether there are objects of ours that were not there `before`.
    pub(crate) fn has_new(&self, before: &Snapshot) -> bool {
        self.objects.difference(&before.objects).next().is_some()
    }

    /// What is here and was not there `before`, in words.
    fn added_since(&self, before: &Snapshot) -> Vec<String> {
        let mut added: Vec<String> = self.objects.difference(&before.objects).cloned().collect();
        if self.xdp != before.xdp {
            added.extend(self.xdp.as_ref().map(|program| format!("XDP on lo: {program}")));
        }
        added
    }
}

/// Fails, naming them, if things are still there that were not there `before`, or if one of the
/// processes runs.
pub(crate) fn check(before: Option<&Snapshot>, pids: &[u32]) -> Result<()> {
    let running: Vec<_> = pids.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).collect();
    if !running.is_empty() {
        bail!("processes left behind: {running:?}");
    }
    let Some(before) = before else { return Ok(()) };
    let deadline = Instant::now() + FREE_TIMEOUT;
    loop {
        let now = Snapshot::take()?.context("root rights were lost")?;
        let added = now.added_since(before);
        if added.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("left behind: {}", added.join(", "));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn json(command: &mut Command) -> Result<Value> {
    let text = output(command, TOOL_TIMEOUT)
        .context("bpftool and ip (iproute2) are needed to see what is loaded; run scripts/setup.sh")?;
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

    fn snapshot(objects: &[&str], xdp: Option<&str>) -> Snapshot {
        Snapshot { objects: objects.iter().map(|name| (*name).to_owned()).collect(), xdp: xdp.map(str::to_owned) }
    }

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

    #[test]
    fn what_was_there_before_is_not_left_behind() {
        let before = snapshot(&["prog 3 ksf_verdict"], None);
        assert!(snapshot(&["prog 3 ksf_verdict"], None).added_since(&before).is_empty());
        assert!(snapshot(&[], None).added_since(&before).is_empty());
        let after = snapshot(&["prog 3 ksf_verdict", "map 8 ksf_stats"], Some("9"));
        assert_eq!(after.added_since(&before), ["map 8 ksf_stats", "XDP on lo: 9"]);
        assert!(after.has_new(&before));
    }

    #[test]
    fn a_running_process_is_left_behind() {
        assert!(check(None, &[std::process::id()]).is_err());
        assert!(check(None, &[]).is_ok());
    }
}
