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

use crate::error::{ConnectionError, RecvError, SendError};
use crate::hand::{self, Grant, Hand, One};
use crate::herd::Poller;
use crate::link::Link;
use crate::mux::{ConnectionId, Handle, Me, Receiver, Shared, now};
use crate::pollable::Pollable;
use crate::run::Run;
use crate::scheduler::{BatchSize, Take, Taken, Worker};
use crate::sync::{Arc, Mutex};

/// One worker's side. A thread usually has one of its own; it may be used from several at once, as a socket may.
pub struct MessageSocket {
    mux: Handle,
    worker: Option<Worker<Arc<Link>>>,
    own: Arc<Mutex<Own>>,
    /// The last look found something: the next one does not announce sleep first.
    busy: AtomicBool,
    disabled: AtomicBool,
    reports: AtomicBool,
    pollable: OnceLock<Arc<Pollable>>,
}

/// What a worker has to itself. The keeper takes the hand away when the worker is held up.
pub(crate) struct Own {
    receiver: Receiver,
    /// What it has taken.
    hand: Hand<Arc<Link>>,
    /// Answers to messages of the run that is worked on in place, framed, and their connection.
    held: Output,
    held_messages: u64,
    held_for: Option<Arc<Link>>,
    spares: Spares,
    size: BatchSize,
    /// Messages of the last hand, and when it was taken.
    taken: usize,
    taken_at: ksf::limits::Time,
    /// Their connection, while replies to it are held back.
    corked: Option<Arc<Link>>,
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
    /// More messages follow at once: this one may wait for them (it leaves within 10 ms at most).
    pub more: bool,
    /// The message may wait for so long for the next one without this, and leaves with it.
    pub batch: Option<Duration>,
}

impl MessageSocket {
    pub(crate) fn new(mux: Handle) -> std::io::Result<Self> {
        let worker = Some(mux.0.scheduler.join());
        let own = Own {
            receiver: Receiver::new()?,
            hand: Hand::new(),
            held: Output::default(),
            held_messages: 0,
            held_for: None,
            spares: Spares::default(),
            size: BatchSize::new(),
            taken: 0,
            taken_at: now(),
            corked: None,
        };
        let own = Arc::new(Mutex::new(own));
        mux.0.keeper.watch(&own);
        Ok(Self {
            mux,
            worker,
            own,
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
            if !self.disabled.load(Ordering::SeqCst) && self.with_me(|shared, me| shared.poll(me))? {
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
        self.let_go();
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
                self.with_me(|shared, me| shared.poll(me))?;
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
            let mut own = self.lock();
            handle(&mut self.me(&mut own));
        })
    }

    /// A message that is there already.
    fn next(&self) -> Option<Result<Message, RecvError>> {
        let mut own = self.lock();
        match self.fill(&mut own) {
            Some(Ok(())) => own.pop().map(Ok),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        }
    }

    /// The same for a run, to be worked on where it lies: see [`Self::grant_more`].
    fn next_in_place(&self) -> Option<Result<InPlace, RecvError>> {
        let mut own = self.lock();
        match self.fill(&mut own) {
            Some(Ok(())) => own.begin_in_place().map(Ok),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        }
    }

    /// Sees to it that there is something in the hand. `None`: nothing is there.
    fn fill(&self, own: &mut Own) -> Option<Result<(), RecvError>> {
        if !own.hand.runs.is_empty() {
            return Some(Ok(()));
        }
        let corked = own.corked.take();
        let found = self.take(own);
        match (own.hand.runs.front(), corked) {
            // What was held back leaves with the answer to this one, if that is soon.
            (Some(taken), Some(link)) if own.size.is_cheap() && Arc::ptr_eq(&taken.source, &link) => {
                own.corked = Some(link);
            }
            (_, Some(link)) if link.corked.load(Ordering::SeqCst) => self.mux.0.send(&link),
            _ => {}
        }
        found
    }

    /// Takes from the queues.
    fn take(&self, own: &mut Own) -> Option<Result<(), RecvError>> {
        let shared = &self.mux.0;
        if own.taken > 0 {
            own.size.observe(now().since(own.taken_at).as_nanos() as u64, own.taken);
            own.taken = 0;
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
        // Nobody can take from the hand, and an event loop may not come back for it.
        let want = if self.pollable.get().is_some() { 1 } else { own.size.want_runs() };
        loop {
            match shared.scheduler.take(worker, want, &mut own.hand.runs) {
                Take::Nothing => return None,
                Take::Visit(link) => {
                    let mut me = self.me(own);
                    // Others have their turn before one that always has more.
                    if let Err(error) = shared.poll(&mut me) {
                        return Some(Err(error.into()));
                    }
                    shared.read(&link, &mut me);
                    shared.settle(&link);
                    if self.reports.load(Ordering::Relaxed)
                        && let Some((connection, error)) = shared.take_report()
                    {
                        return Some(Err(RecvError::Connection { connection, error }));
                    }
                }
                Take::Messages => {
                    shared.wake(shared.scheduler.pass_on());
                    own.taken = own.hand.messages();
                    own.taken_at = now();
                    let first = own.hand.runs.front()?;
                    // Those of others who found their messages cheap may be several.
                    if own.taken > 1 || own.size.is_cheap() && first.more {
                        shared.keeper.come_by();
                    }
                    if own.size.is_cheap() && (first.more || own.taken > 1) {
                        own.corked = Some(Arc::clone(&first.source));
                    }
                    return Some(Ok(()));
                }
            }
        }
    }

    /// Waits for messages and leaves the first run of them where it is.
    pub(crate) fn recv_in_place(&self) -> Result<InPlace, RecvError> {
        self.recv_with(None, Self::next_in_place)
    }

    /// What this worker goes through in place.
    pub(crate) fn grant(&self) -> Grant {
        self.lock().hand.grant()
    }

    /// Takes the framed answers to messages of the last grant, and grants a few more. A few, because its answers wait for
    /// the worker to come again. False: there are none left, or the rest was given to others.
    pub(crate) fn grant_more(&self, run: &InPlace, replies: &mut Replies, grant: &mut Grant) -> bool {
        let mut own = self.lock();
        let own = &mut *own;
        // Under the lock that is taken anyway; the keeper sends them if the next messages take long.
        own.hold(replies);
        own.hand.grant_more(run, own.size.grant(), grant, &mut own.receiver.ranges)
    }

    /// How many messages of a grant that the keeper closed are this worker's.
    #[cold]
    pub(crate) fn kept(&self) -> usize {
        self.lock().hand.kept()
    }

    /// Queues what is answered so far.
    pub(crate) fn answer(&self, run: &InPlace, replies: &mut Replies) {
        let mut own = self.lock();
        let own = &mut *own;
        own.hold(replies);
        if own.held_messages > 0 {
            let messages = std::mem::take(&mut own.held_messages);
            self.mux.0.hold_framed(&run.source, &mut own.held, messages);
        }
    }

    /// Messages of a run are done with. Replies that were held back leave with those to the next run, if that is of the
    /// same connection, and else when the worker comes for it.
    pub(crate) fn done_in_place(&self, run: &InPlace, messages: usize, bytes: usize) {
        let mut own = self.lock();
        own.held_for = None;
        if own.held_messages > 0 {
            let messages = std::mem::take(&mut own.held_messages);
            self.mux.0.hold_framed(&run.source, &mut own.held, messages);
        }
        if run.source.corked.load(Ordering::SeqCst) {
            own.corked = Some(Arc::clone(&run.source));
        }
        drop(own);
        if messages > 0 {
            self.mux.0.finish(self.worker.as_ref(), &run.source, messages, bytes, run.class);
        }
    }

    /// The same as dropping the message, for a worker that comes for the next one at once: nobody else is woken for
    /// what can be worked on now.
    pub fn done(&self, mut message: Message) {
        if let Some((link, bytes, class)) = message.take_end() {
            self.mux.0.finish(self.worker.as_ref(), &link, 1, bytes, class);
        }
    }

    /// Gives a message back that was received and not worked on: this or another socket receives it again, before
    /// younger ones.
    pub fn give_back(&self, mut message: Message) {
        let Some(source) = message.link.take() else { return };
        let run = Run::one(message.bytes.clone());
        let taken = Taken { source, message: run, class: message.class, more: false };
        let shared = &self.mux.0;
        shared.wake(shared.scheduler.give_back(std::iter::once(taken)));
    }

    /// Reads connections that have bytes and queues their messages for anybody, without taking one or waiting.
    pub(crate) fn look(&self) -> std::io::Result<()> {
        self.with_me(|shared, me| shared.poll(me))?;
        let shared = &self.mux.0;
        shared.wake(shared.scheduler.rouse());
        self.note_ready();
        Ok(())
    }

    /// Makes [`Self::poll_fd`] readable: something that was received is not worked on.
    pub(crate) fn announce(&self) {
        if let Some(pollable) = self.pollable.get() {
            pollable.ring();
        }
    }

    /// Sends a message on some connection: the next one in turn that takes messages. For clients whose connections all
    /// lead to the same server. Success means that it is queued. Returns the connection.
    pub fn send(&self, body: &[u8], options: SendOptions) -> Result<ConnectionId, SendError> {
        let shared = &self.mux.0;
        let deadline = options.wait.map(|wait| Instant::now() + wait);
        loop {
            if let Some(link) = shared.choose(options.prefer)? {
                let pushed = link.outbox.push_movable(&link.framing, body, options.repeatable);
                if !pushed.map_err(SendError::Unframable)? {
                    // It ended since it was chosen.
                    continue;
                }
                match options.batch {
                    Some(wait) => shared.batched(&link, wait),
                    None => shared.queued(&link, options.more),
                }
                return Ok(link.id);
            }
            let Some((deadline, wait)) = deadline.zip(options.wait) else { return Err(SendError::WouldBlock) };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SendError::TimedOut(wait));
            }
            shared.wait_for_room(left);
        }
    }

    /// Sends a message to this connection. With room for it in the queue this never waits.
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
        self.leave_herd();
        let mut own = self.lock();
        let wakes = shared.scheduler.give_back(own.hand.take_all().into_iter()) + shared.scheduler.yield_all(worker);
        drop(own);
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
        if self.mux.0.scheduler.queued() > 0 || !self.lock().hand.runs.is_empty() {
            pollable.ring();
        }
        self.mux.0.herd.let_go(pollable);
    }

    /// Nothing is there: an event loop will be told. False: something came meanwhile.
    fn fall_asleep(&self) -> bool {
        let Some(pollable) = self.pollable.get() else { return true };
        pollable.hush();
        let shared = &self.mux.0;
        if self.disabled.load(Ordering::SeqCst) {
            return true;
        }
        pollable.settle();
        let (asleep, watch) = shared.herd.sleep(pollable, || shared.scheduler.sleep());
        if watch {
            shared.keeper.look_after_herd();
        }
        if self.disabled.load(Ordering::SeqCst) {
            // Meanwhile, by another thread.
            self.leave_herd();
        }
        asleep
    }

    fn awake(&self) {
        if let Some(pollable) = self.pollable.get()
            && pollable.unsettle()
        {
            let shared = &self.mux.0;
            if shared.herd.come(pollable, || shared.scheduler.awake(0)) {
                shared.keeper.look_after_herd();
            }
        }
    }

    /// Another socket is told of what comes.
    fn let_go(&self) {
        if let Some(pollable) = self.pollable.get() {
            self.mux.0.herd.let_go(pollable);
        }
    }

    /// Its event loop is not told any more of what comes.
    fn leave_herd(&self) {
        if let Some(pollable) = self.pollable.get() {
            let shared = &self.mux.0;
            shared.herd.leave(pollable, || shared.scheduler.awake(0));
        }
    }

    fn with_me<R>(&self, f: impl FnOnce(&Arc<Shared>, &mut Me<'_>) -> R) -> R {
        let mut own = self.lock();
        f(&self.mux.0, &mut self.me(&mut own))
    }

    fn me<'a>(&'a self, own: &'a mut Own) -> Me<'a> {
        // An event loop may not come back soon for what is left of a run.
        let run_len = if self.pollable.get().is_some() { 1 } else { own.size.run_len() };
        Me { worker: self.worker.as_ref(), receiver: &mut own.receiver, run_len }
    }

    fn lock(&self) -> crate::sync::MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first run of a worker's hand, worked on where it lies.
pub(crate) type InPlace = hand::InPlace<Arc<Link>>;

/// Answers of a worker that nobody else sees yet.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    /// With their framing.
    pub(crate) output: Output,
    /// Messages in it.
    pub(crate) messages: u64,
}

impl Own {
    /// Keeps answers until they are queued, with others.
    fn hold(&mut self, replies: &mut Replies) {
        if replies.messages > 0 {
            self.held.add(&mut replies.output, &mut self.spares);
            self.held_messages += std::mem::take(&mut replies.messages);
        }
    }

    /// The next message of the hand.
    fn pop(&mut self) -> Option<Message> {
        let One { source, bytes, class, more } = self.hand.pop(&mut self.receiver.ranges)?;
        let more = more && self.size.is_cheap();
        Some(Message { link: Some(source), bytes, class, more })
    }

    fn begin_in_place(&mut self) -> Option<InPlace> {
        let run = self.hand.begin_in_place()?;
        self.held_for = Some(Arc::clone(&run.source));
        Some(run)
    }

    /// Called by the keeper, from time to time. Takes the hand of a worker that took nothing from it since the last time,
    /// and queues the answers it holds. Whether there is still a hand, or answers.
    pub(crate) fn look(&mut self) -> (bool, Vec<Taken<Arc<Link>>>) {
        let look = self.hand.look();
        if !look.held_up {
            return (look.has_hand || self.held_messages > 0, Vec::new());
        }
        if self.held_messages > 0
            && let Some(link) = &self.held_for
        {
            let messages = std::mem::take(&mut self.held_messages);
            link.mux.hold_framed(link, &mut self.held, messages);
        }
        if look.surprised {
            self.size.surprised();
        }
        (look.has_hand, look.taken)
    }
}

impl Drop for MessageSocket {
    fn drop(&mut self) {
        self.leave_herd();
        let shared = Arc::clone(&self.mux.0);
        let mut own = self.lock();
        let mut wakes = shared.scheduler.give_back(own.hand.take_all().into_iter());
        let corked = own.corked.take();
        drop(own);
        if let Some(link) = corked {
            shared.send(&link);
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
    link: Option<Arc<Link>>,
    bytes: Chunk,
    class: Option<usize>,
    more: bool,
}

impl Message {
    /// A message of a run that is worked on in place, to be kept for longer. It is done with on its own.
    pub(crate) fn of_run(run: &InPlace, range: Range<usize>) -> Self {
        Self { link: Some(Arc::clone(&run.source)), bytes: run.chunk.slice(range), class: run.class, more: false }
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
        self.link.as_ref().map_or(ConnectionId { index: u32::MAX, generation: u32::MAX }, |link| link.id)
    }

    /// Answers. Success means that the answer is queued, whole, behind what was queued for this connection before.
    pub fn reply(&self, body: &[u8]) -> Result<(), SendError> {
        self.reply_with(|tail| tail.extend_from_slice(body))
    }

    /// Answers with what `write` appends to the buffer it is given. It must not touch what is there already.
    pub fn reply_with(&self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), SendError> {
        let Some(link) = &self.link else { return Err(SendError::Gone(self.connection())) };
        link.mux.reply(link, self.more, write)
    }

    /// Answers with bytes that are sent from where they lie.
    pub fn reply_chunk(&self, body: Chunk) -> Result<(), SendError> {
        let Some(link) = &self.link else { return Err(SendError::Gone(self.connection())) };
        link.mux.reply_chunk(link, self.more, body)
    }

    pub(crate) fn link(&self) -> Option<&Arc<Link>> {
        self.link.as_ref()
    }

    fn take_end(&mut self) -> Option<(Arc<Link>, usize, Option<usize>)> {
        Some((self.link.take()?, self.bytes.len(), self.class))
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
        let Some((link, bytes, class)) = self.take_end() else { return };
        if std::thread::panicking() {
            link.mux.end(&link, ConnectionError::WorkerPanicked);
        }
        link.mux.finish(None, &link, 1, bytes, class);
    }
}

impl Shared {
    fn take_report(&self) -> Option<(ConnectionId, ConnectionError)> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// The connection the next message for any goes to. `None`: all have too much queued.
    fn choose(&self, prefer: Option<ConnectionId>) -> Result<Option<Arc<Link>>, SendError> {
        let limits = self.limits();
        let takes = |link: &Arc<Link>| link.error.get().is_none() && link.outbox.bytes() < limits.out_queue_bytes_max;
        if let Some(link) = prefer.and_then(|id| self.find(id)).filter(takes) {
            return Ok(Some(link));
        }
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut alive = false;
        let mut at = 0;
        while let Some((link, count)) = self.nth(first.wrapping_add(at)) {
            if takes(&link) {
                return Ok(Some(link));
            }
            alive |= link.error.get().is_none();
            at += 1;
            if at >= count {
                break;
            }
        }
        if alive { Ok(None) } else { Err(SendError::NotConnected) }
    }

    /// Waits until TCP has room on some connection, for so long at most.
    fn wait_for_room(&self, timeout: Duration) {
        let links = self.all();
        let sockets: Vec<_> = links.iter().filter_map(|link| link.outbox.socket()).collect();
        let mut polled: Vec<_> = sockets.iter().map(|socket| PollFd::new(socket, PollFlags::OUT)).collect();
        let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
        let _ = rustix::event::poll(&mut polled, Some(&timeout));
        for link in links {
            self.send(&link);
        }
    }
}
