//! Sends every byte and every datagram back: `kind = "echo"`, `ksf kecho`.

use std::sync::Arc;

use clap::Args;
use ksf_kernel::{Builtin, ObjectSource};

use crate::output::Failure;
use crate::serve::args::ServiceArgs;
use crate::serve::kernel::KernelTable;
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::running::Running;
use crate::serve::workers::WorkersTable;
use crate::toml_file::{Mistake, Table};

/// Port of `kecho`, as in the original.
const PORT: u16 = 60007;

/// Echo server: every byte and every datagram goes back to its sender
#[derive(Debug, Args)]
pub(crate) struct EchoArgs {
    #[command(flatten)]
    service: ServiceArgs,
}

impl EchoArgs {
    pub(crate) fn single(self) -> Single<Echo> {
        let echo = Echo { kernel: self.service.kernel.into(), workers: self.service.workers.into() };
        Single::new("kecho", echo, self.service.server, self.service.process)
    }
}

/// The echo service.
#[derive(Debug)]
pub(crate) struct Echo {
    kernel: KernelTable,
    workers: WorkersTable,
}

impl ServiceKind for Echo {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        Ok(Echo { kernel: table.take()?, workers: WorkersTable::read(table)? })
    }

    fn port(&self) -> Option<u16> {
        Some(PORT)
    }

    fn has_kernel_half(&self) -> bool {
        true
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        launch
            .kernel_half(&ObjectSource::Builtin(Builtin::Echo), &self.kernel, &self.workers, |_| {})?
            .serve(Arc::new(ksf_services::echo::Echo), &self.workers)?
            .start(())
    }
}
