//! No GETATTR or READDIRPLUS on an exclusive export tells older attributes than a reply before it told. On all others the next call
//! sees the changes of local programs, whether the shard answers or a lane.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Attr, Client, OK, Place, Serving, handle, made, mode, named, read_args, wcc, write_args};
use ksf::engine::EngineKind;
use ksf_fs::ExportOptions;
use ksf_nfs::ExportSettings;
use ksf_proto::xdr::XdrReader;
use ksf_test::rpc::words;
use ksf_test::{Random, wait_until};

const NOENT: u32 = 2;
const STALE: u32 = 70;

/// Changes of names are not brought to the medium: that is not what is tested, and takes time.
fn exclusive(place: &Place) -> ExportSettings {
    let export = place.export();
    ExportSettings { options: ExportOptions { exclusive: true, sync_names: false, ..export.options }, ..export }
}

/// Arguments of SETATTR, without a guard.
fn set_mode(file: &[u8], to: u32) -> Vec<u8> {
    [handle(file), mode(to), words(&[0])].concat()
}

/// Arguments of LINK.
fn link(file: &[u8], dir: &[u8], name: &str) -> Vec<u8> {
    [handle(file), named(dir, name)].concat()
}

/// `fattr3` without `used`, which the file system changes when it writes data out.
fn without_used(attr: &[u8]) -> Vec<u8> {
    [&attr[..28], &attr[36..84]].concat()
}

/// What LOOKUP tells of an object, which is asked of the file system at every call.
fn asked(client: &mut Client, dir: &[u8], name: &str) -> Vec<u8> {
    let rest = client.done(3, &named(dir, name));
    let mut r = XdrReader::new(&rest);
    r.opaque(64).unwrap();
    assert!(r.bool().unwrap());
    without_used(&rest[r.offset()..])
}

/// What READDIRPLUS tells of an object in a small folder.
fn listed(client: &mut Client, dir: &[u8], wanted: &str) -> Attr {
    let rest = client.done(17, &[handle(dir), words(&[0, 0, 0, 0, 4096, 4096])].concat());
    let mut r = XdrReader::new(&rest);
    Attr::read_option(&mut r);
    r.u64().unwrap();
    while r.bool().unwrap() {
        r.u64().unwrap();
        let is_wanted = r.opaque(255).unwrap() == wanted.as_bytes();
        r.u64().unwrap();
        let attr = Attr::read_option(&mut r);
        if r.bool().unwrap() {
            r.opaque(64).unwrap();
        }
        if is_wanted {
            return attr.unwrap();
        }
    }
    panic!("{wanted} is not listed");
}

#[test]
fn what_each_procedure_changes_is_told_by_the_next_getattr() {
    let place = Place::new();
    let serving = place.serve_all(EngineKind::Epoll, vec![exclusive(&place)]);
    let (mut client, root) = serving.mount(&place.path(""));
    let (file, other) = (client.create(&root, "file"), client.create(&root, "other"));
    let sub = made(&client.done(9, &[named(&root, "sub"), mode(0o755)].concat()));
    let symlink = made(&client.done(10, &[named(&root, "symlink"), mode(0o777), words(&[3, 0x6162_6300])].concat()));
    // The objects, with a name in the root by which each is found.
    let watched = [(&root, "."), (&file, "file"), (&other, "other"), (&sub, "sub"), (&symlink, "symlink")];
    let check = |client: &mut Client, after: &str| {
        for (object, name) in watched {
            let truth = asked(client, &root, name);
            let known = serving.nfs.files().fs_counters().attr_hits;
            for _ in 0..2 {
                let told = without_used(&client.done(1, &handle(object)));
                assert_eq!(told, truth, "GETATTR of {name} after {after}");
            }
            assert!(serving.nfs.files().fs_counters().attr_hits > known, "{name} is known after {after}");
        }
    };
    let exclusive = |name: &str| [named(&root, name), words(&[2, 1, 2])].concat();
    let truncating = [named(&root, "file"), words(&[0, 0, 0, 0, 1, 0, 1, 0, 0])].concat();
    let fifo = [named(&root, "fifo"), words(&[7]), mode(0o600)].concat();
    let steps: [(&str, u32, Vec<u8>); 19] = [
        ("an unstable WRITE", 7, write_args(&file, 0, 0, b"hello")),
        ("a WRITE to the medium", 7, write_args(&file, 5, 2, b"hello")),
        ("COMMIT", 21, read_args(&file, 0, 0)),
        ("READ", 6, read_args(&file, 0, 10)),
        ("SETATTR", 2, set_mode(&file, 0o600)),
        ("SETATTR of a folder", 2, set_mode(&sub, 0o700)),
        ("CREATE that cuts", 8, truncating),
        ("CREATE", 8, exclusive("new")),
        ("LINK", 15, link(&file, &sub, "linked")),
        ("READDIR", 16, [handle(&sub), words(&[0, 0, 0, 0, 4096])].concat()),
        ("READDIRPLUS", 17, [handle(&root), words(&[0, 0, 0, 0, 4096, 4096])].concat()),
        ("READLINK", 5, handle(&symlink)),
        ("MKDIR", 9, [named(&sub, "below"), mode(0o755)].concat()),
        ("RMDIR", 13, named(&sub, "below")),
        ("MKNOD", 11, fifo),
        ("REMOVE of one of two names", 12, named(&sub, "linked")),
        ("RENAME", 14, [named(&root, "new"), named(&sub, "new")].concat()),
        ("LINK again", 15, link(&other, &sub, "victim")),
        ("RENAME onto one of two names", 14, [named(&sub, "new"), named(&sub, "victim")].concat()),
    ];
    check(&mut client, "the beginning");
    for (name, procedure, args) in &steps {
        client.done(*procedure, args);
        check(&mut client, name);
    }
    // The last names go: by REMOVE, and by RENAME of another file.
    client.done(14, &[named(&root, "file"), named(&root, "other")].concat());
    assert_eq!(client.nfs(1, &handle(&other)).0, STALE, "after RENAME onto the last name");
    client.done(1, &handle(&file));
    client.done(12, &named(&root, "other"));
    assert_eq!(client.nfs(1, &handle(&file)).0, STALE, "after REMOVE of the last name");
    serving.stop();
}

#[test]
fn an_export_that_is_not_exclusive_is_asked_every_time() {
    let (place, serving) = Place::served();
    let (mut client, root) = serving.mount(&place.path(""));
    for round in 0..3 {
        fs::write(place.path(&format!("local {round}")), "").unwrap();
        let told = without_used(&client.done(1, &handle(&root)));
        assert_eq!(told, asked(&mut client, &root, "."));
    }
    assert_eq!(serving.nfs.files().fs_counters().attr_hits, 0);
    serving.stop();
}

/// The newest that any client was told of each object: ctime and size, of which neither ever goes back here.
#[derive(Default)]
struct Newest(Mutex<HashMap<usize, (u64, u64)>>);

impl Newest {
    fn of(&self, object: usize) -> (u64, u64) {
        self.0.lock().unwrap().get(&object).copied().unwrap_or_default()
    }

    fn told(&self, object: usize, attr: &Attr) {
        let mut all = self.0.lock().unwrap();
        let newest = all.entry(object).or_default();
        *newest = (newest.0.max(attr.ctime), newest.1.max(attr.size));
    }
}

#[test]
fn attributes_never_go_back_in_time_for_clients_that_talk_to_each_other() {
    const CLIENTS: u64 = 4;
    const FILES: usize = 2;
    const CALLS: u64 = 3000;
    for engine in ksf_test::working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe) {
        let place = Place::new();
        let serving = place.serve_all(engine, vec![exclusive(&place)]);
        let (mut client, root) = serving.mount(&place.path(""));
        let files: Vec<Vec<u8>> = (0..FILES).map(|at| client.create(&root, &format!("file {at}"))).collect();
        let ends: Vec<AtomicU64> = (0..FILES).map(|_| AtomicU64::new(0)).collect();
        let newest = Newest::default();
        let run = |number: u64| {
            let mut random = Random::new(number);
            let mut client = serving.client();
            // Another client must not have the replies to this one's calls.
            client.xid = (number as u32 + 1) << 20;
            for call in 0..CALLS {
                let object = random.below(FILES as u64) as usize;
                let (file, name) = (&files[object], format!("name {number}"));
                match random.below(8) {
                    0 => {
                        let end = ends[object].fetch_add(1, Ordering::Relaxed);
                        let stable = if call % 64 == 0 { 1 } else { 0 };
                        let rest = client.done(7, &write_args(file, end, stable, b"x"));
                        // Behind the weak cache data: count, how it was written, verifier.
                        newest.told(object, &wcc(&rest[..rest.len() - 16]).after.unwrap());
                    }
                    1 => {
                        let rest = client.done(2, &set_mode(file, 0o600 + random.below(8) as u32));
                        newest.told(object, &wcc(&rest).after.unwrap());
                    }
                    2 => {
                        client.done(15, &link(file, &root, &name));
                        client.done(12, &named(&root, &name));
                    }
                    choice => {
                        let before = newest.of(object);
                        let attr = if choice < 5 {
                            // It asks the file system, also while a change is under way.
                            let rest = client.done(3, &named(&root, &format!("file {object}")));
                            let mut r = XdrReader::new(&rest);
                            r.opaque(64).unwrap();
                            Attr::read_option(&mut r).unwrap()
                        } else if choice < 7 {
                            let (status, rest) = client.nfs(1, &handle(file));
                            assert_eq!(status, OK);
                            Attr::read(&mut XdrReader::new(&rest))
                        } else {
                            listed(&mut client, &root, &format!("file {object}"))
                        };
                        assert!(
                            attr.ctime >= before.0 && attr.size >= before.1,
                            "client {number}, call {call}: {attr:?} is older than what a reply told before: {before:?}"
                        );
                        newest.told(object, &attr);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let run = &run;
                scope.spawn(move || run(number));
            }
        });
        assert!(serving.nfs.files().fs_counters().attr_hits > 0, "some were answered on the shard");
        serving.stop();
    }
}

/// A server that answers on the shard, and its truth: the folder.
struct Local<'a> {
    place: &'a Place,
    serving: &'a Serving,
    root: Vec<u8>,
}

impl Local<'_> {
    /// Calls until the shard has answered. Each answer must be right, that of the first call, too.
    fn asks(&self, client: &mut Client, what: &str, (procedure, args): (u32, &[u8]), check: impl Fn(u32, &[u8])) {
        let at_once = || self.serving.nfs.files().fs_counters().warm;
        wait_until(format!("{what} is answered at once"), || {
            let before = at_once();
            let (status, rest) = client.nfs(procedure, args);
            check(status, &rest);
            at_once() > before
        });
    }

    fn gets_attributes(&self, client: &mut Client, object: &[u8], name: &str) {
        let known = fs::symlink_metadata(self.place.path(name)).unwrap();
        self.asks(client, &format!("GETATTR of {name:?}"), (1, &handle(object)), |status, rest| {
            assert_eq!(status, OK);
            let told = Attr::read(&mut XdrReader::new(rest));
            let time = |seconds: i64, nanos: i64| (seconds as u64) << 32 | nanos as u64;
            assert_eq!((told.size, told.nlink, told.fileid), (known.len(), known.nlink() as u32, known.ino()));
            assert_eq!((told.mode, told.ctime), (known.mode() & 0o7777, time(known.ctime(), known.ctime_nsec())));
        });
    }

    fn looks_up(&self, client: &mut Client, name: &str) {
        let known = fs::symlink_metadata(self.place.path(name)).ok();
        let args = named(&self.root, name);
        let check = |status, rest: &[u8]| match &known {
            Some(known) => {
                assert_eq!(status, OK, "{name}");
                let mut r = XdrReader::new(rest);
                r.opaque(64).unwrap();
                assert_eq!(Attr::read_option(&mut r).unwrap().fileid, known.ino(), "{name}");
            }
            None => assert_eq!(status, NOENT, "{name}"),
        };
        if known.is_some() || ksf_test::keeps_absent_names(&self.place.path("")) {
            self.asks(client, &format!("LOOKUP of {name}"), (3, &args), check);
        } else {
            let (status, rest) = client.nfs(3, &args);
            check(status, &rest);
        }
    }

    fn reads(&self, client: &mut Client, file: &[u8], name: &str) {
        let known = fs::read(self.place.path(name)).unwrap();
        let args = read_args(file, 0, known.len() as u32);
        let check = |status, rest: &[u8]| {
            assert_eq!(status, OK);
            assert!(rest.ends_with(&known), "READ of {name}: {:?} and not {:?}", rest.last(), known.last());
        };
        if ksf_test::reads_at_once(&self.place.path("")) {
            self.asks(client, &format!("READ of {name}"), (6, &args), check);
        } else {
            let (status, rest) = client.nfs(6, &args);
            check(status, &rest);
        }
    }

    fn reads_link(&self, client: &mut Client, name: &str) {
        let link = client.lookup(&self.root, name);
        let rest = client.done(5, &handle(&link));
        let mut r = XdrReader::new(&rest);
        assert!(Attr::read_option(&mut r).is_some());
        let known = fs::read_link(self.place.path(name)).unwrap();
        assert_eq!(r.opaque(4096).unwrap(), known.as_os_str().as_encoded_bytes());
    }
}

#[test]
fn a_local_change_is_seen_by_the_next_call() {
    let place = Place::new();
    let path = |name: &str| place.path(name);
    fs::write(path("file"), [b'a'; 8192]).unwrap();
    fs::write(path("other"), "other").unwrap();
    symlink("file", path("link")).unwrap();
    let serving = place.serve();
    let (mut client, root) = serving.mount(&path(""));
    let file = client.lookup(&root, "file");
    let local = Local { place: &place, serving: &serving, root: root.clone() };

    for byte in b'b'..b'f' {
        local.gets_attributes(&mut client, &file, "file");
        local.reads(&mut client, &file, "file");
        let content = fs::File::options().write(true).open(path("file")).unwrap();
        content.write_all_at(&[byte; 8192], 0).unwrap();
        drop(content);
        local.reads(&mut client, &file, "file");
        local.gets_attributes(&mut client, &file, "file");
    }
    // With or without root: all may read, or nobody.
    let mut user = serving.user(1000, 1000, &[]);
    for mode in [0o644, 0, 0o444, 0] {
        fs::set_permissions(path("file"), fs::Permissions::from_mode(mode)).unwrap();
        local.gets_attributes(&mut client, &file, "file");
        let may_read = u32::from(fs::metadata(path("file")).unwrap().mode() & 0o444 != 0);
        local.asks(&mut user, "ACCESS", (4, &[handle(&file), words(&[1])].concat()), |status, rest| {
            assert_eq!((status, &rest[rest.len() - 4..]), (OK, &may_read.to_be_bytes()[..]), "mode {mode:o}");
        });
    }
    fs::set_permissions(path("file"), fs::Permissions::from_mode(0o644)).unwrap();

    let looks_up = |client: &mut Client| ["file", "other", "new"].map(|name| local.looks_up(client, name));
    let changes: [(&str, &dyn Fn()); 5] = [
        ("made", &|| fs::write(path("new"), "").unwrap()),
        ("renamed", &|| fs::rename(path("file"), path("moved")).unwrap()),
        ("replaced", &|| fs::rename(path("new"), path("other")).unwrap()),
        ("made after it was missing", &|| fs::create_dir(path("new")).unwrap()),
        ("removed", &|| fs::remove_dir(path("new")).unwrap()),
    ];
    looks_up(&mut client);
    for (what, change) in changes {
        local.gets_attributes(&mut client, &root, "");
        println!("{what}");
        change();
        looks_up(&mut client);
        local.gets_attributes(&mut client, &root, "");
    }
    local.gets_attributes(&mut client, &file, "moved");

    local.reads_link(&mut client, "link");
    symlink("moved", path("next")).unwrap();
    fs::rename(path("next"), path("link")).unwrap();
    local.reads_link(&mut client, "link");
    serving.stop();
}
