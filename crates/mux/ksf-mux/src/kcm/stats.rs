//! Counters under the names of AF_KCM, and its two files (net/kcm/kcmproc.c).

use std::fmt::Write as _;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use ksf_bpf_framing::RunError;

use super::socket::{KcmSocket, lock};
use crate::connection::{Connection, Counts};
use crate::error::ConnectionError;
use crate::mux::{ConnectionId, Mux};
use crate::sync::Arc;

/// No connection has this number.
pub(super) const NO_BATCH: u64 = u64::MAX;

/// Counters of one socket.
#[derive(Debug)]
pub(super) struct SocketCounts {
    pub(super) index: u32,
    pub(super) rx_messages: AtomicU64,
    pub(super) rx_bytes: AtomicU64,
    pub(super) tx_messages: AtomicU64,
    pub(super) tx_bytes: AtomicU64,
    /// Times a connection was taken for a message or a batch of them.
    pub(super) reserved: AtomicU64,
    /// The connection of an unfinished batch.
    pub(super) batch: AtomicU64,
}

impl SocketCounts {
    pub(super) fn new(index: u32) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            index,
            rx_messages: zero(),
            rx_bytes: zero(),
            tx_messages: zero(),
            tx_bytes: zero(),
            reserved: zero(),
            batch: AtomicU64::new(NO_BATCH),
        }
    }
}

/// Ends of connections, by cause.
#[derive(Debug, Default)]
pub(crate) struct EndCounts {
    rx_aborts: AtomicU64,
    rx_interrupted: AtomicU64,
    rx_unrecoverable: AtomicU64,
    rx_memory: AtomicU64,
    rx_bad_length: AtomicU64,
    rx_too_big: AtomicU64,
    rx_timeout: AtomicU64,
    tx_aborts: AtomicU64,
}

impl EndCounts {
    /// Counts one.
    pub(crate) fn note(&self, error: &ConnectionError) {
        let cause = match error {
            ConnectionError::PeerClosed
            | ConnectionError::IdleTimeout { .. }
            | ConnectionError::ClosedByService
            | ConnectionError::Stopping => return,
            ConnectionError::PeerClosedMidMessage { .. } => Some(&self.rx_interrupted),
            ConnectionError::OversizedMessage { .. }
            | ConnectionError::EndlessHeader { .. }
            | ConnectionError::EndlessFragments { .. } => Some(&self.rx_too_big),
            ConnectionError::AssemblyTimeout { .. } => Some(&self.rx_timeout),
            ConnectionError::MemoryLimit { .. } => Some(&self.rx_memory),
            ConnectionError::Program(RunError::TooShort { .. } | RunError::InOldData { .. }) => {
                Some(&self.rx_bad_length)
            }
            ConnectionError::Program(_)
            | ConnectionError::Malformed(_)
            | ConnectionError::Refused { .. }
            | ConnectionError::HandedBack => Some(&self.rx_unrecoverable),
            ConnectionError::SendTimeout { .. } | ConnectionError::ReplyLimit { .. } => {
                self.tx_aborts.fetch_add(1, Ordering::Relaxed);
                return;
            }
            ConnectionError::Socket { .. } => {
                self.tx_aborts.fetch_add(1, Ordering::Relaxed);
                None
            }
            ConnectionError::WorkerPanicked | ConnectionError::Abandoned => None,
        };
        self.rx_aborts.fetch_add(1, Ordering::Relaxed);
        if let Some(cause) = cause {
            cause.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl EndCounts {
    /// Puts them where they belong.
    fn fill(&self, stats: &mut MuxStats) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        stats.rx_aborts = load(&self.rx_aborts);
        stats.rx_interrupted = load(&self.rx_interrupted);
        stats.rx_unrecoverable = load(&self.rx_unrecoverable);
        stats.rx_memory = load(&self.rx_memory);
        stats.rx_bad_length = load(&self.rx_bad_length);
        stats.rx_too_big = load(&self.rx_too_big);
        stats.rx_timeout = load(&self.rx_timeout);
        stats.tx_aborts = load(&self.tx_aborts);
    }
}

/// One multiplexor, its sockets and its connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KcmStats {
    /// The multiplexor.
    pub mux: MuxStats,
    /// Its sockets.
    pub sockets: Vec<SocketStats>,
    /// Its connections.
    pub connections: Vec<ConnectionStats>,
}

/// Counters of a multiplexor: the columns of /proc/net/kcm_stats, its lines MUX and Psock. Messages count when they
/// are whole, each byte once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MuxStats {
    /// RX-Msgs.
    pub rx_messages: u64,
    /// RX-Bytes.
    pub rx_bytes: u64,
    /// TX-Msgs.
    pub tx_messages: u64,
    /// TX-Bytes.
    pub tx_bytes: u64,
    /// TX-Retries: messages given to another connection when theirs failed.
    pub tx_retries: u64,
    /// Attach.
    pub attach: u64,
    /// Unattach.
    pub unattach: u64,
    /// UnattchRsvd: those among them that had an unfinished batch of a socket.
    pub unattach_reserved: u64,
    /// RX-RdyDrops: whole messages dropped by unattach. None is.
    pub rx_ready_drops: u64,
    /// Reserved: times a connection was taken for a message or a batch.
    pub reserved: u64,
    /// Unreserved: times it was let go.
    pub unreserved: u64,
    /// RX-Aborts: connections that ended for another reason than their peer's end between two messages.
    pub rx_aborts: u64,
    /// RX-Intr: those that ended inside a message.
    pub rx_interrupted: u64,
    /// RX-Unrecov: those whose program failed or refused the stream.
    pub rx_unrecoverable: u64,
    /// RX-MemFail: those that needed more memory than there may be.
    pub rx_memory: u64,
    /// RX-NeedMor: times bytes came and the length of the message was unknown still.
    pub rx_need_more: u64,
    /// RX-BadLen: those whose program announced an impossible length.
    pub rx_bad_length: u64,
    /// RX-TooBig: those with a message or header longer than allowed.
    pub rx_too_big: u64,
    /// RX-Timeout: those with a message that did not arrive in time.
    pub rx_timeout: u64,
    /// TX-Aborts: those that failed while sending, or altogether.
    pub tx_aborts: u64,
}

/// A socket: a line `kcm-N` of /proc/net/kcm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SocketStats {
    /// N.
    pub index: u32,
    /// RX-Msgs: messages read to their end.
    pub rx_messages: u64,
    /// RX-Bytes.
    pub rx_bytes: u64,
    /// TX-Msgs.
    pub tx_messages: u64,
    /// TX-Bytes.
    pub tx_bytes: u64,
    /// Psck-N: the connection of its unfinished batch.
    pub batch: Option<ConnectionId>,
}

/// A connection: a line `psock-N` of /proc/net/kcm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionStats {
    /// Which one; N is its index.
    pub connection: ConnectionId,
    /// RX-Msgs.
    pub rx_messages: u64,
    /// RX-Bytes.
    pub rx_bytes: u64,
    /// TX-Msgs.
    pub tx_messages: u64,
    /// TX-Bytes.
    pub tx_bytes: u64,
    /// Recv-Q: messages of it that are not done with.
    pub waiting_messages: usize,
    /// Rmem: their bytes of payload, and in pages the memory of one whose rest is to come.
    pub waiting_bytes: usize,
    /// Send-Q: bytes TCP has not taken.
    pub unsent_bytes: usize,
    /// RxStop: it brings no more messages.
    pub is_ended: bool,
    /// RxPause: it is not read, because too much of it waits.
    pub is_paused: bool,
}

impl Mux {
    /// Counters under the names of AF_KCM. A multiplexor without [`KcmSocket`]s reserves nothing.
    pub fn kcm_stats(&self) -> MuxStats {
        let shared = self.shared();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let sum = Counts::default();
        sum.add(&shared.counts.retired);
        shared.all().iter().for_each(|conn| sum.add(&conn.counts));
        let mut stats = MuxStats {
            rx_messages: load(&sum.rx_messages),
            rx_bytes: load(&sum.rx_bytes),
            tx_messages: load(&sum.tx_messages),
            tx_bytes: load(&sum.tx_bytes),
            tx_retries: load(&shared.counts.tx_retries),
            attach: load(&shared.counts.attach),
            unattach: load(&shared.counts.unattach),
            rx_need_more: load(&sum.rx_need_more),
            ..MuxStats::default()
        };
        shared.counts.ends.fill(&mut stats);
        stats
    }

    /// The counters of each attached connection.
    pub fn connection_stats(&self) -> Vec<ConnectionStats> {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let of = |conn: &Arc<Connection>| ConnectionStats {
            connection: conn.id,
            rx_messages: load(&conn.counts.rx_messages),
            rx_bytes: load(&conn.counts.rx_bytes),
            tx_messages: load(&conn.counts.tx_messages),
            tx_bytes: load(&conn.counts.tx_bytes),
            waiting_messages: conn.waiting_messages.load(Ordering::SeqCst),
            waiting_bytes: conn.waiting_bytes.load(Ordering::SeqCst) + conn.awaited_bytes(),
            unsent_bytes: conn.out_queue.bytes(),
            is_ended: conn.error.get().is_some(),
            is_paused: conn.paused.load(Ordering::SeqCst),
        };
        self.shared().all().iter().map(of).collect()
    }
}

impl KcmSocket {
    /// Counters of the multiplexor, now.
    pub fn stats(&self) -> KcmStats {
        let group = &self.group;
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let sockets: Vec<_> = lock(&group.sockets).iter().filter_map(Weak::upgrade).collect();
        let batches = sockets.iter().filter(|counts| counts.batch.load(Ordering::SeqCst) != NO_BATCH).count() as u64;
        let reserved = load(&group.reserved) + sockets.iter().map(|counts| load(&counts.reserved)).sum::<u64>();
        KcmStats {
            mux: MuxStats {
                unattach_reserved: load(&group.unattach_reserved),
                reserved,
                unreserved: reserved.saturating_sub(batches),
                ..group.mux.kcm_stats()
            },
            sockets: sockets
                .iter()
                .map(|counts| SocketStats {
                    index: counts.index,
                    rx_messages: load(&counts.rx_messages),
                    rx_bytes: load(&counts.rx_bytes),
                    tx_messages: load(&counts.tx_messages),
                    tx_bytes: load(&counts.tx_bytes),
                    batch: Some(load(&counts.batch)).filter(|batch| *batch != NO_BATCH).map(ConnectionId::from_u64),
                })
                .collect(),
            connections: group.mux.connection_stats(),
        }
    }
}

/// The text of /proc/net/kcm for these multiplexors.
pub fn proc_net_kcm(all: &[KcmStats]) -> String {
    let mut text = format!("*** KCM statistics ({} MUX) ****\n", all.len());
    let head = ["RX-Msgs", "RX-Bytes", "TX-Msgs", "TX-Bytes", "Recv-Q", "Rmem", "Send-Q", "Smem"];
    line(&mut text, "Object", head.map(String::from), "Status");
    for stats in all {
        let mux = &stats.mux;
        let counts = [mux.rx_messages, mux.rx_bytes, mux.tx_messages, mux.tx_bytes].map(|count| count.to_string());
        let [a, b, c, d] = counts;
        let none = || "-".to_owned();
        let state = format!("KCMs: {}, Psocks {}", stats.sockets.len(), stats.connections.len());
        line(&mut text, "mux", [a, b, c, d, none(), none(), none(), none()], &state);
        for socket in &stats.sockets {
            let counts = [socket.rx_messages, socket.rx_bytes, socket.tx_messages, socket.tx_bytes, 0, 0, 0];
            let [a, b, c, d, e, f, g] = counts.map(|count| count.to_string());
            let state = socket.batch.map_or(String::new(), |connection| format!("Psck-{} WMore ", connection.index));
            line(&mut text, &format!("   kcm-{}", socket.index), [a, b, c, d, e, f, g, none()], &state);
        }
        for connection in &stats.connections {
            let counts = [
                connection.rx_messages,
                connection.rx_bytes,
                connection.tx_messages,
                connection.tx_bytes,
                connection.waiting_messages as u64,
                connection.waiting_bytes as u64,
                connection.unsent_bytes as u64,
                connection.unsent_bytes as u64,
            ];
            let mut state = String::new();
            state.push_str(if connection.is_ended { "RxStop " } else { "" });
            state.push_str(if connection.is_paused { "RxPause " } else { "" });
            for socket in stats.sockets.iter().filter(|socket| socket.batch == Some(connection.connection)) {
                let _ = write!(state, "Rsvd-{} ", socket.index);
            }
            let name = format!("   psock-{}", connection.connection.index);
            line(&mut text, &name, counts.map(|count| count.to_string()), &state);
        }
    }
    text
}

fn line(text: &mut String, name: &str, cells: [String; 8], state: &str) {
    let _ = write!(text, "{name:<14} ");
    for (cell, width) in cells.iter().zip([10, 16, 10, 16, 8, 8, 8, 8]) {
        let _ = write!(text, "{cell:<width$} ");
    }
    text.push_str(state);
    text.push('\n');
}

/// A column's title, and where its number is.
type Column = (&'static str, fn(&MuxStats) -> u64);

/// The text of /proc/net/kcm_stats for these multiplexors together. Every number stands under its name: in AF_KCM
/// those of Unattach and UnattchRsvd are exchanged.
pub fn proc_net_kcm_stats(all: &[KcmStats]) -> String {
    let sum = |field: fn(&MuxStats) -> u64| all.iter().map(|stats| field(&stats.mux)).sum::<u64>();
    let traffic: [Column; 4] = [
        ("RX-Msgs", |mux| mux.rx_messages),
        ("RX-Bytes", |mux| mux.rx_bytes),
        ("TX-Msgs", |mux| mux.tx_messages),
        ("TX-Bytes", |mux| mux.tx_bytes),
    ];
    let mux: [Column; 5] = [
        ("TX-Retries", |mux| mux.tx_retries),
        ("Attach", |mux| mux.attach),
        ("Unattach", |mux| mux.unattach),
        ("UnattchRsvd", |mux| mux.unattach_reserved),
        ("RX-RdyDrops", |mux| mux.rx_ready_drops),
    ];
    let psock: [Column; 11] = [
        ("Reserved", |mux| mux.reserved),
        ("Unreserved", |mux| mux.unreserved),
        ("RX-Aborts", |mux| mux.rx_aborts),
        ("RX-Intr", |mux| mux.rx_interrupted),
        ("RX-Unrecov", |mux| mux.rx_unrecoverable),
        ("RX-MemFail", |mux| mux.rx_memory),
        ("RX-NeedMor", |mux| mux.rx_need_more),
        ("RX-BadLen", |mux| mux.rx_bad_length),
        ("RX-TooBig", |mux| mux.rx_too_big),
        ("RX-Timeout", |mux| mux.rx_timeout),
        ("TX-Aborts", |mux| mux.tx_aborts),
    ];
    let mut text = String::new();
    for (name, own) in [("MUX", &mux[..]), ("Psock", &psock[..])] {
        let columns = || traffic.iter().chain(own).enumerate();
        let width = |at| if at == 1 || at == 3 { 16 } else { 10 };
        let _ = write!(text, "{name:<8}");
        for (at, (title, _)) in columns() {
            let _ = write!(text, " {title:<width$}", width = width(at));
        }
        let _ = write!(text, "\n{:<8}", "");
        for (at, (_, field)) in columns() {
            let _ = write!(text, " {:<width$}", sum(*field), width = width(at));
        }
        text.push('\n');
    }
    text
}
