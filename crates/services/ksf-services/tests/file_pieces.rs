//! Results of several ranges of a file, on real sockets and both engines: they are padded, they pass no gate, and where
//! files cannot be sent the call is answered by other means.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::common::engines;
use ksf::engine::EngineKind;
use ksf::files::{File, FileRange, NoFileReplies};
use ksf::framing::Framing;
use ksf::gates::{Gate, LogId};
use ksf::listener::ListenAddr;
use ksf::logged::{After, Logged};
use ksf::{Message, Order, Peer, Profile, Refused, Releaser, Reply, Server, Service, Turn, Unlogged};
use ksf_proto::xdr::XdrWrite;
use ksf_services::rpc::{Answered, ProcError, Program, ProgramTable, ResultPieces, RpcCall, RpcDeferred, RpcReply};
use ksf_test::rpc::{accepted, call, read_record, record};
use ksf_test::stream::{connect, datagrams};
use ksf_test::{Folder, pattern};

const LOGGED: u32 = 0x2000_0201;
const AT_TURN_END: u32 = 0x2000_0202;
const ELSEWHERE: u32 = 0x2000_0203;

/// Nothing in the reply, which waits for nothing.
const PING: u32 = 0;
/// Both ranges; the reply waits for record 1.
const RANGES: u32 = 1;

/// Offsets and lengths that need one, two and three bytes of padding, also of a piece that is copied and of one that is not.
const PAIRS: [[(u64, usize); 2]; 3] = [[(1, 5), (9, 70_002)], [(3, 8_191), (0, 2)], [(0, 1), (77, 3)]];
/// What stands between the ranges.
const BETWEEN: u32 = 0x0102_0304;
/// The results where files cannot be sent.
const REFUSED: u32 = 0x0506_0708;

fn add_ranges(file: &File, pair: [(u64, usize); 2], pieces: &mut ResultPieces<'_, '_>) -> Result<(), NoFileReplies> {
    let range = |(offset, bytes)| FileRange { file: file.clone(), offset, bytes };
    pieces.opaque_file(range(pair[0]))?;
    pieces.write(|out| out.put_u32(BETWEEN));
    pieces.opaque_file(range(pair[1]))
}

/// The pair that a call asks for by its procedure, from [`RANGES`] on.
fn pair_of(call: &RpcCall<'_>) -> Option<[(u64, usize); 2]> {
    PAIRS.get(call.procedure.checked_sub(RANGES)? as usize).copied()
}

/// Answers at once, behind a gate that the test opens.
struct Gated {
    programs: ProgramTable,
    file: File,
    log: Arc<OnceLock<(LogId, Releaser)>>,
    calls: Arc<AtomicU64>,
}

impl Gated {
    fn answer(&self, call: &RpcCall<'_>, reply: RpcReply<'_, Logged>) -> Answered {
        let Some(pair) = pair_of(call) else { return reply.after(After::Nothing).void() };
        self.calls.fetch_add(1, Ordering::SeqCst);
        let gate = Gate { log: self.log.get().unwrap().0, number: 1 };
        let answered = reply.after(gate).results_pieces(|pieces| add_ranges(&self.file, pair, pieces));
        answered.unwrap_or_else(|reply| reply.results(refused))
    }
}

impl Service for Gated {
    type Shard = ();
    type Conn = ();
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        Profile { order: Order::Free, ..Profile::new("gated", Framing::RecordMark) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<()> {
        let log = turn.open_log().map_err(std::io::Error::other)?;
        assert!(self.log.set((log, turn.releaser())).is_ok(), "there is one shard");
        Ok(())
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        self.programs.call(message, reply, |call, reply| self.answer(call, reply));
    }
}

/// Answers at the end of the turn, or from a thread that may block.
struct Later {
    programs: ProgramTable,
    file: File,
}

type AtTurnEnd = VecDeque<(RpcDeferred, [(u64, usize); 2])>;

fn refused(out: &mut Vec<u8>) -> Result<(), ProcError> {
    out.put_u32(REFUSED);
    Ok(())
}

impl Later {
    fn answer(&self, at_turn_end: &mut AtTurnEnd, call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
        let Some(pair) = pair_of(call) else { return reply.void() };
        let bytes = pair[0].1 + pair[1].1;
        if call.program == AT_TURN_END {
            let (answered, deferred) = reply.defer_for(bytes);
            at_turn_end.push_back((deferred, pair));
            return answered;
        }
        let (file, shard) = (self.file.clone(), std::thread::current().id());
        reply.block(bytes, move |deferred| {
            assert_ne!(std::thread::current().id(), shard);
            if let Err(deferred) = deferred.results_pieces(|pieces| add_ranges(&file, pair, pieces)) {
                deferred.results(refused);
            }
        })
    }
}

impl Service for Later {
    type Shard = AtTurnEnd;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile { order: Order::Free, turn_ends: true, ..Profile::new("later", Framing::RecordMark) }
    }

    fn start(&self, _: &mut Turn<'_>) -> std::io::Result<AtTurnEnd> {
        Ok(VecDeque::new())
    }

    fn accept(&self, _: &mut AtTurnEnd, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, at_turn_end: &mut AtTurnEnd, (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.programs.call(message, reply, |call, reply| self.answer(at_turn_end, call, reply));
    }

    fn turn_end(&self, at_turn_end: &mut AtTurnEnd, turn: &mut Turn<'_>) {
        for (deferred, pair) in at_turn_end.drain(..) {
            if let Err(deferred) = deferred.results_pieces_in(turn, |pieces| add_ranges(&self.file, pair, pieces)) {
                deferred.results_in(turn, refused);
            }
        }
    }
}

struct World {
    server: Server,
    log: Arc<OnceLock<(LogId, Releaser)>>,
    calls: Arc<AtomicU64>,
    content: Vec<u8>,
    _folder: Folder,
}

impl World {
    fn new(engine: EngineKind) -> Self {
        let (folder, content) = (Folder::new(), pattern(100_000, 1));
        folder.write("file", &content);
        let file = || File::from(std::fs::File::open(folder.path("file")).unwrap());
        let (log, calls) = (Arc::new(OnceLock::new()), Arc::new(AtomicU64::new(0)));
        let programs = |numbers: &[u32]| {
            let mut programs = ProgramTable::new();
            numbers.iter().for_each(|number| programs.register(Program::new("test", *number, 1..=1)).unwrap());
            programs
        };
        let gated =
            Gated { programs: programs(&[LOGGED]), file: file(), log: Arc::clone(&log), calls: Arc::clone(&calls) };
        let later = Later { programs: programs(&[AT_TURN_END, ELSEWHERE]), file: file() };
        let (gated, later) = (Arc::new(gated), Arc::new(later));
        let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let builder = Server::builder().engine(engine).cpus(Some(cpus));
        let builder = builder.listen(ListenAddr::Tcp(any), Arc::clone(&gated), None);
        let builder = builder.listen(ListenAddr::Tcp(any), Arc::clone(&later), None);
        let builder = builder.listen(ListenAddr::Udp(any), gated, None);
        let server = builder.listen(ListenAddr::Udp(any), later, None).start().unwrap();
        Self { server, log, calls, content, _folder: folder }
    }

    fn stream(&self, program: u32) -> TcpStream {
        connect(self.address(usize::from(program != LOGGED)))
    }

    fn datagrams(&self, program: u32) -> UdpSocket {
        datagrams(self.address(2 + usize::from(program != LOGGED)))
    }

    fn address(&self, listener: usize) -> SocketAddr {
        match &self.server.listeners()[listener].addr {
            ListenAddr::Tcp(address) | ListenAddr::Udp(address) => *address,
            other => panic!("{other}"),
        }
    }

    fn release(&self) {
        let (log, releaser) = self.log.get().unwrap();
        releaser.release(*log, 1);
    }

    /// The whole reply with the ranges.
    fn ranges(&self, xid: u32, pair: [(u64, usize); 2]) -> Vec<u8> {
        let data = |(offset, bytes): (u64, usize)| &self.content[offset as usize..][..bytes];
        let mut reply = accepted(xid, &[0]);
        reply.put_opaque(data(pair[0]));
        reply.put_u32(BETWEEN);
        reply.put_opaque(data(pair[1]));
        reply
    }
}

fn send(stream: &mut TcpStream, xid: u32, program: u32, procedure: u32) {
    stream.write_all(&record(&call(xid, program, 1, procedure))).unwrap();
}

fn receive(stream: &mut TcpStream) -> Vec<u8> {
    read_record(stream).unwrap().expect("a reply")
}

#[test]
fn ranges_of_a_file_wait_for_the_gate_and_are_padded() {
    for engine in engines() {
        let world = World::new(engine);
        let mut stream = world.stream(LOGGED);
        for (index, _) in PAIRS.iter().enumerate() {
            send(&mut stream, index as u32, LOGGED, RANGES + index as u32);
        }
        ksf_test::wait_until("the calls are answered", || world.calls.load(Ordering::SeqCst) == PAIRS.len() as u64);
        // A later turn of the shard, which would have begun to read them before it.
        let mut other = world.stream(AT_TURN_END);
        send(&mut other, 99, AT_TURN_END, PING);
        assert_eq!(receive(&mut other), accepted(99, &[0]), "{engine}");
        let counters = world.server.counters();
        let file_ops = counters.iter().find(|counter| counter.name == "file_ops").expect("the counter");
        assert_eq!(file_ops.value, 0, "{engine}: a range was read before its gate opened");
        // The shard reads ranges of the file that it is asked for now, and sends them: they wait for nothing.
        for (index, pair) in PAIRS.into_iter().enumerate() {
            send(&mut other, index as u32, AT_TURN_END, RANGES + index as u32);
            assert!(receive(&mut other) == world.ranges(index as u32, pair), "{engine}: {pair:?}");
        }
        stream.set_nonblocking(true).unwrap();
        assert_eq!(stream.read(&mut [0; 16]).unwrap_err().kind(), ErrorKind::WouldBlock, "{engine}");
        stream.set_nonblocking(false).unwrap();

        world.release();
        for (index, pair) in PAIRS.into_iter().enumerate() {
            assert!(receive(&mut stream) == world.ranges(index as u32, pair), "{engine}: {pair:?}");
        }
    }
}

#[test]
fn ranges_of_a_file_answer_a_deferred_call_at_the_end_of_its_turn_and_from_other_threads() {
    for engine in engines() {
        let world = World::new(engine);
        let mut stream = world.stream(AT_TURN_END);
        for (program, (index, pair)) in [AT_TURN_END, ELSEWHERE]
            .into_iter()
            .flat_map(|program| PAIRS.into_iter().enumerate().map(move |i| (program, i)))
        {
            send(&mut stream, index as u32, program, RANGES + index as u32);
            let reply = receive(&mut stream);
            assert!(reply == world.ranges(index as u32, pair), "{engine}: {pair:?} of program {program:#x}");
        }
    }
}

/// No range of a file leaves in a datagram. The call can still be answered, once, and nothing of the first try is left.
#[test]
fn a_datagram_refuses_ranges_of_a_file_and_the_call_is_answered_otherwise() {
    for engine in engines() {
        let world = World::new(engine);
        world.release();
        let mut buffer = [0; 256];
        for (xid, program) in [LOGGED, AT_TURN_END, ELSEWHERE, LOGGED, AT_TURN_END, ELSEWHERE].into_iter().enumerate() {
            let (xid, socket) = (xid as u32, world.datagrams(program));
            for (xid, procedure, results) in [(xid, RANGES, &[0, REFUSED][..]), (xid + 100, PING, &[0])] {
                socket.send(&call(xid, program, 1, procedure)).unwrap();
                let bytes = socket.recv(&mut buffer).unwrap();
                assert_eq!(buffer[..bytes], accepted(xid, results), "{engine}: program {program:#x}");
            }
        }
    }
}
