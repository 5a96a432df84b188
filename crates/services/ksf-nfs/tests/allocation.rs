//! Memory that calls take: counted, not believed. A process of its own, because the threads of the server are counted, too.

#[allow(dead_code, unused_imports)]
mod common;

use std::io::Write as _;

use ksf::engine::EngineKind;
use ksf_proto::oncrpc::{Accepted, NFS_PROGRAM, ReplyStatus};
use ksf_test::alloc::{Counting, bytes_of_all};
use ksf_test::rpc::record;

use crate::common::{Client, OK, Place, split, write_args};

#[global_allocator]
static COUNTING: Counting = Counting;

const WRITE_BYTES: usize = 1 << 20;
const ROUNDS: u32 = 20;
/// The head of a record, and the rest of it that arrives in another piece.
const HEAD_BYTES_MAX: u64 = 2 * 4096;

/// It is received into its message, kept there, and written from there.
#[test]
fn the_data_of_a_large_write_is_not_copied() {
    for engine in ksf_test::working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe) {
        let place = Place::new();
        let serving = place.serve_all(engine, vec![place.export()]);
        let (mut client, root) = serving.mount(&place.path(""));
        let file = client.create(&root, "file");
        let args = write_args(&file, 0, 0, &ksf_test::pattern(WRITE_BYTES, 3));
        let mut call = record(&client.message(NFS_PROGRAM, 3, 7, &args));
        let mut write = |client: &mut Client| {
            client.xid += 1;
            call[4..8].copy_from_slice(&client.xid.to_be_bytes());
            client.stream.write_all(&call).unwrap();
            let (xid, status, results) = client.receive();
            assert_eq!((xid, status), (client.xid, ReplyStatus::Accepted(Accepted::Success)));
            assert_eq!(split(&results).0, OK);
        };
        // The first makes what the later ones use again.
        write(&mut client);
        let before = (bytes_of_all(), serving.counter("bytes_copied"));
        (0..ROUNDS).for_each(|_| write(&mut client));
        let allocated = bytes_of_all() - before.0;
        let copied = serving.counter("bytes_copied") - before.1;
        assert!(allocated < u64::from(ROUNDS) * WRITE_BYTES as u64 / 8, "{engine}: {allocated} bytes allocated");
        assert!(copied <= u64::from(ROUNDS) * HEAD_BYTES_MAX, "{engine}: {copied} bytes copied");
        serving.stop();
    }
}
