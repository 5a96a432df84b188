//! The program MOUNT, version 3 (RFC 1813 appendix I): from a path to a handle.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ksf::Peer;
use ksf_fs::{Account, Credential as Caller, ErrorKind, Exported, FileType, Handle, Lane, Lanes, Length};
use ksf_proto::oncrpc::flavor;
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::{Answered, ProcError, RpcCall, RpcReply};

use crate::activity::Client;
use crate::program::{Core, caller_of, sender_of};
use crate::status::Status;

/// Greatest path: `MNTPATHLEN`.
const PATH_LIMIT_BYTES: u32 = 1024;

/// Most mounts that are noted, of all clients and of one address. They are for people: nothing depends on them.
const MOUNTS_MAX: usize = 1024;
const ADDRESS_MOUNTS_MAX: usize = 64;

/// Bytes of a mount in DUMP, at most: an address, a path, their lengths and what tells that there is one.
const DUMPED_BYTES_MAX: usize = 64 + PATH_LIMIT_BYTES as usize;

/// Bytes of a list that leaves by datagram, at most: for each byte of its call, and in all. With its head the reply has three times
/// the bytes of the call, as RFC 9000 section 8.1 allows for a peer whose address is not verified.
const DATAGRAM_LIST_FACTOR: usize = 2;
const DATAGRAM_LIST_BYTES_MAX: usize = 8 << 10;

/// Results of MNT: a status, a handle, a flavour.
const RESULTS_BYTES_MAX: usize = 256;

const NULL: u32 = 0;
const MNT: u32 = 1;
pub(crate) const DUMP: u32 = 2;
const UMNT: u32 = 3;
const UMNTALL: u32 = 4;
const EXPORT: u32 = 5;

/// A client and a path that it mounted.
type Mount = (Option<IpAddr>, Vec<u8>);

/// What was mounted and not unmounted.
#[derive(Debug, Default)]
pub(crate) struct Mounts(Mutex<BTreeSet<Mount>>);

impl Mounts {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<Mount>> {
        // No change of the set is made in two steps.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, ip: Option<IpAddr>, path: Vec<u8>) {
        if path.len() > PATH_LIMIT_BYTES as usize {
            return;
        }
        let mut mounts = self.lock();
        let of_address = mounts.range((ip, Vec::new())..).take_while(|(by, _)| *by == ip).count();
        if mounts.len() < MOUNTS_MAX && of_address < ADDRESS_MOUNTS_MAX {
            mounts.insert((ip, path));
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Most bytes of the results of DUMP.
    pub(crate) fn dump_bytes_max(&self) -> usize {
        4 + self.len() * DUMPED_BYTES_MAX
    }

    /// How many each client has.
    pub(crate) fn by_client(&self) -> HashMap<Client, u64> {
        let mut counts = HashMap::new();
        self.lock().iter().for_each(|(ip, _)| *counts.entry(Client::of(*ip)).or_default() += 1);
        counts
    }
}

/// MOUNTv3.
pub(crate) struct MountProgram {
    pub(crate) core: Arc<Core>,
    pub(crate) lanes: Arc<Lanes>,
}

impl MountProgram {
    fn mount(&self, account: &Account, call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
        let path = match read_path(call.args) {
            Ok(path) => path,
            Err(error) => return reply.error(error),
        };
        let sender = sender_of(call.peer());
        let refuse = |status: Status, reply: RpcReply<'_>| {
            reply.results(|out| {
                out.put_u32(status.0);
                Ok(())
            })
        };
        let Some((exported, below)) = self.core.exports.of_path(&path) else { return refuse(Status::NOENT, reply) };
        if !exported.admits(sender) {
            return refuse(Status::ACCES, reply);
        }
        let root = exported.export.root().clone();
        let path = noted_path(exported, &below);
        if below.is_empty() {
            self.core.mounts.note(sender.ip(), path);
            return reply.results(|out| {
                put_mounted(out, &root);
                Ok(())
            });
        }
        let caller = caller_of(&call.credential);
        let (core, lanes, of) = (Arc::clone(&self.core), Arc::clone(&self.lanes), account.clone());
        let (answered, way) = reply.defer_for(RESULTS_BYTES_MAX);
        let top = root.clone();
        self.core.fs.look_up_groups(account, caller, &top, move |caller| {
            let share = core.fs.share_of(&root);
            lanes.submit_for(&of, share, Length::Short, path_bytes(&below), move |lane| {
                let caller = caller.map_err(|error| mount_status(error.kind()));
                let found = caller.and_then(|caller| descend(&core, lane, &caller, root, &below));
                if found.is_ok() {
                    core.mounts.note(sender.ip(), path);
                }
                way.results(|out| {
                    match found {
                        Ok(handle) => put_mounted(out, &handle),
                        Err(status) => out.put_u32(status.0),
                    }
                    Ok(())
                });
            });
        });
        answered
    }
}

impl MountProgram {
    /// Answers a call.
    pub(crate) fn call(&self, account: &Account, call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
        let ip = sender_of(call.peer()).ip();
        match call.procedure {
            NULL => reply.void(),
            MNT => self.mount(account, call, reply),
            DUMP => list(call, reply, |out| {
                for (ip, path) in self.core.mounts.lock().iter() {
                    out.put_bool(true);
                    out.put_opaque(ip.map_or_else(|| "localhost".to_owned(), |ip| ip.to_string()).as_bytes());
                    out.put_opaque(path);
                }
                out.put_bool(false);
            }),
            UMNT => match read_path(call.args) {
                Ok(path) => {
                    if let Some((exported, below)) = self.core.exports.of_path(&path) {
                        self.core.mounts.lock().remove(&(ip, noted_path(exported, &below)));
                    }
                    reply.void()
                }
                Err(error) => reply.error(error),
            },
            UMNTALL => {
                self.core.mounts.lock().retain(|(mounted_by, _)| *mounted_by != ip);
                reply.void()
            }
            EXPORT => list(call, reply, |out| {
                for exported in &self.core.exports.all {
                    out.put_bool(true);
                    out.put_opaque(exported.export.path().as_os_str().as_bytes());
                    for network in exported.clients.networks() {
                        out.put_bool(true);
                        out.put_opaque(network.to_string().as_bytes());
                    }
                    out.put_bool(false);
                }
                out.put_bool(false);
            }),
            _ => reply.error(ProcError::ProcUnavail),
        }
    }
}

/// Answers with a list. By datagram it is refused if it is long: an empty one would keep the client from asking by TCP.
fn list(call: &RpcCall<'_>, reply: RpcReply<'_>, put: impl FnOnce(&mut Vec<u8>)) -> Answered {
    let bytes_max = match call.peer() {
        Peer::Udp(_) => (DATAGRAM_LIST_FACTOR * call.message().bytes().len()).min(DATAGRAM_LIST_BYTES_MAX),
        _ => usize::MAX,
    };
    reply.results(|out| {
        let begin = out.len();
        put(out);
        if out.len() - begin > bytes_max { Err(ProcError::ProcUnavail) } else { Ok(()) }
    })
}

/// The one spelling of a path by which a mount is noted: the export's own, without symbolic links, and the names below it.
fn noted_path(exported: &Exported, below: &[PathBuf]) -> Vec<u8> {
    let mut path = exported.export.path().to_owned();
    path.extend(below);
    path.into_os_string().into_vec()
}

fn read_path(args: &[u8]) -> Result<PathBuf, ProcError> {
    let mut r = XdrReader::new(args);
    let path = Path::new(std::ffi::OsStr::from_bytes(r.string(PATH_LIMIT_BYTES)?)).to_owned();
    r.finish()?;
    Ok(path)
}

fn path_bytes(parts: &[PathBuf]) -> usize {
    parts.iter().map(|part| size_of::<PathBuf>() + part.as_os_str().len()).sum()
}

/// `mountres3_ok`. AUTH_UNIX alone is named: clients of BSD refuse a server that names AUTH_NONE.
fn put_mounted(out: &mut Vec<u8>, handle: &Handle) {
    out.put_u32(Status::OK.0);
    out.put_opaque(handle.as_bytes());
    out.put_array(&[flavor::AUTH_SYS], |out, flavor| out.put_u32(*flavor));
}

/// Goes from the root of an export to a folder in it, as the caller. Symbolic links are not followed.
fn descend(core: &Core, lane: &mut Lane, caller: &Caller, root: Handle, names: &[PathBuf]) -> Result<Handle, Status> {
    let mut at = root;
    for name in names {
        let found = core.fs.lookup(lane, caller, &at, name.as_os_str().as_bytes()).result;
        let found = found.map_err(|error| mount_status(error.kind()))?;
        if found.attr.file_type != FileType::Directory {
            return Err(Status::NOTDIR);
        }
        at = found.handle;
    }
    Ok(at)
}

/// `mountstat3`, which has fewer values than `nfsstat3`.
fn mount_status(kind: ErrorKind) -> Status {
    /// `MNT3ERR_SERVERFAULT`.
    const SERVERFAULT: Status = Status(10_006);
    match Status::from(kind) {
        status @ (Status::PERM
        | Status::NOENT
        | Status::IO
        | Status::ACCES
        | Status::NOTDIR
        | Status::INVAL
        | Status::NAMETOOLONG
        | Status::NOTSUPP) => status,
        _ => SERVERFAULT,
    }
}
