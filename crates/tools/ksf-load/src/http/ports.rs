//! Whether the ports of a run last: a port of a connection that this side closed first is in TIME_WAIT for a minute.

use std::collections::BTreeSet;
use std::fs::read_to_string;

use super::plan::HttpPlan;
use crate::drive::connection::CloseBy;
use crate::drive::plan::Route;
use crate::error::LoadError;
use crate::report::warn::Warning;

/// Ports that a run has and needs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Forecast {
    /// Of one source towards one destination: the size of net.ipv4.ip_local_port_range.
    pub(crate) per_pair: u64,
    /// Pairs of a source and a destination.
    pub(crate) pairs: u64,
    /// Connections at a time plus those that this side closes; `None` where that depends on the server's speed.
    pub(crate) needed: Option<u64>,
}

impl Forecast {
    /// In this thread's network namespace.
    pub(crate) fn of(plan: &HttpPlan, routes: &[Route]) -> Forecast {
        let range = read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let bounds: Vec<u64> = range.split_whitespace().filter_map(|bound| bound.parse().ok()).collect();
        let pairs: BTreeSet<_> = routes.iter().map(|route| (route.source, route.destination)).collect();
        let closed = match (plan.args.close, plan.args.requests_per_connection) {
            // Those without a limit of requests end with the run.
            (CloseBy::Server | CloseBy::Reset, _) | (_, 0) => Some(0),
            (CloseBy::Client, requests) => plan.drive.requests.map(|count| count.div_ceil(requests)),
        };
        Forecast {
            // The kernel's default where there is no /proc.
            per_pair: if let [first, last] = bounds[..] { (last + 1).saturating_sub(first) } else { 28_232 },
            pairs: pairs.len() as u64,
            needed: closed.map(|closed| plan.drive.connections as u64 + closed),
        }
    }

    /// An error if the ports cannot last, unless `force`; a warning if they may not.
    pub(crate) fn judge(&self, force: bool) -> Result<Option<Warning>, LoadError> {
        let there_are = self.per_pair.saturating_mul(self.pairs);
        let need = match self.needed {
            Some(needed) if needed <= there_are => return Ok(None),
            Some(needed) => format!("the run needs {needed} ports"),
            None => "this side closes first, so the run needs a port for each connection of a minute".to_owned(),
        };
        let text = format!(
            "{need}, those in TIME_WAIT for up to 60 s included, and there are {there_are} ports ({} per source and \
             destination, {} such pairs); use fewer connections (-n), --close server, --close reset, more --source \
             addresses or more URLs",
            self.per_pair, self.pairs
        );
        match force || self.needed.is_none() {
            true => Ok(Some(Warning { code: "ports", text })),
            false => Err(LoadError::Exhausted(format!("{text}, or run all the same (--force)"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;

    #[test]
    fn the_side_that_closes_first_needs_the_ports() {
        let route = |source: &str, destination: &str| Route {
            source: Some(source.parse().unwrap()),
            destination: destination.parse().unwrap(),
            nodelay: false,
        };
        // Another path of a destination is no other destination.
        let routes = [
            route("127.0.0.2", "127.0.0.1:80"),
            route("127.0.0.2", "127.0.0.1:81"),
            route("127.0.0.2", "127.0.0.1:81"),
        ];
        for (options, needed) in [
            ("--close server", Some(10)),
            ("--linger0", Some(10)),
            ("--close client -c 1000", Some(1010)),
            ("--close client -c 1001 -r 10", Some(111)),
            ("--close client -r 0", Some(10)),
            ("--close client", None),
        ] {
            let forecast = Forecast::of(&plan(&format!("http://127.0.0.1/ -n 10 {options}")).unwrap(), &routes);
            assert_eq!((forecast.pairs, forecast.needed), (2, needed), "{options}");
            assert!(forecast.per_pair > 0);
            let few = Forecast { per_pair: 4, ..forecast };
            assert_eq!(few.judge(false).is_err(), needed.is_some(), "{options}");
            assert_eq!(few.judge(true).unwrap().unwrap().code, "ports");
        }
    }
}
