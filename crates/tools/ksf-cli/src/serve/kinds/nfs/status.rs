//! `ksf nfs status`: what a running server has answered, of each procedure and each client, and what it has open.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueHint};
use ksf_nfs::Procedure;
use serde::Serialize;

use crate::output::{Align, Failure, Status, json_line, print, table};
use crate::stats::client::snapshot_of;
use crate::stats::{ClientSnapshot, ServiceSnapshot, Snapshot};

/// What can be done with an NFS server beside serving.
#[derive(Debug, Subcommand)]
pub(crate) enum NfsTool {
    Status(StatusArgs),
}

/// Show what a running NFS server has answered, of each procedure and each client
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Process id of the server, or path of its socket [default: the only server there is]
    #[arg(value_name = "PID|SOCKET", value_hint = ValueHint::FilePath)]
    server: Option<String>,
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
}

impl NfsTool {
    pub(crate) fn run(self) -> Result<ExitCode, Failure> {
        let NfsTool::Status(StatusArgs { server, json }) = self;
        let snapshot = snapshot_of(server.as_deref())?;
        let servers = servers(&snapshot);
        if servers.is_empty() {
            let what = format!("process {} has no service of kind = \"nfs\"", snapshot.pid);
            return Err(Failure::new(Status::Unavailable, what).remedy("name the process id of ksf nfs"));
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
    now: Now,
    procedures: Vec<Row>,
    /// Those with the most calls first.
    clients: &'a [ClientSnapshot],
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

/// What it has answered of one procedure. Times are from the call to its answer.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    procedure: &'static str,
    calls: u64,
    failed: u64,
    replayed: u64,
    calls_per_s: f64,
    mean_us: f64,
}

/// The servers of NFS in a process, with the procedures that were called.
fn servers(snapshot: &Snapshot) -> Vec<Server<'_>> {
    snapshot.services.iter().filter_map(|service| Server::of(service, snapshot.uptime_ms)).collect()
}

impl<'a> Server<'a> {
    /// `None`: the service is of another kind.
    fn of(service: &'a ServiceSnapshot, uptime_ms: u64) -> Option<Self> {
        let count = |name: &str| service.own.iter().find(|value| value.name == name).map(|value| value.value);
        // No other kind counts these.
        count(&format!("{}_calls", Procedure::Readdirplus.name()))?;
        let row = |procedure: &Procedure| {
            let name = procedure.name();
            let of = |what: &str| count(&format!("{name}_{what}")).unwrap_or(0);
            let calls = of("calls");
            (calls > 0).then(|| Row {
                procedure: name,
                calls,
                failed: of("failed"),
                replayed: of("replayed"),
                calls_per_s: calls as f64 * 1000.0 / uptime_ms.max(1) as f64,
                mean_us: of("us") as f64 / calls as f64,
            })
        };
        let now = |name| count(name).unwrap_or(0);
        Some(Self {
            name: &service.name,
            uptime_ms,
            now: Now {
                mounts: now("mounts"),
                descriptors: now("descriptors"),
                uncommitted_files: now("uncommitted_files"),
                lane_jobs_queued: now("lane_jobs_queued"),
                syncs_queued: now("syncs_queued"),
            },
            procedures: Procedure::ALL.iter().filter_map(row).collect(),
            clients: &service.clients,
        })
    }
}

fn text(servers: &[Server<'_>]) -> String {
    let mut out = String::new();
    for Server { name, uptime_ms, now, procedures, clients } in servers {
        let Now { mounts, descriptors, uncommitted_files, lane_jobs_queued, syncs_queued } = now;
        out.push_str(&format!(
            "{name}: up {:.1} s; now: mounts {mounts}, descriptors {descriptors}, uncommitted files {uncommitted_files}, \
             requests that wait for a thread {lane_jobs_queued}, for a sync {syncs_queued}\n",
            *uptime_ms as f64 / 1000.0
        ));
        let title = ["procedure", "calls", "per s", "mean us", "failed", "replayed"].map(str::to_owned);
        let row = |row: &Row| {
            let Row { procedure, calls, failed, replayed, calls_per_s, mean_us } = row;
            [
                (*procedure).to_owned(),
                calls.to_string(),
                format!("{calls_per_s:.1}"),
                format!("{mean_us:.1}"),
                failed.to_string(),
                replayed.to_string(),
            ]
        };
        let [left, right] = [Align::Left, Align::Right];
        let rows: Vec<_> = std::iter::once(title).chain(procedures.iter().map(row)).collect();
        out.push_str(&table(2, [left, right, right, right, right, right], &rows));
        let title = ["client", "connections", "mounts", "calls", "bytes read", "written"].map(str::to_owned);
        let row = |client: &ClientSnapshot| {
            let ClientSnapshot { address, connections, mounts, calls, read_bytes, written_bytes } = client;
            let [connections, mounts, calls, read, written] =
                [connections, mounts, calls, read_bytes, written_bytes].map(u64::to_string);
            [address.clone(), connections, mounts, calls, read, written]
        };
        let rows: Vec<_> = std::iter::once(title).chain(clients.iter().map(row)).collect();
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
        assert!(servers(&snapshot).is_empty(), "no server of NFS");
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
        let row = Row { procedure: "remove", calls: 30, failed: 2, replayed: 1, calls_per_s: 20.0, mean_us: 30.0 };
        let found = servers(&snapshot);
        let now = Now { mounts: 2, syncs_queued: 5, ..Now::default() };
        let clients =
            &[ClientSnapshot { address: "::1".into(), mounts: 2, read_bytes: 9, ..ClientSnapshot::default() }];
        assert_eq!(found, [Server { name: "a\"b", uptime_ms: 1500, now, procedures: vec![row], clients }]);
        let text = text(&found);
        let words = |what: &str| {
            let line = text.lines().find(|line| line.trim_start().starts_with(what)).unwrap();
            line.split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!(words("remove"), ["remove", "30", "20.0", "30.0", "2", "1"]);
        assert_eq!(words("::1"), ["::1", "0", "2", "0", "9", "0"]);
        assert!(text.contains("now: mounts 2, descriptors 0") && text.contains("for a sync 5\n"), "{text}");
    }
}
