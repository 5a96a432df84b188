//! Calls: read by servers, written by clients (RFC 5531 section 9).

use super::{AuthStat, Credential, Denied, MSG_CALL, OpaqueAuth, RPC_VERSION, ReplyStatus, flavor, put_reply};
use crate::xdr::{XdrError, XdrReader, XdrWrite};

/// A call, borrowed from the message it lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call<'a> {
    /// Number that the reply has to repeat.
    pub xid: u32,
    /// Program, for example [`super::NFS_PROGRAM`].
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Procedure of the program.
    pub procedure: u32,
    /// The caller's credential.
    pub credential: Credential<'a>,
    /// The arguments, undecoded: everything behind the verifier.
    pub args: &'a [u8],
}

impl<'a> Call<'a> {
    /// Reads a whole call (without a record mark).
    ///
    /// The checks come in the order that RFC 5531 section 9 implies: message
    /// type, RPC version, credential, verifier. Program, version and procedure
    /// are for the caller to judge, because only a call that got this far may be
    /// "accepted".
    ///
    /// A credential or verifier that the message cuts off, or whose body is over
    /// 400 bytes, is a bad one: AUTH_BADCRED, AUTH_BADVERF. (libtirpc 1.3 and
    /// Linux 6.x drop such calls without a word, so their clients wait until
    /// they time out.)
    #[inline]
    pub fn parse(message: &'a [u8]) -> Result<Self, CallError> {
        match Self::parse_plain(message) {
            Some(call) => Ok(call),
            None => Self::parse_any(message),
        }
    }

    /// Reads a call whose credential and verifier are both AUTH_NONE, in one
    /// look at its header. `None`: it is another one, or none.
    #[inline]
    fn parse_plain(message: &'a [u8]) -> Option<Self> {
        let (header, args) = message.split_first_chunk::<40>()?;
        let (words, _) = header.as_chunks::<4>();
        let word = |at: usize| u32::from_be_bytes(words[at]);
        let no_auth = words[6..] == [[0; 4]; 4];
        let plain = word(1) == MSG_CALL && word(2) == RPC_VERSION && no_auth;
        let (xid, program, version, procedure) = (word(0), word(3), word(4), word(5));
        plain.then_some(Self { xid, program, version, procedure, credential: Credential::None, args })
    }

    fn parse_any(message: &'a [u8]) -> Result<Self, CallError> {
        let mut r = XdrReader::new(message);
        let xid = r.u32().map_err(|_| Unanswerable::NoXid { len: message.len() })?;
        let msg_type = r.u32().map_err(Unanswerable::Header)?;
        if msg_type != MSG_CALL {
            return Err(Unanswerable::NotACall { msg_type }.into());
        }
        let rpc_version = r.u32().map_err(Unanswerable::Header)?;
        if rpc_version != RPC_VERSION {
            return Err(CallError::RpcMismatch { xid, rpc_version });
        }
        let program = r.u32().map_err(Unanswerable::Header)?;
        let version = r.u32().map_err(Unanswerable::Header)?;
        let procedure = r.u32().map_err(Unanswerable::Header)?;

        let refuse = |stat| CallError::Auth { xid, stat };
        let credential = OpaqueAuth::read(&mut r).map_err(|_| refuse(AuthStat::BADCRED))?;
        let credential = Credential::from_opaque(credential).map_err(refuse)?;
        let verifier = OpaqueAuth::read(&mut r).map_err(|_| refuse(AuthStat::BADVERF))?;
        // Section 10 for AUTH_NONE and appendix A for AUTH_SYS: the verifier
        // that comes with them has to be AUTH_NONE.
        if verifier.flavor != flavor::AUTH_NONE {
            return Err(refuse(AuthStat::BADVERF));
        }
        Ok(Self { xid, program, version, procedure, credential, args: r.rest() })
    }
}

/// Why a message is not a call that can be looked at further, and what the RFC
/// wants the server to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The RFC has no answer: drop the datagram, close the stream.
    #[error(transparent)]
    Unanswerable(#[from] Unanswerable),
    /// Answer MSG_DENIED, RPC_MISMATCH.
    #[error("call {xid:#x} speaks RPC version {rpc_version}, not {RPC_VERSION}")]
    RpcMismatch {
        /// Of the call.
        xid: u32,
        /// The version the call asked for.
        rpc_version: u32,
    },
    /// Answer MSG_DENIED, AUTH_ERROR.
    #[error("call {xid:#x} is refused with {stat}")]
    Auth {
        /// Of the call.
        xid: u32,
        /// The reason to answer.
        stat: AuthStat,
    },
}

impl CallError {
    /// The reply that the RFC asks for, or `None` if there is none.
    pub const fn reply(&self) -> Option<(u32, ReplyStatus)> {
        let (xid, denied) = match *self {
            Self::Unanswerable(_) => return None,
            Self::RpcMismatch { xid, .. } => (xid, Denied::RpcMismatch { low: RPC_VERSION, high: RPC_VERSION }),
            Self::Auth { xid, stat } => (xid, Denied::AuthError(stat)),
        };
        Some((xid, ReplyStatus::Denied(denied)))
    }

    /// Appends the reply that the RFC asks for; false if there is none.
    pub fn put_reply(&self, out: &mut impl XdrWrite) -> bool {
        match self.reply() {
            Some((xid, status)) => {
                put_reply(out, xid, status);
                true
            }
            None => false,
        }
    }
}

/// Why no reply is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unanswerable {
    /// Too short to have a number that a reply could repeat.
    #[error("a message of {len} bytes is too short for an xid")]
    NoXid {
        /// Length of the message in bytes.
        len: usize,
    },
    /// A reply, or nothing that RPC knows. Answering it could start two servers
    /// answering each other for ever.
    #[error("message type {msg_type} is not a call")]
    NotACall {
        /// The type that was sent; 1 is a reply.
        msg_type: u32,
    },
    /// The message ends before the credential. The RFC has a reply for arguments
    /// that cannot be decoded, but none for a header.
    #[error("the message ends within the call header: {0}")]
    Header(#[source] XdrError),
}

/// What a client puts before the arguments of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallHeader<'a> {
    /// Number that the reply will repeat; see [`super::Reply::xid`].
    pub xid: u32,
    /// Program to call.
    pub program: u32,
    /// Version of the program.
    pub version: u32,
    /// Procedure of the program.
    pub procedure: u32,
    /// The caller's credential; [`OpaqueAuth::NONE`] or a body made by [`super::auth_sys_body`].
    pub credential: OpaqueAuth<'a>,
}

impl CallHeader<'_> {
    /// Appends the header; the arguments follow it.
    pub fn put(&self, out: &mut impl XdrWrite) {
        out.put_u32(self.xid);
        out.put_u32(MSG_CALL);
        out.put_u32(RPC_VERSION);
        out.put_u32(self.program);
        out.put_u32(self.version);
        out.put_u32(self.procedure);
        self.credential.put(out);
        OpaqueAuth::NONE.put(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oncrpc::{NFS_PROGRAM, PROC_NULL};

    /// NULL of NFSv3 with AUTH_NONE, xid 0x01020304, counted by hand from RFC 5531.
    const NULL_CALL: [u8; 40] = [
        1, 2, 3, 4, // xid
        0, 0, 0, 0, // CALL
        0, 0, 0, 2, // RPC version
        0x00, 0x01, 0x86, 0xa3, // program 100003
        0, 0, 0, 3, // version
        0, 0, 0, 0, // procedure
        0, 0, 0, 0, 0, 0, 0, 0, // credential: AUTH_NONE, no body
        0, 0, 0, 0, 0, 0, 0, 0, // verifier: AUTH_NONE, no body
    ];

    /// `NULL_CALL` with the 32-bit word at `offset` replaced.
    fn with_word(offset: usize, word: u32) -> [u8; 40] {
        let mut call = NULL_CALL;
        call[offset..offset + 4].copy_from_slice(&word.to_be_bytes());
        call
    }

    #[test]
    fn parses_and_builds_a_null_call() {
        let call = Call::parse(&NULL_CALL).unwrap();
        assert_eq!(
            call,
            Call {
                xid: 0x0102_0304,
                program: NFS_PROGRAM,
                version: 3,
                procedure: PROC_NULL,
                credential: Credential::None,
                args: &[],
            }
        );
        let mut out = Vec::new();
        CallHeader {
            xid: 0x0102_0304,
            program: NFS_PROGRAM,
            version: 3,
            procedure: PROC_NULL,
            credential: OpaqueAuth::NONE,
        }
        .put(&mut out);
        assert_eq!(out, NULL_CALL);
    }

    #[test]
    fn what_follows_the_verifier_are_the_arguments() {
        let mut message = NULL_CALL.to_vec();
        message.extend_from_slice(&[9, 8, 7]);
        assert_eq!(Call::parse(&message).unwrap().args, &[9, 8, 7]);
    }

    #[test]
    fn each_prefix_has_its_result() {
        for len in 0..NULL_CALL.len() {
            let error = Call::parse(&NULL_CALL[..len]).unwrap_err();
            let xid = 0x0102_0304;
            match len {
                0..4 => assert_eq!(error, Unanswerable::NoXid { len }.into()),
                4..24 => assert!(matches!(error, CallError::Unanswerable(Unanswerable::Header(_))), "{len}: {error}"),
                24..32 => assert_eq!(error, CallError::Auth { xid, stat: AuthStat::BADCRED }),
                _ => assert_eq!(error, CallError::Auth { xid, stat: AuthStat::BADVERF }),
            }
        }
    }

    #[test]
    fn each_wrong_word_gets_the_reply_of_the_rfc() {
        let xid = 0x0102_0304;
        let auth = |stat| CallError::Auth { xid, stat };
        let cases = [
            (4, 1, Unanswerable::NotACall { msg_type: 1 }.into()),
            (4, 2, Unanswerable::NotACall { msg_type: 2 }.into()),
            (8, 3, CallError::RpcMismatch { xid, rpc_version: 3 }),
            (8, 0, CallError::RpcMismatch { xid, rpc_version: 0 }),
            (24, 1, auth(AuthStat::BADCRED)), // AUTH_SYS without a body
            (24, 2, auth(AuthStat::REJECTEDCRED)),
            (24, 6, auth(AuthStat::REJECTEDCRED)),
            (28, 401, auth(AuthStat::BADCRED)),
            (28, 12, auth(AuthStat::BADCRED)), // runs past the end
            (28, u32::MAX, auth(AuthStat::BADCRED)),
            (32, 1, auth(AuthStat::BADVERF)), // verifier must be AUTH_NONE
            (36, 4, auth(AuthStat::BADVERF)),
            (36, 401, auth(AuthStat::BADVERF)),
        ];
        for (offset, word, expected) in cases {
            let message = with_word(offset, word);
            assert_eq!(Call::parse(&message), Err(expected), "{word} at offset {offset}");
        }
    }

    #[test]
    fn a_body_of_400_bytes_passes_and_one_more_does_not() {
        let message = |len: u32| {
            let mut m = NULL_CALL[..28].to_vec();
            m.put_opaque(&vec![5; len as usize]);
            m.extend_from_slice(&[0; 8]);
            m
        };
        assert!(Call::parse(&message(400)).is_ok());
        assert!(matches!(Call::parse(&message(401)), Err(CallError::Auth { stat: AuthStat::BADCRED, .. })));
    }

    #[test]
    fn errors_encode_the_reply_they_stand_for() {
        let mut out = Vec::new();
        assert!(Call::parse(&with_word(8, 9)).unwrap_err().put_reply(&mut out));
        assert_eq!(
            out,
            [
                1, 2, 3, 4, 0, 0, 0, 1, // xid, REPLY
                0, 0, 0, 1, 0, 0, 0, 0, // MSG_DENIED, RPC_MISMATCH
                0, 0, 0, 2, 0, 0, 0, 2, // low, high
            ]
        );
        out.clear();
        assert!(Call::parse(&with_word(24, 6)).unwrap_err().put_reply(&mut out));
        assert_eq!(
            out,
            [
                1, 2, 3, 4, 0, 0, 0, 1, // xid, REPLY
                0, 0, 0, 1, 0, 0, 0, 1, // MSG_DENIED, AUTH_ERROR
                0, 0, 0, 2, // AUTH_REJECTEDCRED
            ]
        );
        out.clear();
        assert!(!Call::parse(&with_word(4, 1)).unwrap_err().put_reply(&mut out));
        assert_eq!(out, []);
    }
}
