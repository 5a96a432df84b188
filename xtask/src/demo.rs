//! `cargo xtask demo`: every service on every engine that this machine has, over TCP and UDP, as
//! one table, with the store and the file server; a `kill -9` of the store, with an audit; and proof that nothing stays behind.

mod files;
mod store;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use comfy_table::{CellAlignment, Table, presets::ASCII_BORDERS_ONLY_CONDENSED};
use serde::Deserialize;

use crate::leftovers::Watch;
use crate::load::{Amount, Load, LoadResult, Tool};
use crate::process::{Ready, Server, free_port, output};

const SERVICES: [&str; 2] = ["kecho", "krpc2"];
const TRANSPORTS: [&str; 2] = ["tcp", "udp"];
const ENGINES: [&str; 3] = ["kernel", "uring", "epoll"];
const IN_FLIGHT: u32 = 128;
const MESSAGE_BYTES: usize = 64;
const START_TIMEOUT: Duration = Duration::from_secs(20);
const DOCTOR_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(clap::Args)]
pub(crate) struct DemoOptions {
    /// Length of each of the 41 loads, in seconds
    #[arg(long, default_value_t = 0.7)]
    seconds: f64,
    /// Messages of each load on each connection, instead of a length
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "seconds")]
    messages: Option<u64>,
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

pub(crate) fn run(options: &DemoOptions) -> Result<()> {
    let ksf = crate::ksf_binary(options.ksf.as_ref(), "release")?;
    let doctor = Doctor::ask(&ksf)?;
    let amount = options.messages.map_or(Amount::Seconds(options.seconds), Amount::Messages);
    let mut demo = Demo { ksf, amount, watch: Watch::new(), pids: Vec::new() };
    let mut table = head();
    let mut skipped = BTreeSet::new();
    for combination in combinations() {
        match doctor.obstacle(combination.needs())? {
            Some(why) => drop(skipped.insert(why)),
            None => {
                let row = demo.measure(combination).with_context(|| combination.to_string())?;
                table.add_row(row);
            }
        }
    }
    let (mut media, mut audit) = (Vec::new(), None);
    for engine in store::ENGINES {
        if let Some(why) = doctor.obstacle(engine)? {
            skipped.insert(why);
            continue;
        }
        let (rows, medium) = demo.measure_store(engine).with_context(|| format!("store on {engine}"))?;
        table.add_rows(rows);
        media.push(medium);
        if audit.is_none() {
            audit = Some(demo.crash_store(engine).with_context(|| format!("kill -9 of the store on {engine}"))?);
        }
    }
    for engine in files::ENGINES {
        match doctor.obstacle(engine)? {
            Some(why) => drop(skipped.insert(why)),
            None => {
                table.add_rows(demo.measure_files(engine).with_context(|| format!("files on {engine}"))?);
                break;
            }
        }
    }
    println!("{table}");
    for line in skipped.into_iter().chain(media) {
        println!("{line}");
    }
    if let Some(audit) = &audit {
        println!("{audit}");
    }
    println!("{}", demo.watch.check(&demo.pids)?);
    ensure!(audit.is_none_or(|audit| audit.is_clean()), "the store has lost what it had acknowledged");
    Ok(())
}

fn combinations() -> impl Iterator<Item = Combination> {
    SERVICES.into_iter().flat_map(|service| {
        TRANSPORTS.into_iter().flat_map(move |transport| {
            ENGINES.into_iter().map(move |engine| Combination { service, transport, engine })
        })
    })
}

impl Combination {
    /// What `ksf doctor` calls the engine that answers here.
    fn needs(&self) -> &'static str {
        match (self.engine, self.transport) {
            ("kernel", "udp") => "xdp",
            (engine, _) => engine,
        }
    }
}

impl fmt::Display for Combination {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} over {} on {}", self.service, self.transport, self.needs())
    }
}

/// What is read of `ksf doctor --json`.
#[derive(Deserialize)]
struct Doctor {
    engines: Vec<Engine>,
}

impl Doctor {
    fn ask(ksf: &Path) -> Result<Doctor> {
        let text = output(Command::new(ksf).args(["doctor", "--json"]), DOCTOR_TIMEOUT)?;
        serde_json::from_str(&text).with_context(|| format!("ksf doctor --json printed:\n{text}"))
    }

    /// Why an engine cannot run here, and how to get it; None if it can.
    fn obstacle(&self, name: &str) -> Result<Option<String>> {
        let engine = self.engines.iter().find(|engine| engine.name == name);
        let engine = engine.with_context(|| format!("ksf doctor knows no engine '{name}'"))?;
        if engine.usable {
            return Ok(None);
        }
        let remedy = engine.remedy.as_deref().unwrap_or("no way is known");
        Ok(Some(format!("skipped: {name}: {}; to get it: {remedy}", engine.reason)))
    }
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
    /// Of each load.
    amount: Amount,
    watch: Watch,
    /// Of the servers started so far.
    pids: Vec<u32>,
}

impl Demo {
    /// A row of the table: the server is started, loaded twice and stopped.
    fn measure(&mut self, combination: Combination) -> Result<Vec<String>> {
        let Combination { service, transport, engine } = combination;
        eprintln!("demo: {combination}");
        let port = free_port()?;
        let listen = format!("{transport}:127.0.0.1:{port}");
        let mut command = Command::new(&self.ksf);
        command.args([service, "--listen", &listen, "--engine", engine]);
        let server = Server::start(service, &mut command, Ready::Lines(1, "ready"), START_TIMEOUT)?;
        self.pids.push(server.pid());

        let one = self.load(combination, port, 1)?;
        let many = self.load(combination, port, IN_FLIGHT)?;
        if engine == "kernel" {
            self.watch.note(server.pid())?;
        }
        server.stop()?;
        Ok(row([service, transport, combination.needs()], &one, &many))
    }

    fn load(&self, combination: Combination, port: u16, in_flight: u32) -> Result<LoadResult> {
        let load = Load {
            tool: match combination.service {
                "kecho" => Tool::Echo { message_bytes: MESSAGE_BYTES },
                _ => Tool::Rpc,
            },
            udp: combination.transport == "udp",
            in_flight,
            polls: false,
            threads: 1,
            amount: self.amount,
            cpus: None,
            port,
        };
        load.run(&self.ksf)
    }
}

/// What was measured with one message in flight and with many, behind service, transport and engine.
fn row(names: [&str; 3], one: &LoadResult, many: &LoadResult) -> Vec<String> {
    let measured = [
        format!("{:.1}", one.rtt_p50_us),
        format!("{:.1}", one.rtt_p99_us),
        format!("{:.0}", many.messages_per_s),
        (one.faults + many.faults).to_string(),
    ];
    names.into_iter().map(str::to_owned).chain(measured).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_service_is_shown_on_every_engine() {
        let all: Vec<String> = combinations().map(|combination| combination.to_string()).collect();
        assert_eq!(all.len(), 12);
        assert!(all.contains(&"krpc2 over tcp on kernel".to_owned()));
        assert!(all.contains(&"kecho over udp on xdp".to_owned()));
    }

    #[test]
    fn an_obstacle_has_reason_and_remedy() {
        let text = r#"{"schema":"x","engines":[
            {"name":"kernel","usable":false,"reason":"no CAP_BPF","remedy":"run as root"},
            {"name":"epoll","usable":true,"reason":"everything works","remedy":null}]}"#;
        let doctor: Doctor = serde_json::from_str(text).unwrap();
        let why = doctor.obstacle("kernel").unwrap().unwrap();
        assert_eq!(why, "skipped: kernel: no CAP_BPF; to get it: run as root");
        assert_eq!(doctor.obstacle("epoll").unwrap(), None);
        assert!(doctor.obstacle("uring").is_err());
    }
}
