//! Check that a directory lies below the root of an export. A local program may have moved it away, and `..` leads out of it then.
//!
//! Going up level by level takes three system calls for each, and clients make directories thousands deep. One call returns the
//! path of an open directory (`/proc/self/fd`, d_path()), whose length in names is the distance to the root, and one more goes that
//! far up. Only the inode number found there decides: in a bind mount, the path of a directory that was moved out of the mount may
//! look as if it lay below the root. The kernel returns no path above 4095 bytes; the check then goes up until it does.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode as Permissions, OFlags, RawDir, ResolveFlags};
use rustix::io::{Errno, Result as SysResult};

use crate::attr::ASKED;
use crate::attr_cache::AttrCache;
use crate::error::{ErrorKind, FsError};
use crate::export::Export;
use crate::layer::{Fs, INSIDE, OBJECT, process_name};

/// Levels that one call goes up: a path has 4095 bytes at most.
const UP_MAX: usize = 1024;
/// Looks before a directory is outside: a local program may move it, or the root, between the steps of one look.
const TRIES: usize = 4;

/// Opens the folder that a folder lies in, on the same mount.
pub(crate) fn open_up(folder: &OwnedFd) -> SysResult<OwnedFd> {
    go_up(folder, 1)
}

impl Fs {
    /// The folder above a folder of an export, as `open_up` opens it. `None`: it is the root, with a mount on it.
    pub(crate) fn above(
        &self,
        export: &Export,
        folder: &OwnedFd,
        mut open_up: impl FnMut() -> Result<OwnedFd, FsError>,
    ) -> Result<Option<OwnedFd>, FsError> {
        match open_up() {
            Err(error) if error.kind() == ErrorKind::MountPoint => {}
            above => return above.map(Some),
        }
        // The kernel leads to no other folder below a mount than the root.
        self.check_inside(export, folder)?;
        // Or the mount was on another folder, and is gone now.
        match open_up() {
            Err(error) if error.kind() == ErrorKind::MountPoint => Ok(None),
            above => above.map(Some),
        }
    }

    /// Fails with [`ErrorKind::Stale`] unless the root of the export is above the folder, or is it, and with
    /// [`ErrorKind::MountPoint`] if a mount on a folder between the two hides the way up.
    pub(crate) fn check_inside(&self, export: &Export, folder: &OwnedFd) -> Result<(), FsError> {
        let (process, root) = (&self.process, (export.root_inode, export.device));
        let mut outside = ErrorKind::Stale;
        for _ in 0..TRIES {
            let root_path = read_path(process, &export.root_descriptor)?;
            let look = Look { process, attrs: &self.attrs, root, root_path };
            match look.at(folder) {
                Ok(true) => return Ok(()),
                Ok(false) => outside = ErrorKind::Stale,
                // Also where a local program has moved it to a place higher up meanwhile.
                Err(Errno::XDEV) => outside = ErrorKind::MountPoint,
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(errno.into()),
                Err(_) => return Err(ErrorKind::Stale.into()),
            }
        }
        Err(outside.into())
    }
}

/// Position of a directory by its path.
enum Place {
    /// Below the root, by this number of levels.
    Below(usize),
    /// The root is below it.
    Above,
    Elsewhere,
    /// The path is longer than the kernel returns.
    Deep,
}

struct Look<'a> {
    /// `/proc/self/fd`.
    process: &'a OwnedFd,
    attrs: &'a AttrCache,
    /// Inode and device of the root.
    root: (u64, (u32, u32)),
    root_path: Vec<u8>,
}

impl Look<'_> {
    /// False: the root is not above it, or one of them was moved meanwhile. Fails with EXDEV at a mount in the way.
    fn at(&self, folder: &OwnedFd) -> SysResult<bool> {
        let (mut place, mut above) = (self.place(folder)?, None);
        let (mut step, mut overshot) = (1, false);
        loop {
            let at = above.as_ref().unwrap_or(folder);
            match place {
                Place::Below(levels) => return self.is_root_above(at, levels),
                Place::Above | Place::Elsewhere => return Ok(false),
                Place::Deep => {}
            }
            let next = go_up(at, step).and_then(|next| Ok((self.place(&next)?, Some(next))));
            match next {
                // The root lies between.
                Ok((Place::Above, _)) | Err(Errno::XDEV) if step > 1 => (step, overshot) = (step / 2, true),
                next => {
                    (place, above) = next?;
                    if !overshot {
                        step = (2 * step).min(UP_MAX);
                    }
                }
            }
        }
    }

    fn place(&self, at: &OwnedFd) -> SysResult<Place> {
        match read_path(self.process, at) {
            Ok(path) => Ok(place_of(&self.root_path, &path)),
            Err(Errno::NAMETOOLONG) => Ok(Place::Deep),
            Err(errno) => Err(errno),
        }
    }

    fn is_root_above(&self, folder: &OwnedFd, mut levels: usize) -> SysResult<bool> {
        let mut above = None;
        while levels > 0 {
            let step = levels.min(UP_MAX);
            let at = above.as_ref().unwrap_or(folder);
            above = match go_up(at, step) {
                Err(Errno::XDEV) if step == levels => return self.is_covered_root_above(at, levels),
                next => Some(next?),
            };
            levels -= step;
        }
        Ok(inode(above.as_ref().unwrap_or(folder))? == self.root)
    }

    /// [`Look::is_root_above`] for a root with a mount on it.
    fn is_covered_root_above(&self, folder: &OwnedFd, levels: usize) -> SysResult<bool> {
        let above = match levels {
            1 => None,
            _ => Some(go_up(folder, levels - 1)?),
        };
        let child = above.as_ref().unwrap_or(folder);
        Ok((self.entry_up(child)?, inode(child)?.1) == (Some(self.root.0), self.root.1))
    }

    /// The inode number of a directory's entry `..`, whatever is mounted there. File systems list it first, and ext4 anywhere in a
    /// directory of one block, whose 341 entries fit into the buffer. It is filled once: a directory may be long.
    fn entry_up(&self, folder: &OwnedFd) -> SysResult<Option<u64>> {
        let open = |more| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
            rustix::fs::openat(self.process, process_name(folder), flags, Permissions::empty())
        };
        let (folder, _changing) = match open(OFlags::NOATIME) {
            // Only the owner and root read without a change of the access time.
            Err(Errno::PERM) => (open(OFlags::empty())?, Some(self.attrs.changing_unknown())),
            folder => (folder?, None),
        };
        let mut memory = [MaybeUninit::uninit(); 8192];
        let mut entries = RawDir::new(folder, &mut memory);
        while let Some(entry) = entries.next().transpose()? {
            if entry.file_name() == c".." {
                return Ok(Some(entry.ino()));
            }
            if entries.is_buffer_empty() {
                break;
            }
        }
        Ok(None)
    }
}

/// Number and device of an inode.
pub(crate) fn inode(object: &OwnedFd) -> SysResult<(u64, (u32, u32))> {
    let stat = rustix::fs::statx(object, c"", AtFlags::EMPTY_PATH, ASKED)?;
    Ok((stat.stx_ino, (stat.stx_dev_major, stat.stx_dev_minor)))
}

fn place_of(root: &[u8], path: &[u8]) -> Place {
    // The root of all is written "/", others have none at their end.
    let below = |above: &[u8], path: &[u8]| {
        let above = above.strip_suffix(b"/").unwrap_or(above);
        let rest = path.strip_prefix(above).filter(|rest| rest.first() == Some(&b'/'))?;
        Some(if rest == b"/" { 0 } else { rest.iter().filter(|byte| **byte == b'/').count() })
    };
    match below(root, path) {
        _ if root == path => Place::Below(0),
        Some(levels) => Place::Below(levels),
        None if below(path, root).is_some() => Place::Above,
        None => Place::Elsewhere,
    }
}

fn read_path(process: &OwnedFd, at: &OwnedFd) -> SysResult<Vec<u8>> {
    Ok(rustix::fs::readlinkat(process, process_name(at), Vec::new())?.into_bytes())
}

/// Opens the directory `levels` above another one, on the same mount. `levels`: not 0.
fn go_up(folder: &OwnedFd, levels: usize) -> SysResult<OwnedFd> {
    #[cfg(test)]
    tests::OPENED.set(tests::OPENED.get() + 1);
    let resolve = INSIDE.difference(ResolveFlags::BENEATH);
    rustix::fs::openat2(
        folder,
        "../".repeat(levels).as_str(),
        OBJECT | OFlags::DIRECTORY,
        Permissions::empty(),
        resolve,
    )
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::File;

    use ksf_test::{own_run_or_skip, root_or_skip, succeeds};

    use super::*;
    use crate::common::{Served, on_lane};
    use crate::credential::Identity;
    use crate::layer::name_error;

    thread_local! {
        /// Directories that this thread has opened above others.
        pub(super) static OPENED: Cell<u32> = const { Cell::new(0) };
    }

    fn open(path: &str) -> OwnedFd {
        File::open(path).unwrap().into()
    }

    /// Makes directories in each other, and opens the last.
    fn chain(from: &OwnedFd, name: &str, depth: usize) -> OwnedFd {
        let mut at = from.try_clone().unwrap();
        for _ in 0..depth {
            rustix::fs::mkdirat(&at, name, Permissions::RWXU).unwrap();
            at = rustix::fs::openat(&at, name, OBJECT | OFlags::DIRECTORY, Permissions::empty()).unwrap();
        }
        at
    }

    /// Removes such directories, from the last to the first.
    fn unchain(mut at: OwnedFd, name: &str, depth: usize) {
        for _ in 0..depth {
            let above = go_up(&at, 1).unwrap();
            rustix::fs::unlinkat(&above, name, AtFlags::REMOVEDIR).unwrap();
            at = above;
        }
    }

    #[test]
    fn a_path_says_where_a_directory_is() {
        let place = |root: &str, path: &str| match place_of(root.as_bytes(), path.as_bytes()) {
            Place::Below(levels) => levels as i32,
            Place::Above => -1,
            Place::Elsewhere => -2,
            Place::Deep => unreachable!(),
        };
        for (root, path, expected) in [
            ("/a/b", "/a/b", 0),
            ("/a/b", "/a/b/c/d", 2),
            ("/a/b", "/a/bc", -2),
            ("/a/b", "/a", -1),
            ("/a/b", "/", -1),
            ("/a/b", "/c", -2),
            ("/", "/", 0),
            ("/", "/a", 1),
            ("/", "/a/b", 2),
        ] {
            assert_eq!(place(root, path), expected, "{path} for {root}");
        }
    }

    /// With an empty block, a full one of ext4, and more.
    #[test]
    fn a_directory_of_any_length_names_the_one_above() {
        let (outer, process) = (ksf_test::folder(), open("/proc/self/fd"));
        let above = inode(&open(outer.to_str().unwrap())).unwrap().0;
        let path = outer.join("folder");
        std::fs::create_dir(&path).unwrap();
        let folder = open(path.to_str().unwrap());
        let look = Look { process: &process, attrs: &AttrCache::new(0), root: (0, (0, 0)), root_path: Vec::new() };
        for number in 0..1000 {
            if number % 20 == 0 || number == 339 {
                assert_eq!(look.entry_up(&folder), Ok(Some(above)), "{number} names");
            }
            File::create(path.join(format!("{number:x}"))).unwrap();
        }
    }

    /// As a server without root that is not the owner: reading may change the access time, so attributes from before are forgotten.
    #[test]
    fn a_directory_of_another_user_names_the_one_above() {
        let Some(()) = root_or_skip("identities") else { return };
        let (served, process, attrs) = (Served::open_to_all(), open("/proc/self/fd"), AttrCache::new(1));
        std::fs::create_dir(served.path("folder")).unwrap();
        let folder = open(served.path("folder").to_str().unwrap());
        let look = Look { process: &process, attrs: &attrs, root: (0, (0, 0)), root_path: Vec::new() };
        on_lane(|lane| {
            let (root, attr) = (served.root(), served.fs.getattr(lane, served.root()).unwrap());
            for (uid, is_kept) in [(0, true), (61_234, false)] {
                attrs.filling(root).unwrap().keep(root, &attr);
                let user = Identity { uid, ..Identity::own() };
                assert_eq!(lane.as_caller(&user, || look.entry_up(&folder)).unwrap(), Ok(Some(attr.fileid)), "{uid}");
                assert_eq!(attrs.get(root).is_some(), is_kept, "{uid}");
            }
        });
    }

    /// A local program takes the mount away before the check.
    #[test]
    fn the_folder_below_a_mount_that_goes_is_above_and_not_the_root() {
        let mounted = || {
            let Some(()) = own_run_or_skip("mounts of its own") else { return };
            let served = Served::open_to_all();
            std::fs::create_dir_all(served.path("a/b")).unwrap();
            let (path, [a, b]) = (served.path("a"), ["a", "a/b"].map(|name| open(served.path(name).to_str().unwrap())));
            succeeds(&["mount", "-t", "tmpfs", "tmpfs", path.to_str().unwrap()]);
            let mut looks = 0;
            let above = served.fs.above(&served.export, &b, || {
                let above = open_up(&b).map_err(name_error);
                looks += 1;
                if looks == 1 {
                    succeeds(&["umount", path.to_str().unwrap()]);
                }
                above
            });
            let above = above.unwrap().expect("it is not the root");
            assert_eq!((inode(&above), looks), (inode(&a), 2));
        };
        std::thread::scope(|scope| scope.spawn(mounted).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    /// Inside and outside, with paths that the kernel tells and with longer ones.
    #[test]
    fn a_directory_of_any_depth_is_known_to_be_inside() {
        let (outer, process) = (ksf_test::folder(), open("/proc/self/fd"));
        let make = |name: &str| {
            let path = format!("{}/{name}", outer.display());
            std::fs::create_dir(&path).unwrap();
            open(&path)
        };
        let (root, beside) = (make("root"), make("beside"));
        let stat = rustix::fs::statx(&root, c"", AtFlags::EMPTY_PATH, ASKED).unwrap();
        let look = Look {
            process: &process,
            attrs: &AttrCache::new(0),
            root: (stat.stx_ino, (stat.stx_dev_major, stat.stx_dev_minor)),
            root_path: read_path(&process, &root).unwrap(),
        };
        let at = |folder: &OwnedFd| {
            OPENED.set(0);
            (look.at(folder), OPENED.get())
        };
        // One call for each 1,024 levels, or a search for the first path that the kernel returns.
        assert_eq!(at(&root), (Ok(true), 0));
        assert_eq!(at(&open(outer.to_str().unwrap())), (Ok(false), 0));
        let long = "n".repeat(255);
        for (name, depth) in [("d", 1), ("d", 2100), (long.as_str(), 15), (&long, 17), (&long, 100)] {
            for (folder, expected) in [(&root, Ok(true)), (&beside, Ok(false))] {
                let end = chain(folder, name, depth);
                let (found, opened) = at(&end);
                assert_eq!(found, expected, "{depth} of {} bytes", name.len());
                let opened_max = if depth > 15 { 12 } else { u32::from(expected == Ok(true)) };
                assert!(opened <= opened_max, "{opened} opened from {depth} of {} bytes", name.len());
                unchain(end, name, depth);
            }
        }
    }
}
