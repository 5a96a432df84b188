//! Services of the framework on workers: accepted by shards, answered through the multiplexor.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    Asks, Awkward, LONG_BYTES, PATIENCE, Place, Running, Scripted, frame, own_network, pieces_of, read_frame,
    reads_end, wait_until,
};
use ksf::adopt::OnShardsOnly;
use ksf::engine::EngineKind;
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::server::Drained;
use ksf::{Order, Server};
use ksf_mux::{Mux, StartError, Workers, WorkersOptions};
use ksf_test::stream::{expect_reset, reset};
use ksf_test::{Helper, effort, is_helper, listen};
use rustix::process::Signal;

/// In a network of its own.
fn start(service: Arc<Scripted>, workers: usize, limits: Limits) -> Running {
    start_with_mux(service, workers, limits).1
}

fn start_with_mux(service: Arc<Scripted>, workers: usize, limits: Limits) -> (Mux, Running) {
    own_network();
    let workers = Workers::start(Arc::clone(&service), WorkersOptions::new(workers, limits.clone())).unwrap();
    (workers.mux().clone(), Running::start(service, workers, limits))
}

/// A worker that ended alone left the messages that it had taken, and those to come if it was the last one, without an answer.
#[test]
fn panic_of_a_worker_outside_of_the_service_aborts_the_process() {
    let mut command = Helper::command("workers::helper_panics_outside_of_the_service");
    let mut helper = ksf_test::Running::start(command.stdin(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(helper.wait().signal(), Some(Signal::ABORT.as_raw()));
    let said = helper.err.seen().join("\n");
    assert!(said.contains("ksf: thread ksf-worker-0 panicked; "), "{said}");
}

#[test]
#[ignore = "a part of the test above"]
fn helper_panics_outside_of_the_service() {
    if !is_helper() {
        return;
    }
    own_network();
    let service = Scripted::new(Order::Free, 1);
    let mut options = WorkersOptions::new(1, Limits::default());
    options.classify = Some(Arc::new(|_| panic!("on purpose")));
    options.class_caps = vec![1];
    let workers = Workers::start(Arc::clone(&service), options).unwrap();
    let running = Running::start(service, workers, Limits::default());
    running.connect().write_all(&frame(b"e")).unwrap();
    while listen().is_some() {}
}

#[test]
fn one_connection_occupies_all_workers_where_order_is_free() {
    let running = start(Scripted::new(Order::Free, 3), 3, Limits::default());
    let mut client = running.connect();
    // Each waits until three of them are worked on at once.
    client.write_all(&frame(b"b").repeat(3)).unwrap();
    for _ in 0..3 {
        assert_eq!(read_frame(&mut client), b"together");
    }
}

/// The message of the other connection arrives while the worker has the first one of the pipeline. That ends the turn, or the
/// second one does.
#[test]
fn a_pipeline_gives_others_their_turn_whatever_it_has_sent() {
    for order in [Order::Free, Order::Requests] {
        let (mux, running) = start_with_mux(Scripted::new(order, 2), 1, Limits::default());
        let mut pipeline = running.connect();
        pipeline.write_all(&[frame(b"b"), frame(b"l").repeat(200)].concat()).unwrap();
        wait_until("the worker has the first message", || running.service.calls.load(Ordering::SeqCst) == 1);
        let mut other = running.connect();
        other.write_all(&frame(b"n")).unwrap();
        wait_until("the other is attached", || mux.connections().len() == 2);
        running.service.together.wait();
        let before = read_frame(&mut other);
        assert!([&b"1"[..], b"2"].contains(&&*before), "{order:?}: behind {}", before.escape_ascii());
    }
}

#[test]
fn answers_keep_the_order_of_requests_also_deferred_ones() {
    // A lone worker is always busy, and takes several messages at once where it may.
    for workers in [1, 4] {
        keeps_order(workers);
    }
}

fn keeps_order(workers: usize) {
    let running = start(Scripted::new(Order::Requests, 1), workers, Limits::default());
    let mut client = running.connect();
    let mut expected = Vec::new();
    let mut bytes = Vec::new();
    for at in 0..600 {
        let body = [&b"eddw"[at % 3..][..2], format!("{at}").as_bytes()].concat();
        bytes.extend_from_slice(&frame(&body));
        expected.push(body);
    }
    let mut writer = client.try_clone().unwrap();
    let write = thread::spawn(move || writer.write_all(&bytes).unwrap());
    for body in expected {
        assert_eq!(read_frame(&mut client), body);
    }
    write.join().unwrap();
}

/// A range of a file is refused before anything is sent.
#[test]
fn answers_of_several_pieces_leave_as_one_message_without_files() {
    let running = start(Scripted::new(Order::Requests, 1), 2, Limits::default());
    let mut client = running.connect();
    for at in 0..20 {
        let bodies = [format!("m{at}"), format!("e{at}"), format!("M{at}")];
        client.write_all(&bodies.iter().flat_map(|body| frame(body.as_bytes())).collect::<Vec<_>>()).unwrap();
        let [now, plain, later] = bodies.map(String::into_bytes);
        assert!(read_frame(&mut client) == pieces_of(&now), "{at}");
        assert_eq!(read_frame(&mut client), plain);
        assert!(read_frame(&mut client) == pieces_of(&later), "{at}");
    }
}

#[test]
fn a_message_may_be_answered_twice_and_later() {
    let running = start(Scripted::new(Order::Free, 1), 2, Limits::default());
    let mut client = running.connect();
    client.write_all(&frame(b"2")).unwrap();
    assert_eq!(read_frame(&mut client), b"second right");
    assert_eq!(read_frame(&mut client), b"first right");
    client.shutdown(Shutdown::Write).unwrap();
    reads_end(&mut client);
    running.counts("closed_by_peer", 1);
}

#[test]
fn ends_have_their_reasons_and_close_what_was_opened() {
    let limits = Limits { message_bytes_max: 100, assembly_timeout_ms: 50, ..Limits::default() };
    let running = start(Scripted::new(Order::Free, 1), 2, limits);
    let cases: [(&[u8], &str); 5] = [
        (&frame(b"c"), "closed_by_service"),
        (&frame(b"f"), "closed_abandoned"),
        (&frame(b"p"), "closed_panicked"),
        (&[0, 0, 1, 0], "closed_oversized_message"),
        (&[0, 0, 0, 9, 1], "closed_assembly_timeout"),
    ];
    for (at, (bytes, counter)) in cases.into_iter().enumerate() {
        let before = running.counter(counter);
        let mut client = running.connect();
        client.write_all(bytes).unwrap();
        if at == 0 {
            assert_eq!(read_frame(&mut client), b"last");
        }
        reads_end(&mut client);
        running.counts(counter, before + 1);
    }
    // The workers live on after a panic, and others were not disturbed.
    let mut client = running.connect();
    client.write_all(&frame(b"e still here")).unwrap();
    assert_eq!(read_frame(&mut client), b"e still here");
    assert_eq!(running.counter("tasks_panicked"), 1);
    assert_eq!(running.counter("closed_total"), cases.len() as u64);
    drop(client);
    running.counts("closed_by_peer", 1);
    let service = Arc::clone(&running.service);
    drop(running);
    assert_eq!(service.open.load(Ordering::SeqCst), 0, "a state was not given back");
}

/// Its next messages need no worker's time, and their answers would reach nobody.
#[test]
fn messages_of_a_connection_that_was_reset_are_thrown_away() {
    // In the second case the connection is not read when the reset comes.
    for deferred_max in [1024, 10] {
        own_network();
        let limits = Limits { deferred_max, ..Limits::default() };
        let service = Scripted::new(Order::Free, 2);
        let mut options = WorkersOptions::new(2, limits.clone());
        options.classify = Some(Arc::new(|message| (message.first() != Some(&b'n')).then_some(0)));
        options.class_caps = vec![1];
        let workers = Workers::start(Arc::clone(&service), options).unwrap();
        let mux = workers.mux().clone();
        let running = Running::start(service, workers, limits);
        let mut client = running.connect();
        client.write_all(&[frame(b"b"), frame(b"e").repeat(100)].concat()).unwrap();
        wait_until("the first one is begun", || running.service.calls.load(Ordering::SeqCst) == 1);
        reset(client);
        running.counts("closed_io", 1);
        // The worker that has noticed the reset answers this one.
        let mut other = running.connect();
        other.write_all(&frame(b"n")).unwrap();
        assert_eq!(read_frame(&mut other), b"1");
        running.service.together.wait();
        wait_until("nothing is left of it", || mux.connections().len() == 1);
        assert_eq!(running.service.calls.load(Ordering::SeqCst), 2, "{deferred_max}");
    }
}

#[test]
fn a_panic_where_a_connection_begins_or_ends_ends_that_connection_only() {
    own_network();
    let service = Awkward::new(Framing::LengthPrefix(LengthPrefix::big_endian(4)));
    let workers = Workers::start(Arc::clone(&service), WorkersOptions::new(2, Limits::default())).unwrap();
    let running = Running::start(Arc::clone(&service), workers, Limits::default());
    let ask = |client: &mut TcpStream| {
        client.write_all(&frame(b"here")).unwrap();
        assert_eq!(read_frame(client), b"here");
    };
    let mut other = running.connect();
    ask(&mut other);
    for (at, place) in [Place::Accept, Place::Fork, Place::Close].into_iter().enumerate() {
        *service.panics.lock().unwrap() = Some(place);
        let mut client = running.connect();
        if place == Place::Close {
            ask(&mut client);
            client.shutdown(Shutdown::Write).unwrap();
        }
        reads_end(&mut client);
        wait_until("it panics", || service.panics.lock().unwrap().is_none());
        wait_until("its place is free", || running.server.connections() == 1);
        running.counts("closed_panicked", 2.min(at as u64 + 1));
        // Of the other one: one for each worker.
        wait_until("its states are closed", || service.open.load(Ordering::SeqCst) == 2);
        ask(&mut other);
    }
    running.counts("closed_by_peer", 1);
    running.counts("closed_total", 3);
    drop(other);
    wait_until("all states are closed", || service.open.load(Ordering::SeqCst) == 0);
}

/// Also if it sends on: workers have nothing to do with it.
#[test]
fn a_refused_connection_ends_soon_for_its_peer() {
    own_network();
    let limits = Limits { linger_timeout_ms: 200, ..Limits::default() };
    let soon = effort(PATIENCE, Duration::from_millis(1_000 + limits.linger_timeout_ms));
    let service = Awkward::new(Framing::RecordMark);
    let workers = Workers::start(Arc::clone(&service), WorkersOptions::new(1, limits.clone())).unwrap();
    let running = Running::start(Arc::clone(&service), workers, limits);
    service.refuses.store(true, Ordering::SeqCst);
    let call = [0x80, 0, 0, 4, b'c', b'a', b'l', b'l'];
    for calls in [0, 1, usize::MAX] {
        let mut client = running.connect();
        let begun = Instant::now();
        // The end may come before.
        let _ = (0..calls).try_for_each(|_| client.write_all(&call));
        reads_end(&mut client);
        assert!(begun.elapsed() < soon, "after {calls} calls: {:?}", begun.elapsed());
    }
    running.counts("closed_by_service", 3);
    wait_until("their places are free", || running.server.connections() == 0);
}

#[test]
fn a_worker_that_is_held_up_loses_the_cheap_messages_behind() {
    let running = start(Scripted::new(Order::Free, 2), 2, Limits::default());
    let mut client = running.connect();
    // Until the workers believe that messages are cheap, and take many at once.
    for _ in 0..200 {
        client.write_all(&frame(b"e").repeat(200)).unwrap();
        for _ in 0..200 {
            assert_eq!(read_frame(&mut client), b"e");
        }
    }
    // In one segment: a message whose answer may wait with the next one's, one that waits for the test, and cheap ones.
    let segment = [frame(b"e first"), frame(b"b"), frame(b"e").repeat(50)].concat();
    let mut waited = 0;
    for _ in 0..5 {
        client.write_all(&segment).unwrap();
        let mut early = Vec::new();
        while early.iter().filter(|answer| *answer == b"e").count() < 50 {
            early.push(read_frame(&mut client));
        }
        running.service.together.wait();
        let mut late: Vec<_> = (early.len()..52).map(|_| read_frame(&mut client)).collect();
        late.sort();
        assert_eq!(late.pop().unwrap(), b"together");
        waited += late.len();
    }
    assert!(waited <= 2, "each of two workers holds answers back until it was surprised once, but {waited} waited");
}

#[test]
fn answers_to_a_message_the_service_panicked_with_reach_nobody() {
    let running = start(Scripted::new(Order::Free, 2), 1, Limits::default());
    for round in 1..=3 {
        let mut client = running.connect();
        client.write_all(&frame(b"q")).unwrap();
        reads_end(&mut client);
        // The next connection has the place of the last one, and the same worker.
        let mut next = running.connect();
        running.service.together.wait();
        running.service.together.wait();
        next.write_all(&frame(b"e still here")).unwrap();
        assert_eq!(read_frame(&mut next), b"e still here");
        assert_eq!(running.counter("tasks_panicked"), round);
    }
}

#[test]
fn draining_answers_what_was_received() {
    let running = start(Scripted::new(Order::Requests, 2), 2, Limits::default());
    let mut client = running.connect();
    // The first message waits for the test, the others wait for it.
    client.write_all(&[frame(b"b"), frame(b"e one"), frame(b"e two")].concat()).unwrap();
    wait_until("it is called", || running.service.calls.load(Ordering::SeqCst) > 0);
    let service = Arc::clone(&running.service);
    let drain = thread::spawn(move || running.server.drain().unwrap());
    service.together.wait();
    for expected in [&b"together"[..], b"e one", b"e two"] {
        assert_eq!(read_frame(&mut client), expected);
    }
    reads_end(&mut client);
    drain.join().unwrap();
    assert_eq!(service.open.load(Ordering::SeqCst), 0);
}

#[test]
fn all_that_was_sent_before_the_end_is_answered() {
    let running = start(Scripted::new(Order::Free, 1), 2, Limits::default());
    for round in 0..5_usize {
        let mut client = running.connect();
        let count = 1 + round * 500;
        let mut bodies: Vec<_> = (0..count).map(|at| format!("{}{at}", ["e", "e", "d"][at % 3]).into_bytes()).collect();
        let bytes: Vec<_> = bodies.iter().flat_map(|body| frame(body)).collect();
        let mut writer = client.try_clone().unwrap();
        let write = thread::spawn(move || {
            writer.write_all(&bytes).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut answers: Vec<_> = (0..count).map(|_| read_frame(&mut client)).collect();
        answers.sort();
        bodies.sort();
        assert_eq!(answers, bodies);
        reads_end(&mut client);
        write.join().unwrap();
    }
    running.counts("closed_by_peer", 5);

    let mut client = running.connect();
    client.write_all(&[frame(b"e whole"), frame(b"e not whole")[..9].to_vec()].concat()).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_frame(&mut client), b"e whole");
    reads_end(&mut client);
    running.counts("closed_by_peer_mid_message", 1);

    // The end comes while the only worker that could notice it is busy: what it sends then is sent nevertheless.
    let running = start(Scripted::new(Order::Requests, 2), 2, Limits::default());
    let mut client = running.connect();
    client.write_all(&[frame(b"b"), frame(b"e after")].concat()).unwrap();
    wait_until("it is called", || running.service.calls.load(Ordering::SeqCst) > 0);
    client.shutdown(Shutdown::Write).unwrap();
    running.service.together.wait();
    assert_eq!(read_frame(&mut client), b"together");
    assert_eq!(read_frame(&mut client), b"e after");
    reads_end(&mut client);
    running.counts("closed_by_peer", 1);
}

#[test]
fn long_replies_to_a_slow_reader_stay_whole() {
    const COUNT: usize = 12;
    let running = start(Scripted::new(Order::Free, 1), 3, Limits::default());
    let mut client = running.connect();
    let bodies: Vec<_> = (0..COUNT).map(|at| [vec![b'e'], vec![at as u8; 700_000 + at]].concat()).collect();
    let bytes: Vec<_> = bodies.iter().flat_map(|body| frame(body)).collect();
    let mut writer = client.try_clone().unwrap();
    let write = thread::spawn(move || writer.write_all(&bytes).unwrap());
    // It reads nothing until the server has stopped to read.
    wait_until("the server reads no more", || running.counter("reads_paused") > 0);
    let mut answers: Vec<_> = (0..COUNT).map(|_| read_frame(&mut client)).collect();
    answers.sort();
    assert!(answers == bodies, "a reply is torn");
    write.join().unwrap();
    assert_eq!(running.service.calls.load(Ordering::SeqCst), COUNT);
}

#[test]
fn what_a_peer_is_owed_that_does_not_read_is_bounded() {
    const COUNT: usize = 1000;
    const WORKERS: usize = 2;
    let limits = Limits::default();
    let frame_bytes = LONG_BYTES + 4;
    // What the out-queue may have, and what workers write before they look again; what is in work as announced.
    let ahead = WORKERS * ((64 << 10) + frame_bytes);
    let at_once = limits.out_queue_bytes_max + ahead;
    // A batch counts until all of it is sent: then there is room for many, which workers begin as fast as they can.
    let later = limits.connection_bytes_max + ahead + COUNT * 4;
    for (letter, bound) in [(b"g", at_once), (b"G", later)] {
        own_network();
        let service = Scripted::new(Order::Free, 1);
        let options = WorkersOptions::new(WORKERS, limits.clone());
        let workers = Workers::start(Arc::clone(&service), options).unwrap();
        let mux = workers.mux().clone();
        let running = Running::start(service, workers, limits.clone());
        let (mut slow, mut quick) = (running.connect(), running.connect());
        slow.write_all(&frame(letter).repeat(COUNT)).unwrap();
        let requests = COUNT;
        let is_bounded = || assert!(mux.memory() <= bound + requests, "{} bytes of {bound}", mux.memory());
        wait_until("the peer is owed much", || mux.memory() > limits.out_queue_bytes_max);
        // Others are answered meanwhile.
        for _ in 0..300 {
            quick.write_all(&frame(b"e quick")).unwrap();
            assert_eq!(read_frame(&mut quick), b"e quick");
            is_bounded();
        }
        for _ in 0..COUNT {
            assert!(read_frame(&mut slow) == [b'g'; LONG_BYTES]);
            is_bounded();
        }
        drop(slow);
        wait_until("nothing is left", || mux.memory() == 0);
    }
}

#[test]
fn answers_that_were_not_announced_close_the_connection_at_twice_its_budget() {
    let limits = Limits { connection_bytes_max: 1 << 20, ..Limits::default() };
    let running = start(Scripted::new(Order::Free, 1), 2, limits);
    let (mut client, mut other) = (running.connect(), running.connect());
    client.write_all(&frame(b"u").repeat(500)).unwrap();
    // As many as fit, at what an answer is assumed to need, and no more.
    wait_until("the service has them", || running.service.calls.load(Ordering::SeqCst) >= 256);
    other.write_all(&frame(b"a")).unwrap();
    let in_work: usize = String::from_utf8(read_frame(&mut other)).unwrap().parse().unwrap();
    assert!((256..=257).contains(&in_work), "{in_work}, with two workers");
    running.counts("closed_reply_limit", 1);
}

#[test]
fn a_silent_peer_and_one_that_does_not_read_are_closed_in_time() {
    let limits = Limits { idle_timeout_ms: 50, ..Limits::default() };
    let running = start(Scripted::new(Order::Free, 1), 2, limits);
    let mut client = running.connect();
    reads_end(&mut client);
    running.counts("closed_idle_timeout", 1);

    let limits = Limits { send_timeout_ms: 50, ..Limits::default() };
    let running = start(Scripted::new(Order::Free, 1), 2, limits);
    let mut client = running.connect();
    let bytes = frame(&[b'e'; 900_000]).repeat(20);
    // It never reads; what it sends is refused when the server has had enough.
    let _ = client.write_all(&bytes);
    running.counts("closed_send_timeout", 1);
}

/// Otherwise the end would pass for one in order, and the kernel would keep the replies for minutes, for a peer that counts
/// nowhere.
#[test]
fn an_end_that_throws_replies_away_is_a_reset() {
    // More than the buffers of both sockets take.
    let many = frame(b"g").repeat(1000);
    let ask = |limits: Limits| {
        let (mux, running) = start_with_mux(Scripted::new(Order::Free, 1), 2, limits.clone());
        let mut client = running.connect();
        client.write_all(&many).unwrap();
        wait_until("replies wait", || mux.memory() > limits.out_queue_bytes_max);
        (running, client)
    };
    let (running, mut client) = ask(Limits::default());
    running.server.set_limits(&Limits { send_timeout_ms: 50, ..Limits::default() }.into());
    running.counts("closed_send_timeout", 1);
    expect_reset(&mut client);

    let (running, mut client) = ask(Limits { drain_timeout_ms: 50, ..Limits::default() });
    running.server.drain().unwrap();
    expect_reset(&mut client);

    let (running, mut client) = ask(Limits::default());
    drop(running);
    expect_reset(&mut client);

    let limits = Limits { connection_bytes_max: 1 << 20, ..Limits::default() };
    let (mux, running) = start_with_mux(Scripted::new(Order::Free, 1), 2, limits);
    let (mut client, mut other) = (running.connect(), running.connect());
    client.write_all(&frame(b"u").repeat(500)).unwrap();
    wait_until("the service has them", || running.service.calls.load(Ordering::SeqCst) >= 256);
    // A connection stays until those that are deferred are answered. The rest is thrown away.
    loop {
        other.write_all(&frame(b"a")).unwrap();
        read_frame(&mut other);
        if mux.connections().len() == 1 {
            break;
        }
    }
    running.counts("closed_reply_limit", 1);
    expect_reset(&mut client);
}

/// A peer cannot send the rest of what is not read, nor is it idle: what it sent lies in its socket.
#[test]
fn a_peer_whose_bytes_are_not_read_does_not_lose_by_the_clock() {
    let cases = [
        (b"e whole" as &[u8], 7, "closed_assembly_timeout", Limits { assembly_timeout_ms: 50, ..Limits::default() }),
        (b"e whole", 0, "closed_idle_timeout", Limits { idle_timeout_ms: 50, ..Limits::default() }),
    ];
    for (body, begun_bytes, counter, limits) in cases {
        let patient = Limits { assembly_timeout_ms: 0, ..Limits::default() };
        let (mux, running) = start_with_mux(Scripted::new(Order::Requests, 2), 1, patient);
        let message = frame(body);
        let (begun, rest) = message.split_at(begun_bytes);
        let begin = || {
            let (mut client, before) = (running.connect(), mux.memory());
            client.write_all(begun).unwrap();
            wait_until("it is read", || begun.is_empty() || mux.memory() > before);
            client
        };
        let mut unread = begin();
        // By this one the test sees that the time is over.
        let _silent = begin();
        let mut busy = running.connect();
        busy.write_all(&frame(b"b")).unwrap();
        wait_until("the only worker is busy", || running.service.calls.load(Ordering::SeqCst) == 1);
        unread.write_all(rest).unwrap();
        running.server.set_limits(&limits.into());
        running.counts(counter, 1);
        running.service.together.wait();
        assert_eq!(read_frame(&mut unread), body, "{counter}");
    }
}

/// At its deadline a drain begins nothing more, and waits for nobody.
#[test]
fn a_drain_ends_in_time_and_leaves_what_waits() {
    own_network();
    let limits = Limits { drain_timeout_ms: 50, ..Limits::default() };
    for order in [Order::Requests, Order::Free] {
        let running = start(Scripted::new(order, 2), 1, limits.clone());
        let mut client = running.connect();
        client.write_all(&[frame(b"b"), frame(b"e").repeat(500)].concat()).unwrap();
        wait_until("it is called", || running.service.calls.load(Ordering::SeqCst) == 1);
        let Running { server, service, .. } = running;
        let (tell, told) = mpsc::channel();
        thread::spawn(move || tell.send(server.drain().unwrap()).unwrap());
        let drained = told.recv_timeout(PATIENCE).expect("it waits for the call");
        assert_eq!(drained, Drained { tasks_left: 1 }, "{order:?}");
        // It passes for no end in order: requests are not answered.
        expect_reset(&mut client);
        service.together.wait();
        wait_until("the worker ends", || Arc::strong_count(&service) == 1);
        assert_eq!(service.calls.load(Ordering::SeqCst), 1, "{order:?}");
    }
}

#[test]
fn a_drain_of_several_multiplexors_has_one_deadline() {
    own_network();
    let limits = Limits { drain_timeout_ms: PATIENCE.as_millis() as u64, ..Limits::default() };
    let services = [(); 2].map(|()| Scripted::new(Order::Requests, 2));
    let mut builder = Server::builder().engine(EngineKind::Epoll).limits(limits.clone());
    for service in &services {
        let workers = Workers::start(Arc::clone(service), WorkersOptions::new(1, limits.clone())).unwrap();
        builder = builder.listen("tcp:127.0.0.1:0".parse().unwrap(), Arc::clone(service), None).adopt(workers);
    }
    let server = builder.start().unwrap();
    let [mut busy, mut idle] = [0, 1].map(|at| match server.listeners()[at].addr {
        ListenAddr::Tcp(addr) => ksf_test::stream::connect(addr),
        _ => panic!("a TCP listener"),
    });
    idle.write_all(&frame(b"e")).unwrap();
    assert_eq!(read_frame(&mut idle), b"e");
    busy.write_all(&frame(b"b")).unwrap();
    wait_until("it is called", || services[0].calls.load(Ordering::SeqCst) == 1);
    let drain = thread::spawn(move || server.drain().unwrap());
    // While the first one waits for its call.
    reads_end(&mut idle);
    services[0].together.wait();
    assert_eq!(read_frame(&mut busy), b"together");
    reads_end(&mut busy);
    drop((busy, idle));
    assert_eq!(drain.join().unwrap(), Drained::default());
}

#[test]
fn a_connection_that_lingers_counts_as_open() {
    let patient = PATIENCE.as_millis() as u64;
    let (message_bytes_max, assembly_timeout_ms) = (100, 50);
    let limits = Limits { message_bytes_max, assembly_timeout_ms, linger_timeout_ms: patient, ..Limits::default() };
    let running = start(Scripted::new(Order::Free, 1), 2, limits);
    let [mut long, mut slow] = [(); 2].map(|()| running.connect());
    long.write_all(&[0, 0, 1, 0]).unwrap();
    reads_end(&mut long);
    // The thread that closes this one has looked after the other one meanwhile.
    slow.write_all(&[0, 0, 0]).unwrap();
    reads_end(&mut slow);
    assert_eq!(running.server.connections(), 2);
    drop((long, slow));
    wait_until("their places are free", || running.server.connections() == 0);
}

/// It may send while it reads its last replies, but not for as long as the lingering takes.
#[test]
fn a_peer_that_sends_on_after_a_refusal_is_reset_in_time() {
    /// Far beyond the limit and all socket buffers.
    const ENDLESS: usize = 64 << 20;
    let patient = PATIENCE.as_millis() as u64;
    let limits = Limits { message_bytes_max: 100, linger_timeout_ms: patient, ..Limits::default() };
    let running = start(Scripted::new(Order::Free, 1), 2, limits);
    let mut client = running.connect();
    client.write_all(&[0, 0, 1, 0]).unwrap();
    reads_end(&mut client);
    let (block, mut written) = (vec![0; 64 << 10], 0);
    let error = loop {
        match client.write(&block) {
            Ok(bytes) => written += bytes,
            Err(error) => break error.kind(),
        }
        assert!(written < ENDLESS, "all of it is taken");
    };
    assert!(matches!(error, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    running.counts("lingers_cut", 1);
    wait_until("it is closed", || running.server.connections() == 0);
}

#[test]
fn ten_thousand_messages_on_many_connections_come_back() {
    let running = start(Scripted::new(Order::Free, 1), 4, Limits::default());
    thread::scope(|scope| {
        for number in 0..20 {
            let mut client = running.connect();
            scope.spawn(move || {
                for round in 0..50 {
                    let bodies: Vec<_> = (0..10).map(|at| format!("e{number}/{round}/{at}").into_bytes()).collect();
                    let bytes: Vec<_> = bodies.iter().flat_map(|body| frame(body)).collect();
                    client.write_all(&bytes).unwrap();
                    let mut answers: Vec<_> = (0..10).map(|_| read_frame(&mut client)).collect();
                    answers.sort();
                    assert_eq!(answers, bodies);
                }
            });
        }
    });
    assert_eq!(running.counter("messages"), 10_000);
    running.counts("closed_by_peer", 20);
    wait_until("all connections end", || running.server.connections() == 0);
}

#[test]
fn services_that_need_shards_are_refused() {
    let framing = Framing::LengthPrefix(LengthPrefix::big_endian(4));
    let start = |framing, needs_shards| {
        let service = Arc::new(Asks { framing, needs_shards });
        Workers::start(service, WorkersOptions::new(1, Limits::default())).map(drop)
    };
    let refused = |framing, needs_shards| match start(framing, needs_shards) {
        Err(StartError::OnShardsOnly(why)) => why,
        other => panic!("{other:?}"),
    };
    let service = || "asks".to_owned();
    assert_eq!(refused(Framing::Custom, false), OnShardsOnly::CutsItself { service: service() });
    assert_eq!(refused(framing, true), OnShardsOnly::DialsOut { service: service() });
    start(framing, false).unwrap();
}

#[test]
fn a_service_that_dials_on_a_worker_is_told() {
    own_network();
    let service = Arc::new(Asks { framing: Framing::LengthPrefix(LengthPrefix::big_endian(4)), needs_shards: false });
    let workers = Workers::start(Arc::clone(&service), WorkersOptions::new(1, Limits::default())).unwrap();
    let running = Running::start(service, workers, Limits::default());
    let mut client = running.connect();
    client.write_all(&frame(b"ask")).unwrap();
    assert_eq!(read_frame(&mut client), b"Err(NoOutgoing)");
}
