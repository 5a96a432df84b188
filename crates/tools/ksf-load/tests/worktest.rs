//! worktest against servers that answer well, in another order, badly, or not at all.

use std::collections::HashMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use crate::common::*;

fn good_server() -> SocketAddr {
    work_server(|_, request| work_reply(request))
}

/// Answers eight requests of a connection at a time, the youngest first; all that is left when there are fewer.
fn reversing_server() -> SocketAddr {
    let mut held: Vec<Vec<u8>> = Vec::new();
    work_server(move |_, request| {
        held.push(work_reply(request));
        match held.len() {
            8 => held.drain(..).rev().flatten().collect(),
            _ => Vec::new(),
        }
    })
}

#[test]
fn every_kind_of_load_is_answered_and_counted() {
    let server = good_server();
    for options in [
        "-c 500",
        "-c 4000 -n 4 -a 64",
        "-c 300 -n 8 -k discard",
        "-c 300 -n 2 -k discard -a 5",
        "-c 1000 --weights 8:1:1 -a 4 --spread",
        "-c 1000 --weights 8:1:1 -a 4",
        "-c 200 -n 3 --rate 20K --slow 30:1ms",
        "-c 200 --rate 20K --arrival constant -k sleep",
        "-c 50 -l 1M -a 4",
        "-c 50 -l 28 -a 4",
    ] {
        let ran = run_worktest(&format!("{server} {options}"));
        let count = options.split_whitespace().nth(1).unwrap().parse().unwrap();
        ran.assert_clean(count);
        let run = &ran.report().run;
        let by_connection: u64 = run.connections.iter().map(|connection| connection.messages).sum();
        let by_class: u64 = run.classes.iter().map(|class| class.messages).sum();
        assert_eq!((by_connection, by_class), (count, count), "{options}");
        assert_eq!(run.reordered, 0, "{options}");
    }
}

#[test]
fn a_weight_is_what_a_connection_has_in_flight() {
    // Every connection gets its first requests without any reply.
    let seen: Arc<Mutex<HashMap<u32, u64>>> = Arc::default();
    let counts = seen.clone();
    let server = work_server(move |_, request| {
        let connection = u32::from_be_bytes(request[12..16].try_into().unwrap());
        *counts.lock().unwrap().entry(connection).or_default() += 1;
        Vec::new()
    });
    let ran = run_worktest(&format!("{server} --weights 3:1 -a 5 -c 100 --timeout 300ms"));
    assert_eq!((ran.code, ran.faults()), (1, vec![("lost", 20)]), "{}", ran.stderr);
    assert_eq!(*seen.lock().unwrap(), HashMap::from([(0, 15), (1, 5)]));
}

#[test]
fn a_window_holds_for_all_connections_together() {
    let server = work_server(|_, _| Vec::new());
    let ran = run_worktest(&format!("{server} -n 3 -a 5 --spread -c 100 --timeout 300ms"));
    assert_eq!(ran.faults(), [("lost", 5)], "{}", ran.stderr);
}

#[test]
fn replies_may_come_in_any_order() {
    let ran = run_worktest(&format!("{} -c 800 -a 8", reversing_server()));
    ran.assert_clean(800);
    assert_eq!(ran.report().run.reordered, 700);
}

#[test]
fn every_kind_of_wrong_reply_is_told() {
    let spoiled = |number: u64, spoil: fn(Vec<u8>) -> Vec<u8>| {
        work_server(move |n, request| if n == number { spoil(work_reply(request)) } else { work_reply(request) })
    };
    let cases: [(SocketAddr, &[(&str, u64)]); 5] = [
        (spoiled(3, |reply| [reply.clone(), reply].concat()), &[("duplicate", 1)]),
        (spoiled(3, |_| Vec::new()), &[("lost", 1)]),
        (
            spoiled(3, |mut reply| {
                *reply.last_mut().unwrap() ^= 1;
                reply
            }),
            &[("corrupt", 1)],
        ),
        (
            spoiled(3, |mut reply| {
                reply[11] ^= 1;
                reply
            }),
            // The right reply has gone to another connection, so here it is missing.
            &[("lost", 1), ("misdirected", 1)],
        ),
        (spoiled(99, |_| vec![0, 0, 0, 1]), &[("closed", 1), ("malformed", 1)]),
    ];
    for (server, faults) in cases {
        let ran = run_worktest(&format!("{server} -c 100 {} --json", short_timeout(faults)));
        assert_eq!((ran.code, ran.faults()), (1, faults.to_vec()), "{}", ran.stderr);
        assert!(ran.stderr.contains("connection 0: "), "{}", ran.stderr);
        assert!(ran.stderr.contains("not every reply was right"), "{}", ran.stderr);
        ran.assert_reads_back();
    }
}

#[test]
fn a_reply_on_the_wrong_connection_is_no_reply() {
    // The replies of each of two connections are sent on the other one.
    let streams = Arc::new(Mutex::new(Vec::new()));
    let (ready, wait) = channel();
    let wait = Arc::new(Mutex::new(wait));
    let server = tcp_server(move |mut stream| {
        let mine = {
            let mut streams = streams.lock().unwrap();
            streams.push(stream.try_clone()?);
            streams.len() - 1
        };
        if mine == 1 {
            ready.send(()).unwrap();
        } else {
            wait.lock().unwrap().recv().unwrap();
        }
        while let Some(request) = read_work(&mut stream)? {
            let mut other = streams.lock().unwrap()[1 - mine].try_clone()?;
            other.write_all(&work_reply(&request))?;
        }
        Ok(())
    });
    let ran = run_worktest(&format!("{server} -n 2 -c 2 --timeout 500ms"));
    assert_eq!((ran.code, ran.faults()), (1, vec![("lost", 2), ("misdirected", 2)]), "{}", ran.stderr);
}

#[test]
fn a_server_that_goes_takes_what_is_in_flight_with_it() {
    let server = tcp_server(|mut stream| {
        for _ in 0..10 {
            let Some(request) = read_work(&mut stream)? else { return Ok(()) };
            stream.write_all(&work_reply(&request))?;
        }
        // Read, so that closing sends no reset that could overtake the replies.
        read_work(&mut stream)?;
        Ok(())
    });
    let ran = run_worktest(&format!("{server} -c 1000"));
    assert_eq!((ran.code, ran.faults()), (1, vec![("closed", 1)]), "{}", ran.stderr);
    assert_eq!(ran.report().run.messages, 10);
}

#[test]
fn an_open_loop_that_finds_no_room_says_so() {
    // A message per microsecond, and no round trip is that short.
    let ran = run_worktest(&format!("{} --rate 1M --arrival constant -a 1 -c 2000", good_server()));
    ran.assert_clean(2000);
    let open = ran.report().run.open.as_ref().unwrap();
    assert!(open.bound_hits > 0);
    // The last one was due after two milliseconds and waited for the round trips of all others: its latency, which
    // counts from when it was due, is the rest of the run.
    let run = &ran.report().run;
    assert!(run.latency.max_us >= run.wall_s * 1e6 - 2000.0, "{} of {} s", run.latency.max_us, run.wall_s);
    assert!(ran.warns("in-flight-bound"));
}

#[test]
fn an_ideal_queue_needs_no_server() {
    let ran = run_worktest("--ideal 4 --rate 400 --slow 20:20ms --duration 100s --seed 3 --json");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let report = ran.report();
    assert!((39_000..41_000).contains(&report.run.messages), "{}", report.run.messages);
    assert_eq!((ran.document().target.clone(), report.config.ideal), (None, Some(4)));
    assert!(report.run.classes[1].latency.min_us >= 20_000.0);
    let again = run_worktest("--ideal 4 --rate 400 --slow 20:20ms --duration 100s --seed 3 --json");
    assert_eq!(report.run, again.report().run);
}

#[test]
fn the_table_tells_classes_apart_only_where_there_are_some() {
    let server = good_server();
    let plain = run_worktest(&format!("{server} -c 10"));
    let lines: Vec<&str> = plain.stdout.lines().collect();
    assert!(lines[0].starts_with("class") && lines[1].starts_with("all ") && lines.len() == 2, "{}", plain.stdout);
    let mixed = run_worktest(&format!("{server} -c 100 --slow 50:1ms -H"));
    let names: Vec<&str> = mixed.stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["all", "quick", "slow"]);
}

#[test]
fn nobody_listening_has_its_status() {
    own_network();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(run_worktest(&format!("{closed} -c 1")).code, 69);
}

#[test]
fn real_documents_read_back() {
    let server = good_server();
    for options in [
        format!("{server} -c 100 -n 2"),
        format!("{server} -c 100 --rate 5000 --slow 10:100us -k sleep"),
        format!("{server} --duration 20ms --weights 2:1 --spread -a 4"),
        "--ideal 2 --rate 100 -c 50".to_owned(),
    ] {
        run_worktest(&format!("{options} --json")).assert_reads_back();
    }
}
