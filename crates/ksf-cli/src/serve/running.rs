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
use ksf_services::rpc::RpcService;

use ksf_services::rpc::rpcbind::{self, Endpoint, Registration};
use ksf_services::work::Work;

use super::explain::explain;
use super::kernel::{self, Half};
use super::object::ObjectService;
use super::plan::{LimitSource, Plan, Sockets, What, Xdp};
use super::workers::Crew;
use crate::args::EngineWish;
use crate::engine::{self, Choice, Obstacles};
use crate::exit::{Failure, Status, say};
use crate::resources::Resources;
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
}

/// Starts a service on the best engine that works, or on the one that was asked for.
pub(crate) fn start(plan: Plan, lacks: &Obstacles, verbose: bool) -> Result<Running, Failure> {
    let mut choice = engine::choose(plan.engine, lacks)?;
    let mut limits = plan.limits.read()?;
    let mut message_bytes_max = usize::MAX;
    let cpus = ksf::cpus::choose(plan.cpus.as_deref()).map_err(|error| explain(error, choice.base))?;
    let mut half = load(&plan, &mut choice, &limits, cpus.len(), verbose)?;
    // A program that was loaded only to be run from user space stays out of the way of sockets.
    let assist = half.as_ref().filter(|_| choice.kernel && plan.workers == 0).map(Half::assist);
    let workers = plan.workers;
    let crew = Crew { workers, mux: plan.mux, cpus: &cpus };
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
    let adopter = crew.start(&service, &sockets, limits)?;
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
            limits: named([crate::limits::list(&self.limits), crate::resources::list(&self.resources)].concat()),
            counters: counters.iter().map(|c| Value::new(c.name, c.help, c.value)).collect(),
            kernel: self
                .half
                .iter()
                .flat_map(|half| half.service.counters())
                .map(|c| Value::new(c.name, c.help, c.value))
                .collect(),
            own: named(own_counters(server)),
        }
    }
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
