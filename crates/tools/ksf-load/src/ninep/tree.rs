//! The files that requests are about: made before a measurement and removed after it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ksf_proto::p9::{Data, IO_HEAD_BYTES, Qid, Reply, Request, UNLINK_DIRECTORY, open_flag};
use socket2::Socket as RawSocket;

use super::session::{ROOT, Session};
use crate::drive::socket::{Socket, SocketOptions, Transport};
use crate::error::LoadError;
use crate::files::content::{Content, file_name, folder_name};
use crate::options::target::Target;

/// The fid of the folder of the files.
pub(super) const FOLDER: u32 = 1;
/// The fid of a file while it is made.
const NEW: u32 = 2;

/// Bytes of one write, at most: every server takes so many.
const WRITE_BYTES_MAX: usize = 4096;

/// Where the exported folder is, and as whom it is used.
#[derive(Debug, Clone)]
pub(super) struct AttachTarget {
    pub(super) target: Target,
    pub(super) aname: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) timeout: Duration,
}

/// A folder with files that are all known.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) content: Content,
    /// The objects of the files.
    pub(super) qids: Vec<Qid>,
    /// The folder in the export.
    pub(super) name: String,
}

impl Tree {
    /// Makes the files in a folder of their own; without `is_filled` they are empty.
    pub(super) fn make(place: &AttachTarget, content: Content, is_filled: bool) -> Result<Arc<Self>, LoadError> {
        let mut tree = Self { content, qids: Vec::new(), name: folder_name() };
        converse(place, "cannot make files", |session| {
            let folder = Request::Mkdir { dfid: ROOT, name: tree.name.as_bytes(), mode: 0o755, gid: place.gid };
            session.done(&folder)?;
            session.walk(ROOT, FOLDER, &tree.name)?;
            for number in 0..tree.content.shape.files {
                session.clone_fid(FOLDER, NEW)?;
                let qid = match session.ask(
                    0,
                    &Request::Lcreate {
                        fid: NEW,
                        name: file_name(number).as_bytes(),
                        flags: open_flag::READ_WRITE | open_flag::EXCLUSIVE,
                        mode: 0o644,
                        gid: place.gid,
                    },
                )? {
                    Reply::Lcreate { qid, .. } => qid,
                    _ => return Err(io::Error::other("Tlcreate is answered by another reply")),
                };
                tree.qids.push(qid);
                if is_filled {
                    fill(session, &tree.content, number)?;
                }
                session.clunk(NEW)?;
            }
            Ok(())
        })?;
        Ok(Arc::new(tree))
    }

    /// Removes all of it.
    pub(super) fn remove(&self, place: &AttachTarget) -> Result<(), LoadError> {
        converse(place, "cannot remove the files", |session| {
            session.walk(ROOT, FOLDER, &self.name)?;
            for number in 0..self.content.shape.files {
                remove(session, (FOLDER, &file_name(number), 0), NEW)?;
            }
            session.clunk(FOLDER)?;
            remove(session, (ROOT, &self.name, UNLINK_DIRECTORY), FOLDER)
        })
    }
}

/// Removes a name in a folder, with the flags of Tunlinkat. diod knows no Tunlinkat: there the object is walked to as `fid` and removed
/// by Tremove, at which nfs-ganesha 4.3 ends with a segmentation fault.
fn remove(session: &mut Session<&mut RawSocket>, (dirfid, name, flags): (u32, &str, u32), fid: u32) -> io::Result<()> {
    session.done(&Request::Unlinkat { dirfid, name: name.as_bytes(), flags }).or_else(|_| {
        session.walk(dirfid, fid, name)?;
        session.done(&Request::Remove { fid })
    })
}

/// Writes the content of a file, and has it brought to the medium: the measurement is not to meet the write-back.
fn fill(session: &mut Session<&mut RawSocket>, content: &Content, number: usize) -> io::Result<()> {
    let step = WRITE_BYTES_MAX.max(session.msize - IO_HEAD_BYTES);
    let file_bytes = content.shape.file_bytes;
    let mut offset = 0;
    while offset < file_bytes {
        let data = content.of(number, offset, step.min(file_bytes - offset));
        match session.ask(0, &Request::Write { fid: NEW, offset: offset as u64, data: Data(data) })? {
            Reply::Write { count } if (1..=data.len()).contains(&(count as usize)) => offset += count as usize,
            _ => return Err(io::Error::other("Twrite is answered by another count")),
        }
    }
    session.done(&Request::Fsync { fid: NEW, datasync: 0 })
}

/// Talks to the server on a connection of its own.
fn converse(
    place: &AttachTarget,
    what: &str,
    talk: impl FnOnce(&mut Session<&mut RawSocket>) -> io::Result<()>,
) -> Result<(), LoadError> {
    let transport = if matches!(place.target, Target::Unix(_)) { Transport::Unix } else { Transport::Tcp };
    let options = SocketOptions { nodelay: true, ..SocketOptions::new(transport, place.timeout) };
    let socket = Socket::connect(&place.target, &place.target.resolve()?, &options)?;
    let talked = socket.converse(&options, |stream| talk(&mut Session::begin(stream, WRITE_BYTES_MAX, place)?));
    talked.map_err(|error| LoadError::system(format!("{what} at {}, export `{}`", place.target, place.aname), error))
}
