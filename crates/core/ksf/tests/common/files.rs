//! Services on files: a server of one shard with its files in a folder, and pipes that hold operations up.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::{Server, Service};

use super::net::{ANY, read_exactly};

pub fn start<S: Service>(engine: EngineKind, limits: Limits, service: Arc<S>) -> Server {
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(limits);
    builder.listen(ANY.parse().unwrap(), service, None).start().unwrap()
}

pub fn read_line(peer: &mut impl Read) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        line.extend(read_exactly(peer, 1));
    }
    String::from_utf8(line).unwrap().trim_end().to_owned()
}

pub fn create(path: &Path) -> std::fs::File {
    std::fs::File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap()
}

/// A named pipe, open for both directions, in which nothing is: a read of it lasts until somebody writes.
pub fn pipe(path: &Path) -> std::fs::File {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    std::fs::File::options().read(true).write(true).open(path).unwrap()
}
