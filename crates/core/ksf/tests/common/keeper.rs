//! A service that keeps what it is sent.

use std::mem;
use std::sync::Mutex;

use ksf::framing::{Delimiter, Framing};
use ksf::pool::Chunk;
use ksf::{Message, Profile, Reply, Service};

/// Keeps every line.
#[derive(Default)]
pub struct Keeper {
    pub kept: Mutex<Vec<Chunk>>,
    /// What every line is answered with; `None`: with itself.
    pub answer: Option<&'static [u8]>,
    /// What it says of itself: [`Service::keeps_messages`].
    pub keeps_messages: bool,
}

impl Keeper {
    pub fn take(&self) -> Vec<Chunk> {
        mem::take(&mut *self.kept.lock().unwrap())
    }
}

impl Service for Keeper {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { keeps_messages: self.keeps_messages, ..Profile::new("keeper", Framing::Delimiter(Delimiter::LF)) }
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.kept.lock().unwrap().push(message.keep());
        reply.bytes(self.answer.unwrap_or(message.bytes()));
    }
}
