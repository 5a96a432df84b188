//! Answers that are given later than the calls which the other end of an exchange, or a refusal, brought about: they are
//! counted and delivered as those of messages are.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};

use crate::common::net::*;
use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::outgoing::{HangUp, Upstream};
use ksf::pool::Chunk;
use ksf::{CloseReason, Message, Order, Profile, Reply, Server, Service};

/// Passes each line to a backend. An answer of the backend that begins with `block` is given to the client by a task of
/// the pool, another one by the test. What is refused gets its last words from a task.
struct Asks {
    order: Order,
    backend: SocketAddr,
    later: Mutex<mpsc::Sender<(Deferred, Vec<u8>)>>,
}

impl Service for Asks {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: self.order, needs_shards: true, ..Profile::new("asks", Framing::Delimiter(Delimiter::LF)) }
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.dial(self.backend, false).unwrap();
        reply.pass(message.keep()).unwrap();
    }

    fn upstream(&self, (): &mut (), (): &mut (), event: Upstream, reply: &mut Reply<'_>) {
        let Upstream::Received(answer) = event else { return };
        reply.hang_up(HangUp::Close);
        let answer = answer.to_vec();
        if answer.starts_with(b"block") {
            reply.block(answer.len(), |deferred| deferred.reply(answer));
        } else {
            self.later.lock().unwrap().send((reply.defer(), answer)).unwrap();
        }
    }

    fn refuse(&self, (): &mut (), (): &mut (), _: CloseReason, reply: &mut Reply<'_>) {
        reply.block(8, |deferred| deferred.reply(b"too long".to_vec()));
    }
}

struct Served {
    server: Server,
    backend: TcpListener,
    later: mpsc::Receiver<(Deferred, Vec<u8>)>,
}

impl Served {
    fn new(engine: EngineKind, order: Order, limits: Limits) -> Self {
        let backend = TcpListener::bind("127.0.0.1:0").unwrap();
        let (sender, later) = mpsc::channel();
        let service = Asks { order, backend: backend.local_addr().unwrap(), later: Mutex::new(sender) };
        Self { server: one_shard(engine, ANY, limits, Arc::new(service)), backend, later }
    }

    /// A client has asked, and the backend has answered with the same.
    fn ask(&self, text: &[u8]) -> TcpStream {
        let mut client = connect(&self.server);
        client.write_all(&[text, b"\n"].concat()).unwrap();
        let (mut exchange, _) = self.backend.accept().unwrap();
        exchange.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut asked = vec![0; text.len()];
        exchange.read_exact(&mut asked).unwrap();
        exchange.write_all(&asked).unwrap();
        client
    }
}

#[test]
fn an_answer_out_of_an_exchange_may_come_later_and_from_any_thread() {
    for engine in engines_in_own_network() {
        for order in [Order::Requests, Order::Free] {
            let served = Served::new(engine, order, Limits::default());
            let mut client = served.ask(b"later");
            let (deferred, answer) = served.later.recv_timeout(PATIENCE).unwrap();
            // It is waited for, also by a client that says no more.
            client.shutdown(Shutdown::Write).unwrap();
            let mut other = served.ask(b"block me");
            expect(&mut other, b"block me\n");
            std::thread::spawn(move || deferred.reply(answer)).join().unwrap();
            expect(&mut client, b"later\n");
            expect_end(&mut client);
            assert_eq!(count(&served.server, "replies_deferred"), 2, "{engine}, {order:?}");
            until_count(&served.server, "closed_by_peer", 1);
        }
    }
}

#[test]
fn a_client_has_no_more_answers_outstanding_out_of_exchanges_than_it_may() {
    for engine in engines_in_own_network() {
        for order in [Order::Requests, Order::Free] {
            let served = Served::new(engine, order, Limits { deferred_max: 1, ..Limits::default() });
            let mut client = served.ask(b"later");
            let (deferred, answer) = served.later.recv_timeout(PATIENCE).unwrap();
            client.write_all(b"block this\n").unwrap();
            // The shard took several turns for others, and no message of this client.
            (0..5).for_each(|_| expect(&mut served.ask(b"block me"), b"block me\n"));
            assert_eq!(count(&served.server, "messages"), 1 + 5, "{engine}, {order:?}");
            deferred.reply(answer);
            expect(&mut client, b"later\n");
            let (mut exchange, _) = served.backend.accept().unwrap();
            exchange.write_all(b"block this").unwrap();
            expect(&mut client, b"block this\n");
        }
    }
}

#[test]
fn last_words_from_a_task_are_waited_for() {
    for engine in engines_in_own_network() {
        for order in [Order::Requests, Order::Free] {
            let limits = Limits { message_bytes_max: 1000, ..Limits::default() };
            let served = Served::new(engine, order, limits);
            let mut client = connect(&served.server);
            client.write_all(&[b'x'; 5000]).unwrap();
            expect(&mut client, b"too long\n");
            expect_end(&mut client);
            drop(client);
            until_count(&served.server, "closed_oversized_message", 1);
            assert_eq!(count(&served.server, "replies_deferred"), 1, "{engine}, {order:?}");
        }
    }
}

/// More than the sockets of a connection take.
const ENDLESS: usize = 64 << 20;

/// Passes a long request to a backend, and ends the connection of its client with the exchange.
struct Long {
    backend: SocketAddr,
}

impl Service for Long {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { needs_shards: true, ..Profile::new("long", Framing::Delimiter(Delimiter::LF)) }
    }

    fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, reply: &mut Reply<'_>) {
        reply.dial(self.backend, false).unwrap();
        reply.pass(Chunk::from_vec(vec![b'r'; ENDLESS])).unwrap();
    }

    fn upstream(&self, (): &mut (), (): &mut (), event: Upstream, reply: &mut Reply<'_>) {
        if matches!(event, Upstream::Failed(_)) {
            reply.close();
        }
    }
}

/// Its end could pass for that of the request, where the end of the stream is.
#[test]
fn an_end_that_throws_request_bytes_away_is_a_reset() {
    for engine in engines_in_own_network() {
        let backend = TcpListener::bind("127.0.0.1:0").unwrap();
        let start = |limits: Limits| {
            let service = Arc::new(Long { backend: backend.local_addr().unwrap() });
            let server = one_shard(engine, ANY, limits, service);
            let mut client = connect(&server);
            client.write_all(b"all of it\n").unwrap();
            let (mut exchange, _) = backend.accept().unwrap();
            exchange.set_read_timeout(Some(PATIENCE)).unwrap();
            expect(&mut exchange, b"r");
            (server, client, exchange)
        };

        // The backend does not take them.
        let (server, mut client, mut exchange) = start(Limits { send_timeout_ms: 50, ..Limits::default() });
        expect_end(&mut client);
        expect_reset(&mut exchange);
        drop(server);

        // The client has gone.
        let (server, client, mut exchange) = start(Limits::default());
        reset(client);
        until_count(&server, "closed_total", 1);
        expect_reset(&mut exchange);
        drop(server);

        let (server, _client, mut exchange) = start(Limits { drain_timeout_ms: 50, ..Limits::default() });
        server.drain().unwrap();
        expect_reset(&mut exchange);

        let (server, _client, mut exchange) = start(Limits::default());
        drop(server);
        expect_reset(&mut exchange);
    }
}
