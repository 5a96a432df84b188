//! What is to be measured, checked and with defaults filled in.

use std::time::Duration;

use super::load::{Kind, Mix};
use super::message::Codec;
use crate::drive::open::Arrival;
use crate::drive::pin::Pinning;
use crate::drive::transport::SocketOptions;
use crate::options::target::Target;

/// Who decides when a request is sent, and on which connection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Pace {
    /// A reply makes room for a request on its connection.
    PerConnection,
    /// A reply makes room for a request on a connection that is drawn by weight.
    Window,
    /// A schedule; connections are drawn by weight.
    Open { rate_per_s: u64, arrival: Arrival, spin: Duration },
}

/// The plan of one run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// `None`: nothing is sent, `ideal_workers` are simulated.
    pub(crate) target: Option<Target>,
    pub(crate) ideal_workers: Option<usize>,
    pub(crate) socket: SocketOptions,
    /// One for each connection.
    pub(crate) weights: Vec<u32>,
    /// Per unit of weight; for a window in all; on a schedule per connection.
    pub(crate) in_flight: usize,
    pub(crate) pace: Pace,
    pub(crate) mix: Mix,
    pub(crate) request_bytes: usize,
    /// In all.
    pub(crate) messages: Option<u64>,
    pub(crate) duration: Option<Duration>,
    pub(crate) pinning: Pinning,
    pub(crate) seed: u64,
    pub(crate) json: bool,
    pub(crate) header: bool,
}

impl Plan {
    pub(crate) fn codec(&self) -> Codec {
        Codec::new(self.request_bytes, self.mix.kind == Kind::Discard)
    }

    /// The most requests in flight on each connection.
    pub(crate) fn rooms(&self) -> Vec<usize> {
        let room = |&weight: &u32| match self.pace {
            Pace::PerConnection => self.in_flight * weight as usize,
            Pace::Window | Pace::Open { .. } => self.in_flight,
        };
        self.weights.iter().map(room).collect()
    }
}
