//! The server as its owner sees it: opened, made a service, watched, closed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ksf_fs::{
    ExportError, ExportSettings, Exports, Fs, FsClock, FsCounters, FsOptions, Identities, LaneCounters, LaneError,
    LaneOptions, Lanes,
};

use crate::counters::{Counters, MessageCounts};
use crate::service::NinepService;

/// Least message that a client may ask for, in bytes.
pub const MSIZE_MIN: u32 = 4096;
/// Greatest message where nothing is said, in bytes.
pub const MSIZE_MAX: u32 = 1 << 20;
/// Fids of one connection where nothing is said.
pub const FIDS_MAX: usize = 4096;

/// What a server is opened with.
pub struct Settings {
    /// What it exports. Groups of users are always looked up: 9P has none on the wire.
    pub exports: Vec<ExportSettings>,
    /// Folder of the keys of handles, which the file layer needs. 9P puts no handle on the wire.
    pub state: PathBuf,
    /// Threads that carry requests out.
    pub lanes: LaneOptions,
    /// Bounds of the file layer.
    pub fs: FsOptions,
    /// Greatest message, at least [`MSIZE_MIN`]; the listener must take messages as long.
    pub msize_max: u32,
    /// Fids of one connection, at most.
    pub fids_max: usize,
}

/// Why a server cannot be opened. Each says the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A folder cannot be exported.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// There are no threads for its requests.
    #[error(transparent)]
    Lanes(#[from] LaneError),
    /// The system refused a thread.
    #[error("the system refused a thread: {0}; raise the limit of threads (ulimit -u)")]
    Thread(std::io::Error),
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
    lanes: Arc<Lanes>,
    _clock: FsClock,
}

/// What there is to tell of an export.
#[derive(Clone, Debug)]
pub struct ExportInfo<'a> {
    /// Its path, without symbolic links.
    pub path: &'a Path,
}

impl Ninep {
    /// Opens the exports and starts the threads.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let Settings { mut exports, state, lanes, fs, msize_max, fids_max } = settings;
        exports.iter_mut().for_each(|export| export.options.manage_gids = true);
        let (exports, fs) = Exports::open(exports, &state, fs)?;
        let lanes = Arc::new(Lanes::start(&lanes, exports.all.len())?);
        let fs = Arc::new(fs);
        let clock = FsClock::start(Arc::clone(&fs), Arc::downgrade(&lanes)).map_err(OpenError::Thread)?;
        let core = Core { fs, exports, counters: Counters::default(), msize_max: msize_max.max(MSIZE_MIN), fids_max };
        Ok(Self { core: Arc::new(core), lanes, _clock: clock })
    }

    /// The service that answers its clients, called `name` in messages and counters.
    pub fn service(&self, name: impl Into<String>) -> NinepService {
        NinepService { name: name.into(), core: Arc::clone(&self.core), lanes: Arc::clone(&self.lanes) }
    }

    /// What it exports, in the order in which it was given.
    pub fn exports(&self) -> impl Iterator<Item = ExportInfo<'_>> {
        self.core.exports.all.iter().map(|exported| ExportInfo { path: exported.export.path() })
    }

    /// As whom requests are carried out.
    pub fn identities(&self) -> Identities {
        self.lanes.identities()
    }

    /// What was counted of each message, in the order of their types.
    pub fn messages(&self) -> Vec<MessageCounts> {
        self.core.counters.read()
    }

    /// Connections that were closed because their client used a tag that was in use.
    pub fn tags_reused(&self) -> u64 {
        self.core.counters.tags_reused()
    }

    /// What the file layer counted.
    pub fn fs_counters(&self) -> FsCounters {
        self.core.fs.counters()
    }

    /// What the lanes counted.
    pub fn lane_counters(&self) -> LaneCounters {
        self.lanes.counters()
    }

    /// Waits until the requests that were begun are through, or `deadline`; those that were not begun are given up. Returns how
    /// many were not through.
    pub fn close(&self, deadline: Instant) -> usize {
        self.core.fs.close();
        self.lanes.close(deadline)
    }
}
