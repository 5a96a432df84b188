//! Work: a service whose messages say how much they cost.
//!
//! It is there to show and to measure what happens when messages take time:
//! answers come later, from other threads, in another order. On shards a thread
//! that may block sleeps or computes; behind a multiplexor the worker that has
//! the message does.
//!
//! ```text
//! request: length (4) | how (4) | microseconds (4) | payload ...
//! reply:   length (4) | status (4)                 | payload ...
//! ```
//!
//! The framing is that of Thrift's framed transport (a big-endian length of
//! four bytes before each message), the loads are those of its experiment with
//! message sockets: large requests that are dropped, small ones followed by
//! work, and small ones in a deep pipeline. Numbers are big endian, lengths count what follows them. Replies leave as
//! they are ready, so a client puts an id in the payload. A request that is not
//! of this form closes the connection.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ksf::deferred::Deferred;
use ksf::framing::{Framing, LengthPrefix};
use ksf::{Message, Order, Profile, Reply, Service};

/// `how`: answer at once, on the shard's own thread; the time is ignored.
pub const HOW_INLINE: u32 = 0;
/// `how`: sleep on a thread of the pool.
pub const HOW_SLEEP: u32 = 1;
/// `how`: compute on a thread of the pool.
pub const HOW_COMPUTE: u32 = 2;

/// `how`: drop the payload and answer without one, at once.
pub const HOW_DISCARD: u32 = 3;

/// `status`: the work was done. There is no other one.
pub const STATUS_DONE: u32 = 0;

/// Most time one message may ask for. A peer must not be able to keep a thread
/// for good.
pub const WORK_MAX: Duration = Duration::from_secs(10);

const HEADER_BYTES: usize = 8;
const STATUS_BYTES: usize = 4;

/// The service; one value serves all shards.
#[derive(Debug, Default)]
pub struct Work {
    in_place: bool,
    malformed: AtomicU64,
}

impl Work {
    /// Sleeps and computes on the thread that has the message, for workers, which may block.
    pub fn in_place() -> Self {
        Self { in_place: true, ..Self::default() }
    }
}

impl Service for Work {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: Order::Free, ..Profile::new("work", Framing::LengthPrefix(LengthPrefix::big_endian(4))) }
    }

    fn fork(&self, (): &()) -> Option<()> {
        Some(())
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let Some((cost, payload)) = parse(message.bytes()) else {
            self.malformed.fetch_add(1, Ordering::Relaxed);
            reply.close();
            return;
        };
        if matches!(cost, Cost::Discard) {
            reply.message(|out| put_reply(out, STATUS_DONE, &[]));
            return;
        }
        if self.in_place || matches!(cost, Cost::Inline) {
            cost.pay();
            reply.message(|out| put_reply(out, STATUS_DONE, payload));
            return;
        }
        let kept = payload.to_vec();
        let reply_bytes = STATUS_BYTES + kept.len();
        let task = move |deferred: Deferred| {
            cost.pay();
            let mut body = Vec::new();
            put_reply(&mut body, STATUS_DONE, &kept);
            deferred.reply(body);
        };
        reply.block(reply_bytes, task);
    }

    fn reply_bytes(&self, (): &mut (), (): &mut (), message: &[u8]) -> usize {
        match parse(message) {
            None | Some((Cost::Discard, _)) => 0,
            Some((_, payload)) => STATUS_BYTES + payload.len(),
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("malformed", self.malformed.load(Ordering::Relaxed))]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cost {
    Inline,
    Discard,
    Sleep(Duration),
    Compute(Duration),
}

impl Cost {
    fn pay(self) {
        match self {
            Self::Inline | Self::Discard => {}
            Self::Sleep(time) => std::thread::sleep(time),
            Self::Compute(time) => {
                let start = Instant::now();
                while start.elapsed() < time {
                    std::hint::spin_loop();
                }
            }
        }
    }
}

fn parse(message: &[u8]) -> Option<(Cost, &[u8])> {
    let (header, payload) = message.split_first_chunk::<HEADER_BYTES>()?;
    let [h0, h1, h2, h3, t0, t1, t2, t3] = *header;
    let time = || Duration::from_micros(u32::from_be_bytes([t0, t1, t2, t3]).into()).min(WORK_MAX);
    let cost = match u32::from_be_bytes([h0, h1, h2, h3]) {
        HOW_INLINE => Cost::Inline,
        HOW_DISCARD => Cost::Discard,
        HOW_SLEEP => Cost::Sleep(time()),
        HOW_COMPUTE => Cost::Compute(time()),
        _ => return None,
    };
    Some((cost, payload))
}

fn put_reply(out: &mut Vec<u8>, status: u32, payload: &[u8]) {
    out.reserve(STATUS_BYTES + payload.len());
    out.extend_from_slice(&status.to_be_bytes());
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_parse_or_are_refused() {
        assert_eq!(
            parse(&[0, 0, 0, 1, 0, 0, 0, 5, b'i', b'd']),
            Some((Cost::Sleep(Duration::from_micros(5)), &b"id"[..]))
        );
        assert_eq!(parse(&[0, 0, 0, 2, 0xff, 0xff, 0xff, 0xff]), Some((Cost::Compute(WORK_MAX), &[][..])));
        assert_eq!(parse(&[0, 0, 0, 3, 0, 0, 0, 0, 7]), Some((Cost::Discard, &[7][..])));
        assert_eq!(parse(&[0, 0, 0, 4, 0, 0, 0, 0]), None);
        assert_eq!(parse(&[0, 0, 0, 1, 0, 0, 0]), None);
    }
}
