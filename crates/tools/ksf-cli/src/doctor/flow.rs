//! What the kernel does by itself today of what Fastsocket patched in, and what `ksf accel flow` needs. The crate
//! `ksf_accel::flow` looks.

use ksf_accel::flow::report::{self, Check, CheckResult};

use super::machine::Machine;
use super::verdict::{Lack, Probe, Verdict};
use crate::output::one_line;

/// The probes, in the order of [`report::CHECKS`].
pub(crate) const PROBES: &[Probe] = &[
    probe(report::PORT_RANGE, |_| look(report::PORT_RANGE)),
    probe(report::CPUMAP, |_| look(report::CPUMAP)),
    probe(report::CGROUP_CONNECT, |_| look(report::CGROUP_CONNECT)),
    probe(report::EARLY_DEMUX, |_| look(report::EARLY_DEMUX)),
    probe(report::SKB_CACHE, |_| look(report::SKB_CACHE)),
    probe(report::DEFERRED_FREE, |_| look(report::DEFERRED_FREE)),
    probe(report::FAST_VFS, |_| look(report::FAST_VFS)),
];

const fn probe(check: Check, run: fn(&Machine) -> Verdict) -> Probe {
    Probe { name: check.name, title: check.title, fallback: check.fallback, run }
}

fn look(check: Check) -> Verdict {
    match (check.run)() {
        CheckResult::Works(detail) => Verdict::works(detail),
        CheckResult::Unknown(reason) => Verdict::unknown(reason),
        CheckResult::Fails { cause, errno, remedy } => Verdict::Fails(Lack { cause: one_line(&cause), errno, remedy }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_is_a_probe() {
        let probes: Vec<&str> = PROBES.iter().map(|probe| probe.name).collect();
        let checks: Vec<&str> = report::CHECKS.iter().map(|check| check.name).collect();
        assert_eq!(probes, checks);
    }
}
