//! Does this kernel do what the programs rely on? Sockmap has had bugs, and other kernels may count consumed bytes
//! differently, so an engine asks before it puts a client's connection under the programs.
//!
//! Both ends of a loopback connection are driven by one thread: a client that writes when it can and reads when it may,
//! and a server that does what an engine does. It takes some ten milliseconds.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ksf::assist::{Assist, AssistConn};
use ksf::framing::{Frame, Framing};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::call::{Caller, Verdict};
use crate::{Builtin, KernelAssist, KernelError, KernelOptions, KernelService, ObjectSource, tcp};

/// Sizes around the edges of segments, pages and socket buffers.
const ODD_SIZES: [usize; 16] =
    [1, 2, 3, 63, 64, 65, 1447, 1448, 1449, 4095, 4097, 16_383, 16_385, 65_535, 65_537, 70_001];
const SLOW_READER_BYTES: usize = 4 << 20;
const NULL_CALLS: u32 = 600;
/// Only a kernel that fails the test takes this long.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Echoes odd sizes, a slow reader, a half-close, and replies of another length, on a loopback connection of its own.
///
/// # Errors
/// Why the programs cannot be loaded, or which part went wrong.
pub fn self_test() -> Result<(), KernelError> {
    self_test_of(&ObjectSource::Builtin(Builtin::Echo), &ObjectSource::Builtin(Builtin::RpcNull))
}

/// [`self_test`] with other objects in the place of the two services: broken ones, to see that it finds them out.
#[doc(hidden)]
pub fn self_test_of(echo: &ObjectSource, rpc_null: &ObjectSource) -> Result<(), KernelError> {
    let echo = load(echo, Vec::new())?;
    echoes(&echo, "echo of odd sizes", false, |client| {
        for (seed, &size) in ODD_SIZES.iter().enumerate() {
            client.to_send.push(pattern(size, seed as u8));
        }
    })?;
    echoes(&echo, "a slow reader", true, |client| client.to_send.push(pattern(SLOW_READER_BYTES, 7)))?;
    let null = load(rpc_null, vec![(NULL_PROGRAM, 1, 1)])?;
    null_calls(&null, false)?;
    null_calls(&null, true)
}

fn load(object: &ObjectSource, rpc_programs: Vec<(u32, u32, u32)>) -> Result<KernelService, KernelError> {
    let options = KernelOptions {
        connections_max: 4,
        callers_max: 1,
        lag_bytes_max: 1024,
        rpc_programs,
        ..KernelOptions::default()
    };
    KernelService::load(object, &options)
}

fn echoes(
    service: &KernelService,
    test: &'static str,
    slow: bool,
    plan: impl FnOnce(&mut Client),
) -> Result<(), KernelError> {
    let (mut client, mut server) = pair(service, true).map_err(|error| not_connected(test, error))?;
    plan(&mut client);
    // A message at a time keeps it in the kernel; the slow reader sends all before it reads.
    let messages = std::mem::take(&mut client.to_send);
    for message in &messages {
        client.to_send.push(message.clone());
        client.reads = !slow;
        client.expected += message.len();
        run(&mut client, &mut server, test)?;
        if client.got != *message {
            return Err(failed(test, &"other bytes came back"));
        }
        client.got.clear();
        client.expected = 0;
    }
    half_close(client, server, if slow { "half-close behind a slow reader" } else { "half-close" })
}

/// The last message and the end of stream arrive together; the echo must still come, and then the end.
fn half_close(mut client: Client, mut server: Server, test: &'static str) -> Result<(), KernelError> {
    let last = pattern(5000, 99);
    client.socket.write_all(&last).map_err(|error| failed(test, &error))?;
    client.socket.shutdown(Shutdown::Write).map_err(|error| failed(test, &error))?;
    client.expected = last.len();
    client.reads = true;
    run(&mut client, &mut server, test)?;
    if client.got != last {
        return Err(failed(test, &"other bytes came back"));
    }
    let limit = Instant::now() + TIME_LIMIT;
    while !server.finished {
        server.turn().map_err(|error| failed(test, &error))?;
        if Instant::now() > limit {
            return Err(failed(test, &"the end of the stream was never seen"));
        }
    }
    Ok(())
}

/// Replies shorter than their requests, parked (the lag) and not (the hop).
fn null_calls(service: &KernelService, parks: bool) -> Result<(), KernelError> {
    let test = if parks { "shorter replies, parked" } else { "shorter replies" };
    let (mut client, mut server) = pair(service, parks).map_err(|error| not_connected(test, error))?;
    let before = answered(service);
    for xid in 0..NULL_CALLS {
        client.to_send.push(null_call(xid));
        client.expected = 28;
        run(&mut client, &mut server, test)?;
        if client.got != null_reply(xid) {
            return Err(failed(test, &"not the reply to the call"));
        }
        client.got.clear();
    }
    if answered(service) - before < u64::from(NULL_CALLS) / 2 {
        return Err(failed(test, &"the kernel half answered less than half of the calls"));
    }
    // After all that the socket must poll as if nothing had happened: no input, and none announced. One that was not
    // parked was polled all the time, so unparking must not set it right first.
    if parks {
        server.conn.unpark(server.socket.as_fd());
    }
    let mut fds = [PollFd::new(&server.socket, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).map_err(|error| failed(test, &error))?;
    if fds[0].revents().contains(PollFlags::IN) && !is_short_of_memory(&server.socket) {
        return Err(failed(test, &"an idle socket polls readable: consumed bytes are counted in an unknown way"));
    }
    Ok(())
}

/// True if less is received than SO_RCVLOWAT asks for. TCP then says "readable" only because it is short of memory, whatever
/// the other users of this machine do with it (tcp_epollin_ready(), include/net/tcp.h).
fn is_short_of_memory(socket: &TcpStream) -> bool {
    let lowat = tcp::rcvlowat(socket.as_fd()).unwrap_or(1);
    unread_bytes(socket).is_some_and(|unread| unread < u64::from(lowat))
}

/// Received bytes that are not read, as the kernel's list of sockets has it (rx_queue in proc_net_tcp.rst). FIONREAD of a socket in
/// a map counts other bytes on some kernels.
fn unread_bytes(socket: &TcpStream) -> Option<u64> {
    let hex = |address: SocketAddr| match address {
        SocketAddr::V4(address) => {
            let ip = u32::from_ne_bytes(address.ip().octets());
            Some(format!("{ip:08X}:{:04X}", address.port()))
        }
        SocketAddr::V6(_) => None,
    };
    let (local, peer) = (hex(socket.local_addr().ok()?)?, hex(socket.peer_addr().ok()?)?);
    let list = std::fs::read_to_string("/proc/thread-self/net/tcp").ok()?;
    list.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let is_it = fields.next() == Some(&local) && fields.next() == Some(&peer);
        let (_, unread) = fields.nth(1).filter(|_| is_it)?.split_once(':')?;
        u64::from_str_radix(unread, 16).ok()
    })
}

fn answered(service: &KernelService) -> u64 {
    service.counters().iter().find(|counter| counter.name == "segments_answered").map_or(0, |counter| counter.value)
}

/// Turns both ends until the client has what it expects.
fn run(client: &mut Client, server: &mut Server, test: &'static str) -> Result<(), KernelError> {
    let limit = Instant::now() + TIME_LIMIT;
    while client.got.len() < client.expected || !client.to_send.is_empty() {
        let moved = client.turn().and_then(|client| Ok(client | server.turn()?));
        if moved.map_err(|error| failed(test, &error))? {
            continue;
        }
        // Both sides stand still: the slow reader has filled all buffers, and starts to read.
        client.reads = true;
        if Instant::now() > limit {
            let (got, expected, state) = (client.got.len(), client.expected, server.state(&client.socket));
            return Err(failed(test, &format!("{got} of {expected} bytes came back, then no more ({state})")));
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn failed(test: &'static str, problem: &dyn std::fmt::Display) -> KernelError {
    KernelError::SelfTest { test, problem: problem.to_string() }
}

/// The kernel's own errors say nothing of the programs: the process may have no descriptor left.
fn not_connected(test: &'static str, error: io::Error) -> KernelError {
    match error.raw_os_error() {
        Some(_) => KernelError::system("connecting on loopback for the self-test", error),
        None => failed(test, &error),
    }
}

struct Client {
    socket: TcpStream,
    to_send: Vec<Vec<u8>>,
    sent: usize,
    got: Vec<u8>,
    expected: usize,
    reads: bool,
}

struct Server {
    socket: TcpStream,
    assist: KernelAssist,
    conn: Box<dyn AssistConn>,
    caller: Caller,
    framing: Framing,
    parks: bool,
    parked: bool,
    input: Vec<u8>,
    output: Vec<u8>,
    received: u64,
    sent: u64,
    finished: bool,
}

fn pair(service: &KernelService, parks: bool) -> io::Result<(Client, Server)> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    // Where loopback is broken a server must not wait minutes to hear of it.
    let client = TcpStream::connect_timeout(&listener.local_addr()?, TIME_LIMIT)?;
    let (server, _) = listener.accept()?;
    for socket in [&client, &server] {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
    }
    let assist = service.assist();
    let conn = assist.attach(server.as_fd()).ok_or_else(|| io::Error::other("the socket map refused the socket"))?;
    let caller = service.caller().map_err(|error| io::Error::other(error.to_string()))?;
    let framing = service.framing().map_err(|error| io::Error::other(error.to_string()))?;
    Ok((
        Client { socket: client, to_send: Vec::new(), sent: 0, got: Vec::new(), expected: 0, reads: true },
        Server {
            socket: server,
            assist,
            conn,
            caller,
            framing,
            parks,
            parked: false,
            input: Vec::new(),
            output: Vec::new(),
            received: 0,
            sent: 0,
            finished: false,
        },
    ))
}

impl Client {
    /// True when something moved.
    fn turn(&mut self) -> io::Result<bool> {
        let mut moved = false;
        if let Some(message) = self.to_send.first() {
            let bytes = again(self.socket.write(&message[self.sent..]))?.unwrap_or(0);
            self.sent += bytes;
            moved |= bytes > 0;
            if self.sent == message.len() {
                self.to_send.remove(0);
                self.sent = 0;
            }
        }
        if self.reads {
            let mut buf = [0; 65_536];
            let bytes = again(self.socket.read(&mut buf))?.unwrap_or(0);
            self.got.extend_from_slice(&buf[..bytes]);
            moved |= bytes > 0;
        }
        Ok(moved)
    }
}

impl Server {
    /// Where bytes may have stayed, for the message of a failure.
    fn state(&self, client: &TcpStream) -> String {
        let Self { socket, parked, received, sent, .. } = self;
        let sent_again = tcp::sent_again(client.as_fd()).unwrap_or_default();
        let [unread, to_read] = [socket, client].map(|socket| unread_bytes(socket).unwrap_or_default());
        format!(
            "the server has received {received} bytes and sent {sent}, {unread} are unread there and {to_read} by its client, \
             which sent {sent_again} segments again; {}parked",
            if *parked { "" } else { "not " }
        )
    }

    /// What an engine does in a turn. True when something moved.
    fn turn(&mut self) -> io::Result<bool> {
        let mut woken = false;
        let token = self.conn.token();
        self.assist.take_wakes(0, &mut |cookie| woken |= cookie == token);
        if woken {
            self.conn.unpark(self.socket.as_fd());
            self.parked = false;
        }
        // Like an engine, do not even look at a parked socket; its end of stream is told by a hang-up poll.
        if self.parked && !self.hung_up()? {
            return Ok(false);
        }
        let mut buf = [0; 65_536];
        let mut moved = woken;
        let mut ended = false;
        // Behind a full output the server stops reading, as every engine does.
        if self.output.len() < 1 << 20 {
            match again(self.socket.read(&mut buf))? {
                Some(0) => ended = self.conn.is_end(self.socket.as_fd(), self.received),
                Some(bytes) => {
                    self.received += bytes as u64;
                    self.input.extend_from_slice(&buf[..bytes]);
                    moved = true;
                }
                None => {}
            }
        }
        self.answer()?;
        if !self.output.is_empty() && self.conn.drained(self.socket.as_fd(), self.sent) {
            if self.input.is_empty() {
                let after = self.sent + self.output.len() as u64;
                self.conn.settle_ahead(self.socket.as_fd(), self.received, after);
            }
            let bytes = again(self.socket.write(&self.output))?.unwrap_or(0);
            self.output.drain(..bytes);
            self.sent += bytes as u64;
            moved |= bytes > 0;
        }
        if self.input.is_empty() && self.output.is_empty() {
            if ended {
                self.finished = self.conn.drained(self.socket.as_fd(), self.sent);
            } else {
                self.conn.settle(self.socket.as_fd(), self.received, self.sent);
                self.parked = self.parks && self.conn.park(self.socket.as_fd(), 0);
            }
        }
        Ok(moved)
    }

    fn hung_up(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec::default()))?;
        Ok(!fds[0].revents().is_empty())
    }

    fn answer(&mut self) -> io::Result<()> {
        let mut at = 0;
        while let Ok(Frame::Part(part)) = self.framing.parse(&self.input[at..], 0) {
            if self.input.len() - at < part.total_bytes() {
                break;
            }
            let body = &self.input[at + part.header_bytes..][..part.body_bytes];
            let start = self.output.len();
            self.output.resize(start + self.framing.reply_header_bytes(), 0);
            for piece in body.chunks(crate::abi::BYTES_MAX) {
                match self.caller.call(piece, &mut self.output) {
                    Ok(Verdict::Reply) => {}
                    Ok(Verdict::Echo) => self.output.extend_from_slice(piece),
                    Ok(Verdict::Pass) => return Err(io::Error::other("the service's function passed the message")),
                    Err(error) => return Err(io::Error::other(error.to_string())),
                }
            }
            let framed = self.framing.finish_reply(&mut self.output, start, 0);
            framed.map_err(|error| io::Error::other(error.to_string()))?;
            self.output.extend_from_slice(self.framing.reply_trailer());
            at += part.total_bytes();
        }
        self.input.drain(..at);
        Ok(())
    }
}

/// `None` for "not now".
fn again(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Bytes that differ from place to place.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}

const NULL_PROGRAM: u32 = 0x2000_0000;

fn null_call(xid: u32) -> Vec<u8> {
    words(&[0x8000_0028, xid, 0, 2, NULL_PROGRAM, 1, 0, 0, 0, 0, 0])
}

fn null_reply(xid: u32) -> Vec<u8> {
    words(&[0x8000_0018, xid, 1, 0, 0, 0, 0])
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn this_kernel_passes() {
        let Some(()) = ksf_test::root_or_skip("eBPF") else { return };
        super::self_test().unwrap();
    }

    #[test]
    fn unread_bytes_are_what_was_sent_and_not_read() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        sender.write_all(b"three").unwrap();
        receiver.read_exact(&mut [0; 2]).unwrap();
        ksf_test::wait_until("three bytes are unread", || super::unread_bytes(&receiver) == Some(3));
        assert!(!super::is_short_of_memory(&receiver), "they are enough for SO_RCVLOWAT of 1");
        assert_eq!(super::unread_bytes(&sender), Some(0));
        assert!(super::is_short_of_memory(&sender));
    }
}
