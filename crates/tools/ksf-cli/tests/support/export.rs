//! A folder that `ksf nfs` or `ksf 9p` exports, and calls to the server of NFS.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;

use ksf_proto::oncrpc::record::put_record;
use ksf_proto::oncrpc::{CallHeader, MOUNT_PROGRAM, NFS_PROGRAM, OpaqueAuth, Reply};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_test::rpc::{read_record, words};
use ksf_test::stream;
use rustix::process::Signal;

use super::{Folder, Server, engines};

/// An export with its state beside it.
pub(crate) struct Place(pub(crate) Folder);

impl Place {
    pub(crate) fn new() -> Self {
        let place = Place(Folder::to_export());
        fs::create_dir(place.export()).unwrap();
        place
    }

    pub(crate) fn export(&self) -> PathBuf {
        self.0.path("export")
    }

    /// Starts a server of it, with the options of the export as they follow its folder, on a free port.
    pub(crate) fn start(&self, engine: &str, options: &str, more: &[&str]) -> Server {
        self.start_at(0, engine, options, more)
    }

    /// The same on this port.
    pub(crate) fn start_at(&self, port: u16, engine: &str, options: &str, more: &[&str]) -> Server {
        self.start_kind("nfs", port, engine, options, more)
    }

    /// The same with another protocol.
    pub(crate) fn start_kind(&self, kind: &str, port: u16, engine: &str, options: &str, more: &[&str]) -> Server {
        self.start_listening((kind, port), engine, options, more, 1)
    }

    /// The same with so many listeners.
    pub(crate) fn start_listening(
        &self,
        (kind, port): (&str, u16),
        engine: &str,
        options: &str,
        more: &[&str],
        listeners: usize,
    ) -> Server {
        let export = format!("{}{options}", self.export().display());
        let state = self.0.path("state");
        let listen = format!("tcp:127.0.0.1:{port}");
        let args = [kind, "--engine", engine, "--listen", &listen, "--export", &export, "--state"];
        let args: Vec<&str> = args.into_iter().chain([state.to_str().unwrap()]).chain(more.iter().copied()).collect();
        Server::start(&args, listeners)
    }
}

/// Listeners by a part of their line at the start, each with the bytes of the longest message.
type Listeners = &'static [(&'static str, usize)];

/// Options of a server, and its listeners.
const LISTENERS: [(&[&str], Listeners); 2] = [
    (
        &["--listen", "tcp:127.0.0.1:0,message_bytes_max=64k"],
        &[(" tcp ", 1088 << 10), ("message_bytes_max=65536", 64 << 10)],
    ),
    (&["--connection-bytes-max", "256k"], &[(" tcp ", 256 << 10)]),
];

/// Runs a test with servers of this kind. It gets their addresses, each with the bytes of the longest message there, and a function
/// that lowers the limit in the file and reloads it.
pub(crate) fn on_each_listener(kind: &str, test: impl Fn(&Place, &[(SocketAddr, usize)], &mut dyn FnMut())) {
    for (engine, (options, listeners)) in engines().into_iter().flat_map(|engine| LISTENERS.map(|row| (engine, row))) {
        eprintln!("{kind} on {engine} with {options:?}");
        let place = Place::new();
        let file = place.0.write("limits.toml", "message_bytes_max = \"1088k\"\n");
        let more = [options, &["--config-limits", file.to_str().unwrap()]].concat();
        let mut server = place.start_listening((kind, 0), engine, ",squash=all,anon=0:0", &more, listeners.len());
        let addresses: Vec<_> = listeners.iter().map(|(line, bytes)| (server.address(line), *bytes)).collect();
        test(&place, &addresses, &mut || {
            place.0.write("limits.toml", "message_bytes_max = \"32k\"\nidle_timeout_ms = 600000\n");
            server.signal(Signal::HUP);
            let line = server.line_with("limits reloaded");
            assert!(line.contains("changes of message_bytes_max take effect at a restart"), "{line}");
        });
        server.stop();
    }
}

/// A client that knows the calls these tests make, each on a connection of its own. All of them have to succeed.
pub(crate) struct Calls(pub(crate) SocketAddr);

impl Calls {
    /// The handle of an exported folder.
    pub(crate) fn mount(&self, export: &str) -> Vec<u8> {
        let mounted = self.ask(MOUNT_PROGRAM, 1, &opaque(export.as_bytes()));
        XdrReader::new(&mounted).opaque(64).unwrap().to_vec()
    }

    /// The handle of a new file in this folder.
    pub(crate) fn create(&self, folder: &[u8], name: &str) -> Vec<u8> {
        let mut create = [opaque(folder), opaque(name.as_bytes())].concat();
        // Unchecked, with a mode and no other attribute.
        create.put(&words(&[0, 1, 0o644, 0, 0, 0, 0, 0]));
        let made = self.ask(NFS_PROGRAM, 8, &create);
        XdrReader::new(&made[4..]).opaque(64).unwrap().to_vec()
    }

    /// The handle of a new folder.
    pub(crate) fn mkdir(&self, folder: &[u8], name: &str) -> Vec<u8> {
        let mut mkdir = [opaque(folder), opaque(name.as_bytes())].concat();
        mkdir.put(&words(&[1, 0o755, 0, 0, 0, 0, 0]));
        let made = self.ask(NFS_PROGRAM, 9, &mkdir);
        XdrReader::new(&made[4..]).opaque(64).unwrap().to_vec()
    }

    /// Gives a file this mode.
    pub(crate) fn set_mode(&self, file: &[u8], mode: u32) {
        self.ask(NFS_PROGRAM, 2, &[opaque(file), words(&[1, mode, 0, 0, 0, 0, 0, 0])].concat());
    }

    /// The mode of a file, and how many names it has.
    pub(crate) fn mode_and_links(&self, file: &[u8]) -> (u32, u32) {
        let results = self.ask(NFS_PROGRAM, 1, &opaque(file));
        let mut reader = XdrReader::new(&results[4..]);
        (reader.u32().unwrap(), reader.u32().unwrap())
    }

    pub(crate) fn remove(&self, folder: &[u8], name: &str) {
        self.ask(NFS_PROGRAM, 12, &[opaque(folder), opaque(name.as_bytes())].concat());
    }

    pub(crate) fn rename(&self, from: (&[u8], &str), to: (&[u8], &str)) {
        let place = |(folder, name): (&[u8], &str)| [opaque(folder), opaque(name.as_bytes())].concat();
        self.ask(NFS_PROGRAM, 14, &[place(from), place(to)].concat());
    }

    /// A second name of a file.
    pub(crate) fn link(&self, file: &[u8], folder: &[u8], name: &str) {
        self.ask(NFS_PROGRAM, 15, &[opaque(file), opaque(folder), opaque(name.as_bytes())].concat());
    }

    /// The handle of a name, if there is one.
    pub(crate) fn lookup(&self, folder: &[u8], name: &str) -> Option<Vec<u8>> {
        const NOENT: u32 = 2;
        let results = self.call(NFS_PROGRAM, 3, &[opaque(folder), opaque(name.as_bytes())].concat());
        match XdrReader::new(&results).u32().unwrap() {
            0 => Some(XdrReader::new(&results[4..]).opaque(64).unwrap().to_vec()),
            status => {
                assert_eq!(status, NOENT);
                None
            }
        }
    }

    /// Writes `data`, with 0, 1 or 2 for UNSTABLE, DATA_SYNC or FILE_SYNC.
    pub(crate) fn write(&self, file: &[u8], offset: u32, stable: u32, data: &[u8]) {
        let mut write = opaque(file);
        write.put(&words(&[0, offset, data.len() as u32, stable]));
        write.put_opaque(data);
        self.ask(NFS_PROGRAM, 7, &write);
    }

    /// Has all of the file brought to the medium.
    pub(crate) fn commit(&self, file: &[u8]) {
        self.ask(NFS_PROGRAM, 21, &[opaque(file), vec![0; 12]].concat());
    }

    /// What the file has, up to 64 KiB.
    pub(crate) fn read(&self, file: &[u8]) -> Vec<u8> {
        let results = self.ask(NFS_PROGRAM, 6, &[opaque(file), words(&[0, 0, 65_536])].concat());
        let mut reader = XdrReader::new(&results);
        let attributes = if reader.u32().unwrap() == 1 { 84 } else { 0 };
        // Attributes, count and whether this is the end.
        XdrReader::new(&results[4 + attributes + 8..]).opaque(65_536).unwrap().to_vec()
    }

    /// The results of a call, after its status.
    pub(crate) fn ask(&self, program: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
        let results = self.call(program, procedure, args);
        assert_eq!(results[..4], [0; 4], "procedure {procedure} of {program}");
        results[4..].to_vec()
    }

    pub(crate) fn call(&self, program: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
        call(&mut stream::connect(self.0), program, procedure, args)
    }
}

/// A call on a connection that stays open, and its results.
pub(crate) fn call(connection: &mut TcpStream, program: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
    let mut record = Vec::new();
    put_record(&mut record, |out| {
        CallHeader { xid: 7, program, version: 3, procedure, credential: OpaqueAuth::NONE }.put(out);
        out.put(args);
    });
    connection.write_all(&record).unwrap();
    let message = read_record(connection).unwrap().expect("a reply");
    Reply::parse(&message).unwrap().results.to_vec()
}

/// Bytes with their length before them.
pub(crate) fn opaque(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_opaque(bytes);
    out
}
