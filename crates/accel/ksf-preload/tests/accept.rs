//! `accept()` under the library is `accept()`: what it returns, when it waits, what ends its waiting.

use std::time::Duration;

use crate::common::*;

/// A sleep that a waiting call must survive: it makes a failure likely, not a success.
const WHILE: Duration = Duration::from_millis(100);

#[test]
fn an_accepted_socket_looks_as_it_does_without_the_library() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for (family, length) in [(libc::AF_INET, 16), (libc::AF_INET6, 28)] {
        let mut actors = Actors::start(&holder);
        let (listener, port) = actors.listener_of(family, 0);
        let epoll = actors.watching(0, listener);
        wait_ready(&holder, 1);
        let connect =
            |name| if family == libc::AF_INET { Client::connect(port, name) } else { Client::connect6(port, name) };
        let flags = [
            (format!("accept {listener}"), ""),
            (format!("accept4 {listener} 0"), ""),
            (format!("accept4 {listener} {}", libc::SOCK_NONBLOCK), " nonblock"),
            (format!("accept4 {listener} {}", libc::SOCK_CLOEXEC), " cloexec"),
            (format!("accept4 {listener} {}", libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC), " nonblock cloexec"),
        ];
        for (call, flags) in flags {
            let client = connect('a');
            assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:7");
            let wanted = format!("took a family={family} length={length} peer={}{flags}", client.port());
            assert_eq!(actors.call(0, &call), wanted, "{call}");
        }
        assert_eq!(actors.call(0, &format!("accept4 {listener} 12345")), "failed EINVAL");
        assert_eq!(actors.call(0, &format!("accept {listener}")), "failed EAGAIN");
        let counters = counted(&holder.status().unwrap());
        assert!(counters.accepted_own >= 5, "{counters:?}");
        // The holder is the same for both families: the next program's listener is another.
        drop(actors);
        wait_ready(&holder, 0);
    }
}

#[test]
fn what_is_no_listener_fails_as_it_does_without_the_library() {
    let Some((_holder, mut actors)) = begin() else { return };
    let socket = actors.number(0, "socket 2 0");
    assert_eq!(actors.call(0, &format!("accept {socket}")), "failed EINVAL");
    assert_eq!(actors.call(0, "accept 0"), "failed ENOTSOCK");
    assert_eq!(actors.call(0, "accept 333"), "failed EBADF");
    assert_eq!(actors.call(0, "accept -1"), "failed EBADF");
    assert_eq!(actors.call(0, "close -1"), "failed EBADF");
    assert_eq!(actors.call(0, "listen 0 1"), "failed ENOTSOCK");
    // Once it listens it is looked at anew.
    actors.zero(0, &format!("listen {socket} 5"));
    let port = actors.number(0, &format!("port {socket}")) as u16;
    let client = Client::connect(port, 'x');
    assert!(actors.call(0, &format!("accept {socket}")).starts_with("took x"));
    assert!(client.was_served());
}

#[test]
fn listeners_of_other_families_are_left_alone() {
    let Some((holder, mut actors)) = begin() else { return };
    let local = actors.number(0, &format!("socket {} 0", libc::AF_UNIX));
    actors.zero(0, &format!("listen {local} 5"));
    actors.zero(0, &format!("nonblock {local} 1"));
    let epoll = actors.watching(0, local);
    assert_eq!(actors.call(0, &format!("wait {epoll} 0 0")), "events");
    assert_eq!(actors.call(0, &format!("accept {local}")), "failed EAGAIN");
    assert!(holder.status().unwrap().listeners.is_empty());
}

#[test]
fn blocking_accept_takes_from_the_queue_and_from_the_listener() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.blocking_listener();
    // Before anybody waits: the listener itself.
    let early = Client::connect(port, 'e');
    assert!(actors.call(0, &format!("accept {listener}")).starts_with("took e"));
    assert!(early.was_served());
    for _name in ['a', 'b', 'c'] {
        actors.begin(0, &format!("accept {listener}"));
        wait_ready(&holder, 1);
        actors.accepts(0, port);
        // Not ready while it works.
        wait_ready(&holder, 0);
    }
    let counters = counted(&holder.status().unwrap());
    assert_eq!((counters.accepted_own, counters.accepted_fallback), (3, 1), "{counters:?}");
}

fn actor_took(actors: &mut Actors, actor: u32) -> char {
    let result = actors.result(actor);
    result.strip_prefix("took ").unwrap_or_else(|| panic!("{result}")).chars().next().unwrap()
}

#[test]
fn blocking_threads_share_all_connections() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.blocking_listener();
    for thread in 1..=3 {
        actors.zero(0, &format!("thread {thread}"));
        actors.begin(thread, &format!("accept {listener}"));
    }
    wait_ready(&holder, 3);
    let clients: Vec<Client> = ['a', 'b', 'c'].into_iter().map(|name| Client::connect(port, name)).collect();
    let mut taken: Vec<char> = (1..=3).map(|thread| actor_took(&mut actors, thread)).collect();
    taken.sort_unstable();
    assert_eq!(taken, ['a', 'b', 'c']);
    assert!(clients.into_iter().all(Client::was_served));
    // A thread that ends is a worker no more.
    for thread in 1..=3 {
        actors.zero(0, &format!("end {thread}"));
        actors.zero(0, &format!("join {thread}"));
    }
    wait_until("no worker is left", || holder.status().unwrap().workers.is_empty());
}

#[test]
fn a_receive_timeout_ends_a_blocking_accept() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.blocking_listener();
    actors.zero(0, &format!("rcvtimeo {listener} 30"));
    assert_eq!(actors.call(0, &format!("accept {listener}")), "failed EAGAIN");
    let _client = Client::connect(port, 'x');
    assert!(actors.call(0, &format!("accept {listener}")).starts_with("took x"));
    // A signal ends it even where handlers ask for a restart: the kernel does so too, with a time limit.
    actors.zero(0, &format!("rcvtimeo {listener} 60000"));
    actors.zero(0, "thread 1");
    actors.zero(0, &format!("handler {} 1 0", libc::SIGUSR1));
    interrupt(&mut actors, &holder, listener);
    assert_eq!(actors.result(1), "failed EINTR");
}

/// Actor 1 waits in accept(), and SIGUSR1 is caught there.
fn interrupt(actors: &mut Actors, holder: &ksf_accel::Started, listener: i64) {
    interrupt_by(actors, holder, listener, libc::SIGUSR1);
}

fn interrupt_by(actors: &mut Actors, holder: &ksf_accel::Started, listener: i64, signal: i32) {
    let caught = actors.number(0, "caught");
    actors.begin(1, &format!("accept {listener}"));
    wait_ready(holder, 1);
    // Ready is a moment before it waits.
    std::thread::sleep(WHILE);
    actors.zero(0, &format!("kill 1 {signal}"));
    wait_until("the signal is caught", || actors.number(0, "caught") == caught + 1);
}

#[test]
fn signals_end_a_blocking_accept_unless_they_restart_it() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.blocking_listener();
    actors.zero(0, "thread 1");
    actors.zero(0, &format!("handler {} 0 0", libc::SIGUSR1));
    interrupt(&mut actors, &holder, listener);
    assert_eq!(actors.result(1), "failed EINTR");
    // Another handler, which has not run, does not change that.
    actors.zero(0, &format!("handler {} 1 0", libc::SIGUSR2));
    interrupt(&mut actors, &holder, listener);
    assert_eq!(actors.result(1), "failed EINTR");

    actors.zero(0, &format!("handler {} 1 0", libc::SIGUSR1));
    interrupt(&mut actors, &holder, listener);
    assert_eq!(actors.result_within(1, WHILE), None, "it goes on");
    actors.accepts(1, port);
}

/// As in servers that fork for each connection: SIGCHLD restarts `accept()`, SIGTERM ends it.
#[test]
fn of_handlers_of_both_kinds_each_does_what_it_does_without_the_library() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.blocking_listener();
    let (restarts, ends) = (libc::SIGUSR1, libc::SIGUSR2);
    actors.zero(0, &format!("handler {restarts} 1 0"));
    actors.zero(0, &format!("handler {ends} 0 0"));
    actors.zero(0, "thread 1");
    for _name in ['a', 'b'] {
        let caught = actors.number(0, "caught");
        interrupt_by(&mut actors, &holder, listener, restarts);
        // Again and again, while the same call waits.
        for times in 2..5 {
            actors.zero(0, &format!("kill 1 {restarts}"));
            wait_until("it is caught", || actors.number(0, "caught") == caught + times);
        }
        assert_eq!(actors.result_within(1, WHILE), None, "it goes on");
        actors.accepts(1, port);
        interrupt_by(&mut actors, &holder, listener, ends);
        assert_eq!(actors.result(1), "failed EINTR");
    }
    // One that takes itself away when it runs has run.
    actors.zero(0, &format!("handler {ends} 2 0"));
    interrupt_by(&mut actors, &holder, listener, ends);
    assert_eq!(actors.result(1), "failed EINTR");
    // Now all that are left restart it.
    interrupt_by(&mut actors, &holder, listener, restarts);
    assert_eq!(actors.result_within(1, WHILE), None, "it goes on");
    actors.accepts(1, port);
}

#[test]
fn a_signal_handler_may_accept() {
    let Some((_holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    actors.zero(0, "thread 1");
    actors.zero(0, &format!("handler {} 1 {listener}", libc::SIGUSR1));
    let client = Client::connect(port, 's');
    assert_eq!(actors.call(0, &format!("wait {epoll} -1 0")), "events 1:7");
    // The thread waits in a call that is hooked: a handler runs inside of it.
    let other = actors.number(1, "epoll");
    actors.begin(1, &format!("wait {other} 1000 0"));
    std::thread::sleep(WHILE);
    actors.zero(0, &format!("kill 1 {}", libc::SIGUSR1));
    // A machine that is very slow may deliver it before the call.
    assert!(["failed EINTR", "events"].contains(&&*actors.result(1)));
    assert_eq!(actors.call(0, "took"), "took s");
    assert!(client.was_served());
}

#[test]
fn signal_handlers_may_use_listeners_whatever_they_interrupt() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, _) = actors.listener();
    actors.zero(0, "thread 1");
    let epoll = actors.watching(1, listener);
    actors.zero(0, &format!("handler {} 1 {listener}", libc::SIGUSR1));
    // The handler duplicates and closes the listener, which takes the lock that the thread holds most of the time.
    actors.begin(1, &format!("churn {epoll} {listener} 20000"));
    for _ in 0..500 {
        actors.zero(0, &format!("kill 1 {}", libc::SIGUSR1));
    }
    assert_eq!(actors.result(1), "0");
    assert!(actors.number(0, "caught") > 0);
    wait_ready(&holder, 1);
}

#[test]
fn a_cancelled_thread_leaves_the_others_at_work() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.blocking_listener();
    for thread in [1, 2] {
        actors.zero(0, &format!("thread {thread}"));
        actors.begin(thread, &format!("accept {listener}"));
    }
    wait_ready(&holder, 2);
    actors.zero(0, "cancel 1");
    wait_ready(&holder, 1);
    for _name in ['a', 'b', 'c'] {
        actors.accepts(2, port);
        actors.begin(2, &format!("accept {listener}"));
    }
}
