//! What can be set.

use std::path::PathBuf;

use ksf_accel_proto::state::CPUS_MAX;
use serde::{Deserialize, Serialize};

use crate::{AccelError, Level};

/// How a program is accelerated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct AccelOptions {
    /// Use this mechanism or none. `None`: the best that works.
    pub level: Option<Level>,
    /// CPUs that workers may be at home on. `None`: all that the program may run on. A program's own, narrower
    /// affinity is never widened.
    pub cpus: Option<Vec<u32>>,
    /// Bind each worker's thread to its home. Where it is not bound the kernel may move it away from its connections.
    pub pin: bool,
    /// A worker that has been away from its wait longer than this (ns) is passed over where another is not. Short:
    /// stalls cost less, and connections leave their CPU more often under load.
    pub busy_limit_ns: u64,
    /// How often (ms) the holder looks for connections that nobody accepts while something happens. A stall is
    /// noticed after two looks. Each look is one `poll()` over all queues.
    pub look_ms: u32,
    /// How long (ms) connections wait in the queue of a worker that has ended while no other worker is ready. Then they are
    /// reset: the next worker to come takes them, but a program that goes on without the library never would.
    pub abandoned_ms: u32,
    /// False: loaded but off. Everything goes to the program's own listener until [`crate::status::resume`].
    pub on: bool,
    /// Folder of the status socket. `None`: `/run/ksf/accel` for root, else `$XDG_RUNTIME_DIR/ksf/accel`.
    pub status_folder: Option<PathBuf>,
    /// The command, for status.
    pub program: Vec<String>,
    /// The layout of source ports that the program's connections get, for status.
    pub source_ports: Option<String>,
}

impl Default for AccelOptions {
    fn default() -> Self {
        Self {
            level: None,
            cpus: None,
            pin: true,
            busy_limit_ns: 4_000_000,
            look_ms: 5,
            abandoned_ms: 30_000,
            on: true,
            status_folder: None,
            program: Vec::new(),
            source_ports: None,
        }
    }
}

impl AccelOptions {
    pub(crate) fn check(&self) -> Result<(), AccelError> {
        let wrong = |option, problem: String| Err(AccelError::Option { option, problem });
        match &self.cpus {
            Some(cpus) if cpus.is_empty() => return wrong("cpus", "is empty: name at least one CPU".into()),
            Some(cpus) if cpus.iter().any(|&cpu| cpu as usize >= CPUS_MAX) => {
                return wrong("cpus", format!("ksf accel knows CPUs below {CPUS_MAX}"));
            }
            _ => {}
        }
        if !(1..=1000).contains(&self.look_ms) {
            return wrong("look_ms", format!("is {}, allowed are 1 to 1000", self.look_ms));
        }
        Ok(())
    }
}
