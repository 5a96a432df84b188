//! The threads of a server: lanes for operations, and others for their syncs.

use std::sync::Arc;
use std::time::Instant;

use crate::account::Account;
use crate::lane::{Identities, Lane, LaneError};
use crate::layer::Fs;
use crate::owed::Owed;
use crate::pool::{Length, Pool, PoolOptions};
use crate::syncs::Syncs;

/// How many lanes there are.
#[derive(Clone, Debug)]
pub struct LaneOptions {
    /// Threads for operations, and as many for syncs; at least 1. More than CPUs, because they wait for disks. Default 16.
    pub threads: usize,
}

impl Default for LaneOptions {
    fn default() -> Self {
        Self { threads: 16 }
    }
}

/// Figures of the lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCounters {
    /// Jobs that wait for a lane now.
    pub queued_jobs: usize,
    /// Jobs that run on a lane now.
    pub running_jobs: usize,
    /// Jobs that were done but for their syncs, and writes beyond a share, which wait for a sync thread now.
    pub queued_syncs: usize,
    /// Bytes of the jobs that wait now.
    pub queued_bytes: usize,
    /// Lanes for operations that live now.
    pub lanes: usize,
    /// Jobs that ran on them.
    pub done: u64,
    /// Jobs that panicked, which ran, too.
    pub panicked: u64,
}

/// The lanes of a server, and the threads to which they leave syncs ([`Lane::settle`]). Dropping it drops the jobs that wait
/// and waits for those that run.
#[derive(Debug)]
pub struct Lanes {
    calls: Pool,
    /// After `calls`, which leave their syncs to it.
    sync_threads: Pool,
    syncs: Arc<Syncs>,
    /// Account of the server's own jobs.
    own: Account,
}

impl Lanes {
    /// Starts all threads. Jobs of different `exports` do not stop each other: each has a queue of its own, and at most half of
    /// the threads. Long jobs of an export leave a quarter of its threads, and at least one if it has two, to the short ones.
    ///
    /// # Errors
    ///
    /// [`LaneError`]: there is no thread to be had, or it cannot become a lane.
    pub fn start(options: &LaneOptions, exports: usize) -> Result<Self, LaneError> {
        let (threads, shares) = (options.threads, exports);
        let sync_threads = Pool::start(PoolOptions { name: "ksf-fs-sync", threads, shares, syncs: None })?;
        let syncs = Arc::new(Syncs::new(sync_threads.queue().clone()));
        let leave_to = Some(Arc::clone(&syncs));
        let calls = Pool::start(PoolOptions { name: "ksf-fs-lane", threads, shares, syncs: leave_to })?;
        Ok(Self { calls, sync_threads, syncs, own: Account::default() })
    }

    /// Puts a job of a connection into the queue of its export ([`Fs::share_of`]), in which the accounts of connections take turns.
    /// The queue has no bound: the giver has one for what it reads. `bytes` is the memory that the job keeps.
    ///
    /// A job that panics is counted, and its captured values are dropped. After [`Lanes::close`] jobs are dropped.
    pub fn submit_for(
        &self,
        account: &Account,
        export: usize,
        length: Length,
        bytes: usize,
        job: impl FnOnce(&mut Lane) + Send + 'static,
    ) {
        self.calls.queue().submit(account.clone(), export, length, bytes, job);
    }

    /// [`Self::submit_for`], for a job of the server itself.
    pub fn submit(&self, export: usize, length: Length, bytes: usize, job: impl FnOnce(&mut Lane) + Send + 'static) {
        self.submit_for(&self.own, export, length, bytes, job);
    }

    /// Makes syncs that nobody waits for: [`Fs::close_idle`].
    pub fn settle(&self, fs: &Arc<Fs>, owed: Owed) {
        self.syncs.submit_others(fs, &self.own, owed.own);
        self.syncs.submit_others(fs, &self.own, owed.others);
    }

    /// As whom operations run.
    pub fn identities(&self) -> Identities {
        self.calls.identities()
    }

    /// Figures until now.
    pub fn counters(&self) -> LaneCounters {
        let (calls, syncs) = (self.calls.queue().counters(), self.sync_threads.queue().counters());
        let (queued_syncs, synced_bytes) = self.syncs.count();
        LaneCounters {
            queued_jobs: calls.queued_jobs,
            running_jobs: calls.running_jobs,
            queued_syncs,
            queued_bytes: calls.queued_bytes + synced_bytes,
            lanes: calls.lanes,
            done: calls.done,
            panicked: calls.panicked + syncs.panicked,
        }
    }

    /// Takes no more jobs, drops those that wait for a lane, and waits until the others and their syncs are done or `deadline` is
    /// over. Returns how many still run; their threads end with them.
    pub fn close(&self, deadline: Instant) -> usize {
        let calls = self.calls.close(deadline);
        self.sync_threads.wait_until_idle(deadline);
        let syncs = self.sync_threads.close(deadline);
        self.syncs.clear();
        calls + syncs
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.calls.end();
        self.sync_threads.end();
        self.syncs.clear();
    }
}
