//! The programs of the hop: loaded, tested, attached.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::abi::{COUNTERS, PORT_WORDS, Settings};
use crate::object::{self, to_io};
use crate::{HopError, Scope, scope, selftest};

static HOP: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hop.bpf.o"));
static GUARD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guard.bpf.o"));

/// What the guard's programs have in common with the hop's.
const SHARED: [&str; 4] = ["ksf_hop_settings", "ksf_hop_writers", "ksf_hop_splicers", "ksf_hop_counts"];

/// How connections are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Bytes of a direction that may wait unread outside of TCP, at most. More let a burst through that TCP would slow
    /// down, and cost memory that the kernel does not limit. A quarter of the reader's SO_RCVBUF is the limit, too.
    pub limit_bytes: u32,
    /// Messages of a direction that go by TCP first. With less than one a reader that takes splice() would not be
    /// recognised in time; with more short connections are left alone.
    pub warm_up: u32,
    /// The caller knows that no program of the scope reads sockets by splice(); for where the guard cannot be attached.
    pub no_splice: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { limit_bytes: 256 * 1024, warm_up: 1, no_splice: false }
    }
}

/// Whether programs that read sockets by splice() are recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guard {
    /// They are, and their sockets stay on TCP.
    Attached,
    /// They are not; the reason. The caller has said that there are none.
    Trusted(String),
}

/// A counter of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name.
    pub name: &'static str,
    /// What it counts.
    pub help: &'static str,
    /// Its value, over all CPUs.
    pub value: u64,
}

/// Connections of the scope are joined while it lives.
///
/// Dropped, it has joined connections go on by TCP, and no new ones are joined. When its process is killed, new ones are
/// not joined either; joined ones stay so until they are closed, because the kernel would throw away what waits in them.
/// Then the last of them takes programs and maps with it.
#[derive(Debug)]
pub struct Hop {
    programs: Programs,
    guard: Guard,
    _links: Vec<OwnedFd>,
}

impl Hop {
    /// Tests whether this kernel can, and joins connections that are established from now on.
    ///
    /// # Errors
    ///
    /// Any error means: nothing is attached, everything goes by TCP as ever. [`HopError::SelfTest`] says what would not
    /// have been as TCP has it.
    pub fn start(scope: &Scope, options: &Options) -> Result<Self, HopError> {
        let folders = scope.open()?;
        let programs = Programs::load()?;
        let guard = programs.guard(options.no_splice)?;
        programs.test(options)?;
        programs.choose(&scope.ports, options)?;
        let links = folders.iter().map(|(path, file)| programs.attach(path.clone(), file.as_raw_fd()));
        let links = links.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { programs, guard, _links: links })
    }

    /// Tests whether this kernel can, on connections of this process only. What was counted.
    ///
    /// # Errors
    ///
    /// As [`Hop::start`]; without a guard, too, unless `options` trust.
    pub fn check(options: &Options) -> Result<(Guard, Vec<Counter>), HopError> {
        let programs = Programs::load()?;
        let guard = programs.guard(options.no_splice)?;
        programs.test(options)?;
        Ok((guard, programs.counters()?))
    }

    /// Whether programs that read by splice() are recognised.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// What was done so far.
    pub fn counters(&self) -> Result<Vec<Counter>, HopError> {
        self.programs.counters()
    }

    /// Whether it has given up, because a program reads by splice() what splice() does not see.
    pub fn has_given_up(&self) -> Result<bool, HopError> {
        self.programs.has_given_up()
    }
}

impl Drop for Hop {
    fn drop(&mut self) {
        // Messages that follow go by TCP, behind those that wait. Should it fail, joined connections stay joined.
        let _ = self.programs.stop();
    }
}

/// The programs and maps, held by descriptors: they end with them, but for what joined connections still need.
#[derive(Debug)]
pub(crate) struct Programs {
    sockops: OwnedFd,
    settings: MapHandle,
    ports: MapHandle,
    counts: MapHandle,
    shared: Vec<MapHandle>,
    /// Without a holder in user space the kernel takes the program off the map: sockets that enter would not be judged.
    _sockets: MapHandle,
    guard: std::cell::OnceCell<OwnedFd>,
}

impl Programs {
    pub(crate) fn load() -> Result<Self, HopError> {
        let object = object::load(HOP, &[])?;
        let map = |name| object::map(&object, name);
        let sockets = map("ksf_hop_sockets")?;
        object::attach_to_map(&object::program(&object, "ksf_hop_message")?, &sockets)
            .map_err(|error| HopError::system("attaching to a map of sockets", error))?;
        Ok(Self {
            sockops: object::program(&object, "ksf_hop_sockops")?,
            settings: map("ksf_hop_settings")?,
            ports: map("ksf_hop_ports")?,
            counts: map("ksf_hop_counts")?,
            shared: SHARED.iter().map(|name| map(name)).collect::<Result<_, _>>()?,
            _sockets: sockets,
            guard: std::cell::OnceCell::new(),
        })
    }

    fn guard(&self, no_splice: bool) -> Result<Guard, HopError> {
        let shared: Vec<_> = SHARED.into_iter().zip(&self.shared).collect();
        let attached = object::load(GUARD, &shared)
            .and_then(|object| object::program(&object, "ksf_hop_spliced"))
            .and_then(|program| {
                object::link_to_function(&program).map_err(|error| HopError::system("tracing tcp_splice_read()", error))
            });
        match attached {
            Ok(link) => {
                let _ = self.guard.set(link);
                Ok(Guard::Attached)
            }
            Err(error) if no_splice => Ok(Guard::Trusted(error.to_string())),
            Err(error) => Err(HopError::NoGuard { cause: error.to_string() }),
        }
    }

    /// Joins connections of this process to itself, to find out whether they are what TCP is.
    fn test(&self, options: &Options) -> Result<(), HopError> {
        let folder = scope::own_cgroup()?;
        let file = scope::open(&folder)?;
        selftest::run(self, options, || self.attach(folder.clone(), file.as_raw_fd()))
    }

    /// Sets which connections of this thread's network namespace are joined. Empty: all.
    pub(crate) fn choose(&self, ports: &[u16], options: &Options) -> Result<(), HopError> {
        let mut words = vec![0u32; PORT_WORDS];
        for port in ports {
            words[usize::from(*port) / 32] |= 1 << (port % 32);
        }
        for (index, word) in words.iter().enumerate() {
            write(&self.ports, index as u32, &word.to_ne_bytes())?;
        }
        for index in 0..COUNTERS.len() as u32 {
            write_zeroes(&self.counts, index)?;
        }
        let cookie = scope::network_cookie()
            .map_err(|error| HopError::system("asking for the cookie of the network namespace", error))?;
        self.set(Settings {
            netns_cookie: cookie,
            any_port: ports.is_empty().into(),
            limit_bytes: options.limit_bytes,
            warm_up: options.warm_up,
            ..Settings::default()
        })
    }

    /// From now on connections of a cgroup are watched.
    pub(crate) fn attach(&self, cgroup: PathBuf, folder: i32) -> Result<OwnedFd, HopError> {
        object::link_to_cgroup(&self.sockops, folder, libbpf_sys::BPF_CGROUP_SOCK_OPS).map_err(|error| {
            match error.raw_os_error() {
                // kernel/bpf/cgroup.c: a program above or here that was attached without ALLOW_MULTI.
                Some(libc::EPERM) if ksf_kernel::missing_capabilities().is_empty() => HopError::CgroupBusy { cgroup },
                Some(libc::EBADF) => {
                    HopError::Unreadable { path: cgroup, error: io::Error::other("not a folder of cgroup2") }
                }
                _ => HopError::system("attaching to a cgroup", error),
            }
        })
    }

    /// From now on everything goes by TCP.
    pub(crate) fn stop(&self) -> Result<(), HopError> {
        self.set(Settings { stopped: 1, ..Settings::default() })
    }

    pub(crate) fn has_given_up(&self) -> Result<bool, HopError> {
        let value = self.settings.lookup(&0u32.to_ne_bytes(), MapFlags::ANY);
        let value = value.map_err(|error| HopError::system("reading the settings", to_io(&error)))?;
        Ok(value.is_some_and(|value| value[Settings::SPLICED_AT..][..4] != [0; 4]))
    }

    pub(crate) fn counters(&self) -> Result<Vec<Counter>, HopError> {
        let mut counters = Vec::with_capacity(COUNTERS.len());
        for (index, &(name, help)) in (0u32..).zip(COUNTERS) {
            let values = self.counts.lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY);
            let values = values.map_err(|error| HopError::system("reading a counter", to_io(&error)))?;
            let words = values.iter().flatten().filter_map(|value| value.get(..8)?.try_into().ok());
            counters.push(Counter { name, help, value: words.map(u64::from_ne_bytes).sum() });
        }
        Ok(counters)
    }

    fn set(&self, settings: Settings) -> Result<(), HopError> {
        write(&self.settings, 0, &settings.as_bytes())
    }
}

fn write(map: &MapHandle, key: u32, value: &[u8]) -> Result<(), HopError> {
    map.update(&key.to_ne_bytes(), value, MapFlags::ANY)
        .map_err(|error| HopError::system("writing the settings", to_io(&error)))
}

fn write_zeroes(map: &MapHandle, key: u32) -> Result<(), HopError> {
    let cpus = libbpf_rs::num_possible_cpus().map_err(|error| HopError::system("counting the CPUs", to_io(&error)))?;
    map.update_percpu(&key.to_ne_bytes(), &vec![vec![0; 8]; cpus], MapFlags::ANY)
        .map_err(|error| HopError::system("writing the counters", to_io(&error)))
}
