//! Listing folders: every entry once, in pieces of any size.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use crate::common::{Served, kind, root, wait_until_old, with_lane};
use ksf_fs::{Cursor, Detail, ErrorKind, FileType, Found, Handle, Lane};
use ksf_test::root_or_skip;
use rustix::fs::{CWD, FileType as RawType, Mode, makedev, mknodat};

/// All entries, asked for in pieces; `piece` says how many each has.
fn list(
    served: &Served,
    lane: &mut Lane,
    dir: &Handle,
    detail: Detail,
    mut piece: impl FnMut() -> usize,
) -> Vec<(Vec<u8>, u64, u64, Option<Found>)> {
    let mut all = Vec::new();
    let mut from = Cursor::default();
    loop {
        let mut left = piece();
        let listed = served.fs.list(lane, &root(), dir, from, detail, &mut |entry| {
            if left == 0 {
                return false;
            }
            left -= 1;
            from.cookie = entry.cookie;
            all.push((entry.name.to_vec(), entry.fileid, entry.cookie, entry.found));
            true
        });
        let listed = listed.result.unwrap();
        from.verifier = listed.verifier;
        if listed.eof {
            return all;
        }
    }
}

#[test]
fn every_entry_comes_once_in_pieces_of_any_size() {
    with_lane(|lane, served| {
        let mut expected: BTreeSet<Vec<u8>> = [b".".to_vec(), b"..".to_vec()].into();
        for number in 0..1500 {
            let name = format!("{number}-{}", "x".repeat(number % 200));
            fs::write(served.path(&name), "").unwrap();
            expected.insert(name.into_bytes());
        }
        for size in [1, 2, 7, 100, 5000] {
            let all = list(&served, lane, served.root(), Detail::Names, || size);
            let names: BTreeSet<Vec<u8>> = all.iter().map(|entry| entry.0.clone()).collect();
            assert_eq!((all.len(), &names), (1502, &expected), "pieces of {size}");
            let cookies: BTreeSet<u64> = all.iter().map(|entry| entry.2).collect();
            assert_eq!(cookies.len(), 1502, "each has its own");
        }
    });
}

#[test]
fn hard_links_are_entries_of_their_own() {
    with_lane(|lane, served| {
        fs::write(served.path("0"), "").unwrap();
        (1..50).for_each(|number| fs::hard_link(served.path("0"), served.path(&number.to_string())).unwrap());
        let all = list(&served, lane, served.root(), Detail::Names, || 3);
        assert_eq!(all.len(), 52);
    });
}

#[test]
fn details_are_those_of_a_lookup() {
    with_lane(|lane, served| {
        fs::create_dir(served.path("folder")).unwrap();
        fs::write(served.path("folder/file"), "12345").unwrap();
        std::os::unix::fs::symlink("nowhere", served.path("folder/link")).unwrap();
        let folder = served.find(lane, "folder");
        for (dir, above) in [(&folder.handle, None), (served.root(), Some(served.root().clone()))] {
            for (name, fileid, _, found) in list(&served, lane, dir, Detail::Handles, || 100) {
                let looked = served.fs.lookup(lane, &root(), dir, &name).result.unwrap();
                assert_eq!(fileid, looked.attr.fileid, "{name:?}");
                match &name[..] {
                    b".." => assert_eq!(found.map(|found| found.handle), above),
                    _ => assert_eq!(
                        found.map(|found| (found.handle, found.attr.size)),
                        Some((looked.handle, looked.attr.size))
                    ),
                }
            }
        }
        let names = list(&served, lane, &folder.handle, Detail::Names, || 100);
        assert!(names.iter().all(|entry| entry.3.is_none()));
    });
}

/// As a local program does while a client lists: names change their objects between the look at the entries and that at the objects.
#[test]
fn an_entry_has_the_number_that_its_attributes_have_while_names_are_exchanged() {
    with_lane(|lane, served| {
        let [one, other, spare] = ["one", "other", "spare"].map(|name| served.path(name));
        fs::write(&one, "1").unwrap();
        fs::write(&other, "22").unwrap();
        wait_until_old(&other);
        // In the second round the handles are known.
        for _ in 0..2 {
            let (mut entries, mut is_first) = (Vec::new(), true);
            let listed =
                served.fs.list(lane, &root(), served.root(), Cursor::default(), Detail::Handles, &mut |entry| {
                    // The kernel has told of all entries by now.
                    if std::mem::take(&mut is_first) {
                        for (from, to) in [(&one, &spare), (&other, &one), (&spare, &other)] {
                            fs::rename(from, to).unwrap();
                        }
                    }
                    entries.push((entry.name.to_vec(), entry.fileid, entry.found.unwrap()));
                    true
                });
            assert!(listed.result.unwrap().eof);
            assert_eq!(entries.len(), 4);
            for (name, fileid, found) in entries {
                assert_eq!(fileid, found.attr.fileid, "{name:?}");
                let of_handle = served.fs.getattr(lane, &found.handle).unwrap();
                assert_eq!((of_handle.fileid, of_handle.size), (found.attr.fileid, found.attr.size), "{name:?}");
            }
        }
    });
}

#[test]
fn entries_of_every_type_have_handle_and_attributes_of_a_lookup_also_when_names_change_their_objects() {
    let Some(()) = root_or_skip("devices") else { return };
    with_lane(|lane, served| {
        fs::write(served.path("file"), "12345").unwrap();
        fs::create_dir(served.path("folder")).unwrap();
        std::os::unix::fs::symlink("nowhere", served.path("link")).unwrap();
        for (name, kind, device) in [
            ("fifo", RawType::Fifo, 0),
            ("socket", RawType::Socket, 0),
            ("null", RawType::CharacterDevice, makedev(1, 3)),
            ("loop", RawType::BlockDevice, makedev(7, 0)),
        ] {
            mknodat(CWD, served.path(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
        }
        let compare = |lane: &mut Lane| {
            let mut types = Vec::new();
            for (name, fileid, _, found) in list(&served, lane, served.root(), Detail::Handles, || 100) {
                let looked = served.fs.lookup(lane, &root(), served.root(), &name).result.unwrap();
                let found = found.unwrap();
                assert_eq!((fileid, &found.handle), (looked.attr.fileid, &looked.handle), "{name:?}");
                // The listing itself changes the time of the last access of the folder.
                assert!(found == looked || found.handle == *served.root(), "{name:?}: {found:?} {looked:?}");
                types.push(looked.attr.file_type);
            }
            let count = |wanted: FileType| types.iter().filter(|known| **known == wanted).count();
            assert_eq!((types.len(), count(FileType::Directory)), (9, 3));
            use FileType::{BlockDevice, CharDevice, Fifo, Regular, Socket, Symlink};
            assert!([Regular, Symlink, Fifo, Socket, CharDevice, BlockDevice].iter().all(|kind| count(*kind) == 1));
        };
        compare(lane);
        // From here on the handles are known from the listing before.
        ["file", "folder", "link", "fifo", "socket", "null", "loop"]
            .iter()
            .for_each(|name| wait_until_old(&served.path(name)));
        compare(lane);
        fs::write(served.path("file"), "1234567").unwrap();
        compare(lane);
        for (from, to) in [("file", "new"), ("link", "file"), ("new", "link")] {
            fs::rename(served.path(from), served.path(to)).unwrap();
        }
        fs::remove_file(served.path("fifo")).unwrap();
        mknodat(CWD, served.path("fifo"), RawType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        compare(lane);
    });
}

/// What stays is listed once; what comes and goes at most once.
#[test]
fn a_folder_that_changes_while_it_is_listed_loses_nothing() {
    with_lane(|lane, served| {
        (0..500).for_each(|number| fs::write(served.path(&format!("stays{number}")), "").unwrap());
        (0..500).for_each(|number| fs::write(served.path(&format!("goes{number}")), "").unwrap());
        let mut step = 0;
        let all = list(&served, lane, served.root(), Detail::Names, || {
            fs::remove_file(served.path(&format!("goes{step}"))).ok();
            fs::write(served.path(&format!("comes{step}")), "").unwrap();
            step += 1;
            7
        });
        let mut times: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
        all.into_iter().for_each(|entry| *times.entry(entry.0).or_default() += 1);
        assert!(times.values().all(|times| *times == 1));
        assert!((0..500).all(|number| times.contains_key(format!("stays{number}").as_bytes())));
    });
}

#[test]
fn a_cursor_of_another_folder_is_refused_and_a_change_is_no_reason() {
    with_lane(|lane, served| {
        fs::create_dir(served.path("folder")).unwrap();
        fs::write(served.path("file"), "").unwrap();
        let folder = served.find(lane, "folder");
        assert_eq!(folder.attr.file_type, FileType::Directory);
        let ask = |lane: &mut Lane, dir: &Handle, from| {
            served.fs.list(lane, &root(), dir, from, Detail::Names, &mut |_| true).result
        };
        let own = ask(lane, served.root(), Cursor::default()).unwrap().verifier;
        let other = ask(lane, &folder.handle, Cursor::default()).unwrap().verifier;
        let first = list(&served, lane, served.root(), Detail::Names, || 1)[0].2;
        assert_eq!(kind(ask(lane, served.root(), Cursor { cookie: first, verifier: other })), ErrorKind::BadCookie);
        assert_eq!(kind(ask(lane, served.root(), Cursor { cookie: u64::MAX, verifier: own })), ErrorKind::BadCookie);
        fs::write(served.path("new"), "").unwrap();
        assert_eq!(ask(lane, served.root(), Cursor { cookie: first, verifier: own }).unwrap().verifier, own);
        assert!(ask(lane, served.root(), Cursor { cookie: first, verifier: 0 }).is_ok());
        let file = served.find(lane, "file").handle;
        assert_eq!(kind(ask(lane, &file, Cursor::default())), ErrorKind::NotDirectory);
        fs::remove_dir(served.path("folder")).unwrap();
        assert_eq!(kind(ask(lane, &folder.handle, Cursor::default())), ErrorKind::Stale);
    });
}
