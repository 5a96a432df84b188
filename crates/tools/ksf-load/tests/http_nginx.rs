//! http against the server most people know: Debian's nginx, with a master and workers.

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;
use rustix::process::Signal;

const PORT: u16 = 8080;

/// A master with its workers, in a directory of their own. Dropping it ends them.
struct Nginx {
    master: Option<Running>,
    _folder: Folder,
}

impl Nginx {
    fn start(workers: u32) -> Nginx {
        let folder = Folder::new();
        let dir = folder.path("");
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {}/{name};\n", dir.display()))
            .concat();
        let conf = format!(
            "daemon off; worker_processes {workers}; pid {}/pid; error_log stderr error;\n\
             events {{ worker_connections 1024; }}\n\
             http {{ access_log off; keepalive_requests 1000000; {temporary}\
             server {{ listen 127.0.0.1:{PORT}; listen [::1]:{PORT}; location / {{ return 200 hello; }} }} }}\n",
            dir.display()
        );
        std::fs::write(dir.join("nginx.conf"), conf).unwrap();
        let mut command = Command::new("nginx");
        command.arg("-p").arg(&dir).arg("-c").arg(dir.join("nginx.conf")).args(["-e", "stderr"]);
        let nginx = Nginx { master: Some(Running::start(command.stdin(Stdio::null()))), _folder: folder };
        wait_until("nginx listens and has its workers", || {
            TcpStream::connect(("127.0.0.1", PORT)).is_ok() && nginx.workers().len() == workers as usize
        });
        nginx
    }

    fn pid(&self) -> u32 {
        self.master.as_ref().expect("until it is dropped").pid()
    }

    fn workers(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid());
        let list = std::fs::read_to_string(path).expect("the master lives");
        list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // The master takes its workers along.
        self.master.take().map(|master| master.stop(Signal::TERM));
    }
}

/// None: the test is skipped.
fn have_nginx() -> Option<()> {
    program_or_skip("nginx")?;
    own_network_or_skip("a network namespace of its own")
}

#[test]
fn nginx_answers_every_kind_of_load_and_its_whole_tree_is_charged() {
    let Some(()) = have_nginx() else { return };
    let nginx = Nginx::start(2);
    let cpu = cpus()[0];
    for host in ["127.0.0.1", "[::1]"] {
        for (options, requests, connections) in [
            ("-c 2000 -n 16", 2000, 2000),
            ("-c 2000 -n 16 --linger0", 2000, 2000),
            ("-c 2000 -n 16 --close client --force", 2000, 2000),
            ("-c 5000 -n 4 -r 0", 5000, 4),
            ("-c 500 -n 1 -r 10", 500, 50),
            ("-c 1000 --rate 10K", 1000, 1000),
        ] {
            let load = format!("http://{host}:{PORT}/ {options} --expect-bytes 5 --cpu {cpu}");
            let ran = run_http(&format!("{load} --server-pid {}", nginx.pid()));
            ran.assert_clean(requests);
            let run = ran.run();
            assert_eq!((run.connections.established, run.body_bytes), (connections, 5 * requests), "{load}");
            assert_eq!(run.threads.iter().map(|thread| thread.cpu).collect::<Vec<_>>(), [Some(cpu)]);
            // The master does nothing meanwhile: what was used is the workers'.
            let server = run.server.as_ref().unwrap();
            assert_eq!(server.processes, 3, "the master and its workers: {load}");
            assert!(server.cpu_us > 0.0 && server.cpu_us_per_request > 0.0, "{load}: {server:?}");
            let per_connection = server.cpu_us / connections as f64;
            assert!((server.cpu_us_per_connection - per_connection).abs() < 0.01, "{server:?}");
        }
    }
}

#[test]
fn a_killed_worker_is_accounted_for_and_its_successor_is_charged() {
    let Some(()) = have_nginx() else { return };
    let nginx = Nginx::start(1);
    let stop = AtomicBool::new(false);
    let (pid, [worker]) = (nginx.pid(), nginx.workers()[..].try_into().unwrap());
    let ran = std::thread::scope(|scope| {
        scope.spawn(|| {
            // It stops the run however this ends.
            let _stop = StopAtEnd(&stop);
            let ticks = || worker_ticks(worker);
            wait_until("the worker is loaded", || ticks() > 2);
            signal(worker, Signal::KILL);
            wait_until("another worker is loaded", || {
                nginx.workers().iter().any(|pid| *pid != worker && worker_ticks(*pid) > 2)
            });
        });
        run_http_until(&format!("http://127.0.0.1:{PORT}/ -n 8 -r 0 --duration 1h --server-pid {pid}"), &[], &stop)
    });
    // That all requests are accounted for is checked for every run. Here eight connections broke; whether with a request
    // under way depends on the moment.
    let run = ran.run();
    assert!(ran.document().interrupted && run.requests.failed <= 16, "{}", ran.stderr);
    let broken = ["stale", "receive_reset", "closed_unanswered", "closed_early", "connect_reset", "send_reset"];
    assert!(ran.failures().iter().all(|(kind, _)| broken.contains(kind)), "{}", ran.stderr);
    assert_eq!(ran.code, u8::from(run.requests.failed > 0), "{}", ran.stderr);
    assert!(run.connections.established > 8 && run.requests.answered > 16, "{:?}", run.connections);
    // The master, the worker, its successor. What the dead one used is not lost.
    let server = run.server.as_ref().unwrap();
    assert_eq!(server.processes, 3, "{server:?}");
    assert!(server.cpu_us >= 40e3, "two workers used more than two ticks of 10 ms each: {server:?}");
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// User and system time of a process in clock ticks (proc_pid_stat(5)); 0 if it has gone.
fn worker_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let Some((_, fields)) = stat.rsplit_once(')') else { return 0 };
    fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
}
