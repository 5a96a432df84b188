//! Numbers with a fraction as Redis on x86 adds them: with 64 bits, and printed with 17 digits behind the point. So
//! sums of short decimal numbers are what people expect.

use std::cmp::Ordering;
use std::fmt;

use super::{Hexadecimal, hexadecimal};

/// `mantissa * 2^exponent`. The highest bit of a mantissa is set, but for 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extended {
    is_negative: bool,
    mantissa: u64,
    exponent: i32,
}

/// The place of the highest bit of the largest numbers, and of the smallest ones that are not 0.
const HIGHEST_BIT: i32 = 16_383;
const LOWEST_BIT: i32 = -16_445;
/// Longest text of a number, and the largest power of ten that is looked at: Redis' own limit, and more than the numbers have.
const TEXT_BYTES_MAX: usize = 5 << 10;
const POWER_MAX: i64 = 6_000;
/// Digits that are printed behind the point.
const DIGITS: u32 = 17;

/// What a text says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Finite(Extended),
    Infinite,
}

/// What Redis says of a sum that is infinite.
pub(super) const INFINITE: &str = "ERR increment would produce NaN or Infinity";

impl Number {
    pub(super) const ZERO: Self = Self::Finite(Extended { is_negative: false, mantissa: 0, exponent: 0 });

    /// `None`: the sum is infinite, or no number.
    pub(super) fn plus(self, other: Self) -> Option<Extended> {
        match (self, other) {
            (Self::Finite(one), Self::Finite(other)) => one.plus(other),
            _ => None,
        }
    }

    /// `None`: it is no number, or too large or too small for one.
    pub(super) fn read(text: &[u8]) -> Option<Self> {
        let (is_negative, rest) = match text {
            [b'-', rest @ ..] => (true, rest),
            [b'+', rest @ ..] => (false, rest),
            rest => (false, rest),
        };
        if rest.eq_ignore_ascii_case(b"inf") || rest.eq_ignore_ascii_case(b"infinity") {
            return Some(Self::Infinite);
        }
        if text.len() >= TEXT_BYTES_MAX {
            return None;
        }
        if let [b'0', b'x' | b'X', digits @ ..] = rest {
            let Hexadecimal { mantissa, exponent } = hexadecimal(digits)?;
            if mantissa == 0 {
                return Some(Self::ZERO);
            }
            let shift = mantissa.leading_zeros();
            let exponent = i32::try_from(exponent - i64::from(shift)).ok()?;
            let number = Extended { is_negative, mantissa: mantissa << shift, exponent };
            let is_in_range = (LOWEST_BIT..=HIGHEST_BIT).contains(&exponent.saturating_add(63));
            return is_in_range.then_some(Self::Finite(number));
        }
        let exponent_at = rest.iter().position(|byte| byte.eq_ignore_ascii_case(&b'e'));
        let (digits, mut power) = match exponent_at {
            Some(at) => (&rest[..at], power(&rest[at + 1..])?),
            None => (rest, 0),
        };
        let (mut whole, mut is_behind, mut count) = (Big::default(), false, 0);
        for byte in digits {
            match byte {
                b'0'..=b'9' => {
                    whole.multiply_add(10, u32::from(byte - b'0'));
                    power -= i64::from(is_behind);
                    count += 1;
                }
                b'.' if !is_behind => is_behind = true,
                _ => return None,
            }
        }
        if count == 0 {
            return None;
        }
        if whole.bits() == 0 {
            return Some(Self::ZERO);
        }
        if power > POWER_MAX || power < -POWER_MAX - count {
            return None;
        }
        let mut divisor = Big(vec![1]);
        let scaled = if power < 0 { &mut divisor } else { &mut whole };
        (0..power.abs()).for_each(|_| scaled.multiply_add(10, 0));
        let number = quotient(whole, divisor, is_negative)?;
        (number.highest_bit() >= LOWEST_BIT).then_some(Self::Finite(number))
    }
}

/// The power of ten behind the `e`, as far as it matters.
fn power(text: &[u8]) -> Option<i64> {
    let (is_negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let power = digits.iter().fold(0_i64, |power, digit| (power * 10 + i64::from(digit - b'0')).min(1 << 40));
    Some(if is_negative { -power } else { power })
}

/// Bits of a quotient beside the 64 that count, so that rounding is right.
const SPARE_BITS: i64 = 2;

fn quotient(whole: Big, divisor: Big, is_negative: bool) -> Option<Extended> {
    let shift = divisor.bits() as i64 + 64 + SPARE_BITS - whole.bits() as i64;
    let (mut rest, divisor) = if shift < 0 {
        (whole, divisor.shifted(shift.unsigned_abs() as usize))
    } else {
        (whole.shifted(shift as usize), divisor)
    };
    let mut quotient = 0_u128;
    for bit in (0..=64 + SPARE_BITS).rev() {
        let part = divisor.shifted(bit as usize);
        if rest.compare(&part) != Ordering::Less {
            rest.subtract(&part);
            quotient |= 1 << bit;
        }
    }
    Extended::rounded(is_negative, quotient, -shift as i32, rest.bits() > 0)
}

impl Extended {
    /// The place of the highest bit.
    fn highest_bit(&self) -> i32 {
        self.exponent + 63
    }

    /// The number nearest to `value * 2^exponent`, which has less than one unit more if `is_more`. `None`: it is infinite.
    fn rounded(is_negative: bool, value: u128, exponent: i32, is_more: bool) -> Option<Self> {
        if value == 0 {
            return Some(Self { is_negative, mantissa: 0, exponent: 0 });
        }
        let above = 64 - value.leading_zeros() as i32;
        let (mut mantissa, mut exponent) = if above <= 0 {
            (value << -above, exponent + above)
        } else {
            (half_even(value, above as u32, is_more), exponent + above)
        };
        if mantissa >> 64 > 0 {
            (mantissa, exponent) = (mantissa >> 1, exponent + 1);
        }
        let number = Self { is_negative, mantissa: mantissa as u64, exponent };
        (number.highest_bit() <= HIGHEST_BIT).then_some(number)
    }

    /// `None`: the sum is infinite.
    fn plus(self, other: Self) -> Option<Self> {
        /// As far as the larger mantissa can be shifted, with room for a carry.
        const ROOM: i32 = 62;
        if self.mantissa == 0 || other.mantissa == 0 {
            return Some(if other.mantissa == 0 { self } else { other });
        }
        let (large, small) = if (self.exponent, self.mantissa) < (other.exponent, other.mantissa) {
            (other, self)
        } else {
            (self, other)
        };
        let apart = large.exponent - small.exponent;
        let shift = apart.min(ROOM);
        let (one, other) = (u128::from(large.mantissa) << shift, u128::from(small.mantissa));
        let lost = (apart - shift) as u32;
        let kept = other.checked_shr(lost).unwrap_or(0);
        let is_more = lost > 0 && kept.checked_shl(lost) != Some(other);
        let exponent = large.exponent - shift;
        if large.is_negative == small.is_negative {
            return Self::rounded(large.is_negative, one + kept, exponent, is_more);
        }
        let difference = one - kept - u128::from(is_more);
        // What cancels out has no sign.
        Self::rounded(large.is_negative && difference > 0, difference, exponent, is_more)
    }
}

/// A value without its lowest bits, of which there is at least one, rounded to the nearest, and to an even one in between.
fn half_even(value: u128, bits: u32, is_more: bool) -> u128 {
    let (kept, half) = (value >> bits, 1 << (bits - 1));
    let lost = value & ((1 << bits) - 1);
    let is_up = lost > half || lost == half && (is_more || kept & 1 == 1);
    kept + u128::from(is_up)
}

impl fmt::Display for Extended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ONE: u128 = 10_u128.pow(DIGITS);
        let text = if self.exponent >= 0 {
            let mantissa = [self.mantissa as u32, (self.mantissa >> 32) as u32];
            Big(mantissa.to_vec()).shifted(self.exponent as usize).decimal()
        } else {
            let (scaled, bits) = (u128::from(self.mantissa) * ONE, self.exponent.unsigned_abs());
            let digits = if bits < u128::BITS { half_even(scaled, bits, false) } else { 0 };
            let text = format!("{}.{:017}", digits / ONE, digits % ONE);
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        };
        let sign = if self.is_negative && text != "0" { "-" } else { "" };
        write!(f, "{sign}{text}")
    }
}

/// A whole number of any length: words of 32 bits, the lowest first.
#[derive(Clone, Debug, Default)]
struct Big(Vec<u32>);

impl Big {
    fn bits(&self) -> usize {
        let top = self.0.iter().rposition(|word| *word > 0);
        top.map_or(0, |at| 32 * (at + 1) - self.0[at].leading_zeros() as usize)
    }

    fn multiply_add(&mut self, by: u32, more: u32) {
        let mut carry = u64::from(more);
        for word in &mut self.0 {
            carry += u64::from(*word) * u64::from(by);
            *word = carry as u32;
            carry >>= 32;
        }
        if carry > 0 {
            self.0.push(carry as u32);
        }
    }

    fn shifted(&self, bits: usize) -> Self {
        let mut words = vec![0; bits / 32];
        let mut carry = 0_u64;
        for word in self.0.iter().chain([&0]) {
            carry |= u64::from(*word) << (bits % 32);
            words.push(carry as u32);
            carry >>= 32;
        }
        Self(words)
    }

    fn word(&self, at: usize) -> u32 {
        self.0.get(at).copied().unwrap_or(0)
    }

    fn compare(&self, other: &Self) -> Ordering {
        let words = (0..self.0.len().max(other.0.len())).rev();
        words.fold(Ordering::Equal, |order, at| order.then(self.word(at).cmp(&other.word(at))))
    }

    /// Takes away what is not larger.
    fn subtract(&mut self, other: &Self) {
        let mut borrow = false;
        for at in 0..self.0.len() {
            let (less, one) = self.0[at].overflowing_sub(other.word(at));
            let (less, two) = less.overflowing_sub(u32::from(borrow));
            (self.0[at], borrow) = (less, one || two);
        }
    }

    fn decimal(mut self) -> String {
        const PART: u64 = 1_000_000_000;
        let mut parts = Vec::new();
        while self.bits() > 0 || parts.is_empty() {
            let mut rest = 0;
            for word in self.0.iter_mut().rev() {
                let value = rest << 32 | u64::from(*word);
                (*word, rest) = ((value / PART) as u32, value % PART);
            }
            parts.push(rest);
        }
        let first = parts.pop().unwrap_or(0).to_string();
        parts.iter().rev().fold(first, |text, part| format!("{text}{part:09}"))
    }
}

#[cfg(test)]
mod tests {
    use super::{Extended, Number};

    fn number(text: &str) -> Extended {
        match Number::read(text.as_bytes()) {
            Some(Number::Finite(number)) => number,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn sums_are_those_of_the_x87() {
        for (one, other, sum) in [
            ("0.1", "0.2", "0.3"),
            ("10.50", "0.1", "10.6"),
            ("10.6", "-5", "5.6"),
            ("5.0e3", "2.0e2", "5200"),
            ("3", "-3", "0"),
            ("-1", "1", "0"),
            ("0", "-0", "0"),
            ("-0.5", "0.25", "-0.25"),
            ("1e-18", "0", "0"),
            ("-1e-18", "0", "0"),
            ("1e17", "0.5", "100000000000000000.5"),
            ("18446744073709551615", "0", "18446744073709551615"),
            ("18446744073709551615", "1", "18446744073709551616"),
            ("1e20", "1", "100000000000000000000"),
            ("1e30", "-1e30", "0"),
            ("4.1000001", "1e-7", "4.1000002"),
            (".5", "5.", "5.5"),
            ("1", "1e-4000", "1"),
        ] {
            assert_eq!(number(one).plus(number(other)).unwrap().to_string(), sum, "{one} + {other}");
            assert_eq!(number(other).plus(number(one)).unwrap().to_string(), sum, "{other} + {one}");
        }
        assert_eq!(number("2e4931").to_string().len(), 4932);
        assert_eq!(number("1.1e4932").plus(number("1.1e4932")), None);
    }

    #[test]
    fn what_is_no_number_is_told() {
        for text in ["", "-", "+", ".", "e5", "1e", "1e+", "x", "1x", "1 ", " 1", "1..2", "nan", "1e5000", "1e-5000"] {
            assert_eq!(Number::read(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Number::read(b"0e999999999999999999").map(|_| ()), Some(()));
        assert_eq!(Number::read(b"1e999999999999999999999"), None);
        assert_eq!(Number::read(&[b'1'; 6_000]), None);
        for text in ["inf", "-inf", "+Infinity"] {
            assert_eq!(Number::read(text.as_bytes()), Some(Number::Infinite), "{text}");
        }
    }
}
