//! Requests that the kernel refuses, with its numbers, and change nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::calls::{FID, FREE, set_xattr};
use crate::common::disk::{Disk, data, with_mounts};
use crate::common::{Client, Place, ROOT};
use crate::media::serve_all;
use crate::messages::{USER, with_fid, with_name};
use ksf_proto::p9::{Data, NO_UID, Names, Request, SetStat, UNLINK_DIRECTORY, open_flag, set_bit};
use ksf_test::acl::{ACCESS_ACL, DEFAULT_ACL, For, acl};
use ksf_test::files::{Object, tree};
use ksf_test::{Running, program_or_skip, root_or_skip, skip, succeeds};
use rustix::fs::{XattrFlags, getxattr, setxattr};

/// Everything in the export, and its times: mtime and ctime.
type State = (BTreeMap<PathBuf, Object>, Vec<[i64; 4]>);

fn state(place: &Place) -> State {
    let all = tree(&place.path(""));
    let times = |path: &PathBuf| {
        let metadata = fs::symlink_metadata(place.path("").join(path)).unwrap();
        [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()]
    };
    let times = all.keys().chain([&PathBuf::new()]).map(times).collect();
    (all, times)
}

#[track_caller]
fn refused(client: &mut Client, request: Request<'_>, errno: i32) {
    assert_eq!(client.does(request), Err(errno), "{request:?}");
}

/// Of [`with_name`]: the request makes the name, and does not need it.
fn makes_name(request: &Request<'_>) -> bool {
    !matches!(request, Request::Renameat { .. } | Request::Unlinkat { .. })
}

#[test]
fn the_rights_of_the_caller_hold_for_each_message_that_walks_or_changes_names() {
    const CLOSED: u32 = 1;
    const HIDDEN: u32 = 2;
    const STICKY: u32 = 3;
    const MINE: u32 = 4;
    const SCRATCH: u32 = 5;
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    let mode = |name: &str, mode| fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).unwrap();
    for (name, bits) in [("closed", 0o755), ("hidden", 0o700), ("sticky", 0o1777), ("unlisted", 0o733)] {
        fs::create_dir_all(place.path(name).join("folder")).unwrap();
        fs::write(place.path(name).join("inside"), "of root").unwrap();
        mode(name, bits);
    }
    fs::write(place.path("mine"), "").unwrap();
    chown(place.path("mine"), Some(USER), None).unwrap();
    mode("", 0o777);
    let before = state(&place);
    let serving = place.serve();
    let mut client = serving.user(USER);
    for (fid, name) in [(CLOSED, "closed"), (HIDDEN, "hidden"), (STICKY, "sticky"), (MINE, "mine")] {
        client.walk(ROOT, fid, name).unwrap();
    }
    // Without the right to write in a directory, and without the right to search it, where no name is told from another.
    for request in with_name(CLOSED, MINE, b"new").into_iter().filter(makes_name) {
        refused(&mut client, request, libc::EACCES);
    }
    for request in with_name(CLOSED, MINE, b"inside").into_iter().filter(|request| !makes_name(request)) {
        refused(&mut client, request, libc::EACCES);
    }
    for name in [&b"new"[..], b"inside"] {
        for request in with_name(HIDDEN, MINE, name) {
            refused(&mut client, request, libc::EACCES);
        }
    }
    for dir in [CLOSED, HIDDEN] {
        refused(&mut client, Request::Unlinkat { dirfid: dir, name: b"folder", flags: UNLINK_DIRECTORY }, libc::EACCES);
        let into = |newname| Request::Renameat { olddirfid: ROOT, oldname: b"mine", newdirfid: dir, newname };
        refused(&mut client, into(b"new"), libc::EACCES);
        refused(&mut client, into(b"inside"), libc::EACCES);
    }
    assert_eq!(client.walk(HIDDEN, SCRATCH, "inside"), Err(libc::EACCES));
    assert_eq!(client.walk(HIDDEN, SCRATCH, "none"), Err(libc::EACCES));
    assert_eq!(client.walk(ROOT, SCRATCH, "hidden/inside").unwrap().len(), 1);
    // In a sticky directory, and by fids, whose names are used.
    for request in with_name(STICKY, MINE, b"inside").into_iter().filter(|request| !makes_name(request)) {
        refused(&mut client, request, libc::EPERM);
    }
    refused(&mut client, Request::Unlinkat { dirfid: STICKY, name: b"folder", flags: UNLINK_DIRECTORY }, libc::EPERM);
    refused(&mut client, Request::Rename { fid: MINE, dfid: STICKY, name: b"inside" }, libc::EPERM);
    for (path, errno) in [("closed", libc::EACCES), ("sticky", libc::EPERM)] {
        for name in ["inside", "folder"] {
            client.walk(ROOT, SCRATCH, &format!("{path}/{name}")).unwrap();
            refused(&mut client, Request::Rename { fid: SCRATCH, dfid: ROOT, name: b"new" }, errno);
            refused(&mut client, Request::Remove { fid: SCRATCH }, errno);
        }
    }
    for path in ["hidden", "unlisted"] {
        assert_eq!(client.open(SCRATCH, path, 0), Err(libc::EACCES), "{path}");
        client.clunk(SCRATCH).unwrap();
    }
    // Devices are for root, in each directory.
    for mode in [libc::S_IFCHR | 0o666, libc::S_IFBLK | 0o666] {
        let device = Request::Mknod { dfid: ROOT, name: b"new", mode, major: 1, minor: 3, gid: NO_UID };
        refused(&mut client, device, libc::EPERM);
    }
    assert_eq!(state(&place), before);
    serving.stop();
}

#[test]
fn the_rights_of_the_caller_hold_for_the_content_and_the_attributes_of_a_file() {
    const FILE: u32 = 1;
    const SCRATCH: u32 = 2;
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::write(place.path("file"), "of root").unwrap();
    let serving = place.serve();
    let mut root = serving.client();
    root.walk(ROOT, FILE, "file").unwrap();
    root.does(Request::Xattrcreate { fid: FILE, name: b"user.x", size: 1, flags: 0 }).unwrap();
    root.does(Request::Write { fid: FILE, offset: 0, data: Data(b"x") }).unwrap();
    root.clunk(FILE).unwrap();
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o600)).unwrap();
    let before = state(&place);
    let mut client = serving.user(USER);
    client.walk(ROOT, FILE, "file").unwrap();
    for flags in [0, 1, 2, 0o1000] {
        refused(&mut client, Request::Lopen { fid: FILE, flags }, libc::EACCES);
    }
    let to = SetStat { mode: 0o777, uid: USER, gid: NO_UID - 1, size: 0, mtime_seconds: 1, ..SetStat::default() };
    for (valid, errno) in [
        (0x1, libc::EPERM),
        (0x2, libc::EPERM),
        (0x4, libc::EPERM),
        (0x8, libc::EACCES),
        (0x10, libc::EACCES),
        (0x20, libc::EACCES),
        (0x90, libc::EPERM),
        (0x120, libc::EPERM),
    ] {
        refused(&mut client, Request::Setattr { fid: FILE, to: SetStat { valid, ..to } }, errno);
    }
    refused(&mut client, Request::Xattrwalk { fid: FILE, newfid: SCRATCH, name: b"user.x" }, libc::EACCES);
    // The names need no right, as in listxattr(2).
    client.does(Request::Xattrwalk { fid: FILE, newfid: SCRATCH, name: b"" }).unwrap();
    assert_eq!(client.read(SCRATCH, 0, 100).unwrap(), b"user.x\0");
    client.clunk(SCRATCH).unwrap();
    for (size, flags) in [(1, 0), (0, 2)] {
        client.walk(FILE, SCRATCH, "").unwrap();
        client.does(Request::Xattrcreate { fid: SCRATCH, name: b"user.x", size, flags }).unwrap();
        if size > 0 {
            client.does(Request::Write { fid: SCRATCH, offset: 0, data: Data(b"y") }).unwrap();
        }
        assert_eq!(client.clunk(SCRATCH), Err(libc::EACCES), "flags {flags}");
    }
    assert_eq!(state(&place), before);
    serving.stop();
}

#[test]
fn an_acl_that_a_client_sets_holds_for_other_users_and_a_default_one_for_new_objects() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::write(place.path("file"), "text").unwrap();
    let plain = place.beside("plain");
    fs::create_dir(place.path("folder")).unwrap();
    fs::set_permissions(place.path("folder"), fs::Permissions::from_mode(0o777)).unwrap();
    let serving = place.serve();
    let (mut client, mut user, mut other) = (serving.client(), serving.user(USER), serving.user(USER + 1));
    // All may write, and one may not.
    let read_only = acl(&[(For::Owner, 6), (For::User(USER), 4), (For::OwnGroup, 6), (For::Mask, 7), (For::Others, 6)]);
    client.walk(ROOT, FID, "file").unwrap();
    match set_xattr(&mut client, ACCESS_ACL.as_bytes(), &read_only, 0) {
        Err(libc::EOPNOTSUPP) => return skip("needs a file system with ACLs"),
        set => set.unwrap(),
    }
    user.open(FREE, "file", 0).unwrap();
    assert_eq!(user.read(FREE, 0, 10).unwrap(), b"text");
    user.walk(ROOT, FID, "file").unwrap();
    refused(&mut user, Request::Lopen { fid: FID, flags: open_flag::WRITE }, libc::EACCES);
    user.clunk(FREE).unwrap();
    // The ACL is its owner's to set.
    for (value, flags) in [(&read_only[..], 0), (b"", 2)] {
        assert_eq!(set_xattr(&mut user, ACCESS_ACL.as_bytes(), value, flags), Err(libc::EPERM));
    }
    other.open(FREE, "file", open_flag::WRITE).unwrap();
    client.clunk(FID).unwrap();

    client.walk(ROOT, FID, "folder").unwrap();
    let value = acl(&[(For::Owner, 7), (For::User(USER), 7), (For::OwnGroup, 5), (For::Mask, 5), (For::Others, 0)]);
    set_xattr(&mut client, DEFAULT_ACL.as_bytes(), &value, 0).unwrap();
    setxattr(&plain, DEFAULT_ACL, &value, XattrFlags::empty()).unwrap();
    fs::write(plain.join("new"), "").unwrap();
    fs::create_dir(plain.join("new folder")).unwrap();
    other.walk(ROOT, FID, "folder").unwrap();
    other.does(Request::Mkdir { dfid: FID, name: b"new folder", mode: 0o777, gid: NO_UID }).unwrap();
    other.does(Request::Lcreate { fid: FID, name: b"new", flags: 1, mode: 0o666, gid: NO_UID }).unwrap();
    let told = |path: PathBuf, name: &str| {
        let mut value = [0; 256];
        let length = getxattr(&path, name, &mut value[..]);
        (fs::metadata(&path).unwrap().mode(), length.map(|length| value[..length].to_vec()))
    };
    for (object, name) in ["new", "new folder"].iter().flat_map(|object| [(object, ACCESS_ACL), (object, DEFAULT_ACL)])
    {
        assert_eq!(told(place.path("folder").join(object), name), told(plain.join(object), name), "{name} of {object}");
    }
    assert!(told(place.path("folder/new"), ACCESS_ACL).1.is_ok());
    serving.stop();
}

/// Flags of chattr(1), which hold for root, too.
#[test]
fn objects_that_may_not_change_are_eperm() {
    const DIR: u32 = 3;
    const LOG: u32 = 4;
    const FILE: u32 = 5;
    with_mounts(|| {
        let Some(_) = program_or_skip("chattr") else { return };
        let (_disk, place) = (Disk::new(), Place::new());
        fs::create_dir_all(data("fixed folder")).unwrap();
        for name in ["file", "fixed", "fixed folder/inside", "log"] {
            fs::write(data(name), "text").unwrap();
        }
        for (flag, name) in [("+i", "fixed"), ("+i", "fixed folder"), ("+a", "log")] {
            succeeds(&["chattr", flag, data(name).to_str().unwrap()]);
        }
        let serving = serve_all(&place, &[&data("")]);
        let mut client = serving.client();
        for (fid, name) in [(FID, "fixed"), (DIR, "fixed folder"), (LOG, "log"), (FILE, "file")] {
            client.walk(ROOT, fid, name).unwrap();
        }
        let to = SetStat { mode: 0o777, size: 0, ..SetStat::default() };
        for (fid, name) in [(FID, &b"fixed"[..]), (LOG, b"log")] {
            for request in [
                Request::Lopen { fid, flags: open_flag::WRITE },
                Request::Setattr { fid, to: SetStat { valid: set_bit::SIZE, ..to } },
                Request::Setattr { fid, to: SetStat { valid: set_bit::MODE, ..to } },
                Request::Link { dfid: ROOT, fid, name: b"new" },
                Request::Rename { fid, dfid: ROOT, name: b"new" },
                Request::Renameat { olddirfid: ROOT, oldname: name, newdirfid: ROOT, newname: b"new" },
                Request::Renameat { olddirfid: ROOT, oldname: b"file", newdirfid: ROOT, newname: name },
                Request::Unlinkat { dirfid: ROOT, name, flags: 0 },
            ] {
                refused(&mut client, request, libc::EPERM);
            }
        }
        assert_eq!(set_xattr(&mut client, b"user.x", b"value", 0), Err(libc::EPERM));
        for (name, makes) in [(&b"new"[..], true), (b"inside", false)] {
            for request in with_name(DIR, FILE, name).into_iter().filter(|request| makes_name(request) == makes) {
                refused(&mut client, request, libc::EPERM);
            }
        }
        // Its end may be written.
        client.does(Request::Lopen { fid: LOG, flags: open_flag::WRITE | open_flag::APPEND }).unwrap();
        client.does(Request::Write { fid: LOG, offset: 0, data: Data(b" and more") }).unwrap();
        refused(&mut client, Request::Remove { fid: FID }, libc::EPERM);
        refused(&mut client, Request::Remove { fid: LOG }, libc::EPERM);
        serving.stop();
        assert_eq!(fs::read_to_string(data("log")).unwrap(), "text and more");
    });
}

#[test]
fn a_file_with_a_lease_is_eagain_until_its_program_gives_it_up() {
    const PROGRAM: &str = "import fcntl, signal, sys\n\
        signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
        file = open('file', 'r+')\n\
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
        print('leased', flush=True)\n\
        sys.stdin.read()";
    let Some(_) = program_or_skip("python3") else { return };
    let place = Place::new();
    fs::write(place.path("file"), "text").unwrap();
    let mut command = Command::new("python3");
    command.args(["-c", PROGRAM]).current_dir(place.path("")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Running::start(&mut command);
    program.out.with("leased");
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, FID, "file").unwrap();
    client.walk(ROOT, FREE, "").unwrap();
    let open = Request::Lopen { fid: FID, flags: 0 };
    let create = Request::Lcreate { fid: FREE, name: b"file", flags: open_flag::WRITE, mode: 0o644, gid: NO_UID };
    for request in [open, create] {
        refused(&mut client, request, libc::EAGAIN);
    }
    program.end_input();
    assert!(program.wait().success());
    for request in [open, create] {
        client.does(request).unwrap();
    }
    serving.stop();
}

#[test]
fn an_attach_whose_user_cannot_be_looked_up_is_eagain_and_takes_no_fid() {
    with_mounts(|| {
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/etc"]);
        // Reading it fails: EISDIR.
        fs::create_dir("/etc/passwd").unwrap();
        fs::write("/etc/nsswitch.conf", "passwd: files\ngroup: files\n").unwrap();
        let place = Place::new();
        let serving = place.serve();
        let mut client = serving.connect();
        client.version();
        for _ in 0..2 {
            assert_eq!(client.attach(ROOT, USER, b""), Err(libc::EAGAIN));
            assert_eq!(client.clunk(ROOT), Err(libc::EBADF));
        }
        fs::remove_dir("/etc/passwd").unwrap();
        fs::write("/etc/passwd", format!("user:x:{USER}:{USER}::/:/bin/sh\n")).unwrap();
        client.attach(ROOT, USER, b"").unwrap();
        serving.stop();
    });
}

/// The error of a request for a removed object whose fid is not open.
fn removed_object_has(request: &Request<'_>, fid: u32) -> Option<i32> {
    match request {
        Request::Read { .. } | Request::Write { .. } | Request::Readdir { .. } | Request::Fsync { .. } => {
            Some(libc::EBADF)
        }
        Request::Lock { .. } | Request::Getlock { .. } => Some(libc::EBADF),
        // The name of its walk is gone.
        Request::Rename { fid: moved, .. } if *moved == fid => Some(libc::ENOENT),
        // The root has no name.
        Request::Rename { .. } => Some(libc::EINVAL),
        Request::Remove { .. } => Some(libc::ENOENT),
        // These do not reach the object.
        Request::Clunk { .. } | Request::Xattrcreate { .. } => None,
        Request::Walk { names, .. } if *names == Names::default() => None,
        _ => Some(libc::ESTALE),
    }
}

#[test]
fn messages_for_an_object_that_was_removed_say_so() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    let mut buffer = Vec::new();
    let names = Names::of(&[&b"inside"[..]], &mut buffer).unwrap();
    for (fid, name) in [(1, "gone"), (2, "gone folder")] {
        for request in with_fid(fid).into_iter().chain([Request::Walk { fid, newfid: 98, names }]) {
            let path = place.path(name);
            if fid == 1 {
                fs::write(&path, "").unwrap()
            } else {
                fs::create_dir(&path).unwrap()
            }
            client.walk(ROOT, fid, name).unwrap();
            if fid == 1 {
                fs::remove_file(&path).unwrap()
            } else {
                fs::remove_dir(&path).unwrap()
            }
            let wanted = removed_object_has(&request, fid);
            assert_eq!(client.does(request).err(), wanted, "{request:?} for {name}");
            match request {
                Request::Clunk { .. } | Request::Remove { .. } => continue,
                Request::Walk { .. } if wanted.is_none() => client.clunk(98).unwrap(),
                Request::Xattrcreate { .. } => {
                    client.does(Request::Write { fid, offset: 0, data: Data(b"x") }).unwrap();
                    assert_eq!(client.clunk(fid), Err(libc::ESTALE));
                    continue;
                }
                _ => {}
            }
            client.clunk(fid).unwrap();
        }
    }
    assert_eq!(tree(&place.path("")).len(), 1);
    serving.stop();
}
