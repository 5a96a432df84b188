//! Servers of many styles under the library: clients are counted, and none is lost.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use crate::common::*;
use ksf_accel::Level;
use rustix::process::Signal;

/// Styles whose workers get queues, and how many workers are ready when nothing is to be done.
const SPLIT: [(&str, Option<usize>); 10] = [
    ("prefork-epoll", Some(3)),
    ("prefork-exclusive", Some(3)),
    ("prefork-edge", Some(3)),
    ("prefork-oneshot", Some(3)),
    // By turns, as with nginx's accept_mutex.
    ("prefork-turns", None),
    ("prefork-blocking", Some(3)),
    ("prefork-reuseport", Some(3)),
    ("threads-epoll", Some(3)),
    ("threads-blocking", Some(3)),
    ("threads-reuseport", Some(3)),
];

/// Connections by who answered.
fn by_worker(answers: &[String]) -> HashMap<&str, usize> {
    answers.iter().fold(HashMap::new(), |mut counts, answer| {
        *counts.entry(answer.as_str()).or_default() += 1;
        counts
    })
}

#[test]
fn every_style_answers_every_connection() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    for (style, workers) in SPLIT {
        let holder = holder();
        let server = Server::start(&holder, style, 3);
        if let Some(workers) = workers {
            wait_ready(&holder, workers);
        }
        let answers = [
            on_cpu(a, || ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 60)),
            on_cpu(b, || ask_each(Ipv6Addr::LOCALHOST, server.port, "who\n", 60)),
        ];
        let status = holder.status().unwrap();
        let counters = counted(&status);
        let all = counters.accepted_own + counters.accepted_fallback + counters.accepted_stolen;
        assert_eq!(all, 120, "{style}: {status:#?}");
        assert!(counters.accepted_own > 0, "{style}: {status:#?}");
        if workers.is_some() {
            assert!(by_worker(&answers.concat()).len() > 1, "{style}: one worker did it all");
        }
    }
}

#[test]
fn every_style_answers_under_load() {
    let Some(()) = own_network() else { return };
    for (style, _) in SPLIT {
        let holder = holder();
        let server = Server::start(&holder, style, 3);
        let load = Load::start(server.port, "who\n", 8);
        wait_until("some are accepted", || accepted(&holder) >= 500);
        let (answered, lost) = load.end();
        assert!(lost.is_empty(), "{style}: {answered} answered, lost: {lost:?}");
        assert!(answered >= 500, "{style}");
    }
}

fn accepted(holder: &ksf_accel::Started) -> u64 {
    let counters = counted(&holder.status().unwrap());
    counters.accepted_own + counters.accepted_fallback + counters.accepted_stolen
}

#[test]
fn every_level_of_the_ladder_answers_under_load() {
    let Some(()) = own_network() else { return };
    for level in [Level::ClassicBpf, Level::Plain] {
        for style in ["prefork-epoll", "threads-epoll", "prefork-blocking"] {
            let holder = at_level(level);
            let server = Server::start(&holder, style, 2);
            if level != Level::Plain {
                wait_ready(&holder, 2);
            }
            let load = Load::start(server.port, "who\n", 8);
            let answers = ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 200);
            let (answered, lost) = load.end();
            assert!(lost.is_empty(), "{level:?}, {style}: {answered} answered, lost: {lost:?}");
            assert_eq!(answers.len(), 200);
            if level != Level::Plain {
                assert!(counted(&holder.status().unwrap()).accepted_own > 0, "{level:?}, {style}");
            }
        }
    }
}

#[test]
fn programs_that_poll_or_select_are_served_as_without_the_library() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    for style in ["prefork-poll", "prefork-select"] {
        let server = Server::start(&holder, style, 2);
        let answers = ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 100);
        assert_eq!(answers.len(), 100, "{style}");
        let status = holder.status().unwrap();
        assert!(status.workers.is_empty(), "{style}: {status:?}");
        assert_eq!(status.listeners.len(), 1);
        // Nothing is steered to a queue that nobody would look at.
        assert!(status.listeners[0].queues.iter().all(|queue| !queue.ready && queue.waiting == 0));
        drop(server);
        wait_until("it is gone", || holder.status().unwrap().listeners.is_empty());
    }
}

#[test]
fn a_worker_that_stalls_keeps_nobody_waiting() {
    let Some(()) = own_network() else { return };
    for style in ["prefork-epoll", "threads-epoll", "prefork-blocking", "prefork-reuseport"] {
        let holder = holder();
        let server = Server::start(&holder, style, 2);
        wait_ready(&holder, 2);
        // One of the two is away for as long as the test lasts.
        let stalled = Client::connect_to((Ipv4Addr::LOCALHOST, server.port).into(), 's');
        std::io::Write::write_all(&mut &stalled.0, format!("tall {}\n", PATIENCE.as_millis()).as_bytes()).unwrap();
        wait_until("it is accepted", || accepted(&holder) == 1);
        let answers = ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 100);
        assert_eq!(by_worker(&answers).len(), 1, "{style}: the other one answers");
    }
}

#[test]
fn workers_that_are_killed_under_load_lose_only_what_they_had_in_hand() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let server = Server::start(&holder, "prefork-epoll", 2);
    wait_ready(&holder, 2);
    let load = Load::start(server.port, "who\n", 8);
    let kills = 20;
    for _ in 0..kills {
        let before = accepted(&holder);
        let victim = ready(&holder)[0].pid;
        signal(victim, Signal::KILL);
        // The master makes another.
        wait_until("another has taken its place", || {
            let workers = ready(&holder);
            workers.len() == 2 && workers.iter().all(|worker| worker.pid != victim)
        });
        wait_until("there is load", || accepted(&holder) > before + 50);
    }
    let (answered, lost) = load.end();
    // A connection that was accepted by a process dies with it: one at a time here. Those in its queue live.
    assert!(lost.len() <= kills, "{answered} answered, {} lost in {kills} kills: {lost:?}", lost.len());
    assert!(answered > 1000);
}
