//! One connection, driven by hand: what it promises beyond its framing.

use crate::common;
use std::sync::Arc;

use crate::common::{Bench, KEY, Recorder, env, in_slot};
use ksf::connection::Connection;
use ksf::env::Env;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::{Limits, Time};
use ksf::pool::Chunk;
use ksf::service::ConnKey;
use ksf::{CloseReason, Order, Peer};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

#[test]
fn deferred_replies_keep_the_order_of_requests() {
    let mut bench = Bench::lines();
    bench.receive(b"1\ndefer 2\n3\ndefer 4\n5\n");
    bench.take();
    assert_eq!(bench.got(), "1\n");
    bench.answer(1, b"four");
    bench.take();
    assert_eq!(bench.got(), "1\n");
    bench.answer(0, b"two");
    bench.take();
    assert_eq!(bench.got(), "1\ntwo\n3\nfour\n5\n");
}

#[test]
fn deferred_replies_leave_as_they_are_ready_where_order_is_free() {
    let mut bench = Bench::new(LINES, Order::Free, Limits::default());
    bench.receive(b"defer 1\n2\ndefer 3\n");
    bench.answer(1, b"three");
    bench.take();
    bench.answer(0, b"one");
    bench.take();
    assert_eq!(bench.got(), "2\nthree\none\n");
}

/// A service may answer a message in several parts, each on its own.
#[test]
fn a_message_deferred_twice_is_open_until_both_answers_are_there() {
    for order in [Order::Requests, Order::Free] {
        let mut bench = Bench::new(LINES, order, Limits::default());
        bench.receive(b"twice 1\n");
        bench.conn.peer_closed(&mut bench.env);
        bench.answer(1, b"b");
        bench.take();
        assert_eq!(bench.conn.finished(), None, "{order:?}: an answer is missing");
        bench.answer(0, b"a");
        bench.take();
        let mut lines: Vec<_> = bench.got().lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["a", "b"], "{order:?}");
        assert_eq!(bench.conn.finished(), Some(CloseReason::PeerClosed));
    }
}

#[test]
fn one_batch_at_a_time() {
    let mut bench = Bench::lines();
    bench.receive(b"1\n");
    let first = bench.conn.take_batch(bench.env.now, &mut bench.env.spares).unwrap();
    bench.receive(b"2\n");
    assert!(
        bench.conn.take_batch(bench.env.now, &mut bench.env.spares).is_none(),
        "a second batch could overtake the first"
    );
    bench.conn.sent(1, false, &mut bench.env);
    assert!(bench.conn.take_batch(bench.env.now, &mut bench.env.spares).is_none());
    bench.conn.sent(first.len() - 1, true, &mut bench.env);
    assert_eq!(common::bytes_of(&bench.conn.take_batch(bench.env.now, &mut bench.env.spares).unwrap()), b"2\n");
}

#[test]
fn a_peer_that_does_not_read_is_not_processed() {
    let limits = Limits { out_queue_bytes_max: 15_000, ..Limits::default() };
    let mut bench = Bench::new(LINES, Order::Requests, limits);
    bench.receive(b"long 1\nlong 2\nlong 3\nlong 4\n");
    assert_eq!(bench.conn.messages(), 2, "two of 10,000 bytes are above the limit");
    assert!(!bench.conn.wants_bytes(&bench.env));
    bench.receive(b"long 5\n");
    assert_eq!(bench.conn.messages(), 2);
    bench.take();
    assert_eq!(bench.conn.messages(), 5);
    assert_eq!(bench.got.len(), 5 * 10_001);
}

/// Replies behind a deferred one are held, and count: otherwise one slow task lets its peer fill the memory.
#[test]
fn replies_held_back_by_a_deferred_one_are_bounded() {
    let limits = Limits { out_queue_bytes_max: 15_000, ..Limits::default() };
    let mut bench = Bench::new(LINES, Order::Requests, limits);
    bench.receive(b"defer\n");
    for _ in 0..100 {
        bench.receive(b"long\n");
    }
    assert!(!bench.conn.wants_bytes(&bench.env));
    assert_eq!(bench.conn.queued_bytes(), 2 * 10_001);
    bench.answer(0, b"first");
    while bench.conn.has_output() {
        bench.take();
    }
    assert_eq!(bench.got.len(), 6 + 100 * 10_001);
}

/// The same for messages that need no reply: a place in the order costs memory, too.
#[test]
fn messages_without_reply_take_no_place_behind_a_deferred_one() {
    let mut bench = Bench::lines();
    bench.receive(b"defer\n");
    let before = bench.env.pool.in_use();
    for _ in 0..10_000 {
        bench.receive(b"quiet\n");
    }
    bench.receive(b"end\n");
    assert_eq!(bench.conn.held_replies(), 2, "the deferred one, and the echo behind it");
    assert_eq!(bench.env.pool.in_use(), before);
    bench.answer(0, b"first");
    bench.take();
    assert_eq!(bench.got(), "first\nend\n");
}

#[test]
fn unanswered_messages_are_bounded() {
    let mut bench = Bench::new(LINES, Order::Free, Limits { deferred_max: 3, ..Limits::default() });
    bench.receive(b"defer\ndefer\ndefer\ndefer\ndefer\n");
    assert_eq!(bench.conn.messages(), 3);
    assert!(!bench.conn.wants_bytes(&bench.env));
    bench.answer(0, b"x");
    assert_eq!(bench.conn.messages(), 4);
}

/// Peers that do not read leave the slots to the others.
#[test]
fn peers_that_do_not_read_cannot_take_all_slots() {
    let limits = Limits { out_queue_bytes_max: 0, ..Limits::default() };
    let mut env = env(limits, 4096, 16);
    let service = common::Recorder::new(LINES, Order::Requests);
    let mut conns = Vec::new();
    for index in 0..64 {
        let key = ConnKey { index, generation: 0 };
        let mut conn = Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap();
        // The second line waits until the reply to the first is taken, which is never.
        let chunk = in_slot(&mut env, b"one\ntwo\n");
        conn.receive(chunk, &mut env);
        let chunk = in_slot(&mut env, b"three\n");
        conn.receive(chunk, &mut env);
        conns.push(conn);
    }
    assert!(env.pool.in_use() <= env.pool.slots() / 2, "{} of 16 slots are taken", env.pool.in_use());
    for conn in conns {
        assert_eq!(conn.messages(), 1);
        conn.end(&mut env);
    }
    assert_eq!((env.pool.in_use(), env.budget.input_bytes()), (0, 0));
}

/// With the default number of slots the ring of io_uring has half of them.
#[test]
fn a_long_reply_is_sent_from_its_slot_though_the_engine_has_many() {
    let mut env = env(Limits::default(), 4096, 16);
    let ring: Vec<_> = (0..7).map(|_| env.pool.take().unwrap()).collect();
    let mut conns = Vec::new();
    for index in 0..9 {
        let key = ConnKey { index, generation: 0 };
        let mut conn = Connection::new(Arc::new(common::net::Echo), Peer::Unix, key, env.now).unwrap();
        let chunk = in_slot(&mut env, &[index as u8; 3000]);
        conn.receive(chunk, &mut env);
        conns.push(conn);
        assert_eq!(env.pool.kept(), conns.len().min(8) as u32);
    }
    for (index, conn) in conns.iter_mut().enumerate() {
        let batch = conn.take_batch(env.now, &mut env.spares).unwrap();
        assert!(common::bytes_of(&batch) == [index as u8; 3000]);
        batch.recycle(&mut env.spares);
    }
    assert_eq!((env.pool.kept(), env.pool.in_use()), (0, 7));
    drop(ring);
}

#[test]
fn half_close_is_answered_first() {
    let mut bench = Bench::lines();
    bench.receive(b"defer\n2\n");
    bench.conn.peer_closed(&mut bench.env);
    assert_eq!(bench.conn.finished(), None);
    bench.answer(0, b"1");
    assert_eq!(bench.conn.finished(), None);
    bench.take();
    assert_eq!(bench.got(), "1\n2\n");
    assert_eq!(bench.conn.finished(), Some(CloseReason::PeerClosed));
}

#[test]
fn a_drained_connection_answers_what_it_received() {
    let mut bench = Bench::lines();
    bench.receive(b"defer\nhalf a li");
    bench.conn.drain(&mut bench.env);
    assert!(!bench.conn.is_closing(), "a message is on its way");
    bench.receive(b"ne\n");
    bench.conn.drain(&mut bench.env);
    bench.receive(b"too late\n");
    bench.answer(0, b"first");
    bench.take();
    assert_eq!(bench.got(), "first\nhalf a line\n");
    assert_eq!(bench.conn.finished(), Some(CloseReason::Drained));
}

/// What was put aside was received, too.
#[test]
fn a_drain_waits_for_what_was_put_aside() {
    let limits = Limits { out_queue_bytes_max: 0, ..Limits::default() };
    let mut bench = Bench::new(LINES, Order::Requests, limits);
    bench.receive(b"1\n2\n3\n");
    bench.conn.drain(&mut bench.env);
    while bench.conn.has_output() {
        bench.take();
        bench.conn.drain(&mut bench.env);
    }
    assert_eq!((bench.got(), bench.conn.finished()), ("1\n2\n3\n", Some(CloseReason::Drained)));
}

/// `Reply::close`: after the replies so far, and those include the ones that an earlier message still waits for.
#[test]
fn a_service_closes_after_the_replies_before_it() {
    let mut bench = Bench::lines();
    bench.receive(b"defer\nlast\nnever\n");
    bench.take();
    assert_eq!((bench.got(), bench.conn.finished()), ("", None));
    bench.answer(0, b"first");
    bench.take();
    assert_eq!(bench.got(), "first\nlast\n");
    assert_eq!(bench.conn.finished(), Some(CloseReason::Service));
    assert_eq!(bench.conn.messages(), 2);
}

#[test]
fn a_forgotten_reply_closes_and_what_was_ready_before_is_sent() {
    let mut bench = Bench::lines();
    bench.receive(b"1\ndefer\n3\n");
    bench.service.deferred.lock().unwrap().clear();
    bench.deliver();
    bench.take();
    assert_eq!(bench.got(), "1\n");
    assert_eq!(bench.conn.finished(), Some(CloseReason::Abandoned));
}

/// An orderly end waits for its answers; when one of them never comes, it was not orderly, and counts as that.
#[test]
fn a_reply_forgotten_after_a_half_close_is_counted() {
    let mut bench = Bench::lines();
    bench.receive(b"1\ndefer\n3\n");
    bench.conn.peer_closed(&mut bench.env);
    bench.service.deferred.lock().unwrap().clear();
    bench.deliver();
    bench.take();
    assert_eq!((bench.got(), bench.conn.finished()), ("1\n", Some(CloseReason::Abandoned)));
}

/// The generation: a late answer must not reach the next connection in the same place.
#[test]
fn a_late_answer_does_not_reach_the_successor() {
    let mut bench = Bench::lines();
    bench.receive(b"defer\n");
    let successor = ConnKey { generation: KEY.generation + 1, ..KEY };
    let next = Connection::new(Arc::clone(&bench.service), Peer::Unix, successor, bench.env.now).unwrap();
    std::mem::replace(&mut bench.conn, next).end(&mut bench.env);
    bench.receive(b"defer\n");
    bench.answer(0, b"for the dead");
    bench.take();
    assert_eq!(bench.got(), "");
    bench.answer(0, b"for the living");
    bench.take();
    assert_eq!(bench.got(), "for the living\n");
}

#[test]
fn timeouts_run_from_the_documented_moment() {
    let limits = Limits { assembly_timeout_ms: 100, idle_timeout_ms: 1000, ..Limits::default() };
    let at = |ms| Time::default().plus_ms(ms);
    let mut bench = Bench::new(LINES, Order::Requests, limits);
    bench.receive(b"a tri");
    bench.env.now = at(60);
    bench.receive(b"ckle");
    bench.env.now = at(100);
    assert_eq!(bench.conn.tick(&mut bench.env), None);
    assert!(!bench.conn.is_closing());
    bench.env.now = at(101);
    assert_eq!(bench.conn.tick(&mut bench.env), None);
    assert_eq!(bench.conn.finished(), Some(CloseReason::AssemblyTimeout), "progress does not prolong it");

    let mut bench = Bench::new(LINES, Order::Requests, (*bench.env.limits).clone());
    bench.receive(b"defer\n");
    bench.env.now = at(5000);
    bench.conn.tick(&mut bench.env);
    assert!(!bench.conn.is_closing(), "it waits for us, not we for it");
    bench.answer(0, b"x");
    bench.take();
    bench.env.now = at(6001);
    bench.conn.tick(&mut bench.env);
    assert_eq!(bench.conn.finished(), Some(CloseReason::IdleTimeout));
}

#[test]
fn a_send_without_progress_times_out_and_one_with_progress_does_not() {
    let limits = Limits { send_timeout_ms: 100, ..Limits::default() };
    let mut bench = Bench::new(LINES, Order::Requests, limits);
    bench.receive(b"long\n");
    let _batch = bench.conn.take_batch(bench.env.now, &mut bench.env.spares).unwrap();
    for ms in (90..=900).step_by(90) {
        bench.env.now = Time::default().plus_ms(ms);
        assert_eq!(bench.conn.tick(&mut bench.env), None);
        bench.conn.sent(1, false, &mut bench.env);
    }
    bench.env.now = bench.env.now.plus_ms(101);
    assert_eq!(bench.conn.tick(&mut bench.env), Some(CloseReason::SendTimeout));
}

/// While we do not read, the rest of a message cannot arrive, and that is not its sender's fault.
#[test]
fn the_assembly_clock_stands_still_while_the_peer_is_not_read() {
    let limits = Limits { assembly_timeout_ms: 100, deferred_max: 1, ..Limits::default() };
    let at = |ms| Time::default().plus_ms(ms);
    let mut bench = Bench::new(LINES, Order::Free, limits);
    bench.receive(b"defer\nhalf");
    assert!(!bench.conn.wants_bytes(&bench.env));
    bench.env.now = at(500);
    bench.conn.tick(&mut bench.env);
    assert!(!bench.conn.is_closing());
    bench.answer(0, b"x");
    assert!(bench.conn.wants_bytes(&bench.env));
    bench.env.now = at(600);
    bench.conn.tick(&mut bench.env);
    assert!(!bench.conn.is_closing(), "its time begins when it is read again");
    bench.env.now = at(601);
    bench.conn.tick(&mut bench.env);
    assert!(bench.conn.is_closing());

    // The first half is already assembled when the peer stops being read, because of a large late answer.
    let limits = Limits { assembly_timeout_ms: 100, out_queue_bytes_max: 100, ..Limits::default() };
    let mut bench = Bench::new(LINES, Order::Free, limits);
    bench.receive(b"defer\nhalf");
    bench.answer(0, &[b'x'; 200]);
    assert!(!bench.conn.wants_bytes(&bench.env));
    bench.env.now = at(500);
    bench.conn.tick(&mut bench.env);
    assert!(!bench.conn.is_closing());
    bench.take();
    bench.conn.tick(&mut bench.env);
    assert!(!bench.conn.is_closing(), "nobody could have sent the rest faster");
    bench.receive(b" a line\n");
    bench.take();
    assert!(bench.got().ends_with("half a line\n"));
}

/// A shard's turns, as far as its connections give way in them.
struct Turns {
    env: Env,
    conns: Vec<Box<Connection>>,
}

impl Turns {
    const FLOOD: usize = 64 << 10;
    /// What one connection may have of a turn, and what is left to each once the turn has had four shares.
    const SHARE: u32 = 4096;
    const LATE: u32 = 256;

    fn of(conns: u32) -> Self {
        let (env, service) = (env(Limits::default(), 4096, 8), Recorder::new(LINES, Order::Requests));
        let key = |index| ConnKey { index, generation: 0 };
        let conn = |index| Connection::new(Arc::clone(&service), Peer::Unix, key(index), env.now).unwrap();
        let conns = (0..conns).map(conn).collect();
        Self { env, conns }
    }

    fn receive(&mut self, conn: usize, bytes: &[u8]) {
        self.conns[conn].receive(Chunk::from_vec(bytes.to_vec()), &mut self.env);
    }

    fn begin_one(&mut self) {
        self.env.begin_turn();
        while let Some(key) = self.env.next_to_go_on() {
            self.conns[key.index as usize].go_on(&mut self.env);
        }
    }

    fn messages(&self) -> u32 {
        self.conns.iter().map(|conn| conn.messages()).sum()
    }
}

/// Messages without a reply owe nothing that could stop their connection.
#[test]
fn a_connection_gives_way_after_its_share_of_a_turn_also_without_replies() {
    let mut turns = Turns::of(2);
    turns.begin_one();
    for _ in 0..2 {
        turns.receive(0, &[b'\n'; Turns::FLOOD]);
        assert_eq!(turns.conns[0].messages(), Turns::SHARE);
    }
    assert!(!turns.conns[0].wants_bytes(&turns.env), "more would be put aside");
    turns.receive(0, b"last\n");
    turns.conns[0].peer_closed(&mut turns.env);
    for turn in 2..=2 * Turns::FLOOD as u32 / Turns::SHARE {
        turns.begin_one();
        assert_eq!(turns.conns[0].messages(), turn * Turns::SHARE);
        turns.receive(1, b"1\n");
        assert!(turns.conns[1].has_output(), "another one has its turn");
        assert!(!turns.conns[0].is_closing());
    }
    turns.begin_one();
    assert_eq!(turns.conns[0].messages(), 2 * Turns::FLOOD as u32 + 1);
    assert!(turns.conns[0].has_output() && turns.conns[0].is_closing());
    assert!(turns.env.next_to_go_on().is_none());
    assert_eq!(turns.env.budget.input_bytes(), 0);
}

#[test]
fn all_connections_of_a_turn_together_give_way_after_a_bounded_number_of_messages() {
    const CONNS: usize = 40;
    const FLOOD: usize = 16 << 10;
    let mut turns = Turns::of(CONNS as u32 + 1);
    turns.begin_one();
    (0..CONNS).for_each(|conn| turns.receive(conn, &[b'\n'; FLOOD]));
    assert_eq!(turns.messages(), 4 * Turns::SHARE + (CONNS as u32 - 4) * Turns::LATE);
    for conn in 0..CONNS {
        turns.conns[conn].peer_closed(&mut turns.env);
    }
    let mut count = 0;
    while turns.messages() - count < (CONNS * FLOOD) as u32 {
        let before = turns.messages();
        turns.begin_one();
        let went_on = turns.messages() - before;
        assert!((1..5 * Turns::SHARE).contains(&went_on), "{went_on} messages in a turn");
        turns.receive(CONNS, &b"quiet\n".repeat(Turns::LATE as usize));
        count += Turns::LATE;
        assert_eq!(turns.conns[CONNS].messages(), count, "a pipeline that is no longer is handled at once");
    }
    assert!(turns.conns[..CONNS].iter().all(|conn| conn.is_closing()));
}
