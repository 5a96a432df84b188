//! A worker's side of a multiplexor: messages out of any connection, answers to the one they came from.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ksf::output::{Output, Spares};
use ksf::pool::Chunk;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::batch::MessageBatch;
use crate::connection::{Admission, Connection};
use crate::error::{ConnectionError, RecvError, SendError};
use crate::lease::{self, Grant, Lease, LeasedMessage};
use crate::mux::{ConnectionId, HELD_BYTES_MAX, Handle, Receiver, Shared, WorkerCx, now};
use crate::out_queue::Pushed;
use crate::pollable::Pollable;
use crate::scheduler::{CostEstimate, Source as _, Take, Taken, Worker};
use crate::sync::{Arc, Mutex};
use crate::wait_set::Poller;

/// One worker's side. A thread usually has one of its own; it may be used from several at once, as a socket may.
pub struct MessageSocket {
    mux: Handle,
    worker: Option<Worker<Arc<Connection>>>,
    state: Arc<Mutex<WorkerState>>,
    /// The last look found something: the next one does not announce sleep first.
    busy: AtomicBool,
    disabled: AtomicBool,
    reports: AtomicBool,
    pollable: OnceLock<Arc<Pollable>>,
}

/// What a worker has to itself. The timer thread revokes the lease when the worker is held up.
pub(crate) struct WorkerState {
    receiver: Receiver,
    /// What it has taken.
    lease: Lease<Arc<Connection>>,
    /// Answers to messages of the batch that is worked on in place, framed, and their connection.
    held: Output,
    held_messages: u64,
    held_for: Option<Arc<Connection>>,
    spares: Spares,
    cost: CostEstimate,
    /// Messages of the last lease, and when it was taken.
    taken: usize,
    taken_at: ksf::limits::Time,
    /// Their connection, while replies to it are held back.
    corked: Option<Arc<Connection>>,
}

/// How [`MessageSocket::send`] sends.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct SendOptions {
    /// The message may be repeated on another connection when this one fails in the middle of it: receiving it twice
    /// does no harm.
    pub repeatable: bool,
    /// Waits for room for so long; `None`: not at all.
    pub wait: Option<Duration>,
    /// The connection to use if it takes messages, else any.
    pub prefer: Option<ConnectionId>,
    /// The only connection to use, as in [`MessageSocket::send_to`]: [`SendError::Gone`] if it is there no longer.
    pub to: Option<ConnectionId>,
    /// The message answers one of the connection named by `to`: there is room for it as for
    /// [`Message::reply`], in the budget of the connection.
    pub answer: bool,
    /// More messages follow at once: this one may wait for them (it leaves within 10 ms at most).
    pub more: bool,
    /// The message may wait for so long for the next one without this, and leaves with it.
    pub batch: Option<Duration>,
}

impl SendOptions {
    /// Whether there is room for it as for an answer.
    pub fn is_answer(&self) -> bool {
        self.answer && self.to.is_some()
    }

    fn admission(&self) -> Admission {
        if self.is_answer() { Admission::Answer } else { Admission::Send }
    }
}

impl MessageSocket {
    pub(crate) fn new(mux: Handle) -> std::io::Result<Self> {
        let worker = Some(mux.0.scheduler.join());
        let state = WorkerState {
            receiver: Receiver::new()?,
            lease: Lease::new(),
            held: Output::default(),
            held_messages: 0,
            held_for: None,
            spares: Spares::default(),
            cost: CostEstimate::new(),
            taken: 0,
            taken_at: now(),
            corked: None,
        };
        let state = Arc::new(Mutex::new(state));
        mux.0.timer.watch(&state);
        Ok(Self {
            mux,
            worker,
            state,
            busy: AtomicBool::new(false),
            disabled: AtomicBool::new(false),
            reports: AtomicBool::new(false),
            pollable: OnceLock::new(),
        })
    }

    /// Another socket of the same multiplexor.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        Self::new(self.mux.clone())
    }

    /// The multiplexor.
    pub fn mux(&self) -> crate::Mux {
        crate::Mux(self.mux.clone())
    }

    /// The next message; waits for one.
    pub fn recv(&self) -> Result<Message, RecvError> {
        self.recv_until(None)
    }

    /// The next message; waits for one for so long.
    pub fn recv_timeout(&self, timeout: Duration) -> Result<Message, RecvError> {
        self.recv_until(Some(timeout))
    }

    /// The next message, if one is there.
    pub fn try_recv(&self) -> Result<Message, RecvError> {
        self.awake();
        let result = self.recv_or_sleep();
        if !matches!(result, Err(RecvError::WouldBlock)) {
            self.note_ready();
        }
        result
    }

    fn recv_or_sleep(&self) -> Result<Message, RecvError> {
        loop {
            if let Some(result) = self.next() {
                return result;
            }
            // Until there is none left: edge-triggered event loops are not told again of those that are there.
            if !self.disabled.load(Ordering::SeqCst) && self.with_cx(|shared, cx| shared.poll(cx))? {
                continue;
            }
            if self.mux.0.is_stopped() {
                return Err(RecvError::Stopped);
            }
            if self.fall_asleep() {
                return Err(RecvError::WouldBlock);
            }
        }
    }

    fn recv_until(&self, timeout: Option<Duration>) -> Result<Message, RecvError> {
        self.recv_with(timeout, Self::next)
    }

    fn recv_with<R>(
        &self,
        timeout: Option<Duration>,
        next: impl Fn(&Self) -> Option<Result<R, RecvError>>,
    ) -> Result<R, RecvError> {
        self.awake();
        self.yield_lead();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if let Some(result) = next(self) {
                self.busy.store(true, Ordering::Relaxed);
                self.note_ready();
                return result;
            }
            if self.mux.0.is_stopped() {
                return Err(RecvError::Stopped);
            }
            // A worker that was busy until now is likely to find something: it is not counted as one that sleeps.
            if self.busy.swap(false, Ordering::Relaxed) && !self.disabled.load(Ordering::SeqCst) {
                self.with_cx(|shared, cx| shared.poll(cx))?;
                continue;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(timeout.map_or(RecvError::WouldBlock, RecvError::TimedOut));
            }
            let left = left.map(|left| Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() });
            if self.disabled.load(Ordering::SeqCst) {
                // A wake-up may have been meant for this worker.
                let scheduler = &self.mux.0.scheduler;
                let left = self.worker.as_ref().map_or(0, |worker| scheduler.yield_all(worker));
                self.mux.0.wake(left + scheduler.decline());
                return Err(RecvError::Disabled);
            }
            self.wait(left.as_ref())?;
        }
    }

    /// Waits for events. The lock is not held meanwhile.
    fn wait(&self, timeout: Option<&Timespec>) -> std::io::Result<()> {
        self.mux.0.wait(timeout, |handle| {
            let mut state = self.lock();
            handle(&mut self.cx(&mut state));
        })
    }

    /// A message that is there already.
    fn next(&self) -> Option<Result<Message, RecvError>> {
        let mut state = self.lock();
        match self.fill(&mut state) {
            Some(Ok(())) => state.pop().map(Ok),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        }
    }

    /// The same for a batch, to be worked on where it lies: see [`Self::grant_more`].
    fn next_in_place(&self) -> Option<Result<InPlaceBatch, RecvError>> {
        let mut state = self.lock();
        match self.fill(&mut state) {
            Some(Ok(())) => state.begin_in_place().map(Ok),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        }
    }

    /// Takes a lease if there is none. `None`: nothing is there.
    fn fill(&self, state: &mut WorkerState) -> Option<Result<(), RecvError>> {
        if let Some(first) = state.lease.batches.front() {
            if !first.source.is_throttled() {
                return Some(Ok(()));
            }
            // They are set aside where they are taken next, if nothing has left by then.
            let revoked = state.lease.revoke();
            self.mux.0.wake(self.mux.0.scheduler.give_back(revoked.into_iter()));
        }
        let corked = state.corked.take();
        let found = self.take(state);
        match (state.lease.batches.front(), corked) {
            // What was held back leaves with the answer to this one, if that is soon.
            (Some(taken), Some(conn)) if state.cost.is_cheap() && Arc::ptr_eq(&taken.source, &conn) => {
                state.corked = Some(conn);
            }
            (_, Some(conn)) if conn.corked.load(Ordering::SeqCst) => self.mux.0.send(&conn),
            _ => {}
        }
        found
    }

    /// Takes from the queues.
    fn take(&self, state: &mut WorkerState) -> Option<Result<(), RecvError>> {
        let shared = &self.mux.0;
        if state.taken > 0 {
            state.cost.observe(now().since(state.taken_at).as_nanos() as u64, state.taken);
            state.taken = 0;
        }
        if self.disabled.load(Ordering::SeqCst) {
            return None;
        }
        if self.reports.load(Ordering::Relaxed)
            && let Some((connection, error)) = shared.take_report()
        {
            return Some(Err(RecvError::Connection { connection, error }));
        }
        let worker = self.worker.as_ref()?;
        // No other worker can take from the lease, and an event loop may not come back for it.
        let want = if self.pollable.get().is_some() { 1 } else { state.cost.want_batches() };
        loop {
            match shared.scheduler.take(worker, want, &mut state.lease.batches) {
                Take::Nothing => return None,
                Take::Reread(conn) => {
                    let mut cx = self.cx(state);
                    // Others have their turn before one that always has more.
                    if let Err(error) = shared.poll(&mut cx) {
                        return Some(Err(error.into()));
                    }
                    shared.read(&conn, &mut cx);
                    shared.settle(&conn);
                    if self.reports.load(Ordering::Relaxed)
                        && let Some((connection, error)) = shared.take_report()
                    {
                        return Some(Err(RecvError::Connection { connection, error }));
                    }
                }
                Take::Messages => {
                    shared.wake(shared.scheduler.pass_on());
                    state.taken = state.lease.messages();
                    state.taken_at = now();
                    let first = state.lease.batches.front()?;
                    // Those of other workers that found their messages cheap may be several.
                    if state.taken > 1 || state.cost.is_cheap() && first.more {
                        shared.timer.watch_leases();
                    }
                    if state.cost.is_cheap() && (first.more || state.taken > 1) {
                        state.corked = Some(Arc::clone(&first.source));
                    }
                    return Some(Ok(()));
                }
            }
        }
    }

    /// Waits for messages and leaves the first batch of them where it is.
    pub(crate) fn recv_in_place(&self) -> Result<InPlaceBatch, RecvError> {
        self.recv_with(None, Self::next_in_place)
    }

    /// What this worker goes through in place.
    pub(crate) fn grant(&self) -> Grant {
        self.lock().lease.grant()
    }

    /// Takes the framed answers to messages of the last grant, and grants a few more. A few, because its answers wait for
    /// the worker to come again. False: there are none left, the lease was revoked, or the peer does not take what it is
    /// owed.
    pub(crate) fn grant_more(&self, batch: &InPlaceBatch, replies: &mut Replies, grant: &mut Grant) -> bool {
        let mut state = self.lock();
        let state = &mut *state;
        // Under the lock that is taken anyway; the timer thread sends them if the next messages take long.
        state.hold(replies);
        if state.held.len() >= HELD_BYTES_MAX {
            let messages = std::mem::take(&mut state.held_messages);
            self.mux.0.hold_framed(&batch.source, &mut state.held, messages);
        }
        if batch.source.is_throttled() && !state.lease.is_revoked(batch) {
            let rest = state.lease.end_in_place(grant);
            self.mux.0.wake(self.mux.0.scheduler.give_back(rest.into_iter()));
            return false;
        }
        state.lease.grant_more(batch, state.cost.grant(), grant, &mut state.receiver.ranges)
    }

    /// How many messages of a grant that the timer thread closed are this worker's.
    #[cold]
    pub(crate) fn kept(&self) -> usize {
        self.lock().lease.kept()
    }

    /// Queues what is answered so far.
    pub(crate) fn answer(&self, batch: &InPlaceBatch, replies: &mut Replies) {
        let mut state = self.lock();
        let state = &mut *state;
        state.hold(replies);
        if state.held_messages > 0 {
            let messages = std::mem::take(&mut state.held_messages);
            self.mux.0.hold_framed(&batch.source, &mut state.held, messages);
        }
    }

    /// Messages of a batch are done with. Replies that were held back leave with those to the next one, if that is of the
    /// same connection, and else when the worker comes for it.
    pub(crate) fn done_in_place(&self, batch: &InPlaceBatch, messages: usize, bytes: usize) {
        let mut state = self.lock();
        state.held_for = None;
        if state.held_messages > 0 {
            let messages = std::mem::take(&mut state.held_messages);
            self.mux.0.hold_framed(&batch.source, &mut state.held, messages);
        }
        if batch.source.corked.load(Ordering::SeqCst) {
            state.corked = Some(Arc::clone(&batch.source));
        }
        drop(state);
        if messages > 0 {
            self.mux.0.finish(self.worker.as_ref(), &batch.source, messages, bytes, batch.class);
        }
    }

    /// The same as dropping the message, for a worker that comes for the next one at once: no other worker is woken for
    /// what can be worked on now.
    pub fn done(&self, mut message: Message) {
        if let Some((conn, bytes, class)) = message.take_end() {
            self.mux.0.finish(self.worker.as_ref(), &conn, 1, bytes, class);
        }
    }

    /// Gives a message back that was received and not worked on: this or another socket receives it again, before
    /// younger ones.
    pub fn give_back(&self, mut message: Message) {
        let Some(source) = message.conn.take() else { return };
        let batch = MessageBatch::one(message.bytes.clone());
        let taken = Taken { source, message: batch, class: message.class, more: false };
        let shared = &self.mux.0;
        shared.wake(shared.scheduler.give_back(std::iter::once(taken)));
    }

    /// Reads connections that have bytes and queues their messages for all workers, without taking one or waiting.
    pub(crate) fn look(&self) -> std::io::Result<()> {
        self.with_cx(|shared, cx| shared.poll(cx))?;
        let shared = &self.mux.0;
        shared.wake(shared.scheduler.rouse());
        self.note_ready();
        Ok(())
    }

    /// Makes [`Self::poll_fd`] readable: something that was received is not worked on.
    pub(crate) fn announce(&self) {
        if let Some(pollable) = self.pollable.get() {
            pollable.notify();
        }
    }

    /// Sends a message on some connection: the next one in turn that takes messages. For clients whose connections all
    /// lead to the same server. Success means that it is queued. Returns the connection.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`] or, after [`SendOptions::wait`], [`SendError::TimedOut`] while every connection that it
    /// may go to has [`Limits::out_queue_bytes_max`](ksf::limits::Limits::out_queue_bytes_max) queued;
    /// [`SendError::NotConnected`] if there is none, [`SendError::Gone`] if there is not the one it is for.
    pub fn send(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError> {
        let shared = &self.mux.0;
        let deadline = options.wait.map(|wait| Instant::now() + wait);
        loop {
            if let Some(conn) = shared.choose(&options)? {
                let (framing, limit) = (&conn.framing, conn.queue_limit(options.admission()));
                let pushed = match options.to {
                    Some(_) => conn.out_queue.push(framing, limit, |tail| tail.extend_from_slice(body)),
                    None => conn.out_queue.push_movable(framing, limit, body, options.repeatable),
                };
                match pushed.map_err(SendError::Unframable)? {
                    Pushed::Queued => {}
                    Pushed::Ended if options.to.is_some() => return Err(SendError::Gone(conn.id)),
                    // It ended since it was chosen, or others were quicker.
                    Pushed::Ended | Pushed::Full => continue,
                }
                match options.batch {
                    Some(wait) => shared.batched(&conn, wait),
                    None => shared.queued(&conn, options.more),
                }
                return Ok(conn.id);
            }
            let Some((deadline, wait)) = deadline.zip(options.wait) else { return Err(SendError::WouldBlock) };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SendError::TimedOut(wait));
            }
            shared.wait_for_room(options.to, left);
        }
    }

    /// Sends a message to this connection. Never waits; [`SendOptions::to`] does.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`] while [`Limits::out_queue_bytes_max`](ksf::limits::Limits::out_queue_bytes_max) bytes are
    /// queued for it; [`SendError::Gone`].
    pub fn send_to(&self, connection: ConnectionId, body: &[u8]) -> Result<(), SendError> {
        self.mux().reply(connection, body)
    }

    /// Stops receiving, or starts again. What waits for this socket goes to others.
    pub fn set_receiving(&self, receiving: bool) {
        let was_disabled = self.disabled.swap(!receiving, Ordering::SeqCst);
        let Some(worker) = &self.worker else { return };
        let shared = &self.mux.0;
        if receiving {
            if was_disabled {
                // Its event loop was told of nothing meanwhile.
                self.announce();
            }
            return;
        }
        self.leave_wait_set();
        let mut state = self.lock();
        let wakes = shared.scheduler.give_back(state.lease.revoke().into_iter()) + shared.scheduler.yield_all(worker);
        drop(state);
        shared.wake(wakes);
    }

    /// Whether it receives.
    pub fn is_receiving(&self) -> bool {
        !self.disabled.load(Ordering::SeqCst)
    }

    /// From now on the end of a connection is reported to this socket, after the last message of it, as
    /// [`RecvError::Connection`]. Every end is reported to one of the sockets that want it.
    pub fn report_ends(&self) {
        if !self.reports.swap(true, Ordering::SeqCst) {
            self.mux.0.reports_wanted.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A descriptor that is readable while [`Self::try_recv`] may have something. It may be readable without a message:
    /// bytes came, but not a whole message, or another socket was quicker.
    ///
    /// Of several sockets whose programs wait, one is told of what comes, and the next one once that has received. A
    /// program that is told receives until there is nothing ([`RecvError::WouldBlock`]), or does so soon after it is
    /// told once more: it is if it does not within 5 to 10 ms, and so is another one then.
    pub fn poll_fd(&self) -> std::io::Result<BorrowedFd<'_>> {
        let pollable = match self.pollable.get() {
            Some(pollable) => pollable,
            None => {
                let new = Arc::new(Pollable::new(self.mux.0.connections_set())?);
                self.pollable.get_or_init(|| new)
            }
        };
        Ok(pollable.fd())
    }

    /// Says whether messages wait that no event of a connection announces, and has another socket told of those.
    fn note_ready(&self) {
        let Some(pollable) = self.pollable.get() else { return };
        if self.mux.0.scheduler.queued() > 0 || !self.lock().lease.batches.is_empty() {
            pollable.notify();
        }
        self.mux.0.wait_set.yield_lead(pollable);
    }

    /// Nothing is there: an event loop will be told. False: something came meanwhile.
    fn fall_asleep(&self) -> bool {
        let Some(pollable) = self.pollable.get() else { return true };
        pollable.clear();
        let shared = &self.mux.0;
        if self.disabled.load(Ordering::SeqCst) {
            return true;
        }
        pollable.set_told();
        let (asleep, watch) = shared.wait_set.sleep(pollable, || shared.scheduler.sleep());
        if watch {
            shared.timer.watch_wait_set();
        }
        if self.disabled.load(Ordering::SeqCst) {
            // Meanwhile, by another thread.
            self.leave_wait_set();
        }
        asleep
    }

    fn awake(&self) {
        if let Some(pollable) = self.pollable.get()
            && pollable.take_told()
        {
            let shared = &self.mux.0;
            if shared.wait_set.come(pollable, || shared.scheduler.awake(0)) {
                shared.timer.watch_wait_set();
            }
        }
    }

    /// Another socket is told of what comes.
    fn yield_lead(&self) {
        if let Some(pollable) = self.pollable.get() {
            self.mux.0.wait_set.yield_lead(pollable);
        }
    }

    /// Its event loop is not told any more of what comes.
    fn leave_wait_set(&self) {
        if let Some(pollable) = self.pollable.get() {
            let shared = &self.mux.0;
            shared.wait_set.leave(pollable, || shared.scheduler.awake(0));
        }
    }

    fn with_cx<R>(&self, f: impl FnOnce(&Arc<Shared>, &mut WorkerCx<'_>) -> R) -> R {
        let mut state = self.lock();
        f(&self.mux.0, &mut self.cx(&mut state))
    }

    fn cx<'a>(&'a self, state: &'a mut WorkerState) -> WorkerCx<'a> {
        // An event loop may not come back soon for what is left of a batch.
        let batch_len = if self.pollable.get().is_some() { 1 } else { state.cost.batch_len() };
        WorkerCx { worker: self.worker.as_ref(), receiver: &mut state.receiver, batch_len }
    }

    fn lock(&self) -> crate::sync::MutexGuard<'_, WorkerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first batch of a worker's lease, worked on where it lies.
pub(crate) type InPlaceBatch = lease::InPlaceBatch<Arc<Connection>>;

/// Answers of a worker that no other thread sees yet.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    /// With their framing.
    pub(crate) output: Output,
    /// Messages in it.
    pub(crate) messages: u64,
}

impl WorkerState {
    /// Keeps answers until they are queued, with others.
    fn hold(&mut self, replies: &mut Replies) {
        if replies.messages > 0 {
            self.held.add(&mut replies.output, &mut self.spares);
            self.held_messages += std::mem::take(&mut replies.messages);
        }
    }

    /// The next message of the lease.
    fn pop(&mut self) -> Option<Message> {
        let LeasedMessage { source, bytes, class, more } = self.lease.pop(&mut self.receiver.ranges)?;
        let more = more && self.cost.is_cheap();
        Some(Message { conn: Some(source), bytes, class, more })
    }

    fn begin_in_place(&mut self) -> Option<InPlaceBatch> {
        let batch = self.lease.begin_in_place()?;
        self.held_for = Some(Arc::clone(&batch.source));
        Some(batch)
    }

    /// Called by the timer thread at its intervals. Revokes the lease of a worker that took nothing from it since the last
    /// time, and queues the answers it holds. Whether there is still a lease, or answers.
    pub(crate) fn check(&mut self) -> (bool, Vec<Taken<Arc<Connection>>>) {
        let check = self.lease.check();
        if !check.is_stalled {
            return (check.has_batches || self.held_messages > 0, Vec::new());
        }
        if self.held_messages > 0
            && let Some(conn) = &self.held_for
        {
            let messages = std::mem::take(&mut self.held_messages);
            conn.mux.hold_framed(conn, &mut self.held, messages);
        }
        if check.was_granted_many {
            self.cost.note_revoked();
        }
        (check.has_batches, check.revoked)
    }
}

impl Drop for MessageSocket {
    fn drop(&mut self) {
        self.leave_wait_set();
        let shared = Arc::clone(&self.mux.0);
        let mut state = self.lock();
        let mut wakes = shared.scheduler.give_back(state.lease.revoke().into_iter());
        let corked = state.corked.take();
        drop(state);
        if let Some(conn) = corked {
            shared.send(&conn);
        }
        if let Some(worker) = self.worker.take() {
            wakes += shared.scheduler.leave(worker);
        }
        if self.reports.load(Ordering::SeqCst) {
            shared.reports_wanted.fetch_sub(1, Ordering::SeqCst);
        }
        shared.wake(wakes);
    }
}

impl fmt::Debug for MessageSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageSocket").field("receiving", &self.is_receiving()).finish_non_exhaustive()
    }
}

/// A message. Until it is dropped it counts against the limits of its connection, and in a connection that keeps its
/// order the next message waits for that.
pub struct Message {
    conn: Option<Arc<Connection>>,
    bytes: Chunk,
    class: Option<usize>,
    more: bool,
}

impl Message {
    /// A message of a batch that is worked on in place, to be kept for longer. It is done with on its own.
    pub(crate) fn of_batch(batch: &InPlaceBatch, range: Range<usize>) -> Self {
        Self { conn: Some(Arc::clone(&batch.source)), bytes: batch.chunk.slice(range), class: batch.class, more: false }
    }

    /// The message.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its bytes, to be kept for longer than the message. They lie where they were received: nothing is copied.
    pub fn keep(&self) -> Chunk {
        self.bytes.clone()
    }

    /// The connection it came on.
    pub fn connection(&self) -> ConnectionId {
        self.conn.as_ref().map_or(ConnectionId { index: u32::MAX, generation: u32::MAX }, |conn| conn.id)
    }

    /// Answers. Success means that the answer is queued, whole, behind what was queued for this connection before.
    ///
    /// # Errors
    ///
    /// [`SendError::WouldBlock`] while the replies queued for the connection use up its budget
    /// ([`Limits::connection_bytes_max`](ksf::limits::Limits::connection_bytes_max)): try again, or wait with
    /// [`MessageSocket::send`] and [`SendOptions::to`]. A program that answers each message before it receives many others
    /// does not meet it, because messages of a connection whose replies wait are not received. [`SendError::Gone`].
    pub fn reply(&self, body: &[u8]) -> Result<(), SendError> {
        self.reply_with(|tail| tail.extend_from_slice(body))
    }

    /// Answers with what `write` appends to the buffer it is given. It must not touch what is there already.
    pub fn reply_with(&self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), SendError> {
        let Some(conn) = &self.conn else { return Err(SendError::Gone(self.connection())) };
        conn.mux.reply(conn, Admission::Answer, self.more, write)
    }

    /// Answers with bytes that are sent from where they lie.
    pub fn reply_chunk(&self, body: Chunk) -> Result<(), SendError> {
        let Some(conn) = &self.conn else { return Err(SendError::Gone(self.connection())) };
        conn.mux.reply_chunk(conn, Admission::Answer, self.more, body)
    }

    pub(crate) fn conn(&self) -> Option<&Arc<Connection>> {
        self.conn.as_ref()
    }

    fn take_end(&mut self) -> Option<(Arc<Connection>, usize, Option<usize>)> {
        Some((self.conn.take()?, self.bytes.len(), self.class))
    }
}

impl std::ops::Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message").field("connection", &self.connection()).field("len", &self.bytes.len()).finish()
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        let Some((conn, bytes, class)) = self.take_end() else { return };
        if std::thread::panicking() {
            conn.mux.end(&conn, ConnectionError::WorkerPanicked);
        }
        conn.mux.finish(None, &conn, 1, bytes, class);
    }
}

impl Shared {
    fn take_report(&self) -> Option<(ConnectionId, ConnectionError)> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// The connection the next message goes to. `None`: all that it may go to have too much queued.
    fn choose(&self, options: &SendOptions) -> Result<Option<Arc<Connection>>, SendError> {
        if let Some(only) = options.to {
            let conn = self.find(only).ok_or(SendError::Gone(only))?;
            return Ok(conn.takes(options.admission()).then_some(conn));
        }
        let takes = |conn: &Arc<Connection>| conn.error.get().is_none() && conn.takes(Admission::Send);
        if let Some(conn) = options.prefer.and_then(|id| self.find(id)).filter(takes) {
            return Ok(Some(conn));
        }
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut alive = false;
        let mut at = 0;
        while let Some((conn, count)) = self.nth(first.wrapping_add(at)) {
            if takes(&conn) {
                return Ok(Some(conn));
            }
            alive |= conn.error.get().is_none();
            at += 1;
            if at >= count {
                break;
            }
        }
        if alive { Ok(None) } else { Err(SendError::NotConnected) }
    }

    /// Waits until TCP has room on this connection, or on any, for so long at most.
    fn wait_for_room(&self, only: Option<ConnectionId>, timeout: Duration) {
        let conns = match only {
            Some(only) => self.find(only).into_iter().collect(),
            None => self.all(),
        };
        let sockets: Vec<_> = conns.iter().filter_map(|conn| conn.out_queue.socket()).collect();
        let mut polled: Vec<_> = sockets.iter().map(|socket| PollFd::new(socket, PollFlags::OUT)).collect();
        let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
        let _ = rustix::event::poll(&mut polled, Some(&timeout));
        for conn in conns {
            self.send(&conn);
        }
    }
}
