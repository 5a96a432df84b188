//! `ksf accel hop`: local connections beside TCP. The work is done by the crate `ksf-hop`; here are the flags, the texts
//! and the exit statuses.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueHint};
use ksf_accel::Companion;
use ksf_hop::{Counter, Guard, Hop, HopError, Options, Scope};
use serde::Serialize;

use super::{Moment, until_stopped};
use crate::cli::{json_line, print};
use crate::exit::{Failure, Status, one_line, say};
use crate::manager;
use crate::signals::Events;

/// Schema name of the JSON form; the number goes up when a field changes its meaning or goes.
const SCHEMA: &str = "ksf-hop/1";

/// What became of it where the guard came too late.
const GIVEN_UP: &str =
    "a program reads a joined socket by splice(), which does not see joined bytes: nothing is joined any more";

/// Join processes of this machine that talk TCP with each other: what one sends is handed to the other, past TCP and IP
///
/// For long conversations of small messages between programs with event loops. docs/hop.md says what it gains, what is
/// different, and for whom it is not.
#[derive(Debug, Args)]
pub(crate) struct HopArgs {
    #[command(subcommand)]
    command: HopCommand,
}

#[derive(Debug, Subcommand)]
enum HopCommand {
    Attach(AttachArgs),
    Check(CheckArgs),
}

/// Join connections that are established from now on, until interrupted
#[derive(Debug, Args)]
struct AttachArgs {
    /// Connections to, or from, these ports; repeatable [default: all, if a cgroup is named]
    #[arg(short, long, value_name = "PORT,...", value_delimiter = ',', value_parser = crate::limits::number::<1, 65_535>)]
    port: Vec<u64>,
    /// Connections whose two ends belong to processes of this cgroup; a folder of cgroup2, repeatable [default: all, if a
    /// port is named]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    cgroup: Vec<PathBuf>,
    #[command(flatten)]
    how: HowFlags,
    /// Print the counters every SECONDS, too [default: at the end only]
    #[arg(short, long, value_name = "SECONDS", value_parser = crate::limits::number::<1, 86_400>)]
    watch: Option<u64>,
    /// JSON documents instead of text, one a line
    #[arg(long)]
    json: bool,
}

/// Find out, on connections of ksf's own, whether this kernel can
#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    how: HowFlags,
}

#[derive(Debug, Args)]
struct HowFlags {
    /// No program of the scope reads its sockets by splice(); needed where ksf may not trace the kernel to find out
    #[arg(long)]
    no_splice: bool,
    /// No program of the scope asks how many bytes wait (FIONREAD), as nginx does; needed on kernels that do not count all
    #[arg(long)]
    no_fionread: bool,
    /// Bytes of a direction that may wait unread outside of TCP; a quarter of the reader's SO_RCVBUF is a limit, too
    #[arg(long, value_name = "BYTES", default_value_t = u64::from(Options::default().limit_bytes),
        value_parser = crate::limits::number::<1, 16_777_216>)]
    limit: u64,
    /// Messages of a direction that go by TCP first
    #[arg(long, value_name = "COUNT", default_value_t = u64::from(Options::default().warm_up),
        value_parser = crate::limits::number::<0, 1_000_000>)]
    warm_up: u64,
}

impl HowFlags {
    fn options(&self) -> Options {
        let mut options = Options::default();
        options.no_splice = self.no_splice;
        options.no_fionread = self.no_fionread;
        // Both are limited by their parsers.
        options.limit_bytes = self.limit as u32;
        options.warm_up = self.warm_up as u32;
        options
    }
}

/// Flags of `ksf accel run`: the same for as long as a program runs.
#[derive(Debug, Clone, Args)]
pub(crate) struct JoinFlags {
    /// While the program runs, join connections to, or from, these ports whose two ends are on this machine (ksf accel hop)
    #[arg(long = "hop", value_name = "PORT,...", value_delimiter = ',')]
    #[arg(value_parser = crate::limits::number::<1, 65_535>)]
    ports: Vec<u64>,
    /// No program at these ports reads its sockets by splice()
    #[arg(long = "hop-no-splice", requires = "ports")]
    no_splice: bool,
    /// No program at these ports asks how many bytes wait (FIONREAD), as nginx does
    #[arg(long = "hop-no-fionread", requires = "ports")]
    no_fionread: bool,
}

impl JoinFlags {
    pub(super) fn is_wanted(&self) -> bool {
        !self.ports.is_empty()
    }

    /// The same flags as arguments, for the process that is to join.
    pub(super) fn arguments(&self) -> Vec<String> {
        if !self.is_wanted() {
            return Vec::new();
        }
        let ports: Vec<String> = self.ports.iter().map(u64::to_string).collect();
        let flags = [(self.no_splice, "--hop-no-splice"), (self.no_fionread, "--hop-no-fionread")];
        let flags = flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag.to_owned());
        [format!("--hop={}", ports.join(","))].into_iter().chain(flags).collect()
    }

    /// Joins until it is dropped; where that cannot be, it says why, and everything goes by TCP.
    pub(super) fn begin(&self) -> Option<Box<dyn Companion>> {
        if !self.is_wanted() {
            return None;
        }
        let mut options = Options::default();
        options.no_splice = self.no_splice;
        options.no_fionread = self.no_fionread;
        // The parser has seen to it that they fit.
        let scope = Scope { cgroups: Vec::new(), ports: self.ports.iter().map(|port| *port as u16).collect() };
        let hop = Hop::start(&scope, &options).map_err(|error| {
            let why = one_line(&error.to_string());
            format!("connections {} go by TCP: {why}", scope_text(&scope))
        });
        Some(Box::new(Joining { scope, hop }))
    }
}

/// The hop beside a program.
struct Joining {
    scope: Scope,
    hop: Result<Hop, String>,
}

impl Companion for Joining {
    fn said(&self) -> String {
        match &self.hop {
            Err(why) => why.clone(),
            Ok(hop) if hop.has_given_up().unwrap_or(false) => GIVEN_UP.to_owned(),
            Ok(hop) => format!("joining connections {}; {}", scope_text(&self.scope), guard_text(hop.guard())),
        }
    }

    fn counters(&self) -> BTreeMap<String, u64> {
        let counters = self.hop.as_ref().ok().and_then(|hop| hop.counters().ok()).unwrap_or_default();
        counters.into_iter().map(|counter| (counter.name.to_owned(), counter.value)).collect()
    }
}

/// Runs the command.
pub(super) fn run(args: HopArgs) -> Result<ExitCode, Failure> {
    match args.command {
        HopCommand::Attach(args) => attach(&args),
        HopCommand::Check(args) => check(&args),
    }
}

fn check(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let guard = Hop::check(&args.how.options()).map_err(failure)?;
    let text =
        format!("local connections can be joined on this kernel: the self-test passed\n{}\n", guard_text(&guard));
    print(&mut io::stdout().lock(), text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn attach(args: &AttachArgs) -> Result<ExitCode, Failure> {
    let signals = Events::take().map_err(|error| Failure::os("cannot take over the signals", &error))?;
    // The parser has seen to it that they fit.
    let scope = Scope { cgroups: args.cgroup.clone(), ports: args.port.iter().map(|port| *port as u16).collect() };
    let hop = Hop::start(&scope, &args.how.options()).map_err(failure)?;
    say(&format_args!("self-test passed; joining connections {}; {}", scope_text(&scope), guard_text(hop.guard())));
    manager::ready("joining local connections");
    let mut given_up = false;
    until_stopped(&signals, args.watch, |moment| {
        if moment == Moment::Show {
            return show(&hop, args.json);
        }
        if !given_up && hop.has_given_up().map_err(failure)? {
            given_up = true;
            say(&format_args!(
                "{GIVEN_UP}. Keep that program out of the scope, and end those of its connections that stall"
            ));
        }
        Ok(())
    })
}

fn scope_text(scope: &Scope) -> String {
    let list = |items: Vec<String>| items.join(", ");
    let ports = list(scope.ports.iter().map(u16::to_string).collect());
    let cgroups = list(scope.cgroups.iter().map(|folder| folder.display().to_string()).collect());
    match (ports.is_empty(), cgroups.is_empty()) {
        (false, false) => format!("of ports {ports} in {cgroups}"),
        (false, true) => format!("of ports {ports}"),
        _ => format!("in {cgroups}"),
    }
}

fn guard_text(guard: &Guard) -> String {
    match guard {
        Guard::Attached => "sockets that are read by splice() stay on TCP".to_owned(),
        Guard::Trusted(why) => format!("nobody looks for splice() ({}), as --no-splice allows", one_line(why)),
    }
}

fn show(hop: &Hop, json: bool) -> Result<(), Failure> {
    let counters = hop.counters().map_err(failure)?;
    let text = if json { line(&counters)? } else { counters_text(&counters) };
    print(&mut io::stdout().lock(), text.as_bytes())
}

/// Counters that are not zero.
fn counters_text(counters: &[Counter]) -> String {
    let mut out = String::new();
    for counter in counters.iter().filter(|counter| counter.value > 0) {
        let _ = writeln!(out, "{:<14} {:>12}  {}", counter.name, counter.value, counter.help);
    }
    if out.is_empty() { "no connection was seen\n".to_owned() } else { out }
}

fn line(counters: &[Counter]) -> Result<String, Failure> {
    #[derive(Debug, Serialize)]
    struct Document {
        schema: &'static str,
        counters: BTreeMap<&'static str, u64>,
    }
    let counters = counters.iter().map(|counter| (counter.name, counter.value)).collect();
    json_line(&Document { schema: SCHEMA, counters })
}

fn failure(error: HopError) -> Failure {
    let status = match &error {
        HopError::NotPermitted { .. } => Status::NoPermission,
        HopError::NothingChosen => Status::Usage,
        HopError::Unreadable { .. } => Status::NoInput,
        HopError::System { .. } => Status::Os,
        _ => Status::Unavailable,
    };
    Failure::new(status, one_line(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_are_zero_are_left_out() {
        let counter = |name, value| Counter { name, help: "help", value };
        assert_eq!(counters_text(&[counter("joined", 3), counter("left", 0)]), "joined                    3  help\n");
        assert_eq!(counters_text(&[counter("left", 0)]), "no connection was seen\n");
        let json: serde_json::Value = serde_json::from_str(&line(&[counter("left", 0)]).unwrap()).unwrap();
        assert_eq!(json, serde_json::json!({"schema": "ksf-hop/1", "counters": {"left": 0}}));
    }

    #[test]
    fn flags_reach_the_process_that_joins() {
        #[derive(Debug, clap::Parser)]
        struct Command {
            #[command(flatten)]
            join: JoinFlags,
        }
        let parse = |arguments: &[&str]| {
            <Command as clap::Parser>::try_parse_from([&["ksf"], arguments].concat()).map(|command| command.join)
        };
        assert!(parse(&[]).unwrap().arguments().is_empty() && parse(&[]).unwrap().begin().is_none());
        for arguments in [&["--hop=80,443"][..], &["--hop=80", "--hop-no-splice", "--hop-no-fionread"]] {
            assert_eq!(parse(arguments).unwrap().arguments(), arguments);
        }
        assert!(parse(&["--hop-no-splice"]).is_err());
    }

    #[test]
    fn the_scope_is_said() {
        let scope = |ports: &[u16], cgroups: &[&str]| {
            scope_text(&Scope { ports: ports.to_vec(), cgroups: cgroups.iter().map(PathBuf::from).collect() })
        };
        assert_eq!(scope(&[80, 81], &[]), "of ports 80, 81");
        assert_eq!(scope(&[80], &["/a"]), "of ports 80 in /a");
        assert_eq!(scope(&[], &["/a", "/b"]), "in /a, /b");
    }
}
