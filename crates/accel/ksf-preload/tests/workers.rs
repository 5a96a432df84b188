//! Workers: epoll instances that watch a listener, in processes and threads, each with a queue of its own.

use crate::common::*;
use ksf_accel::{Level, Started};
use rustix::process::Signal;

const ONCE: i32 = libc::EPOLLIN | libc::EPOLLONESHOT;

/// As many clients as there are letters from `a` on.
fn clients(port: u16, count: usize) -> Vec<Client> {
    (0..count).map(|number| Client::connect(port, (b'a' + number as u8) as char)).collect()
}

fn sorted(names: impl IntoIterator<Item = String>) -> String {
    let mut names: Vec<char> = names.into_iter().flat_map(|names| names.chars().collect::<Vec<_>>()).collect();
    names.sort_unstable();
    names.into_iter().collect()
}

#[test]
fn each_forked_process_has_a_queue_and_none_is_lost() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = patient();
    let mut actors = Actors::start(&holder);
    let (listener, port) = actors.listener();
    for child in [1, 2] {
        actors.zero(0, &format!("fork {child}"));
    }
    let epolls = [1, 2].map(|child| actors.watching(child, listener));
    // Who has waited is at home on a CPU: one each.
    for (child, epoll) in [1, 2].into_iter().zip(epolls) {
        assert_eq!(actors.call(child, &format!("wait {epoll} 0 0")), "events");
        assert_eq!(actors.call(child, "cpus"), "1");
    }
    wait_ready(&holder, 2);
    let mut homes: Vec<usize> = ready(&holder).iter().map(|worker| worker.cpu.unwrap() as usize).collect();
    homes.sort_unstable();
    assert_eq!(homes, [a, b]);
    let connected: Vec<Client> = [a, b].into_iter().flat_map(|cpu| on_cpu(cpu, move || clients(port, 10))).collect();
    let taken = [1, 2].map(|child| actors.take_all(child, epolls[child as usize - 1], listener));
    // Both got those of their CPU, all of them.
    assert_eq!(taken.clone().map(|names| names.len()), [10, 10], "{taken:?}");
    assert!(connected.into_iter().all(Client::was_served));
    let counters = counted(&holder.status().unwrap());
    assert_eq!((counters.accepted_own, counters.steered_local, counters.steered_remote), (20, 20, 0));
}

#[test]
fn each_thread_with_an_epoll_instance_has_a_queue() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = patient();
    let mut actors = Actors::start(&holder);
    let (listener, port) = actors.listener();
    for thread in [1, 2] {
        actors.zero(0, &format!("thread {thread}"));
    }
    let epolls = [1, 2].map(|thread| actors.watching(thread, listener));
    for (thread, epoll) in [1, 2].into_iter().zip(epolls) {
        assert_eq!(actors.call(thread, &format!("wait {epoll} 0 0")), "events");
    }
    wait_ready(&holder, 2);
    let connected: Vec<Client> = [a, b].into_iter().flat_map(|cpu| on_cpu(cpu, move || clients(port, 10))).collect();
    let taken = [1, 2].map(|thread| actors.take_all(thread, epolls[thread as usize - 1], listener));
    assert_eq!(taken.clone().map(|names| names.len()), [10, 10], "{taken:?}");
    assert!(connected.into_iter().all(Client::was_served));
    // A thread that waits nowhere may take them too, as it could without the library.
    let more = clients(port, 2);
    assert_eq!(sorted([take_unseen(&mut actors, listener)]), "ab");
    assert!(more.into_iter().all(Client::was_served));
}

/// Accepts until there is nothing, by a thread that has not waited.
fn take_unseen(actors: &mut Actors, listener: i64) -> String {
    let mut names = String::new();
    loop {
        let result = actors.call(0, &format!("accept {listener}"));
        match result.strip_prefix("took ") {
            Some(rest) => names.push(rest.chars().next().unwrap()),
            None => {
                assert_eq!(result, "failed EAGAIN");
                return names;
            }
        }
    }
}

#[test]
fn a_worker_that_watches_no_more_gets_nothing() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.listener();
    actors.zero(0, "fork 1");
    let (epoll, other) = (actors.watching(0, listener), actors.watching(1, listener));
    wait_ready(&holder, 2);
    // What was queued before it went away is for the one that stays.
    let before = clients(port, 8);
    actors.zero(0, &format!("del {epoll} {listener}"));
    wait_ready(&holder, 1);
    let after = clients(port, 8);
    actors.takes(1, other, listener, 16);
    assert!(before.into_iter().chain(after).all(Client::was_served));
    // It comes back without a word to the holder, and with its queue.
    let asked = holder.status().unwrap().workers.len();
    actors.zero(0, &format!("add {epoll} {listener} 1 9"));
    wait_ready(&holder, 2);
    assert_eq!(holder.status().unwrap().workers.len(), asked);
    actors.zero(1, &format!("del {other} {listener}"));
    let last = clients(port, 3);
    assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:9");
    assert_eq!(sorted([actors.take_all(0, epoll, listener)]), "abc");
    assert!(last.into_iter().all(Client::was_served));
}

#[test]
fn epoll_ctl_answers_as_it_does_without_the_library() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.listener();
    let epoll = actors.number(0, "epoll");
    assert_eq!(actors.call(0, &format!("del {epoll} {listener}")), "failed ENOENT");
    assert_eq!(actors.call(0, &format!("mod {epoll} {listener} 1 7")), "failed ENOENT");
    actors.zero(0, &format!("add {epoll} {listener} 1 7"));
    assert_eq!(actors.call(0, &format!("add {epoll} {listener} 1 7")), "failed EEXIST");
    assert_eq!(actors.call(0, &format!("add {listener} {epoll} 1 7")), "failed EINVAL");
    assert_eq!(actors.call(0, &format!("add 444 {listener} 1 7")), "failed EBADF");
    // EPOLLEXCLUSIVE goes with ADD only.
    let exclusive = libc::EPOLLIN | libc::EPOLLEXCLUSIVE;
    assert_eq!(actors.call(0, &format!("mod {epoll} {listener} {exclusive} 7")), "failed EINVAL");
    // New data, other events, and silence.
    let client = clients(port, 1);
    actors.zero(0, &format!("mod {epoll} {listener} 1 8"));
    assert_eq!(actors.call(0, &format!("wait {epoll} -1 1")), "events 1:8");
    actors.zero(0, &format!("mod {epoll} {listener} 0 8"));
    wait_ready(&holder, 0);
    assert_eq!(actors.call(0, &format!("wait {epoll} 0 2")), "events");
    actors.zero(0, &format!("mod {epoll} {listener} 1 10"));
    wait_ready(&holder, 1);
    assert_eq!(actors.call(0, &format!("wait {epoll} -1 2")), "events 1:a");
    assert!(actors.call(0, &format!("accept {listener}")).starts_with("took a"));
    assert!(client.into_iter().all(Client::was_served));
    actors.zero(0, &format!("del {epoll} {listener}"));
    assert_eq!(actors.call(0, &format!("del {epoll} {listener}")), "failed ENOENT");
}

#[test]
fn exclusive_and_edge_triggered_wakeups_work() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for events in
        [libc::EPOLLIN | libc::EPOLLEXCLUSIVE, libc::EPOLLIN | libc::EPOLLET, libc::EPOLLIN | libc::EPOLLRDHUP]
    {
        let mut actors = Actors::start(&holder);
        let (listener, port) = actors.listener();
        let epoll = actors.number(0, "epoll");
        actors.zero(0, &format!("add {epoll} {listener} {events} 7"));
        wait_ready(&holder, 1);
        for round in 0..3 {
            let connected = clients(port, 2);
            assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:7", "round {round}");
            if events & libc::EPOLLET != 0 {
                assert_eq!(actors.call(0, &format!("wait {epoll} 0 0")), "events", "told once");
            }
            assert_eq!(actors.take_all(0, epoll, listener), "ab");
            assert!(connected.into_iter().all(Client::was_served));
        }
        let counters = counted(&holder.status().unwrap());
        assert!(counters.accepted_own > 0 && counters.accepted_fallback == 0, "{counters:?}");
        drop(actors);
        wait_ready(&holder, 0);
    }
}

#[test]
fn queue_and_listener_at_once_are_one_event() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.listener();
    let epoll = actors.watching(0, listener);
    actors.zero(0, &format!("del {epoll} {listener}"));
    wait_ready(&holder, 0);
    // Nobody is ready: the listener takes it. Then a queue does.
    let first = Client::connect(port, 'l');
    actors.zero(0, &format!("add {epoll} {listener} 1 7"));
    let second = Client::connect(port, 'q');
    assert_eq!(waiting(&holder), 1);
    assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:7");
    let mut taken: Vec<char> = actors.take_all(0, epoll, listener).chars().collect();
    taken.sort_unstable();
    assert_eq!(taken, ['l', 'q']);
    assert!(first.was_served() && second.was_served());
    let counters = counted(&holder.status().unwrap());
    assert_eq!((counters.accepted_own, counters.accepted_fallback), (1, 1));
}

#[test]
fn one_event_silences_queue_and_listener_where_the_program_asks_for_one() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.listener();
    let epoll = actors.number(0, "epoll");
    actors.zero(0, &format!("add {epoll} {listener} {ONCE} 7"));
    assert_eq!(actors.call(0, &format!("add {epoll} {listener} {ONCE} 7")), "failed EEXIST");
    wait_ready(&holder, 1);
    for _ in 0..3 {
        // One comes to the queue; while the holder is off, the next comes to the listener.
        let first = clients(port, 1);
        assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:7");
        holder.pause().unwrap();
        let second = clients(port, 1);
        assert_eq!(actors.call(0, &format!("wait {epoll} 0 0")), "events", "silent until it is asked again");
        holder.resume().unwrap();
        actors.zero(0, &format!("mod {epoll} {listener} {ONCE} 7"));
        assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:7");
        assert_eq!(take_unseen(&mut actors, listener), "aa");
        assert!(first.into_iter().chain(second).all(Client::was_served));
        actors.zero(0, &format!("mod {epoll} {listener} {ONCE} 7"));
    }
    actors.zero(0, &format!("del {epoll} {listener}"));
    wait_ready(&holder, 0);
    assert_eq!(counted(&holder.status().unwrap()).accepted_own, 3);
}

/// A program whose child is its only worker: holder, program, listener, port, the child's epoll instance.
fn child_worker(holder: fn() -> Started) -> Option<(Started, Actors, i64, u16, i64)> {
    own_network()?;
    let holder = holder();
    let mut actors = Actors::start(&holder);
    let (listener, port) = actors.listener();
    actors.zero(0, "fork 1");
    let epoll = actors.watching(1, listener);
    wait_ready(&holder, 1);
    Some((holder, actors, listener, port, epoll))
}

#[test]
fn a_hung_workers_connections_are_taken_by_another() {
    let Some((holder, mut actors, listener, port, _)) = child_worker(holder) else { return };
    // They wait for the only worker, which does nothing; those that come after it was found stalled, for the listener.
    let connected = clients(port, 10);
    assert!(waiting(&holder) > 0);
    let epoll = actors.watching(0, listener);
    let mut taken = String::new();
    wait_until("all are taken", || {
        // Told by the rescue descriptor, under the listener's name.
        assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:7");
        taken.push_str(&actors.take_all(0, epoll, listener));
        taken.len() == 10
    });
    assert!(connected.into_iter().all(Client::was_served));
    assert_stolen(&holder, 10);
    let status = holder.status().unwrap();
    assert!(status.stalls > 0 && status.rescues > 0, "{status:?}");
    // The noise ends with the need.
    wait_until("nothing is told any more", || actors.call(0, &format!("wait {epoll} 0 0")) == "events");
}

#[test]
fn a_hung_workers_connections_wake_a_thread_that_blocks_in_accept() {
    let Some((holder, mut actors, listener, port, _)) = child_worker(holder) else { return };
    let connected = clients(port, 5);
    assert!(waiting(&holder) > 0);
    actors.zero(0, &format!("nonblock {listener} 0"));
    for _ in &connected {
        assert!(actors.call(0, &format!("accept {listener}")).starts_with("took "));
    }
    assert!(connected.into_iter().all(Client::was_served));
    assert_stolen(&holder, 5);
}

/// All `count` connections were taken from the stalled worker's queue, or from the listener if they came later.
#[track_caller]
fn assert_stolen(holder: &Started, count: u64) {
    let status = holder.status().unwrap();
    let counters = counted(&status);
    assert!(counters.accepted_stolen > 0, "{status:?}");
    assert_eq!(counters.accepted_stolen + counters.accepted_fallback, count, "{status:?}");
}

#[test]
fn a_killed_workers_connections_are_taken_by_another() {
    let Some((holder, mut actors, listener, port, _)) = child_worker(patient) else { return };
    let pid = actors.number(1, "pid") as u32;
    let connected = clients(port, 20);
    assert_eq!(waiting(&holder), 20);
    signal(pid, Signal::KILL);
    actors.zero(0, "wait_child");
    wait_ready(&holder, 0);
    // Nobody is there: the listener takes what comes now, the queue keeps what it has.
    let late = clients(port, 3);
    let epoll = actors.watching(0, listener);
    actors.takes(0, epoll, listener, 23);
    assert!(connected.into_iter().chain(late).all(Client::was_served));
    // The new worker has inherited the queue.
    let counters = counted(&holder.status().unwrap());
    assert_eq!((counters.accepted_own, counters.accepted_fallback), (20, 3), "{counters:?}");
}

/// As when HAProxy loads its configuration again: the new process gets the listener in a message, and the connections that wait
/// in the queue of the old one are all that there are.
#[test]
fn a_worker_whose_listener_came_in_a_message_takes_what_its_predecessor_left() {
    let Some((holder, mut actors, listener, port, _)) = child_worker(patient) else { return };
    let pid = actors.number(1, "pid") as u32;
    let connected = clients(port, 5);
    assert_eq!(waiting(&holder), 5);
    let copy = actors.number(0, &format!("message {listener}"));
    signal(pid, Signal::KILL);
    actors.zero(0, "wait_child");
    let epoll = actors.watching(0, copy);
    wait_ready(&holder, 1);
    actors.takes(0, epoll, copy, 5);
    assert!(connected.into_iter().all(Client::was_served));
}

#[test]
fn a_parent_takes_what_a_child_left_that_called_listen() {
    let Some(()) = own_network() else { return };
    for level in [Level::SkLookup, Level::ClassicBpf] {
        for way in ["bind", "dup", "dupfd", "dup2", "message", "accept", "exec"] {
            let holder = patient_at(level);
            let mut actors = Actors::start(&holder);
            let socket = actors.number(0, "socket 2 0");
            actors.zero(0, &format!("nonblock {socket} 1"));
            let port = actors.number(0, &format!("port {socket}")) as u16;
            let number = match way {
                "dup" => actors.number(0, &format!("dup {socket}")),
                "dupfd" => actors.number(0, &format!("dupfd {socket} 40 {}", libc::F_DUPFD_CLOEXEC)),
                "dup2" => actors.number(0, &format!("dup2 {socket} 40")),
                "message" => actors.number(0, &format!("message {socket}")),
                "accept" => {
                    assert_eq!(actors.call(0, &format!("accept {socket}")), "failed EINVAL");
                    socket
                }
                "exec" => {
                    assert_eq!(actors.call(0, "reexec"), "started");
                    socket
                }
                _ => socket,
            };
            actors.zero(0, "fork 1");
            actors.zero(1, &format!("listen {socket} 128"));
            let childs = actors.watching(1, socket);
            wait_ready(&holder, 1);
            // Classic BPF steers from the holder's next look on.
            wait_until("the queue gets connections", || {
                let client = Client::connect(port, 'x');
                let is_queued = waiting(&holder) == 1;
                actors.takes(1, childs, socket, 1);
                client.was_served() && is_queued
            });
            let pid = actors.number(1, "pid") as u32;
            let connected = clients(port, 4);
            assert_eq!(waiting(&holder), 4);
            signal(pid, Signal::KILL);
            actors.zero(0, "wait_child");
            // All of them are in the queue of the child: nothing but this tells the parent of a listener.
            let epoll = actors.watching(0, number);
            actors.takes(0, epoll, number, 4);
            assert!(connected.into_iter().all(Client::was_served), "{level:?}: {way}");
        }
    }
}

#[test]
fn connections_that_nobody_is_left_to_take_are_reset() {
    let impatient = || {
        holder_with(|options| {
            (options.busy_limit_ns, options.look_ms, options.abandoned_ms) = (60_000_000_000, 1000, 100);
        })
    };
    let Some((holder, mut actors, listener, port, _)) = child_worker(impatient) else { return };
    let pid = actors.number(1, "pid") as u32;
    // The parent has the listener, but is no worker.
    let connected = clients(port, 5);
    signal(pid, Signal::KILL);
    actors.zero(0, "wait_child");
    assert!(connected.into_iter().all(Client::was_reset));
    let trouble = || holder.status().unwrap().listeners[0].trouble.clone();
    wait_until("it is told", || trouble().is_some_and(|it| it.contains("5 connections were reset")));
    // What comes later is for the listener, and for the next worker.
    let late = clients(port, 3);
    let epoll = actors.watching(0, listener);
    actors.takes(0, epoll, listener, 3);
    assert!(late.into_iter().all(Client::was_served));
}

#[test]
fn a_parents_end_does_not_take_its_childs_queue() {
    // The first child has the instance; its own child, which goes on with it, is a process the holder has not heard of.
    let Some((holder, mut actors, listener, port, epoll)) = child_worker(patient) else { return };
    let pid = actors.number(1, "pid");
    assert_eq!(i64::from(ready(&holder)[0].pid), pid);
    actors.zero(1, "orphan");
    wait_until("the parent has ended", || !std::path::Path::new(&format!("/proc/{pid}")).exists() || is_zombie(pid));
    wait_ready(&holder, 0);
    for round in 0..3 {
        let connected = clients(port, 5);
        actors.takes(1, epoll, listener, 5);
        assert!(connected.into_iter().all(Client::was_served), "round {round}");
    }
    // It is a worker of its own now.
    let workers = ready(&holder);
    assert_eq!(workers.len(), 1);
    assert_ne!(i64::from(workers[0].pid), pid);
    assert!(workers[0].counters.accepted_own > 0, "{workers:?}");
}

#[test]
fn a_worker_that_was_given_up_touches_nobody_elses() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.listener();
    actors.zero(0, "fork 1");
    let epoll = actors.watching(1, listener);
    wait_ready(&holder, 1);
    let index = ready(&holder)[0].index;
    actors.zero(1, "orphan");
    wait_ready(&holder, 0);
    // Another gets its place, while it does not know that it has lost it.
    let other = actors.watching(0, listener);
    wait_ready(&holder, 1);
    assert_eq!(ready(&holder)[0].index, index);
    actors.zero(1, &format!("del {epoll} {listener}"));
    assert_eq!(ready(&holder).len(), 1);
    let client = Client::connect(port, 'o');
    assert_eq!(actors.call(0, &format!("wait {other} -1 0")), "events 1:7");
    assert_eq!(actors.take_all(0, other, listener), "o");
    assert!(client.was_served());
    assert_eq!(ready(&holder)[0].counters.accepted_own, 1);
}

#[test]
fn a_thread_that_the_program_has_bound_is_at_home_there() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = patient();
    for cpu in [b, a] {
        let mut actors = Actors::start(&holder);
        let (listener, port) = actors.listener();
        actors.zero(0, &format!("bind_cpu {cpu}"));
        let epoll = actors.watching(0, listener);
        assert_eq!(actors.call(0, &format!("wait {epoll} 0 0")), "events");
        wait_ready(&holder, 1);
        assert_eq!(ready(&holder)[0].cpu, Some(cpu as u32));
        let connected = on_cpu(cpu, || clients(port, 3));
        assert_eq!(sorted([actors.take_all(0, epoll, listener)]), "abc");
        assert!(connected.into_iter().all(Client::was_served));
        assert_eq!(ready(&holder)[0].counters.steered_local, 3);
        drop(actors);
        wait_ready(&holder, 0);
    }
}

#[test]
fn a_worker_is_bound_to_its_cpu_whatever_was_there_before_and_no_longer_than_it_serves() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = patient();
    let mut actors = Actors::start(&holder);
    let all = actors.number(0, "cpus");
    assert!(all > 1, "{all}");
    let (listener, _) = actors.listener();
    let watch = |actors: &mut Actors, actor, expected: i64| {
        let epoll = actors.watching(actor, listener);
        assert_eq!(actors.call(actor, &format!("wait {epoll} 0 0")), "events");
        assert_eq!(actors.number(actor, "cpus"), expected);
        epoll
    };
    let epoll = watch(&mut actors, 0, 1);
    // A child that waits on its parent's instance beside it is bound nowhere.
    actors.zero(0, "fork 1");
    assert_eq!(actors.call(1, &format!("wait {epoll} 0 0")), "events");
    assert_eq!(actors.number(1, "cpus"), all);
    // With an instance of its own, which has the same place in the tables, it is.
    actors.zero(1, &format!("close {epoll}"));
    watch(&mut actors, 1, 1);
    actors.zero(0, "fork 2");
    actors.zero(2, &format!("close {epoll}"));
    watch(&mut actors, 2, 1);
    // Who serves no more runs where it could, and is bound again when it serves again.
    actors.zero(0, &format!("close {epoll}"));
    assert_eq!(actors.number(0, "cpus"), all);
    watch(&mut actors, 0, 1);
    actors.zero(0, &format!("close {listener}"));
    assert_eq!(actors.number(0, "cpus"), all);
    let (listener, _) = actors.listener();
    let epoll = actors.watching(0, listener);
    assert_eq!(actors.call(0, &format!("wait {epoll} 0 0")), "events");
    // What the program says about its own thread from then on holds, also where it makes another.
    assert_eq!(actors.number(0, "cpus"), 1);
    let home = ready(&holder).iter().find(|worker| worker.pid == actors.pid()).unwrap().cpu.unwrap() as usize;
    let elsewhere = if home == a { b } else { a };
    actors.zero(0, &format!("bind_cpu {elsewhere}"));
    actors.zero(0, "thread 3");
    assert_eq!(actors.call(0, "cpu"), elsewhere.to_string());
    assert_eq!(actors.call(3, "cpu"), elsewhere.to_string());
}

#[test]
fn threads_that_block_in_accept_are_bound_to_a_cpu_each() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = patient();
    let mut actors = Actors::start(&holder);
    let (listener, port) = actors.blocking_listener();
    for thread in [1, 2] {
        actors.zero(0, &format!("thread {thread}"));
        actors.begin(thread, &format!("accept {listener}"));
    }
    wait_ready(&holder, 2);
    let clients = [a, b].map(|cpu| on_cpu(cpu, || Client::connect(port, 'x')));
    assert!(actors.result(1).starts_with("took x") && actors.result(2).starts_with("took x"));
    assert!(clients.into_iter().all(Client::was_served));
    let mut cpus = [1, 2].map(|thread| actors.number(thread, "cpu") as usize);
    cpus.sort_unstable();
    assert_eq!(cpus, [a, b]);
    let counters = counted(&holder.status().unwrap());
    assert_eq!((counters.steered_local, counters.steered_remote), (2, 0), "{counters:?}");
}

fn is_zombie(pid: i64) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[test]
fn a_listener_that_came_unseen_is_found_when_the_program_accepts() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for events in [libc::EPOLLIN, libc::EPOLLIN | libc::EPOLLRDHUP, ONCE] {
        let mut actors = Actors::start(&holder);
        let (first, port) = actors.listener();
        // A number that nobody has told the library of.
        let listener = actors.number(0, &format!("rawdup {first}"));
        actors.zero(0, &format!("rawclose {first}"));
        let epoll = actors.number(0, "epoll");
        // Many others, so that what the kernel tells of the instance does not come in one piece.
        for data in 1..200 {
            let other = actors.number(0, "epoll");
            actors.zero(0, &format!("add {epoll} {other} 1 {data}"));
        }
        let data = 0xdead_beef_u64;
        actors.zero(0, &format!("add {epoll} {listener} {events} {data}"));
        assert_eq!(ready(&holder).len(), 0);
        let served = |actors: &mut Actors| {
            let client = Client::connect(port, 'u');
            assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), format!("events 1:{data:x}"));
            assert!(actors.call(0, &format!("accept {listener}")).starts_with("took u"));
            if events == ONCE {
                actors.zero(0, &format!("mod {epoll} {listener} {events} {data}"));
            }
            assert!(client.was_served());
        };
        served(&mut actors);
        wait_ready(&holder, 1);
        let before = counted(&holder.status().unwrap()).accepted_own;
        served(&mut actors);
        served(&mut actors);
        assert_eq!(counted(&holder.status().unwrap()).accepted_own, before + 2);
        drop(actors);
        wait_ready(&holder, 0);
    }
}
