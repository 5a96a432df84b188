//! Memory that a burst took is the machine's again: measured, in the process of the test.

use std::net::TcpStream;
use std::sync::Arc;

use crate::common::net::*;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::Limits;
use ksf::pool::Chunk;
use ksf::server::{SLOT_BYTES, SLOTS};
use ksf::service::SessionState;
use ksf::{Message, Peer, Profile, Refused, Reply, Service};

const BLOCK_BYTES: usize = 4096;
const BLOCKS: usize = 12_000;
/// Every so many stay, so that no stretch of the allocator's becomes free as a whole.
const KEPT_EVERY: usize = 60;

/// `grow` makes the state of the connection large, `shrink` frees most of it.
struct Sessions;

impl Service for Sessions {
    ksf::stateless!(shard);
    type Conn = Vec<Vec<u8>>;

    fn profile(&self) -> Profile<'_> {
        Profile::new("sessions", Framing::Delimiter(Delimiter::LF))
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<Self::Conn, Refused> {
        Ok(Vec::new())
    }

    fn call(&self, (): &mut (), blocks: &mut Self::Conn, message: &Message<'_>, reply: &mut Reply<'_>) {
        if message.bytes() == b"grow" {
            blocks.extend((0..BLOCKS).map(|_| vec![7; BLOCK_BYTES]));
        } else {
            let mut at = 0;
            blocks.retain(|_| {
                at += 1;
                at % KEPT_EVERY == 0
            });
        }
        reply.bytes(message.bytes());
    }

    fn session(&self, blocks: &Self::Conn) -> SessionState {
        SessionState { bytes: blocks.len() * BLOCK_BYTES, ..SessionState::default() }
    }
}

/// Keeps each line, and drops all of them with `drop`.
struct Keeping;

impl Service for Keeping {
    ksf::stateless!(shard);
    type Conn = Vec<Chunk>;

    fn profile(&self) -> Profile<'_> {
        Profile::new("keeping", Framing::Delimiter(Delimiter::LF))
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<Self::Conn, Refused> {
        Ok(Vec::new())
    }

    fn call(&self, (): &mut (), kept: &mut Self::Conn, message: &Message<'_>, reply: &mut Reply<'_>) {
        if message.bytes() == b"drop" {
            kept.clear();
        } else {
            kept.push(message.keep());
        }
        reply.bytes(b"");
    }

    fn session(&self, kept: &Self::Conn) -> SessionState {
        SessionState { bytes: kept.iter().map(|chunk| chunk.len()).sum(), ..SessionState::default() }
    }
}

fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
}

#[test]
fn freed_memory_is_returned_to_the_machine() {
    if !cfg!(target_env = "gnu") {
        return skip("needs the allocator of glibc");
    }
    for engine in engines_in_own_network() {
        let server = one_shard(engine, ANY, Limits::default(), Arc::new(Sessions));
        let mut peer = connect(&server);
        ask(&mut peer, b"shrink\n", b"shrink\n");
        let idle = resident_bytes();
        ask(&mut peer, b"grow\n", b"grow\n");
        let grown = resident_bytes() - idle;
        assert!(grown > BLOCKS * BLOCK_BYTES / 2, "{engine}: {grown} bytes");
        ask(&mut peer, b"shrink\n", b"shrink\n");
        // The same connection stays, and what it keeps with it.
        wait_until(format_args!("{engine}: the memory is returned"), || {
            resident_bytes().saturating_sub(idle) < grown / 4
        });
    }
}

/// Beyond half of the slots, what is kept is copied to the heap.
#[test]
fn copies_of_what_was_kept_are_returned_to_the_machine() {
    own_network();
    const BYTES_OF_EACH_LENGTH: usize = 8 << 20;
    for engine in engines() {
        let server = one_shard(engine, ANY, Limits::default(), Arc::new(Keeping));
        let mut peer = connect(&server);
        // All slots are written to.
        let keep = |peer: &mut TcpStream, len: usize, bytes: usize| {
            let line = [&vec![b'x'; len - 1][..], b"\n"].concat();
            (0..bytes / len).for_each(|_| ask(peer, &line, b"\n"));
        };
        keep(&mut peer, 32 << 10, SLOTS as usize * SLOT_BYTES as usize);
        let with_slots = resident_bytes();
        (12..16).for_each(|power| keep(&mut peer, 1 << power, BYTES_OF_EACH_LENGTH));
        let grown = resident_bytes() - with_slots;
        assert!(grown > 3 * BYTES_OF_EACH_LENGTH, "{engine}: {grown} bytes");
        ask(&mut peer, b"drop\n", b"\n");
        wait_until(format_args!("{engine}: the memory is returned"), || {
            resident_bytes().saturating_sub(with_slots) < grown / 4
        });
    }
}
