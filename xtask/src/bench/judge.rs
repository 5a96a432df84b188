//! Whether goals were met, lost, or are undecided.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::case::{CASES, Case, Metric, Placement, Row, Service, WorkLoad};
use super::contestant::Contestant;
use super::goals::goals;
use super::raw::{Raw, Sample, Step, values};
use super::stats::Interval;

/// What a figure is compared with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Against {
    /// Each of these peers, and so the best of them, in the same case and placement.
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
pub(super) enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// What a figure of a contestant should be.
pub(super) struct Goal {
    pub(super) case: &'static str,
    pub(super) subject: Contestant,
    pub(super) placement: Placement,
    pub(super) metric: Metric,
    pub(super) against: Against,
    pub(super) bound: Bound,
}

/// A goal and what came of it.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) case: &'static str,
    pub(crate) subject: Contestant,
    pub(crate) placement: Placement,
    /// For example "round trip p50 us <= 0.55 x threads".
    pub(crate) goal: String,
    /// The ratio, or the figure itself where there is nothing to compare it with. None: not measured.
    pub(crate) found: Option<Interval>,
    pub(crate) outcome: GoalOutcome,
    metric: Metric,
    is_ratio: bool,
}

impl Verdict {
    /// A value of what is found.
    pub(crate) fn format(&self, value: f64) -> String {
        if self.is_ratio { format_ratio(value) } else { self.metric.format(value) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GoalOutcome {
    Met,
    Lost,
    /// More rounds could still show either.
    Undecided,
    NotMeasured,
}

impl fmt::Display for GoalOutcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            GoalOutcome::Met => "met",
            GoalOutcome::Lost => "LOST",
            GoalOutcome::Undecided => "undecided",
            GoalOutcome::NotMeasured => "not measured",
        })
    }
}

/// Judges every goal of the groups that the report has.
pub(crate) fn judge(raw: &Raw) -> Vec<Verdict> {
    let has = |goal: &&Goal| raw.groups.iter().any(|group| Some(group.row) == row(goal.case));
    goals().iter().filter(has).map(|goal| goal.judge(&raw.samples)).collect()
}

/// Whether there is a goal for a case in a placement.
pub(crate) fn has_goal(case: &Case, placement: Placement) -> bool {
    goals().iter().any(|goal| goal.case == case.name && goal.placement == placement)
}

/// The contestants of the goals that these samples of one step leave undecided: the subjects and their peers.
pub(crate) fn undecided(samples: &[Sample], step: &Step) -> BTreeSet<Contestant> {
    let goals = goals().into_iter().filter(|goal| goal.case == step.case && goal.placement == step.placement);
    goals
        .filter(|goal| goal.judge(samples).outcome == GoalOutcome::Undecided)
        .flat_map(|goal| goal.peers().into_iter().chain([goal.subject]))
        .collect()
}

fn row(case: &str) -> Option<Row> {
    CASES.iter().find(|known| known.name == case).map(|case| case.row)
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
        Service::Echo | Service::Null | Service::Web(_) | Service::Store(_) | Service::Files(_) => None,
    }
}

/// The median of the ratios of the rounds that both have.
fn ratios(own: &BTreeMap<u32, f64>, peer: &BTreeMap<u32, f64>) -> Option<Interval> {
    Interval::of(own.iter().filter_map(|(round, own)| Some(own / peer.get(round)?)).collect())
}

fn format_ratio(ratio: f64) -> String {
    format!("{ratio:.3}")
}

impl Bound {
    fn outcome(self, found: &Interval) -> GoalOutcome {
        let (is_met, is_lost) = match self {
            Bound::AtMost(bound) => (found.high <= bound, found.low > bound),
            Bound::AtLeast(bound) => (found.low >= bound, found.high < bound),
        };
        match found.can_decide() {
            true if is_met => GoalOutcome::Met,
            true if is_lost => GoalOutcome::Lost,
            _ => GoalOutcome::Undecided,
        }
    }

    /// The one of two values that is further from being good.
    fn worse(self, one: f64, other: f64) -> f64 {
        match self {
            Bound::AtMost(_) => one.max(other),
            Bound::AtLeast(_) => one.min(other),
        }
    }
}

impl Goal {
    fn judge(&self, samples: &[Sample]) -> Verdict {
        let found = self.found(samples);
        let worst = found.iter().copied().reduce(|one, other| {
            let worse = self.bound.worse(one.median, other.median);
            if worse == one.median { one } else { other }
        });
        let outcomes: Vec<GoalOutcome> = found.iter().map(|found| self.bound.outcome(found)).collect();
        let outcome = [GoalOutcome::Lost, GoalOutcome::Undecided, GoalOutcome::Met]
            .into_iter()
            .find(|one| outcomes.contains(one));
        Verdict {
            case: self.case,
            subject: self.subject,
            placement: self.placement,
            goal: self.text(samples),
            found: worst,
            outcome: outcome.unwrap_or(GoalOutcome::NotMeasured),
            metric: self.metric,
            is_ratio: !matches!(self.against, Against::Absolute | Against::WorstRun),
        }
    }

    fn peers(&self) -> Vec<Contestant> {
        match self.against {
            Against::Best(peers) => peers.to_vec(),
            Against::SkewBound(pinned) => vec![pinned],
            Against::Absolute | Against::WorstRun | Against::OwnMedian => Vec::new(),
        }
    }

    /// What was found: beside several peers one for each, for the best of them is beaten only by what beats all. A round
    /// is compared with the peer's in the same round, which ran just before or after it.
    fn found(&self, samples: &[Sample]) -> Vec<Interval> {
        let values = |contestant, metric| values(samples, self.case, contestant, self.placement, metric);
        let own = values(self.subject, self.metric);
        let worst = || own.values().copied().reduce(|one, other| self.bound.worse(one, other));
        let median = || Interval::of(own.values().copied().collect());
        match self.against {
            Against::Absolute => median().into_iter().collect(),
            Against::WorstRun => worst().map(|worst| Interval::exact(worst, own.len())).into_iter().collect(),
            Against::OwnMedian => {
                let found = worst().zip(median()).map(|(worst, own)| Interval::exact(worst / own.median, own.count));
                found.into_iter().collect()
            }
            Against::SkewBound(pinned) => {
                let (load, client) = (work_load(self.case), values(self.subject, Metric::ClientCpuUs));
                let bound = |(round, pinned)| Some((round, skew_bound(load?, pinned, *client.get(&round)?)));
                ratios(&own, &values(pinned, self.metric).into_iter().filter_map(bound).collect()).into_iter().collect()
            }
            Against::Best(peers) => peers.iter().filter_map(|&peer| ratios(&own, &values(peer, self.metric))).collect(),
        }
    }

    /// Names the peers that took part, or all where none did.
    fn text(&self, samples: &[Sample]) -> String {
        let (sign, bound) = match self.bound {
            Bound::AtMost(bound) => ("<=", bound),
            Bound::AtLeast(bound) => (">=", bound),
        };
        let metric = self.metric.title();
        match self.against {
            Against::Best(peers) => {
                let took_part = |peer: &&Contestant| {
                    samples.iter().any(|sample| sample.case == self.case && sample.contestant == **peer)
                };
                let names: Vec<String> = peers.iter().filter(took_part).map(ToString::to_string).collect();
                let all = || peers.iter().map(ToString::to_string).collect();
                let peers = Some(names).filter(|names| !names.is_empty()).unwrap_or_else(all).join(" or ");
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
    use super::super::contestant::Contestant::{
        Accel, Demo, IdealQueue, Kernel, NginxExclusive, NginxReuseport, Threads, Uring, WorkLoops, Workers2, Workers4,
    };
    use super::super::raw::Group;
    use super::super::vm;
    use super::*;
    use crate::machine::Revision;
    use clap::ValueEnum;

    /// Rounds of one figure.
    fn rounds(case: &str, who: Contestant, placement: Placement, metric: Metric, values: &[f64]) -> Vec<Sample> {
        let case = CASES.iter().find(|known| known.name == case).unwrap();
        let sample = |(round, value): (u32, &f64)| Sample {
            metrics: BTreeMap::from([(metric, *value)]),
            ..Sample::new(case, who, placement, round)
        };
        (0..).zip(values).map(sample).collect()
    }

    /// A report of every group, with these samples.
    fn raw(samples: Vec<Sample>) -> Raw {
        let group = |&row| Group::new(row, &Revision::default(), 1, 1.0);
        Raw { groups: Row::value_variants().iter().map(group).collect(), samples, ..Raw::default() }
    }

    /// The median found for a goal, and what came of it.
    fn verdict(samples: &[Vec<Sample>], who: Contestant, case: &str, text: &str) -> (Option<f64>, GoalOutcome) {
        let verdicts = judge(&raw(samples.concat()));
        let of = |verdict: &&Verdict| verdict.case == case && verdict.subject == who && verdict.goal == text;
        let verdict = verdicts.iter().find(of).unwrap_or_else(|| panic!("no goal '{text}'"));
        (verdict.found.map(|found| found.median), verdict.outcome)
    }

    #[test]
    fn ratios_are_of_the_same_placement() {
        let p50 = |who, placement, us| rounds("null-tcp-1", who, placement, Metric::RttP50Us, &[us; 5]);
        let samples = [
            p50(Threads, Placement::Same, 4.0),
            p50(Threads, Placement::Other, 7.0),
            p50(Kernel, Placement::Same, 3.5),
            p50(Kernel, Placement::Other, 3.5),
        ];
        let verdict = |who, text| verdict(&samples, who, "null-tcp-1", text);
        assert_eq!(verdict(Kernel, "round trip p50 us <= 0.85 x threads"), (Some(0.875), GoalOutcome::Lost));
        assert_eq!(verdict(Kernel, "round trip p50 us <= 0.55 x threads"), (Some(0.5), GoalOutcome::Met));
        assert_eq!(verdict(Uring, "round trip p50 us <= 1.05 x threads"), (None, GoalOutcome::NotMeasured));
    }

    /// The machine's speed changes from round to round, and meets both: their ratio stays.
    #[test]
    fn a_round_is_compared_with_the_same_round_of_the_peer() {
        let at_speed = |who, factor| {
            let values = [100.0, 50.0, 200.0, 80.0, 120.0].map(|value| value * factor);
            rounds("null-tcp-128", who, Placement::Same, Metric::MessagesPerS, &values)
        };
        let (peer, own) = (at_speed(Threads, 1.0), |factor| at_speed(Uring, factor));
        let text = "messages/s >= 1 x threads";
        let verdict = |own| verdict(&[peer.clone(), own], Uring, "null-tcp-128", text);
        assert_eq!(verdict(own(1.01)), (Some(1.01), GoalOutcome::Met));
        assert_eq!(verdict(own(0.99)), (Some(0.99), GoalOutcome::Lost));
        // Without its pair a round tells nothing.
        assert_eq!(verdict(own(1.01)[..4].to_vec()).1, GoalOutcome::Undecided);
    }

    #[test]
    fn a_goal_within_the_interval_is_undecided_and_names_what_to_repeat() {
        let rate = |who, values| rounds("null-tcp-128", who, Placement::Same, Metric::MessagesPerS, values);
        let peer = rate(Threads, &[100.0; 5]);
        let samples = [peer, rate(Uring, &[101.0, 102.0, 99.0, 103.0, 104.0])];
        let text = "messages/s >= 1 x threads";
        assert_eq!(verdict(&samples, Uring, "null-tcp-128", text), (Some(1.02), GoalOutcome::Undecided));
        let case = CASES.iter().find(|case| case.name == "null-tcp-128").unwrap();
        let repeated = |placement| undecided(&samples.concat(), &case.step(placement));
        assert_eq!(repeated(Placement::Same), BTreeSet::from([Threads, Uring]));
        assert!(repeated(Placement::Other).is_empty());
    }

    #[test]
    fn the_best_of_several_peers_is_to_be_beaten() {
        let p99 = |who, us| rounds("connections", who, Placement::Same, Metric::RttP99Us, &[us; 5]);
        let nginx = [p99(NginxExclusive, 10.0), p99(NginxReuseport, 20.0)];
        let text = "round trip p99 us <= 0.8 x nginx or nginx reuseport";
        let verdict = |us| verdict(&[nginx.concat(), p99(Demo, us)], Demo, "connections", text);
        assert_eq!(verdict(9.0), (Some(0.9), GoalOutcome::Lost));
        assert_eq!(verdict(8.0), (Some(0.8), GoalOutcome::Met));
    }

    #[test]
    fn groups_that_the_report_has_not_are_not_judged() {
        let mut raw = raw(Vec::new());
        let all = judge(&raw).len();
        raw.groups.retain(|group| group.row != Row::Accel);
        let rest = judge(&raw);
        assert!(rest.len() < all && rest.iter().all(|verdict| row(verdict.case) != Some(Row::Accel)));
    }

    #[test]
    fn one_slow_run_loses_the_steadiness_goal() {
        let samples = rounds("null-tcp-128", Uring, Placement::Same, Metric::MessagesPerS, &[100.0, 100.0, 79.0]);
        let text = "slowest run >= 0.8 x its median messages/s";
        assert_eq!(verdict(&[samples], Uring, "null-tcp-128", text).1, GoalOutcome::Lost);
    }

    #[test]
    fn one_failed_request_in_one_run_loses_the_goal_of_none() {
        let of = |case, metric, values, text| {
            verdict(&[rounds(case, Accel, Placement::Same, metric, values)], Accel, case, text)
        };
        let failed = |values| of("accel-kill", Metric::Failures, values, "every run: failed requests <= 0");
        assert_eq!(failed(&[0.0, 0.0, 3.0]), (Some(3.0), GoalOutcome::Lost));
        assert_eq!(failed(&[0.0; 3]), (Some(0.0), GoalOutcome::Met));
        // Where more is better, the worst is the least.
        let local = of("accel-steady", Metric::LocalShare, &[1.0, 0.99, 1.0], "every run: local share >= 1");
        assert_eq!(local, (Some(0.99), GoalOutcome::Lost));
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
        let of = |case, who, metric, value| rounds(case, who, Placement::Shared, metric, &[value; 5]);
        let mut subject = of("mux-sleep-split", Workers2, Metric::MessagesPerS, 10_800.0);
        for sample in &mut subject {
            sample.metrics.insert(Metric::ClientCpuUs, 10.0);
        }
        let samples = [
            of("mux-sleep-split", WorkLoops, Metric::MessagesPerS, 8000.0),
            subject,
            of("mux-mixed", IdealQueue, Metric::QuickP99Us, 8000.0),
            of("mux-mixed", Workers4, Metric::QuickP99Us, 9600.0),
        ];
        let verdict = |who, case, text| verdict(&samples, who, case, text);
        let text = "messages/s >= 0.9 of the bound, 1.50 x pinned loops";
        assert_eq!(verdict(Workers2, "mux-sleep-split", text), (Some(0.9), GoalOutcome::Met));
        let text = "quick p99 us <= 1.1 x ideal queue";
        assert_eq!(verdict(Workers4, "mux-mixed", text), (Some(1.2), GoalOutcome::Lost));
        let text = "quick p99 us <= 0.3 x AF_KCM 4 workers";
        assert_eq!(verdict(Workers4, "mux-mixed", text).0, None, "nothing outside the VM is compared with it");
    }

    #[test]
    fn every_goal_names_a_case_that_is_measured() {
        for goal in goals() {
            let case = CASES.iter().find(|case| case.name == goal.case);
            let case = case.unwrap_or_else(|| panic!("no case {}", goal.case));
            let measured = vm::contestants_in(case, goal.placement);
            assert!(measured.contains(&goal.subject), "{}", goal.text(&[]));
            assert!(goal.peers().iter().all(|peer| measured.contains(peer)), "{}", goal.text(&[]));
            let is_bounded = matches!(goal.against, Against::SkewBound(_));
            assert!(!is_bounded || work_load(goal.case).is_some(), "{}", goal.text(&[]));
            assert!(has_goal(case, goal.placement));
        }
    }
}
