//! A folder that file servers export to fuzz targets, between others that no request may change.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use ksf_fs::{Clients, ExportOptions, ExportSettings, FileSettings, Files, FsOptions, LaneOptions, Squash};
use ksf_test::wait_until;
use tempfile::TempDir;

pub(crate) struct Exported {
    folder: TempDir,
    outside: Vec<String>,
}

impl Exported {
    pub(crate) fn new() -> Self {
        // In memory where there is such a place: a sync costs nothing there.
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a temporary folder");
        let path = |name: &str| folder.path().join(name);
        fs::create_dir_all(path("export")).expect("a folder for the export");
        fs::create_dir_all(path("outside/folder")).expect("a folder beside it");
        fs::write(path("outside/file"), "outside").expect("a file beside it");
        fs::write(path("outside/folder/file"), "outside").expect("a file beside it");
        Self { folder, outside: Vec::new() }
    }

    /// The export, with all users who they say.
    pub(crate) fn settings(&self) -> FileSettings {
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let export = ExportSettings { path: self.path(), options, clients: Clients::default(), secure: false };
        FileSettings {
            exports: vec![export],
            state: self.folder.path().join("state"),
            lanes: LaneOptions { threads: 2 },
            fs: FsOptions::default(),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("export")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// The server has started: from now on nothing outside of the export changes.
    pub(crate) fn started(&mut self) {
        self.outside = self.look_outside();
    }

    /// Makes the export as it was at first.
    pub(crate) fn reset(&self, files: &Files) {
        // What came by a connection that has ended may be under way still.
        wait_until("nothing is carried out", || {
            let counters = files.lane_counters();
            counters.queued_jobs + counters.running_jobs + counters.queued_syncs == 0
        });
        let export = self.path();
        clear(&export);
        let path = |name: &str| export.join(name);
        fs::create_dir_all(path("dir/inner")).expect("a folder");
        fs::write(path("file"), "0123456789").expect("a file");
        symlink("../outside", path("out")).expect("a link");
        symlink("../outside/file", path("dir/out")).expect("a link");
    }

    pub(crate) fn check(&self, files: &Files) {
        assert_eq!(files.lane_counters().panicked, 0, "a request panicked");
        assert_eq!(self.look_outside(), self.outside, "something outside of the export changed");
    }

    /// All there is beside the export.
    fn look_outside(&self) -> Vec<String> {
        let mut seen = Vec::new();
        look(&self.folder.path().join("outside"), &mut seen);
        look(&self.folder.path().join("state"), &mut seen);
        let names = fs::read_dir(self.folder.path()).expect("the folder can be read");
        seen.extend(names.map(|entry| format!("{:?}", entry.expect("an entry").file_name())));
        seen.sort();
        seen
    }
}

/// Notes an object and all below it.
fn look(path: &Path, seen: &mut Vec<String>) {
    let about = fs::symlink_metadata(path).expect("it is there");
    let content = if about.is_file() { fs::read(path).expect("it can be read") } else { Vec::new() };
    let times = (about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec());
    let owner = (about.mode(), about.uid(), about.gid(), about.nlink(), about.ino());
    seen.push(format!("{} {owner:?} {times:?} {content:?}", path.display()));
    if about.is_dir() {
        let entries = fs::read_dir(path).expect("it can be listed");
        entries.for_each(|entry| look(&entry.expect("an entry").path(), seen));
    }
}

/// Empties a folder, whatever was made of its modes.
fn clear(folder: &Path) {
    fs::set_permissions(folder, Permissions::from_mode(0o755)).expect("its mode is changed");
    for entry in fs::read_dir(folder).expect("it can be listed") {
        let entry = entry.expect("an entry");
        if entry.file_type().expect("its type is known").is_dir() {
            clear(&entry.path());
            fs::remove_dir(entry.path()).expect("it is empty");
        } else {
            fs::remove_file(entry.path()).expect("it is removed");
        }
    }
}
