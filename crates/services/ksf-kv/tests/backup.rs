//! Backups of a server that goes on: what is in them, and what they cost those that write meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{Client, Serving, counter, engines};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::ask::{AskError, Asker};
use ksf_kv::backup::{BackupError, Made, backup};
use ksf_kv::load;
use ksf_kv::whole::FileError;
use ksf_kv::{Durability, Settings};
use ksf_proto::resp::{Arguments, Progress, RespLimits, Scan, scan};
use ksf_test::{own_network, stream, wait_until};

fn asker(serving: &Serving) -> Asker<TcpStream> {
    Asker::new(stream::connect(serving.address()))
}

/// Whether a backup was given up, or another one is under way.
fn is_refused(error: &BackupError, part: &str) -> bool {
    matches!(error, BackupError::Ask(AskError::Refused(text)) if text.contains(part))
}

/// A backup, whenever one is not given up.
fn backup_of(serving: &Serving, path: &Path) -> Made {
    loop {
        match backup(&mut asker(serving), path, 0) {
            Ok(made) => return made,
            Err(error) => assert!(is_refused(&error, "given up") || is_refused(&error, "under way"), "{error}"),
        }
    }
}

/// The commands of a file.
fn commands(bytes: &[u8]) -> Vec<Vec<&[u8]>> {
    let limits = RespLimits { arguments_max: 1 << 20, argument_bytes_max: 1 << 30, command_bytes_max: 1 << 30 };
    let (mut rest, mut commands) = (bytes, Vec::new());
    while !rest.is_empty() {
        let Ok(Scan::Command(length)) = scan(rest, &limits, &mut Progress::default()) else { panic!("no command") };
        commands.push(Arguments::of(&rest[..length]).unwrap().collect());
        rest = &rest[length..];
    }
    commands
}

/// The strings of a backup.
fn strings(path: &Path) -> BTreeMap<String, String> {
    let bytes = fs::read(path).unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let set = commands(&bytes).into_iter().filter(|words| words[0] == b"SET");
    set.map(|words| (text(words[1]), text(words[2]))).collect()
}

const ACCOUNTS: usize = 8;
const MONEY: i64 = 1000;

/// Moves money between two keys, which nobody may see apart, and counts in a key of its own.
fn work(mut client: Client, number: usize, stop: &AtomicBool, told: &AtomicU64, sent: &AtomicU64) {
    for round in 1.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let (from, to) = ((number + round) % ACCOUNTS, (number + 3 * round + 1) % ACCOUNTS);
        let amount = (round % 7).to_string();
        sent.store(round as u64, Ordering::SeqCst);
        client.send(&["SET", &format!("own {number}"), &format!("{round} {}", "v".repeat(round % 3000))]);
        client.send(&["MULTI"]);
        client.send(&["DECRBY", &format!("account {from}"), &amount]);
        client.send(&["INCRBY", &format!("account {to}"), &amount]);
        client.send(&["EXEC"]);
        assert_eq!(client.reply(), "+OK");
        told.store(round as u64, Ordering::SeqCst);
        assert_eq!(
            (client.reply(), client.reply(), client.reply()),
            ("+OK".into(), "+QUEUED".into(), "+QUEUED".into())
        );
        assert!(client.reply().starts_with("[:"));
    }
}

/// Also if the test fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_backup_under_load_is_one_moment() {
    own_network();
    const CLIENTS: usize = 4;
    const BACKUPS: usize = 6;
    for engine in engines() {
        for durability in [Durability::Always, Durability::None] {
            let (folder, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let settings = Settings { durability, ..Settings::default() };
            let serving = Serving::start_set(engine, folder.path(), Limits::default(), settings);
            let path = files.path().join("backup");
            let stop = AtomicBool::new(false);
            let counts: Vec<[AtomicU64; 2]> = (0..CLIENTS).map(|_| Default::default()).collect();
            let mut client = serving.connect();
            for number in 0..ACCOUNTS {
                client.send(&["SET", &format!("account {number}"), &MONEY.to_string()]);
                assert_eq!(client.reply(), "+OK");
            }
            std::thread::scope(|scope| {
                let _stop = StopAtEnd(&stop);
                for (number, [told, sent]) in counts.iter().enumerate() {
                    let (client, stop) = (serving.connect(), &stop);
                    scope.spawn(move || work(client, number, stop, told, sent));
                }
                let mut before = 0;
                for _ in 0..BACKUPS {
                    // Each shows another moment.
                    wait_until("some more is written", || {
                        counts.iter().map(|[told, _]| told.load(Ordering::SeqCst)).sum::<u64>() > before + 200
                    });
                    let told: Vec<u64> = counts.iter().map(|[told, _]| told.load(Ordering::SeqCst)).collect();
                    before = told.iter().sum();
                    let made = backup_of(&serving, &path);
                    let found = strings(&path);
                    assert_eq!((made.keys as usize, made.bytes), (found.len(), fs::metadata(&path).unwrap().len()));
                    let accounts =
                        (0..ACCOUNTS).map(|number| found[&format!("account {number}")].parse::<i64>().unwrap());
                    assert_eq!(
                        accounts.sum::<i64>(),
                        ACCOUNTS as i64 * MONEY,
                        "{engine}: a transaction is there in part"
                    );
                    for (number, (told, [_, sent])) in told.into_iter().zip(&counts).enumerate() {
                        let own = found.get(&format!("own {number}")).map_or("0", |own| own.split(' ').next().unwrap());
                        let round: u64 = own.parse().unwrap();
                        let sent = sent.load(Ordering::SeqCst);
                        assert!((told..=sent).contains(&round), "{engine} {durability}: {round} of {told} to {sent}");
                    }
                }
            });
            serving.stop();
        }
    }
}

const FILLED: &[&str] = &[
    "SET string value",
    "SET ends value PXAT 4000000000000",
    "SET ended value PXAT 1000",
    "HSET hash a 1 b 2",
    "PEXPIREAT hash 4000000000000",
    "RPUSH list a b c",
    "SADD set a b",
    "ZADD scored 1.5 a 2 b",
    "SET gone value",
    "DEL gone",
];

#[test]
fn a_backup_has_what_a_dump_has() {
    own_network();
    for engine in engines() {
        let (folder, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let serving = Serving::start(engine, folder.path());
        let path = files.path().join("backup");
        assert_eq!(backup_of(&serving, &path).keys, 0, "{engine}: an empty store");
        let mut client = serving.connect();
        FILLED.iter().for_each(|command| assert!(!client.ask(command).starts_with('-'), "{command}"));
        client.send(&["SET", "long", &"v".repeat(60_000)]);
        assert_eq!(client.reply(), "+OK");
        // What was there before is replaced.
        let made = backup_of(&serving, &path);
        let written = fs::read(&path).unwrap();
        assert_eq!(made.bytes, written.len() as u64);
        assert!(!path.with_extension("partial").exists());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "others may read the backup");
        serving.stop();
        let mut dumped = Vec::new();
        assert_eq!(ksf_kv::offline::dump(folder.path(), 0, &mut dumped).unwrap(), made.keys);
        let begin = b"*2\r\n$4\r\nECHO\r\n$12\r\nksf-backup 1\r\n";
        let end = written.windows(14).rposition(|window| window == b"*2\r\n$4\r\nECHO\r\n").unwrap();
        assert!(written[..end] == [&begin[..], &dumped].concat(), "{engine}");

        // Loaded, it makes the same store again; a start is between.
        let other = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, other.path());
        let paths = load::files(&path).unwrap();
        let (to, mut answers) = (stream::connect(serving.address()), Vec::new());
        let checked = load::check(&paths, 0).unwrap();
        assert_eq!(checked.bytes, made.bytes);
        let loaded = load::load(&paths, 0, &to, &to, |count| answers.push(count)).unwrap();
        assert_eq!((loaded.commands, loaded.errors, loaded.first_error), (checked.commands, 0, None));
        assert_eq!(answers.last(), Some(&checked.commands));
        serving.stop();
        let mut again = Vec::new();
        ksf_kv::offline::dump(other.path(), 0, &mut again).unwrap();
        assert!(again == dumped, "{engine}");

        // Whatever is missing or changed is found, before anything is loaded.
        let cut = files.path().join("cut");
        let tail = (written.len() - 200..written.len()).chain((0..written.len()).step_by(997));
        for at in tail {
            fs::write(&cut, &written[..at]).unwrap();
            let told = load::check(std::slice::from_ref(&cut), 0).map_err(|error| error.to_string());
            assert!(at == 0 || told.as_ref().is_err_and(|told| told.contains("byte")), "cut at {at}: {told:?}");
            let mut changed = written.clone();
            changed[at] ^= 2;
            fs::write(&cut, &changed).unwrap();
            let told = load::check(std::slice::from_ref(&cut), 0).map_err(|error| error.to_string());
            // Without its first command it is no backup.
            assert!(at < begin.len() || told.is_err(), "changed at {at}: {told:?}");
        }
        let doubled = [&written[..], &written].concat();
        fs::write(&cut, &doubled).unwrap();
        assert!(load::check(&[cut], 0).unwrap_err().to_string().contains("behind its end"));
    }
}

/// A connection that calls `interrupt` once, after `left` bytes were read.
struct Interrupted<F> {
    stream: TcpStream,
    left: usize,
    interrupt: F,
}

impl<F: FnMut() -> io::Result<()>> Read for Interrupted<F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            (self.interrupt)()?;
            self.left = usize::MAX;
        }
        let bytes = into.len().min(self.left);
        let read = self.stream.read(&mut into[..bytes])?;
        self.left -= read;
        Ok(read)
    }
}

impl<F> Write for Interrupted<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_backup_that_breaks_off_leaves_nothing_behind() {
    own_network();
    for engine in engines() {
        let (folder, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        FILLED.iter().for_each(|command| assert!(!client.ask(command).starts_with('-'), "{command}"));
        let path = files.path().join("backup");
        fs::write(&path, "the backup of yesterday").unwrap();
        for left in [0, 3, 5, 60, 300, 4000, 5000, 9000, 20_000] {
            let interrupt = || -> io::Result<()> { Err(io::ErrorKind::ConnectionReset.into()) };
            let breaking = Interrupted { stream: stream::connect(serving.address()), left, interrupt };
            let error = backup(&mut Asker::new(breaking), &path, 0).unwrap_err();
            // It may be that the server has not seen yet that the one before ended.
            assert!(matches!(&error, BackupError::Ask(_)), "{engine}: {left}: {error}");
            let names: Vec<_> = fs::read_dir(files.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["backup"], "{engine}");
            assert_eq!(fs::read(&path).unwrap(), b"the backup of yesterday");
        }
        backup_of(&serving, &path);
        assert_eq!(strings(&path)["string"], "value");
        let missing = files.path().join("no such folder").join("backup");
        assert!(matches!(backup(&mut asker(&serving), &missing, 0), Err(BackupError::File { .. })));
        serving.stop();
    }
}

/// The two are of different servers, which know nothing of each other.
#[test]
fn second_backup_into_a_file_is_refused_while_the_first_copies() {
    own_network();
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [one, two] = [0, 1].map(|at| Serving::start(EngineKind::Epoll, folders[at].path()));
    for (serving, value) in [(&one, "one"), (&two, "two")] {
        assert_eq!(serving.connect().ask(&format!("SET string {value}")), "+OK");
    }
    let path = folders[2].path().join("backup");
    for left in [0, 60, 5000] {
        let mut second = None;
        let interrupt = || {
            second = Some(backup(&mut asker(&two), &path, 0));
            Ok(())
        };
        let stream = stream::connect(one.address());
        backup(&mut Asker::new(Interrupted { stream, left, interrupt }), &path, 0).unwrap();
        let refused = second.expect("the first one reads more");
        let is_refused = |error: &FileError| error.source.kind() == io::ErrorKind::WouldBlock;
        assert!(matches!(&refused, Err(BackupError::File(error)) if is_refused(error)), "{left}: {refused:?}");
        assert_eq!(strings(&path)["string"], "one", "{left}");
    }
    backup_of(&two, &path);
    assert_eq!(strings(&path)["string"], "two");
    one.stop();
    two.stop();
}

/// A client that begins a backup and asks for nothing, or asks and does not read, costs the others only room that is there.
#[test]
fn a_backup_that_nobody_goes_on_with_gives_way() {
    const KEYS: usize = 20;
    const ROUNDS: usize = 60;
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        let overwrite = |client: &mut Client, rounds: usize| {
            for round in 0..rounds {
                (0..KEYS).for_each(|key| client.send(&["SET", &key.to_string(), &format!("{round:020000}")]));
                (0..KEYS).for_each(|_| assert_eq!(client.reply(), "+OK", "{engine}: {round}"));
            }
        };
        overwrite(&mut client, 3);
        let mut slow = serving.connect();
        assert!(slow.ask("KSF.BACKUP BEGIN").starts_with('['), "{engine}");
        // What this asks for it does not read.
        slow.send(&["KSF.BACKUP", "READ", "0", "0", "0", "1048576"]);
        assert!(client.ask("KSF.BACKUP BEGIN").contains("a backup is under way"), "{engine}");
        let before = counter(&serving, "segments_cleaned");
        overwrite(&mut client, ROUNDS);
        assert!(counter(&serving, "segments_cleaned") > before + 5, "{engine}: nothing was cleaned");
        // It was on its way when the backup was given up, and its client is told with the next word.
        let mut head = String::new();
        slow.0.read_line(&mut head).unwrap();
        assert_eq!(head, "$1048576\r\n", "{engine}");
        let mut content = vec![0; (1 << 20) + 2];
        slow.0.read_exact(&mut content).unwrap();
        assert!(slow.ask("KSF.BACKUP DONE 0 0").contains("the backup was given up"), "{engine}");
        assert!(slow.ask("KSF.BACKUP READ 0 0 0 4096").contains("the backup was given up"), "{engine}");
        assert!(slow.ask("KSF.BACKUP END").contains("the backup was given up"), "{engine}");
        // While the log is still short of room after all that was written, another one is given up, too.
        loop {
            assert!(client.ask("KSF.BACKUP BEGIN").starts_with('['), "{engine}: it stands in the way of others");
            let told = client.ask("KSF.BACKUP END");
            if told == "+OK" {
                break;
            }
            assert!(told.contains("the backup was given up"), "{engine}: {told}");
        }
        assert!(client.ask("KSF.BACKUP END").contains("no backup on this connection"), "{engine}");
        drop((client, slow));
        serving.stop();
    }
}

#[test]
fn words_that_make_no_sense_are_refused() {
    own_network();
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { password: Some(b"secret".to_vec()), ..Settings::default() };
    let serving = Serving::start_set(EngineKind::Epoll, folder.path(), Limits::default(), settings);
    let mut client = serving.connect();
    assert!(client.ask("KSF.BACKUP BEGIN").starts_with("-NOAUTH"));
    let path = folder.path().join("file");
    assert!(is_refused(&backup(&mut asker(&serving), &path, 0).unwrap_err(), "NOAUTH"));
    assert_eq!(client.ask("AUTH secret"), "+OK");
    assert_eq!(client.ask("SAVE"), "+OK");
    assert_eq!(client.ask("BGSAVE"), "+Background saving started");
    assert_eq!(client.ask("BGSAVE SCHEDULE"), "+Background saving started");
    assert!(client.ask("BGSAVE NOW").contains("syntax error"));
    assert!(client.ask("LASTSAVE").trim_start_matches(':').parse::<u64>().unwrap() > 1_500_000_000);
    for (words, part) in [
        ("KSF.BACKUP", "wrong number of arguments"),
        ("KSF.BACKUP NONE", "unknown subcommand 'NONE'"),
        ("KSF.BACKUP BEGIN now", "wrong number of arguments for 'ksf.backup|begin'"),
        ("KSF.BACKUP READ 0 0", "wrong number of arguments for 'ksf.backup|read'"),
        ("KSF.BACKUP READ 0 0 0 4096", "no backup on this connection"),
        ("KSF.BACKUP DONE 0 0", "no backup on this connection"),
        ("KSF.BACKUP END", "no backup on this connection"),
    ] {
        assert!(client.ask(words).contains(part), "{words}");
    }
    assert!(client.ask("KSF.BACKUP begin").starts_with('['));
    for words in
        ["0 0 0 0", "0 0 1 4096", "0 0 0 4095", "0 6 0 4096", "300 0 0 4096", "0 0 1048576 4096", "0 0 0 1052672"]
    {
        assert!(client.ask(&format!("KSF.BACKUP READ {words}")).contains("no such blocks"), "{words}");
    }
    assert!(client.ask("KSF.BACKUP READ 0 0 -1 4096").contains("not an integer"));
    assert!(client.ask("KSF.BACKUP READ 0 0 9223372036854771712 4096").contains("no such blocks"));
    // What a client says was copied is kept: no more than there is.
    for (log, segment) in [(65_536, 0), (999, 0), (0, 1_000_000), (0, i64::MAX)] {
        let answer = client.ask(&format!("KSF.BACKUP DONE {log} {segment}"));
        assert!(answer.contains("no such blocks"), "{log} {segment}: {answer}");
    }
    assert_eq!(client.ask("KSF.BACKUP READ 0 5 1044480 4096").len(), 4096);
    assert_eq!(client.ask("MULTI"), "+OK");
    for words in ["KSF.BACKUP END", "SAVE", "BGSAVE", "LASTSAVE"] {
        assert!(client.ask(words).contains("not allowed inside a transaction"), "{words}");
    }
    assert!(client.ask("EXEC").starts_with("-EXECABORT"));
    assert_eq!(client.ask("KSF.BACKUP END"), "+OK");
    serving.stop();
}
