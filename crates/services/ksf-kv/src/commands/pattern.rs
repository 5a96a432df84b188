//! Patterns as Redis has them: `*`, `?`, `[a-z]`, `[^a]`, and `\` in front of what is meant literally.
//!
//! Each element but `*` takes one byte. A pattern is read once, into a table with a bit for each byte and each element that takes
//! it. The part in front of the first star belongs at the start of a text, the part behind the last one at its end, and each
//! other part at the first place behind its predecessor where it fits. That place is looked for by all elements at once, 64 in a
//! step, so the cost of a text is its bytes times the words of a part, whatever the text and the pattern are.

use std::ops::Range;

use ksf_store::work;
use smallvec::{SmallVec, smallvec};

use super::{Failed, Result};

/// Bytes of a pattern at most: 16 steps for a byte of a text, in which a leaf of the index may be locked.
const BYTES_MAX: usize = 1024;
/// Elements in a word of the table.
const WORD: usize = u64::BITS as usize;
/// Steps that take as long as one unit of [`work`].
const STEPS_PER_UNIT: usize = 64;

/// A pattern that was read.
pub(super) struct Pattern {
    /// Words for the elements.
    words: usize,
    /// For each byte so many words, with a bit for each element that takes it.
    takers: Vec<u64>,
    /// The elements of each part. Stars are between parts.
    parts: Vec<Range<usize>>,
}

fn count(steps: usize) {
    work::add((steps / STEPS_PER_UNIT) as u64);
}

impl Pattern {
    /// # Errors
    ///
    /// It has more than [`BYTES_MAX`] bytes.
    pub(super) fn read(pattern: &[u8]) -> Result<Self> {
        if pattern.len() > BYTES_MAX {
            return Err(Failed::from(format!("ERR the pattern has more than {BYTES_MAX} bytes")));
        }
        let words = pattern.len().div_ceil(WORD);
        let mut read = Self { words, takers: vec![0; words << 8], parts: Vec::new() };
        let (mut steps, mut part, mut rest) = (read.takers.len(), 0..0, pattern);
        loop {
            rest = match rest {
                [] => break,
                [b'*', behind @ ..] => {
                    read.parts.push(part.clone());
                    part.start = part.end;
                    behind
                }
                [b'?', behind @ ..] => {
                    steps += read.invert(part.end);
                    part.end += 1;
                    behind
                }
                [b'[', behind @ ..] => {
                    let (is_negated, mut behind) = match behind {
                        [b'^', behind @ ..] => (true, behind),
                        behind => (false, behind),
                    };
                    loop {
                        let range;
                        (range, behind) = match behind {
                            // It ends with the pattern, too.
                            [] => break,
                            [b']', after @ ..] => {
                                behind = after;
                                break;
                            }
                            [b'\\', literal, after @ ..] => (*literal..=*literal, after),
                            [low, b'-', high, after @ ..] => (*low.min(high)..=*low.max(high), after),
                            [literal, after @ ..] => (*literal..=*literal, after),
                        };
                        steps += range.len();
                        range.for_each(|byte| read.add(part.end, byte));
                    }
                    if is_negated {
                        steps += read.invert(part.end);
                    }
                    part.end += 1;
                    behind
                }
                [b'\\', literal, behind @ ..] | [literal, behind @ ..] => {
                    read.add(part.end, *literal);
                    part.end += 1;
                    behind
                }
            }
        }
        read.parts.push(part);
        count(steps);
        Ok(read)
    }

    /// The element takes this byte.
    fn add(&mut self, element: usize, byte: u8) {
        self.takers[usize::from(byte) * self.words + element / WORD] |= 1 << (element % WORD);
    }

    /// The element takes the bytes that it did not take. Returns how many there are in all.
    fn invert(&mut self, element: usize) -> usize {
        let of_bytes = self.takers.iter_mut().skip(element / WORD).step_by(self.words);
        of_bytes.map(|word| *word ^= 1 << (element % WORD)).count()
    }

    /// The words of a byte.
    fn takers(&self, byte: u8) -> &[u64] {
        &self.takers[usize::from(byte) * self.words..][..self.words]
    }

    /// True if it takes the whole text.
    pub(super) fn takes(&self, text: &[u8]) -> bool {
        let [first, others @ ..] = &self.parts[..] else { return false };
        let Some((last, between)) = others.split_last() else {
            return text.len() == first.len() && self.fits(first, text);
        };
        let Some((front, rest)) = text.split_at_checked(first.len()) else { return false };
        let Some((mut rest, end)) = rest.len().checked_sub(last.len()).map(|at| rest.split_at(at)) else {
            return false;
        };
        self.fits(first, front)
            && self.fits(last, end)
            && between.iter().all(|part| {
                let found = self.end_of(part, rest);
                rest = &rest[found.unwrap_or(0)..];
                found.is_some()
            })
    }

    /// True if the elements take these bytes, one each.
    fn fits(&self, part: &Range<usize>, text: &[u8]) -> bool {
        count(part.len());
        part.clone().zip(text).all(|(element, byte)| self.takers(*byte)[element / WORD] >> (element % WORD) & 1 == 1)
    }

    /// The end of the first place in a text where the elements of a part take bytes, one each.
    fn end_of(&self, part: &Range<usize>, text: &[u8]) -> Option<usize> {
        if part.is_empty() {
            return Some(0);
        }
        let last = part.end - 1;
        let words = part.start / WORD..last / WORD + 1;
        // The elements that took the byte before, each behind all elements in front of it.
        let mut took: SmallVec<[u64; 4]> = smallvec![0; words.len()];
        let is_there = |took: &[u64]| took[words.len() - 1] >> (last % WORD) & 1 == 1;
        let found = text.iter().position(|byte| {
            let mut next = 1 << (part.start % WORD);
            for (took, takers) in took.iter_mut().zip(&self.takers(*byte)[words.clone()]) {
                let highest = *took >> (WORD - 1);
                *took = (*took << 1 | next) & takers;
                next = highest;
            }
            is_there(&took)
        });
        count(found.unwrap_or(text.len()) * words.len());
        found.map(|at| at + 1)
    }
}

#[cfg(test)]
mod tests {
    use ksf_test::Random;

    use super::*;

    /// The same by going back to the last star.
    fn takes(pattern: &[u8], text: &[u8]) -> bool {
        let (mut p, mut t) = (0, 0);
        let mut retry: Option<(usize, usize)> = None;
        loop {
            let step = match pattern.get(p) {
                None if t == text.len() => return true,
                Some(b'*') => {
                    retry = Some((p + 1, t));
                    p += 1;
                    continue;
                }
                Some(_) if t < text.len() => one(&pattern[p..], text[t]),
                _ => None,
            };
            match (step, retry) {
                (Some(length), _) => (p, t) = (p + length, t + 1),
                (None, Some((after, from))) if from < text.len() => {
                    retry = Some((after, from + 1));
                    (p, t) = (after, from + 1);
                }
                (None, _) => return false,
            }
        }
    }

    /// Bytes of the pattern's first element, if it takes this byte.
    fn one(pattern: &[u8], byte: u8) -> Option<usize> {
        match pattern {
            [b'?', ..] => Some(1),
            [b'\\', literal, ..] => (*literal == byte).then_some(2),
            [b'[', rest @ ..] => {
                let negated = rest.first() == Some(&b'^');
                let mut at = usize::from(negated);
                let mut found = false;
                loop {
                    match &rest[at.min(rest.len())..] {
                        [] => break,
                        [b']', ..] => {
                            at += 1;
                            break;
                        }
                        [b'\\', literal, ..] => {
                            found |= *literal == byte;
                            at += 2;
                        }
                        [low, b'-', high, ..] => {
                            found |= (*low.min(high)..=*low.max(high)).contains(&byte);
                            at += 3;
                        }
                        [literal, ..] => {
                            found |= *literal == byte;
                            at += 1;
                        }
                    }
                }
                (found != negated).then_some(1 + at)
            }
            [literal, ..] => (*literal == byte).then_some(1),
            [] => None,
        }
    }

    #[test]
    fn patterns_are_those_of_redis() {
        for (pattern, text, wanted) in [
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("?", "", false),
            ("**", "ab", true),
            ("h?llo", "hello", true),
            ("h*llo", "heeeello", true),
            ("h*llo", "heeeell", false),
            ("h[ae]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[a-b]llo", "hbllo", true),
            ("h[b-a]llo", "hbllo", true),
            ("[\\]a]", "]", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("\\", "\\", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("ab*ba", "aba", false),
            ("*ab*ab", "ab", false),
            ("[", "a", false),
            ("[^", "a", true),
            ("[]", "a", false),
            ("[a", "a", true),
            ("[a-", "-", true),
            ("[a-]", "b", false),
        ] {
            assert_eq!(Pattern::read(pattern.as_bytes()).unwrap().takes(text.as_bytes()), wanted, "{pattern} {text}");
            assert_eq!(takes(pattern.as_bytes(), text.as_bytes()), wanted, "{pattern} {text}");
        }
    }

    #[test]
    fn a_table_takes_what_going_back_to_the_last_star_takes() {
        let mut random = Random::new(1);
        let mut taken = 0;
        for _ in 0..100_000 {
            let mut text = |bytes: &[u8], length: usize| -> Vec<u8> {
                let length = random.within(0..=length);
                (0..length).map(|_| random.pick(bytes)).collect()
            };
            // A part that lies in several words is found only in a text that has much of it.
            let front = b"a".repeat(text(b"x", 140).len());
            let pattern = [text(b"*?", 1), front.clone(), text(b"ab*?-[]^\\\xff", 10)].concat();
            let text = [text(b"ab", 2), front, text(b"ab-]^[\\\xff\0", 6)].concat();
            let takes = takes(&pattern, &text);
            taken += u32::from(takes);
            let told = Pattern::read(&pattern).unwrap().takes(&text);
            assert_eq!(told, takes, "{} {}", pattern.escape_ascii(), text.escape_ascii());
        }
        assert!(taken > 1_000, "{taken} of the texts were taken");
    }

    /// By the steps that are counted, which are bytes of the text times words of the pattern.
    #[test]
    fn no_pattern_costs_more_than_its_words_for_a_byte() {
        const KEY_BYTES: usize = 65_535;
        for pattern in [
            [&b"*["[..], &[b'a'; BYTES_MAX - 3], b"]"].concat(),
            [&b"*"[..], &[b'b'; BYTES_MAX - 3], b"c*"].concat(),
            [&b"*"[..], &[b'?'; BYTES_MAX - 3], b"c*"].concat(),
            b"*b".repeat(BYTES_MAX / 2),
            b"*[^c]b*c".repeat(BYTES_MAX / 8),
        ] {
            let before = work::done();
            let pattern = Pattern::read(&pattern).unwrap();
            let read = work::done();
            assert!(read - before <= (2 * BYTES_MAX * 256 / STEPS_PER_UNIT) as u64);
            assert!(!pattern.takes(&[&[b'b'; KEY_BYTES][..], b"x"].concat()));
            let steps = (work::done() - read) * STEPS_PER_UNIT as u64;
            assert!(steps <= ((KEY_BYTES + 1) * BYTES_MAX / WORD + BYTES_MAX) as u64, "{steps} steps");
        }
        assert!(Pattern::read(&[b'a'; BYTES_MAX + 1]).is_err());
    }
}
