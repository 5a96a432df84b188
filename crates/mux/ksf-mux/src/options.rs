//! What a multiplexor does, and what its peers may cost it.

use std::sync::Arc;

use ksf::Order;
use ksf::framing::Framing;
use ksf::limits::Limits;
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

/// The index of the class of a message into [`MuxOptions::class_caps`]; `None`: not capped.
pub type Classify = dyn Fn(&[u8]) -> Option<usize> + Send + Sync;

/// Set once, when the multiplexor is made.
#[derive(Clone)]
#[non_exhaustive]
pub struct MuxOptions {
    /// How connections are cut into messages, unless they bring their own framing.
    pub framing: MessageFraming,
    /// Order of work, for connections attached with [`Mux::attach`](crate::Mux::attach). [`Order::Free`]: as workers are
    /// free, several messages of a connection at once; [`Order::Requests`]: one at a time, as they came.
    pub ordering: Order,
    /// Bounds, as far as they concern streams that are received: those of a shard are those of the multiplexor, and
    /// `deferred_max` counts the messages of a connection that are not done with. Lengths are in bytes of payload, not
    /// of the memory it lies in, except for `assembly_bytes_max`.
    pub limits: Limits,
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
            ordering: Order::Free,
            limits: Limits::default(),
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
