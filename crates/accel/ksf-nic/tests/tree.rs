//! On files: a machine's /sys and /proc in a folder, with links as Linux has them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ksf_nic::{
    Channels, Coalescing, Finding, Identity, Intent, InterfaceOps, NicError, Ntuple, PlannedAction, QueueIrq,
    RecordFolder, Tree, Tuner, Wish, interfaces,
};
use tempfile::TempDir;

/// Answers EOPNOTSUPP to everything.
struct NoInterfaceOps;

fn not_supported<T>() -> io::Result<T> {
    Err(rustix::io::Errno::OPNOTSUPP.into())
}

impl InterfaceOps for NoInterfaceOps {
    fn identity(&self, _: &str) -> io::Result<Identity> {
        not_supported()
    }
    fn channels(&self, _: &str) -> io::Result<Channels> {
        not_supported()
    }
    fn set_channels(&mut self, _: &str, _: Channels) -> io::Result<()> {
        not_supported()
    }
    fn coalescing(&self, _: &str) -> io::Result<Coalescing> {
        not_supported()
    }
    fn set_coalescing(&mut self, _: &str, _: Coalescing) -> io::Result<()> {
        not_supported()
    }
    fn ntuple(&self, _: &str) -> io::Result<Ntuple> {
        not_supported()
    }
    fn set_ntuple(&mut self, _: &str, _: bool) -> io::Result<()> {
        not_supported()
    }
    fn queue_irqs(&self, _: &str) -> io::Result<Vec<QueueIrq>> {
        Ok(Vec::new())
    }
    fn namespace(&self) -> String {
        String::new()
    }
}

struct Machine(TempDir);

impl Machine {
    /// A virtio device with one interrupt per direction, on PCI, in node 1 of two.
    fn new() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let device = "sys/devices/pci0000:00/0000:00:03.0";
        let iface = format!("{device}/virtio2/net/eth0");
        for (path, text) in [
            ("sys/devices/system/cpu/online".to_owned(), "0-79\n"),
            ("sys/devices/system/node/node1/cpulist".to_owned(), "40-79\n"),
            (format!("{device}/numa_node"), "1\n"),
            (format!("{device}/msi_irqs/37"), "msix\n"),
            (format!("{device}/msi_irqs/38"), "msix\n"),
            (format!("{device}/msi_irqs/39"), "msix\n"),
            (format!("{iface}/ifindex"), "2\n"),
            (format!("{iface}/address"), "02:00:00:00:00:01\n"),
            (format!("{iface}/queues/rx-0/rps_cpus"), "0000,00000000,00000000\n"),
            (format!("{iface}/queues/rx-0/rps_flow_cnt"), "0\n"),
            (format!("{iface}/napi_defer_hard_irqs"), "0\n"),
            (format!("{iface}/gro_flush_timeout"), "0\n"),
            ("proc/sys/net/core/rps_sock_flow_entries".to_owned(), "0\n"),
            ("proc/irq/37/smp_affinity".to_owned(), "ffff,ffffffff,ffffffff\n"),
            ("proc/irq/37/virtio2-config/x".to_owned(), ""),
            ("proc/irq/38/smp_affinity".to_owned(), "ffff,ffffffff,ffffffff\n"),
            ("proc/irq/38/virtio2-input.0/x".to_owned(), ""),
            ("proc/irq/39/smp_affinity".to_owned(), "ffff,ffffffff,ffffffff\n"),
            ("proc/irq/39/virtio2-output.0/x".to_owned(), ""),
            ("sys/bus/virtio/drivers/virtio_net/x".to_owned(), ""),
        ] {
            let path = machine.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fs::create_dir_all(machine.0.path().join("sys/class/net")).unwrap();
        symlink("../../devices/pci0000:00/0000:00:03.0/virtio2/net/eth0", machine.0.path().join("sys/class/net/eth0"))
            .unwrap();
        symlink("../../../virtio2", machine.0.path().join(format!("{iface}/device"))).unwrap();
        symlink("../../../../bus/virtio/drivers/virtio_net", machine.0.path().join(format!("{device}/virtio2/driver")))
            .unwrap();
        machine
    }

    fn tuner(&self) -> Tuner<Tree, NoInterfaceOps, RecordFolder> {
        Tuner::new(Tree::new(self.0.path()), NoInterfaceOps, RecordFolder::new(self.0.path().join("run/ksf/nic")))
    }

    /// Every file with its bytes.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fn walk(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                match entry.file_type().unwrap() {
                    kind if kind.is_dir() => walk(&entry.path(), files),
                    kind if kind.is_file() => drop(files.insert(entry.path(), fs::read(entry.path()).unwrap())),
                    _ => {}
                }
            }
        }
        let mut files = BTreeMap::new();
        walk(self.0.path(), &mut files);
        files
    }
}

#[test]
fn a_tree_of_files_comes_back_byte_by_byte() {
    let machine = Machine::new();
    let before = machine.files();
    let wish = Wish::new(Intent::Throughput);
    let plan = machine.tuner().plan("eth0", &wish).unwrap();
    assert_eq!((plan.driver.as_str(), plan.node, plan.near_cpus.as_str()), ("virtio_net", Some(1), "40-79"));
    assert_eq!(machine.files(), before, "planning changed something");

    let report = machine.tuner().apply("eth0", &wish, false, |_| {}).unwrap();
    assert!(report.outcomes.iter().all(|outcome| outcome.finding == Finding::Done), "{report:?}");
    let read = |path: &str| fs::read_to_string(machine.0.path().join(path)).unwrap();
    assert_eq!(read("proc/irq/38/smp_affinity"), "100,00000000");
    assert_eq!(read("proc/irq/37/smp_affinity"), "ffff,ffffffff,ffffffff\n", "not of a queue");
    assert_eq!(read("sys/class/net/eth0/queues/rx-0/rps_cpus"), "ffff,ffffff00,00000000");
    assert_eq!(machine.tuner().verify("eth0").unwrap().count(Finding::Holds), report.outcomes.len());
    machine.tuner().rollback("eth0", false).unwrap();
    assert_eq!(machine.files(), before);
}

#[test]
fn settings_of_ethtool_are_not_supported_without_netlink() {
    let machine = Machine::new();
    let plan = machine.tuner().plan("eth0", &Wish::new(Intent::Latency)).unwrap();
    for name in ["channels", "adaptive-rx", "rx-usecs", "ntuple-filters"] {
        let item = plan.items.iter().find(|item| item.key.name() == name).unwrap();
        assert_eq!(item.action, PlannedAction::NotSupported, "{name}");
    }
}

#[test]
fn names_lead_nowhere_else() {
    let machine = Machine::new();
    for name in ["../class/net/eth0", "..", "", "eth0/queues"] {
        let result = machine.tuner().plan(name, &Wish::new(Intent::Latency));
        assert!(matches!(result, Err(NicError::BadName { .. })), "{name}: {result:?}");
        assert!(matches!(machine.tuner().rollback(name, false), Err(NicError::BadName { .. })), "{name}");
    }
    assert!(matches!(machine.tuner().plan("eth1", &Wish::new(Intent::Latency)), Err(NicError::NoInterface { .. })));
}

#[test]
fn interfaces_that_are_up_are_listed() {
    let machine = Machine::new();
    // linux/if.h: IFF_UP is 1, IFF_LOOPBACK 8, IFF_BROADCAST 2, IFF_MULTICAST 0x1000.
    for (name, flags) in [("eth1", "0x1003\n"), ("eth2", "0x1002\n"), ("lo", "0x9\n"), ("bond", "no number\n")] {
        let folder = machine.0.path().join("sys/class/net").join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("flags"), flags).unwrap();
    }
    let files = Tree::new(machine.0.path());
    assert_eq!(interfaces(&files).unwrap(), ["eth1"]);
    fs::write(machine.0.path().join("sys/class/net/eth0/flags"), "0x1043\n").unwrap();
    assert_eq!(interfaces(&files).unwrap(), ["eth0", "eth1"]);
    fs::remove_dir_all(machine.0.path().join("sys/class")).unwrap();
    assert!(interfaces(&files).is_err());
}
