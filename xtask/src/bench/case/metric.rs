//! What is measured of a case: figures, their units, and how a report writes them.

use serde::{Deserialize, Serialize};

/// A measured figure. Names end in their unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    RttP50Us,
    RttP99Us,
    RttP999Us,
    RttMaxUs,
    RttMeanUs,
    RttStdevUs,
    /// Of the quick messages alone, where some are slow.
    QuickP50Us,
    QuickP99Us,
    QuickP999Us,
    MessagesPerS,
    /// The same in bytes of data.
    DataBytesPerS,
    /// User and system time of the client, per message. Only of worktest.
    ClientCpuUs,
    /// User and system time of the server's process, per message.
    ServerCpuUs,
    /// CPU time of the machine that is neither the server's nor the client's, per message:
    /// softirq, work queues of the kernel engine, and whatever else ran.
    OtherCpuUs,
    /// The sum of the two above: what an answer costs outside of its client.
    TotalCpuUs,
    /// All CPU time of the machine, the client's included, per message.
    MachineCpuUs,
    /// System calls of the server, per message.
    Syscalls,
    /// How often the server went to sleep and had to be woken, per message, over its whole life.
    ServerSleeps,
    /// How often the server had to let another run, per message, over its whole life.
    ServerPreempted,
    /// How often the client went to sleep, per message.
    ClientSleeps,
    /// Context switches of the machine, those of kernel threads among them, per message.
    Switches,
    /// Interrupts of the machine, per message.
    Interrupts,
    /// Interrupts from one CPU to another, per message: wake-ups across CPUs.
    InterruptsBetweenCpus,
    /// Softirqs of the machine that took received packets, per message.
    ReceiveSoftirqs,
    /// Anonymous memory of the server's process per idle connection.
    IdleBytes,
    /// Median round trip with the idle connections open, relative to without.
    IdleRttRatio,
    /// User and system time of the server's process per second, while all of its connections are idle.
    IdleCpuUsPerS,
    /// Accepts of the worker with the most, relative to the one with the fewest.
    Balance,
    /// Share of the connections that were served on the CPU where they arrived.
    LocalShare,
    /// Reloads, kills or stalls.
    Disturbances,
    /// Requests without a right answer.
    Failures,
    /// Bytes that the server wrote to the disk for each byte of key and value.
    WrittenRatio,
    /// Anonymous memory of the server for each key of 8 bytes with a value of 8 bytes.
    KeyBytes,
    /// Keys of a start over what writes have left, from the start of the process to its first answer.
    RecoveredKeysPerS,
    /// The same in bytes that were written to the log.
    RecoveredBytesPerS,
}

impl Metric {
    pub(crate) const ALL: [Metric; 35] = [
        Metric::RttMeanUs,
        Metric::RttStdevUs,
        Metric::RttP50Us,
        Metric::RttP99Us,
        Metric::RttP999Us,
        Metric::RttMaxUs,
        Metric::QuickP50Us,
        Metric::QuickP99Us,
        Metric::QuickP999Us,
        Metric::MessagesPerS,
        Metric::DataBytesPerS,
        Metric::ClientCpuUs,
        Metric::ServerCpuUs,
        Metric::OtherCpuUs,
        Metric::TotalCpuUs,
        Metric::MachineCpuUs,
        Metric::Syscalls,
        Metric::ServerSleeps,
        Metric::ServerPreempted,
        Metric::ClientSleeps,
        Metric::Switches,
        Metric::Interrupts,
        Metric::InterruptsBetweenCpus,
        Metric::ReceiveSoftirqs,
        Metric::IdleBytes,
        Metric::IdleRttRatio,
        Metric::IdleCpuUsPerS,
        Metric::Balance,
        Metric::LocalShare,
        Metric::Disturbances,
        Metric::Failures,
        Metric::WrittenRatio,
        Metric::KeyBytes,
        Metric::RecoveredKeysPerS,
        Metric::RecoveredBytesPerS,
    ];

    /// Whether it counts what happens for a message. These have a table of their own.
    pub(crate) fn is_count(self) -> bool {
        use Metric::{ClientSleeps, Interrupts, InterruptsBetweenCpus, ReceiveSoftirqs, ServerPreempted, ServerSleeps};
        matches!(self, Metric::Syscalls | Metric::Switches | ServerSleeps | ServerPreempted | ClientSleeps)
            || matches!(self, Interrupts | InterruptsBetweenCpus | ReceiveSoftirqs)
    }

    /// Whether it is large, and told in thousands and millions.
    fn is_rate(self) -> bool {
        use Metric::{DataBytesPerS, MessagesPerS, RecoveredBytesPerS, RecoveredKeysPerS};
        matches!(self, MessagesPerS | DataBytesPerS | RecoveredKeysPerS | RecoveredBytesPerS)
    }

    /// Heading of its column, with the unit.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Metric::RttP50Us => "round trip p50 us",
            Metric::RttP99Us => "round trip p99 us",
            Metric::RttP999Us => "round trip p99.9 us",
            Metric::RttMaxUs => "round trip max us",
            Metric::RttMeanUs => "round trip mean us",
            Metric::RttStdevUs => "round trip st.dev. us",
            Metric::QuickP50Us => "quick p50 us",
            Metric::QuickP99Us => "quick p99 us",
            Metric::QuickP999Us => "quick p99.9 us",
            Metric::ClientCpuUs => "client CPU us/msg",
            Metric::MessagesPerS => "messages/s",
            Metric::DataBytesPerS => "data bytes/s",
            Metric::ServerCpuUs => "server CPU us/msg",
            Metric::OtherCpuUs => "other CPU us/msg",
            Metric::TotalCpuUs => "total CPU us/msg",
            Metric::MachineCpuUs => "machine CPU us/msg",
            Metric::Syscalls => "server's system calls",
            Metric::ServerSleeps => "server slept",
            Metric::ServerPreempted => "server preempted",
            Metric::ClientSleeps => "client slept",
            Metric::Switches => "context switches",
            Metric::Interrupts => "interrupts",
            Metric::InterruptsBetweenCpus => "of these between CPUs",
            Metric::ReceiveSoftirqs => "receive softirqs",
            Metric::IdleBytes => "bytes/idle conn.",
            Metric::IdleRttRatio => "round trip, idle/none",
            Metric::IdleCpuUsPerS => "server CPU us/s, all idle",
            Metric::Balance => "accepts max/min",
            Metric::LocalShare => "local share",
            Metric::Disturbances => "disturbances",
            Metric::Failures => "failed requests",
            Metric::WrittenRatio => "written/stored bytes",
            Metric::KeyBytes => "bytes/key",
            Metric::RecoveredKeysPerS => "keys recovered/s",
            Metric::RecoveredBytesPerS => "log bytes recovered/s",
        }
    }

    /// A value of this metric, as short as its precision allows.
    pub(crate) fn format(self, value: f64) -> String {
        match self {
            _ if self.is_rate() && value >= 1e6 => format!("{:.2} M", value / 1e6),
            _ if self.is_rate() && value >= 1e4 => format!("{:.0} k", value / 1e3),
            Metric::MessagesPerS
            | Metric::DataBytesPerS
            | Metric::RecoveredKeysPerS
            | Metric::RecoveredBytesPerS
            | Metric::KeyBytes
            | Metric::IdleBytes
            | Metric::IdleCpuUsPerS
            | Metric::Disturbances
            | Metric::Failures => format!("{value:.0}"),
            Metric::RttP50Us
            | Metric::RttP99Us
            | Metric::RttP999Us
            | Metric::RttMaxUs
            | Metric::RttMeanUs
            | Metric::RttStdevUs
            | Metric::QuickP50Us
            | Metric::QuickP99Us
            | Metric::QuickP999Us
                if value >= 100.0 =>
            {
                format!("{value:.0}")
            }
            Metric::ClientCpuUs
            | Metric::ServerCpuUs
            | Metric::OtherCpuUs
            | Metric::TotalCpuUs
            | Metric::MachineCpuUs
            | Metric::Balance => format!("{value:.3}"),
            _ if self.is_count() => format!("{value:.3}"),
            // One connection in a thousand is not all of them.
            Metric::LocalShare => format!("{value:.4}"),
            _ => format!("{value:.2}"),
        }
    }
}
