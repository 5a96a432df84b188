//! Exports and their handles: mistakes, restarts, renames, forgeries.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use crate::common::{Served, kind, on_lane, root, wait_until_old, with_lane};
use ksf_fs::{ErrorKind, ExportOptions, Fs, FsOptions, HANDLE_BYTES_MAX, HandleSource, SetAttr, Squash};
use ksf_test::{Folder, own_run_or_skip, root_or_skip, skip, succeeds};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Why a path cannot be exported beside those that are.
fn refused(fs: &mut Fs, path: &Path, state: &std::path::Path) -> String {
    let error = fs.add_export(path, state, ExportOptions::default()).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn mistakes_get_one_line_with_the_remedy() {
    let folder = Folder::to_export();
    let path = |name: &str| folder.path(name);
    fs::create_dir_all(path("data/inner")).unwrap();
    fs::write(path("file"), "").unwrap();
    let mut layer = Fs::new(FsOptions::default()).unwrap();
    assert!(refused(&mut layer, &path("none"), &path("state")).contains("make it"));
    assert!(refused(&mut layer, &path("file"), &path("state")).contains("export the folder that it lies in"));
    assert!(refused(&mut layer, &path("file/x"), &path("state")).contains("not a folder"));
    assert!(refused(&mut layer, &path("data"), &path("data/state")).contains("state folder outside"));
    layer.add_export(&path("data"), &path("state"), ExportOptions::default()).unwrap();
    for nested in ["data", "data/inner", "", "data/../data/inner"] {
        assert!(refused(&mut layer, &path(nested), &path("state")).contains("export one of both"), "{nested:?}");
    }
    assert_eq!(layer.exports().len(), 1);
}

#[test]
fn a_file_system_without_handles_is_refused_with_the_reason() {
    let folder = Folder::to_export();
    let mut layer = Fs::new(FsOptions::default()).unwrap();
    let error = refused(&mut layer, Path::new("/proc/self/fd"), &folder.path(""));
    assert!(error.contains("gives no file handles"), "{error}");
}

/// Exports a directory, and looks up the file "file" of 4 bytes in it.
fn is_served(fs: &mut Fs, path: &Path) {
    let export = fs.add_export(path, "/run/state".as_ref(), ExportOptions::default()).unwrap();
    let lane = &mut ksf_fs::Lane::attach().unwrap();
    let file = fs.lookup(lane, &root(), export.root(), b"file").result.unwrap();
    assert_eq!(fs.getattr(lane, &file.handle).unwrap().size, 4);
}

/// The root of a container is an overlay without the option.
#[test]
fn overlay_is_exported_with_file_handles_alone() {
    let mounted = || {
        let Some(()) = own_run_or_skip("mounts of its own") else { return };
        let mount = |name: &str, option: &str| {
            let [lower, upper, work, merged] =
                ["lower", "upper", "work", "merged"].map(|layer| format!("/run/{name}/{layer}"));
            [&lower, &upper, &work, &merged].iter().for_each(|path| fs::create_dir_all(path).unwrap());
            fs::write(format!("{lower}/file"), "text").unwrap();
            let options = format!("lowerdir={lower},upperdir={upper},workdir={work},{option}");
            succeeds(&["mount", "-t", "overlay", "-o", &options, "overlay", &merged]);
            PathBuf::from(merged)
        };
        let (mut layer, state) = (Fs::new(FsOptions::default()).unwrap(), "/run/state".as_ref());
        let error = refused(&mut layer, &mount("without", "nfs_export=off"), state);
        assert!(error.contains("mount overlay with nfs_export=on"), "{error}");
        let merged = mount("with", "index=on,nfs_export=on");
        is_served(&mut layer, &merged);
    };
    std::thread::scope(|scope| scope.spawn(mounted).join().unwrap());
}

#[test]
fn file_system_inside_an_export_is_exported_where_it_is_bound_outside() {
    let mounted = || {
        let Some(()) = own_run_or_skip("mounts of its own") else { return };
        ["data/inner", "outside"].iter().for_each(|name| fs::create_dir_all(format!("/run/{name}")).unwrap());
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/run/data/inner"]);
        fs::write("/run/data/inner/file", "text").unwrap();
        let (mut layer, state) = (Fs::new(FsOptions::default()).unwrap(), "/run/state".as_ref());
        layer.add_export("/run/data".as_ref(), state, ExportOptions::default()).unwrap();
        assert!(refused(&mut layer, "/run/data/inner".as_ref(), state).contains("export one of both"));
        succeeds(&["mount", "--bind", "/run/data/inner", "/run/outside"]);
        is_served(&mut layer, "/run/outside".as_ref());
    };
    std::thread::scope(|scope| scope.spawn(mounted).join().unwrap());
}

#[test]
fn a_key_that_others_read_or_that_is_damaged_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::to_export();
    fs::create_dir(folder.path("data")).unwrap();
    let (data, state) = (folder.path("data"), folder.path("state"));
    let mut layer = Fs::new(FsOptions::default()).unwrap();
    layer.add_export(&data, &state, ExportOptions::default()).unwrap();
    let key = fs::read_dir(&state).unwrap().next().unwrap().unwrap().path();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    let mut layer = Fs::new(FsOptions::default()).unwrap();
    assert!(refused(&mut layer, &data, &state).contains("chmod 600"));
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    for damage in [&b""[..], b"ksf-fs export key 1\nid 00", b"\xff\xfe"] {
        fs::write(&key, damage).unwrap();
        assert!(refused(&mut layer, &data, &state).contains("is damaged"), "{damage:?}");
    }
}

#[test]
fn a_key_that_is_not_the_servers_own_file_is_refused() {
    let folder = Folder::to_export();
    fs::create_dir(folder.path("data")).unwrap();
    let (data, state) = (folder.path("data"), folder.path("state"));
    let open = || Fs::new(FsOptions::default()).unwrap().add_export(&data, &state, ExportOptions::default());
    open().unwrap();
    let key = fs::read_dir(&state).unwrap().next().unwrap().unwrap().path();
    let refused = |how: &str| {
        let error = open().unwrap_err().to_string();
        assert!(error.contains("not a file of the server's user") && error.lines().count() == 1, "{how}: {error}");
    };
    let elsewhere = folder.path("elsewhere");
    fs::rename(&key, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &key).unwrap();
    refused("a link");
    fs::remove_file(&key).unwrap();
    ksf_test::succeeds(&["mkfifo", "-m", "600", key.to_str().unwrap()]);
    refused("a FIFO");
    fs::remove_file(&key).unwrap();
    fs::rename(&elsewhere, &key).unwrap();
    open().unwrap();
    if let Some(()) = root_or_skip("a file of another user") {
        std::os::unix::fs::chown(&key, Some(1000), None).unwrap();
        refused("another user's");
    }
}

/// Its handles name inodes, which are others' in what is there now: with the old folder beside it, they would open files that are
/// not exported.
#[test]
fn handles_are_none_when_another_folder_or_file_system_is_in_the_place_of_theirs() {
    with_lane(|lane, served| {
        let file = served.make(lane, "file").handle;
        let root = served.root().clone();
        let top = served.path("..").canonicalize().unwrap();
        let [data, old, copy] = ["data", "old", "copy"].map(|name| top.join(name));
        fs::rename(&data, &old).unwrap();
        ksf_test::succeeds(&["cp", "-a", old.to_str().unwrap(), data.to_str().unwrap()]);
        let served = served.restarted();
        for handle in [&file, &root] {
            assert_eq!(kind(served.fs.decode(handle.as_bytes())), ErrorKind::BadHandle);
        }
        assert!(served.fs.decode(served.find(lane, "file").handle.as_bytes()).is_ok());
        // The folder comes back, and so do its handles.
        fs::rename(&data, copy).unwrap();
        fs::rename(&old, &data).unwrap();
        let served = served.restarted();
        assert_eq!(served.fs.decode(file.as_bytes()).unwrap(), file);
    });
    let mounted = || {
        let Some(()) = own_run_or_skip("file systems of its own") else { return };
        fs::create_dir("/run/data").unwrap();
        let root = || {
            ksf_test::succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/run/data"]);
            let mut layer = Fs::new(FsOptions::default()).unwrap();
            let export =
                layer.add_export("/run/data".as_ref(), "/run/state".as_ref(), ExportOptions::default()).unwrap();
            (export.root().clone(), layer)
        };
        let (first, _) = root();
        let (second, layer) = root();
        assert_eq!(kind(layer.decode(first.as_bytes())), ErrorKind::BadHandle);
        assert!(layer.decode(second.as_bytes()).is_ok());
    };
    std::thread::scope(|scope| scope.spawn(mounted).join().unwrap());
}

#[test]
fn handles_survive_a_restart_and_renames() {
    let Some(()) = root_or_skip("file handles") else { return };
    with_lane(|lane, served| {
        assert_eq!(served.export.handles(), HandleSource::Kernel);
        fs::create_dir(served.path("folder")).unwrap();
        fs::write(served.path("folder/file"), "content").unwrap();
        let folder = served.find(lane, "folder");
        let file = served.fs.lookup(lane, &root(), &folder.handle, b"file").result.unwrap();
        assert_eq!(file.attr.size, 7);
        assert!(file.handle.as_bytes().len() <= HANDLE_BYTES_MAX);
        let id = served.export.id();
        let served = served.restarted();
        assert_eq!(served.export.id(), id);
        fs::rename(served.path("folder"), served.path("other")).unwrap();
        fs::rename(served.path("other/file"), served.path("moved")).unwrap();
        let handle = served.fs.decode(file.handle.as_bytes()).unwrap();
        assert_eq!(handle, file.handle);
        assert_eq!(served.fs.getattr(lane, &handle).unwrap().fileid, file.attr.fileid);
        let root_handle = served.fs.decode(served.root().as_bytes()).unwrap();
        assert_eq!(served.find(lane, "moved").handle, handle);
        assert_eq!(served.fs.lookup(lane, &root(), &root_handle, b"..").result.unwrap().handle, root_handle);
    });
}

#[test]
fn forged_foreign_and_cut_handles_are_none() {
    let (one, two) = (Served::open_to_all(), Served::open_to_all());
    let handle = one.root().as_bytes();
    assert_eq!(one.fs.decode(handle).unwrap(), *one.root());
    assert_eq!(kind(two.fs.decode(handle)), ErrorKind::BadHandle, "of another server");
    for length in (0..handle.len()).chain([handle.len() + 1, 64, 65, 1000]) {
        let mut bytes = handle.to_vec();
        bytes.resize(length, 0);
        if length != handle.len() {
            assert_eq!(kind(one.fs.decode(&bytes)), ErrorKind::BadHandle, "{length} bytes");
        }
    }
    for at in 0..handle.len() {
        let mut bytes = handle.to_vec();
        bytes[at] ^= 0x40;
        assert_eq!(kind(one.fs.decode(&bytes)), ErrorKind::BadHandle, "byte {at}");
    }
}

#[test]
fn removed_and_replaced_files_are_stale_at_once() {
    with_lane(|lane, served| {
        let file = served.make(lane, "file");
        // Open here, for reading and writing.
        let done = served.fs.write(lane, &root(), &file.handle, 0, b"old", ksf_fs::Stable::Unstable);
        assert_eq!(done.result.unwrap().count, 3);
        let mut bytes = Vec::new();
        assert_eq!(served.fs.read(lane, &root(), &file.handle, 0, 10, &mut bytes).result.unwrap().count, 3);
        fs::write(served.path("new"), "new!").unwrap();
        fs::rename(served.path("new"), served.path("file")).unwrap();
        assert_eq!(kind(served.fs.getattr(lane, &file.handle)), ErrorKind::Stale);
        assert_eq!(kind(served.fs.read(lane, &root(), &file.handle, 0, 10, &mut bytes).result), ErrorKind::Stale);
        let written = served.fs.write(lane, &root(), &file.handle, 0, b"x", ksf_fs::Stable::Unstable);
        assert_eq!(kind(written.result), ErrorKind::Stale);
        let found = served.find(lane, "file");
        assert_ne!(found.handle, file.handle);
        assert_eq!(found.attr.size, 4);
        fs::create_dir(served.path("folder")).unwrap();
        let folder = served.find(lane, "folder");
        fs::remove_dir(served.path("folder")).unwrap();
        assert_eq!(kind(served.fs.lookup(lane, &root(), &folder.handle, b"x").result), ErrorKind::Stale);
        assert!(served.fs.counters().stale >= 4);
    });
}

#[test]
fn a_file_of_two_names_lives_until_the_last_goes() {
    with_lane(|lane, served| {
        let file = served.make(lane, "one");
        served.fs.link(lane, &root(), &file.handle, served.root(), b"two").result.unwrap();
        served.fs.remove(lane, &root(), served.root(), b"one").result.unwrap();
        // Without kernel handles its place is that of the name that was told last.
        assert_eq!(served.find(lane, "two").handle, file.handle);
        assert_eq!(served.fs.getattr(lane, &file.handle).unwrap().nlink, 1);
        served.fs.remove(lane, &root(), served.root(), b"two").result.unwrap();
        assert_eq!(kind(served.fs.getattr(lane, &file.handle)), ErrorKind::Stale);
    });
}

/// A mount inside of an export is not entered; /dev has some on most systems.
#[test]
fn mounts_are_not_crossed() {
    let Some(()) = root_or_skip("the export of /dev") else { return };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_mount = |path: &str| mounts.lines().any(|line| line.split(' ').nth(4) == Some(path));
    if !is_mount("/dev") || !is_mount("/dev/pts") {
        return skip("needs /dev and /dev/pts as mounts");
    }
    on_lane(|lane| {
        let state = tempfile::tempdir().unwrap();
        let mut layer = Fs::new(FsOptions::default()).unwrap();
        let options = ExportOptions { read_only: true, ..ExportOptions::default() };
        let dev = layer.add_export(Path::new("/dev"), state.path(), options).unwrap();
        let found = layer.lookup(lane, &root(), dev.root(), b"pts");
        assert_eq!(kind(found.result), ErrorKind::MountPoint);
        assert!(found.after.is_some());
        let mut seen = false;
        let take = &mut |entry: ksf_fs::Entry<'_>| {
            if entry.name == b"pts" {
                seen = true;
                assert_eq!(entry.found, None);
            }
            true
        };
        layer.list(lane, &root(), dev.root(), ksf_fs::Cursor::default(), ksf_fs::Detail::Handles, take).result.unwrap();
        assert!(seen);
        // A device is no file: to read it could block.
        let null = layer.lookup(lane, &root(), dev.root(), b"null").result.unwrap();
        assert_eq!(null.attr.device, (1, 3));
        assert_eq!(kind(layer.read(lane, &root(), &null.handle, 0, 8, &mut Vec::new()).result), ErrorKind::WrongType);
    });
}

/// Mounts of another file system and of the same one, on entries that a listing met before.
#[test]
fn entries_that_become_mount_points_lose_handle_and_attributes() {
    let mounted = || {
        let Some(()) = own_run_or_skip("mounts of its own") else { return };
        fs::create_dir("/run/data").unwrap();
        ["other", "same", "plain"].iter().for_each(|name| fs::create_dir(format!("/run/data/{name}")).unwrap());
        ["file", "bound"].iter().for_each(|name| fs::write(format!("/run/data/{name}"), name).unwrap());
        let lane = &mut ksf_fs::Lane::attach().unwrap();
        let mut layer = Fs::new(FsOptions::default()).unwrap();
        let data = layer.add_export("/run/data".as_ref(), "/run/state".as_ref(), ExportOptions::default()).unwrap();
        let list = |lane: &mut ksf_fs::Lane| {
            let mut all = BTreeMap::new();
            let take = &mut |entry: ksf_fs::Entry<'_>| {
                all.insert(entry.name.to_vec(), (entry.fileid, entry.file_type, entry.found));
                true
            };
            let from = ksf_fs::Cursor::default();
            layer.list(lane, &root(), data.root(), from, ksf_fs::Detail::Handles, take).result.unwrap();
            all
        };
        ["other", "same", "plain", "file", "bound"]
            .iter()
            .for_each(|name| wait_until_old(format!("/run/data/{name}").as_ref()));
        let before = list(lane);
        assert!(before.len() == 7 && before.values().all(|(_, _, found)| found.is_some()));
        ksf_test::succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/run/data/other"]);
        ksf_test::succeeds(&["mount", "--bind", "/run/data/plain", "/run/data/same"]);
        ksf_test::succeeds(&["mount", "--bind", "/run/data/file", "/run/data/bound"]);
        for _ in 0..2 {
            for (name, (fileid, file_type, found)) in list(lane) {
                let is_mount = matches!(&name[..], b"other" | b"same" | b"bound");
                assert_eq!((fileid, file_type), (before[&name].0, before[&name].1), "{name:?}");
                assert_eq!(found.is_none(), is_mount, "{name:?}");
                let looked = layer.lookup(lane, &root(), data.root(), &name).result;
                assert_eq!(looked.is_err_and(|error| error.kind() == ErrorKind::MountPoint), is_mount, "{name:?}");
            }
        }
    };
    std::thread::scope(|scope| scope.spawn(mounted).join().unwrap());
}

/// A mount hides a directory from names, not from its handle. The kernel leads from below to what is mounted there, never to the
/// directory itself.
#[test]
fn a_directory_below_a_mount_is_the_one_that_its_handle_names() {
    let mounted = || {
        let Some(()) = own_run_or_skip("mounts of its own") else { return };
        fs::create_dir_all("/run/data/a/b/c").unwrap();
        let lane = &mut ksf_fs::Lane::attach().unwrap();
        let mut layer = Fs::new(FsOptions::default()).unwrap();
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let export = layer.add_export("/run/data".as_ref(), "/run/state".as_ref(), options).unwrap();
        let look = |lane: &mut ksf_fs::Lane, dir: &_, name: &str| {
            layer.lookup(lane, &root(), dir, name.as_bytes()).result.map(|found| found.handle)
        };
        let a = look(lane, export.root(), "a").unwrap();
        let b = look(lane, &a, "b").unwrap();
        let c = look(lane, &b, "c").unwrap();
        let attr = |lane: &mut ksf_fs::Lane| layer.getattr(lane, &a).map(|attr| (attr.fileid, attr.nlink, attr.mtime));
        let before = attr(lane);
        let root_fileid = layer.getattr(lane, export.root()).unwrap().fileid;
        for cover in [&["mount", "-t", "tmpfs", "tmpfs"][..], &["mount", "--bind", "/tmp"]] {
            succeeds(&[cover, &["/run/data/a"]].concat());
            assert_eq!(attr(lane), before, "{cover:?}");
            let mut listed = BTreeMap::new();
            let take = &mut |entry: ksf_fs::Entry<'_>| {
                listed.insert(entry.name.to_vec(), (entry.fileid, entry.found.map(|found| found.handle)));
                true
            };
            let from = ksf_fs::Cursor::default();
            layer.list(lane, &root(), &a, from, ksf_fs::Detail::Handles, take).result.unwrap();
            assert_eq!(listed.len(), 3, "{cover:?}: {listed:?}");
            assert_eq!(listed[&b".."[..]].0, root_fileid, "{cover:?}");
            assert_eq!(listed[&b"b"[..]].1.as_ref(), Some(&b), "{cover:?}");
            assert_eq!(look(lane, &a, "b"), Ok(b.clone()), "{cover:?}");
            assert_eq!(look(lane, &a, ".."), Ok(export.root().clone()), "{cover:?}");
            for below in [&b, &c] {
                assert_eq!(kind(look(lane, below, "..")), ErrorKind::MountPoint, "{cover:?}");
            }
            succeeds(&["umount", "/run/data/a"]);
        }
        assert_eq!((look(lane, &c, ".."), look(lane, &b, "..")), (Ok(b), Ok(a)));
    };
    std::thread::scope(|scope| scope.spawn(mounted).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Handles reach folders whose paths are longer than the kernel's.
#[test]
fn the_way_up_is_open_at_any_depth() {
    const DEPTH: usize = 2200;
    let Some(()) = root_or_skip("file handles") else { return };
    on_lane(|lane| {
        let options = ExportOptions { squash: Squash::None, sync_names: false, ..ExportOptions::default() };
        let served = Served::new(options);
        let mut chain = vec![served.root().clone()];
        for _ in 0..DEPTH {
            let made = served.fs.mkdir(lane, &root(), chain.last().unwrap(), b"d", &SetAttr::default());
            chain.push(made.result.unwrap().handle);
        }
        for depth in [1, 2046, 2047, 2048, 2049, DEPTH] {
            let above = served.fs.lookup(lane, &root(), &chain[depth], b"..").result.unwrap();
            assert_eq!(above.handle, chain[depth - 1], "at {depth}");
        }
        // Programs that remove the test's folder by its path cannot go as deep.
        for folder in chain.iter().rev().skip(1) {
            served.fs.rmdir(lane, &root(), folder, b"d").result.unwrap();
        }
    });
}

/// A folder that was moved out has no way back into what lies around it.
#[test]
fn the_way_up_ends_at_the_root_of_the_export() {
    let Some(()) = root_or_skip("file handles") else { return };
    with_lane(|lane, served| {
        fs::create_dir_all(served.path("a/b")).unwrap();
        let a = served.find(lane, "a");
        let b = served.fs.lookup(lane, &root(), &a.handle, b"b").result.unwrap();
        let up = |lane: &mut ksf_fs::Lane, handle| served.fs.lookup(lane, &root(), handle, b"..").result;
        assert_eq!(up(lane, &b.handle).unwrap().handle, a.handle);
        assert_eq!(up(lane, &a.handle).unwrap().handle, *served.root());
        assert_eq!(up(lane, served.root()).unwrap().handle, *served.root());
        let outside = served.path("..").canonicalize().unwrap().join("outside");
        fs::rename(served.path("a"), &outside).unwrap();
        assert_eq!(kind(up(lane, &a.handle)), ErrorKind::Stale);
        assert_eq!(kind(up(lane, &b.handle)), ErrorKind::Stale);
    });
}

/// A directory that is a mount point, or not, with nothing mounted on it, another file system, or another directory. A mount on the
/// root lies in the way up from the directories in it.
#[test]
fn the_way_up_ends_at_the_root_whatever_is_mounted_there() {
    let mounted = || {
        let Some(()) = own_run_or_skip("mounts of its own") else { return };
        // By this path local programs reach what the mounts below hide.
        fs::create_dir("/run/all").unwrap();
        succeeds(&["mount", "--bind", "/run", "/run/all"]);
        let covers: [&[&str]; 3] = [&[], &["mount", "-t", "tmpfs", "tmpfs"], &["mount", "--bind", "/tmp"]];
        let mut number = 0;
        for is_mount_point in [false, true] {
            for cover in covers {
                number += 1;
                let data = format!("/run/data{number}");
                fs::create_dir(&data).unwrap();
                if is_mount_point {
                    succeeds(&["mount", "-t", "tmpfs", "tmpfs", &data]);
                }
                fs::create_dir_all(format!("{data}/a/b/c")).unwrap();
                // Older than the last change: `relatime` renews it at the next read.
                let old = fs::FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH);
                for name in ["", "a", "a/b", "a/b/c"] {
                    fs::File::open(format!("{data}/{name}")).unwrap().set_times(old).unwrap();
                }
                let lane = &mut ksf_fs::Lane::attach().unwrap();
                let mut layer = Fs::new(FsOptions::default()).unwrap();
                let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
                let export = layer.add_export(data.as_ref(), "/run/state".as_ref(), options).unwrap();
                let mut chain = vec![export.root().clone()];
                for name in [b"a", b"b", b"c"] {
                    let found = layer.lookup(lane, &root(), chain.last().unwrap(), name).result.unwrap();
                    chain.push(found.handle);
                }
                if !cover.is_empty() {
                    succeeds(&[cover, &[data.as_str()]].concat());
                }
                let what = format!("mount point {is_mount_point}, covered by {cover:?}");
                let atime = |lane: &mut ksf_fs::Lane, handle| layer.getattr(lane, handle).unwrap().atime;
                let fileid = |lane: &mut ksf_fs::Lane, handle| layer.getattr(lane, handle).unwrap().fileid;
                for depth in 0..chain.len() {
                    let above = &chain[depth.saturating_sub(1)];
                    let before = atime(lane, &chain[depth]);
                    let found = layer.lookup(lane, &root(), &chain[depth], b"..").result;
                    let found = found.map(|found| (found.handle, found.attr.fileid));
                    assert_eq!(found, Ok((above.clone(), fileid(lane, above))), "{what}, depth {depth}");
                    assert_eq!(
                        atime(lane, &chain[depth]),
                        before,
                        "{what}, depth {depth}: a look-up reads no directory"
                    );
                    let mut listed = None;
                    let take = &mut |entry: ksf_fs::Entry<'_>| {
                        listed = listed.or((entry.name == b"..").then_some(entry.fileid));
                        true
                    };
                    let from = ksf_fs::Cursor::default();
                    layer.list(lane, &root(), &chain[depth], from, ksf_fs::Detail::Handles, take).result.unwrap();
                    assert_eq!(listed, Some(fileid(lane, above)), "{what}, depth {depth}");
                }
                if !is_mount_point {
                    fs::rename(format!("/run/all/data{number}/a"), format!("/run/all/outside{number}")).unwrap();
                    for handle in &chain[1..] {
                        let up = layer.lookup(lane, &root(), handle, b"..").result;
                        assert_eq!(kind(up), ErrorKind::Stale, "{what}, moved out");
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| scope.spawn(mounted).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Another thread takes the last descriptors and gives them back meanwhile.
#[test]
fn a_covered_root_is_found_or_the_client_is_to_ask_again() {
    let mounted = || {
        let Some(()) = own_run_or_skip("mounts of its own") else { return };
        fs::create_dir_all("/run/data/a").unwrap();
        let lane = &mut ksf_fs::Lane::attach().unwrap();
        let mut layer = Fs::new(FsOptions::default()).unwrap();
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let export = layer.add_export("/run/data".as_ref(), "/run/state".as_ref(), options).unwrap();
        let a = layer.lookup(lane, &root(), export.root(), b"a").result.unwrap().handle;
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", "/run/data"]);
        let own = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(128), ..own }).unwrap();
        let is_done = AtomicBool::new(false);
        let refused = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    drop(fs::File::open("/dev/null"));
                }
            });
            let mut others = Vec::new();
            let mut refused = None;
            for round in 0..10_000 {
                others.extend(std::iter::from_fn(|| fs::File::open("/dev/null").ok()));
                others.truncate(others.len() - round % 4 - 1);
                let up = layer.lookup(lane, &root(), &a, b"..").result.map(|found| found.handle);
                let is_right = match &up {
                    Ok(above) => above == export.root(),
                    Err(error) => error.kind() == ErrorKind::TryLater,
                };
                if !is_right {
                    refused = Some((round, up));
                    break;
                }
            }
            is_done.store(true, Ordering::Relaxed);
            refused
        });
        setrlimit(Resource::Nofile, own).unwrap();
        assert_eq!(refused, None);
    };
    std::thread::scope(|scope| scope.spawn(mounted).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
