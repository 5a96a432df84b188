//! Who dies, and what is left: workers, processes, the holder.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;

use common::*;
use ksf_accel::{Level, run, status};
use ksf_accel_proto::message::{NO_WORKER, REQUEST_BYTES};

#[test]
fn a_stalled_workers_connections_are_taken_by_another() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    for level in [Level::SkLookup, Level::ClassicBpf] {
        let holder = start_with(|options| (options.level, options.look_ms) = (Some(level), 5));
        assert_eq!(holder.level(), level);
        let library = Library::hello(&holder);
        let own = listener("127.0.0.1:0");
        let (stuck, other) = (library.ready(&own, a as i32), library.ready(&own, b as i32));
        // The stuck worker takes none of them, wherever they go.
        let mut clients = Vec::new();
        wait_until("some wait for the stuck worker", || {
            clients.extend(connect_from(a, own.local_addr().unwrap(), 5));
            readable(&stuck.queue)
        });
        wait_until("the other is woken", || readable(&other.rescue));
        let is_rescue_pending = || library.state().control.rescue_pending.load(SeqCst) == 1 << other.listener;
        assert!(is_rescue_pending(), "who is woken sees no call");
        let stalled = || library.worker(stuck.worker).stalled.load(SeqCst) == 1;
        wait_until("the worker is marked", stalled);
        let (mut taken, mut stolen) = (Vec::new(), 0);
        wait_until("all are taken", || {
            taken.extend(accept_all(&other.queue));
            taken.extend(accept_all(&own));
            if let Some((from, queue)) = library.steal(&own, other.worker) {
                assert_eq!(from, stuck.worker);
                let queue = accept_all(&queue);
                stolen += queue.len();
                taken.extend(queue);
            }
            taken.len() == clients.len()
        });
        assert!(stolen > 0, "{level:?}");
        assert_eq!(library.steal(&own, other.worker).map(|it| it.0), None, "{level:?}");
        let status = holder.status().unwrap();
        assert!(status.stalls > 0 && status.rescues > 0, "{level:?}: {status:?}");
        // While it waits again and has nothing, it is not stalled: the holder sees that too.
        wait_until("the mark is taken off", || !stalled());
        // Nor does anybody call any more, once the eventfd has been read: nobody has to look at it.
        wait_until("nobody calls", || {
            let _ = rustix::io::read(&other.rescue, &mut [0; 8]);
            // The holder looks on while something happens.
            let _clients = connect_from(b, own.local_addr().unwrap(), 1);
            let _ = (accept_all(&other.queue), accept_all(&own));
            !is_rescue_pending()
        });
    }
}

#[test]
fn a_killed_workers_queue_is_rescued_and_then_inherited() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    let holder = start();
    let living = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    let dying = joins(&holder, &own, a as i32, 1);
    let index = wait_for_workers(&holder, 1)[0].index;
    let on_b = living.ready(&own, b as i32);
    let mut clients = connect_from(a, own.local_addr().unwrap(), 30);
    drop(dying);
    wait_until("the other is woken", || readable(&on_b.rescue));
    let (from, queue) = living.steal(&own, on_b.worker).expect("a queue");
    assert_eq!(from, index);
    let mut accepted = vec![queue.accept().unwrap().0];
    // The rest waits for a new worker, who gets this queue and no other.
    let heir = living.join(&own, NO_WORKER, a as i32).unwrap();
    assert_eq!(heir.worker, index);
    accepted.extend(accept_all(&heir.queue));
    assert_eq!(accepted.len(), clients.len());
    clients.iter_mut().for_each(|client| client.write_all(b"x").unwrap());
    accepted.iter_mut().for_each(|stream| stream.read_exact(&mut [0]).unwrap());
    let status = holder.status().unwrap();
    assert_eq!(status.ended_workers.steered_local, 30);
}

#[test]
fn a_process_that_is_killed_loses_its_workers_though_a_child_keeps_its_connection() {
    let Some(()) = own_network() else { return };
    let holder = start();
    let mut child = Helper::command("helper_joins_and_forks")
        .env("HOLDER", holder.environment())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    wait_until("it has joined", || {
        holder.status().unwrap().workers.iter().any(|worker| worker.pid == pid && !worker.ready.is_empty())
    });
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("its worker is gone", || holder.status().unwrap().workers.is_empty());
    // The grandchild has ended when the pipe has.
    child.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
#[ignore = "a part of the test above"]
fn helper_joins_and_forks() {
    if !is_helper() {
        return;
    }
    let library = hello_by_environment();
    let own = listener("127.0.0.1:0");
    let _place = library.ready(&own, cpus()[0] as i32);
    // Inherits the connection and waits until its parent is gone.
    let parent = std::process::id();
    // SAFETY: the child makes system calls only.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: as above.
        unsafe {
            while libc::getppid() == parent as i32 {
                libc::usleep(1000);
            }
            libc::_exit(0);
        }
    }
    std::thread::park();
}

#[test]
fn workers_belong_to_the_process_until_it_begins_anew() {
    let Some(()) = own_network() else { return };
    let holder = start();
    let own = listener("127.0.0.1:0");
    let cpu = cpus()[0] as i32;
    // A connection for each question, as the library has it.
    let first = Library::hello(&holder).ready(&own, cpu).worker;
    let second = Library::hello(&holder).ready(&own, cpu).worker;
    let library = Library::hello(&holder);
    let joined = library.join(&own, first, cpu).expect("it is this process's");
    assert_eq!(joined.worker, first);
    assert!(matches!(library.leave(cookie(&own), second, false), ksf_accel_proto::message::Answer::Done { .. }));
    let indexes = || holder.status().unwrap().workers.iter().map(|worker| worker.index).collect::<Vec<_>>();
    assert_eq!(indexes(), [first]);
    // exec(): the process is the same, its descriptors and its promise to serve are gone.
    let _clients = connect_from(cpu as usize, own.local_addr().unwrap(), 3);
    let anew = Library::hello_as(holder.name(), holder.token(), 1);
    assert!(indexes().is_empty());
    let heir = anew.ready(&own, cpu);
    assert_eq!((heir.worker, anew.accept_own(&heir).len()), (first, 3));
    assert_ne!(heir.generation, joined.generation);
}

#[test]
fn a_killed_holder_leaves_nothing_and_the_program_goes_on() {
    let Some(()) = own_network() else { return };
    let folder = folder();
    let mut program = program("holds", &folder);
    let status = the_holder(&folder);
    assert_eq!(sk_lookup_programs(), 1);
    kill(status.pid);
    wait_until("the holder is gone", || !is_alive(status.pid));
    wait_until("its link ends", || sk_lookup_programs() == 0);
    // The program's own listener takes all.
    let address: std::net::SocketAddr = status.listeners[0].address.parse().unwrap();
    let _clients = connect_from(cpus()[0], address, 3);
    // Its socket file is stale, and is removed by who looks.
    assert!(status::all(&folder).unwrap().is_empty());
    assert!(std::fs::read_dir(&folder).unwrap().next().is_none());
    program.kill().unwrap();
    program.wait().unwrap();
    wait_until("no socket is left", || listening_sockets() == 0);
}

#[test]
fn a_holder_ends_with_the_program_whatever_its_processes_become() {
    let Some(()) = own_network() else { return };
    // How the program ends; each must end the holder, and none before its time.
    for way in ["exits", "is killed", "becomes a daemon", "becomes another program"] {
        let folder = folder();
        let role = match way {
            "becomes a daemon" => "daemon",
            "becomes another program" => "exec",
            _ => "holds",
        };
        let mut program = program(role, &folder);
        let status = the_holder(&folder);
        program.stdin.as_mut().unwrap().write_all(b"g").unwrap();
        match way {
            "is killed" => program.kill().unwrap(),
            "exits" | "becomes another program" => drop(program.stdin.take()),
            _ => {
                // `wait()` would close it.
                let stdin = program.stdin.take();
                assert!(program.wait().unwrap().success());
                // The first process has ended; the child that has said nothing lives on the mapping alone. On a slow
                // machine this sees less, but nothing wrong: the holder looks four times a second.
                std::thread::sleep(std::time::Duration::from_millis(1500));
                assert!(is_alive(status.pid), "{way}: the holder ended before the daemon");
                assert!(status::all(&folder).unwrap()[0].processes.is_empty());
                drop(stdin);
            }
        }
        program.wait().unwrap();
        wait_until(way, || !is_alive(status.pid));
        assert!(std::fs::read_dir(&folder).unwrap().next().is_none(), "{way}: the status socket stays");
        wait_until("its link ends", || sk_lookup_programs() == 0);
    }
}

/// The program of the tests above, started as `ksf accel run` would.
fn program(role: &str, folder: &std::path::Path) -> Child {
    Helper::command("helper_program")
        .env("ROLE", role)
        .env("FOLDER", folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "a part of the tests above"]
fn helper_program() {
    if !is_helper() {
        return;
    }
    let options = options_in(std::env::var_os("FOLDER").unwrap().into());
    let prepared = run::prepare(&options, Helper::command("helper_holder"), "/no/such/library.so".as_ref()).unwrap();
    assert_eq!(prepared.level, Level::SkLookup);
    let address = prepared.environment.iter().find(|(name, _)| name == "KSF_ACCEL").unwrap().1.clone();
    // SAFETY: the test runner's other thread waits for this one.
    unsafe { std::env::set_var("HOLDER", address) };
    let mut library = hello_by_environment();
    // As the library does: mapped for as long as the process lives, and inherited by its children.
    let lifetime = library.lifetime.take().unwrap();
    // SAFETY: a fresh mapping that is never touched.
    unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            &lifetime,
            0,
        )
        .unwrap()
    };
    drop(lifetime);
    let own = listener("127.0.0.1:0");
    let _place = library.ready(&own, cpus()[0] as i32);
    let wait = || {
        // Unbuffered: what comes later is for others.
        let _ = rustix::io::read(std::io::stdin(), &mut [0u8]);
    };
    // Until the test has seen the worker.
    wait();
    match std::env::var("ROLE").unwrap().as_str() {
        "daemon" => {
            // SAFETY: the child makes system calls only; it closes what it has inherited but the mapping.
            unsafe {
                if libc::fork() == 0 {
                    libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
                    libc::read(0, [0u8; 1].as_mut_ptr().cast(), 1);
                    libc::_exit(0);
                }
                libc::_exit(0);
            }
        }
        "exec" => {
            // Keeps its process and loses its mapping; `cat` ends with its input.
            use std::os::unix::process::CommandExt;
            panic!("{}", Command::new("cat").exec());
        }
        _ => wait(),
    }
}

#[test]
#[ignore = "a part of the tests above"]
fn helper_holder() {
    if is_helper() {
        run::holder_main().unwrap();
    }
}

fn the_holder(folder: &std::path::Path) -> status::Status {
    let mut found = None;
    wait_until("the program has joined", || {
        let all = status::all(folder).unwrap();
        found = all.into_iter().find(|status| status.workers.iter().any(|worker| !worker.ready.is_empty()));
        found.is_some()
    });
    found.unwrap()
}

fn kill(pid: u32) {
    signal(pid, rustix::process::Signal::KILL);
}

/// sk_lookup programs of this thread's network namespace.
fn sk_lookup_programs() -> usize {
    let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
    let mut ids = [0u32; 16];
    let mut count = 16;
    // SAFETY: room for 16 ids.
    let rc = unsafe {
        libbpf_sys::bpf_prog_query(
            std::os::fd::AsRawFd::as_raw_fd(&namespace),
            libbpf_sys::BPF_SK_LOOKUP,
            0,
            std::ptr::null_mut(),
            ids.as_mut_ptr(),
            &raw mut count,
        )
    };
    assert_eq!(rc, 0);
    count as usize
}

#[test]
fn stopping_a_holder_gives_everything_to_the_program() {
    let Some((holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    let place = library.ready(&own, cpus()[0] as i32);
    holder.stop();
    assert_eq!(sk_lookup_programs(), 0);
    let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 3);
    assert_eq!(accept_all(&own).len(), 3);
    // The worker's descriptor is no listener any more.
    assert_eq!(place.queue.accept().unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(listening_sockets(), 1);
    // The library hears of it.
    assert!(ask(library.socket.as_fd(), &[0; REQUEST_BYTES], &[]).is_none());
}
