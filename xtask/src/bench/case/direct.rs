//! One or many requests in flight to one server: round-trip, pipelined, udp, idle.

use super::super::contestant::Contestant::{
    self, Epoll, EventLoop, Ganesha, GaneshaTuned, Kernel, PairFloor, Sockperf, SockperfTuned, Threads, ThreadsSpin,
    UdpMmsg, UdpMmsgSpin, UdpPlain, Uring,
};
use super::{Case, Metric, ONE, Row, Service};

const NULL_TCP: &[Contestant] = &[Threads, ThreadsSpin, EventLoop, Kernel, Uring, Epoll, Ganesha, GaneshaTuned];
const UDP: &[Contestant] = &[UdpPlain, UdpMmsg, UdpMmsgSpin, Kernel, Uring, Epoll];
const UDP_ALONE: &[Contestant] = &[PairFloor, UdpPlain, UdpMmsg, UdpMmsgSpin, Kernel, Uring, Epoll];

pub(super) const CASES: &[Case] = &[
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
];
