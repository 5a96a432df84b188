use std::collections::HashMap;
use std::sync::mpsc::channel;

use super::*;
use crate::{ExportSettings, MSIZE_MAX, Ninep, Settings};
use ksf_fs::{
    Clients, ExportOptions, FileSettings, FsOptions, LaneOptions, Length, LockKind, LockRange, OpenHow, Squash,
};
use ksf_test::alloc::{Counting, bytes};
use ksf_test::{Folder, Random, effort};

#[global_allocator]
static COUNTING: Counting = Counting;

const NAMES: [&str; 3] = ["a", "b", "c"];

/// Open files of an export, and the user that opened them.
struct Objects {
    files: Vec<OpenFile>,
    caller: Arc<Credential>,
    // Closes the files.
    ninep: Ninep,
    _folder: Folder,
}

impl Objects {
    fn new() -> Self {
        let folder = Folder::to_export();
        std::fs::create_dir(folder.path("export")).unwrap();
        NAMES.iter().for_each(|name| std::fs::write(folder.path("export").join(name), "").unwrap());
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let path = folder.path("export");
        let exports = vec![ExportSettings { path, options, clients: Clients::default(), secure: false }];
        let (state, lanes) = (folder.path("state"), LaneOptions { threads: 1 });
        let files = FileSettings { exports, state, lanes, fs: FsOptions::default() };
        let ninep = Ninep::open(Settings { files, msize_max: MSIZE_MAX, fids_max: 16 }).unwrap();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let caller = Arc::new(Credential::unix(uid, gid, &[]));
        let (sender, opened) = channel();
        let (fs, user) = (Arc::clone(&ninep.files().fs), Arc::clone(&caller));
        ninep.files().lanes.submit(0, Length::Short, 0, move |lane| {
            let root = fs.exports()[0].root().clone();
            for name in NAMES {
                let found = fs.lookup(lane, &user, &root, name.as_bytes()).result.unwrap();
                sender.send(fs.open(lane, &user, &found.handle, OpenHow::READ).unwrap().0).unwrap();
            }
        });
        let files: Vec<OpenFile> = opened.iter().collect();
        assert_eq!(files.len(), NAMES.len());
        Self { files, caller, ninep, _folder: folder }
    }

    fn node(&self, object: usize) -> Arc<Node> {
        Arc::new(Node { handle: self.files[object].handle().clone(), caller: Arc::clone(&self.caller) })
    }

    /// The objects stand for directories.
    fn place(&self, dir: usize, name: &str) -> Place {
        Place { dir: self.files[dir].handle().clone(), name: name.as_bytes().into() }
    }

    /// A fid that was walked to.
    fn walk(&self, fids: &mut Fids, fid: u32, place: Place) {
        let id = fids.reserve(fid).unwrap();
        assert_eq!(fids.apply(Change::Found(id, self.node(0), Some(place))), 1);
    }
}

/// State of a fid in the model.
#[derive(Clone, Debug, PartialEq)]
enum Model {
    Reserved,
    File { handle: Handle, place: Option<Place>, is_open: bool },
    Value(usize),
}

/// A table without an index: requests walk all of it.
#[derive(Default)]
struct Models {
    fids: HashMap<u32, (u64, Model)>,
    last_number: u64,
}

impl Models {
    fn insert(&mut self, fid: u32, model: Model, fids_max: usize) -> Option<FidId> {
        if self.fids.contains_key(&fid) || self.fids.len() >= fids_max {
            return None;
        }
        self.last_number += 1;
        self.fids.insert(fid, (self.last_number, model));
        Some(FidId { fid, number: self.last_number })
    }

    fn found(&mut self, id: FidId) -> Option<&mut Model> {
        self.fids.get_mut(&id.fid).filter(|(number, _)| *number == id.number).map(|(_, model)| model)
    }

    fn follow(&mut self, from: &Place, to: &Place) {
        for (_, model) in self.fids.values_mut() {
            if let Model::File { place: place @ Some(_), .. } = model
                && place.as_ref() == Some(from)
            {
                *place = Some(to.clone());
            }
        }
    }
}

fn compare(fids: &Fids, models: &Models, objects: &Objects, numbers: u32) {
    for fid in 0..numbers {
        let expected = match models.fids.get(&fid) {
            Some((_, Model::File { handle, place, is_open })) => {
                Some((handle, place.as_ref(), is_open.then_some(handle)))
            }
            _ => None,
        };
        let got = fids
            .both(fid)
            .ok()
            .map(|(node, open)| (&node.handle, fids.place(fid).map(|place| &**place), open.map(OpenFile::handle)));
        assert_eq!(got, expected, "fid {fid}");
    }
    for file in &objects.files {
        let handle = file.handle();
        let is_open = |model: &Model| matches!(model, Model::File { handle: of, is_open: true, .. } if of == handle);
        let expected = models.fids.values().any(|(_, model)| is_open(model)).then_some(handle);
        assert_eq!(fids.open_of(handle).map(OpenFile::handle), expected);
    }
    let values = models.fids.values().map(|(_, model)| if let Model::Value(bytes) = model { *bytes } else { 0 });
    assert_eq!(fids.bytes(), models.fids.len() * FID_BYTES + values.sum::<usize>());
}

#[test]
fn random_steps_have_the_results_of_a_table_without_indexes() {
    const NUMBERS: u32 = 14;
    const FIDS_MAX: usize = 12;
    let objects = Objects::new();
    let mut random = Random::of_test(71);
    let (mut fids, mut models) = (Fids::new(FIDS_MAX), Models::default());
    let mut ids = vec![fids.reserve(0).unwrap()];
    models.insert(0, Model::Reserved, FIDS_MAX);
    for _ in 0..effort(30_000, 1_000_000) {
        let fid = random.below(NUMBERS.into()) as u32;
        let object = random.below(NAMES.len() as u64) as usize;
        let handle = objects.files[object].handle().clone();
        let place = |random: &mut Random| {
            let name = random.pick(&NAMES);
            objects.place(random.below(2) as usize, name)
        };
        // Late results, too.
        let id = ids[ids.len() - random.within(1..=ids.len().min(20))];
        match random.within(0..=17) {
            0..=3 => {
                let made = models.insert(fid, Model::Reserved, FIDS_MAX);
                assert_eq!(fids.reserve(fid).ok(), made);
                ids.extend(made);
            }
            4 | 5 => {
                let newfid = random.below(NUMBERS.into()) as u32;
                let model = match models.fids.get(&fid) {
                    Some((_, Model::File { handle, place, .. })) => {
                        Some(Model::File { handle: handle.clone(), place: place.clone(), is_open: false })
                    }
                    _ => None,
                };
                let made = model.and_then(|model| models.insert(newfid, model, FIDS_MAX));
                assert_eq!(fids.copy(fid, newfid).is_ok(), made.is_some());
                ids.extend(made);
            }
            6..=8 => {
                let place = (!random.one_in(6)).then(|| place(&mut random));
                if let Some(model @ (Model::Reserved | Model::File { is_open: false, .. })) = models.found(id) {
                    *model = Model::File { handle, place: place.clone(), is_open: false };
                }
                fids.apply(Change::Found(id, objects.node(object), place));
            }
            9 | 10 => {
                let created = random.one_in(2).then(|| place(&mut random));
                let mut file = objects.files[object].clone();
                // An open changes no handle: the file is that of the fid.
                if let Some(Model::File { handle: of, place, is_open: is_open @ false }) = models.found(id) {
                    *is_open = true;
                    let object = match created {
                        None => objects.files.iter().position(|file| file.handle() == of).unwrap(),
                        Some(_) => object,
                    };
                    *of = objects.files[object].handle().clone();
                    *place = created.clone().or(place.take());
                    file = objects.files[object].clone();
                }
                let created = created.map(|place| (objects.node(object), place));
                fids.apply(Change::Opened(id, created, file));
            }
            11 => {
                let length = random.within(0..=9);
                if let Some(model @ Model::Reserved) = models.found(id) {
                    *model = Model::Value(length);
                }
                fids.apply(Change::Value(id, vec![0; length].into()));
            }
            12 => {
                if let Some(Model::Reserved) = models.found(id) {
                    models.fids.remove(&id.fid);
                }
                fids.apply(Change::Free(id));
            }
            13 => {
                let is_closed = matches!(models.fids.get(&fid), Some((_, Model::File { is_open: false, .. })));
                assert_eq!(fids.begin_value(fid, b"user.a", (5, 0)).is_ok(), is_closed);
                if let (true, Some((_, model))) = (is_closed, models.fids.get_mut(&fid)) {
                    assert_eq!(fids.write_value(fid, 0, b"12345", 4), Some(Err(Errno::NOMEM)));
                    assert_eq!(fids.write_value(fid, 0, b"12345", 5), Some(Ok(())));
                    *model = Model::Value(5);
                }
            }
            14 | 15 => {
                let (from, to) = (place(&mut random), place(&mut random));
                models.follow(&from, &to);
                fids.apply(Change::Moved(from, to));
            }
            _ if random.one_in(200) => {
                models.fids.clear();
                fids.clear();
            }
            _ => {
                let removed = models.fids.get(&fid).cloned().filter(|(_, model)| *model != Model::Reserved);
                match (fids.remove(fid), removed) {
                    (Err(Errno::BADF), None) => {}
                    (Ok(Removed::Value | Removed::Setting(_)), Some((_, Model::Value(_)))) => {}
                    (Ok(Removed::File(node, at, file)), Some((_, Model::File { handle, place, is_open }))) => {
                        assert_eq!((&node.handle, at.as_deref()), (&handle, place.as_ref()));
                        assert_eq!(file.as_ref().map(OpenFile::handle), is_open.then_some(&handle));
                    }
                    other => panic!("{other:?}"),
                }
                if !matches!(models.fids.get(&fid), Some((_, Model::Reserved))) {
                    models.fids.remove(&fid);
                }
            }
        }
        compare(&fids, &models, &objects, NUMBERS);
    }
}

#[test]
fn rename_looks_at_no_fids_but_those_of_two_names_that_become_one() {
    let objects = Objects::new();
    for count in [100, 10_000] {
        let mut fids = Fids::new(2 * count as usize);
        // Fids of other names.
        (0..count).for_each(|fid| objects.walk(&mut fids, fid, objects.place(0, &format!("{fid}"))));
        assert_eq!(fids.apply(Change::Moved(objects.place(0, "7"), objects.place(1, "a"))), 0);
        assert_eq!(fids.place(7).map(|place| &**place), Some(&objects.place(1, "a")));
        assert_eq!(fids.place(8).map(|place| &**place), Some(&objects.place(0, "8")));
        // Fids of the name.
        (count..2 * count).for_each(|fid| objects.walk(&mut fids, fid, objects.place(1, "a")));
        assert_eq!(fids.apply(Change::Moved(objects.place(1, "a"), objects.place(0, "b"))), 0);
        assert_eq!(fids.place(count).map(|place| &**place), Some(&objects.place(0, "b")));
        // The fewer move, whichever the direction.
        assert_eq!(fids.apply(Change::Moved(objects.place(0, "b"), objects.place(0, "8"))), 1);
        assert_eq!(fids.apply(Change::Moved(objects.place(0, "9"), objects.place(0, "8"))), 1);
        let moved: usize = (10..count)
            .map(|fid| fids.apply(Change::Moved(objects.place(0, &format!("{fid}")), objects.place(0, "10"))))
            .sum();
        assert_eq!(moved, count as usize - 11);
        assert_eq!(fids.place(count).map(|place| &**place), Some(&objects.place(0, "8")));
        assert_eq!(fids.place(count - 1).map(|place| &**place), Some(&objects.place(0, "10")));
    }
}

#[test]
fn fids_take_the_memory_that_is_counted_and_free_it() {
    const COUNT: u32 = 5_000;
    let objects = Objects::new();
    let before = bytes();
    let mut fids = Fids::new(COUNT as usize);
    for fid in 0..COUNT {
        let name = format!("{fid:0255}");
        objects.walk(&mut fids, fid, objects.place(0, &name));
        let (id, _) = fids.closed(fid).unwrap();
        fids.apply(Change::Opened(id, None, objects.files[0].clone()));
    }
    let taken = bytes() - before;
    println!("{} bytes a fid", taken / i64::from(COUNT));
    assert!(taken <= fids.bytes() as i64, "{taken} bytes and not {}", fids.bytes());
    (1..COUNT).for_each(|fid| drop(fids.remove(fid).unwrap()));
    let left = bytes() - before;
    assert!(left <= 8 * FID_BYTES as i64, "{left} bytes for one fid");
}

#[test]
fn a_value_counts_as_it_is_written() {
    const SIZE: usize = 1000;
    let objects = Objects::new();
    let mut fids = Fids::new(1);
    objects.walk(&mut fids, 1, objects.place(0, "a"));
    fids.begin_value(1, b"user.a", (SIZE as u64, 0)).unwrap();
    let (idle, before) = (fids.bytes(), bytes());
    assert_eq!(idle, FID_BYTES);
    for at in 0..SIZE {
        let counted = fids.bytes();
        assert_eq!(fids.write_value(1, at as u64, b"x", SIZE), Some(Ok(())));
        let taken = bytes() - before;
        assert_eq!(fids.bytes() - idle, taken as usize);
        assert!(fids.bytes() - counted <= at.max(1), "at most twice the memory");
    }
    assert_eq!(fids.bytes() - idle, SIZE);
    drop(fids.remove(1));
    assert_eq!(fids.bytes(), 0);
}

#[test]
fn locked_ranges_count_until_they_are_given_back() {
    const RANGES: u64 = 100;
    let objects = Objects::new();
    let file = &objects.files[0];
    let mut fids = Fids::new(1);
    objects.walk(&mut fids, 1, objects.place(0, "a"));
    let (id, _) = fids.closed(1).unwrap();
    fids.apply(Change::Opened(id, None, file.clone()));
    let lock = |kind, ranges: Vec<LockRange>| {
        let (done, is_done) = channel();
        let (fs, file) = (Arc::clone(&objects.ninep.files().fs), file.clone());
        objects.ninep.files().lanes.submit(0, Length::Short, 0, move |lane| {
            ranges.into_iter().for_each(|range| assert!(fs.lock_open(lane, &file, kind, range).unwrap()));
            done.send(()).unwrap();
        });
        is_done.recv().unwrap();
    };
    lock(Some(LockKind::Shared), (0..RANGES).map(|at| LockRange { start: 2 * at, length: 1 }).collect());
    fids.apply(Change::Locked(id));
    let counted = fids.bytes() - FID_BYTES;
    assert_eq!(counted, file.lock_bytes());
    assert!(counted as u64 >= 24 * RANGES, "{counted} bytes");
    lock(None, vec![LockRange { start: 0, length: 0 }]);
    fids.apply(Change::Locked(id));
    assert_eq!(fids.bytes(), FID_BYTES);
    lock(Some(LockKind::Shared), vec![LockRange { start: 0, length: 1 }]);
    fids.apply(Change::Locked(id));
    assert!(fids.bytes() > FID_BYTES);
    drop(fids.remove(1).unwrap());
    fids.apply(Change::Locked(id));
    assert_eq!(fids.bytes(), 0);
}
