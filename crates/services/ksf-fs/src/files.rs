//! What the servers of all protocols have in common: the file layer at work, with its threads.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::clock::FsClock;
use crate::export::ExportError;
use crate::exports::{ExportSettings, Exports};
use crate::lane::{Identities, LaneError};
use crate::lanes::{LaneCounters, LaneOptions, Lanes};
use crate::layer::{Fs, FsCounters, FsOptions};

/// What a file layer is opened with.
#[derive(Clone, Debug)]
pub struct FileSettings {
    /// What it exports.
    pub exports: Vec<ExportSettings>,
    /// Folder of what must be the same after a restart: the keys of handles.
    pub state: PathBuf,
    /// Threads that carry requests out.
    pub lanes: LaneOptions,
    /// Bounds of the file layer.
    pub fs: FsOptions,
}

/// Why a server of files cannot be opened. Each says the remedy.
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

/// A file layer with its lanes and its clock.
#[derive(Debug)]
pub struct Files {
    /// The operations.
    pub fs: Arc<Fs>,
    /// The threads on which they run.
    pub lanes: Arc<Lanes>,
    _clock: FsClock,
}

impl Files {
    /// Opens the exports and starts the threads.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(settings: FileSettings) -> Result<(Exports, Self), OpenError> {
        let FileSettings { exports, state, lanes, fs } = settings;
        let (exports, fs) = Exports::open(exports, &state, fs)?;
        let lanes = Arc::new(Lanes::start(&lanes, exports.all.len())?);
        let fs = Arc::new(fs);
        let clock = FsClock::start(Arc::clone(&fs), Arc::downgrade(&lanes)).map_err(OpenError::Thread)?;
        Ok((exports, Self { fs, lanes, _clock: clock }))
    }

    /// As whom requests are carried out.
    pub fn identities(&self) -> Identities {
        self.lanes.identities()
    }

    /// What the file layer counted.
    pub fn fs_counters(&self) -> FsCounters {
        self.fs.counters()
    }

    /// What the lanes counted.
    pub fn lane_counters(&self) -> LaneCounters {
        self.lanes.counters()
    }

    /// Waits until the requests that were begun are through, or `deadline`; those that were not begun are given up. Returns how
    /// many were not through.
    pub fn close(&self, deadline: Instant) -> usize {
        self.fs.close();
        self.lanes.close(deadline)
    }
}
