//! The service under simulation: does what requests say, and leaves deferred answers to the world.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ksf::deferred::Deferred;
use ksf::framing::{Framing, LengthPrefix};
use ksf::pool::Chunk;
use ksf::{Message, Order, Peer, Refused, Reply, Service};

use crate::ideal::{encode, payload};
use crate::script::{Action, Request};

/// An answer that "another thread" will give.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) deferred: Deferred,
    pub(crate) answer: Late,
}

#[derive(Debug)]
pub(crate) enum Late {
    Bytes(Vec<u8>),
    Chunk(Chunk),
    Nothing,
    Forgotten,
}

impl Pending {
    /// Gives the answer: it is in the letter box now.
    pub(crate) fn answer(self) {
        match self.answer {
            Late::Bytes(body) => self.deferred.reply(body),
            Late::Chunk(body) => self.deferred.reply_chunk(body),
            Late::Nothing => self.deferred.no_reply(),
            Late::Forgotten => drop(self.deferred),
        }
    }
}

/// Messages handed over on one connection; shared with the world, which compares them with what the peer sent.
pub(crate) type Handed = Arc<Mutex<Vec<Vec<u8>>>>;

pub(crate) struct Scripted {
    pub(crate) framing: Framing,
    pub(crate) order: Order,
    pub(crate) keeps: bool,
    /// The record of the connection that is accepted next.
    pub(crate) next: Mutex<Handed>,
    pub(crate) pending: Mutex<Vec<Pending>>,
    /// Connections accepted and not closed yet.
    pub(crate) open: Mutex<usize>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scripted {
    /// A reply body as the service must write it: with the header, where the framing leaves that to the service.
    fn wire(&self, body: Vec<u8>) -> Vec<u8> {
        match self.framing {
            Framing::LengthPrefix(LengthPrefix { strip: false, .. }) => encode(self.framing, &body, &[]),
            _ => body,
        }
    }
}

impl Service for Scripted {
    type Conn = Handed;

    fn name(&self) -> &str {
        "scripted"
    }

    fn framing(&self) -> Framing {
        self.framing
    }

    fn order(&self) -> Order {
        self.order
    }

    fn keeps_messages(&self) -> bool {
        self.keeps
    }

    fn accept(&self, _: &Peer) -> Result<Handed, Refused> {
        *lock(&self.open) += 1;
        Ok(Arc::clone(&lock(&self.next)))
    }

    fn call(&self, handed: &mut Handed, message: &Message<'_>, reply: &mut Reply<'_>) {
        lock(handed).push(message.bytes().to_vec());
        // Garbage that happens to be framed is not answered.
        let Some(request) = Request::from_text(payload(self.framing, message.bytes())) else { return };
        match request.action {
            Action::Reflect => reply.chunk(message.keep()),
            _ => {
                for body in request.prompt_replies() {
                    reply.bytes(&self.wire(body));
                }
            }
        }
        let answers = match request.action {
            Action::ReflectLater => vec![Late::Chunk(message.keep())],
            Action::LaterQuiet => vec![Late::Nothing],
            Action::Abandon => vec![Late::Forgotten],
            _ => request.late_replies().into_iter().map(|body| Late::Bytes(self.wire(body))).collect(),
        };
        let mut pending = lock(&self.pending);
        pending.extend(answers.into_iter().map(|answer| Pending { deferred: reply.defer(), answer }));
        if request.action == Action::Close {
            reply.close();
        }
    }

    fn close(&self, _: Handed) {
        *lock(&self.open) -= 1;
    }
}
