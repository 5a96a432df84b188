//! Listening sockets: what is accepted, and what is refused.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::assisted::AssistState;
use super::erased::{AnyService, LocalService};
use super::stream::Stream;
use super::{Conn, HALVES, ListenerKind, Phase, Shard, ShardListener};
use crate::adopt::{Adopted, Place};
use crate::engine::syscalls::{accept_now, set_nonblocking};
use crate::engine::{Engine, Reading};
use crate::error::CloseReason;
use crate::listener::{ListenAddr, begin_no_handshake};
use crate::service::{Peer, Refused};

/// Time after which accepting is tried again when it failed.
const ACCEPT_RETRY_MS: u64 = 50;

/// Connections refused per failed accept when descriptors are exhausted.
const REFUSE_BURST: usize = 1024;

impl<E: Engine> Shard<E> {
    pub(super) fn add_listener(&mut self, listener: ShardListener) -> Result<(), crate::Error> {
        let index = self.listeners.len() as u32;
        let local_service = self.start_service(&*listener.service)?;
        let Some(socket) = &listener.socket else { return Ok(()) };
        self.datagrams_stopped.push(false);
        let fd = socket.as_raw_fd();
        if let ListenAddr::Udp(local) = listener.addr {
            self.own_datagrams.push(local);
            let (addr, service) = (listener.addr.clone(), listener.service.profile().name);
            let datagrams = local_service.open_datagrams(Peer::Udp(local), index);
            let datagrams = datagrams.map_err(|Refused| crate::Error::RefusedByService {
                service: service.to_owned(),
                addr: addr.clone(),
            })?;
            // In the list first: whatever fails from here on, the service gets its state back.
            self.datagrams.push(Some(datagrams));
            let fail = |source| crate::Error::Listen { addr, step: "receiving datagrams", source };
            self.engine.listen_datagrams(index, fd).map_err(fail)?;
        } else {
            self.datagrams.push(None);
            self.engine.listen(index, fd);
        }
        if let Some(half) = &listener.assist
            && !self.halves.iter().any(|known| Arc::ptr_eq(known, half))
        {
            if let Some(fd) = half.wake_fd(self.env.shard) {
                self.engine.watch(HALVES + self.halves.len() as u32, fd.as_raw_fd())?;
            }
            self.halves.push(Arc::clone(half));
        }
        self.listeners.push(Some(listener));
        self.served_by.push(local_service);
        Ok(())
    }

    /// The service on this shard; one for all listeners that serve the same value.
    fn start_service(&mut self, service: &dyn AnyService) -> Result<Rc<dyn LocalService>, crate::Error> {
        let identity = service.identity();
        if let Some((_, local)) = self.services.iter().find(|(known, _)| *known == identity) {
            return Ok(Rc::clone(local));
        }
        self.env.service = self.services.len() as u32;
        let local = service.start(&mut self.env)?;
        if local.info().has_turn_end {
            self.batching.push((self.env.service, Rc::clone(&local)));
        }
        self.services.push((identity, Rc::clone(&local)));
        Ok(local)
    }

    pub(super) fn accepted(&mut self, listener: u32, socket: OwnedFd) {
        let stats = &self.env.stats;
        stats.accepted.add(1);
        if self.local_cpu.is_some() && rustix::net::sockopt::socket_incoming_cpu(&socket).ok() == self.local_cpu {
            stats.accepted_local.add(1);
        }
        let Some(Some(from)) = self.listeners.get(listener as usize) else { return };
        if self.connections.is_full(listener, &self.env.limits) {
            stats.refused_connections_max.add(1);
            return;
        }
        let named = from.service.profile().needs_peer_addresses || from.adopter.is_some();
        let Some(peer) = (if named { peer_of(&socket, from.kind) } else { Some(Peer::Unnamed) }) else {
            // Reset before it was accepted.
            stats.count_close(CloseReason::Io);
            return;
        };
        if let Some(adopter) = &from.adopter {
            let place = Place::take(&self.connections, listener);
            adopter.adopt(Adopted { socket, peer, place });
            return;
        }
        let key = self.free_place();
        let index = key.index;
        let Some(Some(from)) = self.listeners.get(listener as usize) else { return };
        let Ok(stream) = self.served_by[listener as usize].open(peer, key, listener, &self.env) else {
            self.env.stats.refused_by_service.add(1);
            self.free.push(index);
            return;
        };
        let draining = self.draining.is_some();
        let assist = from.assist.as_ref().filter(|_| from.kind == ListenerKind::Tcp && !draining).and_then(|half| {
            Some(Box::new(AssistState::new(half.attach(socket.as_fd())?, stream.limits(&self.env), self.env.now)))
        });
        if let Some(assist) = &assist {
            self.tokens.insert(assist.conn.token(), key);
            // Unread bytes lie with the kernel half, where a close does not see them: it would leave the peer with a window
            // that never opens again (Linux 6.18), until the peer gives up. So a close resets, also that of a process
            // that is killed; only a connection that its peer has ended closes in another way (`forget`).
            let _ = rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
        }
        // The first bytes came with the connection: a receive that is tried now finds them, and often the connection
        // ends in this very turn, without anything for the engine to do. A kernel half would have to see them first. And a
        // shard that drains answers what has come by now, and nothing later.
        let at_once = (from.service.profile().peer_speaks_first || draining) && assist.is_none();
        let (reading, phase) = (if at_once { Reading::Off } else { Reading::On }, Phase::Open);
        let fd = socket.as_raw_fd();
        // After attaching: the engine's first receive finds what arrived before.
        self.engine.open(key, fd, reading);
        self.places[index as usize].conn = Some(Conn {
            stream: Stream::Served(stream),
            assist,
            socket,
            reading,
            touched: false,
            phase,
            lingering: None,
            upstream: None,
            listener,
        });
        self.connections.add(listener);
        self.open += 1;
        // Looked after at the end of the turn: a kernel half takes over at once.
        let first = if at_once { self.engine.receive_now(fd, &mut self.env) } else { None };
        if let Some((stream, env)) = self.stream(key) {
            if let Some(chunk) = first {
                stream.receive(chunk, env);
            }
            if draining {
                stream.drain(env);
            }
        }
    }

    pub(super) fn accept_failed(&mut self, listener: u32, error: &io::Error) {
        let no_fd = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
        if no_fd {
            self.refuse_waiting(listener);
        } else if error.kind() != io::ErrorKind::WouldBlock {
            self.env.stats.accept_errors.add(1);
        }
        self.accept_again.push((listener, self.env.now.plus_ms(ACCEPT_RETRY_MS)));
        self.next_tick = self.next_tick.min(self.env.now.plus_ms(ACCEPT_RETRY_MS));
    }

    /// Out of descriptors: accepts what waits on the spare one, and closes it. A refusal tells the peer at once, where
    /// a connection left in the queue would hang.
    fn refuse_waiting(&mut self, listener: u32) {
        let Some(Some(from)) = self.listeners.get(listener as usize) else { return };
        let Some(socket) = from.socket.as_ref().map(AsRawFd::as_raw_fd) else { return };
        drop(self.spare_fd.take());
        if set_nonblocking(socket, true).is_ok() {
            for _ in 0..REFUSE_BURST {
                match accept_now(socket) {
                    Ok(Some(_closed_here)) => self.env.stats.refused_no_fd.add(1),
                    Ok(None) | Err(_) => break,
                }
            }
            // It stays like that until the engine listens again and chooses its mode: another shard may share the
            // socket, and would hang in an accept that finds nothing.
        }
        self.spare_fd = spare_fd();
    }

    /// Refuses further connections: a peer that is refused asks another server, where one that waits in the queue of a
    /// server that stops would be reset in the end. True if handshakes that were begun before are to be waited for.
    pub(super) fn refuse_new(&mut self, index: u32) -> bool {
        let Some(listener) = &self.listeners[index as usize] else { return false };
        let Some(socket) = &listener.socket else { return false };
        match listener.kind {
            ListenerKind::Udp => false,
            // Others listen on it, or will, and find there the peers that come.
            _ if listener.handed_over => {
                self.engine.unlisten(index);
                false
            }
            ListenerKind::Tcp => {
                // Without it a connection whose handshake is under way may be reset.
                let _ = begin_no_handshake(socket);
                true
            }
            ListenerKind::Unix => {
                // Connecting fails from now on (unix_stream_connect), accepting does not: there is no handshake. It
                // cannot fail, and the other shards, which share the socket, drain as well.
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Read);
                self.stop_listening(index);
                false
            }
        }
    }

    /// Takes the connections that wait to be accepted, and closes the socket, which would reset them.
    pub(super) fn stop_listening(&mut self, index: u32) {
        let Some(listener) = &mut self.listeners[index as usize] else { return };
        if listener.kind == ListenerKind::Udp || listener.handed_over {
            return;
        }
        let Some(socket) = listener.socket.take() else { return };
        self.engine.unlisten(index);
        if set_nonblocking(socket.as_raw_fd(), true).is_ok() {
            while let Ok(Some(connection)) = accept_now(socket.as_raw_fd()) {
                self.accepted(index, connection);
            }
        }
    }
}

pub(super) fn spare_fd() -> Option<OwnedFd> {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok()
}

fn peer_of(socket: &OwnedFd, kind: ListenerKind) -> Option<Peer> {
    match kind {
        ListenerKind::Unix => Some(Peer::Unix),
        ListenerKind::Tcp | ListenerKind::Udp => {
            socket2::SockRef::from(socket).peer_addr().ok()?.as_socket().map(Peer::Tcp)
        }
    }
}
