//! The goals of the first four rows, as ratios within one run, and whether they were met.

use super::case::{Metric, Placement};
use super::contestant::Contestant::{self, Kernel, Threads, UdpMmsg, UdpPlain, Uring};
use super::raw::Raw;

/// What a figure is compared with.
#[derive(Clone, Copy, Debug)]
enum Against {
    /// The best of these peers in the same case and placement.
    Best(&'static [Contestant]),
    /// Nothing: the figure itself has a bound.
    Absolute,
    /// The median of its own runs: the bound holds for the worst of them.
    OwnMedian,
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

/// Judges every goal.
pub(crate) fn judge(raw: &Raw) -> Vec<Verdict> {
    goals().iter().map(|goal| goal.judge(raw)).collect()
}

fn goals() -> Vec<Goal> {
    let mut goals = Vec::new();
    round_trip(&mut goals);
    pipelined(&mut goals);
    udp(&mut goals);
    idle(&mut goals);
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
            Against::OwnMedian => {
                let own = raw.summary(self.case, self.subject, self.placement, self.metric)?;
                Some(own.min / own.median)
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
            Against::OwnMedian => {
                format!("slowest run {sign} {bound} x its median {metric}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::raw::Sample;
    use super::*;
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
            warnings: Vec::new(),
            error: None,
        }
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
        let raw = Raw {
            samples: vec![
                sample(Threads, Placement::Same, us, 4.0),
                sample(Threads, Placement::Other, us, 7.0),
                sample(Kernel, Placement::Same, us, 3.5),
                sample(Kernel, Placement::Other, us, 3.5),
            ],
            ..Raw::default()
        };
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
    fn one_slow_run_loses_the_steadiness_goal() {
        let rate = Metric::MessagesPerS;
        let raw = Raw {
            samples: [100.0, 100.0, 79.0].iter().map(|&value| sample(Uring, Placement::Same, rate, value)).collect(),
            ..Raw::default()
        };
        let text = "slowest run >= 0.8 x its median messages/s";
        assert_eq!(found(&raw, Uring, Placement::Same, text).met, Some(false));
    }

    #[test]
    fn every_goal_names_a_case_that_is_measured() {
        for goal in goals() {
            let case = super::super::case::CASES.iter().find(|case| case.name == goal.case);
            let case = case.unwrap_or_else(|| panic!("no case {}", goal.case));
            assert!(case.contestants.contains(&goal.subject), "{}", goal.text());
            if let Against::Best(peers) = goal.against {
                assert!(peers.iter().all(|peer| case.contestants.contains(peer)), "{}", goal.text());
            }
        }
    }
}
