//! Exports: folders that are served, their options, and the keys of their handles.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use const_siphasher::sip128::SipHasher24;
use rustix::fs::{AtFlags, Mode, OFlags, StatVfsMountFlags, StatxFlags};
use rustix::io::Errno;

use crate::attr::{FileType, Time};
use crate::closing::{Closer, Closing};
use crate::credential::Squash;
use crate::error::{ErrorKind, FsError};
use crate::handle::{Handle, Key};
use crate::ops::{TIME_STEP_MIN, greatest_file_size_max, measured_file_size_max, measured_time_step, nameless_file};
use crate::sys;
use crate::table::{Origin, Table};
use crate::uncommitted::Verifier;

/// How a folder is served. Mounts inside of it are not crossed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Nothing can be changed. Default: false.
    pub read_only: bool,
    /// Who is taken for the anonymous user. Default: root.
    pub squash: Squash,
    /// Uid and gid of the anonymous user. Default: 65534, 65534.
    pub anonymous: (u32, u32),
    /// The supplementary groups of a user are those that this system knows, not those of the wire, which has 16 at most.
    /// Default: false.
    pub manage_gids: bool,
    /// A call that changes names or attributes is answered when the change is on the medium (RFC 1813, section 4.7). Default: true.
    /// Without it, a crash of the machine may take the last changes back.
    pub sync_names: bool,
    /// Nothing but this server changes the folder, so what it knows need not be asked again: attributes are
    /// kept without asking the kernel. Default: false.
    pub exclusive: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            squash: Squash::Root,
            anonymous: (65_534, 65_534),
            manage_gids: false,
            sync_names: true,
            exclusive: false,
        }
    }
}

/// How an export's handles are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleSource {
    /// By the kernel: they outlive the server.
    Kernel,
    /// By the names under which objects were seen, because the server lacks CAP_DAC_READ_SEARCH: they end with the server, and
    /// with a rename by a local program.
    Table,
}

/// Why a folder cannot be exported. Each is one line with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// There is no such folder.
    #[error("export {path}: there is no such folder; make it, or correct the path")]
    Missing {
        /// As it was given.
        path: PathBuf,
    },
    /// It is not a folder.
    #[error("export {path}: this is not a folder; export the folder that it lies in")]
    NotAFolder {
        /// As it was given.
        path: PathBuf,
    },
    /// One export lies inside of another.
    #[error("export {path}: it lies in the same tree as export {other}; export one of both")]
    Nested {
        /// The new one.
        path: PathBuf,
        /// The one before.
        other: PathBuf,
    },
    /// The state folder lies in the export.
    #[error(
        "export {path}: the state folder {state} lies in it, and its keys would be served; choose a state folder outside"
    )]
    StateInside {
        /// The export.
        path: PathBuf,
        /// The state folder.
        state: PathBuf,
    },
    /// The file system has no handles.
    #[error(
        "export {path}: its file system gives no file handles (name_to_handle_at: {errno}); export a folder on ext4, xfs, btrfs or \
         tmpfs, or mount overlay with nfs_export=on"
    )]
    NoHandles {
        /// The export.
        path: PathBuf,
        /// What the kernel said.
        errno: Errno,
    },
    /// The file system's handles are too long.
    #[error(
        "export {path}: the handles of its file system do not fit into 64 bytes; export a folder of another file system"
    )]
    LongHandles {
        /// The export.
        path: PathBuf,
    },
    /// The key file is damaged.
    #[error("export {path}: its key file {file} is damaged; restore it, or remove it and have clients mount again")]
    DamagedKey {
        /// The export.
        path: PathBuf,
        /// The key file.
        file: PathBuf,
    },
    /// Others can read the key file.
    #[error("export {path}: others may read its key file {file}, and could make handles with it; chmod 600 it")]
    OpenKey {
        /// The export.
        path: PathBuf,
        /// The key file.
        file: PathBuf,
    },
    /// The key file is not the server's own.
    #[error(
        "export {path}: its key file {file} is not a file of the server's user, and whoever made it could make handles; remove it \
         and have clients mount again, or chown it if you know where it comes from"
    )]
    ForeignKey {
        /// The export.
        path: PathBuf,
        /// The key file.
        file: PathBuf,
    },
    /// Two exports have one id.
    #[error(
        "export {path}: it has the same id as export {other}; remove its key file {file}, and have its clients mount again"
    )]
    SameId {
        /// The new one.
        path: PathBuf,
        /// The one before.
        other: PathBuf,
        /// The key file of the new one.
        file: PathBuf,
    },
    /// A file operation failed.
    #[error("export {path}: cannot {what}: {error}; check the permissions of the server's user")]
    Io {
        /// The export, or the file.
        path: PathBuf,
        /// What was done.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// `/proc` is not mounted.
    #[error("/proc/self/fd cannot be opened: {0}; mount /proc")]
    NoProc(Errno),
}

/// When the kernel changes the time of the last access of a file that is read, by the options of its mount (mount(8)). Those of the
/// start hold: who changes them later restarts the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessTimes {
    /// `noatime`.
    Never,
    /// `relatime`.
    AfterChanges,
    /// `strictatime`.
    Always,
}

impl AccessTimes {
    fn of(mount: StatVfsMountFlags) -> Self {
        match () {
            () if mount.contains(StatVfsMountFlags::NOATIME) => Self::Never,
            () if mount.contains(StatVfsMountFlags::RELATIME) => Self::AfterChanges,
            () => Self::Always,
        }
    }
}

/// A folder that is served.
#[derive(Debug)]
pub struct Export {
    path: PathBuf,
    id: u32,
    key: Key,
    options: ExportOptions,
    root: Handle,
    /// Open for reading: the kernel takes no other for the mount of a handle.
    pub(crate) root_descriptor: OwnedFd,
    /// Major and minor number of the root's device.
    pub(crate) device: (u32, u32),
    pub(crate) root_inode: u64,
    /// Number of the root's mount (name_to_handle_at(2); statx(2), `stx_mnt_id`).
    pub(crate) mount: i32,
    /// Id of the root's file system (statvfs(3)).
    pub(crate) file_system: u64,
    /// statfs(2), `f_type`.
    kind: i64,
    /// Size limit of a regular file. The greatest that the kind of file system has where it cannot be measured: an export that is
    /// read-only may have files of that size.
    pub(crate) file_size_max: u64,
    /// Step between two times of a file; the finest where it cannot be measured.
    pub(crate) time_step: Time,
    /// When reads change the time of the last access.
    pub(crate) access_times: AccessTimes,
    /// Most bytes that the kernel reads ahead of a read, twice: the next window begins inside of the last one. `None`: not known.
    pub(crate) ahead_bytes: Option<u64>,
    pub(crate) closing: Arc<Closing>,
    /// `None`: the kernel opens handles.
    pub(crate) table: Option<Table>,
    pub(crate) verifier: Verifier,
}

impl Export {
    /// The folder, without links in it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A number that is the same after each start.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// As it was added.
    pub fn options(&self) -> &ExportOptions {
        &self.options
    }

    /// The handle of the folder.
    pub fn root(&self) -> &Handle {
        &self.root
    }

    /// How its handles are opened.
    pub fn handles(&self) -> HandleSource {
        if self.table.is_some() { HandleSource::Table } else { HandleSource::Kernel }
    }

    /// What WRITE and COMMIT tell: random at the start of the server, another one each time that data was lost which a client had
    /// been told it would be asked to commit.
    pub fn verifier(&self) -> [u8; 8] {
        self.verifier.get()
    }

    /// True if calls on what the kernel has in memory do not wait for anything, so that they need no lane.
    pub(crate) fn is_warm(&self) -> bool {
        WARM.contains(&self.kind)
    }

    /// True if an entry of this type may lead to another part of the file system, whose inode numbers are its own.
    pub(crate) fn may_have_parts(&self, file_type: Option<FileType>) -> bool {
        self.kind == BTRFS && file_type.is_none_or(|file_type| file_type == FileType::Directory)
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Opens a folder to be served. `before`: the exports that there are.
    pub(crate) fn open(
        path: &Path,
        state: &Path,
        options: ExportOptions,
        before: &[Arc<Export>],
        table_entries_max: usize,
        verifier: Verifier,
    ) -> Result<Self, ExportError> {
        let io_error = |what| {
            let path = path.to_owned();
            move |error: io::Error| ExportError::Io { path, what, error }
        };
        let given = path;
        let path = fs::canonicalize(given).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ExportError::Missing { path: given.to_owned() },
            io::ErrorKind::NotADirectory => ExportError::NotAFolder { path: given.to_owned() },
            _ => io_error("find the folder")(error),
        })?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root_descriptor = rustix::fs::open(path.as_path(), flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOTDIR => ExportError::NotAFolder { path: given.to_owned() },
            errno => io_error("open the folder")(errno.into()),
        })?;
        if let Some(other) = before.iter().find(|other| path.starts_with(&other.path) || other.path.starts_with(&path))
        {
            return Err(ExportError::Nested { path, other: other.path.clone() });
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(state).map_err(io_error("make the state folder"))?;
        let state = fs::canonicalize(state).map_err(io_error("find the state folder"))?;
        if state.starts_with(&path) {
            return Err(ExportError::StateInside { path, state });
        }
        let (kernel, mount_number) = sys::name_to_handle(&root_descriptor, c"").map_err(|errno| match errno {
            Errno::OPNOTSUPP | Errno::NOSYS => ExportError::NoHandles { path: path.clone(), errno },
            errno => io_error("ask for the folder's handle")(errno.into()),
        })?;
        let file = state.join(key_name(&path));
        let (id, key) = read_or_make_key(&path, &file)?;
        let asked = |errno: Errno| io_error("ask for its file system")(errno.into());
        let of_kind = rustix::fs::fstatfs(&root_descriptor).map_err(asked)?;
        let (kind, block_bytes) = (of_kind.f_type, u64::try_from(of_kind.f_bsize).unwrap_or(1));
        let mount = rustix::fs::fstatvfs(&root_descriptor).map_err(asked)?;
        let (file_system, access_times) = (mount.f_fsid, AccessTimes::of(mount.f_flag));
        let key = bind(&key, kind, file_system, &kernel);
        if let Some(other) = before.iter().find(|other| other.id == id) {
            return Err(ExportError::SameId { path, other: other.path.clone(), file });
        }
        let root = Handle::new(id, &key, &kernel).ok_or_else(|| ExportError::LongHandles { path: path.clone() })?;
        let tried = sys::open_by_handle(&root_descriptor, &kernel, OFlags::PATH | OFlags::CLOEXEC);
        let table = match tried {
            Ok(_) => None,
            Err(Errno::PERM) => Some(Table::new(table_entries_max)),
            Err(errno) => return Err(ExportError::NoHandles { path, errno }),
        };
        let stat = rustix::fs::statx(&root_descriptor, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
            .map_err(|errno| io_error("ask for the folder's attributes")(errno.into()))?;
        let (device, root_inode) = ((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino);
        let file = if options.read_only { None } else { nameless_file(&root_descriptor) };
        let measured = file.as_ref().map(measured_file_size_max);
        let file_size_max = measured.unwrap_or_else(|| greatest_file_size_max(kind, block_bytes));
        let time_step = file.as_ref().and_then(measured_time_step).unwrap_or(TIME_STEP_MIN);
        let closer = Closer::start().map_err(io_error("start the threads that close files"))?;
        Ok(Self {
            path,
            id,
            key,
            options,
            root,
            root_descriptor,
            device,
            root_inode,
            mount: mount_number,
            file_system,
            kind,
            file_size_max,
            time_step,
            access_times,
            ahead_bytes: ahead_bytes(kind, device),
            closing: Arc::new(Closing::new(closer)),
            table,
            verifier,
        })
    }

    /// The handle of an open object. Objects of other mounts have none here.
    pub(crate) fn handle_of(&self, object: &OwnedFd) -> Result<Handle, FsError> {
        let (kernel, _) = sys::name_to_handle(object, c"")?;
        self.handle(&kernel).ok_or_else(|| ErrorKind::NotSupported.into())
    }

    /// An object was seen under this name.
    pub(crate) fn learn(&self, object: &Handle, folder: &Handle, name: &CStr) {
        self.learn_by(object, folder, name, Origin::Lookup);
    }

    /// An object was given this name instead of its last one.
    pub(crate) fn learn_moved(&self, object: &Handle, folder: &Handle, name: &CStr) {
        self.learn_by(object, folder, name, Origin::Moved);
    }

    /// An object got this name by a link.
    pub(crate) fn learn_other(&self, object: &Handle, folder: &Handle, name: &CStr) {
        if let Some(table) = &self.table {
            table.learn_other(object, folder, name.to_owned());
        }
    }

    /// An object was listed with this name.
    pub(crate) fn learn_listed(&self, object: &Handle, folder: &Handle, name: &CStr) {
        self.learn_by(object, folder, name, Origin::Listing);
    }

    fn learn_by(&self, object: &Handle, folder: &Handle, name: &CStr, origin: Origin) {
        if let Some(table) = &self.table {
            table.learn(object, folder, name.to_owned(), origin);
        }
    }

    /// `None` if the kernel's handle is longer than a client's may be.
    pub(crate) fn handle(&self, kernel: &sys::KernelHandle) -> Option<Handle> {
        Handle::new(self.id, &self.key, kernel)
    }
}

/// [`Export::ahead_bytes`] by sysfs: of a file system on a block device, or on a partition of one. A btrfs spans devices and has a
/// window of its own, which its device number does not lead to: the largest of all that are mounted bounds it.
fn ahead_bytes(kind: i64, (major, minor): (u32, u32)) -> Option<u64> {
    let device = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    let read = |at: PathBuf| fs::read_to_string(at.join("read_ahead_kb")).ok()?.trim().parse::<u64>().ok();
    let kib = if kind == BTRFS {
        fs::read_dir("/sys/fs/btrfs").ok()?.filter_map(|mounted| read(mounted.ok()?.path().join("bdi"))).max()
    } else {
        ["queue", "../queue"].iter().find_map(|at| read(device.join(at)))
    };
    kib?.checked_mul(2 << 10)
}

/// statfs(2), `f_type` of btrfs.
const BTRFS: i64 = 0x9123_683e;

/// File systems of this machine's own, by the type that statfs(2) tells: ext4, xfs, btrfs, tmpfs. Their attributes lie with the inode.
/// Others may ask a server for them, or a program.
const WARM: [i64; 4] = [0xef53, 0x5846_5342, BTRFS, 0x0102_1994];

/// File systems whose statfs(2) has an id that is theirs for good, by type: ext4, btrfs, tmpfs. That of others may be their device's
/// number, which changes between starts.
const LASTING_IDS: [i64; 3] = [0xef53, BTRFS, 0x0102_1994];

/// The key for the handles of a folder: another one where another folder, or another file system, is in its place. Handles name
/// inodes, and those of what was there before would open any file.
fn bind(key: &Key, kind: i64, file_system: u64, kernel: &sys::KernelHandle) -> Key {
    let id = if LASTING_IDS.contains(&kind) { file_system } else { 0 };
    let mut bytes = [kind.to_be_bytes(), id.to_be_bytes()].concat();
    bytes.extend(kernel.handle_type.to_be_bytes());
    bytes.extend(kernel.bytes());
    Key(key.check(&bytes))
}

/// One file for each path, by its hash: a path may be longer than a name.
fn key_name(path: &Path) -> String {
    let hash = SipHasher24::new_with_key(&[0; 16]).hash(path.as_os_str().as_bytes()).as_bytes();
    format!("export-{}.key", hex(&hash))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The id and the key of an export, which are made at its first start.
fn read_or_make_key(path: &Path, file: &Path) -> Result<(u32, Key), ExportError> {
    if let Some(known) = read_key(path, file)? {
        return Ok(known);
    }
    let failed = |what| move |error: io::Error| ExportError::Io { path: file.to_owned(), what, error };
    let mut random = [0; 20];
    let read = File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut random));
    read.map_err(failed("read random bytes for the key"))?;
    let text = format!("ksf-fs export key 1\nid {}\nkey {}\n", hex(&random[..4]), hex(&random[4..]));
    write_key(file, &text).map_err(failed("write the key file"))?;
    // As it will be read at the next start; another server may have been faster.
    read_key(path, file)?.ok_or_else(|| failed("read the key file")(io::ErrorKind::NotFound.into()))
}

/// `None`: there is no such file.
fn read_key(path: &Path, file: &Path) -> Result<Option<(u32, Key)>, ExportError> {
    let failed = |what| move |error: io::Error| ExportError::Io { path: file.to_owned(), what, error };
    let foreign = || ExportError::ForeignKey { path: path.to_owned(), file: file.to_owned() };
    // A link would lead to a file of somebody else, and a FIFO would block.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut opened = match fs::OpenOptions::new().read(true).custom_flags(flags).open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => return Err(foreign()),
        Err(error) => return Err(failed("read the key file")(error)),
    };
    let metadata = opened.metadata().map_err(failed("look at the key file"))?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(foreign());
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        return Err(ExportError::OpenKey { path: path.to_owned(), file: file.to_owned() });
    }
    let mut text = Vec::new();
    opened.read_to_end(&mut text).map_err(failed("read the key file"))?;
    let key = std::str::from_utf8(&text).ok().and_then(parse_key);
    key.map(Some).ok_or_else(|| ExportError::DamagedKey { path: path.to_owned(), file: file.to_owned() })
}

/// Writes it whole or not at all: a key that is lost after handles went out would make them useless.
fn write_key(file: &Path, text: &str) -> io::Result<()> {
    let own = file.with_extension(format!("{}.new", std::process::id()));
    let mut options = fs::OpenOptions::new();
    let flags = OFlags::NOFOLLOW.bits() as i32;
    let mut written = options.write(true).create(true).truncate(true).mode(0o600).custom_flags(flags).open(&own)?;
    written.write_all(text.as_bytes())?;
    written.sync_all()?;
    // A link does not replace what another server wrote meanwhile.
    let linked = match fs::hard_link(&own, file) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    };
    fs::remove_file(&own)?;
    linked?;
    match file.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

fn parse_key(text: &str) -> Option<(u32, Key)> {
    let mut lines = text.lines();
    if lines.next() != Some("ksf-fs export key 1") {
        return None;
    }
    let id = lines.next()?.strip_prefix("id ").filter(|id| id.len() == 8)?;
    let key = lines.next()?.strip_prefix("key ").filter(|key| key.len() == 32)?;
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hex(id) || !is_hex(key) || lines.next().is_some() {
        return None;
    }
    let key = u128::from_str_radix(key, 16).ok()?;
    Some((u32::from_str_radix(id, 16).ok()?, Key(key.to_be_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_read_whole_or_not_at_all() {
        let text = "ksf-fs export key 1\nid 0000beef\nkey 000102030405060708090a0b0c0d0e0f\n";
        let (id, key) = parse_key(text).unwrap();
        assert_eq!((id, key.0), (0xbeef, std::array::from_fn(|at| at as u8)));
        for length in 0..text.len() - 1 {
            assert!(parse_key(&text[..length]).is_none(), "cut after {length} bytes");
        }
        for (from, to) in [("key 1", "key 2"), ("beef", "be f"), ("id 0", "id +"), ("0f\n", "0f\nmore\n")] {
            assert!(parse_key(&text.replace(from, to)).is_none(), "{to:?}");
        }
    }

    #[test]
    fn a_key_that_was_written_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.key");
        write_key(&file, "one").unwrap();
        write_key(&file, "two").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "one");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
