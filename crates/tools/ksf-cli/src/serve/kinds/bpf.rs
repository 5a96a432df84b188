//! A program of the user's own, written against the SDK: `kind = "bpf"`, `ksf run`.

mod service;

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueHint};
use ksf_kernel::{KernelError, ObjectSource};
use serde::Deserialize;

use self::service::ObjectService;
use crate::doctor;
use crate::output::{Failure, Status};
use crate::serve::args::ServiceArgs;
use crate::serve::kernel::KernelTable;
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::running::Running;
use crate::serve::workers::WorkersTable;
use crate::toml_file::{Mistake, Table};

/// Run a service of your own, compiled against ksf.bpf.h
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The compiled program
    #[arg(value_name = "OBJECT.bpf.o", value_hint = ValueHint::FilePath)]
    object: PathBuf,
    #[command(flatten)]
    service: ServiceArgs,
}

impl RunArgs {
    pub(crate) fn single(self) -> Single<Bpf> {
        let name = self.object.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let name = name.split('.').next().unwrap_or_default();
        let bpf = Bpf { object: self.object, kernel: self.service.kernel.into(), workers: self.service.workers.into() };
        Single::new(name, bpf, self.service.server, self.service.process)
    }
}

/// What the table of a service says of the program.
#[derive(Debug, Deserialize)]
struct BpfTable {
    /// The compiled program; its path is taken from the folder of the file.
    object: PathBuf,
}

/// A service whose function is a program of the user's.
#[derive(Debug)]
pub(crate) struct Bpf {
    object: PathBuf,
    kernel: KernelTable,
    workers: WorkersTable,
}

impl ServiceKind for Bpf {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let BpfTable { object } = table.take()?;
        let object = table.folder().join(object);
        Ok(Bpf { object, kernel: table.take()?, workers: WorkersTable::read(table)? })
    }

    fn port(&self) -> Option<u16> {
        None
    }

    fn has_kernel_half(&self) -> bool {
        true
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let callers = launch.shards() + self.workers.count();
        let source = ObjectSource::File(self.object.clone());
        let (launch, service) = launch
            .program(&source, &self.kernel, &self.workers, |program| ObjectService::new(program, callers))
            .map_err(|error| failure(&error))?;
        launch.serve(Arc::new(service), &self.workers)?.start(())
    }
}

/// Why the program cannot be loaded: there is nothing to fall back to.
fn failure(error: &KernelError) -> Failure {
    let what = error.to_string();
    match error {
        KernelError::Unreadable { error, .. } => Failure::new(Status::of_input(error), what).remedy("check the path"),
        KernelError::BadObject { .. } => {
            Failure::new(Status::Data, what).remedy("compile it against this version of ksf.bpf.h (man ksf-run)")
        }
        KernelError::Verifier { .. } => {
            Failure::new(Status::Data, what).remedy("-v shows the whole log; correct the program")
        }
        KernelError::BadOption { .. } => Failure::new(Status::Data, what),
        other => {
            let obstacle = doctor::kernel_half_obstacle(other);
            obstacle.failure(format!("the program cannot be loaded: {}", obstacle.cause))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_become_one_line_with_a_status() {
        let verifier = KernelError::Verifier { program: "p".into(), summary: "a\nb".into(), log: "long".into() };
        let line = failure(&verifier);
        assert_eq!(line.status, Status::Data);
        assert!(line.to_string().contains("a b"), "{line}");
        let rights =
            KernelError::NotPermitted { action: "load", cause: "the process lacks CAP_BPF".into(), remedy: "x".into() };
        assert_eq!(failure(&rights).status, Status::NoPermission);
    }
}
