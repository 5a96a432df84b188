//! A model of file servers: random steps on objects, each of which a server and a plain directory do, with equal results and trees.
//!
//! The objects of a run are in numbered slots; slot 0 is the root. A server has a handle or a fid in each, and [`Plain`] a descriptor.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, XattrFlags, fstat, getxattr, lgetxattr, linkat, llistxattr, mkdirat,
    mknodat, openat, readlinkat, renameat, setxattr, symlinkat, unlinkat,
};
use rustix::io::Errno;

use crate::{Random, is_root};

/// Slots of objects.
pub const SLOTS: usize = 7;
/// Steps of a run.
const STEPS: usize = 150;
/// The name of the root's parent directory, too, which is the root.
const PARENT: &str = "..";

/// The kind of a new object.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A regular file, which must not exist before.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to this path.
    Link(&'static str),
    /// A named pipe.
    Fifo,
}

/// One operation. Numbers are slots, a `&str` is a name in the directory of the slot before it.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are those of the system calls")]
pub enum Step {
    /// Finds a name, for the slot `to`.
    Find {
        dir: usize,
        name: &'static str,
        to: usize,
    },
    /// Creates an object, for the slot `to`.
    Make {
        dir: usize,
        name: &'static str,
        kind: Kind,
        mode: u32,
        to: usize,
    },
    Read {
        file: usize,
        offset: u64,
        count: u32,
    },
    Write {
        file: usize,
        offset: u64,
        data: &'static [u8],
    },
    SetSize {
        file: usize,
        size: u64,
    },
    SetMode {
        object: usize,
        mode: u32,
    },
    SetOwner {
        object: usize,
        uid: u32,
        gid: u32,
    },
    /// Mode with the type, links, owner, group, and the size of a regular file.
    Attributes {
        object: usize,
    },
    Target {
        link: usize,
    },
    List {
        dir: usize,
    },
    Link {
        object: usize,
        dir: usize,
        name: &'static str,
    },
    Rename {
        dir: usize,
        name: &'static str,
        to: usize,
        new: &'static str,
    },
    Remove {
        dir: usize,
        name: &'static str,
        is_directory: bool,
    },
    SetXattr {
        object: usize,
        name: &'static str,
        value: &'static [u8],
    },
    Xattr {
        object: usize,
        name: &'static str,
    },
}

/// The result of a step as text, or a number of errno(3).
pub type Outcome = Result<String, i32>;

/// A client of a server.
pub trait Server {
    /// Carries a step out; `None` if the protocol has none such.
    fn run(&mut self, step: Step) -> Option<Outcome>;

    /// The last request, its result and counters of the server, for the message of a failure.
    fn state(&self) -> String;
}

/// A directory and what descriptors without content show of its objects.
pub struct Plain {
    path: PathBuf,
    slots: [Option<OwnedFd>; SLOTS],
}

/// Compares a server, whose slot 0 is the directory `served`, with the empty directory `plain`.
///
/// # Panics
/// If a result, or the trees in the end, differ; the steps so far are printed.
pub fn compare(random: &mut Random, server: &mut impl Server, served: &Path, plain: &Path) {
    let mut plain = Plain::new(plain);
    let mut steps = Vec::new();
    for _ in 0..STEPS {
        let step = plain.step(random);
        let Some(ours) = server.run(step) else { continue };
        steps.push(step);
        if ours == Err(Errno::STALE.raw_os_error()) && plain.may_be_stale(step) {
            continue;
        }
        let is_lenient = plain.is_lenient(step);
        let theirs = plain.run(step).map_err(Errno::raw_os_error);
        let are_both_errors = is_lenient && ours.is_err() && theirs.is_err();
        let state = || server.state();
        assert!(ours == theirs || are_both_errors, "{ours:?}, not {theirs:?}: {}; at the end of {steps:#?}", state());
    }
    assert_eq!(tree(served), tree(&plain.path), "after {steps:#?}");
}

/// The text of attributes in the outcome of [`Step::Attributes`]. Sizes of directories depend on what was in them before.
pub fn attributes(mode: u32, links: u64, (uid, gid): (u32, u32), size: u64) -> String {
    let is_regular = FileType::from_raw_mode(mode) == FileType::RegularFile;
    format!("mode {mode:o}, {links} links, {uid}:{gid}, {} bytes", if is_regular { size } else { 0 })
}

/// The text of names in the outcome of [`Step::List`].
pub fn listed(mut names: Vec<Vec<u8>>) -> String {
    names.retain(|name| name != b"." && name != b"..");
    names.sort();
    bytes(&names.join(&b' '))
}

/// The text of data in an outcome.
pub fn bytes(data: &[u8]) -> String {
    data.escape_ascii().to_string()
}

/// An object below a directory.
#[derive(Debug, PartialEq, Eq)]
pub struct Object {
    mode: u32,
    links: u64,
    owner: (u32, u32),
    /// Content or target.
    data: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Everything below a directory, by its path in it.
pub fn tree(directory: &Path) -> BTreeMap<PathBuf, Object> {
    let mut all = BTreeMap::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(dir) = directories.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let data = match FileType::from_raw_mode(metadata.mode()) {
                FileType::RegularFile => fs::read(&path).unwrap(),
                FileType::Symlink => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                _ => Vec::new(),
            };
            if metadata.is_dir() {
                directories.push(path.clone());
            }
            let (links, owner) = (metadata.nlink(), (metadata.uid(), metadata.gid()));
            let object = Object { mode: metadata.mode(), links, owner, data, xattrs: xattrs(&path) };
            all.insert(path.strip_prefix(directory).unwrap().to_owned(), object);
        }
    }
    all
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = [0; 1024];
    let length = llistxattr(path, &mut names).unwrap_or(0);
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let value = |name: &[u8]| {
        let mut value = [0; 1024];
        let length = lgetxattr(path, OsStr::from_bytes(name), &mut value).unwrap();
        value[..length].to_vec()
    };
    names.map(|name| (name.to_vec(), value(name))).collect()
}

fn look(dir: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// A path to the object of a descriptor without content.
fn path_of(object: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", object.as_raw_fd())
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap()
}

fn done(result: std::io::Result<()>) -> Result<String, Errno> {
    result.map(|()| String::new()).map_err(errno)
}

impl Plain {
    fn new(path: &Path) -> Self {
        let mut slots = [const { None }; SLOTS];
        slots[0] = Some(OwnedFd::from(fs::File::open(path).unwrap()));
        Self { path: path.to_owned(), slots }
    }

    fn slot(&self, slot: usize) -> &OwnedFd {
        self.slots[slot].as_ref().expect("steps are about objects that are known")
    }

    /// A step on objects that are known.
    fn step(&self, random: &mut Random) -> Step {
        static DATA: [[u8; 5000]; 3] = [[b'x'; 5000], [b'y'; 5000], [b'z'; 5000]];
        let known: Vec<usize> = (0..SLOTS).filter(|slot| self.slots[*slot].is_some()).collect();
        let is = |slot: usize, kind| FileType::from_raw_mode(fstat(self.slot(slot)).unwrap().st_mode) == kind;
        // Mostly of the kind that the step is for.
        let of = |random: &mut Random, kind| {
            let fit: Vec<usize> = known.iter().copied().filter(|slot| is(*slot, kind)).collect();
            if fit.is_empty() || random.one_in(8) { random.pick(&known) } else { random.pick(&fit) }
        };
        let (dir, file) = (of(random, FileType::Directory), of(random, FileType::RegularFile));
        let (object, name) = (random.pick(&known), random.pick(&["a", "b", "c"]));
        let to = random.within(1..=SLOTS - 1);
        let offset = random.below(9000);
        let xattr = random.pick(&["user.a", "user.b"]);
        match random.within(0..=24) {
            0..=3 => Step::Find { dir, name: if random.one_in(5) { PARENT } else { name }, to },
            4..=8 => {
                let kinds = [Kind::File, Kind::File, Kind::Directory, Kind::Link("nowhere"), Kind::Fifo];
                Step::Make { dir, name, kind: random.pick(&kinds), mode: random.pick(&[0o700, 0o744]), to }
            }
            9 | 10 => Step::Read { file, offset, count: random.within(1..=8000) as u32 },
            11 | 12 => {
                let data = random.pick(&[&DATA[0], &DATA[1], &DATA[2]]);
                Step::Write { file, offset, data: &data[..random.within(1..=data.len())] }
            }
            13 => Step::SetSize { file, size: offset },
            14 => Step::SetMode { object, mode: 0o700 | random.below(0o100) as u32 },
            15 if is_root() => Step::SetOwner { object, uid: random.below(9) as u32, gid: random.below(9) as u32 },
            15 | 16 => Step::Attributes { object },
            17 => Step::Target { link: of(random, FileType::Symlink) },
            18 => Step::List { dir },
            // Without root a server knows an object by the last of its names that was seen.
            19 if is_root() => Step::Link { object, dir, name },
            19..=21 => {
                let to = of(random, FileType::Directory);
                Step::Rename { dir, name, to, new: random.pick(&["a", "b", "c"]) }
            }
            22 => Step::Remove { dir, name, is_directory: random.one_in(2) },
            23 => Step::SetXattr { object, name: xattr, value: random.pick(&[b"one", b"another"]) },
            _ => Step::Xattr { object, name: xattr },
        }
    }

    /// True if the step is about an object without a name: a server may have lost it.
    fn may_be_stale(&self, step: Step) -> bool {
        let has_no_name = |slot| fstat(self.slot(slot)).unwrap().st_nlink == 0;
        match step {
            Step::Link { object, dir, .. } => has_no_name(object) || has_no_name(dir),
            Step::Rename { dir, to, .. } => has_no_name(dir) || has_no_name(to),
            _ => has_no_name(step.object()),
        }
    }

    /// True if the error may be another one: two objects are looked up before the call, or the step is not for this kind of object.
    fn is_lenient(&self, step: Step) -> bool {
        let mode = fstat(self.slot(step.object())).unwrap().st_mode;
        match (step, FileType::from_raw_mode(mode)) {
            (Step::Link { .. } | Step::Rename { .. }, _) => true,
            (_, FileType::RegularFile | FileType::Directory) => {
                matches!(step, Step::Target { .. } | Step::Write { .. } | Step::SetSize { .. })
            }
            _ => true,
        }
    }

    fn run(&mut self, step: Step) -> Result<String, Errno> {
        let at = self.slot(step.object());
        let open =
            |how: &mut OpenOptions| how.custom_flags(OFlags::NONBLOCK.bits() as i32).open(path_of(at)).map_err(errno);
        match step {
            Step::Find { name, to, .. } => {
                let is_root = name == PARENT && fstat(at)?.st_ino == fstat(self.slot(0))?.st_ino;
                self.slots[to] = Some(look(at, if is_root { "." } else { name })?);
            }
            Step::Make { name, kind, mode, to, .. } => {
                let mode = Mode::from_raw_mode(mode);
                match kind {
                    Kind::File => {
                        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                        drop(openat(at, name, flags, mode)?);
                    }
                    Kind::Directory => mkdirat(at, name, mode)?,
                    Kind::Link(target) => symlinkat(target, at, name)?,
                    Kind::Fifo => mknodat(at, name, FileType::Fifo, mode, 0)?,
                }
                self.slots[to] = Some(look(at, name)?);
            }
            Step::Read { offset, count, .. } => {
                let mut data = vec![0; count as usize];
                let count = open(OpenOptions::new().read(true))?.read_at(&mut data, offset).map_err(errno)?;
                return Ok(bytes(&data[..count]));
            }
            Step::Write { offset, data, .. } => {
                let count = open(OpenOptions::new().write(true))?.write_at(data, offset).map_err(errno)?;
                return Ok(count.to_string());
            }
            Step::SetSize { size, .. } => return done(open(OpenOptions::new().write(true))?.set_len(size)),
            Step::SetMode { mode, .. } => {
                return done(fs::set_permissions(path_of(at), fs::Permissions::from_mode(mode)));
            }
            Step::SetOwner { uid, gid, .. } => return done(chown(path_of(at), Some(uid), Some(gid))),
            Step::Attributes { .. } => {
                let stat = fstat(at)?;
                return Ok(attributes(stat.st_mode, stat.st_nlink, (stat.st_uid, stat.st_gid), stat.st_size as u64));
            }
            Step::Target { .. } => {
                let target = readlinkat(at, "", Vec::new());
                // So the call says that it is no link.
                return Ok(bytes(target.map_err(|_| Errno::INVAL)?.as_bytes()));
            }
            Step::List { .. } => {
                let entries = Dir::read_from(openat(at, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)?;
                let names: Result<Vec<_>, _> =
                    entries.map(|entry| entry.map(|entry| entry.file_name().to_bytes().to_vec())).collect();
                return names.map(listed);
            }
            Step::Link { dir, name, .. } => {
                linkat(CWD, path_of(at), self.slot(dir), name, AtFlags::SYMLINK_FOLLOW)?;
            }
            Step::Rename { name, to, new, .. } => renameat(at, name, self.slot(to), new)?,
            Step::Remove { name, is_directory, .. } => {
                unlinkat(at, name, if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() })?;
            }
            Step::SetXattr { name, value, .. } => setxattr(path_of(at), name, value, XattrFlags::empty())?,
            Step::Xattr { name, .. } => {
                let mut value = [0; 64];
                let length = getxattr(path_of(at), name, &mut value)?;
                return Ok(bytes(&value[..length]));
            }
        }
        Ok(String::new())
    }
}

impl Step {
    /// The slot that it begins with.
    pub fn object(self) -> usize {
        match self {
            Step::Find { dir: slot, .. }
            | Step::Make { dir: slot, .. }
            | Step::Read { file: slot, .. }
            | Step::Write { file: slot, .. }
            | Step::SetSize { file: slot, .. }
            | Step::SetMode { object: slot, .. }
            | Step::SetOwner { object: slot, .. }
            | Step::Attributes { object: slot }
            | Step::Target { link: slot }
            | Step::List { dir: slot }
            | Step::Link { object: slot, .. }
            | Step::Rename { dir: slot, .. }
            | Step::Remove { dir: slot, .. }
            | Step::SetXattr { object: slot, .. }
            | Step::Xattr { object: slot, .. } => slot,
        }
    }
}
