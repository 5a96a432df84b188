//! Counters per worker: each shard writes its own.

use ksf::outgoing::Failure;
use ksf::stats::Counter;

macro_rules! worker_counts {
    ($($(#[doc = $help:literal])+ $name:ident,)+) => {
        /// What one shard counted. Only its thread writes.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct WorkerCounts {
            $($(#[doc = $help])+ pub $name: Counter,)+
        }

        impl WorkerCounts {
            /// Name and value of every counter.
            pub fn read(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.value()),)+]
            }
        }
    };
}

worker_counts! {
    /// Requests whose head was read.
    requests,
    /// Refused: malformed (400, 405, 413, 417, 501, 505).
    bad_requests,
    /// Refused: the head was too long (431).
    oversized_heads,
    /// Refused: the head, or a body that a backend waited for, did not arrive in time (408).
    slow_heads,
    /// Clients that left before their answer was complete.
    clients_gone,
    /// Requests that were sent to another backend, or on another connection, because the first did not answer.
    repeated,
    /// Backends that refused the connection.
    backend_refused,
    /// Backends to which there is no way.
    backend_unreachable,
    /// Backends that did not take the connection in time.
    backend_connect_timeouts,
    /// Backends that reset the connection, or ended it without an answer.
    backend_resets,
    /// Backends that did not answer in time.
    backend_silent,
    /// Backends that did not take the request in time.
    backend_not_taken,
    /// Answers that make no sense.
    backend_malformed,
    /// Answers that ended early.
    backend_truncated,
    /// Backends that could not be asked, for want of descriptors or memory.
    no_resources,
    /// Answered with 502: no backend answered.
    bad_gateway,
    /// Answered with 503: this machine lacks something.
    unavailable,
    /// Answered with 504: the backend took too long.
    gateway_timeout,
}

impl WorkerCounts {
    pub(super) fn count_failure(&self, failure: Failure) {
        let counter = match failure {
            Failure::Refused => &self.backend_refused,
            Failure::ConnectTimeout => &self.backend_connect_timeouts,
            Failure::Reset => &self.backend_resets,
            Failure::Silent => &self.backend_silent,
            Failure::NotTaken => &self.backend_not_taken,
            Failure::NoResources => &self.no_resources,
            _ => &self.backend_unreachable,
        };
        counter.add(1);
    }

    pub(super) fn count_refusal(&self, status: u16) {
        let counter = match status {
            408 => &self.slow_heads,
            431 => &self.oversized_heads,
            502 => &self.bad_gateway,
            503 => &self.unavailable,
            504 => &self.gateway_timeout,
            _ => &self.bad_requests,
        };
        counter.add(1);
    }
}

/// What all shards of a server counted.
#[derive(Debug)]
pub struct Counts {
    workers: Box<[WorkerCounts]>,
}

impl Counts {
    pub(super) fn new(shards: usize) -> Self {
        Self { workers: (0..shards.max(1)).map(|_| WorkerCounts::default()).collect() }
    }

    /// The counters of one shard. More shards than said share the last ones.
    pub(super) fn of(&self, shard: usize) -> &WorkerCounts {
        &self.workers[shard.min(self.workers.len() - 1)]
    }

    /// The counters of each shard.
    pub fn workers(&self) -> &[WorkerCounts] {
        &self.workers
    }

    /// Sums over all shards.
    pub(super) fn sum(&self) -> Vec<(&'static str, u64)> {
        let mut sums = WorkerCounts::default().read();
        for worker in &self.workers {
            for (sum, (_, value)) in sums.iter_mut().zip(worker.read()) {
                sum.1 += value;
            }
        }
        sums
    }
}
