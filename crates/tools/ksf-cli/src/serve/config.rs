//! The configuration file of `ksf serve`, in TOML.
//!
//! Keys have the names of the flags with underscores. Unknown keys are errors: a misspelt limit
//! that is silently ignored is worse than a server that does not start.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ksf::cpus::CpuSet;
use ksf::limits::Limits;
use serde::Deserialize;

use super::engine::EngineWish;
use super::kinds::Kind;
use super::limits::{self, LimitFlags, LimitTable};
use super::listen::ListenEntry;
use super::resources::{ResourceFlags, ResourceTable, Resources};
use super::spin::SpinWish;
use crate::output::Failure;
use crate::toml_file::{self, Mistake, Table};

/// A configuration file.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) top: TopTable,
    /// What stands above the services and holds until a restart.
    pub(crate) fixed: toml::Table,
    pub(crate) services: Vec<ServiceTable>,
}

/// What stands above the services.
#[derive(Debug, Deserialize)]
pub(crate) struct TopTable {
    /// CPUs for all services.
    pub(crate) cpus: Option<CpuSet>,
    /// Engine of the services that name none.
    #[serde(default)]
    pub(crate) engine: EngineWish,
    /// How long shards look for work before they sleep, of the services that do not say.
    #[serde(default)]
    pub(crate) spin: SpinWish,
    /// Limits of all services.
    #[serde(default)]
    limits: LimitTable,
    /// What all services set aside at their start.
    #[serde(default)]
    resources: ResourceTable,
    /// Where counters can be read.
    #[serde(default)]
    pub(crate) stats: StatsTable,
}

/// Table `[stats]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatsTable {
    /// Path of the socket `ksf stat` connects to.
    pub(crate) socket: Option<PathBuf>,
    /// Address of the Prometheus listener; off if missing.
    pub(crate) prometheus: Option<SocketAddr>,
}

/// One `[[service]]`: what all kinds have, and what its kind adds.
#[derive(Debug)]
pub(crate) struct ServiceTable {
    pub(crate) common: CommonTable,
    pub(crate) kind: Kind,
    /// What holds until a restart.
    pub(crate) fixed: toml::Table,
}

/// The keys of a service of any kind.
#[derive(Debug, Deserialize)]
pub(crate) struct CommonTable {
    /// Name in messages, counters and for sockets of systemd.
    pub(crate) name: String,
    kind: String,
    /// Addresses, each with limits of its own if need be; loopback with the usual port if missing.
    #[serde(default)]
    pub(crate) listen: Vec<ListenEntry>,
    pub(crate) engine: Option<EngineWish>,
    pub(crate) spin: Option<SpinWish>,
    /// Limits that differ from the common ones.
    #[serde(default)]
    limits: LimitTable,
    /// Resources that differ from the common ones.
    #[serde(default)]
    resources: ResourceTable,
}

impl Config {
    /// Reads and checks a file. Relative paths in it are taken from its own folder.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        toml_file::read(path, Config::parse)
    }

    fn parse(mut table: Table<'_>) -> Result<Self, Mistake> {
        let mut fixed = fixed(&table)?;
        fixed.remove("service");
        let top = table.take()?;
        let services = table.take_tables("service")?;
        table.end("the file")?;
        if services.is_empty() {
            return Err(Mistake::new("no [[service]] is configured; add one with name and kind"));
        }
        let mut names = BTreeSet::new();
        let services = services.into_iter().map(|table| ServiceTable::parse(table, &mut names));
        Ok(Config { top, fixed, services: services.collect::<Result<_, _>>()? })
    }

    /// The service of this name.
    pub(crate) fn service(&self, name: &str) -> Option<&ServiceTable> {
        self.services.iter().find(|service| service.common.name == name)
    }

    /// Limits of one service: the defaults of its kind, common table, the service's table, flags.
    pub(crate) fn limits_of(&self, service: &ServiceTable, flags: &LimitFlags) -> Result<Limits, Failure> {
        let tables = [&self.top.limits, &service.common.limits];
        limits::overlay(service.kind.as_kind().limits(), &tables, flags)
    }

    /// How long the shards of one service look for work before they sleep.
    pub(crate) fn spin_of(&self, service: &ServiceTable) -> SpinWish {
        service.common.spin.unwrap_or(self.top.spin)
    }

    /// Resources of one service, in the same order.
    pub(crate) fn resources_of(&self, service: &ServiceTable, flags: &ResourceFlags) -> Resources {
        Resources::resolve(&[&self.top.resources, &service.common.resources], flags)
    }
}

impl ServiceTable {
    fn parse(mut table: Table<'_>, names: &mut BTreeSet<String>) -> Result<Self, Mistake> {
        let fixed = fixed(&table)?;
        let common: CommonTable = table.take()?;
        let name = &common.name;
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
            let what = format!("the service name \"{name}\" is not made of letters, digits, '-', '_' and '.'");
            return Err(table.mistake(what));
        }
        if !names.insert(name.clone()) {
            return Err(table.mistake(format!("two services have the name \"{name}\"; names must differ")));
        }
        let no_usual_port =
            table.mistake(format!("service \"{name}\": kind = \"{}\" has no usual port; add listen", common.kind));
        let kind = Kind::read(&common.kind, table)?;
        if kind.as_kind().port().is_none() && common.listen.is_empty() {
            return Err(no_usual_port);
        }
        Ok(ServiceTable { common, kind, fixed })
    }
}

/// A table without what SIGHUP puts in force: limits, also those of listeners.
fn fixed(table: &Table<'_>) -> Result<toml::Table, Mistake> {
    let mut table = table.whole()?;
    table.remove("limits");
    if let Some(toml::Value::Array(listeners)) = table.get_mut("listen") {
        for listener in listeners {
            if let Some(address) = listener.get("address").cloned() {
                *listener = address;
            }
        }
    }
    Ok(table)
}

/// The keys whose values differ.
pub(crate) fn changed(before: &toml::Table, now: &toml::Table) -> Vec<String> {
    let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    keys.into_iter().filter(|key| before.get(*key) != now.get(*key)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Table::parse(text, Path::new("")).and_then(Config::parse).map_err(|mistake| mistake.what)
    }

    #[test]
    fn a_full_file_is_read() {
        let config = parse(
            r#"
            cpus = "0-1"
            engine = "uring"
            spin = "off"
            [limits]
            message_bytes_max = "64k"
            [stats]
            prometheus = "127.0.0.1:9160"
            [[service]]
            name = "echo"
            kind = "echo"
            listen = ["127.0.0.1:60007", "unix:/run/ksf/echo"]
            [[service]]
            name = "rpc"
            kind = "rpc"
            engine = "epoll"
            programs = ["200000:1-3"]
            spin = 20
            [service.limits]
            fragments_max = 3
            "#,
        )
        .unwrap();
        assert_eq!(config.services.len(), 2);
        let spins = config.services.iter().map(|service| config.spin_of(service));
        assert_eq!(spins.collect::<Vec<_>>(), ["off".parse().unwrap(), "20".parse().unwrap()]);
        let flags = LimitFlags::default();
        let limits = config.limits_of(&config.services[1], &flags).unwrap();
        assert_eq!((limits.message_bytes_max, limits.fragments_max), (65536, 3));
        let limits = config.limits_of(&config.services[0], &flags).unwrap();
        assert_eq!(limits.fragments_max, Limits::default().fragments_max);
    }

    #[test]
    fn files_of_earlier_versions_are_read() {
        // Every key there was before kinds had keys of their own, in the order that people gave them.
        for keys in [
            "kind = \"echo\"\nname = \"a\"\nwindow_bytes = 1\nxdp = \"none\"\nworkers = 2\nmux = \"ksf\"",
            "name = \"a\"\nkind = \"rpc\"\nprograms = []\nrpcbind = false\nxdp = \"lo\"\nwindow_bytes = \"64k\"",
            "name = \"a\"\nkind = \"bpf\"\nobject = \"x\"\nlisten = [\"systemd\"]\nengine = \"kernel\"\nworkers = 1",
            "name = \"a\"\nkind = \"work\"\nlisten = [\"tcp:127.0.0.1:1\"]\nxdp = \"none\"\nwindow_bytes = 7",
        ] {
            let tables = "[service.limits]\nfragments_max = 1\n[service.resources]\nslots = 16";
            parse(&format!("engine = \"kernel\"\n[[service]]\n{keys}\n{tables}")).unwrap();
        }
    }

    #[test]
    fn a_kind_has_limits_of_its_own_below_those_of_the_file() {
        let text = "[limits]\nidle_timeout_ms = 5\n[[service]]\nname = \"a\"\nkind = \"http\"";
        let config = parse(text).unwrap();
        let limits = config.limits_of(&config.services[0], &LimitFlags::default()).unwrap();
        assert_eq!((limits.header_bytes_max, limits.idle_timeout_ms), (8192, 5));
    }

    #[test]
    fn mistakes_are_named() {
        let service = "[[service]]\nname = \"a\"\nkind = \"echo\"\n";
        let class = "[[service.class]]\nbytes = \"01\"\ncap = 2\n";
        assert!(parse(&format!("{service}workers = 3\n{class}")).is_ok());
        assert!(parse(&format!("{service}workers = 3\nmux = \"ksf\"\n")).is_ok());
        for (text, part) in [
            (String::new(), "no [[service]]"),
            (format!("{service}{service}"), "two services"),
            (format!("lissten = 1\n{service}"), "lissten"),
            (format!("{service}portt = 1"), "portt"),
            (format!("{service}engine = \"fast\""), "fast"),
            (format!("{service}listen = [\"localhost:1\"]"), "in numbers"),
            (format!("{service}programs = [\"1:1-1\"]"), "of kind = \"rpc\""),
            (format!("{service}object = \"x\""), "of kind = \"bpf\""),
            (format!("{service}rpcbind = true"), "of kind = \"rpc\""),
            (
                format!("{service}rpcbind = true"),
                "`name`, `kind`, `listen`, `engine`, `spin`, `limits`, `resources`, `xdp`",
            ),
            (service.replace("echo", "ecko"), "unknown kind `ecko`, expected one of `echo`, `rpc`"),
            (format!("{}xdp = \"lo\"", service.replace("echo", "http")), "has `name`"),
            (format!("{}backends = [\"127.0.0.1:1\"]\nbody_bytes = 1", service.replace("echo", "http")), "body_bytes"),
            (service.replace("echo", "bpf"), "missing field `object`"),
            (service.replace("echo", "work"), "no usual port"),
            (format!("{service}workers = 0"), "out of range"),
            (format!("{service}mux = \"ksf\""), "add workers"),
            (format!("{service}workers = 1\nmux = \"kcm\""), "kcm"),
            (format!("{service}{class}"), "workers above"),
            (format!("{service}workers = 2\n{class}"), "workers above"),
            (format!("{service}workers = 3\n{}", class.replace("01", "0")), "hexadecimal"),
            (format!("{service}workers = 3\n{}", class.replace("01", "0g")), "hexadecimal"),
            (service.replace("\"a\"", "\"a b\""), "letters"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
