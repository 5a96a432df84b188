//! The bytes that echotest sends: every position of the stream has its own byte.
//!
//! The stream of a connection is one endless pattern. A byte that is lost, repeated, shifted or swapped with
//! another message therefore differs from what is expected at its place, which a constant fill would hide.
//! The pattern repeats after a prime number of bytes, so that no message length up to the
//! period makes two messages in flight equal.

use std::sync::Arc;

/// Candidate periods. Two, because a message length that is a multiple of the period would make all messages equal.
const PERIODS: [usize; 2] = [65_521, 65_519];

/// A pattern for messages of one length; cheap to clone, the table is shared by the threads.
#[derive(Debug, Clone)]
pub(crate) struct Pattern {
    /// One period, then enough of the next that every message is one contiguous slice.
    table: Arc<[u8]>,
    period: usize,
    message_bytes: usize,
}

impl Pattern {
    /// Prepares the table for messages of `message_bytes` bytes (at least 1).
    pub(crate) fn new(message_bytes: usize) -> Pattern {
        let message_bytes = message_bytes.max(1);
        let period = match message_bytes % PERIODS[0] {
            0 => PERIODS[1],
            _ => PERIODS[0],
        };
        let mut table: Vec<u8> = (0..period as u64).map(mixed_byte).collect();
        for at in 0..message_bytes {
            table.push(table[at]);
        }
        Pattern { table: table.into(), period, message_bytes }
    }

    /// Length of a message in bytes.
    pub(crate) fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Where message number `index` starts in the table.
    pub(crate) fn offset(&self, index: u64) -> usize {
        let period = self.period as u64;
        ((index % period) * (self.message_bytes as u64 % period) % period) as usize
    }

    /// The offset of the message after the one at `offset`, without a multiplication.
    pub(crate) fn next_offset(&self, offset: usize) -> usize {
        let next = offset + self.message_bytes % self.period;
        if next >= self.period { next - self.period } else { next }
    }

    /// Bytes `from..from + len` of the message whose offset is `offset`; `from + len` is at most the message length.
    pub(crate) fn slice(&self, offset: usize, from: usize, len: usize) -> &[u8] {
        &self.table[offset + from..offset + from + len]
    }

    /// Says where `got` departs from `expected` and, if the bytes belong elsewhere in the pattern, where.
    /// For messages to people, not for the fast path.
    pub(crate) fn describe_difference(&self, expected_at: usize, expected: &[u8], got: &[u8]) -> String {
        let Some(first) = expected.iter().zip(got).position(|(want, have)| want != have) else {
            return "no difference".into();
        };
        let mut text = format!("byte {first} is {:#04x}, not {:#04x}", got[first], expected[first]);
        if let Some(shift) = self.find_shift(expected_at + first, &got[first..]) {
            text += &format!("; the bytes from there on belong {shift:+} bytes away (shifted, lost or swapped)");
        }
        text
    }

    /// The smallest distance at which `got` is found in the pattern. Needs some bytes to be sure.
    fn find_shift(&self, expected_at: usize, got: &[u8]) -> Option<i64> {
        const SURE: usize = 8;
        let needle = got.get(..SURE.min(got.len()))?;
        if needle.len() < SURE {
            return None;
        }
        let half = self.period as i64 / 2;
        let doubled = |at: usize| self.table[at % self.period];
        (0..self.period)
            .filter(|&at| (0..SURE).all(|i| doubled(at + i) == needle[i]))
            .map(|at| {
                let distance = (at as i64 - expected_at as i64).rem_euclid(self.period as i64);
                if distance > half { distance - self.period as i64 } else { distance }
            })
            .min_by_key(|distance| distance.abs())
    }
}

/// One byte of a splitmix64 sequence (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
fn mixed_byte(position: u64) -> u8 {
    (crate::drive::random::mix(position) >> 56) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_and_messages_in_flight_differ() {
        for len in [2, 3, 4, 100, 1024, 65_521, 65_519, 131_042] {
            let pattern = Pattern::new(len);
            let first = pattern.slice(pattern.offset(0), 0, len).to_vec();
            for index in 1..200 {
                // Two bytes can be equal by chance once in 65,536; the table is fixed, so this is no gamble.
                assert_ne!(pattern.slice(pattern.offset(index), 0, len), first, "length {len}, message {index}");
            }
        }
    }

    #[test]
    fn a_shift_is_recognised() {
        let pattern = Pattern::new(100);
        let offset = pattern.offset(5);
        let expected = pattern.slice(offset, 0, 100).to_vec();
        let mut got = expected.clone();
        got.remove(10);
        got.push(0);
        let text = pattern.describe_difference(offset, &expected, &got);
        assert!(text.contains("byte 10 is"), "{text}");
        assert!(text.contains("+1 bytes away"), "{text}");
    }

    proptest! {
        #[test]
        fn stepping_equals_multiplying(len in 1usize..200_000, steps in 1u64..50) {
            let pattern = Pattern::new(len);
            let mut offset = pattern.offset(0);
            for index in 1..=steps {
                offset = pattern.next_offset(offset);
                prop_assert_eq!(offset, pattern.offset(index));
            }
        }

        #[test]
        fn messages_are_one_continuous_stream(len in 1usize..5000, index in 0u64..1 << 40) {
            let pattern = Pattern::new(len);
            let offset = pattern.offset(index);
            // The byte after the last one of a message is the first one of the next.
            prop_assert_eq!(
                (offset + len) % pattern.period,
                pattern.offset(index + 1)
            );
        }
    }
}
