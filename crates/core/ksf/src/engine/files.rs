//! Operations on files by system calls that block, for engines without a ring: each runs on a thread of the task pool.
//! Only there: a shard never waits for a file system.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{CWD, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::deferred::{Mail, Mailbox};
use crate::env::Env;
use crate::files::{Begun, File, FileError, FileOp, FileOutcome};
use crate::tasks::{Task, TaskPool};

/// How long an engine that ends waits for operations that cannot be cancelled.
pub(crate) const END_WAIT: Duration = Duration::from_secs(2);

/// Iovecs of one system call (IOV_MAX).
const SLICES_MAX: usize = 1024;

/// Operations that threads carry out for one shard.
#[derive(Debug)]
pub(super) struct BlockingFiles {
    /// Readable for good when operations that have not begun, or wait for a pipe, are to end.
    cancel: Arc<rustix::fd::OwnedFd>,
}

impl BlockingFiles {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { cancel: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?) })
    }

    /// Has a thread carry out an operation, which comes back as mail.
    pub(super) fn start(&self, begun: Box<Begun>, env: &Env) {
        let on_its_way = OnItsWay { begun: Some(begun), mailbox: Arc::clone(&env.mailbox) };
        let (cancel, pool) = (Arc::clone(&self.cancel), env.tasks.clone());
        let Some(tasks) = &env.tasks else { return on_its_way.run(&cancel, None) };
        // The task must not keep the pool, which waits for it.
        let pool = pool.as_ref().map(Arc::downgrade);
        tasks.block(Task::new(move || {
            let pool = pool.and_then(|pool| pool.upgrade());
            on_its_way.run(&cancel, pool.as_ref());
        }));
    }

    /// Cancels what can be, and waits for the rest. What is not there in time keeps its memory and its file, which go
    /// when its thread is done.
    pub(super) fn end(&self, env: &Env, ended: &mut Vec<Begun>) {
        // Fails only if it is readable already.
        let _ = rustix::io::write(&*self.cancel, &1u64.to_ne_bytes());
        let until = Instant::now() + END_WAIT;
        let (mut mail, mut woken) = (Vec::new(), true);
        while ended.len() < env.files.running() {
            env.mailbox.take(woken, &mut mail);
            // The shard is gone, and with it the receiver of any other end.
            ended.extend(mail.drain(..).filter_map(|mail| match mail {
                Mail::File(begun) => Some(*begun),
                _ => None,
            }));
            let left = until.saturating_duration_since(Instant::now());
            if ended.len() >= env.files.running() || left.is_zero() {
                return;
            }
            let left = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
            woken = poll(&mut [PollFd::new(&*env.mailbox, PollFlags::IN)], Some(&left)).is_ok_and(|ready| ready > 0);
        }
    }
}

/// An operation in a task. If the task is dropped, because the pool closes, it comes back as cancelled.
struct OnItsWay {
    begun: Option<Box<Begun>>,
    mailbox: Arc<Mailbox>,
}

impl OnItsWay {
    fn run(mut self, cancel: &Arc<rustix::fd::OwnedFd>, pool: Option<&Arc<TaskPool>>) {
        if let Some(begun) = &mut self.begun {
            carry_out(begun, cancel.as_fd(), pool);
        }
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.mailbox.post(Mail::File(begun));
        }
    }
}

/// Carries out an operation on the calling thread.
fn carry_out(begun: &mut Begun, cancel: BorrowedFd<'_>, pool: Option<&Arc<TaskPool>>) {
    if is_cancelled(cancel) {
        begun.result = Err(FileError::Cancelled);
        return;
    }
    let done = |result: Result<(), Errno>| result.map(|()| FileOutcome::Done).map_err(FileError::from);
    let result = match &mut begun.op {
        FileOp::Read { file, offset, bytes, into, flags } => {
            let slices = &mut [IoSliceMut::new(into.room_for(*bytes))];
            let moved = wait_for(file.as_fd(), PollFlags::IN, *flags, cancel)
                .and_then(|()| at(*offset, |offset| rustix::io::preadv2(&*file, slices, offset, *flags)));
            return begun.moved(moved);
        }
        FileOp::Write { file, offset, data, flags } => {
            let slices: Vec<_> = data.slices().map(IoSlice::new).collect();
            let moved = if slices.len() > SLICES_MAX {
                Err(Errno::INVAL)
            } else {
                wait_for(file.as_fd(), PollFlags::OUT, *flags, cancel)
                    .and_then(|()| at(*offset, |offset| rustix::io::pwritev2(&*file, &slices, offset, *flags)))
            };
            drop(slices);
            return begun.moved(moved);
        }
        FileOp::Open { dir, path, flags, mode, resolve } => {
            let dir = dir.as_ref().map_or(CWD, |dir| dir.as_fd());
            let opened = rustix::fs::openat2(dir, &**path, *flags | OFlags::CLOEXEC, *mode, *resolve);
            opened.map(|fd| FileOutcome::Opened(File::opened(fd, pool))).map_err(FileError::from)
        }
        FileOp::Sync { file, data_only: true } => done(rustix::fs::fdatasync(&*file)),
        FileOp::Sync { file, data_only: false } => done(rustix::fs::fsync(&*file)),
        FileOp::Stat { file, path, flags, mask } => {
            let dir = file.as_ref().map_or(CWD, |file| file.as_fd());
            let stat = rustix::fs::statx(dir, &**path, *flags, *mask);
            stat.map(|stat| FileOutcome::Stat(Box::new(stat))).map_err(FileError::from)
        }
        FileOp::Allocate { file, mode, offset, bytes } => done(rustix::fs::fallocate(&*file, *mode, *offset, *bytes)),
        FileOp::Close { file } => match file.take().map(File::into_descriptor) {
            Some(Ok(fd)) => {
                // SAFETY: the descriptor was owned, and is given up here.
                let result = unsafe { libc::close(fd.into_raw_fd()) };
                done(if result == 0 { Ok(()) } else { Err(last_errno()) })
            }
            Some(Err(shared)) => {
                *file = Some(shared);
                Err(FileError::Shared)
            }
            None => Ok(FileOutcome::Done),
        },
    };
    begun.result = result;
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn is_cancelled(cancel: BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::from_borrowed_fd(cancel, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Waits until a pipe has bytes or room, or the operation is cancelled. Files and disks are always ready.
fn wait_for(file: BorrowedFd<'_>, what: PollFlags, flags: ReadWriteFlags, cancel: BorrowedFd<'_>) -> Result<(), Errno> {
    if flags.contains(ReadWriteFlags::NOWAIT) {
        return Ok(());
    }
    let mut fds = [PollFd::from_borrowed_fd(file, what), PollFd::from_borrowed_fd(cancel, PollFlags::IN)];
    poll(&mut fds, None)?;
    if fds[0].revents().is_empty() { Err(Errno::CANCELED) } else { Ok(()) }
}

/// Calls with an offset, or without one for what has none: -1 stands for that in preadv2(2).
fn at(offset: u64, mut call: impl FnMut(u64) -> Result<usize, Errno>) -> Result<usize, Errno> {
    match call(offset) {
        Err(Errno::SPIPE) => call(u64::MAX),
        result => result,
    }
}
