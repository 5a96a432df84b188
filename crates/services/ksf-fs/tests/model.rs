//! Random calls, and the same on a plain folder: results and trees are alike.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use crate::common::{Served, root, with_lane};
use ksf_fs::{CreateHow, ErrorKind, FsError, Handle, Lane, Resize, SetAttr, Stable};
use ksf_test::files::tree;
use proptest::prelude::*;
use rustix::io::Errno;

const FOLDERS: [&str; 4] = ["", "a", "b", "a/c"];
const NAMES: [&str; 3] = ["a", "b", "c"];

/// A folder and a name in it, as indices.
type Place = (usize, usize);

#[derive(Clone, Debug)]
enum Step {
    Create(Place),
    Mkdir(Place),
    Write(Place, u16, u8),
    Read(Place, u16),
    Cut(Place, u16),
    Mode(Place, u16),
    Remove(Place),
    Rmdir(Place),
    Rename(Place, Place),
    Link(Place, Place),
    /// Links have names of their own, because a plain path follows them and a handle does not.
    Symlink(usize),
    Unlink(usize),
    List(usize),
    CloseIdle,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = || (0..FOLDERS.len(), 0..NAMES.len());
    let step = prop_oneof![
        3 => place().prop_map(Step::Create),
        3 => place().prop_map(Step::Mkdir),
        3 => (place(), 0_u16..9000, any::<u8>()).prop_map(|(at, offset, byte)| Step::Write(at, offset, byte)),
        2 => (place(), 0_u16..9000).prop_map(|(at, offset)| Step::Read(at, offset)),
        1 => (place(), 0_u16..9000).prop_map(|(at, size)| Step::Cut(at, size)),
        1 => (place(), 0_u16..0o1000).prop_map(|(at, mode)| Step::Mode(at, mode | 0o700)),
        2 => place().prop_map(Step::Remove),
        1 => place().prop_map(Step::Rmdir),
        3 => (place(), place()).prop_map(|(from, to)| Step::Rename(from, to)),
        2 => (place(), place()).prop_map(|(from, to)| Step::Link(from, to)),
        1 => (0..FOLDERS.len()).prop_map(Step::Symlink),
        1 => (0..FOLDERS.len()).prop_map(Step::Unlink),
        1 => (0..FOLDERS.len()).prop_map(Step::List),
        1 => Just(Step::CloseIdle),
    ];
    proptest::collection::vec(step, 1..60)
}

/// What a call gave: bytes or names, or what went wrong.
type Outcome = Result<Vec<Vec<u8>>, ErrorKind>;

fn plain(folder: &Path, step: &Step) -> Outcome {
    let path = |(dir, name): Place| folder.join(FOLDERS[dir]).join(NAMES[name]);
    let link = |dir: usize| folder.join(FOLDERS[dir]).join("link");
    let nothing = |done: io::Result<()>| done.map(|()| Vec::new());
    let write = |at: Place| fs::OpenOptions::new().write(true).open(path(at));
    let done = match *step {
        Step::Create(at) => nothing(fs::File::create_new(path(at)).map(drop)),
        Step::Mkdir(at) => nothing(fs::create_dir(path(at))),
        Step::Write(at, offset, byte) => {
            nothing(write(at).and_then(|file| file.write_all_at(&[byte; 100], offset.into())))
        }
        Step::Read(at, offset) => read_plain(&path(at), offset.into()).map(|bytes| vec![bytes]),
        Step::Cut(at, size) => nothing(write(at).and_then(|file| file.set_len(size.into()))),
        Step::Mode(at, mode) => nothing(fs::set_permissions(path(at), fs::Permissions::from_mode(mode.into()))),
        Step::Remove(at) => nothing(fs::remove_file(path(at))),
        Step::Rmdir(at) => nothing(fs::remove_dir(path(at))),
        Step::Rename(from, to) => nothing(fs::rename(path(from), path(to))),
        Step::Link(from, to) => nothing(fs::hard_link(path(from), path(to))),
        Step::Symlink(dir) => nothing(std::os::unix::fs::symlink("nowhere", link(dir))),
        Step::Unlink(dir) => nothing(fs::remove_file(link(dir))),
        Step::List(dir) => fs::read_dir(folder.join(FOLDERS[dir])).map(|entries| {
            let mut names: Vec<Vec<u8>> =
                entries.map(|entry| entry.unwrap().file_name().into_encoded_bytes()).collect();
            names.sort();
            names
        }),
        Step::CloseIdle => Ok(Vec::new()),
    };
    done.map_err(|error| FsError::from(Errno::from_io_error(&error).unwrap()).kind())
}

fn read_plain(path: &Path, offset: u64) -> io::Result<Vec<u8>> {
    let file = fs::File::open(path)?;
    let mut bytes = vec![0; 300];
    let count = file.read_at(&mut bytes, offset)?;
    bytes.truncate(count);
    Ok(bytes)
}

/// The handle of a path below the root.
fn walk(served: &Served, lane: &mut Lane, path: &str) -> Result<Handle, FsError> {
    path.split('/').filter(|name| !name.is_empty()).try_fold(served.root().clone(), |dir, name| {
        Ok(served.fs.lookup(lane, &root(), &dir, name.as_bytes()).result?.handle)
    })
}

fn by_handles(served: &Served, lane: &mut Lane, step: &Step) -> Outcome {
    let layer = &served.fs;
    let done = (|| -> Result<Vec<Vec<u8>>, FsError> {
        let mut folder = |dir: usize| walk(served, lane, FOLDERS[dir]);
        let dirs = match *step {
            Step::Create((dir, _)) | Step::Mkdir((dir, _)) | Step::Remove((dir, _)) | Step::Rmdir((dir, _)) => {
                vec![folder(dir)?]
            }
            Step::Symlink(dir) | Step::Unlink(dir) | Step::List(dir) => vec![folder(dir)?],
            Step::Rename((from, _), (to, _)) | Step::Link((from, _), (to, _)) => vec![folder(from)?, folder(to)?],
            Step::Write((dir, _), ..) | Step::Read((dir, _), _) | Step::Cut((dir, _), _) | Step::Mode((dir, _), _) => {
                vec![folder(dir)?]
            }
            Step::CloseIdle => Vec::new(),
        };
        let name = |(_, name): Place| NAMES[name].as_bytes();
        let file = |lane: &mut Lane, at: Place| {
            layer.lookup(lane, &root(), &dirs[0], name(at)).result.map(|found| found.handle)
        };
        let mode = |mode: u32| SetAttr { mode: Some(mode), ..SetAttr::default() };
        match *step {
            Step::Create(at) => {
                layer.create(lane, &root(), &dirs[0], name(at), &CreateHow::Guarded(mode(0o666))).result?;
            }
            Step::Mkdir(at) => {
                layer.mkdir(lane, &root(), &dirs[0], name(at), &mode(0o777)).result?;
            }
            Step::Write(at, offset, byte) => {
                let file = file(lane, at)?;
                let written = layer.write(lane, &root(), &file, offset.into(), &[byte; 100], Stable::Unstable);
                assert_eq!(written.result?.count, 100);
            }
            Step::Read(at, offset) => {
                let file = file(lane, at)?;
                let mut bytes = Vec::new();
                layer.read(lane, &root(), &file, offset.into(), 300, &mut bytes).result?;
                return Ok(vec![bytes]);
            }
            Step::Cut(at, size) => {
                let file = file(lane, at)?;
                let to = SetAttr { size: Some(size.into()), ..SetAttr::default() };
                layer.setattr(lane, &root(), &file, &to, None, Resize::Owner).result?;
            }
            Step::Mode(at, bits) => {
                let file = file(lane, at)?;
                layer.setattr(lane, &root(), &file, &mode(bits.into()), None, Resize::Owner).result?;
            }
            Step::Remove(at) => layer.remove(lane, &root(), &dirs[0], name(at)).result?,
            Step::Rmdir(at) => layer.rmdir(lane, &root(), &dirs[0], name(at)).result?,
            Step::Rename(from, to) => {
                layer.rename(lane, &root(), &dirs[0], name(from), &dirs[1], name(to)).result?;
            }
            Step::Link(from, to) => {
                let file = file(lane, from)?;
                layer.link(lane, &root(), &file, &dirs[1], name(to)).result?;
            }
            Step::Symlink(_) => {
                layer.symlink(lane, &root(), &dirs[0], b"link", b"nowhere", &SetAttr::default()).result?;
            }
            Step::Unlink(_) => layer.remove(lane, &root(), &dirs[0], b"link").result?,
            Step::List(_) => {
                let mut names = Vec::new();
                let mut take = |entry: ksf_fs::Entry<'_>| {
                    if entry.name != b"." && entry.name != b".." {
                        names.push(entry.name.to_vec());
                    }
                    true
                };
                let detail = ksf_fs::Detail::Names;
                layer.list(lane, &root(), &dirs[0], ksf_fs::Cursor::default(), detail, &mut take).result?;
                names.sort();
                return Ok(names);
            }
            Step::CloseIdle => layer.settle_owed(lane, &layer.close_idle()).unwrap(),
        }
        Ok(Vec::new())
    })();
    done.map_err(|error| error.kind())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_do_what_they_do_on_a_plain_folder(steps in steps()) {
        with_lane(|lane, served| {
            let other = ksf_test::Folder::to_export();
            for (at, step) in steps.iter().enumerate() {
                let ours = by_handles(&served, lane, step);
                let theirs = plain(&other.path(""), step);
                match step {
                    // Both folders are looked up before the call, so which of two errors comes first may differ.
                    Step::Rename(..) | Step::Link(..) => assert_eq!(ours.is_ok(), theirs.is_ok(), "step {at}: {step:?}"),
                    _ => assert_eq!(ours, theirs, "step {at}: {step:?}"),
                }
            }
            let (ours, theirs) = (tree(&served.path("")), tree(&other.path("")));
            assert_eq!(ours, theirs);
        });
    }
}
