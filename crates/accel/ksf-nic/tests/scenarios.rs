//! What is planned, and what happens when the machine is not as expected. On a machine in memory.

use std::collections::BTreeSet;

use crate::common::{IFACE, Model, World, queue_file, wish};
use ksf_nic::{
    CpuSet, Finding, Group, Identity, Intent, Lack, NicError, NicReport, PlannedAction, Record, SavedSetting, Setting,
    TuningPlan,
};
use proptest::prelude::*;

const FLOWS: &str = "proc/sys/net/core/rps_sock_flow_entries";
const FLUSH: &str = "sys/class/net/eth0/gro_flush_timeout";

fn plan(world: &World, intent: Intent) -> TuningPlan {
    world.tuner().plan(IFACE, &wish(intent)).unwrap()
}

fn apply(world: &World, intent: Intent) -> NicReport {
    world.tuner().apply(IFACE, &wish(intent), false, |_| {}).unwrap()
}

/// What a plan does with the first setting of this name, and the value it wants.
fn item(plan: &TuningPlan, name: &str) -> (PlannedAction, String) {
    let item = plan.items.iter().find(|item| item.key.name() == name).unwrap_or_else(|| panic!("no {name}"));
    (item.action, item.wanted.clone().unwrap_or_default())
}

fn finding(report: &NicReport, name: &str) -> Finding {
    report.outcomes.iter().find(|outcome| outcome.key.name() == name).unwrap_or_else(|| panic!("no {name}")).finding
}

fn model(cpus: usize, queues: u32) -> Model {
    Model { cpus, queues: (queues, queues), ..Model::default() }
}

#[test]
fn masks_of_cpus_above_63_are_whole() {
    let world = World::new(model(128, 128));
    apply(&world, Intent::Throughput);
    assert_eq!(world.text(&queue_file("tx", 127, "xps_cpus")), "80000000,00000000,00000000,00000000");
    assert_eq!(world.text(&queue_file("tx", 64, "xps_cpus")), "1,00000000,00000000");
    let irq = |queue: u32| world.tuner().look(IFACE).unwrap().interrupts[queue as usize].number;
    assert_eq!(world.text(&format!("proc/irq/{}/smp_affinity", irq(100))), "10,00000000,00000000,00000000");
    // Fewer queues than CPUs: received packets are spread over all of them.
    let world = World::new(model(300, 8));
    apply(&world, Intent::Throughput);
    let all = CpuSet::from_mask(&world.text(&queue_file("rx", 7, "rps_cpus"))).unwrap();
    assert_eq!(all, CpuSet::first(300));
    let senders = CpuSet::from_mask(&world.text(&queue_file("tx", 7, "xps_cpus"))).unwrap();
    assert_eq!(senders.iter().take(3).collect::<Vec<_>>(), [7, 15, 23]);
}

#[test]
fn the_node_of_the_device_is_preferred() {
    let world = World::new(Model { node: vec![2, 3], ..model(4, 2) });
    let plan = plan(&world, Intent::Latency);
    assert_eq!((plan.node, plan.near_cpus.as_str(), plan.cpus.as_str()), (Some(0), "2-3", "0-3"));
    assert_eq!(item(&plan, "smp_affinity"), (PlannedAction::Change, "4".into()));
    // Two queues for the two CPUs nearby; the other CPUs send by them too.
    assert_eq!(item(&plan, "rps_cpus"), (PlannedAction::Holds, "0".into()));
    let masks: Vec<String> =
        plan.items.iter().filter(|item| item.key.name() == "xps_cpus").filter_map(|item| item.wanted.clone()).collect();
    assert_eq!(masks, ["5", "a"]);
    // A node none of whose CPUs may be used is no node to prefer.
    let mut far = wish(Intent::Latency);
    far.cpus = Some(CpuSet::first(2));
    assert_eq!(world.tuner().plan(IFACE, &far).unwrap().near_cpus, "0-1");
}

#[test]
fn the_mask_of_the_process_is_not_left() {
    let world = World::new(Model { offline: vec![5], ..model(8, 8) });
    world.put("proc/thread-self/status", "Cpus_allowed_list:\t2-6\n");
    assert_eq!(plan(&world, Intent::Latency).cpus, "2-4,6");
    for (cpus, outside) in [("0-3", "0-1"), ("5", "5"), ("9", "9")] {
        let mut wish = wish(Intent::Latency);
        wish.cpus = Some(CpuSet::from_list(cpus).unwrap());
        let error = world.tuner().plan(IFACE, &wish).unwrap_err().to_string();
        assert!(error.contains(&format!("CPUs {outside} cannot")) && error.contains("2-4,6"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Every mask stays inside, no CPU is without a queue to send by, and every queue's interrupt has a CPU.
    #[test]
    fn masks_stay_inside_and_cover(
        cpus in 1usize..300,
        queues in 1u32..80,
        offline in proptest::collection::btree_set(1usize..300, 0..40),
        node in proptest::collection::btree_set(0usize..300, 0..40),
        chosen in proptest::collection::btree_set(0usize..300, 1..40),
    ) {
        let inside = |set: &BTreeSet<usize>| set.iter().copied().filter(|cpu| *cpu < cpus).collect::<Vec<_>>();
        let (offline, node) = (inside(&offline), inside(&node));
        let world = World::new(Model { offline: offline.clone(), node, ..model(cpus, queues) });
        let mut wish = wish(Intent::Throughput);
        let chosen: Vec<usize> = inside(&chosen).into_iter().filter(|cpu| !offline.contains(cpu)).collect();
        wish.cpus = (!chosen.is_empty()).then(|| chosen.iter().copied().collect());
        let plan = world.tuner().plan(IFACE, &wish).unwrap();
        let allowed = CpuSet::from_list(&plan.cpus).unwrap();
        let mut senders = BTreeSet::new();
        for item in &plan.items {
            let name = item.key.name();
            let (Some(wanted), "smp_affinity" | "rps_cpus" | "xps_cpus") = (&item.wanted, name) else { continue };
            let mask = CpuSet::from_mask(wanted).unwrap();
            prop_assert!(mask.without(&allowed).is_empty(), "{name} {wanted}");
            prop_assert!(name == "rps_cpus" || !mask.is_empty(), "{}", item.key);
            if name == "smp_affinity" {
                prop_assert_eq!(mask.len(), 1);
            }
            if name == "xps_cpus" {
                senders.extend(mask.iter());
            }
        }
        if queues > 1 && allowed.len() > 1 {
            prop_assert_eq!(senders, allowed.iter().collect::<BTreeSet<_>>());
        }
    }
}

#[test]
fn intentions_differ_where_it_matters() {
    let world = World::new(model(4, 4));
    let (latency, throughput) = (plan(&world, Intent::Latency), plan(&world, Intent::Throughput));
    assert_eq!(item(&latency, "rx-usecs"), (PlannedAction::Change, "0".into()));
    assert_eq!(item(&latency, "gro_flush_timeout"), (PlannedAction::Holds, "0".into()));
    assert_eq!(item(&throughput, "adaptive-rx"), (PlannedAction::Change, "on".into()));
    assert_eq!(item(&throughput, "rx-usecs").0, PlannedAction::LeftAlone);
    assert_eq!(item(&throughput, "napi_defer_hard_irqs"), (PlannedAction::Change, "10".into()));
    assert_eq!(item(&throughput, "gro_flush_timeout"), (PlannedAction::Change, "20000".into()));
    assert_eq!(item(&throughput, "threaded").0, PlannedAction::LeftAlone);
    // Without adaptive coalescing a fixed delay.
    let plain = World::new(Model { adaptive: false, ..model(4, 4) });
    let throughput = plan(&plain, Intent::Throughput);
    assert_eq!(item(&throughput, "adaptive-rx").0, PlannedAction::NotSupported);
    assert_eq!(item(&throughput, "rx-usecs"), (PlannedAction::Change, "50".into()));
    // And without any, as on veth.
    let none = World::new(Model { coalescing: false, ..model(4, 4) });
    let throughput = plan(&none, Intent::Throughput);
    let usecs = throughput.items.iter().find(|item| item.key == Setting::RxUsecs).unwrap();
    assert_eq!((usecs.action, usecs.why.as_str()), (PlannedAction::NotSupported, "not supported by fakenic"));
}

#[test]
fn what_is_skipped_is_left_alone() {
    let world = World::new(Model { queues: (2, 4), ..Model::default() });
    let mut wish = wish(Intent::Throughput);
    wish.skip = Group::ALL.into_iter().collect();
    let plan = world.tuner().plan(IFACE, &wish).unwrap();
    assert_eq!(plan.changes().count(), 0, "{plan:#?}");
    assert!(world.tuner().apply(IFACE, &wish, false, |_| {}).unwrap().outcomes.is_empty());
    assert!(world.0.borrow().log.is_empty());
}

#[test]
fn flow_tables_are_shared_out_and_never_made_smaller() {
    let world = World::new(model(4, 3));
    apply(&world, Intent::Latency);
    assert_eq!(world.text(FLOWS), "32768");
    assert_eq!(world.text(&queue_file("rx", 2, "rps_flow_cnt")), "8192");
    let world = World::new(model(4, 4));
    world.put(FLOWS, "131072\n");
    world.put(&queue_file("rx", 0, "rps_flow_cnt"), "65536\n");
    apply(&world, Intent::Latency);
    assert_eq!(world.text(FLOWS), "131072");
    assert_eq!(world.text(&queue_file("rx", 0, "rps_flow_cnt")), "65536");
    assert_eq!(world.text(&queue_file("rx", 1, "rps_flow_cnt")), "32768");
}

#[test]
fn receive_cpu_selection_says_what_the_machine_can() {
    let steering = |world: &World| plan(world, Intent::Latency).steering;
    let both = steering(&World::new(model(4, 4)));
    assert!(both.on && both.why == "RFS, a table of 32768 flows", "{both:?}");
    assert!(steering(&World::new(model(4, 1))).on);
    let fixed = World::new(Model { ntuple: false, ..model(4, 4) });
    assert_eq!(item(&plan(&fixed, Intent::Latency), "ntuple-filters").0, PlannedAction::NotSupported);
    let one_cpu = steering(&World::new(model(1, 4)));
    assert!(!one_cpu.on && one_cpu.why == "there is one CPU");
    // As in a network namespace that is not the first.
    let inner = World::new(model(4, 4));
    inner.0.borrow_mut().files.remove(FLOWS);
    let plan = plan(&inner, Intent::Latency);
    assert!(!plan.steering.on && plan.steering.why.contains("initial network namespace"));
    assert_eq!(item(&plan, "rps_flow_cnt").0, PlannedAction::LeftAlone);
    assert_eq!(item(&plan, "ntuple-filters").0, PlannedAction::LeftAlone);

    // Verify tells what is, not what was planned.
    let world = World::new(model(4, 4));
    apply(&world, Intent::Latency);
    assert!(world.tuner().verify(IFACE).unwrap().steering.unwrap().on);
    world.put(FLOWS, "0\n");
    let report = world.tuner().verify(IFACE).unwrap();
    assert_eq!(finding(&report, "rps_sock_flow_entries"), Finding::Differs);
    let steering = report.steering.unwrap();
    assert!(!steering.on, "{steering:?}");
}

#[test]
fn transmit_queues_chosen_by_receive_queues_stay_so() {
    let world = World::new(model(4, 4));
    world.put(&queue_file("tx", 1, "xps_rxqs"), "2\n");
    let plan = plan(&world, Intent::Latency);
    assert!(plan.items.iter().filter(|item| item.key.name() == "xps_cpus").all(|item| item.why.contains("xps_rxqs")));
}

#[test]
fn what_somebody_else_set_is_left_alone_unless_forced() {
    let world = World::new(model(4, 4));
    let before = world.snapshot();
    apply(&world, Intent::Throughput);
    world.put(FLUSH, "777\n");
    world.put("sys/class/net/eth0/napi_defer_hard_irqs", "3\n");
    let report = world.tuner().verify(IFACE).unwrap();
    assert_eq!((report.count(Finding::Differs), finding(&report, "gro_flush_timeout")), (2, Finding::Differs));

    let report = world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(report.count(Finding::LeftAlone), 2, "{report:?}");
    assert_eq!(finding(&report, "gro_flush_timeout"), Finding::LeftAlone);
    assert_eq!(world.text(FLUSH), "777");
    assert_eq!(world.text(FLOWS), "0");
    // They stay on record, and nothing else does.
    let report = world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(report.outcomes.len(), 2);
    let report = world.tuner().rollback(IFACE, true).unwrap();
    assert_eq!(report.count(Finding::Done), 2);
    assert_eq!(world.snapshot(), before);
    assert!(matches!(world.tuner().rollback(IFACE, false), Err(NicError::NothingApplied { .. })));
}

#[test]
fn applying_again_goes_back_to_what_somebody_else_set() {
    let world = World::new(model(4, 4));
    apply(&world, Intent::Throughput);
    world.put(FLUSH, "777\n");
    apply(&world, Intent::Throughput);
    assert_eq!(world.text(FLUSH), "20000");
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(world.text(FLUSH), "777");
    assert_eq!(world.text("sys/class/net/eth0/napi_defer_hard_irqs"), "0");
}

#[test]
fn an_interrupted_apply_must_be_rolled_back_first() {
    let world = World::new(model(4, 4));
    world.fuel(Some(3));
    let report = world.tuner().apply(IFACE, &wish(Intent::Throughput), false, |_| {});
    assert!(matches!(report, Err(NicError::Record { .. })), "{report:?}");
    world.fuel(None);
    for result in [world.tuner().verify(IFACE), world.tuner().apply(IFACE, &wish(Intent::Throughput), false, |_| {})] {
        assert!(matches!(result, Err(NicError::Interrupted { what: "apply", .. })), "{result:?}");
    }
    world.tuner().rollback(IFACE, false).unwrap();
    apply(&world, Intent::Throughput);
}

#[test]
fn the_plan_is_announced_before_anything_changes() {
    let world = World::new(Model { queues: (1, 4), ..Model::default() });
    let mut announced = None;
    let look = |plan: &TuningPlan| announced = Some((plan.changes().count(), world.0.borrow().log.len()));
    world.tuner().apply(IFACE, &wish(Intent::Throughput), false, look).unwrap();
    let (changes, before) = announced.unwrap();
    assert!(changes > 3 && before == 0, "{changes} {before}");
}

#[test]
fn more_queues_bring_their_settings_with_them() {
    let world = World::new(Model { queues: (1, 8), ..Model::default() });
    world.put(&queue_file("rx", 0, "rps_cpus"), "8\n");
    let before = world.snapshot();
    let report = apply(&world, Intent::Throughput);
    assert_eq!(finding(&report, "channels"), Finding::Done);
    assert_eq!(world.0.borrow().channels, 4);
    assert_eq!(world.text(&queue_file("rx", 0, "rps_cpus")), "0");
    assert_eq!(world.text(&queue_file("rx", 3, "rps_flow_cnt")), "8192");
    assert_eq!(world.tuner().verify(IFACE).unwrap().count(Finding::Holds), report.outcomes.len());
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(world.snapshot(), before);

    // A driver that says no keeps its queues, and gets everything else.
    world.0.borrow_mut().refuse.insert("channels".into(), 16);
    let report = apply(&world, Intent::Throughput);
    assert_eq!(finding(&report, "channels"), Finding::Refused);
    assert_eq!(finding(&report, "rps_cpus"), Finding::Done);
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(world.snapshot(), before);
}

#[test]
fn a_refused_setting_does_not_stop_the_others() {
    let world = World::new(model(4, 4));
    let before = world.snapshot();
    let first = world.tuner().look(IFACE).unwrap().interrupts[0].number;
    world.0.borrow_mut().refuse.insert(format!("proc/irq/{first}/smp_affinity"), 5);
    world.0.borrow_mut().refuse.insert(FLUSH.into(), 95);
    let report = apply(&world, Intent::Throughput);
    assert_eq!(report.count(Finding::Refused), 2);
    let refused: Vec<&str> = report
        .outcomes
        .iter()
        .filter(|outcome| outcome.finding == Finding::Refused)
        .map(|outcome| outcome.detail.as_str())
        .collect();
    assert_eq!(refused, ["the kernel manages the affinity of this interrupt itself", "not supported by fakenic"]);
    // What was refused is not on record, so it is neither missed nor restored.
    assert_eq!(world.tuner().verify(IFACE).unwrap().count(Finding::Differs), 0);
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(world.snapshot(), before);
}

#[test]
fn a_restore_that_is_refused_stays_on_record() {
    let world = World::new(model(4, 4));
    let before = world.snapshot();
    apply(&world, Intent::Throughput);
    world.0.borrow_mut().refuse.insert(FLUSH.into(), 16);
    let report = world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!((report.count(Finding::Refused), finding(&report, "gro_flush_timeout")), (1, Finding::Refused));
    world.0.borrow_mut().refuse.clear();
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(world.snapshot(), before);
}

#[test]
fn the_default_route_is_not_touched_by_accident() {
    let route = |iface: &str| {
        format!("Iface\tDestination\tGateway\tFlags\n{iface}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
    };
    let world = World::new(model(4, 4));
    let refuses = || {
        let result = world.tuner().apply(IFACE, &wish(Intent::Latency), false, |_| panic!("announced"));
        let error = result.unwrap_err();
        assert!(matches!(error, NicError::DefaultRoute { .. }), "{error}");
        assert!(world.0.borrow().log.is_empty());
        error.to_string()
    };
    world.put("proc/thread-self/net/route", &route(IFACE));
    refuses();
    // A bond on a VLAN on it.
    world.put("proc/thread-self/net/route", &route("bond0"));
    world.put("sys/class/net/eth0/upper_eth0.7/", "");
    world.put("sys/class/net/eth0.7/upper_bond0/", "");
    assert!(refuses().contains("of bond0"));
    world.put("proc/thread-self/net/route", &route("eth9"));
    let zero = "0".repeat(32);
    world.put(
        "proc/thread-self/net/ipv6_route",
        &format!("{zero} 00 {zero} 00 {zero} 00000400 00000001 00000000 00000003 {IFACE}\n"),
    );
    refuses();
    world.tuner().apply(IFACE, &wish(Intent::Latency), true, |_| {}).unwrap();
    // The way back is always open.
    world.tuner().rollback(IFACE, false).unwrap();
}

#[test]
fn irqbalance_is_told_apart_and_left_running() {
    let world = World::new(model(4, 4));
    world.put("proc/812/comm", "irqbalance\n");
    world.put("proc/812/cmdline", "/usr/sbin/irqbalance\0--foreground\0");
    let plan_1 = plan(&world, Intent::Latency);
    let irqs: Vec<_> = plan_1.items.iter().filter(|item| item.key.group() == Group::Irq).collect();
    assert_eq!(irqs.len(), 4);
    assert!(
        irqs.iter().all(|item| item.action == PlannedAction::LeftAlone && item.why.contains("pid 812")),
        "{irqs:?}"
    );
    let number = world.tuner().look(IFACE).unwrap().interrupts[3].number;
    assert!(plan_1.notes.iter().any(|note| note.contains(&format!("--banirq={number}"))), "{:?}", plan_1.notes);
    world.put("proc/812/cmdline", "/usr/sbin/irqbalance\0--policyscript=/etc/ksf-irqs\0");
    assert_eq!(item(&plan(&world, Intent::Latency), "smp_affinity").0, PlannedAction::Change);
}

#[test]
fn a_read_only_tree_is_told_before_anything_changes() {
    let world = World::new(Model { queues: (1, 4), ..Model::default() });
    world.0.borrow_mut().read_only = true;
    let error = world.tuner().apply(IFACE, &wish(Intent::Latency), false, |_| {}).unwrap_err();
    assert!(matches!(error, NicError::ReadOnly { .. }) && error.is_rights(), "{error}");
    assert!(world.0.borrow().log.is_empty());
    world.0.borrow_mut().read_only = false;
    apply(&world, Intent::Latency);
    world.0.borrow_mut().read_only = true;
    world.0.borrow_mut().log.clear();
    assert!(matches!(world.tuner().rollback(IFACE, false), Err(NicError::ReadOnly { .. })));
    assert!(world.0.borrow().log.is_empty());
}

/// The record of another interface that relies on the flow table.
fn second(world: &World, old: &str, new: &str) -> Record {
    let mut record: Record = world.0.borrow().records["eth0.1"].clone();
    record.iface = "eth1".into();
    record.settings = vec![SavedSetting::new(Setting::SockFlows, old, Some(new))];
    world.0.borrow_mut().records.insert("eth1.1".into(), record.clone());
    record
}

#[test]
fn what_interfaces_share_is_restored_by_the_last() {
    // The other one came later, and found what was set for this one.
    let world = World::new(model(4, 4));
    apply(&world, Intent::Latency);
    second(&world, "32768\n", "32768");
    let report = world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(finding(&report, "rps_sock_flow_entries"), Finding::HandedOver);
    assert_eq!(world.text(FLOWS), "32768");
    assert_eq!(world.0.borrow().records["eth1.1"].settings[0].old, "0\n");
    // The other one came first, and knows by itself.
    apply(&world, Intent::Latency);
    assert_eq!(world.0.borrow().records["eth0.1"].entry(&Setting::SockFlows).unwrap().old, "32768\n");
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(
        (world.text(FLOWS), world.0.borrow().records["eth1.1"].settings[0].old.as_str()),
        ("32768".into(), "0\n")
    );
    // It was of another boot: nobody relies on it.
    world.0.borrow_mut().records.clear();
    world.put(FLOWS, "0\n");
    apply(&world, Intent::Latency);
    let mut stale = second(&world, "32768\n", "32768");
    stale.place.boot = "boot-0".into();
    world.0.borrow_mut().records.insert("eth1.1".into(), stale);
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(world.text(FLOWS), "0");
}

#[test]
fn another_interface_of_the_same_name_is_not_touched() {
    let world = World::new(model(4, 4));
    apply(&world, Intent::Throughput);
    let set_index = |index: u32| {
        let identity = Identity { ifindex: index, address: "02:00:00:00:00:01".into(), kind: String::new() };
        world.0.borrow_mut().identity = Some(identity);
        world.put("sys/class/net/eth0/ifindex", &format!("{index}\n"));
    };
    set_index(9);
    for result in [
        world.tuner().verify(IFACE),
        world.tuner().rollback(IFACE, false),
        world.tuner().apply(IFACE, &wish(Intent::Latency), false, |_| {}),
    ] {
        assert!(matches!(result, Err(NicError::OtherInterface { .. })), "{result:?}");
    }
    let report = world.tuner().rollback(IFACE, true).unwrap();
    assert_eq!(finding(&report, "gro_flush_timeout"), Finding::Gone);
    assert_eq!((world.text(FLUSH).as_str(), world.text(FLOWS).as_str()), ("20000", "0"));
    assert!(world.0.borrow().records.is_empty());
}

#[test]
fn an_interface_that_is_gone_leaves_only_what_is_shared() {
    let world = World::new(model(4, 4));
    apply(&world, Intent::Throughput);
    world.0.borrow_mut().identity = None;
    world.0.borrow_mut().files.retain(|path, _| !path.starts_with("sys/class/net/eth0"));
    let report = world.tuner().rollback(IFACE, false).unwrap();
    assert!(report.notes[0].contains("gone"), "{:?}", report.notes);
    assert_eq!(world.text(FLOWS), "0");
    assert!(world.0.borrow().records.is_empty());
}

#[test]
fn records_end_with_the_boot() {
    let world = World::new(model(4, 4));
    apply(&world, Intent::Throughput);
    let booted = World::new(model(4, 4));
    booted.put("proc/sys/kernel/random/boot_id", "boot-2\n");
    booted.0.borrow_mut().records = world.0.borrow().records.clone();
    assert!(matches!(booted.tuner().rollback(IFACE, true), Err(NicError::NothingApplied { .. })));
    let before = World::new(model(4, 4));
    before.put("proc/sys/kernel/random/boot_id", "boot-2\n");
    apply(&booted, Intent::Throughput);
    booted.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(booted.snapshot(), before.snapshot());
}

#[test]
fn the_files_of_another_network_namespace_are_refused() {
    let world = World::new(model(4, 4));
    world.put("sys/class/net/eth0/address", "02:00:00:00:00:02\n");
    let error = world.tuner().plan(IFACE, &wish(Intent::Latency)).unwrap_err();
    assert!(matches!(error, NicError::OtherNamespace { .. }), "{error}");
    world.put("sys/class/net/eth0/address", "02:00:00:00:00:01\n");
    world.put("sys/class/net/eth0/ifindex", "3\n");
    assert!(matches!(world.tuner().plan(IFACE, &wish(Intent::Latency)), Err(NicError::OtherNamespace { .. })));
    world.0.borrow_mut().identity = None;
    assert!(matches!(world.tuner().plan(IFACE, &wish(Intent::Latency)), Err(NicError::NoInterface { .. })));
}

#[test]
fn interrupts_are_found_again_by_their_names() {
    let world = World::new(model(4, 4));
    let before = world.snapshot();
    apply(&world, Intent::Latency);
    // The driver was reset: other numbers, the same names and affinities.
    let moved: Vec<(String, String)> = world
        .0
        .borrow()
        .files
        .iter()
        .filter(|(path, _)| path.starts_with("proc/irq/4"))
        .map(|(path, text)| (path.replacen("proc/irq/4", "proc/irq/9", 1), text.clone()))
        .collect();
    world.0.borrow_mut().files.retain(|path, _| !path.starts_with("proc/irq/4"));
    moved.iter().for_each(|(path, text)| world.put(path, text));
    let report = world.tuner().verify(IFACE).unwrap();
    assert_eq!(report.count(Finding::Holds), report.outcomes.len());
    world.tuner().rollback(IFACE, false).unwrap();
    assert_eq!(world.snapshot(), before);
}

#[test]
fn an_unreadable_value_is_no_reason_to_write() {
    let world = World::new(model(4, 4));
    world.0.borrow_mut().files.remove(FLUSH);
    let facts = world.tuner().look(IFACE).unwrap();
    assert_eq!(facts.value(&Setting::GroFlush), Err(Lack::NotSupported));
    assert_eq!(item(&plan(&world, Intent::Throughput), "gro_flush_timeout").0, PlannedAction::NotSupported);
}
