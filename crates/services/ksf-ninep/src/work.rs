//! Execution of a request by the file layer, on a lane or a shard, and its reply.

use std::sync::Arc;

use ksf::pool::Chunk;
use ksf_fs::{
    Changed, CreateHow, Credential, FileType, Found, Fs, FsError, Handle, Lane, Length, LockKind, LockRange,
    Node as Special, OpenFile, OpenHow, Resize, SetAttr, WARM_READ_BYTES_MAX, Warm, XATTR_BYTES_MAX, XattrHow, XattrOf,
};
use ksf_proto::p9::{GetLock, HEADER_BYTES, Qid, Qids, Reply, qid_kind};

use crate::fids::{Change, FidId, Node, Setting};
use crate::names::Place;
use crate::wire::{Set, entry_of, qid_of, stat_of, statfs_of, wire_kind};
use rustix::io::Errno;

/// A name in a directory.
pub(crate) type Name = Box<[u8]>;

/// A request with all its arguments.
#[derive(Debug)]
pub(crate) enum Work {
    /// Tattach: the root of an export, and names below it.
    Attach {
        id: FidId,
        caller: Arc<Credential>,
        root: Handle,
        names: Vec<Name>,
    },
    Walk {
        id: FidId,
        from: Arc<Node>,
        names: Vec<Name>,
        in_place: bool,
    },
    Open {
        id: FidId,
        node: Arc<Node>,
        how: OpenHow,
        directory: bool,
        iounit: u32,
        open: Option<OpenFile>,
    },
    Create {
        id: FidId,
        dir: Arc<Node>,
        name: Name,
        mode: u32,
        exclusive: bool,
        gid: u32,
        how: OpenHow,
        iounit: u32,
    },
    Read {
        file: OpenFile,
        offset: u64,
        count: u32,
    },
    Readdir {
        folder: OpenFile,
        offset: u64,
        count: u32,
    },
    Readlink {
        node: Arc<Node>,
    },
    Getattr {
        node: Arc<Node>,
        open: Option<OpenFile>,
    },
    Statfs {
        node: Arc<Node>,
    },
    /// Tclunk of an open fid; closes its file.
    Clunk {
        file: OpenFile,
    },
    Write {
        file: OpenFile,
        offset: u64,
        data: Chunk,
    },
    Setattr {
        node: Arc<Node>,
        open: Option<OpenFile>,
        to: Set,
    },
    Mkdir {
        dir: Arc<Node>,
        name: Name,
        mode: u32,
        gid: u32,
    },
    Symlink {
        dir: Arc<Node>,
        name: Name,
        target: Box<[u8]>,
        gid: u32,
    },
    Mknod {
        dir: Arc<Node>,
        name: Name,
        mode: u32,
        device: (u32, u32),
        gid: u32,
    },
    Link {
        dir: Arc<Node>,
        node: Arc<Node>,
        name: Name,
    },
    Rename {
        node: Arc<Node>,
        place: Option<Arc<Place>>,
        dir: Arc<Node>,
        name: Name,
    },
    Renameat {
        from: Arc<Node>,
        from_name: Name,
        to: Arc<Node>,
        to_name: Name,
    },
    Unlinkat {
        dir: Arc<Node>,
        name: Name,
        directory: bool,
    },
    /// Tremove; closes the fid's open file, too.
    Remove {
        node: Arc<Node>,
        place: Option<Arc<Place>>,
        open: Option<OpenFile>,
    },
    Fsync {
        file: OpenFile,
        data_only: bool,
    },
    /// Reads a value, or all names if `name` is empty.
    Xattrwalk {
        id: FidId,
        node: Arc<Node>,
        name: Name,
        open: Option<OpenFile>,
    },
    /// Tclunk of the fid of Txattrcreate; sets the written value.
    SetXattr {
        setting: Arc<Setting>,
        open: Option<OpenFile>,
    },
    /// `None` releases the lock.
    Lock {
        id: FidId,
        file: OpenFile,
        kind: Option<LockKind>,
        range: LockRange,
    },
    /// The requested lock, with its process and client.
    Getlock {
        file: OpenFile,
        kind: LockKind,
        range: LockRange,
        process: u32,
        client: Box<[u8]>,
    },
}

/// The reply to a request.
#[derive(Debug)]
pub(crate) enum Answer {
    /// A whole message.
    Message(Vec<u8>),
    /// Type and data of a message.
    Data(u8, Vec<u8>),
    /// Rlerror.
    Error(Errno),
}

/// Result of a request: the reply, and the change of its fid.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) answer: Answer,
    pub(crate) change: Option<Change>,
}

impl From<Errno> for Done {
    fn from(errno: Errno) -> Self {
        Self { answer: Answer::Error(errno), change: None }
    }
}

impl Done {
    fn read(mut data: Vec<u8>) -> Self {
        if data.capacity() / 2 > data.len() {
            // End of the file. The output counts bytes by length, not capacity.
            data.shrink_to_fit();
        }
        Self { answer: Answer::Data(Reply::Read { data: Default::default() }.kind(), data), change: None }
    }

    fn message(tag: u16, reply: Reply<'_>, change: Option<Change>) -> Self {
        let mut message = Vec::with_capacity(64);
        let answer = match reply.put(tag, &mut message) {
            Ok(()) => Answer::Message(message),
            // No string of the kernel is so long.
            Err(_) => Answer::Error(Errno::IO),
        };
        Self { answer, change }
    }
}

impl Work {
    /// Class of the time for which the request may occupy its lane.
    pub(crate) fn length(&self) -> Length {
        match self {
            Self::Read { .. } | Self::Write { .. } | Self::Readdir { .. } => Length::Long,
            _ => Length::Short,
        }
    }

    /// The request's object; the request waits in the queue of its export.
    pub(crate) fn handle(&self) -> &Handle {
        match self {
            Self::Attach { root, .. } => root,
            Self::Walk { from: node, .. }
            | Self::Open { node, .. }
            | Self::Create { dir: node, .. }
            | Self::Readlink { node }
            | Self::Xattrwalk { node, .. }
            | Self::Getattr { node, .. }
            | Self::Statfs { node }
            | Self::Setattr { node, .. }
            | Self::Mkdir { dir: node, .. }
            | Self::Symlink { dir: node, .. }
            | Self::Mknod { dir: node, .. }
            | Self::Link { dir: node, .. }
            | Self::Rename { node, .. }
            | Self::Renameat { from: node, .. }
            | Self::Unlinkat { dir: node, .. }
            | Self::Remove { node, .. } => &node.handle,
            Self::SetXattr { setting, .. } => &setting.node.handle,
            Self::Read { file, .. }
            | Self::Readdir { folder: file, .. }
            | Self::Clunk { file }
            | Self::Write { file, .. }
            | Self::Fsync { file, .. }
            | Self::Lock { file, .. }
            | Self::Getlock { file, .. } => file.handle(),
        }
    }

    /// Most bytes of an extended attribute that count with the request: a fid had them before, or gets them with the result.
    pub(crate) fn value_bytes(&self) -> usize {
        match self {
            Self::SetXattr { setting, .. } => setting.value.capacity(),
            Self::Xattrwalk { .. } => XATTR_BYTES_MAX,
            _ => 0,
        }
    }

    /// Bytes of memory that the request takes until it is executed.
    pub(crate) fn bytes(&self) -> usize {
        let more = match self {
            Self::Write { data, .. } => data.len(),
            Self::Symlink { target, .. } => target.len(),
            Self::SetXattr { setting, .. } => setting.value.capacity(),
            _ => 0,
        };
        size_of::<Self>() + more
    }

    /// A copy of a request that opens an object by handle, or reads or changes its attributes, for a second try: [`Work::with_open`]
    /// makes it use an open file.
    pub(crate) fn by_handle(&self) -> Option<Self> {
        let open = None;
        match self {
            Self::Open { id, node, how, directory, iounit, open: None } => {
                let node = Arc::clone(node);
                Some(Self::Open { id: *id, node, how: *how, directory: *directory, iounit: *iounit, open })
            }
            Self::Getattr { node, open: None } => Some(Self::Getattr { node: Arc::clone(node), open }),
            Self::Setattr { node, open: None, to } => Some(Self::Setattr { node: Arc::clone(node), open, to: *to }),
            Self::Xattrwalk { id, node, name, open: None } => {
                Some(Self::Xattrwalk { id: *id, node: Arc::clone(node), name: name.clone(), open })
            }
            Self::SetXattr { setting, open: None } => Some(Self::SetXattr { setting: Arc::clone(setting), open }),
            _ => None,
        }
    }

    pub(crate) fn with_open(mut self, file: OpenFile) -> Self {
        if let Self::Open { open, .. }
        | Self::Getattr { open, .. }
        | Self::Setattr { open, .. }
        | Self::Xattrwalk { open, .. }
        | Self::SetXattr { open, .. } = &mut self
        {
            *open = Some(file);
        }
        self
    }

    /// Change of the fid if the request fails.
    pub(crate) fn undo(&self) -> Option<Change> {
        match self {
            Self::Attach { id, .. } | Self::Xattrwalk { id, .. } | Self::Walk { id, in_place: false, .. } => {
                Some(Change::Free(*id))
            }
            _ => None,
        }
    }

    /// True if the request changes a fid, or its name, when it ends.
    pub(crate) fn changes_fid(&self) -> bool {
        matches!(
            self,
            Self::Attach { .. }
                | Self::Walk { .. }
                | Self::Open { .. }
                | Self::Create { .. }
                | Self::Rename { .. }
                | Self::Xattrwalk { .. }
        )
    }

    /// Executes the request on the shard; `None` if it needs a lane.
    pub(crate) fn at_once(&self, mut fs: Warm<'_>, tag: u16) -> Option<Done> {
        match self {
            Self::Getattr { node, .. } => {
                let stat = stat_of(&fs.getattr(&node.handle)?);
                Some(Done::message(tag, Reply::Getattr { stat }, None))
            }
            Self::Walk { id, from, names, in_place } => {
                let look = |dir: &Handle, name: &[u8]| Some(fs.lookup(&from.caller, dir, name)?.result);
                let walked = walk_by(look, from, names)?;
                let done = walked_to(tag, walked, (*id, names.len(), *in_place));
                Some(done.unwrap_or_else(|errno| Done { answer: Answer::Error(errno), change: self.undo() }))
            }
            Self::Read { file, offset, count } if *count as usize <= WARM_READ_BYTES_MAX => {
                let mut data = Vec::new();
                fs.read_open(file, *offset, *count as usize, &mut data)?;
                Some(Done::read(data))
            }
            _ => None,
        }
    }

    /// Executes the request on a lane, but for its syncs.
    pub(crate) fn run(self, fs: &Fs, lane: &mut Lane, tag: u16) -> Done {
        let undo = self.undo();
        self.try_run(fs, lane, tag).unwrap_or_else(|errno| Done { answer: Answer::Error(errno), change: undo })
    }

    fn try_run(self, fs: &Fs, lane: &mut Lane, tag: u16) -> Result<Done, Errno> {
        let plain = |reply: Reply<'_>| Done::message(tag, reply, None);
        Ok(match self {
            Self::Attach { id, caller, root, names } => {
                let from = Node { handle: root, caller };
                let attr = fs.getattr(lane, &from.handle)?;
                let walked = walk(fs, lane, &from, &names);
                if walked.qids.len() < names.len() {
                    return Err(walked.stopped.unwrap_or(Errno::NOENT));
                }
                let qid = walked.qids.last().copied().unwrap_or_else(|| qid_of(&attr));
                if qid.kind != qid_kind::DIRECTORY {
                    return Err(Errno::NOTDIR);
                }
                let (node, _) = walked.found.unwrap_or((from, None));
                // The root has no name: its parent is not in the attach.
                Done::message(tag, Reply::Attach { qid }, Some(Change::Found(id, Arc::new(node), None)))
            }
            Self::Walk { id, from, names, in_place } => {
                let walked = walk(fs, lane, &from, &names);
                walked_to(tag, walked, (id, names.len(), in_place))?
            }
            Self::Open { id, node, how, directory, iounit, open } => {
                // Before the open, which may truncate.
                if directory {
                    let file_type = match &open {
                        Some(file) => file.file_type(),
                        None => fs.getattr(lane, &node.handle)?.file_type,
                    };
                    if file_type != FileType::Directory {
                        return Err(Errno::NOTDIR);
                    }
                }
                let (file, attr) = match &open {
                    Some(file) => fs.open_again(lane, &node.caller, file, how)?,
                    None => fs.open(lane, &node.caller, &node.handle, how)?,
                };
                let reply = Reply::Lopen { qid: qid_of(&attr), iounit };
                Done::message(tag, reply, Some(Change::Opened(id, None, file)))
            }
            Self::Create { id, dir, name, mode, exclusive, gid, how, iounit } => {
                let caller = dir.caller.with_group(gid);
                let made = fs.create_open(lane, &caller, &dir.handle, &name, (mode, exclusive), how);
                let (file, found) = made.result?;
                let reply = Reply::Lcreate { qid: qid_of(&found.attr), iounit };
                let place = Place { dir: dir.handle.clone(), name };
                let node = Node { handle: found.handle, caller: Arc::clone(&dir.caller) };
                Done::message(tag, reply, Some(Change::Opened(id, Some((Arc::new(node), place)), file)))
            }
            Self::Read { file, offset, count } => {
                let mut data = Vec::new();
                fs.read_open(lane, &file, offset, count as usize, &mut data)?;
                Done::read(data)
            }
            Self::Readdir { folder, offset, count } => {
                let data = list(fs, lane, &folder, offset, count as usize)?;
                Done { answer: Answer::Data(Reply::Readdir { data: Default::default() }.kind(), data), change: None }
            }
            Self::Readlink { node } => {
                let target = fs.readlink(lane, &node.caller, &node.handle).result?;
                plain(Reply::Readlink { target: &target })
            }
            Self::Getattr { node, open } => {
                let attr = match &open {
                    Some(file) => fs.attr_open(lane, file)?,
                    None => fs.getattr(lane, &node.handle)?,
                };
                plain(Reply::Getattr { stat: stat_of(&attr) })
            }
            Self::Statfs { node } => {
                let room = fs.fsstat(lane, &node.handle).result?;
                let names = fs.pathconf(lane, &node.handle).result?;
                plain(Reply::Statfs { stat: statfs_of(&room, node.handle.export_id(), names.name_max) })
            }
            Self::Clunk { file } => {
                file.close(lane);
                plain(Reply::Clunk {})
            }
            Self::Write { file, offset, data } => {
                let count = fs.write_open(lane, &file, offset, &data)?;
                plain(Reply::Write { count: count as u32 })
            }
            Self::Setattr { node, open, to } => {
                match (&to, &open) {
                    (Set::Ctime, open) => fs.set_ctime(lane, &node.caller, object_of(&node, open.as_ref()))?,
                    (Set::Attr(to), Some(file)) => fs.setattr_open(lane, &node.caller, file, to)?,
                    (Set::Attr(to), None) => {
                        fs.setattr(lane, &node.caller, &node.handle, to, None, Resize::Writer).result?;
                    }
                }
                plain(Reply::Setattr {})
            }
            Self::Mkdir { dir, name, mode, gid } => {
                let attr = SetAttr { mode: Some(mode), ..SetAttr::default() };
                let made = fs.mkdir(lane, &dir.caller.with_group(gid), &dir.handle, &name, &attr);
                plain(Reply::Mkdir { qid: qid_of_made(made)? })
            }
            Self::Symlink { dir, name, target, gid } => {
                let (caller, attr) = (dir.caller.with_group(gid), SetAttr::default());
                let made = fs.symlink(lane, &caller, &dir.handle, &name, &target, &attr);
                plain(Reply::Symlink { qid: qid_of_made(made)? })
            }
            Self::Mknod { dir, name, mode, device: (major, minor), gid } => {
                let (caller, attr) = (dir.caller.with_group(gid), SetAttr { mode: Some(mode), ..SetAttr::default() });
                let special = match mode & libc::S_IFMT {
                    libc::S_IFIFO => Some(Special::Fifo),
                    libc::S_IFSOCK => Some(Special::Socket),
                    libc::S_IFCHR => Some(Special::CharDevice(major, minor)),
                    libc::S_IFBLK => Some(Special::BlockDevice(major, minor)),
                    libc::S_IFREG | 0 => None,
                    libc::S_IFDIR => return Err(Errno::PERM),
                    _ => return Err(Errno::INVAL),
                };
                let made = match special {
                    Some(special) => fs.mknod(lane, &caller, &dir.handle, &name, special, &attr),
                    None => fs.create(lane, &caller, &dir.handle, &name, &CreateHow::Guarded(attr)),
                };
                plain(Reply::Mknod { qid: qid_of_made(made)? })
            }
            Self::Link { dir, node, name } => {
                fs.link(lane, &dir.caller, &node.handle, &dir.handle, &name).result?;
                plain(Reply::Link {})
            }
            Self::Rename { node, place, dir, name } => {
                let from = place.as_deref().ok_or(Errno::INVAL)?.clone();
                let to = Place { dir: dir.handle.clone(), name };
                let moved = rename(fs, lane, &node.caller, from, to, Some(&node.handle))?;
                Done::message(tag, Reply::Rename {}, moved)
            }
            Self::Renameat { from, from_name, to, to_name } => {
                let old = Place { dir: from.handle.clone(), name: from_name };
                let new = Place { dir: to.handle.clone(), name: to_name };
                let moved = rename(fs, lane, &from.caller, old, new, None)?;
                Done::message(tag, Reply::Renameat {}, moved)
            }
            Self::Unlinkat { dir, name, directory } => {
                unlink(fs, lane, &dir.caller, (&dir.handle, &name), directory)?;
                plain(Reply::Unlinkat {})
            }
            Self::Remove { node, place, open } => {
                let removed = place
                    .as_deref()
                    .map(|Place { dir, name }| fs.remove_object(lane, &node.caller, dir, name, &node.handle).result);
                if let Some(file) = open {
                    file.close(lane);
                }
                removed.ok_or(Errno::INVAL)??;
                plain(Reply::Remove {})
            }
            Self::Xattrwalk { id, node, name, open } => {
                let object = object_of(&node, open.as_ref());
                let value = match &*name {
                    b"" => fs.xattr_names(lane, &node.caller, object)?,
                    name => fs.xattr(lane, &node.caller, object, name)?,
                };
                let reply = Reply::Xattrwalk { size: value.len() as u64 };
                Done::message(tag, reply, Some(Change::Value(id, value.into())))
            }
            Self::SetXattr { setting, open } => {
                set_xattr(fs, lane, &setting, open.as_ref())?;
                plain(Reply::Clunk {})
            }
            Self::Lock { id, file, kind, range } => {
                // A client that wants to wait asks again.
                let is_granted = fs.lock_open(lane, &file, kind, range)?;
                let status = if is_granted { LOCK_GRANTED } else { LOCK_BLOCKED };
                Done::message(tag, Reply::Lock { status }, Some(Change::Locked(id)))
            }
            Self::Getlock { file, kind, range, process, client } => {
                let lock = match fs.find_lock(lane, &file, kind, range)? {
                    // The kernel does not report the holder.
                    Some((kind, range)) => get_lock(wire_kind(Some(kind)), range, 0, b""),
                    None => get_lock(wire_kind(None), range, process, &client),
                };
                plain(Reply::Getlock { lock })
            }
            // The owed sync determines the result.
            Self::Fsync { .. } => plain(Reply::Fsync {}),
        })
    }
}

/// Status values of Rlock.
const LOCK_GRANTED: u8 = 0;
const LOCK_BLOCKED: u8 = 1;

fn get_lock(kind: u8, range: LockRange, process: u32, client: &[u8]) -> GetLock<'_> {
    GetLock { kind, start: range.start, length: range.length, process, client }
}

/// Result of a walk, possibly partial.
#[derive(Default)]
struct Walked {
    qids: Vec<Qid>,
    /// Object of the last name found, and its place.
    found: Option<(Node, Option<Place>)>,
    /// Error that stopped the walk.
    stopped: Option<Errno>,
}

/// Looks names up, each in the object of the one before.
fn walk(fs: &Fs, lane: &mut Lane, from: &Node, names: &[Name]) -> Walked {
    let look = |dir: &Handle, name: &[u8]| Some(fs.lookup(lane, &from.caller, dir, name).result);
    walk_by(look, from, names).unwrap_or_default()
}

/// [`walk`]; `None` if `look` has no answer.
fn walk_by(
    mut look: impl FnMut(&Handle, &[u8]) -> Option<Result<Found, FsError>>,
    from: &Node,
    names: &[Name],
) -> Option<Walked> {
    let mut walked = Walked::default();
    for name in names {
        let dir = walked.found.as_ref().map_or(&from.handle, |(node, _)| &node.handle);
        let Found { handle, attr } = match look(dir, name)? {
            Ok(found) => found,
            Err(error) => {
                walked.stopped = Some(error.into());
                break;
            }
        };
        let is_name = !matches!(&**name, b"." | b"..");
        let place = is_name.then(|| Place { dir: dir.clone(), name: name.clone() });
        walked.qids.push(qid_of(&attr));
        walked.found = Some((Node { handle, caller: Arc::clone(&from.caller) }, place));
    }
    Some(walked)
}

/// The reply to a Twalk, and the change of its fid.
fn walked_to(tag: u16, walked: Walked, (id, names, in_place): (FidId, usize, bool)) -> Result<Done, Errno> {
    if let Some(errno) = walked.stopped.filter(|_| walked.qids.is_empty()) {
        return Err(errno);
    }
    let change = match walked.found.filter(|_| walked.qids.len() == names) {
        Some((node, place)) => Some(Change::Found(id, Arc::new(node), place)),
        None => (!in_place).then_some(Change::Free(id)),
    };
    let mut buffer = Vec::new();
    let qids = Qids::of(&walked.qids, &mut buffer).map_err(|_| Errno::IO)?;
    Ok(Done::message(tag, Reply::Walk { qids }, change))
}

/// Reads whole entries of a directory, as many as fit in `bytes_max`.
fn list(fs: &Fs, lane: &mut Lane, folder: &OpenFile, offset: u64, bytes_max: usize) -> Result<Vec<u8>, Errno> {
    let mut data = Vec::new();
    let mut has_room = true;
    fs.list_open(lane, folder, offset, &mut |entry| {
        let before = data.len();
        has_room = entry_of(&entry).put(&mut data).is_ok() && data.len() <= bytes_max;
        if !has_room {
            data.truncate(before);
        }
        has_room
    })?;
    // An empty reply would mean the end of the directory.
    if data.is_empty() && !has_room { Err(Errno::INVAL) } else { Ok(data) }
}

fn object_of<'a>(node: &'a Node, open: Option<&'a OpenFile>) -> XattrOf<'a> {
    open.map_or(XattrOf::Handle(&node.handle), XattrOf::Open)
}

fn set_xattr(fs: &Fs, lane: &mut Lane, setting: &Setting, open: Option<&OpenFile>) -> Result<(), Errno> {
    let Setting { node, name, size, value, how } = setting;
    if value.len() != *size {
        return Err(Errno::INVAL);
    }
    let object = object_of(node, open);
    // Linux' client removes an attribute in this way.
    let is_removed = value.is_empty() && *how == XattrHow::Replace;
    let done = if is_removed {
        fs.remove_xattr(lane, &node.caller, object, name)
    } else {
        fs.set_xattr(lane, &node.caller, object, (name, value), *how)
    };
    Ok(done?)
}

fn qid_of_made(made: Changed<Found>) -> Result<Qid, Errno> {
    Ok(qid_of(&made.result?.attr))
}

fn unlink(
    fs: &Fs,
    lane: &mut Lane,
    caller: &Credential,
    (dir, name): (&Handle, &[u8]),
    directory: bool,
) -> Result<(), FsError> {
    let removed = if directory { fs.rmdir(lane, caller, dir, name) } else { fs.remove(lane, caller, dir, name) };
    removed.result
}

/// Renames, and says what that changes of the fids: nothing where both names are links of one file, which keeps both
/// (POSIX, rename). `object`: the one that must have the old name.
fn rename(
    fs: &Fs,
    lane: &mut Lane,
    caller: &Credential,
    from: Place,
    to: Place,
    object: Option<&Handle>,
) -> Result<Option<Change>, Errno> {
    let renamed = match object {
        Some(object) => fs.rename_object(lane, caller, (&from.dir, &from.name), (&to.dir, &to.name), object),
        None => fs.rename(lane, caller, &from.dir, &from.name, &to.dir, &to.name),
    };
    renamed.result?;
    let mut found = |place: &Place| match fs.lookup(lane, caller, &place.dir, &place.name).result {
        Ok(found) => Ok(Some(found.handle)),
        Err(error) if Errno::from(error) == Errno::NOENT => Ok(None),
        Err(error) => Err(error),
    };
    // If that cannot be found out they keep their names: by one that is another's now nothing is removed.
    let is_kept = match found(&from) {
        Ok(None) => false,
        Ok(old) => found(&to).map_or(true, |new| old == new),
        Err(_) => true,
    };
    Ok((!is_kept).then_some(Change::Moved(from, to)))
}

/// Appends a whole Rlerror.
pub(crate) fn put_error(tag: u16, errno: Errno, out: &mut Vec<u8>) {
    let start = out.len();
    if (Reply::Lerror { ecode: errno.raw_os_error() as u32 }).put(tag, out).is_err() {
        // It always fits.
        out.truncate(start);
    }
    debug_assert_eq!(out.len() - start, HEADER_BYTES + 4);
}
