//! Will the ports last? Computed before the run, so that it does not measure its own exhaustion.
//!
//! A connection has a source and a destination, each with a port; all four must be unique. Towards one destination
//! from one source there are as many connections at a time as the range of ephemeral ports has (ip(7)). Who closes
//! first keeps the four in TIME_WAIT for a minute (TCP_TIMEWAIT_LEN): if it is this side, their ports cannot be used
//! again before, or after a second where tcp_tw_reuse allows it.

use std::fs::read_to_string;
use std::net::SocketAddr;
use std::time::Duration;

use super::plan::HttpPlan;
use crate::drive::connection::CloseBy;
use crate::drive::plan::{Pace, Route};
use crate::error::LoadError;
use crate::report::warn::Warning;

/// TCP_TIMEWAIT_LEN of include/net/tcp.h.
const TIME_WAIT: Duration = Duration::from_secs(60);

/// What this machine allows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Allowance {
    /// Ephemeral ports of one source towards one destination.
    pub(crate) ports: u64,
    /// How long a port stays in TIME_WAIT before it can be used again.
    pub(crate) time_wait: Duration,
}

impl Allowance {
    /// Of this thread's network namespace.
    pub(crate) fn here(routes: &[Route]) -> Allowance {
        let sysctl = |name: &str| read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default();
        let number = |name: &str| sysctl(name).trim().parse::<u64>().ok();
        let ports = ports_in(&sysctl("ip_local_port_range"), &sysctl("ip_local_reserved_ports"));
        let loopback = routes.iter().all(|route| route.destination.ip().is_loopback());
        // 1: always; 2: on loopback only. Timestamps tell the old connection's segments from the new one's.
        let reuse = match number("tcp_tw_reuse").unwrap_or(0) {
            1 => true,
            2 => loopback,
            _ => false,
        };
        let reuse = reuse && number("tcp_timestamps").unwrap_or(1) > 0;
        // The sysctl came with Linux 6.14; it was a second before.
        let delay = Duration::from_millis(number("tcp_tw_reuse_delay").unwrap_or(1000));
        Allowance { ports, time_wait: if reuse { delay.min(TIME_WAIT) } else { TIME_WAIT } }
    }
}

/// What a run needs, and what there is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Forecast {
    pub(crate) allowance: Allowance,
    /// Pairs of a source and a destination.
    pub(crate) pairs: u64,
    /// Connections at a time plus those in TIME_WAIT here; `None` where the rate is not known before.
    pub(crate) needed: Option<u64>,
    pub(crate) close: CloseBy,
    connections: u64,
}

impl Forecast {
    pub(crate) fn of(plan: &HttpPlan, routes: &[Route], allowance: Allowance) -> Forecast {
        let mut pairs: Vec<(Option<std::net::IpAddr>, SocketAddr)> =
            routes.iter().map(|route| (route.source, route.destination)).collect();
        pairs.sort();
        pairs.dedup();
        let close = plan.args.close;
        let connections = plan.drive.connections as u64;
        Forecast {
            allowance,
            pairs: pairs.len() as u64,
            needed: match close {
                CloseBy::Server | CloseBy::Reset => Some(connections),
                CloseBy::Client => closed_within(plan, allowance.time_wait).map(|closed| connections + closed),
            },
            close,
            connections,
        }
    }

    /// Connections that can exist at a time, TIME_WAIT included.
    pub(crate) fn capacity(&self) -> u64 {
        self.allowance.ports.saturating_mul(self.pairs)
    }

    /// Connections per second that can go on for ever; `None` for no limit.
    pub(crate) fn sustained_per_s(&self) -> Option<f64> {
        let seconds = self.allowance.time_wait.as_secs_f64();
        (self.close == CloseBy::Client && seconds > 0.0).then(|| self.capacity() as f64 / seconds)
    }

    /// An error if the ports cannot last, unless `force`; a warning if they may not.
    pub(crate) fn judge(&self, force: bool) -> Result<Option<Warning>, LoadError> {
        let remedy = match (self.close, self.connections > self.capacity()) {
            (_, true) => "use fewer connections (-n), more --source addresses or more URLs",
            (_, false) => {
                "let the server close first (--close server), reset (--close reset), or use more --source addresses or \
                 more URLs"
            }
        };
        let ports = format!(
            "there are {} ports ({} per source and destination, {} such pairs)",
            self.capacity(),
            self.allowance.ports,
            self.pairs
        );
        match self.needed {
            Some(needed) if needed > self.capacity() => {
                let text = format!(
                    "the run needs {needed} ports at a time{}, and {ports}; {remedy}",
                    match self.close {
                        CloseBy::Client => format!(", those in TIME_WAIT for {:?} included", self.allowance.time_wait),
                        _ => String::new(),
                    }
                );
                match force {
                    true => Ok(Some(Warning { code: "ports", text })),
                    false => Err(LoadError::Exhausted(format!("{text}, or run all the same (--force)"))),
                }
            }
            Some(_) => Ok(None),
            None => Ok(Some(Warning {
                code: "ports",
                text: format!(
                    "this side closes first, and {ports}: more than {:.0} connections a second will run out of them, \
                     since each stays in TIME_WAIT for {:?}; {remedy}",
                    self.sustained_per_s().unwrap_or(f64::INFINITY),
                    self.allowance.time_wait
                ),
            })),
        }
    }
}

/// The most connections this side closes within any time of this length; `None` if that depends on the server.
fn closed_within(plan: &HttpPlan, length: Duration) -> Option<u64> {
    let per_connection = match plan.args.requests_per_connection {
        // They end with the run.
        0 => return Some(0),
        requests => requests,
    };
    let by_count = plan.drive.requests.map(|requests| requests.div_ceil(per_connection));
    let by_rate = match plan.drive.pace {
        Pace::Closed => None,
        Pace::Open { rate_per_s, .. } => {
            let seconds = plan.drive.duration.map_or(length, |duration| duration.min(length)).as_secs_f64();
            Some((rate_per_s as f64 * seconds / per_connection as f64).ceil() as u64)
        }
    };
    [by_count, by_rate].into_iter().flatten().min()
}

/// The size of a range of ports without the reserved ones, in the kernel's notation: `32768 60999`, `1-5,8080`.
fn ports_in(range: &str, reserved: &str) -> u64 {
    let mut bounds = range.split_whitespace().map(|bound| bound.parse::<u64>());
    let (Some(Ok(first)), Some(Ok(last))) = (bounds.next(), bounds.next()) else {
        // The kernel's default.
        return ports_in("32768 60999", reserved);
    };
    let reserved = reserved.trim().split(',').filter_map(|part| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to) = (from.parse::<u64>().ok()?.max(first), to.parse::<u64>().ok()?.min(last));
        Some((to + 1).saturating_sub(from))
    });
    (last + 1).saturating_sub(first).saturating_sub(reserved.sum())
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;

    fn route(source: Option<&str>, destination: &str) -> Route {
        let source = source.map(|source| source.parse().unwrap());
        Route { source, destination: destination.parse().unwrap(), nodelay: false }
    }

    fn forecast(options: &str, routes: &[Route], ports: u64, time_wait_s: u64) -> Forecast {
        let allowance = Allowance { ports, time_wait: Duration::from_secs(time_wait_s) };
        Forecast::of(&plan(&format!("http://127.0.0.1/ {options}")).unwrap(), routes, allowance)
    }

    #[test]
    fn ports_are_counted_as_the_kernel_does() {
        assert_eq!(ports_in("32768\t60999\n", "\n"), 28232);
        assert_eq!(ports_in("1000 1009", "1-1000,1005,1008-2000\n"), 6);
        assert_eq!(ports_in("", ""), 28232);
    }

    #[test]
    fn who_closes_first_decides_what_is_needed() {
        let one = [route(None, "127.0.0.1:80")];
        for (options, needed) in [
            ("-n 10 --close server", Some(10)),
            ("-n 10 --linger0", Some(10)),
            ("-n 10 --close client -c 1000", Some(1010)),
            ("-n 10 --close client -c 1001 -r 10", Some(111)),
            ("-n 10 --close client -r 0", Some(10)),
            ("-n 10 --close client", None),
            ("-n 10 --close client --rate 100 --duration 20s", Some(2010)),
            ("-n 10 --close client --rate 100 --duration 2h", Some(6010)),
            ("-n 10 --close client --rate 100 --duration 20s -c 5", Some(15)),
        ] {
            assert_eq!(forecast(options, &one, 1000, 60).needed, needed, "{options}");
        }
    }

    #[test]
    fn what_cannot_last_is_refused_and_can_be_forced() {
        let one = [route(None, "127.0.0.1:80")];
        let many = forecast("-n 10 --close client -c 1000", &one, 1009, 60);
        let error = many.judge(false).unwrap_err();
        assert_eq!(error.exit_code(), 69);
        for part in ["1010", "1009 ports", "60s", "--close server", "--force"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
        assert_eq!(many.judge(true).unwrap().unwrap().code, "ports");
        assert_eq!(forecast("-n 10 --close client -c 1000", &one, 1010, 60).judge(false).unwrap(), None);
        let wide = forecast("-n 2000", &one, 1000, 60).judge(false).unwrap_err();
        assert!(wide.to_string().contains("-n"), "{wide}");
    }

    #[test]
    fn sources_and_destinations_multiply_the_ports() {
        let routes = [
            route(Some("127.0.0.2"), "127.0.0.1:80"),
            route(Some("127.0.0.3"), "127.0.0.1:80"),
            route(Some("127.0.0.2"), "127.0.0.1:81"),
            // Another path of a destination is no other destination.
            route(Some("127.0.0.2"), "127.0.0.1:81"),
        ];
        let forecast = forecast("-n 10 --close client", &routes, 1000, 60);
        assert_eq!((forecast.pairs, forecast.capacity(), forecast.sustained_per_s()), (3, 3000, Some(50.0)));
        let warning = forecast.judge(false).unwrap().unwrap();
        assert!(warning.text.contains("50 connections a second"), "{}", warning.text);
    }

    #[test]
    fn this_machine_has_ports() {
        let here = Allowance::here(&[route(None, "127.0.0.1:80")]);
        assert!(here.ports > 0 && here.time_wait <= TIME_WAIT, "{here:?}");
    }
}
