//! Bytes of joined connections: all of them, in order, and not too many at once.

mod common;

use std::io::{self, ErrorKind, Write};
use std::net::{Shutdown, SocketAddr};
use std::thread;

use common::*;

#[test]
fn bytes_arrive_in_order_whatever_the_sizes() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        for (address, to) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("[::1]:0", "::1"),
            ("[::]:0", "127.0.0.1"),
            ("127.0.0.1:0", "::ffff:127.0.0.1"),
        ] {
            let (listener, at) = listen(address);
            let hop = start(at.port());
            for seed in 1..4 {
                let to = SocketAddr::new(to.parse().unwrap(), at.port());
                let (mut one, mut other) = connect(&listener, to);
                warm_up(&mut one, &mut other);
                both_directions(&one, &other, 4 << 20, seed * 7919);
            }
            assert_eq!(count(&hop, "watched"), 6, "{address} {to}");
            assert!(count(&hop, "messages") > 100, "{address}: {:?}", hop.counters());
            assert!(count(&hop, "left") > 10, "{address}: it never went back and forth: {:?}", hop.counters());
        }
    });
}

#[test]
fn every_size_is_whole() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        for size in (1..200).chain((200..32_768).step_by(311)) {
            let sent = pattern(size, size);
            write(&mut one, &sent);
            assert!(read(&mut other, size) == sent, "{size} bytes");
        }
        assert_eq!(count(&hop, "messages"), 199 + (200..32_768usize).step_by(311).count() as u64);
        assert_eq!(count(&hop, "left"), 0);
    });
}

#[test]
fn a_reader_that_does_not_read_slows_the_writer() {
    if !is_root() {
        return;
    }
    let fill = |joined: bool| {
        in_new_network(|| {
            let (listener, at) = listen("127.0.0.1:0");
            let hop = joined.then(|| start(at.port()));
            let (mut one, mut other) = connect(&listener, at);
            warm_up(&mut one, &mut other);
            let mut sent = 0;
            let error = loop {
                match one.write(&pattern(sent, 5000)) {
                    Ok(bytes) => sent += bytes,
                    Err(error) => break error,
                }
                assert!(sent < 256 << 20, "nothing slows the writer down");
            };
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            let mut waiting = 0;
            if let Some(hop) = &hop {
                waiting = count(hop, "bytes");
                assert!(waiting > 0 && count(hop, "left") == 1, "{:?}", hop.counters());
            }
            assert!(read(&mut other, sent) == pattern(0, sent));
            // And on it goes.
            write(&mut one, b"more");
            assert_eq!(read(&mut other, 4), b"more");
            waiting
        })
    };
    fill(false);
    let waiting = fill(true);
    // A quarter of what SO_RCVBUF is at first (tcp_rmem).
    assert!(waiting <= 131_072 / 4, "{waiting} bytes waited outside of TCP");
}

#[test]
fn a_small_receive_buffer_is_kept_to() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        let bytes: libc::c_int = 8192;
        // SAFETY: the kernel reads four bytes of `bytes`, which lives for the call.
        let result = unsafe {
            libc::setsockopt(
                std::os::fd::AsRawFd::as_raw_fd(&other),
                libc::SOL_SOCKET,
                libc::SO_RCVBUF,
                (&raw const bytes).cast(),
                4,
            )
        };
        assert_eq!(result, 0);
        warm_up(&mut one, &mut other);
        for _ in 0..8 {
            write(&mut one, &pattern(0, 1000));
        }
        // The kernel doubles what it is told (socket(7)); a quarter of that.
        assert_eq!(count(&hop, "bytes"), 4000);
        for _ in 0..8 {
            assert!(read(&mut other, 1000) == pattern(0, 1000));
        }
    });
}

#[test]
fn the_end_is_behind_the_bytes() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        for _ in 0..50 {
            let (mut one, mut other) = connect(&listener, at);
            warm_up(&mut one, &mut other);
            write(&mut one, &pattern(0, 20_000));
            one.shutdown(Shutdown::Write).unwrap();
            assert!(read(&mut other, 20_001) == pattern(0, 20_000));
            // The other direction is open.
            write(&mut other, &pattern(1, 20_000));
            drop(other);
            assert!(read(&mut one, 20_001) == pattern(1, 20_000));
        }
        assert_eq!(count(&hop, "messages"), 100, "{:?}", hop.counters());
    });
}

#[test]
fn nothing_can_be_sent_behind_the_end() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        write(&mut one, b"last");
        one.shutdown(Shutdown::Write).unwrap();
        assert_eq!(one.write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(count(&hop, "messages"), 1);
        assert_eq!(read(&mut other, 100), b"last");
    });
}

#[test]
fn a_reset_is_a_reset() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        write(&mut one, b"joined");
        assert_eq!(read(&mut other, 6), b"joined");
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the kernel reads a `linger`, which lives for the call.
        let result = unsafe {
            libc::setsockopt(
                std::os::fd::AsRawFd::as_raw_fd(&other),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of_val(&linger) as libc::socklen_t,
            )
        };
        assert_eq!(result, 0);
        drop(other);
        let error = io::Read::read(&mut one, &mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert_eq!(one.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(count(&hop, "messages"), 1);
    });
}

#[test]
fn two_writers_of_a_socket_and_two_readers_lose_nothing() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let (mut one, mut other) = connect(&listener, at);
        warm_up(&mut one, &mut other);
        const EACH: usize = 20_000;
        let sum = |received: usize| {
            thread::scope(|scope| {
                for writer in [one.try_clone().unwrap(), one.try_clone().unwrap()] {
                    let mut writer = writer;
                    scope.spawn(move || (0..EACH).for_each(|_| write(&mut writer, &[7; 10])));
                }
                let readers: Vec<_> = (0..2)
                    .map(|_| {
                        let mut reader = other.try_clone().unwrap();
                        scope.spawn(move || {
                            read(&mut reader, received / 2).iter().map(|byte| u64::from(*byte)).sum::<u64>()
                        })
                    })
                    .collect();
                readers.into_iter().map(|reader| reader.join().unwrap()).sum::<u64>()
            })
        };
        assert_eq!(sum(EACH * 20), EACH as u64 * 20 * 7);
        assert!(count(&hop, "messages") > 0);
    });
}
