//! Each operation with its errors and its weak cache data.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use crate::common::{Served, kind, on_lane, root, with_lane};
use ksf_test::{Helper, is_helper};
use rustix::fs::StatVfsMountFlags;
use rustix::process::{Resource, Rlimit, setrlimit};

use ksf_fs::{
    Access, CreateHow, Credential, ErrorKind, FileType, Fs, Handle, Lane, Node, Resize, SetAttr, SetTime, Stable, Time,
    XattrHow, XattrOf,
};

/// Nothing but the server changes what it exports.
fn exclusive() -> Served {
    let options = ksf_fs::ExportOptions { squash: ksf_fs::Squash::None, exclusive: true, ..Default::default() };
    Served::new(options)
}

const NONE: SetAttr = SetAttr { mode: None, uid: None, gid: None, size: None, atime: None, mtime: None };

fn look(fs: &Fs, lane: &mut Lane, dir: &Handle, name: &[u8]) -> Result<Handle, ErrorKind> {
    let found = fs.lookup(lane, &root(), dir, name).result;
    found.map(|found| found.handle).map_err(|error| error.kind())
}

#[test]
fn attributes_are_those_of_the_file_system() {
    with_lane(|lane, served| {
        fs::write(served.path("file"), "0123456789").unwrap();
        fs::hard_link(served.path("file"), served.path("other")).unwrap();
        let attr = served.find(lane, "file").attr;
        let known = fs::metadata(served.path("file")).unwrap();
        assert_eq!(attr.file_type, FileType::Regular);
        assert_eq!((attr.size, attr.nlink, attr.fileid), (10, 2, known.ino()));
        assert_eq!((attr.uid, attr.gid, attr.mode), (known.uid(), known.gid(), known.mode() & 0o7777));
        assert_eq!(attr.used, known.blocks() * 512);
        let mtime = Time { seconds: known.mtime(), nanos: known.mtime_nsec() as u32 };
        let ctime = Time { seconds: known.ctime(), nanos: known.ctime_nsec() as u32 };
        assert_eq!((attr.mtime, attr.ctime), (mtime, ctime));
        assert_eq!(attr.fsid, u64::from(served.export.id()) << 32);
        let root_attr = served.fs.getattr(lane, served.root()).unwrap();
        assert_eq!((root_attr.file_type, root_attr.fsid), (FileType::Directory, attr.fsid));
    });
}

#[test]
fn names_are_checked() {
    with_lane(|lane, served| {
        let file = served.make(lane, "file").handle;
        let (layer, dir) = (&served.fs, served.root());
        let long = [b'n'; 256];
        for (name, expected) in [
            (&b""[..], ErrorKind::Invalid),
            (b"a/b", ErrorKind::Invalid),
            (b"/", ErrorKind::Invalid),
            (b"a\0b", ErrorKind::Invalid),
            (&long, ErrorKind::NameTooLong),
            (b"none", ErrorKind::NotFound),
        ] {
            assert_eq!(look(layer, lane, dir, name), Err(expected), "{name:?}");
            assert_eq!(kind(layer.remove(lane, &root(), dir, name).result), expected, "{name:?}");
            assert_eq!(kind(layer.rmdir(lane, &root(), dir, name).result), expected, "{name:?}");
            assert_eq!(kind(layer.rename(lane, &root(), dir, name, dir, b"x").result), expected, "{name:?}");
            if expected != ErrorKind::NotFound {
                assert_eq!(kind(layer.mkdir(lane, &root(), dir, name, &NONE).result), expected, "{name:?}");
                assert_eq!(kind(layer.link(lane, &root(), &file, dir, name).result), expected, "{name:?}");
            }
        }
        for dots in [&b"."[..], b".."] {
            assert_eq!(look(layer, lane, dir, dots).unwrap(), *dir, "the root is above itself");
            assert_eq!(kind(layer.mkdir(lane, &root(), dir, dots, &NONE).result), ErrorKind::Exists);
            assert_eq!(kind(layer.rmdir(lane, &root(), dir, dots).result), ErrorKind::Invalid);
            assert_eq!(kind(layer.rename(lane, &root(), dir, b"file", dir, dots).result), ErrorKind::Invalid);
        }
        // All other bytes are names.
        for name in [&long[..255], b"\xff\xfe", b"...", b"a b\n", b"-"] {
            let made = layer.create(lane, &root(), dir, name, &CreateHow::Guarded(NONE)).result.unwrap();
            assert_eq!(look(layer, lane, dir, name).unwrap(), made.handle);
            assert!(served.path("").join(std::ffi::OsStr::from_bytes(name)).is_file());
        }
        assert_eq!(look(layer, lane, &file, b"x"), Err(ErrorKind::NotDirectory));
        assert_eq!(kind(layer.mkdir(lane, &root(), &file, b"x", &NONE).result), ErrorKind::NotDirectory);
    });
}

#[test]
fn links_are_never_followed() {
    with_lane(|lane, served| {
        let (layer, dir) = (&served.fs, served.root());
        for (name, target) in [(&b"out"[..], &b"/etc"[..]), (b"up", b"../.."), (b"self", b"self")] {
            let made = layer.symlink(lane, &root(), dir, name, target, &NONE).result.unwrap();
            assert_eq!(made.attr.file_type, FileType::Symlink);
            assert_eq!(layer.readlink(lane, &root(), &made.handle).result.unwrap(), target);
            assert_eq!(look(layer, lane, &made.handle, b"passwd"), Err(ErrorKind::NotDirectory));
            assert_eq!(
                kind(layer.read(lane, &root(), &made.handle, 0, 9, &mut Vec::new()).result),
                ErrorKind::WrongType
            );
            let how = CreateHow::Unchecked(NONE);
            assert_eq!(kind(layer.create(lane, &root(), dir, name, &how).result), ErrorKind::Exists);
            let mode = SetAttr { mode: Some(0o600), ..NONE };
            assert_eq!(
                kind(layer.setattr(lane, &root(), &made.handle, &mode, None, Resize::Owner).result),
                ErrorKind::NotSupported
            );
            let time = Time { seconds: 77, nanos: 5 };
            let times = SetAttr { mtime: Some(SetTime::To(time)), ..NONE };
            let changed = layer.setattr(lane, &root(), &made.handle, &times, None, Resize::Owner);
            assert_eq!(changed.wcc.after.unwrap().mtime, time, "of the link");
        }
        let file = served.make(lane, "file").handle;
        assert_eq!(kind(layer.readlink(lane, &root(), &file).result), ErrorKind::Invalid);
        let symlink =
            |lane: &mut Lane, target: &[u8]| kind(layer.symlink(lane, &root(), dir, b"x", target, &NONE).result);
        assert_eq!(symlink(lane, b""), ErrorKind::Invalid);
        assert_eq!(symlink(lane, b"a\0b"), ErrorKind::Invalid);
        assert_eq!(symlink(lane, &[b'a'; 4096]), ErrorKind::NameTooLong);
        let out = look(layer, lane, dir, b"out").unwrap();
        let linked = layer.link(lane, &root(), &out, dir, b"out2");
        assert_eq!(linked.file.unwrap().nlink, 2, "a link has another name itself");
        assert_eq!(fs::read_link(served.path("out2")).unwrap().as_os_str(), "/etc");
    });
}

#[test]
fn a_name_of_another_object_is_neither_removed_nor_renamed() {
    on_lane(|lane| {
        let served = Served::open_to_all();
        let (layer, dir) = (&served.fs, served.root());
        fs::create_dir(served.path("folder")).unwrap();
        let (folder, file) = (served.find(lane, "folder").handle, served.make(lane, "file").handle);
        for (name, object, other) in [("folder", &folder, &file), ("file", &file, &folder)] {
            let name = name.as_bytes();
            let rename = |lane: &mut Lane, name, new, object| {
                layer.rename_object(lane, &root(), (dir, name), (dir, new), object).result
            };
            assert_eq!(kind(layer.remove_object(lane, &root(), dir, name, other).result), ErrorKind::Stale);
            assert_eq!(kind(layer.remove_object(lane, &root(), dir, b"none", object).result), ErrorKind::NotFound);
            assert_eq!(kind(rename(lane, name, b"new", other)), ErrorKind::Stale);
            assert_eq!(kind(rename(lane, b"none", b"new", object)), ErrorKind::NotFound);
            assert_eq!(look(layer, lane, dir, name).as_ref(), Ok(object));
            rename(lane, name, b"new", object).unwrap();
            assert_eq!(look(layer, lane, dir, b"new").as_ref(), Ok(object));
            layer.remove_object(lane, &root(), dir, b"new", object).result.unwrap();
            assert_eq!(look(layer, lane, dir, b"new"), Err(ErrorKind::NotFound));
        }
    });
}

#[test]
fn weak_cache_data_shows_each_change_once() {
    on_lane(|lane| {
        let served = exclusive();
        let (layer, dir) = (&served.fs, served.root());
        let mut known = layer.getattr(lane, dir).unwrap();
        let made = layer.create(lane, &root(), dir, b"one", &CreateHow::Guarded(NONE));
        assert_eq!(made.wcc.before, Some(known.before()));
        known = made.wcc.after.unwrap();
        assert_ne!(made.wcc.before, Some(known.before()));
        let failed = layer.create(lane, &root(), dir, b"one", &CreateHow::Guarded(NONE));
        assert_eq!(kind(failed.result), ErrorKind::Exists);
        assert_eq!((failed.wcc.before, failed.wcc.after), (Some(known.before()), Some(known)));
        let folder = layer.mkdir(lane, &root(), dir, b"folder", &NONE);
        assert_eq!(folder.wcc.before, Some(known.before()));
        let folder_attr = folder.result.as_ref().unwrap().attr;
        let folder_handle = folder.result.unwrap().handle;
        let renamed = layer.rename(lane, &root(), dir, b"one", &folder_handle, b"two");
        assert_eq!(renamed.from.before, folder.wcc.after.map(|attr| attr.before()));
        assert_eq!(renamed.to.before, Some(folder_attr.before()));
        assert_eq!(renamed.to.after, Some(layer.getattr(lane, &folder_handle).unwrap()));
        let file = made.result.unwrap().handle;
        let before = layer.getattr(lane, &file).unwrap();
        let written = layer.write(lane, &root(), &file, 0, b"12345", Stable::Unstable);
        assert_eq!(written.wcc.before, Some(before.before()));
        assert_eq!(written.wcc.after.unwrap().size, 5);
        let stable = layer.write(lane, &root(), &file, 5, b"6", Stable::FileSync);
        assert_eq!(stable.wcc.before, written.wcc.after.map(|attr| attr.before()));
        assert_eq!(stable.wcc.after.unwrap().size, 6);
        let removed = layer.remove(lane, &root(), &folder_handle, b"two");
        assert_eq!(removed.wcc.before, renamed.to.after.map(|attr| attr.before()));
    });
}

/// A local program may have come between: a client that takes its own change for the only one keeps what is not so any more.
#[test]
fn where_others_change_too_nothing_is_said_of_before() {
    with_lane(|lane, served| {
        let (layer, dir) = (&served.fs, served.root());
        let made = layer.create(lane, &root(), dir, b"one", &CreateHow::Guarded(NONE));
        let file = made.result.unwrap().handle;
        let renamed = layer.rename(lane, &root(), dir, b"one", dir, b"two");
        let mut all = vec![made.wcc, renamed.from, renamed.to];
        for stable in [Stable::Unstable, Stable::DataSync, Stable::FileSync] {
            all.push(layer.write(lane, &root(), &file, 0, b"text", stable).wcc);
        }
        all.push(layer.setattr(lane, &root(), &file, &SetAttr { size: Some(1), ..NONE }, None, Resize::Owner).wcc);
        all.push(layer.remove(lane, &root(), dir, b"none").wcc);
        all.push(layer.remove(lane, &root(), dir, b"two").wcc);
        assert!(all.iter().all(|wcc| wcc.before.is_none() && wcc.after.is_some()), "{all:?}");
    });
}

/// Runs each call with few descriptors left. One that is to be sent again has changed nothing.
#[test]
#[ignore = "a part of the test below"]
fn helper_changes_without_descriptors() {
    if !is_helper() {
        return;
    }
    let few = Rlimit { current: Some(80), maximum: Some(80) };
    setrlimit(Resource::Nofile, few).unwrap();
    with_lane(|lane, served| {
        let (layer, dir, root) = (&served.fs, served.root(), &root());
        type Call<'a> = &'a dyn Fn(&mut Lane, &[u8]) -> Result<(), ksf_fs::FsError>;
        let timed = SetAttr { mtime: Some(SetTime::Now), ..NONE };
        let source = served.make(lane, "source").handle;
        // What each makes, or takes away.
        let calls: [(&str, bool, Call<'_>); 8] = [
            ("mkdir", true, &|lane, name| layer.mkdir(lane, root, dir, name, &timed).result.map(drop)),
            ("symlink", true, &|lane, name| layer.symlink(lane, root, dir, name, b"x", &timed).result.map(drop)),
            ("mknod", true, &|lane, name| layer.mknod(lane, root, dir, name, Node::Fifo, &timed).result.map(drop)),
            ("create", true, &|lane, name| {
                layer.create(lane, root, dir, name, &CreateHow::Guarded(timed)).result.map(drop)
            }),
            ("link", true, &|lane, name| layer.link(lane, root, &source, dir, name).result),
            ("remove", false, &|lane, name| layer.remove(lane, root, dir, name).result),
            ("rmdir", false, &|lane, name| layer.rmdir(lane, root, dir, name).result),
            ("rename", false, &|lane, name| layer.rename(lane, root, dir, name, dir, b"renamed").result),
        ];
        let with_room = |room, run: &mut dyn FnMut() -> Result<(), ksf_fs::FsError>| {
            let mut others: Vec<_> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
            others.truncate(others.len() - room);
            run()
        };
        for room in 0..6 {
            for (call, makes, run) in &calls {
                let name = format!("{call}{room}");
                if *call == "rmdir" {
                    fs::create_dir(served.path(&name)).unwrap();
                } else if !makes {
                    fs::write(served.path(&name), "").unwrap();
                }
                layer.getattr(lane, dir).unwrap();
                let result = with_room(room, &mut || run(lane, name.as_bytes()));
                let is_there = fs::symlink_metadata(served.path(&name)).is_ok();
                match result.map_err(|error| error.kind()) {
                    Ok(()) => assert_eq!(is_there, *makes, "{name}"),
                    Err(ErrorKind::TryLater) => assert_eq!(is_there, !makes, "{name} is to be sent again"),
                    Err(other) => panic!("{name}: {other:?}"),
                }
            }
            let length = 10 + room as u64;
            let to = SetAttr { size: Some(length), mode: Some(0o600 + room as u32), ..timed };
            let set = with_room(room, &mut || layer.setattr(lane, root, &source, &to, None, Resize::Owner).result);
            let is_set = layer.getattr(lane, &source).unwrap().size == length;
            match set.map_err(|error| error.kind()) {
                Ok(()) => assert!(is_set),
                Err(ErrorKind::TryLater) => assert!(!is_set, "setattr is to be sent again with room for {room}"),
                Err(other) => panic!("setattr: {other:?}"),
            }
        }
    });
}

/// Looks at a folder of 100 entries while there are no descriptors but those that the layer keeps.
#[test]
#[ignore = "a part of the test below"]
fn helper_looks_without_descriptors() {
    if !is_helper() {
        return;
    }
    let few = Rlimit { current: Some(120), maximum: Some(120) };
    setrlimit(Resource::Nofile, few).unwrap();
    with_lane(|lane, served| {
        let (layer, dir, root) = (&served.fs, served.root(), &root());
        let folder = layer.mkdir(lane, root, dir, b"folder", &NONE).result.unwrap().handle;
        for name in 0..100 {
            fs::write(served.path(&format!("folder/{name}")), "").unwrap();
        }
        let name = |at: usize| format!("{}", at % 100).into_bytes();
        let taken = || std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect::<Vec<_>>();
        let list = |lane: &mut Lane| {
            let (mut all, mut whole) = (0, 0);
            let take = &mut |entry: ksf_fs::Entry<'_>| {
                all += 1;
                whole += usize::from(entry.found.is_some());
                true
            };
            let from = ksf_fs::Cursor::default();
            layer.list(lane, root, &folder, from, ksf_fs::Detail::Handles, take).result.map(|_| (all, whole))
        };
        // Some are kept, and there is room for no more.
        let look_at = |lane: &mut Lane, at: usize| layer.lookup(lane, root, &folder, &name(at)).result.map(drop);
        let calls: [&dyn Fn(&mut Lane); 3] = [
            &|lane| look_at(lane, 50).unwrap(),
            &|lane| assert!(layer.lookup(lane, root, &folder, b"..").result.is_ok()),
            // All but `..` of which nothing is told.
            &|lane| assert_eq!(list(lane).unwrap(), (102, 101)),
        ];
        for call in calls {
            (0..30).for_each(|at| look_at(lane, at).unwrap());
            let evicted = layer.counters().evicted;
            let others = taken();
            call(lane);
            drop(others);
            assert!(layer.counters().evicted > evicted, "others were closed for it");
        }
        // Nothing is kept but the folder: entries need no descriptors; a name takes the last one, and the next is to be
        // asked for later.
        (0..20).for_each(|_| layer.settle_owed(lane, &layer.close_idle()).unwrap());
        ksf_test::wait_until("nothing is kept", || layer.counters().descriptors == 0);
        layer.getattr(lane, &folder).unwrap();
        list(lane).unwrap();
        let _others = taken();
        assert_eq!(list(lane).unwrap(), (102, 101));
        look_at(lane, 50).unwrap();
        let _more = taken();
        assert_eq!(kind(look_at(lane, 50)), ErrorKind::TryLater);
    });
}

#[test]
fn descriptors_that_are_kept_give_way_to_look_ups_and_listings() {
    let ran = Helper::command("operations::helper_looks_without_descriptors").output().unwrap();
    assert!(ran.status.success(), "{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn a_change_that_was_made_is_never_to_be_sent_again() {
    let ran = Helper::command("operations::helper_changes_without_descriptors").output().unwrap();
    assert!(ran.status.success(), "{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn create_knows_three_ways() {
    with_lane(|lane, served| {
        let (layer, dir) = (&served.fs, served.root());
        let create = |lane: &mut Lane, name: &[u8], how| layer.create(lane, &root(), dir, name, &how).result;
        let sized = SetAttr { size: Some(3), mode: Some(0o640), ..NONE };
        let file = create(lane, b"file", CreateHow::Unchecked(sized)).unwrap();
        assert_eq!((file.attr.size, file.attr.mode), (3, 0o640));
        fs::write(served.path("file"), "longer").unwrap();
        let again = create(lane, b"file", CreateHow::Unchecked(SetAttr { mode: Some(0o600), ..NONE })).unwrap();
        assert_eq!((again.handle.clone(), again.attr.size, again.attr.mode), (file.handle.clone(), 6, 0o640));
        let cut = create(lane, b"file", CreateHow::Unchecked(SetAttr { size: Some(0), ..NONE })).unwrap();
        assert_eq!((cut.handle, cut.attr.size), (file.handle, 0));
        assert_eq!(kind(create(lane, b"file", CreateHow::Guarded(sized))), ErrorKind::Exists);
        fs::create_dir(served.path("folder")).unwrap();
        assert_eq!(kind(create(lane, b"folder", CreateHow::Unchecked(sized))), ErrorKind::Exists);
        let bad = SetAttr { size: Some(u64::MAX), ..NONE };
        assert_eq!(kind(create(lane, b"bad", CreateHow::Guarded(bad))), ErrorKind::TooBig);
        assert!(!served.path("bad").exists());
    });
}

#[test]
fn an_exclusive_call_that_is_sent_again_is_answered_alike() {
    on_lane(|lane| {
        let served = exclusive();
        let (layer, dir) = (&served.fs, served.root());
        let mount = rustix::fs::statvfs(served.path("")).unwrap().f_flag;
        let is_strict = !mount.intersects(StatVfsMountFlags::RELATIME | StatVfsMountFlags::NOATIME);
        for (at, verifier) in
            [[0; 8], [0xff; 8], [0x80, 0, 0, 0, 0x7f, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]].iter().enumerate()
        {
            let name = format!("file{at}");
            let create = |lane: &mut Lane, verifier| {
                layer.create(lane, &root(), dir, name.as_bytes(), &CreateHow::Exclusive(verifier))
            };
            let first = create(lane, *verifier).result.unwrap();
            let second = create(lane, *verifier).result.unwrap();
            assert_eq!((&first.handle, first.attr.size), (&second.handle, 0));
            // With `relatime` and `noatime` a reader does not change the times; with `strictatime` it does.
            if !is_strict {
                fs::read(served.path(&name)).unwrap();
                assert_eq!(create(lane, *verifier).result.unwrap().handle, first.handle, "after a read");
            }
            for byte in 0..8 {
                let mut other = *verifier;
                other[byte] ^= 0x80;
                let refused = create(lane, other);
                assert_eq!(kind(refused.result), ErrorKind::Exists, "byte {byte}");
                assert!(refused.wcc.before.is_some() && refused.wcc.after.is_some());
            }
            // The client takes the verifier away by setting the times.
            let times = SetAttr { atime: Some(SetTime::Now), mtime: Some(SetTime::Now), mode: Some(0o600), ..NONE };
            layer.setattr(lane, &root(), &first.handle, &times, None, Resize::Owner).result.unwrap();
            assert_eq!(kind(create(lane, *verifier).result), ErrorKind::Exists);
        }
    });
}

#[test]
fn a_guard_lets_only_the_expected_state_change() {
    with_lane(|lane, served| {
        let file = served.make(lane, "file");
        let to = SetAttr { mode: Some(0o600), ..NONE };
        let wrong = Time { seconds: 1, nanos: 1 };
        let refused = served.fs.setattr(lane, &root(), &file.handle, &to, Some(wrong), Resize::Owner);
        assert_eq!(kind(refused.result), ErrorKind::NotSync);
        assert_eq!(refused.wcc.after.unwrap().mode, 0o644);
        let changed = served.fs.setattr(lane, &root(), &file.handle, &to, Some(file.attr.ctime), Resize::Owner);
        assert!(changed.result.is_ok());
        assert_eq!(changed.wcc.after.unwrap().mode, 0o600);
    });
}

#[test]
fn folders_and_files_are_removed_by_their_own_calls() {
    with_lane(|lane, served| {
        let (layer, dir) = (&served.fs, served.root());
        served.make(lane, "file");
        let folder = layer.mkdir(lane, &root(), dir, b"folder", &NONE).result.unwrap().handle;
        layer.create(lane, &root(), &folder, b"inner", &CreateHow::Guarded(NONE)).result.unwrap();
        assert_eq!(kind(layer.remove(lane, &root(), dir, b"folder").result), ErrorKind::IsDirectory);
        assert_eq!(kind(layer.rmdir(lane, &root(), dir, b"file").result), ErrorKind::NotDirectory);
        assert_eq!(kind(layer.rmdir(lane, &root(), dir, b"folder").result), ErrorKind::NotEmpty);
        assert_eq!(kind(layer.rename(lane, &root(), dir, b"folder", &folder, b"x").result), ErrorKind::Invalid);
        layer.remove(lane, &root(), &folder, b"inner").result.unwrap();
        layer.rmdir(lane, &root(), dir, b"folder").result.unwrap();
        layer.remove(lane, &root(), dir, b"file").result.unwrap();
        assert_eq!(fs::read_dir(served.path("")).unwrap().count(), 0);
    });
}

#[test]
fn two_exports_have_nothing_in_common() {
    on_lane(|lane| {
        let folder = ksf_test::Folder::to_export();
        let mut layer = Fs::new(ksf_fs::FsOptions::default()).unwrap();
        let mut add = |name: &str| {
            fs::create_dir(folder.path(name)).unwrap();
            let options = ksf_fs::ExportOptions { squash: ksf_fs::Squash::None, ..Default::default() };
            layer.add_export(&folder.path(name), &folder.path("state"), options).unwrap()
        };
        let (one, two) = (add("one"), add("two"));
        let file = layer.create(lane, &root(), one.root(), b"file", &CreateHow::Guarded(NONE)).result.unwrap().handle;
        assert_eq!(layer.export_of(&file).unwrap().path(), one.path());
        assert_eq!(kind(layer.link(lane, &root(), &file, two.root(), b"x").result), ErrorKind::CrossesDevice);
        let renamed = layer.rename(lane, &root(), one.root(), b"file", two.root(), b"x");
        assert_eq!(kind(renamed.result), ErrorKind::CrossesDevice);
        assert_eq!(layer.decode(file.as_bytes()).unwrap(), file);
    });
}

#[test]
fn the_file_system_tells_its_room_and_limits() {
    with_lane(|lane, served| {
        let stat = served.fs.fsstat(lane, served.root()).result.unwrap();
        assert!(stat.available_bytes <= stat.free_bytes && stat.free_bytes <= stat.total_bytes);
        assert!(stat.total_bytes > 0 && stat.total_bytes < 1 << 63);
        let conf = served.fs.pathconf(lane, served.root()).result.unwrap();
        assert_eq!((conf.name_max, conf.no_trunc, conf.case_insensitive), (255, true, false));
        let all = Access::READ | Access::WRITE | Access::EXECUTE;
        assert_eq!(served.fs.access(lane, &root(), served.root(), all).result.unwrap(), all);
        assert_eq!(Access::from_bits_truncate(u32::MAX), all);
    });
}

#[test]
fn what_would_block_an_open_is_not_opened() {
    with_lane(|lane, served| {
        let (layer, dir) = (&served.fs, served.root());
        for (name, node) in [(&b"fifo"[..], Node::Fifo), (b"socket", Node::Socket)] {
            let made = layer.mknod(lane, &root(), dir, name, node, &NONE).result.unwrap();
            let read = layer.read(lane, &root(), &made.handle, 0, 9, &mut Vec::new());
            assert_eq!(kind(read.result), ErrorKind::WrongType);
            assert_eq!(read.after.unwrap().file_type, made.attr.file_type);
            let written = layer.write(lane, &root(), &made.handle, 0, b"x", Stable::Unstable);
            assert_eq!(kind(written.result), ErrorKind::WrongType);
            let size = SetAttr { size: Some(0), ..NONE };
            assert_eq!(
                kind(layer.setattr(lane, &root(), &made.handle, &size, None, Resize::Owner).result),
                ErrorKind::WrongType
            );
            assert_eq!(kind(layer.commit(lane, &made.handle).result), ErrorKind::WrongType);
        }
        assert_eq!(kind(layer.read(lane, &root(), dir, 0, 9, &mut Vec::new()).result), ErrorKind::IsDirectory);
    });
}

#[test]
fn extended_attributes_are_those_of_the_object_and_of_its_caller() {
    let served = Served::open_to_all();
    on_lane(|lane| {
        let found = served.make(lane, "file");
        let (fs, file) = (&served.fs, XattrOf::Handle(&found.handle));
        let mut set = |name: &[u8], value: &[u8], how| fs.set_xattr(lane, &root(), file, (name, value), how);
        if set(b"user.one", b"1", XattrHow::Any).is_err_and(|error| error.kind() == ErrorKind::NotSupported) {
            return ksf_test::skip("the file system has no user attributes");
        }
        let path = served.path("file");
        let mut value = [0; 10];
        let count = rustix::fs::getxattr(&path, "user.one", &mut value[..]).unwrap();
        assert_eq!(value[..count], *b"1");
        assert_eq!(kind(set(b"user.one", b"2", XattrHow::New)), ErrorKind::Exists);
        set(b"user.one", b"2", XattrHow::Replace).unwrap();
        assert_eq!(set(b"user.two", b"2", XattrHow::Replace).unwrap_err().errno, libc::ENODATA);
        set(b"user.two", b"", XattrHow::New).unwrap();
        assert_eq!(kind(set(b"user.\0", b"", XattrHow::Any)), ErrorKind::Invalid);
        assert_eq!(fs.xattr(lane, &root(), file, b"user.one"), Ok(b"2".to_vec()));
        assert_eq!(fs.xattr(lane, &root(), file, b"user.two"), Ok(vec![]));
        let names = fs.xattr_names(lane, &root(), file).unwrap();
        let names: Vec<&[u8]> = names.split(|byte| *byte == 0).filter(|name| name.starts_with(b"user.")).collect();
        assert!(names.len() == 2 && names.contains(&&b"user.one"[..]), "{names:?}");
        fs.remove_xattr(lane, &root(), file, b"user.one").unwrap();
        assert_eq!(fs.xattr(lane, &root(), file, b"user.one").unwrap_err().errno, libc::ENODATA);
        let other = Credential::unix(1001, 1001, &[]);
        if ksf_test::is_root() {
            let set = fs.set_xattr(lane, &other, file, (b"user.two", b"3"), XattrHow::Any);
            assert_eq!(kind(set), ErrorKind::Access);
        }
    });
}
