//! What joining gains or costs on this machine: `compare [MESSAGES]`, as root.
//!
//! A client and a server process play ping-pong over a connection of loopback, with messages of several sizes, alternately
//! plain and joined; then the client sends one way as fast as the server reads. Both ends use poll(). Printed are round
//! trips (p50, p99) and CPU time per message, of client and server together.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ksf_hop::{Hop, Options, Scope};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Alternations of plain and joined.
const ROUNDS: usize = 5;

const SIZES: [usize; 5] = [1, 100, 1000, 8000, 30_000];

type Failed = Box<dyn std::error::Error>;

fn main() -> Result<(), Failed> {
    let messages: usize = std::env::args().nth(1).map_or(Ok(20_000), |text| text.parse())?;
    println!("placement    kind       bytes  plain p50  p99 us   cpu us | joined p50  p99 us   cpu us");
    for (placement, server_cpu) in [("two CPUs", 1), ("one CPU", 0)] {
        for one_way in [false, true] {
            for size in SIZES {
                let mut results = [Vec::new(), Vec::new()];
                for round in 0..2 * ROUNDS {
                    results[round % 2].push(measure(round % 2 == 1, server_cpu, size, messages / ROUNDS, one_way)?);
                }
                let [plain, joined] = results.map(median);
                let kind = if one_way { "one way" } else { "ping-pong" };
                println!("{placement:<12} {kind:<9} {size:>6}  {plain} | {joined}");
            }
        }
    }
    Ok(())
}

struct Numbers {
    p50_us: f64,
    p99_us: f64,
    cpu_us: f64,
}

impl std::fmt::Display for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:>9.2} {:>8.2} {:>8.2}", self.p50_us, self.p99_us, self.cpu_us)
    }
}

/// The median of each number.
fn median(rounds: Vec<Numbers>) -> Numbers {
    let middle = |number: fn(&Numbers) -> f64| {
        let mut all: Vec<f64> = rounds.iter().map(number).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    Numbers { p50_us: middle(|n| n.p50_us), p99_us: middle(|n| n.p99_us), cpu_us: middle(|n| n.cpu_us) }
}

fn measure(joined: bool, server_cpu: usize, size: usize, messages: usize, one_way: bool) -> Result<Numbers, Failed> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut options = Options::default();
    options.no_splice = true;
    options.no_fionread = true;
    let scope = Scope { ports: vec![address.port()], ..Scope::default() };
    let _hop = joined.then(|| Hop::start(&scope, &options)).transpose()?;
    std::thread::scope(|scope| {
        let server = scope.spawn(move || -> std::io::Result<Duration> {
            pin(server_cpu);
            let (mut stream, _) = listener.accept()?;
            prepare(&stream)?;
            let mut bytes = vec![0; size];
            if one_way {
                let mut large = vec![0; 65_536];
                while read_some(&mut stream, &mut large)? > 0 {}
            } else {
                while read_whole(&mut stream, &mut bytes)? {
                    write_whole(&mut stream, &bytes)?;
                }
            }
            Ok(cpu_time())
        });
        pin(0);
        let mut stream = TcpStream::connect(address)?;
        prepare(&stream)?;
        let mut bytes = vec![7; size];
        let mut times = Vec::with_capacity(messages);
        let begin = cpu_time();
        for _ in 0..messages {
            let start = Instant::now();
            write_whole(&mut stream, &bytes)?;
            if !one_way {
                read_whole(&mut stream, &mut bytes)?;
            }
            times.push(start.elapsed());
        }
        let client = cpu_time() - begin;
        drop(stream);
        let server = server.join().map_err(|_| "the server failed")??;
        times.sort();
        let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
        Ok(Numbers { p50_us: at(50), p99_us: at(99), cpu_us: (client + server).as_secs_f64() * 1e6 / messages as f64 })
    })
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // On a machine with one CPU the placements are the same.
    let _ = sched_setaffinity(None, &set);
}

/// CPU time of this thread, in the kernel too.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)
}

fn wait(stream: &TcpStream, what: PollFlags) -> std::io::Result<()> {
    poll(&mut [PollFd::new(stream, what)], None).map(drop).map_err(Into::into)
}

fn write_whole(stream: &mut TcpStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(stream, PollFlags::OUT)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// 0 at the end.
fn read_some(stream: &mut TcpStream, bytes: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match stream.read(bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(stream, PollFlags::IN)?,
            result => return result,
        }
    }
}

/// False at the end.
fn read_whole(stream: &mut TcpStream, bytes: &mut [u8]) -> std::io::Result<bool> {
    let mut filled = 0;
    while filled < bytes.len() {
        match read_some(stream, &mut bytes[filled..])? {
            0 => return Ok(false),
            received => filled += received,
        }
    }
    Ok(true)
}
