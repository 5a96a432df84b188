//! What ksf shares with the rest of the machine: /run/ksf and rpcbind. Each test has an empty /run and a network of its
//! own. Needs root.

use crate::support;
use std::fs::{self, Permissions};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::export::Place;
use crate::support::{Folder, Running, Server, ksf, run, stderr, stdout, wait_until};
use ksf::status_socket::{Served, StatusSocket};
use rustix::process::Signal;
use serde_json::json;

/// A server with its socket for `ksf stat` where it is by default.
fn start(args: &[&str], listeners: usize) -> Server {
    let mut command = ksf();
    command.args(args);
    let mut server = Server::start_as_is(command, listeners, PathBuf::new(), Folder::new());
    server.stats = Path::new("/run/ksf").join(format!("{}.sock", server.pid()));
    server
}

const ECHO: [&str; 5] = ["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"];

/// A window title, a control sequence of one byte, a line of its own, and letters in reverse order.
const HOSTILE: &str = "a\u{1b}]0;title\u{7}b\u{9b}31m\nc\u{202e}d\u{7f}";
const ESCAPED: &str = r"a\x1b]0;title\x07b\x9b31m\x0ac\u{202e}d\x7f";

/// A server that answers every question with these words.
fn answering(path: &str, answer: &serde_json::Value) -> Served {
    let line = answer.to_string();
    StatusSocket::at(Path::new(path)).unwrap().spawn("status", move |_| line.clone()).unwrap()
}

/// All strings that a server chooses are [`HOSTILE`].
fn hostile_server(pid: u32) -> serde_json::Value {
    let counter = |name: &str| json!({ "name": name, "value": 1, "help": HOSTILE });
    let client =
        json!({ "address": HOSTILE, "connections": 1, "mounts": 1, "calls": 1, "read_bytes": 1, "written_bytes": 1 });
    let own = [counter("readdirplus_calls"), counter("walk_calls")];
    let service = json!({ "name": HOSTILE, "engine": HOSTILE, "shards": 1, "listeners": [HOSTILE], "limits": [],
        "counters": [counter(HOSTILE)], "kernel": [], "own": own, "clients": [client] });
    json!({ "schema": HOSTILE, "ksf": HOSTILE, "pid": pid, "uptime_ms": 1, "services": [service] })
}

fn hostile_holder() -> serde_json::Value {
    let listener = |why: Option<&str>| {
        json!({ "address": HOSTILE, "mechanism": "plain", "not_accelerated": why, "trouble": HOSTILE,
            "own_reuseport": false, "excluded": [HOSTILE], "queues": [] })
    };
    let counters = json!({ "accepted_own": 1, "accepted_fallback": 0, "accepted_stolen": 0, "steered_local": 0,
        "steered_remote": 0 });
    let worker = json!({ "index": 0, "pid": 1, "tid": 1, "cpu": 0, "ready": [HOSTILE], "stalled": false,
        "counters": counters });
    json!({ "pid": 1, "name": HOSTILE, "program": [HOSTILE], "source_ports": HOSTILE, "on": true, "level": "plain",
        "refused": [{ "level": "sk_lookup", "why": HOSTILE }], "other_programs": [HOSTILE], "processes": [],
        "listeners": [listener(Some(HOSTILE)), listener(None)], "workers": [worker], "ended_workers": counters,
        "stalls": 0, "rescues": 0, "refused_requests": [{ "why": HOSTILE, "count": 1 }] })
}

/// What the command prints, which nothing but its own line ends controls.
fn printed(args: &[&str]) -> String {
    let output = run(args);
    let text = format!("{}{}", stdout(&output), stderr(&output));
    let is_plain = |c: char| c == '\n' || !(c.is_control() || c == '\u{202e}');
    assert!(text.chars().all(is_plain), "{args:?}: {text:?}");
    text
}

#[test]
fn strings_of_servers_are_printed_without_control_characters() {
    let Some(()) = support::private_network_and_run() else { return };
    let _server = answering("/run/ksf/1.sock", &hostile_server(1));
    fs::create_dir("/run/ksf/accel").unwrap();
    let holder = answering("/run/ksf/accel/1.sock", &hostile_holder());
    for (args, times) in
        [(&["stat"][..], 8), (&["nfs", "status"], 2), (&["9p", "status"], 1), (&["accel", "status"], 13)]
    {
        let text = printed(args);
        assert_eq!(text.matches(ESCAPED).count(), times, "{args:?}: {text}");
        // JSON is as the server has it.
        let args = [args, &["--json"]].concat();
        let document: serde_json::Value = serde_json::from_str(&printed(&args)).unwrap();
        assert!(document.to_string().contains(&json!(HOSTILE).to_string()), "{args:?}: {document}");
    }
    assert!(printed(&["accel", "pause", "1"]).contains(ESCAPED));
    // In errors, which are one line.
    let one_line = ESCAPED.replace(r"\x0a", " ");
    let _second = answering("/run/ksf/2.sock", &hostile_server(2));
    assert_eq!(printed(&["stat"]).matches(&one_line).count(), 2);
    drop(holder);
    let _holder = answering("/run/ksf/accel/1.sock", &json!({ "error": HOSTILE }));
    assert!(printed(&["accel", "status"]).contains(&one_line));
}

/// The sockets of folders in which others may put files are theirs.
#[test]
fn sockets_that_others_planted_are_no_servers() {
    let Some(()) = support::private_network_and_run() else { return };
    const STRANGER: Option<u32> = Some(65534);
    let finds = |args: &[&str]| {
        let output = run(args);
        let text = format!("{}{}", stdout(&output), stderr(&output));
        assert_eq!(text.contains("title"), output.status.success(), "{args:?}: {text}");
        output.status.success()
    };
    for (folder, args, answer) in [
        ("/run/ksf", &["stat"][..], hostile_server(1)),
        ("/run/ksf/accel", &["accel", "status", "1"], hostile_holder()),
    ] {
        let path = Path::new(folder).join("1.sock");
        fs::create_dir_all(folder).unwrap();
        let _server = answering(path.to_str().unwrap(), &answer);
        assert!(finds(args));
        // As in /tmp, where all may put files.
        fs::set_permissions(folder, Permissions::from_mode(0o1777)).unwrap();
        assert!(finds(args));
        chown(&path, STRANGER, None).unwrap();
        assert!(!finds(args), "a socket of another user");
        chown(&path, Some(0), None).unwrap();
        chown(folder, STRANGER, None).unwrap();
        assert!(!finds(args), "a folder of another user");
        chown(folder, Some(0), None).unwrap();
        fs::set_permissions(folder, Permissions::from_mode(0o777)).unwrap();
        assert!(!finds(args), "a folder in which all may replace it");
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        let elsewhere = Path::new("/run/elsewhere");
        fs::rename(&path, elsewhere).unwrap();
        symlink(elsewhere, &path).unwrap();
        lchown(&path, STRANGER, None).unwrap();
        assert!(!finds(args), "a link of another user");
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn stat_finds_the_only_server_and_asks_which_of_several() {
    let Some(()) = support::private_network_and_run() else { return };
    let output = run(&["stat"]);
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert!(stderr(&output).contains("no running server"), "{}", stderr(&output));

    let first = start(&ECHO, 1);
    let pid = first.pid().to_string();
    assert!(stdout(&run(&["stat"])).starts_with(&format!("pid {pid},")));
    assert!(stdout(&run(&["stat", &pid])).starts_with(&format!("pid {pid},")));

    let mut second = start(&ECHO, 1);
    let output = run(&["stat"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(64), "{text}");
    assert!(text.contains(&pid) && text.contains(&second.pid().to_string()) && text.contains("kecho"), "{text}");

    // A server that was killed leaves its socket, which is nobody's server.
    second.signal(Signal::KILL);
    second.wait();
    assert!(second.stats.exists());
    assert!(stdout(&run(&["stat"])).starts_with(&format!("pid {pid},")));
    // The next server that starts cleans up.
    start(&ECHO, 1).stop();
    assert!(!second.stats.exists());
    first.stop();
    assert!(!Path::new("/run/ksf").exists(), "the folder is left behind");
}

fn start_rpcbind() -> Running {
    let rpcbind = Running::start(Command::new("rpcbind").arg("-f").stderr(Stdio::null()));
    wait_until("rpcbind answers", || UnixStream::connect("/run/rpcbind.sock").is_ok());
    rpcbind
}

/// What rpcbind knows about NFS (100003): lines of `rpcinfo -p`.
fn registered() -> Vec<String> {
    registrations_of("100003")
}

/// Lines of `rpcinfo -p` for a program.
fn registrations_of(program: &str) -> Vec<String> {
    let output = Command::new("rpcinfo").args(["-p", "127.0.0.1"]).output().expect("rpcinfo starts");
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output).lines().filter(|line| line.split_whitespace().next() == Some(program)).map(str::to_owned).collect()
}

#[test]
fn programs_are_registered_for_as_long_as_the_server_runs() {
    let Some(()) = support::private_network_and_run() else { return };
    let krpc2 = ["krpc2", "--engine", "epoll", "--rpcbind", "--listen", "127.0.0.1:0"];
    let output = run(&krpc2);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(69), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("rpcbind"), "{text}");

    let _rpcbind = start_rpcbind();
    let unasked = start(&["krpc2", "--engine", "epoll", "--listen", "127.0.0.1:0"], 2);
    assert!(registered().is_empty(), "nobody has asked for it");
    unasked.stop();
    let server = start(&krpc2, 2);
    let tcp = server.address(" tcp ").port();
    let lines = registered();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("tcp") && line.contains(&tcp.to_string())), "{lines:?}");
    // A client that knows only the program number finds the server.
    let null = Command::new("rpcinfo").args(["-t", "127.0.0.1", "100003", "3"]).output().expect("rpcinfo starts");
    assert!(stdout(&null).contains("ready and waiting"), "{}{}", stdout(&null), stderr(&null));
    server.stop();
    assert!(registered().is_empty(), "the entries are left behind");
    assert!(TcpStream::connect(("127.0.0.1", tcp)).is_err());
}

#[test]
fn nfs_registers_its_program_for_tcp_alone_and_mount_for_datagrams_too() {
    let Some(()) = support::private_network_and_run() else { return };
    let _rpcbind = start_rpcbind();
    let place = Place::new();
    let mut server = place.start("epoll", "", &["--rpcbind", "--listen", "udp:127.0.0.1:0"]);
    server.line_with(" ready");
    let [tcp, udp] = [" tcp ", " udp "].map(|transport| server.address(transport).port().to_string());
    // Version, transport and port of each.
    let entries = |program| {
        let mut entries: Vec<Vec<String>> = registrations_of(program)
            .iter()
            .map(|line| line.split_whitespace().skip(1).take(3).map(str::to_owned).collect())
            .collect();
        entries.sort();
        entries
    };
    assert_eq!(entries("100003"), [["3", "tcp", tcp.as_str()]]);
    assert_eq!(entries("100005"), [["3", "tcp", tcp.as_str()], ["3", "udp", udp.as_str()]]);
    server.stop();
    assert!(["100003", "100005"].iter().all(|program| registrations_of(program).is_empty()), "entries are left");
}
