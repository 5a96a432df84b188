//! Polling before sleeping: a thread that sleeps is woken too late to tell how fast the server was, and a thread that
//! polls takes a CPU. [`ksf::spin`] decides when polling pays, as it does for the shards of a server; a load polls only
//! where the server does not need its CPU. No socket and no clock here.

use std::fmt;
use std::time::Duration;

use ksf::spin::{Outcome, Spin};

use crate::options::numbers::{NumberError, parse_duration, parse_in};

/// How long `auto` polls: some times what it costs to be woken on another CPU (36 us in a virtual machine).
const AUTO: Duration = Duration::from_micros(100);

/// The longest time. More would not be polling before sleeping, but never sleeping.
const LONGEST: Duration = Duration::from_secs(1);

/// The most waits between two looks at where replies are handled; between the first looks there are fewer.
const LOOK_INTERVAL_MAX: u32 = 256;

/// `--spin`: for how long a thread polls before it sleeps. In reports it is as on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum ClientSpin {
    /// Not at all.
    Off,
    /// As long as makes sense.
    Auto,
    /// For this time.
    Time(Duration),
}

impl ClientSpin {
    /// Reads `auto`, `off`, a time with its unit, or a number of microseconds.
    ///
    /// # Errors
    /// The text is none of these, or more than a second.
    pub fn parse(text: &str) -> Result<ClientSpin, NumberError> {
        let time = match text {
            "auto" => return Ok(ClientSpin::Auto),
            "off" => return Ok(ClientSpin::Off),
            _ if text.bytes().all(|byte| byte.is_ascii_digit()) => Duration::from_micros(parse_in(text, 0, u64::MAX)?),
            _ => parse_duration(text)?,
        };
        match time {
            Duration::ZERO => Ok(ClientSpin::Off),
            time if time <= LONGEST => Ok(ClientSpin::Time(time)),
            _ => Err(NumberError::OutOfRange { text: text.to_owned(), min: 0, max: LONGEST.as_micros() as u64 }),
        }
    }

    /// The longest that is polled before a sleep.
    pub(crate) fn limit(self) -> Duration {
        match self {
            ClientSpin::Off => Duration::ZERO,
            ClientSpin::Auto => AUTO,
            ClientSpin::Time(time) => time,
        }
    }
}

impl fmt::Display for ClientSpin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientSpin::Off => f.write_str("off"),
            ClientSpin::Auto => f.write_str("auto"),
            ClientSpin::Time(time) => write!(f, "{}us", time.as_nanos() as f64 / 1e3),
        }
    }
}

impl From<ClientSpin> for String {
    fn from(spin: ClientSpin) -> String {
        spin.to_string()
    }
}

impl TryFrom<String> for ClientSpin {
    type Error = NumberError;

    fn try_from(text: String) -> Result<ClientSpin, NumberError> {
        ClientSpin::parse(&text)
    }
}

/// What polling brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SpinRecord {
    /// Waits for replies.
    pub(crate) waits: u64,
    /// Those that ended while the thread polled, so that it did not sleep.
    pub(crate) caught: u64,
    /// Those in which it polled in vain, and slept.
    pub(crate) missed: u64,
    /// Time spent polling for replies.
    pub(crate) spent_ns: u64,
}

impl SpinRecord {
    pub(crate) fn merge(&mut self, other: &SpinRecord) {
        self.waits += other.waits;
        self.caught += other.caught;
        self.missed += other.missed;
        self.spent_ns += other.spent_ns;
    }
}

/// Decides before each wait for replies how long to poll.
#[derive(Debug)]
pub(crate) struct Spinner {
    is_on: bool,
    policy: ksf::spin::Spinner,
    /// The server has another CPU.
    is_apart: bool,
    waits_to_look: u32,
    look_interval: u32,
    pub(crate) record: SpinRecord,
}

impl Spinner {
    pub(crate) fn new(spin: ClientSpin) -> Spinner {
        Spinner {
            is_on: spin != ClientSpin::Off,
            policy: ksf::spin::Spinner::new(Spin::UpTo(spin.limit())),
            is_apart: false,
            waits_to_look: 0,
            look_interval: 1,
            record: SpinRecord::default(),
        }
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    /// A wait begins: for how long to poll before sleeping.
    pub(crate) fn begin(&self) -> u64 {
        let length = if self.is_apart { self.policy.next() } else { None };
        length.map_or(0, |length| length.as_nanos() as u64)
    }

    /// A wait has ended after `waited_ns`, of which `polled_ns` were polled; `caught`: while it was polled.
    pub(crate) fn end(&mut self, waited_ns: u64, polled_ns: u64, caught: bool) {
        self.record.waits += 1;
        self.waits_to_look = self.waits_to_look.saturating_sub(1);
        let waited = Duration::from_nanos(waited_ns);
        if polled_ns == 0 {
            return self.policy.waited(waited);
        }
        self.record.spent_ns += polled_ns;
        if caught {
            self.record.caught += 1;
            self.policy.spun(waited, Outcome::Found);
        } else {
            self.record.missed += 1;
            self.policy.spun(waited, Outcome::Missed);
        }
    }

    /// Whether it is time to look where replies are handled.
    pub(crate) fn is_look_due(&self) -> bool {
        self.waits_to_look == 0
    }

    /// Replies are handled on another CPU than this thread's, so the server has another one. `None`: that cannot be
    /// told.
    pub(crate) fn heed(&mut self, is_apart: Option<bool>) {
        self.is_apart = is_apart == Some(true);
        self.waits_to_look = self.look_interval;
        self.look_interval = (2 * self.look_interval).min(LOOK_INTERVAL_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_are_read() {
        for (text, spin) in [
            ("auto", ClientSpin::Auto),
            ("off", ClientSpin::Off),
            ("0", ClientSpin::Off),
            ("50", ClientSpin::Time(Duration::from_micros(50))),
            ("5ms", ClientSpin::Time(Duration::from_millis(5))),
            ("1s", ClientSpin::Time(LONGEST)),
        ] {
            assert_eq!(ClientSpin::parse(text), Ok(spin), "{text}");
            assert_eq!(ClientSpin::parse(&spin.to_string()), Ok(spin), "{text}");
        }
        for text in ["", "on", "2s", "1000001", "-1", "5 us"] {
            assert!(ClientSpin::parse(text).is_err(), "{text}");
        }
    }

    /// Lets replies come so long after their waits began; returns for how long was polled in each.
    fn polled(spinner: &mut Spinner, waits_ns: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let wait = |wait_ns: u64| {
            let spin_ns = spinner.begin();
            let caught = wait_ns < spin_ns;
            let polled_ns = wait_ns.min(spin_ns);
            spinner.end(wait_ns, polled_ns, caught);
            polled_ns
        };
        waits_ns.into_iter().map(wait).collect()
    }

    fn apart(limit_us: u64) -> Spinner {
        let mut spinner = Spinner::new(ClientSpin::Time(Duration::from_micros(limit_us)));
        spinner.heed(Some(true));
        spinner
    }

    #[test]
    fn fast_replies_are_polled_for_and_slow_ones_soon_no_more() {
        let mut spinner = apart(100);
        let fast = polled(&mut spinner, [20_000; 1000]);
        assert_eq!(fast[0], 0, "nothing is known yet");
        assert!(fast[10..].iter().all(|ns| *ns == 20_000), "{fast:?}");
        assert!(spinner.record.caught >= 990 && spinner.record.missed == 0, "{:?}", spinner.record);
        // The server needs longer from now on: a few polls in vain, then none.
        polled(&mut spinner, std::iter::repeat_n(500_000, 100_000));
        assert!(spinner.record.missed <= 6, "{:?}", spinner.record);
        assert_eq!(polled(&mut spinner, [500_000; 10]), [0; 10]);
        polled(&mut spinner, [20_000; 100]);
        assert_eq!(polled(&mut spinner, [20_000; 10]), [20_000; 10], "it is fast again");
    }

    #[test]
    fn a_cpu_that_the_server_may_need_is_not_taken() {
        let waits = |heed: Option<bool>| {
            let mut spinner = apart(100);
            polled(&mut spinner, [20_000; 100]);
            spinner.heed(heed);
            polled(&mut spinner, [20_000; 100]).iter().sum::<u64>()
        };
        assert_eq!([waits(Some(false)), waits(None)], [0, 0]);
        assert!(waits(Some(true)) > 0);
        let mut unknown = Spinner::new(ClientSpin::Auto);
        assert!(unknown.is_on() && unknown.is_look_due());
        assert_eq!(polled(&mut unknown, [20_000; 100]), [0; 100], "not before it was looked");
        let mut off = Spinner::new(ClientSpin::Off);
        off.heed(Some(true));
        assert_eq!((off.is_on(), polled(&mut off, [0, 1, 2])), (false, vec![0; 3]));
    }

    proptest! {
        /// Replies that are much further apart than the spin is long are never polled for, and no wait is polled longer.
        #[test]
        fn what_is_polled_is_bounded(waits_us in proptest::collection::vec(0u64..400, 1..500)) {
            let polled = polled(&mut apart(100), waits_us.iter().map(|us| us * 1000));
            prop_assert!(polled.iter().all(|ns| *ns <= 100_000));
            let far = waits_us.iter().map(|us| (us + 400) * 1000);
            prop_assert_eq!(self::polled(&mut apart(100), far), vec![0; waits_us.len()]);
        }
    }
}
