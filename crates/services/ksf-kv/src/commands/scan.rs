//! `SCAN`, `HSCAN`, `SSCAN` and `ZSCAN`: iteration over keys and cells in steps of bounded length.

use ksf_proto::resp::format_double;
use ksf_store::cells::{Shape, score_of, score_value};

use super::keys::type_name;
use super::object::encoding;
use super::pattern::Pattern;
use super::sorted_sets::score_bytes_max;
use super::{Call, NOT_AN_INTEGER, Result, Room, SYNTAX, integer, shaped};

/// One step returns all cells of a key with at most this number of them, whatever `COUNT` is, if
/// the reply has room.
const AT_ONCE: u64 = 128;
/// Default of the option `COUNT`: keys or cells of a step.
const COUNT: usize = 10;

/// Options of the scan commands.
struct Options<'a> {
    count: usize,
    pattern: Option<Pattern>,
    type_name: Option<&'a [u8]>,
}

impl<'a> Options<'a> {
    fn read(args: &[&'a [u8]], of_keys: bool) -> Result<Self> {
        let mut options = Self { count: COUNT, pattern: None, type_name: None };
        let (pairs, rest) = args.as_chunks::<2>();
        for [option, value] in pairs {
            match &option.to_ascii_uppercase()[..] {
                b"MATCH" => options.pattern = Some(Pattern::read(value)?),
                b"TYPE" if of_keys => options.type_name = Some(value),
                b"COUNT" => {
                    let count = integer(value).ok_or(NOT_AN_INTEGER)?;
                    options.count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(SYNTAX)?;
                }
                _ => return Err(SYNTAX.into()),
            }
        }
        if rest.is_empty() { Ok(options) } else { Err(SYNTAX.into()) }
    }

    fn takes(&self, name: &[u8]) -> bool {
        self.pattern.as_ref().is_none_or(|pattern| pattern.takes(name))
    }

    fn takes_shape(&self, shape: Shape) -> bool {
        self.type_name.is_none_or(|name| name.eq_ignore_ascii_case(type_name(shape).as_bytes()))
    }
}

/// Reads a cursor as Redis does: a negative one wraps around.
fn cursor(text: &[u8]) -> Result<u64> {
    let (is_negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        [] => (false, &b"0"[..]),
        digits => (false, digits),
    };
    let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'));
    let number: Option<u64> = digits.and_then(|digits| digits.parse().ok());
    let number = number.map(|number| if is_negative { number.wrapping_neg() } else { number });
    number.ok_or_else(|| "ERR invalid cursor".into())
}

fn reply(call: &mut Call<'_, '_>, cursor: u64, words: &[Vec<u8>]) {
    let mut to = call.write();
    to.array(2);
    to.bulk(cursor.to_string().as_bytes());
    to.array(words.len());
    words.iter().for_each(|word| to.bulk(word));
}

pub(super) fn scan(call: &mut Call<'_, '_>) -> Result {
    let cursor = cursor(call.args[1])?;
    let options = Options::read(&call.args[2..], true)?;
    let (mut found, mut room) = (Vec::new(), call.room());
    let store = call.shard.shard.store();
    let (next, needs) = store.scan_some(cursor, options.count, call.clock.now_ms, |key, got| {
        if options.takes(key) && options.takes_shape(got.shape) && room.takes(key.len()) {
            found.push(key.to_vec());
        }
    });
    call.done.needs = needs;
    room.check()?;
    reply(call, next, &found);
    Ok(())
}

/// Subkeys and values.
type Cells = Vec<(Vec<u8>, Vec<u8>)>;

/// Cells that a step returns, within the room of the reply.
struct Shown<'o> {
    options: &'o Options<'o>,
    shape: Shape,
    room: Room,
    found: Cells,
}

impl Shown<'_> {
    /// Returns false if the reply has no more room.
    fn take(&mut self, subkey: &[u8], value: &[u8]) -> bool {
        if self.options.takes(subkey) {
            let has_room = self.room.takes(subkey.len())
                && match self.shape {
                    Shape::Hash => self.room.takes(value.len()),
                    Shape::SortedSet => self.room.takes(score_bytes_max(score_of(value))),
                    _ => true,
                };
            if has_room {
                self.found.push((subkey.to_vec(), value.to_vec()));
            }
        }
        self.room.check().is_ok()
    }
}

/// Cells of one step through a key of this shape, and the cursor of the next step.
fn step(call: &mut Call<'_, '_>, shape: Shape) -> Result<(u64, Cells)> {
    let args = call.args;
    let (key, cursor) = (args[1], cursor(args[2])?);
    let rooms = [call.room(), call.room()];
    call.read(&[key], |view| {
        let Some(count) = shaped(view.get(key), shape)?.map(|got| got.count) else { return Ok((0, Vec::new())) };
        // Redis does not read the options if the key does not exist.
        let options = Options::read(&args[3..], false)?;
        let [at_once, in_part] = rooms.map(|room| Shown { options: &options, shape, room, found: Vec::new() });
        let mut shown = at_once;
        if count <= AT_ONCE {
            if shape == Shape::SortedSet {
                view.walk_scores(key, f64::NEG_INFINITY, |score, member| shown.take(member, &score_value(score)));
            } else {
                view.walk(key, &[], |subkey, value| shown.take(subkey, value));
            }
            if shown.room.check().is_ok() {
                return Ok((0, shown.found));
            }
        }
        shown = in_part;
        let next = view.walk_some(key, cursor, options.count, |subkey, value| {
            shown.take(subkey, value);
        });
        shown.room.check()?;
        Ok((next, shown.found))
    })
}

pub(super) fn hscan(call: &mut Call<'_, '_>) -> Result {
    let (next, found) = step(call, Shape::Hash)?;
    let words: Vec<_> = found.into_iter().flat_map(|(field, value)| [field, value]).collect();
    reply(call, next, &words);
    Ok(())
}

pub(super) fn sscan(call: &mut Call<'_, '_>) -> Result {
    let (next, found) = step(call, Shape::Set)?;
    let words: Vec<_> = found.into_iter().map(|(member, _)| member).collect();
    reply(call, next, &words);
    Ok(())
}

/// The integer that Redis stores for a score in a packed set.
fn packed_integer(score: f64) -> Option<i64> {
    let integer = score as i64;
    (score.abs() <= (i64::MAX / 2) as f64 && integer as f64 == score).then_some(integer)
}

pub(super) fn zscan(call: &mut Call<'_, '_>) -> Result {
    let key = call.args[1];
    let is_packed = call.read(&[key], |view| {
        shaped(view.get(key), Shape::SortedSet).is_ok() && encoding(view, key) == Some("listpack")
    });
    let (next, found) = step(call, Shape::SortedSet)?;
    let score = |value: &[u8]| {
        let score = score_of(value);
        let integer = packed_integer(score).filter(|_| is_packed);
        integer.map_or_else(|| format_double(score), |integer| integer.to_string()).into_bytes()
    };
    let words: Vec<_> = found.into_iter().flat_map(|(member, value)| [member, score(&value)]).collect();
    reply(call, next, &words);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::cursor;

    #[test]
    fn cursors_are_read_as_redis_reads_them() {
        for (text, number) in [
            ("0", Some(0)),
            ("", Some(0)),
            ("17", Some(17)),
            ("+17", Some(17)),
            ("-1", Some(u64::MAX)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("-", None),
            ("-+1", None),
            ("++1", None),
            ("x", None),
            (" 1", None),
            ("1 ", None),
        ] {
            assert_eq!(cursor(text.as_bytes()).ok(), number, "{text}");
        }
    }
}
