//! The table of connections that is shared with the programs, and who owns which entry.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;

use crate::abi::ConnState;
use crate::sys::{Map, Mapping};

/// The mapped array, with its free entries.
#[derive(Debug)]
pub(crate) struct ConnTable {
    memory: Mapping,
    entries: Mutex<Entries>,
    /// Held by who frees entries.
    reclaiming: Mutex<()>,
}

#[derive(Debug)]
struct Entries {
    free: Vec<u32>,
    /// Given back, but a program that started before may still hold the address: not free before a grace period.
    resting: Vec<u32>,
}

/// `settled` of a connection that the programs leave alone: no count of bytes reaches it.
pub(crate) const NEVER: u64 = u64::MAX;

/// Messages of a connection before its first trial.
pub(crate) const TRIAL_FIRST: u32 = 256;

impl ConnTable {
    pub(crate) fn new(map: &Map) -> io::Result<Self> {
        let memory = Mapping::new(map.as_fd(), 0, map.entries() as usize * size_of::<ConnState>(), true)?;
        // Taken from the end: low indices first keeps the used part of the table dense.
        let free = (0..map.entries()).rev().collect();
        Ok(Self { memory, entries: Mutex::new(Entries { free, resting: Vec::new() }), reclaiming: Mutex::new(()) })
    }

    /// A fresh entry for the socket with this cookie; `None` when all are taken. `wait_for_programs` returns after
    /// every verdict program that is running now has ended.
    pub(crate) fn take(&self, cookie: u64, wait_for_programs: impl FnOnce() -> io::Result<()>) -> Option<u32> {
        let index = self.pop().or_else(|| self.reclaim(wait_for_programs))?;
        self.at(index).start(cookie);
        Some(index)
    }

    fn pop(&self) -> Option<u32> {
        self.entries.lock().expect("no panic while it is held").free.pop()
    }

    /// Frees what rests. A grace period takes milliseconds, in which entries can be given back by others.
    fn reclaim(&self, wait_for_programs: impl FnOnce() -> io::Result<()>) -> Option<u32> {
        let _turn = self.reclaiming.lock().expect("no panic while it is held");
        // Another one had a turn, maybe.
        if let Some(index) = self.pop() {
            return Some(index);
        }
        let rested = std::mem::take(&mut self.entries.lock().expect("no panic while it is held").resting);
        let waited = !rested.is_empty() && wait_for_programs().is_ok();
        let mut entries = self.entries.lock().expect("no panic while it is held");
        if waited { &mut entries.free } else { &mut entries.resting }.extend(rested);
        entries.free.pop()
    }

    /// Gives an entry back. The socket must have left the programs' maps.
    pub(crate) fn give(&self, index: u32) {
        self.at(index).settled.store(NEVER, Relaxed);
        self.entries.lock().expect("no panic while it is held").resting.push(index);
    }

    pub(crate) fn at(&self, index: u32) -> &ConnState {
        let at: NonNull<ConnState> = self.memory.at(index as usize * size_of::<ConnState>());
        // SAFETY: the address lies in the mapping, which lives as long as `self`, and is aligned (checked by `at`).
        // ConnState is all atomics, so the kernel may write it at any time; zeroed memory is a valid value.
        unsafe { at.as_ref() }
    }
}

impl ConnState {
    /// Makes the entry one of a new connection. No program knows it yet.
    fn start(&self, cookie: u64) {
        for counter in [&self.passed, &self.taken, &self.replied] {
            counter.store(0, Relaxed);
        }
        for field in [
            &self.messages,
            &self.lag,
            &self.base_seq,
            &self.epoch_seen,
            &self.woken,
            &self.broken,
            &self.next_seq,
            &self.hopping,
            &self.hop_end,
        ] {
            field.store(0, Relaxed);
        }
        for field in [&self.parked, &self.park_seq, &self.lag_floor, &self.shard] {
            field.store(0, Relaxed);
        }
        self.trial_at.store(TRIAL_FIRST, Relaxed);
        self.settled.store(NEVER, Relaxed);
        self.cookie.store(cookie, Relaxed);
        self.sent.store(0, Relaxed);
        self.epoch.store(0, Relaxed);
        fence(SeqCst);
    }
}
