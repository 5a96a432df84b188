//! Calls without a lane answer as those on a lane, or not at all.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::time::{Duration, SystemTime};

use ksf_fs::{
    Access, Attr, Credential, ErrorKind, Export, ExportOptions, Found, Fs, Handle, Lane, OpenFile, OpenHow, ReadDone,
    Seen, Squash, WARM_READ_BYTES_MAX, WarmShare, WarmTurn,
};
use ksf_test::{keeps_absent_names, reads_at_once, root_or_skip};

use crate::common::{Served, kind, on_lane, root, with_lane};

const ALL: Access = Access::from_bits_truncate(7);

/// The shard, with a connection that has its share of a turn before it for each call.
#[derive(Clone, Copy)]
struct Shard<'a> {
    fs: &'a Fs,
}

impl Shard<'_> {
    fn getattr(self, handle: &Handle) -> Option<Attr> {
        self.fs.warm(&mut WarmTurn::default(), &mut WarmShare::default()).getattr(handle)
    }

    fn access(self, who: &Credential, handle: &Handle, want: Access) -> Option<Seen<Access>> {
        self.fs.warm(&mut WarmTurn::default(), &mut WarmShare::default()).access(who, handle, want)
    }

    fn lookup(self, who: &Credential, dir: &Handle, name: &[u8]) -> Option<Seen<Found>> {
        self.fs.warm(&mut WarmTurn::default(), &mut WarmShare::default()).lookup(who, dir, name)
    }

    fn read(
        self,
        who: &Credential,
        file: &Handle,
        offset: u64,
        wanted: usize,
        into: &mut Vec<u8>,
    ) -> Option<Seen<ReadDone>> {
        self.fs.warm(&mut WarmTurn::default(), &mut WarmShare::default()).read(who, file, offset, wanted, into)
    }

    fn read_open(self, file: &OpenFile, offset: u64, wanted: usize, into: &mut Vec<u8>) -> Option<usize> {
        self.fs.warm(&mut WarmTurn::default(), &mut WarmShare::default()).read_open(file, offset, wanted, into)
    }
}

/// A file of before, with this mode and owner: rights of what has just changed are not kept.
fn old_file(served: &Served, name: &str, (uid, gid, mode): (u32, u32, u32), bytes: &[u8]) {
    let path = served.path(name);
    fs::write(&path, bytes).unwrap();
    chown(&path, Some(uid), Some(gid)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Asks on the lane until the answer is kept, which takes until the last change is a while ago.
fn until_kept<A, T>(mut ask: impl FnMut() -> A, mut warm: impl FnMut() -> Option<T>) -> T {
    let mut kept = None;
    ksf_test::wait_until("the answer of a lane is kept", || {
        ask();
        kept = warm();
        kept.is_some()
    });
    kept.unwrap()
}

fn read(
    warm: Shard<'_>,
    who: &Credential,
    file: &Handle,
    offset: u64,
    room: usize,
) -> Option<(Seen<ReadDone>, Vec<u8>)> {
    let mut into = Vec::new();
    let seen = warm.read(who, file, offset, room, &mut into)?;
    assert_eq!(into.len(), seen.result.unwrap().count);
    Some((seen, into))
}

/// What a program that reads does not change.
fn but_for_access_time(attr: Option<Attr>) -> Option<Attr> {
    attr.map(|attr| Attr { atime: ksf_fs::Time::default(), ..attr })
}

#[test]
fn what_is_open_is_told_as_it_is_now_and_what_is_not_open_or_gone_is_left_to_a_lane() {
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        fs::write(served.path("file"), "text").unwrap();
        let file = served.find(lane, "file");
        assert_eq!(warm.getattr(&file.handle), Some(served.fs.getattr(lane, &file.handle).unwrap()));
        fs::write(served.path("file"), "longer text").unwrap();
        assert_eq!(warm.getattr(&file.handle).unwrap().size, 11, "a change by a local program");
        fs::remove_file(served.path("file")).unwrap();
        assert_eq!(warm.getattr(&file.handle), None, "its descriptor is kept, and it has no name");
        assert_eq!(kind(served.fs.getattr(lane, &file.handle)), ErrorKind::Stale);
        let served = served.restarted();
        assert_eq!((Shard { fs: &served.fs }).getattr(served.root()), None, "nothing was opened");
    });
}

#[test]
fn names_are_looked_up_by_those_who_may_search_the_folder() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        fs::create_dir(served.path("folder")).unwrap();
        fs::write(served.path("folder/file"), "text").unwrap();
        std::os::unix::fs::symlink("/", served.path("folder/link")).unwrap();
        old_file(&served, "plain", (0, 0, 0o644), b"");
        chown(served.path("folder"), Some(1000), Some(100)).unwrap();
        fs::set_permissions(served.path("folder"), fs::Permissions::from_mode(0o710)).unwrap();
        let folder = served.find(lane, "folder").handle;
        let (owner, friend, stranger) =
            (Credential::unix(1000, 7, &[]), Credential::unix(1001, 7, &[100]), Credential::unix(1001, 7, &[]));
        for who in [&owner, &friend] {
            assert_eq!(warm.lookup(who, &folder, b"file"), None, "the kernel was not asked for this caller");
            let told =
                until_kept(|| served.fs.lookup(lane, who, &folder, b"file"), || warm.lookup(who, &folder, b"file"));
            let missing = keeps_absent_names(served.export.path()).then_some(&b"missing"[..]);
            for name in [&b"file"[..], b"link"].into_iter().chain(missing) {
                let expected = served.fs.lookup(lane, who, &folder, name);
                let told =
                    until_kept(|| served.fs.lookup(lane, who, &folder, name), || warm.lookup(who, &folder, name));
                assert_eq!(told, expected);
            }
            assert_eq!(told.result.unwrap().attr.size, 4);
            for name in [&b"."[..], b"..", b"", b"a/b", b"a\0b", &[b'n'; 256]] {
                assert_eq!(warm.lookup(who, &folder, name), None);
            }
        }
        assert_eq!(kind(served.fs.lookup(lane, &stranger, &folder, b"file").result), ErrorKind::Access);
        assert_eq!(warm.lookup(&stranger, &folder, b"file"), None, "the right of others is not that of this one");
        // The owner loses the right; a lane is asked.
        fs::set_permissions(served.path("folder"), fs::Permissions::from_mode(0o010)).unwrap();
        assert_eq!(warm.lookup(&owner, &folder, b"file"), None);
        assert_eq!(kind(served.fs.lookup(lane, &owner, &folder, b"file").result), ErrorKind::Access);
        let plain = served.find(lane, "plain").handle;
        assert_eq!(warm.lookup(&root(), &plain, b"file"), None, "no folder");
    });
}

#[test]
fn rights_are_those_that_the_kernel_named_until_the_object_changes() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        old_file(&served, "file", (1000, 100, 0o640), b"text");
        let file = served.find(lane, "file").handle;
        let all = [(1000, 7), (1001, 100), (1002, 7), (0, 0)].map(|(uid, gid)| Credential::unix(uid, gid, &[]));
        for who in &all {
            assert_eq!(warm.access(who, &file, ALL), None);
            let told = until_kept(|| served.fs.access(lane, who, &file, ALL), || warm.access(who, &file, ALL));
            assert_eq!(told, served.fs.access(lane, who, &file, ALL));
            let read = Access::READ;
            let told = until_kept(|| served.fs.access(lane, who, &file, read), || warm.access(who, &file, read));
            assert_eq!(told, served.fs.access(lane, who, &file, read));
        }
        fs::set_permissions(served.path("file"), fs::Permissions::from_mode(0o604)).unwrap();
        for who in &all {
            assert_eq!(warm.access(who, &file, ALL), None, "of before the change");
        }
        served.fs.access(lane, &all[0], &file, ALL);
        let told = warm.access(&all[0], &file, ALL);
        // A clock of 10 ms may give a change of now the same time. By the clock of the answers, which may be set meanwhile.
        let changed = fs::metadata(served.path("file")).unwrap();
        let changed = Duration::new(changed.ctime() as u64, changed.ctime_nsec() as u32);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(told.is_none() || now > changed + Duration::from_millis(100));
    });
}

#[test]
fn nobody_writes_to_an_export_that_is_read_only() {
    on_lane(|lane| {
        let options = ExportOptions { squash: Squash::None, read_only: true, ..ExportOptions::default() };
        let served = Served::new(options);
        let warm = Shard { fs: &served.fs };
        let handle = served.root().clone();
        let told = until_kept(|| served.fs.access(lane, &root(), &handle, ALL), || warm.access(&root(), &handle, ALL));
        assert_eq!(told.result, Ok(Access::READ | Access::EXECUTE));
    });
}

#[test]
fn bytes_in_memory_are_read_by_those_who_may() {
    let Some(()) = root_or_skip("identities") else { return };
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
        old_file(&served, "file", (1000, 100, 0o600), &bytes);
        let file = served.find(lane, "file").handle;
        let (owner, stranger) = (Credential::unix(1000, 7, &[]), Credential::unix(1001, 7, &[]));
        assert!(read(warm, &owner, &file, 0, 10).is_none());
        assert_eq!(kind(served.fs.read(lane, &stranger, &file, 0, 10, &mut Vec::new()).result), ErrorKind::Access);
        if !reads_at_once(served.export.path()) {
            // Such a file system has no reads that do not wait.
            served.fs.read(lane, &owner, &file, 0, 10, &mut Vec::new()).result.unwrap();
            assert!(read(warm, &owner, &file, 0, 10).is_none());
            return;
        }
        until_kept(|| served.fs.read(lane, &owner, &file, 0, 10, &mut Vec::new()), || read(warm, &owner, &file, 0, 10));
        for (offset, room) in
            [(0, 4096), (99_990, 10), (99_990, 11), (50_000, 65_536), (100_000, 10), (u64::MAX, 1), (7, 0)]
        {
            let mut expected = Vec::new();
            let seen = served.fs.read(lane, &owner, &file, offset, room, &mut expected);
            // Memory may be taken back meanwhile, and nobody's answer holds for ever.
            let Some((told, data)) = read(warm, &owner, &file, offset, room) else {
                assert!(offset == u64::MAX || room > 0);
                continue;
            };
            assert_eq!((told.result, &data), (seen.result, &expected), "{offset} {room}");
            assert_eq!(but_for_access_time(told.after), but_for_access_time(seen.after));
        }
        assert!(read(warm, &owner, &file, 0, WARM_READ_BYTES_MAX + 1).is_none(), "too long for a shard");
        assert_eq!(kind(served.fs.read(lane, &stranger, &file, 0, 10, &mut Vec::new()).result), ErrorKind::Access);
        assert!(read(warm, &stranger, &file, 0, 10).is_none(), "though it asked when answers are kept");
        chown(served.path("file"), Some(1002), None).unwrap();
        assert!(read(warm, &owner, &file, 0, 10).is_none(), "of before the change");
        assert_eq!(kind(served.fs.read(lane, &owner, &file, 0, 10, &mut Vec::new()).result), ErrorKind::Access);
    });
}

#[test]
fn what_is_open_for_reading_is_read_at_once_up_to_its_end() {
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        fs::write(served.path("file"), "0123456789").unwrap();
        let file = served.find(lane, "file").handle;
        let (open, _) = served.fs.open(lane, &root(), &file, OpenHow::READ).unwrap();
        let write = OpenHow { read: false, write: true, ..OpenHow::READ };
        let (written, _) = served.fs.open(lane, &root(), &file, write).unwrap();
        assert_eq!(warm.read_open(&written, 0, 4, &mut Vec::new()), None, "not open for it");
        if !reads_at_once(served.export.path()) {
            return;
        }
        until_kept(
            || served.fs.read_open(lane, &open, 0, 1, &mut Vec::new()),
            || warm.read_open(&open, 0, 1, &mut Vec::new()),
        );
        let mut into = Vec::new();
        assert_eq!(warm.read_open(&open, 2, 6, &mut into), Some(6));
        assert_eq!(warm.read_open(&open, 8, 6, &mut into), Some(2));
        assert_eq!(warm.read_open(&open, 10, 6, &mut into), Some(0));
        assert_eq!(into, b"23456789");
        assert_eq!(warm.read_open(&open, u64::MAX, 6, &mut into), None);
    });
}

#[test]
fn a_part_that_is_not_in_memory_is_not_taken_for_the_end_of_the_file() {
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        fs::write(served.path("file"), vec![7; 4 << 20]).unwrap();
        let file = served.find(lane, "file").handle;
        let (open, _) = served.fs.open(lane, &root(), &file, OpenHow::READ).unwrap();
        let content = fs::File::open(served.path("file")).unwrap();
        content.sync_all().unwrap();
        for _ in 0..100 {
            let rest = std::num::NonZeroU64::new(2 << 20);
            rustix::fs::fadvise(&content, 2 << 20, rest, rustix::fs::Advice::DontNeed).unwrap();
            let read = warm.read_open(&open, (2 << 20) - 32_768, 65_536, &mut Vec::new());
            // The kernel may have the rest in memory again.
            assert!(matches!(read, None | Some(65_536)), "{read:?}");
        }
    });
}

#[test]
fn a_read_that_changes_the_time_of_the_last_access_is_left_to_a_lane() {
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        fs::write(served.path("file"), "text").unwrap();
        let file = served.find(lane, "file").handle;
        let (open, _) = served.fs.open(lane, &root(), &file, OpenHow::READ).unwrap();
        let content = fs::File::options().write(true).open(served.path("file")).unwrap();
        for _ in 0..3 {
            let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
            content.set_times(fs::FileTimes::new().set_accessed(long_ago)).unwrap();
            let before = served.fs.getattr(lane, &file).unwrap();
            let read = warm.read_open(&open, 0, 4, &mut Vec::new());
            assert!(read.is_none() || has_no_access_times(&served.export));
            assert_eq!(served.fs.getattr(lane, &file).unwrap().atime, before.atime);
            if reads_at_once(served.export.path()) {
                until_kept(
                    || served.fs.read_open(lane, &open, 0, 4, &mut Vec::new()),
                    || warm.read_open(&open, 0, 4, &mut Vec::new()),
                );
            }
        }
    });
}

#[test]
fn a_connection_has_its_share_of_a_turn() {
    with_lane(|lane, served| {
        fs::write(served.path("file"), "text").unwrap();
        let file = served.find(lane, "file").handle;
        let (mut one, mut two, mut turn) = (WarmShare::default(), WarmShare::default(), WarmTurn::default());
        let look = |turn: &mut WarmTurn, share: &mut WarmShare| served.fs.warm(turn, share).getattr(&file).is_some();
        let answered = (0..10_000).filter(|_| look(&mut turn, &mut one)).count();
        assert!((100..1000).contains(&answered), "{answered}");
        assert!(!look(&mut turn, &mut one));
        assert!(look(&mut turn, &mut two), "another connection");
        turn.end();
        assert!(look(&mut turn, &mut one), "another turn");
        turn.end();
        let reads = (0..10_000).take_while(|offset| {
            let mut warm = served.fs.warm(&mut turn, &mut one);
            warm.read(&root(), &file, *offset, WARM_READ_BYTES_MAX, &mut Vec::new());
            look(&mut turn, &mut one)
        });
        assert!(reads.count() < answered / 2, "long reads are more than a step");
        // All connections together leave the rest of a turn to other services.
        turn.end();
        let connections = (0..10_000).take_while(|_| {
            let mut share = WarmShare::default();
            (0..answered).all(|_| look(&mut turn, &mut share))
        });
        assert!((1..20).contains(&connections.count()));
    });
}

/// Whether the mount has `noatime`.
fn has_no_access_times(export: &Export) -> bool {
    rustix::fs::statvfs(export.path()).unwrap().f_flag.contains(rustix::fs::StatVfsMountFlags::NOATIME)
}

/// A look-up opens its object, and closes it if another descriptor of it is kept.
#[test]
fn many_look_ups_of_a_name_leave_one_descriptor() {
    with_lane(|lane, served| {
        let warm = Shard { fs: &served.fs };
        fs::write(served.path("file"), "text").unwrap();
        let dir = served.root().clone();
        let look = |lane: &mut Lane| served.fs.lookup(lane, &root(), &dir, b"file");
        until_kept(|| look(lane), || warm.lookup(&root(), &dir, b"file"));
        let mut answered = 0_u32;
        for _ in 0..20_000 {
            match warm.lookup(&root(), &dir, b"file") {
                Some(_) => answered += 1,
                None => {
                    look(lane);
                }
            }
        }
        assert!(answered > 10_000, "{answered}");
        let target = served.path("file");
        let names = || fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().path());
        let open = || names().filter(|fd| fs::read_link(fd).is_ok_and(|path| path == target)).count();
        ksf_test::wait_until("few are left", || open() <= 70);
    });
}
