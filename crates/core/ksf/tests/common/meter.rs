//! A service that tells what its thread has allocated, so that a shard's allocations can be told from its peers'.

use ksf::framing::Framing;
use ksf::{Message, Profile, Reply, Service};
use ksf_test::alloc::{allocations, bytes};

/// Length of an answer to [`METER`].
pub const METER_BYTES: usize = 16;

/// The message that asks a [`Meter`] for its thread's counts.
pub const METER: &[u8] = b"how much?";

/// Echoes messages of any framing, and tells what its thread has allocated.
pub struct Meter(pub Framing);

impl Service for Meter {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("meter", self.0)
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        if message.bytes() == METER {
            reply.message(|out| {
                out.extend_from_slice(&allocations().to_be_bytes());
                out.extend_from_slice(&bytes().to_be_bytes());
            });
        } else if (2048..=4096).contains(&message.bytes().len()) {
            // From where it lies: it came in one slot.
            reply.chunk(message.keep());
        } else {
            reply.bytes(message.bytes());
        }
    }
}
