//! `cargo xtask demo`: every service on every engine that this machine has, over TCP and UDP, as
//! one table; and proof that nothing stays behind.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use comfy_table::{CellAlignment, Table, presets::ASCII_BORDERS_ONLY_CONDENSED};
use serde::Deserialize;

use crate::leftovers::{self, Snapshot};
use crate::load::{Amount, Load, LoadResult, Tool};
use crate::process::{Ready, Server, free_port, output};

const ENGINES: [&str; 3] = ["kernel", "uring", "epoll"];
const IN_FLIGHT: u32 = 128;
const MESSAGE_BYTES: usize = 64;
const START_TIMEOUT: Duration = Duration::from_secs(20);
const DOCTOR_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Length of each of the 24 loads, in seconds
    #[arg(long, default_value_t = 0.7)]
    seconds: f64,
    /// The ksf to show instead of the release build
    #[arg(long)]
    ksf: Option<PathBuf>,
}

/// One line of the table.
#[derive(Clone, Copy)]
struct Combination {
    service: &'static str,
    transport: &'static str,
    engine: &'static str,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let ksf = crate::ksf_binary(options.ksf.as_ref(), "release")?;
    let (engines, skipped) = engines(&ksf)?;
    let mut demo =
        Demo { ksf, seconds: options.seconds, before: Snapshot::take()?, pids: Vec::new(), seen_objects: false };
    let mut table = head();
    for service in ["kecho", "krpc2"] {
        for transport in ["tcp", "udp"] {
            for &engine in engines.iter() {
                let combination = Combination { service, transport, engine };
                let row = demo
                    .measure(combination)
                    .with_context(|| format!("{service} over {transport} on the engine {engine}"))?;
                table.add_row(row);
            }
        }
    }
    println!("{table}");
    for line in skipped {
        println!("{line}");
    }
    println!("{}", demo.check_leftovers(engines.contains(&"kernel"))?);
    Ok(())
}

/// The engines that can run here, and a line about each that cannot: why, and how to get it.
fn engines(ksf: &Path) -> Result<(Vec<&'static str>, Vec<String>)> {
    let text = output(Command::new(ksf).args(["doctor", "--json"]), DOCTOR_TIMEOUT)?;
    let doctor: Doctor = serde_json::from_str(&text).context("ksf doctor --json")?;
    let mut usable = Vec::new();
    let mut skipped = Vec::new();
    for name in ENGINES {
        let engine = doctor
            .engines
            .iter()
            .find(|engine| engine.name == name)
            .with_context(|| format!("ksf doctor knows no engine '{name}'"))?;
        if engine.usable {
            usable.push(name);
            continue;
        }
        let remedy = engine.remedy.as_deref().unwrap_or("none known");
        skipped.push(format!("skipped: {name}: {}; get it: {remedy}", engine.reason));
    }
    Ok((usable, skipped))
}

/// What is read of `ksf doctor --json`.
#[derive(Deserialize)]
struct Doctor {
    engines: Vec<Engine>,
}

#[derive(Deserialize)]
struct Engine {
    name: String,
    usable: bool,
    reason: String,
    remedy: Option<String>,
}

struct Demo {
    ksf: PathBuf,
    seconds: f64,
    before: Option<Snapshot>,
    /// Of the servers started so far.
    pids: Vec<u32>,
    /// Whether a running kernel engine was seen by what looks for leftovers.
    seen_objects: bool,
}

impl Demo {
    /// A row of the table: the server is started, loaded twice and stopped.
    fn measure(&mut self, combination: Combination) -> Result<Vec<String>> {
        let Combination { service, transport, engine } = combination;
        eprintln!("demo: {service} over {transport} on {engine}");
        let port = free_port()?;
        let listen = format!("{transport}:127.0.0.1:{port}");
        let mut command = Command::new(&self.ksf);
        command.args([service, "--listen", &listen, "--engine", engine]);
        let server = Server::start(service, &mut command, Ready::Lines(1, "ready"), START_TIMEOUT)?;
        self.pids.push(server.pid());

        let one = self.load(combination, port, 1)?;
        let many = self.load(combination, port, IN_FLIGHT)?;
        if engine == "kernel"
            && let (Some(before), Some(now)) = (&self.before, Snapshot::take()?)
        {
            self.seen_objects |= now.has_new(before);
        }
        server.stop()?;
        Ok(vec![
            service.into(),
            transport.into(),
            engine_title(combination).into(),
            format!("{:.1}", one.rtt_p50_us),
            format!("{:.1}", one.rtt_p99_us),
            format!("{:.0}", many.messages_per_s),
            // A lost or wrong reply has ended the demo with an error.
            "0".into(),
        ])
    }

    fn load(&self, combination: Combination, port: u16, in_flight: u32) -> Result<LoadResult> {
        let load = Load {
            tool: match combination.service {
                "kecho" => Tool::Echo { message_bytes: MESSAGE_BYTES },
                _ => Tool::Rpc,
            },
            udp: combination.transport == "udp",
            in_flight,
            threads: 1,
            amount: Amount::Seconds(self.seconds),
            cpus: None,
            port,
        };
        load.run(&self.ksf)
    }

    /// What the check has found, in a sentence; an error names what was left behind.
    fn check_leftovers(&self, kernel_ran: bool) -> Result<String> {
        leftovers::check(self.before.as_ref(), &self.pids)?;
        if self.before.is_none() {
            return Ok("left behind: nothing (no process; not root, so nothing was loaded)".into());
        }
        // Else the check would pass because it looks for the wrong names.
        ensure!(!kernel_ran || self.seen_objects, "the check for leftovers did not see the running kernel engine");
        Ok("left behind: nothing (no process, no eBPF program or map, no XDP on lo)".into())
    }
}

/// What answers: over UDP the engine `kernel` is XDP, the others are plain sockets.
fn engine_title(combination: Combination) -> &'static str {
    match (combination.engine, combination.transport) {
        ("kernel", "udp") => "kernel (XDP)",
        (engine, _) => engine,
    }
}

fn head() -> Table {
    let mut table = Table::new();
    table.load_style(ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(["service", "over", "engine", "p50 us", "p99 us", "messages/s", "errors"]);
    for column in 3..7 {
        table.column_mut(column).expect("it exists").set_cell_alignment(CellAlignment::Right);
    }
    table
}
