use ksf::env::Env;
use ksf::limits::Limits;
use ksf::pool::{Memory, Pool};
use ksf::{Service, Turn};
use ksf_store::format::{Record, RecordKind, SegmentHeader, Standing};
use ksf_store::store::Clock;

use super::*;
use crate::{Durability, Kv, Settings};

/// A start that is torn leaves the copy that it read, whatever became of the other one before.
#[test]
fn the_copy_that_was_read_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a").join("b");
    let options = DiskOptions { segment_bytes: 1 << 20, places: 3, ..DiskOptions::default() };
    let first = Disk::open(&path, options).unwrap();
    assert_eq!(first.epoch, 1);
    drop(first);
    let superblock_path = path.join("superblock");
    for copy in [0, 1] {
        let (read, _) = read_superblock(&path).unwrap().unwrap();
        write_superblock(&superblock_path, &read, copy).unwrap();
        let file = OpenOptions::new().write(true).open(&superblock_path).unwrap();
        file.write_all_at(&[0; BLOCK_BYTES], u64::from(1 - copy) * BLOCK_BYTES as u64).unwrap();
        let second = Disk::open(&path, options).unwrap();
        assert_eq!(second.epoch, read.epoch + 1);
        let bytes = fs::read(&superblock_path).unwrap();
        let copies: Vec<_> =
            bytes.chunks(BLOCK_BYTES).map(|block| Superblock::decode(block).unwrap().unwrap()).collect();
        assert_eq!((copies[copy as usize], copies[1 - copy as usize].epoch), (read, second.epoch));
    }
}

/// A store of a program that knew no flush is taken up, and that program takes it no more; a store of a later one is
/// refused, whichever copy says so.
#[test]
fn a_store_of_another_version_is_taken_up_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { segment_bytes: 1 << 20, places: 3, ..DiskOptions::default() };
    drop(Disk::open(folder.path(), options).unwrap());
    let path = folder.path().join("superblock");
    let versions = || {
        let bytes = fs::read(&path).unwrap();
        [0, 1].map(|copy| u32::from_le_bytes(bytes[copy * BLOCK_BYTES + 4..][..4].try_into().unwrap()))
    };
    let set_version = |copy: usize, version: u32| {
        let mut bytes = fs::read(&path).unwrap();
        let block = &mut bytes[copy * BLOCK_BYTES..(copy + 1) * BLOCK_BYTES];
        block[4..8].copy_from_slice(&version.to_le_bytes());
        let crc = crc32c::crc32c(&block[4..]);
        block[..4].copy_from_slice(&crc.to_le_bytes());
        fs::write(&path, bytes).unwrap();
    };
    assert_eq!(versions(), [2, 2]);
    [0, 1].iter().for_each(|copy| set_version(*copy, 1));
    let epoch = Disk::open(folder.path(), options).unwrap().epoch;
    // The copy that a program of version 1 would refuse.
    assert!(versions().contains(&2), "{:?}", versions());
    for (copy, version) in [(0, 0), (1, 4)] {
        let before = fs::read(&path).unwrap();
        set_version(copy, version);
        let refused = Disk::open(folder.path(), options).unwrap_err();
        assert!(matches!(refused, DiskError::Format { found, .. } if found == version), "{refused}");
        fs::write(&path, before).unwrap();
    }
    assert_eq!(Disk::open(folder.path(), options).unwrap().epoch, epoch + 1);
}

/// A header that was torn in its place is that of the journal, for a look and for a start on any medium.
#[test]
fn a_header_that_was_torn_comes_from_the_journal() {
    let Some(folder) = ksf_test::Folder::in_memory_or_skip() else { return };
    let (folder, segment_bytes) = (folder.path(""), 1 << 20);
    let on = |medium| DiskOptions { segment_bytes, places: 3, medium, ..DiskOptions::default() };
    let path = log_path(&folder, 0);
    let journal_bytes = || fs::read(&path).unwrap()[3 << 20..].to_vec();
    // What a start on each medium leaves in the journal.
    for (number, (medium, is_kept)) in (0..).zip([(Medium::Block, false), (Medium::PmemMemory, true)]) {
        let mut disk = Disk::open(&folder, on(Medium::PmemMemory)).unwrap();
        let header = SegmentHeader {
            store: disk.geometry.store,
            log: 0,
            number,
            epoch: disk.epoch,
            segment_bytes,
            block_bytes: BLOCK_BYTES as u32,
            standing: Standing::Cleaned,
            live: Some((0..number).collect()),
        };
        let place = number as u32;
        disk.mapped[0].write(place, 0, &header.encode());
        disk.mapped[0].commit();
        drop(disk);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[0xff; 8], u64::from(place) * segment_bytes + 8).unwrap();
        let torn = fs::read(&path).unwrap();
        let (lock, _, media) = Disk::files(&folder, JOURNAL_BYTES as u64).unwrap();
        let mut front = Vec::new();
        media[0].read_front(place, BLOCK_BYTES, &mut front).unwrap();
        assert_eq!(SegmentHeader::decode(&front), Ok(header.clone()));
        drop((lock, media));
        assert_eq!(fs::read(&path).unwrap(), torn, "a look changes nothing");
        drop(Disk::open(&folder, on(medium)).unwrap());
        let mut front = vec![0; BLOCK_BYTES];
        File::open(&path).unwrap().read_exact_at(&mut front, u64::from(place) * segment_bytes).unwrap();
        assert_eq!(SegmentHeader::decode(&front), Ok(header));
        assert_eq!(journal_bytes().len(), JOURNAL_BYTES);
        assert_eq!(Journaled::decode(&journal_bytes()).is_some(), is_kept, "{medium}");
        let (superblock, _) = read_superblock(&folder).unwrap().unwrap();
        assert_eq!(superblock.has_journals, medium.is_mapped());
    }
}

/// It says what is missing, before anything of a store is made.
#[test]
fn a_medium_that_cannot_be_had_is_refused() {
    let Some(memory) = ksf_test::Folder::in_memory_or_skip() else { return };
    let refused = |folder: &Path, medium| {
        let error = Disk::open(folder, DiskOptions { medium, ..DiskOptions::default() }).unwrap_err();
        assert!(matches!(error, DiskError::Medium { .. }), "{error}");
        assert!(!folder.join("superblock").exists() && !log_path(folder, 0).exists());
        error.to_string()
    };
    let why = refused(&memory.path(""), Medium::Pmem);
    assert!(why.contains("medium pmem") && why.contains("DAX") && why.contains("dax=always"), "{why}");
    // Where folders for a moment are in memory, too, there is nothing to refuse.
    let here = tempfile::tempdir().unwrap();
    if medium::suits(Medium::PmemMemory, &File::open(here.path()).unwrap()).is_err() {
        let why = refused(here.path(), Medium::PmemMemory);
        assert!(why.contains("medium pmem-memory") && why.contains("tmpfs"), "{why}");
    }
}

/// As by a ring of a process that was killed: the lock of the folder is free.
#[test]
fn a_log_that_is_still_written_to_is_waited_for_and_its_holder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { segment_bytes: 1 << 20, places: 2, ..DiskOptions::default() };
    drop(Disk::open(folder.path(), options).unwrap());
    let path = log_path(folder.path(), 0);
    let late = OpenOptions::new().write(true).open(&path).unwrap();
    late.try_lock().unwrap();
    let here = format!("process {} ", std::process::id());
    for take in [File::try_lock, File::try_lock_shared] {
        let refused = lock_log(&File::open(&path).unwrap(), &path, take, Duration::ZERO).unwrap_err().to_string();
        assert!(refused.contains(&here) && refused.contains("log-000"), "{refused}");
    }
    let lock = File::open(folder.path().join("lock")).unwrap();
    let opened = thread::scope(|scope| {
        let opening = scope.spawn(|| Disk::open(folder.path(), options).map(|disk| disk.epoch));
        while !holder_of(&lock).contains(&here) && !opening.is_finished() {
            thread::yield_now();
        }
        assert!(!opening.is_finished(), "it did not wait");
        drop(late);
        opening.join().unwrap()
    });
    assert_eq!(opened.unwrap(), 2);
}

/// A process that can read the lock can hold it, and a link may name a file of anybody.
#[test]
fn a_store_is_for_its_owner_alone() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("around").join("store");
    let options = DiskOptions { segment_bytes: 1 << 20, places: 2, ..DiskOptions::default() };
    drop(Disk::open(&folder, options).unwrap());
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    let files = ["lock", "superblock", "log-000"].map(|name| folder.join(name));
    assert_eq!((mode(&folder), files.each_ref().map(|file| mode(file))), (0o700, [0o600; 3]));
    // As a version of before left it.
    files.iter().for_each(|file| fs::set_permissions(file, Permissions::from_mode(0o644)).unwrap());
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    drop(Disk::open(&folder, options).unwrap());
    assert_eq!((mode(&folder), files.each_ref().map(|file| mode(file))), (0o700, [0o600; 3]));
    for file in &files {
        let elsewhere = outer.path().join("elsewhere");
        fs::rename(file, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, file).unwrap();
        assert!(matches!(Disk::open(&folder, options), Err(DiskError::Io { .. })), "{}", file.display());
        assert!(matches!(Disk::look(&folder), Err(DiskError::Io { .. })), "{}", file.display());
        fs::rename(&elsewhere, file).unwrap();
    }
    drop(Disk::open(&folder, options).unwrap());
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&folder, Some(4242), None).unwrap();
        assert!(matches!(Disk::open(&folder, options), Err(DiskError::Foreign { owner: 4242, user: 0, .. })));
    }
}

/// The modes of the files hold by themselves, in a folder that all may enter.
#[test]
fn another_user_can_neither_open_nor_lock_nor_read_a_store() {
    if !ksf_test::is_root() {
        return ksf_test::skip("needs root: another user");
    }
    let outer = tempfile::tempdir().unwrap();
    fs::set_permissions(outer.path(), Permissions::from_mode(0o755)).unwrap();
    let folder = outer.path().join("store");
    let options = DiskOptions { segment_bytes: 1 << 20, places: 2, ..DiskOptions::default() };
    drop(Disk::open(&folder, options).unwrap());
    let files = ["lock", "superblock", "log-000"].map(|name| folder.join(name));
    let readable = outer.path().join("readable");
    fs::write(&readable, "").unwrap();
    let tries = || {
        // Of this thread alone.
        let stranger = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(stranger, stranger, stranger).unwrap();
        File::open(&readable).unwrap();
        let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
        for file in &files {
            // flock(2) takes a descriptor of any kind of access.
            for (read, write) in [(true, false), (false, true), (true, true)] {
                let opened = OpenOptions::new().read(read).write(write).open(file);
                assert!(opened.is_err_and(|error| is_denied(&error)), "{}", file.display());
            }
            assert!(fs::remove_file(file).is_err_and(|error| is_denied(&error)), "{}", file.display());
        }
        assert!(Disk::open(&folder, options).is_err() && Disk::look(&folder).is_err());
    };
    let as_stranger = || thread::scope(|scope| scope.spawn(tries).join().unwrap());
    as_stranger();
    assert!(Disk::look(&folder).is_ok(), "it has changed something");
    fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    as_stranger();
    // Nobody has locked it.
    drop(Disk::open(&folder, options).unwrap());
}

/// As where the disk is full: the next start may make a smaller one.
#[test]
fn a_store_that_was_not_made_whole_may_be_made_with_other_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { logs: 2, segment_bytes: 2 << 20, places: 4, ..DiskOptions::default() };
    let in_the_way = folder.path().join("log-001.new");
    fs::create_dir(&in_the_way).unwrap();
    assert!(matches!(Disk::open(folder.path(), options), Err(DiskError::Io { .. })));
    assert!(!log_path(folder.path(), 0).exists());
    fs::remove_dir(&in_the_way).unwrap();
    let smaller = DiskOptions { segment_bytes: 1 << 20, places: 2, ..options };
    let made = Disk::open(folder.path(), smaller).unwrap();
    assert_eq!((made.geometry.segment_bytes, made.found.len(), made.epoch), (1 << 20, 2, 1));
    drop(made);
    assert_eq!(fs::metadata(log_path(folder.path(), 1)).unwrap().len(), 2 << 20);
    assert_eq!(Disk::open(folder.path(), options).unwrap().geometry.segment_bytes, 1 << 20, "it keeps what it has");
}

#[test]
fn a_log_that_is_missing_or_cut_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { logs: 2, segment_bytes: 1 << 20, places: 2, ..DiskOptions::default() };
    drop(Disk::open(folder.path(), options).unwrap());
    let path = log_path(folder.path(), 1);
    let told = || [Disk::open(folder.path(), options), Disk::look(folder.path())].map(|told| told.unwrap_err());
    OpenOptions::new().write(true).open(&path).unwrap().set_len((2 << 20) - 1).unwrap();
    for error in told() {
        assert!(matches!(error, DiskError::LogLength { bytes: 2_097_151, log_bytes: 2_097_152, .. }), "{error}");
        assert!(error.to_string().contains("log-001") && error.to_string().contains("backup"), "{error}");
    }
    fs::remove_file(&path).unwrap();
    for error in told() {
        assert!(matches!(&error, DiskError::NoLog(missing) if *missing == path), "{error}");
    }
    assert!(!path.exists(), "an empty one would hide that");
}

/// Only a file that was mapped has more than its log: room for a journal. One that is longer belongs to another store.
#[test]
fn a_log_that_is_too_long_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { segment_bytes: 1 << 20, places: 2, ..DiskOptions::default() };
    drop(Disk::open(folder.path(), options).unwrap());
    let log = OpenOptions::new().write(true).open(log_path(folder.path(), 0)).unwrap();
    log.set_len((2 << 20) + JOURNAL_BYTES as u64).unwrap();
    drop(Disk::open(folder.path(), options).unwrap());
    log.set_len((2 << 20) + JOURNAL_BYTES as u64 + 1).unwrap();
    for told in [Disk::open(folder.path(), options), Disk::look(folder.path())] {
        let error = told.unwrap_err().to_string();
        assert!(error.contains("log-000") && error.contains("another store"), "{error}");
    }
    // The last resort takes what it finds in it.
    assert!(Disk::media(folder.path()).is_ok());
}

/// A store of a version that wrote down no ends has them from its next start on, also those of a log that nobody writes to.
#[test]
fn a_start_writes_down_how_far_each_log_is() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { logs: 2, segment_bytes: 1 << 20, places: 3, ..DiskOptions::default() };
    let mut disk = Disk::open(folder.path(), options).unwrap();
    let found = std::mem::take(&mut disk.found);
    let ends: Vec<u64> = found
        .into_iter()
        .map(|found| {
            let number = found.log();
            let mut log = found.into_log(disk.epoch);
            for _ in 0..=number {
                let (kind, key) = (RecordKind::Drop, &b"key"[..]);
                let (version, subkey, value) = (u64::from(number) + 1, &[][..], &[][..]);
                let record = Record { kind, version, expires_ms: None, received_ns: None, key, subkey, value };
                log.append(&[record], [], |_, _| {}).unwrap();
                while let Some(write) = log.next_write(1, 0) {
                    disk.write_at(number, u64::from(write.place) * (1 << 20) + write.offset, &write.bytes).unwrap();
                    log.written(write.id, true, write.bytes, |_| {});
                }
            }
            log.durable().0
        })
        .collect();
    drop(disk);
    let reached = || read_superblock(folder.path()).unwrap().unwrap().0.reached[..3].to_vec();
    assert_eq!(reached(), [0; 3], "it was killed");
    drop(Disk::look(folder.path()).unwrap());
    assert_eq!(reached(), [0; 3], "a look changes nothing");
    drop(Disk::open(folder.path(), options).unwrap());
    assert_eq!(reached(), [ends[0], ends[1], 0]);
    assert!(ends[0] > 0 && ends[1] > ends[0], "{ends:?}");
    drop(Disk::open(folder.path(), options).unwrap());
    assert_eq!(reached(), [ends[0], ends[1], 0]);
}

/// What a log that was mapped has may be in the caches of the CPU alone: neither that start nor the next one relies on it.
#[test]
fn a_start_behind_one_that_mapped_its_logs_does_not_write_down_how_far_they_are() {
    let Some(folder) = ksf_test::Folder::in_memory_or_skip() else { return };
    let (folder, segment_bytes) = (folder.path(""), 1 << 20);
    let on = |medium| DiskOptions { segment_bytes, places: 3, medium, ..DiskOptions::default() };
    let mut disk = Disk::open(&folder, on(Medium::PmemMemory)).unwrap();
    let mut log = disk.found.remove(0).into_log(disk.epoch);
    let (kind, key, version) = (RecordKind::Drop, &b"key"[..], 1);
    let record = Record { kind, version, expires_ms: None, received_ns: None, key, subkey: &[], value: &[] };
    log.append(&[record], [], |_, _| {}).unwrap();
    while let Some(write) = log.next_write(1, 0) {
        disk.mapped[0].write(write.place, write.offset, &write.bytes);
        disk.mapped[0].commit();
        log.written(write.id, true, write.bytes, |_| {});
    }
    drop(disk);
    let reached_on = |medium| {
        drop(Disk::open(&folder, on(medium)).unwrap());
        read_superblock(&folder).unwrap().unwrap().0.reached[0]
    };
    let reached = [Medium::PmemMemory, Medium::Block, Medium::Block, Medium::PmemMemory].map(reached_on);
    let end = log.durable().0;
    assert!(end > 0);
    assert_eq!(reached, [0, 0, end, end]);
}

/// Ends two shards of a store one after the other, each with a write that no reply waited for. The
/// kernel refuses each shard this system call. Returns the log of the error at the end, and the
/// keys that the next start finds.
fn ended(refused: [Option<libc::c_long>; 2]) -> (Result<(), Option<u16>>, usize) {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { logs: 2, segment_bytes: 1 << 20, places: 4, ..DiskOptions::default() };
    let disk = Disk::open(folder.path(), options).unwrap();
    let settings = Settings { durability: Durability::None, ..Settings::default() };
    let kv = Kv::new(disk, settings, |error| panic!("the process would end: {error}")).unwrap();
    for call in refused {
        let end = || {
            let mut env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, 4096, 8).unwrap()).unwrap();
            let mut shard = kv.start(&mut Turn::new(&mut env)).unwrap();
            let key = format!("of log {}", shard.shard.number()).into_bytes();
            shard.shard.update(&[&key], Clock::default(), |update| update.set(&key, b"value", None)).unwrap();
            call.into_iter().for_each(|call| ksf_test::refuse_call(call, rustix::io::Errno::IO));
            kv.stop(shard);
        };
        thread::scope(|scope| scope.spawn(end).join().unwrap());
    }
    let ended = kv.ended().map_err(|error| error.log);
    assert!(kv.ended().is_ok(), "the error is returned once");
    drop(kv);
    (ended, crate::offline::check(folder.path()).unwrap().keys)
}

/// fsync(2) is for the superblock alone.
#[test]
fn superblock_error_at_the_end_lasts_until_a_later_write_succeeds() {
    let fsync = Some(libc::SYS_fsync);
    assert_eq!(ended([None, None]), (Ok(()), 2));
    assert_eq!(ended([fsync, fsync]), (Err(None), 2));
    assert_eq!(ended([None, fsync]), (Err(None), 2));
    assert_eq!(ended([fsync, None]), (Ok(()), 2));
}

#[test]
fn failed_write_of_an_ending_log_keeps_no_other_shard_from_its_end() {
    let pwrite = Some(libc::SYS_pwrite64);
    assert_eq!(ended([pwrite, None]), (Err(Some(0)), 1));
    assert_eq!(ended([None, pwrite]), (Err(Some(1)), 1));
}

/// As by a child that is between fork and exec.
#[test]
fn a_lock_ends_with_its_store_though_others_have_its_file_open() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions { segment_bytes: 1 << 20, places: 2, ..DiskOptions::default() };
    let first = Disk::open(folder.path(), options).unwrap();
    let inherited = first._lock.0.try_clone().unwrap();
    assert!(matches!(Disk::open(folder.path(), options), Err(DiskError::InUse(_))));
    drop(first);
    assert_eq!(Disk::open(folder.path(), options).unwrap().epoch, 2);
    let (lock, ..) = Disk::media(folder.path()).unwrap();
    assert!(matches!(Disk::look(folder.path()), Err(DiskError::InUse(_))));
    drop((lock, inherited));
}

/// `docs/formats/store.md` has a row for each field.
#[test]
fn the_superblock_is_as_described() {
    let mut reached = [0; LOGS_MAX];
    (reached[0], reached[LOGS_MAX - 1]) = (0x3344_5566_7788_99aa, 7);
    let superblock = Superblock {
        store: 0x1122_3344_5566_7788,
        segment_bytes: 0x0200_0000,
        places: 0x0102_0304,
        logs: 0x0a0b,
        epoch: 0x2233_4455,
        has_journals: false,
        reached,
    };
    let block = superblock.encode();
    assert_eq!((block.len(), Superblock::decode(&block)), (4096, Some(Ok(superblock))));
    let values = [
        ("checksum of bytes 4 to 4,095", crc32c::crc32c(&block[4..]).into()),
        ("version of the format: 2", 2),
        ("`ksfstore`", u64::from_le_bytes(*b"ksfstore")),
        ("number of the store", superblock.store),
        ("bytes of a segment", superblock.segment_bytes),
        ("places of a log", superblock.places.into()),
        ("starts of the store", superblock.epoch.into()),
        ("logs", u64::from(superblock.logs)),
        ("the LSN that log 0 must reach", superblock.reached[0]),
    ];
    let docs = include_str!("../../../../../docs/formats/store.md");
    let lines = docs.lines().skip_while(|line| !line.starts_with("| superblock, byte |")).skip(2);
    let rows: Vec<&str> = lines.take_while(|line| line.starts_with('|')).collect();
    assert_eq!(rows.len(), values.len());
    for (row, (name, value)) in rows.into_iter().zip(values) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let (at, bytes): (usize, usize) = (cells[0].parse().unwrap(), cells[1].parse().unwrap());
        assert!(cells[2].starts_with(name), "{row}: {name}");
        assert_eq!(block[at..at + bytes], u64::to_le_bytes(value)[..bytes], "{row}");
    }
}
