//! Every crash that a run of the store could have had: the disk as it was between each two of its writes, with and without parts
//! of the writes that were under way then, is recovered and held against all that had left for the clients.
//!
//! The writes are those that strace(1) saw of the store on epoll, with their bytes. What a disk does is modelled: a write with
//! RWF_DSYNC is there when it has ended, another one when a sync that began behind it has; until then, of each of its
//! sectors it is open whether it is there. The model has no file system: the files have their length and their blocks before.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ksf_kv::disk::{Disk, DiskOptions};
use ksf_kv::offline::dump;
use ksf_test::{Folder, Random, own_network, program_or_skip};

use super::{connect_on, list_of_two_cpus, start, two_cpus};
use crate::store::client::{Client, command};
use crate::store::journal::{CONNECTIONS, Found, Journals, found};
use crate::store::trace::{Event, Trace, Traced, What};

/// Rounds in which each connection sends so many commands, before strace looks and while it does.
const ROUNDS_BEFORE: usize = 24;
const ROUNDS: usize = 40;
const WINDOW: usize = 40;
/// What a disk writes whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Every third write of a thread is held back for 5 ms where its call begins: so writes of one log are done before those of another
/// one that they saw, and a reply that does not wait for both leaves.
const UNEVEN_WRITES: [&str; 2] = ["-e", "inject=pwritev2:delay_enter=5000:when=1+3"];
/// Each so many moments the store is started on the image, too: a start changes it.
const STARTS_EVERY: usize = 16;

/// A run of a store.
struct Run {
    folder: Folder,
    /// The files as they were before it.
    before: PathBuf,
    trace: Trace,
    journals: Journals,
    /// Of each connection, how many bytes its replies had up to each.
    ends: [Vec<u64>; CONNECTIONS],
}

/// One round of commands on each connection.
fn work(journals: &mut Journals, clients: &mut [Client], random: &mut Random, mut replied: impl FnMut(usize, &Client)) {
    for (connection, client) in clients.iter_mut().enumerate() {
        client.write(&journals.send(connection, WINDOW, random)).expect("the store reads");
    }
    for (connection, client) in clients.iter_mut().enumerate() {
        for _ in 0..WINDOW {
            journals.take_reply(connection, client).unwrap();
            replied(connection, client);
        }
    }
}

fn greeting(connection: usize) -> String {
    format!("<connection {connection}>")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// `None`: there is no strace.
fn run(random: &mut Random) -> Option<Run> {
    program_or_skip("strace")?;
    own_network();
    let folder = Folder::new();
    let (data, before) = (folder.path("store"), folder.path("before"));
    let cpus = list_of_two_cpus();
    let mut journals = Journals::default();
    // So that cleaning has something to do before long.
    let server = start("epoll", &data, &["--cpus", &cpus]);
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|number| connect_on(number, &server)).collect();
    (0..ROUNDS_BEFORE).for_each(|_| work(&mut journals, &mut clients, random, |_, _| {}));
    journals.audit(&found(&mut clients[0])).unwrap();
    drop(clients);
    server.stop();
    copy(&data, &before);

    let traced = Traced::start(&folder, &data, &["--cpus", &cpus], &UNEVEN_WRITES)?;
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|number| connect_on(number, &traced.server)).collect();
    let mut ends: [Vec<u64>; CONNECTIONS] = Default::default();
    for (connection, client) in clients.iter_mut().enumerate() {
        client.write(&command(&[b"ECHO", greeting(connection).as_bytes()])).unwrap();
        assert_eq!(client.read().unwrap(), greeting(connection));
        client.reply_bytes = 0;
    }
    for _ in 0..ROUNDS {
        work(&mut journals, &mut clients, random, |connection, client| ends[connection].push(client.reply_bytes));
    }
    drop(clients);
    Some(Run { before, trace: traced.stop(), journals, ends, folder })
}

/// The files of a store as a disk has them.
struct Image {
    path: PathBuf,
    files: BTreeMap<String, File>,
}

impl Image {
    fn of(before: &Path, path: PathBuf) -> Self {
        copy(before, &path);
        Self { path, files: BTreeMap::new() }
    }

    fn file(&mut self, name: &str) -> &File {
        let path = self.path.join(name);
        let open = || OpenOptions::new().read(true).write(true).open(path).unwrap();
        self.files.entry(name.to_owned()).or_insert_with(open)
    }

    fn write(&mut self, write: &What) {
        let What::Write { file, offset, data, .. } = write else { panic!("{write:?} is no write") };
        self.file(file).write_all_at(data, *offset).unwrap();
    }

    /// Writes some sectors, which a disk may have done of a write that is under way; what was there before.
    fn write_some(&mut self, write: &What, random: &mut Random) -> What {
        let What::Write { file, offset, data, .. } = write else { panic!("{write:?} is no write") };
        let mut old = vec![0; data.len()];
        let medium = self.file(file);
        medium.read_exact_at(&mut old, *offset).unwrap();
        let mut new = old.clone();
        let of_ten = random.pick(&[0, 1, 5, 9, 10]);
        for (new, data) in new.chunks_mut(SECTOR_BYTES).zip(data.chunks(SECTOR_BYTES)) {
            if random.below(10) < of_ten {
                new.copy_from_slice(data);
            }
        }
        medium.write_all_at(&new, *offset).unwrap();
        What::Write { file: file.clone(), offset: *offset, data: old, is_durable: false }
    }

    fn found(&self) -> Result<Found, String> {
        found_in(&self.path)
    }

    /// What a start makes of it, on a copy.
    fn found_by_a_start(&self, copied: &Path) -> Result<Found, String> {
        copy(&self.path, copied);
        let opened = Disk::open(copied, DiskOptions::default()).map(drop).map_err(|error| error.to_string());
        let found = opened.and_then(|()| found_in(copied));
        fs::remove_dir_all(copied).unwrap();
        found
    }
}

/// Recovers a store, and reads it as its dump has it: each key by one SET.
fn found_in(path: &Path) -> Result<Found, String> {
    let mut commands = Vec::new();
    dump(path, 0, &mut commands).map_err(|error| error.to_string())?;
    let text = String::from_utf8(commands).expect("the values are text");
    let commands = text.split("*3\r\n$3\r\nSET\r\n").skip(1);
    let set = commands.map(|command| {
        let mut words = command.split("\r\n").skip(1).step_by(2);
        let mut word = || words.next().expect("SET has a key and a value").to_owned();
        (word(), word())
    });
    Ok(set.collect())
}

/// What the replay of a run has looked at.
#[derive(Debug, Default)]
struct Looked {
    moments: usize,
    torn: usize,
    starts: usize,
    /// Segments that were given back.
    cleaned: usize,
}

/// A moment of a run: what is on the disk, what is on its way there, and what has left for the clients.
struct Moment<'r> {
    run: &'r Run,
    image: Image,
    /// Writes that may be there or not, by their calls; whether they have ended.
    open: BTreeMap<usize, bool>,
    /// Of each sync that is under way, the writes that it makes durable.
    syncs: BTreeMap<usize, Vec<usize>>,
    /// Of each socket its connection, and the bytes behind the greeting that it took.
    sockets: BTreeMap<&'r str, (usize, u64)>,
    /// Bytes that have left for each connection.
    told: [u64; CONNECTIONS],
    looked: Looked,
}

impl<'r> Moment<'r> {
    fn first(run: &'r Run, name: &str) -> Self {
        Self {
            run,
            image: Image::of(&run.before, run.folder.path(name)),
            open: BTreeMap::new(),
            syncs: BTreeMap::new(),
            sockets: BTreeMap::new(),
            told: [0; CONNECTIONS],
            looked: Looked::default(),
        }
    }

    /// Holds the disk as it is against what was told.
    fn look(&mut self, random: &mut Random) -> Result<(), String> {
        let (run, told) = (self.run, self.told);
        let answered: [usize; CONNECTIONS] =
            std::array::from_fn(|connection| run.ends[connection].partition_point(|end| *end <= told[connection]));
        let found = self.image.found()?;
        run.journals.check(&answered, &found)?;
        self.looked.moments += 1;
        if self.looked.moments.is_multiple_of(STARTS_EVERY) {
            self.looked.starts += 1;
            let started = self.image.found_by_a_start(&run.folder.path("started"))?;
            if started != found {
                return Err("a start has made another store of it than a dump".to_owned());
            }
        }
        let calls: Vec<&What> = self.open.keys().map(|call| &run.trace.calls[*call]).collect();
        if !calls.is_empty() {
            let old: Vec<What> = calls.into_iter().map(|write| self.image.write_some(write, random)).collect();
            self.looked.torn += 1;
            let checked = self.image.found().and_then(|found| run.journals.check(&answered, &found));
            old.iter().rev().for_each(|write| self.image.write(write));
            checked?;
        }
        Ok(())
    }

    fn make_durable(&mut self, call: usize) {
        if self.open.remove(&call).is_some() {
            let run = self.run;
            let write = &run.trace.calls[call];
            if matches!(write, What::Write { data, .. } if is_header_of_cleaned(data)) {
                self.looked.cleaned += 1;
            }
            self.image.write(write);
        }
    }

    fn begin(&mut self, call: usize) {
        let run = self.run;
        match &run.trace.calls[call] {
            What::Write { .. } => {
                self.open.insert(call, false);
            }
            What::Sync { file } => {
                let is_of_it =
                    |call: &usize| matches!(&run.trace.calls[*call], What::Write { file: of, .. } if of == file);
                let ended = self.open.iter().filter(|(_, has_ended)| **has_ended).map(|(call, _)| *call);
                let writes = ended.filter(is_of_it).collect();
                self.syncs.insert(call, writes);
            }
            What::Send { socket, data } => {
                if let Some((connection, bytes)) = self.sockets.get(&socket[..]) {
                    self.told[*connection] = bytes + data.len() as u64;
                }
            }
        }
    }

    /// True if what is on the disk is to be looked at first.
    fn is_write(&self, call: usize) -> bool {
        matches!(self.run.trace.calls[call], What::Write { is_durable: true, .. } | What::Sync { .. })
    }

    fn end(&mut self, call: usize, result: usize) {
        let run = self.run;
        match &run.trace.calls[call] {
            What::Write { data, is_durable, file, .. } => {
                assert_eq!(result, data.len(), "a write to {file} was cut");
                if *is_durable {
                    self.make_durable(call);
                } else {
                    self.open.insert(call, true);
                }
            }
            What::Sync { .. } => {
                let writes = self.syncs.remove(&call).expect("it has begun");
                writes.into_iter().for_each(|write| self.make_durable(write));
            }
            What::Send { socket, data } => {
                if let Some((_, bytes)) = self.sockets.get_mut(&socket[..]) {
                    *bytes += result as u64;
                } else {
                    let text = String::from_utf8_lossy(data);
                    let connection = (0..CONNECTIONS).find(|connection| text.contains(&greeting(*connection)));
                    if let Some(connection) = connection {
                        self.sockets.insert(socket, (connection, 0));
                    }
                }
            }
        }
    }
}

fn file_of(call: &What) -> &str {
    match call {
        What::Write { file, .. } | What::Sync { file } => file,
        What::Send { socket, .. } => socket,
    }
}

/// The header of a segment with the standing that it was cleaned.
fn is_header_of_cleaned(data: &[u8]) -> bool {
    data[4..8] == *b"ksfS" && data[42..44] == [1, 0]
}

/// A batch with records.
fn has_records(data: &[u8]) -> bool {
    data[4..8] == *b"ksfB" && data[44..48] != [0; 4]
}

/// Goes through a run. `lost`: a write that the disk does not do; then only what comes behind it is looked at.
fn replay(run: &Run, name: &str, lost: Option<usize>, random: &mut Random) -> Result<Looked, String> {
    let mut moment = Moment::first(run, name);
    let mut looks = lost.is_none();
    for event in &run.trace.events {
        match *event {
            Event::Begin(call) => moment.begin(call),
            Event::End(call, _) if lost == Some(call) => {
                moment.open.remove(&call);
                looks = true;
            }
            Event::End(call, result) => {
                if looks && moment.is_write(call) {
                    moment.look(random)?;
                }
                moment.end(call, result);
            }
        }
    }
    moment.look(random)?;
    let all: Vec<u64> = run.ends.iter().map(|ends| *ends.last().expect("there were replies")).collect();
    assert_eq!(moment.told.to_vec(), all, "not every reply was seen to leave");
    Ok(moment.looked)
}

#[test]
fn every_prefix_of_the_writes_has_what_was_told_by_then() {
    let mut random = Random::of_test(14);
    let Some(run) = run(&mut random) else { return };
    let looked = replay(&run, "image", None, &mut random).unwrap_or_else(|error| panic!("{error}"));
    println!("{looked:?}");
    assert!(looked.moments > 50 && looked.starts > 2 && looked.torn > 25, "{looked:?}");
    assert!(looked.cleaned > 0, "nothing was cleaned: {looked:?}");

    // A disk that loses a write of records is found out.
    let with_records = |call: &usize| matches!(&run.trace.calls[*call], What::Write { data, .. } if has_records(data));
    let writes: Vec<usize> = (0..run.trace.calls.len()).filter(with_records).collect();
    let logs: BTreeSet<&str> = writes.iter().map(|call| file_of(&run.trace.calls[*call])).collect();
    assert_eq!(logs.len(), two_cpus().len(), "connections of each CPU write to a log of their own: {logs:?}");
    let lost = writes[writes.len() / 2];
    let found_out = replay(&run, "lossy", Some(lost), &mut random);
    assert!(found_out.is_err(), "a write of records was lost: {found_out:?}");
}
