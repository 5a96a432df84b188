//! Tasks of the repository, run as `cargo xtask TASK`: what `make demo` and `make bench` call.
//!
//! Results go to standard output, talk to standard error.

mod bench;
mod cpu;
mod demo;
mod leftovers;
mod load;
mod machine;
mod process;
mod supervise;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use crate::supervise::supervised;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of the ksf repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every service on every engine of this machine and print one table
    Demo(demo::DemoOptions),
    /// Measure ksf and its peers, interleaved, and write raw results and a report
    Bench(bench::BenchOptions),
    /// Write report.md anew from the raw.json in DIR, and report.html, a page with charts
    Report {
        /// A directory of bench/results
        dir: PathBuf,
        /// Write its goals into the tables of docs/speed.md, too
        #[arg(long)]
        speed: bool,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Demo(options) => supervised(|| demo::run(&options)),
        Task::Bench(options) => supervised(|| bench::run(&options)),
        Task::Report { dir, speed } => bench::report::write_all(&dir, speed).map(|()| ExitCode::SUCCESS),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

/// The directory of build results: that of the running xtask, whatever CARGO_TARGET_DIR says.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("cannot find the running program")?;
    exe.ancestors()
        // Cargo tags only a directory that it made itself; scripts/setup.sh may have made this one.
        .find(|dir| dir.join("CACHEDIR.TAG").exists() || dir.join(".rustc_info.json").exists())
        .map(PathBuf::from)
        .with_context(|| format!("{} is in no cargo target directory", exe.display()))
}

/// The program `ksf`: the one given, or the one built in the profile.
pub(crate) fn ksf_binary(given: Option<&PathBuf>, profile: &str) -> Result<PathBuf> {
    if let Some(path) = given {
        anyhow::ensure!(path.is_file(), "{} does not exist", path.display());
        return std::path::absolute(path).context("cannot tell where this directory is");
    }
    let path = target_dir()?.join(profile).join("ksf");
    let flag = if profile == "release" { " --release" } else { "" };
    anyhow::ensure!(path.is_file(), "{} does not exist; run: cargo build{flag} -p ksf-cli", path.display());
    Ok(path)
}
