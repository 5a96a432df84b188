//! Requests as a [`Client`]: what each asks for follows from its number, so a reply is checked without a note of its request,
//! except for the fid of a walk.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use ksf_proto::p9::{Data, HEADER_BYTES, Header, Names, Qid, READ_HEAD_BYTES, Reply, Request, STAT_BASIC, open_flag};

use super::operation::{Load, Operation, Sequence};
use super::session::{ROOT, Session};
use super::tree::{AttachTarget, FOLDER, Tree};
use crate::drive::protocol::{Client, Protocol, Stream, Ticket};
use crate::drive::random::mix;
use crate::files::content::{Subject, file_name};
use crate::files::{FileOperation, Wrong};
use crate::record::{Fault, Sink};

/// Bits of the numbers that tags are made of: below NOTAG, which is the largest of 16 bits.
pub(super) const TAG_BITS: u32 = 15;

/// The fid of the first file of a connection.
const FILES: u32 = FOLDER + 1;

const SIZE_BYTES: usize = 4;
/// File type in the mode of a regular file, and its mask (inode(7)).
const REGULAR: u32 = 0o100_000;
const TYPE_MASK: u32 = 0o170_000;

/// What requests are about.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) tree: Arc<Tree>,
    pub(super) place: Arc<AttachTarget>,
    pub(super) load: Load,
    pub(super) io_bytes: usize,
    pub(super) in_flight: usize,
    /// Every receive waits for all the bytes that it asks for.
    pub(super) waits_for_all: bool,
    pub(super) seed: u64,
}

impl Protocol for Work {
    type Client = NinepClient;
    type Mix = Sequence;

    fn client(&self, connection: u32) -> NinepClient {
        let own_file = match &self.load {
            Load::Mix(_) => None,
            Load::Ior { blocks } => Some((connection as usize, *blocks)),
        };
        let is_asked = |operation: &&Operation| self.load.has(**operation);
        let replies = Operation::ALL.iter().filter(is_asked).map(|operation| operation.reply_bytes(self.io_bytes));
        let files = if own_file.is_some() { 1 } else { self.tree.content.shape.files as u32 };
        let walks = if self.load.has(Operation::Walk) { self.in_flight as u32 } else { 0 };
        NinepClient {
            tree: Arc::clone(&self.tree),
            place: Arc::clone(&self.place),
            opens: self.load.has(Operation::Read) || self.load.has(Operation::Write),
            own_file,
            io_bytes: self.io_bytes,
            salt: mix(self.seed ^ u64::from(connection)),
            msize: 0,
            reply_bytes: if self.waits_for_all { 0 } else { replies.min().unwrap_or(0) },
            free: (0..walks).map(|number| FILES + files + number).collect(),
            walked: Vec::new(),
            walks: HashMap::new(),
            message: Vec::with_capacity(self.request_bytes()),
            names: Vec::new(),
        }
    }

    fn mix(&self, thread: usize) -> Sequence {
        Sequence::new(&self.load, self.seed, thread)
    }

    fn operations(&self) -> usize {
        Operation::ALL.len()
    }

    fn id_bits(&self) -> u32 {
        TAG_BITS
    }

    fn request_bytes(&self) -> usize {
        // The longest without data is a Twalk of a name.
        let data = if self.load.has(Operation::Write) { self.io_bytes } else { 0 };
        64 + data
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct NinepClient {
    tree: Arc<Tree>,
    place: Arc<AttachTarget>,
    /// Files are read or written.
    opens: bool,
    /// The only file of this connection, and its parts, which are used in turn.
    own_file: Option<(usize, u64)>,
    io_bytes: usize,
    salt: u64,
    /// As agreed with the server.
    msize: usize,
    /// Bytes of the shortest reply that is awaited; 0: a receive asks for no more than is sure to come.
    reply_bytes: usize,
    /// Fids that name nothing; one more than walks in progress at least.
    free: Vec<u32>,
    /// Fids of walks that were answered.
    walked: Vec<u32>,
    /// Walks and clunks in progress, by tag.
    walks: HashMap<u32, Walk>,
    message: Vec<u8>,
    names: Vec<u8>,
}

/// The fid of a request that makes or ends one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Walk {
    Made(u32),
    Ended(u32),
}

impl NinepClient {
    fn subject(&self, index: u64) -> Subject {
        match self.own_file {
            Some((file, blocks)) => Subject { file, offset: (index % blocks) as usize * self.io_bytes },
            None => self.tree.content.subject(self.salt, index, self.io_bytes),
        }
    }

    fn fid(&self, file: usize) -> u32 {
        FILES + if self.own_file.is_some() { 0 } else { file as u32 }
    }

    /// Makes a fid of each file, and compares what the server names so.
    fn take_files(&self, session: &mut Session<&mut dyn Stream>) -> io::Result<()> {
        session.walk(ROOT, FOLDER, &self.tree.name)?;
        let files = match self.own_file {
            Some((file, _)) => file..file + 1,
            None => 0..self.tree.qids.len(),
        };
        for file in files {
            let fid = self.fid(file);
            let qid = session.walk(FOLDER, fid, &file_name(file))?;
            is_of(self.tree.qids[file], qid)
                .map_err(|_| io::Error::other(format!("{} is another object than was made", file_name(file))))?;
            if self.opens {
                session.open(fid, open_flag::READ_WRITE, self.io_bytes)?;
            }
        }
        Ok(())
    }

    /// Checks the reply to a request.
    fn check(&self, operation: Operation, walk: Option<Walk>, index: u64, message: &[u8]) -> Result<(), Wrong> {
        let Subject { file, offset } = self.subject(index);
        let content = &self.tree.content;
        let qid = self.tree.qids[file];
        let (_, reply) = Reply::parse(message).map_err(|_| Wrong::Malformed("a reply that cannot be decoded"))?;
        match (operation, reply) {
            (_, Reply::Lerror { ecode }) => Err(Wrong::Status(ecode)),
            (Operation::Getattr, Reply::Getattr { stat }) => {
                is_of(qid, stat.qid)?;
                if stat.valid & STAT_BASIC != STAT_BASIC {
                    return Err(Wrong::Untrue("fewer attributes than were asked for"));
                }
                if stat.mode & TYPE_MASK != REGULAR || stat.size != content.shape.file_bytes as u64 {
                    return Err(Wrong::Untrue("another type or size than the file has"));
                }
                Ok(())
            }
            (Operation::Walk, Reply::Walk { qids }) if matches!(walk, Some(Walk::Made(_))) => {
                match (qids.len(), qids.iter().next()) {
                    (1, Some(found)) => is_of(qid, found),
                    _ => Err(Wrong::Untrue("another number of objects than names")),
                }
            }
            (Operation::Walk, Reply::Clunk {}) if matches!(walk, Some(Walk::Ended(_))) => Ok(()),
            (Operation::Read, Reply::Read { data: Data(data) }) => {
                if data.len() != self.io_bytes {
                    return Err(Wrong::Untrue("another count than the file has there"));
                }
                if data != content.of(file, offset, data.len()) {
                    return Err(Wrong::Untrue("other bytes than the file has"));
                }
                Ok(())
            }
            (Operation::Write, Reply::Write { count }) => {
                if count as usize == self.io_bytes {
                    Ok(())
                } else {
                    Err(Wrong::Untrue("another count than was written"))
                }
            }
            _ => Err(Wrong::Malformed("a reply of another type than the request")),
        }
    }

    /// Judges one reply and settles its request.
    fn take_reply(&mut self, message: &[u8], sink: &mut Sink<'_, ()>) {
        let Ok(Header { tag, .. }) = Header::parse(message) else { return };
        let tag = u32::from(tag);
        let Some(request) = sink.settle(tag) else { return };
        let operation = Operation::ALL[usize::from(request.operation)];
        let walk = if operation == Operation::Walk { self.walks.remove(&tag) } else { None };
        let checked = self.check(operation, walk, request.index, message);
        match (walk, &checked) {
            (Some(Walk::Made(fid)), Ok(())) => self.walked.push(fid),
            // A clunk ends a fid even if it fails.
            (Some(Walk::Made(fid) | Walk::Ended(fid)), _) => self.free.push(fid),
            (None, _) => {}
        }
        match checked {
            Ok(()) => sink.complete(request),
            Err(wrong) => sink.reject(wrong.fault(), || format!("{}: {}", operation.name(), in_words(&wrong))),
        }
    }
}

/// The same object, whose content may be another one by now.
fn is_of(made: Qid, qid: Qid) -> Result<(), Wrong> {
    if (made.kind, made.path) == (qid.kind, qid.path) {
        Ok(())
    } else {
        Err(Wrong::Untrue("the qid of another object"))
    }
}

fn in_words(wrong: &Wrong) -> String {
    match wrong {
        Wrong::Status(ecode) => io::Error::from_raw_os_error(*ecode as i32).to_string(),
        Wrong::Malformed(what) | Wrong::Untrue(what) => (*what).to_owned(),
    }
}

/// Bytes of the message that has begun, if they are known yet.
fn size_of(held: &[u8]) -> Option<usize> {
    held.first_chunk::<SIZE_BYTES>().map(|size| u32::from_le_bytes(*size) as usize)
}

impl Client for NinepClient {
    type Operation = Operation;
    type Counters = ();

    fn greet(&mut self, stream: &mut dyn Stream) -> io::Result<()> {
        let place = Arc::clone(&self.place);
        let mut session = Session::begin(stream, self.io_bytes.max(READ_HEAD_BYTES), &place)?;
        self.take_files(&mut session)?;
        self.msize = session.msize;
        Ok(())
    }

    fn encode(&mut self, ticket: &Ticket, operation: &Operation) -> &[u8] {
        let Subject { file, offset } = self.subject(ticket.index);
        let fid = self.fid(file);
        let Self { tree, message, names, .. } = self;
        let name = file_name(file);
        let request = match operation {
            Operation::Getattr => Request::Getattr { fid, mask: STAT_BASIC },
            Operation::Walk => match self.walked.pop() {
                Some(fid) => {
                    self.walks.insert(ticket.id, Walk::Ended(fid));
                    Request::Clunk { fid }
                }
                None => {
                    let newfid = self.free.pop().expect("as many fids as requests in flight");
                    self.walks.insert(ticket.id, Walk::Made(newfid));
                    let names = Names::of(&[name.as_bytes()], names).expect("a short name");
                    Request::Walk { fid: FOLDER, newfid, names }
                }
            },
            Operation::Read => Request::Read { fid, offset: offset as u64, count: self.io_bytes as u32 },
            Operation::Write => {
                let data = Data(tree.content.of(file, offset, self.io_bytes));
                Request::Write { fid, offset: offset as u64, data }
            }
        };
        message.clear();
        request.put(ticket.id as u16, message).expect("a message of at most 1 MiB and its head");
        message
    }

    fn window(&self, held: &[u8]) -> usize {
        // Behind a reply that has begun there is room for less than the next one.
        let wanted = match (size_of(held), self.reply_bytes.checked_sub(1)) {
            (Some(size), ahead) => size + ahead.unwrap_or(0),
            (None, Some(ahead)) => self.reply_bytes + ahead,
            (None, None) => HEADER_BYTES,
        };
        wanted.saturating_sub(held.len()).max(1)
    }

    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, ()>) -> usize {
        let mut at = 0;
        while let Some(size) = size_of(&bytes[at..]) {
            if !(HEADER_BYTES..=self.msize).contains(&size) {
                let msize = self.msize;
                sink.break_off(Fault::Malformed, || {
                    format!("a reply of {size} bytes; they have {HEADER_BYTES} to {msize}")
                });
                return bytes.len();
            }
            let Some(message) = bytes.get(at..at + size) else { break };
            self.take_reply(message, sink);
            at += size;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ksf_proto::p9::{Qids, Stat, qid_kind};

    use super::*;
    use crate::drive::protocol::tests::Bench;
    use crate::files::content::{Content, Shape};
    use crate::options::target::Target;

    const FILE_BYTES: usize = 64;
    const IO_BYTES: usize = 16;

    fn work(load: Load) -> Work {
        let content = Content::new(Shape { files: 3, file_bytes: FILE_BYTES });
        let qids = (0..3).map(|number| Qid { kind: qid_kind::FILE, version: 5, path: 100 + number }).collect();
        let target = Target::Unix("/none".into());
        let place = AttachTarget { target, aname: String::new(), uid: 0, gid: 0, timeout: Duration::from_secs(1) };
        Work {
            tree: Arc::new(Tree { content, qids, name: String::new() }),
            place: Arc::new(place),
            load,
            io_bytes: IO_BYTES,
            in_flight: 4,
            waits_for_all: false,
            seed: 1,
        }
    }

    fn client(mix: &str) -> NinepClient {
        NinepClient { msize: 8192, ..work(Load::Mix(mix.parse().unwrap())).client(0) }
    }

    fn message(tag: u16, reply: &Reply<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        reply.put(tag, &mut out).unwrap();
        out
    }

    fn check(client: &NinepClient, operation: Operation, index: u64, reply: &Reply<'_>) -> Result<(), Wrong> {
        client.check(operation, None, index, &message(1, reply))
    }

    #[test]
    fn attributes_of_another_file_are_found() {
        let client = client("getattr");
        let qid = Qid { version: 77, ..client.tree.qids[client.subject(7).file] };
        let right = Stat { valid: STAT_BASIC, qid, mode: 0o100_644, size: 64, ..Stat::default() };
        let check = |stat: Stat| check(&client, Operation::Getattr, 7, &Reply::Getattr { stat });
        assert_eq!(check(right), Ok(()));
        for wrong in [
            Stat { qid: Qid { path: qid.path + 1, ..qid }, ..right },
            Stat { qid: Qid { kind: qid_kind::DIRECTORY, ..qid }, ..right },
            Stat { mode: 0o040_755, ..right },
            Stat { size: 63, ..right },
            Stat { valid: STAT_BASIC & !1, ..right },
        ] {
            assert!(matches!(check(wrong), Err(Wrong::Untrue(_))), "{wrong:?}");
        }
    }

    #[test]
    fn every_byte_that_is_read_is_compared() {
        let client = client("read");
        let check = |index, data: &[u8]| check(&client, Operation::Read, index, &Reply::Read { data: Data(data) });
        for index in 0..50 {
            let Subject { file, offset } = client.subject(index);
            let right = client.tree.content.of(file, offset, IO_BYTES).to_vec();
            assert_eq!(check(index, &right), Ok(()));
            for at in 0..IO_BYTES {
                let mut wrong = right.clone();
                wrong[at] ^= 1;
                assert!(matches!(check(index, &wrong), Err(Wrong::Untrue(_))), "{index}, {at}");
            }
            assert!(matches!(check(index, &right[..15]), Err(Wrong::Untrue(_))));
        }
    }

    #[test]
    fn counts_errors_and_types_are_compared() {
        let client = client("write");
        let check = |reply: &Reply<'_>| check(&client, Operation::Write, 0, reply);
        assert_eq!(check(&Reply::Write { count: 16 }), Ok(()));
        assert!(matches!(check(&Reply::Write { count: 15 }), Err(Wrong::Untrue(_))));
        assert_eq!(check(&Reply::Lerror { ecode: 5 }), Err(Wrong::Status(5)));
        assert!(matches!(check(&Reply::Fsync {}), Err(Wrong::Malformed(_))));
        let cut = &message(1, &Reply::Write { count: 16 })[..8];
        assert!(matches!(client.check(Operation::Write, None, 0, cut), Err(Wrong::Malformed(_))));
    }

    /// A connection of whose requests the replies are made here.
    struct Case {
        bench: Bench<NinepClient>,
    }

    impl Case {
        fn new(client: NinepClient) -> Self {
            Case { bench: Bench::with_table(client, crate::drive::table::RequestTable::new(4, TAG_BITS, 0)) }
        }

        /// Sends a request; returns it with its tag.
        fn send(&mut self, operation: Operation) -> (u16, Vec<u8>) {
            let (id, index) = self.bench.table.issue(1, operation.number());
            self.bench.record.started += 1;
            let sent = self.bench.client.encode(&Ticket { id, index, is_last: false }, &operation).to_vec();
            (id as u16, sent)
        }

        /// The reply to a walk or clunk.
        fn answer(&self, sent: &[u8], index: u64) -> Vec<u8> {
            match Request::parse(sent).unwrap() {
                (tag, Request::Walk { .. }) => {
                    let qid = self.bench.client.tree.qids[self.bench.client.subject(index).file];
                    message(tag, &Reply::Walk { qids: Qids::of(&[qid], &mut Vec::new()).unwrap() })
                }
                (tag, Request::Clunk { .. }) => message(tag, &Reply::Clunk {}),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn walks_and_clunks_alternate_in_any_order_of_replies() {
        let mut case = Case::new(client("walk"));
        let mut fids = Vec::new();
        for round in 0..8 {
            let sent: Vec<Vec<u8>> = (0..4).map(|_| case.send(Operation::Walk).1).collect();
            for (at, sent) in sent.iter().enumerate().rev() {
                match Request::parse(sent).unwrap().1 {
                    Request::Walk { newfid, .. } if round % 2 == 0 => {
                        assert!(!fids.contains(&newfid), "{newfid} is in use");
                        fids.push(newfid);
                    }
                    Request::Clunk { fid } if round % 2 == 1 => {
                        let at = fids.iter().position(|one| *one == fid).expect("it was walked to");
                        fids.swap_remove(at);
                    }
                    other => panic!("{round}: {other:?}"),
                }
                let answer = case.answer(sent, 4 * round + at as u64);
                assert_eq!(case.bench.receive(&answer), 1);
            }
        }
        assert_eq!(case.bench.faults(), "");
        assert_eq!((case.bench.record.answered, fids.len()), (32, 0));
    }

    #[test]
    fn tags_of_no_request_are_counted_and_a_size_that_lies_ends_the_connection() {
        let mut case = Case::new(client("write"));
        let (tag, _) = case.send(Operation::Write);
        let right = message(tag, &Reply::Write { count: 16 });
        // Byte by byte, and twice.
        assert_eq!(right.iter().map(|byte| case.bench.receive(&[*byte])).sum::<u64>(), 1);
        case.bench.receive(&right);
        case.bench.receive(&message(tag + 8, &Reply::Write { count: 16 }));
        assert_eq!(case.bench.faults(), "1 duplicate, 1 unknown");
        assert!(!case.bench.broken);
        case.bench.receive(&[6, 0, 0, 0, 119, 0, 0]);
        assert!(case.bench.broken);
    }

    #[test]
    fn a_receive_brings_at_most_one_reply() {
        let mut case = Case::new(client("write"));
        let replies: Vec<u8> = (0..4)
            .flat_map(|_| {
                let (tag, _) = case.send(Operation::Write);
                message(tag, &Reply::Write { count: 16 })
            })
            .collect();
        let brought = case.bench.feed(&replies, usize::MAX);
        assert!(brought.iter().all(|replies| *replies <= 1), "{brought:?}");
        assert_eq!((brought.iter().sum::<u64>(), brought.len()), (4, 4));
    }

    #[test]
    fn ior_uses_the_parts_of_its_own_file_in_turn() {
        let client = work(Load::Ior { blocks: 4 }).client(2);
        let subjects: Vec<Subject> = (0..5).map(|index| client.subject(index)).collect();
        assert!(subjects.iter().all(|subject| subject.file == 2));
        assert_eq!(subjects.iter().map(|subject| subject.offset).collect::<Vec<_>>(), [0, 16, 32, 48, 0]);
    }
}
