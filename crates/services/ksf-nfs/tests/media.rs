//! A medium that is full, read-only, broken or stopped: a small ext4 on a loop device, in a mount namespace of the test.
//!
//! The quota is one of btrfs, for a subvolume: those of ext4 and xfs for a user take a kernel with CONFIG_QFMT_V2 or
//! CONFIG_XFS_QUOTA, which few have that run tests. All three fail with EDQUOT.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::disk::{
    BLOCK, DISK, Disk, Frozen, IMAGE_BYTES, damage, data, fill, other_disk, stoppable_disk, unmount, with_mounts,
};
use crate::common::{Attr, Client, OK, Place, Serving, handle, made, mode, named, read_args, split, write_args};
use crate::failures::{failure, inode, only_failure};
use crate::other_client::{OtherClient, mount_failure};
use crate::procedures::list;
use ksf::engine::EngineKind;
use ksf_fs::ExportOptions;
use ksf_nfs::ExportSettings;
use ksf_proto::oncrpc::NFS_PROGRAM;
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_test::rpc::words;
use ksf_test::{effort, program_or_skip, reads_at_once, succeeds, wait_until};
use rustix::fs::{SealFlags, SeekFrom, fcntl_add_seals, seek};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const IO: u32 = 5;
const FBIG: u32 = 27;
const NOSPC: u32 = 28;
const ROFS: u32 = 30;
const MLINK: u32 = 31;
const DQUOT: u32 = 69;

const UNSTABLE: u32 = 0;
const FILE_SYNC: u32 = 2;

/// Serves a folder of the disk.
fn serve(place: &Place) -> Serving {
    fs::create_dir_all(data("")).unwrap();
    place.serve_all(EngineKind::Epoll, vec![ExportSettings { path: data(""), ..place.export() }])
}

/// What a WRITE came to: the bytes and the verifier, or the status of its failure.
fn write(client: &mut Client, file: &[u8], offset: u64, stable: u32, bytes: &[u8]) -> Result<(u32, u64), u32> {
    let (status, rest) = client.nfs(7, &write_args(file, offset, stable, bytes));
    let tail = rest.get(rest.len().wrapping_sub(16)..).filter(|_| status == OK).ok_or(status)?;
    let mut r = XdrReader::new(tail);
    let (count, committed) = (r.u32().unwrap(), r.u32().unwrap());
    assert!(committed >= stable, "less stable than asked for");
    Ok((count, r.u64().unwrap()))
}

fn commit(client: &mut Client, file: &[u8]) -> Result<u64, u32> {
    let (status, rest) = client.nfs(21, &read_args(file, 0, 0));
    if status == OK { Ok(u64::from_be_bytes(*rest.last_chunk().unwrap())) } else { Err(status) }
}

fn read(client: &mut Client, file: &[u8], count: u32) -> Vec<u8> {
    let rest = client.done(6, &read_args(file, 0, count));
    let at = rest.len() - (count as usize).next_multiple_of(4);
    rest[at..][..count as usize].to_vec()
}

fn create(client: &mut Client, dir: &[u8], name: &str) -> u32 {
    client.nfs(8, &[named(dir, name), words(&[1]), mode(0o644)].concat()).0
}

#[test]
fn a_full_disk_is_told_and_loses_nothing() {
    with_mounts(|| {
        let (disk, place) = (Disk::new(), Place::new());
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let [mine, large] = ["mine", "large"].map(|name| client.create(&root, name));
        write(&mut client, &mine, 0, FILE_SYNC, &[b'a'; BLOCK]).unwrap();
        let (_, verifier) = write(&mut client, &mine, 0, UNSTABLE, &[b'b'; BLOCK]).unwrap();
        // WRITE: as much as there is room for, then the status.
        let mut end = 0;
        let status = loop {
            assert!(end < IMAGE_BYTES, "the disk has no end");
            match write(&mut client, &large, end, UNSTABLE, &[b'l'; 16 * BLOCK]) {
                Ok((count, _)) => end += u64::from(count),
                Err(status) => break status,
            }
        };
        assert_eq!((status, end > IMAGE_BYTES / 4), (NOSPC, true), "{end} bytes");
        assert_eq!(failure(&mut client, 7, &write_args(&large, end, FILE_SYNC, &[b'l'; 16 * BLOCK])), NOSPC);
        // CREATE and MKDIR, when folder and table of inodes have no room either.
        let long = "n".repeat(250);
        let mut statuses = (0..1000).map(|number| create(&mut client, &root, &format!("{number}{long}")));
        assert_eq!(statuses.find(|status| *status != OK), Some(NOSPC));
        let mkdir = [named(&root, "folder"), mode(0o755)].concat();
        assert_eq!(client.nfs(9, &mkdir).0, NOSPC);
        assert_eq!(OtherClient::beside(&client).failure(9, &mkdir), (NOSPC, vec![inode(data(""))]));
        // What was accepted is kept, also what is accepted now, and nobody has to write again.
        write(&mut client, &mine, 0, UNSTABLE, &[b'c'; 9]).unwrap();
        assert_eq!(commit(&mut client, &mine), Ok(verifier));
        assert_eq!(commit(&mut client, &large), Ok(verifier));
        assert_eq!(serving.nfs.files().fs_counters().write_back_failures, 0);
        assert_eq!(read(&mut client, &mine, 10), b"cccccccccb");
        // With room again all goes on.
        let kept = client.create_free(&root, &large);
        write(&mut client, &kept, 0, FILE_SYNC, &[b'k'; BLOCK]).unwrap();
        serving.stop();
        disk.mount_again();
        let mut expected = vec![b'b'; BLOCK];
        expected[..9].fill(b'c');
        assert_eq!(fs::read(data("mine")).unwrap(), expected);
        assert_eq!(fs::read(data("kept")).unwrap(), [b'k'; BLOCK]);
    });
}

impl Client {
    /// Removes the file that fills the disk, and makes another one.
    fn create_free(&mut self, root: &[u8], large: &[u8]) -> Vec<u8> {
        self.done(12, &named(root, "large"));
        assert_eq!(self.nfs(1, &handle(large)).0, 70, "it is gone");
        // Its inode may be the only free one.
        made(&self.done(8, &[named(root, "kept"), words(&[0]), mode(0o644)].concat()))
    }
}

/// `maxfilesize` and `time_delta` of FSINFO.
fn sizes(client: &mut Client, root: &[u8]) -> (u64, [u32; 2]) {
    let sizes = client.done(19, &handle(root));
    let mut r = XdrReader::new(&sizes);
    Attr::read_option(&mut r).unwrap();
    let _transfers: [u32; 7] = std::array::from_fn(|_| r.u32().unwrap());
    (r.u64().unwrap(), std::array::from_fn(|_| r.u32().unwrap()))
}

/// `maxfilesize` of FSINFO and `linkmax` of PATHCONF.
fn limits(client: &mut Client, root: &[u8]) -> (u64, u32) {
    let names = client.done(20, &handle(root));
    let mut r = XdrReader::new(&names);
    Attr::read_option(&mut r).unwrap();
    (sizes(client, root).0, r.u32().unwrap())
}

/// Checks the limits against the kernel, which seeks to no offset above the size limit of a file.
fn limits_are_exact(client: &mut Client, root: &[u8], (size_max, link_max): (u64, u32)) {
    assert_eq!(limits(client, root), (size_max, link_max));
    let file = client.create(root, "limits");
    let local = File::open(data("limits")).unwrap();
    assert_eq!(seek(&local, SeekFrom::Start(size_max)), Ok(size_max));
    assert_eq!(write(client, &file, size_max, FILE_SYNC, b"x"), Err(FBIG));
    if size_max < i64::MAX as u64 {
        assert!(seek(&local, SeekFrom::Start(size_max + 1)).is_err(), "the kernel allows more");
        write(client, &file, size_max - 1, FILE_SYNC, b"x").unwrap();
    }
    // Where making so many takes no minutes.
    if link_max <= 65_535 {
        (1..link_max).for_each(|number| fs::hard_link(data("limits"), data(&format!("l{number}"))).unwrap());
        let link = [handle(&file), named(root, "more")].concat();
        assert_eq!(client.nfs(15, &link).0, MLINK);
        let objects = ["limits", ""].map(|name| inode(data(name))).to_vec();
        assert_eq!(OtherClient::beside(client).failure(15, &link), (MLINK, objects));
    }
}

/// Cookies of listings, handles and the numbers of inodes are those of the file system: each has others. So have limits: the size
/// of a file, and its links.
fn is_served(kind: &str, limits: (u64, u32)) {
    with_mounts(|| {
        let Some(disk) = other_disk(kind, &[]) else { return };
        let place = Place::new();
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let wanted: BTreeSet<String> =
            (0..1000).map(|number| format!("{number}-{}", "n".repeat(number % 200))).collect();
        let folder = made(&client.done(9, &[named(&root, "folder"), mode(0o755)].concat()));
        for name in &wanted {
            assert_eq!(create(&mut client, &folder, name), OK);
        }
        let file = client.create(&root, "file");
        write(&mut client, &file, 1 << 40, FILE_SYNC, b"far").unwrap();
        write(&mut client, &file, 0, UNSTABLE, b"text").unwrap();
        commit(&mut client, &file).unwrap();
        client.done(14, &[named(&root, "file"), named(&folder, "moved")].concat());
        client.done(15, &[handle(&file), named(&root, "link")].concat());
        let attr = client.done(1, &handle(&file));
        serving.stop();
        disk.mount_again();
        // Handles lead to the same objects after the file system was mounted again.
        let serving = serve(&place);
        let mut client = serving.client();
        assert_eq!(client.mnt(&data("")).unwrap(), root);
        assert_eq!(client.lookup(&root, "link"), file);
        assert_eq!(client.done(1, &handle(&file))[20..][..8], attr[20..][..8], "the size");
        assert_eq!(read(&mut client, &file, 4), b"text");
        // All that the kernel reads ahead is the beginning of a file that has a page alone.
        let small = client.create(&root, "small");
        write(&mut client, &small, 0, FILE_SYNC, b"text").unwrap();
        let at_once = || serving.nfs.files().fs_counters().warm;
        if reads_at_once(&data("")) {
            wait_until(format_args!("{kind}: a READ is answered at once"), || {
                let before = at_once();
                assert_eq!(read(&mut client, &small, 4), b"text");
                at_once() > before
            });
        }
        let mut listed = BTreeSet::new();
        let mut from = [0; 16];
        loop {
            let args = [handle(&folder), from.to_vec(), words(&[4096])].concat();
            let rest = client.done(16, &args);
            let mut r = XdrReader::new(&rest);
            Attr::read_option(&mut r).unwrap();
            from[8..].copy_from_slice(&r.u64().unwrap().to_be_bytes());
            while r.bool().unwrap() {
                r.u64().unwrap();
                let name = String::from_utf8(r.opaque(255).unwrap().to_vec()).unwrap();
                from[..8].copy_from_slice(&r.u64().unwrap().to_be_bytes());
                assert!(name == "." || name == ".." || listed.insert(name), "an entry comes twice");
            }
            if r.bool().unwrap() {
                break;
            }
        }
        assert!(listed.remove("moved") && listed == wanted);
        limits_are_exact(&mut client, &root, limits);
        serving.stop();
        unmount();
    });
}

#[test]
fn an_ext4_is_served() {
    // Blocks of a file have numbers of 32 bits.
    is_served("ext4", (u64::from(u32::MAX) * 4096, 65_000));
}

/// Blocks of their files are found by indirect blocks, which reach less far than extents.
#[test]
fn an_ext2_and_an_ext3_have_their_limits() {
    // Inodes of 128 bytes have no room for parts of a second.
    for (kind, block_bytes, inode_bytes, gib) in
        [("ext2", "1024", "128", 16..17), ("ext3", "1024", "256", 16..17), ("ext3", "4096", "256", 2000..2048)]
    {
        with_mounts(|| {
            let Some(_disk) = other_disk(kind, &["-b", block_bytes, "-I", inode_bytes]) else { return };
            let place = Place::new();
            let serving = serve(&place);
            let (mut client, root) = serving.mount(&data(""));
            let known = limits(&mut client, &root);
            assert!(gib.contains(&(known.0 >> 30)), "{kind}, blocks of {block_bytes}: {} bytes", known.0);
            limits_are_exact(&mut client, &root, known);
            assert_eq!(sizes(&mut client, &root).1, if inode_bytes == "128" { [1, 0] } else { [0, 1] });
            serving.stop();
            // The server makes no file on an export that is read-only, and the client must not take its limit for a smaller one.
            let options = ExportOptions { read_only: true, ..ExportOptions::default() };
            let export = ExportSettings { path: data(""), options, ..place.export() };
            let serving = place.serve_all(EngineKind::Epoll, vec![export]);
            let (mut client, root) = serving.mount(&data(""));
            assert!(limits(&mut client, &root).0 >= known.0);
            serving.stop();
        });
    }
}

#[test]
fn an_xfs_is_served() {
    is_served("xfs", (i64::MAX as u64, i32::MAX as u32));
}

#[test]
fn a_btrfs_is_served() {
    is_served("btrfs", (i64::MAX as u64, 65_535));
}

/// The server knows handles and attributes by inode number, which files of a subvolume have, too.
#[test]
fn files_of_a_subvolume_are_listed_as_they_are_looked_up() {
    with_mounts(|| {
        let Some(_disk) = other_disk("btrfs", &[]) else { return };
        let Some(_) = program_or_skip("btrfs") else { return };
        fs::create_dir(data("")).unwrap();
        succeeds(&["btrfs", "subvolume", "create", data("volume").to_str().unwrap()]);
        let place = Place::new();
        let export = place.export();
        let options = ExportOptions { exclusive: true, ..export.options };
        let exports = vec![ExportSettings { path: data(""), options, ..export }];
        let serving = place.serve_all(EngineKind::Epoll, exports);
        let (mut client, root) = serving.mount(&data(""));
        let volume = client.lookup(&root, "volume");
        // More than one, as the export's own folders have some numbers.
        for number in 0..8 {
            [&root, &volume].iter().for_each(|dir| drop(client.create(dir, &number.to_string())));
        }
        let hits = || serving.nfs.files().fs_counters().attr_hits;
        let known = hits();
        wait_until("files are listed from the cache", || {
            list(&mut client, &root, true, 8192);
            hits() >= known + 8
        });
        for (name, _, found) in list(&mut client, &volume, true, 8192) {
            let name = String::from_utf8(name).unwrap();
            if !name.starts_with('.') {
                assert_eq!(found.unwrap().1, client.lookup(&volume, &name), "{name}");
            }
        }
        serving.stop();
    });
}

/// The kernel answers ENOMEM to open_by_handle_at(2) while the inode's number is given to a new file (iget_locked() of fs/inode.c,
/// Linux 6.18).
#[test]
fn handle_of_removed_file_is_stale_while_its_inode_number_is_used_again() {
    const STALE: u32 = 70;
    with_mounts(|| {
        let (_disk, place) = (Disk::new(), Place::new());
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let removed = client.create(&root, "file");
        client.done(12, &named(&root, "file"));
        let statuses = std::thread::scope(|scope| {
            let getattr = || (0..3000).map(|_| client.nfs(1, &handle(&removed)).0).collect::<BTreeSet<_>>();
            let asked = scope.spawn(getattr);
            while !asked.is_finished() {
                fs::write(data("new"), "").unwrap();
                fs::remove_file(data("new")).unwrap();
            }
            asked.join().unwrap()
        });
        assert_eq!(statuses, BTreeSet::from([STALE]));
        serving.stop();
    });
}

#[test]
fn a_tmpfs_has_its_limits() {
    with_mounts(|| {
        fs::create_dir(DISK).unwrap();
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", DISK]);
        let place = Place::new();
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        limits_are_exact(&mut client, &root, (i64::MAX as u64, i32::MAX as u32));
        serving.stop();
    });
}

#[test]
fn a_quota_that_is_used_up_is_told_and_others_go_on() {
    with_mounts(|| {
        let Some(_disk) = other_disk("btrfs", &[]) else { return };
        let Some(_) = program_or_skip("btrfs") else { return };
        for folder in ["export", "other"] {
            succeeds(&["btrfs", "subvolume", "create", &format!("{DISK}/{folder}")]);
        }
        succeeds(&["btrfs", "quota", "enable", DISK]);
        succeeds(&["btrfs", "qgroup", "limit", "8M", &format!("{DISK}/export")]);
        let place = Place::new();
        let other = Path::new(DISK).join("other");
        let exports = [data(""), other.clone()].map(|path| ExportSettings { path, ..place.export() });
        let serving = place.serve_all(EngineKind::Epoll, exports.into());
        let (mut client, root) = serving.mount(&data(""));
        let file = client.create(&root, "file");
        let (_, verifier) = write(&mut client, &file, 0, FILE_SYNC, &[b'a'; BLOCK]).unwrap();
        let mut end = BLOCK as u64;
        let status = loop {
            assert!(end < 64 << 20, "the quota has no end");
            match write(&mut client, &file, end, UNSTABLE, &[b'l'; 64 * BLOCK]) {
                Ok((count, _)) => end += u64::from(count),
                Err(status) => break status,
            }
        };
        assert_eq!((status, end > 4 << 20), (DQUOT, true), "{end} bytes");
        // Names take room, too.
        let mut statuses = (0..10_000).map(|number| create(&mut client, &root, &format!("{number}")));
        assert_eq!(statuses.find(|status| *status != OK), Some(DQUOT));
        // What was accepted is kept.
        assert_eq!(commit(&mut client, &file), Ok(verifier));
        // With all on the disk, a second try finds no more room than the first.
        while let Ok((count, _)) = write(&mut client, &file, end, FILE_SYNC, &[b'l'; 64 * BLOCK]) {
            assert!(end < 64 << 20, "the quota has no end");
            end += u64::from(count);
        }
        let kept = names();
        let rename = (14, [named(&root, "file"), named(&root, "new")].concat());
        for (procedure, args) in making(&root, &file, "new").into_iter().chain([rename]) {
            assert_eq!(failure(&mut client, procedure, &args), DQUOT, "procedure {procedure}");
            assert_eq!(names(), kept, "after procedure {procedure}");
        }
        let mkdir = [named(&root, "new"), mode(0o755)].concat();
        assert_eq!(OtherClient::beside(&client).failure(9, &mkdir), (DQUOT, vec![inode(data(""))]));
        assert_eq!(failure(&mut client, 7, &write_args(&file, end, FILE_SYNC, &[b'l'; 64 * BLOCK])), DQUOT);
        assert_eq!(read(&mut client, &file, 2), b"aa");
        // To cut a file within a block writes that block.
        let cut = [handle(&file), words(&[0, 0, 0, 1, 0, 1000, 0, 0, 0])].concat();
        assert_eq!(failure(&mut client, 2, &cut), DQUOT);
        assert_eq!(read(&mut client, &file, 2), b"aa");
        // There is room on the disk, for others.
        let others = client.mnt(&other).unwrap();
        let free = client.create(&others, "free");
        for block in 0..256 {
            write(&mut client, &free, block * 16 * BLOCK as u64, FILE_SYNC, &[b'o'; 16 * BLOCK]).unwrap();
        }
        serving.stop();
    });
}

/// Blocks of one file fail when they are written, as on a thin volume that has no more room, and nothing else does: the first
/// and the last one are not among them and are not written, so that no request of the block layer has other blocks, too.
#[test]
fn what_cannot_be_written_out_is_told_at_commit_and_changes_the_verifier() {
    with_mounts(|| {
        let (disk, place) = (Disk::new(), Place::new());
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let [bad, good, seen] = ["bad", "good", "seen"].map(|name| client.create(&root, name));
        let marked: Vec<u8> = (0..18 * BLOCK).map(|at| if at % 2 == 0 { 0xa5 } else { (at / BLOCK) as u8 }).collect();
        write(&mut client, &bad, 0, FILE_SYNC, &marked).unwrap();
        write(&mut client, &good, 0, FILE_SYNC, &[b'g'; BLOCK]).unwrap();
        write(&mut client, &seen, 0, FILE_SYNC, &[b's'; BLOCK]).unwrap();
        let image = fs::read(&disk.image).unwrap();
        let mut holes = 0;
        for at in (0..image.len()).step_by(BLOCK) {
            if marked.chunks(BLOCK).skip(1).take(16).any(|block| *block == image[at..][..BLOCK]) {
                succeeds(&["fallocate", "-p", "-o", &at.to_string(), "-l", &BLOCK.to_string(), &disk.image]);
                holes += 1;
            }
        }
        assert_eq!(holes, 16);
        fill("/run/media/fill");

        let (_, before) = write(&mut client, &bad, BLOCK as u64, UNSTABLE, &[b'B'; 16 * BLOCK]).unwrap();
        assert_eq!(write(&mut client, &good, 0, UNSTABLE, b"G"), Ok((1, before)));
        // SETATTR brings the file to the medium, too. COMMIT tells of the failure all the same.
        let status = only_failure(&client, 2, &[handle(&bad), mode(0o600), words(&[0])].concat());
        assert!([IO, NOSPC].contains(&status), "{status}");
        let status = only_failure(&client, 21, &read_args(&bad, 0, 0));
        assert!([IO, NOSPC].contains(&status), "{status}");
        // Who has written another file sends it again, and then it is there.
        let after = commit(&mut client, &good).unwrap();
        assert_ne!(after, before);
        assert_eq!(write(&mut client, &good, 0, UNSTABLE, b"G"), Ok((1, after)));
        assert_eq!(commit(&mut client, &good), Ok(after));
        // A stable write that fails is not acknowledged, and is a loss, too.
        let status = only_failure(&client, 7, &write_args(&bad, BLOCK as u64, FILE_SYNC, &[b'B'; 16 * BLOCK]));
        assert!([IO, NOSPC].contains(&status), "{status}");
        let last = commit(&mut client, &good).unwrap();
        assert!(last != after && last != before);
        // Others are served as ever.
        assert_eq!(read(&mut client, &seen, 3), b"sss");
        write(&mut client, &seen, 0, FILE_SYNC, b"S").unwrap();
        assert_eq!(create(&mut client, &root, "new"), OK);
        client.done(1, &handle(&bad));
        // The medium has room again.
        fs::remove_file("/run/media/fill").unwrap();
        assert_eq!(
            write(&mut client, &bad, BLOCK as u64, UNSTABLE, &[b'C'; 16 * BLOCK]),
            Ok((16 * BLOCK as u32, last))
        );
        assert_eq!(commit(&mut client, &bad), Ok(last));
        serving.stop();
        disk.mount_again();
        assert_eq!(fs::read(data("bad")).unwrap()[BLOCK..17 * BLOCK], [b'C'; 16 * BLOCK]);
        for (name, first, rest) in [("good", b'G', b'g'), ("seen", b'S', b's')] {
            let content = fs::read(data(name)).unwrap();
            assert!(content[0] == first && content[1..] == [rest; BLOCK - 1], "{name}");
        }
        assert!(data("new").exists());
    });
}

/// From some moment on no block can be written.
#[test]
fn a_medium_that_takes_nothing_more_is_told_and_other_exports_go_on() {
    with_mounts(|| {
        let (image, _disk) = stoppable_disk();
        let place = Place::new();
        let exports = vec![ExportSettings { path: data(""), ..place.export() }, place.export()];
        let serving = place.serve_all(EngineKind::Epoll, exports);
        let mut client = serving.client();
        let (root, other_root) = (client.mnt(&data("")).unwrap(), client.mnt(&place.path("")).unwrap());
        let [safe, lost] = ["safe", "lost"].map(|name| client.create(&root, name));
        let other = client.create(&other_root, "other");
        write(&mut client, &safe, 0, FILE_SYNC, b"safe").unwrap();
        // First: another program's sync would bring to the medium what is written before.
        fcntl_add_seals(&image, SealFlags::WRITE).unwrap();
        let (_, before) = write(&mut client, &lost, 0, UNSTABLE, b"lost").unwrap();
        let (_, of_other) = write(&mut client, &other, 0, UNSTABLE, b"other").unwrap();

        assert_eq!(only_failure(&client, 21, &read_args(&lost, 0, 0)), IO);
        // Nothing is acknowledged that is not on the medium.
        let stable = only_failure(&client, 7, &write_args(&lost, 0, FILE_SYNC, b"again"));
        let created = create(&mut client, &root, "new");
        let removed = client.nfs(12, &named(&root, "safe")).0;
        for status in [stable, created, removed] {
            assert!([IO, ROFS].contains(&status), "{status}");
        }
        if let Ok((_, verifier)) = write(&mut client, &lost, 0, UNSTABLE, b"again") {
            assert_ne!(verifier, before);
        }
        // What is in memory is served, and another export has lost nothing.
        client.done(1, &handle(&root));
        assert_eq!(read(&mut client, &other, 5), b"other");
        assert_eq!(commit(&mut client, &other), Ok(of_other));
        assert_eq!(create(&mut client, &other_root, "new"), OK);
        serving.stop();
    });
}

/// Arguments of each procedure that makes an object or a name: number and arguments.
fn making(root: &[u8], file: &[u8], name: &str) -> Vec<(u32, Vec<u8>)> {
    let new = named(root, name);
    let mut symlink = [new.clone(), mode(0o777)].concat();
    symlink.put_opaque(b"target");
    vec![
        (8, [new.clone(), words(&[0]), mode(0o644)].concat()),
        (8, [new.clone(), words(&[1]), mode(0o644)].concat()),
        (8, [new.clone(), words(&[2, 1, 2])].concat()),
        (9, [new.clone(), mode(0o755)].concat()),
        (10, symlink),
        (11, [new.clone(), words(&[7]), mode(0o644)].concat()),
        (15, [handle(file), new].concat()),
    ]
}

/// The same, and of each other procedure that changes names or attributes. `file` is that of this name in the folder, which has an
/// empty `folder`, too.
fn changing(root: &[u8], file: &[u8], name: &str) -> Vec<(u32, Vec<u8>)> {
    let mut all = making(root, file, name);
    all.extend([
        (2, [handle(file), mode(0o600), words(&[0])].concat()),
        (12, named(root, "file")),
        (13, named(root, "folder")),
        (14, [named(root, "file"), named(root, name)].concat()),
    ]);
    all
}

fn names() -> BTreeSet<String> {
    fs::read_dir(data("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The first call after the medium has stopped: each needs a file system of its own.
#[test]
fn a_change_of_names_or_attributes_that_does_not_reach_the_medium_is_told() {
    for number in 0..changing(&[], &[], "").len() {
        with_mounts(|| {
            let (image, _disk) = stoppable_disk();
            let place = Place::new();
            let serving = serve(&place);
            let (mut client, root) = serving.mount(&data(""));
            let [file, lost] = ["file", "lost"].map(|name| client.create(&root, name));
            made(&client.done(9, &[named(&root, "folder"), mode(0o755)].concat()));
            fcntl_add_seals(&image, SealFlags::WRITE).unwrap();
            let (_, before) = write(&mut client, &lost, 0, UNSTABLE, b"lost").unwrap();
            let (procedure, args) = changing(&root, &file, "new").swap_remove(number);
            // ext4 becomes read-only at the failure of its journal, which may meet the medium before the call does.
            let status = only_failure(&client, procedure, &args);
            assert!([IO, ROFS].contains(&status), "{status} by procedure {procedure}");
            // What was accepted before it is lost, too.
            let status = only_failure(&client, 21, &read_args(&lost, 0, 0));
            assert!([IO, ROFS].contains(&status), "{status} after procedure {procedure}");
            let after = serving.nfs.exports().next().unwrap().verifier();
            assert_ne!(u64::from_be_bytes(after), before, "after procedure {procedure}");
            client.done(1, &handle(&root));
            serving.stop();
        });
    }
}

#[test]
fn calls_that_need_a_block_tell_that_none_is_left_and_leave_nothing() {
    with_mounts(|| {
        let (_disk, place) = (Disk::new(), Place::new());
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let file = client.create(&root, "file");
        fill(data("fill").to_str().unwrap());
        // The blocks of the folder have no room for a name of this length.
        let long = "n".repeat(250);
        let linked =
            (0..1000).take_while(|number| fs::hard_link(data("file"), data(&format!("{number:3}{long}"))).is_ok());
        assert!(linked.count() < 1000, "the disk has no end");
        let kept = names();
        let rename = (14, [named(&root, "file"), named(&root, &long)].concat());
        for (procedure, args) in making(&root, &file, &long).into_iter().chain([rename]) {
            assert_eq!(failure(&mut client, procedure, &args), NOSPC, "procedure {procedure}");
            assert_eq!(names(), kept, "after procedure {procedure}");
        }
        // What takes no block is done, and the others once there is one.
        client.done(2, &[handle(&file), mode(0o600), words(&[0])].concat());
        fs::remove_file(data("fill")).unwrap();
        for number in 0..making(&root, &file, &long).len() {
            let (procedure, args) = making(&root, &file, &format!("{number}{long}")).swap_remove(number);
            assert_eq!(client.nfs(procedure, &args).0, OK, "procedure {procedure}");
        }
        client.done(14, &[named(&root, "file"), named(&root, &long)].concat());
        serving.stop();
    });
}

#[test]
fn calls_that_make_something_tell_that_no_inode_is_left_and_others_go_on() {
    with_mounts(|| {
        fs::create_dir(DISK).unwrap();
        // The kernel counts each link as an inode, too (mm/shmem.c, shmem_link).
        succeeds(&["mount", "-t", "tmpfs", "-o", "nr_inodes=16", "tmpfs", DISK]);
        let place = Place::new();
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let file = client.create(&root, "file");
        let mut kept = vec!["file".to_owned()];
        while create(&mut client, &root, &format!("{}", kept.len())) == OK {
            kept.push(kept.len().to_string());
        }
        for (procedure, args) in making(&root, &file, "new") {
            assert_eq!(failure(&mut client, procedure, &args), NOSPC, "procedure {procedure}");
        }
        // None of them has left something, and what takes no inode is done.
        for (procedure, args) in [
            (2, [handle(&file), mode(0o600), words(&[0])].concat()),
            (7, write_args(&file, 0, FILE_SYNC, b"text")),
            (14, [named(&root, "file"), named(&root, "moved")].concat()),
        ] {
            assert_eq!(client.nfs(procedure, &args).0, OK, "procedure {procedure}");
        }
        kept[0] = "moved".into();
        assert_eq!(names(), kept.iter().cloned().collect());
        // Each has room again once an object has gone.
        kept.retain(|name| name != "moved");
        for (number, (procedure, _)) in making(&root, &file, "").into_iter().enumerate() {
            let (name, gone) = (format!("new-{number}"), kept.pop().unwrap());
            client.done(12, &named(&root, &gone));
            let (_, args) = making(&root, &file, &name).swap_remove(number);
            assert_eq!(client.nfs(procedure, &args).0, OK, "procedure {procedure}");
        }
        serving.stop();
    });
}

#[test]
fn a_file_system_that_becomes_read_only_is_told_and_read() {
    with_mounts(|| {
        let (disk, place) = (Disk::new(), Place::new());
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let file = client.create(&root, "file");
        made(&client.done(9, &[named(&root, "folder"), mode(0o755)].concat()));
        let (_, verifier) = write(&mut client, &file, 0, UNSTABLE, b"text").unwrap();
        // A file that is open for writing would stand in the way.
        commit(&mut client, &file).unwrap();
        succeeds(&["mount", "-o", "remount,ro", DISK]);
        let writes = [UNSTABLE, FILE_SYNC].map(|stable| (7, write_args(&file, 0, stable, b"more")));
        for (procedure, args) in changing(&root, &file, "new").into_iter().chain(writes) {
            assert_eq!(failure(&mut client, procedure, &args), ROFS, "procedure {procedure}");
        }
        assert_eq!(read(&mut client, &file, 4), b"text");
        assert_eq!(client.lookup(&root, "file"), file);
        assert_eq!(commit(&mut client, &file), Ok(verifier));
        succeeds(&["mount", "-o", "remount,rw", DISK]);
        assert_eq!(write(&mut client, &file, 0, FILE_SYNC, b"more"), Ok((4, verifier)));
        serving.stop();
        disk.mount_again();
        assert_eq!(fs::read(data("file")).unwrap(), b"more");
    });
}

/// A client takes the bytes behind the end of a file for zeros.
#[test]
fn bytes_that_cannot_be_read_are_not_told_to_be_behind_the_end() {
    with_mounts(|| {
        let (disk, place) = (Disk::new(), Place::new());
        fs::create_dir_all(data("")).unwrap();
        let bad = damage(&disk, "file");
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let file = client.lookup(&root, "file");
        let before = 64 * BLOCK as u64;
        let rest = client.done(6, &read_args(&file, bad - before, 2 * before as u32));
        let mut r = XdrReader::new(&rest);
        assert!(Attr::read_option(&mut r).is_some_and(|attr| attr.size > bad + before));
        assert_eq!((r.u32().unwrap(), r.bool().unwrap()), (before as u32, false));
        let read = read_args(&file, bad, 4096);
        assert_eq!(client.nfs(6, &read).0, IO);
        assert_eq!(OtherClient::beside(&client).failure(6, &read), (IO, vec![inode(data("file"))]));
        serving.stop();
    });
}

/// Zeroes the entries of a new directory on the disk, and mounts the disk again.
fn damage_directory(disk: &Disk, name: &str) {
    const ENTRY: &str = "an entry of the damaged directory";
    /// Behind "." and "..", and the head of the entry.
    const AT: usize = 12 + 12 + 8;
    fs::create_dir(data(name)).unwrap();
    fs::create_dir(data(name).join(ENTRY)).unwrap();
    unmount();
    let image = File::options().read(true).write(true).open(&disk.image).unwrap();
    let (mut block, mut damaged) = ([0; BLOCK], 0);
    for at in (0..IMAGE_BYTES).step_by(BLOCK) {
        image.read_exact_at(&mut block, at).unwrap();
        // The journal may have a copy.
        if block[AT..].starts_with(ENTRY.as_bytes()) {
            image.write_all_at(&[0; BLOCK], at).unwrap();
            damaged += 1;
        }
    }
    assert!(damaged > 0, "the directory is not on the disk");
    disk.mount();
}

/// No entry is told to be missing because the medium failed.
#[test]
fn a_directory_that_cannot_be_read_is_told_by_each_procedure_that_reads_it() {
    with_mounts(|| {
        let (disk, place) = (Disk::new(), Place::new());
        fs::create_dir_all(data("")).unwrap();
        damage_directory(&disk, "damaged");
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let damaged = client.lookup(&root, "damaged");
        for (procedure, args) in [
            (3, named(&damaged, "name")),
            (16, [handle(&damaged), words(&[0, 0, 0, 0, 4096])].concat()),
            (17, [handle(&damaged), words(&[0, 0, 0, 0, 4096, 4096])].concat()),
            (12, named(&damaged, "name")),
            (8, [named(&damaged, "name"), words(&[0]), mode(0o644)].concat()),
        ] {
            assert_eq!(failure(&mut client, procedure, &args), IO, "procedure {procedure}");
        }
        assert_eq!(mount_failure(&mut client, &data("damaged/name")), IO);
        client.create(&root, "new");
        serving.stop();
    });
}

/// In KiB.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// On a tmpfs, whose syncs take no time.
#[test]
fn very_many_files_are_read_and_written_with_few_descriptors() {
    const OPEN_MAX: usize = 1024;
    /// By then what is kept between calls has reached its bounds; that of 16,384 replies is the last.
    const WARM_UP: usize = 18_000;
    with_mounts(|| {
        fs::create_dir(DISK).unwrap();
        succeeds(&["mount", "-t", "tmpfs", "tmpfs", DISK]);
        let place = Place::new();
        let own = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(OPEN_MAX as u64), ..own }).unwrap();
        let serving = serve(&place);
        let count = effort(20_000, 100_000);
        (0..count).for_each(|number| fs::write(data(&number.to_string()), format!("{number:9}")).unwrap());
        let (mut client, root) = serving.mount(&data(""));
        let mut resident_before = 0;
        for number in 0..count {
            let file = client.lookup(&root, &number.to_string());
            assert_eq!(read(&mut client, &file, 9), format!("{number:9}").as_bytes());
            let stable = if number % 2 == 0 { FILE_SYNC } else { UNSTABLE };
            let (_, verifier) = write(&mut client, &file, 0, stable, b"is").unwrap();
            if stable == UNSTABLE {
                assert_eq!(commit(&mut client, &file), Ok(verifier));
            }
            if number == WARM_UP {
                resident_before = resident();
            }
            if number % 1000 == 0 {
                let open = fs::read_dir("/proc/self/fd").unwrap().count();
                let kept = serving.nfs.files().fs_counters().descriptors;
                assert!(kept <= OPEN_MAX / 2 && open <= OPEN_MAX * 3 / 4, "{kept} kept of {open} after {number} files");
            }
        }
        let grown = resident().saturating_sub(resident_before);
        assert!(grown < 4 << 10, "{grown} KiB more for {} files more", count - WARM_UP);
        assert!(serving.nfs.files().fs_counters().evicted > count as u64 / 2);
        serving.stop();
        for number in 0..count {
            let expected = format!("is{}", &format!("{number:9}")[2..]);
            assert_eq!(fs::read_to_string(data(&number.to_string())).unwrap(), expected);
        }
    });
}

#[test]
fn writes_that_hang_leave_threads_to_calls_that_need_no_medium() {
    with_mounts(|| {
        let (_disk, place) = (Disk::new(), Place::new());
        let serving = serve(&place);
        let (mut client, root) = serving.mount(&data(""));
        let files: Vec<_> = (0..12).map(|number| client.create(&root, &number.to_string())).collect();
        for file in &files {
            write(&mut client, file, 0, FILE_SYNC, b"text").unwrap();
        }
        let mut writer = serving.client();
        let frozen = Frozen::new();
        for file in &files {
            writer.xid += 1;
            writer.send(NFS_PROGRAM, 3, 7, &write_args(file, 0, UNSTABLE, b"more"));
        }
        // The server of these tests has four lanes.
        wait_until("the writes have all lanes that they get", || {
            let counters = serving.nfs.files().lane_counters();
            counters.queued_jobs + counters.lanes >= files.len()
        });
        for file in &files {
            client.done(1, &handle(file));
            client.done(4, &[handle(file), words(&[1])].concat());
        }
        assert_eq!(client.lookup(&root, "3"), files[3]);
        drop(frozen);
        for _ in &files {
            assert_eq!(split(&writer.receive().2).0, OK);
        }
        assert_eq!(read(&mut client, &files[0], 4), b"more");
        serving.stop();
    });
}
