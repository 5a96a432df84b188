//! Numbers with suffixes, on the command line and in files.

/// Reads a number with an optional suffix (k m g = powers of 1024, K M G = powers of 1000).
pub(crate) fn number<const MIN: u64, const MAX: u64>(text: &str) -> Result<u64, String> {
    ksf_load::numbers::parse_in(text, MIN, MAX).map_err(|error| error.to_string())
}

/// A number in TOML: an integer, or a string with a suffix as on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Number<const MIN: u64, const MAX: u64>(pub(crate) u64);

impl<'de, const MIN: u64, const MAX: u64> serde::Deserialize<'de> for Number<MIN, MAX> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;

        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(i64),
            Text(String),
        }
        let text = match Either::deserialize(deserializer) {
            Ok(Either::Number(number)) => number.to_string(),
            Ok(Either::Text(text)) => text,
            Err(_) => return Err(D::Error::custom("expected a number, or a string like \"64k\"")),
        };
        number::<MIN, MAX>(&text).map(Number).map_err(D::Error::custom)
    }
}
