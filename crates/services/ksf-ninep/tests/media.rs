//! Errors of a medium that is full, of a quota, of a damaged medium and of one that fails, as Rlerror names them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::DirEntryExt;
use std::path::Path;

use crate::common::disk::{
    BLOCK, DISK, Disk, Frozen, IMAGE_BYTES, damage, data, fill, other_disk, stoppable_disk, unmount, with_mounts,
};
use crate::common::{Client, Place, ROOT, Serving};
use ksf::engine::EngineKind;
use ksf_fs::ExportOptions;
use ksf_ninep::ExportSettings;
use ksf_proto::p9::{Data, NO_UID, Reply, Request, UNLINK_DIRECTORY};
use ksf_test::{mount_image, program_or_skip, succeeds, wait_until};
use rustix::fs::{SealFlags, fcntl_add_seals};

const BOTH: u32 = 2;

/// A fid of the root that each Tlcreate may take.
const FREE: u32 = 1;
const FILE: u32 = 2;
const MORE: u32 = 3;

/// Serves these directories.
pub(crate) fn serve_all(place: &Place, paths: &[&Path]) -> Serving {
    paths.iter().for_each(|path| fs::create_dir_all(path).unwrap());
    let export = |path: &&Path| ExportSettings { path: path.to_path_buf(), ..place.export() };
    place.serve_all(EngineKind::Epoll, paths.iter().map(export).collect())
}

/// A client that is attached to this directory.
fn attached(serving: &Serving, path: &Path) -> Client {
    let mut client = serving.connect();
    client.version();
    client.attach(ROOT, 0, path.canonicalize().unwrap().to_str().unwrap().as_bytes()).unwrap();
    client
}

/// Makes a file, which becomes `fid`.
fn create(client: &mut Client, fid: u32, name: &str) -> Result<(), i32> {
    client.walk(ROOT, fid, "").unwrap();
    client.does(Request::Lcreate { fid, name: name.as_bytes(), flags: BOTH, mode: 0o644, gid: NO_UID })
}

fn write(client: &mut Client, fid: u32, offset: u64, data: &[u8]) -> Result<u32, i32> {
    client.ask(Request::Write { fid, offset, data: Data(data) }, |reply| match reply {
        Reply::Write { count } => count,
        other => panic!("{other:?}"),
    })
}

fn sync(client: &mut Client, fid: u32) -> Result<(), i32> {
    client.does(Request::Fsync { fid, datasync: 0 })
}

/// Writes until an error, and returns that and the bytes before it.
fn write_all(client: &mut Client, fid: u32, bytes_max: u64) -> (u64, i32) {
    let mut end = 0;
    loop {
        assert!(end < bytes_max, "there is no end");
        match write(client, fid, end, &[b'l'; 16 * BLOCK]) {
            Ok(count) => end += u64::from(count),
            Err(errno) => return (end, errno),
        }
    }
}

/// Each request that makes an object or a name. [`FREE`] and [`FILE`] are in use.
fn making(name: &[u8]) -> [Request<'_>; 6] {
    [
        Request::Lcreate { fid: FREE, name, flags: BOTH, mode: 0o644, gid: NO_UID },
        Request::Mkdir { dfid: ROOT, name, mode: 0o755, gid: 0 },
        Request::Symlink { dfid: ROOT, name, target: b"target", gid: 0 },
        Request::Mknod { dfid: ROOT, name, mode: 0o10_640, major: 0, minor: 0, gid: 0 },
        Request::Link { dfid: ROOT, fid: FILE, name },
        Request::Renameat { olddirfid: ROOT, oldname: b"file", newdirfid: ROOT, newname: name },
    ]
}

#[test]
fn a_full_disk_is_enospc_and_loses_nothing() {
    with_mounts(|| {
        let (disk, place) = (Disk::new(), Place::new());
        let serving = serve_all(&place, &[&data("")]);
        let mut client = serving.client();
        create(&mut client, FILE, "file").unwrap();
        create(&mut client, MORE, "more").unwrap();
        write(&mut client, FILE, 0, &[b'f'; BLOCK]).unwrap();
        let (end, errno) = write_all(&mut client, MORE, IMAGE_BYTES);
        assert_eq!((errno, end > IMAGE_BYTES / 4), (libc::ENOSPC, true), "{end} bytes");
        fill(data("fill").to_str().unwrap());
        // The blocks of the directory have no room for a name of this length.
        let long = "n".repeat(250);
        let linked =
            (0..1000).take_while(|number| fs::hard_link(data("file"), data(&format!("{number:3}{long}"))).is_ok());
        assert!(linked.count() < 1000, "the disk has no end");
        client.walk(ROOT, FREE, "").unwrap();
        for request in making(long.as_bytes()) {
            assert_eq!(client.does(request), Err(libc::ENOSPC), "{request:?}");
        }
        sync(&mut client, FILE).unwrap();
        sync(&mut client, MORE).unwrap();
        serving.stop();
        disk.mount_again();
        assert_eq!(fs::read(data("file")).unwrap(), [b'f'; BLOCK]);
        assert!(fs::read(data("more")).unwrap() == vec![b'l'; end as usize]);
    });
}

#[test]
fn a_quota_that_is_used_up_is_edquot_and_others_go_on() {
    with_mounts(|| {
        let Some(_disk) = other_disk("btrfs", &[]) else { return };
        let Some(_) = program_or_skip("btrfs") else { return };
        let other = Path::new(DISK).join("other");
        for volume in [&data(""), &other] {
            succeeds(&["btrfs", "subvolume", "create", volume.to_str().unwrap()]);
        }
        succeeds(&["btrfs", "quota", "enable", DISK]);
        succeeds(&["btrfs", "qgroup", "limit", "8M", data("").to_str().unwrap()]);
        let place = Place::new();
        let serving = serve_all(&place, &[&data(""), &other]);
        let mut client = attached(&serving, &data(""));
        create(&mut client, FILE, "file").unwrap();
        let (end, errno) = write_all(&mut client, FILE, 64 << 20);
        assert_eq!((errno, end > 4 << 20), (libc::EDQUOT, true), "{end} bytes");
        // Names take room, too.
        let mut made = (0..10_000).map(|number| {
            let name = number.to_string();
            client.does(Request::Mkdir { dfid: ROOT, name: name.as_bytes(), mode: 0o755, gid: 0 })
        });
        assert_eq!(made.find(Result::is_err), Some(Err(libc::EDQUOT)));
        client.walk(ROOT, FREE, "").unwrap();
        for request in making(b"new") {
            assert_eq!(client.does(request), Err(libc::EDQUOT), "{request:?}");
        }
        sync(&mut client, FILE).unwrap();
        // There is room on the disk, for others.
        let mut client = attached(&serving, &other);
        create(&mut client, FILE, "file").unwrap();
        (0..256).for_each(|at| assert!(write(&mut client, FILE, at * 16 * BLOCK as u64, &[b'o'; 16 * BLOCK]).is_ok()));
        sync(&mut client, FILE).unwrap();
        serving.stop();
    });
}

/// Entries of subvolumes have the numbers of these, which objects beside them may have as inodes.
#[test]
fn qids_in_a_listing_are_those_of_walks_across_subvolumes() {
    with_mounts(|| {
        let Some(_disk) = other_disk("btrfs", &[]) else { return };
        let Some(_) = program_or_skip("btrfs") else { return };
        fs::create_dir(data("")).unwrap();
        for number in 0..6 {
            succeeds(&["btrfs", "subvolume", "create", data(&format!("volume {number}")).to_str().unwrap()]);
            fs::create_dir(data(&format!("dir {number}"))).unwrap();
            fs::write(data(&format!("file {number}")), "").unwrap();
        }
        for name in ["volume 0/inner", "dir 0/below"] {
            succeeds(&["btrfs", "subvolume", "create", data(name).to_str().unwrap()]);
        }
        fs::create_dir(data("volume 0/dir")).unwrap();
        succeeds(&["btrfs", "subvolume", "create", data("volume 0/other").to_str().unwrap()]);
        let [from, to] = ["volume 0", "snapshot"].map(data);
        succeeds(&["btrfs", "subvolume", "snapshot", from.to_str().unwrap(), to.to_str().unwrap()]);
        let entries: Vec<_> = fs::read_dir(data("")).unwrap().map(Result::unwrap).collect();
        for volume in ["volume 2", "volume 3"] {
            let number = entries.iter().find(|entry| entry.file_name() == volume).unwrap().ino();
            assert_eq!(entries.iter().filter(|entry| entry.ino() == number).count(), 2, "{volume} {entries:?}");
        }
        for covered in ["volume 2", "dir 2"] {
            succeeds(&["mount", "-t", "tmpfs", "tmpfs", data(covered).to_str().unwrap()]);
        }
        let place = Place::new();
        let serving = serve_all(&place, &[&data("")]);
        let mut client = serving.client();
        let mut paths = BTreeSet::new();
        for dir in ["", "dir 0", "dir 0/below", "volume 0", "volume 0/dir", "volume 0/inner", "snapshot"] {
            client.open(FILE, dir, 0).unwrap();
            client.walk(ROOT, MORE, dir).unwrap();
            for (name, listed) in client.qids(FILE) {
                let is_covered = name.ends_with(" 2") && !name.starts_with("file");
                match client.walk(MORE, FREE, &name) {
                    Err(errno) => assert_eq!((errno, is_covered), (libc::EXDEV, true), "{dir}/{name}"),
                    Ok(walked) => {
                        assert_eq!((listed.kind, listed.path), (walked[0].kind, walked[0].path), "{dir}/{name}");
                        client.clunk(FREE).unwrap();
                    }
                }
                // All empty directories in the places of the subvolumes of a snapshot have one inode number.
                let is_stand_in = dir == "snapshot" && ["inner", "other"].contains(&&*name);
                let is_of_one = name.starts_with('.') || paths.insert(listed.path) || is_stand_in;
                assert!(is_of_one, "{dir}/{name} has the qid.path of another");
            }
            [FILE, MORE].iter().for_each(|fid| client.clunk(*fid).unwrap());
        }
        assert_eq!(paths.len(), (6 * 3 + 1) + 3 + 1 + 2);
        // A mount on the root itself, which the server does not enter.
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", data("").to_str().unwrap()]);
        let above = client.stat(ROOT).unwrap().qid.path;
        client.open(FILE, "dir 0", 0).unwrap();
        let listed = client.qids(FILE).into_iter().find(|(name, _)| name == "..").unwrap().1;
        assert_eq!(listed.path, above, "below a mount on the root");
        client.clunk(FILE).unwrap();
        succeeds(&["umount", data("").to_str().unwrap()]);
        serving.stop();
    });
}

/// ext4 has at most 65,000 links of a file, and without `dir_nlink` as many of a directory. A damaged count takes no time to make.
#[test]
fn more_links_than_the_file_system_has_are_emlink() {
    with_mounts(|| {
        let Some(_) = program_or_skip("debugfs") else { return };
        let Some(disk) = other_disk("ext4", &["-O", "^dir_nlink"]) else { return };
        ["full", "folder"].iter().for_each(|name| fs::create_dir_all(data(name)).unwrap());
        fs::write(data("file"), "").unwrap();
        unmount();
        for name in ["file", "full"] {
            let set = format!("set_inode_field /export/{name} links_count 65000");
            succeeds(&["debugfs", "-w", "-R", &set, &disk.image]);
        }
        mount_image(disk.image.as_ref(), DISK.as_ref());
        let place = Place::new();
        let serving = serve_all(&place, &[&data("")]);
        let mut client = serving.client();
        for (fid, name) in [(FREE, "folder"), (FILE, "file"), (MORE, "full")] {
            client.walk(ROOT, fid, name).unwrap();
        }
        for request in [
            Request::Link { dfid: ROOT, fid: FILE, name: b"new" },
            Request::Mkdir { dfid: MORE, name: b"new", mode: 0o755, gid: 0 },
            Request::Rename { fid: FREE, dfid: MORE, name: b"new" },
            Request::Renameat { olddirfid: ROOT, oldname: b"folder", newdirfid: MORE, newname: b"new" },
        ] {
            assert_eq!(client.does(request), Err(libc::EMLINK), "{request:?}");
        }
        // Files are no links of it.
        client.does(Request::Mknod { dfid: MORE, name: b"new", mode: 0o640, major: 0, minor: 0, gid: 0 }).unwrap();
        serving.stop();
    });
}

#[test]
fn a_directory_with_a_mount_on_it_is_ebusy() {
    with_mounts(|| {
        let (_disk, place) = (Disk::new(), Place::new());
        ["covered", "folder"].iter().for_each(|name| fs::create_dir_all(data(name)).unwrap());
        let serving = serve_all(&place, &[&data("")]);
        let mut client = serving.client();
        client.walk(ROOT, FILE, "covered").unwrap();
        client.walk(ROOT, MORE, "folder").unwrap();
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", data("covered").to_str().unwrap()]);
        for request in [
            Request::Unlinkat { dirfid: ROOT, name: b"covered", flags: UNLINK_DIRECTORY },
            Request::Renameat { olddirfid: ROOT, oldname: b"covered", newdirfid: ROOT, newname: b"new" },
            Request::Renameat { olddirfid: ROOT, oldname: b"folder", newdirfid: ROOT, newname: b"covered" },
            Request::Rename { fid: MORE, dfid: ROOT, name: b"covered" },
        ] {
            assert_eq!(client.does(request), Err(libc::EBUSY), "{request:?}");
        }
        // The name of the fid is that of another directory now, in another file system.
        for request in [Request::Rename { fid: FILE, dfid: ROOT, name: b"new" }, Request::Remove { fid: FILE }] {
            assert_eq!(client.does(request), Err(libc::ESTALE), "{request:?}");
        }
        assert!(data("covered").is_dir() && data("folder").is_dir());
        serving.stop();
    });
}

#[test]
fn bytes_that_cannot_be_read_are_eio() {
    with_mounts(|| {
        let (disk, place) = (Disk::new(), Place::new());
        fs::create_dir_all(data("")).unwrap();
        let bad = damage(&disk, "file");
        let serving = serve_all(&place, &[&data("")]);
        let mut client = serving.client();
        client.open(FILE, "file", 0).unwrap();
        assert_eq!(client.read(FILE, bad, 4096), Err(libc::EIO));
        let before = 64 * BLOCK as u64;
        assert_eq!(client.read(FILE, bad - before, 2 * before as u32).unwrap().len() as u64, before);
        serving.stop();
    });
}

/// A rename hangs and keeps other changes out of the directory. The request behind it looks at the name before or after it.
#[test]
fn a_fid_whose_name_another_object_gets_meanwhile_changes_that_object_in_no_way() {
    with_mounts(|| {
        let (_disk, place) = (Disk::new(), Place::new());
        let serving = serve_all(&place, &[&data("")]);
        let (mut client, mut other) = (serving.client(), serving.client());
        for request in [Request::Remove { fid: FILE }, Request::Rename { fid: FILE, dfid: ROOT, name: b"new" }] {
            fs::write(data("file"), "first").unwrap();
            fs::write(data("other"), "second").unwrap();
            client.walk(ROOT, FILE, "file").unwrap();
            let frozen = Frozen::new();
            let begins = |jobs| {
                wait_until("a lane has it", || serving.ninep.files().lane_counters().running_jobs == jobs);
            };
            other.send(1, Request::Renameat { olddirfid: ROOT, oldname: b"other", newdirfid: ROOT, newname: b"file" });
            begins(1);
            client.send(1, request);
            begins(2);
            drop(frozen);
            assert_eq!((other.next().0, client.next().0), (1, 1));
            assert_eq!(fs::read_to_string(data("file")).unwrap(), "second", "{request:?}");
            if let Request::Rename { .. } = request {
                client.clunk(FILE).unwrap();
            }
        }
        serving.stop();
    });
}

#[test]
fn a_medium_that_takes_nothing_more_is_eio_and_other_exports_go_on() {
    with_mounts(|| {
        let (image, _disk) = stoppable_disk();
        let place = Place::new();
        // Names are on the medium when their reply is sent.
        let export = |path| ExportSettings { path, ..place.export_as(ExportOptions::default()) };
        let exports = [data(""), place.path("")].map(export);
        let serving = place.serve_all(EngineKind::Epoll, exports.into());
        let (mut client, mut other) = (attached(&serving, &data("")), attached(&serving, &place.path("")));
        create(&mut client, FILE, "file").unwrap();
        write(&mut client, FILE, 0, b"kept").unwrap();
        sync(&mut client, FILE).unwrap();
        fcntl_add_seals(&image, SealFlags::WRITE).unwrap();
        write(&mut client, FILE, 0, b"lost").unwrap();
        assert_eq!(sync(&mut client, FILE), Err(libc::EIO));
        // The file system is read-only from then on, for ext4 has lost its journal.
        client.walk(ROOT, FREE, "").unwrap();
        // Each has a name of its own, because one that was refused may be there until the next mount.
        for number in 0..making(b"").len() {
            let name = format!("new {number}");
            let request = making(name.as_bytes())[number];
            let made = client.does(request);
            assert!([Err(libc::EIO), Err(libc::EROFS)].contains(&made), "{request:?}: {made:?}");
        }
        client.stat(FILE).unwrap();
        create(&mut other, FILE, "file").unwrap();
        write(&mut other, FILE, 0, b"other").unwrap();
        sync(&mut other, FILE).unwrap();
        serving.stop();
    });
}
