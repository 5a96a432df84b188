//! `ksf load 9p` on `ksf 9p`, on a server that changes a byte, and on diod where it is installed.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use crate::support::export::Place;
use crate::support::{engines, run, stderr, value};
use ksf_test::{is_root, program_or_skip, stream, wait_until};

/// `ksf load 9p` with these words, on the export, through this port.
fn load(port: u16, place: &Place, words: &[&str]) -> Output {
    let export = place.export().canonicalize().unwrap();
    let url = format!("9p://127.0.0.1:{port}{}", export.display());
    let args: Vec<&str> = ["load", "9p"].into_iter().chain(words.iter().copied()).collect();
    run(&[&args[..], &[url.as_str()]].concat())
}

/// Right replies and faults of a run with `--json`.
fn counted(output: &Output) -> (Option<u64>, Option<u64>) {
    assert!(output.status.success(), "{}", stderr(output));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    (document["total"]["messages"].as_u64(), document["total"]["faults"].as_u64())
}

/// All that is measured: a mix, large messages, the sequence of IOR.
fn measure(port: u16, place: &Place, large: &str) {
    let mix = ["--mix", "getattr=1,walk=2,read=1,write=1", "-j", "2", "-a", "8", "-c", "400", "-i", "2", "--json"];
    assert_eq!(counted(&load(port, place, &mix)), (Some(1600), Some(0)));
    let large = ["--mix", "read=1,write=1", "--io-bytes", large, "--file-bytes", large, "--files", "2", "-a", "2"];
    assert_eq!(counted(&load(port, place, &[&large[..], &["-c", "20", "--json"]].concat())), (Some(20), Some(0)));
    let ior = ["--shape", "ior", "-j", "3", "--file-bytes", "4k", "--json"];
    assert_eq!(counted(&load(port, place, &ior)), (Some(3 * 2 * 128), Some(0)));
    let synchronous = ["--mix", "getattr=1,walk=1", "-a", "0", "-c", "20", "--json"];
    assert_eq!(counted(&load(port, place, &synchronous)), (Some(20), Some(0)));
    assert_eq!(fs::read_dir(place.export()).unwrap().count(), 0, "something is left");
}

#[test]
fn the_generator_of_9p_sends_every_operation_and_leaves_nothing() {
    for engine in engines() {
        let place = Place::new();
        let socket = format!("unix:{}", place.0.path("9p.sock").display());
        let server = place.start_kind("9p", 0, engine, ",squash=none", &["--listen", &socket]);
        measure(server.address(" tcp ").port(), &place, "512k");
        let own = &server.stat()["services"][0]["own"];
        for message in ["getattr", "walk", "clunk", "read", "write"] {
            let calls = value(own, &format!("{message}_calls"));
            assert!(calls >= 200, "{engine}: {calls} of {message}");
        }
        let words = ["load", "9p", "--mix", "read=1,walk=1", "-c", "50", "--json"];
        for aname in [Vec::new(), vec!["--aname", place.export().canonicalize().unwrap().to_str().unwrap()]] {
            let output = run(&[&words[..], &aname, &[socket.as_str()]].concat());
            assert_eq!(counted(&output), (Some(50), Some(0)), "{engine}");
        }
        assert_eq!(fs::read_dir(place.export()).unwrap().count(), 0, "{engine}: something is left");
        server.stop();
    }
}

#[test]
fn the_generator_of_9p_measures_diod() {
    if !is_root() {
        return ksf_test::skip("diod changes its user");
    }
    let Some(diod) = program_or_skip("diod") else { return };
    // diod takes no port 0: in its own network every port is free.
    ksf_test::own_network();
    let (place, port) = (Place::new(), 564);
    let mut command = Command::new(diod);
    command.args(["--foreground", "--no-auth", "--logdest", "stderr", "--listen", &format!("127.0.0.1:{port}")]);
    command.arg("--export").arg(place.export().canonicalize().unwrap()).stderr(Stdio::null());
    let _server = Killed(command.spawn().unwrap());
    wait_until("diod listens", || load(port, &place, &["-c", "1"]).status.success());
    measure(port, &place, "32k");
}

/// A process that ends with the test, also one that fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One message of 9P; `None` at the end.
fn read_message(from: &mut impl Read) -> Option<Vec<u8>> {
    let mut message = vec![0; 4];
    from.read_exact(&mut message).ok()?;
    message.resize(u32::from_le_bytes(message[..4].try_into().unwrap()) as usize, 0);
    from.read_exact(&mut message[4..]).ok()?;
    Some(message)
}

#[test]
fn the_generator_of_9p_finds_a_byte_that_is_another_one() {
    let place = Place::new();
    let server = place.start_kind("9p", 0, "epoll", ",squash=none", &[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = server.address(" tcp ");
    // Between both: turns over a bit at the end of every long reply, which is data.
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut behind) = (client.unwrap(), stream::connect(address));
            std::thread::spawn(move || {
                while let Some(request) = read_message(&mut client) {
                    behind.write_all(&request).unwrap();
                    let mut reply = read_message(&mut behind).expect("a reply");
                    if reply.len() > 4096 {
                        *reply.last_mut().unwrap() ^= 1;
                    }
                    client.write_all(&reply).unwrap();
                }
            });
        }
    });
    let output = load(port, &place, &["--mix", "read=1,getattr=3", "-c", "40"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("other bytes than the file has"), "{}", stderr(&output));
    assert!(stderr(&output).contains("corrupt"), "{}", stderr(&output));
    server.stop();
}

#[test]
fn an_export_of_9p_that_cannot_be_measured_is_told_in_one_line() {
    let place = Place::new();
    let server = place.start_kind("9p", 0, "epoll", ",ro,squash=none", &[]);
    let port = server.address(" tcp ").port();
    let none = format!("9p://127.0.0.1:{port}/none");
    for (output, status, part) in [
        (load(port, &place, &[]), 71, "cannot make files"),
        (run(&["load", "9p", &none]), 71, "No such file"),
        (run(&["load", "9p", "127.0.0.1:/none"]), 64, "9p://HOST[:PORT]/PATH"),
    ] {
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(status), "{text}");
        assert!(text.lines().count() == 1 && text.contains(part), "{text}");
    }
    server.stop();
}
