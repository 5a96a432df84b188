//! Why was it not permitted? Looks at the capabilities and settings that matter.

use std::fs;

use crate::KernelError;

// linux/capability.h
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Capabilities that loading and attaching the programs need and that this process lacks. Empty: it has them all.
pub fn missing_capabilities() -> Vec<&'static str> {
    let Some(effective) = effective_capabilities() else { return Vec::new() };
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

pub(crate) fn not_permitted(action: &'static str) -> KernelError {
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
    KernelError::NotPermitted { action, cause, remedy }
}

fn effective_capabilities() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn lockdown() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    let from = text.find('[')? + 1;
    let to = text.find(']')?;
    text.get(from..to).map(str::to_owned)
}

fn in_first_user_namespace() -> bool {
    // The first namespace maps all ids onto themselves.
    let Ok(map) = fs::read_to_string("/proc/self/uid_map") else { return true };
    map.split_whitespace().eq(["0", "0", "4294967295"])
}
