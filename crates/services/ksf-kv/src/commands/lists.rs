//! Lists. The places of the elements have no gaps, so an element is found by its index.

use ksf_store::cells::{Shape, place_key};
use ksf_store::update::{Update, View};

use super::{Call, Failed, Result, Room, SYNTAX, shaped};

/// The elements of a list.
#[derive(Clone, Copy, Default)]
struct Extent {
    first: i64,
    count: i64,
}

impl Extent {
    /// The place of an index, which counts from the end if it is negative.
    fn place(self, index: i64) -> Option<i64> {
        let index = if index < 0 { index.saturating_add(self.count) } else { index };
        (0..self.count).contains(&index).then_some(self.first + index)
    }

    /// The indices from one to the other, both counted from the end if they are negative.
    fn range(self, start: i64, end: i64) -> std::ops::Range<i64> {
        let from_end = |index: i64| if index < 0 { index.saturating_add(self.count) } else { index };
        let (start, end) = (from_end(start).max(0), from_end(end).min(self.count - 1));
        if start > end { 0..0 } else { start..end + 1 }
    }
}

fn extent(view: &mut View<'_, '_>, key: &[u8]) -> Result<Extent> {
    let got = shaped(view.get(key), Shape::List)?;
    Ok(got.map_or(Extent::default(), |got| Extent { first: got.first, count: got.count as i64 }))
}

/// Elements of a list, as far as there is room for them.
fn elements(view: &mut View<'_, '_>, key: &[u8], range: std::ops::Range<i64>, room: &mut Room) -> Result<Vec<Vec<u8>>> {
    let first = extent(view, key)?.first;
    let (mut left, mut found) = (range.end - range.start, Vec::new());
    if left > 0 {
        view.walk(key, &place_key(first + range.start), |_, value| {
            if !room.takes(value.len()) {
                return false;
            }
            found.push(value.to_vec());
            left -= 1;
            left > 0
        });
    }
    room.check()?;
    Ok(found)
}

fn push<'k>(update: &mut Update<'_, 'k>, key: &'k [u8], value: &[u8], front: bool) -> Result<i64> {
    let Extent { first, count } = extent(update.view(), key)?;
    let place = if front { first - 1 } else { first + count };
    update.set_cell(key, Shape::List, &place_key(place), value);
    Ok(count + 1)
}

/// Makes a list of these elements: only what differs is written.
fn replace<'k>(update: &mut Update<'_, 'k>, key: &'k [u8], first: i64, before: &[Vec<u8>], after: &[Vec<u8>]) {
    for (place, value) in (first..).zip(after) {
        if before.get((place - first) as usize) != Some(value) {
            update.set_cell(key, Shape::List, &place_key(place), value);
        }
    }
    // From the end, so that there is never a gap.
    for at in (after.len()..before.len()).rev() {
        update.remove_cell(key, &place_key(first + at as i64));
    }
}

fn push_all(call: &mut Call<'_, '_>, front: bool, only_there: bool) -> Result {
    let (key, values) = (call.args[1], &call.args[2..]);
    let count = call.update(&[key], |update| {
        let mut count = extent(update.view(), key)?.count;
        if only_there && count == 0 {
            return Ok::<_, Failed>(0);
        }
        for value in values {
            count = push(update, key, value, front)?;
        }
        Ok(count)
    })??;
    call.write().integer(count);
    Ok(())
}

pub(super) fn lpush(call: &mut Call<'_, '_>) -> Result {
    push_all(call, true, false)
}

pub(super) fn rpush(call: &mut Call<'_, '_>) -> Result {
    push_all(call, false, false)
}

pub(super) fn lpushx(call: &mut Call<'_, '_>) -> Result {
    push_all(call, true, true)
}

pub(super) fn rpushx(call: &mut Call<'_, '_>) -> Result {
    push_all(call, false, true)
}

fn pop_some(call: &mut Call<'_, '_>, front: bool) -> Result {
    let key = call.args[1];
    let wanted = match call.args[2..] {
        [] => None,
        [_] => {
            let count = super::integer(call.args[2]).filter(|count| *count >= 0);
            Some(count.ok_or("ERR value is out of range, must be positive")?)
        }
        _ => {
            let name = String::from_utf8_lossy(call.args[0]).to_ascii_lowercase();
            return Err(Failed(format!("ERR wrong number of arguments for '{name}' command")));
        }
    };
    let mut room = call.room();
    let (there, popped) = call.update(&[key], |update| {
        let Extent { first, count } = extent(update.view(), key)?;
        let wanted = wanted.unwrap_or(1).min(count);
        // From one end on, so that there is never a gap.
        let place = |at| place_key(if front { first + at } else { first + count - 1 - at });
        let mut popped = Vec::new();
        for at in 0..wanted {
            let value = update.cell(key, &place(at));
            room.take(value.as_ref().map_or(0, Vec::len))?;
            popped.extend(value);
        }
        for at in 0..wanted {
            update.remove_cell(key, &place(at));
        }
        Ok::<_, Failed>((count > 0, popped))
    })??;
    let mut to = call.write();
    match wanted {
        None => to.bulk_or_null(popped.first().map(|value| &value[..])),
        Some(_) if !there => to.null_array(),
        Some(_) => {
            to.array(popped.len());
            popped.iter().for_each(|value| to.bulk(value));
        }
    }
    Ok(())
}

pub(super) fn lpop(call: &mut Call<'_, '_>) -> Result {
    pop_some(call, true)
}

pub(super) fn rpop(call: &mut Call<'_, '_>) -> Result {
    pop_some(call, false)
}

pub(super) fn llen(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let count = call.read(&[key], |view| extent(view, key))?.count;
    call.write().integer(count);
    Ok(())
}

pub(super) fn lindex(call: &mut Call<'_, '_>) -> Result {
    let (key, index) = (call.args[1], call.integer(2)?);
    let value = call.read(&[key], |view| {
        let place = extent(view, key)?.place(index);
        Ok::<_, Failed>(place.and_then(|place| view.cell(key, &place_key(place))))
    })?;
    call.room().take(value.as_ref().map_or(0, Vec::len))?;
    call.bulk_or_null(value.as_deref());
    Ok(())
}

pub(super) fn lrange(call: &mut Call<'_, '_>) -> Result {
    let (key, start, end) = (call.args[1], call.integer(2)?, call.integer(3)?);
    let mut room = call.room();
    let found = call.read(&[key], |view| {
        let range = extent(view, key)?.range(start, end);
        elements(view, key, range, &mut room)
    })?;
    let mut to = call.write();
    to.array(found.len());
    found.iter().for_each(|value| to.bulk(value));
    Ok(())
}

pub(super) fn lset(call: &mut Call<'_, '_>) -> Result {
    let (key, index, value) = (call.args[1], call.args[2], call.args[3]);
    call.update(&[key], |update| {
        let extent = extent(update.view(), key)?;
        if extent.count == 0 {
            return Err(Failed::from("ERR no such key"));
        }
        let index = super::integer(index).ok_or(super::NOT_AN_INTEGER)?;
        let place = extent.place(index).ok_or("ERR index out of range")?;
        update.set_cell(key, Shape::List, &place_key(place), value);
        Ok(())
    })??;
    call.write().ok();
    Ok(())
}

pub(super) fn ltrim(call: &mut Call<'_, '_>) -> Result {
    let (key, start, end) = (call.args[1], call.integer(2)?, call.integer(3)?);
    call.update(&[key], |update| {
        let extent = extent(update.view(), key)?;
        let kept = extent.range(start, end);
        if kept.is_empty() {
            update.remove(key);
            return Ok::<_, Failed>(());
        }
        let places = (0..kept.start).chain((kept.end..extent.count).rev());
        for at in places {
            update.remove_cell(key, &place_key(extent.first + at));
        }
        Ok(())
    })??;
    call.write().ok();
    Ok(())
}

pub(super) fn lrem(call: &mut Call<'_, '_>) -> Result {
    let (key, count, value) = (call.args[1], call.integer(2)?, call.args[3]);
    let removed = call.update(&[key], |update| {
        let Extent { first, count: length } = extent(update.view(), key)?;
        let before = elements(update.view(), key, 0..length, &mut Room::endless())?;
        let mut left = if count == 0 { u64::MAX } else { count.unsigned_abs() };
        let mut takes = |element: &Vec<u8>| {
            let taken = left > 0 && element == value;
            left -= u64::from(taken);
            !taken
        };
        let after: Vec<Vec<u8>> = if count < 0 {
            let mut after: Vec<_> = before.iter().rev().filter(|element| takes(element)).cloned().collect();
            after.reverse();
            after
        } else {
            before.iter().filter(|element| takes(element)).cloned().collect()
        };
        replace(update, key, first, &before, &after);
        Ok::<_, Failed>(before.len() - after.len())
    })??;
    call.write().integer(removed as i64);
    Ok(())
}

pub(super) fn linsert(call: &mut Call<'_, '_>) -> Result {
    let [_, key, side, pivot, value] = *call.args else { return Err(SYNTAX.into()) };
    let behind = match &side.to_ascii_uppercase()[..] {
        b"BEFORE" => 0,
        b"AFTER" => 1,
        _ => return Err(SYNTAX.into()),
    };
    let count = call.update(&[key], |update| {
        let Extent { first, count } = extent(update.view(), key)?;
        if count == 0 {
            return Ok::<_, Failed>(0);
        }
        let before = elements(update.view(), key, 0..count, &mut Room::endless())?;
        let Some(at) = before.iter().position(|element| element == pivot) else { return Ok(-1) };
        let mut after = before.clone();
        after.insert(at + behind, value.to_vec());
        replace(update, key, first, &before, &after);
        Ok(count + 1)
    })??;
    call.write().integer(count);
    Ok(())
}

/// A position in a list takes no more room in a reply than a bulk string of this length.
const PLACE_BYTES: usize = 8;

pub(super) fn lpos(call: &mut Call<'_, '_>) -> Result {
    let (key, value) = (call.args[1], call.args[2]);
    let (mut rank, mut count, mut compared_max) = (1, None, 0);
    let (pairs, rest) = call.args[3..].as_chunks::<2>();
    if !rest.is_empty() {
        return Err(SYNTAX.into());
    }
    for (place, [option, _]) in pairs.iter().enumerate() {
        let number = call.integer(4 + 2 * place)?;
        match &option.to_ascii_uppercase()[..] {
            b"RANK" if number == 0 => {
                return Err("ERR RANK can't be zero: use 1 to start from the first match, 2 from the second ... or \
                            use negative to start from the end of the list"
                    .into());
            }
            b"RANK" => rank = number,
            b"COUNT" if number < 0 => return Err("ERR COUNT can't be negative".into()),
            b"COUNT" => count = Some(number as usize),
            b"MAXLEN" if number < 0 => return Err("ERR MAXLEN can't be negative".into()),
            b"MAXLEN" => compared_max = number as usize,
            _ => return Err(SYNTAX.into()),
        }
    }
    let all = call.read(&[key], |view| {
        let count = extent(view, key)?.count;
        elements(view, key, 0..count, &mut Room::endless())
    })?;
    let compared = if compared_max == 0 { all.len() } else { compared_max.min(all.len()) };
    let mut places: Vec<usize> = (0..all.len()).collect();
    if rank < 0 {
        places.reverse();
    }
    let matching = places.into_iter().take(compared).filter(|at| all[*at] == value);
    let skipped = usize::try_from(rank.unsigned_abs() - 1).unwrap_or(usize::MAX);
    let wanted = match count {
        None => 1,
        Some(0) => usize::MAX,
        Some(count) => count,
    };
    let found: Vec<usize> = matching.skip(skipped).take(wanted).collect();
    let mut room = call.room();
    found.iter().try_for_each(|_| room.take(PLACE_BYTES))?;
    let mut to = call.write();
    match (count, found.first()) {
        (None, Some(at)) => to.integer(*at as i64),
        (None, None) => to.null(),
        (Some(_), _) => {
            to.array(found.len());
            found.iter().for_each(|at| to.integer(*at as i64));
        }
    }
    Ok(())
}

fn side(argument: &[u8]) -> Result<bool> {
    match &argument.to_ascii_uppercase()[..] {
        b"LEFT" => Ok(true),
        b"RIGHT" => Ok(false),
        _ => Err(SYNTAX.into()),
    }
}

fn moved(call: &mut Call<'_, '_>, from_front: bool, to_front: bool) -> Result {
    let (from, to, mut room) = (call.args[1], call.args[2], call.room());
    let value = call.update(&[from, to], |update| {
        let there = extent(update.view(), from)?;
        let Some(place) = there.place(if from_front { 0 } else { -1 }) else { return Ok::<_, Failed>(None) };
        extent(update.view(), to)?;
        let Some(value) = update.cell(from, &place_key(place)) else { return Ok(None) };
        room.take(value.len())?;
        // A list of one would be gone in between, with the time of its end.
        if from != to || there.count > 1 {
            update.remove_cell(from, &place_key(place));
            push(update, to, &value, to_front)?;
        }
        Ok(Some(value))
    })??;
    call.bulk_or_null(value.as_deref());
    Ok(())
}

pub(super) fn lmove(call: &mut Call<'_, '_>) -> Result {
    let (from_front, to_front) = (side(call.args[3])?, side(call.args[4])?);
    moved(call, from_front, to_front)
}

pub(super) fn rpoplpush(call: &mut Call<'_, '_>) -> Result {
    moved(call, false, true)
}
