//! The schedule of an open loop: requests leave when they are due, whatever the server does.
//!
//! A latency counts from the intended start, so a request that had to wait because the server (or this program)
//! was slow is charged for the wait. Measured from the actual send, as closed loops do, such waits would vanish
//! from the figures (coordinated omission). The number in flight is bounded; a request that found no room is
//! counted, and sent as soon as there is room with its intended start unchanged.

use crate::drive::random::Random;
use crate::record::Latencies;

/// How the gaps between requests are distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrival {
    /// Equal gaps.
    Constant,
    /// Exponential gaps: independent arrivals, with the bursts that real traffic has.
    Poisson,
}

/// The intended starts of one thread's requests.
#[derive(Debug)]
pub(crate) struct Schedule {
    arrival: Arrival,
    gap_ns: f64,
    start_ns: u64,
    /// Offset of the next request from the start. A float, so that rates that do not divide a second do not drift.
    offset_ns: f64,
    random: Random,
}

impl Schedule {
    /// `rate_per_s` is that of this thread. `phase` in 0..1 shifts a constant schedule by a part of its gap, so that the
    /// threads do not fire together.
    pub(crate) fn new(arrival: Arrival, rate_per_s: f64, phase: f64, seed: u64) -> Schedule {
        let mut random = Random::new(seed);
        let gap_ns = 1e9 / rate_per_s;
        let first = match arrival {
            Arrival::Constant => phase,
            Arrival::Poisson => random.exponential(),
        };
        Schedule { arrival, gap_ns, start_ns: 0, offset_ns: first * gap_ns, random }
    }

    pub(crate) fn start(&mut self, now_ns: u64) {
        self.start_ns = now_ns;
    }

    /// When the next request is due, CLOCK_MONOTONIC.
    #[inline]
    pub(crate) fn due_ns(&self) -> u64 {
        self.start_ns + self.offset_ns as u64
    }

    #[inline]
    pub(crate) fn advance(&mut self) {
        let gaps = match self.arrival {
            Arrival::Constant => 1.0,
            Arrival::Poisson => self.random.exponential(),
        };
        self.offset_ns += gaps * self.gap_ns;
    }
}

/// How well a schedule was kept.
#[derive(Debug, Clone)]
pub(crate) struct Lateness {
    /// Requests that were due but found the bound on the number in flight reached.
    pub(crate) bound_hits: u64,
    /// How late requests were sent, counted from when they were due and there was room: this program's own delay.
    pub(crate) lag: Latencies,
    /// Requests that were due before the end but could not be sent any more.
    pub(crate) unsent: u64,
}

impl Lateness {
    pub(crate) fn new() -> Lateness {
        Lateness { bound_hits: 0, lag: Latencies::new(), unsent: 0 }
    }

    pub(crate) fn merge(&mut self, other: &Lateness) {
        self.bound_hits += other.bound_hits;
        self.lag.merge(&other.lag);
        self.unsent += other.unsent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(arrival: Arrival, rate: f64, phase: f64, seed: u64, n: usize) -> Vec<u64> {
        let mut schedule = Schedule::new(arrival, rate, phase, seed);
        schedule.start(1_000);
        (0..n)
            .map(|_| {
                let due = schedule.due_ns();
                schedule.advance();
                due
            })
            .collect()
    }

    #[test]
    fn a_constant_schedule_has_equal_gaps_and_does_not_drift() {
        let due = starts(Arrival::Constant, 3.0, 0.5, 0, 3001);
        assert_eq!(due[0], 1_000 + 166_666_666);
        for pair in due.windows(2) {
            assert!((333_333_333..=333_333_334).contains(&(pair[1] - pair[0])));
        }
        // 3000 gaps of a third of a second are 1000 s, within a microsecond.
        assert!((due[3000] - due[0]).abs_diff(1_000_000_000_000) < 1_000);
    }

    #[test]
    fn a_poisson_schedule_has_the_rate_and_its_seed_reproduces_it() {
        let due = starts(Arrival::Poisson, 1000.0, 0.0, 5, 100_001);
        let mean_gap = (due[100_000] - due[0]) as f64 / 100_000.0;
        assert!((mean_gap - 1e6).abs() < 2e4, "{mean_gap}");
        // For exponential gaps 1/e of them exceed the mean.
        let long = due.windows(2).filter(|p| (p[1] - p[0]) as f64 > 1e6).count();
        assert!((35_800..37_800).contains(&long), "{long}");
        assert_eq!(due, starts(Arrival::Poisson, 1000.0, 0.0, 5, 100_001));
        assert_ne!(due, starts(Arrival::Poisson, 1000.0, 0.0, 6, 100_001));
    }
}
