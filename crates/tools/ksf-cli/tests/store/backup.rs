//! `ksf store backup` as its users run it, and what takes the file.

use std::fs;
use std::process::Stdio;

use ksf_test::{Running, program_or_skip, stdout};
use rustix::process::Signal;

use super::{connect, start};
use crate::store::client::command;
use crate::store::offline::tool;
use crate::support::{Folder, Server, ksf, run};

#[test]
fn a_backup_is_made_while_the_store_is_served_and_loaded_again() {
    let folder = Folder::new();
    let (data, file, password) = (folder.path("store"), folder.path("backup"), folder.write("password", "secret\n"));
    let (name, password) = (file.to_str().unwrap(), password.to_str().unwrap());
    let socket = format!("unix:{}", folder.path("socket").display());
    let args = ["store", "--engine", "epoll", "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--listen", &socket];
    let more = ["--password-file", password, "--data", data.to_str().unwrap()];
    let server = Server::start(&[&args[..], &more[..]].concat(), 2);
    let tcp = server.address(" tcp ").to_string();
    let mut client = connect(&server);
    assert_eq!(client.ask("AUTH secret"), "+OK");
    for at in 0..200 {
        client.write(&command(&[b"SET", format!("key {at}").as_bytes(), format!("v\r\n{at}").as_bytes()])).unwrap();
        assert_eq!(client.read().unwrap(), "+OK");
    }
    assert!(tool(&["backup", &socket, name], 77).contains("NOAUTH"));
    fs::write(folder.path("wrong"), "wrong").unwrap();
    let wrong = folder.path("wrong");
    let refused = tool(&["backup", &tcp, name, "--password-file", wrong.to_str().unwrap()], 77);
    assert!(refused.contains("does not take the password") && !file.exists(), "{refused}");
    for socket in [&socket, &tcp] {
        let said = tool(&["backup", socket, name, "--password-file", password], 0);
        assert!(said.contains("200 keys of") && file.exists() && !folder.path("backup.partial").exists(), "{said}");
    }
    assert!(tool(&["backup", "nonsense", name], 65).contains("nonsense"));
    assert!(tool(&["backup", "udp:127.0.0.1:1", name], 69).contains("cannot talk to"));
    server.stop();
    assert!(tool(&["backup", &tcp, name], 69).contains("start the store"));

    // Into a new folder, as the store had it.
    let (other, dir) = (folder.path("other"), data.to_str().unwrap());
    assert!(
        tool(&["load", name, "--data", other.to_str().unwrap(), "--log-bytes", "8m"], 0)
            .contains("202 commands, 0 errors")
    );
    assert!(stdout(&run(&["store", "dump", dir])) == stdout(&run(&["store", "dump", other.to_str().unwrap()])));
    assert!(tool(&["load", name, "--data", dir], 69).contains("is not empty"));
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 30]).unwrap();
    let cut = folder.path("cut");
    let said = tool(&["load", name, "--data", cut.to_str().unwrap()], 65);
    assert!(said.contains(name) && said.contains("is not whole; nothing was loaded") && !cut.exists(), "{said}");
    tool(&["load", name, "--data", cut.to_str().unwrap(), "--to", &tcp], 64);

    if program_or_skip("redis-cli").is_some() {
        fs::write(&file, &bytes).unwrap();
        let server = start("epoll", &folder.path("piped"), &[]);
        let port = server.address(" tcp ").port().to_string();
        let mut pipe = std::process::Command::new("redis-cli");
        pipe.args(["-h", "127.0.0.1", "-p", &port, "--pipe"]).stdin(fs::File::open(&file).unwrap());
        let said = stdout(&pipe.output().unwrap());
        assert!(said.contains("errors: 0, replies: 202"), "{said}");
        assert_eq!(connect(&server).ask("DBSIZE"), ":200");
        server.stop();
    }
}

/// Whenever it is killed, the file is the old one or the new one, and the store is as free as before.
#[test]
fn a_backup_that_is_killed_leaves_the_one_before() {
    let folder = Folder::new();
    let file = folder.path("backup");
    let server = start("epoll", &folder.path("store"), &[]);
    let mut client = connect(&server);
    let tcp = server.address(" tcp ").to_string();
    for at in 0..100 {
        client.write(&command(&[b"SET", format!("key {at}").as_bytes(), &[b'v'; 20_000]])).unwrap();
        assert_eq!(client.read().unwrap(), "+OK");
    }
    fs::write(&file, "the one before").unwrap();
    for round in 0..10_u64 {
        let mut backup = ksf();
        backup.args(["store", "backup", &tcp, file.to_str().unwrap()]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut backup = Running::start(&mut backup);
        // So much time passes; it is another one in each round.
        for _ in 0..round * 200 {
            assert_eq!(client.ask("PING"), "+PONG");
        }
        backup.signal(Signal::KILL);
        backup.wait();
        let found = fs::read(&file).unwrap();
        let status = if found == b"the one before" { 65 } else { 0 };
        let data = folder.path(&format!("loaded {round}"));
        tool(&["load", file.to_str().unwrap(), "--data", data.to_str().unwrap(), "--log-bytes", "8m"], status);
    }
    ksf_test::wait_until("a backup is made", || {
        run(&["store", "backup", &tcp, file.to_str().unwrap()]).status.success()
    });
    assert!(!folder.path("backup.partial").exists());
    server.stop();
}
