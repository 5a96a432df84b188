//! Errors, grouped by the party at fault.
//!
//! A peer's mistakes end up in a [`CloseReason`], each with a counter of its own; what the administrator asked for
//! and this machine cannot do is an [`Error`].

use std::io;

use crate::cpus::CpuSet;
use crate::framing::LengthPrefix;
use crate::listener::ListenAddr;

/// The byte stream, or the framing's own description, makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FramingError {
    /// The peer announced a length no message can have.
    #[error("the length field holds {value}, which no message can have")]
    Absurd {
        /// What the field held.
        value: u64,
    },
    /// The description cannot be used: width not 1, 2, 4 or 8, or a stripped header with bytes before its length.
    #[error("a length prefix is 1, 2, 4 or 8 bytes wide, and only one with offset 0 can be stripped: {0:?}")]
    InvalidPrefix(LengthPrefix),
    /// A header does not end within [`header_bytes_max`](crate::limits::Limits::header_bytes_max).
    #[error("the header does not end within {limit} bytes")]
    HeaderTooLong {
        /// The limit.
        limit: usize,
    },
    /// A service that cuts by itself found what it cannot cut ([`Framing::Custom`](crate::framing::Framing::Custom)).
    #[error("the bytes make no sense to the service")]
    Malformed,
    /// The service wrote a reply that the length field cannot express.
    #[error("a reply of {bytes} bytes does not fit its length field (limit {limit})")]
    ReplyTooLong {
        /// Length of the reply.
        bytes: usize,
        /// Largest value of the field.
        limit: usize,
    },
    /// The peer announced a message shorter than its own header.
    #[error("the length field holds {value}, less than the header of {header_bytes} bytes")]
    ShorterThanHeader {
        /// What the field held.
        value: u64,
        /// Length of the header.
        header_bytes: usize,
    },
}

/// Why a connection ended. Every reason has a counter: nothing is dropped silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CloseReason {
    /// A deferred reply was dropped without an answer (a task panicked, or the service forgot it).
    Abandoned,
    /// A message took longer than `assembly_timeout_ms` from its first byte to its last.
    AssemblyTimeout,
    /// The server is stopping and `drain_timeout_ms` ran out.
    DrainTimeout,
    /// The server is stopping; everything received was answered.
    Drained,
    /// A message of more than `fragments_max` fragments.
    EndlessFragments,
    /// More than `header_bytes_max` bytes arrived and the message's length is still unknown.
    EndlessHeader,
    /// A range of a file in a reply is not there, or could not be read.
    FileRange,
    /// No byte moved for `idle_timeout_ms`.
    IdleTimeout,
    /// A system call on the socket failed: reset, timed out, unreachable.
    Io,
    /// A reply of the kernel half was lost, or TCP did not take it for `send_timeout_ms`.
    KernelHalf,
    /// The bytes do not follow the framing.
    MalformedFrame,
    /// The shard's memory for unfinished messages is used up, and this peer did not send the rest of its own, or sent
    /// more when twice the memory was used.
    MemoryLimit,
    /// A message longer than `message_bytes_max`.
    OversizedMessage,
    /// The service panicked in a message of this connection, or lost the [log](crate::gates) that a reply waited for.
    Panicked,
    /// The peer closed between two messages: the normal end.
    PeerClosed,
    /// The peer closed in the middle of a message.
    PeerClosedMidMessage,
    /// Deferred replies took twice the budget of the connection, `connection_bytes_max`; or a peer that has not told who it
    /// is did not read 8 KiB of replies.
    ReplyLimit,
    /// The peer did not take replies for `send_timeout_ms`.
    SendTimeout,
    /// The service asked for it.
    Service,
    /// The server was stopped at once.
    Stopped,
}

impl CloseReason {
    /// Every reason, in the order of its counter.
    pub const ALL: [Self; 20] = [
        Self::Abandoned,
        Self::AssemblyTimeout,
        Self::DrainTimeout,
        Self::Drained,
        Self::EndlessFragments,
        Self::EndlessHeader,
        Self::FileRange,
        Self::IdleTimeout,
        Self::Io,
        Self::KernelHalf,
        Self::MalformedFrame,
        Self::MemoryLimit,
        Self::OversizedMessage,
        Self::Panicked,
        Self::PeerClosed,
        Self::PeerClosedMidMessage,
        Self::ReplyLimit,
        Self::SendTimeout,
        Self::Service,
        Self::Stopped,
    ];
}

/// The server cannot do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address is used by another program, or by another listener of this one.
    #[error("{addr} is in use; stop the program that listens there or choose another port")]
    AddrInUse {
        /// What could not be bound.
        addr: ListenAddr,
    },
    /// A listener could not be made.
    #[error("cannot listen on {addr}: {step} failed: {source}")]
    Listen {
        /// What could not be listened on.
        addr: ListenAddr,
        /// The step that failed.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The engine does not work on this machine.
    #[error("the {engine} engine does not work here: {step} failed: {source}")]
    Engine {
        /// Name of the engine.
        engine: &'static str,
        /// The step that failed.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The CPU list has no CPU that this process may use.
    #[error("none of the CPUs {asked} may be used by this process (allowed: {allowed})")]
    NoCpu {
        /// What was asked for.
        asked: CpuSet,
        /// The administrator's mask.
        allowed: CpuSet,
    },
    /// The description of a framing cannot be used.
    #[error(transparent)]
    Framing(#[from] FramingError),
    /// The service did not take a datagram socket that it was to serve.
    #[error("the service {service} refuses to serve {addr}; serve another transport, or give it what it lacks")]
    RefusedByService {
        /// Name of the service.
        service: String,
        /// Where the socket is bound.
        addr: ListenAddr,
    },
    /// Memory for the slots could not be had.
    #[error("cannot get {bytes} bytes of memory for receive slots: {source}")]
    Pool {
        /// Size of the region.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The service could not make its state for a shard.
    #[error("the service {service} does not start: {source}")]
    ServiceStart {
        /// Name of the service.
        service: String,
        /// What it said.
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}
