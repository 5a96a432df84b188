//! One measurement: start a server, load it, read its costs, stop it.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ksf_load::nfs::Listing;

use super::case::{
    Case, ECHO_BYTES, FileLoad, Metric, PEER_IO_BYTES_MAX, Pace, Placement, Row, Service, WHOLE_LISTING,
};
use super::contestant::{
    Contestant, GANESHA_MOUNT_PORT, IDEAL_WORKERS, Pinning, Programs, pair_floor, pread_send, server_command,
    sockperf_client, start,
};
use super::raw::Sample;
use super::watch::{self, Watch};
use crate::cpu::{Spent, Switches, anonymous_bytes, process_time};
use crate::load::{Amount, Files, Load, LoadResult, Tool, Work};
use crate::process::{Server, display, free_port, output};

/// Messages to warm a server up with, and at least to measure.
const WARM_UP_COUNT: u64 = 5_000;
/// The same for messages that take time.
const WORK_WARM_UP_COUNT: u64 = 500;

/// The least length of a measurement whose messages come at a low rate and whose rare ones matter: p99 of fewer than
/// two thousand quick messages is told by a few that came at a bad time.
const RATE_SECONDS_MIN: f64 = 7.0;

/// The least length of a measurement whose goal is a matter of some percent: medians of five runs of half a second differ
/// by as much from one report to the next.
const FINE_SECONDS_MIN: f64 = 2.5;

/// The length of a measurement that only counts.
const COUNT_SECONDS_MAX: f64 = 0.5;

/// For how long idle connections are watched; in a smoke run for a part of that.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// Tversion of 9P2000.L with messages of 64 KiB: its size, type, tag, and arguments.
const TVERSION: &[u8; 21] = b"\x15\0\0\0\x64\xff\xff\0\0\x01\0\x08\x009P2000.L";

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Length of a measurement; zero: as many messages as the warm-up.
    pub(crate) seconds: f64,
    /// Factor on message and connection counts, below 1 in a smoke run.
    pub(crate) scale: f64,
    /// Divisor of rates, above 1 in a smoke run: a machine that is busy with other tests keeps up with the load then.
    pub(crate) rate_divisor: u32,
}

impl Effort {
    pub(super) fn count(&self, full: u64) -> u64 {
        ((full as f64 * self.scale) as u64).max(1)
    }

    /// Requests per second, of so many in a full run.
    pub(super) fn rate_per_s(&self, full: u32) -> u32 {
        (full / self.rate_divisor).max(1)
    }

    pub(crate) fn amount(&self, case: &Case, placement: Placement) -> Amount {
        let least = match case.service {
            Service::Work(load) if matches!(load.pace, Pace::Rate(_)) => RATE_SECONDS_MIN,
            _ => 0.0,
        };
        match self.seconds > 0.0 {
            true => Amount::Seconds(self.seconds_for(case, placement).max(least)),
            false => Amount::Messages(self.count(WARM_UP_COUNT)),
        }
    }

    /// Seconds wanted of a case without a rate of its own.
    pub(super) fn seconds_for(&self, case: &Case, placement: Placement) -> f64 {
        // In the VM only the shape counts.
        let is_fine = case.is_fine() && placement != Placement::Vm;
        let least = if is_fine && self.seconds > 0.0 { FINE_SECONDS_MIN } else { 0.0 };
        self.seconds.max(least)
    }

    pub(crate) fn warm_up(&self, case: &Case) -> Amount {
        let full = match case.service {
            Service::Work(load) if !load.is_idle() => WORK_WARM_UP_COUNT,
            // Some of these move a MiB, or wait for the medium.
            Service::Files(_) => WORK_WARM_UP_COUNT,
            _ => WARM_UP_COUNT,
        };
        Amount::Messages(self.count(full))
    }
}

/// Measures contestants.
pub(crate) struct Meter<'a> {
    pub(crate) programs: &'a Programs,
    pub(crate) effort: Effort,
    pub(crate) watch: Watch,
}

impl Meter<'_> {
    /// One round of one contestant.
    pub(crate) fn sample(&self, case: &Case, contestant: Contestant, pinning: &Pinning, round: u32) -> Sample {
        let mut sample = Sample::new(case, contestant, pinning.placement, round);
        let result = match (contestant, case.service) {
            (_, Service::Web(load)) => self.web(case, load, contestant, pinning, &mut sample),
            (_, Service::Store(load)) => self.store(case, *load, contestant, pinning, &mut sample),
            (Contestant::PairFloor, _) => self.floor(case, pinning, &mut sample),
            (Contestant::PreadSend, Service::Files(load)) => self.pread_send(case, load, pinning, &mut sample),
            (Contestant::IdealQueue, _) => self.ideal(case, pinning, &mut sample),
            (Contestant::Sockperf | Contestant::SockperfTuned, _) => {
                self.sockperf(case, contestant, pinning, &mut sample)
            }
            _ => self.server(case, contestant, pinning, &mut sample),
        };
        if let Err(error) = result {
            sample.metrics.clear();
            sample.error = Some(format!("{error:#}"));
        }
        sample
    }

    fn server(&self, case: &Case, contestant: Contestant, pinning: &Pinning, sample: &mut Sample) -> Result<()> {
        let port = free_port()?;
        let (command, ready) = server_command(self.programs, contestant, case, pinning, port)?;
        let (server, command) = start(contestant, (command, ready))?;
        sample.server_command = without_port(&command, port);
        if let Service::Files(load) = case.service
            && load.mix == WHOLE_LISTING
        {
            self.listing(load, (contestant, &server, port), pinning, sample)?;
            return server.stop().map(drop);
        }
        let load = |amount| self.load_of(case, contestant, pinning, port, amount, sample.round);
        let warm_up = load(self.effort.warm_up(case)).run(&self.programs.ksf)?;
        let load = load(self.effort.amount(case, pinning.placement));
        sample.client_command = without_port(&display(&load.command(&self.programs.ksf)), port);

        if case.idle > 0 {
            self.idle(case, &server, port, &load, sample)?;
            return server.end(contestant.end_signal(case.row)).map(drop);
        }
        let (result, spent) = self.observed(&server, || {
            load.run_by(&self.programs.ksf, |command, timeout| self.client(command, &server, timeout))
        })?;
        insert_result(sample, case, &result);
        if let Tool::Files(files) = &load.tool
            && case.metric == Metric::DataBytesPerS
        {
            let bytes_per_s = result.messages_per_s * f64::from(files.io_bytes);
            sample.metrics.insert(Metric::DataBytesPerS, bytes_per_s);
        }
        insert_spent(sample, &spent, result.messages);
        self.insert_events(sample, &spent, result.messages)?;
        let switches = server.end(contestant.end_signal(case.row))?;
        insert_switches(sample, switches, warm_up.messages + result.messages);
        Ok(())
    }

    /// The load of a contestant, told where its files are.
    fn load_of(
        &self,
        case: &Case,
        contestant: Contestant,
        pinning: &Pinning,
        port: u16,
        amount: Amount,
        round: u32,
    ) -> Load {
        let mut load = load(case, pinning, port, amount, round);
        if let Tool::Files(files) = &mut load.tool {
            files.export = self.programs.export_path();
            files.mount_port = mount_port(contestant);
            if matches!(contestant, Contestant::Diod | Contestant::Ganesha) && case.row == Row::Ninep {
                files.io_bytes = files.io_bytes.min(PEER_IO_BYTES_MAX);
            }
        }
        load
    }

    /// Times of whole listings, by a client of one thread.
    fn listing(
        &self,
        load: &FileLoad,
        (contestant, server, port): (Contestant, &Server, u16),
        pinning: &Pinning,
        sample: &mut Sample,
    ) -> Result<()> {
        let entries = self.effort.count(load.files.into());
        let listing = Listing {
            port,
            mount_port: mount_port(contestant).unwrap_or(port),
            export: self.programs.export_path().display().to_string(),
            name: self.programs.make_listed(entries)?,
            entries: entries as usize,
        };
        sample.client_command = format!("READDIRPLUS of {entries} files, page after page, by the bench");
        let cpu = pinning.client(1).map(|cpu| cpu.parse()).transpose()?;
        let measure = |seconds: f64| {
            let client = || -> Result<Vec<Duration>> {
                cpu.map_or(Ok(()), ksf::cpus::pin_to)?;
                let mut times = Vec::new();
                listing.measure(|took| {
                    times.push(took);
                    times.iter().sum::<Duration>().as_secs_f64() < seconds
                })?;
                times.sort_unstable();
                Ok(times)
            };
            std::thread::scope(|scope| scope.spawn(client).join().expect("it does not panic"))
        };
        // The first one reads the disk.
        measure(0.0)?;
        let (times, spent) = self.observed(server, || measure(self.effort.seconds))?;
        let count = times.len();
        let us = |at: usize| times[at].as_secs_f64() * 1e6;
        sample.metrics.insert(Metric::RttP50Us, us(count / 2));
        sample.metrics.insert(Metric::RttP99Us, us(count - 1 - count / 100));
        let rate = count as f64 / times.iter().sum::<Duration>().as_secs_f64();
        sample.metrics.insert(Metric::MessagesPerS, rate);
        insert_spent(sample, &spent, count as u64);
        Ok(())
    }

    /// What is spent while something runs.
    pub(super) fn observed<T>(&self, server: &Server, run: impl FnOnce() -> Result<T>) -> Result<(T, Spent)> {
        let before = Spent::read(server.pid())?;
        let result = run()?;
        Ok((result, Spent::read(server.pid())?.since(&before)))
    }

    /// What happened while so many messages were answered.
    pub(super) fn insert_events(&self, sample: &mut Sample, spent: &Spent, messages: u64) -> Result<()> {
        let events = &spent.events;
        let mut insert = |metric, count: u64| sample.metrics.insert(metric, count as f64 / messages as f64);
        for (metric, count) in [
            (Metric::ClientSleeps, events.clients_slept),
            (Metric::Switches, events.switches),
            (Metric::Interrupts, events.interrupts),
            (Metric::InterruptsBetweenCpus, events.between_cpus),
            (Metric::ReceiveSoftirqs, events.receive_softirqs),
        ] {
            insert(metric, count);
        }
        if let Watch::Count(file) = &self.watch {
            insert(Metric::Syscalls, watch::counted(file)?);
        }
        Ok(())
    }

    /// Memory of idle connections, CPU time while there is nothing else, and the round trip of an active one without and with
    /// them.
    fn idle(&self, case: &Case, server: &Server, port: u16, load: &Load, sample: &mut Sample) -> Result<()> {
        let alone = load.run(&self.programs.ksf)?;
        let bytes_before = anonymous_bytes(server.pid())?;
        let wanted = self.effort.count(u64::from(case.idle));
        let mut connections = Vec::new();
        for number in 0..wanted {
            let connection = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).and_then(|mut connection| {
                if case.row == Row::Ninep {
                    begin_session(&mut connection)?;
                }
                Ok(connection)
            });
            connections.push(connection.with_context(|| format!("cannot open idle connection {number} of {wanted}"))?);
        }
        // A listener takes connections in turn, and on one CPU there is one listener: when this
        // load is through, so are the idle connections.
        let among_idle = load.run(&self.programs.ksf)?;
        let bytes = anonymous_bytes(server.pid())?.saturating_sub(bytes_before);
        let (began, spent_before) = (Instant::now(), process_time(server.pid())?);
        std::thread::sleep(if self.effort.seconds > 0.0 { IDLE_TIME } else { IDLE_TIME / 20 });
        let spent = process_time(server.pid())?.saturating_sub(spent_before);
        let us_per_s = spent.as_secs_f64() * 1e6 / began.elapsed().as_secs_f64();
        sample.metrics.insert(Metric::IdleCpuUsPerS, us_per_s);
        insert_result(sample, case, &among_idle);
        sample.metrics.insert(Metric::IdleBytes, bytes as f64 / wanted as f64);
        let ratio = among_idle.rtt_p50_us / alone.rtt_p50_us;
        sample.metrics.insert(Metric::IdleRttRatio, ratio);
        Ok(())
    }

    /// What one queue would do with the messages of the round, on paper.
    fn ideal(&self, case: &Case, pinning: &Pinning, sample: &mut Sample) -> Result<()> {
        let mut load = load(case, pinning, 0, self.effort.amount(case, pinning.placement), sample.round);
        if let Tool::Work(work) = &mut load.tool {
            work.ideal_workers = Some(IDEAL_WORKERS);
        }
        sample.client_command = display(&load.command(&self.programs.ksf));
        insert_result(sample, case, &load.run(&self.programs.ksf)?);
        sample.metrics.remove(&Metric::ClientCpuUs);
        Ok(())
    }

    fn sockperf(&self, case: &Case, contestant: Contestant, pinning: &Pinning, sample: &mut Sample) -> Result<()> {
        let port = free_port()?;
        let command = server_command(self.programs, contestant, case, pinning, port)?;
        let (server, command) = start(contestant, command)?;
        sample.server_command = without_port(&command, port);
        let mut client = sockperf_client(contestant, pinning, port, self.effort.seconds);
        sample.client_command = without_port(&display(&client), port);
        let text = output(&mut client, Duration::from_secs(60))?;
        let percentile =
            |name: &str| sockperf_percentile(&text, name).with_context(|| format!("sockperf said:\n{text}"));
        sample.metrics.insert(Metric::RttP50Us, percentile("50.000")?);
        sample.metrics.insert(Metric::RttP99Us, percentile("99.000")?);
        server.stop().map(drop)
    }

    fn pread_send(&self, case: &Case, load: &FileLoad, pinning: &Pinning, sample: &mut Sample) -> Result<()> {
        let count = (self.effort.seconds * 2_000.0) as u64;
        let count = count.max(self.effort.count(WORK_WARM_UP_COUNT));
        let mut command = pread_send(self.programs, case, load, pinning, count)?;
        sample.client_command = display(&command);
        let text = output(&mut command, Duration::from_secs(60))?;
        let json: serde_json::Value = serde_json::from_str(&text)?;
        for (metric, key) in
            [(Metric::MessagesPerS, "messages_per_s"), (Metric::RttP50Us, "p50_us"), (Metric::RttP99Us, "p99_us")]
        {
            let value = json[key].as_f64().with_context(|| format!("no {key} in {text}"))?;
            sample.metrics.insert(metric, value);
        }
        Ok(())
    }

    fn floor(&self, case: &Case, pinning: &Pinning, sample: &mut Sample) -> Result<()> {
        let count = (self.effort.seconds * 100_000.0) as u64;
        let count = count.max(self.effort.count(WARM_UP_COUNT));
        let mut command = pair_floor(self.programs, case, pinning, count);
        sample.client_command = display(&command);
        let text = output(&mut command, Duration::from_secs(60))?;
        let json: serde_json::Value = serde_json::from_str(&text)?;
        for (metric, key) in [(Metric::RttP50Us, "p50_us"), (Metric::RttP99Us, "p99_us")] {
            let value = json[key].as_f64().with_context(|| format!("no {key} in {text}"))?;
            sample.metrics.insert(metric, value);
        }
        Ok(())
    }

    /// Runs the client of a measurement, under what watches it.
    pub(super) fn client(&self, command: Command, server: &Server, timeout: Duration) -> Result<String> {
        output(&mut self.watch.client(command, server.pid()), timeout)
    }

    /// System calls of the server per message, apart from timing.
    pub(crate) fn syscalls(
        &self,
        case: &Case,
        contestant: Contestant,
        pinning: &Pinning,
        by: SyscallCounter,
    ) -> Sample {
        if by == SyscallCounter::Perf {
            let watch = Watch::Count(self.programs.scratch().join("perf-count"));
            let effort = Effort { seconds: self.effort.seconds.min(COUNT_SECONDS_MAX), ..self.effort };
            let mut sample = Meter { watch, effort, ..*self }.sample(case, contestant, pinning, 0);
            sample.metrics.retain(|metric, _| *metric == Metric::Syscalls);
            return sample;
        }
        let mut sample = Sample::new(case, contestant, pinning.placement, 0);
        let short = self.effort.count(2_000);
        // The difference of a long and a short run leaves out start, accept and end.
        let result = self.traced(case, contestant, pinning, short, &mut sample).and_then(|few| {
            let many = self.traced(case, contestant, pinning, 6 * short, &mut sample)?;
            Ok(many.saturating_sub(few) as f64 / (5 * short * u64::from(case.connections)) as f64)
        });
        match result {
            Ok(value) => drop(sample.metrics.insert(Metric::Syscalls, value)),
            Err(error) => sample.error = Some(format!("{error:#}")),
        }
        sample
    }

    /// All system calls of a server that answers `count` messages on each connection.
    fn traced(
        &self,
        case: &Case,
        contestant: Contestant,
        pinning: &Pinning,
        count: u64,
        sample: &mut Sample,
    ) -> Result<u64> {
        let port = free_port()?;
        let (command, ready) = server_command(self.programs, contestant, case, pinning, port)?;
        let file = self.programs.scratch().join(format!("strace-{port}"));
        let (server, command) = start(contestant, (watch::under_strace(command, &file), ready))?;
        sample.server_command = without_port(&command, port);
        let load = self.load_of(case, contestant, pinning, port, Amount::Messages(count), sample.round);
        sample.client_command = without_port(&display(&load.command(&self.programs.ksf)), port);
        load.run(&self.programs.ksf)?;
        server.stop()?;
        watch::await_strace(&file)
    }
}

/// What counts system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SyscallCounter {
    Perf,
    /// It slows the server down, so that batches are larger than they are without.
    Strace,
}

/// Begins a session of 9P. Its reply shows that the server has taken the connection: diod's queue of new ones is so short that
/// connections in quick succession wait for the second SYN, a second later.
fn begin_session(connection: &mut TcpStream) -> io::Result<()> {
    connection.write_all(TVERSION)?;
    let mut reply = [0; TVERSION.len()];
    connection.read_exact(&mut reply)?;
    // Its number is that of the request plus 1; every server here grants the size and has the version.
    let mut expected = *TVERSION;
    expected[4] += 1;
    if reply == expected { Ok(()) } else { Err(io::Error::other("Tversion is not answered by its Rversion")) }
}

/// The port of MOUNT, if it is not that of NFS.
fn mount_port(contestant: Contestant) -> Option<u16> {
    matches!(contestant, Contestant::Ganesha | Contestant::GaneshaTuned).then_some(GANESHA_MOUNT_PORT)
}

/// The messages of a round cost the same for every contestant, and in every round differently.
pub(crate) fn load(case: &Case, pinning: &Pinning, port: u16, amount: Amount, round: u32) -> Load {
    Load {
        tool: match case.service {
            Service::Echo => Tool::Echo { message_bytes: ECHO_BYTES },
            Service::Null => Tool::Rpc,
            Service::Work(load) => Tool::Work(Work { load, seed: u64::from(round) + 1, ideal_workers: None }),
            Service::Files(load) => {
                Tool::Files(Files { load, io_bytes: load.io_bytes, export: PathBuf::new(), mount_port: None })
            }
            Service::Web(_) | Service::Store(_) => {
                unreachable!("Meter::web and Meter::store have clients of their own")
            }
        },
        udp: case.udp,
        in_flight: case.in_flight,
        polls: case.client_polls,
        threads: case.connections,
        amount,
        cpus: pinning.client(case.client_threads()),
        port,
    }
}

/// The command for a reader: its port was a free one, another each time.
pub(super) fn without_port(command: &str, port: u16) -> String {
    command.replace(&port.to_string(), "PORT")
}

pub(super) fn insert_spent(sample: &mut Sample, spent: &Spent, messages: u64) {
    let per_message = |time: Duration| time.as_secs_f64() * 1e6 / messages as f64;
    sample.metrics.extend([
        (Metric::ServerCpuUs, per_message(spent.process)),
        (Metric::OtherCpuUs, per_message(spent.other())),
        (Metric::TotalCpuUs, per_message(spent.process + spent.other())),
        (Metric::MachineCpuUs, per_message(spent.machine)),
    ]);
}

/// Of a server's whole life, in which it answered so many.
pub(super) fn insert_switches(sample: &mut Sample, switches: Switches, messages: u64) {
    sample.metrics.insert(Metric::ServerSleeps, switches.slept as f64 / messages as f64);
    sample.metrics.insert(Metric::ServerPreempted, switches.preempted as f64 / messages as f64);
}

pub(crate) fn insert_result(sample: &mut Sample, case: &Case, result: &LoadResult) {
    sample.warnings.clone_from(&result.warnings);
    let metrics = &mut sample.metrics;
    metrics.insert(Metric::RttP50Us, result.rtt_p50_us);
    metrics.insert(Metric::RttP99Us, result.rtt_p99_us);
    if case.idle == 0 {
        metrics.insert(Metric::MessagesPerS, result.messages_per_s);
    }
    if let Some(work) = &result.work {
        metrics.insert(Metric::RttP999Us, work.rtt_p999_us);
        metrics.insert(Metric::RttMeanUs, work.rtt_mean_us);
        metrics.insert(Metric::RttStdevUs, work.rtt_stdev_us);
        metrics.insert(Metric::ClientCpuUs, work.client_cpu_us);
        if let Some([p50, p99, p999]) = work.quick_us {
            metrics.insert(Metric::QuickP50Us, p50);
            metrics.insert(Metric::QuickP99Us, p99);
            metrics.insert(Metric::QuickP999Us, p999);
        }
    }
}

/// "sockperf: ---> percentile 50.000 =    8.261"
fn sockperf_percentile(text: &str, percentile: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains(&format!("percentile {percentile} ")))?;
    line.rsplit('=').next()?.trim().parse().ok()
}

/// Room for the idle connections of this process and of the servers that inherit its limits.
pub(crate) fn raise_file_limit(files: u64) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= files) {
        return Ok(());
    }
    let maximum = limit.maximum.map(|maximum| maximum.max(files));
    // Without root the hard limit stays; then the soft one goes as far as it can.
    if setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum }).is_err() {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
        let hard = limit.maximum.unwrap_or(u64::MAX);
        ensure!(hard >= files, "{files} open files are needed, the limit is {hard} (ulimit -Hn)");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockperf_output() {
        let text = "sockperf: Summary: Round trip is 8.3 usec\n\
                    sockperf: ---> percentile 99.000 =   12.500\n\
                    sockperf: ---> percentile 50.000 =    8.261\n";
        assert_eq!(sockperf_percentile(text, "50.000"), Some(8.261));
        assert_eq!(sockperf_percentile(text, "75.000"), None);
    }

    #[test]
    fn a_smoke_run_scales_counts_down_but_not_to_nothing() {
        let effort = Effort { seconds: 0.0, scale: 0.01, rate_divisor: 10 };
        assert_eq!(effort.count(10_000), 100);
        assert_eq!(effort.count(5), 1);
        assert_eq!(effort.rate_per_s(2_000), 200);
        assert_eq!(effort.rate_per_s(5), 1);
    }
}
