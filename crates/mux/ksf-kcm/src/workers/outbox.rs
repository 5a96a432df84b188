//! Replies of one connection on their way into TCP.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Instant;

use ksf::output::{SendBatch, Spares};
use rustix::io::Errno;

const SLICES_MAX: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    batches: VecDeque<SendBatch>,
    bytes: usize,
    /// Since when TCP has taken nothing.
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

    /// Sends until nothing is left or TCP has no room (`EAGAIN`); returns how many bytes it took.
    pub(super) fn flush(
        &mut self,
        now: Instant,
        mut send: impl FnMut(&[IoSlice<'_>]) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let mut spares = Spares::default();
        let mut sent_bytes = 0;
        while let Some(batch) = self.batches.front_mut() {
            if batch.is_empty() {
                self.batches.pop_front();
                continue;
            }
            let mut parts = [&[][..]; SLICES_MAX];
            let filled = batch.slices(&mut parts);
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            for (slice, part) in slices.iter_mut().zip(&parts[..filled]) {
                *slice = IoSlice::new(part);
            }
            match send(&slices[..filled]) {
                Ok(sent) => {
                    batch.advance(sent, &mut spares);
                    self.bytes -= sent;
                    sent_bytes += sent;
                }
                Err(Errno::AGAIN) => {
                    if sent_bytes > 0 || self.blocked_since.is_none() {
                        self.blocked_since = Some(now);
                    }
                    return Ok(sent_bytes);
                }
                Err(error) => return Err(error),
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
    fn the_stream_is_whole_whatever_the_kernel_takes() {
        let long: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
        let many: Vec<Vec<u8>> = (0..40).map(|at| vec![at; 100]).collect();
        let expected = [long.clone(), many.concat(), vec![9]].concat();
        for room in [1000, 32 << 10, usize::MAX] {
            let mut outbox = Outbox::default();
            for parts in [&[long.clone()][..], &many, &[vec![9]]] {
                outbox.push(batch(parts));
            }
            let (mut stream, mut calls) = (Vec::new(), 0);
            while outbox.bytes() > 0 {
                let before = stream.len();
                let sent = outbox.flush(Instant::now(), |slices| {
                    calls += 1;
                    if calls % 3 == 0 {
                        return Err(Errno::AGAIN);
                    }
                    let bytes = slices.iter().flat_map(|slice| slice.iter().copied()).take(room).collect::<Vec<u8>>();
                    stream.extend_from_slice(&bytes);
                    Ok(bytes.len())
                });
                assert_eq!(sent.unwrap(), stream.len() - before);
                assert_eq!(outbox.blocked_since().is_some(), calls % 3 == 0);
            }
            assert!(stream == expected, "room {room}");
        }
    }
}
