//! Shards stay where the administrator put them, and connections go to the shard of the CPU they arrive on.

use std::io::{Read, Write};
use std::net::UdpSocket;
use std::sync::Arc;

use crate::common::net::*;
use ksf::cpus::{allowed, pin_to};
use ksf::framing::Framing;
use ksf::limits::Limits;
use ksf::{Error, Profile, Server, Service};

/// Answers every message with the CPUs its thread may use: one byte each.
fn where_am_i() -> Arc<impl Service> {
    calls(Profile::new("where-am-i", Framing::Raw), |_, reply| {
        let cpus: Vec<u8> = allowed().unwrap().into_iter().map(|cpu| cpu as u8).collect();
        reply.bytes(&cpus);
    })
}

fn where_served(server: &Server) -> Vec<usize> {
    let mut peer = connect(server);
    peer.write_all(b"?").unwrap();
    let mut got = [0; 64];
    let length = peer.read(&mut got).unwrap();
    got[..length].iter().map(|cpu| usize::from(*cpu)).collect()
}

#[test]
fn a_shard_stays_on_the_cpu_it_was_given() {
    for engine in engines_in_own_network() {
        for cpu in allowed().unwrap() {
            let builder = Server::builder().engine(engine).cpus(Some(vec![cpu]));
            let server = builder.listen(ANY.parse().unwrap(), where_am_i(), None).start().unwrap();
            assert_eq!(server.cpus(), [cpu]);
            for _ in 0..4 {
                assert_eq!(where_served(&server), [cpu], "{engine}");
            }
        }
        let nowhere = Server::builder().engine(engine).cpus(Some(vec![100_000])).start();
        assert!(matches!(nowhere, Err(Error::NoCpu { .. })));
    }
}

#[test]
fn the_mask_of_whoever_starts_a_server_is_kept() {
    for engine in engines_in_own_network() {
        let cpu = *allowed().unwrap().last().unwrap();
        std::thread::spawn(move || {
            pin_to(cpu).unwrap();
            let server = all_shards(engine, ANY, Limits::default(), where_am_i());
            assert_eq!(server.cpus(), [cpu], "{engine}: taskset and cpusets must hold");
            assert_eq!(where_served(&server), [cpu]);
        })
        .join()
        .unwrap();
    }
}

#[test]
fn a_connection_is_served_on_the_cpu_it_came_from() {
    own_network();
    let cpus = allowed().unwrap();
    if cpus.len() < 2 {
        return skip("needs two CPUs: there is nothing to choose between");
    }
    for engine in engines() {
        let server = all_shards(engine, ANY, Limits::default(), where_am_i());
        let datagrams = all_shards(engine, "udp:127.0.0.1:0", Limits::default(), where_am_i());
        for cpu in &cpus {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    pin_to(*cpu).unwrap();
                    for _ in 0..20 {
                        assert_eq!(where_served(&server), [*cpu], "{engine}: tcp");
                        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
                        peer.set_read_timeout(Some(PATIENCE)).unwrap();
                        peer.send_to(b"?", addr(&datagrams)).unwrap();
                        let mut got = [0; 64];
                        let length = peer.recv(&mut got).unwrap();
                        assert_eq!(got[..length], [*cpu as u8], "{engine}: udp");
                    }
                });
            });
        }
    }
}

/// A subset in any order: steering goes by the place in the group, which is not the number of the CPU.
#[test]
fn steering_maps_cpus_to_the_shards_that_are_there() {
    own_network();
    let cpus = allowed().unwrap();
    if cpus.len() < 2 {
        return skip("needs two CPUs: there is nothing to choose between");
    }
    for engine in engines() {
        let server = Server::builder()
            .engine(engine)
            .cpus(Some(vec![cpus[1]]))
            .listen(ANY.parse().unwrap(), where_am_i(), None)
            .start()
            .unwrap();
        for cpu in &cpus {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    pin_to(*cpu).unwrap();
                    assert_eq!(where_served(&server), [cpus[1]], "{engine}: from CPU {cpu}");
                });
            });
        }
    }
}
