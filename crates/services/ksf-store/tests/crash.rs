//! Logs on a medium that loses power: whatever was told to be durable is there at the next start, in any order of writes.

mod common;
mod opened;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use common::Medium;
use ksf_store::format::{Kind, Link, Lsn, Record};
use ksf_store::log::{AppendError, Geometry, Log, News};
use ksf_store::promises::Promises;
use ksf_test::{Random, TestRandom};
use opened::{recover, seeds};

const LOGS: usize = 3;

/// A record that was appended: where, and what it saw of other logs.
struct Appended {
    lsn: Lsn,
    epoch: u32,
    number: u64,
    link: Option<Link>,
}

/// A store of several logs, with what its user knows.
struct World {
    random: TestRandom,
    geometry: Geometry,
    media: Vec<Medium>,
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

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::of_test(seed);
        let block_bytes = NonZeroUsize::new(random.pick(&[512, 4096])).unwrap();
        let blocks = random.within(40..=80);
        let geometry = Geometry { store: 77, block_bytes, segment_bytes: (blocks * block_bytes.get()) as u64 };
        let places = random.within(4..=9);
        let medium =
            || Medium { places: vec![vec![0; geometry.segment_bytes as usize]; places], under_way: Vec::new() };
        Self {
            media: (0..LOGS).map(|_| medium()).collect(),
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
            kind: Kind::String,
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
                medium.under_way.push(write);
            }
        }
    }

    fn end_a_write(&mut self) {
        let log = self.random.within(0..=LOGS - 1);
        let medium = &mut self.media[log];
        if medium.under_way.is_empty() {
            return;
        }
        let write = medium.under_way.swap_remove(self.random.within(0..=medium.under_way.len() - 1));
        medium.put(write.place, write.offset as usize, &write.bytes);
        let promises = &mut self.promises;
        self.logs[log].written(write.id, true, write.bytes, |news| {
            if let News::Durable { end, links } = news {
                promises.durable(log as u16, end, links);
            }
        });
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
        self.media.iter_mut().for_each(|medium| medium.lose_power(&mut self.random));
        // The number of this start is durable before anything is written.
        self.epoch += 1;
        let found = recover(self.geometry, &mut self.media, &mut self.epoch, Some(&mut self.random));
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
                70..95 => self.end_a_write(),
                95..98 => self.say(),
                _ => self.crash(),
            }
        }
    }
}

#[test]
fn what_was_promised_survives_every_power_cut() {
    let mut said = 0;
    for seed in seeds(400) {
        let mut world = World::new(seed);
        world.run(600);
        world.crash();
        said += world.said;
        assert!(world.next_number > 100 && world.epoch > 0, "seed {seed}: too little happened");
    }
    assert!(said > 100, "{said} times a log was idle");
}
