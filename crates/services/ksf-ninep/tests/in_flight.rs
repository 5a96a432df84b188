//! Random requests in flight obey the rules of tags, flushes, fids and sessions.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::net::Shutdown;

use crate::common::{Client, Place, ROOT};
use ksf_proto::p9::{
    Data, NO_FID, NO_TAG, Names, Reply, Request, SetStat, UNLINK_DIRECTORY, VERSION, open_flag, set_bit,
};
use ksf_test::{Random, effort};

/// Fids of a connection are below this; the root's stays as it is.
const FIDS: u32 = 6;
const MSIZE: u32 = 1 << 20;
const LONG: usize = 100_000;

/// Any request, mostly with `fids`. At most [`LONG`] bytes are read and written. `buffer` has the names of a walk.
fn request<'a>(random: &mut Random, fids: &[u32], buffer: &'a mut Vec<u8>) -> Request<'a> {
    static DATA: [[u8; LONG]; 3] = [[b'x'; LONG], [b'y'; LONG], [b'z'; LONG]];
    let name = |random: &mut Random| random.pick(&[&b"a"[..], b"b", b"c"]);
    let one_of = |random: &mut Random, fids: &[u32]| {
        if fids.is_empty() || random.one_in(6) { random.below(FIDS.into()) as u32 } else { random.pick(fids) }
    };
    let any = |random: &mut Random| one_of(random, fids);
    // Of these something else is made.
    let own = |random: &mut Random| one_of(random, fids).max(1);
    let access = |random: &mut Random| {
        random.pick(&[0, open_flag::WRITE, open_flag::READ_WRITE, open_flag::WRITE | open_flag::TRUNCATE])
    };
    let gid = rustix::process::getegid().as_raw();
    match random.within(0..=24) {
        0..=5 => {
            let newfid = 1 + random.below(u64::from(FIDS) - 1) as u32;
            let other = any(random);
            let fid = random.pick(&[newfid, ROOT, other, other]);
            let names: Vec<&[u8]> = (0..random.within(0..=2))
                .map(|_| if random.one_in(5) { b"..".as_slice() } else { name(random) })
                .collect();
            Request::Walk { fid, newfid, names: Names::of(&names, buffer).unwrap() }
        }
        6 | 7 => Request::Lopen { fid: own(random), flags: access(random) },
        8 | 9 => {
            let flags = access(random) | random.pick(&[0, open_flag::EXCLUSIVE]);
            Request::Lcreate { fid: own(random), name: name(random), flags, mode: 0o600, gid }
        }
        10 | 11 => {
            let (offset, count) = (random.below(9000), random.within(1..=LONG) as u32);
            Request::Read { fid: any(random), offset, count }
        }
        12 | 13 => {
            let data = Data(&random.pick(&[&DATA[0], &DATA[1], &DATA[2]])[..random.within(1..=LONG)]);
            Request::Write { fid: any(random), offset: random.below(9000), data }
        }
        14 => Request::Readdir { fid: any(random), offset: 0, count: 8000 },
        15 => Request::Getattr { fid: any(random), mask: u64::MAX },
        16 => {
            let to = SetStat { valid: set_bit::SIZE, size: random.below(9000), ..SetStat::default() };
            Request::Setattr { fid: own(random), to }
        }
        17 => Request::Mkdir { dfid: any(random), name: name(random), mode: 0o700, gid },
        18 => Request::Unlinkat {
            dirfid: any(random),
            name: name(random),
            flags: if random.one_in(2) { UNLINK_DIRECTORY } else { 0 },
        },
        19 => Request::Renameat {
            olddirfid: any(random),
            oldname: name(random),
            newdirfid: any(random),
            newname: name(random),
        },
        20 => Request::Rename { fid: any(random), dfid: any(random), name: name(random) },
        21 => Request::Link { dfid: any(random), fid: any(random), name: name(random) },
        22 => Request::Clunk { fid: own(random) },
        23 => Request::Remove { fid: own(random) },
        _ if random.one_in(8) => Request::Version { msize: MSIZE, version: VERSION },
        _ => Request::Attach { fid: any(random), afid: NO_FID, uname: b"", aname: b"", n_uname: 0 },
    }
}

/// A connection with requests in flight.
struct Flight {
    client: Client,
    /// The last tag that was used; each is used once.
    tag: u16,
    /// Fids that there are.
    fids: HashSet<u32>,
}

/// What a request that succeeds does to the fids.
#[derive(Clone, Copy, Debug)]
enum Effect {
    None,
    /// If so many names are found.
    Walked(u32, usize),
    Made(u32),
    Gone(u32),
    /// Whatever comes of it.
    Removed(u32),
}

fn effect_of(request: Request<'_>) -> Effect {
    match request {
        Request::Walk { fid, newfid, names } if fid != newfid => Effect::Walked(newfid, names.iter().count()),
        Request::Attach { fid, .. } => Effect::Made(fid),
        Request::Clunk { fid } => Effect::Gone(fid),
        Request::Remove { fid } => Effect::Removed(fid),
        _ => Effect::None,
    }
}

/// Requests that were sent together: the tag of each, what it does to fids, and the tag that it flushes.
#[derive(Debug, Default)]
struct Batch {
    sent: Vec<(u16, Effect, Option<u16>)>,
    /// How many of them were sent before a Tversion.
    version_at: Option<usize>,
}

impl Flight {
    fn new(client: Client) -> Self {
        Self { client, tag: 100, fids: HashSet::from([ROOT]) }
    }

    fn send(&mut self, random: &mut Random) -> Batch {
        let mut batch = Batch::default();
        let mut bytes = Vec::new();
        let first = self.tag + 1;
        let mut fids: Vec<u32> = self.fids.iter().copied().collect();
        fids.sort_unstable();
        for _ in 0..random.within(1..=16) {
            let mut buffer = Vec::new();
            let mut sent = request(random, &fids, &mut buffer);
            if random.one_in(4) {
                // One before, the next, or itself.
                let oldtag = random.within(usize::from(first)..=usize::from(self.tag) + 2) as u16;
                sent = Request::Flush { oldtag };
            }
            if matches!(sent, Request::Version { .. }) {
                if batch.version_at.is_none() {
                    batch.version_at = Some(batch.sent.len());
                    sent.put(NO_TAG, &mut bytes).unwrap();
                }
                continue;
            }
            self.tag += 1;
            sent.put(self.tag, &mut bytes).unwrap();
            let flushed = if let Request::Flush { oldtag } = sent { Some(oldtag) } else { None };
            batch.sent.push((self.tag, effect_of(sent), flushed));
        }
        self.client.0.write_all(&bytes).unwrap();
        batch
    }

    /// Looks at all answers to a batch, and at the fids afterwards.
    fn receive(&mut self, batch: &Batch) {
        let before = batch.version_at.unwrap_or(0);
        let mut old: HashSet<u16> = batch.sent[..before].iter().map(|(tag, ..)| *tag).collect();
        let mut due: HashSet<u16> = batch.sent[before..].iter().map(|(tag, ..)| *tag).collect();
        let mut is_version_due = batch.version_at.is_some();
        // Of each that was answered without an error: how many objects were found.
        let mut succeeded: HashMap<u16, usize> = HashMap::new();
        let mut failed: HashMap<u16, u32> = HashMap::new();
        let mut flushed = HashSet::new();
        while is_version_due || !due.is_empty() {
            let message = self.client.receive().expect("answers and not the end");
            let (tag, reply) = Reply::parse(&message).unwrap();
            if tag == NO_TAG {
                assert!(std::mem::replace(&mut is_version_due, false), "a second Rversion: {batch:?}");
                assert_eq!(reply, Reply::Version { msize: MSIZE, version: VERSION });
                continue;
            }
            let is_awaited = if is_version_due { old.remove(&tag) } else { due.remove(&tag) };
            assert!(is_awaited, "an answer with tag {tag} that nothing waits for: {batch:?}");
            assert!(!flushed.contains(&tag), "{tag} is answered after its Rflush: {batch:?}");
            match reply {
                Reply::Flush {} => {
                    let (at, (.., oldtag)) =
                        batch.sent.iter().enumerate().find(|(_, (sent, ..))| *sent == tag).expect("it was sent");
                    let oldtag = oldtag.expect("only Tflush is answered so");
                    if batch.sent[..at].iter().any(|(sent, ..)| *sent == oldtag) {
                        flushed.insert(oldtag);
                    }
                }
                Reply::Lerror { ecode } => drop(failed.insert(tag, ecode)),
                Reply::Walk { qids } => drop(succeeded.insert(tag, qids.iter().count())),
                _ => drop(succeeded.insert(tag, 0)),
            }
        }
        if batch.version_at.is_some() {
            self.fids.clear();
        }
        // What a request does to fids that are there is told by the order in which they were sent.
        for (tag, effect, _) in &batch.sent[before..] {
            match (*effect, succeeded.get(tag)) {
                (Effect::Walked(fid, names), Some(found)) if *found == names => {
                    assert!(self.fids.insert(fid), "{batch:?}")
                }
                (Effect::Made(fid), Some(_)) => assert!(self.fids.insert(fid), "{batch:?}"),
                (Effect::Gone(fid), Some(_)) => assert!(self.fids.remove(&fid), "{batch:?}"),
                (Effect::Removed(fid), _) if failed.get(tag) != Some(&(libc::EBADF as u32)) => {
                    assert!(self.fids.remove(&fid), "{batch:?}");
                }
                _ => {}
            }
        }
        for fid in 0..FIDS {
            let is_there = self.client.stat(fid) != Err(libc::EBADF);
            assert_eq!(is_there, self.fids.contains(&fid), "fid {fid}: {batch:?}");
        }
        if self.fids.insert(ROOT) {
            self.client.attach(ROOT, 0, b"").unwrap();
        }
    }

    /// Nothing comes that was not waited for.
    fn end(mut self) {
        self.client.0.shutdown(Shutdown::Write).unwrap();
        assert_eq!(self.client.receive(), None);
    }
}

#[test]
fn requests_in_flight_have_one_answer_each() {
    for seed in 0..effort(20, 1000) {
        let mut random = Random::of_test(seed);
        let place = Place::new();
        let serving = place.serve();
        let mut flights = [serving.client(), serving.client()].map(Flight::new);
        for _ in 0..40 {
            // Those of all connections are on their way together.
            let batches = flights.each_mut().map(|flight| flight.send(&mut random));
            flights.iter_mut().zip(&batches).for_each(|(flight, batch)| flight.receive(batch));
        }
        flights.into_iter().for_each(Flight::end);
        serving.stop();
    }
}
