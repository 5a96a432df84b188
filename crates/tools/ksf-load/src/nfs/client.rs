//! Calls as a [`Client`]: what each asks for follows from its number, so a reply is checked without a note of its call.

use std::sync::Arc;

use ksf_proto::oncrpc::record::{MARK_BYTES, RecordMark};
use ksf_proto::oncrpc::{ACCEPTED_HEADER_BYTES, Reply};

use super::call::{Attr, NFS, Procedure, Results, Stable, put, put_long, put_mode, put_opaque};
use super::mix::Mix;
use super::tree::{TARGET, Tree, in_words, own_name};
use crate::drive::protocol::{Client, Protocol, Ticket};
use crate::drive::random::mix;
use crate::files::Wrong;
use crate::files::content::{Subject, file_name};
use crate::files::shares::Draws;
use crate::record::{Fault, Sink};
use crate::rpc::oncrpc::{self, SUCCESS, call_message};

/// What a reply may have beside data: head, verifier, attributes before and after.
const MORE_BYTES: usize = 1024;

/// Bytes of names that READDIR and READDIRPLUS ask for, and of all their results.
const NAMES_BYTES: u32 = 4096;
const LISTING_BYTES: u32 = 32 * 1024;

const READ_BYTES_LEAST: usize = LISTING_BYTES as usize;

const REGULAR: u32 = 1;
/// READ, LOOKUP, MODIFY, EXTEND, DELETE and EXECUTE of ACCESS.
const ALL_RIGHTS: u32 = 0x3f;
const RIGHT_TO_READ: u32 = 1;
const NOENT: u32 = 2;

/// What calls are about.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) tree: Arc<Tree>,
    pub(super) mix: Mix,
    pub(super) io_bytes: usize,
    pub(super) stable: Stable,
    pub(super) credential: Option<Vec<u8>>,
    pub(super) is_datagram: bool,
    pub(super) seed: u64,
}

impl Work {
    /// Bytes of a call without its data.
    const HEAD_BYTES: usize = 1024;
}

impl Protocol for Work {
    type Client = NfsClient;
    type Mix = Draws<Procedure>;

    fn client(&self, connection: u32) -> NfsClient {
        let head = |procedure: Procedure| call_message(NFS, procedure.number(), self.credential.as_deref());
        NfsClient {
            tree: Arc::clone(&self.tree),
            heads: Procedure::ALL.map(head),
            io_bytes: self.io_bytes,
            stable: self.stable,
            is_datagram: self.is_datagram,
            salt: mix(self.seed ^ u64::from(connection)),
            own_name: own_name(connection),
            call: Vec::with_capacity(self.request_bytes()),
            earlier: Vec::new(),
        }
    }

    fn mix(&self, thread: usize) -> Draws<Procedure> {
        Draws::new(&self.mix, self.seed, thread)
    }

    fn operations(&self) -> usize {
        Procedure::ALL.len()
    }

    fn request_bytes(&self) -> usize {
        let data = if self.mix.has(Procedure::Write) { self.io_bytes } else { 0 };
        Self::HEAD_BYTES + data
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct NfsClient {
    tree: Arc<Tree>,
    /// The head of a call of each procedure.
    heads: [Vec<u8>; 16],
    io_bytes: usize,
    stable: Stable,
    is_datagram: bool,
    salt: u64,
    /// The file that this connection creates and removes.
    own_name: String,
    call: Vec<u8>,
    /// The earlier fragments of a reply in several.
    earlier: Vec<u8>,
}

impl NfsClient {
    fn subject(&self, index: u64) -> Subject {
        self.tree.content.subject(self.salt, index, self.io_bytes)
    }

    fn put_args(&mut self, procedure: Procedure, index: u64) {
        let Subject { file, offset } = self.subject(index);
        let Self { tree, call: out, .. } = self;
        let handle = &tree.files[file].handle;
        match procedure {
            Procedure::Null => {}
            Procedure::Getattr => put_opaque(out, handle),
            Procedure::Setattr => {
                put_opaque(out, handle);
                put_mode(out, 0o644);
                // No guard.
                put(out, 0);
            }
            Procedure::Lookup => {
                put_opaque(out, &tree.folder);
                put_opaque(out, file_name(file).as_bytes());
            }
            Procedure::Access => {
                put_opaque(out, handle);
                put(out, ALL_RIGHTS);
            }
            Procedure::Readlink => put_opaque(out, &tree.link),
            Procedure::Read => {
                put_opaque(out, handle);
                put_long(out, offset as u64);
                put(out, self.io_bytes as u32);
            }
            Procedure::Write => {
                put_opaque(out, handle);
                put_long(out, offset as u64);
                put(out, self.io_bytes as u32);
                put(out, self.stable as u32);
                put_opaque(out, tree.content.of(file, offset, self.io_bytes));
            }
            Procedure::Create => {
                put_opaque(out, &tree.folder);
                put_opaque(out, self.own_name.as_bytes());
                // Unchecked.
                put(out, 0);
                put_mode(out, 0o644);
            }
            Procedure::Remove => {
                put_opaque(out, &tree.folder);
                put_opaque(out, self.own_name.as_bytes());
            }
            Procedure::Readdir | Procedure::Readdirplus => {
                // From the first entry on, which needs no verifier.
                put_listing(out, &tree.folder, (0, 0), procedure == Procedure::Readdirplus);
            }
            Procedure::Fsstat | Procedure::Fsinfo | Procedure::Pathconf => put_opaque(out, &tree.folder),
            Procedure::Commit => {
                put_opaque(out, handle);
                // All of it.
                put_long(out, 0);
                put(out, 0);
            }
        }
    }

    /// Checks the results of a call.
    fn check(&self, procedure: Procedure, index: u64, results: &[u8]) -> Result<(), Wrong> {
        let mut results = Results::new(results);
        if procedure == Procedure::Null {
            return results.end();
        }
        match results.word()? {
            0 => {}
            // The connection's own file may have been removed before.
            NOENT if procedure == Procedure::Remove => {
                results.wcc()?;
                return results.end();
            }
            status => return Err(Wrong::Status(status)),
        }
        let subject = self.subject(index);
        match procedure {
            Procedure::Null => {}
            Procedure::Getattr => self.is_of(subject, results.attr()?)?,
            Procedure::Setattr => self.may_be_of(subject, results.wcc()?)?,
            Procedure::Lookup => {
                if results.handle()? != self.tree.files[subject.file].handle {
                    return Err(Wrong::Untrue("the handle of another file"));
                }
                self.may_be_of(subject, results.attr_after()?)?;
                results.attr_after()?;
            }
            Procedure::Access => {
                self.may_be_of(subject, results.attr_after()?)?;
                if results.word()? & RIGHT_TO_READ == 0 {
                    return Err(Wrong::Untrue("the file's owner may not read it"));
                }
            }
            Procedure::Readlink => {
                results.attr_after()?;
                if results.opaque(TARGET.len())? != TARGET.as_bytes() {
                    return Err(Wrong::Untrue("another target than the link was made with"));
                }
            }
            Procedure::Read => self.check_read(subject, &mut results)?,
            Procedure::Write => {
                self.may_be_of(subject, results.wcc()?)?;
                if results.word()? as usize != self.io_bytes {
                    return Err(Wrong::Untrue("another count than was written"));
                }
                if results.word()? < self.stable as u32 {
                    return Err(Wrong::Untrue("less stable than was asked for"));
                }
                results.long()?;
            }
            Procedure::Create => {
                if results.flag()? {
                    results.handle()?;
                }
                results.attr_after()?;
                results.wcc()?;
            }
            Procedure::Remove => {
                results.wcc()?;
            }
            Procedure::Readdir | Procedure::Readdirplus => return check_listing(procedure, results),
            Procedure::Fsstat => {
                results.attr_after()?;
                results.bytes(52)?;
            }
            Procedure::Fsinfo => {
                results.attr_after()?;
                results.bytes(48)?;
            }
            Procedure::Pathconf => {
                results.attr_after()?;
                results.bytes(24)?;
            }
            Procedure::Commit => {
                self.may_be_of(subject, results.wcc()?)?;
                results.long()?;
            }
        }
        results.end()
    }

    fn check_read(&self, subject: Subject, results: &mut Results<'_>) -> Result<(), Wrong> {
        self.may_be_of(subject, results.attr_after()?)?;
        let count = results.word()? as usize;
        let eof = results.flag()?;
        let data = results.opaque(self.io_bytes)?;
        if count != data.len() || count != self.io_bytes {
            return Err(Wrong::Untrue("fewer bytes than the file has there"));
        }
        // The end may be told by a read that reaches it; before it there is none.
        if eof && subject.offset + count < self.tree.content.shape.file_bytes {
            return Err(Wrong::Untrue("an end where there is none"));
        }
        if data != self.tree.content.of(subject.file, subject.offset, count) {
            return Err(Wrong::Untrue("other bytes than the file has"));
        }
        Ok(())
    }

    fn is_of(&self, subject: Subject, attr: Attr) -> Result<(), Wrong> {
        let fileid = self.tree.files[subject.file].fileid;
        if attr.file_type != REGULAR || attr.size != self.tree.content.shape.file_bytes as u64 {
            return Err(Wrong::Untrue("another type or size than the file has"));
        }
        // A server need not have told it when the file was made.
        if fileid != 0 && attr.fileid != fileid {
            return Err(Wrong::Untrue("the attributes of another file"));
        }
        Ok(())
    }

    fn may_be_of(&self, subject: Subject, attr: Option<Attr>) -> Result<(), Wrong> {
        attr.map_or(Ok(()), |attr| self.is_of(subject, attr))
    }

    /// Judges one reply message and settles its call.
    fn take_reply(&self, message: &[u8], sink: &mut Sink<'_, ()>) {
        match Reply::parse(message) {
            Ok(Reply { xid, status: SUCCESS, results, .. }) => {
                let Some(request) = sink.settle(xid) else { return };
                let procedure = Procedure::ALL[usize::from(request.operation)];
                match self.check(procedure, request.index, results) {
                    Ok(()) => sink.complete(request),
                    Err(wrong) => {
                        sink.reject(wrong.fault(), || format!("{}: {}", procedure.name(), in_words(&wrong)));
                    }
                }
            }
            reply => oncrpc::fail(message, reply, sink),
        }
    }

    fn reply_bytes_max(&self) -> usize {
        MORE_BYTES + self.io_bytes.max(READ_BYTES_LEAST)
    }
}

/// Arguments of READDIR, or with `plus` of READDIRPLUS, behind a cookie with its verifier.
pub(super) fn put_listing(out: &mut Vec<u8>, dir: &[u8], (cookie, verifier): (u64, u64), plus: bool) {
    put_opaque(out, dir);
    put_long(out, cookie);
    put_long(out, verifier);
    put(out, NAMES_BYTES);
    if plus {
        put(out, LISTING_BYTES);
    }
}

/// Entries that end as they should, the first of all among them.
fn check_listing(procedure: Procedure, mut results: Results<'_>) -> Result<(), Wrong> {
    results.attr_after()?;
    results.long()?;
    let mut entries = 0;
    while results.flag()? {
        results.long()?;
        results.opaque(255)?;
        results.long()?;
        if procedure == Procedure::Readdirplus {
            results.attr_after()?;
            if results.flag()? {
                results.handle()?;
            }
        }
        entries += 1;
    }
    results.flag()?;
    results.end()?;
    if entries > 0 { Ok(()) } else { Err(Wrong::Untrue("a folder without entries")) }
}

impl Client for NfsClient {
    type Operation = Procedure;
    type Counters = ();

    fn encode(&mut self, ticket: &Ticket, procedure: &Procedure) -> &[u8] {
        let mark_bytes = if self.is_datagram { 0 } else { MARK_BYTES };
        self.call.clear();
        self.call.resize(mark_bytes, 0);
        self.call.extend_from_slice(&self.heads[*procedure as usize]);
        self.call[mark_bytes..mark_bytes + 4].copy_from_slice(&ticket.id.to_be_bytes());
        self.put_args(*procedure, ticket.index);
        if !self.is_datagram {
            let mark = RecordMark { last: true, len: (self.call.len() - MARK_BYTES) as u32 };
            self.call[..MARK_BYTES].copy_from_slice(&mark.to_bytes());
        }
        &self.call
    }

    /// The rest of the reply that has begun, or the mark of the next: what is known of it.
    fn window(&self, held: &[u8]) -> usize {
        match held.first_chunk() {
            Some(mark) => {
                let fragment_bytes = RecordMark::from_bytes(*mark).len as usize;
                (MARK_BYTES + fragment_bytes).saturating_sub(held.len()).max(1)
            }
            // The least a reply can have is 24 bytes with its mark, so these cannot hold two.
            None => ACCEPTED_HEADER_BYTES + MARK_BYTES - held.len(),
        }
    }

    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, ()>) -> usize {
        if self.is_datagram {
            self.take_reply(bytes, sink);
            return bytes.len();
        }
        let mut at = 0;
        while let Some(mark) = bytes[at..].first_chunk() {
            let RecordMark { last: is_last, len } = RecordMark::from_bytes(*mark);
            let fragment_bytes = len as usize;
            if self.earlier.len() + fragment_bytes > self.reply_bytes_max() {
                let most = self.reply_bytes_max();
                sink.break_off(Fault::Malformed, || {
                    format!("a fragment of {fragment_bytes} bytes: a reply of more than {most} bytes")
                });
                return bytes.len();
            }
            let body = at + MARK_BYTES;
            let Some(fragment) = bytes.get(body..body + fragment_bytes) else { break };
            if is_last && self.earlier.is_empty() {
                self.take_reply(fragment, sink);
            } else {
                self.earlier.extend_from_slice(fragment);
                if is_last {
                    let whole = std::mem::take(&mut self.earlier);
                    self.take_reply(&whole, sink);
                }
            }
            at = body + fragment_bytes;
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::super::call::File;
    use super::*;
    use crate::files::content::{Content, Shape};

    const FILE_BYTES: usize = 64;
    const IO_BYTES: usize = 16;

    fn client() -> NfsClient {
        let shape = Shape { files: 3, file_bytes: FILE_BYTES };
        let files = (0..3).map(|number| File { handle: vec![number; 8], fileid: 100 + u64::from(number) }).collect();
        let tree = Arc::new(Tree::of(vec![9; 8], vec![8; 8], files, Content::new(shape)));
        let work = Work {
            tree,
            mix: "read".parse().unwrap(),
            io_bytes: IO_BYTES,
            stable: Stable::Data,
            credential: None,
            is_datagram: false,
            seed: 1,
        };
        work.client(0)
    }

    fn put_attr(out: &mut Vec<u8>, file_type: u32, size: u64, fileid: u64) {
        put(out, file_type);
        out.extend_from_slice(&[0; 16]);
        put_long(out, size);
        out.extend_from_slice(&[0; 24]);
        put_long(out, fileid);
        out.extend_from_slice(&[0; 24]);
    }

    fn getattr(file_type: u32, size: u64, fileid: u64) -> Vec<u8> {
        let mut out = vec![0; 4];
        put_attr(&mut out, file_type, size, fileid);
        out
    }

    fn read(count: u32, eof: u32, data: &[u8]) -> Vec<u8> {
        // OK, and no attributes.
        let mut out = vec![0; 8];
        put(&mut out, count);
        put(&mut out, eof);
        put_opaque(&mut out, data);
        out
    }

    #[test]
    fn attributes_of_another_file_are_found() {
        let client = client();
        let fileid = 100 + client.subject(7).file as u64;
        let check = |results: Vec<u8>| client.check(Procedure::Getattr, 7, &results);
        assert_eq!(check(getattr(REGULAR, 64, fileid)), Ok(()));
        assert!(matches!(check(getattr(2, 64, fileid)), Err(Wrong::Untrue(_))));
        assert!(matches!(check(getattr(REGULAR, 63, fileid)), Err(Wrong::Untrue(_))));
        assert!(matches!(check(getattr(REGULAR, 64, fileid + 1)), Err(Wrong::Untrue(_))));
        assert_eq!(check(vec![0, 0, 0, 70]), Err(Wrong::Status(70)));
        let mut longer = getattr(REGULAR, 64, fileid);
        longer.push(0);
        assert!(matches!(check(longer), Err(Wrong::Malformed(_))));
    }

    #[test]
    fn every_byte_that_is_read_is_compared() {
        let client = client();
        for index in 0..50 {
            let subject = client.subject(index);
            let right = client.tree.content.of(subject.file, subject.offset, IO_BYTES).to_vec();
            let at_end = u32::from(subject.offset + IO_BYTES == FILE_BYTES);
            let check = |results: &[u8]| client.check(Procedure::Read, index, results);
            assert_eq!(check(&read(16, at_end, &right)), Ok(()));
            for at in 0..IO_BYTES {
                let mut wrong = right.clone();
                wrong[at] ^= 1;
                assert!(matches!(check(&read(16, at_end, &wrong)), Err(Wrong::Untrue(_))), "{index}, {at}");
            }
            assert!(matches!(check(&read(15, at_end, &right[..15])), Err(Wrong::Untrue(_))));
            if at_end == 0 {
                assert!(matches!(check(&read(16, 1, &right)), Err(Wrong::Untrue(_))));
            }
        }
    }

    #[test]
    fn a_write_that_is_short_or_less_stable_is_found() {
        let client = client();
        let write = |count, committed| {
            // OK, and nothing of before and after.
            let mut out = vec![0; 12];
            put(&mut out, count);
            put(&mut out, committed);
            put_long(&mut out, 77);
            out
        };
        let check = |results: Vec<u8>| client.check(Procedure::Write, 0, &results);
        assert_eq!((check(write(16, 1)), check(write(16, 2))), (Ok(()), Ok(())));
        assert!(matches!(check(write(15, 1)), Err(Wrong::Untrue(_))));
        assert!(matches!(check(write(16, 0)), Err(Wrong::Untrue(_))));
    }

    #[test]
    fn a_removal_may_come_second_and_a_folder_has_entries() {
        let client = client();
        let gone = [&[0, 0, 0, 2][..], &[0; 8]].concat();
        assert_eq!(client.check(Procedure::Remove, 0, &gone), Ok(()));
        assert_eq!(client.check(Procedure::Create, 0, &gone), Err(Wrong::Status(2)));
        // OK, no attributes, a verifier, no entry, the end.
        let empty = [&[0; 16][..], &[0, 0, 0, 0, 0, 0, 0, 1]].concat();
        assert!(matches!(client.check(Procedure::Readdir, 0, &empty), Err(Wrong::Untrue(_))));
    }
}
