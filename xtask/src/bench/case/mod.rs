//! What is measured: the rows of the goals table, as cases.
//!
//! ```text
//!   direct.rs  round-trip, pipelined, udp, idle     work.rs   mux
//!   web.rs     connections, accel                   store.rs  store
//!   files.rs   nfs, 9p
//! ```

mod direct;
mod files;
mod metric;
mod store;
mod web;
mod work;

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use self::files::COUNTED as FILES_COUNTED;
pub(crate) use self::files::{
    FileLoad, FileProtocol, NFS_GETATTR, NFS_READ, NFS_WRITE_STABLE, NINEP_GETATTR, PEER_IO_BYTES_MAX, WHOLE_LISTING,
    by_depth,
};
pub(crate) use self::metric::Metric;
use self::store::STORE_COUNTED;
pub(crate) use self::store::STORE_MAIN;
pub(crate) use self::work::{Pace, WorkLoad};
use super::contestant::Contestant;
use super::measure::SyscallCounter;
use super::raw::Step;
use super::store::StoreLoad;
use super::web::WebLoad;

/// A row of the table of goals; `--only` takes these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Row {
    /// One request in flight over TCP
    RoundTrip,
    /// 128 requests in flight over TCP
    Pipelined,
    /// Echo and NULL calls over UDP
    Udp,
    /// 10,000 connections that do nothing
    Idle,
    /// Messages of several connections on several workers
    Mux,
    /// A new connection for each request, on the demo server and on nginx
    Connections,
    /// nginx with each way to share a listener, loaded, reloaded, killed and stalled
    Accel,
    /// Writes that are on the disk when they are answered, and reads, of the store and of Redis
    Store,
    /// Calls of NFSv3 to `ksf nfs` and to nfs-ganesha
    Nfs,
    /// Requests of 9P2000.L to `ksf 9p`, diod and nfs-ganesha
    #[value(name = "9p")]
    #[serde(rename = "9p")]
    Ninep,
}

impl Row {
    /// Whether its servers have files.
    pub(super) fn has_files(self) -> bool {
        matches!(self, Row::Store | Row::Nfs | Row::Ninep)
    }

    /// As `--only` and raw.json name it.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().expect("none is skipped").get_name().to_owned()
    }
}

/// Where the server runs, seen from its client, which is on the first CPU unless nothing is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Placement {
    /// On the client's CPU. With two connections: each client thread has a CPU and shares it with
    /// the server's thread for its connection.
    Same,
    /// On the other CPU. With two connections: both clients on one CPU, the server on the other.
    Other,
    /// Where the scheduler puts both.
    Unpinned,
    /// The server on two CPUs, where the scheduler puts its threads; the client on the first of them.
    Shared,
    /// Both on an emulated machine with two CPUs, where its scheduler puts them.
    Vm,
}

impl Placement {
    pub(crate) const ALL: [Placement; 5] =
        [Placement::Same, Placement::Other, Placement::Unpinned, Placement::Shared, Placement::Vm];
}

impl fmt::Display for Placement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Placement::Same => "same CPU",
            Placement::Other => "other CPU",
            Placement::Unpinned => "unpinned",
            Placement::Shared => "two CPUs",
            Placement::Vm => "VM (shape)",
        })
    }
}

/// What the server does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// Sends it back; messages of [`ECHO_BYTES`].
    Echo,
    /// Answers an ONC RPC NULL call.
    Null,
    /// Does what the message says.
    Work(&'static WorkLoad),
    /// Answers requests of HTTP.
    Web(&'static WebLoad),
    /// Keeps values by their keys, for clients of Redis or of HTTP.
    Store(&'static StoreLoad),
    /// Answers calls of NFSv3, or requests of 9P, about files.
    Files(&'static FileLoad),
}

/// Length of an echoed message: about that of a NULL call.
pub(crate) const ECHO_BYTES: usize = 64;

/// One thing to measure; every contestant is measured in every placement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// Name in raw.json.
    pub(crate) name: &'static str,
    /// Heading in the report.
    pub(crate) title: &'static str,
    pub(crate) row: Row,
    pub(crate) service: Service,
    pub(crate) udp: bool,
    pub(crate) in_flight: u32,
    /// Connections, each with a client thread of its own.
    pub(crate) connections: u32,
    /// Connections that are open and do nothing meanwhile.
    pub(crate) idle: u32,
    /// The client looks for replies before it sleeps (`--spin auto`), so its own wake-up is not in the round trip.
    pub(crate) client_polls: bool,
    pub(crate) contestants: &'static [Contestant],
    /// The figure that the chart shows.
    pub(crate) metric: Metric,
    /// Another case has the same operation, with other numbers.
    pub(crate) is_variation: bool,
}

impl Case {
    /// Threads of the client: worktest and load kv drive all connections from one.
    pub(crate) fn client_threads(&self) -> u32 {
        match self.service {
            Service::Echo | Service::Null | Service::Web(_) | Service::Files(_) => self.connections,
            Service::Work(_) | Service::Store(_) => 1,
        }
    }

    /// Whether a tool can look at the server while its client runs to its end. A disturbed load is interrupted.
    pub(crate) fn can_be_watched(&self) -> bool {
        let is_whole = match self.service {
            Service::Web(load) => load.disturbance.is_none(),
            Service::Store(load) => !matches!(load, StoreLoad::Keys { .. }),
            Service::Echo | Service::Null | Service::Work(_) | Service::Files(_) => true,
        };
        self.idle == 0 && is_whole
    }

    /// Whether its servers can be started under strace, which is their parent no longer than it takes to start them. Many
    /// keys that are written first would take too long.
    pub(crate) fn can_be_traced(&self) -> bool {
        let fills = matches!(self.service, Service::Store(StoreLoad::Overwrite { .. }));
        !fills && !matches!(self.service, Service::Web(_))
    }

    /// Programs that its client needs and no contestant names.
    pub(super) fn needs(&self) -> &'static [&'static str] {
        match self.service {
            Service::Store(StoreLoad::Post { .. }) => &["wrk"],
            _ => &[],
        }
    }

    /// Whether a case of the store is also measured unpinned.
    pub(super) fn is_unpinned_too(&self) -> bool {
        self.name == STORE_MAIN
    }

    /// Whether a case of file servers is measured in every placement.
    pub(super) fn is_everywhere(&self) -> bool {
        let has_no_depth = files::NINEP.iter().any(|case| case.name == self.name);
        FILES_COUNTED.contains(&self.name) || self.name.ends_with("-32x8") || has_no_depth
    }

    /// True if a smoke run has the case. It has no variations, except those whose system calls are counted.
    pub(super) fn is_in_smoke(&self) -> bool {
        !self.is_variation || FILES_COUNTED.contains(&self.name)
    }

    pub(crate) fn step(&self, placement: Placement) -> Step {
        Step { case: self.name.to_owned(), placement }
    }

    /// Whether its goals tell a few percent apart, which differ between short runs by chance.
    pub(crate) fn is_fine(&self) -> bool {
        matches!(self.name, "accel-rate" | "accel-kept" | "mux-pipeline-64" | "mux-pipeline-256")
    }

    /// Whether system calls are counted, in runs of their own. Not where messages take time: there it is the work and
    /// not the calls that costs.
    pub(crate) fn counts_syscalls(&self, by: SyscallCounter) -> bool {
        let is_work = matches!(self.service, Service::Work(load) if !load.is_idle());
        let is_store = matches!(self.service, Service::Store(_));
        if matches!(self.service, Service::Files(_)) && !FILES_COUNTED.contains(&self.name) {
            return false;
        }
        let counts = by == SyscallCounter::Perf || self.can_be_traced() && !is_store;
        self.can_be_watched() && !is_work && counts && (!is_store || STORE_COUNTED.contains(&self.name))
    }
}

/// One request in flight on one connection over TCP; what a case does not say is as here.
const ONE: Case = Case {
    name: "",
    title: "",
    row: Row::RoundTrip,
    service: Service::Null,
    udp: false,
    in_flight: 1,
    connections: 1,
    idle: 0,
    client_polls: false,
    contestants: &[],
    metric: Metric::RttP50Us,
    is_variation: false,
};

/// The rows of the table of goals, group by group.
pub(crate) const CASES: &[Case] = &joined::<{ count(GROUPS) }>(GROUPS);

const GROUPS: &[&[Case]] = &[
    direct::CASES,
    work::CASES,
    web::CASES,
    store::CASES,
    files::NFS_BY_DEPTH,
    files::NFS,
    files::NINEP_BY_DEPTH,
    files::NINEP,
];

const fn count(groups: &[&[Case]]) -> usize {
    let (mut count, mut group) = (0, 0);
    while group < groups.len() {
        count += groups[group].len();
        group += 1;
    }
    count
}

const fn joined<const COUNT: usize>(groups: &[&[Case]]) -> [Case; COUNT] {
    let mut all = [ONE; COUNT];
    let (mut next, mut group) = (0, 0);
    while group < groups.len() {
        let mut at = 0;
        while at < groups[group].len() {
            all[next] = groups[group][at];
            next += 1;
            at += 1;
        }
        group += 1;
    }
    all
}
