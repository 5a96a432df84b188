//! The file layer of ksf's file servers: exports, handles, identities and operations, without a protocol and without a socket.
//!
//! ```text
//!   request ─► Fs::decode ─► Lanes::submit ─► a lane (thread that may block)
//!                                                │  as the server: handle ─► descriptor (cache)
//!                                                │  as the caller: the operation, checked by the kernel
//!                                                ▼  as the server: attributes
//!                                             Seen, Changed: result and weak cache data
//!                                                │
//!                                                ▼  Lane::settle: what must be on the medium first
//!                                             a thread for syncs, one for all who wait for an object
//! ```
//!
//! Every operation runs on a lane, because it may wait for a disk; those that look at what the kernel has in memory have a short
//! cut, [`Fs::warm`], which is for shards. A sync would
//! keep its lane for long, so operations leave it to other threads ([`Lane::owing`]). A lane changes the identity of its own thread only; no check
//! of permissions is made here, with two exceptions that RFC 1813 (section 4.4) asks for: the owner of a file may read and write
//! it, and who may execute a file may read it. Both hold for reads and writes by handle.
//!
//! What a handle leads to is known by its inode. A file that was moved out of the export by a local program keeps its handle, as
//! with the kernel's server and `no_subtree_check`.
//!
//! Needs Linux 5.8 (`openat2`, `faccessat2`, `utimensat` of a descriptor) and `/proc`.

#![deny(unsafe_code)]

mod account;
mod attr;
mod attr_cache;
mod clients;
mod clock;
mod closing;
mod credential;
mod descriptors;
mod error;
mod export;
mod exports;
mod files;
mod groups;
mod handle;
mod handle_cache;
mod inside;
mod lane;
mod lanes;
mod layer;
mod lru;
mod name_cache;
mod ops;
mod owed;
mod pool;
mod rights;
mod shares;
mod syncs;
#[allow(unsafe_code)]
mod sys;
mod table;
mod uncommitted;
mod warm;

/// Fixtures of all tests of this crate.
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
/// Under the name by which the fixtures use it.
#[cfg(test)]
extern crate self as ksf_fs;

pub use account::Account;
pub use attr::{Attr, Before, Changed, FileType, Found, Linked, Renamed, Seen, SetAttr, SetTime, Time, Wcc};
pub use clients::{Clients, Network};
pub use clock::FsClock;
pub use credential::{Credential, Squash};
pub use error::{ErrorKind, FsError};
pub use export::{Export, ExportError, ExportOptions, HandleSource};
pub use exports::{ExportSettings, Exported, Exports, Sender};
pub use files::{FileSettings, Files, OpenError};
pub use handle::{HANDLE_BYTES_MAX, Handle};
pub use lane::{Identities, Lane, LaneError};
pub use lanes::{LaneCounters, LaneOptions, Lanes};
pub use layer::{Fs, FsCounters, FsOptions};
pub use ops::{
    Access, CreateHow, Cursor, Detail, Entry, FILE_SIZE_MAX, FsStat, LOCKS_MAX, LOCKS_OF_FILE_MAX, LOCKS_OF_OPEN_MAX,
    Listed, LockKind, LockRange, Node, OpenFile, OpenHow, PathConf, ReadDone, Resize, Stable, Written, XATTR_BYTES_MAX,
    XattrHow, XattrOf,
};
pub use owed::Owed;
pub use pool::Length;
pub use warm::{WARM_READ_BYTES_MAX, Warm, WarmShare, WarmTurn};
