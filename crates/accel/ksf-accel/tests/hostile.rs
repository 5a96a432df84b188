//! Messages that no library would send: the holder neither ends nor keeps what it is sent.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use crate::common::*;
use ksf_accel::{Level, Started};
use ksf_accel_proto::message::{Answer, NO_WORKER, REQUEST_BYTES, Refusal, Request};
use ksf_accel_proto::state::{VERSION, WORKERS_MAX};
use rustix::process::Signal;

/// Descriptors of this process, which has the holder in a thread. Tests run in one process, so only what is named
/// after a kind that no other test uses is counted.
fn descriptors_of(file: &impl AsFd) -> usize {
    let wanted = rustix::fs::fstat(file).unwrap();
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter_map(|entry| rustix::fs::stat(entry.path()).ok())
        .filter(|stat| (stat.st_dev, stat.st_ino) == (wanted.st_dev, wanted.st_ino))
        .count()
}

/// It serves as if nothing had been.
fn still_serves(holder: &Started) {
    let library = Library::hello(holder);
    let own = listener("127.0.0.1:0");
    let place = library.ready(&own, cpus()[0] as i32);
    let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 3);
    assert_eq!(library.accept_own(&place).len(), 3);
}

/// By a process of the program's own user, and by a worker of it that has another one.
fn by_both_users(holder: &Started, library: &Library, act: impl Fn(&Library) + Sync) {
    act(library);
    let (name, secret) = (holder.name(), library.secret());
    as_user(WORKER, || act(&Library::hello_to(name, secret)));
}

fn refused(answer: Answer) -> Refusal {
    match answer {
        Answer::Refused { reason } => reason,
        done => panic!("{done:?}"),
    }
}

#[test]
fn who_does_not_show_the_token_is_told_once_and_hung_up_on() {
    let Some(()) = own_network() else { return };
    let holder = start();
    let mut wrong = holder.token();
    wrong[15] ^= 1;
    let hello = |token, version| Request::Hello { version, token, pid: 1, begins: 0 }.encode();
    let own = listener("127.0.0.1:0");
    let listen = Request::Listen { cookie: cookie(&own), backlog: 1 }.encode();
    let cases: [(&[u8], Refusal); 4] = [
        (&hello(wrong, VERSION), Refusal::Token),
        (&hello(holder.token(), VERSION + 1), Refusal::Version),
        (&listen, Refusal::Token),
        (&[0xff; REQUEST_BYTES], Refusal::Malformed),
    ];
    for (bytes, reason) in cases {
        let socket = connect(holder.name());
        let (answer, files) = ask(socket.as_fd(), bytes, &[own.as_fd()]).unwrap();
        assert_eq!(refused(answer), reason);
        assert!(files.is_empty());
        assert!(ask(socket.as_fd(), &hello(holder.token(), VERSION), &[]).is_none(), "{reason:?}: not hung up on");
    }
    wait_until("nothing is kept", || descriptors_of(&own) == 1);
    let status = holder.status().unwrap();
    assert!(status.listeners.is_empty() && status.processes.is_empty());
    assert_eq!(status.refused_requests.iter().map(|refused| refused.count).sum::<u64>(), 4);
    still_serves(&holder);
}

#[test]
fn messages_of_wrong_sizes_are_refused() {
    let Some((holder, library)) = begin() else { return };
    by_both_users(&holder, &library, |library| {
        for bytes in [1, REQUEST_BYTES - 1, REQUEST_BYTES + 1, 60_000] {
            let (answer, _) = ask(library.socket.as_fd(), &vec![2; bytes], &[]).unwrap();
            assert_eq!(refused(answer), Refusal::Malformed, "{bytes} bytes");
        }
        for first in [0u32, 6, u32::MAX] {
            let mut bytes = [0; REQUEST_BYTES];
            bytes[..4].copy_from_slice(&first.to_ne_bytes());
            assert_eq!(refused(ask(library.socket.as_fd(), &bytes, &[]).unwrap().0), Refusal::Malformed);
        }
    });
    still_serves(&holder);
}

#[test]
fn descriptors_that_are_no_listeners_are_refused_and_closed() {
    let Some((holder, library)) = begin() else { return };
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (unix, _peer) = UnixStream::pair().unwrap();
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let own = listener("127.0.0.1:0");
    let stream = TcpStream::connect(own.local_addr().unwrap()).unwrap();
    let silent = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let others: [(&str, BorrowedFd<'_>); 5] = [
        ("udp", udp.as_fd()),
        ("unix", unix.as_fd()),
        ("file", file.as_fd()),
        ("connection", stream.as_fd()),
        ("not listening", silent.as_fd()),
    ];
    let real = cookie(&own);
    by_both_users(&holder, &library, |library| {
        for (what, fd) in others {
            let cookie = rustix::net::sockopt::socket_cookie(fd).unwrap_or(1);
            for request in
                [Request::Listen { cookie, backlog: 1 }, Request::Join { cookie, worker: NO_WORKER, tid: 1, cpu: -1 }]
            {
                assert_eq!(refused(library.ask(request, &[fd]).0), Refusal::NotListening, "{what}");
            }
        }
        let join = Request::Join { cookie: real, worker: NO_WORKER, tid: 1, cpu: -1 };
        let listen = Request::Listen { cookie: real, backlog: 1 };
        assert_eq!(refused(library.ask(listen, &[]).0), Refusal::Malformed, "without a descriptor");
        assert_eq!(refused(library.ask(join, &[]).0), Refusal::Malformed, "without a descriptor");
        let many = [own.as_fd(); 16];
        assert_eq!(refused(library.ask(listen, &many).0), Refusal::Malformed, "with many");
        let lie = Request::Listen { cookie: real + 1, backlog: 1 };
        assert_eq!(refused(library.ask(lie, &[own.as_fd()]).0), Refusal::NotListening, "another cookie");
        let steal = Request::Steal { cookie: real, worker: 0 };
        assert_eq!(refused(library.ask(steal, &[own.as_fd()]).0), Refusal::Unknown);
    });
    for (what, fd) in others {
        assert_eq!(descriptors_of(&fd), 1, "{what} is kept");
    }
    assert_eq!(descriptors_of(&own), 1);
    // Also a descriptor with a request that needs none.
    let hello = Request::Hello { version: VERSION, token: holder.token(), pid: 1, begins: 0 };
    assert!(matches!(library.ask(hello, &[own.as_fd()]).0, Answer::Done { .. }));
    assert_eq!(descriptors_of(&own), 1);
    still_serves(&holder);
}

#[test]
fn a_listener_of_another_namespace_is_refused() {
    let Some((holder, library)) = begin() else { return };
    let elsewhere = std::thread::spawn(|| own_network().map(|()| listener("127.0.0.1:0"))).join().unwrap().unwrap();
    by_both_users(&holder, &library, |library| assert_eq!(library.listen(&elsewhere), Err(Refusal::Namespace)));
    still_serves(&holder);
}

#[test]
fn workers_of_others_cannot_be_used() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let honest = joins(&holder, &own, -1, 1);
    let place = wait_for_workers(&holder, 1)[0].index;
    let cookie = cookie(&own);
    by_both_users(&holder, &library, |library| {
        for worker in [place, 7, WORKERS_MAX as u32, NO_WORKER - 1] {
            let requests =
                [Request::Leave { cookie, worker, closed: 1 }, Request::Join { cookie, worker, tid: 1, cpu: -1 }];
            for request in requests {
                assert_eq!(refused(library.ask(request, &[own.as_fd()]).0), Refusal::Malformed, "{request:?}");
            }
        }
        // Both users of the program may take waiting connections, but not in the name of a worker that does not exist.
        assert!(library.steal(&own, place).is_none());
        assert_eq!(refused(library.ask(Request::Steal { cookie, worker: 7 }, &[own.as_fd()]).0), Refusal::Malformed);
    });
    assert_eq!(library.worker(place).ready.load(SeqCst), 1);
    drop(honest);
    still_serves(&holder);
}

#[test]
fn a_flood_of_joins_ends_at_the_limit_and_is_given_back() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let flood = joins(&holder, &own, i32::MAX, WORKERS_MAX);
    wait_for_workers(&holder, WORKERS_MAX);
    by_both_users(&holder, &library, |library| {
        assert_eq!(library.join(&own, NO_WORKER, -1).map(drop), Err(Refusal::Full));
    });
    drop(flood);
    wait_for_workers(&holder, 0);
    still_serves(&holder);
}

#[test]
fn listeners_have_a_limit_and_strangers_are_few() {
    let Some((holder, library)) = begin() else { return };
    let many: Vec<TcpListener> = (0..65).map(|_| listener("127.0.0.1:0")).collect();
    let results: Vec<_> = many.iter().map(|own| library.listen(own)).collect();
    assert!(results[..64].iter().all(Result::is_ok));
    assert_eq!(results[64], Err(Refusal::Full));
    drop(many);
    wait_until("they are forgotten", || holder.status().unwrap().listeners.is_empty());
    // Who connects and says nothing does not keep others out.
    let strangers: Vec<_> = (0..200).map(|_| connect(holder.name())).collect();
    still_serves(&holder);
    drop(strangers);
    still_serves(&holder);
}

#[test]
fn nonsense_in_the_shared_memory_costs_locality_only() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let address = own.local_addr().unwrap();
    let process = joins(&holder, &own, cpus()[0] as i32, 1);
    wait_for_workers(&holder, 1);
    let state = library.state();
    for home in &state.homes {
        home.len.store(255, SeqCst);
        home.worker.iter().for_each(|worker| worker.store(255, SeqCst));
    }
    state.control.workers_end.store(u32::MAX, SeqCst);
    for worker in &state.workers {
        worker.ready.store(u64::MAX, SeqCst);
        worker.busy_since_ns.store(u64::MAX, SeqCst);
        worker.accepted_own.store(u64::MAX, SeqCst);
        worker.cpu.store(i32::MIN, SeqCst);
    }
    let clients = connect_from(cpus()[0], address, 20);
    // What was sent to a worker without a queue went to the listener.
    let status = holder.status().unwrap();
    let waiting: u32 = status.listeners[0].queues.iter().map(|queue| queue.waiting).sum();
    assert_eq!(accept_all(&own).len() + waiting as usize, clients.len());
    assert_eq!(status.workers.len(), 1);
    drop(process);
    wait_for_workers(&holder, 0);
}

/// www-data of Debian, as workers of servers are.
const WORKER: u32 = 33;

#[test]
fn the_environments_token_admits_no_other_user() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let _place = library.ready(&own, -1);
    for user in [WORKER, STRANGER] {
        // Also by a process that is known, as after exec() of another program by another user.
        let (socket, answer, files) = as_user(user, || hello_with(holder.name(), holder.token()));
        assert_eq!(refused(answer), Refusal::Token, "user {user}");
        assert!(files.is_empty(), "user {user} was given something");
        let cookie = cookie(&own);
        let steal = Request::Steal { cookie, worker: 0 };
        assert!(ask(socket.as_fd(), &steal.encode(), &[own.as_fd()]).is_none(), "user {user}: not hung up on");
        // Nor without a greeting, though it has the listener.
        let listen = Request::Listen { cookie, backlog: 1 };
        let join = Request::Join { cookie, worker: NO_WORKER, tid: 1, cpu: -1 };
        for request in [listen, join, Request::Leave { cookie, worker: 0, closed: 1 }, steal] {
            let answer = as_user(user, || ask(connect(holder.name()).as_fd(), &request.encode(), &[own.as_fd()]));
            let (answer, files) = answer.expect("an answer");
            assert_eq!(refused(answer), Refusal::Token, "user {user}: {request:?}");
            assert!(files.is_empty(), "user {user} was given something");
        }
    }
    let status = holder.status().unwrap();
    assert_eq!((status.listeners.len(), status.workers.len()), (1, 1));
    still_serves(&holder);
}

#[test]
fn a_forked_worker_is_admitted_whatever_its_user() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let secret = library.secret();
    assert_ne!(secret, holder.token());
    as_user(WORKER, || {
        let worker = Library::hello_to(holder.name(), secret);
        let place = worker.ready(&own, -1);
        let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 3);
        assert_eq!(worker.accept_own(&place).len(), 3);
    });
    // What the descriptor gives is for reading: nobody changes the secret for others.
    let lifetime = library.lifetime.as_ref().unwrap();
    assert!(rustix::io::pwrite(lifetime, &[0; 16], 0).is_err());
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(lifetime));
    let again = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    assert!(rustix::io::pwrite(&again, &[0; 16], 0).is_err() && again.set_len(0).is_err());
}

#[test]
fn a_queue_is_given_to_those_who_have_the_listener() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let dying = joins(&holder, &own, cpus()[0] as i32, 1);
    wait_for_workers(&holder, 1);
    let other = listener("127.0.0.1:0");
    let place = library.ready(&other, -1);
    let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 3);
    drop(dying);
    wait_until("the worker is gone", || holder.status().unwrap().workers.len() == 1);
    let steal = Request::Steal { cookie: cookie(&own), worker: place.worker };
    by_both_users(&holder, &library, |library| {
        let (answer, files) = library.ask(steal, &[]);
        assert_eq!((refused(answer), files.len()), (Refusal::Malformed, 0));
        for wrong in [other.as_fd(), library.socket.as_fd(), place.queue.as_fd()] {
            let (answer, files) = library.ask(steal, &[wrong]);
            assert_eq!((refused(answer), files.len()), (Refusal::NotListening, 0));
        }
    });
    assert!(library.steal(&own, place.worker).is_some());
}

#[test]
fn writing_shared_memory_gives_no_queue_of_a_living_worker() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let cpu = cpus()[0];
    let _process = joins(&holder, &own, cpu as i32, 1);
    let victim = library.worker(wait_for_workers(&holder, 1)[0].index);
    let thief = library.join(&own, NO_WORKER, -1).unwrap();
    // The victim takes nothing: on a machine so slow that the holder sees that, it is another try.
    loop {
        let before = Instant::now();
        victim.ready.store(1, SeqCst);
        victim.stalled.store(0, SeqCst);
        let _clients = connect_from(cpu, own.local_addr().unwrap(), 3);
        victim.stalled.store(1, SeqCst);
        victim.ready.store(0, SeqCst);
        for word in [&victim.pid, &victim.generation] {
            word.store(99, SeqCst);
        }
        victim.accepted_own.store(7, SeqCst);
        let stolen = library.steal(&own, thief.worker).is_some();
        if before.elapsed() < Duration::from_millis(1500) {
            assert!(!stolen, "the queue of a worker that lives");
            return;
        }
    }
}

/// As [`nonsense_in_the_shared_memory_costs_locality_only`] for another listener at the same address.
#[test]
fn writing_shared_memory_takes_nothing_from_others_at_the_same_address() {
    let Some((holder, library)) = begin() else { return };
    let reuse = |socket: &socket2::Socket| socket.set_reuse_port(true).unwrap();
    let (own, theirs) = (listener_with("127.0.0.1:8000", 128, reuse), listener_with("127.0.0.1:8000", 128, reuse));
    let _place = library.ready(&own, cpus()[0] as i32);
    wait_until("it is seen", || !holder.status().unwrap().listeners[0].excluded.is_empty());
    let control: *const AtomicU64 = (&raw const library.state().control).cast();
    for word in 2..size_of_val(&library.state().control) / 8 {
        // SAFETY: inside of the control block, which is all atomics.
        unsafe { (*control.add(word)).store(0, SeqCst) };
    }
    let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 60);
    let counts = (accept_all(&own).len(), accept_all(&theirs).len());
    assert!(counts.1 > 0 && counts.0 + counts.1 == 60, "{counts:?}");
}

/// A program that switches itself off or on, behind the holder's back.
#[test]
fn a_switch_in_shared_memory_is_the_programs_own() {
    let Some((_holder, library)) = begin() else { return };
    let other = start();
    let others = Library::hello(&other);
    let (own, theirs) = (listener("127.0.0.1:0"), listener("127.0.0.1:0"));
    let cpu = cpus()[0];
    let (place, their_place) = (library.ready(&own, cpu as i32), others.ready(&theirs, cpu as i32));
    for on in [0, 1, u32::MAX] {
        library.state().control.on.store(on, SeqCst);
        let _clients = [&own, &theirs].map(|to| connect_from(cpu, to.local_addr().unwrap(), 3));
        let (by_queue, by_listener) = if on == 0 { (0, 3) } else { (3, 0) };
        assert_eq!((library.accept_own(&place).len(), accept_all(&own).len()), (by_queue, by_listener), "on = {on}");
        assert_eq!(others.accept_own(&their_place).len(), 3, "on = {on}");
    }
    assert!(other.status().unwrap().on);
    still_serves(&other);
}

/// An address of each kind, also for both families.
const ADDRESSES: [&str; 4] = ["127.0.0.1:8000", "[::1]:8000", "0.0.0.0:8000", "[::]:8000"];

#[test]
fn a_rule_ends_with_its_socket_whatever_shared_memory_says() {
    let Some(()) = own_network() else { return };
    side_by_side([Level::SkLookup, Level::ClassicBpf], |level| {
        let holder = start_at(level);
        let library = Library::hello(&holder);
        for address in ADDRESSES {
            let own = listener(address);
            let address = own.local_addr().unwrap();
            let place = library.ready(&own, cpus()[0] as i32);
            // Closed, and nobody says so; the worker stays ready.
            drop(own);
            let JoinedWorker { queue, .. } = place;
            if level == Level::SkLookup {
                takes_all(address);
                assert!(accept_all(&queue).is_empty());
                still_serves(&holder);
            } else {
                // It is bound to the port.
                drop(queue);
                takes_all(address);
            }
            wait_until("it is forgotten", || holder.status().unwrap().listeners.is_empty());
        }
    });
}

#[test]
fn a_rule_ends_with_the_program_that_is_killed_or_runs_another() {
    let Some(()) = own_network() else { return };
    side_by_side([Level::SkLookup, Level::ClassicBpf], |level| {
        let holder = start_at(level);
        for address in ADDRESSES {
            for end in ["exec", "kill"] {
                let env = [("HOLDER", holder.environment()), ("ADDRESS", address.to_owned())];
                let mut program = Helper::start("hostile::helper_owns_a_listener", &env);
                assert_eq!(program.hear(), "ready");
                match end {
                    "exec" => program.tell(end),
                    _ => signal(program.pid(), Signal::KILL),
                }
                takes_all(address.parse().unwrap());
                wait_until("it is forgotten", || holder.status().unwrap().listeners.is_empty());
            }
        }
    });
}

#[test]
#[ignore = "a part of the test above"]
fn helper_owns_a_listener() {
    if !is_helper() {
        return;
    }
    let library = hello_by_environment();
    let own = listener(&std::env::var("ADDRESS").unwrap());
    let _place = library.ready(&own, cpus()[0] as i32);
    ksf_test::say("ready");
    if listen().is_some() {
        // All that it has is closed by that; it goes on for as long as its input is open.
        panic!("{}", std::process::Command::new("cat").exec());
    }
}

#[test]
fn a_duplicate_of_the_listener_keeps_the_rule_until_it_is_closed() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:8000");
    let address = own.local_addr().unwrap();
    let place = library.ready(&own, cpus()[0] as i32);
    let cookie = cookie(&own);
    // In a message that nobody has read, too.
    let (near, far) = UnixStream::pair().unwrap();
    say(near.as_fd(), b"x", &[own.as_fd()]).unwrap();
    drop(own);
    let serves = || {
        let _clients = connect_from(cpus()[0], address, 3);
        accept_all(&place.queue).len() == 3
    };
    assert!(serves());
    // The holder looks.
    library.leave(cookie, NO_WORKER, true);
    assert_eq!(holder.status().unwrap().listeners.len(), 1);
    assert!(serves());
    drop((near, far));
    takes_all(address);
    assert!(accept_all(&place.queue).is_empty());
}

#[test]
fn the_holder_keeps_no_socket_of_the_programs_that_the_program_has_closed() {
    let Some(()) = own_network() else { return };
    let holder = start();
    let own = listener_with("127.0.0.1:8000", 128, |socket| socket.set_reuse_port(true).unwrap());
    let address = own.local_addr().unwrap();
    let mut command = Helper::command("hostile::helper_joins_and_closes");
    command.env("HOLDER", holder.environment()).stdin(std::os::fd::OwnedFd::from(own));
    let mut program = Running::start(command.stdout(std::process::Stdio::piped()));
    drop(command);
    program.out.with("closed");
    takes_all(address);
    wait_until("it is forgotten", || holder.status().unwrap().listeners.is_empty());
}

#[test]
#[ignore = "a part of the test above"]
fn helper_joins_and_closes() {
    if !is_helper() {
        return;
    }
    // SAFETY: no memory is involved. Ends with the thread of the test that has started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let library = hello_by_environment();
    let own = TcpListener::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let JoinedWorker { queue, .. } = library.ready(&own, -1);
    assert_eq!(cookie(&queue), cookie(&own));
    // By bare system calls, as it were: nobody is told, and the ready bit stays.
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null").unwrap()).unwrap();
    drop((own, queue));
    ksf_test::say("closed");
    std::thread::park();
}

#[test]
fn a_listener_that_was_shut_down_takes_nothing_until_it_is_opened_again() {
    let Some((_holder, library)) = begin() else { return };
    // A port that was asked for stays the socket's.
    let own = listener("127.0.0.1:8000");
    let address = own.local_addr().unwrap();
    let place = library.ready(&own, cpus()[0] as i32);
    rustix::net::shutdown(&own, rustix::net::Shutdown::Both).unwrap();
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    rustix::net::listen(&own, 16).unwrap();
    library.listen(&own).unwrap();
    let _clients = connect_from(cpus()[0], address, 3);
    assert_eq!(accept_all(&place.queue).len() + accept_all(&own).len(), 3);
}

#[test]
fn silent_connections_of_a_stranger_keep_nobody_out() {
    let Some(()) = own_network() else { return };
    let holder = start();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                as_user(STRANGER, || {
                    let mut held = std::collections::VecDeque::new();
                    while !ends.load(SeqCst) {
                        held.push_back(connect(holder.name()));
                        if held.len() > 300 {
                            held.pop_front();
                        }
                    }
                });
            });
        }
        let lost = (0..200).filter(|_| Library::try_hello_as(holder.name(), holder.token(), 0).is_none()).count();
        ends.store(true, SeqCst);
        assert_eq!(lost, 0, "of 200");
    });
    still_serves(&holder);
}

/// A user may have many user ids (subuid(5)).
#[test]
fn silent_connections_of_many_strangers_keep_nobody_out() {
    let Some((holder, _library)) = begin() else { return };
    let own: Vec<_> = (0..2).map(|_| connect(holder.name())).collect();
    let strangers: Vec<_> = (0..64).map(|at| as_user(STRANGER + at, || connect(holder.name()))).collect();
    still_serves(&holder);
    let hello = Request::Hello { version: VERSION, token: holder.token(), pid: std::process::id(), begins: 0 };
    for socket in &own {
        let answer = ask(socket.as_fd(), &hello.encode(), &[]);
        assert!(matches!(answer, Some((Answer::Done { .. }, _))), "{answer:?}");
    }
    drop(strangers);
}
