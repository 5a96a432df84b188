//! What of the peers and rights is here.

use super::contestant::Contestant;
use super::vm;

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
    pub(super) strace: Result<(), String>,
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
            vm: vm::look(),
        }
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
