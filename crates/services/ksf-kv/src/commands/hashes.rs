//! Hashes.

use ksf_proto::resp::Version;
use ksf_store::cells::Shape;
use ksf_store::update::View;

use super::extended::{INFINITE, Number};
use super::{Call, Failed, NOT_A_FLOAT, Result, SYNTAX, integer, shaped};

/// Whether a key is a hash: false if it is not there.
fn is_there(view: &mut View<'_, '_>, key: &[u8]) -> Result<bool> {
    Ok(shaped(view.get(key), Shape::Hash)?.is_some())
}

/// `HSET` and `HMSET`.
pub(super) fn hset(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let name = String::from_utf8_lossy(call.args[0]).to_ascii_lowercase();
    let (pairs, rest) = call.args[2..].as_chunks::<2>();
    if !rest.is_empty() {
        return Err(Failed::from(format!("ERR wrong number of arguments for '{name}' command")));
    }
    let added = call.update(&[key], |update| {
        is_there(update.view(), key)?;
        Ok::<_, Failed>(pairs.iter().filter(|[field, value]| update.set_cell(key, Shape::Hash, field, value)).count())
    })??;
    if name == "hmset" {
        call.write().ok()
    } else {
        call.write().integer(added as i64)
    }
    Ok(())
}

pub(super) fn hsetnx(call: &mut Call<'_, '_>) -> Result {
    let (key, field, value) = (call.args[1], call.args[2], call.args[3]);
    let set = call.update(&[key], |update| {
        is_there(update.view(), key)?;
        let absent = update.cell(key, field).is_none();
        Ok::<_, Failed>(absent && update.set_cell(key, Shape::Hash, field, value))
    })??;
    call.write().integer(i64::from(set));
    Ok(())
}

/// The value of the field that is the second argument.
fn field(call: &mut Call<'_, '_>) -> Result<Option<Vec<u8>>> {
    let (key, field) = (call.args[1], call.args[2]);
    call.read(&[key], |view| Ok(if is_there(view, key)? { view.cell(key, field) } else { None }))
}

pub(super) fn hget(call: &mut Call<'_, '_>) -> Result {
    let value = field(call)?;
    call.room().take(value.as_ref().map_or(0, Vec::len))?;
    call.bulk_or_null(value.as_deref());
    Ok(())
}

pub(super) fn hexists(call: &mut Call<'_, '_>) -> Result {
    let there = field(call)?.is_some();
    call.write().integer(i64::from(there));
    Ok(())
}

pub(super) fn hstrlen(call: &mut Call<'_, '_>) -> Result {
    let length = field(call)?.map_or(0, |value| value.len());
    call.write().integer(length as i64);
    Ok(())
}

pub(super) fn hmget(call: &mut Call<'_, '_>) -> Result {
    let (key, fields, mut room) = (call.args[1], &call.args[2..], call.room());
    let values = call.read(&[key], |view| {
        is_there(view, key)?;
        let value = |field: &&[u8]| {
            let value = view.cell(key, field);
            room.take(value.as_ref().map_or(0, Vec::len))?;
            Ok::<_, Failed>(value)
        };
        fields.iter().map(value).collect::<Result<Vec<_>>>()
    })?;
    let mut to = call.write();
    to.array(values.len());
    values.iter().for_each(|value| to.bulk_or_null(value.as_deref()));
    Ok(())
}

pub(super) fn hdel(call: &mut Call<'_, '_>) -> Result {
    call.remove_cells(Shape::Hash)
}

pub(super) fn hlen(call: &mut Call<'_, '_>) -> Result {
    call.count_cells(Shape::Hash)
}

pub(super) fn hgetall(call: &mut Call<'_, '_>) -> Result {
    let pairs = call.cells(Shape::Hash, |room, field, value| {
        (room.takes(field.len()) && room.takes(value.len())).then(|| (field.to_vec(), value.to_vec()))
    })?;
    let mut to = call.write();
    to.map(pairs.len());
    for (field, value) in &pairs {
        to.bulk(field);
        to.bulk(value);
    }
    Ok(())
}

pub(super) fn hkeys(call: &mut Call<'_, '_>) -> Result {
    let fields = call.cells(Shape::Hash, |room, field, _| room.takes(field.len()).then(|| field.to_vec()))?;
    let mut to = call.write();
    to.array(fields.len());
    fields.iter().for_each(|field| to.bulk(field));
    Ok(())
}

pub(super) fn hvals(call: &mut Call<'_, '_>) -> Result {
    let values = call.cells(Shape::Hash, |room, _, value| room.takes(value.len()).then(|| value.to_vec()))?;
    let mut to = call.write();
    to.array(values.len());
    values.iter().for_each(|value| to.bulk(value));
    Ok(())
}

pub(super) fn hincrby(call: &mut Call<'_, '_>) -> Result {
    let (key, field, by) = (call.args[1], call.args[2], call.integer(3)?);
    let sum = call.update(&[key], |update| {
        is_there(update.view(), key)?;
        let value = update.cell(key, field);
        let value = value.map_or(Some(0), |value| integer(&value)).ok_or("ERR hash value is not an integer")?;
        let sum = value.checked_add(by).ok_or("ERR increment or decrement would overflow")?;
        update.set_cell(key, Shape::Hash, field, sum.to_string().as_bytes());
        Ok::<_, Failed>(sum)
    })??;
    call.write().integer(sum);
    Ok(())
}

pub(super) fn hincrbyfloat(call: &mut Call<'_, '_>) -> Result {
    let (key, field, by) = (call.args[1], call.args[2], Number::read(call.args[3]).ok_or(NOT_A_FLOAT)?);
    if by == Number::Infinite {
        return Err("ERR value is NaN or Infinity".into());
    }
    let sum = call.update(&[key], |update| {
        is_there(update.view(), key)?;
        let value = update.cell(key, field);
        let value =
            value.map_or(Some(Number::ZERO), |value| Number::read(&value)).ok_or("ERR hash value is not a float")?;
        let sum = value.plus(by).ok_or(INFINITE)?.to_string().into_bytes();
        update.set_cell(key, Shape::Hash, field, &sum);
        Ok::<_, Failed>(sum)
    })??;
    call.write().bulk(&sum);
    Ok(())
}

pub(super) fn hrandfield(call: &mut Call<'_, '_>) -> Result {
    let count = if call.args.len() > 2 { Some(super::drawn::count(call, 2)?) } else { None };
    let with_values = match call.args.get(3) {
        None => false,
        Some(option) if option.eq_ignore_ascii_case(b"WITHVALUES") && call.args.len() == 4 => true,
        Some(_) => return Err(SYNTAX.into()),
    };
    // Twice as many must be a number, too.
    if with_values && count.is_some_and(|count| count.unsigned_abs() > i64::MAX as u64 / 2) {
        return Err("ERR value is out of range".into());
    }
    let (key, mut room) = (call.args[1], call.room());
    let chosen = call.read(&[key], |view| {
        is_there(view, key)?;
        super::drawn::drawn(view, key, count.unwrap_or(1), |field, value| {
            room.takes(field.len()) && (!with_values || room.takes(value.len()))
        })
    })?;
    room.check()?;
    if count.is_none() {
        call.bulk_or_null(chosen.first().map(|(field, _)| &field[..]));
        return Ok(());
    }
    let in_pairs = call.session.version == Version::Resp3;
    let mut to = call.write();
    to.array(chosen.len() * if with_values && !in_pairs { 2 } else { 1 });
    for (field, value) in &chosen {
        if with_values && in_pairs {
            to.array(2);
        }
        to.bulk(field);
        if with_values {
            to.bulk(value);
        }
    }
    Ok(())
}
