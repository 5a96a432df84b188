//! A run in a few numbers.

use crate::{Arrivals, Span};

/// Times from the arrival of a message to the end of its work, of all messages that are not long ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Half of them took no longer.
    pub p50_ns: u64,
    /// 99 of 100 took no longer.
    pub p99_ns: u64,
    /// 999 of 1000 took no longer.
    pub p999_ns: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Messages of all kinds per second, from the first arrival to the last end.
    pub per_second: f64,
}

impl Summary {
    /// Sums a run up.
    pub fn of(arrivals: &Arrivals, spans: &[Span]) -> Self {
        let times = arrivals.jobs.iter().zip(spans).filter(|(job, _)| !job.long);
        let mut times: Vec<_> = times.map(|(job, span)| span.done_ns - job.arrived_ns).collect();
        times.sort_unstable();
        let at = |thousandths: usize| {
            let rank = (times.len() * thousandths).div_ceil(1000).saturating_sub(1);
            times.get(rank).copied().unwrap_or_default()
        };
        let first_ns = arrivals.jobs.first().map_or(0, |job| job.arrived_ns);
        let last_ns = spans.iter().map(|span| span.done_ns).max().unwrap_or_default();
        Self {
            p50_ns: at(500),
            p99_ns: at(990),
            p999_ns: at(999),
            mean_ns: times.iter().sum::<u64>() as f64 / times.len().max(1) as f64,
            per_second: spans.len() as f64 * 1e9 / (last_ns - first_ns).max(1) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Job, SimSegment};

    #[test]
    fn percentiles_are_of_the_short_ones() {
        let job = |at: usize| Job { arrived_ns: 0, service_ns: 0, long: at == 1000, connection: 0 };
        let jobs: Vec<_> = (0..=1000).map(job).collect();
        let segments = vec![SimSegment { at_ns: 0, connection: 0, jobs: 0..1001 }];
        let arrivals = Arrivals { connections: 1, jobs, segments };
        let span = |at: u64| Span { began_ns: 0, done_ns: if at == 1000 { 1_000_000_000 } else { at + 1 } };
        let spans: Vec<_> = (0..=1000).map(span).collect();
        let summary = Summary::of(&arrivals, &spans);
        assert_eq!((summary.p50_ns, summary.p99_ns, summary.p999_ns), (500, 990, 999));
        assert_eq!(summary.mean_ns, 500.5);
        assert_eq!(summary.per_second, 1001.0);
    }
}
