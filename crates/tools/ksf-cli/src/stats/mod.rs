//! Live counters of a server: a snapshot, read over a Unix socket by `ksf stat` and over HTTP by
//! Prometheus. Reading is done by a thread of its own and never touches a shard: the counters
//! are plain loads.

pub(crate) mod client;
pub(crate) mod prometheus;
pub(crate) mod socket;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Schema name of the JSON form; the number goes up when a field changes its meaning or goes.
pub(crate) const SCHEMA: &str = "ksf-stat/1";

/// Takes a snapshot.
pub(crate) type Source = Arc<dyn Fn() -> Snapshot + Send + Sync>;

/// The counters of a process at one moment. docs/formats/stat-json.md describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) schema: String,
    pub(crate) ksf: String,
    pub(crate) pid: u32,
    pub(crate) uptime_ms: u64,
    pub(crate) services: Vec<ServiceSnapshot>,
}

/// One service of the process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServiceSnapshot {
    pub(crate) name: String,
    pub(crate) engine: String,
    pub(crate) shards: usize,
    pub(crate) listeners: Vec<String>,
    /// Limits in force.
    pub(crate) limits: Vec<Value>,
    /// How the slots of the shards are used now.
    #[serde(default)]
    pub(crate) slots: Vec<Value>,
    /// Counters of the user-space half, summed over the shards.
    pub(crate) counters: Vec<Value>,
    /// Counters of the kernel half; empty on the engines uring and epoll.
    pub(crate) kernel: Vec<Value>,
    /// Counters of the service's own.
    pub(crate) own: Vec<Value>,
    /// Its clients, if it tells them apart; there is a bound on their number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) clients: Vec<ClientSnapshot>,
}

/// One client of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientSnapshot {
    /// Its address, or a word for clients without one.
    pub(crate) address: String,
    /// Connections that it has now.
    pub(crate) connections: u64,
    /// Mounts that it told of and did not take back.
    pub(crate) mounts: u64,
    /// Calls that it made.
    pub(crate) calls: u64,
    /// Bytes that it has read.
    pub(crate) read_bytes: u64,
    /// Bytes that it has written.
    pub(crate) written_bytes: u64,
}

/// A named number that explains itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Value {
    pub(crate) name: String,
    pub(crate) value: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) help: String,
}

impl Value {
    pub(crate) fn new(name: &str, help: &str, value: u64) -> Self {
        Value { name: name.to_owned(), value, help: help.to_owned() }
    }
}

#[cfg(test)]
pub(crate) fn example() -> Snapshot {
    let service = |name: &str, accepted| ServiceSnapshot {
        name: name.into(),
        engine: "uring".into(),
        shards: 2,
        listeners: vec!["tcp 127.0.0.1:60007".into()],
        limits: vec![Value::new("fragments_max", "", 9)],
        slots: vec![Value::new("short_slots_kept", "Short slots that messages are kept in.", 6)],
        counters: vec![
            Value::new("accepted", "Connections accepted.", accepted),
            Value::new("closed_total", "Connections closed.", 0),
        ],
        kernel: vec![Value::new("messages", "Messages answered.", 5)],
        own: vec![Value::new("calls", "", 1)],
        clients: vec![ClientSnapshot { address: "::1".into(), mounts: 2, read_bytes: 9, ..ClientSnapshot::default() }],
    };
    Snapshot {
        schema: SCHEMA.into(),
        ksf: "0".into(),
        pid: 7,
        uptime_ms: 1500,
        services: vec![service("echo", 3), service("a\"b", 4)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_survives_json() {
        let text = serde_json::to_string(&example()).unwrap();
        let back: Snapshot = serde_json::from_str(&text).unwrap();
        assert_eq!(back, example());
    }
}
