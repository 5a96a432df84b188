//! One attached connection.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ksf::Order;
use ksf::limits::Limits;
use ksf::service::EXPECTED_REPLY_BYTES;

use crate::batch::MessageBatch;
use crate::budget::Budget;
use crate::combining_lock::CombiningLock;
use crate::error::ConnectionError;
use crate::input::{Input, InputRoom};
use crate::mux::{ConnectionId, Pressure, ReplyTurn, Shared};
use crate::options::MessageFraming;
use crate::out_queue::{OutQueue, Room, SendProgress};
use crate::scheduler::{OrderedQueue, Parked, Source};
use crate::sync::{Arc, Mutex};

pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    /// The multiplexor. It holds the conn too, until the connection is detached.
    pub(crate) mux: Arc<Shared>,
    pub(crate) framing: MessageFraming,
    /// Limits of its own, where it has some. Those of the multiplexor as a whole hold nevertheless.
    own_limits: Option<Arc<Limits>>,
    ordered: Option<OrderedQueue<MessageBatch>>,
    /// Messages that wait for its next turn, or until the peer takes what it is owed.
    parked: Parked<MessageBatch>,
    pub(crate) reader: CombiningLock<Reader>,
    pub(crate) out_queue: OutQueue<OwnedFd>,
    /// Bytes and number of its messages that are not done with.
    pub(crate) waiting_bytes: AtomicUsize,
    pub(crate) waiting_messages: AtomicUsize,
    /// Memory for what has not arrived in full.
    pub(crate) unfinished_bytes: AtomicUsize,
    /// What replies in work and answers that come later will need, as far as that is known.
    pub(crate) reserved_bytes: AtomicUsize,
    /// What one of them is assumed to need: the longest so far.
    expected_bytes: AtomicUsize,
    /// It is not read because too much of it waits.
    pub(crate) paused: AtomicBool,
    /// The peer's end was announced: reads go on until it is met.
    pub(crate) hangup: AtomicBool,
    /// Whether it is read although memory is short, and when it brought bytes last since then.
    pub(crate) pressure: Pressure,
    /// The same where there is no room for its messages and their replies.
    pub(crate) room: Pressure,
    /// Whether its next message waits for room for its reply.
    pub(crate) reply_turn: ReplyTurn,
    pub(crate) input_at: AtomicU64,
    /// Something is queued that was not tried to send yet.
    pub(crate) corked: AtomicBool,
    /// The timer thread saw that.
    pub(crate) corked_seen: AtomicBool,
    /// Messages wait for others until then (ns of the monotonic clock); 0: none does.
    pub(crate) batch_until_ns: AtomicU64,
    /// The timer thread has it on its list.
    pub(crate) listed: AtomicBool,
    pub(crate) progress: Mutex<SendProgress>,
    pub(crate) error: OnceLock<ConnectionError>,
    /// Readers were told of the error.
    pub(crate) reported: AtomicBool,
    pub(crate) detached: AtomicBool,
    pub(crate) attachment: OnceLock<Attachment>,
    pub(crate) counts: Counts,
    /// When bytes moved last, on the monotonic clock.
    pub(crate) active_at: AtomicU64,
    /// When bytes of the peer were read last.
    pub(crate) read_at: AtomicU64,
}

/// What goes with a connection at the wish of the caller that attached it.
pub(crate) struct Attachment {
    /// Its state for this connection.
    pub(crate) state: Box<dyn Any + Send + Sync>,
    /// Told once, when the connection ends.
    pub(crate) ended: fn(&Connection, &ConnectionError),
}

/// Counters of one connection, under the names AF_KCM gives them.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) rx_messages: AtomicU64,
    pub(crate) rx_bytes: AtomicU64,
    pub(crate) tx_messages: AtomicU64,
    pub(crate) tx_bytes: AtomicU64,
    /// Chunks after which the length of a message was unknown still.
    pub(crate) rx_need_more: AtomicU64,
}

impl Counts {
    /// Adds those of a connection that is detached.
    pub(crate) fn add(&self, other: &Self) {
        for (sum, count) in [
            (&self.rx_messages, &other.rx_messages),
            (&self.rx_bytes, &other.rx_bytes),
            (&self.tx_messages, &other.tx_messages),
            (&self.tx_bytes, &other.tx_bytes),
            (&self.rx_need_more, &other.rx_need_more),
        ] {
            sum.fetch_add(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// The receiving side.
pub(crate) struct Reader {
    pub(crate) socket: Option<Arc<OwnedFd>>,
    pub(crate) input: Input,
}

impl Connection {
    pub(crate) fn new(
        id: ConnectionId,
        mux: Arc<Shared>,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: Order,
        own_limits: Option<Limits>,
    ) -> Self {
        let socket = Arc::new(socket);
        Self {
            id,
            out_queue: OutQueue::new(Arc::clone(&socket), Arc::clone(&mux.memory)),
            mux,
            ordered: (ordering == Order::Requests).then(OrderedQueue::default),
            reader: CombiningLock::new(Reader { socket: Some(Arc::clone(&socket)), input: Input::new() }),
            framing,
            own_limits: own_limits.map(Arc::new),
            waiting_bytes: AtomicUsize::new(0),
            waiting_messages: AtomicUsize::new(0),
            parked: Parked::default(),
            unfinished_bytes: AtomicUsize::new(0),
            reserved_bytes: AtomicUsize::new(0),
            expected_bytes: AtomicUsize::new(EXPECTED_REPLY_BYTES),
            paused: AtomicBool::new(false),
            hangup: AtomicBool::new(false),
            pressure: Pressure::default(),
            room: Pressure::default(),
            reply_turn: ReplyTurn::default(),
            input_at: AtomicU64::new(0),
            corked: AtomicBool::new(false),
            corked_seen: AtomicBool::new(false),
            batch_until_ns: AtomicU64::new(0),
            listed: AtomicBool::new(false),
            progress: Mutex::default(),
            error: OnceLock::new(),
            reported: AtomicBool::new(false),
            detached: AtomicBool::new(false),
            attachment: OnceLock::new(),
            counts: Counts::default(),
            active_at: AtomicU64::new(crate::mux::now().0),
            read_at: AtomicU64::new(crate::mux::now().0),
        }
    }

    /// What its peer may cost.
    pub(crate) fn limits(&self) -> Arc<Limits> {
        self.own_limits.clone().unwrap_or_else(|| self.mux.limits())
    }

    /// Those of its limits that are asked for with each message.
    fn budget(&self) -> Budget {
        self.own_limits.as_ref().map_or_else(|| self.mux.budget.load(), |limits| Budget::of(limits))
    }

    /// The memory for what has not arrived in full.
    pub(crate) fn input_room(&self) -> InputRoom<'_> {
        InputRoom {
            own_bytes: &self.unfinished_bytes,
            all_bytes: &self.mux.input_bytes,
            all_bytes_max: self.mux.budget.input_bytes_max(),
            grants_message: self.pressure.has_pass(),
        }
    }

    /// True while the rest of a message is to come.
    pub(crate) fn is_amid_a_message(&self) -> bool {
        self.awaited_bytes() > 0
    }

    /// Memory for a message whose rest is to come.
    pub(crate) fn awaited_bytes(&self) -> usize {
        if self.error.get().is_some() { 0 } else { self.unfinished_bytes.load(Ordering::SeqCst) }
    }

    /// Bytes its peer is owed: replies that are queued, and what answers that come later will need.
    pub(crate) fn owed_bytes(&self) -> usize {
        self.out_queue.bytes() + self.reserved_bytes.load(Ordering::SeqCst)
    }

    /// True while more of it may not be received. An unfinished message alone never makes it so.
    pub(crate) fn is_full(&self) -> bool {
        let budget = self.budget();
        let waiting = self.waiting_messages.load(Ordering::SeqCst);
        let used = self.waiting_bytes.load(Ordering::SeqCst) + self.owed_bytes();
        waiting >= budget.messages_max
            || self.out_queue.bytes() >= budget.out_queue_bytes_max
            || (used > 0 && used + self.unfinished_bytes.load(Ordering::SeqCst) >= budget.bytes_max)
            || (waiting > 0 || used > 0) && self.mux.is_full()
    }

    /// True while none of its messages waits or is in work, and its peer is owed nothing.
    pub(crate) fn uses_no_room(&self) -> bool {
        self.waiting_messages.load(Ordering::SeqCst) == 0 && self.owed_bytes() == 0
    }

    /// True if its out-queue takes a message of this kind.
    pub(crate) fn takes(&self, admission: Admission) -> bool {
        self.queue_limit(admission) > self.out_queue.bytes()
    }

    /// Condition of its out-queue for this kind of message.
    pub(crate) fn room(&self, admission: Admission) -> Room {
        match admission {
            Admission::Reserved(bytes) => Room::Reserved(bytes),
            _ => Room::Below(self.queue_limit(admission)),
        }
    }

    /// Bytes in its out-queue at which this kind of message is refused.
    pub(crate) fn queue_limit(&self, admission: Admission) -> usize {
        let budget = self.budget();
        match admission {
            Admission::Reserved(_) => usize::MAX,
            Admission::Answer => budget.bytes_max.max(budget.out_queue_bytes_max),
            // The first one is taken also when the multiplexor's budget is used up.
            Admission::Send if self.mux.is_full() => 1,
            Admission::Send => budget.out_queue_bytes_max,
        }
    }

    /// The limit, if it is owed so much that it must end: answers were longer than those before them.
    pub(crate) fn reply_limit(&self) -> Option<usize> {
        let limit = self.queue_limit(Admission::Answer).saturating_mul(2);
        (self.out_queue.bytes() > limit).then_some(limit)
    }

    /// What an answer that comes later is assumed to need.
    pub(crate) fn expected_bytes(&self) -> usize {
        self.expected_bytes.load(Ordering::Relaxed)
    }

    /// Counts what answers that come later will need.
    pub(crate) fn reserve(&self, bytes: usize) {
        self.mux.memory.fetch_add(bytes, Ordering::SeqCst);
        self.reserve_counted(bytes);
    }

    /// The same for bytes that the multiplexor's sum has already.
    pub(crate) fn reserve_counted(&self, bytes: usize) {
        self.reserved_bytes.fetch_add(bytes, Ordering::SeqCst);
    }

    /// An answer has come that was so long.
    pub(crate) fn expect(&self, bytes: usize) {
        self.expected_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Nothing will need these bytes.
    pub(crate) fn unreserve(&self, bytes: usize) {
        self.replace_reserved(bytes);
        self.mux.memory.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// A message has the place of these bytes in the multiplexor's sum.
    pub(crate) fn replace_reserved(&self, bytes: usize) {
        self.reserved_bytes.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// True if nothing that is queued for it will be sent.
    pub(crate) fn is_gone(&self) -> bool {
        self.detached.load(Ordering::SeqCst) || self.out_queue.has_failed()
    }

    /// True when nothing of it is left to do.
    pub(crate) fn is_done(&self) -> bool {
        self.error.get().is_some() && self.waiting_messages.load(Ordering::SeqCst) == 0 && self.out_queue.bytes() == 0
    }
}

/// Which messages an out-queue takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Every one: a service cannot be told to come again. Its connection is throttled instead. `usize`: bytes that were reserved for
    /// the message.
    Reserved(usize),
    /// Up to the budget of the connection: it answers a message in work.
    Answer,
    /// Up to the limit for the out-queue.
    Send,
}

impl Source for Arc<Connection> {
    type Message = MessageBatch;

    fn key(&self) -> usize {
        Self::as_ptr(self).addr()
    }

    fn ordered_queue(&self) -> Option<&OrderedQueue<MessageBatch>> {
        self.ordered.as_ref()
    }

    fn class(&self, message: &MessageBatch) -> Option<usize> {
        // Where there are classes each message travels alone.
        self.mux.options.classify.as_ref()?(message.chunk())
    }

    fn is_throttled(&self) -> bool {
        if self.reply_turn.waits() {
            return true;
        }
        let owed = self.owed_bytes();
        if owed == 0 {
            return false;
        }
        let budget = self.budget();
        self.out_queue.bytes() >= budget.out_queue_bytes_max
            || owed >= budget.bytes_max
            || self.mux.is_full() && !self.reply_turn.has_grant()
    }

    fn parked(&self) -> &Parked<MessageBatch> {
        &self.parked
    }
}
