//! Reading, writing and committing.

use std::fs;
use std::sync::mpsc::{TryRecvError, channel};

use crate::common::{Served, kind, on_lane, open_for_writing, root, with_lane};
use ksf_fs::{
    CreateHow, ErrorKind, Export, ExportOptions, FILE_SIZE_MAX, Fs, FsOptions, Handle, Lane, Owed, Resize, SetAttr,
    Squash, Stable,
};
use ksf_test::{own_run_or_skip, wait_until};

/// Makes what is left to the threads of a server.
fn settle(lane: &Lane, fs: &Fs, owed: &Owed) {
    fs.settle_owed(lane, owed).unwrap();
}

#[test]
fn bytes_come_back_from_where_they_were_written() {
    with_lane(|lane, served| {
        let file = served.make(lane, "file").handle;
        let bytes: Vec<u8> = (0..1 << 20).map(|at: u32| (at * 7 % 251) as u8).collect();
        for (stable, offset) in [(Stable::Unstable, 0), (Stable::DataSync, 1 << 20), (Stable::FileSync, 5 << 20)] {
            let written = served.fs.write(lane, &root(), &file, offset, &bytes, stable).result.unwrap();
            assert_eq!(
                (written.count, written.committed, written.verifier),
                (1 << 20, stable, served.export.verifier())
            );
            let mut back = Vec::new();
            let read = served.fs.read(lane, &root(), &file, offset, 1 << 20, &mut back);
            assert_eq!((read.result.unwrap().count, back == bytes), (1 << 20, true));
        }
        assert_eq!(served.fs.commit(lane, &file).result.unwrap(), served.export.verifier());
        assert_eq!(served.fs.counters().uncommitted_files, 0);
        let mut hole = Vec::new();
        assert_eq!(served.fs.read(lane, &root(), &file, 3 << 20, 100, &mut hole).result.unwrap().count, 100);
        assert_eq!(hole, [0; 100]);
        assert_eq!(fs::metadata(served.path("file")).unwrap().len(), 6 << 20);
    });
}

#[test]
fn the_end_of_a_file_is_told() {
    with_lane(|lane, served| {
        fs::write(served.path("file"), "0123456789").unwrap();
        let file = served.find(lane, "file").handle;
        for (offset, length, count, eof) in [
            (0, 4, 4, false),
            (6, 4, 4, true),
            (6, 9, 4, true),
            (10, 4, 0, true),
            (99, 4, 0, true),
            (0, 0, 0, false),
            (FILE_SIZE_MAX - 1, 8, 0, true),
            (FILE_SIZE_MAX, 8, 0, true),
            (u64::MAX, 8, 0, true),
        ] {
            let read = served.fs.read(lane, &root(), &file, offset, length, &mut Vec::new()).result.unwrap();
            assert_eq!((read.count, read.eof), (count, eof), "{length} bytes at {offset}");
        }
        for (offset, expected) in [(FILE_SIZE_MAX, ErrorKind::TooBig), (u64::MAX, ErrorKind::TooBig)] {
            let written = served.fs.write(lane, &root(), &file, offset, b"x", Stable::Unstable);
            assert_eq!(kind(written.result), expected);
        }
        assert_eq!(served.fs.write(lane, &root(), &file, 0, b"", Stable::FileSync).result.unwrap().count, 0);
    });
}

/// Every read gives a prefix of the file's one byte, and no signal.
#[test]
fn a_file_that_shrinks_gives_fewer_bytes() {
    with_lane(|lane, served| {
        let file = served.make(lane, "file").handle;
        std::thread::scope(|scope| {
            // Dropped in the end, also by a failure.
            let (_works, is_over) = channel::<()>();
            let changed = fs::OpenOptions::new().write(true).open(served.path("file")).unwrap();
            scope.spawn(move || {
                let full = vec![7; 256 << 10];
                while is_over.try_recv() == Err(TryRecvError::Empty) {
                    std::os::unix::fs::FileExt::write_all_at(&changed, &full, 0).unwrap();
                    changed.set_len(5).unwrap();
                }
            });
            for _ in 0..300 {
                let mut bytes = Vec::new();
                let read = served.fs.read(lane, &root(), &file, 0, 256 << 10, &mut bytes).result.unwrap();
                assert!(bytes.iter().all(|byte| *byte == 7 || *byte == 0));
                assert_eq!(bytes.len(), read.count);
            }
        });
    });
}

#[test]
fn uncommitted_files_are_bounded_and_forgotten_when_removed() {
    on_lane(|lane| {
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let bounds = FsOptions { uncommitted_files_max: 4, ..FsOptions::default() };
        let served = Served::with(options, bounds);
        for number in 0..20 {
            let file = served.make(lane, &number.to_string()).handle;
            served.fs.write(lane, &root(), &file, 0, b"text", Stable::Unstable).result.unwrap();
            assert!(served.fs.counters().uncommitted_files <= 4);
        }
        // Two of the reserve; each further file had the oldest one synced.
        assert_eq!(served.fs.counters().uncommitted_files, 2);
        for number in 0..20 {
            served.fs.remove(lane, &root(), served.root(), number.to_string().as_bytes()).result.unwrap();
        }
        assert_eq!(served.fs.counters().uncommitted_files, 0);
        assert_eq!(served.fs.counters().write_back_failures, 0);
    });
}

#[test]
fn descriptors_are_bounded_and_idle_ones_are_closed() {
    on_lane(|lane| {
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let served = Served::with(options, FsOptions { descriptors_max: 32, ..FsOptions::default() });
        let files: Vec<_> = (0..200).map(|number| served.make(lane, &number.to_string()).handle).collect();
        for file in &files {
            served.fs.write(lane, &root(), file, 0, b"text", Stable::FileSync).result.unwrap();
            let read = served.fs.read(lane, &root(), file, 0, 4, &mut Vec::new()).result.unwrap();
            assert_eq!(read.count, 4, "what was closed is opened again");
            // Two of each object may be above the bound of a part of the cache, which always keeps one object.
            assert!(served.fs.counters().descriptors <= 48, "{:?}", served.fs.counters());
        }
        assert!(served.fs.counters().evicted > 0);
        (0..20).for_each(|_| settle(lane, &served.fs, &served.fs.close_idle()));
        wait_until("all are closed", || served.fs.counters().descriptors == 0);
        let read =
            |lane: &mut Lane, file| served.fs.read(lane, &root(), file, 0, 4, &mut Vec::new()).result.unwrap().count;
        assert_eq!(read(lane, &files[0]), 4);
        let before = served.fs.counters();
        (0..10).for_each(|_| assert_eq!(read(lane, &files[0]), 4));
        assert_eq!(served.fs.counters().misses, before.misses, "from the cache");
    });
}

#[test]
fn a_commit_needs_no_right_and_no_unsynced_data() {
    with_lane(|lane, served| {
        let file = served.make(lane, "file").handle;
        let locked = SetAttr { mode: Some(0), ..SetAttr::default() };
        served.fs.setattr(lane, &root(), &file, &locked, None, Resize::Owner).result.unwrap();
        let verifier = served.export.verifier();
        assert_eq!(served.fs.commit(lane, &file).result.unwrap(), verifier);
        assert_ne!(Served::open_to_all().export.verifier(), verifier, "random at each start");
    });
}

#[test]
fn a_file_can_be_executed_two_seconds_after_a_write_and_at_once_after_a_commit() {
    with_lane(|lane, served| {
        let (file, path) = (served.make(lane, "tool").handle, served.path("tool"));
        let write = |lane: &mut Lane| served.fs.write(lane, &root(), &file, 0, b"text", Stable::Unstable);
        write(lane).result.unwrap();
        served.fs.commit(lane, &file).result.unwrap();
        assert_eq!(open_for_writing(&path), 0);
        write(lane).result.unwrap();
        assert_eq!(open_for_writing(&path), 1);
        for _ in 0..2 {
            settle(lane, &served.fs, &served.fs.close_idle());
        }
        wait_until("it is closed", || open_for_writing(&path) == 0);
        assert_eq!(served.fs.counters().uncommitted_files, 1);
        served.fs.commit(lane, &file).result.unwrap();
        assert_eq!((open_for_writing(&path), served.fs.counters().uncommitted_files), (0, 0));
    });
}

#[test]
fn what_nobody_commits_is_brought_to_the_medium_and_what_is_gone_is_forgotten() {
    with_lane(|lane, served| {
        let [file, gone] = ["file", "gone"].map(|name| served.make(lane, name).handle);
        for file in [&file, &gone] {
            served.fs.write(lane, &root(), file, 0, b"text", Stable::Unstable).result.unwrap();
        }
        fs::remove_file(served.path("gone")).unwrap();
        let passes = |seconds| (0..seconds).for_each(|_| settle(lane, &served.fs, &served.fs.close_idle()));
        passes(12);
        wait_until("what is gone is forgotten", || served.fs.counters().uncommitted_files == 1);
        passes(20);
        assert_eq!(served.fs.counters().uncommitted_files, 0);
        assert_eq!(served.fs.counters().write_back_failures, 0);
        served.fs.commit(lane, &file).result.unwrap();
    });
}

/// Runs a test on a lane, with a tmpfs of its own of this size, which is served.
fn on_tmpfs(size: &str, test: impl FnOnce(&mut Lane, &Fs, &Export) + Send) {
    let inside = || {
        let Some(()) = own_run_or_skip("a file system of its own") else { return };
        fs::create_dir("/run/data").unwrap();
        ksf_test::succeeds(&["mount", "-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", "/run/data"]);
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let mut layer = Fs::new(FsOptions::default()).unwrap();
        let export = layer.add_export("/run/data".as_ref(), "/run/state".as_ref(), options).unwrap();
        test(&mut Lane::attach().unwrap(), &layer, &export);
    };
    std::thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

fn make(lane: &mut Lane, layer: &Fs, export: &Export, name: &str) -> Handle {
    let how = CreateHow::Guarded(SetAttr::default());
    layer.create(lane, &root(), export.root(), name.as_bytes(), &how).result.unwrap().handle
}

/// What was accepted is safe, so nobody has to write it again.
#[test]
fn a_write_that_finds_no_room_does_not_have_others_write_again() {
    on_tmpfs("256k", |lane, layer, export| {
        let [mine, large] = ["mine", "large"].map(|name| make(lane, layer, export, name));
        let write = |lane: &mut Lane, file, offset, data: &[u8], stable| {
            layer.write(lane, &root(), file, offset, data, stable).result
        };
        let accepted = write(lane, &mine, 0, b"text", Stable::Unstable).unwrap().verifier;
        write(lane, &large, 0, b"text", Stable::Unstable).unwrap();
        let refused = (1..9).find_map(|at| write(lane, &large, at << 16, &[1; 1 << 16], Stable::FileSync).err());
        assert_eq!(refused.unwrap().kind(), ErrorKind::NoSpace);
        assert_eq!(layer.commit(lane, &mine).result.unwrap(), accepted);
        assert_eq!(layer.commit(lane, &large).result.unwrap(), accepted);
        assert_eq!(layer.counters().write_back_failures, 0);
    });
}

/// The file layer holds descriptors of a file that it has read, written, and not brought to the medium.
#[test]
fn a_file_that_a_local_program_removes_gives_its_room_back() {
    on_tmpfs("8m", |lane, layer, export| {
        let free_blocks = || rustix::fs::statvfs("/run/data").unwrap().f_bfree;
        let before = free_blocks();
        for stable in [Stable::Unstable, Stable::FileSync] {
            let file = make(lane, layer, export, "file");
            layer.write(lane, &root(), &file, 0, &vec![1; 4 << 20], stable).result.unwrap();
            layer.read(lane, &root(), &file, 0, 1, &mut Vec::new()).result.unwrap();
            assert!(free_blocks() < before);
            fs::remove_file("/run/data/file").unwrap();
            assert!(free_blocks() < before, "a descriptor is open");
            // The passes of 20 seconds: a descriptor that was used is closed at the second look, and there is one each 10 seconds.
            (0..20).for_each(|_| settle(lane, layer, &layer.close_idle()));
            wait_until(format_args!("{stable:?}: the room is given back"), || free_blocks() == before);
        }
    });
}
