//! What every engine owes the datagrams of a shard.

use std::net::{IpAddr, Shutdown, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;
use std::{io::Write, mem};

use ksf_test::{FAR, NEAR, PATIENCE, in_new_network, ip, own_network_or_skip, root_or_skip, skip, veth, wait_until};
use rustix::event::{PollFd, PollFlags, poll};

use super::epoll::Epoll;
use super::tests::{Bench, on_each_engine, send_datagram};
use super::uring::Uring;
use super::*;
use crate::listener::{ListenAddr, SocketOptions, open};

/// Answers everything that arrived with the same bytes.
fn echo<E: Engine>(bench: &mut Bench<E>) -> Vec<(DatagramPeer, Vec<u8>)> {
    let mut arrived = Vec::new();
    for event in mem::take(&mut bench.events) {
        let Event::Datagram { socket: 0, peer, chunk, truncated: false } = event else { panic!("{event:?}") };
        send_datagram(&mut bench.engine, peer, &chunk, &mut bench.env);
        arrived.push((peer, chunk.to_vec()));
    }
    bench.engine.flush(&mut bench.env);
    arrived
}

#[test]
fn datagrams_are_answered_to_whom_they_came_from_and_from_where_they_went() {
    on_each_engine(answers::<Epoll>, answers::<Uring>);
}

/// One by one, so that the receiver is ready for one, and many at once.
fn answers<E: Engine>() {
    let families = [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.2"), ("[::1]:0", "::1"), ("[::]:0", "::1")];
    for (listen, to) in families {
        let (listen, to): (SocketAddr, IpAddr) = (listen.parse().unwrap(), to.parse().unwrap());
        let Ok(peer) = UdpSocket::bind((to, 0)) else {
            skip(format_args!("no address {to} here"));
            continue;
        };
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let ours = open(&ListenAddr::Udp(listen), &[0], SocketOptions::default()).unwrap();
        let port = match ours.addr {
            ListenAddr::Udp(addr) => addr.port(),
            ref other => panic!("{other:?}"),
        };
        let mut bench = Bench::<E>::new();
        bench.engine.listen_datagrams(0, ours.sockets[0].as_raw_fd()).unwrap();
        for (round, count) in [1; 24].into_iter().chain([40, 1, 2, 100, 1, 1, 1]).enumerate() {
            let bytes = |number: usize| vec![number as u8; 1 + round + number];
            for number in 0..count {
                peer.send_to(&bytes(number), (to, port)).unwrap();
            }
            let mut arrived = Vec::new();
            while arrived.len() < count {
                bench.wait_for("a datagram", |events| !events.is_empty());
                arrived.extend(echo(&mut bench));
            }
            for (number, (from, got)) in arrived.into_iter().enumerate() {
                assert_eq!((from.addr, got), (peer.local_addr().unwrap(), bytes(number)), "{listen}, round {round}");
                assert_eq!(from.local.map(|(addr, _)| addr), listen.ip().is_unspecified().then_some(to));
                let mut reply = [0; 1000];
                let (length, sender) = peer.recv_from(&mut reply).unwrap();
                assert_eq!((&reply[..length], sender), (&*bytes(number), (to, port).into()), "{listen}, {round}");
            }
        }
    }
}

/// What a receive changed in the headers is set again, or the next socket would get no room for its addresses.
#[test]
fn sockets_of_both_families_take_turns() {
    on_each_engine(both_families::<Epoll>, both_families::<Uring>);
}

fn both_families<E: Engine>() {
    let Ok(ours_v6) = UdpSocket::bind("[::1]:0") else { return skip("no address ::1 here") };
    let wildcard = open(&ListenAddr::Udp("0.0.0.0:0".parse().unwrap()), &[0], SocketOptions::default()).unwrap();
    let ListenAddr::Udp(wildcard_addr) = wildcard.addr else { panic!("{wildcard:?}") };
    let ours_v4 = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at_wildcard = SocketAddr::from(([127, 0, 0, 1], wildcard_addr.port()));
    let to = [ours_v4.local_addr().unwrap(), ours_v6.local_addr().unwrap(), at_wildcard];
    let peers = ["127.0.0.1:0", "[::1]:0", "127.0.0.1:0"].map(|addr| UdpSocket::bind(addr).unwrap());
    let mut bench = Bench::<E>::new();
    for (number, fd) in [ours_v4.as_raw_fd(), ours_v6.as_raw_fd(), wildcard.sockets[0].as_raw_fd()].iter().enumerate() {
        bench.engine.listen_datagrams(number as u32, *fd).unwrap();
    }
    for round in 0..60 {
        let at = round % 3;
        let count = [1, 1, 5][round / 3 % 3];
        for _ in 0..count {
            peers[at].send_to(b"datagram", to[at]).unwrap();
        }
        bench.wait_for("datagrams", |events| events.len() >= count);
        for event in mem::take(&mut bench.events) {
            let Event::Datagram { socket, peer, .. } = event else { panic!("{event:?}") };
            assert_eq!((socket as usize, peer.addr), (at, peers[at].local_addr().unwrap()));
            assert_eq!(peer.local.map(|(addr, _)| addr), (at == 2).then_some(to[at].ip()));
        }
    }
}

/// The address of a group of hosts is not one to send from.
#[test]
fn datagrams_to_many_hosts_are_answered_from_an_address_of_this_one() {
    if root_or_skip("broadcasts").is_some() {
        on_each_engine(|| in_new_network(answers_to_many::<Epoll>), || in_new_network(answers_to_many::<Uring>));
    }
}

fn answers_to_many<E: Engine>() {
    let far = veth();
    let cases = [
        ("0.0.0.0:0", "10.9.8.2:0", "10.9.8.255"),
        ("0.0.0.0:0", "10.9.8.2:0", "255.255.255.255"),
        ("0.0.0.0:0", "10.9.8.2:0", "224.0.0.1"),
        ("[::]:0", "[fd09::2]:0", "ff02::1"),
    ];
    for (listen, from, to) in cases {
        let ours = open(&ListenAddr::Udp(listen.parse().unwrap()), &[0], SocketOptions::default()).unwrap();
        let ListenAddr::Udp(addr) = ours.addr else { panic!("{ours:?}") };
        let mut bench = Bench::<E>::new();
        bench.engine.listen_datagrams(0, ours.sockets[0].as_raw_fd()).unwrap();
        let peer = far.run(move || {
            let peer = UdpSocket::bind(from).unwrap();
            peer.set_read_timeout(Some(PATIENCE)).unwrap();
            peer.set_broadcast(true).unwrap();
            // Where there is no route, the device tells where to.
            socket2::SockRef::from(&peer).bind_device(Some(FAR.0.as_bytes())).unwrap();
            let to = (to.parse::<IpAddr>().unwrap(), addr.port());
            // IPv6 has routes on a device once the other end is seen to be up.
            wait_until(format_args!("a route to {to:?}"), || peer.send_to(b"who is there?", to).is_ok());
            peer
        });
        bench.wait_for("the question", |events| !events.is_empty());
        echo(&mut bench);
        let stats = &bench.env.stats;
        assert_eq!((stats.datagrams_out.value(), stats.datagrams_unsent.value()), (1, 0), "to {to}");
        let (_, answered_from) = peer.recv_from(&mut [0; 20]).unwrap();
        assert!(NEAR.1.contains(&&*answered_from.ip().to_string()), "to {to}: {answered_from}");
    }
}

#[test]
fn replies_that_go_through_the_kernel_together_arrive_apart() {
    on_each_engine(joined::<Epoll>, joined::<Uring>);
}

fn joined<E: Engine>() {
    for (listen, to) in
        [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.2"), ("[::1]:0", "::1"), ("[::]:0", "::1")]
    {
        let (listen, to): (SocketAddr, IpAddr) = (listen.parse().unwrap(), to.parse().unwrap());
        let peers = [(); 3].map(|()| UdpSocket::bind((to, 0)));
        if peers.iter().any(Result::is_err) {
            skip(format_args!("no address {to} here"));
            continue;
        }
        let peers = peers.map(Result::unwrap);
        // Nothing is read before all is sent, and under an XDP program on lo a datagram takes a page and more.
        peers.iter().for_each(|peer| socket2::SockRef::from(peer).set_recv_buffer_size(1 << 20).unwrap());
        // The last one takes them as they came through the kernel.
        let on: libc::c_int = 1;
        crate::listener::set_option(&peers[2], libc::SOL_UDP, libc::UDP_GRO, &on).unwrap();
        let ours = open(&ListenAddr::Udp(listen), &[0], SocketOptions::default()).unwrap();
        let mut bench = Bench::<E>::new();
        bench.engine.listen_datagrams(0, ours.sockets[0].as_raw_fd()).unwrap();
        let local = listen.ip().is_unspecified().then_some((to, 0));
        let lengths = [9, 9, 9, 4, 5, 5, 0, 5, 1232, 1232, 1233, 1233, 7].into_iter().chain([30; 70]);
        let replies: Vec<_> = lengths.enumerate().map(|(number, length)| vec![number as u8; length]).collect();
        for bytes in &replies {
            // In turn, and then each alone.
            for peer in &peers[..2] {
                let peer = DatagramPeer { addr: peer.local_addr().unwrap(), local };
                send_datagram(&mut bench.engine, peer, bytes, &mut bench.env);
            }
        }
        for peer in &peers {
            let peer = DatagramPeer { addr: peer.local_addr().unwrap(), local };
            replies.iter().for_each(|bytes| send_datagram(&mut bench.engine, peer, bytes, &mut bench.env));
        }
        bench.engine.flush(&mut bench.env);
        assert_eq!(bench.env.stats.datagrams_out.value(), 5 * replies.len() as u64);
        let mut got = vec![0; 70_000];
        for peer in &peers[..2] {
            peer.set_read_timeout(Some(PATIENCE)).unwrap();
            for bytes in replies.iter().chain(&replies) {
                let (length, from) = peer.recv_from(&mut got).unwrap();
                assert_eq!(&got[..length], bytes);
                assert_eq!(from.ip(), to);
            }
        }
        peers[2].set_read_timeout(Some(PATIENCE)).unwrap();
        let (mut whole, mut packets) = (Vec::new(), 0);
        while whole.len() < replies.concat().len() {
            let length = peers[2].recv(&mut got).unwrap();
            whole.extend_from_slice(&got[..length]);
            packets += 1;
        }
        assert_eq!(whole, replies.concat());
        assert!(packets < replies.len() / 2, "{packets} packets for {} replies", replies.len());
    }
}

/// The kernel then refuses them together, and takes them one by one.
#[test]
fn replies_that_are_too_long_for_the_path_together_leave_one_by_one() {
    if own_network_or_skip("narrow paths").is_some() {
        ip("link set lo mtu 600");
        on_each_engine(narrow_path::<Epoll>, narrow_path::<Uring>);
    }
}

fn narrow_path<E: Engine>() {
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    let to = DatagramPeer { addr: peer.local_addr().unwrap(), local: None };
    for length in [500, 1_000, 500] {
        let replies: Vec<_> = (0..20).map(|number| vec![number; length]).collect();
        replies.iter().for_each(|bytes| send_datagram(&mut bench.engine, to, bytes, &mut bench.env));
        bench.engine.flush(&mut bench.env);
        let mut got = [0; 2_000];
        for bytes in replies {
            let length = peer.recv(&mut got).unwrap();
            assert_eq!(got[..length], bytes);
        }
    }
    assert_eq!((bench.env.stats.datagrams_out.value(), bench.env.stats.datagrams_unsent.value()), (60, 0));
}

/// Only replies that leave when they are alone show that the kernel did not want them joined.
#[test]
fn replies_to_others_are_joined_whatever_peer_the_kernel_refuses() {
    on_each_engine(joined_beside_refused::<Epoll>, joined_beside_refused::<Uring>);
}

fn joined_beside_refused<E: Engine>() {
    const COUNT: usize = 20;
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    let on: libc::c_int = 1;
    crate::listener::set_option(&peer, libc::SOL_UDP, libc::UDP_GRO, &on).unwrap();
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    // A broadcast that was not allowed (EACCES), and no port at all (EINVAL, as joining may be answered with).
    for refused in ["127.255.255.255:9", "127.0.0.1:0"] {
        let before = [bench.env.stats.datagrams_out.value(), bench.env.stats.datagrams_unsent.value()];
        for to in [refused.parse().unwrap(), peer.local_addr().unwrap()] {
            let to = DatagramPeer { addr: to, local: None };
            (0..COUNT).for_each(|_| send_datagram(&mut bench.engine, to, b"a reply", &mut bench.env));
        }
        bench.engine.flush(&mut bench.env);
        let after = [bench.env.stats.datagrams_out.value(), bench.env.stats.datagrams_unsent.value()];
        assert_eq!([after[0] - before[0], after[1] - before[1]], [COUNT as u64; 2], "{refused}");
        let length = peer.recv(&mut [0; 1_000]).unwrap();
        assert_eq!(length, COUNT * b"a reply".len(), "beside {refused} they leave one by one");
    }
}

#[test]
fn datagrams_longer_than_a_slot_are_marked_and_the_others_are_not() {
    on_each_engine(truncated::<Epoll>, truncated::<Uring>);
}

fn truncated<E: Engine>() {
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    let slot_bytes = bench.env.pool.slot_bytes();
    let long = [slot_bytes + 1, slot_bytes, 20_000];
    let lengths = long.repeat(3).into_iter().map(|length| vec![length]).chain([vec![9, slot_bytes + 1, 0, 20_000, 9]]);
    for lengths in lengths {
        for length in &lengths {
            peer.send_to(&vec![7; *length], ours.local_addr().unwrap()).unwrap();
        }
        bench.wait_for("all of them", |events| events.len() >= lengths.len());
        for (event, length) in mem::take(&mut bench.events).into_iter().zip(lengths) {
            let Event::Datagram { chunk, truncated, .. } = event else { panic!("{event:?}") };
            assert_eq!((truncated, chunk.len()), (length > slot_bytes, length.min(slot_bytes)));
        }
    }
}

#[test]
fn datagrams_that_the_kernel_refuses_do_not_hold_up_the_others() {
    on_each_engine(refused::<Epoll>, refused::<Uring>);
}

fn refused<E: Engine>() {
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let reader = UdpSocket::bind("127.0.0.1:0").unwrap();
    reader.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    let to = |addr: SocketAddr| DatagramPeer { addr, local: None };
    let good = to(reader.local_addr().unwrap());
    let nowhere = to("127.0.0.1:0".parse().unwrap());
    let other_family = to("[::1]:9".parse().unwrap());
    // With others, and alone.
    for together in [true, false] {
        let before = [bench.env.stats.datagrams_out.value(), bench.env.stats.datagrams_unsent.value()];
        let too_long = vec![0; 65_508];
        let replies =
            [(nowhere, &b"0"[..]), (good, b"1"), (other_family, b"2"), (good, b""), (good, &too_long), (good, b"3")];
        for (peer, bytes) in replies {
            send_datagram(&mut bench.engine, peer, bytes, &mut bench.env);
            if !together {
                bench.engine.flush(&mut bench.env);
            }
        }
        bench.engine.flush(&mut bench.env);
        let after = [bench.env.stats.datagrams_out.value(), bench.env.stats.datagrams_unsent.value()];
        assert_eq!([after[0] - before[0], after[1] - before[1]], [3, 3]);
        let mut got = [0; 9];
        for expected in [&b"1"[..], b"", b"3"] {
            let length = reader.recv(&mut got).unwrap();
            assert_eq!(&got[..length], expected);
        }
    }
}

/// What a send is told may be of a datagram that left before: of those that it was to send none is at fault.
#[test]
fn an_error_of_an_earlier_datagram_costs_no_later_one() {
    on_each_engine(earlier_error::<Epoll>, earlier_error::<Uring>);
}

/// Whether an error is reported of a socket, now or after a while.
fn has_error(socket: &UdpSocket, patience: Duration) -> bool {
    let timeout = patience.try_into().unwrap();
    poll(&mut [PollFd::new(socket, PollFlags::empty())], Some(&timeout)).unwrap() > 0
}

fn earlier_error<E: Engine>() {
    const COUNT: usize = 20;
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    let at = peer.local_addr().unwrap();
    ours.connect(at).unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    let to = DatagramPeer { addr: at, local: None };
    drop(peer);
    let mut peer = None;
    for lengths in [[7; COUNT], std::array::from_fn(|number| 1 + number), [0; COUNT]] {
        // No socket is bound to the port of the first datagram, so an error is pending at once; then one is bound.
        drop(peer.take());
        send_datagram(&mut bench.engine, to, b"anybody?", &mut bench.env);
        bench.engine.flush(&mut bench.env);
        assert!(has_error(&ours, PATIENCE), "it was not told");
        let there = peer.insert(UdpSocket::bind(at).unwrap());
        there.set_read_timeout(Some(PATIENCE)).unwrap();
        let before = bench.env.stats.datagrams_unsent.value();
        for length in lengths {
            send_datagram(&mut bench.engine, to, &vec![7; length], &mut bench.env);
        }
        bench.engine.flush(&mut bench.env);
        assert_eq!(bench.env.stats.datagrams_unsent.value() - before, 0, "of {lengths:?}");
        for length in lengths {
            assert_eq!(there.recv(&mut [0; 100]).unwrap(), length);
        }
    }
}

/// A socket that was handed over may be connected: it then hears that its peer is gone.
#[test]
fn a_socket_whose_peer_is_gone_goes_on() {
    on_each_engine(peer_gone::<Epoll>, peer_gone::<Uring>);
}

fn peer_gone<E: Engine>() {
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = peer.local_addr().unwrap();
    ours.connect(at).unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    drop(peer);
    let gone = DatagramPeer { addr: at, local: None };
    for count in [1, 1, 5] {
        for _ in 0..count {
            send_datagram(&mut bench.engine, gone, b"anybody?", &mut bench.env);
        }
        bench.engine.flush(&mut bench.env);
        let wait = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
        bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
    }
    let stats = &bench.env.stats;
    assert_eq!(stats.datagrams_out.value() + stats.datagrams_unsent.value(), 7);
    assert!(bench.events.is_empty(), "{:?}", bench.events);
    let peer = UdpSocket::bind(at).unwrap();
    peer.send_to(b"me", ours.local_addr().unwrap()).unwrap();
    bench.wait_for("a datagram", |events| matches!(events, [Event::Datagram { .. }]));
}

/// Epoll reports an error also of a socket that it was not asked about, in every wait.
#[test]
fn an_error_of_a_socket_that_is_not_read_is_taken() {
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = peer.local_addr().unwrap();
    ours.connect(at).unwrap();
    let mut bench = Bench::<Epoll>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    bench.engine.set_datagrams_reading(0, false);
    drop(peer);
    send_datagram(&mut bench.engine, DatagramPeer { addr: at, local: None }, b"anybody?", &mut bench.env);
    bench.engine.flush(&mut bench.env);
    bench.wait();
    assert!(ours.take_error().unwrap().is_none(), "it ends every wait");
    let peer = UdpSocket::bind(at).unwrap();
    peer.send_to(b"me", ours.local_addr().unwrap()).unwrap();
    bench.engine.set_datagrams_reading(0, true);
    bench.wait_for("a datagram", |events| matches!(events, [Event::Datagram { .. }]));
}

/// A socket that was handed over may have IP_RECVERR: errors then wait in a queue, and are reported until they are taken.
#[test]
fn errors_in_the_queue_of_a_socket_end_no_wait_for_ever() {
    // The ring is not asked about sockets that are not read.
    on_each_engine(|| queued_errors::<Epoll>(&[true, false]), || queued_errors::<Uring>(&[true]));
}

fn queued_errors<E: Engine>(reads: &[bool]) {
    let on: libc::c_int = 1;
    for (host, level, option) in
        [("127.0.0.1", libc::IPPROTO_IP, libc::IP_RECVERR), ("::1", libc::IPPROTO_IPV6, libc::IPV6_RECVERR)]
    {
        let host: IpAddr = host.parse().unwrap();
        let Ok(ours) = UdpSocket::bind((host, 0)) else {
            skip(format_args!("no address {host} here"));
            continue;
        };
        crate::listener::set_option(&ours, level, option, &on).unwrap();
        let at = UdpSocket::bind((host, 0)).unwrap().local_addr().unwrap();
        for &reads in reads {
            let mut bench = Bench::<E>::new();
            bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
            bench.engine.set_datagrams_reading(0, reads);
            for _ in 0..3 {
                send_datagram(&mut bench.engine, DatagramPeer { addr: at, local: None }, b"anybody?", &mut bench.env);
                bench.engine.flush(&mut bench.env);
            }
            assert!(has_error(&ours, PATIENCE), "{host}: it was not told");
            // A wait that nothing ends takes its time.
            let wait = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
            let mut waits = 0;
            while has_error(&ours, Duration::ZERO) {
                bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
                assert!(bench.events.is_empty(), "{:?}", bench.events);
                waits += 1;
                assert!(waits < 1000, "{host}, read: {reads}: it ends every wait");
            }
        }
    }
}

/// A socket that was handed over may have other holders, who may shut it down: poll reports that for ever.
#[test]
fn a_socket_that_is_shut_down_ends_no_wait_for_ever() {
    on_each_engine(shut_down::<Epoll>, shut_down::<Uring>);
}

fn shut_down<E: Engine>() {
    for (how, reads) in [(Shutdown::Read, true), (Shutdown::Both, true), (Shutdown::Both, false)] {
        let (ours, peer) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let mut bench = Bench::<E>::new();
        bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
        bench.engine.set_datagrams_reading(0, reads);
        peer.send_to(b"before", ours.local_addr().unwrap()).unwrap();
        // It has no peer, which is told, and is shut down all the same (inet_shutdown).
        let _ = socket2::SockRef::from(&ours).shutdown(how);
        if reads {
            bench.wait_for("what came before", |events| matches!(events, [Event::Datagram { .. }]));
            bench.events.clear();
        }
        // A wait that nothing ends takes its time.
        let timeout = Duration::from_millis(50);
        let wait = Wait { timeout: Some(timeout), gather: None };
        let mut waits = 0;
        loop {
            let start = Instant::now();
            bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
            assert!(bench.events.is_empty(), "{:?}", bench.events);
            waits += 1;
            assert!(waits < 1000, "{how:?}, read: {reads}: it ends every wait");
            if start.elapsed() >= timeout {
                break;
            }
            bench.engine.set_datagrams_reading(0, reads);
        }
        bench.engine.shutdown();

        let mut bench = Bench::<E>::new();
        let error = bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap_err();
        assert!(error.to_string().contains("shut down"), "{error}");
    }
}

/// Nobody answers for the peer's address (ARP), so replies fill the socket until somebody does.
#[test]
fn replies_that_wait_for_room_leave_a_socket_that_is_shut_down() {
    if own_network_or_skip("a neighbour that does not answer").is_some() {
        let _far = veth();
        on_each_engine(full_and_shut_down::<Epoll>, full_and_shut_down::<Uring>);
    }
}

fn full_and_shut_down<E: Engine>() {
    const COUNT: usize = 20;
    let silent: SocketAddr = "10.9.8.77:9".parse().unwrap();
    let cases = [(Shutdown::Read, true, true), (Shutdown::Read, true, false), (Shutdown::Read, false, true)];
    for (how, fills_before, reads) in cases.into_iter().chain([(Shutdown::Both, true, true)]) {
        ip(&format!("neigh flush dev {} nud all", NEAR.0));
        let ours = UdpSocket::bind((NEAR.1[0], 0)).unwrap();
        // The kernel makes this the least that it allows.
        socket2::SockRef::from(&ours).set_send_buffer_size(1).unwrap();
        let mut bench = Bench::<E>::new();
        bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
        bench.engine.set_datagrams_reading(0, reads);
        let fill = |bench: &mut Bench<E>| {
            for _ in 0..COUNT {
                let to = DatagramPeer { addr: silent, local: None };
                send_datagram(&mut bench.engine, to, &[7; 1000], &mut bench.env);
                bench.engine.flush(&mut bench.env);
            }
            assert!(bench.env.stats.datagrams_out.value() < COUNT as u64, "the socket has room for all of them");
        };
        if fills_before {
            fill(&mut bench);
        }
        // It has no peer, which is told, and is shut down all the same (inet_shutdown).
        let _ = socket2::SockRef::from(&ours).shutdown(how);
        // A wait that takes its time was ended by nothing: the engine has heard of the end.
        let timeout = Duration::from_millis(50);
        let wait = Wait { timeout: Some(timeout), gather: None };
        let mut waits = 0;
        loop {
            let start = Instant::now();
            bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
            waits += 1;
            assert!(waits < 1000, "{how:?}: it ends every wait");
            if start.elapsed() >= timeout {
                break;
            }
        }
        if !fills_before {
            fill(&mut bench);
        }
        ip(&format!("neigh replace {} lladdr 02:00:00:00:00:77 dev {} nud permanent", silent.ip(), NEAR.0));
        let gone = |bench: &Bench<E>| (bench.env.stats.datagrams_out.value(), bench.env.stats.datagrams_unsent.value());
        let start = Instant::now();
        while gone(&bench).0 + gone(&bench).1 < COUNT as u64 {
            assert!(start.elapsed() < PATIENCE, "{how:?}: replies stay: {:?} left", gone(&bench));
            bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
        }
        // A socket that is shut down for sending refuses them.
        assert_eq!(gone(&bench).1 > 0, how == Shutdown::Both, "{how:?}: {:?}", gone(&bench));
    }
}

/// While every wait submits something, and none sleeps.
#[test]
fn requests_to_the_ring_do_not_hide_datagrams() {
    if let Err(error) = EngineKind::Uring.probe() {
        return skip(format_args!("needs io_uring ({error})"));
    }
    const WAITS_MAX: usize = 20;
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (stream, _other) = UnixStream::pair().unwrap();
    let conn = ConnKey { index: 0, generation: 0 };
    let mut bench = Bench::<Uring>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    bench.engine.open(conn, stream.as_raw_fd(), Reading::On);
    let send = |count| (0..count).for_each(|_| _ = peer.send_to(b"datagram", ours.local_addr().unwrap()).unwrap());
    let mut readings = [Reading::Head, Reading::On].into_iter().cycle();
    // One datagram leaves the socket unarmed, several leave it busy, and a lack of slots leaves it with one that it knows of.
    for (before, has_slots) in [(1, true), (100, true), (1, false)] {
        for timeout in [Duration::ZERO, Duration::from_micros(1)] {
            let what = format!("{before} before, slots: {has_slots}, {timeout:?}");
            let taken: Vec<_> = std::iter::from_fn(|| bench.env.pool.take().filter(|_| !has_slots)).collect();
            let exhausted = bench.env.stats.slots_exhausted.value();
            send(before);
            while if has_slots {
                bench.events.len() < before
            } else {
                bench.env.stats.slots_exhausted.value() == exhausted
            } {
                bench.wait();
            }
            drop(taken);
            let expected = before + 1;
            send(1);
            for waits in 0.. {
                if bench.events.len() == expected {
                    break;
                }
                assert!(waits < WAITS_MAX, "{what}: {} of {expected} in {waits} waits", bench.events.len());
                bench.engine.set_reading(conn, readings.next().unwrap());
                let wait = Wait { timeout: Some(timeout), gather: None };
                bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
            }
            bench.events.clear();
        }
    }
}

#[test]
fn a_busy_datagram_socket_leaves_others_their_turn() {
    on_each_engine(busy_socket::<Epoll>, busy_socket::<Uring>);
}

fn busy_socket<E: Engine>() {
    const AT_ONCE: usize = 20;
    /// Receives of as many datagrams as are received without a look at others, and the receives around them.
    const WAITS_MAX: usize = 16;
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (stream, mut other) = UnixStream::pair().unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    bench.engine.open(ConnKey { index: 0, generation: 0 }, stream.as_raw_fd(), Reading::On);
    let is_bytes = |event: &Event| matches!(event, Event::Received { .. });
    for round in 0..20 {
        let (mut sent, mut arrived, mut waits) = (0, 0, 0);
        while bench.count(is_bytes) == 0 {
            assert!(waits < WAITS_MAX, "round {round}: the stream was not looked at");
            for _ in 0..AT_ONCE {
                peer.send_to(b"datagram", ours.local_addr().unwrap()).unwrap();
            }
            if waits == 3 {
                other.write_all(b"bytes").unwrap();
            }
            (sent, waits) = (sent + AT_ONCE, waits + 1);
            bench.wait();
            arrived += bench.count(|event| matches!(event, Event::Datagram { .. }));
            bench.events.retain(is_bytes);
        }
        bench.events.clear();
        while arrived < sent {
            bench.wait();
            arrived += bench.events.drain(..).count();
        }
    }
}

#[test]
fn datagrams_wait_in_their_socket_while_no_slot_is_free() {
    on_each_engine(no_slot::<Epoll>, no_slot::<Uring>);
}

fn no_slot<E: Engine>() {
    let ours = UdpSocket::bind("127.0.0.1:0").unwrap();
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut bench = Bench::<E>::new();
    bench.engine.listen_datagrams(0, ours.as_raw_fd()).unwrap();
    let in_use = bench.env.pool.in_use();
    for count in [1, 1, 1, 30, 1] {
        // Nothing comes, and what a busy receiver was ready with goes back.
        let wait = Wait { timeout: Some(Duration::from_micros(1)), gather: None };
        bench.engine.wait(&mut bench.env, wait, &mut bench.events).unwrap();
        assert_eq!((bench.events.len(), bench.env.pool.in_use()), (0, in_use), "an idle receiver holds no slot");
        let mut taken: Vec<_> = std::iter::from_fn(|| bench.env.pool.take()).collect();
        for number in 0..count {
            peer.send_to(&[number], ours.local_addr().unwrap()).unwrap();
        }
        let before = bench.env.stats.slots_exhausted.value();
        while bench.env.stats.slots_exhausted.value() < before + 3 {
            bench.wait();
            assert!(bench.events.is_empty(), "{:?}", bench.events);
        }
        // One comes back, and then all.
        taken.pop();
        bench.wait_for("one", |events| !events.is_empty());
        assert_eq!(bench.events.len(), 1);
        drop(taken);
        bench.wait_for("all", |events| events.len() == usize::from(count));
        for (number, event) in mem::take(&mut bench.events).into_iter().enumerate() {
            let Event::Datagram { chunk, .. } = event else { panic!("{event:?}") };
            assert_eq!(*chunk, [number as u8]);
        }
    }
}
