//! The formula of docs/memory.md. The tests of `ksf-cli` have this file, too.

use ksf::budget::PASSES;
use ksf::buffers::Buffers;
use ksf::limits::Limits;
use ksf::server::{SLOT_BYTES, SLOTS};

/// Receive slots of a shard.
pub(crate) fn slot_bytes() -> usize {
    SLOTS as usize * SLOT_BYTES as usize
}

/// Bytes that the peers of these connections make a server take at most, beyond what it takes without a connection.
/// `longest_bytes`: of a request with its reply. Buffers that are kept for use again are left out: they were counted when they
/// were in use.
pub(crate) fn bound_bytes(limits: &Limits, longest_bytes: usize, shards: usize, connections: usize) -> usize {
    let replies = limits.shard_bytes_max + 2 * longest_bytes;
    // What was on its way to the slots when reading stopped.
    let on_its_way = SLOTS as usize * Buffers::capacity_for(SLOT_BYTES as usize);
    let input = 2 * limits.assembly_bytes_max + on_its_way + PASSES * limits.message_bytes_max;
    shards * (replies + input + slot_bytes()) + connections * (16 << 10)
}
