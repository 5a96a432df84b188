//! kv against servers that answer well and against servers that lie; the journal and its audit.

use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicU64;

use crate::common::store::{Asked, Map, bulk, good_kv_server, kv_server, serve};
use crate::common::*;

#[test]
fn every_kind_of_load_is_answered_checked_and_counted() {
    for options in [
        "-n 2000",
        "-n 3000 -c 1",
        "-n 3000 -c 1 -P 32 --mix 1:1 --keys 5",
        "-n 4000 -c 4 -P 16 --sizes 64,1400 --mix 50:50 --zipf 0.99",
        "-n 4000 -c 8 -j 2 -P 4 --keys 8 --mix 1:3",
        "-n 2000 -c 2 -j 2 --mix 0:1",
        "-n 500 --rate 20K -c 3 -j 2 --keys 10",
        "-n 500 --rate 20K -c 2 --arrival constant --mix 1:0",
        "-n 100 -c 2 -P 3 --sizes 32,300000 --mix 1:1",
    ] {
        let (server, map) = good_kv_server();
        let keys = if options.contains("--keys") { "" } else { "--keys 500" };
        let ran = run_kv(&format!("{server} {options} {keys}"));
        let count = options.split_whitespace().nth(1).unwrap().parse().unwrap();
        ran.assert_clean(count);
        let (config, run) = (&ran.report().config, &ran.report().run);
        let [gets, sets] = [0, 1].map(|at| run.operations[at].replies);
        assert_eq!((gets + sets, gets), (count, run.hits), "{options}");
        assert_eq!((run.misses, run.unchecked, run.stage.as_str()), (0, 0, "load"), "{options}");
        assert_eq!(map.lock().unwrap().len() as u64, config.keys, "all keys were filled: {options}");
    }
}

#[test]
fn without_a_fill_what_is_not_written_yet_is_not_checked() {
    let (server, map) = good_kv_server();
    map.lock().unwrap().insert(b"key:000000000003".to_vec(), [b"from before".to_vec(), Vec::new()]);
    let ran = run_kv(&format!("{server} --no-fill -n 2000 -c 5 --keys 50 --mix 99:1"));
    ran.assert_clean(2000);
    let run = &ran.report().run;
    assert!(run.misses > 0 && run.unchecked > 0, "{run:?}");
    assert_eq!(run.hits + run.misses + run.unchecked, run.operations[0].replies);
}

#[test]
fn every_lie_is_told_by_its_kind() {
    type Lie = fn(Asked<'_>) -> Option<Vec<u8>>;
    /// After a thousand reads, of ten keys, each of which was overwritten many times by then.
    fn once(asked: Asked<'_>, lie: fn(Asked<'_>) -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        if asked.read == Some(1000) { lie(asked) } else { Some(asked.reply) }
    }
    let lies: [(Lie, &[(&str, u64)]); 11] = [
        (|asked| once(asked, |_| Some(b"$-1\r\n".to_vec())), &[("missing", 1)]),
        (|asked| once(asked, |asked| Some(bulk(&asked.first))), &[("old", 1)]),
        (|asked| once(asked, |asked| Some(bulk(&asked.other))), &[("misdirected", 1)]),
        (|asked| once(asked, |_| Some(bulk(b"hello"))), &[("foreign", 1)]),
        (
            |asked| {
                once(asked, |asked| {
                    let mut reply = asked.reply;
                    let last = reply.len() - 3;
                    reply[last] ^= 1;
                    Some(reply)
                })
            },
            &[("damaged", 1)],
        ),
        (|asked| once(asked, |_| Some(b"-ERR no\r\n".to_vec())), &[("rejected", 1)]),
        (|asked| once(asked, |_| Some(b"+PONG\r\n".to_vec())), &[("malformed", 1)]),
        (|asked| once(asked, |_| Some(b"HTTP/1.1 400\r\n".to_vec())), &[("closed", 1), ("malformed", 1)]),
        (|asked| once(asked, |asked| Some([asked.reply, b"$-1\r\n".to_vec()].concat())), &[("unsolicited", 1)]),
        (|asked| once(asked, |_| Some(Vec::new())), &[("lost", 1)]),
        (|asked| once(asked, |_| None), &[("closed", 1)]),
    ];
    for (number, (lie, faults)) in lies.into_iter().enumerate() {
        let (server, _) = kv_server(lie);
        let timeout = short_timeout(faults);
        let ran = run_kv(&format!("{server} --keys 10 -c 1 -n 6000 --mix 50:50 {timeout} --json"));
        assert_eq!((ran.code, ran.faults()), (1, faults.to_vec()), "{number}: {}", ran.stderr);
        assert!(ran.stderr.contains("connection 0: ") && ran.stderr.contains("not every reply was right"));
        ran.assert_reads_back();
    }
}

#[test]
fn a_fill_that_fails_is_no_measurement() {
    let (server, _) = kv_server(|asked| match asked.words {
        [b"SET", key, _] if key.ends_with(b"7") => Some(b"-OOM the log is full\r\n".to_vec()),
        _ => Some(asked.reply),
    });
    let ran = run_kv(&format!("{server} --keys 30 -c 3 -n 1000"));
    assert_eq!((ran.code, ran.faults()), (1, vec![("rejected", 3)]), "{}", ran.stderr);
    assert_eq!(ran.report().run.stage, "fill");
    assert!(ran.stderr.contains("keys could not be filled: 3 rejected; 27 right"), "{}", ran.stderr);
}

#[test]
fn a_login_is_made_on_each_connection() {
    let (server, _) = kv_server(|asked| match asked.words {
        [b"AUTH", b"me", b"secret"] => Some(asked.reply),
        [b"AUTH", ..] => Some(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n".to_vec()),
        _ => Some(asked.reply),
    });
    let folder = Folder::new();
    let password = folder.write("password", "secret\n");
    let load = format!("{server} -c 3 -n 100 --keys 10 --user me");
    run_kv(&format!("{load} --password secret")).assert_clean(100);
    run_kv(&format!("{load} --password-file {}", password.display())).assert_clean(100);
    let ran = run_kv(&format!("{load} --password wrong"));
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("AUTH was answered by -WRONGPASS"), "{}", ran.stderr);
}

#[test]
fn unix_sockets_and_nobody_there() {
    own_network();
    let folder = Folder::new();
    let path = folder.path("kv.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let map = Map::default();
        for stream in listener.incoming().flatten() {
            let map = map.clone();
            std::thread::spawn(move || serve(stream, &map, &AtomicU64::new(0), &|asked: Asked<'_>| Some(asked.reply)));
        }
    });
    let ran = run_kv(&format!("--listen unix:{} -c 3 -P 4 -n 500 --keys 20", path.display()));
    ran.assert_clean(500);
    assert_eq!(ran.document().target.as_ref().unwrap().transport, "unix");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(run_kv(&format!("{closed} -n 1")).code, 69);
}

/// A journal of a load on a server, and what it takes to audit it.
struct Audited {
    folder: Folder,
    server: std::net::SocketAddr,
    map: Map,
}

impl Audited {
    fn new(options: &str) -> Audited {
        let (server, map) = good_kv_server();
        let audited = Audited { folder: Folder::new(), server, map };
        let ran = audited.load(options);
        assert_eq!((ran.code, ran.faults()), (0, vec![]), "{}", ran.stderr);
        audited
    }

    fn journal(&self) -> String {
        self.folder.path("journal").display().to_string()
    }

    fn load(&self, options: &str) -> RanKv {
        run_kv(&format!("{} {options} --journal {}", self.server, self.journal()))
    }

    fn audit(&self) -> RanKv {
        run_kv(&format!("{} --json --audit {}", self.server, self.journal()))
    }

    fn key(at: u64) -> Vec<u8> {
        format!("key:{at:012}").into_bytes()
    }
}

#[test]
fn an_audit_finds_everything_that_was_acknowledged() {
    let audited = Audited::new("--keys 100 -c 7 -P 8 -n 5000 --mix 1:1 -j 2");
    let ran = audited.audit();
    ran.assert_clean(100);
    let (run, audit) = (&ran.report().run, ran.report().audit.as_ref().unwrap());
    assert_eq!((run.stage.as_str(), ran.report().config.keys), ("audit", 100));
    assert_eq!((audit.sessions, audit.torn_bytes, audit.acknowledged, audit.right), (1, 0, 100, 100));
    assert_eq!((audit.newer, audit.lost, audit.damaged, audit.foreign, audit.unread), (0, 0, 0, 0, 0));
    let records = audit.records;
    assert!(records > 100 + 2000, "the fill and half of the load: {records}");

    // Continued by another run, which neither fills nor forgets.
    let ran = audited.load("--keys 100 -c 3 -n 200 --mix 1:1");
    ran.assert_clean(200);
    let sets = ran.report().run.operations[1].replies;
    assert_eq!((ran.report().run.journaled, ran.report().run.misses), (sets, 0));
    let again = audited.audit();
    again.assert_clean(100);
    let more = again.report().audit.as_ref().unwrap();
    assert_eq!((more.sessions, more.right, more.records), (2, 100, records + sets));
    // Of other keys it is not continued.
    assert_eq!(audited.load("--keys 101 -c 3 -n 1").code, 64);
}

#[test]
fn an_audit_finds_what_is_lost_damaged_or_foreign() {
    /// Changes the value of a key, beside which is its first one; false: the key is to go.
    type Change = fn(&mut [Vec<u8>; 2]) -> bool;
    let spoil: [(&str, Change, [u64; 3]); 4] = [
        ("missing", |_| false, [1, 0, 0]),
        (
            "old",
            |[value, first]| {
                value.clone_from(first);
                true
            },
            [1, 0, 0],
        ),
        (
            "damaged",
            |[value, _]| {
                *value.last_mut().unwrap() ^= 0x10;
                true
            },
            [0, 1, 0],
        ),
        (
            "foreign",
            |[value, _]| {
                *value = b"somebody else's".to_vec();
                true
            },
            [0, 0, 1],
        ),
    ];
    for (fault, change, [lost, damaged, foreign]) in spoil {
        let audited = Audited::new("--keys 20 -c 2 -n 2000 --mix 1:3");
        let key = Audited::key(13);
        let keeps = change(audited.map.lock().unwrap().get_mut(&key).unwrap());
        if !keeps {
            audited.map.lock().unwrap().remove(&key);
        }
        let ran = audited.audit();
        assert_eq!((ran.code, ran.faults()), (1, vec![(fault, 1)]), "{}", ran.stderr);
        let audit = ran.report().audit.as_ref().unwrap();
        assert_eq!((audit.lost, audit.damaged, audit.foreign), (lost, damaged, foreign), "{fault}");
        assert_eq!((audit.acknowledged, audit.right, audit.unread), (20, 19, 0));
        let said = &ran.stderr;
        assert!(said.contains("not everything that was acknowledged is there"), "{said}");
        assert!(said.contains("key:000000000013"), "{said}");
        // A run that goes on with the journal sees it, too.
        let ran = audited.load("--keys 20 -c 2 -n 2000 --mix 1:0");
        assert!(ran.code == 1 && ran.faults()[0].0 == fault, "{}", ran.stderr);
    }
    // Two keys have changed their values.
    let audited = Audited::new("--keys 20 -c 2 -n 200");
    {
        let mut map = audited.map.lock().unwrap();
        let [one, other] = [3, 4].map(|at| map[&Audited::key(at)].clone());
        map.extend([(Audited::key(3), other), (Audited::key(4), one)]);
    }
    let ran = audited.audit();
    assert_eq!((ran.faults(), ran.report().audit.as_ref().unwrap().foreign), (vec![("misdirected", 2)], 2));
}

#[test]
fn what_was_sent_and_not_acknowledged_may_be_there_or_not() {
    // From the 1000th write on, writes are done and the connection ends without an answer.
    let writes = std::sync::Arc::new(AtomicU64::new(0));
    let (server, map) = kv_server(move |asked| match asked.words {
        [b"SET", ..] if writes.fetch_add(1, std::sync::atomic::Ordering::Relaxed) >= 1000 => None,
        _ => Some(asked.reply),
    });
    let audited = Audited { folder: Folder::new(), server, map };
    let ran = audited.load("--keys 10 -c 1 -P 8 -n 100000 --mix 0:1");
    assert_eq!(ran.code, 1);
    assert_eq!(ran.report().run.journaled, 990, "ten more by the fill: {}", ran.stderr);
    let ran = audited.audit();
    ran.assert_clean(10);
    let audit = ran.report().audit.as_ref().unwrap();
    assert_eq!((audit.records, audit.right, audit.newer), (1000, 10, 1));
}

#[test]
fn what_cannot_be_audited_is_no_success() {
    let audited = Audited::new("--keys 20 -c 2 -n 200");
    let (server, _) = kv_server(|_| Some(b"-NOAUTH Authentication required.\r\n".to_vec()));
    let ran = run_kv(&format!("{server} --audit {}", audited.journal()));
    assert_eq!((ran.code, ran.faults()), (1, vec![("rejected", 20)]));
    assert_eq!(ran.report().audit.as_ref().unwrap().unread, 20);
    assert!(ran.stderr.contains("20 rejected, 20 keys not read"), "{}", ran.stderr);
    let (server, _) = kv_server(|asked| if asked.read < Some(7) { Some(asked.reply) } else { None });
    let ran = run_kv(&format!("{server} -c 1 --audit {}", audited.journal()));
    assert_eq!(ran.report().audit.as_ref().unwrap().unread, 13, "{}", ran.stderr);
    let none = audited.folder.path("none").display().to_string();
    assert_eq!(run_kv(&format!("{server} --audit {none}")).code, 66);
    let text = audited.folder.write("text", "hello");
    assert_eq!(run_kv(&format!("{server} --audit {}", text.display())).code, 65);
    assert_eq!(run_kv(&format!("{server} -n 1 --keys 5 -c 1 --journal {}", text.display())).code, 65);
}

#[test]
fn a_journal_that_cannot_be_written_ends_the_run() {
    let (server, _) = good_kv_server();
    assert_eq!(run_kv(&format!("{server} -n 100 --keys 100 --journal /proc/none")).code, 73);
    assert_eq!(run_kv(&format!("{server} -n 100 --keys 100 --journal /dev/full")).code, 73);
}

#[test]
fn the_table_has_a_row_for_each_kind_of_command() {
    let (server, _) = good_kv_server();
    let ran = run_kv(&format!("{server} -n 200 -c 2 --keys 10 --mix 1:1"));
    let names: Vec<&str> = ran.stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["load", "all", "get", "set", "checked"], "{}", ran.stdout);
    let ran = run_kv(&format!("{server} -n 200 -c 2 --keys 10 --mix 1:0 -H"));
    assert!(ran.stdout.starts_with("all ") && !ran.stdout.contains("set"), "{}", ran.stdout);
}

#[test]
fn real_documents_read_back() {
    let audited = Audited::new("--keys 20 -c 2 -n 200");
    let server = audited.server;
    for options in [
        "-n 100 -c 2 --keys 10",
        "--duration 20ms -c 2 -P 4 -j 2 --keys 10 --zipf 0.5",
        "-n 100 --rate 5000 -c 2 --keys 10 --spin 1us",
    ] {
        run_kv(&format!("{server} {options} --json")).assert_reads_back();
    }
    audited.audit().assert_reads_back();
}
