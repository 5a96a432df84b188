//! Cache of the kernel's answers about callers' rights, for calls without a lane ([`warm`](crate::warm)).
//!
//! An answer holds while the object's ctime is the same, and for one second at most. The kernel checks mode, owner, group and
//! ACL of the object itself, and each change of one of them changes the ctime. The second bounds the rest: a mount that becomes
//! read-only, and the rules of security modules.
//!
//! Kernels before 6.13 take the ctime from a clock with steps of 1 to 10 ms, and some file systems store whole seconds (ext4
//! with inodes of 128 bytes). So two changes may have one ctime, and an answer is cached only if the last change was some steps
//! ago.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::attr::{Attr, Time};
use crate::credential::Identity;
use crate::ops::Access;

/// Validity of an answer.
const HOLDS: Duration = Duration::from_secs(1);
/// Age of a ctime that no further change can have: ten of the longest steps of the clock.
const SETTLED: Duration = Duration::from_millis(100);
/// Clock step of file systems that store whole seconds.
const COARSE_STEP: Duration = Duration::from_secs(1);
/// Cached callers of one object; one more evicts the oldest answer.
const CALLERS_MAX: usize = 4;

/// Fingerprint of an identity: two hashes with separate secret keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Who([u64; 2]);

/// The keys of the hashes.
#[derive(Debug, Default)]
pub(crate) struct WhoKeys([RandomState; 2]);

impl WhoKeys {
    pub(crate) fn who(&self, identity: &Identity) -> Who {
        Who([self.0[0].hash_one(identity), self.0[1].hash_one(identity)])
    }
}

/// An answer of the kernel to one caller.
#[derive(Clone, Copy, Debug)]
struct Answer {
    who: Who,
    ctime: Time,
    asked: Instant,
    /// Requested rights.
    known: Access,
    granted: Access,
}

/// Answers of the kernel for one object.
#[derive(Debug, Default)]
pub(crate) struct Rights(Vec<Answer>);

impl Rights {
    /// The granted ones of the wanted rights; `None`: ask the kernel. `ctime`: the object's current one.
    pub(crate) fn granted(&self, who: Who, ctime: Time, wanted: Access) -> Option<Access> {
        let answer = self.0.iter().find(|answer| answer.who == who)?;
        let holds = answer.ctime == ctime && answer.asked.elapsed() < HOLDS && answer.known.contains(wanted);
        holds.then(|| answer.granted & wanted)
    }

    /// Caches the answer to a question.
    pub(crate) fn keep(&mut self, who: Who, question: Question, asked_for: Access, granted: Access) {
        let Question { ctime, asked, .. } = question;
        let mut new = Answer { who, ctime, asked, known: asked_for, granted: granted & asked_for };
        if let Some(at) = self.0.iter().position(|answer| answer.who == who) {
            let old = self.0.swap_remove(at);
            if old.ctime == ctime && old.asked.elapsed() < HOLDS {
                let kept = old.known.without(asked_for);
                new = Answer {
                    asked: old.asked,
                    known: old.known | asked_for,
                    granted: new.granted | old.granted & kept,
                    ..new
                };
            }
        }
        if self.0.len() == CALLERS_MAX {
            self.0.sort_by_key(|answer| answer.asked);
            self.0.remove(0);
        }
        self.0.push(new);
    }
}

/// When the kernel was asked for rights, and the object's ctime before that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    ctime: Time,
    asked: Instant,
    /// A change after the question has another ctime, so the answer may be cached.
    pub(crate) is_settled: bool,
}

impl Question {
    /// Call it after the attributes were read and before the kernel is asked: the work behind the question may take long.
    pub(crate) fn about(attr: &Attr) -> Self {
        let is_settled = is_settled_at(attr.ctime, now());
        Self { ctime: attr.ctime, asked: Instant::now(), is_settled }
    }
}

/// Time since 1970; zero, at which nothing is settled, before.
pub(crate) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// True if no change after `now` gets this time from the clock of file systems.
pub(crate) fn is_settled_at(time: Time, now: Duration) -> bool {
    let step = if time.nanos == 0 { COARSE_STEP } else { Duration::ZERO };
    let changed = u64::try_from(time.seconds).map(|seconds| Duration::new(seconds, time.nanos));
    changed.is_ok_and(|changed| changed + step + SETTLED < now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credential::{Credential, Squash};
    use crate::export::ExportOptions;

    const ALL: Access = Access::from_bits_truncate(7);

    fn who(keys: &WhoKeys, uid: u32) -> Who {
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        keys.who(&Credential::unix(uid, 100, &[4, 5]).identity(&options, None))
    }

    fn question(seconds: i64) -> Question {
        Question { ctime: time(seconds), asked: Instant::now(), is_settled: true }
    }

    fn time(seconds: i64) -> Time {
        Time { seconds, nanos: 0 }
    }

    #[test]
    fn an_answer_is_for_its_caller_its_ctime_and_its_rights() {
        let keys = WhoKeys::default();
        let (one, two) = (who(&keys, 1000), who(&keys, 1001));
        let mut rights = Rights::default();
        rights.keep(one, question(5), Access::READ | Access::WRITE, Access::READ);
        assert_eq!(rights.granted(one, time(5), Access::READ | Access::WRITE), Some(Access::READ));
        assert_eq!(rights.granted(one, time(5), Access::WRITE), Some(Access::NONE));
        assert_eq!(rights.granted(one, time(5), Access::EXECUTE), None, "nobody asked");
        assert_eq!(rights.granted(one, time(6), Access::READ), None, "it changed");
        assert_eq!(rights.granted(two, time(5), Access::READ), None);
        rights.keep(one, question(5), Access::WRITE | Access::EXECUTE, Access::EXECUTE);
        assert_eq!(rights.granted(one, time(5), ALL), Some(Access::READ | Access::EXECUTE));
        rights.keep(one, question(6), Access::READ, Access::NONE);
        assert_eq!(rights.granted(one, time(6), Access::EXECUTE), None, "of before the change");
        assert_eq!(rights.granted(one, time(6), Access::READ), Some(Access::NONE));
    }

    #[test]
    fn an_answer_holds_for_a_second_also_when_others_join_it() {
        let keys = WhoKeys::default();
        let one = who(&keys, 1000);
        let mut rights = Rights::default();
        rights.keep(one, question(5), Access::READ, Access::READ);
        let Some(before) = Instant::now().checked_sub(HOLDS) else { return };
        rights.0[0].asked = before + Duration::from_millis(500);
        rights.keep(one, question(5), Access::WRITE, Access::WRITE);
        assert_eq!(rights.0[0].asked, before + Duration::from_millis(500));
        rights.0[0].asked = before;
        assert_eq!(rights.granted(one, time(5), Access::READ), None);
        rights.keep(one, question(5), Access::WRITE, Access::WRITE);
        assert_eq!(rights.granted(one, time(5), Access::READ), None, "the one of before is gone");
    }

    #[test]
    fn a_change_of_just_now_may_not_be_the_last_with_its_ctime() {
        let at = |nanos| Time { seconds: 100, nanos };
        let after = |ms: u64| Duration::from_millis(100_000 + ms);
        assert!(!is_settled_at(at(5), after(100)));
        assert!(is_settled_at(at(5), after(101)));
        // Whole seconds: what changes until the end of this one has the same time.
        assert!(!is_settled_at(at(0), after(1100)));
        assert!(is_settled_at(at(0), after(1101)));
        // The clock was set back.
        assert!(!is_settled_at(at(5), Duration::from_secs(99)));
        assert!(!is_settled_at(time(-1), after(0)));
    }

    #[test]
    fn a_few_callers_are_known() {
        let keys = WhoKeys::default();
        let mut rights = Rights::default();
        for uid in 0..10 {
            rights.keep(who(&keys, uid), question(5), ALL, ALL);
        }
        assert_eq!(rights.0.len(), CALLERS_MAX);
        assert!(rights.granted(who(&keys, 9), time(5), ALL).is_some());
        assert_eq!(rights.granted(who(&keys, 0), time(5), ALL), None);
    }
}
