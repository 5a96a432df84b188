//! Real machines: what is reported of a program, of a kernel that panics, of a machine that hangs.
//!
//! A boot takes 2 seconds of a processor, so tests that can share a machine do.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ksf_lab::{Error, Lab, RunStatus, turn};

/// A directory of this test, removed with it.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn file(&self, name: &str, contents: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, contents).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // Not unwrapped: it may run while the test fails, and a second panic would hide the first.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_program_gets_its_arguments_files_modules_and_port_and_its_end_is_told() {
    let Some(_turn) = turn() else { return };
    let dir = Dir::new("boot");
    let data = dir.file("data", "from the host\n");
    let program = dir.file("probe.c", include_str!("guest/probe.c"));

    let vm = Lab::new(program)
        .arg("two words")
        .arg("")
        .arg("line\nbreak")
        .env("KSF", "a b=c")
        .file(data, "/deep/in/the/machine")
        .module("kcm")
        .module_with("dummy", "numdummies=2")
        .kernel_argument("ksf.example=1")
        .memory_mib(256)
        .cpus(2)
        .forward_tcp(7000)
        .spawn()
        .unwrap();
    vm.wait_for("listening\n").unwrap();
    assert_eq!(vm.address_of_port(7001), None);
    assert_eq!(shouted(vm.address_of_port(7000).unwrap(), "over the wire"), "OVER THE WIRE");
    let error = vm.wait_for("something else").unwrap_err();
    assert!(error.to_string().contains("returned 7 without writing 'something else'"), "{error}");
    let outcome = vm.wait().unwrap();

    assert_eq!(outcome.status, RunStatus::Exited(7), "{}\n{}", outcome.output, outcome.console);
    assert!(!outcome.success());
    let expected = "\
argument: two words
argument: \n\
argument: line\nbreak
KSF: a b=c
file: from the host
processors: 2
command line has ksf.example=1
memory is between 150 and 256 MiB
AF_KCM socket: ok
dummy0 dummy1 eth0 lo: up
loopback: ok
cgroup.controllers: ok
listening
to standard error
";
    assert_eq!(outcome.output, expected);
    assert!(outcome.console.contains("reboot: Power down"), "{}", outcome.console);
}

/// What the program at this address answers.
fn shouted(address: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
#[ignore = "soak: boots a machine"]
fn dynamic_programs_of_the_host_run_from_a_script() {
    let Some(_turn) = turn() else { return };
    // A pipeline, 200 kB through the serial port, and a signal as the end.
    let outcome =
        Lab::script("head -c 200000 /dev/zero | tr '\\0' x\nkill -9 $$").tool("head").tool("tr").run().unwrap();
    assert_eq!(outcome.status, RunStatus::Signaled(9), "{}", outcome.console);
    assert_eq!(outcome.output.len(), 200_000);
    assert!(outcome.output.bytes().all(|byte| byte == b'x'));
}

#[test]
#[ignore = "soak: boots a machine"]
fn the_command_line_tool_returns_what_the_program_returned() {
    let Some(_turn) = turn() else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_ksf-lab")).args(["run", "--console", "/bin/true"]).output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{messages}");
    assert!(messages.contains("reboot: Power down"), "{messages}");
}

/// What a panic is told by, `src/evaluate.rs` tests without a machine.
#[test]
#[ignore = "soak: boots a machine"]
fn a_panic_is_an_error_with_the_kernels_reason() {
    let Some(_turn) = turn() else { return };
    // The kernel panics when its first process ends.
    let error = Lab::new("/bin/true").kernel_argument("rdinit=/lab/true").run().unwrap_err();
    let Error::Panic { what, console } = &error else { panic!("{error}") };
    assert!(what.starts_with("Attempted to kill init!"), "{what}");
    assert!(console.contains("Call Trace:"), "{console}");
}

#[test]
#[ignore = "soak: boots a machine"]
fn a_machine_that_hangs_is_stopped_at_its_time_limit() {
    let Some(_turn) = turn() else { return };
    let limit = Duration::from_millis(1500);
    let error = Lab::script("while :; do :; done").time_limit(limit).run().unwrap_err();
    assert!(matches!(error, Error::TimedOut { started: true, limit: reached, .. } if reached == limit), "{error}");

    // No machine gets as far as its program in this time.
    let limit = Duration::from_millis(50);
    let error = Lab::new("/bin/true").boot_limit(limit).run().unwrap_err();
    assert!(matches!(error, Error::TimedOut { started: false, limit: reached, .. } if reached == limit), "{error}");
}

#[test]
#[ignore = "soak: boots a machine"]
fn a_machine_reaches_the_host_only_where_that_was_asked_for() {
    let Some(_turn) = turn() else { return };
    let dir = Dir::new("reach");
    let script = "#!/bin/bash\nexec 3<>/dev/tcp/10.0.2.2/$1 || exit 1\nread -r line <&3\necho \"$line\"\n";
    let program = dir.file("reach", script);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let lab = Lab::new(program).arg(listener.local_addr().unwrap().port().to_string());

    // Nobody accepts yet, but the backlog would take a connection.
    let outcome = lab.clone().forward_tcp(7000).run().unwrap();
    assert_eq!(outcome.status, RunStatus::Exited(1), "{}", outcome.output);

    let server = std::thread::spawn(move || listener.accept().unwrap().0.write_all(b"from the host\n").unwrap());
    let outcome = lab.reach_host().run().unwrap();
    assert_eq!((outcome.status, outcome.output.as_str()), (RunStatus::Exited(0), "from the host\n"));
    server.join().unwrap();
}

#[test]
fn what_cannot_be_set_up_is_named() {
    let Some(_turn) = turn() else { return };
    let error = Lab::new("/bin/true").module("no-such-module").run().unwrap_err();
    assert!(matches!(&error, Error::NoSuchModule { module, .. } if module == "no-such-module"), "{error}");

    let error = Lab::new("/bin/true").device("no-such-device").run().unwrap_err();
    assert!(matches!(&error, Error::Qemu { messages, .. } if messages.contains("no-such-device")), "{error}");
}

#[test]
#[ignore = "soak: boots a machine"]
fn a_program_that_cannot_be_run_is_named() {
    let Some(_turn) = turn() else { return };
    let dir = Dir::new("setup");
    let error = Lab::new(dir.file("text", "not executable\n")).run().unwrap_err();
    let Error::Setup { what, .. } = &error else { panic!("{error}") };
    assert_eq!(what, "cannot run /lab/text: Permission denied");
}

/// A disk for a machine. A device's file is open exactly as long as QEMU lives, and QEMU locks it.
fn disk(dir: &Dir) -> (PathBuf, String) {
    let disk = dir.file("disk", &"\0".repeat(512 * 64));
    let drive = format!("file={},format=raw,if=none,id=disk", disk.display());
    (disk, drive)
}

#[test]
#[ignore = "soak: boots a machine"]
fn qemu_ends_with_its_handle() {
    let Some(_turn) = turn() else { return };
    let dir = Dir::new("handle");
    let (disk, drive) = disk(&dir);
    let lab = Lab::script("echo up\nwhile :; do :; done").qemu_arguments(["-drive", &drive]);
    let vm = lab.spawn().unwrap();
    assert!(is_open(&disk), "the machine runs, with its disk");
    drop(vm);
    assert!(!is_open(&disk), "a dropped machine is gone");
}

#[test]
fn qemu_ends_with_the_process_that_started_it() {
    let Some(_turn) = turn() else { return };
    let dir = Dir::new("orphan");
    let (disk, drive) = disk(&dir);
    let script = dir.file("hang.sh", "#!/bin/sh\necho up\nwhile :; do :; done\n");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ksf-lab"))
        .args(["run", "--qemu=-drive", &format!("--qemu={drive}")])
        .arg(&script)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
    assert!(is_open(&disk));
    child.kill().unwrap();
    child.wait().unwrap();
    // The kernel kills QEMU for us; it then needs a moment to die, which is all that is waited for here.
    let patience = Instant::now() + Duration::from_secs(30);
    while is_open(&disk) {
        assert!(Instant::now() < patience, "QEMU lives on after the process that started it");
        std::thread::yield_now();
    }
}

/// Whether a process has this file open.
fn is_open(path: &Path) -> bool {
    let path = fs::canonicalize(path).unwrap();
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok());
    let mut fds = processes.filter_map(|process| fs::read_dir(process.path().join("fd")).ok()).flatten();
    fds.any(|fd| fd.ok().and_then(|fd| fs::read_link(fd.path()).ok()).is_some_and(|open| open == path))
}
