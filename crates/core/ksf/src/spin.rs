//! Whether to look again and again for a while before sleeping.
//!
//! A wake-up costs more than a short message, but a CPU that spins does nothing else. So a shard spins only while events
//! come within the time it is willing to spin, and only where that helps: on a CPU that it shares with its client
//! nothing can come while it spins. That is seen from what spinning finds, whatever else wants the CPU. A spin that finds
//! nothing costs its length once; then trials become rare.

use std::time::Duration;

/// How long a shard may look for events before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spin {
    /// It sleeps at once.
    #[default]
    Off,
    /// Up to this time, while events come closer together than that and spinning finds them.
    UpTo(Duration),
}

impl Spin {
    /// Up to 50 us: about the cost of two wake-ups of another CPU in a virtual machine.
    pub const AUTO: Self = Self::UpTo(Duration::from_micros(50));
}

/// Waits between trials that failed, at first and at most.
const TRIAL_WAITS_MIN: u32 = 64;
const TRIAL_WAITS_MAX: u32 = 16_384;
/// What a spin that finds nothing takes from the credit of those that found something, and the most of that.
const MISS: u32 = 4;
const CREDIT_MAX: u32 = 8;

/// Decides, wait by wait. Has no clock.
#[derive(Debug)]
pub(crate) struct Spinner {
    spin: Spin,
    /// Mean time a wait took, over about the last eight.
    mean_wait_ns: u64,
    credit: u32,
    waits_to_trial: u32,
    trial_waits: u32,
}

impl Spinner {
    pub(crate) fn new(spin: Spin) -> Self {
        let waits = TRIAL_WAITS_MIN;
        Self { spin, mean_wait_ns: u64::MAX / 2, credit: 0, waits_to_trial: waits, trial_waits: waits }
    }

    /// How long to spin before the next wait sleeps.
    pub(crate) fn next(&self) -> Option<Duration> {
        let Spin::UpTo(length) = self.spin else { return None };
        let close = u128::from(self.mean_wait_ns) < length.as_nanos();
        (close && (self.credit > 0 || self.waits_to_trial == 0)).then_some(length)
    }

    /// A wait took so long. `spun`: it began with a spin, and that found something or not.
    pub(crate) fn waited(&mut self, time: Duration, spun: Option<bool>) {
        let wait_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(1 << 40);
        self.mean_wait_ns = self.mean_wait_ns.min(1 << 41) / 8 * 7 + wait_ns / 8;
        match spun {
            None => self.waits_to_trial = self.waits_to_trial.saturating_sub(1),
            Some(true) => {
                self.credit = (self.credit + 1).min(CREDIT_MAX);
                self.trial_waits = TRIAL_WAITS_MIN;
            }
            Some(false) => {
                self.credit = self.credit.saturating_sub(MISS);
                if self.credit == 0 {
                    self.waits_to_trial = self.trial_waits;
                    self.trial_waits = (self.trial_waits * 4).min(TRIAL_WAITS_MAX);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    /// Events that come `gap` after a wait began; `shared`: only if the shard sleeps. Returns the share of waits that spin,
    /// and the time spun for nothing.
    fn run(spin: Spin, gap: Duration, shared: bool, waits: u32) -> (f64, Duration) {
        let mut spinner = Spinner::new(spin);
        let (mut spins, mut wasted) = (0, Duration::ZERO);
        for _ in 0..waits {
            match spinner.next() {
                None => spinner.waited(gap, None),
                Some(length) => {
                    spins += 1;
                    let found = !shared && gap <= length;
                    let took = if shared { length + gap } else { gap };
                    wasted += if found { Duration::ZERO } else { length };
                    spinner.waited(took, Some(found));
                }
            }
        }
        (f64::from(spins) / f64::from(waits), wasted)
    }

    #[test]
    fn spins_while_events_come_within_the_time() {
        assert!(run(Spin::AUTO, 12 * US, false, 10_000).0 > 0.95);
    }

    #[test]
    fn never_spins_when_they_come_later_or_when_it_is_off() {
        assert_eq!(run(Spin::AUTO, 200 * US, false, 10_000).0, 0.0);
        assert_eq!(run(Spin::AUTO, Duration::from_secs(3600), false, 10_000).0, 0.0);
        assert_eq!(run(Spin::Off, US, false, 10_000).0, 0.0);
    }

    #[test]
    fn hardly_ever_spins_where_nothing_can_come_meanwhile() {
        let (share, wasted) = run(Spin::AUTO, 6 * US, true, 200_000);
        assert!(share < 0.001, "{share}");
        assert!(wasted < Duration::from_millis(10), "{wasted:?}");
    }

    #[test]
    fn stops_soon_when_the_load_ends() {
        let mut spinner = Spinner::new(Spin::AUTO);
        for _ in 0..1_000 {
            let spun = spinner.next().map(|_| true);
            spinner.waited(10 * US, spun);
        }
        assert!(spinner.next().is_some());
        let mut spins = 0;
        while let Some(length) = spinner.next() {
            spinner.waited(length + Duration::from_millis(1), Some(false));
            spins += 1;
        }
        assert!(spins <= 2, "{spins} spins for nothing");
    }
}
