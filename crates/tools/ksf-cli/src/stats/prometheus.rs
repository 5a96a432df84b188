//! Counters as Prometheus text on a listener of its own: `GET /metrics`, nothing else.
//!
//! Format: <https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use super::{ServiceSnapshot, Snapshot, Source, Value};
use crate::output::{Failure, Status};

/// Starts the listener and returns its address.
pub(crate) fn open(address: SocketAddr, source: Source) -> Result<SocketAddr, Failure> {
    let listener = TcpListener::bind(address).map_err(|error| refused(address, &error))?;
    let bound = listener.local_addr().map_err(|error| refused(address, &error))?;
    thread::Builder::new()
        .name("ksf-prometheus".into())
        .spawn(move || {
            for peer in listener.incoming() {
                match peer {
                    // A peer that goes away or talks nonsense is its own problem.
                    Ok(peer) => drop(answer(peer, &source)),
                    Err(_) => thread::sleep(Duration::from_millis(100)),
                }
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

fn answer(mut peer: TcpStream, source: &Source) -> io::Result<()> {
    const REQUEST_BYTES_MAX: usize = 8192;
    peer.set_read_timeout(Some(Duration::from_secs(1)))?;
    peer.set_write_timeout(Some(Duration::from_secs(1)))?;
    let head_ends = |bytes: &[u8]| bytes.windows(4).any(|window| window == b"\r\n\r\n");
    let request = super::read_request(&mut peer, REQUEST_BYTES_MAX, head_ends)?;
    let (status, kind, body) = respond(&request, source);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    peer.write_all(head.as_bytes())?;
    if !request.starts_with(b"HEAD ") {
        peer.write_all(body.as_bytes())?;
    }
    Ok(())
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
    out
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
    use std::io::Read;
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

    #[test]
    fn it_answers_over_tcp_and_reports_a_busy_port() {
        let address = open("127.0.0.1:0".parse().unwrap(), Arc::new(example)).unwrap();
        let mut peer = TcpStream::connect(address).unwrap();
        peer.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut reply = String::new();
        peer.read_to_string(&mut reply).unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        let failure = open(address, Arc::new(example)).unwrap_err();
        assert_eq!(failure.status, Status::Unavailable);
        assert!(failure.to_string().contains("(pid "), "{failure}");
    }
}
