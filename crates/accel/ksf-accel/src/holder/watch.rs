//! The kernel's list of listening sockets, read once a second and when a listener is said to be closed: other listeners on
//! the program's ports, and listeners of the program that are gone.

use std::time::Duration;

use super::Holder;
use super::listener::Listener;
use crate::address::{self, Key};
use crate::network::{self, Listening};
use crate::steer::{Action, Claim, Rules};
use crate::sys;

pub(super) const INTERVAL: Duration = Duration::from_secs(1);

impl Holder {
    /// Holds the listeners against the kernel's list of sockets, and sets the rules anew. Shared memory has no say here: a
    /// listener that the kernel does not list is gone, whatever its workers' ready bits are.
    pub(super) fn watch(&mut self) {
        if self.listeners.iter().all(Option::is_none) {
            self.set_rules(&[]);
            return;
        }
        self.release_unheld();
        // Where the kernel does not tell, the rules stay as they are; those of sockets that are gone steer nothing.
        let Ok(mut listening) = network::listening() else { return };
        if self.lacks_any(&listening) {
            // The list is made in pieces: one that goes on while sockets come and go may leave one out, but not twice.
            let Ok(again) = network::listening() else { return };
            for index in 0..self.listeners.len() {
                self.drop_unlisted(index, &[&listening, &again]);
            }
            listening = again;
        }
        self.set_rules(&listening);
    }

    /// Gives up the holder's descriptors of the program's own sockets that the program has closed: they would keep the
    /// sockets listening. That of a killed worker is kept until it is empty, while others serve the listener.
    fn release_unheld(&mut self) {
        let bits = self.workers.iter().flatten().fold(0, |bits, worker| bits | worker.joined);
        let mut unheld = Vec::new();
        for (index, listener) in self.listeners.iter_mut().enumerate() {
            let queues = listener.iter_mut().flat_map(|listener| listener.queues.iter_mut());
            for (&worker, queue) in queues.filter(|(_, queue)| queue.own_cookie.is_some()) {
                let is_held = match &self.workers[worker] {
                    Some(worker) => {
                        queue.own_fd = sys::descriptor_of(worker.pid, queue.inode, queue.own_fd).unwrap_or(None);
                        queue.own_fd.is_some()
                    }
                    None => bits & 1 << index != 0,
                };
                if !is_held {
                    unheld.push((index, worker));
                }
            }
        }
        for (index, worker) in unheld {
            self.forget_own(index, worker);
        }
    }

    fn lacks_any(&self, listening: &[Listening]) -> bool {
        let mut own = self.listeners.iter().flatten().flat_map(|listener| &listener.own);
        own.any(|own| !listening.iter().any(|socket| socket.inode == own.inode))
    }

    /// Forgets own sockets that are in none of the lists, and a listener that has none left.
    fn drop_unlisted(&mut self, index: usize, lists: &[&[Listening]]) {
        let Some(listener) = &mut self.listeners[index] else { return };
        let is_listed = |inode: u64| lists.iter().any(|list| list.iter().any(|socket| socket.inode == inode));
        listener.own.retain(|own| is_listed(own.inode));
        if listener.own.is_empty() {
            self.close_listener(index);
        }
    }

    fn set_rules(&mut self, listening: &[Listening]) {
        let mut rules = Rules::new();
        for (index, listener) in self.listeners.iter().enumerate() {
            let Some(listener) = listener.as_ref().filter(|it| it.not_accelerated.is_none()) else { continue };
            rules.extend(listener.address.keys().into_iter().map(|key| (key, Action::Steer(index))));
            if listener.hidden_port != 0 {
                // What a request to a hidden queue looks like.
                let hidden = address::hidden(&listener.address, listener.hidden_port);
                let key = Key { address: hidden.ip().to_canonical(), port: hidden.port(), ifindex: 0 };
                rules.insert(key, Action::Refuse);
            }
        }
        let others: Vec<Listening> = listening.iter().filter(|it| !self.is_ours(it.inode)).copied().collect();
        let claims = self.listeners.iter_mut().flatten();
        let claims = claims.map(|Listener { address, excluded, .. }| Claim { address: *address, excluded });
        if let Err(why) = self.steering.set_rules(rules, claims, &others) {
            self.listeners.iter_mut().flatten().for_each(|listener| listener.trouble = Some(why.clone()));
        }
    }

    fn is_ours(&self, inode: u64) -> bool {
        self.listeners.iter().flatten().any(|listener| {
            listener.own.iter().any(|own| own.inode == inode)
                || listener.queues.values().any(|queue| queue.inode == inode)
        })
    }
}
