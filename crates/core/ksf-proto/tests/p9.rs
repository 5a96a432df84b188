//! 9P2000.L: each message with the bytes of the specification, every cut and damaged length, and any bytes at all.

use ksf_proto::p9::{
    Data, DirEntry, GetLock, Header, Lock, Names, P9Error, Qid, Qids, Reply, Request, SetStat, Stat, StatFs,
};
use proptest::collection::vec;
use proptest::prelude::*;

const TAG: u16 = 0x2211;

/// A message of these fields, in hexadecimal.
fn message(kind: u8, fields: &str) -> Vec<u8> {
    let digits: Vec<u8> = fields.bytes().filter(|digit| !digit.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let body: Vec<u8> = digits.chunks(2).map(byte).collect();
    let mut message = (7 + body.len() as u32).to_le_bytes().to_vec();
    message.extend([kind, 0x11, 0x22]);
    message.extend(body);
    message
}

/// The same message with another length, which it says.
fn resized(message: &[u8], length: usize) -> Vec<u8> {
    let mut message = message.to_vec();
    message.resize(length, 0);
    message[..4].copy_from_slice(&(length as u32).to_le_bytes());
    message
}

const A_QID: Qid = Qid { kind: 0x80, version: 0x0403_0201, path: 0x0c0b_0a09_0807_0605 };
const QID: &str = "80 01020304 05060708090a0b0c";

fn requests(names: Names<'_>) -> Vec<(&'static str, Request<'_>)> {
    let fid = 0x0807_0605;
    vec![
        ("05060708", Request::Statfs { fid }),
        ("05060708 02000000", Request::Lopen { fid, flags: 2 }),
        (
            "05060708 0200 6162 41000000 a4010000 07000000",
            Request::Lcreate { fid, name: b"ab", flags: 0x41, mode: 0o644, gid: 7 },
        ),
        (
            "05060708 0200 6162 0300 2e2f63 07000000",
            Request::Symlink { dfid: fid, name: b"ab", target: b"./c", gid: 7 },
        ),
        (
            "05060708 0200 6162 a4610000 01000000 03000000 07000000",
            Request::Mknod { dfid: fid, name: b"ab", mode: 0o60644, major: 1, minor: 3, gid: 7 },
        ),
        ("05060708 09000000 0200 6162", Request::Rename { fid, dfid: 9, name: b"ab" }),
        ("05060708", Request::Readlink { fid }),
        ("05060708 ff07000000000000", Request::Getattr { fid, mask: 0x7ff }),
        (
            "05060708 ff010000 a4010000 01000000 02000000 0300000000000000 0400000000000000 0500000000000000 \
             0600000000000000 0700000000000000",
            Request::Setattr {
                fid,
                to: SetStat {
                    valid: 0x1ff,
                    mode: 0o644,
                    uid: 1,
                    gid: 2,
                    size: 3,
                    atime_seconds: 4,
                    atime_nanos: 5,
                    mtime_seconds: 6,
                    mtime_nanos: 7,
                },
            },
        ),
        ("05060708 09000000 0200 6162", Request::Xattrwalk { fid, newfid: 9, name: b"ab" }),
        ("05060708 0200 6162 0300000000000000 01000000", Request::Xattrcreate { fid, name: b"ab", size: 3, flags: 1 }),
        ("05060708 0900000000000000 00100000", Request::Readdir { fid, offset: 9, count: 4096 }),
        ("05060708 01000000", Request::Fsync { fid, datasync: 1 }),
        (
            "05060708 01 02000000 0300000000000000 0400000000000000 05000000 0200 6162",
            Request::Lock { fid, lock: Lock { kind: 1, flags: 2, start: 3, length: 4, process: 5, client: b"ab" } },
        ),
        (
            "05060708 01 0300000000000000 0400000000000000 05000000 0200 6162",
            Request::Getlock { fid, lock: GetLock { kind: 1, start: 3, length: 4, process: 5, client: b"ab" } },
        ),
        ("09000000 05060708 0200 6162", Request::Link { dfid: 9, fid, name: b"ab" }),
        ("05060708 0200 6162 ed010000 07000000", Request::Mkdir { dfid: fid, name: b"ab", mode: 0o755, gid: 7 }),
        (
            "05060708 0200 6162 09000000 0100 63",
            Request::Renameat { olddirfid: fid, oldname: b"ab", newdirfid: 9, newname: b"c" },
        ),
        ("05060708 0200 6162 00020000", Request::Unlinkat { dirfid: fid, name: b"ab", flags: 0x200 }),
        ("00001000 0800 395032303030 2e4c", Request::Version { msize: 1 << 20, version: b"9P2000.L" }),
        ("05060708 0100 75 0200 2f61 e8030000", Request::Auth { afid: fid, uname: b"u", aname: b"/a", n_uname: 1000 }),
        (
            "05060708 ffffffff 0100 75 0200 2f61 e8030000",
            Request::Attach { fid, afid: u32::MAX, uname: b"u", aname: b"/a", n_uname: 1000 },
        ),
        ("3412", Request::Flush { oldtag: 0x1234 }),
        ("05060708 09000000 0200 0200 6162 0100 63", Request::Walk { fid, newfid: 9, names }),
        ("05060708 0900000000000000 00100000", Request::Read { fid, offset: 9, count: 4096 }),
        ("05060708 0900000000000000 03000000 646566", Request::Write { fid, offset: 9, data: Data(b"def") }),
        ("05060708", Request::Clunk { fid }),
        ("05060708", Request::Remove { fid }),
    ]
}

fn replies(qids: Qids<'_>) -> Vec<(String, Reply<'_>)> {
    let numbers = |from: u64, count: u64| -> String {
        (from..from + count).map(|number| format!("{:016x}", number.swap_bytes())).collect()
    };
    let stat = Stat {
        valid: 1,
        qid: A_QID,
        mode: 0o644,
        uid: 1,
        gid: 2,
        nlink: 3,
        rdev: 4,
        size: 5,
        block_bytes: 6,
        blocks: 7,
        atime_seconds: 8,
        atime_nanos: 9,
        mtime_seconds: 10,
        mtime_nanos: 11,
        ctime_seconds: 12,
        ctime_nanos: 13,
        btime_seconds: 14,
        btime_nanos: 15,
        generation: 16,
        data_version: 17,
    };
    let room = StatFs {
        kind: 1,
        block_bytes: 2,
        blocks: 3,
        blocks_free: 4,
        blocks_available: 5,
        files: 6,
        files_free: 7,
        id: 8,
        name_bytes_max: 255,
    };
    let opened = format!("{QID} e8ff0f00");
    vec![
        ("02000000".into(), Reply::Lerror { ecode: 2 }),
        (format!("01000000 02000000 {} ff000000", numbers(3, 6)), Reply::Statfs { stat: room }),
        (opened.clone(), Reply::Lopen { qid: A_QID, iounit: (1 << 20) - 24 }),
        (opened, Reply::Lcreate { qid: A_QID, iounit: (1 << 20) - 24 }),
        (QID.into(), Reply::Symlink { qid: A_QID }),
        (QID.into(), Reply::Mknod { qid: A_QID }),
        (String::new(), Reply::Rename {}),
        ("0200 6162".into(), Reply::Readlink { target: b"ab" }),
        (format!("{} {QID} a4010000 01000000 02000000 {}", numbers(1, 1), numbers(3, 15)), Reply::Getattr { stat }),
        (String::new(), Reply::Setattr {}),
        (numbers(9, 1), Reply::Xattrwalk { size: 9 }),
        (String::new(), Reply::Xattrcreate {}),
        ("03000000 646566".into(), Reply::Readdir { data: Data(b"def") }),
        (String::new(), Reply::Fsync {}),
        ("01".into(), Reply::Lock { status: 1 }),
        (
            format!("01 {} 05000000 0200 6162", numbers(3, 2)),
            Reply::Getlock { lock: GetLock { kind: 1, start: 3, length: 4, process: 5, client: b"ab" } },
        ),
        (String::new(), Reply::Link {}),
        (QID.into(), Reply::Mkdir { qid: A_QID }),
        (String::new(), Reply::Renameat {}),
        (String::new(), Reply::Unlinkat {}),
        ("00100000 0700 756e6b6e6f776e".into(), Reply::Version { msize: 4096, version: b"unknown" }),
        (QID.into(), Reply::Auth { aqid: A_QID }),
        (QID.into(), Reply::Attach { qid: A_QID }),
        (String::new(), Reply::Flush {}),
        (format!("0200 {QID} {QID}"), Reply::Walk { qids }),
        ("03000000 646566".into(), Reply::Read { data: Data(b"def") }),
        ("03000000".into(), Reply::Write { count: 3 }),
        (String::new(), Reply::Clunk {}),
        (String::new(), Reply::Remove {}),
    ]
}

/// Checks one message of a direction, all its cuts, and each damage of its size.
macro_rules! check {
    ($direction:ident, $expected:expr, $fields:expr) => {
        let (expected, bytes) = ($expected, message($expected.kind(), $fields));
        assert_eq!($direction::parse(&bytes), Ok((TAG, expected)));
        assert_eq!(Header::parse(&bytes), Ok(Header { kind: expected.kind(), tag: TAG }));
        let mut written = b"before".to_vec();
        expected.put(TAG, &mut written).unwrap();
        assert_eq!(written[6..], bytes, "{expected:?}");
        for length in 0..bytes.len() {
            assert!($direction::parse(&bytes[..length]).is_err(), "{expected:?} cut after {length} bytes");
            if length >= 4 {
                assert!($direction::parse(&resized(&bytes, length)).is_err(), "{expected:?} of {length} bytes");
            }
        }
        let longer = $direction::parse(&resized(&bytes, bytes.len() + 1)).unwrap_err();
        assert_eq!(longer, P9Error::Trailing { offset: bytes.len(), left: 1 });
        for bit in 0..32 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!($direction::parse(&damaged), Err(P9Error::Size { .. })), "{expected:?} bit {bit}");
        }
    };
}

#[test]
fn every_request_is_read_and_written_and_its_cuts_are_errors() {
    let mut buffer = Vec::new();
    let requests = requests(Names::of(&[b"ab", b"c"], &mut buffer).unwrap());
    assert_eq!(requests.len(), Request::KINDS.len());
    for ((fields, expected), (kind, _)) in requests.into_iter().zip(Request::KINDS) {
        assert_eq!(expected.kind(), *kind);
        check!(Request, expected, fields);
    }
}

#[test]
fn every_reply_is_read_and_written_and_its_cuts_are_errors() {
    let mut buffer = Vec::new();
    let replies = replies(Qids::of(&[A_QID, A_QID], &mut buffer).unwrap());
    assert_eq!(replies.len(), Reply::KINDS.len());
    for ((fields, expected), (kind, _)) in replies.into_iter().zip(Reply::KINDS) {
        assert_eq!(expected.kind(), *kind);
        check!(Reply, expected, &fields);
    }
}

#[test]
fn lengths_inside_of_a_message_are_checked() {
    let table = [
        (72, "05060708 0300 6162 ed010000 07000000"),
        (72, "05060708 0100 6162 ed010000 07000000"),
        (72, "05060708 ffff 6162 ed010000 07000000"),
        (110, "05060708 09000000 0100 0200 6162 0100 63"),
        (110, "05060708 09000000 0300 0200 6162 0100 63"),
        (110, "05060708 09000000 0200 0300 6162 0100 63"),
        (118, "05060708 0900000000000000 02000000 646566"),
        (118, "05060708 0900000000000000 04000000 646566"),
        (118, "05060708 0900000000000000 ffffffff 646566"),
    ];
    for (kind, fields) in table {
        assert!(Request::parse(&message(kind, fields)).is_err(), "{kind}: {fields}");
    }
}

#[test]
fn a_walk_has_sixteen_names_at_most() {
    let walk = |count: usize| message(110, &format!("01000000 02000000 {count:02x}00 {}", "0100 61".repeat(count)));
    let of_16 = walk(16);
    let Ok((_, Request::Walk { names, .. })) = Request::parse(&of_16) else { panic!("16 names are a walk") };
    assert_eq!((names.len(), names.iter().collect::<Vec<_>>()), (16, vec![&b"a"[..]; 16]));
    assert_eq!(Request::parse(&walk(17)), Err(P9Error::TooMany { offset: 15, count: 17 }));
    assert!(Names::of(&[&b"a"[..]; 17], &mut Vec::new()).is_err());
}

#[test]
fn a_direction_does_not_read_the_other_one() {
    for (kind, _) in Reply::KINDS {
        assert_eq!(Request::parse(&message(*kind, "")), Err(P9Error::Kind { kind: *kind }));
    }
    for (kind, _) in Request::KINDS {
        assert_eq!(Reply::parse(&message(*kind, "")), Err(P9Error::Kind { kind: *kind }));
    }
    assert_eq!(Request::parse(&message(6, "")), Err(P9Error::Kind { kind: 6 }), "Tlerror is no message");
}

#[test]
fn what_does_not_fit_is_not_written() {
    let long = vec![b'a'; 65_536];
    let mut out = b"before".to_vec();
    let reply = Reply::Readlink { target: &long };
    assert_eq!(reply.put(1, &mut out), Err(P9Error::TooLong { bytes: 65_536, limit: 65_535 }));
    assert_eq!(out, b"before");
    Reply::Readlink { target: &long[1..] }.put(1, &mut out).unwrap();
}

#[test]
fn data_may_follow_their_head() {
    let mut whole = Vec::new();
    Reply::Read { data: Data(b"def") }.put(TAG, &mut whole).unwrap();
    let mut parts = Vec::new();
    Reply::put_read_head(117, TAG, 3, &mut parts);
    parts.extend_from_slice(b"def");
    assert_eq!(parts, whole);
}

#[test]
fn entries_are_read_up_to_an_error() {
    let entry = |name| DirEntry { qid: A_QID, offset: 7, kind: 4, name };
    let mut data = Vec::new();
    entry(b"one").put(&mut data).unwrap();
    assert_eq!(data.len(), DirEntry::HEAD_BYTES + 3);
    assert_eq!(data[13..], *b"\x07\0\0\0\0\0\0\0\x04\x03\0one");
    entry(b"two").put(&mut data).unwrap();
    let read = |data| DirEntry::all(data).collect::<Vec<_>>();
    assert_eq!(read(&data), [Ok(entry(b"one")), Ok(entry(b"two"))]);
    let cut = read(&data[..data.len() - 1]);
    assert!(cut.len() == 2 && cut[0].is_ok() && cut[1].is_err(), "{cut:?}");
}

fn any_message(kinds: &'static [(u8, &'static str)]) -> impl Strategy<Value = Vec<u8>> {
    // Short and many zeros: lengths that fit.
    let byte = prop_oneof![3 => Just(0_u8), 1 => 0_u8..4, 1 => any::<u8>()];
    let whole = (proptest::sample::select(kinds), vec(byte, 0..180), any::<u16>());
    whole.prop_map(|((kind, _), body, tag)| {
        let mut message = (7 + body.len() as u32).to_le_bytes().to_vec();
        message.push(kind);
        message.extend(tag.to_le_bytes());
        message.extend(body);
        message
    })
}

proptest! {
    #[test]
    fn what_is_read_is_written_with_the_same_bytes(
        request in any_message(Request::KINDS),
        reply in any_message(Reply::KINDS),
    ) {
        // Cut to each length, with the size that it has then: some of them are messages.
        for length in 7..=request.len() {
            let request = resized(&request, length);
            if let Ok((tag, read)) = Request::parse(&request) {
                let mut written = Vec::new();
                read.put(tag, &mut written).unwrap();
                prop_assert_eq!(written, request);
            }
        }
        for length in 7..=reply.len() {
            let reply = resized(&reply, length);
            if let Ok((tag, read)) = Reply::parse(&reply) {
                let mut written = Vec::new();
                read.put(tag, &mut written).unwrap();
                prop_assert_eq!(written, reply);
            }
        }
    }

    #[test]
    fn messages_round_trip(
        numbers in any::<[u32; 4]>(),
        offset in any::<u64>(),
        strings in vec(vec(any::<u8>(), 0..300), 0..=16),
        data in vec(any::<u8>(), 0..5000),
        tag in any::<u16>(),
    ) {
        let [fid, newfid, mode, gid] = numbers;
        let strings: Vec<&[u8]> = strings.iter().map(Vec::as_slice).collect();
        let name = strings.first().copied().unwrap_or_default();
        let mut buffer = Vec::new();
        let names = Names::of(&strings, &mut buffer).unwrap();
        for request in [
            Request::Walk { fid, newfid, names },
            Request::Write { fid, offset, data: Data(&data) },
            Request::Mkdir { dfid: fid, name, mode, gid },
            Request::Attach { fid, afid: newfid, uname: name, aname: name, n_uname: gid },
        ] {
            let mut message = Vec::new();
            request.put(tag, &mut message).unwrap();
            prop_assert_eq!(Request::parse(&message), Ok((tag, request)));
        }
        prop_assert_eq!(names.iter().collect::<Vec<_>>(), strings);
    }

    #[test]
    fn no_bytes_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = Request::parse(&bytes);
        let _ = Reply::parse(&bytes);
        let _ = DirEntry::all(&bytes).count();
    }
}
