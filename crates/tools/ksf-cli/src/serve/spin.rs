//! How long shards look for work before they sleep: `--spin`, and the key `spin`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use ksf::spin::Spin;

/// What was asked for.
///
/// `auto` is the default: a shard spins only while that finds what comes. An idle server takes no more CPU time than with
/// `off`, and one that shares its CPU with its clients next to none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "SpinKey")]
pub(crate) enum SpinWish {
    /// As long as makes sense.
    #[default]
    Auto,
    /// Not at all.
    Off,
    /// Up to this time.
    UpTo(Duration),
}

impl SpinWish {
    /// For the framework.
    pub(crate) fn spin(self) -> Spin {
        match self {
            SpinWish::Auto => Spin::AUTO,
            SpinWish::Off => Spin::Off,
            SpinWish::UpTo(time) => Spin::UpTo(time),
        }
    }
}

impl FromStr for SpinWish {
    type Err = String;

    /// Reads what the load generators read: `auto`, `off`, microseconds, or a time with its unit.
    fn from_str(text: &str) -> Result<Self, String> {
        match ksf_load::ClientSpin::parse(text) {
            Ok(ksf_load::ClientSpin::Auto) => Ok(SpinWish::Auto),
            Ok(ksf_load::ClientSpin::Off) => Ok(SpinWish::Off),
            Ok(ksf_load::ClientSpin::Time(time)) => Ok(SpinWish::UpTo(time)),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// As in the line of a listener that is ready.
impl fmt::Display for SpinWish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SpinWish::Auto => f.write_str("auto"),
            SpinWish::Off => f.write_str("off"),
            SpinWish::UpTo(time) => write!(f, "{}us", time.as_secs_f64() * 1e6),
        }
    }
}

/// The key in a file: a word, a time with its unit, or a number of microseconds.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected \"auto\", \"off\", a number of microseconds, or a time like \"100us\"")]
enum SpinKey {
    Text(String),
    Microseconds(u64),
}

impl TryFrom<SpinKey> for SpinWish {
    type Error = String;

    fn try_from(key: SpinKey) -> Result<Self, String> {
        match key {
            SpinKey::Text(text) => text.parse(),
            SpinKey::Microseconds(time) => time.to_string().parse(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct File {
        #[serde(default)]
        spin: SpinWish,
    }

    #[test]
    fn flag_and_key_read_the_same_and_say_what_they_read() {
        for (text, key, said) in [
            ("auto", "\"auto\"", "auto"),
            ("off", "\"off\"", "off"),
            ("0", "0", "off"),
            ("20", "20", "20us"),
            ("1ms", "\"1ms\"", "1000us"),
        ] {
            let flag: SpinWish = text.parse().unwrap();
            assert_eq!(flag, toml::from_str::<File>(&format!("spin = {key}")).unwrap().spin, "{text}");
            assert_eq!(flag.to_string(), said);
        }
        assert_eq!(toml::from_str::<File>("").unwrap().spin.spin(), Spin::AUTO);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "soon", "-1", "2s"] {
            assert!(text.parse::<SpinWish>().is_err(), "{text}");
        }
        for key in ["-1", "true", "\"soon\"", "2000000"] {
            assert!(toml::from_str::<File>(&format!("spin = {key}")).is_err(), "{key}");
        }
    }
}
