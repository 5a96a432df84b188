//! Connections for whose bytes the kernel had no memory.

use std::mem;
use std::time::Duration;

use crate::env::Env;
use crate::limits::Time;
use crate::shard::now;

/// No event tells when the kernel has memory again, so sends are tried again by then, those of all connections together.
const AGAIN: Duration = Duration::from_millis(20);

/// Connections whose sends are tried again together.
#[derive(Debug, Default)]
pub(crate) struct NoMemory {
    conns: Vec<u32>,
    /// Set while there are some.
    at: Option<Time>,
}

impl NoMemory {
    /// Its send is tried again when its time has come.
    pub(crate) fn add(&mut self, conn: u32, env: &Env) {
        env.stats.sends_without_memory.add(1);
        self.at.get_or_insert_with(|| now().plus(AGAIN));
        self.conns.push(conn);
    }

    /// The timeout of a wait that ends by then.
    pub(crate) fn limit(&self, timeout: Option<Duration>) -> Option<Duration> {
        let Some(at) = self.at else { return timeout };
        let left = at.since(now());
        Some(timeout.map_or(left, |timeout| timeout.min(left)))
    }

    /// Those whose time has come. Some may be gone, or have sent their bytes since.
    pub(crate) fn take_due(&mut self) -> Vec<u32> {
        match self.at {
            Some(at) if at <= now() => {
                self.at = None;
                mem::take(&mut self.conns)
            }
            _ => Vec::new(),
        }
    }
}
