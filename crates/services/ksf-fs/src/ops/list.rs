//! Listing folders.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{AtFlags, OFlags, RawDir, SeekFrom, Statx, StatxFlags};
use rustix::io::Errno;

use crate::attr::{ASKED, Attr, FileType, Found, Seen, Time};
use crate::credential::Credential;
use crate::error::{ErrorKind, FsError};
use crate::export::{AccessTimes, Export};
use crate::handle::Handle;
use crate::lane::{ENTRIES_BYTES, Lane};
use crate::layer::{Call, EXECUTE_BIT, Fs, Node, READ_BIT, describe};
use crate::name_cache::{Names, RawEntry};
use crate::rights::{is_settled_at, now};
use crate::sys;

/// Bytes of entries that are asked for at once with attributes and handles: in a reply an entry then takes six times as many.
const DETAILED_BYTES: usize = ENTRIES_BYTES / 4;

/// What `statx` is asked for of an entry.
const OF_ENTRY: StatxFlags = ASKED.union(StatxFlags::BTIME).union(StatxFlags::MNT_ID);

/// Where a listing goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The cookie of the last entry that the client has; 0: from the start. It is the file system's own number.
    pub cookie: u64,
    /// That of the listing before; 0 is let pass.
    pub verifier: u64,
}

/// What is told of each entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Name, number and type.
    Names,
    /// Handle and attributes, too.
    Handles,
}

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its name: any bytes but '/' and NUL.
    pub name: &'a [u8],
    /// Inode number, that of `found` if there is one. [`Fs::list`] gives a mount inside of the export that of the folder below it, and
    /// a subvolume that of its name; `found` has the one in the subvolume.
    pub fileid: u64,
    /// Export and part of its file system ([`Attr::fsid`]), for `fileid`. [`Fs::list_open`] gives the numbers of the object itself,
    /// or ones that no object has, if it is a mount.
    pub fsid: u64,
    /// Where a listing goes on behind this entry.
    pub cookie: u64,
    /// What it is, where the file system tells it with the name.
    pub file_type: Option<FileType>,
    /// Handle and attributes, if they were asked for and the caller may look. `None`: for `..` below the root, for mounts (in an
    /// exclusive export a mount on a file may be told as the file for a minute), for what was removed meanwhile, and, on file systems other than ext4, xfs, btrfs and tmpfs, where the process has no descriptor
    /// left.
    pub found: Option<Found>,
}

impl<'a> Entry<'a> {
    /// An entry as the kernel returns it, of a folder in this part.
    pub(super) fn of(raw: &RawEntry<'a>, fsid: u64) -> Self {
        let RawEntry { name, inode, cookie, file_type } = *raw;
        Self { name: name.to_bytes(), fileid: inode, fsid, cookie, file_type, found: None }
    }
}

/// What came of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// There is no entry behind the last one.
    pub eof: bool,
    /// The same for the life of the folder, also when it changes: the cookies stay right.
    pub verifier: u64,
}

impl Fs {
    /// Lists the entries of a folder, `.` and `..` among them, in the order of the file system, until `take` returns false: then
    /// that entry is not part of the listing. `take` runs with the caller's identity, and must not block.
    pub fn list(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        from: Cursor,
        detail: Detail,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Seen<Listed> {
        let begun = now();
        let node = match self.node(lane, dir) {
            Ok(node) => node,
            Err(error) => return Seen::failed(error),
        };
        let changing = self.attrs.changing(dir);
        let result = self.list_node(lane, credential, (dir, &node, begun), from, detail, take);
        drop(changing);
        // Read again: a listing changes the time of the last access.
        let after = self.node(lane, dir).map_or(node.attr, |node| node.attr);
        Seen { after: Some(after), result }
    }

    fn list_node(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        (dir, node, begun): (&Handle, &Node, Duration),
        from: Cursor,
        detail: Detail,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<Listed, FsError> {
        if node.attr.file_type != FileType::Directory {
            return Err(ErrorKind::NotDirectory.into());
        }
        let call = self.begin(lane, credential, dir, false)?;
        // Never 0, which clients send before they have one.
        let verifier = dir.number() | 1;
        let is_foreign = from.verifier != 0 && from.verifier != verifier;
        if from.cookie != 0 && (is_foreign || i64::try_from(from.cookie).is_err()) {
            return Err(ErrorKind::BadCookie.into());
        }
        let begin = || {
            sys::access(&*node.descriptor, READ_BIT)?;
            let is_of_known = detail == Detail::Handles && call.export.options().exclusive;
            let knows_attrs = is_of_known && sys::access(&*node.descriptor, EXECUTE_BIT).is_ok();
            Ok::<_, FsError>(Listing { fs: self, call: &call, dir, node, detail, begun, knows_attrs })
        };
        if let Some(names) = self.names.get(dir, node.attr.ctime)
            && let Some(behind) = names.behind(from.cookie)
        {
            let eof = lane.as_caller(&call.caller, || Ok::<_, FsError>(begin()?.run_known(behind, take)))??;
            return Ok(Listed { eof, verifier });
        }
        let folder = match self.descriptors.take_entries(dir) {
            Some(folder) => folder,
            None => self.reopen(call.export, &node.descriptor, OFlags::RDONLY | OFlags::DIRECTORY)?,
        };
        let mut memory = lane.take_entries();
        let room = if detail == Detail::Handles { DETAILED_BYTES } else { ENTRIES_BYTES };
        let listed = lane.as_caller(&call.caller, || begin()?.run(&folder, from.cookie, &mut memory[..room], take));
        lane.put_entries(memory);
        let eof = listed??;
        self.descriptors.put_entries(dir, folder);
        Ok(Listed { eof, verifier })
    }
}

/// A folder that is being listed, as the caller.
struct Listing<'a> {
    fs: &'a Fs,
    call: &'a Call<'a>,
    dir: &'a Handle,
    node: &'a Node,
    detail: Detail,
    /// Time since 1970, before `node` was read.
    begun: Duration,
    /// Only this server changes the entries, and the caller may look at them.
    knows_attrs: bool,
}

impl Listing<'_> {
    /// True at the end of the folder.
    fn run(
        &self,
        folder: &OwnedFd,
        cookie: u64,
        memory: &mut [MaybeUninit<u8>],
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<bool, FsError> {
        let mut names = (cookie == 0 && self.keeps_names()).then(Names::default);
        let period = self.fs.names.period();
        let eof = each_entry(folder, cookie, memory, &mut |raw| {
            names.take_if(|names| !names.push(raw));
            take(self.entry(raw))
        })?;
        if let Some(names) = names.filter(|_| eof) {
            self.fs.names.keep(self.dir, self.node.attr.ctime, period, names);
        }
        Ok(eof)
    }

    /// [`Listing::run`] with names that are known.
    fn run_known<'b>(
        &self,
        mut entries: impl Iterator<Item = RawEntry<'b>>,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> bool {
        entries.all(|raw| take(self.entry(&raw)))
    }

    /// True if all names that are read now belong to the folder's ctime, and another listing need not change the time of its last
    /// access.
    fn keeps_names(&self) -> bool {
        let export = self.export();
        export.is_warm()
            && export.access_times != AccessTimes::Always
            && is_settled_at(self.node.attr.ctime, self.begun)
    }

    fn entry<'b>(&self, raw: &RawEntry<'b>) -> Entry<'b> {
        let name = raw.name;
        // What lies above the root is not part of the export.
        let is_root = name == c".." && self.dir == self.export().root();
        let entry = Entry::of(raw, self.node.attr.fsid);
        let found = if self.detail == Detail::Handles { self.found(raw, is_root) } else { None };
        let fileid = match &found {
            _ if is_root => self.node.attr.fileid,
            // The name may have passed to this object since the kernel read the entry. A client takes two numbers for a mount.
            Some(found) if found.attr.fsid == self.node.attr.fsid => found.attr.fileid,
            _ => entry.fileid,
        };
        Entry { fileid, found, ..entry }
    }

    fn found(&self, raw: &RawEntry<'_>, is_root: bool) -> Option<Found> {
        let name = raw.name;
        if is_root || name == c"." {
            return Some(Found { handle: self.dir.clone(), attr: self.node.attr });
        }
        if name == c".." {
            return None;
        }
        if let Some(found) = self.by_name(raw).ok()? {
            return Some(found);
        }
        // It is not kept open: a long listing would push out all that is in use.
        let object = self.fs.open_name(self.export(), &self.node.descriptor, name).ok()?;
        describe(self.export(), &object, Some((self.dir, name))).ok()
    }

    /// Handle and attributes of the object that has a name, with one call of the kernel if the handle is known, else with two; with none
    /// for a file of an exclusive export whose attributes are known, too. `None`: the object must be opened, to see that both are of one
    /// object.
    ///
    /// The name may pass to another inode between the two calls, which its number shows. Only an inode that is new takes the number of
    /// one that is gone: then the handle, asked for first, is stale, as if the object had been removed after the listing.
    fn by_name(&self, raw: &RawEntry<'_>) -> Result<Option<Found>, FsError> {
        let RawEntry { name, inode, file_type, .. } = *raw;
        let (export, folder) = (self.export(), &*self.node.descriptor);
        let found = |handle: Handle, attr: Attr| {
            export.learn_listed(&handle, self.dir, name);
            Ok(Some(Found { handle, attr }))
        };
        let attr_of = |stat: &Statx| Attr::of(stat, export.id(), 0);
        let look = || rustix::fs::statx(folder, name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, OF_ENTRY);
        let is_on_mount = |stat: &Statx| i32::try_from(stat.stx_mnt_id) == Ok(export.mount);
        let is_on_device = |stat: &Statx| (stat.stx_dev_major, stat.stx_dev_minor) == export.device;
        // Known handles are of the part of the root. In another one, a subvolume, the number may be that of another object.
        let is_in_part = self.node.attr.fsid == u64::from(export.id()) << 32;
        if is_in_part && let Some((born, handle)) = self.fs.handles.get(export.id(), inode) {
            // It had its number before the names were read, and has it still.
            let may_know = self.knows_attrs && file_type == Some(FileType::Regular) && is_settled_at(born, self.begun);
            if may_know && let Some(attr) = self.fs.attrs.get(&handle) {
                return found(handle, attr);
            }
            let filling = may_know.then(|| self.fs.attrs.filling(&handle)).flatten();
            let stat = look()?;
            let is_same = (stat.stx_ino, born_at(&stat)) == (inode, Some(born));
            if is_same && is_on_mount(&stat) && is_on_device(&stat) {
                let attr = attr_of(&stat);
                if let Some(filling) = filling {
                    filling.keep(&handle, &attr);
                }
                return found(handle, attr);
            }
        }
        let (kernel, mount) = sys::name_to_handle(folder, name)?;
        let stat = look()?;
        if mount != export.mount || !is_on_mount(&stat) {
            return Err(ErrorKind::MountPoint.into());
        }
        if kernel.inode() != Some(stat.stx_ino) || !is_on_device(&stat) {
            return Ok(None);
        }
        let handle = export.handle(&kernel).ok_or(ErrorKind::NotSupported)?;
        if let Some(born) = born_at(&stat).filter(|born| is_settled_at(*born, self.begun)) {
            self.fs.handles.keep(export.id(), stat.stx_ino, (born, handle.clone()));
        }
        found(handle, attr_of(&stat))
    }

    fn export(&self) -> &Export {
        self.call.export
    }
}

/// The time of birth of an inode, if its file system tells it.
fn born_at(stat: &Statx) -> Option<Time> {
    StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME).then(|| stat.stx_btime.into())
}

/// Calls `take` with each entry behind the one of this cookie until it returns false. True at the end of the folder.
pub(super) fn each_entry(
    folder: &OwnedFd,
    cookie: u64,
    memory: &mut [MaybeUninit<u8>],
    take: &mut dyn FnMut(&RawEntry<'_>) -> bool,
) -> Result<bool, FsError> {
    rustix::fs::seek(folder, SeekFrom::Start(cookie)).map_err(|errno| match errno {
        Errno::INVAL => ErrorKind::BadCookie.into(),
        errno => FsError::from(errno),
    })?;
    let mut entries = RawDir::new(folder, memory);
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(|errno| match errno {
            // The folder was removed.
            Errno::NOENT => ErrorKind::Stale.into(),
            errno => FsError::from(errno),
        })?;
        let raw = RawEntry {
            name: entry.file_name(),
            inode: entry.ino(),
            cookie: entry.next_entry_cookie(),
            file_type: FileType::of(entry.file_type()),
        };
        if !take(&raw) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use ksf_test::{root_or_skip, skip, wait_until};

    use super::*;
    use crate::common::{Served, on_lane, root, wait_until_old, with_lane};
    use crate::credential::Squash;
    use crate::export::ExportOptions;
    use crate::ops::Stable;
    use crate::sys::KernelHandle;

    #[test]
    fn a_known_handle_is_told_of_the_inode_with_its_time_of_birth_alone() {
        let served = Served::open_to_all();
        let (layer, export) = (&served.fs, &served.export);
        std::fs::write(served.path("file"), "12345").unwrap();
        let descriptor = rustix::fs::open(served.path("file"), OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let stat = rustix::fs::statx(&descriptor, c"", AtFlags::EMPTY_PATH, OF_ENTRY).unwrap();
        let own = describe(export, &descriptor, None).unwrap();
        let other = export.handle(&KernelHandle::new(1, &[7; 8]).unwrap()).unwrap();
        let listed = || {
            let root = export.root();
            let list = move || {
                let (mut lane, mut file) = (Lane::attach().unwrap(), None);
                let take = &mut |entry: Entry<'_>| {
                    file = if entry.name == b"file" { entry.found } else { file.take() };
                    true
                };
                let nobody = Credential::unix(0, 0, &[]);
                layer.list(&mut lane, &nobody, root, Cursor::default(), Detail::Handles, take).result.unwrap();
                file.unwrap()
            };
            std::thread::scope(|scope| scope.spawn(list).join().unwrap())
        };
        let born = born_at(&stat).expect("tests run on a file system that tells it");
        let later = Time { seconds: born.seconds + 1, ..born };
        for (known, told) in [(later, &own.handle), (born, &other)] {
            layer.handles.keep(export.id(), stat.stx_ino, (known, other.clone()));
            assert_eq!(listed(), Found { handle: told.clone(), attr: own.attr });
        }
    }

    fn list_root(
        served: &Served,
        lane: &mut Lane,
        caller: &Credential,
        from: Cursor,
    ) -> Result<Vec<(Vec<u8>, u64)>, FsError> {
        let mut all = Vec::new();
        let take = &mut |entry: Entry<'_>| {
            all.push((entry.name.to_vec(), entry.cookie));
            true
        };
        let listed = served.fs.list(lane, caller, served.root(), from, Detail::Handles, take).result?;
        assert!(listed.eof);
        Ok(all)
    }

    /// The ctime of the root, from which on no other change has this one.
    fn settled(served: &Served, lane: &mut Lane) -> Time {
        let mut ctime = || served.fs.getattr(lane, served.root()).unwrap().ctime;
        wait_until("the clock of file systems has gone on", || is_settled_at(ctime(), now()));
        ctime()
    }

    #[test]
    fn names_are_read_once_while_the_folder_stays_and_each_change_is_listed_at_once() {
        with_lane(|lane, served| {
            if served.export.access_times == AccessTimes::Always {
                return skip("needs a file system without strictatime");
            }
            let root = root();
            let (path, names) = (|name| served.path(name), &served.fs.names);
            ["one", "two"].iter().for_each(|name| std::fs::write(path(name), "").unwrap());
            let changes: [&dyn Fn(); 5] = [
                &|| std::fs::write(path("three"), "").unwrap(),
                &|| std::fs::rename(path("three"), path("four")).unwrap(),
                &|| std::fs::hard_link(path("four"), path("five")).unwrap(),
                &|| std::fs::remove_file(path("one")).unwrap(),
                &|| std::fs::create_dir(path("six")).unwrap(),
            ];
            for change in changes {
                change();
                // Not settled, in most rounds.
                list_root(&served, lane, &root, Cursor::default()).unwrap();
                let ctime = settled(&served, lane);
                let all = list_root(&served, lane, &root, Cursor::default()).unwrap();
                let mut told: Vec<_> = all.iter().map(|(name, _)| String::from_utf8(name.clone()).unwrap()).collect();
                let mut there: Vec<_> = std::fs::read_dir(path(""))
                    .unwrap()
                    .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                    .collect();
                there.extend([".".into(), "..".into()]);
                told.sort();
                there.sort();
                assert_eq!(told, there);
                assert!(names.get(served.root(), ctime).is_some());
                for (at, &(_, cookie)) in all.iter().enumerate() {
                    let rest = list_root(&served, lane, &root, Cursor { cookie, verifier: 0 }).unwrap();
                    assert_eq!(rest, all[at + 1..]);
                }
                // The next listing does not ask for them.
                let mut false_names = Names::default();
                assert!(false_names.push(&RawEntry { name: c"of the cache", inode: 1, cookie: 5, file_type: None }));
                names.keep(served.root(), ctime, names.period(), false_names);
                let known = list_root(&served, lane, &root, Cursor::default()).unwrap();
                assert_eq!(known, [(b"of the cache".to_vec(), 5)]);
            }
        });
    }

    #[test]
    fn names_that_are_known_are_for_callers_that_may_read_the_folder() {
        let Some(()) = root_or_skip("identities") else { return };
        with_lane(|lane, served| {
            if served.export.access_times == AccessTimes::Always {
                return skip("needs a file system without strictatime");
            }
            std::fs::set_permissions(served.path(""), std::fs::Permissions::from_mode(0o711)).unwrap();
            let ctime = settled(&served, lane);
            assert_eq!(list_root(&served, lane, &root(), Cursor::default()).unwrap().len(), 2);
            assert!(served.fs.names.get(served.root(), ctime).is_some());
            let other = list_root(&served, lane, &Credential::unix(1000, 1000, &[]), Cursor::default());
            assert_eq!(other.unwrap_err().kind(), ErrorKind::Access);
        });
    }

    #[test]
    fn files_of_an_exclusive_export_are_known_until_this_server_changes_them() {
        let is_root = root_or_skip("identities").is_some();
        on_lane(|lane| {
            let options = ExportOptions { exclusive: true, squash: Squash::None, ..ExportOptions::default() };
            let served = Served::new(options);
            let fs = &served.fs;
            let list = |lane: &mut Lane, caller: &Credential| {
                let mut found = None;
                let take = &mut |entry: Entry<'_>| {
                    found = if entry.name == b"file" { entry.found } else { found.take() };
                    true
                };
                fs.list(lane, caller, served.root(), Cursor::default(), Detail::Handles, take).result.unwrap();
                found
            };
            // The first listing learns the handle, the second the attributes.
            let known = |lane: &mut Lane| {
                wait_until_old(&served.path("file"));
                assert!((0..2).all(|_| list(lane, &root()).is_some()));
                let hits = fs.counters().attr_hits;
                let told = list(lane, &root());
                assert_eq!((&told, fs.counters().attr_hits), (&Some(served.find(lane, "file")), hits + 1));
                told.unwrap()
            };
            let file = served.make(lane, "file").handle;
            assert_eq!(known(lane).attr.size, 0);
            fs.write(lane, &root(), &file, 0, b"12345", Stable::Unstable).result.unwrap();
            assert_eq!(list(lane, &root()).unwrap().attr.size, 5);
            known(lane);
            fs.remove(lane, &root(), served.root(), b"file").result.unwrap();
            assert_eq!(list(lane, &root()), None);
            served.make(lane, "file");
            assert_eq!(list(lane, &root()), Some(served.find(lane, "file")));
            known(lane);
            if is_root {
                std::fs::set_permissions(served.path(""), std::fs::Permissions::from_mode(0o744)).unwrap();
                assert_eq!(list(lane, &Credential::unix(1000, 1000, &[])), None);
            }
        });
    }
}
