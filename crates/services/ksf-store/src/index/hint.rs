//! Of keys that begin alike, the bytes behind that as numbers that lie side by side: what a search goes through.

/// The first eight bytes as a number that is ordered as they are; bytes that are not there count as 0.
pub(super) fn hint_of(bytes: &[u8]) -> u64 {
    let front = bytes.first_chunk().copied().unwrap_or_else(|| {
        let mut front = [0; 8];
        front[..bytes.len()].copy_from_slice(bytes);
        front
    });
    u64::from_be_bytes(front)
}

/// How many bytes both begin with.
pub(super) fn shared_by(one: &[u8], other: &[u8]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// How many of these hints, which are in order, are below this one.
///
/// A search by halves waits for the memory of each hint before it knows which is the next. This one looks at every
/// sixteenth, and at those between two of them. It waits twice, as no look of either kind needs another one's result.
pub(super) fn count_below(hints: &[u64], hint: u64) -> usize {
    const STEP: usize = 16;
    let is_below = |of_key: &&u64| **of_key < hint;
    let from = hints.iter().skip(STEP - 1).step_by(STEP).filter(is_below).count() * STEP;
    let between = &hints[from..hints.len().min(from + STEP)];
    from + between.iter().filter(is_below).count()
}

#[cfg(test)]
mod tests {
    use ksf_test::Random;

    use super::*;

    #[test]
    fn hints_are_counted_as_a_search_by_halves_counts_them() {
        let mut random = Random::of_test(1);
        for length in 0..300 {
            // Few numbers, so that many are alike, or many.
            for numbers in [2, length as u64 + 1, 1 << 40] {
                let mut hints: Vec<u64> = (0..length).map(|_| 1 + random.below(numbers)).collect();
                hints.sort_unstable();
                let asked = [0, 1, numbers / 2, numbers, u64::MAX];
                for hint in asked.into_iter().chain(hints.iter().copied()) {
                    let wanted = hints.partition_point(|of_key| *of_key < hint);
                    assert_eq!(count_below(&hints, hint), wanted, "{hint} in {hints:?}");
                }
            }
        }
    }
}
