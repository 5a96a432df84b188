//! `ksf 9p` as its users run it: what it says at the start, mistakes in one line, and diod's tools where they are installed.

use std::fs;
use std::process::Command;

use crate::support::export::Place;
use crate::support::{engines, run, stderr, stdout, value};
use ksf_test::program_or_skip;

#[test]
fn the_start_of_9p_says_what_is_exported_and_how_it_is_mounted() {
    let place = Place::new();
    let socket = place.0.path("9p.sock");
    let unix = format!("unix:{}", socket.display());
    let server = place.start_kind("9p", 0, "epoll", ",ro,clients=127.0.0.0/8", &["--listen", &unix]);
    let port = server.address(" tcp ").port();
    let line = server.seen().iter().find(|line| line.contains("export ")).expect("a line for the export");
    let path = place.export().canonicalize().unwrap();
    let path = path.display();
    for part in [
        format!("ksf: 9p: export {path} ro,squash=root,anon=65534:65534,clients=127.0.0.0/8"),
        format!(
            "mount -t 9p -o trans=tcp,port={port},version=9p2000.L,aname={path},msize=1048576,access=user 127.0.0.1 /mnt"
        ),
    ] {
        assert!(line.contains(&part), "no {part} in {line}");
    }
    let own = &server.stat()["services"][0]["own"];
    assert_eq!(value(own, "attach_calls"), 0);
    let status = run(&["9p", "status", server.stats.to_str().unwrap()]);
    assert!(status.status.success(), "{}", stderr(&status));
    let status = stdout(&status);
    assert!(status.contains("9p: up") && status.contains("mean us"), "{status}");
    let nfs = run(&["nfs", "status", server.stats.to_str().unwrap()]);
    assert!(stderr(&nfs).contains("no service of kind = \"nfs\""), "{}", stderr(&nfs));
    server.stop();
}

#[test]
fn mistakes_of_9p_are_told_in_one_line() {
    let place = Place::new();
    let state = place.0.path("state");
    let export = place.export().to_str().unwrap().to_owned();
    for (export, more, status, part) in [
        ("/nonexistent".to_owned(), None, 66, "no such folder"),
        (format!("{export},readonly"), None, 65, "\"readonly\" is no option"),
        (export.clone(), Some(["--fids-max", "1"]), 65, "out of range"),
        (export.clone(), Some(["--message-bytes-max", "1k"]), 65, "a client of 9P needs 4096"),
    ] {
        let state = state.to_str().unwrap();
        let args = ["9p", "--listen", "tcp:127.0.0.1:0", "--state", state, "--export", &export];
        let args: Vec<&str> = args.into_iter().chain(more.into_iter().flatten()).collect();
        let output = run(&args);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
        assert!(text.lines().count() == 1 && text.contains(part), "{text}");
    }
}

#[test]
fn tools_of_diod_list_and_read() {
    let Some(diodls) = program_or_skip("diodls") else { return };
    let Some(diodcat) = program_or_skip("diodcat") else { return };
    for engine in engines() {
        let place = Place::new();
        fs::write(place.export().join("greeting"), "hello\n").unwrap();
        let server = place.start_kind("9p", 0, engine, ",squash=none", &[]);
        let address = server.address(" tcp ").to_string();
        let export = place.export().canonicalize().unwrap();
        let ask = |program: &std::path::Path, words: &[&str]| {
            let command = Command::new(program).args(["-s", &address, "-a"]).arg(&export).args(words).output().unwrap();
            assert!(command.status.success(), "{}", stderr(&command));
            stdout(&command)
        };
        assert!(ask(&diodls, &[]).contains("greeting"));
        assert_eq!(ask(&diodcat, &["greeting"]), "hello\n");
        server.stop();
    }
}
