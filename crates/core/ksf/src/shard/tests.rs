//! A shard without a thread of its own: the test takes its turns.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags, poll};

use self::calls::calls;
use super::*;
use crate::engine::{epoll::Epoll, tests::on_each_engine, uring::Uring};
use crate::framing::{Delimiter, Framing, LengthPrefix};
use crate::limits::Limits;
use crate::logged::Unlogged;
use crate::pool::{Memory, Pool};
use crate::service::{Message, Peer, Profile, Refused, Reply, Service};

#[path = "../../tests/common/calls.rs"]
mod calls;
mod datagrams;
mod exchanges;
mod sizes;

/// Sends back what comes.
struct Echo;

impl Service for Echo {
    crate::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("echo", Framing::Raw)
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.bytes(message.bytes());
    }
}

/// A shard that echoes, on connections it is given by [`connect`].
fn shard<E: Engine>(limits: Limits) -> Shard<E> {
    serving(Arc::new(Echo), limits)
}

fn serving<E: Engine, S: Service>(service: Arc<S>, limits: Limits) -> Shard<E> {
    let env = Env::new(limits, Pool::new(Memory::Anonymous, 64 << 10, 256).unwrap()).unwrap();
    let listener = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    // The kernel chooses a name that is free, and no peer connects.
    rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new_unnamed()).unwrap();
    listener.listen(1).unwrap();
    let listener = ShardListener {
        addr: ListenAddr::Unix(Default::default()),
        socket: Some(OwnedFd::from(UnixListener::from(OwnedFd::from(listener)))),
        handed_over: false,
        kind: ListenerKind::Unix,
        service: Arc::new(service),
        adopter: None,
        assist: None,
    };
    Shard::new(env, vec![listener], Arc::new(OpenConnections::new(1)), None, Spin::Off).unwrap()
}

fn connect<E: Engine>(shard: &mut Shard<E>) -> UnixStream {
    let (ours, peer) = UnixStream::pair().unwrap();
    shard.accepted(0, ours.into());
    shard.settle();
    peer
}

/// Echoes what comes, in pieces of a kilobyte.
fn kilobytes() -> Arc<impl Service> {
    let profile = Profile::new("kilobytes", Framing::LengthPrefix(LengthPrefix::big_endian(2)));
    calls(profile, |message, reply| reply.bytes(message.bytes()))
}

/// A turn at a time of the test's choice, which waits for an event or does not.
fn turn_at<E: Engine>(shard: &mut Shard<E>, now: Time, timeout: Option<Duration>) {
    let mut events = Vec::new();
    shard.engine.wait(&mut shard.env, Wait { timeout, gather: None }, &mut events).unwrap();
    shard.env.now = now;
    events.into_iter().for_each(|event| shard.handle(event));
    shard.settle();
    if now >= shard.next_tick {
        shard.tick();
    }
}

fn is_readable(fd: impl AsFd) -> bool {
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Default::default())).unwrap() > 0
}

/// A shard that looked into its mailbox after mail came and before its wake-up did.
#[test]
fn a_wake_up_for_mail_that_was_taken_already_is_taken_too() {
    on_each_engine(woken_for_nothing::<Epoll>, woken_for_nothing::<Uring>);
}

fn woken_for_nothing<E: Engine>() {
    let mut shard = shard::<E>(Limits::default());
    rustix::io::write(shard.env.mailbox.as_fd(), &1u64.to_ne_bytes()).unwrap();
    shard.turn().unwrap();
    assert!(!is_readable(&*shard.env.mailbox), "every further wait would end at once");
}

/// An engine may need a moment to end its operations; answers come before, meanwhile and after, and the connection counts until it ends.
#[test]
fn an_answer_to_a_connection_that_is_being_released_is_counted_once() {
    on_each_engine(answered_while_released::<Epoll>, answered_while_released::<Uring>);
}

fn answered_while_released<E: Engine>() {
    // Answered later, each time with a kilobyte.
    let stash = Arc::new(std::sync::Mutex::new(Vec::new()));
    let waiting = Arc::clone(&stash);
    let service = calls(Profile::new("later", Framing::Raw), move |_, reply| {
        waiting.lock().unwrap().push(reply.defer_for(1024));
    });
    let mut shard = serving::<E, _>(service, Limits::default());
    let now = shard.env.now;
    let mut peer = connect(&mut shard);
    for _ in 0..3 {
        let before = stash.lock().unwrap().len();
        peer.write_all(b"x").unwrap();
        while stash.lock().unwrap().len() == before {
            turn_at(&mut shard, now, None);
        }
    }
    let answer = || stash.lock().unwrap().pop().unwrap().reply(vec![0; 1024]);
    answer();
    shard.read_mail();
    shard.abort(0, CloseReason::Service);
    answer();
    shard.read_mail();
    while shard.places[0].conn.is_some() {
        turn_at(&mut shard, now, None);
    }
    answer();
    shard.read_mail();
    assert_eq!(shard.env.budget.bytes(), 0);
}

#[test]
fn the_clock_costs_what_is_due_and_not_what_is_open() {
    on_each_engine(idle_connections::<Epoll>, idle_connections::<Uring>);
}

fn idle_connections<E: Engine>() {
    const CROWD: u64 = 100;
    let limits = Limits { idle_timeout_ms: 60_000, ..Limits::default() };
    let mut shard = shard::<E>(limits);
    let start = shard.env.now;
    let mut peers: Vec<_> = (0..CROWD).map(|_| connect(&mut shard)).collect();
    let checked = |shard: &Shard<E>| shard.env.stats.deadlines_checked.value();
    let turns = |shard: &mut Shard<E>, from_ms: u64, to_ms: u64| {
        let at = (from_ms..=to_ms).step_by(10).map(|ms| start.plus_ms(ms));
        at.for_each(|now| turn_at(shard, now, Some(Duration::ZERO)));
    };
    turns(&mut shard, 0, 30_000);
    assert_eq!(checked(&shard), 0, "nothing is due");
    peers[0].write_all(b"x").unwrap();
    turn_at(&mut shard, start.plus_ms(30_000), None);
    peers[0].read_exact(&mut [0]).unwrap();
    turns(&mut shard, 30_000, 59_900);
    assert_eq!((checked(&shard), shard.open as u64), (0, CROWD), "nothing is due yet");
    // Each is closed, but the one that was not idle: it is put off.
    turns(&mut shard, 59_900, 60_900);
    assert_eq!(checked(&shard), CROWD);
    // Lingering ends by the clock as well.
    turns(&mut shard, 60_900, 61_500);
    assert_eq!((checked(&shard), shard.open), (2 * CROWD - 1, 1));
    turns(&mut shard, 61_500, 89_900);
    assert_eq!((checked(&shard), shard.open), (2 * CROWD - 1, 1), "nothing is due");
    turns(&mut shard, 89_900, 91_500);
    assert_eq!((checked(&shard), shard.open), (2 * CROWD + 1, 0));
    assert_eq!(shard.env.stats.closed_for(CloseReason::IdleTimeout), CROWD);
    drop(peers);
    shard.engine.shutdown();
}

/// Others get their turn after some of a connection's batches, but the shard does not sleep meanwhile.
#[test]
fn a_shard_does_not_sleep_while_it_has_something_to_send() {
    on_each_engine(many_batches::<Epoll>, many_batches::<Uring>);
}

fn many_batches<E: Engine>() {
    const MESSAGES: usize = 40;
    let message = [&1000u16.to_be_bytes()[..], &[7; 1000]].concat();
    // A batch holds one message: the others wait until it is sent.
    let limits = Limits { out_queue_bytes_max: 1, ..Limits::default() };
    let mut shard = serving::<E, _>(kilobytes(), limits);
    let start = shard.env.now;
    let mut peer = connect(&mut shard);
    peer.write_all(&message.repeat(MESSAGES)).unwrap();
    turn_at(&mut shard, start, None);
    let mut turns = 1;
    while shard.env.stats.replies.value() < MESSAGES as u64 {
        assert_eq!(shard.next_timeout(), Some(Duration::ZERO), "it sleeps with work to do");
        turn_at(&mut shard, start, Some(Duration::ZERO));
        turns += 1;
    }
    assert!(turns > 2, "no other connection had a turn");
    assert_eq!(shard.next_timeout(), None);
    let mut got = vec![0; message.len() * MESSAGES];
    peer.read_exact(&mut got).unwrap();
    assert!(got == message.repeat(MESSAGES));
    shard.engine.shutdown();
}

/// What was left of the memory was too little for those that waited, and all passes were taken: every turn tried them
/// again, and no wait was a wait.
#[test]
fn connections_that_wait_for_memory_do_not_keep_the_shard_awake() {
    on_each_engine(waits_for_memory::<Epoll>, waits_for_memory::<Uring>);
}

fn waits_for_memory<E: Engine>() {
    // Twelve pages, and a rest that is of no use.
    let limits = Limits { assembly_bytes_max: 12 * 4096 + 1000, pressure_timeout_ms: 600_000, ..Limits::default() };
    let limits = Limits { assembly_timeout_ms: 600_000, ..limits };
    let mut shard = serving::<E, _>(kilobytes(), limits);
    let waiting = |shard: &Shard<E>| shard.env.budget.waiting();
    let mut written = 0;
    let mut begin = |shard: &mut Shard<E>, bytes: &[u8]| {
        let mut peer = connect(shard);
        peer.write_all(bytes).unwrap();
        written += bytes.len() as u64;
        while shard.env.stats.bytes_in.value() < written {
            shard.turn().unwrap();
        }
        peer
    };
    // One takes eleven pages, and one the last: all passes go to the next ones. Then the first one needs its pages no more.
    let long = [&45_001u16.to_be_bytes()[..], &[b'x'; 45_001]].concat();
    let mut hog = begin(&mut shard, &long[..long.len() - 1]);
    let mut peers: Vec<_> = (0..1 + crate::budget::PASSES).map(|_| begin(&mut shard, &[0, 3, b'a'])).collect();
    assert!(!shard.env.budget.may_proceed(&shard.env.limits) && waiting(&shard) == 0);
    hog.write_all(&long[long.len() - 1..]).unwrap();
    while shard.env.stats.messages.value() == 0 {
        shard.turn().unwrap();
    }
    peers.extend((0..3 + 2).map(|_| begin(&mut shard, &[0, 3, b'a'])));
    // What arrived of the last two is kept, above the limit.
    assert_eq!(shard.env.budget.input_bytes() / 4096, 14);
    sleeps(&mut shard);
    assert_eq!(waiting(&shard), 2);
    // A page that becomes free is not enough.
    let mut first = peers.remove(0);
    first.write_all(b"bc").unwrap();
    while shard.env.stats.messages.value() == 1 {
        shard.turn().unwrap();
    }
    sleeps(&mut shard);
    assert_eq!(waiting(&shard), 2);
    let mut limits = shard.env.limits.clone();
    limits.assembly_bytes_max += 4096;
    shard.take_mail(Mail::Limits(Box::new(limits)));
    assert_eq!(shard.next_timeout(), Some(Duration::ZERO), "there is room for them");
    shard.turn().unwrap();
    sleeps(&mut shard);
    assert_eq!(waiting(&shard), 0);
}

/// With passes alone eight of them would be closed after each timeout.
#[test]
fn silent_peers_are_closed_together() {
    on_each_engine(closes_silent_peers::<Epoll>, closes_silent_peers::<Uring>);
}

fn closes_silent_peers<E: Engine>() {
    const PEERS: usize = 5 * crate::budget::PASSES;
    const LIMIT_BYTES: usize = 12 * 4096;
    const TIMEOUT_MS: u64 = 10_000;
    let limits = Limits { assembly_bytes_max: LIMIT_BYTES, pressure_timeout_ms: TIMEOUT_MS, ..Limits::default() };
    let mut shard = serving::<E, _>(kilobytes(), Limits { assembly_timeout_ms: 0, ..limits });
    // It has looked at the clock.
    let start = shard.silent_look;
    shard.env.now = start;
    let mut peers = Vec::new();
    for at in 1..=PEERS as u64 {
        let mut peer = connect(&mut shard);
        peer.write_all(&[0, 3, b'a']).unwrap();
        peers.push(peer);
        while shard.env.stats.bytes_in.value() < 3 * at {
            turn_at(&mut shard, start, None);
        }
    }
    // A page each.
    let kept = |shard: &Shard<E>| shard.env.budget.input_bytes();
    assert_eq!(kept(&shard), PEERS * 4096);
    let turns = |shard: &mut Shard<E>, from_ms: u64, to_ms: u64| {
        let at = (from_ms..=to_ms).step_by(100).map(|ms| start.plus_ms(ms));
        at.for_each(|now| {
            shard.set_timer();
            turn_at(shard, now, Some(Duration::ZERO));
        });
    };
    turns(&mut shard, 0, TIMEOUT_MS);
    assert_eq!(kept(&shard), PEERS * 4096, "they have had no time");
    // The shard looks for them four times in that time.
    turns(&mut shard, TIMEOUT_MS, TIMEOUT_MS + TIMEOUT_MS / 2);
    assert!(kept(&shard) <= LIMIT_BYTES / 2 && kept(&shard) > 0, "{} bytes are kept", kept(&shard));
    shard.engine.shutdown();
}

/// The shard's next wait ends with an event only, after a few turns that do not wait.
fn sleeps<E: Engine>(shard: &mut Shard<E>) {
    for _ in 0..16 {
        if shard.next_timeout().is_none() {
            return;
        }
        shard.turn().unwrap();
    }
    panic!("the shard does not sleep");
}

#[test]
fn a_turn_ends_whatever_its_connections_sent_and_the_next_ones_go_on() {
    on_each_engine(flooded::<Epoll>, flooded::<Uring>);
}

fn flooded<E: Engine>() {
    const PEERS: usize = 40;
    const FLOOD: usize = 32 << 10;
    // Takes lines, and says nothing.
    let service = calls(Profile::new("silent", Framing::Delimiter(Delimiter::LF)), |_, _| {});
    let mut shard = serving::<E, _>(service, Limits::default());
    let mut peers: Vec<_> = (0..PEERS).map(|_| connect(&mut shard)).collect();
    for peer in &mut peers {
        peer.write_all(&[b'\n'; FLOOD]).unwrap();
    }
    let messages = |shard: &Shard<E>| shard.env.stats.messages.value() as usize;
    // A connection that gave way has no event that would call the shard again.
    while messages(&shard) < PEERS * FLOOD {
        let before = messages(&shard);
        shard.turn().unwrap();
        let of_turn = messages(&shard) - before;
        assert!(of_turn < 5 * 4096 + PEERS * 256, "{of_turn} messages in a turn");
    }
    assert!(!shard.has_work_left());
}
