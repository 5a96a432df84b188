//! The multiplexor's scheduling policy with a simulated clock: 2 to 64 workers on paper.
//!
//! [`SimPolicy::Ours`] runs the scheduler of `ksf-mux` itself ([`ksf_mux::scheduler`]), with workers that read, take,
//! sleep and wake as its message sockets do. The others are what it is compared with. All get the same [`Load`], and
//! the same seed gives the same result.
//!
//! What is modelled, the results, and what they do not say: `docs/scheduling.md`.

#![forbid(unsafe_code)]

mod clock;
mod load;
mod ours;
mod peers;
mod summary;

pub use load::{Arrivals, Job, Load, ServiceTime, SimSegment};
pub use summary::Summary;

/// Who works on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimPolicy {
    /// The multiplexor.
    Ours {
        /// Messages of a connection one at a time, in order.
        ordered: bool,
        /// How many long messages may be worked on at once.
        long_cap: Option<usize>,
    },
    /// One queue, first come first served, and nothing costs time but the work: no policy that cannot tell short
    /// messages from long ones is better for all loads.
    Ideal,
    /// A thread per worker with an event loop; connection `n` belongs to thread `n % workers`.
    Pinned,
    /// AF_KCM: each segment goes whole to the next socket in turn whose buffer is not full, whether its worker is busy
    /// or not.
    Kcm,
}

impl SimPolicy {
    /// The multiplexor as it is set up by default.
    pub const OURS: Self = Self::Ours { ordered: false, long_cap: None };
}

/// What the machinery costs. The ideal queue pays nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// From a wake-up to the moment the woken thread runs.
    pub wake_ns: u64,
    /// A look into the queues.
    pub queue_ns: u64,
    /// A system call: a read of a chunk, a look for events, a wake-up sent.
    pub call_ns: u64,
}

impl Costs {
    /// A current server with mitigations on.
    pub const TYPICAL: Self = Self { wake_ns: 5_000, queue_ns: 100, call_ns: 1_000 };
    /// Machinery without cost: what remains is the policy.
    pub const NONE: Self = Self { wake_ns: 0, queue_ns: 0, call_ns: 0 };
}

/// When a message was worked on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// A worker began.
    pub began_ns: u64,
    /// It was done.
    pub done_ns: u64,
}

/// Plays a load: when each of its messages was worked on, in the order of [`Arrivals::jobs`].
///
/// # Panics
/// If a message was lost or worked on twice.
pub fn simulate(policy: SimPolicy, workers: usize, costs: Costs, arrivals: &Arrivals) -> Vec<Span> {
    let mut record = Record { spans: vec![None; arrivals.jobs.len()] };
    match policy {
        SimPolicy::Ours { ordered, long_cap } => ours::play(workers, costs, arrivals, ordered, long_cap, &mut record),
        SimPolicy::Ideal => peers::ideal(workers, arrivals, &mut record),
        SimPolicy::Pinned => peers::pinned(workers, costs, arrivals, &mut record),
        SimPolicy::Kcm => peers::kcm(workers, costs, arrivals, &mut record),
    }
    let span = |(job, span): (usize, Option<Span>)| span.unwrap_or_else(|| panic!("message {job} was lost"));
    record.spans.into_iter().enumerate().map(span).collect()
}

struct Record {
    spans: Vec<Option<Span>>,
}

impl Record {
    /// Notes that a worker begins with a message. Returns when it will be done.
    fn begin(&mut self, job: usize, now_ns: u64, arrivals: &Arrivals) -> u64 {
        let done_ns = now_ns + arrivals.jobs[job].service_ns;
        let before = self.spans[job].replace(Span { began_ns: now_ns, done_ns });
        assert!(before.is_none(), "message {job} was worked on twice");
        done_ns
    }
}
