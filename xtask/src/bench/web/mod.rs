//! Web servers: what they are loaded with, what is done to them meanwhile, and what is measured.
//!
//! ```text
//!   servers: nginx and the others, each way to share a listener
//!   client:  ksf load http, wrk, ab       disturb: reloads, kills, stalls of a worker
//!                        \                /
//!                         Meter::web: one measurement -> Sample
//! ```

mod accel;
mod client;
mod disturb;
mod generators;
mod nginx;
mod servers;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::client::{Client, Shown};
pub(crate) use self::disturb::Disturbance;
use self::generators::Generator;
use self::servers::Web;
use super::case::{Case, Metric};
use super::contestant::{Contestant, Pinning};
use super::measure::{Meter, insert_switches};
use super::raw::Sample;
use crate::cpu::Spent;
use crate::process::free_port;

/// A load for a web server. Its connections are those of [`Case::in_flight`], its threads [`Case::connections`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WebLoad {
    /// Requests per second, as independent arrivals; None: the next when one is answered.
    pub(crate) rate_per_s: Option<u32>,
    /// Connections are kept; else there is a new one for each request.
    pub(crate) keep: bool,
    /// Answers say which worker they are from, so that balance and locality can be told.
    pub(crate) names_worker: bool,
    /// Answers are compressed anew for each request, so that the server is the limit whoever loads it.
    pub(crate) costly: bool,
    pub(crate) disturbance: Option<Disturbance>,
}

/// The body of every answer.
pub(crate) const BODY_BYTES: usize = 64;

/// The file that a costly answer compresses.
const COSTLY_BYTES: usize = 16 * 1024;

/// Requests to warm a server up with.
const WARM_UP_COUNT: u64 = 2_000;

/// How much longer a measurement is whose requests come at a rate, so that its tail has some, or are few.
const LONG_FACTOR: f64 = 3.0;

/// Disturbances of one measurement: with five rounds a hundred.
const DISTURBANCES: u64 = 20;

impl Meter<'_> {
    /// One round of one contestant with a web load.
    pub(super) fn web(
        &self,
        case: &Case,
        load: &'static WebLoad,
        contestant: Contestant,
        pinning: &Pinning,
        sample: &mut Sample,
    ) -> Result<()> {
        let port = free_port()?;
        let web = Web::start(self.programs, contestant, case, load, pinning, port)?;
        let shown = Shown { port, pid: web.server.pid() };
        sample.server_command = shown.clean(&web.command);
        let (pid, round) = (web.server.pid(), sample.round);
        let rate_per_s = load.rate_per_s.map(|full| self.effort.rate_per_s(full));
        let client = |count| Client { load, rate_per_s, case, pinning, port, pid, count, round };
        let warm_up = client(Some(self.effort.count(WARM_UP_COUNT))).run(&self.programs.ksf)?;

        let factor = if load.rate_per_s.is_some() || load.costly { LONG_FACTOR } else { 1.0 };
        let length = (self.effort.seconds > 0.0).then_some(self.effort.seconds_for(case, pinning.placement) * factor);
        let count = length.is_none().then(|| self.effort.count(WARM_UP_COUNT));
        let measured = client(count);
        if let Contestant::Wrk | Contestant::Ab = contestant {
            let generator = if contestant == Contestant::Wrk { Generator::Wrk } else { Generator::Ab };
            let mut command = generator.command(&measured, length);
            sample.client_command = shown.clean(&crate::process::display(&command));
            let rate = generator.run(&mut command)?;
            sample.metrics.insert(Metric::MessagesPerS, rate);
            return web.stop().map(drop);
        }
        let run = || match load.disturbance {
            Some(disturbance) => {
                let running = measured.start(&self.programs.ksf)?;
                sample.client_command = shown.clean(&running.command);
                let done = disturb::disturb(disturbance, &web, self.effort.count(DISTURBANCES), self.effort);
                let result = running.interrupt()?;
                sample.metrics.insert(Metric::Disturbances, done? as f64);
                Ok(result)
            }
            None => {
                let command = measured.command(&self.programs.ksf, length);
                sample.client_command = shown.clean(&crate::process::display(&command));
                let timeout = Duration::from_secs_f64(length.unwrap_or(0.0)) + client::SLACK;
                client::parse(&self.client(command, &web.server, timeout)?)
            }
        };
        let (result, spent) = self.observed(&web.server, run)?;
        ensure!(
            load.disturbance.is_some() || result.failures.is_empty(),
            "nothing disturbed the server, and requests failed: {:?}",
            result.failures
        );
        let workers = web.worker_cpus()?;
        insert(sample, &result, &spent);
        self.insert_events(sample, &spent, result.answered)?;
        if load.names_worker && load.disturbance.is_none() && !workers.is_empty() {
            sample.metrics.insert(Metric::Balance, balance(&result.values, &workers)?);
            if let Some(share) = local_share(&result.threads, &workers) {
                sample.metrics.insert(Metric::LocalShare, share);
            }
        }
        insert_switches(sample, web.stop()?, warm_up.answered + result.answered);
        Ok(())
    }
}

/// What the client found.
#[derive(Debug, Default, PartialEq)]
pub(super) struct WebResult {
    pub(super) answered: u64,
    pub(super) rate_per_s: f64,
    /// p50, p99, p99.9 and the longest of the whole exchange, connecting included.
    pub(super) response_us: [f64; 4],
    /// Of the server's processes.
    pub(super) server_cpu_us: f64,
    pub(super) client_cpu_us: f64,
    /// Failed and unanswered requests by kind; only those that occurred.
    pub(super) failures: BTreeMap<String, u64>,
    /// Answers by worker.
    pub(super) values: BTreeMap<String, u64>,
    /// The CPU of each thread of the client, and its answers by worker.
    pub(super) threads: Vec<(Option<usize>, BTreeMap<String, u64>)>,
    pub(super) warnings: Vec<String>,
}

fn insert(sample: &mut Sample, result: &WebResult, spent: &Spent) {
    sample.warnings.clone_from(&result.warnings);
    sample.failures.clone_from(&result.failures);
    let per = |us: f64| us / result.answered as f64;
    let machine_us = spent.machine.as_secs_f64() * 1e6;
    let other_us = (machine_us - result.server_cpu_us - result.client_cpu_us).max(0.0);
    let [p50, p99, p999, max] = result.response_us;
    sample.metrics.extend([
        (Metric::MessagesPerS, result.rate_per_s),
        (Metric::RttP50Us, p50),
        (Metric::RttP99Us, p99),
        (Metric::RttP999Us, p999),
        (Metric::RttMaxUs, max),
        (Metric::ServerCpuUs, per(result.server_cpu_us)),
        (Metric::ClientCpuUs, per(result.client_cpu_us)),
        (Metric::OtherCpuUs, per(other_us)),
        (Metric::MachineCpuUs, per(machine_us)),
        (Metric::Failures, result.failures.values().sum::<u64>() as f64),
    ]);
}

/// The most answers of a worker relative to the fewest. A worker without any counts as one with one.
fn balance(values: &BTreeMap<String, u64>, workers: &BTreeMap<String, Vec<usize>>) -> Result<f64> {
    let of = |worker: &String| values.get(worker).copied().unwrap_or(0);
    let (most, least) = (workers.keys().map(of).max(), workers.keys().map(of).min());
    let (most, least) = most.zip(least).context("the server has no workers")?;
    ensure!(
        values.values().sum::<u64>() == workers.keys().map(of).sum::<u64>(),
        "answers of unknown workers: {values:?}"
    );
    Ok(most as f64 / least.max(1) as f64)
}

/// The share of answers that came from a worker on the CPU of the client's thread, where the connection arrived. None
/// unless all are pinned.
fn local_share(
    threads: &[(Option<usize>, BTreeMap<String, u64>)],
    workers: &BTreeMap<String, Vec<usize>>,
) -> Option<f64> {
    let (mut local, mut all) = (0, 0);
    for (cpu, values) in threads {
        for (worker, count) in values {
            let [home] = workers.get(worker)?.as_slice() else { return None };
            all += count;
            local += if *home == (*cpu)? { *count } else { 0 };
        }
    }
    (all > 0).then(|| local as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(counts: &[(&str, u64)]) -> BTreeMap<String, u64> {
        counts.iter().map(|(value, count)| ((*value).to_owned(), *count)).collect()
    }

    fn workers(cpus: [Vec<usize>; 2]) -> BTreeMap<String, Vec<usize>> {
        ["11".to_owned(), "12".to_owned()].into_iter().zip(cpus).collect()
    }

    #[test]
    fn balance_is_the_most_relative_to_the_fewest() {
        let workers = workers([vec![0], vec![1]]);
        assert_eq!(balance(&values(&[("11", 30), ("12", 20)]), &workers).unwrap(), 1.5);
        assert_eq!(balance(&values(&[("11", 30)]), &workers).unwrap(), 30.0);
        assert!(balance(&values(&[("11", 30), ("99", 1)]), &workers).is_err());
    }

    #[test]
    fn an_answer_is_local_where_worker_and_client_share_the_cpu() {
        let pinned = workers([vec![0], vec![1]]);
        let threads = [(Some(0), values(&[("11", 90), ("12", 10)])), (Some(1), values(&[("11", 10), ("12", 90)]))];
        assert_eq!(local_share(&threads, &pinned), Some(0.9));
        assert_eq!(local_share(&[(None, values(&[("11", 1)]))], &pinned), None);
        let free = workers([vec![0, 1], vec![0, 1]]);
        assert_eq!(local_share(&threads, &free), None);
    }
}
