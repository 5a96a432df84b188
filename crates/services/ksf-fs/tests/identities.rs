//! Calls run as their callers, and the kernel decides.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use crate::common::{Served, kind, on_lane, open_for_writing, root, with_lane};
use ksf_fs::{
    Access, CreateHow, Credential, ErrorKind, ExportOptions, Handle, Lane, Node, OpenHow, Resize, SetAttr, SetTime,
    Squash, Stable, Time,
};
use ksf_test::root_or_skip;

fn user(uid: u32, gid: u32, groups: &[u32]) -> Credential {
    Credential::unix(uid, gid, groups)
}

fn guarded(mode: u32) -> CreateHow {
    CreateHow::Guarded(SetAttr { mode: Some(mode), ..SetAttr::default() })
}

/// A folder that all may write, with what of the mode bits `extra` adds.
fn open_folder(served: &Served, lane: &mut Lane, extra: u32) -> Handle {
    fs::create_dir(served.path("open")).unwrap();
    fs::set_permissions(served.path("open"), fs::Permissions::from_mode(0o777 | extra)).unwrap();
    served.find(lane, "open").handle
}

#[test]
fn each_user_reads_and_writes_what_the_modes_let_it() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let open = open_folder(&served, lane, 0);
        let (owner, friend, stranger) = (user(1000, 100, &[]), user(1001, 7, &[5, 100]), user(1002, 7, &[]));
        let file = served.fs.create(lane, &owner, &open, b"file", &guarded(0o640)).result.unwrap();
        assert_eq!((file.attr.uid, file.attr.gid, file.attr.mode), (1000, 100, 0o640));
        let write =
            |lane: &mut Lane, who: &Credential| served.fs.write(lane, who, &file.handle, 0, b"text", Stable::Unstable);
        let read =
            |lane: &mut Lane, who: &Credential| served.fs.read(lane, who, &file.handle, 0, 9, &mut Vec::new()).result;
        assert_eq!(write(lane, &owner).result.unwrap().count, 4);
        assert_eq!(read(lane, &friend).unwrap().count, 4, "by a supplementary group");
        let denied = write(lane, &friend);
        assert_eq!(kind(denied.result), ErrorKind::Access);
        assert_eq!(denied.wcc.after.unwrap().size, 4, "after is told of failures, too");
        assert_eq!(kind(read(lane, &stranger)), ErrorKind::Access, "though the descriptor is open for others");
        assert_eq!(read(lane, &root()).unwrap().count, 4);
        let all = Access::READ | Access::WRITE | Access::EXECUTE;
        let granted =
            |lane: &mut Lane, who: &Credential| served.fs.access(lane, who, &file.handle, all).result.unwrap();
        assert_eq!(granted(lane, &owner), Access::READ | Access::WRITE);
        assert_eq!(granted(lane, &friend), Access::READ);
        assert_eq!(granted(lane, &stranger), Access::NONE);
        // A folder that may not be searched hides its entries, by name and not by handle.
        fs::set_permissions(served.path("open"), fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(kind(served.fs.lookup(lane, &owner, &open, b"file").result), ErrorKind::Access);
        let listed = served.fs.list(lane, &owner, &open, Default::default(), ksf_fs::Detail::Names, &mut |_| true);
        assert_eq!(kind(listed.result), ErrorKind::Access);
        assert_eq!(read(lane, &owner).unwrap().count, 4);
    });
}

#[test]
fn owners_and_executables_pass_as_the_rfc_asks() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let open = open_folder(&served, lane, 0);
        let (owner, stranger) = (user(1000, 100, &[]), user(1002, 7, &[]));
        let locked = served.fs.create(lane, &owner, &open, b"locked", &guarded(0)).result.unwrap().handle;
        served.fs.write(lane, &owner, &locked, 0, b"text", Stable::FileSync).result.unwrap();
        assert_eq!(served.fs.read(lane, &owner, &locked, 0, 9, &mut Vec::new()).result.unwrap().count, 4);
        assert_eq!(kind(served.fs.read(lane, &stranger, &locked, 0, 9, &mut Vec::new()).result), ErrorKind::Access);
        let shrink = SetAttr { size: Some(2), ..SetAttr::default() };
        assert_eq!(served.fs.setattr(lane, &owner, &locked, &shrink, None, Resize::Owner).wcc.after.unwrap().size, 2);
        assert_eq!(
            kind(served.fs.setattr(lane, &stranger, &locked, &shrink, None, Resize::Owner).result),
            ErrorKind::Access
        );
        let tool = served.fs.create(lane, &owner, &open, b"tool", &guarded(0o711)).result.unwrap().handle;
        assert_eq!(served.fs.read(lane, &stranger, &tool, 0, 9, &mut Vec::new()).result.unwrap().count, 0);
        assert_eq!(kind(served.fs.write(lane, &stranger, &tool, 0, b"x", Stable::Unstable).result), ErrorKind::Access);
    });
}

#[test]
fn what_is_made_belongs_to_the_caller_and_setgid_folders_give_their_group() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let open = open_folder(&served, lane, 0o2000);
        chown(served.path("open"), None, Some(55)).unwrap();
        fs::set_permissions(served.path("open"), fs::Permissions::from_mode(0o2777)).unwrap();
        let who = user(1000, 100, &[]);
        let own = SetAttr { mode: Some(0o775), ..SetAttr::default() };
        let made = served.fs.mkdir(lane, &who, &open, b"folder", &own).result.unwrap().attr;
        assert_eq!((made.uid, made.gid, made.mode), (1000, 55, 0o2775));
        let made = served.fs.create(lane, &who, &open, b"file", &guarded(0o666)).result.unwrap().attr;
        assert_eq!((made.uid, made.gid, made.mode), (1000, 55, 0o666), "no umask takes a part");
        let made = served.fs.symlink(lane, &who, &open, b"link", b"../x", &own).result.unwrap().attr;
        assert_eq!((made.uid, made.gid), (1000, 55));
        let made = served.fs.mknod(lane, &who, &open, b"fifo", Node::Fifo, &own).result.unwrap().attr;
        assert_eq!((made.uid, made.gid, made.mode), (1000, 55, 0o775));
        let device = served.fs.mknod(lane, &who, &open, b"null", Node::CharDevice(1, 3), &own);
        assert_eq!(kind(device.result), ErrorKind::NotPermitted);
        let made = served.fs.mknod(lane, &root(), &open, b"null", Node::CharDevice(1, 3), &own).result;
        if let Ok(made) = made {
            assert_eq!(made.attr.device, (1, 3));
        }
        // Only root gives files away; an owner may give them to its own groups.
        let file = served.fs.lookup(lane, &who, &open, b"file").result.unwrap().handle;
        let to = |uid, gid| SetAttr { uid, gid, ..SetAttr::default() };
        assert_eq!(
            kind(served.fs.setattr(lane, &who, &file, &to(Some(1001), None), None, Resize::Owner).result),
            ErrorKind::NotPermitted
        );
        assert_eq!(
            kind(served.fs.setattr(lane, &who, &file, &to(None, Some(77)), None, Resize::Owner).result),
            ErrorKind::NotPermitted
        );
        served
            .fs
            .setattr(lane, &user(1000, 100, &[77]), &file, &to(None, Some(77)), None, Resize::Owner)
            .result
            .unwrap();
        served.fs.setattr(lane, &root(), &file, &to(Some(1001), None), None, Resize::Owner).result.unwrap();
        let attr = served.fs.getattr(lane, &file).unwrap();
        assert_eq!((attr.uid, attr.gid), (1001, 77));
    });
}

#[test]
fn sticky_folders_keep_others_entries() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let open = open_folder(&served, lane, 0o1000);
        let (owner, other) = (user(1000, 100, &[]), user(1001, 100, &[]));
        served.fs.create(lane, &owner, &open, b"file", &guarded(0o666)).result.unwrap();
        assert_eq!(kind(served.fs.remove(lane, &other, &open, b"file").result), ErrorKind::NotPermitted);
        let renamed = served.fs.rename(lane, &other, &open, b"file", &open, b"mine");
        assert_eq!(kind(renamed.result), ErrorKind::NotPermitted);
        assert!(renamed.from.after.is_some() && renamed.to.after.is_some());
        served.fs.remove(lane, &owner, &open, b"file").result.unwrap();
    });
}

#[test]
fn groups_beyond_sixteen_count() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let file = served.make(lane, "file");
        chown(served.path("file"), None, Some(4039)).unwrap();
        fs::set_permissions(served.path("file"), fs::Permissions::from_mode(0o040)).unwrap();
        let many: Vec<u32> = (4000..4040).collect();
        let read =
            |lane: &mut Lane, who: &Credential| served.fs.read(lane, who, &file.handle, 0, 9, &mut Vec::new()).result;
        assert!(read(lane, &user(1000, 100, &many)).is_ok());
        assert_eq!(
            kind(read(lane, &user(1000, 100, &many[..39]))),
            ErrorKind::Access,
            "groups of the call before are gone"
        );
        assert!(read(lane, &user(1000, 4039, &[])).is_ok());
        assert_eq!(kind(read(lane, &user(1000, 100, &[]))), ErrorKind::Access);
    });
}

#[test]
fn squashed_callers_are_the_anonymous_user() {
    let Some(()) = root_or_skip("identities") else { return };
    for (squash, caller, expected) in [
        (Squash::Root, root(), (700, 701)),
        (Squash::Root, user(1000, 0, &[]), (1000, 701)),
        (Squash::All, user(1000, 100, &[]), (700, 701)),
        (Squash::None, Credential::anonymous(), (700, 701)),
        (Squash::None, root(), (0, 0)),
    ] {
        on_lane(|lane| {
            let served = Served::new(ExportOptions { squash, anonymous: (700, 701), ..ExportOptions::default() });
            let open = open_folder(&served, lane, 0);
            let made = served.fs.create(lane, &caller, &open, b"file", &guarded(0o644)).result.unwrap().attr;
            assert_eq!((made.uid, made.gid), expected, "{squash:?} of {caller:?}");
        });
    }
}

#[test]
fn a_device_has_the_numbers_that_were_asked_for_or_is_not_made() {
    let Some(()) = root_or_skip("devices") else { return };
    with_lane(|lane, served| {
        let attr = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        let make = |lane: &mut Lane, name: &[u8], node| {
            served.fs.mknod(lane, &root(), served.root(), name, node, &attr).result
        };
        for (at, (major, minor)) in [(1, 3), (0xfff, 0xf_ffff), (0, 0x100), (0x100, 0)].into_iter().enumerate() {
            for (kind, node) in [("c", Node::CharDevice(major, minor)), ("b", Node::BlockDevice(major, minor))] {
                let made = make(lane, format!("{kind}{at}").as_bytes(), node).unwrap();
                assert_eq!(made.attr.device, (major, minor));
            }
        }
        // Cut to what the kernel takes the first would be /dev/null.
        for (major, minor) in [(0x1001, 3), (1, 0x10_0003), (u32::MAX, u32::MAX)] {
            for node in [Node::CharDevice(major, minor), Node::BlockDevice(major, minor)] {
                assert_eq!(kind(make(lane, b"none", node)), ErrorKind::Invalid);
                assert!(!served.path("none").exists());
            }
        }
    });
}

/// A user that the system does not know has no more groups, and what the wire says does not count.
#[test]
fn managed_groups_are_those_of_the_system() {
    let Some(()) = root_or_skip("identities") else { return };
    on_lane(|lane| {
        let options = ExportOptions { squash: Squash::None, manage_gids: true, ..ExportOptions::default() };
        let served = Served::new(options);
        let file = served.make(lane, "file");
        chown(served.path("file"), None, Some(3_999_999_998)).unwrap();
        fs::set_permissions(served.path("file"), fs::Permissions::from_mode(0o040)).unwrap();
        let liar = user(3_999_999_999, 100, &[3_999_999_998]);
        assert_eq!(kind(served.fs.read(lane, &liar, &file.handle, 0, 9, &mut Vec::new()).result), ErrorKind::Access);
    });
}

#[test]
fn a_read_only_export_changes_nothing() {
    on_lane(|lane| {
        let served = Served::new(ExportOptions { read_only: true, squash: Squash::None, ..ExportOptions::default() });
        fs::write(served.path("file"), "text").unwrap();
        let before = fs::metadata(served.path("file")).unwrap();
        let (dir, file) = (served.root().clone(), served.find(lane, "file").handle);
        let (layer, who, none) = (&served.fs, root(), SetAttr::default());
        let kinds = [
            kind(layer.create(lane, &who, &dir, b"x", &guarded(0o644)).result),
            kind(layer.create(lane, &who, &dir, b"file", &CreateHow::Unchecked(none)).result),
            kind(layer.mkdir(lane, &who, &dir, b"x", &none).result),
            kind(layer.symlink(lane, &who, &dir, b"x", b"y", &none).result),
            kind(layer.mknod(lane, &who, &dir, b"x", Node::Fifo, &none).result),
            kind(layer.remove(lane, &who, &dir, b"file").result),
            kind(layer.rmdir(lane, &who, &dir, b"file").result),
            kind(layer.rename(lane, &who, &dir, b"file", &dir, b"x").result),
            kind(layer.link(lane, &who, &file, &dir, b"x").result),
            kind(layer.write(lane, &who, &file, 0, b"x", Stable::Unstable).result),
            kind(layer.setattr(lane, &who, &file, &SetAttr { mode: Some(0), ..none }, None, Resize::Owner).result),
        ];
        assert_eq!(kinds, [ErrorKind::ReadOnly; 11]);
        assert_eq!(layer.read(lane, &who, &file, 0, 9, &mut Vec::new()).result.unwrap().count, 4);
        let granted = layer.access(lane, &who, &file, Access::READ | Access::WRITE).result.unwrap();
        assert_eq!(granted, Access::READ);
        let after = fs::metadata(served.path("file")).unwrap();
        assert_eq!((after.ctime_nsec(), after.mode(), after.len()), (before.ctime_nsec(), before.mode(), 4));
    });
}

#[test]
fn times_are_set_by_who_may() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let open = open_folder(&served, lane, 0);
        let (owner, writer) = (user(1000, 100, &[]), user(1001, 7, &[]));
        let file = served.fs.create(lane, &owner, &open, b"file", &guarded(0o666)).result.unwrap().handle;
        let long_ago = Time { seconds: -5, nanos: 250_000_000 };
        let to =
            SetAttr { atime: Some(SetTime::To(long_ago)), mtime: Some(SetTime::To(long_ago)), ..SetAttr::default() };
        assert_eq!(
            kind(served.fs.setattr(lane, &writer, &file, &to, None, Resize::Owner).result),
            ErrorKind::NotPermitted
        );
        let changed = served.fs.setattr(lane, &owner, &file, &to, None, Resize::Owner);
        assert_eq!(changed.wcc.after.map(|attr| (attr.atime, attr.mtime)), Some((long_ago, long_ago)));
        let now = SetAttr { atime: Some(SetTime::Now), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let changed = served.fs.setattr(lane, &writer, &file, &now, None, Resize::Owner);
        assert!(changed.result.is_ok() && changed.wcc.after.unwrap().mtime > long_ago);
    });
}

/// Sets the length as clients do for open(2) with O_TRUNC and for ftruncate(2).
#[test]
fn writers_cut_files_of_other_owners_and_nobody_cuts_by_a_call_that_fails() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let open = open_folder(&served, lane, 0);
        let (owner, writer) = (user(1000, 100, &[]), user(1001, 100, &[]));
        let cut = SetAttr { size: Some(0), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let touch = SetAttr { size: None, ..cut };
        let explicit = Some(SetTime::To(Time { seconds: 1, nanos: 0 }));
        let no = [
            SetAttr { uid: Some(1001), ..cut },
            SetAttr { gid: Some(7), ..cut },
            SetAttr { mode: Some(0o600), ..cut },
            SetAttr { mode: Some(0o4676), ..cut },
            SetAttr { mtime: explicit, ..cut },
            SetAttr { atime: explicit, ..cut },
        ];
        for (at, by_open) in [None, Some(true), Some(false)].into_iter().enumerate() {
            let name = format!("file{at}");
            let made = served.fs.create(lane, &owner, &open, name.as_bytes(), &guarded(0o666)).result.unwrap();
            let (file, path) = (made.handle, served.path("open").join(&name));
            fs::set_permissions(&path, fs::Permissions::from_mode(0o4676)).unwrap();
            let fid = by_open
                .map(|write| served.fs.open(lane, &writer, &file, OpenHow { write, ..OpenHow::READ }).unwrap().0);
            let set = |lane: &mut Lane, to: &SetAttr| match &fid {
                None => served.fs.setattr(lane, &writer, &file, to, None, Resize::Writer).result,
                Some(fid) => served.fs.setattr_open(lane, &writer, fid, to),
            };
            let look = || {
                let found = fs::metadata(&path).unwrap();
                (found.len(), found.mode() & 0o7777, found.mtime())
            };
            fs::write(&path, "text").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o4676)).unwrap();
            for to in &no {
                assert_eq!(kind(set(lane, to)), ErrorKind::NotPermitted, "{by_open:?} {to:?}");
                assert_eq!(look().0, 4, "{by_open:?} {to:?}");
            }
            set_mtime(&path, 1);
            set(lane, &touch).unwrap();
            assert!(look().2 > 1, "{by_open:?}");
            // The mode without its set-id bits, as Linux' client of 9P sends it.
            set_mtime(&path, 1);
            set(lane, &SetAttr { mode: Some(0o676), ..cut }).unwrap();
            let (len, mode, mtime) = look();
            assert_eq!((len, mode), (0, 0o676), "{by_open:?}");
            assert!(mtime > 1, "{by_open:?}");
            // Nothing is cut off, and the time is that of the call nevertheless.
            set_mtime(&path, 1);
            set(lane, &cut).unwrap();
            assert!(look().2 > 1, "{by_open:?}");
        }
        // Mode and times of the owner are those that were asked for, not those that the cut leaves.
        let made = served.fs.create(lane, &owner, &open, b"own", &guarded(0o666)).result.unwrap();
        let all = SetAttr { mode: Some(0o4755), mtime: explicit, ..cut };
        let attr = served.fs.setattr(lane, &owner, &made.handle, &all, None, Resize::Owner).wcc.after.unwrap();
        assert_eq!((attr.mode, attr.mtime.seconds), (0o4755, 1));
    });
}

fn set_mtime(path: &std::path::Path, seconds: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).unwrap();
}

/// Else a file that somebody may only read could be kept from being executed.
#[test]
fn nothing_is_opened_for_writing_for_a_caller_that_may_not_write() {
    let Some(()) = root_or_skip("identities") else { return };
    for read_only in [false, true] {
        on_lane(|lane| {
            let served = Served::new(ExportOptions { read_only, squash: Squash::None, ..ExportOptions::default() });
            fs::write(served.path("tool"), "text").unwrap();
            fs::set_permissions(served.path("tool"), fs::Permissions::from_mode(0o644)).unwrap();
            let (file, stranger) = (served.find(lane, "tool").handle, user(1000, 100, &[]));
            let refused = if read_only { ErrorKind::ReadOnly } else { ErrorKind::Access };
            let written = served.fs.write(lane, &stranger, &file, 0, b"x", Stable::Unstable);
            assert_eq!(kind(written.result), refused);
            assert_eq!(open_for_writing(&served.path("tool")), 0, "by a write");
            let cut = SetAttr { size: Some(0), ..SetAttr::default() };
            assert_eq!(kind(served.fs.setattr(lane, &stranger, &file, &cut, None, Resize::Owner).result), refused);
            assert_eq!(open_for_writing(&served.path("tool")), 0, "by a change of the size");
            served.fs.commit(lane, &file).result.unwrap();
            assert_eq!(open_for_writing(&served.path("tool")), 0, "by a commit");
        });
    }
}
