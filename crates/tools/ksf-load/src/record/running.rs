//! Figures over the iterations so far.

/// `amount / of`; 0 where there is nothing to divide by.
pub(crate) fn per(amount: f64, of: f64) -> f64 {
    if of > 0.0 { amount / of } else { 0.0 }
}

/// Median and mean of the values seen so far: one per run, so endless runs stay cheap.
#[derive(Debug, Clone, Default)]
pub(crate) struct Running {
    sorted: Vec<f64>,
    sum: f64,
}

impl Running {
    pub(crate) fn add(&mut self, value: f64) {
        let at = self.sorted.partition_point(|have| *have < value);
        self.sorted.insert(at, value);
        self.sum += value;
    }

    pub(crate) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// The middle value, or the mean of the two middle ones.
    pub(crate) fn median(&self) -> f64 {
        median_of_sorted(&self.sorted)
    }

    pub(crate) fn mean(&self) -> f64 {
        per(self.sum, self.sorted.len() as f64)
    }

    pub(crate) fn min(&self) -> f64 {
        self.sorted.first().copied().unwrap_or(0.0)
    }

    pub(crate) fn max(&self) -> f64 {
        self.sorted.last().copied().unwrap_or(0.0)
    }
}

/// The middle of ascending values, or the mean of the two middle ones; 0 for none.
pub(crate) fn median_of_sorted(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match (sorted.len(), sorted.len() % 2) {
        (0, _) => 0.0,
        (_, 1) => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn running_figures_equal_those_of_the_whole(values in proptest::collection::vec(0.0f64..1e6, 1..60)) {
            let mut running = Running::default();
            for value in &values {
                running.add(*value);
            }
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            prop_assert_eq!(running.median(), median_of_sorted(&sorted));
            prop_assert_eq!((running.min(), running.max()), (sorted[0], sorted[sorted.len() - 1]));
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            prop_assert!((running.mean() - mean).abs() <= 1e-9 * mean.max(1.0));
            let below = sorted.iter().filter(|v| **v <= running.median()).count();
            prop_assert!(2 * below >= sorted.len());
        }
    }
}
