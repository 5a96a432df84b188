//! Carries requests out on a lane, and writes their results (RFC 1813 section 3.3).

use std::ops::Range;

use ksf::pool::Chunk;
use ksf_fs::{
    Access, Attr, Changed, Credential, Cursor, Detail, Entry, FileType, Found, Fs, FsError, Handle, Lane, Linked,
    Listed, Renamed, Resize, Seen, Stable, Time, WARM_READ_BYTES_MAX, Warm, Wcc,
};
use ksf_proto::xdr::XdrWrite;
use ksf_services::rpc::{Answered, RpcReply};

use crate::procedure::Procedure;
use crate::request::{Request, listing_bytes_max, status_of};
use crate::status::Status;
use crate::wire::{POST_OP_ATTR_BYTES, put_attr, put_post_op_attr, put_post_op_handle, put_status, put_time, put_wcc};

/// Bits of ACCESS.
const ACCESS_READ: u32 = 0x01;
const ACCESS_LOOKUP: u32 = 0x02;
const ACCESS_MODIFY: u32 = 0x04;
const ACCESS_EXTEND: u32 = 0x08;
const ACCESS_DELETE: u32 = 0x10;
const ACCESS_EXECUTE: u32 = 0x20;

/// Properties of FSINFO: hard links, symbolic links, PATHCONF is the same for all files, times can be set.
const PROPERTIES: u32 = 0x01 | 0x02 | 0x08 | 0x10;

/// Lengths of reads and writes that go well are multiples of this.
const TRANSFER_UNIT_BYTES: u32 = 4096;

/// Results of a listing without entries: status, attributes, verifier, end of the list, end of the folder.
const LISTING_BYTES: usize = 4 + POST_OP_ATTR_BYTES + 8 + 4 + 4;

/// A READ that was carried out.
pub(crate) struct ReadDone {
    pub(crate) head: ReadHead,
    pub(crate) data: Vec<u8>,
}

/// The results of a READ in front of its data.
pub(crate) struct ReadHead {
    attr: Option<Attr>,
    eof: bool,
    bytes: u32,
}

impl ReadDone {
    fn new(attr: Option<Attr>, done: ksf_fs::ReadDone, mut data: Vec<u8>) -> Self {
        if data.capacity() / 2 > data.len() {
            // The end of the file: what waits to be sent is counted by its length.
            data.shrink_to_fit();
        }
        Self { head: ReadHead { attr, eof: done.eof, bytes: data.len() as u32 }, data }
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.head.put(out);
        out.put_opaque_fixed(&self.data);
    }
}

impl ReadHead {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        put_status(out, Status::OK);
        put_post_op_attr(out, self.attr.as_ref());
        out.put_u32(self.bytes);
        out.put_bool(self.eof);
        out.put_u32(self.bytes);
    }
}

/// A procedure that failed, with its results.
pub(crate) struct Failed {
    pub(crate) status: Status,
    pub(crate) results: Vec<u8>,
}

/// Carries a READ out: its data leave from where they were read into.
pub(crate) fn read(
    fs: &Fs,
    lane: &mut Lane,
    caller: &Credential,
    file: &Handle,
    offset: u64,
    count: u32,
) -> Result<ReadDone, Failed> {
    let mut data = Vec::new();
    let Seen { after, result } = fs.read(lane, caller, file, offset, count as usize, &mut data);
    match result {
        Ok(done) => Ok(ReadDone::new(after, done, data)),
        Err(error) => {
            let mut results = Vec::new();
            let status = failed(&mut results, error, |out| put_post_op_attr(out, after.as_ref()));
            Err(Failed { status, results })
        }
    }
}

/// What is answered without a lane.
pub(crate) enum Warmed {
    Getattr(Attr),
    Lookup(Seen<Found>),
    Access(Seen<Access>, u32),
    Read(ReadDone),
}

impl Warmed {
    /// Carries a request out if that takes no lane.
    pub(crate) fn by(mut fs: Warm<'_>, caller: &Credential, request: &Request) -> Option<Self> {
        Some(match request {
            Request::Getattr { object } => Self::Getattr(fs.getattr(object)?),
            Request::Lookup { dir, name } => Self::Lookup(fs.lookup(caller, dir, name)?),
            Request::Access { object, wanted } => Self::Access(fs.access(caller, object, to_access(*wanted))?, *wanted),
            Request::Read { file, offset, count } if *count as usize <= WARM_READ_BYTES_MAX => {
                let mut data = Vec::new();
                let Seen { after, result } = fs.read(caller, file, *offset, *count as usize, &mut data)?;
                Self::Read(ReadDone::new(after, result.ok()?, data))
            }
            _ => return None,
        })
    }

    pub(crate) fn status(&self) -> Status {
        match self {
            Self::Lookup(Seen { result: Err(error), .. }) => status_of(*error),
            _ => Status::OK,
        }
    }

    /// Data of a READ.
    pub(crate) fn read_bytes(&self) -> usize {
        if let Self::Read(done) = self { done.data.len() } else { 0 }
    }

    pub(crate) fn answer(self, reply: RpcReply<'_>) -> Answered {
        match self {
            // From where they lie.
            Self::Read(ReadDone { head, data }) => reply.results_with(|out| head.put(out), Chunk::from_vec(data)),
            Self::Getattr(attr) => results(reply, |out| put_attributes(out, &attr)),
            Self::Lookup(seen) => results(reply, |out| put_found(out, seen)),
            Self::Access(seen, wanted) => results(reply, |out| put_access(out, seen, wanted)),
        }
    }
}

fn results(reply: RpcReply<'_>, put: impl FnOnce(&mut Vec<u8>) -> Status) -> Answered {
    reply.results(|out| {
        put(out);
        Ok(())
    })
}

/// A procedure that was carried out, with its results.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) status: Status,
    /// Where the results have what follows a status that is an error: attributes.
    kept: Range<usize>,
}

impl From<Status> for Ran {
    fn from(status: Status) -> Self {
        Self { status, kept: 4..4 }
    }
}

impl Ran {
    /// Turns the results into those of a failure that was found later.
    pub(crate) fn fail(&self, results: &mut Vec<u8>, status: Status) {
        let kept = results[self.kept.clone()].to_vec();
        results.clear();
        put_status(results, status);
        results.put(&kept);
    }
}

/// Writes the results of a procedure that was not begun: its status, and the attributes of its objects.
pub(crate) fn put_not_begun(
    out: &mut Vec<u8>,
    procedure: Procedure,
    status: Status,
    [first, second]: [Option<Attr>; 2],
) {
    let put_after = |out: &mut Vec<u8>, after| put_wcc(out, &Wcc { before: None, after });
    put_status(out, status);
    match procedure {
        Procedure::Null | Procedure::Getattr => {}
        Procedure::Setattr
        | Procedure::Write
        | Procedure::Create
        | Procedure::Mkdir
        | Procedure::Symlink
        | Procedure::Mknod
        | Procedure::Remove
        | Procedure::Rmdir
        | Procedure::Commit => put_after(out, first),
        Procedure::Rename => {
            put_after(out, first);
            put_after(out, second);
        }
        Procedure::Link => {
            put_post_op_attr(out, first.as_ref());
            put_after(out, second);
        }
        Procedure::Lookup
        | Procedure::Access
        | Procedure::Readlink
        | Procedure::Read
        | Procedure::Readdir
        | Procedure::Readdirplus
        | Procedure::Fsstat
        | Procedure::Fsinfo
        | Procedure::Pathconf => put_post_op_attr(out, first.as_ref()),
    }
}

/// Carries a request out, and writes its results. A READ is better carried out by [`read`].
pub(crate) fn run(
    fs: &Fs,
    lane: &mut Lane,
    caller: &Credential,
    request: &Request,
    transfer_bytes_max: u32,
    out: &mut Vec<u8>,
) -> Ran {
    let status = match request {
        Request::Getattr { object } => match fs.getattr(lane, object) {
            Ok(attr) => put_attributes(out, &attr),
            Err(error) => failed(out, error, |_| ()),
        },
        Request::Setattr { object, to, guard } => {
            return changed(out, fs.setattr(lane, caller, object, to, *guard, Resize::Owner), |_, ()| ());
        }
        Request::Lookup { dir, name } => put_found(out, fs.lookup(lane, caller, dir, name)),
        Request::Access { object, wanted } => {
            put_access(out, fs.access(lane, caller, object, to_access(*wanted)), *wanted)
        }
        Request::Readlink { link } => {
            seen_results(out, fs.readlink(lane, caller, link), |out, target| out.put_opaque(&target))
        }
        Request::Read { file, offset, count } => match read(fs, lane, caller, file, *offset, *count) {
            Ok(done) => {
                done.put(out);
                Status::OK
            }
            Err(Failed { status, results }) => {
                out.put(&results);
                status
            }
        },
        Request::Write { file, offset, data, stable } => {
            return changed(out, fs.write(lane, caller, file, *offset, data, *stable), |out, written| {
                out.put_u32(written.count as u32);
                out.put_u32(match written.committed {
                    Stable::Unstable => 0,
                    Stable::DataSync => 1,
                    Stable::FileSync => 2,
                });
                out.put_opaque_fixed(&written.verifier);
            });
        }
        Request::Create { dir, name, how } => return made(out, fs.create(lane, caller, dir, name, how)),
        Request::Mkdir { dir, name, attr } => return made(out, fs.mkdir(lane, caller, dir, name, attr)),
        Request::Symlink { dir, name, attr, target } => {
            return made(out, fs.symlink(lane, caller, dir, name, target, attr));
        }
        Request::Mknod { dir, name, node, attr } => {
            return made(out, fs.mknod(lane, caller, dir, name, *node, attr));
        }
        Request::Remove { dir, name } => return changed(out, fs.remove(lane, caller, dir, name), |_, ()| ()),
        Request::Rmdir { dir, name } => return changed(out, fs.rmdir(lane, caller, dir, name), |_, ()| ()),
        Request::Rename { from, from_name, to, to_name } => {
            let Renamed { from, to, result } = fs.rename(lane, caller, from, from_name, to, to_name);
            let status = result.map_or_else(status_of, |()| Status::OK);
            put_status(out, status);
            put_wcc(out, &from);
            put_wcc(out, &to);
            return Ran { status, kept: 4..out.len() };
        }
        Request::Link { file, dir, name } => {
            let Linked { file, dir, result } = fs.link(lane, caller, file, dir, name);
            let status = result.map_or_else(status_of, |()| Status::OK);
            put_status(out, status);
            put_post_op_attr(out, file.as_ref());
            put_wcc(out, &dir);
            return Ran { status, kept: 4..out.len() };
        }
        Request::Readdir { dir, cookie, verifier, count } => {
            let from = Cursor { cookie: *cookie, verifier: *verifier };
            let bounds = Bounds { names_bytes_max: usize::MAX, results_bytes_max: *count as usize };
            list(out, bounds, |take| fs.list(lane, caller, dir, from, Detail::Names, take), put_entry)
        }
        Request::Readdirplus { dir, cookie, verifier, names_bytes_max, count } => {
            let from = Cursor { cookie: *cookie, verifier: *verifier };
            let bounds = Bounds { names_bytes_max: *names_bytes_max as usize, results_bytes_max: *count as usize };
            list(out, bounds, |take| fs.list(lane, caller, dir, from, Detail::Handles, take), put_entry_plus)
        }
        Request::Fsstat { root } => seen_results(out, fs.fsstat(lane, root), |out, stat| {
            out.put_u64(stat.total_bytes);
            out.put_u64(stat.free_bytes);
            out.put_u64(stat.available_bytes);
            out.put_u64(stat.total_files);
            out.put_u64(stat.free_files);
            out.put_u64(stat.available_files);
            // How long this will not change: it may at once.
            out.put_u32(0);
        }),
        Request::Fsinfo { root } => seen_results(out, fs.pathconf(lane, root), |out, conf| {
            put_sizes(out, transfer_bytes_max, conf.file_size_max, conf.time_step);
        }),
        Request::Pathconf { object } => seen_results(out, fs.pathconf(lane, object), |out, conf| {
            out.put_u32(conf.link_max);
            out.put_u32(conf.name_max);
            out.put_bool(conf.no_trunc);
            out.put_bool(conf.chown_restricted);
            out.put_bool(conf.case_insensitive);
            out.put_bool(conf.case_preserving);
        }),
        Request::Commit { file } => return committed(out, fs.commit(lane, file)),
    };
    status.into()
}

/// Results of a GETATTR.
fn put_attributes(out: &mut Vec<u8>, attr: &Attr) -> Status {
    put_status(out, Status::OK);
    put_attr(out, attr);
    Status::OK
}

/// Results of LOOKUP.
fn put_found(out: &mut Vec<u8>, seen: Seen<Found>) -> Status {
    let Seen { after, result } = seen;
    match result {
        Ok(found) => {
            put_status(out, Status::OK);
            out.put_opaque(found.handle.as_bytes());
            put_post_op_attr(out, Some(&found.attr));
            put_post_op_attr(out, after.as_ref());
            Status::OK
        }
        Err(error) => failed(out, error, |out| put_post_op_attr(out, after.as_ref())),
    }
}

/// Results of ACCESS.
fn put_access(out: &mut Vec<u8>, seen: Seen<Access>, wanted: u32) -> Status {
    let is_folder = seen.after.is_some_and(|attr| attr.file_type == FileType::Directory);
    seen_results(out, seen, |out, granted| out.put_u32(from_access(granted, is_folder) & wanted))
}

/// Results of COMMIT.
pub(crate) fn committed(out: &mut Vec<u8>, done: Changed<[u8; 8]>) -> Ran {
    changed(out, done, |out, verifier| out.put_opaque_fixed(&verifier))
}

/// What FSINFO tells behind the attributes.
fn put_sizes(out: &mut Vec<u8>, transfer_bytes_max: u32, file_size_max: u64, time_step: Time) {
    // READ and WRITE: greatest, best, and what lengths should be multiples of.
    for _ in 0..2 {
        out.put_u32(transfer_bytes_max);
        out.put_u32(transfer_bytes_max);
        out.put_u32(TRANSFER_UNIT_BYTES.min(transfer_bytes_max));
    }
    // READDIR: best.
    out.put_u32(listing_bytes_max(transfer_bytes_max));
    out.put_u64(file_size_max);
    put_time(out, time_step);
    out.put_u32(PROPERTIES);
}

/// A status that is an error, and what follows it.
fn failed(out: &mut Vec<u8>, error: FsError, rest: impl FnOnce(&mut Vec<u8>)) -> Status {
    let status = status_of(error);
    put_status(out, status);
    rest(out);
    status
}

/// Results of a procedure that looks: attributes, also where it fails, and what it found.
fn seen_results<T>(out: &mut Vec<u8>, seen: Seen<T>, put: impl FnOnce(&mut Vec<u8>, T)) -> Status {
    let Seen { after, result } = seen;
    match result {
        Ok(found) => {
            put_status(out, Status::OK);
            put_post_op_attr(out, after.as_ref());
            put(out, found);
            Status::OK
        }
        Err(error) => failed(out, error, |out| put_post_op_attr(out, after.as_ref())),
    }
}

/// Results of a procedure that changes: weak cache data, also where it fails, and what it has to tell.
fn changed<T>(out: &mut Vec<u8>, changed: Changed<T>, put: impl FnOnce(&mut Vec<u8>, T)) -> Ran {
    let Changed { wcc, result } = changed;
    let status = result.as_ref().map_or_else(|error| status_of(*error), |_| Status::OK);
    put_status(out, status);
    put_wcc(out, &wcc);
    let kept = 4..out.len();
    if let Ok(done) = result {
        put(out, done);
    }
    Ran { status, kept }
}

/// Results of a procedure that makes an entry: the new object, then the folder.
fn made(out: &mut Vec<u8>, changed: Changed<Found>) -> Ran {
    let Changed { wcc, result } = changed;
    let status = result.as_ref().map_or_else(|error| status_of(*error), |_| Status::OK);
    put_status(out, status);
    if let Ok(found) = &result {
        put_post_op_handle(out, Some(&found.handle));
        put_post_op_attr(out, Some(&found.attr));
    }
    let begin = out.len();
    put_wcc(out, &wcc);
    Ran { status, kept: begin..out.len() }
}

/// What the kernel is to be asked for a set of bits of ACCESS.
fn to_access(wanted: u32) -> Access {
    let mut access = Access::NONE;
    if wanted & ACCESS_READ != 0 {
        access = access | Access::READ;
    }
    if wanted & (ACCESS_MODIFY | ACCESS_EXTEND | ACCESS_DELETE) != 0 {
        access = access | Access::WRITE | Access::EXECUTE;
    }
    if wanted & (ACCESS_LOOKUP | ACCESS_EXECUTE) != 0 {
        access = access | Access::EXECUTE;
    }
    access
}

/// The bits of ACCESS that what the kernel grants stands for. Entries of a folder are made and removed by who may write and search it.
fn from_access(granted: Access, is_folder: bool) -> u32 {
    let has = |access: Access| granted.contains(access);
    let mut bits = 0;
    if has(Access::READ) {
        bits |= ACCESS_READ;
    }
    if is_folder {
        if has(Access::EXECUTE) {
            bits |= ACCESS_LOOKUP;
        }
        if has(Access::WRITE) && has(Access::EXECUTE) {
            bits |= ACCESS_MODIFY | ACCESS_EXTEND | ACCESS_DELETE;
        }
    } else {
        if has(Access::WRITE) {
            bits |= ACCESS_MODIFY | ACCESS_EXTEND;
        }
        if has(Access::EXECUTE) {
            bits |= ACCESS_EXECUTE;
        }
    }
    bits
}

/// What a listing may take.
#[derive(Clone, Copy)]
struct Bounds {
    /// Ids, names and cookies of all entries: `dircount` of READDIRPLUS.
    names_bytes_max: usize,
    /// The whole of the results.
    results_bytes_max: usize,
}

/// Lists a folder: entries as many as fit, and at least one, or TOOSMALL.
fn list(
    out: &mut Vec<u8>,
    bounds: Bounds,
    list: impl FnOnce(&mut dyn FnMut(Entry<'_>) -> bool) -> Seen<Listed>,
    mut put: impl FnMut(&mut Vec<u8>, &Entry<'_>),
) -> Status {
    let mut entries = Vec::new();
    let (mut names_bytes, mut has_room) = (0, true);
    let Seen { after, result } = list(&mut |entry: Entry<'_>| {
        let before = entries.len();
        put(&mut entries, &entry);
        names_bytes += entry_bytes(&entry);
        // A client that asks for fewer bytes of names than one entry has gets that entry.
        let names_fit = names_bytes <= bounds.names_bytes_max || before == 0;
        has_room = names_fit && LISTING_BYTES + entries.len() <= bounds.results_bytes_max;
        if !has_room {
            entries.truncate(before);
        }
        has_room
    });
    match result {
        Ok(_) if !has_room && entries.is_empty() => {
            put_status(out, Status::TOOSMALL);
            put_post_op_attr(out, after.as_ref());
            Status::TOOSMALL
        }
        Ok(Listed { eof, verifier }) => {
            put_status(out, Status::OK);
            put_post_op_attr(out, after.as_ref());
            out.put_u64(verifier);
            out.put(&entries);
            out.put_bool(false);
            out.put_bool(eof);
            Status::OK
        }
        Err(error) => failed(out, error, |out| put_post_op_attr(out, after.as_ref())),
    }
}

/// Bytes of `entry3` behind the mark that there is one.
fn entry_bytes(entry: &Entry<'_>) -> usize {
    8 + 4 + entry.name.len().next_multiple_of(4) + 8
}

/// `entry3`, behind the mark that there is one.
fn put_entry(out: &mut Vec<u8>, entry: &Entry<'_>) {
    out.put_bool(true);
    out.put_u64(entry.fileid);
    out.put_opaque(entry.name);
    out.put_u64(entry.cookie);
}

/// `entryplus3`, likewise.
fn put_entry_plus(out: &mut Vec<u8>, entry: &Entry<'_>) {
    put_entry(out, entry);
    put_post_op_attr(out, entry.found.as_ref().map(|found| &found.attr));
    put_post_op_handle(out, entry.found.as_ref().map(|found| &found.handle));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_bits_are_those_of_files_and_folders() {
        let all = Access::READ | Access::WRITE | Access::EXECUTE;
        assert_eq!(from_access(all, true), 0x1f);
        assert_eq!(from_access(all, false), 0x2d);
        assert_eq!(from_access(Access::WRITE, true), 0, "entries of a folder that cannot be searched stay as they are");
        assert_eq!(from_access(Access::READ | Access::EXECUTE, true), 0x03);
        assert_eq!(from_access(Access::WRITE, false), 0x0c);
        for (wanted, asked) in [(0x01, Access::READ), (0x02, Access::EXECUTE), (0x20, Access::EXECUTE)] {
            assert_eq!(to_access(wanted).bits(), asked.bits());
        }
        assert_eq!(to_access(0x10).bits(), (Access::WRITE | Access::EXECUTE).bits());
        assert_eq!(to_access(0).bits(), 0);
    }

    #[test]
    fn a_failure_that_is_found_later_has_the_results_of_one_that_is_found_at_once() {
        let of = |result| Changed { wcc: Wcc::default(), result };
        let put = |out: &mut Vec<u8>, number: u32| out.put_u32(number);
        let (mut later, mut at_once) = (Vec::new(), Vec::new());
        let ran = changed(&mut later, of(Ok(5)), put);
        assert_eq!((ran.status, later.len()), (Status::OK, 16));
        ran.fail(&mut later, Status::IO);
        let failed = changed(&mut at_once, of(Err(FsError::new(ksf_fs::ErrorKind::Io))), put);
        assert_eq!((failed.status, later), (Status::IO, at_once));
    }

    fn entry(name: &[u8], cookie: u64) -> Entry<'_> {
        Entry { name, fileid: 9, fsid: 0, cookie, file_type: None, found: None }
    }

    /// Lists ten entries, as far as they are taken.
    fn ten(take: &mut dyn FnMut(Entry<'_>) -> bool) -> Seen<Listed> {
        let eof = (1..=10).all(|cookie| take(entry(b"name", cookie)));
        Seen { after: None, result: Ok(Listed { eof, verifier: 7 }) }
    }

    #[test]
    fn a_listing_has_the_entries_that_fit_and_no_part_of_one() {
        let one = 4 + entry_bytes(&entry(b"name", 1));
        for (room, wanted) in [(one, 1), (2 * one - 1, 1), (2 * one, 2), (10 * one, 10), (99 * one, 10)] {
            let bounds = Bounds { names_bytes_max: usize::MAX, results_bytes_max: LISTING_BYTES + room };
            let mut out = Vec::new();
            assert_eq!(list(&mut out, bounds, ten, put_entry), Status::OK);
            // Without attributes there is room for as many bytes more.
            assert_eq!(out.len(), LISTING_BYTES - (POST_OP_ATTR_BYTES - 4) + wanted * one, "{room}");
            let eof = u32::from(wanted == 10);
            assert_eq!(out[out.len() - 8..], ksf_test::rpc::words(&[0, eof]));
        }
    }

    #[test]
    fn a_listing_that_has_no_room_for_an_entry_is_too_small() {
        let bounds = Bounds { names_bytes_max: usize::MAX, results_bytes_max: LISTING_BYTES + 20 };
        let mut out = Vec::new();
        assert_eq!(list(&mut out, bounds, ten, put_entry), Status::TOOSMALL);
        assert_eq!(out, ksf_test::rpc::words(&[10_005, 0]));
    }

    #[test]
    fn a_bound_on_names_gives_one_entry_at_least() {
        for (names_bytes_max, wanted) in [(0, 1), (47, 1), (48, 2), (usize::MAX, 10)] {
            let bounds = Bounds { names_bytes_max, results_bytes_max: usize::MAX };
            let mut entries = 0;
            let mut out = Vec::new();
            list(&mut out, bounds, ten, |out, entry| {
                entries = entry.cookie;
                put_entry(out, entry);
            });
            // The last one that was put may have been taken back.
            let taken = (out.len() - 4 - 4 - 8 - 8) / (4 + entry_bytes(&entry(b"name", 1)));
            assert!(taken == wanted && entries >= wanted as u64, "{names_bytes_max}: {taken}");
        }
    }
}
