//! What arrives when, and how long it takes.

use ksf_test::Random;

/// How long messages take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ServiceTime {
    /// All the same.
    Fixed {
        /// Time of each.
        ns: u64,
    },
    /// Exponentially distributed.
    Exponential {
        /// Mean.
        mean_ns: u64,
    },
    /// Short ones, and long ones among them.
    Mixed {
        /// Time of a short one.
        short_ns: u64,
        /// Time of a long one.
        long_ns: u64,
        /// How many of a hundred are long.
        long_percent: u32,
    },
}

impl ServiceTime {
    /// Mean time of a message.
    pub fn mean_ns(self) -> f64 {
        match self {
            Self::Fixed { ns } => ns as f64,
            Self::Exponential { mean_ns } => mean_ns as f64,
            Self::Mixed { short_ns, long_ns, long_percent } => {
                let long = f64::from(long_percent) / 100.0;
                long_ns as f64 * long + short_ns as f64 * (1.0 - long)
            }
        }
    }

    /// A message's time, and whether it is a long one.
    fn draw(self, random: &mut Random) -> (u64, bool) {
        match self {
            Self::Fixed { ns } => (ns, false),
            Self::Exponential { mean_ns } => ((exponential(random) * mean_ns as f64) as u64, false),
            Self::Mixed { short_ns, long_ns, long_percent } => {
                let long = random.within(1..=100) <= long_percent as usize;
                (if long { long_ns } else { short_ns }, long)
            }
        }
    }
}

/// An open load: clients do not wait for answers.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    /// Times of the messages.
    pub service: ServiceTime,
    /// Part of the workers' time that the messages need. Above 1 a backlog grows until the last has arrived.
    pub utilisation: f64,
    /// Messages that arrive together, in one segment of one connection.
    pub burst: usize,
    /// Weight of each connection in the choice of who sends a segment.
    pub weights: &'a [u32],
    /// Messages in all.
    pub messages: usize,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// When it arrived.
    pub arrived_ns: u64,
    /// How long it takes.
    pub service_ns: u64,
    /// One of the long ones.
    pub long: bool,
    /// Where it came from.
    pub connection: usize,
}

/// Messages that arrive together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimSegment {
    /// When.
    pub at_ns: u64,
    /// Where.
    pub connection: usize,
    /// Which, as a range of [`Arrivals::jobs`].
    pub jobs: std::ops::Range<usize>,
}

/// A load, drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrivals {
    /// Connections.
    pub connections: usize,
    /// Messages in the order of their arrival.
    pub jobs: Vec<Job>,
    /// How they arrive.
    pub segments: Vec<SimSegment>,
}

impl Load<'_> {
    /// Draws it for so many workers: segments arrive as a Poisson process.
    ///
    /// # Panics
    /// If there is no connection with a weight, or a burst of nothing.
    pub fn draw(&self, workers: usize, seed: u64) -> Arrivals {
        assert!(self.burst > 0, "a segment carries a message");
        let mut random = Random::new(seed);
        let total: usize = self.weights.iter().map(|weight| *weight as usize).sum();
        let gap_ns = self.service.mean_ns() * self.burst as f64 / (workers as f64 * self.utilisation);
        let mut at_ns = 0.0;
        let mut arrivals = Arrivals { connections: self.weights.len(), jobs: Vec::new(), segments: Vec::new() };
        while arrivals.jobs.len() < self.messages {
            at_ns += exponential(&mut random) * gap_ns;
            let mut ticket = random.within(1..=total);
            let chosen = self.weights.iter().position(|weight| {
                let hit = ticket <= *weight as usize;
                ticket = ticket.saturating_sub(*weight as usize);
                hit
            });
            let connection = chosen.unwrap_or_default();
            let start = arrivals.jobs.len();
            for _ in 0..self.burst {
                let (service_ns, long) = self.service.draw(&mut random);
                arrivals.jobs.push(Job { arrived_ns: at_ns as u64, service_ns, long, connection });
            }
            let jobs = start..arrivals.jobs.len();
            arrivals.segments.push(SimSegment { at_ns: at_ns as u64, connection, jobs });
        }
        arrivals
    }
}

impl Arrivals {
    /// The work of the pinned worker that has most, as a multiple of the mean of all workers: what pinning can lose.
    pub fn skew(&self, workers: usize) -> f64 {
        let mut work_ns = vec![0; workers];
        self.jobs.iter().for_each(|job| work_ns[job.connection % workers] += job.service_ns);
        let most = work_ns.iter().copied().max().unwrap_or_default();
        (most * workers as u64) as f64 / work_ns.iter().sum::<u64>().max(1) as f64
    }
}

/// Exponentially distributed with mean 1.
fn exponential(random: &mut Random) -> f64 {
    // In (0, 1]: the logarithm is finite.
    let uniform = ((random.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    -uniform.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_loads_have_the_means_they_were_asked_for() {
        let service = ServiceTime::Mixed { short_ns: 20_000, long_ns: 20_000_000, long_percent: 20 };
        let load = Load { service, utilisation: 0.5, burst: 4, weights: &[3, 1], messages: 40_000 };
        let arrivals = load.draw(4, 1);
        let work: u64 = arrivals.jobs.iter().map(|job| job.service_ns).sum();
        let end = arrivals.segments.last().unwrap().at_ns;
        let utilisation = work as f64 / (4.0 * end as f64);
        assert!((0.47..0.53).contains(&utilisation), "{utilisation}");
        let first = arrivals.jobs.iter().filter(|job| job.connection == 0).count();
        assert!((0.73..0.77).contains(&(first as f64 / 40_000.0)), "{first}");
        let exponential = Load { service: ServiceTime::Exponential { mean_ns: 1000 }, burst: 1, ..load }.draw(4, 1);
        let mean = exponential.jobs.iter().map(|job| job.service_ns).sum::<u64>() / 40_000;
        assert!((980..1020).contains(&mean), "{mean}");
    }
}
