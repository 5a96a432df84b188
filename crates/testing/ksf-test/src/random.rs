//! A small generator of numbers: the same seed gives the same numbers on every machine, for as long as this file lives.

use std::ops::{Deref, DerefMut, RangeInclusive};

/// The environment variable that gives a test another seed.
const SEED: &str = "KSF_TEST_SEED";

/// splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that starts from `seed`; neighbouring seeds give unrelated numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The generator of a test: it starts from `seed`, or from the environment variable `KSF_TEST_SEED`, and says which
    /// when the test fails.
    pub fn of_test(seed: u64) -> TestRandom {
        let given = std::env::var(SEED).ok();
        let seed = given.map_or(seed, |text| text.parse().unwrap_or_else(|_| panic!("{SEED}={text} is no number")));
        TestRandom { seed, random: Self::new(seed) }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `range`. Its bias, below 2^-32 for the ranges of a simulation, does not matter here.
    ///
    /// # Panics
    /// If the range is empty.
    pub fn within(&mut self, range: RangeInclusive<usize>) -> usize {
        let (low, high) = range.into_inner();
        assert!(low <= high, "an empty range has no number");
        low + (self.bits() % (high - low + 1) as u64) as usize
    }

    /// A number below `limit`.
    ///
    /// # Panics
    /// If the limit is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.within(1..=n) == 1
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.within(0..=choices.len() - 1)]
    }

    /// A length: mostly short, now and then anything up to `max`, because limits hide at both ends.
    pub fn length(&mut self, max: usize) -> usize {
        let cap = match self.within(0..=3) {
            0 => max.min(4),
            1 => max.min(64),
            _ => max,
        };
        self.within(0..=cap)
    }
}

/// See [`Random::of_test`].
#[derive(Debug)]
pub struct TestRandom {
    seed: u64,
    random: Random,
}

impl Deref for TestRandom {
    type Target = Random;

    fn deref(&self) -> &Random {
        &self.random
    }
}

impl DerefMut for TestRandom {
    fn deref_mut(&mut self) -> &mut Random {
        &mut self.random
    }
}

impl Drop for TestRandom {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the same numbers again: {SEED}={}", self.seed);
        }
    }
}

/// Bytes that tell every place from its neighbours, and every length and seed from the others, so that a byte which is
/// lost, repeated, or another's is seen.
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed ^ (length as u64) << 40);
    (0..length).map(|_| random.bits() as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_published_generator() {
        let mut random = Random::new(1234567);
        let numbers: Vec<_> = (0..3).map(|_| random.bits()).collect();
        assert_eq!(numbers, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn ranges_are_reached_at_both_ends_and_never_left() {
        let mut random = Random::new(1);
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[random.within(3..=7) - 3] += 1;
        }
        assert!(seen.iter().all(|count| *count > 100), "{seen:?}");
    }
}
