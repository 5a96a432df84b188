//! A service on its way to run: engine, kernel half, workers, listeners.

use std::sync::Arc;

use ksf::adopt::Adopter;
use ksf::cpus::CpuSet;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::server::{Builder, ListenerInfo, Server};
use ksf::{Service, WorkerService};
use ksf_kernel::{KernelError, KernelOptions, KernelService, ObjectSource};

use super::engine::{self, Choice, EngineWish, Obstacles};
use super::explain::explain;
use super::kernel::{Half, KernelTable, Xdp};
use super::limits::LimitFlags;
use super::listen::ListenEntry;
use super::resources::Resources;
use super::running::{Listener, Running, State};
use super::sockets::Sockets;
use super::spin::SpinWish;
use super::workers::WorkersTable;
use crate::doctor;
use crate::output::{Failure, Status, say};

/// What services of all kinds have, settled before they start.
#[derive(Debug)]
pub(crate) struct Common {
    /// Name in messages and counters.
    pub(crate) name: String,
    /// Where it listens.
    pub(crate) sockets: Sockets,
    pub(crate) engine: EngineWish,
    pub(crate) cpus: Option<CpuSet>,
    pub(crate) spin: SpinWish,
    pub(crate) limits: Limits,
    /// What is above the limits that a listener has of its own.
    pub(crate) limits_above: LimitFlags,
    pub(crate) resources: Resources,
    /// Its part of the process's descriptors, for files and backends.
    pub(crate) descriptors_max: usize,
    /// Its part for connections.
    pub(crate) connections_max: usize,
}

/// A service that is being started. A kind says in this order what it has: a kernel half or a program, the services at
/// its listeners, and the start.
pub(crate) struct Launch {
    common: Common,
    choice: Choice,
    cpus: Vec<usize>,
    builder: Builder,
    half: Option<Half>,
    xdp: Xdp,
    /// What the service itself can take, whatever the limit says.
    message_bytes_max: usize,
    /// Each listener, in the order in which the framework has them.
    listeners: Vec<Listener>,
    verbose: bool,
}

impl Launch {
    /// Chooses the engine. `kernel`: whether the kind has a kernel half; one that has none does not miss it.
    pub(crate) fn new(common: Common, kernel: bool, lacks: &Obstacles, verbose: bool) -> Result<Self, Failure> {
        let own_lacks = Obstacles { kernel: lacks.kernel.clone().filter(|_| kernel), ..lacks.clone() };
        let mut choice = engine::choose(common.engine, &own_lacks)?;
        choice.kernel &= kernel;
        choice.notes.extend(common.sockets.notes());
        let cpus = ksf::cpus::choose(common.cpus.as_ref()).map_err(|error| explain(error, choice.base))?;
        let builder = Server::builder().engine(choice.base).cpus(Some(cpus.clone())).spin(common.spin.spin());
        let builder = builder.limits(common.limits.clone());
        Ok(Launch {
            builder: common.resources.give_to(builder),
            common,
            choice,
            cpus,
            half: None,
            xdp: Xdp::Off,
            message_bytes_max: usize::MAX,
            listeners: Vec::new(),
            verbose,
        })
    }

    /// Name of the service.
    pub(crate) fn name(&self) -> &str {
        &self.common.name
    }

    /// The limits of the service.
    pub(crate) fn limits(&self) -> &Limits {
        &self.common.limits
    }

    /// The limits of each listener.
    pub(crate) fn listener_limits(&self) -> Result<Vec<Limits>, Failure> {
        let Sockets { addresses, passed } = &self.common.sockets;
        let entries = addresses.iter().map(|(_, entry)| entry).chain(passed.iter().map(|(_, entry)| entry));
        entries.map(|entry| entry.limits.over(&self.common.limits, &self.common.limits_above)).collect()
    }

    /// Descriptors that it may have for files and backends.
    pub(crate) fn descriptors_max(&self) -> usize {
        self.common.descriptors_max
    }

    /// How many shards there will be.
    pub(crate) fn shards(&self) -> usize {
        self.cpus.len()
    }

    /// Puts a kernel half in front of the listeners, if the engine is to have one. Where it cannot be had, the service
    /// runs without, and says why, unless it was asked for by name.
    pub(crate) fn kernel_half(
        mut self,
        source: &ObjectSource,
        table: &KernelTable,
        workers: &WorkersTable,
        adjust: impl FnOnce(&mut KernelOptions),
    ) -> Result<Self, Failure> {
        if !self.choice.kernel {
            return Ok(self);
        }
        if let Err(error) = self.load(source, table, workers, adjust) {
            let obstacle = doctor::kernel_half_obstacle(&error);
            if self.common.engine == EngineWish::Kernel {
                return Err(engine::impossible("kernel", &obstacle));
            }
            self.choice.kernel = false;
            self.choice.notes.push(engine::not_taken(self.choice.base.name(), "kernel", &obstacle));
        }
        Ok(self)
    }

    /// Loads a program that the service is nothing without, and has the service made of it. The program stands in front
    /// of the listeners, too, if the engine is to have a kernel half.
    pub(crate) fn program<T>(
        mut self,
        source: &ObjectSource,
        table: &KernelTable,
        workers: &WorkersTable,
        service: impl FnOnce(&KernelService) -> Result<T, KernelError>,
    ) -> Result<(Self, T), KernelError> {
        let program = self.load(source, table, workers, |_| {})?;
        let (message_bytes_max, service) = (program.message_bytes_max(), service(program)?);
        self.message_bytes_max = message_bytes_max;
        let limits = &mut self.common.limits;
        limits.message_bytes_max = limits.message_bytes_max.min(message_bytes_max);
        self.builder = self.builder.limits(limits.clone());
        Ok((self, service))
    }

    fn load(
        &mut self,
        source: &ObjectSource,
        table: &KernelTable,
        workers: &WorkersTable,
        adjust: impl FnOnce(&mut KernelOptions),
    ) -> Result<&KernelService, KernelError> {
        // Shared memory and map entries are sized by it, so it follows the limit only up to here; connections beyond
        // are served by user space alone.
        const CONNECTIONS_MAX: usize = 65_536;
        let mut options = KernelOptions::default();
        options.connections_max = self.common.limits.connections_max.clamp(1, CONNECTIONS_MAX) as u32;
        options.shards = self.shards() as u32;
        options.callers_max = (self.shards() + workers.count()) as u32;
        if let Some(bytes) = table.window_bytes {
            options.window_bytes = bytes.0 as u32;
        }
        adjust(&mut options);
        let half = Half::load(source, &options).inspect_err(|error| {
            if let (KernelError::Verifier { log, .. }, true) = (error, self.verbose) {
                say(&log);
            }
        })?;
        self.xdp = table.xdp.clone();
        Ok(&self.half.insert(half).service)
    }

    /// Counts how many connections were accepted on the CPU that received them, at the price of a system call for each.
    pub(crate) fn with_locality(mut self) -> Self {
        self.builder = self.builder.locality(true);
        self
    }

    /// Has a service answer at the listeners. The kernel half stands in front of those that have no workers.
    pub(crate) fn serve<S: WorkerService>(self, service: Arc<S>, workers: &WorkersTable) -> Result<Self, Failure> {
        let adopter = match workers.count() {
            0 => None,
            _ => Some(workers.start(&service, &self.common.limits, &self.cpus)?),
        };
        self.serve_with(service, adopter, &workers.words())
    }

    /// The same for a service that shards alone can answer for.
    pub(crate) fn serve_on_shards<S: Service>(self, service: Arc<S>) -> Result<Self, Failure> {
        self.serve_with(service, None, "")
    }

    fn serve_with<S: Service>(
        mut self,
        service: Arc<S>,
        adopter: Option<Arc<dyn Adopter>>,
        words: &str,
    ) -> Result<Self, Failure> {
        let sockets = std::mem::take(&mut self.common.sockets);
        // A program that was loaded only to be run from user space stays out of the way of sockets.
        let is_behind = self.choice.kernel && adopter.is_none();
        let assist = self.half.as_ref().filter(|_| is_behind).map(Half::assist);
        for (address, entry) in sockets.addresses {
            let added = |builder: Builder| builder.listen(address, Arc::clone(&service), assist.clone());
            self = self.with_listener(entry, words, adopter.clone(), added)?;
        }
        for (passed, entry) in sockets.passed {
            let added = |builder: Builder| builder.inherit(passed.socket, Arc::clone(&service), assist.clone());
            self = self.with_listener(entry, words, adopter.clone(), added)?;
        }
        Ok(self)
    }

    fn with_listener(
        mut self,
        entry: ListenEntry,
        workers: &str,
        adopter: Option<Arc<dyn Adopter>>,
        added: impl FnOnce(Builder) -> Builder,
    ) -> Result<Self, Failure> {
        let mut builder = added(self.builder);
        let has_workers = adopter.is_some();
        if let Some(adopter) = adopter {
            builder = builder.adopt(adopter);
        }
        let mut limits = entry.limits.over(&self.common.limits, &self.common.limits_above)?;
        limits.message_bytes_max = limits.message_bytes_max.min(self.message_bytes_max);
        let listener = Listener { entry, workers: workers.to_owned(), limits };
        if !listener.entry.limits.is_empty() {
            if has_workers {
                let what = format!("{}: limits of {} alone", self.common.name, listener.entry.address);
                return Err(Failure::new(Status::Data, format!("{what}, but its workers have one set of limits"))
                    .remedy("set the limits for the service"));
            }
            builder = builder.listener_limits(listener.limits.clone());
        }
        self.listeners.push(listener);
        self.builder = builder;
        Ok(self)
    }

    /// Starts the server. `state`: what the kind keeps for as long as it runs.
    pub(crate) fn start(self, state: impl State) -> Result<Running, Failure> {
        let Launch { common, mut choice, builder, mut half, xdp, message_bytes_max, listeners, .. } = self;
        let server = builder.start().map_err(|error| explain(error, choice.base))?;
        if choice.kernel
            && let Some(half) = &mut half
        {
            let notes = attach_udp(half, &xdp, &server, choice.base.name(), common.engine)?;
            choice.notes.extend(notes);
        }
        Ok(Running {
            ready: ready_lines(&common, &server, half.as_ref(), &listeners),
            notes: choice.notes.iter().map(|note| format!("{}: {note}", common.name)).collect(),
            engine: choice.name(),
            name: common.name,
            limits: common.limits,
            limits_above: common.limits_above,
            listeners,
            resources: common.resources,
            message_bytes_max,
            connections_max: common.connections_max,
            keeps_sizes: false,
            state: Box::new(state),
            server,
            half,
        })
    }
}

/// Puts XDP in front of UDP, and returns what is to be noted. Failing is an error if the interface or the kernel engine
/// was asked for by name.
fn attach_udp(
    half: &mut Half,
    xdp: &Xdp,
    server: &Server,
    base: &str,
    engine: EngineWish,
) -> Result<Vec<String>, Failure> {
    let addresses: Vec<ListenAddr> = server.listeners().iter().map(|listener| listener.addr.clone()).collect();
    half.attach_udp(xdp, &addresses).or_else(|error| {
        let obstacle = doctor::kernel_half_obstacle(&error);
        if engine == EngineWish::Kernel || matches!(xdp, Xdp::On(_)) {
            return Err(obstacle.failure(format!("UDP cannot be answered by XDP: {}", obstacle.cause)));
        }
        Ok(vec![format!("UDP on {base} instead of XDP: {}; to get it: {}", obstacle.cause, obstacle.remedy)])
    })
}

/// One line per listener.
fn ready_lines(common: &Common, server: &Server, half: Option<&Half>, listeners: &[Listener]) -> Vec<String> {
    let (name, spin) = (&common.name, common.spin);
    let (shards, base) = (server.cpus().len(), server.engine().name());
    let xdp = half.map(Half::xdp).unwrap_or_default();
    let line = |(listener, asked): (&ListenerInfo, &Listener)| {
        let (workers, limits) = (&asked.workers, &asked.entry.limits);
        let (engine, workers) = match &listener.addr {
            ListenAddr::Udp(_) if !xdp.is_empty() => (format!("kernel xdp={xdp}"), ""),
            ListenAddr::Udp(_) => (base.to_owned(), ""),
            _ if listener.assisted => ("kernel".to_owned(), workers.as_str()),
            _ => (base.to_owned(), workers.as_str()),
        };
        format!("{name} {} engine={engine} shards={shards} spin={spin}{workers}{limits} ready", listener.addr)
    };
    server.listeners().iter().zip(listeners).map(line).collect()
}
