//! Cache of the system's groups of its users (`manage_gids`).
//!
//! The system may query a name server, which may not answer. So a separate thread looks users up, one after the other. Requests
//! wait for it without a lane, for [`DEADLINE`] at most; then they fail with [`ErrorKind::TryLater`]. Connections take turns, one
//! look-up each: a request waits for as many look-ups of each other connection as of its own, however many users these name.
//!
//! The number of waiting requests has no bound here: their connections have one for what they have in progress. A failed look-up
//! is not kept: its requests fail with [`ErrorKind::TryLater`].

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Result as SysResult;

use crate::account::Account;
use crate::credential::GROUPS_MAX;
use crate::error::{ErrorKind, FsError};
use crate::lru::Lru;
use crate::sys;

/// Time that a request waits for the groups of its user.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

/// Age limit of a list with at most the primary group. getgrouplist(3) reports no failure: it omits the groups of a database that
/// does not answer.
const ALONE_AGE_MAX: Duration = Duration::from_secs(5);

pub(crate) type GroupList = Arc<[u32]>;

type Then = Box<dyn FnOnce(Result<GroupList, FsError>) + Send>;

/// A cache of users' groups, bounded in users.
pub(crate) struct Groups(Arc<Shared>);

struct Shared {
    inner: Mutex<Inner>,
    /// Signals a queued user, or the end.
    work: Condvar,
    users_max: usize,
    age_max: Duration,
    ask: Box<dyn Fn(u32) -> SysResult<Vec<u32>> + Send + Sync>,
}

#[derive(Default)]
struct Inner {
    /// Time of the answer, and the groups.
    users: Lru<u32, (Instant, GroupList)>,
    /// Users in look-up, each with its waiters.
    asked: HashMap<u32, Vec<(Instant, Then)>>,
    queue: Queue,
    has_thread: bool,
    is_closed: bool,
}

/// Users that requests asked for, each as often as it was asked for.
#[derive(Default)]
struct Queue {
    /// By the number of the connection's account. None is empty.
    users: HashMap<u64, VecDeque<u32>>,
    /// Keys of `users`, in the order of their turns.
    turns: VecDeque<u64>,
}

impl Queue {
    fn push(&mut self, account: &Account, uid: u32) {
        let users = self.users.entry(account.number()).or_default();
        if users.is_empty() {
            self.turns.push_back(account.number());
        }
        users.push_back(uid);
    }

    fn pop(&mut self) -> Option<u32> {
        let account = self.turns.pop_front()?;
        let users = self.users.get_mut(&account)?;
        let uid = users.pop_front();
        if users.is_empty() {
            self.users.remove(&account);
        } else {
            self.turns.push_back(account);
        }
        uid
    }

    fn retain(&mut self, is_kept: impl Fn(u32) -> bool) {
        for users in self.users.values_mut() {
            users.retain(|uid| is_kept(*uid));
        }
        self.users.retain(|_, users| !users.is_empty());
        self.turns.retain(|account| self.users.contains_key(account));
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups").field("asked", &self.0.lock().asked.len()).finish_non_exhaustive()
    }
}

impl Groups {
    /// Creates a cache of the system's groups. A user unknown to the system has no supplementary groups.
    pub(crate) fn new(users_max: usize, age_max: Duration) -> Self {
        Self::asking(users_max, age_max, |uid| sys::groups_of(uid, GROUPS_MAX).map(Option::unwrap_or_default))
    }

    pub(crate) fn asking(
        users_max: usize,
        age_max: Duration,
        ask: impl Fn(u32) -> SysResult<Vec<u32>> + Send + Sync + 'static,
    ) -> Self {
        let (inner, work) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { inner, work, users_max: users_max.max(1), age_max, ask: Box::new(ask) }))
    }

    /// Starts the look-up thread, if there is none.
    pub(crate) fn start(&self) -> std::io::Result<()> {
        let mut inner = self.0.lock();
        if !inner.has_thread {
            let shared = Arc::clone(&self.0);
            ksf::threads::start("ksf-fs-groups", move || shared.run())?;
            inner.has_thread = true;
        }
        Ok(())
    }

    /// Cached groups of a user, if not too old.
    pub(crate) fn known(&self, uid: u32) -> Option<GroupList> {
        self.0.lock().known(uid, self.0.age_max)
    }

    /// Looks the groups of a user up. The look-up thread calls `then`, or [`Groups::expire`] does; or this call, if the groups
    /// are cached or the cache is closed.
    pub(crate) fn ask(&self, account: &Account, uid: u32, then: Then) {
        let mut inner = self.0.lock();
        let told = match inner.known(uid, self.0.age_max) {
            Some(groups) => Ok(groups),
            None if inner.is_closed => Err(ErrorKind::TryLater.into()),
            None => {
                inner.queue.push(account, uid);
                inner.asked.entry(uid).or_default().push((Instant::now(), then));
                self.0.work.notify_one();
                return;
            }
        };
        // Outside of the lock: `then` may call this cache.
        drop(inner);
        then(told);
    }

    /// Looks the groups of a user up, and waits for them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::TryLater`]: there is no answer within [`DEADLINE`], or the look-up failed.
    pub(crate) fn of(&self, account: &Account, uid: u32) -> Result<GroupList, FsError> {
        let (sender, receiver) = sync_channel(1);
        // The caller may have stopped waiting.
        self.ask(account, uid, Box::new(move |groups| sender.send(groups).unwrap_or_default()));
        receiver.recv_timeout(DEADLINE).unwrap_or_else(|_| Err(ErrorKind::TryLater.into()))
    }

    /// Fails requests that have waited for [`DEADLINE`]. A look-up in progress goes on; others that no request waits for do not begin.
    pub(crate) fn expire(&self, now: Instant) {
        let (mut late, mut inner) = (Vec::new(), self.0.lock());
        let Inner { asked, queue, .. } = &mut *inner;
        for waiters in asked.values_mut() {
            late.extend(waiters.extract_if(.., |(since, _)| now.saturating_duration_since(*since) >= DEADLINE));
        }
        asked.retain(|_, waiters| !waiters.is_empty());
        // Also those that were looked up at the turn of another connection.
        queue.retain(|uid| asked.contains_key(&uid));
        // Outside of the lock: `then` may call this cache.
        drop(inner);
        late.into_iter().for_each(|(_, then)| then(Err(ErrorKind::TryLater.into())));
    }

    /// Drops the waiting requests, and ends the thread after its current look-up.
    pub(crate) fn close(&self) {
        let mut inner = self.0.lock();
        inner.is_closed = true;
        inner.queue = Queue::default();
        let dropped = std::mem::take(&mut inner.asked);
        drop(inner);
        drop(dropped);
        self.0.work.notify_all();
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn known(&mut self, uid: u32, age_max: Duration) -> Option<GroupList> {
        let (asked, groups) = self.users.get(&uid)?;
        let age_max = if groups.len() > 1 { age_max } else { age_max.min(ALONE_AGE_MAX) };
        (asked.elapsed() < age_max).then(|| Arc::clone(groups))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut inner = self.lock();
        while !inner.is_closed {
            let Some(uid) = inner.queue.pop() else {
                inner = self.work.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            // An earlier look-up has answered all who asked for this user.
            if !inner.asked.contains_key(&uid) {
                continue;
            }
            drop(inner);
            let groups = (self.ask)(uid).map(GroupList::from);
            inner = self.lock();
            if let Ok(groups) = &groups {
                inner.users.insert(uid, (Instant::now(), Arc::clone(groups)));
            }
            while inner.users.len() > self.users_max {
                inner.users.pop_oldest();
            }
            let waiters = inner.asked.remove(&uid).unwrap_or_default();
            drop(inner);
            for (_, then) in waiters {
                then(groups.clone().map_err(|_| ErrorKind::TryLater.into()));
            }
            inner = self.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use rustix::io::Errno;

    use super::*;
    use crate::{Access, Credential, ExportOptions, Fs, FsOptions, LaneOptions, Lanes, Length};

    /// A cache whose thread reports each user and waits for the test's answer.
    fn asked(users_max: usize, age_max: Duration) -> (Groups, Receiver<u32>, std::sync::mpsc::Sender<Vec<u32>>) {
        let (asks, is_asked) = channel();
        let (answers, answer) = channel();
        let (asks, answer) = (Mutex::new(asks), Mutex::new(answer));
        let groups = Groups::asking(users_max, age_max, move |uid| {
            // The test may have ended.
            let _ = asks.lock().unwrap().send(uid);
            Ok(answer.lock().unwrap().recv().unwrap_or_default())
        });
        groups.start().unwrap();
        (groups, is_asked, answers)
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn groups_are_asked_for_once_for_as_many_users_as_are_kept() {
        let (groups, asked, answers) = asked(2, LONG);
        let mut all = Vec::new();
        for uid in [1, 2, 1, 2, 3, 2, 1] {
            // For a possible look-up; without one, the next look-up gets this answer.
            let is_known = groups.known(uid).is_some();
            if !is_known {
                answers.send(vec![uid * 10]).unwrap();
            }
            assert_eq!(groups.of(&Account::default(), uid).unwrap()[..], [uid * 10]);
            all.extend(asked.try_recv());
        }
        assert_eq!(all, [1, 2, 3, 1], "1 was the oldest when 3 came");
    }

    #[test]
    fn what_is_too_old_is_asked_for_again() {
        let (groups, _asked, answers) = asked(2, Duration::ZERO);
        for group in [5, 6] {
            answers.send(vec![group]).unwrap();
            assert_eq!(groups.of(&Account::default(), 1).unwrap()[..], [group]);
        }
    }

    #[test]
    fn primary_group_alone_is_soon_looked_up_again() {
        let (groups, _asked, _answers) = asked(10, LONG);
        let before = Instant::now().checked_sub(2 * ALONE_AGE_MAX).unwrap();
        for (uid, list) in [(1, &[1][..]), (2, &[2, 20]), (3, &[])] {
            groups.0.lock().users.insert(uid, (before, list.into()));
        }
        assert_eq!([1, 2, 3].map(|uid| groups.known(uid).is_some()), [false, true, false]);
    }

    #[test]
    fn who_waits_for_too_long_is_told_to_come_later_and_the_answer_is_kept() {
        let (groups, asked, answers) = asked(2, LONG);
        let (sender, told) = channel();
        let ask = |uid| {
            let sender = sender.clone();
            groups.ask(&Account::default(), uid, Box::new(move |groups| sender.send((uid, groups)).unwrap()));
        };
        ask(1);
        assert_eq!(asked.recv().unwrap(), 1);
        // One look-up for all requests of a user.
        [1, 2, 2].into_iter().for_each(ask);
        groups.expire(Instant::now());
        assert!(told.try_recv().is_err());
        groups.expire(Instant::now() + DEADLINE);
        let mut late: Vec<u32> = told
            .try_iter()
            .map(|(uid, groups)| {
                assert_eq!(groups.unwrap_err().kind(), ErrorKind::TryLater);
                uid
            })
            .collect();
        late.sort_unstable();
        assert_eq!(late, [1, 1, 2, 2]);
        ask(1);
        for answer in [vec![10], vec![20]] {
            answers.send(answer).unwrap();
        }
        let (uid, groups_of_one) = told.recv().unwrap();
        assert_eq!((uid, &groups_of_one.unwrap()[..]), (1, &[10][..]));
        // Its look-up had not begun, and nobody waited for it any more.
        assert!(asked.try_recv().is_err());
        assert_eq!(groups.of(&Account::default(), 2).unwrap()[..], [20]);
        assert_eq!(asked.recv().unwrap(), 2);
    }

    #[test]
    fn connections_take_turns_and_none_is_refused_for_what_others_ask() {
        let (groups, asked, answers) = asked(10_000, LONG);
        let [flooding, other] = [(); 2].map(|()| Account::default());
        let (sender, told) = channel();
        let ask = |account: &Account, uid: u32| {
            let sender = sender.clone();
            groups.ask(account, uid, Box::new(move |groups| sender.send((uid, groups.is_ok())).unwrap()));
        };
        (0..5000).for_each(|uid| ask(&flooding, uid));
        assert_eq!(asked.recv().unwrap(), 0);
        // The second one is of a user that the first connection waits for, too.
        [9000, 4000].into_iter().for_each(|uid| ask(&other, uid));
        (0..5001).for_each(|_| answers.send(Vec::new()).unwrap());
        let mut all: Vec<_> = told.iter().take(5002).collect();
        all.sort_unstable();
        let mut expected: Vec<_> = (0..5000).chain([4000, 9000]).map(|uid| (uid, true)).collect();
        expected.sort_unstable();
        assert_eq!(all, expected);
        let begun: Vec<u32> = asked.try_iter().collect();
        assert_eq!((&begun[..5], begun.len()), (&[1, 9000, 2, 4000, 3][..], 5000));
        let inner = groups.0.lock();
        assert!(inner.asked.is_empty() && inner.queue.users.is_empty() && inner.queue.turns.is_empty());
    }

    #[test]
    fn a_look_up_that_fails_is_told_to_come_later_and_is_not_kept() {
        let results = Mutex::new(vec![Ok(vec![7]), Err(Errno::CONNREFUSED)]);
        let groups = Groups::asking(2, LONG, move |_| results.lock().unwrap().pop().unwrap());
        groups.start().unwrap();
        let of = || groups.of(&Account::default(), 1);
        assert_eq!(of().unwrap_err().kind(), ErrorKind::TryLater);
        assert_eq!(of().unwrap()[..], [7]);
        assert_eq!(of().unwrap()[..], [7]);
    }

    #[test]
    fn those_who_wait_are_dropped_at_the_end() {
        let (groups, _asked, answers) = asked(2, LONG);
        let (sender, told) = channel::<()>();
        groups.ask(&Account::default(), 1, Box::new(move |_| sender.send(()).unwrap()));
        groups.close();
        drop(answers);
        assert!(told.recv().is_err());
    }

    /// With one lane: a request that waited for groups on it would block all others.
    #[test]
    fn a_look_up_that_hangs_holds_up_those_who_wait_for_it_alone() {
        let Some(()) = ksf_test::root_or_skip("identities") else { return };
        let folder = ksf_test::Folder::to_export();
        std::fs::create_dir(folder.path("data")).unwrap();
        let mut fs = Fs::new(FsOptions::default()).unwrap();
        let (hung, is_over) = channel::<()>();
        let is_over = Mutex::new(is_over);
        fs.groups = Groups::asking(16, LONG, move |uid| {
            if uid == 7 {
                is_over.lock().unwrap().recv().unwrap_err();
            }
            Ok(vec![uid])
        });
        let options = ExportOptions { manage_gids: true, ..ExportOptions::default() };
        let export = fs.add_export(&folder.path("data"), &folder.path("state"), options).unwrap();
        let (fs, lanes) = (Arc::new(fs), Arc::new(Lanes::start(&LaneOptions { threads: 1 }, 1).unwrap()));
        let (sender, told) = channel();
        let access = |uid: u32| {
            let mut user = Credential::unix(uid, uid, &[]);
            let (of, lanes, root, sender) =
                (Arc::clone(&fs), Arc::clone(&lanes), export.root().clone(), sender.clone());
            let go = move |user: Result<Credential, FsError>| {
                lanes.submit(0, Length::Short, 0, move |lane| {
                    let done = user.and_then(|user| of.access(lane, &user, &root, Access::READ).result);
                    sender.send((uid, done.map(drop).map_err(|error| error.kind()))).unwrap();
                });
            };
            if fs.has_groups(&mut user, export.root()) {
                go(Ok(user));
            } else {
                fs.look_up_groups(&Account::default(), user, export.root(), go);
            }
        };
        access(5);
        assert_eq!(told.recv().unwrap(), (5, Ok(())));
        for _ in 0..10 {
            access(7);
            // A request with known groups is served.
            access(5);
            assert_eq!(told.recv().unwrap(), (5, Ok(())));
        }
        fs.groups.expire(Instant::now() + DEADLINE);
        for _ in 0..10 {
            assert_eq!(told.recv().unwrap(), (7, Err(ErrorKind::TryLater)));
        }
        access(7);
        drop(hung);
        assert_eq!(told.recv().unwrap(), (7, Ok(())));
    }

    #[test]
    fn the_system_knows_groups_of_root_and_none_of_a_stranger() {
        assert!(sys::groups_of(0, GROUPS_MAX).unwrap().unwrap().contains(&0));
        assert_eq!(sys::groups_of(0, 1).unwrap().unwrap().len(), 1);
        assert_eq!(sys::groups_of(3_999_999_999, GROUPS_MAX), Ok(None));
    }

    #[test]
    fn users_with_long_entries_are_known_and_one_that_is_too_long_is_no_answer() {
        let inside = || {
            let Some(()) = ksf_test::own_run_or_skip("a list of users of its own") else { return };
            ksf_test::succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/etc"]);
            std::fs::write("/etc/nsswitch.conf", "passwd: files\ngroup: files\n").unwrap();
            std::fs::write("/etc/group", "more:x:43:long\n").unwrap();
            std::fs::write("/etc/passwd", format!("long:x:4242:42:{}:/:/bin/sh\n", "x".repeat(100_000))).unwrap();
            assert_eq!(sys::groups_of(4242, GROUPS_MAX), Ok(Some(vec![42, 43])));
            assert_eq!(sys::groups_of(4243, GROUPS_MAX), Ok(None));
            let endless = "x".repeat(sys::USER_BYTES_MAX);
            std::fs::write("/etc/passwd", format!("endless:x:4244:42:{endless}:/:/bin/sh\n")).unwrap();
            assert!(sys::groups_of(4244, GROUPS_MAX).is_err());
            std::fs::remove_file("/etc/passwd").unwrap();
            assert_eq!(sys::groups_of(4242, GROUPS_MAX), Ok(None), "there are no users");
        };
        std::thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}
