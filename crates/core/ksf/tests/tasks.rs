//! Work on threads that may block: answers from other threads, panics, a full queue.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex};

use crate::common::net::*;
use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::tasks::TaskOptions;
use ksf::{Order, Profile, Server, Service};

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

/// Answers lines from the pool: `panic` panics, `wait` waits until the gate is open, the rest is echoed.
fn works(order: Order) -> (Arc<impl Service>, Arc<Gate>) {
    let gate = Arc::<Gate>::default();
    let passed = Arc::clone(&gate);
    let profile = Profile { order, ..Profile::new("works", Framing::Delimiter(Delimiter::LF)) };
    let service = calls(profile, move |message, reply| {
        let (body, gate) = (message.keep(), Arc::clone(&passed));
        reply.block(body.len(), move |deferred| {
            if body.starts_with(b"panic") {
                // Without the message of `panic!`, which would look like a failure of the test.
                std::panic::resume_unwind(Box::new("on purpose"));
            }
            if body.starts_with(b"wait") {
                gate.pass();
            }
            deferred.reply_chunk(body);
        });
    });
    (service, gate)
}

fn start(engine: EngineKind, order: Order, tasks: TaskOptions) -> (Server, Arc<Gate>) {
    let (service, gate) = works(order);
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let builder = Server::builder().engine(engine).cpus(Some(cpus)).tasks(tasks);
    (builder.listen(ANY.parse().unwrap(), service, None).start().unwrap(), gate)
}

#[test]
fn answers_from_many_threads_keep_their_order() {
    for engine in engines_in_own_network() {
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
    for engine in engines_in_own_network() {
        let (server, _) = start(engine, Order::Requests, TaskOptions::default());
        let mut other = connect(&server);
        for round in 1..=5 {
            let mut peer = connect(&server);
            // What is not answered when the task panics gets no answer: the other task may be slower.
            ask(&mut peer, b"fine\n", b"fine\n");
            peer.write_all(b"panic\nnever\n").unwrap();
            expect_end(&mut peer);
            drop(peer);
            until_count(&server, "closed_abandoned", round);
            // Counted after the answer was dropped, on another CPU perhaps.
            until_count(&server, "tasks_panicked", round);
            ask(&mut other, b"and you?\n", b"and you?\n");
        }
        assert_eq!(count(&server, "closed_total"), 5);
    }
}

#[test]
fn a_stopping_server_waits_for_running_tasks_and_keeps_none() {
    for engine in engines_in_own_network() {
        let (server, gate) = start(engine, Order::Free, TaskOptions { threads_max: 1, ..TaskOptions::default() });
        let mut peer = connect(&server);
        peer.write_all(b"wait 1\nwait 2\n").unwrap();
        gate.until_waiting(1);
        wait_until("both are taken", || count(&server, "messages") == 2);
        let stopped = std::thread::spawn(move || drop(server));
        expect_reset(&mut peer);
        assert!(!stopped.is_finished(), "{engine}: a task still runs");
        gate.open();
        stopped.join().unwrap();
        // Service, tasks and threads held it, too.
        assert_eq!(Arc::strong_count(&gate), 1, "{engine}: something is left of the server");
    }
}

#[test]
fn datagrams_are_answered_from_the_pool() {
    for engine in engines_in_own_network() {
        let service = works(Order::Free).0;
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

/// Every line is work that blocks until the gate is open.
fn blocks() -> (Arc<impl Service>, Arc<Gate>) {
    let gate = Arc::<Gate>::default();
    let passed = Arc::clone(&gate);
    let profile = Profile { order: Order::Free, ..Profile::new("blocks", Framing::Delimiter(Delimiter::LF)) };
    let service = calls(profile, move |message, reply| {
        let (line, gate) = (message.bytes().to_vec(), Arc::clone(&passed));
        reply.block(line.len(), move |deferred| {
            gate.pass();
            deferred.reply(line);
        });
    });
    (service, gate)
}

/// While the queue is full the peers are not read: no request is refused, and none is lost.
#[test]
fn a_full_queue_of_blocking_tasks_stops_reading() {
    own_network();
    const PEERS: usize = 4;
    const LINES: usize = 200;
    for engine in engines() {
        let (service, gate) = blocks();
        let tasks = TaskOptions { threads_max: 2, queue_max: 10, ..TaskOptions::default() };
        let server = Server::builder()
            .engine(engine)
            .cpus(Some(vec![ksf::cpus::allowed().unwrap()[0]]))
            .tasks(tasks)
            .listen(ANY.parse().unwrap(), service, None)
            .start()
            .unwrap();
        let mut peers: Vec<_> = (0..PEERS).map(|_| connect(&server)).collect();
        let lines: String = (0..LINES).map(|at| format!("line {at}\n")).collect();
        peers.iter_mut().for_each(|peer| peer.write_all(lines.as_bytes()).unwrap());
        gate.until_waiting(2);
        wait_until("every peer has a request in work", || count(&server, "messages") >= (2 + 10) as u64);
        // Two tasks run, ten wait, and each connection exceeds the queue by one at most.
        let handed = count(&server, "messages") as usize;
        assert!(handed <= 2 + 10 + PEERS, "{engine}: {handed} requests were taken");
        gate.open();
        for peer in &mut peers {
            let got = String::from_utf8(read_exactly(peer, lines.len())).unwrap();
            let mut got: Vec<_> = got.lines().map(str::to_owned).collect();
            got.sort_unstable_by_key(|line| line[5..].parse::<usize>().unwrap());
            assert_eq!(got.join("\n") + "\n", lines, "{engine}");
        }
    }
}

/// There is no reading that could stop: others use the socket.
#[test]
fn datagrams_without_room_in_the_queue_are_dropped_and_counted() {
    for engine in engines_in_own_network() {
        let (service, gate) = blocks();
        // One task runs, and one waits.
        let few = TaskOptions { threads_max: 1, queue_max: 1, ..TaskOptions::default() };
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let builder = Server::builder().engine(engine).cpus(Some(cpus)).tasks(few);
        let server = builder.listen("udp:127.0.0.1:0".parse().unwrap(), service, None).start().unwrap();
        let peer = datagrams(addr(&server));
        peer.send(&[1]).unwrap();
        gate.until_waiting(1);
        for number in [2, 3, 4] {
            peer.send(&[number]).unwrap();
        }
        until_count(&server, "datagrams_refused_tasks", 2);
        gate.open();
        for number in [1, 2] {
            let mut got = [0; 9];
            assert_eq!((peer.recv(&mut got).unwrap(), got[0]), (1, number), "{engine}");
        }
    }
}

/// Where the shards are bound to a CPU each, such tasks go wherever the process may.
#[test]
fn blocking_tasks_are_bound_to_no_cpu() {
    own_network();
    let allowed = ksf::cpus::allowed().unwrap();
    let service = calls(Profile::new("cpus", Framing::Delimiter(Delimiter::LF)), |_, reply| {
        let of_shard = ksf::cpus::allowed().unwrap().len();
        let of_task = || ksf::cpus::allowed().unwrap();
        reply.block(0, move |deferred| deferred.reply(format!("{of_shard} {:?}", of_task()).into_bytes()));
    });
    let server = Server::builder().listen(ANY.parse().unwrap(), service, None).start().unwrap();
    // The shard itself is bound to one.
    ask(&mut connect(&server), b"cpus\n", format!("1 {allowed:?}\n").as_bytes());
}
