//! nginx: its configurations, its workers, and what can be done to them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::client::WORKER_FIELD;
use super::{BODY_BYTES, COSTLY_BYTES};

/// How long workers may take to come and go.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What can be done to nginx while it runs.
pub(super) struct Nginx {
    conf: Conf,
    master: u32,
}

/// How the workers of nginx share a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// One listener, which one worker at a time waits for (`accept_mutex on`).
    Mutex,
    /// One listener; all workers wait, and the kernel wakes one of them (EPOLLEXCLUSIVE, nginx's way since 1.11.3).
    Exclusive,
    /// A listener for each worker (`listen ... reuseport`).
    Reuseport,
    /// The same, and a worker is woken by the first bytes of a connection (`deferred`), and takes all that there are
    /// (`multi_accept on`).
    Tuned,
}

/// A configuration.
#[derive(Clone, Debug)]
pub(super) struct Conf {
    pub(super) dir: PathBuf,
    pub(super) sharing: Sharing,
    /// The CPU of each worker; None: where the scheduler puts it.
    pub(super) cpus: Vec<Option<usize>>,
    pub(super) port: u16,
    pub(super) names_worker: bool,
    pub(super) costly: bool,
}

impl Nginx {
    pub(super) fn new(conf: Conf, master: u32) -> Nginx {
        Nginx { conf, master }
    }

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
        conf.write().map(drop)
    }

    /// Workers that it was started with.
    pub(super) fn size(&self) -> usize {
        self.conf.cpus.len()
    }
}

impl Conf {
    /// Writes it, and the page if there is one; returns the file for `nginx -c`.
    pub(super) fn write(&self) -> Result<PathBuf> {
        let path = self.dir.join("nginx.conf");
        fs::write(&path, self.text()).context("cannot write the configuration of nginx")?;
        if self.costly {
            fs::write(self.dir.join("page.txt"), page()).context("cannot write a page for nginx")?;
        }
        Ok(path)
    }

    fn text(&self) -> String {
        let path = |name: &str| Path::display(&self.dir.join(name)).to_string();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("  {name}_temp_path {};\n", path(name)))
            .concat();
        let affinity = match self.cpus.iter().copied().collect::<Option<Vec<usize>>>() {
            Some(cpus) => format!("worker_cpu_affinity{};\n", cpus.iter().map(|cpu| mask(*cpu)).collect::<String>()),
            None => String::new(),
        };
        let body = "x".repeat(BODY_BYTES);
        let answer = match self.costly {
            true => format!(
                "root {}; gzip on; gzip_comp_level 9; gzip_http_version 1.0; gzip_types text/plain; try_files /page.txt =404;",
                Path::display(&self.dir)
            ),
            false => format!("return 200 {body};"),
        };
        let field = if self.names_worker { format!("add_header {WORKER_FIELD} $pid; ") } else { String::new() };
        format!(
            "daemon off;\nworker_processes {};\n{affinity}pid {};\nerror_log stderr crit;\n\
             events {{ worker_connections 8192; accept_mutex {}; multi_accept {}; }}\n\
             http {{\n  access_log off;\n  default_type text/plain;\n  keepalive_requests 1000000000;\n{temporary}  server {{\n    \
             listen 127.0.0.1:{} backlog=4096{};\n    location / {{ {field}{answer} }}\n  }}\n}}\n",
            self.cpus.len(),
            path("pid"),
            if self.sharing == Sharing::Mutex { "on" } else { "off" },
            if self.sharing == Sharing::Tuned { "on" } else { "off" },
            self.port,
            match self.sharing {
                Sharing::Mutex | Sharing::Exclusive => "",
                Sharing::Reuseport => " reuseport",
                Sharing::Tuned => " reuseport deferred",
            },
        )
    }

    /// What the command line does not show.
    pub(super) fn in_words(&self) -> String {
        let sharing = match self.sharing {
            Sharing::Mutex => "accept_mutex on",
            Sharing::Exclusive => "EPOLLEXCLUSIVE",
            Sharing::Reuseport => "listen reuseport",
            Sharing::Tuned => "listen reuseport deferred, multi_accept on",
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
fn mask(cpu: usize) -> String {
    format!(" 1{}", "0".repeat(cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf(sharing: Sharing, cpus: &[Option<usize>]) -> String {
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
        assert!(reuseport.contains("multi_accept off;"), "{reuseport}");
        let tuned = conf(Sharing::Tuned, &[None]);
        assert!(tuned.contains(" reuseport deferred;") && tuned.contains("multi_accept on;"), "{tuned}");
        assert!(reuseport.contains("add_header X-Worker $pid;") && reuseport.contains("pid /x/pid;"), "{reuseport}");
    }
}
