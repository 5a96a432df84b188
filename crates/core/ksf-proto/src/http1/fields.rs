//! The fields that decide where a message ends and whether the connection stays.

use super::body::BodyLength;

/// What the fields of a head say, taken together.
#[derive(Debug, Default)]
pub(super) struct Fields {
    pub(super) hosts: usize,
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
}

pub(super) fn read_fields(fields: &[httparse::Header<'_>]) -> Result<Fields, Trouble> {
    let mut all = Fields::default();
    for field in fields {
        // By length first: few fields matter, and every request has several that do not.
        match field.name.len() {
            4 if field.name.eq_ignore_ascii_case("host") => all.hosts += 1,
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

impl Fields {
    /// The length the fields announce, if they do.
    pub(super) fn body(&self) -> Option<BodyLength> {
        if self.chunked { Some(BodyLength::Chunked) } else { self.length.map(BodyLength::Fixed) }
    }
}

/// The members of a comma-separated list.
pub(super) fn options(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Digits only, and a number that fits.
fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |number, digit| {
        let digit = char::from(*digit).to_digit(10)?;
        number.checked_mul(10)?.checked_add(u64::from(digit))
    })
}
