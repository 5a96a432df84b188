//! A machine in memory: the files of /sys and /proc that matter, a driver with queues, interrupts and coalescing, and
//! records. It behaves as Linux does where the code depends on it, and it can "crash": after a number of changes
//! every further one fails.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

use ksf_nic::{
    Channels, Coalescing, CpuSet, Identity, Intent, InterfaceOps, NicError, Ntuple, QueueIrq, Record, RecordStore,
    SystemFiles, Tuner, Wish,
};

pub(crate) const IFACE: &str = "eth0";

/// What a machine is like.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    /// Possible CPUs.
    pub(crate) cpus: usize,
    /// CPUs that are offline.
    pub(crate) offline: Vec<usize>,
    /// CPUs of the device's node; none: no nodes.
    pub(crate) node: Vec<usize>,
    /// Pairs of queues now, and at most.
    pub(crate) queues: (u32, u32),
    /// Whether there are adaptive coalescing, and any.
    pub(crate) adaptive: bool,
    pub(crate) coalescing: bool,
    /// Whether ntuple filters can be switched.
    pub(crate) ntuple: bool,
    /// Whether each pair of queues has an interrupt.
    pub(crate) irqs: bool,
    /// What rx-usecs is rounded down to a multiple of.
    pub(crate) rounds: u32,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            cpus: 4,
            offline: vec![],
            node: vec![],
            queues: (4, 4),
            adaptive: true,
            coalescing: true,
            ntuple: true,
            irqs: true,
            rounds: 1,
        }
    }
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) model: Model,
    pub(crate) files: BTreeMap<String, String>,
    pub(crate) channels: u32,
    pub(crate) adaptive: bool,
    pub(crate) usecs: u32,
    pub(crate) ntuple: bool,
    pub(crate) records: BTreeMap<String, Record>,
    /// Changes that are still made before everything stops; `None`: no end.
    pub(crate) fuel: Option<usize>,
    /// All changes that were made, for messages.
    pub(crate) log: Vec<String>,
    /// Paths whose writes fail, with the error.
    pub(crate) refuse: BTreeMap<String, i32>,
    /// What [`InterfaceOps::identity`] says, unless there is no such interface.
    pub(crate) identity: Option<Identity>,
    pub(crate) read_only: bool,
    next_irq: u32,
}

/// A handle on the machine; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct World(pub(crate) Rc<RefCell<State>>);

/// All that a rollback must leave as it found it. Numbers of interrupts are left out: a driver chooses them anew.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    files: BTreeMap<String, String>,
    irqs: BTreeMap<String, String>,
    device: (u32, bool, u32, bool),
    records: usize,
}

impl World {
    pub(crate) fn new(model: Model) -> Self {
        let mut files = BTreeMap::new();
        let mut put = |path: &str, text: &str| files.insert(path.to_owned(), text.to_owned());
        let online = CpuSet::first(model.cpus).without(&model.offline.iter().copied().collect());
        put("sys/devices/system/cpu/online", &format!("{online}\n"));
        put("proc/thread-self/status", &format!("Name:\tx\nCpus_allowed_list:\t0-{}\n", model.cpus - 1));
        put("proc/thread-self/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n");
        put("proc/thread-self/net/ipv6_route", "");
        put("proc/sys/kernel/random/boot_id", "boot-1\n");
        put("proc/sys/net/core/rps_sock_flow_entries", "0\n");
        put(&format!("sys/class/net/{IFACE}/ifindex"), "2\n");
        put(&format!("sys/class/net/{IFACE}/address"), "02:00:00:00:00:01\n");
        for (name, value) in [("napi_defer_hard_irqs", "0\n"), ("gro_flush_timeout", "0\n"), ("threaded", "0\n")] {
            put(&format!("sys/class/net/{IFACE}/{name}"), value);
        }
        if !model.node.is_empty() {
            put("sys/devices/pci0/0000:03:00.0/numa_node", "0\n");
            let node: CpuSet = model.node.iter().copied().collect();
            put("sys/devices/system/node/node0/cpulist", &format!("{node}\n"));
        }
        let state = State {
            channels: 0,
            adaptive: false,
            usecs: 12,
            ntuple: false,
            files,
            records: BTreeMap::new(),
            fuel: None,
            log: Vec::new(),
            refuse: BTreeMap::new(),
            identity: Some(Identity { ifindex: 2, address: "02:00:00:00:00:01".into(), kind: String::new() }),
            read_only: false,
            next_irq: 40,
            model,
        };
        let world = World(Rc::new(RefCell::new(state)));
        let queues = world.0.borrow().model.queues.0;
        world.0.borrow_mut().resize(queues);
        world
    }

    pub(crate) fn tuner(&self) -> Tuner<World, World, World> {
        Tuner::new(self.clone(), self.clone(), self.clone())
    }

    pub(crate) fn text(&self, path: &str) -> String {
        let state = self.0.borrow();
        state.files.get(path).unwrap_or_else(|| panic!("no {path}")).trim().to_owned()
    }

    /// Somebody else writes a file.
    pub(crate) fn put(&self, path: &str, text: &str) {
        self.0.borrow_mut().files.insert(path.to_owned(), text.to_owned());
    }

    pub(crate) fn fuel(&self, fuel: Option<usize>) {
        self.0.borrow_mut().fuel = fuel;
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = self.0.borrow();
        let mut files = state.files.clone();
        files.retain(|path, _| !path.starts_with("proc/irq/") && !path.contains("/msi_irqs/"));
        let mut irqs = BTreeMap::new();
        for path in state.files.keys().filter(|path| path.ends_with('/') && path.starts_with("proc/irq/")) {
            let parts: Vec<&str> = path.split('/').collect();
            irqs.insert(parts[3].to_owned(), state.files[&format!("proc/irq/{}/smp_affinity", parts[2])].clone());
        }
        let device = (state.channels, state.adaptive, state.usecs, state.ntuple);
        Snapshot { files, irqs, device, records: state.records.len() }
    }
}

pub(crate) fn queue_file(direction: &str, queue: u32, name: &str) -> String {
    format!("sys/class/net/{IFACE}/queues/{direction}-{queue}/{name}")
}

pub(crate) fn wish(intent: Intent) -> Wish {
    Wish::new(intent)
}

impl State {
    fn all_cpus(&self) -> String {
        CpuSet::first(self.model.cpus).mask() + "\n"
    }

    /// As drivers do: interrupts are freed and asked for again, with other numbers and the default affinity; XPS is set
    /// by the driver; new queues have the defaults.
    fn resize(&mut self, queues: u32) {
        let old = self.channels;
        for queue in queues..old {
            let prefixes = [
                format!("sys/class/net/{IFACE}/queues/rx-{queue}/"),
                format!("sys/class/net/{IFACE}/queues/tx-{queue}/"),
            ];
            self.files.retain(|path, _| !prefixes.iter().any(|prefix| path.starts_with(prefix)));
        }
        for queue in old..queues {
            self.files.insert(queue_file("rx", queue, "rps_cpus"), "0\n".into());
            self.files.insert(queue_file("rx", queue, "rps_flow_cnt"), "0\n".into());
        }
        for queue in 0..queues {
            if queues > 1 {
                let cpu = CpuSet::from_iter([queue as usize % self.model.cpus]).mask();
                self.files.insert(queue_file("tx", queue, "xps_cpus"), cpu + "\n");
                self.files.insert(queue_file("tx", queue, "xps_rxqs"), "0\n".into());
            } else {
                // Linux answers ENOENT where there is only one.
                self.files.remove(&queue_file("tx", queue, "xps_cpus"));
                self.files.insert(queue_file("tx", queue, "xps_rxqs"), "0\n".into());
            }
        }
        if self.model.irqs {
            self.files.retain(|path, _| !path.starts_with("proc/irq/") && !path.contains("/msi_irqs/"));
            let all = self.all_cpus();
            let config = ("config".to_owned(), self.next_irq);
            let pairs = (0..queues).map(|queue| (format!("{IFACE}-TxRx-{queue}"), self.next_irq + 1 + queue));
            for (name, irq) in std::iter::once(config).chain(pairs).collect::<Vec<_>>() {
                self.files.insert(format!("proc/irq/{irq}/smp_affinity"), all.clone());
                self.files.insert(format!("proc/irq/{irq}/{name}/"), String::new());
                self.files.insert(format!("sys/devices/pci0/0000:03:00.0/msi_irqs/{irq}"), "msix\n".into());
            }
            self.next_irq += queues + 1;
        }
        self.channels = queues;
    }

    fn change(&mut self, what: String) -> io::Result<()> {
        match &mut self.fuel {
            Some(0) => return Err(io::Error::other("the machine is down")),
            Some(fuel) => *fuel -= 1,
            None => {}
        }
        self.log.push(what);
        Ok(())
    }

    /// What Linux makes of a mask: no more groups than the CPUs need, no CPU beyond them.
    fn check_mask(&self, text: &str, is_irq: bool) -> io::Result<()> {
        let set = CpuSet::from_mask(text).map_err(|_| io::Error::from_raw_os_error(22))?;
        let groups = text.trim().split(',').count() as u32;
        if groups as usize > self.model.cpus.div_ceil(32) || set.iter().any(|cpu| cpu >= self.model.cpus) {
            return Err(io::Error::from_raw_os_error(75));
        }
        let online = set.without(&self.model.offline.iter().copied().collect());
        // irq_set_affinity() wants a CPU that is online.
        if is_irq && online.is_empty() { Err(io::Error::from_raw_os_error(22)) } else { Ok(()) }
    }
}

impl SystemFiles for World {
    fn read(&self, path: &str) -> io::Result<String> {
        self.0.borrow().files.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn write(&mut self, path: &str, text: &str) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        if !state.files.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if let Some(&error) = state.refuse.get(path) {
            return Err(io::Error::from_raw_os_error(error));
        }
        let is_irq = path.ends_with("smp_affinity");
        let value = if is_irq || path.ends_with("_cpus") {
            state.check_mask(text, is_irq)?;
            text.trim().to_owned()
        } else {
            let number: u64 = text.trim().parse().map_err(|_| io::Error::from_raw_os_error(22))?;
            let is_table = path.ends_with("rps_flow_cnt") && number > 0;
            if is_table { number.next_power_of_two() } else { number }.to_string()
        };
        state.change(format!("{path} = {value}"))?;
        state.files.insert(path.to_owned(), value + "\n");
        Ok(())
    }

    fn writable(&self, path: &str) -> io::Result<()> {
        let state = self.0.borrow();
        if state.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        state.files.contains_key(path).then_some(()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let prefix = format!("{path}/");
        let state = self.0.borrow();
        let below = state.files.range(prefix.clone()..).take_while(|(path, _)| path.starts_with(&prefix));
        let mut names: Vec<String> =
            below.filter_map(|(path, _)| Some(path[prefix.len()..].split('/').next()?.to_owned())).collect();
        names.dedup();
        if names.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(names) }
    }

    fn canonical(&self, path: &str) -> io::Result<String> {
        match path {
            "sys/class/net/eth0/device" => Ok("sys/devices/pci0/0000:03:00.0".into()),
            "sys/devices/pci0/0000:03:00.0/driver" => Ok("sys/bus/pci/drivers/fakenic".into()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl InterfaceOps for World {
    fn identity(&self, _: &str) -> io::Result<Identity> {
        self.0.borrow().identity.clone().ok_or_else(|| io::Error::from_raw_os_error(19))
    }

    fn channels(&self, _: &str) -> io::Result<Channels> {
        let state = self.0.borrow();
        Ok(Channels { combined: state.channels, combined_max: state.model.queues.1, ..Channels::default() })
    }

    fn set_channels(&mut self, _: &str, channels: Channels) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        if channels.combined == 0 || channels.combined > state.model.queues.1 {
            return Err(io::Error::from_raw_os_error(22));
        }
        if let Some(&error) = state.refuse.get("channels") {
            return Err(io::Error::from_raw_os_error(error));
        }
        state.change(format!("channels = {}", channels.combined))?;
        state.resize(channels.combined);
        Ok(())
    }

    fn coalescing(&self, _: &str) -> io::Result<Coalescing> {
        let state = self.0.borrow();
        if !state.model.coalescing {
            return Err(io::Error::from_raw_os_error(95));
        }
        Ok(Coalescing { adaptive_rx: state.model.adaptive.then_some(state.adaptive), rx_usecs: Some(state.usecs) })
    }

    fn set_coalescing(&mut self, _: &str, wanted: Coalescing) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.change(format!("{wanted:?}"))?;
        if let Some(on) = wanted.adaptive_rx {
            state.adaptive = on;
        }
        if let Some(usecs) = wanted.rx_usecs {
            state.usecs = usecs / state.model.rounds * state.model.rounds;
        }
        Ok(())
    }

    fn ntuple(&self, _: &str) -> io::Result<Ntuple> {
        let state = self.0.borrow();
        Ok(Ntuple { on: state.ntuple, changeable: state.model.ntuple })
    }

    fn set_ntuple(&mut self, _: &str, on: bool) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.change(format!("ntuple = {on}"))?;
        state.ntuple = on;
        Ok(())
    }

    fn queue_irqs(&self, _: &str) -> io::Result<Vec<QueueIrq>> {
        Ok(Vec::new())
    }

    fn namespace(&self) -> String {
        "1".into()
    }
}

impl RecordStore for World {
    type Guard = ();

    fn lock(&mut self) -> Result<(), NicError> {
        Ok(())
    }

    fn load(&self, name: &str) -> Result<Option<Record>, NicError> {
        // As on a disk: what is read is what was written as JSON.
        let record = self.0.borrow().records.get(name).cloned();
        Ok(record.map(|record| serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap()))
    }

    fn save(&mut self, name: &str, record: &Record) -> Result<(), NicError> {
        let mut state = self.0.borrow_mut();
        let error = |error| NicError::Record { what: "write", path: name.into(), error };
        state.change(format!("record {:?}", record.phase)).map_err(error)?;
        state.records.insert(name.to_owned(), record.clone());
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<(), NicError> {
        let mut state = self.0.borrow_mut();
        let error = |error| NicError::Record { what: "remove", path: name.into(), error };
        state.change("no record".to_owned()).map_err(error)?;
        state.records.remove(name);
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>, NicError> {
        Ok(self.0.borrow().records.keys().cloned().collect())
    }
}
