//! Operations on files as requests on the shard's ring. What the kernel cannot do at once it does on its own worker
//! threads, or completes from the disk's interrupt.
//!
//! Memory is named by its address, and files by their descriptors. What registering either with the ring would leave of the CPU
//! time of an operation was measured on a ring alone (medians of five runs, Linux 6.18 on a busy virtual machine, ext4 on a virtio
//! disk; writes with RWF_DSYNC):
//!
//! | O_DIRECT, operations under way | file: write, read | memory: write, read |
//! |---|---|---|
//! | 4 KiB, one (15 us) | 1.02, 0.98 | 0.99, 0.97 |
//! | 4 KiB, 32 | 1.06, 0.99 | 0.95, 0.85 |
//! | 64 KiB, one | 0.99, 1.00 | 0.93, 0.92 |
//! | 64 KiB, 32 | 1.02, 0.99 | 0.66, 0.57 |
//! | 1 MiB, one (50 us) | 0.99, 0.97 | 0.58, 0.50 |
//! | 1 MiB, 4 | 0.99, 0.98 | 0.47, 0.43 |
//!
//! Operations on the page cache gain nothing (0.91 to 1.06). Registered memory gains where a file is read with O_DIRECT, 64 KiB
//! and more at a time: of what is here, that is values of a store that is larger than its memory, which are mostly short. Its price
//! is pages that stay taken from the machine, RLIMIT_MEMLOCK, and a table that tells memory from other memory that had its
//! address before: the kernel pins pages, not addresses.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::{mem, ptr};

use io_uring::types::{Fd, FsyncFlags, OpenHow};
use io_uring::{cqueue, opcode, squeue};
use rustix::fs::{CWD, OFlags, Statx};
use rustix::io::Errno;

use super::Uring;
use super::ring::Op;
use crate::engine::Event;
use crate::env::Env;
use crate::files::{Begun, File, FileError, FileOp, FileOutcome};
use crate::tasks::TaskPool;

/// Threads that the kernel may start for a ring's operations that block, as many as the task pool has by default.
pub(super) const WORKERS_MAX: u32 = 64;

/// Operations under way, by the index in their requests.
#[derive(Default)]
pub(super) struct FileOps {
    places: Vec<Option<InKernel>>,
    free: Vec<u32>,
    tasks: Option<Arc<TaskPool>>,
    /// Those that ended while the engine was shut down.
    pub(super) ended: Vec<Begun>,
}

/// An operation, and what else its request points to.
struct InKernel {
    begun: Box<Begun>,
    scratch: Scratch,
}

/// Behind addresses that hold while this moves.
enum Scratch {
    Nothing,
    #[expect(dead_code, reason = "held for the kernel")]
    Slices(Vec<libc::iovec>),
    #[expect(dead_code, reason = "held for the kernel")]
    How(Box<OpenHow>),
    Stat(Box<mem::MaybeUninit<Statx>>),
    Closing(OwnedFd),
}

impl FileOps {
    /// Keeps what the kernel may still use for ever.
    pub(super) fn leak(&mut self) {
        mem::forget(mem::take(&mut self.places));
    }
}

impl Uring {
    pub(super) fn begin_file(&mut self, mut begun: Box<Begun>, env: &Env) {
        if self.files.tasks.is_none() {
            self.files.tasks.clone_from(&env.tasks);
        }
        let Some((entry, scratch)) = request(&mut begun) else {
            return self.ready.push(Event::File(begun));
        };
        let place = Some(InKernel { begun, scratch });
        let index = match self.files.free.pop() {
            Some(index) => {
                self.files.places[index as usize] = place;
                index
            }
            None => {
                self.files.places.push(place);
                self.files.places.len() as u32 - 1
            }
        };
        self.push(entry.user_data(Op::File(index).user_data()));
    }

    /// The operation of a completion, with its result.
    pub(super) fn file_ended(&mut self, index: u32, entry: &cqueue::Entry) -> Option<Box<Begun>> {
        let InKernel { mut begun, scratch } = self.files.places.get_mut(index as usize)?.take()?;
        self.files.free.push(index);
        if let Scratch::Closing(fd) = scratch {
            // Whatever the result, the descriptor is taken for closed, and its number may be another's. A request that was
            // cancelled, which happens while the engine shuts down alone, may leave it open: its ECANCELED cannot be told
            // from that of a file system, which comes when the descriptor is gone.
            let _ = fd.into_raw_fd();
            let closed = u32::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result()));
            begun.result = closed.map(|_| FileOutcome::Done).map_err(FileError::from);
            return Some(begun);
        }
        let result = u32::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result()));
        match (&begun.op, result) {
            (FileOp::Read { .. } | FileOp::Write { .. }, result) => begun.moved(result.map(|bytes| bytes as usize)),
            (_, Err(errno)) => begun.result = Err(errno.into()),
            (FileOp::Open { .. }, Ok(fd)) => {
                // SAFETY: the kernel made this descriptor for the request and told no other code of it.
                let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
                begun.result = Ok(FileOutcome::Opened(File::opened(fd, self.files.tasks.as_ref())));
            }
            (FileOp::Stat { .. }, Ok(_)) => {
                if let Scratch::Stat(stat) = scratch {
                    // SAFETY: it was zeroed, which is valid for integers, and the request that filled it has succeeded.
                    begun.result = Ok(FileOutcome::Stat(unsafe { stat.assume_init() }));
                }
            }
            (FileOp::Sync { .. } | FileOp::Allocate { .. } | FileOp::Close { .. }, Ok(_)) => {
                begun.result = Ok(FileOutcome::Done);
            }
        }
        Some(begun)
    }
}

/// The request for an operation; `None`: it has its result already.
fn request(begun: &mut Begun) -> Option<(squeue::Entry, Scratch)> {
    let nothing = |entry| Some((entry, Scratch::Nothing));
    match &mut begun.op {
        FileOp::Read { file, offset, bytes, into, flags } => {
            let room = into.room_for((*bytes).min(u32::MAX as usize));
            let (fd, to, bytes) = (Fd(file.raw()), room.as_mut_ptr(), room.len() as u32);
            let flags = flags.bits() as i32;
            nothing(opcode::Read::new(fd, to, bytes).offset(*offset).rw_flags(flags).build())
        }
        FileOp::Write { file, offset, data, flags } => {
            let slice = |slice: &[u8]| libc::iovec { iov_base: slice.as_ptr().cast_mut().cast(), iov_len: slice.len() };
            let slices: Vec<_> = data.slices().map(slice).collect();
            let (fd, flags) = (Fd(file.raw()), flags.bits() as i32);
            match slices[..] {
                [libc::iovec { iov_base, iov_len }] if iov_len <= u32::MAX as usize => {
                    let write = opcode::Write::new(fd, iov_base.cast_const().cast(), iov_len as u32);
                    nothing(write.offset(*offset).rw_flags(flags).build())
                }
                _ => {
                    let write = opcode::Writev::new(fd, slices.as_ptr(), slices.len() as u32);
                    Some((write.offset(*offset).rw_flags(flags).build(), Scratch::Slices(slices)))
                }
            }
        }
        FileOp::Open { dir, path, flags, mode, resolve } => {
            let flags = (*flags | OFlags::CLOEXEC).bits();
            let mode = u64::from(mode.bits());
            let how = OpenHow::new().flags(u64::from(flags)).mode(mode).resolve(resolve.bits());
            let how = Box::new(how);
            let dir = Fd(dir.as_ref().map_or(CWD.as_raw_fd(), File::raw));
            Some((opcode::OpenAt2::new(dir, path.as_ptr(), &raw const *how).build(), Scratch::How(how)))
        }
        FileOp::Sync { file, data_only } => {
            let flags = if *data_only { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
            nothing(opcode::Fsync::new(Fd(file.raw())).flags(flags).build())
        }
        FileOp::Stat { file, path, flags, mask } => {
            let mut stat = Box::new(mem::MaybeUninit::zeroed());
            let dir = Fd(file.as_ref().map_or(CWD.as_raw_fd(), File::raw));
            let entry = opcode::Statx::new(dir, path.as_ptr(), ptr::from_mut(&mut *stat).cast());
            let entry = entry.flags(flags.bits() as i32).mask(mask.bits()).build();
            Some((entry, Scratch::Stat(stat)))
        }
        FileOp::Allocate { file, mode, offset, bytes } => {
            let allocate = opcode::Fallocate::new(Fd(file.raw()), *bytes).offset(*offset);
            nothing(allocate.mode(mode.bits() as i32).build())
        }
        FileOp::Close { file } => match file.take().map(File::into_descriptor) {
            Some(Ok(fd)) => Some((opcode::Close::new(Fd(fd.as_raw_fd())).build(), Scratch::Closing(fd))),
            Some(Err(shared)) => {
                *file = Some(shared);
                begun.result = Err(FileError::Shared);
                None
            }
            None => {
                begun.result = Ok(FileOutcome::Done);
                None
            }
        },
    }
}
