//! A medium that loses power.

use ksf_store::format::Lsn;
use ksf_store::log::Write;
use ksf_store::recover::Places;
use ksf_test::Random;

const SECTOR_BYTES: usize = 512;

/// The medium of one log: what survives a power cut, and the writes that are under way.
#[derive(Default)]
pub(crate) struct Medium {
    pub(crate) places: Vec<Vec<u8>>,
    #[allow(dead_code, reason = "not every test has writes under way")]
    pub(crate) under_way: Vec<Write>,
    /// What its log must reach at every later start, as the superblock has it.
    #[allow(dead_code, reason = "not every test starts a store")]
    pub(crate) reached: Lsn,
}

impl Medium {
    #[allow(dead_code, reason = "not every test needs it")]
    pub(crate) fn new(places: usize, place_bytes: usize) -> Self {
        Self { places: vec![vec![0; place_bytes]; places], under_way: Vec::new(), reached: Lsn::default() }
    }

    /// The power goes: each sector of a write that is under way is old or new. Before `promised` nothing is: an orderly end there would
    /// have written that down.
    #[allow(dead_code, reason = "not every test needs it")]
    pub(crate) fn lose_power(&mut self, promised: Lsn, random: &mut Random) {
        self.reached = self.reached.max(promised);
        for write in std::mem::take(&mut self.under_way) {
            self.put_in_part(write.place, write.offset as usize, &write.bytes, random);
        }
    }

    /// Any sectors of what is written.
    pub(crate) fn put_in_part(&mut self, place: u32, offset: usize, bytes: &[u8], random: &mut Random) {
        let fate = random.within(0..=3);
        for (at, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
            let arrives = match fate {
                0 => false,
                1 => true,
                _ => random.one_in(2),
            };
            if arrives {
                self.put(place, offset + at * SECTOR_BYTES, sector);
            }
        }
    }

    pub(crate) fn put(&mut self, place: u32, offset: usize, bytes: &[u8]) {
        self.places[place as usize][offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

impl Places for Medium {
    fn places(&self) -> u32 {
        self.places.len() as u32
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()> {
        into.clone_from(&self.places[place as usize]);
        Ok(())
    }
}
