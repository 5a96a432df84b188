//! What the policies must show on paper. Every number follows from a seed.

use ksf_mux_sim::{Arrivals, Costs, Job, Load, ServiceTime, SimPolicy, SimSegment, Span, Summary, simulate};
use ksf_test::Random;

const MIXED: ServiceTime = ServiceTime::Mixed { short_ns: 20_000, long_ns: 20_000_000, long_percent: 20 };
const EVEN: Load<'static> = Load { service: MIXED, utilisation: 0.4, burst: 1, weights: &[1; 16], messages: 20_000 };
const ORDERED: SimPolicy = SimPolicy::Ours { ordered: true, long_cap: None };
const ALL: [SimPolicy; 6] = [
    SimPolicy::OURS,
    ORDERED,
    SimPolicy::Ours { ordered: false, long_cap: Some(2) },
    SimPolicy::Ideal,
    SimPolicy::Pinned,
    SimPolicy::Kcm,
];

fn summary(policy: SimPolicy, workers: usize, costs: Costs, arrivals: &Arrivals) -> Summary {
    Summary::of(arrivals, &simulate(policy, workers, costs, arrivals))
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let load = Load { burst: 4, messages: 4000, ..EVEN };
    assert_eq!(load.draw(4, 7), load.draw(4, 7));
    assert_ne!(load.draw(4, 7), load.draw(4, 8));
    for policy in ALL {
        let run = || simulate(policy, 4, Costs::TYPICAL, &load.draw(4, 7));
        assert_eq!(run(), run(), "{policy:?}");
    }
}

/// `simulate` panics for a message that is lost or worked on twice.
#[test]
fn every_message_is_worked_on_once_and_no_worker_on_two() {
    let exponential = ServiceTime::Exponential { mean_ns: 3_000 };
    let loads = [
        Load { burst: 8, ..EVEN },
        Load { service: exponential, utilisation: 2.0, burst: 64, ..EVEN },
        // More than one read brings, so that connections are visited again.
        Load { service: exponential, utilisation: 0.9, burst: 2000, weights: &[1, 5], ..EVEN },
    ];
    for load in loads {
        let arrivals = load.draw(4, 1);
        for policy in ALL {
            let spans = simulate(policy, 4, Costs::TYPICAL, &arrivals);
            assert_eq!(spans.len(), arrivals.jobs.len());
            assert!(most_at_once(&spans) <= 4, "{policy:?}");
            for (span, job) in spans.iter().zip(&arrivals.jobs) {
                assert!(span.began_ns >= job.arrived_ns && span.done_ns - span.began_ns == job.service_ns);
            }
        }
    }
}

#[test]
fn without_costs_it_is_as_good_as_the_ideal_queue() {
    for (burst, weights) in [(1, EVEN.weights), (8, EVEN.weights), (1, &[1])] {
        for workers in [2, 4, 8, 16] {
            let arrivals = Load { burst, weights, ..EVEN }.draw(workers, 1);
            let ours = summary(SimPolicy::OURS, workers, Costs::NONE, &arrivals);
            let ideal = summary(SimPolicy::Ideal, workers, Costs::NONE, &arrivals);
            // The quick messages of a burst wait for the turns of others, if long ones of the same burst were before them.
            let bound_ns = ideal.p99_ns + ideal.p99_ns / if burst == 1 { 10 } else { 2 };
            assert!(ours.p99_ns <= bound_ns, "{workers} workers, bursts of {burst}: {ours:?}, ideal {ideal:?}");
            assert!(ours.mean_ns <= 1.1 * ideal.mean_ns, "{workers} workers, bursts of {burst}: {ours:?}, {ideal:?}");
        }
    }
}

#[test]
fn with_costs_quick_messages_wait_less_than_a_third_of_what_kcm_makes_them_wait() {
    for burst in [1, 8] {
        let arrivals = Load { burst, ..EVEN }.draw(8, 1);
        let [ours, kcm] = [SimPolicy::OURS, SimPolicy::Kcm].map(|policy| summary(policy, 8, Costs::TYPICAL, &arrivals));
        assert!(ours.p99_ns * 10 <= kcm.p99_ns * 3, "bursts of {burst}: {ours:?}, KCM {kcm:?}");
    }
}

/// Pinned, the worker with most work needs `skew` times as long as all workers together would: that is the gain that
/// the skew allows.
#[test]
fn a_skewed_load_gains_what_the_skew_allows() {
    let loads: [&[u32]; 3] = [&[3, 1], &[1, 1, 1, 5], &[8, 1, 1, 1, 1, 1, 1, 1]];
    for weights in loads {
        let workers = weights.len();
        let service = ServiceTime::Fixed { ns: 100_000 };
        let arrivals = Load { service, utilisation: 50.0, burst: 4, weights, messages: 20_000 }.draw(workers, 1);
        let rate = |policy| summary(policy, workers, Costs::TYPICAL, &arrivals).per_second;
        let (gain, bound) = (rate(SimPolicy::OURS) / rate(SimPolicy::Pinned), arrivals.skew(workers));
        assert!(bound > 1.45, "{bound}");
        assert!(gain >= 0.9 * bound, "{weights:?}: a gain of {gain}, allowed {bound}");
    }
}

#[test]
fn equal_shares_of_cheap_messages_lose_little_to_pinned_connections() {
    let service = ServiceTime::Fixed { ns: 2_000 };
    let arrivals = Load { service, utilisation: 20.0, burst: 64, messages: 100_000, ..EVEN }.draw(4, 1);
    let rate = |policy| summary(policy, 4, Costs::TYPICAL, &arrivals).per_second;
    let (ours, pinned) = (rate(SimPolicy::OURS), rate(SimPolicy::Pinned));
    assert!(ours >= 0.95 * pinned, "{ours} against {pinned} per second");
}

#[test]
fn a_pipeline_alone_keeps_all_workers_at_work() {
    for workers in [2, 8, 32] {
        for ns in [20_000, 100_000, 1_500_000, 5_000_000] {
            // All at once, and longer than what is read at a time.
            let load = Load {
                service: ServiceTime::Fixed { ns },
                utilisation: 1e6,
                burst: 6_000,
                weights: &[1],
                messages: 6_000,
            };
            let arrivals = load.draw(workers, 1);
            let rate = |policy| summary(policy, workers, Costs::TYPICAL, &arrivals).per_second;
            let (ours, ideal) = (rate(SimPolicy::OURS), rate(SimPolicy::Ideal));
            assert!(ours >= 0.95 * ideal, "{workers} workers, {ns} ns: {ours} against {ideal} per second");
        }
    }
}

#[test]
fn ordered_queues_keep_their_order() {
    let arrivals = Load { burst: 8, ..EVEN }.draw(4, 1);
    let in_order = |policy| {
        let spans = simulate(policy, 4, Costs::TYPICAL, &arrivals);
        let mut done_ns = vec![0; arrivals.connections];
        arrivals.jobs.iter().zip(&spans).all(|(job, span)| {
            let before_ns = std::mem::replace(&mut done_ns[job.connection], span.done_ns);
            span.began_ns >= before_ns
        })
    };
    assert!(in_order(ORDERED));
    assert!(!in_order(SimPolicy::OURS), "this load tells nothing about order");
}

#[test]
fn a_cap_keeps_workers_free_for_quick_messages() {
    let arrivals = EVEN.draw(4, 1);
    let capped = SimPolicy::Ours { ordered: false, long_cap: Some(2) };
    let spans = simulate(capped, 4, Costs::TYPICAL, &arrivals);
    let long: Vec<_> = arrivals.jobs.iter().zip(&spans).filter(|(job, _)| job.long).map(|(_, span)| *span).collect();
    assert_eq!(most_at_once(&long), 2);
    let summary = Summary::of(&arrivals, &spans);
    assert!(summary.p99_ns < 100_000, "quick messages wait for long ones: {summary:?}");
}

/// Most messages that were worked on at the same time.
fn most_at_once(spans: &[Span]) -> usize {
    // Ends before beginnings of the same time.
    let mut edges: Vec<_> = spans.iter().flat_map(|span| [(span.began_ns, 1), (span.done_ns, -1)]).collect();
    edges.sort_unstable();
    let mut now = 0;
    let counts = edges.iter().map(|(_, step)| {
        now += step;
        now
    });
    counts.max().unwrap_or(0) as usize
}

/// Between the arrival of a message and its work each other connection has a turn at most: a millisecond, and what the workers
/// had begun when that was over.
#[test]
fn a_pipeline_lets_others_in_whatever_it_has_sent() {
    const WORKERS: usize = 2;
    let mut random = Random::new(1);
    for message_ns in [20_000, 300_000, 5_000_000] {
        for floods in 1..=3 {
            for sent in [500, 2_000] {
                let arrivals = floods_and_one(floods, sent, message_ns, &mut random);
                for policy in [SimPolicy::OURS, ORDERED] {
                    let spans = simulate(policy, WORKERS, Costs::TYPICAL, &arrivals);
                    let waits = arrivals.jobs.iter().zip(&spans).filter(|(job, _)| job.connection == floods);
                    let longest_ns = waits.map(|(job, span)| span.began_ns - job.arrived_ns).max().unwrap();
                    let bound_ns = floods as u64 * (1_000_000 + WORKERS as u64 * message_ns);
                    assert!(
                        longest_ns <= bound_ns,
                        "{floods} * {sent} of {message_ns} ns, {policy:?}: {longest_ns} ns"
                    );
                }
            }
        }
    }
}

/// Connections that send all their messages at once, and a last one that sends short messages while these are worked on.
fn floods_and_one(floods: usize, sent: usize, message_ns: u64, random: &mut Random) -> Arrivals {
    let mut arrivals = Arrivals { connections: floods + 1, jobs: Vec::new(), segments: Vec::new() };
    let mut send = |connection, at_ns, count, service_ns| {
        let start = arrivals.jobs.len();
        arrivals.jobs.extend(vec![Job { arrived_ns: at_ns, service_ns, long: false, connection }; count]);
        arrivals.segments.push(SimSegment { at_ns, connection, jobs: start..arrivals.jobs.len() });
    };
    (0..floods).for_each(|connection| send(connection, 0, sent, message_ns));
    // With two workers.
    let work_us = message_ns as usize * sent * floods / 2_000;
    (0..20).for_each(|_| send(floods, random.within(0..=work_us) as u64 * 1_000, 1, 10_000));
    arrivals
}
