//! What is to be measured, checked and with defaults filled in.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::conn::Terms;
use super::url::Url;
use crate::drive::open::{Arrival, Schedule};
use crate::drive::pin::Pinning;
use crate::drive::transport::{Socket, SocketOptions, Transport};
use crate::error::LoadError;
use crate::options::target::Endpoint;

/// Who decides when a request is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Pace {
    /// Each connection sends its next request when the last one is settled.
    Closed,
    /// A schedule.
    Open { rate_per_s: u64, arrival: Arrival, seed: u64, spin: Duration },
}

/// The plan of one run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) urls: Vec<Url>,
    /// Lines without their ends.
    pub(crate) headers: Vec<String>,
    /// Empty: the system's choice.
    pub(crate) sources: Vec<IpAddr>,
    pub(crate) terms: Terms,
    pub(crate) pace: Pace,
    /// At a time, over all threads.
    pub(crate) connections: usize,
    /// Over all threads.
    pub(crate) requests: Option<u64>,
    pub(crate) duration: Option<Duration>,
    /// How long what is under way at the end is awaited.
    pub(crate) drain: Duration,
    pub(crate) threads: usize,
    pub(crate) pinning: Pinning,
    pub(crate) force: bool,
    pub(crate) server_pids: Vec<u32>,
    pub(crate) server_cgroup: Option<PathBuf>,
    pub(crate) json: bool,
}

/// From where to where connections go, and what they ask for.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    pub(crate) source: Option<IpAddr>,
    pub(crate) destination: SocketAddr,
    /// The request that keeps the connection, and the one that asks the server to close it.
    pub(crate) requests: [Box<[u8]>; 2],
}

impl Plan {
    /// Every source to every destination of its family.
    pub(crate) fn routes(&self) -> Result<Vec<Route>, LoadError> {
        let mut routes = Vec::new();
        for url in &self.urls {
            let destination = self.destination(url)?;
            let requests = [url.request(&self.headers, false), url.request(&self.headers, true)];
            if self.sources.is_empty() {
                routes.push(Route { source: None, destination, requests });
                continue;
            }
            let sources = self.sources.iter().filter(|source| source.is_ipv4() == destination.is_ipv4());
            let before = routes.len();
            for source in sources {
                routes.push(Route { source: Some(*source), destination, requests: requests.clone() });
            }
            if routes.len() == before {
                return Err(LoadError::Usage(format!("--source has no address of the family of {destination}")));
            }
        }
        Ok(routes)
    }

    /// The address of a URL. Where a name has several, the first that takes a connection; an address is not tried.
    fn destination(&self, url: &Url) -> Result<SocketAddr, LoadError> {
        let endpoints = url.target.resolve()?;
        let chosen = match endpoints.as_slice() {
            [only] => only.clone(),
            several => {
                let timeout = Duration::from_nanos(self.terms.connect_timeout_ns);
                let options = SocketOptions {
                    transport: Transport::Tcp,
                    nodelay: false,
                    connect_timeout: timeout,
                    tick: timeout,
                    send_buffer_bytes: None,
                    receive_buffer_bytes: None,
                };
                Socket::connect(&url.target, several, &options)?.peer
            }
        };
        match chosen {
            Endpoint::Inet(address) => Ok(address),
            Endpoint::Unix(_) => unreachable!("a URL has no path of a socket"),
        }
    }

    /// The part of a thread in a number that all threads share.
    pub(crate) fn share(&self, all: u64, thread: usize) -> u64 {
        let threads = self.threads as u64;
        all / threads + u64::from((thread as u64) < all % threads)
    }

    /// The schedule of a thread; `None` in a closed loop.
    pub(crate) fn schedule(&self, thread: usize) -> Option<Schedule> {
        let Pace::Open { rate_per_s, arrival, seed, .. } = self.pace else {
            return None;
        };
        let threads = self.threads as f64;
        let phase = thread as f64 / threads;
        Some(Schedule::new(arrival, rate_per_s as f64 / threads, phase, seed.wrapping_add(thread as u64)))
    }
}
