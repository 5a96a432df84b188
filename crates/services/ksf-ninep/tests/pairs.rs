//! Pairs of requests on one fid that are in flight together: what comes of them is what comes of one of the two orders.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::common::{Client, Place, ROOT, Serving};
use ksf_proto::p9::{Data, Names, Reply, Request, SetStat, open_flag, set_bit};
use ksf_test::files::tree;

/// The fid of the pair.
const FID: u32 = 1;
/// The directory into which the object is renamed.
const DIR: u32 = 2;
/// A fid that some requests make.
const NEW: u32 = 3;

/// State of the fid before the pair.
#[derive(Clone, Copy, Debug)]
enum Start {
    Directory,
    File,
    OpenFile,
}

const STARTS: [Start; 3] = [Start::Directory, Start::File, Start::OpenFile];

/// Requests on the fid, with their names. The walks take long: many a later request ends before them.
fn requests(buffers: &mut [Vec<u8>; 3]) -> Vec<(&'static str, Request<'_>)> {
    let long = |last: &[&'static [u8]]| [[&b"."[..]; 16][last.len()..].to_vec(), last.to_vec()].concat();
    let [up, over, away] = buffers;
    let up = Names::of(&long(&[b".."]), up).unwrap();
    let over = Names::of(&long(&[b"..", b"other"]), over).unwrap();
    let away = Names::of(&long(&[b".."]), away).unwrap();
    let size = SetStat { valid: set_bit::SIZE, size: 2, ..SetStat::default() };
    let gid = rustix::process::getegid().as_raw();
    let flags = open_flag::READ_WRITE;
    vec![
        ("walk up", Request::Walk { fid: FID, newfid: FID, names: up }),
        ("walk over", Request::Walk { fid: FID, newfid: FID, names: over }),
        ("walk away", Request::Walk { fid: FID, newfid: NEW, names: away }),
        ("open", Request::Lopen { fid: FID, flags: 0 }),
        ("open to write", Request::Lopen { fid: FID, flags }),
        ("create", Request::Lcreate { fid: FID, name: b"made", flags, mode: 0o600, gid }),
        ("read", Request::Read { fid: FID, offset: 0, count: 100 }),
        ("write", Request::Write { fid: FID, offset: 0, data: Data(b"123") }),
        ("set size", Request::Setattr { fid: FID, to: size }),
        ("get", Request::Getattr { fid: FID, mask: u64::MAX }),
        ("rename", Request::Rename { fid: FID, dfid: DIR, name: b"new" }),
        ("read names of attributes", Request::Xattrwalk { fid: FID, newfid: NEW, name: b"" }),
        ("write attribute", Request::Xattrcreate { fid: FID, name: b"user.a", size: 3, flags: 0 }),
        ("clunk", Request::Clunk { fid: FID }),
        ("remove", Request::Remove { fid: FID }),
    ]
}

/// Everything that a client and the file system show.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcome {
    /// True: it succeeded whole ([`is_fine`]). The error may be that of either order.
    replies: [bool; 2],
    /// Path of the fid's object.
    object: Option<String>,
    read: Option<Vec<u8>>,
    made: bool,
    before_removal: String,
    removed: bool,
    after_removal: String,
}

/// A server, a client, and numbers for the directories of its runs.
struct Runs {
    place: Place,
    client: Client,
    count: usize,
}

impl Runs {
    /// Sends two requests, together or one after the other, in a tree of their own.
    fn run(&mut self, start: Start, pair: [Request<'_>; 2], together: bool) -> Outcome {
        self.count += 1;
        let name = format!("{}", self.count);
        let top = self.place.path(&name);
        ["sub", "other"].iter().for_each(|dir| fs::create_dir_all(top.join("d").join(dir)).unwrap());
        fs::write(top.join("d/file"), "content").unwrap();
        let client = &mut self.client;
        client.walk(ROOT, DIR, &name).unwrap();
        let below = if matches!(start, Start::Directory) { "d/sub" } else { "d/file" };
        client.walk(DIR, FID, below).unwrap();
        if matches!(start, Start::OpenFile) {
            client.does(Request::Lopen { fid: FID, flags: open_flag::READ_WRITE }).unwrap();
        }
        let replies = if together { Self::both(client, pair) } else { pair.map(|request| Self::one(client, request)) };
        let object = client.stat(FID).ok().map(|stat| path_of(&top, stat.qid.path).unwrap_or_default());
        let read = client.read(FID, 0, 100).ok();
        let made = client.clunk(NEW).is_ok();
        let before_removal = format!("{:?}", tree(&top));
        let removed = client.does(Request::Remove { fid: FID }).is_ok();
        client.clunk(DIR).unwrap();
        Outcome { replies, object, read, made, before_removal, removed, after_removal: format!("{:?}", tree(&top)) }
    }

    fn one(client: &mut Client, request: Request<'_>) -> bool {
        client.ask(request, |reply| is_fine(request, reply)).unwrap_or(false)
    }

    fn both(client: &mut Client, pair: [Request<'_>; 2]) -> [bool; 2] {
        let mut bytes = Vec::new();
        (0..).zip(&pair).for_each(|(tag, request)| request.put(tag, &mut bytes).unwrap());
        client.0.write_all(&bytes).unwrap();
        let mut replies = [None; 2];
        for _ in 0..2 {
            let message = client.receive().expect("a reply and not the end");
            let (tag, reply) = Reply::parse(&message).unwrap();
            let tag = usize::from(tag);
            assert_eq!(replies[tag].replace(is_fine(pair[tag], reply)), None, "one reply for each");
        }
        replies.map(|reply| reply.expect("both were answered"))
    }
}

/// True if a request did all that it asks for. A Twalk that misses a later name has a reply with fewer qids, and makes no fid.
fn is_fine(request: Request<'_>, reply: Reply<'_>) -> bool {
    match (request, reply) {
        (_, Reply::Lerror { .. }) => false,
        (Request::Walk { names, .. }, Reply::Walk { qids }) => qids.iter().count() == names.iter().count(),
        _ => true,
    }
}

/// The path of an object below `dir`.
fn path_of(dir: &Path, inode: u64) -> Option<String> {
    fs::read_dir(dir).unwrap().map(Result::unwrap).find_map(|entry| {
        let name = entry.file_name().into_string().unwrap();
        if entry.metadata().unwrap().ino() == inode {
            return Some(name);
        }
        let below = entry.file_type().unwrap().is_dir().then(|| path_of(&entry.path(), inode)).flatten()?;
        Some(format!("{name}/{below}"))
    })
}

#[test]
fn two_requests_in_flight_on_one_fid_have_the_result_of_one_of_their_orders() {
    let place = Place::new();
    let serving: Serving = place.serve();
    let client = serving.client();
    let mut runs = Runs { place, client, count: 0 };
    let mut buffers = Default::default();
    let requests = requests(&mut buffers);
    let mut wrong = Vec::new();
    for start in STARTS {
        let in_order: Vec<Vec<Outcome>> = requests
            .iter()
            .map(|(_, first)| requests.iter().map(|(_, second)| runs.run(start, [*first, *second], false)).collect())
            .collect();
        for (at, (first_name, first)) in requests.iter().enumerate() {
            for (other, (second_name, second)) in requests.iter().enumerate() {
                let got = runs.run(start, [*first, *second], true);
                let mut reverse = in_order[other][at].clone();
                reverse.replies.reverse();
                if got != in_order[at][other] && got != reverse {
                    wrong.push(format!("{start:?}, {first_name} and {second_name}: {got:#?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} pairs have results of no order: {}", wrong.len(), wrong.join("\n"));
    drop(runs);
    serving.stop();
}
