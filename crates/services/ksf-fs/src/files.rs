//! The file layer with its threads, as the servers of all protocols use it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::clock::FsClock;
use crate::export::ExportError;
use crate::exports::{ExportSettings, Exports};
use crate::lane::{Identities, LaneError};
use crate::lanes::{LaneCounters, LaneOptions, Lanes};
use crate::layer::{Fs, FsCounters, FsOptions};

/// Settings of a file layer.
#[derive(Clone, Debug)]
pub struct FileSettings {
    /// The exports.
    pub exports: Vec<ExportSettings>,
    /// Directory of the persistent state: the keys of handles.
    pub state: PathBuf,
    /// Threads that execute requests.
    pub lanes: LaneOptions,
    /// Limits of the file layer.
    pub fs: FsOptions,
}

/// Error of [`Files::open`]. Each message names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A directory cannot be exported.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The threads for requests cannot start.
    #[error(transparent)]
    Lanes(#[from] LaneError),
    /// The system refused a thread.
    #[error("the system refused a thread: {0}; raise the limit of threads (ulimit -u)")]
    Thread(std::io::Error),
}

/// A file layer with its lanes and its clock.
#[derive(Debug)]
pub struct Files {
    /// Operations on files.
    pub fs: Arc<Fs>,
    /// The threads that run them.
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

    /// Identities with which requests are executed.
    pub fn identities(&self) -> Identities {
        self.lanes.identities()
    }

    /// Counters of the file layer.
    pub fn fs_counters(&self) -> FsCounters {
        self.fs.counters()
    }

    /// Counters of the lanes.
    pub fn lane_counters(&self) -> LaneCounters {
        self.lanes.counters()
    }

    /// Drops the queued requests and waits until those in progress end, or for `deadline`. Returns the number still in
    /// progress.
    pub fn close(&self, deadline: Instant) -> usize {
        self.fs.close();
        self.lanes.close(deadline)
    }
}
