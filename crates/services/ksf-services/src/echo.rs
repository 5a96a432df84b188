//! Echo: what comes in goes out.
//!
//! [`Echo`] returns bytes as they arrive and knows no messages, as ksf's kecho
//! does. [`MessageEcho`] waits for whole messages of any framing and returns
//! each: the smallest service that shows a framing at work.

use ksf::error::FramingError;
use ksf::framing::Framing;
use ksf::{Message, Profile, Reply, Service};

/// From this length on a reply is sent from the slot it was received in. Below
/// it a copy costs less than keeping count of who holds the slot.
const KEEP_BYTES_MIN: usize = 2048;

/// Returns every received chunk of a stream, and every datagram.
#[derive(Clone, Copy, Debug, Default)]
pub struct Echo;

impl Service for Echo {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("echo", Framing::Raw)
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        send_back(message, reply);
    }

    fn reply_bytes(&self, (): &mut (), (): &mut (), message: &[u8]) -> usize {
        message.len()
    }
}

/// Returns every message in the framing it came in.
#[derive(Clone, Copy, Debug)]
pub struct MessageEcho {
    framing: Framing,
}

impl MessageEcho {
    /// An echo of messages cut by `framing`, if that can be used at all; see
    /// [`Framing::validate`].
    pub fn new(framing: Framing) -> Result<Self, FramingError> {
        framing.validate().map(|framing| Self { framing })
    }
}

impl Service for MessageEcho {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("message-echo", self.framing)
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        send_back(message, reply);
    }

    fn reply_bytes(&self, (): &mut (), (): &mut (), message: &[u8]) -> usize {
        message.len()
    }
}

fn send_back(message: &Message<'_>, reply: &mut Reply<'_>) {
    if message.bytes().len() < KEEP_BYTES_MIN {
        reply.bytes(message.bytes());
    } else {
        reply.chunk(message.keep());
    }
}
