//! The groups that the system knows of its users, for a while (`manage_gids`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::credential::GROUPS_MAX;
use crate::lru::Lru;
use crate::sys;

/// The groups of a user, and when they were asked for.
type Known = (Instant, Arc<[u32]>);

/// A cache of users' groups, bounded in users. A look may wait for a server of names.
#[derive(Debug)]
pub(crate) struct GroupCache {
    users: Mutex<Lru<u32, Known>>,
    users_max: usize,
    age_max: Duration,
}

impl GroupCache {
    pub(crate) fn new(users_max: usize, age_max: Duration) -> Self {
        Self { users: Mutex::default(), users_max: users_max.max(1), age_max }
    }

    /// The supplementary groups of a user; none for a user that the system does not know.
    pub(crate) fn of(&self, uid: u32) -> Arc<[u32]> {
        self.look(uid, || sys::groups_of(uid, GROUPS_MAX).unwrap_or_default())
    }

    fn look(&self, uid: u32, ask: impl FnOnce() -> Vec<u32>) -> Arc<[u32]> {
        let users = || self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((asked, groups)) = users().get(&uid)
            && asked.elapsed() < self.age_max
        {
            return Arc::clone(groups);
        }
        // Outside of the lock: it may take long.
        let groups: Arc<[u32]> = ask().into();
        let mut users = users();
        users.insert(uid, (Instant::now(), Arc::clone(&groups)));
        while users.len() > self.users_max {
            users.pop_oldest();
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_asked_for_once_for_as_many_users_as_are_kept() {
        let cache = GroupCache::new(2, Duration::from_secs(3600));
        let mut asked = Vec::new();
        for uid in [1, 2, 1, 2, 3, 2, 1] {
            let groups = cache.look(uid, || {
                asked.push(uid);
                vec![uid * 10]
            });
            assert_eq!(groups[..], [uid * 10]);
        }
        assert_eq!(asked, [1, 2, 3, 1], "1 was the oldest when 3 came");
    }

    #[test]
    fn what_is_too_old_is_asked_for_again() {
        let cache = GroupCache::new(2, Duration::ZERO);
        assert_eq!(cache.look(1, || vec![5])[..], [5]);
        assert_eq!(cache.look(1, || vec![6])[..], [6]);
    }

    #[test]
    fn the_system_knows_groups_of_root_and_none_of_a_stranger() {
        assert!(sys::groups_of(0, GROUPS_MAX).unwrap().contains(&0));
        assert_eq!(sys::groups_of(0, 1).unwrap().len(), 1);
        assert_eq!(sys::groups_of(3_999_999_999, GROUPS_MAX), None);
    }
}
