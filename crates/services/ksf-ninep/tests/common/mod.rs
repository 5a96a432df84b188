//! A server in this process, and a client that speaks 9P2000.L message by message.

#[path = "../../../ksf-nfs/tests/common/disk.rs"]
pub(crate) mod disk;
mod driven;
#[path = "../../../ksf-nfs/tests/common/place.rs"]
mod place;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;

use ksf::engine::EngineKind;
use ksf::listener::ListenAddr;
use ksf::server::{Builder, Server};
use ksf_fs::{ExportOptions, FileSettings};
use ksf_ninep::{ExportSettings, MSIZE_MAX, Ninep, Settings};
use ksf_proto::p9::{DirEntry, NO_FID, NO_TAG, Names, Qid, Reply, Request, Stat, VERSION};
use ksf_test::stream;

pub(crate) use driven::{Answered, Driven, Shard};
pub(crate) use place::{LANES, Place, hold_lanes, server};

/// Fids of a connection in these tests.
pub(crate) const FIDS_MAX: usize = 64;

/// The fid of the root in [`Client::attached`].
pub(crate) const ROOT: u32 = 0;

impl Place {
    /// The export, with all users who they say.
    pub(crate) fn export(&self) -> ExportSettings {
        self.export_as(ExportOptions { sync_names: false, ..ExportOptions::default() })
    }

    pub(crate) fn serve(&self) -> Serving {
        self.serve_all(EngineKind::Epoll, vec![self.export()])
    }

    pub(crate) fn serve_all(&self, engine: EngineKind, exports: Vec<ExportSettings>) -> Serving {
        self.serve_with(engine, exports, FIDS_MAX)
    }

    pub(crate) fn serve_with(&self, engine: EngineKind, exports: Vec<ExportSettings>, fids_max: usize) -> Serving {
        self.serve_on(server(engine), self.files(exports), fids_max)
    }

    pub(crate) fn serve_on(&self, server: Builder, files: FileSettings, fids_max: usize) -> Serving {
        let settings = Settings { files, msize_max: MSIZE_MAX, fids_max };
        let ninep = Ninep::open(settings).unwrap();
        let service = Arc::new(ninep.service("9p"));
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = server.listen(ListenAddr::Tcp(any), service, None).start().unwrap();
        Serving { server, ninep }
    }
}

/// The server stops before its file layer does.
pub(crate) struct Serving {
    server: Server,
    pub(crate) ninep: Ninep,
}

impl Serving {
    pub(crate) fn connect(&self) -> Client {
        match &self.server.listeners()[0].addr {
            ListenAddr::Tcp(address) => Client(stream::connect(*address), None),
            other => panic!("{other} has no address"),
        }
    }

    /// A client that is root, attached to the only export as fid 0.
    pub(crate) fn client(&self) -> Client {
        self.user(0)
    }

    pub(crate) fn user(&self, uid: u32) -> Client {
        let mut client = self.connect();
        client.version();
        client.attach(ROOT, uid, b"").unwrap();
        client
    }

    pub(crate) fn counters(&self) -> String {
        place::counters(&self.server, self.ninep.files())
    }

    pub(crate) fn stop(self) {
        self.server.drain().unwrap();
    }
}

/// A connection, and its last request that failed.
pub(crate) struct Client(pub(crate) TcpStream, pub(crate) Option<String>);

impl Client {
    pub(crate) fn send(&mut self, tag: u16, request: Request<'_>) {
        let mut message = Vec::new();
        request.put(tag, &mut message).unwrap();
        self.0.write_all(&message).unwrap();
    }

    /// The next message; `None` at the end of the connection.
    pub(crate) fn receive(&mut self) -> Option<Vec<u8>> {
        let mut message = vec![0; 4];
        self.0.read_exact(&mut message).ok()?;
        let size = u32::from_le_bytes(message[..].try_into().unwrap());
        message.resize(size as usize, 0);
        self.0.read_exact(&mut message[4..]).unwrap();
        Some(message)
    }

    /// The tag and the type of the next message.
    pub(crate) fn next(&mut self) -> (u16, u8) {
        let message = self.receive().expect("a reply and not the end");
        let (tag, reply) = Reply::parse(&message).unwrap();
        (tag, reply.kind())
    }

    /// Sends a request and looks at its reply; the error is the number of Rlerror.
    #[track_caller]
    pub(crate) fn ask<T>(&mut self, request: Request<'_>, look: impl FnOnce(Reply<'_>) -> T) -> Result<T, i32> {
        let tag = if matches!(request, Request::Version { .. }) { NO_TAG } else { 7 };
        self.send(tag, request);
        let message = self.receive().expect("a reply and not the end");
        let (answered, reply) = Reply::parse(&message).unwrap();
        assert_eq!(answered, tag);
        match reply {
            Reply::Lerror { ecode } => {
                self.1 = Some(format!("{request:?}: error {ecode}"));
                Err(ecode as i32)
            }
            reply => {
                assert_eq!(reply.kind(), request.kind() + 1, "{request:?}");
                Ok(look(reply))
            }
        }
    }

    /// The same where only an error matters.
    #[track_caller]
    pub(crate) fn does(&mut self, request: Request<'_>) -> Result<(), i32> {
        self.ask(request, |_| ())
    }

    #[track_caller]
    pub(crate) fn version(&mut self) {
        let version = Request::Version { msize: MSIZE_MAX, version: VERSION };
        self.ask(version, |reply| assert_eq!(reply, Reply::Version { msize: MSIZE_MAX, version: VERSION })).unwrap();
    }

    #[track_caller]
    pub(crate) fn attach(&mut self, fid: u32, uid: u32, aname: &[u8]) -> Result<Qid, i32> {
        self.ask(Request::Attach { fid, afid: NO_FID, uname: b"", aname, n_uname: uid }, |reply| match reply {
            Reply::Attach { qid } => qid,
            other => panic!("{other:?}"),
        })
    }

    /// Walks to a path, whose names stand between slashes.
    #[track_caller]
    pub(crate) fn walk(&mut self, fid: u32, newfid: u32, path: &str) -> Result<Vec<Qid>, i32> {
        let names: Vec<&[u8]> = path.split('/').filter(|name| !name.is_empty()).map(str::as_bytes).collect();
        let mut buffer = Vec::new();
        let names = Names::of(&names, &mut buffer).unwrap();
        self.ask(Request::Walk { fid, newfid, names }, |reply| match reply {
            Reply::Walk { qids } => qids.iter().collect(),
            other => panic!("{other:?}"),
        })
    }

    /// Walks from the root, and opens.
    #[track_caller]
    pub(crate) fn open(&mut self, fid: u32, path: &str, flags: u32) -> Result<(), i32> {
        self.walk(ROOT, fid, path)?;
        self.does(Request::Lopen { fid, flags })
    }

    #[track_caller]
    pub(crate) fn stat(&mut self, fid: u32) -> Result<Stat, i32> {
        self.ask(Request::Getattr { fid, mask: u64::MAX }, |reply| match reply {
            Reply::Getattr { stat } => stat,
            other => panic!("{other:?}"),
        })
    }

    #[track_caller]
    pub(crate) fn read(&mut self, fid: u32, offset: u64, count: u32) -> Result<Vec<u8>, i32> {
        self.ask(Request::Read { fid, offset, count }, |reply| match reply {
            Reply::Read { data } => data.0.to_vec(),
            other => panic!("{other:?}"),
        })
    }

    /// Names and offsets of a piece of an open folder.
    #[track_caller]
    pub(crate) fn list(&mut self, fid: u32, offset: u64, count: u32) -> Result<Vec<(String, u64, u8)>, i32> {
        self.ask(Request::Readdir { fid, offset, count }, |reply| match reply {
            Reply::Readdir { data } => {
                assert!(data.0.len() <= count as usize);
                let entries = DirEntry::all(data.0).map(|entry| entry.expect("no entry is cut"));
                entries
                    .map(|entry| (String::from_utf8(entry.name.to_vec()).unwrap(), entry.offset, entry.kind))
                    .collect()
            }
            other => panic!("{other:?}"),
        })
    }

    /// Names and qids of an open directory, whose entries fit into one reply.
    #[track_caller]
    pub(crate) fn qids(&mut self, fid: u32) -> Vec<(String, Qid)> {
        let listed = self.ask(Request::Readdir { fid, offset: 0, count: 1 << 16 }, |reply| match reply {
            Reply::Readdir { data } => {
                let entries = DirEntry::all(data.0).map(|entry| entry.expect("no entry is cut"));
                entries.map(|entry| (String::from_utf8(entry.name.to_vec()).unwrap(), entry.qid)).collect()
            }
            other => panic!("{other:?}"),
        });
        listed.unwrap()
    }

    #[track_caller]
    pub(crate) fn clunk(&mut self, fid: u32) -> Result<(), i32> {
        self.does(Request::Clunk { fid })
    }
}
