//! Strings.

use ksf_proto::resp::Writer;
use ksf_store::cells::Shape;
use ksf_store::store::Got;

use super::extended::{INFINITE, Number};
use super::{Call, Failed, NOT_A_FLOAT, NOT_AN_INTEGER, Result, Room, SYNTAX, integer, shaped};

/// Longest string: Redis' own limit.
pub(super) const STRING_BYTES_MAX: usize = 512 << 20;
pub(super) const TOO_LONG: &str = "ERR string exceeds maximum allowed size (proto-max-bulk-len)";

/// What a key has, which is no other thing than a string.
pub(super) fn string(got: Option<Got<'_>>) -> Result<Option<Got<'_>>> {
    shaped(got, Shape::String)
}

/// The value of a string, for the reply.
fn told(got: Option<Got<'_>>, room: &mut Room) -> Result<Option<Vec<u8>>> {
    let Some(got) = string(got)? else { return Ok(None) };
    room.take(got.value_bytes())?;
    Ok(Some(got.value().to_vec()))
}

/// Longest string of a command that names a place in it: what the log cannot take needs no memory.
pub(super) fn bytes_max(call: &Call<'_, '_>) -> usize {
    STRING_BYTES_MAX.min(call.shard.shard.log().geometry().append_bytes_max())
}

/// Writes a string to the reply, or null.
fn put_value(to: &mut Writer<'_>, string: Option<Got<'_>>, room: &mut Room) -> Result {
    match string {
        Some(got) => {
            room.take(got.value_bytes())?;
            to.bulk(got.value());
        }
        None => to.null(),
    }
    Ok(())
}

pub(super) fn get(call: &mut Call<'_, '_>) -> Result {
    let (key, mut room) = (call.args[1], call.room());
    let mut out = std::mem::take(call.out);
    let version = call.session.version;
    let written =
        call.read(&[key], |view| put_value(&mut Writer::new(&mut out, version), string(view.get(key))?, &mut room));
    *call.out = out;
    written
}

pub(super) fn mget(call: &mut Call<'_, '_>) -> Result {
    let (keys, mut room, version) = (&call.args[1..], call.room(), call.session.version);
    let mut out = std::mem::take(call.out);
    let mut to = Writer::new(&mut out, version);
    to.array(keys.len());
    let written = call.read(keys, |view| {
        keys.iter().try_for_each(|key| {
            let string = view.get(key).filter(|got| got.shape == Shape::String);
            put_value(&mut to, string, &mut room)
        })
    });
    *call.out = out;
    written
}

/// What `SET` may be told.
#[derive(Default)]
struct SetOptions {
    if_absent: bool,
    if_present: bool,
    get: bool,
    keep_ttl: bool,
    expires_ms: Option<u64>,
}

/// When a key ends that is given so many units of `unit_ms` from `base_ms` on.
fn end_of(amount: i64, unit_ms: i64, base_ms: u64, command: &str) -> Result<u64> {
    let invalid = || Failed::from(format!("ERR invalid expire time in '{command}' command"));
    let end = amount.checked_mul(unit_ms).filter(|_| amount > 0);
    let end = end.and_then(|ms| ms.checked_add(i64::try_from(base_ms).ok()?));
    end.and_then(|end| u64::try_from(end).ok()).ok_or_else(invalid)
}

/// The option that says when a key ends. It may come again, and counts the last time; another one beside it may not.
#[derive(Default)]
struct End {
    /// Its name in capitals, and where its argument is.
    given: Option<(Vec<u8>, usize)>,
}

impl End {
    fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Whether the option at a place is this one, with an argument behind it.
    fn takes(&mut self, option: &[u8], at: usize, count: usize) -> bool {
        let is_known = matches!(option, b"EX" | b"PX" | b"EXAT" | b"PXAT");
        let is_alike = self.given.as_ref().is_none_or(|(before, _)| before == option);
        let takes = is_known && is_alike && at + 1 < count;
        if takes {
            self.given = Some((option.to_vec(), at + 1));
        }
        takes
    }

    /// When the key ends, if that is said.
    fn read(&self, call: &Call<'_, '_>, command: &str) -> Result<Option<u64>> {
        let Some((option, at)) = &self.given else { return Ok(None) };
        let unit_ms = if option.starts_with(b"E") { 1000 } else { 1 };
        let base_ms = if option.ends_with(b"AT") { 0 } else { call.clock.now_ms };
        Ok(Some(end_of(call.integer(*at)?, unit_ms, base_ms, command)?))
    }
}

pub(super) fn set(call: &mut Call<'_, '_>) -> Result {
    let (mut options, mut end) = (SetOptions::default(), End::default());
    let mut at = 3;
    while let Some(option) = call.args.get(at) {
        let option = option.to_ascii_uppercase();
        match &option[..] {
            b"NX" if !options.if_present => options.if_absent = true,
            b"XX" if !options.if_absent => options.if_present = true,
            b"GET" => options.get = true,
            b"KEEPTTL" if !end.is_given() => options.keep_ttl = true,
            _ if !options.keep_ttl && end.takes(&option, at, call.args.len()) => at += 1,
            _ => return Err(SYNTAX.into()),
        }
        at += 1;
    }
    options.expires_ms = end.read(call, "set")?;
    let (key, value, mut room) = (call.args[1], call.args[2], call.room());
    let (was, before) = call.update(&[key], |update| {
        let got = update.get(key);
        let there = got.is_some();
        let kept = got.and_then(|got| got.expires_ms).filter(|_| options.keep_ttl);
        let before = if options.get { told(got, &mut room)? } else { None };
        let wanted = !(options.if_absent && there || options.if_present && !there);
        if wanted {
            update.set(key, value, options.expires_ms.or(kept));
        }
        Ok::<_, Failed>((wanted, before))
    })??;
    let get = options.get;
    let mut to = call.write();
    match before {
        Some(before) => to.bulk(&before),
        None if get || !was => to.null(),
        None => to.ok(),
    }
    Ok(())
}

pub(super) fn setnx(call: &mut Call<'_, '_>) -> Result {
    let (key, value) = (call.args[1], call.args[2]);
    let set = call.update(&[key], |update| {
        let absent = update.get(key).is_none();
        if absent {
            update.set(key, value, None);
        }
        absent
    })?;
    call.write().integer(i64::from(set));
    Ok(())
}

pub(super) fn setex(call: &mut Call<'_, '_>) -> Result {
    set_for(call, 1000, "setex")
}

pub(super) fn psetex(call: &mut Call<'_, '_>) -> Result {
    set_for(call, 1, "psetex")
}

fn set_for(call: &mut Call<'_, '_>, unit_ms: i64, name: &str) -> Result {
    let (key, value) = (call.args[1], call.args[3]);
    let end = end_of(call.integer(2)?, unit_ms, call.clock.now_ms, name)?;
    call.update(&[key], |update| update.set(key, value, Some(end)))?;
    call.write().ok();
    Ok(())
}

pub(super) fn getset(call: &mut Call<'_, '_>) -> Result {
    let (key, value, mut room) = (call.args[1], call.args[2], call.room());
    let before = call.update(&[key], |update| {
        let before = told(update.get(key), &mut room)?;
        update.set(key, value, None);
        Ok::<_, Failed>(before)
    })??;
    call.bulk_or_null(before.as_deref());
    Ok(())
}

pub(super) fn getdel(call: &mut Call<'_, '_>) -> Result {
    let (key, mut room) = (call.args[1], call.room());
    let before = call.update(&[key], |update| {
        let before = told(update.get(key), &mut room)?;
        update.remove(key);
        Ok::<_, Failed>(before)
    })??;
    call.bulk_or_null(before.as_deref());
    Ok(())
}

pub(super) fn getex(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let (mut given, mut persists, mut at) = (End::default(), false, 2);
    while let Some(option) = call.args.get(at) {
        let option = option.to_ascii_uppercase();
        if option == b"PERSIST" && !given.is_given() {
            persists = true;
        } else if !persists && given.takes(&option, at, call.args.len()) {
            at += 1;
        } else {
            return Err(SYNTAX.into());
        }
        at += 1;
    }
    // What becomes of the end of the key: `None` leaves it as it is.
    let end = if persists { Ok(Some(None)) } else { given.read(call, "getex").map(|end| end.map(Some)) };
    let (now_ms, mut room) = (call.clock.now_ms, call.room());
    let value = call.update(&[key], |update| {
        let Some(got) = string(update.get(key))? else { return Ok::<_, Failed>(None) };
        // Redis does not look at the time if the key is not there, or has another type.
        let end = end?;
        room.take(got.value_bytes())?;
        let (value, before) = (got.value().to_vec(), got.expires_ms);
        match end {
            // A time that is over takes the key away.
            Some(Some(end)) if end <= now_ms => drop(update.remove(key)),
            // Also the end that it has: as in Redis, those that watch the key see a write.
            Some(end) if end.is_some() || before.is_some() => update.set(key, value.clone(), end),
            _ => {}
        }
        Ok(Some(value))
    })??;
    call.bulk_or_null(value.as_deref());
    Ok(())
}

pub(super) fn getrange(call: &mut Call<'_, '_>) -> Result {
    let (key, start, end) = (call.args[1], call.integer(2)?, call.integer(3)?);
    let mut room = call.room();
    let part = call.read(&[key], |view| {
        let value = string(view.get(key))?.map_or(&[][..], |got| got.value());
        let length = value.len() as i64;
        let from_end = |place: i64| if place < 0 { place.saturating_add(length) } else { place };
        // Both from the end, and the wrong way round: nothing.
        if start < 0 && end < 0 && start > end {
            return Ok::<_, Failed>(Vec::new());
        }
        let (start, end) = (from_end(start).max(0), from_end(end).max(0).min(length - 1));
        let part = if start > end { &[][..] } else { &value[start as usize..=end as usize] };
        room.take(part.len())?;
        Ok(part.to_vec())
    })?;
    call.write().bulk(&part);
    Ok(())
}

pub(super) fn setrange(call: &mut Call<'_, '_>) -> Result {
    let (key, offset, part) = (call.args[1], call.integer(2)?, call.args[3]);
    let offset = usize::try_from(offset).map_err(|_| "ERR offset is out of range")?;
    let bytes_max = bytes_max(call);
    let length = call.update(&[key], |update| {
        let (mut value, expires_ms) =
            string(update.get(key))?.map_or((Vec::new(), None), |got| (got.value().to_vec(), got.expires_ms));
        if part.is_empty() {
            return Ok::<_, Failed>(value.len());
        }
        let end = offset.checked_add(part.len()).filter(|end| *end <= bytes_max).ok_or(TOO_LONG)?;
        value.resize(value.len().max(end), 0);
        value[offset..end].copy_from_slice(part);
        let length = value.len();
        update.set(key, value, expires_ms);
        Ok(length)
    })??;
    call.write().integer(length as i64);
    Ok(())
}

/// The pairs of `MSET` in the order of the index, which takes half the time if they are very many. Of pairs with the same key the last
/// one counts, so these keep their order.
fn pairs<'a>(call: &Call<'_, 'a>) -> Result<Vec<(&'a [u8], &'a [u8])>> {
    let (pairs, rest) = call.args[1..].as_chunks::<2>();
    let name = String::from_utf8_lossy(call.args[0]).to_ascii_lowercase();
    if !rest.is_empty() {
        return Err(Failed::from(format!("ERR wrong number of arguments for '{name}' command")));
    }
    let mut pairs: Vec<(&[u8], &[u8])> = pairs.iter().map(|[key, value]| (*key, *value)).collect();
    pairs.sort_by_key(|(key, _)| *key);
    Ok(pairs)
}

pub(super) fn mset(call: &mut Call<'_, '_>) -> Result {
    let pairs = pairs(call)?;
    let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
    call.update(&keys, |update| pairs.iter().for_each(|(key, value)| update.set(key, *value, None)))?;
    call.write().ok();
    Ok(())
}

pub(super) fn msetnx(call: &mut Call<'_, '_>) -> Result {
    let pairs = pairs(call)?;
    let keys: Vec<&[u8]> = pairs.iter().map(|(key, _)| *key).collect();
    let set = call.update(&keys, |update| {
        let absent = keys.iter().all(|key| update.get(key).is_none());
        if absent {
            pairs.iter().for_each(|(key, value)| update.set(key, *value, None));
        }
        absent
    })?;
    call.write().integer(i64::from(set));
    Ok(())
}

pub(super) fn append(call: &mut Call<'_, '_>) -> Result {
    let (key, tail) = (call.args[1], call.args[2]);
    let length = call.update(&[key], |update| {
        let (mut value, expires_ms) =
            string(update.get(key))?.map_or((Vec::new(), None), |got| (got.value().to_vec(), got.expires_ms));
        if value.len() + tail.len() > STRING_BYTES_MAX {
            return Err(Failed::from(TOO_LONG));
        }
        value.extend_from_slice(tail);
        let length = value.len();
        update.set(key, value, expires_ms);
        Ok(length)
    })??;
    call.write().integer(length as i64);
    Ok(())
}

pub(super) fn strlen(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let length = call.read(&[key], |view| string(view.get(key)).map(|got| got.map_or(0, |got| got.value_bytes())))?;
    call.write().integer(length as i64);
    Ok(())
}

pub(super) fn incr(call: &mut Call<'_, '_>) -> Result {
    add(call, 1)
}

pub(super) fn decr(call: &mut Call<'_, '_>) -> Result {
    add(call, -1)
}

pub(super) fn incrby(call: &mut Call<'_, '_>) -> Result {
    let by = call.integer(2)?;
    add(call, by)
}

pub(super) fn decrby(call: &mut Call<'_, '_>) -> Result {
    let by = call.integer(2)?.checked_neg().ok_or("ERR decrement would overflow")?;
    add(call, by)
}

fn add(call: &mut Call<'_, '_>, by: i64) -> Result {
    let key = call.args[1];
    let sum = call.update(&[key], |update| {
        let (value, expires_ms) = match string(update.get(key))? {
            Some(got) => (integer(got.value()).ok_or(NOT_AN_INTEGER)?, got.expires_ms),
            None => (0, None),
        };
        let sum = value.checked_add(by).ok_or("ERR increment or decrement would overflow")?;
        update.set(key, sum.to_string().into_bytes(), expires_ms);
        Ok::<_, Failed>(sum)
    })??;
    call.write().integer(sum);
    Ok(())
}

pub(super) fn incrbyfloat(call: &mut Call<'_, '_>) -> Result {
    let (key, by) = (call.args[1], call.args[2]);
    let sum = call.update(&[key], |update| {
        let (value, expires_ms) = match string(update.get(key))? {
            Some(got) => (Number::read(got.value()).ok_or(NOT_A_FLOAT)?, got.expires_ms),
            None => (Number::ZERO, None),
        };
        let by = Number::read(by).ok_or(NOT_A_FLOAT)?;
        let sum = value.plus(by).ok_or(INFINITE)?.to_string().into_bytes();
        update.set(key, sum.clone(), expires_ms);
        Ok::<_, Failed>(sum)
    })??;
    call.write().bulk(&sum);
    Ok(())
}
