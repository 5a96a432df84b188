//! Takes as long as a message says, to see what scheduling does: `kind = "work"`.

use std::sync::Arc;

use crate::output::Failure;
use crate::serve::kernel::KernelTable;
use crate::serve::kind::ServiceKind;
use crate::serve::launch::Launch;
use crate::serve::running::Running;
use crate::serve::workers::WorkersTable;
use crate::toml_file::{Mistake, Table};

/// The work service.
#[derive(Debug)]
pub(crate) struct Work {
    workers: WorkersTable,
}

impl ServiceKind for Work {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let workers = WorkersTable::read(table)?;
        // It has no kernel half, but files of earlier versions may say where one would be.
        table.take::<KernelTable>()?;
        Ok(Work { workers })
    }

    fn port(&self) -> Option<u16> {
        None
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let has_workers = self.workers.count() > 0;
        let service = if has_workers { ksf_services::work::Work::in_place() } else { Default::default() };
        launch.serve(Arc::new(service), &self.workers)?.start(())
    }
}
