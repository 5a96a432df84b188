//! What the tests of the shipped combination share: a server behind a loaded kernel half, clients that verify every
//! byte, and a look at the BPF objects of the machine.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use ksf::Server;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_kernel::{Builtin, KernelService, ObjectSource};
use ksf_services::{echo::Echo, rpc};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, Program};

pub(crate) mod retransmit;

use crate::common::*;
pub(crate) use ksf_test::stream::connect;

/// The services under test, each with what its client says and hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spoken {
    Echo,
    Rpc,
}

impl Spoken {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Rpc => "rpc",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Self::Echo, Self::Rpc].into_iter().find(|spoken| spoken.name() == name)
    }

    pub(crate) fn builtin(self) -> Builtin {
        match self {
            Self::Echo => Builtin::Echo,
            Self::Rpc => Builtin::RpcNull,
        }
    }

    /// Message number `index` of a client. Some RPCs only user space can answer.
    pub(crate) fn request(self, index: u32) -> Vec<u8> {
        match self {
            Self::Echo => pattern(1 + (index as usize * 37) % 700, u64::from(index)),
            Self::Rpc => rpc_call(index, 100_003, 3, u32::from(is_hard(index))),
        }
    }

    /// What must come back for it.
    pub(crate) fn reply(self, index: u32) -> Vec<u8> {
        match self {
            Self::Echo => self.request(index),
            Self::Rpc => {
                let mut reply = null_reply(index);
                // PROC_UNAVAIL (RFC 5531, section 9).
                reply[27] = if is_hard(index) { 3 } else { 0 };
                reply
            }
        }
    }
}

fn is_hard(xid: u32) -> bool {
    xid % 11 == 7
}

/// Runs `test` for each service on each base engine of this machine, in a network namespace of its own.
pub(crate) fn on_each(test: impl Fn(Spoken, EngineKind) + Sync) {
    let Some(()) = root_or_skip("eBPF") else { return };
    for spoken in [Spoken::Echo, Spoken::Rpc] {
        side_by_side(engines(), |engine| test(spoken, engine));
    }
}

/// Connections that have a kernel half.
pub(crate) const ASSISTED_MAX: u32 = 2048;

/// The base engines that work here.
pub(crate) fn engines() -> Vec<EngineKind> {
    working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe)
}

/// A server with a kernel half in front.
pub(crate) struct Rig {
    pub(crate) spoken: Spoken,
    pub(crate) server: Server,
    pub(crate) kernel: KernelService,
    pub(crate) address: SocketAddr,
}

impl Rig {
    pub(crate) fn start(spoken: Spoken, engine: EngineKind) -> Self {
        Self::start_with(spoken, engine, "127.0.0.1:0", Limits::default())
    }

    pub(crate) fn start_with(spoken: Spoken, engine: EngineKind, address: &str, limits: Limits) -> Self {
        Self::start_from(&ObjectSource::Builtin(spoken.builtin()), spoken, engine, address, limits)
    }

    /// `source`: another kernel half than the shipped one of the service.
    pub(crate) fn start_from(
        source: &ObjectSource,
        spoken: Spoken,
        engine: EngineKind,
        address: &str,
        limits: Limits,
    ) -> Self {
        let shards = ksf::cpus::choose(None).expect("a CPU").len() as u32;
        let kernel = load_from(source, spoken.builtin(), |options| {
            (options.shards, options.connections_max) = (shards, ASSISTED_MAX);
        });
        let assist = Some(Arc::new(kernel.assist()) as Arc<dyn ksf::assist::Assist>);
        let listen = ListenAddr::Tcp(address.parse().expect("an address"));
        let builder = Server::builder().engine(engine).limits(limits);
        let builder = match spoken {
            Spoken::Echo => builder.listen(listen, Arc::new(Echo), assist),
            Spoken::Rpc => {
                let mut table = rpc::ProgramTable::new();
                table.register(rpc::Program::NFS_V3).expect("an empty table");
                table.register(rpc::Program::MOUNT_V3).expect("another program");
                builder.listen(listen, Arc::new(rpc::NullService::new("rpc", table)), assist)
            }
        };
        let server = builder.start().expect("the server starts");
        let info = &server.listeners()[0];
        assert!(info.assisted, "no kernel half in front");
        let ListenAddr::Tcp(address) = info.addr else { panic!("not TCP: {info:?}") };
        Self { spoken, server, kernel, address }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    /// Sends a message and reads its reply.
    pub(crate) fn exchange(&self, client: &mut TcpStream, index: u32) {
        exchange(client, self.spoken, index);
    }

    /// A counter of the kernel half.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        counter(&self.kernel, name)
    }

    /// A counter of user space.
    pub(crate) fn server_counter(&self, name: &str) -> u64 {
        let counters = self.server.counters();
        counters.iter().find(|counter| counter.name == name).unwrap_or_else(|| panic!("no counter {name}")).value
    }

    /// How connections have ended, for a message.
    pub(crate) fn ends(&self) -> String {
        let counters = self.server.counters();
        let ends = counters.iter().filter(|counter| counter.name.starts_with("closed_") && counter.value > 0);
        ends.map(|counter| format!("{} {}", counter.name, counter.value)).collect::<Vec<_>>().join(", ")
    }

    /// Everything that was counted, for a message.
    pub(crate) fn state(&self) -> String {
        let user = self.server.counters().into_iter().map(|counter| (counter.name, counter.value));
        let kernel = self.kernel.counters().into_iter().map(|counter| (counter.name, counter.value));
        let counted = user.chain(kernel).filter(|(_, value)| *value > 0);
        counted.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
    }

    /// Every client is gone: so must their connections be, and none of them by a fault of the kernel half.
    pub(crate) fn end(self) {
        wait_until("every connection ends", || self.server.connections() == 0);
        assert_eq!(self.counter("replies_broken"), 0);
        assert_eq!(self.server_counter("closed_kernel_half"), 0);
        self.server.drain().expect("the shards end well");
    }
}

/// Sends a message and reads its reply.
pub(crate) fn exchange(client: &mut TcpStream, spoken: Spoken, index: u32) {
    send_all(client, &spoken.request(index));
    let reply = spoken.reply(index);
    assert_eq!(read_exactly(client, reply.len()), reply, "message {index}");
}

/// How a client keeps the server busy until the server goes away.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Load {
    /// One message at a time: the kernel half's work.
    PingPong,
    /// As fast as TCP takes it: user space's work.
    Flood,
}

/// Sends until the connection ends, and checks every byte that comes back; `verified` counts them.
pub(crate) fn press(address: SocketAddr, spoken: Spoken, load: Load, verified: &AtomicU64) {
    let mut client = connect(address);
    let mut expected = Expected { spoken, next: 0, bytes: Vec::new() };
    match load {
        Load::PingPong => {
            for index in 0.. {
                let (request, reply_len) = (spoken.request(index), spoken.reply(index).len());
                if client.write_all(&request).is_err() || !expected.read(&mut client, reply_len, verified) {
                    break;
                }
            }
        }
        Load::Flood => thread::scope(|scope| {
            let mut sender = client.try_clone().unwrap();
            scope
                .spawn(move || (0..).map(|index| spoken.request(index)).find(|bytes| sender.write_all(bytes).is_err()));
            while expected.read(&mut client, 4096, verified) {}
            // A sender in front of a closed window would wait for its time limit.
            let _ = client.shutdown(Shutdown::Both);
        }),
    }
}

/// The replies that are still to come.
struct Expected {
    spoken: Spoken,
    next: u32,
    bytes: Vec<u8>,
}

impl Expected {
    /// Reads `len` bytes; false at the end of the connection, orderly or by a reset.
    fn read(&mut self, client: &mut TcpStream, mut len: usize, verified: &AtomicU64) -> bool {
        let mut buf = [0; 4096];
        while len > 0 {
            let got = match client.read(&mut buf[..len.min(4096)]) {
                Ok(0) => return false,
                Ok(got) => got,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return false,
                Err(error) => panic!("no reply and no end: {error}"),
            };
            while self.bytes.len() < got {
                self.bytes.extend_from_slice(&self.spoken.reply(self.next));
                self.next += 1;
            }
            assert!(self.bytes[..got] == buf[..got], "other bytes before message {}", self.next);
            self.bytes.drain(..got);
            verified.fetch_add(got as u64, Ordering::Relaxed);
            len -= got;
        }
        true
    }
}

/// Ids of programs and maps.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Objects {
    pub(crate) programs: Vec<u32>,
    pub(crate) maps: Vec<u32>,
}

impl Objects {
    /// All a loaded service holds: its programs, their maps, and the maps in these.
    pub(crate) fn of(service: &KernelService) -> Self {
        let programs = service.program_ids();
        let all = ProgInfoIter::with_query_opts(ProgInfoQueryOptions::default().include_map_ids(true));
        let mut maps: Vec<u32> = Vec::new();
        for info in all.filter(|info| programs.contains(&info.id)) {
            assert!(info.name.to_string_lossy().starts_with("ksf_"), "program {:?}", info.name);
            maps.extend(info.map_ids);
        }
        maps.sort_unstable();
        maps.dedup();
        let rings: Vec<u32> = maps.iter().flat_map(|&id| maps_in(id)).collect();
        maps.extend(rings);
        Self { programs, maps }
    }

    pub(crate) fn are_gone(&self) -> bool {
        self.programs.iter().all(|&id| Program::fd_from_id(id).is_err())
            && self.maps.iter().all(|&id| MapHandle::from_map_id(id).is_err())
    }
}

/// Ids of the maps in a map of maps.
fn maps_in(id: u32) -> Vec<u32> {
    let map = MapHandle::from_map_id(id).expect("a map of ours");
    if map.map_type() != MapType::ArrayOfMaps {
        return Vec::new();
    }
    let ring = |index: u32| map.lookup(&index.to_ne_bytes(), MapFlags::ANY).expect("an array");
    let ids = (0..map.max_entries()).filter_map(ring).map(|id| u32::from_ne_bytes(id.try_into().expect("an id")));
    ids.collect()
}
