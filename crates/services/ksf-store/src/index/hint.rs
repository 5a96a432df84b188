//! Of keys that begin alike, the bytes behind that as numbers that lie side by side: what a search goes through.

use super::leaf::ENTRIES_MAX;

/// The most hints of which every sixteenth is compared: more than a leaf has between two commands.
const HALVED_ABOVE: usize = 2 * ENTRIES_MAX;

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
/// Above [`HALVED_ABOVE`] hints, halving is faster: a leaf to which one command adds many keys is that long until the command ends.
pub(super) fn count_below(hints: &[u64], hint: u64) -> usize {
    const STEP: usize = 16;
    let is_below = |of_key: &&u64| {
        look();
        **of_key < hint
    };
    let (mut skipped, mut rest) = (0, hints);
    while rest.len() > HALVED_ABOVE {
        let (lower, upper) = rest.split_at(rest.len() / 2);
        if lower.last().is_some_and(|last| is_below(&last)) {
            skipped += lower.len();
            rest = upper;
        } else {
            rest = lower;
        }
    }
    let from = rest.iter().skip(STEP - 1).step_by(STEP).filter(is_below).count() * STEP;
    let between = &rest[from..rest.len().min(from + STEP)];
    skipped + from + between.iter().filter(is_below).count()
}

/// Counts the hints that searches compare, for tests.
fn look() {
    #[cfg(test)]
    LOOKS.set(LOOKS.get() + 1);
}

#[cfg(test)]
thread_local! {
    /// Hints that searches of this thread compared.
    static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use ksf_test::Random;

    use super::*;
    use crate::index::Index;
    use crate::index::leaf::{Entry, Origin, Value};

    #[test]
    fn hints_are_counted_as_a_search_by_halves_counts_them() {
        let mut random = Random::of_test(1);
        for length in (0..300).chain([511, 512, 513, 1_000, 1_025, 5_000]) {
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

    /// One command may add any number of keys to one leaf, which is split when the command ends.
    #[test]
    fn a_search_among_many_hints_compares_few() {
        let hints: Vec<u64> = (0..200_000).collect();
        for hint in [0, 1, 99_999, 100_000, 199_999, u64::MAX] {
            let before = LOOKS.get();
            assert_eq!(count_below(&hints, hint), hints.partition_point(|of_key| *of_key < hint));
            let compared = LOOKS.get() - before;
            assert!(compared <= 64, "a search for {hint} compares {compared} of {} hints", hints.len());
        }
    }

    /// A command asks what a key has, changes it, and asks whether its record is out of date.
    #[test]
    fn a_key_that_was_just_found_is_not_searched_again() {
        let index = Index::default();
        let names: Vec<Vec<u8>> = (0..2_000).map(|number| format!("key {number:04}").into_bytes()).collect();
        let keys: Vec<&[u8]> = names.iter().map(|name| &name[..]).collect();
        let origin = Origin::default();
        let entry = |key| Entry { key, value: Value::Here(b"value"), origin, expires_ms: None, older: 0 };
        index.with(&keys, |locked| keys.iter().for_each(|key| locked.set(&entry(key))));
        index.with(&keys, |locked| {
            for key in &keys {
                assert_eq!(locked.get(key), Some(entry(key)));
                let before = LOOKS.get();
                locked.set(&entry(key));
                assert_eq!(locked.get(key), Some(entry(key)));
                assert_eq!(LOOKS.get(), before, "{}", key.escape_ascii());
            }
        });
    }
}
