//! A loaded kernel half.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};

use crate::KernelError;
use crate::abi::{BYTES_MAX, COUNTERS, RawFraming};
use crate::assist::KernelAssist;
use crate::call::{Caller, CallerPool};
use crate::conns::ConnTable;
use crate::hops::{self, HopMaps, Hops};
use crate::object::{self, Loaded, ObjectSource, Sizes};
use crate::options::KernelOptions;
use crate::sys;
use crate::udp::{Ports, XdpLink};
use crate::wake::WakeRing;

/// The services that are part of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Builtin {
    /// What comes goes back, TCP and UDP.
    Echo,
    /// The NULL procedure of registered ONC RPC programs, TCP and UDP.
    RpcNull,
}

impl Builtin {
    /// The service's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::RpcNull => "rpc_null",
        }
    }

    pub(crate) fn object(self) -> &'static [u8] {
        match self {
            Self::Echo => include_bytes!(concat!(env!("OUT_DIR"), "/echo.bpf.o")),
            Self::RpcNull => include_bytes!(concat!(env!("OUT_DIR"), "/rpc_null.bpf.o")),
        }
    }
}

/// One counter of a kernel half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name, without a prefix.
    pub name: &'static str,
    /// What it counts.
    pub help: &'static str,
    /// Its value, summed over CPUs.
    pub value: u64,
}

/// A loaded service. Clones share it; the kernel lets go of it when the last one, and everything made from it, is gone.
#[derive(Clone, Debug)]
pub struct KernelService {
    shared: Arc<ServiceState>,
}

/// What the connections of a service share.
#[derive(Debug)]
pub(crate) struct ServiceState {
    pub(crate) loaded: Loaded,
    pub(crate) conns: ConnTable,
    pub(crate) rings: Vec<WakeRing>,
    pub(crate) ports: Ports,
    pub(crate) callers: Arc<CallerPool>,
    /// Sockets the maps refused: full, or not TCP, or taken by somebody else (TLS, another map).
    pub(crate) refused: AtomicU64,
    /// After everything that could send through them.
    _hops: Option<Hops>,
}

impl KernelService {
    /// Loads an object and makes it ready for sockets. Nothing is attached to anything yet.
    ///
    /// # Errors
    /// Missing rights, a kernel without a feature, an object that is none of ours, a program the verifier refuses.
    pub fn load(source: &ObjectSource, options: &KernelOptions) -> Result<Self, KernelError> {
        options.check()?;
        let cpus = libbpf_rs::num_possible_cpus()
            .map_err(|error| KernelError::system("counting CPUs", ksf_bpf::to_io(error)))? as u32;
        // A record for every connection: a wake-up always finds room. 16 bytes each, and a ring is a power of two of
        // at least a page.
        let ring_bytes = (options.connections_max * 16).next_power_of_two().max(rustix::param::page_size() as u32);
        let hop_count = if options.hops { cpus * hops::per_cpu(cpus) } else { 0 };
        let sizes = Sizes { cpus, hops: hop_count, shards: options.shards, ring_bytes };
        let loaded = object::load(source, options, &sizes)?;

        let maps = &loaded.maps;
        if !options.rpc_programs.is_empty() && maps.rpc_programs.is_none() {
            let problem = format!("service {} has no table of RPC programs", loaded.config.service_name());
            return Err(KernelError::BadOption { option: "rpc_programs", problem });
        }
        for (program, low, high) in &options.rpc_programs {
            let versions = [low.to_ne_bytes(), high.to_ne_bytes()].concat();
            if let Some(programs) = &maps.rpc_programs {
                programs
                    .update(&program.to_ne_bytes(), &versions)
                    .map_err(|error| KernelError::system("registering an RPC program", error))?;
            }
        }
        let rings = rings(&loaded, options.shards, ring_bytes)?;
        sys::attach_verdict(loaded.stream.as_fd(), maps.socks.as_fd())
            .map_err(|error| KernelError::system("attaching the verdict program to its socket map", error))?;
        sys::attach_verdict(loaded.hop.as_fd(), maps.hop_far.as_fd())
            .map_err(|error| KernelError::system("attaching the hop program to its socket map", error))?;
        let hops = (hop_count > 0).then(|| {
            let maps = HopMaps {
                near: maps.hop_near.try_clone()?,
                far: maps.hop_far.try_clone()?,
                slots: maps.hop_slot.try_clone()?,
                failed: loaded.hop_failed.try_clone()?,
            };
            Hops::new(hop_count, maps)
        });
        let hops = hops.transpose().map_err(|error| KernelError::system("making the hop sockets", error))?;
        let conns =
            ConnTable::new(&maps.conns).map_err(|error| KernelError::system("mapping the connections", error))?;
        let callers = CallerPool::new(&maps.calls, loaded.call.as_fd(), options.callers_max)
            .map_err(|error| KernelError::system("mapping the call areas", error))?;
        Ok(Self {
            shared: Arc::new(ServiceState {
                conns,
                rings,
                ports: Ports::default(),
                callers: Arc::new(callers),
                refused: AtomicU64::new(0),
                _hops: hops,
                loaded,
            }),
        })
    }

    /// The name the author gave the service.
    pub fn name(&self) -> String {
        self.shared.loaded.config.service_name()
    }

    /// How the service cuts a stream into messages: what user space has to do with what the kernel passes.
    ///
    /// # Errors
    /// The object describes a framing the framework does not have.
    pub fn framing(&self) -> Result<Framing, KernelError> {
        let raw = &self.shared.loaded.config.framing;
        framing(raw).ok_or_else(|| KernelError::BadObject {
            object: self.name(),
            problem: format!("has a framing this ksf does not know: {raw:?}"),
        })
    }

    /// Longest message the service's function can be given, and longest reply it can make, in bytes.
    pub fn message_bytes_max(&self) -> usize {
        BYTES_MAX
    }

    /// The seam for an engine.
    pub fn assist(&self) -> KernelAssist {
        KernelAssist::new(Arc::clone(&self.shared))
    }

    /// Runs the service's function from user space; one for each thread, up to `callers_max`.
    ///
    /// # Errors
    /// All are taken.
    pub fn caller(&self) -> Result<Caller, KernelError> {
        self.shared.callers.take().ok_or_else(|| KernelError::BadOption {
            option: "callers_max",
            problem: "all callers are taken: load the service with more".into(),
        })
    }

    /// Has XDP answer datagrams to these local addresses on an interface. A wildcard address stands for every
    /// address the machine has now. Ends when the link is dropped, or with the process.
    ///
    /// # Errors
    /// No such interface, another XDP program on it, missing rights.
    pub fn attach_udp(&self, interface: &str, addresses: &[std::net::SocketAddr]) -> Result<XdpLink, KernelError> {
        XdpLink::attach(Arc::clone(&self.shared), interface, addresses)
    }

    /// [`crate::self_test`]: whether this kernel can be trusted with any service.
    ///
    /// # Errors
    /// As there.
    pub fn self_test(&self) -> Result<(), KernelError> {
        crate::self_test()
    }

    /// What XDP would do with a frame that came in on lo: its verdict (`enum xdp_action`) and the frame it leaves.
    /// Nothing is sent. For tests of services.
    ///
    /// # Errors
    /// The kernel refuses the frame: shorter than an Ethernet header, or longer than a page.
    pub fn try_frame(&self, frame: &[u8]) -> Result<(u32, Vec<u8>), KernelError> {
        sys::run_xdp(self.shared.loaded.xdp.as_fd(), frame)
            .map_err(|error| KernelError::system("running the XDP program", error))
    }

    /// All counters.
    pub fn counters(&self) -> Vec<Counter> {
        self.shared.counters()
    }

    /// Ids of the loaded programs, as `bpftool prog` lists them.
    pub fn program_ids(&self) -> Vec<u32> {
        let loaded = &self.shared.loaded;
        [&loaded.stream, &loaded.hop, &loaded.hop_failed, &loaded.xdp, &loaded.call]
            .into_iter()
            .filter_map(|program| ksf_bpf::program_id(program.as_fd()).ok())
            .collect()
    }

    /// Name of each program and the instructions the verifier looked at to accept it.
    pub fn verifier_cost(&self) -> Vec<(String, u32)> {
        self.shared.loaded.cost.clone()
    }
}

impl ServiceState {
    pub(crate) fn counters(&self) -> Vec<Counter> {
        let kernel = COUNTERS.iter().enumerate().map(|(index, &(name, help))| {
            // A read fails only for an index the map does not have.
            let value = self.loaded.maps.counters.sum_u64(index as u32).unwrap_or(0);
            Counter { name, help, value }
        });
        let refused = Counter {
            name: "sockets_refused",
            help: "connections the kernel half did not take: no room, or a socket of another kind",
            value: self.refused.load(Relaxed),
        };
        kernel.chain([refused]).collect()
    }

    /// Returns after every program that was running when it was called has ended: the kernel promises that for an
    /// update of a map of maps (`maybe_wait_bpf_programs()`, Linux 4.20).
    pub(crate) fn wait_for_programs(&self) -> io::Result<()> {
        self.loaded.maps.wakes.update(&0u32.to_ne_bytes(), &self.rings[0].as_fd().as_raw_fd().to_ne_bytes())
    }

    pub(crate) fn ring_fd(&self, shard: usize) -> Option<BorrowedFd<'_>> {
        self.rings.get(shard).map(WakeRing::as_fd)
    }
}

fn rings(loaded: &Loaded, shards: u32, ring_bytes: u32) -> Result<Vec<WakeRing>, KernelError> {
    let ring = |shard: u32| -> Result<WakeRing, KernelError> {
        let map = object::wake_ring(ring_bytes)?;
        loaded
            .maps
            .wakes
            .update(&shard.to_ne_bytes(), &map.as_fd().as_raw_fd().to_ne_bytes())
            .map_err(|error| KernelError::system("giving a shard its ring", error))?;
        map.as_fd()
            .try_clone_to_owned()
            .and_then(|fd| WakeRing::new(fd, ring_bytes as usize))
            .map_err(|error| KernelError::system("mapping a ring", error))
    };
    (0..shards).map(ring).collect()
}

fn framing(raw: &RawFraming) -> Option<Framing> {
    match raw.kind {
        0 | 1 => Some(Framing::Raw),
        2 => Some(Framing::RecordMark),
        3 => {
            let prefix = LengthPrefix {
                offset: u8::try_from(raw.offset).ok()?,
                width: u8::try_from(raw.width).ok()?,
                endian: if raw.little_endian == 0 { Endian::Big } else { Endian::Little },
                adjust: raw.adjust,
                strip: raw.strip != 0,
            };
            Framing::LengthPrefix(prefix).validate().ok()
        }
        4 => {
            let bytes = raw.delimiter.get(..raw.delimiter_bytes as usize)?;
            Delimiter::new(bytes).map(Framing::Delimiter)
        }
        _ => None,
    }
}
