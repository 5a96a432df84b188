//! Commands: which there are, and what each does.

mod keys;
mod server;
mod strings;

use ksf_proto::resp::{self, Arguments, Malformed, Version, Writer};
use ksf_store::log::Purpose;
use ksf_store::store::{Clock, Needs, UpdateError};

use crate::service::KvShard;

/// Who the peer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It may do everything.
    #[default]
    Known,
    /// It must tell the password first.
    Unknown,
    /// It comes from another machine, and there is no password.
    Denied,
}

/// What belongs to a connection.
#[derive(Debug, Default)]
pub(crate) struct Session {
    pub(crate) standing: Standing,
    pub(crate) version: Version,
    pub(crate) name: Vec<u8>,
    pub(crate) malformed: Option<Malformed>,
}

/// A command that was carried out.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// What its reply waits for.
    pub(crate) needs: Needs,
    /// The connection ends behind the reply.
    pub(crate) close: bool,
}

/// A command at work.
pub(crate) struct Call<'c, 'a> {
    pub(crate) shard: &'c mut KvShard,
    pub(crate) session: &'c mut Session,
    pub(crate) clock: Clock,
    /// The arguments, the name of the command first.
    pub(crate) args: &'c [&'a [u8]],
    pub(crate) out: &'c mut Vec<u8>,
    pub(crate) done: Done,
}

/// Why a command was not carried out: the text of its reply.
#[derive(Debug)]
pub(crate) struct Failed(pub(crate) String);

impl From<&str> for Failed {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<UpdateError> for Failed {
    fn from(error: UpdateError) -> Self {
        match error {
            UpdateError::Append(ksf_store::log::AppendError::Full) => {
                "OOM the log is full: nothing can be written until keys are deleted".into()
            }
            error => Self(format!("ERR {error}")),
        }
    }
}

pub(crate) const SYNTAX: &str = "ERR syntax error";
pub(crate) const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";

/// Redis' own, as far as it is true here.
const DENIED: &str = "DENIED ksf store is running in protected mode because no password is set. In this mode connections are \
                      only accepted from the loopback interface and Unix sockets. Set a password with --password-file.";

type Result<T = ()> = std::result::Result<T, Failed>;

struct Command {
    name: &'static str,
    /// Arguments with the name; negative: at least so many.
    arity: i32,
    run: fn(&mut Call<'_, '_>) -> Result,
}

const fn command(name: &'static str, arity: i32, run: fn(&mut Call<'_, '_>) -> Result) -> Command {
    Command { name, arity, run }
}

/// In the order of their names.
const COMMANDS: &[Command] = &[
    command("append", 3, strings::append),
    command("auth", -2, server::auth),
    command("client", -2, server::client),
    command("command", -1, server::command),
    command("config", -2, server::config),
    command("dbsize", 1, server::dbsize),
    command("decr", 2, strings::decr),
    command("decrby", 3, strings::decrby),
    command("del", -2, keys::del),
    command("echo", 2, server::echo),
    command("exists", -2, keys::exists),
    command("expire", -3, keys::expire),
    command("expireat", -3, keys::expireat),
    command("expiretime", 2, keys::expiretime),
    command("get", 2, strings::get),
    command("getdel", 2, strings::getdel),
    command("getex", -2, strings::getex),
    command("getrange", 4, strings::getrange),
    command("getset", 3, strings::getset),
    command("hello", -1, server::hello),
    command("incr", 2, strings::incr),
    command("incrby", 3, strings::incrby),
    command("info", -1, server::info),
    command("keys", 2, keys::keys),
    command("mget", -2, strings::mget),
    command("mset", -3, strings::mset),
    command("msetnx", -3, strings::msetnx),
    command("persist", 2, keys::persist),
    command("pexpire", -3, keys::pexpire),
    command("pexpireat", -3, keys::pexpireat),
    command("pexpiretime", 2, keys::pexpiretime),
    command("ping", -1, server::ping),
    command("psetex", 4, strings::psetex),
    command("pttl", 2, keys::pttl),
    command("quit", -1, server::quit),
    command("select", 2, server::select),
    command("set", -3, strings::set),
    command("setex", 4, strings::setex),
    command("setnx", 3, strings::setnx),
    command("setrange", 4, strings::setrange),
    command("strlen", 2, strings::strlen),
    command("substr", 4, strings::getrange),
    command("touch", -2, keys::exists),
    command("ttl", 2, keys::ttl),
    command("type", 2, keys::type_of),
    command("unlink", -2, keys::del),
];

/// Those that only take keys away.
const REMOVES: [&str; 3] = ["del", "getdel", "unlink"];

/// Those that write values.
const WRITES: [&str; 19] = [
    "append",
    "decr",
    "decrby",
    "expire",
    "expireat",
    "getset",
    "incr",
    "incrby",
    "mset",
    "msetnx",
    "persist",
    "pexpire",
    "pexpireat",
    "psetex",
    "set",
    "setex",
    "setnx",
    "setrange",
    "getex",
];

/// Longest name of a command.
const NAME_BYTES_MAX: usize = 16;

fn find(name: &[u8]) -> Option<&'static Command> {
    let mut lower = [0; NAME_BYTES_MAX];
    let lower = lower.get_mut(..name.len())?;
    lower.copy_from_slice(name);
    lower.make_ascii_lowercase();
    let at = COMMANDS.binary_search_by(|command| command.name.as_bytes().cmp(lower)).ok()?;
    Some(&COMMANDS[at])
}

/// What a command takes room in the log for, if it does.
pub(crate) fn purpose(command: &[u8]) -> Option<Purpose> {
    let inline;
    let name = match Arguments::of(command) {
        Some(mut arguments) => arguments.next().unwrap_or_default(),
        None => {
            inline = resp::inline(command).unwrap_or_default();
            inline.first().map_or(&[][..], |name| name)
        }
    };
    let name = find(name)?.name;
    if REMOVES.contains(&name) {
        return Some(Purpose::Removing);
    }
    WRITES.contains(&name).then_some(Purpose::Writing)
}

/// Carries out a command as it came, and writes its reply to `out`; nothing for an empty command.
pub(crate) fn execute(
    shard: &mut KvShard,
    session: &mut Session,
    bytes: &[u8],
    now_ns: u64,
    out: &mut Vec<u8>,
) -> Done {
    let inline;
    let args: Vec<&[u8]> = match Arguments::of(bytes) {
        Some(arguments) => arguments.collect(),
        None => match resp::inline(bytes) {
            Ok(arguments) => {
                inline = arguments;
                inline.iter().map(|argument| &argument[..]).collect()
            }
            Err(malformed) => {
                Writer::new(out, session.version).error(&format!("ERR {malformed}"));
                return Done { close: true, ..Done::default() };
            }
        },
    };
    let Some(name) = args.first() else { return Done::default() };
    let clock = Clock { now_ms: now_ns / 1_000_000, received_ns: None };
    let start = out.len();
    let mut call = Call { shard, session, clock, args: &args, out, done: Done::default() };
    let result = match find(name) {
        Some(command) if !has_arity(command.arity, args.len()) => {
            Err(Failed(format!("ERR wrong number of arguments for '{}' command", command.name)))
        }
        Some(command) => match call.session.standing {
            Standing::Known => (command.run)(&mut call),
            Standing::Unknown if matches!(command.name, "auth" | "hello" | "quit") => (command.run)(&mut call),
            Standing::Unknown => Err("NOAUTH Authentication required.".into()),
            Standing::Denied => {
                call.done.close = true;
                Err(DENIED.into())
            }
        },
        None => Err(unknown(&args)),
    };
    let done = std::mem::take(&mut call.done);
    if let Err(Failed(text)) = result {
        out.truncate(start);
        Writer::new(out, session.version).error(&text);
    }
    done
}

fn has_arity(arity: i32, given: usize) -> bool {
    let wanted = arity.unsigned_abs() as usize;
    if arity < 0 { given >= wanted } else { given == wanted }
}

/// As Redis says it.
fn unknown(args: &[&[u8]]) -> Failed {
    let short = |argument: &[u8]| String::from_utf8_lossy(&argument[..argument.len().min(128)]).into_owned();
    let mut text = format!("ERR unknown command '{}', with args beginning with: ", short(args[0]));
    for argument in &args[1..] {
        if text.len() > 128 {
            break;
        }
        text.push_str(&format!("'{}' ", short(argument)));
    }
    Failed(text)
}

impl<'a> Call<'_, 'a> {
    pub(crate) fn write(&mut self) -> Writer<'_> {
        Writer::new(self.out, self.session.version)
    }

    /// An argument as a number.
    pub(crate) fn integer(&self, at: usize) -> Result<i64> {
        integer(self.args[at]).ok_or_else(|| NOT_AN_INTEGER.into())
    }

    /// Carries out a change of keys.
    pub(crate) fn update<R>(
        &mut self,
        keys: &[&'a [u8]],
        change: impl FnOnce(&mut ksf_store::store::Update<'_, '_, 'a>) -> R,
    ) -> Result<R> {
        let (result, needs) = self.shard.shard.update(keys, self.clock, change)?;
        self.done.needs = needs;
        Ok(result)
    }

    /// Looks at keys.
    pub(crate) fn read<R>(&mut self, keys: &[&[u8]], look: impl FnOnce(&mut ksf_store::store::View<'_, '_>) -> R) -> R {
        let (result, needs) = self.shard.shard.store().read(keys, self.clock.now_ms, look);
        self.done.needs = needs;
        result
    }
}

/// A number as Redis takes it: no sign but a minus, no spaces, no leading zeros.
pub(crate) fn integer(bytes: &[u8]) -> Option<i64> {
    let number: i64 = std::str::from_utf8(bytes).ok()?.parse().ok()?;
    (number.to_string().as_bytes() == bytes).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(COMMANDS.is_sorted_by(|one, next| one.name < next.name));
        assert!(COMMANDS.iter().all(|command| command.name.len() <= NAME_BYTES_MAX));
        assert_eq!(find(b"GeT").map(|command| command.name), Some("get"));
        assert!(find(b"no such command, and long").is_none());
    }

    #[test]
    fn numbers_are_as_strict_as_those_of_redis() {
        for (text, number) in [("0", Some(0)), ("-5", Some(-5)), ("+5", None), ("05", None), (" 5", None), ("", None)] {
            assert_eq!(integer(text.as_bytes()), number, "{text}");
        }
    }
}
