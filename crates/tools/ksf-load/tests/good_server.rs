//! Against servers that do everything right: nothing is reported wrong, and the figures are exact.

use crate::common::*;

#[test]
fn every_mode_of_rpctest_over_tcp() {
    let server = good_rpc_server();
    for options in ["-a 0", "-a 1", "-a 7", "-a 128", "-a 64 --batch 16", "-f", "-f -a 32", "-A sys", "-A UNIX -f -a 0"]
    {
        let ran = run_rpctest(&format!("{server} -c 2000 {options}"));
        ran.assert_clean(2000);
    }
}

#[test]
fn one_call_per_send_and_one_reply_per_receive() {
    let server = good_rpc_server();
    for options in ["-a 1", "-a 16", "-a 128 -f"] {
        let ran = run_rpctest(&format!("{server} -c 3000 {options}"));
        ran.assert_clean(3000);
        let calls = &ran.report().runs[0].calls;
        assert_eq!(calls.replies_per_receive_max, 1, "{options}");
        assert!(calls.sends >= 3000 && calls.receives >= 3000, "{options}: {calls:?}");
    }
    // One in flight: exactly one of each, and one receive that sees the end of the stream.
    let ran = run_rpctest(&format!("{server} -c 500"));
    let calls = &ran.report().runs[0].calls;
    assert_eq!(calls.sends, 500);
    assert!((500..=502).contains(&calls.receives), "{calls:?}");
}

#[test]
fn batches_are_batches_and_are_shown() {
    let server = good_rpc_server();
    let ran = run_rpctest(&format!("{server} -c 4096 -a 64 --batch 64"));
    ran.assert_clean(4096);
    assert!(ran.report().runs[0].calls.sends < 4096);
    assert_eq!(ran.report().config.batch, 64);
    assert!(ran.stdout.lines().next().unwrap().ends_with(" Batch"), "{}", ran.stdout);
}

#[test]
fn threads_and_iterations_add_up() {
    let server = good_rpc_server();
    let ran = run_rpctest(&format!("{server} -c 300 -j 3 -i 4 -a 4"));
    ran.assert_clean(3 * 300 * 4);
    let report = ran.report();
    assert_eq!(report.runs.len(), 4);
    assert!(report.runs.iter().all(|run| run.threads.len() == 3 && run.messages == 900));
    assert_eq!(ran.stdout.lines().count(), 5, "a header and a line per iteration");
}

#[test]
fn fragmented_replies_are_accepted_in_every_mode() {
    let server = rpc_server(|number, xid| {
        let reply = success(xid);
        let cuts = [1 + number as usize % 20, 21 + number as usize % 3];
        let mut bytes = Vec::new();
        for range in [0..cuts[0], cuts[0]..cuts[1], cuts[1]..cuts[1]] {
            bytes.extend_from_slice(&(range.len() as u32).to_be_bytes());
            bytes.extend_from_slice(&reply[range]);
        }
        bytes.extend_from_slice(&record(&reply[cuts[1]..]));
        bytes
    });
    for options in ["-a 0", "-a 1", "-a 16", "-a 16 --batch 4"] {
        run_rpctest(&format!("{server} -c 500 {options}")).assert_clean(500);
    }
}

#[test]
fn replies_byte_by_byte() {
    let server = tcp_server(|mut stream| {
        use std::io::Write;
        while let Some(call) = read_record(&mut stream)? {
            for byte in record(&success(xid(&call))) {
                stream.write_all(&[byte])?;
            }
        }
        Ok(())
    });
    for options in ["-a 0", "-a 1", "-a 16"] {
        run_rpctest(&format!("{server} -c 200 {options}")).assert_clean(200);
    }
}

#[test]
fn reordered_replies_are_counted_but_right() {
    let server = tcp_server(|mut stream| {
        use std::io::Write;
        loop {
            let mut replies = Vec::new();
            for _ in 0..8 {
                match read_record(&mut stream)? {
                    Some(call) => replies.push(record(&success(xid(&call)))),
                    None => return Ok(()),
                }
            }
            replies.reverse();
            stream.write_all(&replies.concat())?;
        }
    });
    let ran = run_rpctest(&format!("{server} -c 800 -a 8 --nodelay on"));
    ran.assert_clean(800);
    assert_eq!(ran.reordered(), 700, "seven of every eight");
}

#[test]
fn every_mode_of_echotest_over_tcp() {
    let server = tcp_server(stream::echo);
    for options in [
        "-c 2000",
        "-c 2000 -a 0",
        "-c 2000 -a 64",
        "-c 1000 -l 1000 -a 8",
        "-c 500 -l 100 -a 8 --batch 8",
        "-c 50 -l 64k -a 4",
        "-c 50 -l 128k -a 0",
        "-c 40 -l 65521 -a 3",
        "-c 4 -l 4m",
        "-c 6 -l 3m -a 4",
    ] {
        let ran = run_echotest(&format!("{server} {options}"));
        let messages = ran.report().config.count.unwrap();
        ran.assert_clean(messages);
        // Sent and received; the document has three decimals.
        let run = &ran.report().runs[0];
        let payload = (messages * ran.report().request_bytes) as f64;
        let counted = run.mbps * run.wall_s * 1e6 / 8.0 / 2.0;
        assert!((counted / payload - 1.0).abs() < 0.01, "{options}: {counted} of {payload} bytes");
    }
}

#[test]
fn udp_echo_and_rpc() {
    let echo = udp_server(|_, bytes| vec![bytes.to_vec()]);
    for options in ["-c 1000", "-c 1000 -a 100", "-c 500 -l 4 -a 32", "-c 500 -l 1400 -a 8", "-c 20 -l 65507"] {
        let ran = run_echotest(&format!("{echo} -u {options}"));
        let messages = ran.report().config.count.unwrap();
        ran.assert_clean(messages);
    }
    let rpc = udp_server(|_, call| {
        assert_eq!(call.len(), 40, "no record mark over UDP");
        vec![success(xid(call))]
    });
    for options in ["-a 0", "-a 1", "-a 32"] {
        let ran = run_rpctest(&format!("{rpc} -u -c 1000 {options}"));
        ran.assert_clean(1000);
        assert_eq!(ran.document().target.as_ref().unwrap().transport, "udp");
    }
}

#[test]
fn ipv6_names_and_unix_sockets() {
    let v6 = tcp_server_on("[::1]:0", stream::echo);
    let ran = run_echotest(&format!("[::1]:{} -c 50", v6.port()));
    ran.assert_clean(50);
    assert_eq!(ran.document().target.as_ref().unwrap().addresses, [format!("[::1]:{}", v6.port())]);
    run_echotest(&format!("::1 -p {} -c 50", v6.port())).assert_clean(50);

    let v4 = tcp_server(stream::echo);
    run_echotest(&format!("someone@localhost:{} -c 50", v4.port())).assert_clean(50);
    let udp = udp_server(|_, bytes| vec![bytes.to_vec()]);
    run_echotest(&format!("localhost:{} -u -c 50 -l 8", udp.port())).assert_clean(50);

    let folder = Folder::new();
    let path = folder.path("echo.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || stream::echo(stream));
        }
    });
    let ran = run_echotest(&format!("unix:{} -c 500 -a 8 -l 2000", path.display()));
    ran.assert_clean(500);
    assert_eq!(ran.document().target.as_ref().unwrap().transport, "unix");
}

#[test]
fn an_open_loop_sends_exactly_what_is_due() {
    let server = good_rpc_server();
    let ran = run_rpctest(&format!("{server} --rate 4000 --duration 250ms -j 2"));
    ran.assert_clean(1000);
    assert_eq!(ran.report().config.pace.arrival, Some(ksf_load::Arrival::Constant));
    let open = ran.report().runs[0].open.as_ref().unwrap();
    assert_eq!(open.unsent, 0);

    let poisson = format!("{server} --rate 4000 --arrival poisson --seed 3 --duration 250ms");
    let first = run_rpctest(&poisson).report().total.messages;
    assert_eq!(first, run_rpctest(&poisson).report().total.messages, "the seed reproduces");
    assert!((850..1150).contains(&first), "{first} of about 1000");

    run_rpctest(&format!("{server} --rate 50K -c 700")).assert_clean(700);
}

#[test]
fn an_open_loop_charges_the_wait_to_the_server() {
    use std::io::Write;
    // The server stalls once for 200 ms. Messages due meanwhile must show the wait; measured from the actual send of a
    // closed loop, only one would.
    let server = tcp_server(|mut stream| {
        let mut first = true;
        while let Some(call) = read_record(&mut stream)? {
            if std::mem::take(&mut first) {
                std::thread::sleep(std::time::Duration::from_millis(200));
            }
            stream.write_all(&record(&success(xid(&call))))?;
        }
        Ok(())
    });
    let ran = run_rpctest(&format!("{server} --rate 1000 --duration 400ms -a 10"));
    ran.assert_clean(400);
    let run = &ran.report().runs[0];
    let p90 = run.latency.quantiles.iter().find(|q| q.percent == 90.0).unwrap();
    assert!(p90.us > 100_000.0, "half of the messages were due during the stall: {p90:?}");
    // Ten fit the bound; the others that were due during the stall did not.
    let open = run.open.as_ref().unwrap();
    assert!(open.bound_hits >= 150, "{open:?}");
    // The waiting was the server's doing, so it is not this program's lateness.
    let lag_p90 = open.lag.quantiles.iter().find(|q| q.percent == 90.0).unwrap();
    assert!(lag_p90.us < p90.us, "{p90:?} {open:?}");
    assert!(ran.stderr.contains("in flight and had to wait"), "{}", ran.stderr);
}

#[test]
fn a_time_limit_ends_a_run() {
    let server = good_rpc_server();
    let ran = run_rpctest(&format!("{server} --duration 50ms -a 4"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(ran.all_faults(), []);
    assert!(ran.report().total.messages > 0);
    assert_eq!(ran.report().config.duration, Some(std::time::Duration::from_millis(50)));
}

#[test]
fn an_open_loop_gives_up_on_a_server_that_cannot_keep_up() {
    use std::io::Write;
    // 2 ms per reply against a message every 0.1 ms: a thousand are due, which would take two seconds.
    let server = tcp_server(|mut stream| {
        while let Some(call) = read_record(&mut stream)? {
            std::thread::sleep(std::time::Duration::from_millis(2));
            stream.write_all(&record(&success(xid(&call))))?;
        }
        Ok(())
    });
    let ran = run_rpctest(&format!("{server} --rate 10K --duration 100ms -a 4 --timeout 300ms"));
    assert_eq!((ran.code, ran.all_faults()), (0, vec![]), "{}", ran.stderr);
    let open = ran.report().runs[0].open.as_ref().unwrap();
    assert!(open.unsent > 0, "{open:?}");
    assert_eq!(open.unsent + ran.report().total.messages, 1000);
    assert!(ran.warns("in-flight-bound"));
}
