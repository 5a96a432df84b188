//! The options that several tools share, and how their values are read.

pub mod numbers;
pub(crate) mod reports;
pub(crate) mod target;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::drive::pin::Pinning;
use crate::drive::plan::Pace;
use crate::drive::schedule::Arrival;
use crate::drive::spin::ClientSpin;
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_duration, parse_in, parse_rate, parse_u64};

/// Who decides when a request is sent.
#[derive(Debug, Clone, PartialEq, clap::Args, Serialize, Deserialize)]
pub struct PaceArgs {
    /// Open loop: send N requests per second over all threads and connections, and count latency from the intended start
    #[arg(long, value_name = "N[/s]", value_parser = parse_rate)]
    #[serde(rename = "rate_per_s")]
    pub rate: Option<u64>,

    /// Gaps between the requests of --rate [default: constant for echotest and rpctest, else poisson]
    #[arg(long, value_enum, requires = "rate")]
    pub arrival: Option<Arrival>,

    /// Poll for so long before sleeping: while replies come closer together than that (never where the server may need
    /// this CPU), and before a request of --rate is due. auto is 100 us, a number without a unit is in microseconds
    #[arg(long, value_name = "auto|off|US", value_parser = ClientSpin::parse, default_value = "off")]
    pub spin: ClientSpin,

    /// Seed of all that is drawn
    #[arg(long, value_name = "N", value_parser = parse_u64, default_value = "1")]
    pub seed: u64,
}

impl PaceArgs {
    /// The pace, with gaps of this kind if no other is asked for, which is filled in.
    pub(crate) fn fill(&mut self, arrival: Arrival) -> Pace {
        match self.rate {
            None => Pace::Closed,
            Some(rate_per_s) => {
                Pace::Open { rate_per_s, arrival: *self.arrival.get_or_insert(arrival), seed: self.seed }
            }
        }
    }

    /// "open" or "closed".
    pub(crate) fn mode(&self) -> &'static str {
        if self.rate.is_some() { "open" } else { "closed" }
    }
}

/// The name of an option's value, in reports as on the command line.
pub(crate) fn name(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Where the threads run.
#[derive(Debug, Clone, PartialEq, clap::Args, Serialize, Deserialize)]
pub struct CpuArgs {
    /// CPUs for the threads, in turn, such as 0,2-3
    #[arg(long, value_name = "LIST", conflicts_with = "no_pin")]
    pub cpu: Option<String>,

    /// Leave the threads to the scheduler (default: thread i runs on the i-th CPU of the mask, below 16 threads)
    #[arg(long)]
    pub no_pin: bool,
}

impl CpuArgs {
    pub(crate) fn pinning(&self) -> Result<Pinning, LoadError> {
        Pinning::of_options(self.cpu.as_deref(), self.no_pin)
    }
}

/// What is printed and written.
#[derive(Debug, Clone, PartialEq, clap::Args, Serialize, Deserialize)]
pub struct OutputArgs {
    /// Print one JSON document instead of the table
    #[arg(long)]
    pub json: bool,

    /// Write HdrHistogram data: *.hgrm gets percentiles as text, any other name an interval log (V2, compressed)
    #[arg(long, value_name = "FILE")]
    #[serde(serialize_with = "reports::path")]
    pub hdr: Option<PathBuf>,

    /// Write a plot of latency by percentile
    #[arg(long, value_name = "FILE")]
    #[serde(serialize_with = "reports::path")]
    pub svg: Option<PathBuf>,
}

/// Options that contradict each other.
pub(crate) fn usage<T>(text: impl Into<String>) -> Result<T, LoadError> {
    Err(LoadError::Usage(text.into()))
}

/// A number from `MIN` to `MAX`.
pub(crate) fn number<const MIN: u64, const MAX: u64>(text: &str) -> Result<u64, NumberError> {
    parse_in(text, MIN, MAX)
}

/// A time that is not zero.
pub(crate) fn positive_time(text: &str) -> Result<Duration, NumberError> {
    match parse_duration(text)? {
        Duration::ZERO => Err(NumberError::OutOfRange { text: text.to_owned(), min: 1, max: u64::from(u32::MAX) }),
        time => Ok(time),
    }
}
