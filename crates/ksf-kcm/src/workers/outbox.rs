//! Replies of one connection on their way into the kernel.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Instant;

use ksf::output::{SendBatch, Spares};

use crate::error::KcmError;
use crate::socket::KcmSocket;

/// Most bytes sent as one message of AF_KCM, which does not look into what it sends. It sends nothing of a message
/// before it has all of it, so a reply longer than the socket's buffer would never leave in one. Half of the least
/// buffer, and few enough pages for one socket buffer: kernels up to early 2026 fail where a message needs a second one
/// and finds no memory (CVE-2026-43244).
const PIECE_BYTES_MAX: usize = 32 << 10;
const SLICES_MAX: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    batches: VecDeque<SendBatch>,
    bytes: usize,
    /// What is missing of a piece that was begun.
    piece_left: usize,
    /// Since when the kernel has taken nothing.
    blocked_since: Option<Instant>,
}

impl Outbox {
    pub(super) fn push(&mut self, batch: SendBatch) {
        self.bytes += batch.len();
        self.batches.push_back(batch);
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since
    }

    /// Sends until nothing is left or the kernel has no room; returns how many bytes it took.
    pub(super) fn flush(&mut self, socket: &KcmSocket, now: Instant) -> Result<usize, KcmError> {
        self.flush_by(now, |slices, end| socket.send(slices, end))
    }

    fn flush_by(
        &mut self,
        now: Instant,
        mut send: impl FnMut(&[IoSlice<'_>], bool) -> Result<usize, KcmError>,
    ) -> Result<usize, KcmError> {
        let mut spares = Spares::default();
        let mut sent_bytes = 0;
        while let Some(batch) = self.batches.front_mut() {
            if batch.is_empty() {
                self.batches.pop_front();
                continue;
            }
            let piece = if self.piece_left > 0 { self.piece_left } else { batch.len().min(PIECE_BYTES_MAX) };
            let mut parts = [&[][..]; SLICES_MAX];
            let filled = batch.slices(&mut parts);
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let mut given = 0;
            for (slice, part) in slices.iter_mut().zip(&parts[..filled]) {
                let take = part.len().min(piece - given);
                *slice = IoSlice::new(&part[..take]);
                given += take;
            }
            let sent = send(&slices[..filled], given == piece)?;
            batch.advance(sent, &mut spares);
            self.bytes -= sent;
            sent_bytes += sent;
            self.piece_left = piece - sent;
            if sent < given {
                if sent_bytes > 0 || self.blocked_since.is_none() {
                    self.blocked_since = Some(now);
                }
                return Ok(sent_bytes);
            }
        }
        self.blocked_since = None;
        Ok(sent_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ksf::output::Output;
    use ksf::pool::Chunk;

    fn batch(parts: &[Vec<u8>]) -> SendBatch {
        let mut output = Output::default();
        for part in parts {
            output.push_chunk(Chunk::from_vec(part.clone()), &mut Spares::default());
        }
        output.take()
    }

    /// A kernel that takes at most so many bytes per call, and every third time none.
    #[test]
    fn pieces_end_where_they_should_whatever_the_kernel_takes() {
        let long: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
        let many: Vec<Vec<u8>> = (0..40).map(|at| vec![at; 100]).collect();
        let expected = [long.clone(), many.concat(), vec![9]].concat();
        for room in [1000, 32 << 10, usize::MAX] {
            let mut outbox = Outbox::default();
            for parts in [&[long.clone()][..], &many, &[vec![9]]] {
                outbox.push(batch(parts));
            }
            let (mut stream, mut ends, mut calls) = (Vec::new(), Vec::new(), 0);
            while outbox.bytes() > 0 {
                let before = stream.len();
                let sent = outbox.flush_by(Instant::now(), |slices, end| {
                    calls += 1;
                    if calls % 3 == 0 {
                        return Ok(0);
                    }
                    let bytes = slices.iter().flat_map(|slice| slice.iter().copied()).take(room).collect::<Vec<u8>>();
                    let given: usize = slices.iter().map(|slice| slice.len()).sum();
                    stream.extend_from_slice(&bytes);
                    if end && bytes.len() == given {
                        ends.push(stream.len());
                    }
                    Ok(bytes.len())
                });
                assert_eq!(sent.unwrap(), stream.len() - before);
            }
            assert!(stream == expected, "room {room}");
            assert_eq!(ends, [32_768, 65_536, 98_304, 100_000, 104_000, 104_001], "room {room}");
            assert_eq!(outbox.blocked_since().is_some(), calls % 3 == 0);
        }
    }
}
