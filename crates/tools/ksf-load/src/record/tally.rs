//! Counts by kind: an enum whose variants have names, and a number for each.
//!
//! Every tool counts what went wrong by kind and reports every kind, also those that did not occur. This is the one
//! place where kinds get their numbers and names.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// The most kinds of an enum.
const KINDS_MAX: usize = 32;

/// An enum that can be counted by. Made by [`kinds!`].
pub(crate) trait TallyKind: Copy + 'static {
    /// All kinds, in the order they are reported.
    const ALL: &'static [Self];

    /// The place in [`TallyKind::ALL`].
    fn index(self) -> usize;

    /// The name in reports.
    fn name(self) -> &'static str;
}

/// Defines an enum of kinds with their names in reports.
macro_rules! kinds {
    ($(#[$about:meta])* $kinds:ident { $($(#[$doc:meta])* $kind:ident = $name:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum $kinds {
            $($(#[$doc])* $kind,)+
        }

        impl $crate::record::tally::TallyKind for $kinds {
            const ALL: &'static [$kinds] = &[$($kinds::$kind,)+];

            fn index(self) -> usize {
                self as usize
            }

            fn name(self) -> &'static str {
                match self {
                    $($kinds::$kind => $name,)+
                }
            }
        }
    };
}
pub(crate) use kinds;

/// A count for each kind.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tally<K> {
    counts: [u64; KINDS_MAX],
    kinds: PhantomData<K>,
}

impl<K: TallyKind> Tally<K> {
    const FITS: () = assert!(K::ALL.len() <= KINDS_MAX, "raise KINDS_MAX");

    /// Adds `n` of a kind.
    #[inline]
    pub(crate) fn add(&mut self, kind: K, n: u64) {
        let () = Self::FITS;
        self.counts[kind.index()] += n;
    }

    /// How many of one kind.
    pub(crate) fn count(&self, kind: K) -> u64 {
        self.counts[kind.index()]
    }

    /// All of them.
    pub(crate) fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Adds another tally.
    pub(crate) fn merge(&mut self, other: &Tally<K>) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            *mine += theirs;
        }
    }

    /// The counts of `kinds` by name, zeros included.
    pub(crate) fn by_name(&self, kinds: &[K]) -> BTreeMap<String, u64> {
        kinds.iter().map(|kind| (kind.name().to_owned(), self.count(*kind))).collect()
    }

    /// "3 lost, 1 duplicate": what occurred, in the order of the kinds; empty if nothing did.
    pub(crate) fn in_words(&self) -> String {
        let occurred = K::ALL.iter().filter(|kind| self.count(**kind) > 0);
        occurred.map(|kind| format!("{} {}", self.count(*kind), kind.name())).collect::<Vec<_>>().join(", ")
    }
}

impl<K> Default for Tally<K> {
    fn default() -> Self {
        Tally { counts: [0; KINDS_MAX], kinds: PhantomData }
    }
}

impl<K: TallyKind> fmt::Debug for Tally<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(K::ALL.iter().map(|kind| (kind.name(), self.count(*kind)))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    kinds! {
        Fruit { Apple = "apple", Pear = "pear", Quince = "quince", }
    }

    #[test]
    fn every_kind_has_its_own_place_and_name() {
        for (place, kind) in Fruit::ALL.iter().enumerate() {
            assert_eq!(kind.index(), place);
        }
        assert_eq!(Fruit::ALL.iter().map(|kind| kind.name()).collect::<Vec<_>>(), ["apple", "pear", "quince"]);
    }

    #[test]
    fn counts_are_kept_apart_added_up_and_named() {
        let mut basket = Tally::default();
        basket.add(Fruit::Pear, 2);
        let mut other = Tally::default();
        other.add(Fruit::Pear, 1);
        other.add(Fruit::Quince, 4);
        basket.merge(&other);
        assert_eq!((basket.count(Fruit::Apple), basket.count(Fruit::Pear), basket.total()), (0, 3, 7));
        assert_eq!(basket.in_words(), "3 pear, 4 quince");
        let named: Vec<_> = basket.by_name(&[Fruit::Apple, Fruit::Pear]).into_iter().collect();
        assert_eq!(named, [("apple".to_owned(), 0), ("pear".to_owned(), 3)]);
    }
}
