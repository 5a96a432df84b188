//! The parts of `scripts/setup.sh` that download: Rust for a machine without it, the crates, the kernel of the VM lab;
//! and `scripts/cargo` after them.
//!
//! The machine is a directory: a PATH without Rust, an empty home, and in place of curl, of rustup's installer and of
//! what that installs small scripts that write down how they are called. So a fault of the network can be caused, and
//! no test uses one. What they do is what curl 7.88 and rustup 1.28 do.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What setup.sh and scripts/cargo use of a system; everything else is missing.
const TOOLS: [&str; 19] = [
    "awk",
    "cat",
    "chmod",
    "cp",
    "dirname",
    "env",
    "grep",
    "head",
    "id",
    "mkdir",
    "mktemp",
    "rm",
    "sed",
    "sh",
    "sha256sum",
    "sort",
    "tail",
    "tr",
    "wc",
];

/// Every package is there, so that setup.sh installs none on the machine that runs the test.
const DPKG_QUERY: &str = "#!/bin/sh\necho installed\n";

const UNAME: &str = "#!/bin/sh\necho x86_64\n";

/// Delivers the installer, or what FAULT says of it.
const CURL: &str = r#"#!/bin/sh
printf '%s\n' "$@" >>"$RECORD/curl"
while [ $# -gt 1 ]; do
    [ "$1" != --output ] || output=$2
    shift
done
case $FAULT in
    no-network) echo "curl: (6) Could not resolve host: static.rust-lang.org" >&2; exit 6 ;;
    cut-and-told) head -c 100 "$RECORD/installer.sh" >"$output"; echo "curl: (18) transfer closed" >&2; exit 18 ;;
    cut) head -c 100 "$RECORD/installer.sh" >"$output" ;;
    changed) sed 's/minimal/full/' "$RECORD/installer.sh" >"$output" ;;
    *) cp "$RECORD/installer.sh" "$output" ;;
esac
"#;

/// Like rustup-init; its first line, which a cut one has too, tells that it was run.
const INSTALLER: &str = r#"#!/bin/sh
printf '%s\n' "$@" >"$RECORD/installer"
# The profile is minimal. What follows is not in a file that was cut after 100 bytes.
case $FAULT in
    installer-fails) echo "info: looking for a disk"; echo "error: no space left on device" >&2; exit 3 ;;
    installer-idle) exit 0 ;;
esac
[ "${0##*/}" = rustup-init ] || exit 4
bin=${CARGO_HOME:-$HOME/.cargo}/bin
mkdir -p "$bin"
for name in rustup rustc cargo; do
    cp "$RECORD/$name.sh" "$bin/$name"
    chmod +x "$bin/$name"
done
"#;

const RUSTUP: &str = r#"#!/bin/sh
case "$1 $2" in
    "toolchain list") cat "$RECORD/toolchains" 2>/dev/null || echo "no installed toolchains" ;;
    "toolchain install")
        printf '%s\n' "$@" >"$RECORD/rustup"
        [ "$FAULT" != no-toolchain ] || { echo "error: could not download file" >&2; exit 1; }
        echo "$3-x86_64-unknown-linux-gnu (active, default)" >"$RECORD/toolchains"
        ;;
    *) exit 1 ;;
esac
"#;

/// rustup's rustc and cargo run the toolchain that RUSTUP_TOOLCHAIN names, if it is installed.
const PROXY: &str = r#"#!/bin/sh
grep -q "^$RUSTUP_TOOLCHAIN-x86_64" "$RECORD/toolchains" || exit 1
case "${0##*/} $1" in
    "cargo fetch" | "cargo run")
        printf '%s\n' "$@" >>"$RECORD/$1"
        [ "$FAULT" != "no-$1" ] || { echo "error: $1 has no network" >&2; exit 101; }
        ;;
esac
echo "${0##*/} $RUSTUP_TOOLCHAIN (by rustup)"
"#;

struct Machine(PathBuf);

impl Machine {
    fn new(name: &str) -> Machine {
        // With blanks, as homes may have them.
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("setup {name} {}", std::process::id()));
        let machine = Machine(dir);
        for dir in ["bin", "home", "record", "repo/scripts"] {
            fs::create_dir_all(machine.0.join(dir)).unwrap();
        }
        for tool in TOOLS {
            let found =
                ["/usr/bin", "/bin"].map(|dir| Path::new(dir).join(tool)).into_iter().find(|tool| tool.exists());
            let found = found.unwrap_or_else(|| panic!("{tool} is missing"));
            std::os::unix::fs::symlink(found, machine.0.join("bin").join(tool)).unwrap();
        }
        for (name, text) in [("curl", CURL), ("dpkg-query", DPKG_QUERY), ("uname", UNAME)] {
            machine.program(name, text);
        }
        let texts = [("installer", INSTALLER), ("rustup", RUSTUP), ("rustc", PROXY), ("cargo", PROXY)];
        for (name, text) in texts {
            fs::write(machine.0.join("record").join(name).with_extension("sh"), text).unwrap();
        }
        for file in ["scripts/setup.sh", "scripts/cargo", "scripts/packages.txt", "rust-toolchain.toml"] {
            // fs::copy would do, but see `program`.
            machine.install(&repository().join(file), &machine.0.join("repo").join(file));
        }
        machine.pin(INSTALLER);
        machine
    }

    /// A command of the machine.
    fn program(&self, name: &str, text: &str) {
        let source = self.0.join("record").join(name).with_extension("text");
        fs::write(&source, text).unwrap();
        self.install(&source, &self.0.join("bin").join(name));
    }

    /// By another process: a descriptor of this one that is open for writing would keep the file from being run.
    fn install(&self, source: &Path, program: &Path) {
        let status = Command::new("install").args(["-m", "755"]).arg(source).arg(program).status();
        assert!(status.expect("install (coreutils) starts").success());
    }

    /// Makes this text the installer that scripts/rustup.sha256 asks for, under the path of the real one.
    fn pin(&self, installer: &str) {
        let (_, path) = pins().into_iter().find(|(_, path)| path.contains("/x86_64-")).unwrap();
        let mut sum = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        sum.stdin.take().unwrap().write_all(installer.as_bytes()).unwrap();
        let sum = String::from_utf8(sum.wait_with_output().unwrap().stdout).unwrap();
        let line = format!("{}  {path}\n", sum.split_whitespace().next().unwrap());
        fs::write(self.0.join("repo/scripts/rustup.sha256"), line).unwrap();
    }

    fn command(&self, program: &str, fault: &str) -> Command {
        let mut command = Command::new(self.0.join("repo").join(program));
        command.env_clear().env("PATH", self.0.join("bin")).env("HOME", self.0.join("home"));
        command.env("RECORD", self.0.join("record")).env("FAULT", fault).stdin(Stdio::null());
        command
    }

    fn set_up(&self, fault: &str) -> Output {
        self.command("scripts/setup.sh", fault).arg("demo").output().unwrap()
    }

    /// The words with which a stand-in was called; None if it was not.
    fn called(&self, program: &str) -> Option<Vec<String>> {
        let text = fs::read_to_string(self.0.join("record").join(program)).ok()?;
        Some(text.lines().map(str::to_owned).collect())
    }

    /// What `scripts/cargo --version` prints.
    fn cargo_version(&self) -> String {
        let output = self.command("scripts/cargo", "").arg("--version").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Asserts that setup.sh failed and said so, with the remedy, in one line after those about its progress.
    fn assert_fails(&self, fault: &str, reason: &str) {
        let output = self.set_up(fault);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{fault}: {said}");
        let progress = |line: &&str| line.starts_with("setup: rustup ");
        let lines: Vec<&str> = said.lines().skip_while(progress).collect();
        let [line] = lines[..] else { panic!("{fault}: one line and no more:\n{said}") };
        assert!(line.starts_with("setup: ") && line.contains(reason), "{fault}: {line}");
        assert!(line.contains(&format!("install Rust {} yourself", channel())), "{fault}: {line}");
        assert!(line.ends_with("run this again"), "{fault}: {line}");
        let cargo_home = self.0.join("home/.cargo");
        let left = fs::read_dir(cargo_home).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.filter(|name| name != "bin").collect();
        assert!(left.is_empty(), "{fault}: {left:?} is left");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A value of rust-toolchain.toml, as it is written there.
fn toolchain(key: &str) -> String {
    let text = fs::read_to_string(repository().join("rust-toolchain.toml")).unwrap();
    let value = text.lines().filter_map(|line| line.split_once(" = ")).find(|(name, _)| *name == key);
    value.unwrap_or_else(|| panic!("rust-toolchain.toml has no {key}")).1.to_owned()
}

fn channel() -> String {
    toolchain("channel").trim_matches('"').to_owned()
}

/// The lines of scripts/rustup.sha256: sum and path.
fn pins() -> Vec<(String, String)> {
    let text = fs::read_to_string(repository().join("scripts/rustup.sha256")).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_once("  ").expect("SUM  PATH")).map(|(sum, path)| (sum.into(), path.into())).collect()
}

#[test]
fn rust_comes_to_a_machine_without_it() {
    let machine = Machine::new("fresh");
    let output = machine.set_up("");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");

    let curl = machine.called("curl").unwrap();
    let (_, path) = pins().into_iter().find(|(_, path)| path.contains("/x86_64-")).unwrap();
    assert_eq!(curl.last().unwrap(), &format!("https://static.rust-lang.org/rustup/{path}"));
    assert!(curl.windows(2).any(|words| words == ["--proto", "=https"]), "redirections too: {curl:?}");
    assert!(curl.contains(&"--fail".to_owned()), "a page about an error is no installer: {curl:?}");

    let installer = machine.called("installer").unwrap();
    assert_eq!(installer, ["-y", "--no-modify-path", "--profile", "minimal", "--default-toolchain", "none"]);

    let rustup = machine.called("rustup").unwrap();
    let wanted = ["toolchain", "install", &channel(), "--profile", "minimal", "--no-self-update"];
    assert_eq!(rustup[..6], wanted);
    let components: Vec<&str> = rustup[6..].chunks(2).map(|pair| pair[1].as_str()).collect();
    assert!(rustup[6..].chunks(2).all(|pair| pair[0] == "--component"), "{rustup:?}");
    assert_eq!(format!("{components:?}"), toolchain("components"));

    assert_eq!(machine.cargo_version(), format!("cargo {} (by rustup)\n", channel()));
    let home: Vec<_> = fs::read_dir(machine.0.join("home")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(home, [".cargo"], "shell profiles stay as they are");
    assert_eq!(fs::read_dir(machine.0.join("home/.cargo")).unwrap().count(), 1, "the installer is gone");
}

#[test]
fn a_second_run_downloads_nothing() {
    let machine = Machine::new("second");
    assert!(machine.set_up("").status.success());
    fs::remove_file(machine.0.join("record/curl")).unwrap();
    fs::remove_file(machine.0.join("record/rustup")).unwrap();
    assert!(machine.set_up("no-network").status.success());
    assert_eq!((machine.called("curl"), machine.called("rustup")), (None, None));
}

#[test]
fn what_is_installed_is_what_the_toolchain_file_says() {
    let machine = Machine::new("pinned");
    let toolchain = "[toolchain]\nchannel = \"9.8.7\"\ncomponents = [\"rust-src\"]\nprofile = \"default\"\n";
    fs::write(machine.0.join("repo/rust-toolchain.toml"), toolchain).unwrap();
    assert!(machine.set_up("").status.success());
    let wanted =
        ["toolchain", "install", "9.8.7", "--profile", "default", "--no-self-update", "--component", "rust-src"];
    assert_eq!(machine.called("rustup").unwrap(), wanted);
    assert_eq!(machine.cargo_version(), "cargo 9.8.7 (by rustup)\n");
}

#[test]
fn cargo_home_and_an_older_rust_in_path_are_minded() {
    let machine = Machine::new("older");
    for name in ["rustc", "cargo"] {
        machine.program(name, &format!("#!/bin/sh\necho '{name} 1.63.0 (of the distribution)'\n"));
    }
    let cargo_home = machine.0.join("home/cargo home");
    let output = machine.command("scripts/setup.sh", "").env("CARGO_HOME", &cargo_home).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(cargo_home.join("bin/rustup").exists());

    let cargo = machine.command("scripts/cargo", "").env("CARGO_HOME", &cargo_home).arg("--version").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&cargo.stdout), format!("cargo {} (by rustup)\n", channel()));
}

#[test]
fn a_failed_download_is_told_with_its_reason() {
    let machine = Machine::new("download");
    machine
        .assert_fails("no-network", "(curl: (6) Could not resolve host: static.rust-lang.org); connect to the network");
    machine.assert_fails("cut-and-told", "(curl: (18) transfer closed); connect to the network");
    assert_eq!(machine.called("installer"), None);
    assert!(machine.set_up("").status.success(), "the fault is over");
}

#[test]
fn an_installer_that_is_cut_or_changed_is_not_run() {
    let machine = Machine::new("cut");
    machine.assert_fails("cut", "came incomplete or changed (100 bytes), it was not run");
    machine.assert_fails("changed", "came incomplete or changed");
    assert_eq!(machine.called("installer"), None);
    assert!(machine.set_up("").status.success(), "the fault is over");
}

#[test]
fn an_installer_that_fails_is_told_with_its_last_words() {
    let machine = Machine::new("installer");
    machine.assert_fails("installer-fails", "failed with code 3 (error: no space left on device)");
    machine.assert_fails("installer-idle", "left no ");
    assert_eq!(machine.called("rustup"), None);
    machine.assert_fails("no-toolchain", "by rustup (error: could not download file); connect to the network");
    // Now rustup is there: it is not fetched again.
    fs::remove_file(machine.0.join("record/curl")).unwrap();
    assert!(machine.set_up("").status.success(), "the fault is over");
    assert_eq!(machine.called("curl"), None);
}

#[test]
fn crates_that_cannot_be_fetched_are_told() {
    let machine = Machine::new("crates");
    let output = machine.set_up("no-fetch");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let line = said.lines().last().unwrap();
    assert!(line.contains("(error: fetch has no network); connect to the network, and run this again"), "{line}");
    let fetch = machine.called("fetch").unwrap();
    assert_eq!(fetch[..4], ["fetch", "--locked", "--target", "x86_64-unknown-linux-gnu"]);
}

#[test]
fn the_kernel_of_the_lab_is_fetched_before_the_tests() {
    let machine = Machine::new("kernel");
    machine.program("id", "#!/bin/sh\necho 0\n");
    machine.program("apt-get", "#!/bin/sh\nprintf '%s\\n' \"$@\" >>\"$RECORD/apt-get\"\n");
    let set_up = |target: &str, fault: &str, ci: Option<&str>| {
        let mut command = machine.command("scripts/setup.sh", fault);
        let output = command.arg(target).envs(ci.map(|value| ("CI", value))).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let updates = || machine.called("apt-get").map_or(0, |words| words.iter().filter(|word| *word == "update").count());

    // Without QEMU there is nothing to boot; the tests say so.
    assert_eq!(set_up("test", "", None).0, Some(0));
    assert_eq!(machine.called("run"), None);

    machine.program("qemu-system-x86_64", "#!/bin/sh\nexit 1\n");
    assert_eq!(set_up("demo", "", None).0, Some(0));
    assert_eq!(machine.called("run"), None, "of use to tests only");
    assert_eq!(set_up("test", "", Some("true")).0, Some(0));
    assert!(machine.called("run").unwrap().ends_with(&["-p", "ksf-lab", "--", "kernel"].map(str::to_owned)));
    assert_eq!(updates(), 0);

    // With old lists of packages it may not be found: they are renewed, once.
    let (status, said) = set_up("test", "no-run", None);
    assert_eq!((status, updates()), (Some(0), 1), "{said}");
    let line = "setup: no kernel for the VM lab (error: run has no network); its tests will be skipped";
    assert!(said.lines().any(|said| said == line), "{said}");

    let (status, said) = set_up("test", "no-run", Some("true"));
    assert_eq!(status, Some(1), "in CI no test may be skipped: {said}");
    assert_eq!(said.lines().last(), Some("setup: no kernel for the VM lab (error: run has no network)"));
}

#[test]
fn a_home_that_cannot_be_written_to_is_named() {
    let machine = Machine::new("home");
    // Not by its permissions, which root passes over.
    fs::write(machine.0.join("home/.cargo"), "a file").unwrap();
    machine.assert_fails("", "no place for Rust (mkdir: ");
    assert_eq!(machine.called("curl"), None);
}

#[test]
fn a_processor_without_a_pinned_installer_is_named() {
    let machine = Machine::new("processor");
    machine.program("uname", "#!/bin/sh\necho riscv64\n");
    machine.assert_fails("", "no rustup for riscv64 in scripts/rustup.sha256");
    assert_eq!(machine.called("curl"), None);
}

#[test]
fn the_pinned_installers_are_of_one_version() {
    let pins = pins();
    for (sum, path) in &pins {
        assert!(sum.len() == 64 && sum.bytes().all(|digit| digit.is_ascii_hexdigit()), "{sum}");
        let parts: Vec<&str> = path.split('/').collect();
        let ["archive", version, _, "rustup-init"] = parts[..] else { panic!("{path}") };
        assert!(pins[0].1.starts_with(&format!("archive/{version}/")), "{path}");
    }
    let processors: Vec<&str> = pins.iter().map(|(_, path)| path.split('/').nth(2).unwrap()).collect();
    assert_eq!(processors, ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]);
}
