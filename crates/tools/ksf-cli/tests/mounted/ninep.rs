//! Linux mounts what `ksf 9p` exports, by its own client.
//!
//! These steps have a machine of their own, and not the one of [`super::tools_run`]: they kill the server, and Linux' client of 9P does not
//! connect again. Its errors after that, and those of its kernel with `cache=loose`, are in the way of no other step here.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::process::Command;
use std::time::Duration;

use ksf_lab::{Lab, turn};
use ksf_test::{own_run_or_skip, succeeds};

use super::images::cold_directory_or_skip;
use super::kill;
use crate::support::engines;
use crate::support::export::Place;

/// Each user of the machine has an attach.
const USER: (&str, u32) = ("user", 1001);

/// What the script runs besides the shell.
const TOOLS: [&str; 26] = [
    "mount",
    "umount",
    "mkdir",
    "rmdir",
    "sha256sum",
    "find",
    "sort",
    "cmp",
    "stat",
    "readlink",
    "ls",
    "wc",
    "cp",
    "dd",
    "cat",
    "truncate",
    "mv",
    "ln",
    "mkfifo",
    "chmod",
    "touch",
    "rm",
    "flock",
    "setpriv",
    "true",
    "sync",
];

/// A tree with what `find` and `sha256sum` say of it.
pub(crate) fn fill(place: &Place) {
    let tree = place.export().join("tree");
    fs::create_dir_all(&tree).unwrap();
    for folder in 0..8 {
        let path = tree.join(format!("folder {folder}/deep/er"));
        fs::create_dir_all(&path).unwrap();
        for file in 0..10_usize {
            let bytes: Vec<u8> = (0..file * file * 1500).map(|at| (at / (file + folder)) as u8).collect();
            fs::write(path.join(format!("file-{file}")), bytes).unwrap();
        }
    }
    fs::write(tree.join("large"), vec![b'x'; 3_000_001]).unwrap();
    fs::write(tree.join("odd"), "12345").unwrap();
    fs::set_permissions(tree.join("odd"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("../tree/odd", tree.join("link")).unwrap();
    let shell = "find . -type f -print0 | xargs -0 sha256sum >../sums; find . | LC_ALL=C sort >../names";
    assert!(Command::new("sh").args(["-euc", shell]).current_dir(&tree).status().unwrap().success());
}

/// `owner`: the user whose the file is that another user than root makes.
fn mounts_reads_and_writes((access, owner): (&str, u32), cache: &str, engine: &str) {
    let place = Place::new();
    fill(&place);
    let Some(many) = cold_directory_or_skip(&place) else { return };
    // A new file has a group of its user on the server.
    let known = place.0.write("passwd", "root:x:0:0::/:/bin/sh\nuser:x:1001:1002::/:/bin/sh\n");
    succeeds(&["mount", "--bind", known.to_str().unwrap(), "/etc/passwd"]);
    let other = format!("{},ro,squash=none", many.display());
    let start = |port| place.start_kind("9p", port, engine, ",squash=none", &["--export", &other]);
    let server = start(0);
    let port = server.address(" tcp ").port();
    let lab = Lab::script(include_str!("ninep.sh")).reach_host().time_limit(Duration::from_secs(300));
    let lab = lab.env("PORT", port.to_string()).env("CACHE", cache);
    let lab = lab.env("ACCESS", access).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf").memory_mib(1024);
    let lab = lab.env("EXPORT", place.export().to_str().unwrap()).env("MANY", many.to_str().unwrap());
    let lab = TOOLS.into_iter().fold(lab, |lab, tool| lab.tool(tool));
    let lab = ["9pnet_fd", "9p"].into_iter().fold(lab, Lab::module);
    let guest = lab.env("LC_ALL", "C").spawn().unwrap();
    for writer in ["one", "two"] {
        guest.wait_for(&format!("synced {writer}-1.\n")).unwrap();
    }
    kill(server);
    guest.wait_for("unmounted\n").unwrap();
    let server = start(port);
    let output = guest.wait().unwrap().checked().unwrap();
    assert!(output.ends_with("finished\n"), "{output}");
    let new = place.export().join("new");
    let check = Command::new("sha256sum").args(["--check", "--quiet", "../sums-of-new"]).current_dir(&new).status();
    assert!(check.unwrap().success());
    let (second, fifo) = (fs::metadata(new.join("second")).unwrap(), fs::metadata(new.join("fifo")).unwrap());
    assert_eq!((second.mode() & 0o7777, second.nlink(), second.mtime()), (0o604, 1, 981_173_106));
    for (name, owner) in [("mine", owner), ("client", USER.1), ("any", 0)] {
        let made = fs::metadata(new.join("shared").join(name)).unwrap();
        assert_eq!((made.uid(), made.gid()), (owner, 1002), "access={access}, {name}");
    }
    assert!(fifo.file_type().is_fifo() && fifo.mode() & 0o7777 == 0o600);
    assert_eq!(fs::read_link(new.join("dangling")).unwrap().to_str(), Some("none"));
    assert!(!new.join("gone").exists() && !new.join("folder").exists());
    let large = fs::read(new.join("large")).unwrap();
    assert_eq!((large.len(), &large[1_000_000..1_000_010]), (5 << 20, &b"0123456789"[..]));
    server.stop();
    succeeds(&["umount", "/etc/passwd"]);
}

#[test]
fn linux_mounts_an_export_of_9p_and_reads_and_writes_it() {
    let Some(()) = own_run_or_skip("a file system of its own, and files of the users of another machine") else {
        return;
    };
    let Some(_turn) = turn() else { return };
    mounts_reads_and_writes(USER, "none", engines()[0]);
}

#[test]
#[ignore = "soak: the same once more for each kind of cache and of access"]
fn linux_mounts_an_export_of_9p_with_its_caches() {
    let Some(()) = own_run_or_skip("a file system of its own, and files of the users of another machine") else {
        return;
    };
    let Some(_turn) = turn() else { return };
    // With `any` there is one attach, that of root.
    let mounts = [(USER, "mmap"), (USER, "loose"), (("client", 1001), "none"), (("any", 0), "none")];
    for ((access, cache), engine) in mounts.into_iter().zip(engines().iter().rev().cycle()) {
        mounts_reads_and_writes(access, cache, engine);
    }
}
