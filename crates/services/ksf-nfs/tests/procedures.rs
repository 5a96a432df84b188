//! Each procedure does what RFC 1813 says of it, and fails as it says: what a client sees is held against the folder.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use ksf::engine::EngineKind;

use crate::common::{
    Attr, Client, OK, Place, Wcc, handle, made, mode, named, named_bytes, read_args, split, wcc, write_args,
};
use crate::failures::failure;
use ksf_proto::oncrpc::{Accepted, MOUNT_PROGRAM, NFS_PROGRAM, Reply, ReplyStatus};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_test::rpc::words;
use ksf_test::wait_until;

const NOENT: u32 = 2;
const EXIST: u32 = 17;
const NOTDIR: u32 = 20;
const ISDIR: u32 = 21;
const INVAL: u32 = 22;
const FBIG: u32 = 27;
const NAMETOOLONG: u32 = 63;
const NOTEMPTY: u32 = 66;
const STALE: u32 = 70;
const BADHANDLE: u32 = 10_001;
const NOT_SYNC: u32 = 10_002;
const TOOSMALL: u32 = 10_005;
const BADTYPE: u32 = 10_007;

/// Attributes that a procedure tells behind its status, before anything else.
#[track_caller]
fn first_attr(rest: &[u8]) -> Attr {
    Attr::read_option(&mut XdrReader::new(rest)).expect("attributes are told")
}

#[track_caller]
fn getattr(client: &mut Client, object: &[u8]) -> Attr {
    let rest = client.done(1, &handle(object));
    let mut r = XdrReader::new(&rest);
    let attr = Attr::read(&mut r);
    r.finish().unwrap();
    attr
}

/// Data and end of file.
#[track_caller]
fn read(client: &mut Client, file: &[u8], offset: u64, count: u32) -> (Vec<u8>, bool) {
    let rest = client.done(6, &read_args(file, offset, count));
    let mut r = XdrReader::new(&rest);
    Attr::read_option(&mut r).expect("attributes of the file");
    let (count, eof) = (r.u32().unwrap(), r.bool().unwrap());
    let data = r.opaque(u32::MAX).unwrap().to_vec();
    r.finish().unwrap();
    assert_eq!(data.len(), count as usize);
    (data, eof)
}

#[test]
fn attributes_are_those_of_the_folder() {
    let place = Place::new();
    fs::write(place.path("file"), "hello").unwrap();
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o4751)).unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    let attr = getattr(&mut client, &root);
    let known = fs::metadata(place.path("")).unwrap();
    assert_eq!((attr.file_type, attr.fileid, attr.nlink), (2, known.ino(), known.nlink() as u32));
    let file = client.lookup(&root, "file");
    let attr = getattr(&mut client, &file);
    let known = fs::metadata(place.path("file")).unwrap();
    assert_eq!((attr.file_type, attr.mode, attr.size, attr.fileid), (1, 0o4751, 5, known.ino()));
    assert_eq!((attr.uid, attr.gid, attr.nlink), (known.uid(), known.gid(), 1));
    let time = |seconds: i64, nanos: i64| (seconds as u64) << 32 | nanos as u64;
    assert_eq!(attr.mtime, time(known.mtime(), known.mtime_nsec()));
    assert_eq!(attr.ctime, time(known.ctime(), known.ctime_nsec()));
    // What LOOKUP tells is the same, with the folder's behind it.
    let rest = client.done(3, &named(&root, "file"));
    let mut r = XdrReader::new(&rest);
    assert_eq!(r.opaque(64).unwrap(), file);
    assert_eq!(Attr::read_option(&mut r), Some(attr));
    assert_eq!(Attr::read_option(&mut r).map(|attr| attr.file_type), Some(2));
    r.finish().unwrap();
    serving.stop();
}

#[test]
fn what_is_written_is_read_and_is_in_the_file() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.create(&root, "file");
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    for (stable, offset) in [(0, 0), (1, 1 << 20), (2, (2 << 20) + 5)] {
        let rest = client.done(7, &write_args(&file, offset, stable, &data));
        let mut r = XdrReader::new(&rest);
        let wcc = Wcc::read(&mut r);
        assert_eq!(wcc.after.map(|attr| attr.size), Some(offset + data.len() as u64));
        assert!(wcc.before.is_none(), "a local program may have written, too");
        assert_eq!(r.u32().unwrap(), 1 << 20);
        assert!(r.u32().unwrap() >= stable, "at least what was asked for");
        let verifier = r.u64().unwrap();
        r.finish().unwrap();
        let rest = client.done(21, &read_args(&file, 0, 0));
        let mut r = XdrReader::new(&rest);
        assert!(Wcc::read(&mut r).after.is_some());
        assert_eq!(r.u64().unwrap(), verifier, "nothing was lost in between");
        r.finish().unwrap();
    }
    assert_eq!(read(&mut client, &file, 0, 1 << 20), (data.clone(), false));
    assert_eq!(read(&mut client, &file, 7, 6), (data[7..13].to_vec(), false));
    let end = (3 << 20) + 5;
    assert_eq!(read(&mut client, &file, end - 3, 100), (data[data.len() - 3..].to_vec(), true));
    assert_eq!(read(&mut client, &file, end + 10, 100), (Vec::new(), true));
    // More than the server gives at once: a part.
    assert_eq!(read(&mut client, &file, 0, u32::MAX).0.len(), 1 << 20);
    let known = fs::read(place.path("file")).unwrap();
    assert!(known.len() as u64 == end && known[..1 << 20] == data && known[(2 << 20) + 5..] == data);
    serving.stop();
}

/// The last byte of a file is the one before 2^63 - 1.
#[test]
fn offsets_and_counts_have_the_bounds_of_their_types() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.create(&root, "file");
    client.done(7, &write_args(&file, 0, 0, b"hello"));
    // COMMIT: all of the file, whatever part is named.
    let committed = |client: &mut Client, offset, count| {
        let rest = client.done(21, &read_args(&file, offset, count));
        rest[rest.len() - 8..].to_vec()
    };
    let verifier = committed(&mut client, 0, 0);
    for (offset, count) in [(0, 5), (3, 1), (5, u32::MAX), (1 << 63, 0), (u64::MAX, 0), (u64::MAX, u32::MAX)] {
        client.done(7, &write_args(&file, 0, 0, b"hello"));
        assert_eq!(committed(&mut client, offset, count), verifier, "COMMIT of {count} at {offset}");
        assert_eq!(serving.nfs.files().fs_counters().uncommitted_files, 0, "COMMIT of {count} at {offset}");
    }
    const END: u64 = i64::MAX as u64;
    for offset in [END - 1, END, END + 1, u64::MAX - 1, u64::MAX] {
        for count in [0, 1, u32::MAX] {
            assert_eq!(read(&mut client, &file, offset, count), (Vec::new(), true), "READ of {count} at {offset}");
        }
        for (stable, data) in [(0, &b"xx"[..]), (2, b"xx")] {
            let (status, rest) = client.nfs(7, &write_args(&file, offset, stable, data));
            assert_eq!((status, wcc(&rest).after.unwrap().size), (FBIG, 5), "WRITE at {offset}");
        }
    }
    // `count` may be less than the data, which has more to it: the data up to it is written. It may not be more.
    let counted = |count| [read_args(&file, 1, count), words(&[2, 4]), b"EFGH".to_vec()].concat();
    let rest = client.done(7, &counted(2));
    let mut r = XdrReader::new(&rest);
    assert_eq!((Wcc::read(&mut r).after.unwrap().size, r.u32().unwrap()), (5, 2));
    assert_eq!(read(&mut client, &file, 0, 10), (b"hEFlo".to_vec(), true));
    for count in [5, u32::MAX] {
        let (status, rest) = client.ask(NFS_PROGRAM, 3, 7, &counted(count));
        assert_eq!((status, rest), (ReplyStatus::Accepted(Accepted::GarbageArgs), Vec::new()), "count {count}");
    }
    assert_eq!(fs::read(place.path("file")).unwrap(), b"hEFlo");
    serving.stop();
}

#[test]
fn attributes_are_set_and_the_guard_is_held() {
    let place = Place::new();
    let serving = place.serve_all(EngineKind::Epoll, vec![place.export_with(true)]);
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.create(&root, "file");
    client.done(7, &write_args(&file, 0, 0, b"0123456789"));
    let before = getattr(&mut client, &file);
    // Mode, size, mtime of the client; not guarded.
    let args = [handle(&file), words(&[1, 0o600, 0, 0, 1, 0, 4, 0, 2, 1_000_000_000, 5, 0])].concat();
    let changed = wcc(&client.done(2, &args));
    assert_eq!(changed.before, Some((10, before.mtime, before.ctime)));
    let after = changed.after.unwrap();
    assert_eq!((after.mode, after.size, after.mtime), (0o600, 4, 1_000_000_000 << 32 | 5));
    let known = fs::metadata(place.path("file")).unwrap();
    assert_eq!((known.mode() & 0o7777, known.len(), known.mtime()), (0o600, 4, 1_000_000_000));
    // The ctime of before is not that of now.
    let guarded = |ctime: u64| [handle(&file), mode(0o640), words(&[1, (ctime >> 32) as u32, ctime as u32])].concat();
    let (status, rest) = client.nfs(2, &guarded(after.ctime ^ 1));
    assert_eq!(status, NOT_SYNC);
    assert_eq!(wcc(&rest).after.map(|attr| attr.mode), Some(0o600));
    client.done(2, &guarded(after.ctime));
    assert_eq!(fs::metadata(place.path("file")).unwrap().mode() & 0o7777, 0o640);
    serving.stop();
}

#[test]
fn files_are_made_in_each_of_the_three_ways() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let create = |how: u32, name: &str, rest: &[u8]| [named(&root, name), words(&[how]), rest.to_vec()].concat();
    // UNCHECKED takes a file that is there, GUARDED does not.
    let first = made(&client.done(8, &create(0, "a", &mode(0o640))));
    assert_eq!(made(&client.done(8, &create(0, "a", &mode(0o640)))), first);
    assert_eq!(fs::metadata(place.path("a")).unwrap().mode() & 0o7777, 0o640);
    made(&client.done(8, &create(1, "b", &mode(0o600))));
    let (status, rest) = client.nfs(8, &create(1, "b", &mode(0o600)));
    assert_eq!(status, EXIST);
    assert!(wcc(&rest).after.is_some());
    // EXCLUSIVE answers its second try alike, whatever the cache of duplicates has, and another one with EXIST.
    let verifier = |verifier: u64| verifier.to_be_bytes();
    let third = made(&client.done(8, &create(2, "c", &verifier(0x0123_4567_89ab_cdef))));
    assert_eq!(made(&client.done(8, &create(2, "c", &verifier(0x0123_4567_89ab_cdef)))), third);
    for other in [0x0123_4567_89ab_cdee, 0x8123_4567_89ab_cdef, 0] {
        assert_eq!(client.nfs(8, &create(2, "c", &verifier(other))).0, EXIST, "{other:x}");
    }
    serving.stop();
}

#[test]
fn folders_links_and_nodes_are_made_and_removed() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let folder = made(&client.done(9, &[named(&root, "folder"), mode(0o750)].concat()));
    assert_eq!(fs::metadata(place.path("folder")).unwrap().mode() & 0o7777, 0o750);
    let mut args = [named(&folder, "link"), mode(0o777)].concat();
    args.put_opaque(b"../some/where");
    let link = made(&client.done(10, &args));
    let rest = client.done(5, &handle(&link));
    let mut r = XdrReader::new(&rest);
    assert_eq!(Attr::read_option(&mut r).map(|attr| attr.file_type), Some(5));
    assert_eq!(r.opaque(1024).unwrap(), b"../some/where");
    assert_eq!(fs::read_link(place.path("folder/link")).unwrap().to_str(), Some("../some/where"));
    // A FIFO, a socket.
    for (name, kind) in [("fifo", 7), ("socket", 6)] {
        let args = [named(&folder, name), words(&[kind]), mode(0o600)].concat();
        let node = made(&client.done(11, &args));
        assert_eq!(getattr(&mut client, &node).file_type, kind);
    }
    assert!(fs::metadata(place.path("folder/fifo")).unwrap().file_type().is_fifo());
    let (status, rest) = client.nfs(11, &[named(&folder, "x"), words(&[1])].concat());
    assert!(status == BADTYPE && wcc(&rest).after.is_some());
    // A hard link: attributes of the file, weak cache data of the folder.
    let file = client.create(&root, "file");
    let rest = client.done(15, &[handle(&file), named(&folder, "other")].concat());
    let mut r = XdrReader::new(&rest);
    assert_eq!(Attr::read_option(&mut r).map(|attr| attr.nlink), Some(2));
    assert!(Wcc::read(&mut r).after.is_some());
    r.finish().unwrap();
    assert_eq!(fs::metadata(place.path("folder/other")).unwrap().nlink(), 2);
    // RENAME over what is there, between folders.
    client.create(&root, "target");
    let rest = client.done(14, &[named(&folder, "other"), named(&root, "target")].concat());
    let mut r = XdrReader::new(&rest);
    for _ in 0..2 {
        let wcc = Wcc::read(&mut r);
        assert!(wcc.after.is_some());
    }
    r.finish().unwrap();
    assert_eq!(fs::metadata(place.path("target")).unwrap().nlink(), 2);
    assert!(!place.path("folder/other").exists());
    let (status, _) = client.nfs(13, &named(&root, "folder"));
    assert_eq!(status, NOTEMPTY);
    for name in ["link", "fifo", "socket"] {
        assert!(wcc(&client.done(12, &named(&folder, name))).after.is_some());
    }
    wcc(&client.done(13, &named(&root, "folder")));
    assert!(!place.path("folder").exists());
    serving.stop();
}

/// The entries of a folder by READDIR or READDIRPLUS: name, cookie, and with PLUS the attributes and the handle.
type Listed = (Vec<u8>, u64, Option<(Attr, Vec<u8>)>);

pub(crate) fn list(client: &mut Client, dir: &[u8], plus: bool, count: u32) -> Vec<Listed> {
    let (mut cookie, mut verifier, mut all) = (0, 0, Vec::new());
    loop {
        let mut args = handle(dir);
        args.put_u64(cookie);
        args.put_u64(verifier);
        if plus {
            args.put_u32(count);
        }
        args.put_u32(count);
        let rest = client.done(if plus { 17 } else { 16 }, &args);
        assert!(rest.len() + 4 <= count as usize, "{} bytes of results and not {count}", rest.len() + 4);
        let mut r = XdrReader::new(&rest);
        assert!(Attr::read_option(&mut r).is_some());
        verifier = r.u64().unwrap();
        while r.bool().unwrap() {
            let fileid = r.u64().unwrap();
            let name = r.opaque(255).unwrap().to_vec();
            cookie = r.u64().unwrap();
            let attr = if plus { Attr::read_option(&mut r) } else { None };
            let handle = if plus { r.option(|r| r.opaque(64)).unwrap().map(<[u8]>::to_vec) } else { None };
            if let Some(attr) = attr {
                assert_eq!(attr.fileid, fileid, "{}", name.escape_ascii());
            }
            assert_eq!(attr.is_some(), handle.is_some(), "{}", name.escape_ascii());
            all.push((name, cookie, attr.zip(handle)));
        }
        let eof = r.bool().unwrap();
        r.finish().unwrap();
        if eof {
            return all;
        }
    }
}

#[test]
fn listings_have_each_entry_once_whatever_fits() {
    let place = Place::new();
    let mut names: Vec<String> = (0..300).map(|at| format!("{:0width$}", at, width = 1 + at % 90)).collect();
    names.iter().for_each(|name| fs::write(place.path(name), "x").unwrap());
    names.extend([".".to_owned(), "..".to_owned()]);
    names.sort();
    names.dedup();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    for (plus, count) in
        [(false, 512), (false, 4096), (false, 1 << 20), (false, u32::MAX), (true, 512), (true, 8192), (true, u32::MAX)]
    {
        let mut entries = list(&mut client, &root, plus, count);
        let is_long = |(_, _, found): &Listed| found.as_ref().is_some_and(|(attr, _)| attr.size == 1);
        assert!(!plus || entries.iter().any(is_long));
        let mut cookies: Vec<u64> = entries.iter().map(|(_, cookie, _)| *cookie).collect();
        cookies.sort_unstable();
        cookies.dedup();
        assert_eq!(cookies.len(), entries.len(), "cookies are unique");
        entries.sort_by(|one, other| one.0.cmp(&other.0));
        let listed = entries.iter().map(|(name, _, _)| name.as_slice());
        assert!(listed.eq(names.iter().map(String::as_bytes)), "plus={plus} count={count}");
    }
    // Not even one entry fits.
    let mut args = handle(&root);
    args.put(&words(&[0, 0, 0, 0, 110]));
    let (status, rest) = client.nfs(16, &args);
    assert_eq!(status, TOOSMALL);
    first_attr(&rest);
    serving.stop();
}

#[test]
fn entries_have_handle_and_attributes_of_lookup() {
    let odd = [&b"\xff\xfe\n "[..], &[0x80; 255], &[b'l'; 255]];
    let place = Place::new();
    odd.iter().for_each(|name| fs::write(place.path("").join(OsStr::from_bytes(name)), "odd").unwrap());
    fs::create_dir(place.path("folder")).unwrap();
    fs::write(place.path("file"), "text").unwrap();
    std::os::unix::fs::symlink("file", place.path("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(place.path("socket")).unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    // The second time the server may know the handles.
    for _ in 0..2 {
        let entries = list(&mut client, &root, true, 8192);
        let names: BTreeSet<_> = entries.iter().map(|entry| &entry.0[..]).collect();
        let plain = [&b"."[..], b"..", b"folder", b"file", b"link", b"socket"];
        assert_eq!((names, entries.len()), (plain.into_iter().chain(odd).collect(), plain.len() + odd.len()));
        assert!(
            list(&mut client, &root, false, 8192).iter().map(|entry| &entry.0).eq(entries.iter().map(|entry| &entry.0))
        );
        for (name, _, found) in entries {
            let rest = client.done(3, &named_bytes(&root, &name));
            let mut r = XdrReader::new(&rest);
            let handle = r.opaque(64).unwrap().to_vec();
            assert_eq!(found, Some((Attr::read_option(&mut r).unwrap(), handle)), "{}", name.escape_ascii());
        }
    }
    serving.stop();
}

#[test]
fn the_server_and_its_file_system_are_described() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let rest = client.done(18, &handle(&root));
    let mut r = XdrReader::new(&rest);
    Attr::read_option(&mut r).unwrap();
    let sizes: [u64; 6] = std::array::from_fn(|_| r.u64().unwrap());
    assert!(sizes[0] >= sizes[1] && sizes[1] >= sizes[2] && sizes.iter().all(|size| *size < 1 << 63));
    r.u32().unwrap();
    r.finish().unwrap();
    let rest = client.done(19, &handle(&root));
    let mut r = XdrReader::new(&rest);
    Attr::read_option(&mut r).unwrap();
    let sizes: [u32; 7] = std::array::from_fn(|_| r.u32().unwrap());
    assert_eq!(sizes, [1 << 20, 1 << 20, 4096, 1 << 20, 1 << 20, 4096, 64 << 10]);
    // tests/media.rs has that of each file system.
    assert!(r.u64().unwrap() <= i64::MAX as u64);
    assert_eq!([(); 3].map(|()| r.u32().unwrap()), [0, 1, 0x1b]);
    r.finish().unwrap();
    let rest = client.done(20, &handle(&root));
    let mut r = XdrReader::new(&rest);
    Attr::read_option(&mut r).unwrap();
    let (link_max, name_max) = (r.u32().unwrap(), r.u32().unwrap());
    assert!(link_max >= 8 && name_max == 255);
    assert_eq!([(); 4].map(|()| r.bool().unwrap()), [true, true, false, true]);
    r.finish().unwrap();
    // ACCESS of root: everything that a folder has.
    let rest = client.done(4, &[handle(&root), words(&[0x3f])].concat());
    let mut r = XdrReader::new(&rest);
    Attr::read_option(&mut r).unwrap();
    assert_eq!(r.u32().unwrap(), 0x1f);
    serving.stop();
}

#[test]
fn errors_are_those_of_the_rfc_with_weak_cache_data() {
    let place = Place::new();
    fs::create_dir_all(place.path("folder/inside")).unwrap();
    fs::write(place.path("file"), "x").unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.lookup(&root, "file");
    let folder = client.lookup(&root, "folder");
    let attr_only =
        |rest: &[u8]| assert_eq!(first_attr(rest).nlink > 0, rest.len() == 88, "attributes and nothing else");
    for (procedure, args, status) in [
        (3, named(&root, "none"), NOENT),
        (3, named(&file, "x"), NOTDIR),
        (5, handle(&file), INVAL),
        (6, read_args(&folder, 0, 1), ISDIR),
        (16, [handle(&file), words(&[0, 0, 0, 0, 4096])].concat(), NOTDIR),
        (17, [handle(&file), words(&[0, 0, 0, 0, 4096, 4096])].concat(), NOTDIR),
    ] {
        let (got, rest) = client.nfs(procedure, &args);
        assert_eq!(got, status, "procedure {procedure}");
        attr_only(&rest);
    }
    for (procedure, args, status) in [
        (7, write_args(&folder, 0, 0, b"x"), ISDIR),
        (8, [named(&file, "x"), words(&[0]), mode(0o644)].concat(), NOTDIR),
        (9, [named(&root, "folder"), mode(0o755)].concat(), EXIST),
        (12, named(&root, "none"), NOENT),
        (12, named(&root, "folder"), ISDIR),
        (13, named(&root, "file"), NOTDIR),
        (13, named(&root, "folder"), NOTEMPTY),
        (13, named(&root, "none"), NOENT),
    ] {
        let (got, rest) = client.nfs(procedure, &args);
        assert_eq!(got, status, "procedure {procedure}");
        assert!(wcc(&rest).after.is_some(), "procedure {procedure}");
    }
    let (status, rest) = client.nfs(14, &[named(&root, "none"), named(&folder, "x")].concat());
    assert_eq!(status, NOENT);
    let mut r = XdrReader::new(&rest);
    assert!(Wcc::read(&mut r).after.is_some() && Wcc::read(&mut r).after.is_some());
    let (status, rest) = client.nfs(15, &[handle(&file), named(&root, "folder")].concat());
    assert_eq!(status, EXIST);
    let mut r = XdrReader::new(&rest);
    assert!(Attr::read_option(&mut r).is_some() && Wcc::read(&mut r).after.is_some());
    // The root has nothing above it.
    assert_eq!(client.lookup(&root, ".."), root);
    // What was removed is stale, also while the server has it open.
    fs::remove_file(place.path("file")).unwrap();
    assert_eq!(client.nfs(1, &handle(&file)), (STALE, Vec::new()));
    assert_eq!(client.nfs(6, &read_args(&file, 0, 1)).0, STALE);
    serving.stop();
}

/// Whatever the procedure: RFC 1813 has INVAL for names that cannot be, EXIST for those of "." and ".." where something is made.
#[test]
fn names_that_cannot_be_are_refused_by_each_procedure() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    fs::write(place.path("file"), "x").unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    let (file, folder) = (client.lookup(&root, "file"), client.lookup(&root, "folder"));
    let calls = |name: &str| {
        let at = named(&folder, name);
        let mut symlink = [at.clone(), mode(0o777)].concat();
        symlink.put_opaque(b"target");
        [
            (3, at.clone()),
            (8, [at.clone(), words(&[0]), mode(0o644)].concat()),
            (8, [at.clone(), words(&[2, 1, 2])].concat()),
            (9, [at.clone(), mode(0o755)].concat()),
            (10, symlink),
            (11, [at.clone(), words(&[7]), mode(0o644)].concat()),
            (12, at.clone()),
            (13, at.clone()),
            (14, [named(&root, "file"), at.clone()].concat()),
            (14, [at.clone(), named(&folder, "new")].concat()),
            (15, [handle(&file), at].concat()),
        ]
    };
    let (long, longest) = ("n".repeat(256), "n".repeat(255));
    for (name, status) in
        [("", INVAL), ("/", INVAL), ("a/b", INVAL), ("../file", INVAL), ("a\0b", INVAL), (&long, NAMETOOLONG)]
    {
        for (procedure, args) in calls(name) {
            assert_eq!(failure(&mut client, procedure, &args), status, "procedure {procedure} of {name:?}");
        }
    }
    for name in [".", ".."] {
        for (procedure, args) in calls(name).into_iter().filter(|(procedure, _)| *procedure != 3) {
            let status = if [12, 13, 14].contains(&procedure) { INVAL } else { EXIST };
            assert_eq!(failure(&mut client, procedure, &args), status, "procedure {procedure} of {name:?}");
        }
    }
    assert_eq!(fs::read_dir(place.path("folder")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 2);
    client.done(14, &[named(&root, "file"), named(&folder, &longest)].concat());
    assert_eq!(client.lookup(&folder, &longest), file);
    serving.stop();
}

/// Arguments of each procedure but NULL that can be decoded, for an object and a name.
pub(crate) fn arguments(object: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let dir = named(object, "name");
    let target = {
        let mut args = [dir.clone(), mode(0o777)].concat();
        args.put_opaque(b"target");
        args
    };
    vec![
        (1, handle(object)),
        (2, [handle(object), mode(0o644), words(&[0])].concat()),
        (3, dir.clone()),
        (4, [handle(object), words(&[1])].concat()),
        (5, handle(object)),
        (6, read_args(object, 0, 4)),
        (7, write_args(object, 0, 0, b"data")),
        (8, [dir.clone(), words(&[0]), mode(0o644)].concat()),
        (9, [dir.clone(), mode(0o755)].concat()),
        (10, target),
        (11, [dir.clone(), words(&[7]), mode(0o644)].concat()),
        (12, dir.clone()),
        (13, dir.clone()),
        (14, [dir.clone(), dir.clone()].concat()),
        (15, [handle(object), dir].concat()),
        (16, [handle(object), words(&[0, 0, 0, 0, 4096])].concat()),
        (17, [handle(object), words(&[0, 0, 0, 0, 4096, 4096])].concat()),
        (18, handle(object)),
        (19, handle(object)),
        (20, handle(object)),
        (21, read_args(object, 0, 0)),
    ]
}

#[test]
fn a_handle_that_is_none_is_refused_by_every_procedure() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    for (procedure, args) in arguments(b"") {
        let (status, rest) = client.nfs(procedure, &args);
        assert_eq!(status, BADHANDLE, "procedure {procedure}");
        assert!(rest.iter().all(|byte| *byte == 0), "procedure {procedure} tells nothing");
    }
    for at in 0..root.len() {
        for bit in [1, 0x80] {
            let mut forged = root.clone();
            forged[at] ^= bit;
            assert_eq!(client.nfs(1, &handle(&forged)), (BADHANDLE, Vec::new()), "byte {at}");
        }
    }
    for length in 0..root.len() {
        assert_eq!(client.nfs(1, &handle(&root[..length])).0, BADHANDLE, "{length} bytes");
    }
    // Nor does one of another server.
    let other = Place::new();
    let elsewhere = other.serve();
    assert_eq!(elsewhere.client().nfs(1, &handle(&root)).0, BADHANDLE);
    elsewhere.stop();
    serving.stop();
}

#[test]
fn arguments_that_cannot_be_decoded_are_garbage() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    let garbage = ReplyStatus::Accepted(Accepted::GarbageArgs);
    for (procedure, args) in arguments(&root) {
        for length in (0..args.len()).step_by(4) {
            let (status, _) = client.ask(NFS_PROGRAM, 3, procedure, &args[..length]);
            assert_eq!(status, garbage, "procedure {procedure}, {length} of {} bytes", args.len());
        }
        let longer = [&args[..], &[0; 4]].concat();
        assert_eq!(client.ask(NFS_PROGRAM, 3, procedure, &longer).0, garbage, "procedure {procedure}");
    }
    assert_eq!(client.ask(NFS_PROGRAM, 3, 1, &handle(&[1; 65])).0, garbage, "a handle of 65 bytes");
    // NULL, a procedure that there is not, other versions.
    assert_eq!(client.ask(NFS_PROGRAM, 3, 0, &[]), (ReplyStatus::Accepted(Accepted::Success), Vec::new()));
    assert_eq!(client.ask(NFS_PROGRAM, 3, 22, &[]).0, ReplyStatus::Accepted(Accepted::ProcUnavail));
    let mismatch = ReplyStatus::Accepted(Accepted::ProgMismatch { low: 3, high: 3 });
    assert_eq!(client.ask(NFS_PROGRAM, 4, 0, &[]).0, mismatch);
    assert_eq!(client.ask(NFS_PROGRAM, 2, 0, &[]).0, mismatch);
    // And the connection goes on.
    assert_eq!(getattr(&mut client, &root).file_type, 2);
    serving.stop();
}

/// A datagram's sender is not checked, so what answers it must be short.
#[test]
fn nfs_is_served_over_tcp_alone_and_mount_by_datagrams_too() {
    let place = Place::new();
    fs::write(place.path("file"), vec![7; 100_000]).unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    let file = client.lookup(&root, "file");
    let socket = ksf_test::stream::datagrams(serving.udp());
    let mut buffer = vec![0; 65_536];
    let mut ask = |message: &[u8]| {
        socket.send(message).unwrap();
        let length = socket.recv(&mut buffer).unwrap();
        assert!(length <= 3 * message.len(), "{length} bytes to {}", message.len());
        let reply = Reply::parse(&buffer[..length]).unwrap();
        (reply.status, reply.results.to_vec())
    };
    let unavailable = ReplyStatus::Accepted(Accepted::ProgUnavail);
    for (procedure, args) in [(0, Vec::new()), (6, read_args(&file, 0, 1 << 20)), (99, Vec::new())] {
        assert_eq!(ask(&client.message(NFS_PROGRAM, 3, procedure, &args)), (unavailable, Vec::new()));
    }
    let mut path = Vec::new();
    path.put_opaque(place.path("").to_str().unwrap().as_bytes());
    let (status, results) = ask(&client.message(MOUNT_PROGRAM, 3, 1, &path));
    let (mounted, rest) = split(&results);
    assert_eq!((status, mounted), (ReplyStatus::Accepted(Accepted::Success), OK));
    assert_eq!(XdrReader::new(&rest).opaque(64).unwrap(), root);
    serving.stop();
}

/// A datagram's sender may be another one than it says: a list that is much longer than the call would hit a victim.
#[test]
fn no_list_by_datagram_is_longer_than_twice_its_call() {
    let (place, serving) = Place::served();
    let mut client = serving.client();
    let socket = ksf_test::stream::datagrams(serving.udp());
    let mut buffer = vec![0; 65_536];
    let (mut given, mut refused) = (0, 0);
    for number in 0..64 {
        let name = number.to_string().repeat(100);
        fs::create_dir(place.path(&name)).unwrap();
        client.mnt(&place.path(&name)).unwrap();
        let list = client.mount(2, &[]);
        // Arguments that DUMP does not have make the call longer, as a long credential does.
        for padding in [0, 4, 1000, 4000, 30_000] {
            let message = client.message(MOUNT_PROGRAM, 3, 2, &vec![0; padding]);
            socket.send(&message).unwrap();
            let length = socket.recv(&mut buffer).unwrap();
            let reply = Reply::parse(&buffer[..length]).unwrap();
            let list_bytes_max = (2 * message.len()).min(8 << 10);
            assert!(reply.results.len() <= list_bytes_max, "{length} bytes to {}", message.len());
            assert!(length <= 3 * message.len(), "{length} bytes to {}", message.len());
            if reply.status == ReplyStatus::Accepted(Accepted::Success) {
                assert_eq!(reply.results, list, "a list that is given is whole");
                given += 1;
            } else {
                assert_eq!(reply.status, ReplyStatus::Accepted(Accepted::ProcUnavail));
                refused += 1;
            }
        }
    }
    assert!(given > 0 && refused > 0, "{given} {refused}");
    // By a stream the client has all.
    assert!(client.mount(2, &[]).len() > 64 * 100);
    // A list that is short.
    socket.send(&client.message(MOUNT_PROGRAM, 3, 5, &[])).unwrap();
    let length = socket.recv(&mut buffer).unwrap();
    assert_eq!(Reply::parse(&buffer[..length]).unwrap().results, client.mount(5, &[]));
    serving.stop();
}

/// The ways of a call: on a lane, and on the shard when the kernel has all of it in memory.
#[test]
fn what_the_shard_answers_is_byte_for_byte_what_a_lane_answers() {
    let place = Place::new();
    fs::write(place.path("file"), vec![b'f'; 10_000]).unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    let at_once = || serving.nfs.files().fs_counters().warm;
    let before = serving.nfs.clients()[0];
    let (mut calls, mut read_bytes) = (0, 0);
    let file = client.lookup(&root, "file");
    let mut args = vec![
        (1, handle(&file)),
        (3, named(&root, "file")),
        (4, [handle(&file), words(&[0x3f])].concat()),
        (4, [handle(&root), words(&[0x1f])].concat()),
        // Refused, with the attributes of its object.
        (11, [named(&root, "new"), words(&[1])].concat()),
    ];
    if ksf_test::keeps_absent_names(&place.path("")) {
        args.push((3, named(&root, "missing")));
    }
    if ksf_test::reads_at_once(&place.path("")) {
        args.extend(
            [(0, 4096), (9_999, 4096), (10_000, 1), (5_000, 3)]
                .map(|(offset, count)| (6, read_args(&file, offset, count))),
        );
    }
    for (procedure, args) in args {
        // Two on lanes: the first read may change the time of the last access.
        let mut on_lanes = Vec::new();
        wait_until(format!("{procedure} is answered at once"), || {
            let before = at_once();
            let answer = client.nfs(procedure, &args);
            calls += 1;
            read_bytes +=
                if procedure == 6 { u64::from(u32::from_be_bytes(answer.1[88..92].try_into().unwrap())) } else { 0 };
            if at_once() == before {
                on_lanes.push(answer);
                return false;
            }
            if let Some(last) = on_lanes.last() {
                assert_eq!(&answer, last, "{procedure}");
            }
            true
        });
    }
    let after = serving.nfs.clients()[0];
    assert_eq!(after.calls - before.calls, calls + 1, "and the first LOOKUP");
    assert_eq!(after.read_bytes - before.read_bytes, read_bytes);
    serving.stop();
}
