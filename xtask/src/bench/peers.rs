//! The small peers answer correctly: a bench against a broken server would compare nothing.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream, UdpSocket};
use std::time::Duration;

use super::case::{CASES, Case, Metric, Placement, Service};
use super::contestant::{Contestant, Pinning, Programs, pair_floor, server_command, start};
use super::have::Have;
use super::host::HostCosts;
use super::measure::{Effort, Meter, SyscallCounter};
use super::watch::Watch;
use crate::process::{Ready, Server, free_port, output};

const TIMEOUT: Duration = Duration::from_secs(20);

/// An ONC RPC NULL call with AUTH_NONE (RFC 5531), without record mark.
fn call(xid: u32) -> Vec<u8> {
    let words = [xid, 0, 2, 100_003, 3, 0, 0, 0, 0, 0];
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn reply(xid: u32) -> Vec<u8> {
    let words = [xid, 1, 0, 0, 0, 0];
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn marked(message: &[u8]) -> Vec<u8> {
    let mark = 0x8000_0000 | message.len() as u32;
    [mark.to_be_bytes().as_slice(), message].concat()
}

fn serve(programs: &Programs, contestant: Contestant, service: Service) -> (Server, u16) {
    let case = Case { service, connections: 1, ..CASES[0] };
    let pinning = Pinning::new(Placement::Unpinned, 1, &[0]).unwrap();
    let port = free_port().unwrap();
    let command = server_command(programs, contestant, &case, &pinning, port).unwrap();
    let (server, _) = start(contestant, command).unwrap();
    (server, port)
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Reads what must come; a failure says what has become of the server.
fn read_answers(server: &mut Server, stream: &mut TcpStream, length: usize) -> Vec<u8> {
    let mut got = vec![0; length];
    if let Err(error) = stream.read_exact(&mut got) {
        panic!("{length} bytes of answers: {error}; {}", server.state());
    }
    got
}

fn tcp_rpc(programs: &Programs, contestant: Contestant) {
    let (mut server, port) = serve(programs, contestant, Service::Null);
    let mut stream = connect(port);
    let request: Vec<u8> = (0..100).flat_map(|xid| marked(&call(xid))).collect();
    // Cuts within marks and bodies; the first piece holds many records, the last ones one byte.
    let (most, rest) = request.split_at(request.len() - 50);
    stream.write_all(most).unwrap();
    for byte in rest {
        stream.write_all(&[*byte]).unwrap();
    }
    let expected: Vec<u8> = (0..100).flat_map(|xid| marked(&reply(xid))).collect();
    assert_eq!(read_answers(&mut server, &mut stream, expected.len()), expected);

    // What it does not serve (here a fragment that is not the last) closes the connection.
    let mut other = connect(port);
    other.write_all(&40u32.to_be_bytes()).unwrap();
    assert_eq!(other.read(&mut [0]).unwrap(), 0);
    server.stop().unwrap();
}

fn tcp_echo(programs: &Programs, contestant: Contestant) {
    let (mut server, port) = serve(programs, contestant, Service::Echo);
    let mut stream = connect(port);
    let data: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    let mut writer = stream.try_clone().unwrap();
    let sent = data.clone();
    let thread = std::thread::spawn(move || writer.write_all(&sent).unwrap());
    let got = read_answers(&mut server, &mut stream, data.len());
    thread.join().unwrap();
    assert!(got == data, "the echo differs");
    server.stop().unwrap();
}

fn udp(programs: &Programs, contestant: Contestant) {
    let exchange = |port: u16, request: &[u8]| {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut got = [0; 2048];
        // Loopback loses nothing as long as the socket buffers hold it.
        for _ in 0..20 {
            socket.send_to(request, (Ipv4Addr::LOCALHOST, port)).unwrap();
        }
        let mut replies = Vec::new();
        for _ in 0..20 {
            let (bytes, from) = socket.recv_from(&mut got).unwrap();
            assert_eq!(from.port(), port);
            replies.push(got[..bytes].to_vec());
        }
        replies
    };
    let (server, port) = serve(programs, contestant, Service::Null);
    assert_eq!(exchange(port, &call(7)), vec![reply(7); 20]);
    server.stop().unwrap();

    let (server, port) = serve(programs, contestant, Service::Echo);
    assert_eq!(exchange(port, &[9; 1400]), vec![vec![9; 1400]; 20]);
    assert_eq!(exchange(port, &[]), vec![Vec::<u8>::new(); 20]);
    server.stop().unwrap();
}

/// A request of the work service, and its reply.
fn work(how: u32, us: u32, payload: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let back = if how == 3 { &[][..] } else { payload };
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>();
    let request = [words(&[8 + payload.len() as u32, how, us]), payload.to_vec()].concat();
    (request, [words(&[4 + back.len() as u32, 0]), back.to_vec()].concat())
}

fn work_case() -> &'static Case {
    CASES.iter().find(|case| case.name == "mux-sleep-split").unwrap()
}

fn serve_work(programs: &Programs, contestant: Contestant) -> (Server, u16) {
    let pinning = Pinning::new(Placement::Unpinned, 1, &[0]).unwrap();
    let port = free_port().unwrap();
    let command = server_command(programs, contestant, work_case(), &pinning, port).unwrap();
    (start(contestant, command).unwrap().0, port)
}

fn tcp_work(programs: &Programs, contestant: Contestant) {
    let (mut server, port) = serve_work(programs, contestant);
    let mut stream = connect(port);
    let (mut requests, mut replies) = (Vec::new(), Vec::new());
    for number in 0..60u32 {
        let (request, reply) = work(number % 4, 20, &vec![number as u8; (number * 97) as usize]);
        requests.extend(request);
        replies.extend(reply);
    }
    // Cuts within length, header and payload.
    let (most, rest) = requests.split_at(requests.len() - 50);
    for part in most.chunks(1000) {
        stream.write_all(part).unwrap();
    }
    for byte in rest {
        stream.write_all(&[*byte]).unwrap();
    }
    let got = read_answers(&mut server, &mut stream, replies.len());
    assert!(got == replies, "{contestant} answers something else");

    // What is not of the protocol closes its connection and no other.
    for bad in [work(4, 0, &[]).0, vec![0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0], vec![0xff; 4]] {
        let mut other = connect(port);
        other.write_all(&bad).unwrap();
        assert_eq!(other.read(&mut [0]).unwrap(), 0, "{bad:?}");
    }
    let (request, reply) = work(0, 0, b"still there");
    stream.write_all(&request).unwrap();
    let mut got = vec![0; reply.len()];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(got, reply);
    server.stop().unwrap();
}

/// With the loops 0001 the fourth connection is answered while the others wait for the first.
fn loops_have_their_connections(programs: &Programs) {
    let (server, port) = serve_work(programs, Contestant::WorkLoops);
    let mut streams: Vec<TcpStream> = (0..4).map(|_| connect(port)).collect();
    let exchange = |stream: &mut TcpStream, how, us| {
        let (request, reply) = work(how, us, b"id");
        stream.write_all(&request).unwrap();
        reply
    };
    let read = |stream: &mut TcpStream, reply: Vec<u8>| {
        let mut got = vec![0; reply.len()];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(got, reply);
    };
    for stream in &mut streams {
        let reply = exchange(stream, 0, 0);
        read(stream, reply);
    }
    // A message at once, and one that asks for the most time there is, so longer than all that follows; nobody waits for
    // its end. They come in one piece, and the first is answered before the second begins: from then on its loop is busy.
    let (at_once, reply) = work(0, 0, b"id");
    streams[0].write_all(&[at_once, work(1, 10_000_000, b"id").0].concat()).unwrap();
    read(&mut streams[0], reply);
    exchange(&mut streams[1], 0, 0);
    exchange(&mut streams[2], 0, 0);
    let beside = exchange(&mut streams[3], 0, 0);
    read(&mut streams[3], beside);
    for stream in &mut streams[..3] {
        stream.set_nonblocking(true).unwrap();
        let error = stream.read(&mut [0]).expect_err("it should wait for the first");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    }
    server.stop().unwrap();
}

fn floor(programs: &Programs) {
    let pinning = Pinning::new(Placement::Unpinned, 1, &[0]).unwrap();
    for name in ["null-tcp-1", "echo-tcp-1", "null-udp-1", "echo-udp-1"] {
        let case = CASES.iter().find(|case| case.name == name).unwrap();
        let text = output(&mut pair_floor(programs, case, &pinning, 100), TIMEOUT).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["round_trips"], 100, "{name}");
        assert!(json["p50_us"].as_f64().unwrap() > 0.0, "{name}");
    }
}

/// Each request is answered with 64 bytes, and its body is in the file, in order.
fn http_log(programs: &Programs, how: &str) {
    const FILE_BYTES: usize = 1 << 17;
    let dir = tempfile::tempdir().unwrap();
    let (path, port) = (dir.path().join("file"), free_port().unwrap());
    let mut command = programs.peer("http_log");
    command.args([how, "127.0.0.1", &port.to_string(), "-1"]);
    if how != "none" {
        command.arg(&path).arg(FILE_BYTES.to_string());
    }
    let server = Server::start("http_log", &mut command, Ready::Lines(1, "ready"), TIMEOUT).unwrap();
    let request = |number: usize, body_bytes: usize| {
        let body = format!("k{number:07}{}", "v".repeat(body_bytes - 8));
        (format!("POST / HTTP/1.1\r\nHost: h\r\ncontent-length: {body_bytes}\r\n\r\n{body}"), body)
    };
    let bodies_bytes = [8, 100, 1336, 60_000];
    let (requests, bodies): (Vec<String>, Vec<String>) =
        bodies_bytes.into_iter().enumerate().map(|(number, bytes)| request(number, bytes)).unzip();
    let answers = |stream: &mut TcpStream, count: usize| {
        for _ in 0..count {
            let mut answer = [0; 64];
            stream.read_exact(&mut answer).unwrap();
            let text = std::str::from_utf8(&answer).unwrap();
            assert!(text.starts_with("HTTP/1.1 204 No Content\r\nDate: ") && text.ends_with(" GMT\r\n\r\n"), "{text}");
            assert!(!text.contains("1970"), "{text}");
        }
    };
    let mut stream = connect(port);
    // Cuts within head and body: the last request comes byte by byte at both ends.
    let (last, first) = requests.split_last().unwrap();
    stream.write_all(first.concat().as_bytes()).unwrap();
    let (head, rest) = last.split_at(90);
    let (middle, end) = rest.split_at(rest.len() - 20);
    for piece in head.as_bytes().chunks(1).chain([middle.as_bytes()]).chain(end.as_bytes().chunks(1)) {
        stream.write_all(piece).unwrap();
    }
    answers(&mut stream, requests.len());
    if how != "none" {
        let file = std::fs::read(&path).unwrap();
        let expected = bodies.concat();
        assert_eq!(file.len(), FILE_BYTES);
        assert!(file.starts_with(expected.as_bytes()), "{how}: the file has something else");
        assert!(file[expected.len()..].iter().all(|byte| *byte == 0));
        // The next but one has no room behind, and is written to the front.
        let (more, body) = request(9, 50_000);
        stream.write_all(more.repeat(2).as_bytes()).unwrap();
        answers(&mut stream, 2);
        let file = std::fs::read(&path).unwrap();
        assert!(file.starts_with(body.as_bytes()) && file[expected.len()..].starts_with(body.as_bytes()));
    }

    // What it does not serve closes its connection and no other.
    for bad in [
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        "POST / HTTP/1.1\r\n\r\n".to_owned(),
        request(0, 8).0.replace(": 8", ": 7"),
        request(0, 8).0.replace(": 8", ": 66000"),
    ] {
        let mut other = connect(port);
        other.write_all(bad.as_bytes()).unwrap();
        assert_eq!(other.read(&mut [0]).unwrap(), 0, "{bad}");
    }
    stream.write_all(requests[0].as_bytes()).unwrap();
    answers(&mut stream, 1);
    server.stop().unwrap();
}

fn host_costs(programs: &Programs) {
    let effort = Effort { seconds: 0.0, scale: 0.01, rate_divisor: 1 };
    let cpus = ksf::cpus::allowed().unwrap();
    let costs = HostCosts::measure(programs, effort, &cpus).unwrap();
    for (name, batches) in [("system call", &costs.system_call_us), ("context switch", &costs.context_switch_us)] {
        assert!(batches.len() == 15 && batches.iter().all(|us| *us > 0.0), "{name}: {batches:?}");
    }
    assert_eq!(costs.wake_up_us.len(), if cpus.len() > 1 { 15 } else { 0 });
    let alone = HostCosts::measure(programs, effort, &cpus[..1]).unwrap();
    assert!(alone.wake_up_us.is_empty(), "there is no other CPU");
}

#[test]
fn system_calls_are_counted() {
    let programs = Programs::build(crate::ksf_binary(None, "debug").unwrap()).unwrap();
    let have = Have::look();
    let case = CASES.iter().find(|case| case.name == "null-tcp-1").unwrap();
    let pinning = Pinning::new(Placement::Unpinned, 1, &[0]).unwrap();
    let effort = Effort { seconds: 0.0, scale: 0.1, rate_divisor: 1 };
    // One receive and one send for each message, whoever counts.
    for by in [SyscallCounter::Perf, SyscallCounter::Strace] {
        if by == SyscallCounter::Perf && have.counter() != Ok(SyscallCounter::Perf) {
            continue;
        }
        let meter = Meter { programs: &programs, effort, watch: Watch::Nothing };
        let sample = meter.syscalls(case, Contestant::Threads, &pinning, by);
        let calls = sample.metrics.get(&Metric::Syscalls).copied().unwrap_or_default();
        assert!((1.9..2.5).contains(&calls), "{by:?}: {calls} {:?}", sample.error);
    }
}

#[test]
fn the_peers_answer_correctly() {
    let programs = Programs::build("unused".into()).unwrap();
    for contestant in [Contestant::Threads, Contestant::ThreadsSpin, Contestant::EventLoop] {
        tcp_rpc(&programs, contestant);
        tcp_echo(&programs, contestant);
    }
    udp(&programs, Contestant::UdpPlain);
    udp(&programs, Contestant::UdpMmsg);
    udp(&programs, Contestant::UdpMmsgSpin);
    tcp_work(&programs, Contestant::WorkThreads);
    tcp_work(&programs, Contestant::WorkLoops);
    loops_have_their_connections(&programs);
    for how in ["none", "append", "fdatasync"] {
        http_log(&programs, how);
    }
    floor(&programs);
    host_costs(&programs);
}
