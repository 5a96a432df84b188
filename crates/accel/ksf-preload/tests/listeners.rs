//! The program's listeners: closed, shut down, opened again, with connections in their queues.

use crate::common::*;
use ksf_accel::Level;

#[test]
fn closing_the_listener_frees_its_port_and_resets_what_waits() {
    let Some(()) = own_network() else { return };
    for level in [Level::SkLookup, Level::ClassicBpf] {
        let holder = at_level(level);
        let mut actors = Actors::start(&holder);
        let (listener, port, _epoll) = worker(&mut actors, &holder);
        let waiting: Vec<Client> = (0..5).map(|_| Client::connect(port, 'w')).collect();
        actors.zero(0, &format!("close {listener}"));
        // At once, as it is without the library: no waiting for the holder.
        assert!(refused(port), "{level:?}");
        assert!(waiting.into_iter().all(|client| !client.was_served()), "{level:?}");
        let (again, _) = actors.listener();
        assert_eq!(again, listener);
    }
}

#[test]
fn a_port_can_be_listened_on_again_at_once() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let mut server = Server::start(&holder, "prefork-epoll", 2);
    wait_ready(&holder, 2);
    let port = server.port;
    for _ in 0..5 {
        let pids = ask_each(std::net::Ipv4Addr::LOCALHOST, port, "who\n", 10);
        assert_eq!(pids.len(), 10);
        drop(server);
        // The next one binds with SO_REUSEADDR only, while the holder is still there.
        server = Server::start_as(accelerated(compiled("server"), &holder), "prefork-epoll", 2, port);
        wait_ready(&holder, 2);
    }
    assert_eq!(ask_each(std::net::Ipv4Addr::LOCALHOST, port, "who\n", 10).len(), 10);
    assert_eq!(holder.status().unwrap().listeners.len(), 1);
}

#[test]
fn a_child_that_closes_the_listener_leaves_it_to_its_parent() {
    let Some((holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    actors.zero(0, "fork 1");
    actors.zero(1, &format!("close {listener}"));
    actors.zero(1, &format!("close {epoll}"));
    assert_eq!(ready(&holder).len(), 1);
    actors.serves_at_once(0, port, epoll, listener);
    assert_eq!(counted(&holder.status().unwrap()).accepted_own, 1);
    // And the other way round: the parent leaves, the child's own worker stays.
    let second = actors.number(0, &format!("dup {listener}"));
    actors.zero(0, &format!("close {listener}"));
    actors.zero(0, "fork 2");
    let other = actors.watching(2, second);
    wait_ready(&holder, 2);
    actors.zero(0, &format!("close {second}"));
    wait_ready(&holder, 1);
    actors.serves_soon(2, port, other, second);
    actors.zero(2, &format!("close {second}"));
    wait_until("nobody listens", || refused(port));
}

#[test]
fn shutdown_ends_the_listening_and_listen_begins_it_anew() {
    let Some((holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    actors.zero(0, &format!("shutdown {listener} {}", libc::SHUT_RDWR));
    wait_ready(&holder, 0);
    assert!(refused(port));
    // The kernel tells the end of a listener that is shut down (EPOLLHUP), and accept() fails.
    assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 10:7");
    assert_eq!(actors.call(0, &format!("accept {listener}")), "failed EINVAL");
    actors.zero(0, &format!("listen {listener} 16"));
    // Its port was not bound by the program: it gets another.
    let port = actors.number(0, &format!("port {listener}")) as u16;
    actors.serves_at_once(0, port, epoll, listener);
}

#[test]
fn listen_again_changes_the_backlog_of_all_queues() {
    let Some((holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    let backlogs = || {
        let listeners = holder.status().unwrap().listeners;
        listeners.iter().flat_map(|listener| &listener.queues).map(|queue| queue.waiting_max).collect::<Vec<_>>()
    };
    assert!(!backlogs().is_empty() && backlogs().iter().all(|max| *max == 128), "{:?}", backlogs());
    actors.zero(0, &format!("listen {listener} 7"));
    assert!(backlogs().iter().all(|max| *max == 7), "{:?}", backlogs());
    assert_eq!(ready(&holder).len(), 1);
    actors.serves_soon(0, port, epoll, listener);
}

#[test]
fn a_program_may_listen_on_many_ports() {
    let Some((holder, mut actors)) = begin() else { return };
    let epoll = actors.number(0, "epoll");
    let listeners: Vec<(i64, u16)> = (0..70).map(|_| actors.listener()).collect();
    for (data, (listener, _)) in listeners.iter().enumerate() {
        actors.zero(0, &format!("add {epoll} {listener} 1 {data}"));
    }
    let status = holder.status().unwrap();
    // More than the holder keeps: those that are too many are served as without it.
    assert_eq!(status.listeners.len(), 64);
    assert_eq!(status.workers.len(), 1, "one instance is one worker");
    for (data, (listener, port)) in listeners.iter().enumerate() {
        let client = Client::connect(*port, 'm');
        assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), format!("events 1:{data:x}"));
        assert!(actors.call(0, &format!("accept {listener}")).starts_with("took m"));
        assert!(client.was_served());
    }
    assert_eq!(counted(&holder.status().unwrap()).accepted_own, 64);
}

#[test]
fn programs_that_share_a_port_by_themselves_keep_their_sockets_as_queues() {
    let Some(()) = own_network() else { return };
    for level in [Level::SkLookup, Level::ClassicBpf] {
        for style in ["prefork-reuseport", "threads-reuseport"] {
            let holder = patient_at(level);
            let server = Server::start(&holder, style, 2);
            if level == Level::SkLookup {
                wait_ready(&holder, 2);
            }
            let answers = ask_each(std::net::Ipv6Addr::LOCALHOST, server.port, "who\n", 100);
            assert_eq!(answers.len(), 100);
            let status = holder.status().unwrap();
            assert_eq!(status.listeners.len(), 1, "{style}");
            assert!(status.listeners[0].own_reuseport);
            if level == Level::SkLookup {
                assert_eq!(counted(&status).accepted_own, 100, "{style}: {status:?}");
            } else {
                let why = status.listeners[0].not_accelerated.as_deref().unwrap_or_default();
                assert!(why.contains("SO_REUSEPORT"), "{why}");
            }
            drop(server);
            wait_until("it is gone", || holder.status().unwrap().listeners.is_empty());
        }
    }
}

#[test]
fn the_queue_of_a_killed_worker_with_its_own_socket_is_rescued() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let mut actors = Actors::start(&holder);
    for child in [1, 2] {
        actors.zero(0, &format!("fork {child}"));
    }
    let first = actors.number(1, "socket 2 1");
    let port = actors.number(1, &format!("port {first}")) as u16;
    actors.zero(1, &format!("listen {first} 128"));
    actors.zero(1, &format!("nonblock {first} 1"));
    let _epoll = actors.watching(1, first);
    wait_ready(&holder, 1);
    let clients: Vec<Client> = (0..10).map(|_| Client::connect(port, 'r')).collect();
    let second = actors.number(2, &format!("socket 2 1 {port}"));
    actors.zero(2, &format!("listen {second} 128"));
    actors.zero(2, &format!("nonblock {second} 1"));
    let epoll = actors.watching(2, second);
    let pid = actors.number(1, "pid") as u32;
    signal(pid, rustix::process::Signal::KILL);
    let mut taken = 0;
    wait_until("all are taken", || {
        taken += actors.take_all(2, epoll, second).len();
        taken == clients.len()
    });
    assert!(clients.into_iter().all(Client::was_served));
    // The survivor does not keep the dead worker's socket, which gets connections as long as a process has it.
    wait_until("the worker's socket is closed", || listening(port) == 1);
    actors.serves_soon(2, port, epoll, second);
}

/// Sockets that listen on this port of the thread's network.
fn listening(port: u16) -> usize {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    // Local address, peer and state: 0A is TCP_LISTEN.
    let is_one = |line: &&str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words[1].ends_with(&format!(":{port:04X}")) && words[3] == "0A"
    };
    sockets.lines().skip(1).filter(is_one).count()
}
