//! What holds for all procedures: second tries, identities, who may mount, restarts, other programs.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{TryRecvError, channel};

use crate::common::{
    Attr, Client, OK, Place, Wcc, handle, hold_lanes, made, mode, named, read_args, split, write_args,
};
use crate::other_client::mount_failure;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_fs::{ExportOptions, HandleSource, Squash};
use ksf_nfs::{ClientCounts, ExportSettings, Procedure};
use ksf_proto::oncrpc::{Accepted, AuthStat, Denied, MOUNT_PROGRAM, NFS_PROGRAM, Reply, ReplyStatus};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_test::rpc::words;
use ksf_test::{own_run_or_skip, root_or_skip, skip, succeeds, wait_until};

const PERM: u32 = 1;
const NOENT: u32 = 2;
const ACCES: u32 = 13;
const NOTDIR: u32 = 20;
const INVAL: u32 = 22;
const ROFS: u32 = 30;
const NAMETOOLONG: u32 = 63;

/// Mounts, lists, reads, writes, renames and removes.
fn works(client: &mut Client, place: &Place) {
    let root = client.mnt(&place.path("")).unwrap();
    let file = client.create(&root, "file");
    client.done(7, &write_args(&file, 0, 2, b"hello"));
    assert_eq!(fs::read(place.path("file")).unwrap(), b"hello");
    client.done(14, &[named(&root, "file"), named(&root, "renamed")].concat());
    assert_eq!(client.lookup(&root, "renamed"), file, "a handle survives a rename");
    let rest = client.done(6, &read_args(&file, 1, 3));
    assert!(rest.ends_with(b"ell\0"));
    client.done(12, &named(&root, "renamed"));
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 0);
}

#[test]
fn a_client_works_on_each_engine() {
    for engine in ksf_test::working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe) {
        let place = Place::new();
        let serving = place.serve_all(engine, vec![place.export()]);
        works(&mut serving.client(), &place);
        let counts = serving.nfs.procedures();
        assert_eq!(counts[Procedure::Write as usize].calls, 1);
        assert_eq!(counts[Procedure::Read as usize].failed, 0);
        serving.stop();
    }
}

#[test]
fn a_call_that_is_sent_again_is_not_carried_out_again() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    fs::write(place.path("file"), "").unwrap();
    let remove = named(&root, "file");
    client.xid = 500;
    client.send(NFS_PROGRAM, 3, 12, &remove);
    let first = client.receive();
    assert_eq!(split(&first.2).0, OK);
    // Over the same connection, and over a new one after that is gone.
    client.send(NFS_PROGRAM, 3, 12, &remove);
    assert_eq!(client.receive(), first);
    drop(client);
    let mut again = serving.client();
    again.xid = 500;
    again.send(NFS_PROGRAM, 3, 12, &remove);
    assert_eq!(again.receive(), first, "the reply is the same to its last byte");
    assert_eq!(serving.nfs.procedures()[Procedure::Remove as usize].replayed, 2);
    // Another call, another client, another machine at the same address.
    again.xid = 501;
    again.send(NFS_PROGRAM, 3, 12, &remove);
    assert_eq!(split(&again.receive().2).0, NOENT);
    for (machine, uid) in [("tests", 7), ("another", 0)] {
        let mut other = Client::new(serving.address(), machine, uid, 0, &[]);
        other.xid = 500;
        other.send(NFS_PROGRAM, 3, 12, &remove);
        let status = split(&other.receive().2).0;
        assert!([NOENT, ACCES].contains(&status), "{machine} {uid}: {status}");
    }
    // A procedure that changes nothing is carried out each time.
    fs::write(place.path("file"), "").unwrap();
    for expected in [OK, NOENT] {
        again.xid = 502;
        again.send(NFS_PROGRAM, 3, 3, &remove);
        assert_eq!(split(&again.receive().2).0, expected);
        let _ = fs::remove_file(place.path("file"));
    }
    serving.stop();
}

#[test]
fn calls_that_are_sent_again_in_a_storm_are_carried_out_once() {
    let (place, serving) = Place::served();
    let (_client, root) = serving.mount(&place.path(""));
    let mut others: Vec<Client> = (0..3).map(|_| serving.client()).collect();
    for round in 0..100 {
        let create = [named(&root, &format!("file {round}")), words(&[1]), mode(0o644)].concat();
        for client in &mut others {
            client.xid = 10_000 + round;
            client.send(NFS_PROGRAM, 3, 8, &create);
        }
        for client in &mut others {
            // GUARDED: carried out twice it would be EXIST.
            let (_, _, results) = client.receive();
            assert_eq!(split(&results).0, OK, "round {round}");
        }
    }
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 100);
    serving.stop();
}

#[test]
fn each_call_has_the_rights_of_its_user() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o1777)).unwrap();
    let serving = place.serve();
    let root = serving.client().mnt(&place.path("")).unwrap();
    let mut alice = serving.user(1001, 2001, &[]);
    let mut bob = serving.user(1002, 2002, &[3000, 2001]);
    let mut carol = serving.user(1003, 2003, &[]);
    let file = alice.create(&root, "file");
    let known = fs::metadata(place.path("file")).unwrap();
    assert_eq!((known.uid(), known.gid()), (1001, 2001));
    alice.done(7, &write_args(&file, 0, 2, b"secret"));
    alice.done(2, &[handle(&file), mode(0o640), words(&[0])].concat());
    // By a group of the call, and not without it.
    bob.done(6, &read_args(&file, 0, 6));
    assert_eq!(carol.nfs(6, &read_args(&file, 0, 6)).0, ACCES);
    assert_eq!(bob.nfs(7, &write_args(&file, 0, 0, b"x")).0, ACCES);
    assert_eq!(bob.nfs(2, &[handle(&file), mode(0o666), words(&[0])].concat()).0, PERM);
    // The sticky bit of the folder: the owner alone removes.
    let status = carol.nfs(12, &named(&root, "file")).0;
    assert!([PERM, ACCES].contains(&status), "{status}");
    let access = |client: &mut Client| {
        let rest = client.done(4, &[handle(&file), words(&[0x3f])].concat());
        u32::from_be_bytes(*rest.last_chunk().unwrap())
    };
    assert_eq!((access(&mut alice), access(&mut bob), access(&mut carol)), (0x0d, 0x01, 0));
    // One connection may have calls of many users.
    let mut mixed = Client::nobody(serving.address());
    assert_eq!(mixed.nfs(6, &read_args(&file, 0, 6)).0, ACCES, "who says nothing of himself is the anonymous user");
    alice.done(12, &named(&root, "file"));
    serving.stop();
}

#[test]
fn groups_of_a_user_are_those_of_the_system_where_the_export_says_so() {
    let Some(()) = root_or_skip("identities") else { return };
    // daemon has group 1 on every system, and its calls do not say so.
    const DAEMON: u32 = 1;
    for (manage_gids, status) in [(true, OK), (false, ACCES)] {
        let place = Place::new();
        fs::write(place.path("file"), "text").unwrap();
        chown(place.path("file"), None, Some(DAEMON)).unwrap();
        fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o040)).unwrap();
        let export = place.export_as(ExportOptions { manage_gids, ..ExportOptions::default() });
        let serving = place.serve_all(EngineKind::Epoll, vec![export]);
        let mut client = serving.user(DAEMON, 65_534, &[]);
        let root = client.mnt(&place.path("")).unwrap();
        let file = client.lookup(&root, "file");
        assert_eq!(client.nfs(6, &read_args(&file, 0, 4)).0, status, "manage_gids {manage_gids}");
        // And a user is in no group for saying so.
        let mut other = serving.user(65_533, 65_533, &[DAEMON]);
        let status = if manage_gids { ACCES } else { OK };
        assert_eq!(other.nfs(6, &read_args(&file, 0, 4)).0, status, "manage_gids {manage_gids}");
        serving.stop();
    }
}

/// A credential of AUTH_SYS has room for 16 groups.
#[test]
fn a_user_of_forty_groups_has_the_rights_of_all_where_the_export_says_so() {
    const USER: u32 = 61_000;
    const GROUPS: u32 = 40;
    const SENT: usize = 16;
    let inside = || {
        let Some(()) = own_run_or_skip("a list of groups of its own") else { return };
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/etc"]);
        fs::write("/etc/nsswitch.conf", "passwd: files\ngroup: files\n").unwrap();
        fs::write("/etc/passwd", format!("many:x:{USER}:{USER}::/:/bin/sh\n")).unwrap();
        let groups: Vec<u32> = (0..GROUPS).map(|number| USER + 1 + number).collect();
        let lines = groups.iter().map(|group| format!("group{group}:x:{group}:many\n"));
        fs::write("/etc/group", lines.collect::<String>()).unwrap();
        for manage_gids in [true, false] {
            let place = Place::new();
            for group in &groups {
                let path = place.path(&group.to_string());
                fs::write(&path, "text").unwrap();
                chown(&path, None, Some(*group)).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o040)).unwrap();
            }
            let export = place.export_as(ExportOptions { manage_gids, ..ExportOptions::default() });
            let serving = place.serve_all(EngineKind::Epoll, vec![export]);
            let mut client = serving.user(USER, USER, &groups[..SENT]);
            let root = client.mnt(&place.path("")).unwrap();
            for (number, group) in groups.iter().enumerate() {
                let file = client.lookup(&root, &group.to_string());
                let status = if manage_gids || number < SENT { OK } else { ACCES };
                assert_eq!(client.nfs(6, &read_args(&file, 0, 4)).0, status, "{manage_gids}, group {number}");
            }
            serving.stop();
        }
    };
    std::thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn squashed_users_are_the_anonymous_one() {
    let Some(()) = root_or_skip("identities") else { return };
    for (squash, uid, owner) in [
        (Squash::Root, 0, (7001, 7002)),
        (Squash::Root, 1001, (1001, 1001)),
        (Squash::All, 1001, (7001, 7002)),
        (Squash::None, 0, (0, 0)),
    ] {
        let place = Place::new();
        fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o777)).unwrap();
        let options = ExportOptions { squash, anonymous: (7001, 7002), ..ExportOptions::default() };
        let export = ExportSettings { options, ..place.export() };
        let serving = place.serve_all(EngineKind::Epoll, vec![export]);
        let mut client = serving.user(uid, uid, &[]);
        let root = client.mnt(&place.path("")).unwrap();
        client.create(&root, "file");
        let known = fs::metadata(place.path("file")).unwrap();
        assert_eq!((known.uid(), known.gid()), owner, "{squash:?} {uid}");
        serving.stop();
    }
}

#[test]
fn who_may_not_mount_is_told_at_mnt_and_at_every_call() {
    let place = Place::new();
    let (other, secure) = (place.beside("other"), place.beside("secure"));
    let mut elsewhere = ExportSettings { path: other.clone(), ..place.export() };
    elsewhere.clients.add("192.0.2.0/24".parse().unwrap());
    let mut secured = ExportSettings { path: secure.clone(), secure: true, ..place.export() };
    secured.clients.add("127.0.0.0/8".parse().unwrap());
    let serving = place.serve_all(EngineKind::Epoll, vec![place.export(), elsewhere, secured.clone()]);
    let mut client = serving.client();
    assert!(client.mnt(&place.path("")).is_ok());
    assert_eq!(mount_failure(&mut client, &other), ACCES);
    assert_eq!(mount_failure(&mut client, &secure), ACCES, "from a port that every user may have");
    assert_eq!(mount_failure(&mut client, "/nowhere".as_ref()), NOENT);
    assert_eq!(mount_failure(&mut client, &place.path("..")), NOENT);
    // EXPORT: each with its clients.
    let rest = client.mount(5, &[]);
    let mut r = XdrReader::new(&rest);
    let mut exports = Vec::new();
    while r.bool().unwrap() {
        let path = r.utf8(1024).unwrap().to_owned();
        let mut groups = Vec::new();
        while r.bool().unwrap() {
            groups.push(r.utf8(255).unwrap().to_owned());
        }
        exports.push((path, groups));
    }
    r.finish().unwrap();
    let expected = [(place.path(""), vec![]), (other, vec!["192.0.2.0/24"]), (secure.clone(), vec!["127.0.0.0/8"])];
    let expected = expected.map(|(path, groups): (_, Vec<&str>)| {
        let path = path.canonicalize().unwrap();
        (path.to_str().unwrap().to_owned(), groups.into_iter().map(str::to_owned).collect::<Vec<_>>())
    });
    assert_eq!(exports, expected);
    serving.stop();

    // A handle that was got while the export was open to all does not open it now.
    secured.secure = false;
    let serving = place.serve_all(EngineKind::Epoll, vec![secured.clone()]);
    let root = serving.client().mnt(&secure).unwrap();
    if serving.nfs.exports().any(|export| export.handles() == HandleSource::Table) {
        serving.stop();
        return skip("handles that outlive the server need root");
    }
    serving.stop();
    secured.secure = true;
    let serving = place.serve_all(EngineKind::Epoll, vec![secured]);
    let (status, rest) = serving.client().nfs(4, &[handle(&root), words(&[1])].concat());
    assert_eq!((status, rest), (ACCES, words(&[0])));
    serving.stop();
}

#[test]
fn clients_come_over_ipv6_and_exports_name_their_networks() {
    let loopback = std::net::Ipv6Addr::LOCALHOST;
    if std::net::TcpListener::bind((loopback, 0)).is_err() {
        return skip("needs IPv6");
    }
    for engine in ksf_test::working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe) {
        let place = Place::new();
        let exports = [("open", "::1/128"), ("closed", "2001:db8::/32"), ("old", "0.0.0.0/0")].map(|(name, net)| {
            let mut export = ExportSettings { path: place.beside(name), ..place.export() };
            export.clients.add(net.parse().unwrap());
            export
        });
        let [open, closed, old] = exports.clone().map(|export| export.path);
        fs::write(open.join("file"), "text").unwrap();
        let serving = place.serve_at(loopback.into(), engine, exports.into());
        let (mut client, root) = serving.mount(&open);
        let file = client.lookup(&root, "file");
        assert!(client.done(6, &read_args(&file, 0, 4)).ends_with(b"text"));
        assert_eq!(client.mnt(&closed), Err(ACCES));
        assert_eq!(client.mnt(&old), Err(ACCES), "a network of IPv4");
        // By datagram, too.
        let socket = ksf_test::stream::datagrams(serving.udp());
        for (path, expected) in [(&open, OK), (&closed, ACCES), (&old, ACCES)] {
            let mut args = Vec::new();
            args.put_opaque(path.to_str().unwrap().as_bytes());
            socket.send(&client.message(MOUNT_PROGRAM, 3, 1, &args)).unwrap();
            let mut buffer = [0; 1024];
            let length = socket.recv(&mut buffer).unwrap();
            let (status, rest) = split(Reply::parse(&buffer[..length]).unwrap().results);
            assert_eq!(status, expected, "{path:?}");
            let mounted = (status == OK).then(|| XdrReader::new(&rest).opaque(64).unwrap().to_vec());
            assert_eq!(mounted, (expected == OK).then(|| root.clone()));
        }
        serving.stop();
    }
}

#[test]
fn folders_below_an_export_are_mounted_and_links_are_not_followed() {
    let place = Place::new();
    fs::create_dir_all(place.path("a/b")).unwrap();
    fs::write(place.path("a/file"), "").unwrap();
    std::os::unix::fs::symlink("/", place.path("link")).unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    let a = client.lookup(&root, "a");
    let b = client.lookup(&a, "b");
    assert_eq!(client.mnt(&place.path("a/b/")), Ok(b));
    let (long, longest) = ("n".repeat(256), "n".repeat(255));
    for (path, status) in [
        ("a/c", NOENT),
        ("a/file", NOTDIR),
        ("a/file/x", NOTDIR),
        ("link", NOTDIR),
        ("link/etc", NOTDIR),
        (&longest, NOENT),
        (&long, NAMETOOLONG),
        ("a\0b", INVAL),
    ] {
        assert_eq!(mount_failure(&mut client, &place.path(path)), status, "{path:?}");
    }
    // The longest path of the protocol, and a longer one.
    for (length, expected) in [(1024, Accepted::Success), (1025, Accepted::GarbageArgs)] {
        let mut args = Vec::new();
        args.put_opaque(&vec![b'/'; length]);
        assert_eq!(client.ask(MOUNT_PROGRAM, 3, 1, &args).0, ReplyStatus::Accepted(expected), "{length} bytes");
    }
    // DUMP knows what was mounted, until UMNT and UMNTALL.
    let dumped = |client: &mut Client| {
        let rest = client.mount(2, &[]);
        let mut r = XdrReader::new(&rest);
        let mut paths = Vec::new();
        while r.bool().unwrap() {
            assert_eq!(r.opaque(255).unwrap(), b"127.0.0.1");
            paths.push(r.utf8(1024).unwrap().to_owned());
        }
        r.finish().unwrap();
        paths
    };
    let path = |name: &str| place.path(name).to_str().unwrap().to_owned();
    assert_eq!(dumped(&mut client), [path(""), path("a/b")], "and nothing that was refused");
    // However a client spells a path.
    assert_eq!(client.mnt(&place.path("a/.//b/////")), client.mnt(&place.path("a/b")));
    assert_eq!(dumped(&mut client), [path(""), path("a/b")]);
    let mut args = Vec::new();
    args.put_opaque(format!("{}//.//", path("")).as_bytes());
    assert!(client.mount(3, &args).is_empty());
    assert_eq!(dumped(&mut client), [path("a/b")]);
    assert!(client.mount(4, &[]).is_empty());
    assert!(dumped(&mut client).is_empty());
    // One client has a part of the table.
    for number in 0..100 {
        fs::create_dir(place.path(&number.to_string())).unwrap();
        client.mnt(&place.path(&number.to_string())).unwrap();
    }
    assert_eq!(dumped(&mut client).len(), 64);
    assert!(client.mount(0, &[]).is_empty());
    serving.stop();
}

/// rpc.mountd looks such a path up as root.
#[test]
fn mnt_below_an_export_needs_the_right_to_search() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::create_dir_all(place.path("closed/inner")).unwrap();
    fs::set_permissions(place.path("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    for (squash, inner) in [(Squash::Root, Err(ACCES)), (Squash::None, Ok(()))] {
        let options = ExportOptions { squash, ..ExportOptions::default() };
        let serving = place.serve_all(EngineKind::Epoll, vec![ExportSettings { options, ..place.export() }]);
        let mut client = serving.client();
        assert!(client.mnt(&place.path("closed")).is_ok());
        assert_eq!(client.mnt(&place.path("closed/inner")).map(drop), inner, "{squash:?}");
        serving.stop();
    }
}

/// knfsd does not check fs.protected_hardlinks.
#[test]
fn link_to_the_file_of_another_user_follows_the_setting_of_the_machine() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let is_protected = fs::read_to_string("/proc/sys/fs/protected_hardlinks").unwrap().trim() == "1";
    let (serving, expected) = (place.serve(), if is_protected { PERM } else { OK });
    let [mut owner, mut other] = [1000, 1001].map(|uid| serving.user(uid, uid, &[]));
    let root = owner.mnt(&place.path("")).unwrap();
    let file = owner.create(&root, "file");
    let link = |client: &mut Client, name| client.nfs(15, &[handle(&file), named(&root, name)].concat()).0;
    assert_eq!([link(&mut owner, "own"), link(&mut other, "of another")], [OK, expected]);
    // A file that the other may read and write is not protected.
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(link(&mut other, "writable"), OK);
    serving.stop();
}

#[test]
fn what_each_client_has_asked_for_is_counted() {
    let (place, serving) = Place::served();
    let [mut one, mut two] = [(); 2].map(|()| serving.client());
    let root = one.mnt(&place.path("")).unwrap();
    let file = two.create(&root, "file");
    two.done(7, &write_args(&file, 0, 2, b"12345"));
    one.done(6, &read_args(&file, 1, 100));
    // A WRITE that fails has written nothing, and a call that is garbage is a call.
    assert_ne!(one.nfs(7, &write_args(&root, 0, 2, b"12345")).0, OK);
    one.ask(NFS_PROGRAM, 3, 1, &[]);
    let of = |counts: &ClientCounts| {
        (counts.connections, counts.mounts, counts.calls, counts.read_bytes, counts.written_bytes)
    };
    let counted = serving.nfs.clients();
    let client = ksf_nfs::Client::Address(Ipv4Addr::LOCALHOST.into());
    assert_eq!(
        counted.iter().map(|counts| (counts.client, of(counts))).collect::<Vec<_>>(),
        [(client, (2, 1, 5, 4, 5))]
    );
    one.mount(4, &[]);
    drop(two);
    wait_until("the connection has ended", || serving.nfs.clients()[0].connections == 1);
    assert_eq!(of(&serving.nfs.clients()[0]), (1, 0, 5, 4, 5));
    serving.stop();
}

/// A call of CREATE in `dir`, with a credential as it lies on the wire. `length`: of its body, as the client states it.
fn call_as(xid: u32, (flavor, length): (u32, usize), body: &[u8], dir: &[u8]) -> Vec<u8> {
    let head = words(&[xid, 0, 2, NFS_PROGRAM, 3, 8, flavor, length as u32]);
    let no_verifier = words(&[0, 0]);
    [head, body.to_vec(), no_verifier, named(dir, "new"), words(&[0]), mode(0o644)].concat()
}

/// A body of AUTH_SYS with the lengths that the client states, whatever follows.
fn unix_body(name_bytes: usize, name: &[u8], gids_count: u32, gids: &[u32]) -> Vec<u8> {
    let fill = vec![0; name.len().next_multiple_of(4) - name.len()];
    [words(&[7, name_bytes as u32]), name.to_vec(), fill, words(&[0, 0, gids_count]), words(gids)].concat()
}

#[test]
fn a_credential_that_is_none_is_refused_and_the_connection_goes_on() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let greatest = unix_body(255, &[b'n'; 255], 16, &[7; 16]);
    let (bad, rejected) = (AuthStat::BADCRED, AuthStat::REJECTEDCRED);
    let whole = |body: Vec<u8>| (body.len(), body);
    for (what, flavor, (length, body), expected) in [
        ("17 groups", 1, whole(unix_body(1, b"n", 17, &[7; 17])), bad),
        ("a name of 256 bytes", 1, whole(unix_body(256, &[b'n'; 256], 0, &[])), bad),
        ("more groups than there are", 1, whole(unix_body(1, b"n", 3, &[7; 2])), bad),
        ("fewer groups than there are", 1, whole(unix_body(1, b"n", 1, &[7; 2])), bad),
        ("4 billion groups", 1, whole(unix_body(1, b"n", u32::MAX, &[])), bad),
        ("a name that goes beyond the body", 1, whole(unix_body(200, b"n", 0, &[])), bad),
        ("a body that ends before its groups do", 1, (greatest.len() - 4, greatest.clone()), bad),
        ("a body that takes the verifier, too", 1, (greatest.len() + 8, greatest.clone()), bad),
        ("a body of 401 bytes", 1, (401, vec![0; 404]), bad),
        ("a body that goes beyond the message", 1, (400, unix_body(1, b"n", 0, &[])), bad),
        ("a body of 4 GiB", 1, (u32::MAX as usize, unix_body(1, b"n", 0, &[])), bad),
        ("no body", 1, whole(Vec::new()), bad),
        ("AUTH_SHORT", 2, whole(words(&[1, 2])), rejected),
        ("AUTH_DH", 3, whole(words(&[0, 0])), rejected),
        ("RPCSEC_GSS, the first call of a context", 6, whole(words(&[1, 1, 0, 1, 0])), rejected),
        ("an unknown flavor", u32::MAX, whole(Vec::new()), rejected),
    ] {
        client.xid += 1;
        client.send_message(&call_as(client.xid, (flavor, length), &body, &root));
        let refused = ReplyStatus::Denied(Denied::AuthError(expected));
        assert_eq!(client.receive(), (client.xid, refused, Vec::new()), "{what}");
        client.done(1, &handle(&root));
    }
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 0, "nothing was carried out");
    // The longest ones that there are, and a body of AUTH_NONE, which means nothing.
    for (flavor, body) in [(1, greatest), (0, Vec::new()), (0, vec![0xff; 400])] {
        client.xid += 1;
        client.send_message(&call_as(client.xid, (flavor, body.len()), &body, &root));
        let (xid, status, _) = client.receive();
        assert_eq!((xid, status), (client.xid, ReplyStatus::Accepted(Accepted::Success)), "flavor {flavor}");
    }
    serving.stop();
}

/// A local program cuts files off and fills them again, all the time.
#[test]
fn files_that_shrink_are_read_and_written_as_far_as_they_go() {
    const FULL: usize = 256 << 10;
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let [seen, changed] = ["seen", "changed"].map(|name| client.create(&root, name));
    std::thread::scope(|scope| {
        // Dropped in the end, also by a failure.
        let (_works, is_over) = channel::<()>();
        let local = ["seen", "changed"].map(|name| fs::File::options().write(true).open(place.path(name)).unwrap());
        scope.spawn(move || {
            let [seen, changed] = local;
            while is_over.try_recv() == Err(TryRecvError::Empty) {
                seen.write_all_at(&[7; FULL], 0).unwrap();
                changed.set_len(0).unwrap();
                seen.set_len(5).unwrap();
            }
        });
        for (round, count) in (0..200).flat_map(|round| [4096, 64 << 10, 1 << 20].map(|count| (round, count))) {
            let offset = [0, 3, 100 << 10][round % 3];
            let rest = client.done(6, &read_args(&seen, offset, count));
            let mut r = XdrReader::new(&rest);
            let attr = Attr::read_option(&mut r).unwrap();
            let (stated, eof, data) = (r.u32().unwrap(), r.bool().unwrap(), r.opaque(count).unwrap());
            r.finish().unwrap();
            assert_eq!(stated as usize, data.len());
            assert!(data.iter().all(|byte| *byte == 7 || *byte == 0));
            // Fewer bytes than were asked for are no end.
            assert_eq!(eof, data.is_empty() || attr.size <= offset + data.len() as u64, "{} of {count}", data.len());
            let stable = (round % 3) as u32;
            let rest = client.done(7, &write_args(&changed, offset, stable, &[9; 10_000]));
            let mut r = XdrReader::new(&rest);
            assert!(Wcc::read(&mut r).after.is_some());
            assert_eq!((r.u32().unwrap(), r.u32().unwrap() >= stable), (10_000, true));
        }
    });
    client.done(7, &write_args(&changed, 0, 0, &[9; 10_000]));
    assert_eq!(fs::read(place.path("changed")).unwrap()[..10_000], [9; 10_000]);
    serving.stop();
}

#[test]
fn nothing_changes_on_an_export_that_is_read_only() {
    let place = Place::new();
    fs::write(place.path("file"), "x").unwrap();
    let options = ExportOptions { read_only: true, squash: Squash::None, ..ExportOptions::default() };
    let export = ExportSettings { options, ..place.export() };
    let serving = place.serve_all(EngineKind::Epoll, vec![export]);
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.lookup(&root, "file");
    client.done(6, &read_args(&file, 0, 1));
    let new = named(&root, "new");
    for (procedure, args) in [
        (2, [handle(&file), mode(0o600), words(&[0])].concat()),
        (7, write_args(&file, 0, 0, b"y")),
        (8, [new.clone(), words(&[0]), mode(0o644)].concat()),
        (9, [new.clone(), mode(0o755)].concat()),
        (12, named(&root, "file")),
        (14, [named(&root, "file"), new.clone()].concat()),
        (15, [handle(&file), new.clone()].concat()),
    ] {
        assert_eq!(client.nfs(procedure, &args).0, ROFS, "procedure {procedure}");
    }
    let rest = client.done(4, &[handle(&file), words(&[0x0d])].concat());
    assert_eq!(rest.last_chunk(), Some(&1_u32.to_be_bytes()), "reading is all that is granted");
    assert_eq!(fs::read(place.path("file")).unwrap(), b"x");
    serving.stop();
}

#[test]
fn handles_are_good_after_a_restart() {
    let (place, serving) = Place::served();
    if serving.nfs.exports().any(|export| export.handles() == HandleSource::Table) {
        return skip("handles that outlive the server need root");
    }
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.create(&root, "file");
    let rest = client.done(7, &write_args(&file, 0, 0, b"before"));
    let verifier = rest[rest.len() - 8..].to_vec();
    serving.stop();
    fs::rename(place.path("file"), place.path("renamed")).unwrap();
    let serving = place.serve();
    let mut client = serving.client();
    assert!(client.done(6, &read_args(&file, 0, 6)).ends_with(b"before\0\0"));
    let rest = client.done(7, &write_args(&file, 6, 0, b"x"));
    assert_ne!(rest[rest.len() - 8..], verifier, "a client has to send again what it has not committed");
    assert_eq!(client.mnt(&place.path("")), Ok(root));
    serving.stop();
}

#[test]
fn there_is_no_program_for_locks() {
    let (_place, serving) = Place::served();
    let mut client = serving.client();
    for version in [1, 3, 4] {
        let (status, results) = client.ask(100_021, version, 2, &words(&[0, 1, 2, 3]));
        assert_eq!((status, results), (ReplyStatus::Accepted(Accepted::ProgUnavail), Vec::new()), "version {version}");
    }
    serving.stop();
}

/// The READ shows the WRITEs that were carried out before it on the only free lane.
#[test]
fn a_call_waits_for_one_call_of_each_connection_that_floods_the_lanes() {
    const FLOODING: usize = 5;
    const CALLS: usize = 60;
    /// More than a shard reads without a lane.
    const BYTES: usize = 80_000;
    let place = Place::new();
    fs::write(place.path("file"), vec![0; BYTES]).unwrap();
    let serving = place.serve();
    let mut other = serving.client();
    let root = other.mnt(&place.path("")).unwrap();
    let file = other.lookup(&root, "file");
    let mut flooding: Vec<Client> = (0..FLOODING).map(|_| serving.client()).collect();
    let files = serving.nfs.files();
    let mut holds = hold_lanes(files);
    let wait_for = |jobs| wait_until("calls wait", || files.lane_counters().queued_jobs == jobs);
    for (number, at) in (0..CALLS).flat_map(|number| (0..FLOODING).map(move |at| (number, at))) {
        let client = &mut flooding[at];
        // A call of another client is no second try of one with its xid.
        client.xid = (1000 + FLOODING * number + at) as u32;
        client.send(NFS_PROGRAM, 3, 7, &write_args(&file, client.xid.into(), 0, b"f"));
    }
    wait_for(FLOODING * CALLS);
    other.send(NFS_PROGRAM, 3, 6, &read_args(&file, 0, BYTES as u32));
    wait_for(FLOODING * CALLS + 1);
    drop(holds.pop());
    let (status, rest) = split(&other.receive().2);
    assert_eq!(status, OK);
    let written = rest[rest.len() - BYTES..].iter().filter(|byte| **byte == b'f').count();
    assert!(written <= FLOODING, "{written} calls of others were carried out before it");
    for client in &mut flooding {
        (0..CALLS).for_each(|_| assert_eq!(split(&client.receive().2).0, OK));
    }
    drop(holds);
    serving.stop();
}

/// No connection gets a slot for a file with uncommitted data.
#[test]
fn a_write_without_room_for_uncommitted_data_is_durable_when_it_is_answered() {
    const UNSTABLE: u32 = 0;
    let place = Place::new();
    let mut settings = place.files(vec![place.export()]);
    settings.fs.uncommitted_files_max = 0;
    let serving = place.serve_files(Ipv4Addr::LOCALHOST.into(), EngineKind::Epoll, settings);
    let (mut client, root) = serving.mount(&place.path(""));
    for number in 0..20 {
        let file = client.create(&root, &number.to_string());
        let rest = client.done(7, &write_args(&file, 0, UNSTABLE, b"text"));
        let mut r = XdrReader::new(&rest);
        assert!(Wcc::read(&mut r).after.is_some());
        assert_eq!((r.u32().unwrap(), r.u32().unwrap()), (4, 2), "FILE_SYNC");
        assert_eq!(fs::read(place.path(&number.to_string())).unwrap(), b"text");
        // Beyond the greatest size of a file, at least on ext4.
        client.nfs(7, &write_args(&file, 1 << 50, UNSTABLE, b"text"));
    }
    assert_eq!(serving.nfs.files().fs_counters().uncommitted_files, 0);
    serving.stop();
}

#[test]
fn a_peer_that_reads_nothing_is_bounded_and_gets_all_when_it_reads() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.create(&root, "file");
    let data = vec![7; 1 << 20];
    client.done(7, &write_args(&file, 0, 2, &data));
    // 1,000 READs of 1 MiB are asked for at once; another client is served meanwhile.
    let first = client.xid + 1;
    for _ in 0..1000 {
        client.xid += 1;
        client.send(NFS_PROGRAM, 3, 6, &read_args(&file, 0, 1 << 20));
    }
    wait_until("the first replies are made", || serving.nfs.procedures()[Procedure::Read as usize].calls > 0);
    let mut other = serving.client();
    for at in 0..100 {
        let other_file = other.create(&root, &format!("other {at}"));
        other.done(7, &write_args(&other_file, 0, 2, b"x"));
    }
    let made = serving.nfs.procedures()[Procedure::Read as usize].calls;
    assert!(made <= 64, "{made} MiB of replies were made for a peer that reads none");
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..1000 {
        let (xid, _, results) = client.receive();
        assert!(results.len() > 1 << 20 && results.ends_with(&data));
        assert!((first..first + 1000).contains(&xid) && seen.insert(xid));
    }
    serving.stop();
}

/// At the bound the server does not read, so that the client's own system holds its WRITEs back.
#[test]
fn a_peer_that_writes_and_reads_nothing_is_slowed_at_the_bound_of_its_connection() {
    const WRITES: usize = 1000;
    // The request that reaches the bound may exceed it.
    let work_bytes_max = Limits::default().connection_bytes_max + (2 << 20);
    let (place, serving) = Place::served();
    let mut sender = serving.client();
    let root = sender.mnt(&place.path("")).unwrap();
    let file = sender.create(&root, "file");
    let data = vec![7; 1 << 20];
    let work_bytes = || serving.nfs.files().lane_counters().queued_bytes;
    let holds = hold_lanes(serving.nfs.files());
    let (sent, mut most) = (AtomicUsize::new(0), 0);
    std::thread::scope(|scope| {
        let (sent, data) = (&sent, &data);
        let sending = scope.spawn(move || {
            for _ in 0..WRITES {
                sender.xid += 1;
                sender.send(NFS_PROGRAM, 3, 7, &write_args(&file, 0, 0, data));
                sent.fetch_add(1, Ordering::Relaxed);
            }
            sender
        });
        wait_until("the connection is not read", || serving.counter("reads_paused") > 0);
        let waiting = work_bytes();
        assert!((1 << 20..=work_bytes_max).contains(&waiting), "{waiting} bytes wait for the lanes");
        // What was sent is in work, or in buffers of TCP, which have up to 38 MiB as the kernel comes.
        let before = sent.load(Ordering::Relaxed);
        assert!(before < WRITES / 4, "{before} MiB were taken of a peer whose WRITEs wait");
        drop(holds);
        wait_until("all are sent", || {
            most = most.max(work_bytes());
            sending.is_finished()
        });
        assert!(most <= work_bytes_max, "{most} bytes in work");
        let mut sender = sending.join().unwrap();
        for _ in 0..WRITES {
            assert_eq!(split(&sender.receive().2).0, OK);
        }
    });
    serving.stop();
}

#[test]
fn new_entries_in_a_setgid_folder_have_its_group() {
    let Some(()) = root_or_skip("identities") else { return };
    let place = Place::new();
    chown(place.path(""), Some(1001), Some(4000)).unwrap();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o2775)).unwrap();
    let serving = place.serve();
    let mut client = serving.user(1001, 2001, &[4000]);
    let root = client.mnt(&place.path("")).unwrap();
    client.create(&root, "file");
    made(&client.done(9, &[named(&root, "folder"), mode(0o755)].concat()));
    assert_eq!(fs::metadata(place.path("file")).unwrap().gid(), 4000);
    let folder = fs::metadata(place.path("folder")).unwrap();
    assert_eq!(folder.gid(), 4000);
    serving.stop();
}
