//! A connection whose seed decides the order of everything: requests, flushes, and when the result of each lane arrives. `ksf-sim`
//! simulates shards and their sockets; here the file layer and its lanes are real, and only their results are put in an order.
//!
//! The test is the shard ([`Driven`]). It hands a request to the service, waits until the lanes have carried it out, and keeps the result
//! until the seed delivers it. So one seed is one schedule.

use std::collections::BTreeMap;
use std::fs;
use std::rc::Rc;

use crate::common::{Answered, Driven, FIDS_MAX, Place, ROOT, Shard};
use ksf_ninep::{MSIZE_MAX, Ninep, Settings};
use ksf_proto::p9::{Data, NO_FID, NO_TAG, Names, Reply, Request, VERSION, open_flag, qid_kind};
use ksf_test::{Random, effort};

/// Fids of a connection are below this. Each but the root's has files of its own.
const FIDS: u32 = 5;
const FILES: u8 = 2;
/// Tags that are used again as soon as they are free.
const TAGS: u16 = 16;
/// Behind the first bytes of a file, which are its name.
const WRITE_AT: u64 = 100;

fn name(fid: u32, file: u8) -> String {
    format!("{fid}-{file}")
}

/// A file of a fid: the number in its name, and the number of the name that is its text. `None`: it was created anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct File {
    name: u8,
    text: Option<u8>,
}

/// What a fid is when all requests that were sent are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Root,
    Closed(File),
    Open(File),
    /// The names of the root's extended attributes.
    Value,
}

#[derive(Debug)]
enum Wanted {
    /// The result of a request that changes this fid, which has that state then.
    Change(u32, Result<(), i32>),
    /// A reply about this fid in one of these states.
    Seen(u32, Vec<State>),
    Flush,
}

/// The states of a fid from the last one that is known to have been reached, each with the number of the request that leads there.
type History = Vec<(u64, State)>;

/// One server, with a connection after the other.
struct Server {
    shard: Shard,
    place: Place,
}

impl Server {
    fn new() -> Self {
        let place = Place::new();
        let settings = Settings { files: place.files(vec![place.export()]), msize_max: MSIZE_MAX, fids_max: FIDS_MAX };
        Self { shard: Shard::new(Rc::new(Ninep::open(settings).unwrap())), place }
    }
}

/// Texts of all files, as [`File`] has them.
type Files = BTreeMap<String, Option<u8>>;

fn files_of(place: &Place) -> Files {
    let entries = fs::read_dir(place.path("")).unwrap();
    let name_and_text = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let bytes = fs::read(place.path(&name)).unwrap();
        let text = (0..FILES).find(|file| bytes.starts_with(format!("{}{file}", &name[..2]).as_bytes()));
        assert!(text.is_some() || bytes.iter().take(3).all(|byte| *byte == 0), "{name}: {bytes:?}");
        (name, text)
    };
    entries.map(name_and_text).collect()
}

struct Flight<'a> {
    driven: Driven<'a, Wanted>,
    place: &'a Place,
    random: Random,
    fids: BTreeMap<u32, History>,
    files: Files,
    /// What the framework counts for one fid.
    fid_bytes: usize,
    value_bytes: usize,
    /// Tags and types of the replies.
    seen: Vec<(u16, u8)>,
}

impl<'a> Flight<'a> {
    fn new(server: &'a mut Server, random: Random) -> Self {
        let Server { shard, place } = server;
        for fid in 1..FIDS {
            for file in 0..FILES {
                fs::write(place.path(&name(fid, file)), name(fid, file)).unwrap();
            }
        }
        let (fids, files, seen) = Default::default();
        let (driven, fid_bytes, value_bytes) = (Driven::new(shard), 0, 0);
        let mut flight = Self { driven, place, random, fids, files, fid_bytes, value_bytes, seen };
        flight.restart();
        flight.fid_bytes = flight.driven.connection.session_bytes();
        flight.driven.alone(0, Request::Xattrwalk { fid: ROOT, newfid: 1, name: b"" });
        flight.value_bytes = flight.driven.connection.session_bytes() - 2 * flight.fid_bytes;
        flight.driven.alone(0, Request::Clunk { fid: 1 });
        flight.driven.leave_all_to_lanes(ROOT);
        flight
    }

    /// A session begins. What was asked in the one before is not answered any more.
    fn restart(&mut self) {
        let before = self.driven.results();
        let reply = self.driven.alone(NO_TAG, Request::Version { msize: MSIZE_MAX, version: VERSION });
        assert_eq!(Reply::parse(&reply), Ok((NO_TAG, Reply::Version { msize: MSIZE_MAX, version: VERSION })));
        // The requests that waited for others come to nothing, in no order.
        while self.driven.results() > before {
            assert!(self.driven.deliver(before).is_empty(), "an answer of the session before");
        }
        assert_eq!(self.driven.connection.session_bytes(), 0, "fids of the session before");
        self.driven.alone(0, Request::Attach { fid: ROOT, afid: NO_FID, uname: b"", aname: b"", n_uname: 0 });
        self.fids = (0..FIDS).map(|fid| (fid, vec![(0, State::Absent)])).collect();
        self.fids.insert(ROOT, vec![(0, State::Root)]);
        // Requests that waited in the session before have changed nothing.
        self.files = files_of(self.place);
    }

    fn state(&self, fid: u32) -> State {
        self.fids[&fid].last().unwrap().1
    }

    /// A request comes in with a tag that is free. All of one fid that change it have their results in the order of their sending.
    fn ask(&mut self, request: Request<'_>, wanted: Wanted) {
        let free: Vec<u16> = (1..=TAGS).filter(|tag| !self.driven.is_outstanding(*tag)).collect();
        let mut message = Vec::new();
        request.put(self.random.pick(&free), &mut message).unwrap();
        let answered = self.driven.ask(&message, wanted);
        self.look(answered);
    }

    /// Any request that changes this fid, and what comes of it.
    fn change(&mut self, fid: u32) {
        use State::{Absent, Closed, Open, Root, Value};
        let file = self.random.below(FILES.into()) as u8;
        let own = name(fid, file);
        let mut buffer = Vec::new();
        let names = Names::of(&[own.as_bytes()], &mut buffer).unwrap();
        let text = self.files.get(&own).copied();
        let found = text.map(|text| Closed(File { name: file, text })).ok_or(libc::ENOENT);
        let (flags, gid) = (open_flag::READ_WRITE, rustix::process::getegid().as_raw());
        let state = self.state(fid);
        let made = |made| if state == Absent { made } else { Err(libc::EINVAL) };
        let (request, next) = match self.random.within(0..=11) {
            0 | 1 => (Request::Walk { fid: ROOT, newfid: fid, names }, made(found)),
            2 => (Request::Walk { fid: ROOT, newfid: fid, names: Names::default() }, made(Ok(Root))),
            3 => (Request::Xattrwalk { fid: ROOT, newfid: fid, name: b"" }, made(Ok(Value))),
            4 => (
                Request::Walk { fid, newfid: fid, names },
                match state {
                    Absent | Value => Err(libc::EBADF),
                    Root => found,
                    Closed(_) => Err(libc::ENOTDIR),
                    Open(_) => Err(libc::EINVAL),
                },
            ),
            5 | 6 => (
                Request::Lopen { fid, flags },
                match state {
                    Absent | Value => Err(libc::EBADF),
                    Root => Err(libc::EISDIR),
                    Closed(file) => Ok(Open(file)),
                    Open(_) => Err(libc::EINVAL),
                },
            ),
            7 => (
                Request::Lcreate { fid, name: own.as_bytes(), flags, mode: 0o600, gid },
                match state {
                    Absent | Value => Err(libc::EBADF),
                    Root => Ok(Open(File { name: file, text: text.flatten() })),
                    Closed(_) => Err(libc::ENOTDIR),
                    Open(_) => Err(libc::EINVAL),
                },
            ),
            8 | 9 => (
                Request::Rename { fid, dfid: ROOT, name: own.as_bytes() },
                match state {
                    Absent | Value => Err(libc::EBADF),
                    // It has no name.
                    Root => Err(libc::EINVAL),
                    Closed(moved) => Ok(Closed(File { name: file, ..moved })),
                    Open(moved) => Ok(Open(File { name: file, ..moved })),
                },
            ),
            10 => (Request::Clunk { fid }, if state == Absent { Err(libc::EBADF) } else { Ok(Absent) }),
            _ => (
                Request::Remove { fid },
                match state {
                    Absent => Err(libc::EBADF),
                    // It has no name, and its fid is given back all the same.
                    Root | Value => Err(libc::EINVAL),
                    Closed(_) | Open(_) => Ok(Absent),
                },
            ),
        };
        let later = if let Request::Remove { .. } = request { Absent } else { next.unwrap_or(state) };
        if let (Request::Remove { .. } | Request::Rename { .. }, Closed(before) | Open(before)) = (request, state) {
            self.files.remove(&name(fid, before.name));
        }
        if let (Request::Lcreate { .. } | Request::Rename { .. }, Ok(Closed(now) | Open(now))) = (request, next) {
            self.files.insert(own.clone(), now.text);
        }
        self.fids.get_mut(&fid).unwrap().push((self.driven.next_serial(), later));
        self.ask(request, Wanted::Change(fid, next.map(|_| ())));
    }

    /// Any request about a fid, which starts at once and changes none.
    fn see(&mut self, fid: u32) {
        let request = match self.random.within(0..=2) {
            0 => Request::Read { fid, offset: 0, count: 3 },
            1 => Request::Write { fid, offset: WRITE_AT, data: Data(b"x") },
            _ => Request::Getattr { fid, mask: 0 },
        };
        let states = self.fids[&fid].iter().map(|(_, state)| *state).collect();
        self.ask(request, Wanted::Seen(fid, states));
    }

    /// Mostly of a request that is not answered: also of a flush, and of one that was flushed before.
    fn flush(&mut self) {
        let oldtag = 1 + self.random.below(u64::from(TAGS)) as u16;
        self.ask(Request::Flush { oldtag }, Wanted::Flush);
    }

    /// Looks at replies in their order.
    fn look(&mut self, answered: Vec<Answered<Wanted>>) {
        for answered in answered {
            let (tag, reply) = Reply::parse(&answered.message).unwrap();
            self.seen.push((tag, reply.kind()));
            let result = if let Reply::Lerror { ecode } = reply { Err(ecode as i32) } else { Ok(()) };
            match answered.wanted {
                Wanted::Change(fid, wanted) => {
                    assert_eq!(result, wanted, "fid {fid}: {reply:?}");
                    // What it was before is over.
                    let history = self.fids.get_mut(&fid).unwrap();
                    if let Some(at) = history.iter().position(|(serial, _)| *serial == answered.serial) {
                        history.drain(..at);
                    }
                }
                Wanted::Seen(fid, states) => {
                    let is_right = states.iter().any(|state| is_seen(fid, *state, &reply));
                    assert!(is_right, "fid {fid} is one of {states:?}: {reply:?}");
                }
                Wanted::Flush => assert_eq!(result, Ok(())),
            }
        }
    }

    /// Delivers one of the results that are kept back.
    fn deliver_one(&mut self) {
        let at = self.random.within(0..=self.driven.results() - 1);
        let answered = self.driven.deliver(at);
        self.look(answered);
    }

    fn deliver_all(&mut self) {
        while self.driven.results() > 0 {
            self.deliver_one();
        }
        assert_eq!(self.driven.outstanding(), 0, "requests without an answer");
    }

    /// Delivers everything, and looks at what is there then.
    fn settle(&mut self) {
        self.deliver_all();
        let connection = &self.driven.connection;
        assert!(!connection.is_closing());
        assert_eq!(connection.owed_bytes(), 0);
        let fids = self.fids.keys().filter(|fid| self.state(**fid) != State::Absent).count();
        let values = self.fids.keys().filter(|fid| self.state(**fid) == State::Value).count();
        let bytes = fids * self.fid_bytes + values * self.value_bytes;
        assert_eq!(connection.session_bytes(), bytes, "fids are {:?}", self.fids);
        assert_eq!(files_of(self.place), self.files);
        for fid in 0..FIDS {
            assert_eq!(self.fids[&fid].len(), 1, "the state is known");
            for request in [Request::Getattr { fid, mask: 0 }, Request::Read { fid, offset: 0, count: 3 }] {
                self.ask(request, Wanted::Seen(fid, vec![self.state(fid)]));
            }
        }
        self.deliver_all();
    }

    fn step(&mut self) {
        let fid = 1 + self.random.below(u64::from(FIDS) - 1) as u32;
        match self.random.within(0..=99) {
            0 => self.restart(),
            1 | 2 => self.settle(),
            3..=44 if self.driven.results() > 0 => self.deliver_one(),
            // The others need a tag.
            _ if self.driven.outstanding() == usize::from(TAGS) => self.settle(),
            45..=69 => self.change(fid),
            70..=84 => self.see(fid),
            _ => self.flush(),
        }
    }

    fn end(self) -> Vec<(u16, u8)> {
        self.driven.end();
        self.seen
    }
}

/// True if a reply is one about a fid in this state.
fn is_seen(fid: u32, state: State, reply: &Reply<'_>) -> bool {
    use State::{Absent, Closed, Open, Root, Value};
    match (state, reply) {
        (Absent, Reply::Lerror { ecode }) => *ecode == libc::EBADF as u32,
        (Root, Reply::Getattr { stat }) => stat.qid.kind == qid_kind::DIRECTORY,
        (Closed(_) | Open(_), Reply::Getattr { stat }) => stat.qid.kind != qid_kind::DIRECTORY,
        (Root | Closed(_) | Value, Reply::Lerror { ecode }) => *ecode == libc::EBADF as u32,
        (Open(_), Reply::Write { count }) => *count == 1,
        (Open(File { text: Some(text), .. }), Reply::Read { data }) => data.0 == name(fid, text).as_bytes(),
        (Open(_), Reply::Read { data }) => data.0.iter().all(|byte| *byte == 0),
        (Value, Reply::Read { .. }) => true,
        _ => false,
    }
}

/// Three connections to one server. Tags and types of their replies.
fn run(seed: u64) -> Vec<(u16, u8)> {
    let mut random = Random::of_test(seed);
    let mut server = Server::new();
    let flights = (0..3).map(|_| {
        let mut flight = Flight::new(&mut server, Random::new(random.bits()));
        (0..200).for_each(|_| flight.step());
        flight.end()
    });
    flights.flatten().collect()
}

#[test]
fn every_order_of_results_answers_each_tag_once_and_leaves_the_fids_of_the_requests() {
    (0..effort(40, 4000)).for_each(|seed| drop(run(seed)));
}

#[test]
fn a_seed_gives_one_schedule() {
    let seen = run(1);
    assert!(seen.len() > 200, "{} replies", seen.len());
    assert_eq!(seen, run(1));
}
