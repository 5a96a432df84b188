//! Keys of any type: whether they are there, what they are called, and when they end.

use ksf_proto::resp::SPANS_MAX;
use ksf_store::cells::Shape;
use ksf_store::store::UpdateError;
use smallvec::SmallVec;

use super::pattern::Pattern;
use super::{Call, Failed, Result, SYNTAX};

/// The keys of a command that has nothing but keys behind its name, in the order of the index: for very many keys, which lie
/// anywhere, that halves the time in which all other clients wait.
fn keys_in_order<'a>(call: &Call<'_, 'a>) -> SmallVec<[&'a [u8]; SPANS_MAX]> {
    let mut keys = SmallVec::from_slice(&call.args[1..]);
    keys.sort_unstable();
    keys
}

pub(super) fn del(call: &mut Call<'_, '_>) -> Result {
    let keys = keys_in_order(call);
    let removed = call.update(&keys, |update| keys.iter().filter(|key| update.remove(key)).count())?;
    call.write().integer(removed as i64);
    Ok(())
}

pub(super) fn exists(call: &mut Call<'_, '_>) -> Result {
    let keys = keys_in_order(call);
    let there = call.read(&keys, |view| keys.iter().filter(|key| view.get(key).is_some()).count());
    call.write().integer(there as i64);
    Ok(())
}

pub(super) fn type_of(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let shape = call.read(&[key], |view| view.get(key).map(|got| got.shape));
    call.write().simple(shape.map_or("none", type_name));
    Ok(())
}

/// What Redis calls it.
pub(super) fn type_name(shape: Shape) -> &'static str {
    match shape {
        Shape::String => "string",
        Shape::Hash => "hash",
        Shape::Set => "set",
        Shape::List => "list",
        Shape::SortedSet => "zset",
    }
}

/// `RENAME` and `RENAMENX`; false if the new name is taken, and must not be.
fn renamed(call: &mut Call<'_, '_>, only_new: bool) -> Result<bool> {
    let (from, to) = (call.args[1], call.args[2]);
    let bytes_max = copied_bytes_max(call);
    call.update(&[from, to], |update| {
        if update.get(from).is_none() {
            return Err(Failed::from("ERR no such key"));
        }
        if only_new && update.get(to).is_some() {
            return Ok(false);
        }
        update.rename(from, to, bytes_max).map_err(UpdateError::from)?;
        Ok(true)
    })?
}

/// All that a command copies is one append to the log, so that it is there whole or not at all.
fn copied_bytes_max(call: &Call<'_, '_>) -> usize {
    call.shard.shard.log().geometry().append_bytes_max()
}

pub(super) fn rename(call: &mut Call<'_, '_>) -> Result {
    renamed(call, false)?;
    call.write().ok();
    Ok(())
}

pub(super) fn renamenx(call: &mut Call<'_, '_>) -> Result {
    let renamed = renamed(call, true)?;
    call.write().integer(i64::from(renamed));
    Ok(())
}

pub(super) fn copy(call: &mut Call<'_, '_>) -> Result {
    let (from, to) = (call.args[1], call.args[2]);
    let (mut replace, mut at) = (false, 3);
    while let Some(option) = call.args.get(at) {
        match &option.to_ascii_uppercase()[..] {
            b"REPLACE" => replace = true,
            b"DB" if at + 1 < call.args.len() => {
                at += 1;
                super::server::database(call, at)?;
            }
            _ => return Err(SYNTAX.into()),
        }
        at += 1;
    }
    if from == to {
        return Err("ERR source and destination objects are the same".into());
    }
    let bytes_max = copied_bytes_max(call);
    let copied = call.update(&[from, to], |update| {
        if !replace && update.get(to).is_some() {
            return Ok(false);
        }
        let copied = update.copy(from, to, bytes_max).map_err(UpdateError::from)?;
        Ok::<_, Failed>(copied)
    })??;
    call.write().integer(i64::from(copied));
    Ok(())
}

/// `FLUSHALL` and `FLUSHDB`, which are the same where there is one database. Their options tell when memory is given back: it is
/// in steps, with either.
pub(super) fn flush(call: &mut Call<'_, '_>) -> Result {
    match call.args[1..] {
        [] => {}
        [option] if option.eq_ignore_ascii_case(b"ASYNC") || option.eq_ignore_ascii_case(b"SYNC") => {}
        _ => return Err(SYNTAX.into()),
    }
    call.done.needs = call.shard.shard.flush(call.clock)?;
    call.write().ok();
    Ok(())
}

pub(super) fn randomkey(call: &mut Call<'_, '_>) -> Result {
    let (key, needs) = call.shard.shard.store().random_key(call.clock.now_ms, super::random);
    call.done.needs = needs;
    call.room().take(key.as_ref().map_or(0, Vec::len))?;
    call.bulk_or_null(key.as_deref());
    Ok(())
}

pub(super) fn keys(call: &mut Call<'_, '_>) -> Result {
    let pattern = Pattern::read(call.args[1])?;
    let mut found: Vec<Vec<u8>> = Vec::new();
    let mut room = call.room();
    let store = call.shard.shard.store();
    call.done.needs = store.scan(b"", call.clock.now_ms, |key, _| {
        let wanted = pattern.takes(key);
        let has_room = !wanted || room.takes(key.len());
        if wanted && has_room {
            found.push(key.to_vec());
        }
        has_room
    });
    room.check()?;
    let mut to = call.write();
    to.array(found.len());
    found.iter().for_each(|key| to.bulk(key));
    Ok(())
}

pub(super) fn ttl(call: &mut Call<'_, '_>) -> Result {
    time_left(call, 1000)
}

pub(super) fn pttl(call: &mut Call<'_, '_>) -> Result {
    time_left(call, 1)
}

fn time_left(call: &mut Call<'_, '_>, unit_ms: u64) -> Result {
    let (key, now_ms) = (call.args[1], call.clock.now_ms);
    let end = call.read(&[key], |view| view.get(key).map(|got| got.expires_ms));
    call.write().integer(match end {
        None => -2,
        Some(None) => -1,
        Some(Some(end)) => ((end.saturating_sub(now_ms) + unit_ms / 2) / unit_ms) as i64,
    });
    Ok(())
}

pub(super) fn expiretime(call: &mut Call<'_, '_>) -> Result {
    end_time(call, 1000)
}

pub(super) fn pexpiretime(call: &mut Call<'_, '_>) -> Result {
    end_time(call, 1)
}

fn end_time(call: &mut Call<'_, '_>, unit_ms: u64) -> Result {
    let key = call.args[1];
    let end = call.read(&[key], |view| view.get(key).map(|got| got.expires_ms));
    call.write().integer(match end {
        None => -2,
        Some(None) => -1,
        Some(Some(end)) => ((end + unit_ms / 2) / unit_ms) as i64,
    });
    Ok(())
}

pub(super) fn persist(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let changed = call.update(&[key], |update| {
        let changed = update.get(key).is_some_and(|got| got.expires_ms.is_some());
        if changed {
            update.expire(key, None);
        }
        changed
    })?;
    call.write().integer(i64::from(changed));
    Ok(())
}

pub(super) fn expire(call: &mut Call<'_, '_>) -> Result {
    let now_ms = call.clock.now_ms;
    end_at(call, 1000, now_ms, "expire")
}

pub(super) fn pexpire(call: &mut Call<'_, '_>) -> Result {
    let now_ms = call.clock.now_ms;
    end_at(call, 1, now_ms, "pexpire")
}

pub(super) fn expireat(call: &mut Call<'_, '_>) -> Result {
    end_at(call, 1000, 0, "expireat")
}

pub(super) fn pexpireat(call: &mut Call<'_, '_>) -> Result {
    end_at(call, 1, 0, "pexpireat")
}

/// Which end a key must have, so that it gets another one.
#[derive(Default)]
struct EndOptions {
    if_none: bool,
    if_any: bool,
    if_later: bool,
    if_sooner: bool,
}

impl EndOptions {
    fn read(args: &[&[u8]]) -> Result<Self> {
        let mut options = Self::default();
        for option in args {
            match &option.to_ascii_uppercase()[..] {
                b"NX" => options.if_none = true,
                b"XX" => options.if_any = true,
                b"GT" => options.if_later = true,
                b"LT" => options.if_sooner = true,
                _ => return Err(Failed::quoting("ERR Unsupported option ", option, "")),
            }
        }
        let Self { if_none, if_any, if_later, if_sooner } = options;
        if if_none && (if_any || if_later || if_sooner) {
            return Err("ERR NX and XX, GT or LT options at the same time are not compatible".into());
        }
        if if_later && if_sooner {
            return Err("ERR GT and LT options at the same time are not compatible".into());
        }
        Ok(options)
    }

    /// A key without an end ends later than any other.
    fn takes(&self, old: Option<u64>, new: u64) -> bool {
        let refused = self.if_none && old.is_some()
            || self.if_any && old.is_none()
            || self.if_later && old.is_none_or(|old| new <= old)
            || self.if_sooner && old.is_some_and(|old| new >= old);
        !refused
    }
}

fn end_at(call: &mut Call<'_, '_>, unit_ms: i64, base_ms: u64, name: &str) -> Result {
    let key = call.args[1];
    let wanted = EndOptions::read(&call.args[3..])?;
    let invalid = || Failed::from(format!("ERR invalid expire time in '{name}' command"));
    let end = call.integer(2)?.checked_mul(unit_ms).ok_or_else(invalid)?;
    let end = end.checked_add(i64::try_from(base_ms).map_err(|_| invalid())?).ok_or_else(invalid)?;
    // A time that is over takes the key away.
    let end = u64::try_from(end).unwrap_or(0);
    let over = end <= call.clock.now_ms;
    let changed = call.update(&[key], |update| {
        let Some(got) = update.get(key) else { return false };
        if !wanted.takes(got.expires_ms, end) {
            return false;
        }
        if over {
            return update.remove(key);
        }
        update.expire(key, Some(end));
        true
    })?;
    call.write().integer(i64::from(changed));
    Ok(())
}
