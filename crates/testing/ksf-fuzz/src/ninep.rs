//! 9P2000.L: whatever requests a connection sends, and in whatever order its work ends, each tag has one reply as the rules of Tflush
//! say, fids are those that the replies tell of, and all memory, fids and open files are given back with the connection.
//!
//! The input chooses messages, tags, fids, names, offsets, counts, and when the result of each lane arrives. Run as root the requests
//! have root's rights, so that nothing but the server keeps them in the export.

#[path = "../../../services/ksf-ninep/tests/common/driven.rs"]
mod driven;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use ksf_ninep::{MSIZE_MAX, Ninep, Settings};
use ksf_proto::p9::{
    Data, GetLock, Header, Lock, NO_FID, NO_TAG, NO_UID, Names, Reply, Request, SetStat, UNLINK_DIRECTORY, VERSION,
    WALK_NAMES_MAX, open_flag,
};
use ksf_test::wait_until;
use rustix::io::Errno;

use crate::exported::Exported;
use crate::input::{Choices, damage, name, number};
use driven::{Answered, Driven, Shard};

/// Steps of one input, at most.
const STEPS_MAX: usize = 48;
/// Fids of a connection, at most; requests name more.
const FIDS_MAX: usize = 6;
const FIDS: u8 = 9;
/// Few, so that they are used again.
const TAGS: u8 = 12;
/// What no other request of an input has.
const TAG_ALONE: u16 = NO_TAG - 1;

const ROOT: u32 = 0;
const FILE: u32 = 1;
const DIR: u32 = 2;

thread_local! {
    // Removed when the thread ends.
    static GROUND: RefCell<Ground> = RefCell::new(Ground::new());
}

/// Requests of one connection, which are in flight together.
pub fn ninep_requests(input: &[u8]) {
    GROUND.with_borrow_mut(|Ground { lanes_only, ninep, exported }| {
        exported.reset(ninep.files());
        let mut choices = Choices::new(input);
        let how = choices.byte();
        let mut fresh = (how & 1 == 1).then(|| Shard::new(Rc::clone(ninep)));
        let driven = Driven::new(fresh.as_mut().unwrap_or(lanes_only));
        Sequence::new(driven, choices, exported.path()).run(how & 2 == 2);
        wait_until("files are closed", || ninep.files().fs_counters().open_files == 0);
        exported.check(ninep.files());
    });
}

/// A server, and the folders that it may and may not change.
struct Ground {
    /// It has had its share of a turn that never ends, and answers nothing without a lane: an input is one schedule.
    lanes_only: Shard,
    // It ends before the folder is removed.
    ninep: Rc<Ninep>,
    exported: Exported,
}

impl Ground {
    fn new() -> Self {
        let mut exported = Exported::new();
        let settings = Settings { files: exported.settings(), msize_max: MSIZE_MAX, fids_max: FIDS_MAX };
        let ninep = Rc::new(Ninep::open(settings).expect("the folder is exported"));
        exported.started();
        exported.reset(ninep.files());
        let mut lanes_only = Shard::new(Rc::clone(&ninep));
        // All connections together have the share of three.
        for _ in 0..4 {
            let mut sequence = Sequence::new(Driven::new(&mut lanes_only), Choices::new(&[]), exported.path());
            sequence.driven.leave_all_to_lanes(ROOT);
            sequence.driven.end();
        }
        Self { lanes_only, ninep, exported }
    }
}

/// The reply that a request may have.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    effect: Effect,
    /// It cannot be carried out, so its reply is Rlerror.
    is_refused: bool,
}

/// What a request does to fids.
#[derive(Clone, Copy, Debug)]
enum Effect {
    None,
    /// It begins a session.
    Version,
    /// If so many names are found.
    Walked(u32, usize),
    Made(u32),
    /// Unless there is no such fid.
    Gone(u32),
}

impl Effect {
    fn of(request: Request<'_>) -> Self {
        match request {
            Request::Version { .. } => Self::Version,
            Request::Walk { fid, newfid, names } if fid != newfid => Self::Walked(newfid, names.len()),
            Request::Attach { fid, .. } | Request::Xattrwalk { newfid: fid, .. } => Self::Made(fid),
            Request::Clunk { fid } | Request::Remove { fid } => Self::Gone(fid),
            _ => Self::None,
        }
    }

    /// The fid that was made, or given back.
    fn change(self, reply: Reply<'_>) -> Option<(u32, bool)> {
        match (self, reply) {
            (Self::Walked(fid, names), Reply::Walk { qids }) => (qids.len() == names).then_some((fid, true)),
            (Self::Gone(fid), reply) => (!is_error(reply, Errno::BADF)).then_some((fid, false)),
            (_, Reply::Lerror { .. }) => None,
            (Self::Made(fid), _) => Some((fid, true)),
            _ => None,
        }
    }
}

fn is_error(reply: Reply<'_>, errno: Errno) -> bool {
    reply == Reply::Lerror { ecode: errno.raw_os_error() as u32 }
}

/// What becomes of a connection after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Open,
    /// The server reads no more, and answers what it has read.
    Closed,
    /// The client's next messages are inside of one with a wrong size.
    Lost,
}

struct Sequence<'a> {
    driven: Driven<'a, Wanted>,
    choices: Choices<'a>,
    export: PathBuf,
    /// 0: there is no session.
    msize: u32,
    /// Fids of the session when all requests so far were answered.
    fids: BTreeSet<u32>,
    /// By the number of the request: fids that were made and given back since. Those of one fid take effect in the order of the
    /// requests.
    changes: BTreeMap<u64, (u32, bool)>,
}

impl<'a> Sequence<'a> {
    /// A connection with an attach, an open file and a directory.
    fn new(mut driven: Driven<'a, Wanted>, choices: Choices<'a>, export: PathBuf) -> Self {
        let mut buffers = [Vec::new(), Vec::new()];
        let [file, dir] = &mut buffers;
        let one = |name: &'static [u8], buffer| Names::of(&[name], buffer).expect("a name");
        for request in [
            Request::Version { msize: MSIZE_MAX, version: VERSION },
            Request::Attach { fid: ROOT, afid: NO_FID, uname: b"", aname: b"", n_uname: 0 },
            Request::Walk { fid: ROOT, newfid: FILE, names: one(b"file", file) },
            Request::Lopen { fid: FILE, flags: open_flag::READ_WRITE },
            Request::Walk { fid: ROOT, newfid: DIR, names: one(b"dir", dir) },
        ] {
            let reply = driven.alone(TAG_ALONE, request);
            assert!(!matches!(Reply::parse(&reply), Ok((_, Reply::Lerror { .. }))), "{request:?}");
        }
        let (fids, changes) = (BTreeSet::from([ROOT, FILE, DIR]), BTreeMap::new());
        Self { driven, choices, export, msize: MSIZE_MAX, fids, changes }
    }

    /// `is_cut`: the connection ends with requests that are not answered.
    fn run(mut self, is_cut: bool) {
        let mut after = After::Open;
        for _ in 0..STEPS_MAX {
            if after != After::Open || self.choices.rest().is_empty() {
                break;
            }
            after = self.step();
        }
        if !is_cut && after != After::Lost {
            self.settle();
            assert_eq!(self.driven.connection.finished().is_some(), after == After::Closed);
            if after == After::Open {
                self.clunk_all();
            }
        }
        self.driven.end();
    }

    fn step(&mut self) -> After {
        match self.choices.byte() {
            0..=79 if self.driven.results() > 0 => {
                let at = usize::from(self.choices.byte()) % self.driven.results();
                self.deliver(at);
            }
            80..=87 => self.settle(),
            88..=89 => return self.lie(),
            how => return self.ask(how),
        }
        After::Open
    }

    fn deliver(&mut self, at: usize) {
        let answered = self.driven.deliver(at);
        self.look(answered);
    }

    /// Delivers everything, and applies what was told of fids.
    fn settle(&mut self) {
        loop {
            while self.driven.results() > 0 {
                self.deliver(0);
            }
            // What a Tversion ended has no reply, and may still be under way beside the lanes.
            if self.driven.outstanding() == 0 && self.driven.connection.owed_bytes() == 0 {
                break;
            }
            self.driven.wait();
        }
        for (fid, is_made) in std::mem::take(&mut self.changes).into_values() {
            let is_right = if is_made { self.fids.insert(fid) } else { self.fids.remove(&fid) };
            assert!(is_right, "fid {fid} is made twice, or given back and was none: {is_made}");
        }
    }

    /// The fids are those that the replies tell of, and no other takes memory.
    fn clunk_all(&mut self) {
        for fid in std::mem::take(&mut self.fids) {
            let message = self.driven.alone(TAG_ALONE, Request::Clunk { fid });
            let (_, reply) = Reply::parse(&message).expect("a reply");
            assert!(!is_error(reply, Errno::BADF), "fid {fid} is none");
        }
        assert_eq!(self.driven.connection.session_bytes(), 0, "a fid of which no reply tells");
    }

    /// Sends a message with a size that is not its length. All that can be told of its replies is that they are such.
    fn lie(&mut self) -> After {
        let mut message = Vec::new();
        put_request(&mut self.choices, 0, &self.export, &mut message);
        message[..4].copy_from_slice(&(number(&mut self.choices) as u32).to_le_bytes());
        let mut replies = self.driven.send(&message);
        while self.driven.results() > 0 {
            replies.extend(self.driven.deliver_any(0));
        }
        assert!(replies.iter().all(|reply| Reply::parse(reply).is_ok()), "{replies:?}");
        After::Lost
    }

    fn ask(&mut self, how: u8) -> After {
        let tag = match self.choices.byte() {
            240.. => NO_TAG,
            tag => u16::from(tag % TAGS),
        };
        let mut message = Vec::new();
        match how {
            // Any type, and any fields.
            252.. => message = [&[0; 4], &[self.choices.byte()][..], &tag.to_le_bytes(), self.choices.bytes()].concat(),
            _ => put_request(&mut self.choices, tag, &self.export, &mut message),
        }
        if (244..252).contains(&how) {
            let mut fields = message.split_off(4);
            damage(&mut self.choices, &mut fields);
            message.extend(fields);
        }
        let size = message.len() as u32;
        message[..4].copy_from_slice(&size.to_le_bytes());
        self.send(&message)
    }

    fn send(&mut self, message: &[u8]) -> After {
        let (header, request) = (Header::parse(message), Request::parse(message).map(|(_, request)| request));
        let is_version = matches!(request, Ok(Request::Version { .. }));
        let is_tag_free = header.is_ok_and(|Header { tag, .. }| is_version || !self.driven.is_outstanding(tag));
        if !is_tag_free {
            assert!(self.driven.send(message).is_empty(), "it has no reply");
            assert!(self.driven.connection.is_closing(), "it ends the connection");
            return After::Closed;
        }
        if is_version {
            self.fids.clear();
            self.changes.clear();
        }
        let is_fine = is_version || self.msize > 0 && message.len() <= self.msize as usize;
        let wanted = match request {
            Ok(request) if is_fine => Wanted { effect: Effect::of(request), is_refused: false },
            _ => Wanted { effect: Effect::None, is_refused: true },
        };
        let serial = self.driven.next_serial();
        let answered = self.driven.ask(message, wanted);
        let connection = &self.driven.connection;
        assert!(!connection.is_closing() && connection.unfinished_bytes() == 0, "request {serial}: {request:?}");
        self.look(answered);
        After::Open
    }

    fn look(&mut self, answered: Vec<Answered<Wanted>>) {
        for Answered { serial, wanted, message } in answered {
            let (_, reply) = Reply::parse(&message).expect("a reply");
            let is_error = matches!(reply, Reply::Lerror { .. });
            assert!(is_error || !wanted.is_refused, "{reply:?}");
            if let Effect::Version = wanted.effect {
                self.msize = match reply {
                    Reply::Version { msize, version: VERSION } => msize,
                    _ => 0,
                };
            }
            assert!(self.msize == 0 || message.len() <= self.msize as usize, "{} bytes", message.len());
            if let Some(change) = wanted.effect.change(reply) {
                self.changes.insert(serial, change);
            }
        }
    }
}

fn fid(choices: &mut Choices<'_>) -> u32 {
    match choices.byte() {
        250.. => NO_FID,
        chosen => u32::from(chosen % FIDS),
    }
}

fn flags(choices: &mut Choices<'_>) -> u32 {
    use open_flag::{APPEND, DIRECTORY, EXCLUSIVE, READ_WRITE, TRUNCATE, WRITE};
    match choices.byte() {
        240.. => number(choices) as u32,
        chosen => [0, READ_WRITE, WRITE | TRUNCATE, READ_WRITE | EXCLUSIVE, WRITE | APPEND, DIRECTORY]
            [usize::from(chosen) % 6],
    }
}

/// A well-formed request of the type that the first byte chooses.
fn put_request(choices: &mut Choices<'_>, tag: u16, export: &Path, out: &mut Vec<u8>) {
    let (_, kind) = Request::KINDS[usize::from(choices.byte()) % Request::KINDS.len()];
    let mut put = |request: Request<'_>| request.put(tag, out).expect("it fits");
    let u32_of = |choices: &mut Choices<'_>| number(choices) as u32;
    let gid = NO_UID;
    match kind {
        "statfs" => put(Request::Statfs { fid: fid(choices) }),
        "lopen" => put(Request::Lopen { fid: fid(choices), flags: flags(choices) }),
        "lcreate" => {
            let (fid, name) = (fid(choices), name(choices));
            put(Request::Lcreate { fid, name: &name, flags: flags(choices), mode: u32_of(choices), gid });
        }
        "symlink" => {
            let (dfid, name, target) = (fid(choices), name(choices), name(choices));
            // The longest that there are.
            let target = if choices.byte() > 200 { vec![b'n'; 4095] } else { target };
            put(Request::Symlink { dfid, name: &name, target: &target, gid });
        }
        "mknod" => {
            let (dfid, name, mode) = (fid(choices), name(choices), u32_of(choices));
            put(Request::Mknod { dfid, name: &name, mode, major: u32_of(choices), minor: u32_of(choices), gid });
        }
        "rename" => put(Request::Rename { fid: fid(choices), dfid: fid(choices), name: &name(choices) }),
        "readlink" => put(Request::Readlink { fid: fid(choices) }),
        "getattr" => put(Request::Getattr { fid: fid(choices), mask: number(choices) }),
        "setattr" => {
            let (fid, valid) = (fid(choices), u32_of(choices));
            let (mode, uid, gid) = (u32_of(choices), u32_of(choices), u32_of(choices));
            let (size, atime_nanos, mtime_seconds) = (number(choices), number(choices), number(choices));
            let to = SetStat { valid, mode, uid, gid, size, atime_nanos, mtime_seconds, ..SetStat::default() };
            put(Request::Setattr { fid, to });
        }
        "xattrwalk" => {
            let (fid, newfid) = (fid(choices), fid(choices));
            let name = if choices.byte() & 1 == 1 { b"user.a".to_vec() } else { name(choices) };
            put(Request::Xattrwalk { fid, newfid, name: &name });
        }
        "xattrcreate" => {
            let (fid, size) = (fid(choices), number(choices));
            put(Request::Xattrcreate { fid, name: b"user.a", size, flags: u32_of(choices) });
        }
        "readdir" => put(Request::Readdir { fid: fid(choices), offset: number(choices), count: u32_of(choices) }),
        "fsync" => put(Request::Fsync { fid: fid(choices), datasync: u32_of(choices) }),
        "lock" => {
            let (fid, kind, client) = (fid(choices), choices.byte() % 4, name(choices));
            let (flags, start, length) = (u32_of(choices), number(choices), number(choices));
            put(Request::Lock { fid, lock: Lock { kind, flags, start, length, process: 1, client: &client } });
        }
        "getlock" => {
            let (fid, kind, client) = (fid(choices), choices.byte() % 4, name(choices));
            let (start, length) = (number(choices), number(choices));
            put(Request::Getlock { fid, lock: GetLock { kind, start, length, process: 1, client: &client } });
        }
        "link" => put(Request::Link { dfid: fid(choices), fid: fid(choices), name: &name(choices) }),
        "mkdir" => put(Request::Mkdir { dfid: fid(choices), name: &name(choices), mode: u32_of(choices), gid }),
        "renameat" => {
            let (olddirfid, oldname) = (fid(choices), name(choices));
            put(Request::Renameat { olddirfid, oldname: &oldname, newdirfid: fid(choices), newname: &name(choices) });
        }
        "unlinkat" => {
            let (dirfid, name) = (fid(choices), name(choices));
            let flags = if choices.byte() & 1 == 1 { UNLINK_DIRECTORY } else { u32_of(choices) };
            put(Request::Unlinkat { dirfid, name: &name, flags });
        }
        "version" => {
            let msize = u32_of(choices);
            let version = if choices.byte() < 200 { VERSION.to_vec() } else { name(choices) };
            put(Request::Version { msize, version: &version });
        }
        "auth" => put(Request::Auth { afid: fid(choices), uname: b"", aname: b"", n_uname: 0 }),
        "attach" => {
            let (fid, who) = (fid(choices), usize::from(choices.byte()));
            let afid = if who < 240 { NO_FID } else { u32_of(choices) };
            let below = ["", "dir", "out", "..", "file", "dir/inner"][usize::from(choices.byte()) % 6];
            let aname = if below.is_empty() { PathBuf::new() } else { export.join(below) };
            let aname = aname.as_os_str().as_encoded_bytes();
            put(Request::Attach { fid, afid, uname: b"fuzz", aname, n_uname: [0, 1001, NO_UID][who % 3] });
        }
        "flush" => put(Request::Flush { oldtag: u16::from(choices.byte() % TAGS) }),
        "walk" => {
            let (fid, newfid, names) = (fid(choices), fid(choices), usize::from(choices.byte()) % 24);
            // Mostly few.
            let names = if names > WALK_NAMES_MAX { 1 } else { names };
            let names: Vec<Vec<u8>> = (0..names).map(|_| name(choices)).collect();
            let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
            put(Request::Walk { fid, newfid, names: Names::of(&names, &mut Vec::new()).expect("16 at most") });
        }
        "read" => put(Request::Read { fid: fid(choices), offset: number(choices), count: u32_of(choices) }),
        "write" => {
            let (fid, offset) = (fid(choices), number(choices));
            // A file has no more, so that memory does not run out.
            let offset = if offset < 1 << 40 { offset % (1 << 21) } else { offset };
            let data = vec![7; usize::from(choices.byte()) * 33];
            put(Request::Write { fid, offset, data: Data(&data) });
        }
        "clunk" => put(Request::Clunk { fid: fid(choices) }),
        "remove" => put(Request::Remove { fid: fid(choices) }),
        other => unreachable!("{other} is no request"),
    }
}
