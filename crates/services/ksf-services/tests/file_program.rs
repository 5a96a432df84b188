//! Programs with state, on real sockets and both engines: a small file server. Its connections have tables of open files,
//! its writes are durable before their replies leave, its reads come from a range of a file or from a buffer, and a flush
//! goes on on its connection.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::engines;
use ksf::engine::EngineKind;
use ksf::files::{File, FileDone, FileOp, FileOutcome, FileRange, Files};
use ksf::framing::Framing;
use ksf::gates::{Gate, LogId};
use ksf::listener::ListenAddr;
use ksf::logged::{After, Logged, Mode as ModeOf};
use ksf::pool::Chunk;
use ksf::{Message, Order, Peer, Profile, Refused, Reply, Server, Service, Turn};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::{Answered, ProcError, Program, ProgramTable, RpcCall, RpcDeferred, RpcReply};
use ksf_test::rpc::{accepted, call, read_record, record, xid};
use ksf_test::stream::{connect, datagrams};
use ksf_test::{Folder, Random, pattern, wait_until};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};

const SHELF: u32 = 0x2000_0101;
const NULL: u32 = 0x2000_0103;

/// Name; answered with a handle, which is good on this connection.
const OPEN: u32 = 1;
/// Handle.
const CLOSE: u32 = 2;
/// Handle, offset, bytes; answered from a range of the file.
const READ: u32 = 3;
/// The same, by way of a buffer.
const READ_BUFFER: u32 = 4;
/// Handle, offset, data; answered when they are durable.
const WRITE: u32 = 5;
/// Handle; answered with the writes that this connection began with it.
const FLUSH: u32 = 6;

/// The file server. Whatever it answers waits for the writes that came before.
struct Shelf {
    programs: ProgramTable,
    folder: File,
    calls: Arc<AtomicU64>,
    /// Tables of connections that are open.
    tables: Arc<AtomicU64>,
}

struct ShelfShard {
    files: Files,
    log: LogId,
    /// The last write that was answered.
    last: u64,
    /// Writes of this turn.
    batch: Vec<FileOp>,
    /// Whether they are done, from the first that is not released.
    writes: VecDeque<bool>,
    /// What to do at the end of each operation that is no write.
    waiting: HashMap<u64, (RpcDeferred<Logged>, Wanted)>,
    tokens: u64,
}

enum Wanted {
    Handle,
    Data,
    Flush { handle: u32 },
}

/// What a call goes on with on its connection.
enum Resumed {
    Opened(Result<File, ProcError>),
    Read(Chunk),
    Flushed { handle: u32 },
}

struct OpenFile {
    file: File,
    writes: u32,
}

type Handles = Vec<Option<OpenFile>>;

fn open_file(table: &mut Handles, handle: u32) -> Result<&mut OpenFile, ProcError> {
    table.get_mut(handle as usize).and_then(Option::as_mut).ok_or(ProcError::GarbageArgs)
}

impl ShelfShard {
    /// Everything that was written so far.
    fn now(&self) -> Gate {
        Gate { log: self.log, number: self.last }
    }

    fn later<M>(&mut self, op: FileOp, wanted: Wanted, result_bytes: usize, reply: RpcReply<'_, M>) -> Answered
    where
        M: ModeOf<Later = Logged>,
    {
        let (answered, deferred) = reply.defer_for(result_bytes);
        self.tokens += 1;
        let token = u64::MAX - self.tokens;
        self.files.begin(op, token).unwrap();
        self.waiting.insert(token, (deferred, wanted));
        answered
    }

    fn read(&mut self, range: FileRange, reply: RpcReply<'_, impl ModeOf<Later = Logged>>) -> Answered {
        let into = self.files.buffer(range.bytes);
        let op = FileOp::read(&range.file, range.offset, range.bytes, into);
        self.later(op, Wanted::Data, range.bytes, reply)
    }

    fn answer(&mut self, asked: Asked, table: &mut Handles, reply: RpcReply<'_, Logged>) -> Answered {
        match asked {
            Asked::Open(op) => self.later(op, Wanted::Handle, 4, reply),
            Asked::Close { handle } => {
                table[handle as usize] = None;
                reply.after(self.now()).void()
            }
            Asked::Read { range, buffer: true } => self.read(range, reply),
            Asked::Read { range, .. } => {
                let bytes = range.bytes as u32;
                let sent = reply.after(self.now()).results_file(|out| out.put_u32(bytes), range.clone());
                sent.unwrap_or_else(|reply| self.read(range, reply))
            }
            Asked::Write(op) => {
                self.last += 1;
                self.batch.push(op);
                let number = self.last;
                reply.after(self.now()).results(|out| {
                    out.put_u64(number);
                    Ok(())
                })
            }
            Asked::Flush { handle, op } => self.later(op, Wanted::Flush { handle }, 4, reply),
        }
    }

    fn go_on(&mut self, resumed: Resumed, table: &mut Handles, reply: RpcReply<'_, Logged>) -> Answered {
        match resumed {
            Resumed::Opened(Err(error)) => reply.after(After::Nothing).error(error),
            Resumed::Opened(Ok(file)) => {
                table.push(Some(OpenFile { file, writes: 0 }));
                let handle = table.len() as u32 - 1;
                reply.after(After::Nothing).results(|out| {
                    out.put_u32(handle);
                    Ok(())
                })
            }
            Resumed::Read(data) => {
                let bytes = data.len() as u32;
                reply.after(self.now()).results_with(|out| out.put_u32(bytes), data)
            }
            Resumed::Flushed { handle } => {
                let writes = open_file(table, handle).map(|open| open.writes);
                reply.after(self.now()).results(|out| {
                    out.put_u32(writes?);
                    Ok(())
                })
            }
        }
    }
}

/// A call that can be carried out.
enum Asked {
    Open(FileOp),
    Close { handle: u32 },
    Read { range: FileRange, buffer: bool },
    Write(FileOp),
    Flush { handle: u32, op: FileOp },
}

impl Asked {
    fn parse(folder: &File, table: &mut Handles, call: &RpcCall<'_>) -> Result<Self, ProcError> {
        let mut args = XdrReader::new(call.args);
        if call.procedure == OPEN {
            let name = CString::new(args.opaque(255)?).map_err(|_| ProcError::GarbageArgs)?;
            return Ok(Self::Open(FileOp::open_beneath(folder, name, OFlags::RDWR, Mode::empty())));
        }
        let handle = args.u32()?;
        let open = open_file(table, handle)?;
        Ok(match call.procedure {
            CLOSE => Self::Close { handle },
            READ | READ_BUFFER => {
                let range = FileRange { file: open.file.clone(), offset: args.u64()?, bytes: args.u32()? as usize };
                Self::Read { range, buffer: call.procedure == READ_BUFFER }
            }
            WRITE => {
                open.writes += 1;
                let (offset, data) = (args.u64()?, args.opaque(1 << 20)?);
                Self::Write(FileOp::write_durably(&open.file, offset, call.keep(data)))
            }
            FLUSH => Self::Flush { handle, op: FileOp::data_sync(&open.file) },
            _ => return Err(ProcError::ProcUnavail),
        })
    }
}

impl Service for Shelf {
    type Shard = ShelfShard;
    type Conn = Handles;
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        let order = Order::Free;
        Profile { order, keeps_messages: true, turn_ends: true, ..Profile::new("shelf", Framing::RecordMark) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<ShelfShard> {
        let log = turn.open_log().map_err(std::io::Error::other)?;
        let (batch, writes, waiting) = (Vec::new(), VecDeque::new(), HashMap::new());
        Ok(ShelfShard { files: turn.files(), log, last: 0, batch, writes, waiting, tokens: 0 })
    }

    fn accept(&self, _: &mut ShelfShard, _: &Peer) -> Result<Handles, Refused> {
        self.tables.fetch_add(1, Ordering::SeqCst);
        Ok(Vec::new())
    }

    fn call(&self, shard: &mut ShelfShard, table: &mut Handles, message: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        self.programs.call(message, reply, |call, reply| {
            if call.program == NULL {
                return reply.after(After::Nothing).void();
            }
            self.calls.fetch_add(1, Ordering::SeqCst);
            match Asked::parse(&self.folder, table, call) {
                Ok(asked) => shard.answer(asked, table, reply),
                Err(error) => reply.after(shard.now()).error(error),
            }
        });
    }

    fn resume(
        &self,
        shard: &mut ShelfShard,
        table: &mut Handles,
        state: Box<dyn Any + Send>,
        reply: &mut Reply<'_, Logged>,
    ) {
        self.programs.resume(state, reply, |state, reply| shard.go_on(*state.downcast().unwrap(), table, reply));
    }

    fn turn_end(&self, shard: &mut ShelfShard, _: &mut Turn<'_>) {
        let first = shard.last + 1 - shard.batch.len() as u64;
        for (write, number) in shard.batch.drain(..).zip(first..) {
            shard.writes.push_back(false);
            shard.files.begin(write, number).unwrap();
        }
    }

    fn file_done(&self, shard: &mut ShelfShard, done: FileDone, turn: &mut Turn<'_>) {
        let Some((deferred, wanted)) = shard.waiting.remove(&done.token) else {
            done.bytes().unwrap();
            let released = turn.gates().released(shard.log);
            shard.writes[(done.token - released - 1) as usize] = true;
            let durable = shard.writes.iter().take_while(|done| **done).count();
            shard.writes.drain(..durable);
            return turn.release(shard.log, released + durable as u64);
        };
        let state = match (wanted, done.result, done.op) {
            (Wanted::Handle, Ok(FileOutcome::Opened(file)), _) => Resumed::Opened(Ok(file)),
            (Wanted::Handle, ..) => Resumed::Opened(Err(ProcError::GarbageArgs)),
            (Wanted::Data, Ok(_), FileOp::Read { into, .. }) => Resumed::Read(Chunk::from_buffer(into)),
            (Wanted::Flush { handle }, Ok(_), _) => Resumed::Flushed { handle },
            (_, result, op) => panic!("{op:?}: {result:?}"),
        };
        deferred.resume_in(turn, state);
    }

    fn close(&self, _: &mut ShelfShard, table: Handles) {
        self.tables.fetch_sub(1, Ordering::SeqCst);
        drop(table);
    }
}

struct World {
    server: Server,
    calls: Arc<AtomicU64>,
    tables: Arc<AtomicU64>,
    folder: Folder,
}

impl World {
    fn new(engine: EngineKind) -> Self {
        let folder = Folder::new();
        let dir = || File::from(std::fs::File::open(folder.path("")).unwrap());
        let (calls, tables) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut programs = ProgramTable::new();
        programs.register(Program::new("shelf", SHELF, 1..=1)).unwrap();
        programs.register(Program::new("null", NULL, 1..=1)).unwrap();
        let service = Shelf { programs, folder: dir(), calls: Arc::clone(&calls), tables: Arc::clone(&tables) };
        let service = Arc::new(service);
        let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        // One shard, so that the connections share its states.
        let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
        let builder = Server::builder().engine(engine).cpus(Some(cpus));
        let builder = builder.listen(ListenAddr::Tcp(any), Arc::clone(&service), None);
        let server = builder.listen(ListenAddr::Udp(any), service, None).start().unwrap();
        Self { server, calls, tables, folder }
    }

    fn address(&self, listener: usize) -> SocketAddr {
        match &self.server.listeners()[listener].addr {
            ListenAddr::Tcp(address) | ListenAddr::Udp(address) => *address,
            other => panic!("{other}"),
        }
    }

    /// Operations on files that were begun.
    fn file_ops(&self) -> u64 {
        self.server.counters().iter().find(|counter| counter.name == "file_ops").expect("the counter").value
    }

    fn connect(&self) -> Client {
        Client { stream: connect(self.address(0)), last: 0 }
    }
}

/// A client with many calls in flight.
struct Client {
    stream: TcpStream,
    last: u32,
}

impl Client {
    /// Sends a call, and returns its xid.
    fn send(&mut self, program: u32, procedure: u32, args: impl FnOnce(&mut Vec<u8>)) -> u32 {
        self.last += 1;
        let mut message = call(self.last, program, 1, procedure);
        args(&mut message);
        self.stream.write_all(&record(&message)).unwrap();
        self.last
    }

    /// The next reply: its xid, and what follows the header of one that is accepted.
    fn receive(&mut self) -> (u32, Vec<u8>) {
        let reply = read_record(&mut self.stream).unwrap().expect("a reply");
        let xid = xid(&reply);
        let header = accepted(xid, &[]);
        assert_eq!(reply[..header.len()], header);
        (xid, reply[header.len()..].to_vec())
    }

    fn ask(&mut self, program: u32, procedure: u32, args: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let sent = self.send(program, procedure, args);
        let (xid, reply) = self.receive();
        assert_eq!(xid, sent);
        reply
    }

    fn open(&mut self, name: &str) -> u32 {
        let reply = self.ask(SHELF, OPEN, |args| args.put_opaque(name.as_bytes()));
        assert_eq!((reply.len(), &reply[..4]), (8, &SUCCESS[..]));
        u32::from_be_bytes(reply[4..].try_into().unwrap())
    }

    fn assert_silent(&mut self) {
        self.stream.set_nonblocking(true).unwrap();
        assert_eq!(self.stream.read(&mut [0; 16]).unwrap_err().kind(), ErrorKind::WouldBlock);
        self.stream.set_nonblocking(false).unwrap();
    }
}

const SUCCESS: [u8; 4] = [0; 4];
const GARBAGE_ARGS: [u8; 4] = [0, 0, 0, 4];

fn read_args(handle: u32, offset: usize, bytes: usize) -> impl FnOnce(&mut Vec<u8>) {
    move |args| {
        args.put_u32(handle);
        args.put_u64(offset as u64);
        args.put_u32(bytes as u32);
    }
}

fn write_args(handle: u32, offset: usize, data: &[u8]) -> impl FnOnce(&mut Vec<u8>) {
    move |args| {
        args.put_u32(handle);
        args.put_u64(offset as u64);
        args.put_opaque(data);
    }
}

/// Status, length, data, and zeros up to a multiple of four.
fn with_data(data: &[u8]) -> Vec<u8> {
    let mut reply = SUCCESS.to_vec();
    reply.put_opaque(data);
    reply
}

#[test]
fn calls_of_all_kinds_in_flight_are_answered_with_what_the_files_have() {
    for engine in engines() {
        let world = World::new(engine);
        let content = pattern(3 << 20, 1);
        world.folder.write("full", &content);
        world.folder.write("empty", b"");
        let mut client = world.connect();
        let (full, empty) = (client.open("full"), client.open("empty"));
        let mut random = Random::new(7);
        let (mut expected, mut model, mut writes) = (HashMap::new(), Vec::new(), 0_u32);
        for round in 0..300_usize {
            let bytes = [0, 1, 2, 3, 5, 4096, 70_001][random.below(7) as usize];
            let at = random.below(1 << 20) as usize;
            let (xid, reply) = match round % 4 {
                0 => {
                    let data = &content[at..][..bytes];
                    let xid = client.send(SHELF, WRITE, write_args(empty, model.len(), data));
                    model.extend_from_slice(data);
                    writes += 1;
                    (xid, [&SUCCESS[..], &u64::from(writes).to_be_bytes()].concat())
                }
                1 => (client.send(SHELF, READ, read_args(full, at, bytes)), with_data(&content[at..][..bytes])),
                2 => (client.send(SHELF, READ_BUFFER, read_args(full, at, bytes)), with_data(&content[at..][..bytes])),
                _ => (client.send(NULL, 0, |_| ()), SUCCESS.to_vec()),
            };
            expected.insert(xid, reply);
            if round % 40 == 39 {
                for _ in 0..expected.len() {
                    let (xid, reply) = client.receive();
                    assert!(expected.remove(&xid) == Some(reply), "{engine}: call {xid}");
                }
            }
        }
        for _ in 0..expected.len() {
            let (xid, reply) = client.receive();
            assert!(expected.remove(&xid) == Some(reply), "{engine}: call {xid}");
        }
        assert!(client.ask(SHELF, READ, read_args(empty, 0, model.len())) == with_data(&model), "{engine}");
        assert!(std::fs::read(world.folder.path("empty")).unwrap() == model, "{engine}");
        // The flush goes on with what the connection's table says.
        let flushed = client.ask(SHELF, FLUSH, |args| args.put_u32(empty));
        assert_eq!(flushed, [SUCCESS, writes.to_be_bytes()].concat(), "{engine}");
    }
}

#[test]
fn states_belong_to_their_connection_and_end_with_it() {
    for engine in engines() {
        let world = World::new(engine);
        world.folder.write("file", b"content");
        let (mut one, mut other) = (world.connect(), world.connect());
        let handle = one.open("file");
        assert_eq!(one.ask(SHELF, READ, read_args(handle, 0, 7)), with_data(b"content"), "{engine}");
        assert_eq!(other.ask(SHELF, READ, read_args(handle, 0, 7)), GARBAGE_ARGS, "{engine}: it has opened nothing");
        assert_eq!(one.ask(SHELF, CLOSE, |args| args.put_u32(handle)), SUCCESS);
        assert_eq!(one.ask(SHELF, READ, read_args(handle, 0, 7)), GARBAGE_ARGS, "{engine}: it is closed");
        // One of them is that of the datagram socket.
        assert_eq!(world.tables.load(Ordering::SeqCst), 3, "{engine}");
        drop((one, other));
        wait_until("the tables are closed", || world.tables.load(Ordering::SeqCst) == 1);
        let tables = Arc::clone(&world.tables);
        world.server.drain().unwrap();
        assert_eq!(tables.load(Ordering::SeqCst), 0, "{engine}");
    }
}

/// The write into a full pipe is not done; what was written, read or refused behind it waits, other connections do not. A
/// range of a file could still be on its way when a connection is found silent: it must not even have been asked for.
#[test]
fn nothing_passes_the_gate() {
    for engine in engines() {
        let world = World::new(engine);
        world.folder.write("file", b"before");
        mknodat(CWD, world.folder.path("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let pipe = std::fs::File::options().read(true).write(true).open(world.folder.path("pipe")).unwrap();
        rustix::io::ioctl_fionbio(&pipe, true).unwrap();
        let mut filled = 0;
        while let Ok(bytes) = (&pipe).write(&[0; 4096]) {
            filled += bytes;
        }
        rustix::io::ioctl_fionbio(&pipe, false).unwrap();

        let (mut writer, mut other) = (world.connect(), world.connect());
        let (slow, file) = (writer.open("pipe"), writer.open("file"));
        let theirs = other.open("file");
        let calls = world.calls.load(Ordering::SeqCst);
        assert_eq!(world.file_ops(), 3, "{engine}: opened");
        let mut expected = HashMap::new();
        let number = |number: u64| [&SUCCESS[..], &number.to_be_bytes()].concat();
        expected.insert(writer.send(SHELF, WRITE, write_args(slow, 0, b"slow")), number(1));
        expected.insert(writer.send(SHELF, WRITE, write_args(file, 0, b"behind")), number(2));
        expected.insert(writer.send(SHELF, READ, read_args(file, 0, 6)), with_data(b"behind"));
        expected.insert(writer.send(SHELF, READ, read_args(99, 0, 6)), GARBAGE_ARGS.to_vec());
        wait_until("the calls are in work", || world.calls.load(Ordering::SeqCst) == calls + 4);
        let behind = || {
            let mut bytes = [0; 6];
            std::fs::File::open(world.folder.path("file")).unwrap().read_exact_at(&mut bytes, 0).unwrap();
            bytes == *b"behind"
        };
        wait_until("the second write is done", behind);
        // A turn of the shard, which has sent all that it may.
        assert_eq!(other.ask(NULL, 0, |_| ()), SUCCESS, "{engine}");
        assert_eq!(world.file_ops(), 5, "{engine}: opened and written");
        writer.assert_silent();
        // What another connection sees of it waits, too.
        let seen = other.send(SHELF, READ, read_args(theirs, 0, 6));
        wait_until("it is in work", || world.calls.load(Ordering::SeqCst) == calls + 5);
        assert_eq!(world.connect().ask(NULL, 0, |_| ()), SUCCESS, "{engine}");
        assert_eq!(world.file_ops(), 5, "{engine}: a range was read before its gate opened");
        other.assert_silent();

        let mut drained = vec![0; filled + 4];
        (&pipe).read_exact(&mut drained).unwrap();
        assert_eq!(drained[filled..], *b"slow", "{engine}");
        for _ in 0..4 {
            let (xid, reply) = writer.receive();
            assert_eq!(expected.remove(&xid), Some(reply), "{engine}");
        }
        assert_eq!(other.receive(), (seen, with_data(b"behind")), "{engine}");
        assert_eq!(world.file_ops(), 7, "{engine}: both ranges were read");
    }
}

/// Where no file can be sent, the reply comes back, and the program reads into a buffer.
#[test]
fn datagrams_are_answered_from_a_buffer() {
    for engine in engines() {
        let world = World::new(engine);
        world.folder.write("file", b"content");
        let socket = datagrams(world.address(1));
        let mut buffer = [0; 256];
        let mut ask = |number, procedure, args: &dyn Fn(&mut Vec<u8>)| {
            let mut message = call(number, SHELF, 1, procedure);
            args(&mut message);
            socket.send(&message).unwrap();
            let bytes = socket.recv(&mut buffer).unwrap();
            buffer[..bytes].to_vec()
        };
        let opened = ask(1, OPEN, &|args| args.put_opaque(b"file"));
        assert_eq!(opened, accepted(1, &[0, 0]), "{engine}");
        let read = ask(2, READ, &|args| read_args(0, 1, 5)(args));
        assert_eq!(read, [accepted(2, &[]), with_data(b"onten")].concat(), "{engine}");
    }
}
