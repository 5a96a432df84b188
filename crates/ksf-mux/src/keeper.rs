//! The one thread a multiplexor has of its own. It moves no messages: it does in time what no worker comes to do,
//! because all of them work, or none receives.
//!
//! Connections are put on its list when they have something that must not wait for ever: replies that were held back to
//! leave together, bytes TCP had no room for, a message that began and must end in time. While the list is empty the
//! thread sleeps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::link::Link;
use crate::mux::{Shared, now};
use crate::sync::Arc;

/// Longest time a reply waits for others to leave with, when its worker is held up by the next message.
const CORK: Duration = Duration::from_millis(1);

/// The time between looks while nothing but time limits is to be kept.
const TICK: Duration = Duration::from_millis(10);

/// Looks without corked replies after which the longer time is used.
const CALM_LOOKS: u32 = 100;

#[derive(Debug)]
pub(crate) struct Keeper {
    list: Mutex<Vec<Arc<Link>>>,
    changed: Condvar,
    running: AtomicBool,
    stop: AtomicBool,
    /// Something was put on the list that does not wait for the longer time between looks.
    hurry: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Keeper {
    pub(crate) fn new() -> Self {
        Self {
            list: Mutex::default(),
            changed: Condvar::new(),
            running: false.into(),
            stop: false.into(),
            hurry: false.into(),
        }
    }

    /// Puts a connection on the list, if it is not there.
    pub(crate) fn look_after(&self, link: &Arc<Link>) {
        if link.listed.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.push(Arc::clone(link));
        if list.len() == 1 && !self.running.load(Ordering::SeqCst) {
            self.changed.notify_one();
        }
    }

    /// The same for a batch, whose time may be shorter than that between looks.
    pub(crate) fn look_soon_after(&self, link: &Arc<Link>) {
        self.look_after(link);
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        self.hurry.store(true, Ordering::SeqCst);
        drop(list);
        self.changed.notify_one();
    }

    pub(crate) fn stop(&self) {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        self.stop.store(true, Ordering::SeqCst);
        drop(list);
        self.changed.notify_one();
    }

    /// The thread.
    pub(crate) fn run(shared: &Shared) {
        let keeper = &shared.keeper;
        let mut calm = 0;
        let mut links = Vec::new();
        loop {
            let mut list = keeper.list.lock().unwrap_or_else(PoisonError::into_inner);
            keeper.running.store(false, Ordering::SeqCst);
            while list.is_empty() && !keeper.stop.load(Ordering::SeqCst) {
                list = keeper.changed.wait(list).unwrap_or_else(PoisonError::into_inner);
            }
            keeper.running.store(true, Ordering::SeqCst);
            if keeper.stop.load(Ordering::SeqCst) {
                list.drain(..);
                return;
            }
            links.append(&mut list);
            drop(list);
            let mut corked = false;
            links.retain(|link| {
                let (stays, was_corked) = look(shared, link);
                corked |= was_corked;
                stays
            });
            let mut list = keeper.list.lock().unwrap_or_else(PoisonError::into_inner);
            list.append(&mut links);
            calm = if corked { 0 } else { calm + 1 };
            let pause = if calm < CALM_LOOKS { CORK } else { TICK };
            let no_hurry =
                |_: &mut Vec<_>| !keeper.hurry.swap(false, Ordering::SeqCst) && !keeper.stop.load(Ordering::SeqCst);
            drop(keeper.changed.wait_timeout_while(list, pause, no_hurry));
        }
    }
}

/// Looks after one connection. Whether it stays on the list, and whether replies were held back.
fn look(shared: &Shared, link: &Arc<Link>) -> (bool, bool) {
    // First off the list, then the look: what comes later puts it on again.
    link.listed.store(false, Ordering::SeqCst);
    let batch_until_ns = link.batch_until_ns.load(Ordering::SeqCst);
    let corked = link.corked.load(Ordering::SeqCst) || batch_until_ns != 0;
    if (link.outbox.bytes() > 0 || batch_until_ns != 0) && now().0 >= batch_until_ns {
        shared.send(link);
    }
    shared.check_time(link, now());
    let unfinished = link.unfinished_bytes.load(Ordering::SeqCst) > 0;
    let batched = link.batch_until_ns.load(Ordering::SeqCst) != 0;
    let keep = (unfinished || batched || link.outbox.bytes() > 0) && !link.detached.load(Ordering::SeqCst);
    let stays = keep && !link.listed.swap(true, Ordering::SeqCst);
    (stays, corked)
}
