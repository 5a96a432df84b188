//! What a datagram service holds, and when its socket is not read.

use std::net::UdpSocket;
use std::sync::Mutex;

use super::*;
use crate::deferred::Deferred;
use crate::gates::LogId;
use crate::pool::Chunk;

const REPLY_BYTES: usize = 1000;
const DATAGRAMS: usize = 64;
const SHARD_BYTES_MAX: usize = 32 << 10;

/// Answers each datagram later: another thread does, or the gate lets it.
#[derive(Default)]
struct Late {
    gated: bool,
    log: Mutex<Option<LogId>>,
    deferred: Mutex<Vec<(Chunk, Deferred)>>,
}

impl Service for Arc<Late> {
    type Shard = LogId;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile::new("late", Framing::Raw)
    }

    fn start(&self, turn: &mut crate::Turn<'_>) -> io::Result<LogId> {
        let log = turn.open_log().map_err(io::Error::other)?;
        *self.log.lock().unwrap() = Some(log);
        Ok(log)
    }

    fn accept(&self, _: &mut LogId, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, log: &mut LogId, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        if self.gated {
            reply.gate(Gate { log: *log, number: 1 });
            reply.bytes(&[7; REPLY_BYTES]);
        } else {
            let deferred = reply.defer_for(REPLY_BYTES);
            self.deferred.lock().unwrap().push((message.keep(), deferred));
        }
    }
}

/// A shard that serves a socket of datagrams, and a peer of it.
fn serving_datagrams<E: Engine>(service: &Arc<Late>, limits: Limits) -> (Shard<E>, UdpSocket) {
    let env = Env::new(limits, Pool::new(Memory::Anonymous, 64 << 10, 256).unwrap()).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.connect(socket.local_addr().unwrap()).unwrap();
    peer.set_nonblocking(true).unwrap();
    let listener = ShardListener {
        addr: ListenAddr::Udp(socket.local_addr().unwrap()),
        socket: Some(socket.into()),
        handed_over: false,
        kind: ListenerKind::Udp,
        service: Arc::new(Arc::new(Arc::clone(service))),
        adopter: None,
        assist: None,
    };
    let shard = Shard::new(env, vec![listener], Arc::new(OpenConnections::new(1)), None, Spin::Off).unwrap();
    (shard, peer)
}

/// A turn that does not wait.
fn turn<E: Engine>(shard: &mut Shard<E>) {
    rustix::io::write(shard.env.mailbox.as_fd(), &1u64.to_ne_bytes()).unwrap();
    shard.turn().unwrap();
}

fn heard(peer: &UdpSocket) -> usize {
    std::iter::from_fn(|| peer.recv(&mut [0; 4096]).ok()).inspect(|bytes| assert_eq!(*bytes, REPLY_BYTES)).count()
}

#[test]
fn what_datagram_services_hold_is_in_the_shards_budget() {
    on_each_engine(|| holds::<Epoll>(false), || holds::<Uring>(false));
}

#[test]
fn replies_to_datagrams_behind_gates_are_in_the_shards_budget() {
    on_each_engine(|| holds::<Epoll>(true), || holds::<Uring>(true));
}

fn holds<E: Engine>(gated: bool) {
    let service = Arc::new(Late { gated, ..Late::default() });
    let limits = Limits { shard_bytes_max: SHARD_BYTES_MAX, ..Limits::default() };
    let (mut shard, peer) = serving_datagrams::<E>(&service, limits);
    for _ in 0..DATAGRAMS {
        peer.send(&[1; 100]).unwrap();
        turn(&mut shard);
    }
    (0..10).for_each(|_| turn(&mut shard));
    let handed = shard.env.stats.messages.value() as usize;
    assert!(handed * REPLY_BYTES <= SHARD_BYTES_MAX + REPLY_BYTES, "{handed} datagrams were handed over");
    let counted = shard.env.budget.reply_bytes();
    assert!(counted >= handed * REPLY_BYTES, "{counted} bytes are counted for {handed} datagrams");
    assert!(counted <= SHARD_BYTES_MAX + 8192, "{counted} bytes are counted");
    // As bytes are released it goes on, and nothing that was put aside is lost.
    if gated {
        let log = service.log.lock().unwrap().unwrap();
        let env = &mut shard.env;
        crate::Turn::new(env).release(log, 1);
    }
    let mut answered = 0;
    let mut turns = 0;
    while answered < DATAGRAMS {
        if let Some((_, deferred)) = service.deferred.lock().unwrap().pop() {
            deferred.reply(vec![7; REPLY_BYTES]);
        }
        turn(&mut shard);
        answered += heard(&peer);
        turns += 1;
        assert!(turns < 10_000, "{answered} of {DATAGRAMS} were answered");
    }
    assert_eq!(
        (shard.env.budget.reply_bytes(), shard.env.budget.input_bytes(), shard.env.deferred_datagrams),
        (0, 0, 0)
    );
    // It sleeps, and is woken by the next.
    while shard.next_timeout().is_some() {
        turn(&mut shard);
    }
    peer.send(&[1; 100]).unwrap();
    let before = shard.env.stats.messages.value();
    while shard.env.stats.messages.value() == before {
        shard.turn().unwrap();
    }
    shard.engine.shutdown();
}
