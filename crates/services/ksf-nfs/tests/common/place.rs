//! What tests of all file servers need: exports in a folder, and a server whose end waits for no client. `ksf-ninep` has this file, too.

use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};

use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::server::{Builder, Server};
use ksf_fs::{Clients, ExportOptions, ExportSettings, FileSettings, Files, FsOptions, LaneOptions, Length, Squash};
use ksf_test::{Folder, wait_until};

/// Lanes of a server.
pub(crate) const LANES: usize = 4;

/// Exports in a folder of a test, with the keys beside them.
pub(crate) struct Place {
    folder: Folder,
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self { folder: Folder::to_export() };
        std::fs::create_dir(place.path("")).unwrap();
        place
    }

    /// A path in the export.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        let export = self.folder.path("export");
        if name.is_empty() { export } else { export.join(name) }
    }

    /// The export with these options, and with all users who they say.
    pub(crate) fn export_as(&self, options: ExportOptions) -> ExportSettings {
        let options = ExportOptions { squash: Squash::None, ..options };
        ExportSettings { path: self.path(""), options, clients: Clients::default(), secure: false }
    }

    /// Another folder beside the export.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        let path = self.folder.path(name);
        std::fs::create_dir(&path).unwrap();
        path
    }

    pub(crate) fn files(&self, exports: Vec<ExportSettings>) -> FileSettings {
        let (state, lanes) = (self.folder.path("state"), LaneOptions { threads: LANES });
        FileSettings { exports, state, lanes, fs: FsOptions::default() }
    }
}

/// Holds all lanes. Each serves requests again when its sender is dropped.
pub(crate) fn hold_lanes(files: &Files) -> Vec<Sender<()>> {
    let holds = (0..LANES).map(|_| {
        let (hold, held) = channel();
        files.lanes.submit(0, Length::Short, 0, move |_| assert!(held.recv().is_err()));
        hold
    });
    let holds = holds.collect();
    wait_until("all lanes are held", || files.lane_counters().running_jobs == LANES);
    holds
}

/// A server that does not wait for the clients of a test to close: they are in its thread, and would keep it for the second of
/// `linger_timeout_ms`.
pub(crate) fn server(engine: EngineKind) -> Builder {
    Server::builder().engine(engine).limits(Limits { linger_timeout_ms: 0, ..Limits::default() })
}

/// The counters of a server, for the message of a failure.
pub(crate) fn counters(server: &Server, files: &Files) -> String {
    let counted = server.counters().into_iter().filter(|counter| counter.value > 0);
    let counted: Vec<_> = counted.map(|counter| (counter.name, counter.value)).collect();
    format!("{:?}, {:?}, {counted:?}", files.fs_counters(), files.lane_counters())
}
