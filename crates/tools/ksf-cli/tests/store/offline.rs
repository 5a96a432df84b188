//! What is done with a store that is not served: check, dump, salvage; and load, which fills another one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ksf_test::{stdout, succeeds};

use super::{batches_with_records, connect, kill, start};
use crate::store::client::command;
use crate::support::{Folder, first_cpu, private_network_and_run, run, stderr};

pub(crate) fn tool(words: &[&str], status: i32) -> String {
    let output = run(&[&["store"], words].concat());
    let text = stdout(&output) + &stderr(&output);
    assert_eq!(output.status.code(), Some(status), "{words:?}: {text}");
    text
}

/// A store with 200 keys, one of which ends late, and one that was deleted; killed.
fn fill(data: &Path) {
    let server = start("epoll", data, &["--cpus", &first_cpu()]);
    let mut client = connect(&server);
    for at in 0..200 {
        client.write(&command(&[b"SET", format!("key {at}").as_bytes(), format!("v\r\n{at}").as_bytes()])).unwrap();
        assert_eq!(client.read().unwrap(), "+OK");
    }
    assert_eq!(client.ask("PEXPIREAT late 4000000000000"), ":0");
    assert_eq!(client.ask("SET late value PXAT 4000000000000"), "+OK");
    assert_eq!(client.ask("SET gone value"), "+OK");
    assert_eq!(client.ask("DEL gone"), ":1");
    kill(server);
}

#[test]
fn a_dump_makes_the_same_store_again() {
    let folder = Folder::new();
    let (data, file) = (folder.path("store"), folder.path("dump"));
    let (dir, name) = (data.to_str().unwrap(), file.to_str().unwrap());
    fill(&data);
    let before = fs::read(data.join("superblock")).unwrap();
    let said = tool(&["check", dir], 0);
    assert!(said.contains("whole; 201 keys, 1 starts") && said.contains("log 0: 203 records"), "{said}");
    assert!(tool(&["dump", dir, "--output", name], 0).contains("201 keys"), "dump");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "others may read the dump");
    // A file that is there is not overwritten.
    tool(&["dump", dir, "--output", name], 71);
    assert!(fs::read(data.join("superblock")).unwrap() == before, "the store was changed");

    let password = folder.path("password");
    fs::write(&password, "secret").unwrap();
    let other = start("epoll", &folder.path("other"), &["--password-file", password.to_str().unwrap()]);
    let to = other.address(" tcp ").to_string();
    let without = tool(&["load", name, "--to", &to], 1);
    assert!(without.contains("201 commands, 201 errors") && without.contains("NOAUTH"), "{without}");
    let load = ["load", name, "--to", &to, "--password-file", password.to_str().unwrap()];
    assert!(tool(&load, 0).contains("201 commands, 0 errors"));
    let mut client = connect(&other);
    assert_eq!(client.ask("AUTH secret"), "+OK");
    assert_eq!(client.ask("DBSIZE"), ":201");
    assert!(client.ask("PTTL late").trim_start_matches(':').parse::<u64>().unwrap() > 0);
    client.write(&command(&[b"GET", b"key 7"])).unwrap();
    assert_eq!(client.read().unwrap(), "v\r\n7");
    // In use: nobody looks.
    let busy = tool(&["check", folder.path("other").to_str().unwrap()], 69);
    assert!(busy.contains("another process"), "{busy}");
    other.stop();
    assert!(
        stdout(&run(&["store", "dump", dir]))
            == stdout(&run(&["store", "dump", folder.path("other").to_str().unwrap()])),
        "the stores differ"
    );
}

/// A dump or a salvage that does not fit leaves neither the file nor a part of it, and one of a damaged store makes none.
#[test]
fn a_dump_that_cannot_be_whole_leaves_no_file() {
    if private_network_and_run().is_none() {
        return;
    }
    let (data, small) = (Path::new("/run/data"), Path::new("/run/small"));
    let server = start("epoll", data, &["--cpus", &first_cpu()]);
    let mut client = connect(&server);
    for key in 0..100 {
        client.write(&command(&[b"SET", format!("key {key}").as_bytes(), &[b'v'; 12_000]])).unwrap();
        assert_eq!(client.read().unwrap(), "+OK");
    }
    kill(server);
    fs::create_dir(small).unwrap();
    succeeds(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small.to_str().unwrap()]);
    let names = || fs::read_dir(small).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    for how in ["dump", "salvage"] {
        let said = tool(&[how, data.to_str().unwrap(), "--output", "/run/small/file"], 71);
        assert!(said.contains("No space left"), "{said}");
        assert!(names().is_empty(), "{how}: {:?}", names());
    }
    let log = data.join("log-000");
    let mut bytes = fs::read(&log).unwrap();
    let damaged = batches_with_records(&bytes)[50];
    bytes[damaged + 70] ^= 1;
    fs::write(&log, &bytes).unwrap();
    tool(&["dump", data.to_str().unwrap(), "--output", "/run/small/file"], 65);
    assert!(names().is_empty(), "{:?}", names());
}

/// Each tool and the start name the file, whose it is and what to do, and change nothing.
#[test]
fn a_log_of_another_store_is_refused_by_each_tool() {
    let folder = Folder::new();
    let (data, other) = (folder.path("store"), folder.path("other"));
    let dir = data.to_str().unwrap();
    fill(&data);
    fill(&other);
    fs::copy(other.join("log-000"), data.join("log-000")).unwrap();
    let before = fs::read(data.join("log-000")).unwrap();
    let superblock = fs::read(data.join("superblock")).unwrap();
    let start = ["--listen", "127.0.0.1:0", "--log-bytes", "8m", "--data", dir];
    for words in [&["check", dir][..], &["dump", dir], &["salvage", dir], &start] {
        let said = tool(words, 65);
        assert!(["log-000", "belongs to log 0 of store", "backup"].iter().all(|part| said.contains(part)), "{said}");
    }
    assert!(fs::read(data.join("log-000")).unwrap() == before, "the log was changed");
    assert!(fs::read(data.join("superblock")).unwrap() == superblock, "the superblock was changed");
}

#[test]
fn what_is_no_file_of_commands_is_told() {
    let folder = Folder::new();
    let server = start("epoll", &folder.path("store"), &[]);
    let (to, file) = (server.address(" tcp ").to_string(), folder.path("file"));
    let load = ["load", file.to_str().unwrap(), "--to", &to];
    for (content, status, part) in [
        (&b"REDIS0010abc"[..], 65, "RDB"),
        (b"*2\r\n$3\r\nGET\r\n$1\r\na\r\nGET a\r\n", 65, "byte 20 begins no command"),
        (b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*2\r\n$3", 65, "byte 20 is not whole"),
        (b"#TS:1628217470\r\n*2\r\n$3\r\nGET\r\n$1\r\na\r\n", 0, "1 commands, 0 errors"),
        (b"*1\r\n$8\r\nNONSENSE\r\n", 1, "unknown command"),
    ] {
        fs::write(&file, content).unwrap();
        let said = tool(&load, status);
        assert!(said.contains(part), "{said}");
    }
    fs::remove_file(&file).unwrap();
    tool(&load, 66);
    server.stop();
    let nothing = tool(&["check", folder.path("nothing").to_str().unwrap()], 66);
    assert!(nothing.contains("no store") && nothing.contains("--data"), "{nothing}");
    let lock = folder.path("store").join("lock");
    fs::remove_file(&lock).unwrap();
    let dir = folder.path("store");
    let without = tool(&["check", dir.to_str().unwrap()], 66);
    assert!(without.contains(lock.to_str().unwrap()) && without.contains("make an empty file"), "{without}");
    fs::write(&lock, "").unwrap();
    tool(&["check", dir.to_str().unwrap()], 0);
    fs::write(&file, "").unwrap();
    assert!(tool(&load, 69).contains("start the store"));
}

#[test]
fn what_damage_leaves_is_salvaged() {
    let folder = Folder::new();
    let data = folder.path("store");
    let dir = data.to_str().unwrap();
    fill(&data);
    let log = data.join("log-000");
    let mut bytes = fs::read(&log).unwrap();
    // That of `key 50`.
    let damaged = batches_with_records(&bytes)[50];
    bytes[damaged + 70] ^= 1;
    fs::write(&log, &bytes).unwrap();
    let said = tool(&["check", dir], 65);
    assert!(said.contains("log 0 is damaged from byte"), "{said}");
    tool(&["dump", dir], 65);
    let output = run(&["store", "salvage", dir]);
    assert!(output.status.success() && stderr(&output).contains("200 keys"), "{}", stderr(&output));
    let commands = stdout(&output);
    assert!(commands.contains("key 199") && !commands.contains("key 50\r\n") && !commands.contains("gone"));
    assert!(fs::read(&log).unwrap() == bytes, "the store was changed");
}
