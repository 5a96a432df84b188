//! What of the peers and rights is here.

use super::contestant::Contestant;
use super::measure::Counter;
use super::raw::Tool;
use super::{vm, watch};

/// What of the peers and rights is here, or why not.
pub(super) struct Have {
    kernel: Result<(), String>,
    pub(super) ganesha: Result<(), String>,
    sockperf: Result<(), String>,
    nginx: Result<(), String>,
    haproxy: Result<(), String>,
    lighttpd: Result<(), String>,
    wrk: Result<(), String>,
    ab: Result<(), String>,
    redis: Result<(), String>,
    memcached: Result<(), String>,
    strace: Result<(), String>,
    perf: Result<(), String>,
    pub(super) vm: Result<(), String>,
}

impl Have {
    pub(super) fn look() -> Have {
        let root = match rustix::process::geteuid().is_root() {
            true => Ok(()),
            false => Err("needs root".to_owned()),
        };
        let installed = |program: &str| match find_program(program) {
            true => Ok(()),
            false => Err(format!("{program} is not installed; run: scripts/setup.sh bench")),
        };
        Have {
            kernel: root.clone(),
            ganesha: root.and_then(|()| installed("ganesha.nfsd")).and_then(|()| installed("rpcbind")),
            sockperf: installed("sockperf"),
            nginx: installed("nginx"),
            haproxy: installed("haproxy"),
            lighttpd: installed("lighttpd"),
            wrk: installed("wrk"),
            ab: installed("ab"),
            redis: installed("redis-server"),
            memcached: installed("memcached"),
            strace: installed("strace"),
            perf: watch::look_for_perf(),
            vm: vm::look(),
        }
    }

    /// What counts system calls: perf, or where it may not, strace.
    pub(super) fn counter(&self) -> Result<Counter, String> {
        match (&self.perf, &self.strace) {
            (Ok(()), _) => Ok(Counter::Perf),
            (_, Ok(())) => Ok(Counter::Strace),
            (Err(perf), Err(strace)) => Err(format!("{perf}; {strace}")),
        }
    }

    /// Which tools can tell why a row is lost.
    pub(super) fn evidence(&self) -> impl Iterator<Item = (Tool, &Result<(), String>)> {
        [(Tool::PerfStat, &self.perf), (Tool::PerfReport, &self.perf), (Tool::Strace, &self.strace)].into_iter()
    }

    pub(super) fn contestant(&self, contestant: Contestant) -> Result<(), String> {
        match contestant {
            Contestant::Kernel => self.kernel.clone(),
            Contestant::Ganesha => self.ganesha.clone(),
            Contestant::Sockperf => self.sockperf.clone(),
            Contestant::NginxMutex | Contestant::NginxExclusive | Contestant::NginxReuseport => self.nginx.clone(),
            Contestant::Accel | Contestant::AccelOff => self.nginx.clone(),
            Contestant::Haproxy
            | Contestant::HaproxyShards
            | Contestant::AccelHaproxy
            | Contestant::AccelHaproxyShards => self.haproxy.clone(),
            Contestant::Lighttpd | Contestant::AccelLighttpd => self.lighttpd.clone(),
            Contestant::Wrk => self.nginx.clone().and_then(|()| self.wrk.clone()),
            Contestant::Ab => self.nginx.clone().and_then(|()| self.ab.clone()),
            Contestant::Redis | Contestant::AccelRedis | Contestant::QueueRedis | Contestant::QueueOffRedis => {
                self.redis.clone()
            }
            Contestant::Memcached
            | Contestant::AccelMemcached
            | Contestant::QueueMemcached
            | Contestant::QueueOffMemcached => self.memcached.clone(),
            _ => Ok(()),
        }
    }
}

fn find_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}
