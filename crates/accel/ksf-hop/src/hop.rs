//! The programs of the hop: loaded, tested, attached.

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

use ksf_bpf::{link_create, network_cookie, to_io};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::abi::{COUNTERS, PORT_WORDS, Settings};
use crate::object;
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
    /// The caller knows that no program of the scope asks how many bytes wait (FIONREAD); for kernels that count those of
    /// one queue only. Linux 6.18 does (tcp_bpf_ioctl()): of sockets that may be joined it does not count TCP's.
    pub no_fionread: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { limit_bytes: 256 * 1024, warm_up: 1, no_splice: false, no_fionread: false }
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

    /// Tests whether this kernel can, on connections of this process only.
    ///
    /// # Errors
    ///
    /// As [`Hop::start`].
    pub fn check(options: &Options) -> Result<Guard, HopError> {
        let programs = Programs::load()?;
        let guard = programs.guard(options.no_splice)?;
        programs.test(options)?;
        Ok(guard)
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
    guard: OnceCell<OwnedFd>,
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
            guard: OnceCell::new(),
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

    pub(crate) fn is_guarded(&self) -> bool {
        self.guard.get().is_some()
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
        let cookie = network_cookie()
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
        link_create(self.sockops.as_fd(), folder, libbpf_sys::BPF_CGROUP_SOCK_OPS, 0).map_err(|error| {
            match error.raw_os_error() {
                // kernel/bpf/cgroup.c: a program above or here that was attached without ALLOW_MULTI.
                Some(libc::EPERM) if ksf_bpf::missing_capabilities().is_empty() => HopError::CgroupBusy { cgroup },
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// What the guard does when it sees splice(), where it may not be attached: the rules that follow are the hop's.
    fn mark_as_splicing(programs: &Programs, socket: &TcpStream) {
        let cookie = rustix::net::sockopt::socket_cookie(socket).unwrap();
        programs.shared[2].update(&cookie.to_ne_bytes(), &1u32.to_ne_bytes(), MapFlags::ANY).unwrap();
    }

    fn count(programs: &Programs, name: &str) -> u64 {
        programs.counters().unwrap().iter().find(|counter| counter.name == name).unwrap().value
    }

    /// Runs with a connection whose first message was read, in a network namespace of its own.
    fn with_connection(test: impl FnOnce(&Programs, TcpStream, TcpStream) + Send) {
        if !ksf_bpf::missing_capabilities().is_empty() {
            assert!(std::env::var_os("CI").is_none(), "in CI no test may be skipped: needs root (eBPF)");
            // Not by eprintln!, which the test runner hides of a test that passes.
            return io::stderr().write_all(b"skipped: needs root (eBPF)\n").expect("stderr is open");
        }
        let work = || {
            // SAFETY: changes the network namespace of this thread only, which is new and ends soon.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            assert!(std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let programs = Programs::load().unwrap();
            programs
                .choose(&[listener.local_addr().unwrap().port()], &Options { limit_bytes: 4096, ..Options::default() })
                .unwrap();
            let folder = scope::own_cgroup().unwrap();
            let _link = programs.attach(folder.clone(), scope::open(&folder).unwrap().as_raw_fd()).unwrap();
            let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut reader, _) = listener.accept().unwrap();
            writer.write_all(b"!").unwrap();
            reader.read_exact(&mut [0]).unwrap();
            reader.set_nonblocking(true).unwrap();
            test(&programs, writer, reader);
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    }

    #[test]
    fn who_takes_splice_stays_on_tcp() {
        with_connection(|programs, mut writer, reader| {
            mark_as_splicing(programs, &reader);
            writer.write_all(b"by TCP").unwrap();
            assert_eq!((count(programs, "messages"), count(programs, "tcp_splice")), (0, 1));
            let (_pipe, into) = rustix::pipe::pipe().unwrap();
            let flags = rustix::pipe::SpliceFlags::NONBLOCK;
            assert_eq!(rustix::pipe::splice(&reader, None, &into, None, 10, flags).unwrap(), 6);
        });
    }

    #[test]
    fn nothing_passes_joined_bytes_that_splice_does_not_see() {
        with_connection(|programs, mut writer, mut reader| {
            writer.write_all(&[1; 3000]).unwrap();
            mark_as_splicing(programs, &reader);
            // Where nobody takes splice() it would go by TCP.
            let error = writer.write(&[2; 3000]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EACCES));
            assert_eq!((count(programs, "messages"), count(programs, "refused")), (1, 1));
            // The kernel refuses what follows, too: it does not ask again (tcp_bpf_send_verdict(), kernel 6.18).
            assert_eq!(writer.write(&[3]).unwrap_err().raw_os_error(), Some(libc::EACCES));
            let mut bytes = [0; 4000];
            assert_eq!(reader.read(&mut bytes).unwrap(), 3000);
        });
    }

    #[test]
    fn nor_when_the_hop_ends() {
        with_connection(|programs, mut writer, reader| {
            writer.write_all(&[1; 3000]).unwrap();
            mark_as_splicing(programs, &reader);
            programs.stop().unwrap();
            assert_eq!(writer.write(&[2]).unwrap_err().raw_os_error(), Some(libc::EACCES));
        });
    }

    #[test]
    fn one_who_is_stuck_ends_it() {
        with_connection(|programs, mut writer, _reader| {
            assert!(!programs.has_given_up().unwrap());
            // As the guard does.
            let mut settings = programs.settings.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).unwrap().unwrap();
            settings[Settings::SPLICED_AT] = 1;
            programs.settings.update(&0u32.to_ne_bytes(), &settings, MapFlags::ANY).unwrap();
            assert!(programs.has_given_up().unwrap());
            writer.write_all(b"by TCP").unwrap();
            assert_eq!((count(programs, "messages"), count(programs, "tcp_stopped")), (0, 1));
        });
    }
}
