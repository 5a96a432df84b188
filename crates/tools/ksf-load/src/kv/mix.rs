//! What is asked of the server: reads and writes in their shares, of keys and lengths that are drawn; or every key once.

use super::keys::Choice;
use crate::drive::protocol::{Mix, Operation};
use crate::drive::random::{Random, sub_seed};

/// What one request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    /// The value of a key.
    Get { key: u64 },
    /// A write by the connection to that of its own keys which is about as popular.
    Set { rank: u64, size: u16 },
    /// The first write of a key.
    Fill { key: u64, size: u16 },
}

/// Whose latencies are kept apart.
pub(super) const CLASSES: [&str; 2] = ["get", "set"];

impl Operation for Command {
    fn class(&self) -> u8 {
        match self {
            Command::Get { .. } => 0,
            Command::Set { .. } | Command::Fill { .. } => 1,
        }
    }
}

/// Shares of reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shares {
    /// So many reads...
    pub gets: u32,
    /// ...to so many writes.
    pub sets: u32,
}

/// What the requests of a thread ask for.
#[derive(Debug)]
pub(super) struct Commands {
    source: Source,
    random: Random,
    /// How many lengths there are to choose from.
    sizes: u64,
}

#[derive(Debug)]
enum Source {
    /// Drawn.
    Drawn { shares: Shares, choice: Choice },
    /// Every `step`th key.
    InOrder { next: u64, step: u64, writes: bool },
}

impl Commands {
    /// Draws reads and writes.
    pub(super) fn drawn(shares: Shares, choice: Choice, sizes: usize, seed: u64, thread: usize) -> Commands {
        let random = Random::new(sub_seed(seed, "commands").wrapping_add(thread as u64));
        Commands { source: Source::Drawn { shares, choice }, random, sizes: sizes as u64 }
    }

    /// One of `threads`, which ask for all keys once: they write them, or read them.
    pub(super) fn in_order(writes: bool, sizes: usize, seed: u64, thread: usize, threads: usize) -> Commands {
        let random = Random::new(sub_seed(seed, "fill").wrapping_add(thread as u64));
        let source = Source::InOrder { next: thread as u64, step: threads as u64, writes };
        Commands { source, random, sizes: sizes as u64 }
    }
}

impl Mix for Commands {
    type Operation = Command;

    fn draw(&mut self) -> Command {
        let (random, sizes) = (&mut self.random, self.sizes);
        let size = |random: &mut Random| (random.next() % sizes) as u16;
        match &mut self.source {
            Source::Drawn { shares, choice } => {
                let (gets, sets) = (u64::from(shares.gets), u64::from(shares.sets));
                let is_get = random.next() % (gets + sets) < gets;
                let key = choice.draw(random);
                if is_get { Command::Get { key } } else { Command::Set { rank: key, size: size(random) } }
            }
            Source::InOrder { next, step, writes } => {
                let key = *next;
                *next += *step;
                if *writes { Command::Fill { key, size: size(random) } } else { Command::Get { key } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn draw(mut commands: Commands, times: usize) -> Vec<Command> {
        (0..times).map(|_| commands.draw()).collect()
    }

    #[test]
    fn reads_and_writes_have_their_shares_and_lengths_are_equally_likely() {
        let shares = Shares { gets: 90, sets: 10 };
        let commands = draw(Commands::drawn(shares, Choice::new(10, None), 3, 1, 0), 100_000);
        let mut sizes = BTreeMap::new();
        for command in &commands {
            if let Command::Set { size, .. } = command {
                *sizes.entry(*size).or_insert(0) += 1;
            }
        }
        let sets: i32 = sizes.values().sum();
        assert!((9_500..10_500).contains(&sets), "{sets}");
        assert!(sizes.len() == 3 && sizes.values().all(|count| (3_000..3_700).contains(count)), "{sizes:?}");
        let only = |gets, sets| draw(Commands::drawn(Shares { gets, sets }, Choice::new(10, None), 1, 1, 0), 100);
        assert!(only(1, 0).iter().all(|command| command.class() == 0));
        assert!(only(0, 1).iter().all(|command| command.class() == 1));
    }

    #[test]
    fn a_seed_reproduces_and_threads_differ() {
        let commands = |seed, thread| {
            draw(Commands::drawn(Shares { gets: 1, sets: 1 }, Choice::new(1000, Some(0.9)), 2, seed, thread), 50)
        };
        assert_eq!(commands(1, 0), commands(1, 0));
        assert_ne!(commands(1, 0), commands(2, 0));
        assert_ne!(commands(1, 0), commands(1, 1));
    }

    #[test]
    fn threads_share_the_keys_between_them() {
        let mut keys: Vec<u64> = Vec::new();
        for (thread, count) in [(0, 4), (1, 3), (2, 3)] {
            for command in draw(Commands::in_order(true, 1, 1, thread, 3), count) {
                let Command::Fill { key, .. } = command else { panic!("{command:?}") };
                keys.push(key);
            }
        }
        keys.sort_unstable();
        assert_eq!(keys, (0..10).collect::<Vec<_>>());
        assert_eq!(draw(Commands::in_order(false, 1, 1, 1, 2), 2), [Command::Get { key: 1 }, Command::Get { key: 3 }]);
    }
}
