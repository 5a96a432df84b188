//! Calls with their arguments, taken out of the message.

use ksf::pool::Chunk;
use ksf_fs::{CreateHow, ErrorKind, Handle, Node, SetAttr, Stable, Time};
use ksf_proto::xdr::{XdrError, XdrReader};

use crate::drc::ENTRY_BYTES;
use crate::procedure::Procedure;
use crate::status::Status;
use crate::wire::{HANDLE_LIMIT_BYTES, NAME_LIMIT_BYTES, TARGET_LIMIT_BYTES, read_guard, read_set_attr};

/// A name in a folder.
pub(crate) type Name = Box<[u8]>;

/// A call that is to be carried out.
#[derive(Debug)]
pub(crate) enum Request {
    Getattr { object: Handle },
    Setattr { object: Handle, to: SetAttr, guard: Option<Time> },
    Lookup { dir: Handle, name: Name },
    Access { object: Handle, wanted: u32 },
    Readlink { link: Handle },
    Read { file: Handle, offset: u64, count: u32 },
    Write { file: Handle, offset: u64, data: Chunk, stable: Stable },
    Create { dir: Handle, name: Name, how: CreateHow },
    Mkdir { dir: Handle, name: Name, attr: SetAttr },
    Symlink { dir: Handle, name: Name, attr: SetAttr, target: Box<[u8]> },
    Mknod { dir: Handle, name: Name, node: Node, attr: SetAttr },
    Remove { dir: Handle, name: Name },
    Rmdir { dir: Handle, name: Name },
    Rename { from: Handle, from_name: Name, to: Handle, to_name: Name },
    Link { file: Handle, dir: Handle, name: Name },
    Readdir { dir: Handle, cookie: u64, verifier: u64, count: u32 },
    Readdirplus { dir: Handle, cookie: u64, verifier: u64, names_bytes_max: u32, count: u32 },
    Fsstat { root: Handle },
    Fsinfo { root: Handle },
    Pathconf { object: Handle },
    Commit { file: Handle },
}

/// Why a call is not carried out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The arguments are not what the procedure declares: GARBAGE_ARGS.
    Garbage,
    /// The procedure answers a status, and the attributes of these objects.
    Status(Status, Box<Objects>),
}

/// The objects of a call, in the order of its arguments, as far as their handles are valid, their export is for the client and the
/// same one.
pub(crate) type Objects = [Option<Handle>; 2];

impl From<XdrError> for Refusal {
    fn from(_: XdrError) -> Self {
        Self::Garbage
    }
}

/// Reads arguments. A handle that is none is told of when all arguments were read: what cannot be decoded is garbage first.
struct Arguments<'a> {
    r: XdrReader<'a>,
    object: &'a dyn Fn(&[u8]) -> Result<Handle, Status>,
}

impl<'a> Arguments<'a> {
    /// The bytes of a handle.
    fn handle(&mut self) -> Result<&'a [u8], XdrError> {
        self.r.opaque(HANDLE_LIMIT_BYTES)
    }

    fn name(&mut self) -> Result<Name, XdrError> {
        self.r.string(NAME_LIMIT_BYTES).map(Name::from)
    }

    /// Ends reading, and looks at the handle.
    fn end(self, handle: &[u8]) -> Result<Handle, Refusal> {
        self.r.finish()?;
        (self.object)(handle).map_err(|status| Refusal::Status(status, Box::default()))
    }

    /// [`Arguments::end`] of two handles, which must be of one export.
    fn end_with_two(self, first: &[u8], second: &[u8]) -> Result<[Handle; 2], Refusal> {
        self.r.finish()?;
        let (status, objects) = match [first, second].map(self.object) {
            [Ok(first), Ok(second)] if first.export_id() == second.export_id() => return Ok([first, second]),
            // No call of one export waits for the disk of another.
            [Ok(first), Ok(_)] => (Status::XDEV, [Some(first), None]),
            [Err(status), second] => (status, [None, second.ok()]),
            [Ok(first), Err(status)] => (status, [Some(first), None]),
        };
        Err(Refusal::Status(status, Box::new(objects)))
    }
}

impl Request {
    /// Reads the arguments of a procedure other than NULL. `object` checks a handle. `keep` keeps a part of them beyond the call.
    pub(crate) fn read(
        procedure: Procedure,
        args: &[u8],
        object: &dyn Fn(&[u8]) -> Result<Handle, Status>,
        keep: impl FnOnce(&[u8]) -> Chunk,
    ) -> Result<Self, Refusal> {
        let mut a = Arguments { r: XdrReader::new(args), object };
        Ok(match procedure {
            // It has no arguments, and is answered elsewhere.
            Procedure::Null => return Err(Refusal::Garbage),
            Procedure::Getattr => {
                let object = a.handle()?;
                Self::Getattr { object: a.end(object)? }
            }
            Procedure::Setattr => {
                let object = a.handle()?;
                let (to, guard) = (read_set_attr(&mut a.r)?, read_guard(&mut a.r)?);
                Self::Setattr { object: a.end(object)?, to, guard }
            }
            Procedure::Lookup => {
                let (dir, name) = (a.handle()?, a.name()?);
                Self::Lookup { dir: a.end(dir)?, name }
            }
            Procedure::Access => {
                let (object, wanted) = (a.handle()?, a.r.u32()?);
                Self::Access { object: a.end(object)?, wanted }
            }
            Procedure::Readlink => {
                let link = a.handle()?;
                Self::Readlink { link: a.end(link)? }
            }
            Procedure::Read => {
                let (file, offset, count) = (a.handle()?, a.r.u64()?, a.r.u32()?);
                Self::Read { file: a.end(file)?, offset, count }
            }
            Procedure::Write => {
                let (file, offset, count) = (a.handle()?, a.r.u64()?, a.r.u32()?);
                let stable = read_stable(&mut a.r)?;
                let data = a.r.opaque(u32::MAX)?;
                // Section 3.3.7: data and count are the same; a client that sends more than it counts means the count.
                let data = data.get(..count as usize).ok_or(Refusal::Garbage)?;
                Self::Write { file: a.end(file)?, offset, data: keep(data), stable }
            }
            Procedure::Create => {
                let (dir, name) = (a.handle()?, a.name()?);
                let how = read_how(&mut a.r)?;
                Self::Create { dir: a.end(dir)?, name, how }
            }
            Procedure::Mkdir => {
                let (dir, name) = (a.handle()?, a.name()?);
                let attr = read_set_attr(&mut a.r)?;
                Self::Mkdir { dir: a.end(dir)?, name, attr }
            }
            Procedure::Symlink => {
                let (dir, name) = (a.handle()?, a.name()?);
                let attr = read_set_attr(&mut a.r)?;
                let target = a.r.string(TARGET_LIMIT_BYTES)?.into();
                Self::Symlink { dir: a.end(dir)?, name, attr, target }
            }
            Procedure::Mknod => {
                let (dir, name) = (a.handle()?, a.name()?);
                let made = read_node(&mut a.r)?;
                let dir = a.end(dir)?;
                match made {
                    Some((node, attr)) => Self::Mknod { dir, name, node, attr },
                    None => return Err(Refusal::Status(Status::BADTYPE, Box::new([Some(dir), None]))),
                }
            }
            Procedure::Remove => {
                let (dir, name) = (a.handle()?, a.name()?);
                Self::Remove { dir: a.end(dir)?, name }
            }
            Procedure::Rmdir => {
                let (dir, name) = (a.handle()?, a.name()?);
                Self::Rmdir { dir: a.end(dir)?, name }
            }
            Procedure::Rename => {
                let (from, from_name) = (a.handle()?, a.name()?);
                let (to, to_name) = (a.handle()?, a.name()?);
                let [from, to] = a.end_with_two(from, to)?;
                Self::Rename { from, from_name, to, to_name }
            }
            Procedure::Link => {
                let (file, dir, name) = (a.handle()?, a.handle()?, a.name()?);
                let [file, dir] = a.end_with_two(file, dir)?;
                Self::Link { file, dir, name }
            }
            Procedure::Readdir => {
                let (dir, cookie, verifier, count) = (a.handle()?, a.r.u64()?, a.r.u64()?, a.r.u32()?);
                Self::Readdir { dir: a.end(dir)?, cookie, verifier, count }
            }
            Procedure::Readdirplus => {
                let (dir, cookie, verifier) = (a.handle()?, a.r.u64()?, a.r.u64()?);
                let (names_bytes_max, count) = (a.r.u32()?, a.r.u32()?);
                Self::Readdirplus { dir: a.end(dir)?, cookie, verifier, names_bytes_max, count }
            }
            Procedure::Fsstat => {
                let root = a.handle()?;
                Self::Fsstat { root: a.end(root)? }
            }
            Procedure::Fsinfo => {
                let root = a.handle()?;
                Self::Fsinfo { root: a.end(root)? }
            }
            Procedure::Pathconf => {
                let object = a.handle()?;
                Self::Pathconf { object: a.end(object)? }
            }
            Procedure::Commit => {
                // Offset and count: the file layer writes the whole file back, which section 3.3.21 allows.
                let (file, _offset, _count) = (a.handle()?, a.r.u64()?, a.r.u32()?);
                Self::Commit { file: a.end(file)? }
            }
        })
    }

    /// The handles that it names.
    pub(crate) fn handles(&self) -> (&Handle, Option<&Handle>) {
        match self {
            Self::Getattr { object }
            | Self::Setattr { object, .. }
            | Self::Access { object, .. }
            | Self::Pathconf { object } => (object, None),
            Self::Readlink { link } => (link, None),
            Self::Read { file, .. } | Self::Write { file, .. } | Self::Commit { file } => (file, None),
            Self::Lookup { dir, .. }
            | Self::Create { dir, .. }
            | Self::Mkdir { dir, .. }
            | Self::Symlink { dir, .. }
            | Self::Mknod { dir, .. }
            | Self::Remove { dir, .. }
            | Self::Rmdir { dir, .. }
            | Self::Readdir { dir, .. }
            | Self::Readdirplus { dir, .. } => (dir, None),
            Self::Fsstat { root } | Self::Fsinfo { root } => (root, None),
            Self::Rename { from, to, .. } => (from, Some(to)),
            Self::Link { file, dir, .. } => (file, Some(dir)),
        }
    }

    /// The objects that it names.
    pub(crate) fn objects(&self) -> Objects {
        let (first, second) = self.handles();
        [Some(first.clone()), second.cloned()]
    }

    /// Bytes of memory that it takes until it is carried out.
    pub(crate) fn bytes(&self) -> usize {
        let more = match self {
            Self::Write { data, .. } => data.len(),
            Self::Symlink { target, .. } => target.len(),
            _ => 0,
        };
        size_of::<Self>() + more
    }

    /// Keeps replies within `transfer_bytes_max`, and listings within [`listing_bytes_max`]: a client that asks for more gets less,
    /// which the RFC allows.
    pub(crate) fn bound(&mut self, transfer_bytes_max: u32) {
        match self {
            Self::Read { count, .. } => *count = (*count).min(transfer_bytes_max),
            Self::Readdir { count, .. } | Self::Readdirplus { count, .. } => {
                *count = (*count).min(listing_bytes_max(transfer_bytes_max));
            }
            _ => {}
        }
    }

    /// Bytes that its results have at most.
    pub(crate) fn results_bytes_max(&self) -> usize {
        let more = match self {
            Self::Read { count, .. } | Self::Readdir { count, .. } | Self::Readdirplus { count, .. } => *count as usize,
            Self::Readlink { .. } => LINK_BYTES_MAX,
            _ => 0,
        };
        FIXED_BYTES + more
    }
}

/// Bytes of a reply to READDIR or READDIRPLUS, which FSINFO names as preferred (`dtpref`). The turn of a connection on a lane is one
/// job, and a listing takes several system calls for each entry: some hundred entries take about as long as a READ of 1 MiB.
pub(crate) fn listing_bytes_max(transfer_bytes_max: u32) -> u32 {
    transfer_bytes_max.min(64 << 10)
}

/// Two folders with their attributes before and after, or an object with its handle and its folder; and the entry of a change in the
/// cache of duplicate requests, which has no other bound for what is under way.
pub(crate) const FIXED_BYTES: usize = 512 + ENTRY_BYTES;
/// Longest target of a symbolic link that the kernel makes: PATH_MAX.
const LINK_BYTES_MAX: usize = 4096;

/// Bytes that the results of a call have at most, by its arguments as they came: what [`Request::results_bytes_max`] says
/// of the request that they are, once it is bound. Takes no memory. 0 for arguments that cannot be read.
pub(crate) fn results_bytes_max(procedure: Procedure, args: &[u8], transfer_bytes_max: u32) -> usize {
    let listing = listing_bytes_max(transfer_bytes_max);
    // Words of 4 bytes between the handle and the number of bytes that is asked for, and the most bytes that it gets.
    let (words_before, bytes_max) = match procedure {
        Procedure::Read => (2, transfer_bytes_max),
        Procedure::Readdir => (4, listing),
        Procedure::Readdirplus => (5, listing),
        Procedure::Readlink => return FIXED_BYTES + LINK_BYTES_MAX,
        _ => return FIXED_BYTES,
    };
    let mut r = XdrReader::new(args);
    let mut count = || -> Result<u32, XdrError> {
        r.opaque(HANDLE_LIMIT_BYTES)?;
        (0..words_before).try_for_each(|_| r.u32().map(drop))?;
        r.u32()
    };
    count().map_or(0, |count| FIXED_BYTES + count.min(bytes_max) as usize)
}

/// `stable_how`.
fn read_stable(r: &mut XdrReader<'_>) -> Result<Stable, XdrError> {
    let offset = r.offset();
    match r.u32()? {
        0 => Ok(Stable::Unstable),
        1 => Ok(Stable::DataSync),
        2 => Ok(Stable::FileSync),
        value => Err(XdrError::Value { offset, value, kind: "stable_how" }),
    }
}

/// `createhow3`.
fn read_how(r: &mut XdrReader<'_>) -> Result<CreateHow, XdrError> {
    let offset = r.offset();
    match r.u32()? {
        0 => read_set_attr(r).map(CreateHow::Unchecked),
        1 => read_set_attr(r).map(CreateHow::Guarded),
        2 => r.u64().map(|verifier| CreateHow::Exclusive(verifier.to_be_bytes())),
        value => Err(XdrError::Value { offset, value, kind: "createmode3" }),
    }
}

/// `mknoddata3`; `None` for the types that MKNOD does not make.
fn read_node(r: &mut XdrReader<'_>) -> Result<Option<(Node, SetAttr)>, XdrError> {
    let offset = r.offset();
    match r.u32()? {
        3 => {
            let (attr, major, minor) = (read_set_attr(r)?, r.u32()?, r.u32()?);
            Ok(Some((Node::BlockDevice(major, minor), attr)))
        }
        4 => {
            let (attr, major, minor) = (read_set_attr(r)?, r.u32()?, r.u32()?);
            Ok(Some((Node::CharDevice(major, minor), attr)))
        }
        6 => Ok(Some((Node::Socket, read_set_attr(r)?))),
        7 => Ok(Some((Node::Fifo, read_set_attr(r)?))),
        1 | 2 | 5 => Ok(None),
        value => Err(XdrError::Value { offset, value, kind: "ftype3" }),
    }
}

/// The status of an error of the file layer.
pub(crate) fn status_of(error: ksf_fs::FsError) -> Status {
    let kind: ErrorKind = error.kind();
    kind.into()
}

#[cfg(test)]
mod tests {
    use ksf_proto::xdr::XdrWrite;

    use super::*;

    #[test]
    fn the_length_of_results_is_read_from_raw_arguments() {
        let args = |words: &[u32]| {
            let mut args = Vec::new();
            args.put_opaque(&[7; 29]);
            words.iter().for_each(|word| args.put_u32(*word));
            args
        };
        let bytes = |procedure, words: &[u32]| results_bytes_max(procedure, &args(words), 1 << 20);
        assert_eq!(bytes(Procedure::Read, &[9, 9, 70_000]), FIXED_BYTES + 70_000);
        assert_eq!(bytes(Procedure::Read, &[9, 9, u32::MAX]), FIXED_BYTES + (1 << 20));
        assert_eq!(bytes(Procedure::Readdir, &[9, 9, 9, 9, 8192]), FIXED_BYTES + 8192);
        assert_eq!(bytes(Procedure::Readdirplus, &[9, 9, 9, 9, 512, 8192]), FIXED_BYTES + 8192);
        assert_eq!(bytes(Procedure::Readdirplus, &[9, 9, 9, 9, 512, 70_000]), FIXED_BYTES + (64 << 10));
        assert_eq!(bytes(Procedure::Readlink, &[]), FIXED_BYTES + LINK_BYTES_MAX);
        assert_eq!(bytes(Procedure::Getattr, &[]), FIXED_BYTES);
        assert_eq!(bytes(Procedure::Read, &[9, 9]), 0);
        assert_eq!(results_bytes_max(Procedure::Read, &[0xff; 8], 1 << 20), 0);
    }
}
