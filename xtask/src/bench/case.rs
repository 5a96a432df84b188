//! What is measured: the rows of the goals table, as cases.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::contestant::Contestant;
use super::measure::SyscallCounter;
use super::raw::Step;
use super::store::StoreLoad;
use super::web::{Disturbance, WebLoad};

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
}

impl Row {
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
    /// Keeps values by their keys, for clients of Redis.
    Store(&'static StoreLoad),
}

/// A load for the work service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WorkLoad {
    /// What messages ask for, as worktest calls it.
    pub(crate) kind: &'static str,
    /// Least and most time of work, microseconds.
    pub(crate) work_us: Option<[u32; 2]>,
    /// Messages in a hundred that sleep, and for how many milliseconds.
    pub(crate) slow: Option<[u32; 2]>,
    /// One for each connection: what it has in flight, or its share of the messages.
    pub(crate) weights: &'static [u32],
    pub(crate) pace: Pace,
    /// The loops of the peer with pinned connections, dealt out in the order of accept.
    pub(crate) loops: &'static str,
}

/// When a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// When a reply makes room on its connection.
    Connection,
    /// When a reply makes room; on a connection that is drawn by weight.
    Window,
    /// So many per second, as independent arrivals.
    Rate(u32),
}

impl WorkLoad {
    /// The share of the messages that goes to the busiest loop.
    pub(crate) fn max_share(&self) -> f64 {
        let mut sums = [0; 10];
        for (weight, digit) in self.weights.iter().zip(self.loops.bytes().cycle()) {
            sums[usize::from(digit - b'0')] += weight;
        }
        let most = sums.into_iter().max().unwrap_or(0);
        f64::from(most) / f64::from(self.weights.iter().sum::<u32>())
    }

    /// Mean time of work, microseconds.
    pub(crate) fn mean_work_us(&self) -> f64 {
        self.work_us.map_or(0.0, |[least, most]| f64::from(least + most) / 2.0)
    }

    /// Whether messages are answered at once.
    pub(crate) fn is_idle(&self) -> bool {
        self.work_us.is_none() && self.slow.is_none()
    }
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
}

impl Case {
    /// Threads of the client: worktest and load kv drive all connections from one.
    pub(crate) fn client_threads(&self) -> u32 {
        match self.service {
            Service::Echo | Service::Null | Service::Web(_) => self.connections,
            Service::Work(_) | Service::Store(_) => 1,
        }
    }

    /// Whether a tool can look at the server while its client runs to its end. A disturbed load is interrupted.
    pub(crate) fn can_be_watched(&self) -> bool {
        let is_whole = match self.service {
            Service::Web(load) => load.disturbance.is_none(),
            Service::Store(load) => *load != StoreLoad::Keys,
            Service::Echo | Service::Null | Service::Work(_) => true,
        };
        self.idle == 0 && is_whole
    }

    /// Whether its servers can be started under strace, which is their parent no longer than it takes to start them.
    pub(crate) fn can_be_traced(&self) -> bool {
        !matches!(self.service, Service::Web(_))
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
        let counts = by == SyscallCounter::Perf || self.can_be_traced() && !is_store;
        self.can_be_watched() && !is_work && counts && (!is_store || self.name == STORE_MAIN)
    }
}

/// A measured figure. Names end in their unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    RttP50Us,
    RttP99Us,
    RttP999Us,
    RttMaxUs,
    RttMeanUs,
    RttStdevUs,
    /// Of the quick messages alone, where some are slow.
    QuickP50Us,
    QuickP99Us,
    QuickP999Us,
    MessagesPerS,
    /// User and system time of the client, per message. Only of worktest.
    ClientCpuUs,
    /// User and system time of the server's process, per message.
    ServerCpuUs,
    /// CPU time of the machine that is neither the server's nor the client's, per message:
    /// softirq, work queues of the kernel engine, and whatever else ran.
    OtherCpuUs,
    /// The sum of the two above: what an answer costs outside of its client.
    TotalCpuUs,
    /// All CPU time of the machine, the client's included, per message.
    MachineCpuUs,
    /// System calls of the server, per message.
    Syscalls,
    /// How often the server went to sleep and had to be woken, per message, over its whole life.
    ServerSleeps,
    /// How often the server had to let another run, per message, over its whole life.
    ServerPreempted,
    /// How often the client went to sleep, per message.
    ClientSleeps,
    /// Context switches of the machine, those of kernel threads among them, per message.
    Switches,
    /// Interrupts of the machine, per message.
    Interrupts,
    /// Interrupts from one CPU to another, per message: wake-ups across CPUs.
    InterruptsBetweenCpus,
    /// Softirqs of the machine that took received packets, per message.
    ReceiveSoftirqs,
    /// Anonymous memory of the server's process per idle connection.
    IdleBytes,
    /// Median round trip with the idle connections open, relative to without.
    IdleRttRatio,
    /// User and system time of the server's process per second, while all of its connections are idle.
    IdleCpuUsPerS,
    /// Accepts of the worker with the most, relative to the one with the fewest.
    Balance,
    /// Share of the connections that were served on the CPU where they arrived.
    LocalShare,
    /// Reloads, kills or stalls.
    Disturbances,
    /// Requests without a right answer.
    Failures,
    /// Bytes that the server wrote to the disk for each byte of key and value.
    WrittenRatio,
    /// Anonymous memory of the server for each key of 8 bytes with a value of 8 bytes.
    KeyBytes,
    /// Keys of a start over what a million of writes has left, from the start of the process to its first answer.
    RecoveredKeysPerS,
}

impl Metric {
    pub(crate) const ALL: [Metric; 33] = [
        Metric::RttMeanUs,
        Metric::RttStdevUs,
        Metric::RttP50Us,
        Metric::RttP99Us,
        Metric::RttP999Us,
        Metric::RttMaxUs,
        Metric::QuickP50Us,
        Metric::QuickP99Us,
        Metric::QuickP999Us,
        Metric::MessagesPerS,
        Metric::ClientCpuUs,
        Metric::ServerCpuUs,
        Metric::OtherCpuUs,
        Metric::TotalCpuUs,
        Metric::MachineCpuUs,
        Metric::Syscalls,
        Metric::ServerSleeps,
        Metric::ServerPreempted,
        Metric::ClientSleeps,
        Metric::Switches,
        Metric::Interrupts,
        Metric::InterruptsBetweenCpus,
        Metric::ReceiveSoftirqs,
        Metric::IdleBytes,
        Metric::IdleRttRatio,
        Metric::IdleCpuUsPerS,
        Metric::Balance,
        Metric::LocalShare,
        Metric::Disturbances,
        Metric::Failures,
        Metric::WrittenRatio,
        Metric::KeyBytes,
        Metric::RecoveredKeysPerS,
    ];

    /// Whether it counts what happens for a message. These have a table of their own.
    pub(crate) fn is_count(self) -> bool {
        use Metric::{ClientSleeps, Interrupts, InterruptsBetweenCpus, ReceiveSoftirqs, ServerPreempted, ServerSleeps};
        matches!(self, Metric::Syscalls | Metric::Switches | ServerSleeps | ServerPreempted | ClientSleeps)
            || matches!(self, Interrupts | InterruptsBetweenCpus | ReceiveSoftirqs)
    }

    /// Heading of its column, with the unit.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Metric::RttP50Us => "round trip p50 us",
            Metric::RttP99Us => "round trip p99 us",
            Metric::RttP999Us => "round trip p99.9 us",
            Metric::RttMaxUs => "round trip max us",
            Metric::RttMeanUs => "round trip mean us",
            Metric::RttStdevUs => "round trip st.dev. us",
            Metric::QuickP50Us => "quick p50 us",
            Metric::QuickP99Us => "quick p99 us",
            Metric::QuickP999Us => "quick p99.9 us",
            Metric::ClientCpuUs => "client CPU us/msg",
            Metric::MessagesPerS => "messages/s",
            Metric::ServerCpuUs => "server CPU us/msg",
            Metric::OtherCpuUs => "other CPU us/msg",
            Metric::TotalCpuUs => "total CPU us/msg",
            Metric::MachineCpuUs => "machine CPU us/msg",
            Metric::Syscalls => "server's system calls",
            Metric::ServerSleeps => "server slept",
            Metric::ServerPreempted => "server preempted",
            Metric::ClientSleeps => "client slept",
            Metric::Switches => "context switches",
            Metric::Interrupts => "interrupts",
            Metric::InterruptsBetweenCpus => "of these between CPUs",
            Metric::ReceiveSoftirqs => "receive softirqs",
            Metric::IdleBytes => "bytes/idle conn.",
            Metric::IdleRttRatio => "round trip, idle/none",
            Metric::IdleCpuUsPerS => "server CPU us/s, all idle",
            Metric::Balance => "accepts max/min",
            Metric::LocalShare => "local share",
            Metric::Disturbances => "disturbances",
            Metric::Failures => "failed requests",
            Metric::WrittenRatio => "written/stored bytes",
            Metric::KeyBytes => "bytes/key",
            Metric::RecoveredKeysPerS => "keys recovered/s",
        }
    }

    /// A value of this metric, as short as its precision allows.
    pub(crate) fn format(self, value: f64) -> String {
        match self {
            Metric::MessagesPerS | Metric::RecoveredKeysPerS if value >= 1e6 => format!("{:.2} M", value / 1e6),
            Metric::MessagesPerS | Metric::RecoveredKeysPerS if value >= 1e4 => format!("{:.0} k", value / 1e3),
            Metric::MessagesPerS
            | Metric::RecoveredKeysPerS
            | Metric::KeyBytes
            | Metric::IdleBytes
            | Metric::IdleCpuUsPerS
            | Metric::Disturbances
            | Metric::Failures => format!("{value:.0}"),
            Metric::RttP50Us
            | Metric::RttP99Us
            | Metric::RttP999Us
            | Metric::RttMaxUs
            | Metric::RttMeanUs
            | Metric::RttStdevUs
            | Metric::QuickP50Us
            | Metric::QuickP99Us
            | Metric::QuickP999Us
                if value >= 100.0 =>
            {
                format!("{value:.0}")
            }
            Metric::ClientCpuUs
            | Metric::ServerCpuUs
            | Metric::OtherCpuUs
            | Metric::TotalCpuUs
            | Metric::MachineCpuUs
            | Metric::Balance => format!("{value:.3}"),
            _ if self.is_count() => format!("{value:.3}"),
            // One connection in a thousand is not all of them.
            Metric::LocalShare => format!("{value:.4}"),
            _ => format!("{value:.2}"),
        }
    }
}

use Contestant::{
    Ab, Accel, AccelHaproxy, AccelHaproxyShards, AccelLighttpd, AccelOff, Demo, Epoll, EventLoop, Ganesha,
    GaneshaTuned, Haproxy, HaproxyShards, IdealQueue, Kernel, Lighttpd, NginxExclusive, NginxMutex, NginxReuseport,
    NginxTuned, PairFloor, Redis, RedisAlways, RedisBenchmark, RedisEverysec, Sockperf, SockperfTuned, Store,
    StoreEpoll, Threads, ThreadsSpin, UdpMmsg, UdpMmsgSpin, UdpPlain, Uring, WorkLoops, WorkThreads, Workers2,
    Workers4, Wrk,
};

const NULL_TCP: &[Contestant] = &[Threads, ThreadsSpin, EventLoop, Kernel, Uring, Epoll, Ganesha, GaneshaTuned];
const UDP: &[Contestant] = &[UdpPlain, UdpMmsg, UdpMmsgSpin, Kernel, Uring, Epoll];
const UDP_ALONE: &[Contestant] = &[PairFloor, UdpPlain, UdpMmsg, UdpMmsgSpin, Kernel, Uring, Epoll];

const WORK: &[Contestant] = &[WorkThreads, WorkLoops, Workers2];
const WORK_SLEEP: &[Contestant] = &[WorkThreads, WorkLoops, Workers2, Workers4];

/// Messages in flight where they are spread by weight: enough that the busiest loop never waits for one.
const WINDOW: u32 = 32;

/// Three of four equal connections on the first of two loops.
const SPLIT: &[u32] = &[1, 1, 1, 1];
const SPLIT_LOOPS: &str = "0001";
/// One connection with most of the messages; the loops take the connections in turn.
const SKEWED: &[u32] = &[8, 1, 1, 1];
const TURNS: &str = "01";

const WORK_US: Option<[u32; 2]> = Some([50, 200]);

const fn worked(kind: &'static str, weights: &'static [u32], loops: &'static str) -> WorkLoad {
    WorkLoad { kind, work_us: WORK_US, slow: None, weights, pace: Pace::Window, loops }
}

static DISCARD: WorkLoad =
    WorkLoad { kind: "discard", work_us: None, slow: None, weights: &[1; 8], pace: Pace::Connection, loops: TURNS };
static SLEEP_SPLIT: WorkLoad = worked("sleep", SPLIT, SPLIT_LOOPS);
static SLEEP_SKEWED: WorkLoad = worked("sleep", SKEWED, TURNS);
static COMPUTE_SPLIT: WorkLoad = worked("compute", SPLIT, SPLIT_LOOPS);
static COMPUTE_SKEWED: WorkLoad = worked("compute", SKEWED, TURNS);
static PIPELINE: WorkLoad =
    WorkLoad { kind: "inline", work_us: None, slow: None, weights: &[1; 4], pace: Pace::Connection, loops: TURNS };
/// That of the probe in research on message sockets: 4 workers, of whose time the slow messages take 0.4.
static MIXED: WorkLoad =
    WorkLoad { kind: "inline", work_us: None, slow: Some([20, 20]), weights: &[1], pace: Pace::Rate(400), loops: "0" };

const fn mux(name: &'static str, title: &'static str, load: &'static WorkLoad, in_flight: u32) -> Case {
    Case {
        name,
        title,
        row: Row::Mux,
        service: Service::Work(load),
        in_flight,
        connections: load.weights.len() as u32,
        contestants: WORK,
        metric: Metric::MessagesPerS,
        ..ONE
    }
}

/// Each way to share a listener; the last two are nginx as in the second, started by ksf.
const SHARING: &[Contestant] = &[NginxMutex, NginxExclusive, NginxReuseport, NginxTuned, Accel, AccelOff];

static NEW_CONNECTIONS: WebLoad =
    WebLoad { rate_per_s: None, keep: false, names_worker: false, costly: false, disturbance: None };
static NAMED: WebLoad = WebLoad { names_worker: true, ..NEW_CONNECTIONS };
static KEPT: WebLoad = WebLoad { keep: true, ..NEW_CONNECTIONS };
static COSTLY: WebLoad = WebLoad { costly: true, ..KEPT };
static COSTLY_NEW: WebLoad = WebLoad { keep: false, ..COSTLY };
static STEADY: WebLoad = WebLoad { rate_per_s: Some(4_000), ..NAMED };
static RELOADED: WebLoad = disturbed(Disturbance::Reload);
static RESIZED: WebLoad = disturbed(Disturbance::Resize);
static KILLED: WebLoad = disturbed(Disturbance::Kill);
static STALLED: WebLoad = disturbed(Disturbance::Stall);

const fn disturbed(disturbance: Disturbance) -> WebLoad {
    WebLoad { rate_per_s: Some(2_000), keep: false, names_worker: true, costly: false, disturbance: Some(disturbance) }
}

/// nginx with a worker, and the client with a thread, on each of two CPUs.
const fn accel(name: &'static str, title: &'static str, load: &'static WebLoad, metric: Metric) -> Case {
    Case {
        name,
        title,
        row: Row::Accel,
        service: Service::Web(load),
        in_flight: if load.rate_per_s.is_some() { 1024 } else { 32 },
        connections: 2,
        contestants: SHARING,
        metric,
        ..ONE
    }
}

/// The case of the store that is also measured unpinned, and whose system calls are counted.
pub(crate) const STORE_MAIN: &str = "store-set-50";

const STORE_SET: &[Contestant] = &[Store, RedisAlways, Redis];

static SET_64: StoreLoad = StoreLoad::Set { value_bytes: 64 };
static SET_1400: StoreLoad = StoreLoad::Set { value_bytes: 1400 };
static GET_64: StoreLoad = StoreLoad::Get { value_bytes: 64 };
static KEYS: StoreLoad = StoreLoad::Keys;

/// Clients of a store, each with so many commands in flight.
const fn store(
    name: &'static str,
    title: &'static str,
    load: &'static StoreLoad,
    [connections, in_flight]: [u32; 2],
    contestants: &'static [Contestant],
) -> Case {
    Case {
        name,
        title,
        row: Row::Store,
        service: Service::Store(load),
        in_flight,
        connections,
        contestants,
        metric: Metric::MessagesPerS,
        ..ONE
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
};

/// The rows of the table of goals.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "null-tcp-1",
        title: "NULL RPC over TCP, 1 in flight",
        row: Row::RoundTrip,
        service: Service::Null,
        contestants: &[PairFloor, Threads, ThreadsSpin, EventLoop, Kernel, Uring, Epoll, Ganesha, GaneshaTuned],
        metric: Metric::RttP50Us,
        ..ONE
    },
    Case {
        name: "null-tcp-1-polled",
        title: "NULL RPC over TCP, 1 in flight, the client polls",
        row: Row::RoundTrip,
        service: Service::Null,
        client_polls: true,
        contestants: &[Threads, ThreadsSpin, EventLoop, Kernel, Uring, Epoll],
        metric: Metric::RttP50Us,
        ..ONE
    },
    Case {
        name: "echo-tcp-1",
        title: "Echo of 64 bytes over TCP, 1 in flight",
        row: Row::RoundTrip,
        service: Service::Echo,
        contestants: &[PairFloor, Threads, ThreadsSpin, EventLoop, Kernel, Uring, Epoll, Sockperf, SockperfTuned],
        metric: Metric::RttP50Us,
        ..ONE
    },
    Case {
        name: "null-tcp-128",
        title: "NULL RPC over TCP, 128 in flight, 1 connection",
        row: Row::Pipelined,
        service: Service::Null,
        in_flight: 128,
        contestants: NULL_TCP,
        metric: Metric::MessagesPerS,
        ..ONE
    },
    Case {
        name: "null-tcp-128x2",
        title: "NULL RPC over TCP, 128 in flight on each of 2 connections",
        row: Row::Pipelined,
        service: Service::Null,
        in_flight: 128,
        connections: 2,
        contestants: NULL_TCP,
        metric: Metric::MessagesPerS,
        ..ONE
    },
    Case {
        name: "echo-udp-1",
        title: "Echo of 64 bytes over UDP, 1 in flight",
        row: Row::Udp,
        service: Service::Echo,
        udp: true,
        contestants: UDP_ALONE,
        metric: Metric::RttP50Us,
        ..ONE
    },
    Case {
        name: "echo-udp-128",
        title: "Echo of 64 bytes over UDP, 128 in flight",
        row: Row::Udp,
        service: Service::Echo,
        udp: true,
        in_flight: 128,
        contestants: UDP,
        metric: Metric::MessagesPerS,
        ..ONE
    },
    Case {
        name: "null-udp-1",
        title: "NULL RPC over UDP, 1 in flight",
        row: Row::Udp,
        service: Service::Null,
        udp: true,
        contestants: UDP_ALONE,
        metric: Metric::RttP50Us,
        ..ONE
    },
    Case {
        name: "null-udp-128",
        title: "NULL RPC over UDP, 128 in flight",
        row: Row::Udp,
        service: Service::Null,
        udp: true,
        in_flight: 128,
        contestants: UDP,
        metric: Metric::MessagesPerS,
        ..ONE
    },
    Case {
        name: "idle-10000",
        title: "10,000 idle connections, NULL RPC over TCP on another",
        row: Row::Idle,
        service: Service::Null,
        idle: 10_000,
        contestants: &[Threads, EventLoop, Kernel, Uring, Epoll],
        metric: Metric::IdleBytes,
        ..ONE
    },
    mux("mux-discard", "Messages of 5000 bytes that are thrown away, 8 connections with 1 in flight", &DISCARD, 1),
    Case {
        contestants: WORK_SLEEP,
        ..mux("mux-sleep-split", "Messages that sleep 50 to 200 us, connections split 3:1", &SLEEP_SPLIT, WINDOW)
    },
    Case {
        contestants: WORK_SLEEP,
        ..mux("mux-sleep-skewed", "Messages that sleep 50 to 200 us, connections 8:1:1:1", &SLEEP_SKEWED, WINDOW)
    },
    mux("mux-compute-split", "Messages that compute 50 to 200 us, connections split 3:1", &COMPUTE_SPLIT, WINDOW),
    mux("mux-compute-skewed", "Messages that compute 50 to 200 us, connections 8:1:1:1", &COMPUTE_SKEWED, WINDOW),
    mux("mux-pipeline-64", "Small messages, 4 connections with 64 in flight each", &PIPELINE, 64),
    mux("mux-pipeline-256", "Small messages, 4 connections with 256 in flight each", &PIPELINE, 256),
    // No threads or loops here: for them one connection is one thread, which this load would overload 1.6 times.
    Case {
        contestants: &[IdealQueue, Workers4],
        metric: Metric::QuickP99Us,
        ..mux("mux-mixed", "1 connection, 400 messages per second, of which 20 % sleep 20 ms", &MIXED, 1024)
    },
    Case {
        row: Row::Connections,
        in_flight: 64,
        contestants: &[NginxExclusive, NginxReuseport, NginxTuned, Demo],
        ..accel(
            "connections",
            "A new connection for each answer of 64 bytes, 64 at a time",
            &NEW_CONNECTIONS,
            Metric::MessagesPerS,
        )
    },
    accel("accel-rate", "A new connection for each request, 32 at a time", &NAMED, Metric::MessagesPerS),
    accel("accel-steady", "4,000 new connections per second", &STEADY, Metric::RttP99Us),
    Case {
        contestants: &[Haproxy, HaproxyShards, AccelHaproxy, AccelHaproxyShards, Lighttpd, AccelLighttpd],
        ..accel("accel-others", "4,000 new connections per second, other programs", &STEADY, Metric::RttP99Us)
    },
    Case {
        contestants: &[NginxExclusive, Accel, AccelOff],
        ..accel("accel-kept", "Requests on 32 kept connections", &KEPT, Metric::MessagesPerS)
    },
    Case {
        contestants: &[NginxExclusive, Wrk],
        ..accel("generators", "Answers that nginx compresses, on 32 kept connections", &COSTLY, Metric::MessagesPerS)
    },
    Case {
        contestants: &[NginxExclusive, Wrk, Ab],
        ..accel(
            "generators-new",
            "Answers that nginx compresses, each on a new connection, 32 at a time",
            &COSTLY_NEW,
            Metric::MessagesPerS,
        )
    },
    accel(
        "accel-stall",
        "2,000 new connections per second, a worker stalls 200 ms each second",
        &STALLED,
        Metric::RttP99Us,
    ),
    accel("accel-reload", "2,000 new connections per second, reloads", &RELOADED, Metric::Failures),
    accel(
        "accel-resize",
        "2,000 new connections per second, reloads with one worker less or more",
        &RESIZED,
        Metric::Failures,
    ),
    accel("accel-kill", "2,000 new connections per second, workers are killed", &KILLED, Metric::Failures),
    store(
        STORE_MAIN,
        "SET of 64 bytes, 50 clients",
        &SET_64,
        [50, 1],
        &[Store, StoreEpoll, RedisAlways, RedisEverysec, Redis],
    ),
    store("store-set-50-16", "SET of 64 bytes, 50 clients with 16 in flight", &SET_64, [50, 16], STORE_SET),
    store("store-set-1", "SET of 64 bytes, 1 client", &SET_64, [1, 1], STORE_SET),
    store("store-set-1000", "SET of 64 bytes, 1,000 clients", &SET_64, [1000, 1], STORE_SET),
    store("store-set-1400", "SET of 1,400 bytes, 50 clients", &SET_1400, [50, 1], STORE_SET),
    store("store-get-50", "GET of 64 bytes, 50 clients", &GET_64, [50, 1], &[Store, Redis]),
    store(
        "store-generators",
        "SET of 64 bytes, 50 clients with 16 in flight, by two generators",
        &SET_64,
        [50, 16],
        &[RedisAlways, RedisBenchmark],
    ),
    Case {
        metric: Metric::RecoveredKeysPerS,
        ..store(
            "store-keys",
            "A million keys of 8 bytes with values of 8 bytes, and a start after them",
            &KEYS,
            [1, 1],
            &[Store, RedisAlways],
        )
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_busiest_loop() {
        assert_eq!(SLEEP_SPLIT.max_share(), 0.75);
        assert_eq!(SLEEP_SKEWED.max_share(), 9.0 / 11.0);
        assert_eq!(DISCARD.max_share(), 0.5);
    }

    /// Every run opens all connections anew: the loops must begin where they began before.
    #[test]
    fn loops_are_dealt_alike_in_every_run() {
        for case in CASES {
            if let Service::Work(load) = case.service {
                assert_eq!(load.weights.len() % load.loops.len(), 0, "{}", case.name);
            }
        }
    }
}
