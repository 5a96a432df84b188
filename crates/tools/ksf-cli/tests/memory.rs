//! Memory that clients make a server take that send and do not read: each service, as a process of its own.

use std::fmt::Display;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ksf::limits::Limits;
use ksf_nfs::Procedure;
use ksf_proto::oncrpc::record::put_record;
use ksf_proto::oncrpc::{CallHeader, MOUNT_PROGRAM, NFS_PROGRAM, OpaqueAuth};
use ksf_proto::p9::{Data, GetLock, Lock, NO_FID, NO_TAG, NO_UID, Names, Reply, Request, SetStat, VERSION};
use ksf_proto::xdr::XdrWrite as _;
use ksf_test::rpc::words;
use ksf_test::stream::connect;
use ksf_test::{PATIENCE, effort, may_have_networks, own_network, root_or_skip, rpc, sysctl, wait_until};
use rustix::net::sockopt::set_socket_linger;

use self::bound::slot_bytes;
use crate::support::export::{Calls, Place, opaque};
use crate::support::{Folder, Server, engines_of_effort, ksf, value};

#[path = "../../../services/ksf-kv/tests/common/bound.rs"]
mod bound;

const CONNECTIONS: usize = 1000;
/// Results of a call that are long by themselves.
const LONG_RESULTS_BYTES: usize = 16 << 10;
/// Longest reply of each service here.
const REPLY_BYTES: usize = 1 << 20;
const SHARD_BYTES_MAX: usize = 24 << 20;
const ASSEMBLY_BYTES_MAX: usize = 8 << 20;
const MESSAGE_BYTES_MAX: usize = (1 << 20) + 4096;
const LIMITS: [&str; 16] = [
    "--shard-bytes-max",
    "24m",
    "--assembly-bytes-max",
    "8m",
    "--connection-bytes-max",
    "2m",
    "--message-bytes-max",
    "1052672",
    // Nobody is closed for what others do.
    "--pressure-timeout-ms",
    "60000",
    "--send-timeout-ms",
    "600000",
    "--assembly-timeout-ms",
    "600000",
    "--idle-timeout-ms",
    "0",
];

/// The same as lines of a file.
fn limits_in_a_file() -> String {
    let pairs = LIMITS.chunks(2).map(|pair| {
        let key = pair[0].trim_start_matches('-').replace('-', "_");
        format!("{key} = \"{}\"\n", pair[1])
    });
    pairs.collect()
}

fn bound_bytes() -> usize {
    let limits = Limits {
        shard_bytes_max: SHARD_BYTES_MAX,
        assembly_bytes_max: ASSEMBLY_BYTES_MAX,
        message_bytes_max: MESSAGE_BYTES_MAX,
        ..Limits::default()
    };
    bound::bound_bytes(&limits, REPLY_BYTES, shards(), CONNECTIONS)
}

fn shards() -> usize {
    ksf::cpus::allowed().unwrap().len()
}

/// Starts `ksf WORDS` under the limits above.
fn start(words: &[&str]) -> Server {
    let mut command = ksf();
    command.args(words).args(LIMITS);
    Server::start_command(command, 1)
}

/// A network in which the kernel takes little of what is sent and not read: the rest stays with the server.
fn have_short_sockets() {
    own_network();
    if may_have_networks() {
        sysctl("ipv4/tcp_wmem", "4096 16384 65536");
    }
}

/// In which a small request is answered. What kept others waiting kept them for 15 s and more; beside other tests on two CPUs the
/// machine alone takes more than a second.
fn soon() -> Duration {
    effort(Duration::from_secs(10), Duration::from_secs(1))
}

/// The same while the server works off what the kernel had taken.
const BURST: Duration = Duration::from_secs(1);

/// The engines of a test of a service that has a kernel half, each with its workers.
fn engines_and_workers(turn: usize) -> Vec<(&'static str, &'static [&'static str])> {
    let both = |engine| [(engine, &[][..]), (engine, &["--workers", "2"])];
    let of_user_space = engines_of_effort(turn).into_iter().flat_map(both);
    of_user_space.chain(root_or_skip("eBPF").map(|()| ("kernel", &[][..]))).collect()
}

/// A server and what is done to it.
struct Attack<'a> {
    name: String,
    server: &'a Server,
    /// Sent by each of a thousand connections that read nothing.
    request: Vec<u8>,
    /// Sent by another client, with the beginning of its reply.
    small: (Vec<u8>, Vec<u8>),
}

impl Attack<'_> {
    fn resident_bytes(&self) -> usize {
        let pages = std::fs::read_to_string(format!("/proc/{}/statm", self.server.pid())).unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
    }

    /// Names of the threads of the process, without those that the kernel adds for io_uring (`iou-wrk-PID`), which it bounds.
    fn threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.server.pid())).unwrap();
        // A thread that ends meanwhile has no name.
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
        let mut names: Vec<String> = names.filter(|name| !name.starts_with("iou-")).collect();
        names.sort();
        names
    }

    fn address(&self) -> SocketAddr {
        self.server.address(" tcp ")
    }

    /// Another client is answered soon: within a second where nothing else runs.
    fn ask(&self, when: impl Display) {
        let took = self.ask_once(&when);
        assert!(took < soon(), "{} {when}: a small request took {took:?}", self.name);
    }

    /// Another client is answered: in what time.
    fn ask_once(&self, when: &impl Display) -> Duration {
        let (small, reply) = &self.small;
        let mut client = connect(self.address());
        let begin = Instant::now();
        client.write_all(small).unwrap();
        let mut seen = vec![0; reply.len()];
        client.read_exact(&mut seen).unwrap();
        let text = seen.escape_ascii();
        assert!(seen == *reply, "{} {when}: {text}", self.name);
        begin.elapsed()
    }

    /// The server stays within its bound, and returns the memory afterwards.
    fn run(&self) {
        self.run_after(|_| {});
    }

    /// The same with connections that begin so.
    fn run_after(&self, greet: impl Fn(&mut TcpStream)) {
        let idle = self.resident_bytes();
        self.stays_within_the_bound(greet);
        self.returns_memory(idle);
    }

    fn returns_memory(&self, idle: usize) {
        // Receive slots stay, and some of what is freed is returned only when there is more of it.
        let rest = shards() * (slot_bytes() + (16 << 20));
        wait_until(format_args!("{}: memory is returned", self.name), || {
            self.resident_bytes().saturating_sub(idle) <= rest + rest / 4
        });
        self.ask("afterwards");
    }

    fn stays_within_the_bound(&self, greet: impl Fn(&mut TcpStream)) {
        let bound = bound_bytes();
        self.ask("before");
        let (idle, threads) = (self.resident_bytes(), self.threads());
        let mut most = 0;
        let mut look = || {
            most = most.max(self.resident_bytes().saturating_sub(idle));
            assert!(most <= bound + bound / 4, "{}: {most} bytes of {bound}", self.name);
            // A thread has its name a moment after its start.
            let now = self.threads();
            assert_eq!(now.len(), threads.len(), "{}: threads {now:?}, and before {threads:?}", self.name);
        };
        let begin = |_| {
            let mut peer = connect(self.address());
            // Replies stay with the server, and do not use up what the machine has for sockets.
            rustix::net::sockopt::set_socket_recv_buffer_size(&peer, 4096).unwrap();
            greet(&mut peer);
            peer.set_nonblocking(true).unwrap();
            (peer, 0)
        };
        let mut peers: Vec<(TcpStream, usize)> = (0..CONNECTIONS).map(begin).collect();
        for at in 0..CONNECTIONS {
            // The last ones once more, which could send no more before.
            for (peer, sent) in peers[..=at].iter_mut().rev().take(8) {
                while let Ok(bytes @ 1..) = peer.write(&self.request[*sent..]) {
                    *sent += bytes;
                }
            }
            if at % 50 == 0 {
                look();
                if effort(false, true) {
                    self.ask(format_args!("while {at} send"));
                }
            }
        }
        // What the kernel had taken is worked off, or waits: in the gate, how long that takes is a matter of the machine.
        let mut longest = Duration::ZERO;
        wait_until(format_args!("{}: the burst is over", self.name), || {
            look();
            let took = self.ask_once(&"in the burst");
            longest = longest.max(took);
            took < soon()
        });
        assert!(longest < effort(PATIENCE, BURST), "{}: in the burst a small request took {longest:?}", self.name);
        // On each shard, most likely, while all that the others sent is there.
        for _ in 0..8 * shards() {
            look();
            self.ask("meanwhile");
        }
    }

    /// The server stays within its bound while peers send and reset their connections, and returns the memory afterwards.
    fn run_with_resets(&self, greet: impl Fn(&mut TcpStream)) {
        let bound = bound_bytes();
        self.ask("before resets");
        let idle = self.resident_bytes();
        for at in 0..CONNECTIONS {
            let mut peer = connect(self.address());
            greet(&mut peer);
            peer.set_nonblocking(true).unwrap();
            let mut sent = 0;
            while let Ok(bytes @ 1..) = peer.write(&self.request[sent..]) {
                sent += bytes;
            }
            // RST in place of FIN.
            set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            drop(peer);
            if at % 50 == 0 {
                let more = self.resident_bytes().saturating_sub(idle);
                assert!(more <= bound + bound / 4, "{}: {more} bytes of {bound} after resets", self.name);
            }
        }
        self.returns_memory(idle);
    }
}

fn http(method: &str, path: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").into_bytes()
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\n";

#[test]
fn the_demo_server_takes_no_more_than_is_stated() {
    for engine in engines_of_effort(0) {
        let page = ["serve", "demo", "-e", engine, "-k", "-a", "127.0.0.1:0"];
        let page = start(&[&page[..], &["--body-bytes", &REPLY_BYTES.to_string()]].concat());
        let request = http("GET", "/").repeat(4);
        let small = (http("HEAD", "/"), OK.to_vec());
        Attack { name: format!("{engine}: demo"), server: &page, request, small }.run();
        page.stop();
    }
}

#[test]
fn the_proxy_takes_no_more_than_is_stated() {
    have_short_sockets();
    for engine in engines_of_effort(1) {
        let length = REPLY_BYTES.to_string();
        let page =
            Server::start(&["serve", "demo", "-e", engine, "-k", "-a", "127.0.0.1:0", "--body-bytes", &length], 1);
        let backend = page.address(" tcp ").to_string();
        let proxy = start(&["serve", "demo", "-e", engine, "-k", "-a", "127.0.0.1:0", "-x", &backend]);
        let request = http("GET", "/").repeat(4);
        let small = (http("HEAD", "/"), OK.to_vec());
        Attack { name: format!("{engine}: proxy"), server: &proxy, request, small }.run();
        proxy.stop();
        page.stop();
    }
}

/// A backend that takes connections, and nothing that they send.
fn silent_backend() -> TcpListener {
    let backend = TcpListener::bind("127.0.0.1:0").unwrap();
    // Accepted connections have the same, and those of all clients wait to be accepted.
    rustix::net::sockopt::set_socket_recv_buffer_size(&backend, 4096).unwrap();
    rustix::net::listen(&backend, 4096).unwrap();
    backend
}

#[test]
fn a_proxy_whose_backend_does_not_read_takes_no_more_than_is_stated() {
    have_short_sockets();
    let fill = "x".repeat(60 << 10);
    let long_head = format!("GET / HTTP/1.1\r\nHost: localhost\r\nA: {fill}\r\n\r\n").into_bytes();
    let post = format!("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {REPLY_BYTES}\r\n\r\n");
    let requests = [
        ("long heads", long_head.repeat(4)),
        ("POST", [post.as_bytes(), &vec![b'x'; REPLY_BYTES]].concat()),
        ("pipelined requests", http("GET", "/").repeat(20_000)),
    ];
    for engine in engines_of_effort(2) {
        for (what, request) in &requests {
            let backend = silent_backend();
            let address = backend.local_addr().unwrap().to_string();
            let args = ["serve", "demo", "-e", engine, "-k", "-a", "127.0.0.1:0", "-x", &address];
            let patient = ["--header-bytes-max", "64k", "--upstream-timeout-ms", "600000"];
            let proxy = start(&[&args[..], &patient].concat());
            // The proxy answers that itself.
            let small = b"OPTIONS / HTTP/1.1\r\nHost: localhost\r\nMax-Forwards: 0\r\n\r\n".to_vec();
            let (name, request) = (format!("{engine}: proxy, {what}"), request.clone());
            // A client that only ended its direction would still be owed its responses.
            let attack = Attack { name, server: &proxy, request, small: (small, OK.to_vec()) };
            attack.run_after(|peer| set_socket_linger(peer, Some(Duration::ZERO)).unwrap());
            proxy.stop();
        }
    }
}

#[test]
fn echo_takes_no_more_than_is_stated() {
    for (engine, workers) in engines_and_workers(3) {
        let server = start(&[&["kecho", "--engine", engine, "--listen", "tcp:127.0.0.1:0"], workers].concat());
        let request = vec![b'x'; 1 << 20];
        let small = (b"small".to_vec(), b"small".to_vec());
        Attack { name: format!("{engine}: kecho {workers:?}"), server: &server, request, small }.run();
        server.stop();
    }
}

#[test]
fn work_takes_no_more_than_is_stated() {
    for engine in engines_of_effort(4) {
        for workers in ["", "workers = 2\n"] {
            let folder = Folder::new();
            let file = folder.write(
                "work.toml",
                format!(
                    "[[service]]\nname = \"work\"\nkind = \"work\"\nengine = \"{engine}\"\n{workers}\
                     listen = [\"tcp:127.0.0.1:0\"]\n[service.limits]\n{}",
                    limits_in_a_file()
                ),
            );
            let server = Server::start(&["serve", file.to_str().unwrap()], 1);
            let request = framed(&[&[0; 8][..], &[b'x'; 256 << 10]].concat()).repeat(4);
            let small = (framed(&[&[0; 8][..], b"small"].concat()), framed(b"\0\0\0\0small"));
            Attack { name: format!("{engine}: work {workers:?}"), server: &server, request, small }.run();
            server.stop();
        }
    }
}

/// A message of the work service.
fn framed(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_be_bytes()[..], body].concat()
}

#[test]
fn rpc_takes_no_more_than_is_stated() {
    for (engine, workers) in engines_and_workers(5) {
        let server = start(&[&["krpc2", "--engine", engine, "--listen", "tcp:127.0.0.1:0"], workers].concat());
        let null = rpc::record(&rpc::call(1, 100_003, 3, 0));
        let small = (null.clone(), rpc::record(&rpc::accepted(1, &[0])));
        let request = null.repeat(20_000);
        Attack { name: format!("{engine}: krpc2 {workers:?}"), server: &server, request, small }.run();
        server.stop();
    }
}

#[test]
fn nfs_takes_no_more_than_is_stated() {
    for engine in engines_of_effort(6) {
        let mut lists = 0;
        let place = Place::new();
        fill(&place);
        let server = place.start(engine, ",squash=all,anon=0:0", &LIMITS);
        let address = server.address(" tcp ");
        let calls = Calls(address);
        let folder = calls.mount(place.export().to_str().unwrap());
        let file = calls.lookup(&folder, "long").unwrap();
        let written = calls.create(&folder, "written");
        let link = calls.lookup(&folder, "link").unwrap();
        let record = |xid, program, procedure, args: &[u8]| {
            let mut call = Vec::new();
            put_record(&mut call, |out| {
                let credential = OpaqueAuth::NONE;
                CallHeader { xid, program, version: 3, procedure, credential }.put(out);
                out.put(args);
            });
            call
        };
        let call = |procedure, args: &[u8]| record(1, NFS_PROGRAM, procedure, args);
        let null = rpc::record(&rpc::call(1, 100_003, 3, 0));
        let small = (null, rpc::record(&rpc::accepted(1, &[0])));
        // READ: the offset in two words, then how much.
        let request = call(6, &[opaque(&file), words(&[0, 0, REPLY_BYTES as u32])].concat()).repeat(4);
        Attack { name: format!("{engine}: nfs READ"), server: &server, request, small: small.clone() }.run();
        // WRITE: UNSTABLE, behind the offset and the length.
        let head = [opaque(&written), words(&[0, 0, REPLY_BYTES as u32, 0])].concat();
        let request = call(7, &[head, opaque(&vec![b'x'; REPLY_BYTES])].concat()).repeat(2);
        let attack = Attack { name: format!("{engine}: nfs WRITE"), server: &server, request, small: small.clone() };
        attack.run();
        attack.run_with_resets(|_| {});
        assert!(value(&server.stat()["services"][0]["own"], "write_calls") > 0, "{engine}: nothing is written");
        // Lists are long one by one, all other replies together.
        let mut others = Vec::new();
        let procedures = Procedure::ALL.iter().zip(0..);
        let of_nfs = procedures.map(|(procedure, number)| {
            (procedure.name(), NFS_PROGRAM, number, arguments(*procedure, &folder, &file, &link))
        });
        let path = opaque(place.export().to_str().unwrap().as_bytes());
        let of_mount = [("null", 0), ("mnt", 1), ("dump", 2), ("umnt", 3), ("umntall", 4), ("export", 5)];
        let of_mount = of_mount.map(|(name, number)| {
            (name, MOUNT_PROGRAM, number, if matches!(name, "mnt" | "umnt") { path.clone() } else { Vec::new() })
        });
        for (xid, (name, program, number, args)) in (100..).zip(of_nfs.chain(of_mount)) {
            let results = calls.call(program, number, &args);
            let request = record(xid, program, number, &args);
            if results.len() <= LONG_RESULTS_BYTES {
                others.extend(request);
                continue;
            }
            let (name, request) = (format!("{engine}: nfs {name}"), request.repeat(4 * REPLY_BYTES / results.len()));
            Attack { name, server: &server, request, small: small.clone() }.run();
            lists += 1;
        }
        assert_eq!(lists, 2, "READDIR and READDIRPLUS");
        let request = others.repeat(40);
        Attack { name: format!("{engine}: all other calls"), server: &server, request, small }.run();
        // Not stopped: the disk may take longer to sync for peers that are gone than a stop waits for it (5 s).
        drop(server);
    }
}

/// An export with a long file, a link with a long target and many long names.
fn fill(place: &Place) {
    std::fs::write(place.export().join("long"), vec![b'x'; REPLY_BYTES]).unwrap();
    std::os::unix::fs::symlink("x".repeat(4000), place.export().join("link")).unwrap();
    for at in 0..4000 {
        std::fs::write(place.export().join(format!("{at:0200}")), "").unwrap();
    }
}

/// Arguments of a procedure of NFS. None of the calls changes anything, so each may be repeated.
fn arguments(procedure: Procedure, folder: &[u8], file: &[u8], link: &[u8]) -> Vec<u8> {
    let named = |name: &str| [opaque(folder), opaque(name.as_bytes())].concat();
    // No attribute is set.
    let attributes = words(&[0; 6]);
    match procedure {
        Procedure::Null => Vec::new(),
        Procedure::Getattr | Procedure::Fsstat | Procedure::Fsinfo | Procedure::Pathconf => opaque(file),
        Procedure::Setattr => [opaque(file), attributes, words(&[0])].concat(),
        Procedure::Lookup => named("long"),
        Procedure::Access => [opaque(file), words(&[0x3f])].concat(),
        Procedure::Readlink => opaque(link),
        Procedure::Read => [opaque(file), words(&[0, 0, 16])].concat(),
        Procedure::Write => [opaque(file), words(&[0, 0, 0, 0]), opaque(b"")].concat(),
        // GUARDED: the name is there.
        Procedure::Create => [named("long"), words(&[1]), attributes].concat(),
        Procedure::Mkdir => [named("long"), attributes].concat(),
        Procedure::Symlink => [named("long"), attributes, opaque(b"target")].concat(),
        // A FIFO.
        Procedure::Mknod => [named("long"), words(&[7]), attributes].concat(),
        Procedure::Remove | Procedure::Rmdir => named("none"),
        Procedure::Rename => [named("none"), named("other")].concat(),
        Procedure::Link => [opaque(file), named("long")].concat(),
        // From the first entry.
        Procedure::Readdir => [opaque(folder), words(&[0, 0, 0, 0, REPLY_BYTES as u32])].concat(),
        Procedure::Readdirplus => {
            [opaque(folder), words(&[0, 0, 0, 0, REPLY_BYTES as u32, REPLY_BYTES as u32])].concat()
        }
        Procedure::Commit => [opaque(file), words(&[0, 0, 0])].concat(),
    }
}

#[test]
fn ninep_takes_no_more_than_is_stated() {
    for engine in engines_of_effort(7) {
        let place = Place::new();
        fill(&place);
        let server = place.start_kind("9p", 0, engine, ",squash=all,anon=0:0", &LIMITS);
        let message = |tag, request: Request<'_>| {
            let mut message = Vec::new();
            request.put(tag, &mut message).unwrap();
            message
        };
        let msize = REPLY_BYTES as u32;
        let version = message(NO_TAG, Request::Version { msize, version: VERSION });
        let mut agreed = Vec::new();
        (Reply::Version { msize, version: VERSION }).put(NO_TAG, &mut agreed).unwrap();
        // The root is fid 0, the long file is open as fid 1, the link is fid 2.
        let (mut long, mut link) = (Vec::new(), Vec::new());
        let (long, link) = (Names::of(&[b"long"], &mut long).unwrap(), Names::of(&[b"link"], &mut link).unwrap());
        let session = [
            version.clone(),
            message(1, Request::Attach { fid: 0, afid: NO_FID, uname: b"", aname: b"", n_uname: NO_UID }),
            message(1, Request::Walk { fid: 0, newfid: 1, names: long }),
            // To read and to write.
            message(1, Request::Lopen { fid: 1, flags: 2 }),
            message(1, Request::Walk { fid: 0, newfid: 2, names: link }),
        ];
        let to_list = [version.clone(), session[1].clone(), message(1, Request::Lopen { fid: 0, flags: 0 })];
        let begin = |peer: &mut TcpStream, session: &[Vec<u8>]| {
            for request in session {
                peer.write_all(request).unwrap();
                let mut size = [0; 4];
                peer.read_exact(&mut size).unwrap();
                let mut reply = [&size[..], &vec![0; u32::from_le_bytes(size) as usize - 4]].concat();
                peer.read_exact(&mut reply[4..]).unwrap();
                assert_eq!(reply[4], request[4] + 1, "it is refused");
            }
        };
        let greet = |peer: &mut TcpStream| begin(peer, &session);
        let read = |tag| message(tag, Request::Read { fid: 1, offset: 0, count: msize });
        let request = (1..=4).flat_map(read).collect();
        let small = (version.clone(), agreed);
        Attack { name: format!("{engine}: 9p Tread"), server: &server, request, small: small.clone() }.run_after(greet);
        // As long as a message may be.
        let data = vec![b'x'; REPLY_BYTES - 24];
        let write = |tag| message(tag, Request::Write { fid: 1, offset: 0, data: Data(&data) });
        let request = (1..=2).flat_map(write).collect();
        let attack = Attack { name: format!("{engine}: 9p Twrite"), server: &server, request, small: small.clone() };
        attack.run_after(greet);
        attack.run_with_resets(greet);
        assert!(value(&server.stat()["services"][0]["own"], "write_calls") > 0, "{engine}: nothing is written");
        let list = |tag| message(tag, Request::Readdir { fid: 0, offset: 0, count: msize });
        let request = (1..=64).flat_map(list).collect();
        let name = format!("{engine}: 9p Treaddir");
        let attack = Attack { name, server: &server, request, small: small.clone() };
        attack.run_after(|peer| begin(peer, &to_list));
        // Each of the others; Tversion ends a session.
        let kinds = Request::KINDS.iter().filter(|(_, name)| *name != "version").cycle();
        let kinds = kinds.take(40 * Request::KINDS.len()).zip(1..);
        let request = kinds.flat_map(|((_, name), tag)| message(tag, small_request(name, long))).collect();
        Attack { name: format!("{engine}: all other messages"), server: &server, request, small }.run_after(greet);
        // Not stopped: the disk may take longer to sync for peers that are gone than a stop waits for it (5 s).
        drop(server);
    }
}

/// A request of this name on the fids above, with a reply that is short. Nothing is changed but locks.
fn small_request<'a>(name: &str, names: Names<'a>) -> Request<'a> {
    const LONG: &[u8] = b"long";
    const NONE: &[u8] = b"none";
    const UNKNOWN_FID: u32 = 99;
    match name {
        "statfs" => Request::Statfs { fid: 0 },
        "lopen" => Request::Lopen { fid: UNKNOWN_FID, flags: 0 },
        // The name is there.
        "lcreate" => Request::Lcreate { fid: 0, name: LONG, flags: 0o200, mode: 0, gid: 0 },
        "symlink" => Request::Symlink { dfid: 0, name: LONG, target: LONG, gid: 0 },
        "mknod" => Request::Mknod { dfid: 0, name: LONG, mode: 0o010_600, major: 0, minor: 0, gid: 0 },
        "mkdir" => Request::Mkdir { dfid: 0, name: LONG, mode: 0, gid: 0 },
        "link" => Request::Link { dfid: 0, fid: 1, name: LONG },
        "rename" => Request::Rename { fid: UNKNOWN_FID, dfid: 0, name: NONE },
        "renameat" => Request::Renameat { olddirfid: 0, oldname: NONE, newdirfid: 0, newname: LONG },
        "unlinkat" => Request::Unlinkat { dirfid: 0, name: NONE, flags: 0 },
        "readlink" => Request::Readlink { fid: 2 },
        "getattr" => Request::Getattr { fid: 1, mask: u64::MAX },
        "setattr" => Request::Setattr { fid: 1, to: SetStat::default() },
        // Tclunk is behind it.
        "xattrwalk" => Request::Xattrwalk { fid: 1, newfid: 9, name: b"" },
        "xattrcreate" => Request::Xattrcreate { fid: UNKNOWN_FID, name: NONE, size: 1, flags: 0 },
        // It is not open.
        "readdir" => Request::Readdir { fid: 0, offset: 0, count: 4096 },
        "fsync" => Request::Fsync { fid: 1, datasync: 1 },
        "lock" => Request::Lock { fid: 1, lock: Lock { length: 1, client: NONE, ..Lock::default() } },
        "getlock" => Request::Getlock { fid: 1, lock: GetLock { length: 1, client: NONE, ..GetLock::default() } },
        "auth" => Request::Auth { afid: 8, uname: b"", aname: b"", n_uname: NO_UID },
        "attach" => Request::Attach { fid: 0, afid: NO_FID, uname: b"", aname: b"", n_uname: NO_UID },
        "flush" => Request::Flush { oldtag: 60_000 },
        // Its new fid is in use.
        "walk" => Request::Walk { fid: 0, newfid: 1, names },
        "read" => Request::Read { fid: 1, offset: 0, count: 16 },
        "write" => Request::Write { fid: 1, offset: 0, data: Data(b"x") },
        "clunk" => Request::Clunk { fid: 9 },
        "remove" => Request::Remove { fid: UNKNOWN_FID },
        _ => panic!("{name} is new: how is it asked for?"),
    }
}

#[test]
fn the_store_takes_no_more_than_is_stated() {
    have_short_sockets();
    for engine in engines_of_effort(8) {
        let folder = Folder::new();
        let data = folder.path("store");
        let args = ["store", "--engine", engine, "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--data"];
        let server = start(&[&args[..], &[data.to_str().unwrap()]].concat());
        let mut client = connect(server.address(" tcp "));
        let value = vec![b'x'; REPLY_BYTES - 1024];
        for (key, value) in [("long", &value[..]), ("short", b"x")] {
            let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), value.len());
            client.write_all(&[head.as_bytes(), value, b"\r\n"].concat()).unwrap();
            ksf_test::stream::expect(&mut client, b"+OK\r\n");
        }
        drop(client);
        let small = (http("GET", "/short"), OK.to_vec());
        let request = http("GET", "/long").repeat(4);
        Attack { name: format!("{engine}: store over HTTP"), server: &server, request, small: small.clone() }.run();
        let head = format!("PUT /long HTTP/1.1\r\nHost: localhost\r\nContent-Length: {REPLY_BYTES}\r\n\r\n");
        let request = [head.as_bytes(), &vec![b'x'; REPLY_BYTES - 1]].concat();
        Attack { name: format!("{engine}: unfinished PUT"), server: &server, request, small }.run();
        let small = (b"*2\r\n$3\r\nGET\r\n$5\r\nshort\r\n".to_vec(), b"$1\r\nx\r\n".to_vec());
        let request = b"*2\r\n$3\r\nGET\r\n$4\r\nlong\r\n".repeat(4);
        Attack { name: format!("{engine}: store over RESP"), server: &server, request, small }.run();
        server.stop();
    }
}
