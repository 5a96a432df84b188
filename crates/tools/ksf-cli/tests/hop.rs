//! `ksf accel hop`, as a user runs it: connections of a network namespace of the test's own.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Output;

use rustix::event::{PollFd, PollFlags, poll};
use support::hop::Attached;
use support::{Folder, ksf_for_all, private_network, run, stderr, stdout};

fn fails(output: &Output, status: i32, part: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains(part), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// As many exchanges of a message in each direction.
fn talk(listener: &TcpListener, exchanges: usize) {
    let mut ends = [TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0];
    for end in &ends {
        end.set_nonblocking(true).unwrap();
    }
    for number in 0..2 * exchanges {
        let message = format!("message {number}");
        let [one, other] = &mut ends;
        let (from, to) = if number % 2 == 0 { (one, other) } else { (other, one) };
        from.write_all(message.as_bytes()).unwrap();
        poll(&mut [PollFd::new(to, PollFlags::IN)], None).unwrap();
        let mut bytes = [0; 100];
        let count = to.read(&mut bytes).unwrap();
        assert_eq!(&bytes[..count], message.as_bytes());
    }
}

#[test]
fn connections_of_a_port_are_joined_until_interrupted() {
    if !private_network() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let attached = Attached::start(&["--port", &format!("1,{port}"), "--json"]);
    assert!(attached.said.contains(&format!("of ports 1, {port}")), "{}", attached.said);
    talk(&listener, 10);
    talk(&TcpListener::bind("127.0.0.1:0").unwrap(), 10);
    let json: serde_json::Value = serde_json::from_str(&attached.interrupt()).unwrap();
    assert_eq!(json["schema"], "ksf-hop/1");
    let counters = &json["counters"];
    assert_eq!((&counters["watched"], &counters["joined"]), (&2.into(), &2.into()), "{json}");
    // The first of each direction went by TCP.
    assert_eq!((&counters["messages"], &counters["tcp_young"]), (&18.into(), &2.into()), "{json}");
    talk(&listener, 3);
    let text = Attached::start(&["--port", &port, "--warm-up", "5"]).interrupt();
    assert_eq!(text, "no connection was seen\n");
}

#[test]
fn a_check_says_whether_this_kernel_can() {
    if !private_network() {
        return;
    }
    let output = run(&["accel", "hop", "check", "--no-splice", "--no-fionread"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("the self-test passed"), "{}", stdout(&output));
}

#[test]
fn mistakes_are_one_line() {
    if !private_network() {
        return;
    }
    let attach = |args: &[&str]| run(&[&["accel", "hop", "attach", "--no-splice", "--no-fionread"], args].concat());
    fails(&attach(&[]), 64, "--port");
    fails(&attach(&["--cgroup", "/nonexistent"]), 66, "/nonexistent");
    fails(&attach(&["--cgroup", "/tmp"]), 66, "not a folder of cgroup2");
    fails(&attach(&["--port", "0"]), 65, "65535");
    // The self-test decides: here nobody can connect to anybody.
    let output = std::process::Command::new("ip").args(["link", "set", "lo", "down"]).output().unwrap();
    assert!(output.status.success());
    fails(&attach(&["--port", "80"]), 69, "the self-test failed, so nothing is joined: cannot connect on loopback");
}

#[test]
fn without_rights_the_missing_ones_are_named() {
    use std::os::unix::process::CommandExt;
    if !private_network() {
        return;
    }
    let folder = Folder::new();
    let binary = ksf_for_all(&folder);
    let mut command = std::process::Command::new(binary);
    let output = command.args(["accel", "hop", "attach", "--port", "80"]).uid(65534).gid(65534).output().unwrap();
    fails(&output, 77, "CAP_BPF");
}

/// Debian's kernel 6.1 permits tracing, so the guard is tested; but it counts joined bytes no more than others of its time
/// do, and event loops that ask by FIONREAD would wait for ever: there the hop is refused.
#[test]
fn a_kernel_that_does_not_count_joined_bytes_is_refused() {
    let Some(_turn) = ksf_lab::turn() else { return };
    let script = "ksf accel hop check && exit 1\nksf accel hop attach --port 80 && exit 1\nexit 0\n";
    let lab = ksf_lab::Lab::script(script).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf");
    let output = lab.run().unwrap().checked().unwrap();
    let refused = output.matches("this kernel does not count the bytes that wait").count();
    assert_eq!(refused, 2, "{output}");
}
