//! Which procedures are called, in which shares.

use std::str::FromStr;

use super::call::Procedure;
use crate::drive::protocol::{self, Operation};
use crate::drive::random::{Random, sub_seed};

/// The shares of SPECsfs2008's NFSv3 load, of a hundred (SPECsfs2008 User's Guide, table of operations).
const SFS2008: &str = "lookup=24,read=18,write=10,getattr=26,readlink=1,readdir=1,create=1,remove=1,fsstat=1,setattr=4,readdirplus=2,\
                       access=11";

/// Calls of procedures to each other, as `getattr=64,lookup=12`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mix {
    shares: Vec<(Procedure, u32)>,
}

impl Mix {
    /// Whether a procedure is called at all.
    pub(super) fn has(&self, procedure: Procedure) -> bool {
        self.shares.iter().any(|(one, _)| *one == procedure)
    }

    /// As it is typed.
    pub(super) fn in_words(&self) -> String {
        let shares = self.shares.iter().map(|(procedure, share)| format!("{}={share}", procedure.name()));
        shares.collect::<Vec<_>>().join(",")
    }
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let list = if text == "sfs2008" { SFS2008 } else { text };
        let names = || Procedure::ALL.map(Procedure::name).join(", ");
        let mut shares: Vec<(Procedure, u32)> = Vec::new();
        for part in list.split(',') {
            let (name, share) = part.split_once('=').unwrap_or((part, "1"));
            let procedure = Procedure::ALL.into_iter().find(|procedure| procedure.name() == name);
            let procedure = procedure.ok_or_else(|| {
                format!("\"{name}\" is no procedure; write NAME=SHARE,..., or sfs2008; the names are {}", names())
            })?;
            let share = share.parse().ok().filter(|share| (1..=1_000_000).contains(share));
            let share = share.ok_or_else(|| format!("\"{part}\": a share is a number from 1 to 1000000"))?;
            if shares.iter().any(|(one, _)| *one == procedure) {
                return Err(format!("\"{name}\" has two shares"));
            }
            shares.push((procedure, share));
        }
        Ok(Self { shares })
    }
}

impl Operation for Procedure {
    fn class(&self) -> u8 {
        *self as u8
    }
}

/// The procedures of a thread, in the order of their calls.
#[derive(Debug)]
pub(super) struct Draws {
    /// Sums of the shares up to each procedure.
    ends: Vec<(Procedure, u64)>,
    random: Random,
}

impl Draws {
    pub(super) fn new(mix: &Mix, seed: u64, thread: usize) -> Self {
        let mut end = 0;
        let ends = mix.shares.iter().map(|&(procedure, share)| {
            end += u64::from(share);
            (procedure, end)
        });
        Self { ends: ends.collect(), random: Random::new(sub_seed(seed, "procedures").wrapping_add(thread as u64)) }
    }
}

impl protocol::Mix for Draws {
    type Operation = Procedure;

    fn draw(&mut self) -> Procedure {
        let &(last, all) = self.ends.last().expect("a mix has a procedure");
        let at = self.random.next() % all;
        self.ends.iter().find(|(_, end)| at < *end).map_or(last, |(procedure, _)| *procedure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::protocol::Mix as _;

    #[test]
    fn shares_are_read_and_drawn() {
        let mix: Mix = "getattr=3,read=1".parse().unwrap();
        assert_eq!(mix.in_words(), "getattr=3,read=1");
        assert!(mix.has(Procedure::Read) && !mix.has(Procedure::Null));
        let mut draws = Draws::new(&mix, 7, 0);
        let reads = (0..40_000).filter(|_| draws.draw() == Procedure::Read).count();
        assert!((9_500..10_500).contains(&reads), "{reads}");
        assert_eq!("null".parse::<Mix>().unwrap().in_words(), "null=1");
    }

    #[test]
    fn the_published_mix_has_a_hundred_parts() {
        let mix: Mix = "sfs2008".parse().unwrap();
        assert_eq!(mix.shares.iter().map(|(_, share)| share).sum::<u32>(), 100);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("", "\"\" is no procedure"),
            ("getattr=1,stat=2", "\"stat\" is no procedure"),
            ("getattr=0", "a share is a number"),
            ("getattr=x", "a share is a number"),
            ("getattr=1,getattr=2", "two shares"),
        ] {
            let error = text.parse::<Mix>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
