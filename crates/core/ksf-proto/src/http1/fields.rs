//! The fields that decide where a message ends and whether the connection stays.

use super::body::BodyLength;

/// What the fields of a head say, taken together.
#[derive(Debug, Default)]
pub(super) struct Fields<'h> {
    pub(super) hosts: usize,
    /// The last `Host`.
    pub(super) host: &'h [u8],
    pub(super) max_forwards: Option<&'h [u8]>,
    pub(super) max_forwards_twice: bool,
    pub(super) length: Option<u64>,
    pub(super) chunked: bool,
    /// `Connection: close` and `Connection: keep-alive`.
    pub(super) close: bool,
    pub(super) keep_alive: bool,
    pub(super) expects_continue: bool,
    pub(super) expects_other: bool,
}

/// Fields that leave the end of the message in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Length,
    TwoLengths,
    Coding,
    MaxForwards,
}

pub(super) fn read_fields<'h>(fields: &[httparse::Header<'h>]) -> Result<Fields<'h>, Trouble> {
    let mut all = Fields::default();
    for field in fields {
        // By length first: few fields matter, and every request has several that do not.
        match field.name.len() {
            4 if field.name.eq_ignore_ascii_case("host") => {
                all.hosts += 1;
                all.host = field.value;
            }
            6 if field.name.eq_ignore_ascii_case("expect") => {
                let known = field.value.trim_ascii().eq_ignore_ascii_case(b"100-continue");
                all.expects_continue |= known;
                all.expects_other |= !known;
            }
            10 if field.name.eq_ignore_ascii_case("connection") => {
                for option in options(field.value) {
                    all.close |= option.eq_ignore_ascii_case(b"close");
                    all.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                }
            }
            12 if field.name.eq_ignore_ascii_case("max-forwards") => {
                all.max_forwards_twice |= all.max_forwards.replace(field.value.trim_ascii()).is_some();
            }
            14 if field.name.eq_ignore_ascii_case("content-length") => {
                // A second one is refused even if it says the same: others may take either.
                if all.length.is_some() {
                    return Err(Trouble::Length);
                }
                all.length = Some(number(field.value.trim_ascii()).ok_or(Trouble::Length)?);
            }
            17 if field.name.eq_ignore_ascii_case("transfer-encoding") => {
                if all.chunked || !field.value.trim_ascii().eq_ignore_ascii_case(b"chunked") {
                    return Err(Trouble::Coding);
                }
                all.chunked = true;
            }
            _ => {}
        }
    }
    if all.chunked && all.length.is_some() { Err(Trouble::TwoLengths) } else { Ok(all) }
}

impl Fields<'_> {
    /// How many proxies a request may pass. What is above all numbers is the largest (RFC 9110, section 7.6.2).
    pub(super) fn max_forwards(&self) -> Result<Option<u64>, Trouble> {
        match self.max_forwards {
            None => Ok(None),
            Some(digits) if !self.max_forwards_twice && is_digits(digits) => {
                let add = |number: u64, digit: &u8| number.saturating_mul(10).saturating_add(u64::from(digit - b'0'));
                Ok(Some(digits.iter().fold(0, add)))
            }
            Some(_) => Err(Trouble::MaxForwards),
        }
    }

    /// The length the fields announce, if they do.
    pub(super) fn body(&self) -> Option<BodyLength> {
        if self.chunked { Some(BodyLength::Chunked) } else { self.length.map(BodyLength::Fixed) }
    }
}

/// The members of a comma-separated list.
pub(super) fn options(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

fn is_digits(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_digit)
}

/// Most digits of a number: more are zeros in front, which readers with a bound on the digits do not skip.
const DIGITS_MAX: usize = 20;

/// Digits only, and a number that fits.
fn number(digits: &[u8]) -> Option<u64> {
    if !is_digits(digits) || digits.len() > DIGITS_MAX {
        return None;
    }
    digits.iter().try_fold(0u64, |number, digit| number.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
}
