//! ONC RPC (RFC 5531), NULL of NFSv3, MOUNTv3 and of programs that are named: `kind = "rpc"`, `ksf krpc2`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use ksf::listener::ListenAddr;
use ksf::server::ListenerInfo;
use ksf_kernel::{Builtin, ObjectSource};
use ksf_services::rpc::rpcbind::{self, Registration, RpcbindEndpoint, RpcbindError};
use ksf_services::rpc::{NullService, Program, ProgramTable};
use serde::Deserialize;

use crate::output::{Failure, Status};
use crate::serve::args::ServiceArgs;
use crate::serve::kernel::KernelTable;
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::running::{Running, State};
use crate::serve::workers::WorkersTable;
use crate::toml_file::{Mistake, Table};

/// Port of `krpc2`, as in the original.
const PORT: u16 = 62049;

/// ONC RPC server (RFC 5531) that answers the NULL procedure of NFSv3 and MOUNTv3
#[derive(Debug, Args)]
pub(crate) struct RpcArgs {
    /// Register another program and its versions, as in 200000:1-3; repeatable
    #[arg(long = "program", value_name = "PROG:LOW[-HIGH]")]
    programs: Vec<ProgramRange>,
    /// Register the programs with the rpcbind of this machine, and unregister at the end
    #[arg(long)]
    rpcbind: bool,
    #[command(flatten)]
    service: ServiceArgs,
}

impl RpcArgs {
    pub(crate) fn single(self) -> Result<Single<Rpc>, Failure> {
        let programs = programs(&self.programs);
        let rpc = Rpc {
            programs: programs.map_err(|what| Failure::new(Status::Data, what).remedy("see --program"))?,
            rpcbind: self.rpcbind,
            kernel: self.service.kernel.into(),
            workers: self.service.workers.into(),
        };
        Ok(Single::new("krpc2", rpc, self.service.server, self.service.process))
    }
}

/// What the table of a service says of RPC.
#[derive(Debug, Deserialize)]
struct RpcTable {
    /// Programs and versions to register besides NFS and MOUNT.
    #[serde(default)]
    programs: Vec<ProgramRange>,
    /// Whether to register with rpcbind.
    #[serde(default)]
    rpcbind: bool,
}

/// The RPC service.
#[derive(Debug)]
pub(crate) struct Rpc {
    programs: ProgramTable,
    rpcbind: bool,
    kernel: KernelTable,
    workers: WorkersTable,
}

impl ServiceKind for Rpc {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let own: RpcTable = table.take()?;
        Ok(Rpc {
            programs: programs(&own.programs).map_err(|what| table.mistake(format!("{what}; correct programs")))?,
            rpcbind: own.rpcbind,
            kernel: table.take()?,
            workers: WorkersTable::read(table)?,
        })
    }

    fn port(&self) -> Option<u16> {
        Some(PORT)
    }

    fn has_kernel_half(&self) -> bool {
        true
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let service = Arc::new(NullService::new(launch.name(), self.programs.clone()));
        let source = ObjectSource::Builtin(Builtin::RpcNull);
        let running = launch
            .kernel_half(&source, &self.kernel, &self.workers, |options| {
                options.rpc_programs = kernel_programs(&self.programs);
            })?
            .serve(service, &self.workers)?
            .start(())?;
        if !self.rpcbind {
            return Ok(running);
        }
        let registration = register(&self.programs, running.listeners(), &[])?;
        Ok(running.with_state(Registered { registration: Some(registration) }))
    }
}

/// NFSv3 and MOUNTv3, and what the user adds.
fn programs(more: &[ProgramRange]) -> Result<ProgramTable, String> {
    let mut table = ProgramTable::new();
    let mut register = |program| table.register(program).map_err(|error| error.to_string());
    register(Program::NFS_V3)?;
    register(Program::MOUNT_V3)?;
    for range in more {
        register(Program::new(format!("program {range}"), range.program, range.low..=range.high))?;
    }
    Ok(table)
}

/// What the kernel answers NULL for: the first range of each program, because its table has one entry per program. The
/// other ranges are answered in user space.
fn kernel_programs(table: &ProgramTable) -> Vec<(u32, u32, u32)> {
    let mut programs: Vec<(u32, u32, u32)> = Vec::new();
    for (program, versions) in table.programs() {
        if !programs.iter().any(|(known, ..)| *known == program) {
            programs.push((program, *versions.start(), *versions.end()));
        }
    }
    programs
}

/// Tells rpcbind where the programs are; `streams_only` are those that are not served over UDP.
pub(super) fn register(
    table: &ProgramTable,
    listeners: &[ListenerInfo],
    streams_only: &[u32],
) -> Result<Registration, Failure> {
    let entries = listeners.iter().flat_map(|listener| match &listener.addr {
        ListenAddr::Tcp(address) => rpcbind::entries(table, *address, true),
        ListenAddr::Udp(address) => {
            let mut entries = rpcbind::entries(table, *address, false);
            entries.retain(|entry| !streams_only.contains(&entry.program));
            entries
        }
        _ => Vec::new(),
    });
    Registration::new(&RpcbindEndpoint::local_defaults(), entries.collect()).map_err(|error| {
        let status = match error {
            RpcbindError::NotPermitted { .. } => Status::NoPermission,
            _ => Status::Unavailable,
        };
        Failure::new(status, error.to_string())
    })
}

/// What rpcbind was told. Dropping it takes it back.
struct Registered {
    registration: Option<Registration>,
}

impl State for Registered {
    fn retire(&mut self) {
        self.registration = None;
    }
}

/// An RPC program with its versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct ProgramRange {
    program: u32,
    low: u32,
    high: u32,
}

impl FromStr for ProgramRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = || -> Option<ProgramRange> {
            let (program, versions) = text.split_once(':')?;
            let (low, high) = versions.split_once('-').unwrap_or((versions, versions));
            Some(ProgramRange { program: program.parse().ok()?, low: low.parse().ok()?, high: high.parse().ok()? })
        };
        match parts() {
            Some(range) if range.low <= range.high => Ok(range),
            Some(_) => Err(format!("\"{text}\": the first version is above the last")),
            None => Err(format!("\"{text}\" is not a program with versions; write it like 100003:3-4")),
        }
    }
}

impl TryFrom<String> for ProgramRange {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for ProgramRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}-{}", self.program, self.low, self.high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read() {
        let range: ProgramRange = "100003:3-4".parse().unwrap();
        assert_eq!((range.program, range.low, range.high), (100_003, 3, 4));
        assert_eq!("7:2".parse::<ProgramRange>().unwrap().to_string(), "7:2-2");
        for text in ["", "1", "1:", "1:x", "1:3-2", "1:-1", "4294967296:1"] {
            assert!(text.parse::<ProgramRange>().is_err(), "{text}");
        }
    }

    #[test]
    fn programs_are_added_to_nfs_and_mount() {
        let more = ["200000:1-3".parse().unwrap()];
        assert_eq!(programs(&more).unwrap().programs().count(), 3);
        assert!(programs(&["100003:2-4".parse().unwrap()]).is_err());
    }

    #[test]
    fn the_kernel_knows_each_program_once() {
        let mut table = ProgramTable::new();
        for (low, high) in [(3, 3), (5, 6)] {
            table.register(Program::new("x", 7, low..=high)).unwrap();
        }
        table.register(Program::new("y", 8, 1..=2)).unwrap();
        assert_eq!(kernel_programs(&table), [(7, 3, 3), (8, 1, 2)]);
    }
}
