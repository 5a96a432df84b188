//! A service whose messages are answered by the user's own program: in the kernel where that is possible, and here, by
//! running the same verified function (BPF_PROG_RUN), what the kernel passed on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use ksf::framing::Framing;
use ksf::{Message, Peer, Profile, Reply, Service};
use ksf_kernel::{Caller, KernelError, KernelService, Verdict};

/// The service around a loaded object.
pub(crate) struct ObjectService {
    name: String,
    framing: Framing,
    /// Longest message the function takes; a raw stream is cut to it.
    piece_bytes_max: usize,
    /// One per shard, so that a shard that answers always finds one.
    idle: Mutex<Vec<PooledCaller>>,
    passed: AtomicU64,
    failed: AtomicU64,
}

/// A way to run the function, with the memory for its reply.
struct PooledCaller {
    caller: Caller,
    reply: Vec<u8>,
}

impl ObjectService {
    /// A service for `shards` shards. `kernel` must have been loaded with as many callers.
    pub(crate) fn new(kernel: &KernelService, shards: usize) -> Result<Self, KernelError> {
        let new = || kernel.caller().map(|caller| PooledCaller { caller, reply: Vec::new() });
        let idle: Result<Vec<PooledCaller>, KernelError> = (0..shards).map(|_| new()).collect();
        Ok(ObjectService {
            name: kernel.name(),
            framing: kernel.framing()?,
            piece_bytes_max: kernel.message_bytes_max(),
            idle: Mutex::new(idle?),
            passed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        })
    }

    fn take(&self) -> Option<PooledCaller> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn give(&self, pooled: PooledCaller) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(pooled);
    }

    /// Answers one message; false if the function has no answer, which ends a stream.
    fn answer(&self, pooled: &mut PooledCaller, message: &[u8], reply: &mut Reply<'_>) -> bool {
        pooled.reply.clear();
        match pooled.caller.call(message, &mut pooled.reply) {
            Ok(Verdict::Reply) => reply.bytes(&pooled.reply),
            Ok(Verdict::Echo) => reply.bytes(message),
            Ok(Verdict::Pass) => {
                self.passed.fetch_add(1, Ordering::Relaxed);
                return false;
            }
            Err(_) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                return false;
            }
        }
        true
    }
}

impl Service for ObjectService {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new(&self.name, self.framing)
    }

    fn fork(&self, (): &()) -> Option<()> {
        Some(())
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let Some(mut pooled) = self.take() else {
            // Only if there were more shards than callers.
            self.failed.fetch_add(1, Ordering::Relaxed);
            return reply.close();
        };
        let bytes = message.bytes();
        let is_raw_stream = self.framing == Framing::Raw && !matches!(message.peer(), Peer::Udp(_));
        let piece_bytes = if is_raw_stream { self.piece_bytes_max } else { bytes.len().max(1) };
        let answered = bytes.is_empty() && self.answer(&mut pooled, bytes, reply)
            || !bytes.is_empty() && bytes.chunks(piece_bytes).all(|piece| self.answer(&mut pooled, piece, reply));
        self.give(pooled);
        if !answered {
            // A stream ends here: its peer would wait for ever. A datagram is dropped.
            reply.close();
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("program_passed", self.passed.load(Ordering::Relaxed)),
            ("program_failed", self.failed.load(Ordering::Relaxed)),
        ]
    }
}
