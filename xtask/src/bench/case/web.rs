//! Web servers: connections, accel.

use super::super::contestant::Contestant::{
    self, Ab, Accel, AccelHaproxy, AccelHaproxyShards, AccelLighttpd, AccelOff, Demo, Haproxy, HaproxyShards, Lighttpd,
    NginxExclusive, NginxMutex, NginxReuseport, NginxTuned, Wrk,
};
use super::super::web::{Disturbance, WebLoad};
use super::{Case, Metric, ONE, Row, Service};

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

pub(super) const CASES: &[Case] = &[
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
];
