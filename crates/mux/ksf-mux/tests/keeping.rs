//! Short messages that workers keep: each occupies a short slot.

use std::collections::HashSet;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use crate::common::{PATIENCE, Running, frame, own_network, read_frame};
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::pool::{Chunk, SHORT_ID};
use ksf::{Message, Profile, Reply, Service};
use ksf_mux::{Mux, MuxOptions, Workers, WorkersOptions};

const FRAMING: Framing = Framing::LengthPrefix(LengthPrefix::big_endian(4));

fn body(number: usize) -> Vec<u8> {
    format!("{number:0100}").into_bytes()
}

/// These are the messages, the first `short` of them in short slots of their own.
fn assert_kept(kept: &[Chunk], short: usize) {
    assert!(kept.iter().enumerate().all(|(number, chunk)| **chunk == body(number)));
    let names: Vec<_> = kept.iter().map_while(Chunk::name).take_while(|name| name.pool == SHORT_ID).collect();
    assert_eq!(names.len(), short);
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), short, "a slot of its own each");
    assert!(kept[..short].iter().all(|chunk| chunk.occupied_bytes() == 2048));
    assert!(kept[short..].iter().all(|chunk| chunk.name().is_none_or(|name| name.pool != SHORT_ID)));
}

#[test]
fn messages_that_a_worker_keeps_occupy_short_slots_while_there_are_some() {
    let mux = Mux::new(MuxOptions::new(FRAMING)).unwrap();
    let socket = mux.socket().unwrap();
    let (mut client, server) = UnixStream::pair().unwrap();
    mux.attach(server.into()).unwrap();
    let mut kept = Vec::new();
    for number in 0..1100 {
        client.write_all(&frame(&body(number))).unwrap();
        kept.push(socket.recv_timeout(PATIENCE).unwrap().keep());
    }
    assert_kept(&kept, 1024);
    drop(kept);
    client.write_all(&frame(&body(0))).unwrap();
    assert_kept(&[socket.recv_timeout(PATIENCE).unwrap().keep()], 1);
}

/// Keeps every message, and answers with a short one.
#[derive(Default)]
struct Keeper(Mutex<Vec<Chunk>>);

impl Service for Keeper {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("keeper", FRAMING)
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.0.lock().unwrap().push(message.keep());
        reply.bytes(b"kept");
    }
}

#[test]
fn messages_that_a_service_on_workers_keeps_occupy_short_slots() {
    own_network();
    let limits = Limits::default();
    let service = Arc::new(Keeper::default());
    let workers = Workers::start(Arc::clone(&service), WorkersOptions::new(1, limits.clone())).unwrap();
    let running = Running::start(service, workers, limits);
    let mut client = running.connect();
    for number in 0..500 {
        client.write_all(&frame(&body(number))).unwrap();
        assert_eq!(read_frame(&mut client), b"kept");
    }
    assert_kept(&running.service.0.lock().unwrap(), 500);
}
