//! The services on real sockets, on every engine that works here: TCP, UDP and
//! Unix sockets, IPv4 and IPv6, and Debian's rpcinfo as a judge.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};

use crate::common::vectors::{answerable, record, service, unanswerable};
use crate::common::{counter, engines};
use ksf::engine::EngineKind;
use ksf::framing::Framing;
use ksf::listener::ListenAddr;
use ksf::server::Server;
use ksf::tasks::TaskOptions;
use ksf::{Message, Order, Profile, Reply, Service};
use ksf_proto::xdr::XdrWrite;
use ksf_services::echo::Echo;
use ksf_services::rpc::{Answered, Program, ProgramTable, RpcCall, RpcDeferred, RpcReply};
use ksf_services::work::{self, Work};
use ksf_test::stream::{connect, datagrams, read_exactly};
use ksf_test::{Folder, PATIENCE, program_or_skip, wait_until};

fn start<S: Service>(engine: EngineKind, service: &Arc<S>, addrs: &[ListenAddr]) -> Server {
    let listen =
        |builder: ksf::server::Builder, addr: &ListenAddr| builder.listen(addr.clone(), Arc::clone(service), None);
    let builder = addrs.iter().fold(Server::builder().engine(engine), listen);
    builder.start().expect("the server starts")
}

fn any_port(stream: bool) -> [ListenAddr; 2] {
    let kind = if stream { ListenAddr::Tcp } else { ListenAddr::Udp };
    [kind((Ipv4Addr::LOCALHOST, 0).into()), kind((Ipv6Addr::LOCALHOST, 0).into())]
}

/// Where the listener with this number really listens.
fn address(server: &Server, listener: usize) -> SocketAddr {
    match &server.listeners()[listener].addr {
        ListenAddr::Tcp(addr) | ListenAddr::Udp(addr) => *addr,
        other => panic!("{other} has no address"),
    }
}

fn server_counter(server: &Server, name: &str) -> u64 {
    server.counters().iter().find(|counter| counter.name == name).expect("a known counter").value
}

fn receive<'a>(socket: &UdpSocket, buffer: &'a mut [u8]) -> &'a [u8] {
    let length = socket.recv(buffer).expect("a reply arrives");
    &buffer[..length]
}

/// Sends the call of each case and compares the reply.
fn conforms(mut stream: impl Read + Write, what: &str) {
    for case in answerable() {
        stream.write_all(&record(&case.message)).unwrap();
        let expected = record(&case.reply);
        assert_eq!(read_exactly(&mut stream, expected.len()), expected, "{what}: {}", case.name);
    }
}

#[test]
fn rpc_answers_over_streams() {
    for engine in engines() {
        let folder = Folder::new();
        let path = folder.path("socket");
        let mut addrs = any_port(true).to_vec();
        addrs.push(ListenAddr::Unix(path.clone()));
        let server = start(engine, &service(), &addrs);
        for listener in 0..2 {
            let addr = address(&server, listener);
            conforms(connect(addr), &format!("{engine} tcp {addr}"));
        }
        let unix = UnixStream::connect(&path).unwrap();
        unix.set_read_timeout(Some(PATIENCE)).unwrap();
        conforms(unix, &format!("{engine} unix"));
        server.drain().unwrap();
        assert!(!path.exists(), "the socket's path is removed");
    }
}

#[test]
fn rpc_answers_over_datagrams_without_record_marks() {
    for engine in engines() {
        let server = start(engine, &service(), &any_port(false));
        for listener in 0..2 {
            let socket = datagrams(address(&server, listener));
            let mut buffer = [0; 2048];
            for case in answerable() {
                socket.send(&case.message).unwrap();
                let reply = receive(&socket, &mut buffer);
                assert_eq!(reply, case.reply, "{engine}: {}", case.name);
                // The sender may be forged, and another machine gets the reply.
                assert!(reply.len() <= 2 * case.message.len(), "{engine}: {}", case.name);
            }
        }
    }
}

#[test]
fn unanswerable_messages_close_a_stream_and_nothing_else() {
    let good = &answerable()[0];
    for engine in engines() {
        let service = service();
        let server = start(engine, &service, &any_port(true)[..1]);
        let mut bystander = connect(address(&server, 0));
        for (message, name) in unanswerable() {
            let before = counter(&*service, name);
            let mut stream = connect(address(&server, 0));
            let call = record(&good.message);
            stream.write_all(&[&call[..], &record(&message), &call].concat()).unwrap();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).expect("closed, not reset");
            assert_eq!(received, record(&good.reply), "{engine}: {message:02x?}");
            assert_eq!(counter(&*service, name), before + 1, "{engine}: {name}");
            bystander.write_all(&call).unwrap();
            assert_eq!(read_exactly(&mut bystander, received.len()), received);
        }
    }
}

#[test]
fn unanswerable_datagrams_are_dropped_and_counted() {
    let good = &answerable()[0];
    for engine in engines() {
        let service = service();
        let server = start(engine, &service, &any_port(false)[..1]);
        let socket = datagrams(address(&server, 0));
        for (message, name) in unanswerable() {
            let before = counter(&*service, name);
            socket.send(&message).unwrap();
            // The next reply is to the next call: nothing came for this one.
            socket.send(&good.message).unwrap();
            let mut buffer = [0; 2048];
            assert_eq!(receive(&socket, &mut buffer), good.reply, "{engine}: {message:02x?}");
            assert_eq!(counter(&*service, name), before + 1, "{engine}: {name}");
        }
    }
}

#[test]
fn rpcinfo_is_satisfied() {
    let Some(rpcinfo) = program_or_skip("rpcinfo") else { return };
    for engine in engines() {
        let addrs = [any_port(true), any_port(false)].concat();
        let server = start(engine, &service(), &addrs);
        for (listener, netid) in ["tcp", "tcp6", "udp", "udp6"].into_iter().enumerate() {
            let address = ksf_proto::oncrpc::rpcbind::universal_address(address(&server, listener));
            // With a version it calls NULL; without one it finds the versions by PROG_MISMATCH.
            for (program, version, expected) in [
                ("100003", Some("3"), "program 100003 version 3 ready and waiting\n"),
                ("100005", Some("3"), "program 100005 version 3 ready and waiting\n"),
                ("100003", None, "program 100003 version 3 ready and waiting\n"),
            ] {
                let output = Command::new(&rpcinfo)
                    .args(["-a", &address, "-T", netid, program])
                    .args(version)
                    .output()
                    .expect("rpcinfo can be started");
                let stdout = String::from_utf8_lossy(&output.stdout);
                assert_eq!(stdout, expected, "{engine} {netid} {program} {version:?}: {output:?}");
                assert!(output.status.success(), "{engine} {netid}: {output:?}");
            }
        }
    }
}

#[test]
fn echo_returns_datagrams_of_every_size() {
    for engine in engines() {
        let server = start(engine, &Arc::new(Echo), &any_port(false));
        for listener in 0..2 {
            let socket = datagrams(address(&server, listener));
            let bytes: Vec<u8> = (0..9000u32).map(|i| ((i * 31) >> 3) as u8).collect();
            let mut buffer = [0; 9001];
            for len in (0..2100).chain([4096, 9000]) {
                socket.send(&bytes[..len]).unwrap();
                let got = receive(&socket, &mut buffer);
                assert!(got == &bytes[..len], "{engine}: {len} bytes, {} came back", got.len());
            }
        }
    }
}

/// Keeps the calls of procedure 1; procedure 2 answers them, the last one first.
struct Later {
    programs: ProgramTable,
    kept: Mutex<Vec<RpcDeferred>>,
}

const LATER_PROGRAM: u32 = 0x2000_0002;

impl Service for Later {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: Order::Free, ..Profile::new("later", Framing::RecordMark) }
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.programs.call(message, reply, |call, reply| self.answer(call, reply));
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.programs.counters()
    }
}

impl Later {
    fn answer(&self, call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
        let mut kept = self.kept.lock().unwrap();
        match call.procedure {
            1 => {
                let (answered, deferred) = reply.defer_for(4);
                kept.push(deferred);
                answered
            }
            2 => {
                let kept: Vec<_> = kept.drain(..).rev().collect();
                reply.block(0, move |release| {
                    for (place, deferred) in kept.into_iter().enumerate() {
                        deferred.results(|out| {
                            out.put_u32(place as u32);
                            Ok(())
                        });
                    }
                    release.results(|_| Ok(()));
                })
            }
            // Forgets what it kept: the connection has to be closed.
            _ => {
                kept.clear();
                reply.void()
            }
        }
    }
}

fn later_call(xid: u32, procedure: u32) -> Vec<u8> {
    words_record(&[xid, 0, 2, LATER_PROGRAM, 1, procedure, 0, 0, 0, 0])
}

fn words_record(words: &[u32]) -> Vec<u8> {
    record(&words.iter().flat_map(|w| w.to_be_bytes()).collect::<Vec<_>>())
}

fn program(number: u32) -> ProgramTable {
    let mut programs = ProgramTable::new();
    programs.register(Program::new("test", number, 1..=1)).unwrap();
    programs
}

fn later_service() -> Arc<Later> {
    Arc::new(Later { programs: program(LATER_PROGRAM), kept: Mutex::default() })
}

#[test]
fn deferred_replies_leave_in_the_order_they_are_given() {
    for engine in engines() {
        let server = start(engine, &later_service(), &any_port(true)[..1]);
        let mut stream = connect(address(&server, 0));
        let calls: Vec<u8> = (1..=5).flat_map(|xid| later_call(xid, 1)).chain(later_call(6, 2)).collect();
        stream.write_all(&calls).unwrap();
        let mut expected: Vec<u8> = Vec::new();
        for place in 0..5 {
            expected.extend(words_record(&[5 - place, 1, 0, 0, 0, 0, place]));
        }
        expected.extend(words_record(&[6, 1, 0, 0, 0, 0]));
        assert_eq!(read_exactly(&mut stream, expected.len()), expected, "{engine}");
    }
}

#[test]
fn deferred_replies_reach_datagram_peers() {
    for engine in engines() {
        let server = start(engine, &later_service(), &any_port(false)[..1]);
        let socket = datagrams(address(&server, 0));
        for xid in 1..=2 {
            socket.send(&later_call(xid, 1)[4..]).unwrap();
        }
        socket.send(&later_call(3, 2)[4..]).unwrap();
        for words in [&[2, 1, 0, 0, 0, 0, 0][..], &[1, 1, 0, 0, 0, 0, 1], &[3, 1, 0, 0, 0, 0]] {
            let mut buffer = [0; 2048];
            assert_eq!(receive(&socket, &mut buffer), &words_record(words)[4..], "{engine}");
        }
    }
}

#[test]
fn a_forgotten_reply_closes_the_connection_with_a_counted_reason() {
    for engine in engines() {
        let server = start(engine, &later_service(), &any_port(true)[..1]);
        let mut stream = connect(address(&server, 0));
        stream.write_all(&[later_call(1, 1), later_call(2, 3)].concat()).unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).expect("closed, not reset");
        assert_eq!(received, words_record(&[2, 1, 0, 0, 0, 0]), "{engine}");
        // Counted when the socket is closed for good, a moment after we see its end.
        drop(stream);
        wait_until("it is counted", || server_counter(&server, "closed_abandoned") == 1);
    }
}

/// Procedure 1 answers 1 from a thread that may block, once the gate is open; the others answer at once.
struct Gated {
    programs: ProgramTable,
    gate: Arc<Gate>,
}

/// Holds tasks back until it is open.
#[derive(Default)]
struct Gate {
    /// Tasks that wait, and whether they need not.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |(_, open)| !*open).unwrap());
    }

    fn until_waiting(&self, number: usize) {
        let state = self.state.lock().unwrap();
        let (state, _) = self.changed.wait_timeout_while(state, PATIENCE, |(waiting, _)| *waiting < number).unwrap();
        assert!(state.0 >= number, "only {} of {number} tasks run", state.0);
    }

    fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

const GATED_PROGRAM: u32 = 0x2000_0003;

impl Service for Gated {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: Order::Free, ..Profile::new("gated", Framing::RecordMark) }
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.programs.call(message, reply, |call, reply| self.answer(call, reply));
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.programs.counters()
    }
}

impl Gated {
    fn answer(&self, call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
        if call.procedure != 1 {
            return reply.void();
        }
        let gate = Arc::clone(&self.gate);
        reply.block(4, move |deferred| {
            gate.pass();
            deferred.results(|out| {
                out.put_u32(1);
                Ok(())
            });
        })
    }
}

/// A client would take SYSTEM_ERR for the answer. So the peers are not read while the queue is full: no call is refused, and
/// none is lost.
#[test]
fn a_full_queue_is_no_answer() {
    const PEERS: usize = 4;
    const CALLS: u32 = 200;
    let gated_call = |xid, procedure| words_record(&[xid, 0, 2, GATED_PROGRAM, 1, procedure, 0, 0, 0, 0]);
    for engine in engines() {
        let gate = Arc::<Gate>::default();
        let service = Arc::new(Gated { programs: program(GATED_PROGRAM), gate: Arc::clone(&gate) });
        // One task runs and two wait.
        let few = TaskOptions { threads_max: 1, queue_max: 2, ..TaskOptions::default() };
        let builder = Server::builder().engine(engine).cpus(Some(vec![ksf::cpus::allowed().unwrap()[0]]));
        let builder = builder.tasks(few).listen(any_port(true)[0].clone(), Arc::clone(&service), None);
        let server = builder.start().unwrap();

        let mut peers: Vec<_> = (0..PEERS).map(|_| connect(address(&server, 0))).collect();
        let calls: Vec<u8> = (1..=CALLS).flat_map(|xid| gated_call(xid, 1)).collect();
        peers.iter_mut().for_each(|peer| peer.write_all(&calls).unwrap());
        gate.until_waiting(1);
        wait_until("the queue is full", || server_counter(&server, "messages") >= 3);
        // Each connection exceeds the queue by one at most, also while the shard serves others.
        let mut bystander = connect(address(&server, 0));
        for asked in 1..=20 {
            bystander.write_all(&gated_call(7, 0)).unwrap();
            assert_eq!(read_exactly(&mut bystander, 28), words_record(&[7, 1, 0, 0, 0, 0]), "{engine}");
            let taken = server_counter(&server, "messages") - asked;
            assert!(taken <= 3 + PEERS as u64, "{engine}: {taken} calls were taken");
        }
        gate.open();
        for peer in &mut peers {
            let mut left: Vec<_> = (1..=CALLS).map(|xid| words_record(&[xid, 1, 0, 0, 0, 0, 1])).collect();
            for _ in 0..CALLS {
                let reply = read_exactly(peer, 32);
                let at = left.iter().position(|expected| *expected == reply);
                left.swap_remove(
                    at.unwrap_or_else(|| panic!("{engine}: {reply:02x?} is no success, or the second one")),
                );
            }
        }
        assert_eq!(counter(&*service, "system_err"), 0, "{engine}");
    }
}

/// Asks for work of these kinds in turn, and sees each request answered once, in any order, as done.
fn work_is_done(stream: &mut (impl Read + Write), requests: u32, hows: &[u32], what: &str) {
    for id in 0..requests {
        let request = [16 - 4, hows[id as usize % hows.len()], 50, id];
        stream.write_all(&request.map(u32::to_be_bytes).concat()).unwrap();
    }
    let mut answered: Vec<u32> = (0..requests)
        .map(|_| {
            let reply = read_exactly(stream, 12);
            assert_eq!(&reply[..8], [0, 0, 0, 8, 0, 0, 0, 0], "{what}: length 8, done");
            u32::from_be_bytes(reply[8..].try_into().unwrap())
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, (0..requests).collect::<Vec<_>>(), "{what}");
}

#[test]
fn work_is_answered_once_each_in_any_order() {
    for engine in engines() {
        let service = Arc::new(Work::default());
        let server = start(engine, &service, &any_port(true)[..1]);
        let mut stream = connect(address(&server, 0));
        let hows = [work::HOW_INLINE, work::HOW_SLEEP, work::HOW_COMPUTE];
        work_is_done(&mut stream, 300, &hows, engine.name());

        stream.write_all(&[0, 0, 0, 1, 9]).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "a malformed request closes the connection");
        assert_eq!(counter(&*service, "malformed"), 1);
    }
}

#[test]
fn work_without_room_in_the_queue_is_done_all_the_same() {
    for engine in engines() {
        for queue_max in [0, 2] {
            let few = TaskOptions { threads_max: 1, queue_max, ..TaskOptions::default() };
            let builder = Server::builder().engine(engine).tasks(few);
            let server = builder.listen(any_port(true)[0].clone(), Arc::new(Work::default()), None).start().unwrap();
            let what = format!("{engine}, a queue of {queue_max}");
            work_is_done(&mut connect(address(&server, 0)), 200, &[work::HOW_SLEEP], &what);
        }
    }
}
