//! How each key-value server is started.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::bench::contestant::{Contestant, pinned};
use crate::process::Ready;

/// Threads of Redis that write to sockets. Its redis.conf wants four CPUs at least for any; with two there is one more.
const IO_THREADS: &str = "2";

/// A server that is to be started.
pub(super) struct Wanted<'a> {
    pub(super) contestant: Contestant,
    pub(super) ksf: &'a Path,
    /// bench/peers/http_log.c, compiled.
    pub(super) peer: &'a Path,
    /// None: where the scheduler puts it.
    pub(super) cpus: Option<&'a str>,
    pub(super) data: &'a Path,
    /// Of each log of a store, and of the peer's file.
    pub(super) log_bytes: u64,
    pub(super) port: u16,
}

impl Wanted<'_> {
    /// Its command, and how it shows that it is ready.
    pub(super) fn command(&self) -> Result<(Command, Ready)> {
        match self.contestant {
            Contestant::HttpNone => Ok(self.http_log("none")),
            Contestant::HttpAppend => Ok(self.http_log("append")),
            Contestant::HttpSync => Ok(self.http_log("fdatasync")),
            Contestant::RedisAlways | Contestant::RedisAlwaysThreads | Contestant::RedisBenchmark => {
                Ok(self.redis(Some("always")))
            }
            Contestant::RedisEverysec => Ok(self.redis(Some("everysec"))),
            Contestant::Redis | Contestant::RedisThreads => Ok(self.redis(None)),
            _ if self.contestant.is_store() => Ok(self.store()),
            other => bail!("{other} keeps no keys"),
        }
    }

    fn store(&self) -> (Command, Ready) {
        let mut command = Command::new(self.ksf);
        command.arg("store").arg("--data").arg(self.data).args(["--log-bytes", &self.log_bytes.to_string()]);
        command.args(["--listen", &format!("127.0.0.1:{}", self.port)]);
        if self.contestant == Contestant::StoreEpoll {
            command.args(["--engine", "epoll"]);
        }
        if self.contestant == Contestant::StoreNone {
            command.args(["--durability", "none"]);
        }
        if let Some(cpus) = self.cpus {
            command.args(["--cpus", cpus]);
        }
        (command, Ready::Lines(1, "ready"))
    }

    fn redis(&self, fsync: Option<&str>) -> (Command, Ready) {
        let mut command = pinned("redis-server", self.cpus);
        command.args(["--bind", "127.0.0.1", "--port", &self.port.to_string(), "--save", "", "--dir"]).arg(self.data);
        match fsync {
            Some(when) => command.args(["--appendonly", "yes", "--appendfsync", when]),
            None => command.args(["--appendonly", "no"]),
        };
        if matches!(self.contestant, Contestant::RedisThreads | Contestant::RedisAlwaysThreads) {
            command.args(["--io-threads", IO_THREADS]);
        }
        (command, Ready::Port(self.port))
    }

    fn http_log(&self, how: &str) -> (Command, Ready) {
        let mut command = Command::new(self.peer);
        command.args([how, "127.0.0.1", &self.port.to_string(), self.cpus.unwrap_or("-1")]);
        if how != "none" {
            command.arg(self.data.join("file")).arg(self.log_bytes.to_string());
        }
        (command, Ready::Lines(1, "ready"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::display;

    fn shown(contestant: Contestant, cpus: Option<&str>) -> String {
        let [ksf, peer, data] = ["/bin/ksf", "/bin/http_log", "/tmp/data"].map(Path::new);
        let wanted = Wanted { contestant, ksf, peer, cpus, data, log_bytes: 9, port: 7 };
        display(&wanted.command().unwrap().0)
    }

    #[test]
    fn each_server_is_started_as_its_name_says() {
        for (contestant, text) in [
            (Contestant::Store, "ksf store --data data --log-bytes 9 --listen 127.0.0.1:7 --cpus 1"),
            (
                Contestant::StoreNone,
                "ksf store --data data --log-bytes 9 --listen 127.0.0.1:7 --durability none --cpus 1",
            ),
            (
                Contestant::RedisAlways,
                "taskset -c 1 redis-server --bind 127.0.0.1 --port 7 --save  --dir data --appendonly yes --appendfsync always",
            ),
            (
                Contestant::RedisThreads,
                "taskset -c 1 redis-server --bind 127.0.0.1 --port 7 --save  --dir data --appendonly no --io-threads 2",
            ),
            (Contestant::HttpNone, "http_log none 127.0.0.1 7 1"),
            (Contestant::HttpSync, "http_log fdatasync 127.0.0.1 7 1 file 9"),
        ] {
            assert_eq!(shown(contestant, Some("1")), text);
        }
        assert_eq!(shown(Contestant::HttpAppend, None), "http_log append 127.0.0.1 7 -1 file 9");
        assert!(!shown(Contestant::RedisAlways, None).contains("taskset"));
    }
}
