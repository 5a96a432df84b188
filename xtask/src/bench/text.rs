//! redis and memcached, in which one thread accepts: what a new connection costs plain, under `ksf accel run`, which
//! leaves them as they are, and with the one queue that they get if it is asked for.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::case::{Case, Metric};
use super::contestant::{Contestant, Pinning, Programs, pinned, start};
use super::measure::{Meter, insert_switches};
use super::raw::Sample;
use super::web::{accel, insert, parse};
use crate::process::{Ready, Server, display, free_port, output};

/// Requests to warm a server up with.
const WARM_UP_COUNT: u64 = 2_000;

/// Beyond the length of a load.
const SLACK: Duration = Duration::from_secs(60);

/// Each program, and the words of `ksf` before it; none: it is started without ksf.
fn shape(contestant: Contestant) -> Option<(Program, &'static [&'static str])> {
    use Program::{Memcached, Redis};
    const LEFT_ALONE: &[&str] = &["accel", "run", "--"];
    const QUEUE: &[&str] = &["accel", "run", "--profile", "none", "--"];
    const QUEUE_OFF: &[&str] = &["accel", "run", "--profile", "none", "--off", "--"];
    Some(match contestant {
        Contestant::Redis => (Redis, &[]),
        Contestant::AccelRedis => (Redis, LEFT_ALONE),
        Contestant::QueueRedis => (Redis, QUEUE),
        Contestant::QueueOffRedis => (Redis, QUEUE_OFF),
        Contestant::Memcached => (Memcached, &[]),
        Contestant::AccelMemcached => (Memcached, LEFT_ALONE),
        Contestant::QueueMemcached => (Memcached, QUEUE),
        Contestant::QueueOffMemcached => (Memcached, QUEUE_OFF),
        _ => return None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Redis,
    Memcached,
}

/// One measurement.
struct Text<'a> {
    programs: &'a Programs,
    case: &'a Case,
    contestant: Contestant,
    pinning: &'a Pinning,
    program: Program,
    ksf: &'static [&'static str],
    port: u16,
}

impl Meter<'_> {
    /// One round of one contestant that is asked for a value on each of many connections.
    pub(super) fn text(
        &self,
        case: &Case,
        contestant: Contestant,
        pinning: &Pinning,
        sample: &mut Sample,
    ) -> Result<()> {
        let Some((program, ksf)) = shape(contestant) else { anyhow::bail!("{contestant} speaks neither protocol") };
        let text = Text { programs: self.programs, case, contestant, pinning, program, ksf, port: free_port()? };
        let (server, command) = text.start()?;
        let pid = server.pid();
        let shown =
            |command: &str| command.replace(&text.port.to_string(), "PORT").replace(&format!(" {pid} "), " PID ");
        sample.server_command = shown(&command);
        // Each place of the client is to have its turn, in a smoke run, too.
        let count = self.effort.count(WARM_UP_COUNT).max(u64::from(case.in_flight)).to_string();
        let warm_up = parse(&output(&mut text.client(pid, &count), SLACK)?)?;

        let seconds = self.effort.seconds;
        let length = if seconds > 0.0 { format!("{seconds}s") } else { count };
        let client = text.client(pid, &length);
        sample.client_command = shown(&display(&client));
        let timeout = Duration::from_secs_f64(seconds) + SLACK;
        let (result, spent) = self.observed(&server, || parse(&self.client(client, &server, timeout)?))?;
        insert(sample, &result, &spent);
        self.insert_events(sample, &spent, result.answered)?;
        // The client ends at the first failure: there is never one to count.
        sample.metrics.remove(&Metric::Failures);
        insert_switches(sample, server.stop()?, warm_up.answered + result.answered);
        Ok(())
    }
}

impl Text<'_> {
    fn start(&self) -> Result<(Server, String)> {
        let (server, mut words) = start(self.contestant, (self.server(), Ready::Port(self.port)))?;
        if self.contestant.is_accelerated() {
            let off = self.ksf.contains(&"--off");
            let level = accel::wait_until_accelerated(&self.programs.ksf, server.pid(), self.port, 1, off)?;
            words += &format!(" # 1 queue, steered by {}", if off { "nothing" } else { &level });
        } else if !self.ksf.is_empty() {
            let loaded = std::fs::read_to_string(format!("/proc/{}/maps", server.pid()))?;
            ensure!(!loaded.contains("libksf"), "the profile says that it is left alone, and it is not");
            words += " # run as it is";
        }
        Ok((server, words))
    }

    fn server(&self) -> Command {
        let cpus = self.pinning.server(self.case.connections);
        let name = match self.program {
            Program::Redis => "redis-server",
            Program::Memcached => "memcached",
        };
        let mut command = match self.ksf {
            [] => pinned(name, cpus.as_deref()),
            _ => pinned(&self.programs.ksf, cpus.as_deref()),
        };
        if !self.ksf.is_empty() {
            command.args(self.ksf).arg(name);
        }
        let port = self.port.to_string();
        match self.program {
            Program::Redis => command
                .args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--dir"])
                .arg(self.programs.scratch()),
            // Two threads serve, and a third accepts for them. Root has to say that it means it.
            Program::Memcached => command.args(["-u", "root", "-l", "127.0.0.1", "-p", &port, "-t", "2"]),
        };
        command
    }

    /// The client until `length`: so many requests, or with an "s" so many seconds.
    fn client(&self, server: u32, length: &str) -> Command {
        let threads = self.case.connections as usize;
        let cpus = self.pinning.client(self.case.connections).unwrap_or_else(|| vec!["any"; threads].join(","));
        let mut command = Command::new(self.programs.peer_path("text_load"));
        command.arg(if self.program == Program::Redis { "redis" } else { "memcached" });
        command.args([&self.port.to_string(), &self.case.in_flight.to_string(), &server.to_string(), length, &cpus]);
        command
    }
}
