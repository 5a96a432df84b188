//! Memory that commands take: counted, not believed.

mod common;
mod opened;

use std::num::NonZeroUsize;

use common::Medium;
use ksf_store::cells::Shape;
use ksf_store::log::Geometry;
use ksf_store::store::{Clock, Shard};
use ksf_store::update::Update;
use ksf_test::alloc::{Counting, allocations};
use opened::open;

#[global_allocator]
static COUNTING: Counting = Counting;

const SEGMENT_BYTES: usize = 4 << 20;
const KEYS: usize = 1_000;
/// Commands of a batch.
const BATCH: usize = 16;
const WARM_ROUNDS: usize = 3;
const ROUNDS: usize = 6;

/// What the log has is on the medium.
fn drain(shard: &mut Shard, medium: &mut Medium) {
    while let Some(write) = shard.next_write(4, 0) {
        medium.put(write.place, write.offset as usize, &write.bytes);
        shard.written(write.id, true, write.bytes);
    }
}

#[test]
fn a_warm_set_and_get_of_a_key_that_is_there_allocate_nothing() {
    let block_bytes = NonZeroUsize::new(4096).unwrap();
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: SEGMENT_BYTES as u64 };
    let mut media = vec![Medium::new(4, SEGMENT_BYTES)];
    let (_store, mut shards) = open(geometry, &mut media, &mut 1, None);
    let (shard, clock) = (&mut shards[0], Clock { now_ms: 1, received_ns: None });
    let keys: Vec<Vec<u8>> = (0..KEYS).map(|number| format!("key:{number:012}").into_bytes()).collect();
    for round in 0..ROUNDS {
        let value = [round as u8; 64];
        let mut counted = 0;
        for (at, key) in keys.iter().enumerate() {
            let before = allocations();
            let (was_there, needs) = shard
                .update(&[key], clock, |update| {
                    let was_there = update.get(key).is_some();
                    update.set(key, &value[..], None);
                    was_there
                })
                .unwrap();
            assert_eq!((was_there, needs.iter().count()), (round > 0, 1));
            let (told, _) = shard.read(&[key], 1, |view| view.get(key).map(|got| got.value().first().copied()));
            assert_eq!(told, Some(Some(round as u8)));
            counted += allocations() - before;
            if at % BATCH == BATCH - 1 {
                drain(shard, &mut media[0]);
            }
        }
        assert!(round < WARM_ROUNDS || counted == 0, "{counted} allocations for {KEYS} keys in round {round}");
    }
}

/// Each member took the memory of several heads of its key: `COPY` and `RENAME` of long values held others up for a second.
#[test]
fn copy_allocates_little_for_each_element() {
    const MEMBERS: u64 = 10_000;
    let block_bytes = NonZeroUsize::new(4096).unwrap();
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: SEGMENT_BYTES as u64 };
    let mut media = vec![Medium::new(4, SEGMENT_BYTES)];
    let (_store, mut shards) = open(geometry, &mut media, &mut 1, None);
    let (shard, clock) = (&mut shards[0], Clock { now_ms: 1, received_ns: None });
    let keys: [&[u8]; 3] = [b"long", b"copied", b"renamed"];
    let [long, copied, renamed] = keys;
    let mut count = |command: &dyn Fn(&mut Update<'_, 'static>)| {
        let before = allocations();
        shard.update(&keys, clock, command).unwrap();
        let counted = allocations() - before;
        drain(shard, &mut media[0]);
        counted
    };
    count(&|update| {
        (0..MEMBERS).for_each(|at| assert!(update.set_cell(long, Shape::Set, format!("{at:08}").as_bytes(), &[])));
    });
    let of_copy = count(&|update| assert_eq!(update.copy(long, copied, SEGMENT_BYTES), Ok(true)));
    let of_rename = count(&|update| assert_eq!(update.rename(copied, renamed, SEGMENT_BYTES), Ok(true)));
    for counted in [of_copy, of_rename] {
        // Its name, alone and behind that of the key; and its share of leaves.
        assert!(counted < 4 * MEMBERS, "{counted} allocations for {MEMBERS} members");
    }
}
