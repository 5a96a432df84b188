//! The files that calls are about: made before a measurement and removed after it, by a client that asks one thing at a time.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use ksf_proto::oncrpc::Reply;
use ksf_proto::oncrpc::record::{MARK_BYTES, RecordMark};

use super::call::{File, MOUNT, NFS, Procedure, Results, put, put_long, put_mode, put_opaque};
use crate::error::LoadError;
use crate::files::Wrong;
use crate::files::content::{Content, Shape, file_name, folder_name};
use crate::rpc::oncrpc::{SUCCESS, call_message, in_words as status_in_words};

/// Bytes of a reply, at most: those of calls that are made here.
const REPLY_BYTES_MAX: usize = 64 * 1024;

/// Bytes of one write, at most: every server takes so many.
const WRITE_BYTES_MAX: usize = 32 * 1024;

pub(super) const MNT: u32 = 1;
const MKDIR: u32 = 9;
const SYMLINK: u32 = 10;
const RMDIR: u32 = 13;
const FILE_SYNC: u32 = 2;

/// The name and the target of the symbolic link.
pub(super) const LINK: &str = "link";
pub(super) const TARGET: &str = "where/it/leads/to";

/// Where the exported folder is, and as whom it is used.
#[derive(Debug, Clone)]
pub(super) struct MountTarget {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) mount_port: u16,
    pub(super) path: String,
    pub(super) credential: Option<Vec<u8>>,
    pub(super) timeout: Duration,
}

/// A folder with files that are all known.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) folder: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) files: Vec<File>,
    pub(super) content: Content,
    root: Vec<u8>,
    name: String,
}

/// The name of the file that a connection creates and removes.
pub(super) fn own_name(connection: u32) -> String {
    format!("own{connection}")
}

/// A connection to one program of the server.
#[derive(Debug)]
pub(super) struct Caller<'a> {
    stream: TcpStream,
    place: &'a MountTarget,
    program: (u32, u32),
    xid: u32,
}

impl<'a> Caller<'a> {
    pub(super) fn connect(place: &'a MountTarget, program: (u32, u32), port: u16) -> Result<Self, LoadError> {
        let host = &place.host;
        let unknown = |source| LoadError::UnknownHost { host: host.clone(), source };
        let mut reasons = Vec::new();
        for address in (host.as_str(), port).to_socket_addrs().map_err(unknown)? {
            match TcpStream::connect_timeout(&address, place.timeout) {
                Ok(stream) => {
                    let ready = stream.set_read_timeout(Some(place.timeout)).and_then(|()| stream.set_nodelay(true));
                    ready.map_err(|error| LoadError::system("cannot set up a connection", error))?;
                    return Ok(Self { stream, place, program, xid: any_xid() });
                }
                Err(error) => reasons.push(format!("{address}: {error}")),
            }
        }
        Err(LoadError::Unreachable { target: format!("{host}:{port}"), reasons: reasons.join(", ") })
    }

    /// Calls a procedure; the results of a reply that says OK.
    pub(super) fn call(&mut self, what: &str, procedure: u32, args: &[u8]) -> Result<Vec<u8>, LoadError> {
        self.try_call(procedure, args).map_err(|error| {
            let place = self.place;
            LoadError::system(format!("{what} at {}:{}", place.host, place.path), error)
        })
    }

    fn try_call(&mut self, procedure: u32, args: &[u8]) -> io::Result<Vec<u8>> {
        let mut message = call_message(self.program, procedure, self.place.credential.as_deref());
        self.xid = self.xid.wrapping_add(1);
        message[..4].copy_from_slice(&self.xid.to_be_bytes());
        message.extend_from_slice(args);
        let mark = RecordMark { last: true, len: message.len() as u32 }.to_bytes();
        self.stream.write_all(&[&mark, &message[..]].concat())?;
        let reply = self.read_record()?;
        let results = match Reply::parse(&reply).map_err(io::Error::other)? {
            Reply { xid, status: SUCCESS, results, .. } if xid == self.xid => results,
            Reply { status: SUCCESS, .. } => return Err(io::Error::other("the reply is that of another call")),
            Reply { status, .. } => return Err(io::Error::other(status_in_words(status))),
        };
        match Results::new(results).word().map_err(told)? {
            0 => Ok(results[4..].to_vec()),
            status => Err(told(Wrong::Status(status))),
        }
    }

    fn read_record(&mut self) -> io::Result<Vec<u8>> {
        let mut record = Vec::new();
        loop {
            let mut mark = [0; MARK_BYTES];
            self.stream.read_exact(&mut mark)?;
            let RecordMark { last, len } = RecordMark::from_bytes(mark);
            let (count, begin) = (len as usize, record.len());
            if begin + count > REPLY_BYTES_MAX {
                return Err(io::Error::other("a reply of more than 64 KiB"));
            }
            record.resize(begin + count, 0);
            self.stream.read_exact(&mut record[begin..])?;
            if last {
                return Ok(record);
            }
        }
    }
}

/// An xid to begin with. From a fixed one on, a server may take a call for one that a connection of the measurement has sent, repeated over
/// a new connection: it returns that one's reply then, and executes nothing.
fn any_xid() -> u32 {
    RandomState::new().hash_one(()) as u32
}

pub(super) fn told(wrong: Wrong) -> io::Error {
    io::Error::other(in_words(&wrong))
}

/// What is wrong, for people.
pub(super) fn in_words(wrong: &Wrong) -> String {
    match wrong {
        Wrong::Status(status) => {
            let name = match status {
                1 => "NFS3ERR_PERM, not the owner",
                2 => "NFS3ERR_NOENT, no such file or folder",
                5 => "NFS3ERR_IO",
                13 => "NFS3ERR_ACCES, permission denied",
                17 => "NFS3ERR_EXIST",
                20 => "NFS3ERR_NOTDIR",
                28 => "NFS3ERR_NOSPC",
                30 => "NFS3ERR_ROFS, read-only",
                70 => "NFS3ERR_STALE",
                10_001 => "NFS3ERR_BADHANDLE",
                10_004 => "NFS3ERR_NOTSUPP",
                10_006 => "NFS3ERR_SERVERFAULT",
                10_008 => "NFS3ERR_JUKEBOX",
                _ => return format!("status {status} instead of NFS3_OK"),
            };
            format!("status {status} ({name}) instead of NFS3_OK")
        }
        Wrong::Malformed(what) | Wrong::Untrue(what) => (*what).to_owned(),
    }
}

impl Tree {
    /// One that no server has.
    #[cfg(test)]
    pub(super) fn of(folder: Vec<u8>, link: Vec<u8>, files: Vec<File>, content: Content) -> Self {
        Self { folder, link, files, content, root: Vec::new(), name: String::new() }
    }

    /// Mounts the export, and makes the files in a folder of their own.
    pub(super) fn make(place: &MountTarget, shape: Shape) -> Result<Arc<Self>, LoadError> {
        let mut mount = Caller::connect(place, MOUNT, place.mount_port)?;
        let mut path = Vec::new();
        put_opaque(&mut path, place.path.as_bytes());
        let mounted = mount.call("cannot mount", MNT, &path)?;
        let root =
            Results::new(&mounted).handle().map_err(|wrong| LoadError::system("the reply to MNT", told(wrong)))?;
        let root = root.to_vec();
        let mut nfs = Caller::connect(place, NFS, place.port)?;
        let name = folder_name();
        let mut make = |what: &str, procedure, folder: &[u8], name: &str, more: &dyn Fn(&mut Vec<u8>)| {
            let mut args = Vec::new();
            put_opaque(&mut args, folder);
            put_opaque(&mut args, name.as_bytes());
            more(&mut args);
            let made = nfs.call(what, procedure, &args)?;
            let mut results = Results::new(&made);
            let read = |results: &mut Results<'_>| {
                if !results.flag()? {
                    return Err(Wrong::Malformed("a server that tells no handle of what it made is not measured"));
                }
                let handle = results.handle()?.to_vec();
                let fileid = results.attr_after()?.map_or(0, |attr| attr.fileid);
                Ok(File { handle, fileid })
            };
            read(&mut results).map_err(|wrong| LoadError::system(what, told(wrong)))
        };
        let folder = make("cannot make a folder", MKDIR, &root, &name, &|args| put_mode(args, 0o755))?.handle;
        let link = make("cannot make a symbolic link", SYMLINK, &folder, LINK, &|args| {
            put_mode(args, 0o777);
            put_opaque(args, TARGET.as_bytes());
        })?;
        let mut files = Vec::with_capacity(shape.files);
        for number in 0..shape.files {
            let create = Procedure::Create.number();
            files.push(make("cannot create a file", create, &folder, &file_name(number), &|args| {
                // Guarded.
                put(args, 1);
                put_mode(args, 0o644);
            })?);
        }
        let tree = Self { folder, link: link.handle, files, content: Content::new(shape), root, name };
        for (number, file) in tree.files.iter().enumerate() {
            for offset in (0..shape.file_bytes).step_by(WRITE_BYTES_MAX) {
                let count = WRITE_BYTES_MAX.min(shape.file_bytes - offset);
                let mut args = Vec::new();
                put_opaque(&mut args, &file.handle);
                put_long(&mut args, offset as u64);
                put(&mut args, count as u32);
                // The last write of all brings what is before it to the medium, too, on most file systems: the first measurement
                // is not to meet the write-back of these.
                put(&mut args, if offset + count == shape.file_bytes { FILE_SYNC } else { 0 });
                put_opaque(&mut args, tree.content.of(number, offset, count));
                nfs.call("cannot write a file", Procedure::Write.number(), &args)?;
            }
        }
        Ok(Arc::new(tree))
    }

    /// Removes all of it. What a measurement has not left, because it was interrupted or did not make it, is none the worse.
    pub(super) fn remove(&self, place: &MountTarget, connections: u32) -> Result<(), LoadError> {
        let mut nfs = Caller::connect(place, NFS, place.port)?;
        let names = (0..self.files.len()).map(file_name).chain([LINK.to_owned()]);
        for name in names {
            let mut args = Vec::new();
            put_opaque(&mut args, &self.folder);
            put_opaque(&mut args, name.as_bytes());
            nfs.call("cannot remove a file", Procedure::Remove.number(), &args)?;
        }
        for connection in 0..connections {
            let mut args = Vec::new();
            put_opaque(&mut args, &self.folder);
            put_opaque(&mut args, own_name(connection).as_bytes());
            // Most connections have none.
            let _: io::Result<Vec<u8>> = nfs.try_call(Procedure::Remove.number(), &args);
        }
        let mut args = Vec::new();
        put_opaque(&mut args, &self.root);
        put_opaque(&mut args, self.name.as_bytes());
        nfs.call("cannot remove the folder", RMDIR, &args)?;
        Ok(())
    }
}
