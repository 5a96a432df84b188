//! Processes: how they are made, what they become, and what they inherit.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::*;
use ksf_test::cpus;

fn is_served(actors: &mut Actors, actor: u32, (listener, port, epoll): (i64, u16, i64)) {
    actors.serves_soon(actor, port, epoll, listener);
}

#[test]
fn a_child_that_uses_no_listener_is_no_worker() {
    let Some((holder, mut actors)) = begin() else { return };
    let place = worker(&mut actors, &holder);
    let known = holder.status().unwrap().processes;
    for (child, how) in [(1, "fork 1"), (2, "clone 2")] {
        actors.zero(0, how);
        // It does what helpers do.
        assert!(actors.number(child, "dup 1") > 0);
        actors.zero(child, &format!("close {}", place.2));
        actors.zero(child, &format!("close {}", place.0));
        actors.number(child, "epoll");
    }
    let status = holder.status().unwrap();
    assert_eq!(status.processes, known, "children have said nothing");
    assert_eq!(status.workers.len(), 1);
    is_served(&mut actors, 0, place);
    // It is not bound to its parent's CPU either.
    assert_eq!(actors.call(0, &format!("wait {} 0 0", place.2)), "events");
    assert_eq!(actors.call(0, "cpus"), "1");
    let all = cpus().len().to_string();
    actors.zero(0, "fork 3");
    assert_eq!(actors.call(3, "cpus"), all);
    assert_eq!(actors.call(0, "cpus"), "1");
    actors.zero(0, "thread 4");
    assert_eq!(actors.call(4, "cpus"), all);
}

#[test]
fn a_child_gets_a_queue_when_it_watches_however_it_was_made() {
    let Some((holder, mut actors)) = begin() else { return };
    let (listener, port) = actors.listener();
    for (child, how) in [(1, "fork 1"), (2, "clone 2")] {
        actors.zero(0, how);
        let epoll = actors.watching(child, listener);
        wait_ready(&holder, 1);
        let pid = actors.number(child, "pid");
        assert_eq!(i64::from(ready(&holder)[0].pid), pid, "{how}");
        is_served(&mut actors, child, (listener, port, epoll));
        // Its end is the end of its worker, though its parent has what it had.
        actors.zero(0, &format!("end {child}"));
        actors.zero(0, "wait_child");
        wait_ready(&holder, 0);
    }
}

#[test]
fn a_vfork_child_does_nothing_to_its_parents_listeners() {
    let Some((holder, mut actors)) = begin() else { return };
    let place = worker(&mut actors, &holder);
    // It closes the listener, and then everything, in the memory of its parent.
    actors.zero(0, &format!("vfork_close {}", place.0));
    assert_eq!(ready(&holder).len(), 1);
    is_served(&mut actors, 0, place);
    assert_eq!(counted(&holder.status().unwrap()).accepted_own, 1);
    // A forked child whose first act is to make a vfork child is a worker all the same.
    actors.zero(0, "fork 1");
    actors.zero(1, &format!("vfork_close {}", place.0));
    let epoll = actors.watching(1, place.0);
    wait_ready(&holder, 2);
    actors.zero(0, &format!("del {} {}", place.2, place.0));
    is_served(&mut actors, 1, (place.0, place.1, epoll));
    assert_eq!(counted(&holder.status().unwrap()).accepted_own, 2);
}

/// Runs `execs` and returns what a program started by it has of the variables.
fn variables_after(words: &[&str], keep: Option<&str>, holder: &ksf_accel::Started) -> String {
    let program = compiled("execs");
    let path = format!("{}:/usr/bin:/bin", program.parent().unwrap().display());
    let mut command = accelerated(program, holder);
    command.args(words).stdin(Stdio::null()).env("PATH", path);
    command.envs(keep.map(|keep| ("KSF_ACCEL_KEEP", keep)));
    run(&mut command)
}

const WAYS: [&str; 12] = [
    "execve",
    "execv",
    "execvp",
    "execvpe",
    "execl",
    "execlp",
    "execle",
    "fexecve",
    "execveat",
    "posix_spawn",
    "posix_spawnp",
    "vfork",
];

#[test]
fn a_program_that_starts_itself_with_a_cleaned_environment_keeps_the_library() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let wanted = format!("LD_PRELOAD={}\nKSF_ACCEL={}\nOTHER=1\n", library().display(), holder.environment());
    for way in WAYS {
        assert_eq!(variables_after(&[way, "self"], None, &holder), wanted, "{way}");
        // Switched off: what the program passes is what it gets.
        let bare = variables_after(&[way, "self"], Some("0"), &holder);
        assert_eq!(bare.lines().find(|line| line.starts_with("LD_PRELOAD")), None, "{way}");
    }
    // Another library that the program preloads comes after it.
    let other = variables_after(&["preload", "self"], None, &holder);
    assert!(other.contains(&format!("LD_PRELOAD={}:/lib/other.so", library().display())), "{other}");
    // A program that wants a child without it says so.
    let without = variables_after(&["without", "self"], None, &holder);
    assert!(!without.contains("LD_PRELOAD") && without.contains("KSF_ACCEL=\n"), "{without}");
    assert_eq!(run(accelerated(compiled("execs"), &holder).arg("missing")), "ENOENT\n");
}

#[test]
fn nothing_comes_back_into_the_environment_of_another_program_or_user() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    for way in WAYS.into_iter().chain(["system"]) {
        assert_eq!(variables_after(&[way, "other"], None, &holder), "OTHER=1\n", "{way}");
        for user in ["33", "65534"] {
            for target in ["self", "other"] {
                let found = variables_after(&[way, target, user], None, &holder);
                assert_eq!(found, "OTHER=1\n", "{way} {target} as user {user}");
            }
        }
    }
    // As login shells and sudo do it.
    for tool in [
        &["env", "-i", "setpriv", "--reuid=65534", "--clear-groups", "env"][..],
        &["setpriv", "--reuid=33", "--clear-groups", "env", "-i", "/usr/bin/env"],
        &["setpriv", "--reuid=33", "--clear-groups", "--reset-env", "/usr/bin/env"],
        &["sh", "-c", "env -i sh -c env"],
        &["su", "-l", "-s", "/bin/sh", "nobody", "-c", "env"],
        &["runuser", "-u", "www-data", "--", "env", "-i", "env"],
    ] {
        let found = run(accelerated(tool[0], &holder).args(&tool[1..]).stdin(Stdio::null()));
        assert!(!found.contains("KSF_ACCEL") && !found.contains("LD_PRELOAD"), "{tool:?}: {found}");
    }
}

#[test]
fn a_program_of_another_user_is_not_admitted_though_it_has_the_variables() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let mut command = accelerated("setpriv", &holder);
    command.args(["--reuid=65534", "--clear-groups"]).arg(compiled("server"));
    let server = Server::start_as(command, "prefork-epoll", 2, 0);
    assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 20).len(), 20);
    let status = holder.status().unwrap();
    assert!(status.listeners.is_empty() && status.workers.is_empty(), "{status:?}");
    assert!(!status.refused_requests.is_empty());
}

#[test]
fn a_name_that_another_user_has_taken_is_no_holder() {
    let Some(()) = own_network() else { return };
    use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketType};
    // As after the end of a holder, whose name everybody can read.
    let rogue = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&rogue, &SocketAddrUnix::new_abstract_name(b"ksf-rogue").unwrap()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: numbers; this thread alone changes its user, and ends.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
            rustix::net::listen(&rogue, 16).unwrap();
        });
    });
    let mut command = Command::new(compiled("server"));
    command.env("LD_PRELOAD", library()).env("KSF_ACCEL", format!("ksf-rogue:{}", "5a".repeat(16)));
    let server = Server::start_as(command, "prefork-epoll", 1, 0);
    assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 5).len(), 5);
    let asked = rustix::net::accept(&rogue).unwrap();
    assert_eq!(rustix::net::recv(&asked, &mut [0u8; 64], RecvFlags::empty()).map(|(_, count)| count), Ok(0));
}

#[test]
fn what_libc_starts_by_itself_is_not_bound_to_the_workers_cpu() {
    let Some(_) = network_on_two_cpus() else { return };
    let holder = patient();
    let mut actors = Actors::start(&holder);
    let (_, _, epoll) = worker(&mut actors, &holder);
    let all = actors.number(0, "cpus");
    assert_eq!(actors.call(0, &format!("wait {epoll} 0 0")), "events");
    assert_eq!(actors.call(0, "cpus"), "1");
    for way in ["system", "popen", "wordexp", "thrd_create"] {
        assert_eq!(actors.number(0, way), all, "{way}");
        assert_eq!(actors.call(0, "cpus"), "1", "{way}");
    }
}

#[test]
fn a_program_that_becomes_another_takes_its_listener_along() {
    let Some(holder) = own_network().map(|()| holder()) else { return };
    let mut actors = Actors::start(&holder);
    let (listener, port, epoll) = worker(&mut actors, &holder);
    let waiting: Vec<Client> = (0..5).map(|_| Client::connect(port, 'w')).collect();
    // As servers upgrade themselves: the same process, another program, the same socket.
    actors.begin(0, "reexec");
    assert_eq!(actors.result(0), "started");
    let _ = epoll;
    let epoll = actors.watching(0, listener);
    wait_ready(&holder, 1);
    actors.takes(0, epoll, listener, 5);
    assert!(waiting.into_iter().all(Client::was_served));
    is_served(&mut actors, 0, (listener, port, epoll));
    // One that fails leaves everything as it was.
    assert_eq!(actors.call(0, "badexec"), "failed ENOENT");
    assert_eq!(ready(&holder).len(), 1);
    is_served(&mut actors, 0, (listener, port, epoll));
}

#[test]
fn a_daemon_that_closes_everything_keeps_its_queues() {
    let Some(()) = own_network() else { return };
    for how in ["daemon-loop", "daemon-range", "daemon-from"] {
        let holder = patient();
        let mut server = Server::start(&holder, how, 2);
        assert!(server.wait().success(), "{how}: the first process has ended");
        wait_ready(&holder, 2);
        assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 50).len(), 50);
        let counters = counted(&holder.status().unwrap());
        assert_eq!(counters.accepted_own, 50, "{how}: {counters:?}");
    }
}

#[test]
fn a_server_that_gives_up_its_rights_keeps_its_queues() {
    let Some(holder) = own_network().map(|()| patient()) else { return };
    for style in ["prefork-epoll", "threads-epoll", "prefork-blocking"] {
        let mut command = accelerated(compiled("server"), &holder);
        command.env("SERVER_UID", "65534");
        // A port that only root may bind: a queue made later would have to be bound by root too.
        let server = Server::start_as(command, style, 2, 80);
        wait_ready(&holder, 2);
        let before = counted(&holder.status().unwrap()).accepted_own;
        ask_ready(&holder, 2, 80, 50);
        assert_eq!(counted(&holder.status().unwrap()).accepted_own, before + 50, "{style}");
        drop(server);
        wait_until("it is gone", || holder.status().unwrap().listeners.is_empty());
    }
}

#[test]
fn a_program_with_another_allocator_works() {
    let Some(()) = own_network() else { return };
    let Some(allocator) = ["/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2"]
        .into_iter()
        .find(|path| Path::new(path).exists())
    else {
        return skip("needs jemalloc (libjemalloc2)");
    };
    for order in [format!("{}:{allocator}", library().display()), format!("{allocator}:{}", library().display())] {
        let holder = patient();
        let mut command = accelerated(compiled("server"), &holder);
        command.env("LD_PRELOAD", &order);
        let server = Server::start_as(command, "threads-epoll", 2, 0);
        wait_ready(&holder, 2);
        assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 50).len(), 50);
        assert_eq!(counted(&holder.status().unwrap()).accepted_own, 50, "{order}");
    }
}

#[test]
fn without_a_holder_the_program_runs_unharmed() {
    let Some(()) = own_network() else { return };
    // Nobody is there; the address is nonsense; there is none.
    for address in [Some(format!("ksf-nobody:{}", "0".repeat(32))), Some("nonsense".into()), Some(":".into()), None] {
        let mut command = Command::new(compiled("server"));
        command.env("LD_PRELOAD", library()).envs(address.as_ref().map(|address| ("KSF_ACCEL", address)));
        let server = Server::start_as(command, "prefork-epoll", 2, 0);
        assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 20).len(), 20, "{address:?}");
    }
}
