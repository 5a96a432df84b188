//! The client side of ONC RPC (RFC 5531): a NULL call as bytes, and the judgement on a reply.
//!
//! Written independently of the server's codec, so that a mistake there is not repeated here.

use crate::error::LoadError;
use crate::options::usage;

/// Length of a record mark (RFC 5531, section 11).
pub(crate) const MARK_BYTES: usize = 4;

/// The bit of a record mark that says "last fragment"; the other 31 are the fragment's length.
pub(crate) const LAST_FRAGMENT: u32 = 1 << 31;

/// Length of a successful reply without results and with an empty verifier.
pub(crate) const SUCCESS_BYTES: usize = 24;

/// The longest authenticator body (RFC 5531, section 8.2).
const AUTH_BYTES_MAX: usize = 400;

const CALL: u32 = 0;
const REPLY: u32 = 1;
const RPC_VERSION: u32 = 2;

/// Credentials sent with every call (`-A`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Auth {
    /// AUTH_NONE.
    None,
    /// AUTH_SYS, of old AUTH_UNIX: host name, user, group and further groups of this process.
    Sys,
}

impl Auth {
    /// Reads `none`, `sys` or `unix`, in any case.
    pub(crate) fn parse(text: &str) -> Option<Auth> {
        match text.to_ascii_lowercase().as_str() {
            "none" => Some(Auth::None),
            "sys" | "unix" => Some(Auth::Sys),
            _ => None,
        }
    }

    /// What `-A` asks for, of this process.
    pub(crate) fn credential(text: &str) -> Result<Option<SysCredential>, LoadError> {
        match Auth::parse(text) {
            None => usage(format!("-A {text}: must be none, sys or unix")),
            Some(Auth::None) => Ok(None),
            Some(Auth::Sys) => Ok(Some(SysCredential::of_this_process())),
        }
    }
}

/// What is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Procedure {
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) procedure: u32,
}

/// The body of an AUTH_SYS credential (RFC 5531, appendix A).
#[derive(Debug, Clone)]
pub(crate) struct SysCredential {
    pub(crate) stamp: u32,
    pub(crate) machine: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) gids: Vec<u32>,
}

impl SysCredential {
    /// The credential of this process, cut to the RFC's limits: 255 bytes of name, 16 groups.
    pub(crate) fn of_this_process() -> SysCredential {
        let mut machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        while machine.len() > 255 {
            machine.pop();
        }
        let mut gids: Vec<u32> =
            rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
        gids.truncate(16);
        SysCredential {
            stamp: crate::drive::clock::unix_seconds() as u32,
            machine,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            gids,
        }
    }

    fn body(&self) -> Vec<u8> {
        let mut body = Vec::new();
        put(&mut body, self.stamp);
        put_opaque(&mut body, self.machine.as_bytes());
        put(&mut body, self.uid);
        put(&mut body, self.gid);
        put(&mut body, self.gids.len() as u32);
        for gid in &self.gids {
            put(&mut body, *gid);
        }
        body
    }
}

/// A call message without record marks; the identifier is zero and is filled in per request.
pub(crate) fn call_message(procedure: Procedure, credential: Option<&SysCredential>) -> Vec<u8> {
    const AUTH_NONE: u32 = 0;
    const AUTH_SYS: u32 = 1;
    let mut message = Vec::new();
    for word in [0, CALL, RPC_VERSION, procedure.program, procedure.version, procedure.procedure] {
        put(&mut message, word);
    }
    match credential {
        None => {
            put(&mut message, AUTH_NONE);
            put(&mut message, 0);
        }
        Some(credential) => {
            put(&mut message, AUTH_SYS);
            put_opaque(&mut message, &credential.body());
        }
    }
    put(&mut message, AUTH_NONE);
    put(&mut message, 0);
    message
}

/// A judged reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Accepted and executed.
    Success {
        /// The call's identifier.
        xid: u32,
    },
    /// A well-formed refusal.
    Refused {
        /// The call's identifier.
        xid: u32,
        /// The RFC's name for it.
        status: String,
    },
    /// Not a reply. The identifier is there if at least four bytes are.
    Malformed {
        /// The first word, if any.
        xid: Option<u32>,
        /// What is wrong.
        reason: String,
    },
}

/// The results of a successful reply, which are behind its head.
#[inline]
pub(crate) fn results_of(message: &[u8]) -> Option<&[u8]> {
    // The identifier, REPLY, MSG_ACCEPTED and the flavor of the verifier are before its length, and SUCCESS is behind it.
    let verifier_bytes = u32::from_be_bytes(*message.get(16..)?.first_chunk()?) as usize;
    message.get(20 + verifier_bytes.next_multiple_of(4) + 4..)
}

/// Judges a reply message without record marks. `results` tells whether bytes may follow the status.
#[inline]
pub(crate) fn judge(message: &[u8], results: bool) -> Reply {
    // The common case: accepted, empty verifier, success, nothing behind it.
    const SUCCESS: [u8; SUCCESS_BYTES - 4] = [
        0, 0, 0, 1, // REPLY
        0, 0, 0, 0, // MSG_ACCEPTED
        0, 0, 0, 0, 0, 0, 0, 0, // verifier: AUTH_NONE, no body
        0, 0, 0, 0, // SUCCESS
    ];
    if let Some((xid, rest)) = message.split_first_chunk::<4>()
        && rest == SUCCESS
    {
        let xid = u32::from_be_bytes(*xid);
        return Reply::Success { xid };
    }
    judge_in_full(message, results)
}

#[cold]
fn judge_in_full(message: &[u8], results: bool) -> Reply {
    let mut words = Words { rest: message };
    let Some(xid) = words.next() else {
        let reason = format!("{} bytes are too few for an identifier", message.len());
        return Reply::Malformed { xid: None, reason };
    };
    match read_status(&mut words) {
        Ok(Status::Success) if results || words.rest.is_empty() => Reply::Success { xid },
        Ok(Status::Refused(status)) if words.rest.is_empty() => Reply::Refused { xid, status },
        Ok(_) => Reply::Malformed { xid: Some(xid), reason: format!("{} bytes too many at the end", words.rest.len()) },
        Err(reason) => Reply::Malformed { xid: Some(xid), reason },
    }
}

enum Status {
    Success,
    Refused(String),
}

/// The reply body of RFC 5531, section 9.
fn read_status(words: &mut Words<'_>) -> Result<Status, String> {
    match words.take("message type")? {
        REPLY => {}
        CALL => return Err("it is a call, not a reply".into()),
        other => return Err(format!("message type {other} does not exist")),
    }
    match words.take("reply status")? {
        0 => read_accepted(words),
        1 => read_denied(words),
        other => Err(format!("reply status {other} does not exist")),
    }
}

fn read_accepted(words: &mut Words<'_>) -> Result<Status, String> {
    words.take("verifier flavor")?;
    let verifier_bytes = words.take("verifier length")? as usize;
    if verifier_bytes > AUTH_BYTES_MAX {
        return Err(format!("a verifier of {verifier_bytes} bytes is longer than {AUTH_BYTES_MAX}"));
    }
    words.skip(verifier_bytes.next_multiple_of(4), "verifier")?;
    let refused = match words.take("accept status")? {
        0 => return Ok(Status::Success),
        1 => "PROG_UNAVAIL".to_string(),
        2 => {
            let low = words.take("lowest version")?;
            let high = words.take("highest version")?;
            format!("PROG_MISMATCH (versions {low} to {high})")
        }
        3 => "PROC_UNAVAIL".to_string(),
        4 => "GARBAGE_ARGS".to_string(),
        5 => "SYSTEM_ERR".to_string(),
        other => return Err(format!("accept status {other} does not exist")),
    };
    Ok(Status::Refused(refused))
}

fn read_denied(words: &mut Words<'_>) -> Result<Status, String> {
    match words.take("reject status")? {
        0 => {
            let low = words.take("lowest RPC version")?;
            let high = words.take("highest RPC version")?;
            Ok(Status::Refused(format!("RPC_MISMATCH (versions {low} to {high})")))
        }
        1 => {
            let status = words.take("auth status")?;
            let name = match status {
                1 => "AUTH_BADCRED",
                2 => "AUTH_REJECTEDCRED",
                3 => "AUTH_BADVERF",
                4 => "AUTH_REJECTEDVERF",
                5 => "AUTH_TOOWEAK",
                6 => "AUTH_INVALIDRESP",
                7 => "AUTH_FAILED",
                _ => "unknown reason",
            };
            Ok(Status::Refused(format!("AUTH_ERROR ({name}, {status})")))
        }
        other => Err(format!("reject status {other} does not exist")),
    }
}

struct Words<'a> {
    rest: &'a [u8],
}

impl Words<'_> {
    fn next(&mut self) -> Option<u32> {
        let (word, rest) = self.rest.split_first_chunk::<4>()?;
        self.rest = rest;
        Some(u32::from_be_bytes(*word))
    }

    fn take(&mut self, what: &str) -> Result<u32, String> {
        self.next().ok_or_else(|| format!("it ends before the {what}"))
    }

    fn skip(&mut self, len: usize, what: &str) -> Result<(), String> {
        self.rest = self.rest.get(len..).ok_or_else(|| format!("it ends inside the {what}"))?;
        Ok(())
    }
}

fn put(to: &mut Vec<u8>, word: u32) {
    to.extend_from_slice(&word.to_be_bytes());
}

fn put_opaque(to: &mut Vec<u8>, bytes: &[u8]) {
    put(to, bytes.len() as u32);
    to.extend_from_slice(bytes);
    to.resize(to.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ksf_test::rpc::words as message;
    use proptest::prelude::*;

    const NFS_NULL: Procedure = Procedure { program: 100_003, version: 3, procedure: 0 };

    #[test]
    fn a_null_call_is_the_forty_bytes_of_the_rfc() {
        assert_eq!(call_message(NFS_NULL, None), message(&[0, 0, 2, 100_003, 3, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn auth_sys_is_padded_and_counted() {
        let credential = SysCredential { stamp: 7, machine: "abcde".into(), uid: 1, gid: 2, gids: vec![3, 4] };
        let call = call_message(NFS_NULL, Some(&credential));
        let mut expected = message(&[0, 0, 2, 100_003, 3, 0, 1, 36, 7, 5]);
        expected.extend_from_slice(b"abcde\0\0\0");
        expected.extend_from_slice(&message(&[1, 2, 2, 3, 4, 0, 0]));
        assert_eq!(call, expected);
    }

    #[test]
    fn every_status_of_the_rfc_is_named() {
        for (words, status) in [
            (&[9, 1, 0, 0, 0, 1][..], "PROG_UNAVAIL"),
            (&[9, 1, 0, 0, 0, 2, 3, 4], "PROG_MISMATCH (versions 3 to 4)"),
            (&[9, 1, 0, 0, 0, 3], "PROC_UNAVAIL"),
            (&[9, 1, 0, 0, 0, 4], "GARBAGE_ARGS"),
            (&[9, 1, 0, 0, 0, 5], "SYSTEM_ERR"),
            (&[9, 1, 1, 0, 2, 2], "RPC_MISMATCH (versions 2 to 2)"),
            (&[9, 1, 1, 1, 5], "AUTH_ERROR (AUTH_TOOWEAK, 5)"),
        ] {
            assert_eq!(judge(&message(words), false), Reply::Refused { xid: 9, status: status.into() });
        }
    }

    #[test]
    fn success_with_and_without_verifier_and_results() {
        let plain = message(&[9, 1, 0, 0, 0, 0]);
        assert_eq!(plain.len(), SUCCESS_BYTES);
        assert_eq!(judge(&plain, false), Reply::Success { xid: 9 });
        let verified = message(&[9, 1, 0, 6, 5, 1, 2, 0]);
        assert_eq!(judge(&verified, false), Reply::Success { xid: 9 });
        let with_results = message(&[9, 1, 0, 0, 0, 0, 77]);
        assert_eq!(judge(&with_results, true), Reply::Success { xid: 9 });
        assert!(matches!(judge(&with_results, false), Reply::Malformed { xid: Some(9), .. }));
    }

    #[test]
    fn malformed_replies_are_told_from_refusals() {
        for words in [
            &[9][..],
            &[9, 0, 2, 100_003, 3, 0, 0, 0, 0, 0],
            &[9, 2],
            &[9, 1, 2],
            &[9, 1, 0, 0, 401, 0],
            &[9, 1, 0, 0, 0],
            &[9, 1, 0, 0, 0, 6],
            &[9, 1, 0, 0, 0, 2, 3],
            &[9, 1, 1, 2],
            &[9, 1, 0, 0, 0, 3, 0],
        ] {
            assert!(matches!(judge(&message(words), false), Reply::Malformed { xid: Some(9), .. }), "{words:?}");
        }
        assert!(matches!(judge(&[1, 2], false), Reply::Malformed { xid: None, .. }));
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_every_cut_is_malformed(
            words in proptest::collection::vec(0u32..8, 0..12), cut in 0usize..48,
        ) {
            let bytes = message(&words);
            judge(&bytes, true);
            let success = message(&[9, 1, 0, 0, 0, 0]);
            if cut < success.len() {
                let malformed = matches!(judge(&success[..cut], true), Reply::Malformed { .. });
                prop_assert!(malformed);
            }
        }
    }
}
