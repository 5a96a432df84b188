//! Answers that come later, from any thread.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use ksf::Service;
use ksf::deferred::{Answer, Answers, Delivery};
use ksf::error::CloseReason;
use ksf::framing::Framing;
use ksf::output::{Output, Spares};
use ksf::pool::Chunk;

use super::link::{End, Link, Reading};
use super::{Shared, lock};

/// Where answers arrive that were deferred.
pub(super) struct Desk<S: Service> {
    shared: OnceLock<Weak<Shared<S>>>,
    next_ticket: AtomicU64,
    due: Mutex<HashMap<u64, Due<S>>>,
    /// Messages the service panicked with: answers to them are thrown away.
    dead: Mutex<HashSet<u64>>,
}

/// A message that is owed answers. It keeps no connection open: one that ended needs none.
struct Due<S: Service> {
    link: Option<Weak<Link<S>>>,
    /// Answers to come.
    answers: usize,
    /// Answers that came before the service returned.
    early: Vec<Answer>,
    close: bool,
}

impl<S: Service> Default for Desk<S> {
    fn default() -> Self {
        Self { shared: OnceLock::new(), next_ticket: AtomicU64::new(0), due: Mutex::default(), dead: Mutex::default() }
    }
}

impl<S: Service> Desk<S> {
    /// Says who sends the answers, once.
    pub(super) fn belongs_to(&self, shared: &Arc<Shared<S>>) {
        let _ = self.shared.set(Arc::downgrade(shared));
    }

    pub(super) fn ticket(&self) -> u64 {
        self.next_ticket.fetch_add(1, Ordering::Relaxed)
    }

    /// The service returned, and `answers` to the message are to come or came already. The link counts it as pending.
    pub(super) fn expect(&self, ticket: u64, link: &Arc<Link<S>>, answers: u32, close: bool) {
        let mut due = lock(&self.due);
        let entry = due.entry(ticket).or_insert_with(Due::new);
        entry.link = Some(Arc::downgrade(link));
        entry.answers = answers as usize;
        entry.close = close;
        let early = std::mem::take(&mut entry.early);
        drop(due);
        if !early.is_empty() {
            self.deliver(ticket, early);
        }
    }

    /// The service panicked with the message.
    pub(super) fn forget(&self, ticket: u64) {
        lock(&self.dead).insert(ticket);
        lock(&self.due).remove(&ticket);
    }

    pub(super) fn clear(&self) {
        lock(&self.due).clear();
    }

    fn deliver(&self, ticket: u64, answers: Vec<Answer>) {
        let mut due = lock(&self.due);
        let Some(entry) = due.get_mut(&ticket) else { return };
        let Some(link) = entry.link.clone() else {
            entry.early.extend(answers);
            return;
        };
        entry.answers = entry.answers.saturating_sub(answers.len());
        let (is_last, close) = (entry.answers == 0, entry.close);
        if is_last {
            due.remove(&ticket);
        }
        drop(due);
        let shared = self.shared.get().and_then(Weak::upgrade);
        let (Some(shared), Some(link)) = (shared, link.upgrade()) else { return };
        let framing = shared.service.framing();
        for answer in answers {
            let framed = match answer {
                Answer::Bytes(body) => framed(&framing, Chunk::from_vec(body)),
                Answer::Chunk(body) => framed(&framing, body),
                Answer::Nothing => Ok(Output::default()),
                Answer::Abandoned => Err(CloseReason::Abandoned),
            };
            match framed {
                Ok(output) => shared.send(&link, output),
                Err(reason) => shared.end(&link, End { reason, reading: Reading::Stopped }),
            }
        }
        if is_last {
            link.pending.fetch_sub(1, Ordering::SeqCst);
            if close {
                shared.end(&link, End { reason: CloseReason::Service, reading: Reading::Stopped });
            }
            shared.resume(&link);
        }
    }
}

impl<S: Service> Due<S> {
    fn new() -> Self {
        Self { link: None, answers: 0, early: Vec::new(), close: false }
    }
}

impl<S: Service> Answers for Desk<S> {
    fn answer(&self, delivery: Delivery) {
        let (ticket, answer) = delivery.into_answer();
        if lock(&self.dead).contains(&ticket) {
            return;
        }
        lock(&self.due).entry(ticket).or_insert_with(Due::new);
        self.deliver(ticket, vec![answer]);
    }
}

impl<S: Service> std::fmt::Debug for Desk<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("due", &lock(&self.due).len()).finish_non_exhaustive()
    }
}

/// A reply with the header and the trailer of its framing.
fn framed(framing: &Framing, body: Chunk) -> Result<Output, CloseReason> {
    let mut spares = Spares::default();
    let mut output = Output::default();
    let tail = output.tail(&mut spares);
    tail.resize(framing.reply_header_bytes(), 0);
    // The length field is too narrow for it.
    framing.finish_reply(tail, 0, body.len()).map_err(|_| CloseReason::Service)?;
    output.push_chunk(body, &mut spares);
    output.tail(&mut spares).extend_from_slice(framing.reply_trailer());
    Ok(output)
}
