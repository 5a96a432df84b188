//! A hierarchical timer wheel: at most one timer for each entry of a table, set, moved and removed in constant time, at
//! no cost while it is not due (Varghese and Lauck, SOSP '87).
//!
//! ```text
//!   level 0   64 slots of  4.2 ms   ┐ what is due within the slot of the level above
//!   level 1   64 slots of  268 ms   ┘◄── spread over the level below when its slot begins
//!   ...
//!   level 5   64 slots of 52 days
//! ```
//!
//! Timers are rounded up to 4.2 ms, so they never expire early, and expire together where they are close.

use crate::limits::Time;

/// The unit of time: 2^22 ns.
const UNIT_BITS: u32 = 22;
const SLOT_BITS: u32 = 6;
const SLOTS: usize = 1 << SLOT_BITS;
const LEVELS: usize = 6;
/// Most units that a timer can be set ahead: to the last slot before the one that is under way in the highest level.
/// What is further away waits there, and is put off once more.
const AHEAD_MAX: u64 = (SLOTS as u64 - 1) << (SLOT_BITS as usize * (LEVELS - 1));

const NONE: u32 = u32::MAX;
/// The list of what is due, behind those of the slots.
const DUE: usize = LEVELS * SLOTS;

pub(super) struct TimerWheel {
    /// Units that have passed: every timer up to here is in the list of what is due.
    elapsed: u64,
    /// A timer for each entry of the table.
    nodes: Vec<Node>,
    /// First entry of each slot's list, and of the list of what is due.
    heads: [u32; DUE + 1],
    /// Slots that are not empty, per level.
    occupied: [u64; LEVELS],
}

#[derive(Clone, Copy)]
struct Node {
    at: u64,
    list: u32,
    prev: u32,
    next: u32,
}

/// What a timer takes, whether it is set or not.
#[cfg(test)]
pub(super) const NODE_BYTES: usize = size_of::<Node>();

const UNSET: Node = Node { at: 0, list: NONE, prev: NONE, next: NONE };

impl TimerWheel {
    /// A wheel without timers that begins to turn at `now`.
    pub(super) fn new(now: Time) -> Self {
        let elapsed = now.0 >> UNIT_BITS;
        Self { elapsed, nodes: Vec::new(), heads: [NONE; DUE + 1], occupied: [0; LEVELS] }
    }

    /// When the timer of an entry expires, if it is set.
    pub(super) fn expiry(&self, entry: u32) -> Option<Time> {
        let node = self.nodes.get(entry as usize).filter(|node| node.list != NONE)?;
        Some(Time(node.at << UNIT_BITS))
    }

    /// Sets the timer of an entry, unless it expires at that time or earlier already. Returns when it expires, if it was
    /// changed.
    pub(super) fn set_if_earlier(&mut self, entry: u32, at: Time) -> Option<Time> {
        let expiry = Time(units(at) << UNIT_BITS);
        if self.expiry(entry).is_some_and(|set| set <= expiry) {
            return None;
        }
        self.set(entry, at);
        Some(expiry)
    }

    /// Sets the timer of an entry, which may be set already.
    pub(super) fn set(&mut self, entry: u32, at: Time) {
        self.remove(entry);
        if entry as usize >= self.nodes.len() {
            self.nodes.resize(entry as usize + 1, UNSET);
        }
        self.nodes[entry as usize].at = units(at);
        self.insert(entry);
    }

    /// Removes the timer of an entry, if it is set.
    pub(super) fn remove(&mut self, entry: u32) {
        let Some(node) = self.nodes.get_mut(entry as usize).filter(|node| node.list != NONE) else { return };
        let Node { list, prev, next, .. } = *node;
        node.list = NONE;
        if prev == NONE {
            self.heads[list as usize] = next;
        } else {
            self.nodes[prev as usize].next = next;
        }
        if next != NONE {
            self.nodes[next as usize].prev = prev;
        }
        if self.heads[list as usize] == NONE && (list as usize) < DUE {
            self.occupied[list as usize / SLOTS] &= !(1 << (list as usize % SLOTS));
        }
    }

    /// No timer expires before this; at this time the wheel wants to be turned. `None`: no timer is set.
    pub(super) fn next_turn(&self) -> Option<Time> {
        let at = if self.heads[DUE] == NONE { self.next_slot()?.1 } else { self.elapsed };
        Some(Time(at << UNIT_BITS))
    }

    /// Turns the wheel, and takes an entry whose timer has expired; `None`: no more have.
    pub(super) fn pop_expired(&mut self, now: Time) -> Option<u32> {
        let now = now.0 >> UNIT_BITS;
        while self.heads[DUE] == NONE {
            match self.next_slot() {
                Some((list, at)) if at <= now => {
                    debug_assert!(at > self.elapsed, "time goes on");
                    self.elapsed = at;
                    self.empty(list);
                }
                _ => {
                    self.elapsed = self.elapsed.max(now);
                    return None;
                }
            }
        }
        let entry = self.heads[DUE];
        self.remove(entry);
        Some(entry)
    }

    /// The slot that begins next, and when.
    fn next_slot(&self) -> Option<(usize, u64)> {
        // What is in a level is due before its slot of the next level up ends, so the lowest one that is occupied counts.
        let level = self.occupied.iter().position(|occupied| *occupied != 0)?;
        let unit_bits = SLOT_BITS * level as u32;
        let current = (self.elapsed >> unit_bits) as usize % SLOTS;
        let ahead = self.occupied[level].rotate_right(current as u32).trailing_zeros();
        let slot = (current + ahead as usize) % SLOTS;
        Some((level * SLOTS + slot, ((self.elapsed >> unit_bits) + u64::from(ahead)) << unit_bits))
    }

    /// Puts the timers of a slot where they belong now: lower, or into the list of what is due.
    fn empty(&mut self, list: usize) {
        let mut entry = std::mem::replace(&mut self.heads[list], NONE);
        self.occupied[list / SLOTS] &= !(1 << (list % SLOTS));
        while entry != NONE {
            let next = self.nodes[entry as usize].next;
            self.insert(entry);
            entry = next;
        }
    }

    fn insert(&mut self, entry: u32) {
        let list = self.list_for(self.nodes[entry as usize].at);
        let next = std::mem::replace(&mut self.heads[list], entry);
        if next != NONE {
            self.nodes[next as usize].prev = entry;
        }
        let node = &mut self.nodes[entry as usize];
        (node.list, node.prev, node.next) = (list as u32, NONE, next);
        if list < DUE {
            self.occupied[list / SLOTS] |= 1 << (list % SLOTS);
        }
    }

    fn list_for(&self, at: u64) -> usize {
        if at <= self.elapsed {
            return DUE;
        }
        let at = at.min(self.elapsed + AHEAD_MAX);
        // The highest digit that differs decides the level: in it, `at` is ahead of the slot that is under way.
        let level = ((at ^ self.elapsed).ilog2() / SLOT_BITS) as usize;
        if level >= LEVELS {
            // Ahead, and beyond the end of the last level's numbers, where they start again.
            return (LEVELS - 1) * SLOTS + (at >> (SLOT_BITS as usize * (LEVELS - 1))) as usize % SLOTS;
        }
        level * SLOTS + (at >> (SLOT_BITS as usize * level)) as usize % SLOTS
    }
}

/// Rounded up, but for the end of time.
fn units(at: Time) -> u64 {
    at.0.div_ceil(1 << UNIT_BITS).min(u64::MAX >> UNIT_BITS)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const UNIT_NS: u64 = 1 << UNIT_BITS;

    #[derive(Clone, Debug)]
    enum Step {
        Set { entry: u32, after_ns: u64 },
        Remove { entry: u32 },
        Turn { after_ns: u64 },
    }

    fn span() -> impl Strategy<Value = u64> {
        // As often below a unit as above a year.
        (0u32..60, any::<u64>()).prop_map(|(bits, random)| random >> (63 - bits))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u32..20, span()).prop_map(|(entry, after_ns)| Step::Set { entry, after_ns }),
            (0u32..20).prop_map(|entry| Step::Remove { entry }),
            span().prop_map(|after_ns| Step::Turn { after_ns }),
        ]
    }

    fn expire(wheel: &mut TimerWheel, now: Time) -> Vec<u32> {
        std::iter::from_fn(|| wheel.pop_expired(now)).collect()
    }

    proptest! {
        /// Against a map of expiries: nothing expires early, late, twice or never.
        #[test]
        fn expires_what_a_sorted_map_would(start in span(), steps in prop::collection::vec(step(), 1..200)) {
            let mut now = Time(start);
            let mut wheel = TimerWheel::new(now);
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Set { entry, after_ns } => {
                        let at = Time(now.0 + after_ns);
                        wheel.set(entry, at);
                        model.insert(entry, at.0.next_multiple_of(UNIT_NS));
                    }
                    Step::Remove { entry } => {
                        wheel.remove(entry);
                        model.remove(&entry);
                    }
                    Step::Turn { after_ns } => {
                        now = Time(now.0 + after_ns);
                        let mut expired = expire(&mut wheel, now);
                        expired.sort_unstable();
                        let due: Vec<u32> = model.extract_if(.., |_, at| *at <= now.0).map(|(entry, _)| entry).collect();
                        prop_assert_eq!(expired, due);
                    }
                }
                for entry in 0..20 {
                    prop_assert_eq!(wheel.expiry(entry).map(|at| at.0), model.get(&entry).copied());
                }
                let first = model.values().min().copied();
                let next = wheel.next_turn().map(|at| at.0);
                prop_assert_eq!(next.is_some(), first.is_some());
                prop_assert!(next <= first, "{next:?} would be too late for {first:?}");
            }
        }
    }

    #[test]
    fn a_time_that_never_comes_can_be_set() {
        let mut wheel = TimerWheel::new(Time(1));
        wheel.set(0, Time(u64::MAX));
        assert!(wheel.expiry(0) > Some(Time(u64::MAX / 2)));
        assert_eq!(wheel.pop_expired(Time(u64::MAX / 2)), None);
    }

    /// A shard that sleeps until [`TimerWheel::next_turn`] wakes up a few times per timer, however far away it is.
    #[test]
    fn a_timer_far_away_costs_a_turn_per_level() {
        let mut now = Time(12_345);
        let mut wheel = TimerWheel::new(now);
        let at = Time(now.0 + 3600 * 1_000_000_000);
        wheel.set(7, at);
        let mut turns = 0;
        while let Some(next) = wheel.next_turn() {
            assert!(next > now, "it would be turned for ever");
            now = next;
            turns += 1;
            assert_eq!(expire(&mut wheel, now), if now >= at { vec![7] } else { vec![] });
        }
        assert!(turns <= LEVELS, "{turns} turns");
        assert!(now >= at && now.since(at).as_nanos() < u128::from(UNIT_NS));
    }

    /// The work is that of what is due: the others are not looked at.
    #[test]
    fn a_hundred_thousand_timers_that_are_not_due_are_left_alone() {
        let mut now = Time(0);
        let mut wheel = TimerWheel::new(now);
        for entry in 0..100_000 {
            wheel.set(entry, Time(600 * 1_000_000_000));
        }
        wheel.set(100_000, Time(1_000_000_000));
        let mut turns = 0;
        while now < Time(500 * 1_000_000_000) {
            now = wheel.next_turn().unwrap();
            let expired = expire(&mut wheel, now);
            assert!(expired.is_empty() || expired == [100_000]);
            turns += 1;
        }
        assert!(turns < 10, "{turns} turns");
    }
}
