//! A worker's side of a multiplexor: messages out of any connection, answers to the one they came from.

mod in_place;
mod message;
mod readiness;
mod sending;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ksf::output::{Output, Spares};
use rustix::event::Timespec;

use crate::batch::MessageBatch;
use crate::connection::Connection;
use crate::cost::CostEstimate;
use crate::error::{ConnectionError, RecvError};
use crate::lease::{Lease, LeasedMessage};
use crate::mux::{ConnectionId, Handle, Receiver, Shared, WorkerCx, now};
use crate::pollable::Pollable;
use crate::scheduler::{Source as _, Take, Taken, Turn, Worker};
use crate::sync::{Arc, Mutex};

pub(crate) use self::in_place::{InPlaceBatch, Replies};
pub use self::message::Message;
pub use self::sending::SendOptions;

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
    /// Their connection.
    taken_from: Option<Arc<Connection>>,
    /// The same, while replies to it are held back.
    corked: Option<Arc<Connection>>,
}

impl MessageSocket {
    pub(crate) fn new(mux: Handle) -> std::io::Result<Self> {
        let worker = Some(mux.0.scheduler.join());
        let state = WorkerState {
            receiver: Receiver::new(&mux.0.buffers)?,
            lease: Lease::new(),
            held: Output::default(),
            held_messages: 0,
            held_for: None,
            spares: Spares::within(mux.0.limits().shard_bytes_max),
            cost: CostEstimate::new(),
            taken: 0,
            taken_at: now(),
            taken_from: None,
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

    /// The next message; waits at most for `timeout`. `None` waits for ever, [`Duration::ZERO`] does not wait.
    pub fn recv_within(&self, timeout: Option<Duration>) -> Result<Message, RecvError> {
        if timeout == Some(Duration::ZERO) { self.try_recv() } else { self.recv_until(timeout) }
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
            let work_ns = now().since(state.taken_at).as_nanos() as u64;
            state.cost.observe(work_ns, state.taken);
            state.taken = 0;
            if let Some(conn) = state.taken_from.take() {
                conn.parked().note_work(work_ns, conn.waiting_messages.load(Ordering::SeqCst) == 0);
            }
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
                Take::Turn(turn) => {
                    let turn_batches = state.cost.turn_batches();
                    let mut cx = self.cx(state);
                    // Others have their turn before one that always has more.
                    let polled = shared.poll(&mut cx);
                    match turn {
                        Turn::Parked(conn) => shared.wake(shared.scheduler.begin_turn(worker, &conn, turn_batches)),
                        Turn::Reread(conn) => {
                            shared.read(&conn, &mut cx);
                            shared.settle(&conn);
                        }
                    }
                    if let Err(error) = polled {
                        return Some(Err(error.into()));
                    }
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
                    state.taken_from = Some(Arc::clone(&first.source));
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
        let bytes = message.chunk();
        let Some((source, _, class)) = message.take_end() else { return };
        let taken = Taken { source, message: MessageBatch::one(bytes), class, more: false };
        let shared = &self.mux.0;
        shared.wake(shared.scheduler.give_back(std::iter::once(taken)));
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

    fn with_cx<R>(&self, f: impl FnOnce(&Arc<Shared>, &mut WorkerCx<'_>) -> R) -> R {
        let mut state = self.lock();
        f(&self.mux.0, &mut self.cx(&mut state))
    }

    fn cx<'a>(&'a self, state: &'a mut WorkerState) -> WorkerCx<'a> {
        // An event loop may not come back soon for what is left of a batch.
        let batch_len = if self.pollable.get().is_some() { 1 } else { state.cost.batch_len() };
        WorkerCx { worker: self.worker.as_ref(), receiver: &mut state.receiver, batch_len }
    }

    pub(crate) fn lock(&self) -> crate::sync::MutexGuard<'_, WorkerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        Some(Message::of_lease(source, bytes, class, more))
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

impl Shared {
    fn take_report(&self) -> Option<(ConnectionId, ConnectionError)> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}
