//! Services a user compiles against the SDK: the example, each framing, replies longer than their requests, and the
//! ways in which an object can be wrong.

use std::path::Path;

use crate::common::object::compile;
use crate::common::*;
use ksf_kernel::{KernelError, KernelOptions, KernelService, ObjectSource, Verdict};

fn load_file(object: &Path) -> Result<KernelService, KernelError> {
    let mut options = KernelOptions::default();
    options.connections_max = 64;
    options.callers_max = 4;
    KernelService::load(&ObjectSource::File(object.to_owned()), &options)
}

fn load_source(source: &str) -> KernelService {
    load_file(&compile(source, &[])).unwrap_or_else(|error| panic!("{source}: {error}"))
}

fn shout(message: &[u8]) -> Vec<u8> {
    [message, b"?"].concat()
}

#[test]
fn the_example_runs_in_both_halves() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let service = load_source("../../../examples/ksf-uppercase/uppercase.bpf.c");
    assert_eq!(service.name(), "uppercase");

    let mut caller = service.caller().unwrap();
    let mut reply = Vec::new();
    assert_eq!(caller.call(b"Hello, world", &mut reply).unwrap(), Verdict::Reply);
    assert_eq!(reply, b"HELLO, WORLD");
    assert_eq!(caller.call(b"!no", &mut reply).unwrap(), Verdict::Pass);
    assert_eq!(reply, b"HELLO, WORLD", "nothing is appended to it");
    assert!(caller.call(&[0; 16_001], &mut reply).is_err(), "too long for the function");
    drop(caller);

    let (mut client, server) = tcp_pair("127.0.0.1:0");
    let half = UserHalf::serve(&service, server, PARKING, shout);
    for len in (1..400).chain([5000, 15_990, 20_000]) {
        let text: Vec<u8> = (0..len).map(|at| b'a' + (at % 26) as u8).collect();
        // 16,000 bytes are the limit of the function; this client stays below it.
        let text = &text[..text.len().min(15_990)];
        send_all(&mut client, &[&(text.len() as u16).to_be_bytes(), text].concat());
        let mut expected = (text.len() as u16).to_be_bytes().to_vec();
        expected.extend(text.iter().map(u8::to_ascii_uppercase));
        assert_eq!(read_exactly(&mut client, expected.len()), expected, "{len} bytes");
        if len % 50 == 0 {
            send_all(&mut client, b"\0\x04!abc");
            assert_eq!(read_exactly(&mut client, 7), b"\0\x05!abc?");
        }
    }
    assert!(counter(&service, "messages_answered") > 200);
    assert!(counter(&service, "passed_unanswerable") > 0);
    drop(client);
    half.join();
}

#[test]
fn longer_replies_do_not_stall() {
    let Some(()) = root_or_skip("eBPF") else { return };
    for habits in [PARKING, POLLING] {
        let service = load_source("tests/bpf/grow.bpf.c");
        let (mut client, server) = tcp_pair("127.0.0.1:0");
        let half = UserHalf::serve(&service, server, habits, shout);
        for round in 0..3000 {
            let word = format!("message {round}");
            send_all(&mut client, format!("{word}\r\n").as_bytes());
            let expected = format!("{word} {word}\r\n");
            assert_eq!(read_exactly(&mut client, expected.len()), expected.as_bytes());
        }
        send_all(&mut client, b"one\r\ntwo\r\n");
        assert_eq!(read_exactly(&mut client, 18), b"one one\r\ntwo two\r\n");
        send_all(&mut client, b"!mine\r\n");
        assert_eq!(read_exactly(&mut client, 8), b"!mine?\r\n");
        assert!(counter(&service, "messages_answered") > 2000, "{habits:?}");
        drop(client);
        half.join();
    }
}

#[test]
fn a_length_that_counts_itself() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let service = load_source("tests/bpf/sized.bpf.c");
    let (mut client, server) = tcp_pair("127.0.0.1:0");
    let half = UserHalf::serve(&service, server, PARKING, shout);
    for tag in 0..2000u16 {
        let [low, high] = tag.to_le_bytes();
        let body = pattern(usize::from(tag) % 50, 1);
        let mut request = (7 + body.len() as u32).to_le_bytes().to_vec();
        request.extend_from_slice(&[100, low, high]);
        request.extend_from_slice(&body);
        send_all(&mut client, &request);
        assert_eq!(read_exactly(&mut client, 7), [7, 0, 0, 0, 101, low, high]);
    }
    assert!(counter(&service, "messages_answered") > 1000);
    drop(client);
    half.join();
}

#[test]
fn wrong_objects_are_explained() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let error = load_file(&compile("tests/bpf/plain.bpf.c", &[])).unwrap_err();
    assert!(matches!(&error, KernelError::BadObject { problem, .. } if problem.contains("KSF_SERVICE")), "{error}");

    let error = load_file(&compile("tests/bpf/refused.bpf.c", &[])).unwrap_err();
    let KernelError::Verifier { program, summary, log } = &error else { panic!("{error}") };
    assert!(program.starts_with("ksf_"), "{program}");
    assert!(!summary.contains("processed ") && summary.lines().count() <= 12, "{summary}");
    assert!(log.len() >= summary.len() && !summary.is_empty());

    // An object of a later SDK.
    let object = compile("tests/bpf/sized.bpf.c", &["-DKSF_ABI=99"]);
    let error = load_file(&object).unwrap_err();
    assert!(matches!(&error, KernelError::BadObject { problem, .. } if problem.contains("SDK 99")), "{error}");

    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    assert!(matches!(load_file(&text).unwrap_err(), KernelError::BadObject { .. }));
    let error = load_file(Path::new("/nonexistent/x.o")).unwrap_err();
    assert!(matches!(error, KernelError::Unreadable { .. }), "{error}");
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let source = ObjectSource::Builtin(ksf_kernel::Builtin::Echo);
    let refused = |change: fn(&mut KernelOptions)| {
        let mut options = KernelOptions::default();
        change(&mut options);
        let error = KernelService::load(&source, &options).unwrap_err();
        assert!(matches!(error, KernelError::BadOption { .. }), "{error}");
    };
    refused(|options| options.connections_max = 0);
    refused(|options| options.callers_max = 0);
    refused(|options| options.shards = 0);
    refused(|options| options.window_bytes = u32::MAX);
    refused(|options| options.lag_bytes_max = 1 << 20);
    refused(|options| options.rpc_programs = vec![(1, 3, 2)]);
    if root_or_skip("eBPF").is_some() {
        refused(|options| options.rpc_programs = vec![(1, 1, 1)]);
    }
}

/// What the verifier pays for each program: printed, and bounded far below its limit of a million.
#[test]
fn the_verifier_is_not_kept_long() {
    let Some(()) = root_or_skip("eBPF") else { return };
    let services = [
        load(ksf_kernel::Builtin::Echo),
        load(ksf_kernel::Builtin::RpcNull),
        load_source("../../../examples/ksf-uppercase/uppercase.bpf.c"),
        load_source("tests/bpf/grow.bpf.c"),
        load_source("tests/bpf/sized.bpf.c"),
    ];
    println!("instructions verified:");
    for service in &services {
        for (program, instructions) in service.verifier_cost() {
            println!("{:>12} {program:<12} {instructions:>8}", service.name());
            assert!(instructions > 0 && instructions < 200_000, "{} {program}: {instructions}", service.name());
        }
    }
}
