//! Sets.

use std::collections::BTreeSet;

use ksf_store::cells::Shape;
use ksf_store::update::View;

use super::{Call, Failed, Result, SYNTAX, random, shaped};

/// Whether a key is a set: false if it is not there.
fn is_there(view: &mut View<'_, '_>, key: &[u8]) -> Result<bool> {
    Ok(shaped(view.get(key), Shape::Set)?.is_some())
}

fn members(view: &mut View<'_, '_>, key: &[u8]) -> Result<Vec<Vec<u8>>> {
    is_there(view, key)?;
    Ok(view.cells(key).into_iter().map(|(member, _)| member).collect())
}

pub(super) fn sadd(call: &mut Call<'_, '_>) -> Result {
    let (key, given) = (call.args[1], &call.args[2..]);
    let added = call.update(&[key], |update| {
        is_there(update.view(), key)?;
        let mut added = 0;
        for member in given {
            if update.cell(key, member).is_none() {
                update.set_cell(key, Shape::Set, member, &[]);
                added += 1;
            }
        }
        Ok::<_, Failed>(added)
    })??;
    call.write().integer(added);
    Ok(())
}

pub(super) fn srem(call: &mut Call<'_, '_>) -> Result {
    call.remove_cells(Shape::Set)
}

pub(super) fn scard(call: &mut Call<'_, '_>) -> Result {
    call.count_cells(Shape::Set)
}

pub(super) fn sismember(call: &mut Call<'_, '_>) -> Result {
    let (key, member) = (call.args[1], call.args[2]);
    let there = call.read(&[key], |view| Ok::<_, Failed>(is_there(view, key)? && view.cell(key, member).is_some()))?;
    call.write().integer(i64::from(there));
    Ok(())
}

pub(super) fn smismember(call: &mut Call<'_, '_>) -> Result {
    let (key, given) = (call.args[1], &call.args[2..]);
    let there = call.read(&[key], |view| {
        is_there(view, key)?;
        Ok::<_, Failed>(given.iter().map(|member| view.cell(key, member).is_some()).collect::<Vec<_>>())
    })?;
    let mut to = call.write();
    to.array(there.len());
    there.into_iter().for_each(|there| to.integer(i64::from(there)));
    Ok(())
}

/// Members that room was taken for.
fn reply(call: &mut Call<'_, '_>, members: &[Vec<u8>]) {
    let mut to = call.write();
    to.set(members.len());
    members.iter().for_each(|member| to.bulk(member));
}

pub(super) fn smembers(call: &mut Call<'_, '_>) -> Result {
    let all = call.cells(Shape::Set, |room, member, _| room.takes(member.len()).then(|| member.to_vec()))?;
    reply(call, &all);
    Ok(())
}

pub(super) fn spop(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let count = match call.args[2..] {
        [] => None,
        [_] => {
            let count = super::integer(call.args[2]).and_then(|count| usize::try_from(count).ok());
            Some(count.ok_or("ERR value is out of range, must be positive")?)
        }
        _ => return Err(SYNTAX.into()),
    };
    let mut room = call.room();
    let popped = call.update(&[key], |update| {
        let all = members(update.view(), key)?;
        let popped = super::choose(all, count.unwrap_or(1) as i64, |member| room.takes(member.len()))?;
        room.check()?;
        for member in &popped {
            update.remove_cell(key, member);
        }
        Ok::<_, Failed>(popped)
    })??;
    match count {
        Some(_) => reply(call, &popped),
        None => call.bulk_or_null(popped.first().map(|member| &member[..])),
    }
    Ok(())
}

pub(super) fn srandmember(call: &mut Call<'_, '_>) -> Result {
    let count = match call.args[2..] {
        [] => None,
        [_] => Some(call.integer(2)?),
        _ => return Err(SYNTAX.into()),
    };
    // Those that are not chosen take no room.
    let all = call.cells(Shape::Set, |_, member, _| Some(member.to_vec()))?;
    let mut room = call.room();
    let Some(count) = count else {
        let one = (!all.is_empty()).then(|| &all[random() as usize % all.len()][..]);
        room.take(one.map_or(0, <[u8]>::len))?;
        call.bulk_or_null(one);
        return Ok(());
    };
    let chosen = super::choose(all, count, |member| room.takes(member.len()))?;
    room.check()?;
    let mut to = call.write();
    to.array(chosen.len());
    chosen.iter().for_each(|member| to.bulk(member));
    Ok(())
}

pub(super) fn smove(call: &mut Call<'_, '_>) -> Result {
    let (from, to, member) = (call.args[1], call.args[2], call.args[3]);
    let moved = call.update(&[from, to], |update| {
        let there = is_there(update.view(), from)?;
        is_there(update.view(), to)?;
        if !there || update.cell(from, member).is_none() {
            return Ok::<_, Failed>(false);
        }
        if from != to {
            update.remove_cell(from, member);
            update.set_cell(to, Shape::Set, member, &[]);
        }
        Ok(true)
    })??;
    call.write().integer(i64::from(moved));
    Ok(())
}

/// How sets are combined.
#[derive(Clone, Copy)]
enum Combine {
    Inter,
    Union,
    Diff,
}

fn combined(view: &mut View<'_, '_>, keys: &[&[u8]], how: Combine) -> Result<BTreeSet<Vec<u8>>> {
    let mut result: Option<BTreeSet<Vec<u8>>> = None;
    for key in keys {
        let set: BTreeSet<Vec<u8>> = members(view, key)?.into_iter().collect();
        result = Some(match (result, how) {
            (None, _) => set,
            (Some(result), Combine::Inter) => result.intersection(&set).cloned().collect(),
            (Some(result), Combine::Union) => result.union(&set).cloned().collect(),
            (Some(result), Combine::Diff) => result.difference(&set).cloned().collect(),
        });
    }
    Ok(result.unwrap_or_default())
}

fn combine(call: &mut Call<'_, '_>, how: Combine) -> Result {
    let keys = &call.args[1..];
    let result = call.read(keys, |view| combined(view, keys, how))?;
    let mut room = call.room();
    result.iter().try_for_each(|member| room.take(member.len()))?;
    reply(call, &Vec::from_iter(result));
    Ok(())
}

fn store(call: &mut Call<'_, '_>, how: Combine) -> Result {
    let (all, to, keys) = (&call.args[1..], call.args[1], &call.args[2..]);
    let count = call.update(all, |update| {
        let result = combined(update.view(), keys, how)?;
        update.remove(to);
        for member in &result {
            update.set_cell(to, Shape::Set, member, &[]);
        }
        Ok::<_, Failed>(result.len())
    })??;
    call.write().integer(count as i64);
    Ok(())
}

pub(super) fn sinter(call: &mut Call<'_, '_>) -> Result {
    combine(call, Combine::Inter)
}

pub(super) fn sunion(call: &mut Call<'_, '_>) -> Result {
    combine(call, Combine::Union)
}

pub(super) fn sdiff(call: &mut Call<'_, '_>) -> Result {
    combine(call, Combine::Diff)
}

pub(super) fn sinterstore(call: &mut Call<'_, '_>) -> Result {
    store(call, Combine::Inter)
}

pub(super) fn sunionstore(call: &mut Call<'_, '_>) -> Result {
    store(call, Combine::Union)
}

pub(super) fn sdiffstore(call: &mut Call<'_, '_>) -> Result {
    store(call, Combine::Diff)
}
