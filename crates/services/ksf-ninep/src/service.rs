//! The service: from a message to a lane and back.

use std::any::Any;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ksf::deferred::Deferred;
use ksf::framing::{Endian, Framing, LengthPrefix};
use ksf::pool::Chunk;
use ksf::{Message, Order, Peer, Profile, Refused, Reply as Replies, Service, SessionState, Turn};
use ksf_fs::{Account, Credential, Lane, Lanes, LockRange, Owed, Sender, WarmTurn, XATTR_BYTES_MAX};
use ksf_proto::p9::{
    Data, Header, IO_HEAD_BYTES, NO_FID, NO_UID, P9Error, Qids, READ_HEAD_BYTES, Reply, Request, UNKNOWN_VERSION,
    UNLINK_DIRECTORY, VERSION, open_flag,
};

use crate::fids::{Change, FID_BYTES, Node, Removed};
use crate::server::{Core, MSIZE_MIN, msize_max};
use crate::session::{Asked, Held, Session};
use crate::wire::{how_of, lock_kind_of, set_of};
use crate::work::{Answer, Done, Work, put_error};
use rustix::io::Errno;

/// Length in front of a message, which counts itself.
const SIZE: LengthPrefix = LengthPrefix { offset: 0, width: 4, endian: Endian::Little, adjust: 0, strip: false };

/// Longest reply without data: Rgetattr, and Rwalk with 16 objects.
const FIXED_BYTES: usize = 256;
/// Longest target of a symbolic link that the kernel makes: PATH_MAX.
const TARGET_BYTES_MAX: usize = 4096;

const TREADLINK: u8 = 22;
const TREADDIR: u8 = 40;
const TXATTRWALK: u8 = 30;
const TATTACH: u8 = 104;
const TWALK: u8 = 110;
const TREAD: u8 = 116;

/// Answers the clients of a 9P2000.L server.
pub struct NinepService {
    pub(crate) name: String,
    pub(crate) core: Arc<Core>,
    pub(crate) lanes: Arc<Lanes>,
}

/// What becomes of a request on the shard.
enum Next {
    /// It is answered.
    Answered,
    /// A lane carries it out.
    Lane(Work),
    /// A lane does, when the groups of its user are known.
    Attach(Box<Credential>, Work),
}

impl Service for NinepService {
    type Shard = WarmTurn;
    type Conn = Session;
    type Mode = ksf::Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile {
            // Tags match replies with requests.
            order: Order::Free,
            // The data of a Twrite lie where they were received until they are in the file.
            keeps_messages: true,
            turn_ends: true,
            ..Profile::new(&self.name, Framing::LengthPrefix(SIZE))
        }
    }

    fn start(&self, _: &mut Turn<'_>) -> std::io::Result<WarmTurn> {
        Ok(WarmTurn::default())
    }

    fn turn_end(&self, turn: &mut WarmTurn, _: &mut Turn<'_>) {
        turn.end();
    }

    fn accept(&self, _: &mut WarmTurn, peer: &Peer) -> Result<Session, Refused> {
        let sender = Sender::new(if let Peer::Tcp(address) = peer { Some(*address) } else { None });
        Ok(Session::new(sender, self.core.fids_max))
    }

    fn call(&self, turn: &mut WarmTurn, session: &mut Session, message: &Message<'_>, reply: &mut Replies<'_>) {
        let started = Instant::now();
        let Ok(Header { kind, tag }) = Header::parse(message.bytes()) else { return reply.close() };
        let request = match Request::parse(message.bytes()) {
            Ok((_, Request::Version { msize, version })) => {
                let is_fine = self.version(session, tag, msize, version, reply);
                return self.core.counters.answered(kind, is_fine, started.elapsed());
            }
            // Two replies with one tag would be taken for each other.
            _ if session.is_outstanding(tag) => {
                self.core.counters.tag_reused();
                return reply.close();
            }
            _ if session.msize == 0 => Err(Errno::PROTO),
            _ if message.bytes().len() > session.msize as usize => Err(Errno::MSGSIZE),
            Ok((_, request)) => Ok(request),
            Err(P9Error::Kind { .. }) => Err(Errno::OPNOTSUPP),
            Err(_) => Err(Errno::PROTO),
        };
        let asked = Asked { kind, tag, session: session.number(), started };
        let keep = |range| message.keep_part(range);
        let input = Input { bytes: message.bytes(), uncounted_bytes: 0, keep: &keep };
        self.serve(turn, session, asked, request, &input, reply);
    }

    fn resume(&self, turn: &mut WarmTurn, session: &mut Session, state: Box<dyn Any + Send>, reply: &mut Replies<'_>) {
        let state = match state.downcast::<Held>() {
            Ok(held) => return self.serve_held(turn, session, *held, reply),
            Err(state) => state,
        };
        let Ok(ended) = state.downcast::<Ended>() else { return reply.close() };
        let Ended { asked, done: Done { answer, change }, unnamed } = *ended;
        if asked.session != session.number() {
            return;
        }
        // What has no name any more is known by what is open of it, under whichever fid.
        if let (Some(work), Answer::Error(Errno::STALE)) = (unnamed, &answer)
            && let Some(file) = session.fids.open_of(work.handle())
        {
            let work = work.with_open(file.clone());
            let way = reply.defer_for(FIXED_BYTES + work.value_bytes());
            let job = Job { core: Arc::clone(&self.core), way, asked };
            return job.submit(&self.lanes, &session.account, work);
        }
        self.finish(session, asked, Done { answer, change }, reply);
        self.end(session, asked.tag, reply);
    }

    fn reply_bytes(&self, _: &mut WarmTurn, session: &mut Session, message: &[u8]) -> usize {
        // The value of an extended attribute is no part of the reply, but comes with it.
        let value_bytes = if message.get(4) == Some(&TXATTRWALK) { XATTR_BYTES_MAX } else { 0 };
        self.reply_bytes_of(session, message) + value_bytes
    }

    fn session(&self, session: &Session) -> SessionState {
        SessionState { is_stranger: session.msize == 0, bytes: session.bytes(), ..SessionState::default() }
    }

    fn close(&self, _: &mut WarmTurn, mut session: Session) {
        session.restart(0);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("tags_reused", self.core.counters.tags_reused())]
    }
}

impl NinepService {
    /// Begins a session. False: the client asks for another protocol, or for messages that are too short for it.
    fn version(&self, session: &mut Session, tag: u16, msize: u32, version: &[u8], reply: &mut Replies<'_>) -> bool {
        let is_known = version == VERSION;
        let is_fine = is_known && msize >= MSIZE_MIN;
        let msize = msize.min(self.core.msize_max).min(msize_max(reply.limits()));
        session.restart(if is_fine { msize } else { 0 });
        let answer = Reply::Version { msize, version: if is_known { VERSION } else { UNKNOWN_VERSION } };
        reply.message(|out| {
            if is_known && !is_fine || answer.put(tag, out).is_err() {
                put_error(tag, Errno::INVAL, out);
            }
        });
        is_fine
    }

    /// Begins a request. True: it is answered.
    fn serve(
        &self,
        turn: &mut WarmTurn,
        session: &mut Session,
        asked: Asked,
        request: Result<Request<'_>, Errno>,
        input: &Input<'_>,
        reply: &mut Replies<'_>,
    ) -> bool {
        let Asked { kind, tag, started, .. } = asked;
        let changed = request.as_ref().ok().and_then(changed_fid);
        if let Some(fid) = changed {
            let held = || Held { asked, message: (input.keep)(0..input.bytes.len()) };
            if session.hold(fid, tag, || (held(), reply.defer_for(FIXED_BYTES))) {
                return false;
            }
        }
        let next = request.and_then(|request| {
            // A fid takes memory for as long as the client wants.
            if reply.session_room() < FID_BYTES && matches!(kind, TATTACH | TWALK | TXATTRWALK) {
                return Err(Errno::NOMEM);
            }
            self.begin(session, tag, request, input, reply)
        });
        // `changed` stays so until the end of a request that changes it then.
        let (is_answered, changes) = match next {
            Ok(Next::Answered) => {
                self.core.counters.answered(kind, true, started.elapsed());
                (true, None)
            }
            Ok(Next::Lane(work)) => match work.at_once(self.core.fs.warm(turn, &mut session.share), tag) {
                Some(done) => {
                    self.core.fs.count_warm();
                    self.finish(session, asked, done, reply);
                    (true, None)
                }
                None => {
                    let changes = changed.filter(|_| work.changes_fid());
                    let bytes = self.reply_bytes_of(session, input.bytes) + work.value_bytes() + input.uncounted_bytes;
                    let job = self.job(session, asked, changes, reply.defer_for(bytes));
                    job.submit(&self.lanes, &session.account, work);
                    (false, changes)
                }
            },
            Ok(Next::Attach(caller, work)) => {
                let job = self.job(session, asked, changed, reply.defer_for(FIXED_BYTES));
                let (handle, lanes) = (work.handle().clone(), Arc::clone(&self.lanes));
                let account = session.account.clone();
                self.core.fs.look_up_groups(&session.account, *caller, &handle, move |caller| match (caller, work) {
                    (Ok(caller), Work::Attach { id, root, names, .. }) => {
                        let work = Work::Attach { id, caller: Arc::new(caller), root, names };
                        job.submit(&lanes, &account, work);
                    }
                    (caller, work) => {
                        let errno = caller.err().map_or(Errno::IO, Errno::from);
                        let undo = work.undo();
                        job.end(Done { answer: Answer::Error(errno), change: undo });
                    }
                });
                (false, changed)
            }
            Err(errno) => {
                self.core.counters.answered(kind, false, started.elapsed());
                reply.message(|out| put_error(tag, errno, out));
                (true, None)
            }
        };
        if let (Some(fid), None) = (changed, changes) {
            session.changed(fid, tag);
        }
        is_answered
    }

    fn job(&self, session: &mut Session, asked: Asked, changes: Option<u32>, way: Deferred) -> Job {
        session.begin(asked.tag, changes);
        Job { core: Arc::clone(&self.core), way, asked }
    }

    /// Begins a request that has waited for others of its fid.
    fn serve_held(&self, turn: &mut WarmTurn, session: &mut Session, held: Held, reply: &mut Replies<'_>) {
        let Held { asked, message } = held;
        if asked.session != session.number() {
            return;
        }
        let Ok((_, request)) = Request::parse(&message) else { return reply.close() };
        let keep = |range| message.slice(range);
        let input = Input { bytes: &message, uncounted_bytes: message.len(), keep: &keep };
        if self.serve(turn, session, asked, Ok(request), &input, reply) {
            self.end(session, asked.tag, reply);
        }
    }

    /// An outstanding request was answered.
    fn end(&self, session: &mut Session, tag: u16, reply: &mut Replies<'_>) {
        // Behind the reply, and before those to whatever is read next: their tags are free now.
        for (flush, way) in session.end(tag) {
            way.no_reply();
            if reply.message(|out| (Reply::Flush {}).put(flush, out)).is_err() {
                // It always fits.
                reply.close();
            }
        }
    }

    /// Answers a request that was carried out.
    fn finish(&self, session: &mut Session, asked: Asked, Done { answer, change }: Done, reply: &mut Replies<'_>) {
        let Asked { kind, tag, started, .. } = asked;
        // A value is kept for as long as the client wants.
        let (answer, change) = match change {
            Some(Change::Value(id, value)) if reply.session_room() < value.len() => {
                (Answer::Error(Errno::NOMEM), Some(Change::Free(id)))
            }
            change => (answer, change),
        };
        if let Some(change) = change {
            session.fids.apply(change);
        }
        let answer = match answer {
            // The target of a symbolic link. All other replies are shorter than the least msize, or cut by it.
            Answer::Message(message) if message.len() > session.msize as usize => Answer::Error(Errno::MSGSIZE),
            answer => answer,
        };
        self.core.counters.answered(kind, !matches!(answer, Answer::Error(_)), started.elapsed());
        match answer {
            Answer::Message(message) => reply.owned(message),
            Answer::Data(kind, data) => {
                let bytes = data.len() as u32;
                // From where they lie.
                reply.parts(|out| Reply::put_read_head(kind, tag, bytes, out), Chunk::from_vec(data), &[]);
            }
            Answer::Error(errno) => reply.message(|out| put_error(tag, errno, out)),
        }
    }

    /// Most bytes that the reply to a message may have.
    fn reply_bytes_of(&self, session: &Session, message: &[u8]) -> usize {
        match message.get(4) {
            Some(&(TREAD | TREADDIR)) => {
                // Behind head, fid and offset.
                let count = message.get(19..23).and_then(|count| count.try_into().ok()).map_or(0, u32::from_le_bytes);
                FIXED_BYTES + data_bytes(session.msize, count) as usize
            }
            Some(&TREADLINK) => FIXED_BYTES + TARGET_BYTES_MAX,
            _ => FIXED_BYTES,
        }
    }

    /// Answers a request, or says what a lane has to do for it.
    fn begin(
        &self,
        session: &mut Session,
        tag: u16,
        request: Request<'_>,
        input: &Input<'_>,
        reply: &mut Replies<'_>,
    ) -> Result<Next, Errno> {
        let msize = session.msize;
        let iounit = msize - IO_HEAD_BYTES as u32;
        let fids = &mut session.fids;
        let shared = |node: &Arc<Node>| Arc::clone(node);
        Ok(Next::Lane(match request {
            // Answered before.
            Request::Version { .. } => return Err(Errno::PROTO),
            // No authentication is required.
            Request::Auth { .. } => return Err(Errno::NOENT),
            Request::Attach { fid, afid, uname, aname, n_uname } => {
                return self.attach(session, (fid, afid), uname, aname, n_uname);
            }
            Request::Flush { oldtag } => {
                if !session.wait_for(oldtag, tag, || reply.defer_for(FIXED_BYTES)) {
                    say(reply, tag, Reply::Flush {})?;
                }
                return Ok(Next::Answered);
            }
            Request::Walk { fid, newfid, names } if names.is_empty() => {
                if fid != newfid {
                    fids.copy(fid, newfid)?;
                }
                fids.node(fid)?;
                say(reply, tag, Reply::Walk { qids: Qids::default() })?;
                return Ok(Next::Answered);
            }
            Request::Walk { fid, newfid, names } => {
                let (id, from) = if fid == newfid {
                    let (id, node) = fids.closed(fid)?;
                    (id, shared(node))
                } else {
                    let node = shared(fids.node(fid)?);
                    (fids.reserve(newfid)?, node)
                };
                Work::Walk { id, from, names: names.iter().map(Box::from).collect(), in_place: fid == newfid }
            }
            Request::Lopen { fid, flags } => {
                let (id, node) = fids.closed(fid)?;
                let node = shared(node);
                let directory = flags & open_flag::DIRECTORY != 0;
                Work::Open { id, node, how: how_of(flags), directory, iounit, open: None }
            }
            Request::Lcreate { fid, name, flags, mode, gid } => {
                let (id, dir) = fids.closed(fid)?;
                let dir = shared(dir);
                let exclusive = flags & open_flag::EXCLUSIVE != 0;
                Work::Create { id, dir, name: name.into(), mode, exclusive, gid, how: how_of(flags), iounit }
            }
            Request::Read { fid, offset, count } => {
                if let Some(value) = fids.read_value(fid, offset) {
                    let count = value.len().min(data_bytes(msize, count) as usize);
                    say(reply, tag, Reply::Read { data: Data(&value[..count]) })?;
                    return Ok(Next::Answered);
                }
                let file = fids.open(fid)?.clone();
                Work::Read { file, offset, count: data_bytes(msize, count) }
            }
            Request::Readdir { fid, offset, count } => {
                let folder = fids.open(fid)?.clone();
                Work::Readdir { folder, offset, count: data_bytes(msize, count) }
            }
            Request::Readlink { fid } => Work::Readlink { node: shared(fids.node(fid)?) },
            Request::Getattr { fid, .. } => {
                let (node, open) = fids.both(fid)?;
                Work::Getattr { node: shared(node), open: open.cloned() }
            }
            Request::Statfs { fid } => Work::Statfs { node: shared(fids.node(fid)?) },
            Request::Clunk { fid } => match fids.remove(fid)? {
                Removed::File(_, _, Some(file)) => Work::Clunk { file },
                Removed::Setting(setting) => Work::SetXattr { setting: Arc::from(setting), open: None },
                Removed::File(_, _, None) | Removed::Value => {
                    say(reply, tag, Reply::Clunk {})?;
                    return Ok(Next::Answered);
                }
            },
            Request::Write { fid, offset, data } => {
                if let Some(written) = fids.write_value(fid, offset, data.0, reply.session_room()) {
                    written?;
                    say(reply, tag, Reply::Write { count: data.0.len() as u32 })?;
                    return Ok(Next::Answered);
                }
                let file = fids.open(fid)?.clone();
                // They are the end of the message.
                let end = input.bytes.len();
                Work::Write { file, offset, data: (input.keep)(end - data.0.len()..end) }
            }
            Request::Setattr { fid, to } => {
                let (node, open) = fids.both(fid)?;
                Work::Setattr { node: shared(node), open: open.cloned(), to: set_of(&to) }
            }
            Request::Mkdir { dfid, name, mode, gid } => {
                Work::Mkdir { dir: shared(fids.node(dfid)?), name: name.into(), mode, gid }
            }
            Request::Symlink { dfid, name, target, gid } => {
                Work::Symlink { dir: shared(fids.node(dfid)?), name: name.into(), target: target.into(), gid }
            }
            Request::Mknod { dfid, name, mode, major, minor, gid } => {
                let (dir, device) = (shared(fids.node(dfid)?), (major, minor));
                Work::Mknod { dir, name: name.into(), mode, device, gid }
            }
            Request::Link { dfid, fid, name } => {
                Work::Link { dir: shared(fids.node(dfid)?), node: shared(fids.node(fid)?), name: name.into() }
            }
            Request::Rename { fid, dfid, name } => {
                let (node, place) = (shared(fids.node(fid)?), fids.place(fid).cloned());
                Work::Rename { node, place, dir: shared(fids.node(dfid)?), name: name.into() }
            }
            Request::Renameat { olddirfid, oldname, newdirfid, newname } => {
                let (from, to) = (shared(fids.node(olddirfid)?), shared(fids.node(newdirfid)?));
                Work::Renameat { from, from_name: oldname.into(), to, to_name: newname.into() }
            }
            Request::Unlinkat { dirfid, name, flags } => {
                let directory = match flags {
                    0 => false,
                    UNLINK_DIRECTORY => true,
                    _ => return Err(Errno::INVAL),
                };
                Work::Unlinkat { dir: shared(fids.node(dirfid)?), name: name.into(), directory }
            }
            Request::Remove { fid } => {
                let Removed::File(node, place, open) = fids.remove(fid)? else { return Err(Errno::INVAL) };
                Work::Remove { node, place, open }
            }
            Request::Fsync { fid, datasync } => Work::Fsync { file: fids.open(fid)?.clone(), data_only: datasync != 0 },
            Request::Lock { fid, lock } => {
                let range = LockRange { start: lock.start, length: lock.length };
                let (kind, (id, file)) = (lock_kind_of(lock.kind)?, fids.locked(fid)?);
                // Its ranges take at most twice the memory then.
                if kind.is_some() && reply.session_room() < file.lock_bytes().max(FID_BYTES) {
                    return Err(Errno::NOLCK);
                }
                Work::Lock { id, file: file.clone(), kind, range }
            }
            Request::Getlock { fid, lock } => {
                let range = LockRange { start: lock.start, length: lock.length };
                let kind = lock_kind_of(lock.kind)?.ok_or(Errno::INVAL)?;
                let (process, client) = (lock.process, lock.client.into());
                Work::Getlock { file: fids.open(fid)?.clone(), kind, range, process, client }
            }
            Request::Xattrwalk { fid, newfid, name } => {
                let node = shared(fids.node(fid)?);
                Work::Xattrwalk { id: fids.reserve(newfid)?, node, name: name.into(), open: None }
            }
            Request::Xattrcreate { fid, name, size, flags } => {
                fids.begin_value(fid, name, (size, flags))?;
                say(reply, tag, Reply::Xattrcreate {})?;
                return Ok(Next::Answered);
            }
        }))
    }

    /// Attaches to an export, or to a folder below one.
    fn attach(
        &self,
        session: &mut Session,
        (fid, afid): (u32, u32),
        uname: &[u8],
        aname: &[u8],
        n_uname: u32,
    ) -> Result<Next, Errno> {
        if afid != NO_FID {
            return Err(Errno::BADF);
        }
        let all = &self.core.exports.all;
        let (exported, below) = match (aname, all.as_slice()) {
            // There is no other that could be meant.
            (b"", [only]) => (only, Vec::new()),
            (path, _) => {
                let path = Path::new(std::ffi::OsStr::from_bytes(path));
                self.core.exports.of_path(path).ok_or(Errno::NOENT)?
            }
        };
        if !exported.admits(session.sender) {
            return Err(Errno::ACCESS);
        }
        let uid = match n_uname {
            NO_UID => std::str::from_utf8(uname).ok().and_then(|name| name.parse().ok()),
            uid => Some(uid),
        };
        let mut caller = uid.map_or_else(Credential::anonymous, Credential::of_user);
        let root = exported.export.root().clone();
        let has_groups = self.core.fs.has_groups(&mut caller, &root);
        let id = session.fids.reserve(fid)?;
        let names = below.iter().map(|name| name.as_os_str().as_bytes().into()).collect();
        let work = Work::Attach { id, caller: Arc::new(caller.clone()), root, names };
        Ok(if has_groups { Next::Lane(work) } else { Next::Attach(Box::new(caller), work) })
    }
}

/// The fid that a request makes, changes or gives back, or whose name it needs. Such requests of one fid run in their order.
fn changed_fid(request: &Request<'_>) -> Option<u32> {
    match request {
        Request::Walk { fid, newfid, names } if fid == newfid && names.is_empty() => None,
        Request::Walk { newfid: fid, .. }
        | Request::Xattrwalk { newfid: fid, .. }
        | Request::Attach { fid, .. }
        | Request::Lopen { fid, .. }
        | Request::Lcreate { fid, .. }
        | Request::Xattrcreate { fid, .. }
        | Request::Rename { fid, .. }
        | Request::Clunk { fid }
        | Request::Remove { fid } => Some(*fid),
        _ => None,
    }
}

/// Data that a reply of at most `msize` bytes has room for.
fn data_bytes(msize: u32, count: u32) -> u32 {
    count.min(msize.saturating_sub(READ_HEAD_BYTES as u32))
}

/// Answers at once.
fn say(reply: &mut Replies<'_>, tag: u16, answer: Reply<'_>) -> Result<(), Errno> {
    reply.message(|out| answer.put(tag, out)).map_err(|_| Errno::IO)
}

/// A message as it was received.
struct Input<'a> {
    bytes: &'a [u8],
    /// Of a message that was held: the framework counts no longer what is kept of it.
    uncounted_bytes: usize,
    /// Keeps a part of it.
    keep: &'a dyn Fn(Range<usize>) -> Chunk,
}

/// A request that a lane carries out, and the way back.
struct Job {
    core: Arc<Core>,
    way: Deferred,
    asked: Asked,
}

/// A request that was carried out, on its way back.
struct Ended {
    asked: Asked,
    done: Done,
    /// The request, if it was an open or about attributes, and went by the handle.
    unnamed: Option<Work>,
}

impl Job {
    fn submit(self, lanes: &Lanes, account: &Account, work: Work) {
        let share = self.core.fs.share_of(work.handle());
        lanes.submit_for(account, share, work.length(), work.bytes(), move |lane| self.run(work, lane));
    }

    /// On the lane. What it leaves to be synced is synced elsewhere before it is answered.
    fn run(self, work: Work, lane: &mut Lane) {
        let fs = Arc::clone(&self.core.fs);
        let (synced, undo) = match &work {
            Work::Fsync { file, data_only } => (Some(Owed::sync(file.clone(), *data_only)), None),
            work => (None, work.undo()),
        };
        let unnamed = work.by_handle();
        let (done, owed) = lane.owing(|lane| work.run(&fs, lane, self.asked.tag));
        lane.settle(&fs, synced.unwrap_or(owed), size_of::<Self>(), move |_, settled| match settled {
            Ok(()) => self.end_with(done, unnamed),
            Err(error) => self.end(Done { answer: Answer::Error(error.into()), change: undo }),
        });
    }

    fn end(self, done: Done) {
        self.end_with(done, None);
    }

    fn end_with(self, done: Done, unnamed: Option<Work>) {
        let Self { core: _, way, asked } = self;
        way.resume(Ended { asked, done, unnamed });
    }
}
