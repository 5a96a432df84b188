//! `ksf accel run` and `status` with real programs, in a network namespace and a /run of the test's own. Needs root.

use crate::support;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use crate::support::{Folder, PATIENCE, built_folder, ksf_for_all, stderr, stdout, wait_until};
use ksf_test::compile::cc;
use ksf_test::{Running, cpus, ip, is_alive, on_cpu, two_cpus_or_skip};
use rustix::process::Signal;
use serde_json::Value;

const ADDRESS: &str = "127.0.0.1:8080";

/// nginx in the foreground, with everything it writes in one folder.
const NGINX: &str = "\
daemon off;
worker_processes 2;
pid nginx.pid;
error_log error.log;
events { worker_connections 512; }
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server { listen LISTEN; location / { return 200 'served\\n'; } }
}
";

/// Where cargo leaves the library for tests.
fn built_library() -> PathBuf {
    built_folder().join("libksf_preload.so")
}

/// `ksf accel run FLAGS -- ...` of the build.
fn accel_run(flags: &[&str]) -> Command {
    let mut command = accel_run_of(Path::new(env!("CARGO_BIN_EXE_ksf")), flags);
    command.env("KSF_LIB_DIR", built_library().parent().unwrap());
    command
}

/// Without what the environment of this test may say.
fn accel_run_of(ksf: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(ksf);
    command.args(["accel", "run"]).args(flags).arg("--").stdin(Stdio::null());
    command.env_remove("LD_PRELOAD").env_remove("KSF_ACCEL").env_remove("KSF_LIB_DIR").env_remove("KSF_ACCEL_KEEP");
    command
}

/// A program that runs, with a group of its own, so that no worker outlives a test that fails.
fn start(mut command: Command) -> Running {
    // Shells start what they put in the background with SIGINT ignored, and so everything that comes from there: a
    // program without a handler of its own (HAProxy) does not end by it.
    let heed = || {
        // SAFETY: SIG_DFL is no handler.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: one system call between fork and exec.
    unsafe { command.pre_exec(heed) };
    Running::start_group(command.stdout(Stdio::null()))
}

fn start_nginx(folder: &Folder, flags: &[&str]) -> Running {
    start_nginx_by(accel_run(flags), folder, ADDRESS)
}

fn start_nginx_by(mut command: Command, folder: &Folder, listen: &str) -> Running {
    let config = folder.write("nginx.conf", NGINX.replace("LISTEN", listen));
    let here = format!("{}/", folder.path("").display());
    command.args(["nginx", "-p", &here, "-e", "error.log", "-c"]).arg(config);
    start(command)
}

/// `ksf accel status ARGS`, expecting success.
fn status(args: &[&str]) -> String {
    let output = support::run(&[&["accel", "status"], args].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    stdout(&output)
}

/// All programs that are accelerated in this test's /run.
fn programs() -> Vec<Value> {
    let document: Value = serde_json::from_str(&status(&["--json"])).expect("one JSON document");
    assert_eq!(document["schema"], "ksf-accel/1");
    document["programs"].as_array().expect("a list").clone()
}

/// The one program, as soon as so many workers of it are ready.
fn accelerated(workers: usize) -> Value {
    let mut found = Value::Null;
    wait_until("the workers are ready", || {
        found = programs().pop().unwrap_or_default();
        let all = found["workers"].as_array().map_or(&[][..], Vec::as_slice);
        all.len() == workers && all.iter().all(|worker| worker["ready"].as_array().is_some_and(|it| !it.is_empty()))
    });
    found
}

fn sum(program: &Value, counters: &[&str]) -> u64 {
    let all = program["workers"].as_array().unwrap().iter().map(|worker| &worker["counters"]);
    let all = all.chain([&program["ended_workers"]]);
    all.flat_map(|one| counters.iter().map(|name| one[*name].as_u64().unwrap())).sum()
}

const ACCEPTED: [&str; 3] = ["accepted_own", "accepted_fallback", "accepted_stolen"];

/// One request on a connection of its own.
fn request(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn is_served(address: SocketAddr) -> bool {
    request(address).is_ok_and(|answer| answer.starts_with("HTTP/1.1 200") && answer.ends_with("served\n"))
}

fn address() -> SocketAddr {
    ADDRESS.parse().unwrap()
}

/// So many requests from one CPU, all served.
fn requests_from(cpu: usize, count: usize) {
    let served = answers_from(cpu, count).iter().filter(|answer| answer.ends_with("served\n")).count();
    assert_eq!(served, count);
}

/// What is answered to so many requests from one CPU.
fn answers_from(cpu: usize, count: usize) -> Vec<String> {
    on_cpu(cpu, || (0..count).map(|_| request(address()).unwrap_or_default()).collect())
}

fn kill(pid: u64, signal: Signal) {
    ksf_test::signal(pid as u32, signal);
}

/// No holder, no socket, no program of the kernel's: the network namespace and /run are as they were.
fn nothing_is_left() {
    let folder = Path::new("/run/ksf/accel");
    let is_empty = || std::fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none());
    wait_until("the status socket is gone", is_empty);
    wait_until("the holder's socket and all listeners are gone", || {
        let output = Command::new("ss").args(["-Hltxn"]).output().expect("ss of iproute2");
        output.status.success() && stdout(&output).trim().is_empty()
    });
    let namespace = std::fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
    wait_until("the steering is gone", || {
        let output = Command::new("bpftool").args(["-j", "link", "show"]).output().expect("bpftool");
        let links: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        !links.as_array().unwrap().iter().any(|link| link["netns_ino"].as_u64() == Some(namespace))
    });
}

#[test]
fn nginx_serves_where_connections_arrive_and_leaves_nothing() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let nginx = start_nginx(&folder, &[]);
    let program = accelerated(2);
    let holder = program["pid"].as_u64().unwrap();
    // How many are steered to their CPU's worker depends on the load: one that does not run for a while is passed over.
    // The tests of ksf-accel and ksf-preload count them, with longer limits.
    let (mut all, mut program) = (0, Value::Null);
    wait_until("each worker gets connections of its CPU", || {
        cpus().iter().for_each(|cpu| requests_from(*cpu, 100));
        all += 100 * cpus().len() as u64;
        program = accelerated(2);
        let workers = program["workers"].as_array().unwrap();
        workers.iter().all(|worker| worker["counters"]["steered_local"].as_u64().unwrap() > 0)
    });
    assert_eq!(sum(&program, &ACCEPTED), all, "{program:#}");
    let pids: Vec<u64> = program["processes"].as_array().unwrap().iter().map(|pid| pid.as_u64().unwrap()).collect();
    assert!(pids.contains(&nginx.pid().into()), "{program:#}");
    if cpus().len() == 2 {
        let workers = program["workers"].as_array().unwrap();
        assert_ne!(workers[0]["cpu"], workers[1]["cpu"], "{program:#}");
        for worker in workers {
            // Bound to its home.
            let status = std::fs::read_to_string(format!("/proc/{}/status", worker["pid"])).unwrap();
            assert!(status.contains(&format!("Cpus_allowed_list:\t{}\n", worker["cpu"])), "{status}");
        }
    }
    let text = status(&[&nginx.pid().to_string()]);
    assert!(text.contains(&format!("{ADDRESS}: accelerated by sk_lookup; workers 2, queues 2")), "{text}");
    assert!(text.starts_with("nginx -p ") && text.contains(&format!("(holder {holder})")), "{text}");
    assert_eq!(status(&[&holder.to_string()]).lines().next(), text.lines().next());

    nginx.stop(Signal::TERM);
    nothing_is_left();
    wait_until("the holder has ended", || !is_alive(holder as u32));
    assert_eq!(status(&[]), "no program is accelerated\n");
    let unknown = support::run(&["accel", "status", "1"]);
    assert_eq!(unknown.status.code(), Some(69));
    assert!(stderr(&unknown).contains("process 1 is not accelerated"), "{}", stderr(&unknown));
}

/// As distributions start it: the process that is asked for is neither the one that was started nor a worker.
#[test]
fn a_daemon_is_found_by_its_master() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let config = folder.write("nginx.conf", NGINX.replace("LISTEN", ADDRESS).replace("daemon off", "daemon on"));
    let here = format!("{}/", folder.path("").display());
    let mut command = accel_run(&[]);
    command.args(["nginx", "-p", &here, "-e", "error.log", "-c"]).arg(config);
    assert!(command.status().unwrap().success());
    accelerated(2);
    let master = std::fs::read_to_string(folder.path("nginx.pid")).unwrap();
    let master = master.trim();
    assert!(status(&[master]).contains(&format!("{ADDRESS}: accelerated by sk_lookup")));
    let paused = support::run(&["accel", "pause", master]);
    assert_eq!(paused.status.code(), Some(0), "{}", stderr(&paused));
    // The process that started this test is no master of it.
    let parent = std::os::unix::process::parent_id().to_string();
    assert_eq!(support::run(&["accel", "status", &parent]).status.code(), Some(69));
    kill(master.parse().unwrap(), Signal::TERM);
    nothing_is_left();
}

/// They share one socket with SO_REUSEPORT, which is divided. Without `multi-queue` they keep what they accept.
#[test]
fn haproxy_threads_have_a_queue_each() {
    haproxy("tune.listener.multi-queue off", "");
}

/// The sockets are HAProxy's own then, and no thread takes what was steered to another, unless it is called for help.
#[test]
fn haproxy_threads_with_shards_take_what_is_steered_to_them() {
    haproxy("", "shards by-thread");
}

/// HAProxy with two threads, with these settings of its own and of its `bind`.
fn haproxy(settings: &str, bind: &str) {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let config = folder.write(
        "haproxy.cfg",
        format!(
            "global\n  nbthread 2\n  maxconn 200\n  {settings}\ndefaults\n  mode http\n  timeout client 30s\n  \
             timeout connect 30s\n  timeout server 30s\nfrontend f\n  bind {ADDRESS} {bind}\n  \
             http-request return status 200 content-type text/plain string \"served\\n\"\n"
        ),
    );
    let mut command = accel_run(&[]);
    command.args(["haproxy", "-db", "-f"]).arg(config);
    let mut haproxy = start(command);
    accelerated(2);
    cpus().iter().for_each(|cpu| requests_from(*cpu, 50));
    let program = accelerated(2);
    assert_eq!(sum(&program, &ACCEPTED), cpus().len() as u64 * 50, "{program:#}");
    assert!(sum(&program, &["accepted_own"]) > 0, "{program:#}");
    takes_its_own(&program);
    let listener = &program["listeners"][0];
    assert_eq!(listener["queues"].as_array().unwrap().len(), 2, "{program:#}");
    assert_eq!((&listener["trouble"], &listener["own_reuseport"]), (&Value::Null, &Value::Bool(!bind.is_empty())));
    let threads: Vec<&Value> = program["workers"].as_array().unwrap().iter().map(|worker| &worker["tid"]).collect();
    assert_ne!(threads[0], threads[1], "{program:#}");
    // Ends by this signal, as it would by itself.
    haproxy.signal(Signal::INT);
    haproxy.wait();
    nothing_is_left();
}

fn takes_its_own(program: &Value) {
    for worker in program["workers"].as_array().unwrap() {
        let count = |name: &str| worker["counters"][name].as_u64().unwrap();
        let steered = count("steered_local") + count("steered_remote");
        assert!(count("accepted_own") <= steered, "it took what was steered to another: {program:#}");
    }
}

#[test]
fn reloads_and_killed_workers_lose_no_connection() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let nginx = start_nginx(&folder, &[]);
    accelerated(2);
    let (stop, served, failed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let counter = if is_served(address()) { &served } else { &failed };
                    counter.fetch_add(1, Relaxed);
                }
            });
        }
        let stop_at_the_end = Stop(&stop);
        for _ in 0..10 {
            let before: Vec<u64> = worker_pids(&accelerated(2));
            let at = served.load(Relaxed);
            nginx.signal(Signal::HUP);
            wait_until("new workers have come", || {
                let now = worker_pids(&programs()[0]);
                now.len() == 2 && now.iter().all(|pid| !before.contains(pid))
            });
            wait_until("requests go on", || served.load(Relaxed) > at + 20);
        }
        drop(stop_at_the_end);
    });
    assert_eq!(failed.load(Relaxed), 0, "of {}", served.load(Relaxed));

    // Connections that wait for a worker that is killed are served by others: this one cannot accept any more.
    let program = accelerated(2);
    let victim = program["workers"][0].clone();
    let pid = victim["pid"].as_u64().unwrap();
    kill(pid, Signal::STOP);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..40).map(|_| scope.spawn(|| is_served(address()))).collect();
        wait_until("somebody is served", || clients.iter().any(|client| client.is_finished()));
        kill(pid, Signal::KILL);
        let served = clients.into_iter().filter_map(|client| client.join().ok()).filter(|served| *served).count();
        assert_eq!(served, 40);
    });
    nginx.stop(Signal::TERM);
    nothing_is_left();
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn worker_pids(program: &Value) -> Vec<u64> {
    program["workers"].as_array().unwrap().iter().map(|worker| worker["pid"].as_u64().unwrap()).collect()
}

#[test]
fn a_killed_holder_or_program_leaves_the_rest_working() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let nginx = start_nginx(&folder, &[]);
    let holder = accelerated(2)["pid"].as_u64().unwrap();
    kill(holder, Signal::KILL);
    wait_until("it is gone", || !is_alive(holder as u32));
    requests_from(cpus()[0], 20);
    assert_eq!(status(&[]), "no program is accelerated\n");
    nginx.stop(Signal::TERM);
    nothing_is_left();

    // Without its master, nginx's workers serve on; the holder stays for them.
    let folder = Folder::new();
    let mut nginx = start_nginx(&folder, &[]);
    let workers = worker_pids(&accelerated(2));
    nginx.signal(Signal::KILL);
    assert_eq!(nginx.wait().signal(), Some(9));
    requests_from(cpus()[0], 20);
    assert_eq!(worker_pids(&accelerated(2)), workers);
    for pid in workers {
        kill(pid, Signal::TERM);
    }
    nothing_is_left();
}

/// Runs a shell script under `ksf accel run`, to its end.
fn shell(flags: &[&str], script: &str) -> Output {
    accel_run(flags).args(["sh", "-c", script]).output().unwrap()
}

#[test]
fn process_id_exit_status_and_signals_are_the_programs_own() {
    let Some(()) = support::private_network_and_run() else { return };
    let output = shell(&[], "exit 7");
    assert_eq!((output.status.code(), stderr(&output)), (Some(7), String::new()));
    let output = shell(&[], "kill -TERM $$");
    assert_eq!(output.status.signal(), Some(15));
    // It has no children but its own.
    let output = shell(&[], "read children < /proc/$$/task/$$/children; echo \"[$children]\"");
    assert_eq!(stdout(&output), "[]\n");

    let mut command = accel_run(&[]);
    command.args(["sh", "-c", "echo $$; read line; echo \"$line\""]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Running::start(&mut command);
    assert_eq!(child.out.line(), child.pid().to_string());
    // The holder keeps none of the program's pipes open, nor takes from them.
    child.tell("to the program");
    assert_eq!(child.out.line(), "to the program");
    assert_eq!(child.out.within(PATIENCE), None);
    assert!(child.wait().success());

    let missing = accel_run(&[]).arg("/no/such/program").output().unwrap();
    assert_eq!(missing.status.code(), Some(66));
    assert!(stderr(&missing).starts_with("ksf: cannot run /no/such/program"), "{}", stderr(&missing));
    nothing_is_left();
}

#[test]
fn a_program_that_cannot_be_helped_is_run_as_it_is() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let source =
        folder.write("main.c", "#include <stdlib.h>\nint main(void) { return getenv(\"LD_PRELOAD\") ? 1 : 5; }");
    let program = folder.path("static");
    cc(source, &program, &["-static"]);
    let says = |command: &mut Command, code: i32| {
        let output = command.output().unwrap();
        let text = stderr(&output);
        assert_eq!((output.status.code(), text.lines().count()), (Some(code), 1), "{text}");
        assert!(!Path::new("/run/ksf").exists(), "a holder was started");
        text
    };
    let text = says(accel_run(&[]).arg(&program), 5);
    assert!(text.contains("is not accelerated: it is statically linked"), "{text}");
    let script = folder.write("script", format!("#!{}\n", program.display()));
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(says(accel_run(&[]).arg(&script), 5).contains("statically linked"));
    // Nor where ksf is not whole.
    let text = says(accel_run(&[]).env("KSF_LIB_DIR", "/nowhere").args(["sh", "-c", "exit 6"]), 6);
    assert!(text.contains("libksf_accel.so is not in /nowhere"), "{text}");
    let text = says(accel_run(&["--steering", "lookup"]).env("KSF_LIB_DIR", "/a b").args(["sh", "-c", "exit 6"]), 6);
    assert!(text.contains("sh is not accelerated"), "{text}");
    // Wrong flags are errors, and nothing runs.
    let wrong = accel_run(&["--cpus", "1000"]).args(["sh", "-c", "exit 6"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(69), "{}", stderr(&wrong));
}

#[test]
fn flags_choose_cpus_pinning_and_steering() {
    let Some(()) = support::private_network_and_run() else { return };
    let cpu = cpus()[0];
    let list = cpu.to_string();
    let folder = Folder::new();
    let nginx = start_nginx(&folder, &["--cpus", &list, "--no-pin", "--steering", "classic"]);
    let program = accelerated(2);
    assert_eq!(program["level"], "classic_bpf");
    assert!(program["refused"][0]["why"].as_str().unwrap().contains("classic_bpf only"), "{program:#}");
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = own.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap();
    for worker in program["workers"].as_array().unwrap() {
        assert_eq!(worker["cpu"], cpu, "{program:#}");
        let status = std::fs::read_to_string(format!("/proc/{}/status", worker["pid"])).unwrap();
        assert!(status.contains(mask), "not left where it was: {status}");
    }
    requests_from(cpu, 20);
    assert_eq!(sum(&accelerated(2), &ACCEPTED), 20);
    nginx.stop(Signal::TERM);
    nothing_is_left();

    let folder = Folder::new();
    let nginx = start_nginx(&folder, &["--off"]);
    wait_until("it is served", || is_served(address()));
    requests_from(cpu, 20);
    let program = programs().pop().expect("a holder");
    assert!(sum(&program, &ACCEPTED) == 0 && program["workers"].as_array().unwrap().is_empty(), "{program:#}");
    assert!(status(&[]).contains("not accelerated because switched off"), "{}", status(&[]));
    nginx.stop(Signal::TERM);
    nothing_is_left();

    let folder = Folder::new();
    let nginx = start_nginx(&folder, &["--steering", "plain"]);
    wait_until("it is served", || is_served(address()));
    let text = status(&[]);
    assert!(text.contains(&format!("{ADDRESS}: not accelerated because: no mechanism works here")), "{text}");
    nginx.stop(Signal::TERM);
    nothing_is_left();
}

#[test]
fn a_running_program_is_switched_off_and_on_again() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let nginx = start_nginx(&folder, &[]);
    let program = accelerated(2);
    let [holder, worker] = [&program["pid"], &program["workers"][0]["pid"]].map(ToString::to_string);
    let switch = |word: &str, pid: &str| {
        let output = support::run(&["accel", word, pid]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stderr(&output)
    };
    let own = || sum(&programs()[0], &["accepted_own"]);
    let fallback = || sum(&programs()[0], &["accepted_fallback"]);
    requests_from(cpus()[0], 20);
    assert!(own() > 0);
    // By any of its processes.
    let text = switch("pause", &worker);
    assert!(text.contains("nginx -p") && text.contains("is switched off: its own listener"), "{text}");
    let (own_before, before) = (own(), fallback());
    requests_from(cpus()[0], 20);
    assert_eq!((own(), fallback()), (own_before, before + 20));
    assert!(status(&[]).contains(&format!("{ADDRESS}: not accelerated because switched off")), "{}", status(&[]));
    assert!(switch("resume", &holder).contains("is switched on"));
    requests_from(cpus()[0], 20);
    assert!(own() > own_before, "{:#}", programs()[0]);
    let unknown = support::run(&["accel", "pause", "1"]);
    assert_eq!((unknown.status.code(), stdout(&unknown)), (Some(69), String::new()));
    assert!(stderr(&unknown).contains("process 1 is not accelerated"), "{}", stderr(&unknown));
    nginx.stop(Signal::TERM);
    nothing_is_left();
}

/// As it is told by the flag of `ksf accel run` and by `ksf accel flow check`.
#[test]
fn connections_that_a_program_opens_have_ports_of_their_cpu() {
    let Some(()) = support::private_network_and_run() else { return };
    ip("address add 10.9.0.1/32 dev lo");
    let service = std::net::TcpListener::bind("10.9.0.1:0").unwrap();
    let script = format!("exec 3<>/dev/tcp/10.9.0.1/{}", service.local_addr().unwrap().port());
    let document = support::run(&["accel", "flow", "check", "--json"]);
    let document: Value = serde_json::from_slice(&document.stdout).expect("JSON");
    let layout = document["layout"].as_str().unwrap_or_else(|| panic!("{document:#}"));
    for (flag, layout) in [("--source-ports", layout), ("--source-ports=4:2500:0-1", "4:2500:0-1")] {
        let layout: ksf_accel::flow::Layout = layout.parse().unwrap();
        for cpu in layout.cpus().iter().filter(|cpu| cpus().contains(cpu)) {
            let mut command = accel_run(&[flag]);
            command.args(["taskset", "-c", &cpu.to_string(), "bash", "-c", &script]);
            let output = command.output().unwrap();
            assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
            let port = service.accept().unwrap().1.port();
            assert_eq!(layout.cpu_of_port(port), Some(cpu), "{flag}: {port}");
        }
    }
    let mut command = accel_run(&["--source-ports"]);
    command.args(["sleep", "60"]);
    let running = start(command);
    let told = |program: &Value| program["program"][0] == "sleep" && program["source_ports"] == layout;
    wait_until("its holder tells the layout", || programs().iter().any(told));
    assert!(status(&[]).contains(&format!("source ports of its connections: {layout}")), "{}", status(&[]));
    drop(running);
    let wrong = accel_run(&["--source-ports=13"]).arg("true").output().unwrap();
    assert_eq!(wrong.status.code(), Some(65));
    assert!(stderr(&wrong).contains("not a port layout"), "{}", stderr(&wrong));
    drop(service);
    nothing_is_left();
}

#[test]
fn without_rights_a_weaker_mechanism_is_used_and_named() {
    let Some(()) = support::private_network_and_run() else { return };
    let (folder, shared) = (Folder::new(), Folder::new());
    let ksf = ksf_for_all(&shared);
    std::fs::copy(built_library(), shared.path("libksf_accel.so")).unwrap();
    for path in [folder.path(""), shared.path("")] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    std::os::unix::fs::chown(folder.path(""), Some(65534), Some(65534)).unwrap();
    let as_nobody = |mut command: Command| {
        command.uid(65534).gid(65534).env("XDG_RUNTIME_DIR", folder.path("")).current_dir("/");
        command
    };
    let mut command = as_nobody(accel_run_of(&ksf, &[]));
    command.stderr(std::fs::File::create(folder.path("said")).unwrap());
    let nginx = start_nginx_by(command, &folder, ADDRESS);
    wait_until("it is served", || is_served(address()));
    let mut ask = Command::new(&ksf);
    ask.args(["accel", "status"]);
    let mut ask = as_nobody(ask);
    let mut text = String::new();
    wait_until("both workers are ready", || {
        text = stdout(&ask.output().unwrap());
        text.contains("workers 2")
    });
    assert!(text.contains("accelerated by classic_bpf") && text.contains("not sk_lookup: not permitted"), "{text}");
    cpus().iter().for_each(|cpu| requests_from(*cpu, 20));
    let said = std::fs::read_to_string(folder.path("said")).unwrap();
    let expected = "connections are steered by classic_bpf, not by better means (sk_lookup: not permitted: the process \
                    lacks CAP_BPF";
    assert!(said.contains(expected), "{said}");
    // Without a folder nothing can be known, which is not the same as that there is nothing.
    let unknown = ask.env_remove("XDG_RUNTIME_DIR").output().unwrap();
    assert_eq!((unknown.status.code(), stdout(&unknown)), (Some(69), String::new()));
    assert!(stderr(&unknown).contains("XDG_RUNTIME_DIR is not set"), "{}", stderr(&unknown));
    nginx.stop(Signal::TERM);
    wait_until("its status socket is gone, and the folder", || !folder.path("ksf/accel").exists());
    nothing_is_left();
}

/// The Go program of `tests/go`; `None`: there is no Go, skip.
fn go_program(folder: &Folder) -> Option<PathBuf> {
    let program = folder.path("serves");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/go/serves.go");
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&program).arg(source).env("GO111MODULE", "off").env("CGO_ENABLED", "0");
    build.env("GOTOOLCHAIN", "local");
    match build.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", stderr(&output));
            Some(program)
        }
        Err(error) => {
            support::skip(format_args!("needs go ({error})"));
            None
        }
    }
}

/// How many of the answers came from each process.
fn servers(answers: &[String]) -> Vec<(u64, usize)> {
    let mut servers: Vec<(u64, usize)> = Vec::new();
    for answer in answers {
        let pid = answer.lines().find_map(|line| line.strip_prefix("X-Pid: ")).expect("an answer of the program");
        let pid = pid.parse().unwrap();
        match servers.iter_mut().find(|(known, _)| *known == pid) {
            Some((_, count)) => *count += 1,
            None => servers.push((pid, 1)),
        }
    }
    servers
}

#[test]
fn copies_of_a_go_program_share_a_port_and_serve_their_cpu() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let Some(program) = go_program(&folder) else { return };
    let Some([a, b]) = two_cpus_or_skip() else { return };
    let said = folder.path("said");
    let mut command = accel_run(&["--copies", "2", "--cpus", &format!("{a},{b}")]);
    command.arg(&program).arg(ADDRESS).stderr(std::fs::File::create(&said).unwrap());
    let mut copies = start(command);
    let program_status = accelerated(2);
    let at_home = |cpu: usize| {
        let workers = program_status["workers"].as_array().unwrap();
        workers.iter().find(|worker| worker["cpu"] == cpu).expect("a copy on each CPU")["pid"].as_u64().unwrap()
    };
    assert_eq!(servers(&answers_from(a, 100)), [(at_home(a), 100)]);
    assert_eq!(servers(&answers_from(b, 100)), [(at_home(b), 100)]);
    let text = status(&[]);
    assert!(text.contains("steered from outside") && text.contains(&format!("{ADDRESS}: accelerated by sk_lookup")));

    // Signals reach all copies.
    copies.signal(Signal::HUP);
    let heard = || std::fs::read_to_string(&said).unwrap().matches("hangup").count();
    wait_until("both have heard it", || heard() == 2);
    // One that is killed leaves its connections to the other, and nobody is refused.
    kill(at_home(a), Signal::KILL);
    wait_until("ksf says so", || std::fs::read_to_string(&said).unwrap().contains("the others serve on"));
    assert_eq!(servers(&answers_from(a, 50)), [(at_home(b), 50)]);
    copies.signal(Signal::TERM);
    // Go's own way to end by a signal; the first copy was killed.
    assert_eq!(copies.wait().code(), Some(128 + 9));
    nothing_is_left();
}

#[test]
fn a_go_program_alone_is_run_as_it_is_and_its_copies_can_be_attached_to() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let Some(program) = go_program(&folder) else { return };
    let said = folder.path("said");
    let mut command = accel_run(&[]);
    command.arg(&program).arg(ADDRESS).stderr(std::fs::File::create(&said).unwrap());
    let alone = start(command);
    wait_until("it is served", || is_served(address()));
    let text = std::fs::read_to_string(&said).unwrap();
    assert!(text.contains("is not accelerated: it is written in Go") && text.contains("--copies N"), "{text}");
    // One socket cannot be steered to from outside.
    let mut attach = support::ksf();
    attach.args(["accel", "attach", &alone.pid().to_string()]).stderr(std::fs::File::create(&said).unwrap());
    let mut attached = start(attach);
    wait_until("it says why", || std::fs::read_to_string(&said).unwrap().contains("share one socket"));
    assert!(is_served(address()));
    drop(alone);
    // It ends with the program.
    assert_eq!(attached.wait().code(), Some(0));
    nothing_is_left();
}

#[test]
fn a_running_nginx_with_sockets_of_its_own_is_steered() {
    let Some(folder) = support::private_network_and_run().map(|()| Folder::new()) else { return };
    let nginx = start_nginx_by(Command::new("env"), &folder, &format!("{ADDRESS} reuseport"));
    wait_until("it is served", || is_served(address()));
    let said = folder.path("said");
    let mut attach = support::ksf();
    attach.args(["accel", "attach", &nginx.pid().to_string()]).stderr(std::fs::File::create(&said).unwrap());
    let mut attached = start(attach);
    let before = accelerated(2);
    let [first, second] = [0, 1].map(|index| before["workers"][index]["pid"].as_u64().unwrap());
    assert_ne!(first, second);
    cpus().iter().for_each(|cpu| requests_from(*cpu, 50));
    let program = accelerated(2);
    let all = cpus().len() as u64 * 50;
    assert_eq!(sum(&program, &["steered_local", "steered_remote"]), all, "{program:#}");
    assert!(cpus().len() != 2 || sum(&program, &["steered_local"]) == all, "{program:#}");
    // nginx reloads: the sockets are served by other processes, and no connection is lost.
    nginx.signal(Signal::HUP);
    wait_until("the new workers are found", || {
        let workers = worker_pids(&programs()[0]);
        workers.len() == 2 && !workers.contains(&first) && !workers.contains(&second)
    });
    cpus().iter().for_each(|cpu| requests_from(*cpu, 50));
    // Detached, everything is as before.
    attached.signal(Signal::INT);
    assert_eq!(attached.wait().code(), Some(0));
    requests_from(cpus()[0], 20);
    nginx.stop(Signal::TERM);
    nothing_is_left();
    let text = std::fs::read_to_string(&said).unwrap();
    assert!(text.contains(&format!("{ADDRESS} is steered to 2 processes")), "{text}");
    let missing = support::run(&["accel", "attach", "4194304"]);
    assert_eq!(missing.status.code(), Some(69));
    assert!(stderr(&missing).contains("cannot attach to process: 4194304: "), "{}", stderr(&missing));
}
