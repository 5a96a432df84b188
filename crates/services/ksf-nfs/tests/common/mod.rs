//! A server in this process, and a client that speaks NFSv3 word by word.

pub(crate) mod disk;
mod place;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;

use ksf::engine::EngineKind;
use ksf::listener::ListenAddr;
use ksf::server::Server;
use ksf_fs::{ExportOptions, FileSettings};
use ksf_nfs::drc::DrcLimits;
use ksf_nfs::{ExportSettings, Nfs, Settings, TRANSFER_BYTES_MAX};
use ksf_proto::oncrpc::record::put_record;
use ksf_proto::oncrpc::{
    Accepted, CallHeader, MOUNT_PROGRAM, NFS_PROGRAM, OpaqueAuth, Reply, ReplyStatus, auth_sys_body, flavor,
};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_test::rpc::read_record;
use ksf_test::stream;

pub(crate) use place::{Place, hold_lanes, server};

pub(crate) const OK: u32 = 0;

impl Place {
    /// The export that calls are carried out in as they are.
    pub(crate) fn export(&self) -> ExportSettings {
        self.export_with(false)
    }

    /// The same; `exclusive`: nothing but the server changes it.
    pub(crate) fn export_with(&self, exclusive: bool) -> ExportSettings {
        self.export_as(ExportOptions { exclusive, ..ExportOptions::default() })
    }

    /// A new export, and a server of it.
    pub(crate) fn served() -> (Self, Serving) {
        let place = Self::new();
        let serving = place.serve();
        (place, serving)
    }

    pub(crate) fn serve(&self) -> Serving {
        self.serve_all(EngineKind::Epoll, vec![self.export()])
    }

    pub(crate) fn serve_all(&self, engine: EngineKind, exports: Vec<ExportSettings>) -> Serving {
        self.serve_at(Ipv4Addr::LOCALHOST.into(), engine, exports)
    }

    /// Serves on free ports of this address.
    pub(crate) fn serve_at(&self, address: IpAddr, engine: EngineKind, exports: Vec<ExportSettings>) -> Serving {
        self.serve_files(address, engine, self.files(exports))
    }

    pub(crate) fn serve_files(&self, address: IpAddr, engine: EngineKind, files: FileSettings) -> Serving {
        let settings = Settings { files, drc: DrcLimits::default(), transfer_bytes_max: TRANSFER_BYTES_MAX };
        let nfs = Nfs::open(settings).unwrap();
        let service = Arc::new(nfs.service("nfs").unwrap());
        let any = SocketAddr::from((address, 0));
        let server = server(engine)
            .listen(ListenAddr::Tcp(any), Arc::clone(&service), None)
            .listen(ListenAddr::Udp(any), service, None)
            .start()
            .unwrap();
        Serving { server, nfs }
    }
}

/// The server stops before its file layer does.
pub(crate) struct Serving {
    server: Server,
    pub(crate) nfs: Nfs,
}

impl Serving {
    fn address_of(&self, listener: usize) -> SocketAddr {
        match &self.server.listeners()[listener].addr {
            ListenAddr::Tcp(address) | ListenAddr::Udp(address) => *address,
            other => panic!("{other} has no address"),
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address_of(0)
    }

    pub(crate) fn udp(&self) -> SocketAddr {
        self.address_of(1)
    }

    /// A client that is root.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.address(), "tests", 0, 0, &[])
    }

    /// A client that is root, and the handle of an exported folder.
    pub(crate) fn mount(&self, path: &Path) -> (Client, Vec<u8>) {
        let mut client = self.client();
        let root = client.mnt(path).unwrap();
        (client, root)
    }

    pub(crate) fn user(&self, uid: u32, gid: u32, groups: &[u32]) -> Client {
        Client::new(self.address(), "tests", uid, gid, groups)
    }

    pub(crate) fn counters(&self) -> String {
        place::counters(&self.server, self.nfs.files())
    }

    /// A counter of the server's shards.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.server.counters().iter().find(|counter| counter.name == name).expect("a known counter").value
    }

    pub(crate) fn stop(self) {
        self.server.drain().unwrap();
    }
}

/// One connection of one user.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    pub(crate) xid: u32,
    pub(crate) credential: Option<Vec<u8>>,
}

impl Client {
    pub(crate) fn new(address: SocketAddr, machine: &str, uid: u32, gid: u32, groups: &[u32]) -> Self {
        let body = auth_sys_body(7, machine.as_bytes(), uid, gid, groups).unwrap();
        Self { stream: stream::connect(address), xid: 1, credential: Some(body) }
    }

    /// One that says nothing of itself.
    pub(crate) fn nobody(address: SocketAddr) -> Self {
        Self { stream: stream::connect(address), xid: 1, credential: None }
    }

    /// A call as it lies on the wire, without a record mark.
    pub(crate) fn message(&self, program: u32, version: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
        let credential = match &self.credential {
            Some(body) => OpaqueAuth { flavor: flavor::AUTH_SYS, body },
            None => OpaqueAuth::NONE,
        };
        let mut message = Vec::new();
        CallHeader { xid: self.xid, program, version, procedure, credential }.put(&mut message);
        message.extend_from_slice(args);
        message
    }

    pub(crate) fn send(&mut self, program: u32, version: u32, procedure: u32, args: &[u8]) {
        self.send_message(&self.message(program, version, procedure, args));
    }

    /// Sends a message as one record.
    pub(crate) fn send_message(&mut self, message: &[u8]) {
        use std::io::Write;
        let mut record = Vec::new();
        put_record(&mut record, |out| out.extend_from_slice(message));
        self.stream.write_all(&record).unwrap();
    }

    /// The next reply: its xid, status, results.
    pub(crate) fn receive(&mut self) -> (u32, ReplyStatus, Vec<u8>) {
        let message = read_record(&mut self.stream).unwrap().expect("a reply and not the end");
        let reply = Reply::parse(&message).unwrap();
        (reply.xid, reply.status, reply.results.to_vec())
    }

    pub(crate) fn ask(&mut self, program: u32, version: u32, procedure: u32, args: &[u8]) -> (ReplyStatus, Vec<u8>) {
        self.xid += 1;
        self.send(program, version, procedure, args);
        let (xid, status, results) = self.receive();
        assert_eq!(xid, self.xid);
        (status, results)
    }

    /// Results of a procedure of NFS: its status, and what follows.
    #[track_caller]
    pub(crate) fn nfs(&mut self, procedure: u32, args: &[u8]) -> (u32, Vec<u8>) {
        let (status, results) = self.ask(NFS_PROGRAM, 3, procedure, args);
        assert_eq!(status, ReplyStatus::Accepted(Accepted::Success), "procedure {procedure}");
        split(&results)
    }

    /// The same where it must go well.
    #[track_caller]
    pub(crate) fn done(&mut self, procedure: u32, args: &[u8]) -> Vec<u8> {
        let (status, rest) = self.nfs(procedure, args);
        assert_eq!(status, OK, "procedure {procedure}");
        rest
    }

    #[track_caller]
    pub(crate) fn mount(&mut self, procedure: u32, args: &[u8]) -> Vec<u8> {
        let (status, results) = self.ask(MOUNT_PROGRAM, 3, procedure, args);
        assert_eq!(status, ReplyStatus::Accepted(Accepted::Success), "procedure {procedure} of MOUNT");
        results
    }

    /// The handle of a path, or the status of MNT.
    #[track_caller]
    pub(crate) fn mnt(&mut self, path: &Path) -> Result<Vec<u8>, u32> {
        let mut args = Vec::new();
        args.put_opaque(path.to_str().unwrap().as_bytes());
        let (status, rest) = split(&self.mount(1, &args));
        if status != OK {
            assert!(rest.is_empty(), "MNT tells nothing behind a status that is an error");
            return Err(status);
        }
        let mut r = XdrReader::new(&rest);
        let handle = r.opaque(64).unwrap().to_vec();
        assert_eq!(r.array(9, XdrReader::u32).unwrap(), [1], "AUTH_UNIX is named, and nothing else");
        r.finish().unwrap();
        Ok(handle)
    }

    /// The handle of a name.
    #[track_caller]
    pub(crate) fn lookup(&mut self, dir: &[u8], name: &str) -> Vec<u8> {
        let rest = self.done(3, &named(dir, name));
        XdrReader::new(&rest).opaque(64).unwrap().to_vec()
    }

    /// Makes a file.
    #[track_caller]
    pub(crate) fn create(&mut self, dir: &[u8], name: &str) -> Vec<u8> {
        let args = [named(dir, name), ksf_test::rpc::words(&[0]), mode(0o644)].concat();
        made(&self.done(8, &args))
    }
}

/// A status and what follows it.
pub(crate) fn split(results: &[u8]) -> (u32, Vec<u8>) {
    let (status, rest) = results.split_first_chunk::<4>().expect("a status");
    (u32::from_be_bytes(*status), rest.to_vec())
}

/// The handle in results of CREATE, MKDIR, SYMLINK and MKNOD, behind the status.
pub(crate) fn made(rest: &[u8]) -> Vec<u8> {
    let mut r = XdrReader::new(rest);
    assert!(r.bool().unwrap(), "the handle is told");
    let handle = r.opaque(64).unwrap().to_vec();
    assert!(r.bool().unwrap(), "its attributes are told");
    Attr::read(&mut r);
    let wcc = Wcc::read(&mut r);
    assert!(wcc.after.is_some(), "the folder after it");
    r.finish().unwrap();
    handle
}

pub(crate) fn handle(handle: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_opaque(handle);
    out
}

pub(crate) fn named(dir: &[u8], name: &str) -> Vec<u8> {
    named_bytes(dir, name.as_bytes())
}

pub(crate) fn named_bytes(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut out = handle(dir);
    out.put_opaque(name);
    out
}

/// `sattr3` with a mode.
pub(crate) fn mode(mode: u32) -> Vec<u8> {
    ksf_test::rpc::words(&[1, mode, 0, 0, 0, 0, 0])
}

/// Arguments of READ.
pub(crate) fn read_args(file: &[u8], offset: u64, count: u32) -> Vec<u8> {
    let mut args = handle(file);
    args.put_u64(offset);
    args.put_u32(count);
    args
}

/// Arguments of WRITE.
pub(crate) fn write_args(file: &[u8], offset: u64, stable: u32, data: &[u8]) -> Vec<u8> {
    let mut args = read_args(file, offset, data.len() as u32);
    args.put_u32(stable);
    args.put_opaque(data);
    args
}

/// `fattr3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attr {
    pub(crate) file_type: u32,
    pub(crate) mode: u32,
    pub(crate) nlink: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) fileid: u64,
    pub(crate) mtime: u64,
    pub(crate) ctime: u64,
}

impl Attr {
    pub(crate) fn read(r: &mut XdrReader<'_>) -> Self {
        let [file_type, mode, nlink, uid, gid] = std::array::from_fn(|_| r.u32().unwrap());
        let [size, _used, _device, _fsid, fileid, _atime, mtime, ctime] = std::array::from_fn(|_| r.u64().unwrap());
        Self { file_type, mode, nlink, uid, gid, size, fileid, mtime, ctime }
    }

    /// `post_op_attr`.
    pub(crate) fn read_option(r: &mut XdrReader<'_>) -> Option<Self> {
        r.bool().unwrap().then(|| Self::read(r))
    }
}

/// `wcc_data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wcc {
    /// Size, mtime, ctime.
    pub(crate) before: Option<(u64, u64, u64)>,
    pub(crate) after: Option<Attr>,
}

impl Wcc {
    pub(crate) fn read(r: &mut XdrReader<'_>) -> Self {
        let before = r.bool().unwrap().then(|| (r.u64().unwrap(), r.u64().unwrap(), r.u64().unwrap()));
        Self { before, after: Attr::read_option(r) }
    }
}

/// Weak cache data that are all of these results.
#[track_caller]
pub(crate) fn wcc(rest: &[u8]) -> Wcc {
    let mut r = XdrReader::new(rest);
    let wcc = Wcc::read(&mut r);
    r.finish().unwrap();
    wcc
}
