//! `ksf stat`: asks a running server for its counters and shows them.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueHint};
use ksf::status_socket;

use super::socket::{Request, folders};
use super::{ServiceSnapshot, Snapshot, Value};
use crate::output::{Align, Failure, Status, escaped, json_line, print, print_if_read, table};

/// Show the live counters of a running server
#[derive(Debug, Args)]
pub(crate) struct StatArgs {
    /// Process id of the server, or path of its socket [default: the only server there is]
    #[arg(value_name = "PID|SOCKET", value_hint = ValueHint::FilePath)]
    pub(crate) server: Option<String>,
    /// One JSON document per reading instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Read again every SECONDS and show the rates, until interrupted
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) watch: Option<f64>,
    /// Show counters that are zero, too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Explain every counter and end
    #[arg(long)]
    pub(crate) help_counters: bool,
}

/// Runs the command.
pub(crate) fn run(args: &StatArgs) -> Result<(), Failure> {
    if args.help_counters {
        return print(help());
    }
    let path = server_path(args.server.as_deref())?;
    let mut before: Option<(Instant, Snapshot)> = None;
    loop {
        let mut snapshot = ask(&path).map_err(|error| silent(&path, &error))?;
        let now = Instant::now();
        let text = if args.json {
            json_line(&snapshot)?
        } else {
            snapshot = escaped(&snapshot);
            let earlier = before.as_ref().map(|(then, old)| (now.duration_since(*then), old));
            text(&snapshot, earlier, args.all)
        };
        let is_read = print_if_read(text)?;
        let Some(pause) = args.watch.filter(|_| is_read) else { return Ok(()) };
        before = Some((now, snapshot));
        thread::sleep(Duration::from_secs_f64(pause));
    }
}

/// The counters of a server that is named as for `ksf stat`.
pub(crate) fn snapshot_of(server: Option<&str>) -> Result<Snapshot, Failure> {
    let path = server_path(server)?;
    ask(&path).map_err(|error| silent(&path, &error))
}

/// The socket of a server that is named, or of the only one.
fn server_path(server: Option<&str>) -> Result<PathBuf, Failure> {
    server.map_or_else(only_server, path_of)
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("\"{text}\" is not a number of seconds from 0.05 to 86400")),
    }
}

fn ask(path: &Path) -> io::Result<Snapshot> {
    let reply = status_socket::ask(path, &serde_json::to_string(&Request::Stats)?)?;
    Ok(serde_json::from_str(&reply)?)
}

fn silent(path: &Path, error: &io::Error) -> Failure {
    let status = match error.kind() {
        io::ErrorKind::PermissionDenied => Status::NoPermission,
        _ => Status::Unavailable,
    };
    Failure::new(status, format!("no server answers on {}: {error}", path.display())).remedy(match status {
        Status::NoPermission => "run as the user of the server, or as root",
        _ => "is it running? name its process id or the path of its --stats-socket",
    })
}

/// A path, or the socket of a process id.
fn path_of(server: &str) -> Result<PathBuf, Failure> {
    if !server.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(PathBuf::from(server));
    }
    let name = format!("{server}.sock");
    folders().iter().map(|folder| folder.join(&name)).find(|path| path.exists()).ok_or_else(|| {
        Failure::new(Status::Unavailable, format!("process {server} has no socket for ksf stat"))
            .remedy("check the process id, or name the path of its --stats-socket")
    })
}

/// The socket of the server that runs, if it is the only one.
fn only_server() -> Result<PathBuf, Failure> {
    let mut servers = Vec::new();
    for path in folders().iter().filter_map(|folder| status_socket::sockets(folder).ok()).flatten() {
        if let Ok(snapshot) = ask(&path) {
            servers.push((path, snapshot));
        }
    }
    match servers.len() {
        1 => Ok(servers.swap_remove(0).0),
        0 => Err(Failure::new(Status::Unavailable, "no running server was found")
            .remedy("start one, run as its user, or name the path of its --stats-socket")),
        _ => {
            let list: Vec<String> = servers
                .iter()
                .map(|(_, snapshot)| {
                    let names: Vec<_> = snapshot.services.iter().map(|s| s.name.as_str()).collect();
                    format!("{} ({})", snapshot.pid, names.join(", "))
                })
                .collect();
            Err(Failure::new(Status::Usage, "several servers are running")
                .remedy(format!("name one: {}", list.join(", "))))
        }
    }
}

/// The snapshot for people, with rates where an earlier one is known.
fn text(now: &Snapshot, earlier: Option<(Duration, &Snapshot)>, all: bool) -> String {
    let seconds = now.uptime_ms as f64 / 1000.0;
    let mut out = format!("pid {}, ksf {}, up {seconds:.1} s\n", now.pid, now.ksf);
    for service in &now.services {
        let _ = writeln!(
            out,
            "{}: engine={} shards={} on {}",
            service.name,
            service.engine,
            service.shards,
            service.listeners.join(", ")
        );
        let old = earlier.and_then(|(elapsed, snapshot)| {
            let service = snapshot.services.iter().find(|old| old.name == service.name)?;
            Some((elapsed, service))
        });
        for (title, part, grows) in PARTS {
            let rates = old.filter(|_| grows).map(|(elapsed, old)| (elapsed, by_name(part(old))));
            let shown: Vec<&Value> = part(service).iter().filter(|value| all || value.value > 0).collect();
            if shown.is_empty() {
                continue;
            }
            let _ = writeln!(out, "  {title}");
            let row = |value: &&Value| {
                let rate = rates.as_ref().map(|(elapsed, old)| {
                    let before = old.get(value.name.as_str()).copied().unwrap_or(0);
                    let grown = value.value.saturating_sub(before) as f64;
                    format!("{:.1}/s", grown / elapsed.as_secs_f64())
                });
                [value.name.clone(), value.value.to_string(), rate.unwrap_or_default(), value.help.clone()]
            };
            let rows: Vec<_> = shown.iter().map(row).collect();
            out.push_str(&table(4, [Align::Left, Align::Right, Align::Right, Align::Left], &rows));
        }
    }
    out
}

/// Picks a group of counters of a service.
type Part = fn(&ServiceSnapshot) -> &[Value];

/// The groups, with the heading they are shown under, and whether they count what only grows.
const PARTS: [(&str, Part, bool); 4] = [
    ("user space", |service| &service.counters, true),
    ("slots now", |service| &service.slots, false),
    ("kernel", |service| &service.kernel, true),
    ("service", |service| &service.own, true),
];

fn by_name(values: &[Value]) -> HashMap<&str, u64> {
    values.iter().map(|value| (value.name.as_str(), value.value)).collect()
}

/// Every counter with its meaning.
fn help() -> String {
    let row = |name: &str, help: &str| [name.to_owned(), help.to_owned()];
    let user: Vec<_> = ksf::stats::Stats::default().read().iter().map(|c| row(c.name, c.help)).collect();
    let kernel: Vec<_> = ksf_kernel::COUNTERS.iter().map(|(name, help)| row(name, help)).collect();
    let [user, kernel] = [user, kernel].map(|rows| table(2, [Align::Left; 2], &rows));
    format!("user space, per service\n{user}kernel, per service on the engine kernel\n{kernel}")
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn zero_counters_are_hidden_unless_asked_for() {
        let short = text(&example(), None, false);
        assert!(short.contains("accepted"));
        assert!(!short.contains("closed_total"));
        assert!(text(&example(), None, true).contains("closed_total"));
    }

    #[test]
    fn rates_are_differences_over_time() {
        let old = example();
        let mut new = example();
        new.services[0].counters[0].value += 10;
        new.services[0].slots[0].value += 10;
        let text = text(&new, Some((Duration::from_secs(2), &old)), false);
        let line = text.lines().find(|line| line.contains("accepted")).unwrap();
        assert!(line.contains(" 5.0/s"), "{line}");
        let line = text.lines().find(|line| line.contains("short_slots_kept")).unwrap();
        assert!(line.contains(" 16 ") && !line.contains("/s"), "what is used now has no rate: {line}");
    }

    #[test]
    fn every_counter_of_the_framework_is_explained() {
        let text = help();
        for counter in ksf::stats::Stats::default().read() {
            assert!(text.contains(counter.name) && text.contains(counter.help));
        }
    }
}
