//! `ksf nfs status`: what a running server has answered, of each procedure.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueHint};
use ksf_nfs::Procedure;
use serde::Serialize;

use crate::output::{Align, Failure, Status, json_line, print, table};
use crate::stats::client::snapshot_of;
use crate::stats::{ServiceSnapshot, Snapshot};

/// What can be done with an NFS server beside serving.
#[derive(Debug, Subcommand)]
pub(crate) enum NfsTool {
    Status(StatusArgs),
}

/// Show what a running NFS server has answered, of each procedure
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
    procedures: Vec<Row>,
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
    let uptime_ms = snapshot.uptime_ms;
    let server = |service: &'_ ServiceSnapshot| {
        let count = |name: String| service.own.iter().find(|value| value.name == name).map(|value| value.value);
        // No other kind counts these.
        count(format!("{}_calls", Procedure::Readdirplus.name()))?;
        let row = |procedure: &Procedure| {
            let name = procedure.name();
            let of = |what: &str| count(format!("{name}_{what}")).unwrap_or(0);
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
        Some(Procedure::ALL.iter().filter_map(row).collect::<Vec<_>>())
    };
    let all = snapshot.services.iter();
    all.filter_map(|service| Some(Server { name: &service.name, uptime_ms, procedures: server(service)? })).collect()
}

fn text(servers: &[Server<'_>]) -> String {
    let mut out = String::new();
    for server in servers {
        out.push_str(&format!("{}: up {:.1} s\n", server.name, server.uptime_ms as f64 / 1000.0));
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
        let rows: Vec<_> = std::iter::once(title).chain(server.procedures.iter().map(row)).collect();
        let [left, right] = [Align::Left, Align::Right];
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
        ] {
            own.push(Value::new(name, "", value));
        }
        let row = Row { procedure: "remove", calls: 30, failed: 2, replayed: 1, calls_per_s: 20.0, mean_us: 30.0 };
        let found = servers(&snapshot);
        assert_eq!(found, [Server { name: "a\"b", uptime_ms: 1500, procedures: vec![row] }]);
        let text = text(&found);
        let line = text.lines().find(|line| line.contains("remove")).unwrap();
        assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["remove", "30", "20.0", "30.0", "2", "1"]);
    }
}
