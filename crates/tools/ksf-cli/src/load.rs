//! `ksf load`: load generators for servers that are not of ksf.

use clap::{Args, Subcommand};

/// Measure servers of any make: one generator per protocol
#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    #[command(subcommand)]
    pub(crate) protocol: Protocol,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Protocol {
    // Boxed: its options are many, and a command is kept as large as the largest.
    Http(Box<ksf_load::http::LoadHttpArgs>),
    Kv(Box<ksf_load::kv::LoadKvArgs>),
    Nfs(Box<ksf_load::nfs::LoadNfsArgs>),
    #[command(name = "9p")]
    Ninep(Box<ksf_load::ninep::LoadNinepArgs>),
}
