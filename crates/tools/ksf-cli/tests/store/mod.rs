//! `ksf store` as its users run it: what it acknowledged is there after a `kill -9`, and it says why it does not start.

mod backup;
mod client;
mod cluster;
mod history;
mod journal;
mod kills;
mod larger;
mod load;
mod machine;
mod offline;
mod order;
mod pmem;
mod replay;
mod trace;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use ksf_test::{Running, cpus, ip, on_cpu, program_or_skip, root_or_skip, succeeds};
use rustix::process::Signal;

use crate::support::{
    Folder, Server, engines, first_cpu, ksf, private_network, private_network_and_run, run, stderr, wait_until,
};
use client::{Client, command};

/// Starts a small store, which says that it is open and that it is ready.
fn start(engine: &str, data: &Path, more: &[&str]) -> Server {
    let args = ["store", "--engine", engine, "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--data"];
    let args: Vec<&str> = args.into_iter().chain([data.to_str().unwrap()]).chain(more.iter().copied()).collect();
    Server::start(&args, 1)
}

fn connect(server: &Server) -> Client {
    Client::connect(server.address(" tcp "))
}

/// The first two CPUs, or the only one: so many logs fill up, and depend on each other, on every machine.
fn two_cpus() -> Vec<usize> {
    cpus().into_iter().take(2).collect()
}

/// The same as the option `--cpus` takes them.
fn list_of_two_cpus() -> String {
    two_cpus().iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Connects on one of these CPUs, the next one for the next number: the shard of that CPU gets the connection.
fn connect_on(number: usize, server: &Server) -> Client {
    let (cpus, address) = (two_cpus(), server.address(" tcp "));
    on_cpu(cpus[number % cpus.len()], || Client::connect(address))
}

/// Ends it as a crash does.
fn kill(mut server: Server) {
    server.signal(Signal::KILL);
    server.wait();
}

#[test]
fn what_was_acknowledged_survives_kill_9() {
    for engine in engines() {
        let folder = Folder::new();
        let data = folder.path("store");
        let server = start(engine, &data, &[]);
        let first = &server.seen()[0];
        for part in ["durability=always", "medium=file", "RWF_DSYNC", "keys=0", "recovered in"] {
            assert!(first.contains(part), "no {part} in {first}");
        }
        let mut client = connect(&server);
        for round in 0..300 {
            let value = "v".repeat(round * 7);
            client.write(&command(&[b"SET", format!("key {round}").as_bytes(), value.as_bytes()])).unwrap();
        }
        (0..300).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
        assert_eq!(client.ask("DEL greeting count"), ":0");
        assert_eq!(client.ask("INCRBY count 42"), ":42");
        kill(server);
        let server = start(engine, &data, &[]);
        assert!(server.seen()[0].contains("keys=301"), "{}", server.seen()[0]);
        let mut client = connect(&server);
        assert_eq!(client.ask("GET count"), "42");
        for round in 0..300 {
            client.write(&command(&[b"GET", format!("key {round}").as_bytes()])).unwrap();
            assert_eq!(client.read().unwrap().len(), round * 7, "{engine}");
        }
        server.stop();
    }
}

/// The memory of the machine stays when a process is killed; that it would not stay without power is said.
#[test]
fn what_was_acknowledged_in_memory_survives_kill_9() {
    let Some(folder) = ksf_test::Folder::in_memory_or_skip() else { return };
    for engine in engines() {
        let data = folder.path(engine);
        let on_memory = ["--medium", "pmem-memory"];
        let server = start(engine, &data, &on_memory);
        let first = &server.seen()[0];
        for part in ["durability=always", "medium=pmem-memory", "sfence", "a power cut takes everything", "keys=0"] {
            assert!(first.contains(part), "no {part} in {first}");
        }
        let mut client = connect(&server);
        for round in 0..300 {
            let value = "v".repeat(round * 7);
            client.write(&command(&[b"SET", format!("key {round}").as_bytes(), value.as_bytes()])).unwrap();
        }
        (0..300).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
        kill(server);
        let server = start(engine, &data, &on_memory);
        assert!(server.seen()[0].contains("keys=300"), "{}", server.seen()[0]);
        let mut client = connect(&server);
        for round in 0..300 {
            client.write(&command(&[b"GET", format!("key {round}").as_bytes()])).unwrap();
            assert_eq!(client.read().unwrap().len(), round * 7, "{engine}");
        }
        server.stop();
    }
}

/// It says what is missing, and what to do.
#[test]
fn persistent_memory_that_is_none_is_refused() {
    let Some(folder) = ksf_test::Folder::in_memory_or_skip() else { return };
    let data = folder.path("store");
    let output = run(&["store", "--medium", "pmem", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(69), "{text}");
    assert!(["medium pmem", "DAX", "dax=always", "--medium block"].iter().all(|part| text.contains(part)), "{text}");
    let output = run(&["store", "--medium", "disk", "--data", data.to_str().unwrap()]);
    assert!(!output.status.success() && stderr(&output).contains("block, pmem, pmem-memory"), "{}", stderr(&output));
}

#[test]
fn redis_cli_sets_and_gets() {
    if program_or_skip("redis-cli").is_none() {
        return;
    }
    let folder = Folder::new();
    let ask = |server: &Server, words: &[&str]| {
        let port = server.address(" tcp ").port().to_string();
        succeeds(&[&["redis-cli", "-h", "127.0.0.1", "-p", &port], words].concat()).trim_end().to_owned()
    };
    let server = start("epoll", &folder.path("store"), &[]);
    assert_eq!(ask(&server, &["set", "greeting", "hello"]), "OK");
    kill(server);
    let server = start("epoll", &folder.path("store"), &[]);
    assert_eq!(ask(&server, &["-3", "get", "greeting"]), "hello");
    server.stop();
}

#[test]
fn a_store_is_served_by_one_process() {
    let folder = Folder::new();
    let data = folder.path("store");
    let server = start("epoll", &data, &[]);
    let second = run(&["store", "--engine", "epoll", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()]);
    let text = stderr(&second);
    assert_eq!(second.status.code(), Some(69), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(data.to_str().unwrap()) && text.contains("another process"), "{text}");
    // The first one is not disturbed.
    assert_eq!(connect(&server).ask("SET a b"), "+OK");
    server.stop();
}

#[test]
fn a_folder_that_cannot_be_had_is_named() {
    let folder = Folder::new();
    let file = folder.path("file");
    std::fs::write(&file, "").unwrap();
    for (data, status, part) in [("/sys/ksf-store", 77, "/sys/ksf-store"), (file.to_str().unwrap(), 66, "--data")] {
        let output = run(&["store", "--listen", "127.0.0.1:0", "--data", data]);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(status), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(part), "{text}");
    }
}

/// What a first start left on a disk that was full is taken up by the next one.
#[test]
fn a_full_disk_is_told_and_is_no_obstacle_once_there_is_room() {
    if private_network_and_run().is_none() {
        return;
    }
    let data = "/run/small";
    std::fs::create_dir(data).unwrap();
    succeeds(&["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", data]);
    let output =
        run(&["store", "--log-bytes", "8m", "--cpus", &first_cpu(), "--listen", "127.0.0.1:0", "--data", data]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(71), "{text}");
    assert!(text.contains("No space left") && text.contains("--log-bytes"), "{text}");
    succeeds(&["mount", "-o", "remount,size=200m", data]);
    let server = start("epoll", Path::new(data), &[]);
    assert_eq!(connect(&server).ask("SET a b"), "+OK");
    kill(server);
    let server = start("epoll", Path::new(data), &[]);
    assert_eq!(connect(&server).ask("GET a"), "b");
    server.stop();
}

#[test]
fn damage_to_what_was_acknowledged_is_refused_and_left_alone() {
    let folder = Folder::new();
    let data = folder.path("store");
    let server = start("epoll", &data, &["--cpus", &first_cpu()]);
    let mut client = connect(&server);
    (0..100).for_each(|at| assert_eq!(client.ask(&format!("SET key {at}")), "+OK"));
    kill(server);
    let log = data.join("log-000");
    let mut bytes = std::fs::read(&log).unwrap();
    // The second batch; many later ones say that it was acknowledged.
    let (first, second) = (batches(&bytes)[0], batches_with_records(&bytes)[1]);
    // In the log, which begins with the header of a segment, wherever in the file that is.
    let damaged = 4096 + second - first;
    bytes[second + 70] ^= 1;
    std::fs::write(&log, &bytes).unwrap();
    let output = run(&["store", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(65), "{text}");
    assert!(text.contains(&format!("log 0 is damaged from byte {damaged} on")) && text.contains("salvage"), "{text}");
    assert!(std::fs::read(&log).unwrap() == bytes, "the log was changed");
}

/// Where the batches of a log begin that have records: one that is idle, or ended well, writes some without.
fn batches_with_records(log: &[u8]) -> Vec<usize> {
    batches(log).into_iter().filter(|at| log[at + 44..at + 48] != [0; 4]).collect()
}

fn batches(log: &[u8]) -> Vec<usize> {
    (0..log.len()).step_by(4096).filter(|at| &log[at + 4..at + 8] == b"ksfB").collect()
}

/// Nothing was written behind it that could say that it was acknowledged, but for what the store writes itself when it is idle, and
/// when it ends well.
#[test]
fn damage_to_the_last_write_is_no_torn_end_once_the_store_was_idle_or_ended_well() {
    for (engine, ends_well) in engines().into_iter().flat_map(|engine| [(engine, false), (engine, true)]) {
        let folder = Folder::new();
        let data = folder.path("store");
        let log = data.join("log-000");
        let server = start(engine, &data, &["--cpus", &first_cpu()]);
        assert_eq!(connect(&server).ask("SET a b"), "+OK");
        if ends_well {
            server.stop();
        } else {
            wait_until("the store says that it was acknowledged", || batches(&std::fs::read(&log).unwrap()).len() == 2);
            kill(server);
        }
        let whole = std::fs::read(&log).unwrap();
        let (all, with_records) = (batches(&whole), batches_with_records(&whole));
        assert!(all.len() == 2 && with_records == all[..1], "{engine}: {all:?}, {with_records:?}");
        let mut bytes = whole.clone();
        bytes[all[0] + 70] ^= 1;
        std::fs::write(&log, &bytes).unwrap();
        let output = run(&["store", "--listen", "127.0.0.1:0", "--data", data.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(65), "{engine}: {}", stderr(&output));
        std::fs::write(&log, &whole).unwrap();
        // Starts without a write say nothing more.
        for _ in 0..2 {
            let server = start(engine, &data, &["--cpus", &first_cpu()]);
            assert_eq!(connect(&server).ask("GET a"), "b");
            server.stop();
        }
        assert_eq!(batches(&std::fs::read(&log).unwrap()), all, "{engine}");
    }
}

#[test]
fn other_durabilities_are_said_and_lose_nothing_in_an_orderly_end() {
    for durability in ["none", "every=1000"] {
        let folder = Folder::new();
        let data = folder.path("store");
        let server = start("epoll", &data, &["--durability", durability]);
        assert!(server.seen()[0].contains(&format!("durability={durability} ")), "{}", server.seen()[0]);
        let mut client = connect(&server);
        for at in 0..1000 {
            client.write(&command(&[b"SET", format!("key {at}").as_bytes(), b"value"])).unwrap();
        }
        (0..1000).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
        assert!(client.ask("INFO").contains(&format!("ksf_durability:{durability}\r\n")));
        drop(client);
        server.stop();
        let server = start("epoll", &data, &[]);
        assert_eq!(connect(&server).ask("DBSIZE"), ":1000", "{durability}");
        server.stop();
    }
    let output = run(&["store", "--data", "/nonexistent", "--durability", "sometimes"]);
    assert!(!output.status.success() && stderr(&output).contains("always, every=MS, none"), "{}", stderr(&output));
}

#[test]
fn a_password_is_asked_for_and_without_one_only_this_machine_is_served() {
    if private_network().is_none() {
        return;
    }
    ip("address add 192.0.2.1/32 dev lo");
    let folder = Folder::new();
    let password = folder.path("password");
    std::fs::write(&password, "open sesame\n").unwrap();
    // It is not checked who may read it.
    std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o644)).unwrap();
    let data = folder.path("store");
    let outside = ["--listen", "192.0.2.1:0"];
    let server = Server::start_command(
        {
            let mut command = ksf();
            command.args(["store", "--engine", "epoll", "--log-bytes", "8m", "--data"]).arg(&data).args(outside);
            command
        },
        1,
    );
    let mut client = connect(&server);
    assert!(client.ask("SET a b").starts_with("-DENIED "));
    client.read().expect_err("the connection ends");
    server.stop();

    let server = start("epoll", &data, &["--password-file", password.to_str().unwrap(), outside[0], outside[1]]);
    let mut client = connect(&server);
    assert_eq!(client.ask("SET a b"), "-NOAUTH Authentication required.");
    assert!(client.ask("HELLO 3").starts_with("-NOAUTH HELLO must be called"));
    assert!(client.ask("AUTH wrong").starts_with("-WRONGPASS "));
    assert!(client.ask("AUTH other wrong").starts_with("-WRONGPASS "));
    client.write(&command(&[b"AUTH", b"open sesame"])).unwrap();
    assert_eq!(client.read().unwrap(), "+OK");
    assert_eq!(client.ask("GET a"), "nil");
    let mut client = connect(&server);
    client.write(&command(&[b"HELLO", b"3", b"AUTH", b"default", b"open sesame", b"SETNAME", b"me"])).unwrap();
    assert!(client.read().unwrap().contains("proto :3"));
    assert_eq!(client.ask("CLIENT GETNAME"), "me");
    server.stop();
}

#[test]
fn a_file_of_services_may_have_a_store() {
    let folder = Folder::new();
    let path = folder.path("ksf.toml");
    let text = "engine = \"epoll\"\n[[service]]\nname = \"kv\"\nkind = \"store\"\ndata = \"data\"\nlog_bytes = \"8m\"\n\
                durability = \"every=50\"\nlisten = [\"127.0.0.1:0\"]\n";
    std::fs::write(&path, text).unwrap();
    let server = Server::start(&["serve", path.to_str().unwrap()], 1);
    assert!(server.seen()[0].starts_with("ksf: kv ") && server.seen()[0].contains("durability=every=50"));
    assert_eq!(connect(&server).ask("SET a b"), "+OK");
    assert!(folder.path("data").join("superblock").exists(), "the folder is not beside the file");
    server.stop();
    std::fs::write(&path, text.replace("every=50", "soon")).unwrap();
    let output = run(&["serve", "--check", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(78), "{}", stderr(&output));
    assert!(stderr(&output).contains("durability"), "{}", stderr(&output));
}

/// At the end fsync(2) is for the superblocks alone, and each of them fails.
#[test]
fn each_service_that_does_not_end_well_is_reported() {
    let Some(()) = root_or_skip("strace of another process") else { return };
    let Some(strace) = program_or_skip("strace") else { return };
    let folder = Folder::new();
    let service = |name: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\nkind = \"store\"\ndata = \"{name}\"\nlog_bytes = \"8m\"\n\
             listen = [\"127.0.0.1:0\"]\n"
        )
    };
    let text = format!("engine = \"epoll\"\n{}{}", service("one"), service("two"));
    let mut server = Server::start(&["serve", folder.write("ksf.toml", text).to_str().unwrap()], 2);
    let mut command = Command::new(strace);
    command.args(["-f", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO", "-p", &server.pid().to_string(), "-o"]);
    let mut strace = Running::start(command.arg(folder.path("strace")).stderr(Stdio::piped()));
    strace.err.with("attached");
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(71), "{:#?}", server.seen());
    for name in ["one", "two"] {
        let parts = [name, "did not end well", "superblock", "the store is whole"];
        let is_reported = |line: &String| parts.iter().all(|part| line.contains(part));
        assert!(server.seen().iter().any(is_reported), "{name}: {:#?}", server.seen());
    }
    strace.wait();
}

/// As it is packaged, with the store taken in and other ports: what a client may send by default it may send there, and gets back.
#[test]
fn the_packaged_file_serves_the_store_with_its_own_limits() {
    let text = std::fs::read_to_string(ksf_test::repository().join("packaging/ksf.toml")).unwrap();
    let (front, store) = text.split_once("#[[service]]\n#name = \"store\"").expect("the file has a store");
    let (store, _) = store.split_once("#log_bytes").expect("its log has a length");
    let folder = Folder::new();
    let store = format!("[[service]]\n#name = \"store\"{store}#log_bytes = \"128m\"\n").replace("\n#", "\n");
    let store = store.replace("/var/lib/ksf/store", folder.path("store").to_str().unwrap());
    let front = front.replace("listen = [\"127.0.0.1:62049\", \"[::1]:62049\"]", "listen = [\"tcp:127.0.0.1:0\"]");
    let front = front.replace("kind = \"echo\"", "kind = \"echo\"\nlisten = [\"tcp:127.0.0.1:0\"]");
    let front = front.replace("engine = \"auto\"", &format!("engine = \"epoll\"\ncpus = \"{}\"", first_cpu()));
    let text = format!("{front}{store}").replace("127.0.0.1:6379", "127.0.0.1:0");
    let path = folder.write("ksf.toml", text);
    let server = Server::start(&["serve", path.to_str().unwrap()], 3);
    let mut client = Client::connect(server.address("store tcp"));
    // More than other services take, and less than a segment of this log.
    let value = vec![b'v'; 3 << 19];
    client.write(&command(&[b"SET", b"long", &value])).unwrap();
    assert_eq!(client.read().unwrap(), "+OK");
    assert_eq!(client.ask("GET long").len(), value.len());
    server.stop();
}
