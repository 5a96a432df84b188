//! Conditions on the version of a key (RFC 9110, section 13), and ranges (section 14).

use super::response::tag;

/// Fields of a request whose effect depends on the state of the key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Conditions<'m> {
    pub(super) range: Option<&'m [u8]>,
    pub(super) if_range: Option<&'m [u8]>,
    pub(super) if_match: Option<&'m [u8]>,
    pub(super) if_none_match: Option<&'m [u8]>,
}

/// Requested part of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    /// From the first byte to the last.
    Bytes {
        first: usize,
        last: usize,
    },
    /// An unsatisfiable range.
    Nothing,
}

impl Conditions<'_> {
    /// Returns the status of a request that must not be executed. `version` is that of the key, `None` if it is absent. A malformed
    /// list of tags refuses every write.
    pub(super) fn status(&self, version: Option<u64>, is_read: bool) -> Option<u16> {
        if self.if_match.is_some_and(|list| names(list, version, false) != Some(true)) {
            return Some(412);
        }
        let is_known = self.if_none_match.is_some_and(|list| names(list, version, true).unwrap_or(!is_read));
        is_known.then_some(if is_read { 304 } else { 412 })
    }

    /// Returns the requested part of a value of `length` bytes. It is the whole for a malformed range, for several ranges, and if
    /// `If-Range` names another version.
    pub(super) fn part(&self, version: u64, length: usize) -> Part {
        let is_same = self.if_range.is_none_or(|given| given.trim_ascii() == tag(version).to_string().as_bytes());
        match self.range {
            Some(range) if is_same => part(range, length).unwrap_or(Part::Whole),
            _ => Part::Whole,
        }
    }
}

/// Returns true if a list of tags (RFC 9110, sections 8.8.3 and 13.1.1), or `*`, contains the tag of a version. Weak tags match only
/// if `is_weak`. `None`: the list is malformed.
fn names(list: &[u8], version: Option<u64>, is_weak: bool) -> Option<bool> {
    if list.trim_ascii() == b"*" {
        return Some(version.is_some());
    }
    let own = version.map(|version| tag(version).to_string());
    let (mut has, mut needs_comma, mut rest) = (false, false, list);
    loop {
        rest = rest.trim_ascii_start();
        if let Some(behind) = rest.strip_prefix(b",") {
            (needs_comma, rest) = (false, behind);
            continue;
        }
        if rest.is_empty() {
            return Some(has);
        }
        let strong = rest.strip_prefix(b"W/");
        let opaque = strong.unwrap_or(rest).strip_prefix(b"\"")?;
        let end = opaque.iter().position(|byte| *byte == b'"')?;
        // A tag has no spaces and no control characters. Commas and asterisks in it have no meaning.
        if needs_comma || !opaque[..end].iter().all(|byte| matches!(byte, 0x21..=0x7e | 0x80..)) {
            return None;
        }
        let (given, behind) = strong.unwrap_or(rest).split_at(end + 2);
        has |= (is_weak || strong.is_none()) && own.as_ref().is_some_and(|own| own.as_bytes() == given);
        (needs_comma, rest) = (true, behind);
    }
}

fn part(range: &[u8], length: usize) -> Option<Part> {
    const UNIT: &[u8] = b"bytes=";
    let (unit, range) = range.trim_ascii().split_at_checked(UNIT.len())?;
    let range = range.trim_ascii();
    if !unit.eq_ignore_ascii_case(UNIT) || range.contains(&b',') {
        return None;
    }
    let dash = range.iter().position(|byte| *byte == b'-')?;
    let (first, last) = (&range[..dash], &range[dash + 1..]);
    if first.is_empty() {
        let count = number(last)?;
        return match (count, length) {
            (0, _) => Some(Part::Nothing),
            // Content-Range cannot express an empty range.
            (_, 0) => None,
            _ => Some(Part::Bytes { first: length.saturating_sub(count), last: length - 1 }),
        };
    }
    let first = number(first)?;
    let last = if last.is_empty() { usize::MAX } else { number(last)? };
    if last < first {
        return None;
    }
    Some(if first < length { Part::Bytes { first, last: last.min(length - 1) } } else { Part::Nothing })
}

/// Parses digits without a sign; saturates.
fn number(digits: &[u8]) -> Option<usize> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_usize, |number, digit| {
        let digit = char::from(*digit).to_digit(10)?;
        Some(number.saturating_mul(10).saturating_add(digit as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_rfc_9110() {
        let bytes = |first, last| Some(Part::Bytes { first, last });
        for (range, length, wanted) in [
            ("bytes=0-0", 10, bytes(0, 0)),
            ("bytes=0-499", 10, bytes(0, 9)),
            ("Bytes= 2-3 ", 10, bytes(2, 3)),
            ("bytes=9-", 10, bytes(9, 9)),
            ("bytes=10-", 10, Some(Part::Nothing)),
            ("bytes=10-12", 10, Some(Part::Nothing)),
            ("bytes=-3", 10, bytes(7, 9)),
            ("bytes=-30", 10, bytes(0, 9)),
            ("bytes=-0", 10, Some(Part::Nothing)),
            ("bytes=-3", 0, None),
            ("bytes=0-", 0, Some(Part::Nothing)),
            ("bytes=0-99999999999999999999999", 10, bytes(0, 9)),
            ("bytes=99999999999999999999999-", 10, Some(Part::Nothing)),
            ("bytes=3-2", 10, None),
            ("bytes=-", 10, None),
            ("bytes=", 10, None),
            ("bytes=1", 10, None),
            ("bytes=+1-2", 10, None),
            ("bytes=1-2-3", 10, None),
            ("bytes=0-1,3-4", 10, None),
            ("lines=0-1", 10, None),
        ] {
            assert_eq!(part(range.as_bytes(), length), wanted, "{range} of {length}");
        }
    }

    #[test]
    fn conditions_are_those_of_rfc_9110() {
        let (none, some) = (None, Some(0x1f));
        let status = |is_match: bool, list: &'static str, version, is_read| {
            let list = Some(list.as_bytes());
            let conditions = if is_match {
                Conditions { if_match: list, ..Conditions::default() }
            } else {
                Conditions { if_none_match: list, ..Conditions::default() }
            };
            conditions.status(version, is_read)
        };
        for (list, wanted) in [
            ("\"1f\"", None),
            ("\"1\", \"1f\"", None),
            ("*", None),
            ("W/\"1f\"", Some(412)),
            ("1f", Some(412)),
            ("\"1F\"", Some(412)),
            ("", Some(412)),
            (", \"a,b\" ,, \"1f\",", None),
            ("\"*\",\"1f\"", None),
            ("\"a,*,b\"", Some(412)),
            ("\"a,\"1f\",b\"", Some(412)),
            ("\"zz\", *", Some(412)),
            ("*, \"zz\"", Some(412)),
            ("\"zz\" \"1f\"", Some(412)),
            ("\"1f\" \"zz\"", Some(412)),
            ("\"1f", Some(412)),
            ("\"1f\", \"a b\"", Some(412)),
        ] {
            assert_eq!(status(true, list, some, false), wanted, "{list}");
            assert_eq!(status(true, list, none, false), Some(412), "{list}");
        }
        for (list, is_known) in [
            ("\"1f\"", true),
            ("\"2\",W/\"1f\"", true),
            ("*", true),
            ("\"2\"", false),
            ("\"a,*,b\"", false),
            ("\"a,W/\", \"b\"", false),
        ] {
            assert_eq!(status(false, list, some, true), is_known.then_some(304), "{list}");
            assert_eq!(status(false, list, some, false), is_known.then_some(412), "{list}");
            assert_eq!(status(false, list, none, false), None, "{list}");
        }
        for malformed in ["1f", "\"2\", *", "\"1f"] {
            assert_eq!(status(false, malformed, some, true), None, "{malformed}");
            assert_eq!([some, none].map(|version| status(false, malformed, version, false)), [Some(412); 2]);
        }
        let ranged = |if_range| Conditions { range: Some(b"bytes=0-0"), if_range, ..Conditions::default() };
        let one = Part::Bytes { first: 0, last: 0 };
        for (if_range, wanted) in [
            (None, one),
            (Some("\"1f\""), one),
            (Some("\"2\""), Part::Whole),
            (Some("W/\"1f\""), Part::Whole),
            (Some("*"), Part::Whole),
            (Some("\"x\", \"1f\""), Part::Whole),
            (Some("Sun, 06 Nov 1994 08:49:37 GMT"), Part::Whole),
        ] {
            assert_eq!(ranged(if_range.map(str::as_bytes)).part(0x1f, 10), wanted, "{if_range:?}");
        }
    }
}
