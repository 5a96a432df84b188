//! Shares of connections in something of which there is a bounded number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::account::Account;

/// Slots that the reserve has for each connection.
const RESERVED: usize = 8;

/// The half in which a slot counts.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// A connection has at most [`RESERVED`] slots of it, so that a few connections cannot take all slots from others.
    Reserve,
    /// A connection gets one more slot while it has fewer of it than are free.
    Rest,
}

/// Number of slots in each [`Part`].
pub(crate) type Counts = [AtomicUsize; 2];

/// A bounded number of slots.
#[derive(Debug)]
pub(crate) struct Shares {
    counts: Counts,
    max: [usize; 2],
    /// Counts of one connection.
    of: fn(&Account) -> &Counts,
}

impl Shares {
    pub(crate) fn new(max: usize, of: fn(&Account) -> &Counts) -> Self {
        Self { counts: Counts::default(), max: [max / 2, max - max / 2], of }
    }

    /// Number of slots that are taken.
    pub(crate) fn count(&self) -> usize {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count() == self.max.iter().sum()
    }

    /// Takes one more slot for a connection. `None`: the connection has its share.
    pub(crate) fn take(self: &Arc<Self>, account: &Account) -> Option<Slot> {
        for part in [Part::Reserve, Part::Rest] {
            let (count, own_count) = (&self.counts[part as usize], &(self.of)(account)[part as usize]);
            // Counted first: other lanes take slots for the connection, too.
            let own = own_count.fetch_add(1, Ordering::Relaxed);
            let may_have = |free: usize| match part {
                Part::Reserve => own < RESERVED && free > 0,
                Part::Rest => own < free,
            };
            let more = |taken: usize| may_have(self.max[part as usize] - taken).then_some(taken + 1);
            if count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
                return Some(Slot { all: Arc::clone(self), account: account.clone(), part });
            }
            own_count.fetch_sub(1, Ordering::Relaxed);
        }
        None
    }
}

/// One slot of [`Shares`], until it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    all: Arc<Shares>,
    account: Account,
    part: Part,
}

impl Slot {
    pub(crate) fn account(&self) -> &Account {
        &self.account
    }

    /// True if the connection has more than half as many slots of the rest as are free.
    pub(crate) fn is_late(&self) -> bool {
        let at = Part::Rest as usize;
        let load = |counts: &Counts| counts[at].load(Ordering::Relaxed);
        2 * load((self.all.of)(&self.account)) > self.all.max[at] - load(&self.all.counts)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        (self.all.of)(&self.account)[self.part as usize].fetch_sub(1, Ordering::Relaxed);
        self.all.counts[self.part as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use ksf_test::Random;

    use super::*;

    #[test]
    fn slots_of_random_connections_stay_within_their_shares() {
        const MAX: usize = 200;
        let (mut random, all) = (Random::of_test(5), Arc::new(Shares::new(MAX, Account::open_files)));
        let accounts: Vec<Account> = (0..20).map(|_| Account::default()).collect();
        let mut open: Vec<Vec<Slot>> = accounts.iter().map(|_| Vec::new()).collect();
        for _ in 0..20_000 {
            // A few take most slots.
            let at = random.length(accounts.len() - 1);
            if random.one_in(3) {
                open[at].pop();
                continue;
            }
            let of_part =
                |slots: &Vec<Slot>, part| slots.iter().filter(|slot| slot.part as usize == part as usize).count();
            let free = |part| MAX / 2 - open.iter().map(|slots| of_part(slots, part)).sum::<usize>();
            let own = |part| of_part(&open[at], part);
            let from_reserve = own(Part::Reserve) < RESERVED && free(Part::Reserve) > 0;
            let from_rest = own(Part::Rest) < free(Part::Rest);
            assert_eq!(all.is_full(), free(Part::Reserve) + free(Part::Rest) == 0);
            let taken = all.take(&accounts[at]);
            assert_eq!(taken.is_some(), from_reserve || from_rest);
            open[at].extend(taken);
            assert_eq!(all.count(), open.iter().map(Vec::len).sum::<usize>());
        }
        drop(open);
        assert_eq!(all.count(), 0);
        assert!(accounts.iter().flat_map(Account::open_files).all(|count| count.load(Ordering::Relaxed) == 0));
    }
}
