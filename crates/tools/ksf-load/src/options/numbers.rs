//! Numbers as the original tools took them: decimal, hexadecimal, fraction or exponent, and one suffix.
//!
//! | suffix | factor | suffix | factor |
//! |---|---|---|---|
//! | `k m g t p e z y` | 2^10, 2^20, ... 2^80 | `K M G T P E Z Y` | 10^3, 10^6, ... 10^24 |
//! | `b` | 512 (a disk block) | `w` | 4 (a machine word, an `int`) |
//!
//! Lower case is binary and upper case is decimal, so `-c 9M` is 9,000,000 and `-l 64k` is 65,536.
//! A fraction of one is cut off after the suffix was applied: `1.5k` is 1536, `1.1k` is 1126.
//! The arithmetic is exact: no value is rounded through a floating-point number.
//! The originals ignored what followed the suffix (`2kfoo` was 2048); here that is an error.

use std::fmt;
use std::time::Duration;

/// Why a text is not a number this option can take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NumberError {
    /// The text is not a number with at most one known suffix.
    Invalid {
        /// The offending text.
        text: String,
    },
    /// The text is a number, but outside the bounds of the option.
    OutOfRange {
        /// The offending text.
        text: String,
        /// The smallest value the option takes.
        min: u64,
        /// The largest value the option takes.
        max: u64,
    },
}

impl fmt::Display for NumberError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NumberError::Invalid { text } => write!(
                f,
                "`{text}` is not a number (use digits, 0x.., 1.5, 1e3 and at most one suffix: \
                 k m g t p e z y = powers of 1024, K M G T P E Z Y = powers of 1000, b = 512, w = 4)"
            ),
            NumberError::OutOfRange { text, min, max } => {
                write!(f, "`{text}` is out of range (from {min} to {max})")
            }
        }
    }
}

impl std::error::Error for NumberError {}

/// Parses a number of any size that fits 64 bits.
pub fn parse_u64(text: &str) -> Result<u64, NumberError> {
    parse_in(text, 0, u64::MAX)
}

/// Parses a number and checks that it lies in `min..=max`.
pub fn parse_in(text: &str, min: u64, max: u64) -> Result<u64, NumberError> {
    let out_of_range = || NumberError::OutOfRange { text: text.to_string(), min, max };
    match evaluate(text) {
        Ok(value) if (min..=max).contains(&value) => Ok(value),
        Ok(_) | Err(Failure::TooLarge | Failure::Negative) => Err(out_of_range()),
        Err(Failure::NotANumber) => Err(NumberError::Invalid { text: text.to_string() }),
    }
}

/// Parses a time: seconds with an optional fraction, or a number with `us`, `ms`, `s`, `m` or `h`.
pub fn parse_duration(text: &str) -> Result<Duration, NumberError> {
    const UNITS: [(&str, f64); 5] = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let invalid = || NumberError::Invalid { text: text.to_string() };
    let (number, unit) =
        UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).unwrap_or((text, 1.0));
    // f64's parser also takes `inf` and `nan`, which are no times.
    if !number.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return Err(invalid());
    }
    let seconds = number.parse::<f64>().map_err(|_| invalid())? * unit;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|time| *time <= DURATION_MAX)
        .ok_or_else(|| NumberError::OutOfRange { text: text.to_string(), min: 0, max: DURATION_MAX.as_secs() })
}

/// A hundred years: every time in nanoseconds fits 64 bits.
const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Parses a rate: a number, optionally followed by `/s`.
pub fn parse_rate(text: &str) -> Result<u64, NumberError> {
    parse_in(text.strip_suffix("/s").unwrap_or(text), 1, 1_000_000_000)
}

#[derive(Debug, PartialEq, Eq)]
enum Failure {
    NotANumber,
    Negative,
    TooLarge,
}

/// A number as written: `digits * 10^exponent`, before the suffix.
struct Mantissa {
    digits: u128,
    exponent: i32,
}

fn evaluate(text: &str) -> Result<u64, Failure> {
    let unsigned = text.trim_start();
    let (negative, unsigned) = match unsigned.as_bytes().first() {
        Some(b'-') => (true, &unsigned[1..]),
        Some(b'+') => (false, &unsigned[1..]),
        _ => (false, unsigned),
    };
    let (mantissa, rest) = match unsigned.strip_prefix("0x").or_else(|| unsigned.strip_prefix("0X")) {
        Some(hexadecimal) => take_hexadecimal(hexadecimal)?,
        None => take_decimal(unsigned)?,
    };
    let factor = match rest.len() {
        0 => 1,
        1 => factor_of(rest.as_bytes()[0]).ok_or(Failure::NotANumber)?,
        _ => return Err(Failure::NotANumber),
    };
    if mantissa.digits == 0 {
        return Ok(0);
    }
    if negative {
        return Err(Failure::Negative);
    }
    let scaled = mantissa.digits.checked_mul(factor).ok_or(Failure::TooLarge)?;
    let power = 10u128.checked_pow(mantissa.exponent.unsigned_abs());
    let value = match (mantissa.exponent >= 0, power) {
        (true, Some(power)) => scaled.checked_mul(power).ok_or(Failure::TooLarge)?,
        (true, None) => return Err(Failure::TooLarge),
        (false, Some(power)) => scaled / power,
        (false, None) => 0,
    };
    u64::try_from(value).map_err(|_| Failure::TooLarge)
}

fn take_hexadecimal(text: &str) -> Result<(Mantissa, &str), Failure> {
    let end = text.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(text.len());
    if end == 0 {
        return Err(Failure::NotANumber);
    }
    let digits = u128::from_str_radix(&text[..end], 16).map_err(|_| Failure::TooLarge)?;
    let exponent = 0;
    Ok((Mantissa { digits, exponent }, &text[end..]))
}

fn take_decimal(text: &str) -> Result<(Mantissa, &str), Failure> {
    let (whole, rest) = split_digits(text);
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(after) => split_digits(after),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(Failure::NotANumber);
    }
    let (power, rest) = take_exponent(rest)?;
    // Zeros at the end of a fraction change nothing but would use up the 128 bits.
    let fraction = fraction.trim_end_matches('0');
    let mut digits: u128 = 0;
    for digit in whole.bytes().chain(fraction.bytes()) {
        digits = digits
            .checked_mul(10)
            .and_then(|value| value.checked_add(u128::from(digit - b'0')))
            .ok_or(Failure::TooLarge)?;
    }
    let places = i32::try_from(fraction.len()).map_err(|_| Failure::TooLarge)?;
    let exponent = power.saturating_sub(places);
    Ok((Mantissa { digits, exponent }, rest))
}

/// `e3`, `E+3`, `e-3`; a bare `e` or `E` is left for the suffix (2^60 and 10^18).
fn take_exponent(text: &str) -> Result<(i32, &str), Failure> {
    let Some(after) = text.strip_prefix(['e', 'E']) else { return Ok((0, text)) };
    let (sign, unsigned) = match after.as_bytes().first() {
        Some(b'-') => (-1, &after[1..]),
        Some(b'+') => (1, &after[1..]),
        _ => (1, after),
    };
    let (digits, rest) = split_digits(unsigned);
    if digits.is_empty() {
        return Ok((0, text));
    }
    let power: i32 = digits.parse().map_err(|_| Failure::TooLarge)?;
    Ok((sign * power, rest))
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

fn factor_of(suffix: u8) -> Option<u128> {
    const LADDER: &[u8; 8] = b"kmgtpezy";
    let step = LADDER.iter().position(|&letter| letter == suffix.to_ascii_lowercase());
    match (suffix, step) {
        (b'b', _) => Some(512),
        (b'w', _) => Some(4),
        (letter, Some(step)) if letter.is_ascii_lowercase() => Some(1 << (10 * (step + 1))),
        (_, Some(step)) => Some(1000u128.pow(step as u32 + 1)),
        (_, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_values_measured_on_the_original() {
        for (text, value) in [
            ("1k", 1024),
            ("1K", 1000),
            ("1.5k", 1536),
            ("0x10", 16),
            ("1e3", 1000),
            ("2b", 1024),
            ("3w", 12),
            ("9M", 9_000_000),
            ("1m", 1 << 20),
            ("1g", 1 << 30),
            ("1t", 1 << 40),
            ("1p", 1 << 50),
            ("1e", 1 << 60),
            ("1E", 1_000_000_000_000_000_000),
            ("1e3k", 1_024_000),
            ("0x10k", 16 * 1024),
            (".5k", 512),
            ("1.1k", 1126),
            ("0", 0),
            ("-0", 0),
            ("+7", 7),
            ("18446744073709551615", u64::MAX),
            ("0xffffffffffffffff", u64::MAX),
            ("1500e-3k", 1536),
            ("1e-400", 0),
        ] {
            assert_eq!(parse_u64(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn what_is_no_number_is_named() {
        for text in ["", "x", "1x", "2kfoo", "1kk", "k", "0x", ".", "1..2", "inf", "nan", "1 k", "e3"] {
            assert_eq!(parse_u64(text), Err(NumberError::Invalid { text: text.to_string() }), "{text}");
        }
    }

    #[test]
    fn what_does_not_fit_is_out_of_range() {
        for text in
            ["-1", "-1k", "18446744073709551616", "1z", "1Y", "1e30", "99999999999999999999999999999999999999999"]
        {
            assert!(matches!(parse_u64(text), Err(NumberError::OutOfRange { .. })), "{text}");
        }
        assert_eq!(
            parse_in("70000", 1, 65535),
            Err(NumberError::OutOfRange { text: "70000".into(), min: 1, max: 65535 })
        );
        assert!(parse_in("0", 1, 65535).is_err());
    }

    #[test]
    fn times_and_rates() {
        for (text, ms) in [
            ("2", 2000),
            ("0.5", 500),
            ("250ms", 250),
            ("1500us", 1),
            ("3s", 3000),
            ("2m", 120_000),
            ("1h", 3_600_000),
            (".5", 500),
        ] {
            assert_eq!(parse_duration(text).unwrap().as_millis(), ms, "{text}");
        }
        for text in ["", "s", "inf", "nan", "-1", "1x", "1e300", "ms"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(parse_rate("10k/s"), Ok(10_240));
        assert_eq!(parse_rate("10K"), Ok(10_000));
        assert!(parse_rate("0/s").is_err());
        assert!(parse_rate("5/m").is_err());
    }

    proptest! {
        #[test]
        fn every_integer_reads_back(value: u64) {
            prop_assert_eq!(parse_u64(&value.to_string()), Ok(value));
            prop_assert_eq!(parse_u64(&format!("{value:#x}")), Ok(value));
        }

        #[test]
        fn a_suffix_multiplies(value in 0u64..1 << 30, step in 0usize..3) {
            let lower = b"kmg"[step] as char;
            let upper = b"KMG"[step] as char;
            prop_assert_eq!(parse_u64(&format!("{value}{lower}")), Ok(value << (10 * (step + 1))));
            prop_assert_eq!(parse_u64(&format!("{value}{upper}")), Ok(value * 1000u64.pow(step as u32 + 1)));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = parse_u64(&text);
        }
    }
}
