//! The service under simulation: does what requests say, and leaves deferred answers to the world.

use std::any::Any;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ksf::deferred::Deferred;
use ksf::error::FramingError;
use ksf::files::{File, FileRange, NoFileReplies};
use ksf::framing::{Frame, Framing, LengthPrefix};
use ksf::gates::{Gate, LogId};
use ksf::limits::Limits;
use ksf::outgoing::{HangUp, Upstream};
use ksf::pool::Chunk;
use ksf::service::SessionState;
use ksf::{Message, Order, Peer, Pieces, Profile, Refused, Reply, Service, Turn};

use crate::ideal::{encode, payload};
use crate::script::{ServiceAction, SimRequest};

/// An answer that "another thread" will give.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) deferred: Deferred,
    pub(crate) answer: Late,
}

#[derive(Debug)]
pub(crate) enum Late {
    Bytes(Vec<u8>),
    Chunk(Chunk),
    /// The service goes on with the request.
    Resume(SimRequest),
    Nothing,
    Forgotten,
}

impl Pending {
    /// Gives the answer: it is in the mailbox now.
    pub(crate) fn answer(self) {
        match self.answer {
            Late::Bytes(body) if body.len() % 4 == 1 => {
                let sent = self.deferred.reply_pieces(|pieces| in_pieces(&body, None, pieces));
                assert!(sent.is_ok(), "there is no range of a file");
            }
            Late::Bytes(body) => self.deferred.reply(body),
            Late::Chunk(body) => self.deferred.reply_chunk(body),
            Late::Resume(request) => self.deferred.resume(request),
            Late::Nothing => self.deferred.no_reply(),
            Late::Forgotten => drop(self.deferred),
        }
    }
}

/// Attempts to get an answer of a backend; then the service gives it itself.
const ATTEMPTS_MAX: u32 = 3;

/// A connection's state.
pub(crate) struct Client {
    handed: Handed,
    asking: Option<Asking>,
    /// Bytes that are kept of the peer.
    kept: usize,
    /// The service panicked.
    panicked: bool,
}

/// A request that is with a backend.
struct Asking {
    request: SimRequest,
    attempts: u32,
    answer: Vec<u8>,
}

/// Messages handed over on one connection; shared with the world, which compares them with what the peer sent.
pub(crate) type Handed = Arc<Mutex<Vec<Vec<u8>>>>;

/// A file whose bytes the world gives when a connection wants them.
pub(crate) struct Disk {
    /// Any file: nobody reads it.
    file: File,
    pub(crate) bytes: Mutex<Vec<u8>>,
}

impl Disk {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { file: std::fs::File::open("/dev/null")?.into(), bytes: Mutex::default() })
    }

    fn store(&self, body: &[u8]) -> FileRange {
        let mut bytes = lock(&self.bytes);
        let offset = bytes.len() as u64;
        bytes.extend_from_slice(body);
        FileRange { file: self.file.clone(), offset, bytes: body.len() }
    }
}

/// Adds a body in five pieces of different kinds.
fn in_pieces(body: &[u8], disk: Option<&Disk>, pieces: &mut Pieces<'_>) -> Result<(), NoFileReplies> {
    for (number, part) in body.chunks(body.len() / 5 + 1).enumerate() {
        match (number, disk) {
            (0, _) => pieces.write(|out| out.extend_from_slice(part)),
            (1, _) => pieces.chunk(Chunk::from_vec(part.to_vec())),
            (2 | 4, Some(disk)) => pieces.file(disk.store(part))?,
            (3, _) => pieces.owned(part.to_vec()),
            _ => pieces.bytes(part),
        }
    }
    Ok(())
}

pub(crate) struct Scripted {
    pub(crate) framing: Framing,
    /// The service cuts the stream itself, as `framing` says.
    pub(crate) custom: bool,
    pub(crate) order: Order,
    pub(crate) keeps: bool,
    /// Where the bodies of some replies lie.
    pub(crate) disk: Option<Disk>,
    /// What replies wait for, in worlds that have a log.
    pub(crate) log: Option<LogId>,
    pub(crate) records: Mutex<Records>,
    pub(crate) called_after_panic: Mutex<bool>,
    /// The record of the connection that is accepted next.
    pub(crate) next: Mutex<Handed>,
    pub(crate) pending: Mutex<Vec<Pending>>,
    /// Connections accepted and not closed yet.
    pub(crate) open: Mutex<usize>,
    /// Bytes that are kept of all peers.
    pub(crate) kept_bytes: Mutex<usize>,
}

/// The service's log, which the world makes durable when it likes.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// The last one that was written.
    pub(crate) last: u64,
    /// What must be durable before replies to a request may leave, by peer and number.
    pub(crate) due: HashMap<(u32, u32), u64>,
    /// The service panics at the end of the next turn.
    pub(crate) panics: bool,
}

/// A panic without the message on standard error, of which thousands would be written.
fn panic_quietly() -> ! {
    resume_unwind(Box::new("the world wants it"))
}

impl Client {
    fn panic(&mut self) -> ! {
        self.panicked = true;
        panic_quietly()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scripted {
    fn note_call(&self, client: &Client) {
        *lock(&self.called_after_panic) |= client.panicked;
    }

    /// Keeps a message of the peer, if there is room for it, and forgets those before now and then.
    fn keep(&self, client: &mut Client, bytes: usize, room: usize) {
        let before = client.kept;
        client.kept = match bytes % 2 {
            0 => 0,
            _ if bytes <= room => before + bytes,
            _ => before,
        };
        let mut kept = lock(&self.kept_bytes);
        *kept = *kept - before + client.kept;
    }

    /// Holds the replies to this request until its record is durable, or the last one, if it only looks.
    fn hold_for_log(&self, request: &SimRequest, reply: &mut Reply<'_>) {
        let Some(log) = self.log else { return };
        let mut records = lock(&self.records);
        records.last += u64::from(request.action != ServiceAction::See);
        let number = records.last;
        records.due.insert((request.peer, request.number), number);
        reply.gate(Gate { log, number });
    }

    /// A reply body as the service must write it: with the header, where the framing leaves that to the service.
    fn wire(&self, body: Vec<u8>) -> Vec<u8> {
        match self.framing {
            Framing::LengthPrefix(LengthPrefix { strip: false, .. }) => encode(self.framing, &body, &[]),
            _ => body,
        }
    }

    /// Passes the request to a backend.
    fn ask(&self, asking: &mut Asking, reply: &mut Reply<'_>) {
        asking.attempts += 1;
        asking.answer.clear();
        let dialed = reply.dial(SocketAddr::from(([10, 0, 0, 1], 80)), asking.attempts == 1);
        assert_eq!(dialed, Ok(()), "the world plays the shard");
        let passed = reply.pass(Chunk::from_vec(asking.request.to_text()));
        assert!(passed.is_ok(), "nothing waits for a backend that was just dialed");
        reply.hold(true);
    }

    fn give_answer(&self, answer: Vec<u8>, reply: &mut Reply<'_>) {
        reply.bytes(&self.wire(answer));
        reply.hold(false);
    }
}

impl Service for Scripted {
    ksf::stateless!(shard);
    type Conn = Client;

    fn profile(&self) -> Profile<'_> {
        let framing = if self.custom { Framing::Custom } else { self.framing };
        Profile { turn_ends: true, order: self.order, keeps_messages: self.keeps, ..Profile::new("scripted", framing) }
    }

    fn turn_end(&self, (): &mut (), _: &mut Turn<'_>) {
        if std::mem::take(&mut lock(&self.records).panics) {
            panic_quietly();
        }
    }

    fn cut(&self, _: &mut Client, buf: &[u8], scanned: usize, _: &Limits) -> Result<Frame, FramingError> {
        self.framing.parse(buf, scanned)
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<Client, Refused> {
        *lock(&self.open) += 1;
        Ok(Client { handed: Arc::clone(&lock(&self.next)), asking: None, kept: 0, panicked: false })
    }

    fn call(&self, (): &mut (), client: &mut Client, message: &Message<'_>, reply: &mut Reply<'_>) {
        self.note_call(client);
        lock(&client.handed).push(message.bytes().to_vec());
        self.keep(client, message.bytes().len(), reply.session_room());
        // Garbage that happens to be framed is not answered.
        let Some(request) = SimRequest::from_text(payload(self.framing, message.bytes())) else { return };
        if request.action == ServiceAction::Ask {
            let asking = client.asking.insert(Asking { request, attempts: 0, answer: Vec::new() });
            return self.ask(asking, reply);
        }
        if request.action == ServiceAction::Panic {
            reply.bytes(&self.wire(request.reply(0)));
            lock(&self.pending).push(Pending { deferred: reply.defer(), answer: Late::Nothing });
            client.panic();
        }
        if matches!(request.action, ServiceAction::Log | ServiceAction::See) {
            self.hold_for_log(&request, reply);
        }
        match request.action {
            ServiceAction::Reflect => reply.chunk(message.keep()),
            _ => {
                for body in request.prompt_replies() {
                    let body = self.wire(body);
                    match &self.disk {
                        // Some of both kinds on one connection.
                        Some(disk) if body.len() % 4 == 1 => {
                            let sent = reply.pieces(|pieces| in_pieces(&body, Some(disk), pieces));
                            assert_eq!(sent, Ok(()), "the world plays the shard");
                        }
                        Some(disk) if body.len() % 2 == 1 => {
                            let sent = reply.file(|_| (), disk.store(&body), b"");
                            assert_eq!(sent, Ok(()), "the world plays the shard");
                        }
                        None if body.len() % 4 == 1 => {
                            let sent = reply.pieces(|pieces| in_pieces(&body, None, pieces));
                            assert_eq!(sent, Ok(()), "there is no range of a file");
                        }
                        _ => reply.bytes(&body),
                    }
                }
            }
        }
        let answers = match request.action {
            ServiceAction::ReflectLater => vec![Late::Chunk(message.keep())],
            ServiceAction::LaterQuiet => vec![Late::Nothing],
            ServiceAction::Abandon => vec![Late::Forgotten],
            ServiceAction::LogLater | ServiceAction::PanicLater => vec![Late::Resume(request.clone())],
            _ => request.late_replies().into_iter().map(|body| Late::Bytes(self.wire(body))).collect(),
        };
        let mut pending = lock(&self.pending);
        pending.extend(answers.into_iter().map(|answer| Pending { deferred: reply.defer(), answer }));
        if request.action == ServiceAction::Close {
            reply.close();
        }
    }

    fn resume(&self, (): &mut (), client: &mut Client, state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        self.note_call(client);
        let Ok(request) = state.downcast::<SimRequest>() else { return };
        if request.action == ServiceAction::PanicLater {
            reply.bytes(&self.wire(request.reply(0)));
            client.panic();
        }
        self.hold_for_log(&request, reply);
        request.late_replies().into_iter().for_each(|body| reply.bytes(&self.wire(body)));
    }

    fn upstream(&self, (): &mut (), client: &mut Client, event: Upstream, reply: &mut Reply<'_>) {
        self.note_call(client);
        let Some(asking) = &mut client.asking else { return };
        let expected = asking.request.reply(0);
        match event {
            Upstream::Received(bytes) => {
                asking.answer.extend_from_slice(&bytes);
                if asking.answer.len() >= expected.len() {
                    reply.hang_up(if asking.attempts == 1 { HangUp::Keep } else { HangUp::Close });
                    self.give_answer(std::mem::take(&mut asking.answer), reply);
                    client.asking = None;
                }
            }
            Upstream::Failed(_) | Upstream::Ended if asking.attempts < ATTEMPTS_MAX => self.ask(asking, reply),
            Upstream::Failed(_) | Upstream::Ended => {
                reply.hang_up(HangUp::Close);
                self.give_answer(expected, reply);
                client.asking = None;
            }
            _ => {}
        }
    }

    fn reply_bytes(&self, (): &mut (), _: &mut Client, message: &[u8]) -> usize {
        if message.len().is_multiple_of(11) { 2 * message.len() + 8192 } else { 0 }
    }

    fn session(&self, client: &Client) -> SessionState {
        SessionState { bytes: client.kept, ..SessionState::default() }
    }

    fn close(&self, (): &mut (), client: Client) {
        *lock(&self.open) -= 1;
        *lock(&self.kept_bytes) -= client.kept;
    }
}
