//! Descriptor numbers: what the program does with its own, and what it does, unknowing, to the library's.

use crate::common::*;

/// Where the library keeps its own.
const HIGH: i64 = 4096;

/// Descriptors of the process, as the kernel has them.
fn open(actors: &mut Actors) -> Vec<i64> {
    let result = actors.call(0, "descriptors");
    let rest = result.strip_prefix("open").unwrap_or_else(|| panic!("{result}"));
    rest.split_whitespace().map(|number| number.parse().unwrap()).collect()
}

fn own(actors: &mut Actors) -> Vec<i64> {
    open(actors).into_iter().filter(|fd| *fd >= HIGH).collect()
}

fn is_served(actors: &mut Actors, port: u16, epoll: i64, listener: i64) {
    actors.serves_at_once(0, port, epoll, listener);
}

#[test]
fn the_program_gets_the_numbers_it_would_get_without_the_library() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    let mut with = Actors::start(&holder);
    let mut without = Actors::start_as(std::process::Command::new(compiled("actor")));
    for actors in [&mut with, &mut without] {
        assert_eq!(actors.listener().0, 3);
        assert_eq!(actors.number(0, "epoll"), 4);
        actors.zero(0, "add 4 3 1 7");
        assert_eq!(actors.number(0, "dup 3"), 5);
        assert_eq!(actors.number(0, "epoll"), 6);
    }
    wait_ready(&holder, 1);
    let low = |actors: &mut Actors| open(actors).into_iter().filter(|fd| *fd < HIGH).collect::<Vec<_>>();
    assert_eq!(low(&mut with), low(&mut without));
    // A queue and a rescue descriptor: nothing else, and nothing for the next program.
    assert_eq!(own(&mut with).len(), 2, "{:?}", open(&mut with));
    assert!(own(&mut without).is_empty());
}

#[test]
fn closing_everything_by_range_leaves_the_library_what_it_needs() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for (close, from) in [("close_range 4 4294967295 0", "close_range 3 4294967295 0"), ("closefrom 4", "closefrom 3")]
    {
        let mut actors = Actors::start(&holder);
        let (listener, port, epoll) = worker(&mut actors, &holder);
        assert_eq!((listener, epoll), (3, 4));
        // What the program has left open goes on as it was.
        let mine = own(&mut actors);
        actors.zero(0, &close.replacen(" 4", " 5", 1));
        assert_eq!(own(&mut actors), mine, "{close}");
        is_served(&mut actors, port, epoll, listener);
        actors.zero(0, close);
        // The epoll instance was closed: no worker.
        wait_ready(&holder, 0);
        let left = open(&mut actors);
        assert!(left.iter().all(|fd| *fd == 3 || *fd >= HIGH), "{close}: {left:?}");
        let epoll = actors.watching(0, listener);
        wait_ready(&holder, 1);
        is_served(&mut actors, port, epoll, listener);
        assert!(counted(&holder.status().unwrap()).accepted_own > 0);
        // And now the listener as well.
        actors.zero(0, from);
        wait_ready(&holder, 0);
        wait_until("its port is free", || refused(port));
        drop(actors);
    }
}

#[test]
fn marking_everything_closed_on_exec_closes_nothing() {
    let Some((holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    // CLOSE_RANGE_CLOEXEC
    actors.zero(0, "close_range 3 4294967295 4");
    is_served(&mut actors, port, epoll, listener);
    assert_eq!(ready(&holder).len(), 1);
    // From high to low, it fails and closes nothing.
    assert_eq!(actors.call(0, "close_range 9 3 0"), "failed EINVAL");
    assert_eq!(actors.call(0, "close_range 3 9 64"), "failed EINVAL");
    is_served(&mut actors, port, epoll, listener);
}

#[test]
fn the_librarys_own_descriptors_cannot_be_closed_by_number() {
    let Some((_holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    let mine = own(&mut actors);
    assert!(!mine.is_empty());
    for fd in &mine {
        assert_eq!(actors.call(0, &format!("close {fd}")), "failed EBADF");
    }
    assert_eq!(own(&mut actors), mine);
    is_served(&mut actors, port, epoll, listener);
}

#[test]
fn dup2_onto_the_librarys_descriptors_moves_them() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for call in ["dup2 1 FD", "dup3 1 FD 524288"] {
        let mut actors = Actors::start(&holder);
        let (listener, port, epoll) = worker(&mut actors, &holder);
        let mine = own(&mut actors);
        for fd in &mine {
            assert_eq!(actors.number(0, &call.replace("FD", &fd.to_string())), *fd);
        }
        // They have moved, and the program has what it asked for.
        let now = own(&mut actors);
        assert_eq!(now.len(), 2 * mine.len(), "{now:?}");
        for fd in &mine {
            actors.zero(0, &format!("close {fd}"));
        }
        is_served(&mut actors, port, epoll, listener);
        let status = holder.status().unwrap();
        assert_eq!(status.workers.len(), 1);
        let counters = counted(&status);
        assert!(counters.accepted_own > 0 && counters.accepted_fallback == 0, "{counters:?}");
        // Also the one that stands in for several.
        let oneshot = actors.number(0, "epoll");
        actors.zero(0, &format!("del {epoll} {listener}"));
        actors.zero(0, &format!("add {oneshot} {listener} {} 7", libc::EPOLLIN | libc::EPOLLONESHOT));
        for fd in own(&mut actors) {
            assert_eq!(actors.number(0, &call.replace("FD", &fd.to_string())), fd);
        }
        is_served(&mut actors, port, oneshot, listener);
        drop(actors);
        wait_ready(&holder, 0);
    }
}

#[test]
fn dup2_that_fails_changes_nothing() {
    let Some((holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    assert_eq!(actors.call(0, &format!("dup2 555 {listener}")), "failed EBADF");
    assert_eq!(actors.call(0, &format!("dup2 -1 {listener}")), "failed EBADF");
    assert_eq!(actors.number(0, &format!("dup2 {listener} {listener}")), listener);
    assert_eq!(actors.call(0, &format!("dup3 {listener} {listener} 0")), "failed EINVAL");
    is_served(&mut actors, port, epoll, listener);
    assert_eq!(ready(&holder).len(), 1);
    // One that succeeds ends the listener.
    assert_eq!(actors.number(0, &format!("dup2 1 {listener}")), listener);
    wait_ready(&holder, 0);
    assert!(refused(port));
    assert_eq!(actors.call(0, &format!("accept {listener}")), "failed ENOTSOCK");
}

#[test]
fn a_duplicate_is_the_same_listener() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    let duplicates = [
        "dup L".to_owned(),
        "dup2 L 20".into(),
        "dup3 L 20 0".into(),
        format!("dupfd L 30 {}", libc::F_DUPFD),
        format!("dupfd L 30 {}", libc::F_DUPFD_CLOEXEC),
        "rawdup L".into(),
    ];
    for how in duplicates {
        let mut actors = Actors::start(&holder);
        let (listener, port, epoll) = worker(&mut actors, &holder);
        let copy = actors.number(0, &how.replace('L', &listener.to_string()));
        // The first number may go: the socket is there, and so is its place in the epoll instance.
        actors.zero(0, &format!("close {listener}"));
        if !how.starts_with("raw") {
            assert_eq!(ready(&holder).len(), 1, "{how}: its worker has not left");
        }
        is_served(&mut actors, port, epoll, copy);
        actors.zero(0, &format!("close {copy}"));
        wait_ready(&holder, 0);
        assert!(refused(port), "{how}");
    }
}

#[test]
fn numbers_that_change_their_meaning_unseen_are_not_believed() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for close in ["rawclose", "fclose"] {
        let mut actors = Actors::start(&holder);
        let (first, old_port, epoll) = worker(&mut actors, &holder);
        actors.zero(0, &format!("{close} {first}"));
        wait_until("the holder sees that it is gone", || refused(old_port));
        // The same number again, another socket; then one that is no listener.
        let (second, port) = actors.listener();
        assert_eq!(second, first);
        let other = actors.number(0, "epoll");
        actors.zero(0, &format!("add {other} {second} 1 7"));
        is_served(&mut actors, port, other, second);
        actors.zero(0, &format!("{close} {second}"));
        let third = actors.number(0, "socket 2 0");
        assert_eq!(third, first);
        assert_eq!(actors.call(0, &format!("accept {third}")), "failed EINVAL", "{close}");
        let _ = epoll;
        drop(actors);
        wait_until("nobody is left", || holder.status().unwrap().processes.is_empty());
    }
}

#[test]
fn queues_that_were_closed_unseen_are_given_up() {
    let Some((_holder, mut actors, listener, port, epoll)) = one_worker() else { return };
    for fd in own(&mut actors) {
        actors.zero(0, &format!("rawclose {fd}"));
    }
    // Whatever is steered to the queue meanwhile comes back to the program by another way.
    let clients: Vec<Client> = (0..5).map(|_| Client::connect(port, 'x')).collect();
    let mut taken = String::new();
    wait_until("all are taken", || {
        taken.push_str(&actors.take_all(0, epoll, listener));
        taken.len() == clients.len()
    });
    assert!(clients.into_iter().all(Client::was_served));
    // The program's own files may have these numbers now.
    let mine = actors.number(0, &format!("dupfd 1 {HIGH} {}", libc::F_DUPFD));
    assert!(mine >= HIGH);
    actors.serves_soon(0, port, epoll, listener);
    assert!(open(&mut actors).contains(&mine));
}

/// For a question to the holder the library opens a socket.
#[test]
fn a_number_that_was_closed_unseen_serves_for_a_question() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for kind in ["bound", "listener", "epoll", "own"] {
        let mut actors = limited(&holder, 64);
        let inherited = open(&mut actors);
        let (listener, _, epoll) = worker(&mut actors, &holder);
        let own: Vec<i64> = open(&mut actors).into_iter().filter(|fd| !inherited.contains(fd)).collect();
        let asks = actors.number(0, "socket 2 0");
        let number = match kind {
            "bound" => actors.number(0, "socket 2 0"),
            "listener" => actors.listener().0,
            "epoll" => actors.watching(0, listener),
            _ => {
                while actors.call(0, "dup 1") != "failed EMFILE" {}
                *own.iter().find(|fd| ![listener, epoll].contains(fd)).unwrap()
            }
        };
        actors.zero(0, &format!("rawclose {number}"));
        let before = open(&mut actors);
        assert!(before.contains(&(number - 1)) && !before.contains(&number), "{kind}: {before:?}");
        actors.zero(0, &format!("listen {asks} 128"));
        assert_eq!(open(&mut actors), before, "{kind}");
        drop(actors);
        wait_ready(&holder, 0);
    }
}

/// Actors with this limit of descriptors. The pipes of further actors have numbers below 1000.
fn limited(holder: &ksf_accel::Started, limit: u32) -> Actors {
    let mut shell = accelerated("/bin/sh", holder);
    shell.args(["-c", &format!("ulimit -n {limit}; exec \"$0\"")]).arg(compiled("actor"));
    Actors::start_as(shell)
}

#[test]
fn a_worker_leaves_that_cannot_receive_its_queue() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    let mut actors = limited(&holder, 64);
    let (listener, port) = actors.listener();
    let epoll = actors.number(0, "epoll");
    while actors.call(0, "dup 1") != "failed EMFILE" {}
    // One is left for the question.
    actors.zero(0, "close 20");
    actors.zero(0, &format!("add {epoll} {listener} 1 7"));
    is_served(&mut actors, port, epoll, listener);
    assert_eq!(holder.status().unwrap().workers.len(), 0);
    for fd in 21..25 {
        actors.zero(0, &format!("close {fd}"));
    }
    actors.zero(0, &format!("del {epoll} {listener}"));
    actors.zero(0, &format!("add {epoll} {listener} 1 7"));
    wait_ready(&holder, 1);
    is_served(&mut actors, port, epoll, listener);
    assert_eq!(counted(&holder.status().unwrap()).accepted_own, 1);
}

#[test]
fn a_low_descriptor_limit_leaves_the_program_unharmed() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    let mut actors = limited(&holder, 64);
    let (listener, port, epoll) = worker(&mut actors, &holder);
    is_served(&mut actors, port, epoll, listener);
    // Until no number is left: accept says so, and the connection waits.
    while actors.call(0, "dup 1") != "failed EMFILE" {}
    let client = Client::connect(port, 'm');
    assert_eq!(actors.call(0, &format!("accept {listener}")), "failed EMFILE");
    actors.zero(0, "close 20");
    is_served_late(&mut actors, epoll, listener);
    assert!(client.was_served());
}

fn is_served_late(actors: &mut Actors, epoll: i64, listener: i64) {
    wait_until("it is taken", || actors.take_all(0, epoll, listener) == "m");
}
