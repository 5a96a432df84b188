//! What comes in goes out: every size, in any pieces, over every kind of socket, on every engine.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use crate::common::net::*;
use ksf::Server;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use socket2::{Domain, Protocol, Socket, Type};

/// A datagram or message is never longer here.
const SIZE_MAX: usize = 70_000;

/// Sends `size` bytes in pieces and reads them back. Pieces are written with pauses of nothing at all: what the server
/// sees is up to the kernel, which joins and splits as it likes.
fn round_trip(peer: &mut (impl Read + Write), bytes: &[u8], got: &mut [u8], random: &mut Random, what: &str) {
    let mut rest = bytes;
    while !rest.is_empty() {
        // Mostly few pieces: their number is what takes time.
        let length = if random.one_in(2) { rest.len() } else { random.within(1..=rest.len()) };
        peer.write_all(&rest[..length]).unwrap();
        rest = &rest[length..];
    }
    let got = &mut got[..bytes.len()];
    peer.read_exact(got).unwrap_or_else(|error| panic!("{what}: {} bytes: {error}", bytes.len()));
    assert!(got == bytes, "{what}: {} bytes came back changed", bytes.len());
}

#[test]
fn every_size_from_1_to_70_000() {
    own_network();
    let source = pattern(SIZE_MAX + 256, 0);
    std::thread::scope(|scope| {
        for engine in engines() {
            let source = &source;
            scope.spawn(move || {
                let server = one_shard(engine, ANY, Limits::default(), Arc::new(Echo));
                let mut peer = connect(&server);
                let mut random = Random::of_test(1);
                let mut got = vec![0; SIZE_MAX];
                for size in 1..=SIZE_MAX {
                    let bytes = &source[size % 256..][..size];
                    round_trip(&mut peer, bytes, &mut got, &mut random, engine.name());
                }
                until_count(&server, "bytes_out", (SIZE_MAX * (SIZE_MAX + 1) / 2) as u64);
            });
        }
    });
}

#[test]
fn ipv6_and_unix_in_pieces() {
    own_network();
    let sizes = [1, 2, 2047, 2048, 2049, 16_383, 16_384, 16_385, 32_768, 65_535, SIZE_MAX];
    let source = pattern(SIZE_MAX, 0);
    let mut got = vec![0; SIZE_MAX];
    let mut random = Random::of_test(2);
    for engine in engines() {
        let server = all_shards(engine, "tcp:[::1]:0", Limits::default(), Arc::new(Echo));
        let mut peer = connect(&server);
        for size in sizes {
            round_trip(&mut peer, &source[..size], &mut got, &mut random, engine.name());
        }
        let folder = Folder::new();
        let path = folder.path("echo");
        let server = all_shards(engine, &format!("unix:{}", path.display()), Limits::default(), Arc::new(Echo));
        // Several: all shards accept from one socket.
        let mut peers: Vec<_> = (0..16).map(|_| UnixStream::connect(&path).unwrap()).collect();
        for size in sizes {
            for peer in &mut peers {
                peer.set_read_timeout(Some(PATIENCE)).unwrap();
                round_trip(peer, &source[..size], &mut got, &mut random, engine.name());
            }
        }
        peers[0].write_all(b"last words").unwrap();
        peers[0].shutdown(Shutdown::Write).unwrap();
        expect(&mut peers[0], b"last words");
        expect_end(&mut peers[0]);
        drop(server);
        assert!(!path.exists(), "the path is left behind");
    }
}

#[test]
fn half_close_after_the_last_byte() {
    own_network();
    let bytes = pattern(300_000, 0);
    for engine in engines() {
        let server = all_shards(engine, ANY, Limits::default(), Arc::new(Echo));
        let mut peer = connect(&server);
        let mut writer = peer.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                writer.write_all(&bytes).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            });
            let mut got = Vec::new();
            peer.read_to_end(&mut got).unwrap();
            assert!(got == bytes, "{engine}: {} of {} bytes came back", got.len(), bytes.len());
        });
        until_count(&server, "closed_by_peer", 1);
        server.drain().unwrap();
    }
}

#[test]
fn datagrams_come_back_from_the_address_they_were_sent_to() {
    for engine in engines_in_own_network() {
        for at in ["udp:127.0.0.1:0", "udp:0.0.0.0:0", "udp:[::1]:0", "udp:[::]:0"] {
            let server = all_shards(engine, at, Limits::default(), Arc::new(Echo));
            let mut to = addr(&server);
            match to.ip().is_unspecified() {
                true if to.is_ipv4() => to.set_ip("127.0.0.3".parse().unwrap()),
                true => to.set_ip("::1".parse().unwrap()),
                false => {}
            }
            // Connected: a reply from another address than the one asked would not arrive.
            let peer = datagrams(to);
            for size in [0, 1, 1000, 9000, 16_000] {
                let sent = pattern(size, 0);
                peer.send(&sent).unwrap();
                let mut got = vec![0; 20_000];
                let length = peer.recv(&mut got).unwrap_or_else(|error| panic!("{engine} {at} {size}: {error}"));
                assert!(got[..length] == sent, "{engine} {at}: {size} bytes came back as {length}");
            }
        }
    }
}

/// Sends a datagram from an address and a port that another socket has; false where that is not permitted.
fn send_forged(from: SocketAddr, to: SocketAddr, body: &[u8]) -> bool {
    let socket = match Socket::new(Domain::for_address(from), Type::RAW, Some(Protocol::UDP)) {
        Ok(socket) => socket,
        Err(error) => {
            skip(format_args!("needs CAP_NET_RAW ({error})"));
            return false;
        }
    };
    let length = 8 + body.len() as u16;
    let mut datagram = [from.port(), to.port(), length, 0].map(u16::to_be_bytes).concat();
    datagram.extend_from_slice(body);
    if let (SocketAddr::V6(source), SocketAddr::V6(destination)) = (from, to) {
        // RFC 8200, section 8.1: over IPv6 the checksum is not optional.
        let mut summed = [source.ip().octets(), destination.ip().octets()].concat();
        summed.extend_from_slice(&u32::from(length).to_be_bytes());
        summed.extend_from_slice(&17_u32.to_be_bytes());
        summed.extend_from_slice(&datagram);
        let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
        let mut sum: u32 = summed.chunks(2).map(word).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        datagram[6..8].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    }
    socket.bind(&SocketAddr::new(from.ip(), 0).into()).unwrap();
    socket.send_to(&datagram, &SocketAddr::new(to.ip(), 0).into()).unwrap();
    true
}

/// A reply to one would come back to the server, and be answered again, for ever.
#[test]
fn datagrams_from_own_sockets_are_dropped_and_counted() {
    for engine in engines_in_own_network() {
        for (at, from, to) in [
            ("127.0.0.1:0", "127.0.0.1", "127.0.0.1"),
            ("0.0.0.0:0", "127.0.0.1", "127.0.0.1"),
            ("0.0.0.0:0", "127.0.0.2", "127.0.0.3"),
            ("[::1]:0", "::1", "::1"),
            ("[::]:0", "::1", "::1"),
        ] {
            let server = one_shard(engine, &format!("udp:{at}"), Limits::default(), Arc::new(Echo));
            let at_ip = |ip: &str| SocketAddr::new(ip.parse().unwrap(), addr(&server).port());
            if !send_forged(at_ip(from), at_ip(to), b"forged") {
                return;
            }
            until_count(&server, "datagrams_from_self", 1);
            // Any other peer is answered.
            let peer = datagrams(at_ip(to));
            peer.send(b"hello").unwrap();
            let mut got = [0; 9];
            assert_eq!(peer.recv(&mut got).unwrap(), 5, "{engine} {at}");
            // What it sends may arrive before it is counted.
            until_count(&server, "datagrams_out", 1);
            assert_eq!(count(&server, "datagrams_in"), 2, "{engine} {at}");
        }
        // A socket that both families reach, and another socket of the same server.
        let socket = UdpSocket::bind("[::]:0").unwrap();
        let both = socket.local_addr().unwrap().port();
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let builder = Server::builder().engine(engine).cpus(Some(cpus)).inherit(socket.into(), Arc::new(Echo), None);
        let server = builder.listen("udp:127.0.0.1:0".parse().unwrap(), Arc::new(Echo), None).start().unwrap();
        let ports = server.listeners().iter().map(|listener| match listener.addr {
            ListenAddr::Udp(at) => at.port(),
            _ => panic!("no port"),
        });
        let other = ports.into_iter().find(|port| *port != both).unwrap();
        let at_port = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        send_forged(at_port(both), at_port(both), b"forged");
        until_count(&server, "datagrams_from_self", 1);
        send_forged(at_port(other), at_port(both), b"forged");
        send_forged(at_port(both), at_port(other), b"forged");
        until_count(&server, "datagrams_from_self", 3);
        assert_eq!(count(&server, "datagrams_out"), 0, "{engine}");
    }
}

/// The owner of a forged sender's address gets as many bytes as were sent in its name, and no more.
#[test]
fn a_forged_datagram_is_answered_with_as_many_bytes_to_its_sender() {
    own_network();
    for engine in engines() {
        for (at, victim) in [("udp:127.0.0.1:0", "127.0.0.2:0"), ("udp:[::1]:0", "[::1]:0")] {
            let server = one_shard(engine, at, Limits::default(), Arc::new(Echo));
            let victim = UdpSocket::bind(victim).unwrap();
            victim.set_read_timeout(Some(PATIENCE)).unwrap();
            for size in [0, 1, 1000] {
                let sent = pattern(size, 0);
                if !send_forged(victim.local_addr().unwrap(), addr(&server), &sent) {
                    return;
                }
                // Its own next datagram is the next one that is answered.
                victim.send_to(b"own", addr(&server)).unwrap();
                let mut got = [0; 2000];
                for expected in [&sent[..], b"own"] {
                    let (length, from) = victim.recv_from(&mut got).unwrap();
                    assert_eq!((&got[..length], from), (expected, addr(&server)), "{engine} {at}");
                }
            }
        }
    }
}

#[test]
fn datagrams_that_do_not_fit_are_dropped_and_counted() {
    for engine in engines_in_own_network() {
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let server = Server::builder()
            .engine(engine)
            .cpus(Some(cpus))
            .slots(4096, 512)
            .limits(Limits { message_bytes_max: 3000, ..Limits::default() })
            .listen("udp:127.0.0.1:0".parse().unwrap(), Arc::new(Echo), None)
            .start()
            .unwrap();
        let peer = datagrams(addr(&server));
        // Longer than a slot; longer than the limit; just right.
        for size in [60_000, 4097, 3001, 3000] {
            peer.send(&pattern(size, 0)).unwrap();
        }
        let mut got = vec![0; 65_536];
        let length = peer.recv(&mut got).unwrap();
        assert!(got[..length] == pattern(3000, 0), "{engine}: {length} bytes");
        assert_eq!((count(&server, "datagrams_in"), count(&server, "datagrams_oversized")), (4, 3), "{engine}");
        until_count(&server, "datagrams_out", 1);
    }
}

/// Socket activation: whoever made the socket may have left it in any mode, and engines want different ones.
#[test]
fn inherited_sockets_in_either_mode() {
    for engine in engines_in_own_network() {
        for nonblocking in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(nonblocking).unwrap();
            let at = listener.local_addr().unwrap();
            let ours = listener.try_clone().unwrap();
            let server =
                Server::builder().engine(engine).inherit(listener.into(), Arc::new(Echo), None).start().unwrap();
            assert_eq!(addr(&server), at);
            for _ in 0..20 {
                ask(&mut connect_to(at), b"hello", b"hello");
            }
            // A kernel whose io_uring fails an accept on a non-blocking socket would be asked again every 50 ms.
            assert_eq!(is_nonblocking(&ours), engine.name() == "epoll", "{engine}");
            drop(server);
            // Not the server's to close: connections wait for the next one.
            let next = TcpStream::connect(at).unwrap();
            ours.set_nonblocking(false).unwrap();
            assert_eq!(ours.accept().unwrap().1, next.local_addr().unwrap());
        }
        let folder = Folder::new();
        let path = folder.path("inherited");
        let listener = UnixListener::bind(&path).unwrap();
        let server = Server::builder().engine(engine).inherit(listener.into(), Arc::new(Echo), None).start().unwrap();
        let mut peer = UnixStream::connect(&path).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        peer.write_all(b"hello").unwrap();
        expect(&mut peer, b"hello");
        drop(server);
        assert!(path.exists(), "the path belongs to whoever made the socket");
        for nonblocking in [false, true] {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_nonblocking(nonblocking).unwrap();
            let server = Server::builder().engine(engine).inherit(socket.into(), Arc::new(Echo), None).start().unwrap();
            let peer = datagrams(addr(&server));
            peer.send(b"hello").unwrap();
            let mut got = [0; 9];
            assert_eq!(peer.recv_from(&mut got).unwrap(), (5, addr(&server)));
        }
    }
}

/// Looking again and again before sleeping changes nothing but the time, whether events come meanwhile or later. The time
/// for that is long here, so that it is worth a trial on a busy machine, too.
#[test]
fn a_shard_that_spins_answers_as_one_that_sleeps() {
    for engine in engines_in_own_network() {
        // Not on the CPU of the test below, which counts how often it is disturbed.
        let cpus = ksf::cpus::allowed().unwrap().last().copied().into_iter().collect();
        let spin = ksf::spin::Spin::UpTo(std::time::Duration::from_millis(20));
        let builder = Server::builder().engine(engine).cpus(Some(cpus)).spin(spin);
        let server = builder.listen(ANY.parse().unwrap(), Arc::new(Echo), None).start().unwrap();
        let mut peer = connect(&server);
        let mut number = 0u32;
        while number < 500 || count(&server, "spins") == 0 {
            assert!(number < 200_000, "{engine:?}: it never spins");
            ask(&mut peer, &number.to_be_bytes(), &number.to_be_bytes());
            number += 1;
        }
        drop(peer);
        wait_until("it hears of the end", || server.connections() == 0);
        server.drain().unwrap();
    }
}

/// On the CPU of its client nothing can come while a shard spins: it tries that now and then only. An idle one never does.
#[test]
fn a_shard_that_shares_the_cpu_of_its_client_hardly_ever_spins() {
    own_network();
    let cpu = ksf::cpus::allowed().unwrap()[0];
    ksf::cpus::pin_to(cpu).unwrap();
    for engine in engines() {
        const ASKS: u64 = 4_000;
        let builder = Server::builder().engine(engine).cpus(Some(vec![cpu])).spin(ksf::spin::Spin::AUTO);
        let server = builder.listen(ANY.parse().unwrap(), Arc::new(Echo), None).start().unwrap();
        let begun = std::time::Instant::now();
        let mut peer = connect(&server);
        for number in 0..ASKS {
            ask(&mut peer, &number.to_be_bytes(), &number.to_be_bytes());
        }
        // The scheduler may take the CPU from it while it spins: such a spin may find something, and pay for one that does
        // not. All others are trials, of which each is followed by at least the time of 64 spins without.
        let (spins, missed) = (count(&server, "spins"), count(&server, "spins_missed"));
        let trials = begun.elapsed().as_micros() as u64 / (64 * 50) + 1;
        assert!(missed <= spins - missed + trials, "{engine:?}: {missed} of {spins} spins found nothing");
        drop(peer);
        wait_until("it hears of the end", || server.connections() == 0);
        server.drain().unwrap();
    }
}
