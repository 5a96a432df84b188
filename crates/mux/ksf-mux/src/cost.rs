//! Estimates the time that a worker needs for a message, and derives the number of messages it takes at a time.

use crate::scheduler::TURN_NS;

/// Time of a message by that of the worker's last ones, and the number of messages that it takes at a time.
///
/// No other worker can take the messages that one has taken, so they must be little work: [`Self::WORK_MAX_NS`]. A worker takes
/// messages that cost more one by one, and messages that cost less than an access to the queues in batches.
#[derive(Clone, Copy, Debug)]
pub struct CostEstimate {
    message_ns: u64,
    /// Leases until messages are granted several at a time again.
    single_step: u32,
    /// How many it will be after the next revocation.
    single_step_next: u32,
}

impl CostEstimate {
    /// Limit of the work bound to a worker besides its current message.
    pub const WORK_MAX_NS: u64 = 50_000;
    /// Cost of a wake-up for both sides. The worker itself finishes less work than this sooner than another one that it wakes.
    pub const WAKE_NS: u64 = 20_000;
    /// Most messages that travel together.
    pub const BATCH_MAX: usize = 1024;
    /// Most messages taken at once.
    pub const MESSAGES_MAX: usize = 64;
    /// Limit of the work in a grant. The worker's replies to it are delayed if one message takes unexpectedly long.
    pub const GRANT_NS: u64 = 2_000;
    /// Limit of the messages in a grant. If one of them takes unexpectedly long, the timer thread revokes those behind it, but
    /// the replies to those before it leave with its own.
    pub const GRANT_MAX: usize = 32;
    /// Leases for which a worker goes through messages one by one after it was held up in the middle of several: twice as
    /// many after each time, up to the larger number.
    pub const SINGLE_STEP_MIN: u32 = 1 << 8;
    /// See [`Self::SINGLE_STEP_MIN`].
    pub const SINGLE_STEP_MAX: u32 = 1 << 14;

    /// For a worker that knows nothing of its messages yet: one at a time.
    pub const fn new() -> Self {
        Self { message_ns: Self::WORK_MAX_NS, single_step: 0, single_step_next: Self::SINGLE_STEP_MIN }
    }

    /// Messages to take.
    pub fn want(&self) -> usize {
        let fit = Self::WORK_MAX_NS / self.message_ns.max(1);
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, Self::MESSAGES_MAX)
    }

    /// Messages that may travel together: they are worked on sooner than another worker wakes up.
    pub fn batch_len(&self) -> usize {
        let fit = Self::WAKE_NS / self.message_ns.max(1);
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, Self::BATCH_MAX)
    }

    /// True if the reply to a message may wait for the reply to the next one.
    pub fn is_cheap(&self) -> bool {
        self.message_ns <= Self::WAKE_NS
    }

    /// Messages in the next grant.
    pub fn grant(&self) -> usize {
        if self.single_step > 0 {
            return 1;
        }
        let fit = Self::GRANT_NS / self.message_ns.max(1);
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, Self::GRANT_MAX)
    }

    /// Batches to take, of messages that travel together.
    pub fn want_batches(&self) -> usize {
        let fit = Self::WORK_MAX_NS / self.message_ns.max(1) / self.batch_len() as u64;
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, Self::MESSAGES_MAX)
    }

    /// Batches of a connection that are expected to be the work of a turn.
    pub fn turn_batches(&self) -> usize {
        let fit = TURN_NS as u64 / self.message_ns.max(1) / self.batch_len() as u64;
        usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, Self::MESSAGES_MAX)
    }

    /// `messages` took `time_ns`. Expensive ones are believed at once, cheap ones after a while.
    pub fn observe(&mut self, time_ns: u64, messages: usize) {
        let each_ns = time_ns / messages.max(1) as u64;
        let weight = if each_ns > self.message_ns { 2 } else { 8 };
        self.message_ns = (self.message_ns * (weight - 1) + each_ns) / weight;
        self.single_step = self.single_step.saturating_sub(1);
    }

    /// The lease was revoked in the middle of several messages that were granted: where that happens, cheap messages are
    /// not a sign of cheap ones to come.
    pub fn note_revoked(&mut self) {
        self.single_step = self.single_step_next;
        self.single_step_next = self.single_step_next.saturating_mul(2).min(Self::SINGLE_STEP_MAX);
    }
}

impl Default for CostEstimate {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_grow_while_messages_are_cheap_and_shrink_at_once() {
        let mut size = CostEstimate::new();
        assert_eq!(size.want(), 1);
        (0..100).for_each(|_| size.observe(10 * 500, 10));
        assert_eq!(size.want(), CostEstimate::MESSAGES_MAX);
        (0..100).for_each(|_| size.observe(10 * 5_000, 10));
        let want = size.want();
        assert!((8..=10).contains(&want), "{want} messages of 5 us for {} ns", CostEstimate::WORK_MAX_NS);
        size.observe(10 * 100_000, 10);
        assert_eq!(size.want(), 1, "one expensive batch is believed");
        size.observe(20_000_000, 10);
        size.observe(0, 0);
        assert_eq!(size.want(), 1, "one cheap batch proves nothing");
        assert_eq!(size.turn_batches(), 1, "at least one");
    }
}
