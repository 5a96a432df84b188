//! What the library leaves alone: the data path, and, while it is off, everything.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use crate::common::*;
use object::read::elf::ElfFile64;
use object::{Object, ObjectSymbol};
use rustix::process::Signal;

/// All that the library defines in a program's place.
const HOOKS: [&str; 35] = [
    "accept",
    "accept4",
    "bind",
    "close",
    "close_range",
    "closefrom",
    "connect",
    "dup",
    "dup2",
    "dup3",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_pwait2",
    "epoll_wait",
    "execl",
    "execle",
    "execlp",
    "execv",
    "execve",
    "execveat",
    "execvp",
    "execvpe",
    "fcntl",
    "fcntl64",
    "fexecve",
    "listen",
    "popen",
    "posix_spawn",
    "posix_spawnp",
    "pthread_create",
    "recvmsg",
    "shutdown",
    "system",
    "thrd_create",
    "wordexp",
];

#[test]
fn only_calls_about_listeners_and_processes_are_hooked() {
    let bytes = std::fs::read(library()).unwrap();
    let library = ElfFile64::<object::Endianness>::parse(&*bytes).unwrap();
    let defined: BTreeSet<&str> = library
        .dynamic_symbols()
        .filter(|symbol| symbol.is_global() && !symbol.is_undefined())
        .map(|symbol| symbol.name().unwrap())
        .collect();
    // No read, write, recv, send, sendfile, splice, writev, poll, socket, ioctl, malloc: the list is all. recvmsg is there for the
    // descriptors in messages.
    let wanted: BTreeSet<&str> = HOOKS.into();
    assert_eq!(defined, wanted);
}

/// What libc's epoll_wait is on this machine.
#[cfg(target_arch = "x86_64")]
const WAIT: libc::c_long = libc::SYS_epoll_wait;
#[cfg(not(target_arch = "x86_64"))]
const WAIT: libc::c_long = libc::SYS_epoll_pwait;

/// `strace`, counting the system calls of a process.
struct Counted {
    strace: Running,
    table: std::path::PathBuf,
}

impl Counted {
    fn start(pid: u32) -> Counted {
        let table = folder().join("calls");
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-c", "-U", "calls,name", "-o"]).arg(&table).args(["-p", &pid.to_string()]);
        let strace = Running::start(strace.stderr(Stdio::null()));
        let status = format!("/proc/{pid}/status");
        wait_until("strace looks on", || !std::fs::read_to_string(&status).unwrap().contains("TracerPid:\t0\n"));
        Counted { strace, table }
    }

    fn end(mut self) -> BTreeMap<String, u64> {
        self.strace.signal(Signal::INT);
        self.strace.wait();
        let table = std::fs::read_to_string(self.table).unwrap();
        let rows = table.lines().filter_map(|line| line.trim().split_once(char::is_whitespace));
        let counts = rows.filter_map(|(count, name)| Some((name.trim().to_owned(), count.parse().ok()?)));
        counts.filter(|(name, _)| name != "total").collect()
    }
}

/// System calls of a server of one worker during so many connections.
fn calls(command: Command, connections: usize, ready_workers: Option<&ksf_accel::Started>) -> BTreeMap<String, u64> {
    let server = Server::start_as(command, "prefork-exclusive", 1, 0);
    if let Some(holder) = ready_workers {
        wait_ready(holder, 1);
    }
    let worker: u32 =
        ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 1)[0].split(' ').next().unwrap().parse().unwrap();
    let counted = Counted::start(worker);
    ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", connections);
    // Its last call is counted when it has begun the next.
    wait_until("it waits again", || {
        let call = std::fs::read_to_string(format!("/proc/{worker}/syscall")).unwrap();
        call.starts_with(&format!("{WAIT} "))
    });
    counted.end()
}

#[test]
fn while_it_is_off_the_library_makes_no_system_call() {
    let Some(()) = own_network() else { return };
    let Some(_strace) = program_or_skip("strace") else { return };
    const CONNECTIONS: usize = 200;
    let plain = calls(Command::new(compiled("server")), CONNECTIONS, None);
    let mut loaded = Command::new(compiled("server"));
    loaded.env("LD_PRELOAD", library());
    let loaded = calls(loaded, CONNECTIONS, None);
    let holder = holder_with(|options| options.on = false);
    let off = calls(accelerated(compiled("server"), &holder), CONNECTIONS, None);
    drop(holder);
    // A worker that is traced is slow, and is not to be taken for one that has stalled.
    let holder = holder_with(|options| options.look_ms = 1000);
    let on = calls(accelerated(compiled("server"), &holder), CONNECTIONS, Some(&holder));
    let rescues = holder.status().unwrap().rescues;

    // What is counted per connection, whatever the timing.
    let exact = |calls: &BTreeMap<String, u64>| {
        let mut exact = calls.clone();
        exact.remove("accept4");
        exact.remove("epoll_wait");
        exact
    };
    assert_eq!(plain.get("sendto"), Some(&(CONNECTIONS as u64)), "{plain:?}");
    assert_eq!(exact(&loaded), exact(&plain));
    assert_eq!(exact(&off), exact(&plain));
    // One accept() per connection and one that finds nothing, at most: a connection that comes early spares the latter.
    let accepts = |calls: &BTreeMap<String, u64>| calls["accept4"];
    for calls in [&plain, &loaded, &off] {
        assert!(accepts(calls) <= 2 * CONNECTIONS as u64 + 1, "{calls:?}");
    }
    // While it is on, it looks into queue and listener, and in one of 16 calls for calls for help; data calls are as
    // many as before.
    let mut data = exact(&on);
    let reads = data.remove("read").unwrap_or(0);
    assert!(reads <= accepts(&on) / 16 + 1 + 3 * rescues, "{on:?}, {rescues} rescues");
    assert_eq!(data, exact(&plain));
    assert!(accepts(&on) <= 3 * CONNECTIONS as u64 + 40, "{on:?}");
}

/// Calls of a program that takes its listener out of epoll and puts it back so often, as nginx does after every sixteenth
/// connection.
fn calls_of_pairs(holder: &ksf_accel::Started, pairs: u64) -> BTreeMap<String, u64> {
    let mut actors = Actors::start(holder);
    let (listener, port) = actors.listener();
    let epoll = actors.watching(0, listener);
    let counted = Counted::start(actors.pid());
    for _ in 0..pairs {
        actors.zero(0, &format!("del {epoll} {listener}"));
        actors.zero(0, &format!("add {epoll} {listener} 1 7"));
    }
    let counts = counted.end();
    actors.serves_soon(0, port, epoll, listener);
    counts
}

#[test]
fn a_listener_that_is_taken_out_of_epoll_and_put_back_is_not_asked_each_time() {
    let Some(()) = own_network() else { return };
    let Some(_strace) = program_or_skip("strace") else { return };
    const PAIRS: u64 = 64;
    let holder = holder_with(|options| options.on = false);
    let off = calls_of_pairs(&holder, PAIRS);
    drop(holder);
    let on = calls_of_pairs(&patient(), PAIRS);
    let count = |calls: &BTreeMap<String, u64>, name: &str| calls.get(name).copied().unwrap_or(0);
    // The last call is counted when the next has begun.
    assert!((2 * PAIRS - 1..=2 * PAIRS).contains(&count(&off, "epoll_ctl")), "{off:?}");
    for name in ["getsockopt", "rt_sigprocmask", "getpid", "fcntl"] {
        assert_eq!(count(&off, name), 0, "{off:?}");
    }
    // For each of both: does it listen, and which socket is it?
    assert!(count(&on, "epoll_ctl") > 2 * PAIRS, "{on:?}");
    assert!(count(&on, "getsockopt") <= 2 * 2 * PAIRS, "{on:?}");
}

/// A proxy may bind the source address of its connections, and UDP sockets are bound to receive.
#[test]
fn sockets_that_are_bound_and_connected_cost_no_system_call() {
    let Some(()) = own_network() else { return };
    let Some(_strace) = program_or_skip("strace") else { return };
    const SOCKETS: u64 = 64;
    const FIRST: u64 = 500;
    let server = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    for is_on in [false, true] {
        let holder = holder_with(|options| options.on = is_on);
        let mut actors = Actors::start(&holder);
        // The library is on or off when it has had an answer.
        let (listener, _) = actors.listener();
        let epoll = actors.watching(0, listener);
        actors.zero(0, &format!("proxy {port} {SOCKETS} {FIRST}"));
        let counted = Counted::start(actors.pid());
        for fd in FIRST..FIRST + SOCKETS {
            actors.zero(0, &format!("add {epoll} {fd} 1 7"));
            actors.zero(0, &format!("mod {epoll} {fd} 5 7"));
            actors.zero(0, &format!("close {fd}"));
        }
        let counts = counted.end();
        let count = |name: &str| counts.get(name).copied().unwrap_or(0);
        assert_eq!(count("epoll_ctl"), 2 * SOCKETS, "{counts:?}");
        // The last call is counted when the next has begun.
        assert!((SOCKETS - 1..=SOCKETS).contains(&count("close")), "{counts:?}");
        for name in ["getsockopt", "rt_sigprocmask", "getpid", "fcntl"] {
            assert_eq!(count(name), 0, "{name}, on: {is_on}: {counts:?}");
        }
    }
}

#[test]
fn a_holder_that_is_switched_on_later_gives_queues() {
    let Some(()) = own_network() else { return };
    let holder = holder_with(|options| {
        be_patient(options);
        options.on = false;
    });
    for style in ["prefork-epoll", "prefork-oneshot", "prefork-blocking"] {
        let server = Server::start(&holder, style, 1);
        holder.pause().unwrap();
        assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 20).len(), 20);
        holder.resume().unwrap();
        // The worker that waits without a queue gets one after this.
        ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 1);
        wait_ready(&holder, 1);
        let before = counted(&holder.status().unwrap());
        ask_ready(&holder, 1, server.port, 20);
        let after = counted(&holder.status().unwrap());
        assert_eq!(after.accepted_own, before.accepted_own + 20, "{style}: {after:?}");
        // And off again: what is in queues is taken, what comes goes to the listener.
        holder.pause().unwrap();
        assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 20).len(), 20);
        assert_eq!(counted(&holder.status().unwrap()).accepted_own, after.accepted_own, "{style}");
        drop(server);
        wait_until("it is gone", || holder.status().unwrap().listeners.is_empty());
    }
}
