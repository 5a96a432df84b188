//! What may be at each key: the versions that were sent, acknowledged and seen, known to all threads.
//!
//! Each key has one connection that writes it, so its versions are sent in order, and answered in order. A value that is read
//! must be at least as new as what was acknowledged, or seen by a read, before the read was sent, and no newer than what was
//! sent. Versions of a session begin behind a number that no session before it has reached: so those need not be known.

use std::sync::atomic::{AtomicU64, Ordering};

/// The versions of a session are `session << SESSION_SHIFT` and more.
const SESSION_SHIFT: u32 = 40;

/// The most sessions of a journal.
pub(super) const SESSIONS_MAX: u64 = 1 << (64 - SESSION_SHIFT - 1);

#[derive(Debug, Default)]
struct Key {
    /// The last version that was sent; 0: none in this session.
    sent: AtomicU64,
    /// The last version whose write was acknowledged, in any session.
    acknowledged: AtomicU64,
    /// The last version that a read has seen in this session.
    seen: AtomicU64,
}

/// All keys: 24 bytes each.
#[derive(Debug)]
pub(super) struct Space {
    keys: Box<[Key]>,
    /// Versions up to this one may have been sent by earlier sessions.
    base: u64,
}

impl Space {
    /// The keys as session number `session` finds them; `acknowledged` has a version for each, 0 where no write was
    /// acknowledged.
    pub(super) fn new(session: u64, acknowledged: impl IntoIterator<Item = u64>) -> Space {
        let key = |version| Key { acknowledged: AtomicU64::new(version), ..Key::default() };
        Space { keys: acknowledged.into_iter().map(key).collect(), base: session << SESSION_SHIFT }
    }

    /// The session that a version is of, and its number in it.
    pub(super) fn in_parts(version: u64) -> (u64, u64) {
        (version >> SESSION_SHIFT, version & ((1 << SESSION_SHIFT) - 1))
    }

    /// How many keys there are.
    pub(super) fn len(&self) -> u64 {
        self.keys.len() as u64
    }

    /// A version for a write that is about to be sent. Called by one thread at a time for each key.
    pub(super) fn next_version(&self, key: u64) -> u64 {
        let sent = &self.key(key).sent;
        let version = sent.load(Ordering::Relaxed).max(self.base) + 1;
        sent.store(version, Ordering::Release);
        version
    }

    /// The write of this version was acknowledged. Called by one thread at a time for each key, in the order of sending.
    pub(super) fn acknowledge(&self, key: u64, version: u64) {
        self.key(key).acknowledged.store(version, Ordering::Release);
    }

    /// A read has seen this version.
    pub(super) fn see(&self, key: u64, version: u64) {
        let seen = &self.key(key).seen;
        if seen.load(Ordering::Relaxed) < version {
            seen.fetch_max(version, Ordering::AcqRel);
        }
    }

    /// The last version that was acknowledged; 0: none.
    pub(super) fn acknowledged(&self, key: u64) -> u64 {
        self.key(key).acknowledged.load(Ordering::Acquire)
    }

    /// A read that is sent from now on sees this version or a later one; 0: there may be anything.
    pub(super) fn floor(&self, key: u64) -> u64 {
        self.acknowledged(key).max(self.key(key).seen.load(Ordering::Acquire))
    }

    /// What can be read by now is this version or an earlier one.
    pub(super) fn ceiling(&self, key: u64) -> u64 {
        self.key(key).sent.load(Ordering::Acquire).max(self.base)
    }

    fn key(&self, key: u64) -> &Key {
        &self.keys[key as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_rise_and_bound_what_may_be_read() {
        let space = Space::new(1, [0, 0]);
        assert_eq!((space.len(), space.floor(0), space.ceiling(0)), (2, 0, 1 << 40));
        let (one, two) = (space.next_version(0), space.next_version(0));
        assert_eq!((one, two), ((1 << 40) + 1, (1 << 40) + 2));
        assert_eq!((space.floor(0), space.ceiling(0), space.floor(1)), (0, two, 0));
        space.acknowledge(0, one);
        assert_eq!((space.floor(0), space.acknowledged(0)), (one, one));
        space.see(0, two);
        space.see(0, one);
        assert_eq!((space.floor(0), space.acknowledged(0)), (two, one));
    }

    #[test]
    fn a_later_session_knows_what_was_acknowledged_and_writes_later_versions() {
        let first = Space::new(1, [0]);
        let version = first.next_version(0);
        let second = Space::new(2, [version]);
        assert_eq!(second.floor(0), version);
        assert!(second.ceiling(0) > version + 1_000_000, "what else the first one sent is allowed");
        assert!(second.next_version(0) > second.floor(0).max(1 << 41));
    }
}
