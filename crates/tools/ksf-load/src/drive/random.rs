//! A small seeded generator for arrival times and identifiers: reproducible, and no dependency.

/// splitmix64's output function (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
pub(crate) fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
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

    /// A value of the exponential distribution with mean 1: the gap of a Poisson process.
    pub(crate) fn exponential(&mut self) -> f64 {
        // 53 random bits give a number in (0, 1]; zero would have no logarithm.
        let unit = ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        -unit.ln()
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
}
