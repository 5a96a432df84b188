//! A service on the kernel's multiplexor, in a machine that has one, and on ksf's own, there and here: the same cases,
//! with the same expectations.

#[path = "../../ksf-mux/tests/common/mod.rs"]
mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use common::{Asks, PATIENCE, Running, Scripted, frame, own_network, read_frame, reads_end, until};
use ksf::Order;
use ksf::adopt::Adopter;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf_kcm::{KcmError, KcmSocket, KernelWorkers, KernelWorkersOptions, Received, load, probe};
use ksf_lab::{Lab, turn};
use ksf_mux::{Workers, WorkersOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Set in a machine of the lab: whose multiplexor to test.
const INSIDE: &str = "KSF_TEST_MUX";

/// Runs in a machine, which this file's program is copied to, what is run here where there is no machine.
fn in_a_machine(test: &str, mux: &str) {
    let Some(_turn) = turn() else { return };
    let program = std::env::current_exe().unwrap();
    let lab = Lab::new(program).module("kcm").cpus(2).memory_mib(1024).time_limit(PATIENCE * 2);
    let lab = ["--exact", test, "--nocapture"].iter().fold(lab, |lab, word| lab.arg(*word));
    let outcome = lab.env(INSIDE, mux).run().unwrap();
    assert!(outcome.success(), "{}\n{}", outcome.output, outcome.console);
    // A filter that fits no test would be a success, too.
    assert!(outcome.output.contains("test result: ok. 1 passed"), "{}", outcome.output);
}

fn inside() -> Option<String> {
    std::env::var(INSIDE).ok()
}

#[test]
fn on_af_kcm() {
    match inside().as_deref() {
        Some("kcm") => {
            sockets();
            cases("kcm");
        }
        Some("ksf") => cases("ksf"),
        _ => {
            in_a_machine("on_af_kcm", "kcm");
            in_a_machine("on_af_kcm", "ksf");
        }
    }
}

#[test]
fn on_ksf_here() {
    own_network();
    cases("ksf");
}

/// Here there may be an AF_KCM or none: it is either proven to work, or said why not and what gives it.
#[test]
fn what_is_missing_is_said() {
    let started = KernelWorkers::start(Scripted::new(Order::Free, 1), KernelWorkersOptions::new(1, Limits::default()));
    match probe() {
        Ok(_) => assert!(started.is_ok()),
        Err(error) => {
            let refused = started.err().expect("what cannot be probed cannot be started");
            assert_eq!(refused.to_string(), error.to_string());
            assert!(!error.remedy().is_empty());
            if matches!(error, KcmError::Absent(_)) {
                assert_eq!(error.errno(), Some(97), "EAFNOSUPPORT");
            }
        }
    }
}

// --- sockets ----------------------------------------------------------------------------------------------------------

/// What the wrapper does, call by call.
fn sockets() {
    probe().unwrap();
    let program = load(&Framing::Delimiter(Delimiter::LF)).unwrap();
    let refused = load(&Framing::Raw);
    assert!(matches!(refused, Err(KcmError::NoProgram { framing: Framing::Raw })));

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    let near = listener.accept().unwrap().0;
    let one = KcmSocket::new().unwrap();
    let two = one.try_clone().unwrap();
    let os = |result: Result<(), KcmError>| match result {
        Err(KcmError::Os { error, .. }) => error.raw_os_error().unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(os(one.attach(&listener, &program)), 95, "EOPNOTSUPP");
    one.attach(&near, &program).unwrap();
    assert_eq!(os(two.attach(&near, &program)), 114, "EALREADY");

    // Only one receives: it gets every message, and says which one is cut short.
    two.set_recv_disabled(true).unwrap();
    assert!(two.is_recv_disabled().unwrap() && !one.is_recv_disabled().unwrap());
    let mut buffer = [0; 8];
    assert_eq!(one.recv(&mut buffer).unwrap(), None);
    far.write_all(b"one\ntwo, which is long\nthree\n").unwrap();
    for (expected, is_whole) in [(&b"one\n"[..], true), (b"two, whi", false), (b"three\n", true)] {
        let mut ready = [PollFd::new(&one, PollFlags::IN)];
        poll(&mut ready, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
        assert!(one.has_message().unwrap());
        assert_eq!(one.recv(&mut buffer).unwrap(), Some(Received { bytes: expected.len(), is_whole }));
        assert_eq!(&buffer[..expected.len()], expected);
    }
    assert!(!two.has_message().unwrap());

    // A message leaves when its end was given.
    let slices = |bytes: &'static [u8]| [std::io::IoSlice::new(bytes)];
    assert_eq!(two.send(&slices(b"half "), false).unwrap(), 5);
    assert!(two.queued_bytes().unwrap() >= 5);
    assert_eq!(two.send(&slices(b"and half"), true).unwrap(), 8);
    let mut answer = [0; 13];
    far.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"half and half");
    assert_eq!(two.queued_bytes().unwrap(), 0);

    one.unattach(&near).unwrap();
    assert_eq!(os(one.unattach(&near)), 2, "ENOENT");
}

// --- services ---------------------------------------------------------------------------------------------------------

fn start(mux: &str, service: &Arc<Scripted>, workers: usize, limits: Limits) -> Running {
    let service = Arc::clone(service);
    let adopter: Arc<dyn Adopter> = if mux == "kcm" {
        KernelWorkers::start(Arc::clone(&service), KernelWorkersOptions::new(workers, limits.clone())).unwrap()
    } else {
        Workers::start(Arc::clone(&service), WorkersOptions::new(workers, limits.clone())).unwrap()
    };
    Running::start(service, adopter, limits)
}

/// Whether the kernel has AF_KCM or not: workers are what they cannot run on.
#[test]
fn services_that_need_shards_are_refused() {
    for (framing, needs_shards) in
        [(Framing::Custom, false), (Framing::Delimiter(Delimiter::new(b"\n").unwrap()), true)]
    {
        let service = Arc::new(Asks { framing, needs_shards });
        let started = KernelWorkers::start(service, KernelWorkersOptions::new(1, Limits::default())).map(drop);
        let error = started.expect_err("nobody would answer");
        assert!(matches!(error, KcmError::OnShardsOnly(_)) && error.remedy().contains("without workers"), "{error}");
    }
}

type Case = (&'static str, fn(&str));

fn cases(mux: &str) {
    let all: [Case; 8] = [
        ("every message is answered once and to its connection", many_connections),
        ("all that was sent before the end is answered", half_close),
        ("long replies to a slow reader stay whole", slow_reader),
        ("answers keep the order of requests", order),
        ("one connection occupies all workers", several_workers),
        ("ends have their reasons", ends),
        ("limits of time", time_limits),
        ("draining answers what was received", draining),
    ];
    for (name, case) in all {
        println!("{mux}: {name}");
        case(mux);
    }
}

/// Messages of different lengths, many in one segment.
fn many_connections(mux: &str) {
    let running = start(mux, &Scripted::new(Order::Free, 1), 3, Limits::default());
    thread::scope(|scope| {
        for number in 0..12_usize {
            let mut client = running.connect();
            scope.spawn(move || {
                for round in 0..10 {
                    let body = |at: usize| {
                        let letter = if at.is_multiple_of(3) { 'd' } else { 'e' };
                        let fill = "x".repeat((number * 7 + round * 13 + at * 31) % 97);
                        format!("{letter}{number}/{round}/{at}/{fill}").into_bytes()
                    };
                    let mut bodies: Vec<_> = (0..20).map(body).collect();
                    let bytes: Vec<_> = bodies.iter().flat_map(|body| frame(body)).collect();
                    // In two writes, so that a message or its header is cut in two.
                    let (one, two) = bytes.split_at(bytes.len() * (round + 1) / 11);
                    client.write_all(one).unwrap();
                    client.write_all(two).unwrap();
                    let mut answers: Vec<_> = (0..20).map(|_| read_frame(&mut client)).collect();
                    answers.sort();
                    bodies.sort();
                    assert_eq!(answers, bodies);
                }
            });
        }
    });
    assert_eq!(running.counter("messages"), 12 * 10 * 20);
    running.counts("closed_by_peer", 12);
    until(|| running.server.connections() == 0, || format!("{} connections", running.server.connections()));
}

/// More messages than the kernel's sockets hold, deferred ones among them, and the end right behind them.
fn half_close(mux: &str) {
    let running = start(mux, &Scripted::new(Order::Free, 1), 2, Limits::default());
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
    let running = start(mux, &Scripted::new(Order::Requests, 2), 2, Limits::default());
    let mut client = running.connect();
    client.write_all(&[frame(b"b"), frame(b"e after")].concat()).unwrap();
    until(|| running.service.calls.load(Ordering::SeqCst) > 0, || "no call".into());
    client.shutdown(Shutdown::Write).unwrap();
    running.service.together.wait();
    assert_eq!(read_frame(&mut client), b"together");
    assert_eq!(read_frame(&mut client), b"e after");
    reads_end(&mut client);
    running.counts("closed_by_peer", 1);
}

fn slow_reader(mux: &str) {
    const COUNT: usize = 12;
    let running = start(mux, &Scripted::new(Order::Free, 1), 3, Limits::default());
    let mut client = running.connect();
    let bodies: Vec<_> = (0..COUNT).map(|at| [vec![b'e'], vec![at as u8; 700_000 + at]].concat()).collect();
    let bytes: Vec<_> = bodies.iter().flat_map(|body| frame(body)).collect();
    let mut writer = client.try_clone().unwrap();
    let write = thread::spawn(move || writer.write_all(&bytes).unwrap());
    // It reads nothing until the server has stopped to read.
    until(|| running.counter("reads_paused") > 0, || "the server reads on".into());
    let mut answers: Vec<_> = (0..COUNT).map(|_| read_frame(&mut client)).collect();
    answers.sort();
    assert!(answers == bodies, "a reply is torn");
    write.join().unwrap();
    assert_eq!(running.service.calls.load(Ordering::SeqCst), COUNT);
}

fn order(mux: &str) {
    let running = start(mux, &Scripted::new(Order::Requests, 1), 4, Limits::default());
    let mut client = running.connect();
    let mut expected = Vec::new();
    let mut bytes = Vec::new();
    for at in 0..300 {
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
    client.write_all(&frame(b"2")).unwrap();
    assert_eq!(read_frame(&mut client), b"second right");
    assert_eq!(read_frame(&mut client), b"first right");
}

fn several_workers(mux: &str) {
    let running = start(mux, &Scripted::new(Order::Free, 3), 3, Limits::default());
    let mut client = running.connect();
    // Each waits until three of them are worked on at once. AF_KCM binds a message to a worker when it comes, so each
    // comes when the one before has its worker.
    for count in 1..=3 {
        client.write_all(&frame(b"b")).unwrap();
        until(|| running.service.calls.load(Ordering::SeqCst) == count, || format!("message {count} has no worker"));
    }
    for _ in 0..3 {
        assert_eq!(read_frame(&mut client), b"together");
    }
}

fn ends(mux: &str) {
    let limits = Limits { message_bytes_max: 100, assembly_timeout_ms: 50, ..Limits::default() };
    let running = start(mux, &Scripted::new(Order::Free, 1), 2, limits);
    let cases: [(&[u8], &str); 7] = [
        (&frame(b"c"), "closed_by_service"),
        (&frame(b"f"), "closed_abandoned"),
        (&frame(b"p"), "closed_abandoned"),
        // Longer than the limit, which the kernel does not know; longer than the kernel takes.
        (&frame(&[b'e'; 101]), "closed_oversized_message"),
        (&[0x10, 0, 0, 0], "closed_oversized_message"),
        // The kernel times the longer one, and forgets the shorter one.
        (&[0, 0, 0, 90, 1], "closed_assembly_timeout"),
        (&[0, 0, 0, 9, 1], "closed_assembly_timeout"),
    ];
    for (at, (bytes, counter)) in cases.into_iter().enumerate() {
        let before = running.counter(counter);
        let mut client = running.connect();
        // A whole message before it is answered, whatever comes after.
        client.write_all(&[&frame(b"e first")[..], bytes].concat()).unwrap();
        assert_eq!(read_frame(&mut client), b"e first", "{counter}");
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
    // Reset.
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    running.counts("closed_io", 1);
    until(|| running.server.connections() == 0, || format!("{} connections", running.server.connections()));
    let service = Arc::clone(&running.service);
    drop(running);
    assert_eq!(service.open.load(Ordering::SeqCst), 0, "a state was not given back");
}

fn time_limits(mux: &str) {
    let limits = Limits { idle_timeout_ms: 50, ..Limits::default() };
    let running = start(mux, &Scripted::new(Order::Free, 1), 2, limits);
    let mut client = running.connect();
    reads_end(&mut client);
    running.counts("closed_idle_timeout", 1);

    let limits = Limits { send_timeout_ms: 50, ..Limits::default() };
    let running = start(mux, &Scripted::new(Order::Free, 1), 2, limits);
    let mut client = running.connect();
    let bytes = frame(&[b'e'; 900_000]).repeat(20);
    // It never reads; what it sends is refused when the server has had enough.
    let _ = client.write_all(&bytes);
    running.counts("closed_send_timeout", 1);
}

fn draining(mux: &str) {
    let running = start(mux, &Scripted::new(Order::Requests, 2), 2, Limits::default());
    let mut client = running.connect();
    // The first message waits for the test, the others wait for it.
    client.write_all(&[frame(b"b"), frame(b"e one"), frame(b"e two")].concat()).unwrap();
    until(|| running.service.calls.load(Ordering::SeqCst) > 0, || "no call".into());
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
