//! The command line of every command. Man pages and completions are made from these
//! definitions.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};

/// Network services at kernel speed on stock Linux
///
/// A service answers each message at the cheapest place that can: a program in the kernel's TCP
/// and UDP path, or a shard per CPU in user space on io_uring or epoll. Which one runs is said at
/// start; `ksf doctor` says what this machine offers.
#[derive(Debug, Parser)]
#[command(name = "ksf", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Service(crate::serve::ServiceCommand),
    Serve(crate::serve::ServeArgs),
    Echotest(ksf_load::echo::EchotestArgs),
    Rpctest(ksf_load::rpc::RpctestArgs),
    Worktest(ksf_load::work::WorktestArgs),
    Load(crate::load::LoadArgs),
    Doctor(crate::doctor::DoctorArgs),
    Stat(crate::stats::client::StatArgs),
    Completions(CompletionArgs),
    Man(ManArgs),
    Sdk(SdkArgs),
    KcmRun(crate::kcm_run::KcmRunArgs),
    Accel(crate::accel::AccelArgs),
}

/// Print a completion script
#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page, or write all of them
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Write a page for every command to this folder
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: Option<PathBuf>,
    /// Command whose page is printed [default: ksf itself]
    #[arg(conflicts_with = "dir")]
    pub(crate) command: Option<String>,
}

/// Write the headers that programs for `ksf run`, policies for `ksf accel flow` and framing programs are compiled against
#[derive(Debug, Args)]
pub(crate) struct SdkArgs {
    /// Folder to write ksf.bpf.h and its companions to
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dir: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
