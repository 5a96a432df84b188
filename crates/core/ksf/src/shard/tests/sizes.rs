//! What an idle connection takes of the server's memory, part by part: growth is to be seen, and to be meant.

use super::super::timer_wheel::NODE_BYTES;
use super::*;
use crate::connection::Connection;
use crate::session::SessionOf;

/// Each part is at most as large as it is today: who adds a field to one says here why all connections pay for it. State that
/// is empty unless something goes on belongs into a box ([`Boxes`](crate::boxes::Boxes)), and a time or a count that may
/// be missing needs no room beyond its own ([`SomeTime`](crate::limits::SomeTime)).
///
/// The goal is 1,024 bytes in all. The rest of it is for what the allocator adds (up to 24 bytes per box), free room of the
/// tables, the state of the service, and under a kernel half that half's own state (72 bytes, and 128 that it shares
/// with the kernel) and its name (28).
///
/// Of the connection's 248 bytes eight are what its session keeps: an idle connection may have queued a transaction, and the
/// shard's sum must know what goes with it. Eight are what it has had of the turn: every message counts, so a box would be there for
/// nearly every connection.
#[cfg(target_pointer_width = "64")]
#[test]
fn an_idle_connection_is_small() {
    let parts = [
        ("the connection", size_of::<Connection<SessionOf<Echo>>>(), 248),
        ("its place in the table", size_of::<Place>(), 64),
        ("its state in io_uring", Uring::CONN_BYTES, 64),
        ("its state in epoll", Epoll::CONN_BYTES, 64),
        ("its timer", NODE_BYTES, 24),
        ("its state under a kernel half", size_of::<AssistState>(), 104),
    ];
    for (part, bytes, most) in parts {
        assert!(bytes <= most, "{part} takes {bytes} bytes");
    }
    let engine = Uring::CONN_BYTES.max(Epoll::CONN_BYTES);
    let all = size_of::<Connection<SessionOf<Echo>>>() + size_of::<Place>() + engine;
    assert!(all <= 376, "{all} bytes for a connection without a kernel half");
}
