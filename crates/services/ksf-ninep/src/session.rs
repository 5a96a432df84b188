//! A connection: its session, fids and tags. Sans-IO, and used by one thread at a time.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use ksf::deferred::Deferred;
use ksf::pool::Chunk;
use ksf_fs::{Account, Sender, WarmShare};

use crate::fids::Fids;

/// A request in progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) kind: u8,
    pub(crate) tag: u16,
    /// Number of its session.
    pub(crate) session: u64,
    pub(crate) started: Instant,
}

/// A request that waits for others of its fid.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) asked: Asked,
    pub(crate) message: Chunk,
}

/// Tflushes that wait for a request, with their tags.
type Waiting = Vec<(u16, Deferred)>;

/// A request that is not answered.
#[derive(Debug, Default)]
struct Outstanding {
    /// The fid that it changes.
    changes: Option<u32>,
    flushes: Waiting,
}

/// Requests that change one fid.
#[derive(Debug)]
struct Changes {
    /// Tag of the one in progress.
    tag: u16,
    waiting: VecDeque<(Held, Deferred)>,
}

/// The state of a connection.
#[derive(Debug)]
pub struct Session {
    pub(crate) sender: Sender,
    /// Greatest message, both ways; 0: there was no Tversion that was understood.
    pub(crate) msize: u32,
    pub(crate) fids: Fids,
    /// Its turn on the lanes.
    pub(crate) account: Account,
    /// What it has had done on the shard.
    pub(crate) share: WarmShare,
    /// Counts the sessions of the connection: what began in an earlier one is not answered any more.
    number: u64,
    /// Requests that are under way.
    tags: HashMap<u16, Outstanding>,
    /// By fid: a result must not replace a later one.
    changes: HashMap<u32, Changes>,
}

impl Session {
    pub(crate) fn new(sender: Sender, fids_max: usize) -> Self {
        Self {
            sender,
            msize: 0,
            fids: Fids::new(fids_max),
            account: Account::default(),
            share: WarmShare::default(),
            number: 0,
            tags: HashMap::new(),
            changes: HashMap::new(),
        }
    }

    /// The session that a request belongs to.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Memory that it takes because of its client.
    pub(crate) fn bytes(&self) -> usize {
        self.fids.bytes()
    }

    /// Begins another session. What was under way is not answered.
    pub(crate) fn restart(&mut self, msize: u32) {
        self.msize = msize;
        self.number += 1;
        let flushes = std::mem::take(&mut self.tags).into_values().flat_map(|outstanding| outstanding.flushes);
        let changes = std::mem::take(&mut self.changes).into_values().flat_map(|changes| changes.waiting);
        flushes.map(|(_, way)| way).chain(changes.map(|(_, way)| way)).for_each(Deferred::no_reply);
        self.fids.clear();
    }

    /// True while a request of this tag is not answered.
    pub(crate) fn is_outstanding(&self, tag: u16) -> bool {
        self.tags.contains_key(&tag)
    }

    /// A request will be answered later. `changes`: the fid that it changes when it ends.
    pub(crate) fn begin(&mut self, tag: u16, changes: Option<u32>) {
        self.tags.entry(tag).or_default().changes = changes;
        if let Some(fid) = changes {
            self.changes.entry(fid).or_insert_with(|| Changes { tag, waiting: VecDeque::new() });
        }
    }

    /// A Tflush will be answered after the request of `oldtag`, which is under way. False: it is not.
    pub(crate) fn wait_for(&mut self, oldtag: u16, tag: u16, defer: impl FnOnce() -> Deferred) -> bool {
        let Some(outstanding) = self.tags.get_mut(&oldtag) else { return false };
        outstanding.flushes.push((tag, defer()));
        self.begin(tag, None);
        true
    }

    /// A request that changes a fid waits for those before it. False: it may begin.
    pub(crate) fn hold(&mut self, fid: u32, tag: u16, held: impl FnOnce() -> (Held, Deferred)) -> bool {
        let Some(changes) = self.changes.get_mut(&fid).filter(|changes| changes.tag != tag) else { return false };
        changes.waiting.push_back(held());
        self.begin(tag, None);
        true
    }

    /// The request of `tag` does not change the fid any more: the next one begins.
    pub(crate) fn changed(&mut self, fid: u32, tag: u16) {
        let Some(changes) = self.changes.get_mut(&fid).filter(|changes| changes.tag == tag) else { return };
        match changes.waiting.pop_front() {
            Some((held, way)) => {
                changes.tag = held.asked.tag;
                way.resume(held);
            }
            None => drop(self.changes.remove(&fid)),
        }
    }

    /// The request of `tag` was answered. Returns the Tflushes that waited for it, and those that waited for these, in the order in
    /// which they are to be answered.
    pub(crate) fn end(&mut self, tag: u16) -> Waiting {
        let Outstanding { changes, flushes: mut ended } = self.tags.remove(&tag).unwrap_or_default();
        if let Some(fid) = changes {
            self.changed(fid, tag);
        }
        let mut at = 0;
        while let Some((flush, _)) = ended.get(at) {
            let more = self.tags.remove(flush).unwrap_or_default();
            ended.extend(more.flushes);
            at += 1;
        }
        ended
    }
}
