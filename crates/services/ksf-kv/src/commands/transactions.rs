//! Transactions (`MULTI`, `EXEC`, `WATCH`): atomic to other clients and on the medium.
//!
//! `EXEC` locks the leaves of all keys. Each command sees the changes of those before it. All changes together are one append
//! to the log.

use std::sync::Arc;

use ksf_proto::resp::Writer;
use ksf_store::watch::Seen;
use ksf_store::work;

use super::table::Asked;
use super::{Call, Done, Failed, Result, Session, run};

/// Overhead in bytes of a queued command, and of each of its arguments.
const EACH_BYTES: usize = 64;
/// Overhead in bytes of a watched key, which the store registers if it is missing.
const WATCHED_BYTES: usize = 192;
/// [Work](ksf_store::work) above which `EXEC` begins no further command: some 50 ms, in which all other connections of the shard
/// wait.
const EXEC_WORK_MAX: u64 = 1 << 20;

/// State of a connection's transaction.
#[derive(Debug, Default)]
pub(crate) struct Transaction {
    /// The commands since `MULTI`, each with its arguments.
    queue: Option<Vec<Vec<Vec<u8>>>>,
    /// A command was refused: `EXEC` will fail.
    refused: bool,
    /// Watched keys, with their state at `WATCH`.
    watched: Vec<Seen>,
    bytes: usize,
}

impl Transaction {
    /// True between `MULTI` and `EXEC`.
    pub(crate) fn is_open(&self) -> bool {
        self.queue.is_some()
    }

    /// Commands queued for `EXEC`, each with its arguments; `None` without `MULTI`.
    pub(crate) fn queued(&self) -> Option<&[Vec<Vec<u8>>]> {
        self.queue.as_deref()
    }

    /// Makes `EXEC` fail, because a command was refused.
    pub(crate) fn refuse(&mut self) {
        self.refused |= self.is_open();
    }

    /// Memory of queued commands and watched keys.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.bytes
    }

    /// Counts the memory of these words, each with an overhead. Fails if it exceeds `room_bytes`, what the connection may keep in
    /// addition.
    fn take_bytes(&mut self, words: &[&[u8]], each_bytes: usize, room_bytes: usize) -> Result {
        let more = EACH_BYTES + words.iter().map(|word| word.len() + each_bytes).sum::<usize>();
        if more > room_bytes {
            return Err("OOM no room for more of a transaction or for more watched keys".into());
        }
        self.bytes += more;
        Ok(())
    }
}

const TOO_MUCH_WORK: &str = "EXECABORT Transaction discarded because it has too much work for one turn: divide it";

/// Commands that visit all keys.
const OF_ALL_KEYS: [&str; 13] = [
    "bgsave",
    "cluster|countkeysinslot",
    "cluster|getkeysinslot",
    "flushall",
    "flushdb",
    "info",
    "keys",
    "ksf.backup",
    "ksf.keys",
    "lastsave",
    "randomkey",
    "save",
    "scan",
];

/// Queues a command for `EXEC`, unless that will fail.
pub(super) fn queue(call: &mut Call<'_, '_>, name: &str) -> Result {
    if OF_ALL_KEYS.contains(&name) {
        // The transaction holds locks on some of them.
        return Err("ERR Command not allowed inside a transaction".into());
    }
    let room_bytes = call.session.room_bytes;
    let transaction = &mut call.session.transaction;
    if transaction.refused {
        call.write().simple("QUEUED");
        return Ok(());
    }
    transaction.take_bytes(call.args, EACH_BYTES, room_bytes)?;
    if let Some(queue) = &mut transaction.queue {
        queue.push(call.args.iter().map(|word| word.to_vec()).collect());
    }
    call.write().simple("QUEUED");
    Ok(())
}

pub(super) fn multi(call: &mut Call<'_, '_>) -> Result {
    let transaction = &mut call.session.transaction;
    if transaction.is_open() {
        return Err("ERR MULTI calls can not be nested".into());
    }
    transaction.queue = Some(Vec::new());
    call.write().ok();
    Ok(())
}

pub(super) fn discard(call: &mut Call<'_, '_>) -> Result {
    if !call.session.transaction.is_open() {
        return Err("ERR DISCARD without MULTI".into());
    }
    call.session.transaction = Transaction::default();
    call.write().ok();
    Ok(())
}

pub(super) fn watch(call: &mut Call<'_, '_>) -> Result {
    if call.session.transaction.is_open() {
        return Err("ERR WATCH inside MULTI is not allowed".into());
    }
    let keys = &call.args[1..];
    let room_bytes = call.session.room_bytes;
    call.session.transaction.take_bytes(keys, WATCHED_BYTES, room_bytes)?;
    let (seen, needs) = call.shard.shard.watch(keys, call.clock);
    call.done.needs = needs;
    call.session.transaction.watched.extend(seen);
    call.write().ok();
    Ok(())
}

pub(super) fn unwatch(call: &mut Call<'_, '_>) -> Result {
    // Within `EXEC` the watched keys were checked already.
    if call.tx.is_none() {
        call.session.transaction = Transaction::default();
    }
    call.write().ok();
    Ok(())
}

pub(super) fn exec(call: &mut Call<'_, '_>) -> Result {
    if !call.session.transaction.is_open() {
        return Err("ERR EXEC without MULTI".into());
    }
    let Transaction { queue, refused, watched, bytes } = std::mem::take(&mut call.session.transaction);
    if refused {
        return Err("EXECABORT Transaction discarded because of previous errors.".into());
    }
    let queue = queue.unwrap_or_default();
    let commands: Vec<Vec<&[u8]>> = queue.iter().map(|words| words.iter().map(|word| &word[..]).collect()).collect();
    let mut keys: Vec<&[u8]> = watched.iter().map(Seen::key).collect();
    for args in &commands {
        keys.extend(Asked::of(args).into_iter().flat_map(|asked| asked.keys(args)));
    }
    let store = Arc::clone(call.shard.shard.store());
    let (shard, session, clock) = (&mut *call.shard, &mut *call.session, call.clock);
    let (version, standing, replies) = (session.version, session.standing, session.replies);
    let mut out = std::mem::take(call.out);
    let values = shard.shard.values();
    let done = store.update(values, &keys, clock, |mut update| {
        if watched.iter().any(|seen| update.view().has_changed(seen)) {
            Writer::new(&mut out, version).null_array();
            return Ok(shard.shard.commit(update, clock).map(|needs| (needs, false))?);
        }
        Writer::new(&mut out, version).array(commands.len());
        let mut one = Call {
            shard,
            session,
            clock,
            args: &[],
            out: &mut out,
            done: Done::default(),
            tx: Some(update),
            purpose: None,
        };
        let worked_before = work::done();
        for args in &commands {
            if work::done() - worked_before > EXEC_WORK_MAX {
                // The changes to the store are dropped with the update, those to the session are undone here.
                let Session { version: is, standing: stands, replies: answers, .. } = &mut *one.session;
                (*is, *stands, *answers) = (version, standing, replies);
                return Err(Failed::from(TOO_MUCH_WORK));
            }
            work::add(1);
            one.args = args;
            run(&mut one);
        }
        let Call { shard, tx, done: Done { needs, close, .. }, .. } = one;
        let committed = tx.map_or(Ok(needs), |update| shard.shard.commit(update, clock));
        Ok(committed.map(|needs| (needs, close))?)
    });
    *call.out = out;
    if call.shard.shard.is_undone() {
        // The command is executed again later.
        call.session.transaction = Transaction { queue: Some(queue), refused, watched, bytes };
    }
    let (needs, close) = done?;
    call.done = Done { needs, close, ..Done::default() };
    Ok(())
}
