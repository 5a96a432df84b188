//! Linux mounts what `ksf nfs` and `ksf 9p` export: Debian's kernel, in a machine that QEMU emulates, with the server on this machine.
//!
//! ```text
//!  QEMU ── Debian's kernel ── /usr      ──┐                            ┌── /usr, read-only
//!              └ NFS client ── /mnt     ──┴── TCP ── ksf nfs, here ────┴── a folder of the test
//! ```

use crate::support;
mod guest;
mod images;
mod ninep;
mod power;

use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::support::export::Place;
use crate::support::{Server, engines};
use guest::{Guest, server, server_at, server_with};
use images::cold_directory_or_skip;
use ksf_lab::{Lab, turn};
use ksf_test::{image_or_skip, installed_or_skip, own_run_or_skip, program_or_skip, root_or_skip, succeeds};
use rustix::process::Signal;

/// Root's handles outlive the server, which reads /usr for the guests.
fn may_run() -> Option<ksf_lab::LabTurn> {
    root_or_skip("an export of /usr, and handles that outlive the server")?;
    program_or_skip("mount.nfs")?;
    turn()
}

/// Ends the server as a crash does.
fn kill(mut server: Server) {
    server.signal(Signal::KILL);
    server.wait();
}

/// Files that a guest has listed in `sums` have that content here.
fn sums_are_right(place: &Place) {
    let check = Command::new("sha256sum").args(["--check", "--quiet", "sums"]).current_dir(place.export()).output();
    let check = check.unwrap();
    assert!(check.status.success(), "{}{}", support::stdout(&check), support::stderr(&check));
    assert!(fs::read_to_string(place.export().join("sums")).unwrap().lines().count() > 10);
}

/// Two clients have changed the tree in turns, each this number of times.
fn changes_are_those_of_both(place: &Place, rounds: usize) {
    let twice = place.export().join("twice");
    let read = |name: &str| fs::read_to_string(twice.join(name)).unwrap();
    // Without the lock, or with a count that one has kept in memory, some would be lost.
    assert_eq!(read("count"), format!("{}\n", 2 * rounds));
    assert_eq!(read("log").lines().count(), 2 * rounds);
    let won = ["one", "two"].map(|name| read(&format!("won-by-{name}"))).concat();
    let mut files: Vec<&str> = won.lines().collect();
    let all = files.len();
    files.sort_unstable();
    files.dedup();
    assert_eq!(files.len(), all, "a file was created exclusively by both: {won:?}");
    for name in ["one", "two"] {
        assert!(twice.join(format!("tree-{name}/linux/bpf.h")).exists());
    }
}

/// Compares a tree, refuses a user and lists a cold directory on NFS. Kills the server of a mount of NFS, and has two mounts change one tree,
/// on NFS and on 9P. Runs all tools on NFS, and on 9P those of people with these kinds of cache, and those that test file systems with
/// these. fsx runs on 9P with each kind. `file_system`: the kind on which the exports are; `None`: that of this machine.
fn tools_run(caches: &str, tested: &str, file_system: Option<&str>) {
    const ROUNDS: usize = 12;
    let Some(_turn) = may_run() else { return };
    for tool in ["fio", "postmark", "dbench", "stress-ng"] {
        let Some(_) = program_or_skip(tool) else { return };
    }
    let Some(fsx) = installed_or_skip(env!("CARGO_TARGET_TMPDIR"), "fsx/bin/fsx") else { return };
    let Some(()) = own_run_or_skip("a file system of its own") else { return };
    let (place, place_9p) = (Place::new(), Place::new());
    for (place, kind) in [&place, &place_9p].into_iter().zip(file_system.into_iter().cycle()) {
        let Some(()) = image_or_skip(kind, &[], &place.0.path("disk"), 2048, &place.export()) else { return };
    }
    ninep::fill(&place);
    let Some(many) = cold_directory_or_skip(&place) else { return };
    let engines = engines();
    let mut nfs_engines = engines.iter().cycle();
    let mut server = server_with(0, &place, nfs_engines.next().unwrap(), &many);
    let port = server.address(" tcp ").port();
    let server_9p = place_9p.start_kind("9p", 0, engines.last().unwrap(), ",squash=none", &[]);
    // The whole load of dbench goes through more than 400,000 lines.
    let load = fs::read_to_string("/usr/share/dbench/client.txt").unwrap();
    let load: String = load.split_inclusive('\n').take(3000).collect();
    let guest = Guest::new(include_str!("tools.sh")).file(fsx, "/fsx").text("/load.txt", load);
    let guest = guest.env("PORT_9P", server_9p.address(" tcp ").port().to_string());
    let guest = guest.env("EXPORT_9P", place_9p.export().to_str().unwrap()).env("CACHES", caches).env("TESTED", tested);
    let guest = guest.env("MANY", many.to_str().unwrap()).env("ROUNDS", ROUNDS.to_string()).resolving();
    let lab = ["9pnet_fd", "9p"].into_iter().fold(guest.lab(&server, &place), Lab::module);
    let guest = lab.time_limit(Duration::from_secs(900)).spawn().unwrap();
    for file in [3, 10, 17] {
        guest.wait_for(&format!("file {file}.\n")).unwrap();
        kill(server);
        server = server_with(port, &place, nfs_engines.next().unwrap(), &many);
    }
    let output = guest.wait().unwrap().checked().unwrap();
    assert!(output.ends_with(" end\n"), "{output}");
    for place in [&place, &place_9p] {
        changes_are_those_of_both(place, ROUNDS);
        sums_are_right(place);
    }
    server.stop();
    server_9p.stop();
    for (place, _) in [&place, &place_9p].into_iter().zip(file_system.into_iter().cycle()) {
        succeeds(&["umount", place.export().to_str().unwrap()]);
    }
}

#[test]
fn tools_and_tests_of_file_systems_run_on_a_mounted_export() {
    tools_run("none", "", None);
}

#[test]
#[ignore = "soak: the same with each cache of 9P, and with the tests of file systems there"]
fn tools_run_on_a_mounted_export_with_the_caches_of_9p() {
    let caches = "none mmap loose";
    tools_run(caches, caches, None);
}

#[test]
#[ignore = "soak: the same on another file system of the server"]
fn tools_run_on_a_mounted_export_that_is_on_xfs() {
    tools_run("none", "none", Some("xfs"));
}

#[test]
#[ignore = "soak: the same on another file system of the server"]
fn tools_run_on_a_mounted_export_that_is_on_btrfs() {
    tools_run("none", "none", Some("btrfs"));
}

#[test]
fn a_soft_mount_gets_an_error_and_goes_on_when_its_server_is_back() {
    let Some(_turn) = may_run() else { return };
    let place = Place::new();
    let engine = engines()[0];
    let running = server(&place, engine);
    let port = running.address(" tcp ").port();
    let guest = Guest::new(include_str!("soft.sh")).options("noac,soft,timeo=5,retrans=1");
    let guest = guest.alone(&running, &place, &["cat", "dd", "sync"]).spawn().unwrap();
    guest.wait_for("ready\n").unwrap();
    kill(running);
    guest.wait_for("refused\n").unwrap();
    let running = server_at(port, &place, engine);
    let output = guest.wait().unwrap().checked().unwrap();
    assert!(output.contains("Input/output error") || output.contains("Connection timed out"), "{output}");
    assert_eq!(fs::read_to_string(place.export().join("after")).unwrap(), "after\n");
    running.stop();
}

#[test]
#[ignore = "soak: two file servers in an emulated machine take minutes"]
fn calls_have_the_results_that_they_have_on_the_kernels_own_server() {
    let Some(_turn) = may_run() else { return };
    for tool in ["rpc.nfsd", "rpc.mountd", "exportfs", "rpcbind", "setpriv"] {
        let Some(_) = program_or_skip(tool) else { return };
    }
    let place = Place::new();
    let server = server(&place, engines()[0]);
    let mut guest =
        Guest::new(include_str!("reference.sh")).options("noac").text("/calls", include_str!("calls.sh")).resolving();
    for file in ["/etc/services", "/etc/rpc"] {
        guest = guest.file(file, file);
    }
    guest = guest.text("/etc/passwd", "root:x:0:0::/root:/bin/sh\n_rpc:x:101:65534::/:/bin/sh\n");
    let output = guest.lab(&server, &place).module("nfsd").run().unwrap().checked().unwrap();
    assert!(output.ends_with("no difference\n"), "{output}");
    server.stop();
}
