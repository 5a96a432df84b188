//! What Redis itself wrote, loaded: snapshots and AOFs with every kind of key, whole, cut and damaged.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use crate::common::{Client, Redis, Serving};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_kv::disk::DiskOptions;
use ksf_kv::load::{self, IntoFolderError, LoadError};
use ksf_test::{own_network, stream, wait_until};

/// Sends a command whose words may have spaces in them.
fn command<S: Read + Write>(client: &mut Client<S>, words: &[&str]) {
    client.send(words);
    let reply = client.reply();
    assert!(!reply.starts_with('-'), "{words:?}: {reply}");
}

/// One command with many words.
fn many<S: Read + Write>(client: &mut Client<S>, name: &str, key: &str, words: impl Iterator<Item = String>) {
    let words: Vec<String> = words.collect();
    let all: Vec<&str> = [name, key].into_iter().chain(words.iter().map(|word| &word[..])).collect();
    command(client, &all);
}

/// Every kind of key, in small and large encodings.
fn fill<S: Read + Write>(client: &mut Client<S>) {
    for words in [
        "SET string hello",
        "SET small 7",
        "SET minus -130",
        "SET middle 40000",
        "SET large 1234567890",
        "SET largest 9223372036854775807",
        "SET ends value PXAT 4000000000123",
        "RPUSH list a b 1 127 128 4095 4096 -4097 32768 -8388609 2147483648 -9223372036854775808",
        "SADD integers 1 2 300",
        "SADD wide 1 70000 -5",
        "SADD widest 1 9000000000",
        "SADD set a b c 1",
        "HSET hash a 1 b two c -3",
        "PEXPIREAT hash 4000000000456",
        "ZADD scored 1.5 a 2 b -3 c -0.5 d inf e -inf f 0.25 g 123456789012 h",
    ] {
        command(client, &words.split(' ').collect::<Vec<_>>());
    }
    command(client, &["SET", "", "the empty key"]);
    command(client, &["SET", "empty", ""]);
    command(client, &["SET", "line\r\nend", "$3\r\nabc\r\n"]);
    command(client, &["SET", "compressed", &"abc ".repeat(5000)]);
    let noise: String =
        (0..40_000_u32).map(|at| char::from(33 + (at.wrapping_mul(2_654_435_761) >> 25) as u8 % 90)).collect();
    command(client, &["SET", "noise", &noise]);
    let element = |at: u32| {
        if at.is_multiple_of(3) { at.to_string() } else { format!("element {at} {}", "e".repeat(at as usize % 90)) }
    };
    many(client, "RPUSH", "long list", (0..3000).map(element));
    many(client, "RPUSH", "list of long ones", (0..6).map(|at| format!("{at}{}", "x".repeat(20_000))));
    many(client, "SADD", "many integers", (0..600).map(|at| (at * 7).to_string()));
    many(client, "SADD", "many members", (0..600).map(|at| format!("member {at}")));
    many(client, "HSET", "many fields", (0..600).flat_map(|at| [format!("field {at}"), format!("value {at}")]));
    many(client, "HSET", "long value", ["field".to_owned(), "v".repeat(100)].into_iter());
    many(
        client,
        "ZADD",
        "many scored",
        (0..200).flat_map(|at| [format!("{}", at as f64 / 8.0), format!("member {at}")]),
    );
    // So much that it becomes several commands.
    many(client, "HSET", "much", (0..60).flat_map(|at| [format!("field {at}"), "w".repeat(10_000)]));
}

/// All that a server has, one line for each key; what is in no order is put into one.
fn shown<S: Read + Write>(client: &mut Client<S>) -> Vec<String> {
    let mut lines = Vec::new();
    for key in [
        "string",
        "small",
        "minus",
        "middle",
        "large",
        "largest",
        "ends",
        "",
        "empty",
        "line\r\nend",
        "compressed",
        "noise",
        "list",
        "long list",
        "list of long ones",
        "integers",
        "wide",
        "widest",
        "set",
        "many integers",
        "many members",
        "hash",
        "many fields",
        "long value",
        "much",
        "scored",
        "many scored",
        "more",
        "counter",
        "moved",
        "gone",
    ] {
        client.send(&["TYPE", key]);
        let kind = client.reply();
        let question: &[&str] = match &kind[1..] {
            "string" => &["GET", key],
            "list" => &["LRANGE", key, "0", "-1"],
            "set" => &["SMEMBERS", key],
            "hash" => &["HGETALL", key],
            "zset" => &["ZRANGE", key, "0", "-1", "WITHSCORES"],
            _ => &["EXISTS", key],
        };
        client.send(question);
        let mut value = client.reply();
        if kind == "+set" {
            let mut members: Vec<&str> = value.trim_matches(['[', ']']).split(' ').collect();
            members.sort_unstable();
            value = members.join(" ");
        }
        if kind == "+hash" {
            // Values have no spaces but in one hash, whose fields come with theirs.
            let words: Vec<&str> = value.trim_matches(['[', ']']).split(' ').collect();
            let width = if key == "many fields" {
                4
            } else if key == "much" {
                3
            } else {
                2
            };
            let mut fields: Vec<String> = words.chunks(width).map(|field| field.join(" ")).collect();
            fields.sort_unstable();
            value = fields.join(", ");
        }
        client.send(&["PEXPIRETIME", key]);
        lines.push(format!("{key} {kind} {} {value}", client.reply()));
    }
    lines.push(client.ask("DBSIZE"));
    lines
}

/// What a server of ours shows that these files were loaded into.
fn loaded(path: &Path) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let files = load::files(path).unwrap();
    let checked = load::check(&files, 0).unwrap();
    let to = stream::connect(serving.address());
    let loaded = load::load(&files, 0, &to, &to, |_| {}).unwrap();
    assert_eq!((loaded.commands, loaded.errors, loaded.first_error), (checked.commands, 0, None));
    let shown = shown(&mut serving.connect());
    serving.stop();
    shown
}

/// What is wrong with a file, by its name and its place.
fn fault(path: &Path) -> String {
    let files = load::files(path).unwrap();
    let error = load::check(&files, 0).unwrap_err();
    assert!(matches!(error, LoadError::File { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_snapshot_of_redis_is_loaded_whole_or_not_at_all() {
    own_network();
    let Some(mut redis) = Redis::start() else { return };
    fill(&mut redis.client);
    command(&mut redis.client, &["SET", "ended", "value", "PX", "1"]);
    let expected = shown(&mut redis.client);
    assert_eq!(redis.client.ask("SAVE"), "+OK");
    let path = redis.folder.path("dump.rdb");
    let lines = loaded(&path);
    for (line, expected) in lines.iter().zip(&expected).take(expected.len() - 1) {
        assert!(line == expected, "{}\n{}", &line[..line.len().min(300)], &expected[..expected.len().min(300)]);
    }
    // Redis' own snapshot may have the key that has ended, or not any more.
    let keys = |line: &String| line[1..].parse::<u64>().unwrap();
    let (ours, theirs) = (keys(lines.last().unwrap()), keys(expected.last().unwrap()));
    assert!((theirs.saturating_sub(1)..=theirs + 1).contains(&ours), "{ours} keys, and {theirs}");

    let whole = fs::read(&path).unwrap();
    let other = redis.folder.path("other.rdb");
    for at in (1..whole.len()).step_by(whole.len() / 40).chain(whole.len() - 20..whole.len()) {
        fs::write(&other, &whole[..at]).unwrap();
        let told = fault(&other);
        assert!(told.contains("other.rdb") && told.contains("byte"), "cut at {at}: {told}");
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        fs::write(&other, &damaged).unwrap();
        let told = fault(&other);
        assert!(told.contains("other.rdb") && told.contains("byte"), "damaged at {at}: {told}");
    }
    assert_eq!(redis.client.ask("XADD log 1-1 a b"), "1-1");
    assert_eq!(redis.client.ask("SAVE"), "+OK");
    let told = fault(&path);
    assert!(told.contains("dump.rdb") && told.contains("the key \"log\" is a stream"), "{told}");
    assert_eq!(redis.client.ask("DEL log"), ":1");
    let library = "#!lua name=library\nredis.register_function('f', function() return 1 end)";
    command(&mut redis.client, &["FUNCTION", "LOAD", library]);
    assert_eq!(redis.client.ask("SAVE"), "+OK");
    assert!(fault(&path).contains("it has functions, which cannot be taken"), "{}", fault(&path));
}

/// What is written behind the base of an AOF.
fn go_on<S: Read + Write>(client: &mut Client<S>) {
    command(client, &["RPUSH", "more", "1", "2"]);
    command(client, &["DEL", "string"]);
    for words in ["MULTI", "INCRBY counter 5", "SET moved 1", "EXEC"] {
        command(client, &words.split(' ').collect::<Vec<_>>());
    }
    command(client, &["SET", "small", "8"]);
}

/// Has Redis write its AOF anew, and waits until that is done.
fn rewrite(redis: &mut Redis) {
    assert!(redis.client.ask("BGREWRITEAOF").starts_with('+'));
    wait_until("the AOF is rewritten", || {
        let info = redis.client.ask("INFO persistence");
        ["aof_rewrite_in_progress:0", "aof_rewrite_scheduled:0"].iter().all(|line| info.contains(line))
    });
}

#[test]
fn an_aof_of_redis_is_loaded_with_its_base_and_what_came_after() {
    own_network();
    for preamble in ["yes", "no"] {
        let options = [
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
            "--aof-use-rdb-preamble",
            preamble,
            "--aof-timestamp-enabled",
            "yes",
        ];
        let Some(mut redis) = Redis::start_with(&options) else { return };
        fill(&mut redis.client);
        let folder = redis.folder.path("appendonlydir");
        assert!(loaded(&folder) == shown(&mut redis.client), "{preamble}: nothing but what came after the base");
        rewrite(&mut redis);
        go_on(&mut redis.client);
        let expected = shown(&mut redis.client);
        let manifest = folder.join("appendonly.aof.manifest");
        for path in [&folder, &manifest] {
            assert!(loaded(path) == expected, "{preamble}: {}", path.display());
        }
        let files = load::files(&folder).unwrap();
        assert_eq!(files.len(), 2, "{files:?}");
        assert_eq!(files[0].extension().unwrap(), if preamble == "yes" { "rdb" } else { "aof" });

        // As Redis wrote it before version 7: one file, of which the base is the front.
        let joined = redis.folder.path("appendonly.aof");
        let parts: Vec<Vec<u8>> = files.iter().map(|path| fs::read(path).unwrap()).collect();
        fs::write(&joined, parts.concat()).unwrap();
        assert!(loaded(&joined) == expected, "{preamble}: joined");

        // Cut anywhere but between commands that belong to no transaction.
        let text = &parts[1];
        let transaction = text.windows(5).position(|window| window == b"MULTI").unwrap() - "*1\r\n$5\r\n".len();
        let end = text.windows(4).position(|window| window == b"EXEC").unwrap() + "EXEC\r\n".len();
        for at in transaction + 1..end {
            fs::write(&files[1], &text[..at]).unwrap();
            let told = fault(&files[1]);
            assert!(told.contains(".incr.aof") && told.contains("is not whole"), "cut at {at}: {told}");
        }
        fs::write(&files[1], &text[..end - 1]).unwrap();
        let told = fault(&folder);
        let place = text.windows(14).position(|window| window == b"*1\r\n$4\r\nEXEC\r\n").unwrap();
        assert!(told.contains(&format!("the command at byte {place} is not whole")), "{told}");
        fs::write(&files[1], &text[..place]).unwrap();
        let told = fault(&folder);
        assert!(told.contains(&format!("the transaction at byte {transaction} is not whole")), "{told}");
        fs::remove_file(&files[1]).unwrap();
        let told = load::check(&files, 0).unwrap_err().to_string();
        assert!(told.contains(".incr.aof"), "{told}");
    }
}

fn options() -> (DiskOptions, Limits, Settings) {
    let limits = Limits { message_bytes_max: 8 << 20, connection_bytes_max: 32 << 20, ..Limits::default() };
    (DiskOptions { logs: 1, segment_bytes: 2 << 20, places: 8, ..DiskOptions::default() }, limits, Settings::default())
}

fn into_folder(path: &Path, folder: &Path) -> Result<load::Loaded, IntoFolderError> {
    let files: Vec<PathBuf> = load::files(path).unwrap();
    load::into_folder(&files, 0, folder, options(), |error| panic!("a write failed: {error}"), |_| {})
}

#[test]
fn a_folder_has_all_that_was_loaded_or_is_not_there() {
    own_network();
    let around = tempfile::tempdir().unwrap();
    let (folder, file, partial) =
        (around.path().join("store"), around.path().join("file"), around.path().join("store.partial"));
    let commands: String =
        (0..2000).map(|key| format!("*3\r\n$3\r\nSET\r\n$4\r\n{key:04}\r\n$5\r\nvalue\r\n")).collect();
    fs::write(&file, format!("{commands}*2\r\n$3\r\nGET")).unwrap();
    assert!(matches!(into_folder(&file, &folder), Err(IntoFolderError::Load(LoadError::File { .. }))));
    assert!(!folder.exists() && !partial.exists(), "what was begun is left");
    fs::write(&file, &commands).unwrap();
    fs::create_dir(&partial).unwrap();
    assert!(matches!(into_folder(&file, &folder), Err(IntoFolderError::LeftOver(path)) if path == partial));
    assert!(partial.exists(), "it may be that of another load");
    fs::remove_dir(&partial).unwrap();
    let loaded = into_folder(&file, &folder).unwrap();
    assert_eq!((loaded.commands, loaded.errors), (2000, 0));
    assert!(!partial.exists());
    let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.len() == 3 && names.iter().all(|name| name != "load.sock"), "{names:?}");
    assert!(matches!(into_folder(&file, &folder), Err(IntoFolderError::NotEmpty(path)) if path == folder));
    let serving = Serving::start(EngineKind::Epoll, &folder);
    let mut client = serving.connect();
    assert_eq!((client.ask("DBSIZE"), client.ask("GET 1999")), (":2000".into(), "value".into()));
    serving.stop();

    // An empty folder takes it, too. Where a command is answered with an error, the folder stays as it was.
    let empty = around.path().join("empty");
    fs::create_dir(&empty).unwrap();
    fs::write(&file, "*1\r\n$8\r\nNONSENSE\r\n*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n").unwrap();
    let told = into_folder(&file, &empty).unwrap_err();
    assert!(matches!(told, IntoFolderError::Refused { commands: 2, errors: 1, .. }), "{told}");
    assert!(told.to_string().contains("unknown command 'NONSENSE'"), "{told}");
    assert!(fs::read_dir(&empty).unwrap().next().is_none() && !with_partial(&empty).exists());
    fs::write(&file, "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n").unwrap();
    assert_eq!(into_folder(&file, &empty).unwrap().errors, 0);
    assert_eq!(ksf_kv::offline::check(&empty).unwrap().keys, 1);

    // And so it does where the log has no room for all.
    let small = around.path().join("small");
    let value = "v".repeat(1000);
    let commands: String =
        (0..20_000).map(|key| format!("*3\r\n$3\r\nSET\r\n$5\r\n{key:05}\r\n$1000\r\n{value}\r\n")).collect();
    fs::write(&file, commands).unwrap();
    let told = into_folder(&file, &small).unwrap_err();
    assert!(told.to_string().contains("the log is full"), "{told}");
    assert!(!small.exists() && !with_partial(&small).exists());
}

fn with_partial(folder: &Path) -> PathBuf {
    PathBuf::from(format!("{}.partial", folder.display()))
}

#[test]
fn what_no_store_can_take_is_told_by_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    for (content, part) in [
        (
            &b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*2\r\n$6\r\nselect\r\n$1\r\n3\r\n"[..],
            "byte 23 begins keys of database 3",
        ),
        (b"*0\r\n", "byte 0 begins no command"),
        (b"REDIS0010\xfe\x01\xfb\x01\x00\x00\x01k\x01v", "byte 9 begins keys of database 1"),
        (b"REDIS0010\xfe\x00", "the RDB snapshot is cut: what begins at byte 11 is not whole"),
        (b"*2\r\n$4\r\nECHO\r\n$12\r\nksf-backup 2\r\n", "at byte 0 the backup begins as one of another version"),
        (
            b"*2\r\n$4\r\nECHO\r\n$12\r\nksf-backup 1\r\n*2\r\n$4\r\nECHO\r\n$1\r\na\r\n",
            "at byte 33 the backup has what",
        ),
    ] {
        fs::write(&file, content).unwrap();
        let told = fault(&file);
        assert!(told.contains(part) && told.starts_with(&file.display().to_string()), "{told}");
    }
    // Of somebody's commands ECHO is one like any other, and an empty snapshot is whole.
    fs::write(&file, b"*1\r\n$4\r\nPING\r\n*2\r\n$4\r\nECHO\r\n$12\r\nksf-backup 1\r\n").unwrap();
    assert_eq!(load::check(std::slice::from_ref(&file), 0).unwrap().commands, 2);
    fs::write(&file, b"REDIS0010\xfe\x00\xff\0\0\0\0\0\0\0\0").unwrap();
    assert_eq!(load::check(&[file], 0).unwrap().commands, 0);
    let told = load::files(folder.path()).unwrap_err().to_string();
    assert!(told.contains("the folder has 0 files that end in .manifest"), "{told}");
}
