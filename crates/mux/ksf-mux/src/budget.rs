//! What connections may use of memory, in a form that is read with each message.
//!
//! A connection uses memory for requests (in part, queued, in work), for what answers that come later will need, and for
//! replies that are queued. All of that is one sum with a limit, [`Limits::connection_bytes_max`], and the sum of all
//! connections, without what is in part, has another, [`Limits::shard_bytes_max`]. What happens at a limit:
//!
//! | what is used up | what stops |
//! |---|---|
//! | a connection's budget | it is not read; its messages are handed over only if replies are not the cause |
//! | its out-queue's limit | the same; and a message that answers none in work is refused |
//! | the multiplexor's budget | the same for connections that use some of it, until their own share is gone |
//! | | others go on with short messages, and a few at a time with long ones (`mux/pressure.rs`) |
//! | | requests with long replies of services wait for room, but for one (`mux/reply_room.rs`) |
//! | the memory for messages in part | those that have one are not read, but for a few at a time (`mux/pressure.rs`) |
//!
//! So at each limit a message in work and its reply come on top, and nothing waits for itself: replies go when the peer
//! reads, or when the connection ends for want of that, and requests go when workers answer.

use std::sync::atomic::{AtomicUsize, Ordering};

use ksf::limits::Limits;

/// Limits of one connection that are asked for with each message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) bytes_max: usize,
    pub(crate) messages_max: usize,
    pub(crate) out_queue_bytes_max: usize,
}

impl Budget {
    pub(crate) fn of(limits: &Limits) -> Self {
        Self {
            bytes_max: limits.connection_bytes_max,
            messages_max: limits.deferred_max as usize,
            out_queue_bytes_max: limits.out_queue_bytes_max,
        }
    }
}

/// The same for connections that have none of their own, and the budget of all. Read without a lock.
#[derive(Debug)]
pub(crate) struct SharedBudget {
    bytes_max: AtomicUsize,
    messages_max: AtomicUsize,
    out_queue_bytes_max: AtomicUsize,
    shard_bytes_max: AtomicUsize,
    input_bytes_max: AtomicUsize,
}

impl SharedBudget {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            bytes_max: limits.connection_bytes_max.into(),
            messages_max: (limits.deferred_max as usize).into(),
            out_queue_bytes_max: limits.out_queue_bytes_max.into(),
            shard_bytes_max: limits.shard_bytes_max.into(),
            input_bytes_max: limits.assembly_bytes_max.into(),
        }
    }

    /// Replaces them. A thread that reads meanwhile may see some of the old ones.
    pub(crate) fn set(&self, limits: &Limits) {
        self.bytes_max.store(limits.connection_bytes_max, Ordering::Relaxed);
        self.messages_max.store(limits.deferred_max as usize, Ordering::Relaxed);
        self.out_queue_bytes_max.store(limits.out_queue_bytes_max, Ordering::Relaxed);
        self.shard_bytes_max.store(limits.shard_bytes_max, Ordering::Relaxed);
        self.input_bytes_max.store(limits.assembly_bytes_max, Ordering::Relaxed);
    }

    pub(crate) fn load(&self) -> Budget {
        Budget {
            bytes_max: self.bytes_max.load(Ordering::Relaxed),
            messages_max: self.messages_max.load(Ordering::Relaxed),
            out_queue_bytes_max: self.out_queue_bytes_max.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn shard_bytes_max(&self) -> usize {
        self.shard_bytes_max.load(Ordering::Relaxed)
    }

    pub(crate) fn input_bytes_max(&self) -> usize {
        self.input_bytes_max.load(Ordering::Relaxed)
    }
}
