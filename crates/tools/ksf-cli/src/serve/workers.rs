//! Workers behind the listeners of a service.

use std::sync::Arc;

use ksf::Service;
use ksf::adopt::Adopter;
use ksf::limits::Limits;
use ksf_mux::{StartError, Workers, WorkersOptions};

use crate::output::{Failure, Status};
use crate::serve::config::ClassTable;

/// How many workers there are to be, and how they share messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Crew<'a> {
    /// 0: none, shards answer.
    pub(super) workers: usize,
    /// Long messages, and how many of each kind workers may be at.
    pub(super) classes: &'a [ClassTable],
    /// Where they run, each on any of them: a worker that waits for a CPU would hold messages up that another CPU has
    /// time for.
    pub(super) cpus: &'a [usize],
}

impl Crew<'_> {
    /// Starts the workers; `None` if there are to be none.
    pub(super) fn start<S: Service>(
        self,
        service: &Arc<S>,
        limits: &Limits,
    ) -> Result<Option<Arc<dyn Adopter>>, Failure> {
        if self.workers == 0 {
            return Ok(None);
        }
        // On a thread of its own, because threads inherit where they may run.
        std::thread::scope(|scope| {
            let starter = scope.spawn(|| {
                let cannot = |error: std::io::Error| Failure::os("cannot keep the workers to their CPUs", &error);
                ksf::cpus::keep_to(self.cpus).map_err(cannot)?;
                self.start_here(Arc::clone(service), limits).map(Some)
            });
            starter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn start_here<S: Service>(self, service: Arc<S>, limits: &Limits) -> Result<Arc<dyn Adopter>, Failure> {
        let mut options = WorkersOptions::new(self.workers, limits.clone());
        if !self.classes.is_empty() {
            let classes = self.classes.to_vec();
            options.class_caps = classes.iter().map(|class| class.cap.0 as usize).collect();
            options.classify = Some(Arc::new(move |message| classes.iter().position(|class| class.has(message))));
        }
        let started = Workers::start(service, options);
        Ok(started.map_err(|error| match error {
            StartError::System(error) => Failure::os("cannot start the workers", &error),
            error => Failure::new(Status::Unavailable, error.to_string()),
        })?)
    }

    /// What the line of a ready listener says of it.
    pub(super) fn words(self) -> String {
        if self.workers == 0 { String::new() } else { format!(" workers={}", self.workers) }
    }
}
