//! Work on the thread pool: answers from other threads, panics, a full queue.

mod common;

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex};

use common::net::*;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::tasks::TaskOptions;
use ksf::{Message, Order, Peer, Refused, Reply, Server, Service};

/// Answers lines from the pool: `panic` panics, `wait` waits until the gate is open, the rest is echoed. `busy` when
/// the queue is full.
struct Works {
    order: Order,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    open: bool,
    waiting: usize,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.waiting += 1;
        self.changed.notify_all();
        while !state.open {
            state = self.changed.wait(state).unwrap();
        }
    }

    fn until_waiting(&self, number: usize) {
        let state = self.state.lock().unwrap();
        let (state, _) = self.changed.wait_timeout_while(state, PATIENCE, |state| state.waiting < number).unwrap();
        assert!(state.waiting >= number, "only {} of {number} tasks run", state.waiting);
    }

    fn open(&self) {
        self.state.lock().unwrap().open = true;
        self.changed.notify_all();
    }
}

impl Service for Works {
    type Conn = ();

    fn name(&self) -> &str {
        "works"
    }

    fn framing(&self) -> Framing {
        Framing::Delimiter(Delimiter::LF)
    }

    fn order(&self) -> Order {
        self.order
    }

    fn accept(&self, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let body = message.keep();
        let gate = Arc::clone(&self.gate);
        let refused = reply.offload(move |deferred| {
            if body.starts_with(b"panic") {
                // Without the message of `panic!`, which would look like a failure of the test.
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            if body.starts_with(b"wait") {
                gate.pass();
            }
            deferred.reply_chunk(body);
        });
        if refused.is_err() {
            reply.bytes(b"busy");
        }
    }
}

fn start(engine: EngineKind, order: Order, tasks: TaskOptions) -> (Server, Arc<Gate>) {
    let gate = Arc::<Gate>::default();
    let service = Works { order, gate: Arc::clone(&gate) };
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let builder = Server::builder().engine(engine).cpus(Some(cpus)).tasks(tasks);
    (builder.listen(ANY.parse().unwrap(), Arc::new(service), None).start().unwrap(), gate)
}

#[test]
fn answers_from_many_threads_keep_their_order() {
    own_network();
    for engine in engines() {
        let (server, _) = start(engine, Order::Requests, TaskOptions::default());
        let mut peer = connect(&server);
        for round in 0..20 {
            let lines: Vec<u8> = (0..50).flat_map(|line| format!("{round} {line}\n").into_bytes()).collect();
            ask(&mut peer, &lines, &lines);
        }
        assert_eq!(count(&server, "replies_deferred"), 1000, "{engine}");
    }
}

#[test]
fn a_panicking_task_closes_its_connection_and_no_other() {
    own_network();
    for engine in engines() {
        let (server, _) = start(engine, Order::Requests, TaskOptions::default());
        let mut other = connect(&server);
        for round in 1..=5 {
            let mut peer = connect(&server);
            peer.write_all(b"fine\npanic\nnever\n").unwrap();
            expect(&mut peer, b"fine\n");
            expect_end(&mut peer);
            drop(peer);
            until_count(&server, "closed_abandoned", round);
            assert_eq!(count(&server, "tasks_panicked"), round, "{engine}");
            ask(&mut other, b"and you?\n", b"and you?\n");
        }
        assert_eq!(count(&server, "closed_total"), 5);
    }
}

#[test]
fn a_full_queue_refuses_and_the_service_decides() {
    own_network();
    for engine in engines() {
        let tasks = TaskOptions { threads_max: 1, queue_max: 2, ..TaskOptions::default() };
        let (server, gate) = start(engine, Order::Free, tasks);
        let mut peer = connect(&server);
        peer.write_all(b"wait 1\n").unwrap();
        gate.until_waiting(1);
        // The only thread is busy: two wait in the queue, and the third finds it full.
        ask(&mut peer, b"wait 2\nwait 3\nwait 4\n", b"busy\n");
        assert_eq!(count(&server, "tasks_refused"), 1, "{engine}");
        gate.open();
        expect(&mut peer, b"wait 1\nwait 2\nwait 3\n");
        ask(&mut peer, b"again\n", b"again\n");
    }
}

#[test]
fn a_stopping_server_waits_for_running_tasks_and_keeps_none() {
    own_network();
    for engine in engines() {
        let (server, gate) = start(engine, Order::Free, TaskOptions { threads_max: 1, ..TaskOptions::default() });
        let mut peer = connect(&server);
        peer.write_all(b"wait 1\nwait 2\n").unwrap();
        gate.until_waiting(1);
        wait_until("both are taken", || count(&server, "messages") == 2);
        let stopped = std::thread::spawn(move || drop(server));
        expect_end(&mut peer);
        assert!(!stopped.is_finished(), "{engine}: a task still runs");
        gate.open();
        stopped.join().unwrap();
        // Service, tasks and threads held it, too.
        assert_eq!(Arc::strong_count(&gate), 1, "{engine}: something is left of the server");
    }
}

#[test]
fn datagrams_are_answered_from_the_pool() {
    own_network();
    for engine in engines() {
        let service = Arc::new(Works { order: Order::Free, gate: Arc::default() });
        let server = all_shards(engine, "udp:127.0.0.1:0", Default::default(), service);
        let peers: Vec<_> = (0..8).map(|_| datagrams(addr(&server))).collect();
        for round in 0..10 {
            for (at, peer) in peers.iter().enumerate() {
                peer.send(format!("{round} {at}").as_bytes()).unwrap();
            }
            for (at, peer) in peers.iter().enumerate() {
                let mut got = [0; 20];
                let length = peer.recv(&mut got).unwrap();
                assert_eq!(std::str::from_utf8(&got[..length]), Ok(format!("{round} {at}").as_str()), "{engine}");
            }
        }
    }
}
