//! More arrives at once than there is memory for: everybody is slowed down, and only a peer that does nothing is closed.

use std::sync::Arc;

use crate::common::{Recorder, bytes_of, env, in_slot};
use ksf::budget::Silent;
use ksf::connection::Connection;
use ksf::env::Env;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::{Limits, Time};
use ksf::service::{ConnKey, Order, Peer};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);
const PEERS: u32 = 48;
const CHUNK_BYTES: usize = 8 << 10;
/// Chunks of one line.
const CHUNKS: usize = 4;
/// Room for six lines.
const LIMIT_BYTES: usize = 6 * CHUNKS * CHUNK_BYTES;

type Conn = Box<Connection>;

/// Plays the end of a shard's turn.
fn end_turn(env: &mut Env, conns: &mut [Conn]) {
    for _ in 0..env.budget.waiting() {
        let Some(key) = env.budget.next_to_proceed(&env.limits) else { break };
        conns[key.index as usize].proceed(env);
    }
    if env.budget.update_overfull(&env.limits) && !env.budget.is_overfull() {
        conns.iter_mut().for_each(|conn| conn.read_again(env));
    }
}

fn crowd(limits: Limits) -> (Env, Vec<Conn>) {
    let env = env(limits, CHUNK_BYTES as u32, 256);
    let service = Recorder::new(LINES, Order::Requests);
    let conn = |index| {
        let key = ConnKey { index, generation: 0 };
        Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap()
    };
    let conns = (0..PEERS).map(conn).collect();
    (env, conns)
}

fn receive(env: &mut Env, conn: &mut Conn, last: bool) {
    let mut bytes = vec![b'x'; CHUNK_BYTES];
    bytes[CHUNK_BYTES - 1] = if last { b'\n' } else { b'x' };
    let chunk = in_slot(env, &bytes);
    conn.receive(chunk, env);
}

/// Above twice the limit, the connection on which a chunk arrived that was on its way was closed.
#[test]
fn what_was_on_its_way_when_reading_stopped_closes_nobody() {
    let (mut env, mut conns) = crowd(Limits { assembly_bytes_max: LIMIT_BYTES, ..Limits::default() });
    let mut arrived = [0; PEERS as usize];
    // All of them arrive in one turn, in which no engine can have stopped: 48 times half a line is four times the limit.
    for _ in 0..CHUNKS / 2 {
        for (conn, arrived) in conns.iter_mut().zip(&mut arrived) {
            receive(&mut env, conn, false);
            *arrived += 1;
        }
    }
    end_turn(&mut env, &mut conns);
    assert!(env.budget.is_overfull());
    let read = conns.iter().filter(|conn| conn.wants_bytes(&env)).count();
    assert!((1..=ksf::budget::PASSES).contains(&read), "{read} are read while the shard is overfull");
    let most = env.budget.input_bytes();
    let mut turns = 0;
    while arrived.iter().any(|arrived| *arrived < CHUNKS) {
        turns += 1;
        assert!(turns < 1000, "nobody goes on: {arrived:?}");
        for (conn, arrived) in conns.iter_mut().zip(&mut arrived) {
            if *arrived < CHUNKS && conn.wants_bytes(&env) {
                *arrived += 1;
                receive(&mut env, conn, *arrived == CHUNKS);
            }
        }
        end_turn(&mut env, &mut conns);
        let with_passes = most + ksf::budget::PASSES * CHUNKS * CHUNK_BYTES;
        assert!(env.budget.input_bytes() <= with_passes, "{} bytes are kept", env.budget.input_bytes());
    }
    for conn in &mut conns {
        assert!(!conn.is_closing(), "{:?}", conn.finished());
        let batch = conn.take_batch(env.now, &mut env.spares).expect("a reply");
        assert_eq!(bytes_of(&batch).len(), CHUNKS * CHUNK_BYTES);
        conn.sent(batch.len(), true, &mut env);
    }
    assert!(!env.budget.is_overfull());
    assert_eq!((env.budget.input_bytes(), env.budget.waiting()), (0, 0));
}

/// A peer that is not read because others filled the memory has done nothing wrong.
#[test]
fn time_stands_still_for_those_that_are_not_read() {
    let limits = Limits {
        assembly_bytes_max: LIMIT_BYTES,
        assembly_timeout_ms: 100,
        idle_timeout_ms: 100,
        pressure_timeout_ms: 1_000,
        ..Limits::default()
    };
    let (mut env, mut conns) = crowd(limits);
    for _ in 0..CHUNKS / 2 {
        conns.iter_mut().for_each(|conn| receive(&mut env, conn, false));
    }
    end_turn(&mut env, &mut conns);
    let unread: Vec<_> = (0..conns.len()).filter(|at| !conns[*at].wants_bytes(&env)).collect();
    env.now = Time(0).plus_ms(500);
    for at in &unread {
        assert_eq!(conns[*at].tick(&mut env), None);
        assert!(!conns[*at].is_closing(), "{:?}", conns[*at].finished());
    }
    // Those that could have sent, and did not, end: then the others are read, and have all of their time.
    while env.budget.is_overfull() {
        let late = conns.iter_mut().filter(|conn| conn.wants_bytes(&env)).collect::<Vec<_>>();
        assert!(!late.is_empty(), "nobody is read, and nobody ends");
        env.now = env.now.plus_ms(1_000);
        for conn in late {
            let _ = conn.tick(&mut env);
            assert!(conn.is_closing());
        }
        end_turn(&mut env, &mut conns);
    }
    env.now = env.now.plus_ms(99);
    let idle = conns.iter_mut().filter(|conn| conn.wants_bytes(&env)).collect::<Vec<_>>();
    assert!(!idle.is_empty());
    for conn in idle {
        let _ = conn.tick(&mut env);
        assert!(!conn.is_closing(), "{:?}", conn.finished());
    }
}

/// Replies that are not read keep the input behind them: when all others wait for that memory, their peer must read.
#[test]
fn a_peer_that_reads_nothing_ends_when_all_wait_for_its_memory() {
    let limits = Limits { assembly_bytes_max: LIMIT_BYTES, out_queue_bytes_max: 1, ..Limits::default() };
    let (mut env, mut conns) = crowd(limits);
    for conn in &mut conns {
        let line = in_slot(&mut env, b"a line\n");
        conn.receive(line, &mut env);
        let _sending = conn.take_batch(env.now, &mut env.spares).expect("a reply");
        receive(&mut env, conn, false);
        receive(&mut env, conn, false);
    }
    end_turn(&mut env, &mut conns);
    assert!(env.budget.is_overfull());
    env.now = Time(0).plus_ms(999);
    assert!(conns.iter_mut().all(|conn| conn.tick(&mut env).is_none() && !conn.is_closing()));
    env.now = Time(0).plus_ms(1_001);
    for conn in &mut conns {
        assert_eq!(conn.tick(&mut env), None);
        assert!(conn.is_closing());
    }
    end_turn(&mut env, &mut conns);
    assert!(!env.budget.is_overfull());
}

/// A byte now and then kept a pass for as long as a message may take, and others waited for it.
#[test]
fn a_pass_is_not_kept_by_trickling() {
    let limits = Limits { assembly_bytes_max: LIMIT_BYTES, pressure_timeout_ms: 1_000, ..Limits::default() };
    let (mut env, mut conns) = crowd(limits);
    for _ in 0..CHUNKS / 2 {
        conns.iter_mut().for_each(|conn| receive(&mut env, conn, false));
    }
    end_turn(&mut env, &mut conns);
    assert!(env.budget.is_overfull(), "only those with a pass are read");
    let read: Vec<_> = (0..conns.len()).filter(|at| conns[*at].wants_bytes(&env)).collect();
    let [trickles, sends, ..] = read[..] else { panic!("{read:?} are read") };
    env.now = Time(0).plus_ms(900);
    let chunk = in_slot(&mut env, b"x");
    conns[trickles].receive(chunk, &mut env);
    (0..8).for_each(|_| receive(&mut env, &mut conns[sends], false));
    env.now = Time(0).plus_ms(1_001);
    for at in [trickles, sends] {
        assert_eq!(conns[at].tick(&mut env), None);
    }
    assert!(!conns[trickles].is_closing() && !conns[trickles].wants_bytes(&env), "it is the turn of others");
    assert!(!conns[sends].is_closing() && conns[sends].wants_bytes(&env));
    // Its time began anew.
    env.now = Time(0).plus_ms(1_999);
    assert_eq!(conns[sends].tick(&mut env), None);
    assert!(!conns[sends].is_closing());
    env.now = Time(0).plus_ms(2_003);
    assert_eq!(conns[sends].tick(&mut env), None);
    assert!(conns[sends].is_closing());
    // A byte in each of its turns: they count together, so that it does not come again for ever.
    for turn in 3.. {
        assert!(turn < 200, "it trickles for ever");
        if conns[trickles].wants_bytes(&env) {
            let chunk = in_slot(&mut env, b"x");
            conns[trickles].receive(chunk, &mut env);
        }
        env.now = Time(0).plus_ms(turn * 1_001);
        for conn in &mut conns {
            let _ = conn.tick(&mut env);
        }
        if conns[trickles].is_closing() {
            break;
        }
        end_turn(&mut env, &mut conns);
    }
    assert_eq!(conns[trickles].finished(), Some(ksf::CloseReason::AssemblyTimeout));
}

/// A request that arrives whole needs none of the memory that is short.
#[test]
fn a_peer_at_a_message_boundary_is_read_and_answered_whatever_others_keep() {
    let (mut env, mut conns) = crowd(Limits { assembly_bytes_max: LIMIT_BYTES, ..Limits::default() });
    let (last, hogs) = conns.split_last_mut().unwrap();
    for _ in 0..CHUNKS / 2 {
        hogs.iter_mut().for_each(|hog| receive(&mut env, hog, false));
    }
    end_turn(&mut env, hogs);
    assert!(env.budget.is_overfull() && env.budget.waiting() > 0);
    for _ in 0..2 {
        assert!(last.wants_bytes(&env), "it keeps nothing");
        let chunk = in_slot(&mut env, b"ping\n");
        last.receive(chunk, &mut env);
        let batch = last.take_batch(env.now, &mut env.spares).expect("a reply");
        assert_eq!(bytes_of(&batch), b"ping\n");
        last.sent(batch.len(), true, &mut env);
    }
    let chunk = in_slot(&mut env, b"beginning");
    last.receive(chunk, &mut env);
    assert!(!last.wants_bytes(&env), "with an unfinished message it waits like all");
}

/// However many peers are silent, the shard knows all of them at the same time. Waiting for each in turn took the others
/// as many seconds as there were silent peers by eight.
#[test]
fn all_silent_peers_are_known_after_one_timeout() {
    let limits = Limits { assembly_bytes_max: LIMIT_BYTES, pressure_timeout_ms: 1_000, ..Limits::default() };
    let (mut env, mut conns) = crowd(limits);
    for _ in 0..CHUNKS / 2 {
        conns.iter_mut().for_each(|conn| receive(&mut env, conn, false));
    }
    // This one ends its message with what was on its way.
    receive(&mut env, &mut conns[1], true);
    end_turn(&mut env, &mut conns);
    env.now = Time(0).plus_ms(1_000);
    assert!(conns.iter().all(|conn| conn.silent(&env).is_none()), "they have had no time");
    env.now = Time(0).plus_ms(1_001);
    // Bytes of this one wait in its socket.
    conns[0].note_unread(env.now);
    let silent: Vec<_> = (0..conns.len()).filter(|at| conns[*at].silent(&env).is_some()).collect();
    assert_eq!(silent, (2..conns.len()).collect::<Vec<_>>());
    for at in silent {
        if env.budget.keeps_too_much(&env.limits) {
            conns[at].close_silent(&mut env);
        }
    }
    end_turn(&mut env, &mut conns);
    assert!(!env.budget.is_overfull() && env.budget.input_bytes() <= LIMIT_BYTES / 2);
    assert!(conns[0].wants_bytes(&env) && !conns[0].is_closing());
    assert!(conns.iter().any(|conn| conn.silent(&env).is_some()), "those that keep little may stay");
}

/// A stranger goes before one that told who it is, and of two strangers the one that keeps more.
#[test]
fn strangers_and_large_messages_are_closed_first() {
    let silent = |is_stranger, bytes| Silent { is_stranger, bytes };
    let mut all = [silent(false, 9), silent(true, 1), silent(true, 5), silent(false, 3)];
    all.sort_unstable();
    let order: Vec<_> = all.into_iter().rev().collect();
    assert_eq!(order, [silent(true, 5), silent(true, 1), silent(false, 9), silent(false, 3)]);
}

/// A copy of one byte keeps a buffer of 4 KiB.
#[test]
fn what_is_put_aside_counts_with_its_memory() {
    let limits = Limits { out_queue_bytes_max: 1, ..Limits::default() };
    let mut env = env(limits, 64, 4);
    let service = Recorder::new(LINES, Order::Requests);
    let key = ConnKey { index: 0, generation: 0 };
    let mut conn = Connection::new(service, Peer::Unix, key, env.now).unwrap();
    for bytes in [&b"a line\n"[..], b"a", b"b", b"c"] {
        let chunk = in_slot(&mut env, bytes);
        conn.receive(chunk, &mut env);
    }
    // Half of the slots are kept; of the others copies are made.
    assert_eq!((env.pool.kept(), env.budget.input_bytes()), (2, 2 + 4096));
    conn.end(&mut env);
    assert_eq!(env.budget.input_bytes(), 0);
}
