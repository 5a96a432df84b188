//! Sessions, tags and flushes, and clients that are none.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::Write;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use crate::common::{Client, LANES, Place, ROOT, Serving, hold_lanes, server};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_fs::Length;
use ksf_proto::p9::{Data, GetLock, HEADER_BYTES, Header, Lock, NO_TAG, Names, Reply, Request, SetStat, VERSION};
use ksf_test::effort;

const RLERROR: u8 = 7;
const RSTATFS: u8 = 9;
const RLOPEN: u8 = 13;
const RGETATTR: u8 = 25;
const RXATTRWALK: u8 = 31;
const RVERSION: u8 = 101;
const RFLUSH: u8 = 109;
const RWALK: u8 = 111;
const RREAD: u8 = 117;
const RWRITE: u8 = 119;
const RCLUNK: u8 = 121;

/// A server with a file, and a client that has it open as fid 1.
fn with_file(bytes: usize) -> (Place, Serving, Client) {
    let place = Place::new();
    fs::write(place.path("file"), vec![7; bytes]).unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.open(1, "file", 0).unwrap();
    (place, serving, client)
}

/// Sends requests so that they arrive together: none is answered before all were taken.
fn send_together(client: &mut Client, requests: &[(u16, Request<'_>)]) {
    let mut bytes = Vec::new();
    requests.iter().for_each(|(tag, request)| request.put(*tag, &mut bytes).unwrap());
    client.0.write_all(&bytes).unwrap();
}

fn read(count: u32) -> Request<'static> {
    Request::Read { fid: 1, offset: 0, count }
}

#[test]
fn a_version_is_agreed_on_or_refused() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.connect();
    assert_eq!(client.attach(ROOT, 0, b""), Err(libc::EPROTO), "before Tversion");
    let mut ask = |msize, version: &'static [u8]| {
        client.ask(Request::Version { msize, version }, |reply| match reply {
            Reply::Version { msize, version } => (msize, version.to_vec()),
            other => panic!("{other:?}"),
        })
    };
    for (msize, agreed) in [(4096, 4096), (65_536, 65_536), (1 << 20, 1 << 20), (u32::MAX, 1 << 20)] {
        assert_eq!(ask(msize, VERSION), Ok((agreed, VERSION.to_vec())));
    }
    for msize in [0, 7, 4095] {
        assert_eq!(ask(msize, VERSION), Err(libc::EINVAL), "{msize}");
    }
    for version in [&b"9P2000"[..], b"9P2000.u", b"9P2000.L\0", b"", b"unknown"] {
        assert_eq!(ask(8192, version), Ok((8192, b"unknown".to_vec())), "{version:?}");
    }
    assert_eq!(client.attach(ROOT, 0, b""), Err(libc::EPROTO), "after a Tversion that was refused");
    client.version();
    client.attach(ROOT, 0, b"").unwrap();
    serving.stop();
}

#[test]
fn a_version_in_the_middle_ends_the_session() {
    let (_place, serving, mut client) = with_file(100_000);
    let version = Request::Version { msize: 8192, version: VERSION };
    // Too long to be answered at once.
    send_together(&mut client, &[(1, read(70_000)), (2, Request::Flush { oldtag: 1 }), (NO_TAG, version)]);
    assert_eq!(client.next(), (NO_TAG, RVERSION), "what was under way is not answered");
    assert_eq!(client.stat(1), Err(libc::EBADF));
    // The tags are free.
    send_together(&mut client, &[(1, Request::Clunk { fid: 1 }), (2, Request::Flush { oldtag: 1 })]);
    assert_eq!([client.next(), client.next()], [(1, RLERROR), (2, RFLUSH)]);
    client.attach(ROOT, 0, b"").unwrap();
    client.open(1, "file", 0).unwrap();
    assert_eq!(client.read(1, 0, 50_000).unwrap().len(), 8192 - 11);
    serving.stop();
}

#[test]
fn the_reply_of_a_flushed_request_comes_before_rflush() {
    let (_place, serving, mut client) = with_file(1_000_000);
    for _ in 0..20 {
        let flush = |oldtag| Request::Flush { oldtag };
        let requests = [
            (1, read(900_000)),
            (2, flush(1)),
            (3, flush(1)),
            (4, flush(2)),
            (5, flush(99)),
            (6, flush(6)),
            (7, Request::Getattr { fid: 1, mask: 0 }),
            (8, flush(7)),
            (9, flush(8)),
        ];
        send_together(&mut client, &requests);
        let mut places = HashMap::new();
        for at in 0..requests.len() {
            let (tag, kind) = client.next();
            let wanted = match tag {
                1 => RREAD,
                7 => RGETATTR,
                _ => RFLUSH,
            };
            assert_eq!(kind, wanted, "tag {tag}");
            assert!(places.insert(tag, at).is_none(), "tag {tag} is answered twice");
        }
        for (first, second) in [(1, 2), (1, 3), (2, 4), (7, 8), (8, 9)] {
            assert!(places[&first] < places[&second], "{first} before {second}: {places:?}");
        }
    }
    serving.stop();
}

#[test]
fn a_tag_that_is_in_use_ends_the_connection() {
    let (_place, serving, mut client) = with_file(100_000);
    // Too long to be answered at once.
    send_together(&mut client, &[(1, read(70_000)), (2, read(80_000)), (1, read(30)), (3, read(40))]);
    let mut answered = Vec::new();
    while let Some(message) = client.receive() {
        let (tag, reply) = Reply::parse(&message).unwrap();
        assert_eq!(reply.kind(), RREAD);
        answered.push((tag, message.len()));
    }
    answered.sort_unstable();
    assert_eq!(answered, [(1, 70_011), (2, 80_011)], "one answer for each tag, and none after the mistake");
    assert_eq!(serving.ninep.tags_reused(), 1);
    // A tag is free again when it was answered.
    let mut client = serving.client();
    for _ in 0..10 {
        client.stat(ROOT).unwrap();
    }
    serving.stop();
}

#[test]
fn a_fid_is_what_requests_before_have_made_of_it() {
    let (_place, serving, mut client) = with_file(100_000);
    // Clunked with requests in flight: these go on.
    let stat = |fid| Request::Getattr { fid, mask: 0 };
    send_together(&mut client, &[(1, read(70_000)), (2, Request::Clunk { fid: 1 }), (3, stat(1))]);
    let answers: HashMap<u16, u8> = (0..3).map(|_| client.next()).collect();
    assert_eq!(answers, HashMap::from([(1, RREAD), (2, RCLUNK), (3, RLERROR)]));
    // A fid that is not made yet is none, and its number is taken; what opens it or gives it back waits. The shard leaves walks by a
    // dot to a lane.
    let mut buffer = Vec::new();
    let names = Names::of(&[b".", b"file"], &mut buffer).unwrap();
    let walk = Request::Walk { fid: ROOT, newfid: 5, names };
    let (open, clunk) = (Request::Lopen { fid: 5, flags: 0 }, Request::Clunk { fid: 5 });
    send_together(&mut client, &[(1, walk), (2, stat(5)), (3, walk), (4, open), (5, clunk), (6, walk)]);
    let answers: HashMap<u16, u8> = (0..6).map(|_| client.next()).collect();
    let made = [(1, RWALK), (2, RLERROR), (3, RLERROR), (4, RLOPEN), (5, RCLUNK), (6, RWALK)];
    assert_eq!(answers, HashMap::from(made));
    // One that is given back while it is opened stays away.
    send_together(&mut client, &[(1, Request::Lopen { fid: 5, flags: 0 }), (2, Request::Clunk { fid: 5 })]);
    let answers: HashMap<u16, u8> = (0..2).map(|_| client.next()).collect();
    assert_eq!(answers, HashMap::from([(1, RLOPEN), (2, RCLUNK)]));
    assert_eq!(client.stat(5), Err(libc::EBADF));
    // And does not become the next fid of its number.
    client.walk(ROOT, 5, "file").unwrap();
    let clone = Request::Walk { fid: ROOT, newfid: 5, names: Names::default() };
    send_together(&mut client, &[(1, Request::Lopen { fid: 5, flags: 0 }), (2, Request::Clunk { fid: 5 }), (3, clone)]);
    let answers: HashMap<u16, u8> = (0..3).map(|_| client.next()).collect();
    assert_eq!(answers, HashMap::from([(1, RLOPEN), (2, RCLUNK), (3, RWALK)]));
    assert_eq!(client.read(5, 0, 10), Err(libc::EBADF), "it is not open");
    client.does(Request::Lopen { fid: 5, flags: 0 }).unwrap();
    serving.stop();
}

/// The walk takes a lane many steps, so the others come while it is in progress.
#[test]
fn requests_that_wait_for_a_walk_of_their_fid_are_flushed_and_end_as_others() {
    let (_place, serving, mut client) = with_file(100);
    let mut buffer = Vec::new();
    let names = Names::of(&[b".".as_slice(); 16], &mut buffer).unwrap();
    let clone = Request::Walk { fid: ROOT, newfid: 2, names: Names::default() };
    let walk = Request::Walk { fid: 2, newfid: 2, names };
    let open = Request::Lopen { fid: 2, flags: 0 };
    for _ in 0..20 {
        let requests = [(1, clone), (2, walk), (3, open), (4, Request::Flush { oldtag: 3 }), (5, walk)];
        send_together(&mut client, &requests);
        let answers: Vec<(u16, u8)> = requests.iter().map(|_| client.next()).collect();
        assert_eq!(answers, [(1, RWALK), (2, RWALK), (3, RLOPEN), (4, RFLUSH), (5, RLERROR)]);
        // What waits does not outlive its session.
        let version = Request::Version { msize: 8192, version: VERSION };
        send_together(&mut client, &[(2, Request::Clunk { fid: 2 }), (1, clone)]);
        assert_eq!([client.next().0, client.next().0].iter().sum::<u16>(), 3);
        send_together(&mut client, &[(2, walk), (3, open), (NO_TAG, version)]);
        while client.next() != (NO_TAG, RVERSION) {}
        client.attach(ROOT, 0, b"").unwrap();
    }
    serving.stop();
}

#[test]
fn what_is_no_request_is_answered_or_ends_the_connection() {
    let (_place, serving, mut other) = with_file(100);
    let message = |size: u32, rest: &[u8]| [&size.to_le_bytes(), rest].concat();
    let replies = Request::KINDS.iter().map(|(kind, _)| (message(7, &[kind + 1, 5, 0]), libc::EOPNOTSUPP));
    let others = [
        // Rlerror, types that there are not, a cut and a longer Tclunk.
        (message(7, &[RLERROR, 5, 0]), libc::EOPNOTSUPP),
        (message(7, &[0, 5, 0]), libc::EOPNOTSUPP),
        (message(7, &[6, 5, 0]), libc::EOPNOTSUPP),
        (message(7, &[255, 5, 0]), libc::EOPNOTSUPP),
        (message(10, &[120, 5, 0, 0, 0, 0]), libc::EPROTO),
        (message(12, &[120, 5, 0, 0, 0, 0, 0, 0]), libc::EPROTO),
        // A string, and data, that are longer than the message.
        (message(17, &[72, 5, 0, 0, 0, 0, 0, 255, 255, 0, 0, 0, 0]), libc::EPROTO),
        (message(23, &[118, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]), libc::EPROTO),
    ];
    for (bytes, errno) in replies.chain(others) {
        let mut client = serving.client();
        client.0.write_all(&bytes).unwrap();
        let answer = client.receive().unwrap();
        assert_eq!(Reply::parse(&answer), Ok((5, Reply::Lerror { ecode: errno as u32 })), "{bytes:?}");
        client.stat(ROOT).unwrap();
    }
    for bytes in [message(3, &[]), message(0, &[0; 8]), message(6, &[120, 5]), message(u32::MAX, &[120, 5, 0])] {
        let mut client = serving.client();
        client.0.write_all(&bytes).unwrap();
        assert!(client.receive().is_none(), "{bytes:?}");
    }
    assert_eq!(other.read(1, 0, 1000).unwrap().len(), 100, "nobody else notices");
    serving.stop();
}

/// All requests but Tversion, each fid that one needs being absent in one of them.
fn requests_without_a_fid(names: Names<'_>) -> Vec<Request<'_>> {
    const NONE: u32 = 99;
    let (name, gid, mode) = (&b"name"[..], 0, 0o700);
    let lock = Lock { kind: 0, flags: 0, start: 0, length: 1, process: 1, client: name };
    let get_lock = GetLock { kind: 0, start: 0, length: 1, process: 1, client: name };
    vec![
        Request::Statfs { fid: NONE },
        Request::Lopen { fid: NONE, flags: 0 },
        Request::Lcreate { fid: NONE, name, flags: 0, mode, gid },
        Request::Symlink { dfid: NONE, name, target: name, gid },
        Request::Mknod { dfid: NONE, name, mode: 0o10_600, major: 0, minor: 0, gid },
        Request::Rename { fid: NONE, dfid: ROOT, name },
        Request::Rename { fid: ROOT, dfid: NONE, name },
        Request::Readlink { fid: NONE },
        Request::Getattr { fid: NONE, mask: 0 },
        Request::Setattr { fid: NONE, to: SetStat::default() },
        Request::Xattrwalk { fid: NONE, newfid: 98, name },
        Request::Xattrcreate { fid: NONE, name, size: 1, flags: 0 },
        Request::Readdir { fid: NONE, offset: 0, count: 100 },
        Request::Fsync { fid: NONE, datasync: 0 },
        Request::Lock { fid: NONE, lock },
        Request::Getlock { fid: NONE, lock: get_lock },
        Request::Link { dfid: NONE, fid: ROOT, name },
        Request::Link { dfid: ROOT, fid: NONE, name },
        Request::Mkdir { dfid: NONE, name, mode, gid },
        Request::Renameat { olddirfid: NONE, oldname: name, newdirfid: ROOT, newname: name },
        Request::Renameat { olddirfid: ROOT, oldname: name, newdirfid: NONE, newname: name },
        Request::Unlinkat { dirfid: NONE, name, flags: 0 },
        Request::Attach { fid: 98, afid: NONE, uname: name, aname: b"", n_uname: 0 },
        Request::Walk { fid: NONE, newfid: 98, names },
        Request::Walk { fid: NONE, newfid: 98, names: Names::default() },
        Request::Walk { fid: NONE, newfid: NONE, names },
        Request::Read { fid: NONE, offset: 0, count: 100 },
        Request::Write { fid: NONE, offset: 0, data: Data(name) },
        Request::Clunk { fid: NONE },
        Request::Remove { fid: NONE },
    ]
}

#[test]
fn each_request_for_a_fid_that_was_never_attached_fails_and_makes_none() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.client();
    let mut buffer = Vec::new();
    let requests = requests_without_a_fid(Names::of(&[b"name"], &mut buffer).unwrap());
    let kinds: BTreeSet<u8> = requests.iter().map(Request::kind).collect();
    let others: Vec<&str> =
        Request::KINDS.iter().filter(|(kind, _)| !kinds.contains(kind)).map(|(_, name)| *name).collect();
    assert_eq!(others, ["version", "auth", "flush"], "these need no fid");
    for request in requests {
        assert_eq!(client.does(request), Err(libc::EBADF), "{request:?}");
        for fid in [98, 99] {
            assert_eq!(client.clunk(fid), Err(libc::EBADF), "{request:?}");
        }
    }
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 0);
    client.stat(ROOT).unwrap();
    serving.stop();
}

#[test]
fn each_request_that_is_longer_or_shorter_than_its_fields_is_malformed() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.client();
    let mut buffer = Vec::new();
    let mut requests = requests_without_a_fid(Names::of(&[b"name", b"more"], &mut buffer).unwrap());
    requests.push(Request::Version { msize: 8192, version: VERSION });
    requests.push(Request::Auth { afid: 98, uname: b"name", aname: b"", n_uname: 0 });
    requests.push(Request::Flush { oldtag: 1 });
    for request in requests {
        let mut whole = Vec::new();
        request.put(5, &mut whole).unwrap();
        for length in (HEADER_BYTES..=whole.len() + 1).filter(|length| *length != whole.len()) {
            let mut message = whole.clone();
            message.resize(length, 0);
            message[..4].copy_from_slice(&(length as u32).to_le_bytes());
            client.0.write_all(&message).unwrap();
            let answer = client.receive().unwrap();
            let wanted = Reply::Lerror { ecode: libc::EPROTO as u32 };
            assert_eq!(Reply::parse(&answer), Ok((5, wanted)), "{request:?} of {length} bytes");
        }
    }
    client.stat(ROOT).expect("the session goes on");
    serving.stop();
}

#[test]
fn a_client_that_does_not_read_is_bounded_and_holds_nobody_up() {
    const READS: u16 = 1000;
    const BYTES: usize = 512 << 10;
    let (_place, serving, mut client) = with_file(BYTES);
    for tag in 0..READS {
        client.send(tag, read(BYTES as u32));
    }
    let made = || serving.ninep.messages().iter().find(|counts| counts.name == "read").unwrap().calls;
    ksf_test::wait_until("the first replies are made", || made() > 0);
    let mut other = serving.client();
    other.open(1, "file", 2).unwrap();
    for at in 0..200 {
        other.stat(ROOT).unwrap();
        // These two take a lane.
        other.does(Request::Write { fid: 1, offset: at, data: Data(b"x") }).unwrap();
        assert_eq!(other.read(1, 0, 70_000).unwrap().len(), 70_000);
    }
    // Of which as many were for the other client.
    let made = made() - 200;
    assert!(made <= 128, "{made} replies of 512 KiB were made for a client that reads none");
    let mut seen = vec![false; usize::from(READS)];
    for _ in 0..READS {
        let message = client.receive().unwrap();
        let tag = Header::parse(&message).unwrap().tag;
        assert_eq!(message.len(), BYTES + 11);
        assert!(!std::mem::replace(&mut seen[usize::from(tag)], true), "tag {tag} twice");
    }
    serving.stop();
}

#[test]
fn a_request_that_waits_holds_up_no_other_of_its_connection() {
    const BYTES: u32 = 100_000;
    let (_place, serving, mut client) = with_file(BYTES as usize);
    let files = serving.ninep.files();
    let (hold, held) = channel::<()>();
    let held = Arc::new(Mutex::new(held));
    // One lane is for short requests alone, so the last of these waits.
    for _ in 0..LANES {
        let held = Arc::clone(&held);
        files.lanes.submit(0, Length::Long, 0, move |_| assert!(held.lock().unwrap().recv().is_err()));
    }
    let counters = || files.lane_counters();
    ksf_test::wait_until("all lanes but one are held", || counters().running_jobs == LANES - 1);
    client.send(1, read(BYTES));
    ksf_test::wait_until("the read waits", || counters().queued_jobs == 2);
    // One that needs a lane, and one that may be answered without.
    client.send(2, Request::Statfs { fid: 1 });
    client.send(3, Request::Getattr { fid: 1, mask: 0 });
    let mut first = [client.next(), client.next()];
    first.sort_unstable();
    let is_waiting = counters().queued_jobs == 2;
    drop(hold);
    assert_eq!((first, is_waiting), ([(2, RSTATFS), (3, RGETATTR)], true));
    assert_eq!(client.next(), (1, RREAD));
    serving.stop();
}

/// Each request appends a byte to one file: the file has them in the order in which the only free lane carried them out.
#[test]
fn a_request_waits_for_one_request_of_each_connection_that_floods_the_lanes() {
    const FLOODING: usize = 5;
    const REQUESTS: u16 = 60;
    let place = Place::new();
    fs::write(place.path("log"), "").unwrap();
    let serving = place.serve();
    let appending = || {
        let mut client = serving.client();
        client.open(1, "log", (libc::O_WRONLY | libc::O_APPEND) as u32).unwrap();
        client
    };
    let append = |byte| Request::Write { fid: 1, offset: 0, data: Data(byte) };
    let (mut flooding, mut other): (Vec<Client>, _) = ((0..FLOODING).map(|_| appending()).collect(), appending());
    let files = serving.ninep.files();
    let mut holds = hold_lanes(files);
    let wait_for = |jobs| ksf_test::wait_until("requests wait", || files.lane_counters().queued_jobs == jobs);
    let flood = FLOODING * usize::from(REQUESTS);
    flooding.iter_mut().for_each(|client| (0..REQUESTS).for_each(|tag| client.send(tag, append(b"f"))));
    wait_for(flood);
    other.send(1, append(b"o"));
    wait_for(flood + 1);
    drop(holds.pop());
    assert_eq!(other.next(), (1, RWRITE));
    for client in &mut flooding {
        (0..REQUESTS).for_each(|_| assert_eq!(client.next().1, RWRITE));
    }
    let log = fs::read(place.path("log")).unwrap();
    let before = log.iter().position(|byte| *byte == b'o').unwrap();
    assert!(before <= FLOODING, "{before} requests of others were carried out before it");
    assert_eq!(log.len(), flood + 1);
    drop(holds);
    serving.stop();
}

/// A hundred thousand Tlopen in a soak.
#[test]
fn connections_that_open_all_they_can_leave_files_to_others() {
    const GREEDY: usize = 13;
    const FIDS: u32 = 64;
    const OPEN_MAX: usize = 256;
    /// Every connection can open as many.
    const RESERVED: usize = 8;
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let mut files = place.files(vec![place.export()]);
    files.fs.open_files_max = OPEN_MAX;
    let serving = place.serve_on(server(EngineKind::Epoll), files, FIDS as usize + 1);
    let opens: Vec<_> = (1..=FIDS).map(|fid| (fid as u16, Request::Lopen { fid, flags: 0 })).collect();
    let greedy = || {
        let mut client = serving.client();
        (1..=FIDS).for_each(|fid| drop(client.walk(ROOT, fid, "file").unwrap()));
        (client, 0)
    };
    let opens_some = |client: &mut Client| {
        (1..=RESERVED as u32).for_each(|fid| client.open(fid, "file", 0).unwrap());
        (1..=RESERVED as u32).for_each(|fid| client.clunk(fid).unwrap());
    };
    let mut greedy: Vec<(Client, usize)> = (0..GREEDY).map(|_| greedy()).collect();
    let (mut other, mut errors) = (serving.client(), BTreeSet::new());
    for _ in 0..effort(20_000, 100_000) / (GREEDY * opens.len()) {
        greedy.iter_mut().for_each(|(client, _)| send_together(client, &opens));
        opens_some(&mut other);
        for (client, opened) in &mut greedy {
            for _ in &opens {
                match Reply::parse(&client.receive().unwrap()).unwrap().1 {
                    Reply::Lerror { ecode } => drop(errors.insert(ecode as i32)),
                    _ => *opened += 1,
                }
            }
        }
    }
    assert_eq!(errors, BTreeSet::from([libc::EINVAL, libc::EMFILE]), "fids are open, and a connection has its share");
    let opened: Vec<usize> = greedy.iter().map(|(_, opened)| *opened).collect();
    assert!(opened.iter().all(|opened| *opened >= RESERVED), "{opened:?}");
    let open = serving.ninep.files().fs_counters().open_files;
    assert!(open == opened.iter().sum() && open <= OPEN_MAX - RESERVED, "{open} are open: {opened:?}");
    opens_some(&mut serving.client());
    serving.stop();
}

#[test]
fn an_open_for_which_no_connection_has_a_descriptor_is_enfile() {
    const OPEN_MAX: usize = 32;
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let mut files = place.files(vec![place.export()]);
    files.fs.open_files_max = OPEN_MAX;
    let serving = place.serve_on(server(EngineKind::Epoll), files, OPEN_MAX + 1);
    let mut clients = Vec::new();
    // Each opens all that it can, until there is nothing for a new one.
    loop {
        let mut client = serving.client();
        let count = (1..).take_while(|fid| client.open(*fid, "file", 0).is_ok()).count();
        assert!(clients.len() < OPEN_MAX, "open files have no bound");
        clients.push(client);
        if count == 0 {
            break;
        }
    }
    assert_eq!(serving.ninep.files().fs_counters().open_files, OPEN_MAX);
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    client.walk(ROOT, 2, "").unwrap();
    let gid = rustix::process::getegid().as_raw();
    let create = Request::Lcreate { fid: 2, name: b"new", flags: 2, mode: 0o600, gid };
    let open = Request::Lopen { fid: 1, flags: 0 };
    for request in [open, create] {
        assert_eq!(client.does(request), Err(libc::ENFILE), "{request:?}");
    }
    assert!(!place.path("new").exists());
    // Of the one that has the most.
    clients.remove(0);
    ksf_test::wait_until("a client opens a file", || client.does(open).is_ok());
    client.does(create).unwrap();
    serving.stop();
}

#[test]
fn requests_for_extended_attributes_in_flight_are_bounded_by_the_values_they_may_get() {
    const REQUESTS: u16 = 500;
    /// As many values of 64 KiB as `connection_bytes_max` has room for.
    const IN_FLIGHT_MAX: usize = 64;
    let place = Place::new();
    let serving = place.serve_with(EngineKind::Epoll, vec![place.export()], 1000);
    let (mut client, mut other) = (serving.client(), serving.client());
    let files = serving.ninep.files();
    let holds = hold_lanes(files);
    for tag in 0..REQUESTS {
        client.send(tag, Request::Xattrwalk { fid: ROOT, newfid: 1 + u32::from(tag), name: b"" });
    }
    ksf_test::wait_until("requests wait", || files.lane_counters().queued_jobs >= IN_FLIGHT_MAX);
    for _ in 0..200 {
        // Needs no lane.
        other.does(Request::Flush { oldtag: 99 }).unwrap();
    }
    let queued = files.lane_counters().queued_jobs;
    drop(holds);
    let mut seen = vec![false; usize::from(REQUESTS)];
    for _ in 0..REQUESTS {
        let (tag, kind) = client.next();
        assert_eq!((kind, std::mem::replace(&mut seen[usize::from(tag)], true)), (RXATTRWALK, false), "tag {tag}");
    }
    assert_eq!(queued, IN_FLIGHT_MAX);
    serving.stop();
}

/// Their sizes are what a client wants to write.
#[test]
fn extended_attributes_take_room_as_they_are_written() {
    const VALUES: u32 = 100;
    const BYTES: usize = 65_536;
    let place = Place::new();
    let serving = place.serve_with(EngineKind::Epoll, vec![place.export()], 1000);
    let (mut client, mut other) = (serving.client(), serving.client());
    for fid in 1..=VALUES {
        client.walk(ROOT, fid, "").unwrap();
        client.does(Request::Xattrcreate { fid, name: b"user.x", size: BYTES as u64, flags: 0 }).unwrap();
    }
    client.walk(ROOT, 500, "").unwrap();
    let value = vec![b'x'; BYTES];
    let mut written = (1..=VALUES).map(|fid| client.does(Request::Write { fid, offset: 0, data: Data(&value) }));
    // As many as `connection_bytes_max` has room for, with the fids.
    assert_eq!(written.by_ref().take_while(Result::is_ok).count(), 62);
    assert!(written.all(|result| result == Err(libc::ENOMEM)));
    other.walk(ROOT, 1, "").unwrap();
    for fid in 1..=VALUES {
        // The file system may have no room for such a value.
        client.clunk(fid).ok();
    }
    client.walk(ROOT, 1, "").unwrap();
    serving.stop();
}

/// As if others had taken all of the shard's memory: a client walks to a few objects at a time, and clunks them.
#[test]
fn a_client_walks_and_clunks_while_the_shard_has_no_room() {
    let place = Place::new();
    let limits = Limits { shard_bytes_max: 1, ..Limits::default() };
    let serving = place.serve_on(server(EngineKind::Epoll).limits(limits), place.files(vec![place.export()]), 1000);
    // The root is the first of four fids that have the room.
    let mut client = serving.client();
    for _ in 0..3 {
        (1..4).for_each(|fid| client.walk(ROOT, fid, "").map(drop).unwrap());
        assert_eq!(client.walk(ROOT, 4, "").map(drop), Err(libc::ENOMEM));
        client.stat(ROOT).unwrap();
        (1..4).for_each(|fid| client.clunk(fid).unwrap());
    }
    serving.stop();
}

/// As if others had taken all of the shard's memory: a client locks a few ranges, and gives them back.
#[test]
fn a_client_locks_and_unlocks_while_the_shard_has_no_room() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let limits = Limits { shard_bytes_max: 1, ..Limits::default() };
    let serving = place.serve_on(server(EngineKind::Epoll).limits(limits), place.files(vec![place.export()]), 1000);
    let mut client = serving.client();
    client.open(1, "file", 2).unwrap();
    let mut lock = |kind, start, length| {
        client.does(Request::Lock { fid: 1, lock: Lock { kind, flags: 0, start, length, process: 7, client: b"here" } })
    };
    for _ in 0..3 {
        let granted = (0..1000).take_while(|at| lock(1, 2 * at, 1).is_ok()).count();
        assert!((8..64).contains(&granted), "{granted} ranges");
        assert_eq!(lock(1, 1 << 30, 1), Err(libc::ENOLCK));
        assert_eq!(lock(2, 0, 0), Ok(()));
    }
    serving.stop();
}

#[test]
fn what_a_connection_has_open_is_closed_with_it() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let path = place.path("file").canonicalize().unwrap();
    let open_for_writing = || {
        let is_one = |fd: &fs::DirEntry| {
            let name = fd.file_name().into_string().unwrap();
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{name}")).unwrap_or_default();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or("0").trim();
            let is_writable = u32::from_str_radix(flags, 8).unwrap() & 0o3 != 0;
            is_writable && fs::read_link(fd.path()).is_ok_and(|target| target == path)
        };
        fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok).filter(is_one).count()
    };
    let serving = place.serve();
    let mut client = serving.client();
    client.open(1, "file", 1).unwrap();
    client.open(2, "file", 1).unwrap();
    assert_eq!(open_for_writing(), 2);
    client.clunk(1).unwrap();
    assert_eq!(open_for_writing(), 1, "Rclunk comes when the file is closed");
    drop(client);
    ksf_test::wait_until("the file is closed", || open_for_writing() == 0);
    serving.stop();
}
