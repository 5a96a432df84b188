//! Every way in which a request can fail or a reply can be wrong, and every way in which a connection can end.

use rustix::io::Errno;

use crate::record::tally::{Tally, kinds};

kinds! {
    /// What was wrong. The names are those of the documented formats; a tool reports the kinds that its protocol has.
    Fault {
        /// No reply within the time limit.
        Lost = "lost",
        /// The connection ended (end of stream, reset, refused) while replies were outstanding.
        Closed = "closed",
        /// A second reply to the same request.
        Duplicate = "duplicate",
        /// A reply to a request that had been counted as lost.
        Late = "late",
        /// A reply with an identifier, or a value with a version, that was never sent.
        Unknown = "unknown",
        /// A reply to a request of another connection, or the value of another key.
        Misdirected = "misdirected",
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
        /// No program listens there (ECONNREFUSED).
        Refused = "refused",
        /// Reset while connecting: the handshake was done and undone before anything was sent.
        ConnectReset = "connect_reset",
        /// Not connected within the time limit.
        ConnectTimeout = "connect_timeout",
        /// No route, or a firewall refuses.
        Unreachable = "unreachable",
        /// No free port for this source and destination (EADDRNOTAVAIL).
        AddressExhausted = "address_exhausted",
        /// This machine has no descriptor or memory for another connection.
        LocalLimit = "local_limit",
        /// Reset while the request was being sent.
        SendReset = "send_reset",
        /// Reset while the response was awaited or received.
        ReceiveReset = "receive_reset",
        /// The response was not whole within the time limit.
        ResponseTimeout = "response_timeout",
        /// The connection was closed before the first byte of the response.
        ClosedUnanswered = "closed_unanswered",
        /// The connection was closed in the middle of the response.
        ClosedEarly = "closed_early",
        /// Closed or reset before the first byte of the response on a connection that had answered before: the race
        /// of keep-alive, after which a client may try again (RFC 9112, section 9.3.1).
        Stale = "stale",
        /// The response is no HTTP, or not of a framing that can be read.
        BadResponse = "bad_response",
        /// A status that was not expected.
        UnexpectedStatus = "unexpected_status",
        /// Not the body that was expected.
        WrongBody = "wrong_body",
        /// No value where a write was acknowledged.
        Missing = "missing",
        /// A value that is older than the last that was acknowledged, or seen.
        Old = "old",
        /// A value whose checksum is wrong.
        Damaged = "damaged",
        /// A value that this program did not write, where a write of it was acknowledged.
        Foreign = "foreign",
        /// What was acknowledged cannot be written down.
        Journal = "journal",
        /// Another error of the system; a note says which.
        Other = "other",
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
        Fault::Malformed,
        Fault::Corrupt,
        Fault::Unsolicited,
    ];

    /// What http reports.
    pub(crate) const OF_HTTP: &[Fault] = &[
        Fault::Refused,
        Fault::ConnectReset,
        Fault::ConnectTimeout,
        Fault::Unreachable,
        Fault::AddressExhausted,
        Fault::LocalLimit,
        Fault::SendReset,
        Fault::ReceiveReset,
        Fault::ResponseTimeout,
        Fault::ClosedUnanswered,
        Fault::ClosedEarly,
        Fault::Stale,
        Fault::BadResponse,
        Fault::UnexpectedStatus,
        Fault::WrongBody,
        Fault::Other,
    ];

    /// What kv reports.
    pub(crate) const OF_KV: &[Fault] = &[
        Fault::Lost,
        Fault::Closed,
        Fault::Missing,
        Fault::Old,
        Fault::Damaged,
        Fault::Foreign,
        Fault::Misdirected,
        Fault::Unknown,
        Fault::Rejected,
        Fault::Malformed,
        Fault::Unsolicited,
        Fault::Journal,
    ];

    /// What an error means while connecting, or making the socket for it.
    pub(crate) fn of_connecting(errno: Errno) -> Fault {
        match errno {
            Errno::CONNREFUSED => Fault::Refused,
            Errno::CONNRESET | Errno::PIPE => Fault::ConnectReset,
            Errno::TIMEDOUT => Fault::ConnectTimeout,
            Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::NETDOWN | Errno::HOSTDOWN | Errno::ACCESS | Errno::PERM => {
                Fault::Unreachable
            }
            // EADDRINUSE comes from bind, and from connect where a port was chosen before.
            Errno::ADDRNOTAVAIL | Errno::ADDRINUSE => Fault::AddressExhausted,
            // EAGAIN comes from connect where a route or neighbour cannot be had, EMFILE and ENFILE from socket.
            Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::AGAIN => Fault::LocalLimit,
            _ => Fault::Other,
        }
    }
}

kinds! {
    /// How an established connection ended.
    End {
        /// The server closed first.
        Server = "by_server",
        /// This side closed first.
        Client = "by_client",
        /// This side reset it (`--close reset`).
        Reset = "by_reset",
        /// It was given up with its requests: see the faults.
        Failed = "failed",
    }
}
