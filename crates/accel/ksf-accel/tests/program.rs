//! Programs that a library can help, and others; made with the C compiler.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use ksf_accel::program::{Obstacle, find, obstacle};
use tempfile::TempDir;

/// A folder that is removed with the value.
struct Folder(TempDir);

impl Folder {
    fn new(name: &str) -> Self {
        Self(tempfile::Builder::new().prefix(&format!("ksf-accel-program-{name}-")).tempdir().unwrap())
    }

    fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Compiles a C program.
    fn compile(&self, name: &str, source: &str, flags: &[&str]) -> PathBuf {
        let source = self.write(&format!("{name}.c"), source.as_bytes());
        let program = self.0.path().join(name);
        let status = Command::new("cc").args(flags).arg("-o").arg(&program).arg(source).status().unwrap();
        assert!(status.success());
        program
    }
}

const MAIN: &str = "int main(void) { return 0; }";

/// As Go's linker makes it.
const GO_NOTE: &str = "__asm__(\".section .note.go.buildid,\\\"a\\\",@note\\n.long 4, 4, 4\\n.ascii \\\"Go\\\\0\\\\0abcd\\\"\\n\
                       .previous\"); int main(void) { return 0; }";

#[test]
fn linked_programs_are_told_apart() {
    let folder = Folder::new("linked");
    assert_eq!(obstacle(&folder.compile("dynamic", MAIN, &[])), None);
    assert_eq!(obstacle(&folder.compile("static", MAIN, &["-static"])), Some(Obstacle::Static));
    // Has a dynamic section, and no dynamic linker.
    assert_eq!(obstacle(&folder.compile("static-pie", MAIN, &["-static-pie"])), Some(Obstacle::Static));
    assert_eq!(obstacle(&folder.compile("go", GO_NOTE, &["-static"])), Some(Obstacle::Go));
    // With cgo, Go is linked with libc, and does not ask it.
    assert_eq!(obstacle(&folder.compile("cgo", GO_NOTE, &[])), Some(Obstacle::Go));
}

#[test]
fn scripts_are_what_interprets_them() {
    let folder = Folder::new("scripts");
    let bound = folder.compile("static", MAIN, &["-static"]);
    let through = |name: &str, interpreter: &Path| {
        folder.write(name, format!("#! {} -x\nexit 0\n", interpreter.display()).as_bytes())
    };
    let script = through("script", &bound);
    assert_eq!(obstacle(&script), Some(Obstacle::Static));
    assert_eq!(obstacle(&through("twice", &script)), Some(Obstacle::Static));
    assert_eq!(obstacle(&folder.write("shell", b"#!/bin/sh\n")), None);
    // It interprets itself: the kernel will refuse it.
    let own = folder.0.path().join("loop");
    assert_eq!(obstacle(&through("loop", &own)), None);
    for (name, content) in [("empty", &b""[..]), ("text", b"exit 0\n"), ("nothing", b"#!\n"), ("elf", b"\x7fELF")] {
        assert_eq!(obstacle(&folder.write(name, content)), None, "{name}");
    }
    assert_eq!(obstacle(&folder.0.path().join("missing")), None);
}

#[test]
fn other_machines_and_libcs_are_seen() {
    let folder = Folder::new("machines");
    let program = fs::read(folder.compile("dynamic", MAIN, &[])).unwrap();
    let changed = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = program.clone();
        change(&mut bytes);
        obstacle(&folder.write(name, &bytes))
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
    // A table of segments that lies outside of the file: without a linker's name it counts as static.
    assert_eq!(changed("outside", &|bytes| bytes[32..40].fill(0xff)), Some(Obstacle::Static));
}

#[test]
fn programs_with_more_rights_are_seen() {
    if !rustix::process::geteuid().is_root() {
        return common::skip("needs root (another owner of a file)");
    }
    let folder = Folder::new("rights");
    let program = folder.compile("dynamic", MAIN, &[]);
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
    let folder = Folder::new("path");
    let program = folder.write("server", MAIN.as_bytes());
    let plain = folder.write("plain", b"");
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
    let path = format!("/nowhere:{}", folder.0.path().display());
    let find_in = |name: &str| find(OsStr::new(name), Some(OsStr::new(&path)));
    assert_eq!(find_in("server"), Some(program.clone()));
    assert_eq!(find_in("plain"), None);
    assert_eq!(find_in("missing"), None);
    assert_eq!(find(program.as_os_str(), None), Some(program));
    assert_eq!(find(OsStr::new("sh"), None), Some("/bin/sh".into()));
}
