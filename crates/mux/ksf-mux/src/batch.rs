//! Batches: cheap messages of one connection that arrived in one chunk travel together.
//!
//! A queue, a wake-up and a count per message would cost more than the message. A batch is as long as its messages are
//! expected to be worked on in less time than it takes to wake a worker; messages that take longer travel alone.

use std::ops::Range;

use ksf::pool::Chunk;

/// One message or several, of one connection, in their order.
#[derive(Debug)]
pub(crate) struct MessageBatch {
    chunk: Chunk,
    /// Where in the chunk they are; empty: all of it is the one message.
    ranges: Vec<Range<u32>>,
    /// Those before it are taken.
    at: usize,
}

impl MessageBatch {
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

    /// Appends to `places` where in the chunk the next messages lie, `max` at most. They stay in the batch.
    pub(crate) fn peek(&self, max: usize, places: &mut Vec<Range<u32>>) {
        let count = self.len().min(max);
        match self.ranges.get(self.at..self.at + count) {
            Some(ranges) if !self.ranges.is_empty() => places.extend_from_slice(ranges),
            _ if count > 0 => places.push(0..self.chunk.len() as u32),
            _ => {}
        }
    }

    /// Takes the next messages off.
    pub(crate) fn skip(&mut self, count: usize) {
        debug_assert!(count <= self.len(), "more than there are");
        self.at += count.min(self.len());
    }

    /// The list of places, to be used again.
    pub(crate) fn into_ranges(mut self) -> Vec<Range<u32>> {
        self.ranges.clear();
        self.ranges
    }
}

/// Messages as they were cut, in their order.
#[derive(Debug, Default)]
pub(crate) struct CutMessages {
    /// Those that lie in the chunk that was cut.
    places: Vec<Range<u32>>,
    /// Those that were put together from several chunks or parts, and how many of the others are before them.
    assembled: Vec<(usize, Chunk)>,
}

impl CutMessages {
    /// Adds one that lies in the chunk.
    #[inline]
    pub(crate) fn in_place(&mut self, place: Range<usize>) {
        self.places.push(place.start as u32..place.end as u32);
    }

    /// Adds one that was put together.
    pub(crate) fn assembled(&mut self, message: Chunk) {
        self.assembled.push((self.places.len(), message));
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len() + self.assembled.len()
    }

    /// Bytes of all.
    pub(crate) fn bytes(&self) -> usize {
        let in_place: u32 = self.places.iter().map(|place| place.end - place.start).sum();
        in_place as usize + self.assembled.iter().map(|(_, message)| message.len()).sum::<usize>()
    }

    /// Builds batches of at most `len_max` messages, and is empty then. `free`: lists of places to use again.
    pub(crate) fn gather(
        &mut self,
        chunk: &Chunk,
        len_max: usize,
        free: &mut Vec<Vec<Range<u32>>>,
        batches: &mut Vec<MessageBatch>,
    ) {
        if self.assembled.is_empty() && (2..=len_max).contains(&self.places.len()) {
            // As it mostly is: the list becomes the batch's.
            let places = std::mem::replace(&mut self.places, free.pop().unwrap_or_default());
            batches.push(MessageBatch::of(chunk, places));
            return;
        }
        let mut from = 0;
        let mut add = |places: &[Range<u32>], batches: &mut Vec<MessageBatch>| {
            for places in places.chunks(len_max.max(1)) {
                batches.push(match places {
                    [one] => MessageBatch::one(chunk.slice(one.start as usize..one.end as usize)),
                    several => {
                        let mut list = free.pop().unwrap_or_default();
                        list.extend_from_slice(several);
                        MessageBatch::of(chunk, list)
                    }
                });
            }
        };
        for (before, message) in self.assembled.drain(..) {
            add(&self.places[from..before], batches);
            from = before;
            batches.push(MessageBatch::one(message));
        }
        add(&self.places[from..], batches);
        self.places.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(batches: Vec<MessageBatch>) -> Vec<Vec<Vec<u8>>> {
        let all = |mut batch: MessageBatch| {
            let (len, chunk) = (batch.len(), batch.chunk.clone());
            let taken: Vec<_> = std::iter::from_fn(|| batch.pop()).map(|range| chunk[range].to_vec()).collect();
            assert_eq!((taken.len(), batch.len()), (len, 0));
            taken
        };
        batches.into_iter().map(all).collect()
    }

    #[test]
    fn batches_keep_the_order_and_their_length() {
        let chunk = Chunk::from_vec(b"abcdefgh".to_vec());
        let found = || {
            let mut found = CutMessages::default();
            (0..3).for_each(|at| found.in_place(at..at + 1));
            found.assembled(Chunk::from_vec(b"long".to_vec()));
            (3..5).for_each(|at| found.in_place(at..at + 1));
            assert_eq!((found.len(), found.bytes()), (6, 9));
            found
        };
        for (len_max, expected) in [
            (1, vec![vec!["a"], vec!["b"], vec!["c"], vec!["long"], vec!["d"], vec!["e"]]),
            (2, vec![vec!["a", "b"], vec!["c"], vec!["long"], vec!["d", "e"]]),
            (9, vec![vec!["a", "b", "c"], vec!["long"], vec!["d", "e"]]),
        ] {
            let (mut batches, mut free) = (Vec::new(), Vec::new());
            let mut found = found();
            found.gather(&chunk, len_max, &mut free, &mut batches);
            assert_eq!(found.len(), 0);
            let expected: Vec<Vec<Vec<u8>>> =
                expected.iter().map(|batch| batch.iter().map(|text| text.as_bytes().to_vec()).collect()).collect();
            assert_eq!(messages(batches), expected, "{len_max}");
        }
    }

    #[test]
    fn one_chunk_of_short_messages_is_one_batch() {
        let chunk = Chunk::from_vec(b"abc".to_vec());
        for len_max in [2, 3, 4] {
            let (mut found, mut batches, mut free) = (CutMessages::default(), Vec::new(), vec![Vec::new()]);
            (0..3).for_each(|at| found.in_place(at..at + 1));
            found.gather(&chunk, len_max, &mut free, &mut batches);
            assert_eq!((found.len(), batches.len(), free.len()), (0, 3usize.div_ceil(len_max), 0));
            assert_eq!(messages(batches).concat(), [b"a", b"b", b"c"]);
        }
    }

    #[test]
    fn places_are_told_and_taken_off_later() {
        let mut batch = MessageBatch::of(&Chunk::from_vec(b"abcde".to_vec()), (0..5).map(|at| at..at + 1).collect());
        let mut places = Vec::new();
        batch.peek(2, &mut places);
        assert_eq!(batch.len(), 5);
        batch.skip(2);
        assert_eq!((batch.len(), batch.pop()), (3, Some(2..3)));
        batch.peek(9, &mut places);
        batch.skip(2);
        batch.peek(9, &mut places);
        assert_eq!(places, [0..1, 1..2, 3..4, 4..5]);
        let mut whole = MessageBatch::one(Chunk::from_vec(b"xyz".to_vec()));
        whole.peek(2, &mut places);
        whole.skip(1);
        whole.peek(2, &mut places);
        assert_eq!((places.len(), &places[4]), (5, &(0..3)));
    }

    #[test]
    fn an_empty_message_is_one() {
        let mut batch = MessageBatch::one(Chunk::from_vec(Vec::new()));
        assert_eq!((batch.len(), batch.pop(), batch.pop()), (1, Some(0..0), None));
    }
}
