//! What is to be measured, checked and with defaults filled in.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::LoadHttpArgs;
use super::client::Exchange;
use super::response::Expected;
use super::url::Url;
use crate::drive::plan::{Destination, DrivePlan, Route};
use crate::drive::socket::{Socket, SocketOptions, Transport};
use crate::error::LoadError;
use crate::options::target::Endpoint;
use crate::options::usage;

/// Requests longer than this do not wait for acknowledgements (TCP_NODELAY): they may need several segments.
const SEGMENT_BYTES: usize = 1200;

/// The plan of one run.
#[derive(Debug, Clone)]
pub(crate) struct HttpPlan {
    pub(crate) drive: DrivePlan,
    pub(crate) urls: Vec<Url>,
    pub(crate) expected: Expected,
    /// With defaults filled in.
    pub(crate) args: LoadHttpArgs,
}

impl HttpPlan {
    /// Every source to every destination of its family, and what is asked for there.
    pub(crate) fn resolve(&mut self) -> Result<(Vec<Route>, Arc<Exchange>), LoadError> {
        let (mut routes, mut all_requests) = (Vec::new(), Vec::new());
        for url in &self.urls {
            let destination = self.destination(url)?;
            let requests = [false, true].map(|close| url.request(&self.args.header, close));
            let nodelay = requests[1].len() > SEGMENT_BYTES;
            let of_family = |source: &&IpAddr| source.is_ipv4() == destination.is_ipv4();
            let mut sources: Vec<Option<IpAddr>> =
                self.args.source.iter().filter(of_family).copied().map(Some).collect();
            if self.args.source.is_empty() {
                sources.push(None);
            }
            if sources.is_empty() {
                return usage(format!("--source has no address of the family of {destination}"));
            }
            for source in sources {
                routes.push(Route { source, destination, nodelay });
                all_requests.push(requests.clone());
            }
        }
        self.drive.destination = Destination::Renewed(routes.clone());
        let exchange = Exchange { requests: all_requests, close: self.args.close, expected: self.expected.clone() };
        Ok((routes, Arc::new(exchange)))
    }

    /// The address of a URL. Where a name has several, the first that takes a connection; an address is not tried.
    fn destination(&self, url: &Url) -> Result<SocketAddr, LoadError> {
        let endpoints = url.target.resolve()?;
        let chosen = match endpoints.as_slice() {
            [only] => only.clone(),
            several => {
                let options = SocketOptions::new(Transport::Tcp, self.args.connect_timeout);
                Socket::connect(&url.target, several, &options)?.peer
            }
        };
        match chosen {
            Endpoint::Inet(address) => Ok(address),
            Endpoint::Unix(_) => unreachable!("a URL has no path of a socket"),
        }
    }
}
