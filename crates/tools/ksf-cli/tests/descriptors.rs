//! Connections that do nothing take no descriptors from requests, and none from other services of the process.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

use ksf_proto::oncrpc::{MOUNT_PROGRAM, NFS_PROGRAM};
use ksf_proto::p9::{Data, NO_UID, Names, Request};
use ksf_proto::xdr::XdrReader;
use ksf_test::rpc::words;
use ksf_test::{stream, two_cpus_or_skip};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use crate::ninep;
use crate::support::export::{Place, call, opaque};
use crate::support::{Folder, Server, engines, first_cpu, stderr, value, wait_until};

/// Files that requests open one after the other.
const FILES: usize = 100;

/// Starts `ksf ARGS`, which may have `open_max` descriptors.
fn start(open_max: usize, args: &[&str], listeners: usize) -> Server {
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={open_max}:{open_max}")).arg(env!("CARGO_BIN_EXE_ksf")).args(args);
    Server::start_command(command, listeners)
}

/// More connections than there are descriptors, which do nothing. The server has refused some of them.
fn strangers(server: &Server, address: SocketAddr, open_max: usize) -> Vec<TcpStream> {
    let own = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: own.maximum, ..own }).unwrap();
    let strangers = (0..open_max).map(|_| TcpStream::connect(address).unwrap()).collect();
    wait_until("some are refused", || {
        let stat = server.stat();
        let services = stat["services"].as_array().unwrap().iter();
        let refused = services.map(|service| value(&service["counters"], "refused_connections_max"));
        refused.sum::<u64>() > 0
    });
    strangers
}

/// The handle of the exported folder.
fn mount(connection: &mut TcpStream, place: &Place) -> Vec<u8> {
    let export = place.export().canonicalize().unwrap();
    let mounted = call(connection, MOUNT_PROGRAM, 1, &opaque(export.to_str().unwrap().as_bytes()));
    assert_eq!(mounted[..4], [0; 4], "MNT");
    XdrReader::new(&mounted[4..]).opaque(64).unwrap().to_vec()
}

/// Looks each file up, reads it, and makes another one.
fn use_nfs(connection: &mut TcpStream, root: &[u8]) {
    let mut ask = |procedure, args: Vec<u8>| {
        let results = call(connection, NFS_PROGRAM, procedure, &args);
        assert_eq!(results[..4], [0; 4], "procedure {procedure}");
        results[4..].to_vec()
    };
    ask(1, opaque(root));
    for number in 0..FILES {
        let name = opaque(number.to_string().as_bytes());
        let found = ask(3, [opaque(root), name].concat());
        let file = XdrReader::new(&found).opaque(64).unwrap().to_vec();
        ask(6, [opaque(&file), words(&[0, 0, 100])].concat());
        ask(7, [opaque(&file), words(&[0, 0, 3, 2]), opaque(b"new")].concat());
        let name = opaque(format!("new {number}").as_bytes());
        ask(8, [opaque(root), name, words(&[0, 1, 0o644, 0, 0, 0, 0, 0])].concat());
    }
    ask(17, [opaque(root), words(&[0, 0, 0, 0, 8192, 32_768])].concat());
}

/// The same with 9P.
fn use_ninep(client: &mut ninep::Client) {
    for number in 0..FILES {
        let name = number.to_string();
        let mut buffer = Vec::new();
        let names = Names::of(&[name.as_bytes()], &mut buffer).unwrap();
        client.ask(Request::Walk { fid: 0, newfid: 1, names }).unwrap();
        client.ask(Request::Lopen { fid: 1, flags: 2 }).unwrap();
        client.ask(Request::Read { fid: 1, offset: 0, count: 100 }).unwrap();
        client.ask(Request::Write { fid: 1, offset: 0, data: Data(b"new") }).unwrap();
        client.ask(Request::Clunk { fid: 1 }).unwrap();
        let name = format!("new {number}");
        client.ask(Request::Mkdir { dfid: 0, name: name.as_bytes(), mode: 0o755, gid: NO_UID }).unwrap();
    }
}

/// A client of either server.
enum Client {
    Nfs(TcpStream, Vec<u8>),
    Ninep(ninep::Client),
}

impl Client {
    fn of(kind: &str, server: &Server, place: &Place) -> Self {
        if kind == "9p" {
            return Self::Ninep(ninep::Client::attached(server));
        }
        let mut connection = stream::connect(server.address(" tcp "));
        let root = mount(&mut connection, place);
        Self::Nfs(connection, root)
    }

    fn use_files(&mut self) {
        match self {
            Self::Nfs(connection, root) => use_nfs(connection, root),
            Self::Ninep(client) => use_ninep(client),
        }
    }

    /// Looks a file up, for which the server opens it: that is done, or refused for want of a descriptor.
    fn look_up(&mut self) {
        match self {
            Self::Nfs(connection, root) => {
                const JUKEBOX: u32 = 10_008;
                let results = call(connection, NFS_PROGRAM, 3, &[opaque(root), opaque(b"0")].concat());
                let status = XdrReader::new(&results).u32().unwrap();
                assert!([0, JUKEBOX].contains(&status), "{status}");
            }
            Self::Ninep(client) => {
                let mut buffer = Vec::new();
                let names = Names::of(&[b"0"], &mut buffer).unwrap();
                match client.outcome(Request::Walk { fid: 0, newfid: 1, names }) {
                    Ok(_) => drop(client.ask(Request::Clunk { fid: 1 }).unwrap()),
                    Err(ecode) => assert_eq!(ecode, libc::EMFILE as u32),
                }
            }
        }
    }
}

fn fill(place: &Place) {
    (0..FILES).for_each(|number| fs::write(place.export().join(number.to_string()), "text").unwrap());
}

#[test]
fn idle_connections_take_no_descriptors_from_requests() {
    for (engine, open_max) in engines().into_iter().flat_map(|engine| [(engine, 64), (engine, 1024)]) {
        for kind in ["nfs", "9p"] {
            let place = Place::new();
            fill(&place);
            let export = format!("{},squash=all,anon={},names=async", place.export().display(), own_user());
            let state = place.0.path("state");
            let args = [
                kind,
                "--engine",
                engine,
                "--listen",
                "tcp:127.0.0.1:0",
                "--cpus",
                &first_cpu(),
                "--export",
                &export,
                "--state",
            ];
            let mut server = start(open_max, &[&args[..], &[state.to_str().unwrap()]].concat(), 1);
            let line = server.line_with("connections_max is");
            assert!(line.contains(&format!("the process may have {open_max} descriptors (ulimit -n)")), "{line}");
            let address = server.address(" tcp ");
            let mut client = Client::of(kind, &server, &place);
            let strangers = strangers(&server, address, open_max);
            client.use_files();
            drop(strangers);
            server.stop();
        }
    }
}

/// For a moment the shard has accepted more connections than it may have, as many as there are descriptors. Requests that need one
/// then are refused in a way that lets their client ask again.
#[test]
fn a_flood_of_connections_leaves_no_trace() {
    const OPEN_MAX: usize = 128;
    for (engine, kind) in engines().into_iter().flat_map(|engine| ["nfs", "9p"].map(|kind| (engine, kind))) {
        let place = Place::new();
        fill(&place);
        let export = format!("{},squash=all,anon={},names=async", place.export().display(), own_user());
        let (cpu, state) = (first_cpu(), place.0.path("state"));
        let args =
            [kind, "--engine", engine, "--listen", "tcp:127.0.0.1:0", "--cpus", &cpu, "--export", &export, "--state"];
        let server = start(OPEN_MAX, &[&args[..], &[state.to_str().unwrap()]].concat(), 1);
        let address = server.address(" tcp ");
        let mut client = Client::of(kind, &server, &place);
        // They wait in the kernel, and come all at once.
        server.signal(Signal::STOP);
        let flood: Vec<_> = (0..4 * OPEN_MAX).map(|_| TcpStream::connect(address).unwrap()).collect();
        let count = |name| value(&server.stat()["services"][0]["counters"], name);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..FILES).for_each(|_| client.look_up()));
            server.signal(Signal::CONT);
            wait_until("all have been accepted", || count("accepted") + count("refused_no_fd") > flood.len() as u64);
        });
        client.use_files();
        // Some are served.
        drop(flood);
        wait_until("there is room again", || count("closed_total") > 0);
        Client::of(kind, &server, &place);
        server.stop();
    }
}

/// `UID:GID` of this process.
fn own_user() -> String {
    format!("{}:{}", rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

#[test]
fn a_store_writes_and_saves_while_idle_connections_hold_what_they_can() {
    for engine in engines() {
        let folder = Folder::new();
        let data = folder.path("data");
        let args = [
            "store",
            "--engine",
            engine,
            "--log-bytes",
            "8m",
            "--listen",
            "127.0.0.1:0",
            "--cpus",
            &first_cpu(),
            "--data",
        ];
        let server = start(128, &[&args[..], &[data.to_str().unwrap()]].concat(), 1);
        let address = server.address(" tcp ");
        let mut client = stream::connect(address);
        let mut ask = |command: &str| {
            client.write_all(format!("{command}\r\n").as_bytes()).unwrap();
            let mut reply = [0; 5];
            client.read_exact(&mut reply).unwrap();
            assert_eq!(&reply, b"+OK\r\n", "{command}");
        };
        let strangers = strangers(&server, address, 128);
        for number in 0..FILES {
            ask(&format!("SET key{number} value"));
        }
        ask("SAVE");
        drop(strangers);
        server.stop();
    }
}

#[test]
fn a_service_with_idle_connections_leaves_others_their_connections() {
    let place = Place::new();
    fill(&place);
    let text = format!(
        "engine = \"epoll\"\ncpus = \"{}\"\n[[service]]\nname = \"public\"\nkind = \"echo\"\nlisten = [\"tcp:127.0.0.1:0\"]\n\
         [[service]]\nname = \"files\"\nkind = \"nfs\"\nexports = [\"export,squash=all,anon={}\"]\nstate = \"state\"\n\
         listen = [\"tcp:127.0.0.1:0\"]\n",
        first_cpu(),
        own_user()
    );
    let path = place.0.write("ksf.toml", text);
    let server = start(256, &["serve", path.to_str().unwrap()], 2);
    let strangers = strangers(&server, server.address("public tcp "), 256);
    let mut connection = stream::connect(server.address("files tcp "));
    let root = mount(&mut connection, &place);
    use_nfs(&mut connection, &root);
    drop(strangers);
    server.stop();
}

#[test]
fn one_shard_more_has_no_more_descriptors_than_are_counted_for_it() {
    // As in `src/serve/descriptors.rs`.
    const OF_SHARD: usize = 8;
    let Some(cpus) = two_cpus_or_skip() else { return };
    for engine in engines() {
        let [one, two] = [1, 2].map(|shards| {
            let folder = Folder::new();
            let data = folder.path("data");
            let cpus = cpus[..shards].iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            let args = ["store", "--engine", engine, "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--cpus"];
            let args = [&args[..], &[&cpus, "--data", data.to_str().unwrap()]].concat();
            let server = Server::start(&args, 1);
            let open = fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
            server.stop();
            open
        });
        assert!(two > one && two - one <= OF_SHARD + 1, "{engine}: {one} with one shard, {two} with two");
    }
}

#[test]
fn a_reload_reports_and_keeps_to_the_part_for_connections() {
    let open_max = 256;
    for (kind, part) in [
        ("kind = \"echo\"", open_max),
        // Each connection may need another one to a backend.
        ("kind = \"http\"\nbackends = [\"127.0.0.1:1\"]", open_max / 2),
    ] {
        let folder = Folder::new();
        let write = |connections_max: u64| {
            let text = format!(
                "engine = \"epoll\"\ncpus = \"{}\"\n[[service]]\nname = \"a\"\n{kind}\nlisten = [\"tcp:127.0.0.1:0\"]\n\
                 limits = {{ connections_max = {connections_max} }}\n",
                first_cpu()
            );
            folder.write("ksf.toml", text)
        };
        let mut server = start(open_max, &["serve", write(10).to_str().unwrap()], 1);
        let is_lowered = |line: &String| line.contains("connections_max is");
        let connections_max = |server: &Server| value(&server.stat()["services"][0]["limits"], "connections_max");
        for (wanted, reported) in [(11, false), (1000, true), (12, false)] {
            write(wanted);
            server.signal(Signal::HUP);
            let before = server.seen().len();
            server.line_with("limits reloaded from");
            let lines = &server.seen()[before..];
            assert_eq!(lines.iter().any(is_lowered), reported, "{kind}: {lines:?}");
            let now = connections_max(&server);
            assert!(if reported { now > 12 && now < part as u64 } else { now == wanted }, "{kind}: {now}");
        }
        server.stop();
    }
}

#[test]
fn a_service_without_descriptors_for_connections_does_not_start() {
    let args =
        ["--nofile=40:40", env!("CARGO_BIN_EXE_ksf"), "kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"];
    let mut command = Command::new("prlimit");
    let output = command.args(args).args(["--cpus", &first_cpu()]).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(71), "{text}");
    assert!(text.contains("the process may have 40 descriptors") && text.contains("LimitNOFILE="), "{text}");
}
