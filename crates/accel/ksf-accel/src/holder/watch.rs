//! Once a second: who else listens on our ports, and are the program's listeners still there?

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::Holder;
use crate::address::{self, Key};
use crate::network::{self, Listening};
use crate::steer::{Action, Rules};

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
        let mut paused = 0u64;
        for (index, listener) in self.listeners.iter_mut().enumerate() {
            let Some(listener) = listener else { continue };
            listener.excluded.clear();
            if listener.not_accelerated.is_some() {
                continue;
            }
            for key in listener.address.keys() {
                rules.insert(key, Action::Steer(index));
            }
            if listener.hidden_port != 0 {
                for key in hidden_keys(&listener.address, listener.hidden_port) {
                    rules.insert(key, Action::Refuse);
                }
            }
        }
        for socket in listening {
            if self.is_ours(socket.inode) {
                continue;
            }
            let Some(index) = self.on_port(socket.port) else { continue };
            let listener = self.listener_mut(index);
            let text = std::net::SocketAddr::new(socket.address, socket.port).to_string();
            let key = Key { address: socket.address, port: socket.port, ifindex: 0 };
            if listener.address.keys().iter().any(|own| own.address == key.address) {
                // At the very same address: another member of a reuseport group, or one bound to a device. Who of them
                // would get a request is the kernel's to say.
                paused |= 1 << index;
                listener.excluded.push(format!("{text} (the same address: not steered while it is there)"));
            } else {
                rules.entry(key).or_insert(Action::Leave);
                listener.excluded.push(text);
            }
        }
        self.steering.shared.state().control.paused.store(paused, Relaxed);
        if let Err(error) = self.steering.set_rules(&rules) {
            for listener in self.listeners.iter_mut().flatten() {
                listener.trouble = Some(format!("telling the steering program its addresses: {error}"));
            }
        }
    }

    fn on_port(&self, port: u16) -> Option<usize> {
        self.listeners
            .iter()
            .position(|listener| listener.as_ref().is_some_and(|listener| listener.address.socket.port() == port))
    }

    fn is_ours(&self, inode: u64) -> bool {
        self.listeners.iter().flatten().any(|listener| {
            listener.own.iter().any(|own| own.inode == inode)
                || listener.queues.values().any(|queue| queue.inode == inode)
        })
    }
}

/// What a connection request to a hidden queue looks like.
fn hidden_keys(of: &address::Address, port: u16) -> Vec<Key> {
    let socket = address::hidden(of, port);
    let address = socket.ip().to_canonical();
    vec![Key { address, port, ifindex: 0 }]
}
