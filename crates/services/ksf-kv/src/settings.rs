//! What the server is told when it starts.

use std::fmt;
use std::str::FromStr;

use crate::cluster::Cluster;

/// When the reply to a write leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// When the write is on the medium, and so is all that it saw; a reply to a read, when what it saw is. The default.
    #[default]
    Always,
    /// At once, while no write of the shard has waited longer than so many milliseconds for the medium. A crash takes what
    /// was on its way.
    Every {
        /// The milliseconds.
        ms: u64,
    },
    /// At once. A crash takes what was on its way.
    None,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Always => f.write_str("always"),
            Self::Every { ms } => write!(f, "every={ms}"),
            Self::None => f.write_str("none"),
        }
    }
}

impl FromStr for Durability {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let every = text.strip_prefix("every=").and_then(|ms| ms.parse().ok()).filter(|ms| *ms > 0);
        match (text, every) {
            ("always", _) => Ok(Self::Always),
            ("none", _) => Ok(Self::None),
            (_, Some(ms)) => Ok(Self::Every { ms }),
            _ => Err(format!("\"{text}\" is none of always, every=MS, none")),
        }
    }
}

/// What the server is told when it starts.
#[derive(Clone)]
pub struct Settings {
    /// When the reply to a write leaves.
    pub durability: Durability,
    /// What clients must know. Without one, peers from other machines are denied.
    pub password: Option<Vec<u8>>,
    /// Bytes of memory that keys and values may take, above which values are on the disk alone.
    pub memory_bytes_max: usize,
    /// Which node has which keys; `None`: this one has all.
    pub cluster: Option<Cluster>,
}

/// Without a bound on memory.
impl Default for Settings {
    fn default() -> Self {
        Self { durability: Durability::default(), password: None, memory_bytes_max: usize::MAX, cluster: None }
    }
}

/// Without the password.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { durability, password, memory_bytes_max, cluster } = self;
        let mut shown = f.debug_struct("Settings");
        shown.field("durability", durability).field("password", &password.is_some());
        shown.field("memory_bytes_max", memory_bytes_max);
        shown.field("node", &cluster.as_ref().map(|cluster| cluster.address())).finish()
    }
}

impl Settings {
    /// True if this is the password, in a time that tells nothing but the length of what was given.
    pub(crate) fn is_password(&self, given: &[u8]) -> bool {
        let Some(password) = &self.password else { return false };
        let of_password = password.iter().copied().chain(std::iter::repeat(0));
        let differs = given.iter().zip(of_password).fold(0, |differs, (one, other)| differs | (one ^ other));
        std::hint::black_box(differs) == 0 && given.len() == password.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durability_is_read_as_it_is_written() {
        for text in ["always", "every=1", "every=1000", "none"] {
            assert_eq!(text.parse::<Durability>().unwrap().to_string(), text);
        }
        for text in ["", "every", "every=", "every=0", "every=-1", "no"] {
            assert!(text.parse::<Durability>().unwrap_err().contains("always, every=MS, none"), "{text}");
        }
    }

    #[test]
    fn only_the_password_is_the_password() {
        let settings = Settings { password: Some(b"secret".to_vec()), ..Settings::default() };
        assert!(settings.is_password(b"secret"));
        for wrong in [&b""[..], b"secre", b"secret\0", b"Secret", b"secrets"] {
            assert!(!settings.is_password(wrong), "{wrong:?}");
        }
        assert!(!Settings::default().is_password(b""));
        assert!(!format!("{settings:?}").contains("secret"));
    }
}
