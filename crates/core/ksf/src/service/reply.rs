//! What a service says to a message: replies now or later, tasks, an exchange, the end of the connection.

use std::marker::PhantomData;
use std::net::SocketAddr;

use crate::datagram_output::DatagramOutput;
use crate::deferred::{Answer, Deferred, Target};
use crate::env::Env;
use crate::files::{FileRange, NoFileReplies};
use crate::framing::Framing;
use crate::gates::{Gate, GateSet};
use crate::limits::Limits;
use crate::listener::DatagramPeer;
use crate::logged::{After, Logged, Mode, Named, Sends, Unlogged};
use crate::outgoing::{Exchange, ExchangeFull, ExchangeRequest, ExchangeWork, HangUp, NoOutgoing};
use crate::output::{Output, ReplyStart};
use crate::pool::Chunk;
use crate::service::{Pieces, SessionState};
use crate::session::Session;
use crate::tasks::Task;

/// Where the replies to one message go. The mode `M` says whether a reply must name the log that it waits for: [`crate::logged`].
pub struct Reply<'a, M: Mode = Unlogged> {
    sink: Sink<'a>,
    pub(crate) env: &'a mut Env,
    pub(crate) said: &'a mut Said,
    mode: PhantomData<M>,
}

/// What a call knows of its message, and what the service said to it apart from the bytes of its replies.
pub(crate) struct Said {
    framing: Framing,
    target: Target,
    /// Bytes of the message, until they are counted as work.
    message_bytes: usize,
    /// What a deferred reply is assumed to need, where the service does not say it.
    pub(crate) expected_bytes: usize,
    /// What was counted as work.
    pub(crate) work_bytes: usize,
    /// What is on its way to the other end of the exchange, and beyond how much no more is taken.
    pub(crate) passing_bytes: usize,
    pub(crate) passing_bytes_max: usize,
    /// What the service keeps of the peer already, and whose limits hold.
    pub(crate) session_bytes: usize,
    pub(crate) listener: u32,
    /// Answers the message is still owed.
    pub(crate) deferred: u32,
    /// What must be durable before the replies may leave.
    pub(crate) gates: GateSet,
    /// A task was given to the threads that may block.
    pub(crate) blocks: bool,
    pub(crate) close: bool,
    /// The close need not wait for the peer.
    pub(crate) at_once: bool,
    pub(crate) exchange: Exchange,
}

impl Said {
    /// Nothing yet, to a message of `message_bytes` bytes that is answered at `target`.
    pub(crate) fn new(framing: Framing, target: Target, message_bytes: usize) -> Self {
        Self {
            framing,
            target,
            message_bytes,
            expected_bytes: EXPECTED_REPLY_BYTES,
            work_bytes: 0,
            passing_bytes: 0,
            passing_bytes_max: usize::MAX,
            session_bytes: 0,
            listener: u32::MAX,
            deferred: 0,
            gates: GateSet::default(),
            blocks: false,
            close: false,
            at_once: false,
            exchange: Exchange::default(),
        }
    }
}

pub(crate) enum Sink<'a> {
    Stream(&'a mut Output),
    Datagrams(&'a mut DatagramOutput, DatagramPeer),
}

/// Appends one reply with its framing. False: it cannot be framed, and `tail` is as before.
// Always: with what it writes known, it is a few stores; as a call it was a third of the cost of a small reply.
#[inline(always)]
fn append_framed<R>(framing: &Framing, tail: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> R) -> (R, bool) {
    let start = tail.len();
    framing.begin_reply(tail);
    let result = write(tail);
    let fits = framing.finish_reply(tail, start, 0).is_ok();
    if fits {
        tail.extend_from_slice(framing.reply_trailer());
    } else {
        tail.truncate(start);
    }
    (result, fits)
}

fn note_framed<R>((result, fits): (R, bool), env: &Env, close: &mut bool) -> R {
    if fits {
        env.stats.replies.add(1);
    } else {
        env.stats.replies_unframable.add(1);
        *close = true;
    }
    result
}

/// Announces the bytes of a reply that began at `start`, when `before` bytes were in the output.
fn finish_pieces(framing: &Framing, output: &mut Output, start: ReplyStart, before: usize) -> bool {
    if framing.reply_header_bytes() == 0 {
        return true;
    }
    let bytes = output.len() - before;
    let (buffer, at) = output.reply_head(start);
    let beyond = bytes - (buffer.len() - at);
    framing.finish_reply(buffer, at, beyond).is_ok()
}

/// Replies below this length are copied even where they could be sent from their slot: that is faster, and frees it.
pub(crate) const COPY_BYTES_MAX: usize = 2048;

/// What a deferred reply is assumed to need before a connection has seen one.
pub const EXPECTED_REPLY_BYTES: usize = 4096;

impl<'a> Reply<'a> {
    pub(crate) fn new(sink: Sink<'a>, env: &'a mut Env, said: &'a mut Said) -> Self {
        Self { sink, env, said, mode: PhantomData }
    }
}

impl<'a, M: Mode> Reply<'a, M> {
    /// The same reply in another mode: that of the service, whose type is known again.
    pub(crate) fn to<N: Mode>(&mut self) -> Reply<'_, N> {
        let sink = match &mut self.sink {
            Sink::Stream(output) => Sink::Stream(output),
            Sink::Datagrams(output, peer) => Sink::Datagrams(output, *peer),
        };
        Reply { sink, env: self.env, said: self.said, mode: PhantomData }
    }

    fn into_mode<N: Mode>(self) -> Reply<'a, N> {
        let Self { sink, env, said, .. } = self;
        Reply { sink, env, said, mode: PhantomData }
    }

    /// The same reply, for code that takes one by value.
    pub fn reborrow(&mut self) -> Reply<'_, M> {
        self.to()
    }

    /// For replies that tell of no data, in code for services of any mode: a refusal, an error of the protocol. They wait for no
    /// log but those that were named before.
    pub fn into_plain(self) -> Reply<'a, Named> {
        self.into_mode()
    }
}

impl<'a> Reply<'a, Logged> {
    /// What is sent with the result leaves once `after` is durable, as does everything else that is said to this message. A reply
    /// that saw what several logs wrote names each of them.
    pub fn after(&mut self, after: impl Into<After>) -> Reply<'_, Named> {
        self.reborrow().into_after(after)
    }

    /// [`after`](Self::after), for code that has the reply by value.
    pub fn into_after(self, after: impl Into<After>) -> Reply<'a, Named> {
        if let After::Gate(gate) = after.into() {
            self.said.gates.add(gate);
        }
        self.into_mode()
    }
}

impl<M: Sends> Reply<'_, M> {
    /// Holds the replies to this message until what `gate` names is durable. They are written now and leave when it is
    /// [released](crate::Turn::release); replies behind them wait, too. Several gates must all open.
    ///
    /// Only shards have gates: on workers a service defers instead. Of the replies to datagrams that wait, those beyond
    /// `datagram_queue_max` are dropped.
    pub fn gate(&mut self, gate: Gate) {
        self.said.gates.add(gate);
    }

    /// Sends one reply: `write` appends its body to the buffer (and must not touch what is there already); header
    /// and trailer of the framing are added around it.
    pub fn message<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.message_for(0, write)
    }

    /// The same, for a body of about `bytes` bytes.
    #[inline]
    fn message_for<R>(&mut self, bytes: usize, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        match &mut self.sink {
            Sink::Stream(output) => {
                let framed = append_framed(&self.said.framing, output.tail_for(bytes, &mut self.env.spares), write);
                note_framed(framed, self.env, &mut self.said.close)
            }
            Sink::Datagrams(output, peer) => {
                // A datagram is a message as it is, without framing.
                self.env.stats.replies.add(1);
                output.add(*peer, write)
            }
        }
    }

    /// Sends one reply with this body.
    pub fn bytes(&mut self, body: &[u8]) {
        /// What a framing adds: a header of at most 8 bytes, a delimiter of at most 8.
        const AROUND_BYTES: usize = 16;
        self.message_for(body.len() + AROUND_BYTES, |tail| tail.extend_from_slice(body));
    }

    /// Sends one reply with this body, without copying it if it is long.
    pub fn owned(&mut self, body: Vec<u8>) {
        if body.len() <= COPY_BYTES_MAX || matches!(self.sink, Sink::Datagrams(..)) {
            return self.bytes(&body);
        }
        self.whole(|pieces| pieces.owned(body));
    }

    /// Sends one reply with this body from where it lies, if it is long and its slot may be kept, else copied.
    pub fn chunk(&mut self, body: Chunk) {
        if body.len() <= COPY_BYTES_MAX || matches!(self.sink, Sink::Datagrams(..)) || !body.keep() {
            return self.bytes(&body);
        }
        self.whole(|pieces| pieces.chunk(body));
    }

    /// Sends one reply of three parts: `head` appends the first, as in [`Reply::message`]; `body` leaves from where it lies,
    /// if it is long; `end` follows (padding, for instance).
    pub fn parts(&mut self, head: impl FnOnce(&mut Vec<u8>), body: Chunk, end: &'static [u8]) {
        self.whole(|pieces| {
            pieces.write(head);
            pieces.chunk(body);
            pieces.bytes(end);
        });
    }

    /// Sends one reply of pieces without a range of a file.
    fn whole(&mut self, write: impl FnOnce(&mut Pieces<'_>)) {
        // Only ranges are refused.
        let _ = self.pieces(|pieces| {
            write(pieces);
            Ok(())
        });
    }

    /// Sends one reply of three parts: `head` appends the first, as in [`Reply::message`]; `range` of a file follows, and
    /// then `end`. The shard reads the file while the connection sends, a [window](crate::output::FILE_WINDOW_BYTES) at a
    /// time, and never waits for it. If the file turns out to be shorter than promised, or cannot be read, the connection
    /// is reset and [counted](crate::CloseReason::FileRange); so it is if a part of it does not come within
    /// [`send_timeout_ms`](crate::limits::Limits::send_timeout_ms).
    ///
    /// # Errors
    ///
    /// [`NoFileReplies`]: only shards send files, and only on streams. Nothing was sent.
    pub fn file(
        &mut self,
        head: impl FnOnce(&mut Vec<u8>),
        range: FileRange,
        end: &'static [u8],
    ) -> Result<(), NoFileReplies> {
        self.pieces(|pieces| {
            pieces.write(head);
            pieces.file(range)?;
            pieces.bytes(end);
            Ok(())
        })
    }

    /// Sends one reply of the pieces that `write` adds, in their order: bytes, slots, buffers and ranges of files, of any
    /// number. Their lengths are in the header that the framing puts in front of them. Of a reply with ranges of files the
    /// bytes in between leave as the ranges do: see [`Reply::file`]. In a datagram all of it is copied.
    ///
    /// The number of pieces has no limit of its own: each counts with its bytes, and one of at most 2 KiB that is not a range
    /// of a file is copied to the bytes in front of it.
    ///
    /// # Errors
    ///
    /// What `write` returns, [`NoFileReplies`] of [`Pieces::file`]. Nothing was sent then.
    pub fn pieces(
        &mut self,
        write: impl FnOnce(&mut Pieces<'_>) -> Result<(), NoFileReplies>,
    ) -> Result<(), NoFileReplies> {
        let output = match &mut self.sink {
            Sink::Stream(output) => output,
            Sink::Datagrams(output, peer) => {
                let written = output.add(*peer, |bytes| write(&mut Pieces::copied(bytes)));
                match written {
                    Ok(()) => self.env.stats.replies.add(1),
                    Err(NoFileReplies) => output.drop_last(),
                }
                return written;
            }
        };
        let takes_files = self.env.answers.is_none();
        let before = output.len();
        let mut pieces = Pieces::stream(output, &mut self.env.spares, takes_files);
        pieces.write(|tail| self.said.framing.begin_reply(tail));
        let written = write(&mut pieces);
        let start = pieces.start();
        let fits =
            written.is_ok() && start.is_some_and(|start| finish_pieces(&self.said.framing, output, start, before));
        if fits {
            let trailer = self.said.framing.reply_trailer();
            if !trailer.is_empty() {
                output.tail(&mut self.env.spares).extend_from_slice(trailer);
            }
            self.env.stats.replies.add(1);
        } else {
            output.truncate(before);
            if written.is_ok() {
                self.env.stats.replies_unframable.add(1);
                self.said.close = true;
            }
        }
        written
    }
}

impl Reply<'_> {
    /// Sends what a deferred answer says, or has the service go on with it.
    pub(crate) fn answer(&mut self, answer: Answer, session: &mut dyn Session) -> SessionState {
        match answer {
            Answer::Bytes(body) => self.owned(body),
            Answer::Chunk(chunk) => self.chunk(chunk),
            Answer::Parts(head, body, end) => self.parts(|tail| tail.extend_from_slice(&head), body, end),
            Answer::Pieces(body) => self.collected(body),
            Answer::Resume(state) => return session.resume(state, self),
            Answer::Nothing | Answer::Abandoned => {}
        }
        session.state()
    }

    /// Sends one reply of the pieces that were collected for it.
    fn collected(&mut self, body: Output) {
        // Ranges of files were refused already where there are none.
        if self.pieces(|pieces| pieces.append(body)).is_err() {
            self.said.close = true;
        }
        self.env.mailbox.refill_spares(&mut self.env.spares);
    }
}

impl<M: Mode> Reply<'_, M> {
    /// The limits of the listener as they are now, for services that report them to their clients.
    pub fn limits(&self) -> &Limits {
        self.env.limits.of(self.said.listener)
    }

    /// Bytes that the service may add to the state of this connection now ([`SessionState::bytes`](super::SessionState::bytes)): up to
    /// `connection_bytes_max`, or `message_bytes_max` if that is more, per connection; half of `shard_bytes_max` for all
    /// connections of the shard, and no more than their replies leave of it. The first [`EXPECTED_REPLY_BYTES`] of a connection
    /// need no room.
    pub fn session_room(&self) -> usize {
        let Env { budget, limits, .. } = &*self.env;
        budget.session_room(self.said.session_bytes, limits.of(self.said.listener), limits)
    }

    /// Answers later, from any thread. The message counts as outstanding until then; called several times, until the
    /// last of the answers.
    pub fn defer(&mut self) -> Deferred<M::Later> {
        self.defer_for(self.said.expected_bytes)
    }

    /// The same, for a reply whose length the protocol tells before the work begins, such as the answer to a read. These
    /// bytes are taken off the connection's budget
    /// ([`connection_bytes_max`](crate::limits::Limits::connection_bytes_max)) until the answer comes, so a peer cannot
    /// have more work done than it may have memory for. For a datagram they are taken off the shard's
    /// ([`shard_bytes_max`](crate::limits::Limits::shard_bytes_max)).
    pub fn defer_for(&mut self, reply_bytes: usize) -> Deferred<M::Later> {
        self.said.deferred += 1;
        let work_bytes = std::mem::take(&mut self.said.message_bytes) + reply_bytes;
        self.said.work_bytes += work_bytes;
        let target = match self.said.target {
            Target::Stream { key, ticket, .. } => Target::Stream { key, ticket, work_bytes },
            Target::Datagram { socket, peer, .. } => Target::Datagram { socket, peer, work_bytes },
        };
        Deferred::new(self.env, target)
    }

    /// Runs `task` on a thread that may block, in a file system for instance, and that is bound to no CPU. The task
    /// answers through the [`Deferred`] it is given, with up to `reply_bytes` bytes ([`Reply::defer_for`]).
    ///
    /// The task is never refused. While the queue of these threads is full, a connection that has an answer outstanding
    /// is not read, so that the queue grows by at most one task for each connection. A datagram is dropped then, and
    /// counted (`datagrams_refused_tasks`): its sender asks again. Outside of shards the task runs at once: the thread of
    /// a worker may block.
    pub fn block<T>(&mut self, reply_bytes: usize, task: T)
    where
        T: FnOnce(Deferred<M::Later>) + Send + 'static,
    {
        let Some(tasks) = self.env.tasks.clone() else {
            return task(self.defer_for(reply_bytes));
        };
        if matches!(self.said.target, Target::Datagram { .. }) && tasks.is_full() {
            return self.env.stats.datagrams_refused_tasks.add(1);
        }
        let deferred = self.defer_for(reply_bytes);
        self.said.blocks = true;
        tasks.block(Task::new(move || task(deferred)));
    }

    /// Closes the connection after the replies to this message and to those before it, deferred ones included.
    pub fn close(&mut self) {
        self.said.close = true;
    }

    /// The same, for protocols in which the peer sends nothing behind this message: the socket is closed with the last
    /// reply, without waiting for the peer's end. If more has arrived all the same, this is [`Reply::close`].
    pub fn close_at_once(&mut self) {
        self.said.close = true;
        self.said.at_once = true;
    }

    /// Number of the shard this runs on, below the number of CPUs of the server.
    pub fn shard(&self) -> usize {
        self.env.shard
    }
}

impl<M: Sends> Reply<'_, M> {
    /// Begins an exchange with another server: connects, or takes a kept connection if `reuse` lets it. Ends the one
    /// before. What is passed on before it is connected waits.
    ///
    /// What comes of it is told to [`Service::upstream`](crate::Service::upstream). A service that dials says so by
    /// [`Profile::needs_shards`](crate::Profile::needs_shards): it is then refused at start where this would fail for every
    /// message.
    ///
    /// # Errors
    ///
    /// [`NoOutgoing`]: only shards have outgoing connections, for messages of streams. Nothing was begun.
    pub fn dial(&mut self, to: SocketAddr, reuse: bool) -> Result<(), NoOutgoing> {
        let (Target::Stream { key: from, .. }, None) = (self.said.target, &self.env.answers) else {
            return Err(NoOutgoing);
        };
        self.said.exchange = Exchange { open: true, hold: self.said.exchange.hold, ..Exchange::default() };
        self.env.exchange_work.push(ExchangeWork::Request { from, request: ExchangeRequest::Dial { to, reuse } });
        Ok(())
    }

    /// Passes bytes to the other end of the exchange; lost if there is none. A message is never handed over while the
    /// exchange is full, so all that is passed on for it is taken.
    ///
    /// # Errors
    ///
    /// [`ExchangeFull`] with the bytes, in the calls that come all the same, for what the other end sends and for deferred
    /// answers: too much waits for the other end, which is not read until it takes bytes again; then
    /// [`Upstream::Room`](crate::outgoing::Upstream::Room) is told.
    pub fn pass(&mut self, bytes: Chunk) -> Result<(), ExchangeFull> {
        if let Target::Stream { key: from, .. } = self.said.target
            && self.said.exchange.open
        {
            if self.said.exchange.full || self.said.passing_bytes > self.said.passing_bytes_max {
                self.said.exchange.refused = true;
                return Err(ExchangeFull(bytes));
            }
            self.said.passing_bytes += bytes.len();
            self.env.exchange_work.push(ExchangeWork::Request { from, request: ExchangeRequest::Pass(bytes) });
        }
        Ok(())
    }

    /// Ends the exchange.
    pub fn hang_up(&mut self, how: HangUp) {
        if let Target::Stream { key: from, .. } = self.said.target
            && self.said.exchange.open
        {
            self.said.exchange = Exchange { hold: self.said.exchange.hold, ..Exchange::default() };
            self.env.exchange_work.push(ExchangeWork::Request { from, request: ExchangeRequest::HangUp(how) });
        }
    }

    /// Holds further messages of this connection back, or lets them come again: a request behind one that is with
    /// another server waits. On shards only, see [`Profile::needs_shards`](crate::Profile::needs_shards).
    pub fn hold(&mut self, hold: bool) {
        self.said.exchange.hold = hold;
    }
}
