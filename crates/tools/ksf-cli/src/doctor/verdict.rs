//! What a probe is and what it can answer.

use std::io;

use super::machine::Machine;

/// One question to the machine, answered by trying.
pub(crate) struct Probe {
    /// Stable name, used in JSON and in tests: `area_feature`.
    pub(crate) name: &'static str,
    /// What is tried, in words.
    pub(crate) title: &'static str,
    /// What ksf does on a machine that lacks it.
    pub(crate) fallback: &'static str,
    /// Tries it. Must leave nothing behind and must not block for more than a second.
    pub(crate) run: fn(&Machine) -> Verdict,
}

/// A probe's answer. "Could not tell" is an answer of its own: a probe that was stopped by
/// something else than the feature's absence must not be read as "absent".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It works; the text says what was seen.
    Works(String),
    /// It does not.
    Fails(Lack),
    /// The attempt says nothing about the feature; the text says why.
    Unknown(String),
}

/// Why something does not work, and how to get it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lack {
    /// The cause as looked up (sysctl, capability, seccomp, limit), not guessed from the errno.
    pub(crate) cause: String,
    /// The errno of the refused call, where a call was refused.
    pub(crate) errno: Option<i32>,
    /// What gives it.
    pub(crate) remedy: String,
}

impl Verdict {
    pub(crate) fn works(detail: impl Into<String>) -> Self {
        Verdict::Works(detail.into())
    }

    pub(crate) fn unknown(reason: impl Into<String>) -> Self {
        Verdict::Unknown(reason.into())
    }

    pub(crate) fn fails(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Verdict::Fails(Lack { cause: cause.into(), errno: None, remedy: remedy.into() })
    }

    /// The word for the outcome in text and JSON.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Verdict::Works(_) => "works",
            Verdict::Fails(_) => "fails",
            Verdict::Unknown(_) => "unknown",
        }
    }
}

impl Lack {
    /// A refused call, explained by a cause that was looked up.
    pub(crate) fn errno(error: &io::Error, cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Lack { cause: cause.into(), errno: error.raw_os_error(), remedy: remedy.into() }
    }
}
