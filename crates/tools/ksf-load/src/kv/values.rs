//! Values that say what they are: key, version, and a checksum of all bytes.
//!
//! ```text
//!   "ksfv" (4) | CRC-32C of all that follows (4) | run (8) | key (8) | version (8) | filler ...
//! ```
//!
//! Numbers are big endian. The run is that of a journal, or drawn where there is none: it tells these values from those of
//! other runs. The filler differs from version to version, so that a value put together from two has a wrong checksum.

use crate::drive::random::{Random, mix};

/// The parts of a value that are no filler: the shortest value.
pub(super) const VALUE_BYTES_MIN: usize = 32;

/// The longest value.
pub(super) const VALUE_BYTES_MAX: usize = 16 << 20;

const MAGIC: &[u8; 4] = b"ksfv";

/// Behind the checksum.
const CHECKED_FROM: usize = 8;

/// So many different fillers; a power of two.
const FILLERS: usize = 4096;

/// Why a value is not one that this run wrote to its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wrong {
    /// It is no value of this program, or of another run.
    Foreign,
    /// Its checksum is wrong.
    Damaged,
    /// It was written to this key.
    OtherKey(u64),
}

/// Makes the values of a run, and reads them.
#[derive(Debug)]
pub(super) struct Values {
    run: u64,
    /// A filler begins at one of the first places.
    filler: Box<[u8]>,
}

impl Values {
    /// Values of at most `bytes_max` bytes.
    pub(super) fn new(run: u64, bytes_max: usize) -> Values {
        let mut random = Random::new(0);
        let length = FILLERS + bytes_max.saturating_sub(VALUE_BYTES_MIN);
        Values { run, filler: (0..length).map(|_| random.next() as u8).collect() }
    }

    /// Appends a value of `bytes` bytes, which is at least [`VALUE_BYTES_MIN`].
    pub(super) fn write(&self, out: &mut Vec<u8>, key: u64, version: u64, bytes: usize) {
        let start = out.len();
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[0; 4]);
        for number in [self.run, key, version] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        let from = mix(key ^ version.rotate_left(32)) as usize % FILLERS;
        out.extend_from_slice(&self.filler[from..from + bytes - VALUE_BYTES_MIN]);
        let sum = crc32c::crc32c(&out[start + CHECKED_FROM..]);
        out[start + 4..start + CHECKED_FROM].copy_from_slice(&sum.to_be_bytes());
    }

    /// The version of a value that was found at this key.
    pub(super) fn read(&self, value: &[u8], key: u64) -> Result<u64, Wrong> {
        let number = |at: usize| value[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
        if value.len() < VALUE_BYTES_MIN || !value.starts_with(MAGIC) {
            return Err(Wrong::Foreign);
        }
        if value[4..CHECKED_FROM] != crc32c::crc32c(&value[CHECKED_FROM..]).to_be_bytes() {
            return Err(Wrong::Damaged);
        }
        match (number(8), number(16)) {
            (run, _) if run != self.run => Err(Wrong::Foreign),
            (_, other) if other != key => Err(Wrong::OtherKey(other)),
            _ => Ok(number(24)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value(run: u64, key: u64, version: u64, bytes: usize) -> Vec<u8> {
        let mut out = b"in front".to_vec();
        Values::new(run, bytes).write(&mut out, key, version, bytes);
        out.split_off(8)
    }

    #[test]
    fn a_value_is_as_documented() {
        let value = value(0x0102, 3, 4, VALUE_BYTES_MIN + 10);
        assert_eq!(value.len(), VALUE_BYTES_MIN + 10);
        assert_eq!(value[..4], *b"ksfv");
        let numbers: Vec<u8> = [0x0102u64, 3, 4].iter().flat_map(|number| number.to_be_bytes()).collect();
        assert_eq!(value[8..32], numbers);
        assert_eq!(value[4..8], crc32c::crc32c(&value[8..]).to_be_bytes());
    }

    #[test]
    fn a_value_tells_its_run_and_its_key() {
        let values = Values::new(7, 64);
        assert_eq!(values.read(&value(7, 5, 9, 64), 5), Ok(9));
        assert_eq!(values.read(&value(7, 5, 9, 64), 6), Err(Wrong::OtherKey(5)));
        assert_eq!(values.read(&value(8, 5, 9, 64), 5), Err(Wrong::Foreign));
        for foreign in [&b""[..], b"hello", &[b'x'; 64], b"ksfv"] {
            assert_eq!(values.read(foreign, 5), Err(Wrong::Foreign));
        }
    }

    #[test]
    fn the_head_of_one_version_and_the_tail_of_another_are_no_value() {
        let values = Values::new(7, 1400);
        for version in 1..200 {
            let (old, new) = (value(7, 5, version, 1400), value(7, 5, version + 1, 1400));
            for cut in [33, 512, 1024, 1399] {
                let torn = [&new[..cut], &old[cut..]].concat();
                // The last byte of two versions may be the same one.
                assert!(values.read(&torn, 5) == Err(Wrong::Damaged) || torn == new, "{version}, {cut}");
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_any_flipped_bit_is_found(
            key: u64, version: u64, bytes in VALUE_BYTES_MIN..3000, at: proptest::sample::Index, bit in 0u8..8,
        ) {
            let values = Values::new(7, bytes);
            let mut value = value(7, key, version, bytes);
            prop_assert_eq!(values.read(&value, key), Ok(version));
            prop_assert!(values.read(&value[..at.index(bytes)], key).is_err());
            value[at.index(bytes)] ^= 1 << bit;
            let wrong = values.read(&value, key).unwrap_err();
            prop_assert_eq!(wrong, if at.index(bytes) < 4 { Wrong::Foreign } else { Wrong::Damaged });
        }
    }
}
