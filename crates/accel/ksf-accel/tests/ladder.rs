//! Every level of the ladder, forced, with and without privileges; and the options that queues take over.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::*;
use ksf_accel::{Holder, Level};
use ksf_accel_proto::message::{NO_WORKER, Refusal};

/// Each connection from a CPU goes to the worker at home there; without a ready worker to the program's listener.
fn is_local(level: Level, a: usize, b: usize) {
    let holder = start_at(level);
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    let address = own.local_addr().unwrap();
    let (on_a, on_b) = (library.ready(&own, a as i32), library.ready(&own, b as i32));
    let accept = || {
        let of_listener = accept_all(&own).len();
        library.worker(on_a.worker).accepted_fallback.fetch_add(of_listener as u64, SeqCst);
        [library.accept_own(&on_a).len(), library.accept_own(&on_b).len(), of_listener]
    };
    // Sums over connections that are accepted one by one: a worker that lets one wait for two looks is passed over.
    let sent = |cpu: usize, count: usize| {
        let mut sums = [0; 3];
        for _ in 0..count {
            let _client = connect_from(cpu, address, 1);
            sums.iter_mut().zip(accept()).for_each(|(sum, count)| *sum += count);
        }
        sums
    };
    // A level that cannot see the ready bits hears of them at a look. So many in a row are no chance.
    let goes = |what: &str, cpu: usize, expected: [usize; 3]| {
        wait_until(format!("{level:?}: {what}"), || sent(cpu, expected.iter().sum()) == expected);
    };
    goes("a worker takes what arrives on its CPU", a, [40, 0, 0]);
    goes("so does the other", b, [0, 30, 0]);
    if level == Level::SkLookup {
        let workers = holder.status().unwrap().workers;
        assert!(workers.iter().all(|worker| worker.counters.steered_remote == 0), "{level:?}: {workers:?}");
        assert!(workers.iter().all(|worker| worker.counters.steered_local >= 30), "{level:?}: {workers:?}");
    }
    library.set_ready(&on_a, false);
    goes("the other takes them", a, [0, 20, 0]);
    library.set_ready(&on_b, false);
    goes("the listener takes them", a, [0, 0, 20]);
    goes("the listener takes those of the other CPU", b, [0, 0, 20]);
    library.set_ready(&on_a, true);
    goes("the worker is back", a, [20, 0, 0]);
    holder.pause().unwrap();
    assert_eq!(sent(a, 20), [0, 0, 20], "{level:?}: paused");
    holder.resume().unwrap();
    goes("it is on again", a, [20, 0, 0]);
}

#[test]
fn each_level_is_local_and_falls_back() {
    let Some([a, b]) = network_on_two_cpus() else { return };
    for level in [Level::SkLookup, Level::ClassicBpf] {
        is_local(level, a, b);
    }
}

/// Queues of this process's holders that are to wake them: they look no more until then.
fn armed_queues() -> usize {
    let infos = std::fs::read_dir("/proc/self/fdinfo").unwrap().map(|info| info.unwrap().path());
    // Others may close descriptors meanwhile.
    let infos = infos.map(|info| std::fs::read_to_string(info).unwrap_or_default());
    let armed = |line: &&str| {
        let events = line.split_once(" events: ").map(|(_, behind)| behind.split_whitespace().next().unwrap());
        let events = events.map_or(0, |events| u32::from_str_radix(events, 16).unwrap());
        let wanted = (libc::EPOLLIN | libc::EPOLLONESHOT) as u32;
        events & wanted == wanted
    };
    infos.map(|info| info.lines().filter(armed).count()).sum()
}

/// A worker becomes ready without a request, and where none was, no connection gets into a queue.
#[test]
fn a_worker_that_is_ready_after_the_last_look_gets_connections() {
    let Some(()) = own_network() else { return };
    let (holder, own, cpu) = (start_at(Level::ClassicBpf), listener("127.0.0.1:0"), cpus()[0]);
    let library = Library::hello(&holder);
    let place = library.join(&own, NO_WORKER, cpu as i32).unwrap_or_else(|reason| panic!("{reason:?}"));
    wait_until("the holder looks no more", || armed_queues() == 1);
    library.set_ready(&place, true);
    wait_until("the worker gets connections", || {
        let _client = connect_from(cpu, own.local_addr().unwrap(), 1);
        let _ = accept_all(&own);
        !library.accept_own(&place).is_empty()
    });
}

#[test]
fn without_privileges_the_ladder_goes_down_and_says_why() {
    let Some(()) = own_network() else { return };
    as_nobody("ladder::helper_without_privileges", None);
}

#[test]
#[ignore = "a part of the test above"]
fn helper_without_privileges() {
    if !is_helper() {
        return;
    }
    let holder = Holder::start(options()).unwrap();
    assert_eq!(holder.level(), Level::ClassicBpf);
    let refused = holder.refused();
    assert_eq!(refused.iter().map(|refused| refused.level).collect::<Vec<_>>(), [Level::SkLookup]);
    assert!(refused.iter().all(|refused| refused.why.contains("CAP_BPF")), "{refused:?}");
    drop(holder);
    let [a, b, ..] = cpus()[..] else { return };
    is_local(Level::ClassicBpf, a, b);
    // A level that does not work here is not replaced by another: the options asked for it.
    let holder = start_with(|options| options.level = Some(Level::SkLookup));
    assert_eq!(holder.level(), Level::Plain);
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    assert_eq!(library.listen(&own), Err(Refusal::Off));
    assert_eq!(library.join(&own, u32::MAX, -1).err(), Some(Refusal::Off));
}

/// Runs a helper below as user 65534, in this thread's network namespace; standard input is the listener, if there is one.
fn as_nobody(name: &str, own: Option<&TcpListener>) {
    // Where it lies, only its owner may look; and where we write, only we.
    let folder = folder();
    let copy = folder.join("helper");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    std::os::unix::fs::chown(&folder, Some(65534), Some(65534)).unwrap();
    let mut command = Helper::command_of(&copy, name);
    command.env("TMPDIR", &folder).uid(65534).gid(65534);
    if let Some(own) = own {
        command.stdin(std::os::fd::OwnedFd::from(own.try_clone().unwrap()));
    }
    let output = command.current_dir("/").output().unwrap();
    let said = stdout(&output) + &stderr(&output);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_listener_of_another_user_has_siblings_too() {
    let Some(()) = own_network() else { return };
    // A group has one owner: the holder, root, gives its queues to the listener's.
    let own = listener("127.0.0.1:0");
    rustix::fs::fchown(&own, Some(rustix::fs::Uid::from_raw(65534)), None).unwrap();
    for level in [Level::SkLookup, Level::ClassicBpf] {
        let holder = start_at(level);
        let library = Library::hello(&holder);
        let cpu = cpus()[0];
        library.listen(&own).unwrap_or_else(|_| panic!("{:?}", holder.status().unwrap().listeners));
        let place = library.ready(&own, cpu as i32);
        assert_eq!(rustix::fs::fstat(&place.queue).unwrap().st_uid, 65534);
        wait_until("all go to its queue", || {
            let _clients = connect_from(cpu, own.local_addr().unwrap(), 5);
            let _ = accept_all(&own);
            library.accept_own(&place).len() == 5
        });
    }
}

#[test]
fn plain_changes_nothing() {
    let Some(()) = own_network() else { return };
    let holder = start_at(Level::Plain);
    assert_eq!(holder.refused().len(), 2);
    let library = Library::hello(&holder);
    let own = listener("127.0.0.1:0");
    assert_eq!(library.listen(&own), Err(Refusal::Off));
    let status = holder.status().unwrap();
    assert!(status.listeners[0].not_accelerated.is_some() && status.listeners[0].mechanism == Level::Plain);
    let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 3);
    assert_eq!(accept_all(&own).len(), 3);
}

#[test]
fn the_kernel_lets_only_one_program_listen_where_the_level_cannot_help() {
    let Some(()) = own_network() else { return };
    // A program with its own group at a level that would replace its choice.
    let holder = start_at(Level::ClassicBpf);
    let library = Library::hello(&holder);
    let own = listener_with("127.0.0.1:8000", 16, |socket| socket.set_reuse_port(true).unwrap());
    assert_eq!(library.listen(&own), Err(Refusal::Queue));
    let listeners = holder.status().unwrap().listeners;
    assert!(listeners[0].not_accelerated.as_ref().unwrap().contains("SO_REUSEPORT"), "{listeners:?}");
}

/// Level, number and value of options that accepted sockets inherit.
const OPTIONS: &[(i32, i32, &[u8])] = &[
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, &1i32.to_ne_bytes()),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, &1i32.to_ne_bytes()),
    (libc::SOL_SOCKET, libc::SO_RCVBUF, &50_000i32.to_ne_bytes()),
    (libc::SOL_SOCKET, libc::SO_SNDBUF, &60_000i32.to_ne_bytes()),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, &7i32.to_ne_bytes()),
    (libc::SOL_SOCKET, libc::SO_MARK, &0x17i32.to_ne_bytes()),
    (libc::SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 9, 0, 0, 0]),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO, &[3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &5_000_000u64.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, &1i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG, &1111i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, &111i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, &22i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, &5i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_SYNCNT, &3i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2, &17i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &3i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno\0\0\0\0\0\0\0\0\0\0\0\0"),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, &12_345i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN, &55i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, &9_999i32.to_ne_bytes()),
    (libc::IPPROTO_TCP, libc::TCP_SAVE_SYN, &1i32.to_ne_bytes()),
    (libc::IPPROTO_IP, libc::IP_TOS, &0x28i32.to_ne_bytes()),
    (libc::IPPROTO_IP, libc::IP_TTL, &33i32.to_ne_bytes()),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, &libc::IP_PMTUDISC_DO.to_ne_bytes()),
    (libc::IPPROTO_IP, libc::IP_TRANSPARENT, &1i32.to_ne_bytes()),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, &44i32.to_ne_bytes()),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &0x30i32.to_ne_bytes()),
    // After IP_TOS, which sets it.
    (libc::SOL_SOCKET, libc::SO_PRIORITY, &5i32.to_ne_bytes()),
];

fn option(socket: &impl AsFd, level: i32, name: i32, bytes: usize) -> Vec<u8> {
    let mut value = vec![0; bytes];
    let mut len = bytes as libc::socklen_t;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket.as_fd());
    // SAFETY: room for `len` bytes.
    let rc = unsafe { libc::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut len) };
    assert_eq!(rc, 0, "option {level}/{name}: {}", std::io::Error::last_os_error());
    value.truncate(len as usize);
    value
}

fn set(socket: &impl AsFd, level: i32, name: i32, value: &[u8]) {
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket.as_fd());
    // SAFETY: `value` is readable.
    let rc = unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), value.len() as libc::socklen_t) };
    assert_eq!(rc, 0, "option {level}/{name}: {}", std::io::Error::last_os_error());
}

#[test]
fn queues_take_over_what_accepted_sockets_inherit() {
    let Some(()) = own_network() else { return };
    for level in [Level::SkLookup, Level::ClassicBpf] {
        let holder = start_at(level);
        let library = Library::hello(&holder);
        let own = listener_with("[::]:0", 77, |socket| socket.set_only_v6(false).unwrap());
        // The first queue is made now; what the program sets later is taken over when a worker joins.
        library.listen(&own).unwrap();
        let fresh = listener_with("[::]:0", 77, |socket| socket.set_only_v6(false).unwrap());
        for &(level, name, value) in OPTIONS {
            set(&own, level, name, value);
        }
        let places = [library.ready(&own, -1), library.ready(&own, -1)];
        for place in &places {
            for &(of, name, value) in OPTIONS {
                let wanted = option(&own, of, name, value.len());
                assert_ne!(wanted, option(&fresh, of, name, value.len()), "option {of}/{name} is not set at all");
                assert_eq!(option(&place.queue, of, name, value.len()), wanted, "{level:?}: option {of}/{name}");
            }
        }
        // The backlog, and a change of it.
        let limits = |max: u32| {
            let queues = &holder.status().unwrap().listeners[0].queues;
            queues.iter().all(|queue| queue.waiting_max == max)
        };
        assert!(limits(77));
        rustix::net::listen(&own, 99).unwrap();
        library.listen(&own).unwrap();
        assert!(limits(99));
    }
}

#[test]
fn a_filter_is_copied_and_one_that_cannot_be_read_ends_the_acceleration() {
    let Some((_holder, library)) = begin() else { return };
    let own = listener("127.0.0.1:0");
    // Passes everything: `ret #65535`.
    let code = [libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 65535 }];
    let program = libc::sock_fprog { len: 1, filter: code.as_ptr().cast_mut() };
    // SAFETY: the bytes of a `sock_fprog`, whose code lives on.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const program).cast::<u8>(), size_of_val(&program)) };
    set(&own, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, bytes);
    let place = library.ready(&own, -1);
    // Told in instructions.
    let mut len: libc::socklen_t = 0;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&place.queue);
    // SAFETY: a length of 0 asks for the length only.
    let rc =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, std::ptr::null_mut(), &raw mut len) };
    assert_eq!((rc, len), (0, 1));
    let _clients = connect_from(cpus()[0], own.local_addr().unwrap(), 2);
    wait_until("they come", || !accept_all(&place.queue).is_empty());
}

#[test]
fn a_sibling_that_cannot_bind_is_told_in_words() {
    let Some(()) = own_network() else { return };
    // The unprivileged holder's siblings of a listener of root: another owner, so no member of its group.
    let own = listener("127.0.0.1:8000");
    as_nobody("ladder::helper_joins_a_foreign_listener", Some(&own));
}

#[test]
#[ignore = "a part of the test above"]
fn helper_joins_a_foreign_listener() {
    if !is_helper() {
        return;
    }
    let own: TcpListener = std::io::stdin().as_fd().try_clone_to_owned().unwrap().into();
    let address: SocketAddr = own.local_addr().unwrap();
    let holder = start_at(Level::ClassicBpf);
    let library = Library::hello(&holder);
    assert_eq!(library.listen(&own), Err(Refusal::Queue));
    let why = holder.status().unwrap().listeners[0].not_accelerated.clone().unwrap();
    assert!(why.contains("bind()") && why.contains(&address.to_string()), "{why}");
    // The program is unharmed.
    let _clients = connect_from(cpus()[0], address, 3);
    assert_eq!(accept_all(&own).len(), 3);
    assert_eq!(library.state().control.on.load(SeqCst), 1);
}
