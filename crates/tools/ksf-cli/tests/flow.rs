//! `ksf accel flow`, as a user runs it; the interface is lo of a network namespace of the test's own.

use crate::support;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};

use crate::support::{Folder, Running, ksf, ksf_for_all, private_network, run, stderr, stdout, xdp_on_lo};
use rustix::process::Signal;

/// `ksf accel flow attach ARGS` that has attached.
fn attach(args: &[&str]) -> Running {
    let mut command = ksf();
    command.args(["accel", "flow", "attach"]).args(args);
    let mut attached = Running::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    attached.err.with("steering ");
    attached
}

fn fails(output: &Output, status: i32, part: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains(part), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn the_layout_is_shown() {
    let output = run(&["accel", "flow", "check"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).starts_with("port layout "), "{}", stdout(&output));
    let output = run(&["accel", "flow", "check", "--cpus", "1,5", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["schema"], "ksf-flow/1");
    let cpus: Vec<u64> =
        json["chunks"].as_array().unwrap().iter().map(|chunk| chunk["cpu"].as_u64().unwrap()).collect();
    assert_eq!(cpus, [1, 5]);
}

#[test]
fn an_interface_is_steered_until_interrupted() {
    let Some(()) = support::private_network() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || listener.incoming().flatten().for_each(drop));
    let mut attached =
        attach(&["lo", "--policy", "ports", "--policy", "hash", "--json", "--try", &address.to_string()]);
    attached.err.with("self-check passed in generic mode");
    assert!(xdp_on_lo());
    // Nobody else's turn.
    let output = run(&["accel", "flow", "attach", "lo"]);
    fails(&output, 69, "already runs the XDP program ksf_flow (id ");
    for _ in 0..10 {
        TcpStream::connect(address).unwrap();
    }
    let out = attached.stop(Signal::INT);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let total = |name: &str| -> u64 {
        json["frames"][name].as_array().unwrap().iter().map(|value| value.as_u64().unwrap()).sum()
    };
    assert_eq!(json["mode"], "generic");
    assert!(total("local") + total("redirected") >= 20, "{out}");
    let targets: u64 = json["targets"].as_object().unwrap().values().map(|value| value.as_u64().unwrap()).sum();
    assert_eq!(targets, total("local") + total("redirected"));
    assert!(!xdp_on_lo());
    drop(server);
}

#[test]
fn nothing_survives_sigkill() {
    let Some(()) = support::private_network() else { return };
    let mut attached = attach(&["lo"]);
    assert!(xdp_on_lo());
    attached.signal(Signal::KILL);
    attached.wait();
    // The kernel lets go of the link when the process's descriptors are closed, which is before it can be waited for.
    assert!(!xdp_on_lo());
    attach(&["lo"]).stop(Signal::INT);
}

#[test]
fn mistakes_are_told_in_one_line() {
    let Some(()) = support::private_network() else { return };
    let folder = Folder::new();
    let text = folder.write("policy.o", "no object");
    let text = text.to_str().unwrap();
    let flow = |args: &[&str]| run(&[&["accel", "flow", "attach"], args].concat());
    fails(&flow(&["nosuch"]), 69, "no interface nosuch");
    fails(&flow(&["lo", "--policy", text]), 66, "not a BPF object");
    fails(&flow(&["lo", "--policy", "/nonexistent/x.o"]), 66, "cannot read /nonexistent/x.o");
    fails(&flow(&["lo", "--cpus", "1023"]), 65, "CPU 1023");
    fails(&flow(&["lo", "--cgroup", "/tmp"]), 66, "cgroup2");
    assert!(!xdp_on_lo());
    // A self-check that fails leaves nothing, either.
    let output = flow(&["lo", "--try", "127.0.0.1:9"]);
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert!(stderr(&output).contains("detached"), "{}", stderr(&output));
    assert!(!xdp_on_lo());
}

#[test]
fn without_rights_the_missing_ones_are_named() {
    let Some(()) = support::private_network() else { return };
    use std::os::unix::process::CommandExt;
    let folder = Folder::new();
    // The build folder may be closed to others.
    let binary = ksf_for_all(&folder);
    let output = Command::new(binary).args(["accel", "flow", "attach", "lo"]).uid(65534).gid(65534).output().unwrap();
    fails(&output, 77, "CAP_BPF");
}

/// As its README says: copied to anywhere, made, loaded.
#[test]
fn a_copy_of_the_example_steers() {
    let folder = Folder::new();
    let copy = folder.path("mine");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../examples/rps-policy");
    std::fs::create_dir(&copy).unwrap();
    for file in ["Makefile", "tenants.bpf.c"] {
        std::fs::copy(format!("{example}/{file}"), copy.join(file)).unwrap();
    }
    let make = |target: &str| {
        let mut make = Command::new("make");
        make.args(["-C", copy.to_str().unwrap(), target]).arg(format!("KSF={}", env!("CARGO_BIN_EXE_ksf")));
        ksf_test::run(make.env_remove("MAKEFLAGS"));
    };
    make("tenants.bpf.o");
    if private_network().is_some() {
        let object = copy.join("tenants.bpf.o");
        let attached = attach(&["lo", "--policy", object.to_str().unwrap(), "--policy", "pass"]);
        assert!(attached.stop(Signal::INT).contains("frames for"));
    }
    make("clean");
    assert_eq!(std::fs::read_dir(&copy).unwrap().count(), 2, "something is left");
}
