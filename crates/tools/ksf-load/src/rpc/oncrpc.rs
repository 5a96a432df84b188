//! Calls of ONC RPC (RFC 5531) as templates, and replies that are no success. The codec is that of [`ksf_proto::oncrpc`].

use std::fmt::Display;

use ksf_proto::oncrpc::{
    Accepted, CallHeader, Denied, GIDS_LIMIT, MACHINE_NAME_LIMIT_BYTES, OpaqueAuth, Reply, ReplyError, ReplyStatus,
    auth_sys_body, flavor,
};

use crate::error::LoadError;
use crate::options::usage;
use crate::record::{Fault, Sink};

/// The status of a call that was executed.
pub(crate) const SUCCESS: ReplyStatus = ReplyStatus::Accepted(Accepted::Success);

/// The body of the AUTH_SYS credential that `-A` asks for (`none`, `sys` or `unix`, in any case); `None`: AUTH_NONE.
pub(crate) fn credential(text: &str) -> Result<Option<Vec<u8>>, LoadError> {
    match text.to_ascii_lowercase().as_str() {
        "none" => Ok(None),
        "sys" | "unix" => Ok(Some(credential_of_this_process())),
        _ => usage(format!("-A {text}: must be none, sys or unix")),
    }
}

/// Host name, user, group and further groups, cut to what fits.
fn credential_of_this_process() -> Vec<u8> {
    let uname = rustix::system::uname();
    let machine = uname.nodename().to_bytes();
    let machine = &machine[..machine.len().min(MACHINE_NAME_LIMIT_BYTES as usize)];
    let mut gids: Vec<u32> = rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
    gids.truncate(GIDS_LIMIT as usize);
    let stamp = crate::drive::clock::unix_seconds() as u32;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    auth_sys_body(stamp, machine, uid, gid, &gids).expect("it is cut to what fits")
}

/// A call message without record marks and arguments; the identifier is zero and is filled in per request.
pub(crate) fn call_message((program, version): (u32, u32), procedure: u32, credential: Option<&[u8]>) -> Vec<u8> {
    let credential = credential.map_or(OpaqueAuth::NONE, |body| OpaqueAuth { flavor: flavor::AUTH_SYS, body });
    let mut message = Vec::new();
    CallHeader { xid: 0, program, version, procedure, credential }.put(&mut message);
    message
}

/// Settles the call of a reply that is no success.
#[cold]
pub(crate) fn fail(message: &[u8], reply: Result<Reply<'_>, ReplyError>, sink: &mut Sink<'_, ()>) {
    match reply {
        Ok(Reply { xid, status, .. }) => {
            if sink.settle(xid).is_some() {
                sink.reject(Fault::Rejected, || format!("call {xid:#x}: {}", in_words(status)));
            }
        }
        Err(error) => malformed(message, &error, sink),
    }
}

/// Settles the call of a reply that cannot be read. The identifier may be as wrong as the rest: only an outstanding one is
/// believed.
#[cold]
pub(crate) fn malformed(message: &[u8], reason: &dyn Display, sink: &mut Sink<'_, ()>) {
    let describe = || format!("reply of {} bytes: {reason}", message.len());
    let xid = message.first_chunk().map(|xid| u32::from_be_bytes(*xid));
    match xid.and_then(|xid| sink.settle_if_live(xid)) {
        Some(_) => sink.reject(Fault::Malformed, describe),
        None => sink.fault(Fault::Malformed, describe),
    }
}

/// The RFC's name of a status.
pub(crate) fn in_words(status: ReplyStatus) -> String {
    match status {
        ReplyStatus::Accepted(Accepted::Success) => "SUCCESS".into(),
        ReplyStatus::Accepted(Accepted::ProgUnavail) => "PROG_UNAVAIL".into(),
        ReplyStatus::Accepted(Accepted::ProgMismatch { low, high }) => {
            format!("PROG_MISMATCH (versions {low} to {high})")
        }
        ReplyStatus::Accepted(Accepted::ProcUnavail) => "PROC_UNAVAIL".into(),
        ReplyStatus::Accepted(Accepted::GarbageArgs) => "GARBAGE_ARGS".into(),
        ReplyStatus::Accepted(Accepted::SystemErr) => "SYSTEM_ERR".into(),
        ReplyStatus::Denied(Denied::RpcMismatch { low, high }) => format!("RPC_MISMATCH (versions {low} to {high})"),
        ReplyStatus::Denied(Denied::AuthError(reason)) => format!("AUTH_ERROR: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ksf_test::rpc::words as message;

    /// As the RFC has it, not as the codec that servers share.
    #[test]
    fn a_null_call_is_the_forty_bytes_of_the_rfc() {
        assert_eq!(call_message((100_003, 3), 0, None), message(&[0, 0, 2, 100_003, 3, 0, 0, 0, 0, 0]));
        let call = call_message((100_003, 3), 0, Some(&message(&[7])));
        assert_eq!(call, message(&[0, 0, 2, 100_003, 3, 0, 1, 4, 7, 0, 0]));
        assert!(credential("unix").unwrap().is_some() && credential("NONE").unwrap().is_none());
        assert_eq!(credential("x").unwrap_err().exit_code(), 64);
    }

    #[test]
    fn every_status_of_the_rfc_is_named() {
        for (words, name) in [
            (&[9, 1, 0, 0, 0, 0][..], "SUCCESS"),
            (&[9, 1, 0, 0, 0, 1], "PROG_UNAVAIL"),
            (&[9, 1, 0, 0, 0, 2, 3, 4], "PROG_MISMATCH (versions 3 to 4)"),
            (&[9, 1, 0, 0, 0, 3], "PROC_UNAVAIL"),
            (&[9, 1, 0, 0, 0, 4], "GARBAGE_ARGS"),
            (&[9, 1, 0, 0, 0, 5], "SYSTEM_ERR"),
            (&[9, 1, 1, 0, 2, 2], "RPC_MISMATCH (versions 2 to 2)"),
            (&[9, 1, 1, 1, 5], "AUTH_ERROR: AUTH_TOOWEAK (5)"),
        ] {
            assert_eq!(in_words(Reply::parse(&message(words)).unwrap().status), name);
        }
    }
}
