//! A served folder, and a thread that may run operations on it.

use std::path::PathBuf;
use std::sync::Arc;

use ksf_fs::{
    CreateHow, Credential, ErrorKind, Export, ExportOptions, Found, Fs, FsOptions, Handle, Lane, SetAttr, Squash,
};
use ksf_test::Folder;

/// Folder and state are removed in the end.
pub(crate) struct Served {
    folder: Folder,
    pub(crate) fs: Fs,
    pub(crate) export: Arc<Export>,
}

#[allow(dead_code)]
impl Served {
    pub(crate) fn new(options: ExportOptions) -> Self {
        Self::with(options, FsOptions::default())
    }

    pub(crate) fn with(options: ExportOptions, bounds: FsOptions) -> Self {
        let folder = Folder::to_export();
        std::fs::create_dir(folder.path("data")).unwrap();
        let (fs, export) = open(&folder, options, bounds);
        Self { folder, fs, export }
    }

    /// All callers are who they say.
    pub(crate) fn open_to_all() -> Self {
        Self::new(ExportOptions { squash: Squash::None, ..ExportOptions::default() })
    }

    /// The same folder and state with a server that has just started.
    pub(crate) fn restarted(self) -> Self {
        let options = self.export.options().clone();
        let (fs, export) = open(&self.folder, options, FsOptions::default());
        Self { folder: self.folder, fs, export }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path("data").join(name)
    }

    pub(crate) fn root(&self) -> &Handle {
        self.export.root()
    }

    pub(crate) fn find(&self, lane: &mut Lane, name: &str) -> Found {
        self.fs.lookup(lane, &root(), self.root(), name.as_bytes()).result.unwrap()
    }

    /// A new file in the folder, made by root.
    pub(crate) fn make(&self, lane: &mut Lane, name: &str) -> Found {
        let how = CreateHow::Guarded(SetAttr { mode: Some(0o644), ..SetAttr::default() });
        self.fs.create(lane, &root(), self.root(), name.as_bytes(), &how).result.unwrap()
    }
}

fn open(folder: &Folder, options: ExportOptions, bounds: FsOptions) -> (Fs, Arc<Export>) {
    let mut fs = Fs::new(bounds).unwrap();
    let export = fs.add_export(&folder.path("data"), &folder.path("state"), options).unwrap();
    (fs, export)
}

/// Runs a test on a thread that is a lane.
#[allow(dead_code)]
pub(crate) fn on_lane(test: impl FnOnce(&mut Lane) + Send) {
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| test(&mut Lane::attach().unwrap())).join();
        joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Runs a test on a lane, with a server that is open to all.
#[allow(dead_code)]
pub(crate) fn with_lane(test: impl FnOnce(&mut Lane, Served) + Send) {
    on_lane(|lane| test(lane, Served::open_to_all()));
}

#[allow(dead_code)]
pub(crate) fn root() -> Credential {
    Credential::unix(0, 0, &[])
}

#[allow(dead_code)]
pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T, ksf_fs::FsError>) -> ErrorKind {
    result.unwrap_err().kind()
}

/// Waits until the kernel's clock gives no new object the time of birth of this one.
#[allow(dead_code)]
pub(crate) fn wait_until_old(path: &std::path::Path) {
    let Ok(born) = std::fs::symlink_metadata(path).unwrap().created() else { return };
    let is_old = || born.elapsed().is_ok_and(|age| age > std::time::Duration::from_millis(200));
    ksf_test::wait_until("the clock of file systems has gone on", is_old);
}

/// Descriptors of this process by which a file can be written. While there is one it cannot be executed.
#[allow(dead_code)]
pub(crate) fn open_for_writing(path: &std::path::Path) -> usize {
    let is_one = |fd: &std::ffi::OsStr| {
        let fd = fd.to_str().unwrap();
        // One of another test may be closed by now.
        let target = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = u32::from_str_radix(flags.unwrap_or("0").trim(), 8).unwrap();
        target.is_some_and(|target| target == path) && flags & 0o3 != 0
    };
    std::fs::read_dir("/proc/self/fd").unwrap().filter(|fd| is_one(&fd.as_ref().unwrap().file_name())).count()
}
