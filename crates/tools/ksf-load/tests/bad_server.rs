//! Against servers that misbehave: each fault is counted as what it is, the exit status is right, and nothing hangs.

use std::io::{Read, Write};
use std::net::TcpListener;

use crate::common::*;

#[test]
fn a_wrong_identifier_is_unknown_and_its_call_lost() {
    let server = rpc_server(|number, xid| {
        let xid = if number == 3 { xid ^ 0x4000_0000 } else { xid };
        record(&success(xid))
    });
    for mode in ["-a 0", "-a 1", "-a 8"] {
        let ran = run_rpctest(&format!("{server} -c 50 --timeout 500ms {mode}"));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        assert_eq!(ran.faults("unknown"), 1, "{mode}");
        assert_eq!(ran.faults("lost"), 1, "{mode}");
        assert!(ran.stderr.contains("was never sent"), "{}", ran.stderr);
    }
}

#[test]
fn duplicates_are_counted_even_after_the_last_reply() {
    let server = rpc_server(|number, xid| {
        let reply = record(&success(xid));
        match number % 10 {
            9 => [reply.clone(), reply].concat(),
            _ => reply,
        }
    });
    for mode in ["-a 0", "-a 1", "-a 16", "-a 16 --batch 8"] {
        let ran = run_rpctest(&format!("{server} -c 100 {mode}"));
        assert_eq!(ran.code, 1, "{mode}");
        assert_eq!(ran.all_faults(), [("duplicate", 10)], "{mode}");
        assert_eq!(ran.report().total.messages, 100);
    }
}

#[test]
fn a_swallowed_call_is_lost() {
    let server = rpc_server(|number, xid| match number {
        20 => Vec::new(),
        _ => record(&success(xid)),
    });
    for (mode, correct) in [("-a 0", 20), ("-a 1", 20), ("-a 8", 99)] {
        let ran = run_rpctest(&format!("{server} -c 100 --timeout 500ms {mode}"));
        assert_eq!(ran.code, 1);
        assert_eq!(ran.all_faults(), [("lost", 1)], "{mode}: {}", ran.stderr);
        assert_eq!(ran.report().total.messages, correct, "{mode}");
        assert!(ran.stderr.contains("no reply for 0.5 s"), "{}", ran.stderr);
    }
}

#[test]
fn a_server_that_only_listens_costs_one_time_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap();
    let ran = run_rpctest(&format!("{server} -c 100 -a 4 -i 5 --timeout 200ms"));
    assert_eq!((ran.code, ran.faults("lost")), (1, 4));
    assert_eq!(ran.report().runs.len(), 1, "no further iteration after a failed one");
}

#[test]
fn a_server_that_never_reads_does_not_block_the_sender() {
    let server = tcp_server(|stream| {
        // Hold the connection open until the peer is gone, without reading: peek does not consume.
        let mut byte = [0];
        while stream.peek(&mut byte)? > 0 && stream.take_error()?.is_none() {
            std::thread::park_timeout(std::time::Duration::from_millis(20));
        }
        Ok(())
    });
    let ran = run_echotest(&format!("{server} -c 10 -l 16m -a 2 --timeout 300ms"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.faults("lost") >= 1);
}

#[test]
fn a_trickling_reply_does_not_count_as_progress() {
    let server = tcp_server(|mut stream| {
        read_record(&mut stream)?;
        stream.write_all(&(60_000u32 | 1 << 31).to_be_bytes())?;
        loop {
            stream.write_all(&[0])?;
            std::thread::park_timeout(std::time::Duration::from_millis(10));
        }
    });
    let ran = run_rpctest(&format!("{server} -c 5 --timeout 200ms"));
    assert_eq!((ran.code, ran.all_faults()), (1, vec![("lost", 1)]), "{}", ran.stderr);
}

#[test]
fn refusals_and_malformed_replies_are_told_apart() {
    let server = rpc_server(|number, xid| match number {
        0 => record(&accepted(xid, &[1])),
        1 => record(&accepted(xid, &[2, 2, 4])),
        2 => record(&accepted(xid, &[3])),
        3 => record(&message(&[xid, 1, 1, 0, 2, 2])),
        4 => record(&message(&[xid, 1, 1, 1, 1])),
        5 => record(&message(&[xid, 0, 2, 100_003, 3, 0, 0, 0, 0, 0])),
        6 => record(&[success(xid), vec![0; 4]].concat()),
        7 => record(&success(xid)[..22]),
        _ => record(&success(xid)),
    });
    for mode in ["-a 0", "-a 1", "-a 4"] {
        let ran = run_rpctest(&format!("{server} -c 20 {mode}"));
        assert_eq!(ran.code, 1);
        assert_eq!(ran.all_faults(), [("malformed", 3), ("rejected", 5)], "{mode}: {}", ran.stderr);
        assert_eq!(ran.report().total.messages, 12);
        assert!(ran.stderr.contains("PROG_MISMATCH (versions 2 to 4)"), "{}", ran.stderr);
    }
}

#[test]
fn an_empty_or_absurd_record_ends_in_malformed() {
    let empty = rpc_server(|_, _| record(&[]));
    let ran = run_rpctest(&format!("{empty} -c 3 --timeout 500ms"));
    assert_eq!(ran.code, 1);
    assert_eq!((ran.faults("malformed"), ran.faults("lost")), (1, 1), "{}", ran.stderr);

    let huge = rpc_server(|_, _| 0xffff_ffffu32.to_be_bytes().to_vec());
    let ran = run_rpctest(&format!("{huge} -c 3 -a 2"));
    assert_eq!(ran.code, 1);
    assert_eq!(ran.faults("malformed"), 1);
    assert!(ran.faults("closed") >= 1, "what was outstanding is given up: {}", ran.stderr);
}

#[test]
fn an_early_close_and_a_reset_are_closed() {
    let close = tcp_server(|mut stream| {
        for _ in 0..10 {
            let call = read_record(&mut stream)?.unwrap();
            stream.write_all(&record(&success(xid(&call))))?;
        }
        Ok(())
    });
    let cut = tcp_server(|mut stream| {
        for _ in 0..10 {
            let call = read_record(&mut stream)?.unwrap();
            stream.write_all(&record(&success(xid(&call))))?;
        }
        let call = read_record(&mut stream)?.unwrap();
        stream.write_all(&record(&success(xid(&call)))[..17])
    });
    let reset = tcp_server(|mut stream| {
        read_record(&mut stream)?;
        reset(stream)
    });
    for mode in ["-a 0", "-a 1"] {
        for (server, correct) in [(close, 10), (cut, 10), (reset, 0)] {
            let ran = run_rpctest(&format!("{server} -c 100 {mode}"));
            assert_eq!(ran.code, 1);
            assert_eq!(ran.all_faults(), [("closed", 1)], "{mode}: {}", ran.stderr);
            assert_eq!(ran.report().total.messages, correct);
        }
    }
    let ran = run_rpctest(&format!("{cut} -c 1000 -a 32"));
    assert_eq!(ran.code, 1);
    assert_eq!(ran.faults("closed") + ran.report().total.messages, ran.report().runs[0].calls.sends);
}

#[test]
fn wrong_bytes_are_corrupt_and_located() {
    let flipped = echo_server(100, |number, mut message| {
        if number == 5 {
            message[40] ^= 0x10;
        }
        message
    });
    let ran = run_echotest(&format!("{flipped} -c 50 -l 100 -a 4"));
    assert_eq!((ran.code, ran.all_faults()), (1, vec![("corrupt", 1)]));
    assert_eq!(ran.report().total.messages, 49);
    assert!(ran.stderr.contains("message 5, from byte 0: byte 40 is"), "{}", ran.stderr);
}

#[test]
fn a_missing_byte_shifts_the_rest_and_is_diagnosed() {
    let shifted = echo_server(100, |number, mut message| {
        if number == 1 {
            message.remove(0);
        }
        message
    });
    let ran = run_echotest(&format!("{shifted} -c 10 -l 100 -a 2 --timeout 500ms"));
    assert_eq!(ran.code, 1);
    assert_eq!((ran.faults("corrupt"), ran.faults("lost")), (9, 1), "{}", ran.stderr);
    assert!(ran.stderr.contains("belong +1 bytes away"), "{}", ran.stderr);
}

#[test]
fn swapped_messages_are_corrupt() {
    let swapped = tcp_server(|mut stream| {
        loop {
            let mut pair = [0; 64];
            if stream.read_exact(&mut pair).is_err() {
                return Ok(());
            }
            pair.rotate_left(32);
            stream.write_all(&pair)?;
        }
    });
    let ran = run_echotest(&format!("{swapped} -c 100 -l 32 -a 2"));
    assert_eq!((ran.code, ran.all_faults()), (1, vec![("corrupt", 100)]));
}

#[test]
fn surplus_bytes_are_unsolicited() {
    let surplus = echo_server(10, |number, mut message| {
        if number == 19 {
            message.push(b'!');
        }
        message
    });
    let ran = run_echotest(&format!("{surplus} -c 20 -l 10"));
    assert_eq!((ran.code, ran.all_faults()), (1, vec![("unsolicited", 1)]));
    assert_eq!(ran.report().total.messages, 20);
}

#[test]
fn datagrams_lost_doubled_swapped_cut_and_spoiled() {
    let mut held: Vec<Vec<u8>> = Vec::new();
    let server = udp_server(move |number, bytes| {
        let mut reply = bytes.to_vec();
        match number {
            10 => vec![],
            20 => vec![reply.clone(), reply],
            30 => {
                held.push(reply);
                vec![]
            }
            31 => vec![reply, held.pop().unwrap()],
            40 => vec![reply[..12].to_vec()],
            50 => {
                reply[15] ^= 1;
                vec![reply]
            }
            60 => vec![[&reply[..], b"x"].concat()],
            _ => vec![reply],
        }
    });
    let ran = run_echotest(&format!("{server} -u -c 100 -l 16 -a 4 --timeout 500ms"));
    assert_eq!(ran.code, 1);
    let expected = [("corrupt", 1), ("duplicate", 1), ("length", 2), ("lost", 1)];
    assert_eq!(ran.all_faults(), expected, "{}", ran.stderr);
    assert_eq!(ran.report().total.messages, 100 - 4);
    assert!(ran.reordered() >= 1);
}

#[test]
fn a_datagram_after_its_time_is_late() {
    let mut held = None;
    let server = udp_server(move |number, call| match number {
        5 => {
            held = Some(success(xid(call)));
            vec![]
        }
        6 => vec![held.take().unwrap(), success(xid(call))],
        _ => vec![success(xid(call))],
    });
    let ran = run_rpctest(&format!("{server} -u -c 20 --timeout 500ms"));
    assert_eq!(ran.code, 1);
    assert_eq!(ran.all_faults(), [("late", 1), ("lost", 1)], "{}", ran.stderr);
    assert_eq!(ran.report().total.messages, 19);
}

#[test]
fn foreign_and_empty_datagrams_are_told() {
    let server = udp_server(|number, call| match number {
        2 => vec![success(xid(call) ^ 0x2000_0000), success(xid(call))],
        4 => vec![vec![], success(xid(call))],
        _ => vec![success(xid(call))],
    });
    let ran = run_rpctest(&format!("{server} -u -c 10"));
    assert_eq!(ran.code, 1);
    assert_eq!(ran.all_faults(), [("malformed", 1), ("unknown", 1)], "{}", ran.stderr);
    assert_eq!(ran.report().total.messages, 10);
}

#[test]
fn a_silent_udp_server_loses_every_message_once() {
    let server = udp_server(|_, _| vec![]);
    let ran = run_rpctest(&format!("{server} -u -c 6 -a 2 --timeout 50ms"));
    assert_eq!((ran.code, ran.all_faults()), (1, vec![("lost", 6)]));
}

#[test]
fn nobody_there_is_unavailable() {
    own_network();
    // A port that was free a moment ago: nobody listens on it.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for options in ["", "-j 3", "-u"] {
        let ran = run_rpctest(&format!("127.0.0.1:{port} {options}"));
        assert_eq!(ran.code, 69, "{options}: {}", ran.stderr);
        assert!(ran.stderr.contains(&format!("cannot connect to 127.0.0.1:{port}")), "{}", ran.stderr);
    }
    assert_eq!(run_rpctest("unix:/no/such/socket").code, 69);
    assert_eq!(run_rpctest("no-such-host.invalid").code, 68);
}

#[test]
fn a_server_that_goes_away_between_iterations_leaves_a_report() {
    // One connection is served, then nobody listens any more.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        drop(listener);
        stream::echo(stream)
    });
    let ran = run_echotest(&format!("{server} -c 20 -i 3"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert_eq!((ran.report().total.runs, ran.report().total.messages), (1, 20));
    assert!(ran.stderr.contains("run 2: cannot connect"), "{}", ran.stderr);
    assert_eq!(ran.stdout.lines().count(), 2, "the header and the first run");
}
