//! Sorted sets.

use ksf_proto::resp::Version;
use ksf_store::cells::{Shape, score_of, score_value};
use ksf_store::update::View;

use super::{Call, Failed, NOT_A_FLOAT, Result, Room, SYNTAX, float, float_bound, shaped};

type Members = Vec<(Vec<u8>, f64)>;

/// Whether a key is a sorted set: false if it is not there.
fn is_there(view: &mut View<'_, '_>, key: &[u8]) -> Result<bool> {
    Ok(shaped(view.get(key), Shape::SortedSet)?.is_some())
}

fn score(view: &mut View<'_, '_>, key: &[u8], member: &[u8]) -> Result<Option<f64>> {
    Ok(if is_there(view, key)? { view.cell(key, member).map(|value| score_of(&value)) } else { None })
}

/// Most bytes of a score as a text.
pub(super) fn score_bytes_max(score: f64) -> usize {
    // Without an exponent a number has as many zeros as it takes.
    if score == 0.0 || score.is_infinite() || (1e-6..1e17).contains(&score.abs()) { 32 } else { 350 }
}

/// Takes room for a member, and for its score if that is told, too.
fn takes(room: &mut Room, member: &[u8], score: f64, with_score: bool) -> bool {
    room.takes(member.len()) && (!with_score || room.takes(score_bytes_max(score)))
}

/// What `ZADD` may be told.
#[derive(Default)]
struct AddOptions {
    if_absent: bool,
    if_present: bool,
    if_greater: bool,
    if_less: bool,
    count_changed: bool,
    incr: bool,
}

impl AddOptions {
    /// The score that a member has from now on, if it changes.
    fn next(&self, before: Option<f64>, given: f64) -> Result<Option<f64>> {
        let Some(before) = before else { return Ok((!self.if_present).then_some(given)) };
        if self.if_absent {
            return Ok(None);
        }
        let next = if self.incr { before + given } else { given };
        if next.is_nan() {
            return Err("ERR resulting score is not a number (NaN)".into());
        }
        let refused = self.if_greater && next <= before || self.if_less && next >= before;
        Ok((!refused).then_some(next))
    }
}

pub(super) fn zadd(call: &mut Call<'_, '_>) -> Result {
    let (key, mut at, mut options) = (call.args[1], 2, AddOptions::default());
    while let Some(option) = call.args.get(at) {
        match &option.to_ascii_uppercase()[..] {
            b"NX" => options.if_absent = true,
            b"XX" => options.if_present = true,
            b"GT" => options.if_greater = true,
            b"LT" => options.if_less = true,
            b"CH" => options.count_changed = true,
            b"INCR" => options.incr = true,
            _ => break,
        }
        at += 1;
    }
    let (pairs, rest) = call.args[at..].as_chunks::<2>();
    if pairs.is_empty() || !rest.is_empty() {
        return Err(SYNTAX.into());
    }
    if options.if_absent && options.if_present {
        return Err("ERR XX and NX options at the same time are not compatible".into());
    }
    if options.if_greater && options.if_less || options.if_absent && (options.if_greater || options.if_less) {
        return Err("ERR GT, LT, and/or NX options at the same time are not compatible".into());
    }
    if options.incr && pairs.len() > 1 {
        return Err("ERR INCR option supports a single increment-element pair".into());
    }
    let scored = pairs.iter().map(|[score, member]| Ok((float(score).ok_or(NOT_A_FLOAT)?, *member)));
    let scored = scored.collect::<Result<Vec<_>>>()?;
    let (added, changed, last) = call.update(&[key], |update| {
        is_there(update.view(), key)?;
        let (mut added, mut changed, mut last) = (0, 0, None);
        for (given, member) in &scored {
            let before = update.cell(key, member).map(|value| score_of(&value));
            last = options.next(before, *given)?;
            let Some(next) = last else { continue };
            if before != Some(next) {
                update.set_cell(key, Shape::SortedSet, member, &score_value(next + 0.0));
                added += i64::from(before.is_none());
                changed += 1;
            }
        }
        Ok::<_, Failed>((added, changed, last))
    })??;
    let mut to = call.write();
    match (options.incr, last) {
        (true, Some(score)) => to.signed_double(score),
        (true, None) => to.null(),
        (false, _) => to.integer(if options.count_changed { changed } else { added }),
    }
    Ok(())
}

pub(super) fn zincrby(call: &mut Call<'_, '_>) -> Result {
    let (key, by, member) = (call.args[1], float(call.args[2]).ok_or(NOT_A_FLOAT)?, call.args[3]);
    let options = AddOptions { incr: true, ..AddOptions::default() };
    let next = call.update(&[key], |update| {
        let before = score(update.view(), key, member)?;
        let next = options.next(before, by)?.unwrap_or(by);
        // What changes nothing is not written.
        if before != Some(next) {
            update.set_cell(key, Shape::SortedSet, member, &score_value(next + 0.0));
        }
        Ok::<_, Failed>(next)
    })??;
    call.write().signed_double(next);
    Ok(())
}

pub(super) fn zrem(call: &mut Call<'_, '_>) -> Result {
    call.remove_cells(Shape::SortedSet)
}

pub(super) fn zcard(call: &mut Call<'_, '_>) -> Result {
    call.count_cells(Shape::SortedSet)
}

pub(super) fn zscore(call: &mut Call<'_, '_>) -> Result {
    let (key, member) = (call.args[1], call.args[2]);
    let score = call.read(&[key], |view| score(view, key, member))?;
    let mut to = call.write();
    match score {
        Some(score) => to.double(score),
        None => to.null(),
    }
    Ok(())
}

pub(super) fn zmscore(call: &mut Call<'_, '_>) -> Result {
    let (key, given, mut room) = (call.args[1], &call.args[2..], call.room());
    let scores = call.read(&[key], |view| {
        let one = |member: &&[u8]| {
            let score = score(view, key, member)?;
            room.take(score.map_or(0, score_bytes_max))?;
            Ok::<_, Failed>(score)
        };
        given.iter().map(one).collect::<Result<Vec<_>>>()
    })?;
    let mut to = call.write();
    to.array(scores.len());
    scores.into_iter().for_each(|score| match score {
        Some(score) => to.double(score),
        None => to.null(),
    });
    Ok(())
}

fn rank(call: &mut Call<'_, '_>, from_end: bool) -> Result {
    let (key, member) = (call.args[1], call.args[2]);
    let place = call.read(&[key], |view| {
        let Some(score) = score(view, key, member)? else { return Ok(None) };
        let before = view.members_before(key, score, member);
        let count = view.get(key).map_or(0, |got| got.count);
        Ok::<_, Failed>(Some(if from_end { count.saturating_sub(before + 1) } else { before }))
    })?;
    let mut to = call.write();
    match place {
        Some(place) => to.integer(place as i64),
        None => to.null(),
    }
    Ok(())
}

pub(super) fn zrank(call: &mut Call<'_, '_>) -> Result {
    rank(call, false)
}

pub(super) fn zrevrank(call: &mut Call<'_, '_>) -> Result {
    rank(call, true)
}

/// One end of a range of scores.
#[derive(Clone, Copy)]
struct Bound {
    score: f64,
    /// The score itself is not in the range.
    open: bool,
}

impl Bound {
    fn read(text: &[u8]) -> Result<Self> {
        let (open, number) = match text {
            [b'(', number @ ..] => (true, number),
            number => (false, number),
        };
        let score = float_bound(number).ok_or("ERR min or max is not a float")?;
        Ok(Self { score, open })
    }
}

/// The members whose score lies between two bounds, in their order, as long as `takes` takes them.
fn between(
    view: &mut View<'_, '_>,
    key: &[u8],
    (low, high): (Bound, Bound),
    mut takes: impl FnMut(&[u8], f64) -> bool,
) -> Result<Members> {
    let mut found = Vec::new();
    if is_there(view, key)? {
        view.walk_scores(key, low.score, |score, member| {
            let is_over = score > high.score || high.open && score == high.score;
            let is_under = low.open && score == low.score;
            if is_over || is_under {
                return !is_over;
            }
            let taken = takes(member, score);
            if taken {
                found.push((member.to_vec(), score));
            }
            taken
        });
    }
    Ok(found)
}

/// The members from one index to another, in their order, or in that from the end, as long as `takes` takes them.
fn by_rank(
    view: &mut View<'_, '_>,
    key: &[u8],
    (start, end): (i64, i64),
    from_end: bool,
    mut takes: impl FnMut(&[u8], f64) -> bool,
) -> Result<Members> {
    let count = shaped(view.get(key), Shape::SortedSet)?.map_or(0, |got| got.count) as i64;
    let place = |index: i64| if index < 0 { index.saturating_add(count) } else { index };
    let (start, end) = (place(start).max(0), place(end).min(count - 1));
    if start > end {
        return Ok(Vec::new());
    }
    let (first, last) = if from_end { (count - 1 - end, count - 1 - start) } else { (start, end) };
    let (mut at, mut found) = (first, Vec::new());
    view.walk_places(key, first as u64, |score, member| {
        if !takes(member, score) {
            return false;
        }
        found.push((member.to_vec(), score));
        at += 1;
        at <= last
    });
    if from_end {
        found.reverse();
    }
    Ok(found)
}

/// Members that room was taken for.
fn reply(call: &mut Call<'_, '_>, found: &Members, with_scores: bool) {
    let in_pairs = with_scores && call.session.version == Version::Resp3;
    let mut to = call.write();
    to.array(found.len() * if with_scores && !in_pairs { 2 } else { 1 });
    for (member, score) in found {
        if in_pairs {
            to.array(2);
        }
        to.bulk(member);
        if with_scores {
            to.double(*score);
        }
    }
}

fn limited(found: Members, limit: Option<(i64, i64)>) -> Members {
    let Some((offset, count)) = limit else { return found };
    let Ok(offset) = usize::try_from(offset) else { return Vec::new() };
    found.into_iter().skip(offset).take(usize::try_from(count).unwrap_or(usize::MAX)).collect()
}

/// How a range is given, and what is told of it.
#[derive(Default)]
struct RangeOptions {
    by_score: bool,
    /// `BYLEX`, which is refused.
    by_name: bool,
    from_end: bool,
    with_scores: bool,
    limit: Option<(i64, i64)>,
}

fn range(call: &mut Call<'_, '_>, mut options: RangeOptions, is_zrange: bool) -> Result {
    let mut at = 4;
    while let Some(option) = call.args.get(at) {
        match &option.to_ascii_uppercase()[..] {
            b"WITHSCORES" => options.with_scores = true,
            b"BYSCORE" if is_zrange && !options.by_score && !options.by_name => options.by_score = true,
            b"BYLEX" if is_zrange && !options.by_score && !options.by_name => options.by_name = true,
            b"REV" if is_zrange && !options.from_end => options.from_end = true,
            b"LIMIT" if at + 2 < call.args.len() => {
                options.limit = Some((call.integer(at + 1)?, call.integer(at + 2)?));
                at += 2;
            }
            _ => return Err(SYNTAX.into()),
        }
        at += 1;
    }
    // Redis ignores a limit without a count there, whatever its offset.
    if options.limit.is_some_and(|(_, count)| count != -1) && !options.by_score && !options.by_name {
        return Err("ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX".into());
    }
    if options.with_scores && options.by_name {
        return Err("ERR syntax error, WITHSCORES not supported in combination with BYLEX".into());
    }
    if options.by_name {
        return Err(SYNTAX.into());
    }
    let (key, one, other) = (call.args[1], call.args[2], call.args[3]);
    let mut room = call.room();
    let found = if options.by_score {
        let (low, high) = if options.from_end { (other, one) } else { (one, other) };
        let bounds = (Bound::read(low)?, Bound::read(high)?);
        let mut found = call.read(&[key], |view| {
            // With a limit, what that leaves takes room.
            between(view, key, bounds, |member, score| {
                options.limit.is_some() || takes(&mut room, member, score, options.with_scores)
            })
        })?;
        if options.from_end {
            found.reverse();
        }
        let found = limited(found, options.limit);
        if options.limit.is_some() {
            let _ = found.iter().all(|(member, score)| takes(&mut room, member, *score, options.with_scores));
        }
        found
    } else {
        let ends = (call.integer(2)?, call.integer(3)?);
        call.read(&[key], |view| {
            by_rank(view, key, ends, options.from_end, |member, score| {
                takes(&mut room, member, score, options.with_scores)
            })
        })?
    };
    room.check()?;
    reply(call, &found, options.with_scores);
    Ok(())
}

pub(super) fn zrange(call: &mut Call<'_, '_>) -> Result {
    range(call, RangeOptions::default(), true)
}

pub(super) fn zrevrange(call: &mut Call<'_, '_>) -> Result {
    range(call, RangeOptions { from_end: true, ..RangeOptions::default() }, false)
}

pub(super) fn zrangebyscore(call: &mut Call<'_, '_>) -> Result {
    range(call, RangeOptions { by_score: true, ..RangeOptions::default() }, false)
}

pub(super) fn zrevrangebyscore(call: &mut Call<'_, '_>) -> Result {
    range(call, RangeOptions { by_score: true, from_end: true, ..RangeOptions::default() }, false)
}

pub(super) fn zcount(call: &mut Call<'_, '_>) -> Result {
    let (key, low, high) = (call.args[1], Bound::read(call.args[2])?, Bound::read(call.args[3])?);
    let count = call.read(&[key], |view| {
        is_there(view, key)?;
        Ok::<_, Failed>(view.count_scores(key, (low.score, low.open), (high.score, high.open)))
    })?;
    call.write().integer(count as i64);
    Ok(())
}

/// Takes members out, and tells which.
fn taken<'a>(
    call: &mut Call<'_, 'a>,
    key: &'a [u8],
    choose: impl FnOnce(&mut View<'_, '_>) -> Result<Members>,
) -> Result<Members> {
    call.update(&[key], |update| {
        let found = choose(update.view())?;
        for (member, _) in &found {
            update.remove_cell(key, member);
        }
        Ok(found)
    })?
}

pub(super) fn zremrangebyscore(call: &mut Call<'_, '_>) -> Result {
    let (key, bounds) = (call.args[1], (Bound::read(call.args[2])?, Bound::read(call.args[3])?));
    let count = taken(call, key, |view| between(view, key, bounds, |_, _| true))?.len();
    call.write().integer(count as i64);
    Ok(())
}

pub(super) fn zremrangebyrank(call: &mut Call<'_, '_>) -> Result {
    let (key, ends) = (call.args[1], (call.integer(2)?, call.integer(3)?));
    let count = taken(call, key, |view| by_rank(view, key, ends, false, |_, _| true))?.len();
    call.write().integer(count as i64);
    Ok(())
}

fn pop(call: &mut Call<'_, '_>, from_end: bool) -> Result {
    let key = call.args[1];
    let count = match call.args[2..] {
        [] => None,
        [count] => {
            let count = super::integer(count).filter(|count| *count >= 0);
            Some(count.ok_or("ERR value is out of range, must be positive")?)
        }
        _ => return Err(SYNTAX.into()),
    };
    let (wanted, mut room) = (count.unwrap_or(1), call.room());
    let found = taken(call, key, |view| {
        if !is_there(view, key)? || wanted == 0 {
            return Ok(Vec::new());
        }
        let found =
            by_rank(view, key, (0, wanted - 1), from_end, |member, score| takes(&mut room, member, score, true))?;
        room.check()?;
        Ok(found)
    })?;
    if count.is_some() {
        reply(call, &found, true);
        return Ok(());
    }
    let mut to = call.write();
    to.array(2 * found.len());
    for (member, score) in &found {
        to.bulk(member);
        to.double(*score);
    }
    Ok(())
}

pub(super) fn zpopmin(call: &mut Call<'_, '_>) -> Result {
    pop(call, false)
}

pub(super) fn zpopmax(call: &mut Call<'_, '_>) -> Result {
    pop(call, true)
}
