//! `ksf nfs status` and `ksf 9p status`: what a running server has answered, of each kind of request. Of NFS
//! also of each client, and what the server has open.

use std::process::ExitCode;

use clap::{Args, ValueHint};
use ksf_nfs::Procedure;
use serde::Serialize;

use crate::output::{Align, Failure, Status, escaped, json_line, print, table};
use crate::stats::client::snapshot_of;
use crate::stats::{ClientSnapshot, ServiceSnapshot, Snapshot};

/// Whose status is shown.
#[derive(Clone, Copy, Debug)]
pub(super) enum Protocol {
    Nfs,
    Ninep,
}

/// Which server, and how it is shown
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Process id of the server, or path of its socket [default: the only server there is]
    #[arg(value_name = "PID|SOCKET", value_hint = ValueHint::FilePath)]
    server: Option<String>,
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
}

impl Protocol {
    /// The kind of its services, which is its command, too.
    fn kind(self) -> &'static str {
        match self {
            Self::Nfs => "nfs",
            Self::Ninep => "9p",
        }
    }

    /// What its requests are called, in the order in which they are shown.
    fn requests(self) -> Vec<&'static str> {
        match self {
            Self::Nfs => Procedure::ALL.iter().map(|procedure| procedure.name()).collect(),
            Self::Ninep => ksf_ninep::message_names().collect(),
        }
    }

    /// A request that no other kind of service counts.
    fn own_request(self) -> &'static str {
        match self {
            Self::Nfs => Procedure::Readdirplus.name(),
            Self::Ninep => "walk",
        }
    }

    fn name(self, name: &'static str) -> Name {
        match self {
            Self::Nfs => Name::Procedure(name),
            Self::Ninep => Name::Message(name),
        }
    }

    fn rows(self, rows: Vec<Row>) -> Rows {
        match self {
            Self::Nfs => Rows::Procedures(rows),
            Self::Ninep => Rows::Messages(rows),
        }
    }
}

impl StatusArgs {
    pub(super) fn run(self, protocol: Protocol) -> Result<ExitCode, Failure> {
        let StatusArgs { server, json } = self;
        let snapshot = snapshot_of(server.as_deref())?;
        let snapshot = if json { snapshot } else { escaped(&snapshot) };
        let servers = servers(protocol, &snapshot);
        if servers.is_empty() {
            let kind = protocol.kind();
            let what = format!("process {} has no service of kind = \"{kind}\"", snapshot.pid);
            return Err(Failure::new(Status::Unavailable, what).remedy(format!("name the process id of ksf {kind}")));
        }
        print(if json { json_line(&servers)? } else { text(&servers) })?;
        Ok(ExitCode::SUCCESS)
    }
}

/// What one server has answered.
#[derive(Debug, PartialEq, Serialize)]
struct Server<'a> {
    name: &'a str,
    uptime_ms: u64,
    /// Of NFS alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    now: Option<Now>,
    #[serde(flatten)]
    rows: Rows,
    /// Those with the most calls first; of NFS alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    clients: Option<&'a [ClientSnapshot]>,
}

/// What there is at this moment.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Now {
    /// Mounts that clients told of and did not take back.
    mounts: u64,
    /// Descriptors of files that are kept open.
    descriptors: u64,
    /// Files with data that no client has committed.
    uncommitted_files: u64,
    /// Requests that wait for a thread.
    lane_jobs_queued: u64,
    /// Requests that wait for a sync.
    syncs_queued: u64,
}

/// A list that is called as its elements are.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Rows {
    Procedures(Vec<Row>),
    Messages(Vec<Row>),
}

/// A request.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Name {
    Procedure(&'static str),
    Message(&'static str),
}

/// What it has answered of one kind of request. Times are from the call to its answer.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    #[serde(flatten)]
    name: Name,
    calls: u64,
    failed: u64,
    /// Of NFS alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    replayed: Option<u64>,
    calls_per_s: f64,
    mean_us: f64,
}

/// The servers of a protocol in a process, with the requests that there were.
fn servers(protocol: Protocol, snapshot: &Snapshot) -> Vec<Server<'_>> {
    snapshot.services.iter().filter_map(|service| Server::of(protocol, service, snapshot.uptime_ms)).collect()
}

impl<'a> Server<'a> {
    /// `None`: the service is of another kind.
    fn of(protocol: Protocol, service: &'a ServiceSnapshot, uptime_ms: u64) -> Option<Self> {
        let count = |name: &str| service.own.iter().find(|value| value.name == name).map(|value| value.value);
        // No other kind counts these.
        count(&format!("{}_calls", protocol.own_request()))?;
        let is_nfs = matches!(protocol, Protocol::Nfs);
        let row = |name: &'static str| {
            let of = |what: &str| count(&format!("{name}_{what}")).unwrap_or(0);
            let calls = of("calls");
            (calls > 0).then(|| Row {
                name: protocol.name(name),
                calls,
                failed: of("failed"),
                replayed: is_nfs.then(|| of("replayed")),
                calls_per_s: calls as f64 * 1000.0 / uptime_ms.max(1) as f64,
                mean_us: of("us") as f64 / calls as f64,
            })
        };
        let now = |name| count(name).unwrap_or(0);
        Some(Self {
            name: &service.name,
            uptime_ms,
            now: is_nfs.then(|| Now {
                mounts: now("mounts"),
                descriptors: now("descriptors"),
                uncommitted_files: now("uncommitted_files"),
                lane_jobs_queued: now("lane_jobs_queued"),
                syncs_queued: now("syncs_queued"),
            }),
            rows: protocol.rows(protocol.requests().into_iter().filter_map(row).collect()),
            clients: is_nfs.then_some(&service.clients),
        })
    }
}

fn text(servers: &[Server<'_>]) -> String {
    let mut out = String::new();
    let [left, right] = [Align::Left, Align::Right];
    for Server { name, uptime_ms, now, rows, clients } in servers {
        out.push_str(&format!("{name}: up {:.1} s", *uptime_ms as f64 / 1000.0));
        if let Some(Now { mounts, descriptors, uncommitted_files, lane_jobs_queued, syncs_queued }) = now {
            out.push_str(&format!(
                "; now: mounts {mounts}, descriptors {descriptors}, uncommitted files {uncommitted_files}, \
                 requests that wait for a thread {lane_jobs_queued}, for a sync {syncs_queued}"
            ));
        }
        out.push('\n');
        let cells = |row: &Row| {
            let Row {
                name: Name::Procedure(name) | Name::Message(name),
                calls,
                failed,
                replayed,
                calls_per_s,
                mean_us,
            } = row;
            let replayed = replayed.map_or(String::new(), |replayed| replayed.to_string());
            let (per_s, mean_us) = (format!("{calls_per_s:.1}"), format!("{mean_us:.1}"));
            [(*name).to_owned(), calls.to_string(), per_s, mean_us, failed.to_string(), replayed]
        };
        let (what, replayed, rows) = match rows {
            Rows::Procedures(rows) => ("procedure", "replayed", rows),
            Rows::Messages(rows) => ("message", "", rows),
        };
        let title = [what, "calls", "per s", "mean us", "failed", replayed].map(str::to_owned);
        let rows: Vec<_> = std::iter::once(title).chain(rows.iter().map(cells)).collect();
        out.push_str(&table(2, [left, right, right, right, right, right], &rows));
        let Some(clients) = clients else { continue };
        let title = ["client", "connections", "mounts", "calls", "bytes read", "written"].map(str::to_owned);
        let cells = |client: &ClientSnapshot| {
            let ClientSnapshot { address, connections, mounts, calls, read_bytes, written_bytes } = client;
            let [connections, mounts, calls, read, written] =
                [connections, mounts, calls, read_bytes, written_bytes].map(u64::to_string);
            [address.clone(), connections, mounts, calls, read, written]
        };
        let rows: Vec<_> = std::iter::once(title).chain(clients.iter().map(cells)).collect();
        out.push_str(&table(2, [left, right, right, right, right, right], &rows));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Value, example};

    #[test]
    fn procedures_that_were_called_are_shown_with_rates_and_means() {
        let mut snapshot = example();
        assert!(servers(Protocol::Nfs, &snapshot).is_empty(), "no server of NFS");
        let own = &mut snapshot.services[1].own;
        for (name, value) in [
            ("readdirplus_calls", 0),
            ("remove_calls", 30),
            ("remove_us", 900),
            ("remove_failed", 2),
            ("remove_replayed", 1),
            ("mounts", 2),
            ("syncs_queued", 5),
        ] {
            own.push(Value::new(name, "", value));
        }
        let name = Name::Procedure("remove");
        let row = Row { name, calls: 30, failed: 2, replayed: Some(1), calls_per_s: 20.0, mean_us: 30.0 };
        let found = servers(Protocol::Nfs, &snapshot);
        let now = Some(Now { mounts: 2, syncs_queued: 5, ..Now::default() });
        let client = ClientSnapshot { address: "::1".into(), mounts: 2, read_bytes: 9, ..ClientSnapshot::default() };
        let (rows, clients) = (Rows::Procedures(vec![row]), Some(&[client][..]));
        assert_eq!(found, [Server { name: "a\"b", uptime_ms: 1500, now, rows, clients }]);
        let json = r#"[{"name":"a\"b","uptime_ms":1500,"now":{"mounts":2,"#;
        let row = r#""procedures":[{"procedure":"remove","calls":30,"failed":2,"replayed":1,"#;
        let line = json_line(&found).unwrap();
        assert!(line.starts_with(json) && line.contains(row) && line.contains(r#""clients":["#), "{line}");
        let text = text(&found);
        let words = |what: &str| {
            let line = text.lines().find(|line| line.trim_start().starts_with(what)).unwrap();
            line.split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!(words("remove"), ["remove", "30", "20.0", "30.0", "2", "1"]);
        assert_eq!(words("::1"), ["::1", "0", "2", "0", "9", "0"]);
        assert!(text.contains("now: mounts 2, descriptors 0") && text.contains("for a sync 5\n"), "{text}");
    }

    #[test]
    fn messages_of_9p_are_shown_without_replays() {
        let mut snapshot = example();
        let own = &mut snapshot.services[1].own;
        for (name, value) in [("walk_calls", 30), ("walk_us", 900), ("walk_failed", 2), ("read_calls", 0)] {
            own.push(Value::new(name, "", value));
        }
        assert!(servers(Protocol::Nfs, &snapshot).is_empty());
        let found = servers(Protocol::Ninep, &snapshot);
        let row = r#""messages":[{"message":"walk","calls":30,"failed":2,"calls_per_s":20.0,"mean_us":30.0}]"#;
        assert!(json_line(&found).unwrap().contains(row), "{}", json_line(&found).unwrap());
        let text = text(&found);
        let line = text.lines().find(|line| line.contains("walk")).unwrap();
        assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["walk", "30", "20.0", "30.0", "2"]);
    }
}
