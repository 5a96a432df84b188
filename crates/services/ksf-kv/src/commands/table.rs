//! The one table of commands: the dispatcher, `COMMAND`, the map of slots, `CLIENT LIST` and the helps read it.
//!
//! What it says of a command beside what runs it is what Redis 7.0 says of the same command (a test compares it); the
//! summaries are our own.

use std::sync::LazyLock;

use ksf_proto::resp::{self, Arguments};
use ksf_store::log::Purpose;

use super::{Call, Result};

/// A command.
pub(super) struct Command {
    pub(super) name: &'static str,
    /// Arguments with the name; negative: at least so many.
    pub(super) arity: i32,
    /// What it takes room in the log for.
    pub(super) purpose: Option<Purpose>,
    pub(super) run: fn(&mut Call<'_, '_>) -> Result,
    pub(super) facts: Facts,
    /// In the order of their names. Where there are some, the second argument names one.
    pub(super) subcommands: &'static [Subcommand],
}

/// A command that the first two arguments name together.
pub(super) struct Subcommand {
    /// With the name of the command, as in `client|id`.
    pub(super) name: &'static str,
    pub(super) arity: i32,
    pub(super) facts: Facts,
}

/// What clients are told of a command.
pub(super) struct Facts {
    flags: u32,
    /// Those that do not follow from the flags.
    categories: u32,
    /// How clients of a cluster ask all nodes, and put their answers together.
    pub(super) tips: &'static [&'static str],
    pub(super) keys: &'static [KeySpec],
    pub(super) group: &'static str,
    pub(super) since: &'static str,
    pub(super) summary: &'static str,
}

/// Some keys among the arguments.
pub(super) struct KeySpec {
    /// What is done with them, in the words of Redis: `RW access update`.
    pub(super) access: &'static str,
    pub(super) at: KeysAt,
}

/// Where keys are among the arguments: the first, the last, and how far apart they are. A last one that is negative is counted
/// from the end.
pub(super) type KeysAt = (usize, i32, usize);

const FIRST: KeysAt = (1, 1, 1);
const SECOND: KeysAt = (2, 2, 1);
const TWO: KeysAt = (1, 2, 1);
const ALL: KeysAt = (1, -1, 1);
const OTHERS: KeysAt = (2, -1, 1);
const PAIRS: KeysAt = (1, -1, 2);

const READS: Option<Purpose> = None;
const WRITES: Option<Purpose> = Some(Purpose::Writing);
/// What it writes takes the place of something: Redis carries it out when memory is used up.
const KEEPS: Option<Purpose> = Some(Purpose::Keeping);
/// It only takes away.
const REMOVES: Option<Purpose> = Some(Purpose::Removing);

mod flag {
    pub(super) const WRITE: u32 = 1 << 0;
    pub(super) const READONLY: u32 = 1 << 1;
    pub(super) const DENYOOM: u32 = 1 << 2;
    pub(super) const ADMIN: u32 = 1 << 3;
    pub(super) const NOSCRIPT: u32 = 1 << 4;
    pub(super) const LOADING: u32 = 1 << 5;
    pub(super) const STALE: u32 = 1 << 6;
    pub(super) const SKIP_SLOWLOG: u32 = 1 << 7;
    pub(super) const FAST: u32 = 1 << 8;
    pub(super) const NO_AUTH: u32 = 1 << 9;
    pub(super) const NO_ASYNC_LOADING: u32 = 1 << 10;
    pub(super) const NO_MULTI: u32 = 1 << 11;
    pub(super) const ALLOW_BUSY: u32 = 1 << 12;
    /// By their bits, which are in the order in which Redis tells them.
    pub(super) const NAMES: [&str; 13] = [
        "write",
        "readonly",
        "denyoom",
        "admin",
        "noscript",
        "loading",
        "stale",
        "skip_slowlog",
        "fast",
        "no_auth",
        "no_async_loading",
        "no_multi",
        "allow_busy",
    ];
}

mod category {
    pub(super) const KEYSPACE: u32 = 1 << 0;
    pub(super) const READ: u32 = 1 << 1;
    pub(super) const WRITE: u32 = 1 << 2;
    pub(super) const SET: u32 = 1 << 3;
    pub(super) const SORTEDSET: u32 = 1 << 4;
    pub(super) const LIST: u32 = 1 << 5;
    pub(super) const HASH: u32 = 1 << 6;
    pub(super) const STRING: u32 = 1 << 7;
    pub(super) const BITMAP: u32 = 1 << 8;
    pub(super) const ADMIN: u32 = 1 << 9;
    pub(super) const FAST: u32 = 1 << 10;
    pub(super) const SLOW: u32 = 1 << 11;
    pub(super) const DANGEROUS: u32 = 1 << 12;
    pub(super) const CONNECTION: u32 = 1 << 13;
    pub(super) const TRANSACTION: u32 = 1 << 14;
    /// As those of the flags.
    pub(super) const NAMES: [&str; 15] = [
        "keyspace",
        "read",
        "write",
        "set",
        "sortedset",
        "list",
        "hash",
        "string",
        "bitmap",
        "admin",
        "fast",
        "slow",
        "dangerous",
        "connection",
        "transaction",
    ];
}

/// The names of the bits that are set.
fn names(bits: u32, all: &'static [&'static str]) -> impl Iterator<Item = &'static str> + Clone {
    all.iter().enumerate().filter(move |(bit, _)| bits >> bit & 1 == 1).map(|(_, name)| *name)
}

impl Facts {
    /// Whether it may be asked before the peer has told the password.
    pub(super) fn needs_no_login(&self) -> bool {
        self.flags & flag::NO_AUTH != 0
    }

    pub(super) fn flags(&self) -> impl Iterator<Item = &'static str> + Clone {
        names(self.flags, &flag::NAMES)
    }

    pub(super) fn categories(&self) -> impl Iterator<Item = &'static str> + Clone {
        let follows = |from: u32, category: u32| if self.flags & from != 0 { category } else { 0 };
        let speed = if self.flags & flag::FAST != 0 { category::FAST } else { category::SLOW };
        let all = self.categories
            | speed
            | follows(flag::WRITE, category::WRITE)
            | follows(flag::READONLY, category::READ)
            | follows(flag::ADMIN, category::ADMIN | category::DANGEROUS);
        names(all, &category::NAMES)
    }

    /// Where all of the keys are, of all specs together; zeros if there are none.
    pub(super) fn keys_at(&self) -> KeysAt {
        match self.keys {
            [] => (0, 0, 0),
            [only] => only.at,
            [first, .., last] => (first.at.0, last.at.1, first.at.2),
        }
    }
}

/// The places among so many arguments.
pub(super) fn places((first, last, step): KeysAt, arguments: usize) -> std::iter::StepBy<std::ops::Range<usize>> {
    let last = if last < 0 { arguments.saturating_sub(last.unsigned_abs() as usize) } else { last as usize };
    let end = if first == 0 { 0 } else { arguments.min(last + 1) };
    (first..end).step_by(step.max(1))
}

/// A command that was asked for, with its subcommand.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub(super) command: &'static Command,
    pub(super) subcommand: Option<&'static Subcommand>,
    /// Names both: [`full_name`] tells of it.
    pub(super) number: u32,
}

/// Bits of a number that are the subcommand's.
const SUBCOMMAND_BITS: u32 = 8;

impl Asked {
    /// What the first arguments name; `None` if there is no such command, or no such subcommand.
    pub(super) fn of(args: &[&[u8]]) -> Option<Self> {
        let at = position(args.first()?)?;
        let command = &COMMANDS[at];
        let number = (at as u32) << SUBCOMMAND_BITS;
        let asked = Self { command, subcommand: None, number };
        match args.get(1) {
            Some(name) if !command.subcommands.is_empty() => {
                let at = command.subcommands.iter().position(|known| known.own_name().eq_ignore_ascii_case(name))?;
                Some(Self { subcommand: Some(&command.subcommands[at]), number: number | (at as u32 + 1), ..asked })
            }
            _ => Some(asked),
        }
    }

    pub(super) fn name(self) -> &'static str {
        self.subcommand.map_or(self.command.name, |subcommand| subcommand.name)
    }

    pub(super) fn facts(self) -> &'static Facts {
        self.subcommand.map_or(&self.command.facts, |subcommand| &subcommand.facts)
    }

    /// Whether so many arguments are right, with the names.
    pub(super) fn takes(self, arguments: usize) -> bool {
        let arity = self.subcommand.map_or(self.command.arity, |subcommand| subcommand.arity);
        let wanted = arity.unsigned_abs() as usize;
        if arity < 0 { arguments >= wanted } else { arguments == wanted }
    }

    /// The keys among its arguments, whose number is right.
    pub(super) fn keys<'s, 'a>(self, args: &'s [&'a [u8]]) -> impl Iterator<Item = &'a [u8]> + use<'s, 'a> {
        places(self.facts().keys_at(), args.len()).map(move |at| args[at])
    }
}

impl Subcommand {
    /// Behind the name of the command.
    pub(super) fn own_name(&self) -> &'static [u8] {
        self.name.split_once('|').map_or(&[][..], |(_, own)| own.as_bytes())
    }
}

/// The name that goes with a number, as in `client|id`.
pub(super) fn full_name(number: u32) -> Option<&'static str> {
    let command = COMMANDS.get((number >> SUBCOMMAND_BITS) as usize)?;
    let of_subcommand = number & ((1 << SUBCOMMAND_BITS) - 1);
    match of_subcommand.checked_sub(1) {
        None => Some(command.name),
        Some(at) => command.subcommands.get(at as usize).map(|subcommand| subcommand.name),
    }
}

/// Longest name of a command.
const NAME_BYTES_MAX: usize = 16;

/// Places of names by their hashes: more than three times as many as there are names, so that few want the same.
const PLACES: usize = 1 << PLACE_BITS;
const PLACE_BITS: u32 = 9;

/// Where a command is in the table, and one more; 0 at places that no name has.
static BY_NAME: LazyLock<[u8; PLACES]> = LazyLock::new(|| {
    let mut by_name = [0; PLACES];
    for (number, command) in (1..).zip(COMMANDS) {
        let mut place = place_of(command.name.as_bytes());
        while by_name[place] != 0 {
            place = (place + 1) % PLACES;
        }
        by_name[place] = number;
    }
    by_name
});

/// Where a name is looked for first, in whatever case it is written.
fn place_of(name: &[u8]) -> usize {
    let mut front = [0; 8];
    let bytes = name.len().min(front.len());
    front[..bytes].copy_from_slice(&name[..bytes]);
    // This bit makes upper letters lower ones.
    let front = u64::from_le_bytes(front) | 0x2020_2020_2020_2020;
    let hash = (front ^ (name.len() as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash >> (u64::BITS - PLACE_BITS)) as usize
}

fn position(name: &[u8]) -> Option<usize> {
    if name.len() > NAME_BYTES_MAX {
        return None;
    }
    let mut place = place_of(name);
    loop {
        let at = usize::from(BY_NAME[place].checked_sub(1)?);
        if COMMANDS[at].name.as_bytes().eq_ignore_ascii_case(name) {
            return Some(at);
        }
        place = (place + 1) % PLACES;
    }
}

/// The command of this name.
pub(super) fn find(name: &[u8]) -> Option<&'static Command> {
    position(name).map(|at| &COMMANDS[at])
}

/// A command by its name, and how many arguments it came with.
pub(super) fn named(command: &[u8]) -> Option<(&'static Command, usize)> {
    match Arguments::of(command) {
        Some(mut arguments) => {
            let count = arguments.len();
            Some((find(arguments.next()?)?, count))
        }
        None => {
            let inline = resp::inline(command).ok()?;
            Some((find(inline.first()?)?, inline.len()))
        }
    }
}

/// What a command takes room in the log for, if it does.
pub(crate) fn purpose(command: &[u8]) -> Option<Purpose> {
    named(command)?.0.purpose
}

/// Commands that change something, and whose replies tell of values.
const TELLING: &[&str] =
    &["exec", "getdel", "getex", "getset", "lmove", "lpop", "rpop", "rpoplpush", "spop", "zpopmax", "zpopmin"];

/// Whether the reply to a command is a status or a number, as far as its name tells.
pub(super) fn has_short_reply(command: &[u8]) -> bool {
    named(command).is_some_and(|(Command { name, purpose, .. }, count)| {
        // With options, SET may tell what was there.
        purpose.is_some() && !TELLING.contains(name) && (*name != "set" || count == 3)
    })
}

macro_rules! facts {
    (
        [$($flag:ident)*] [$($category:ident)*] [$($tip:literal)*] [$($access:literal $keys:ident)*]
        $group:literal $since:literal $summary:literal
    ) => {
        Facts {
            flags: 0 $(| flag::$flag)*,
            categories: 0 $(| category::$category)*,
            tips: &[$($tip),*],
            keys: &[$(KeySpec { access: $access, at: $keys }),*],
            group: $group,
            since: $since,
            summary: $summary,
        }
    };
}

macro_rules! some_or_none {
    () => {
        &[]
    };
    ($some:ident) => {
        $some
    };
}

/// Name, arity, what it takes room for, what runs it; flags, categories, tips and keys; group, version and summary.
macro_rules! commands {
    ($(
        $name:literal $arity:literal $purpose:ident $run:path,
        [$($flag:ident)*] [$($category:ident)*] [$($tip:literal)*] [$($access:literal $keys:ident)*]
        $group:literal $since:literal $summary:literal $(with $subcommands:ident)?;
    )*) => {
        &[$(Command {
            name: $name,
            arity: $arity,
            purpose: $purpose,
            run: $run,
            facts: facts!([$($flag)*] [$($category)*] [$($tip)*] [$($access $keys)*] $group $since $summary),
            subcommands: some_or_none!($($subcommands)?),
        }),*]
    };
}

macro_rules! subcommands {
    ($(
        $name:literal $arity:literal,
        [$($flag:ident)*] [$($category:ident)*] [$($tip:literal)*] [$($access:literal $keys:ident)*]
        $group:literal $since:literal $summary:literal;
    )*) => {
        &[$(Subcommand {
            name: $name,
            arity: $arity,
            facts: facts!([$($flag)*] [$($category)*] [$($tip)*] [$($access $keys)*] $group $since $summary),
        }),*]
    };
}

mod rows;

pub(super) use self::rows::COMMANDS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(COMMANDS.is_sorted_by(|one, next| one.name < next.name));
        assert!(COMMANDS.iter().all(|command| command.name.len() <= NAME_BYTES_MAX));
        assert!(TELLING.iter().all(|name| find(name.as_bytes()).is_some_and(|command| command.purpose.is_some())));
        for command in COMMANDS {
            assert!(command.subcommands.is_sorted_by(|one, next| one.name < next.name), "{}", command.name);
            assert!(command.subcommands.len() < 1 << SUBCOMMAND_BITS);
            for subcommand in command.subcommands {
                let own_name = subcommand.name.strip_prefix(command.name).and_then(|rest| rest.strip_prefix('|'));
                assert_eq!(own_name.map(str::as_bytes), Some(subcommand.own_name()), "{}", subcommand.name);
            }
        }
        assert!(COMMANDS.len() < usize::from(u8::MAX) && 3 * COMMANDS.len() < PLACES);
        for (at, command) in COMMANDS.iter().enumerate() {
            let upper = command.name.to_ascii_uppercase();
            assert_eq!(
                (position(command.name.as_bytes()), position(upper.as_bytes())),
                (Some(at), Some(at)),
                "{upper}"
            );
            for other in [&upper[1..], &format!("{upper}x"), &format!("{upper} "), &format!("{upper}\0")] {
                let known = COMMANDS.iter().any(|command| command.name.eq_ignore_ascii_case(other));
                assert_eq!(position(other.as_bytes()).is_some(), known, "{other:?}");
            }
        }
        assert_eq!(find(b"GeT").map(|command| command.name), Some("get"));
        assert!(find(b"no such command, and long").is_none());
    }

    /// What writes is what takes room in the log, and nothing else.
    #[test]
    fn flags_agree_with_what_takes_room() {
        for Command { name, purpose, facts, .. } in COMMANDS {
            let writes = facts.flags & flag::WRITE != 0;
            assert_eq!(writes || *name == "exec", purpose.is_some(), "{name}");
            let is_denied = facts.flags & flag::DENYOOM != 0;
            assert_eq!(is_denied || *name == "exec", *purpose == WRITES, "{name}");
            assert!(!writes || facts.flags & flag::READONLY == 0, "{name}");
        }
    }

    #[test]
    fn commands_are_found_with_their_subcommands() {
        let asked = |words: &str| {
            let args: Vec<&[u8]> = words.split(' ').map(str::as_bytes).collect();
            let asked = Asked::of(&args)?;
            assert_eq!(full_name(asked.number), Some(asked.name()), "{words}");
            let keys: Vec<_> = asked.keys(&args).map(|key| key.escape_ascii().to_string()).collect();
            Some((asked.name(), asked.takes(args.len()), keys.join(" ")))
        };
        let found = |name, is_right, keys: &str| Some((name, is_right, keys.to_owned()));
        assert_eq!(asked("GET a"), found("get", true, "a"));
        assert_eq!(asked("mset a 1 b 2"), found("mset", true, "a b"));
        assert_eq!(asked("DEL a b c"), found("del", true, "a b c"));
        assert_eq!(asked("SUNIONSTORE a b c"), found("sunionstore", true, "a b c"));
        assert_eq!(asked("COPY a b REPLACE"), found("copy", true, "a b"));
        assert_eq!(asked("CLIENT ID"), found("client|id", true, ""));
        assert_eq!(asked("client no-evict"), found("client|no-evict", false, ""));
        assert_eq!(asked("client"), found("client", false, ""));
        assert_eq!(asked("command"), found("command", true, ""));
        assert_eq!(asked("OBJECT encoding a"), found("object|encoding", true, "a"));
        assert_eq!(asked("OBJECT help"), found("object|help", true, ""));
        assert_eq!(asked("client nonsense"), None);
        assert_eq!(asked("nonsense"), None);
    }

    #[test]
    fn replies_that_may_be_long_are_known() {
        for (command, is_short) in [
            (&b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n"[..], true),
            (b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n$3\r\nGET\r\n", false),
            (b"SET k v\r\n", true),
            (b"del k\r\n", true),
            (b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", false),
            (b"LPOP l\r\n", false),
            (b"EXEC\r\n", false),
            (b"no such command\r\n", false),
            (b"\r\n", false),
        ] {
            assert_eq!(has_short_reply(command), is_short, "{}", command.escape_ascii());
        }
    }
}
