//! `ksf 9p` as its users run it: what it says at the start, mistakes in one line, diod's tools where they are installed, and its end
//! by SIGKILL.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::export::{Place, on_each_listener};
use crate::support::{Server, engines, run, stderr, stdout, value};
use ksf_proto::p9::{Data, IO_HEAD_BYTES, NO_FID, NO_UID, Names, Reply, Request, VERSION};
use ksf_test::{program_or_skip, wait_until};
use rustix::process::Signal;

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
        (export.clone(), Some(["--connection-bytes-max", "1k"]), 65, "a client of 9P needs 4096"),
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

/// Messages of the agreed size are answered, whatever limits the listener has.
#[test]
fn messages_of_the_agreed_size_are_answered_at_each_listener() {
    on_each_listener("9p", |_, listeners, reload| {
        let mut clients: Vec<_> = listeners
            .iter()
            .map(|(address, bytes)| (Client::attached_to(*address, ""), (*bytes).min(1 << 20)))
            .collect();
        for (client, msize) in &mut clients {
            client.create(&msize.to_string()).unwrap();
        }
        let transfer = |client: &mut Client, msize: usize| {
            client.ask(Request::Write { fid: 0, offset: 0, data: Data(&vec![7; msize - IO_HEAD_BYTES]) }).unwrap();
            let read = client.ask(Request::Read { fid: 0, offset: 0, count: 1 << 20 }).unwrap();
            assert!(read.len() > msize - IO_HEAD_BYTES, "{} of {msize} bytes", read.len());
        };
        clients.iter_mut().for_each(|(client, msize)| transfer(client, *msize));
        // It is agreed on for as long as the connection lives.
        reload();
        for (client, msize) in &mut clients {
            transfer(client, *msize);
            let agreed = client.ask(Request::Version { msize: 1 << 20, version: VERSION }).unwrap();
            assert_eq!(Reply::parse(&agreed).unwrap().1, Reply::Version { msize: *msize as u32, version: VERSION });
        }
    });
}

/// The default of --fids-max, as docs/9p.md has it.
#[test]
fn a_connection_has_4096_fids() {
    let place = Place::new();
    let server = place.start_kind("9p", 0, "epoll", ",squash=none", &[]);
    // The first is the root.
    let mut client = Client::attached(&server);
    let names = Names::default();
    for newfid in 1..4096 {
        client.ask(Request::Walk { fid: 0, newfid, names }).unwrap();
    }
    assert_eq!(client.refused(Request::Walk { fid: 0, newfid: 4096, names }), libc::EMFILE as u32);
    client.ask(Request::Clunk { fid: 4095 }).unwrap();
    client.ask(Request::Walk { fid: 0, newfid: 4096, names }).unwrap();
    server.stop();
}

/// Limits of sizes stay as they were, and a reload is refused if others contradict them.
#[test]
fn a_reload_that_contradicts_a_limit_in_force_changes_nothing() {
    let place = Place::new();
    let file = place.0.write("limits.toml", "idle_timeout_ms = 600000\n");
    let more = ["--config-limits", file.to_str().unwrap()];
    let mut server = place.start_listening(("9p", 0), "epoll", ",squash=none", &more, 1);
    let limits = |server: &Server| server.stat()["services"][0]["limits"].clone();
    let before = limits(&server);
    let text = "message_bytes_max = \"32k\"\nassembly_bytes_max = \"64k\"\nidle_timeout_ms = 1\n";
    place.0.write("limits.toml", text);
    server.signal(Signal::HUP);
    let line = server.line_with("reloaded");
    assert!(line.contains("limits not reloaded") && line.contains("below message_bytes_max"), "{line}");
    assert_eq!(limits(&server), before);
    server.stop();
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

/// A client that expects each request to be done. `None`: the connection has ended.
pub(crate) struct Client(TcpStream);

impl Client {
    /// Attached to the only export as fid 0.
    pub(crate) fn attached(server: &Server) -> Self {
        Self::attached_to(server.address(" tcp "), "")
    }

    /// Attached to this export as fid 0.
    pub(crate) fn attached_to(address: SocketAddr, export: &str) -> Self {
        let mut client = Self(ksf_test::stream::connect(address));
        let aname = export.as_bytes();
        client.ask(Request::Version { msize: 1 << 20, version: VERSION }).unwrap();
        client.ask(Request::Attach { fid: 0, afid: NO_FID, uname: b"", aname, n_uname: 0 }).unwrap();
        client
    }

    /// Makes a file in the root, which becomes fid 0.
    pub(crate) fn create(&mut self, name: &str) -> Option<()> {
        let name = name.as_bytes();
        self.ask(Request::Lcreate { fid: 0, name, flags: 0o102, mode: 0o600, gid: NO_UID }).map(drop)
    }

    pub(crate) fn write_synced(&mut self, offset: u64, data: &[u8]) -> Option<()> {
        self.ask(Request::Write { fid: 0, offset, data: Data(data) })?;
        self.ask(Request::Fsync { fid: 0, datasync: 0 }).map(drop)
    }

    /// The number of the error.
    fn refused(&mut self, request: Request<'_>) -> u32 {
        self.outcome(request).expect_err("it is refused")
    }

    /// The message of the reply, or the number of the error.
    pub(crate) fn outcome(&mut self, request: Request<'_>) -> Result<Vec<u8>, u32> {
        let reply = self.exchange(request).unwrap();
        match Reply::parse(&reply).unwrap().1 {
            Reply::Lerror { ecode } => Err(ecode),
            _ => Ok(reply),
        }
    }

    /// The message of the reply.
    pub(crate) fn ask(&mut self, request: Request<'_>) -> Option<Vec<u8>> {
        let reply = self.exchange(request)?;
        let (_, answer) = Reply::parse(&reply).unwrap();
        assert_eq!(answer.kind(), request.kind() + 1, "{request:?}: {answer:?}");
        Some(reply)
    }

    fn exchange(&mut self, request: Request<'_>) -> Option<Vec<u8>> {
        let mut message = Vec::new();
        request.put(1, &mut message).unwrap();
        self.0.write_all(&message).ok()?;
        let mut reply = vec![0; 4];
        self.0.read_exact(&mut reply).ok()?;
        reply.resize(u32::from_le_bytes(reply[..].try_into().unwrap()) as usize, 0);
        self.0.read_exact(&mut reply[4..]).ok()?;
        Some(reply)
    }
}

#[test]
fn clients_of_9p_see_the_end_of_a_killed_server_and_what_was_synced_is_there() {
    const CLIENTS: usize = 8;
    for engine in engines() {
        let place = Place::new();
        let mut server = place.start_kind("9p", 0, engine, ",squash=none", &[]);
        let synced: Vec<AtomicUsize> = (0..CLIENTS).map(|_| AtomicUsize::new(0)).collect();
        let work = |number: usize| {
            let mut client = Client::attached(&server);
            client.create(&format!("file {number}")).unwrap();
            for at in 1.. {
                // Each block has the number of its turn.
                let (block, offset) = ([at as u8; 1000], 1000 * (at as u64 - 1));
                if client.write_synced(offset, &block).is_none() {
                    return;
                }
                synced[number].store(at, Ordering::SeqCst);
            }
        };
        std::thread::scope(|scope| {
            let work = &work;
            (0..CLIENTS).for_each(|number| drop(scope.spawn(move || work(number))));
            wait_until("each client has synced something", || synced.iter().all(|all| all.load(Ordering::SeqCst) > 5));
            server.signal(Signal::KILL);
            // All of them end: nobody waits for an answer that never comes.
        });
        server.wait();
        let server = place.start_kind("9p", 0, engine, ",squash=none", &[]);
        Client::attached(&server);
        for (number, synced) in synced.iter().enumerate() {
            let file = fs::read(place.export().join(format!("file {number}"))).unwrap();
            let blocks = synced.load(Ordering::SeqCst);
            assert!(file.len() >= 1000 * blocks, "{engine}: {} bytes of {blocks} blocks", file.len());
            let is_right = |(at, block): (usize, &[u8])| block.iter().all(|byte| *byte == (at + 1) as u8);
            assert!(file.chunks(1000).take(blocks).enumerate().all(is_right), "{engine}: another content");
        }
        server.stop();
    }
}
