//! Replies that come later, from another thread.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffers::Buffer;
use crate::env::Env;
use crate::files::{Begun, NoFileReplies};
use crate::limits::ServerLimits;
use crate::listener::DatagramPeer;
use crate::logged::{Mode, Unlogged};
use crate::output::{Output, Spares};
use crate::pool::Chunk;
use crate::service::{ConnKey, Pieces};

mod queue;
mod sync;

use queue::Queue;
use sync::Event;

/// The right, and the duty, to answer one message. Dropping it without an answer (a panicked task) closes the
/// connection with a counted reason: a request that was read is never forgotten.
///
/// The mode `M` is that of the reply it was made from. One of a [`Logged`](crate::logged::Logged) service can be resumed, or need no
/// reply; it cannot be answered past the gate.
#[derive(Debug)]
pub struct Deferred<M: Mode = Unlogged> {
    route: Route,
    target: Target,
    answered: bool,
    mode: PhantomData<M>,
}

/// The way an answer takes.
#[derive(Debug)]
enum Route {
    Shard(Arc<Mailbox>),
    Elsewhere(Arc<dyn Answers>),
}

/// Takes deferred answers to messages that no shard gave to the service. It is called by the code that answers, on its thread.
pub trait Answers: fmt::Debug + Send + Sync {
    /// An answer; each message gets as many as it deferred.
    fn answer(&self, delivery: Delivery);
}

impl Deferred {
    /// Answers with this body; header and trailer of the framing are added.
    pub fn reply(mut self, body: Vec<u8>) {
        self.answer(Answer::Bytes(body));
    }

    /// Answers with bytes that lie in a slot.
    pub fn reply_chunk(mut self, body: Chunk) {
        self.answer(Answer::Chunk(body));
    }

    /// Answers with the bytes that are filled in a buffer, without copying them if they are many. The buffer goes back to
    /// its class when they are sent.
    pub fn reply_buffer(mut self, body: Buffer) {
        self.answer(Answer::Chunk(Chunk::from_buffer(body)));
    }

    /// Answers in three parts: [`Reply::parts`](crate::Reply::parts).
    pub fn reply_parts(mut self, head: Vec<u8>, body: Chunk, end: &'static [u8]) {
        self.answer(Answer::Parts(head, body, end));
    }

    /// Answers with the pieces that `write` adds: [`Reply::pieces`](crate::Reply::pieces).
    ///
    /// # Errors
    ///
    /// `write` failed, because a range of a file was among the pieces and cannot be sent here. The answer is still owed.
    pub fn reply_pieces(
        mut self,
        write: impl FnOnce(&mut Pieces<'_>) -> Result<(), NoFileReplies>,
    ) -> Result<(), Self> {
        let mut spares = match &self.route {
            Route::Shard(mailbox) => std::mem::take(&mut *mailbox.spares()),
            Route::Elsewhere(_) => Spares::default(),
        };
        let collected = self.collect(&mut spares, write);
        if let Route::Shard(mailbox) = &self.route {
            mailbox.spares().add(spares);
            mailbox.spares_taken.store(true, Ordering::Relaxed);
        }
        match collected {
            Ok(answer) => {
                self.answer(answer);
                Ok(())
            }
            Err(NoFileReplies) => Err(self),
        }
    }

    /// An answer of the pieces that `write` adds.
    pub(crate) fn collect(
        &self,
        spares: &mut Spares,
        write: impl FnOnce(&mut Pieces<'_>) -> Result<(), NoFileReplies>,
    ) -> Result<Answer, NoFileReplies> {
        let takes_files = matches!((&self.route, self.target), (Route::Shard(_), Target::Stream { .. }));
        let mut output = Output::default();
        write(&mut Pieces::stream(&mut output, spares, takes_files))?;
        Ok(Answer::Pieces(output))
    }
}

impl<M: Mode> Deferred<M> {
    pub(crate) fn new(env: &Env, target: Target) -> Self {
        let route = match &env.answers {
            Some(answers) => Route::Elsewhere(Arc::clone(answers)),
            None => Route::Shard(Arc::clone(&env.mailbox)),
        };
        Self { route, target, answered: false, mode: PhantomData }
    }

    /// Lets the message be without an answer: it needs none.
    pub fn no_reply(mut self) {
        self.answer(Answer::Nothing);
    }

    /// Goes on with the message on its connection, on the shard's thread: the service's
    /// [`resume`](crate::Service::resume) is called with `state`, and its reply takes the message's place. Where a
    /// message did not come from a shard, or is a datagram, there is no way back: the message counts as abandoned.
    pub fn resume(mut self, state: impl Any + Send) {
        self.answer(Answer::Resume(Box::new(state)));
    }

    fn answer(&mut self, answer: Answer) {
        self.answered = true;
        match (&self.route, self.target) {
            (Route::Elsewhere(answers), Target::Stream { key, ticket, work_bytes }) => {
                answers.answer(Delivery { key, ticket, work_bytes, answer });
            }
            (Route::Shard(mailbox), target) => mailbox.post(Mail::Answer { target, answer }),
            // Only streams are served outside of shards.
            (Route::Elsewhere(_), Target::Datagram { .. }) => {}
        }
    }

    /// Answers, if this shard gave the message to the service: the caller delivers the answer itself. Else the answer
    /// takes its usual way.
    pub(crate) fn answer_here(mut self, mailbox: &Arc<Mailbox>, answer: Answer) -> Option<Mail> {
        if let Route::Shard(own) = &self.route
            && Arc::ptr_eq(own, mailbox)
        {
            self.answered = true;
            return Some(Mail::Answer { target: self.target, answer });
        }
        self.answer(answer);
        None
    }
}

impl<M: Mode> Drop for Deferred<M> {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(Answer::Abandoned);
        }
    }
}

/// The peer that a deferred reply is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// `work_bytes`: what the connection counts for the message until this answer comes.
    Stream { key: ConnKey, ticket: u64, work_bytes: usize },
    /// `work_bytes`: the same for the socket.
    Datagram { socket: u32, peer: DatagramPeer, work_bytes: usize },
}

/// What came of a deferred message.
#[derive(Debug)]
pub enum Answer {
    /// A reply with this body.
    Bytes(Vec<u8>),
    /// A reply with a body in a slot.
    Chunk(Chunk),
    /// A reply of three parts.
    Parts(Vec<u8>, Chunk, &'static [u8]),
    /// A reply of any number of pieces.
    Pieces(Output),
    /// The service goes on with it, on its connection.
    Resume(Box<dyn Any + Send>),
    /// It needs no reply.
    Nothing,
    /// The right to answer was dropped: the connection must end.
    Abandoned,
}

impl Answer {
    /// Bytes of its reply, as far as they are known before the service goes on with it.
    pub fn reply_bytes(&self) -> usize {
        match self {
            Self::Bytes(body) => body.len(),
            Self::Chunk(body) => body.len(),
            Self::Parts(head, body, end) => head.len() + body.len() + end.len(),
            Self::Pieces(body) => body.len(),
            Self::Resume(_) | Self::Nothing | Self::Abandoned => 0,
        }
    }
}

/// A deferred answer on its way to the connection it is for.
#[derive(Debug)]
pub struct Delivery {
    pub(crate) key: ConnKey,
    pub(crate) ticket: u64,
    pub(crate) work_bytes: usize,
    pub(crate) answer: Answer,
}

impl Delivery {
    /// The connection it is for, which may have ended meanwhile.
    pub fn key(&self) -> ConnKey {
        self.key
    }

    /// What was counted for this answer when the message was deferred.
    pub fn work_bytes(&self) -> usize {
        self.work_bytes
    }

    /// The number the message was given, and the answer.
    pub fn into_answer(self) -> (u64, Answer) {
        (self.ticket, self.answer)
    }
}

/// What other threads tell a shard.
#[derive(Debug)]
pub(crate) enum Mail {
    Answer {
        target: Target,
        answer: Answer,
    },
    /// The service ends a connection.
    Close(ConnKey),
    /// An operation on a file that a thread carried out.
    File(Box<Begun>),
    Limits(Box<ServerLimits>),
    /// A log was released that replies on this shard wait for.
    Released,
    /// The services of the shard get a turn end.
    Wake,
    Drain,
    Stop,
}

/// The shard's mailbox: other threads post, an event descriptor wakes the shard.
#[derive(Debug)]
pub struct Mailbox {
    queue: Queue<Mail>,
    /// Buffers for threads that answer in pieces. A thread takes all of them for the time that it needs; another one makes
    /// its own meanwhile.
    spares: Mutex<Spares>,
    /// Some were taken since the shard put some in.
    spares_taken: AtomicBool,
}

impl Mailbox {
    /// An empty box.
    pub fn new() -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            queue: Queue::new(Event::new()?),
            spares: Mutex::default(),
            spares_taken: AtomicBool::new(false),
        }))
    }

    fn spares(&self) -> MutexGuard<'_, Spares> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back what answers in pieces took along, out of the shard's own spares: there their buffers go once they are
    /// sent.
    pub(crate) fn refill_spares(&self, from: &mut Spares) {
        // Nothing else hangs on the flag, and answers of the shard's own thread take no lock.
        if self.spares_taken.load(Ordering::Relaxed) {
            self.spares_taken.store(false, Ordering::Relaxed);
            self.spares().refill(from);
        }
    }

    pub(crate) fn post(&self, mail: Mail) {
        self.queue.push(mail);
    }

    /// True if there is something to take, or soon will be.
    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.queue.has_items()
    }

    /// Moves all mail into `into`. `woken`: the box was reported as readable, and must not be reported again for what
    /// is taken now.
    pub(crate) fn take(&self, woken: bool, into: &mut Vec<Mail>) {
        self.queue.take(woken, into);
    }

    /// Takes the answers for streams that wait, in the order they were posted, for
    /// [`Connection::deliver`](crate::connection::Connection::deliver). For code that drives connections without a shard
    /// (simulators, tests); other mail is thrown away.
    pub fn take_deliveries(&self) -> Vec<Delivery> {
        let mut deliveries = Vec::new();
        self.take_deliveries_into(&mut deliveries);
        deliveries
    }

    /// The same, appended to `deliveries`.
    pub fn take_deliveries_into(&self, deliveries: &mut Vec<Delivery>) {
        self.queue.drain(|mail| deliveries.extend(delivery(mail)));
    }
}

/// The answer for a stream in a piece of mail.
pub(crate) fn delivery(mail: Mail) -> Option<Delivery> {
    match mail {
        Mail::Answer { target: Target::Stream { key, ticket, work_bytes }, answer } => {
            Some(Delivery { key, ticket, work_bytes, answer })
        }
        _ => None,
    }
}

impl AsFd for Mailbox {
    /// Readable while there may be mail.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.event().as_fd()
    }
}
