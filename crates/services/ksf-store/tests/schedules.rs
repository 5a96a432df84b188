//! Orders of events in which data was once lost, or came back: what the random tests meet one time in thousands of runs.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::common::Medium;
use crate::opened::open;
use ksf_store::log::{Geometry, Write};
use ksf_store::store::{CleanError, Cleaning, Clock, Shard, Store};

const BLOCK_BYTES: usize = 512;

/// A store of two shards, of which each step is told.
struct Stage {
    geometry: Geometry,
    media: Vec<Medium>,
    store: Arc<Store>,
    shards: Vec<Shard>,
    epoch: u32,
    next_filler: u64,
}

impl Stage {
    fn new() -> Self {
        let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
        let geometry = Geometry { store: 3, block_bytes, segment_bytes: 32 * BLOCK_BYTES as u64 };
        let mut media: Vec<_> = (0..2).map(|_| Medium::new(8, geometry.segment_bytes as usize)).collect();
        let (store, shards) = open(geometry, &mut media, &mut 1, None);
        Self { geometry, media, store, shards, epoch: 1, next_filler: 0 }
    }

    fn set(&mut self, shard: usize, key: &str, value: &str) {
        let key = key.as_bytes();
        self.shards[shard].update(&[key], Clock::default(), |update| update.set(key, value.as_bytes(), None)).unwrap();
    }

    /// Sets a key in the knowledge of what another one has.
    fn set_after_reading(&mut self, shard: usize, key: &str, value: &str, read: &str) {
        let (key, read) = (key.as_bytes(), read.as_bytes());
        let command = self.shards[shard].update(&[key, read], Clock::default(), |update| {
            assert!(update.get(read).is_some());
            update.set(key, value.as_bytes(), None);
        });
        command.unwrap();
    }

    fn remove(&mut self, shard: usize, key: &str) {
        let key = key.as_bytes();
        let (was_there, _) = self.shards[shard].update(&[key], Clock::default(), |update| update.remove(key)).unwrap();
        assert!(was_there);
    }

    fn get(&mut self, key: &str) -> Option<String> {
        let key = key.as_bytes();
        let value = |got: ksf_store::store::Got<'_>| String::from_utf8(got.value().to_vec()).unwrap();
        self.shards[0].read(&[key], 0, |view| view.get(key).map(value)).0
    }

    /// Every write that the shard has to make, not yet on the medium.
    fn begin_writes(&mut self, shard: usize) -> Vec<Write> {
        std::iter::from_fn(|| self.shards[shard].next_write(usize::MAX, 0)).collect()
    }

    fn end_write(&mut self, shard: usize, write: Write) {
        self.media[shard].put(write.place, write.offset as usize, &write.bytes);
        self.shards[shard].written(write.id, true, write.bytes);
    }

    /// All that the shard has to write is on its medium.
    fn drain(&mut self, shard: usize) {
        loop {
            let writes = self.begin_writes(shard);
            if writes.is_empty() {
                return;
            }
            writes.into_iter().for_each(|write| self.end_write(shard, write));
        }
    }

    fn last_segment(&self, shard: usize) -> Option<u64> {
        self.shards[shard].log().segments().keys().next_back().copied()
    }

    /// Writes keys that nobody asks for until the log has a new segment.
    fn fill_segment(&mut self, shard: usize) {
        let before = self.last_segment(shard);
        while self.last_segment(shard) == before {
            self.next_filler += 1;
            let (key, value) = (format!("filler {shard} {}", self.next_filler), "x".repeat(600));
            self.set(shard, &key, &value);
        }
        self.drain(shard);
    }

    /// Cleans a segment, and erases it if that may be done.
    fn clean(&mut self, shard: usize, number: u64) {
        let place = self.shards[shard].log().segments()[&number].place;
        let bytes = self.media[shard].places[place as usize].clone();
        let done = self.shards[shard].clean(&mut Cleaning::new(number), &bytes, usize::MAX);
        assert_eq!(done, Ok(true));
        self.drain(shard);
        self.shards[shard].erase_cleaned();
        self.drain(shard);
    }

    fn has_segment(&self, shard: usize, number: u64) -> bool {
        self.shards[shard].log().segments().contains_key(&number)
    }

    /// The power goes: what is not on a medium is lost.
    fn restart(&mut self) {
        self.epoch += 1;
        (self.store, self.shards) = open(self.geometry, &mut self.media, &mut self.epoch, None);
    }
}

/// What cannot be read cannot be written anew: its segment is all that has it.
#[test]
fn a_damaged_segment_is_not_erased() {
    let mut stage = Stage::new();
    stage.set(0, "key", "value");
    stage.fill_segment(0);
    let place = stage.shards[0].log().segments()[&0].place;
    let mut bytes = stage.media[0].places[place as usize].clone();
    // The second batch: the first one is written anew, and what lies behind it counts, too.
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let done = stage.shards[0].clean(&mut Cleaning::new(0), &bytes, usize::MAX);
    assert!(matches!(done, Err(CleanError::Damaged { log: 0, segment: 0, .. })), "{done:?}");
    stage.drain(0);
    stage.shards[0].erase_cleaned();
    stage.drain(0);
    assert!(stage.has_segment(0, 0));
}

/// The record that took a key away is no longer needed, and still on its medium, when the key is set again. It is an older
/// record of the key then, like any other.
#[test]
fn a_key_taken_away_twice_does_not_come_back() {
    let mut stage = Stage::new();
    stage.set(0, "key", "first");
    stage.fill_segment(0);
    stage.remove(1, "key");
    stage.drain(1);
    stage.clean(0, 0);
    assert!(!stage.has_segment(0, 0));
    let second = stage.last_segment(0).unwrap();
    stage.set(0, "key", "second");
    stage.fill_segment(0);
    let third = stage.last_segment(0).unwrap();
    stage.set(0, "key", "third");
    stage.fill_segment(0);
    stage.fill_segment(1);
    // The first record that took it away goes, and later the third value; the second one is still there.
    stage.clean(1, 0);
    let removed = stage.last_segment(1).unwrap();
    stage.remove(1, "key");
    stage.fill_segment(1);
    stage.clean(0, third);
    stage.clean(1, removed);
    assert!(stage.has_segment(0, second) && !stage.has_segment(0, third) && !stage.has_segment(1, removed));
    stage.restart();
    assert_eq!(stage.get("key"), None);
}

/// A value that was acknowledged stays on its medium until the one that follows it is durable in the log of another shard.
#[test]
fn a_value_is_not_erased_before_the_next_one_is_durable() {
    for is_removed in [false, true] {
        let mut stage = Stage::new();
        stage.set(0, "key", "first");
        stage.fill_segment(0);
        if is_removed {
            stage.remove(1, "key");
        } else {
            stage.set(1, "key", "second");
        }
        stage.clean(0, 0);
        stage.restart();
        assert_eq!(stage.get("key").as_deref(), Some("first"));
    }
}

/// When it is durable the segment goes.
#[test]
fn a_segment_is_erased_when_what_follows_its_records_is_durable() {
    let mut stage = Stage::new();
    stage.set(0, "key", "first");
    stage.fill_segment(0);
    stage.set(1, "key", "second");
    stage.clean(0, 0);
    assert!(stage.has_segment(0, 0));
    stage.drain(1);
    stage.shards[0].erase_cleaned();
    stage.drain(0);
    assert!(!stage.has_segment(0, 0));
    stage.restart();
    assert_eq!(stage.get("key").as_deref(), Some("second"));
}

/// A batch that was cut at one start is not there at any later one, whatever the other log has become meanwhile.
#[test]
fn a_batch_that_was_cut_does_not_come_back() {
    for is_in_a_segment_of_its_own in [false, true] {
        let mut stage = Stage::new();
        stage.set(0, "other", "kept");
        stage.drain(0);
        let mut value = "never told".to_owned();
        if is_in_a_segment_of_its_own {
            stage.set(0, "large", &"x".repeat(8_000));
            stage.drain(0);
            value = "x".repeat(8_000);
        }
        stage.fill_segment(1);
        stage.set(1, "seen", "lost");
        let before = stage.last_segment(0);
        stage.set_after_reading(0, "key", &value, "seen");
        assert_eq!(stage.last_segment(0) != before, is_in_a_segment_of_its_own);
        stage.drain(0);
        // What it saw is lost with the power.
        stage.restart();
        assert_eq!((stage.get("key"), stage.get("seen")), (None, None));
        stage.set(1, "key", "told");
        let written = stage.last_segment(1).unwrap();
        stage.fill_segment(1);
        stage.fill_segment(1);
        for number in written..stage.last_segment(1).unwrap() {
            stage.clean(1, number);
        }
        assert!(!stage.has_segment(1, written));
        stage.restart();
        assert_eq!(stage.get("key").as_deref(), Some("told"));
        // And the log that was cut goes on.
        stage.set(0, "key", "later");
        stage.fill_segment(0);
        stage.restart();
        assert_eq!((stage.get("key").as_deref(), stage.get("other").as_deref()), (Some("later"), Some("kept")));
    }
}

/// The last segment says how far the log was: without it the places of what others saw would be given out again.
#[test]
fn the_last_segment_of_a_log_is_not_cleaned() {
    let mut stage = Stage::new();
    stage.set(1, "seen", "first");
    stage.set_after_reading(0, "key", "value", "seen");
    stage.drain(1);
    stage.drain(0);
    let mut fillers = Vec::new();
    while stage.last_segment(1) == Some(0) {
        stage.next_filler += 1;
        fillers.push(format!("filler 1 {}", stage.next_filler));
        let key = fillers.last().unwrap().clone();
        stage.drain(1);
        stage.set(1, &key, &"x".repeat(600));
    }
    // The end of the first segment arrives, and nothing of the second one.
    let end = stage.begin_writes(1).swap_remove(0);
    stage.end_write(1, end);
    stage.restart();
    for key in fillers.iter().map(|key| &key[..]).chain(["seen"]) {
        stage.set(0, key, "again");
    }
    stage.drain(0);
    if let Some((number, _)) = stage.shards[1].log().next_to_clean() {
        stage.clean(1, number);
    }
    stage.restart();
    assert_eq!((stage.get("key").as_deref(), stage.get("seen").as_deref()), (Some("value"), Some("again")));
}
