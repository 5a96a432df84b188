//! Odd arguments: each message has the error of the system call with the same arguments, which runs on a plain directory.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use crate::common::{Client, Place, ROOT, Serving};
use ksf_proto::p9::{Data, NO_UID, Names, Request, SetStat, UNLINK_DIRECTORY, open_flag, set_bit};
use ksf_test::acl::{ACCESS_ACL, DEFAULT_ACL, For, acl};
use ksf_test::files::tree;
use ksf_test::skip;
use rustix::fs::{self as call, AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, XattrFlags};
use rustix::io::Result as SysResult;

pub(crate) const FID: u32 = 1;
pub(crate) const FREE: u32 = 2;
const FIFO: u32 = libc::S_IFIFO | 0o600;
const XATTR_BYTES_MAX: usize = 65_536;

/// A message and its system call.
type Row<'a> = (Request<'a>, Result<(), i32>);

fn number<T>(result: SysResult<T>) -> Result<(), i32> {
    result.map(drop).map_err(|errno| errno.raw_os_error())
}

/// The same tree in an export and in a plain directory.
struct Both {
    place: Place,
    /// The plain directory, and `dir` in it.
    path: PathBuf,
    plain: OwnedFd,
    serving: Serving,
    client: Client,
}

impl Both {
    fn new() -> Self {
        let place = Place::new();
        let path = place.beside("plain");
        for at in [&place.path(""), &path] {
            fs::create_dir_all(at.join("dir/inner")).unwrap();
            fs::write(at.join("dir/file"), "").unwrap();
            symlink("file", at.join("dir/link")).unwrap();
        }
        let plain = call::open(path.join("dir"), OFlags::DIRECTORY, Mode::empty()).unwrap();
        let serving = place.serve();
        let mut client = serving.client();
        client.walk(ROOT, ROOT, "dir").unwrap();
        Self { place, path, plain, serving, client }
    }

    /// Compares, with [`FID`] at this name and [`FREE`] at the directory.
    #[track_caller]
    fn compare(&mut self, at: &str, rows: Vec<Row<'_>>) {
        for (request, wanted) in rows {
            self.client.walk(ROOT, FID, at).unwrap();
            self.client.walk(ROOT, FREE, "").unwrap();
            assert_eq!(self.client.does(request), wanted, "{request:?}");
            [FID, FREE].iter().for_each(|fid| self.client.clunk(*fid).unwrap());
        }
    }

    #[track_caller]
    fn compare_trees(&self) {
        assert_eq!(tree(&self.place.path("")), tree(&self.path));
    }

    #[track_caller]
    fn end(self) {
        self.compare_trees();
        self.serving.stop();
    }
}

#[test]
fn names_that_are_none_have_the_errors_of_system_calls() {
    let mut both = Both::new();
    let dir = both.plain.try_clone().unwrap();
    let long = "n".repeat(256);
    for name in ["", ".", "..", &long] {
        let bytes = name.as_bytes();
        let (private, none) = (Mode::RWXU, AtFlags::empty());
        let open = |flags| number(call::openat(&dir, name, OFlags::RDWR | OFlags::CREATE | flags, private));
        let create = |flags| Request::Lcreate { fid: FREE, name: bytes, flags, mode: 0o700, gid: NO_UID };
        let renameat = |oldname, newname| Request::Renameat { olddirfid: ROOT, oldname, newdirfid: ROOT, newname };
        let unlink = |flags| Request::Unlinkat { dirfid: ROOT, name: bytes, flags };
        let device = FileType::Fifo;
        let rows = vec![
            (create(open_flag::READ_WRITE), open(OFlags::empty())),
            (create(open_flag::READ_WRITE | open_flag::EXCLUSIVE), open(OFlags::EXCL)),
            (
                Request::Mkdir { dfid: ROOT, name: bytes, mode: 0o700, gid: NO_UID },
                number(call::mkdirat(&dir, name, private)),
            ),
            (
                Request::Symlink { dfid: ROOT, name: bytes, target: b"x", gid: NO_UID },
                number(call::symlinkat("x", &dir, name)),
            ),
            (
                Request::Mknod { dfid: ROOT, name: bytes, mode: FIFO, major: 0, minor: 0, gid: NO_UID },
                number(call::mknodat(&dir, name, device, private, 0)),
            ),
            (Request::Link { dfid: ROOT, fid: FID, name: bytes }, number(call::linkat(&dir, "file", &dir, name, none))),
            (Request::Rename { fid: FID, dfid: ROOT, name: bytes }, number(call::renameat(&dir, "file", &dir, name))),
            (renameat(b"file", bytes), number(call::renameat(&dir, "file", &dir, name))),
            (renameat(bytes, b"new"), number(call::renameat(&dir, name, &dir, "new"))),
            (unlink(0), number(call::unlinkat(&dir, name, none))),
            (unlink(UNLINK_DIRECTORY), number(call::unlinkat(&dir, name, AtFlags::REMOVEDIR))),
        ];
        assert!(rows.iter().all(|(_, wanted)| wanted.is_err()), "{name:?}: {rows:?}");
        both.compare("file", rows);
        let mut buffer = Vec::new();
        let names = Names::of(&[bytes], &mut buffer).unwrap();
        let found = both.client.does(Request::Walk { fid: ROOT, newfid: FREE, names });
        assert_eq!(found, number(call::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)), "{name:?}");
        if found.is_ok() {
            both.client.clunk(FREE).unwrap();
        }
    }
    both.end();
}

#[test]
fn odd_arguments_have_the_errors_of_system_calls() {
    let mut both = Both::new();
    let dir = both.plain.try_clone().unwrap();
    let open = |name: &str, flags| call::openat(&dir, name, flags | OFlags::NOFOLLOW, Mode::empty());
    for name in ["file", "inner", "link"] {
        let at = name.as_bytes();
        both.compare(
            name,
            vec![
                (Request::Rename { fid: FID, dfid: ROOT, name: at }, number(call::renameat(&dir, name, &dir, name))),
                (
                    Request::Renameat { olddirfid: ROOT, oldname: at, newdirfid: ROOT, newname: at },
                    number(call::renameat(&dir, name, &dir, name)),
                ),
                (Request::Readlink { fid: FID }, number(call::readlinkat(&dir, name, Vec::new()))),
                (Request::Lopen { fid: FID, flags: OFlags::DIRECTORY.bits() }, number(open(name, OFlags::DIRECTORY))),
                (Request::Lopen { fid: FID, flags: open_flag::WRITE }, number(open(name, OFlags::WRONLY))),
                (Request::Lopen { fid: FID, flags: open_flag::TRUNCATE }, number(open(name, OFlags::TRUNC))),
            ],
        );
        for nanos in [1_000_000_000, 999_999_999] {
            let last_modification = Timespec { tv_sec: 1, tv_nsec: nanos };
            let times = Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification };
            let set = call::utimensat(&dir, name, &times, AtFlags::SYMLINK_NOFOLLOW);
            let valid = set_bit::MTIME | set_bit::MTIME_SET;
            let to = SetStat { valid, mtime_seconds: 1, mtime_nanos: nanos as u64, ..SetStat::default() };
            both.compare(name, vec![(Request::Setattr { fid: FID, to }, number(set))]);
        }
        // truncate(2), of a link itself as of a FIFO.
        let wanted = match name {
            "file" => Ok(()),
            "inner" => Err(libc::EISDIR),
            _ => Err(libc::EINVAL),
        };
        let to = SetStat { valid: set_bit::SIZE, size: 1, ..SetStat::default() };
        both.compare(name, vec![(Request::Setattr { fid: FID, to }, wanted)]);
    }
    rustix::fs::ftruncate(open("file", OFlags::WRONLY).unwrap(), 1).unwrap();
    for flags in [1, 0x100, 0x400, 0x1000, UNLINK_DIRECTORY | 1, u32::MAX] {
        for name in ["file", "inner"] {
            let wanted = number(call::unlinkat(&dir, name, AtFlags::from_bits_retain(flags)));
            assert!(wanted.is_err());
            let request = Request::Unlinkat { dirfid: ROOT, name: name.as_bytes(), flags };
            both.compare("file", vec![(request, wanted)]);
        }
    }
    let node = |mode| Request::Mknod { dfid: ROOT, name: b"node", mode, major: 0, minor: 0, gid: NO_UID };
    for kind in [FileType::Directory, FileType::Symlink, FileType::Unknown, FileType::RegularFile, FileType::Fifo] {
        let mode = kind.as_raw_mode() | 0o640;
        let made = number(call::mknodat(&dir, "node", kind, Mode::from_raw_mode(0o640), 0));
        both.compare("file", vec![(node(mode), made)]);
        if made.is_ok() {
            call::chmodat(&dir, "node", Mode::from_raw_mode(0o640), AtFlags::empty()).unwrap();
            assert_eq!(both.client.does(node(mode)), Err(libc::EEXIST));
            both.compare_trees();
            call::unlinkat(&dir, "node", AtFlags::empty()).unwrap();
            both.client.does(Request::Unlinkat { dirfid: ROOT, name: b"node", flags: 0 }).unwrap();
        }
    }
    // mknod(2): no type is that of a regular file.
    both.client.does(node(0o640)).unwrap();
    assert!(fs::metadata(both.place.path("dir/node")).unwrap().is_file());
    both.client.does(Request::Unlinkat { dirfid: ROOT, name: b"node", flags: 0 }).unwrap();
    both.end();
}

#[test]
fn open_fids_have_the_errors_of_descriptors() {
    let mut both = Both::new();
    let dir = both.plain.try_clone().unwrap();
    for (name, flags) in [("file", 0), ("file", 1), ("file", 2), ("inner", 0)] {
        let file = call::openat(&dir, name, OFlags::from_bits_retain(flags), Mode::empty()).unwrap();
        both.client.open(FID, name, flags).unwrap();
        let mut memory = Vec::with_capacity(4096);
        let listed = call::RawDir::new(&file, memory.spare_capacity_mut())
            .next()
            .unwrap_or(Err(rustix::io::Errno::NOENT))
            .map(drop);
        let size = SetStat { valid: set_bit::SIZE, size: 0, ..SetStat::default() };
        for (request, wanted) in [
            (Request::Read { fid: FID, offset: 0, count: 1 }, number(rustix::io::pread(&file, &mut [0], 0))),
            (Request::Write { fid: FID, offset: 0, data: Data(b"x") }, number(rustix::io::pwrite(&file, b"x", 0))),
            (Request::Readdir { fid: FID, offset: 0, count: 4096 }, number(listed)),
            (Request::Fsync { fid: FID, datasync: 0 }, number(call::fsync(&file))),
            (Request::Fsync { fid: FID, datasync: 1 }, number(call::fdatasync(&file))),
        ] {
            assert_eq!(both.client.does(request), wanted, "{request:?} for {name}, flags {flags}");
        }
        if flags > 0 {
            both.client.does(Request::Setattr { fid: FID, to: size }).unwrap();
            call::ftruncate(&file, 0).unwrap();
        }
        both.client.clunk(FID).unwrap();
    }
    both.end();
}

/// Sets a value of [`FID`] by all its messages. Returns the first error.
pub(crate) fn set_xattr(client: &mut Client, name: &[u8], value: &[u8], flags: u32) -> Result<(), i32> {
    let fid = FREE;
    client.walk(FID, fid, "").unwrap();
    if let Err(errno) = client.does(Request::Xattrcreate { fid, name, size: value.len() as u64, flags }) {
        client.clunk(fid).unwrap();
        return Err(errno);
    }
    client.does(Request::Write { fid, offset: 0, data: Data(value) }).unwrap();
    client.clunk(fid)
}

#[test]
fn extended_attributes_have_the_errors_of_system_calls() {
    let mut both = Both::new();
    let plain = both.path.join("dir");
    let (long, longer) = (format!("user.{}", "n".repeat(250)), format!("user.{}", "n".repeat(251)));
    let sizes = [1, XATTR_BYTES_MAX, XATTR_BYTES_MAX + 1].map(|size| vec![b'x'; size]);
    for at in ["file", "inner", "link"] {
        both.client.walk(ROOT, FID, at).unwrap();
        let path = plain.join(at);
        for name in ["", "none", "none.x", "user", "user.", "user.x", &long, &longer] {
            for value in &sizes {
                for flags in [0, 1, 2, 3, 4] {
                    let set = call::lsetxattr(&path, name, value, XattrFlags::from_bits_retain(flags));
                    let told = set_xattr(&mut both.client, name.as_bytes(), value, flags);
                    assert_eq!(told, number(set), "{at} {name}, {} bytes, flags {flags}", value.len());
                }
            }
            if !name.is_empty() {
                let mut read = vec![0; XATTR_BYTES_MAX];
                let wanted = number(call::lgetxattr(&path, name, &mut read));
                let request = Request::Xattrwalk { fid: FID, newfid: FREE, name: name.as_bytes() };
                let told = both.client.does(request);
                assert_eq!(told, wanted, "{at} {name}");
                if told.is_ok() {
                    both.client.clunk(FREE).unwrap();
                }
            }
            // An empty value that replaces is removexattr(2), twice.
            for _ in 0..2 {
                let wanted = number(call::lremovexattr(&path, name));
                assert_eq!(set_xattr(&mut both.client, name.as_bytes(), b"", 2), wanted, "{at} {name}");
            }
        }
        both.client.clunk(FID).unwrap();
    }
    both.end();
}

/// Linux' client reads and sets ACLs by these attributes (`posixacl`).
#[test]
fn acls_have_the_errors_of_system_calls() {
    let mut both = Both::new();
    let (mut read, plain) = (vec![0; 256], both.path.join("dir"));
    let whole = acl(&[(For::Owner, 6), (For::User(1001), 6), (For::OwnGroup, 4), (For::Mask, 5), (For::Others, 1)]);
    let values = [
        whole.clone(),
        // As many permissions as a mode has.
        acl(&[(For::Owner, 6), (For::OwnGroup, 4), (For::Others, 1)]),
        // Without a mask, without an owner, in another order, of no permissions that there are.
        acl(&[(For::Owner, 6), (For::User(1001), 6), (For::OwnGroup, 4), (For::Others, 1)]),
        acl(&[(For::OwnGroup, 4), (For::Others, 1)]),
        acl(&[(For::OwnGroup, 4), (For::Owner, 6), (For::Others, 1)]),
        acl(&[(For::Owner, 8), (For::OwnGroup, 4), (For::Others, 1)]),
        // Of another version, and cut.
        [&[1], &whole[1..]].concat(),
        whole[..whole.len() - 1].to_vec(),
        acl(&[]),
    ];
    let set = call::lsetxattr(plain.join("file"), ACCESS_ACL, &whole, XattrFlags::empty());
    if number(set) == Err(libc::EOPNOTSUPP) {
        return skip("needs a file system with ACLs");
    }
    call::lremovexattr(plain.join("file"), ACCESS_ACL).unwrap();
    for at in ["file", "inner", "link"] {
        both.client.walk(ROOT, FID, at).unwrap();
        let path = plain.join(at);
        for name in [ACCESS_ACL, DEFAULT_ACL] {
            for (value, flags) in values.iter().flat_map(|value| [0, 1, 2].map(|flags| (value, flags))) {
                let set = number(call::lsetxattr(&path, name, value, XattrFlags::from_bits_retain(flags)));
                let told = set_xattr(&mut both.client, name.as_bytes(), value, flags);
                assert_eq!(told, set, "{at} {name} {value:?}, flags {flags}");
                let found = call::lgetxattr(&path, name, &mut read).map(|length| read[..length].to_vec());
                let request = Request::Xattrwalk { fid: FID, newfid: FREE, name: name.as_bytes() };
                let told = both.client.does(request).map(|()| both.client.read(FREE, 0, 256).unwrap());
                assert_eq!(told, found.map_err(|errno| errno.raw_os_error()), "{at} {name}");
                if told.is_ok() {
                    both.client.clunk(FREE).unwrap();
                }
            }
        }
        // An empty value that replaces is removexattr(2), twice.
        for name in [ACCESS_ACL, DEFAULT_ACL].repeat(2) {
            let wanted = number(call::lremovexattr(&path, name));
            assert_eq!(set_xattr(&mut both.client, name.as_bytes(), b"", 2), wanted, "{at} {name}");
        }
        both.client.clunk(FID).unwrap();
    }
    both.end();
}
