//! The goals of the rows, as ratios within one run, and whether they were met.

use super::case::{CASES, Metric, Placement, Row, Service, WorkLoad};
use super::contestant::Contestant::{
    self, Ab, Accel, AccelHaproxyShards, AccelOff, Demo, IdealQueue, Kernel, KernelWorkers4, NginxExclusive,
    NginxReuseport, Threads, UdpMmsg, UdpPlain, Uring, WorkLoops, Workers2, Workers4, Wrk,
};
use super::raw::Raw;

/// What a figure is compared with.
#[derive(Clone, Copy, Debug)]
enum Against {
    /// The best of these peers in the same case and placement.
    Best(&'static [Contestant]),
    /// Nothing: the figure itself has a bound.
    Absolute,
    /// Nothing: the figure of every run has a bound.
    WorstRun,
    /// The median of its own runs: the bound holds for the worst of them.
    OwnMedian,
    /// The most that spreading messages over workers can gain over the peer's pinned connections. See [`skew_bound`].
    SkewBound(Contestant),
}

#[derive(Clone, Copy, Debug)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

struct Goal {
    case: &'static str,
    subject: Contestant,
    placement: Placement,
    metric: Metric,
    against: Against,
    bound: Bound,
}

/// A goal and what came of it.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) case: &'static str,
    pub(crate) subject: Contestant,
    pub(crate) placement: Placement,
    /// For example "round trip p50 us <= 0.55 x threads".
    pub(crate) goal: String,
    /// The ratio, or the figure itself where there is nothing to compare it with.
    pub(crate) value: Option<f64>,
    /// None: not measured.
    pub(crate) met: Option<bool>,
}

/// Judges every goal of the groups that the report has.
pub(crate) fn judge(raw: &Raw) -> Vec<Verdict> {
    let has = |goal: &&Goal| raw.groups.iter().any(|group| Some(group.row) == row(goal.case));
    goals().iter().filter(has).map(|goal| goal.judge(raw)).collect()
}

fn row(case: &str) -> Option<Row> {
    CASES.iter().find(|known| known.name == case).map(|case| case.row)
}

fn goals() -> Vec<Goal> {
    let mut goals = Vec::new();
    round_trip(&mut goals);
    pipelined(&mut goals);
    udp(&mut goals);
    idle(&mut goals);
    mux(&mut goals);
    connections(&mut goals);
    accel(&mut goals);
    goals
}

fn round_trip(goals: &mut Vec<Goal>) {
    for (subject, placement, ratio) in [
        (Kernel, Placement::Same, 0.85),
        (Kernel, Placement::Other, 0.55),
        (Uring, Placement::Same, 1.05),
        (Uring, Placement::Other, 1.05),
    ] {
        goals.push(Goal {
            case: "null-tcp-1",
            subject,
            placement,
            metric: Metric::RttP50Us,
            against: Against::Best(&[Threads]),
            bound: Bound::AtMost(ratio),
        });
    }
}

fn pipelined(goals: &mut Vec<Goal>) {
    for case in ["null-tcp-128", "null-tcp-128x2"] {
        for subject in [Kernel, Uring] {
            for (placement, ratio) in [(Placement::Same, 1.0), (Placement::Other, 1.5)] {
                let goal = |metric, against, bound| Goal { case, subject, placement, metric, against, bound };
                let threads = Against::Best(&[Threads]);
                goals.push(goal(Metric::MessagesPerS, threads, Bound::AtLeast(ratio)));
                goals.push(goal(Metric::TotalCpuUs, threads, Bound::AtMost(0.7)));
                goals.push(goal(Metric::MessagesPerS, Against::OwnMedian, Bound::AtLeast(0.8)));
            }
        }
    }
}

fn udp(goals: &mut Vec<Goal>) {
    let peers = Against::Best(&[UdpPlain, UdpMmsg]);
    for (case, metric, bounds) in [
        ("echo-udp-1", Metric::RttP50Us, [Bound::AtMost(0.3), Bound::AtMost(0.3)]),
        ("null-udp-1", Metric::RttP50Us, [Bound::AtMost(0.3), Bound::AtMost(0.3)]),
        ("echo-udp-128", Metric::MessagesPerS, [Bound::AtLeast(1.8), Bound::AtLeast(1.0)]),
        ("null-udp-128", Metric::MessagesPerS, [Bound::AtLeast(1.8), Bound::AtLeast(1.0)]),
    ] {
        for (placement, bound) in [Placement::Same, Placement::Other].into_iter().zip(bounds) {
            goals.push(Goal { case, subject: Kernel, placement, metric, against: peers, bound });
        }
    }
}

fn idle(goals: &mut Vec<Goal>) {
    for subject in [Kernel, Uring] {
        for (metric, most) in [(Metric::IdleBytes, 1024.0), (Metric::IdleRttRatio, 1.2)] {
            goals.push(Goal {
                case: "idle-10000",
                subject,
                placement: Placement::Other,
                metric,
                against: Against::Absolute,
                bound: Bound::AtMost(most),
            });
        }
    }
}

fn mux(goals: &mut Vec<Goal>) {
    let placement = Placement::Shared;
    let mut goal = |case, subject, metric, against, bound| {
        goals.push(Goal { case, subject, placement, metric, against, bound });
    };
    let loops = Against::Best(&[WorkLoops]);
    goal("mux-discard", Workers2, Metric::MessagesPerS, loops, Bound::AtLeast(1.0));
    goal("mux-discard", Workers2, Metric::RttMeanUs, loops, Bound::AtMost(1.0));
    for case in ["mux-sleep-split", "mux-sleep-skewed", "mux-compute-split", "mux-compute-skewed"] {
        goal(case, Workers2, Metric::MessagesPerS, Against::SkewBound(WorkLoops), Bound::AtLeast(0.9));
    }
    for case in ["mux-pipeline-64", "mux-pipeline-256"] {
        goal(case, Workers2, Metric::MessagesPerS, loops, Bound::AtLeast(0.95));
    }
    goal("mux-mixed", Workers4, Metric::QuickP99Us, Against::Best(&[IdealQueue]), Bound::AtMost(1.1));
    // By shape: both on the same emulated machine.
    goals.push(Goal {
        case: "mux-mixed",
        subject: Workers4,
        placement: Placement::Vm,
        metric: Metric::QuickP99Us,
        against: Against::Best(&[KernelWorkers4]),
        bound: Bound::AtMost(0.3),
    });
}

fn connections(goals: &mut Vec<Goal>) {
    let nginx = Against::Best(&[NginxExclusive, NginxReuseport]);
    for placement in [Placement::Same, Placement::Other, Placement::Unpinned] {
        for (metric, bound) in [
            (Metric::MessagesPerS, Bound::AtLeast(1.0)),
            (Metric::ServerCpuUs, Bound::AtMost(0.7)),
            (Metric::RttP99Us, Bound::AtMost(0.8)),
        ] {
            goals.push(Goal { case: "connections", subject: Demo, placement, metric, against: nginx, bound });
        }
    }
}

fn accel(goals: &mut Vec<Goal>) {
    let placement = Placement::Same;
    let mut goal = |case, subject, metric, against, bound| {
        goals.push(Goal { case, subject, placement, metric, against, bound });
    };
    let (plain, reuseport) = (Against::Best(&[NginxExclusive]), Against::Best(&[NginxReuseport]));
    for case in ["accel-rate", "accel-steady"] {
        goal(case, Accel, Metric::LocalShare, Against::WorstRun, Bound::AtLeast(1.0));
        goal(case, Accel, Metric::ServerCpuUs, reuseport, Bound::AtMost(1.0));
        goal(case, Accel, Metric::MachineCpuUs, reuseport, Bound::AtMost(1.0));
    }
    // Clients at a rate load both CPUs alike; in a closed loop the quicker one does more.
    goal("accel-steady", Accel, Metric::Balance, Against::WorstRun, Bound::AtMost(1.1));
    goal("accel-stall", Accel, Metric::RttP99Us, reuseport, Bound::AtMost(0.3));
    for case in ["accel-reload", "accel-resize", "accel-kill"] {
        goal(case, Accel, Metric::Failures, Against::WorstRun, Bound::AtMost(0.0));
    }
    for case in ["accel-rate", "accel-kept"] {
        goal(case, AccelOff, Metric::MessagesPerS, plain, Bound::AtLeast(0.99));
        goal(case, AccelOff, Metric::MachineCpuUs, plain, Bound::AtMost(1.01));
    }
    goal("accel-others", AccelHaproxyShards, Metric::LocalShare, Against::WorstRun, Bound::AtLeast(1.0));
    // Generators that share no code see the same server.
    for (case, peers) in [("generators", &[Wrk][..]), ("generators-new", &[Ab])] {
        for bound in [Bound::AtLeast(0.95), Bound::AtMost(1.05)] {
            goal(case, NginxExclusive, Metric::MessagesPerS, Against::Best(peers), bound);
        }
    }
}

/// CPUs of [`Placement::Shared`].
const SHARED_CPUS: f64 = 2.0;

/// Loops of the peer with pinned connections, and workers that are compared with them.
const LOOPS: f64 = 2.0;

/// The most messages per second that two workers can do where pinned connections do `pinned`.
///
/// Pinned, the loop with the largest share of the messages is always busy and is the limit. Spread, all workers are
/// always busy: that is `LOOPS * max_share` times as much. Messages that compute need CPUs, of which the client takes
/// a part: then the machine may be the limit before.
fn skew_bound(load: &WorkLoad, pinned: f64, client_cpu_us: f64) -> f64 {
    let spread = pinned * LOOPS * load.max_share();
    match load.kind {
        "compute" => spread.min(SHARED_CPUS * 1e6 / (load.mean_work_us() + client_cpu_us)),
        _ => spread,
    }
}

fn work_load(case: &str) -> Option<&'static WorkLoad> {
    match CASES.iter().find(|known| known.name == case)?.service {
        Service::Work(load) => Some(load),
        Service::Echo | Service::Null | Service::Web(_) | Service::Value => None,
    }
}

impl Goal {
    fn judge(&self, raw: &Raw) -> Verdict {
        let value = self.value(raw);
        Verdict {
            case: self.case,
            subject: self.subject,
            placement: self.placement,
            goal: self.text(),
            value,
            met: value.map(|value| match self.bound {
                Bound::AtMost(bound) => value <= bound,
                Bound::AtLeast(bound) => value >= bound,
            }),
        }
    }

    fn value(&self, raw: &Raw) -> Option<f64> {
        let median = |contestant| {
            let summary = raw.summary(self.case, contestant, self.placement, self.metric)?;
            Some(summary.median)
        };
        match self.against {
            Against::Absolute => median(self.subject),
            Against::WorstRun => {
                let own = raw.summary(self.case, self.subject, self.placement, self.metric)?;
                Some(match self.bound {
                    Bound::AtMost(_) => own.max,
                    Bound::AtLeast(_) => own.min,
                })
            }
            Against::OwnMedian => {
                let own = raw.summary(self.case, self.subject, self.placement, self.metric)?;
                Some(own.min / own.median)
            }
            Against::SkewBound(pinned) => {
                let client = raw.summary(self.case, self.subject, self.placement, Metric::ClientCpuUs)?;
                let bound = skew_bound(work_load(self.case)?, median(pinned)?, client.median);
                Some(median(self.subject)? / bound)
            }
            Against::Best(peers) => {
                let peers = peers.iter().filter_map(|&peer| median(peer));
                let best = match self.bound {
                    Bound::AtMost(_) => peers.reduce(f64::min)?,
                    Bound::AtLeast(_) => peers.reduce(f64::max)?,
                };
                Some(median(self.subject)? / best)
            }
        }
    }

    fn text(&self) -> String {
        let (sign, bound) = match self.bound {
            Bound::AtMost(bound) => ("<=", bound),
            Bound::AtLeast(bound) => (">=", bound),
        };
        let metric = self.metric.title();
        match self.against {
            Against::Best(peers) => {
                let peers: Vec<String> = peers.iter().map(ToString::to_string).collect();
                let peers = peers.join(" or ");
                format!("{metric} {sign} {bound} x {peers}")
            }
            Against::Absolute => format!("{metric} {sign} {bound}"),
            Against::WorstRun => format!("every run: {metric} {sign} {bound}"),
            Against::SkewBound(pinned) => {
                let load = work_load(self.case).expect("only work is skewed");
                let machine = if load.kind == "compute" { " or what the client leaves of 2 CPUs" } else { "" };
                let gain = LOOPS * load.max_share();
                format!("{metric} {sign} {bound} of the bound, {gain:.2} x {pinned}{machine}")
            }
            Against::OwnMedian => {
                format!("slowest run {sign} {bound} x its median {metric}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::raw::{Group, Sample};
    use super::*;
    use crate::machine::Revision;
    use clap::ValueEnum;
    use std::collections::BTreeMap;

    fn sample(contestant: Contestant, placement: Placement, metric: Metric, value: f64) -> Sample {
        let case = if metric == Metric::RttP50Us { "null-tcp-1" } else { "null-tcp-128" };
        Sample {
            case: case.into(),
            contestant,
            placement,
            round: 0,
            server_command: String::new(),
            client_command: String::new(),
            metrics: BTreeMap::from([(metric, value)]),
            failures: BTreeMap::new(),
            warnings: Vec::new(),
            error: None,
        }
    }

    /// A report of every group, with these samples.
    fn raw(samples: impl Into<Vec<Sample>>) -> Raw {
        let group = |&row| Group::new(row, &Revision::default(), 1, 1.0);
        let groups = Row::value_variants().iter().map(group).collect();
        Raw { groups, samples: samples.into(), ..Raw::default() }
    }

    fn found(raw: &Raw, subject: Contestant, placement: Placement, text: &str) -> Verdict {
        judge(raw)
            .into_iter()
            .find(|verdict| verdict.subject == subject && verdict.placement == placement && verdict.goal == text)
            .unwrap_or_else(|| panic!("no goal '{text}'"))
    }

    #[test]
    fn ratios_are_of_the_same_placement() {
        let us = Metric::RttP50Us;
        let raw = raw([
            sample(Threads, Placement::Same, us, 4.0),
            sample(Threads, Placement::Other, us, 7.0),
            sample(Kernel, Placement::Same, us, 3.5),
            sample(Kernel, Placement::Other, us, 3.5),
        ]);
        let text = "round trip p50 us <= 0.85 x threads";
        let same = found(&raw, Kernel, Placement::Same, text);
        assert_eq!((same.value, same.met), (Some(0.875), Some(false)));
        let text = "round trip p50 us <= 0.55 x threads";
        let other = found(&raw, Kernel, Placement::Other, text);
        assert_eq!((other.value, other.met), (Some(0.5), Some(true)));
        let text = "round trip p50 us <= 1.05 x threads";
        let missing = found(&raw, Uring, Placement::Same, text);
        assert_eq!((missing.value, missing.met), (None, None));
    }

    #[test]
    fn groups_that_the_report_has_not_are_not_judged() {
        let mut raw = raw([]);
        let all = judge(&raw).len();
        raw.groups.retain(|group| group.row != Row::Accel);
        let rest = judge(&raw);
        assert!(rest.len() < all && rest.iter().all(|verdict| row(verdict.case) != Some(Row::Accel)));
    }

    #[test]
    fn one_slow_run_loses_the_steadiness_goal() {
        let rate = Metric::MessagesPerS;
        let raw = raw([100.0, 100.0, 79.0].map(|value| sample(Uring, Placement::Same, rate, value)));
        let text = "slowest run >= 0.8 x its median messages/s";
        assert_eq!(found(&raw, Uring, Placement::Same, text).met, Some(false));
    }

    #[test]
    fn one_failed_request_in_one_run_loses_the_goal_of_none() {
        let of = |metric, values: [f64; 3]| {
            let samples = values
                .map(|value| Sample { case: "accel-kill".into(), ..sample(Accel, Placement::Same, metric, value) });
            raw(samples)
        };
        let text = "every run: failed requests <= 0";
        let verdict = |values| {
            judge(&of(Metric::Failures, values))
                .into_iter()
                .find(|verdict| verdict.case == "accel-kill" && verdict.goal == text)
                .unwrap()
        };
        assert_eq!(verdict([0.0, 0.0, 3.0]).met, Some(false));
        assert_eq!((verdict([0.0; 3]).value, verdict([0.0; 3]).met), (Some(0.0), Some(true)));
        // Where more is better, the worst is the least.
        let mut raw = of(Metric::LocalShare, [1.0, 0.99, 1.0]);
        raw.samples.iter_mut().for_each(|sample| sample.case = "accel-steady".into());
        assert_eq!(found(&raw, Accel, Placement::Same, "every run: local share >= 1").value, None, "of accel-rate");
        let verdicts = judge(&raw);
        let steady = verdicts.iter().find(|verdict| verdict.case == "accel-steady" && verdict.goal.contains("local"));
        assert_eq!(steady.unwrap().value, Some(0.99));
    }

    #[test]
    fn the_gain_over_pinned_connections_is_bounded_by_the_skew_or_the_machine() {
        let sleep = work_load("mux-sleep-split").unwrap();
        assert_eq!(skew_bound(sleep, 8000.0, 10.0), 12_000.0);
        // 125 us of work and 75 us of the client: two CPUs do 10,000 of that in a second.
        let compute = work_load("mux-compute-split").unwrap();
        assert_eq!(skew_bound(compute, 8000.0, 75.0), 10_000.0);
        assert_eq!(skew_bound(compute, 6000.0, 75.0), 9_000.0);
    }

    #[test]
    fn work_is_judged_by_its_bound_and_by_shape() {
        let of = |case: &str, contestant, metrics: &[(Metric, f64)]| Sample {
            case: case.into(),
            metrics: metrics.iter().copied().collect(),
            ..sample(contestant, Placement::Shared, Metric::MessagesPerS, 0.0)
        };
        let rate = Metric::MessagesPerS;
        let raw = raw([
            of("mux-sleep-split", WorkLoops, &[(rate, 8000.0)]),
            of("mux-sleep-split", Workers2, &[(rate, 10_800.0), (Metric::ClientCpuUs, 10.0)]),
            of("mux-mixed", IdealQueue, &[(Metric::QuickP99Us, 8000.0)]),
            of("mux-mixed", Workers4, &[(Metric::QuickP99Us, 9600.0)]),
        ]);
        let text = "messages/s >= 0.9 of the bound, 1.50 x pinned loops";
        let gain = found(&raw, Workers2, Placement::Shared, text);
        assert_eq!((gain.value, gain.met), (Some(0.9), Some(true)));
        let ideal = found(&raw, Workers4, Placement::Shared, "quick p99 us <= 1.1 x ideal queue");
        assert_eq!((ideal.value, ideal.met), (Some(1.2), Some(false)));
        let text = "quick p99 us <= 0.3 x AF_KCM 4 workers";
        assert_eq!(
            found(&raw, Workers4, Placement::Vm, text).value,
            None,
            "nothing outside the VM is compared with it"
        );
    }

    #[test]
    fn every_goal_names_a_case_that_is_measured() {
        for goal in goals() {
            let case = super::super::case::CASES.iter().find(|case| case.name == goal.case);
            let case = case.unwrap_or_else(|| panic!("no case {}", goal.case));
            let measured = super::super::vm::contestants_in(case, goal.placement);
            assert!(measured.contains(&goal.subject), "{}", goal.text());
            if let Against::Best(peers) = goal.against {
                assert!(peers.iter().all(|peer| measured.contains(peer)), "{}", goal.text());
            }
            if let Against::SkewBound(pinned) = goal.against {
                assert!(case.contestants.contains(&pinned) && work_load(goal.case).is_some(), "{}", goal.text());
            }
        }
    }
}
