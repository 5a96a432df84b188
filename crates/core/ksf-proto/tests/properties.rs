//! Properties of the wire formats: what is written reads back, and no bytes
//! whatever make a parser panic or read past its buffer.

use ksf_proto::oncrpc::{
    Accepted, AuthStat, Call, CallError, CallHeader, Credential, Denied, OpaqueAuth, Reply, ReplyStatus, Unanswerable,
    auth_sys_body, flavor, put_reply,
    record::{self, RecordMark},
};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use proptest::collection::vec;
use proptest::prelude::*;

/// Splits a stream of records back into messages, as simply as it can be done.
fn records(mut stream: &[u8]) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    let mut message = Vec::new();
    while let Some((mark, rest)) = stream.split_first_chunk() {
        let mark = RecordMark::from_bytes(*mark);
        let (fragment, rest) = rest.split_at(mark.len as usize);
        message.extend_from_slice(fragment);
        if mark.last {
            messages.push(std::mem::take(&mut message));
        }
        stream = rest;
    }
    assert!(stream.is_empty() && message.is_empty());
    messages
}

fn any_status() -> impl Strategy<Value = ReplyStatus> {
    let range = (any::<u32>(), any::<u32>());
    prop_oneof![
        Just(ReplyStatus::Accepted(Accepted::ProgUnavail)),
        range.prop_map(|(low, high)| ReplyStatus::Accepted(Accepted::ProgMismatch { low, high })),
        Just(ReplyStatus::Accepted(Accepted::ProcUnavail)),
        Just(ReplyStatus::Accepted(Accepted::GarbageArgs)),
        Just(ReplyStatus::Accepted(Accepted::SystemErr)),
        range.prop_map(|(low, high)| ReplyStatus::Denied(Denied::RpcMismatch { low, high })),
        any::<u32>().prop_map(|stat| ReplyStatus::Denied(Denied::AuthError(AuthStat(stat)))),
    ]
}

prop_compose! {
    /// A valid call and the byte at which its arguments start.
    fn any_call()(
        xid in any::<u32>(),
        numbers in any::<[u32; 3]>(),
        sys in proptest::option::of((any::<u32>(), vec(any::<u8>(), 0..=255), any::<[u32; 2]>(), vec(any::<u32>(), 0..=16))),
        args in vec(any::<u8>(), 0..64),
    ) -> (Vec<u8>, usize) {
        let body = sys.map(|(stamp, name, [uid, gid], gids)| {
            auth_sys_body(stamp, &name, uid, gid, &gids).unwrap()
        });
        let credential = match &body {
            Some(body) => OpaqueAuth { flavor: flavor::AUTH_SYS, body },
            None => OpaqueAuth::NONE,
        };
        let [program, version, procedure] = numbers;
        let mut message = Vec::new();
        CallHeader { xid, program, version, procedure, credential }.put(&mut message);
        let args_at = message.len();
        message.extend_from_slice(&args);
        (message, args_at)
    }
}

proptest! {
    #[test]
    fn calls_round_trip(
        xid in any::<u32>(),
        numbers in any::<[u32; 3]>(),
        stamp in any::<u32>(),
        name in vec(any::<u8>(), 0..=255),
        ids in any::<[u32; 2]>(),
        gids in vec(any::<u32>(), 0..=16),
        args in vec(any::<u8>(), 0..64),
    ) {
        let body = auth_sys_body(stamp, &name, ids[0], ids[1], &gids).unwrap();
        let mut message = Vec::new();
        CallHeader {
            xid,
            program: numbers[0],
            version: numbers[1],
            procedure: numbers[2],
            credential: OpaqueAuth { flavor: flavor::AUTH_SYS, body: &body },
        }.put(&mut message);
        message.extend_from_slice(&args);

        let call = Call::parse(&message).unwrap();
        prop_assert_eq!([call.program, call.version, call.procedure], numbers);
        prop_assert_eq!((call.xid, call.args), (xid, &args[..]));
        let Credential::Sys(sys) = call.credential else { return Err(TestCaseError::fail("not AUTH_SYS")) };
        prop_assert_eq!((sys.stamp, sys.machine_name), (stamp, &name[..]));
        prop_assert_eq!([sys.uid, sys.gid], ids);
        prop_assert_eq!(sys.gids.iter().collect::<Vec<_>>(), gids);
    }

    #[test]
    fn every_prefix_of_a_call_has_a_defined_result((message, args_at) in any_call()) {
        let xid = u32::from_be_bytes(*message.first_chunk().unwrap());
        for len in 0..=message.len() {
            match Call::parse(&message[..len]) {
                Ok(call) => {
                    prop_assert!(len >= args_at);
                    prop_assert_eq!(call.args, &message[args_at..len]);
                }
                Err(CallError::Unanswerable(Unanswerable::NoXid { .. })) => prop_assert!(len < 4),
                Err(CallError::Unanswerable(Unanswerable::Header(_))) => {
                    prop_assert!((4..24).contains(&len));
                }
                Err(CallError::Auth { xid: answered, stat: AuthStat::BADCRED }) => {
                    prop_assert!((24..args_at - 8).contains(&len));
                    prop_assert_eq!(answered, xid);
                }
                Err(CallError::Auth { xid: answered, stat: AuthStat::BADVERF }) => {
                    prop_assert!((args_at - 8..args_at).contains(&len));
                    prop_assert_eq!(answered, xid);
                }
                Err(other) => return Err(TestCaseError::fail(format!("{len}: {other}"))),
            }
        }
    }

    #[test]
    fn an_error_is_answered_with_the_xid_or_not_at_all(message in vec(any::<u8>(), 0..128)) {
        if let Err(error) = Call::parse(&message) {
            let mut out = Vec::new();
            let answered = error.put_reply(&mut out);
            prop_assert_eq!(answered, !matches!(error, CallError::Unanswerable(_)));
            if answered {
                let reply = Reply::parse(&out).unwrap();
                prop_assert_eq!(&reply.xid.to_be_bytes()[..], &message[..4]);
                prop_assert!(matches!(reply.status, ReplyStatus::Denied(_)));
            } else {
                prop_assert!(out.is_empty());
            }
        }
    }

    #[test]
    fn a_call_with_one_byte_changed_never_panics(
        (mut message, _) in any_call(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let at = at.index(message.len());
        message[at] = byte;
        let _ = Call::parse(&message);
        let _ = Reply::parse(&message);
    }

    #[test]
    fn replies_round_trip(xid in any::<u32>(), status in any_status()) {
        let mut out = Vec::new();
        put_reply(&mut out, xid, status);
        let reply = Reply::parse(&out).unwrap();
        prop_assert_eq!((reply.xid, reply.status), (xid, status));
        prop_assert!(reply.results.is_empty());
    }

    #[test]
    fn fragments_join_to_the_message(
        message in vec(any::<u8>(), 0..300),
        lengths in vec(0usize..20, 0..20),
    ) {
        let mut stream = Vec::new();
        record::put_fragments(&mut stream, &message, lengths);
        record::put_record(&mut stream, |out| out.put(&message));
        prop_assert_eq!(records(&stream), [message.clone(), message]);
    }

    #[test]
    fn marks_round_trip(bytes in any::<[u8; 4]>()) {
        prop_assert_eq!(RecordMark::from_bytes(bytes).to_bytes(), bytes);
    }

    #[test]
    fn xdr_items_round_trip(
        a in any::<u32>(), b in any::<i64>(), c in any::<u64>(), d in any::<bool>(),
        bytes in vec(any::<u8>(), 0..40), text in ".{0,20}", array in vec(any::<i32>(), 0..9),
        option in any::<Option<u32>>(),
    ) {
        let mut out = Vec::new();
        out.put_u32(a);
        out.put_i64(b);
        out.put_u64(c);
        out.put_bool(d);
        out.put_opaque(&bytes);
        out.put_opaque_fixed(&bytes);
        out.put_opaque(text.as_bytes());
        out.put_array(&array, |w, &v| w.put_i32(v));
        out.put_option(option, |w, v| w.put_u32(v));
        prop_assert_eq!(out.len() % 4, 0);

        let mut r = XdrReader::new(&out);
        prop_assert_eq!(r.u32(), Ok(a));
        prop_assert_eq!(r.i64(), Ok(b));
        prop_assert_eq!(r.u64(), Ok(c));
        prop_assert_eq!(r.bool(), Ok(d));
        prop_assert_eq!(r.opaque(40), Ok(&bytes[..]));
        prop_assert_eq!(r.opaque_fixed(bytes.len()), Ok(&bytes[..]));
        prop_assert_eq!(r.utf8(80), Ok(&text[..]));
        prop_assert_eq!(r.array(9, XdrReader::i32), Ok(array));
        prop_assert_eq!(r.option(XdrReader::u32), Ok(option));
        prop_assert_eq!(r.finish(), Ok(()));
    }
}
