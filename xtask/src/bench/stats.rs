//! Medians with a confidence interval that assumes nothing about how the values are distributed.
//!
//! Of n independent values the number below the true median is binomial with probability 1/2. So the k-th smallest and
//! the k-th largest enclose it unless fewer than k values are on one side of it:
//! the confidence is 1 - 2 P(B(n, 1/2) < k). Source: J.-Y. Le Boudec, "Performance Evaluation of Computer and
//! Communication Systems", EPFL Press 2010, section 2.2 (confidence intervals for the median); the same in T. Hoefler,
//! R. Belli, "Scientific Benchmarking of Parallel Computing Systems", SC'15, section 3.1.3.

/// How often a goal may be looked at: after the first rounds, and when undecided after more of them.
pub(crate) const LOOKS_MAX: u32 = 4;

/// The confidence wanted of one look, so that all looks at a goal together are right with 95 % (Bonferroni's bound).
pub(crate) const CONFIDENCE: f64 = 1.0 - 0.05 / LOOKS_MAX as f64;

/// Less is no ground for a verdict. Five rounds have 0.9375.
const CONFIDENCE_MIN: f64 = 0.9;

/// A median, and between which values the true one is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) count: usize,
    /// That the true median is within; less than [`CONFIDENCE`] where there are too few values, which then are all within.
    pub(crate) confidence: f64,
}

impl Interval {
    /// Of these values; None if there are none.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Interval> {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let (rank, confidence) = rank(u32::try_from(count).ok()?);
        let middle = count / 2;
        let median = match count {
            0 => return None,
            _ if count.is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
            _ => values[middle],
        };
        Some(Interval { median, low: values[rank - 1], high: values[count - rank], count, confidence })
    }

    /// A value that is exact, as an extreme of all values is.
    pub(crate) fn exact(value: f64, count: usize) -> Interval {
        Interval { median: value, low: value, high: value, count, confidence: 1.0 }
    }

    /// Whether there are enough values to say that the median is not outside.
    pub(crate) fn can_decide(&self) -> bool {
        self.confidence >= CONFIDENCE_MIN
    }
}

/// The largest k whose interval has the wanted confidence, at least 1, and the confidence that it has.
fn rank(count: u32) -> (usize, f64) {
    // P(B(count, 1/2) = i), from i = 0 on.
    let mut term = 0.5_f64.powi(count as i32);
    let (mut tail, mut best) = (term, (1, (1.0 - 2.0 * term).max(0.0)));
    for k in 2..=count.div_ceil(2) {
        term *= f64::from(count - (k - 2)) / f64::from(k - 1);
        tail += term;
        if 1.0 - 2.0 * tail < CONFIDENCE {
            break;
        }
        best = (k as usize, 1.0 - 2.0 * tail);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_binomial_distribution() {
        // 1 - 2 / 2^n for the extremes; 1 - 2 (1 + 12) / 2^12 and so on for what is within.
        for (count, rank_wanted, misses) in [(1, 1, 1.0), (5, 1, 1.0), (8, 1, 1.0), (12, 2, 13.0), (16, 3, 137.0)] {
            let (rank, confidence) = rank(count);
            let wanted = 1.0 - 2.0 * misses / f64::from(1_u32 << count);
            assert!(rank == rank_wanted && (confidence - wanted).abs() < 1e-12, "{count}: {rank} {confidence}");
        }
        assert_eq!(rank(24).0, 6);
        assert!((8..200).all(|count| rank(count).1 >= CONFIDENCE));
    }

    #[test]
    fn medians_and_intervals() {
        let values = |count: u32| (1..=count).rev().map(f64::from).collect();
        let even = Interval::of(values(12)).unwrap();
        assert_eq!((even.median, even.low, even.high, even.count), (6.5, 2.0, 11.0, 12));
        let odd = Interval::of(values(5)).unwrap();
        assert_eq!((odd.median, odd.low, odd.high, odd.confidence), (3.0, 1.0, 5.0, 0.9375));
        assert_eq!(Interval::of(vec![]), None);
    }

    #[test]
    fn four_rounds_are_no_ground_for_a_verdict() {
        assert!(!Interval::of(vec![0.5; 4]).unwrap().can_decide());
        assert!(Interval::of(vec![0.5; 5]).unwrap().can_decide() && Interval::exact(0.0, 1).can_decide());
    }

    /// Of many series of values with a known median, the intervals miss no more than they may.
    #[test]
    fn intervals_cover_the_median_as_often_as_they_say() {
        let mut bits = ksf_test::Random::new(1);
        let mut random = || bits.bits() as f64 / u64::MAX as f64;
        for count in [8, 12, 24] {
            let mut missed = 0;
            for _ in 0..20_000 {
                // Skewed, as times are: the median of -ln(u) is ln 2.
                let interval = Interval::of((0..count).map(|_| -random().ln()).collect()).unwrap();
                missed += u32::from(!(interval.low..=interval.high).contains(&std::f64::consts::LN_2));
            }
            let (_, confidence) = rank(count);
            let expected = 20_000.0 * (1.0 - confidence);
            assert!((f64::from(missed) - expected).abs() < 5.0 * expected.sqrt(), "{count}: {missed}, not {expected}");
        }
    }
}
