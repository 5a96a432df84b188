//! Division of the process's descriptors (RLIMIT_NOFILE). Each service has a part for its connections and another one for its files or
//! backends: connections that do nothing take no descriptor from requests, nor from the connections of another service.

use std::fmt;

use ksf::cpus;
use ksf::limits::Limits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::plan::Plan;
use crate::output::{Failure, Status, say};

/// Descriptors of the process: its standard streams, signals, counters.
const OF_PROCESS: usize = 8;
/// Descriptors of a service: exports, logs, keys.
const OF_SERVICE: usize = 12;
/// Descriptors of a shard, without its listeners: engine, timer, mail, one to refuse with, and the files of a log.
const OF_SHARD: usize = 8;
/// Most descriptors that are left to requests for their time, to readers of counters, and to connections that are being refused.
const SPARE_MAX: usize = 256;
/// A service starts with this many connections, or as many as its limits allow.
const CONNECTIONS_MIN: usize = 16;

/// A service may have fewer connections than its limits allow.
pub(crate) struct Lowered {
    service: String,
    from: usize,
    to: usize,
    open_max: usize,
}

impl Lowered {
    /// `None`: it may have all of `from`.
    pub(crate) fn of(service: &str, from: usize, to: usize) -> Option<Self> {
        (to < from).then(|| Self { service: service.to_owned(), from, to, open_max: open_max() })
    }
}

impl fmt::Display for Lowered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { service, from, to, open_max } = self;
        write!(f, "{service}: connections_max is {to}, not {from}: ")?;
        write!(f, "the process may have {open_max} descriptors (ulimit -n)")
    }
}

/// Raises the soft limit of open files to the hard one: a server's connections are descriptors, and the soft limit
/// is low for the sake of programs that use select(2), which ksf does not. Returns it.
pub(crate) fn raise() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        say(&format_args!("warning: cannot raise the limit of open files: {error}"));
    }
    open_max()
}

fn open_max() -> usize {
    getrlimit(Resource::Nofile).current.map_or(usize::MAX, |max| usize::try_from(max).unwrap_or(usize::MAX))
}

/// Gives each service its parts of `open_max`. At most half of what the services do not need in any case is for files and backends.
/// An error: a service could have hardly any connections.
pub(crate) fn divide(open_max: usize, plans: &mut [Plan]) -> Result<Vec<Lowered>, Failure> {
    let own: usize = plans.iter().map(own).sum();
    let free = open_max.saturating_sub(OF_PROCESS + own + (open_max / 16).min(SPARE_MAX));
    let files = shares(free / 2, &plans.iter().map(|plan| wanted(plan, &plan.common.limits)).collect::<Vec<_>>());
    let free = free - files.iter().sum::<usize>();
    let connections: Vec<usize> = plans.iter().map(|plan| plan.common.limits.connections_max).collect();
    let connections = shares(free, &connections);
    // A reload may raise limits by the rest.
    let more = (free - connections.iter().sum::<usize>()) / plans.len().max(1);
    let parts = plans.iter_mut().zip(files).zip(connections);
    let given = parts.map(|((plan, files), connections)| give(plan, files, connections, more));
    Ok(given.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

/// Descriptors for files and backends that it can use with these limits.
fn wanted(plan: &Plan, limits: &Limits) -> usize {
    plan.kind.as_kind().descriptors_max(limits)
}

/// Descriptors that a service needs to start.
fn own(plan: &Plan) -> usize {
    let common = &plan.common;
    let shards = cpus::choose(common.cpus.as_ref()).map_or(1, |cpus| cpus.len());
    let listeners = common.sockets.addresses.len() + common.sockets.passed.len();
    OF_SERVICE + shards * (OF_SHARD + listeners)
}

fn give(plan: &mut Plan, files: usize, connections: usize, more: usize) -> Result<Option<Lowered>, Failure> {
    let mut none = plan.common.limits.clone();
    none.connections_max = 0;
    // Each connection may need one to a backend, also after a reload.
    let is_proxy = wanted(plan, &none) < wanted(plan, &plan.common.limits);
    let connections = if is_proxy { connections.min(files) + more / 2 } else { connections + more };
    let common = &mut plan.common;
    let from = common.limits.connections_max;
    if connections < from.min(CONNECTIONS_MIN) {
        let what = format!("{}: the process may have {} descriptors (ulimit -n)", common.name, open_max());
        return Err(Failure::new(Status::Os, format!("{what}, which leaves {connections} for connections"))
            .remedy("raise the limit: ulimit -n, or LimitNOFILE= in the unit; or choose fewer CPUs"));
    }
    (common.descriptors_max, common.connections_max) = (files, connections);
    common.limits.connections_max = from.min(connections);
    Ok(Lowered::of(&common.name, from, connections))
}

/// Divides `total` equally, but gives none more than it wants.
fn shares(total: usize, wanted: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|at| wanted[*at]);
    let (mut shares, mut left) = (vec![0; wanted.len()], total);
    for (done, at) in order.into_iter().enumerate() {
        shares[at] = wanted[at].min(left / (wanted.len() - done));
        left -= shares[at];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_wants_little_leaves_the_rest_to_others() {
        for (total, wanted, expected) in [
            (100, &[][..], &[][..]),
            (100, &[50], &[50]),
            (100, &[500], &[100]),
            (100, &[500, 10, 500], &[45, 10, 45]),
            (100, &[30, 20, 10], &[30, 20, 10]),
            (1, &[5, 5], &[0, 1]),
            (usize::MAX, &[usize::MAX, 7], &[usize::MAX - 7, 7]),
        ] {
            assert_eq!(shares(total, wanted), expected, "{total} {wanted:?}");
        }
    }
}
