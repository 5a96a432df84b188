//! Copies of a static program share a port, and each gets the connections of its CPU.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::*;
use ksf_accel::copies::Copies;
use ksf_accel::{AccelError, status};

/// The static program of `tests/c/says_pid.c`.
fn program(folder: &Path) -> PathBuf {
    let program = folder.join("says_pid");
    compile::cc(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/says_pid.c"), &program, &["-static"]);
    program
}

fn cgroups() -> usize {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ")).unwrap().split(' ').nth(4).unwrap();
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap();
    let name = format!("ksf-accel-{}", std::process::id());
    let entries = std::fs::read_dir(Path::new(mount).join(own)).unwrap().flatten();
    entries.filter(|entry| entry.file_name().to_str() == Some(&name)).count()
}

/// One after the other: the cgroup is named after the process.
#[test]
fn each_copy_gets_what_arrives_on_its_cpu() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let folder = folder();
    let program = program(&folder);
    for address in ["127.0.0.1:8200", "[::1]:8201"] {
        let address: SocketAddr = address.parse().unwrap();
        let mut options = options();
        options.status_folder = Some(folder.join("status"));
        options.cpus = Some(vec![a as u32, b as u32]);
        let start = || {
            let mut command = Command::new(&program);
            command.arg(address.port().to_string()).args(address.is_ipv6().then_some("6"));
            command
        };
        let mut copies = Copies::start(2, start, options).unwrap();
        assert!(copies.not_steered().is_none(), "{:?}", copies.not_steered());
        let workers = || status::all(&folder.join("status")).unwrap()[0].workers.clone();
        wait_until("both are found", || workers().len() == 2);
        assert_eq!((copies.shared(), cgroups()), (2, 1));
        let pids = copies.pids();
        assert_eq!(servers_from(a, address, 40), BTreeMap::from([(pids[0], 40)]));
        assert_eq!(servers_from(b, address, 40), BTreeMap::from([(pids[1], 40)]));

        // One that ends leaves its connections to the others, and its status stays.
        // SAFETY: no memory is involved; a child that was not waited for.
        unsafe { libc::kill(pids[0] as i32, libc::SIGTERM) };
        let (ended, status) = copies.wait().unwrap();
        assert_eq!((ended, status.code()), (pids[0], Some(7)));
        assert_eq!(servers_from(a, address, 20), BTreeMap::from([(pids[1], 20)]));
        assert_eq!(copies.status().code(), Some(7));
        // The last one: the port is any user's, though what steered still lives.
        // SAFETY: as above.
        unsafe { libc::kill(pids[1] as i32, libc::SIGTERM) };
        takes_all(address);
        drop(copies);
        assert_eq!(cgroups(), 0);
        assert!(TcpStream::connect(address).is_err());
        assert!(status::all(&folder.join("status")).unwrap().is_empty());
    }

    // A program that is not there: nothing is left, either.
    let error = Copies::start(2, || Command::new("/no/such/program"), options()).unwrap_err();
    assert!(matches!(error, AccelError::System { .. }), "{error}");
    assert_eq!(cgroups(), 0);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn without_it_the_second_copy_cannot_listen() {
    let Some(()) = own_network() else { return };
    let folder = folder();
    let program = program(&folder);
    let start = || Command::new(&program).arg("8202").spawn().unwrap();
    let mut first = start();
    wait_until("the first serves", || TcpStream::connect("127.0.0.1:8202").is_ok());
    assert_eq!(start().wait().unwrap().code(), Some(3));
    first.kill().unwrap();
    first.wait().unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}
