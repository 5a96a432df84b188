//! Outgoing connections of a shard: dialed for an exchange, kept between two.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use super::stream::Stream;
use super::{Conn, Phase, Place, Shard};
use crate::engine::{Engine, Reading};
use crate::env::Env;
use crate::error::CloseReason;
use crate::limits::Time;
use crate::outgoing::{ExchangeRequest, ExchangeWork, Failure, HangUp, Upstream};
use crate::output::{Output, SendBatch};
use crate::pool::Chunk;
use crate::service::{COPY_BYTES_MAX, ConnKey};

/// Rounds of work for exchanges and looking after in one turn, before events get their turn.
const ROUNDS_MAX: u32 = 8;

/// One outgoing connection. What it receives goes to its owner.
pub(super) struct Outgoing {
    key: ConnKey,
    to: SocketAddr,
    /// The connection whose exchange it serves; none while it is kept.
    owner: Option<ConnKey>,
    connected: bool,
    output: Output,
    sending: bool,
    sending_bytes: usize,
    /// Bytes of the batch that are sent. Their memory is free when all of the batch is sent.
    sent_of_batch: usize,
    /// What the shard's budget knows of it.
    counted_bytes: usize,
    /// The owner's client does not take its bytes, or the owner could not pass on what it was told.
    paused: bool,
    /// The owner was told that no more can be passed for now.
    full: bool,
    /// Its exchange has ended and was not over.
    is_cut_short: bool,
    eof: bool,
    closing: Option<CloseReason>,
    failure: Failure,
    last_activity: Time,
    last_send_progress: Time,
}

impl Outgoing {
    fn new(key: ConnKey, to: SocketAddr, owner: ConnKey, now: Time) -> Self {
        Self {
            key,
            to,
            owner: Some(owner),
            connected: false,
            output: Output::default(),
            sending: false,
            sending_bytes: 0,
            sent_of_batch: 0,
            counted_bytes: 0,
            paused: false,
            full: false,
            is_cut_short: false,
            eof: false,
            closing: None,
            failure: Failure::Reset,
            last_activity: now,
            last_send_progress: now,
        }
    }

    fn tell(&self, event: Upstream, env: &mut Env) {
        if let Some(to) = self.owner {
            env.exchange_work.push(ExchangeWork::Deliver { to, by: self.key, event });
        }
    }

    /// Its time limit now, and what it means when that is over.
    fn limit(&self, env: &Env) -> (Option<Time>, Failure, CloseReason) {
        let limits = &env.limits;
        let send = self.last_send_progress.after_ms(limits.send_timeout_ms).filter(|_| self.sending);
        let after = |ms: u64| self.last_activity.after_ms(ms);
        if self.owner.is_none() {
            (after(limits.upstream_idle_ms), self.failure, CloseReason::IdleTimeout)
        } else if !self.connected {
            (after(limits.connect_timeout_ms), Failure::ConnectTimeout, CloseReason::Io)
        } else {
            // While its bytes wait for the client, it cannot be heard.
            let heard = after(limits.upstream_timeout_ms).filter(|_| !self.paused);
            match (send, heard) {
                (Some(send), heard) if heard.is_none_or(|heard| send <= heard) => {
                    (Some(send), Failure::NotTaken, CloseReason::SendTimeout)
                }
                // Its owner may have been kept from sending the rest.
                (_, heard) if self.sending => (heard, Failure::NotTaken, CloseReason::IdleTimeout),
                (_, heard) => (heard, Failure::Silent, CloseReason::IdleTimeout),
            }
        }
    }

    /// Tells the shard's budget what is held for the other end now.
    fn recount(&mut self, env: &mut Env) {
        let held_bytes = self.queued_bytes() + self.sent_of_batch;
        env.budget.recount_replies(self.counted_bytes, held_bytes);
        self.counted_bytes = held_bytes;
        if held_bytes == 0
            && let Some(owner) = self.owner
            && env.budget.has_pass_of(owner)
            && !env.passes_on(owner)
        {
            env.budget.return_reply_pass(owner);
        }
    }

    /// True while nothing more is to be passed on. As with connections, it is looked at again when its own share is gone if
    /// others used up the shard's budget.
    fn is_full(&self, env: &Env) -> bool {
        let (limits, queued_bytes) = (&env.limits, self.queued_bytes());
        queued_bytes > limits.out_queue_bytes_max.min(limits.connection_bytes_max)
            || queued_bytes > 0 && env.budget.is_full(limits)
    }

    /// True when another exchange may use it: nothing of the last one is left.
    fn is_clean(&self) -> bool {
        self.connected && !self.sending && self.output.is_empty() && !self.eof && self.closing.is_none()
    }

    pub(super) fn receive(&mut self, chunk: Chunk, env: &mut Env) {
        self.last_activity = env.now;
        env.stats.outgoing_bytes_in.add(chunk.len() as u64);
        if self.owner.is_some() {
            self.tell(Upstream::Received(chunk), env);
        } else {
            // No request was sent: what follows could be taken for the answer to the next exchange.
            self.closing = Some(CloseReason::MalformedFrame);
        }
    }

    pub(super) fn peer_closed(&mut self, env: &mut Env) {
        self.eof = true;
        self.tell(Upstream::Ended, env);
        if self.owner.is_none() {
            self.closing = Some(CloseReason::PeerClosed);
        }
    }

    pub(super) fn drain(&mut self) {
        if self.owner.is_none() {
            self.closing = Some(CloseReason::Drained);
        }
    }

    /// Everything that waits to be sent, unless a batch is under way already.
    pub(super) fn take_batch(&mut self, now: Time) -> Option<SendBatch> {
        if !self.connected || self.sending || self.output.is_empty() {
            return None;
        }
        self.sending = true;
        self.sending_bytes = self.output.len();
        self.last_send_progress = now;
        Some(self.output.take())
    }

    /// The engine sent `bytes` more; `done` when the batch is complete.
    pub(super) fn sent(&mut self, bytes: usize, done: bool, env: &mut Env) {
        self.sending_bytes -= bytes;
        env.stats.outgoing_bytes_out.add(bytes as u64);
        if bytes > 0 {
            self.last_activity = env.now;
            self.last_send_progress = env.now;
        }
        self.sent_of_batch = if done { 0 } else { self.sent_of_batch + bytes };
        self.sending &= !done;
        self.recount(env);
        if self.full
            && !self.is_full(env)
            && let Some(to) = self.owner
        {
            self.full = false;
            env.exchange_work.push(ExchangeWork::Room { to, by: self.key });
        }
    }

    pub(super) fn tick(&mut self, env: &Env) -> Option<CloseReason> {
        let (deadline, failure, reason) = self.limit(env);
        if deadline.is_none_or(|at| env.now < at) {
            return None;
        }
        self.failure = failure;
        Some(reason)
    }

    pub(super) fn deadline(&self, env: &Env) -> Option<Time> {
        self.limit(env).0
    }

    /// True while bytes are to be received.
    pub(super) fn reads(&self) -> bool {
        self.connected && !self.paused && !self.eof && self.closing.is_none()
    }

    pub(super) fn saw_eof(&self) -> bool {
        self.eof
    }

    /// The reason to close for.
    pub(super) fn finished(&self) -> Option<CloseReason> {
        self.closing
    }

    /// Bytes that wait for the other end.
    pub(super) fn queued_bytes(&self) -> usize {
        self.output.len() + self.sending_bytes
    }

    /// True if the end of the connection must be a reset now: its exchange is not over, or TCP has not taken all that was passed on,
    /// and an orderly end would pass for the end of that.
    pub(super) fn needs_reset(&self) -> bool {
        self.is_cut_short || self.owner.is_some() || self.queued_bytes() > 0
    }

    pub(super) fn end(self, env: &mut Env) {
        env.budget.recount_replies(self.counted_bytes, 0);
        self.output.recycle(&mut env.spares);
    }
}

impl<E: Engine> Shard<E> {
    /// Does the work for exchanges and looks after connections, until nothing is left to do in this turn.
    pub(super) fn settle(&mut self) {
        for _ in 0..ROUNDS_MAX {
            // All of them first: a connection that hung up and ends must not take the other one with it.
            for _ in 0..ROUNDS_MAX {
                if self.env.exchange_work.is_empty() {
                    break;
                }
                self.run_exchange_work();
            }
            self.look_after_touched();
            if self.env.exchange_work.is_empty() {
                return;
            }
        }
    }

    fn run_exchange_work(&mut self) {
        let mut exchange_work = std::mem::replace(&mut self.env.exchange_work, std::mem::take(&mut self.exchange_work));
        for work in exchange_work.drain(..) {
            match work {
                ExchangeWork::Request { from, request: ExchangeRequest::Dial { to, reuse } } => {
                    self.dial(from, to, reuse)
                }
                ExchangeWork::Request { from, request: ExchangeRequest::Pass(bytes) } => self.pass(from, bytes),
                ExchangeWork::Request { from, request: ExchangeRequest::HangUp(how) } => self.hang_up(from, how),
                ExchangeWork::Deliver { to, by, event } => self.deliver(to, by, event),
                ExchangeWork::Room { to, by } => {
                    if self.upstream_of(to) == Some(by)
                        && let Some((owner, env)) = self.served(to)
                    {
                        owner.set_full(false, env);
                    }
                }
            }
        }
        self.exchange_work = exchange_work;
    }

    /// The outgoing connection that a connection uses.
    fn upstream_of(&mut self, owner: ConnKey) -> Option<ConnKey> {
        self.open_conn(owner)?.upstream
    }

    fn open_conn(&mut self, key: ConnKey) -> Option<&mut Conn> {
        let place = self.places.get_mut(key.index as usize).filter(|place| place.generation == key.generation)?;
        place.conn.as_mut().filter(|conn| !matches!(conn.phase, Phase::Releasing(_)))
    }

    fn dial(&mut self, from: ConnKey, to: SocketAddr, reuse: bool) {
        self.hang_up(from, HangUp::Close);
        // What was passed on before may have filled the connection that is hung up, and the next one is not that.
        match self.served(from) {
            Some((owner, env)) => owner.set_full(false, env),
            None => return,
        }
        if reuse && let Some(upstream) = self.take_idle(to, from) {
            self.env.stats.outgoing_reused.add(1);
            self.deliver(from, upstream, Upstream::Connected { reused: true });
            return;
        }
        self.env.stats.dialed.add(1);
        match open_socket(to) {
            Ok(socket) => {
                let key = self.free_place();
                let fd = socket.as_raw_fd();
                let stream = Stream::Outgoing(Box::new(Outgoing::new(key, to, from, self.env.now)));
                self.engine.open(key, fd, Reading::Off);
                self.places[key.index as usize].conn = Some(Conn {
                    stream,
                    assist: None,
                    socket,
                    reading: Reading::Off,
                    touched: false,
                    phase: Phase::Open,
                    lingering: None,
                    upstream: None,
                    listener: u32::MAX,
                });
                self.open += 1;
                if let Some(owner) = self.open_conn(from) {
                    owner.upstream = Some(key);
                }
                self.engine.connect(key, to);
                self.arm(key.index);
            }
            Err(_) => {
                self.env.stats.dials_failed.add(1);
                if let Some((owner, env)) = self.served(from) {
                    owner.upstream(Upstream::Failed(Failure::NoResources), env);
                }
            }
        }
    }

    /// A kept connection to this address; the one that was used last is the least likely to be closed soon.
    fn take_idle(&mut self, to: SocketAddr, owner: ConnKey) -> Option<ConnKey> {
        let now = self.env.now;
        loop {
            let key = self.idle.get_mut(&to)?.pop()?;
            let Some((outgoing, _)) = self.outgoing(key).filter(|(outgoing, _)| outgoing.is_clean()) else { continue };
            outgoing.owner = Some(owner);
            outgoing.last_activity = now;
            if let Some(conn) = self.open_conn(owner) {
                conn.upstream = Some(key);
            }
            return Some(key);
        }
    }

    /// The engine connected, or could not.
    pub(super) fn connected(&mut self, key: ConnKey, error: Option<&io::Error>) {
        let Some((outgoing, env)) = self.outgoing(key) else { return };
        match error {
            None => {
                outgoing.connected = true;
                outgoing.last_activity = env.now;
                outgoing.tell(Upstream::Connected { reused: false }, env);
            }
            Some(error) => {
                outgoing.failure = failure_of(error);
                env.stats.dials_failed.add(1);
                self.abort(key.index, CloseReason::Io);
            }
        }
    }

    fn pass(&mut self, from: ConnKey, bytes: Chunk) {
        let passed_bytes = bytes.len();
        self.hand_over(from, bytes);
        // Counted there, or gone.
        if let Some((owner, env)) = self.served(from) {
            owner.passed(passed_bytes, env);
        }
    }

    fn hand_over(&mut self, from: ConnKey, bytes: Chunk) {
        let Some(upstream) = self.upstream_of(from) else { return };
        let Some((outgoing, env)) = self.outgoing(upstream) else { return };
        if bytes.len() <= COPY_BYTES_MAX || !bytes.keep() {
            outgoing.output.tail(&mut env.spares).extend_from_slice(&bytes);
        } else {
            outgoing.output.push_chunk(bytes, &mut env.spares);
        }
        outgoing.recount(env);
        if !outgoing.full && outgoing.is_full(env) {
            outgoing.full = true;
            if let Some((owner, env)) = self.served(from) {
                owner.set_full(true, env);
            }
        }
    }

    fn hang_up(&mut self, from: ConnKey, how: HangUp) {
        let Some(upstream) = self.open_conn(from).and_then(|owner| owner.upstream.take()) else { return };
        let (now, idle_max, draining) = (self.env.now, self.env.limits.upstreams_idle_max, self.draining.is_some());
        let Some((outgoing, _)) = self.outgoing(upstream) else { return };
        outgoing.owner = None;
        outgoing.is_cut_short |= how == HangUp::Reset;
        outgoing.last_activity = now;
        outgoing.paused = false;
        outgoing.full = false;
        let (to, clean) = (outgoing.to, outgoing.is_clean());
        if how == HangUp::Keep && clean && !draining && self.idle.get(&to).map_or(0, Vec::len) < idle_max {
            self.idle.entry(to).or_default().push(upstream);
        } else {
            self.release(upstream.index, CloseReason::Service);
        }
    }

    fn deliver(&mut self, to: ConnKey, by: ConnKey, event: Upstream) {
        let Some(owner) = self.open_conn(to).filter(|owner| owner.upstream == Some(by)) else { return };
        if matches!(event, Upstream::Failed(_)) {
            owner.upstream = None;
        }
        if let Some((owner, env)) = self.served(to) {
            owner.upstream(event, env);
        }
    }

    /// Before a connection is released: its exchange ends, whichever side it is.
    pub(super) fn end_exchange(&mut self, index: u32) {
        let Some(conn) = self.places[index as usize].conn.as_mut() else { return };
        if let Some(outgoing) = conn.stream.outgoing() {
            outgoing.tell(Upstream::Failed(outgoing.failure), &mut self.env);
            outgoing.is_cut_short |= outgoing.owner.take().is_some();
            // Who lets its peers choose where it dials must not remember every address.
            if let Some(idle) = self.idle.get_mut(&outgoing.to) {
                idle.retain(|key| *key != outgoing.key);
                if idle.is_empty() {
                    self.idle.remove(&outgoing.to);
                }
            }
        } else if let Some(upstream) = conn.upstream.take() {
            let Some((outgoing, _)) = self.outgoing(upstream) else { return };
            outgoing.owner = None;
            // The owner did not say that the exchange is over.
            outgoing.is_cut_short = true;
            self.release(upstream.index, CloseReason::Service);
        }
    }

    /// At the end of looking after a connection with an exchange: its other end is read while its own peer takes bytes.
    /// And while what it sends can be passed on.
    pub(super) fn pace_exchange(&mut self, upstream: ConnKey, pause: bool) {
        let Some(conn) = self.open_conn(upstream) else { return };
        let Some(outgoing) = conn.stream.outgoing() else { return };
        if outgoing.paused != pause
            && let Some((outgoing, env)) = self.outgoing(upstream)
        {
            outgoing.paused = pause;
            // Its silence was not its own.
            outgoing.last_activity = env.now;
        }
    }

    /// A place in the table, with the key of the connection that will have it.
    pub(super) fn free_place(&mut self) -> ConnKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, conn: None });
            self.places.len() as u32 - 1
        });
        ConnKey { index, generation: self.places[index as usize].generation }
    }
}

/// A socket to connect with. Like accepted ones it does not wait for more bytes before it sends.
fn open_socket(to: SocketAddr) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with, sockopt};
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, Some(ipproto::TCP))?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    Ok(socket)
}

fn failure_of(error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => Failure::Refused,
        Some(libc::ETIMEDOUT) => Failure::ConnectTimeout,
        Some(libc::ECONNRESET | libc::ECONNABORTED | libc::EPIPE) => Failure::Reset,
        Some(libc::EADDRNOTAVAIL | libc::EAGAIN | libc::ENOMEM | libc::ENOBUFS) => Failure::NoResources,
        _ => Failure::Unreachable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use crate::pool::{Memory, Pool};

    /// A backend that took all but the last bytes of long messages, and no more, kept their memory uncounted.
    #[test]
    fn a_batch_counts_in_full_until_it_is_sent() {
        const BYTES: usize = 64 << 10;
        let mut env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, 4096, 1).unwrap()).unwrap();
        let (key, to) = (ConnKey { index: 0, generation: 0 }, SocketAddr::from(([127, 0, 0, 1], 9)));
        let mut outgoing = Outgoing { connected: true, ..Outgoing::new(key, to, key, env.now) };
        outgoing.output.push_chunk(Chunk::from_vec(vec![7; BYTES]), &mut env.spares);
        outgoing.recount(&mut env);
        let batch = outgoing.take_batch(env.now).unwrap();
        for (sent, counted) in [(0, BYTES), (BYTES - 10, BYTES), (9, BYTES), (1, 0)] {
            outgoing.sent(sent, counted == 0, &mut env);
            assert_eq!(env.budget.reply_bytes(), counted, "{sent} more bytes are sent");
        }
        batch.recycle(&mut env.spares);
        outgoing.end(&mut env);
    }

    /// The batch before is sent in the turn in which its client's next one proceeds without room.
    #[test]
    fn the_place_without_room_stays_with_what_is_on_its_way() {
        let limits = Limits { shard_bytes_max: 16 << 10, ..Limits::default() };
        let mut env = Env::new(limits, Pool::new(Memory::Anonymous, 4096, 1).unwrap()).unwrap();
        let (key, to) = (ConnKey { index: 0, generation: 0 }, SocketAddr::from(([127, 0, 0, 1], 9)));
        let mut outgoing = Outgoing { connected: true, ..Outgoing::new(key, to, key, env.now) };
        assert!(env.budget.admits_reply(key, 64 << 10, &env.limits));
        let request = ExchangeRequest::Pass(Chunk::from_vec(vec![7; 64 << 10]));
        env.exchange_work.push(ExchangeWork::Request { from: key, request });
        outgoing.recount(&mut env);
        assert!(env.budget.has_pass_of(key));
        env.exchange_work.clear();
        outgoing.recount(&mut env);
        assert!(!env.budget.has_pass_of(key));
        outgoing.end(&mut env);
    }
}
