//! Every way in which a request can fail, and every way in which a connection can end.

use rustix::io::Errno;

use crate::record::tally::kinds;

kinds! {
    /// Why a request has no right answer.
    Failure {
        /// Nobody listens there (ECONNREFUSED).
        Refused = "refused",
        /// Reset while connecting: the handshake was done and undone before anything was sent.
        ConnectReset = "connect_reset",
        /// Not connected within the time limit.
        ConnectTimeout = "connect_timeout",
        /// No way there, or a firewall says no.
        Unreachable = "unreachable",
        /// No free port for this source and destination (EADDRNOTAVAIL).
        AddressExhausted = "address_exhausted",
        /// This machine has no descriptor or memory for another connection.
        LocalLimit = "local_limit",
        /// Reset while the request was being sent.
        SendReset = "send_reset",
        /// Reset while the answer was awaited or received.
        ReceiveReset = "receive_reset",
        /// The answer was not whole within the time limit.
        ResponseTimeout = "response_timeout",
        /// The connection was closed before the first byte of the answer.
        ClosedUnanswered = "closed_unanswered",
        /// The connection was closed in the middle of the answer.
        ClosedEarly = "closed_early",
        /// Closed or reset before the first byte of the answer on a connection that had answered before: the race of
        /// keep-alive, after which a client may try again (RFC 9112, section 9.3.1).
        Stale = "stale",
        /// The answer is no HTTP, or not of a framing that can be read.
        BadResponse = "bad_response",
        /// A status that was not expected.
        UnexpectedStatus = "unexpected_status",
        /// Not the body that was expected.
        WrongBody = "wrong_body",
        /// Another error of the system; a note says which.
        Other = "other",
    }
}

impl Failure {
    /// What an error means while connecting, or making the socket for it.
    pub(crate) fn of_connecting(errno: Errno) -> Failure {
        match errno {
            Errno::CONNREFUSED => Failure::Refused,
            Errno::CONNRESET | Errno::PIPE => Failure::ConnectReset,
            Errno::TIMEDOUT => Failure::ConnectTimeout,
            Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::NETDOWN | Errno::HOSTDOWN | Errno::ACCESS | Errno::PERM => {
                Failure::Unreachable
            }
            // EADDRINUSE comes from bind, and from connect where a port was chosen before.
            Errno::ADDRNOTAVAIL | Errno::ADDRINUSE => Failure::AddressExhausted,
            // EAGAIN comes from connect where a route or neighbour cannot be had, EMFILE and ENFILE from socket.
            Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::AGAIN => Failure::LocalLimit,
            _ => Failure::Other,
        }
    }
}

kinds! {
    /// How an established connection ended.
    End {
        /// The server closed first.
        Server = "by_server",
        /// We closed first.
        Client = "by_client",
        /// We reset it (`--close reset`).
        Reset = "by_reset",
        /// It was given up with its request: see the failures.
        Failed = "failed",
    }
}
