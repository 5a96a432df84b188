//! What a result belongs to: machine, date, commit, versions.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::process::output;

const TOOL_TIMEOUT: Duration = Duration::from_secs(20);

/// The machine and the state of the code that a result was measured with.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Origin {
    /// UTC, ISO 8601.
    pub(crate) date: String,
    pub(crate) commit: String,
    /// The work tree had changes that are in no commit.
    pub(crate) dirty: bool,
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    pub(crate) memory_mib: u64,
    pub(crate) kernel: String,
    pub(crate) os: String,
    /// Name and version of what else takes part: the compiler, the peers.
    pub(crate) versions: Vec<(String, String)>,
}

impl Origin {
    pub(crate) fn read(packages: &[&str]) -> Result<Origin> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let memory_kib: u64 =
            field(&meminfo, "MemTotal", ':').and_then(|text| text.trim_end_matches(" kB").parse().ok()).unwrap_or(0);
        Ok(Origin {
            date: tool(&["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap_or_default(),
            commit: git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".into()),
            dirty: git(&["status", "--porcelain"]).is_none_or(|changes| !changes.is_empty()),
            cpu: field(&cpuinfo, "model name", ':').unwrap_or_else(|| std::env::consts::ARCH.into()),
            cpus: std::thread::available_parallelism()?.get(),
            memory_mib: memory_kib / 1024,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().into(),
            os: field(&release, "PRETTY_NAME", '=').unwrap_or_default(),
            versions: versions(packages),
        })
    }

    /// A name for the directory of the results: the day and the machine.
    pub(crate) fn slug(&self) -> String {
        let day = self.date.split('T').next().unwrap_or_default();
        let words: String = self
            .cpu
            .to_lowercase()
            .chars()
            .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { ' ' })
            .collect();
        let cpu: Vec<&str> = words.split_ascii_whitespace().take(4).collect();
        format!("{day}-{}-{}cpu", cpu.join("-"), self.cpus)
    }
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

fn git(arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // The tree may belong to another user (a container, sudo); it is only read.
    command.args(["-c", "safe.directory=*", "-C"]).arg(crate::root()).args(arguments);
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
    fn the_slug_is_a_file_name() {
        let origin = Origin {
            date: "2026-01-02T03:04:05Z".into(),
            cpu: "AMD EPYC(tm) 9R14 @ 3/4 GHz".into(),
            cpus: 2,
            ..Origin::default()
        };
        assert_eq!(origin.slug(), "2026-01-02-amd-epyc-tm-9r14-2cpu");
    }

    #[test]
    fn this_machine_is_known() {
        let origin = Origin::read(&["no-such-package"]).unwrap();
        assert!(origin.date.ends_with('Z') && origin.cpus > 0 && origin.memory_mib > 0);
        assert!(origin.versions.iter().all(|(name, _)| name != "no-such-package"));
    }
}
