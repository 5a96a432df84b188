//! Watched keys: a change since the watch is seen, and nothing else is one.

use std::num::NonZeroUsize;

use crate::common::Medium;
use crate::opened::open;
use ksf_store::log::Geometry;
use ksf_store::store::{Cleaning, Clock, Shard, SweepBudget};
use ksf_store::watch::Seen;

const BLOCK_BYTES: usize = 512;
const SEGMENT_BYTES: usize = 16 * BLOCK_BYTES;
const SWEEP: SweepBudget = SweepBudget { leaves_max: 100, keys_max: 100, work_max: u64::MAX };

/// A store of one log.
struct World {
    media: Vec<Medium>,
    shard: Shard,
    now_ms: u64,
    /// Segments below this number are cleaned.
    cleaned: u64,
}

impl World {
    fn new() -> Self {
        let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
        let geometry = Geometry { store: 5, block_bytes, segment_bytes: SEGMENT_BYTES as u64 };
        let mut media = vec![Medium::new(8, SEGMENT_BYTES)];
        let (_, mut shards) = open(geometry, &mut media, &mut 1, None);
        Self { media, shard: shards.remove(0), now_ms: 0, cleaned: 0 }
    }

    fn clock(&self) -> Clock {
        Clock { now_ms: self.now_ms, received_ns: None }
    }

    fn set(&mut self, key: &str, expires_ms: Option<u64>) {
        let (key, clock) = (key.as_bytes(), self.clock());
        self.shard.update(&[key], clock, |update| update.set(key, &[7; 100][..], expires_ms)).unwrap();
    }

    fn remove(&mut self, key: &str) {
        let (key, clock) = (key.as_bytes(), self.clock());
        self.shard.update(&[key], clock, |update| update.remove(key)).unwrap();
    }

    fn watch(&mut self, key: &str) -> Seen {
        let clock = self.clock();
        self.shard.watch(&[key.as_bytes()], clock).0.remove(0)
    }

    fn has_changed(&mut self, seen: &Seen) -> bool {
        self.shard.read(&[seen.key()], self.now_ms, |view| view.has_changed(seen)).0
    }

    fn sweep(&mut self) -> usize {
        let (clock, mut removed) = (self.clock(), 0);
        self.shard.sweep(clock, SWEEP, |_, _| removed += 1).unwrap();
        removed
    }

    fn drain(&mut self) {
        while let Some(write) = self.shard.next_write(4, 0) {
            self.media[0].put(write.place, write.offset as usize, &write.bytes);
            self.shard.written(write.id, true, write.bytes);
        }
    }

    /// Writes and removes another key until cleaning has removed the tombstones of these.
    fn clean(&mut self, keys: &[&str]) {
        let mut others = 0;
        while keys.iter().any(|key| self.has_tombstone(key)) {
            others += 1;
            assert!(others < 10_000, "tombstones stay: {:?}", self.shard.log().segments());
            self.set("other", None);
            self.remove("other");
            self.drain();
            // The oldest segment that is whole, whatever cleaning it brings.
            let segments = self.shard.log().segments();
            let last = segments.keys().next_back().copied().unwrap_or_default();
            let oldest = segments.range(self.cleaned..last).next().map(|(number, segment)| (*number, segment.place));
            if let Some((number, place)) = oldest {
                let bytes = self.media[0].places[place as usize].clone();
                assert_eq!(self.shard.clean(&mut Cleaning::new(number), &bytes, usize::MAX), Ok(true));
                self.cleaned = number + 1;
            }
            self.drain();
            self.shard.erase_cleaned();
            self.drain();
        }
    }

    fn has_tombstone(&self, key: &str) -> bool {
        let mut is_there = false;
        self.shard.store().index().scan(b"", |entry| {
            is_there |= entry.key == key.as_bytes();
            true
        });
        is_there
    }
}

#[test]
fn the_removal_of_a_key_that_had_expired_at_the_watch_is_no_change() {
    let mut world = World::new();
    world.set("key", Some(10));
    world.now_ms = 20;
    let seen = world.watch("key");
    world.sweep();
    assert!(!world.has_changed(&seen), "nobody wrote to it");
    world.remove("key");
    assert!(!world.has_changed(&seen), "it was not there");
    world.set("key", Some(30));
    world.now_ms = 40;
    assert_eq!(world.sweep(), 1);
    assert!(world.has_changed(&seen), "it was there in between");
}

#[test]
fn a_key_that_expires_after_the_watch_has_changed() {
    let mut world = World::new();
    world.set("key", Some(10));
    let seen = world.watch("key");
    assert!(!world.has_changed(&seen));
    world.now_ms = 20;
    assert!(world.has_changed(&seen), "it has expired");
    assert_eq!(world.sweep(), 1);
    assert!(world.has_changed(&seen), "it is removed");
}

#[test]
fn a_missing_key_changes_by_writes_to_it_alone_whatever_is_cleaned() {
    let mut world = World::new();
    world.set("written", None);
    world.remove("written");
    let keys = ["never", "written", "later", "again"];
    let seen = keys.map(|key| world.watch(key));
    world.clean(&["written"]);
    assert_eq!(seen.each_ref().map(|seen| world.has_changed(seen)), [false; 4]);
    for key in ["later", "again"] {
        world.set(key, None);
        world.remove(key);
    }
    let later = world.watch("again");
    world.clean(&["later", "again"]);
    assert!(!world.has_changed(&seen[0]) && !world.has_changed(&seen[1]));
    assert!(world.has_changed(&seen[2]), "it was there in between");
    assert!(!world.has_changed(&later), "it was there before the watch");
}
