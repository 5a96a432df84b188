//! Logs on a medium that loses power: whatever was told to be durable is there at the next start, in any order of writes.
//! The medium is a disk, or persistent memory.

use crate::lines;
use crate::opened;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::common::Medium;
use crate::lines::{Mutant, PmemMedium};
use crate::opened::seeds;
use ksf_store::format::{Link, Lsn, Record, RecordKind, SegmentHeader, Standing};
use ksf_store::log::{AppendError, Geometry, Log, News, Write};
use ksf_store::promises::Promises;
use ksf_store::recover::{Found, Places};
use ksf_test::{Random, TestRandom};

const LOGS: usize = 3;

/// A record that was appended: where, and what it saw of other logs.
struct Appended {
    lsn: Lsn,
    epoch: u32,
    number: u64,
    link: Option<Link>,
}

/// The medium of one log, as the simulation uses it.
trait Power: Places + Sized {
    /// Takes a write of the log.
    fn begin(&mut self, write: Write);

    /// Writes that are done now, of those that were begun.
    fn end_some(&mut self, random: &mut Random) -> Vec<Write>;

    /// The process ends, and the power may go.
    fn crash(&mut self, log: &mut Log, random: &mut Random);

    /// Reads and repairs the logs of a store. The power goes now and then meanwhile, and `epoch` grows.
    fn recover(geometry: Geometry, media: &mut [Self], epoch: &mut u32, random: &mut Random) -> Vec<Found>;
}

/// A disk, which has several writes under way and ends them in any order.
impl Power for Medium {
    fn begin(&mut self, write: Write) {
        self.under_way.push(write);
    }

    fn end_some(&mut self, random: &mut Random) -> Vec<Write> {
        if self.under_way.is_empty() {
            return Vec::new();
        }
        let write = self.under_way.swap_remove(random.within(0..=self.under_way.len() - 1));
        self.put(write.place, write.offset as usize, &write.bytes);
        vec![write]
    }

    fn crash(&mut self, log: &mut Log, random: &mut Random) {
        self.lose_power(log.promised(), random);
    }

    fn recover(geometry: Geometry, media: &mut [Self], epoch: &mut u32, random: &mut Random) -> Vec<Found> {
        opened::recover(geometry, media, epoch, Some(random))
    }
}

/// Persistent memory, of which one fence makes all durable that was stored.
impl Power for PmemMedium {
    fn begin(&mut self, write: Write) {
        self.begin(write);
    }

    fn end_some(&mut self, _: &mut Random) -> Vec<Write> {
        self.end_all()
    }

    fn crash(&mut self, log: &mut Log, random: &mut Random) {
        self.crash(log, random);
    }

    fn recover(geometry: Geometry, media: &mut [Self], epoch: &mut u32, random: &mut Random) -> Vec<Found> {
        lines::recover(geometry, media, epoch, random)
    }
}

/// A store of several logs, with what its user knows.
struct World<M> {
    random: TestRandom,
    geometry: Geometry,
    media: Vec<M>,
    logs: Vec<Log>,
    /// Of each log, what was appended and may be there.
    appended: Vec<Vec<Appended>>,
    promises: Promises,
    /// Segments that were given up, by log: they may be there or not.
    cleaned: BTreeSet<(usize, u64)>,
    epoch: u32,
    next_number: u64,
    /// How often an idle log said what was promised of it.
    said: u64,
}

impl<M: Power> World<M> {
    /// `medium`: makes the medium of one log, of its geometry, number of places and seed.
    fn new(seed: u64, mut medium: impl FnMut(Geometry, usize, u64) -> M) -> Self {
        let mut random = Random::of_test(seed);
        let block_bytes = NonZeroUsize::new(random.pick(&[512, 512, 512, 4096])).unwrap();
        let blocks = random.within(40..=60);
        let geometry = Geometry { store: 77, block_bytes, segment_bytes: (blocks * block_bytes.get()) as u64 };
        let places = random.within(4..=9);
        Self {
            media: (0..LOGS).map(|_| medium(geometry, places, random.bits())).collect(),
            logs: (0..LOGS).map(|log| Log::create(geometry, log as u16, places as u32)).collect(),
            appended: (0..LOGS).map(|_| Vec::new()).collect(),
            promises: Promises::new([Lsn::default(); LOGS]),
            cleaned: BTreeSet::new(),
            epoch: 0,
            next_number: 1,
            said: 0,
            random,
            geometry,
        }
    }

    fn append(&mut self) {
        let log = self.random.within(0..=LOGS - 1);
        let count = self.random.within(1..=3);
        let value = vec![self.next_number as u8; self.random.within(0..=1500)];
        // Some saw what another log wrote last.
        let other = self.random.within(0..=LOGS - 1);
        let seen = self.appended[other]
            .last()
            .filter(|seen| seen.epoch == self.epoch && other != log && self.random.one_in(3));
        let link = seen.map(|seen| Link { log: other as u16, lsn: Lsn(seen.lsn.0 + 1) });
        let keys: Vec<[u8; 8]> = (0..count as u64).map(|at| (self.next_number + at).to_be_bytes()).collect();
        let record = |key| Record {
            kind: RecordKind::String,
            version: self.next_number,
            expires_ms: None,
            received_ns: None,
            key,
            subkey: &[],
            value: &value,
        };
        let records: Vec<_> = keys.iter().map(|key| record(&key[..])).collect();
        let mut places = Vec::new();
        match self.logs[log].append(&records, link, |_, lsn| places.push(lsn)) {
            Ok(()) => {}
            Err(AppendError::Full) => return self.clean(log),
            Err(error) => panic!("{error}"),
        }
        for lsn in places {
            self.appended[log].push(Appended { lsn, epoch: self.epoch, number: self.next_number, link });
            self.next_number += 1;
        }
    }

    /// Gives up the oldest segment, as if all of its records were out of date.
    fn clean(&mut self, log: usize) {
        let oldest = self.logs[log].segments().keys().next().copied();
        let newest = self.logs[log].segments().keys().next_back().copied();
        if let Some(number) = oldest.filter(|_| oldest != newest) {
            let first_live = Lsn((number + 1) * self.geometry.segment_bytes);
            // Only what is durable is ever cleaned: its records were written again, or are out of date.
            if self.logs[log].durable() >= first_live {
                self.logs[log].cleaned(number);
                self.cleaned.insert((log, number));
                self.logs[log].erase_cleaned(|_| true);
            }
        }
    }

    fn begin_writes(&mut self) {
        for (log, medium) in self.logs.iter_mut().zip(&mut self.media) {
            let at_once = self.random.within(1..=4);
            while let Some(write) = log.next_write(at_once, 0) {
                medium.begin(write);
            }
        }
    }

    fn end_writes(&mut self) {
        let log = self.random.within(0..=LOGS - 1);
        let promises = &mut self.promises;
        for write in self.media[log].end_some(&mut self.random) {
            self.logs[log].written(write.id, true, write.bytes, |news| {
                if let News::Durable { end, links } = news {
                    promises.durable(log as u16, end, links);
                }
            });
        }
        self.promises.advance(|log, end| self.logs[usize::from(log)].promise(end));
    }

    /// Logs that are idle say what was promised.
    fn say(&mut self) {
        for log in &mut self.logs {
            self.said += u64::from(log.say(0));
        }
    }

    /// The power goes, and comes back.
    fn crash(&mut self) {
        for (log, medium) in self.logs.iter_mut().zip(&mut self.media) {
            medium.crash(log, &mut self.random);
        }
        // The number of this start is durable before anything is written.
        self.epoch += 1;
        let found = M::recover(self.geometry, &mut self.media, &mut self.epoch, &mut self.random);
        for (log, found) in found.into_iter().enumerate() {
            let mut there = BTreeMap::new();
            found
                .records(&self.media[log], |lsn, record| {
                    let number = u64::from_be_bytes(record.key.try_into().unwrap());
                    assert!(record.value.iter().all(|byte| *byte == record.version as u8));
                    there.insert(lsn, number);
                })
                .unwrap();
            let appended = &mut self.appended[log];
            let promised = self.promises.promised(log as u16);
            let counts = |lsn: Lsn| !self.cleaned.contains(&(log, self.geometry.segment_of(lsn)));
            there.retain(|lsn, _| counts(*lsn));
            appended.retain(|one| counts(one.lsn));
            let mut is_whole = true;
            appended.retain(|one| {
                let is_there = there.remove(&one.lsn) == Some(one.number);
                assert!(is_there || one.lsn >= promised, "log {log}: number {} was promised, and is lost", one.number);
                assert!(is_whole || !is_there, "log {log} has a hole before number {}", one.number);
                is_whole = is_there;
                is_there
            });
            assert!(there.is_empty(), "log {log}: what nobody wrote: {there:?}");
            self.logs[log] = found.into_log(self.epoch);
        }
        self.promises = Promises::new(self.logs.iter().map(Log::durable));
        // What was there after a crash was seen: it is there after the next one, too.
        let ends: Vec<_> = self.logs.iter().map(Log::durable).collect();
        for one in self.appended.iter().flatten() {
            assert!(one.link.is_none_or(|link| link.lsn <= ends[usize::from(link.log)]), "saw what is not there");
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.random.within(0..=99) {
                0..50 => self.append(),
                50..70 => self.begin_writes(),
                70..95 => self.end_writes(),
                95..98 => self.say(),
                _ => self.crash(),
            }
        }
    }
}

/// How often the power went, also while a store started, and how often an idle log said what was promised of it.
fn run<M: Power>(seed: u64, medium: impl FnMut(Geometry, usize, u64) -> M) -> [u64; 2] {
    let mut world = World::new(seed, medium);
    world.run(600);
    world.crash();
    assert!(world.next_number > 100 && world.epoch > 0, "seed {seed}: too little happened");
    [u64::from(world.epoch), world.said]
}

fn run_on_pmem(seed: u64, mutant: Option<Mutant>) -> [u64; 2] {
    run(seed, |geometry, places, seed| PmemMedium::new(geometry, places as u32, seed, mutant))
}

/// Runs all seeds. One in four or more has to have an idle log, and each several power cuts. `--nocapture` shows how many there were.
fn much_happened(seeds: Range<u64>, run: impl Fn(u64) -> [u64; 2]) {
    let count = seeds.end - seeds.start;
    let [cuts, said] = seeds.map(run).fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
    println!("{count} seeds, {cuts} power cuts, {said} times a log was idle");
    assert!(cuts > 5 * count && said > count / 4, "{count} seeds, {cuts} power cuts, {said} times a log was idle");
}

/// Of a batch the first sector arrived, with its header, and the others did not. A start cuts it. The batch that is written in its
/// place then is torn the other way: its first sector does not arrive, and the others have the bytes that the first batch lacked.
#[test]
fn a_batch_that_was_cut_does_not_come_back_with_bytes_of_a_later_one() {
    const SECTOR_BYTES: usize = 512;
    let geometry = Geometry { store: 77, block_bytes: NonZeroUsize::new(4096).unwrap(), segment_bytes: 40 * 4096 };
    let mut medium = Medium::new(4, geometry.segment_bytes as usize);
    let zeros = [0; 2000];
    let append = |log: &mut Log, key: &[u8]| {
        let kind = RecordKind::String;
        let record = Record { kind, version: 1, expires_ms: None, received_ns: None, key, subkey: &[], value: &zeros };
        log.append(&[record], None, |_, _| {}).unwrap();
        log.next_write(1, 0).expect("a batch")
    };
    let mut log = Log::create(geometry, 0, 4);
    // The header of the segment, and a batch that stays.
    let mut writes = vec![append(&mut log, b"stays")];
    while let Some(write) = writes.pop() {
        medium.put(write.place, write.offset as usize, &write.bytes);
        log.written(write.id, true, write.bytes, |_| {});
        writes.extend(log.next_write(1, 0));
    }
    let cut = append(&mut log, b"is cut");
    let at = cut.offset as usize;
    medium.places[cut.place as usize][at..at + cut.bytes.len()].fill(0xff);
    medium.put(cut.place, at, &cut.bytes[..SECTOR_BYTES]);
    let keys = |found: &Found, medium: &Medium| {
        let mut keys = Vec::new();
        found.records(medium, |_, record| keys.push(String::from_utf8(record.key.to_vec()).unwrap())).unwrap();
        keys
    };
    let mut media = [medium];
    let mut epoch = 2;
    let found = opened::recover(geometry, &mut media, &mut epoch, None).remove(0);
    assert_eq!(keys(&found, &media[0]), ["stays"]);
    let mut log = found.into_log(epoch);
    let later = append(&mut log, b"later!");
    let (at, [medium]) = (later.offset as usize, &mut media);
    medium.put(later.place, at + SECTOR_BYTES, &later.bytes[SECTOR_BYTES..]);
    epoch += 1;
    let found = opened::recover(geometry, &mut media, &mut epoch, None).remove(0);
    assert_eq!(keys(&found, &media[0]), ["stays"]);
}

#[test]
fn what_was_promised_survives_every_power_cut() {
    let disk = |geometry: Geometry, places: usize, _: u64| Medium::new(places, geometry.segment_bytes as usize);
    much_happened(seeds(60), |seed| run(seed, disk));
}

#[test]
fn what_was_promised_survives_every_power_cut_on_persistent_memory() {
    much_happened(seeds(30), |seed| run_on_pmem(seed, None));
}

/// Of what is wrong in the order of stores, flushes and fences the simulation finds each.
#[test]
fn without_a_flush_or_a_fence_something_is_lost() {
    let mutants = [Mutant::FlushLeftOut, Mutant::FenceLeftOut, Mutant::FenceBeforeFlush, Mutant::FoundNotKept];
    for mutant in mutants {
        let is_found = (0..200).any(|seed| catch_unwind(AssertUnwindSafe(|| run_on_pmem(seed, Some(mutant)))).is_err());
        assert!(is_found, "{mutant:?} is not found");
    }
}

const BLOCK_BYTES: usize = 512;

/// Two segments, whose headers have lists of several cache lines, are erased with one fence, and the power goes before the step
/// `fail_after`, if that is one of theirs. Returns how many steps there are without that.
fn erase_two(seed: u64, fail_after: Option<u64>, mutant: Option<Mutant>) -> u64 {
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).unwrap();
    let geometry = Geometry { store: 9, block_bytes, segment_bytes: 4 * BLOCK_BYTES as u64 };
    let header = |number: u64, epoch, standing, live: std::ops::Range<u64>| SegmentHeader {
        store: geometry.store,
        log: 0,
        number,
        epoch,
        segment_bytes: geometry.segment_bytes,
        block_bytes: BLOCK_BYTES as u32,
        standing,
        live: Some(live.collect()),
    };
    let before = [header(20, 1, Standing::Counts, 1..20), header(21, 1, Standing::Counts, 1..21)];
    let after = [header(20, 2, Standing::Cleaned, 0..0), header(40, 2, Standing::Counts, 9..40)];
    let mut medium = PmemMedium::new(geometry, 2, seed, mutant);
    let put = |medium: &mut PmemMedium, headers: &[SegmentHeader]| {
        (0..).zip(headers).for_each(|(place, header)| medium.put(place, 0, &header.encode()));
        medium.commit();
    };
    put(&mut medium, &before);
    let steps_before = medium.steps();
    if let Some(steps) = fail_after {
        medium.fail_after(steps);
    }
    put(&mut medium, &after);
    let steps = medium.steps() - steps_before;
    medium.lose_power();
    for (place, (before, after)) in (0..).zip(before.into_iter().zip(after)) {
        let found = SegmentHeader::decode(&medium.front(place, BLOCK_BYTES));
        let found = found.unwrap_or_else(|why| panic!("seed {seed}: place {place} has no header: {why}"));
        assert!(found == after || found == before && fail_after.is_some(), "seed {seed}, place {place}: {found:?}");
    }
    steps
}

/// Whenever the power goes, a header is the old or the new one, with its list, and the new one once it was fenced.
#[test]
fn a_header_in_memory_is_old_or_new() {
    let steps = erase_two(0, None, None);
    assert!(steps > 60, "{steps} steps");
    for fail_after in (0..steps).map(Some).chain([None]) {
        for seed in 0..20 {
            erase_two(seed, fail_after, None);
        }
    }
    let mutants = [
        Mutant::FlushLeftOut,
        Mutant::FenceLeftOut,
        Mutant::FenceBeforeFlush,
        Mutant::HeaderWithJournal,
        Mutant::JournalTooSoon,
        Mutant::JournalNotRead,
    ];
    for mutant in mutants {
        let is_found = (0..steps).map(Some).chain([None]).any(|fail_after| {
            let is_lost = |seed| catch_unwind(|| erase_two(seed, fail_after, Some(mutant))).is_err();
            (0..20).any(is_lost)
        });
        assert!(is_found, "{mutant:?} is not found");
    }
}
