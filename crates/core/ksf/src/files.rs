//! Operations on files, on the engine of the shard that wants them.
//!
//! A service takes its [`Files`] when it [starts](crate::Service::start), and begins an operation from any of its
//! calls. What became of it is told by [`Service::file_done`](crate::Service::file_done), as an event of a later
//! turn. Memory and files move into an operation and come back with its end, so neither can be freed or changed while the
//! kernel uses it, and many operations may be under way at a time.
//!
//! ```text
//!   Files::begin(FileOp, token) ──► io_uring: a request on the shard's ring ──┐
//!     refused: Files are full     └► epoll: a thread that may block ──────────┴──► file_done(FileDone { token, result, op })
//! ```
//!
//! **Order.** Operations that are under way at the same time may end in any order, also on one file. What must come after
//! another operation is begun when that one is done. A write that must be durable carries
//! [`ReadWriteFlags::DSYNC`]: its end means that the data and what is needed to find them are on the medium, so no second
//! operation must follow it.
//!
//! **Results.** Every operation ends once, with a typed result. Nothing is tried again in silence: a write that the kernel
//! cut short is [`FileError::Short`], and writing the rest tells why.
//!
//! **Bounds.** [`Limits::file_ops_max`](crate::limits::Limits::file_ops_max) operations with
//! [`Limits::file_bytes_max`](crate::limits::Limits::file_bytes_max) bytes are under way per shard; the next one is
//! refused, and comes back. [`Service::files_have_room`](crate::Service::files_have_room) tells the service when it may
//! try again. While there is no room, no connection of a service that took its [`Files`] is read, and none of its messages is
//! handed over; those that wait, services and connections, go on in the order in which they began to wait.
//!
//! **The end.** A server that drains waits for operations until its `drain_timeout_ms` is over. One that stops cancels
//! those that wait in a queue or for a pipe, waits for the others a while, and then leaves them their memory.

use std::ffi::{CStr, CString};
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::buffers::{Buffer, Buffers};
use crate::pool::Chunk;
use crate::tasks::{Task, TaskPool};

mod queue;

use queue::Shared;
pub(crate) use queue::{Begun, Owner, ShardFiles, Waiter};

/// An open file, shared by all clones; the last of them closes it.
#[derive(Clone)]
pub struct File(Arc<Descriptor>);

struct Descriptor {
    fd: Option<OwnedFd>,
    /// Closes it: that may wait for a file system.
    tasks: Weak<TaskPool>,
}

impl File {
    /// The file as the result of an operation: closed on a thread that may block.
    pub(crate) fn opened(fd: OwnedFd, tasks: Option<&Arc<TaskPool>>) -> Self {
        Self(Arc::new(Descriptor { fd: Some(fd), tasks: tasks.map(Arc::downgrade).unwrap_or_default() }))
    }

    /// The descriptor, if there is no other clone of the file.
    pub(crate) fn into_descriptor(self) -> Result<OwnedFd, Self> {
        match Arc::try_unwrap(self.0) {
            Ok(mut descriptor) => match descriptor.fd.take() {
                Some(fd) => Ok(fd),
                None => Err(Self(Arc::new(descriptor))),
            },
            Err(shared) => Err(Self(shared)),
        }
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl From<OwnedFd> for File {
    /// A file that the service opened itself. It is closed by the thread that drops it last.
    fn from(fd: OwnedFd) -> Self {
        Self::opened(fd, None)
    }
}

impl From<std::fs::File> for File {
    fn from(file: std::fs::File) -> Self {
        OwnedFd::from(file).into()
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // Taken out by `into_descriptor` and by `drop` alone, after which there is no file to close.
        self.0.fd.as_ref().map_or(rustix::fs::CWD, AsFd::as_fd)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if let Some(tasks) = self.tasks.upgrade() {
            tasks.block(Task::new(move || drop(fd)));
        }
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("File").field(&self.raw()).finish()
    }
}

/// Bytes of a file: [what a reply sends](crate::Reply::file), for instance.
#[derive(Clone, Debug)]
pub struct FileRange {
    /// The file.
    pub file: File,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: usize,
}

/// What a write takes its bytes from.
#[derive(Debug)]
pub enum FileData {
    /// The filled bytes of a buffer. Its memory is aligned for O_DIRECT.
    Buffer(Buffer),
    /// Bytes where they landed: in a slot of the pool, or in a buffer that is shared. A chunk of a message is
    /// [kept](crate::Message::keep) first.
    Chunk(Chunk),
    /// Several of them, written one behind the other; at most 1024 (IOV_MAX).
    Chunks(Vec<Chunk>),
}

impl FileData {
    /// Bytes in it.
    pub fn len(&self) -> usize {
        match self {
            Self::Buffer(buffer) => buffer.len(),
            Self::Chunk(chunk) => chunk.len(),
            Self::Chunks(chunks) => chunks.iter().map(|chunk| chunk.len()).sum(),
        }
    }

    /// True without a byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let (one, several): (Option<&[u8]>, &[Chunk]) = match self {
            Self::Buffer(buffer) => (Some(buffer), &[]),
            Self::Chunk(chunk) => (Some(chunk), &[]),
            Self::Chunks(chunks) => (None, chunks),
        };
        one.into_iter().chain(several.iter().map(|chunk| &**chunk))
    }
}

impl From<Buffer> for FileData {
    fn from(buffer: Buffer) -> Self {
        Self::Buffer(buffer)
    }
}

impl From<Chunk> for FileData {
    fn from(chunk: Chunk) -> Self {
        Self::Chunk(chunk)
    }
}

impl From<Vec<Chunk>> for FileData {
    fn from(chunks: Vec<Chunk>) -> Self {
        Self::Chunks(chunks)
    }
}

/// An operation, with everything the kernel uses for it.
#[derive(Debug)]
pub enum FileOp {
    /// openat2(2). Ends with [`FileOutcome::Opened`]. O_CLOEXEC is added. The opening of a pipe may block a thread until
    /// its other end is there, and cannot be cancelled then, unless `flags` has O_NONBLOCK.
    Open {
        /// Where a relative path begins; the working directory if there is none.
        dir: Option<File>,
        /// The path. A name that a peer sent is opened with [`ResolveFlags::BENEATH`] in a `dir`.
        path: CString,
        /// How, with O_DIRECT where offsets, lengths and memory are aligned ([`Buffer`] is).
        flags: OFlags,
        /// Rights of a file that is created.
        mode: Mode,
        /// What the path may not lead to.
        resolve: ResolveFlags,
    },
    /// preadv2(2) into the room of a buffer, which grows by what was read. Ends with [`FileOutcome::Bytes`]: fewer than
    /// asked for at the end of the file, and none behind it. A pipe has no `offset`.
    Read {
        /// The file.
        file: File,
        /// First byte in the file.
        offset: u64,
        /// Most bytes to read; no more than the buffer's room.
        bytes: usize,
        /// Where to.
        into: Buffer,
        /// [`ReadWriteFlags::NOWAIT`]: only what is in memory, else [`FileError::WouldBlock`].
        flags: ReadWriteFlags,
    },
    /// pwritev2(2). Ends with [`FileOutcome::Bytes`] if all bytes were written, else with [`FileError::Short`].
    Write {
        /// The file.
        file: File,
        /// First byte in the file.
        offset: u64,
        /// What to write.
        data: FileData,
        /// [`ReadWriteFlags::DSYNC`]: it ends when the data are durable.
        flags: ReadWriteFlags,
    },
    /// fsync(2), or fdatasync(2) if only the data matter.
    Sync {
        /// The file.
        file: File,
        /// Times and the like need not be durable.
        data_only: bool,
    },
    /// statx(2). Ends with [`FileOutcome::Stat`].
    Stat {
        /// The file, or the directory where the path begins.
        file: Option<File>,
        /// Empty, with [`AtFlags::EMPTY_PATH`], for the file itself.
        path: CString,
        /// How a path is followed.
        flags: AtFlags,
        /// What is wanted.
        mask: StatxFlags,
    },
    /// fallocate(2).
    Allocate {
        /// The file.
        file: File,
        /// What for; empty: room that is there, and zero.
        mode: FallocateFlags,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// close(2), for its result: a network file system may tell only here that it lost a write. Refused as
    /// [`FileError::Shared`] while others hold the file. Dropping a file closes it, too.
    Close {
        /// The file; `None` when it is closed.
        file: Option<File>,
    },
}

impl FileOp {
    /// Opens a path below `dir` that cannot lead out of it.
    pub fn open_beneath(dir: &File, path: impl AsRef<CStr>, flags: OFlags, mode: Mode) -> Self {
        let path = path.as_ref().to_owned();
        Self::Open { dir: Some(dir.clone()), path, flags, mode, resolve: ResolveFlags::BENEATH }
    }

    /// Reads `bytes` bytes at `offset` into the room of `into`.
    pub fn read(file: &File, offset: u64, bytes: usize, into: Buffer) -> Self {
        Self::Read { file: file.clone(), offset, bytes, into, flags: ReadWriteFlags::empty() }
    }

    /// Writes `data` at `offset`; durable only after a [`sync`](Self::data_sync).
    pub fn write(file: &File, offset: u64, data: impl Into<FileData>) -> Self {
        Self::Write { file: file.clone(), offset, data: data.into(), flags: ReadWriteFlags::empty() }
    }

    /// Writes `data` at `offset`, and ends when they are durable.
    pub fn write_durably(file: &File, offset: u64, data: impl Into<FileData>) -> Self {
        Self::Write { file: file.clone(), offset, data: data.into(), flags: ReadWriteFlags::DSYNC }
    }

    /// Makes durable what was written, and what is needed to find it.
    pub fn data_sync(file: &File) -> Self {
        Self::Sync { file: file.clone(), data_only: true }
    }

    /// Attributes of an open file.
    pub fn stat(file: &File) -> Self {
        let (path, mask) = (CString::default(), StatxFlags::BASIC_STATS);
        Self::Stat { file: Some(file.clone()), path, flags: AtFlags::EMPTY_PATH, mask }
    }

    /// Bytes of memory that it moves.
    fn bytes(&self) -> usize {
        match self {
            Self::Read { into, bytes, .. } => (*bytes).min(into.room()),
            Self::Write { data, .. } => data.len(),
            // Named, so that a new one that moves bytes is not forgotten.
            Self::Open { .. } | Self::Sync { .. } | Self::Stat { .. } | Self::Allocate { .. } | Self::Close { .. } => 0,
        }
    }
}

/// What an operation gave.
#[derive(Debug)]
pub enum FileOutcome {
    /// Nothing but success.
    Done,
    /// Bytes that were read or written.
    Bytes(usize),
    /// The file that was opened.
    Opened(File),
    /// Attributes.
    Stat(Box<Statx>),
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// ENOSPC or EDQUOT.
    #[error("there is no space left")]
    NoSpace,
    /// EIO. What was written before and is not known to be durable may be lost as well, and a later sync need not say so.
    #[error("the medium failed")]
    Medium,
    /// Fewer bytes were written than there are.
    #[error("only {written} bytes were written")]
    Short {
        /// Bytes that were written.
        written: usize,
    },
    /// EAGAIN: it would have to wait, and was told not to.
    #[error("it would block")]
    WouldBlock,
    /// EINTR: a signal came before anything happened.
    #[error("it was interrupted")]
    Interrupted,
    /// The server stops. Of a write, a part may have been written.
    #[error("it was cancelled, because the server stops")]
    Cancelled,
    /// A file that others hold cannot be closed.
    #[error("others hold the file")]
    Shared,
    /// Another error of the operating system.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

impl From<Errno> for FileError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOSPC | Errno::DQUOT => Self::NoSpace,
            Errno::IO => Self::Medium,
            Errno::AGAIN => Self::WouldBlock,
            Errno::INTR => Self::Interrupted,
            Errno::CANCELED => Self::Cancelled,
            errno => Self::Os(errno.raw_os_error()),
        }
    }
}

/// An operation that ended.
#[derive(Debug)]
pub struct FileDone {
    /// What the service gave it to be known by.
    pub token: u64,
    /// What came of it.
    pub result: Result<FileOutcome, FileError>,
    /// The operation, with the files and the memory that moved into it.
    pub op: FileOp,
}

impl FileDone {
    /// Bytes that were read or written; 0 of an operation that does neither.
    ///
    /// # Errors
    ///
    /// The operation failed.
    pub fn bytes(&self) -> Result<usize, FileError> {
        match &self.result {
            Ok(FileOutcome::Bytes(bytes)) => Ok(*bytes),
            Ok(_) => Ok(0),
            Err(error) => Err(*error),
        }
    }
}

/// There is no way to send a range of a file here: the message is a datagram, or its service is called outside of a shard, by
/// workers for instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("replies with a range of a file belong to shards, and to messages of streams: there are none here")]
pub struct NoFileReplies;

/// An operation that was not begun, and why.
#[derive(Debug, thiserror::Error)]
#[error("a file operation was refused: {reason}")]
pub struct FileRefused {
    /// Why.
    pub reason: Refusal,
    /// The operation, as it was given.
    pub op: FileOp,
}

/// Why an operation was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// `file_ops_max` are under way. It may be tried again when
    /// [there is room](crate::Service::files_have_room).
    #[error("{limit} operations are under way, which is file_ops_max")]
    Operations {
        /// The limit.
        limit: usize,
    },
    /// `file_bytes_max` would be exceeded. One operation alone may exceed it.
    #[error("operations with file_bytes_max, {limit} bytes, are under way")]
    Bytes {
        /// The limit.
        limit: usize,
    },
    /// The server stops.
    #[error("the server stops")]
    Stopping,
}

/// Begins operations for one service on one shard. [`Turn::files`](crate::Turn::files) gives it. It stays on the thread of the
/// shard, which looks for what was begun after each of the service's calls, and would not wake up for another thread.
///
/// ```compile_fail,E0277
/// fn leaves_its_thread<T: Send>() {}
/// leaves_its_thread::<ksf::files::Files>();
/// ```
#[derive(Clone)]
pub struct Files {
    queue: Arc<Shared>,
    owner: Owner,
    buffers: Buffers,
    on_its_thread: PhantomData<*const ()>,
}

impl Files {
    /// Begins an operation in this turn. `token` comes back with its end.
    ///
    /// # Errors
    ///
    /// [`FileRefused`] with the operation: a limit is reached, or the server stops.
    pub fn begin(&self, op: FileOp, token: u64) -> Result<(), Box<FileRefused>> {
        self.queue.lock().begin(self.owner, op, token)
    }

    /// Operations that are under way on the shard, of all services.
    pub fn under_way(&self) -> usize {
        self.queue.lock().running
    }

    /// An empty, page-aligned buffer of at least `bytes` bytes, to read into or to write from.
    pub fn buffer(&self, bytes: usize) -> Buffer {
        self.buffers.take(bytes)
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").field("owner", &self.owner).finish_non_exhaustive()
    }
}
