//! `ksf serve demo` as its users run it: each flag of the original, both modes on both engines, and what it says of
//! itself.

use crate::support;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;

use crate::support::{Folder, PATIENCE, Server, ksf, run, stderr, value, wait_until};
use ksf_test::stream::connect;
use rustix::process::Signal;

const GET: &str = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
const BAD: &str = "GET /\r\n\r\n";

/// Starts `ksf serve demo ARGS`, which says so many times that it is ready.
fn demo(args: &[&str], listeners: usize) -> Server {
    Server::start(&[&["serve", "demo"], args].concat(), listeners)
}

/// One answer: its head, and the bytes of its body.
fn answer(stream: &mut impl BufRead) -> (String, Vec<u8>) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        let read = stream.read_line(&mut head).expect("an answer");
        assert!(read > 0, "the connection ended behind {head:?}");
    }
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).expect("a length");
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).expect("the body");
    (head, body)
}

/// Sends a request on a connection of its own, which must end behind the answer.
fn ask(mut stream: impl Read + Write, request: &str) -> (String, Vec<u8>) {
    stream.write_all(request.as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    let answer = answer(&mut reader);
    assert_eq!(reader.read(&mut [0]).expect("an orderly end"), 0);
    answer
}

/// The addresses a server listens on, in order.
fn addresses(server: &Server) -> Vec<SocketAddr> {
    let ready = server.seen().iter().filter(|line| line.ends_with(" ready"));
    ready.filter_map(|line| line.split_whitespace().find_map(|word| word.parse().ok())).collect()
}

/// A counter of the framework's, or of the demo server's.
fn counted(server: &Server, list: &str, name: &str) -> u64 {
    value(&server.stat()["services"][0][list], name)
}

#[test]
fn it_answers_at_every_address_on_every_engine() {
    for engine in support::engines() {
        let folder = Folder::new();
        let path = folder.path("demo");
        let unix = format!("unix:{}", path.display());
        let args = ["-e", engine, "-a", "127.0.0.1:0", "-a", "[::1]:0", "-a", &unix];
        let server = demo(&args, 3);
        assert!(server.seen().iter().all(|line| line.contains(&format!("engine={engine} "))), "{:?}", server.seen());
        let addresses = addresses(&server);
        assert_eq!(addresses.iter().map(SocketAddr::is_ipv6).collect::<Vec<_>>(), [false, true]);
        for address in addresses {
            let (head, body) = ask(connect(address), GET);
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("\r\nConnection: close\r\n"), "{head}");
            assert_eq!((body.len(), &body[..3]), (64, &b"abc"[..]));
        }
        assert_eq!(ask(UnixStream::connect(&path).unwrap(), GET).1.len(), 64);
        assert_eq!(counted(&server, "own", "requests"), 3, "{engine}");
        server.stop();
        assert!(!path.exists(), "the socket is left behind");
    }
}

#[test]
fn without_a_wish_it_listens_on_loopback() {
    // The port is said to be free by a network of its own.
    let Some(()) = support::private_network() else { return };
    let server = demo(&["-e", "epoll"], 2);
    let wanted: [SocketAddr; 2] = ["127.0.0.1:8080".parse().unwrap(), "[::1]:8080".parse().unwrap()];
    assert_eq!(addresses(&server), wanted);
    ask(connect(wanted[0]), GET);
    ask(connect(wanted[1]), GET);
    server.stop();
}

#[test]
fn keep_alive_and_the_length_of_the_page_are_flags() {
    let server = demo(&["-e", "epoll", "-a", "127.0.0.1:0", "-k", "--body-bytes", "100000"], 1);
    let mut stream = connect(addresses(&server)[0]);
    stream.write_all(GET.repeat(5).as_bytes()).unwrap();
    let mut reader = BufReader::new(&stream);
    for _ in 0..5 {
        let (head, body) = answer(&mut reader);
        assert!(!head.contains("Connection") && body.len() == 100_000, "{head}");
    }
    drop(stream);
    assert_eq!((counted(&server, "counters", "accepted"), counted(&server, "own", "requests")), (1, 5));
    server.stop();
}

/// Backends of both families behind a proxy; all three are the demo server.
#[test]
fn proxy_and_backends_on_every_engine() {
    for engine in support::engines() {
        let backends =
            [["-e", engine, "-k", "-w", "1", "-a", "127.0.0.1:0"], ["-e", engine, "-k", "-w", "1", "-a", "[::1]:0"]];
        let backends = backends.map(|args| demo(&args, 1));
        let [first, second] = [0, 1].map(|at| addresses(&backends[at])[0].to_string());
        let args = ["-e", engine, "-k", "-w", "1", "-a", "127.0.0.1:0", "-a", "[::1]:0", "-x", &first, "-x", &second];
        let proxy = demo(&args, 2);
        for address in addresses(&proxy) {
            let mut stream = connect(address);
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            for _ in 0..10 {
                stream.write_all(GET.as_bytes()).unwrap();
                let (head, body) = answer(&mut reader);
                assert!(head.contains("\r\nVia: 1.1 ksf\r\n") && body.len() == 64, "{head}");
            }
        }
        for backend in &backends {
            // They take turns, and the one connection of the proxy to each is kept.
            let counts = (counted(backend, "own", "requests"), counted(backend, "counters", "accepted"));
            assert_eq!(counts, (10, 1), "{engine}");
        }
        assert_eq!(counted(&proxy, "counters", "outgoing_reused"), 18, "{engine}");
        // One backend ends: nobody notices but the counters.
        let [backend, other] = backends;
        backend.stop();
        for _ in 0..4 {
            ask(connect(addresses(&proxy)[0]), "GET / HTTP/1.0\r\n\r\n");
        }
        assert_eq!(counted(&proxy, "own", "bad_gateway"), 0);
        assert!(counted(&proxy, "own", "repeated") > 0);
        other.stop();
        let (head, _) = ask(connect(addresses(&proxy)[0]), GET);
        assert!(head.starts_with("HTTP/1.1 502 Bad Gateway\r\n"), "{head}");
        proxy.stop();
    }
}

#[test]
fn workers_have_the_cpus_they_were_given() {
    let cpus = ksf::cpus::allowed().unwrap();
    let last = cpus.last().unwrap().to_string();
    let server = demo(&["-e", "epoll", "-a", "127.0.0.1:0", "-w", "1", "-c", &last], 1);
    assert!(server.seen()[0].contains(" shards=1 "), "{:?}", server.seen());
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let pinned = threads.filter(|thread| {
        let status = thread.as_ref().unwrap().path().join("status");
        let status = std::fs::read_to_string(status).unwrap();
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(str::trim);
        status.starts_with("Name:\tksf-") && cpus == Some(&last)
    });
    assert!(pinned.count() >= 1, "no thread is pinned to CPU {last}");
    server.stop();

    let all = demo(&["-e", "epoll", "-a", "127.0.0.1:0"], 1);
    assert!(all.seen()[0].contains(&format!(" shards={} ", cpus.len())), "{:?}", all.seen());
    all.stop();
    let from_last = demo(&["-e", "epoll", "-a", "127.0.0.1:0", "-c", &last], 1);
    assert!(from_last.seen()[0].contains(" shards=1 "), "{:?}", from_last.seen());
    from_last.stop();
    let output = run(&["serve", "demo", "-a", "127.0.0.1:0", "-c", "100000", "-w", "1"]);
    assert_ne!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("100000"), "{}", stderr(&output));
}

/// A connection is local if the worker that accepts it runs on the CPU that received it. On loopback that is the
/// client's CPU, so each worker gets the clients of its own.
#[test]
fn connections_are_local_and_counted_by_worker() {
    // The lo of the machine may pass packets on to other CPUs (rps_cpus).
    let Some(()) = support::private_network() else { return };
    for engine in support::engines() {
        let cpus = ksf::cpus::allowed().unwrap();
        let server = demo(&["-e", engine, "-a", "127.0.0.1:0"], 1);
        let address = addresses(&server)[0];
        for (worker, cpu) in cpus.iter().copied().enumerate() {
            let clients = 20 + worker as u64;
            std::thread::spawn(move || {
                ksf::cpus::pin_to(cpu).unwrap();
                for _ in 0..clients {
                    ask(connect(address), GET);
                }
            })
            .join()
            .unwrap();
            let own = |name: &str| counted(&server, "own", &format!("worker{worker}_{name}"));
            assert_eq!((own("accepted"), own("accepted_local")), (clients, clients), "{engine}, worker {worker}");
            assert_eq!(own("requests"), clients);
        }
        let all: u64 = (0..cpus.len() as u64).map(|worker| 20 + worker).sum();
        assert_eq!(counted(&server, "counters", "accepted_local"), all);
        server.stop();
    }
}

#[test]
fn verbose_statistics_tell_of_every_worker() {
    let cpus = ksf::cpus::allowed().unwrap();
    let mut server = demo(&["-e", "epoll", "-a", "127.0.0.1:0", "-v"], 1);
    let address = addresses(&server)[0];
    // From now on, until a line tells of requests: the second in which they came.
    let asking = std::thread::spawn(move || {
        (0..50).for_each(|_| drop(ask(connect(address), GET)));
        ask(connect(address), BAD);
    });
    asking.join().unwrap();
    let sum = loop {
        let line = server.line_with("requests/s ");
        let figure = figure(&line, "requests/s");
        if figure > 0 && !line.contains("worker ") {
            break line;
        }
    };
    assert!(figure(&sum, "accepted/s") > 0, "{sum}");
    assert!(sum.contains(" local ") && sum.ends_with('%'), "{sum}");
    let mut requests = 0;
    let mut bad = false;
    for (worker, cpu) in cpus.iter().enumerate() {
        let line = server.line_with(&format!("worker {worker} cpu {cpu}: "));
        assert!(line.contains(" looks/s ") && line.contains(" empty/s ") && line.contains(" events min/avg/max "));
        requests += figure(&line, "requests/s");
        bad |= line.contains(" bad_requests 1");
    }
    // Rounded, each by itself; and the requests may have fallen into two seconds.
    assert!(requests.abs_diff(figure(&sum, "requests/s")) <= cpus.len() as u64, "{:?}", server.seen());
    if !bad {
        server.line_with(" bad_requests 1");
    }
    server.stop();
}

/// The number behind a word of a line of statistics.
fn figure(line: &str, name: &str) -> u64 {
    let mut words = line.split_whitespace().skip_while(|word| *word != name);
    words.nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no {name} in {line}"))
}

#[test]
fn statistics_go_to_a_file() {
    let folder = Folder::new();
    let log = folder.path("log");
    let text = || std::fs::read_to_string(&log).unwrap_or_default();
    let plain = demo(&["-e", "epoll", "-a", "127.0.0.1:0", "-o", log.to_str().unwrap()], 1);
    ask(connect(addresses(&plain)[0]), GET);
    wait_until("a line tells of the request", || text().lines().any(|line| figure(line, "requests/s") > 0));
    let seen = plain.stop();
    assert!(!text().contains("worker"), "nobody asked for those of the workers");
    assert!(!seen.iter().any(|line| line.contains("requests/s")), "{seen:?}");
    let before = text();

    let args = ["-e", "epoll", "-a", "127.0.0.1:0", "-v", "-o", log.to_str().unwrap()];
    let verbose = demo(&args, 1);
    wait_until("workers are told of", || text().contains("worker 0 cpu "));
    verbose.stop();
    assert!(text().starts_with(&before), "what was in the file is kept");

    let output = run(&["serve", "demo", "-a", "127.0.0.1:0", "-o", "/nonexistent/log"]);
    assert_ne!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("/nonexistent/log"), "{}", stderr(&output));
}

#[test]
fn a_file_configures_it_as_one_service_of_several() {
    let folder = Folder::new();
    let service = |name: &str, keys: &str| {
        format!("[[service]]\nname = \"{name}\"\nkind = \"http\"\nlisten = [\"127.0.0.1:0\"]\n{keys}\n")
    };
    let page = folder.write("page.toml", format!("engine = \"epoll\"\n{}", service("page", "body_bytes = \"1k\"")));
    let page = Server::start(&["serve", page.to_str().unwrap()], 1);
    let backend = format!("backends = [\"{}\"]", addresses(&page)[0]);
    let both = format!("engine = \"epoll\"\n{}{}", service("proxy", &backend), service("other", ""));
    let proxy = folder.write("proxy.toml", &both);
    let proxy = Server::start(&["serve", proxy.to_str().unwrap()], 2);
    let lengths = addresses(&proxy).into_iter().map(|address| ask(connect(address), GET).1.len());
    assert_eq!(lengths.collect::<Vec<_>>(), [1024, 64]);
    assert_eq!(value(&proxy.stat()["services"][0]["limits"], "header_bytes_max"), 8192);
}

#[test]
fn what_it_does_not_do_it_says() {
    for (args, part) in [
        (&["-d"][..], "systemd-run"),
        (&["-e", "kernel"], "--engine=auto"),
        (&["-a", "udp:127.0.0.1:0"], "it needs TCP"),
        (&["-x", "127.0.0.1:1", "--body-bytes", "5"], "cannot be used with"),
        (&["-x", "somewhere"], "invalid"),
        (&["-w", "0"], "-w"),
    ] {
        let output = run(&[&["serve", "demo"], args].concat());
        assert_ne!(output.status.code(), Some(0), "{args:?}");
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn limits_hold_and_are_counted() {
    let args = ["-e", "epoll", "-a", "127.0.0.1:0", "-k", "--header-bytes-max", "200", "--assembly-timeout-ms", "200"];
    let server = demo(&args, 1);
    let address = addresses(&server)[0];
    let long = format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "x".repeat(200));
    for (request, status) in [(&*long, "431"), (BAD, "400"), ("GET / HTTP/1.1\r\nHo", "408")] {
        let (head, _) = ask(connect(address), request);
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
    }
    let own = |name: &str| counted(&server, "own", name);
    assert_eq!((own("oversized_heads"), own("bad_requests"), own("slow_heads")), (1, 1, 1));
    server.stop();
    // The defaults of HTTP are wider than those of other services.
    let server = demo(&["-e", "epoll", "-a", "127.0.0.1:0"], 1);
    let limits = &server.stat()["services"][0]["limits"];
    assert_eq!((value(limits, "header_bytes_max"), value(limits, "idle_timeout_ms")), (8192, 60_000));
    let long = format!("GET / HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "x".repeat(8000));
    assert!(ask(connect(addresses(&server)[0]), &long).0.starts_with("HTTP/1.1 200 "));
    server.stop();
}

#[test]
fn a_stopping_server_finishes_what_it_began() {
    for engine in support::engines() {
        let backend = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = backend.local_addr().unwrap().to_string();
        let mut proxy = demo(&["-e", engine, "-k", "-a", "127.0.0.1:0", "-x", &at], 1);
        let mut client = connect(addresses(&proxy)[0]);
        client.write_all(GET.as_bytes()).unwrap();
        let (mut backend, _) = backend.accept().unwrap();
        backend.set_read_timeout(Some(PATIENCE)).unwrap();
        let asked = backend.read(&mut [0; 1000]).unwrap();
        assert!(asked > 0);
        proxy.signal(Signal::TERM);
        proxy.line_with("draining 1 connections");
        backend.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
        let mut reader = BufReader::new(client);
        assert_eq!(answer(&mut reader).1, b"ok", "{engine}");
        assert_eq!(reader.read(&mut [0]).expect("an orderly end"), 0);
        drop(reader);
        assert_eq!(proxy.wait().code(), Some(0), "{:?}", proxy.seen());
    }
}

#[test]
fn a_passed_socket_is_served() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\""])
        .arg(ksf().get_program())
        .args(["serve", "demo", "-e", "epoll"])
        .stdin(std::process::Stdio::from(std::os::fd::OwnedFd::from(listener)));
    let server = Server::start_command(command, 1);
    assert_eq!(addresses(&server), [address]);
    for _ in 0..4 {
        ask(connect(address), GET);
    }
    server.stop();
}
