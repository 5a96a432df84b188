//! Names, opens, owners and qids, row by row: numbers of errors are those of a call on a plain directory.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::common::{Client, Place, ROOT};
use crate::messages::USER;
use ksf::engine::EngineKind;
use ksf_fs::{ExportOptions, Squash};
use ksf_proto::p9::{NO_UID, Qid, Reply, Request, SetStat, UNLINK_DIRECTORY};
use ksf_test::{Running, install, root_or_skip, stream};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use rustix::process::Signal;

fn number(result: io::Result<()>) -> Result<(), i32> {
    result.map_err(|error| error.raw_os_error().expect("an error of the kernel"))
}

/// The same objects in the export and beside it.
fn objects(at: &Path) {
    fs::create_dir_all(at.join("full/inner")).unwrap();
    fs::create_dir(at.join("empty")).unwrap();
    fs::write(at.join("full/inside"), "").unwrap();
    fs::write(at.join("file"), "").unwrap();
}

/// Makes a fid of the directory of a path, and returns the name in it.
fn parent<'a>(client: &mut Client, fid: u32, path: &'a str) -> &'a [u8] {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    client.walk(ROOT, fid, dir).unwrap();
    name.as_bytes()
}

fn unlink(name: &[u8], flags: u32) -> Request<'_> {
    Request::Unlinkat { dirfid: ROOT, name, flags }
}

fn symlink_to(target: &[u8]) -> Request<'_> {
    Request::Symlink { dfid: ROOT, name: b"new", target, gid: NO_UID }
}

#[test]
fn names_are_refused_as_on_a_plain_directory() {
    let place = Place::new();
    let plain = place.beside("plain");
    objects(&plain);
    objects(&place.path(""));
    let serving = place.serve();
    let mut client = serving.client();
    for (old, new) in [
        ("file", "full"),
        ("file", "empty"),
        ("full", "file"),
        ("empty", "full"),
        ("full/inner", "full"),
        ("full", "full/inner"),
        ("full", "full/new"),
        ("full", "full/inner/new"),
    ] {
        let wanted = number(fs::rename(plain.join(old), plain.join(new)));
        assert!(wanted.is_err(), "{old} {new}");
        let (oldname, newname) = (parent(&mut client, 1, old), parent(&mut client, 2, new));
        client.walk(ROOT, 3, old).unwrap();
        for request in [
            Request::Renameat { olddirfid: 1, oldname, newdirfid: 2, newname },
            Request::Rename { fid: 3, dfid: 2, name: newname },
        ] {
            assert_eq!(client.does(request), wanted, "{request:?} for {old} {new}");
        }
        (1..4).for_each(|fid| client.clunk(fid).unwrap());
    }
    client.walk(ROOT, 1, "full").unwrap();
    let link = Request::Link { dfid: ROOT, fid: 1, name: b"new" };
    let long = "n".repeat(4096);
    for (request, wanted) in [
        (link, fs::hard_link(plain.join("full"), plain.join("new"))),
        (unlink(b"file", UNLINK_DIRECTORY), fs::remove_dir(plain.join("file"))),
        (unlink(b"full", UNLINK_DIRECTORY), fs::remove_dir(plain.join("full"))),
        (unlink(b"full", 0), fs::remove_file(plain.join("full"))),
        (symlink_to(b""), symlink("", plain.join("new"))),
        (symlink_to(long.as_bytes()), symlink(&long, plain.join("new"))),
        (Request::Remove { fid: 1 }, fs::remove_dir(plain.join("full"))),
    ] {
        let wanted = number(wanted);
        assert!(wanted.is_err(), "{request:?}");
        assert_eq!(client.does(request), wanted, "{request:?}");
    }
    // No call has these.
    assert_eq!(client.does(symlink_to(b"a\0b")), Err(libc::EINVAL));
    for (major, minor) in [(4096, 0), (0, 1 << 20), (u32::MAX, u32::MAX)] {
        for mode in [libc::S_IFCHR | 0o600, libc::S_IFBLK | 0o600] {
            let device = Request::Mknod { dfid: ROOT, name: b"new", mode, major, minor, gid: NO_UID };
            assert_eq!(client.does(device), Err(libc::EINVAL), "{major} {minor}");
        }
    }
    assert!(!place.path("new").exists());
    client.does(symlink_to(&long.as_bytes()[1..])).unwrap();
    serving.stop();
}

#[test]
fn opens_are_refused_by_the_type_and_the_use_of_a_file() {
    let place = Place::new();
    let make = |name: &str, kind, device| mknodat(CWD, place.path(name), kind, Mode::from_raw_mode(0o666), device);
    make("fifo", FileType::Fifo, 0).unwrap();
    make("socket", FileType::Socket, 0).unwrap();
    let device = make("device", FileType::CharacterDevice, makedev(1, 3));
    install("/bin/sleep", &place.path("program"));
    let mut running = Running::start(Command::new(place.path("program")).arg("600"));
    let serving = place.serve();
    let mut client = serving.client();
    let device = device.is_ok().then_some("device");
    for (fid, name) in (1..).zip(["fifo", "socket"].into_iter().chain(device)) {
        client.walk(ROOT, fid, name).unwrap();
        for flags in [0, 1, 2, 0o1000] {
            assert_eq!(client.does(Request::Lopen { fid, flags }), Err(libc::EINVAL), "{name}, flags {flags:o}");
        }
    }
    client.walk(ROOT, 9, "program").unwrap();
    let wanted = number(fs::OpenOptions::new().write(true).open(place.path("program")).map(drop));
    assert_eq!(wanted, Err(libc::ETXTBSY));
    for flags in [1, 2, 0o1001] {
        assert_eq!(client.does(Request::Lopen { fid: 9, flags }), wanted, "flags {flags:o}");
    }
    let to = SetStat { valid: 0x8, ..SetStat::default() };
    assert_eq!(client.does(Request::Setattr { fid: 9, to }), wanted);
    running.signal(Signal::KILL);
    running.wait();
    client.does(Request::Lopen { fid: 9, flags: 1 }).unwrap();
    serving.stop();
}

#[test]
fn users_are_squashed_to_the_anonymous_user_of_the_export() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    for anonymous in [(65_534, 65_534), (61_700, 61_701)] {
        for (squash, root, user) in [
            (Squash::None, (0, 0), (USER, anonymous.1)),
            (Squash::Root, anonymous, (USER, anonymous.1)),
            (Squash::All, anonymous, anonymous),
        ] {
            let mut export = place.export();
            export.options = ExportOptions { squash, anonymous, ..export.options };
            let serving = place.serve_all(EngineKind::Epoll, vec![export]);
            for (uid, wanted) in [(0, root), (USER, user)] {
                let mut client = serving.user(uid);
                client.does(Request::Mkdir { dfid: ROOT, name: b"new", mode: 0o755, gid: 0 }).unwrap();
                client.walk(ROOT, 1, "new").unwrap();
                let stat = client.stat(1).unwrap();
                assert_eq!((stat.uid, stat.gid), wanted, "{squash:?} of {uid} with {anonymous:?}");
                fs::remove_dir(place.path("new")).unwrap();
            }
            serving.stop();
        }
    }
}

/// A client whose port only root may have.
fn from_a_reserved_port(address: SocketAddr) -> Client {
    let from = |port| -> rustix::io::Result<TcpStream> {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
        connect(&socket, &address)?;
        Ok(socket.into())
    };
    let stream = (512..1024).rev().find_map(|port| from(port).ok()).expect("a port that is free");
    stream::be_patient(&stream);
    Client(stream, None)
}

#[test]
fn a_secure_export_is_attached_from_a_reserved_port() {
    let Some(()) = root_or_skip("reserved ports") else { return };
    let place = Place::new();
    let mut export = place.export();
    export.secure = true;
    let serving = place.serve_all(EngineKind::Epoll, vec![export]);
    let mut other = serving.connect();
    other.version();
    assert_eq!(other.attach(1, 0, b""), Err(libc::EACCES));
    let mut client = from_a_reserved_port(other.0.peer_addr().unwrap());
    client.version();
    client.attach(1, 0, b"").unwrap();
    serving.stop();
}

fn qid(client: &mut Client, request: Request<'_>) -> Qid {
    let told = client.ask(request, |reply| match reply {
        Reply::Lopen { qid, .. } | Reply::Lcreate { qid, .. } => qid,
        Reply::Mkdir { qid } | Reply::Symlink { qid } | Reply::Mknod { qid } => qid,
        other => panic!("{other:?}"),
    });
    told.unwrap()
}

#[test]
fn each_message_tells_the_same_qid_of_an_object() {
    let place = Place::new();
    let serving = place.serve();
    let mut client = serving.client();
    client.walk(ROOT, 1, "").unwrap();
    let gid = NO_UID;
    let fifo = libc::S_IFIFO | 0o600;
    let made = [
        ("file", Request::Lcreate { fid: 1, name: b"file", flags: 2, mode: 0o640, gid }),
        ("folder", Request::Mkdir { dfid: ROOT, name: b"folder", mode: 0o750, gid }),
        ("link", Request::Symlink { dfid: ROOT, name: b"link", target: b"file", gid }),
        ("fifo", Request::Mknod { dfid: ROOT, name: b"fifo", mode: fifo, major: 0, minor: 0, gid }),
    ];
    let made = made.map(|(name, request)| (name, qid(&mut client, request)));
    assert_eq!(client.stat(1).unwrap().qid, made[0].1, "of the fid of Tlcreate");
    for (fid, (name, qid)) in (2..).zip(made) {
        assert_eq!(client.walk(ROOT, fid, name), Ok(vec![qid]), "{name}");
        assert_eq!(client.stat(fid).unwrap().qid, qid, "{name}");
    }
    for (fid, (name, wanted)) in [(2, made[0]), (3, made[1])] {
        assert_eq!(qid(&mut client, Request::Lopen { fid, flags: 0 }), wanted, "{name}");
    }
    let root = client.attach(10, 0, b"").unwrap();
    assert_eq!(client.stat(ROOT).unwrap().qid, root);
    client.does(Request::Lopen { fid: 10, flags: 0 }).unwrap();
    let listed = client.qids(10);
    for (name, qid) in made.into_iter().chain([(".", root)]) {
        let (_, found) = listed.iter().find(|(listed, _)| listed == name).expect("it is listed");
        assert_eq!((found.kind, found.path), (qid.kind, qid.path), "{name}");
    }
    serving.stop();
}
