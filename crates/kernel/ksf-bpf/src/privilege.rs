//! Why was it not permitted? Looks at the capabilities and settings that matter.

use std::fmt;
use std::fs;
use std::io;

// linux/capability.h
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Capabilities that loading and attaching the programs need and that this process lacks. Empty: it has them all.
pub fn missing_capabilities() -> Vec<&'static str> {
    effective_capabilities().map(missing_of).unwrap_or_default()
}

/// Those missing of a set.
fn missing_of(effective: u64) -> Vec<&'static str> {
    let has = |capability: u32| effective & (1 << capability) != 0;
    // CAP_SYS_ADMIN stands in for CAP_BPF and CAP_PERFMON (kernel/bpf/syscall.c).
    let wanted =
        [("CAP_BPF", CAP_BPF, true), ("CAP_PERFMON", CAP_PERFMON, true), ("CAP_NET_ADMIN", CAP_NET_ADMIN, false)];
    wanted
        .iter()
        .filter(|(_, bit, admin_will_do)| !(has(*bit) || *admin_will_do && has(CAP_SYS_ADMIN)))
        .map(|(name, ..)| *name)
        .collect()
}

/// Whether an error says that something is not permitted: a right is missing, and the answer is a [`Denial`].
pub fn is_denial(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES))
}

/// Why programs may not be loaded or attached, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// What forbids it, as looked up.
    pub cause: String,
    /// What to do, as a sentence without its full stop.
    pub remedy: String,
}

impl Denial {
    /// Looks for the reason. To be asked when something was refused: where nothing is, there is none.
    pub fn look() -> Self {
        let missing = missing_capabilities();
        let (cause, remedy) = if !missing.is_empty() {
            let missing = missing.join(", ");
            let cause = format!("the process lacks {missing}");
            (cause, format!("Run it as root, or grant {missing} (systemd: AmbientCapabilities=)"))
        } else if let Some(level) = lockdown().filter(|level| level == "confidentiality") {
            let cause = format!("kernel lockdown is at '{level}', which forbids BPF to read kernel memory");
            (cause, "Boot with lockdown=integrity or none".into())
        } else if !in_first_user_namespace() {
            let cause = "the process is in a user namespace, where BPF capabilities do not count".into();
            (cause, "Run it in the initial user namespace".into())
        } else {
            let cause = "the capabilities are there, so a security module or a seccomp filter said no".into();
            (cause, "Look at the audit log and at the seccomp profile of the container".into())
        };
        Self { cause, remedy }
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. {}", self.cause, self.remedy)
    }
}

fn effective_capabilities() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn lockdown() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    chosen(&text).map(str::to_owned)
}

/// The word in brackets: the choice among several, as files of securityfs show it.
fn chosen(text: &str) -> Option<&str> {
    let (_, behind) = text.split_once('[')?;
    behind.split_once(']').map(|(word, _)| word)
}

fn in_first_user_namespace() -> bool {
    // The first namespace maps all ids onto themselves.
    let Ok(map) = fs::read_to_string("/proc/self/uid_map") else { return true };
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sys_admin_stands_in_for_all_but_net_admin() {
        let set = |capabilities: &[u32]| capabilities.iter().fold(0, |set, capability| set | 1u64 << capability);
        assert_eq!(missing_of(0), ["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"]);
        assert_eq!(missing_of(set(&[CAP_SYS_ADMIN])), ["CAP_NET_ADMIN"]);
        assert_eq!(missing_of(set(&[CAP_BPF, CAP_NET_ADMIN])), ["CAP_PERFMON"]);
        assert!(missing_of(set(&[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN])).is_empty());
        assert!(missing_of(u64::MAX).is_empty());
    }

    #[test]
    fn the_chosen_word_is_in_brackets() {
        assert_eq!(chosen("none [integrity] confidentiality\n"), Some("integrity"));
        assert_eq!(chosen("none integrity\n"), None);
    }

    #[test]
    fn refusals_are_told_from_other_errors_and_explained() {
        let of = |errno| is_denial(&io::Error::from_raw_os_error(errno));
        assert!(of(libc::EPERM) && of(libc::EACCES) && !of(libc::ENOENT));
        let denial = Denial::look();
        assert!(!denial.cause.is_empty() && !denial.remedy.is_empty() && !denial.remedy.ends_with('.'), "{denial:?}");
        assert_eq!(denial.to_string(), format!("{}. {}", denial.cause, denial.remedy));
    }
}
