//! What a multiplexor does, and what its peers may cost it.

use std::sync::Arc;

use ksf::framing::Framing;
use ksf_bpf_framing::FramingProgram;

/// How the bytes of a connection are cut into messages.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum MessageFraming {
    /// By a description of the framework: readers see the body, replies get header and trailer.
    Native(Framing),
    /// By an eBPF program: readers see messages as they are on the wire and write them so.
    Program(Arc<FramingProgram>),
}

impl From<Framing> for MessageFraming {
    fn from(framing: Framing) -> Self {
        Self::Native(framing)
    }
}

/// In which order messages of one connection are worked on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ordering {
    /// As workers are free, several at once: the protocol carries ids.
    #[default]
    Free,
    /// One at a time, as they came.
    OneAtATime,
}

/// The index of the class of a message into [`MuxOptions::class_caps`]; `None`: not capped.
pub type Classify = dyn Fn(&[u8]) -> Option<usize> + Send + Sync;

/// Set once, when the multiplexor is made.
#[derive(Clone)]
#[non_exhaustive]
pub struct MuxOptions {
    /// How connections are cut into messages, unless they bring their own framing.
    pub framing: MessageFraming,
    /// Order of work, for connections attached with [`Mux::attach`](crate::Mux::attach).
    pub ordering: Ordering,
    /// Bounds.
    pub limits: MuxLimits,
    /// Tells long work from short.
    pub classify: Option<Arc<Classify>>,
    /// How many messages of each class may be worked on at once: below the number of workers, so that the others stay
    /// free for the rest.
    pub class_caps: Vec<usize>,
    /// True: a connection that ended is detached by itself when its messages are done with and its replies are sent.
    pub detach_ended: bool,
}

impl MuxOptions {
    /// Default limits and free order.
    pub fn new(framing: impl Into<MessageFraming>) -> Self {
        Self {
            framing: framing.into(),
            ordering: Ordering::default(),
            limits: MuxLimits::default(),
            classify: None,
            class_caps: Vec::new(),
            detach_ended: false,
        }
    }
}

impl std::fmt::Debug for MuxOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MuxOptions")
            .field("framing", &self.framing)
            .field("ordering", &self.ordering)
            .field("limits", &self.limits)
            .field("class_caps", &self.class_caps)
            .field("detach_ended", &self.detach_ended)
            .finish_non_exhaustive()
    }
}

/// Everything a peer can make grow. Lengths are in bytes of payload, not of the memory it happens to lie in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MuxLimits {
    /// Longest message.
    pub message_bytes_max: usize,
    /// Most bytes that may arrive before a message's length is known (delimiters: this or `message_bytes_max`).
    pub header_bytes_max: usize,
    /// Most parts of a message (fragments of record marking).
    pub fragments_max: u32,
    /// Time from the first byte of a message to its last, not prolonged by progress; 0: for ever.
    pub assembly_timeout_ms: u64,
    /// Time in which a peer must take some of what is queued for it; 0: for ever.
    pub send_timeout_ms: u64,
    /// Time without a byte in either direction after which a connection ends; 0: never.
    pub idle_timeout_ms: u64,
    /// Time a connection that was closed from this side has to take what was sent last, before it is reset.
    pub linger_timeout_ms: u64,
    /// Budget of one connection: messages in part, queued and in work, what answers that come later are assumed to need,
    /// and replies that are queued. At the budget it is not read, and takes no reply; one message, and the replies of
    /// those in work, may exceed it. Answers that come later and are longer than assumed end it at twice the budget.
    pub connection_bytes_max: usize,
    /// The same for the number of its messages that are not done with.
    pub connection_messages_max: usize,
    /// Bytes queued for one connection at which it is not read, none of its messages is handed over, and it takes no
    /// [`send`](crate::MessageSocket::send): its peer does not read.
    pub out_queue_bytes_max: usize,
    /// Budget of all connections together. At the budget a connection that uses some of it is not read, none of its
    /// messages is handed over if it is owed replies, and it takes no send, until its own share is gone; and the
    /// connection that keeps most for an unfinished message is closed.
    pub mux_bytes_max: usize,
    /// Connections.
    pub connections_max: usize,
}

/// Budget of a connection by default: three messages of the longest length, and their replies.
pub(crate) const CONNECTION_BYTES_MAX: usize = 4 << 20;

impl Default for MuxLimits {
    fn default() -> Self {
        Self {
            message_bytes_max: 1 << 20,
            header_bytes_max: 4096,
            fragments_max: 4096,
            assembly_timeout_ms: 10_000,
            send_timeout_ms: 30_000,
            idle_timeout_ms: 0,
            linger_timeout_ms: 1_000,
            connection_bytes_max: CONNECTION_BYTES_MAX,
            connection_messages_max: 4096,
            out_queue_bytes_max: 256 << 10,
            mux_bytes_max: 256 << 20,
            connections_max: 65_536,
        }
    }
}
