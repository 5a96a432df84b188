//! The server as its owner sees it: opened, made a service, watched, closed.

use std::sync::Arc;

use ksf::limits::Limits;
use ksf_fs::{Export, Exports, FileSettings, Files, Fs, OpenError};

use crate::counters::{Counters, MessageCounts};
use crate::service::NinepService;

/// Least message that a client may ask for, in bytes.
pub const MSIZE_MIN: u32 = 4096;
/// Greatest message where nothing is said, in bytes.
pub const MSIZE_MAX: u32 = 1 << 20;
/// Greatest message that a listener with these limits agrees on, up to [`MSIZE_MAX`]. Clients need at least [`MSIZE_MIN`].
pub fn msize_max(limits: &Limits) -> u32 {
    let bytes_max = limits.message_bytes_max.min(limits.connection_bytes_max);
    u32::try_from(bytes_max).map_or(MSIZE_MAX, |bytes_max| bytes_max.min(MSIZE_MAX))
}

/// Fids of one connection where nothing is said.
pub const FIDS_MAX: usize = 4096;

/// What a server is opened with.
pub struct Settings {
    /// What it exports, and how requests are carried out. Groups of users are always looked up: 9P has none on the wire. The keys
    /// of handles are for the file layer alone, because 9P puts no handle on the wire.
    pub files: FileSettings,
    /// Greatest message, at least [`MSIZE_MIN`]. Where the limits of a listener allow less, less is agreed on ([`msize_max`]).
    pub msize_max: u32,
    /// Fids of one connection, at most.
    pub fids_max: usize,
}

/// What requests need while they are carried out. It has no lanes: a lane that gave up the last of them would wait for itself.
pub(crate) struct Core {
    pub(crate) fs: Arc<Fs>,
    pub(crate) exports: Exports,
    pub(crate) counters: Counters,
    pub(crate) msize_max: u32,
    pub(crate) fids_max: usize,
}

/// A 9P2000.L server without its sockets.
pub struct Ninep {
    core: Arc<Core>,
    files: Files,
}

impl Ninep {
    /// Opens the exports and starts the threads.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let Settings { mut files, msize_max, fids_max } = settings;
        files.exports.iter_mut().for_each(|export| export.options.manage_gids = true);
        let (exports, files) = Files::open(files)?;
        let fs = Arc::clone(&files.fs);
        let core = Core { fs, exports, counters: Counters::default(), msize_max: msize_max.max(MSIZE_MIN), fids_max };
        Ok(Self { core: Arc::new(core), files })
    }

    /// The service that answers its clients, called `name` in messages and counters.
    pub fn service(&self, name: impl Into<String>) -> NinepService {
        NinepService { name: name.into(), core: Arc::clone(&self.core), lanes: Arc::clone(&self.files.lanes) }
    }

    /// What it exports, in the order in which it was given.
    pub fn exports(&self) -> impl Iterator<Item = &Export> {
        self.core.exports.all.iter().map(|exported| &*exported.export)
    }

    /// The file layer: its counters, and its end.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// What was counted of each message, in the order of their types.
    pub fn messages(&self) -> Vec<MessageCounts> {
        self.core.counters.read()
    }

    /// Connections that were closed because their client used a tag that was in use.
    pub fn tags_reused(&self) -> u64 {
        self.core.counters.tags_reused()
    }
}
