//! What a result belongs to: the revision of the code, and the machine with its versions.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::process::output;

const TOOL_TIMEOUT: Duration = Duration::from_secs(20);

/// What is measured: the whole tree but texts and results, so that a commit of a report does not make it an old one.
const MEASURED: [&str; 4] = [".", ":(exclude)docs", ":(exclude)bench/results", ":(exclude)*.md"];

/// The state of the code that a result was measured with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Revision {
    /// The last commit that changed what is measured.
    pub(crate) commit: String,
    /// The work tree had changes of what is measured that are in no commit.
    pub(crate) dirty: bool,
}

impl Revision {
    /// That of the work tree at `root`.
    pub(crate) fn of(root: &Path) -> Revision {
        let log = git(root, &["log", "-1", "--format=%h", "--abbrev=12", "--"]);
        let changes = git(root, &["status", "--porcelain", "--"]);
        Revision {
            commit: log.filter(|commit| !commit.is_empty()).unwrap_or_else(|| "unknown".into()),
            dirty: changes.is_none_or(|changes| !changes.is_empty()),
        }
    }
}

/// The machine that a result was measured on.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    pub(crate) memory_mib: u64,
    pub(crate) kernel: String,
    pub(crate) os: String,
    /// Name and version of what else takes part: the compiler, the peers.
    pub(crate) versions: Vec<(String, String)>,
}

impl Machine {
    pub(crate) fn read(packages: &[&str]) -> Result<Machine> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let memory_kib: u64 =
            field(&meminfo, "MemTotal", ':').and_then(|text| text.trim_end_matches(" kB").parse().ok()).unwrap_or(0);
        Ok(Machine {
            cpu: field(&cpuinfo, "model name", ':').unwrap_or_else(|| std::env::consts::ARCH.into()),
            cpus: std::thread::available_parallelism()?.get(),
            memory_mib: memory_kib / 1024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().into(),
            os: field(&release, "PRETTY_NAME", '=').unwrap_or_default(),
            versions: versions(packages),
        })
    }

    /// Whether results of both can stand in one table. Memory may differ a little from boot to boot.
    pub(crate) fn is_same(&self, other: &Machine) -> bool {
        let key = |machine: &Machine| {
            (machine.cpu.clone(), machine.cpus, machine.kernel.clone(), machine.os.clone(), machine.versions.clone())
        };
        key(self) == key(other)
    }

    /// A part of a file name: "amd-epyc-2cpu".
    pub(crate) fn slug(&self) -> String {
        let words: String = self
            .cpu
            .to_lowercase()
            .chars()
            .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { ' ' })
            .collect();
        let cpu: Vec<&str> = words.split_ascii_whitespace().take(4).collect();
        format!("{}-{}cpu", cpu.join("-"), self.cpus)
    }
}

/// Now, in UTC by ISO 8601.
pub(crate) fn date() -> String {
    tool(&["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap_or_default()
}

/// The first value of a key in "key : value" lines, without quotes.
fn field(text: &str, key: &str, separator: char) -> Option<String> {
    text.lines().find_map(|line| {
        let (found, value) = line.split_once(separator)?;
        (found.trim() == key).then(|| value.trim().trim_matches('"').to_owned())
    })
}

fn versions(packages: &[&str]) -> Vec<(String, String)> {
    let rustc = tool(&["rustc", "--version"])
        .and_then(|text| Some(("rustc".to_owned(), text.strip_prefix("rustc ")?.to_owned())));
    let packages = packages.iter().filter_map(|package| {
        let version = tool(&["dpkg-query", "-W", "-f", "${Version}", package])?;
        Some(((*package).to_owned(), version))
    });
    rustc.into_iter().chain(packages).collect()
}

/// What git says of the paths that are measured.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // The tree may belong to another user (a container, sudo); it is only read.
    command.args(["-c", "safe.directory=*", "-C"]).arg(root).args(arguments).args(MEASURED);
    output(&mut command, TOOL_TIMEOUT).ok().map(|text| text.trim().to_owned())
}

fn tool(words: &[&str]) -> Option<String> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    output(&mut command, TOOL_TIMEOUT).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_and_os_release() {
        assert_eq!(field("a\t: 1\nmodel name\t: X Y\n", "model name", ':').unwrap(), "X Y");
        assert_eq!(field("PRETTY_NAME=\"D 12\"\n", "PRETTY_NAME", '=').unwrap(), "D 12");
        assert_eq!(field("a: 1", "b", ':'), None);
    }

    #[test]
    fn texts_and_results_are_not_what_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let run = |words: &[&str]| {
            let mut command = Command::new("git");
            command.args(["-C"]).arg(root).args(["-c", "user.name=n", "-c", "user.email=e"]).args(words);
            output(&mut command, TOOL_TIMEOUT).unwrap();
        };
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(Revision::of(root), Revision { commit: "unknown".into(), dirty: true }, "no repository");
        run(&["init", "-q"]);
        write("src/lib.rs", "1");
        run(&["add", "."]);
        run(&["commit", "-q", "-m", "code"]);
        let code = Revision::of(root);
        assert!(code.commit.len() == 12 && !code.dirty, "{code:?}");
        for path in ["docs/speed.md", "bench/results/day/raw.json", "README.md"] {
            write(path, "2");
            assert_eq!(Revision::of(root), code, "{path}");
        }
        run(&["add", "."]);
        run(&["commit", "-q", "-m", "texts"]);
        assert_eq!(Revision::of(root), code);
        write("src/lib.rs", "2");
        assert_eq!(Revision::of(root), Revision { dirty: true, ..code });
    }

    #[test]
    fn the_slug_is_part_of_a_file_name() {
        let machine = Machine { cpu: "AMD EPYC(tm) 9R14 @ 3/4 GHz".into(), cpus: 2, ..Machine::default() };
        assert_eq!(machine.slug(), "amd-epyc-tm-9r14-2cpu");
    }

    #[test]
    fn a_machine_is_another_with_another_kernel_but_not_with_more_memory() {
        let machine = Machine { cpu: "X".into(), kernel: "6.18".into(), memory_mib: 10, ..Machine::default() };
        assert!(machine.is_same(&Machine { memory_mib: 11, ..machine.clone() }));
        assert!(!machine.is_same(&Machine { kernel: "6.19".into(), ..machine.clone() }));
    }

    #[test]
    fn this_machine_is_known() {
        let machine = Machine::read(&["no-such-package"]).unwrap();
        assert!(machine.cpus > 0 && machine.memory_mib > 0 && date().ends_with('Z'));
        assert!(machine.versions.iter().all(|(name, _)| name != "no-such-package"));
    }
}
