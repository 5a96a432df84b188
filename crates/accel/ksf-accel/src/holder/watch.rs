//! Once a second: who else listens on our ports, and are the program's listeners still there?

use std::time::{Duration, Instant};

use super::Holder;
use super::listener::Listener;
use crate::address::{self, Key};
use crate::network::{self, Listening};
use crate::steer::{Action, Claim, Rules};

pub(super) const INTERVAL: Duration = Duration::from_secs(1);

impl Holder {
    /// Looks at all listening sockets of the namespace and sets the rules anew.
    pub(super) fn watch(&mut self, now: Instant) {
        if self.listeners.iter().all(Option::is_none) {
            self.set_rules(&[]);
            return;
        }
        // Where the kernel does not tell, nothing is known of others: the rules stay as they are.
        let Ok(listening) = network::listening() else { return };
        for index in 0..self.listeners.len() {
            if self.listeners[index].is_none() {
                continue;
            }
            self.forget_closed(index, &listening);
            // Its worker's ready bit says that the program has it open.
            let unserved = now.duration_since(self.listener(index).served) >= INTERVAL && !self.any_ready(index);
            if unserved {
                self.close_unless_listening(index, &listening);
            }
        }
        self.set_rules(&listening);
    }

    /// Ends a listener that the program has closed.
    pub(super) fn close_if_gone(&mut self, index: usize) {
        let Ok(listening) = network::listening() else { return };
        self.forget_closed(index, &listening);
        if !self.any_ready(index) {
            self.close_unless_listening(index, &listening);
        }
        self.set_rules(&listening);
    }

    fn close_unless_listening(&mut self, index: usize, listening: &[Listening]) {
        // Without a worker ready, a descriptor of the program's own listener must not keep its port.
        let held: Vec<usize> = self
            .listener(index)
            .queues
            .iter()
            .filter(|(_, queue)| queue.own_cookie.is_some())
            .map(|(&worker, _)| worker)
            .collect();
        if !held.is_empty() {
            for worker in held.into_iter().filter(|&worker| self.workers[worker].is_none()).collect::<Vec<_>>() {
                self.forget_own(index, worker);
            }
            return;
        }
        let own = &self.listener(index).own;
        if !own.iter().any(|own| listening.iter().any(|socket| socket.inode == own.inode)) {
            self.close_listener(index);
        }
    }

    /// Of several own sockets, some may have been closed.
    fn forget_closed(&mut self, index: usize, listening: &[Listening]) {
        let listener = self.listener_mut(index);
        if listener.own.len() > 1 {
            let lives = |inode: u64| listening.iter().any(|socket| socket.inode == inode);
            let first = listener.own[0];
            listener.own.retain(|own| lives(own.inode));
            if listener.own.is_empty() {
                listener.own.push(first);
            }
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
        let claims = self.listeners.iter_mut().enumerate().filter_map(|(index, listener)| {
            let Listener { address, excluded, .. } = listener.as_mut()?;
            Some(Claim { index, address: *address, excluded })
        });
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
