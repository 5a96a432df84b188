//! Profiles of `ksf accel run` with the programs they are for, and `ksf accel unit` with systemd as the judge. In a
//! network namespace and a /run of the test's own; needs root.

use crate::support;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::{
    Folder, PATIENCE, Running, built_folder, private_network_and_run, run, skip, stderr, stdout, wait_until,
};
use ksf_test::program_or_skip;
use serde_json::Value;

const ADDRESS: &str = "127.0.0.1:8080";

/// `ksf accel run FLAGS -- WORDS`, without what the environment of this test may say.
fn accel_run(flags: &[&str], words: &[&str]) -> Command {
    let mut command = support::ksf();
    command.args(["accel", "run"]).args(flags).arg("--").args(words).stdin(Stdio::null());
    for variable in ["LD_PRELOAD", "KSF_ACCEL", "NODE_CLUSTER_SCHED_POLICY"] {
        command.env_remove(variable);
    }
    // Where cargo leaves the library for tests.
    command.env("KSF_LIB_DIR", built_folder());
    command
}

/// A program that runs, with all that it has started.
fn start(mut command: Command, folder: &Folder) -> Running {
    let said = std::fs::File::create(folder.path("said")).unwrap();
    Running::start_group(command.stdout(Stdio::null()).stderr(said).current_dir(folder.path("")))
}

/// The accelerated programs.
fn programs() -> Vec<Value> {
    let output = run(&["accel", "status", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    document["programs"].as_array().expect("a list").clone()
}

/// The workers that are ready, as soon as there are so many.
fn workers(count: usize) -> Vec<Value> {
    let mut ready = Vec::new();
    wait_until(format_args!("{count} workers are ready"), || {
        let program = programs().pop().unwrap_or_default();
        let all = program["workers"].as_array().cloned().unwrap_or_default();
        ready = all.into_iter().filter(|worker| worker["ready"].as_array().is_some_and(|it| !it.is_empty())).collect();
        ready.len() >= count
    });
    ready
}

/// One request from this CPU, on a connection of its own.
fn ask_from(cpu: usize) {
    std::thread::spawn(move || {
        ksf::cpus::pin_to(cpu).unwrap();
        let mut stream = TcpStream::connect(ADDRESS).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer, and its end");
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    })
    .join()
    .unwrap();
}

/// A program with two workers: each is ready at the queue of a CPU, and what comes from that CPU is accepted.
fn has_a_queue_for_each_worker(words: &[&str], folder: &Folder) {
    let cpus = ksf::cpus::allowed().unwrap();
    let running = start(accel_run(&[], words), folder);
    let homes: Vec<_> = workers(2).iter().map(|worker| worker["cpu"].as_u64().expect("a home")).collect();
    for cpu in cpus.iter().take(2) {
        assert!(homes.contains(&(*cpu as u64)), "{words:?}: nobody is at home on CPU {cpu}: {homes:?}");
        (0..5).for_each(|_| ask_from(*cpu));
    }
    let counted =
        |name: &str| -> u64 { workers(2).iter().map(|worker| worker["counters"][name].as_u64().unwrap()).sum() };
    let accepted = || counted("accepted_own") + counted("accepted_stolen") + counted("accepted_fallback");
    wait_until("all are counted", || accepted() == 5 * cpus.len().min(2) as u64);
    drop(running);
    wait_until("nothing is left", || programs().is_empty());
}

#[test]
fn workers_of_python_servers_have_queues() {
    let Some(()) = private_network_and_run() else { return };
    let Some(_) = program_or_skip("gunicorn") else { return };
    let Some(_) = program_or_skip("uvicorn") else { return };
    let folder = Folder::new();
    folder.write(
        "app.py",
        "def wsgi(environ, start):\n    start('200 OK', [('Content-Length', '2')])\n    return [b'ok']\n\
         async def asgi(scope, receive, send):\n    if scope['type'] == 'http':\n        \
         await send({'type': 'http.response.start', 'status': 200, 'headers': [(b'content-length', b'2')]})\n        \
         await send({'type': 'http.response.body', 'body': b'ok'})\n",
    );
    let gunicorn = ["gunicorn", "-w", "2", "--threads", "2", "-b", ADDRESS, "app:wsgi"];
    has_a_queue_for_each_worker(&gunicorn, &folder);
    let uvicorn = ["uvicorn", "--workers", "2", "--lifespan", "off", "--port", "8080", "app:asgi"];
    has_a_queue_for_each_worker(&uvicorn, &folder);
}

const CLUSTER: &str = "\
const cluster = require('cluster');
if (cluster.isPrimary) for (let i = 0; i < 2; i++) cluster.fork();
else require('http').createServer((_, answer) => answer.end('ok')).listen(8080, '127.0.0.1');
";

#[test]
fn workers_of_node_accept_by_themselves() {
    let Some(()) = private_network_and_run() else { return };
    let Some(_) = program_or_skip("node") else { return };
    let folder = Folder::new();
    folder.write("cluster.js", CLUSTER);
    has_a_queue_for_each_worker(&["node", "cluster.js"], &folder);
    // As node does it without the variable, and as the user may wish: the primary accepts for all.
    let mut command = accel_run(&[], &["node", "cluster.js"]);
    command.env("NODE_CLUSTER_SCHED_POLICY", "rr");
    let running = start(command, &folder);
    let primary = u64::from(running.pid());
    wait_until("the primary accepts", || workers(1).iter().any(|worker| worker["pid"] == primary));
    ask_from(ksf::cpus::allowed().unwrap()[0]);
}

#[test]
fn workers_of_lighttpd_have_queues() {
    let Some(()) = private_network_and_run() else { return };
    let Some(_) = program_or_skip("lighttpd") else { return };
    let folder = Folder::new();
    folder.write("index.html", "ok");
    let config = format!(
        "server.document-root = \"{}\"\nserver.bind = \"127.0.0.1\"\nserver.port = 8080\nserver.max-worker = 2\n\
         index-file.names = ( \"index.html\" )\n",
        folder.path("").display()
    );
    let config = folder.write("lighttpd.conf", &config);
    has_a_queue_for_each_worker(&["lighttpd", "-D", "-f", config.to_str().unwrap()], &folder);
}

#[test]
fn a_profile_sets_what_the_user_has_not_set() {
    let Some(()) = support::private_network_and_run() else { return };
    let set = |flags: &[&str], own: Option<&str>| {
        let mut command = accel_run(flags, &["env"]);
        command.envs(own.map(|value| ("NODE_CLUSTER_SCHED_POLICY", value)));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let text = stdout(&output);
        text.lines().find_map(|line| line.strip_prefix("NODE_CLUSTER_SCHED_POLICY=")).map(str::to_owned)
    };
    assert_eq!(set(&["--profile", "node"], None).as_deref(), Some("none"));
    assert_eq!(set(&["--profile", "node"], Some("rr")).as_deref(), Some("rr"));
    assert_eq!(set(&["--profile", "nginx"], None), None);
    assert_eq!(set(&[], None), None, "env has no profile");
    let output = run(&["accel", "run", "--profile", "apache", "--", "true"]);
    assert_ne!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("nginx"), "the names are shown: {}", stderr(&output));
}

#[test]
fn profiles_are_shown() {
    let all = stdout(&run(&["accel", "profile"]));
    for name in ["gunicorn", "haproxy", "lighttpd", "nginx", "node", "uvicorn"] {
        assert!(all.lines().any(|line| line.starts_with(&format!("{name} ("))), "{name} is missing:\n{all}");
    }
    let node = stdout(&run(&["accel", "profile", "node"]));
    assert!(node.contains("NODE_CLUSTER_SCHED_POLICY=none") && !node.contains("nginx"), "{node}");
}

/// `systemd-analyze verify` of a unit with its drop-in.
fn verify(unit: &Path) -> Output {
    Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(unit).output().expect("systemd-analyze starts")
}

/// Writes the drop-in for a unit beside it, and has systemd read both.
fn is_accepted(unit: &Path) -> String {
    let output = run(&["accel", "unit", unit.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let folder = unit.with_file_name(format!("{}.d", unit.file_name().unwrap().to_str().unwrap()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("ksf-accel.conf"), &text).unwrap();
    let output = verify(unit);
    assert!(output.status.success() && stderr(&output).is_empty(), "{text}{}", stderr(&output));
    text
}

#[test]
fn systemd_takes_the_drop_in() {
    let Some(_) = program_or_skip("systemd-analyze") else { return };
    let folder = Folder::new();
    let unit = folder.write(
        "web.service",
        "[Service]\nType=forking\nExecStartPre=/bin/true -t\nExecStart=-/bin/sleep -g 'a b; c' \\\n  $OPTIONS %n \"x y\"\n\
         Environment=\"OPTIONS=-s 5\"\nUser=www-data\nProtectSystem=strict\nRestrictAddressFamilies=AF_INET AF_INET6\n",
    );
    let text = is_accepted(&unit);
    let ksf = env!("CARGO_BIN_EXE_ksf");
    let line = format!("ExecStart=-{ksf} accel run -- /bin/sleep -g 'a b; c'  $OPTIONS %n \"x y\"");
    assert!(text.lines().any(|one| one == line), "{text}");
    assert!(text.contains("RestrictAddressFamilies=AF_UNIX\n") && text.contains("# AmbientCapabilities="), "{text}");
    // Made again with the drop-in in place it is the same, not one more on top.
    assert_eq!(is_accepted(&unit), text);
    // The judge is one: a drop-in that is wrong is found.
    let wrong = folder.path("web.service.d/ksf-accel.conf");
    std::fs::write(&wrong, text.replace("ExecStart=\n", "")).unwrap();
    let output = verify(&unit);
    assert!(!output.status.success() || !stderr(&output).is_empty(), "two commands were taken");
}

#[test]
fn units_of_debian_are_read() {
    let unit = |name: &str| run(&["accel", "unit", name]);
    let is_there = |name: &str| Path::new("/lib/systemd/system").join(name).is_file();
    let mut tried = 0;
    for (name, program) in [
        ("nginx.service", "/usr/sbin/nginx"),
        ("haproxy.service", "/usr/sbin/haproxy"),
        ("redis-server.service", "/usr/bin/redis-server"),
    ] {
        if is_there(name) {
            let output = unit(name);
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            assert!(stdout(&output).contains(&format!(" accel run -- {program} ")), "{}", stdout(&output));
            tried += 1;
        }
    }
    if tried == 0 {
        skip("needs the units of Debian's nginx-common, haproxy or redis-server");
    }
    let output = unit("there-is-no-such.service");
    assert_eq!(output.status.code(), Some(66), "{}", stderr(&output));
    assert!(stderr(&output).contains("systemctl list-unit-files"), "{}", stderr(&output));
}

/// The drop-in in packaging/ is what `ksf accel unit` makes of Debian's nginx.
#[test]
fn the_drop_in_of_the_package_is_made_by_ksf() {
    if !Path::new("/lib/systemd/system/nginx.service").is_file() {
        return skip("needs the unit of Debian's nginx-common");
    }
    let packaged = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../packaging/nginx.service.d/ksf-accel.conf");
    let made = stdout(&run(&["accel", "unit", "nginx.service"]));
    let made =
        made.replace(env!("CARGO_BIN_EXE_ksf"), "/usr/local/bin/ksf").replace("/usr/lib/systemd", "/lib/systemd");
    assert_eq!(std::fs::read_to_string(packaged).unwrap(), made);
}
