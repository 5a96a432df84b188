//! What the kernel lets a local user do, the server lets a caller of NFS do, and nothing else: ACLs, and bits that a write clears.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use rustix::fs::{XattrFlags, setxattr};
use rustix::io::Errno;

use crate::common::{Client, OK, Place, Serving, handle, mode, named, read_args, write_args};
use ksf_test::acl::{ACCESS_ACL, DEFAULT_ACL, For, acl};
use ksf_test::rpc::words;
use ksf_test::{program_or_skip, root_or_skip, skip};

const ACCES: u32 = 13;

/// uid, gid, groups.
type User = (u32, u32, &'static [u32]);

/// Gives a path an ACL; `None`: its file system has none, and the test is skipped.
fn set_acl(path: &Path, kind: &str, entries: &[(For, u16)]) -> Option<()> {
    match setxattr(path, kind, &acl(entries), XattrFlags::empty()) {
        Err(Errno::OPNOTSUPP) => {
            skip("needs a file system with ACLs");
            None
        }
        result => {
            result.unwrap();
            Some(())
        }
    }
}

/// Whether a local user can do this in the export.
fn locally(place: &Place, (uid, gid, groups): User, script: &str) -> bool {
    let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
    let mut command = Command::new("setpriv");
    command.current_dir(place.path("")).arg(format!("--reuid={uid}")).arg(format!("--regid={gid}"));
    match groups[..] {
        [] => command.arg("--clear-groups"),
        _ => command.arg(format!("--groups={}", groups.join(","))),
    };
    command.args(["sh", "-c", script]).output().unwrap().status.success()
}

/// Whether a procedure goes well; the only other status is ACCES.
#[track_caller]
fn may(client: &mut Client, procedure: u32, args: &[u8]) -> bool {
    let (status, _) = client.nfs(procedure, args);
    assert!(status == OK || status == ACCES, "procedure {procedure}: {status}");
    status == OK
}

/// What ACCESS grants of these.
fn access(client: &mut Client, object: &[u8], asked: u32) -> u32 {
    let rest = client.done(4, &[handle(object), words(&[asked])].concat());
    u32::from_be_bytes(*rest.last_chunk().unwrap())
}

/// The root of the export, and a client that is this user.
fn client(serving: &Serving, place: &Place, (uid, gid, groups): User) -> (Vec<u8>, Client) {
    let mut client = serving.user(uid, gid, groups);
    (client.mnt(&place.path("")).unwrap(), client)
}

const OWNER: User = (1000, 100, &[]);
const USERS: [User; 7] = [
    OWNER,
    (1001, 200, &[]),
    (1002, 100, &[]),
    (1003, 300, &[]),
    (1004, 200, &[300]),
    (1005, 200, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 300]),
    (1006, 200, &[]),
];

/// Of the owner 1000:100; they deny and grant to user 1001 and to group 300.
const ACLS: [&[(For, u16)]; 5] = [
    // Others may, and these may not.
    &[(For::Owner, 6), (For::User(1001), 0), (For::OwnGroup, 6), (For::Mask, 7), (For::Others, 6)],
    &[(For::Owner, 6), (For::OwnGroup, 6), (For::Group(300), 0), (For::Mask, 7), (For::Others, 6)],
    // These may, and others may not.
    &[
        (For::Owner, 6),
        (For::User(1001), 6),
        (For::OwnGroup, 0),
        (For::Group(300), 4),
        (For::Mask, 7),
        (For::Others, 0),
    ],
    // The mask takes writing away.
    &[
        (For::Owner, 7),
        (For::User(1001), 7),
        (For::OwnGroup, 5),
        (For::Group(300), 7),
        (For::Mask, 5),
        (For::Others, 0),
    ],
    // One group grants what the other does not.
    &[
        (For::Owner, 6),
        (For::OwnGroup, 0),
        (For::Group(200), 4),
        (For::Group(300), 2),
        (For::Mask, 7),
        (For::Others, 7),
    ],
];

#[test]
fn acls_hold_for_callers_as_for_local_users() {
    let Some(()) = root_or_skip("identities") else { return };
    let Some(_) = program_or_skip("setpriv") else { return };
    let (place, serving) = Place::served();
    let (mut granted, mut denied) = (0, 0);
    for (number, entries) in ACLS.iter().enumerate() {
        // A file, and a folder with a file that all may read.
        let (file, folder) = (format!("file{number}"), format!("folder{number}"));
        let inner = format!("{folder}/inner");
        fs::write(place.path(&file), "text").unwrap();
        fs::create_dir(place.path(&folder)).unwrap();
        fs::write(place.path(&inner), "text").unwrap();
        for name in [&file, &folder] {
            chown(place.path(name), Some(OWNER.0), Some(OWNER.1)).unwrap();
            let Some(()) = set_acl(&place.path(name), ACCESS_ACL, entries) else { return };
        }
        for user in USERS {
            let (root, mut client) = client(&serving, &place, user);
            let handles = [&file, &folder].map(|name| client.lookup(&root, name));
            let does = |script: &str| locally(&place, user, script);
            let about = format!("ACL {number}, {user:?}");
            let reads = does(&format!("cat {file}"));
            let writes = does(&format!("printf t >> {file}"));
            let executes = does(&format!("[ -x {file} ]"));
            assert_eq!(may(&mut client, 6, &read_args(&handles[0], 0, 4)), reads, "{about}: READ");
            assert_eq!(may(&mut client, 7, &write_args(&handles[0], 0, 2, b"t")), writes, "{about}: WRITE");
            let wanted = u32::from(reads) + 0xc * u32::from(writes) + 0x20 * u32::from(executes);
            assert_eq!(access(&mut client, &handles[0], 0x2d), wanted, "{about}: ACCESS of the file");
            let searches = does(&format!("[ -e {inner} ]"));
            let lists = does(&format!("ls {folder}"));
            let makes = does(&format!("touch {folder}/new && rm {folder}/new"));
            assert_eq!(may(&mut client, 3, &named(&handles[1], "inner")), searches, "{about}: LOOKUP");
            let args = [handle(&handles[1]), words(&[0, 0, 0, 0, 4096])].concat();
            assert_eq!(may(&mut client, 16, &args), lists, "{about}: READDIR");
            let args = [named(&handles[1], "new"), words(&[1]), mode(0o644)].concat();
            let made = may(&mut client, 8, &args);
            assert_eq!(made && may(&mut client, 12, &named(&handles[1], "new")), makes, "{about}: CREATE and REMOVE");
            for done in [reads, writes, searches, lists, makes] {
                *if done { &mut granted } else { &mut denied } += 1;
            }
        }
    }
    assert!(granted > 20 && denied > 20, "{granted} granted, {denied} denied");
    serving.stop();
}

/// The mode of a client is cut by the default ACL of the folder, and not by a umask.
#[test]
fn what_is_made_in_a_folder_with_a_default_acl_has_it() {
    let Some(()) = root_or_skip("identities") else { return };
    let Some(_) = program_or_skip("setpriv") else { return };
    let place = Place::new();
    chown(place.path(""), Some(OWNER.0), Some(OWNER.1)).unwrap();
    let Some(()) = set_acl(&place.path(""), DEFAULT_ACL, ACLS[3]) else { return };
    let serving = place.serve();
    let (root, mut client) = client(&serving, &place, OWNER);
    client.done(8, &[named(&root, "file"), words(&[0]), mode(0o666)].concat());
    client.done(9, &[named(&root, "folder"), mode(0o777)].concat());
    assert!(locally(&place, OWNER, "umask 0; : > local-file; mkdir local-folder"));
    for name in ["file", "folder"] {
        let told = |name: &str, kind| {
            let mut value = [0; 256];
            let length = rustix::fs::getxattr(place.path(name), kind, &mut value[..]);
            (fs::metadata(place.path(name)).unwrap().mode(), length.map(|length| value[..length].to_vec()))
        };
        for kind in [ACCESS_ACL, DEFAULT_ACL] {
            assert_eq!(told(name, kind), told(&format!("local-{name}"), kind), "{kind} of {name}");
        }
        assert!(told(name, ACCESS_ACL).1.is_ok(), "{name} has an ACL");
    }
    serving.stop();
}

/// Also where the size or the owner is set after it was made, which clears set-user-id and set-group-id.
#[test]
fn the_mode_of_a_new_object_is_what_the_kernel_gives() {
    let Some(()) = root_or_skip("identities") else { return };
    let (place, serving) = Place::served();
    let folders = ["plain", "with ACL"].map(|name| place.path(name));
    folders.iter().for_each(|folder| fs::create_dir(folder).unwrap());
    folders.iter().for_each(|folder| chown(folder, Some(OWNER.0), Some(OWNER.1)).unwrap());
    let cut = [(For::Owner, 7), (For::OwnGroup, 5), (For::Others, 0)];
    let Some(()) = set_acl(&folders[1], DEFAULT_ACL, &cut) else { return };
    for user in [OWNER, (0, 0, &[])] {
        let (root, mut client) = client(&serving, &place, user);
        for (name, mask) in [("plain", 0), ("with ACL", 0o027)] {
            let folder = client.lookup(&root, name);
            for mode in [0o755, 0o777, 0o4755, 0o6755, 0o2711] {
                for (owner, size) in [(false, false), (true, false), (false, true), (true, true)] {
                    if owner && user.0 != 0 {
                        continue;
                    }
                    let ids = if owner { words(&[1, OWNER.0, 1, OWNER.1]) } else { words(&[0, 0]) };
                    let bytes = if size { words(&[1, 0, 10]) } else { words(&[0]) };
                    let attr = [words(&[1, mode]), ids, bytes, words(&[0, 0])].concat();
                    let about = format!("{user:?} in {name}: {mode:o}, owner {owner}, size {size}");
                    for how in [0, 1] {
                        client.done(8, &[named(&folder, "file"), words(&[how]), attr.clone()].concat());
                        let made = fs::metadata(place.path(name).join("file")).unwrap();
                        assert_eq!(made.mode() & 0o7777, mode & !mask, "{about}, CREATE {how}");
                        assert_eq!(made.len(), if size { 10 } else { 0 }, "{about}");
                        client.done(12, &named(&folder, "file"));
                    }
                    // These have no size.
                    client.done(11, &[named(&folder, "pipe"), words(&[7]), attr.clone()].concat());
                    let made = fs::metadata(place.path(name).join("pipe")).unwrap();
                    assert_eq!(made.mode() & 0o7777, mode & !mask, "{about}, MKNOD");
                    client.done(12, &named(&folder, "pipe"));
                    client.done(9, &[named(&folder, "new"), attr.clone()].concat());
                    let made = fs::metadata(place.path(name).join("new")).unwrap();
                    assert_eq!(made.mode() & 0o7777, mode & 0o1777 & !mask, "{about}, MKDIR");
                    client.done(13, &named(&folder, "new"));
                    let target = [words(&[4]), b"file".to_vec()].concat();
                    client.done(10, &[named(&folder, "link"), attr, target].concat());
                    client.done(12, &named(&folder, "link"));
                }
            }
        }
    }
    serving.stop();
}

#[test]
fn a_write_or_a_cut_clears_the_bits_that_it_clears_for_a_local_user() {
    let Some(()) = root_or_skip("identities") else { return };
    let Some(_) = program_or_skip("setpriv") else { return };
    let (place, serving) = Place::served();
    let mut cleared = 0;
    for user in [(0, 0, &[][..]), OWNER, (1002, 100, &[]), (1006, 200, &[])] {
        let (root, mut client) = client(&serving, &place, user);
        for before in [0o4777, 0o2777, 0o6777, 0o2767, 0o1666] {
            let make = |name: &str| {
                fs::write(place.path(name), "text").unwrap();
                chown(place.path(name), Some(OWNER.0), Some(OWNER.1)).unwrap();
                fs::set_permissions(place.path(name), fs::Permissions::from_mode(before)).unwrap();
            };
            let mode_of = |name: &str| fs::metadata(place.path(name)).unwrap().mode() & 0o7777;
            for name in ["local", "remote"] {
                make(name);
            }
            assert!(locally(&place, user, "printf text 1<> local"));
            let remote = client.lookup(&root, "remote");
            client.done(7, &write_args(&remote, 0, 0, b"text"));
            assert_eq!(mode_of("remote"), mode_of("local"), "{before:o} after a write of {user:?}");
            cleared += u32::from(mode_of("remote") != before);
            for name in ["local", "remote"] {
                make(name);
            }
            assert!(locally(&place, user, "truncate -s 1 local"));
            // SETATTR of the size.
            client.done(2, &[handle(&remote), words(&[0, 0, 0, 1, 0, 1, 0, 0, 0])].concat());
            assert_eq!(mode_of("remote"), mode_of("local"), "{before:o} after a cut of {user:?}");
        }
    }
    assert!(cleared > 0);
    serving.stop();
}

#[test]
fn a_file_that_is_executed_is_read_and_not_written() {
    let Some(()) = root_or_skip("identities") else { return };
    let Some(sleep) = program_or_skip("sleep") else { return };
    let place = Place::new();
    fs::copy(sleep, place.path("sleep")).unwrap();
    let serving = place.serve();
    let (root, mut client) = client(&serving, &place, (0, 0, &[]));
    let file = client.lookup(&root, "sleep");
    let cut = [handle(&file), words(&[0, 0, 0, 1, 0, 1, 0, 0, 0])].concat();
    let mut running = Command::new(place.path("sleep")).arg("600").spawn().unwrap();
    let statuses = [client.nfs(7, &write_args(&file, 0, 2, b"text")).0, client.nfs(2, &cut).0];
    let reads = client.nfs(6, &read_args(&file, 0, 4)).0;
    running.kill().unwrap();
    running.wait().unwrap();
    assert_eq!((statuses, reads), ([ACCES; 2], OK));
    client.done(7, &write_args(&file, 0, 2, b"text"));
    assert_eq!(fs::read(place.path("sleep")).unwrap()[..4], *b"text");
    serving.stop();
}
