//! Which keys are asked for: each as likely as any other, or by Zipf's law.

use crate::drive::random::Random;

/// Terms of the sum that are added one by one; what follows them is computed.
const EXACT_TERMS: u64 = 1 << 16;

/// Draws numbers of keys, from 0. By Zipf's law 0 is the most popular, then 1, and so on.
#[derive(Debug, Clone)]
pub(super) enum Choice {
    Uniform { keys: u64 },
    Zipf(Zipf),
}

impl Choice {
    /// Of at least one key. `theta` is above 0 and below 1: the larger, the more go to few keys.
    pub(super) fn new(keys: u64, theta: Option<f64>) -> Choice {
        match theta {
            None => Choice::Uniform { keys },
            Some(theta) => Choice::Zipf(Zipf::new(keys, theta)),
        }
    }

    pub(super) fn draw(&self, random: &mut Random) -> u64 {
        match self {
            Choice::Uniform { keys } => random.next() % keys,
            Choice::Zipf(zipf) => zipf.at(random.unit()),
        }
    }
}

/// Zipf's law: key `i`, from 1, is drawn in proportion to `1 / i^theta`.
///
/// The method is that of Gray, Sundaresan, Englert, Baclawski and Weinberger: Quickly Generating Billion-Record Synthetic
/// Databases, SIGMOD 1994, which YCSB uses, too. The first two keys have exactly their share, the others are drawn by the inverse
/// of an integral in the place of the sum.
#[derive(Debug, Clone)]
pub(super) struct Zipf {
    keys: u64,
    /// Of the paper: zeta(n), 1 / (1 - theta), eta.
    zeta: f64,
    alpha: f64,
    eta: f64,
    /// Where the share of the second key ends, in the scale of `zeta`.
    second: f64,
}

impl Zipf {
    fn new(keys: u64, theta: f64) -> Zipf {
        let zeta = zeta(keys, theta);
        let second = 1.0 + 0.5f64.powf(theta);
        let eta = (1.0 - (2.0 / keys as f64).powf(1.0 - theta)) / (1.0 - second / zeta);
        Zipf { keys, zeta, alpha: 1.0 / (1.0 - theta), eta, second }
    }

    /// The key for a number in [0, 1).
    fn at(&self, unit: f64) -> u64 {
        let scaled = unit * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < self.second {
            return (self.keys - 1).min(1);
        }
        let place = self.keys as f64 * (self.eta * unit - self.eta + 1.0).powf(self.alpha);
        (place as u64).min(self.keys - 1)
    }
}

/// The sum of `1 / i^theta` for `i` from 1 to `n`: of many terms all but the first by the formula of Euler and Maclaurin,
/// whose next term is below the precision of the sum.
fn zeta(n: u64, theta: f64) -> f64 {
    let term = |i: f64| i.powf(-theta);
    let first = n.min(EXACT_TERMS);
    let sum: f64 = (1..=first).map(|i| term(i as f64)).sum();
    if first == n {
        return sum;
    }
    let (from, to) = (first as f64, n as f64);
    let integral = (to.powf(1.0 - theta) - from.powf(1.0 - theta)) / (1.0 - theta);
    sum + integral + (term(to) - term(from)) / 2.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drawn(keys: u64, theta: Option<f64>, times: u64) -> Vec<u64> {
        let (choice, mut random) = (Choice::new(keys, theta), Random::new(1));
        let mut counts = vec![0; keys as usize];
        (0..times).for_each(|_| counts[choice.draw(&mut random) as usize] += 1);
        counts
    }

    #[test]
    fn every_key_is_as_likely_as_any_other() {
        let counts = drawn(100, None, 1_000_000);
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
    }

    #[test]
    fn keys_are_drawn_by_zipfs_law() {
        for theta in [0.5, 0.99] {
            let (keys, times) = (1000, 2_000_000);
            let counts = drawn(keys, Some(theta), times);
            let share =
                |from: u64, to: u64| (from..=to).map(|i| (i as f64).powf(-theta)).sum::<f64>() / zeta(keys, theta);
            let found =
                |from: u64, to: u64| counts[from as usize - 1..to as usize].iter().sum::<u64>() as f64 / times as f64;
            // The first two are exact but for chance, which is below 1 % of them here.
            for i in [1, 2] {
                let (found, share) = (found(i, i), share(i, i));
                assert!((found / share - 1.0).abs() < 0.02, "{theta}: key {i} has {found} instead of {share}");
            }
            for (from, to) in [(1, 10), (1, 100), (11, 100), (101, 1000)] {
                let (found, share) = (found(from, to), share(from, to));
                assert!((found / share - 1.0).abs() < 0.1, "{theta}: {from} to {to} have {found} instead of {share}");
            }
        }
    }

    #[test]
    fn a_seed_reproduces_the_keys_and_few_keys_are_no_trap() {
        assert_eq!(drawn(50, Some(0.99), 1000), drawn(50, Some(0.99), 1000));
        assert_eq!(drawn(1, Some(0.99), 100), [100]);
        assert_eq!(drawn(1, None, 100), [100]);
        let two = drawn(2, Some(0.5), 100_000);
        let share = 1.0 / (1.0 + 0.5f64.sqrt());
        assert!((two[0] as f64 / 100_000.0 - share).abs() < 0.01, "{two:?}");
    }

    #[test]
    fn long_sums_are_computed_as_if_they_were_added() {
        for theta in [0.01, 0.5, 0.99] {
            let n = 4 * EXACT_TERMS;
            let added: f64 = (1..=n).map(|i| (i as f64).powf(-theta)).sum();
            assert!((zeta(n, theta) / added - 1.0).abs() < 1e-9, "{theta}");
        }
    }

    proptest! {
        #[test]
        fn no_key_is_out_of_range(keys in 1u64..1 << 30, theta in 0.001f64..0.999, unit in 0.0f64..1.0) {
            let zipf = Zipf::new(keys.min(1 << 12) + (keys & 1), theta);
            for unit in [unit, 0.0, 1.0 - f64::EPSILON / 2.0] {
                prop_assert!(zipf.at(unit) < zipf.keys);
            }
        }
    }
}
