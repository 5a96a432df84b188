//! The commands that serve: start the services, then wait for signals.

mod address;
mod args;
mod config;
mod descriptors;
mod engine;
mod explain;
mod kernel;
mod kind;
mod kinds;
mod launch;
mod limits;
mod listen;
mod plan;
mod resources;
mod running;
mod sockets;
mod spin;
mod workers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Args, ValueHint};
use ksf::cpus::CpuSet;
use ksf::server::Drained;
use ksf::status_socket::Served;
use ksf::threads;

use self::args::{Loudness, ProcessArgs, StatsArgs};
use self::config::Config;
use self::engine::Obstacles;
use self::kind::{Reporter, Single};
use self::kinds::{Kind, ServeCommand};
use self::launch::Launch;
use self::plan::{Plan, Source};
use self::running::Running;
use crate::manager;
use crate::output::{Failure, Status, say};
use crate::signals::{Event, Events};
use crate::stats::{self, Snapshot};

pub(crate) use self::kinds::ServiceCommand;

/// Run several services from one TOML file, or the demo server
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ServeArgs {
    #[command(subcommand)]
    service: Option<ServeCommand>,
    /// The configuration file; an example is packaging/ksf.toml (one that is called demo is ./demo)
    #[arg(value_hint = ValueHint::FilePath, required = true)]
    config: Option<PathBuf>,
    /// Check the file and end
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    process: ProcessArgs,
}

/// Runs a command that serves one kind.
pub(crate) fn command(mut command: ServiceCommand) -> Result<ExitCode, Failure> {
    if let Some(done) = command.tool() {
        return done;
    }
    single(command.single()?)
}

fn single(mut single: Single<Kind>) -> Result<ExitCode, Failure> {
    let passed = manager::passed_sockets()?;
    let (stats, loudness) = (single.process.stats.clone(), single.process.loudness);
    let reporter = single.reporter.take();
    run(vec![plan::single(single, passed)?], &stats, loudness, reporter)
}

/// Runs `ksf serve`.
pub(crate) fn config(args: ServeArgs) -> Result<ExitCode, Failure> {
    if let Some(command) = args.service {
        return single(command.single()?);
    }
    let passed = manager::passed_sockets()?;
    let Some(path) = args.config else {
        return Err(Failure::new(Status::Usage, "no configuration file was given").remedy("see ksf serve --help"));
    };
    let config = Config::read(&path)?;
    let process = args.process;
    if args.check {
        // The sockets are not there yet when a file is checked, so the listeners are not looked at.
        config.services.iter().try_for_each(|service| config.limits_of(service, &process.limits).map(drop))?;
        let names: Vec<&str> = config.services.iter().map(|service| service.common.name.as_str()).collect();
        say(&format_args!("{} is correct: {}", path.display(), names.join(", ")));
        return Ok(ExitCode::SUCCESS);
    }
    let stats = StatsArgs {
        stats_socket: process.stats.stats_socket.clone().or_else(|| config.top.stats.socket.clone()),
        prometheus: process.stats.prometheus.or(config.top.stats.prometheus),
    };
    let plans = plan::of_config(config, &path, &process, passed)?;
    run(plans, &stats, process.loudness, None)
}

/// A service that runs, and where it is described.
struct Service {
    running: Running,
    source: Source,
}

/// The services of this process; empty once they drain.
type Services = Arc<Mutex<Vec<Service>>>;

fn lock(services: &Services) -> std::sync::MutexGuard<'_, Vec<Service>> {
    // A panic while the lock was held leaves the list as it was: readers and writers only replace whole values.
    services.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(
    mut plans: Vec<Plan>,
    stats_args: &StatsArgs,
    loudness: Loudness,
    reporter: Option<Reporter>,
) -> Result<ExitCode, Failure> {
    // First of all: a signal that comes while the services start must not leave anything behind.
    let events = Events::take().map_err(|error| Failure::os("cannot take over the signals", &error))?;
    let chat = |line: &dyn std::fmt::Display| {
        if !loudness.quiet {
            say(line);
        }
    };
    let lowered = descriptors::divide(descriptors::raise(), &mut plans)?;
    ksf::give_back::keep();
    if let Some(line) = plans.first().and_then(|plan| cpus_left_out(plan.common.cpus.as_ref()?)) {
        chat(&line);
    }
    // Before a service makes anything, such as the folder of a store.
    for plan in &plans {
        plan.common.sockets.check()?;
    }
    // Before the services: from here on nothing fails that would have to undo them.
    let services = Services::default();
    let source = source(&services);
    let socket = stats::socket::open(stats_args.stats_socket.as_deref(), Arc::clone(&source))?;
    let prometheus = stats_args.prometheus.map(|address| stats::prometheus::open(address, Arc::clone(&source)));
    let prometheus = prometheus.transpose()?;

    let wishes: Vec<_> = plans.iter().map(|plan| (plan.common.engine, plan.kind.as_kind().has_kernel_half())).collect();
    let lacks = Obstacles::look(&wishes);
    let names: Vec<&str> = plans.iter().map(|plan| plan.common.name.as_str()).collect();
    let starting = manager::starting(&names);
    let mut started = Vec::new();
    for Plan { common, kind, source } in plans {
        let kind = kind.as_kind();
        let launch = Launch::new(common, kind.has_kernel_half(), &lacks, loudness.verbose > 0)?;
        started.push(Service { running: kind.start(launch)?, source });
    }
    let lines = |of: fn(&Running) -> &[String]| -> Vec<String> {
        started.iter().flat_map(|service| of(&service.running).iter().cloned()).collect()
    };
    let (ready, notes) = (lines(|service| &service.ready), lines(|service| &service.notes));
    *lock(&services) = started;

    ready.iter().for_each(|line| chat(line));
    notes.iter().for_each(|line| chat(line));
    lowered.iter().for_each(|line| chat(line));
    if let Err(why) = &socket {
        chat(&format_args!("ksf stat cannot find this process ({why}); choose a socket with --stats-socket PATH"));
    }
    if let Some(address) = prometheus {
        chat(&format_args!("counters on http://{address}/metrics ready"));
    }
    if loudness.verbose > 0 {
        describe(&source(), socket.as_ref().ok());
    }
    if let Some(reporter) = reporter {
        let services = Arc::clone(&services);
        // The list is empty once the services drain.
        reporter(Box::new(move || lock(&services).first().map(|service| service.running.shards())))?;
    }
    drop(starting);
    manager::ready(&status(&services));
    let result = wait(&services, &events, loudness);
    manager::stopping();
    let last = (loudness.verbose > 0).then(|| source());
    let result = result.and(drain(&services, loudness));
    if let Some(last) = last {
        say_counters(&last);
    }
    result.map(|()| ExitCode::SUCCESS)
}

/// Waits until the process is asked to stop. An error: a service ended by itself.
fn wait(services: &Services, events: &Events, loudness: Loudness) -> Result<(), Failure> {
    // Often enough to notice a shard that died, seldom enough to cost nothing.
    const LOOK_EVERY: Duration = Duration::from_secs(1);
    let watchdog = manager::watchdog_period();
    let pause = watchdog.map_or(LOOK_EVERY, |period| period.min(LOOK_EVERY));
    loop {
        match events.next(pause) {
            Some(Event::Stop) => return Ok(()),
            Some(Event::Reload) => {
                manager::reloading();
                reload(services, loudness);
                manager::ready(&status(services));
            }
            None => {}
        }
        if let Some(dead) = lock(services).iter().find(|service| !service.running.is_alive()) {
            let what = format!("a shard of service {} ended by itself", dead.running.name);
            return Err(Failure::new(Status::Internal, what)
                .remedy("try --engine=epoll, and please report this with the output of ksf doctor"));
        }
        if watchdog.is_some() {
            manager::alive();
        }
    }
}

fn reload(services: &Services, loudness: Loudness) {
    for Service { running, source, .. } in lock(services).iter_mut() {
        let Some(file) = source.file() else {
            say(&format_args!(
                "{}: nothing to reload; limits come from a file with --config-limits FILE",
                running.name
            ));
            continue;
        };
        let result = source.reload(running);
        if result.is_ok() && !loudness.quiet {
            running.notes.iter().for_each(|note| say(note));
        }
        match result {
            Ok(fixed) if !fixed.is_empty() => say(&format_args!(
                "{}: limits reloaded from {}; changes of {} take effect at a restart",
                running.name,
                file.display(),
                fixed.join(", ")
            )),
            Ok(_) if loudness.quiet => {}
            Ok(_) => say(&format_args!("{}: limits reloaded from {}", running.name, file.display())),
            Err(failure) => say(&format_args!("{}: limits not reloaded, the old ones stay: {failure}", running.name)),
        }
    }
    let services = lock(services);
    let running: Vec<&str> = services.iter().map(|service| service.running.name.as_str()).collect();
    for name in services.first().map(|service| service.source.services_besides(&running)).unwrap_or_default() {
        say(&format_args!("{name}: a new service takes a restart"));
    }
}

/// Drains all services at the same time.
fn drain(services: &Services, loudness: Loudness) -> Result<(), Failure> {
    let services = std::mem::take(&mut *lock(services));
    let connections: usize = services.iter().map(|service| service.running.connections()).sum();
    if !loudness.quiet {
        say(&format_args!("draining {connections} connections"));
    }
    let started = Instant::now();
    let drains: Vec<_> = services
        .into_iter()
        .map(|Service { running, .. }| (running.name.clone(), threads::start("ksf-drain", move || running.drain())))
        .collect();
    let mut failures = Vec::new();
    for (name, drain) in drains {
        let ended = drain.map(|thread| thread.join().expect("a panic of the thread aborts the process"));
        let (drained, stopped) = ended.unwrap_or_else(|error| (Err(error), Ok(())));
        let drained = drained.map(|Drained { tasks_left }| {
            if tasks_left > 0 {
                say(&format_args!("{name}: {tasks_left} tasks did not end within drain_timeout_ms and are cut off"));
            }
        });
        let errors = [drained, stopped].into_iter().filter_map(Result::err);
        failures.extend(errors.map(|error| Failure::os(format!("service {name} did not end well"), &error)));
    }
    // The last one is reported with the exit status.
    let last = failures.pop();
    failures.iter().for_each(|failure| say(failure));
    if !loudness.quiet {
        say(&format_args!("stopped after {} ms", started.elapsed().as_millis()));
    }
    last.map_or(Ok(()), Err)
}

/// What readers of the counters see. While the services drain it shows them gone.
fn source(services: &Services) -> stats::Source {
    let services = Arc::clone(services);
    let started = Instant::now();
    Arc::new(move || Snapshot {
        schema: stats::SCHEMA.to_owned(),
        ksf: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        services: lock(&services).iter().map(|service| service.running.snapshot()).collect(),
    })
}

/// One line for the service manager.
fn status(services: &Services) -> String {
    let names: Vec<String> = lock(services).iter().map(|service| service.running.name.clone()).collect();
    format!("serving {}", names.join(", "))
}

/// What `-v` adds at the start.
fn describe(snapshot: &Snapshot, socket: Option<&Served>) {
    if let Some(socket) = socket {
        say(&format_args!("counters: ksf stat {}", socket.path().display()));
    }
    for service in &snapshot.services {
        let limits: Vec<String> =
            service.limits.iter().map(|limit| format!("{}={}", limit.name, limit.value)).collect();
        say(&format_args!("{}: limits {}", service.name, limits.join(" ")));
    }
}

/// What `-v` adds at the end.
fn say_counters(snapshot: &Snapshot) {
    for service in &snapshot.services {
        let parts = [("", &service.counters), ("kernel_", &service.kernel), ("service_", &service.own)];
        for (part, counters) in parts {
            for counter in counters.iter().filter(|counter| counter.value > 0) {
                say(&format_args!("{}: {part}{} {}", service.name, counter.name, counter.value));
            }
        }
    }
}

/// The mask of the process is never widened, and what it leaves out is said.
fn cpus_left_out(asked: &CpuSet) -> Option<String> {
    let allowed = CpuSet::of_thread(None).ok()?;
    let left_out = asked.without(&allowed);
    (!left_out.is_empty() && left_out != *asked)
        .then(|| format!("CPUs {left_out} are outside of the mask of this process ({allowed}) and are not used"))
}
