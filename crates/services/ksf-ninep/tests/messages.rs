//! What each message does, and how it fails.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

use crate::common::{Client, FIDS_MAX, Place, ROOT};
use ksf::engine::EngineKind;
use ksf_fs::Squash;
use ksf_proto::p9::{Data, GetLock, Lock, NO_FID, NO_UID, Names, Reply, Request, SetStat, open_flag, qid_kind};
use ksf_test::{is_root, own_run_or_skip, root_or_skip, succeeds, wait_until};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

const WRITE: u32 = 1;
const BOTH: u32 = 2;

/// Nobody's id that is not used elsewhere here.
pub(crate) const USER: u32 = 61_234;

#[test]
fn an_export_is_attached_by_its_path_and_what_lies_below_it_too() {
    let place = Place::new();
    fs::create_dir_all(place.path("a/b")).unwrap();
    fs::write(place.path("file"), "").unwrap();
    symlink("a", place.path("link")).unwrap();
    let other = place.beside("other");
    let more = ksf_ninep::ExportSettings { path: other.clone(), ..place.export() };
    let serving = place.serve_all(EngineKind::Epoll, vec![place.export(), more]);
    let mut client = serving.connect();
    client.version();
    let export = place.path("").canonicalize().unwrap();
    let path = |name: &str| format!("{}{name}", export.display()).into_bytes();
    let root = client.attach(1, 0, &path("")).unwrap();
    assert_eq!((root.kind, root.version, root.path), (qid_kind::DIRECTORY, 0, fs::metadata(&export).unwrap().ino()));
    let below = client.attach(2, 0, &path("/a/b")).unwrap();
    assert_eq!(below.path, fs::metadata(export.join("a/b")).unwrap().ino());
    client.attach(3, 0, other.to_str().unwrap().as_bytes()).unwrap();
    for (fid, aname, errno) in [
        (4, path("/none"), libc::ENOENT),
        (4, path("/a/../.."), libc::ENOENT),
        (4, path("/file"), libc::ENOTDIR),
        (4, path("/link"), libc::ENOTDIR),
        (4, path("/link/b"), libc::ENOTDIR),
        (4, b"/".to_vec(), libc::ENOENT),
        (4, b"".to_vec(), libc::ENOENT),
        (1, path(""), libc::EINVAL),
        (NO_FID, path(""), libc::EINVAL),
    ] {
        assert_eq!(client.attach(fid, 0, &aname), Err(errno), "{fid} {}", String::from_utf8_lossy(&aname));
    }
    // What could not be attached left its fid free.
    client.attach(4, 0, &path("/a")).unwrap();
    let auth = Request::Auth { afid: 9, uname: b"", aname: b"", n_uname: 0 };
    assert_eq!(client.does(auth), Err(libc::ENOENT));
    let with_auth = Request::Attach { fid: 5, afid: 9, uname: b"", aname: &path(""), n_uname: 0 };
    assert_eq!(client.does(with_auth), Err(libc::EBADF));
    serving.stop();
}

#[test]
fn exports_are_for_their_clients() {
    let place = Place::new();
    let mut export = place.export();
    export.clients.add("192.0.2.0/24".parse().unwrap());
    let serving = place.serve_all(EngineKind::Epoll, vec![export]);
    let mut client = serving.connect();
    client.version();
    assert_eq!(client.attach(1, 0, b""), Err(libc::EACCES));
    serving.stop();
}

#[test]
fn a_walk_goes_as_far_as_there_are_names() {
    let place = Place::new();
    fs::create_dir_all(place.path("a/b/c")).unwrap();
    fs::write(place.path("a/file"), "").unwrap();
    symlink("a", place.path("link")).unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    let inode = |path: &str| fs::symlink_metadata(place.path(path)).unwrap().ino();
    let qids = client.walk(ROOT, 1, "a/b/c").unwrap();
    assert_eq!(qids.iter().map(|qid| qid.path).collect::<Vec<_>>(), [inode("a"), inode("a/b"), inode("a/b/c")]);
    // A part of the names: no fid comes of it.
    assert_eq!(client.walk(ROOT, 2, "a/b/none/more").unwrap().len(), 2);
    assert_eq!(client.stat(2), Err(libc::EBADF));
    assert_eq!(client.walk(ROOT, 2, "none"), Err(libc::ENOENT));
    assert_eq!(client.walk(ROOT, 2, "a/file/more").unwrap().len(), 2);
    assert_eq!(client.walk(ROOT, 2, &"none/".repeat(16)), Err(libc::ENOENT));
    // A link is found and not followed.
    assert_eq!(client.walk(ROOT, 2, "link").unwrap()[0].kind, qid_kind::SYMLINK);
    assert_eq!(client.walk(2, 3, "b"), Err(libc::ENOTDIR));
    // Nothing is above the root.
    assert_eq!(client.walk(1, 3, "../../../../..").unwrap().last().unwrap().path, inode(""));
    // Clones, and walks in place.
    assert_eq!(client.walk(1, 4, ""), Ok(vec![]));
    assert_eq!(client.stat(4).unwrap().qid.path, inode("a/b/c"));
    client.walk(4, 4, "..").unwrap();
    assert_eq!((client.stat(4).unwrap().qid.path, client.stat(1).unwrap().qid.path), (inode("a/b"), inode("a/b/c")));
    assert_eq!(client.walk(4, 4, "none"), Err(libc::ENOENT));
    assert_eq!(client.walk(4, 4, ""), Ok(vec![]));
    assert_eq!(client.stat(4).unwrap().qid.path, inode("a/b"));
    for (fid, newfid, path, errno) in [
        (ROOT, 1, "a", libc::EINVAL),
        (ROOT, 1, "", libc::EINVAL),
        (ROOT, NO_FID, "a", libc::EINVAL),
        (99, 98, "a", libc::EBADF),
        (99, 98, "", libc::EBADF),
        (99, 99, "", libc::EBADF),
        (ROOT, 98, "b\0", libc::EINVAL),
    ] {
        assert_eq!(client.walk(fid, newfid, path), Err(errno), "{fid} {newfid} {path}");
    }
    let long = "n".repeat(256);
    assert_eq!(client.walk(ROOT, 98, &long), Err(libc::ENAMETOOLONG));
    // An open fid is walked from, not in place.
    client.does(Request::Lopen { fid: 4, flags: 0 }).unwrap();
    assert_eq!(client.walk(4, 4, "c"), Err(libc::EINVAL));
    client.walk(4, 5, "c").unwrap();
    client.walk(4, 6, "").unwrap();
    client.does(Request::Lopen { fid: 6, flags: 0 }).unwrap();
    serving.stop();
}

#[test]
fn a_walk_up_ends_at_the_root_below_a_mount() {
    let inside = || {
        let Some(()) = own_run_or_skip("mounts of its own") else { return };
        let place = Place::new();
        fs::create_dir_all(place.path("a/b")).unwrap();
        let serving = place.serve();
        let mut client = serving.client();
        client.walk(ROOT, 1, "a/b").unwrap();
        let [root, a] = ["", "a"].map(|name| fs::metadata(place.path(name)).unwrap().ino());
        let export = place.path("");
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", export.to_str().unwrap()]);
        let up = client.walk(1, 2, "../../..").unwrap();
        assert_eq!(up.iter().map(|qid| qid.path).collect::<Vec<_>>(), [a, root, root]);
        serving.stop();
        succeeds(&["umount", export.to_str().unwrap()]);
    };
    std::thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn attributes_are_those_of_the_file() {
    let place = Place::new();
    fs::write(place.path("file"), "12345").unwrap();
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o640)).unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    let (stat, wanted) = (client.stat(1).unwrap(), fs::metadata(place.path("file")).unwrap());
    assert_eq!((stat.mode, stat.size, stat.nlink), (wanted.mode(), 5, 1));
    assert_eq!((stat.uid, stat.gid, stat.blocks), (wanted.uid(), wanted.gid(), wanted.blocks()));
    assert_eq!((stat.mtime_seconds as i64, stat.mtime_nanos as i64), (wanted.mtime(), wanted.mtime_nsec()));
    assert_eq!(stat.valid, 0x7ff);
    assert_ne!(stat.qid.version, 0);
    fs::write(place.path("file"), "123456").unwrap();
    let later = client.stat(1).unwrap();
    assert_ne!(later.qid.version, stat.qid.version);
    assert_eq!(later.qid.path, stat.qid.path);
    let room = client.ask(Request::Statfs { fid: 1 }, |reply| match reply {
        Reply::Statfs { stat } => stat,
        other => panic!("{other:?}"),
    });
    let room = room.unwrap();
    assert!(room.blocks > 0 && room.blocks >= room.blocks_free && room.name_bytes_max == 255, "{room:?}");
    assert_eq!(client.stat(2), Err(libc::EBADF));
    assert_eq!(client.does(Request::Statfs { fid: 2 }), Err(libc::EBADF));
    serving.stop();
}

#[test]
fn files_are_read_as_far_as_they_go() {
    let place = Place::new();
    let content: Vec<u8> = (0..300_000_u32).map(|at| (at / 3) as u8).collect();
    fs::write(place.path("file"), &content).unwrap();
    symlink("file", place.path("link")).unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    assert_eq!(client.walk(ROOT, 1, "file").map(|qids| qids.len()), Ok(1));
    assert_eq!(client.read(1, 0, 10), Err(libc::EBADF), "it is not open");
    let iounit = client.ask(Request::Lopen { fid: 1, flags: 0 }, |reply| match reply {
        Reply::Lopen { iounit, .. } => iounit,
        other => panic!("{other:?}"),
    });
    assert_eq!(iounit, Ok((1 << 20) - 24));
    assert_eq!(client.does(Request::Lopen { fid: 1, flags: 0 }), Err(libc::EINVAL), "it is open");
    assert_eq!(client.read(1, 0, 0).unwrap(), b"");
    assert_eq!(client.read(1, 7, 10).unwrap(), content[7..17]);
    assert!(client.read(1, 0, u32::MAX).unwrap() == content);
    assert_eq!(client.read(1, 299_990, 4096).unwrap(), content[299_990..]);
    assert_eq!(client.read(1, 300_000, 4096).unwrap(), b"");
    assert_eq!(client.read(1, u64::MAX, u32::MAX).unwrap(), b"");
    let write = Request::Write { fid: 1, offset: 0, data: Data(b"x") };
    assert_eq!(client.does(write), Err(libc::EBADF), "it is open for reading");
    assert_eq!(client.list(1, 0, 4096), Err(libc::ENOTDIR));
    client.walk(ROOT, 2, "link").unwrap();
    let target = client.ask(Request::Readlink { fid: 2 }, |reply| match reply {
        Reply::Readlink { target } => target.to_vec(),
        other => panic!("{other:?}"),
    });
    assert_eq!(target.unwrap(), b"file");
    assert_eq!(client.does(Request::Lopen { fid: 2, flags: 0 }), Err(libc::ELOOP));
    assert_eq!(client.does(Request::Readlink { fid: 1 }), Err(libc::EINVAL));
    client.open(3, "", 0).unwrap();
    assert_eq!(client.read(3, 0, 10), Err(libc::EISDIR));
    assert_eq!(client.open(4, "", WRITE), Err(libc::EISDIR));
    assert_eq!(client.open(5, "file", 0o200_000), Err(libc::ENOTDIR));
    serving.stop();
}

#[test]
fn messages_have_the_length_that_was_agreed_on() {
    let place = Place::new();
    fs::write(place.path("file"), vec![7; 100_000]).unwrap();
    (0..200).for_each(|at| fs::write(place.path(&format!("entry-{at}")), "").unwrap());
    // Rreadlink of the one is as long as a message may be.
    symlink("n".repeat(4096 - 9), place.path("fits")).unwrap();
    symlink("n".repeat(4096 - 8), place.path("longer")).unwrap();
    let serving = place.serve();
    let mut client = serving.connect();
    client.does(Request::Version { msize: 4096, version: b"9P2000.L" }).unwrap();
    client.attach(ROOT, 0, b"").unwrap();
    client.open(1, "file", BOTH).unwrap();
    assert_eq!(client.read(1, 0, u32::MAX).unwrap().len(), 4096 - 11);
    client.open(2, "", 0).unwrap();
    let bytes: usize = client.list(2, 0, u32::MAX).unwrap().iter().map(|(name, ..)| 24 + name.len()).sum();
    assert!((4000..=4096 - 11).contains(&bytes), "{bytes}");
    let fits = vec![8; 4096 - 23];
    client.does(Request::Write { fid: 1, offset: 0, data: Data(&fits) }).unwrap();
    let longer = vec![8; 4096 - 22];
    assert_eq!(client.does(Request::Write { fid: 1, offset: 0, data: Data(&longer) }), Err(libc::EMSGSIZE));
    for (fid, name, done) in [(3, "fits", Ok(())), (4, "longer", Err(libc::EMSGSIZE))] {
        client.walk(ROOT, fid, name).unwrap();
        assert_eq!(client.does(Request::Readlink { fid }), done, "{name}");
    }
    serving.stop();
}

fn names(client: &mut Client, fid: u32, count: u32) -> Vec<(String, u8)> {
    let (mut all, mut offset) = (Vec::new(), 0);
    loop {
        let piece = client.list(fid, offset, count).unwrap();
        let Some((_, last, _)) = piece.last() else { return all };
        offset = *last;
        all.extend(piece.into_iter().map(|(name, _, kind)| (name, kind)));
    }
}

#[test]
fn folders_are_listed_in_whole_entries() {
    let place = Place::new();
    let mut wanted: BTreeSet<(String, u8)> = (0..500).map(|at| (format!("entry-{at}"), 8)).collect();
    wanted.iter().for_each(|(name, _)| fs::write(place.path(name), "").unwrap());
    fs::create_dir(place.path("folder")).unwrap();
    symlink("x", place.path("link")).unwrap();
    let more = [(".", 4), ("..", 4), ("folder", 4), ("link", 10)];
    wanted.extend(more.map(|(name, kind)| (name.to_owned(), kind)));
    for engine in ksf_test::working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe) {
        let serving = place.serve_all(engine, vec![place.export()]);
        let mut client = serving.client();
        client.open(1, "", 0).unwrap();
        for count in [64, 100, 4096, u32::MAX] {
            let listed = names(&mut client, 1, count);
            assert_eq!(listed.len(), wanted.len(), "{count}");
            assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), wanted, "{count}");
        }
        assert_eq!(client.list(1, 0, 0), Err(libc::EINVAL));
        assert_eq!(client.list(1, 0, 24), Err(libc::EINVAL), "no name fits");
        assert_eq!(client.list(1, u64::MAX, 4096), Err(libc::EINVAL));
        assert_eq!(client.list(ROOT, 0, 4096), Err(libc::EBADF), "it is not open");
        serving.stop();
    }
}

#[test]
fn files_are_made_written_and_brought_to_the_medium() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.client();
    let create = |fid, flags, mode| Request::Lcreate { fid, name: b"file", flags, mode, gid: NO_UID };
    client.walk(ROOT, 1, "").unwrap();
    client.does(create(1, 0o100 | BOTH, 0o400)).unwrap();
    let write = |offset, data| Request::Write { fid: 1, offset, data: Data(data) };
    let written = client.ask(write(3, b"abc"), |reply| assert_eq!(reply, Reply::Write { count: 3 }));
    written.unwrap();
    client.does(Request::Fsync { fid: 1, datasync: 0 }).unwrap();
    client.does(Request::Fsync { fid: 1, datasync: 1 }).unwrap();
    assert_eq!(client.read(1, 0, 10).unwrap(), b"\0\0\0abc");
    assert_eq!(fs::read(place.path("file")).unwrap(), b"\0\0\0abc");
    assert_eq!(client.stat(1).unwrap().mode, 0o100_400);
    assert_eq!(client.does(write(i64::MAX as u64, b"x")), Err(libc::EFBIG));
    // A long one, from where it was received.
    let long: Vec<u8> = (0..700_000_u32).map(|at| (at / 5) as u8).collect();
    client.does(write(0, &long)).unwrap();
    assert!(fs::read(place.path("file")).unwrap() == long);
    client.walk(ROOT, 2, "").unwrap();
    assert_eq!(client.does(create(2, 0o300 | BOTH, 0o600)), Err(libc::EEXIST));
    // After the error the fid is the folder's still. Without root the owner needs the permission, too.
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o600)).unwrap();
    client.does(create(2, 0o1000 | BOTH, 0o600)).unwrap();
    assert_eq!(client.stat(1).unwrap().size, 0);
    for (request, errno) in [
        (create(9, BOTH, 0o600), libc::EBADF),
        (create(1, BOTH, 0o600), libc::EINVAL),
        (Request::Write { fid: ROOT, offset: 0, data: Data(b"x") }, libc::EBADF),
        (Request::Fsync { fid: ROOT, datasync: 0 }, libc::EBADF),
    ] {
        assert_eq!(client.does(request), Err(errno), "{request:?}");
    }
    client.open(3, "file", 0o2001).unwrap();
    client.does(Request::Write { fid: 3, offset: 0, data: Data(b"1") }).unwrap();
    client.does(Request::Write { fid: 3, offset: 0, data: Data(b"2") }).unwrap();
    assert_eq!(fs::read(place.path("file")).unwrap(), b"12", "each write is at the end");
    serving.stop();
}

#[test]
fn open_files_stay_usable_when_they_are_removed() {
    let place = Place::new();
    fs::write(place.path("file"), "content").unwrap();
    fs::create_dir(place.path("folder")).unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    client.open(2, "file", BOTH).unwrap();
    client.open(3, "folder", 0).unwrap();
    client.does(Request::Unlinkat { dirfid: ROOT, name: b"file", flags: 0 }).unwrap();
    client.does(Request::Unlinkat { dirfid: ROOT, name: b"folder", flags: 0x200 }).unwrap();
    assert_eq!(client.read(2, 0, 100).unwrap(), b"content");
    client.does(Request::Write { fid: 2, offset: 7, data: Data(b"!") }).unwrap();
    for fid in [2, 1] {
        let stat = client.stat(fid).unwrap();
        assert_eq!((stat.size, stat.nlink), (8, 0), "fid {fid}");
    }
    // Once more, as Linux' client does with cache=mmap for a shared mapping.
    client.walk(1, 6, "").unwrap();
    assert_eq!(client.does(Request::Lopen { fid: 6, flags: BOTH | open_flag::DIRECTORY }), Err(libc::ENOTDIR));
    client.does(Request::Lopen { fid: 6, flags: BOTH }).unwrap();
    client.does(Request::Write { fid: 6, offset: 0, data: Data(b"C") }).unwrap();
    assert_eq!(client.read(2, 0, 100).unwrap(), b"Content!");
    client.does(Request::Write { fid: 2, offset: 0, data: Data(b"c") }).unwrap();
    client.clunk(6).unwrap();
    let set = |client: &mut Client, fid, to| client.does(Request::Setattr { fid, to });
    let size = SetStat { valid: 0x8, size: 3, ..SetStat::default() };
    set(&mut client, 2, size).unwrap();
    assert_eq!(client.read(2, 0, 100).unwrap(), b"con");
    // By the fid that is open, and by the one that was walked to: Linux' client takes either.
    for (fid, mode, seconds) in [(2, 0o640, 1_000_000_000), (1, 0o604, 1_100_000_000), (3, 0o711, 1_200_000_000)] {
        let times =
            SetStat { atime_seconds: seconds + 1, mtime_seconds: seconds, mtime_nanos: 5, ..SetStat::default() };
        set(&mut client, fid, SetStat { valid: 0x1 | 0x10 | 0x20 | 0x80 | 0x100, mode, ..times }).unwrap();
        let stat = client.stat(fid).unwrap();
        assert_eq!((stat.mode & 0o7777, stat.nlink), (mode, 0), "fid {fid}");
        assert_eq!((stat.atime_seconds, stat.mtime_seconds, stat.mtime_nanos), (seconds + 1, seconds, 5), "fid {fid}");
        if is_root() {
            set(&mut client, fid, SetStat { valid: 0x6, uid: USER, gid: 7, ..SetStat::default() }).unwrap();
            let stat = client.stat(fid).unwrap();
            assert_eq!((stat.uid, stat.gid), (USER, 7), "fid {fid}");
        }
    }
    assert_eq!(set(&mut client, 2, SetStat { valid: 0x8, size: u64::MAX, ..size }), Err(libc::EFBIG));
    // The length also where it is open for reading alone.
    fs::write(place.path("read"), "content").unwrap();
    client.walk(ROOT, 4, "read").unwrap();
    client.open(5, "read", 0).unwrap();
    client.does(Request::Unlinkat { dirfid: ROOT, name: b"read", flags: 0 }).unwrap();
    for (fid, length) in [(4, 5), (5, 3)] {
        set(&mut client, fid, SetStat { size: length, ..size }).unwrap();
        assert_eq!(client.stat(4).unwrap().size, length, "fid {fid}");
    }
    if is_root() {
        // What is open is its owner's to change, and nobody else's.
        let mut other = serving.user(USER + 1);
        fs::write(place.path("of root"), "").unwrap();
        other.open(1, "of root", 0).unwrap();
        fs::remove_file(place.path("of root")).unwrap();
        let mode = SetStat { valid: 0x1, mode: 0o777, ..SetStat::default() };
        assert_eq!(set(&mut other, 1, mode), Err(libc::EPERM));
        assert_eq!(set(&mut other, 1, size), Err(libc::EACCES));
        other.walk(1, 2, "").unwrap();
        assert_eq!(other.does(Request::Lopen { fid: 2, flags: BOTH }), Err(libc::EACCES));
        other.does(Request::Lopen { fid: 2, flags: 0 }).unwrap();
    }
    client.list(3, 0, 4096).unwrap_or_default();
    client.clunk(2).unwrap();
    assert_eq!(client.stat(1), Err(libc::ESTALE), "nothing is open of it");
    assert_eq!(set(&mut client, 1, size), Err(libc::ESTALE), "nothing is open of it");
    assert_eq!(client.does(Request::Lopen { fid: 1, flags: 0 }), Err(libc::ESTALE), "nothing is open of it");
    client.clunk(1).unwrap();
    client.clunk(3).unwrap();
    serving.stop();
}

#[test]
fn names_are_made_moved_and_removed() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.client();
    let root = |name| Request::Unlinkat { dirfid: ROOT, name, flags: 0 };
    let mkdir = |name| Request::Mkdir { dfid: ROOT, name, mode: 0o751, gid: NO_UID };
    client.does(mkdir(b"folder")).unwrap();
    assert_eq!(fs::metadata(place.path("folder")).unwrap().mode() & 0o7777, 0o751);
    assert_eq!(client.does(mkdir(b"folder")), Err(libc::EEXIST));
    assert_eq!(client.does(mkdir(b"a/b")), Err(libc::EINVAL));
    let long = [b'n'; 256];
    assert_eq!(client.does(mkdir(&long)), Err(libc::ENAMETOOLONG));
    let symlink = Request::Symlink { dfid: ROOT, name: b"link", target: b"../x", gid: NO_UID };
    client.does(symlink).unwrap();
    assert_eq!(fs::read_link(place.path("link")).unwrap().to_str(), Some("../x"));
    let mknod = |name, mode| Request::Mknod { dfid: ROOT, name, mode, major: 0, minor: 0, gid: NO_UID };
    client.does(mknod(b"fifo", 0o10_640)).unwrap();
    assert_eq!(fs::metadata(place.path("fifo")).unwrap().mode(), 0o10_640);
    client.does(mknod(b"file", 0o100_600)).unwrap();
    client.walk(ROOT, 1, "file").unwrap();
    client.does(Request::Link { dfid: ROOT, fid: 1, name: b"two" }).unwrap();
    assert_eq!(client.stat(1).unwrap().nlink, 2);
    // A moved file keeps its fids, and the name by which they are removed.
    client.walk(ROOT, 2, "folder").unwrap();
    let renameat = |oldname, newdirfid, newname| Request::Renameat { olddirfid: ROOT, oldname, newdirfid, newname };
    client.does(renameat(b"file", 2, b"moved")).unwrap();
    assert_eq!(client.does(renameat(b"file", 2, b"moved")), Err(libc::ENOENT));
    assert_eq!(client.stat(1).unwrap().nlink, 2);
    client.does(Request::Rename { fid: 1, dfid: ROOT, name: b"back" }).unwrap();
    assert!(place.path("back").exists() && !place.path("folder/moved").exists());
    client.does(Request::Remove { fid: 1 }).unwrap();
    assert!(!place.path("back").exists() && place.path("two").exists());
    assert_eq!(client.stat(1), Err(libc::EBADF));
    // A fid is given back by a Tremove that fails, too.
    fs::write(place.path("folder/inside"), "").unwrap();
    assert_eq!(client.does(Request::Remove { fid: 2 }), Err(libc::ENOTEMPTY));
    assert_eq!(client.stat(2), Err(libc::EBADF));
    assert_eq!(client.does(Request::Remove { fid: ROOT }), Err(libc::EINVAL), "the root has no name here");
    client.attach(ROOT, 0, b"").unwrap();
    // What was found under a name that is another's now is not removed.
    client.walk(ROOT, 3, "two").unwrap();
    fs::remove_file(place.path("two")).unwrap();
    fs::write(place.path("two"), "another").unwrap();
    assert_eq!(client.does(Request::Remove { fid: 3 }), Err(libc::ESTALE));
    assert_eq!(client.does(root(b"folder")), Err(libc::EISDIR));
    let rmdir = |name| Request::Unlinkat { dirfid: ROOT, name, flags: 0x200 };
    assert_eq!(client.does(rmdir(b"two")), Err(libc::ENOTDIR));
    assert_eq!(client.does(rmdir(b"folder")), Err(libc::ENOTEMPTY));
    for name in [&b"two"[..], b"link", b"fifo"] {
        client.does(root(name)).unwrap();
    }
    assert_eq!(client.does(root(b"two")), Err(libc::ENOENT));
    serving.stop();
}

#[test]
fn no_name_is_moved_or_linked_to_another_export() {
    const OTHER: u32 = 9;
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let other = place.beside("other");
    let more = ksf_ninep::ExportSettings { path: other.clone(), ..place.export() };
    let serving = place.serve_all(EngineKind::Epoll, vec![place.export(), more]);
    let mut client = serving.connect();
    client.version();
    for (fid, path) in [(ROOT, place.path("")), (OTHER, other.clone())] {
        client.attach(fid, 0, path.canonicalize().unwrap().to_str().unwrap().as_bytes()).unwrap();
    }
    client.walk(ROOT, 1, "file").unwrap();
    for request in [
        Request::Renameat { olddirfid: ROOT, oldname: b"file", newdirfid: OTHER, newname: b"x" },
        Request::Rename { fid: 1, dfid: OTHER, name: b"x" },
        Request::Link { dfid: OTHER, fid: 1, name: b"x" },
    ] {
        assert_eq!(client.does(request), Err(libc::EXDEV), "{request:?}");
    }
    assert!(place.path("file").exists() && fs::read_dir(other).unwrap().next().is_none());
    client.stat(1).unwrap();
    serving.stop();
}

/// rename() of one link of a file onto another does nothing (POSIX).
#[test]
fn a_fid_keeps_its_name_where_a_rename_moves_nothing() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.client();
    let renameat = Request::Renameat { olddirfid: ROOT, oldname: b"one", newdirfid: ROOT, newname: b"two" };
    for rename in [Request::Rename { fid: 1, dfid: ROOT, name: b"two" }, renameat] {
        fs::write(place.path("one"), "").unwrap();
        fs::hard_link(place.path("one"), place.path("two")).unwrap();
        client.walk(ROOT, 1, "one").unwrap();
        client.walk(ROOT, 2, "two").unwrap();
        client.does(rename).unwrap();
        assert_eq!(client.stat(1).unwrap().nlink, 2);
        client.does(Request::Remove { fid: 1 }).unwrap();
        assert!(!place.path("one").exists() && place.path("two").exists());
        client.does(Request::Remove { fid: 2 }).unwrap();
        assert!(!place.path("two").exists());
    }
    serving.stop();
}

/// Each request that has a name in a directory.
pub(crate) fn with_name<'a>(dir: u32, file: u32, name: &'a [u8]) -> [Request<'a>; 8] {
    let gid = NO_UID;
    [
        Request::Lcreate { fid: dir, name, flags: BOTH | open_flag::EXCLUSIVE, mode: 0o644, gid },
        Request::Mkdir { dfid: dir, name, mode: 0o755, gid },
        Request::Symlink { dfid: dir, name, target: b"x", gid },
        Request::Mknod { dfid: dir, name, mode: 0o10_640, major: 0, minor: 0, gid },
        Request::Link { dfid: dir, fid: file, name },
        Request::Rename { fid: file, dfid: dir, name },
        Request::Renameat { olddirfid: dir, oldname: name, newdirfid: ROOT, newname: b"new" },
        Request::Unlinkat { dirfid: dir, name, flags: 0 },
    ]
}

/// Each request that has a fid, with this one.
pub(crate) fn with_fid(fid: u32) -> Vec<Request<'static>> {
    let lock = Lock { kind: 1, flags: 0, start: 0, length: 10, process: 7, client: b"here" };
    let found = GetLock { kind: 1, start: 0, length: 10, process: 7, client: b"here" };
    let names = Names::default();
    let others = [
        Request::Walk { fid, newfid: 98, names },
        Request::Lopen { fid, flags: 0 },
        Request::Read { fid, offset: 0, count: 1 },
        Request::Write { fid, offset: 0, data: Data(b"x") },
        Request::Readdir { fid, offset: 0, count: 4096 },
        Request::Readlink { fid },
        Request::Getattr { fid, mask: 0 },
        Request::Setattr { fid, to: SetStat::default() },
        Request::Statfs { fid },
        Request::Clunk { fid },
        Request::Remove { fid },
        Request::Fsync { fid, datasync: 0 },
        Request::Lock { fid, lock },
        Request::Getlock { fid, lock: found },
        Request::Xattrwalk { fid, newfid: 98, name: b"" },
        Request::Xattrcreate { fid, name: b"user.x", size: 1, flags: 0 },
        Request::Link { dfid: ROOT, fid, name: b"new" },
        Request::Rename { fid, dfid: ROOT, name: b"new" },
        Request::Renameat { olddirfid: ROOT, oldname: b"file", newdirfid: fid, newname: b"new" },
    ];
    others.into_iter().chain(with_name(fid, ROOT, b"new")).collect()
}

#[test]
fn each_message_fails_for_its_fids_and_names_and_changes_nothing() {
    const FILE: u32 = 1;
    const FOLDER: u32 = 2;
    const LIST: u32 = 3;
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    fs::write(place.path("file"), "").unwrap();
    fs::write(place.path("folder/inside"), "").unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, FILE, "file").unwrap();
    client.walk(ROOT, FOLDER, "folder").unwrap();
    client.open(LIST, "folder", 0).unwrap();
    let mut fails = |request, errors: &[i32]| {
        let done = client.does(request);
        assert!(done.is_err_and(|errno| errors.contains(&errno)), "{request:?}: {done:?}");
    };
    with_fid(99).into_iter().for_each(|request| fails(request, &[libc::EBADF]));
    with_name(FILE, FILE, b"inside").into_iter().for_each(|request| fails(request, &[libc::ENOTDIR]));
    let long = [b'n'; 256];
    let names: [(&[u8], &[i32]); 6] = [
        (b"", &[libc::ENOENT]),
        // No system call has these.
        (b"a/b", &[libc::EINVAL]),
        (b"a\0b", &[libc::EINVAL]),
        (&long, &[libc::ENAMETOOLONG]),
        (b".", &[libc::EISDIR, libc::EBUSY, libc::EEXIST]),
        (b"..", &[libc::EISDIR, libc::EBUSY, libc::EEXIST]),
    ];
    for (name, errors) in names {
        with_name(FOLDER, FILE, name).into_iter().for_each(|request| fails(request, errors));
        let to = Request::Renameat { olddirfid: FOLDER, oldname: b"inside", newdirfid: ROOT, newname: name };
        fails(to, errors);
    }
    let made = |request: &Request<'_>| {
        !matches!(request, Request::Rename { .. } | Request::Renameat { .. } | Request::Unlinkat { .. })
    };
    for request in with_name(FOLDER, FILE, b"inside").into_iter().filter(made) {
        fails(request, &[libc::EEXIST]);
    }
    // What needs an open fid, with one that is not, and what needs one that is not, with one that is.
    for request in [
        Request::Read { fid: FILE, offset: 0, count: 1 },
        Request::Write { fid: FILE, offset: 0, data: Data(b"x") },
        Request::Readdir { fid: FOLDER, offset: 0, count: 4096 },
        Request::Fsync { fid: FILE, datasync: 0 },
    ] {
        fails(request, &[libc::EBADF]);
    }
    fails(Request::Lopen { fid: LIST, flags: 0 }, &[libc::EINVAL]);
    fails(Request::Xattrcreate { fid: LIST, name: b"user.x", size: 1, flags: 0 }, &[libc::EINVAL]);
    fails(Request::Readlink { fid: FILE }, &[libc::EINVAL]);
    fails(Request::Unlinkat { dirfid: LIST, name: b"none", flags: 0 }, &[libc::ENOENT]);
    let mut left: Vec<_> = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["file", "folder"]);
    // By the fid of a directory that is open, and it is listed without the name then.
    client.does(Request::Unlinkat { dirfid: LIST, name: b"inside", flags: 0 }).unwrap();
    assert!(!place.path("folder/inside").exists());
    let listed = client.list(LIST, 0, 4096).unwrap();
    assert!(listed.iter().all(|(name, ..)| name != "inside"), "{listed:?}");
    serving.stop();
}

#[test]
fn attributes_are_set_as_far_as_they_are_valid() {
    let place = Place::new();
    fs::write(place.path("file"), "12345").unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    let mut set = |to| client.does(Request::Setattr { fid: 1, to });
    let other = SetStat { mode: 0o600, size: 3, mtime_seconds: 1_000_000_000, mtime_nanos: 5, ..SetStat::default() };
    set(SetStat { valid: 0x1 | 0x20 | 0x100, ..other }).unwrap();
    let stat = || fs::metadata(place.path("file")).unwrap();
    assert_eq!((stat().mode() & 0o7777, stat().len()), (0o600, 5));
    assert_eq!((stat().mtime(), stat().mtime_nsec()), (1_000_000_000, 5));
    set(SetStat { valid: 0x8 | 0x40, ..other }).unwrap();
    assert_eq!(stat().len(), 3);
    // Nothing, and the time of the last change alone. The other times are in the past, and stay.
    let times = || (stat().mtime(), stat().atime(), stat().mode(), stat().len());
    let (before, ctime) = (times(), || (stat().ctime(), stat().ctime_nsec()));
    let unchanged = ctime();
    set(SetStat { valid: 0, ..other }).unwrap();
    assert_eq!(ctime(), unchanged);
    ksf_test::wait_until("the clock of the file system goes on", || {
        set(SetStat { valid: 0x40, ..other }).unwrap();
        ctime() > unchanged
    });
    assert_eq!(times(), before);
    assert_eq!(set(SetStat { valid: 0x8, size: u64::MAX, ..other }), Err(libc::EFBIG));
    assert_eq!(set(SetStat { valid: 0x120, mtime_nanos: 1_000_000_000, ..other }), Err(libc::EINVAL));
    if is_root() {
        set(SetStat { valid: 0x6, uid: USER, gid: 7, ..other }).unwrap();
        assert_eq!((stat().uid(), stat().gid()), (USER, 7));
    }
    assert_eq!(client.does(Request::Setattr { fid: 9, to: other }), Err(libc::EBADF));
    serving.stop();
}

#[test]
fn each_attach_has_its_user() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(place.path("secret"), "of root").unwrap();
    fs::set_permissions(place.path("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.attach(1, USER, b"").unwrap();
    client.walk(1, 2, "secret").unwrap();
    assert_eq!(client.does(Request::Lopen { fid: 2, flags: 0 }), Err(libc::EACCES));
    client.open(3, "secret", 0).unwrap();
    assert_eq!(client.read(3, 0, 100).unwrap(), b"of root");
    client.walk(1, 4, "").unwrap();
    client.does(Request::Lcreate { fid: 4, name: b"mine", flags: BOTH, mode: 0o600, gid: 4321 }).unwrap();
    let made = fs::metadata(place.path("mine")).unwrap();
    assert_eq!((made.uid(), made.gid()), (USER, 65_534), "a user that the system does not know");
    assert_eq!(client.does(Request::Unlinkat { dirfid: 4, name: b"x", flags: 0 }), Err(libc::ENOTDIR));
    // A user by a number in text, and one who has none.
    let by_text = |fid, uname| Request::Attach { fid, afid: NO_FID, uname, aname: b"", n_uname: NO_UID };
    client.does(by_text(5, b"61234")).unwrap();
    client.does(by_text(6, b"somebody")).unwrap();
    for (fid, name, uid) in [(5, &b"five"[..], USER), (6, b"six", 65_534)] {
        client.does(Request::Mkdir { dfid: fid, name, mode: 0o755, gid: NO_UID }).unwrap();
        assert_eq!(fs::metadata(place.path(std::str::from_utf8(name).unwrap())).unwrap().uid(), uid);
    }
    serving.stop();
}

#[test]
fn groups_of_an_attach_are_those_of_the_system() {
    let Some(()) = root_or_skip("identities") else { return };
    // daemon has group 1 on every system, and no message carries groups.
    const DAEMON: u32 = 1;
    let place = Place::new();
    fs::write(place.path("file"), "text").unwrap();
    chown(place.path("file"), None, Some(DAEMON)).unwrap();
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o040)).unwrap();
    let serving = place.serve();
    let mut daemon = serving.user(DAEMON);
    daemon.open(1, "file", 0).unwrap();
    assert_eq!(daemon.read(1, 0, 10).unwrap(), b"text");
    assert_eq!(serving.user(USER).open(1, "file", 0), Err(libc::EACCES), "a user that the system does not know");
    serving.stop();
}

/// A client names the group of a new object. Its user may not be in that group.
#[test]
fn the_group_of_a_new_object_gives_no_rights() {
    const MINE: u32 = USER;
    const ALSO_MINE: u32 = USER + 1;
    const OTHERS: u32 = USER + 2;
    let inside = || {
        let Some(()) = own_run_or_skip("a list of groups of its own") else { return };
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/etc"]);
        fs::write("/etc/nsswitch.conf", "passwd: files\ngroup: files\n").unwrap();
        fs::write("/etc/passwd", format!("user:x:{USER}:{MINE}::/:/bin/sh\n")).unwrap();
        fs::write("/etc/group", format!("also:x:{ALSO_MINE}:user\n")).unwrap();
        let place = Place::new();
        let folders = [("open", 0, 0o777), ("team", OTHERS, 0o2777), ("closed", OTHERS, 0o2770)];
        for (name, group, mode) in folders {
            fs::create_dir(place.path(name)).unwrap();
            chown(place.path(name), None, Some(group)).unwrap();
            fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let serving = place.serve();
        let mut client = serving.user(USER);
        for (at, (folder, ..)) in (1..).zip(folders) {
            client.walk(ROOT, at, folder).unwrap();
            for gid in [MINE, ALSO_MINE, OTHERS, 0] {
                client.walk(at, 9, "").unwrap();
                let flags = BOTH | open_flag::EXCLUSIVE;
                let requests: [(&[u8], _); 4] = [
                    (b"file", Request::Lcreate { fid: 9, name: b"file", flags, mode: 0o2770, gid }),
                    (b"folder", Request::Mkdir { dfid: at, name: b"folder", mode: 0o770, gid }),
                    (b"link", Request::Symlink { dfid: at, name: b"link", target: b"target", gid }),
                    (b"fifo", Request::Mknod { dfid: at, name: b"fifo", mode: 0o12_770, major: 0, minor: 0, gid }),
                ];
                for (name, request) in requests {
                    let (result, what) = (client.does(request), format!("{request:?} in {folder}"));
                    if folder == "closed" {
                        assert_eq!(result, Err(libc::EACCES), "{what}");
                        continue;
                    }
                    result.unwrap();
                    let path = place.path(folder).join(std::str::from_utf8(name).unwrap());
                    let made = fs::symlink_metadata(&path).unwrap();
                    let group = match (folder, gid) {
                        ("team", _) => OTHERS,
                        (_, ALSO_MINE) => ALSO_MINE,
                        _ => MINE,
                    };
                    assert_eq!((made.uid(), made.gid()), (USER, group), "{what}");
                    // With its bit the file would run with the rights of a group that its owner does not have.
                    let is_own = group != OTHERS;
                    assert_eq!(made.mode() & 0o2000 != 0, is_own != made.is_dir() && !made.is_symlink(), "{what}");
                    if made.is_dir() { fs::remove_dir(&path) } else { fs::remove_file(&path) }.unwrap();
                }
                client.clunk(9).unwrap();
            }
        }
        serving.stop();
    };
    std::thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// As truncate(2), and not as RFC 1813 has it: an open fid has the right of its open.
#[test]
fn the_owner_of_a_file_changes_its_length_as_the_mode_says() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let serving = place.serve();
    let mut client = serving.user(USER);
    client.walk(ROOT, 1, "").unwrap();
    client.does(Request::Lcreate { fid: 1, name: b"file", flags: BOTH, mode: 0o444, gid: 0 }).unwrap();
    client.does(Request::Write { fid: 1, offset: 0, data: Data(b"12345") }).unwrap();
    client.walk(ROOT, 2, "file").unwrap();
    client.open(3, "file", 0).unwrap();
    let size = |size| SetStat { valid: 0x8, size, ..SetStat::default() };
    for fid in [2, 3] {
        assert_eq!(client.does(Request::Setattr { fid, to: size(2) }), Err(libc::EACCES), "fid {fid}");
    }
    assert_eq!(fs::metadata(place.path("file")).unwrap().len(), 5);
    client.does(Request::Setattr { fid: 1, to: size(4) }).unwrap();
    client.does(Request::Setattr { fid: 2, to: SetStat { valid: 0x1, mode: 0o644, ..size(0) } }).unwrap();
    for (fid, size_bytes) in [(2, 3), (3, 2)] {
        client.does(Request::Setattr { fid, to: size(size_bytes) }).unwrap();
        assert_eq!(fs::metadata(place.path("file")).unwrap().len(), size_bytes, "fid {fid}");
    }
    serving.stop();
}

#[test]
fn root_is_squashed_as_the_export_says() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let mut export = place.export();
    export.options.squash = Squash::Root;
    let serving = place.serve_all(EngineKind::Epoll, vec![export]);
    let mut client = serving.client();
    client.does(Request::Mkdir { dfid: ROOT, name: b"folder", mode: 0o755, gid: 0 }).unwrap();
    let made = fs::metadata(place.path("folder")).unwrap();
    assert_eq!((made.uid(), made.gid()), (65_534, 65_534));
    serving.stop();
}

#[test]
fn an_export_that_is_read_only_stays_as_it_is() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let mut export = place.export();
    export.options.read_only = true;
    let serving = place.serve_all(EngineKind::Epoll, vec![export]);
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    for request in [
        Request::Mkdir { dfid: ROOT, name: b"x", mode: 0o755, gid: 0 },
        Request::Unlinkat { dirfid: ROOT, name: b"file", flags: 0 },
        Request::Lopen { fid: 1, flags: WRITE },
        Request::Lopen { fid: 1, flags: 0o1000 },
        Request::Setattr { fid: 1, to: SetStat { valid: 1, mode: 0o777, ..SetStat::default() } },
        Request::Lcreate { fid: ROOT, name: b"x", flags: WRITE, mode: 0o644, gid: 0 },
        Request::Symlink { dfid: ROOT, name: b"x", target: b"file", gid: 0 },
        Request::Mknod { dfid: ROOT, name: b"x", mode: 0o10_640, major: 0, minor: 0, gid: 0 },
        Request::Link { dfid: ROOT, fid: 1, name: b"x" },
        Request::Rename { fid: 1, dfid: ROOT, name: b"x" },
        Request::Renameat { olddirfid: ROOT, oldname: b"file", newdirfid: ROOT, newname: b"x" },
    ] {
        assert_eq!(client.does(request), Err(libc::EROFS), "{request:?}");
    }
    // These give their fids back.
    client.walk(ROOT, 2, "file").unwrap();
    assert_eq!(client.does(Request::Remove { fid: 2 }), Err(libc::EROFS));
    client.walk(ROOT, 2, "file").unwrap();
    client.does(Request::Xattrcreate { fid: 2, name: b"user.x", size: 1, flags: 0 }).unwrap();
    client.does(Request::Write { fid: 2, offset: 0, data: Data(b"x") }).unwrap();
    assert_eq!(client.clunk(2), Err(libc::EROFS));
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 1);
    client.does(Request::Lopen { fid: 1, flags: 0 }).unwrap();
    serving.stop();
}

#[test]
fn fids_are_bounded_and_come_back() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.client();
    for fid in 1..FIDS_MAX as u32 {
        client.walk(ROOT, fid, "").unwrap();
    }
    assert_eq!(client.walk(ROOT, 1000, ""), Err(libc::EMFILE));
    assert_eq!(client.walk(ROOT, 1000, "x"), Err(libc::EMFILE));
    assert_eq!(client.attach(1000, 0, b""), Err(libc::EMFILE));
    client.clunk(5).unwrap();
    assert_eq!(client.clunk(5), Err(libc::EBADF));
    client.walk(ROOT, 1000, "").unwrap();
    // Another client has its own, also while one asks for 100,000: all that are refused say why, and what it has stays usable.
    let mut other = serving.client();
    for fid in 2000..102_000 {
        let path = if fid % 2 == 0 { "" } else { "x" };
        assert_eq!(client.walk(ROOT, fid, path), Err(libc::EMFILE), "{fid}");
        if fid % 10_000 == 0 {
            other.walk(ROOT, 1, "").unwrap();
            other.clunk(1).unwrap();
        }
    }
    client.stat(1000).unwrap();
    serving.stop();
}

#[test]
fn extended_attributes_are_read_and_written_by_fids_of_their_own() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    // The number of the error at Txattrcreate, at a Twrite, or at Tclunk.
    let set = |client: &mut Client, name: &[u8], value: &[u8], flags| {
        client.walk(1, 2, "").unwrap();
        client.does(Request::Xattrcreate { fid: 2, name, size: value.len() as u64, flags })?;
        for (at, piece) in value.chunks(2).enumerate() {
            client.does(Request::Write { fid: 2, offset: 2 * at as u64, data: Data(piece) })?;
        }
        client.clunk(2)
    };
    let get = |client: &mut Client, name: &[u8]| {
        let size = client.ask(Request::Xattrwalk { fid: 1, newfid: 3, name }, |reply| match reply {
            Reply::Xattrwalk { size } => size,
            other => panic!("{other:?}"),
        })?;
        let value = client.read(3, 0, 1000)?;
        assert_eq!(value.len() as u64, size);
        if !value.is_empty() {
            assert_eq!(client.read(3, 1, 1)?, value[1..2.min(value.len())]);
        }
        assert_eq!(client.read(3, size, 1)?, b"");
        assert_eq!(client.read(3, u64::MAX, 1)?, b"");
        assert_eq!(client.stat(3), Err(libc::EBADF), "it is no file");
        client.clunk(3)?;
        Ok(value)
    };
    if set(&mut client, b"user.one", b"first", 0) == Err(libc::EOPNOTSUPP) {
        return ksf_test::skip("the file system has no user attributes");
    }
    assert_eq!(get(&mut client, b"user.one"), Ok(b"first".to_vec()));
    assert_eq!(get(&mut client, b"user.none"), Err(libc::ENODATA));
    assert_eq!(set(&mut client, b"user.one", b"second", 1), Err(libc::EEXIST));
    assert_eq!(set(&mut client, b"user.two", b"second", 2), Err(libc::ENODATA));
    set(&mut client, b"user.one", b"second", 2).unwrap();
    set(&mut client, b"user.two", b"", 0).unwrap();
    assert_eq!(get(&mut client, b"user.two"), Ok(vec![]));
    let names = get(&mut client, b"").unwrap();
    let names: BTreeSet<&[u8]> = names.split(|byte| *byte == 0).filter(|name| name.starts_with(b"user")).collect();
    assert_eq!(names, BTreeSet::from([&b"user.one"[..], b"user.two"]));
    // Nothing that replaces is a removal.
    set(&mut client, b"user.one", b"", 2).unwrap();
    assert_eq!(get(&mut client, b"user.one"), Err(libc::ENODATA));
    let create = |fid, size, flags| Request::Xattrcreate { fid, name: b"user.x", size, flags };
    for (request, errno) in [
        (create(1, 65_537, 0), libc::E2BIG),
        (create(1, u64::MAX, 0), libc::E2BIG),
        (Request::Xattrcreate { fid: 1, name: &[b'n'; 256], size: 0, flags: 0 }, libc::ERANGE),
        (create(1, 1, 4), libc::EINVAL),
        (create(9, 1, 0), libc::EBADF),
        (Request::Xattrwalk { fid: 9, newfid: 3, name: b"" }, libc::EBADF),
        (Request::Xattrwalk { fid: 1, newfid: ROOT, name: b"" }, libc::EINVAL),
    ] {
        assert_eq!(client.does(request), Err(errno), "{request:?}");
    }
    // What was not written in full is not set, and more is not taken.
    client.walk(1, 4, "").unwrap();
    client.does(create(4, 3, 0)).unwrap();
    client.does(Request::Write { fid: 4, offset: 0, data: Data(b"12") }).unwrap();
    for (offset, data) in [(0, &b"1"[..]), (3, b"1"), (2, b"34")] {
        assert_eq!(client.does(Request::Write { fid: 4, offset, data: Data(data) }), Err(libc::EINVAL));
    }
    assert_eq!(client.read(4, 0, 1), Err(libc::EBADF));
    assert_eq!(client.clunk(4), Err(libc::EINVAL));
    assert_eq!(client.clunk(4), Err(libc::EBADF), "it is given back all the same");
    assert_eq!(get(&mut client, b"user.x"), Err(libc::ENODATA));
    serving.stop();
}

#[test]
fn an_open_that_fails_for_the_type_truncates_nothing() {
    let place = Place::new();
    fs::write(place.path("file"), "text").unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    let flags = open_flag::WRITE | open_flag::TRUNCATE | open_flag::DIRECTORY;
    assert_eq!(client.does(Request::Lopen { fid: 1, flags }), Err(libc::ENOTDIR));
    assert_eq!(fs::read(place.path("file")).unwrap(), b"text");
    serving.stop();
}

#[test]
fn extended_attributes_of_a_removed_file_are_those_of_the_open_one() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    if rustix::fs::setxattr(place.path("file"), "user.one", b"first", rustix::fs::XattrFlags::empty()).is_err() {
        return ksf_test::skip("the file system has no user attributes");
    }
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, 1, "file").unwrap();
    client.open(2, "file", BOTH).unwrap();
    client.does(Request::Unlinkat { dirfid: ROOT, name: b"file", flags: 0 }).unwrap();
    let set = |client: &mut Client, fid, value: &[u8]| {
        client.walk(fid, 3, "").unwrap();
        client.does(Request::Xattrcreate { fid: 3, name: b"user.one", size: value.len() as u64, flags: 2 })?;
        if !value.is_empty() {
            client.does(Request::Write { fid: 3, offset: 0, data: Data(value) })?;
        }
        client.clunk(3)
    };
    let get = |client: &mut Client, fid, name: &[u8]| {
        client.does(Request::Xattrwalk { fid, newfid: 3, name })?;
        let value = client.read(3, 0, 1000)?;
        client.clunk(3)?;
        Ok(value)
    };
    // By the fid that is open, and by the one that was walked to: Linux' client takes either.
    assert_eq!(get(&mut client, 1, b"user.one"), Ok(b"first".to_vec()));
    for (fid, value) in [(2, b"second"), (1, b"third!")] {
        set(&mut client, fid, value).unwrap();
        assert_eq!(get(&mut client, fid, b"user.one"), Ok(value.to_vec()));
        let names = get(&mut client, fid, b"").unwrap();
        assert!(names.split(|byte| *byte == 0).any(|name| name == b"user.one"), "{names:?}");
    }
    set(&mut client, 1, b"").unwrap();
    assert_eq!(get(&mut client, 2, b"user.one"), Err(libc::ENODATA));
    if is_root() {
        let mut other = serving.user(USER);
        fs::write(place.path("of root"), "").unwrap();
        other.open(1, "of root", 0).unwrap();
        fs::remove_file(place.path("of root")).unwrap();
        other.walk(1, 3, "").unwrap();
        other.does(Request::Xattrcreate { fid: 3, name: b"user.x", size: 0, flags: 0 }).unwrap();
        assert_eq!(other.clunk(3), Err(libc::EACCES), "it is open for reading, and another user's");
    }
    client.clunk(2).unwrap();
    assert_eq!(get(&mut client, 1, b"user.one"), Err(libc::ESTALE), "nothing is open of it");
    client.walk(ROOT, 3, "").unwrap();
    serving.stop();
}

#[test]
fn locks_are_granted_once_and_given_back_by_clunk_and_by_the_end() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let serving = place.serve();
    let mut clients = [serving.client(), serving.client()];
    clients.iter_mut().for_each(|client| client.open(1, "file", BOTH).unwrap());
    let [one, two] = &mut clients;
    // 1 is P9_LOCK_FLAGS_BLOCK, of a program that waits for its lock.
    let lock_with = |client: &mut Client, fid, kind, start, flags| {
        let lock = Lock { kind, flags, start, length: 10, process: 7, client: b"here" };
        client.ask(Request::Lock { fid, lock }, |reply| match reply {
            Reply::Lock { status } => status,
            other => panic!("{other:?}"),
        })
    };
    let lock = |client: &mut Client, fid, kind, start| lock_with(client, fid, kind, start, 0);
    let find = |client: &mut Client, kind| {
        let lock = GetLock { kind, start: 0, length: 10, process: 7, client: b"here" };
        client.ask(Request::Getlock { fid: 1, lock }, |reply| match reply {
            Reply::Getlock { lock } => (lock.kind, lock.start, lock.length, lock.process, lock.client.to_vec()),
            other => panic!("{other:?}"),
        })
    };
    assert_eq!(lock(one, 1, 1, 5), Ok(0));
    assert_eq!(lock(two, 1, 0, 0), Ok(1), "it is in the way");
    assert_eq!(lock_with(two, 1, 0, 0, 1), Ok(1), "the client is the one that waits");
    assert_eq!(lock(two, 1, 0, 15), Ok(0));
    assert_eq!(find(two, 0), Ok((1, 5, 10, 0, vec![])));
    assert_eq!(find(one, 1), Ok((2, 0, 10, 7, b"here".to_vec())), "its own is not in its way");
    assert_eq!(lock(one, 1, 2, 5), Ok(0));
    assert_eq!(lock_with(two, 1, 1, 0, 1), Ok(0));
    two.clunk(1).unwrap();
    assert_eq!(lock(one, 1, 1, 0), Ok(0), "it was given back before Rclunk");
    two.open(1, "file", 0).unwrap();
    assert_eq!(lock(two, 1, 1, 100), Err(libc::EBADF), "it is open for reading");
    assert_eq!(lock(two, 1, 3, 100), Err(libc::EINVAL));
    assert_eq!(lock(two, 1, 0, u64::MAX), Err(libc::EINVAL));
    assert_eq!(lock(two, 9, 0, 0), Err(libc::EBADF));
    assert_eq!(find(two, 2), Err(libc::EINVAL));
    // A local program's lock, of a process and not of an open file, is in the way as well, and the other way round.
    let here = fs::OpenOptions::new().read(true).write(true).open(place.path("file")).unwrap();
    let local = |operation: FlockOperation| rustix::fs::fcntl_lock(&here, operation);
    assert_eq!(local(FlockOperation::NonBlockingLockExclusive), Err(Errno::AGAIN), "the client has it");
    assert_eq!(lock(one, 1, 2, 0), Ok(0));
    local(FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(lock(one, 1, 1, 0), Ok(1), "the local program has it");
    assert_eq!(find(one, 1), Ok((1, 0, 0, 0, vec![])));
    local(FlockOperation::NonBlockingUnlock).unwrap();
    assert_eq!(lock(one, 1, 1, 0), Ok(0));
    let [one, mut two] = clients;
    drop(one);
    ksf_test::wait_until("the lock ends with its connection", || lock(&mut two, 1, 0, 0) == Ok(0));
    serving.stop();
}

#[test]
fn locked_ranges_are_bounded_and_as_many_locks_and_unlocks_as_a_client_wants_are_granted() {
    const RANGES_MAX: u64 = 1024;
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    client.open(1, "file", BOTH).unwrap();
    client.open(2, "file", BOTH).unwrap();
    let mut lock = |fid, kind, start, length| {
        let lock = Lock { kind, flags: 0, start, length, process: 7, client: b"here" };
        client.ask(Request::Lock { fid, lock }, |reply| match reply {
            Reply::Lock { status } => status,
            other => panic!("{other:?}"),
        })
    };
    const GRANTED: Result<u8, i32> = Ok(0);
    for at in 0..RANGES_MAX {
        assert_eq!(lock(1, 1, 2 * at, 1), GRANTED, "{at}");
    }
    // Neither one more, nor one that becomes three.
    assert_eq!(lock(1, 1, 1 << 40, 1), Err(libc::ENOLCK));
    assert_eq!(lock(2, 1, 1 << 40, 0), GRANTED, "another one has its own");
    assert_eq!(lock(2, 0, 1, 1), GRANTED);
    assert_eq!(lock(2, 2, 0, 0), GRANTED);
    for at in 0..2000 {
        assert_eq!(lock(1, 1, 2 * (at % RANGES_MAX), 1), GRANTED, "it has that one");
    }
    assert_eq!(lock(1, 2, 0, 3), GRANTED);
    assert_eq!(lock(1, 1, 1 << 40, 100), GRANTED);
    assert_eq!(lock(1, 2, (1 << 40) + 10, 1), GRANTED);
    assert_eq!(lock(1, 2, (1 << 40) + 20, 1), Err(libc::ENOLCK));
    assert_eq!(lock(1, 1, 0, 0), GRANTED, "all become one");
    // As a database does.
    for at in 0..3000 {
        let (kind, start) = ([0, 1, 2][at % 3], (1 << 30) + (at as u64 % 7));
        assert_eq!(lock(1, kind, start, 1), GRANTED);
    }
    assert_eq!(lock(1, 2, 0, 0), GRANTED);
    assert_eq!(lock(2, 1, 0, 0), GRANTED);
    serving.stop();
}

/// A walk that fails on the shard gives its fid back, as one that fails on a lane.
#[test]
fn what_the_shard_answers_is_what_a_lane_answers() {
    let place = Place::new();
    fs::create_dir_all(place.path("a/b")).unwrap();
    fs::write(place.path("a/b/file"), "text").unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    let at_once = || serving.ninep.files().fs_counters().warm;
    let expected = client.walk(ROOT, 1, "a/b/file").unwrap();
    let stat = client.stat(1).unwrap();
    // The walks to absent names are on lanes where the kernel forgets these.
    let told_at_once = if ksf_test::keeps_absent_names(&place.path("")) { 4 } else { 2 };
    wait_until("walks and attributes are told at once", || {
        let before = at_once();
        assert_eq!(client.walk(ROOT, 2, "a/b/file").unwrap(), expected);
        assert_eq!(client.walk(ROOT, 3, "a/b/missing").unwrap(), expected[..2]);
        assert_eq!(client.walk(ROOT, 3, "missing"), Err(libc::ENOENT));
        assert_eq!(client.stat(3), Err(libc::EBADF), "it was made by neither");
        assert_eq!(client.stat(2).unwrap(), stat);
        client.clunk(2).unwrap();
        at_once() == before + told_at_once
    });
    serving.stop();
}
