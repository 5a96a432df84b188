//! The shared state: a BPF map where that is permitted, else a memfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};

use ksf_accel_proto::state::{HOME_MAX, NO_CPU, State, VERSION, Worker};
use libbpf_rs::{MapHandle, MapType};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::AccelOptions;
use crate::status::WorkerCounters;
use crate::sys::Mapping;

/// Memory that threads, steering and holder share.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    fd: OwnedFd,
    mapping: Mapping,
}

impl SharedMemory {
    /// As the value of a map that steering programs can read.
    pub(crate) fn in_map(options: &AccelOptions) -> io::Result<Self> {
        let settings = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: libbpf_sys::BPF_F_MMAPABLE,
            ..Default::default()
        };
        let map = MapHandle::create(MapType::Array, Some("ksf_state"), 4, size_of::<State>() as u32, 1, &settings)
            .map_err(ksf_bpf::to_io)?;
        Self::new(map.as_fd().try_clone_to_owned()?, options)
    }

    /// As anonymous memory, for mechanisms that read no state.
    pub(crate) fn in_memory(options: &AccelOptions) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create("ksf_state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, size_of::<State>() as u64)?;
        // The program has this descriptor too. Were it to cut the file short, every reader would die of SIGBUS.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::new(fd, options)
    }

    fn new(fd: OwnedFd, options: &AccelOptions) -> io::Result<Self> {
        let mapping = Mapping::new(fd.as_fd(), size_of::<State>())?;
        let shared = Self { fd, mapping };
        let state = shared.state();
        state.control.busy_limit_ns.store(options.busy_limit_ns, Relaxed);
        state.control.on.store(options.on.into(), Relaxed);
        for worker in &state.workers {
            worker.cpu.store(NO_CPU, Relaxed);
        }
        state.control.version.store(VERSION, Relaxed);
        Ok(shared)
    }

    pub(crate) fn state(&self) -> &State {
        // SAFETY: the mapping is as large as `State` (checked by `at`), lives as long as `self`, cannot shrink (a map's
        // value, or a sealed memfd), and is all atomics, for which every bit pattern is valid.
        unsafe { self.mapping.at::<State>().as_ref() }
    }

    pub(crate) fn worker(&self, index: usize) -> &Worker {
        &self.state().workers[index]
    }

    /// Gives a place to a new worker: all counters begin at zero, and it is ready for nothing yet.
    pub(crate) fn begin_worker(&self, index: usize, pid: u32, cpu: Option<u32>, generation: u32) {
        let worker = self.worker(index);
        worker.ready.store(0, Relaxed);
        worker.busy_since_ns.store(0, Relaxed);
        worker.stalled.store(0, Relaxed);
        for counter in [
            &worker.accepted_own,
            &worker.accepted_fallback,
            &worker.accepted_stolen,
            &worker.steered_local,
            &worker.steered_remote,
        ] {
            counter.store(0, Relaxed);
        }
        worker.cpu.store(cpu.map_or(NO_CPU, |cpu| cpu as i32), Relaxed);
        worker.generation.store(generation, Relaxed);
        worker.pid.store(pid, Release);
        self.state().control.workers_end.fetch_max(index as u32 + 1, Relaxed);
    }

    /// Takes the place from a worker that has ended. What it has counted.
    pub(crate) fn end_worker(&self, index: usize) -> WorkerCounters {
        let worker = self.worker(index);
        worker.ready.store(0, Relaxed);
        worker.stalled.store(0, Relaxed);
        worker.busy_since_ns.store(0, Relaxed);
        worker.cpu.store(NO_CPU, Relaxed);
        worker.pid.store(0, Release);
        self.counters(index)
    }

    pub(crate) fn counters(&self, index: usize) -> WorkerCounters {
        let worker = self.worker(index);
        WorkerCounters {
            accepted_own: worker.accepted_own.load(Relaxed),
            accepted_fallback: worker.accepted_fallback.load(Relaxed),
            accepted_stolen: worker.accepted_stolen.load(Relaxed),
            steered_local: worker.steered_local.load(Relaxed),
            steered_remote: worker.steered_remote.load(Relaxed),
        }
    }

    /// Says who lives on a CPU. The order is kept; those beyond [`HOME_MAX`] are found by the search over all.
    pub(crate) fn set_home(&self, cpu: usize, workers: &[u8]) {
        let state = self.state();
        let home = &state.homes[cpu % state.homes.len()];
        // A reader between the stores sees a list that was or will be true, or a worker twice: all are harmless.
        for (place, &worker) in home.worker.iter().zip(workers) {
            place.store(worker, Relaxed);
        }
        home.len.store(workers.len().min(HOME_MAX) as u8, Relaxed);
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
