//! One service, from its plan to its end.

use std::io;
use std::sync::Arc;

use ksf::Service;
use ksf::assist::Assist;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::server::{Builder, Drained, ListenerInfo, Server};
use ksf_kernel::KernelError;
use ksf_services::echo::Echo;
use ksf_services::http::{Counts, PageServer, Proxy};
use ksf_services::rpc::RpcService;

use ksf_services::rpc::rpcbind::{self, Endpoint, Registration};
use ksf_services::work::Work;

use super::explain::explain;
use super::kernel::{self, Half};
use super::object::ObjectService;
use super::plan::{LimitSource, Plan, Sockets, What, Xdp};
use super::workers::Crew;
use crate::args::EngineWish;
use crate::output::{Failure, Status, say};
use crate::serve::engine::{self, Choice, Obstacles};
use crate::serve::resources::Resources;
use crate::stats::{ServiceSnapshot, Value};

/// A service that runs.
pub(crate) struct Running {
    pub(crate) name: String,
    /// Lines that say which listeners are ready.
    pub(crate) ready: Vec<String>,
    /// Lines that say why something better does not run.
    pub(crate) notes: Vec<String>,
    engine: &'static str,
    limits: Limits,
    resources: Resources,
    /// What the service itself can take, whatever the limit says.
    message_bytes_max: usize,
    source: LimitSource,
    registration: Option<Registration>,
    server: Server,
    half: Option<Half>,
    /// What each worker of a demo server counts.
    counts: Option<Arc<Counts>>,
}

/// Starts a service on the best engine that works, or on the one that was asked for.
pub(crate) fn start(plan: Plan, lacks: &Obstacles, verbose: bool) -> Result<Running, Failure> {
    // The demo server has no kernel half, and does not miss it.
    let own_lacks = matches!(plan.what, What::Demo(_)).then(|| Obstacles { kernel: None, ..lacks.clone() });
    let mut choice = engine::choose(plan.engine, own_lacks.as_ref().unwrap_or(lacks))?;
    let mut counts = None;
    let mut limits = plan.limits.read()?;
    let mut message_bytes_max = usize::MAX;
    let cpus = ksf::cpus::choose(plan.cpus.as_deref()).map_err(|error| explain(error, choice.base))?;
    let mut half = load(&plan, &mut choice, &limits, cpus.len(), verbose)?;
    // A program that was loaded only to be run from user space stays out of the way of sockets.
    let assist = half.as_ref().filter(|_| choice.kernel && plan.workers == 0).map(Half::assist);
    let workers = plan.workers;
    let classes = plan.classes.clone();
    let crew = Crew { workers, classes: &classes, cpus: &cpus };
    let builder = |limits: &Limits| {
        let builder = Server::builder().engine(choice.base).cpus(Some(cpus.clone())).limits(limits.clone());
        plan.resources.give_to(builder)
    };
    let builder = match (&plan.what, &half) {
        (What::Echo, _) => build(builder(&limits), plan.sockets, Arc::new(Echo), assist, crew, &limits)?,
        (What::Work, _) => {
            let service = if workers > 0 { Work::in_place() } else { Work::default() };
            build(builder(&limits), plan.sockets, Arc::new(service), assist, crew, &limits)?
        }
        (What::Demo(demo), _) => {
            // A system call for each connection: what the demo server is there to show.
            let builder = builder(&limits).locality(true);
            let (sockets, shards) = (plan.sockets, cpus.len());
            if demo.backends.is_empty() {
                let service = Arc::new(PageServer::new(demo.body_bytes, demo.keep_alive, shards));
                counts = Some(Arc::clone(service.counts()));
                build(builder, sockets, service, assist, crew, &limits)?
            } else {
                let service = Arc::new(Proxy::new(demo.backends.clone(), demo.keep_alive, shards));
                counts = Some(Arc::clone(service.counts()));
                build(builder, sockets, service, assist, crew, &limits)?
            }
        }
        (What::Rpc { table, .. }, _) => {
            let service = Arc::new(RpcService::new(plan.name.as_str(), table.clone()));
            build(builder(&limits), plan.sockets, service, assist, crew, &limits)?
        }
        (What::Object(_), Some(half)) => {
            message_bytes_max = half.service.message_bytes_max();
            limits.message_bytes_max = limits.message_bytes_max.min(message_bytes_max);
            let service =
                ObjectService::new(&half.service, cpus.len() + workers).map_err(|e| kernel::object_failure(&e))?;
            build(builder(&limits), plan.sockets, Arc::new(service), assist, crew, &limits)?
        }
        (What::Object(path), None) => {
            let what = format!("the program {} was not loaded", path.display());
            return Err(Failure::new(Status::Internal, what));
        }
    };
    let server = builder.start().map_err(|error| explain(error, choice.base))?;
    if choice.kernel
        && let Some(half) = &mut half
    {
        attach_udp(half, &plan.xdp, &server, &mut choice, plan.engine)?;
    }
    let registration = register(&plan.what, &server)?;
    Ok(Running {
        ready: ready_lines(&plan.name, &server, choice.base, half.as_ref(), crew),
        notes: choice.notes.iter().map(|note| format!("{}: {note}", plan.name)).collect(),
        engine: choice.name(),
        name: plan.name,
        limits,
        resources: plan.resources,
        message_bytes_max,
        source: plan.limits,
        registration,
        server,
        half,
        counts,
    })
}

/// Loads the kernel half if the choice wants one, or if the service is nothing without it.
fn load(
    plan: &Plan,
    choice: &mut Choice,
    limits: &Limits,
    shards: usize,
    verbose: bool,
) -> Result<Option<Half>, Failure> {
    let is_object = matches!(plan.what, What::Object(_));
    if !choice.kernel && !is_object {
        return Ok(None);
    }
    match Half::load(plan, limits, shards) {
        Ok(None) => {
            choice.kernel = false;
            Ok(None)
        }
        Ok(half) => Ok(half),
        Err(error) => {
            if let (KernelError::Verifier { log, .. }, true) = (&error, verbose) {
                say(&log);
            }
            if is_object {
                return Err(kernel::object_failure(&error));
            }
            let obstacle = kernel::obstacle(&error);
            if plan.engine == EngineWish::Kernel {
                return Err(engine::impossible("kernel", &obstacle));
            }
            choice.kernel = false;
            choice.notes.push(engine::not_taken(choice.base.name(), "kernel", &obstacle));
            Ok(None)
        }
    }
}

/// Puts XDP in front of UDP. Failing is an error if the interface or the kernel engine was asked for by name.
fn attach_udp(
    half: &mut Half,
    wish: &Xdp,
    server: &Server,
    choice: &mut Choice,
    engine: EngineWish,
) -> Result<(), Failure> {
    let addresses: Vec<ListenAddr> = server.listeners().iter().map(|listener| listener.addr.clone()).collect();
    match half.attach_udp(wish, &addresses) {
        Ok(notes) => choice.notes.extend(notes),
        Err(error) => {
            let obstacle = kernel::obstacle(&error);
            if engine == EngineWish::Kernel || matches!(wish, Xdp::On(_)) {
                let status = if obstacle.rights { Status::NoPermission } else { Status::Unavailable };
                let what = format!("UDP cannot be answered by XDP: {}", obstacle.cause);
                return Err(Failure::new(status, what).remedy(obstacle.remedy));
            }
            let base = choice.base.name();
            choice
                .notes
                .push(format!("UDP on {base} instead of XDP: {}; to get it: {}", obstacle.cause, obstacle.remedy));
        }
    }
    Ok(())
}

fn build<S: Service>(
    mut builder: Builder,
    sockets: Sockets,
    service: Arc<S>,
    assist: Option<Arc<dyn Assist>>,
    crew: Crew<'_>,
    limits: &Limits,
) -> Result<Builder, Failure> {
    let adopter = crew.start(&service, limits)?;
    let given = |builder: Builder| match &adopter {
        Some(adopter) => builder.adopt(Arc::clone(adopter)),
        None => builder,
    };
    for address in sockets.addresses {
        builder = given(builder.listen(address, Arc::clone(&service), assist.clone()));
    }
    for passed in sockets.passed {
        builder = given(builder.inherit(passed.socket, Arc::clone(&service), assist.clone()));
    }
    Ok(builder)
}

impl Running {
    /// Reads the limits again and puts them in force. On an error the old ones stay.
    pub(crate) fn reload(&mut self) -> Result<(), Failure> {
        let mut limits = self.source.read()?;
        limits.message_bytes_max = limits.message_bytes_max.min(self.message_bytes_max);
        self.server.set_limits(&limits);
        self.limits = limits;
        Ok(())
    }

    /// The file [`Running::reload`] reads, if there is one.
    pub(crate) fn limits_file(&self) -> Option<String> {
        self.source.file().map(|path| path.display().to_string())
    }

    /// Connections open now.
    pub(crate) fn connections(&self) -> usize {
        self.server.connections()
    }

    /// False when a shard has ended by itself.
    pub(crate) fn is_alive(&self) -> bool {
        self.server.is_running()
    }

    /// Stops gently: no new work, then every answer that is owed, then the end. Blocks for up to `drain_timeout_ms`.
    pub(crate) fn drain(mut self) -> io::Result<Drained> {
        // Clients must not be sent here any more.
        drop(self.registration);
        // No more datagrams either. Its programs for TCP stay until the connections under them are closed.
        if let Some(half) = &mut self.half {
            half.detach_udp();
        }
        self.server.drain()
    }

    /// The workers of a demo server: CPU, counters of the shard and of the service, and the range of its looks for work.
    pub(super) fn workers(&self) -> Vec<Worker> {
        let Some(counts) = &self.counts else { return Vec::new() };
        let shards = self.server.shards().zip(counts.workers());
        shards
            .map(|((cpu, shard), own)| Worker {
                cpu,
                accepted: shard.accepted.value(),
                local: shard.accepted_local.value(),
                turns: shard.turns.value(),
                turns_empty: shard.turns_empty.value(),
                events: shard.events.value(),
                events_range: shard.looks.range(),
                own: own.read(),
            })
            .collect()
    }

    /// Counters of the service's own, and those of each of its workers.
    fn own(&self) -> Vec<Value> {
        let mut own: Vec<Value> =
            own_counters(&self.server).into_iter().map(|(name, value)| Value::new(name, "", value)).collect();
        for (number, worker) in self.workers().into_iter().enumerate() {
            let shard = [("accepted", worker.accepted), ("accepted_local", worker.local)];
            let values = shard.into_iter().chain(worker.own).map(|(name, value)| {
                Value::new(&format!("worker{number}_{name}"), &format!("On CPU {}.", worker.cpu), value)
            });
            own.extend(values);
        }
        own
    }

    /// What `ksf stat` shows.
    pub(crate) fn snapshot(&self) -> ServiceSnapshot {
        let server = &self.server;
        let counters = server.counters();
        let named = |values: Vec<(&'static str, u64)>| -> Vec<Value> {
            values.into_iter().map(|(name, value)| Value::new(name, "", value)).collect()
        };
        ServiceSnapshot {
            name: self.name.clone(),
            engine: self.engine.to_owned(),
            shards: server.cpus().len(),
            listeners: server.listeners().iter().map(|listener| listener.addr.to_string()).collect(),
            limits: named(
                [crate::serve::limits::list(&self.limits), crate::serve::resources::list(&self.resources)].concat(),
            ),
            counters: counters.iter().map(|c| Value::new(c.name, c.help, c.value)).collect(),
            kernel: self
                .half
                .iter()
                .flat_map(|half| half.service.counters())
                .map(|c| Value::new(c.name, c.help, c.value))
                .collect(),
            own: self.own(),
        }
    }
}

/// What one worker of a demo server counted.
#[derive(Debug, Clone, Default)]
pub(super) struct Worker {
    pub(super) cpu: usize,
    pub(super) accepted: u64,
    pub(super) local: u64,
    pub(super) turns: u64,
    pub(super) turns_empty: u64,
    pub(super) events: u64,
    pub(super) events_range: (u64, u64),
    pub(super) own: Vec<(&'static str, u64)>,
}

/// Counters of the service's own. Every listener has the same service, so one list says it all.
fn own_counters(server: &Server) -> Vec<(&'static str, u64)> {
    server.service_counters().into_iter().next().map(|(_, counters)| counters).unwrap_or_default()
}

/// One line per listener.
fn ready_lines(name: &str, server: &Server, base: EngineKind, half: Option<&Half>, crew: Crew) -> Vec<String> {
    let shards = server.cpus().len();
    let xdp = half.map(Half::xdp).unwrap_or_default();
    let line = |listener: &ListenerInfo| {
        let engine = match &listener.addr {
            ListenAddr::Udp(_) if !xdp.is_empty() => format!("kernel xdp={xdp}"),
            _ if listener.assisted => "kernel".to_owned(),
            _ => base.name().to_owned(),
        };
        let workers = match &listener.addr {
            ListenAddr::Udp(_) => String::new(),
            _ => crew.words(),
        };
        format!("{name} {} engine={engine} shards={shards}{workers} ready", listener.addr)
    };
    server.listeners().iter().map(line).collect()
}

/// Tells rpcbind, if that was asked for.
fn register(what: &What, server: &Server) -> Result<Option<Registration>, Failure> {
    let What::Rpc { table, rpcbind: true } = what else { return Ok(None) };
    let entries: Vec<_> = server
        .listeners()
        .iter()
        .flat_map(|listener| match &listener.addr {
            ListenAddr::Tcp(address) => rpcbind::entries(table, *address, true),
            ListenAddr::Udp(address) => rpcbind::entries(table, *address, false),
            _ => Vec::new(),
        })
        .collect();
    Registration::new(&Endpoint::local_defaults(), entries)
        .map(Some)
        .map_err(|error| Failure::new(rpcbind_status(&error), error.to_string()))
}

fn rpcbind_status(error: &rpcbind::RpcbindError) -> Status {
    match error {
        rpcbind::RpcbindError::NotPermitted { .. } => Status::NoPermission,
        _ => Status::Unavailable,
    }
}
