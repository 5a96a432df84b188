//! Each reply and each refusal of RFC 5531, byte for byte, whichever way the
//! call is cut into fragments and the stream into chunks.
//!
//! The vectors are written by hand from the RFC, word by word; nothing here uses
//! the encoders under test.

mod common;

use std::sync::Arc;

use common::{Wire, counter};
use ksf::CloseReason;
use ksf::limits::Limits;
use ksf_services::rpc::{NullProgram, ProgramTable, RpcService, mount_null, nfs_null};
use proptest::prelude::*;

/// A program with a range of versions, so that PROG_MISMATCH shows both ends.
const RANGED_PROGRAM: u32 = 0x2000_0042;

fn service() -> Arc<RpcService> {
    let mut table = ProgramTable::new();
    table.register(nfs_null()).unwrap();
    table.register(mount_null()).unwrap();
    table.register(NullProgram::new("ranged", RANGED_PROGRAM, 2..=4)).unwrap();
    Arc::new(RpcService::new("krpc2", table))
}

/// 32-bit words, big endian.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_be_bytes()).collect()
}

const XID: u32 = 0xc0ff_ee01;
const NONE: [u32; 2] = [0, 0];

/// xid, CALL, RPC version 2, program, version, procedure, then what follows.
fn call(program: u32, version: u32, procedure: u32, rest: &[u32]) -> Vec<u8> {
    let mut all = vec![XID, 0, 2, program, version, procedure];
    all.extend_from_slice(rest);
    words(&all)
}

/// AUTH_SYS: stamp 1, machine "ab", uid 0, gid 0, groups 5 and 6; then no verifier.
const SYS: [u32; 12] = [
    1,
    32,          // AUTH_SYS, length of the body
    1,           // stamp
    2,           // length of the name
    0x6162_0000, // "ab", two fill bytes
    0,
    0, // uid, gid
    2,
    5,
    6, // groups
    0,
    0, // verifier AUTH_NONE
];

/// xid, REPLY, MSG_ACCEPTED, AUTH_NONE, length 0, then the status.
fn accepted(status: &[u32]) -> Vec<u8> {
    let mut all = vec![XID, 1, 0, 0, 0];
    all.extend_from_slice(status);
    words(&all)
}

/// xid, REPLY, MSG_DENIED, then the status.
fn denied(status: &[u32]) -> Vec<u8> {
    let mut all = vec![XID, 1, 1];
    all.extend_from_slice(status);
    words(&all)
}

struct Case {
    name: &'static str,
    message: Vec<u8>,
    reply: Vec<u8>,
    /// The counter that goes up, if it is an error.
    counter: Option<&'static str>,
}

/// Every call that the RFC has an answer for.
fn answerable() -> Vec<Case> {
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
fn unanswerable() -> Vec<(Vec<u8>, &'static str)> {
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

/// A fragment behind its record mark.
fn fragment(last: bool, bytes: &[u8]) -> Vec<u8> {
    let mark = bytes.len() as u32 | if last { 1 << 31 } else { 0 };
    [&mark.to_be_bytes(), bytes].concat()
}

fn record(message: &[u8]) -> Vec<u8> {
    fragment(true, message)
}

/// The message cut into fragments of `len` bytes.
fn fragments_of(message: &[u8], len: usize) -> Vec<u8> {
    let count = message.len().div_ceil(len);
    let cut = message.chunks(len).enumerate();
    cut.flat_map(|(at, bytes)| fragment(at + 1 == count, bytes)).collect()
}

/// Every way of writing the message that a test wants: the name and the bytes.
fn encodings(message: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> =
        (1..=message.len()).map(|len| (format!("fragments of {len}"), fragments_of(message, len))).collect();
    let empty = fragment(false, &[]);
    all.push(("one record".into(), record(message)));
    all.push(("an empty fragment first".into(), [&empty[..], &record(message)].concat()));
    all.push(("an empty fragment last".into(), [fragment(false, message), record(&[])].concat()));
    let among = message.iter().flat_map(|byte| [&empty[..], &fragment(false, &[*byte])].concat());
    all.push(("empty fragments among single bytes".into(), among.chain(record(&[])).collect()));
    // What rpctest -f sends: 1 byte, all but two, 1 byte.
    if let [first, middle @ .., last] = message {
        all.push((
            "three fragments of rpctest -f".into(),
            [fragment(false, &[*first]), fragment(false, middle), record(&[*last])].concat(),
        ));
    }
    all
}

#[test]
fn every_answer_in_every_fragmentation() {
    let service = service();
    for case in answerable() {
        let before = case.counter.map(|name| counter(&*service, name));
        let encodings = encodings(&case.message);
        for (how, stream) in &encodings {
            let mut wire = Wire::new(&service);
            assert_eq!(wire.feed(stream), record(&case.reply), "{}, {how}", case.name);
            assert_eq!(wire.closed(), None, "{}, {how}", case.name);
        }
        let after = case.counter.map(|name| counter(&*service, name));
        assert_eq!(before.map(|n| n + encodings.len() as u64), after, "{}", case.name);
    }
}

#[test]
fn every_answer_in_every_split_of_the_stream() {
    let service = service();
    for case in answerable() {
        let expected = record(&case.reply);
        for stream in [record(&case.message), fragments_of(&case.message, 7)] {
            for at in 0..stream.len() {
                let (head, tail) = stream.split_at(at);
                let mut wire = Wire::new(&service);
                assert_eq!(wire.feed(head), [], "{} split at {at}", case.name);
                assert_eq!(wire.feed(tail), expected, "{} split at {at}", case.name);
            }
            let mut wire = Wire::new(&service);
            assert_eq!(wire.feed_all(stream.chunks(1)), expected, "{} byte by byte", case.name);
            assert_eq!((wire.closed(), wire.slots_in_use()), (None, 0));
        }
    }
}

#[test]
fn unanswerable_messages_close_the_stream_and_are_counted() {
    let service = service();
    let good = &answerable()[0];
    for (message, name) in unanswerable() {
        let before = counter(&*service, name);
        let (call, reply) = (record(&good.message), record(&good.reply));
        let mut wire = Wire::new(&service);
        let sent = wire.feed(&[&call[..], &record(&message), &call].concat());
        assert_eq!(sent, reply, "only what came before {message:02x?} is answered");
        assert_eq!(wire.closed(), Some(CloseReason::Service));
        assert_eq!(counter(&*service, name), before + 1, "{name}");
        assert_eq!(wire.feed(&call), [], "a closing connection answers no more");
    }
}

#[test]
fn records_over_the_limits_close_the_stream_before_they_are_stored() {
    let service = service();
    let limits = || Limits { message_bytes_max: 100, fragments_max: 8, ..Limits::default() };

    let mut wire = Wire::with_limits(&service, limits());
    assert_eq!(wire.feed(&[0xff, 0xff, 0xff, 0xff]), []); // 2 GiB - 1
    assert_eq!(wire.closed(), Some(CloseReason::OversizedMessage));

    let mut wire = Wire::with_limits(&service, limits());
    let halves = [fragment(false, &[0; 60]), fragment(true, &[0; 60])].concat();
    assert_eq!(wire.feed(&halves), []);
    assert_eq!(wire.closed(), Some(CloseReason::OversizedMessage));

    let mut wire = Wire::with_limits(&service, limits());
    assert_eq!(wire.feed(&fragment(false, &[]).repeat(9)), []);
    assert_eq!(wire.closed(), Some(CloseReason::EndlessFragments));
    assert_eq!(wire.slots_in_use(), 0);
}

#[test]
fn half_close_answers_what_was_whole() {
    let service = service();
    let case = &answerable()[0];
    let (call, reply) = (record(&case.message), record(&case.reply));

    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(&call.repeat(3)), reply.repeat(3));
    assert_eq!(wire.eof(), []);
    assert_eq!(wire.closed(), Some(CloseReason::PeerClosed));

    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(&[&call[..], &call[..20]].concat()), reply);
    wire.eof();
    assert_eq!(wire.closed(), Some(CloseReason::PeerClosedMidMessage));
}

proptest! {
    /// Any calls, fragmented and split in any way, behind each other: the
    /// replies are those of the calls one by one.
    #[test]
    fn pipelined_calls_in_any_split(
        picks in proptest::collection::vec((any::<prop::sample::Index>(), 1usize..80), 1..20),
        cuts in proptest::collection::vec(1usize..200, 1..60),
    ) {
        let cases = answerable();
        let (mut stream, mut expected) = (Vec::new(), Vec::new());
        for (pick, fragment_bytes) in picks {
            let case = &cases[pick.index(cases.len())];
            stream.extend(fragments_of(&case.message, fragment_bytes));
            expected.extend(record(&case.reply));
        }
        let mut wire = Wire::new(&service());
        let (mut sent, mut rest) = (Vec::new(), &stream[..]);
        for cut in cuts.iter().cycle() {
            let (chunk, tail) = rest.split_at((*cut).min(rest.len()));
            sent.extend(wire.feed(chunk));
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(sent, expected);
        prop_assert_eq!((wire.closed(), wire.slots_in_use()), (None, 0));
    }
}
