//! Commands: which there are, and what each does.

pub(crate) mod backup;
mod bits;
mod extended;
mod hashes;
mod keys;
mod lcs;
mod lists;
mod object;
pub(crate) mod range;
mod scan;
mod server;
mod sets;
mod sorted_sets;
mod strings;
mod transactions;

use std::hash::{BuildHasher, RandomState};

use ksf::files::FileRange;
use ksf_proto::resp::{self, Arguments, Malformed, Version, Writer};
use ksf_store::backup::Backup;
use ksf_store::cells::Shape;
use ksf_store::log::Purpose;
use ksf_store::store::{Clock, Got, Needs, UpdateError};
use ksf_store::update::{Update, View};

use self::transactions::Transaction;
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
    pub(crate) transaction: Transaction,
    /// The backup that the peer makes.
    pub(crate) backup: Option<Backup>,
    /// Most bytes that the strings of a reply may have: it follows from the limits of the connection.
    pub(crate) reply_bytes_max: usize,
    /// The peer is there by TCP.
    pub(crate) is_tcp: bool,
}

/// What is left of the bytes that a reply may have. A command that tells of what is stored takes of it before it takes
/// memory; one that changes something, too, before it does so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// `None` once it was not enough.
    left: Option<usize>,
    bytes_max: usize,
}

impl Room {
    /// For what is no reply.
    pub(crate) fn endless() -> Self {
        Self { left: Some(usize::MAX), bytes_max: usize::MAX }
    }

    /// Takes what a string needs, with what RESP puts around it. False if that was not there, or had not been before.
    pub(crate) fn takes(&mut self, string_bytes: usize) -> bool {
        const AROUND_BYTES: usize = "$\r\n\r\n".len();
        let digits = 1 + string_bytes.checked_ilog10().unwrap_or(0) as usize;
        self.left = self.left.and_then(|left| left.checked_sub(string_bytes + digits + AROUND_BYTES));
        self.left.is_some()
    }

    /// The same, with the error for the client.
    pub(crate) fn take(&mut self, string_bytes: usize) -> Result {
        self.takes(string_bytes);
        self.check()
    }

    /// The error, if there was not enough.
    pub(crate) fn check(&self) -> Result {
        let too_long = || Failed(format!("ERR the reply has more than {} bytes: ask for a part of it", self.bytes_max));
        self.left.map(|_| ()).ok_or_else(too_long)
    }
}

/// A command that was carried out.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// What its reply waits for.
    pub(crate) needs: Needs,
    /// The connection ends behind the reply.
    pub(crate) close: bool,
    /// The reply waits for the medium whatever the durability is.
    pub(crate) is_durable: bool,
    /// What was written of the reply is the head of a string with these bytes.
    pub(crate) file: Option<FileRange>,
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
    /// What the commands of an `EXEC` have in common.
    pub(crate) tx: Option<Update<'c, 'a>>,
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
            UpdateError::Memory { .. } => NO_MEMORY.into(),
            error => Self(format!("ERR {error}")),
        }
    }
}

pub(crate) const SYNTAX: &str = "ERR syntax error";
pub(crate) const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
pub(crate) const NOT_A_FLOAT: &str = "ERR value is not a valid float";
/// Redis' own.
const NO_MEMORY: &str = "OOM command not allowed when used memory > 'maxmemory'.";
pub(crate) const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";

/// Redis' own, as far as it is true here.
pub(crate) const DENIED: &str = "DENIED ksf store is running in protected mode because no password is set. In this mode connections are \
                      only accepted from the loopback interface and Unix sockets. Set a password with --password-file.";

type Result<T = ()> = std::result::Result<T, Failed>;

type Run = fn(&mut Call<'_, '_>) -> Result;

struct Command {
    name: &'static str,
    /// Arguments with the name; negative: at least so many.
    arity: i32,
    /// What it takes room in the log for.
    purpose: Option<Purpose>,
    keys: KeysAt,
    run: Run,
}

/// Where the keys are among the arguments: the first, the last, and how far apart they are. A last one that is negative is
/// counted from the end; a first one of 0 says that there is none.
type KeysAt = (usize, i32, usize);

const NO_KEY: KeysAt = (0, 0, 1);
const FIRST: KeysAt = (1, 1, 1);
const ALL: KeysAt = (1, -1, 1);
const TWO: KeysAt = (1, 2, 1);
const PAIRS: KeysAt = (1, -1, 2);
/// Behind the name of a subcommand.
const SECOND: KeysAt = (2, 2, 1);

const READS: Option<Purpose> = None;
const WRITES: Option<Purpose> = Some(Purpose::Writing);
/// It only takes away.
const REMOVES: Option<Purpose> = Some(Purpose::Removing);

const fn command(name: &'static str, arity: i32, purpose: Option<Purpose>, keys: KeysAt, run: Run) -> Command {
    Command { name, arity, purpose, keys, run }
}

/// In the order of their names.
const COMMANDS: &[Command] = &[
    command("append", 3, WRITES, FIRST, strings::append),
    command("auth", -2, READS, NO_KEY, server::auth),
    command("bgsave", -1, READS, NO_KEY, server::bgsave),
    command("bitcount", -2, READS, FIRST, bits::bitcount),
    command("client", -2, READS, NO_KEY, server::client),
    command("command", -1, READS, NO_KEY, server::command),
    command("config", -2, READS, NO_KEY, server::config),
    command("copy", -3, WRITES, TWO, keys::copy),
    command("dbsize", 1, READS, NO_KEY, server::dbsize),
    command("decr", 2, WRITES, FIRST, strings::decr),
    command("decrby", 3, WRITES, FIRST, strings::decrby),
    command("del", -2, REMOVES, ALL, keys::del),
    command("discard", 1, READS, NO_KEY, transactions::discard),
    command("echo", 2, READS, NO_KEY, server::echo),
    command("exec", 1, WRITES, NO_KEY, transactions::exec),
    command("exists", -2, READS, ALL, keys::exists),
    command("expire", -3, WRITES, FIRST, keys::expire),
    command("expireat", -3, WRITES, FIRST, keys::expireat),
    command("expiretime", 2, READS, FIRST, keys::expiretime),
    command("flushall", -1, REMOVES, NO_KEY, keys::flush),
    command("flushdb", -1, REMOVES, NO_KEY, keys::flush),
    command("get", 2, READS, FIRST, strings::get),
    command("getbit", 3, READS, FIRST, bits::getbit),
    command("getdel", 2, REMOVES, FIRST, strings::getdel),
    command("getex", -2, WRITES, FIRST, strings::getex),
    command("getrange", 4, READS, FIRST, strings::getrange),
    command("getset", 3, WRITES, FIRST, strings::getset),
    command("hdel", -3, REMOVES, FIRST, hashes::hdel),
    command("hello", -1, READS, NO_KEY, server::hello),
    command("hexists", 3, READS, FIRST, hashes::hexists),
    command("hget", 3, READS, FIRST, hashes::hget),
    command("hgetall", 2, READS, FIRST, hashes::hgetall),
    command("hincrby", 4, WRITES, FIRST, hashes::hincrby),
    command("hincrbyfloat", 4, WRITES, FIRST, hashes::hincrbyfloat),
    command("hkeys", 2, READS, FIRST, hashes::hkeys),
    command("hlen", 2, READS, FIRST, hashes::hlen),
    command("hmget", -3, READS, FIRST, hashes::hmget),
    command("hmset", -4, WRITES, FIRST, hashes::hset),
    command("hrandfield", -2, READS, FIRST, hashes::hrandfield),
    command("hscan", -3, READS, FIRST, scan::hscan),
    command("hset", -4, WRITES, FIRST, hashes::hset),
    command("hsetnx", 4, WRITES, FIRST, hashes::hsetnx),
    command("hstrlen", 3, READS, FIRST, hashes::hstrlen),
    command("hvals", 2, READS, FIRST, hashes::hvals),
    command("incr", 2, WRITES, FIRST, strings::incr),
    command("incrby", 3, WRITES, FIRST, strings::incrby),
    command("incrbyfloat", 3, WRITES, FIRST, strings::incrbyfloat),
    command("info", -1, READS, NO_KEY, server::info),
    command("keys", 2, READS, NO_KEY, keys::keys),
    command("ksf.backup", -2, READS, NO_KEY, backup::ksf_backup),
    command("ksf.keys", -1, READS, NO_KEY, range::ksf_keys),
    command("lastsave", 1, READS, NO_KEY, server::lastsave),
    command("lcs", -3, READS, TWO, lcs::lcs),
    command("lindex", 3, READS, FIRST, lists::lindex),
    command("linsert", 5, WRITES, FIRST, lists::linsert),
    command("llen", 2, READS, FIRST, lists::llen),
    command("lmove", 5, WRITES, TWO, lists::lmove),
    command("lpop", -2, REMOVES, FIRST, lists::lpop),
    command("lpos", -3, READS, FIRST, lists::lpos),
    command("lpush", -3, WRITES, FIRST, lists::lpush),
    command("lpushx", -3, WRITES, FIRST, lists::lpushx),
    command("lrange", 4, READS, FIRST, lists::lrange),
    command("lrem", 4, WRITES, FIRST, lists::lrem),
    command("lset", 4, WRITES, FIRST, lists::lset),
    command("ltrim", 4, REMOVES, FIRST, lists::ltrim),
    command("memory", -2, READS, SECOND, server::memory),
    command("mget", -2, READS, ALL, strings::mget),
    command("mset", -3, WRITES, PAIRS, strings::mset),
    command("msetnx", -3, WRITES, PAIRS, strings::msetnx),
    command("multi", 1, READS, NO_KEY, transactions::multi),
    command("object", -2, READS, SECOND, object::object),
    command("persist", 2, WRITES, FIRST, keys::persist),
    command("pexpire", -3, WRITES, FIRST, keys::pexpire),
    command("pexpireat", -3, WRITES, FIRST, keys::pexpireat),
    command("pexpiretime", 2, READS, FIRST, keys::pexpiretime),
    command("ping", -1, READS, NO_KEY, server::ping),
    command("psetex", 4, WRITES, FIRST, strings::psetex),
    command("pttl", 2, READS, FIRST, keys::pttl),
    command("quit", -1, READS, NO_KEY, server::quit),
    command("randomkey", 1, READS, NO_KEY, keys::randomkey),
    command("rename", 3, WRITES, TWO, keys::rename),
    command("renamenx", 3, WRITES, TWO, keys::renamenx),
    command("rpop", -2, REMOVES, FIRST, lists::rpop),
    command("rpoplpush", 3, WRITES, TWO, lists::rpoplpush),
    command("rpush", -3, WRITES, FIRST, lists::rpush),
    command("rpushx", -3, WRITES, FIRST, lists::rpushx),
    command("sadd", -3, WRITES, FIRST, sets::sadd),
    command("save", 1, READS, NO_KEY, server::save),
    command("scan", -2, READS, NO_KEY, scan::scan),
    command("scard", 2, READS, FIRST, sets::scard),
    command("sdiff", -2, READS, ALL, sets::sdiff),
    command("sdiffstore", -3, WRITES, ALL, sets::sdiffstore),
    command("select", 2, READS, NO_KEY, server::select),
    command("set", -3, WRITES, FIRST, strings::set),
    command("setbit", 4, WRITES, FIRST, bits::setbit),
    command("setex", 4, WRITES, FIRST, strings::setex),
    command("setnx", 3, WRITES, FIRST, strings::setnx),
    command("setrange", 4, WRITES, FIRST, strings::setrange),
    command("sinter", -2, READS, ALL, sets::sinter),
    command("sinterstore", -3, WRITES, ALL, sets::sinterstore),
    command("sismember", 3, READS, FIRST, sets::sismember),
    command("smembers", 2, READS, FIRST, sets::smembers),
    command("smismember", -3, READS, FIRST, sets::smismember),
    command("smove", 4, WRITES, TWO, sets::smove),
    command("spop", -2, REMOVES, FIRST, sets::spop),
    command("srandmember", -2, READS, FIRST, sets::srandmember),
    command("srem", -3, REMOVES, FIRST, sets::srem),
    command("sscan", -3, READS, FIRST, scan::sscan),
    command("strlen", 2, READS, FIRST, strings::strlen),
    command("substr", 4, READS, FIRST, strings::getrange),
    command("sunion", -2, READS, ALL, sets::sunion),
    command("sunionstore", -3, WRITES, ALL, sets::sunionstore),
    command("touch", -2, READS, ALL, keys::exists),
    command("ttl", 2, READS, FIRST, keys::ttl),
    command("type", 2, READS, FIRST, keys::type_of),
    command("unlink", -2, REMOVES, ALL, keys::del),
    command("unwatch", 1, READS, NO_KEY, transactions::unwatch),
    command("watch", -2, READS, ALL, transactions::watch),
    command("zadd", -4, WRITES, FIRST, sorted_sets::zadd),
    command("zcard", 2, READS, FIRST, sorted_sets::zcard),
    command("zcount", 4, READS, FIRST, sorted_sets::zcount),
    command("zincrby", 4, WRITES, FIRST, sorted_sets::zincrby),
    command("zmscore", -3, READS, FIRST, sorted_sets::zmscore),
    command("zpopmax", -2, REMOVES, FIRST, sorted_sets::zpopmax),
    command("zpopmin", -2, REMOVES, FIRST, sorted_sets::zpopmin),
    command("zrange", -4, READS, FIRST, sorted_sets::zrange),
    command("zrangebyscore", -4, READS, FIRST, sorted_sets::zrangebyscore),
    command("zrank", 3, READS, FIRST, sorted_sets::zrank),
    command("zrem", -3, REMOVES, FIRST, sorted_sets::zrem),
    command("zremrangebyrank", 4, REMOVES, FIRST, sorted_sets::zremrangebyrank),
    command("zremrangebyscore", 4, REMOVES, FIRST, sorted_sets::zremrangebyscore),
    command("zrevrange", -4, READS, FIRST, sorted_sets::zrevrange),
    command("zrevrangebyscore", -4, READS, FIRST, sorted_sets::zrevrangebyscore),
    command("zrevrank", 3, READS, FIRST, sorted_sets::zrevrank),
    command("zscan", -3, READS, FIRST, scan::zscan),
    command("zscore", 3, READS, FIRST, sorted_sets::zscore),
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

/// The keys among the arguments of a command, whose number is right.
fn keys_of<'a>(command: &Command, args: &[&'a [u8]]) -> Vec<&'a [u8]> {
    let (first, last, step) = command.keys;
    let last = if last < 0 { args.len().saturating_sub(last.unsigned_abs() as usize) } else { last as usize };
    if first == 0 {
        return Vec::new();
    }
    // A subcommand may name none.
    (first..=last).step_by(step).filter_map(|at| args.get(at).copied()).collect()
}

/// A command by its name, and how many arguments it came with.
fn named(command: &[u8]) -> Option<(&'static Command, usize)> {
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
pub(crate) fn has_short_reply(command: &[u8]) -> bool {
    named(command).is_some_and(|(Command { name, purpose, .. }, count)| {
        // With options, SET may tell what was there.
        purpose.is_some() && !TELLING.contains(name) && (*name != "set" || count == 3)
    })
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
    if args.is_empty() {
        return Done::default();
    }
    let clock = Clock { now_ms: now_ns / 1_000_000, received_ns: None };
    let (version, standing) = (session.version, session.standing);
    let done = {
        let (shard, session) = (&mut *shard, &mut *session);
        let mut call = Call { shard, session, clock, args: &args, out, done: Done::default(), tx: None };
        run(&mut call);
        std::mem::take(&mut call.done)
    };
    if shard.shard.is_undone() {
        // The commands of a transaction may have changed them; they come once more.
        (session.version, session.standing) = (version, standing);
    }
    done
}

/// Carries out a command, and writes its reply.
fn run(call: &mut Call<'_, '_>) {
    let start = call.out.len();
    if let Err(Failed(text)) = dispatch(call) {
        call.out.truncate(start);
        call.write().error(&text);
    }
}

fn dispatch(call: &mut Call<'_, '_>) -> Result {
    let command = match find(call.args[0]) {
        Some(command) if !has_arity(command.arity, call.args.len()) => {
            Err(Failed(format!("ERR wrong number of arguments for '{}' command", command.name)))
        }
        Some(command) => match call.session.standing {
            Standing::Known => Ok(command),
            Standing::Unknown if matches!(command.name, "auth" | "hello" | "quit") => Ok(command),
            Standing::Unknown => Err("NOAUTH Authentication required.".into()),
            Standing::Denied => {
                call.done.close = true;
                Err(DENIED.into())
            }
        },
        None => Err(unknown(call.args)),
    };
    let is_queued = |command: &&Command| !matches!(command.name, "exec" | "discard" | "multi" | "watch" | "quit");
    let done = match command {
        Ok(command) if call.session.transaction.is_open() && is_queued(&command) => {
            transactions::queue(call, command.name)
        }
        // Its errors do not end a transaction.
        Ok(command) => return (command.run)(call),
        Err(failed) => Err(failed),
    };
    if done.is_err() {
        call.session.transaction.refuse();
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

    /// A value that [room](Self::room) was taken for.
    pub(crate) fn bulk_or_null(&mut self, value: Option<&[u8]>) {
        self.write().bulk_or_null(value);
    }

    /// What is left for the reply. The replies to the commands of a transaction share it.
    pub(crate) fn room(&self) -> Room {
        let bytes_max = self.session.reply_bytes_max;
        Room { left: bytes_max.checked_sub(self.out.len()), bytes_max }
    }

    /// An argument as a number.
    pub(crate) fn integer(&self, at: usize) -> Result<i64> {
        integer(self.args[at]).ok_or_else(|| NOT_AN_INTEGER.into())
    }

    /// Carries out a change of keys.
    pub(crate) fn update<R>(&mut self, keys: &[&'a [u8]], change: impl FnOnce(&mut Update<'_, 'a>) -> R) -> Result<R> {
        if let Some(update) = &mut self.tx {
            return Ok(change(update));
        }
        let (result, needs) = self.shard.shard.update(keys, self.clock, change)?;
        self.done.needs = needs;
        Ok(result)
    }

    /// Looks at keys.
    pub(crate) fn read<R>(&mut self, keys: &[&[u8]], look: impl FnOnce(&mut View<'_, '_>) -> R) -> R {
        if let Some(update) = &mut self.tx {
            return look(update.view());
        }
        let (result, needs) = self.shard.shard.read(keys, self.clock.now_ms, look);
        self.done.needs = needs;
        result
    }

    /// What `take` makes of the cells of the first key, which is of this shape or not there, in order. It takes the room of
    /// the reply for that; where there is no more, the walk ends.
    pub(crate) fn cells<T>(
        &mut self,
        shape: Shape,
        mut take: impl FnMut(&mut Room, &[u8], &[u8]) -> Option<T>,
    ) -> Result<Vec<T>> {
        let (key, mut room, mut found) = (self.args[1], self.room(), Vec::new());
        self.read(&[key], |view| {
            shaped(view.get(key), shape)?;
            view.walk(key, &[], |subkey, value| {
                found.extend(take(&mut room, subkey, value));
                room.left.is_some()
            });
            room.check()
        })?;
        Ok(found)
    }

    /// Takes cells out of a key of this shape, and replies how many there were: `HDEL`, `SREM`, `ZREM`.
    pub(crate) fn remove_cells(&mut self, shape: Shape) -> Result {
        let (key, subkeys) = (self.args[1], &self.args[2..]);
        let removed = self.update(&[key], |update| {
            shaped(update.get(key), shape)?;
            Ok::<_, Failed>(subkeys.iter().filter(|subkey| update.remove_cell(key, subkey)).count())
        })??;
        self.write().integer(removed as i64);
        Ok(())
    }

    /// Replies how many cells a key of this shape has: `HLEN`, `SCARD`, `ZCARD`.
    pub(crate) fn count_cells(&mut self, shape: Shape) -> Result {
        let key = self.args[1];
        let count =
            self.read(&[key], |view| Ok::<_, Failed>(shaped(view.get(key), shape)?.map_or(0, |got| got.count)))?;
        self.write().integer(count as i64);
        Ok(())
    }
}

/// What a key has, if that is of this shape.
pub(crate) fn shaped(got: Option<Got<'_>>, shape: Shape) -> Result<Option<Got<'_>>> {
    match got {
        Some(got) if got.shape != shape => Err(WRONG_TYPE.into()),
        got => Ok(got),
    }
}

/// So many of these: each at most once if `count` is positive, else any of them, again and again. `takes` takes room for
/// one, and is not asked again once there is none.
pub(crate) fn choose<T: Clone>(mut from: Vec<T>, count: i64, mut takes: impl FnMut(&T) -> bool) -> Result<Vec<T>> {
    const CHOSEN_MAX: u64 = 1 << 20;
    let wanted = count.unsigned_abs();
    if count >= 0 {
        let wanted = from.len().min(usize::try_from(wanted).unwrap_or(usize::MAX));
        for at in 0..wanted {
            let other = at + random() as usize % (from.len() - at);
            from.swap(at, other);
        }
        let fit = from.iter().take(wanted).take_while(|&one| takes(one)).count();
        from.truncate(fit);
        return Ok(from);
    }
    if from.is_empty() {
        return Ok(from);
    }
    if wanted > CHOSEN_MAX {
        return Err("ERR value is out of range".into());
    }
    let any = (0..wanted).map(|_| &from[random() as usize % from.len()]);
    Ok(any.take_while(|&one| takes(one)).cloned().collect())
}

/// Any number.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0_u64)
}

/// A number with a fraction as Redis takes it.
pub(crate) fn float(bytes: &[u8]) -> Option<f64> {
    let number: f64 = std::str::from_utf8(bytes).ok()?.parse().ok()?;
    (!number.is_nan()).then_some(number)
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
        assert!(TELLING.iter().all(|name| find(name.as_bytes()).is_some_and(|command| command.purpose.is_some())));
        assert_eq!(find(b"GeT").map(|command| command.name), Some("get"));
        assert!(find(b"no such command, and long").is_none());
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

    #[test]
    fn numbers_are_as_strict_as_those_of_redis() {
        for (text, number) in [("0", Some(0)), ("-5", Some(-5)), ("+5", None), ("05", None), (" 5", None), ("", None)] {
            assert_eq!(integer(text.as_bytes()), number, "{text}");
        }
    }
}
