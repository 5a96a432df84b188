//! What sending costs, by the ways an engine could choose from. `cargo bench -p ksf --bench sends` prints it.
//!
//! * The replies of a turn: a call for each connection, or one submission to io_uring for all of them.
//! * Large replies: copied by the kernel, or sent from where they lie (zero copy, with its notification).
//!
//! Loopback, both ends on this CPU. Ways are interleaved, and medians are printed: what matters is which is smaller.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, cqueue, opcode};

const ROUNDS: usize = 400;

fn main() {
    pin_to_one_cpu();
    println!("replies of 100 bytes, ns per reply, median of {ROUNDS} turns");
    println!("{:>12} {:>12} {:>12} {:>12} {:>8}", "connections", "calls", "submission", "registered", "best");
    for connections in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
        let [calls, submission, registered] = turns(connections);
        let best = submission.min(registered).as_secs_f64() / calls.as_secs_f64();
        let [calls, submission, registered] = [calls, submission, registered].map(|time| time.as_nanos());
        println!("{connections:>12} {calls:>12} {submission:>12} {registered:>12} {best:>8.2}");
    }
    println!("\none large reply, us until the buffer is free again, median of {ROUNDS}");
    println!("{:>12} {:>12} {:>12} {:>8}", "KiB", "send", "SEND_ZC", "ratio");
    for kib in [16, 64, 256, 1024] {
        let [copied, zero_copy] = large(kib << 10);
        let ratio = zero_copy.as_secs_f64() / copied.as_secs_f64();
        println!("{kib:>12} {:>12.1} {:>12.1} {ratio:>8.2}", micros(copied), micros(zero_copy));
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn pin_to_one_cpu() {
    // SAFETY: an all-zero set is a valid value, and the set lives through the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

/// With what makes the engine's ring cheap.
fn ring() -> IoUring {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(4096).setup_single_issuer().setup_defer_taskrun().setup_no_sqarray();
    builder.build(256).expect("io_uring of Linux 6.6 or later")
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = TcpStream::connect(listener.local_addr().expect("its name")).expect("a connection");
    let (ours, _) = listener.accept().expect("a connection");
    ours.set_nodelay(true).expect("TCP");
    (ours, peer)
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Time per reply: by a call each, and by one submission whose completions are taken at once, of descriptors and of
/// registered files.
fn turns(connections: usize) -> [Duration; 3] {
    let mut pairs: Vec<_> = (0..connections).map(|_| pair()).collect();
    let mut ring = ring();
    let sockets: Vec<_> = pairs.iter().map(|(ours, _)| ours.as_raw_fd()).collect();
    ring.submitter().register_files(&sockets).expect("registered files");
    let reply = [7; 100];
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let flags = libc::MSG_NOSIGNAL;
    for _ in 0..ROUNDS {
        for (way, times) in times.iter_mut().enumerate() {
            let begun = Instant::now();
            if way == 0 {
                for (ours, _) in &pairs {
                    // SAFETY: the reply lives through the call.
                    let sent = unsafe {
                        libc::send(ours.as_raw_fd(), reply.as_ptr().cast(), reply.len(), flags | libc::MSG_DONTWAIT)
                    };
                    assert_eq!(sent, reply.len() as isize);
                }
            } else {
                for (at, socket) in sockets.iter().enumerate() {
                    let (bytes, len) = (reply.as_ptr(), reply.len() as u32);
                    let send = match way {
                        1 => opcode::Send::new(Fd(*socket), bytes, len),
                        _ => opcode::Send::new(Fixed(at as u32), bytes, len),
                    };
                    let entry = send.flags(flags).build();
                    // SAFETY: the reply lives until the completions are taken below.
                    unsafe { ring.submission().push(&entry) }.expect("room for a turn");
                }
                ring.submit_and_wait(connections).expect("io_uring_enter");
                assert_eq!(ring.completion().filter(|entry| entry.result() == reply.len() as i32).count(), connections);
            }
            times.push(begun.elapsed() / connections as u32);
            let mut got = [0; 100];
            pairs.iter_mut().for_each(|(_, peer)| peer.read_exact(&mut got).expect("the reply"));
        }
    }
    times.map(|mut times| median(&mut times))
}

/// Time of sending so much, until the buffer may be written again; the peer reads meanwhile, on this CPU.
fn large(bytes: usize) -> [Duration; 2] {
    let (ours, mut peer) = pair();
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 20];
        while peer.read(&mut buffer).is_ok_and(|count| count > 0) {}
    });
    let mut ring = ring();
    let reply = vec![7; bytes];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (way, times) in times.iter_mut().enumerate() {
            let begun = Instant::now();
            let mut sent = 0;
            while sent < bytes {
                let rest = &reply[sent..];
                let (fd, flags) = (Fd(ours.as_raw_fd()), libc::MSG_NOSIGNAL | libc::MSG_WAITALL);
                let entry = match way {
                    0 => opcode::Send::new(fd, rest.as_ptr(), rest.len() as u32).flags(flags).build(),
                    _ => opcode::SendZc::new(fd, rest.as_ptr(), rest.len() as u32).flags(flags).build(),
                };
                // SAFETY: the reply lives until its last completion, which is waited for here.
                unsafe { ring.submission().push(&entry) }.expect("room for one");
                let mut ended = false;
                while !ended {
                    ring.submit_and_wait(1).expect("io_uring_enter");
                    for entry in ring.completion() {
                        assert!(entry.result() >= 0, "send: {}", std::io::Error::from_raw_os_error(-entry.result()));
                        if !cqueue::notif(entry.flags()) {
                            sent += entry.result() as usize;
                        }
                        ended |= !cqueue::more(entry.flags());
                    }
                }
            }
            times.push(begun.elapsed());
        }
    }
    drop(ours);
    reader.join().expect("a reader");
    times.map(|mut times| median(&mut times))
}
