//! The web servers: how each is started, and which of its workers is on which CPU.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ksf::cpus::CpuSet;

use super::accel;
use super::client::WORKER_FIELD;
use super::nginx::{Conf, Nginx, Sharing};
use super::{BODY_BYTES, WebLoad};
use crate::bench::case::Case;
use crate::bench::contestant::{Contestant, Pinning, Programs, pinned, start};
use crate::cpu::{Switches, allowed_to};
use crate::process::{Ready, Server};

/// A running web server.
pub(super) struct Web {
    pub(super) server: Server,
    pub(super) command: String,
    kind: WebWorkers,
    /// Its configuration.
    dir: PathBuf,
}

/// What is known of the workers.
enum WebWorkers {
    Nginx(Nginx),
    /// So many threads of the process, which names them in the order in which it has made them.
    Threads(usize),
    Unknown,
}

/// What a server is started for.
struct Wanted<'a> {
    programs: &'a Programs,
    contestant: Contestant,
    load: &'a WebLoad,
    /// A worker for each. None: where the scheduler puts it.
    cpus: Vec<Option<usize>>,
    /// The same as a list for taskset.
    list: Option<String>,
    port: u16,
    dir: PathBuf,
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
        let cpus = match &list {
            Some(list) => CpuSet::from_list(list)?.iter().map(Some).collect(),
            None => vec![None; ksf::cpus::allowed()?.len().min(case.connections as usize)],
        };
        let dir = programs.scratch().join(format!("web-{port}"));
        fs::create_dir_all(&dir).context("cannot make a directory for a web server")?;
        let wanted = Wanted { programs, contestant, load, cpus, list, port, dir };
        match contestant {
            Contestant::Demo => wanted.demo(),
            Contestant::Haproxy
            | Contestant::HaproxyShards
            | Contestant::AccelHaproxy
            | Contestant::AccelHaproxyShards => wanted.haproxy(),
            Contestant::Lighttpd | Contestant::AccelLighttpd => wanted.lighttpd(),
            _ => wanted.nginx(),
        }
    }

    pub(super) fn nginx(&self) -> Result<&Nginx> {
        match &self.kind {
            WebWorkers::Nginx(nginx) => Ok(nginx),
            _ => anyhow::bail!("only nginx is disturbed"),
        }
    }

    /// The CPUs that each worker may run on, by the name that its answers have; empty where workers are not known.
    pub(super) fn worker_cpus(&self) -> Result<BTreeMap<String, Vec<usize>>> {
        match &self.kind {
            WebWorkers::Unknown => Ok(BTreeMap::new()),
            WebWorkers::Nginx(nginx) => {
                nginx.workers()?.into_iter().map(|pid| Ok((pid.to_string(), allowed_to(pid)?))).collect()
            }
            // Not what its configuration asks for: HAProxy 2.6 starts without a word where it does not bind them.
            WebWorkers::Threads(count) => {
                let mut threads = threads(self.server.pid())?;
                threads.sort_unstable();
                ensure!(threads.len() == *count, "{} threads, not {count}", threads.len());
                let cpus = |(number, tid): (usize, u32)| Ok((number.to_string(), allowed_to(tid)?));
                threads.into_iter().enumerate().map(cpus).collect()
            }
        }
    }

    pub(super) fn stop(self) -> Result<Switches> {
        let switches = self.server.stop()?;
        fs::remove_dir_all(&self.dir).context("cannot remove the directory of a web server")?;
        Ok(switches)
    }
}

impl Wanted<'_> {
    fn nginx(self) -> Result<Web> {
        let conf = Conf {
            dir: self.dir.clone(),
            sharing: match self.contestant {
                Contestant::NginxMutex => Sharing::Mutex,
                Contestant::NginxReuseport => Sharing::Reuseport,
                Contestant::NginxTuned => Sharing::Tuned,
                _ => Sharing::Exclusive,
            },
            cpus: self.cpus.clone(),
            port: self.port,
            names_worker: self.load.names_worker,
            costly: self.load.costly,
        };
        let mut command = self.run("nginx");
        command.args(["-e", "stderr", "-c"]).arg(conf.write()?);
        let mut web = self.start(command, &conf.in_words(), WebWorkers::Unknown)?;
        // taskset and ksf accel run become what they start.
        let nginx = Nginx::new(conf, web.server.pid());
        nginx.wait_for("its workers", |workers| workers.len() == nginx.size())?;
        web.kind = WebWorkers::Nginx(nginx);
        Ok(web)
    }

    fn haproxy(self) -> Result<Web> {
        let path = self.dir.join("haproxy.cfg");
        let shards = matches!(self.contestant, Contestant::HaproxyShards | Contestant::AccelHaproxyShards);
        fs::write(&path, haproxy_conf(&self.cpus, self.port, shards)).context("cannot write a configuration")?;
        let mut command = self.run("haproxy");
        command.args(["-db", "-q", "-f"]).arg(path);
        let words = format!("{} threads{}", self.cpus.len(), if shards { ", shards by-thread" } else { "" });
        let threads = WebWorkers::Threads(self.cpus.len());
        self.start(command, &words, threads)
    }

    fn lighttpd(self) -> Result<Web> {
        let path = self.dir.join("lighttpd.conf");
        fs::write(self.dir.join("page.txt"), "x".repeat(BODY_BYTES)).context("cannot write a page")?;
        fs::write(&path, lighttpd_conf(&self.dir, self.cpus.len(), self.port))
            .context("cannot write a configuration")?;
        let mut command = self.run("lighttpd");
        command.args(["-D", "-f"]).arg(path);
        let words = format!("{} workers", self.cpus.len());
        self.start(command, &words, WebWorkers::Unknown)
    }

    fn demo(self) -> Result<Web> {
        let mut command = Command::new(&self.programs.ksf);
        command.args(["serve", "demo", "-a", &format!("127.0.0.1:{}", self.port), "-w", &self.cpus.len().to_string()]);
        if let Some(first) = self.cpus.first().copied().flatten() {
            command.args(["-c", &first.to_string()]);
        }
        command.args(["--body-bytes", &BODY_BYTES.to_string()]);
        self.start(command, "", WebWorkers::Unknown)
    }

    /// The program on its CPUs, under ksf accel run where that is asked for.
    fn run(&self, program: &str) -> Command {
        if !self.contestant.is_accelerated() {
            return pinned(program, self.list.as_deref());
        }
        let mut command = pinned(&self.programs.ksf, self.list.as_deref());
        command.args(["accel", "run"]).args((self.contestant == Contestant::AccelOff).then_some("--off"));
        command.args(["--", program]);
        command
    }

    /// Starts it; `words` tell what its command line does not show.
    fn start(self, command: Command, words: &str, kind: WebWorkers) -> Result<Web> {
        let (server, mut command) = start(self.contestant, (command, Ready::Port(self.port)))?;
        if !words.is_empty() {
            command += &format!(" # {words}");
        }
        if self.contestant.is_accelerated() {
            let (off, workers) = (self.contestant == Contestant::AccelOff, self.cpus.len());
            let level = accel::wait_until_accelerated(&self.programs.ksf, server.pid(), self.port, workers, off)?;
            command += &format!(", steered by {}", if off { "nothing" } else { &level });
        }
        Ok(Web { server, command, kind, dir: self.dir })
    }
}

/// The threads of a process.
fn threads(pid: u32) -> Result<Vec<u32>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).with_context(|| format!("{pid} has gone"))?;
    Ok(tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok()).collect())
}

fn haproxy_conf(cpus: &[Option<usize>], port: u16, shards: bool) -> String {
    let map: String =
        cpus.iter().zip(1..).filter_map(|(cpu, thread)| Some(format!("  cpu-map 1/{thread} {}\n", (*cpu)?))).collect();
    format!(
        "global\n  nbthread {}\n{map}  maxconn 8000\ndefaults\n  mode http\n  timeout client 60s\n  timeout server 60s\n  \
         timeout connect 5s\nfrontend web\n  bind 127.0.0.1:{port} backlog 4096{}\n  \
         http-request return status 200 content-type text/plain string {} hdr {WORKER_FIELD} %[thread]\n",
        cpus.len(),
        if shards { " shards by-thread" } else { "" },
        "x".repeat(BODY_BYTES),
    )
}

fn lighttpd_conf(dir: &Path, workers: usize, port: u16) -> String {
    format!(
        "server.document-root = \"{}\"\nserver.bind = \"127.0.0.1\"\nserver.port = {port}\nserver.max-worker = {workers}\n\
         server.listen-backlog = 4096\nserver.max-connections = 8000\nserver.max-fds = 16384\n\
         index-file.names = ( \"page.txt\" )\nmimetype.assign = ( \".txt\" => \"text/plain\" )\n",
        dir.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_of_haproxy_has_its_cpu() {
        let pinned = haproxy_conf(&[Some(0), Some(3)], 81, true);
        assert!(pinned.contains("nbthread 2\n  cpu-map 1/1 0\n  cpu-map 1/2 3\n"), "{pinned}");
        assert!(pinned.contains("bind 127.0.0.1:81 backlog 4096 shards by-thread\n"), "{pinned}");
        let free = haproxy_conf(&[None], 81, false);
        assert!(!free.contains("cpu-map") && !free.contains("shards"), "{free}");
    }
}
