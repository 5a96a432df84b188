//! Files and folders that are open: checked once, usable to their end.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::common::{Served, kind, on_lane, root};
use ksf_fs::{
    Credential, ErrorKind, ExportOptions, Fs, FsOptions, Lane, LockKind, LockRange, OpenFile, OpenHow, Owed, SetAttr,
    SetTime, Squash, Stable, Time,
};
use ksf_test::root_or_skip;

const WRITE: OpenHow = OpenHow { read: false, write: true, ..OpenHow::READ };
const TIME: Time = Time { seconds: 1_000_000_000, nanos: 5 };
const BOTH: OpenHow = OpenHow { write: true, ..OpenHow::READ };

fn read(fs: &Fs, lane: &Lane, file: &OpenFile, offset: u64) -> Vec<u8> {
    let mut into = Vec::new();
    let count = fs.read_open(lane, file, offset, 100, &mut into).unwrap();
    assert_eq!(into.len(), count);
    into
}

#[test]
fn an_open_file_stays_usable_when_its_name_and_its_rights_are_gone() {
    let served = Served::open_to_all();
    on_lane(|lane| {
        let found = served.make(lane, "file");
        let (file, attr) = served.fs.open(lane, &root(), &found.handle, BOTH).unwrap();
        assert_eq!((file.handle(), attr.size), (&found.handle, 0));
        fs::remove_file(served.path("file")).unwrap();
        assert_eq!(served.fs.write_open(lane, &file, 3, b"abc").unwrap(), 3);
        assert_eq!(read(&served.fs, lane, &file, 0), b"\0\0\0abc");
        assert_eq!(read(&served.fs, lane, &file, u64::MAX), b"");
        let to = SetAttr { size: Some(4), mode: Some(0o640), mtime: Some(SetTime::To(TIME)), ..SetAttr::default() };
        served.fs.setattr_open(lane, &root(), &file, &to).unwrap();
        let attr = served.fs.attr_open(lane, &file).unwrap();
        assert_eq!((attr.size, attr.nlink, attr.mode, attr.mtime), (4, 0, 0o640, TIME));
        assert_eq!(kind(served.fs.getattr(lane, &found.handle)), ErrorKind::Stale);
        served.fs.settle_owed(lane, &Owed::sync(file.clone(), true)).unwrap();
        served.fs.settle_owed(lane, &Owed::sync(file, false)).unwrap();
    });
}

#[test]
fn a_file_is_used_only_for_what_it_was_opened_for() {
    let served = Served::open_to_all();
    on_lane(|lane| {
        let found = served.make(lane, "file");
        let mut open = |how| served.fs.open(lane, &root(), &found.handle, how).unwrap().0;
        let (reads, writes) = (open(OpenHow::READ), open(WRITE));
        let appends = open(OpenHow { append: true, ..WRITE });
        assert_eq!(kind(served.fs.write_open(lane, &reads, 0, b"x")), ErrorKind::BadMode);
        let size = SetAttr { size: Some(0), ..SetAttr::default() };
        served.fs.setattr_open(lane, &root(), &reads, &size).expect("the caller may write the file");
        assert_eq!(kind(served.fs.read_open(lane, &writes, 0, 1, &mut Vec::new())), ErrorKind::BadMode);
        assert_eq!(kind(served.fs.write_open(lane, &writes, i64::MAX as u64, b"x")), ErrorKind::TooBig);
        assert_eq!(kind(served.fs.list_open(lane, &reads, 0, &mut |_| true)), ErrorKind::NotDirectory);
        served.fs.write_open(lane, &writes, 0, b"12").unwrap();
        served.fs.write_open(lane, &appends, 0, b"3").unwrap();
        assert_eq!(read(&served.fs, lane, &reads, 0), b"123");
        let truncates = OpenHow { truncate: true, stable: Stable::FileSync, ..WRITE };
        served.fs.open(lane, &root(), &found.handle, truncates).unwrap();
        assert_eq!(read(&served.fs, lane, &reads, 0), b"");
    });
}

#[test]
fn only_regular_files_and_folders_are_opened() {
    let served = Served::open_to_all();
    std::os::unix::fs::symlink("none", served.path("link")).unwrap();
    on_lane(|lane| {
        let none = SetAttr::default();
        served.fs.mknod(lane, &root(), served.root(), b"fifo", ksf_fs::Node::Fifo, &none).result.unwrap();
        for (name, how, wanted) in [
            ("link", OpenHow::READ, ErrorKind::Symlink),
            ("fifo", OpenHow::READ, ErrorKind::WrongType),
            ("fifo", WRITE, ErrorKind::WrongType),
            (".", WRITE, ErrorKind::IsDirectory),
            (".", OpenHow { truncate: true, ..OpenHow::READ }, ErrorKind::IsDirectory),
        ] {
            let found = served.find(lane, name);
            assert_eq!(kind(served.fs.open(lane, &root(), &found.handle, how)), wanted, "{name}");
            let created = served.fs.create_open(lane, &root(), served.root(), name.as_bytes(), (0o644, false), how);
            let wanted = if name == "." { ErrorKind::Exists } else { wanted };
            assert_eq!(kind(created.result), wanted, "{name}");
        }
    });
}

#[test]
fn the_kernel_checks_who_opens() {
    let Some(()) = root_or_skip("identities") else { return };
    let served = Served::open_to_all();
    fs::set_permissions(served.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    let (owner, other) = (Credential::unix(1000, 1000, &[]), Credential::unix(1001, 1001, &[]));
    on_lane(|lane| {
        let create = |lane: &mut Lane, who, mode, how| {
            served.fs.create_open(lane, who, served.root(), b"file", (mode, false), how).result
        };
        let (file, found) = create(lane, &owner, 0o400, BOTH).unwrap();
        assert_eq!((found.attr.uid, found.attr.mode), (1000, 0o400));
        served.fs.write_open(lane, &file, 0, b"mine").unwrap();
        assert_eq!(read(&served.fs, lane, &file, 0), b"mine", "who makes a file may write it");
        for (who, how, fine) in [(&owner, OpenHow::READ, true), (&owner, WRITE, false), (&other, OpenHow::READ, false)]
        {
            assert_eq!(served.fs.open(lane, who, &found.handle, how).is_ok(), fine, "{who:?} {how:?}");
            assert_eq!(create(lane, who, 0o777, how).is_ok(), fine, "{who:?} {how:?}");
        }
        let again = served.fs.create_open(lane, &owner, served.root(), b"file", (0o644, true), OpenHow::READ);
        assert_eq!(kind(again.result), ErrorKind::Exists);
        // What another user writes is no longer set-user-id.
        fs::set_permissions(served.path("file"), fs::Permissions::from_mode(0o4777)).unwrap();
        let (file, _) = served.fs.open(lane, &other, &found.handle, WRITE).unwrap();
        served.fs.write_open(lane, &file, 0, b"more").unwrap();
        assert_eq!(served.fs.attr_open(lane, &file).unwrap().mode, 0o777);
    });
}

#[test]
fn an_export_that_is_read_only_opens_nothing_for_writing() {
    let served = Served::new(ExportOptions { read_only: true, squash: Squash::None, ..ExportOptions::default() });
    fs::write(served.path("file"), "content").unwrap();
    on_lane(|lane| {
        let found = served.find(lane, "file");
        let (file, _) = served.fs.open(lane, &root(), &found.handle, OpenHow::READ).unwrap();
        assert_eq!(read(&served.fs, lane, &file, 3), b"tent");
        for how in [WRITE, OpenHow { truncate: true, ..OpenHow::READ }] {
            assert_eq!(kind(served.fs.open(lane, &root(), &found.handle, how)), ErrorKind::ReadOnly);
        }
        let created = served.fs.create_open(lane, &root(), served.root(), b"new", (0o644, false), OpenHow::READ);
        assert_eq!(kind(created.result), ErrorKind::ReadOnly);
    });
}

#[test]
fn an_open_folder_is_listed_in_pieces_and_never_above_the_root() {
    let served = Served::open_to_all();
    let mut wanted: BTreeSet<String> = (0..3000).map(|at| format!("entry-{at}")).collect();
    wanted.iter().for_each(|name| fs::write(served.path(name), "").unwrap());
    wanted.extend([".".to_owned(), "..".to_owned()]);
    on_lane(|lane| {
        let (folder, attr) = served.fs.open(lane, &root(), served.root(), OpenHow::READ).unwrap();
        let (mut names, mut cookie) = (BTreeSet::new(), 0);
        loop {
            let mut left = 700;
            let is_end = served.fs.list_open(lane, &folder, cookie, &mut |entry| {
                if left == 0 {
                    return false;
                }
                left -= 1;
                cookie = entry.cookie;
                let name = String::from_utf8(entry.name.to_vec()).unwrap();
                if name.starts_with('.') {
                    assert_eq!(entry.fileid, attr.fileid, "{name}");
                }
                assert!(names.insert(name), "twice: {entry:?}");
                true
            });
            if is_end.unwrap() {
                break;
            }
        }
        assert_eq!(names, wanted);
        assert_eq!(kind(served.fs.list_open(lane, &folder, u64::MAX, &mut |_| true)), ErrorKind::BadCookie);
        assert_eq!(kind(served.fs.read_open(lane, &folder, 0, 1, &mut Vec::new())), ErrorKind::IsDirectory);
    });
}

#[test]
fn locks_belong_to_the_open_file_and_end_with_it() {
    let served = Served::open_to_all();
    on_lane(|lane| {
        let found = served.make(lane, "file");
        let mut open = |how| served.fs.open(lane, &root(), &found.handle, how).unwrap().0;
        let (one, two, reads) = (open(BOTH), open(BOTH), open(OpenHow::READ));
        let (whole, first) = (LockRange { start: 0, length: 0 }, LockRange { start: 0, length: 10 });
        let take = |file: &OpenFile, kind, range| served.fs.lock_open(lane, file, kind, range);
        let find = |file: &OpenFile, kind, range| served.fs.find_lock(lane, file, kind, range).unwrap();
        let (shared, exclusive) = (Some(LockKind::Shared), Some(LockKind::Exclusive));
        assert_eq!(take(&one, exclusive, first), Ok(true));
        assert_eq!(take(&one, exclusive, first), Ok(true), "its own lock is not in its way");
        assert_eq!(take(&two, shared, whole), Ok(false));
        assert_eq!(take(&two, exclusive, LockRange { start: 10, length: 5 }), Ok(true));
        assert_eq!(find(&two, LockKind::Shared, whole), Some((LockKind::Exclusive, first)));
        assert_eq!(find(&two, LockKind::Shared, LockRange { start: 20, length: 1 }), None);
        assert_eq!(take(&one, None, first), Ok(true));
        assert_eq!(find(&two, LockKind::Exclusive, first), None);
        assert_eq!(take(&one, shared, first), Ok(true));
        assert_eq!(take(&reads, shared, first), Ok(true));
        assert_eq!(kind(take(&reads, exclusive, first)), ErrorKind::BadMode);
        assert_eq!(kind(take(&one, shared, LockRange { start: 1 << 63, length: 0 })), ErrorKind::Invalid);
        assert_eq!(take(&two, exclusive, first), Ok(false));
        one.close(lane);
        reads.close(lane);
        assert_eq!(take(&two, exclusive, first), Ok(true), "those of closed files are gone");
    });
}

#[test]
fn what_is_open_for_clients_is_bounded() {
    let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
    let served = Served::with(options, FsOptions { open_files_max: 2, ..FsOptions::default() });
    on_lane(|lane| {
        let found = served.make(lane, "file");
        let open = |lane: &mut Lane| served.fs.open(lane, &root(), &found.handle, OpenHow::READ);
        let create = |lane: &mut Lane, name: &[u8]| {
            served.fs.create_open(lane, &root(), served.root(), name, (0o644, false), BOTH).result
        };
        let (one, two) = (open(lane).unwrap().0, create(lane, b"new").unwrap().0);
        assert_eq!(kind(open(lane)), ErrorKind::TryLater);
        assert_eq!(kind(create(lane, b"more")), ErrorKind::TryLater);
        assert!(!served.path("more").exists(), "nothing is made that cannot be opened");
        assert_eq!(served.fs.counters().open_files, 2);
        one.close(lane);
        create(lane, b"more").unwrap().0.close(lane);
        two.close(lane);
        assert_eq!(served.fs.counters().open_files, 0);
    });
}
