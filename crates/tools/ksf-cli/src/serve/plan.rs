//! From flags or a configuration file to what is to be started, and what is read again on SIGHUP.

use std::mem::{self, Discriminant};
use std::path::{Path, PathBuf};

use super::args::ProcessArgs;
use super::config::{Config, ServiceTable, changed};
use super::engine::EngineWish;
use super::kind::{ServiceKind, Single};
use super::kinds::Kind;
use super::launch::Common;
use super::limits::{self, LimitFlags};
use super::listen::ListenEntry;
use super::resources::Resources;
use super::running::Running;
use super::sockets::{self, Sockets, Wish};
use crate::manager::Passed;
use crate::output::{Failure, Status};

/// One service to start.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) common: Common,
    pub(crate) kind: Kind,
    pub(crate) source: Source,
}

/// Where a service is described.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// By the flags of a command, which may name a file of limits.
    Flags { defaults: ksf::limits::Limits, file: Option<PathBuf>, flags: LimitFlags },
    /// In the file of `ksf serve`; flags win over its limits.
    Config {
        path: PathBuf,
        service: String,
        kind: Discriminant<Kind>,
        flags: LimitFlags,
        /// What held at the start, above the services and of this one.
        fixed: Box<[toml::Table; 2]>,
    },
}

impl Source {
    /// The file that is read again on SIGHUP, if there is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        match self {
            Source::Flags { file, .. } => file.as_deref(),
            Source::Config { path, .. } => Some(path),
        }
    }

    /// Reads it again and puts in force what may change while a service runs. Returns the keys that were changed and take a
    /// restart. On an error nothing changes.
    pub(crate) fn reload(&self, running: &mut Running) -> Result<Vec<String>, Failure> {
        let (path, service, running_kind, flags, fixed) = match self {
            Source::Flags { defaults, file, flags } => {
                let limits = limits::resolve(defaults.clone(), file.as_deref(), flags)?;
                return running.reload(limits, &[]);
            }
            Source::Config { path, service, kind, flags, fixed } => (path, service, kind, flags, fixed),
        };
        let config = Config::read(path)?;
        let found = config.service(service).filter(|table| mem::discriminant(&table.kind) == *running_kind);
        let Some(table) = found else {
            let what = format!("{}: the running service \"{service}\" is gone, or of another kind", path.display());
            return Err(Failure::new(Status::Config, what)
                .remedy("services are added, changed and removed by a restart, not by SIGHUP"));
        };
        let kept = running.reload(config.limits_of(table, flags)?, &table.common.listen)?;
        let [above, own] = &**fixed;
        Ok([kept, changed(own, &table.fixed), changed(above, &config.fixed)].concat())
    }

    /// Services of the file that are none of these.
    pub(crate) fn services_besides(&self, running: &[&str]) -> Vec<String> {
        let Source::Config { path, .. } = self else { return Vec::new() };
        // What is wrong with the file was said already.
        let services = Config::read(path).map(|config| config.services).unwrap_or_default();
        let names = services.into_iter().map(|service| service.common.name);
        names.filter(|name| !running.contains(&name.as_str())).collect()
    }
}

/// The plan of a command that serves one service.
pub(crate) fn single(single: Single<Kind>, mut passed: Vec<Passed>) -> Result<Plan, Failure> {
    let Single { name, kind, server, process, .. } = single;
    let as_kind = kind.as_kind();
    if as_kind.port().is_none() && server.listen.is_empty() && passed.is_empty() {
        return Err(Failure::new(Status::Usage, format!("{name} has no usual port"))
            .remedy("say where it listens: --listen ADDR:PORT"));
    }
    let defaults = as_kind.limits();
    let common = Common {
        engine: engine(as_kind, &name, Some(server.engine), EngineWish::Auto)?,
        // Whatever its name, a socket was passed for the only service there is.
        sockets: sockets(as_kind, &server.listen, None, &mut passed)?,
        name,
        cpus: server.cpus,
        spin: server.spin.spin,
        limits: limits::resolve(defaults.clone(), server.config_limits.as_deref(), &process.limits)?,
        // What a flag says of one listener is nearer to it than what others say of all.
        limits_above: LimitFlags::default(),
        resources: Resources::resolve(&[], &process.resources),
        descriptors_max: usize::MAX,
        connections_max: usize::MAX,
    };
    sockets::all_taken(&passed)?;
    let source = Source::Flags { defaults, file: server.config_limits, flags: process.limits };
    Ok(Plan { common, kind, source })
}

/// The plans of the services of a file.
pub(crate) fn of_config(
    config: Config,
    path: &Path,
    args: &ProcessArgs,
    mut passed: Vec<Passed>,
) -> Result<Vec<Plan>, Failure> {
    let common = |table: &ServiceTable| -> Result<Common, Failure> {
        let (entry, kind) = (&table.common, table.kind.as_kind());
        Ok(Common {
            name: entry.name.clone(),
            sockets: sockets(kind, &entry.listen, Some(&entry.name), &mut passed)?,
            engine: engine(kind, &entry.name, entry.engine, config.top.engine)?,
            cpus: config.top.cpus.clone(),
            spin: config.spin_of(table),
            limits: config.limits_of(table, &args.limits)?,
            limits_above: args.limits.clone(),
            resources: config.resources_of(table, &args.resources),
            descriptors_max: usize::MAX,
            connections_max: usize::MAX,
        })
    };
    let common: Vec<Common> = config.services.iter().map(common).collect::<Result<_, _>>()?;
    sockets::all_taken(&passed)?;
    let above = config.fixed;
    let plan = |(common, table): (Common, ServiceTable)| {
        let (path, service, flags) = (path.to_owned(), common.name.clone(), args.limits.clone());
        let fixed = Box::new([above.clone(), table.fixed]);
        let source = Source::Config { path, service, kind: mem::discriminant(&table.kind), flags, fixed };
        Plan { common, kind: table.kind, source }
    };
    Ok(common.into_iter().zip(config.services).map(plan).collect())
}

/// The sockets of a service. `passed_name`: what passed sockets are called, if not all are taken.
fn sockets(
    kind: &dyn ServiceKind,
    listen: &[ListenEntry],
    passed_name: Option<&str>,
    passed: &mut Vec<Passed>,
) -> Result<Sockets, Failure> {
    let wish = Wish { listen, port: kind.port(), has_datagrams: kind.has_datagrams() };
    sockets::resolve(wish, passed_name, passed)
}

/// The engine that a service asks for itself, else the one for all.
fn engine(
    kind: &dyn ServiceKind,
    name: &str,
    own: Option<EngineWish>,
    common: EngineWish,
) -> Result<EngineWish, Failure> {
    match own.unwrap_or(common) {
        EngineWish::Kernel if !kind.has_kernel_half() && own.is_some() => {
            Err(Failure::new(Status::Unavailable, format!("the service {name} has no kernel half"))
                .remedy("use --engine=auto, uring or epoll"))
        }
        // It is meant for the others.
        EngineWish::Kernel if !kind.has_kernel_half() => Ok(EngineWish::Auto),
        engine => Ok(engine),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toml_file::Table;

    #[test]
    fn the_kernel_engine_is_refused_to_a_kind_without_a_kernel_half_that_asks_for_it() {
        let engine_of = |name: &str, own, common| {
            let table = Table::parse("", Path::new("")).unwrap();
            engine(Kind::read(name, table).unwrap().as_kind(), "a", own, common)
        };
        let (kernel, epoll) = (EngineWish::Kernel, EngineWish::Epoll);
        assert_eq!(engine_of("work", Some(kernel), epoll).unwrap_err().status, Status::Unavailable);
        assert_eq!(engine_of("work", None, kernel).unwrap(), EngineWish::Auto);
        assert_eq!(engine_of("work", Some(epoll), kernel).unwrap(), epoll);
        assert_eq!(engine_of("echo", None, kernel).unwrap(), kernel);
        assert_eq!(engine_of("echo", Some(kernel), epoll).unwrap(), kernel);
    }
}
