//! Connections that their service ends from another thread.

use std::io::Write;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use crate::common::net::*;
use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::service::ConnKey;
use ksf::{Closer, Message, Peer, Profile, Refused, Reply, Server, Service, Turn, Unlogged};

/// Answers lines, but for those that it keeps, and says how each connection is ended.
#[derive(Default)]
struct Known {
    callers: Mutex<Vec<(Closer, ConnKey)>>,
    kept: Mutex<Vec<Deferred>>,
}

impl Service for Known {
    type Shard = Closer;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile::new("known", Framing::Delimiter(Delimiter::LF))
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Closer> {
        Ok(turn.closer())
    }

    fn accept(&self, _: &mut Closer, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, closer: &mut Closer, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.callers.lock().unwrap().push((closer.clone(), message.key()));
        if message.bytes() == b"keep" {
            self.kept.lock().unwrap().push(reply.defer());
        } else {
            reply.bytes(message.bytes());
        }
    }
}

fn start(engine: EngineKind) -> (Server, Arc<Known>) {
    let service = Arc::new(Known::default());
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(Limits::default());
    (builder.listen(ANY.parse().unwrap(), Arc::clone(&service), None).start().unwrap(), service)
}

/// A new connection, and how it is ended.
fn caller(server: &Server, service: &Known) -> (TcpStream, Closer, ConnKey) {
    let mut peer = connect(server);
    ask(&mut peer, b"hello\n", b"hello\n");
    let (closer, key) = service.callers.lock().unwrap().pop().unwrap();
    (peer, closer, key)
}

#[test]
fn a_connection_that_waits_for_nothing_is_ended() {
    for engine in engines_in_own_network() {
        let (server, service) = start(engine);
        let (mut peer, closer, key) = caller(&server, &service);
        let (mut other, ..) = caller(&server, &service);
        closer.close(key);
        expect_end(&mut peer);
        until_count(&server, "closed_by_service", 1);
        // Nobody is there any more, nor is the one that has its place the same.
        closer.close(key);
        let (mut next, _, next_key) = caller(&server, &service);
        assert_ne!(next_key, key, "{engine}");
        closer.close(key);
        for peer in [&mut other, &mut next] {
            ask(peer, b"still here\n", b"still here\n");
        }
        assert_eq!(count(&server, "closed_by_service"), 1, "{engine}");
    }
}

#[test]
fn a_connection_that_is_owed_a_reply_is_ended_without_it() {
    for engine in engines_in_own_network() {
        let (server, service) = start(engine);
        let (mut peer, closer, key) = caller(&server, &service);
        peer.write_all(b"keep\nbehind\n").unwrap();
        wait_until("the message is kept", || !service.kept.lock().unwrap().is_empty());
        closer.close(key);
        expect_end(&mut peer);
        service.kept.lock().unwrap().drain(..).for_each(|deferred| deferred.reply(b"too late".to_vec()));
        until_count(&server, "replies_too_late", 1);
        assert_eq!(count(&server, "closed_by_service"), 1, "{engine}");
    }
}
