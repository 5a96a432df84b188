//! A demo or a bench that is killed or interrupted leaves nothing behind, whichever of its own processes it is, and
//! although some of what they start forks twice.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ksf_test::{effort, is_root, program_or_skip, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process};

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");

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
    let mut result = None;
    wait_until(what, || {
        result = found();
        result.is_some()
    });
    result.expect("it was waited for")
}

fn ksf() -> PathBuf {
    let ksf = Path::new(XTASK).with_file_name("ksf");
    assert!(ksf.is_file(), "{} is missing; run: scripts/cargo build -p ksf-cli", ksf.display());
    ksf
}

fn send(signal: Signal, pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// What was started, what watches it, and what does the work: the process so many below the first. Orphans are children of
/// what watches, too, and what was started later may have the smaller id.
fn below(first: u32, depth: u32) -> u32 {
    let program = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let next = |pid| children(pid).into_iter().find(|child| program(*child) == program(first)).unwrap();
    (0..depth).fold(first, |pid, _| next(pid))
}

fn wait_for_the_end_of(pids: &[u32], why: &str) {
    wait_until(format_args!("the end of {pids:?} after {why}"), || {
        let live = parents();
        pids.iter().all(|pid| live.iter().all(|(other, _)| other != pid))
    });
}

/// A demo whose servers start a daemon, as rpcbind is one: a process of a session of its own, whose parent has ended.
fn start_demo(dir: &Path) -> Child {
    let script = format!(
        "#!/bin/sh\ncase $1 in kecho | krpc2)\n    \
         setsid sh -c 'sleep 1000 </dev/null >/dev/null 2>&1 & echo $! >{0}/new; mv {0}/new {0}/daemon' ;;\nesac\n\
         exec {1} \"$@\"\n",
        dir.display(),
        ksf().display()
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
        let mut demo = start_demo(dir.path());
        let daemon = wait_for("a daemon", || fs::read_to_string(dir.path().join("daemon")).ok());
        let daemon: u32 = daemon.trim().parse().unwrap();
        let victim = below(demo.id(), depth);
        let all = wait_for("a load", || {
            let all = [descendants(demo.id()), vec![daemon]].concat();
            (all.len() > 4).then_some(all)
        });
        send(Signal::KILL, victim);
        demo.wait().unwrap();
        wait_for_the_end_of(&all, &format!("SIGKILL of process {depth}"));
    }
}

/// The words that a process was started with, in one line.
fn command_line(pid: u32) -> String {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&words).replace('\0', " ")
}

/// What these processes hold of eBPF: its kind as bpftool names it, and its id, which is not given out anew soon. What
/// somebody has pinned stays after them.
fn bpf_objects(pids: &[u32]) -> BTreeSet<(&'static str, String)> {
    let files = pids.iter().flat_map(|pid| fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten());
    let infos = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    let object = |line: &str| {
        let (key, id) = line.split_once(':')?;
        let kind =
            [("prog_id", "prog"), ("map_id", "map"), ("link_id", "link")].into_iter().find(|kind| kind.0 == key)?;
        Some((kind.1, id.trim().to_owned()))
    };
    infos.flat_map(|info| info.lines().filter_map(object).collect::<Vec<_>>()).collect()
}

fn is_loaded(bpftool: &Path, (kind, id): &(&str, String)) -> bool {
    let mut bpftool = Command::new(bpftool);
    bpftool.args([kind, "show", "id", id]).stdout(Stdio::null()).stderr(Stdio::null());
    bpftool.status().unwrap().success()
}

/// bpftool, with which the kernel engine is looked at; `None`: the test is skipped, as one of them does not work here.
fn bpftool_or_skip() -> Option<PathBuf> {
    let bpftool = program_or_skip("bpftool")?;
    let doctor = Command::new(ksf()).args(["doctor", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let engines = report["engines"].as_array().unwrap();
    let kernel = engines.iter().find(|engine| engine["name"] == "kernel").unwrap();
    if kernel["usable"] != true {
        skip(format_args!("needs the kernel engine ({})", kernel["reason"]));
        return None;
    }
    Some(bpftool)
}

/// The inode of a process's network namespace.
fn network(pid: impl std::fmt::Display) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).ok()
}

/// Whether a process or a mount keeps a network namespace.
fn is_kept(network_id: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.contains(network_id.to_str().unwrap())
        || parents().into_iter().any(|(pid, _)| network(pid).as_deref() == Some(network_id))
}

fn files_in(dir: &str) -> BTreeSet<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// A bench with a target directory and a place for temporary files of its own, both in `dir`.
fn start_bench(dir: &Path) -> Child {
    let (target, temporary) = (dir.join("target"), dir.join("temporary"));
    fs::create_dir(&target).unwrap();
    fs::create_dir(&temporary).unwrap();
    fs::write(target.join("CACHEDIR.TAG"), "").unwrap();
    fs::copy(XTASK, target.join("xtask")).unwrap();
    let mut bench = Command::new(target.join("xtask"));
    bench.args(["bench", "--case", "null-tcp-128", "--runs", "1", "--seconds", "1", "--ksf"]).arg(ksf());
    bench.arg("--out").arg(dir.join("report")).env("TMPDIR", temporary);
    bench.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_bench_that_is_killed_or_interrupted_leaves_nothing_behind() {
    let (peer, kernel) = (&["/threads "][..], &[" krpc2 ", " --engine kernel "][..]);
    let engine = if is_root() { kernel } else { &[" krpc2 ", " --engine uring "] };
    // Without root the bench loads nothing, and bpftool is not needed.
    let bpftool = match is_root().then(bpftool_or_skip) {
        Some(None) => return,
        found => found.flatten(),
    };
    // An engine comes after the peers: a bench takes seconds to get there.
    let interrupted = effort(peer, engine);
    for (signal, depth, server) in
        [(Signal::KILL, 0, peer), (Signal::KILL, 1, engine), (Signal::KILL, 2, peer), (Signal::INT, 0, interrupted)]
    {
        let why = format!("{signal:?} of process {depth} beside {server:?}");
        let dir = tempfile::tempdir().unwrap();
        let mut bench = start_bench(dir.path());
        let all = wait_for("a load on a server", || {
            assert_eq!(bench.try_wait().unwrap(), None, "the bench ended before its server ran");
            let all = descendants(bench.id());
            let lines: Vec<String> = all.iter().map(|&pid| command_line(pid)).collect();
            let is_there = |words: &[&str]| lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
            (is_there(server) && is_there(&[" rpctest "])).then_some(all)
        });
        let (objects, worker) = (bpf_objects(&all), below(bench.id(), 2));
        assert_eq!(objects.iter().any(|(kind, _)| *kind == "prog"), server == kernel, "{objects:?}");
        // While it is open its inode is not given to another namespace. It keeps no process and no mount.
        let _open = fs::File::open(format!("/proc/{worker}/ns/net")).unwrap();
        let network_id = network(worker).unwrap();
        assert_eq!(Some(&network_id) != network("self").as_ref(), is_root(), "the bench has a network of its own");

        send(signal, below(bench.id(), depth));
        bench.wait().unwrap();
        wait_for_the_end_of(&all, &why);
        wait_until(format_args!("the end of eBPF objects {objects:?} after {why}"), || {
            !objects.iter().any(|object| is_loaded(bpftool.as_deref().unwrap(), object))
        });
        wait_until(format_args!("no temporary folder after {why}"), || {
            let left = ["target", "temporary"].map(|name| files_in(dir.path().join(name).to_str().unwrap()));
            left.iter().flatten().all(|path| path.ends_with("CACHEDIR.TAG") || path.ends_with("xtask"))
        });
        wait_until(format_args!("no network namespace after {why}"), || !is_root() || !is_kept(&network_id));
    }
}
