//! What Redis packs into one string: compressed strings (LZF), listpacks, intsets.
//!
//! `None` says everywhere that the bytes are no such thing.

use std::borrow::Cow;

/// Bytes that one byte of LZF says at most: three of them say 264.
const LZF_RATIO: usize = 88;

/// The string of so many bytes that was compressed. No memory is taken for one that so few bytes cannot say.
pub(super) fn lzf(packed: &[u8], bytes: usize) -> Option<Vec<u8>> {
    if bytes > packed.len().saturating_mul(LZF_RATIO) {
        return None;
    }
    let mut out = Vec::with_capacity(bytes);
    let mut rest = packed;
    while let Some((&control, after)) = rest.split_first() {
        if control < 32 {
            let (literal, after) = after.split_at_checked(usize::from(control) + 1)?;
            out.extend_from_slice(literal);
            rest = after;
        } else {
            let (length, after) = match control >> 5 {
                7 => after.split_first().map(|(more, after)| (usize::from(*more) + 7, after))?,
                length => (usize::from(length), after),
            };
            let (&low, after) = after.split_first()?;
            let distance = (usize::from(control & 0x1f) << 8 | usize::from(low)) + 1;
            let from = out.len().checked_sub(distance)?;
            if length + 2 > bytes.checked_sub(out.len())? {
                return None;
            }
            // It may go on into what it makes itself.
            for at in from..from + length + 2 {
                out.push(out[at]);
            }
            rest = after;
        }
        if out.len() > bytes {
            return None;
        }
    }
    (out.len() == bytes).then_some(out)
}

/// An entry of a listpack.
pub(super) enum Entry<'b> {
    Text(&'b [u8]),
    Number(i64),
}

impl<'b> Entry<'b> {
    pub(super) fn text(&self) -> Cow<'b, [u8]> {
        match self {
            Self::Text(text) => Cow::Borrowed(text),
            Self::Number(number) => Cow::Owned(number.to_string().into_bytes()),
        }
    }

    /// Whether it is a number with a fraction, or without one.
    pub(super) fn is_score(&self) -> bool {
        let score = std::str::from_utf8(&self.text()).ok().and_then(|text| text.parse::<f64>().ok());
        score.is_some_and(|score| !score.is_nan())
    }
}

const LISTPACK_END: u8 = 0xff;

/// Goes over the entries of a listpack.
pub(super) fn listpack(listpack: &[u8], mut take: impl FnMut(Entry<'_>)) -> Option<()> {
    let ([b0, b1, b2, b3, c0, c1], mut rest) = listpack.split_first_chunk()?;
    if u32::from_le_bytes([*b0, *b1, *b2, *b3]) as usize != listpack.len() {
        return None;
    }
    let mut count = 0_usize;
    loop {
        let (&first, after) = rest.split_first()?;
        if first == LISTPACK_END {
            let told = u16::from_le_bytes([*c0, *c1]);
            // More than it can tell are not told.
            let is_right = usize::from(told) == count || told == u16::MAX;
            return (after.is_empty() && is_right).then_some(());
        }
        let (entry, after) = entry(first, after)?;
        rest = after.get(back_length_bytes(rest.len() - after.len())..)?;
        take(entry);
        count += 1;
    }
}

/// The entry that begins with this byte, and what is behind it.
fn entry(first: u8, rest: &[u8]) -> Option<(Entry<'_>, &[u8])> {
    match first {
        0x00..=0x7f => Some((Entry::Number(first.into()), rest)),
        0x80..=0xbf => text(usize::from(first & 0x3f), rest),
        0xc0..=0xdf => {
            let (low, rest) = rest.split_first()?;
            let bits = i64::from(first & 0x1f) << 8 | i64::from(*low);
            Some((Entry::Number(if bits < 1 << 12 { bits } else { bits - (1 << 13) }), rest))
        }
        0xe0..=0xef => {
            let (low, rest) = rest.split_first()?;
            text(usize::from(first & 0x0f) << 8 | usize::from(*low), rest)
        }
        0xf0 => {
            let (bytes, rest) = rest.split_first_chunk()?;
            text(u32::from_le_bytes(*bytes) as usize, rest)
        }
        0xf1 => rest.split_first_chunk().map(|(bytes, rest)| (Entry::Number(i16::from_le_bytes(*bytes).into()), rest)),
        0xf2 => {
            let ([b0, b1, b2], rest) = rest.split_first_chunk()?;
            // The sign is in the highest byte.
            Some((Entry::Number(i64::from(i32::from_le_bytes([0, *b0, *b1, *b2]) >> 8)), rest))
        }
        0xf3 => rest.split_first_chunk().map(|(bytes, rest)| (Entry::Number(i32::from_le_bytes(*bytes).into()), rest)),
        0xf4 => rest.split_first_chunk().map(|(bytes, rest)| (Entry::Number(i64::from_le_bytes(*bytes)), rest)),
        _ => None,
    }
}

/// An entry of so many bytes of text.
fn text(bytes: usize, rest: &[u8]) -> Option<(Entry<'_>, &[u8])> {
    let (text, rest) = rest.split_at_checked(bytes)?;
    Some((Entry::Text(text), rest))
}

/// Bytes of the length behind an entry, by which a listpack is read from its end.
fn back_length_bytes(entry_bytes: usize) -> usize {
    match entry_bytes {
        0..=127 => 1,
        128..=16_382 => 2,
        16_383..=2_097_150 => 3,
        2_097_151..=268_435_454 => 4,
        _ => 5,
    }
}

/// Goes over the numbers of an intset.
pub(super) fn intset(intset: &[u8], mut take: impl FnMut(i64)) -> Option<()> {
    let ([e0, e1, e2, e3, c0, c1, c2, c3], numbers) = intset.split_first_chunk()?;
    let width = u32::from_le_bytes([*e0, *e1, *e2, *e3]);
    let count = u32::from_le_bytes([*c0, *c1, *c2, *c3]) as usize;
    let is_right = matches!(width, 2 | 4 | 8) && count.checked_mul(width as usize) == Some(numbers.len());
    if !is_right {
        return None;
    }
    for number in numbers.chunks_exact(width as usize) {
        // The sign of the highest byte goes on to the left.
        let is_negative = number.last().is_some_and(|high| high >> 7 == 1);
        let mut bytes = if is_negative { [0xff; 8] } else { [0; 8] };
        bytes[..number.len()].copy_from_slice(number);
        take(i64::from_le_bytes(bytes));
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(bytes: &[u8]) -> Option<Vec<String>> {
        let mut found = Vec::new();
        listpack(bytes, |entry| found.push(String::from_utf8(entry.text().into_owned()).unwrap()))?;
        Some(found)
    }

    /// A listpack of entries, each without the length behind it.
    fn listpack_of(entries: &[&[u8]]) -> Vec<u8> {
        let mut body = Vec::new();
        for entry in entries {
            body.extend_from_slice(entry);
            // What is in it nobody looks at.
            body.resize(body.len() + back_length_bytes(entry.len()), 0);
        }
        body.push(LISTPACK_END);
        let mut bytes = ((body.len() + 6) as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(&(entries.len() as u16).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn every_entry_of_a_listpack_is_read() {
        let long = "x".repeat(5000);
        let middle = "y".repeat(300);
        let numbers: [(&[u8], i64); 13] = [
            (&[0x00], 0),
            (&[0x7f], 127),
            (&[0xc0, 0x80], 128),
            (&[0xcf, 0xff], 4095),
            (&[0xd0, 0x00], -4096),
            (&[0xdf, 0xff], -1),
            (&[0xf1, 0x00, 0x80], -32768),
            (&[0xf2, 0x70, 0x11, 0x01], 70_000),
            (&[0xf2, 0xff, 0xff, 0xff], -1),
            (&[0xf2, 0x00, 0x00, 0x80], -8_388_608),
            (&[0xf3, 0x00, 0x00, 0x00, 0x80], -2_147_483_648),
            (&[0xf4, 0, 0, 0, 0, 0, 0, 0, 0x80], i64::MIN),
            (&[0xf4, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f], i64::MAX),
        ];
        for (bytes, number) in numbers {
            assert_eq!(texts(&listpack_of(&[bytes])), Some(vec![number.to_string()]));
        }
        let middle_entry = [&[0xe1, 0x2c][..], middle.as_bytes()].concat();
        let long_entry = [&[0xf0, 0x88, 0x13, 0, 0][..], long.as_bytes()].concat();
        let whole = listpack_of(&[&[0x80][..], &b"\x82ab"[..], &middle_entry, &long_entry]);
        assert_eq!(texts(&whole), Some(vec![String::new(), "ab".into(), middle, long]));
        for cut in 0..whole.len() {
            assert_eq!(texts(&whole[..cut]), None);
        }
        let mut wrong = listpack_of(&[b"\x82ab"]);
        wrong[4] = 2;
        assert_eq!(texts(&wrong), None, "a count that is wrong");
        (wrong[4], wrong[5]) = (0xff, 0xff);
        assert_eq!(texts(&wrong), Some(vec!["ab".into()]), "a count that is not told");
        wrong[6] = 0xf5;
        assert_eq!(texts(&wrong), None, "an entry of no kind");
    }

    #[test]
    fn an_intset_has_as_many_numbers_as_it_says() {
        let read = |bytes: &[u8]| {
            let mut found = Vec::new();
            intset(bytes, |number| found.push(number)).map(|()| found)
        };
        assert_eq!(read(&[2, 0, 0, 0, 2, 0, 0, 0, 0xff, 0xff, 1, 0]), Some(vec![-1, 1]));
        assert_eq!(read(&[4, 0, 0, 0, 1, 0, 0, 0, 0x70, 0x11, 1, 0]), Some(vec![70_000]));
        assert_eq!(read(&[8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80]), Some(vec![i64::MIN]));
        assert_eq!(read(&[2, 0, 0, 0, 2, 0, 0, 0, 0xff, 0xff, 1]), None);
        assert_eq!(read(&[3, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(read(&[8, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), None);
    }

    #[test]
    fn what_was_compressed_comes_back_and_takes_no_memory_before() {
        // As Redis wrote 200 letters.
        let packed = [0x01, b'a', b'a', 0xe0, 0xbb, 0x00, 0x01, b'a', b'a'];
        assert_eq!(lzf(&packed, 200), Some(vec![b'a'; 200]));
        assert_eq!(lzf(&packed, 199), None);
        assert_eq!(lzf(&packed, 201), None);
        assert_eq!(lzf(&packed, usize::MAX), None);
        assert_eq!(lzf(&packed[..8], 200), None);
        assert_eq!(lzf(&[0x20, 0x00], 3), None, "there is nothing before it");
        assert_eq!(lzf(&[0x00, b'a', 0x20, 0x01], 4), None, "not so much before it");
        assert_eq!(lzf(&[0x01, b'a', b'b', 0x20, 0x01], 5), Some(b"ababa".to_vec()));
        assert_eq!(lzf(&[], 0), Some(Vec::new()));
    }
}
