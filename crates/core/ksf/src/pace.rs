//! When to let a batch form.
//!
//! Waking up for every message costs more than the message when the peer pipelines: the sender pays for the wake-up,
//! the shard for the turn. Sleeping a little longer lets many messages gather, but a peer that waits for its answer
//! waits longer, too. Which of the two it is cannot be seen from one message, so it is tried: a turn with a pause
//! that brings several messages pays off and is repeated; one that brings a single message is not, and the next
//! trial comes much later.

use std::time::Duration;

use crate::limits::Time;

/// Length of the pause. Effect: bigger batches; price: this much latency while it is tried for nothing.
const GATHER: Duration = Duration::from_micros(15);
/// Messages a paused turn must bring to be worth the pause.
const WORTH: u64 = 6;
/// Turns between trials that failed, at first and at most. A trial per 16384 turns cannot be seen in a p99.9.
const TRIAL_TURNS_MIN: u32 = 64;
const TRIAL_TURNS_MAX: u32 = 16_384;
/// Turns further apart than this are low load: nothing to try.
const BUSY_GAP_NS: u64 = 50_000;

/// Decides, turn by turn, whether to pause.
#[derive(Debug)]
pub(crate) struct Pace {
    gathering: bool,
    turns_to_trial: u32,
    trial_turns: u32,
    last_turn: Time,
}

impl Default for Pace {
    fn default() -> Self {
        let turns = TRIAL_TURNS_MIN;
        Self { gathering: false, turns_to_trial: turns, trial_turns: turns, last_turn: Time::default() }
    }
}

impl Pace {
    /// The pause for the next wait, if any.
    pub(crate) fn gather(&self) -> Option<Duration> {
        self.gathering.then_some(GATHER)
    }

    /// The caller has a reason to think that there is more to come: the next wait pauses.
    pub(crate) fn try_now(&mut self) {
        self.turns_to_trial = 1;
        self.last_turn = Time(u64::MAX);
    }

    /// A turn ended at `now`, and handled this many messages.
    pub(crate) fn turn_over(&mut self, messages: u64, now: Time) {
        let gap = now.since(self.last_turn).as_nanos() as u64;
        self.last_turn = now;
        if self.gathering {
            self.gathering = messages >= WORTH;
            if self.gathering {
                self.trial_turns = TRIAL_TURNS_MIN;
            } else {
                self.turns_to_trial = self.trial_turns;
                self.trial_turns = (self.trial_turns * 4).min(TRIAL_TURNS_MAX);
            }
            return;
        }
        if messages == 0 || gap > BUSY_GAP_NS {
            return;
        }
        // Several at once without a pause: there are more where they came from.
        let step = if messages > 1 { TRIAL_TURNS_MIN } else { 1 };
        self.turns_to_trial = self.turns_to_trial.saturating_sub(step);
        self.gathering = self.turns_to_trial == 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns 5 us apart; a paused turn brings `paused` messages, another one `plain`. Returns the share of paused turns.
    fn share_paused(plain: u64, paused: u64, turns: u32) -> f64 {
        let mut pace = Pace::default();
        let mut count = 0;
        for turn in 0..turns {
            let gathers = pace.gather().is_some();
            count += u32::from(gathers);
            pace.turn_over(if gathers { paused } else { plain }, Time(u64::from(turn) * 5_000));
        }
        f64::from(count) / f64::from(turns)
    }

    #[test]
    fn pauses_for_a_pipelining_peer_and_keeps_doing_so() {
        assert!(share_paused(1, 40, 10_000) > 0.98);
    }

    #[test]
    fn hardly_ever_pauses_for_a_peer_with_one_message_in_flight() {
        assert!(share_paused(1, 1, 200_000) < 0.0005);
    }

    #[test]
    fn pauses_once_when_told_so_at_any_load() {
        let mut pace = Pace::default();
        for turn in 0..1_000 {
            if turn == 500 {
                pace.try_now();
            }
            // The turn of a wake-up may come before its bytes.
            pace.turn_over(u64::from(turn != 500), Time(turn * 1_000_000 - u64::from(turn == 501) * 999_000));
            assert_eq!(pace.gather().is_some(), turn == 501, "turn {turn}");
        }
    }

    #[test]
    fn never_pauses_at_low_load() {
        let mut pace = Pace::default();
        for turn in 0..100_000 {
            pace.turn_over(1, Time(turn * 1_000_000));
            assert_eq!(pace.gather(), None);
        }
    }
}
