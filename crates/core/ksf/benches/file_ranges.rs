//! What sending a range of a file costs, by the ways `Reply::file` could choose from.
//! `cargo bench -p ksf --bench file_ranges` prints it.
//!
//! * read: into a buffer, a window of 256 KiB at a time, and send from there.
//! * sendfile(2): the socket takes the pages of the page cache.
//! * splice(2): the same through a pipe, a window at a time; each range makes its own pipe, or all share one.
//!
//! TCP over loopback, the file in the page cache. Ways are interleaved, and medians are printed: the rate, and the CPU time
//! of both ends together, because on loopback the receiver's side copies within the sender's call, or the other way round.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

const ROUNDS: usize = 41;

/// As the framework reads.
const WINDOW_BYTES: usize = 256 << 10;

/// Bytes that one round of one way sends, in as many ranges as that takes.
const ROUND_BYTES: usize = 8 << 20;

const WAYS: [&str; 4] = ["read", "sendfile", "splice", "own pipe"];

fn main() {
    // SAFETY: a plain call without pointers.
    let here = unsafe { libc::sched_getcpu() }.max(0) as usize;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let file = file();
    pin_to(here);
    table("both ends on one CPU", &file, here);
    if cpus > 1 {
        table("each end on its own CPU", &file, (here + 1) % cpus);
    }
}

fn table(title: &str, file: &File, reader_cpu: usize) {
    println!("{title}: MB/s, and ns of CPU time per KiB; median of {ROUNDS}");
    print!("{:>8}", "KiB");
    WAYS.iter().for_each(|way| print!(" {way:>10} {:>8}", "ns/KiB"));
    println!("   sendfile and splice against read: rate, CPU");
    for kib in [4, 16, 64, 256, 1024, 4096] {
        let measured = measure(file, kib << 10, reader_cpu);
        print!("{kib:>8}");
        for (time, cpu) in measured {
            let rate = ROUND_BYTES as f64 / time.as_secs_f64() / 1e6;
            print!(" {rate:>10.0} {:>8.0}", cpu.as_nanos() as f64 / (ROUND_BYTES >> 10) as f64);
        }
        let [read, sendfile, splice, _] = measured;
        let ratio = |one: Duration, other: Duration| one.as_secs_f64() / other.as_secs_f64();
        print!("   {:.2} {:.2}", ratio(read.0, sendfile.0), ratio(sendfile.1, read.1));
        println!("   {:.2} {:.2}", ratio(read.0, splice.0), ratio(splice.1, read.1));
    }
}

fn file() -> File {
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(&vec![7; ROUND_BYTES]).expect("room for it");
    file
}

fn pin_to(cpu: usize) {
    // SAFETY: an all-zero set is a valid value, and the set lives through the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

/// CPU time of all threads of this process.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` lives through the call.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Wall time and CPU time of a round, for each way.
fn measure(file: &File, range_bytes: usize, reader_cpu: usize) -> [(Duration, Duration); 4] {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut peer = TcpStream::connect(listener.local_addr().expect("its name")).expect("a connection");
    let (mut ours, _) = listener.accept().expect("a connection");
    ours.set_nodelay(true).expect("TCP");
    let reader = std::thread::spawn(move || {
        pin_to(reader_cpu);
        let mut buffer = vec![0; WINDOW_BYTES];
        loop {
            let mut left = ROUND_BYTES;
            while left > 0 {
                match peer.read(&mut buffer) {
                    Ok(0) | Err(_) => return,
                    Ok(count) => left -= count,
                }
            }
            peer.write_all(&[1]).expect("a peer");
        }
    });
    let shared = pipe();
    let mut buffer = vec![0; WINDOW_BYTES];
    let mut times: [(Vec<_>, Vec<_>); 4] = Default::default();
    for round in 0..ROUNDS {
        for turn in 0..WAYS.len() {
            // Each way comes first, second ... as often.
            let way = (turn + round) % WAYS.len();
            let (begun, cpu) = (Instant::now(), cpu_time());
            for offset in (0..ROUND_BYTES).step_by(range_bytes) {
                let (socket, file) = (ours.as_raw_fd(), file.as_raw_fd());
                match way {
                    0 => read_and_send(file, socket, offset, range_bytes, &mut buffer),
                    1 => sendfile(file, socket, offset, range_bytes),
                    2 => splice(file, socket, offset, range_bytes, &shared),
                    _ => splice(file, socket, offset, range_bytes, &pipe()),
                }
            }
            ours.read_exact(&mut [0]).expect("the reader has all of it");
            times[way].0.push(begun.elapsed());
            times[way].1.push(cpu_time() - cpu);
        }
    }
    drop(ours);
    reader.join().expect("a reader");
    times.map(|(mut wall, mut cpu)| (median(&mut wall), median(&mut cpu)))
}

fn checked(result: isize) -> usize {
    assert!(result > 0, "{}", std::io::Error::last_os_error());
    result as usize
}

fn read_and_send(file: RawFd, socket: RawFd, offset: usize, bytes: usize, buffer: &mut [u8]) {
    let mut at = 0;
    while at < bytes {
        let wanted = (bytes - at).min(buffer.len());
        // SAFETY: the buffer is at least so long, and lives through the call.
        let got =
            checked(unsafe { libc::pread(file, buffer.as_mut_ptr().cast(), wanted, (offset + at) as libc::off_t) });
        let mut sent = 0;
        while sent < got {
            let rest = &buffer[sent..got];
            // SAFETY: the rest of the buffer lives through the call.
            sent += checked(unsafe { libc::send(socket, rest.as_ptr().cast(), rest.len(), libc::MSG_NOSIGNAL) });
        }
        at += got;
    }
}

fn sendfile(file: RawFd, socket: RawFd, offset: usize, bytes: usize) {
    let mut at = offset as libc::off_t;
    let end = at + bytes as libc::off_t;
    while at < end {
        // SAFETY: `at` lives through the call, which moves it on.
        checked(unsafe { libc::sendfile(socket, file, &raw mut at, (end - at) as usize) });
    }
}

fn pipe() -> [OwnedFd; 2] {
    let mut ends = [0; 2];
    // SAFETY: the array lives through the call, and both descriptors are new, and this is their only owner.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0, "{}", std::io::Error::last_os_error());
        checked(libc::fcntl(ends[1], libc::F_SETPIPE_SZ, WINDOW_BYTES as libc::c_int) as isize);
        ends.map(|end| OwnedFd::from_raw_fd(end))
    }
}

fn splice(file: RawFd, socket: RawFd, offset: usize, bytes: usize, pipe: &[OwnedFd; 2]) {
    let [out_of, into] = [pipe[0].as_raw_fd(), pipe[1].as_raw_fd()];
    let mut at = offset as libc::off_t;
    let end = at + bytes as libc::off_t;
    let none = std::ptr::null_mut;
    while at < end {
        let wanted = ((end - at) as usize).min(WINDOW_BYTES);
        // SAFETY: `at` lives through the call, which moves it on.
        let mut held = checked(unsafe { libc::splice(file, &raw mut at, into, none(), wanted, libc::SPLICE_F_MOVE) });
        while held > 0 {
            // SAFETY: no pointers but null.
            held -= checked(unsafe { libc::splice(out_of, none(), socket, none(), held, libc::SPLICE_F_MOVE) });
        }
    }
}
