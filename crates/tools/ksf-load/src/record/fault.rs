//! Every way in which a reply can be wrong, of all tools that send messages.

use crate::record::tally::{Tally, kinds};

kinds! {
    /// What was wrong with a reply.
    Fault {
        /// No reply within the time limit.
        Lost = "lost",
        /// The connection ended (end of stream, reset, refused) while replies were outstanding.
        Closed = "closed",
        /// A second reply to the same request.
        Duplicate = "duplicate",
        /// A reply to a request that had been counted as lost.
        Late = "late",
        /// A reply with an identifier that was never sent.
        Unknown = "unknown",
        /// A reply to a request of another connection.
        Misdirected = "misdirected",
        /// The server's queue was full.
        Busy = "busy",
        /// A well-formed reply that is not success.
        Rejected = "rejected",
        /// A reply that cannot be decoded: wrong record mark, length, type or status, trailing or missing bytes.
        Malformed = "malformed",
        /// A reply with other bytes than the request.
        Corrupt = "corrupt",
        /// A datagram of the wrong length.
        Length = "length",
        /// Bytes for which nothing was outstanding.
        Unsolicited = "unsolicited",
    }
}

/// Faults by kind.
pub(crate) type Faults = Tally<Fault>;

impl Fault {
    /// What echotest and rpctest report.
    pub(crate) const OF_CALLS: &[Fault] = &[
        Fault::Lost,
        Fault::Closed,
        Fault::Duplicate,
        Fault::Late,
        Fault::Unknown,
        Fault::Rejected,
        Fault::Malformed,
        Fault::Corrupt,
        Fault::Length,
        Fault::Unsolicited,
    ];

    /// What worktest reports.
    pub(crate) const OF_WORK: &[Fault] = &[
        Fault::Lost,
        Fault::Closed,
        Fault::Duplicate,
        Fault::Late,
        Fault::Unknown,
        Fault::Misdirected,
        Fault::Busy,
        Fault::Malformed,
        Fault::Corrupt,
        Fault::Unsolicited,
    ];
}
