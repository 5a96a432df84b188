//! Each failure has the attributes of its objects, as far as their handles are valid (RFC 1813 section 3.3, `post_op_attr` and `wcc_data`
//! of the results of failures).

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};

use ksf::engine::EngineKind;
use ksf_fs::{Clients, ExportOptions, FileSettings, Files, LaneOptions, Length};
use ksf_nfs::ExportSettings;
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_test::rpc::words;
use ksf_test::{is_root, own_run_or_skip, succeeds};

use crate::common::{Attr, Client, OK, Place, Serving, Wcc, handle, mode, named, read_args, write_args};
use crate::other_client::{OtherClient, mount_failure};
use crate::procedures::arguments;

const PERM: u32 = 1;
const NOENT: u32 = 2;
const ACCES: u32 = 13;
const EXIST: u32 = 17;
const XDEV: u32 = 18;
const NOTDIR: u32 = 20;
const ISDIR: u32 = 21;
const INVAL: u32 = 22;
const FBIG: u32 = 27;
const NOSPC: u32 = 28;
const ROFS: u32 = 30;
const NAMETOOLONG: u32 = 63;
const NOTEMPTY: u32 = 66;
const STALE: u32 = 70;
const BADHANDLE: u32 = 10_001;
const NOT_SYNC: u32 = 10_002;
const BAD_COOKIE: u32 = 10_003;
const NOTSUPP: u32 = 10_004;
const TOOSMALL: u32 = 10_005;
/// `MNT3ERR_SERVERFAULT`.
const SERVERFAULT: u32 = 10_006;
const BADTYPE: u32 = 10_007;
const JUKEBOX: u32 = 10_008;

const COMMIT: u32 = 21;

/// A failing call: its procedure, arguments, status, and the objects whose attributes follow; 0 for none.
type Call = (u32, Vec<u8>, u32, Vec<u64>);

/// Inode numbers of the attributes in the results of a failed procedure, 0 for missing ones.
fn objects(procedure: u32, rest: &[u8]) -> Vec<u64> {
    let mut r = XdrReader::new(rest);
    let mut attr = |has_before: bool| {
        let attr = if has_before { Wcc::read(&mut r).after } else { Attr::read_option(&mut r) };
        attr.map_or(0, |attr| attr.fileid)
    };
    let objects = match procedure {
        1 => Vec::new(),
        2 | 7..=13 | 21 => vec![attr(true)],
        14 => vec![attr(true), attr(true)],
        15 => vec![attr(false), attr(true)],
        _ => vec![attr(false)],
    };
    r.finish().unwrap();
    objects
}

/// Serves with one thread for operations, and one for syncs.
fn serve_all(place: &Place, exports: Vec<ExportSettings>) -> Serving {
    let files = FileSettings { lanes: LaneOptions { threads: 1 }, ..place.files(exports) };
    place.serve_files(Ipv4Addr::LOCALHOST.into(), EngineKind::Epoll, files)
}

/// Holds the thread for syncs, as a hung disk does, until the sender is dropped.
fn hold_syncs(files: &Files) -> Sender<()> {
    let ((hold, held), (begun, has_begun)) = (channel(), channel());
    files.lanes.submit(0, Length::Short, 0, move |lane| {
        lane.leave(0, 0, move |_| {
            begun.send(()).unwrap();
            assert!(held.recv().is_err());
        });
    });
    has_begun.recv().unwrap();
    hold
}

/// Makes each call with our client and with `nfs3_client`, while no sync ends: only COMMIT waits for one before it fails. Lists all
/// rows that do not match, at once.
#[track_caller]
fn assert_fail(serving: &Serving, client: &mut Client, calls: Vec<Call>) {
    let (mut other, mut wrong) = (OtherClient::beside(client), Vec::new());
    for (at, (procedure, args, status, expected)) in calls.into_iter().enumerate() {
        let _hold = (procedure != COMMIT).then(|| hold_syncs(serving.nfs.files()));
        let (got, rest) = client.nfs(procedure, &args);
        assert_eq!(got, status, "row {at}, procedure {procedure}");
        let expected = (status, expected);
        for (by, found) in [("ours", (got, objects(procedure, &rest))), ("other", other.failure(procedure, &args))] {
            if found != expected {
                wrong.push(format!("row {at}, procedure {procedure}, {by}: {found:?} and not {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Status of a call that fails with the attributes of each of its objects: a second try, by `nfs3_client`, fails alike.
#[track_caller]
pub(crate) fn failure(client: &mut Client, procedure: u32, args: &[u8]) -> u32 {
    let (status, rest) = client.nfs(procedure, args);
    assert_ne!(status, OK, "procedure {procedure}");
    let by_other = OtherClient::beside(client).failure(procedure, args);
    assert_eq!(by_other, (status, objects(procedure, &rest)), "procedure {procedure}");
    with_attributes(by_other)
}

/// [`failure`] of a call that may have another result the second time.
#[track_caller]
pub(crate) fn only_failure(client: &Client, procedure: u32, args: &[u8]) -> u32 {
    with_attributes(OtherClient::beside(client).failure(procedure, args))
}

#[track_caller]
fn with_attributes((status, objects): (u32, Vec<u64>)) -> u32 {
    assert!(!objects.contains(&0), "status {status} without attributes: {objects:?}");
    status
}

pub(crate) fn inode(path: impl AsRef<Path>) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}

/// The handle of an export's root, also for clients that may not mount it.
fn root_of(serving: &Serving, path: &Path) -> Vec<u8> {
    let exports = serving.nfs.files().fs.exports();
    let path = path.canonicalize().unwrap();
    exports.iter().find(|export| export.path() == path).unwrap().root().as_bytes().to_vec()
}

/// A call of each procedure but NULL for an object, whose inode number is 0 where results have no attributes of it.
fn each_procedure(object: &[u8], status: u32, at: u64) -> impl Iterator<Item = Call> {
    arguments(object).into_iter().map(move |(procedure, args)| {
        let objects = match procedure {
            1 => Vec::new(),
            14 | 15 => vec![at, at],
            _ => vec![at],
        };
        (procedure, args, status, objects)
    })
}

/// Arguments of CREATE, MKDIR, SYMLINK and MKNOD for a name.
fn makes(dir: &[u8], name: &str) -> Vec<(u32, Vec<u8>)> {
    let at = named(dir, name);
    let mut target = [at.clone(), mode(0o777)].concat();
    target.put_opaque(b"target");
    vec![
        (8, [at.clone(), words(&[1]), mode(0o644)].concat()),
        (9, [at.clone(), mode(0o755)].concat()),
        (10, target),
        (11, [at, words(&[7]), mode(0o644)].concat()),
    ]
}

fn list_args(dir: &[u8], (cookie, verifier): (u64, u64), counts: &[u32]) -> Vec<u8> {
    let mut args = handle(dir);
    args.put_u64(cookie);
    args.put_u64(verifier);
    args.put(&words(counts));
    args
}

#[test]
fn attributes_follow_each_failure() {
    let place = Place::new();
    ["folder/inside", "full/inside"].iter().for_each(|path| fs::create_dir_all(place.path(path)).unwrap());
    fs::write(place.path("file"), "text").unwrap();
    symlink("file", place.path("link")).unwrap();
    succeeds(&["mkfifo", place.path("fifo").to_str().unwrap()]);
    let [other, still, foreign] = ["other", "still", "foreign"].map(|name| place.beside(name));
    fs::write(still.join("file"), "text").unwrap();
    let mut clients = Clients::default();
    clients.add("10.0.0.0/8".parse().unwrap());
    let export = |path: &Path| ExportSettings { path: path.to_owned(), ..place.export() };
    let exports = vec![
        place.export(),
        export(&other),
        ExportSettings {
            path: still.clone(),
            ..place.export_as(ExportOptions { read_only: true, ..ExportOptions::default() })
        },
        ExportSettings { clients, ..export(&foreign) },
    ];
    let serving = serve_all(&place, exports);
    let (mut client, root) = serving.mount(&place.path(""));
    let [file, folder, link, fifo] = ["file", "folder", "link", "fifo"].map(|name| client.lookup(&root, name));
    let [root_at, file_at, folder_at, link_at, fifo_at] =
        ["", "file", "folder", "link", "fifo"].map(|name| inode(place.path(name)));
    let there = client.mnt(&other).unwrap();
    let (closed_to_us, none) = (root_of(&serving, &foreign), &b"no handle"[..]);
    let gone = client.create(&root, "gone");
    fs::remove_file(place.path("gone")).unwrap();
    let removed = {
        let made = client.done(9, &[named(&root, "removed"), mode(0o755)].concat());
        fs::remove_dir(place.path("removed")).unwrap();
        crate::common::made(&made)
    };
    let long = "n".repeat(256);
    let size = |size: u32| words(&[0, 0, 0, 1, 0, size, 0, 0, 0]);
    let mut calls = vec![
        (2, [handle(&file), mode(0o600), words(&[1, 1, 1])].concat(), NOT_SYNC, vec![file_at]),
        (2, [handle(&link), mode(0o600), words(&[0])].concat(), NOTSUPP, vec![link_at]),
        (2, [handle(&folder), size(4)].concat(), ISDIR, vec![folder_at]),
        (2, [handle(&fifo), size(4)].concat(), INVAL, vec![fifo_at]),
        (2, [handle(&file), words(&[0, 1, u32::MAX, 0, 0, 0, 0, 0])].concat(), INVAL, vec![file_at]),
        (2, [handle(&file), words(&[0, 0, 0, 1, u32::MAX, 0, 0, 0, 0])].concat(), FBIG, vec![file_at]),
        (3, named(&root, "none"), NOENT, vec![root_at]),
        (3, named(&root, &long), NAMETOOLONG, vec![root_at]),
        (3, named(&root, "a/b"), INVAL, vec![root_at]),
        (3, named(&file, "none"), NOTDIR, vec![file_at]),
        (5, handle(&file), INVAL, vec![file_at]),
        (6, read_args(&folder, 0, 1), ISDIR, vec![folder_at]),
        (6, read_args(&fifo, 0, 1), INVAL, vec![fifo_at]),
        (7, write_args(&folder, 0, 0, b"x"), ISDIR, vec![folder_at]),
        (7, write_args(&fifo, 0, 0, b"x"), INVAL, vec![fifo_at]),
        (7, write_args(&file, u64::MAX, 0, b"x"), FBIG, vec![file_at]),
        (8, [named(&root, "folder"), words(&[0]), mode(0o644)].concat(), EXIST, vec![root_at]),
        (8, [named(&root, "file"), words(&[2, 1, 2])].concat(), EXIST, vec![root_at]),
        (8, [named(&root, "new"), words(&[0, 0, 0, 0, 1, u32::MAX, 0, 0, 0])].concat(), FBIG, vec![root_at]),
        (10, [named(&root, "new"), mode(0o777), words(&[0])].concat(), INVAL, vec![root_at]),
        (11, [named(&root, "new"), words(&[3]), mode(0o644), words(&[u32::MAX, 0])].concat(), INVAL, vec![root_at]),
        (12, named(&root, "none"), NOENT, vec![root_at]),
        (12, named(&root, "folder"), ISDIR, vec![root_at]),
        (12, named(&file, "x"), NOTDIR, vec![file_at]),
        (13, named(&root, "none"), NOENT, vec![root_at]),
        (13, named(&root, "file"), NOTDIR, vec![root_at]),
        (13, named(&root, "folder"), NOTEMPTY, vec![root_at]),
        (14, [named(&root, "none"), named(&folder, "x")].concat(), NOENT, vec![root_at, folder_at]),
        (14, [named(&root, "file"), named(&root, "folder")].concat(), ISDIR, vec![root_at, root_at]),
        (14, [named(&root, "folder"), named(&folder, "x")].concat(), INVAL, vec![root_at, folder_at]),
        (14, [named(&folder, "inside"), named(&root, "full")].concat(), NOTEMPTY, vec![folder_at, root_at]),
        (14, [named(&root, "file"), named(&folder, "..")].concat(), INVAL, vec![root_at, folder_at]),
        (14, [named(&file, "x"), named(&root, "x")].concat(), NOTDIR, vec![file_at, root_at]),
        (14, [named(&root, "file"), named(&file, "x")].concat(), NOTDIR, vec![root_at, file_at]),
        (14, [named(&root, "file"), named(&there, "x")].concat(), XDEV, vec![root_at, 0]),
        (14, [named(&root, "file"), named(none, "x")].concat(), BADHANDLE, vec![root_at, 0]),
        (14, [named(none, "x"), named(&root, "x")].concat(), BADHANDLE, vec![0, root_at]),
        (14, [named(&root, "file"), named(&closed_to_us, "x")].concat(), ACCES, vec![root_at, 0]),
        (14, [named(&closed_to_us, "x"), named(&root, "x")].concat(), ACCES, vec![0, root_at]),
        (14, [named(&root, "file"), named(&removed, "x")].concat(), STALE, vec![root_at, 0]),
        (14, [named(&removed, "x"), named(&root, "x")].concat(), STALE, vec![0, root_at]),
        (15, [handle(&file), named(&root, "folder")].concat(), EXIST, vec![file_at, root_at]),
        (15, [handle(&file), named(&file, "x")].concat(), NOTDIR, vec![file_at, file_at]),
        (15, [handle(&folder), named(&root, "x")].concat(), PERM, vec![folder_at, root_at]),
        (15, [handle(&file), named(&there, "x")].concat(), XDEV, vec![file_at, 0]),
        (15, [handle(&file), named(none, "x")].concat(), BADHANDLE, vec![file_at, 0]),
        (15, [handle(none), named(&root, "x")].concat(), BADHANDLE, vec![0, root_at]),
        (15, [handle(&file), named(&closed_to_us, "x")].concat(), ACCES, vec![file_at, 0]),
        (15, [handle(&closed_to_us), named(&root, "x")].concat(), ACCES, vec![0, root_at]),
        (15, [handle(&file), named(&removed, "x")].concat(), STALE, vec![file_at, 0]),
        (15, [handle(&gone), named(&root, "x")].concat(), STALE, vec![0, root_at]),
        (16, list_args(&file, (0, 0), &[4096]), NOTDIR, vec![file_at]),
        (16, list_args(&root, (0, 0), &[110]), TOOSMALL, vec![root_at]),
        (16, list_args(&root, (1, 2), &[4096]), BAD_COOKIE, vec![root_at]),
        (17, list_args(&file, (0, 0), &[4096, 4096]), NOTDIR, vec![file_at]),
        (17, list_args(&root, (0, 0), &[4096, 110]), TOOSMALL, vec![root_at]),
        (17, list_args(&root, (u64::MAX, 0), &[4096, 4096]), BAD_COOKIE, vec![root_at]),
        (21, read_args(&folder, 0, 0), ISDIR, vec![folder_at]),
        (21, read_args(&fifo, 0, 0), INVAL, vec![fifo_at]),
    ];
    for kind in [1, 2, 5] {
        calls.push((11, [named(&root, "new"), words(&[kind])].concat(), BADTYPE, vec![root_at]));
    }
    for (dir, name, status, at) in [
        (&root, "file", EXIST, root_at),
        (&root, "..", EXIST, root_at),
        (&root, &long, NAMETOOLONG, root_at),
        (&file, "new", NOTDIR, file_at),
    ] {
        calls.extend(makes(dir, name).into_iter().map(|(procedure, args)| (procedure, args, status, vec![at])));
    }
    for (object, status) in [(none, BADHANDLE), (&closed_to_us, ACCES), (&removed, STALE)] {
        calls.extend(each_procedure(object, status, 0));
    }
    assert_fail(&serving, &mut client, calls);

    let (root, root_at) = (client.mnt(&still).unwrap(), inode(&still));
    let (file, file_at) = (client.lookup(&root, "file"), inode(still.join("file")));
    let mut calls = vec![
        (2, [handle(&file), mode(0o600), words(&[0])].concat(), ROFS, vec![file_at]),
        (7, write_args(&file, 0, 2, b"x"), ROFS, vec![file_at]),
        (12, named(&root, "file"), ROFS, vec![root_at]),
        (13, named(&root, "file"), ROFS, vec![root_at]),
        (14, [named(&root, "file"), named(&root, "x")].concat(), ROFS, vec![root_at, root_at]),
        (15, [handle(&file), named(&root, "x")].concat(), ROFS, vec![file_at, root_at]),
    ];
    calls.extend(makes(&root, "new").into_iter().map(|(procedure, args)| (procedure, args, ROFS, vec![root_at])));
    assert_fail(&serving, &mut client, calls);
    serving.stop();
}

#[test]
fn attributes_follow_each_refusal_of_the_caller() {
    if !is_root() {
        return ksf_test::skip("identities need root");
    }
    let place = Place::new();
    fs::create_dir(place.path("closed")).unwrap();
    fs::create_dir(place.path("open")).unwrap();
    ["file", "closed/file"].iter().for_each(|name| fs::write(place.path(name), "text").unwrap());
    for (name, mode) in [("", 0o755), ("closed", 0o700), ("open", 0o777), ("file", 0o600)] {
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let serving = serve_all(&place, vec![place.export()]);
    let mut client = serving.user(1000, 1000, &[]);
    let root = client.mnt(&place.path("")).unwrap();
    let [closed, open, file] = ["closed", "open", "file"].map(|name| client.lookup(&root, name));
    let [closed_at, open_at, file_at] = ["closed", "open", "file"].map(|name| inode(place.path(name)));
    let mut calls = vec![
        (2, [handle(&file), mode(0o666), words(&[0])].concat(), PERM, vec![file_at]),
        (2, [handle(&file), words(&[0, 0, 0, 1, 0, 0, 0, 0, 0])].concat(), ACCES, vec![file_at]),
        (3, named(&closed, "file"), ACCES, vec![closed_at]),
        (6, read_args(&file, 0, 1), ACCES, vec![file_at]),
        (7, write_args(&file, 0, 0, b"x"), ACCES, vec![file_at]),
        (11, [named(&open, "new"), words(&[3]), mode(0o644), words(&[1, 1])].concat(), PERM, vec![open_at]),
        (12, named(&closed, "file"), ACCES, vec![closed_at]),
        (13, named(&closed, "file"), ACCES, vec![closed_at]),
        (14, [named(&closed, "file"), named(&open, "x")].concat(), ACCES, vec![closed_at, open_at]),
        (14, [named(&open, "x"), named(&closed, "x")].concat(), ACCES, vec![open_at, closed_at]),
        (15, [handle(&file), named(&closed, "x")].concat(), ACCES, vec![file_at, closed_at]),
        (16, list_args(&closed, (0, 0), &[4096]), ACCES, vec![closed_at]),
        (17, list_args(&closed, (0, 0), &[4096, 4096]), ACCES, vec![closed_at]),
    ];
    calls.extend(makes(&closed, "new").into_iter().map(|(procedure, args)| (procedure, args, ACCES, vec![closed_at])));
    assert_fail(&serving, &mut client, calls);
    serving.stop();
}

/// A user database that fails, mount points in the export, a file system without room.
#[test]
fn attributes_follow_each_failure_of_the_machine() {
    let inside = || {
        let Some(()) = own_run_or_skip("file systems of its own") else { return };
        let place = Place::new();
        let full = Path::new("/run/full");
        for (path, options) in [(full, "size=64k,nr_inodes=3"), (Path::new("/etc"), "size=64k")] {
            fs::create_dir_all(path).unwrap();
            succeeds(&["mount", "-t", "tmpfs", "-o", options, "tmpfs", path.to_str().unwrap()]);
        }
        // Reading it fails: EISDIR.
        fs::create_dir("/etc/passwd").unwrap();
        fs::write("/etc/nsswitch.conf", "passwd: files\n").unwrap();
        fs::create_dir(full.join("mounted")).unwrap();
        fs::create_dir(place.path("below")).unwrap();
        let managed = place.export_as(ExportOptions { manage_gids: true, ..ExportOptions::default() });
        let exports = vec![managed, ExportSettings { path: full.to_owned(), ..place.export() }];
        let serving = serve_all(&place, exports);
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/run/full/mounted"]);

        let (root, root_at) = (root_of(&serving, &place.path("")), inode(place.path("")));
        let calls = each_procedure(&root, JUKEBOX, root_at);
        let mut client = serving.user(1000, 1000, &[]);
        assert_fail(&serving, &mut client, calls.collect());
        // MOUNT has no status for later.
        assert_eq!(mount_failure(&mut client, &place.path("below")), SERVERFAULT);

        let mut client = serving.client();
        let (root, root_at) = (client.mnt(full).unwrap(), inode(full));
        let file = client.create(&root, "file");
        let file_at = inode(full.join("file"));
        client.done(7, &write_args(&file, 0, 0, &[1; 64 << 10]));
        let mut calls = vec![
            (3, named(&root, "mounted"), ACCES, vec![root_at]),
            (7, write_args(&file, 64 << 10, 0, b"x"), NOSPC, vec![file_at]),
            (13, named(&root, "mounted"), ACCES, vec![root_at]),
            (14, [named(&root, "mounted"), named(&root, "x")].concat(), ACCES, vec![root_at, root_at]),
        ];
        calls.extend(makes(&root, "new").into_iter().map(|(procedure, args)| (procedure, args, NOSPC, vec![root_at])));
        assert_fail(&serving, &mut client, calls);
        serving.stop();
    };
    std::thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
