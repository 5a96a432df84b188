//! `ksf accel nic` on the running kernel: veth pairs in a network namespace, with a /sys and a /run of the test's own.
//! Needs root. The library's tests have the machines that are not here: interrupts, many queues, crashes.

use crate::support;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::{Folder, ksf_for_all, private_network_and_run, run, stderr, stdout, succeeds};

/// A pair of veth with four queues of which two are in use; `nic1` is the other end.
const PAIR: &str = "ip link add nic0 numtxqueues 4 numrxqueues 4 type veth peer name nic1 numtxqueues 2 numrxqueues 2; \
                    ip link set nic0 up; ip link set nic1 up; ip addr add 192.0.2.1/24 dev nic0";

fn shell(script: &str) {
    succeeds(&["sh", "-ec", script]);
}

/// None: no root, skip.
fn veth() -> Option<()> {
    private_network_and_run()?;
    shell(PAIR);
    // A sysfs shows the network namespace it was mounted in.
    shell("mount -t sysfs sysfs /sys");
    Some(())
}

/// Every setting of nic0 in /sys that can be read.
fn settings() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut take = |path: &Path| {
        if let Ok(text) = fs::read_to_string(path) {
            all.insert(path.display().to_string(), text);
        }
    };
    for name in ["napi_defer_hard_irqs", "gro_flush_timeout", "threaded"] {
        take(&Path::new("/sys/class/net/nic0").join(name));
    }
    for queue in fs::read_dir("/sys/class/net/nic0/queues").unwrap().map(Result::unwrap) {
        for name in ["rps_cpus", "rps_flow_cnt", "xps_cpus", "xps_rxqs"] {
            take(&queue.path().join(name));
        }
    }
    all
}

/// Runs `ksf accel nic ARGS` and expects an exit status.
fn nic(args: &[&str], status: i32) -> Output {
    let output = run(&[&["accel", "nic"], args].concat());
    assert_eq!(output.status.code(), Some(status), "{args:?}: {}{}", stdout(&output), stderr(&output));
    output
}

/// The one line on stderr of a run that ends with a status.
fn says(args: &[&str], status: i32) -> String {
    let text = stderr(&nic(args, status));
    assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
    assert!(text.starts_with("ksf: "), "{args:?}: {text}");
    text
}

fn put(name: &str, value: &str) {
    fs::write(Path::new("/sys/class/net/nic0").join(name), value).unwrap();
}

fn value(name: &str) -> String {
    fs::read_to_string(Path::new("/sys/class/net/nic0").join(name)).unwrap().trim().to_owned()
}

#[test]
fn settings_are_applied_verified_and_restored() {
    let Some(()) = veth() else { return };
    put("gro_flush_timeout", "4321");
    put("queues/rx-0/rps_cpus", "1");
    let before = settings();
    let plan = stdout(&nic(&["plan", "nic0"], 0));
    assert!(plan.starts_with("nic0 (veth), for throughput"), "{plan}");
    assert!(plan.contains("not supported by veth") && plan.contains("fixed off by veth"), "{plan}");
    assert!(plan.contains("receive CPU selection: no"), "{plan}");
    assert_eq!(settings(), before, "planning changed something");
    assert!(!Path::new("/run/ksf").exists());

    let applied = stdout(&nic(&["apply", "nic0"], 0));
    assert!(applied.find("change ").unwrap() < applied.find("apply nic0").unwrap(), "{applied}");
    assert_eq!((value("napi_defer_hard_irqs"), value("gro_flush_timeout")), ("10".into(), "20000".into()));
    assert!(stdout(&nic(&["verify", "nic0"], 0)).contains("holds"));
    let rolled_back = stdout(&nic(&["rollback", "nic0"], 0));
    assert!(rolled_back.contains("done"), "{rolled_back}");
    assert_eq!(settings(), before);
    assert!(!Path::new("/run/ksf").exists(), "a record is left behind");
    assert!(says(&["rollback", "nic0"], 69).contains("nothing is recorded for nic0"));
    assert!(says(&["verify", "nic0"], 69).contains("nothing is recorded for nic0"));
}

#[test]
fn queues_are_added_and_taken_back() {
    let Some(()) = veth() else { return };
    let Some(_) = ksf_test::two_cpus_or_skip() else { return };
    shell("ethtool -L nic0 rx 1 tx 1");
    put("queues/tx-0/xps_cpus", "2");
    let before = settings();
    let applied = stdout(&nic(&["apply", "nic0", "--cpus", "0-1"], 0));
    assert!(applied.contains("rx 1 tx 1 combined 0 -> rx 2 tx 2 combined 0"), "{applied}");
    assert!(Path::new("/sys/class/net/nic0/queues/rx-1").exists());
    assert_eq!((value("queues/tx-0/xps_cpus"), value("queues/tx-1/xps_cpus")), ("1".into(), "2".into()));
    nic(&["verify", "nic0"], 0);
    nic(&["rollback", "nic0"], 0);
    assert_eq!(settings(), before);
    assert!(!Path::new("/run/ksf").exists());
}

#[test]
fn a_setting_the_driver_refuses_is_named() {
    let Some(()) = veth() else { return };
    let before = settings();
    // veth gets its NAPI with an XDP program only; until then it has no threads to give.
    let output = nic(&["apply", "nic0", "--threaded-napi", "on"], 69);
    let (out, err) = (stdout(&output), stderr(&output));
    assert!(out.lines().any(|line| line.contains("refused") && line.contains("not supported by veth")), "{out}");
    assert!(err.contains("1 of ") && err.contains("refused on nic0"), "{err}");
    nic(&["verify", "nic0"], 0);
    nic(&["rollback", "nic0"], 0);
    assert_eq!(settings(), before);
}

#[test]
fn what_somebody_else_changed_is_left_alone_unless_forced() {
    let Some(()) = veth() else { return };
    let before = settings();
    nic(&["apply", "nic0"], 0);
    put("gro_flush_timeout", "777");
    assert!(says(&["verify", "nic0"], 1).contains("1 of "));
    let text = says(&["rollback", "nic0"], 1);
    // How many there are depends on the CPUs.
    assert!(text.contains("ksf: 1 of ") && text.contains(" settings of nic0 left alone"), "{text}");
    assert!(text.contains("--force"), "{text}");
    assert_eq!((value("gro_flush_timeout"), value("napi_defer_hard_irqs")), ("777".into(), "0".into()));
    nic(&["rollback", "nic0", "--force"], 0);
    assert_eq!(settings(), before);
    assert!(!Path::new("/run/ksf").exists());
}

#[test]
fn the_default_route_needs_a_yes() {
    let Some(()) = veth() else { return };
    shell("ip route add default via 192.0.2.2");
    let before = settings();
    let text = says(&["apply", "nic0"], 64);
    assert!(text.contains("nic0 carries the default route") && text.contains("--yes"), "{text}");
    assert_eq!(settings(), before);
    nic(&["plan", "nic0"], 0);
    nic(&["apply", "nic0", "--yes"], 0);
    nic(&["rollback", "nic0"], 0);
    // Not its own route, but that of the bridge it is a port of.
    shell("ip route del default; ip link add br0 type bridge; ip link set br0 up; ip link set nic0 master br0");
    shell("ip addr add 198.51.100.1/24 dev br0; ip route add default via 198.51.100.2");
    assert!(says(&["apply", "nic0"], 64).contains("of br0"));
}

#[test]
fn a_container_says_so_in_one_line() {
    let Some(()) = veth() else { return };
    nic(&["apply", "nic0"], 0);
    let before = settings();
    shell("mount -o remount,bind,ro /sys");
    for args in [&["apply", "nic0", "--for", "latency"], &["rollback", "nic0"][..]] {
        let text = says(args, 77);
        assert!(text.contains("read-only, as in a container") && text.contains("nothing was changed"), "{text}");
    }
    assert_eq!(settings(), before);
    // Looking needs no rights to write.
    nic(&["plan", "nic0"], 0);
    nic(&["verify", "nic0"], 0);
    shell("mount -o remount,bind,rw /sys");
    nic(&["rollback", "nic0"], 0);
}

#[test]
fn without_rights_nothing_is_changed() {
    let Some(()) = veth() else { return };
    let folder = Folder::new();
    let copy = ksf_for_all(&folder);
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new(&copy);
        command.args(["accel", "nic"]).args(args).uid(65534).gid(65534).current_dir("/").output().unwrap()
    };
    let plan = as_nobody(&["plan", "nic0"]);
    assert_eq!(plan.status.code(), Some(0), "{}", stderr(&plan));
    let apply = as_nobody(&["apply", "nic0"]);
    let text = stderr(&apply);
    assert_eq!((apply.status.code(), text.lines().count()), (Some(77), 1), "{text}");
    assert!(text.contains("not permitted to change /sys/class/net/nic0/") && text.contains("CAP_NET_ADMIN"), "{text}");
}

#[test]
fn the_sysfs_of_another_network_namespace_is_not_touched() {
    let Some(()) = support::private_network_and_run() else { return };
    // /sys still shows the namespace of before.
    shell(PAIR);
    let text = says(&["apply", "nic0"], 69);
    assert!(text.contains("another network namespace") && text.contains("mount a fresh sysfs"), "{text}");
}

#[test]
fn an_interface_that_came_back_is_not_the_same() {
    let Some(()) = veth() else { return };
    nic(&["apply", "nic0"], 0);
    shell(&format!("ip link del nic0; {PAIR}"));
    let before = settings();
    assert!(says(&["verify", "nic0"], 69).contains("another interface that was named nic0"));
    assert!(says(&["rollback", "nic0"], 69).contains("--force"));
    nic(&["rollback", "nic0", "--force"], 0);
    assert_eq!(settings(), before);
    nic(&["apply", "nic0"], 0);
    // Gone for good: the record goes, too.
    shell("ip link del nic0");
    assert!(stdout(&nic(&["rollback", "nic0"], 0)).contains("nic0 is gone"));
    assert!(!Path::new("/run/ksf").exists());
}

#[test]
fn documents_are_as_documented() {
    let Some(()) = veth() else { return };
    let documented = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/nic.md")).unwrap();
    let documents = |args: &[&str]| -> Vec<serde_json::Value> {
        let text = stdout(&nic(args, 0));
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
    };
    let mut all = documents(&["plan", "nic0", "--json"]);
    assert_eq!(all.len(), 1);
    // The plan comes before the result.
    let applied = documents(&["apply", "nic0", "--json"]);
    assert_eq!(applied.iter().map(|document| &document["document"]).collect::<Vec<_>>(), ["plan", "apply"]);
    all.extend(applied);
    all.extend(documents(&["verify", "nic0", "--json"]));
    all.extend(documents(&["rollback", "nic0", "--json"]));
    for document in &all {
        assert_eq!(document["schema"], "ksf-nic/2");
        let parts = ["items", "outcomes"].iter().flat_map(|part| document[part].as_array().into_iter().flatten());
        let objects = std::iter::once(document).chain(parts).chain(document.get("steering"));
        for key in objects.filter_map(|object| object.as_object()).flat_map(|object| object.keys()) {
            assert!(documented.contains(&format!("`{key}`")), "the field {key} is not documented");
        }
        for name in ["setting", "action", "finding"] {
            let parts = ["items", "outcomes"].iter().flat_map(|part| document[part].as_array().into_iter().flatten());
            for word in parts.filter_map(|part| part.get(name)?.as_str()) {
                assert!(documented.contains(&format!("`{word}`")), "the {name} {word} is not documented");
            }
        }
    }
}

#[test]
fn mistakes_are_one_line() {
    for (args, status, part) in [
        (&["plan", "no/such"][..], 65, "cannot be the name"),
        (&["plan", "no-such-nic"], 69, "no interface no-such-nic"),
        (&["plan", "lo", "--cpus", "4000"], 65, "CPUs 4000 cannot be used"),
        (&["plan", "lo", "--skip", "all"], 64, "ksf accel nic plan --help"),
        (&["plan"], 64, "IFACE"),
        (&[], 64, "no command"),
    ] {
        let text = says(args, status);
        assert!(text.contains(part), "{args:?}: {text}");
    }
}

/// Devices with interrupts, and the flow table of the initial network namespace: a machine of its own, with a NIC that
/// has coalescing (e1000e) and one that has a queue and an interrupt per CPU (vmxnet3).
const DEVICES: &str = r#"
show() {
    for file in /proc/sys/net/core/rps_sock_flow_entries /sys/class/net/eth*/queues/*/*ps_* \
        /sys/class/net/eth*/gro_flush_timeout /sys/class/net/eth*/napi_defer_hard_irqs /proc/irq/*/smp_affinity; do
        # Some cannot be read: a device with one queue has no xps_cpus. The shell reads byte by byte, which a sysctl
        # answers with its first digit alone.
        echo "$file $(cat "$file" 2>/dev/null || true)"
    done
    ethtool -c eth0
    ethtool -c eth1 || true
}
mkdir -p /run
for nic in eth0 eth1; do ip link set $nic up; done
echo BEFORE; show
echo PLAN eth0; ksf accel nic plan eth0 --for latency
for intent in latency throughput; do
    for nic in eth0 eth1; do
        ksf accel nic apply $nic --for $intent --json
    done
done
for nic in eth0 eth1; do ksf accel nic verify $nic --json; done
for nic in eth0 eth1; do ksf accel nic rollback $nic --json; done
echo AFTER; show
echo END
"#;

#[test]
fn devices_with_interrupts_come_back_as_they_were() {
    let Some(_turn) = ksf_lab::turn() else { return };
    let mut lab = ksf_lab::Lab::script(DEVICES).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf").cpus(4);
    for tool in ["ip", "ethtool", "mkdir", "cat"] {
        lab = lab.tool(tool);
    }
    lab = lab.module("e1000e").module("vmxnet3").device("e1000e,romfile=").device("vmxnet3,romfile=");
    let output = lab.run().unwrap().checked().unwrap();
    let between = |from: &str, to: &str| {
        let (_, rest) = output.split_once(from).unwrap_or_else(|| panic!("no {from} in {output}"));
        rest.split_once(to).unwrap_or_else(|| panic!("no {to} in {output}")).0.to_owned()
    };
    assert_eq!(between("BEFORE\n", "PLAN"), between("AFTER\n", "END"), "{output}");
    assert!(between("BEFORE\n", "PLAN").contains("rps_sock_flow_entries 0\n"), "{output}");
    // The interrupt of the link is of no queue.
    assert_eq!(between("PLAN eth0\n", "{").matches("(eth0").count(), 2, "{output}");
    let documents = output
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|error| panic!("{error}: {line}")));
    let documents: Vec<_> = documents.collect();
    let results = |name: &str, iface: &str| -> Vec<serde_json::Value> {
        let of = documents.iter().filter(|document| document["document"] == name && document["iface"] == iface);
        of.flat_map(|document| document["outcomes"].as_array().unwrap().clone()).collect()
    };
    let set = |iface: &str, setting: &str| results("apply", iface).iter().filter(|o| o["setting"] == setting).count();
    assert!(set("eth0", "rx_usecs") >= 2, "{output}");
    // A queue and an interrupt for each of the four CPUs.
    assert_eq!(set("eth1", "irq"), 4, "{output}");
    assert_eq!(set("eth1", "xps"), 4, "{output}");
    for iface in ["eth0", "eth1"] {
        assert!(results("apply", iface).iter().all(|outcome| outcome["finding"] == "done"), "{output}");
        assert!(results("verify", iface).iter().all(|outcome| outcome["finding"] == "holds"), "{output}");
        assert!(results("verify", iface).len() > 4, "{output}");
    }
    let flows = |iface: &str| -> Vec<serde_json::Value> {
        results("rollback", iface).into_iter().filter(|outcome| outcome["setting"] == "sock_flows").collect()
    };
    assert_eq!(flows("eth0")[0]["finding"], "handed_over", "{output}");
    assert_eq!(flows("eth1")[0]["finding"], "done", "{output}");
}
