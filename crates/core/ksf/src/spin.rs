//! Whether to look again and again for a while before sleeping.
//!
//! A wake-up costs more than a short message, but a CPU that spins does nothing else. So a shard spins only while that
//! finds what comes. How far apart events are cannot be told by a shard that sleeps: in a closed loop the next message
//! comes later because the shard was woken late, and the gap that it sees is longer than the one that a spin would meet.
//! So it is tried: a spin that finds something is repeated, one that finds nothing costs its length once, and then trials
//! become rare. A shard whose waits are many times longer than a spin does not try at all, so an idle one spends nothing.
//!
//! On a CPU that a shard shares with its client nothing can come while it spins, and trials are all that it spends there. A
//! shard that loses its CPU to another thread while it spins leaves that CPU alone for a while, too.

use std::time::Duration;

/// How long a shard may look for events before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spin {
    /// It sleeps at once.
    #[default]
    Off,
    /// Up to this time, while spinning finds what comes. In vain it spins for at most 1/64 of the time, and 1/1024 while
    /// nothing is found.
    UpTo(Duration),
}

impl Spin {
    /// Up to 50 us: about the cost of two wake-ups of another CPU in a virtual machine.
    pub const AUTO: Self = Self::UpTo(Duration::from_micros(50));
}

/// Waits that are longer than so many spins tell that there is nothing to try. A wait in a closed loop has two wake-ups more
/// than the gap that a spin would meet: those of the shard and of the client.
const TRY_WITHIN: u64 = 4;
/// Time between a spin in vain and the next trial, in spins: at first, at most, and from one to the next.
const PAUSE_MIN: u64 = 64;
const PAUSE_MAX: u64 = 1_024;
const PAUSE_GROWTH: u64 = 4;
/// What a spin that finds nothing takes from the credit of those that found something, and the most of that.
const MISS: u32 = 4;
const CREDIT_MAX: u32 = 8;
/// The most that may be spun in vain at once, in spins. It takes [`PAUSE_MIN`] times as long until that may be done again,
/// however many spins find something meanwhile.
const ALLOWANCE_MAX: u64 = 4;

/// The end of a spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Something came.
    Found,
    /// Nothing did, and the shard slept.
    Missed,
    /// Another thread had the CPU meanwhile.
    Preempted,
}

/// Decides before each wait how long to spin. Has no clock: the caller measures waits.
#[derive(Debug)]
pub struct Spinner {
    /// How long to spin; zero: never.
    length_ns: u64,
    /// Mean time a wait took, over about the last eight.
    mean_wait_ns: u64,
    /// Above zero the next wait begins with a spin, if that is allowed.
    credit: u32,
    /// Time that may be spun in vain.
    allowance_ns: u64,
    /// Time until a spin may be tried.
    to_trial_ns: u64,
    /// That after the next failure. As long as it is must spinning have gone well until failures are forgotten.
    pause_ns: u64,
    gone_well_ns: u64,
}

impl Spinner {
    /// A spinner that knows nothing yet: its first trial comes after some short waits.
    pub fn new(spin: Spin) -> Self {
        let length_ns = match spin {
            Spin::Off => 0,
            Spin::UpTo(length) => u64::try_from(length.as_nanos()).unwrap_or(u64::MAX).min(1 << 40),
        };
        let mean_wait_ns = 2 * TRY_WITHIN * length_ns;
        let pause_ns = PAUSE_MIN * length_ns;
        let allowance_ns = ALLOWANCE_MAX * length_ns;
        Self { length_ns, mean_wait_ns, credit: 0, allowance_ns, to_trial_ns: 0, pause_ns, gone_well_ns: 0 }
    }

    /// How long to spin before the next wait sleeps.
    #[inline]
    pub fn next(&self) -> Option<Duration> {
        let trial = self.to_trial_ns == 0 && self.mean_wait_ns < TRY_WITHIN * self.length_ns;
        let allowed = self.allowance_ns >= self.length_ns;
        (allowed && (self.credit > 0 || trial)).then(|| Duration::from_nanos(self.length_ns))
    }

    /// A wait took so long, and did not spin: the shard slept at once, or there was something already.
    #[inline]
    pub fn waited(&mut self, time: Duration) {
        if self.length_ns > 0 {
            let wait_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            self.to_trial_ns = self.to_trial_ns.saturating_sub(wait_ns);
            self.note(wait_ns);
        }
    }

    /// A wait that began with a spin took so long, with the sleep that followed.
    pub fn spun(&mut self, time: Duration, outcome: Outcome) {
        let wait_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.note(wait_ns);
        match outcome {
            Outcome::Found => {
                self.credit = (self.credit + 1).min(CREDIT_MAX);
                self.gone_well_ns = self.gone_well_ns.saturating_add(wait_ns);
                if self.gone_well_ns >= self.pause_ns {
                    self.pause_ns = PAUSE_MIN * self.length_ns;
                }
            }
            Outcome::Missed => {
                self.allowance_ns = self.allowance_ns.saturating_sub(self.length_ns);
                self.fail(MISS);
            }
            Outcome::Preempted => self.fail(CREDIT_MAX),
        }
    }

    fn fail(&mut self, price: u32) {
        self.credit = self.credit.saturating_sub(price);
        if self.credit == 0 {
            self.to_trial_ns = self.pause_ns;
            self.pause_ns = (self.pause_ns * PAUSE_GROWTH).min(PAUSE_MAX * self.length_ns);
            self.gone_well_ns = 0;
        }
    }

    /// Beyond some spins a wait says no more than that it was long: what comes after it must not wait for that to be forgotten.
    fn note(&mut self, wait_ns: u64) {
        self.mean_wait_ns = (7 * self.mean_wait_ns + wait_ns.min(2 * TRY_WITHIN * self.length_ns)) / 8;
        self.allowance_ns = (self.allowance_ns + wait_ns / PAUSE_MIN).min(ALLOWANCE_MAX * self.length_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);
    const LENGTH: Duration = Duration::from_micros(50);

    /// A shard and what it waits for.
    #[derive(Clone, Copy)]
    struct Machine {
        /// From the end of a turn to the next message, for a shard that is awake.
        gap: Duration,
        /// A shard that slept begins its turn so much later.
        wake: Duration,
        /// On the CPU of its client: messages come only if the shard sleeps.
        shared: bool,
    }

    /// What a spinner did.
    #[derive(Debug, Default)]
    struct Did {
        waits: u32,
        found: u32,
        in_vain: Duration,
        time: Duration,
    }

    impl Did {
        fn share_found(&self) -> f64 {
            f64::from(self.found) / f64::from(self.waits)
        }

        fn share_in_vain(&self) -> f64 {
            self.in_vain.as_secs_f64() / self.time.as_secs_f64()
        }
    }

    impl Machine {
        fn wait(&self, spinner: &mut Spinner, did: &mut Did) {
            did.waits += 1;
            did.time += match spinner.next() {
                None => {
                    spinner.waited(self.gap + self.wake);
                    self.gap + self.wake
                }
                Some(length) if !self.shared && self.gap < length => {
                    did.found += 1;
                    spinner.spun(self.gap, Outcome::Found);
                    self.gap
                }
                Some(length) => {
                    did.in_vain += length;
                    let gap = if self.shared { length + self.gap } else { self.gap };
                    spinner.spun(gap + self.wake, Outcome::Missed);
                    gap + self.wake
                }
            };
        }

        fn run(&self, spinner: &mut Spinner, waits: u32) -> Did {
            let mut did = Did::default();
            (0..waits).for_each(|_| self.wait(spinner, &mut did));
            did
        }
    }

    const fn closed_loop(gap_us: u64, wake_us: u64) -> Machine {
        Machine { gap: Duration::from_micros(gap_us), wake: Duration::from_micros(wake_us), shared: false }
    }

    /// Whatever a shard did before: its states, with names.
    fn states() -> Vec<(&'static str, Spinner)> {
        let after = |machine: Machine, waits| {
            let mut spinner = Spinner::new(Spin::AUTO);
            machine.run(&mut spinner, waits);
            spinner
        };
        vec![
            ("new", Spinner::new(Spin::AUTO)),
            ("spinning", after(closed_loop(10, 5), 1_000)),
            ("idle for an hour", after(closed_loop(3_600_000_000, 5), 3)),
            ("rare messages", after(closed_loop(10_000, 30), 10_000)),
            ("messages a bit too far apart", after(closed_loop(120, 30), 100_000)),
            ("on its client's CPU", after(Machine { shared: true, ..closed_loop(6, 6) }, 100_000)),
        ]
    }

    #[test]
    fn engages_in_a_closed_loop_although_its_sleep_makes_the_gaps_longer() {
        for (name, mut spinner) in states() {
            for wake_us in [0, 10, 20, 30, 60, 100] {
                let machine = closed_loop(24, wake_us);
                // The longest pause between two trials.
                let pause = LENGTH * (PAUSE_MAX + 8 * TRY_WITHIN) as u32;
                let mut before = Did::default();
                while before.found == 0 {
                    assert!(before.time <= pause, "{name}, wake {wake_us}: nothing found in {before:?}");
                    machine.wait(&mut spinner, &mut before);
                }
                let share = machine.run(&mut spinner, 10_000).share_found();
                assert!(share == 1.0, "{name}, wake {wake_us}: {share}");
                spinner = states().into_iter().find(|state| state.0 == name).unwrap().1;
            }
        }
    }

    #[test]
    fn a_new_shard_engages_within_some_messages() {
        let did = closed_loop(24, 36).run(&mut Spinner::new(Spin::AUTO), 1_000);
        assert!(did.found >= 990, "{did:?}");
    }

    #[test]
    fn what_is_spun_in_vain_is_bounded() {
        for gap_us in [51, 60, 100, 150, 190, 250, 1_000, 1_000_000] {
            for (name, mut spinner) in states() {
                let machine = closed_loop(gap_us, 10);
                // Until it is known that nothing comes so soon.
                machine.run(&mut spinner, 2_000);
                let did = machine.run(&mut spinner, 100_000);
                let most = did.time / PAUSE_MAX as u32 + LENGTH;
                assert!(did.in_vain <= most, "{name}, {gap_us} us: {did:?}");
            }
        }
    }

    #[test]
    fn what_is_spun_in_vain_is_bounded_between_bursts() {
        for near in [1, 2, 5, 8, 10, 20, 50] {
            for late_us in [60, 100, 200, 400, 1_000, 10_000] {
                let mut spinner = Spinner::new(Spin::AUTO);
                let mut did = Did::default();
                for _ in 0..10_000 {
                    (0..near).for_each(|_| closed_loop(24, 10).wait(&mut spinner, &mut did));
                    closed_loop(late_us, 10).wait(&mut spinner, &mut did);
                }
                let most = did.time / PAUSE_MIN as u32 + LENGTH * ALLOWANCE_MAX as u32;
                assert!(did.in_vain <= most, "{near} near, one after {late_us} us: {did:?}");
            }
        }
    }

    #[test]
    fn nothing_is_tried_when_messages_are_rare_or_when_it_is_off() {
        for gap_us in [250, 1_000, 3_600_000_000] {
            let did = closed_loop(gap_us, 10).run(&mut Spinner::new(Spin::AUTO), 10_000);
            assert_eq!((did.found, did.in_vain), (0, Duration::ZERO), "{gap_us} us");
        }
        let did = closed_loop(1, 1).run(&mut Spinner::new(Spin::Off), 10_000);
        assert_eq!((did.found, did.in_vain), (0, Duration::ZERO));
    }

    #[test]
    fn hardly_ever_spins_where_nothing_can_come_meanwhile() {
        let machine = Machine { shared: true, ..closed_loop(6, 6) };
        let did = machine.run(&mut Spinner::new(Spin::AUTO), 200_000);
        assert!(did.share_in_vain() <= 1.0 / 800.0, "{did:?}");
        // The first failures are not paid for by more than this, either.
        let did = machine.run(&mut Spinner::new(Spin::AUTO), 1_000);
        assert!(did.share_in_vain() <= 1.0 / PAUSE_MIN as f64, "{did:?}");
    }

    #[test]
    fn stops_soon_when_the_load_ends() {
        for (name, mut spinner) in states() {
            closed_loop(10, 20).run(&mut spinner, 100_000);
            assert!(spinner.next().is_some(), "{name}");
            let did = closed_loop(1_000, 20).run(&mut spinner, 1_000);
            assert!(did.in_vain <= LENGTH * 2, "{name}: {did:?}");
        }
    }

    /// Another thread takes the CPU each 3 ms of spinning: that is most of what such a shard gets, if it does not see that.
    #[test]
    fn leaves_a_cpu_alone_that_another_thread_wants() {
        let mut spinner = Spinner::new(Spin::AUTO);
        let (mut time, mut spinning, mut slice) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        while time < Duration::from_secs(10) {
            let took = match spinner.next() {
                None => {
                    spinner.waited(60 * US);
                    60 * US
                }
                Some(_) if slice >= 3_000 * US => {
                    slice = Duration::ZERO;
                    spinner.spun(3_000 * US, Outcome::Preempted);
                    3_000 * US
                }
                Some(_) => {
                    spinner.spun(24 * US, Outcome::Found);
                    (slice, spinning) = (slice + 24 * US, spinning + 24 * US);
                    24 * US
                }
            };
            time += took;
        }
        let share = spinning.as_secs_f64() / time.as_secs_f64();
        assert!(share < 0.07, "{share}");
    }

    #[test]
    fn a_disturbance_now_and_then_does_not_end_it() {
        let mut spinner = Spinner::new(Spin::AUTO);
        let (near, late) = (closed_loop(24, 36), closed_loop(4_000, 36));
        let mut did = Did::default();
        for _ in 0..1_000 {
            (0..50).for_each(|_| near.wait(&mut spinner, &mut did));
            late.wait(&mut spinner, &mut did);
        }
        assert!(did.share_found() > 0.97, "{did:?}");
    }
}
