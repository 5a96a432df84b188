//! Servers as their users run them: listeners, signals, counters, the service manager.

use crate::support;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{Folder, PATIENCE, Server, ksf, run, stderr, value, wait_until};
use ksf_test::stream::{self, datagrams};
use ksf_test::{Running, rpc};
use rustix::process::Signal;

/// Sends `message` and reads as many bytes back.
fn echo(stream: &mut (impl Read + Write), message: &[u8]) -> Vec<u8> {
    stream.write_all(message).expect("the server reads");
    stream::read_exactly(stream, message.len())
}

fn connect(server: &Server) -> TcpStream {
    stream::connect(server.address(" tcp "))
}

#[test]
fn every_transport_answers_on_every_user_space_engine() {
    for engine in support::engines() {
        let folder = Folder::new();
        let path = folder.path("echo");
        let unix = format!("unix:{}", path.display());
        let args = ["kecho", "--engine", engine, "--listen", "127.0.0.1:0", "--listen", &unix];
        let server = Server::start(&args, 3);
        assert!(server.seen().iter().all(|line| line.contains(&format!("engine={engine} "))), "{:?}", server.seen());
        assert_eq!(echo(&mut connect(&server), b"over tcp"), b"over tcp");
        assert_eq!(echo(&mut UnixStream::connect(&path).unwrap(), b"over unix"), b"over unix");
        let udp = datagrams(server.address(" udp "));
        udp.send(b"over udp").unwrap();
        let mut back = [0; 100];
        let length = udp.recv(&mut back).unwrap();
        assert_eq!(&back[..length], b"over udp");
        server.stop();
        assert!(!path.exists(), "the socket is left behind");
    }
}

/// `ksf tests/echo.rs` shows what spinning changes, and that it is bounded.
#[test]
fn spinning_is_chosen_said_and_counted() {
    for engine in support::engines() {
        for (flag, said, may_spin) in [(None, "auto", true), (Some("off"), "off", false), (Some("20"), "20us", true)] {
            let flag = flag.map(|flag| format!("--spin={flag}"));
            let args = ["kecho", "--engine", engine, "--listen", "tcp:127.0.0.1:0"];
            let server = Server::start(&args.into_iter().chain(flag.as_deref()).collect::<Vec<_>>(), 1);
            assert!(server.seen()[0].contains(&format!(" spin={said} ")), "{:?}", server.seen());
            let mut client = connect(&server);
            const ASKS: u64 = 500;
            (0..ASKS).for_each(|_| assert_eq!(echo(&mut client, b"spin"), b"spin"));
            let counters = &server.stat()["services"][0]["counters"];
            let (spins, missed) = (value(counters, "spins"), value(counters, "spins_missed"));
            // One for each wait at the most; an idle shard waits once.
            let waits_max = if may_spin { value(counters, "turns") } else { 0 };
            assert!(missed <= spins && spins <= waits_max, "{engine} {said}: {spins} spins, {missed} missed");
            // A connection that is open would be waited for.
            drop(client);
            server.stop();
        }
    }
    let wrong = run(&["kecho", "--spin", "soon"]);
    assert!(!wrong.status.success() && stderr(&wrong).contains("--spin"), "{}", stderr(&wrong));
}

/// Calls of RPC go to another value on workers, with the same programs and counters.
#[test]
fn workers_answer_rpc() {
    let server = Server::start(&["krpc2", "--engine", "epoll", "--workers", "2", "--listen", "127.0.0.1:0"], 2);
    let mut tcp = connect(&server);
    let calls: Vec<u8> =
        [rpc::call(1, 100_003, 3, 0), rpc::call(2, 7, 1, 0)].iter().flat_map(|c| rpc::record(c)).collect();
    tcp.write_all(&calls).expect("the server takes it");
    let mut replies = [0; 2].map(|_| rpc::read_record(&mut tcp).expect("a record").expect("a reply"));
    replies.sort_by_key(|reply| rpc::xid(reply));
    assert_eq!(replies, [rpc::accepted(1, &[0]), rpc::accepted(2, &[1])]);
    let own = &server.stat()["services"][0]["own"];
    assert_eq!(value(own, "prog_unavail"), 1, "{own}");
    server.stop();
}

#[test]
fn workers_answer_streams_and_shards_answer_datagrams() {
    let folder = Folder::new();
    let path = folder.path("echo");
    let unix = format!("unix:{}", path.display());
    let args = ["kecho", "--engine", "epoll", "--workers", "3", "--listen", "127.0.0.1:0", "--listen", &unix];
    let server = Server::start(&args, 3);
    let lines = server.seen();
    let says = |transport: &str| lines.iter().any(|line| line.contains(transport) && line.contains(" workers=3 "));
    assert!(says(" tcp ") && says(" unix ") && !says(" udp "), "{lines:?}");
    let mut tcp = connect(&server);
    for at in 0..100u32 {
        // A reply longer than any buffer of the socket: it leaves in parts, in order.
        let message = vec![at as u8; 1 + 7919 * at as usize];
        assert!(echo_while_writing(&mut tcp, &message) == message, "message {at}");
    }
    assert_eq!(echo(&mut UnixStream::connect(&path).unwrap(), b"over unix"), b"over unix");
    let udp = datagrams(server.address(" udp "));
    udp.send(b"over udp").unwrap();
    let mut back = [0; 100];
    let length = udp.recv(&mut back).unwrap();
    assert_eq!(&back[..length], b"over udp");
    // The Unix connection has ended, the other is open: both are counted where shards count theirs.
    wait_until("the end of a connection is counted", || {
        let counters = &server.stat()["services"][0]["counters"];
        value(counters, "accepted") == 2 && value(counters, "closed_by_peer") == 1
    });
    server.stop();
    let mut rest = Vec::new();
    tcp.read_to_end(&mut rest).expect("an orderly end");
}

/// The same as [`echo`] for messages that fit into no buffer.
fn echo_while_writing(stream: &mut TcpStream, message: &[u8]) -> Vec<u8> {
    let mut writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || writer.write_all(message).expect("the server reads"));
        stream::read_exactly(stream, message.len())
    })
}

#[test]
fn where_io_uring_is_refused_epoll_runs_and_the_cause_is_named() {
    let refused = |args: &[&str]| {
        let mut command = ksf();
        support::without_io_uring(&mut command);
        command.args(args);
        command
    };
    let output = refused(&["kecho", "--engine", "uring", "--listen", "127.0.0.1:0"]).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(77), "{text}");
    assert!(text.contains("seccomp") && text.contains("--engine=auto"), "{text}");

    let args = ["kecho", "--no-xdp", "--listen", "127.0.0.1:0"];
    let mut server = Server::start_command(refused(&args), 2);
    let note = server.line_with("engine epoll instead of uring");
    assert!(note.contains("seccomp") && note.contains("to get it"), "{note}");
    assert!(server.seen().iter().any(|line| line.contains(" udp ") && line.contains("engine=epoll ")));
    assert_eq!(echo(&mut connect(&server), b"all the same"), b"all the same");
    server.stop();

    let output = refused(&["doctor", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let setup = report["probes"].as_array().unwrap().iter().find(|probe| probe["name"] == "uring_setup").unwrap();
    assert_eq!((&setup["outcome"], &setup["errno"]), (&"fails".into(), &libc::EPERM.into()));
    assert!(setup["detail"].as_str().unwrap().contains("seccomp"), "{setup}");
}

#[test]
fn without_a_wish_a_server_listens_on_loopback_only() {
    // The usual port may be taken on the machine that runs the tests; then the line about that names loopback.
    let folder = Folder::new();
    let stats = folder.path("stats.sock");
    let mut command = ksf();
    command.args(["krpc2", "--engine", "epoll", "-v", "--stats-socket"]).arg(&stats);
    let first = Running::start(command.stderr(Stdio::piped())).err.line();
    assert!(first.contains("tcp 127.0.0.1:62049"), "{first}");
}

/// What listens where if no address is given: the ports of the documents, on both loopback addresses and nowhere else.
#[test]
fn every_service_listens_on_loopback_by_default() {
    let Some(()) = support::private_network() else { return };
    let folder = Folder::new();
    std::fs::create_dir_all(folder.path("export")).unwrap();
    let both: &[&str] = &["tcp", "udp"];
    for (service, transports, port) in [
        ("kind = \"echo\"", both, 60_007),
        ("kind = \"rpc\"", both, 62_049),
        ("kind = \"http\"", &["tcp"], 8080),
        ("kind = \"store\"\ndata = \"store\"\nlog_bytes = \"8m\"", &["tcp"], 6379),
        // Of NFS, datagrams are for MOUNT alone.
        ("kind = \"nfs\"\nexports = [\"export\"]\nstate = \"nfs\"", both, 2049),
        ("kind = \"9p\"\nexports = [\"export\"]\nstate = \"9p\"", &["tcp"], 5640),
    ] {
        let text = format!("engine = \"epoll\"\n[[service]]\nname = \"it\"\n{service}\n");
        let server = Server::start(&["serve", folder.write("ksf.toml", text).to_str().unwrap()], 2 * transports.len());
        let report = server.stat();
        let listeners = report["services"][0]["listeners"].as_array().unwrap().iter();
        let mut listeners: Vec<&str> = listeners.map(|listener| listener.as_str().unwrap()).collect();
        listeners.sort_unstable();
        let of_both = |transport: &&str| ["127.0.0.1", "[::1]"].map(|address| format!("{transport} {address}:{port}"));
        let wanted: Vec<String> = transports.iter().flat_map(of_both).collect();
        assert_eq!(listeners, wanted, "{service}");
        for address in wanted.iter().filter_map(|listener| listener.strip_prefix("tcp ")) {
            stream::connect(address.parse().unwrap());
        }
        server.stop();
    }
    // Kinds without a usual port listen nowhere.
    for service in ["kind = \"work\"", "kind = \"bpf\"\nobject = \"it.bpf.o\""] {
        let text = format!("[[service]]\nname = \"it\"\n{service}\n");
        let output = run(&["serve", folder.write("ksf.toml", text).to_str().unwrap()]);
        assert!(stderr(&output).contains("no usual port"), "{service}: {}", stderr(&output));
    }
}

#[test]
fn a_busy_port_names_its_holder() {
    let mine = format!("(pid {})", std::process::id());
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (tcp_at, udp_at) = (tcp.local_addr().unwrap(), udp.local_addr().unwrap());
    for wish in [format!("tcp:{tcp_at}"), format!("udp:{udp_at}")] {
        let output = run(&["kecho", "--engine", "epoll", "--listen", &wish]);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(69), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(&wish.replacen(':', " ", 1)) && text.contains(&mine), "{text}");
        assert!(text.contains("--listen"), "{text}");
    }
}

#[test]
fn an_address_of_another_machine_is_refused() {
    // TEST-NET-1 (RFC 5737) is nobody's.
    let output = run(&["kecho", "--engine", "epoll", "--listen", "tcp:192.0.2.1:60007"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(69), "{text}");
    assert!(text.contains("192.0.2.1") && text.contains("no interface has that address"), "{text}");
}

#[test]
fn sigterm_and_sigint_drain() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = Server::start(&["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"], 1);
        let mut stream = connect(&server);
        assert_eq!(echo(&mut stream, b"before"), b"before");
        server.signal(signal);
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).expect("the connection ends without a reset");
        assert!(rest.is_empty());
        drop(stream);
        assert_eq!(server.wait().code(), Some(0), "{:?}", server.seen());
        assert!(server.seen().iter().any(|line| line.contains("draining 1 connections")), "{:?}", server.seen());
        assert!(!server.stats.exists(), "the socket of ksf stat is left behind");
    }
}

#[test]
fn a_second_signal_stops_at_once() {
    let args = ["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0", "--drain-timeout-ms", "600000"];
    let args = [&args[..], &["--send-timeout-ms", "600000"]].concat();
    let mut server = Server::start(&args, 1);
    // A peer that never reads: its replies keep the server from ending.
    let mut stream = connect(&server);
    stream.set_nonblocking(true).unwrap();
    let chunk = vec![7; 1 << 20];
    wait_until("the server holds replies that nobody takes", || {
        let full = stream.write(&chunk).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        let counters = &server.stat()["services"][0]["counters"];
        full && value(counters, "bytes_in") > value(counters, "bytes_out") + 100_000
    });
    server.signal(Signal::TERM);
    server.line_with("draining 1 connections");
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(71));
    assert!(server.seen().iter().any(|line| line.contains("second signal")), "{:?}", server.seen());
}

#[test]
fn sighup_reloads_limits_and_keeps_the_old_ones_on_a_mistake() {
    let folder = Folder::new();
    let file = folder.write("limits.toml", "connections_max = 7\nfragments_max = 70\n");
    let path = file.to_str().unwrap();
    let args = ["krpc2", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0", "--fragments-max", "9"];
    let args = [&args[..], &["--config-limits", path]].concat();
    let mut server = Server::start(&args, 1);
    let limit = |server: &Server, name: &str| value(&server.stat()["services"][0]["limits"], name);
    assert_eq!((limit(&server, "connections_max"), limit(&server, "fragments_max")), (7, 9), "flags win");

    folder.write("limits.toml", "connections_max = 1\n");
    server.signal(Signal::HUP);
    server.line_with("limits reloaded from");
    assert_eq!(limit(&server, "connections_max"), 1);
    // In force, not only on display: the second connection is closed at once.
    let first = connect(&server);
    wait_until("the first connection is counted", || value(&server.stat()["services"][0]["counters"], "accepted") == 1);
    let mut second = connect(&server);
    assert_eq!(second.read(&mut [0; 1]).unwrap_or(0), 0, "the second connection is open");
    drop(first);

    folder.write("limits.toml", "conections_max = 5\n");
    server.signal(Signal::HUP);
    let line = server.line_with("limits not reloaded");
    assert!(line.contains("limits.toml:1:1") && line.contains("conections_max"), "{line}");
    assert_eq!(limit(&server, "connections_max"), 1);
    server.stop();
}

/// True if one more connection is served beside those that are open.
fn is_served(mut stream: impl Read + Write) -> bool {
    // The server may close it before or after it is written to.
    let mut back = [0; 4];
    stream.write_all(b"more").is_ok() && stream.read_exact(&mut back).is_ok() && &back == b"more"
}

#[test]
fn a_listener_has_limits_of_its_own_and_a_reload_changes_them() {
    let folder = Folder::new();
    let path = folder.path("echo");
    let unix = format!("unix:{}", path.display());
    let write = |unix: &str| {
        let service = format!("[[service]]\nname = \"a\"\nkind = \"echo\"\nlisten = [\"tcp:127.0.0.1:0\", {unix}]");
        folder.write("ksf.toml", format!("engine = \"epoll\"\n{service}\n"))
    };
    let with = |connections: u32| format!("{{ address = \"{unix}\", limits = {{ connections_max = {connections} }} }}");
    let file = write(&with(1));
    let mut server = Server::start(&["serve", file.to_str().unwrap()], 2);
    let says = |transport: &str| server.seen().iter().any(|line| line.contains(transport) && line.contains("_max=1 "));
    assert!(says(" unix ") && !says(" tcp "), "{:?}", server.seen());

    let mut first = UnixStream::connect(&path).unwrap();
    assert_eq!(echo(&mut first, b"first"), b"first");
    assert!(!is_served(UnixStream::connect(&path).unwrap()), "the listener has one connection already");
    let tcp = [connect(&server), connect(&server)];
    assert!(tcp.into_iter().all(is_served), "the other listener has limits of the service");

    for (now, served) in [(with(2), true), (with(1), false), (format!("\"{unix}\""), true)] {
        write(&now);
        server.signal(Signal::HUP);
        server.line_with("limits reloaded from");
        // The shard hears of limits and of connections in any order, and a connection that has ended is counted for a while.
        wait_until(&now, || is_served(UnixStream::connect(&path).unwrap()) == served);
    }
    // What cannot be is said, and changes nothing.
    write(&with(0).replace("connections_max", "drain_timeout_ms"));
    server.signal(Signal::HUP);
    let line = server.line_with("limits not reloaded");
    assert!(line.contains("drain_timeout_ms") && line.contains("all listeners together"), "{line}");
    // Nor does a table of another kind.
    let other = std::fs::read_to_string(write(&with(3))).unwrap().replace("\"echo\"", "\"work\"");
    folder.write("ksf.toml", other);
    server.signal(Signal::HUP);
    let line = server.line_with("of another kind");
    assert!(line.contains("limits not reloaded"), "{line}");
    assert_eq!(echo(&mut first, b"still here"), b"still here");
    server.stop();
}

#[test]
fn a_flag_says_the_limits_of_a_listener() {
    let address = "tcp:127.0.0.1:0";
    let args = ["kecho", "--engine", "epoll", "--listen", address, "--listen", "tcp:127.0.0.1:0,connections_max=1"];
    let server = Server::start(&args, 2);
    let second = server.address(" connections_max=1");
    let first = stream::connect(second);
    let mut open = first.try_clone().unwrap();
    assert!(is_served(first));
    assert!(!is_served(stream::connect(second)));
    assert!(is_served(connect(&server)));
    assert_eq!(echo(&mut open, b"still here"), b"still here");
    server.stop();
    let wrong = run(&["kecho", "--workers", "2", "--listen", "tcp:127.0.0.1:0,idle_timeout_ms=5"]);
    assert!(!wrong.status.success() && stderr(&wrong).contains("its workers"), "{}", stderr(&wrong));
}

#[test]
fn sighup_names_the_keys_that_take_a_restart() {
    let folder = Folder::new();
    let service = "[[service]]\nname = \"a\"\nkind = \"echo\"\nlisten = [\"tcp:127.0.0.1:0\"]\n";
    let file = folder.write("ksf.toml", format!("engine = \"epoll\"\n{service}"));
    let mut server = Server::start(&["serve", file.to_str().unwrap()], 1);
    let moved = service.replace("127.0.0.1:0\"", "127.0.0.1:0\", \"udp:127.0.0.1:0\"");
    let limited =
        service.replace("\"tcp:127.0.0.1:0\"", "{ address = \"tcp:127.0.0.1:0\", limits = { fragments_max = 9 } }");
    for (text, says) in [
        (format!("engine = \"epoll\"\n{moved}"), Some("changes of listen take effect at a restart")),
        (format!("spin = \"off\"\n{service}workers = 1\n"), Some("changes of workers, engine, spin take")),
        (format!("engine = \"epoll\"\n{limited}[service.limits]\nfragments_max = 7\n"), None),
    ] {
        folder.write("ksf.toml", text);
        server.signal(Signal::HUP);
        let line = server.line_with("a: limits reloaded from");
        assert!(says.map_or(!line.contains("restart"), |says| line.contains(says)), "{line}");
    }
    folder.write("ksf.toml", format!("engine = \"epoll\"\n{service}{}", service.replace("\"a\"", "\"b\"")));
    server.signal(Signal::HUP);
    server.line_with("b: a new service takes a restart");
    server.stop();
}

#[test]
fn unix_listener_follows_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    for (umask, mode) in [("022", 0o755), ("007", 0o770)] {
        let path = folder.path(umask);
        let mut command = Command::new("sh");
        command.args(["-c", "umask $1; shift; exec \"$@\"", "sh", umask, env!("CARGO_BIN_EXE_ksf")]);
        command.args(["kecho", "--engine", "epoll", "--listen", &format!("unix:{}", path.display())]);
        let server = Server::start_command(command, 1);
        // To connect takes the right to write.
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        server.stop();
    }
}

#[test]
fn wildcard_of_ipv6_serves_ipv6_only_and_says_so() {
    let mut server = Server::start(&["kecho", "--engine", "epoll", "--listen", "tcp:[::]:0"], 1);
    let note = server.line_with("for IPv6 only");
    assert!(note.contains("0.0.0.0"), "{note}");
    let port = server.address(" tcp ").port();
    assert_eq!(echo(&mut stream::connect(format!("[::1]:{port}").parse().unwrap()), b"six"), b"six");
    TcpStream::connect(("127.0.0.1", port)).expect_err("IPv4 is not served");
    server.stop();
}

#[test]
fn sighup_without_a_file_says_so_and_does_no_harm() {
    let mut server = Server::start(&["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"], 1);
    server.signal(Signal::HUP);
    server.line_with("--config-limits");
    assert_eq!(echo(&mut connect(&server), b"still here"), b"still here");
    server.stop();
}

#[test]
fn stat_shows_what_happened() {
    let server = Server::start(&["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"], 1);
    let mut stream = connect(&server);
    assert_eq!(echo(&mut stream, b"12345"), b"12345");
    // The peer may see the reply before the shard has counted it.
    wait_until("the bytes are counted", || value(&server.stat()["services"][0]["counters"], "bytes_out") == 5);
    let report = server.stat();
    assert_eq!(report["schema"], "ksf-stat/1");
    assert_eq!(report["pid"], server.pid());
    let service = &report["services"][0];
    assert_eq!((&service["name"], &service["engine"]), (&"kecho".into(), &"epoll".into()));
    assert_eq!(value(&service["counters"], "accepted"), 1);
    assert_eq!(value(&service["counters"], "bytes_in"), 5);
    let output = run(&["stat", server.stats.to_str().unwrap()]);
    let text = support::stdout(&output);
    assert!(text.contains("kecho: engine=epoll") && text.contains("bytes_in"), "{text}");
    assert!(!text.contains("closed_oversized_message"), "zeros are shown:\n{text}");
    server.stop();
}

#[test]
fn every_field_of_stat_is_documented() {
    let server = Server::start(&["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"], 1);
    let documented =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/formats/stat-json.md")).unwrap();
    let report = server.stat();
    let value = &report["services"][0]["counters"][0];
    for object in [&report, &report["services"][0], value] {
        for key in object.as_object().unwrap().keys() {
            assert!(documented.contains(&format!("`{key}`")), "{key} is not documented");
        }
    }
}

#[test]
fn watch_ends_when_the_server_does() {
    let server = Server::start(&["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"], 1);
    let mut watch = ksf();
    watch.args(["stat", "--watch", "0.05", "--json"]).arg(&server.stats);
    let mut watch = Running::start(watch.stdout(Stdio::piped()).stderr(Stdio::piped()));
    for _ in 0..2 {
        let line = watch.out.line();
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).unwrap()["schema"], "ksf-stat/1");
    }
    server.stop();
    assert_eq!(watch.wait().code(), Some(69), "{:?}", watch.err.seen());
}

#[test]
fn watch_ends_when_nobody_reads_it() {
    let server = Server::start(&["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"], 1);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = ksf();
    command.args(["stat", "--watch", "0.05"]).arg(&server.stats).stdout(writer);
    let output = command.stderr(Stdio::piped()).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()));
    server.stop();
}

#[test]
fn prometheus_is_off_unless_asked_for() {
    let args = ["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0", "--prometheus", "127.0.0.1:0"];
    let mut server = Server::start(&args, 1);
    let line = server.line_with("/metrics ready");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).unwrap();
    assert_eq!(echo(&mut connect(&server), b"x"), b"x");
    let mut peer = TcpStream::connect(address).unwrap();
    peer.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut reply = String::new();
    peer.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
    assert!(reply.contains("ksf_accepted_total{service=\"kecho\"} 1\n"), "{reply}");
    server.stop();

    let plain = Server::start(&args[..5], 1);
    let sockets = listening_sockets(plain.pid());
    // One per shard, and nothing else.
    let shards = plain.stat()["services"][0]["shards"].as_u64().unwrap();
    assert_eq!(sockets, shards, "more listeners than asked for");
    plain.stop();
}

/// TCP sockets in state LISTEN among the descriptors of a process.
fn listening_sockets(pid: u32) -> u64 {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links: Vec<String> =
        fds.filter_map(|fd| Some(std::fs::read_link(fd.path()).ok()?.to_string_lossy().into_owned())).collect();
    let listens = |line: &&str| line.split_whitespace().nth(3) == Some("0A");
    let owned = table.lines().filter(listens).filter(|line| {
        let inode = line.split_whitespace().nth(9).unwrap_or("");
        links.contains(&format!("socket:[{inode}]"))
    });
    owned.count() as u64
}

#[test]
fn serve_runs_several_services_with_limits_of_their_own() {
    let folder = Folder::new();
    let config = folder.write(
        "config.toml",
        r#"
        engine = "epoll"
        [limits]
        fragments_max = 5
        [resources]
        slots = 20
        [[service]]
        name = "echo-a"
        kind = "echo"
        listen = ["tcp:127.0.0.1:0"]
        [[service]]
        name = "rpc-b"
        kind = "rpc"
        listen = ["tcp:127.0.0.1:0"]
        programs = ["200000:1-3"]
        [service.limits]
        fragments_max = 6
        [service.resources]
        slots = 30
        short_slots = 40
        "#,
    );
    let mut server = Server::start(&["serve", config.to_str().unwrap(), "--task-queue-max", "3"], 2);
    let mut stream = TcpStream::connect(server.address("echo-a tcp")).unwrap();
    assert_eq!(echo(&mut stream, b"a"), b"a");
    let mut caller = stream::connect(server.address("rpc-b tcp"));
    let (call, reply) = (rpc::call(7, 200_000, 2, 0), rpc::accepted(7, &[0]));
    stream::ask(&mut caller, &rpc::record(&call), &rpc::record(&reply));
    let report = server.stat();
    let limit = |at: usize| value(&report["services"][at]["limits"], "fragments_max");
    assert_eq!((limit(0), limit(1)), (5, 6));
    let resource = |at: usize, name: &str| value(&report["services"][at]["limits"], name);
    assert_eq!((resource(0, "slots"), resource(1, "slots")), (20, 30));
    assert_eq!((resource(0, "short_slots"), resource(1, "short_slots")), (4096, 40));
    let slots = |name: &str| value(&report["services"][1]["slots"], name);
    assert_eq!((slots("slots_kept_bytes"), slots("short_slots_kept_bytes")), (0, 0));
    assert_eq!((resource(0, "task_queue_max"), resource(1, "task_queue_max")), (3, 3));

    let text = std::fs::read_to_string(&config).unwrap();
    folder.write("config.toml", text.replace("fragments_max = 5", "fragments_max = 8"));
    server.signal(Signal::HUP);
    server.line_with("echo-a: limits reloaded");
    server.line_with("rpc-b: limits reloaded");
    let report = server.stat();
    let limit = |at: usize| value(&report["services"][at]["limits"], "fragments_max");
    assert_eq!((limit(0), limit(1)), (8, 6));
    server.stop();
}

#[test]
fn an_nfs_write_of_1_mib_is_within_the_default_limits() {
    let server = Server::start(&["krpc2", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"], 1);
    let mut rpc = connect(&server);
    // RFC 5531 and RFC 1813: xid 7, call, RPC version 2, NFS version 3, WRITE, AUTH_NONE twice; a handle of 64 bytes,
    // offset 0, count, FILE_SYNC, the data.
    const DATA_BYTES: u32 = 1 << 20;
    let head = [7, 0, 2, 100_003, 3, 7, 0, 0, 0, 0, 64];
    let words = head.into_iter().chain([0; 16]).chain([0, 0, DATA_BYTES, 2, DATA_BYTES]);
    let mut call: Vec<u8> = words.flat_map(u32::to_be_bytes).collect();
    call.resize(call.len() + DATA_BYTES as usize, 9);
    let record_mark = 0x8000_0000 | call.len() as u32;
    rpc.write_all(&[&record_mark.to_be_bytes()[..], &call].concat()).unwrap();
    let mut reply = [0; 28];
    rpc.read_exact(&mut reply).expect("the call is not too long");
    // The server knows no WRITE: accepted, PROC_UNAVAIL.
    let expected: Vec<u8> = [0x8000_0018_u32, 7, 1, 0, 0, 0, 3].iter().flat_map(|word| word.to_be_bytes()).collect();
    assert_eq!(reply[..], expected);
    server.stop();
}

#[test]
fn a_service_that_cannot_start_takes_the_others_with_it() {
    let folder = Folder::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let path = folder.path("echo");
    let config = folder.write(
        "config.toml",
        format!(
            "engine = \"epoll\"\n[[service]]\nname = \"a\"\nkind = \"echo\"\nlisten = [\"unix:{}\"]\n\
             [[service]]\nname = \"b\"\nkind = \"echo\"\nlisten = [\"tcp:{}\"]\n",
            path.display(),
            taken.local_addr().unwrap()
        ),
    );
    let stats = folder.path("stats.sock");
    let output = ksf().arg("serve").arg(config).arg("--stats-socket").arg(&stats).output().unwrap();
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert!(!path.exists() && !stats.exists(), "sockets are left behind");
}

/// `ksf ARGS`, started as systemd would: `listener` as descriptor 3, called `name`.
fn activated(listener: impl Into<std::os::fd::OwnedFd>, name: &str, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!(
            "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$ LISTEN_FDNAMES={name}; exec \"$0\" \"$@\""
        ))
        .arg(env!("CARGO_BIN_EXE_ksf"))
        .args(args)
        .stdin(Stdio::from(listener.into()));
    command
}

#[test]
fn passed_sockets_are_served() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    for wish in [&["kecho", "--engine", "epoll"][..], &["kecho", "--engine", "epoll", "--listen", "systemd:echo"]] {
        let server = Server::start_command(activated(listener.try_clone().unwrap(), "echo", wish), 1);
        assert_eq!(server.address(" tcp "), address);
        // More than one connection: every shard waits on the same socket.
        for number in 0..4_u8 {
            assert_eq!(echo(&mut connect(&server), &[number; 9]), [number; 9]);
        }
        server.stop();
    }
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = udp.local_addr().unwrap();
    let server = Server::start_command(activated(udp, "echo", &["kecho", "--engine", "epoll"]), 1);
    let peer = datagrams(address);
    peer.send(b"datagram").unwrap();
    let mut back = [0; 100];
    assert_eq!(peer.recv(&mut back).unwrap(), 8);
    server.stop();
}

#[test]
fn passed_sockets_go_to_the_service_of_their_name() {
    let folder = Folder::new();
    let config = folder.write(
        "config.toml",
        "engine = \"epoll\"\n[[service]]\nname = \"a\"\nkind = \"echo\"\nlisten = [\"tcp:127.0.0.1:0\"]\n\
         [[service]]\nname = \"b\"\nkind = \"echo\"\n",
    );
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let args = ["serve", config.to_str().unwrap()];
    let server = Server::start_command(activated(listener.try_clone().unwrap(), "b", &args), 2);
    assert_eq!(server.address("b tcp"), address);
    server.stop();
    let mut stranger = activated(listener, "c", &args);
    let output = stranger.output().unwrap();
    assert_eq!(output.status.code(), Some(78), "{}", stderr(&output));
    assert!(stderr(&output).contains("named \"c\""), "{}", stderr(&output));
}

#[test]
fn a_wish_for_passed_sockets_without_any_fails() {
    let output = run(&["kecho", "--listen", "systemd"]);
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert!(stderr(&output).contains("passed no socket"), "{}", stderr(&output));
    let output = ksf().arg("kecho").env("LISTEN_PID", "x").env("LISTEN_FDS", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    assert!(stderr(&output).contains("LISTEN_PID"), "{}", stderr(&output));
}

#[test]
fn the_service_manager_is_told() {
    let folder = Folder::new();
    let notify = UnixDatagram::bind(folder.path("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let said = |wanted: &str| {
        let mut message = [0; 512];
        loop {
            let length = notify.recv(&mut message).unwrap_or_else(|error| panic!("no {wanted}: {error}"));
            let text = String::from_utf8_lossy(&message[..length]).into_owned();
            if text.lines().any(|line| line == wanted) {
                return text;
            }
        }
    };
    let mut command = ksf();
    command
        .args(["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"])
        .env("NOTIFY_SOCKET", folder.path("notify"))
        .env("WATCHDOG_USEC", Duration::from_millis(200).as_micros().to_string());
    let server = Server::start_command(command, 1);
    said("STATUS=starting kecho");
    // A long start gets more time than TimeoutStartSec=.
    said("EXTEND_TIMEOUT_USEC=300000000");
    assert!(said("READY=1").contains("STATUS=serving kecho"));
    said("WATCHDOG=1");
    server.signal(Signal::HUP);
    assert!(said("RELOADING=1").contains("MONOTONIC_USEC="));
    said("READY=1");
    server.signal(Signal::TERM);
    said("STOPPING=1");
    let mut server = server;
    assert_eq!(server.wait().code(), Some(0));
}

/// The manager gives a store more time before its log is recovered; `manager.rs` tests that it does so again while there is progress.
#[test]
fn the_service_manager_is_asked_for_time_before_a_store_is_ready() {
    let folder = Folder::new();
    let notify = UnixDatagram::bind(folder.path("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let data = folder.path("store");
    let args = ["store", "--engine", "epoll", "--log-bytes", "8m", "--listen", "tcp:127.0.0.1:0", "--data"];
    let server = Server::start(&[&args[..], &[data.to_str().unwrap()]].concat(), 1);
    stream::ask(&mut stream::connect(server.address(" tcp ")), b"SET key value\r\n", b"+OK\r\n");
    server.stop();
    let mut command = ksf();
    command.args(args).arg(&data).env("NOTIFY_SOCKET", folder.path("notify"));
    let server = Server::start_command(command, 1);
    stream::ask(&mut stream::connect(server.address(" tcp ")), b"GET key\r\n", b"$5\r\nvalue\r\n");
    let mut told = String::new();
    while !told.contains("READY=1") {
        let mut message = [0; 512];
        let length = notify.recv(&mut message).unwrap_or_else(|error| panic!("{told}: {error}"));
        told.push_str(std::str::from_utf8(&message[..length]).unwrap());
        told.push('\n');
    }
    let at = |line: &str| told.lines().position(|told| told == line).unwrap_or_else(|| panic!("no {line} in {told}"));
    assert!(at("STATUS=starting store") < at("EXTEND_TIMEOUT_USEC=300000000"), "{told}");
    assert!(at("EXTEND_TIMEOUT_USEC=300000000") < at("READY=1"), "{told}");
    server.stop();
}

#[test]
fn quiet_is_quiet_and_verbose_explains() {
    let mut quiet = ksf()
        .args(["kecho", "-q", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"])
        .env("XDG_RUNTIME_DIR", "/nonexistent")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = rustix::process::Pid::from_child(&quiet);
    wait_until("the server listens", || listening_sockets(quiet.id()) > 0);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let mut text = String::new();
    quiet.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(quiet.wait().unwrap().code(), Some(0));
    assert_eq!(text, "");

    let args = ["kecho", "-v", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"];
    let mut server = Server::start(&args, 1);
    server.line_with("limits message_bytes_max=");
    assert_eq!(echo(&mut connect(&server), b"abc"), b"abc");
    let lines = server.stop();
    assert!(lines.iter().any(|line| line.ends_with("kecho: bytes_in 3")), "{lines:?}");
}
