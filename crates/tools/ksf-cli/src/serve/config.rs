//! The configuration file of `ksf serve`, in TOML.
//!
//! Keys have the names of the flags with underscores. Unknown keys are errors: a misspelt limit
//! that is silently ignored is worse than a server that does not start.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::args::{EngineWish, ProgramRange};
use crate::cpus::CpuList;
use crate::number::Number;
use crate::output::{Failure, Status};
use crate::serve::address::Listen;
use crate::serve::limits::{LimitFlags, LimitTable};
use crate::serve::resources::{ResourceFlags, ResourceTable, Resources};
use crate::toml_file;

/// A configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    /// CPUs for all services.
    pub(crate) cpus: Option<CpuList>,
    /// Engine of the services that name none.
    #[serde(default)]
    pub(crate) engine: EngineWish,
    /// Limits of all services.
    #[serde(default)]
    pub(crate) limits: LimitTable,
    /// What all services set aside at their start.
    #[serde(default)]
    pub(crate) resources: ResourceTable,
    /// Where counters can be read.
    #[serde(default)]
    pub(crate) stats: StatsTable,
    /// The services.
    #[serde(default, rename = "service")]
    pub(crate) services: Vec<ServiceTable>,
}

/// Table `[stats]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatsTable {
    /// Path of the socket `ksf stat` connects to.
    pub(crate) socket: Option<PathBuf>,
    /// Address of the Prometheus listener; off if missing.
    pub(crate) prometheus: Option<SocketAddr>,
}

/// One `[[service]]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServiceTable {
    /// Name in messages, counters and for sockets of systemd.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// Addresses; loopback with the usual port if missing.
    #[serde(default)]
    pub(crate) listen: Vec<Listen>,
    pub(crate) engine: Option<EngineWish>,
    /// Programs and versions to register besides NFS and MOUNT (`kind = "rpc"`).
    #[serde(default)]
    pub(crate) programs: Vec<ProgramRange>,
    /// Whether to register with rpcbind (`kind = "rpc"`).
    #[serde(default)]
    pub(crate) rpcbind: bool,
    /// The compiled program (`kind = "bpf"`).
    pub(crate) object: Option<PathBuf>,
    /// Interface for XDP, `"none"` to answer UDP in user space.
    pub(crate) xdp: Option<String>,
    /// Worker threads that share all connections of the service; each shard answers its own if missing.
    pub(crate) workers: Option<Number<1, 1024>>,
    /// What gives messages to the workers: nothing but `"ksf"`, which a file may name.
    pub(crate) mux: Option<MuxName>,
    /// Long messages, and how many of each kind workers may be at.
    #[serde(default, rename = "class")]
    pub(crate) classes: Vec<ClassTable>,
    /// Bytes the kernel half may have outstanding on a connection.
    pub(crate) window_bytes: Option<Number<1, { u32::MAX as u64 }>>,
    /// Limits that differ from the common ones.
    #[serde(default)]
    pub(crate) limits: LimitTable,
    /// Resources that differ from the common ones.
    #[serde(default)]
    pub(crate) resources: ResourceTable,
}

/// The multiplexor that services with workers run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MuxName {
    /// That of ksf, in user space.
    Ksf,
}

/// One `[[service.class]]`: messages that have these bytes at this place.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClassTable {
    /// Bytes of the message before them; its framing is not counted.
    #[serde(default)]
    pub(crate) offset: usize,
    pub(crate) bytes: HexBytes,
    /// How many of them may be worked on at once.
    pub(crate) cap: Number<1, 1023>,
}

/// Bytes as hexadecimal digits, two for each.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct HexBytes(pub(crate) Vec<u8>);

impl TryFrom<String> for HexBytes {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let is_hex = !text.is_empty() && text.len().is_multiple_of(2) && text.bytes().all(|c| c.is_ascii_hexdigit());
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        let wrong = || format!("\"{text}\" is not bytes in hexadecimal digits, two for each");
        bytes.filter(|_| is_hex).map(Self).ok_or_else(wrong)
    }
}

impl ClassTable {
    /// Whether a message is of this class.
    pub(crate) fn has(&self, message: &[u8]) -> bool {
        message.get(self.offset..).is_some_and(|rest| rest.starts_with(&self.bytes.0))
    }
}

/// What a service is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Sends every byte back.
    Echo,
    /// ONC RPC NULL.
    Rpc,
    /// A program written against the SDK.
    Bpf,
    /// Takes as long as a message says: to see what scheduling does.
    Work,
}

impl Config {
    /// Reads and checks a file. Relative paths in it are taken from its own folder.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let mut config: Config = toml_file::read(path)?;
        config.check().map_err(|what| Failure::new(Status::Config, format!("{}: {what}", path.display())))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for object in config.services.iter_mut().filter_map(|s| s.object.as_mut()) {
            *object = folder.join(&*object);
        }
        Ok(config)
    }

    /// Limits of one service: defaults, common table, the service's table, flags.
    pub(crate) fn limits_of(&self, service: &ServiceTable, flags: &LimitFlags) -> Result<ksf::limits::Limits, Failure> {
        let mut limits = ksf::limits::Limits::default();
        self.limits.apply(&mut limits);
        service.limits.apply(&mut limits);
        flags.apply(&mut limits);
        crate::serve::limits::check(&limits)?;
        Ok(limits)
    }

    /// Resources of one service, in the same order.
    pub(crate) fn resources_of(&self, service: &ServiceTable, flags: &ResourceFlags) -> Resources {
        Resources::resolve(&[&self.resources, &service.resources], flags)
    }

    fn check(&self) -> Result<(), String> {
        if self.services.is_empty() {
            return Err("no [[service]] is configured; add one with name and kind".into());
        }
        let mut names = BTreeSet::new();
        for service in &self.services {
            let name = &service.name;
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
                return Err(format!("the service name \"{name}\" is not made of letters, digits, '-', '_' and '.'"));
            }
            if !names.insert(name) {
                return Err(format!("two services have the name \"{name}\"; names must differ"));
            }
            service.check()?;
        }
        Ok(())
    }
}

impl ServiceTable {
    fn check(&self) -> Result<(), String> {
        let name = &self.name;
        let only_for =
            |key: &str, kind: &str| Err(format!("service \"{name}\": {key} fits only kind = \"{kind}\"; remove it"));
        if self.kind != Kind::Rpc && !self.programs.is_empty() {
            return only_for("programs", "rpc");
        }
        if self.kind != Kind::Rpc && self.rpcbind {
            return only_for("rpcbind", "rpc");
        }
        if self.kind != Kind::Bpf && self.object.is_some() {
            return only_for("object", "bpf");
        }
        if self.kind == Kind::Bpf && self.object.is_none() {
            return Err(format!("service \"{name}\": kind = \"bpf\" needs object = \"FILE.bpf.o\""));
        }
        if self.mux.is_some() && self.workers.is_none() {
            return Err(format!("service \"{name}\": mux fits only a service with workers; add workers = N"));
        }
        let workers = self.workers.map_or(0, |number| number.0);
        if let Some(class) = self.classes.iter().find(|class| class.cap.0 >= workers) {
            let cap = class.cap.0;
            let what = format!("service \"{name}\": a class with cap = {cap} leaves no worker free");
            return Err(format!("{what}; set workers above it"));
        }
        if matches!(self.kind, Kind::Bpf | Kind::Work) && self.listen.is_empty() {
            let kind = if self.kind == Kind::Bpf { "bpf" } else { "work" };
            return Err(format!("service \"{name}\": kind = \"{kind}\" has no usual port; add listen"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|error| error.to_string())?;
        config.check()?;
        Ok(config)
    }

    #[test]
    fn a_full_file_is_read() {
        let config = parse(
            r#"
            cpus = "0-1"
            engine = "uring"
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
            [service.limits]
            fragments_max = 3
            "#,
        )
        .unwrap();
        assert_eq!(config.services.len(), 2);
        let flags = LimitFlags::default();
        let limits = config.limits_of(&config.services[1], &flags).unwrap();
        assert_eq!((limits.message_bytes_max, limits.fragments_max), (65536, 3));
        let limits = config.limits_of(&config.services[0], &flags).unwrap();
        assert_eq!(limits.fragments_max, ksf::limits::Limits::default().fragments_max);
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
            (format!("{service}programs = [\"1:1-1\"]"), "only kind = \"rpc\""),
            (format!("{service}object = \"x\""), "only kind = \"bpf\""),
            (format!("{service}rpcbind = true"), "only kind = \"rpc\""),
            (service.replace("echo", "bpf"), "needs object"),
            (service.replace("echo", "work"), "no usual port"),
            (format!("{service}workers = 0"), "workers"),
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
