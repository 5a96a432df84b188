//! Counters: one set per shard, written by its thread alone, summed by the reader.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::CloseReason;
use crate::pool::{Pool, PoolUsage, Watch};

macro_rules! counters {
    ($($(#[doc = $help:literal])+ $name:ident,)+) => {
        /// Counters of one shard. Only its thread writes, so an addition is a load and a store without a bus lock.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct Stats {
            $($(#[doc = $help])+ pub $name: Counter,)+
            closed: [Counter; CloseReason::ALL.len()],
            /// Events that one look for work found, least and most, over the last full second.
            pub looks: Looks,
            pool: OnceLock<Watch>,
        }

        impl Stats {
            /// Name, help and value of every counter.
            pub fn read(&self) -> Vec<CounterValue> {
                let mut all = vec![$(CounterValue {
                    name: stringify!($name),
                    help: concat!($($help),+).trim_start(),
                    value: self.$name.value(),
                },)+];
                all.extend(CloseReason::ALL.iter().zip(&self.closed).map(|(reason, counter)| {
                    let (name, help) = close_counter(*reason);
                    CounterValue { name, help, value: counter.value() }
                }));
                all
            }
        }
    };
}

counters! {
    /// Connections accepted.
    accepted,
    /// Connections accepted on the CPU that received them (SO_INCOMING_CPU), where the server was told to look.
    accepted_local,
    /// Times accepting failed for another reason than the next two.
    accept_errors,
    /// Connections closed at once because the process has no file descriptor left.
    refused_no_fd,
    /// Connections closed at once because `connections_max` was reached.
    refused_connections_max,
    /// Connections the service refused.
    refused_by_service,
    /// Connections closed (every reason).
    closed_total,
    /// Bytes received from streams.
    bytes_in,
    /// Bytes sent to streams.
    bytes_out,
    /// Messages handed to a service.
    messages,
    /// Messages that were put together because they did not arrive in one slot.
    messages_assembled,
    /// Bytes that were copied to put messages together; what is received straight into its message is not.
    bytes_copied,
    /// Messages, and requests put aside, that were copied to the heap to be kept: half of the slots were kept already.
    kept_as_copy,
    /// Replies handed to a connection.
    replies,
    /// Replies that came later, from another thread.
    replies_deferred,
    /// Deferred replies whose connection was gone.
    replies_too_late,
    /// Replies dropped because they do not fit their framing.
    replies_unframable,
    /// Times a connection, or a socket of datagrams, was no longer read because too many of its replies were waiting or due.
    reads_paused,
    /// Connections reset because their peer sent more than `linger_bytes_max` after the close.
    lingers_cut,
    /// Times a connection was not read because memory for unfinished messages was short.
    memory_waits,
    /// Times a message waited because its reply might have been longer than what was left of `shard_bytes_max`.
    reply_waits,
    /// Times no connection was read, but a few, because more had arrived than is kept.
    memory_stops,
    /// Calls of a service that panicked; their connection was closed.
    panics,
    /// Logs that will not be released any more, because their service panicked outside of a message.
    logs_lost,
    /// Times no slot was free to receive into.
    slots_exhausted,
    /// Tries to send for which the kernel had no memory.
    sends_without_memory,
    /// Datagrams received.
    datagrams_in,
    /// Datagrams sent.
    datagrams_out,
    /// Datagrams from a datagram socket of this server, dropped: their sender was forged, and a reply would come back.
    datagrams_from_self,
    /// Datagrams longer than a slot or than `message_bytes_max`, dropped.
    datagrams_oversized,
    /// Replies to datagrams the kernel refused to send, or for which the queue was full.
    datagrams_unsent,
    /// Datagrams dropped because `deferred_datagrams_max` replies were outstanding.
    datagrams_refused_deferred_max,
    /// Datagrams dropped because no more were handed over, and the memory for what is put aside meanwhile was used up.
    datagrams_refused_memory,
    /// Datagrams dropped because the queue of the threads that may block was full.
    datagrams_refused_tasks,
    /// Datagrams whose deferred reply was dropped without an answer.
    datagrams_abandoned,
    /// Tasks that panicked; their connection was closed.
    tasks_panicked,
    /// Threads for tasks that the system refused to start; where there was no other one, the tasks wait until it does.
    task_threads_refused,
    /// Outgoing connections that were dialed.
    dialed,
    /// Outgoing connections that could not be made.
    dials_failed,
    /// Times a kept outgoing connection was used again.
    outgoing_reused,
    /// Bytes received from outgoing connections.
    outgoing_bytes_in,
    /// Bytes sent to outgoing connections.
    outgoing_bytes_out,
    /// Times the shard looked for work.
    turns,
    /// Times it found none: a wait that was interrupted, or that had an end.
    turns_empty,
    /// Times it looked again and again before it would sleep.
    spins,
    /// Those that found nothing, so that it slept after all.
    spins_missed,
    /// What it found: bytes, ends, connections, wake-ups.
    events,
    /// Connections looked at by the clock: a time limit of theirs was over, or might have been.
    deadlines_checked,
    /// Operations on files that were begun, by services and to read for replies.
    file_ops,
    /// Operations on files that neither ended nor could be cancelled when the server stopped: they keep their memory.
    file_ops_left,
    /// System calls made by the engine on the path of messages.
    syscalls,
    /// Times user space waited for TCP to take what the kernel half had queued.
    assist_waits,
    /// Times a connection was given to the kernel half.
    assist_settled,
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. To be called by the shard's thread alone.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The count now.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How much the looks for work of a second found.
#[derive(Debug, Default)]
pub struct Looks {
    least: AtomicU64,
    most: AtomicU64,
}

impl Looks {
    pub(crate) fn publish(&self, least: u64, most: u64) {
        self.least.store(least, Ordering::Relaxed);
        self.most.store(most, Ordering::Relaxed);
    }

    /// Events of the poorest and of the richest look.
    pub fn range(&self) -> (u64, u64) {
        (self.least.load(Ordering::Relaxed), self.most.load(Ordering::Relaxed))
    }
}

/// A counter as read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterValue {
    /// Name, in snake case.
    pub name: &'static str,
    /// One sentence for people.
    pub help: &'static str,
    /// Sum over all shards.
    pub value: u64,
}

impl Stats {
    /// How the slots of the shard are used now.
    pub fn slots(&self) -> PoolUsage {
        self.pool.get().map(Watch::usage).unwrap_or_default()
    }

    pub(crate) fn watch(&self, pool: &Pool) {
        // Once: a shard opens one pool.
        let _ = self.pool.set(pool.watch());
    }

    /// Counts a closed connection.
    pub fn count_close(&self, reason: CloseReason) {
        self.add_closes(reason, 1);
    }

    /// Counts connections that others closed.
    pub fn add_closes(&self, reason: CloseReason, closes: u64) {
        self.closed_total.add(closes);
        if let Some(at) = CloseReason::ALL.iter().position(|known| *known == reason) {
            self.closed[at].add(closes);
        }
    }

    /// How many connections were closed for `reason`.
    pub fn closed_for(&self, reason: CloseReason) -> u64 {
        let at = CloseReason::ALL.iter().position(|known| *known == reason);
        at.map_or(0, |at| self.closed[at].value())
    }
}

/// Sums the counters of all shards.
pub fn sum<'a>(shards: impl IntoIterator<Item = &'a Stats>) -> Vec<CounterValue> {
    let mut shards = shards.into_iter();
    let mut sum = shards.next().map(Stats::read).unwrap_or_else(|| Stats::default().read());
    for shard in shards {
        for (total, one) in sum.iter_mut().zip(shard.read()) {
            total.value += one.value;
        }
    }
    sum
}

fn close_counter(reason: CloseReason) -> (&'static str, &'static str) {
    match reason {
        CloseReason::Abandoned => ("closed_abandoned", "Closed: a deferred reply was dropped without an answer."),
        CloseReason::AssemblyTimeout => ("closed_assembly_timeout", "Closed: a message took too long to arrive."),
        CloseReason::DrainTimeout => ("closed_drain_timeout", "Closed: the server stopped and could not wait longer."),
        CloseReason::Drained => ("closed_drained", "Closed: the server stopped; everything received was answered."),
        CloseReason::EndlessFragments => ("closed_endless_fragments", "Closed: a message of too many fragments."),
        CloseReason::EndlessHeader => ("closed_endless_header", "Closed: the header of a message did not end."),
        CloseReason::FileRange => {
            ("closed_file_range", "Closed: a range of a file in a reply is not there, or could not be read.")
        }
        CloseReason::IdleTimeout => ("closed_idle_timeout", "Closed: no byte moved for too long."),
        CloseReason::Io => ("closed_io", "Closed: the socket failed (reset, timed out, unreachable)."),
        CloseReason::KernelHalf => ("closed_kernel_half", "Closed: a reply of the kernel half was lost or stuck."),
        CloseReason::MalformedFrame => ("closed_malformed_frame", "Closed: the bytes do not follow the framing."),
        CloseReason::MemoryLimit => {
            ("closed_memory_limit", "Closed: memory for unfinished messages was used up, and this peer did not go on.")
        }
        CloseReason::OversizedMessage => ("closed_oversized_message", "Closed: a message longer than the limit."),
        CloseReason::Panicked => {
            ("closed_panicked", "Closed: the service panicked in a message, or lost the log that a reply waited for.")
        }
        CloseReason::PeerClosed => ("closed_by_peer", "Closed by the peer between two messages."),
        CloseReason::PeerClosedMidMessage => ("closed_by_peer_mid_message", "Closed by the peer inside a message."),
        CloseReason::ReplyLimit => {
            ("closed_reply_limit", "Closed: deferred replies took twice the memory that a connection may have.")
        }
        CloseReason::SendTimeout => ("closed_send_timeout", "Closed: the peer did not take its replies."),
        CloseReason::Stopped => ("closed_stopped", "Closed: the server was stopped at once."),
        CloseReason::Service => ("closed_by_service", "Closed: the service asked for it."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_shards_by_name() {
        let (one, two) = (Stats::default(), Stats::default());
        one.messages.add(2);
        two.messages.add(3);
        two.count_close(CloseReason::Io);
        let all = sum([&one, &two]);
        let value = |name| all.iter().find(|counter| counter.name == name).map(|counter| counter.value);
        assert_eq!(value("messages"), Some(5));
        assert_eq!(value("closed_io"), Some(1));
        assert_eq!(value("closed_total"), Some(1));
        assert!(all.iter().all(|counter| counter.help.ends_with('.') && !counter.help.starts_with(' ')));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = Stats::default().read().iter().map(|counter| counter.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
