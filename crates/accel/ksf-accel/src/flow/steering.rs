//! The XDP program of an interface: packets go to the CPU that a policy names.

use std::ffi::CString;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use ksf_bpf::{link_create, to_io};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::abi::{self, FLOW_COUNTERS, FlowSettings};
use super::policy::{self, Policy, SHARED_MAPS};
use super::{FlowError, Layout};
use crate::bpf::{self, LoadError, Loading};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/flow/steer.bpf.o"));

/// `XDP_FLAGS_SKB_MODE`, `XDP_FLAGS_DRV_MODE` of linux/if_link.h.
const XDP_GENERIC: u32 = 1 << 1;
const XDP_NATIVE: u32 = 1 << 2;

/// Frames that may wait for a CPU. Beyond it they are lost, and the kernel says so to nobody but the tracepoint
/// `xdp:xdp_cpumap_enqueue`; so it is longer than a NIC's ring usually is.
const QUEUE_FRAMES: u32 = 4096;

/// The map of them, by CPU.
const QUEUES: &str = "ksf_cpus";

/// Where in the receive path the program is to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModeWish {
    /// In the driver, if it can and the frames survive the way to another CPU; else generic.
    #[default]
    Auto,
    /// In the driver, before a socket buffer exists. If the device hands over unfinished checksums nothing is steered.
    Native,
    /// Behind the driver, on a socket buffer: works on every device.
    Generic,
}

/// Where in the receive path the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver.
    Native,
    /// Behind the driver.
    Generic,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}

/// What is known about the checksums of frames that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// In generic mode the socket buffer travels whole: there is nothing to prove.
    NotNeeded,
    /// No checksum was looked at yet; long frames stay where they are.
    None,
    /// Frames arrive with whole checksums.
    Whole,
    /// A frame came with an unfinished checksum, as from a veth: nothing is steered in this mode.
    Broken,
}

/// A counter of the programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name.
    pub name: &'static str,
    /// What it counts.
    pub help: &'static str,
    /// Its value on each CPU that ran the program, by CPU number.
    pub per_cpu: Vec<u64>,
}

impl Counter {
    /// Over all CPUs.
    pub fn total(&self) -> u64 {
        self.per_cpu.iter().sum()
    }
}

/// What would become of a frame: [`Steering::try_frame`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It goes to this CPU, or is there already.
    Cpu(usize),
    /// It stays where it is; the name of the counter that says why.
    Passed(&'static str),
}

/// Loaded programs, and the interface they are attached to. WorkerCounters go on when the mode changes; what policies keep in
/// maps of their own begins anew. Everything is held by descriptors: dropping it, or the end
/// of the process, detaches, and frames take their usual way from then on.
#[derive(Debug)]
pub struct Steering {
    programs: Programs,
    settings: FlowSettings,
    layout: Layout,
    policies: Vec<Policy>,
    attached: Option<Attached>,
}

/// What is loaded: one set at a time, for one mode.
#[derive(Debug)]
struct Programs {
    entry: OwnedFd,
    mode: Mode,
    /// As [`SHARED_MAPS`]. The chain has to be kept: the kernel empties a table of programs when user space lets go of
    /// it, whatever program still uses it.
    maps: Vec<MapHandle>,
}

#[derive(Debug)]
struct Attached {
    interface: String,
    wish: ModeWish,
    mode: Mode,
    _link: OwnedFd,
}

impl Steering {
    /// Loads the programs: `policies` decide in this order. Frames go to the CPUs of `layout` only.
    ///
    /// # Errors
    ///
    /// Missing rights, a policy that cannot be loaded, a CPU that does not exist.
    pub fn load(layout: &Layout, policies: &[Policy]) -> Result<Self, FlowError> {
        let programs = Programs::load(layout, policies, Mode::Generic, &[])?;
        let settings = FlowSettings { layout: layout.into(), cpus: layout.cpus().len() as u32, guard: 0, proof: 0 };
        let steering = Self { programs, settings, layout: *layout, policies: policies.to_vec(), attached: None };
        steering.set(settings)?;
        Ok(steering)
    }

    /// Attaches to an interface of this thread's network namespace. Another one is left first.
    ///
    /// # Errors
    ///
    /// [`FlowError::Busy`] if somebody else's XDP program is there: it is left alone.
    pub fn attach(&mut self, interface: &str, wish: ModeWish) -> Result<Mode, FlowError> {
        self.attached = None;
        let index = interface_index(interface)?;
        let first = if wish == ModeWish::Generic { Mode::Generic } else { Mode::Native };
        let mode = match self.attach_as(interface, index, wish, first) {
            // Some drivers have no native mode, others want settings changed first (LRO, MTU).
            Err(FlowError::System { .. }) if wish == ModeWish::Auto => {
                self.attach_as(interface, index, wish, Mode::Generic)
            }
            result => result,
        }?;
        Ok(mode)
    }

    /// Leaves the interface.
    pub fn detach(&mut self) {
        self.attached = None;
    }

    /// Where it runs; `None` if it is not attached.
    pub fn mode(&self) -> Option<Mode> {
        self.attached.as_ref().map(|attached| attached.mode)
    }

    /// What the program knows about checksums.
    pub fn proof(&self) -> Result<Proof, FlowError> {
        if self.settings.guard == 0 {
            return Ok(Proof::NotNeeded);
        }
        let value = self
            .programs
            .map("ksf_settings")
            .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)
            .map_err(|error| FlowError::system("reading the programs' settings", to_io(&error)))?;
        let proof = value.as_deref().and_then(<[u8]>::last_chunk).copied().map(u32::from_ne_bytes);
        Ok(match proof {
            Some(abi::BROKEN) => Proof::Broken,
            Some(abi::PROVEN) => Proof::Whole,
            _ => Proof::None,
        })
    }

    /// Goes behind the driver if it was found, in native mode, that frames would not survive the way to another CPU,
    /// and the wish was [`ModeWish::Auto`]. To be called now and then. Says the new mode if there is one.
    ///
    /// Until then, and for the moment between the two, frames stay where they are; none is lost.
    pub fn settle(&mut self) -> Result<Option<Mode>, FlowError> {
        if self.proof()? != Proof::Broken {
            return Ok(None);
        }
        match self.attached_to() {
            Some((interface, ModeWish::Auto)) => {
                let interface = interface.to_owned();
                self.reattach(&interface, Mode::Generic).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The counters of the programs, per CPU that ran them.
    pub fn counters(&self) -> Result<Vec<Counter>, FlowError> {
        let mut counters = Vec::with_capacity(FLOW_COUNTERS.len());
        for (index, &(name, help)) in FLOW_COUNTERS.iter().enumerate() {
            counters.push(Counter {
                name,
                help,
                per_cpu: per_cpu(self.programs.map("ksf_flow_counts"), index as u32)?,
            });
        }
        Ok(counters)
    }

    /// Frames by the CPU they were meant for, for each CPU of the layout.
    pub fn targets(&self) -> Result<Vec<(usize, u64)>, FlowError> {
        let map = self.programs.map("ksf_flow_targets");
        self.layout.cpus().iter().map(|cpu| Ok((cpu, per_cpu(map, cpu as u32)?.iter().sum()))).collect()
    }

    /// Runs the programs once on a frame, from its Ethernet header on; nothing is sent. For programs that are not
    /// attached: the answer is read from the counters.
    ///
    /// # Errors
    ///
    /// The kernel takes frames from 14 bytes to a little below a page.
    pub fn try_frame(&self, frame: &[u8]) -> Result<Fate, FlowError> {
        let before = (self.counters()?, self.targets()?);
        let mut opts = libbpf_sys::bpf_test_run_opts {
            sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
            data_in: frame.as_ptr().cast(),
            data_size_in: frame.len() as u32,
            repeat: 1,
            ..Default::default()
        };
        // SAFETY: `opts` is valid and writable for the call; data_in is readable for its size, and no output is asked
        // for.
        let rc = unsafe { libbpf_sys::bpf_prog_test_run_opts(self.programs.entry.as_raw_fd(), &raw mut opts) };
        if rc < 0 {
            return Err(FlowError::system("trying a frame", io::Error::from_raw_os_error(-rc)));
        }
        let after = (self.counters()?, self.targets()?);
        if let Some(((cpu, _), _)) = after.1.iter().zip(&before.1).find(|(after, before)| after.1 != before.1) {
            return Ok(Fate::Cpu(*cpu));
        }
        let why = after.0.iter().zip(&before.0).find(|(after, before)| after.per_cpu != before.per_cpu);
        Ok(Fate::Passed(why.map_or("", |(counter, _)| counter.name)))
    }

    /// The port layout it was loaded with.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn attached_to(&self) -> Option<(&str, ModeWish)> {
        self.attached.as_ref().map(|attached| (attached.interface.as_str(), attached.wish))
    }

    /// Leaves the interface and comes back in another mode: an interface takes one program at a time.
    pub(crate) fn reattach(&mut self, interface: &str, mode: Mode) -> Result<Mode, FlowError> {
        self.attached = None;
        let index = interface_index(interface)?;
        self.attach_as(interface, index, ModeWish::Auto, mode)
    }

    fn attach_as(&mut self, interface: &str, index: u32, wish: ModeWish, mode: Mode) -> Result<Mode, FlowError> {
        if self.programs.mode != mode {
            self.programs = Programs::load(&self.layout, &self.policies, mode, &self.programs.maps)?;
        }
        // Before the first frame comes.
        self.settings.guard = u32::from(mode == Mode::Native);
        self.set(self.settings)?;
        let flags = if mode == Mode::Native { XDP_NATIVE } else { XDP_GENERIC };
        match link_create(self.programs.entry.as_fd(), index as i32, libbpf_sys::BPF_XDP, flags) {
            Ok(link) => {
                self.attached = Some(Attached { interface: interface.to_owned(), wish, mode, _link: link });
                Ok(mode)
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) => {
                Err(FlowError::Busy { interface: interface.to_owned(), program: program_on(index) })
            }
            Err(error) => Err(FlowError::system("attaching an XDP program", error)),
        }
    }

    fn set(&self, settings: FlowSettings) -> Result<(), FlowError> {
        bpf::put(self.programs.map("ksf_settings"), &0u32.to_ne_bytes(), &settings.as_bytes())
            .map_err(|error| FlowError::system("writing the programs' settings", error))
    }
}

impl Programs {
    /// `maps`: those of the set before, whose contents stay; none for the first.
    fn load(layout: &Layout, policies: &[Policy], mode: Mode, maps: &[MapHandle]) -> Result<Self, FlowError> {
        let refused = |error: LoadError| FlowError::loading("the steering programs", &error);
        let mut loading = Loading::open(OBJECT).map_err(refused)?;
        for mut map in loading.object.maps_mut() {
            let Some(at) = SHARED_MAPS.iter().position(|name| map.name() == *name) else { continue };
            match (maps.get(at), SHARED_MAPS[at]) {
                (_, QUEUES) => libbpf_rs::num_possible_cpus().and_then(|cpus| map.set_max_entries(cpus as u32)),
                // What can hold programs belongs to programs of one kind (map_type_contains_progs of bpf_verifier.h):
                // also the queues, whose entries can have a program.
                (Some(old), name) if name != policy::CHAIN => map.reuse_fd(old.as_fd()),
                _ => Ok(()),
            }
            .map_err(|error| FlowError::system("preparing a map", to_io(&error)))?;
        }
        // In native mode, so that jumbo frames and veths with a large MTU can be steered, too. In generic mode not: on
        // Linux 6.18 a frame that a program with this flag redirects loses the note that its checksum is unfinished,
        // and the stack drops it (docs/flow.md).
        let frags = mode == Mode::Native;
        policy::set_frags(&mut loading, frags);
        let object = loading.load().map_err(refused)?;
        let maps: io::Result<Vec<MapHandle>> = SHARED_MAPS.iter().map(|name| bpf::map(&object, name)).collect();
        let maps = maps.map_err(|error| FlowError::system("keeping a map", error))?;
        policy::chain(policies, &object, &maps, frags)?;
        let entry = bpf::program(&object, "ksf_flow").map_err(|error| FlowError::system("keeping a program", error))?;
        let programs = Self { entry, mode, maps };
        let put = |map, key: u32, value: u32| bpf::put(programs.map(map), &key.to_ne_bytes(), &value.to_ne_bytes());
        for (index, cpu) in abi::numbered(layout.cpus()) {
            put("ksf_cpu_list", index, cpu)
                .and_then(|()| put(QUEUES, cpu, QUEUE_FRAMES))
                .map_err(|error| FlowError::BadCpu { cpu: cpu as usize, error })?;
        }
        Ok(programs)
    }

    fn map(&self, name: &str) -> &MapHandle {
        &self.maps[policy::place_of(name)]
    }
}

/// A per-CPU counter of eight bytes, by CPU number.
pub(crate) fn per_cpu(map: &MapHandle, key: u32) -> Result<Vec<u64>, FlowError> {
    let values = map
        .lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY)
        .map_err(|error| FlowError::system("reading a counter", to_io(&error)))?
        .unwrap_or_default();
    Ok(values.iter().map(|value| value.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))).collect())
}

pub(crate) fn interface_index(interface: &str) -> Result<u32, FlowError> {
    let missing = || FlowError::NoInterface { interface: interface.to_owned() };
    let name = CString::new(interface).map_err(|_| missing())?;
    // SAFETY: a NUL-terminated string that lives for the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(missing()),
        index => Ok(index),
    }
}

/// Name and id of the XDP program on an interface, as far as they can be told.
fn program_on(interface: u32) -> String {
    let mut opts = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: `opts` is valid and writable for the call and says its size.
    let rc = unsafe { libbpf_sys::bpf_xdp_query(interface as i32, 0, &raw mut opts) };
    let mut ids = vec![opts.prog_id, opts.drv_prog_id, opts.skb_prog_id, opts.hw_prog_id];
    ids.retain(|&id| rc == 0 && id != 0);
    ids.sort_unstable();
    ids.dedup();
    match ids.as_slice() {
        [] => "of somebody else".into(),
        ids => ids.iter().map(|&id| bpf::named(id)).collect::<Vec<_>>().join(", "),
    }
}

impl AsFd for Steering {
    /// The XDP program.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.programs.entry.as_fd()
    }
}
