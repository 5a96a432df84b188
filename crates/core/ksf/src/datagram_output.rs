//! Replies to datagrams on their way out: the bytes of all of them in one buffer, each with its peer.

use std::collections::VecDeque;

use crate::listener::DatagramPeer;

/// A buffer that grew beyond this, because a socket was full, is given back to the allocator.
const KEPT_BYTES_MAX: usize = 1 << 20;
/// Most replies of a run: what Linux 4.18 took (UDP_MAX_SEGMENTS).
const RUN_MAX: usize = 64;
/// Bytes of the longest reply that has others behind it in a run. The kernel refuses a run whose parts do not fit the path; all
/// paths of IPv6 take packets of 1280 bytes.
const SEGMENT_BYTES_MAX: usize = 1280 - 40 - 8;
/// Bytes of a run: those of a packet of 64 KiB without its headers.
const RUN_BYTES_MAX: usize = 65_535 - 40 - 8;
/// Bytes of replies that are gone which the buffer may hold in front of those that wait.
const GONE_BYTES_MAX: usize = 64 << 10;

/// Replies of one socket that wait to be sent, in order.
#[derive(Debug, Default)]
pub(crate) struct DatagramOutput {
    bytes: Vec<u8>,
    waiting: VecDeque<Waiting>,
}

/// Where in the bytes a reply is.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    peer: DatagramPeer,
    start: usize,
    end: usize,
}

/// Replies that follow one another, to the same peer: all as long as the first but the last, which may be shorter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run<'a> {
    pub(crate) peer: &'a DatagramPeer,
    /// All of them, one behind the other.
    pub(crate) bytes: &'a [u8],
    /// Bytes of the first.
    pub(crate) segment_bytes: usize,
    pub(crate) count: usize,
}

/// How far an output was filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    count: usize,
    bytes: usize,
}

impl DatagramOutput {
    /// Adds a reply, which `write` appends.
    #[inline]
    pub(crate) fn add<R>(&mut self, peer: DatagramPeer, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let start = self.bytes.len();
        let result = write(&mut self.bytes);
        self.waiting.push_back(Waiting { peer, start, end: self.bytes.len() });
        result
    }

    /// How many wait.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// True when none waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Bytes of those that wait.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.waiting.front().map_or(0, |first| self.bytes.len() - first.start)
    }

    /// Those that wait, in order.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&DatagramPeer, &[u8])> {
        self.waiting.iter().map(|reply| (&reply.peer, self.bytes.get(reply.start..reply.end).unwrap_or_default()))
    }

    /// The reply at place `first`, with those behind it that may leave in one packet if they may be joined.
    #[inline]
    pub(crate) fn run(&self, first: usize, may_join: bool) -> Option<Run<'_>> {
        let reply = self.waiting.get(first)?;
        let segment_bytes = reply.end - reply.start;
        let (mut end, mut count) = (reply.end, 1);
        while may_join
            && (1..=SEGMENT_BYTES_MAX).contains(&segment_bytes)
            // The last one was as long.
            && end - reply.start == count * segment_bytes
            && count < RUN_MAX
            && let Some(next) = self.waiting.get(first + count)
            && (1..=segment_bytes).contains(&(next.end - next.start))
            && next.end - reply.start <= RUN_BYTES_MAX
            && next.peer == reply.peer
        {
            (end, count) = (next.end, count + 1);
        }
        let bytes = self.bytes.get(reply.start..end).unwrap_or_default();
        Some(Run { peer: &reply.peer, bytes, segment_bytes, count })
    }

    /// Forgets the first ones: they are sent.
    pub(crate) fn advance(&mut self, count: usize) {
        self.waiting.drain(..count.min(self.waiting.len()));
        let Some(first) = self.waiting.front() else {
            self.bytes.clear();
            if self.bytes.capacity() > KEPT_BYTES_MAX {
                self.bytes = Vec::new();
            }
            return;
        };
        let gone = first.start;
        if gone >= GONE_BYTES_MAX && gone >= self.bytes.len() / 2 {
            self.bytes.drain(..gone);
            for reply in &mut self.waiting {
                reply.start -= gone;
                reply.end -= gone;
            }
        }
    }

    /// Forgets the last one.
    pub(crate) fn drop_last(&mut self) {
        if let Some(last) = self.waiting.pop_back() {
            self.bytes.truncate(last.start);
        }
    }

    /// How far it is filled now.
    #[inline]
    pub(crate) fn mark(&self) -> Mark {
        Mark { count: self.waiting.len(), bytes: self.bytes.len() }
    }

    /// The replies added since.
    pub(crate) fn since(&self, mark: Mark) -> impl Iterator<Item = (&DatagramPeer, &[u8])> {
        self.iter().skip(mark.count)
    }

    /// Forgets what was added since, also the beginning of a reply.
    pub(crate) fn truncate(&mut self, mark: Mark) {
        self.waiting.truncate(mark.count);
        self.bytes.truncate(mark.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(port: u16) -> DatagramPeer {
        DatagramPeer { addr: ([127, 0, 0, 1], port).into(), local: None }
    }

    fn texts(output: &DatagramOutput) -> Vec<(u16, Vec<u8>)> {
        output.iter().map(|(peer, bytes)| (peer.addr.port(), bytes.to_vec())).collect()
    }

    #[test]
    fn replies_keep_their_order_their_peers_and_their_lengths() {
        let mut output = DatagramOutput::default();
        for (port, text) in [(1, &b"one"[..]), (2, b""), (3, b"three")] {
            output.add(peer(port), |to| to.extend_from_slice(text));
        }
        assert_eq!((output.len(), output.bytes()), (3, 8));
        let mark = output.mark();
        output.add(peer(4), |to| to.extend_from_slice(b"four"));
        assert_eq!(output.since(mark).map(|(peer, _)| peer.addr.port()).collect::<Vec<_>>(), [4]);
        output.truncate(mark);
        output.advance(1);
        assert_eq!(texts(&output), [(2, b"".to_vec()), (3, b"three".to_vec())]);
        output.drop_last();
        assert_eq!((texts(&output), output.bytes()), (vec![(2, b"".to_vec())], 0));
        output.advance(9);
        assert!(output.is_empty());
    }

    #[test]
    fn a_run_is_of_one_peer_and_of_one_length_but_for_its_end() {
        let mut output = DatagramOutput::default();
        let lengths = [9, 9, 4, 4, 5, 0, 7, 7, SEGMENT_BYTES_MAX + 1, SEGMENT_BYTES_MAX + 1, 8, 8, 8];
        for (number, length) in lengths.into_iter().enumerate() {
            let port = if number == 11 { 2 } else { 1 };
            output.add(peer(port), |to| to.resize(to.len() + length, number as u8));
        }
        let runs = |output: &DatagramOutput, may_join| {
            let (mut runs, mut at) = (Vec::new(), 0);
            while let Some(run) = output.run(at, may_join) {
                runs.push((run.count, run.bytes.len()));
                at += run.count;
            }
            runs
        };
        let long = SEGMENT_BYTES_MAX + 1;
        let expected = [(3, 22), (1, 4), (1, 5), (1, 0), (2, 14), (1, long), (1, long), (1, 8), (1, 8), (1, 8)];
        assert_eq!(runs(&output, true), expected);
        assert_eq!(runs(&output, false), lengths.map(|length| (1, length)));

        let mut output = DatagramOutput::default();
        (0..70).for_each(|_| output.add(peer(1), |to| to.resize(to.len() + 10, 0)));
        assert_eq!(runs(&output, true), [(RUN_MAX, 640), (6, 60)]);
        let mut output = DatagramOutput::default();
        (0..70).for_each(|_| output.add(peer(1), |to| to.resize(to.len() + SEGMENT_BYTES_MAX, 0)));
        let fits = RUN_BYTES_MAX / SEGMENT_BYTES_MAX;
        let rest = 70 - fits;
        assert_eq!(runs(&output, true), [(fits, fits * SEGMENT_BYTES_MAX), (rest, rest * SEGMENT_BYTES_MAX)]);
    }

    /// Else a socket that never runs empty would make it grow for ever.
    #[test]
    fn the_room_of_replies_that_are_gone_is_used_again() {
        let mut output = DatagramOutput::default();
        let text = |number: usize| vec![number as u8; 10_000];
        for number in 0..1_000 {
            output.add(peer(number as u16), |to| to.extend_from_slice(&text(number)));
            if number >= 3 {
                output.advance(1);
            }
            assert!(output.bytes.len() < 3 * GONE_BYTES_MAX, "{}", output.bytes.len());
        }
        assert_eq!(texts(&output), [997, 998, 999].map(|number| (number as u16, text(number))));
        output.add(peer(7), |to| to.resize(to.len() + 2 * KEPT_BYTES_MAX, 0));
        output.advance(4);
        assert_eq!(output.bytes.capacity(), 0);
    }
}
