//! The server as its owner sees it: opened, given to an RPC service, watched, closed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ksf_fs::{
    ExportError, ExportSettings, Exports, FsClock, FsCounters, FsOptions, HandleSource, Identities, LaneCounters,
    LaneError, LaneOptions, Lanes,
};
use ksf_services::rpc::TableError;

use crate::activity::{Activity, ClientCounts};
use crate::counters::{Counters, ProcedureCounts};
use crate::drc::{Drc, DrcLimits, DrcSizes};
use crate::mount::{MountProgram, Mounts};
use crate::program::{Core, NfsProgram};
use crate::service::{NfsService, programs};

/// Greatest READ and WRITE where nothing is said.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;

/// What a server is opened with.
pub struct Settings {
    /// What it exports.
    pub exports: Vec<ExportSettings>,
    /// Folder of what must be the same after a restart: the keys of handles.
    pub state: PathBuf,
    /// Threads that carry requests out.
    pub lanes: LaneOptions,
    /// Bounds of the file layer.
    pub fs: FsOptions,
    /// Bounds of the cache of duplicate requests.
    pub drc: DrcLimits,
    /// Greatest READ and WRITE, in bytes; a message must have room for 2 KiB more.
    pub transfer_bytes_max: u32,
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

/// An NFSv3 server without its sockets.
pub struct Nfs {
    core: Arc<Core>,
    lanes: Arc<Lanes>,
    _clock: FsClock,
}

/// What there is to tell of an export.
#[derive(Clone, Debug)]
pub struct ExportInfo<'a> {
    /// Its path, without symbolic links.
    pub path: &'a Path,
    /// Whether handles are good after a restart.
    pub handles: HandleSource,
}

impl Nfs {
    /// Opens the exports and starts the threads.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let Settings { exports, state, lanes, fs, drc, transfer_bytes_max } = settings;
        let (exports, fs) = Exports::open(exports, &state, fs)?;
        let lanes = Arc::new(Lanes::start(&lanes, exports.all.len())?);
        let core = Arc::new(Core {
            fs: Arc::new(fs),
            exports,
            drc: Drc::new(drc),
            counters: Counters::default(),
            activity: Activity::default(),
            mounts: Mounts::default(),
            transfer_bytes_max,
            started: Instant::now(),
        });
        let clock = FsClock::start(Arc::clone(&core.fs), Arc::downgrade(&lanes)).map_err(OpenError::Thread)?;
        Ok(Self { core, lanes, _clock: clock })
    }

    /// The service that answers its clients, called `name` in messages and counters.
    ///
    /// # Errors
    ///
    /// None: the numbers of its programs are not the same.
    pub fn service(&self, name: impl Into<String>) -> Result<NfsService, TableError> {
        let (core, lanes) = (&self.core, &self.lanes);
        Ok(NfsService {
            name: name.into(),
            programs: programs()?,
            nfs: NfsProgram { core: Arc::clone(core), lanes: Arc::clone(lanes) },
            mount: MountProgram { core: Arc::clone(core), lanes: Arc::clone(lanes) },
        })
    }

    /// What it exports, in the order in which it was given.
    pub fn exports(&self) -> impl Iterator<Item = ExportInfo<'_>> {
        self.core.exports.all.iter().map(|exported| ExportInfo::of(&exported.export))
    }

    /// As whom requests are carried out.
    pub fn identities(&self) -> Identities {
        self.lanes.identities()
    }

    /// What was counted of each procedure, in the order of their numbers.
    pub fn procedures(&self) -> Vec<ProcedureCounts> {
        self.core.counters.read()
    }

    /// What was counted of each client, those with the most calls first: [`CLIENTS_MAX`](crate::CLIENTS_MAX) at most, the others
    /// together, and those that have mounts alone.
    pub fn clients(&self) -> Vec<ClientCounts> {
        self.core.activity.read(self.core.mounts.by_client())
    }

    /// Mounts that clients told of and did not take back.
    pub fn mounts(&self) -> usize {
        self.core.mounts.len()
    }

    /// What the file layer counted.
    pub fn fs_counters(&self) -> FsCounters {
        self.core.fs.counters()
    }

    /// What the lanes counted.
    pub fn lane_counters(&self) -> LaneCounters {
        self.lanes.counters()
    }

    /// How much is in the cache of duplicate requests.
    pub fn drc_sizes(&self) -> DrcSizes {
        self.core.drc.sizes()
    }

    /// Waits until the requests that were begun are through, or `deadline`; those that were not begun are given up. Returns how
    /// many were not through.
    pub fn close(&self, deadline: Instant) -> usize {
        self.core.fs.close();
        self.lanes.close(deadline)
    }
}

impl<'a> ExportInfo<'a> {
    fn of(export: &'a ksf_fs::Export) -> Self {
        Self { path: export.path(), handles: export.handles() }
    }
}
