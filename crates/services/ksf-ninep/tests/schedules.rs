//! A connection whose seed decides the order of everything: requests, flushes, and when the result of each lane arrives.
//!
//! The test is the shard. It hands a request to the service, waits until the lanes have carried it out, and keeps the result until the
//! seed delivers it. So lanes work one after the other, and one seed is one schedule.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

use crate::common::{FIDS_MAX, Place, ROOT};
use ksf::connection::Connection;
use ksf::deferred::Delivery;
use ksf::env::Env;
use ksf::limits::{Limits, Time};
use ksf::pool::{Memory, Pool};
use ksf::service::ConnKey;
use ksf::session::OnShard;
use ksf::{Peer, Service, Turn};
use ksf_ninep::{MSIZE_MAX, Ninep, NinepService, Settings};
use ksf_proto::p9::{Data, NO_FID, NO_TAG, Names, Reply, Request, VERSION, open_flag, qid_kind};
use ksf_test::{Random, effort, wait_until};

/// Fids of a connection are below this. Each but the root's has files of its own.
const FIDS: u32 = 5;
const FILES: u8 = 2;
/// Tags that are used again as soon as they are free.
const TAGS: u16 = 16;
/// Requests that a shard answers in a turn without a lane are fewer, and the turn of this test never ends. All later ones take a lane,
/// whatever the kernel has in memory.
const WARM_MAX: usize = 250;
const SLOT_BYTES: usize = 4096;
/// Behind the first bytes of a file, which are its name.
const WRITE_AT: u64 = 100;

fn name(fid: u32, file: u8) -> String {
    format!("{fid}-{file}")
}

/// What a fid is when all requests that were sent are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Root,
    File(u8),
    Open(u8),
}

/// A request that is not answered.
#[derive(Debug)]
struct Asked {
    /// Its number; tags are used again.
    serial: u64,
    kind: u8,
    wanted: Wanted,
}

#[derive(Debug)]
enum Wanted {
    /// The result of a request that changes this fid, which has that state then.
    Change(u32, Result<(), i32>),
    /// A reply about this fid in one of these states.
    Seen(u32, Vec<State>),
    /// The request with this number is answered before, if there is one.
    Flush(Option<u64>),
}

/// The states of a fid from the last one that is known to have been reached, each with the number of the request that leads there.
type History = Vec<(u64, State)>;

/// One server with a connection after the other, each with results that are on their way.
struct Shard {
    env: Env,
    on: OnShard<NinepService>,
    ninep: Ninep,
    place: Place,
    connections: u32,
}

impl Shard {
    fn new() -> Self {
        let place = Place::new();
        let settings = Settings { files: place.files(vec![place.export()]), msize_max: MSIZE_MAX, fids_max: FIDS_MAX };
        let ninep = Ninep::open(settings).unwrap();
        let service = Arc::new(ninep.service("9p"));
        let pool = Pool::new(Memory::Anonymous, SLOT_BYTES as u32, 64).unwrap();
        let mut env = Env::new(Limits::default(), pool).unwrap();
        let state = service.start(&mut Turn::new(&mut env)).unwrap();
        Self { env, on: OnShard::new(service, state), ninep, place, connections: 0 }
    }

    /// Results of the lanes, when these have nothing to do any more.
    fn results(&self) -> Vec<Delivery> {
        let counters = || self.ninep.files().lane_counters();
        wait_until("the lanes are idle", || {
            let counters = counters();
            counters.queued_jobs + counters.running_jobs + counters.queued_syncs == 0
        });
        self.env.mailbox.take_deliveries()
    }

    /// Files that each fid has.
    fn files(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.place.path("")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

struct Flight<'a> {
    shard: &'a mut Shard,
    connection: Box<Connection>,
    random: Random,
    /// Results that are kept back.
    pending: Vec<Delivery>,
    asked: BTreeMap<u16, Asked>,
    serial: u64,
    fids: BTreeMap<u32, History>,
    files: BTreeSet<String>,
    /// What the framework counts for one fid.
    fid_bytes: usize,
    /// Tags and types of the replies.
    seen: Vec<(u16, u8)>,
}

impl<'a> Flight<'a> {
    fn new(shard: &'a mut Shard, random: Random) -> Self {
        for fid in 1..FIDS {
            for file in 0..FILES {
                fs::write(shard.place.path(&name(fid, file)), name(fid, file)).unwrap();
            }
        }
        let key = ConnKey { index: 0, generation: shard.connections };
        shard.connections += 1;
        let connection = Connection::new(shard.on.clone(), Peer::Unix, key, Time(0)).unwrap();
        let (pending, asked, fids, files, seen) = Default::default();
        let mut flight = Self { shard, connection, random, pending, asked, serial: 0, fids, files, fid_bytes: 0, seen };
        flight.restart();
        flight.fid_bytes = flight.connection.session_bytes();
        for _ in 0..WARM_MAX {
            flight.alone(Request::Getattr { fid: ROOT, mask: 0 });
        }
        flight
    }

    /// What is to be sent now.
    fn output(&mut self) -> Vec<Vec<u8>> {
        let (env, mut sent) = (&mut self.shard.env, Vec::new());
        while let Some(batch) = self.connection.take_batch(Time(0), &mut env.spares) {
            let mut slices: [&[u8]; 64] = [&[]; 64];
            let filled = batch.slices(&mut slices);
            let bytes = slices[..filled].concat();
            assert_eq!(bytes.len(), batch.len(), "the batch has more than 64 pieces");
            self.connection.sent(bytes.len(), true, env);
            sent.extend(bytes);
        }
        assert_eq!(self.connection.finished(), None);
        let mut rest = sent.as_slice();
        std::iter::from_fn(|| {
            let size = u32::from_le_bytes(*rest.first_chunk()?);
            let (message, behind) = rest.split_at(size as usize);
            rest = behind;
            Some(message.to_vec())
        })
        .collect()
    }

    /// Hands a request to the service. What came of it is on its way then.
    fn receive(&mut self, tag: u16, request: Request<'_>) -> Vec<Vec<u8>> {
        let mut message = Vec::new();
        request.put(tag, &mut message).unwrap();
        let mut slot = self.shard.env.pool.take().expect("a free slot");
        slot.as_mut_slice()[..message.len()].copy_from_slice(&message);
        self.connection.receive(slot.freeze(message.len()), &mut self.shard.env);
        self.output()
    }

    fn deliver(&mut self, delivery: Delivery) -> Vec<Vec<u8>> {
        assert!(self.connection.deliver(delivery, &mut self.shard.env), "nothing waits for it");
        self.pending.extend(self.shard.results());
        self.output()
    }

    /// A request that has its reply before anything else happens.
    fn alone(&mut self, request: Request<'_>) {
        let mut replies = self.receive(0, request);
        while replies.is_empty() {
            let mut results = Vec::new();
            wait_until("there is a result", || {
                results = self.shard.results();
                !results.is_empty()
            });
            for delivery in results {
                assert!(self.connection.deliver(delivery, &mut self.shard.env));
            }
            replies = self.output();
        }
        let [reply] = replies.as_slice() else { panic!("{request:?}: {} replies", replies.len()) };
        let (tag, reply) = Reply::parse(reply).unwrap();
        assert_eq!((tag, reply.kind()), (0, request.kind() + 1), "{request:?}: {reply:?}");
    }

    /// A session begins. What was asked in the one before is not answered any more.
    fn restart(&mut self) {
        let replies = self.receive(NO_TAG, Request::Version { msize: MSIZE_MAX, version: VERSION });
        let [reply] = replies.as_slice() else { panic!("{} replies", replies.len()) };
        assert_eq!(Reply::parse(reply), Ok((NO_TAG, Reply::Version { msize: MSIZE_MAX, version: VERSION })));
        // The requests that waited for others come to nothing, in no order.
        for delivery in self.shard.results() {
            assert_eq!(self.deliver(delivery), [[]; 0], "an answer of the session before");
        }
        self.asked.clear();
        assert_eq!(self.connection.session_bytes(), 0, "fids of the session before");
        self.alone(Request::Attach { fid: ROOT, afid: NO_FID, uname: b"", aname: b"", n_uname: 0 });
        self.fids = (0..FIDS).map(|fid| (fid, vec![(0, State::Absent)])).collect();
        self.fids.insert(ROOT, vec![(0, State::Root)]);
        // Requests that waited in the session before have changed nothing.
        self.files = self.shard.files();
    }

    fn state(&self, fid: u32) -> State {
        self.fids[&fid].last().unwrap().1
    }

    /// A request comes in with a tag that is free. All of one fid that change it have their results in the order of their sending.
    fn ask(&mut self, request: Request<'_>, wanted: Wanted) {
        let free: Vec<u16> = (1..=TAGS).filter(|tag| !self.asked.contains_key(tag)).collect();
        let tag = self.random.pick(&free);
        self.serial += 1;
        self.asked.insert(tag, Asked { serial: self.serial, kind: request.kind(), wanted });
        let replies = self.receive(tag, request);
        self.pending.extend(self.shard.results());
        self.look(&replies);
    }

    /// Any request that changes this fid, and what comes of it.
    fn change(&mut self, fid: u32) {
        use State::{Absent, File, Open, Root};
        let file = self.random.below(FILES.into()) as u8;
        let own = name(fid, file);
        let mut buffer = Vec::new();
        let names = Names::of(&[own.as_bytes()], &mut buffer).unwrap();
        let found = if self.files.contains(&own) { Ok(File(file)) } else { Err(libc::ENOENT) };
        let (flags, gid) = (open_flag::READ_WRITE, rustix::process::getegid().as_raw());
        let state = self.state(fid);
        let (request, next) = match self.random.within(0..=8) {
            0 | 1 => {
                let walk = Request::Walk { fid: ROOT, newfid: fid, names };
                (walk, if state == Absent { found } else { Err(libc::EINVAL) })
            }
            2 => {
                let clone = Request::Walk { fid: ROOT, newfid: fid, names: Names::default() };
                (clone, if state == Absent { Ok(Root) } else { Err(libc::EINVAL) })
            }
            3 => (
                Request::Walk { fid, newfid: fid, names },
                match state {
                    Absent => Err(libc::EBADF),
                    Root => found,
                    File(_) => Err(libc::ENOTDIR),
                    Open(_) => Err(libc::EINVAL),
                },
            ),
            4 | 5 => (
                Request::Lopen { fid, flags },
                match state {
                    Absent => Err(libc::EBADF),
                    Root => Err(libc::EISDIR),
                    File(file) => Ok(Open(file)),
                    Open(_) => Err(libc::EINVAL),
                },
            ),
            6 => (
                Request::Lcreate { fid, name: own.as_bytes(), flags, mode: 0o600, gid },
                match state {
                    Absent => Err(libc::EBADF),
                    Root => Ok(Open(file)),
                    File(_) => Err(libc::ENOTDIR),
                    Open(_) => Err(libc::EINVAL),
                },
            ),
            7 => (Request::Clunk { fid }, if state == Absent { Err(libc::EBADF) } else { Ok(Absent) }),
            _ => (
                Request::Remove { fid },
                match state {
                    Absent => Err(libc::EBADF),
                    // It has no name, and its fid is given back all the same.
                    Root => Err(libc::EINVAL),
                    File(_) | Open(_) => Ok(Absent),
                },
            ),
        };
        let later = match (request, state) {
            (Request::Remove { .. }, File(file) | Open(file)) => {
                self.files.remove(&name(fid, file));
                Absent
            }
            (Request::Remove { .. }, _) => Absent,
            _ => next.unwrap_or(state),
        };
        if let (Request::Lcreate { .. }, Ok(_)) = (request, next) {
            self.files.insert(own.clone());
        }
        self.fids.get_mut(&fid).unwrap().push((self.serial + 1, later));
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
        let before = self.asked.get(&oldtag).map(|asked| asked.serial);
        self.ask(Request::Flush { oldtag }, Wanted::Flush(before));
    }

    /// Looks at replies in their order, and that no Rflush waits for what is answered.
    fn look(&mut self, replies: &[Vec<u8>]) {
        for message in replies {
            let (tag, reply) = Reply::parse(message).unwrap();
            self.seen.push((tag, reply.kind()));
            let asked = self.asked.remove(&tag).unwrap_or_else(|| panic!("{tag} waits for no answer: {reply:?}"));
            let result = if let Reply::Lerror { ecode } = reply { Err(ecode as i32) } else { Ok(()) };
            assert!(result.is_err() || reply.kind() == asked.kind + 1, "{asked:?}: {reply:?}");
            match asked.wanted {
                Wanted::Change(fid, wanted) => {
                    assert_eq!(result, wanted, "fid {fid}: {reply:?}");
                    // What it was before is over.
                    let history = self.fids.get_mut(&fid).unwrap();
                    if let Some(at) = history.iter().position(|(serial, _)| *serial == asked.serial) {
                        history.drain(..at);
                    }
                }
                Wanted::Seen(fid, states) => {
                    let is_right = states.iter().any(|state| is_seen(fid, *state, &reply));
                    assert!(is_right, "fid {fid} is one of {states:?}: {reply:?}");
                }
                Wanted::Flush(before) => {
                    assert_eq!(result, Ok(()));
                    let is_waiting = self.asked.values().any(|asked| Some(asked.serial) == before);
                    assert!(!is_waiting, "Rflush of {tag} comes before the reply");
                }
            }
        }
        for asked in self.asked.values() {
            if let Wanted::Flush(before) = asked.wanted {
                let is_waiting = self.asked.values().any(|other| Some(other.serial) == before);
                assert!(is_waiting, "an Rflush that waits for nothing: {asked:?}");
            }
        }
    }

    /// Delivers one of the results that are kept back.
    fn deliver_one(&mut self) {
        let at = self.random.within(0..=self.pending.len() - 1);
        let delivery = self.pending.swap_remove(at);
        let replies = self.deliver(delivery);
        self.look(&replies);
    }

    /// Delivers everything, and looks at what is there then.
    fn settle(&mut self) {
        while !self.pending.is_empty() {
            self.deliver_one();
        }
        assert!(self.asked.is_empty(), "without an answer: {:?}", self.asked);
        assert_eq!(self.connection.owed_bytes(), 0);
        let fids = self.fids.keys().filter(|fid| self.state(**fid) != State::Absent).count();
        assert_eq!(self.connection.session_bytes(), fids * self.fid_bytes, "fids are {:?}", self.fids);
        assert_eq!(self.shard.files(), self.files);
        for fid in 0..FIDS {
            assert_eq!(self.fids[&fid].len(), 1, "the state is known");
            for request in [Request::Getattr { fid, mask: 0 }, Request::Read { fid, offset: 0, count: 3 }] {
                self.ask(request, Wanted::Seen(fid, vec![self.state(fid)]));
            }
        }
        while !self.pending.is_empty() {
            self.deliver_one();
        }
    }

    fn step(&mut self) {
        let fid = 1 + self.random.below(u64::from(FIDS) - 1) as u32;
        match self.random.within(0..=99) {
            0 => self.restart(),
            1 | 2 => self.settle(),
            3..=44 if !self.pending.is_empty() => self.deliver_one(),
            // The others need a tag.
            _ if self.asked.len() == usize::from(TAGS) => self.settle(),
            45..=69 => self.change(fid),
            70..=84 => self.see(fid),
            _ => self.flush(),
        }
    }

    /// The connection ends with what is on its way, which comes afterwards.
    fn end(self) -> Vec<(u16, u8)> {
        let Self { shard, connection, mut pending, seen, .. } = self;
        connection.end(&mut shard.env);
        while !pending.is_empty() {
            pending.drain(..).for_each(|delivery| shard.env.budget.orphan_done(delivery.work_bytes()));
            pending.extend(shard.results());
        }
        assert_eq!((shard.env.budget.bytes(), shard.env.pool.in_use()), (0, 0));
        seen
    }
}

/// True if a reply is one about a fid in this state.
fn is_seen(fid: u32, state: State, reply: &Reply<'_>) -> bool {
    use State::{Absent, File, Open, Root};
    match (state, reply) {
        (Absent, Reply::Lerror { ecode }) => *ecode == libc::EBADF as u32,
        (Root, Reply::Getattr { stat }) => stat.qid.kind == qid_kind::DIRECTORY,
        (File(_) | Open(_), Reply::Getattr { stat }) => stat.qid.kind != qid_kind::DIRECTORY,
        (Root | File(_), Reply::Lerror { ecode }) => *ecode == libc::EBADF as u32,
        (Open(_), Reply::Write { count }) => *count == 1,
        // One that was created anew has nothing there, or zeros.
        (Open(file), Reply::Read { data }) => {
            data.0 == name(fid, file).as_bytes() || data.0.iter().all(|byte| *byte == 0)
        }
        _ => false,
    }
}

/// Three connections to one server. Tags and types of their replies.
fn run(seed: u64) -> Vec<(u16, u8)> {
    let mut random = Random::of_test(seed);
    let mut shard = Shard::new();
    let flights = (0..3).map(|_| {
        let mut flight = Flight::new(&mut shard, Random::new(random.bits()));
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
