//! Level 1: the sk_lookup program of `bpf/steer.bpf.c`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ksf_accel_proto::state::WORKERS_MAX;
use libbpf_rs::MapHandle;

use super::load;
use crate::address::Key;
use crate::{bpf, sys};

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/steer.bpf.o"));

/// What to do with requests to an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Choose a worker of this listener.
    Steer(usize),
    /// Somebody else's: leave it to the kernel's own search.
    Leave,
    /// A queue's own address: nobody may connect to it.
    Refuse,
}

/// All that the program knows about addresses.
pub(crate) type Rules = BTreeMap<Key, Action>;

pub(super) struct Lookup {
    // Ends the program's work; the maps live as long as the program.
    _link: OwnedFd,
    namespace: File,
    id: u32,
    ports: MapHandle,
    rules: MapHandle,
    queues: MapHandle,
    owners: MapHandle,
    installed: Rules,
    installed_ports: Vec<u64>,
}

impl Lookup {
    pub(super) fn attach(state: BorrowedFd<'_>) -> io::Result<Self> {
        // Reading a socket's backlog needs CAP_PERFMON; without it a full queue is found by the holder only.
        let object = load::load(OBJECT, state, 1).or_else(|_| load::load(OBJECT, state, 0))?;
        let program = load::program(&object)?;
        let namespace = File::open("/proc/thread-self/ns/net")?;
        let link = sys::attach_lookup(program.as_fd(), namespace.as_fd())?;
        Ok(Self {
            _link: link,
            namespace,
            id: ksf_bpf::program_id(program.as_fd())?,
            ports: bpf::map(&object, "ksf_ports")?,
            rules: bpf::map(&object, "ksf_rules")?,
            queues: bpf::map(&object, "ksf_queues")?,
            owners: bpf::map(&object, "ksf_owners")?,
            installed: Rules::new(),
            installed_ports: vec![0; 65536 / 64],
        })
    }

    pub(super) fn others(&self) -> Vec<String> {
        let ids = sys::lookup_programs(self.namespace.as_fd()).unwrap_or_default();
        ids.into_iter().filter(|&id| id != self.id).map(bpf::named).collect()
    }

    pub(super) fn add(&mut self, listener: usize, worker: usize, queue: BorrowedFd<'_>) -> io::Result<()> {
        bpf::put(&self.queues, &slot(listener, worker), &(queue.as_raw_fd() as u32).to_ne_bytes())
    }

    /// Names the program's socket with which the queue ends.
    pub(super) fn set_owner(&mut self, listener: usize, worker: usize, own: BorrowedFd<'_>) -> io::Result<()> {
        bpf::put(&self.owners, &slot(listener, worker), &(own.as_raw_fd() as u32).to_ne_bytes())
    }

    pub(super) fn remove(&mut self, listener: usize, worker: usize) {
        // Where the socket is closed, the map has forgotten it by itself.
        let _ = bpf::delete(&self.queues, &slot(listener, worker));
        let _ = bpf::delete(&self.owners, &slot(listener, worker));
    }

    /// Replaces the rules, one by one: what is in both is not touched, so no request sees a gap.
    pub(super) fn set_rules(&mut self, rules: &Rules) -> io::Result<()> {
        if *rules == self.installed {
            return Ok(());
        }
        for (key, action) in rules {
            if self.installed.get(key) != Some(action) {
                bpf::put(&self.rules, &key.to_bytes(), &action.to_bytes())?;
                self.installed.insert(*key, *action);
            }
        }
        let gone: Vec<Key> = self.installed.keys().filter(|key| !rules.contains_key(key)).copied().collect();
        for key in gone {
            bpf::delete(&self.rules, &key.to_bytes())?;
            self.installed.remove(&key);
        }
        self.set_ports()
    }

    fn set_ports(&mut self) -> io::Result<()> {
        let mut words = vec![0u64; 65536 / 64];
        for key in self.installed.keys() {
            words[key.port as usize / 64] |= 1 << (key.port % 64);
        }
        for (index, (word, installed)) in words.iter().zip(&mut self.installed_ports).enumerate() {
            if word != installed {
                bpf::put(&self.ports, &(index as u32).to_ne_bytes(), &word.to_ne_bytes())?;
                *installed = *word;
            }
        }
        Ok(())
    }
}

fn slot(listener: usize, worker: usize) -> [u8; 4] {
    ((listener * WORKERS_MAX + worker) as u32).to_ne_bytes()
}

impl Action {
    /// `struct ksf_rule`.
    fn to_bytes(self) -> [u8; 8] {
        let (action, listener) = match self {
            Action::Steer(listener) => (0u32, listener as u32),
            Action::Leave => (1, 0),
            Action::Refuse => (2, 0),
        };
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&action.to_ne_bytes());
        bytes[4..].copy_from_slice(&listener.to_ne_bytes());
        bytes
    }
}
