//! The ring through which a verdict program wakes a shard: a BPF ring buffer of socket cookies.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, fence};

use crate::sys::Mapping;

// include/uapi/linux/bpf.h
const BUSY: u32 = 1 << 31;
const DISCARDED: u32 = 1 << 30;
const HEADER_BYTES: u64 = 8;

/// One shard's ring, read by one thread at a time.
///
/// Layout (kernel/bpf/ringbuf.c): a page with the consumer's position, which is ours to write; a page with the
/// producer's; then the data, mapped twice in a row so that no record is cut.
#[derive(Debug)]
pub(crate) struct WakeRing {
    fd: OwnedFd,
    consumer: Mapping,
    producer: Mapping,
    data_bytes: usize,
    /// Keeps a second reader out.
    reader: Mutex<()>,
}

impl WakeRing {
    pub(crate) fn new(fd: OwnedFd, data_bytes: usize) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let consumer = Mapping::new(fd.as_fd(), 0, page, true)?;
        let producer = Mapping::new(fd.as_fd(), page as u64, page + 2 * data_bytes, false)?;
        Ok(Self { fd, consumer, producer, data_bytes, reader: Mutex::new(()) })
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Calls `wake` with every cookie in the ring.
    pub(crate) fn take(&self, wake: &mut dyn FnMut(u64)) {
        let _reader = self.reader.lock().expect("no panic while it is held");
        let page = rustix::param::page_size();
        // SAFETY: the first eight bytes of each page are the positions, which the kernel accesses atomically; the
        // mappings live as long as `self`.
        let (consumer, producer) =
            unsafe { (self.consumer.at::<AtomicU64>(0).as_ref(), self.producer.at::<AtomicU64>(0).as_ref()) };
        let mut position = consumer.load(Relaxed);
        loop {
            // The program writes a record, then looks whether the reader stands before it, and only then wakes. The
            // reader moves, then looks for records. Without a full barrier on this side, too, both can miss the other,
            // and a poll that reports edges (io_uring) is silent from then on.
            fence(SeqCst);
            if position >= producer.load(Acquire) {
                break;
            }
            let at = page + (position as usize & (self.data_bytes - 1));
            // SAFETY: positions are multiples of eight and the record at one starts with its length; the data are
            // mapped twice, so the record lies in the mapping as a whole.
            let length = unsafe { self.producer.at::<AtomicU32>(at).as_ref() }.load(Acquire);
            if length & BUSY != 0 {
                // Still being written; its commit wakes, because we stand before it.
                break;
            }
            if length & DISCARDED == 0 && length == size_of::<u64>() as u32 {
                // SAFETY: as above; the record is complete (not BUSY) and is not overwritten before `consumer` moves.
                wake(unsafe { self.producer.at::<u64>(at + HEADER_BYTES as usize).read() });
            }
            let length = u64::from(length & !(BUSY | DISCARDED));
            position += (length + HEADER_BYTES).next_multiple_of(8);
            consumer.store(position, Release);
        }
    }
}
