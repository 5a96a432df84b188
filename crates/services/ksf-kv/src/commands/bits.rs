//! Strings as rows of bits, of which the first is the highest one of the first byte.

use super::strings::{TOO_LONG, bytes_max, string};
use super::{Call, Failed, NOT_AN_INTEGER, Result, SYNTAX, integer};

const NO_OFFSET: &str = "ERR bit offset is not an integer or out of range";
const NO_BIT: &str = "ERR bit is not an integer or out of range";

/// The byte of a bit, and the bit in it.
fn place(offset: &[u8]) -> Result<(usize, u8)> {
    let offset = integer(offset).and_then(|offset| usize::try_from(offset).ok());
    let offset = offset.filter(|offset| offset / 8 < super::strings::STRING_BYTES_MAX).ok_or(NO_OFFSET)?;
    Ok((offset / 8, 1 << (7 - offset % 8)))
}

pub(super) fn getbit(call: &mut Call<'_, '_>) -> Result {
    let (key, (byte, bit)) = (call.args[1], place(call.args[2])?);
    let is_set = call.read(&[key], |view| {
        let value = string(view.get(key))?.map_or(&[][..], |got| got.value());
        Ok::<_, Failed>(value.get(byte).is_some_and(|byte| byte & bit != 0))
    })?;
    call.write().integer(i64::from(is_set));
    Ok(())
}

pub(super) fn setbit(call: &mut Call<'_, '_>) -> Result {
    let (key, (byte, bit)) = (call.args[1], place(call.args[2])?);
    let wanted = integer(call.args[3]).filter(|bit| (0..=1).contains(bit)).ok_or(NO_BIT)? == 1;
    let bytes_max = bytes_max(call);
    let was_set = call.update(&[key], |update| {
        let got = string(update.get(key))?;
        if byte >= bytes_max {
            return Err(Failed::from(TOO_LONG));
        }
        let (mut value, expires_ms) = got.map_or((Vec::new(), None), |got| (got.value().to_vec(), got.expires_ms));
        let is_longer = byte >= value.len();
        value.resize(value.len().max(byte + 1), 0);
        let was_set = value[byte] & bit != 0;
        if is_longer || was_set != wanted {
            value[byte] = if wanted { value[byte] | bit } else { value[byte] & !bit };
            update.set(key, value, expires_ms);
        }
        Ok(was_set)
    })??;
    call.write().integer(i64::from(was_set));
    Ok(())
}

/// The bits that are set from one to the other, both among the bits of `value`.
fn count(value: &[u8], first: usize, last: usize) -> u32 {
    let (from, to) = (first / 8, last / 8);
    let whole: u32 = value[from..=to].iter().map(|byte| byte.count_ones()).sum();
    let before = value[from] & !(0xff >> (first % 8));
    let behind = value[to] & (0x7f >> (last % 8));
    whole - before.count_ones() - behind.count_ones()
}

pub(super) fn bitcount(call: &mut Call<'_, '_>) -> Result {
    let args = call.args;
    let key = args[1];
    let set = call.read(&[key], |view| {
        let Some(got) = string(view.get(key))? else { return Ok(0) };
        let (start, end, unit) = match *args {
            [_, _] => (0, -1, None),
            [_, _, start, end] => (number(start)?, number(end)?, None),
            [_, _, start, end, unit] => (number(start)?, number(end)?, Some(unit.to_ascii_uppercase())),
            _ => return Err(Failed::from(SYNTAX)),
        };
        if start < 0 && end < 0 && start > end {
            return Ok(0);
        }
        let bits = match unit.as_deref() {
            None | Some(b"BYTE") => 8,
            Some(b"BIT") => 1,
            Some(_) => return Err(Failed::from(SYNTAX)),
        };
        let value = got.value();
        let length = (value.len() * 8 / bits) as i64;
        let from_end = |at: i64| if at < 0 { at.saturating_add(length).max(0) } else { at };
        let (start, end) = (from_end(start), from_end(end).min(length - 1));
        if start > end {
            return Ok(0);
        }
        Ok(count(value, start as usize * bits, end as usize * bits + bits - 1))
    })?;
    call.write().integer(i64::from(set));
    Ok(())
}

fn number(text: &[u8]) -> Result<i64> {
    integer(text).ok_or_else(|| NOT_AN_INTEGER.into())
}

#[cfg(test)]
mod tests {
    use super::count;

    #[test]
    fn bits_are_counted_one_by_one() {
        let value = [0b1010_0110, 0xff, 0, 0b0000_0001];
        let is_set = |bit: usize| u32::from(value[bit / 8] >> (7 - bit % 8) & 1);
        for (first, last) in (0..32).flat_map(|first| (first..32).map(move |last| (first, last))) {
            assert_eq!(count(&value, first, last), (first..=last).map(is_set).sum::<u32>(), "{first} {last}");
        }
    }
}
