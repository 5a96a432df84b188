//! Operations in shares: `--mix`, and the operations of a thread drawn by it.

use std::str::FromStr;

use crate::drive::protocol;
use crate::drive::random::{Random, sub_seed};

/// Operations of a protocol.
pub trait FileOperation: Copy + PartialEq + Send + Sync + 'static {
    /// All of them, each at the place of its number.
    const ALL: &'static [Self];
    /// The protocol's word for one.
    const NOUN: &'static str;
    /// Published shares: name, and what it stands for.
    const PUBLISHED: Option<(&'static str, &'static str)>;

    /// Its name in `--mix`.
    fn name(self) -> &'static str;

    /// Its number, from 0.
    fn number(self) -> u8;
}

/// Shares of operations, as `getattr=64,lookup=12`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares<K> {
    shares: Vec<(K, u32)>,
}

impl<K: FileOperation> Shares<K> {
    /// True if an operation has a share.
    pub(crate) fn has(&self, kind: K) -> bool {
        self.kinds().any(|one| one == kind)
    }

    /// The operations with a share.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = K> {
        self.shares.iter().map(|(one, _)| *one)
    }

    /// As it is typed.
    pub(crate) fn in_words(&self) -> String {
        let shares = self.shares.iter().map(|(kind, share)| format!("{}={share}", kind.name()));
        shares.collect::<Vec<_>>().join(",")
    }
}

impl<K: FileOperation> FromStr for Shares<K> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let published = K::PUBLISHED.filter(|(name, _)| *name == text);
        let mut shares: Vec<(K, u32)> = Vec::new();
        for part in published.map_or(text, |(_, list)| list).split(',') {
            let (name, share) = part.split_once('=').unwrap_or((part, "1"));
            let kind = K::ALL.iter().copied().find(|kind| kind.name() == name).ok_or_else(|| {
                let published = K::PUBLISHED.map_or_else(String::new, |(name, _)| format!(", or {name}"));
                let names: Vec<&str> = K::ALL.iter().map(|kind| kind.name()).collect();
                let (noun, names) = (K::NOUN, names.join(", "));
                format!("\"{name}\" is no {noun}; write NAME=SHARE,...{published}; the names are {names}")
            })?;
            let share = share.parse().ok().filter(|share| (1..=1_000_000).contains(share));
            let share = share.ok_or_else(|| format!("\"{part}\": a share is a number from 1 to 1000000"))?;
            if shares.iter().any(|(one, _)| *one == kind) {
                return Err(format!("\"{name}\" has two shares"));
            }
            shares.push((kind, share));
        }
        Ok(Self { shares })
    }
}

impl<K: FileOperation> protocol::Operation for K {
    fn class(&self) -> u8 {
        self.number()
    }
}

/// The operations of a thread, in the order of their requests.
#[derive(Debug)]
pub(crate) struct Draws<K> {
    /// Sums of the shares up to each operation.
    ends: Vec<(K, u64)>,
    random: Random,
}

impl<K: FileOperation> Draws<K> {
    pub(crate) fn new(mix: &Shares<K>, seed: u64, thread: usize) -> Self {
        let mut end = 0;
        let ends = mix.shares.iter().map(|&(kind, share)| {
            end += u64::from(share);
            (kind, end)
        });
        Self { ends: ends.collect(), random: Random::new(sub_seed(seed, "procedures").wrapping_add(thread as u64)) }
    }
}

impl<K: FileOperation> protocol::Mix for Draws<K> {
    type Operation = K;

    fn draw(&mut self) -> K {
        let &(last, all) = self.ends.last().expect("a mix has an operation");
        let at = self.random.next() % all;
        self.ends.iter().find(|(_, end)| at < *end).map_or(last, |(kind, _)| *kind)
    }
}
