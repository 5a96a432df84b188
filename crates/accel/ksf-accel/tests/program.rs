//! Programs that a library can help, and others; made with the C compiler.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use ksf_accel::program::{Obstacle, find, obstacle};
use ksf_test::compile::cc;
use ksf_test::{Folder, skip};

/// A file that everybody may run.
fn write(folder: &Folder, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.write(name, content);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Compiles a C program.
fn compile(folder: &Folder, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let program = folder.path(name);
    cc(folder.write(&format!("{name}.c"), source), &program, flags);
    program
}

const MAIN: &str = "int main(void) { return 0; }";

/// As Go's linker makes it.
const GO_NOTE: &str = "__asm__(\".section .note.go.buildid,\\\"a\\\",@note\\n.long 4, 4, 4\\n.ascii \\\"Go\\\\0\\\\0abcd\\\"\\n\
                       .previous\"); int main(void) { return 0; }";

#[test]
fn linked_programs_are_told_apart() {
    let folder = Folder::new();
    assert_eq!(obstacle(&compile(&folder, "dynamic", MAIN, &[])), None);
    assert_eq!(obstacle(&compile(&folder, "static", MAIN, &["-static"])), Some(Obstacle::Static));
    // Has a dynamic section, and no dynamic linker.
    assert_eq!(obstacle(&compile(&folder, "static-pie", MAIN, &["-static-pie"])), Some(Obstacle::Static));
    assert_eq!(obstacle(&compile(&folder, "go", GO_NOTE, &["-static"])), Some(Obstacle::Go));
    // With cgo, Go is linked with libc, and does not ask it.
    assert_eq!(obstacle(&compile(&folder, "cgo", GO_NOTE, &[])), Some(Obstacle::Go));
}

#[test]
fn scripts_are_what_interprets_them() {
    let folder = Folder::new();
    let bound = compile(&folder, "static", MAIN, &["-static"]);
    let through = |name: &str, interpreter: &Path| {
        write(&folder, name, format!("#! {} -x\nexit 0\n", interpreter.display()).as_bytes())
    };
    let script = through("script", &bound);
    assert_eq!(obstacle(&script), Some(Obstacle::Static));
    assert_eq!(obstacle(&through("twice", &script)), Some(Obstacle::Static));
    assert_eq!(obstacle(&write(&folder, "shell", b"#!/bin/sh\n")), None);
    // It interprets itself: the kernel will refuse it.
    let own = folder.path("loop");
    assert_eq!(obstacle(&through("loop", &own)), None);
    for (name, content) in [("empty", &b""[..]), ("text", b"exit 0\n"), ("nothing", b"#!\n"), ("elf", b"\x7fELF")] {
        assert_eq!(obstacle(&write(&folder, name, content)), None, "{name}");
    }
    assert_eq!(obstacle(&folder.path("missing")), None);
}

#[test]
fn other_machines_and_libcs_are_seen() {
    let folder = Folder::new();
    let program = fs::read(compile(&folder, "dynamic", MAIN, &[])).unwrap();
    let changed = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = program.clone();
        change(&mut bytes);
        obstacle(&write(&folder, name, &bytes))
    };
    assert_eq!(changed("word", &|bytes| bytes[4] = 1), Some(Obstacle::OtherMachine));
    assert_eq!(changed("order", &|bytes| bytes[5] ^= 3), Some(Obstacle::OtherMachine));
    assert_eq!(changed("machine", &|bytes| bytes[18] ^= 1), Some(Obstacle::OtherMachine));
    let musl = changed("libc", &|bytes| {
        let at = bytes.windows(8).position(|it| it == b"/ld-linu").expect("the linker's name");
        bytes[at..at + 8].copy_from_slice(b"/ld-musl");
    });
    match musl {
        Some(Obstacle::OtherLibc { interpreter }) => assert!(interpreter.display().to_string().contains("ld-musl")),
        other => panic!("{other:?}"),
    }
    // Notes are looked through up to one that is broken.
    let at = program.windows(4).position(|it| it == b"GNU\0").expect("the build id's note") - 12;
    assert_eq!(changed("note", &|bytes| bytes[at..at + 12].fill(0xff)), None);
    // A table of segments that lies outside of the file: without a linker's name it counts as static.
    assert_eq!(changed("outside", &|bytes| bytes[32..40].fill(0xff)), Some(Obstacle::Static));
}

#[test]
fn programs_with_more_rights_are_seen() {
    if !rustix::process::geteuid().is_root() {
        return skip("needs root (another owner of a file)");
    }
    let folder = Folder::new();
    let program = compile(&folder, "dynamic", MAIN, &[]);
    let with = |user: u32, mode: u32| {
        chown(&program, Some(user), Some(user)).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        obstacle(&program)
    };
    assert_eq!(with(65534, 0o4755), Some(Obstacle::Privileged));
    assert_eq!(with(65534, 0o2755), Some(Obstacle::Privileged));
    assert_eq!(with(65534, 0o2745), None, "without the group's right to execute it is for locking");
    assert_eq!(with(0, 0o6755), None, "root becomes root");
}

#[test]
fn a_program_is_found_as_execvp_does() {
    let folder = Folder::new();
    let program = write(&folder, "server", MAIN.as_bytes());
    let plain = write(&folder, "plain", b"");
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
    let path = format!("/nowhere:{}", &folder.path("").display());
    let find_in = |name: &str| find(OsStr::new(name), Some(OsStr::new(&path)));
    assert_eq!(find_in("server"), Some(program.clone()));
    assert_eq!(find_in("plain"), None);
    assert_eq!(find_in("missing"), None);
    assert_eq!(find(program.as_os_str(), None), Some(program));
    assert_eq!(find(OsStr::new("sh"), None), Some("/bin/sh".into()));
}
