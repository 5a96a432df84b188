//! What a shard owes to a kernel half, for each rule of `ksf::assist`: with a half made here, that answers nothing and
//! does what a test tells it, at moments that a real one meets once in a million.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::common::Recorder;
use crate::common::net::*;
use ksf::assist::{Assist, AssistConn};
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::{Order, Server};
use rustix::event::{EventfdFlags, eventfd};

const LINES: Framing = Framing::Delimiter(Delimiter::LF);

/// The only connection under the half.
const TOKEN: u64 = 77;

/// What the half does, and what it was told.
#[derive(Default)]
struct State {
    /// Lets connections be parked.
    parks: bool,
    /// TCP has not taken what the half queued.
    holds_replies: bool,
    /// How often an end of the stream is too early.
    early_ends: u32,
    /// A reply is lost.
    is_broken: bool,
    /// Mean length of what the half answered.
    typical_bytes: Option<u64>,

    is_parked: bool,
    times_parked: u32,
    /// Bytes received when something was announced that had not been received.
    announced: Option<u64>,
    wakes: u32,
    /// The last counts: received, and sent after the send that follows.
    settled: Option<(u64, u64)>,
    times_settled: u32,
    ends_asked: u32,
    drained_asked: u32,
}

struct Half {
    state: Arc<Mutex<State>>,
    wake_fd: OwnedFd,
}

impl Half {
    fn new(change: impl FnOnce(&mut State)) -> Arc<Self> {
        let mut state = State::default();
        change(&mut state);
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Arc::new(Self { state: Arc::new(Mutex::new(state)), wake_fd })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Announces something for user space, which is not here yet.
    fn wake(&self) {
        let mut state = self.state();
        state.announced = Some(state.settled.map_or(0, |(received, _)| received));
        state.wakes += 1;
        rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes()).unwrap();
    }

    fn until_parked(&self, times: u32) {
        wait_until("it is parked", || self.state().times_parked >= times);
        assert_eq!(self.state().times_parked, times);
    }

    /// Wakes the shard, and returns when it looks at the connection again, where there is nothing yet.
    fn wake_too_early(&self) {
        let is_parked = self.state().is_parked;
        assert!(is_parked, "woken without being parked");
        self.wake();
        wait_until("it is polled again", || !self.state().is_parked);
    }
}

impl Assist for Half {
    fn attach(&self, _: BorrowedFd<'_>) -> Option<Box<dyn AssistConn>> {
        Some(Box::new(HalfConn(Arc::clone(&self.state))))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    fn wake_fd(&self, _: usize) -> Option<BorrowedFd<'_>> {
        Some(self.wake_fd.as_fd())
    }

    fn take_wakes(&self, _: usize, wake: &mut dyn FnMut(u64)) {
        // Nothing to read: somebody was quicker, which is no error.
        let _ = rustix::io::read(&self.wake_fd, &mut [0; 8]);
        // What is gone, or was never here, must be ignored.
        wake(TOKEN + 1);
        if std::mem::take(&mut self.state().wakes) > 0 {
            wake(TOKEN);
        }
    }
}

struct HalfConn(Arc<Mutex<State>>);

impl HalfConn {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl AssistConn for HalfConn {
    fn replied_bytes(&self) -> u64 {
        0
    }

    fn drained(&mut self, _: BorrowedFd<'_>, _: u64) -> bool {
        let mut state = self.state();
        state.drained_asked += 1;
        !state.holds_replies
    }

    fn settle(&mut self, _: BorrowedFd<'_>, received_bytes: u64, sent_bytes: u64) {
        let mut state = self.state();
        if state.settled != Some((received_bytes, sent_bytes)) {
            state.settled = Some((received_bytes, sent_bytes));
            state.times_settled += 1;
        }
    }

    fn settle_ahead(&mut self, socket: BorrowedFd<'_>, received_bytes: u64, sent_after_bytes: u64) {
        assert!(!self.state().holds_replies, "settled though the half's replies are not taken");
        self.settle(socket, received_bytes, sent_after_bytes);
    }

    fn is_end(&mut self, _: BorrowedFd<'_>, _: u64) -> bool {
        let mut state = self.state();
        state.ends_asked += 1;
        state.ends_asked > state.early_ends
    }

    fn typical_bytes(&self) -> Option<u64> {
        self.state().typical_bytes
    }

    fn is_broken(&self) -> bool {
        self.state().is_broken
    }

    fn token(&self) -> u64 {
        TOKEN
    }

    fn park(&mut self, _: BorrowedFd<'_>, shard: usize) -> bool {
        assert_eq!(shard, 0);
        let mut state = self.state();
        let Some((received, _)) = state.settled else { return false };
        // What was announced is still on its way, so something was passed that is not answered.
        if !state.parks || state.announced.is_some_and(|announced| received <= announced) {
            return false;
        }
        state.is_parked = true;
        state.times_parked += 1;
        true
    }

    fn unpark(&mut self, _: BorrowedFd<'_>) {
        self.state().is_parked = false;
    }
}

/// Lines behind the half, and beside it, on the same shard, a listener without.
fn start(engine: EngineKind, half: &Arc<Half>, limits: Limits) -> (Server, Arc<Recorder>) {
    let service = Recorder::new(LINES, Order::Requests);
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let half: Arc<dyn Assist> = Arc::<Half>::clone(half);
    let server = Server::builder()
        .engine(engine)
        .cpus(Some(cpus))
        .limits(limits)
        .listen(ANY.parse().unwrap(), Arc::clone(&service), Some(half))
        .listen(ANY.parse().unwrap(), Arc::new(Echo), None)
        .start()
        .unwrap();
    (server, service)
}

fn parks(state: &mut State) {
    state.parks = true;
}

fn holds(state: &mut State) {
    state.holds_replies = true;
}

/// A server with two connections.
struct Scene {
    engine: EngineKind,
    half: Arc<Half>,
    server: Server,
    service: Arc<Recorder>,
    /// A connection that nobody assists. When it is answered, the shard has ended the turns before.
    other: TcpStream,
    /// The connection under the half.
    peer: TcpStream,
}

/// Plays a scene on every engine, with a half that is changed as the test wants it.
fn on_each_engine(change: impl Fn(&mut State), play: impl Fn(Scene)) {
    with_send_timeout(Limits::default().send_timeout_ms, change, play);
}

fn with_send_timeout(send_timeout_ms: u64, change: impl Fn(&mut State), play: impl Fn(Scene)) {
    own_network();
    let limits = Limits { send_timeout_ms, ..Limits::default() };
    for engine in engines() {
        let half = Half::new(&change);
        let (server, service) = start(engine, &half, limits.clone());
        let ListenAddr::Tcp(addr) = server.listeners()[1].addr else { panic!("no port") };
        let (other, peer) = (connect_to(addr), connect(&server));
        play(Scene { engine, half, server, service, other, peer });
    }
}

fn turns_end(other: &mut TcpStream) {
    for _ in 0..3 {
        ask(other, b"still there?", b"still there?");
    }
}

/// The wake-up is sent just before the bytes are readable: a receive that finds nothing then concludes nothing.
#[test]
fn a_wake_up_before_the_bytes_means_wait_again() {
    on_each_engine(parks, |Scene { engine, half, server, mut other, mut peer, .. }| {
        // A fresh connection is the half's at once.
        half.until_parked(1);
        for round in 1..=50 {
            half.wake_too_early();
            turns_end(&mut other);
            assert!(!half.state().is_parked, "{engine}: round {round}: given back before the bytes came");
            let line = format!("line {round}\n").into_bytes();
            ask(&mut peer, &line, &line);
            half.until_parked(round + 1);
        }
        assert_eq!((server.connections(), count(&server, "closed_total")), (2, 0), "{engine}");
    });
}

/// What user space sends goes to TCP at once, what the half has queued goes through a work queue: the former waits.
#[test]
fn replies_wait_until_tcp_has_taken_those_of_the_half() {
    on_each_engine(holds, |Scene { engine, half, server, service, mut peer, .. }| {
        peer.write_all(b"one\ntwo\n").unwrap();
        wait_until("user space has waited", || count(&server, "assist_waits") >= 20);
        assert_eq!(service.messages.lock().unwrap().len(), 2, "{engine}");
        assert_eq!(count(&server, "bytes_out"), 0, "{engine}: sent before the half's replies");
        half.state().holds_replies = false;
        expect(&mut peer, b"one\ntwo\n");
    });
}

/// The end of the stream can be read while replies of the half are still under way: closing would cut them off.
#[test]
fn the_connection_is_closed_after_the_replies_of_the_half() {
    on_each_engine(holds, |Scene { engine, half, server, mut peer, .. }| {
        peer.shutdown(Shutdown::Write).unwrap();
        wait_until("user space has waited", || count(&server, "assist_waits") >= 20);
        assert_eq!((server.connections(), count(&server, "closed_total")), (2, 0), "{engine}: closed too early");
        peer.set_nonblocking(true).unwrap();
        let error = peer.read(&mut [0]).expect_err("the stream has not ended");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{engine}");
        peer.set_nonblocking(false).unwrap();
        half.state().holds_replies = false;
        expect_end(&mut peer);
        until_count(&server, "closed_by_peer", 1);
    });
}

/// Linux says "end" while bytes passed to user space wait behind a reply of the half.
#[test]
fn an_end_of_the_stream_that_comes_too_early_is_asked_again() {
    on_each_engine(
        |state| state.early_ends = 3,
        |Scene { engine, half, server, mut peer, .. }| {
            peer.write_all(b"goodbye\n").unwrap();
            peer.shutdown(Shutdown::Write).unwrap();
            expect(&mut peer, b"goodbye\n");
            expect_end(&mut peer);
            until_count(&server, "closed_by_peer", 1);
            assert_eq!(half.state().ends_asked, 4, "{engine}");
        },
    );
}

/// Bytes in front of the end that never come: the peer must not take what it got for all.
#[test]
fn an_end_that_stays_too_early_is_no_orderly_end() {
    with_send_timeout(
        100,
        |state| state.early_ends = u32::MAX,
        |Scene { engine, server, mut peer, .. }| {
            peer.shutdown(Shutdown::Write).unwrap();
            expect_reset(&mut peer);
            until_count(&server, "closed_kernel_half", 1);
            assert_eq!(count(&server, "closed_by_peer"), 0, "{engine}");
        },
    );
}

/// A peer that does not read keeps TCP from taking anything: that must end some time.
#[test]
fn a_half_whose_replies_are_never_taken_ends_its_connection() {
    with_send_timeout(40, holds, |Scene { engine, server, mut other, mut peer, .. }| {
        peer.write_all(b"one\n").unwrap();
        let mut got = Vec::new();
        // An end or a reset, but no reply.
        let _ = peer.read_to_end(&mut got);
        assert!(got.is_empty(), "{engine}: {got:?}");
        until_count(&server, "closed_kernel_half", 1);
        turns_end(&mut other);
    });
}

/// A reply that was lost cannot be followed by others.
/// A peer that waits for a reply which was lost inside the kernel: nothing but the clock can notice.
#[test]
fn a_reply_lost_by_the_half_ends_its_connection() {
    with_send_timeout(100, holds, |Scene { server, mut peer, .. }| {
        expect_reset(&mut peer);
        until_count(&server, "closed_kernel_half", 1);
    });
}

#[test]
fn a_broken_half_ends_its_connection() {
    on_each_engine(parks, |Scene { half, server, mut other, mut peer, .. }| {
        half.until_parked(1);
        half.state().is_broken = true;
        half.wake();
        // Also behind the end of what the peer has to say: it must not take what it got for all.
        let _ = peer.shutdown(Shutdown::Write); // fails when the reset was quicker
        expect_reset(&mut peer);
        until_count(&server, "closed_kernel_half", 1);
        turns_end(&mut other);
    });
}

/// The half answers only while user space owes nothing: not while a reply is deferred or half a message is here.
#[test]
fn nothing_is_settled_while_user_space_owes_a_reply() {
    on_each_engine(parks, |Scene { engine, half, server, service, mut other, mut peer }| {
        half.until_parked(1);
        assert_eq!(half.state().settled, Some((0, 0)));

        half.wake_too_early();
        peer.write_all(b"defer\n").unwrap();
        wait_until("it is deferred", || service.deferred.lock().unwrap().len() == 1);
        turns_end(&mut other);
        assert_eq!(half.state().settled, Some((0, 0)), "{engine}: a reply is due");
        service.deferred.lock().unwrap().remove(0).reply(b"late".to_vec());
        expect(&mut peer, b"late\n");
        half.until_parked(2);
        assert_eq!(half.state().settled, Some((6, 5)), "{engine}");

        half.wake_too_early();
        let before = count(&server, "bytes_in");
        peer.write_all(b"half a li").unwrap();
        wait_until("it is read", || count(&server, "bytes_in") - before >= 9);
        turns_end(&mut other);
        assert_eq!(half.state().settled, Some((6, 5)), "{engine}: half a message is here");
        ask(&mut peer, b"ne\n", b"half a line\n");
        half.until_parked(3);
        assert_eq!(half.state().settled, Some((18, 17)), "{engine}");
    });
}

/// Several messages at once are answered in batches, which is quicker in user space: it keeps the connection until
/// messages come one at a time again.
#[test]
fn a_pipelining_peer_stays_with_user_space() {
    on_each_engine(parks, |Scene { engine, half, mut other, mut peer, .. }| {
        half.until_parked(1);
        half.wake_too_early();
        let before = half.state().times_settled;
        for _ in 0..20 {
            ask(&mut peer, b"one\ntwo\nthree\n", b"one\ntwo\nthree\n");
            ask(&mut peer, b"alone\n", b"alone\n");
        }
        turns_end(&mut other);
        assert_eq!(half.state().times_settled, before, "{engine}: given away");
        assert_eq!(half.state().times_parked, 1, "{engine}: given away");
        let mut alone = 1;
        while half.state().times_parked == 1 {
            ask(&mut peer, b"alone\n", b"alone\n");
            turns_end(&mut other);
            alone += 1;
            assert!(alone < 100, "{engine}: never given to the half again");
        }
        assert!(alone > 2, "{engine}: given to the half after {alone} messages");
    });
}

/// User space acts by itself on a connection that is the half's: it takes it back first.
/// Without framing, what came together is one message: only its length tells that it was several.
#[test]
fn several_messages_joined_in_one_are_no_lone_message() {
    on_each_engine(
        |state| (state.parks, state.typical_bytes) = (true, Some(6)),
        |Scene { engine, half, mut other, mut peer, .. }| {
            half.until_parked(1);
            half.wake_too_early();
            for _ in 0..100 {
                ask(&mut peer, b"more than six\n", b"more than six\n");
            }
            turns_end(&mut other);
            assert_eq!(half.state().times_parked, 1, "{engine}: given away");
            let mut alone = 0;
            while half.state().times_parked == 1 {
                ask(&mut peer, b"alone\n", b"alone\n");
                turns_end(&mut other);
                alone += 1;
                assert!(alone < 100, "{engine}: never given to the half again");
            }
        },
    );
}

#[test]
fn a_parked_connection_is_taken_back_when_the_server_drains() {
    on_each_engine(parks, |Scene { engine, half, server, mut peer, other, .. }| {
        half.until_parked(1);
        let drained = std::thread::spawn(move || server.drain());
        expect_end(&mut peer);
        drop((peer, other));
        drained.join().unwrap().unwrap();
        assert!(!half.state().is_parked, "{engine}");
        assert!(half.state().drained_asked > 0, "{engine}: closed without a look at the half's replies");
    });
}
