//! A service of the framework on the multiplexor: shards accept, workers answer.
//!
//! On a shard a message that takes long holds up every connection of its core. Here any worker takes the next message of
//! any connection, so a service may block, and one busy connection can occupy all workers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ksf::adopt::{self, Adopted, Adopter, Place};
use ksf::deferred::{Answer, Answers, Delivery};
use ksf::env::Env;
use ksf::error::CloseReason;
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::{CallOutcome, EXPECTED_REPLY_BYTES, call_outside};
use ksf::stats::Stats;
use ksf::threads;
use ksf::{Order, Peer, Profile, WorkerService};

use crate::batch::MessageBatch;
use crate::connection::{Admission, Attachment, Connection};
use crate::error::{ConnectionError, RecvError, StartError};
use crate::lease::Grant;
use crate::mux::{HELD_BYTES_MAX, Mux};
use crate::options::{Classify, MuxOptions};
use crate::scheduler::{Source as _, Taken};
use crate::socket::{InPlaceBatch, Message, MessageSocket, Replies};
use crate::sync::Arc;

/// How a service is run by workers.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct WorkersOptions {
    /// Worker threads; at least one. They run where the thread may run that starts them.
    pub workers: usize,
    /// Limits of the framework, as far as they concern streams.
    pub limits: ksf::limits::Limits,
    /// See [`MuxOptions::classify`].
    pub classify: Option<Arc<Classify>>,
    /// See [`MuxOptions::class_caps`].
    pub class_caps: Vec<usize>,
}

impl WorkersOptions {
    /// So many workers, without capped classes.
    pub fn new(workers: usize, limits: ksf::limits::Limits) -> Self {
        Self { workers, limits, ..Self::default() }
    }
}

/// Workers that answer the messages of a service. They end when this is dropped.
pub struct Workers<S: WorkerService> {
    service: Arc<S>,
    mux: Mux,
    pending: Arc<PendingReplies>,
    /// One set per worker, written by it alone.
    stats: Vec<Arc<Stats>>,
    closes: Arc<Closes>,
    order: Order,
    sockets: Vec<Arc<MessageSocket>>,
    threads: Mutex<Vec<WorkerThread>>,
}

struct WorkerThread {
    /// It may be in a call of the service.
    works: Arc<AtomicBool>,
    handle: JoinHandle<()>,
}

/// Messages whose answers come later.
#[derive(Debug)]
struct PendingReplies {
    by_ticket: Mutex<HashMap<u64, PendingReply>>,
    /// The message each worker called the service with last; 0 after a panic. Answers that come before the service
    /// returned are for these, or they are thrown away.
    calls: Vec<AtomicU64>,
}

/// Bits of a ticket that count the messages of one worker; above them is the worker's number, so no two come to the same.
const TICKET_BITS: u32 = 48;

#[derive(Default)]
struct PendingReply {
    /// Held until the last answer: the next message of a connection that keeps its order waits for that.
    message: Option<Message>,
    /// Answers to come.
    answers: usize,
    /// Answers that came before the message was put here.
    early: Vec<Late>,
    close: bool,
}

/// An answer that came later, and what was counted for it.
struct Late {
    answer: Answer,
    work_bytes: usize,
}

impl std::fmt::Debug for PendingReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingReply")
            .field("message", &self.message)
            .field("answers", &self.answers)
            .finish_non_exhaustive()
    }
}

/// Connections closed, by reason.
#[derive(Debug)]
struct Closes([AtomicU64; CloseReason::ALL.len()]);

/// What a service knows of one connection.
struct Served<S: WorkerService> {
    service: Arc<S>,
    /// As many as there are workers where the service can be called for one connection on several at once, else one.
    states: Mutex<Vec<S::Conn>>,
    peer: Peer,
    closes: Arc<Closes>,
    _place: Place,
}

impl<S: WorkerService> Drop for Served<S> {
    fn drop(&mut self) {
        for state in lock(&self.states).drain(..) {
            // A panic has printed its message; the connection has ended already.
            let _ = catch_unwind(AssertUnwindSafe(|| self.service.close(&mut (), state)));
        }
    }
}

impl<S: WorkerService> Workers<S> {
    /// Starts the workers.
    ///
    /// # Errors
    ///
    /// [`StartError::OnShardsOnly`] for a service that no worker can serve: one that cuts its streams itself, or dials out.
    pub fn start(service: Arc<S>, options: WorkersOptions) -> Result<Arc<Self>, StartError> {
        let (this, workers) = Self::without_threads(service, options)?;
        for (number, (socket, mut worker)) in workers.into_iter().enumerate() {
            let name = format!("ksf-worker-{number}");
            let works = Arc::new(AtomicBool::new(false));
            let its_works = Arc::clone(&works);
            let handle = threads::start(name, move || {
                loop {
                    match socket.recv_in_place() {
                        Ok(batch) => {
                            works.store(true, Ordering::SeqCst);
                            worker.work(&socket, &batch);
                            works.store(false, Ordering::SeqCst);
                        }
                        Err(RecvError::Stopped) => return,
                        // Waiting for events cannot fail but for want of memory: try again.
                        Err(_) => thread::yield_now(),
                    }
                }
            });
            lock(&this.threads).push(WorkerThread { works: its_works, handle: handle? });
        }
        Ok(Arc::new(this))
    }

    /// The same without their threads.
    fn without_threads(service: Arc<S>, options: WorkersOptions) -> Result<(Self, Vec<Seat<S>>), StartError> {
        adopt::check(&*service)?;
        let count = options.workers.max(1);
        let Profile { order, framing, .. } = service.profile();
        let mut of_mux = MuxOptions::new(framing);
        of_mux.ordering = order;
        of_mux.limits = options.limits.clone();
        of_mux.detach_ended = true;
        of_mux.classify = options.classify;
        of_mux.class_caps = options.class_caps;
        let mux = Mux::new(of_mux)?;
        let calls = (0..count).map(|_| AtomicU64::new(0)).collect();
        let pending = Arc::new(PendingReplies { by_ticket: Mutex::default(), calls });
        let (mut stats, mut sockets, mut workers) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..count {
            let socket = Arc::new(mux.socket()?);
            sockets.push(Arc::clone(&socket));
            let mut env = Env::new(options.limits.clone(), no_pool()?)?;
            env.shard = number;
            env.buffers = mux.0.0.buffers.clone();
            env.answers = Some(Arc::clone(&pending) as Arc<dyn Answers>);
            stats.push(Arc::clone(&env.stats));
            let worker = Worker {
                service: Arc::clone(&service),
                pending: Arc::clone(&pending),
                env,
                replies: Replies::default(),
                grant: socket.grant(),
                ticket: (number as u64) << TICKET_BITS,
            };
            workers.push((socket, worker));
        }
        let closes = Arc::new(Closes(std::array::from_fn(|_| AtomicU64::new(0))));
        Ok((Self { service, mux, pending, stats, closes, order, sockets, threads: Mutex::default() }, workers))
    }

    /// The multiplexor behind them.
    pub fn mux(&self) -> &Mux {
        &self.mux
    }

    /// Ends the workers, which begin no more messages. Returns the number of workers in a call, unless it `waits` for them.
    fn end(&self, waits: bool) -> usize {
        self.mux.stop();
        // Revokes the leases, before `works` is read below: a worker that has a batch and has not set `works` yet begins nothing
        // of it any more, so joining it does not wait for the service. Read before this, `works` could be false for a worker that
        // goes on to begin a message.
        self.sockets.iter().for_each(|socket| socket.set_receiving(false));
        let mut left = 0;
        for WorkerThread { works, handle } in lock(&self.threads).drain(..) {
            if waits || !works.load(Ordering::SeqCst) {
                let _ = handle.join();
            } else {
                left += 1;
            }
        }
        for connection in self.mux.connections() {
            self.mux.abort(connection, ConnectionError::Stopping);
        }
        // No connection is left that waits for these answers.
        lock(&self.pending.by_ticket).clear();
        left
    }
}

impl<S: WorkerService> Drop for Workers<S> {
    fn drop(&mut self) {
        self.end(true);
    }
}

impl<S: WorkerService> Adopter for Workers<S> {
    fn adopt(&self, Adopted { socket, peer, place }: Adopted) {
        // From here on its end closes what was accepted, also after a panic in `fork`.
        let mut served = Served {
            service: Arc::clone(&self.service),
            states: Mutex::default(),
            peer,
            closes: Arc::clone(&self.closes),
            _place: place,
        };
        let states = served.states.get_mut().unwrap_or_else(PoisonError::into_inner);
        let accept = || {
            states.push(self.service.accept(&mut (), &served.peer)?);
            let mut order = self.order;
            if order == Order::Free {
                for _ in 1..self.stats.len() {
                    match states.first().and_then(|state| self.service.fork(state)) {
                        Some(state) => states.push(state),
                        None => order = Order::Requests,
                    }
                }
            }
            Ok(order)
        };
        let accepted: Result<Result<_, ksf::Refused>, _> = catch_unwind(AssertUnwindSafe(accept));
        let order = match accepted {
            Ok(Ok(order)) => order,
            Ok(Err(_)) => return self.closes.count(CloseReason::Service),
            Err(_) => return self.closes.count(CloseReason::Panicked),
        };
        let framing = self.service.profile().framing.into();
        let attachment = Attachment { state: Box::new(served), ended: note_close::<S> };
        if self.mux.attach_served(socket, framing, order, attachment).is_err() {
            // It ended before it was attached, or there are too many.
            self.closes.count(CloseReason::Io);
        }
    }

    fn set_limits(&self, new: &ksf::limits::Limits) {
        self.mux.set_limits(new.clone());
    }

    fn add_counts(&self, stats: &Stats) {
        for worker in &self.stats {
            stats.messages.add(worker.messages.value());
            stats.replies.add(worker.replies.value());
            stats.replies_unframable.add(worker.replies_unframable.value());
            stats.tasks_panicked.add(worker.tasks_panicked.value());
        }
        let counts = self.mux.counts();
        stats.bytes_in.add(counts.rx_bytes.load(Ordering::Relaxed));
        stats.bytes_out.add(counts.tx_bytes.load(Ordering::Relaxed));
        stats.reads_paused.add(counts.rx_pauses.load(Ordering::Relaxed));
        stats.memory_waits.add(counts.memory_waits.load(Ordering::Relaxed));
        stats.lingers_cut.add(counts.lingers_cut.load(Ordering::Relaxed));
        for (reason, count) in CloseReason::ALL.iter().zip(&self.closes.0) {
            stats.add_closes(*reason, count.load(Ordering::Relaxed));
        }
    }

    fn drain(&self, deadline: Instant) -> usize {
        const LOOK_EVERY: Duration = Duration::from_millis(2);
        loop {
            // Again and again: a message that has begun to arrive may be whole now.
            self.mux.finish_reading();
            let left = self.mux.connections().len() + self.mux.lingering();
            if left == 0 || Instant::now() >= deadline {
                return self.end(left == 0);
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn stop(&self) {
        self.end(true);
    }
}

/// A worker, and the socket that it takes messages from.
type Seat<S> = (Arc<MessageSocket>, Worker<S>);

struct Worker<S: WorkerService> {
    service: Arc<S>,
    pending: Arc<PendingReplies>,
    env: Env,
    /// What the service writes, before it is queued.
    replies: Replies,
    /// The messages it is called with next.
    grant: Grant,
    /// Number of the last message.
    ticket: u64,
}

impl<S: WorkerService> Worker<S> {
    /// Works on a batch of messages of one connection, until its end or until the rest was given to others.
    fn work(&mut self, socket: &MessageSocket, batch: &InPlaceBatch) {
        let conn = &batch.source;
        let Some(served) = served::<S>(conn) else { return };
        // Of all messages of the batch; and of those that are answered later, which are done with then.
        let (mut messages, mut bytes) = (0, 0);
        let (mut later, mut later_bytes) = (0, 0);
        let mut end = None;
        while socket.grant_more(batch, &mut self.replies, &mut self.grant) {
            let mut begun = Begun::default();
            // No answer can reach its peer, or after these errors nothing more of it is answered.
            let closed = conn.is_gone()
                || matches!(
                    conn.error.get(),
                    Some(
                        ConnectionError::ClosedByService | ConnectionError::WorkerPanicked | ConnectionError::Abandoned
                    )
                );
            while !closed && end.is_none() {
                let (called, reserved_bytes) = self.call(socket, batch, served, &mut begun);
                let is_deferred = matches!(called, Called::Deferred { .. });
                match called {
                    Called::Answered => {}
                    Called::NoRoom { message } => {
                        // In front of those behind it; taken again when the connection is throttled no longer.
                        let (source, message) = (Arc::clone(conn), MessageBatch::one(message));
                        let taken = Taken { source, message, class: batch.class, more: false };
                        conn.mux.wake(conn.mux.scheduler.give_back(std::iter::once(taken)));
                    }
                    Called::Deferred { place, outcome } => {
                        // Before any of its later answers.
                        socket.answer(batch, &mut self.replies);
                        later += 1;
                        later_bytes += place.len();
                        self.pending.expect(self.ticket, Message::of_batch(batch, place), outcome);
                    }
                    Called::Closed => end = Some(ConnectionError::ClosedByService),
                    Called::Panicked => end = Some(ConnectionError::WorkerPanicked),
                }
                if reserved_bytes > 0 {
                    // The reply counts in the queue, or as deferred, before its reservation ends.
                    socket.answer(batch, &mut self.replies);
                    conn.unreserve(reserved_bytes);
                    // Its answer may have come already, and found the connection throttled by this reservation.
                    conn.mux.resume(conn);
                }
                if !is_deferred || conn.is_throttled() {
                    break;
                }
            }
            if closed || end.is_some() {
                // Those that the service is not called with any more.
                while let Some(place) = self.grant.next(|| socket.kept()) {
                    begun.add(&place);
                }
            }
            messages += begun.messages;
            bytes += begun.bytes;
        }
        if let Some(error) = end {
            socket.answer(batch, &mut self.replies);
            conn.mux.send(conn);
            conn.mux.end(conn, error);
        }
        // Replies leave with those to the next batch, if that is of the same connection.
        socket.done_in_place(batch, messages - later, bytes - later_bytes);
    }

    /// Calls the service with one message of the grant after the other, until one is not simply answered. Also returns the bytes
    /// that are reserved for the reply to the last one.
    ///
    /// It has a state of the connection from the first message that it begins until it returns. Before and afterwards other workers
    /// may work on the connection: the timer thread gives them what is not begun, an answer from another thread lets the next message
    /// begin, and a message without room is taken again.
    fn call(
        &mut self,
        socket: &MessageSocket,
        batch: &InPlaceBatch,
        served: &Served<S>,
        begun: &mut Begun,
    ) -> (Called, usize) {
        let (peer, key) = (served.peer, batch.source.id);
        let mut state = None;
        let before = begun.messages;
        // Where the replies to the last message begin.
        let mut mark = self.replies.output.len();
        let mut reserved_bytes = 0;
        let Self { service, pending, env, replies, ticket, grant, .. } = self;
        let called = catch_unwind(AssertUnwindSafe(|| {
            while let Some(place) = grant.next(|| socket.kept()) {
                begun.add(&place);
                *ticket += 1;
                pending.begin(*ticket);
                // A worker that begins a message finds one, by the scheduler's rules.
                let state = state.get_or_insert_with(|| lock(&served.states).pop().expect("more workers than states"));
                mark = replies.output.len();
                let place = place.start as usize..place.end as usize;
                let message = ksf::Message::of_chunk(&batch.chunk, place.clone(), peer, key);
                let reply_bytes = service.reply_bytes(&mut (), state, message.bytes());
                if reply_bytes > EXPECTED_REPLY_BYTES {
                    if !batch.source.mux.reserve_reply(&batch.source, reply_bytes) {
                        begun.remove(place.len());
                        return Called::NoRoom { message: message.keep() };
                    }
                    reserved_bytes = reply_bytes;
                }
                let expected = batch.source.expected_bytes();
                let outcome = call_outside(&**service, state, &message, *ticket, expected, &mut replies.output, env);
                replies.messages += u64::from(replies.output.len() > mark);
                match outcome {
                    // What it wrote is looked after before it is called again.
                    CallOutcome { deferred: 0, close: false, .. }
                        if reserved_bytes > 0 || replies.output.len() >= HELD_BYTES_MAX =>
                    {
                        return Called::Answered;
                    }
                    CallOutcome { deferred: 0, close: false, .. } => {}
                    CallOutcome { deferred: 0, close: true, .. } => return Called::Closed,
                    outcome => return Called::Deferred { place, outcome },
                }
            }
            Called::Answered
        }));
        if let Some(state) = state {
            lock(&served.states).push(state);
        }
        self.env.stats.messages.add((begun.messages - before) as u64);
        let called = called.unwrap_or_else(|_| {
            self.env.stats.tasks_panicked.add(1);
            self.pending.forget(self.ticket);
            // Not what it wrote before.
            self.replies.output.truncate(mark);
            Called::Panicked
        });
        (called, reserved_bytes)
    }
}

/// What a worker is done with.
#[derive(Default)]
struct Begun {
    messages: usize,
    bytes: usize,
}

impl Begun {
    #[inline]
    fn add(&mut self, place: &Range<u32>) {
        self.messages += 1;
        self.bytes += place.len();
    }

    fn remove(&mut self, bytes: usize) {
        self.messages -= 1;
        self.bytes -= bytes;
    }
}

/// Why a worker stopped to call the service.
enum Called {
    /// It has no more messages, or wrote so much that others have to look after it first.
    Answered,
    /// There is no room for the reply to this message, which the service did not see.
    NoRoom {
        message: Chunk,
    },
    /// Some of the last message's answers come later.
    Deferred {
        place: Range<usize>,
        outcome: CallOutcome,
    },
    /// The service wants the connection closed.
    Closed,
    Panicked,
}

impl PendingReplies {
    /// A worker calls the service with this message.
    #[inline]
    fn begin(&self, ticket: u64) {
        // The thread that answers was told of the message after this.
        self.call(ticket).store(ticket, Ordering::Relaxed);
    }

    /// The service panicked with this message.
    fn forget(&self, ticket: u64) {
        let mut pending = lock(&self.by_ticket);
        self.call(ticket).store(0, Ordering::Relaxed);
        pending.remove(&ticket);
    }

    fn call(&self, ticket: u64) -> &AtomicU64 {
        &self.calls[(ticket >> TICKET_BITS) as usize]
    }

    /// The service returned, and answers of `message` are to come or came already.
    fn expect(&self, ticket: u64, message: Message, outcome: CallOutcome) {
        let mut pending = lock(&self.by_ticket);
        let entry = pending.entry(ticket).or_default();
        entry.answers += outcome.deferred as usize;
        if let Some(conn) = message.conn() {
            conn.reserve(outcome.work_bytes);
        }
        entry.message = Some(message);
        entry.close = outcome.close;
        let early = std::mem::take(&mut entry.early);
        self.deliver(pending, ticket, early);
    }

    fn deliver(&self, mut pending: MutexGuard<'_, HashMap<u64, PendingReply>>, ticket: u64, answers: Vec<Late>) {
        let Some(entry) = pending.get_mut(&ticket) else { return };
        let Some(message) = &entry.message else {
            entry.early.extend(answers);
            return;
        };
        entry.answers -= answers.len();
        let conn = message.conn().cloned();
        let done = if entry.answers == 0 { pending.remove(&ticket) } else { None };
        drop(pending);
        let Some(conn) = conn else { return };
        for Late { answer, work_bytes } in answers {
            conn.expect(answer.reply_bytes());
            let reserved = Admission::Reserved(work_bytes);
            let sent = match answer {
                Answer::Bytes(body) => {
                    conn.mux.reply(&conn, reserved, false, move |tail| tail.extend_from_slice(&body))
                }
                Answer::Chunk(body) => conn.mux.reply_chunk(&conn, reserved, false, body),
                Answer::Parts(head, body, end) => conn.mux.reply(&conn, reserved, false, move |tail| {
                    tail.extend_from_slice(&head);
                    tail.extend_from_slice(&body);
                    tail.extend_from_slice(end);
                }),
                Answer::Pieces(body) => conn.mux.reply(&conn, reserved, false, move |tail| body.copy_to(tail)),
                Answer::Nothing => {
                    conn.unreserve(work_bytes);
                    Ok(())
                }
                // Workers have no way back to the connection: see `Deferred::resume`.
                Answer::Abandoned | Answer::Resume(_) => {
                    conn.unreserve(work_bytes);
                    conn.mux.end(&conn, ConnectionError::Abandoned);
                    Ok(())
                }
            };
            if let Err(crate::SendError::Unframable(_)) = sent {
                conn.mux.end(&conn, ConnectionError::ClosedByService);
            }
        }
        if let Some(limit) = conn.reply_limit() {
            conn.mux.end(&conn, ConnectionError::ReplyLimit { limit });
        }
        conn.mux.resume(&conn);
        if done.is_some_and(|reply| reply.close) {
            conn.mux.end(&conn, ConnectionError::ClosedByService);
        }
    }
}

impl Answers for PendingReplies {
    fn answer(&self, delivery: Delivery) {
        let work_bytes = delivery.work_bytes();
        let (ticket, answer) = delivery.into_answer();
        let mut pending = lock(&self.by_ticket);
        if let Entry::Vacant(vacant) = pending.entry(ticket) {
            if self.call(ticket).load(Ordering::Relaxed) != ticket {
                return;
            }
            vacant.insert(PendingReply::default());
        }
        self.deliver(pending, ticket, vec![Late { answer, work_bytes }]);
    }
}

impl Closes {
    fn count(&self, reason: CloseReason) {
        if let Some(at) = CloseReason::ALL.iter().position(|known| *known == reason) {
            self.0[at].fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn served<S: WorkerService>(conn: &Connection) -> Option<&Served<S>> {
    conn.attachment.get()?.state.downcast_ref()
}

/// Counts a connection that ended.
fn note_close<S: WorkerService>(conn: &Connection, error: &ConnectionError) {
    if let Some(served) = served::<S>(conn) {
        served.closes.count(reason(error));
    }
}

fn reason(error: &ConnectionError) -> CloseReason {
    match error {
        ConnectionError::PeerClosed => CloseReason::PeerClosed,
        ConnectionError::PeerClosedMidMessage { .. } => CloseReason::PeerClosedMidMessage,
        ConnectionError::Socket { .. } => CloseReason::Io,
        ConnectionError::OversizedMessage { .. } => CloseReason::OversizedMessage,
        ConnectionError::EndlessHeader { .. } => CloseReason::EndlessHeader,
        ConnectionError::EndlessFragments { .. } => CloseReason::EndlessFragments,
        ConnectionError::AssemblyTimeout { .. } => CloseReason::AssemblyTimeout,
        ConnectionError::IdleTimeout { .. } => CloseReason::IdleTimeout,
        ConnectionError::SendTimeout { .. } => CloseReason::SendTimeout,
        ConnectionError::ReplyLimit { .. } => CloseReason::ReplyLimit,
        ConnectionError::Malformed(_)
        | ConnectionError::Program(_)
        | ConnectionError::Refused { .. }
        | ConnectionError::HandedBack => CloseReason::MalformedFrame,
        ConnectionError::MemoryLimit { .. } => CloseReason::MemoryLimit,
        ConnectionError::ClosedByService => CloseReason::Service,
        ConnectionError::Stopping => CloseReason::Drained,
        ConnectionError::WorkerPanicked => CloseReason::Panicked,
        ConnectionError::Abandoned => CloseReason::Abandoned,
    }
}

/// Workers receive into slots of their message sockets; the framework wants a pool in every environment.
fn no_pool() -> std::io::Result<Pool> {
    Pool::new(Memory::Anonymous, 4096, 1).map_err(|error| std::io::Error::other(error.to_string()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
