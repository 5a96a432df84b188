//! Sets.

use std::collections::BTreeSet;

use ksf_store::cells::Shape;
use ksf_store::update::View;

use super::drawn::drawn;
use super::{Call, Failed, Result, SYNTAX, shaped};

/// Whether a key is a set: false if it is not there.
fn is_there(view: &mut View<'_, '_>, key: &[u8]) -> Result<bool> {
    Ok(shaped(view.get(key), Shape::Set)?.is_some())
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

/// The members alone.
fn names(drawn: Vec<super::drawn::Cell>) -> Vec<Vec<u8>> {
    drawn.into_iter().map(|(member, _)| member).collect()
}

pub(super) fn spop(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let count = match call.args[2..] {
        [] => None,
        [_] => {
            let count = super::integer(call.args[2]).filter(|count| *count >= 0);
            Some(count.ok_or("ERR value is out of range, must be positive")?)
        }
        _ => return Err(SYNTAX.into()),
    };
    let mut room = call.room();
    let popped = call.update(&[key], |update| {
        is_there(update.view(), key)?;
        let popped = drawn(update.view(), key, count.unwrap_or(1), |member, _| room.takes(member.len()))?;
        room.check()?;
        let popped = names(popped);
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
        [_] => Some(super::drawn::count(call, 2)?),
        _ => return Err(SYNTAX.into()),
    };
    let (key, mut room) = (call.args[1], call.room());
    let chosen = call.read(&[key], |view| {
        is_there(view, key)?;
        drawn(view, key, count.unwrap_or(1), |member, _| room.takes(member.len()))
    })?;
    room.check()?;
    let chosen = names(chosen);
    if count.is_none() {
        call.bulk_or_null(chosen.first().map(|member| &member[..]));
        return Ok(());
    }
    let mut to = call.write();
    to.array(chosen.len());
    chosen.iter().for_each(|member| to.bulk(member));
    Ok(())
}

pub(super) fn smove(call: &mut Call<'_, '_>) -> Result {
    let (from, to, member) = (call.args[1], call.args[2], call.args[3]);
    let moved = call.update(&[from, to], |update| {
        if !is_there(update.view(), from)? {
            return Ok::<_, Failed>(false);
        }
        is_there(update.view(), to)?;
        if update.cell(from, member).is_none() {
            return Ok(false);
        }
        if from != to {
            update.remove_cell(from, member);
            // One that has it is not touched.
            if update.cell(to, member).is_none() {
                update.set_cell(to, Shape::Set, member, &[]);
            }
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

/// Members that are copied at a time, to be looked for in other sets.
const AT_ONCE: usize = 256;

/// Hands the members of a set to `take` in order, at least one and at most `at_once` at a time. It may read the view.
fn each_batch(
    view: &mut View<'_, '_>,
    key: &[u8],
    at_once: usize,
    mut take: impl FnMut(&mut View<'_, '_>, Vec<Vec<u8>>) -> Result,
) -> Result {
    let at_once = if view.is_changed(key) { usize::MAX } else { at_once };
    let mut from = Vec::new();
    loop {
        let mut some: Vec<Vec<u8>> = Vec::new();
        view.walk(key, &from, |member, _| {
            some.push(member.to_vec());
            some.len() < at_once
        });
        let is_end = some.len() < at_once;
        let Some(last) = some.last() else { return Ok(()) };
        // The next name that there may be.
        from = [&last[..], b"\0"].concat();
        take(view, some)?;
        if is_end {
            return Ok(());
        }
    }
}

/// Hands the members of a set to `take` one by one, which may read the view.
fn each_member(
    view: &mut View<'_, '_>,
    key: &[u8],
    mut take: impl FnMut(&mut View<'_, '_>, Vec<u8>) -> Result,
) -> Result {
    each_batch(view, key, AT_ONCE, |view, some| some.into_iter().try_for_each(|member| take(view, member)))
}

/// Hands those members of the first set to `take` that none of the others has. Each set comes with its size. The work is linear
/// in the sum of the sizes, where a set larger than the first counts as that.
fn difference(
    view: &mut View<'_, '_>,
    (first, size): (&[u8], u64),
    others: &[(&[u8], u64)],
    mut take: impl FnMut(Vec<u8>) -> Result,
) -> Result {
    let others: Vec<_> = others.iter().filter(|(_, size)| *size > 0).collect();
    // Each batch begins a walk through each of the others. With as many members as others, all batches begin as many walks as
    // the first set has members, or one for each of the others.
    let is_changed = others.iter().any(|(key, _)| view.is_changed(key));
    let at_once = if is_changed { usize::MAX } else { AT_ONCE.max(others.len()) };
    each_batch(view, first, at_once, |view, some| {
        let (begin, end) = (some[0].clone(), some[some.len() - 1].clone());
        let mut left = BTreeSet::from_iter(some);
        for (key, other_size) in &others {
            if left.is_empty() {
                break;
            }
            if *other_size > size {
                left.retain(|member| view.cell(key, member).is_none());
            } else {
                view.walk(key, &begin, |member, _| {
                    left.remove(member);
                    *member < end[..]
                });
            }
        }
        left.into_iter().try_for_each(&mut take)
    })
}

/// What sets have together. Of the members, those are copied that it has, for each of which `take` takes room. A set that is named
/// more than once is gone through once.
fn combined(
    view: &mut View<'_, '_>,
    keys: &[&[u8]],
    how: Combine,
    mut take: impl FnMut(&[u8]) -> Result,
) -> Result<BTreeSet<Vec<u8>>> {
    let mut result = BTreeSet::new();
    let (mut sets, mut seen) = (Vec::with_capacity(keys.len()), BTreeSet::new());
    for key in keys {
        let size = shaped(view.get(key), Shape::Set)?.map_or(0, |got| got.count);
        if seen.insert(*key) {
            sets.push((*key, size));
        }
    }
    if matches!(how, Combine::Inter) {
        sets.sort_by_key(|(_, size)| *size);
    }
    let Some((&(first, size), others)) = sets.split_first() else { return Ok(result) };
    let mut add = |member: Vec<u8>| {
        if !result.contains(&member) {
            take(&member)?;
            result.insert(member);
        }
        Ok(())
    };
    match how {
        Combine::Inter => each_member(view, first, |view, member| {
            let is_in_all = others.iter().all(|(key, _)| view.cell(key, &member).is_some());
            if is_in_all { add(member) } else { Ok(()) }
        })?,
        // Without itself nothing is left of it.
        Combine::Diff if keys[1..].contains(&first) => {}
        Combine::Diff => difference(view, (first, size), others, add)?,
        Combine::Union => sets.iter().try_for_each(|(key, _)| each_member(view, key, |_, member| add(member)))?,
    }
    Ok(result)
}

fn combine(call: &mut Call<'_, '_>, how: Combine) -> Result {
    let (keys, mut room) = (&call.args[1..], call.room());
    let result = call.read(keys, |view| combined(view, keys, how, |member| room.take(member.len())))?;
    reply(call, &Vec::from_iter(result));
    Ok(())
}

fn store(call: &mut Call<'_, '_>, how: Combine) -> Result {
    let (all, to, keys) = (&call.args[1..], call.args[1], &call.args[2..]);
    let mut bound = super::AppendBound::of(call);
    let count = call.update(all, |update| {
        let result = combined(update.view(), keys, how, |member| bound.take(to.len() + member.len()))?;
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
