//! Entries of a list of listeners: an address, and the limits that hold there instead of those of the service.
//!
//! In a file an entry is `"ADDR:PORT"` or `{ address = "ADDR:PORT", limits = { idle_timeout_ms = 5000 } }`; as a flag it is
//! `ADDR:PORT` or `ADDR:PORT,idle_timeout_ms=5000`.

use std::fmt;
use std::str::FromStr;

use ksf::limits::Limits;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};

use super::address::Listen;
use super::limits::{LimitFlags, LimitTable, check};
use crate::output::Failure;

/// Where to listen, and what differs there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListenEntry {
    pub(crate) address: Listen,
    pub(crate) limits: ListenerLimits,
}

impl From<Listen> for ListenEntry {
    fn from(address: Listen) -> Self {
        ListenEntry { address, limits: ListenerLimits::default() }
    }
}

impl FromStr for ListenEntry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_limit = |part: &str| {
            let name = part.split_once('=').map(|(name, _)| name);
            name.is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        };
        // From the end: a path may have commas, too.
        let (mut address, mut limits) = (text, toml::Table::new());
        while let Some((rest, limit)) = address.rsplit_once(',').filter(|(_, part)| is_limit(part)) {
            address = rest;
            let (name, value) = limit.split_once('=').unwrap_or_default();
            if limits.insert(name.to_owned(), value.into()).is_some() {
                return Err(format!("{name} is given twice"));
            }
        }
        let limits = limits.try_into().map_err(|error: toml::de::Error| error.message().to_owned());
        Ok(ListenEntry { address: address.parse()?, limits: limits? })
    }
}

impl<'de> Deserialize<'de> for ListenEntry {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Entry {
            address: Listen,
            #[serde(default)]
            limits: ListenerLimits,
        }
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = ListenEntry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an address, or a table with `address` and `limits`")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ListenEntry, E> {
                text.parse::<Listen>().map(ListenEntry::from).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ListenEntry, A::Error> {
                let Entry { address, limits } = Entry::deserialize(MapAccessDeserializer::new(map))?;
                Ok(ListenEntry { address, limits })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// Limits of what is kept for all connections together: a listener has none of its own.
const OF_ALL: [&str; 12] = [
    "shard_bytes_max",
    "assembly_bytes_max",
    "pressure_timeout_ms",
    "deferred_datagrams_max",
    "datagram_queue_max",
    "connect_timeout_ms",
    "upstream_timeout_ms",
    "upstream_idle_ms",
    "upstreams_idle_max",
    "file_ops_max",
    "file_bytes_max",
    "drain_timeout_ms",
];

/// Limits of one listener; empty where it has those of the service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "LimitTable")]
pub(crate) struct ListenerLimits(LimitTable);

impl TryFrom<LimitTable> for ListenerLimits {
    type Error = String;

    fn try_from(table: LimitTable) -> Result<Self, String> {
        match table.given().into_iter().find(|(name, _)| OF_ALL.contains(name)) {
            Some((name, _)) => Err(format!("`{name}` holds for all listeners together; set it for the service")),
            None => Ok(ListenerLimits(table)),
        }
    }
}

impl ListenerLimits {
    /// Whether all limits are those of the service.
    pub(crate) fn is_empty(&self) -> bool {
        self.0 == LimitTable::default()
    }

    /// The limits in force: those of the service, these, and what flags say of all listeners.
    pub(crate) fn over(&self, service: &Limits, flags: &LimitFlags) -> Result<Limits, Failure> {
        let mut limits = service.clone();
        self.0.apply(&mut limits);
        flags.apply(&mut limits);
        check(&limits)?;
        Ok(limits)
    }
}

/// As in the line of a listener that is ready.
impl fmt::Display for ListenerLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.given().into_iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Status;

    #[derive(Debug, Deserialize)]
    struct File {
        listen: Vec<ListenEntry>,
    }

    fn of_file(entry: &str) -> Result<ListenEntry, String> {
        let file: Result<File, _> = toml::from_str(&format!("listen = [{entry}]"));
        file.map(|mut file| file.listen.remove(0)).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn flags_and_files_say_the_same() {
        for (flag, key) in [
            ("127.0.0.1:1", "\"127.0.0.1:1\""),
            ("127.0.0.1:1", "{ address = \"127.0.0.1:1\" }"),
            (
                "tcp:[::1]:1,message_bytes_max=64k,idle_timeout_ms=5",
                "{ address = \"tcp:[::1]:1\", limits = { idle_timeout_ms = 5, message_bytes_max = \"64k\" } }",
            ),
            ("unix:/a,b,fragments_max=2", "{ address = \"unix:/a,b\", limits = { fragments_max = 2 } }"),
            ("unix:/a=b,C=1", "\"unix:/a=b,C=1\""),
        ] {
            assert_eq!(flag.parse::<ListenEntry>(), of_file(key), "{flag}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (flag, part) in [
            ("127.0.0.1:1,idle_timeout=5", "unknown field `idle_timeout`"),
            ("127.0.0.1:1,idle_timeout_ms=soon", "soon"),
            ("127.0.0.1:1,idle_timeout_ms=1,idle_timeout_ms=2", "idle_timeout_ms is given twice"),
            ("127.0.0.1:1,shard_bytes_max=1k", "holds for all listeners together"),
            ("localhost:1,idle_timeout_ms=5", "in numbers"),
            ("127.0.0.1:1,", "ADDR:PORT"),
        ] {
            let error = flag.parse::<ListenEntry>().unwrap_err();
            assert!(error.contains(part), "{flag}: {error}");
        }
        for (key, part) in [
            ("1", "an address, or a table"),
            ("{ limits = {} }", "missing field `address`"),
            ("{ address = \"127.0.0.1:1\", limit = {} }", "unknown field `limit`"),
            ("{ address = \"127.0.0.1:1\", limits = { drain_timeout_ms = 1 } }", "holds for all listeners together"),
        ] {
            let error = of_file(key).unwrap_err();
            assert!(error.contains(part), "{key}: {error}");
        }
    }

    #[test]
    fn what_a_listener_says_is_above_the_service_and_below_flags() {
        let entry: ListenEntry = "127.0.0.1:1,fragments_max=2,idle_timeout_ms=5".parse().unwrap();
        let service = Limits { fragments_max: 1, linger_timeout_ms: 9, ..Limits::default() };
        let flags = LimitFlags { idle_timeout_ms: Some(6), ..LimitFlags::default() };
        let limits = entry.limits.over(&service, &flags).unwrap();
        assert_eq!((limits.fragments_max, limits.linger_timeout_ms, limits.idle_timeout_ms), (2, 9, 6));
        let entry: ListenEntry = "127.0.0.1:1,message_bytes_max=1g".parse().unwrap();
        assert_eq!(entry.limits.over(&service, &LimitFlags::default()).unwrap_err().status, Status::Data);
    }

    /// A new limit is in one of the two lists: a listener that is given one of all would ignore it.
    #[test]
    fn every_limit_is_of_a_listener_or_of_all() {
        const OF_ONE: [&str; 12] = [
            "message_bytes_max",
            "header_bytes_max",
            "fragments_max",
            "assembly_timeout_ms",
            "idle_timeout_ms",
            "send_timeout_ms",
            "out_queue_bytes_max",
            "connection_bytes_max",
            "connections_max",
            "deferred_max",
            "linger_timeout_ms",
            "linger_bytes_max",
        ];
        let limits = super::super::limits::list(&Limits::default());
        let mut names: Vec<_> = limits.into_iter().map(|(name, _)| name).collect();
        let mut listed: Vec<_> = OF_ALL.into_iter().chain(OF_ONE).collect();
        names.sort_unstable();
        listed.sort_unstable();
        assert_eq!(names, listed);
    }
}
