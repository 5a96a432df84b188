//! Level 2: the sk_reuseport program of `bpf/group.bpf.c`, one per listener.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use ksf_accel_proto::state::WORKERS_MAX;
use libbpf_rs::MapHandle;

use super::load;
use crate::{bpf, sys};

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/group.bpf.o"));

/// Groups by listener.
pub(super) struct Groups {
    members: HashMap<usize, MapHandle>,
}

impl Groups {
    /// Loads the program once to see whether it can be.
    pub(super) fn probe(state: BorrowedFd<'_>) -> io::Result<Self> {
        let object = load::load(OBJECT, state, 0)?;
        let program = load::program(&object)?;
        attach(super::scratch()?.as_fd(), program.as_fd())?;
        Ok(Self { members: HashMap::new() })
    }

    pub(super) fn add(
        &mut self,
        state: BorrowedFd<'_>,
        listener: usize,
        worker: usize,
        queue: BorrowedFd<'_>,
        own: BorrowedFd<'_>,
    ) -> io::Result<()> {
        if let Some(members) = self.members.get(&listener) {
            return set(members, worker, queue);
        }
        let object = load::load(OBJECT, state, listener as u32)?;
        let members = bpf::map(&object, "ksf_members")?;
        set(&members, worker, queue)?;
        // The program's own listener is in the group since its first sibling listens.
        set(&members, WORKERS_MAX, own)?;
        attach(queue, load::program(&object)?.as_fd())?;
        self.members.insert(listener, members);
        Ok(())
    }

    pub(super) fn end(&mut self, listener: usize) {
        self.members.remove(&listener);
    }
}

fn set(members: &MapHandle, index: usize, socket: BorrowedFd<'_>) -> io::Result<()> {
    bpf::put(members, &(index as u32).to_ne_bytes(), &(socket.as_raw_fd() as u64).to_ne_bytes())
}

fn attach(socket: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let fd = program.as_raw_fd().to_ne_bytes();
    sys::set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_EBPF, &fd)
}
