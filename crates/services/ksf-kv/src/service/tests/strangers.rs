//! Connections without the password.

use super::*;

/// An empty line has no reply, and either protocol may follow it.
#[test]
fn a_stranger_is_ended_after_a_few_empty_lines() {
    let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 1, 2, settings);
    world.send(0, &"\n \r\n".repeat(16));
    assert!(!world.conns[0].as_ref().unwrap().is_closing());
    assert_eq!(world.ask(0, &["AUTH", "open sesame"]), "+OK\r\n");
    world.send(0, &"\n".repeat(1_000));
    assert_eq!(world.ask(0, &["PING"]), "+PONG\r\n");
    for (first, empty) in [("", "\n"), ("", "*0\r\n"), ("*0\r\n", "*-1\r\n"), ("PING\r\n", "\r\n")] {
        world.renew(1);
        world.send(1, first);
        world.take(1);
        world.send(1, &empty.repeat(31));
        assert!(!world.conns[1].as_ref().unwrap().is_closing(), "{empty:?}");
        world.send(1, &empty.repeat(2));
        assert!(world.conns[1].as_ref().unwrap().is_closing(), "{empty:?}");
        assert_eq!(world.take_batch(1), None);
    }
    // Without a password there is no bound, as in Redis.
    let mut world = World::new(1);
    world.send(0, &"\n".repeat(1_000));
    assert_eq!(world.ask(0, &["PING"]), "+PONG\r\n");
}

/// Unfinished inputs of strangers: the front, and the part that grows.
fn unfinished() -> Vec<(&'static str, String)> {
    let arguments = format!("$1500\r\n{}\r\n", "v".repeat(1500)).repeat(9);
    let chunks = format!("100\r\n{}\r\n", "v".repeat(256)).repeat(50);
    let fields = "X-Field: value\r\n".repeat(900);
    vec![
        ("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n", format!("$16000\r\n{}", "v".repeat(15_000))),
        ("*10\r\n", format!("{arguments}$1000\r\n{}", "v".repeat(999))),
        ("SET key ", "v".repeat(15_000)),
        ("GET /", "k".repeat(15_000)),
        ("PUT /key HTTP/1.1\r\nHost: x\r\n", fields.clone()),
        ("PUT /key HTTP/1.1\r\nHost: x\r\nContent-Length: 16000\r\n\r\n", "v".repeat(15_000)),
        ("PUT /key HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", chunks),
        ("PUT /key HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", fields[..4000].to_owned()),
    ]
}

/// Counts allocated bytes for unfinished inputs, and for replies that the stranger does not read.
#[test]
fn a_stranger_takes_16_kib_of_memory() {
    const MOST: i64 = 16 << 10;
    // The connection itself, and the rest of whole pages.
    const BESIDE: i64 = 4 << 10;
    let no_request = "GET /key HTTP/1.1\r\nHost: x\r\n\r\n";
    let unread = ["PING\r\n", "*1\r\n$4\r\nPING\r\n", "AUTH no\r\n", no_request].map(|one| ("", one.repeat(20_000)));
    for (front, rest) in unfinished().into_iter().chain(unread) {
        for step in [1, 1000, 60_000] {
            let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
            let mut world = World::set_up(Folder::new(), Medium::Block, 1, 0, settings);
            let what = format!("{}... by {step}", format!("{front}{rest}")[..40].escape_default());
            let before = bytes();
            let key = ConnKey { index: 0, generation: 0 };
            let conn = Connection::new(world.on.clone(), Peer::Unix, key, world.env.now).unwrap();
            world.conns.push(Some(conn));
            for piece in [front, &rest].iter().flat_map(|part| part.as_bytes().chunks(step)) {
                let conn = world.conns[0].as_mut().unwrap();
                if conn.is_closing() || !conn.wants_bytes(&world.env) {
                    break;
                }
                conn.receive(Chunk::from_vec(piece.to_vec()), &mut world.env);
                world.end_turn();
            }
            // Buffers that are kept for later messages are no memory of this one.
            world.env.buffers.free_kept();
            let (taken, counted) = (bytes() - before, world.env.budget.bytes() as i64);
            assert!(taken <= MOST + BESIDE, "{what}: {taken} bytes");
            assert!(counted <= MOST + BESIDE, "{what}: {counted} bytes are counted");
        }
    }
}

/// Each byte of a message that arrives in pieces is scanned once, except for a few at its front and at its end, and for the length
/// of the unfinished argument. The test overwrites the bytes between with some that would end the message.
#[test]
fn a_resumed_look_at_a_message_does_not_begin_anew() {
    /// Empty lines in front of a request, and its method.
    const FRONT_BYTES: usize = 33;
    /// A line with a number.
    const END_BYTES: usize = 24;
    let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 2, 0, settings);
    let (kv, shard) = (&world.service.kv, &mut world._idle[0]);
    let limits = Limits::default();
    let many = ("*2000\r\n", "$4\r\nmore\r\n".repeat(1999));
    let known = || unfinished().into_iter().chain([many.clone()]).map(|input| (Standing::Known, input));
    let all = unfinished().into_iter().map(|input| (Standing::Unknown, input)).chain(known());
    // The end of a body with a length is known.
    for (standing, (front, rest)) in all.filter(|(_, (front, _))| !front.contains("Content-Length")) {
        for step in [1, 7, 100] {
            let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
            conn.session.standing = standing;
            let mut buf = front.as_bytes().to_vec();
            assert!(matches!(kv.cut(&mut conn, &buf, 0, &limits), Ok(Frame::Incomplete { .. })), "{front}");
            let (mut from, mut argument) = (FRONT_BYTES.max(front.len()), usize::MAX);
            for piece in rest.as_bytes().chunks(step) {
                let scanned = buf.len();
                let end = argument.min(scanned.saturating_sub(END_BYTES));
                buf.get_mut(from..end).unwrap_or_default().fill(b'\n');
                from = from.max(end);
                argument = piece.iter().rposition(|byte| *byte == b'$').map_or(argument, |at| scanned + at);
                buf.extend_from_slice(piece);
                let told = kv.cut(&mut conn, &buf, scanned, &limits);
                let is_open = matches!(told, Ok(Frame::Incomplete { .. }));
                assert!(is_open, "{front} by {step}: {told:?} at {}", buf.len());
            }
            kv.close(shard, conn);
        }
    }
}

/// With a password, a peer that authenticates over either protocol is no stranger until `RESET`, or until a request without the
/// password.
#[test]
fn authenticated_peer_is_no_stranger() {
    let settings = Settings { password: Some("open sesame".into()), ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 2, 0, settings);
    let (kv, shard) = (&world.service.kv, &mut world._idle[0]);
    let limits = Limits::default();
    let is_stranger = |conn: &KvConn| kv.session(conn).is_stranger;
    let request = |fields: &str| format!("GET /key HTTP/1.1\r\nHost: x\r\n{fields}\r\n").into_bytes();
    let with = request("Authorization: Bearer open sesame\r\n");
    let part_of_body = b"PUT /key HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer open sesame\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab";
    for (bytes, is_one) in [
        (&request("")[..], true),
        (&request("Authorization: Bearer no\r\n"), true),
        (&with, false),
        (&part_of_body[..], false),
        // The head is unfinished.
        (&with[..with.len() - 2], true),
    ] {
        let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
        assert!(is_stranger(&conn));
        kv.cut(&mut conn, bytes, 0, &limits).unwrap();
        assert_eq!(is_stranger(&conn), is_one, "{}", bytes.escape_ascii());
        kv.close(shard, conn);
    }
    let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
    for (bytes, is_one) in [(&with, false), (&request(""), true), (&with, false), (&request("X: y\r\n"), true)] {
        kv.cut(&mut conn, bytes, 0, &limits).unwrap();
        assert_eq!(is_stranger(&conn), is_one, "{}", bytes.escape_ascii());
    }
    kv.close(shard, conn);
    // Without a password, no local peer is a stranger.
    let mut world = World::on_last_of(2, 0, Durability::None);
    let (kv, shard) = (&world.service.kv, &mut world._idle[0]);
    let mut conn = kv.accept(shard, &Peer::Unix).unwrap();
    kv.cut(&mut conn, &request(""), 0, &limits).unwrap();
    assert!(!kv.session(&conn).is_stranger);
    kv.close(shard, conn);
}
