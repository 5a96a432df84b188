//! Plan, apply and roll back give the identical machine, whatever it is like and wherever it is killed.

use std::collections::BTreeSet;

use crate::common::{IFACE, Model, World, queue_file, wish};
use ksf_nic::{Finding, Group, Intent, NicError};
use proptest::prelude::*;

const CPUS: [usize; 6] = [1, 2, 64, 65, 128, 300];

fn models() -> impl Strategy<Value = Model> {
    let queues = prop_oneof![4 => 1u32..=9, 1 => 10u32..=512];
    (
        proptest::sample::select(CPUS.to_vec()),
        queues,
        prop_oneof![2 => Just(0u32), 2 => 1u32..=4, 1 => 5u32..=500],
        any::<(bool, bool, bool, bool, bool)>(),
        proptest::collection::btree_set(0usize..300, 0..6),
        1u32..4,
    )
        .prop_map(|(cpus, queues, more, (adaptive, coalescing, ntuple, irqs, node), offline, rounds)| Model {
            cpus,
            // CPU 0 stays.
            offline: offline.into_iter().filter(|cpu| *cpu > 0 && *cpu < cpus).collect(),
            node: if node { (0..cpus.div_ceil(2)).collect() } else { vec![] },
            queues: (queues, (queues + more).min(512)),
            adaptive,
            coalescing,
            ntuple,
            irqs,
            rounds,
        })
}

fn intents() -> impl Strategy<Value = Intent> {
    prop_oneof![Just(Intent::Latency), Just(Intent::Throughput)]
}

/// A machine on which somebody has set things already.
fn seasoned(model: Model, seed: u32) -> World {
    let world = World::new(model);
    let rx = world.0.borrow().channels;
    let cpus = world.0.borrow().model.cpus;
    let mask = ksf_nic::CpuSet::from_iter([seed as usize % cpus]).mask();
    world.put(&queue_file("rx", seed % rx, "rps_cpus"), &(mask + "\n"));
    world.put(&queue_file("rx", seed % rx, "rps_flow_cnt"), "64\n");
    world.put("proc/sys/net/core/rps_sock_flow_entries", ["0\n", "1024\n", "65536\n"][seed as usize % 3]);
    world.put(&format!("sys/class/net/{IFACE}/gro_flush_timeout"), "999\n");
    world.0.borrow_mut().adaptive = seed.is_multiple_of(2);
    world
}

/// How many changes an apply makes when nothing stops it.
fn changes_of_apply(world: &World, intent: Intent) -> usize {
    let before = world.0.borrow().log.len();
    world.tuner().apply(IFACE, &wish(intent), false, |_| {}).unwrap();
    world.0.borrow().log.len() - before
}

fn rollback_fully(world: &World) {
    world.fuel(None);
    match world.tuner().rollback(IFACE, false) {
        Ok(report) => {
            let bad: Vec<_> = report.outcomes.iter().filter(|outcome| !outcome.finding.is_good()).collect();
            assert!(bad.iter().all(|outcome| outcome.finding == Finding::Gone), "{bad:?}");
        }
        // It was killed before anything was on record, or when all was restored.
        Err(NicError::NothingApplied { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn apply_and_rollback_give_the_identical_machine(model in models(), intent in intents(), seed in 0u32..1000) {
        let world = seasoned(model, seed);
        let before = world.snapshot();
        let report = world.tuner().apply(IFACE, &wish(intent), false, |_| {}).unwrap();
        prop_assert!(report.outcomes.iter().all(|outcome| outcome.finding.is_good()), "{:?}", report);
        if let Ok(report) = world.tuner().verify(IFACE) {
            prop_assert!(report.outcomes.iter().all(|outcome| outcome.finding == Finding::Holds), "{:?}", report);
        }
        // Nothing is left to do, so a second apply changes nothing, but for a value that the driver rounds each time.
        if world.0.borrow().model.rounds == 1 {
            prop_assert_eq!(changes_of_apply(&world, intent), 0);
        }
        rollback_fully(&world);
        prop_assert_eq!(world.snapshot(), before);
    }

    #[test]
    fn any_crash_of_apply_is_rolled_back(model in models(), intent in intents(), seed in 0u32..1000, at in 0.0..1.0f64) {
        let rehearsal = seasoned(model.clone(), seed);
        let changes = changes_of_apply(&rehearsal, intent);
        let world = seasoned(model, seed);
        let before = world.snapshot();
        world.fuel(Some((at * changes as f64) as usize));
        let _ = world.tuner().apply(IFACE, &wish(intent), false, |_| {});
        rollback_fully(&world);
        prop_assert_eq!(world.snapshot(), before, "{:#?}", world.0.borrow().log);
    }

    #[test]
    fn any_crash_of_rollback_is_rolled_back(model in models(), intent in intents(), seed in 0u32..1000, at in 0.0..1.0f64) {
        let world = seasoned(model, seed);
        let before = world.snapshot();
        let changes = changes_of_apply(&world, intent);
        world.fuel(Some((at * (changes + 2) as f64) as usize));
        let _ = world.tuner().rollback(IFACE, false);
        rollback_fully(&world);
        prop_assert_eq!(world.snapshot(), before, "{:#?}", world.0.borrow().log);
    }

    #[test]
    fn two_intentions_one_rollback(model in models(), seed in 0u32..1000, at in 0.0..1.2f64) {
        let world = seasoned(model, seed);
        let before = world.snapshot();
        let mut first = wish(Intent::Throughput);
        first.skip = BTreeSet::from([Group::Queues]);
        world.tuner().apply(IFACE, &first, false, |_| {}).unwrap();
        world.fuel(Some((at * 60.0) as usize));
        let _ = world.tuner().apply(IFACE, &wish(Intent::Latency), false, |_| {});
        rollback_fully(&world);
        prop_assert_eq!(world.snapshot(), before, "{:#?}", world.0.borrow().log);
    }
}

/// Small machines with every crash point, not a sample of them.
#[test]
fn every_single_crash_point() {
    for cpus in [1, 2, 65] {
        for queues in [(1, 1), (1, 4), (3, 3), (2, 6)] {
            for intent in [Intent::Latency, Intent::Throughput] {
                let model = Model { cpus, queues, rounds: 4, ..Model::default() };
                let changes = changes_of_apply(&seasoned(model.clone(), 2), intent);
                assert!(changes > 2 || cpus == 1, "{cpus} {queues:?}");
                for at in 0..=changes {
                    for again in 0..=changes + 3 {
                        let world = seasoned(model.clone(), 2);
                        let before = world.snapshot();
                        world.fuel(Some(at));
                        let _ = world.tuner().apply(IFACE, &wish(intent), false, |_| {});
                        world.fuel(Some(again));
                        let _ = world.tuner().rollback(IFACE, false);
                        rollback_fully(&world);
                        assert_eq!(
                            world.snapshot(),
                            before,
                            "crash at {at}, again at {again}: {:#?}",
                            world.0.borrow().log
                        );
                    }
                }
            }
        }
    }
}

/// The same when the machine is set for something else already: a killed apply leaves old, earlier and new values.
#[test]
fn every_single_crash_point_of_a_second_apply() {
    for (cpus, queues) in [(1, (1, 1)), (2, (2, 2)), (65, (2, 6))] {
        for (first, then) in [(Intent::Latency, Intent::Throughput), (Intent::Throughput, Intent::Latency)] {
            let prepared = || {
                let world = seasoned(Model { cpus, queues, ..Model::default() }, 2);
                let before = world.snapshot();
                world.tuner().apply(IFACE, &wish(first), false, |_| {}).unwrap();
                (world, before)
            };
            let changes = changes_of_apply(&prepared().0, then);
            assert!(changes > 2);
            for at in 0..=changes {
                let (world, before) = prepared();
                world.fuel(Some(at));
                let _ = world.tuner().apply(IFACE, &wish(then), false, |_| {});
                rollback_fully(&world);
                assert_eq!(world.snapshot(), before, "crash at {at}: {:#?}", world.0.borrow().log);
            }
        }
    }
}
