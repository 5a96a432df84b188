//! http against servers that answer well, in pieces, wrongly, late, or not at all.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::*;

fn good_server() -> SocketAddr {
    http_server(|_, _| ok_with("hello"))
}

/// A port that was free a moment ago.
fn nobody() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[test]
fn every_kind_of_load_is_answered_and_counted() {
    own_network();
    let (requests, connections) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let server = {
        let (requests, connections) = (requests.clone(), connections.clone());
        http_server(move |number, _| {
            requests.fetch_add(1, Ordering::Relaxed);
            connections.fetch_add(u64::from(number == 0), Ordering::Relaxed);
            ok_with("hello")
        })
    };
    for (options, opened) in [
        ("-c 300 -n 8", Some(300)),
        ("-c 300 -n 8 --close client", Some(300)),
        ("-c 300 -n 8 --linger0", Some(300)),
        ("-c 300 -n 8 -j 3 --expect-bytes 5", Some(300)),
        ("-c 100 -n 1 -r 5", Some(20)),
        ("-c 100 -n 1 -r 5 --close client", Some(20)),
        ("-c 1000 -n 7 -r 0", Some(7)),
        ("-c 300 --rate 5K", Some(300)),
        ("-c 300 --rate 5K -r 0 --arrival constant -j 2", None),
    ] {
        let before = [&requests, &connections].map(|count| count.load(Ordering::Relaxed));
        let ran = run_http(&format!("http://{server}/x {options}"));
        let count = options.split_whitespace().nth(1).unwrap().parse().unwrap();
        ran.assert_clean(count);
        let run = ran.run();
        let [asked, accepted] = [&requests, &connections].map(|count| count.load(Ordering::Relaxed));
        assert_eq!((asked - before[0], accepted - before[1]), (count, run.connections.established), "{options}");
        assert!(opened.is_none_or(|opened| run.connections.established == opened), "{options}");
        assert_eq!(run.statuses.iter().collect::<Vec<_>>(), [(&"200".to_owned(), &count)]);
        assert_eq!((run.requests.begun, run.body_bytes), (count, 5 * count));
        assert_eq!(run.threads.iter().map(|thread| thread.messages).sum::<u64>(), count);
    }
}

#[test]
fn answers_may_come_in_any_pieces() {
    own_network();
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x\r\nhel\r\n2\r\nlo\r\n0\r\nA: b\r\n\r\n";
    let until_end = "HTTP/1.0 200 OK\r\nServer: x\r\n\r\nhello";
    let early = format!("HTTP/1.1 103 Early Hints\r\n\r\n{}", String::from_utf8(ok_with("hello")).unwrap());
    let folder = Folder::new();
    let file = folder.path("body");
    std::fs::write(&file, "hello").unwrap();
    for answer in [chunked, until_end, &early] {
        let answer = answer.to_owned();
        let server = tcp_server(move |mut stream| {
            read_head(&mut stream)?;
            // Every byte in a segment of its own.
            answer.as_bytes().iter().try_for_each(|byte| stream.write_all(&[*byte]))
        });
        let ran = run_http(&format!("http://{server}/ -c 20 -n 3 --check {}", file.display()));
        ran.assert_clean(20);
        assert_eq!(ran.run().connections.ended["by_server"], 20);
    }
}

#[test]
fn every_failure_is_told_by_its_kind_and_phase() {
    own_network();
    let short = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf";
    let asked = |then: fn(TcpStream) -> std::io::Result<()>| {
        tcp_server(move |mut stream| {
            read_head(&mut stream)?;
            then(stream)
        })
    };
    for (server, failure) in [
        (nobody(), "refused"),
        (asked(reset), "receive_reset"),
        (
            asked(|mut stream| {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")?;
                reset(stream)
            }),
            "receive_reset",
        ),
        (asked(|_| Ok(())), "closed_unanswered"),
        (asked(|mut stream| stream.write_all(b"HTTP/1.1 200")), "closed_early"),
        (asked(|mut stream| stream.read(&mut [0]).map(drop)), "response_timeout"),
        (
            asked(|mut stream| {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")?;
                stream.read(&mut [0]).map(drop)
            }),
            "response_timeout",
        ),
        (http_server(move |_, _| short.into()), "closed_early"),
        (http_server(|_, _| b"SSH-2.0-OpenSSH\r\n".into()), "bad_response"),
        (http_server(|_, _| b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n".into()), "unexpected_status"),
        (http_server(|_, _| ok_with("hello!")), "wrong_body"),
    ] {
        let ran = run_http(&format!("http://{server}/ -c 7 -n 2 --timeout 300ms --expect-bytes 5"));
        assert_eq!((ran.code, ran.failures()), (1, vec![(failure, 7)]), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!("s: {failure}: ")), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!("not every answer was right: 7 {failure}")), "{}", ran.stderr);
    }
}

#[test]
fn a_reset_before_the_answer_is_one_of_three_resets() {
    own_network();
    let server = tcp_server(reset);
    let ran = run_http(&format!("http://{server}/ -c 30 -n 2"));
    let resets =
        ran.failures().iter().filter(|(kind, _)| kind.ends_with("_reset")).map(|(_, count)| count).sum::<u64>();
    assert_eq!((ran.code, resets), (1, 30), "{}", ran.stderr);
}

#[test]
fn a_reset_while_sending_is_told_from_one_while_waiting() {
    own_network();
    let server = tcp_server(|mut stream| {
        stream.read_exact(&mut [0])?;
        reset(stream)
    });
    // More than the buffers of both sides take.
    let header = format!("X: {}", "x".repeat(32 << 20));
    let stop = AtomicBool::new(false);
    let ran = run_http_until(&format!("http://{server}/ -c 2 -n 1"), &["--header", &header], &stop);
    assert_eq!((ran.code, ran.failures()), (1, vec![("send_reset", 2)]), "{}", ran.stderr);
}

#[test]
fn a_full_backlog_is_a_connect_timeout_and_the_kernels_counters_say_why() {
    let Some(()) = own_network_or_skip("network namespace of its own") else { return };
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    // One connection fits into a backlog of 0, and is never accepted.
    socket.listen(0).unwrap();
    let server = socket.local_addr().unwrap().as_socket().unwrap();
    let _first = TcpStream::connect(server).unwrap();
    let ran = run_http(&format!("http://{server}/ -c 3 -n 3 --connect-timeout 200ms"));
    assert_eq!((ran.code, ran.failures()), (1, vec![("connect_timeout", 3)]), "{}", ran.stderr);
    assert!(ran.run().kernel["ListenOverflows"] >= Some(3), "{:?}", ran.run().kernel);
    assert!(ran.warns("listen-queue-full"), "{}", ran.stderr);
}

#[test]
fn a_server_may_limit_the_requests_of_a_connection() {
    own_network();
    // It says so with the last answer.
    let polite = tcp_server(|mut stream| {
        for number in 0..4 {
            read_head(&mut stream)?;
            let option = if number == 3 { "Connection: close\r\n" } else { "" };
            stream.write_all(format!("HTTP/1.1 200 OK\r\n{option}Content-Length: 0\r\n\r\n").as_bytes())?;
        }
        Ok(())
    });
    let ran = run_http(&format!("http://{polite}/ -c 40 -n 1 -r 0"));
    ran.assert_clean(40);
    assert_eq!(ran.run().connections.ended["by_server"], 10);
    // It closes on the next request.
    let rude = tcp_server(|mut stream| {
        for _ in 0..3 {
            read_head(&mut stream)?;
            stream.write_all(&ok_with(""))?;
        }
        read_head(&mut stream).map(drop)
    });
    let ran = run_http(&format!("http://{rude}/ -c 40 -n 1 -r 0"));
    assert_eq!((ran.failures(), ran.run().requests.answered), (vec![("stale", 10)], 30), "{}", ran.stderr);
}

#[test]
fn bytes_that_nobody_asked_for_are_no_clean_run() {
    own_network();
    let server = http_server(|_, _| [ok_with("a"), b"surplus".to_vec()].concat());
    let ran = run_http(&format!("http://{server}/ -c 5 -n 1 -r 0"));
    assert_eq!((ran.code, ran.run().requests.answered, ran.run().connections.surplus), (1, 5, 5), "{}", ran.stderr);
}

#[test]
fn who_closes_first_is_seen_by_the_server() {
    own_network();
    for (close, seen, ended) in
        [("client", "end", "by_client"), ("reset", "reset", "by_reset"), ("server", "asked", "by_server")]
    {
        let ends: Arc<Mutex<Vec<&str>>> = Arc::default();
        let (told, all) = std::sync::mpsc::channel();
        let server = {
            let ends = ends.clone();
            tcp_server(move |mut stream| {
                let head = read_head(&mut stream)?.unwrap_or_default();
                let end = if head.contains("Connection: close") {
                    stream.write_all(&ok_with("x"))?;
                    "asked"
                } else {
                    stream.write_all(&ok_with("x"))?;
                    match stream.read(&mut [0]) {
                        Ok(0) => "end",
                        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => "reset",
                        other => panic!("{other:?}"),
                    }
                };
                ends.lock().unwrap().push(end);
                told.send(()).unwrap();
                Ok(())
            })
        };
        let ran = run_http(&format!("http://{server}/ -c 9 -n 2 --close {close}"));
        ran.assert_clean(9);
        (0..9).for_each(|_| all.recv().unwrap());
        assert_eq!(*ends.lock().unwrap(), [seen; 9], "{close}");
        assert_eq!(ran.run().connections.ended[ended], 9, "{close}");
    }
}

#[test]
fn a_server_that_does_not_close_is_not_waited_for_forever() {
    own_network();
    let server = tcp_server(|mut stream| {
        while read_head(&mut stream)?.is_some() {
            stream.write_all(&ok_with("x"))?;
        }
        Ok(())
    });
    let ran = run_http(&format!("http://{server}/ -c 4 -n 2 --timeout 200ms"));
    ran.assert_clean(4);
    assert_eq!((ran.run().connections.close_timeouts, ran.run().connections.ended["by_client"]), (4, 4));
    assert!(ran.warns("server-keeps-open"), "{}", ran.stderr);
}

/// With a request every millisecond and one connection, a stall makes late all requests that were due meanwhile: who
/// was due x ms before its end took at least x ms. A closed loop would have had a single late answer.
#[test]
fn an_open_loop_charges_every_request_that_a_stall_kept_waiting() {
    own_network();
    const STALL_MS: u64 = 300;
    // On a kept connection, and with a new one for each request, which is charged for the wait before its connect.
    for requests_per_connection in [0, 1] {
        let answered = Arc::new(AtomicU64::new(0));
        let server = http_server(move |_, _| {
            if answered.fetch_add(1, Ordering::Relaxed) == 100 {
                // The server's fault, not a wait for anything.
                std::thread::sleep(Duration::from_millis(STALL_MS));
            }
            ok_with("x")
        });
        let load = format!("http://{server}/ -c 600 -n 1 --rate 1K --arrival constant -r {requests_per_connection}");
        let ran = run_http(&load);
        ran.assert_clean(600);
        let run = ran.run();
        let mut latencies = vec![&run.response, &run.first_byte];
        if requests_per_connection == 1 {
            latencies.push(&run.connect);
        }
        for latency in latencies {
            // Of 600 requests, 300 were due in the stall: the upper tenth of all took at least half of it.
            let p90 = latency.quantiles.iter().find(|quantile| quantile.percent == 90.0).unwrap().us;
            assert!(p90 >= STALL_MS as f64 / 2.0 * 1e3 * 0.99, "{load}: {p90}");
            assert!(latency.max_us >= (STALL_MS - 2) as f64 * 0.99e3, "{load}: {}", latency.max_us);
        }
        let open = run.open.as_ref().unwrap();
        assert!(open.bound_hits >= STALL_MS / 2 && ran.warns("in-flight-bound"), "{}", open.bound_hits);
    }
}

#[test]
fn what_comes_behind_the_duration_is_in_no_rate() {
    own_network();
    let server = http_server(|_, _| {
        // The server's slowness, not a wait for anything.
        std::thread::sleep(Duration::from_millis(400));
        ok_with("x")
    });
    let ran = run_http(&format!("http://{server}/ -n 3 -r 0 --duration 150ms --drain 20s"));
    ran.assert_clean(3);
    let (requests, connections) = (&ran.run().requests, &ran.run().connections);
    assert_eq!((requests.begun, requests.begun_per_s, requests.rate_per_s), (3, 0.0, 0.0));
    assert!(connections.rate_per_s > 0.0, "they stood in time");
    let lines: Vec<Vec<&str>> = ran.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(lines.iter().any(|words| words.starts_with(&["first", "byte", "3", "0"])), "{}", ran.stdout);
}

#[test]
fn what_was_due_and_never_sent_is_counted() {
    own_network();
    let server = tcp_server(|mut stream| {
        read_head(&mut stream)?;
        stream.read(&mut [0]).map(drop)
    });
    let options = "-n 2 -r 0 --rate 1K --arrival constant --duration 200ms --drain 100ms --timeout 30s";
    let ran = run_http(&format!("http://{server}/ {options}"));
    let requests = &ran.run().requests;
    assert_eq!((ran.code, requests.started, requests.unanswered), (1, 2, 2), "{}", ran.stderr);
    assert_eq!(ran.run().open.as_ref().unwrap().unsent, 198);
    assert!(ran.stderr.contains("2 unanswered"), "{}", ran.stderr);
}

#[test]
fn stopping_reports_what_was_measured() {
    static STOP: AtomicBool = AtomicBool::new(false);
    own_network();
    let total = Arc::new(AtomicU64::new(0));
    let server = http_server(move |_, _| {
        if total.fetch_add(1, Ordering::Relaxed) == 200 {
            STOP.store(true, Ordering::Relaxed);
        }
        ok_with("x")
    });
    let ran = run_http_until(&format!("http://{server}/ -n 4 -r 0 --duration 1h"), &[], &STOP);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.document().interrupted && ran.run().requests.answered > 200);
}

#[test]
fn where_nobody_is_the_run_ends_and_says_so() {
    own_network();
    let begin = Instant::now();
    let ran = run_http(&format!("http://{}/ -n 10 --duration 1h", nobody()));
    assert!(ran.code == 1 && ran.warns("nobody-there"), "{}", ran.stderr);
    let refused = ran.run().failures["refused"];
    assert!(refused >= 1000 && begin.elapsed() < Duration::from_secs(1800));
    // Each of the 10 places rests for a millisecond after each: a server that is away is not flooded.
    let most = 10.0 * (ran.run().wall_s * 1e3 + 2.0);
    assert!((refused as f64) < most, "{refused} in {} s", ran.run().wall_s);
}

/// On loopback the kernel handles a connection on the CPU of who opens it.
#[test]
fn each_thread_opens_its_connections_on_its_cpu() {
    let Some(()) = own_network_or_skip("network namespace of its own, whose loopback has no RPS") else { return };
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
    let server = {
        let seen = seen.clone();
        tcp_server(move |mut stream| {
            read_head(&mut stream)?;
            seen.lock().unwrap().push(socket2::SockRef::from(&stream).cpu_affinity()?);
            stream.write_all(&ok_with("x"))
        })
    };
    let list = cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let count = 20 * cpus.len();
    let ran = run_http(&format!("http://{server}/ -c {count} -n {} --cpu {list}", cpus.len()));
    ran.assert_clean(count as u64);
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, cpus.iter().flat_map(|cpu| [*cpu; 20]).collect::<Vec<_>>());
    let bound: Vec<Option<usize>> = ran.run().threads.iter().map(|thread| thread.cpu).collect();
    assert_eq!(bound, cpus.into_iter().map(Some).collect::<Vec<_>>());
}

#[test]
fn sources_and_destinations_take_turns() {
    own_network();
    let peers: Arc<Mutex<Vec<(u64, String)>>> = Arc::default();
    let server = |number: u64| {
        let peers = peers.clone();
        tcp_server(move |mut stream| {
            peers.lock().unwrap().push((number, stream.peer_addr()?.ip().to_string()));
            read_head(&mut stream)?;
            stream.write_all(&ok_with("x"))
        })
    };
    let (first, second) = (server(1), server(2));
    let ran = run_http(&format!("http://{first}/ http://{second}/ --source 127.0.0.2,127.0.0.3 -c 40 -n 1"));
    ran.assert_clean(40);
    assert_eq!(ran.report().ports.pairs, 4);
    let peers = peers.lock().unwrap();
    for pair in [(1, "127.0.0.2"), (1, "127.0.0.3"), (2, "127.0.0.2"), (2, "127.0.0.3")] {
        let count = peers.iter().filter(|(number, peer)| (*number, peer.as_str()) == pair).count();
        assert_eq!(count, 10, "{pair:?}");
    }
}

#[test]
fn answers_are_counted_by_the_field_that_names_their_worker() {
    own_network();
    let server = http_server(|number, _| {
        // One answer says nothing, one begins with another that is not the last word.
        let field = match number {
            0 => String::new(),
            1 => "HTTP/1.1 103 Early\r\nX-Worker: 7\r\n\r\n".into(),
            _ => format!("x-worker:  {} \r\n", number % 2),
        };
        match number {
            1 => format!("{field}HTTP/1.1 200 OK\r\nX-Worker: a b\r\nContent-Length: 0\r\n\r\n").into_bytes(),
            _ => format!("HTTP/1.1 200 OK\r\n{field}Content-Length: 0\r\n\r\n").into_bytes(),
        }
    });
    let ran = run_http(&format!("http://{server}/ -c 40 -n 2 -r 20 -j 2 --tally X-Worker"));
    ran.assert_clean(40);
    let tally = ran.run().tally.as_ref().unwrap();
    let thread: Vec<(&str, u64)> = vec![("", 1), ("0", 9), ("1", 9), ("a b", 1)];
    for counts in &tally.threads {
        assert_eq!(counts.iter().map(|(value, count)| (value.as_str(), *count)).collect::<Vec<_>>(), thread);
    }
    assert_eq!((tally.threads.len(), tally.values["0"], tally.name.as_str()), (2, 18, "X-Worker"));
    // What a server makes up cannot take all memory.
    let unique = Arc::new(AtomicU64::new(0));
    let server = http_server(move |_, _| {
        let value = unique.fetch_add(1, Ordering::Relaxed);
        format!("HTTP/1.1 200 OK\r\nX-Worker: {value}\r\nContent-Length: 0\r\n\r\n").into_bytes()
    });
    let ran = run_http(&format!("http://{server}/ -c 1500 -n 1 -r 0 --tally X-Worker"));
    let values = &ran.run().tally.as_ref().unwrap().values;
    assert_eq!((values.len(), values["(others)"]), (1025, 1500 - 1024));
}

/// A terminal acts on U+009B as on an escape sequence, and U+202E turns the order of text.
#[test]
fn what_a_server_says_is_printed_without_control_characters() {
    own_network();
    let server = http_server(|_, _| {
        "HTTP/1.1 200 OK\r\nX-Worker: a\u{9b}31m\u{202e}b\r\nContent-Length: 0\r\n\r\n".to_owned().into_bytes()
    });
    for (json, shown) in [("", r"1 a\x9b31m\u{202e}b"), ("--json", r#""a\u009b31m\u202eb": 1"#)] {
        let ran = run_http(&format!("http://{server}/ -c 1 --tally X-Worker {json}"));
        assert!(ran.stdout.contains(shown), "{:?}", ran.stdout);
        assert!(!ran.stdout.contains(['\u{9b}', '\u{202e}']), "{:?}", ran.stdout);
    }
}

#[test]
fn names_and_ipv6_are_reached() {
    own_network();
    let listener = TcpListener::bind("[::1]:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let server = tcp_server_on(&address.to_string(), |mut stream| {
        let head = read_head(&mut stream)?.unwrap_or_default();
        assert!(head.starts_with("GET /a?b HTTP/1.1\r\n"), "{head}");
        stream.write_all(&ok_with("x"))
    });
    run_http(&format!("http://{server}/a?b -c 3")).assert_clean(3);
    // Only one of the addresses of the name answers.
    run_http(&format!("http://localhost:{}/a?b -c 3", good_server().port())).assert_clean(3);
    assert_eq!(run_http("http://no-such-host.invalid/ -c 1").code, 68);
    assert_ne!(run_http(&format!("http://localhost:{}/ -c 1", nobody().port())).code, 0);
}

/// Sets what holds for the network namespace of this thread only.
fn set_sysctl(name: &str, value: &str) {
    std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value).unwrap_or_else(|error| panic!("{name}: {error}"));
}

#[test]
fn a_run_that_would_use_up_the_ports_is_refused_and_its_failures_are_told() {
    let Some(()) = own_network_or_skip("network namespace of its own, for its range of ports") else { return };
    // Servers whose ports are outside of the range.
    let server = http_server_on("127.0.0.1:41000", |_, _| ok_with("hello"));
    set_sysctl("ip_local_port_range", "40000 40009");
    set_sysctl("tcp_tw_reuse", "0");
    let refused = run_http(&format!("http://{server}/ -c 50 -n 1 --close client"));
    assert_eq!(refused.code, 69);
    for part in ["51 ports", "there are 10 ports", "60 s", "--close server", "--force"] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
    let forced = run_http(&format!("http://{server}/ -c 50 -n 1 --close client --force"));
    assert_eq!(forced.failures(), [("address_exhausted", 40)], "{}", forced.stderr);
    assert_eq!((forced.run().requests.answered, forced.report().ports.time_wait_after), (10, Some(10)));
    assert!(forced.warns("ports"), "{}", forced.stderr);
    // Another source has ports of its own, and one that is reset leaves nothing behind.
    let more = run_http(&format!("http://{server}/ -c 50 -n 2 --linger0 --source 127.0.0.2"));
    more.assert_clean(50);
    assert_eq!(more.report().ports.time_wait_after, Some(10));
    // So has another destination: a port of a source serves all of them.
    let other = tcp_server_on("127.0.0.9:41000", |mut stream| {
        read_head(&mut stream)?;
        stream.write_all(&ok_with("x"))?;
        stream.read(&mut [0]).map(drop)
    });
    let two = run_http(&format!("http://{server}/ http://{other}/ -c 19 -n 1 --close client --source 127.0.0.4"));
    two.assert_clean(19);
    assert_eq!(run_http(&format!("http://{server}/ -n 11 -c 1")).code, 69);
    // With a closed loop of unknown speed nobody can tell before: it warns.
    let unknown = run_http(&format!("http://{server}/ -n 1 --close client --duration 1ms --source 127.0.0.3"));
    assert!(unknown.warns("ports"), "{}", unknown.stderr);
}

#[test]
fn the_servers_cpu_time_is_measured() {
    own_network();
    let server = good_server();
    let pid = std::process::id();
    let ran = run_http(&format!("http://{server}/ -c 500 -n 4 --server-pid {pid}"));
    ran.assert_clean(500);
    let used = ran.run().server.as_ref().unwrap();
    // Server and client are one process here, so it used more than the client's threads alone.
    assert!(used.cpu_us > ran.run().cpu_s * 1e6, "{used:?}");
    assert_eq!((used.pids.as_slice(), used.cpu_us_per_connection), (&[pid][..], used.cpu_us_per_request));
    assert_eq!(run_http(&format!("http://{server}/ -c 1 --server-pid 4194303")).code, 64);
    assert_eq!(run_http(&format!("http://{server}/ -c 1 --server-cgroup /no/such")).code, 71);
}

#[test]
fn real_documents_read_back() {
    own_network();
    let (good, pid) = (good_server(), std::process::id());
    let bad = http_server(|_, _| b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n".into());
    let stop = AtomicBool::new(false);
    for (options, words) in [
        (
            format!("http://{good}/ -c 50 -n 2 --server-pid {pid} --expect-bytes 5 --tally X-Worker"),
            &["--header", "X: y z"][..],
        ),
        (format!("http://{good}/ -c 50 --rate 5K -r 0 -j 2 --close client --source 127.0.0.2 --force"), &[]),
        (format!("http://{bad}/ -n 3 --duration 20ms --expect-status 200,204 --linger0"), &[]),
        (format!("http://{}/ -c 3", nobody()), &[]),
    ] {
        run_http_until(&format!("{options} --json"), words, &stop).assert_reads_back();
    }
}

#[test]
fn the_text_for_people_has_the_figures() {
    own_network();
    let ran = run_http(&format!("http://{}/ -c 30 -n 2 --server-pid {}", good_server(), std::process::id()));
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert!(
        lines[0].ends_with("closed loop, 2 connections, requests per connection 1, close by server"),
        "{}",
        lines[0]
    );
    for (line, begin) in
        [(2, "connect              30 "), (3, "first byte           30 "), (4, "response             30 ")]
    {
        assert!(lines[line].starts_with(begin), "{}", lines[line]);
    }
    for part in [
        "requests     30 started = 30 answered + 0 failed + 0 unanswered\n",
        "connections  30 attempted = 30 established + 0 not; ended 30 by_server\n",
        "statuses     30 200\n",
        " us per connection, ",
        "ActiveOpens",
    ] {
        assert!(ran.stdout.contains(part), "{part}: {}", ran.stdout);
    }
    assert!(!ran.stderr.contains("error"), "{}", ran.stderr);
}
