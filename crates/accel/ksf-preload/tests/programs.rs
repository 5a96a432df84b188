//! Programs of Debian under the library, unchanged: connections are counted, and none is lost.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::*;
use ksf_accel::Started;
use rustix::process::Signal;

const PORT: u16 = 8080;
const HTTP: &str = "GET / HTTP/1.0\r\n\r\n";

/// A file for a program that may run as anybody.
fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// nginx with two workers, in the foreground.
fn nginx(holder: &Started, events: &str, listen: &str) -> Option<Server> {
    let nginx = program_or_skip("nginx")?;
    let folder = folder();
    let config = format!(
        "daemon off; worker_processes 2; pid nginx.pid; error_log error.log; worker_shutdown_timeout 10s;
        events {{ worker_connections 512; {events} }}
        http {{
            access_log off;
            client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
            uwsgi_temp_path uwsgi; scgi_temp_path scgi;
            server {{ listen 127.0.0.1:{PORT} {listen}; location / {{ return 200 'served\\n'; }} }}
        }}"
    );
    let config = write(&folder, "nginx.conf", &config);
    let mut command = accelerated(nginx, holder);
    command.args(["-e", "error.log", "-p"]).arg(&folder).arg("-c").arg(config);
    Some(Server::other(command, PORT))
}

/// So many connections, one after the other from each CPU in turn: all are answered, and all are counted.
fn all_are_served(holder: &Started, question: &str, answer: &str) {
    let before = accepted(holder);
    let mut asked = 0;
    for cpu in cpus() {
        let answers = on_cpu(cpu, || ask_each(Ipv4Addr::LOCALHOST, PORT, question, 100));
        assert!(answers.iter().all(|it| it.contains(answer)), "{answers:?}");
        asked += answers.len() as u64;
    }
    assert_eq!(accepted(holder), before + asked, "{:#?}", holder.status());
}

fn accepted(holder: &Started) -> u64 {
    from_queues(holder) + counted(&holder.status().unwrap()).accepted_fallback
}

/// Asks as [`all_are_served`] does. The listener gets only connections that find all workers
/// stalled. Each stall accounts for two at most: a worker that has waited again is steered to, and
/// it may answer one connection before that.
fn are_served_by_queue(holder: &Started, question: &str, answer: &str) {
    all_are_served(holder, question, answer);
    let status = holder.status().unwrap();
    assert!(from_queues(holder) > 0 && counted(&status).accepted_fallback <= 2 * status.stalls, "{status:#?}");
}

/// Connections that workers took from their own queues, and from those of workers that were busy for long.
fn from_queues(holder: &Started) -> u64 {
    let counters = counted(&holder.status().unwrap());
    counters.accepted_own + counters.accepted_stolen
}

/// Clients that come all the time lose nothing, whatever else is done.
fn under_load(holder: &Started, question: &str, action: impl FnOnce(&dyn Fn())) {
    let load = Load::start(PORT, question, 6);
    let more = || {
        let before = accepted(holder);
        wait_until("there is load", || accepted(holder) >= before + 100);
    };
    more();
    action(&more);
    more();
    let (answered, lost) = load.end();
    assert!(lost.is_empty(), "{answered} answered, {} lost: {lost:?}", lost.len());
}

#[test]
fn nginx_serves_by_queue_and_loses_nothing_when_it_reloads() {
    let Some(()) = own_network() else { return };
    // As it is by default; with the mutex, where only who holds it watches; with sockets of its own.
    for (events, listen) in
        [("", ""), ("multi_accept on;", ""), ("accept_mutex on; accept_mutex_delay 20ms;", ""), ("", "reuseport")]
    {
        let holder = holder();
        let Some(server) = nginx(&holder, events, listen) else { return };
        let case = format!("{events}{listen}");
        if events.contains("mutex") {
            wait_until("a worker is ready", || !ready(&holder).is_empty());
            // What comes while the mutex passes from one to the other is for the listener.
            all_are_served(&holder, HTTP, "served");
            assert!(from_queues(&holder) > 0, "{case}: {:#?}", holder.status());
        } else {
            wait_ready(&holder, 2);
            are_served_by_queue(&holder, HTTP, "served");
        }
        // Reloaded in the next test.
        if listen == "reuseport" {
            continue;
        }
        under_load(&holder, HTTP, |more| {
            for _ in 0..5 {
                let old: Vec<u32> = holder.status().unwrap().workers.iter().map(|worker| worker.pid).collect();
                signal(server.pid(), Signal::HUP);
                wait_until("new workers serve", || {
                    let workers = ready(&holder);
                    workers.iter().any(|worker| !old.contains(&worker.pid))
                        && workers.iter().all(|worker| !old.contains(&worker.pid))
                });
                more();
            }
        });
        assert_eq!(holder.status().unwrap().listeners.len(), 1, "{case}");
    }
}

/// By itself it closes the sockets of its old workers, and resets what waits there.
#[test]
fn nginx_with_its_own_sockets_loses_nothing_when_it_reloads() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let Some(server) = nginx(&holder, "", "reuseport") else { return };
    wait_ready(&holder, 2);
    under_load(&holder, HTTP, |more| {
        for _ in 0..5 {
            signal(server.pid(), Signal::HUP);
            more();
        }
    });
}

#[test]
fn nginx_ends_gracefully() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let Some(mut server) = nginx(&holder, "", "") else { return };
    wait_ready(&holder, 2);
    signal(server.pid(), Signal::QUIT);
    assert!(server.wait().success());
    assert!(refused(PORT));
    wait_until("nothing is left of it", || {
        let status = holder.status().unwrap();
        status.processes.is_empty() && status.listeners.is_empty() && status.workers.is_empty()
    });
}

/// How often the master of HAProxy has loaded its configuration again, and its workers of the last time, by `show proc`; `None`
/// while it becomes a new program.
fn haproxy_generation(master: &Path) -> Option<(String, Vec<u32>)> {
    let mut stream = UnixStream::connect(master).ok()?;
    // A connection from before the exec is never answered.
    stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut text = String::new();
    stream.write_all(b"show proc\n").and_then(|()| stream.shutdown(Shutdown::Write)).ok()?;
    stream.read_to_string(&mut text).ok()?;
    let current = text.split("# old workers").next()?;
    let lines = || current.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of = |kind: &'static str| lines().filter(move |words| words.get(1) == Some(&kind));
    let workers = of("worker").map(|words| words[0].parse().unwrap()).collect();
    of("master").next().map(|words| (words[2].to_owned(), workers))
}

/// Has HAProxy load its configuration again, and returns when the holder has all threads of the new worker. The master may lose
/// the signal while it becomes a new program, and the load fails if the old worker is too slow to hand over its sockets: the
/// master tells both.
fn reload_haproxy(server: &Server, master: &Path, holder: &Started) {
    let old: Vec<u32> = ready(holder).iter().map(|worker| worker.pid).collect();
    let generation = || haproxy_generation(master);
    let what =
        std::fmt::from_fn(|f| write!(f, "new threads serve, not {old:?}: {:?} {:#?}", generation(), holder.status()));
    let mut signalled_at = None;
    wait_until(what, || {
        // The second answer is from after the loop has handled the signals before the first one.
        if let (Some((first, _)), Some((reloads, workers))) = (generation(), generation())
            && first == reloads
            && (signalled_at.as_ref().is_none_or(|before| *before == reloads)
                || workers.iter().all(|it| old.contains(it)))
        {
            signalled_at = Some(reloads);
            signal(server.pid(), Signal::USR2);
        }
        ready(holder).iter().filter(|worker| !old.contains(&worker.pid)).count() >= 2
    });
}

#[test]
fn haproxy_serves_by_a_queue_for_each_thread_and_loses_nothing_when_it_reloads() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let Some(haproxy) = program_or_skip("haproxy") else { return };
    let config = format!(
        "global\n nbthread 2\n stats timeout 10s\n hard-stop-after 10s\n
        defaults\n mode http\n timeout connect 10s\n timeout client 10s\n timeout server 10s\n
        frontend f\n bind 127.0.0.1:{PORT}\n http-request return status 200 content-type text/plain string served\n"
    );
    let folder = folder();
    let config = write(&folder, "haproxy.cfg", &config);
    let master = folder.join("master");
    let mut command = accelerated(haproxy, &holder);
    command.args(["-W", "-q", "-S"]).arg(format!("unix@{}", master.display())).arg("-f").arg(config);
    let server = Server::other(command, PORT);
    wait_ready(&holder, 2);
    are_served_by_queue(&holder, HTTP, "served");
    under_load(&holder, HTTP, |more| {
        for _ in 0..3 {
            reload_haproxy(&server, &master, &holder);
            more();
        }
    });
}

#[test]
fn lighttpd_serves_by_a_queue_for_each_process() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let Some(lighttpd) = program_or_skip("lighttpd") else { return };
    let folder = folder();
    write(&folder, "index.html", "served\n");
    let config = format!(
        "server.document-root = \"{0}\"\nserver.bind = \"127.0.0.1\"\nserver.port = {PORT}\nserver.max-worker = 2\n\
         index-file.names = ( \"index.html\" )\nserver.errorlog = \"{0}/error.log\"\n",
        folder.display()
    );
    let config = write(&folder, "lighttpd.conf", &config);
    let mut command = accelerated(lighttpd, &holder);
    command.args(["-D", "-f"]).arg(config);
    let server = Server::other(command, PORT);
    wait_ready(&holder, 2);
    are_served_by_queue(&holder, HTTP, "served");
    under_load(&holder, HTTP, |more| {
        more();
        more();
    });
    drop(server);
}

#[test]
fn redis_serves_by_its_queue() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let Some(redis) = program_or_skip("redis-server") else { return };
    let mut command = accelerated(redis, &holder);
    let folder = folder();
    command.args(["--port", &PORT.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"]);
    command.arg(&folder).stdout(std::process::Stdio::null());
    let _server = Server::other(command, PORT);
    wait_ready(&holder, 1);
    let question = "PING\r\nQUIT\r\n";
    are_served_by_queue(&holder, question, "+PONG");
    // It writes its data by a forked child, which does not disturb.
    under_load(&holder, question, |more| {
        let saved = ask_each(Ipv4Addr::LOCALHOST, PORT, "SET a b\r\nBGSAVE\r\nQUIT\r\n", 1);
        assert!(saved[0].contains("saving started"), "{saved:?}");
        wait_until("the file is there", || folder.join("dump.rdb").exists());
        more();
    });
    let status = holder.status().unwrap();
    assert_eq!(status.workers.len(), 1, "{status:?}");
}

#[test]
fn memcached_serves_by_its_queue() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let Some(memcached) = program_or_skip("memcached") else { return };
    let mut command = accelerated(memcached, &holder);
    command.args(["-t", "2", "-u", "nobody", "-l", "127.0.0.1", "-U", "0", "-p", &PORT.to_string()]);
    let _server = Server::other(command, PORT);
    wait_ready(&holder, 1);
    let question = "version\r\nquit\r\n";
    are_served_by_queue(&holder, question, "VERSION");
    under_load(&holder, question, |more| {
        more();
        more();
    });
    // One thread accepts for all: one worker.
    let status = holder.status().unwrap();
    assert_eq!(status.workers.len(), 1, "{status:?}");
}
