//! A small seeded generator for arrival times and identifiers: reproducible, and no dependency.

/// splitmix64's output function (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
pub(crate) fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Unrelated sequences from one seed.
pub(crate) fn sub_seed(seed: u64, what: &str) -> u64 {
    what.bytes().fold(mix(seed), |state, byte| mix(state ^ u64::from(byte)))
}

/// A splitmix64 sequence.
#[derive(Debug, Clone)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// Starts a sequence; different seeds give unrelated sequences.
    pub(crate) fn new(seed: u64) -> Random {
        Random { state: mix(seed) }
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(1);
        mix(self.state)
    }

    /// A value in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A value of the exponential distribution with mean 1: the gap of a Poisson process.
    pub(crate) fn exponential(&mut self) -> f64 {
        // 53 random bits give a number in (0, 1]; zero would have no logarithm.
        let unit = self.unit() + 1.0 / (1u64 << 53) as f64;
        -unit.ln()
    }
}

/// Draws connections by their weights.
#[derive(Debug)]
pub(crate) struct Spread {
    /// Sums of the weights up to each connection.
    ends: Vec<u64>,
    random: Random,
}

impl Spread {
    pub(crate) fn new(weights: &[u32], seed: u64) -> Spread {
        let mut end = 0;
        let ends = weights.iter().map(|&weight| {
            end += u64::from(weight);
            end
        });
        Spread { ends: ends.collect(), random: Random::new(seed) }
    }

    pub(crate) fn draw(&mut self) -> usize {
        let all = *self.ends.last().expect("there is a connection");
        let at = self.random.next() % all;
        self.ends.partition_point(|&end| end <= at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_reproduces() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            [random.next(), random.next(), random.next()]
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn exponential_has_mean_and_deviation_one() {
        let mut random = Random::new(1);
        let n = 200_000;
        let values: Vec<f64> = (0..n).map(|_| random.exponential()).collect();
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
        assert!(values.iter().all(|v| v.is_finite() && *v >= 0.0));
    }

    #[test]
    fn connections_are_drawn_by_weight() {
        let mut spread = Spread::new(&[8, 1, 0, 1], 1);
        let mut counts = [0u32; 4];
        for _ in 0..100_000 {
            counts[spread.draw()] += 1;
        }
        assert!((79_000..81_000).contains(&counts[0]), "{counts:?}");
        assert!((9_500..10_500).contains(&counts[1]) && (9_500..10_500).contains(&counts[3]), "{counts:?}");
        assert_eq!(counts[2], 0);
    }
}
