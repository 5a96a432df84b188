//! Thousands of worlds, none of which may go wrong. `KSF_SIM_SEED=17` runs that one alone; `KSF_SIM_COUNT` sets how
//! many (they start at seed 0, so a pass is a pass everywhere).

use ksf::CloseReason;
use ksf_sim::{SimReport, simulate};
use ksf_test::effort;

/// In `make test`; ten times as many in `make soak`.
const COUNT: u64 = 1000;

/// No framing of today has a header without end; the others are for a shard to give.
const NOT_SIMULATED: [CloseReason; 3] = [CloseReason::EndlessHeader, CloseReason::KernelHalf, CloseReason::Stopped];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

#[test]
fn every_seed_agrees_with_the_ideal() {
    if let Some(seed) = number("KSF_SIM_SEED") {
        match simulate(seed) {
            Ok(report) => println!("seed {seed}: {report:#?}"),
            Err(failure) => panic!("{failure}"),
        }
        return;
    }
    let mut sum = SimReport::default();
    let count = number("KSF_SIM_COUNT").unwrap_or(effort(COUNT, 10 * COUNT));
    for seed in 0..count {
        let report = match simulate(seed) {
            Ok(report) => report,
            Err(failure) => panic!("{failure}\nreproduce: KSF_SIM_SEED={seed} cargo test -p ksf-sim --test seeds"),
        };
        sum.messages += report.messages;
        sum.replies += report.replies;
        sum.too_late += report.too_late;
        sum.stalls += report.stalls;
        sum.waited += report.waited;
        sum.gave_way += report.gave_way;
        sum.overfull += report.overfull;
        sum.lent += report.lent;
        sum.file_reads += report.file_reads;
        sum.starved += report.starved;
        sum.told += report.told;
        sum.gated += report.gated;
        sum.logs_lost += report.logs_lost;
        for (total, one) in sum.ends.iter_mut().zip(report.ends) {
            *total += one;
        }
    }
    println!("{sum:#?}");
    // A world in which nothing happens agrees with every ideal.
    for (reason, count) in CloseReason::ALL.iter().zip(sum.ends) {
        assert!(count > 0 || NOT_SIMULATED.contains(reason), "{reason:?} never ended a connection");
    }
    // `wanted` in a thousand worlds.
    let enough = |seen: usize, wanted: usize| seen * 1000 > wanted * count as usize;
    assert!(enough(sum.messages, 10_000) && enough(sum.replies, 10_000), "too little happened: {sum:?}");
    assert!(
        enough(sum.too_late, 100) && enough(sum.stalls, 100) && enough(sum.waited, 100) && enough(sum.overfull, 10),
        "too little went wrong: {sum:?}"
    );
    assert!(enough(sum.gave_way, 2_500), "hardly any connection gave way to others: {sum:?}");
    assert!(enough(sum.lent, 2_500), "hardly anything was received straight into a message: {sum:?}");
    assert!(enough(sum.file_reads, 250), "hardly any reply was read from a file: {sum:?}");
    assert!(enough(sum.told, 2_500), "backends were hardly asked: {sum:?}");
    assert!(enough(sum.gated, 250) && enough(sum.logs_lost, 12), "hardly any reply waited for a log: {sum:?}");
    assert_eq!(sum.starved, 0, "so many slots were kept that none was left to receive into");
}

#[test]
fn a_seed_is_a_complete_description() {
    for seed in 0..20 {
        assert_eq!(simulate(seed).unwrap(), simulate(seed).unwrap());
    }
    let traces: std::collections::HashSet<_> = (0..20).map(|seed| simulate(seed).unwrap().trace).collect();
    assert!(traces.len() > 15, "different seeds give different runs");
}
