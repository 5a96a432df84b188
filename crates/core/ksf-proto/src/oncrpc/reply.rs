//! Replies: written by servers, read by clients (RFC 5531 section 9).

use super::{AuthStat, MSG_REPLY, OpaqueAuth};
use crate::xdr::{XdrError, XdrReader, XdrWrite};

/// Bytes before the results of an accepted call whose verifier is AUTH_NONE.
pub const ACCEPTED_HEADER_BYTES: usize = 24;

const MSG_ACCEPTED: u32 = 0;
const MSG_DENIED: u32 = 1;

const SUCCESS: u32 = 0;
const PROG_UNAVAIL: u32 = 1;
const PROG_MISMATCH: u32 = 2;
const PROC_UNAVAIL: u32 = 3;
const GARBAGE_ARGS: u32 = 4;
const SYSTEM_ERR: u32 = 5;

const RPC_MISMATCH: u32 = 0;
const AUTH_ERROR: u32 = 1;

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStatus {
    /// RPC version and credential were good.
    Accepted(Accepted),
    /// They were not.
    Denied(Denied),
}

/// `accept_stat`, with what it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// The procedure ran; its results follow.
    Success,
    /// The program is not here.
    ProgUnavail,
    /// The program is here, the version is not.
    ProgMismatch {
        /// Lowest version that is here.
        low: u32,
        /// Highest version that is here.
        high: u32,
    },
    /// The program has no such procedure.
    ProcUnavail,
    /// The procedure cannot decode its arguments.
    GarbageArgs,
    /// The server failed, for lack of memory for example.
    SystemErr,
}

/// `reject_stat`, with what it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The server does not speak this version of RPC.
    RpcMismatch {
        /// Lowest version it speaks.
        low: u32,
        /// Highest version it speaks.
        high: u32,
    },
    /// The credential or verifier was refused.
    AuthError(AuthStat),
}

/// Appends the header of a successful reply, with an AUTH_NONE verifier. The
/// results follow it; NULL has none.
///
/// One append of known size: this is the path that every call takes.
#[inline]
pub fn put_success(out: &mut impl XdrWrite, xid: u32) {
    out.put(&accepted_header(xid, SUCCESS));
}

/// Appends a reply, complete but for the results of [`Accepted::Success`].
///
/// The verifier of an accepted reply is AUTH_NONE, which is what RFC 5531 wants
/// for AUTH_NONE (section 10) and allows for AUTH_SYS (appendix A, which else
/// only knows AUTH_SHORT).
#[inline]
pub fn put_reply(out: &mut impl XdrWrite, xid: u32, status: ReplyStatus) {
    match status {
        ReplyStatus::Accepted(Accepted::Success) => put_success(out, xid),
        ReplyStatus::Accepted(accepted) => put_accepted_error(out, xid, accepted),
        ReplyStatus::Denied(denied) => put_denied(out, xid, denied),
    }
}

#[cold]
fn put_accepted_error(out: &mut impl XdrWrite, xid: u32, accepted: Accepted) {
    let stat = match accepted {
        Accepted::Success => SUCCESS,
        Accepted::ProgUnavail => PROG_UNAVAIL,
        Accepted::ProgMismatch { .. } => PROG_MISMATCH,
        Accepted::ProcUnavail => PROC_UNAVAIL,
        Accepted::GarbageArgs => GARBAGE_ARGS,
        Accepted::SystemErr => SYSTEM_ERR,
    };
    out.put(&accepted_header(xid, stat));
    if let Accepted::ProgMismatch { low, high } = accepted {
        out.put_u32(low);
        out.put_u32(high);
    }
}

#[cold]
fn put_denied(out: &mut impl XdrWrite, xid: u32, denied: Denied) {
    out.put_u32(xid);
    out.put_u32(MSG_REPLY);
    out.put_u32(MSG_DENIED);
    match denied {
        Denied::RpcMismatch { low, high } => {
            out.put_u32(RPC_MISMATCH);
            out.put_u32(low);
            out.put_u32(high);
        }
        Denied::AuthError(AuthStat(stat)) => {
            out.put_u32(AUTH_ERROR);
            out.put_u32(stat);
        }
    }
}

/// xid, REPLY, MSG_ACCEPTED, AUTH_NONE, verifier length 0, `stat`.
#[inline]
fn accepted_header(xid: u32, stat: u32) -> [u8; ACCEPTED_HEADER_BYTES] {
    let mut header = [0; ACCEPTED_HEADER_BYTES];
    header[..4].copy_from_slice(&xid.to_be_bytes());
    header[7] = MSG_REPLY as u8;
    header[20..].copy_from_slice(&stat.to_be_bytes());
    header
}

/// A reply, borrowed from the message it lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// Number of the call that is answered.
    pub xid: u32,
    /// The server's verifier; AUTH_NONE where a reply has none (a denied one).
    pub verifier: OpaqueAuth<'a>,
    /// What became of the call.
    pub status: ReplyStatus,
    /// The results, undecoded; empty unless the call succeeded.
    pub results: &'a [u8],
}

impl<'a> Reply<'a> {
    /// Reads a whole reply (without a record mark).
    ///
    /// Bytes behind a reply that carries no results are an error.
    #[inline]
    pub fn parse(message: &'a [u8]) -> Result<Self, ReplyError> {
        let mut r = XdrReader::new(message);
        let xid = r.u32()?;
        match r.u32()? {
            MSG_REPLY => {}
            msg_type => return Err(ReplyError::NotAReply { xid, msg_type }),
        }
        let mut verifier = OpaqueAuth::NONE;
        let status = match r.u32()? {
            MSG_ACCEPTED => {
                verifier = OpaqueAuth::read(&mut r)?;
                ReplyStatus::Accepted(Self::accepted(&mut r)?)
            }
            MSG_DENIED => ReplyStatus::Denied(Self::denied(&mut r)?),
            value => return Err(unknown(&r, value, "reply_stat")),
        };
        let results = match status {
            ReplyStatus::Accepted(Accepted::Success) => r.rest(),
            _ => {
                r.finish()?;
                &[]
            }
        };
        Ok(Self { xid, verifier, status, results })
    }

    fn accepted(r: &mut XdrReader<'a>) -> Result<Accepted, ReplyError> {
        Ok(match r.u32()? {
            SUCCESS => Accepted::Success,
            PROG_UNAVAIL => Accepted::ProgUnavail,
            PROG_MISMATCH => Accepted::ProgMismatch { low: r.u32()?, high: r.u32()? },
            PROC_UNAVAIL => Accepted::ProcUnavail,
            GARBAGE_ARGS => Accepted::GarbageArgs,
            SYSTEM_ERR => Accepted::SystemErr,
            value => return Err(unknown(r, value, "accept_stat")),
        })
    }

    fn denied(r: &mut XdrReader<'a>) -> Result<Denied, ReplyError> {
        Ok(match r.u32()? {
            RPC_MISMATCH => Denied::RpcMismatch { low: r.u32()?, high: r.u32()? },
            AUTH_ERROR => Denied::AuthError(AuthStat(r.u32()?)),
            value => return Err(unknown(r, value, "reject_stat")),
        })
    }
}

/// Why a message is not a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// It is a call, or nothing that RPC knows.
    #[error("message {xid:#x} has type {msg_type}, which is not a reply")]
    NotAReply {
        /// Of the message.
        xid: u32,
        /// The type that was sent; 0 is a call.
        msg_type: u32,
    },
    /// It cannot be decoded.
    #[error("the reply cannot be decoded: {0}")]
    Xdr(#[from] XdrError),
}

/// An enum value that was just read and has no meaning.
#[cold]
fn unknown(r: &XdrReader<'_>, value: u32, kind: &'static str) -> ReplyError {
    ReplyError::Xdr(XdrError::Value { offset: r.offset() - 4, value, kind })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oncrpc::flavor;

    const ACCEPTED_PREFIX: [u8; 20] = [
        0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 1, // xid, REPLY
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // MSG_ACCEPTED, AUTH_NONE, no body
    ];
    const DENIED_PREFIX: [u8; 12] = [
        0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 1, // xid, REPLY
        0, 0, 0, 1, // MSG_DENIED
    ];

    /// Every reply there is, with the bytes after its prefix, by hand from the RFC.
    fn table() -> Vec<(ReplyStatus, Vec<u8>)> {
        let accepted = |status, tail: &[u8]| (ReplyStatus::Accepted(status), [&ACCEPTED_PREFIX[..], tail].concat());
        let denied = |status, tail: &[u8]| (ReplyStatus::Denied(status), [&DENIED_PREFIX[..], tail].concat());
        vec![
            accepted(Accepted::Success, &[0, 0, 0, 0]),
            accepted(Accepted::ProgUnavail, &[0, 0, 0, 1]),
            accepted(Accepted::ProgMismatch { low: 2, high: 4 }, &[0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 4]),
            accepted(Accepted::ProcUnavail, &[0, 0, 0, 3]),
            accepted(Accepted::GarbageArgs, &[0, 0, 0, 4]),
            accepted(Accepted::SystemErr, &[0, 0, 0, 5]),
            denied(Denied::RpcMismatch { low: 2, high: 2 }, &[0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 2]),
            denied(Denied::AuthError(AuthStat::TOOWEAK), &[0, 0, 0, 1, 0, 0, 0, 5]),
        ]
    }

    #[test]
    fn every_status_is_written_and_read_as_the_rfc_draws_it() {
        for (status, bytes) in table() {
            let mut out = Vec::new();
            put_reply(&mut out, 0xdead_beef, status);
            assert_eq!(out, bytes, "{status:?}");
            let reply = Reply::parse(&bytes).unwrap();
            assert_eq!((reply.xid, reply.status), (0xdead_beef, status));
            assert_eq!(reply.verifier, OpaqueAuth::NONE);
            assert_eq!(reply.results, &[]);
        }
    }

    #[test]
    fn prefixes_and_suffixes_are_errors() {
        for (status, bytes) in table() {
            for len in 0..bytes.len() {
                assert!(Reply::parse(&bytes[..len]).is_err(), "{status:?}[..{len}]");
            }
            let longer = [&bytes[..], &[0, 0, 0, 7]].concat();
            match status {
                ReplyStatus::Accepted(Accepted::Success) => {
                    assert_eq!(Reply::parse(&longer).unwrap().results, &[0, 0, 0, 7]);
                }
                _ => assert!(Reply::parse(&longer).is_err(), "{status:?}"),
            }
        }
    }

    #[test]
    fn unknown_values_are_named() {
        let with = |offset: usize, value: u8| {
            let mut bytes = [&ACCEPTED_PREFIX[..], &[0, 0, 0, 0]].concat();
            bytes[offset + 3] = value;
            Reply::parse(&bytes).map(drop).unwrap_err()
        };
        assert_eq!(with(4, 0), ReplyError::NotAReply { xid: 0xdead_beef, msg_type: 0 });
        for (offset, kind) in [(8, "reply_stat"), (20, "accept_stat")] {
            assert_eq!(with(offset, 9), ReplyError::Xdr(XdrError::Value { offset, value: 9, kind }));
        }
    }

    #[test]
    fn the_verifier_of_the_server_is_kept() {
        let mut bytes = Vec::new();
        bytes.put_u32(1);
        bytes.put_u32(MSG_REPLY);
        bytes.put_u32(MSG_ACCEPTED);
        let verifier = OpaqueAuth { flavor: flavor::AUTH_SHORT, body: b"token" };
        verifier.put(&mut bytes);
        bytes.put_u32(SUCCESS);
        assert_eq!(Reply::parse(&bytes).unwrap().verifier, verifier);
    }
}
