//! Limits from three places: built-in defaults, a TOML file, the command line. The later wins.
//!
//! The names are those of [`ksf::limits::Limits`]: a flag `--message-bytes-max` is the key
//! `message_bytes_max`.

use std::path::Path;

use clap::Arg;
use ksf::limits::Limits;

use crate::output::{Failure, Status};
use crate::toml_file;

/// Declares each value once: as a flag, as a key of the file, and as a field of the struct it overwrites.
macro_rules! settings {
    (
        $(#[doc = $flags_help:literal])+ flags: $flags:ident, $heading:literal;
        $(#[doc = $table_help:literal])+ table: $table:ident;
        target: $target:ty;
        $($(#[doc = $help:literal])+ $name:ident: $kind:ty, $value_name:literal, $min:literal..=$max:expr;)+
    ) => {
        $(#[doc = $flags_help])+
        #[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
        #[command(next_help_heading = $heading)]
        pub(crate) struct $flags {
            $(
                $(#[doc = $help])+
                #[arg(long, value_name = $value_name, value_parser = $crate::number::number::<$min, { $max as u64 }>)]
                pub(crate) $name: Option<u64>,
            )+
        }

        $(#[doc = $table_help])+
        #[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $table {
            $(
                pub(crate) $name: Option<$crate::number::Number<$min, { $max as u64 }>>,
            )+
        }

        impl $flags {
            /// Overwrites the values that were given as flags.
            pub(crate) fn apply(&self, target: &mut $target) {
                $(if let Some(value) = self.$name {
                    target.$name = <$kind>::try_from(value).unwrap_or(<$kind>::MAX);
                })+
            }
        }

        impl $table {
            /// Overwrites the values that stand in the table.
            pub(crate) fn apply(&self, target: &mut $target) {
                $(if let Some($crate::number::Number(value)) = self.$name {
                    target.$name = <$kind>::try_from(value).unwrap_or(<$kind>::MAX);
                })+
            }
        }

        impl $table {
            /// The values that stand in the table.
            #[allow(dead_code, reason = "of two kinds of values, limits alone differ by listener")]
            pub(crate) fn given(&self) -> Vec<(&'static str, u64)> {
                [$((stringify!($name), self.$name.map(|number| number.0)),)+]
                    .into_iter()
                    .filter_map(|(name, value)| Some((name, value?)))
                    .collect()
            }
        }

        /// Every value with its name, for `ksf stat` and `-v`.
        pub(crate) fn list(target: &$target) -> Vec<(&'static str, u64)> {
            vec![$((stringify!($name), target.$name as u64),)+]
        }
    };
}

pub(crate) use settings;

settings! {
    /// Limits as flags.
    flags: LimitFlags, "Limits";
    /// Limits as a table of a TOML file. Numbers, or strings with a suffix like `"64k"`.
    table: LimitTable;
    target: ksf::limits::Limits;
    /// Longest message in bytes; a longer one closes the connection [default: 1088k]
    message_bytes_max: usize, "BYTES", 1..=usize::MAX;
    /// Most bytes before the length of a message must be known [default: 4k]
    header_bytes_max: usize, "BYTES", 1..=usize::MAX;
    /// Most fragments of one message [default: 4096]
    fragments_max: u32, "N", 1..=u32::MAX;
    /// Time from the first byte of a message to its last, in milliseconds [default: 10000]
    assembly_timeout_ms: u64, "MS", 1..=u64::MAX;
    /// Time without a byte in either direction before a connection is closed, in milliseconds; 0: never [default: 0]
    idle_timeout_ms: u64, "MS", 0..=u64::MAX;
    /// Time in which a peer must take some of its replies, in milliseconds [default: 30000]
    send_timeout_ms: u64, "MS", 1..=u64::MAX;
    /// Replies queued for one peer above which it is not read any more [default: 256k]
    out_queue_bytes_max: usize, "BYTES", 1..=usize::MAX;
    /// Requests in work and replies of one connection, in bytes; at it no further request is taken [default: 4m]
    connection_bytes_max: usize, "BYTES", 1..=usize::MAX;
    /// The same for all connections of a shard together [default: 256m]
    shard_bytes_max: usize, "BYTES", 1..=usize::MAX;
    /// Connections at the same time; further ones are closed at once [default: 65536]
    connections_max: usize, "N", 1..=usize::MAX;
    /// Memory per shard for messages that arrived in part; when it is used up peers are read one after the other
    /// [default: 64m]
    assembly_bytes_max: usize, "BYTES", 1..=usize::MAX;
    /// Time in which a peer that is read although memory is short must send something, in milliseconds [default: 1000]
    pressure_timeout_ms: u64, "MS", 1..=u64::MAX;
    /// Messages of one connection that may wait for a deferred reply [default: 1024]
    deferred_max: u32, "N", 1..=u32::MAX;
    /// Deferred replies to datagrams outstanding per shard; further datagrams are dropped [default: 4096]
    deferred_datagrams_max: usize, "N", 1..=usize::MAX;
    /// Replies to datagrams that may wait per shard for a full socket; further ones are dropped [default: 1024]
    datagram_queue_max: usize, "N", 0..=usize::MAX;
    /// Time after a close in which the peer may read the last replies, in milliseconds [default: 1000]
    linger_timeout_ms: u64, "MS", 0..=u64::MAX;
    /// Bytes a peer may send in that time, which are thrown away, before it is reset [default: 1m]
    linger_bytes_max: usize, "BYTES", 0..=usize::MAX;
    /// Time in which an outgoing connection must be there, in milliseconds [default: 3000]
    connect_timeout_ms: u64, "MS", 1..=u64::MAX;
    /// Time an outgoing connection that is waited for may be silent, in milliseconds; 0: for ever [default: 30000]
    upstream_timeout_ms: u64, "MS", 0..=u64::MAX;
    /// Time an outgoing connection is kept unused, in milliseconds; 0: while the other end keeps it [default: 10000]
    upstream_idle_ms: u64, "MS", 0..=u64::MAX;
    /// Outgoing connections kept per shard and address [default: 64]
    upstreams_idle_max: usize, "N", 0..=usize::MAX;
    /// Operations on files under way per shard; a service is refused further ones [default: 1024]
    file_ops_max: usize, "N", 1..=usize::MAX;
    /// Bytes that these read and write together [default: 256m]
    file_bytes_max: usize, "BYTES", 1..=usize::MAX;
    /// Time a stopping server gives its connections and running tasks, in milliseconds [default: 5000]
    drain_timeout_ms: u64, "MS", 0..=u64::MAX;
}

/// The limits in force: the defaults of the service, then those of a file (`--config-limits`, whose keys stand at the
/// top), then the flags.
pub(crate) fn resolve(defaults: Limits, file: Option<&Path>, flags: &LimitFlags) -> Result<Limits, Failure> {
    match file {
        Some(path) => overlay(defaults, &[&toml_file::read_plain(path)?], flags),
        None => overlay(defaults, &[], flags),
    }
}

/// Puts tables, and then flags, over the defaults of a service.
pub(crate) fn overlay(defaults: Limits, tables: &[&LimitTable], flags: &LimitFlags) -> Result<Limits, Failure> {
    let mut limits = defaults;
    tables.iter().for_each(|table| table.apply(&mut limits));
    flags.apply(&mut limits);
    check(&limits)?;
    Ok(limits)
}

/// Corrects the help of the flags for a service with other defaults than [`Limits::default`].
pub(crate) fn help_of(defaults: Limits) -> impl FnMut(Arg) -> Arg {
    let changed: Vec<_> =
        list(&defaults).into_iter().zip(list(&Limits::default())).filter(|(own, usual)| own != usual).collect();
    move |arg| {
        let Some(((_, own), _)) = changed.iter().find(|((name, _), _)| arg.get_id() == name) else { return arg };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let Some((text, _)) = help.rsplit_once("[default: ") else { return arg };
        arg.help(format!("{text}[default: {}]", with_unit(*own)))
    }
}

/// A number as flags take it: with the unit of which it is a multiple.
fn with_unit(value: u64) -> String {
    let units = [(30, "g"), (20, "m"), (10, "k")];
    let unit = units.into_iter().find(|(bits, _)| value > 0 && value.is_multiple_of(1 << bits));
    unit.map_or_else(|| value.to_string(), |(bits, unit)| format!("{}{unit}", value >> bits))
}

/// Refuses limits that contradict each other.
pub(crate) fn check(limits: &Limits) -> Result<(), Failure> {
    if limits.assembly_bytes_max < limits.message_bytes_max {
        return Err(Failure::new(
            Status::Data,
            format!(
                "assembly_bytes_max ({}) is below message_bytes_max ({}): no message of that length could be put together",
                limits.assembly_bytes_max, limits.message_bytes_max
            ),
        )
        .remedy("raise the one or lower the other"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::number;

    #[test]
    fn every_field_of_the_framework_has_a_flag() {
        // The Debug form names every field: none may be missing here.
        let debug = format!("{:?}", Limits::default());
        for (name, value) in list(&Limits::default()) {
            assert!(debug.contains(&format!("{name}: {value}")), "{name}");
        }
        assert_eq!(debug.matches(": ").count(), list(&Limits::default()).len());
    }

    #[test]
    fn the_help_shows_the_defaults() {
        use clap::Args;
        let command = LimitFlags::augment_args(clap::Command::new("x"));
        for (name, value) in list(&Limits::default()) {
            let argument = command.get_arguments().find(|argument| argument.get_id() == name).unwrap();
            let help = argument.get_help().unwrap().to_string();
            let shown = help.split("[default: ").nth(1).and_then(|rest| rest.strip_suffix(']'));
            assert_eq!(number::<0, { u64::MAX }>(shown.unwrap_or("none")), Ok(value), "{name}: {help}");
        }
    }

    #[test]
    fn the_help_of_a_kind_shows_its_own_defaults() {
        use clap::CommandFactory;
        let mut command = crate::args::Cli::command();
        command.build();
        for (kind, name, shown) in [
            ("nfs", "connection_bytes_max", "[default: 16m]"),
            ("9p", "connection_bytes_max", "[default: 16m]"),
            ("store", "message_bytes_max", "[default: 8m]"),
            ("store", "connection_bytes_max", "[default: 32m]"),
            ("kecho", "connection_bytes_max", "[default: 4m]"),
        ] {
            let of_kind = command.find_subcommand(kind).unwrap();
            let argument = of_kind.get_arguments().find(|argument| argument.get_id() == name).unwrap();
            let help = argument.get_help().unwrap().to_string();
            assert!(help.ends_with(shown), "{kind}: {help}");
        }
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let table: LimitTable = toml::from_str("message_bytes_max = \"64k\"\nfragments_max = 7").unwrap();
        let flags = LimitFlags { fragments_max: Some(9), ..LimitFlags::default() };
        let mut limits = Limits::default();
        table.apply(&mut limits);
        flags.apply(&mut limits);
        assert_eq!(limits.message_bytes_max, 65536);
        assert_eq!(limits.fragments_max, 9);
        assert_eq!(limits.connections_max, Limits::default().connections_max);
    }

    #[test]
    fn nonsense_in_a_file_is_refused() {
        for text in [
            "message_bytes_max = 0",
            "message_bytes_max = -1",
            "message_bytes_max = true",
            "fragments_max = 4294967296",
            "no_such_limit = 1",
        ] {
            assert!(toml::from_str::<LimitTable>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let flags = LimitFlags { assembly_bytes_max: Some(10), message_bytes_max: Some(11), ..LimitFlags::default() };
        let failure = resolve(Limits::default(), None, &flags).unwrap_err();
        assert_eq!(failure.status, Status::Data);
    }
}
