//! One request at a time: what is needed before and after a measurement.

use std::io::{self, Read, Write};

use ksf_proto::p9::{HEADER_BYTES, IO_HEAD_BYTES, NO_FID, NO_TAG, Names, Qid, Reply, Request, VERSION};

use super::tree::AttachTarget;

/// The fid of the export.
pub(super) const ROOT: u32 = 0;

/// The least size of messages that is asked for: that of Linux' client before its version 5.15.
const MSIZE_LEAST: usize = 8192;

/// A session, attached to an export.
#[derive(Debug)]
pub(super) struct Session<S> {
    stream: S,
    message: Vec<u8>,
    reply: Vec<u8>,
    /// Size of messages, at most.
    pub(super) msize: usize,
}

impl<S: Read + Write> Session<S> {
    /// Begins a session whose messages have room for so many bytes of data, and attaches to the export.
    ///
    /// # Errors
    ///
    /// The connection's; the server's; the server refuses the version or the size.
    pub(super) fn begin(stream: S, io_bytes: usize, place: &AttachTarget) -> io::Result<Self> {
        let msize = MSIZE_LEAST.max(io_bytes + IO_HEAD_BYTES);
        let mut session = Self { stream, message: Vec::new(), reply: Vec::new(), msize };
        match session.ask(NO_TAG, &Request::Version { msize: msize as u32, version: VERSION })? {
            Reply::Version { msize: granted, version } if version == VERSION => {
                let granted = granted as usize;
                if granted > msize {
                    return Err(io::Error::other("the server answers Tversion with a larger size of messages"));
                }
                if granted < io_bytes + IO_HEAD_BYTES {
                    return Err(io::Error::other(format!(
                        "the server takes messages of {granted} bytes; --io-bytes is at most {}",
                        granted.saturating_sub(IO_HEAD_BYTES)
                    )));
                }
                session.msize = granted;
            }
            _ => return Err(io::Error::other("the server does not speak 9P2000.L")),
        }
        let attach =
            Request::Attach { fid: ROOT, afid: NO_FID, uname: b"", aname: place.aname.as_bytes(), n_uname: place.uid };
        match session.ask(0, &attach)? {
            Reply::Attach { .. } => Ok(session),
            _ => Err(other_reply()),
        }
    }

    /// The reply to a request.
    ///
    /// # Errors
    ///
    /// The connection's; that of Rlerror; the reply is none, or that of another request.
    pub(super) fn ask(&mut self, tag: u16, request: &Request<'_>) -> io::Result<Reply<'_>> {
        self.message.clear();
        request.put(tag, &mut self.message).map_err(io::Error::other)?;
        self.stream.write_all(&self.message)?;
        let mut size = [0; 4];
        self.stream.read_exact(&mut size)?;
        let bytes = u32::from_le_bytes(size) as usize;
        if !(HEADER_BYTES..=self.msize).contains(&bytes) {
            return Err(io::Error::other(format!("a reply of {bytes} bytes")));
        }
        self.reply.clear();
        self.reply.extend_from_slice(&size);
        self.reply.resize(bytes, 0);
        self.stream.read_exact(&mut self.reply[4..])?;
        match Reply::parse(&self.reply).map_err(io::Error::other)? {
            (_, Reply::Lerror { ecode }) => Err(io::Error::from_raw_os_error(ecode as i32)),
            (replied, reply) if replied == tag => Ok(reply),
            _ => Err(other_reply()),
        }
    }

    /// The same, where the reply says no more than that it is done.
    pub(super) fn done(&mut self, request: &Request<'_>) -> io::Result<()> {
        // Of all messages the type of the reply is the next number.
        let kind = request.kind() + 1;
        if self.ask(0, request)?.kind() == kind { Ok(()) } else { Err(other_reply()) }
    }

    /// Makes `to` a fid of this name in the directory `from`.
    pub(super) fn walk(&mut self, from: u32, to: u32, name: &str) -> io::Result<Qid> {
        let mut buffer = Vec::new();
        let names = Names::of(&[name.as_bytes()], &mut buffer).map_err(io::Error::other)?;
        match self.ask(0, &Request::Walk { fid: from, newfid: to, names })? {
            Reply::Walk { qids } => qids.iter().next().ok_or_else(|| io::ErrorKind::NotFound.into()),
            _ => Err(other_reply()),
        }
    }

    /// Makes `to` another fid of a directory.
    pub(super) fn clone_fid(&mut self, from: u32, to: u32) -> io::Result<()> {
        self.done(&Request::Walk { fid: from, newfid: to, names: Names::default() })
    }

    /// Opens a file for requests of so many bytes.
    pub(super) fn open(&mut self, fid: u32, flags: u32, io_bytes: usize) -> io::Result<()> {
        match self.ask(0, &Request::Lopen { fid, flags })? {
            Reply::Lopen { iounit, .. } if iounit == 0 || iounit as usize >= io_bytes => Ok(()),
            Reply::Lopen { iounit, .. } => {
                Err(io::Error::other(format!("--io-bytes is at most {iounit} at this server")))
            }
            _ => Err(other_reply()),
        }
    }

    pub(super) fn clunk(&mut self, fid: u32) -> io::Result<()> {
        self.done(&Request::Clunk { fid })
    }
}

fn other_reply() -> io::Error {
    io::Error::other("the reply is that to another request")
}
