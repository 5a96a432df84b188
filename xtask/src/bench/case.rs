//! What is measured: the rows of the goals table, as cases.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::contestant::Contestant;

/// A row of the table of goals; `--only` takes these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Row {
    /// One request in flight over TCP
    RoundTrip,
    /// 128 requests in flight over TCP
    Pipelined,
    /// Echo and NULL calls over UDP
    Udp,
    /// 10,000 connections that do nothing
    Idle,
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
}

impl Placement {
    pub(crate) const ALL: [Placement; 3] = [Placement::Same, Placement::Other, Placement::Unpinned];
}

impl fmt::Display for Placement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Placement::Same => "same CPU",
            Placement::Other => "other CPU",
            Placement::Unpinned => "unpinned",
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
    pub(crate) contestants: &'static [Contestant],
    /// The figure that the chart shows.
    pub(crate) metric: Metric,
}

/// A measured figure. Names end in their unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    RttP50Us,
    RttP99Us,
    MessagesPerS,
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
    /// Anonymous memory of the server's process per idle connection.
    IdleBytes,
    /// Median round trip with the idle connections open, relative to without.
    IdleRttRatio,
}

impl Metric {
    pub(crate) const ALL: [Metric; 10] = [
        Metric::RttP50Us,
        Metric::RttP99Us,
        Metric::MessagesPerS,
        Metric::ServerCpuUs,
        Metric::OtherCpuUs,
        Metric::TotalCpuUs,
        Metric::MachineCpuUs,
        Metric::Syscalls,
        Metric::IdleBytes,
        Metric::IdleRttRatio,
    ];

    /// Heading of its column, with the unit.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Metric::RttP50Us => "round trip p50 us",
            Metric::RttP99Us => "round trip p99 us",
            Metric::MessagesPerS => "messages/s",
            Metric::ServerCpuUs => "server CPU us/msg",
            Metric::OtherCpuUs => "other CPU us/msg",
            Metric::TotalCpuUs => "total CPU us/msg",
            Metric::MachineCpuUs => "machine CPU us/msg",
            Metric::Syscalls => "system calls/msg",
            Metric::IdleBytes => "bytes/idle conn.",
            Metric::IdleRttRatio => "round trip, idle/none",
        }
    }

    /// A value of this metric, as short as its precision allows.
    pub(crate) fn format(self, value: f64) -> String {
        match self {
            Metric::MessagesPerS if value >= 1e6 => format!("{:.2} M", value / 1e6),
            Metric::MessagesPerS if value >= 1e4 => format!("{:.0} k", value / 1e3),
            Metric::MessagesPerS | Metric::IdleBytes => format!("{value:.0}"),
            Metric::RttP50Us | Metric::RttP99Us if value >= 100.0 => format!("{value:.0}"),
            Metric::ServerCpuUs | Metric::OtherCpuUs | Metric::TotalCpuUs | Metric::MachineCpuUs | Metric::Syscalls => {
                format!("{value:.3}")
            }
            _ => format!("{value:.2}"),
        }
    }
}

use Contestant::{Epoll, Ganesha, Kernel, PairFloor, Sockperf, Threads, UdpMmsg, UdpPlain, Uring};

const NULL_TCP: &[Contestant] = &[Threads, Kernel, Uring, Epoll, Ganesha];
const UDP: &[Contestant] = &[UdpPlain, UdpMmsg, Kernel, Uring, Epoll];

/// The first four rows of the table of goals.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "null-tcp-1",
        title: "NULL RPC over TCP, 1 in flight",
        row: Row::RoundTrip,
        service: Service::Null,
        udp: false,
        in_flight: 1,
        connections: 1,
        idle: 0,
        contestants: &[PairFloor, Threads, Kernel, Uring, Epoll, Ganesha],
        metric: Metric::RttP50Us,
    },
    Case {
        name: "echo-tcp-1",
        title: "Echo of 64 bytes over TCP, 1 in flight",
        row: Row::RoundTrip,
        service: Service::Echo,
        udp: false,
        in_flight: 1,
        connections: 1,
        idle: 0,
        contestants: &[Threads, Kernel, Uring, Epoll, Sockperf],
        metric: Metric::RttP50Us,
    },
    Case {
        name: "null-tcp-128",
        title: "NULL RPC over TCP, 128 in flight, 1 connection",
        row: Row::Pipelined,
        service: Service::Null,
        udp: false,
        in_flight: 128,
        connections: 1,
        idle: 0,
        contestants: NULL_TCP,
        metric: Metric::MessagesPerS,
    },
    Case {
        name: "null-tcp-128x2",
        title: "NULL RPC over TCP, 128 in flight on each of 2 connections",
        row: Row::Pipelined,
        service: Service::Null,
        udp: false,
        in_flight: 128,
        connections: 2,
        idle: 0,
        contestants: NULL_TCP,
        metric: Metric::MessagesPerS,
    },
    Case {
        name: "echo-udp-1",
        title: "Echo of 64 bytes over UDP, 1 in flight",
        row: Row::Udp,
        service: Service::Echo,
        udp: true,
        in_flight: 1,
        connections: 1,
        idle: 0,
        contestants: UDP,
        metric: Metric::RttP50Us,
    },
    Case {
        name: "echo-udp-128",
        title: "Echo of 64 bytes over UDP, 128 in flight",
        row: Row::Udp,
        service: Service::Echo,
        udp: true,
        in_flight: 128,
        connections: 1,
        idle: 0,
        contestants: UDP,
        metric: Metric::MessagesPerS,
    },
    Case {
        name: "null-udp-1",
        title: "NULL RPC over UDP, 1 in flight",
        row: Row::Udp,
        service: Service::Null,
        udp: true,
        in_flight: 1,
        connections: 1,
        idle: 0,
        contestants: UDP,
        metric: Metric::RttP50Us,
    },
    Case {
        name: "null-udp-128",
        title: "NULL RPC over UDP, 128 in flight",
        row: Row::Udp,
        service: Service::Null,
        udp: true,
        in_flight: 128,
        connections: 1,
        idle: 0,
        contestants: UDP,
        metric: Metric::MessagesPerS,
    },
    Case {
        name: "idle-10000",
        title: "10,000 idle connections, NULL RPC over TCP on another",
        row: Row::Idle,
        service: Service::Null,
        udp: false,
        in_flight: 1,
        connections: 1,
        idle: 10_000,
        contestants: &[Threads, Kernel, Uring, Epoll],
        metric: Metric::IdleBytes,
    },
];
