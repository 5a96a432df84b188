//! What a peer can make a connection hold: requests in work, replies held back, replies queued.

use std::sync::{Arc, Mutex};

use crate::common::{Bench, KEY, bytes_of, env, in_slot};
use ksf::connection::Connection;
use ksf::deferred::Deferred;
use ksf::env::Env;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::service::{Message, Order, Peer, Refused, Reply, Service, SessionState};
use ksf::{CloseReason, Profile, outgoing::Upstream};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);
const READ_BYTES: usize = 1 << 20;

/// A file server's read: the request says how long the reply will be, and another thread answers.
#[derive(Default)]
struct Reads {
    announces: bool,
    order: Option<Order>,
    deferred: Mutex<Vec<Deferred>>,
}

impl Service for Reads {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: self.order.unwrap_or(Order::Requests), ..Profile::new("reads", LINES) }
    }

    fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, reply: &mut Reply<'_>) {
        let deferred = if self.announces { reply.defer_for(READ_BYTES) } else { reply.defer() };
        self.deferred.lock().unwrap().push(deferred);
    }

    fn refuse(&self, (): &mut (), (): &mut (), _: CloseReason, reply: &mut Reply<'_>) {
        self.deferred.lock().unwrap().push(reply.defer());
    }

    fn upstream(&self, (): &mut (), (): &mut (), _: Upstream, reply: &mut Reply<'_>) {
        self.deferred.lock().unwrap().push(reply.defer());
    }
}

struct Served {
    env: Env,
    service: Arc<Reads>,
    conn: Box<Connection>,
    /// The most that was owed at any moment.
    most_bytes: usize,
}

impl Served {
    fn new(service: Reads, limits: Limits) -> Self {
        let (service, env) = (Arc::new(service), env(limits, 4096, 8));
        let conn = Connection::new(Arc::clone(&service), Peer::Unix, KEY, env.now).unwrap();
        Self { env, service, conn, most_bytes: 0 }
    }

    /// As many requests as the connection takes, of a peer that reads nothing. Returns how many were handed over.
    fn ask(&mut self, requests: usize) -> u32 {
        for _ in 0..requests {
            if !self.conn.wants_bytes(&self.env) {
                break;
            }
            let chunk = in_slot(&mut self.env, b"read\n");
            self.conn.receive(chunk, &mut self.env);
            self.note();
        }
        self.conn.messages()
    }

    fn answer_all(&mut self) {
        loop {
            let deferred = std::mem::take(&mut *self.service.deferred.lock().unwrap());
            if deferred.is_empty() {
                return;
            }
            for deferred in deferred {
                deferred.reply(vec![7; READ_BYTES]);
                for delivery in self.env.mailbox.take_deliveries() {
                    self.conn.deliver(delivery, &mut self.env);
                    self.note();
                }
            }
        }
    }

    fn note(&mut self) {
        assert_eq!(self.env.budget.reply_bytes(), self.conn.owed_bytes(), "the shard's sum is that of its connections");
        self.most_bytes = self.most_bytes.max(self.conn.owed_bytes());
    }

    /// The peer takes what is queued, one batch.
    fn take(&mut self) -> usize {
        let Some(mut batch) = self.conn.take_batch(self.env.now, &mut self.env.spares) else { return 0 };
        let bytes = bytes_of(&batch).len();
        batch.advance(bytes, &mut self.env.spares);
        self.conn.sent(bytes, true, &mut self.env);
        self.note();
        bytes
    }
}

#[test]
fn announced_replies_are_taken_off_the_budget_before_the_work_begins() {
    for order in [Order::Requests, Order::Free] {
        let reads = Reads { announces: true, order: Some(order), ..Reads::default() };
        let mut served = Served::new(reads, Limits::default());
        assert_eq!(served.ask(1024), 4, "{order:?}: four reads of 1 MiB fill 4 MiB");
        served.answer_all();
        let most = Limits::default().connection_bytes_max + READ_BYTES;
        assert!(served.most_bytes <= most, "{order:?}: {} bytes were owed", served.most_bytes);
        // The peer reads again: what waited is handed over, and nothing was lost.
        let mut taken = 0;
        while taken < 1024 * (READ_BYTES + 1) {
            served.ask(1024);
            served.answer_all();
            let more = served.take();
            assert!(more > 0, "{order:?}: stuck after {taken} bytes and {} messages", served.conn.messages());
            taken += more;
            if served.conn.messages() >= 1024 {
                while served.take() > 0 {}
                break;
            }
        }
        assert!(served.most_bytes <= most, "{order:?}: {} bytes were owed", served.most_bytes);
        assert_eq!(served.conn.owed_bytes(), 0);
    }
}

/// Answers `N` with as many MiB, and says so before.
struct Long;

impl Service for Long {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("long", LINES)
    }

    fn reply_bytes(&self, (): &mut (), (): &mut (), message: &[u8]) -> usize {
        usize::from(message[0] - b'0') * READ_BYTES
    }

    fn call(&self, (): &mut (), conn: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.bytes(&vec![b'x'; self.reply_bytes(&mut (), conn, message.bytes())]);
    }
}

/// Each of these connections owed nothing, so each was handed a request, and all of them together owed 64 MiB.
#[test]
fn a_request_with_a_long_reply_waits_also_of_a_connection_that_owes_nothing() {
    const PEERS: u32 = 64;
    let limits = Limits { shard_bytes_max: 4 << 20, ..Limits::default() };
    let (mut env, service) = (env(limits, 4096, 200), Arc::new(Long));
    let conn = |index| {
        let key = ksf::service::ConnKey { index, generation: 0 };
        Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap()
    };
    let mut conns: Vec<_> = (0..PEERS).map(conn).collect();
    let end_turn = |env: &mut Env, conns: &mut [Box<Connection>]| {
        for _ in 0..env.budget.waiting() {
            let Some(key) = env.budget.next_to_proceed(&env.limits) else { break };
            conns[key.index as usize].proceed(env);
        }
    };
    let (last, hungry) = conns.split_last_mut().unwrap();
    for conn in hungry.iter_mut() {
        let chunk = in_slot(&mut env, b"1\n0\n");
        conn.receive(chunk, &mut env);
    }
    let most = (4 << 20) + READ_BYTES + 4096;
    assert!(env.budget.reply_bytes() <= most, "{} bytes are owed", env.budget.reply_bytes());
    assert!(env.budget.waiting() > 50);
    // A short reply needs no room, and leaves at once.
    let chunk = in_slot(&mut env, b"0\n");
    last.receive(chunk, &mut env);
    let batch = last.take_batch(env.now, &mut env.spares).expect("a reply");
    assert_eq!(bytes_of(&batch), b"\n");
    last.sent(batch.len(), true, &mut env);
    // One that waits is not read, and one that leaves while it waits is in nobody's way.
    let waits = hungry.iter().position(|conn| !conn.has_output()).unwrap();
    assert!(!hungry[waits].wants_bytes(&env));
    hungry[waits].drain(&mut env);
    assert!(!hungry[waits].is_closing(), "its message is still to be answered");
    // The peers read one after the other: everything is answered, and the bound holds.
    let mut answered = 0;
    for _ in 0..10 * PEERS {
        for conn in hungry.iter_mut() {
            if let Some(mut batch) = conn.take_batch(env.now, &mut env.spares) {
                let bytes = bytes_of(&batch).len();
                batch.advance(bytes, &mut env.spares);
                conn.sent(bytes, true, &mut env);
                answered += bytes;
                break;
            }
        }
        end_turn(&mut env, hungry);
        assert!(env.budget.reply_bytes() <= most, "{} bytes are owed", env.budget.reply_bytes());
    }
    assert_eq!(answered, (PEERS as usize - 1) * (READ_BYTES + 2));
    conns.into_iter().for_each(|conn| conn.end(&mut env));
    assert_eq!((env.budget.bytes(), env.budget.waiting()), (0, 0));
}

/// A connection that ends while it has the place without room gives it to the next one.
#[test]
fn the_place_without_room_comes_back_from_every_end() {
    let limits = Limits { shard_bytes_max: 1 << 20, ..Limits::default() };
    let (mut env, service) = (env(limits, 4096, 200), Arc::new(Long));
    let mut conns: Vec<_> = (0..4)
        .map(|index| {
            let key = ksf::service::ConnKey { index, generation: 0 };
            Some(Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap())
        })
        .collect();
    for conn in conns.iter_mut().flatten() {
        let chunk = in_slot(&mut env, b"2\n");
        conn.receive(chunk, &mut env);
    }
    for at in 0..4 {
        let answers: Vec<_> = conns.iter().flatten().map(|conn| conn.has_output()).collect();
        assert_eq!(answers.iter().filter(|has| **has).count(), 2 - at % 2, "turn {at}: {answers:?}");
        let at = conns.iter().position(|conn| conn.as_ref().is_some_and(|conn| conn.has_output())).unwrap();
        conns[at].take().unwrap().end(&mut env);
        for _ in 0..env.budget.waiting() {
            let Some(key) = env.budget.next_to_proceed(&env.limits) else { break };
            if let Some(conn) = &mut conns[key.index as usize] {
                conn.proceed(&mut env);
            }
        }
    }
    assert_eq!(env.budget.bytes(), 0);
}

/// 1024 reads of 1 MiB held 1 GiB once.
#[test]
fn replies_that_nobody_announced_close_the_connection_at_twice_its_budget() {
    for order in [Order::Requests, Order::Free] {
        let mut served = Served::new(Reads { order: Some(order), ..Reads::default() }, Limits::default());
        assert!(served.ask(1024) > 100, "{order:?}: small replies are expected at first");
        served.answer_all();
        assert!(served.conn.is_closing());
        let most = 2 * Limits::default().connection_bytes_max + 2 * READ_BYTES;
        assert!(served.most_bytes <= most, "{order:?}: {} bytes were owed", served.most_bytes);
        assert_eq!(served.conn.finished(), Some(CloseReason::ReplyLimit), "{order:?}");
    }
}

#[test]
fn a_connection_learns_how_long_its_replies_are() {
    let mut served = Served::new(Reads::default(), Limits::default());
    let chunk = in_slot(&mut served.env, b"read\n");
    served.conn.receive(chunk, &mut served.env);
    served.answer_all();
    assert!(served.take() > READ_BYTES);
    assert_eq!(served.ask(1024), 1 + 4, "the next ones are expected to be as long");
}

/// The budget of the shard is met by connections that each stay within their own.
#[test]
fn the_shards_budget_stops_connections_that_have_a_share_in_it() {
    let limits = Limits { shard_bytes_max: 2 * READ_BYTES, ..Limits::default() };
    let mut env = env(limits, 4096, 64);
    let service = Arc::new(Reads { announces: true, ..Reads::default() });
    let mut conns: Vec<_> =
        (0..8).map(|_| Connection::new(Arc::clone(&service), Peer::Unix, KEY, env.now).unwrap()).collect();
    for conn in &mut conns {
        for _ in 0..4 {
            if conn.wants_bytes(&env) {
                let chunk = in_slot(&mut env, b"read\n");
                conn.receive(chunk, &mut env);
            }
        }
    }
    let messages: Vec<_> = conns.iter().map(|conn| conn.messages()).collect();
    // The first one fills the budget; each of the others has one request handed over, so that nobody waits for ever.
    assert_eq!(messages, [2, 1, 1, 1, 1, 1, 1, 1]);
    end_all(&mut env, conns);
    service.deferred.lock().unwrap().clear();
    deliver_too_late(&mut env);
    assert_eq!(env.budget.bytes(), 0);
}

/// Keeps as much of a peer as it may, or answers later.
#[derive(Default)]
struct Keeps(Mutex<Vec<Deferred>>);

impl Service for Keeps {
    ksf::stateless!(shard);
    type Conn = usize;

    fn profile(&self) -> Profile<'_> {
        Profile::new("keeps", LINES)
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<usize, Refused> {
        Ok(0)
    }

    fn session(&self, kept: &usize) -> SessionState {
        SessionState { bytes: *kept, ..SessionState::default() }
    }

    fn call(&self, (): &mut (), kept: &mut usize, message: &Message<'_>, reply: &mut Reply<'_>) {
        match message.bytes() {
            b"keep" => *kept += reply.session_room(),
            _ => self.0.lock().unwrap().push(reply.defer()),
        }
    }
}

/// They need no room, but only one of a connection goes on without: replies alone were below the limit.
#[test]
fn short_requests_stop_where_replies_and_sessions_meet_their_limit() {
    let limits = Limits { shard_bytes_max: 2 * READ_BYTES, ..Limits::default() };
    let (mut env, service) = (env(limits, 4096, 64), Arc::new(Keeps::default()));
    let conn = |index| {
        let key = ksf::service::ConnKey { index, generation: 0 };
        Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap()
    };
    let mut conns: Vec<_> = (0..9).map(conn).collect();
    let chunk = in_slot(&mut env, b"keep\n");
    conns[0].receive(chunk, &mut env);
    assert_eq!(env.budget.session_bytes(), READ_BYTES);
    for conn in &mut conns[1..] {
        for _ in 0..500 {
            if conn.wants_bytes(&env) {
                let chunk = in_slot(&mut env, b"later\n");
                conn.receive(chunk, &mut env);
            }
        }
    }
    let most = 2 * READ_BYTES + 9 * (4096 + 5);
    assert!((2 * READ_BYTES..=most).contains(&env.budget.bytes()), "{} bytes", env.budget.bytes());
    assert!(conns[1..].iter().all(|conn| conn.messages() > 0));
    service.0.lock().unwrap().clear();
    end_all(&mut env, conns);
    deliver_too_late(&mut env);
    assert_eq!(env.budget.bytes(), 0);
}

fn end_all(env: &mut Env, conns: Vec<Box<Connection>>) {
    conns.into_iter().for_each(|conn| conn.end(env));
}

/// What a shard does with answers whose connections have ended.
fn deliver_too_late(env: &mut Env) {
    for delivery in env.mailbox.take_deliveries() {
        env.budget.orphan_done(delivery.work_bytes());
    }
}

/// The `index`th connection asks this, is told to go on if there is room, and ends.
fn ask_and_leave(env: &mut Env, service: &Arc<Reads>, index: u32, request: &[u8]) {
    let key = ksf::service::ConnKey { index, generation: 0 };
    let mut conn = Connection::new(Arc::clone(service), Peer::Unix, key, env.now).unwrap();
    for part in request.chunks(4096) {
        let chunk = in_slot(env, part);
        conn.receive(chunk, env);
    }
    while let Some(next) = env.budget.next_to_proceed(&env.limits) {
        // Others of the queue have ended.
        if next == key {
            conn.proceed(env);
        }
    }
    conn.end(env);
}

/// Their peers asked and reset, and what was in work for them counted nowhere: as much memory as the disk was slow.
#[test]
fn work_counts_until_it_is_done_also_when_its_connection_has_ended() {
    let limits = Limits { shard_bytes_max: 8 * READ_BYTES, ..Limits::default() };
    let mut long = vec![b'w'; READ_BYTES];
    long.push(b'\n');
    for (announces, request, one_bytes) in
        [(true, &b"read\n"[..], READ_BYTES), (false, &long, READ_BYTES), (false, b"short\n", 4096)]
    {
        let mut env = env(limits.clone(), 4096, 64);
        let service = Arc::new(Reads { announces, ..Reads::default() });
        let asked = 4 * u32::try_from(limits.shard_bytes_max / one_bytes).unwrap();
        for index in 0..asked {
            ask_and_leave(&mut env, &service, index, request);
        }
        let in_work = service.deferred.lock().unwrap().len();
        let most = limits.shard_bytes_max + one_bytes + 4096;
        assert!(in_work * one_bytes <= most, "{in_work} requests of {one_bytes} bytes are in work");
        assert!(env.budget.reply_bytes() >= limits.shard_bytes_max / 2, "that is what a shard may take");
        assert_eq!(env.budget.input_bytes(), 0);
        // Some are done: others are taken.
        service.deferred.lock().unwrap().drain(..in_work / 2);
        deliver_too_late(&mut env);
        let in_work = service.deferred.lock().unwrap().len();
        ask_and_leave(&mut env, &service, asked, request);
        assert_eq!(service.deferred.lock().unwrap().len(), in_work + 1);
        service.deferred.lock().unwrap().clear();
        deliver_too_late(&mut env);
        assert_eq!(env.budget.bytes(), 0);
    }
}

/// Each of these connections owed nothing, so each had a message of 1 MiB in work.
#[test]
fn a_long_message_waits_for_room_also_of_a_connection_that_owes_nothing() {
    const PEERS: usize = 64;
    let limits = Limits { shard_bytes_max: 4 << 20, assembly_bytes_max: 4 << 20, ..Limits::default() };
    let (mut env, service) = (env(limits, 4096, 64), Arc::new(Reads::default()));
    let conn = |index| {
        let key = ksf::service::ConnKey { index, generation: 0 };
        Connection::new(Arc::clone(&service), Peer::Unix, key, env.now).unwrap()
    };
    let mut conns: Vec<_> = (0..PEERS as u32).map(conn).collect();
    let mut left = [READ_BYTES / 4096; PEERS];
    let mut answered = 0;
    for turn in 0.. {
        assert!(turn < 100_000, "{answered} are answered, and no other");
        for (conn, left) in conns.iter_mut().zip(&mut left) {
            if *left == 0 || !conn.wants_bytes(&env) {
                continue;
            }
            *left -= 1;
            let mut part = vec![b'w'; 4096];
            part[4095] = if *left == 0 { b'\n' } else { b'w' };
            let chunk = in_slot(&mut env, &part);
            conn.receive(chunk, &mut env);
        }
        for _ in 0..env.budget.waiting() {
            let Some(key) = env.budget.next_to_proceed(&env.limits) else { break };
            conns[key.index as usize].proceed(&mut env);
        }
        env.budget.update_overfull(&env.limits);
        let most = (4 << 20) + READ_BYTES + PEERS * 4096;
        assert!(env.budget.reply_bytes() <= most, "{} bytes are in work", env.budget.reply_bytes());
        let most = 2 * (4 << 20) + ksf::budget::PASSES * READ_BYTES;
        assert!(env.budget.input_bytes() <= most, "{} bytes of input", env.budget.input_bytes());
        if turn % 512 == 0
            && let Some(deferred) = service.deferred.lock().unwrap().pop()
        {
            deferred.no_reply();
            for delivery in env.mailbox.take_deliveries() {
                let at = delivery.key().index as usize;
                answered += usize::from(conns[at].deliver(delivery, &mut env));
            }
        }
        if answered == PEERS {
            break;
        }
    }
    end_all(&mut env, conns);
    assert_eq!((env.budget.bytes(), env.budget.waiting()), (0, 0));
}

/// Last words that come later were forgotten, and their answer filled the place of another message.
#[test]
fn deferred_last_words_are_waited_for_and_sent() {
    let limits = Limits { assembly_timeout_ms: 10, ..Limits::default() };
    let mut served = Served::new(Reads::default(), limits);
    let chunk = in_slot(&mut served.env, b"half a li");
    served.conn.receive(chunk, &mut served.env);
    served.env.now = ksf::limits::Time(0).plus_ms(1000);
    assert_eq!(served.conn.tick(&mut served.env), None);
    assert!(served.conn.is_closing());
    assert_eq!(served.conn.finished(), None, "the last words are still to come");
    let deferred = served.service.deferred.lock().unwrap().pop().unwrap();
    deferred.reply(b"too slow".to_vec());
    for delivery in served.env.mailbox.take_deliveries() {
        assert!(served.conn.deliver(delivery, &mut served.env));
    }
    let batch = served.conn.take_batch(served.env.now, &mut served.env.spares).unwrap();
    assert_eq!(bytes_of(&batch), b"too slow\n");
    served.conn.sent(batch.len(), true, &mut served.env);
    assert_eq!(served.conn.finished(), Some(CloseReason::AssemblyTimeout));
}

/// A panic of the service ends the connection in which it happened; what it had begun to say is not sent.
#[test]
fn a_panic_ends_its_connection_and_no_other() {
    struct Fragile;
    impl Service for Fragile {
        ksf::stateless!();

        fn profile(&self) -> Profile<'_> {
            Profile::new("fragile", LINES)
        }

        fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
            reply.bytes(message.bytes());
            if message.bytes() == b"panic" {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        }
    }
    let (service, mut env) = (Arc::new(Fragile), env(Limits::default(), 4096, 8));
    let mut conns: Vec<_> =
        (0..2).map(|_| Connection::new(Arc::clone(&service), Peer::Unix, KEY, env.now).unwrap()).collect();
    let chunk = in_slot(&mut env, b"before\npanic\nafter\n");
    conns[0].receive(chunk, &mut env);
    let batch = conns[0].take_batch(env.now, &mut env.spares).unwrap();
    assert_eq!(bytes_of(&batch), b"before\n");
    conns[0].sent(batch.len(), true, &mut env);
    assert_eq!(conns[0].finished(), Some(CloseReason::Panicked));
    assert_eq!(env.stats.panics.value(), 1);
    let chunk = in_slot(&mut env, b"other\n");
    conns[1].receive(chunk, &mut env);
    assert_eq!(bytes_of(&conns[1].take_batch(env.now, &mut env.spares).unwrap()), b"other\n");
    for conn in conns {
        conn.end(&mut env);
    }
    assert_eq!(env.budget.reply_bytes(), 0);
}

/// What a message took on before the service panicked is counted until its answers are here, as for any message.
#[test]
fn what_was_deferred_before_a_panic_is_counted_until_it_is_answered() {
    #[derive(Default)]
    struct Fragile(Mutex<Vec<Deferred>>);
    impl Fragile {
        fn panics(&self, how: &[u8], reply: &mut Reply<'_>) {
            let deferred = reply.defer_for(10 << 20);
            if how == b"keep" {
                self.0.lock().unwrap().push(deferred);
            }
            // Otherwise the unwinding drops it, which answers it.
            std::panic::resume_unwind(Box::new("on purpose"));
        }
    }
    impl Service for Fragile {
        ksf::stateless!();

        fn profile(&self) -> Profile<'_> {
            Profile::new("fragile", LINES)
        }

        fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
            if message.bytes() == b"defer" {
                return self.0.lock().unwrap().push(reply.defer_for(100));
            }
            self.panics(message.bytes(), reply);
        }
        fn resume(&self, (): &mut (), (): &mut (), state: Box<dyn std::any::Any + Send>, reply: &mut Reply<'_>) {
            self.panics(state.downcast::<&str>().unwrap().as_bytes(), reply);
        }
    }
    for (how, resumed) in [("drop", false), ("keep", false), ("drop", true), ("keep", true)] {
        let (service, mut env) = (Arc::new(Fragile::default()), env(Limits::default(), 4096, 8));
        let mut conn = Connection::new(Arc::clone(&service), Peer::Unix, KEY, env.now).unwrap();
        let deliver = |conn: &mut Connection, env: &mut Env| {
            for delivery in env.mailbox.take_deliveries() {
                conn.deliver(delivery, env);
                assert_eq!(env.budget.reply_bytes(), conn.owed_bytes(), "{how} {resumed}");
            }
        };
        if resumed {
            let chunk = in_slot(&mut env, b"defer\ndefer\n");
            conn.receive(chunk, &mut env);
            let first = service.0.lock().unwrap().remove(0);
            first.resume(how);
        } else {
            let chunk = in_slot(&mut env, format!("defer\n{how}\n").as_bytes());
            conn.receive(chunk, &mut env);
        }
        deliver(&mut conn, &mut env);
        assert_eq!(conn.finished(), Some(CloseReason::Panicked), "{how} {resumed}");
        for late in service.0.lock().unwrap().drain(..) {
            late.reply(b"too late".to_vec());
        }
        deliver(&mut conn, &mut env);
        assert_eq!((conn.owed_bytes(), conn.has_output()), (0, false), "{how} {resumed}: every answer is here");
        conn.end(&mut env);
        assert_eq!(env.budget.reply_bytes(), 0);
    }
}

/// Whatever a service is asked on the way may panic, and ends the connection alone.
#[test]
fn a_panic_of_a_service_that_is_asked_for_its_limit_ends_its_connection_alone() {
    struct Unlimited;
    impl Service for Unlimited {
        ksf::stateless!();

        fn profile(&self) -> Profile<'_> {
            Profile::new("unlimited", Framing::Custom)
        }

        fn header_bytes_max(&self, _: &Limits) -> usize {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, _: &mut Reply<'_>) {}
    }
    let mut env = env(Limits::default(), 4096, 8);
    let mut conn = Connection::new(Arc::new(Unlimited), Peer::Unix, KEY, env.now).unwrap();
    let chunk = in_slot(&mut env, b"bytes");
    conn.receive(chunk, &mut env);
    assert_eq!((conn.finished(), env.stats.panics.value()), (Some(CloseReason::Panicked), 1));
    conn.end(&mut env);
}

/// Last words that are deferred, and whose service panics when it goes on with them.
#[test]
fn a_panic_in_last_words_ends_the_wait_for_them() {
    #[derive(Default)]
    struct Speechless(Mutex<Option<Deferred>>);
    impl Service for Speechless {
        ksf::stateless!();

        fn profile(&self) -> Profile<'_> {
            Profile::new("speechless", LINES)
        }

        fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, _: &mut Reply<'_>) {}
        fn refuse(&self, (): &mut (), (): &mut (), _: CloseReason, reply: &mut Reply<'_>) {
            *self.0.lock().unwrap() = Some(reply.defer());
        }
        fn resume(&self, (): &mut (), (): &mut (), _: Box<dyn std::any::Any + Send>, _: &mut Reply<'_>) {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
    }
    let limits = Limits { message_bytes_max: 10, ..Limits::default() };
    let (service, mut env) = (Arc::new(Speechless::default()), env(limits, 4096, 8));
    let mut conn = Connection::new(Arc::clone(&service), Peer::Unix, KEY, env.now).unwrap();
    let chunk = in_slot(&mut env, b"more than ten bytes\n");
    conn.receive(chunk, &mut env);
    assert_eq!(conn.finished(), None, "the last words are to come");
    service.0.lock().unwrap().take().unwrap().resume(());
    for delivery in env.mailbox.take_deliveries() {
        conn.deliver(delivery, &mut env);
    }
    assert_eq!(conn.finished(), Some(CloseReason::Panicked));
    conn.end(&mut env);
}

/// Answers behind one that is slow: however many come, they take a few places, and what these take is counted.
#[test]
fn answered_places_behind_a_slow_one_are_joined() {
    const MESSAGES: usize = 1000;
    let mut orders: Vec<Vec<usize>> = vec![(1..MESSAGES).collect(), (1..MESSAGES).rev().collect()];
    // Every second one, and then those between.
    orders.push((1..MESSAGES).step_by(2).chain((2..MESSAGES).step_by(2)).collect());
    orders.push((1..MESSAGES).rev().step_by(2).chain((2..MESSAGES).step_by(2).rev()).collect());
    for order in orders {
        for body_bytes in [5, 500, 5000] {
            let limits = Limits { out_queue_bytes_max: 8 << 20, connection_bytes_max: 16 << 20, ..Limits::default() };
            let mut bench = Bench::new(LINES, Order::Requests, limits);
            (0..MESSAGES).for_each(|_| bench.receive(b"defer\n"));
            let mut deferred: Vec<_> = bench.service.deferred.lock().unwrap().drain(..).map(Some).collect();
            assert_eq!(deferred.len(), MESSAGES);
            let body = |at: usize| format!("{at:0body_bytes$}").into_bytes();
            for (done, at) in order.iter().enumerate() {
                deferred[*at].take().unwrap().reply(body(*at));
                bench.deliver();
                let unanswered = MESSAGES - 1 - done;
                assert!(bench.conn.held_replies() <= 2 * unanswered + 1);
            }
            assert_eq!(bench.conn.held_replies(), 2);
            deferred[0].take().unwrap().reply(body(0));
            bench.deliver();
            let mut batch = bench.conn.take_batch(bench.env.now, &mut bench.env.spares).unwrap();
            let bytes = batch.len();
            while !batch.is_empty() {
                let mut slices = [&[][..]; 16];
                let filled = batch.slices(&mut slices);
                let front = slices[..filled].concat();
                bench.got.extend_from_slice(&front);
                batch.advance(front.len(), &mut bench.env.spares);
            }
            bench.conn.sent(bytes, true, &mut bench.env);
            let expected: Vec<u8> = (0..MESSAGES).flat_map(|at| [body(at), b"\n".to_vec()].concat()).collect();
            assert!(bench.got == expected, "{body_bytes}");
            assert_eq!((bench.conn.held_replies(), bench.env.budget.reply_bytes()), (0, 0));
        }
    }
}

#[test]
fn messages_that_turn_out_to_need_no_reply_leave_no_place() {
    let mut bench = Bench::lines();
    bench.receive(b"defer\n");
    for _ in 0..10_000 {
        bench.receive(b"defer\n");
        bench.service.deferred.lock().unwrap().pop().unwrap().no_reply();
        bench.deliver();
        assert_eq!(bench.conn.held_replies(), 1);
    }
    bench.receive(b"end\n");
    bench.answer(0, b"first");
    bench.take();
    assert_eq!(bench.got(), "first\nend\n");
}

/// A short answer that is held back has a buffer of its own, which is much longer.
#[test]
fn buffers_of_short_answers_that_are_held_back_count() {
    let mut bench = Bench::new(LINES, Order::Requests, Limits::default());
    (0..200).for_each(|_| bench.receive(b"defer\n"));
    let announced = bench.conn.owed_bytes();
    let mut deferred = std::mem::take(&mut *bench.service.deferred.lock().unwrap());
    for at in (1..200).rev().step_by(2) {
        deferred.remove(at).reply(b"short".to_vec());
    }
    bench.deliver();
    let answered = 100;
    // The 4,096 bytes that each of the replies was assumed to need are still held.
    assert!(bench.conn.owed_bytes() >= announced - answered * "defer".len(), "{}", bench.conn.owed_bytes());
    assert_eq!(bench.conn.owed_bytes(), bench.env.budget.reply_bytes());
}

/// A reply behind a deferred one waits for it, whatever its size.
#[test]
fn bytes_held_back_count() {
    let limits = Limits { connection_bytes_max: 10_000, ..Limits::default() };
    let mut bench = Bench::new(LINES, Order::Requests, limits);
    bench.receive(b"defer\n");
    let mut handed = 0;
    while bench.conn.wants_bytes(&bench.env) && handed < 100 {
        bench.receive(b"long\n");
        handed += 1;
    }
    assert_eq!(handed, 1, "a reply of 10,000 bytes is held back, and fills the budget");
    bench.answer(0, b"now");
    bench.take();
    assert!(bench.conn.wants_bytes(&bench.env));
    assert_eq!(bench.got.len(), 4 + 10_001);
}
