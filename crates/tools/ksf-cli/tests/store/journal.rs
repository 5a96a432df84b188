//! What connections sent to a store and were told by it, and what therefore has to be there after a crash.
//!
//! A connection stays with one shard, whose log has its commands in their order. So after a crash the keys of a connection are as
//! they were after one of its commands, and that command is none before the last one that was acknowledged, or that a
//! read of another connection told of.

use std::collections::{BTreeMap, BTreeSet};

use ksf_test::Random;

use crate::store::client::{Client, command};

pub(crate) const CONNECTIONS: usize = 4;
const COUNTERS: usize = 2;
/// Keys of a connection: one by SET and DEL, two by MSET, and two by SET and one by INCR in a transaction.
const OWN_KEYS: usize = 6;
/// The one that counts the transactions.
const TRANSACTIONS: usize = 5;

/// What a store has, by its keys.
pub(crate) type Found = BTreeMap<String, String>;

/// The number of the command that each key has its value from, 0 if the key is not there; of [`TRANSACTIONS`] the value.
type State = [u64; OWN_KEYS];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Command {
    Set,
    Delete,
    Pair,
    Transaction,
    /// INCR of a key that all connections count with.
    Count(usize),
    /// GET of what a connection sets and deletes.
    Look(usize),
}

/// What the reply to a command told beside that it was done.
#[derive(Clone, Copy, Debug)]
enum Told {
    Done,
    Counted(u64),
    /// The value that this command of a connection wrote; 0: there is none.
    Saw(usize, u64),
}

impl Command {
    fn drawn(random: &mut Random) -> Self {
        match random.below(10) {
            0 | 1 => Self::Set,
            2 => Self::Delete,
            3 | 4 => Self::Pair,
            5 => Self::Transaction,
            // What connections of several shards count is what their logs depend on each other by.
            6..=8 => Self::Count(random.within(0..=COUNTERS - 1)),
            _ => Self::Look(random.within(0..=CONNECTIONS - 1)),
        }
    }

    /// What it is on the wire, as the command `number` of a connection.
    fn bytes(self, connection: usize, number: u64) -> Vec<u8> {
        let value = value(connection, number);
        let keys: [String; OWN_KEYS] = std::array::from_fn(|key| own_key(connection, key));
        let set = |key: usize| command(&[b"SET", keys[key].as_bytes(), &value]);
        match self {
            Self::Set => set(0),
            Self::Delete => command(&[b"DEL", keys[0].as_bytes()]),
            Self::Pair => command(&[b"MSET", keys[1].as_bytes(), &value, keys[2].as_bytes(), &value]),
            Self::Transaction => {
                let count = command(&[b"INCR", keys[TRANSACTIONS].as_bytes()]);
                [command(&[b"MULTI"]), set(3), set(4), count, command(&[b"EXEC"])].concat()
            }
            Self::Count(counter) => command(&[b"INCR", counter_key(counter).as_bytes()]),
            Self::Look(other) => command(&[b"GET", own_key(other, 0).as_bytes()]),
        }
    }

    /// What it makes of the keys of its connection.
    fn apply(self, number: u64, state: &mut State) {
        match self {
            Self::Set => state[0] = number,
            Self::Delete => state[0] = 0,
            Self::Pair => state[1..=2].fill(number),
            Self::Transaction => {
                state[3..=4].fill(number);
                state[TRANSACTIONS] += 1;
            }
            Self::Count(_) | Self::Look(_) => {}
        }
    }
}

fn own_key(connection: usize, key: usize) -> String {
    format!("connection {connection} key {key}")
}

fn counter_key(counter: usize) -> String {
    format!("counter {counter}")
}

/// What a command writes: it names the command, and has a length of its own.
fn value(connection: usize, number: u64) -> Vec<u8> {
    let mut random = Random::new(number << 8 | connection as u64);
    let length = if random.one_in(16) { random.within(0..=30_000) } else { random.length(2_000) };
    let mut value = format!("{connection} {number} ").into_bytes();
    value.resize(value.len() + length, b'a' + (number % 26) as u8);
    value
}

/// Which command of a connection wrote what was read; 0: nothing is there. A value that no command wrote whole is an error.
fn writer_of(connection: usize, read: Option<&str>) -> Result<u64, String> {
    let Some(read) = read else { return Ok(0) };
    let number = read.split(' ').nth(1).and_then(|number| number.parse().ok());
    number.filter(|number| read.as_bytes() == value(connection, *number)).ok_or_else(|| {
        let front: String = read.chars().take(40).collect();
        format!("connection {connection}: {} bytes that no command wrote: {front}", read.len())
    })
}

fn count_of(read: Option<&String>) -> Result<u64, String> {
    read.map_or(Ok(0), |read| read.parse().map_err(|_| format!("a counter is {read}")))
}

/// What a connection has sent since the last audit, and what it was told.
#[derive(Clone, Debug, Default)]
struct Journal {
    /// Its keys as the audit found them.
    base: State,
    /// Commands that it sent before.
    before: u64,
    /// Commands that it has sent since.
    sent: Vec<Command>,
    /// What the first ones of these were answered.
    told: Vec<Told>,
    /// Its keys when these were done.
    state: State,
}

impl Journal {
    /// `answered`: how many of its commands were. `seen`: which one is the last that any connection has read of.
    fn check(&self, answered: usize, seen: u64, found: &State) -> Result<(), String> {
        let must = answered.max(seen.saturating_sub(self.before) as usize);
        let mut state = self.base;
        for (done, number) in (0..=self.sent.len()).zip(self.before + 1..) {
            if done >= must && state == *found {
                return Ok(());
            }
            if let Some(command) = self.sent.get(done) {
                command.apply(number, &mut state);
            }
        }
        Err(format!("{found:?} is there, which is after none of the commands from {must} on: {self:?}"))
    }

    /// The next commands are sent to a store that has this.
    fn begin(&mut self, found: State) {
        let before = self.before + self.sent.len() as u64;
        *self = Self { base: found, before, state: found, ..Self::default() };
    }
}

/// A counter was `base`, was counted `sent` times, and these values were told: may it be `found`?
fn check_counter(base: u64, sent: u64, told: &[u64], found: u64) -> Result<(), String> {
    let different: BTreeSet<u64> = told.iter().copied().collect();
    let is_new = told.iter().all(|told| *told > base);
    let is_there = told.iter().all(|told| *told <= found);
    if different.len() == told.len() && is_new && is_there && found <= base + sent {
        return Ok(());
    }
    Err(format!("{found} is there of {sent} from {base} on, and told were {told:?}"))
}

/// The journals of all connections.
#[derive(Debug, Default)]
pub(crate) struct Journals {
    connections: [Journal; CONNECTIONS],
    counters: [u64; COUNTERS],
}

impl Journals {
    /// All keys that there may be.
    fn keys() -> Vec<String> {
        let own = (0..CONNECTIONS).flat_map(|connection| (0..OWN_KEYS).map(move |key| own_key(connection, key)));
        own.chain((0..COUNTERS).map(counter_key)).collect()
    }

    /// How many commands of each connection were answered since the last audit.
    pub(crate) fn answered(&self) -> [usize; CONNECTIONS] {
        self.connections.each_ref().map(|journal| journal.told.len())
    }

    /// How many commands of a connection wait for a reply.
    pub(crate) fn under_way(&self, connection: usize) -> usize {
        let journal = &self.connections[connection];
        journal.sent.len() - journal.told.len()
    }

    /// Holds what a store has against what it told, the first `answered` replies to each connection.
    pub(crate) fn check(&self, answered: &[usize; CONNECTIONS], found: &Found) -> Result<(), String> {
        self.held(answered, found).map(|_| ())
    }

    /// The same with all replies; the next commands are sent to a store that has this.
    pub(crate) fn audit(&mut self, found: &Found) -> Result<(), String> {
        let (states, counters) = self.held(&self.answered(), found)?;
        self.connections.iter_mut().zip(states).for_each(|(journal, state)| journal.begin(state));
        self.counters = counters;
        Ok(())
    }

    fn held(
        &self,
        answered: &[usize; CONNECTIONS],
        found: &Found,
    ) -> Result<([State; CONNECTIONS], [u64; COUNTERS]), String> {
        let (mut seen, mut sent, mut told) =
            ([0_u64; CONNECTIONS], [0_u64; COUNTERS], [const { Vec::new() }; COUNTERS]);
        for (journal, answered) in self.connections.iter().zip(answered) {
            for command in &journal.sent {
                if let Command::Count(counter) = command {
                    sent[*counter] += 1;
                }
            }
            for (command, reply) in journal.sent.iter().zip(&journal.told[..*answered]) {
                match (command, reply) {
                    (Command::Count(counter), Told::Counted(value)) => told[*counter].push(*value),
                    (_, Told::Saw(other, writer)) => seen[*other] = seen[*other].max(*writer),
                    _ => {}
                }
            }
        }
        let mut states = [State::default(); CONNECTIONS];
        for (connection, journal) in self.connections.iter().enumerate() {
            for (key, state) in states[connection].iter_mut().enumerate() {
                let read = found.get(&own_key(connection, key));
                *state = if key == TRANSACTIONS {
                    count_of(read)?
                } else {
                    writer_of(connection, read.map(|read| &read[..]))?
                };
            }
            let held = journal.check(answered[connection], seen[connection], &states[connection]);
            held.map_err(|error| format!("connection {connection}: {error}"))?;
        }
        let mut counters = [0; COUNTERS];
        for (counter, now) in counters.iter_mut().enumerate() {
            *now = count_of(found.get(&counter_key(counter)))?;
            let held = check_counter(self.counters[counter], sent[counter], &told[counter], *now);
            held.map_err(|error| format!("counter {counter}: {error}"))?;
        }
        Ok((states, counters))
    }

    /// Draws the next commands of a connection; what they are on the wire.
    pub(crate) fn send(&mut self, connection: usize, count: usize, random: &mut Random) -> Vec<u8> {
        let journal = &mut self.connections[connection];
        let mut bytes = Vec::new();
        for _ in 0..count {
            let command = Command::drawn(random);
            journal.sent.push(command);
            bytes.extend(command.bytes(connection, journal.before + journal.sent.len() as u64));
        }
        bytes
    }

    /// Reads the reply to the first command of a connection that has none yet, and holds it against what the connection did.
    pub(crate) fn take_reply(&mut self, connection: usize, client: &mut Client) -> Result<(), String> {
        let mut read = || client.read().expect("the store answers");
        let journal = &mut self.connections[connection];
        let (command, was) = (journal.sent[journal.told.len()], journal.state);
        command.apply(journal.before + journal.told.len() as u64 + 1, &mut journal.state);
        let state = journal.state;
        let (reply, wanted) = match command {
            Command::Set | Command::Pair => (read(), "+OK".to_owned()),
            Command::Delete => (read(), format!(":{}", u8::from(was[0] != 0))),
            Command::Transaction => {
                let replies: Vec<String> = (0..5).map(|_| read()).collect();
                let count = state[TRANSACTIONS];
                (replies.join(" "), format!("+OK +QUEUED +QUEUED +QUEUED [+OK +OK :{count}]"))
            }
            Command::Count(_) => {
                let reply = read();
                let value = reply.strip_prefix(':').and_then(|value| value.parse().ok());
                journal.told.push(Told::Counted(value.ok_or_else(|| format!("INCR: {reply}"))?));
                return Ok(());
            }
            Command::Look(other) => {
                let reply = read();
                let writer = writer_of(other, (reply != "nil").then_some(&reply[..]))?;
                journal.told.push(Told::Saw(other, writer));
                let seen = &self.connections[other];
                if writer > seen.before + seen.sent.len() as u64 || other == connection && writer != state[0] {
                    return Err(format!("connection {other} was seen at {writer}: {seen:?}"));
                }
                return Ok(());
            }
        };
        journal.told.push(Told::Done);
        if reply == wanted {
            return Ok(());
        }
        Err(format!("{command:?} was answered {reply}, not {wanted}: {journal:?}"))
    }
}

/// Reads every key of a store.
pub(crate) fn found(client: &mut Client) -> Found {
    let keys = Journals::keys();
    let asked: Vec<u8> = keys.iter().flat_map(|key| command(&[b"GET", key.as_bytes()])).collect();
    client.write(&asked).expect("the store reads");
    let read = keys.into_iter().map(|key| (key, client.read().expect("the store answers")));
    read.filter(|(_, value)| value != "nil").collect()
}

#[test]
fn the_audit_after_a_crash_finds_each_loss() {
    use Command::{Count, Delete, Look, Pair, Set, Transaction};
    let journal = Journal {
        base: [10, 10, 10, 0, 0, 0],
        before: 10,
        // 11 to 16; the last two may be there or not.
        sent: vec![Set, Pair, Transaction, Delete, Transaction, Set],
        told: vec![Told::Done; 4],
        ..Journal::default()
    };
    for right in [[0, 12, 12, 13, 13, 1], [0, 12, 12, 15, 15, 2], [16, 12, 12, 15, 15, 2]] {
        journal.check(4, 0, &right).unwrap();
    }
    for (wrong, what) in [
        ([11, 12, 12, 13, 13, 1], "a key that was deleted"),
        ([0, 10, 10, 13, 13, 1], "an old pair"),
        ([0, 12, 10, 13, 13, 1], "half of a pair"),
        ([0, 12, 12, 0, 0, 0], "no transaction"),
        ([0, 12, 12, 15, 13, 2], "a part of a transaction"),
        ([0, 12, 12, 15, 15, 1], "a transaction without its count"),
        ([16, 12, 12, 13, 13, 1], "a command without the one before"),
        ([0; OWN_KEYS], "nothing"),
    ] {
        assert!(journal.check(4, 0, &wrong).is_err(), "{what} passes");
    }
    let whole = String::from_utf8(value(3, 77)).unwrap();
    assert_eq!((writer_of(3, Some(&whole)), writer_of(3, None)), (Ok(77), Ok(0)));
    assert!(writer_of(2, Some(&whole)).is_err(), "the value of another connection");
    assert!(writer_of(3, Some(&whole[..whole.len() - 1])).is_err(), "a value that is cut");

    for (told, found, is_right) in [
        (&[7, 6][..], 7, true),
        (&[7, 6], 9, true),
        (&[7, 6], 6, false),
        (&[7, 6], 10, false),
        (&[6, 6], 8, false),
        (&[5], 8, false),
    ] {
        assert_eq!(check_counter(5, 4, told, found).is_ok(), is_right, "{found} after {told:?}");
    }

    // What another connection was told, of a value and of a counter, is there as well.
    let mut journals = Journals::default();
    journals.connections[0].sent = vec![Set];
    journals.connections[1].sent = vec![Look(0), Count(1)];
    journals.connections[1].told = vec![Told::Saw(0, 1), Told::Counted(1)];
    let set = (own_key(0, 0), String::from_utf8(value(0, 1)).unwrap());
    let counted = (counter_key(1), "1".to_owned());
    let check = |answered: usize, found: &[&(String, String)]| {
        let found = found.iter().map(|entry| (*entry).clone()).collect();
        journals.check(&[0, answered, 0, 0], &found)
    };
    check(2, &[&set, &counted]).unwrap();
    check(1, &[&set]).unwrap();
    check(0, &[]).unwrap();
    assert!(check(2, &[&set]).is_err(), "a value of a counter that was told is lost");
    assert!(check(1, &[&counted]).is_err(), "what another connection has read is lost");
}
