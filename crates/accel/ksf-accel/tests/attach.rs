//! Programs that run already are steered from outside: processes with a listener each on one address.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::Stdio;

use crate::common::*;
use ksf_accel::attach::Attached;
use ksf_accel::{AccelError, status};
use rustix::event::epoll;

const ADDRESS: &str = "127.0.0.1:8100";

/// A process that says its id to everybody it accepts, until it is told something: then it closes its listener, and does no
/// more. `shared`: the listener; else it makes its own of a reuseport group.
fn start_server(shared: Option<&std::net::TcpListener>) -> Running {
    let mut command = Helper::command("attach::helper_serves");
    if let Some(shared) = shared {
        command.env("SHARED", "1").stdin(std::os::fd::OwnedFd::from(shared.try_clone().unwrap()));
    } else {
        command.stdin(Stdio::piped());
    }
    Running::start(command.stdout(Stdio::null()))
}

#[test]
#[ignore = "a part of the tests below"]
fn helper_serves() {
    if !is_helper() {
        return;
    }
    // SAFETY: no memory is involved. Ends with the thread of the test that has started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let own = match std::env::var_os("SHARED") {
        Some(_) => std::io::stdin().as_fd().try_clone_to_owned().unwrap().into(),
        None => {
            epoll::add(&set, std::io::stdin(), epoll::EventData::new_u64(1), epoll::EventFlags::IN).unwrap();
            listener_with(ADDRESS, 128, |socket| socket.set_reuse_port(true).unwrap())
        }
    };
    epoll::add(&set, &own, epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
    loop {
        let mut events = Vec::with_capacity(1);
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), None).unwrap();
        if events[0].data.u64() == 1 {
            drop(own);
            std::thread::park();
            return;
        }
        for mut stream in accept_all(&own) {
            let _ = stream.write_all(&std::process::id().to_ne_bytes());
        }
    }
}

fn address() -> SocketAddr {
    ADDRESS.parse().unwrap()
}

fn until_listening(servers: &[&Running]) {
    let pids: Vec<u32> = servers.iter().map(|server| server.pid()).collect();
    wait_until("all serve", || {
        let Ok(stream) = TcpStream::connect(address()) else { return false };
        pid_of(stream).is_some_and(|pid| pids.contains(&pid)) && listening_sockets() == pids.len()
    });
}

fn affinity(pid: u32) -> usize {
    rustix::thread::sched_getaffinity(rustix::thread::Pid::from_raw(pid as i32)).unwrap().count() as usize
}

#[test]
fn each_process_gets_what_arrives_on_its_cpu() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let servers = [start_server(None), start_server(None)];
    until_listening(&[&servers[0], &servers[1]]);
    let pids = servers.each_ref().map(Running::pid);
    let free = affinity(pids[0]);
    let options = options();
    let folder = options.status_folder.clone().unwrap();
    let attached = Attached::new(&pids, options).unwrap();
    let status = status::all(&folder).unwrap().pop().unwrap();
    assert!(status.attached && status.workers.len() == 2, "{status:?}");
    let at_home = |cpu: usize| status.workers.iter().find(|it| it.cpu == Some(cpu as u32)).unwrap().pid;
    let received = counted("Tcp: ", "InSegs");
    assert_eq!(servers_from(a, address(), 40), BTreeMap::from([(at_home(a), 40)]));
    // Netfilter's input and TCP come before: at least SYN, its answer, and the ACK.
    assert!(counted("Tcp: ", "InSegs") - received >= 3 * 40);
    assert_eq!(servers_from(b, address(), 30), BTreeMap::from([(at_home(b), 30)]));
    assert_eq!(pids.map(affinity), [1, 1]);
    let steered: u64 = status::all(&folder).unwrap()[0].workers.iter().map(|it| it.counters.steered_local).sum();
    assert_eq!(steered, 70);

    // Afterwards the kernel chooses again, and threads may run where they might.
    drop(attached);
    assert_eq!(pids.map(affinity), [free; 2]);
    assert_eq!(servers_from(a, address(), 100).len(), 2, "by chance once in 10^30");
    assert!(status::all(&folder).unwrap().is_empty());
}

/// Has two children that serve, and one more when it is told so.
#[test]
#[ignore = "a part of the test below"]
fn helper_parent() {
    if !is_helper() {
        return;
    }
    // SAFETY: no memory is involved. Ends with the thread of the test that has started it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let mut children = vec![start_server(None), start_server(None)];
    let wait = || rustix::io::read(std::io::stdin(), &mut [0u8]).unwrap();
    wait();
    children.push(start_server(None));
    wait();
}

#[test]
fn processes_come_and_go_without_a_loss() {
    let Some([a, _]) = network_on_two_cpus() else { return };
    let mut parent =
        Helper::command("attach::helper_parent").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let options = options();
    let folder = options.status_folder.clone().unwrap();
    // The children are found without being named, whenever they come.
    let attached = Attached::new(&[parent.id()], options).unwrap();
    let pids = || status::all(&folder).unwrap()[0].workers.iter().map(|worker| worker.pid).collect::<Vec<_>>();
    wait_until("both are found", || pids().len() == 2);
    parent.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    wait_until("the third is found", || pids().len() == 3);
    let gone = pids()[0];
    signal(gone, rustix::process::Signal::KILL);
    wait_until("its socket is closed", || listening_sockets() == 2);
    let served = servers_from(a, address(), 50);
    assert_eq!(served.values().sum::<usize>(), 50, "{served:?}");
    assert!(!served.contains_key(&gone));
    wait_until("it is forgotten", || pids().len() == 2 && !pids().contains(&gone));
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_until("it ends with the program", || attached.has_ended());
}

#[test]
fn what_cannot_be_told_apart_is_left_alone_and_said() {
    let Some(()) = own_network() else { return };
    let shared = listener(ADDRESS);
    let servers = [start_server(Some(&shared)), start_server(Some(&shared))];
    drop(shared);
    let options = options();
    let folder = options.status_folder.clone().unwrap();
    let attached = Attached::new(&servers.each_ref().map(Running::pid), options).unwrap();
    let mut why = String::new();
    wait_until("it is found", || {
        let status = status::all(&folder).unwrap().pop().unwrap();
        why = status.listeners.first().and_then(|it| it.not_accelerated.clone()).unwrap_or_default();
        !why.is_empty()
    });
    assert!(why.contains("share one socket"), "{why}");
    assert_eq!(servers_from(cpus()[0], address(), 20).values().sum::<usize>(), 20);
    drop(attached);
}

#[test]
fn a_stranger_of_the_same_group_keeps_its_share() {
    let Some([a, _]) = network_on_two_cpus() else { return };
    let servers = [start_server(None), start_server(None), start_server(None)];
    until_listening(&[&servers[0], &servers[1], &servers[2]]);
    let pids = servers.each_ref().map(Running::pid);
    let options = options();
    let folder = options.status_folder.clone().unwrap();
    let _attached = Attached::new(&pids[..2], options).unwrap();
    let excluded = status::all(&folder).unwrap()[0].listeners[0].excluded.clone();
    assert!(excluded.len() == 1 && excluded[0].contains("not steered while it is there"), "{excluded:?}");
    assert_eq!(servers_from(a, address(), 200).len(), 3);
}

#[test]
fn a_program_of_another_network_is_steered_there() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let servers = [start_server(None), start_server(None)];
    until_listening(&[&servers[0], &servers[1]]);
    let pids = servers.each_ref().map(Running::pid);
    let attached = std::thread::spawn(move || own_network().map(|()| Attached::new(&pids, options()).unwrap()));
    let attached = attached.join().unwrap().unwrap();
    assert_eq!([servers_from(a, address(), 20).len(), servers_from(b, address(), 20).len()], [1, 1]);
    // It ends with the program.
    drop(servers);
    wait_until("it ends by itself", || attached.has_ended());
}

/// While the processes serve, and once they have closed their listeners or are gone, before the next look.
#[test]
fn another_user_gets_all_of_an_address_that_attached_processes_have_left_and_nothing_before() {
    let Some(()) = own_network() else { return };
    for end in ["close", "kill"] {
        let mut servers = [start_server(None), start_server(None)];
        until_listening(&[&servers[0], &servers[1]]);
        let _attached = Attached::new(&servers.each_ref().map(Running::pid), options()).unwrap();
        as_user(STRANGER, is_refused);
        assert_eq!(servers_from(cpus()[0], address(), 20).values().sum::<usize>(), 20);
        for server in &mut servers {
            match end {
                "close" => server.tell(end),
                _ => signal(server.pid(), rustix::process::Signal::KILL),
            }
        }
        takes_all(address());
    }
}

/// The kernel lets no other user into a group of SO_REUSEPORT.
fn is_refused() {
    let theirs = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    theirs.set_reuse_port(true).unwrap();
    assert_eq!(theirs.bind(&address().into()).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
}

#[test]
fn another_user_cannot_attach_to_a_process() {
    let Some(()) = own_network() else { return };
    let servers = [start_server(None), start_server(None)];
    until_listening(&[&servers[0], &servers[1]]);
    let pids = servers.each_ref().map(Running::pid);
    let error = as_user(STRANGER, || Attached::new(&pids, options()).unwrap_err());
    let wanted = format!("cannot attach to process: {}: not permitted to trace it: it is another user's, or", pids[0]);
    assert!(error.to_string().starts_with(&wanted), "{error}");
    assert!(matches!(error, AccelError::Unavailable { .. }), "{error:?}");
    assert_eq!(servers_from(cpus()[0], address(), 20).values().sum::<usize>(), 20);
}

#[test]
fn who_is_not_there_or_may_not_be_steered_is_an_error() {
    let Some(()) = own_network() else { return };
    let error = Attached::new(&[u32::MAX >> 1], options()).unwrap_err();
    assert!(error.to_string().starts_with("cannot attach to process: 2147483647: "), "{error}");
    assert!(matches!(Attached::new(&[], options()), Err(AccelError::Option { .. })));
}
