//! `LCS`: the longest sequence that two strings have in common.

use ksf_store::cells::Shape;
use ksf_store::work;

use super::{Call, NOT_AN_INTEGER, Result, SYNTAX, integer};

/// Bytes of the table, for the time of the command: lengths of 4,095 bytes each. What is above them would take a shard more
/// than some hundredths of a second.
const TABLE_BYTES_MAX: usize = 64 << 20;
/// Fields of the table that take as long as one unit of [`work`].
const FIELDS_PER_UNIT: usize = 32;
/// Bytes of a match in the reply: five numbers and the heads of three arrays.
const MATCH_BYTES_MAX: usize = 64;
const NO_STRINGS: &str = "ERR The specified keys must contain string values";
const BOTH: &str = "ERR If you want both the length and indexes, please just use IDX.";
/// Redis' own for its limit.
const TOO_LONG: &str = "ERR Insufficient memory, transient memory for LCS exceeds proto-max-bulk-len";

/// What `LCS` may be told.
#[derive(Default)]
struct Options {
    ranges: bool,
    length: bool,
    with_length: bool,
    length_min: u64,
}

impl Options {
    fn read(args: &[&[u8]]) -> Result<Self> {
        let mut options = Self::default();
        let mut rest = args;
        while let [option, after @ ..] = rest {
            rest = after;
            match (&option.to_ascii_uppercase()[..], after) {
                (b"IDX", _) => options.ranges = true,
                (b"LEN", _) => options.length = true,
                (b"WITHMATCHLEN", _) => options.with_length = true,
                (b"MINMATCHLEN", [length, after @ ..]) => {
                    let length = integer(length).ok_or(NOT_AN_INTEGER)?;
                    options.length_min = u64::try_from(length).unwrap_or(0);
                    rest = after;
                }
                _ => return Err(SYNTAX.into()),
            }
        }
        if options.ranges && options.length { Err(BOTH.into()) } else { Ok(options) }
    }
}

/// Where a part of the sequence lies in both strings: its first byte in each, and its length.
#[derive(Debug, PartialEq, Eq)]
struct Match {
    first: usize,
    second: usize,
    length: usize,
}

/// What two strings have in common.
#[derive(Debug, PartialEq, Eq)]
struct Common {
    sequence: Vec<u8>,
    /// From the end, as Redis tells them.
    matches: Vec<Match>,
}

/// `None`: the table would be too long.
fn common(one: &[u8], other: &[u8]) -> Option<Common> {
    let width = other.len() + 1;
    let fields = (one.len() + 1).checked_mul(width)?;
    fields.checked_mul(size_of::<u32>()).filter(|bytes| *bytes <= TABLE_BYTES_MAX)?;
    work::add((fields / FIELDS_PER_UNIT) as u64);
    // The length of what the first i bytes of one and the first j of the other have in common.
    let mut table = vec![0_u32; fields];
    for i in 1..=one.len() {
        for j in 1..=other.len() {
            let at = i * width + j;
            table[at] = if one[i - 1] == other[j - 1] {
                table[at - width - 1] + 1
            } else {
                table[at - width].max(table[at - 1])
            };
        }
    }
    let (mut i, mut j) = (one.len(), other.len());
    let (mut sequence, mut matches) = (Vec::new(), Vec::<Match>::new());
    while i > 0 && j > 0 {
        let at = i * width + j;
        if one[i - 1] == other[j - 1] {
            (i, j) = (i - 1, j - 1);
            sequence.push(one[i]);
            match matches.last_mut() {
                Some(last) if (last.first, last.second) == (i + 1, j + 1) => {
                    *last = Match { first: i, second: j, length: last.length + 1 };
                }
                _ => matches.push(Match { first: i, second: j, length: 1 }),
            }
        } else if table[at - width] > table[at - 1] {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    sequence.reverse();
    Some(Common { sequence, matches })
}

pub(super) fn lcs(call: &mut Call<'_, '_>) -> Result {
    let keys = [call.args[1], call.args[2]];
    let values = call.read(&keys, |view| {
        keys.map(|key| match view.get(key) {
            Some(got) if got.shape != Shape::String => None,
            got => Some(got.map_or(Vec::new(), |got| got.value().to_vec())),
        })
    });
    let [Some(one), Some(other)] = values else { return Err(NO_STRINGS.into()) };
    let options = Options::read(&call.args[3..])?;
    let Common { sequence, mut matches } = common(&one, &other).ok_or(TOO_LONG)?;
    matches.retain(|found| found.length as u64 >= options.length_min);
    let told_bytes = if options.ranges { MATCH_BYTES_MAX * matches.len() } else { sequence.len() };
    call.room().take(told_bytes)?;
    let mut to = call.write();
    if !options.ranges {
        if options.length {
            to.integer(sequence.len() as i64);
        } else {
            to.bulk(&sequence);
        }
        return Ok(());
    }
    to.map(2);
    to.bulk(b"matches");
    to.array(matches.len());
    for Match { first, second, length } in matches {
        to.array(if options.with_length { 3 } else { 2 });
        for start in [first, second] {
            to.array(2);
            to.integer(start as i64);
            to.integer((start + length - 1) as i64);
        }
        if options.with_length {
            to.integer(length as i64);
        }
    }
    to.bulk(b"len");
    to.integer(sequence.len() as i64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Match, TABLE_BYTES_MAX, common};

    #[test]
    fn the_longest_common_sequence_is_found_with_its_places() {
        let found = common(b"ohmytext", b"mynewtext").unwrap();
        assert_eq!(found.sequence, b"mytext");
        let (text, my) = (Match { first: 4, second: 5, length: 4 }, Match { first: 2, second: 0, length: 2 });
        assert_eq!(found.matches, [text, my]);
        assert_eq!(common(b"", b"abc").unwrap().sequence, b"");
        let long = vec![0; TABLE_BYTES_MAX / 8];
        assert_eq!(common(&long, b"ab"), None);
    }
}
