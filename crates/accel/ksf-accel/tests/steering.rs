//! Level 1: where do connections go? Real sockets, workers played by the test.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;

use crate::common::*;
use ksf_accel::{Level, status};
use ksf_accel_proto::message::{NO_WORKER, Refusal, Request};

#[test]
fn each_connection_is_local() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = start_at(Level::SkLookup);
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    let address = own.local_addr().unwrap();
    library.listen(&own).unwrap();
    let (on_a, on_b) = (library.ready(&own, a as i32), library.ready(&own, b as i32));
    assert_eq!((on_a.cpu, on_b.cpu), (a as i32, b as i32));
    let clients = [connect_from(a, address, 40), connect_from(b, address, 30)];
    let (from_a, from_b) = (library.accept_own(&on_a), library.accept_own(&on_b));
    assert_eq!((from_a.len(), from_b.len()), (40, 30));
    assert!(accept_all(&own).is_empty());
    // What is accepted is the connection: same addresses at both ends, and data goes through.
    let mut ports: Vec<_> = from_a.iter().map(|stream| stream.peer_addr().unwrap()).collect();
    let mut clients_ports: Vec<_> = clients[0].iter().map(|stream| stream.local_addr().unwrap()).collect();
    ports.sort();
    clients_ports.sort();
    assert_eq!(ports, clients_ports);
    assert!(from_b.iter().all(|stream| stream.local_addr().unwrap() == address));
    let status = holder.status().unwrap();
    let counted = |place: &JoinedWorker| status.workers[place.worker as usize].counters;
    assert_eq!((counted(&on_a).steered_local, counted(&on_a).steered_remote), (40, 0));
    assert_eq!((counted(&on_b).steered_local, counted(&on_b).accepted_own), (30, 30));
    assert_eq!(status.workers[0].ready, [address.to_string()]);
    assert_eq!(status.listeners[0].mechanism, Level::SkLookup);
}

/// TCP counts a segment when netfilter's input has let it through, and then looks up its socket.
#[test]
fn steered_connections_pass_netfilter_and_tcp() {
    let Some(()) = own_network() else { return };
    let holder = start_at(Level::SkLookup);
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    let place = library.ready(&own, cpus()[0] as i32);
    let received = counted("Tcp: ", "InSegs");
    let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 20);
    // SYN, its answer, and the ACK.
    assert!(counted("Tcp: ", "InSegs") - received >= 3 * 20);
    assert_eq!(library.accept_own(&place).len(), 20);
}

#[test]
fn workers_of_one_cpu_take_turns() {
    let Some([a, _]) = network_on_two_cpus() else { return };
    let holder = start();
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    let places: Vec<JoinedWorker> = (0..3).map(|_| library.ready(&own, a as i32)).collect();
    let _clients = connect_from(a, own.local_addr().unwrap(), 30);
    assert_eq!(places.iter().map(|place| accept_all(&place.queue).len()).collect::<Vec<_>>(), [10, 10, 10]);
}

#[test]
fn who_is_busy_stalled_or_not_ready_is_passed_over() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = start_with(|options| options.busy_limit_ns = 20_000_000_000);
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    let address = own.local_addr().unwrap();
    let (on_a, on_b) = (library.ready(&own, a as i32), library.ready(&own, b as i32));
    let goes = |what: &str| {
        let client = connect_from(a, address, 1);
        let counts = [library.accept_own(&on_a).len(), library.accept_own(&on_b).len(), accept_all(&own).len()];
        drop(client);
        let to = counts.iter().position(|&count| count == 1).unwrap_or_else(|| panic!("{what}: {counts:?}"));
        ["home", "other", "fallback"][to]
    };
    let stalled = |place: &JoinedWorker, yes: u32| {
        // Without busy_since the holder would clear it: an idle worker with an empty queue is not stalled.
        library.set_busy(place, 0);
        library.worker(place.worker).stalled.store(yes, std::sync::atomic::Ordering::SeqCst);
    };
    let waits = |place: &JoinedWorker| {
        library.worker(place.worker).busy_since_ns.store(0, std::sync::atomic::Ordering::SeqCst);
    };
    assert_eq!(goes("all wait"), "home");
    library.set_busy(&on_a, 0);
    assert_eq!(goes("home busy for a moment"), "home");
    library.set_busy(&on_a, 21_000);
    assert_eq!(goes("home busy for long"), "other");
    library.set_busy(&on_b, 0);
    assert_eq!(goes("home busy for long, other for a moment"), "other");
    library.set_busy(&on_b, 21_000);
    assert_eq!(goes("both busy for long"), "home");
    waits(&on_a);
    waits(&on_b);
    library.set_ready(&on_a, false);
    assert_eq!(goes("home not ready"), "other");
    library.set_ready(&on_b, false);
    assert_eq!(goes("nobody ready"), "fallback");
    library.set_ready(&on_a, true);
    stalled(&on_a, 1);
    assert_eq!(goes("home stalled, other not ready"), "fallback");
    stalled(&on_a, 0);
    waits(&on_a);
    assert_eq!(goes("home is back"), "home");
}

#[test]
fn without_workers_and_when_paused_the_program_listens() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let address = own.local_addr().unwrap();
    library.listen(&own).unwrap();
    let cpu = cpus()[0];
    let _none = connect_from(cpu, address, 5);
    assert_eq!(accept_all(&own).len(), 5);
    let place = library.ready(&own, cpu as i32);
    assert!(!holder.pause().unwrap().on);
    let _off = connect_from(cpu, address, 5);
    assert_eq!((accept_all(&own).len(), library.accept_own(&place).len()), (5, 0));
    assert!(holder.resume().unwrap().on);
    let _on = connect_from(cpu, address, 5);
    assert_eq!((accept_all(&own).len(), library.accept_own(&place).len()), (0, 5));
}

#[test]
fn ipv6_dual_stack_wildcard_and_specific_addresses() {
    let Some((_holder, library)) = begin() else { return };
    let cpu = cpus()[0];
    let cases = [
        ("[::1]:8001", "[::1]:8001"),
        ("0.0.0.0:8002", "127.0.0.1:8002"),
        ("0.0.0.0:8003", "127.9.9.9:8003"),
        ("[::]:8004", "[::1]:8004"),
        ("[::]:8005", "127.0.0.1:8005"),
        ("[::ffff:127.0.0.1]:8006", "127.0.0.1:8006"),
    ];
    for (listens, connects) in cases {
        let own = listener_with(listens, 128, |socket| {
            if listens.starts_with('[') {
                socket.set_only_v6(false).unwrap();
            }
        });
        let place = library.ready(&own, cpu as i32);
        let _clients = connect_from(cpu, connects.parse().unwrap(), 3);
        let streams = library.accept_own(&place);
        assert_eq!((streams.len(), accept_all(&own).len()), (3, 0), "{listens} <- {connects}");
        assert!(streams.iter().all(|stream| stream.local_addr().unwrap().port() == own.local_addr().unwrap().port()));
    }
    // A listener for IPv6 only leaves IPv4 alone.
    let six = listener_with("[::]:8007", 128, |socket| socket.set_only_v6(true).unwrap());
    let place = library.ready(&six, cpu as i32);
    let refused = TcpStream::connect("127.0.0.1:8007").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    let _client = connect_from(cpu, "[::1]:8007".parse().unwrap(), 1);
    assert_eq!(library.accept_own(&place).len(), 1);
}

#[test]
fn others_keep_what_is_theirs() {
    let Some((holder, library)) = begin() else { return };
    let cpu = cpus()[0];
    // The kernel lets two listen on one port, one of them on all addresses, if both say SO_REUSEPORT.
    let reuse = |socket: &socket2::Socket| socket.set_reuse_port(true).unwrap();
    let theirs = listener_with("127.0.0.2:8000", 128, reuse);
    let own = listener_with("0.0.0.0:8000", 128, reuse);
    let place = library.ready(&own, cpu as i32);
    let to_them: SocketAddr = "127.0.0.2:8000".parse().unwrap();
    let to_us: SocketAddr = "127.0.0.1:8000".parse().unwrap();
    let _clients = (connect_from(cpu, to_them, 4), connect_from(cpu, to_us, 5));
    assert_eq!((accept_all(&theirs).len(), library.accept_own(&place).len()), (4, 5));
    assert_eq!(holder.status().unwrap().listeners[0].excluded, [to_them.to_string()]);
    // When they are gone, their address is ours; when others come, it is theirs again.
    drop(theirs);
    wait_until("the exclusion ends", || holder.status().unwrap().listeners[0].excluded.is_empty());
    let _clients = connect_from(cpu, to_them, 2);
    assert_eq!(library.accept_own(&place).len(), 2);
    let theirs = listener_with("127.0.0.2:8000", 128, reuse);
    wait_until("it is seen", || !holder.status().unwrap().listeners[0].excluded.is_empty());
    let _clients = connect_from(cpu, to_them, 2);
    assert_eq!((accept_all(&theirs).len(), library.accept_own(&place).len()), (2, 0));
    // At the very same address the kernel's choice between the two stands.
    let same = listener_with("0.0.0.0:8000", 128, reuse);
    wait_until("it is seen", || holder.status().unwrap().listeners[0].excluded.len() == 2);
    let _clients = connect_from(cpu, to_us, 40);
    let counts = (accept_all(&same).len(), accept_all(&own).len());
    assert!(counts.0 > 0 && counts.0 + counts.1 == 40, "{counts:?}");
}

#[test]
fn a_listener_on_one_device_takes_only_what_comes_by_it() {
    let Some(()) = own_network() else { return };
    let cpu = cpus()[0];
    ip("link add ksf0 type veth peer name ksf1");
    ip("link set ksf0 up");
    let holder = start();
    let library = Library::hello(&holder);
    let on = |device: &'static [u8]| move |socket: &socket2::Socket| socket.bind_device(Some(device)).unwrap();
    let on_lo = listener_with("0.0.0.0:8000", 128, on(b"lo"));
    let elsewhere = listener_with("0.0.0.0:8001", 128, on(b"ksf0"));
    let places = [library.ready(&on_lo, cpu as i32), library.ready(&elsewhere, cpu as i32)];
    let _clients = connect_from(cpu, "127.0.0.1:8000".parse().unwrap(), 3);
    let accepted = library.accept_own(&places[0]);
    assert_eq!(accepted.len(), 3);
    let device = |stream: &TcpStream| socket2::SockRef::from(stream).device().unwrap();
    assert!(accepted.iter().all(|stream| device(stream).as_deref() == Some(b"lo")), "the device is inherited");
    assert_eq!(TcpStream::connect("127.0.0.1:8001").unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn queues_cannot_be_reached_directly() {
    let Some((_holder, library)) = begin() else { return };
    for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
        let own = listener(address);
        let place = library.ready(&own, cpus()[0] as i32);
        let hidden = place.queue.local_addr().unwrap();
        let hidden = SocketAddr::new(hidden.ip().to_canonical(), hidden.port());
        assert_ne!(hidden.port(), own.local_addr().unwrap().port());
        assert!(hidden.ip().is_loopback(), "{hidden}");
        let refused = TcpStream::connect(hidden).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{hidden}");
    }
}

#[test]
fn a_syn_cookie_is_believed_by_the_queue_that_gets_it_back() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    sysctl("ipv4/tcp_syncookies", "2");
    let holder = start();
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    // Nobody is at home where the clients are: SYN and answer go to different queues in turn.
    let places: Vec<JoinedWorker> = (0..4).map(|_| library.ready(&own, b as i32)).collect();
    let mut clients = connect_from(a, own.local_addr().unwrap(), 20);
    let accepted: Vec<TcpStream> = places.iter().flat_map(|place| accept_all(&place.queue)).collect();
    assert_eq!(accepted.len(), 20);
    clients.iter_mut().for_each(|client| client.write_all(b"x").unwrap());
    accepted.into_iter().for_each(|mut stream| stream.read_exact(&mut [0]).unwrap());
}

#[test]
fn a_full_queue_overflows_to_the_fallback() {
    let Some((_holder, library)) = begin() else { return };
    let own = listener_with("127.0.0.1:0", 4, |_| {});
    let cpu = cpus()[0];
    let place = library.ready(&own, cpu as i32);
    // A limit of n takes n + 1.
    let clients = connect_from(cpu, own.local_addr().unwrap(), 10);
    assert_eq!((library.accept_own(&place).len(), accept_all(&own).len()), (5, 5));
    drop(clients);
}

#[test]
fn closing_the_listener_frees_its_port_and_refuses() {
    let Some(()) = own_network() else { return };
    for level in [Level::SkLookup, Level::ClassicBpf] {
        let holder = start_at(level);
        let library = Library::hello(&holder);
        let own = listener("127.0.0.1:0");
        let address = own.local_addr().unwrap();
        let place = library.ready(&own, cpus()[0] as i32);
        let cookie = cookie(&own);
        drop(own);
        // The library's own descriptor goes with the program's.
        library.set_ready(&place, false);
        let JoinedWorker { worker, queue, .. } = place;
        drop(queue);
        library.leave(cookie, worker, true);
        let refused = TcpStream::connect(address).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{level:?}");
        drop(std::net::TcpListener::bind(address).unwrap_or_else(|error| panic!("{level:?}: {error}")));
        assert!(holder.status().unwrap().listeners.is_empty(), "{level:?}");
        assert_eq!(
            library.ask(Request::Leave { cookie, worker: NO_WORKER, closed: 0 }, &[]).0,
            ksf_accel_proto::message::Answer::Refused { reason: Refusal::Unknown }
        );
    }
}

#[test]
fn a_listener_that_vanished_silently_is_noticed() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let address = own.local_addr().unwrap();
    library.listen(&own).unwrap();
    drop(own);
    wait_until("the holder forgets it", || holder.status().unwrap().listeners.is_empty());
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn two_holders_and_a_stranger_program_work_side_by_side() {
    let Some(()) = own_network() else { return };
    let cpu = cpus()[0];
    let holders = [start(), start()];
    let both: Vec<_> = holders.iter().map(|holder| (Library::hello(holder), listener("127.0.0.1:0"))).collect();
    let places: Vec<JoinedWorker> = both.iter().map(|(library, own)| library.ready(own, cpu as i32)).collect();
    for ((library, own), place) in both.iter().zip(&places) {
        let _clients = connect_from(cpu, own.local_addr().unwrap(), 7);
        assert_eq!(library.accept_own(place).len(), 7);
    }
    let seen = holders[0].status().unwrap().other_programs;
    assert!(matches!(&seen[..], [other] if other.starts_with("ksf_steer")), "{seen:?}");
    let [first, second] = holders;
    first.stop();
    let (library, own) = &both[1];
    let _clients = connect_from(cpu, own.local_addr().unwrap(), 3);
    assert_eq!(library.accept_own(&places[1]).len(), 3);
    assert!(second.status().unwrap().other_programs.is_empty());
    let folder = second.status().unwrap();
    assert_eq!(folder.listeners.len(), 1);
}

#[test]
fn a_program_with_reuseport_keeps_its_own_sockets_as_queues() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = start();
    let library = Library::hello(&holder);
    let reuse = |socket: &socket2::Socket| socket.set_reuse_port(true).unwrap();
    let first = listener_with("127.0.0.1:8000", 128, reuse);
    let second = listener_with("127.0.0.1:8000", 128, reuse);
    let index = library.listen(&first).unwrap();
    assert_eq!(library.listen(&second).unwrap(), index);
    let (on_a, on_b) = (library.ready(&first, a as i32), library.ready(&second, b as i32));
    assert_eq!(cookie(&on_a.queue), cookie(&first));
    let address = first.local_addr().unwrap();
    let _clients = (connect_from(a, address, 20), connect_from(b, address, 10));
    assert_eq!((accept_all(&first).len(), accept_all(&second).len()), (20, 10));
    let listeners = holder.status().unwrap().listeners;
    assert!(listeners.len() == 1 && listeners[0].own_reuseport && listeners[0].excluded.is_empty(), "{listeners:?}");
    assert_eq!(listeners[0].trouble, None);
    // Another process at the second's socket: nothing divides it between them, and that is said.
    let trouble = || holder.status().unwrap().listeners[0].trouble.clone();
    let other = joins(&holder, &second, a as i32, 1);
    wait_until("it is said", || trouble().is_some_and(|why| why.contains("2 workers share a socket")));
    drop(other);
    wait_until("it is said no more", || trouble().is_none());
    // The port is free when the program has closed both: the holder's descriptors do not keep it.
    let cookies = [cookie(&first), cookie(&second)];
    for (cookie, place) in cookies.into_iter().zip([on_a, on_b]) {
        let JoinedWorker { worker, queue, .. } = place;
        drop(queue);
        library.worker(worker).ready.store(0, std::sync::atomic::Ordering::SeqCst);
        library.leave(cookie, worker, true);
    }
    drop((first, second));
    wait_until("the port is free", || std::net::TcpListener::bind(address).is_ok());
}

#[test]
fn a_reuseport_socket_of_several_workers_of_a_process_is_divided() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = start();
    let library = Library::hello(&holder);
    let own = listener_with("127.0.0.1:8000", 128, |socket| socket.set_reuse_port(true).unwrap());
    let first = library.ready(&own, a as i32);
    assert_eq!(cookie(&first.queue), cookie(&own), "alone, it has the socket for its queue");
    let second = library.ready(&own, b as i32);
    assert_ne!(cookie(&second.queue), cookie(&own));
    // The first has lost its place, and is called again and again until it comes for another.
    assert_eq!(library.worker(first.worker).pid.load(std::sync::atomic::Ordering::SeqCst), 0);
    for _ in 0..2 {
        wait_until("it is called", || readable(&first.rescue));
        rustix::io::read(&first.rescue, &mut [0; 8]).unwrap();
    }
    let again = library.ready(&own, a as i32);
    assert_ne!(cookie(&again.queue), cookie(&own));
    let third = library.ready(&own, b as i32);
    assert_ne!(cookie(&third.queue), cookie(&own));
    let address = own.local_addr().unwrap();
    let _clients = (connect_from(a, address, 20), connect_from(b, address, 10));
    let of_b = accept_all(&second.queue).len() + accept_all(&third.queue).len();
    assert_eq!((accept_all(&again.queue).len(), of_b, accept_all(&own).len()), (20, 10, 0));
    let status = holder.status().unwrap().listeners.remove(0);
    assert!(status.trouble.is_none() && !status.own_reuseport, "{status:?}");
    // Its end ends the queues, too, which are not the program's.
    let closed = cookie(&own);
    for place in [again, second, third] {
        library.worker(place.worker).ready.store(0, std::sync::atomic::Ordering::SeqCst);
        library.leave(closed, place.worker, true);
    }
    drop((own, first));
    wait_until("nothing listens", || listening_sockets() == 0);
}

#[test]
fn homes_stay_inside_the_mask_and_are_given_back() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = start_with(|options| options.cpus = Some(vec![b as u32]));
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    let homes = || holder.status().unwrap().workers.iter().map(|worker| worker.cpu).collect::<Vec<_>>();
    let first = library.ready(&own, -1);
    assert_eq!((first.cpu, homes()), (b as i32, vec![Some(b as u32)]));
    // A thread that is bound elsewhere stays there.
    let bound = library.ready(&own, a as i32);
    assert_eq!(bound.cpu, a as i32);
    library.leave(cookie(&own), first.worker, false);
    library.leave(cookie(&own), bound.worker, false);
    assert!(homes().is_empty());
    let holder = start();
    let library = Library::hello(&holder);
    let places: Vec<i32> = (0..4).map(|_| library.ready(&own, -1).cpu).collect();
    assert_eq!(places, [a as i32, b as i32, a as i32, b as i32]);
}

#[test]
fn a_status_socket_of_the_dead_is_removed() {
    let folder = folder();
    std::fs::create_dir_all(&folder).unwrap();
    let dead = folder.join("999999999.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    // Of another type it cannot be asked; the question is what remains of a holder.
    std::fs::remove_file(&dead).unwrap();
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(socket.as_fd(), &rustix::net::SocketAddrUnix::new(&dead).unwrap()).unwrap();
    drop(socket);
    assert!(status::all(&folder).unwrap().is_empty());
    assert!(!dead.exists());
    std::fs::remove_dir(&folder).unwrap();
}
