//! What the host takes for a system call, a context switch and a wake-up on another CPU: figures of servers differ from
//! host to host as these do.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::contestant::Programs;
use super::measure::Effort;
use crate::machine::date;
use crate::process::output;

/// Repetitions of each in a batch.
const COUNT: u64 = 2_000;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Means of batches, in microseconds. See bench/peers/host_costs.c.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(crate) struct HostCosts {
    /// When they were measured: UTC, ISO 8601.
    #[serde(default)]
    pub(crate) date: String,
    pub(crate) system_call_us: Vec<f64>,
    /// Between two processes on one CPU, with a write and a read of a pipe.
    pub(crate) context_switch_us: Vec<f64>,
    /// Of a thread that sleeps on another CPU, with a write and a read of an eventfd. Empty where there is one CPU.
    #[serde(default)]
    pub(crate) wake_up_us: Vec<f64>,
}

impl HostCosts {
    /// Measures them on the CPUs that the bench uses.
    pub(super) fn measure(programs: &Programs, effort: Effort, cpus: &[usize]) -> Result<HostCosts> {
        let mut command = programs.peer("host_costs");
        command.arg(effort.count(COUNT).to_string()).args(cpus.iter().take(2).map(usize::to_string));
        let text = output(&mut command, TIMEOUT)?;
        let costs: HostCosts = serde_json::from_str(&text).with_context(|| format!("host_costs printed:\n{text}"))?;
        Ok(HostCosts { date: date(), ..costs })
    }
}
