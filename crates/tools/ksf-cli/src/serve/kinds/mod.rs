//! The kinds of services: each in a file of its own, which is all that knows it, and a line in each list below.

mod bpf;
mod echo;
mod export;
mod http;
mod nfs;
mod ninep;
mod rpc;
mod status;
mod store;
mod work;

use std::process::ExitCode;

use clap::Subcommand;

use super::kind::{ServiceKind, Single};
use crate::output::Failure;
use crate::toml_file::{Mistake, Table};

macro_rules! kinds {
    ($($name:literal $kind:ident($table:path),)+) => {
        /// What a service is. In the file the key `kind` says which: `kind = "echo"`.
        #[derive(Debug)]
        pub(crate) enum Kind {
            $($kind($table),)+
        }

        impl Kind {
            const NAMES: &[&str] = &[$($name),+];

            /// Reads the keys of the kind that has this name; `None` if there is no such kind.
            fn read_named(name: &str, table: &mut Table<'_>) -> Option<Result<Self, Mistake>> {
                Some(match name {
                    $($name => <$table>::read(table).map(Kind::$kind),)+
                    _ => return None,
                })
            }

            /// What it can do.
            pub(crate) fn as_kind(&self) -> &dyn ServiceKind {
                match self {
                    $(Kind::$kind(kind) => kind,)+
                }
            }
        }
    };
}

kinds! {
    "echo" Echo(echo::Echo),
    "rpc" Rpc(rpc::Rpc),
    "bpf" Bpf(bpf::Bpf),
    "work" Work(work::Work),
    "http" Http(http::Http),
    "store" Store(store::Store),
    "nfs" Nfs(nfs::NfsServer),
    "9p" Ninep(ninep::NinepServer),
}

/// Commands that serve, each one kind.
#[derive(Debug, Subcommand)]
pub(crate) enum ServiceCommand {
    Kecho(echo::EchoArgs),
    Krpc2(rpc::RpcArgs),
    Run(bpf::RunArgs),
    Store(Box<store::StoreArgs>),
    Nfs(Box<nfs::NfsArgs>),
    #[command(name = "9p")]
    Ninep(Box<ninep::NinepArgs>),
}

/// Services that need no file.
#[derive(Debug, Subcommand)]
pub(crate) enum ServeCommand {
    Demo(Box<http::DemoArgs>),
}

impl ServiceCommand {
    /// Does what the command is told to do instead of serving, if that is so.
    pub(crate) fn tool(&mut self) -> Option<Result<ExitCode, Failure>> {
        match self {
            ServiceCommand::Store(args) => args.tool.take().map(|tool| tool.run()),
            ServiceCommand::Nfs(args) => args.tool.take().map(|tool| tool.run()),
            ServiceCommand::Ninep(args) => args.tool.take().map(|tool| tool.run()),
            _ => None,
        }
    }

    /// The service that is to be started.
    pub(crate) fn single(self) -> Result<Single<Kind>, Failure> {
        Ok(match self {
            ServiceCommand::Kecho(args) => args.single().of(Kind::Echo),
            ServiceCommand::Krpc2(args) => args.single()?.of(Kind::Rpc),
            ServiceCommand::Run(args) => args.single().of(Kind::Bpf),
            ServiceCommand::Store(args) => args.single()?.of(Kind::Store),
            ServiceCommand::Nfs(args) => args.single().of(Kind::Nfs),
            ServiceCommand::Ninep(args) => args.single().of(Kind::Ninep),
        })
    }
}

impl ServeCommand {
    /// The service that is to be started.
    pub(crate) fn single(self) -> Result<Single<Kind>, Failure> {
        match self {
            ServeCommand::Demo(args) => Ok(args.single()?.of(Kind::Http)),
        }
    }
}

impl Kind {
    /// Reads the keys of a kind, and refuses keys that are not its own.
    pub(crate) fn read(name: &str, mut table: Table<'_>) -> Result<Self, Mistake> {
        let Some(kind) = Kind::read_named(name, &mut table) else {
            let names: Vec<String> = Kind::NAMES.iter().map(|name| format!("`{name}`")).collect();
            return Err(table.mistake(format!("unknown kind `{name}`, expected one of {}", names.join(", "))));
        };
        let kind = kind?;
        let hint = |key: &str| {
            let owner = Kind::NAMES.iter().find(|name| Kind::has_key(name, key))?;
            Some(format!("; `{key}` is of kind = \"{owner}\""))
        };
        let hint = table.unknown().and_then(hint).unwrap_or_default();
        let end = table.end(&format!("a service of kind = \"{name}\""));
        end.map_err(|mistake| mistake.with(&hint)).map(|()| kind)
    }

    /// Whether the kind of this name reads this key.
    fn has_key(name: &str, key: &str) -> bool {
        let mut table = Table::default();
        // Only the questions matter: there is nothing to read.
        let _ = Kind::read_named(name, &mut table);
        table.knows(key)
    }
}
