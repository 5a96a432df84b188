//! A latency distribution.

use hdrhistogram::Histogram;

/// The largest latency the histogram tells apart; larger ones are counted there. One hour in nanoseconds.
const LATENCY_NS_MAX: u64 = 3600 * 1_000_000_000;

/// A latency distribution in nanoseconds: three significant digits, with the extremes exact.
#[derive(Debug, Clone)]
pub(crate) struct Latencies {
    pub(crate) histogram: Histogram<u64>,
    pub(crate) min_ns: u64,
    pub(crate) max_ns: u64,
    pub(crate) sum_ns: u128,
}

impl Latencies {
    /// An empty distribution whose memory has been touched, so that the measurement meets no page fault.
    pub(crate) fn new() -> Latencies {
        let mut histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("the bounds are valid constants");
        // Memory from the allocator may not be mapped yet; resetting writes every counter.
        histogram.reset();
        Latencies { histogram, min_ns: u64::MAX, max_ns: 0, sum_ns: 0 }
    }

    #[inline]
    pub(crate) fn record(&mut self, latency_ns: u64) {
        self.histogram.saturating_record(latency_ns);
        self.min_ns = self.min_ns.min(latency_ns);
        self.max_ns = self.max_ns.max(latency_ns);
        self.sum_ns += u128::from(latency_ns);
    }

    pub(crate) fn merge(&mut self, other: &Latencies) {
        self.histogram.add(&other.histogram).expect("all histograms have the same bounds");
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self.sum_ns += other.sum_ns;
    }

    /// All of several distributions in one.
    pub(crate) fn sum<'a>(parts: impl IntoIterator<Item = &'a Latencies>) -> Latencies {
        let mut sum = Latencies::new();
        parts.into_iter().for_each(|part| sum.merge(part));
        sum
    }

    pub(crate) fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.histogram.is_empty()
    }

    /// Smallest latency in nanoseconds, 0 if there is none.
    pub(crate) fn min(&self) -> u64 {
        if self.is_empty() { 0 } else { self.min_ns }
    }

    pub(crate) fn mean_ns(&self) -> f64 {
        self.sum_ns as f64 / self.count().max(1) as f64
    }

    /// The latency in nanoseconds that `percent` of the replies did not exceed: the floor of its bucket, as in
    /// the originals, but never outside the exact extremes.
    pub(crate) fn at_percent(&self, percent: f64) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let value = self.histogram.value_at_quantile(percent / 100.0);
        self.histogram.lowest_equivalent(value).clamp(self.min_ns, self.max_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_stay_between_the_exact_extremes() {
        let mut latencies = Latencies::new();
        assert_eq!((latencies.min(), latencies.at_percent(50.0)), (0, 0));
        for ns in [1_234_567, 2_000_001, 7_654_321] {
            latencies.record(ns);
        }
        assert_eq!(latencies.at_percent(0.0), 1_234_567);
        assert_eq!(latencies.min(), 1_234_567);
        assert_eq!(latencies.max_ns, 7_654_321);
        let median = latencies.at_percent(50.0);
        assert!((1_998_000..=2_000_001).contains(&median), "{median}");
        assert!((latencies.mean_ns() - 3_629_629.67).abs() < 0.01);
    }

    #[test]
    fn a_latency_beyond_the_range_is_counted() {
        let mut latencies = Latencies::new();
        latencies.record(u64::MAX);
        assert_eq!((latencies.count(), latencies.max_ns), (1, u64::MAX));
    }
}
