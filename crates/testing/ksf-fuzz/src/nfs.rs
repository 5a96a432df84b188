//! NFS and MOUNT: whatever is sent, each call is answered as RFC 1813 says or its connection ends, and nothing outside of the
//! export changes.
//!
//! The calls go to a server of this process, through a Unix socket, and are carried out in a folder that is made anew for each
//! input. Run as root they have root's rights, so that nothing but the server keeps them inside.

mod schema;

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ksf::engine::EngineKind;
use ksf::listener::ListenAddr;
use ksf::server::Server;
use ksf_nfs::drc::DrcLimits;
use ksf_nfs::{Nfs, Procedure, Settings, TRANSFER_BYTES_MAX};
use ksf_proto::oncrpc::{
    Accepted, CallHeader, MOUNT_PROGRAM, NFS_PROGRAM, OpaqueAuth, Reply, ReplyStatus, auth_sys_body, flavor,
};
use ksf_proto::xdr::XdrWrite;
use ksf_test::rpc::{read_record, record};

use crate::exported::Exported;
use crate::input::{Choices, damage, name, number};
use schema::{Part, are_arguments, arguments, is_procedure, read_mount_results, read_results};

/// Calls of one input, at most.
const CALLS_MAX: usize = 24;
/// Handles that are kept of those that were told, at most.
const HANDLES_MAX: usize = 24;
/// A call that is not answered within this is one that never is.
const PATIENCE: Duration = Duration::from_secs(120);

/// NFS3ERR_JUKEBOX: such a reply is not kept for a second try.
const JUKEBOX: u32 = 10_008;

thread_local! {
    // Removed when the thread ends.
    static GROUND: Ground = Ground::new();
}

/// Arguments of one procedure, which the first byte chooses.
pub fn nfs_arguments(input: &[u8]) {
    let Some((procedure, args)) = input.split_first() else { return };
    GROUND.with(|ground| {
        ground.exported.reset(ground.nfs.files());
        let mut calls = ground.calls();
        let procedure = u32::from(*procedure % 32);
        let (program, procedure) =
            if procedure < 24 { (NFS_PROGRAM, procedure) } else { (MOUNT_PROGRAM, procedure - 24) };
        calls.ask(program, procedure, args);
        ground.check();
    });
}

/// Calls one after the other: well-formed ones, damaged ones, and any bytes.
pub fn nfs_calls(input: &[u8]) {
    let mut choices = Choices::new(input);
    GROUND.with(|ground| {
        ground.exported.reset(ground.nfs.files());
        let mut calls = ground.calls();
        for _ in 0..CALLS_MAX {
            if choices.rest().is_empty() {
                break;
            }
            calls.one(&mut choices);
        }
        ground.check();
    });
}

/// A server, and the folders that it may and may not change.
struct Ground {
    // It stops before its file layer does, and that before the folder is removed.
    server: Server,
    nfs: Nfs,
    exported: Exported,
}

impl Ground {
    fn new() -> Self {
        let mut exported = Exported::new();
        let nfs = Nfs::open(Settings {
            files: exported.settings(),
            drc: DrcLimits::default(),
            transfer_bytes_max: TRANSFER_BYTES_MAX,
        });
        let nfs = nfs.expect("the folder is exported");
        let service = Arc::new(nfs.service("nfs").expect("a service"));
        let address = ListenAddr::Unix(exported.socket());
        let server = Server::builder().engine(EngineKind::Epoll).listen(address, service, None).start();
        let server = server.expect("a server");
        exported.started();
        Self { server, nfs, exported }
    }

    fn calls(&self) -> Calls<'_> {
        let mut calls = Calls { ground: self, stream: self.connect(), xid: 0, handles: Vec::new(), credential: None };
        let mut path = Vec::new();
        path.put_opaque(self.exported.path().as_os_str().as_encoded_bytes());
        calls.ask(MOUNT_PROGRAM, 1, &path);
        let root = calls.handles.first().expect("the export is mounted").clone();
        for name in ["file", "dir", "out"] {
            let mut args = Vec::new();
            args.put_opaque(&root);
            args.put_opaque(name.as_bytes());
            let status = calls.ask(NFS_PROGRAM, 3, &args);
            assert_eq!(status, Some(0), "LOOKUP of {name}, which is there");
        }
        calls
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.exported.socket()).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        stream.set_write_timeout(Some(PATIENCE)).expect("a time limit");
        stream
    }

    fn check(&self) {
        assert!(self.server.is_running(), "the server ended");
        self.exported.check(self.nfs.files());
    }
}

/// A connection, and what was learned by it.
struct Calls<'a> {
    ground: &'a Ground,
    stream: UnixStream,
    xid: u32,
    handles: Vec<Vec<u8>>,
    credential: Option<Vec<u8>>,
}

impl Calls<'_> {
    /// A call that the choices tell. What they put into arguments may be none of the values that the RFC has.
    fn one(&mut self, choices: &mut Choices<'_>) {
        let kind = choices.byte();
        let program = if kind & 7 == 7 { MOUNT_PROGRAM } else { NFS_PROGRAM };
        let procedure = u32::from(choices.byte()) % if program == MOUNT_PROGRAM { 7 } else { 23 };
        self.credential = match kind >> 3 & 3 {
            0 => None,
            1 => auth_sys_body(1, b"fuzz", 1001, 1001, &[5, 6]).ok(),
            _ => auth_sys_body(1, b"fuzz", 0, 0, &[]).ok(),
        };
        let mut args = Vec::new();
        for part in arguments(program, procedure).unwrap_or_default() {
            self.put(choices, *part, &mut args);
        }
        match kind >> 5 {
            0 => damage(choices, &mut args),
            1 => return self.send_damaged(choices, program, procedure, &args),
            2 => args = choices.bytes().to_vec(),
            _ => {}
        }
        self.ask(program, procedure, &args);
    }

    /// Sends a call, and once more the same bytes, and looks at the replies. The status of NFS, if the call was carried out.
    fn ask(&mut self, program: u32, procedure: u32, args: &[u8]) -> Option<u32> {
        self.xid += 1;
        let call = record(&self.message(program, procedure, args));
        let first = self.answer(&call);
        let reply = Reply::parse(&first).expect("a reply");
        assert_eq!(reply.xid, self.xid);
        let wanted = match arguments(program, procedure) {
            _ if !is_procedure(program, procedure) => Accepted::ProcUnavail,
            Some(parts) if !are_arguments(parts, args) => Accepted::GarbageArgs,
            _ => Accepted::Success,
        };
        assert_eq!(reply.status, ReplyStatus::Accepted(wanted), "procedure {procedure} of {program}: {args:?}");
        if wanted != Accepted::Success {
            assert!(reply.results.is_empty());
            return None;
        }
        let mut status = None;
        if program == MOUNT_PROGRAM {
            let read = read_mount_results(procedure, reply.results, &mut self.handles);
            read.unwrap_or_else(|error| panic!("results of procedure {procedure} of MOUNT: {error}"));
        } else if procedure == 0 {
            assert!(reply.results.is_empty());
        } else {
            let read = read_results(procedure, reply.results, &mut self.handles);
            let told = read.unwrap_or_else(|error| panic!("results of procedure {procedure}: {error}"));
            status = Some(told);
            if Procedure::of(procedure).is_some_and(Procedure::changes) && told != JUKEBOX {
                assert_eq!(self.answer(&call), first, "a second try of procedure {procedure}");
            }
        }
        self.handles.truncate(HANDLES_MAX);
        status
    }

    fn answer(&mut self, call: &[u8]) -> Vec<u8> {
        self.stream.write_all(call).expect("the call is taken");
        read_record(&mut self.stream).expect("an answer").expect("an answer and not the end")
    }

    /// Sends a call with changed bytes, also in its header, by a connection of its own: it is answered, or that ends.
    fn send_damaged(&self, choices: &mut Choices<'_>, program: u32, procedure: u32, args: &[u8]) {
        let mut call = record(&self.message(program, procedure, args));
        damage(choices, &mut call);
        let mut stream = self.ground.connect();
        // The server may have given up at the first bytes.
        let _ = stream.write_all(&call);
        let _ = stream.shutdown(Shutdown::Write);
        loop {
            match read_record(&mut stream) {
                Ok(Some(reply)) => drop(Reply::parse(&reply).expect("a reply")),
                Ok(None) => return,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(error) => panic!("neither an answer nor the end: {error}"),
            }
        }
    }

    fn message(&self, program: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
        let credential = match &self.credential {
            Some(body) => OpaqueAuth { flavor: flavor::AUTH_SYS, body },
            None => OpaqueAuth::NONE,
        };
        let mut message = Vec::new();
        CallHeader { xid: self.xid, program, version: 3, procedure, credential }.put(&mut message);
        message.extend_from_slice(args);
        message
    }

    fn put(&self, choices: &mut Choices<'_>, part: Part, out: &mut Vec<u8>) {
        match part {
            Part::Handle => out.put_opaque(&self.handle(choices)),
            Part::Name => out.put_opaque(&name(choices)),
            Part::Path => {
                let root = self.ground.exported.path();
                let below = ["", "dir", "out", "..", "file", "dir/inner"][usize::from(choices.byte()) % 6];
                out.put_opaque(root.join(below).as_os_str().as_encoded_bytes());
            }
            Part::Target => out.put_opaque(&name(choices)),
            Part::U32 => out.put_u32(number(choices) as u32),
            Part::U64 => out.put_u64(number(choices)),
            Part::SetAttr => put_set_attr(choices, out),
            Part::Guard => {
                out.put_option((choices.byte() & 1 == 1).then(|| number(choices)), |out, time| out.put_u64(time))
            }
            Part::CreateHow => {
                // 3 is none.
                let how = u32::from(choices.byte() % 4);
                out.put_u32(how);
                if how == 2 { out.put_u64(number(choices)) } else { put_set_attr(choices, out) }
            }
            Part::Node => {
                // 0 and 8 are none.
                let kind = u32::from(choices.byte() % 9);
                out.put_u32(kind);
                if matches!(kind, 3 | 4 | 6 | 7) {
                    put_set_attr(choices, out);
                }
                if matches!(kind, 3 | 4) {
                    out.put_u64(number(choices));
                }
            }
            Part::Data => {
                // 3 is none.
                let stable = u32::from(choices.byte() % 4);
                let data = vec![7; usize::from(choices.byte()) * 33];
                let count = if choices.byte() < 240 { data.len() as u64 } else { number(choices) };
                out.put_u32(count as u32);
                out.put_u32(stable);
                out.put_opaque(&data);
            }
        }
    }

    /// Mostly one of the server's.
    fn handle(&self, choices: &mut Choices<'_>) -> Vec<u8> {
        let chosen = choices.byte();
        let mut handle = self.handles[usize::from(chosen) % self.handles.len()].clone();
        match chosen {
            240..=249 => damage(choices, &mut handle),
            250.. => handle = vec![chosen; usize::from(choices.byte() % 65)],
            _ => {}
        }
        handle.truncate(64);
        handle
    }
}

fn put_set_attr(choices: &mut Choices<'_>, out: &mut Vec<u8>) {
    let set = choices.byte();
    let maybe = |bit: u8, choices: &mut Choices<'_>| (set >> bit & 1 == 1).then(|| number(choices));
    for bit in 0..3 {
        // Mode, user, group.
        let value = maybe(bit, choices);
        out.put_option(value, |out, value| out.put_u32(value as u32));
    }
    let size = maybe(3, choices);
    out.put_option(size, |out, size| out.put_u64(size));
    for bit in [4, 6] {
        // 3 is none.
        let how = u32::from(set >> bit & 3);
        out.put_u32(how);
        if how == 2 {
            out.put_u64(number(choices));
        }
    }
}
