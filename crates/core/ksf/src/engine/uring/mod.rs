//! The io_uring engine: one ring per shard.
//!
//! Multishot accept and receive, so one request serves a socket for as long as it lives (Linux 5.19, 6.0); receive
//! buffers come from a provided-buffer ring whose entries are slots of the pool (5.19); one completion per buffer,
//! because bundles and incremental buffers were delivered out of order by some 6.x kernels (liburing issues 1409 and
//! 1432); one send in flight per connection, because several at once reorder (measured). Completions run when the
//! shard waits (DEFER_TASKRUN, 6.1), not in the middle of its work.
//!
//! The rest of a long message goes straight into the buffer of that message, by a receive of its own that begins when the
//! multishot receive has ended.
//!
//! A turn is one system call to wait, and one per batch to send: sends are first tried without the ring, and only
//! what TCP does not take waits in the kernel. Datagrams go by plain calls in both directions, see [`datagram`].
//!
//! ```text
//!   pool ──take──► buffer ring ──kernel fills──► completion(connection, entry, length) ──► Chunk ──► shard
//!     ▲                 ▲                                                                    │
//!     └── last drop ────┼──────────────────────── another slot takes the entry's place ◄─────┘
//! ```

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::Duration;
use std::{io, mem};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::datagram_receiver::{DatagramReceiver, check_not_shut_down};
use super::datagrams::DatagramQueues;
use super::msg::SendMsg;
use super::no_memory::NoMemory;
use super::{Engine, Event, Reading, SPARES_MAX, Wait, pause};
use crate::boxes::Boxes;
use crate::cutter::Direct;
use crate::datagram_output::DatagramOutput;
use crate::env::Env;
use crate::error::Error;
use crate::files::Begun;
use crate::output::SendBatch;
use crate::service::ConnKey;

mod accept;
mod buffer_ring;
mod connection;
mod datagram;
mod file;
mod receive;
mod ring;
mod send;
mod unread;

use accept::Listener;
use buffer_ring::BufferRing;
use connection::Conn;
use datagram::DatagramSocket;
use file::{FileOps, WORKERS_MAX};
use receive::Recv;
pub(crate) use ring::probe;
use ring::{COMPLETIONS, Op, build_ring, tolerate};
use send::Send;

/// How long dropping the engine waits for the kernel to end its requests, per look and in looks.
const DROP_WAIT: Duration = Duration::from_millis(10);
const DROP_WAITS_MAX: u32 = 200;
/// When no slot is free, look again after this time: their holders do not tell the engine.
const STARVED: Duration = Duration::from_micros(500);

pub(crate) struct Uring {
    /// Dropped first: the kernel then ends all requests and no longer touches what the fields below own.
    ring: IoUring,
    buffers: BufferRing,
    conns: Vec<Conn>,
    listeners: Vec<Listener>,
    sockets: Vec<DatagramSocket>,
    datagrams: DatagramQueues,
    receiver: DatagramReceiver,
    /// A datagram socket found no slot.
    starved: bool,
    files: FileOps,
    /// Send headers to use again; boxed, because they move between here and sends that the kernel reads.
    #[expect(clippy::vec_box, reason = "the address must hold")]
    spare_msgs: Vec<Box<SendMsg>>,
    spare_sends: Boxes<Send, SPARES_MAX>,
    /// Requests that did not fit the submission queue yet.
    backlog: VecDeque<squeue::Entry>,
    /// Receives that ended and shall be started again at the next wait.
    rearm: Vec<Op>,
    /// Connections that [lack memory](Send::lacks_memory), and maybe others.
    no_memory: NoMemory,
    /// Events that need no completion.
    ready: Vec<Event>,
    watches: Vec<RawFd>,
    /// Reports resets of connections that are not read, once there was one.
    unread: Option<OwnedFd>,
    /// Requests whose last completion has not been seen: the kernel may use what they point to.
    under_way: usize,
    /// The kernel lets completions gather (6.12). Older ones refuse the argument.
    min_wait: bool,
    /// The ring shows whether completions are deferred: a look that finds nothing needs no system call.
    flagged: bool,
    /// For sends without the ring.
    msg: Box<SendMsg>,
}

impl Engine for Uring {
    #[cfg(test)]
    const CONN_BYTES: usize = size_of::<Conn>();

    fn new(env: &mut Env, spins: bool) -> Result<Self, Error> {
        let ring = build_ring(spins)?;
        // Its descriptor is not registered with the thread: the thread would keep the ring, and what that was given, until the
        // thread ends, and only the `Submitter` that registered would use it (io-uring 0.7), of which each call makes a new one.
        // Its default is four for each CPU: fewer than a disk takes. Only a bound, so an old kernel may refuse it (5.15).
        let _ = ring.submitter().register_iowq_max_workers(&mut [WORKERS_MAX; 2]);
        let buffers = BufferRing::register(&ring, &mut env.pool)?;
        let min_wait = ring.params().is_feature_min_timeout();
        Ok(Self {
            ring,
            buffers,
            conns: Vec::new(),
            listeners: Vec::new(),
            sockets: Vec::new(),
            datagrams: DatagramQueues::new(),
            receiver: DatagramReceiver::new(),
            starved: false,
            files: FileOps::default(),
            spare_msgs: Vec::new(),
            spare_sends: Boxes::default(),
            backlog: VecDeque::new(),
            rearm: Vec::new(),
            no_memory: NoMemory::default(),
            ready: Vec::new(),
            watches: Vec::new(),
            unread: None,
            under_way: 0,
            min_wait,
            flagged: spins,
            msg: SendMsg::boxed(),
        })
    }

    fn watch(&mut self, watch: u32, fd: RawFd) -> Result<(), Error> {
        let at = watch as usize;
        if at >= self.watches.len() {
            self.watches.resize(at + 1, -1);
        }
        self.watches[at] = fd;
        self.arm_watch(watch);
        Ok(())
    }

    fn listen(&mut self, listener: u32, socket: RawFd) {
        self.start_accepting(listener, socket);
    }

    fn unlisten(&mut self, listener: u32) {
        self.stop_accepting(listener);
    }

    fn listen_datagrams(&mut self, socket: u32, fd: RawFd) -> io::Result<()> {
        check_not_shut_down(fd)?;
        self.start_datagrams(socket, fd);
        Ok(())
    }

    fn set_datagrams_reading(&mut self, socket: u32, reads: bool) {
        // A poll that is armed may still tell of something, which is then not received.
        self.receiver.set_reading(socket, reads);
    }

    fn open(&mut self, conn: ConnKey, socket: RawFd, reading: Reading) {
        self.open_conn(conn, socket, reading);
    }

    fn connect(&mut self, conn: ConnKey, to: SocketAddr) {
        self.start_connect(conn, to);
    }

    fn is_quiet(&mut self, conn: ConnKey) -> bool {
        self.conn(conn).is_some_and(|state| state.recv == Recv::Off)
    }

    fn receive_direct(&mut self, conn: ConnKey, direct: Direct) {
        self.receive_lent(conn, direct);
    }

    fn set_reading(&mut self, conn: ConnKey, reading: Reading) {
        self.change_reading(conn, reading);
    }

    fn send(&mut self, conn: ConnKey, batch: SendBatch, last: bool, env: &mut Env) -> (usize, bool) {
        self.send_batch(conn, batch, last, env)
    }

    fn datagram_output(&mut self, socket: u32) -> &mut DatagramOutput {
        self.datagrams.output(socket)
    }

    fn datagrams_added(&mut self, socket: u32, env: &mut Env) {
        self.datagrams.added(socket, env);
    }

    fn flush(&mut self, env: &mut Env) {
        self.datagrams.flush(env);
        self.poll_full_sockets();
    }

    fn release(&mut self, conn: ConnKey) -> bool {
        self.release_conn(conn)
    }

    fn begin_file(&mut self, begun: Box<Begun>, env: &mut Env) {
        Self::begin_file(self, begun, env);
    }

    fn end_files(&mut self, _: &mut Env) -> Vec<Begun> {
        self.shutdown();
        let mut ended = mem::take(&mut self.files.ended);
        ended.extend(self.ready.drain(..).filter_map(|event| match event {
            Event::File(begun) => Some(*begun),
            _ => None,
        }));
        ended
    }

    fn shutdown(&mut self) {
        if self.under_way == 0 {
            return;
        }
        // Closing a ring ends its requests later, from a work queue: until then sockets stay open (a new server would
        // find the port busy) and memory may be used. So they are ended here, and waited for.
        self.push(opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(Op::Cancel.user_data()));
        let mut completed = Vec::new();
        for _ in 0..DROP_WAITS_MAX {
            self.flush_backlog();
            let patience = Timespec::from(DROP_WAIT);
            let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&patience));
            completed.extend(self.ring.completion());
            for entry in completed.drain(..) {
                self.under_way -= usize::from(!cqueue::more(entry.flags()));
                match Op::from_user_data(entry.user_data()) {
                    Some(Op::Accept(_)) if entry.result() >= 0 => {
                        // SAFETY: the kernel made this descriptor for the accept request and told no other code of it.
                        drop(unsafe { OwnedFd::from_raw_fd(entry.result()) });
                    }
                    Some(Op::File(index)) => {
                        let ended = self.file_ended(index, &entry);
                        self.files.ended.extend(ended.map(|begun| *begun));
                    }
                    _ => {}
                }
            }
            if self.under_way == 0 {
                return;
            }
        }
        // The kernel does not let go: leak what it may still use rather than free it.
        mem::forget(mem::take(&mut self.conns));
        self.buffers.leak_slots();
        self.files.leak();
        self.under_way = 0;
    }

    fn wait(&mut self, env: &mut Env, wait: Wait, events: &mut Vec<Event>) -> io::Result<()> {
        self.flush(env);
        self.buffers.refill(&mut env.pool);
        self.rearm_all();
        let Wait { mut timeout, mut gather } = wait;
        let submits = !self.backlog.is_empty() || !self.ring.submission().is_empty();
        let others_wait = submits || self.receiver.is_look_due();
        // A slot may be free again, which only a receive tells.
        let all = mem::take(&mut self.starved) || timeout == Some(Duration::ZERO) && !others_wait;
        if self.receive_more(all, env, events) {
            if !others_wait {
                events.append(&mut self.ready);
                self.reap(env, events);
                return Ok(());
            }
            (timeout, gather) = (Some(Duration::ZERO), None);
        }
        self.receiver.looked();
        // Where there are requests to submit, one more costs no system call.
        if (timeout != Some(Duration::ZERO) || submits) && !self.starved {
            self.arm_datagrams();
        }
        if self.buffers.is_starved() || self.starved {
            timeout = Some(timeout.map_or(STARVED, |timeout| timeout.min(STARVED)));
        }
        timeout = self.no_memory.limit(timeout);
        let nothing_ready = self.ready.is_empty() && self.ring.completion().is_empty();
        let is_look = self.flagged && timeout == Some(Duration::ZERO);
        let want = usize::from(nothing_ready && !is_look);
        self.enter(env, want, timeout, gather)?;
        if !self.ready.is_empty() {
            events.append(&mut self.ready);
        }
        self.reap(env, events);
        self.send_again();
        Ok(())
    }
}

impl Uring {
    /// Submits what was pushed and waits for `want` completions. With `gather`, more may come until that time is
    /// over, and the shard sleeps through all of them (min-wait, 6.12; before that it just sleeps first).
    fn enter(&mut self, env: &Env, want: usize, timeout: Option<Duration>, gather: Option<Duration>) -> io::Result<()> {
        while !self.backlog.is_empty() {
            self.flush_backlog();
            if !self.backlog.is_empty() {
                env.stats.syscalls.add(1);
                tolerate(self.ring.submit())?;
                if !self.ring.completion().is_empty() {
                    // Room for completions comes first; the rest of the requests goes with the next wait.
                    return Ok(());
                }
            }
        }
        if want == 0 && self.flagged && !self.needs_kernel() {
            return Ok(());
        }
        env.stats.syscalls.add(1);
        let mut args = SubmitArgs::new();
        let timespec;
        let result = if want == 0 {
            self.ring.submit()
        } else {
            let mut want = want;
            if let Some(gather) = gather.filter(|_| !self.min_wait) {
                pause(gather, env);
            }
            if let Some(gather) = gather.filter(|_| self.min_wait) {
                // Returns with however many there are when the time is over, or earlier with this many.
                args = args.min_wait_usec(gather.as_micros().min(10_000) as u32);
                want = COMPLETIONS as usize / 4;
            }
            if let Some(timeout) = timeout {
                timespec = Timespec::from(timeout);
                args = args.timespec(&timespec);
            }
            self.ring.submitter().submit_with_args(want, &args)
        };
        tolerate(result)
    }

    /// Whether the kernel has something to do: requests to take, or completions that it deferred or put aside.
    fn needs_kernel(&mut self) -> bool {
        let requests = self.ring.submission();
        !requests.is_empty() || requests.taskrun() || requests.cq_overflow()
    }

    fn reap(&mut self, env: &mut Env, events: &mut Vec<Event>) {
        // One by one: handling one may push requests, which borrows the ring.
        let ready = self.ring.completion().len();
        for _ in 0..ready {
            let Some(entry) = self.ring.completion().next() else { return };
            self.complete(&entry, env, events);
        }
    }

    fn complete(&mut self, entry: &cqueue::Entry, env: &mut Env, events: &mut Vec<Event>) {
        self.under_way -= usize::from(!cqueue::more(entry.flags()));
        match Op::from_user_data(entry.user_data()) {
            Some(Op::Accept(listener)) => self.accepted(listener, entry, events),
            Some(Op::Connect(index)) => self.connected(index, entry, events),
            Some(Op::Datagram(socket)) => self.datagram_ready(socket, entry.result(), env, events),
            Some(Op::File(index)) => events.extend(self.file_ended(index, entry).map(Event::File)),
            Some(Op::Hangup(index)) => self.hung_up(index, entry, events),
            Some(Op::Recv(index)) => self.received(index, entry, env, events),
            Some(Op::Send(index)) => self.sent(index, entry, env, events),
            Some(Op::Unread) => self.report_resets(entry, events),
            Some(Op::Room(socket)) => self.socket_has_room(socket, entry.result(), env),
            Some(Op::Watch(watch)) => {
                events.push(Event::Watched { watch });
                if !cqueue::more(entry.flags()) {
                    self.rearm.push(Op::Watch(watch));
                }
            }
            Some(Op::Cancel) | None => {}
        }
    }

    fn rearm_all(&mut self) {
        if self.rearm.is_empty() {
            return;
        }
        // Receives without a free buffer would fail at once, over and over.
        let starved = self.buffers.is_starved();
        let mut ops = mem::take(&mut self.rearm);
        ops.retain(|op| match *op {
            Op::Recv(_) if starved => true,
            op => {
                match op {
                    Op::Accept(listener) => self.arm_accept(listener),
                    Op::Recv(index) => self.arm_recv(index),
                    Op::Unread => self.arm_unread(),
                    Op::Watch(watch) => self.arm_watch(watch),
                    Op::Cancel
                    | Op::Connect(_)
                    | Op::Datagram(_)
                    | Op::File(_)
                    | Op::Hangup(_)
                    | Op::Room(_)
                    | Op::Send(_) => {}
                }
                false
            }
        });
        self.rearm = ops;
    }

    fn arm_watch(&mut self, watch: u32) {
        let fd = self.watches[watch as usize];
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(entry.user_data(Op::Watch(watch).user_data()));
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // Does nothing when it was done already.
        self.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use ksf_test::{skip, wait_until};

    use super::*;
    use crate::engine::EngineKind;
    use crate::limits::Limits;
    use crate::pool::{Memory, Pool};

    /// What a ring was given, like a socket here, it keeps as long as it is there.
    #[test]
    fn a_ring_ends_with_its_engine_while_the_thread_goes_on() {
        if let Err(error) = EngineKind::Uring.probe() {
            return skip(format_args!("needs io_uring ({error})"));
        }
        let mut env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, 4096, 256).unwrap()).unwrap();
        let engine = Uring::new(&mut env, false).unwrap();
        let (given, mut peer) = UnixStream::pair().unwrap();
        engine.ring.submitter().register_files(&[given.as_raw_fd()]).unwrap();
        drop((given, engine));
        peer.set_nonblocking(true).unwrap();
        // The kernel ends a ring a little after it was closed.
        wait_until("the socket is closed", || matches!(peer.read(&mut [0; 8]), Ok(0)));
    }
}
