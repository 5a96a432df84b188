//! Counters as Prometheus text on a listener of its own: `GET /metrics`, nothing else.
//!
//! Format: <https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use ksf::threads;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{ClientSnapshot, ServiceSnapshot, Snapshot, Source, Value};
use crate::output::{Failure, Status, say};

/// Longest request.
const REQUEST_BYTES_MAX: usize = 8192;
/// Time in which a peer must send its request and take the response.
const TIME_MAX: Duration = Duration::from_secs(1);
/// Peers that are served at the same time.
const PEERS_MAX: usize = 64;

/// Starts the listener and returns its address.
pub(crate) fn open(address: SocketAddr, source: Source) -> Result<SocketAddr, Failure> {
    let listener = TcpListener::bind(address).map_err(|error| refused(address, &error))?;
    let bound = listener.local_addr().map_err(|error| refused(address, &error))?;
    threads::start("ksf-prometheus", move || {
        if let Err(error) = serve(&listener, &source) {
            say(&format_args!("no more counters for Prometheus: {error}"));
        }
    })
    .map_err(|error| Failure::os("cannot start a thread", &error))?;
    Ok(bound)
}

fn refused(address: SocketAddr, error: &io::Error) -> Failure {
    let what = format!("cannot serve Prometheus on {address}: {error}");
    match error.kind() {
        io::ErrorKind::AddrInUse => Failure::new(Status::Unavailable, what)
            .remedy(format!("{}; choose another --prometheus", crate::busy::describe_inet(address, false))),
        io::ErrorKind::AddrNotAvailable => {
            Failure::new(Status::Unavailable, what).remedy("no interface has that address; choose another --prometheus")
        }
        _ => Failure::os(format!("cannot serve Prometheus on {address}"), error).remedy("choose another --prometheus"),
    }
}

/// Serves all peers of a listener on this thread. Of a flood, those that came first are closed for those that come.
fn serve(listener: &TcpListener, source: &Source) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut peers: VecDeque<Client> = VecDeque::with_capacity(PEERS_MAX);
    loop {
        let now = Instant::now();
        peers.retain(|peer| now < peer.deadline);
        let timeout = peers.iter().map(|peer| peer.deadline).min().map(|first| first.saturating_duration_since(now));
        // Rounded up: a wait that ends too early would be one more.
        let timeout = timeout.and_then(|time| Timespec::try_from(time + Duration::from_millis(1)).ok());
        let mut polled = vec![PollFd::new(listener, PollFlags::IN)];
        polled.extend(peers.iter().map(|peer| PollFd::new(&peer.stream, peer.awaits())));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready: VecDeque<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        drop(polled);
        let has_new = ready.pop_front().unwrap_or_default();
        // A peer that goes away or talks nonsense is its own problem.
        peers.retain_mut(|peer| !ready.pop_front().unwrap_or_default() || peer.go_on(source).unwrap_or_default());
        if has_new {
            match listener.accept() {
                Ok((stream, _)) => {
                    if peers.len() == PEERS_MAX {
                        peers.pop_front();
                    }
                    peers.extend(Client::new(stream));
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                // No descriptor is left, most likely: the peers that are there may leave one.
                Err(_) => {
                    if peers.pop_front().is_none() {
                        thread::sleep(Duration::from_millis(100));
                    }
                }
            }
        }
    }
}

/// A peer from its first byte to its end.
struct Client {
    stream: TcpStream,
    deadline: Instant,
    request: Vec<u8>,
    phase: Phase,
}

enum Phase {
    Request,
    /// The rest of the response.
    Response(VecDeque<u8>),
    /// The response is sent, and what the peer still sends, such as a body, is thrown away: closing a socket with unread bytes resets the
    /// connection, and the peer could lose the response (RFC 9112, 9.6).
    Lingering,
}

impl Client {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, deadline: Instant::now() + TIME_MAX, request: Vec::new(), phase: Phase::Request })
    }

    fn awaits(&self) -> PollFlags {
        if matches!(self.phase, Phase::Response(_)) { PollFlags::OUT } else { PollFlags::IN }
    }

    /// Reads or writes what goes now. False: it is done.
    fn go_on(&mut self, source: &Source) -> io::Result<bool> {
        let moved = match &mut self.phase {
            Phase::Request => self.read().map(|has_ended| {
                if has_ended || self.request.windows(4).any(|window| window == b"\r\n\r\n") {
                    self.phase = Phase::Response(respond_in_full(&self.request, source).into());
                }
                true
            }),
            Phase::Response(left) => match self.stream.write(left.as_slices().0) {
                Ok(bytes) => {
                    left.drain(..bytes);
                    if left.is_empty() {
                        self.phase = Phase::Lingering;
                        self.stream.shutdown(Shutdown::Write)?;
                    }
                    Ok(true)
                }
                Err(error) => Err(error),
            },
            Phase::Lingering => self.stream.read(&mut [0; 1024]).map(|bytes| bytes > 0),
        };
        match moved {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(true),
            moved => moved,
        }
    }

    /// Reads some of the request. True: the peer sends no more.
    fn read(&mut self) -> io::Result<bool> {
        let mut chunk = [0; 1024];
        let bytes = self.stream.read(&mut chunk)?;
        self.request.extend_from_slice(&chunk[..bytes]);
        if self.request.len() > REQUEST_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(bytes == 0)
    }
}

fn respond_in_full(request: &[u8], source: &Source) -> Vec<u8> {
    let (status, kind, body) = respond(request, source);
    let mut response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if !request.starts_with(b"HEAD ") {
        response.push_str(&body);
    }
    response.into_bytes()
}

fn respond(request: &[u8], source: &Source) -> (&'static str, &'static str, String) {
    const PLAIN: &str = "text/plain; charset=utf-8";
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or(&[]);
    let mut words = line.split(|byte| *byte == b' ');
    match (words.next(), words.next(), words.next(), words.next()) {
        (Some(b"GET" | b"HEAD"), Some(target), Some(version), None) if version.starts_with(b"HTTP/1.") => {
            let path = target.split(|byte| *byte == b'?').next().unwrap_or(&[]);
            if path == b"/metrics" {
                let kind = "text/plain; version=0.0.4; charset=utf-8";
                ("200 OK", kind, exposition(&source()))
            } else {
                ("404 Not Found", PLAIN, "the counters are at /metrics\n".to_owned())
            }
        }
        (Some(_), Some(_), Some(version), None) if version.starts_with(b"HTTP/1.") => {
            ("405 Method Not Allowed", PLAIN, "GET only\n".to_owned())
        }
        _ => ("400 Bad Request", PLAIN, "this is no HTTP/1 request\n".to_owned()),
    }
}

/// A metric with its help and one sample per service.
type Metrics<'a> = BTreeMap<String, (&'a str, Vec<(&'a str, u64)>)>;

/// The snapshot in the text format.
fn exposition(snapshot: &Snapshot) -> String {
    let mut metrics = Metrics::new();
    for service in &snapshot.services {
        collect(&mut metrics, service, "", &service.counters);
        collect(&mut metrics, service, "kernel_", &service.kernel);
        collect(&mut metrics, service, "service_", &service.own);
    }
    let mut out = format!(
        "# HELP ksf_info Version of ksf.\n# TYPE ksf_info gauge\nksf_info{{version=\"{}\"}} 1\n\
         # HELP ksf_uptime_seconds Time since the start.\n# TYPE ksf_uptime_seconds gauge\n\
         ksf_uptime_seconds {}.{:03}\n",
        escape(&snapshot.ksf),
        snapshot.uptime_ms / 1000,
        snapshot.uptime_ms % 1000
    );
    write(&mut out, metrics, "counter");
    let mut gauges = Metrics::new();
    for service in &snapshot.services {
        for value in &service.slots {
            let entry = gauges.entry(format!("ksf_{}", value.name)).or_insert_with(|| (&value.help, Vec::new()));
            entry.1.push((&service.name, value.value));
        }
    }
    write(&mut out, gauges, "gauge");
    write_clients(&mut out, snapshot);
    out
}

/// What is counted of a client: the name of its metric, its kind, its help.
type OfClient = (&'static str, &'static str, &'static str, fn(&ClientSnapshot) -> u64);

const OF_CLIENTS: [OfClient; 5] = [
    ("connections", "gauge", "Connections that a client has now.", |client| client.connections),
    ("mounts", "gauge", "Mounts that a client told of and did not take back.", |client| client.mounts),
    ("calls_total", "counter", "Calls of a client.", |client| client.calls),
    ("read_bytes_total", "counter", "Bytes that a client has read.", |client| client.read_bytes),
    ("written_bytes_total", "counter", "Bytes that a client has written.", |client| client.written_bytes),
];

fn write_clients(out: &mut String, snapshot: &Snapshot) {
    if snapshot.services.iter().all(|service| service.clients.is_empty()) {
        return;
    }
    for (name, kind, help, value) in OF_CLIENTS {
        let _ = writeln!(out, "# HELP ksf_client_{name} {help}\n# TYPE ksf_client_{name} {kind}");
        for service in &snapshot.services {
            for client in &service.clients {
                let (service, address) = (escape(&service.name), escape(&client.address));
                let value = value(client);
                let _ = writeln!(out, "ksf_client_{name}{{service=\"{service}\",client=\"{address}\"}} {value}");
            }
        }
    }
}

fn write(out: &mut String, metrics: Metrics<'_>, kind: &str) {
    for (name, (help, samples)) in metrics {
        let help = if help.is_empty() { "Counter of the service's own." } else { help };
        let _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {kind}", help.replace('\n', " "));
        for (service, value) in samples {
            let _ = writeln!(out, "{name}{{service=\"{}\"}} {value}", escape(service));
        }
    }
}

fn collect<'a>(metrics: &mut Metrics<'a>, service: &'a ServiceSnapshot, part: &str, values: &'a [Value]) {
    for value in values {
        let stem = value.name.trim_end_matches("_total");
        let entry = metrics.entry(format!("ksf_{part}{stem}_total")).or_insert_with(|| (&value.help, Vec::new()));
        entry.1.push((&service.name, value.value));
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::example;
    use super::*;

    #[test]
    fn samples_of_one_metric_stand_together() {
        let text = exposition(&example());
        assert!(text.contains(
            "# HELP ksf_accepted_total Connections accepted.\n# TYPE ksf_accepted_total counter\n\
             ksf_accepted_total{service=\"echo\"} 3\nksf_accepted_total{service=\"a\\\"b\"} 4\n"
        ));
        assert!(text.contains("ksf_closed_total{service=\"echo\"} 0"));
        assert!(text.contains("ksf_kernel_messages_total{service=\"echo\"} 5"));
        assert!(text.contains("ksf_service_calls_total{service=\"echo\"} 1"));
        assert!(text.contains("# TYPE ksf_short_slots_kept gauge\nksf_short_slots_kept{service=\"echo\"} 6\n"));
        assert!(text.contains("ksf_uptime_seconds 1.500\n"));
        assert!(text.contains(
            "# TYPE ksf_client_read_bytes_total counter\nksf_client_read_bytes_total{service=\"echo\",client=\"::1\"} 9\n"
        ));
        assert!(
            text.contains("# TYPE ksf_client_mounts gauge\nksf_client_mounts{service=\"echo\",client=\"::1\"} 2\n")
        );
        assert_eq!(text.matches("# TYPE ksf_accepted_total ").count(), 1);
    }

    #[test]
    fn requests_get_their_status() {
        let source: Source = Arc::new(example);
        for (request, status) in [
            ("GET /metrics HTTP/1.1\r\n\r\n", "200 OK"),
            ("HEAD /metrics HTTP/1.0\r\n\r\n", "200 OK"),
            ("GET /metrics?x=1 HTTP/1.1\r\n\r\n", "200 OK"),
            ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
            ("GET /metrics\r\n\r\n", "400 Bad Request"),
            ("", "400 Bad Request"),
        ] {
            assert_eq!(respond(request.as_bytes(), &source).0, status, "{request}");
        }
    }

    fn scraped(mut peer: TcpStream) -> String {
        peer.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut reply = String::new();
        peer.read_to_string(&mut reply).unwrap();
        reply
    }

    /// Without the clock: the test is the loop of [`serve`].
    #[test]
    fn response_to_a_request_with_a_body_is_not_lost_by_a_reset() {
        let source: Source = Arc::new(example);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut peer, stream) = ksf_test::stream::pair(&listener);
        let body = [b'x'; 16 << 10];
        let head = format!("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
        peer.write_all(&[head.as_bytes(), &body].concat()).unwrap();
        peer.shutdown(Shutdown::Write).unwrap();
        let mut client = Client::new(stream).unwrap();
        while client.go_on(&source).unwrap() {}
        drop(client);
        let mut response = String::new();
        peer.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 405 ") && response.ends_with("GET only\n"), "{response}");
    }

    /// Each is ended by the clock, and of a flood those that came first end at once.
    #[test]
    fn silent_peers_do_not_delay_a_scrape() {
        let address = open("127.0.0.1:0".parse().unwrap(), Arc::new(example)).unwrap();
        let connect = || TcpStream::connect(address).unwrap();
        for silent in [8, PEERS_MAX, 2 * PEERS_MAX] {
            let mut peers: Vec<TcpStream> = (0..silent).map(|_| connect()).collect();
            for (number, peer) in peers.iter_mut().enumerate().filter(|(number, _)| number % 2 == 0) {
                // One that was closed for others may say so.
                let _ = peer.write_all(&b"GET /metrics HTTP/1.1\r\n"[..number % 20]);
            }
            assert!(scraped(connect()).starts_with("HTTP/1.1 200 OK\r\n"));
            // The last one has had its time no more than the scrape took.
            let last = peers.last().unwrap();
            last.set_nonblocking(true).unwrap();
            let error = last.peek(&mut [0]).map_err(|error| error.kind());
            assert_eq!(error, Err(io::ErrorKind::WouldBlock), "the scrape waited for {silent} silent peers");
            last.set_nonblocking(false).unwrap();
            for peer in &mut peers {
                peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                let end = peer.read(&mut [0]).map_err(|error| error.kind());
                assert!(matches!(end, Ok(0) | Err(io::ErrorKind::ConnectionReset)), "{silent} peers: {end:?}");
            }
        }
    }

    #[test]
    fn endless_request_is_cut_off() {
        let address = open("127.0.0.1:0".parse().unwrap(), Arc::new(example)).unwrap();
        let mut peer = TcpStream::connect(address).unwrap();
        let mut sent = 0;
        while peer.write_all(&[b'x'; 1024]).is_ok() {
            sent += 1024;
            assert!(sent < 64 << 20, "it is read on and on");
        }
    }

    #[test]
    fn it_answers_over_tcp_and_reports_a_busy_port() {
        let address = open("127.0.0.1:0".parse().unwrap(), Arc::new(example)).unwrap();
        let reply = scraped(TcpStream::connect(address).unwrap());
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        let failure = open(address, Arc::new(example)).unwrap_err();
        assert_eq!(failure.status, Status::Unavailable);
        assert!(failure.to_string().contains("(pid "), "{failure}");
    }
}
