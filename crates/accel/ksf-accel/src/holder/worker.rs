//! Workers: who serves queues, where they are at home, and what is left when they end.

use std::time::Instant;

use ksf_accel_proto::state::WORKERS_MAX;

use super::Holder;
use crate::homes;

/// An epoll instance, or a thread that blocks in `accept()`.
pub(super) struct Worker {
    /// Its process. It ends with that.
    pub(super) pid: u32,
    pub(super) tid: u32,
    pub(super) cpu: Option<u32>,
    /// Unlike that of every other worker of this holder.
    pub(super) generation: u32,
    /// Listeners (a bit each) that it has joined.
    pub(super) joined: u64,
}

impl Holder {
    /// An index for a new worker, with its home. `preferred`: indexes whose queue should be served first.
    pub(super) fn new_worker(&mut self, conn: u64, tid: u32, bound: i32, preferred: &[usize]) -> Option<usize> {
        let (pid, same_pids) = self.conns.get(&conn).map(|conn| (conn.pid, conn.same_pids))?;
        let cpu = self.home(pid, same_pids.then_some(tid), bound);
        let is_free = |index: &usize| self.workers[*index].is_none();
        let index = preferred.iter().copied().find(is_free).or_else(|| (0..WORKERS_MAX).find(is_free))?;
        self.generations = self.generations.wrapping_add(1);
        let generation = self.generations;
        self.steering.shared.begin_worker(index, pid, cpu, generation);
        self.workers[index] = Some(Worker { pid, tid, cpu, generation, joined: 0 });
        if let Some(cpu) = cpu {
            self.homes.add(cpu, index as u8);
            self.steering.shared.set_home(cpu as usize, self.homes.on(cpu));
        }
        Some(index)
    }

    /// The worker is gone. Its queues stay: others take from them, and the next worker with this index inherits them.
    pub(super) fn free_worker(&mut self, index: usize) {
        let Some(worker) = self.workers[index].take() else { return };
        self.ended_workers.add(&self.steering.shared.end_worker(index));
        if let Some(cpu) = worker.cpu {
            self.homes.remove(cpu, index as u8);
            self.steering.shared.set_home(cpu as usize, self.homes.on(cpu));
        }
        // Is the listener still there, and does anything wait?
        let now = Instant::now();
        self.watch_next = now;
        self.look_timer.activity(now);
    }

    pub(super) fn process_ended(&mut self, pid: u32) {
        let Some(pidfd) = self.lifetime.ended(pid) else { return };
        let _ = rustix::event::epoll::delete(&self.epoll, &pidfd);
        let conns: Vec<u64> =
            self.conns.iter().filter(|(_, conn)| conn.known && conn.pid == pid).map(|(&number, _)| number).collect();
        // A connection can outlive its process in the hands of a child.
        for conn in conns {
            self.hang_up(conn);
        }
        self.free_workers_of(pid);
    }

    pub(super) fn free_workers_of(&mut self, pid: u32) {
        for worker in 0..self.workers.len() {
            if self.workers[worker].as_ref().is_some_and(|worker| worker.pid == pid) {
                self.free_worker(worker);
            }
        }
    }

    /// A thread that is bound to one CPU is at home there. Else it gets the emptiest of those it may run on.
    fn home(&self, pid: u32, tid: Option<u32>, bound: i32) -> Option<u32> {
        let id = rustix::thread::Pid::from_raw(tid.unwrap_or(pid) as i32)?;
        let affinity = homes::affinity(Some(id)).ok()?;
        match u32::try_from(bound) {
            Ok(cpu) if affinity.contains(&cpu) => Some(cpu),
            _ if affinity.len() == 1 => Some(affinity[0]),
            _ => self.homes.emptiest(&homes::allowed(self.options.cpus.as_deref(), &affinity)),
        }
    }
}
