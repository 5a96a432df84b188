//! A kind for tests. It has what later kinds have: keys of its own, two services at listeners of their own, a value that
//! a reload changes, and something to write at its end.

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ksf::framing::Framing;
use ksf::{Message, Peer, Refused, Reply, Service};
use serde::Deserialize;

use crate::output::{Failure, Status};
use crate::serve::kind::ServiceKind;
use crate::serve::launch::{LISTEN, Launch};
use crate::serve::listen::ListenEntry;
use crate::serve::running::{Running, State};
use crate::serve::sockets::ListenGroup;
use crate::serve::workers::WorkersTable;
use crate::stats::Value;
use crate::toml_file::{Mistake, Table};

/// The key of the listeners that tell the level.
const LEVEL_LISTEN: &str = "level_listen";

#[derive(Debug, Deserialize)]
struct ProbeTable {
    level: u64,
    level_listen: Vec<ListenEntry>,
    journal: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Probe {
    table: ProbeTable,
}

impl ServiceKind for Probe {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let mut own: ProbeTable = table.take()?;
        own.journal = table.folder().join(own.journal);
        Ok(Probe { table: own })
    }

    fn port(&self) -> Option<u16> {
        None
    }

    fn more_listeners(&self) -> Vec<ListenGroup<'_>> {
        let listen = &self.table.level_listen;
        vec![ListenGroup { key: LEVEL_LISTEN, listen, port: None, has_datagrams: false }]
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let level = Arc::new(AtomicU64::new(self.table.level));
        let state = ProbeState { level: Arc::clone(&level), journal: self.table.journal.clone(), said: Vec::new() };
        let shards_only = WorkersTable::default();
        launch
            .serve(LISTEN, Arc::new(ksf_services::echo::Echo), &shards_only)?
            .serve(LEVEL_LISTEN, Arc::new(LevelService(level)), &shards_only)?
            .start(state)
    }
}

/// Answers everything with the level.
struct LevelService(Arc<AtomicU64>);

impl Service for LevelService {
    type Conn = ();

    fn name(&self) -> &str {
        "level"
    }

    fn framing(&self) -> Framing {
        Framing::Raw
    }

    fn accept(&self, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, (): &mut (), _: &Message<'_>, reply: &mut Reply<'_>) {
        reply.bytes(self.0.load(Ordering::Relaxed).to_string().as_bytes());
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("level", self.0.load(Ordering::Relaxed))]
    }
}

struct ProbeState {
    level: Arc<AtomicU64>,
    journal: PathBuf,
    said: Vec<&'static str>,
}

impl State for ProbeState {
    fn counters(&self) -> Vec<Value> {
        vec![Value::new("said", "", self.said.len() as u64)]
    }

    fn reload(&mut self, kind: &dyn Any) -> Result<(), Failure> {
        match kind.downcast_ref::<Probe>() {
            Some(Probe { table }) if table.level < 10 => {
                self.level.store(table.level, Ordering::Relaxed);
                self.said.push("reloaded");
                Ok(())
            }
            _ => Err(Failure::new(Status::Config, "the level is above 9")),
        }
    }

    fn retire(&mut self) {
        self.said.push("retired");
    }

    fn stop(mut self: Box<Self>) -> io::Result<()> {
        self.said.push("stopped");
        std::fs::write(&self.journal, self.said.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::path::Path;

    use ksf::listener::ListenAddr;

    use super::*;
    use crate::serve::args::ProcessArgs;
    use crate::serve::config::Config;
    use crate::serve::engine::Obstacles;
    use crate::serve::plan::{self, Plan, Source};

    fn start(path: &Path) -> (Running, Source) {
        let config = Config::read(path).unwrap();
        let mut plans = plan::of_config(config, path, &ProcessArgs::default(), Vec::new()).unwrap();
        let Plan { common, kind, source } = plans.remove(0);
        let launch = Launch::new(common, false, &Obstacles::default(), false).unwrap();
        (kind.as_kind().start(launch).unwrap(), source)
    }

    fn ask(running: &Running, listener: usize) -> String {
        let ListenAddr::Tcp(address) = running.listeners()[listener].addr else { panic!("it listens on TCP") };
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"?").unwrap();
        let mut reply = [0; 1];
        stream.read_exact(&mut reply).unwrap();
        String::from_utf8(reply.to_vec()).unwrap()
    }

    fn shown(running: &Running, name: &str) -> u64 {
        let snapshot = running.snapshot();
        let mut all = snapshot.own.iter().chain(&snapshot.limits);
        all.find(|value| value.name == name).unwrap_or_else(|| panic!("no {name} in {snapshot:?}")).value
    }

    #[test]
    fn a_kind_has_its_own_keys_listeners_reload_and_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ksf.toml");
        let write = |kind: &str, level: u64, fragments: u64| {
            let own = format!("level = {level}\nlevel_listen = [\"127.0.0.1:0\"]\njournal = \"end\"");
            let own = if kind == "probe" { own } else { String::new() };
            let common = format!("name = \"a\"\nkind = \"{kind}\"\nlisten = [\"tcp:127.0.0.1:0\"]\n{own}");
            let limits = format!("[service.limits]\nfragments_max = {fragments}");
            std::fs::write(&path, format!("engine = \"epoll\"\n[[service]]\n{common}\n{limits}")).unwrap();
        };
        write("probe", 1, 7);
        let (mut running, source) = start(&path);
        assert_eq!(running.ready.len(), 2, "{:?}", running.ready);
        assert_eq!((ask(&running, 0), ask(&running, 1)), ("?".into(), "1".into()));
        assert_eq!((shown(&running, "level_level"), shown(&running, "said")), (1, 0));

        write("probe", 2, 8);
        source.reload(&mut running).unwrap();
        assert_eq!((ask(&running, 1), shown(&running, "fragments_max")), ("2".into(), 8));
        // A table that the kind refuses changes nothing, nor does one of another kind.
        for (kind, level) in [("probe", 99), ("echo", 3)] {
            write(kind, level, 9);
            source.reload(&mut running).unwrap_err();
            assert_eq!((ask(&running, 1), shown(&running, "fragments_max")), ("2".into(), 8));
        }

        running.drain().unwrap();
        assert_eq!(std::fs::read_to_string(folder.path().join("end")).unwrap(), "reloaded retired stopped");
    }
}
