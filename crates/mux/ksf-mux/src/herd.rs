//! Message sockets that wait in event loops: which of them hears of bytes.
//!
//! The descriptor of such a socket has the multiplexor's epoll set nested in it. The kernel tells every epoll set that
//! another one is nested in (EPOLLEXCLUSIVE is refused for nested ones, fs/eventpoll.c), so if all of them listened, all
//! event loops would wake for one message. Here one listens at a time, the *leader*:
//!
//! - Whoever found nothing is *asleep*; one of those leads. Among several the one that fell asleep last leads next: its
//!   caches are warm.
//! - A leader whose program takes something lets go, and the next sleeper listens. What the multiplexor's set still has
//!   tells that one at once.
//! - Nobody can make a program come. A leader that was told and does not come within two looks of the keeper is *rung*,
//!   which is for good: its descriptor stays readable until its program comes, and it counts no longer as one that
//!   sleeps. The next one listens.
//! - A program that takes one message and then waits, without having been told that there are no more, is *awake* and
//!   does not hear of the next ones. After two looks it is rung, too.
//!
//! So every socket whose program is in its event loop either listens, waits behind one that does and that is looked
//! after, or is readable.

use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};

/// What a socket's event loop sees.
pub(crate) trait Poller: Clone {
    /// True for the same socket.
    fn is_same(&self, other: &Self) -> bool;

    /// From now on it is readable while a connection has something, or no longer.
    fn listen(&self, on: bool);

    /// Makes it readable until its program came and found nothing.
    fn ring(&self);
}

/// The sockets of a multiplexor that wait in event loops.
#[derive(Debug)]
pub(crate) struct Herd<P> {
    state: Mutex<State<P>>,
    /// Those that are asleep, so that nobody takes the lock for nothing.
    asleep: AtomicUsize,
    /// Workers wait in another way, too.
    is_mixed: AtomicBool,
}

#[derive(Debug)]
struct State<P> {
    /// Those that fell asleep later come later.
    members: Vec<Member<P>>,
    /// Counts the leaders, and the times that one came.
    term: u64,
    /// The term in which the keeper found the leader told.
    told: Option<u64>,
    /// The keeper comes by.
    is_watched: bool,
    /// Members rung in place of one that was told and did not come.
    handed_on: u64,
}

#[derive(Debug)]
struct Member<P> {
    poller: P,
    mood: Mood,
    leads: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    /// Its program found nothing, and waits.
    Asleep,
    /// Its program came, and was not told since that there is nothing.
    Awake { seen: bool },
    /// Readable until its program comes.
    Rung,
}

/// What the keeper has to do next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Look {
    /// To look again soon.
    pub(crate) again: bool,
    /// To look soon after the multiplexor's set has become ready.
    pub(crate) watch: bool,
}

impl<P: Poller> Herd<P> {
    pub(crate) fn new() -> Self {
        let state = State { members: Vec::new(), term: 0, told: None, is_watched: false, handed_on: 0 };
        Self { state: Mutex::new(state), asleep: AtomicUsize::new(0), is_mixed: AtomicBool::new(false) }
    }

    /// Its program found nothing. `count` counts it among the scheduler's sleepers, or says that something came: then
    /// this returns false, and the program must look again. True, true: the keeper must be told to look.
    pub(crate) fn sleep(&self, poller: &P, count: impl FnOnce() -> bool) -> (bool, bool) {
        let mut state = self.lock();
        let mut leads = false;
        if let Some(at) = state.find(poller) {
            if state.members[at].mood == Mood::Asleep {
                return (true, false);
            }
            leads = state.members.remove(at).leads;
        }
        if !count() {
            let member = Member { poller: poller.clone(), mood: Mood::Awake { seen: false }, leads };
            state.members.push(member);
            return (false, false);
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        state.members.push(Member { poller: poller.clone(), mood: Mood::Asleep, leads });
        if state.leader().is_none_or(|leader| state.members[leader].mood != Mood::Asleep) {
            let newest = state.members.len() - 1;
            state.lead(newest);
        }
        (true, self.needs_watch(&mut state))
    }

    /// Its program has come. `uncount`: it was counted among the scheduler's sleepers, and is not any more. True: the
    /// keeper must be told to look.
    pub(crate) fn come(&self, poller: &P, uncount: impl FnOnce()) -> bool {
        let mut state = self.lock();
        // One that was rung stays readable until it finds nothing.
        let Some(at) = state.find(poller).filter(|at| state.members[*at].mood == Mood::Asleep) else { return false };
        state.members[at].mood = Mood::Awake { seen: false };
        if state.members[at].leads {
            state.term += 1;
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        uncount();
        self.needs_watch(&mut state)
    }

    /// Its program has something to work on: another one listens, if one sleeps.
    pub(crate) fn let_go(&self, poller: &P) {
        if self.asleep.load(Ordering::SeqCst) == 0 {
            // Whoever falls asleep from here on leads.
            return;
        }
        let mut state = self.lock();
        if state.find(poller).is_some_and(|at| state.members[at].leads && state.members[at].mood != Mood::Asleep)
            && let Some(next) = state.next()
        {
            state.lead(next);
        }
    }

    /// It receives no more. `uncount` as with [`Self::come`].
    pub(crate) fn leave(&self, poller: &P, uncount: impl FnOnce()) {
        let mut state = self.lock();
        let Some(at) = state.find(poller) else { return };
        let left = state.members.remove(at);
        if left.mood == Mood::Asleep {
            self.asleep.fetch_sub(1, Ordering::SeqCst);
            uncount();
        }
        if left.leads {
            left.poller.listen(false);
            state.term += 1;
            if let Some(next) = state.next() {
                state.lead(next);
            }
        }
    }

    /// A worker waits in another way. True: the keeper must be told to look.
    pub(crate) fn mix(&self) -> bool {
        if self.is_mixed.load(Ordering::Relaxed) {
            return false;
        }
        let mut state = self.lock();
        self.is_mixed.store(true, Ordering::Relaxed);
        self.needs_watch(&mut state)
    }

    /// Whether the keeper comes by, or was told to.
    pub(crate) fn is_watched(&self) -> bool {
        self.lock().is_watched
    }

    /// Rings everybody.
    pub(crate) fn ring_all(&self, uncount: impl Fn()) {
        let mut state = self.lock();
        for member in &mut state.members {
            if std::mem::replace(&mut member.mood, Mood::Rung) == Mood::Asleep {
                self.asleep.fetch_sub(1, Ordering::SeqCst);
                uncount();
            }
            member.poller.ring();
        }
    }

    /// The keeper comes by. `is_ready`: whether the multiplexor's set has events. `uncount` as with [`Self::come`].
    pub(crate) fn look(&self, is_ready: impl FnOnce() -> bool, uncount: impl FnOnce()) -> Look {
        let mut state = self.lock();
        let mut look = Look::default();
        if self.has_others(&state) {
            for member in &mut state.members {
                match &mut member.mood {
                    Mood::Awake { seen: true } => {
                        member.mood = Mood::Rung;
                        member.poller.ring();
                    }
                    Mood::Awake { seen } => {
                        *seen = true;
                        look.again = true;
                    }
                    Mood::Asleep | Mood::Rung => {}
                }
            }
        }
        // One that sleeps alone listens, and stays readable.
        if self.asleep.load(Ordering::SeqCst) > 1 {
            look.watch = true;
            let told = is_ready();
            if told && state.told == Some(state.term) {
                self.hand_on(&mut state, uncount);
                // The next one is told at this moment.
                state.told = Some(state.term);
                look.again = true;
                look.watch = self.asleep.load(Ordering::SeqCst) > 1;
            } else {
                state.told = told.then_some(state.term);
                look.again |= told;
            }
        }
        state.is_watched = look.watch || look.again;
        look
    }

    /// The leader was told and does not come.
    fn hand_on(&self, state: &mut State<P>, uncount: impl FnOnce()) {
        let Some(leader) = state.leader() else { return };
        let late = &mut state.members[leader];
        if late.mood == Mood::Asleep {
            late.mood = Mood::Rung;
            late.poller.ring();
            self.asleep.fetch_sub(1, Ordering::SeqCst);
            uncount();
        }
        state.handed_on += 1;
        if let Some(next) = state.next() {
            state.lead(next);
        }
    }

    /// True if the keeper must be told that there is something to look after.
    fn needs_watch(&self, state: &mut State<P>) -> bool {
        self.has_others(state) && !std::mem::replace(&mut state.is_watched, true)
    }

    /// True if messages can go to others than the only member.
    fn has_others(&self, state: &State<P>) -> bool {
        state.members.len() > 1 || (self.is_mixed.load(Ordering::Relaxed) && !state.members.is_empty())
    }

    /// Times that another one was told in place of one that did not come.
    #[cfg_attr(not(test), allow(dead_code, reason = "for tests that count wake-ups"))]
    pub(crate) fn handed_on(&self) -> u64 {
        self.lock().handed_on
    }

    /// Those that are asleep.
    #[cfg_attr(not(test), allow(dead_code, reason = "for tests that count wake-ups"))]
    pub(crate) fn asleep(&self) -> usize {
        self.asleep.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<P: Poller> State<P> {
    fn find(&self, poller: &P) -> Option<usize> {
        self.members.iter().position(|member| member.poller.is_same(poller))
    }

    fn leader(&self) -> Option<usize> {
        self.members.iter().position(|member| member.leads)
    }

    /// The one to lead next.
    fn next(&self) -> Option<usize> {
        self.members.iter().rposition(|member| member.mood == Mood::Asleep)
    }

    /// This one listens, and nobody else.
    fn lead(&mut self, next: usize) {
        if let Some(leader) = self.leader().filter(|leader| *leader != next) {
            self.members[leader].leads = false;
            self.members[leader].poller.listen(false);
        }
        self.term += 1;
        if !std::mem::replace(&mut self.members[next].leads, true) {
            self.members[next].poller.listen(true);
        }
    }
}
