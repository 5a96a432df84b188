//! What the tools print and write: the JSON document, tables, files, and early ends.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;
use ksf_load::Io;

#[test]
fn real_documents_read_back() {
    let rpc = good_rpc_server();
    let bad = rpc_server(|number, xid| match number {
        3 => Vec::new(),
        4 => record(&accepted(xid, &[3])),
        _ => record(&success(xid)),
    });
    let udp = udp_server(|_, bytes| vec![bytes.to_vec()]);
    let documents = [
        run_rpctest(&format!("{rpc} --json -c 100 -i 2 -j 2 -a 4 -q 1,99.5")),
        run_rpctest(&format!("{rpc} --json --rate 2000 -c 50 --arrival poisson")),
        run_rpctest(&format!("{rpc} --json --duration 20ms -a 0 -A sys -f")),
        run_rpctest(&format!("{bad} --json -c 100 -a 4 --timeout 100ms")),
        run_echotest(&format!("{udp} --json -u -c 100 -l 100")),
    ];
    documents.iter().for_each(|ran| drop(ran.assert_reads_back()));
}

#[test]
fn the_table_has_a_header_unless_told_otherwise() {
    let server = good_rpc_server();
    let ran = run_rpctest(&format!("{server} -c 50 -i 2 -a 2"));
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0].starts_with("      Date  TD  INF   MedRPC MedLat"), "{}", lines[0]);
    assert_eq!(lines[1].split_whitespace().nth(2), Some("2"));
    let ran = run_rpctest(&format!("{server} -c 50 -H"));
    assert_eq!(ran.stdout.lines().count(), 1);
    let ran = run_rpctest(&format!("{server} -c 50 -v"));
    assert!(ran.stderr.contains("requests of 44 bytes (auth none, fragments 1"), "{}", ran.stderr);
}

#[test]
fn files_are_written_where_asked() {
    let dir = Folder::new();
    let path = |name: &str| dir.path(name).display().to_string();
    let server = good_rpc_server();
    let ran = run_rpctest(&format!(
        "{server} -c 200 -i 2 -j 2 -d {} --hdr {} --svg {}",
        path("raw"),
        path("log.hlog"),
        path("plot.svg")
    ));
    ran.assert_clean(800);
    let read = |name: &str| std::fs::read_to_string(dir.path(name)).unwrap();
    for run in 1..=2 {
        let counted: u64 = read(&format!("raw/rpctest.{run}.data"))
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().last().unwrap().parse::<u64>().unwrap())
            .sum();
        assert_eq!(counted, 400, "no bucket is left out");
        assert!(read(&format!("raw/rpctest.{run}.gnuplot")).contains(&format!("rpctest.{run}.data")));
        assert!(read(&format!("raw/rpctest.{run}.svg")).contains("</svg>"));
    }
    assert!(read("plot.svg").contains("<polyline"));
    assert_eq!(read("log.hlog").lines().filter(|line| line.contains("HISTFA")).count(), 2);

    run_rpctest(&format!("{server} -c 100 --hdr {}", path("text.hgrm"))).assert_clean(100);
    assert!(read("text.hgrm").contains("Total count    =          100"));

    let ran = run_rpctest(&format!("{server} -c 10 --svg /proc/none/x.svg"));
    assert_eq!(ran.code, 73, "{}", ran.stderr);
}

/// Takes one line, then fails.
struct Pipe<'a> {
    lines: usize,
    error: io::ErrorKind,
    stop: Option<&'a AtomicBool>,
}

impl Write for Pipe<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.lines == 0 {
            return Err(self.error.into());
        }
        if bytes.contains(&b'\n') {
            self.lines -= 1;
            if let Some(stop) = self.stop {
                stop.store(true, Ordering::Relaxed);
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_closed_pipe_ends_quietly_and_another_error_does_not() {
    let server = good_rpc_server();
    let never = AtomicBool::new(false);
    let run = |error| {
        rpctest_with(
            &format!("{server} -c 10 -i 50 -H"),
            &mut Io { out: &mut Pipe { lines: 1, error, stop: None }, err: &mut Vec::new(), stop: &never },
        )
    };
    let report = run(io::ErrorKind::BrokenPipe).unwrap();
    assert_eq!((report.exit_code(), report.body.total.runs), (0, 2));
    assert_eq!(run(io::ErrorKind::StorageFull).unwrap_err().exit_code(), 74);
}

#[test]
fn stopping_reports_what_was_measured() {
    let server = good_rpc_server();
    let stop = AtomicBool::new(false);
    // The stop comes with the first line of output, as from a user who has seen enough.
    let report = rpctest_with(
        &format!("{server} -c 10 -i 50 -H"),
        &mut Io {
            out: &mut Pipe { lines: 5, error: io::ErrorKind::BrokenPipe, stop: Some(&stop) },
            err: &mut Vec::new(),
            stop: &stop,
        },
    )
    .unwrap();
    assert_eq!((report.exit_code(), report.body.total.runs), (0, 1));
}

#[test]
fn stopping_in_the_middle_of_a_run_still_awaits_what_is_outstanding() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let server = rpc_server(|number, xid| {
        if number == 200 {
            STOP.store(true, Ordering::Relaxed);
        }
        record(&success(xid))
    });
    let report = rpctest_with(
        &format!("{server} -c 1000000 -a 8"),
        &mut Io { out: &mut Vec::new(), err: &mut Vec::new(), stop: &STOP },
    )
    .unwrap();
    assert!(report.interrupted && report.ok);
    let messages = report.body.total.messages;
    assert!((200..1_000_000).contains(&messages), "{messages}");
    assert_eq!(messages, report.body.runs[0].calls.sends);
}
