//! What a connection does with received bytes: cut them, put them aside, wait for memory.

use std::collections::VecDeque;
use std::mem;

use super::{Connection, Memory};
use crate::budget::{InputRoom, Silent};
use crate::buffers::Buffers;
use crate::cutter::{Cut, CutError, Native, Rule};
use crate::env::Env;
use crate::error::{CloseReason, FramingError};
use crate::framing::{Frame, Framing};
use crate::limits::{Limits, Time};
use crate::outgoing::Upstream;
use crate::pool::Chunk;
use crate::session::{ServiceInfo, Session};

/// A rest of a message from here on is received straight into the message's buffer. Each message costs two more turns of
/// the shard then. On loopback (Linux 6.18) that was slower than a copy for pipelined messages of 64 and 100 KiB on
/// io_uring, and faster for 256 KiB and 1 MiB on both engines.
pub(crate) const DIRECT_BYTES_MIN: usize = 128 << 10;

/// Short messages behind a long one before which another long one is still expected.
pub(super) const HEADS: u8 = 16;

/// Chunks for which memory is kept when none is put aside any more.
const KEEP_MAX: usize = 256;

/// What a connection keeps while replies must be taken before it goes on, memory is short, or others have their turn.
#[derive(Default)]
pub(crate) struct Aside {
    /// A message that waits for room for its reply; it came before the chunks.
    pub(super) message: Option<Chunk>,
    /// The shard's budget names the connection when there is that room.
    pub(super) is_queued: bool,
    /// The shard's [shares](crate::shares) name the connection when they are to be taken up.
    pub(super) gave_way: bool,
    /// Chunks that wait.
    pub(super) chunks: VecDeque<Chunk>,
    /// When it was last read before it waited for memory.
    pub(super) unread_since: Time,
    /// Since when the peer is watched that is read with a pass, and what it had sent then.
    pub(super) pass_watched: (Time, u64),
}

impl Memory {
    pub(super) fn room(self, env: &mut Env) -> InputRoom<'_> {
        InputRoom {
            limit_bytes: env.limits.assembly_bytes_max,
            grants_all: self == Self::Pass,
            budget: &mut env.budget,
        }
    }
}

impl Connection {
    /// Cuts `chunk` into messages, of a connection that is not stalled. What is left when replies must be taken first is put
    /// aside, in front of what was put aside before, and so is what is above the connection's share of the turn. An
    /// unfinished message is taken in also when memory is short: then the connection is not read from here on.
    pub(super) fn process(&mut self, chunk: Chunk, env: &mut Env) {
        let bytes = &*chunk;
        let mut at = 0;
        while at < bytes.len() && self.closing.is_none() {
            if at > 0 && self.is_stalled(env) {
                self.put_aside_front(chunk.slice(at..chunk.len()), env);
                return;
            }
            if !env.shares.takes(&mut self.share) {
                return self.give_way(chunk.slice(at..chunk.len()), env);
            }
            match self.cut(bytes, &mut at, env) {
                Ok(Cut::InPlace(body)) => {
                    self.heads_left = self.heads_left.saturating_sub(1);
                    if !self.admits(&bytes[body.clone()], env) {
                        if at < bytes.len() {
                            self.put_aside_front(chunk.slice(at..chunk.len()), env);
                        }
                        self.keep_message(chunk.slice(body), env);
                        return;
                    }
                    let start = body.start;
                    self.call(&bytes[body], Some((&chunk, start)), env);
                }
                Ok(Cut::Assembled(message)) => {
                    self.call_assembled(message, env);
                }
                Ok(Cut::More) => {}
                // Does not happen: there is room for what was received.
                Ok(Cut::NoRoom) => self.close(CloseReason::MemoryLimit, env),
                Err(reason) => self.refuse(reason, env),
            }
            self.recount(env);
        }
        env.stats.bytes_copied.add(self.cutter.take_copied_bytes() as u64);
        self.at_once &= at == bytes.len();
        match self.cutter.is_idle() {
            true => self.message_ends(env),
            false => self.bound_input(env),
        }
    }

    /// With more of an unfinished message: if memory is short for it, it waits. What each connection adds before that is
    /// bounded by one receive, of 4 KiB while the shard is overfull.
    pub(super) fn bound_input(&mut self, env: &mut Env) {
        if self.memory == Memory::Waiting && self.cutter.since() == Some(env.now) {
            // It still has its place from an earlier message.
            self.aside_mut(env).unread_since = env.now;
        } else if env.budget.is_input_full(&env.limits) {
            self.wait_for_memory(env);
        }
    }

    #[inline]
    fn cut(&mut self, chunk: &[u8], at: &mut usize, env: &mut Env) -> Result<Cut, CloseReason> {
        let mut room =
            InputRoom { limit_bytes: env.limits.assembly_bytes_max, grants_all: true, budget: &mut env.budget };
        let (limits, buffers, now) = (env.limits.of(self.listener), &env.buffers, env.now);
        let cut = match self.info.framing {
            Framing::Custom => {
                let (info, session) = (&*self.info, &mut self.session);
                let asked = info.guard(|| session.header_bytes_max(limits));
                let header_bytes_max = asked.map_err(|_| CloseReason::Panicked)?;
                let mut rule = Own { info, session, limits, header_bytes_max };
                match self.cutter.next(chunk, at, &mut rule, &mut room, buffers, now) {
                    Err(CutError::Rule(None)) => return Err(CloseReason::Panicked),
                    Err(CutError::Rule(Some(error))) => Err(CutError::Rule(error)),
                    Err(CutError::Oversized { bytes, limit }) => Err(CutError::Oversized { bytes, limit }),
                    Err(CutError::EndlessHeader { bytes, limit }) => Err(CutError::EndlessHeader { bytes, limit }),
                    Err(CutError::EndlessParts { limit }) => Err(CutError::EndlessParts { limit }),
                    Ok(cut) => Ok(cut),
                }
            }
            framing => self.cutter.next(chunk, at, &mut Native { framing, limits }, &mut room, buffers, now),
        };
        cut.map_err(|error| match error {
            CutError::Rule(FramingError::HeaderTooLong { .. }) => CloseReason::EndlessHeader,
            CutError::Rule(_) => CloseReason::MalformedFrame,
            CutError::Oversized { .. } => CloseReason::OversizedMessage,
            CutError::EndlessHeader { .. } => CloseReason::EndlessHeader,
            CutError::EndlessParts { .. } => CloseReason::EndlessFragments,
        })
    }

    /// No message is unfinished: the pass that one was read with goes to another connection, unless the message waits for
    /// room.
    pub(super) fn message_ends(&mut self, env: &mut Env) {
        if self.memory == Memory::Pass && !self.keeps_message() {
            self.memory = Memory::Enough;
            env.budget.return_pass();
        }
    }

    /// True while it is not read until memory is there. At a message boundary it needs none, though it keeps its place
    /// among those that wait.
    #[inline]
    pub(super) fn waits_for_memory(&self) -> bool {
        self.memory == Memory::Waiting && !self.cutter.is_idle()
    }

    /// The peer as one that keeps an unfinished message and has sent nothing for
    /// [`pressure_timeout_ms`](Limits::pressure_timeout_ms); `None` if it is not silent, or not at fault.
    pub fn silent(&self, env: &Env) -> Option<Silent> {
        let heard = self.cutter.heard()?;
        let is_its_turn = self.closing.is_none() && !self.eof && self.has_none_aside() && !self.is_stalled(env);
        let is_late = heard.after_ms(env.limits.pressure_timeout_ms).is_some_and(|at| env.now >= at);
        let is_stranger = is_its_turn && is_late && self.state().is_stranger;
        (is_its_turn && is_late).then(|| Silent { is_stranger, bytes: self.cutter.charged_bytes() })
    }

    /// Bytes of its peer wait in the socket: it is not silent.
    pub fn note_unread(&mut self, now: Time) {
        self.cutter.note_heard(now);
    }

    /// Ends it because its peer is silent and others wait for the memory.
    pub fn close_silent(&mut self, env: &mut Env) {
        self.close(CloseReason::MemoryLimit, env);
        self.recount(env);
    }

    /// Is not read until there is memory again, or a pass for it.
    pub(super) fn wait_for_memory(&mut self, env: &mut Env) {
        if self.memory == Memory::Enough && self.closing.is_none() {
            self.memory = Memory::Waiting;
            self.aside_mut(env).unread_since = env.now;
            env.stats.memory_waits.add(1);
            env.budget.wait(self.key, self.state().is_stranger, &env.limits);
        }
    }

    /// Puts a chunk aside, behind those that wait already.
    pub(super) fn stall(&mut self, chunk: Chunk, env: &mut Env) {
        let chunk = chunk.into_kept();
        env.budget.add_input(chunk.memory_bytes());
        self.aside_mut(env).chunks.push_back(chunk);
        // Reading stops long before, and an engine that stops has no more on its way than its slots.
        let on_its_way_max = env.pool.slots() as usize * Buffers::capacity_for(env.pool.slot_bytes());
        if env.budget.input_bytes() > env.limits.assembly_bytes_max.saturating_mul(2).saturating_add(on_its_way_max) {
            self.close(CloseReason::MemoryLimit, env);
        }
    }

    /// Keeps a message until there is room for its reply.
    pub(super) fn keep_message(&mut self, message: Chunk, env: &mut Env) {
        let message = message.into_kept();
        env.budget.add_input(message.memory_bytes());
        let aside = self.aside_mut(env);
        (aside.message, aside.is_queued) = (Some(message), true);
    }

    /// Has this wait for a later turn, in front of what was put aside before.
    #[inline(never)]
    fn give_way(&mut self, rest: Chunk, env: &mut Env) {
        self.put_aside_front(rest, env);
        self.aside_mut(env).gave_way = true;
        env.shares.give_way(self.key);
    }

    fn put_aside_front(&mut self, rest: Chunk, env: &mut Env) {
        let rest = rest.into_kept();
        env.budget.add_input(rest.memory_bytes());
        self.aside_mut(env).chunks.push_front(rest);
    }

    /// True while a message waits for room for its reply.
    #[inline]
    pub(super) fn keeps_message(&self) -> bool {
        self.aside.as_ref().is_some_and(|aside| aside.message.is_some())
    }

    /// True while what was put aside waits for a later turn.
    fn gave_way(&self) -> bool {
        self.aside.as_ref().is_some_and(|aside| aside.gave_way)
    }

    /// True if nothing was put aside.
    #[inline]
    pub(super) fn has_none_aside(&self) -> bool {
        self.aside.as_ref().is_none_or(|aside| aside.chunks.is_empty() && aside.message.is_none())
    }

    pub(super) fn aside_mut(&mut self, env: &mut Env) -> &mut Aside {
        self.aside.get_or_insert_with(|| env.spare_asides.take())
    }

    /// Gives the room for chunks back, if there are none and the connection is read as ever.
    pub(super) fn leave_aside(&mut self, env: &mut Env) {
        if self.memory == Memory::Enough
            && let Some(mut aside) = self.aside.take_if(|aside| aside.chunks.is_empty() && aside.message.is_none())
            && aside.chunks.capacity() <= KEEP_MAX
        {
            *aside = Aside { chunks: mem::take(&mut aside.chunks), ..Aside::default() };
            env.spare_asides.give(aside);
        }
    }

    /// Forgets all input, and gives its memory back.
    pub(super) fn reset_input(&mut self, env: &mut Env) {
        self.cutter.reset(&mut self.memory.room(env));
        for chunk in
            self.aside.iter_mut().flat_map(|aside| aside.message.take().into_iter().chain(aside.chunks.drain(..)))
        {
            env.budget.remove_input(chunk.memory_bytes());
        }
        self.message_ends(env);
        self.leave_aside(env);
    }

    /// Goes on with what was put aside, as far as replies have room again.
    pub(super) fn resume(&mut self, was_stalled: bool, env: &mut Env) {
        self.recount(env);
        if was_stalled && !self.is_stalled(env) {
            // The rest of a message could not come while the peer was not read: its time begins now.
            self.cutter.restart(env.now);
            self.watch_pass(env.now);
        }
        self.take_up(env);
    }

    pub(super) fn take_up(&mut self, env: &mut Env) {
        // Most often nothing was put aside, and the rest need not be asked.
        while !self.has_none_aside() && self.closing.is_none() && !self.gave_way() && !self.is_stalled(env) {
            if let Some(message) = self.aside.as_mut().and_then(|aside| aside.message.take()) {
                env.budget.remove_input(message.memory_bytes());
                match self.admits(&message, env) {
                    true => self.call(&message, Some((&message, 0)), env),
                    false => self.keep_message(message, env),
                }
                self.recount(env);
                if self.cutter.is_idle() {
                    self.message_ends(env);
                }
                continue;
            }
            let Some(chunk) = self.aside.as_mut().and_then(|aside| aside.chunks.pop_front()) else { break };
            env.budget.remove_input(chunk.memory_bytes());
            self.process(chunk, env);
        }
        if self.aside.is_some() {
            self.leave_aside(env);
        }
        if self.eof {
            self.finish_input(env);
        }
    }

    pub(super) fn finish_input(&mut self, env: &mut Env) {
        if self.closing.is_none() && self.has_none_aside() {
            let whole = self.is_between_messages();
            self.close(if whole { CloseReason::PeerClosed } else { CloseReason::PeerClosedMidMessage }, env);
            if self.exchange.open {
                self.upstream(Upstream::ClientEnded, env);
            }
        }
    }
}

/// The rule of a service that cuts the stream itself.
struct Own<'a> {
    info: &'a ServiceInfo,
    session: &'a mut dyn Session,
    limits: &'a Limits,
    header_bytes_max: usize,
}

impl Rule for Own<'_> {
    /// `None`: the service panicked.
    type Error = Option<FramingError>;

    fn front(&mut self, buf: &[u8], scanned: usize) -> Result<Frame, Option<FramingError>> {
        let cut = self.info.guard(|| self.session.cut(buf, scanned, self.limits));
        cut.map_err(|_| None)?.map_err(Some)
    }

    fn message_bytes_max(&self) -> usize {
        self.limits.message_bytes_max
    }

    fn header_bytes_max(&self) -> usize {
        self.header_bytes_max
    }

    fn look_bytes_max(&self) -> usize {
        // What is there in full may be longer than what is put together: a piece of a long body.
        usize::MAX
    }

    fn parts_max(&self) -> u32 {
        self.limits.fragments_max
    }

    fn cuts_pieces(&self) -> bool {
        true
    }
}
