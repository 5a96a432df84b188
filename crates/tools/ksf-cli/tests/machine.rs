//! What ksf shares with the rest of the machine: /run/ksf and rpcbind. Each test has an empty /run and a network of its
//! own. Needs root.

use crate::support;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{Folder, Running, Server, ksf, run, stderr, stdout, wait_until};
use rustix::process::Signal;

/// A server with its socket for `ksf stat` where it is by default.
fn start(args: &[&str], listeners: usize) -> Server {
    let mut command = ksf();
    command.args(args);
    let mut server = Server::start_as_is(command, listeners, PathBuf::new(), Folder::new());
    server.stats = Path::new("/run/ksf").join(format!("{}.sock", server.pid()));
    server
}

const ECHO: [&str; 5] = ["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"];

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
    let output = Command::new("rpcinfo").args(["-p", "127.0.0.1"]).output().expect("rpcinfo starts");
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output).lines().filter(|line| line.contains(" 100003 ")).map(str::to_owned).collect()
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
    assert!(registered().is_empty());
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
