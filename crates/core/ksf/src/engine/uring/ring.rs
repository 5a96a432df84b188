//! The ring itself: what it is built with, requests on their way to the kernel, and what their completions are about.

use std::io;

use io_uring::{IoUring, opcode, squeue};

use super::Uring;
use super::buffer_ring::{BUFFERS, BufferRing};
use crate::error::Error;
use crate::pool::{Memory, Pool};

/// Requests per submission; more than that are submitted in several calls.
const SUBMISSIONS: u32 = 256;
/// Completions that fit before the kernel has to set them aside.
pub(super) const COMPLETIONS: u32 = 4096;

/// Tries to set up a ring with everything the engine needs.
pub(crate) fn probe() -> Result<(), Error> {
    let ring = build_ring(false)?;
    let mut pool = Pool::new(Memory::Anonymous, 4096, u32::from(BUFFERS) * 2)?;
    BufferRing::register(&ring, &mut pool).map(|_| ())
}

pub(super) fn failed(step: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Engine { engine: "uring", step, source }
}

/// Time is up; a signal; or completions must be reaped, or memory found, first: the next wait goes on.
pub(super) fn tolerate(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// The best ring this kernel gives: deferred completions need 6.1, no submission array 6.6. `flagged`: the ring shows in
/// shared memory that completions are deferred (5.19), which costs an atomic operation for each batch of them.
pub(super) fn build_ring(flagged: bool) -> Result<IoUring, Error> {
    let mut result = Err(io::Error::from_raw_os_error(libc::EINVAL));
    for tier in 0..3 {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETIONS).setup_clamp().setup_submit_all();
        if tier < 2 {
            builder.setup_single_issuer().setup_defer_taskrun();
        } else {
            builder.setup_coop_taskrun();
        }
        if tier == 0 {
            builder.setup_no_sqarray();
        }
        if flagged {
            builder.setup_taskrun_flag();
        }
        result = builder.build(SUBMISSIONS);
        if !matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
            break;
        }
    }
    result.map_err(failed("io_uring_setup"))
}

/// What a completion is about: kind in the top byte of `user_data`, index below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Accept(u32),
    Cancel,
    Connect(u32),
    Datagram(u32),
    File(u32),
    Hangup(u32),
    Recv(u32),
    Room(u32),
    Send(u32),
    Unread,
    Watch(u32),
}

impl Op {
    pub(super) fn user_data(self) -> u64 {
        let (kind, index) = match self {
            Self::Accept(index) => (1u64, index),
            Self::Cancel => (2, 0),
            Self::Datagram(index) => (3, index),
            Self::Hangup(index) => (4, index),
            Self::Recv(index) => (5, index),
            Self::Send(index) => (6, index),
            Self::Room(index) => (7, index),
            Self::Watch(index) => (8, index),
            Self::Connect(index) => (9, index),
            Self::File(index) => (10, index),
            Self::Unread => (11, 0),
        };
        kind << 56 | u64::from(index)
    }

    pub(super) fn from_user_data(data: u64) -> Option<Self> {
        let index = data as u32;
        Some(match data >> 56 {
            1 => Self::Accept(index),
            2 => Self::Cancel,
            3 => Self::Datagram(index),
            4 => Self::Hangup(index),
            5 => Self::Recv(index),
            6 => Self::Send(index),
            7 => Self::Room(index),
            8 => Self::Watch(index),
            9 => Self::Connect(index),
            10 => Self::File(index),
            11 => Self::Unread,
            _ => return None,
        })
    }
}

impl Uring {
    pub(super) fn cancel(&mut self, op: Op) {
        let entry = opcode::AsyncCancel::new(op.user_data()).build();
        self.push(entry.user_data(Op::Cancel.user_data()));
    }

    pub(super) fn push(&mut self, entry: squeue::Entry) {
        self.under_way += 1;
        // Never overtake a request that waits already.
        if !self.backlog.is_empty() || !self.try_push(&entry) {
            self.backlog.push_back(entry);
        }
    }

    pub(super) fn flush_backlog(&mut self) {
        while let Some(entry) = self.backlog.front() {
            let entry = entry.clone();
            if !self.try_push(&entry) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    pub(super) fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: everything the request points to lives until its completion: batches, lent buffers, headers and addresses
        // are owned by `conns` and `files` until then (boxed, or heap buffers that are not changed meanwhile), and
        // on drop the ring goes first. Descriptors stay open until `Released` (the shard's promise).
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }
}
