//! Messages that no library would send: the holder neither ends nor keeps what it is sent.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::*;
use ksf_accel::Started;
use ksf_accel_proto::message::{Answer, NO_WORKER, REQUEST_BYTES, Refusal, Request};
use ksf_accel_proto::state::{VERSION, WORKERS_MAX};

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
    for bytes in [1, REQUEST_BYTES - 1, REQUEST_BYTES + 1, 60_000] {
        let (answer, _) = ask(library.socket.as_fd(), &vec![2; bytes], &[]).unwrap();
        assert_eq!(refused(answer), Refusal::Malformed, "{bytes} bytes");
    }
    for first in [0u32, 6, u32::MAX] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&first.to_ne_bytes());
        assert_eq!(refused(ask(library.socket.as_fd(), &bytes, &[]).unwrap().0), Refusal::Malformed);
    }
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
    for (what, fd) in others {
        let cookie = rustix::net::sockopt::socket_cookie(fd).unwrap_or(1);
        for request in
            [Request::Listen { cookie, backlog: 1 }, Request::Join { cookie, worker: NO_WORKER, tid: 1, cpu: -1 }]
        {
            assert_eq!(refused(library.ask(request, &[fd]).0), Refusal::NotListening, "{what}");
        }
        assert_eq!(descriptors_of(&fd), 1, "{what} is kept");
    }
    let real = cookie(&own);
    let join = Request::Join { cookie: real, worker: NO_WORKER, tid: 1, cpu: -1 };
    let listen = Request::Listen { cookie: real, backlog: 1 };
    assert_eq!(refused(library.ask(listen, &[]).0), Refusal::Malformed, "without a descriptor");
    assert_eq!(refused(library.ask(join, &[]).0), Refusal::Malformed, "without a descriptor");
    let many = [own.as_fd(); 16];
    assert_eq!(refused(library.ask(listen, &many).0), Refusal::Malformed, "with many");
    let lie = Request::Listen { cookie: real + 1, backlog: 1 };
    assert_eq!(refused(library.ask(lie, &[own.as_fd()]).0), Refusal::NotListening, "another cookie");
    assert_eq!(refused(library.ask(Request::Steal { cookie: real, worker: 0 }, &[]).0), Refusal::Unknown);
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
    assert_eq!(library.listen(&elsewhere), Err(Refusal::Namespace));
    still_serves(&holder);
}

#[test]
fn workers_of_others_cannot_be_used() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let honest = joins(&holder, &own, -1, 1);
    let place = wait_for_workers(&holder, 1)[0].index;
    let cookie = cookie(&own);
    for worker in [place, 7, WORKERS_MAX as u32, NO_WORKER - 1] {
        let requests =
            [Request::Leave { cookie, worker, closed: 1 }, Request::Join { cookie, worker, tid: 1, cpu: -1 }];
        for request in requests {
            assert_eq!(refused(library.ask(request, &[own.as_fd()]).0), Refusal::Malformed, "{request:?}");
        }
    }
    // To take what waits is allowed to all of the program; but not by the name of nobody.
    assert!(library.steal(cookie, place).is_none());
    assert_eq!(refused(library.ask(Request::Steal { cookie, worker: 7 }, &[]).0), Refusal::Malformed);
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
    assert_eq!(library.join(&own, NO_WORKER, -1).map(drop), Err(Refusal::Full));
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
