//! How the load is driven, checked and with defaults filled in: what the options of every tool come down to.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::drive::connection::Terms;
use crate::drive::pin::Pinning;
use crate::drive::schedule::{Arrival, Schedule};
use crate::drive::socket::SocketOptions;
use crate::drive::spin::ClientSpin;
use crate::options::target::{Endpoint, Target};

/// Who decides when a request is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Pace {
    /// A settled request makes room for the next.
    Closed,
    /// A schedule.
    Open { rate_per_s: u64, arrival: Arrival, seed: u64 },
}

/// From where to where a connection goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Route {
    /// `None`: the system's choice.
    pub(crate) source: Option<IpAddr>,
    pub(crate) destination: SocketAddr,
    /// TCP_NODELAY.
    pub(crate) nodelay: bool,
}

/// Where connections go.
#[derive(Debug, Clone)]
pub(crate) enum Destination {
    /// Connections that last are made before the clock starts: to the first address that takes them.
    Kept { target: Target, endpoints: Vec<Endpoint>, socket: SocketOptions },
    /// Connections that come and go take the routes in turn.
    Renewed(Vec<Route>),
}

/// How the load is driven.
#[derive(Debug, Clone)]
pub(crate) struct DrivePlan {
    pub(crate) tool: &'static str,
    pub(crate) destination: Destination,
    pub(crate) terms: Terms,
    pub(crate) pace: Pace,
    /// A closed loop of one connection per thread waits in its receive calls, as a plain client does. Else a thread
    /// waits for events of all its connections.
    pub(crate) blocking: bool,
    /// Only if it waits in its receive calls: every one waits for all the bytes it asked for (MSG_WAITALL).
    pub(crate) wait_all: bool,
    /// The most requests of one send. With 1 a receive brings at most one reply, if the protocol can tell its length.
    pub(crate) batch: usize,
    /// At a time, over all threads.
    pub(crate) connections: usize,
    /// One for each connection, or none: so many times `in_flight` it has; with `spread` its share of the requests.
    pub(crate) weights: Vec<u32>,
    /// The connection of each request is drawn by weight, from this seed. A closed loop then has `in_flight` requests
    /// over all connections.
    pub(crate) spread: Option<u64>,
    /// Most requests in flight on a connection.
    pub(crate) in_flight: usize,
    /// Over all threads.
    pub(crate) requests: Option<u64>,
    pub(crate) duration: Option<Duration>,
    /// Requests that were due in time but found no room are sent for so long after it.
    pub(crate) late: Duration,
    /// How long what is in flight at the end is awaited.
    pub(crate) drain: Duration,
    pub(crate) threads: usize,
    pub(crate) pinning: Pinning,
    /// Scheduling priority to ask for.
    pub(crate) nice: Option<i32>,
    /// Polling before sleeping.
    pub(crate) spin: ClientSpin,
}

impl DrivePlan {
    /// A closed loop of one thread with one connection and one request in flight, until the user stops it.
    pub(crate) fn new(tool: &'static str, destination: Destination, terms: Terms) -> DrivePlan {
        DrivePlan {
            tool,
            destination,
            terms,
            pace: Pace::Closed,
            blocking: false,
            wait_all: false,
            batch: 1,
            connections: 1,
            weights: Vec::new(),
            spread: None,
            in_flight: 1,
            requests: None,
            duration: None,
            late: Duration::from_nanos(terms.timeout_ns),
            drain: Duration::MAX,
            threads: 1,
            pinning: Pinning::Mask,
            nice: None,
            spin: ClientSpin::Off,
        }
    }

    /// The part of a thread in a number that all threads share.
    pub(crate) fn share(&self, all: u64, thread: usize) -> u64 {
        let threads = self.threads as u64;
        all / threads + u64::from((thread as u64) < all % threads)
    }

    /// The numbers of a thread's connections.
    pub(crate) fn connections_of(&self, thread: usize) -> std::ops::Range<usize> {
        let count = |thread| self.share(self.connections as u64, thread) as usize;
        let first = (0..thread).map(count).sum();
        first..first + count(thread)
    }

    /// The most requests in flight on this connection.
    pub(crate) fn room(&self, connection: usize) -> usize {
        match self.weights.get(connection) {
            Some(weight) if self.spread.is_none() => self.in_flight * *weight as usize,
            _ => self.in_flight,
        }
    }

    /// Whether a thread has several requests in flight, so that it can be the limit.
    pub(crate) fn has_several_in_flight(&self) -> bool {
        (0..self.connections).map(|connection| self.room(connection)).sum::<usize>() > self.threads
    }

    /// The schedule of a thread; `None` in a closed loop.
    pub(crate) fn schedule(&self, thread: usize) -> Option<Schedule> {
        let Pace::Open { rate_per_s, arrival, seed } = self.pace else { return None };
        let threads = self.threads as f64;
        let phase = thread as f64 / threads;
        Some(Schedule::new(arrival, rate_per_s as f64 / threads, phase, seed.wrapping_add(thread as u64)))
    }

    /// The CPUs of the threads, as far as they are bound.
    pub(crate) fn cpus(&self) -> Vec<Option<usize>> {
        let allowed = ksf::cpus::allowed().unwrap_or_default();
        (0..self.threads).map(|thread| self.pinning.cpu_of(thread, self.threads, &allowed)).collect()
    }
}
