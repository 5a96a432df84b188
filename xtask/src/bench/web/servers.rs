//! The web servers, and each way to share a listener between the workers of nginx.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::client::WORKER_FIELD;
use super::{BODY_BYTES, COSTLY_BYTES, WebLoad};
use crate::bench::case::Case;
use crate::bench::contestant::{Contestant, Pinning, Programs, pinned, start};
use crate::cpu;
use crate::process::{Ready, Server};

/// How long workers may take to come and go.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A running web server.
pub(super) struct Web {
    pub(super) server: Server,
    pub(super) command: String,
    /// Where it is nginx.
    nginx: Option<Nginx>,
}

/// What can be done to nginx while it runs.
pub(super) struct Nginx {
    conf: Conf,
    path: PathBuf,
    master: u32,
}

/// How the workers of nginx share a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    /// One listener, which one worker at a time waits for (`accept_mutex on`).
    Mutex,
    /// One listener; all workers wait, and the kernel wakes one of them (EPOLLEXCLUSIVE, nginx's way since 1.11.3).
    Exclusive,
    /// A listener for each worker (`listen ... reuseport`).
    Reuseport,
}

#[derive(Clone, Debug)]
struct Conf {
    dir: PathBuf,
    sharing: Sharing,
    /// The CPU of each worker; None: where the scheduler puts it.
    cpus: Vec<Option<u32>>,
    port: u16,
    names_worker: bool,
    costly: bool,
}

impl Web {
    pub(super) fn start(
        programs: &Programs,
        contestant: Contestant,
        case: &Case,
        load: &WebLoad,
        pinning: &Pinning,
        port: u16,
    ) -> Result<Web> {
        let list = pinning.server(case.connections);
        let cpus: Vec<Option<u32>> = match &list {
            Some(list) => cpu::parse_cpu_list(list)?.into_iter().map(Some).collect(),
            None => vec![None; cpu::allowed()?.len().min(case.connections as usize)],
        };
        let sharing = match contestant {
            Contestant::Demo => return Web::demo(programs, &cpus, port),
            Contestant::NginxMutex => Sharing::Mutex,
            Contestant::NginxReuseport => Sharing::Reuseport,
            _ => Sharing::Exclusive,
        };
        let dir = programs.scratch().join(format!("nginx-{port}"));
        fs::create_dir_all(&dir).context("cannot make a directory for nginx")?;
        let conf = Conf { dir, sharing, cpus, port, names_worker: load.names_worker, costly: load.costly };
        let path = conf.dir.join("nginx.conf");
        fs::write(&path, conf.text()).context("cannot write the configuration of nginx")?;
        if conf.costly {
            fs::write(conf.dir.join("page.txt"), page()).context("cannot write a page for nginx")?;
        }
        let mut command = match contestant {
            Contestant::Accel | Contestant::AccelOff => {
                let mut command = pinned(&programs.ksf, list.as_deref());
                command.args(["accel", "run"]).args((contestant == Contestant::AccelOff).then_some("--off"));
                command.args(["--", "nginx"]);
                command
            }
            _ => pinned("nginx", list.as_deref()),
        };
        command.args(["-e", "stderr", "-c"]).arg(&path);
        let (server, command) = start(contestant, (command, Ready::Port(port)))?;
        // taskset and ksf accel run become what they start.
        let master = server.pid();
        let nginx = Nginx { conf, path, master };
        let count = nginx.conf.cpus.len();
        nginx.wait_for("its workers", |workers| workers.len() == count)?;
        let command = format!("{command} # {}", nginx.conf.in_words());
        Ok(Web { server, command, nginx: Some(nginx) })
    }

    fn demo(programs: &Programs, cpus: &[Option<u32>], port: u16) -> Result<Web> {
        let mut command = Command::new(&programs.ksf);
        command.args(["serve", "demo", "-a", &format!("127.0.0.1:{port}"), "-w", &cpus.len().to_string()]);
        if let Some(first) = cpus.first().copied().flatten() {
            command.args(["-c", &first.to_string()]);
        }
        command.args(["--body-bytes", &BODY_BYTES.to_string()]);
        let (server, command) = start(Contestant::Demo, (command, Ready::Port(port)))?;
        Ok(Web { server, command, nginx: None })
    }

    pub(super) fn nginx(&self) -> Result<&Nginx> {
        self.nginx.as_ref().context("only nginx is disturbed")
    }

    /// The CPUs that each worker may run on; empty where workers are not known.
    pub(super) fn worker_cpus(&self) -> Result<BTreeMap<u32, Vec<u32>>> {
        let Some(nginx) = &self.nginx else { return Ok(BTreeMap::new()) };
        nginx.workers()?.into_iter().map(|pid| Ok((pid, cpu::allowed_to(pid)?))).collect()
    }

    pub(super) fn stop(self) -> Result<()> {
        self.server.stop()?;
        match self.nginx {
            Some(nginx) => fs::remove_dir_all(&nginx.conf.dir).context("cannot remove the directory of nginx"),
            None => Ok(()),
        }
    }
}

impl Nginx {
    pub(super) fn port(&self) -> u16 {
        self.conf.port
    }

    pub(super) fn master(&self) -> u32 {
        self.master
    }

    /// The workers that live. The master has other children, too, where it is accelerated.
    pub(super) fn workers(&self) -> Result<Vec<u32>> {
        let path = format!("/proc/{0}/task/{0}/children", self.master);
        let children = fs::read_to_string(path).context("the master of nginx has gone")?;
        let is_worker = |pid: &u32| {
            let title = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&title).starts_with("nginx: worker process")
        };
        Ok(children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_worker).collect())
    }

    /// Waits for what is true of the workers.
    pub(super) fn wait_for(&self, what: &str, mut is_so: impl FnMut(&[u32]) -> bool) -> Result<()> {
        let deadline = Instant::now() + WORKERS_TIMEOUT;
        while !is_so(&self.workers()?) {
            ensure!(Instant::now() < deadline, "waited {WORKERS_TIMEOUT:?} for {what}: {:?}", self.workers()?);
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Writes the configuration anew, with so many workers.
    pub(super) fn resize(&self, workers: usize) -> Result<()> {
        let mut conf = self.conf.clone();
        conf.cpus.truncate(workers.max(1));
        fs::write(&self.path, conf.text()).context("cannot write the configuration of nginx")
    }

    /// Workers that it was started with.
    pub(super) fn size(&self) -> usize {
        self.conf.cpus.len()
    }
}

impl Conf {
    fn text(&self) -> String {
        let path = |name: &str| Path::display(&self.dir.join(name)).to_string();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("  {name}_temp_path {};\n", path(name)))
            .concat();
        let affinity = match self.cpus.iter().copied().collect::<Option<Vec<u32>>>() {
            Some(cpus) => format!("worker_cpu_affinity{};\n", cpus.iter().map(|cpu| mask(*cpu)).collect::<String>()),
            None => String::new(),
        };
        let body = "x".repeat(BODY_BYTES);
        let answer = match self.costly {
            true => format!(
                "root {}; gzip on; gzip_comp_level 9; gzip_types text/plain; try_files /page.txt =404;",
                Path::display(&self.dir)
            ),
            false => format!("return 200 {body};"),
        };
        let field = if self.names_worker { format!("add_header {WORKER_FIELD} $pid; ") } else { String::new() };
        format!(
            "daemon off;\nworker_processes {};\n{affinity}pid {};\nerror_log stderr crit;\n\
             events {{ worker_connections 8192; accept_mutex {}; }}\n\
             http {{\n  access_log off;\n  default_type text/plain;\n  keepalive_requests 1000000000;\n{temporary}  server {{\n    \
             listen 127.0.0.1:{} backlog=4096{};\n    location / {{ {field}{answer} }}\n  }}\n}}\n",
            self.cpus.len(),
            path("pid"),
            if self.sharing == Sharing::Mutex { "on" } else { "off" },
            self.port,
            if self.sharing == Sharing::Reuseport { " reuseport" } else { "" },
        )
    }

    /// What the command line does not show.
    fn in_words(&self) -> String {
        let sharing = match self.sharing {
            Sharing::Mutex => "accept_mutex on",
            Sharing::Exclusive => "EPOLLEXCLUSIVE",
            Sharing::Reuseport => "listen reuseport",
        };
        format!("{} workers, {sharing}", self.cpus.len())
    }
}

/// Text that takes a while to compress: words in an order that does not repeat.
fn page() -> String {
    let mut state = 1u32;
    let mut text = String::new();
    while text.len() < COSTLY_BYTES {
        // Numerical Recipes' generator: any that never repeats here will do.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text += ["accept ", "queue ", "worker ", "listen\n", "kernel ", "socket ", "CPU ", "local "]
            [(state >> 29) as usize];
    }
    text
}

/// A CPU as nginx names it: " 100" is the third.
fn mask(cpu: u32) -> String {
    format!(" 1{}", "0".repeat(cpu as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(sharing: Sharing, cpus: &[Option<u32>]) -> String {
        let dir = PathBuf::from("/x");
        Conf { dir, sharing, cpus: cpus.to_vec(), port: 81, names_worker: sharing == Sharing::Reuseport, costly: false }
            .text()
    }

    #[test]
    fn the_page_is_long_and_does_not_repeat() {
        let page = page();
        assert!(page.len() >= COSTLY_BYTES);
        assert!(!page[100..].contains(&page[..100]));
    }

    #[test]
    fn each_way_of_sharing_is_configured() {
        let mutex = conf(Sharing::Mutex, &[None, None]);
        assert!(mutex.contains("accept_mutex on;") && mutex.contains("backlog=4096;"), "{mutex}");
        assert!(mutex.contains("worker_processes 2;") && !mutex.contains("affinity"), "{mutex}");
        let exclusive = conf(Sharing::Exclusive, &[Some(0), Some(3)]);
        assert!(exclusive.contains("accept_mutex off;") && !exclusive.contains(WORKER_FIELD), "{exclusive}");
        assert!(exclusive.contains("worker_cpu_affinity 1 1000;"), "{exclusive}");
        let reuseport = conf(Sharing::Reuseport, &[Some(1)]);
        assert!(reuseport.contains("listen 127.0.0.1:81 backlog=4096 reuseport;"), "{reuseport}");
        assert!(reuseport.contains("add_header X-Worker $pid;") && reuseport.contains("pid /x/pid;"), "{reuseport}");
    }
}
