//! Something else that is to live as long as the program: it shares the holder's process.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Begins before the program does, in the holder's process, and is dropped when the last process of the program has ended.
pub trait Companion: Send {
    /// What it does, or why it does not, in a line.
    fn said(&self) -> String;

    /// What it has counted, by name. Called on the holder's thread for each `status`: connections wait meanwhile.
    fn counters(&self) -> BTreeMap<String, u64>;
}

/// What a [`Companion`] says of itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CompanionStatus {
    /// What it does, or why it does not.
    pub said: String,
    /// What it has counted, by name.
    pub counters: BTreeMap<String, u64>,
}

impl CompanionStatus {
    pub(crate) fn of(companion: &dyn Companion) -> Self {
        Self { said: companion.said(), counters: companion.counters() }
    }
}
