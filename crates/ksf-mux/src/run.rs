//! Messages that travel together: cheap ones of one connection that arrived in one chunk.
//!
//! A queue, a wake-up and a count per message would cost more than the message. A run is as long as its messages are
//! expected to be worked on in less time than it takes to wake somebody; messages that take longer travel alone.

use std::ops::Range;

use ksf::pool::Chunk;

/// One message or several, of one connection, in their order.
#[derive(Debug)]
pub(crate) struct Run {
    chunk: Chunk,
    /// Where in the chunk they are; empty: all of it is the one message.
    ranges: Vec<Range<u32>>,
    /// Those before it are taken.
    at: usize,
}

impl Run {
    /// A message alone.
    pub(crate) fn one(message: Chunk) -> Self {
        Self { chunk: message, ranges: Vec::new(), at: 0 }
    }

    /// Several messages in one chunk.
    pub(crate) fn of(chunk: &Chunk, ranges: Vec<Range<u32>>) -> Self {
        Self { chunk: chunk.clone(), ranges, at: 0 }
    }

    /// Messages left.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len().max(1) - self.at
    }

    /// What holds them.
    pub(crate) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// Takes the next message off: where in the chunk it lies.
    pub(crate) fn pop(&mut self) -> Option<Range<usize>> {
        let whole = 0..self.chunk.len() as u32;
        let range = if self.ranges.is_empty() { &whole } else { self.ranges.get(self.at)? };
        let range = range.start as usize..range.end as usize;
        if self.len() == 0 {
            return None;
        }
        self.at += 1;
        Some(range)
    }

    /// The list of places, to be used again.
    pub(crate) fn into_ranges(mut self) -> Vec<Range<u32>> {
        self.ranges.clear();
        self.ranges
    }
}

/// A message as the framer found it.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    /// In the chunk that was cut.
    InPlace(Range<u32>),
    /// Put together from several.
    Assembled(Chunk),
}

impl Found {
    /// Bytes of it.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::InPlace(range) => range.len(),
            Self::Assembled(chunk) => chunk.len(),
        }
    }
}

/// Builds runs of at most `len_max` messages.
pub(crate) fn gather(
    chunk: &Chunk,
    found: &mut Vec<Found>,
    len_max: usize,
    spares: &mut Vec<Vec<Range<u32>>>,
    runs: &mut Vec<Run>,
) {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    let end = |ranges: &mut Vec<Range<u32>>, runs: &mut Vec<Run>| match &ranges[..] {
        [] => {}
        [one] => {
            runs.push(Run::one(chunk.slice(one.start as usize..one.end as usize)));
            ranges.clear();
        }
        _ => runs.push(Run::of(chunk, std::mem::take(ranges))),
    };
    for found in found.drain(..) {
        match found {
            Found::InPlace(range) => {
                if ranges.capacity() == 0 {
                    ranges = spares.pop().unwrap_or_default();
                }
                ranges.push(range);
                if ranges.len() >= len_max {
                    end(&mut ranges, runs);
                }
            }
            Found::Assembled(message) => {
                end(&mut ranges, runs);
                runs.push(Run::one(message));
            }
        }
    }
    end(&mut ranges, runs);
    if ranges.capacity() > 0 {
        spares.push(ranges);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(runs: Vec<Run>) -> Vec<Vec<Vec<u8>>> {
        let all = |mut run: Run| {
            let (len, chunk) = (run.len(), run.chunk.clone());
            let taken: Vec<_> = std::iter::from_fn(|| run.pop()).map(|range| chunk[range].to_vec()).collect();
            assert_eq!((taken.len(), run.len()), (len, 0));
            taken
        };
        runs.into_iter().map(all).collect()
    }

    #[test]
    fn runs_keep_the_order_and_their_length() {
        let chunk = Chunk::from_vec(b"abcdefgh".to_vec());
        let found = || {
            let in_place = |at| Found::InPlace(at..at + 1);
            let assembled = Found::Assembled(Chunk::from_vec(b"long".to_vec()));
            vec![in_place(0), in_place(1), in_place(2), assembled, in_place(3), in_place(4)]
        };
        for (len_max, expected) in [
            (1, vec![vec!["a"], vec!["b"], vec!["c"], vec!["long"], vec!["d"], vec!["e"]]),
            (2, vec![vec!["a", "b"], vec!["c"], vec!["long"], vec!["d", "e"]]),
            (9, vec![vec!["a", "b", "c"], vec!["long"], vec!["d", "e"]]),
        ] {
            let (mut runs, mut spares) = (Vec::new(), Vec::new());
            gather(&chunk, &mut found(), len_max, &mut spares, &mut runs);
            let expected: Vec<Vec<Vec<u8>>> =
                expected.iter().map(|run| run.iter().map(|text| text.as_bytes().to_vec()).collect()).collect();
            assert_eq!(messages(runs), expected, "{len_max}");
        }
    }

    #[test]
    fn an_empty_message_is_one() {
        let mut run = Run::one(Chunk::from_vec(Vec::new()));
        assert_eq!((run.len(), run.pop(), run.pop()), (1, Some(0..0), None));
    }
}
