//! Lists. The places of the elements have no gaps, so an element is found by its index.

use std::collections::VecDeque;

use ksf_store::cells::{Shape, place_key};
use ksf_store::update::{Update, View};

use super::{AppendBound, Call, Failed, Result, Room, SYNTAX, shaped};

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
        (0..self.count).contains(&index).then(|| self.first + index)
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

/// Goes through the elements from an index on, until `take` returns false.
fn walk(view: &mut View<'_, '_>, key: &[u8], extent: Extent, from: i64, mut take: impl FnMut(i64, &[u8]) -> bool) {
    let mut index = from;
    view.walk(key, &place_key(extent.first + from), |_, value| {
        let goes_on = take(index, value);
        index += 1;
        goes_on
    });
}

/// Puts these elements to other places, in their order: what is there from `to` on is written over.
fn put<'k>(update: &mut Update<'_, 'k>, key: &'k [u8], to: i64, elements: &[Vec<u8>]) {
    for (place, value) in (to..).zip(elements) {
        update.set_cell(key, Shape::List, &place_key(place), value);
    }
}

/// Elements of a list that get other places, but for those of which `drops` is true. They are written anew, so they are no more
/// than an append takes.
fn moving(
    update: &mut Update<'_, '_>,
    key: &[u8],
    range: std::ops::Range<i64>,
    bound: &mut AppendBound,
    drops: impl Fn(i64) -> bool,
) -> Result<Vec<Vec<u8>>> {
    let extent = extent(update.view(), key)?;
    let (mut found, mut taken) = (Vec::new(), Ok(()));
    if !range.is_empty() {
        walk(update.view(), key, extent, range.start, |index, value| {
            if index < range.end && !drops(index) {
                taken = bound.take(key.len() + value.len());
                found.push(value.to_vec());
            }
            index + 1 < range.end && taken.is_ok()
        });
    }
    taken.map(|()| found)
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
            return Err(Failed::from(format!("ERR wrong number of arguments for '{name}' command")));
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
    let (key, index) = (call.args[1], call.integer(2));
    let value = call.read(&[key], |view| {
        let extent = extent(view, key)?;
        // Redis does not look at the index if the key is not there.
        let place = if extent.count == 0 { None } else { extent.place(index?) };
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
        if kept == (0..extent.count) {
            update.touch(key);
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
    let mut bound = AppendBound::of(call);
    let removed = call.update(&[key], |update| {
        let extent = extent(update.view(), key)?;
        let places = removed(update.view(), key, extent, count, value);
        let (Some(&first), Some(&last)) = (places.first(), places.last()) else { return Ok::<_, Failed>(0) };
        let gone = places.len() as i64;
        let is_gone = |index: i64| places.binary_search(&index).is_ok();
        // Those close up to the nearer end that are behind the first that goes, or in front of the last.
        if extent.count - first <= last + 1 {
            let behind = moving(update, key, first + 1..extent.count, &mut bound, is_gone)?;
            put(update, key, extent.first + first, &behind);
            // From the end, so that there is never a gap.
            for index in (extent.count - gone..extent.count).rev() {
                update.remove_cell(key, &place_key(extent.first + index));
            }
        } else {
            let before = moving(update, key, 0..last, &mut bound, is_gone)?;
            put(update, key, extent.first + gone, &before);
            for index in 0..gone {
                update.remove_cell(key, &place_key(extent.first + index));
            }
        }
        Ok(gone)
    })??;
    call.write().integer(removed);
    Ok(())
}

/// The indices of elements with this value, in order: all of them, or so many from the front, or from the end if `count` is
/// negative.
fn removed(view: &mut View<'_, '_>, key: &[u8], extent: Extent, count: i64, value: &[u8]) -> Vec<i64> {
    let wanted = if count == 0 { usize::MAX } else { usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX) };
    let mut found = VecDeque::new();
    walk(view, key, extent, 0, |index, element| {
        if element == value {
            found.push_back(index);
            if found.len() > wanted {
                found.pop_front();
            }
        }
        count <= 0 || found.len() < wanted
    });
    found.into()
}

pub(super) fn linsert(call: &mut Call<'_, '_>) -> Result {
    let [_, key, side, pivot, value] = *call.args else { return Err(SYNTAX.into()) };
    let behind = match &side.to_ascii_uppercase()[..] {
        b"BEFORE" => 0,
        b"AFTER" => 1,
        _ => return Err(SYNTAX.into()),
    };
    let mut bound = AppendBound::of(call);
    let count = call.update(&[key], |update| {
        let extent = extent(update.view(), key)?;
        if extent.count == 0 {
            return Ok::<_, Failed>(0);
        }
        let mut found = None;
        walk(update.view(), key, extent, 0, |index, element| {
            found = (element == pivot).then_some(index);
            found.is_none()
        });
        let Some(at) = found.map(|at| at + behind) else { return Ok(-1) };
        let Extent { first, count } = extent;
        // Those that are fewer make room.
        if at < count - at {
            let before = moving(update, key, 0..at, &mut bound, |_| false)?;
            put(update, key, first - 1, &before);
            put(update, key, first - 1 + at, &[value.to_vec()]);
        } else {
            let after = moving(update, key, at..count, &mut bound, |_| false)?;
            put(update, key, first + at, &[value.to_vec()]);
            put(update, key, first + at + 1, &after);
        }
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
    let mut rest = &call.args[3..];
    while let [option, after @ ..] = rest {
        let [number, after @ ..] = after else { return Err(SYNTAX.into()) };
        let number = super::integer(number);
        let size = number.and_then(|number| usize::try_from(number).ok());
        match &option.to_ascii_uppercase()[..] {
            b"RANK" => rank = number.ok_or(super::NOT_AN_INTEGER)?,
            b"COUNT" => count = Some(size.ok_or("ERR COUNT can't be negative")?),
            b"MAXLEN" => compared_max = size.ok_or("ERR MAXLEN can't be negative")?,
            _ => return Err(SYNTAX.into()),
        }
        if rank == 0 {
            return Err("ERR RANK can't be zero: use 1 to start from the first match, 2 from the second ... or \
                        use negative to start from the end of the list"
                .into());
        }
        rest = after;
    }
    let skipped = usize::try_from(rank.unsigned_abs() - 1).unwrap_or(usize::MAX);
    let wanted = match count {
        None => 1,
        Some(0) => usize::MAX,
        Some(count) => count,
    };
    let enough = skipped.saturating_add(wanted);
    let found = call.read(&[key], |view| {
        let extent = extent(view, key)?;
        let compared = if compared_max == 0 { i64::MAX } else { i64::try_from(compared_max).unwrap_or(i64::MAX) };
        let compared = compared.min(extent.count);
        // Of those from the end, the last ones of the way forward count.
        let (start, end) = if rank > 0 { (0, compared) } else { (extent.count - compared, extent.count) };
        let mut found = VecDeque::new();
        walk(view, key, extent, start, |index, element| {
            if element == value {
                found.push_back(index);
                if rank < 0 && found.len() > enough {
                    found.pop_front();
                }
            }
            index + 1 < end && (rank < 0 || found.len() < enough)
        });
        if rank < 0 {
            found.make_contiguous().reverse();
        }
        Ok::<_, Failed>(found.into_iter().skip(skipped).take(wanted).collect::<Vec<i64>>())
    })?;
    let mut room = call.room();
    found.iter().try_for_each(|_| room.take(PLACE_BYTES))?;
    let mut to = call.write();
    match (count, found.first()) {
        (None, Some(at)) => to.integer(*at),
        (None, None) => to.null(),
        (Some(_), _) => {
            to.array(found.len());
            found.iter().for_each(|at| to.integer(*at));
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
        if from == to && there.count == 1 {
            // The list would be gone in between, with the time of its end. As in Redis, those that watch it see a write.
            update.touch(from);
        } else {
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
