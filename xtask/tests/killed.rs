//! A demo that is killed leaves no process behind, whichever of its own processes is killed, and whoever forked twice.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");
const TIMEOUT: Duration = Duration::from_secs(60);

/// Each process and its parent.
fn parents() -> Vec<(u32, u32)> {
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parent = |pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        (fields.next()? != "Z").then_some(())?;
        Some((pid, fields.next()?.parse().ok()?))
    };
    pids.filter_map(parent).collect()
}

fn children(pid: u32) -> Vec<u32> {
    parents().into_iter().filter(|(_, parent)| *parent == pid).map(|(pid, _)| pid).collect()
}

fn descendants(pid: u32) -> Vec<u32> {
    children(pid).into_iter().flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}

fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {TIMEOUT:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A demo whose servers start a daemon, as rpcbind is one: a process of a session of its own, whose parent has ended.
fn start(dir: &Path) -> Child {
    let ksf = Path::new(XTASK).with_file_name("ksf");
    assert!(ksf.is_file(), "{} is missing; run: scripts/cargo build -p ksf-cli", ksf.display());
    let script = format!(
        "#!/bin/sh\ncase $1 in kecho | krpc2)\n    \
         setsid sh -c 'sleep 1000 </dev/null >/dev/null 2>&1 & echo $! >{0}/new; mv {0}/new {0}/daemon' ;;\nesac\n\
         exec {1} \"$@\"\n",
        dir.display(),
        ksf.display()
    );
    let wrapper = dir.join("ksf");
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    // In a network of its own: XDP on the machine's lo is the machine's.
    let mut demo = match rustix::process::geteuid().is_root() {
        true => {
            let mut unshare = Command::new("unshare");
            unshare.args(["--net", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\"", XTASK]);
            unshare
        }
        false => Command::new(XTASK),
    };
    demo.args(["demo", "--seconds", "30", "--ksf"]).arg(wrapper);
    demo.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_killed_demo_leaves_no_process_behind() {
    for depth in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let mut demo = start(dir.path());
        let daemon = wait_for("a daemon", || fs::read_to_string(dir.path().join("daemon")).ok());
        let daemon: u32 = daemon.trim().parse().unwrap();
        // What was started, what watches it, and what does the work.
        let victim = (0..depth).fold(demo.id(), |pid, _| children(pid)[0]);
        let all = wait_for("a load", || {
            let all = [descendants(demo.id()), vec![daemon]].concat();
            (all.len() > 4).then_some(all)
        });
        kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
        demo.wait().unwrap();
        wait_for(&format!("the end of {all:?} after SIGKILL of process {depth}"), || {
            let live = parents();
            all.iter().all(|pid| live.iter().all(|(other, _)| other != pid)).then_some(())
        });
    }
}
