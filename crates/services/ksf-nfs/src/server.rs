//! The server as its owner sees it: opened, given to an RPC service, watched, closed.

use std::sync::Arc;
use std::time::Instant;

use ksf::limits::Limits;
use ksf_fs::{Export, FileSettings, Files, OpenError};
use ksf_services::rpc::TableError;

use crate::activity::{Activity, ClientCounts};
use crate::counters::{Counters, ProcedureCounts};
use crate::drc::{Drc, DrcLimits, DrcSizes};
use crate::mount::{MountProgram, Mounts};
use crate::program::{Core, NfsProgram};
use crate::service::{NfsService, programs};

/// Greatest READ and WRITE where nothing is said.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;

/// What a message has besides the data of a WRITE or READ, at most: headers, credential, handle.
const AROUND_DATA_BYTES: usize = 2048;
/// READ and WRITE are of whole pages.
const PAGE_BYTES: usize = 4096;

/// Greatest READ and WRITE that a listener with these limits takes, up to [`TRANSFER_BYTES_MAX`]; 0: there is no room for one.
pub fn transfer_bytes_max(limits: &Limits) -> u32 {
    let message_bytes_max = limits.message_bytes_max.min(limits.connection_bytes_max);
    let room = message_bytes_max.saturating_sub(AROUND_DATA_BYTES) / PAGE_BYTES * PAGE_BYTES;
    u32::try_from(room).map_or(TRANSFER_BYTES_MAX, |room| room.min(TRANSFER_BYTES_MAX))
}

/// What a server is opened with.
pub struct Settings {
    /// What it exports, and how requests are carried out.
    pub files: FileSettings,
    /// Bounds of the cache of duplicate requests.
    pub drc: DrcLimits,
    /// Greatest READ and WRITE, in bytes. Where the limits of a listener allow less, its clients are told less
    /// ([`transfer_bytes_max`]).
    pub transfer_bytes_max: u32,
}

/// An NFSv3 server without its sockets.
pub struct Nfs {
    core: Arc<Core>,
    files: Files,
}

impl Nfs {
    /// Opens the exports and starts the threads.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let Settings { files, drc, transfer_bytes_max } = settings;
        let (exports, files) = Files::open(files)?;
        let core = Arc::new(Core {
            fs: Arc::clone(&files.fs),
            exports,
            drc: Drc::new(drc),
            counters: Counters::default(),
            activity: Activity::default(),
            mounts: Mounts::default(),
            transfer_bytes_max,
            started: Instant::now(),
        });
        Ok(Self { core, files })
    }

    /// The service that answers its clients, called `name` in messages and counters.
    ///
    /// # Errors
    ///
    /// None: the numbers of its programs are not the same.
    pub fn service(&self, name: impl Into<String>) -> Result<NfsService, TableError> {
        let (core, lanes) = (&self.core, &self.files.lanes);
        Ok(NfsService {
            name: name.into(),
            programs: programs()?,
            nfs: NfsProgram { core: Arc::clone(core), lanes: Arc::clone(lanes) },
            mount: MountProgram { core: Arc::clone(core), lanes: Arc::clone(lanes) },
        })
    }

    /// What it exports, in the order in which it was given.
    pub fn exports(&self) -> impl Iterator<Item = &Export> {
        self.core.exports.all.iter().map(|exported| &*exported.export)
    }

    /// The file layer: its counters, and its end.
    pub fn files(&self) -> &Files {
        &self.files
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

    /// How much is in the cache of duplicate requests.
    pub fn drc_sizes(&self) -> DrcSizes {
        self.core.drc.sizes()
    }
}
