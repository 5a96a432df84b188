//! Which calls bring names and attributes to the medium before they are answered. That what was brought there outlives a crash of
//! the machine is shown by `ksf-cli tests/mounted/power.rs`.

use crate::common::{Served, on_lane, root};
use ksf_fs::{CreateHow, ExportOptions, Lane, Node, OpenHow, Resize, SetAttr, SetTime, Squash, Stable, Time};

const NONE: SetAttr = SetAttr { mode: None, uid: None, gid: None, size: None, atime: None, mtime: None };
const MODE: SetAttr = SetAttr { mode: Some(0o700), ..NONE };
const TIMED: SetAttr = SetAttr { mtime: Some(SetTime::To(Time { seconds: 5, nanos: 0 })), ..NONE };

/// Makes each call, and tells how often something was brought to the medium by it.
fn settled(served: &Served, lane: &mut Lane) -> Vec<(&'static str, u64)> {
    let (fs, dir, root) = (&served.fs, served.root(), &root());
    let mut counts = Vec::new();
    let mut before = 0;
    let mut count = |name| {
        let now = fs.counters().settled;
        counts.push((name, now - before));
        before = now;
    };
    let file = fs.create(lane, root, dir, b"file", &CreateHow::Guarded(MODE)).result.unwrap().handle;
    count("create");
    fs.create(lane, root, dir, b"timed", &CreateHow::Unchecked(TIMED)).result.unwrap();
    count("create with times");
    fs.create(lane, root, dir, b"exclusive", &CreateHow::Exclusive([7; 8])).result.unwrap();
    count("exclusive create");
    let folder = fs.mkdir(lane, root, dir, b"folder", &MODE).result.unwrap().handle;
    count("mkdir");
    fs.mkdir(lane, root, dir, b"old", &TIMED).result.unwrap();
    count("mkdir with times");
    fs.symlink(lane, root, dir, b"symlink", b"target", &NONE).result.unwrap();
    count("symlink");
    fs.mknod(lane, root, dir, b"fifo", Node::Fifo, &MODE).result.unwrap();
    count("mknod");
    fs.link(lane, root, &file, dir, b"link").result.unwrap();
    count("link");
    fs.rename(lane, root, dir, b"link", dir, b"renamed").result.unwrap();
    count("rename");
    fs.rename(lane, root, dir, b"renamed", &folder, b"moved").result.unwrap();
    count("rename into another folder");
    fs.remove(lane, root, &folder, b"moved").result.unwrap();
    count("remove");
    fs.rmdir(lane, root, dir, b"old").result.unwrap();
    count("rmdir");
    // Without root the handle of a file goes with its last seen name.
    fs.lookup(lane, root, dir, b"file").result.unwrap();
    fs.setattr(lane, root, &file, &MODE, None, Resize::Owner).result.unwrap();
    count("setattr");
    fs.setattr(lane, root, &folder, &MODE, None, Resize::Owner).result.unwrap();
    count("setattr of a folder");
    let write = OpenHow { write: true, ..OpenHow::READ };
    let cut = OpenHow { truncate: true, ..write };
    let (open, _) = fs.open(lane, root, &file, cut).unwrap();
    count("open that cuts");
    fs.create_open(lane, root, dir, b"file", (0o644, false), cut).result.unwrap();
    count("create and open of a file that is there, cut");
    fs.create_open(lane, root, dir, b"file", (0o644, false), write).result.unwrap();
    count("create and open of a file that is there");
    fs.create_open(lane, root, dir, b"opened", (0o644, true), write).result.unwrap();
    count("create and open");
    fs.setattr_open(lane, root, &open, &MODE).unwrap();
    count("setattr of an open file");
    fs.open(lane, root, &file, write).unwrap();
    fs.write(lane, root, &file, 0, b"unstable", Stable::Unstable).result.unwrap();
    fs.getattr(lane, &file).unwrap();
    fs.lookup(lane, root, dir, b"file").result.unwrap();
    assert!(fs.remove(lane, root, dir, b"none").result.is_err());
    count("calls that change neither");
    counts
}

#[test]
fn each_call_that_changes_names_or_attributes_brings_them_to_the_medium() {
    on_lane(|lane| {
        let expected = [
            ("create", 1),
            // The file, too.
            ("create with times", 2),
            ("exclusive create", 2),
            ("mkdir", 1),
            ("mkdir with times", 2),
            ("symlink", 1),
            ("mknod", 1),
            ("link", 1),
            ("rename", 1),
            ("rename into another folder", 2),
            ("remove", 1),
            ("rmdir", 1),
            ("setattr", 1),
            ("setattr of a folder", 1),
            ("open that cuts", 1),
            // The directory, and the length of the file.
            ("create and open of a file that is there, cut", 2),
            ("create and open of a file that is there", 1),
            ("create and open", 1),
            ("setattr of an open file", 1),
            ("calls that change neither", 0),
        ];
        assert_eq!(settled(&Served::open_to_all(), lane), expected);
    });
}

#[test]
fn an_export_may_leave_that_to_the_file_system() {
    on_lane(|lane| {
        let options = ExportOptions { squash: Squash::None, sync_names: false, ..ExportOptions::default() };
        assert!(settled(&Served::new(options), lane).iter().all(|(_, count)| *count == 0));
    });
}
