//! Operations on files as requests on the shard's ring. What the kernel cannot do at once it does on its own worker
//! threads, or completes from the disk's interrupt.
//!
//! Memory that a file with O_DIRECT is read into is registered with the ring if it may be used again: that of the size classes
//! ([`crate::buffers`]). [`super::registered`] keeps the table. Writes name their memory by its address, and files are not
//! registered.
//!
//! What registering leaves of the CPU time of an operation on a ring alone, by `cargo bench -p ksf --bench registered`
//! (medians of five runs, Linux 6.18 on a busy virtual machine, ext4 on a virtio disk; writes with RWF_DSYNC):
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
//! A read from the page cache takes 0.91 with a registered file if it is of 4 KiB (0.06 us less), 0.99 if it is of 1 MiB; with
//! registered memory 0.99 and 1.03. Writes to the page cache end on threads of the kernel, which hides either; to tmpfs,
//! registered memory made those of 1 MiB take 1.06. So memory pays for O_DIRECT alone.
//!
//! What it left there through the engine, from `Files::begin` to `file_done`, when writes used it, too (four runs, each medians
//! of 11 rounds, on the same kernel and file system, busy; a build ran beside the first one):
//!
//! | O_DIRECT, operations under way | read | write, RWF_DSYNC |
//! |---|---|---|
//! | 64 KiB, one | 0.89, 0.89, 0.91, 0.90 | 0.86, 0.85, 1.00, 1.04 |
//! | 64 KiB, 32 | 0.70, 0.75, 0.77, 0.74 | 1.21, 0.95, 1.05, 1.08 |
//! | 1 MiB, one | 1.33, 0.66, 0.70, 0.65 | 0.86, 0.97, 0.98, 1.00 |
//! | 1 MiB, 4 | 0.95, 0.70, 0.76, 0.47 | 1.50, 1.02, 1.03, 1.00 |
//!
//! So reads gain, and what writes gain cannot be told from chance: they are left as they were. `cargo bench -p ksf --bench
//! registered_engine` measures the reads; five runs on the busy machine gave 0.84 to 0.95, 0.66 to 0.75, 0.57 to 0.75 and
//! 0.55 to 0.83, in the order of the table. Their price: all that was ever touched of a buffer stays taken from the machine, up to
//! `file_pinned_bytes_max`, and counts towards RLIMIT_MEMLOCK (8 MiB by default, for all shards of a user without
//! CAP_IPC_LOCK). READ_FIXED takes the flags of preadv2(2) as READ does (`io_prep_rw` in io_uring/rw.c reads `rw_flags` for
//! both). Huge pages are no way around it: a write of 1 MiB takes 0.4 to 1.3, a read 1.3 to 2.9.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::{mem, ptr};

use io_uring::types::{Fd, FsyncFlags, OpenHow};
use io_uring::{cqueue, opcode, squeue};
use rustix::fs::{CWD, OFlags, Statx};
use rustix::io::Errno;

use super::Uring;
use super::registered::{Held, Registered};
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
    pub(super) registered: Registered,
}

/// An operation, and what else its request points to.
struct InKernel {
    begun: Box<Begun>,
    scratch: Scratch,
    /// The place of its memory in the ring's table.
    registered: Option<Held>,
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
        let registered = self.hold_memory(&mut begun.op, env);
        let Some((entry, scratch)) = request(&mut begun, registered.as_ref()) else {
            return self.ready.push(Event::File(begun));
        };
        let place = Some(InKernel { begun, scratch, registered });
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

    /// Holds the memory of an operation in the ring's table, where that pays.
    fn hold_memory(&mut self, op: &mut FileOp, env: &Env) -> Option<Held> {
        let FileOp::Read { file, into, bytes, .. } = op else { return None };
        if !file.is_direct() {
            return None;
        }
        let part = into.room_for(*bytes).as_ptr_range();
        self.files.registered.hold(&self.ring, &into.pages()?, part.start.addr()..part.end.addr(), env)
    }

    /// The operation of a completion, with its result.
    pub(super) fn file_ended(&mut self, index: u32, entry: &cqueue::Entry) -> Option<Box<Begun>> {
        let InKernel { mut begun, scratch, registered } = self.files.places.get_mut(index as usize)?.take()?;
        self.files.free.push(index);
        if let Some(held) = registered {
            self.files.registered.release(held);
        }
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
            (FileOp::Open { flags, .. }, Ok(fd)) => {
                // SAFETY: the kernel made this descriptor for the request and told no other code of it.
                let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
                begun.result = Ok(FileOutcome::Opened(File::opened(fd, *flags, self.files.tasks.as_ref())));
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

/// The request for an operation, with the place of its memory in the ring's table; `None`: it has its result already.
fn request(begun: &mut Begun, registered: Option<&Held>) -> Option<(squeue::Entry, Scratch)> {
    let nothing = |entry| Some((entry, Scratch::Nothing));
    match &mut begun.op {
        FileOp::Read { file, offset, bytes, into, flags } => {
            let room = into.room_for((*bytes).min(u32::MAX as usize));
            let (fd, to, bytes) = (Fd(file.raw()), room.as_mut_ptr(), room.len() as u32);
            let flags = flags.bits() as i32;
            nothing(match registered {
                Some(held) => {
                    opcode::ReadFixed::new(fd, to, bytes, held.index()).offset(*offset).rw_flags(flags).build()
                }
                None => opcode::Read::new(fd, to, bytes).offset(*offset).rw_flags(flags).build(),
            })
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
