//! Workers behind the listeners of a service.

use std::sync::Arc;

use clap::Args;
use ksf::WorkerService;
use ksf::adopt::Adopter;
use ksf::limits::Limits;
use ksf_mux::{StartError, Workers, WorkersOptions};
use serde::Deserialize;

use crate::number::{Number, number};
use crate::output::{Failure, Status};
use crate::toml_file::{Mistake, Table};

/// Workers as flags.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct WorkerArgs {
    /// Worker threads that share all connections: a message goes to whichever is free [default: none, each shard
    /// answers its own connections]
    ///
    /// For services that block or compute. The kernel half does not stand in front of workers.
    #[arg(long, value_name = "N", value_parser = number::<1, 1024>)]
    workers: Option<u64>,
}

/// Workers in the table of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct WorkersTable {
    /// Worker threads that share all connections of the service; each shard answers its own if missing.
    workers: Option<Number<1, 1024>>,
    /// What gives messages to the workers: nothing but `"ksf"`, which a file may name.
    mux: Option<MuxName>,
    /// Long messages, and how many of each kind workers may be at.
    #[serde(default, rename = "class")]
    classes: Vec<ClassTable>,
}

impl From<WorkerArgs> for WorkersTable {
    fn from(args: WorkerArgs) -> Self {
        WorkersTable { workers: args.workers.map(Number), ..WorkersTable::default() }
    }
}

/// The multiplexor that services with workers run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MuxName {
    /// That of ksf, in user space.
    Ksf,
}

/// One `[[service.class]]`: messages that have these bytes at this place.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClassTable {
    /// Bytes of the message before them; its framing is not counted.
    #[serde(default)]
    pub(crate) offset: usize,
    pub(crate) bytes: HexBytes,
    /// How many of them may be worked on at once.
    pub(crate) cap: Number<1, 1023>,
}

/// Bytes as hexadecimal digits, two for each.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct HexBytes(pub(crate) Vec<u8>);

impl TryFrom<String> for HexBytes {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let is_hex = !text.is_empty() && text.len().is_multiple_of(2) && text.bytes().all(|c| c.is_ascii_hexdigit());
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        let wrong = || format!("\"{text}\" is not bytes in hexadecimal digits, two for each");
        bytes.filter(|_| is_hex).map(Self).ok_or_else(wrong)
    }
}

impl ClassTable {
    /// Whether a message is of this class.
    pub(crate) fn has(&self, message: &[u8]) -> bool {
        message.get(self.offset..).is_some_and(|rest| rest.starts_with(&self.bytes.0))
    }
}

impl WorkersTable {
    /// Reads and checks the keys that concern workers.
    pub(crate) fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let workers: WorkersTable = table.take()?;
        if workers.mux.is_some() && workers.workers.is_none() {
            return Err(table.mistake("mux fits only a service with workers; add workers = N"));
        }
        let count = workers.workers.map_or(0, |number| number.0);
        match workers.classes.iter().find(|class| class.cap.0 >= count) {
            Some(class) => {
                let what = format!("a class with cap = {} leaves no worker free; set workers above it", class.cap.0);
                Err(table.mistake(what))
            }
            None => Ok(workers),
        }
    }

    /// How many workers there are to be; 0: none, shards answer.
    pub(crate) fn count(&self) -> usize {
        self.workers.map_or(0, |number| number.0 as usize)
    }

    /// Starts the workers. They run on any of the CPUs: a worker that waits for a CPU
    /// would hold messages up that another CPU has time for.
    pub(crate) fn start<S: WorkerService>(
        &self,
        service: &Arc<S>,
        limits: &Limits,
        cpus: &[usize],
    ) -> Result<Arc<dyn Adopter>, Failure> {
        // On a thread of its own, because threads inherit where they may run.
        std::thread::scope(|scope| {
            let starter = scope.spawn(|| {
                let cannot = |error: std::io::Error| Failure::os("cannot keep the workers to their CPUs", &error);
                ksf::cpus::keep_to(cpus).map_err(cannot)?;
                self.start_here(Arc::clone(service), limits)
            });
            starter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn start_here<S: WorkerService>(&self, service: Arc<S>, limits: &Limits) -> Result<Arc<dyn Adopter>, Failure> {
        let mut options = WorkersOptions::new(self.count(), limits.clone());
        if !self.classes.is_empty() {
            let classes = self.classes.clone();
            options.class_caps = classes.iter().map(|class| class.cap.0 as usize).collect();
            options.classify = Some(Arc::new(move |message| classes.iter().position(|class| class.has(message))));
        }
        let started = Workers::start(service, options);
        Ok(started.map_err(|error| match error {
            StartError::System(error) => Failure::os("cannot start the workers", &error),
            error => Failure::new(Status::Unavailable, error.to_string()),
        })?)
    }

    /// What the line of a ready listener says of them.
    pub(crate) fn words(&self) -> String {
        if self.count() == 0 { String::new() } else { format!(" workers={}", self.count()) }
    }
}
