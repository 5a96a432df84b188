//! `ksf doctor`: what works on this machine, what does not, why, and how to get it.
//!
//! Every feature is tried; versions are not compared. A probe has three outcomes: it works, it
//! does not (with the looked-up cause, what ksf does instead, and a remedy), or the attempt says
//! nothing. The JSON form is described in docs/formats/doctor-json.md.

mod bpf;
mod flow;
mod kcm;
mod machine;
mod net;
mod nic;
mod system;
mod uring;
mod verdict;

use std::fmt::Write as _;

use clap::Args;
use ksf_kernel::KernelError;
use serde::Serialize;

use crate::output::{Failure, Status};

pub(crate) use machine::Machine;
pub(crate) use verdict::{Lack, Probe, Verdict};

/// Schema name of the JSON form; the number goes up when a field changes its meaning or goes.
pub(crate) const SCHEMA: &str = "ksf-doctor/1";

/// Probes in groups, in the order in which they are tried and shown.
const AREAS: &[(&str, &[Probe])] = &[
    ("io_uring", uring::PROBES),
    ("eBPF", bpf::PROBES),
    ("sockets", net::PROBES),
    ("flows", flow::PROBES),
    ("interfaces", nic::PROBES),
    ("AF_KCM", kcm::PROBES),
    ("system", system::PROBES),
];

/// Probes an engine cannot do without. `epoll` needs none.
const URING_NEEDS: &[&str] = &["uring_setup", "uring_defer_taskrun", "uring_buffer_ring"];
const KERNEL_NEEDS: &[&str] = &[
    "cap_bpf",
    "cap_net_admin",
    "cap_perfmon",
    "bpf_syscall",
    "bpf_btf",
    "bpf_sk_skb",
    "bpf_sockmap",
    "bpf_sk_storage",
    "bpf_mmap_array",
    "bpf_self_test",
];
const XDP_NEEDS: &[&str] = &["cap_bpf", "cap_net_admin", "bpf_syscall", "xdp_generic"];

/// Try each kernel feature; say what works, what falls back, why, and how to get it
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// One JSON document instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Everything `ksf doctor` found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: &'static str,
    ksf: &'static str,
    kernel: String,
    architecture: String,
    uid: u32,
    engines: Vec<EngineReport>,
    probes: Vec<ProbeReport>,
}

/// Whether an engine can run here.
#[derive(Debug, Serialize)]
pub(crate) struct EngineReport {
    name: &'static str,
    usable: bool,
    reason: String,
    remedy: Option<String>,
}

/// One probe with its outcome.
#[derive(Debug, Serialize)]
pub(crate) struct ProbeReport {
    name: &'static str,
    area: &'static str,
    title: &'static str,
    outcome: &'static str,
    detail: String,
    errno: Option<i32>,
    fallback: Option<&'static str>,
    remedy: Option<String>,
}

/// Tries everything.
pub(crate) fn examine() -> Report {
    let machine = Machine::look();
    let mut probes = Vec::new();
    for (area, table) in AREAS {
        for probe in *table {
            probes.push(ProbeReport::new(area, probe, (probe.run)(&machine)));
        }
    }
    Report {
        schema: SCHEMA,
        ksf: env!("CARGO_PKG_VERSION"),
        kernel: machine.kernel,
        architecture: machine.architecture,
        uid: machine.uid,
        engines: vec![
            EngineReport::new("kernel", KERNEL_NEEDS, &probes),
            EngineReport::new("uring", URING_NEEDS, &probes),
            EngineReport::new("epoll", &[], &probes),
            EngineReport::new("xdp", XDP_NEEDS, &probes),
        ],
        probes,
    }
}

/// Why an engine cannot run, in words for the line a server prints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Obstacle {
    pub(crate) cause: String,
    pub(crate) remedy: String,
    /// Whether the cause is a missing right.
    pub(crate) rights: bool,
}

impl Obstacle {
    fn new(lack: Lack) -> Self {
        let rights = matches!(lack.errno, Some(libc::EPERM | libc::EACCES));
        Obstacle { cause: lack.cause, remedy: lack.remedy, rights }
    }

    /// The error of a wish that it stands in the way of.
    pub(crate) fn failure(&self, what: impl Into<String>) -> Failure {
        let status = if self.rights { Status::NoPermission } else { Status::Unavailable };
        Failure::new(status, what).remedy(self.remedy.as_str())
    }
}

/// Explains why the kernel half of a service does not run.
pub(crate) fn kernel_half_obstacle(error: &KernelError) -> Obstacle {
    Obstacle::new(bpf::why_kernel(&Machine::look(), error))
}

/// The first obstacle to the engine `uring`; takes a few milliseconds.
pub(crate) fn uring_obstacle() -> Option<Obstacle> {
    obstacle(URING_NEEDS)
}

/// The first obstacle to the engine `kernel`.
pub(crate) fn kernel_obstacle() -> Option<Obstacle> {
    obstacle(KERNEL_NEEDS)
}

fn obstacle(needs: &[&str]) -> Option<Obstacle> {
    let machine = Machine::look();
    needs.iter().find_map(|name| {
        let probe = find(name)?;
        match (probe.run)(&machine) {
            Verdict::Fails(lack) => {
                let obstacle = Obstacle::new(lack);
                Some(Obstacle { rights: obstacle.rights || name.starts_with("cap_"), ..obstacle })
            }
            // Could not tell: let the engine try.
            Verdict::Works(_) | Verdict::Unknown(_) => None,
        }
    })
}

fn find(name: &str) -> Option<&'static Probe> {
    AREAS.iter().flat_map(|(_, table)| table.iter()).find(|probe| probe.name == name)
}

impl ProbeReport {
    fn new(area: &'static str, probe: &Probe, verdict: Verdict) -> Self {
        let outcome = verdict.word();
        let (detail, errno, remedy) = match verdict {
            Verdict::Works(detail) | Verdict::Unknown(detail) => (detail, None, None),
            Verdict::Fails(lack) => (lack.cause, lack.errno, Some(lack.remedy)),
        };
        ProbeReport {
            name: probe.name,
            area,
            title: probe.title,
            outcome,
            detail,
            errno,
            fallback: (outcome != "works").then_some(probe.fallback),
            remedy,
        }
    }
}

impl EngineReport {
    fn new(name: &'static str, needs: &[&str], probes: &[ProbeReport]) -> Self {
        let needed =
            |outcome: &str| probes.iter().find(|probe| needs.contains(&probe.name) && probe.outcome == outcome);
        if let Some(probe) = needed("fails") {
            return EngineReport {
                name,
                usable: false,
                reason: format!("{}: {}", probe.name, probe.detail),
                remedy: probe.remedy.clone(),
            };
        }
        let reason = match needed("unknown") {
            Some(probe) => format!("probably; {} could not be tried: {}", probe.name, probe.detail),
            None => "everything it needs works".to_owned(),
        };
        EngineReport { name, usable: true, reason, remedy: None }
    }
}

impl Report {
    /// The report for people.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let user = if self.uid == 0 { "root" } else { "not root" };
        let _ = writeln!(
            out,
            "ksf {} on Linux {} {}, as uid {} ({user})",
            self.ksf, self.kernel, self.architecture, self.uid
        );
        let _ = writeln!(out, "\nengines");
        for engine in &self.engines {
            let word = if engine.usable { "yes" } else { "no" };
            let _ = writeln!(out, "  {:<7} {word:<4} {}", engine.name, engine.reason);
            if let Some(remedy) = &engine.remedy {
                let _ = writeln!(out, "               get it: {remedy}");
            }
        }
        let mut area = "";
        for probe in &self.probes {
            if probe.area != area {
                area = probe.area;
                let _ = writeln!(out, "\n{area}");
            }
            let mark = match probe.outcome {
                "works" => "ok  ",
                "fails" => "no  ",
                _ => "?   ",
            };
            let _ = writeln!(out, "  {mark}{:<24} {}", probe.name, probe.title);
            let _ = writeln!(out, "      {}", probe.detail);
            if let Some(fallback) = probe.fallback {
                let _ = writeln!(out, "      instead: {fallback}");
            }
            if let Some(remedy) = &probe.remedy {
                let _ = writeln!(out, "      get it:  {remedy}");
            }
        }
        out
    }
}

/// Names of all probes.
#[cfg(test)]
fn names() -> Vec<&'static str> {
    AREAS.iter().flat_map(|(_, table)| table.iter().map(|probe| probe.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_need_is_a_probe() {
        let mut all = names();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        for need in URING_NEEDS.iter().chain(KERNEL_NEEDS).chain(XDP_NEEDS) {
            assert!(find(need).is_some(), "{need}");
        }
    }

    fn probe(name: &'static str, outcome: &'static str) -> ProbeReport {
        ProbeReport {
            name,
            area: "",
            title: "",
            outcome,
            detail: "because".into(),
            errno: None,
            fallback: None,
            remedy: Some("do it".into()),
        }
    }

    #[test]
    fn an_engine_is_usable_unless_a_need_fails() {
        let probes = [probe("a", "works"), probe("b", "unknown"), probe("c", "fails")];
        let engine = EngineReport::new("x", &["a"], &probes);
        assert!(engine.usable && engine.remedy.is_none());
        let engine = EngineReport::new("x", &["a", "b"], &probes);
        assert!(engine.usable && engine.reason.contains("could not be tried"));
        let engine = EngineReport::new("x", &["b", "c"], &probes);
        assert!(!engine.usable);
        assert_eq!(engine.reason, "c: because");
        assert_eq!(engine.remedy.as_deref(), Some("do it"));
    }

    #[test]
    fn what_fails_says_what_happens_instead() {
        let failing = Probe { name: "x_y", title: "t", fallback: "f", run: |_| Verdict::fails("cause", "remedy") };
        let report = ProbeReport::new("area", &failing, (failing.run)(&Machine::default()));
        assert_eq!(report.outcome, "fails");
        assert_eq!(report.fallback, Some("f"));
        assert_eq!(report.remedy.as_deref(), Some("remedy"));
    }
}
