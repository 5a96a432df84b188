//! One connection, its multiplexor in the kernel, and the sockets of that.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

use ksf::buffers::Buffers;
use ksf::cutter::CutError;
use ksf::limits::Limits;
use ksf::output::SendBatch;
use ksf_mux::backend::{OutQueue, SendProgress, Transmit};
use ksf_mux::{ConnectionError, ConnectionId, MessageFraming};
use rustix::event::epoll;
use rustix::io::Errno;

use super::socket::Member;
use super::{Shared, lock, read, write};
use crate::cut::cut;
use crate::intake::Intake;
use crate::program::overhead_bytes;
use crate::socket::RawKcmSocket;

pub(super) struct KernelConnection {
    pub(super) id: ConnectionId,
    shared: Weak<Shared>,
    pub(super) framing: MessageFraming,
    pub(super) limits: Limits,
    /// Until it is detached.
    tcp: RwLock<Option<Arc<Tcp>>>,
    /// Keeps the kernel's multiplexor, and receives nothing: there may be no message socket for a while.
    pub(super) root: RawKcmSocket,
    lanes: RwLock<Lanes>,
    pub(super) intake: Intake,
    pub(super) outbox: OutQueue<Tcp>,
    pub(super) progress: Mutex<SendProgress>,
    /// A batch waits until then, or until a message ends it.
    pub(super) batch_until: Mutex<Option<Instant>>,
    /// Bytes and number of messages that are not done with.
    pub(super) waiting_bytes: AtomicUsize,
    pub(super) waiting_messages: AtomicUsize,
    /// What the kernel has reported, until everything it had cut is received.
    pub(super) ending: Mutex<Option<Ending>>,
    pub(super) error: OnceLock<ConnectionError>,
    /// Readers were told of it.
    pub(super) reported: AtomicBool,
    /// No message is to be taken any more.
    pub(super) refused: AtomicBool,
    pub(super) detached: AtomicBool,
    /// The timer thread has it on its list.
    pub(super) busy: AtomicBool,
    pub(super) counts: Counts,
}

/// Counters, under the names of AF_KCM.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) rx_messages: AtomicU64,
    pub(super) rx_bytes: AtomicU64,
    pub(super) tx_messages: AtomicU64,
    pub(super) tx_bytes: AtomicU64,
}

#[derive(Default)]
struct Lanes {
    all: Vec<Arc<Lane>>,
    /// They are not read, because too much of the connection waits.
    paused: bool,
}

/// One of the multiplexor's sockets, which belongs to a message socket.
pub(super) struct Lane {
    member: Arc<Member>,
    pub(super) socket: RawKcmSocket,
}

/// How a connection ends, as the kernel has reported.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    /// `None`: the peer ended its stream.
    pub(super) errno: Option<Errno>,
    /// Bytes in no message, and since when their number is the same.
    pub(super) unread: Option<(u64, Instant)>,
}

/// The TCP socket, as far as sending is concerned.
#[derive(Debug)]
pub(super) struct Tcp {
    pub(super) socket: OwnedFd,
    /// What AF_KCM reported to a sending call; 0: nothing.
    report: AtomicI32,
}

impl Tcp {
    pub(super) fn take_report(&self) -> Option<Errno> {
        match self.report.swap(0, Ordering::SeqCst) {
            0 => None,
            errno => Some(Errno::from_raw_os_error(errno)),
        }
    }
}

impl Transmit for Tcp {
    fn transmit(&self, batch: &SendBatch) -> Result<usize, Errno> {
        const SLICES_MAX: usize = 64;
        let mut parts = [&[][..]; SLICES_MAX];
        let filled = batch.slices(&mut parts);
        let slices = parts.map(std::io::IoSlice::new);
        crate::tcp::send(&self.socket, &slices[..filled], |errno| {
            self.report.store(errno.raw_os_error(), Ordering::SeqCst);
        })
    }
}

impl AsFd for Tcp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl KernelConnection {
    pub(super) fn new(
        id: ConnectionId,
        shared: &Arc<Shared>,
        socket: OwnedFd,
        (framing, limits): (MessageFraming, Limits),
        root: RawKcmSocket,
        read_bytes: u64,
    ) -> Self {
        let tcp = Arc::new(Tcp { socket, report: AtomicI32::new(0) });
        Self {
            id,
            shared: Arc::downgrade(shared),
            framing,
            limits,
            tcp: RwLock::new(Some(Arc::clone(&tcp))),
            root,
            lanes: RwLock::default(),
            intake: Intake::new(read_bytes),
            outbox: OutQueue::new(tcp),
            progress: Mutex::default(),
            batch_until: Mutex::default(),
            waiting_bytes: AtomicUsize::new(0),
            waiting_messages: AtomicUsize::new(0),
            ending: Mutex::default(),
            error: OnceLock::new(),
            reported: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            detached: AtomicBool::new(false),
            busy: AtomicBool::new(false),
            counts: Counts::default(),
        }
    }

    pub(super) fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.upgrade()
    }

    /// The connection, until it is detached.
    pub(super) fn tcp(&self) -> Option<Arc<Tcp>> {
        read(&self.tcp).clone()
    }

    pub(super) fn take_tcp(&self) -> Option<Arc<Tcp>> {
        write(&self.tcp).take()
    }

    // --- lanes ------------------------------------------------------------------------------------------------------

    /// Gives a message socket one of the kernel's.
    pub(super) fn join(&self, member: &Arc<Member>) -> Result<(), crate::KcmError> {
        let socket = self.root.try_clone()?;
        socket.set_recv_disabled(!member.is_receiving())?;
        let mut lanes = write(&self.lanes);
        let flags = if lanes.paused { epoll::EventFlags::empty() } else { epoll::EventFlags::IN };
        let data = epoll::EventData::new_u64(self.id.to_u64());
        epoll::add(member.set(), &socket, data, flags).map_err(crate::KcmError::os("epoll_ctl"))?;
        lanes.all.push(Arc::new(Lane { member: Arc::clone(member), socket }));
        Ok(())
    }

    /// Takes it away; messages that wait there go to others.
    pub(super) fn leave(&self, member: &Member) {
        write(&self.lanes).all.retain(|lane| {
            let is_other = lane.member.number != member.number;
            if !is_other {
                lane.close();
            }
            is_other
        });
    }

    /// The kernel's socket of a message socket.
    pub(super) fn lane(&self, member: &Member) -> Option<Arc<Lane>> {
        read(&self.lanes).all.iter().find(|lane| lane.member.number == member.number).cloned()
    }

    /// All of them, for good: no worker is told of messages there any more.
    pub(super) fn take_lanes(&self) -> Vec<Arc<Lane>> {
        let lanes = std::mem::take(&mut write(&self.lanes).all);
        lanes.iter().for_each(|lane| lane.unlist());
        lanes
    }

    /// True if no worker is to be told of messages, now.
    pub(super) fn set_paused(&self, paused: bool) {
        let mut lanes = write(&self.lanes);
        if lanes.paused == paused {
            return;
        }
        lanes.paused = paused;
        let flags = if paused { epoll::EventFlags::empty() } else { epoll::EventFlags::IN };
        for lane in &lanes.all {
            let data = epoll::EventData::new_u64(self.id.to_u64());
            let _ = epoll::modify(lane.member.set(), &lane.socket, data, flags);
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        read(&self.lanes).paused
    }

    /// True while no more of it is to be received.
    pub(super) fn must_wait(&self) -> bool {
        self.refused.load(Ordering::SeqCst)
            || self.waiting_messages.load(Ordering::SeqCst) >= self.limits.deferred_max as usize
            || self.waiting_bytes.load(Ordering::SeqCst) + self.outbox.bytes() >= self.limits.connection_bytes_max
            || self.outbox.bytes() >= self.limits.out_queue_bytes_max
    }

    // --- what came in -----------------------------------------------------------------------------------------------

    /// Bytes in no message; `None` while a message waits, or no worker receives any.
    pub(super) fn unread_bytes(&self, tcp: &Tcp) -> Result<Option<u64>, crate::KcmError> {
        let lanes = read(&self.lanes);
        if !lanes.all.iter().any(|lane| lane.member.is_receiving()) {
            return Ok(None);
        }
        self.intake.unread_bytes(tcp, sockets(&lanes))
    }

    /// Whether a message waits on any socket.
    pub(super) fn has_messages(&self) -> bool {
        let lanes = read(&self.lanes);
        self.intake.is_active() || sockets(&lanes).any(|socket| socket.has_message().unwrap_or(false))
    }

    pub(super) fn unfinished_for(&self, tcp: &Tcp, now: Instant) -> Duration {
        let lanes = read(&self.lanes);
        let is_read = !lanes.paused && self.error.get().is_none() && lock(&self.ending).is_none();
        self.intake.unfinished_for(tcp.as_fd(), sockets(&lanes), is_read, now)
    }

    /// Bytes queued for it at which it takes no answer.
    pub(super) fn answer_bytes_max(&self) -> usize {
        self.limits.connection_bytes_max.max(self.limits.out_queue_bytes_max)
    }

    /// Longest message on the wire.
    pub(super) fn wire_bytes_max(&self) -> usize {
        wire_bytes_max(&self.framing, &self.limits)
    }

    /// The message in what the kernel delivered. That it has cut it right is not taken for granted: a program that does
    /// not know where a message starts cuts wrongly, without an error.
    pub(super) fn body(
        &self,
        wire: &[u8],
        is_whole: bool,
        buffers: &Buffers,
    ) -> Result<ksf::pool::Chunk, ConnectionError> {
        use ksf_bpf_framing::FramingVerdict;
        let limit = self.limits.message_bytes_max;
        let oversized = || Err(ConnectionError::OversizedMessage { bytes: wire.len(), limit });
        match &self.framing {
            _ if !is_whole => oversized(),
            MessageFraming::Program(program) => match program.message_len(&[wire]) {
                Ok(FramingVerdict::Length(bytes)) if bytes as usize != wire.len() => {
                    Err(ConnectionError::Miscut { bytes: wire.len() })
                }
                Ok(FramingVerdict::Length(_)) if wire.len() > limit => oversized(),
                Ok(FramingVerdict::Length(_)) => Ok(ksf::pool::Chunk::from_vec(wire.to_vec())),
                Ok(_) => Err(ConnectionError::Miscut { bytes: wire.len() }),
                Err(error) => Err(ConnectionError::Program(error)),
            },
            MessageFraming::Native(framing) => match cut(*framing, wire, &self.limits, buffers) {
                Ok(Some(message)) => Ok(message),
                Err(error @ (CutError::Oversized { .. } | CutError::EndlessParts { .. })) => Err(error.into()),
                Ok(None) | Err(_) => Err(ConnectionError::Miscut { bytes: wire.len() }),
            },
            // Newer than this crate: it was not attached.
            _ => Err(ConnectionError::Miscut { bytes: wire.len() }),
        }
    }
}

/// Longest message on the wire.
pub(super) fn wire_bytes_max(framing: &MessageFraming, limits: &Limits) -> usize {
    let overhead = match framing {
        MessageFraming::Native(framing) => overhead_bytes(framing),
        _ => 0,
    };
    limits.message_bytes_max.saturating_add(overhead)
}

fn sockets<'a>(lanes: &'a RwLockReadGuard<'_, Lanes>) -> impl Iterator<Item = &'a RawKcmSocket> {
    lanes.all.iter().map(|lane| &lane.socket)
}

impl Lane {
    /// Stops or resumes receiving; what waits goes to other sockets of the connection.
    pub(super) fn set_receiving(&self, receiving: bool) -> Result<(), crate::KcmError> {
        self.socket.set_recv_disabled(!receiving)
    }

    /// No worker is told of messages here any more.
    pub(super) fn unlist(&self) {
        let _ = epoll::delete(self.member.set(), &self.socket);
    }

    fn close(&self) {
        self.unlist();
        let _ = self.set_receiving(false);
    }
}

impl fmt::Debug for KernelConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelConnection").field("id", &self.id).finish_non_exhaustive()
    }
}
