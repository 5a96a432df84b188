//! Calls and the replies that RFC 5531 asks for, written by hand word by word:
//! nothing here uses the encoders under test.

use std::sync::Arc;

use ksf_services::rpc::{NullService, Program, ProgramTable};
pub(crate) use ksf_test::rpc::{fragment, record, words};

/// A program with a range of versions, so that PROG_MISMATCH shows both ends.
pub(crate) const RANGED_PROGRAM: u32 = 0x2000_0042;

pub(crate) fn service() -> Arc<NullService> {
    let mut table = ProgramTable::new();
    table.register(Program::NFS_V3).unwrap();
    table.register(Program::MOUNT_V3).unwrap();
    table.register(Program::new("ranged", RANGED_PROGRAM, 2..=4)).unwrap();
    Arc::new(NullService::new("krpc2", table))
}

pub(crate) const XID: u32 = 0xc0ff_ee01;
pub(crate) const NONE: [u32; 2] = [0, 0];

/// xid, CALL, RPC version 2, program, version, procedure, then what follows.
pub(crate) fn call(program: u32, version: u32, procedure: u32, rest: &[u32]) -> Vec<u8> {
    let mut all = vec![XID, 0, 2, program, version, procedure];
    all.extend_from_slice(rest);
    words(&all)
}

/// AUTH_SYS: stamp 1, machine "ab", uid 0, gid 0, groups 5 and 6; then no verifier.
#[rustfmt::skip]
pub(crate) const SYS: [u32; 12] = [
    1, 32,          // AUTH_SYS, length of the body
    1,              // stamp
    2, 0x6162_0000, // name: length, "ab" and two fill bytes
    0, 0,           // uid, gid
    2, 5, 6,        // groups: count, each
    0, 0,           // verifier: AUTH_NONE, no body
];

/// xid, REPLY, MSG_ACCEPTED, AUTH_NONE, length 0, then the status.
pub(crate) fn accepted(status: &[u32]) -> Vec<u8> {
    let mut all = vec![XID, 1, 0, 0, 0];
    all.extend_from_slice(status);
    words(&all)
}

/// xid, REPLY, MSG_DENIED, then the status.
pub(crate) fn denied(status: &[u32]) -> Vec<u8> {
    let mut all = vec![XID, 1, 1];
    all.extend_from_slice(status);
    words(&all)
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) message: Vec<u8>,
    pub(crate) reply: Vec<u8>,
    /// The counter that goes up, if it is an error.
    pub(crate) counter: Option<&'static str>,
}

/// Every call that the RFC has an answer for.
pub(crate) fn answerable() -> Vec<Case> {
    let nfs = |version, procedure, rest: &[u32]| call(100_003, version, procedure, rest);
    let none = [NONE, NONE].concat();
    let mut cases = Vec::new();
    let mut case = |name, message, reply, counter| {
        cases.push(Case { name, message, reply, counter });
    };

    let success = accepted(&[0]);
    case("NFSv3 NULL", nfs(3, 0, &none), success.clone(), None);
    case("MOUNTv3 NULL", call(100_005, 3, 0, &none), success.clone(), None);
    case("lowest version", call(RANGED_PROGRAM, 2, 0, &none), success.clone(), None);
    case("highest version", call(RANGED_PROGRAM, 4, 0, &none), success.clone(), None);
    case("AUTH_SYS", nfs(3, 0, &SYS), success.clone(), None);
    case("AUTH_NONE with a body", nfs(3, 0, &[0, 4, 0xdead_beef, 0, 0]), success, None);

    case("unknown program", call(100_004, 3, 0, &none), accepted(&[1]), Some("prog_unavail"));
    for version in [0, 2, 4, u32::MAX] {
        case("unknown version of NFS", nfs(version, 0, &none), accepted(&[2, 3, 3]), Some("prog_mismatch"));
    }
    for version in [0, 1, 5] {
        case(
            "unknown version of a range",
            call(RANGED_PROGRAM, version, 0, &none),
            accepted(&[2, 2, 4]),
            Some("prog_mismatch"),
        );
    }
    for procedure in [1, 21, u32::MAX] {
        case("unknown procedure", nfs(3, procedure, &none), accepted(&[3]), Some("proc_unavail"));
    }
    case("arguments for NULL", nfs(3, 0, &[0, 0, 0, 0, 0]), accepted(&[4]), Some("garbage_args"));
    let one_byte_more = [nfs(3, 0, &none), vec![0]].concat();
    case("one byte behind NULL", one_byte_more, accepted(&[4]), Some("garbage_args"));

    for rpc_version in [0, 1, 3, u32::MAX] {
        let mut message = nfs(3, 0, &none);
        message[8..12].copy_from_slice(&rpc_version.to_be_bytes());
        case("wrong RPC version", message, denied(&[0, 2, 2]), Some("rpc_mismatch"));
    }
    case("wrong RPC version and nothing else", words(&[XID, 0, 3]), denied(&[0, 2, 2]), Some("rpc_mismatch"));

    let mut auth = |name, rest: &[u32], stat| {
        let reply = denied(&[1, stat]);
        case(name, nfs(3, 0, rest), reply, Some("auth_error"));
    };
    let (bad_cred, rejected_cred, bad_verf) = (1, 2, 3);
    auth("AUTH_SHORT", &[2, 0, 0, 0], rejected_cred);
    auth("AUTH_DH", &[3, 0, 0, 0], rejected_cred);
    auth("RPCSEC_GSS", &[6, 4, 1, 0, 0], rejected_cred);
    auth("flavour unknown", &[0xffff_ffff, 0, 0, 0], rejected_cred);
    auth("no credential", &[], bad_cred);
    auth("flavour without length", &[0], bad_cred);
    auth("body cut off", &[0, 8, 0], bad_cred);
    auth("body over 400 bytes", &[&[0, 401][..], &[0; 103]].concat(), bad_cred);
    auth("AUTH_SYS without a body", &[1, 0, 0, 0], bad_cred);
    auth("AUTH_SYS with half a body", &[1, 4, 1, 0, 0], bad_cred);
    let mut long_name = SYS.to_vec();
    long_name[3] = 256;
    auth("AUTH_SYS, name too long", &long_name, bad_cred);
    let mut fill = SYS.to_vec();
    fill[4] = 0x6162_0001;
    auth("AUTH_SYS, fill bytes not zero", &fill, bad_cred);
    let mut groups = SYS.to_vec();
    groups[7] = 17;
    auth("AUTH_SYS, too many groups", &groups, bad_cred);
    let mut fewer = SYS.to_vec();
    fewer[7] = 1;
    auth("AUTH_SYS, bytes behind the groups", &fewer, bad_cred);
    auth("no verifier", &NONE, bad_verf);
    auth("verifier without length", &[0, 0, 0], bad_verf);
    auth("verifier cut off", &[0, 0, 0, 4], bad_verf);
    auth("verifier of AUTH_SYS", &[0, 0, 1, 0], bad_verf);
    auth("verifier over 400 bytes", &[&[0, 0, 0, 404][..], &[0; 101]].concat(), bad_verf);
    cases
}

/// Messages without an answer, and the counter that goes up.
pub(crate) fn unanswerable() -> Vec<(Vec<u8>, &'static str)> {
    vec![
        (vec![], "unanswerable_no_xid"),
        (vec![1, 2, 3], "unanswerable_no_xid"),
        (words(&[XID]), "unanswerable_short_header"),
        (vec![1, 2, 3, 4, 0, 0], "unanswerable_short_header"),
        (words(&[XID, 0]), "unanswerable_short_header"),
        (words(&[XID, 0, 2]), "unanswerable_short_header"),
        (words(&[XID, 0, 2, 100_003]), "unanswerable_short_header"),
        (words(&[XID, 0, 2, 100_003, 3]), "unanswerable_short_header"),
        (
            words(&[XID, 1, 0, 0, 0, 0]), // a reply
            "unanswerable_not_a_call",
        ),
        (words(&[XID, 2, 2, 100_003]), "unanswerable_not_a_call"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "unanswerable_not_a_call"),
    ]
}

/// The message cut into fragments of `len` bytes.
pub(crate) fn fragments_of(message: &[u8], len: usize) -> Vec<u8> {
    let count = message.len().div_ceil(len);
    let cut = message.chunks(len).enumerate();
    cut.flat_map(|(at, bytes)| fragment(at + 1 == count, bytes)).collect()
}
