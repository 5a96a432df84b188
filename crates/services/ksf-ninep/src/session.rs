//! A connection: its session, fids and tags. Sans-IO, and used by one thread at a time.

use std::collections::HashMap;

use ksf::deferred::Deferred;
use ksf_fs::{OpenFile, Sender, WarmShare};

use crate::fids::{Change, Fids};

/// Tflushes that wait for a request, with their tags.
type Waiting = Vec<(u16, Deferred)>;

/// The state of a connection.
#[derive(Debug)]
pub struct Session {
    pub(crate) sender: Sender,
    /// Greatest message, both ways; 0: there was no Tversion that was understood.
    pub(crate) msize: u32,
    pub(crate) fids: Fids,
    /// What it has had done on the shard.
    pub(crate) share: WarmShare,
    /// Counts the sessions of the connection: what began in an earlier one is not answered any more.
    number: u64,
    /// Requests that are under way.
    tags: HashMap<u16, Waiting>,
}

impl Session {
    pub(crate) fn new(sender: Sender, fids_max: usize) -> Self {
        Self {
            sender,
            msize: 0,
            fids: Fids::new(fids_max),
            share: WarmShare::default(),
            number: 0,
            tags: HashMap::new(),
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

    /// Begins another session. What was under way is not answered; returns what is to be closed.
    pub(crate) fn restart(&mut self, msize: u32) -> Vec<OpenFile> {
        self.msize = msize;
        self.number += 1;
        for (_, way) in std::mem::take(&mut self.tags).into_values().flatten() {
            way.no_reply();
        }
        self.fids.clear()
    }

    /// True while a request of this tag is not answered.
    pub(crate) fn is_outstanding(&self, tag: u16) -> bool {
        self.tags.contains_key(&tag)
    }

    /// A request will be answered later.
    pub(crate) fn begin(&mut self, tag: u16) {
        self.tags.insert(tag, Vec::new());
    }

    /// A Tflush will be answered after the request of `oldtag`, which is under way. False: it is not.
    pub(crate) fn wait_for(&mut self, oldtag: u16, tag: u16, defer: impl FnOnce() -> Deferred) -> bool {
        let Some(waiting) = self.tags.get_mut(&oldtag) else { return false };
        waiting.push((tag, defer()));
        self.begin(tag);
        true
    }

    /// The request of `tag` was answered. Returns the Tflushes that waited for it, and those that waited for these, in the order in
    /// which they are to be answered.
    pub(crate) fn end(&mut self, tag: u16) -> Waiting {
        let mut ended = self.tags.remove(&tag).unwrap_or_default();
        let mut at = 0;
        while let Some((flush, _)) = ended.get(at) {
            let more = self.tags.remove(flush).unwrap_or_default();
            ended.extend(more);
            at += 1;
        }
        ended
    }

    /// Does what a request that ended has found. Returns what is to be closed.
    pub(crate) fn apply(&mut self, change: Option<Change>) -> Option<OpenFile> {
        change.and_then(|change| self.fids.apply(change))
    }
}
