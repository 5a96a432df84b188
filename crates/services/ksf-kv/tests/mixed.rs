//! Folders in which a file is not the one that its store left: of another store, of another log, older, or overwritten.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::Serving;
use ksf::engine::EngineKind;
use ksf_kv::disk::{Disk, DiskOptions};
use ksf_kv::{Settings, offline};
use ksf_test::own_network;
use tempfile::TempDir;

const SEGMENT_BYTES: u64 = 1 << 20;
const PLACES: u32 = 8;
const KEYS: usize = 150;

/// What happens to a folder.
type Change<'a> = &'a dyn Fn(&Path);

fn options() -> DiskOptions {
    DiskOptions { logs: 2, segment_bytes: SEGMENT_BYTES, places: PLACES, ..DiskOptions::default() }
}

/// Writes keys into log 0, more than a segment of them, and ends in order. Log 1 stays empty.
fn fill(folder: &Path, name: &str) {
    drop(Disk::open(folder, options()).unwrap());
    let serving = Serving::start_single(EngineKind::Epoll, folder, Settings::default(), options());
    let mut client = serving.connect();
    let value = "v".repeat(10_000);
    (0..KEYS).for_each(|key| client.send(&["SET", &format!("{name} {key}"), &value]));
    (0..KEYS).for_each(|_| assert_eq!(client.reply(), "+OK"));
    serving.stop();
}

fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    files.iter().map(|path| (name(path), fs::read(path).unwrap())).collect()
}

/// The folder with a change in it.
fn changed(folder: &Path, change: impl FnOnce(&Path)) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for (name, bytes) in contents(folder) {
        fs::write(copy.path().join(name), bytes).unwrap();
    }
    change(copy.path());
    copy
}

/// Why nothing takes the folder for a store, and that nothing was changed.
fn refused(case: &str, folder: &Path) -> String {
    let before = contents(folder);
    let mut dumped = Vec::new();
    let why = [
        offline::check(folder).map(drop).map_err(|error| error.to_string()),
        offline::dump(folder, 0, &mut dumped).map(drop).map_err(|error| error.to_string()),
        Disk::open(folder, options()).map(drop).map_err(|error| error.to_string()),
    ];
    let why = why.map(|result| result.expect_err(case));
    assert!(why.iter().all(|one| *one == why[0]), "{case}: {why:?}");
    assert!(dumped.is_empty() && contents(folder) == before, "{case}: something was written");
    why[0].clone()
}

fn copy(from: &Path, to: &Path, name: &str) {
    fs::copy(from.join(name), to.join(name)).unwrap();
}

/// A header with a right checksum that names another log or store shows files under wrong names, and no place without data.
#[test]
fn a_log_or_a_superblock_of_another_store_is_refused() {
    own_network();
    let [store, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (store, other) = (store.path(), other.path());
    fill(store, "a");
    fill(other, "b");
    let exchange = |folder: &Path| {
        let [one, two, aside] = ["log-000", "log-001", "aside"].map(|name| folder.join(name));
        fs::rename(&one, &aside).unwrap();
        fs::rename(&two, &one).unwrap();
        fs::rename(&aside, &two).unwrap();
    };
    let cases: [(&str, &str, Change<'_>); 4] = [
        ("names exchanged", "log-001", &exchange),
        ("a log twice", "log-001", &|folder| {
            fs::write(folder.join("log-001"), fs::read(folder.join("log-000")).unwrap()).unwrap();
        }),
        ("a log of another store", "log-000", &|folder| copy(other, folder, "log-000")),
        ("the superblock of another store", "log-000", &|folder| copy(other, folder, "superblock")),
    ];
    for (case, file, change) in cases {
        let folder = changed(store, change);
        let mut why = vec![refused(case, folder.path())];
        let salvaged = offline::salvage(folder.path(), 0, &mut Vec::new());
        why.push(salvaged.map(drop).expect_err(case).to_string());
        for why in why {
            let parts = [file, "belongs to log 0 of store ", "backup"];
            assert!(parts.iter().all(|part| why.contains(part)), "{case}: {why}");
        }
    }
    assert_eq!(offline::check(store).unwrap().keys, KEYS);
}

/// Also where the other store has not written to those places that both have.
#[test]
fn files_of_stores_of_other_sizes_are_refused() {
    own_network();
    let [store, larger] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (store, larger) = (store.path(), larger.path());
    fill(store, "a");
    drop(Disk::open(larger, DiskOptions { segment_bytes: 2 * SEGMENT_BYTES, ..options() }).unwrap());
    let cases: [(&str, &Path, &Path, &str); 4] = [
        ("a larger log", larger, store, "log-000"),
        ("a smaller log", store, larger, "log-000"),
        ("the superblock of larger logs", larger, store, "superblock"),
        ("the superblock of smaller logs", store, larger, "superblock"),
    ];
    for (case, from, to, file) in cases {
        let folder = changed(to, |folder| copy(from, folder, file));
        let why = refused(case, folder.path());
        assert!(["log-000", "another store", "backup"].iter().all(|part| why.contains(part)), "{case}: {why}");
    }
}

/// One segment that was written to a wrong place keeps nobody from what else is there.
#[test]
fn a_single_segment_of_another_log_is_refused_and_the_rest_is_salvaged() {
    own_network();
    let [store, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    fill(store.path(), "a");
    fill(other.path(), "b");
    let log = fs::read(other.path().join("log-000")).unwrap();
    let segment = log.chunks(SEGMENT_BYTES as usize).find(|segment| segment[4..8] == *b"ksfS").unwrap();
    let folder = changed(store.path(), |folder| {
        let log = File::options().write(true).open(folder.join("log-000")).unwrap();
        log.write_all_at(segment, 0).unwrap();
    });
    let why = refused("a segment of another store", folder.path());
    assert!(why.contains("log-000") && why.contains("place 0"), "{why}");
    let (keys, logs) = offline::salvage(folder.path(), 0, &mut Vec::new()).unwrap();
    assert_eq!((keys, logs[0].unreadable), (KEYS as u64, 1));
}

/// How far each log was at an orderly end, or when it was opened, is known beside the logs.
#[test]
fn a_log_that_lost_its_end_after_an_orderly_end_is_refused() {
    own_network();
    let store = tempfile::tempdir().unwrap();
    let store = store.path();
    fill(store, "a");
    let older = changed(store, |_| {});
    fill(store, "b");
    let log = fs::read(store.join("log-000")).unwrap();
    let segment_bytes = SEGMENT_BYTES as usize;
    let number = |at: usize| u64::from_le_bytes(log[at + 8..at + 16].try_into().unwrap());
    let segments = (0..log.len()).step_by(segment_bytes).filter(|at| log[at + 4..at + 8] == *b"ksfS");
    let last = segments.max_by_key(|at| number(*at)).unwrap();
    let batches: Vec<usize> =
        (last..last + segment_bytes).step_by(4096).filter(|at| log[at + 4..at + 8] == *b"ksfB").collect();
    let zero = |folder: &Path, from: usize, to: usize| {
        let mut log = log.clone();
        log[from..to].fill(0);
        fs::write(folder.join("log-000"), log).unwrap();
    };
    let cases: [(&str, Change<'_>); 4] = [
        ("an older log", &|folder| copy(older.path(), folder, "log-000")),
        ("a log of zeros", &|folder| zero(folder, 0, log.len())),
        ("a last segment of zeros", &|folder| zero(folder, last, last + segment_bytes)),
        ("zeros behind the first batch", &|folder| zero(folder, batches[1], last + segment_bytes)),
    ];
    for (case, change) in cases {
        let folder = changed(store, change);
        let why = refused(case, folder.path());
        assert!(["log-000", "acknowledged", "salvage"].iter().all(|part| why.contains(part)), "{case}: {why}");
        offline::salvage(folder.path(), 0, &mut Vec::new()).unwrap();
    }
    // Nothing is missing with a superblock of before, or none in one of its copies.
    let folder = changed(store, |folder| copy(older.path(), folder, "superblock"));
    assert_eq!(offline::check(folder.path()).unwrap().keys, 2 * KEYS);
    for copy in 0..2 {
        let folder = changed(store, |folder| {
            let superblock = File::options().write(true).open(folder.join("superblock")).unwrap();
            superblock.write_all_at(&[0; 4096], copy * 4096).unwrap();
        });
        drop(Disk::open(folder.path(), options()).unwrap());
        assert_eq!(offline::check(folder.path()).unwrap().keys, 2 * KEYS);
        // That start knows it, too.
        fs::copy(older.path().join("log-000"), folder.path().join("log-000")).unwrap();
        refused("an older log after a start", folder.path());
    }
}
