//! What the tests of services on workers share.

pub(crate) mod clients;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use ksf::adopt::Adopter;
use ksf::deferred::Deferred;
use ksf::engine::EngineKind;
use ksf::files::{FileRange, NoFileReplies};
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::pool::Chunk;
use ksf::{Message, Order, Peer, Pieces, Profile, Refused, Reply, Server, Service, WorkerService};

use ksf_mux::ConnectionId;
pub(crate) use ksf_test::{PATIENCE, own_network, wait_until};

/// Length of the long answers of [`Scripted`].
pub(crate) const LONG_BYTES: usize = 40_000;

/// A message of the framing that [`Scripted`] has.
pub(crate) fn frame(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_be_bytes()[..], body].concat()
}

pub(crate) fn read_frame(stream: &mut impl Read) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut body = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut body).unwrap();
    body
}

/// The connection ends, orderly or not, and nothing comes before that.
pub(crate) fn reads_end(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => assert!(rest.is_empty(), "{rest:?}"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

/// A message of KCM's tests: its length in network order, then a letter all through.
pub(crate) fn message(bytes: usize, letter: u8) -> Vec<u8> {
    let mut message = vec![letter; bytes];
    message[..4].copy_from_slice(&u32::try_from(bytes).unwrap().to_be_bytes());
    message
}

/// Both ends of a connection: the one to be attached, and the peer's.
pub(crate) fn connection(receive_buffer: Option<usize>) -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    if let Some(bytes) = receive_buffer {
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, bytes).unwrap();
    }
    let (far, near) = ksf_test::stream::pair(&listener);
    (near.into(), far)
}

/// An attached connection: `near` is what the test keeps of the attached end, `far` is the peer's.
pub(crate) struct Tcp<Near = ()> {
    pub(crate) near: Near,
    pub(crate) far: TcpStream,
    pub(crate) id: ConnectionId,
}

impl<Near> Tcp<Near> {
    pub(crate) fn put(&self, bytes: usize, letter: u8) {
        (&self.far).write_all(&message(bytes, letter)).unwrap();
    }

    /// How much the peer receives, for which it waits.
    pub(crate) fn gets(&self) -> String {
        let mut buffer = [0; 4096];
        self.far.set_nonblocking(false).unwrap();
        (&self.far).read(&mut buffer).unwrap().to_string()
    }

    pub(crate) fn gets_bytes(&self, count: usize) -> Vec<u8> {
        self.far.set_nonblocking(false).unwrap();
        ksf_test::stream::read_exactly(&mut &self.far, count)
    }

    /// What the peer has received, now.
    pub(crate) fn has(&self) -> String {
        let mut buffer = [0; 4096];
        self.far.set_nonblocking(true).unwrap();
        match (&self.far).read(&mut buffer) {
            Ok(bytes) => bytes.to_string(),
            Err(error) if error.kind() == ErrorKind::WouldBlock => "nothing".into(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Does what the first byte of a message says.
pub(crate) struct Scripted {
    pub(crate) order: Order,
    /// Where `b` waits for others.
    pub(crate) together: Arc<Barrier>,
    pub(crate) open: AtomicUsize,
    pub(crate) calls: AtomicUsize,
    kept: Mutex<Vec<Deferred>>,
}

impl Scripted {
    pub(crate) fn new(order: Order, together: usize) -> Arc<Self> {
        let (open, calls) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(Self { order, together: Arc::new(Barrier::new(together)), open, calls, kept: Mutex::default() })
    }
}

fn add_pieces(message: &[u8], with_file: bool, pieces: &mut Pieces<'_>) -> Result<(), NoFileReplies> {
    pieces.bytes(message);
    pieces.chunk(Chunk::from_vec(vec![b'c'; LONG_BYTES]));
    if with_file {
        let file = std::fs::File::open("/dev/null").unwrap().into();
        pieces.file(FileRange { file, offset: 0, bytes: 10 })?;
    }
    pieces.write(|out| out.extend_from_slice(message));
    pieces.owned(vec![b'o'; LONG_BYTES]);
    Ok(())
}

/// What [`Scripted`] answers in pieces.
pub(crate) fn pieces_of(message: &[u8]) -> Vec<u8> {
    [message, &[b'c'; LONG_BYTES], message, &[b'o'; LONG_BYTES]].concat()
}

impl Service for Scripted {
    ksf::stateless!(shard);
    type Conn = ();

    fn profile(&self) -> Profile<'_> {
        Profile { order: self.order, ..Profile::new("scripted", Framing::LengthPrefix(LengthPrefix::big_endian(4))) }
    }

    fn fork(&self, (): &()) -> Option<()> {
        self.open.fetch_add(1, Ordering::SeqCst);
        Some(())
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
        self.open.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn close(&self, (): &mut (), (): ()) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        let calls = self.calls.fetch_add(1, Ordering::SeqCst);
        let bytes = message.bytes().to_vec();
        match bytes.first() {
            Some(b'e') => reply.bytes(&bytes),
            // Answered by another thread, before or after this call returns.
            Some(b'd') => {
                let deferred = reply.defer();
                let late = thread::spawn(move || deferred.reply(bytes));
                if message.bytes().get(1) == Some(&b'w') {
                    late.join().unwrap();
                }
            }
            // A long answer: at once; later, as announced; and later without a word, when the next `a` comes.
            Some(b'g') => reply.bytes(&[b'g'; LONG_BYTES]),
            Some(b'G') => {
                let deferred = reply.defer_for(LONG_BYTES);
                thread::spawn(move || deferred.reply(vec![b'g'; LONG_BYTES]));
            }
            // An answer of several pieces, at once and from another thread. There is no shard to read a file here.
            Some(b'm') => {
                assert_eq!(reply.pieces(|pieces| add_pieces(&bytes, true, pieces)), Err(NoFileReplies));
                assert_eq!(reply.pieces(|pieces| add_pieces(&bytes, false, pieces)), Ok(()));
            }
            Some(b'M') => {
                let deferred = reply.defer_for(LONG_BYTES);
                thread::spawn(move || {
                    let owed = deferred.reply_pieces(|pieces| add_pieces(&bytes, true, pieces)).unwrap_err();
                    owed.reply_pieces(|pieces| add_pieces(&bytes, false, pieces)).unwrap();
                });
            }
            Some(b'u') => self.kept.lock().unwrap().push(reply.defer()),
            Some(b'a') => {
                let kept = std::mem::take(&mut *self.kept.lock().unwrap());
                reply.bytes(kept.len().to_string().as_bytes());
                kept.into_iter().for_each(|deferred| deferred.reply(vec![b'g'; LONG_BYTES]));
            }
            Some(b'2') => {
                let (one, two) = (reply.defer(), reply.defer());
                thread::spawn(move || {
                    two.reply(b"second right".to_vec());
                    one.reply(b"first right".to_vec());
                });
            }
            Some(b'f') => drop(reply.defer()),
            Some(b'b') => {
                self.together.wait();
                reply.bytes(b"together");
            }
            // Work for more than a turn.
            Some(b'l') => thread::sleep(Duration::from_millis(2)),
            Some(b'n') => reply.bytes(format!("{calls}").as_bytes()),
            Some(b'c') => {
                reply.bytes(b"last");
                reply.close();
            }
            Some(b'p') => panic!("as the test asked for"),
            // Panics, and is answered all the same: now, and when the test is there.
            Some(b'q') => {
                let (now, late) = (reply.defer(), reply.defer());
                now.reply(b"too early".to_vec());
                let together = Arc::clone(&self.together);
                thread::spawn(move || {
                    together.wait();
                    late.reply(b"too late".to_vec());
                    together.wait();
                });
                panic!("as the test asked for");
            }
            _ => {}
        }
    }
}

pub(crate) struct Running<S = Scripted> {
    pub(crate) server: Server,
    addr: SocketAddr,
    pub(crate) service: Arc<S>,
}

impl<S: WorkerService> Running<S> {
    /// Serves on loopback; `adopter` gets the connections.
    pub(crate) fn start(service: Arc<S>, adopter: Arc<dyn Adopter>, limits: Limits) -> Self {
        let addr = ListenAddr::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)));
        let builder = Server::builder().engine(EngineKind::Epoll).limits(limits);
        let server = builder.listen(addr, Arc::clone(&service), None).adopt(adopter).start().unwrap();
        let ListenAddr::Tcp(addr) = server.listeners()[0].addr else { panic!("a TCP listener") };
        Self { server, addr, service }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        ksf_test::stream::connect(self.addr)
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.server.counters().into_iter().find(|counter| counter.name == name).unwrap().value
    }

    /// Waits until a counter has this value: the peer may know of an end before it is counted.
    pub(crate) fn counts(&self, name: &str, value: u64) {
        let is = std::fmt::from_fn(|f| write!(f, "{name} is {}, not {value}", self.counter(name)));
        wait_until(is, || self.counter(name) == value);
    }
}

/// A service that asks somebody else before it answers; it may not say so.
pub(crate) struct Asks {
    pub(crate) framing: Framing,
    pub(crate) needs_shards: bool,
}

impl Service for Asks {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { needs_shards: self.needs_shards, ..Profile::new("asks", self.framing) }
    }

    fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, reply: &mut Reply<'_>) {
        let dialed = reply.dial(SocketAddr::from(([127, 0, 0, 1], 9)), true);
        reply.bytes(format!("{dialed:?}").as_bytes());
    }
}

/// A place in [`Awkward`] outside of its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Accept,
    Fork,
    Close,
}

/// Returns each message. Panics once, or refuses connections, where the test asks for it.
pub(crate) struct Awkward {
    framing: Framing,
    pub(crate) refuses: AtomicBool,
    pub(crate) panics: Mutex<Option<Place>>,
    /// States of connections that were not closed.
    pub(crate) open: AtomicUsize,
}

impl Awkward {
    pub(crate) fn new(framing: Framing) -> Arc<Self> {
        Arc::new(Self { framing, refuses: AtomicBool::new(false), panics: Mutex::default(), open: AtomicUsize::new(0) })
    }

    fn pass(&self, place: Place) {
        let asked = self.panics.lock().unwrap().take_if(|next| *next == place);
        assert!(asked.is_none(), "as the test asked for");
    }
}

impl Service for Awkward {
    ksf::stateless!(shard);
    type Conn = ();

    fn profile(&self) -> Profile<'_> {
        Profile { order: Order::Free, ..Profile::new("awkward", self.framing) }
    }

    fn fork(&self, (): &()) -> Option<()> {
        self.pass(Place::Fork);
        self.open.fetch_add(1, Ordering::SeqCst);
        Some(())
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
        self.pass(Place::Accept);
        if self.refuses.load(Ordering::SeqCst) {
            return Err(Refused);
        }
        self.open.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn close(&self, (): &mut (), (): ()) {
        self.open.fetch_sub(1, Ordering::SeqCst);
        self.pass(Place::Close);
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.bytes(message.bytes());
    }
}
