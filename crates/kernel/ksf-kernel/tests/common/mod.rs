//! What the tests on real sockets share: a small user-space half that keeps to the contract of `ksf::assist`.

#![allow(dead_code, unused_imports, reason = "each test file uses a part")]

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

pub(crate) mod object;

use ksf::assist::{Assist, AssistConn};
use ksf::framing::{Frame, Framing};
use ksf_kernel::{Builtin, Caller, KernelOptions, KernelService, ObjectSource, Verdict};
pub(crate) use ksf_test::stream::{pair, read_exactly};
pub(crate) use ksf_test::*;

pub(crate) fn load(builtin: Builtin) -> KernelService {
    load_with(builtin, |_| {})
}

pub(crate) fn load_with(builtin: Builtin, change: impl FnOnce(&mut KernelOptions)) -> KernelService {
    load_from(&ObjectSource::Builtin(builtin), builtin, change)
}

/// `like`: the built-in service whose options it takes.
pub(crate) fn load_from(
    source: &ObjectSource,
    like: Builtin,
    change: impl FnOnce(&mut KernelOptions),
) -> KernelService {
    let mut options = KernelOptions::default();
    options.connections_max = 256;
    options.callers_max = 16;
    if like == Builtin::RpcNull {
        options.rpc_programs = vec![(100_003, 3, 3), (100_005, 1, 3)];
    }
    change(&mut options);
    KernelService::load(source, &options).unwrap_or_else(|error| panic!("{source:?} loads: {error}"))
}

pub(crate) fn counter(service: &KernelService, name: &str) -> u64 {
    let counters = service.counters();
    counters.iter().find(|counter| counter.name == name).unwrap_or_else(|| panic!("no counter {name}")).value
}

/// Two ends of a TCP connection on the loopback device; the second is the server's.
pub(crate) fn tcp_pair(address: &str) -> (TcpStream, TcpStream) {
    pair(&TcpListener::bind(address).expect("a free port on lo"))
}

/// How the user-space half behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Habits {
    /// Parks settled connections.
    pub(crate) parks: bool,
    /// Lets the kernel half answer at all.
    pub(crate) settles: bool,
}

pub(crate) const PARKING: Habits = Habits { parks: true, settles: true };
pub(crate) const POLLING: Habits = Habits { parks: false, settles: true };

/// What became of the connection.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) received: u64,
    pub(crate) sent: u64,
    pub(crate) replied: u64,
}

/// A thread that serves one connection in user space, behind the kernel half.
pub(crate) struct UserHalf {
    thread: JoinHandle<io::Result<Totals>>,
    stop: Arc<AtomicBool>,
}

impl UserHalf {
    /// `fallback` answers what the service's function passes, without the framing.
    pub(crate) fn serve(
        service: &KernelService,
        socket: TcpStream,
        habits: Habits,
        fallback: fn(&[u8]) -> Vec<u8>,
    ) -> Self {
        Self::serve_from(service, socket, habits, fallback, Totals::default())
    }

    /// `so_far`: what user space received and sent on the socket before it came under the kernel half.
    pub(crate) fn serve_from(
        service: &KernelService,
        socket: TcpStream,
        habits: Habits,
        fallback: fn(&[u8]) -> Vec<u8>,
        so_far: Totals,
    ) -> Self {
        let conn = service.assist().attach(socket.as_fd()).expect("the kernel half takes the socket");
        socket.set_nonblocking(true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let mut half = Half {
            framing: service.framing().unwrap(),
            caller: service.caller().expect("a free caller"),
            service: service.clone(),
            conn,
            socket,
            habits,
            fallback,
            input: Vec::new(),
            output: Vec::new(),
            outcome: so_far,
            parked: false,
            stop: Arc::clone(&stop),
        };
        Self { thread: thread::spawn(move || half.run()), stop }
    }

    /// Waits for the end of the connection, which the client brings about.
    pub(crate) fn join(self) -> Totals {
        self.thread.join().expect("the server's thread does not panic").expect("and sees no error")
    }

    /// Ends it now.
    pub(crate) fn stop(self) -> Totals {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("the server's thread does not panic").unwrap_or_default()
    }
}

struct Half {
    framing: Framing,
    caller: Caller,
    service: KernelService,
    conn: Box<dyn AssistConn>,
    socket: TcpStream,
    habits: Habits,
    fallback: fn(&[u8]) -> Vec<u8>,
    input: Vec<u8>,
    output: Vec<u8>,
    outcome: Totals,
    parked: bool,
    stop: Arc<AtomicBool>,
}

impl Half {
    fn run(&mut self) -> io::Result<Totals> {
        while !self.stop.load(Ordering::SeqCst) {
            let open = self.receive()?;
            self.answer();
            self.send()?;
            if !open {
                // The peer's FIN can overtake replies that still wait in the work queue.
                wait_until("TCP takes the kernel half's replies", || {
                    self.conn.drained(self.socket.as_fd(), self.outcome.sent)
                });
                break;
            }
            if self.input.is_empty() && self.habits.settles {
                self.conn.settle(self.socket.as_fd(), self.outcome.received, self.outcome.sent);
                self.parked = self.habits.parks && self.conn.park(self.socket.as_fd(), 0);
            }
            self.wait()?;
        }
        self.outcome.replied = self.conn.replied_bytes();
        Ok(self.outcome)
    }

    /// False at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        let mut buf = [0; 65_536];
        // Not for ever: a flood must not keep it from answering, and from being stopped.
        for _ in 0..16 {
            match self.socket.read(&mut buf) {
                Ok(0) if self.conn.is_end(self.socket.as_fd(), self.outcome.received) => return Ok(false),
                Ok(0) => thread::yield_now(),
                Ok(bytes) => {
                    self.input.extend_from_slice(&buf[..bytes]);
                    self.outcome.received += bytes as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn answer(&mut self) {
        let mut at = 0;
        while let Ok(Frame::Part(part)) = self.framing.parse(&self.input[at..], 0) {
            if self.input.len() - at < part.total_bytes() {
                break;
            }
            let body = at + part.header_bytes..at + part.header_bytes + part.body_bytes;
            let start = self.output.len();
            self.output.resize(start + self.framing.reply_header_bytes(), 0);
            // Raw chunks may be longer than the function takes.
            for piece in self.input[body].chunks(self.service.message_bytes_max()) {
                match self.caller.call(piece, &mut self.output).expect("the function runs") {
                    Verdict::Reply => {}
                    Verdict::Echo => self.output.extend_from_slice(piece),
                    Verdict::Pass => self.output.extend_from_slice(&(self.fallback)(piece)),
                }
            }
            self.framing.finish_reply(&mut self.output, start, 0).expect("the reply can be framed");
            self.output.extend_from_slice(self.framing.reply_trailer());
            at += part.total_bytes();
        }
        self.input.drain(..at);
    }

    fn send(&mut self) -> io::Result<()> {
        let mut at = 0;
        while at < self.output.len() && !self.stop.load(Ordering::SeqCst) {
            if !self.conn.drained(self.socket.as_fd(), self.outcome.sent) {
                thread::yield_now();
                continue;
            }
            if self.input.is_empty() && self.habits.settles {
                let after = self.outcome.sent + (self.output.len() - at) as u64;
                self.conn.settle_ahead(self.socket.as_fd(), self.outcome.received, after);
            }
            match self.socket.write(&self.output[at..]) {
                Ok(bytes) => {
                    at += bytes;
                    self.outcome.sent += bytes as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    poll(&mut [(self.socket.as_raw_fd(), libc::POLLOUT)])
                }
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        let input = if self.parked { 0 } else { libc::POLLIN };
        let assist = self.service.assist();
        let wake = assist.wake_fd(0).expect("shard 0 has a ring").as_raw_fd();
        poll(&mut [(self.socket.as_raw_fd(), input | libc::POLLRDHUP), (wake, libc::POLLIN)]);
        let mut woken = false;
        // Tests serve one parked connection per loaded service.
        assist.take_wakes(0, &mut |token| woken |= token == self.conn.token());
        if woken || !self.parked {
            self.conn.unpark(self.socket.as_fd());
            self.parked = false;
        }
        Ok(())
    }
}

/// Waits a moment for one of the descriptors, so that a stop is noticed.
pub(crate) fn poll(fds: &mut [(i32, libc::c_short)]) {
    let mut list: Vec<libc::pollfd> = fds.iter().map(|&(fd, events)| libc::pollfd { fd, events, revents: 0 }).collect();
    // SAFETY: an array of pollfd and its length.
    unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, 50) };
}

/// An NFSv3 NULL call with AUTH_NONE, record mark included: 44 bytes.
pub(crate) fn null_call(xid: u32) -> Vec<u8> {
    rpc_call(xid, 100_003, 3, 0)
}

pub(crate) fn rpc_call(xid: u32, program: u32, version: u32, procedure: u32) -> Vec<u8> {
    rpc::record(&rpc::call(xid, program, version, procedure))
}

/// Its reply: 28 bytes.
pub(crate) fn null_reply(xid: u32) -> Vec<u8> {
    rpc::record(&rpc::accepted(xid, &[0]))
}

/// `send(2)` in one call, so that it leaves as one segment when it fits.
pub(crate) fn send_all(client: &mut TcpStream, bytes: &[u8]) {
    client.write_all(bytes).expect("the server's side takes it");
}
