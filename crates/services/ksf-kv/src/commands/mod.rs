//! Commands: which there are, and what each does.

mod about;
mod arguments;
pub(crate) mod backup;
mod bits;
mod clients;
mod cluster;
mod drawn;
mod extended;
mod hashes;
mod info;
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
mod table;
mod transactions;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use ksf::files::FileRange;
use ksf_proto::resp::{self, Arguments, Malformed, SPANS_MAX, Spans, Version, Writer};
use ksf_store::backup::Backup;
use ksf_store::cells::Shape;
use ksf_store::log::AppendError;
use ksf_store::store::{Clock, Got, Needs, UpdateError};
use ksf_store::update::{Update, View};
use smallvec::SmallVec;

use self::table::Asked;
pub(crate) use self::table::{has_short_reply, purpose};
use self::transactions::Transaction;
use crate::clients::Client;
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

/// Which commands are answered: `CLIENT REPLY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Replies {
    #[default]
    On,
    Off,
    /// All but the next one.
    SkipNext,
    /// The one at hand is not.
    Skip,
}

/// What belongs to a connection.
#[derive(Debug, Default)]
pub(crate) struct Session {
    pub(crate) standing: Standing,
    pub(crate) version: Version,
    /// What others are told of it.
    pub(crate) client: Arc<Client>,
    pub(crate) replies: Replies,
    pub(crate) malformed: Option<Malformed>,
    pub(crate) transaction: Transaction,
    /// The backup that the peer makes.
    pub(crate) backup: Option<Backup>,
    /// Most bytes that the strings of a reply may have: it follows from the limits of the connection.
    pub(crate) reply_bytes_max: usize,
    /// The peer is there by TCP.
    pub(crate) is_tcp: bool,
}

impl Session {
    /// Whether the command at hand, which could not be carried out, is answered.
    pub(crate) fn takes_reply(&mut self) -> bool {
        let takes = self.replies == Replies::On;
        if self.replies == Replies::SkipNext {
            self.replies = Replies::On;
        }
        takes
    }
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

/// What is left of the bytes that a command may write: it is one append to the log. What it copies for that takes of it before
/// it takes memory.
struct AppendBound {
    bytes: usize,
    limit: usize,
}

impl AppendBound {
    fn of(call: &Call<'_, '_>) -> Self {
        Self { bytes: 0, limit: call.shard.shard.log().geometry().append_bytes_max() }
    }

    /// Takes what is written of a cell at least.
    fn take(&mut self, bytes: usize) -> Result {
        self.bytes += bytes;
        let Self { bytes, limit } = *self;
        if bytes > limit { Err(UpdateError::from(AppendError::TooLong { bytes, limit }).into()) } else { Ok(()) }
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
    /// The reply leaves at this time, in milliseconds since 1970, and the commands behind it wait for it.
    pub(crate) until_ms: Option<u64>,
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
            UpdateError::Append(AppendError::Full) => {
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

/// Carries out a command as it came, and writes its reply to `out`, which is empty; nothing for an empty command, and for one
/// that is not to be answered. `spans`: where its arguments are, if they were kept.
pub(crate) fn execute(
    shard: &mut KvShard,
    session: &mut Session,
    bytes: &[u8],
    spans: &Spans,
    now_ns: u64,
    out: &mut Vec<u8>,
) -> Done {
    let inline;
    // Those of most commands take no memory.
    let args: SmallVec<[&[u8]; SPANS_MAX]> = if let Some(kept) = spans.arguments(bytes) {
        kept.collect()
    } else if let Some(arguments) = Arguments::of(bytes) {
        arguments.collect()
    } else {
        match resp::inline(bytes) {
            Ok(arguments) => {
                inline = arguments;
                inline.iter().map(|argument| &argument[..]).collect()
            }
            Err(malformed) => {
                Writer::new(out, session.version).error(&format!("ERR {malformed}"));
                return Done { close: true, ..Done::default() };
            }
        }
    };
    if args.is_empty() {
        return Done::default();
    }
    let (version, standing, replies) = (session.version, session.standing, session.replies);
    if replies == Replies::SkipNext {
        session.replies = Replies::Skip;
    }
    let clock = Clock { now_ms: now_ns / 1_000_000, received_ns: None };
    let mut done = {
        let (shard, session) = (&mut *shard, &mut *session);
        let mut call = Call { shard, session, clock, args: &args, out, done: Done::default(), tx: None };
        run(&mut call);
        std::mem::take(&mut call.done)
    };
    if shard.shard.is_undone() {
        // It comes once more; the commands of a transaction may have changed them.
        (session.version, session.standing, session.replies) = (version, standing, replies);
        return done;
    }
    if matches!(session.replies, Replies::Off | Replies::Skip) {
        out.clear();
        done.file = None;
    }
    if session.replies == Replies::Skip {
        session.replies = Replies::On;
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

/// Commands that are carried out at once, also in a transaction.
const NEVER_QUEUED: [&str; 6] = ["exec", "discard", "multi", "quit", "reset", "watch"];

fn dispatch(call: &mut Call<'_, '_>) -> Result {
    let was_open = call.session.transaction.is_open();
    let done = match take_up(call) {
        Ok(asked) if was_open && !NEVER_QUEUED.contains(&asked.command.name) => {
            transactions::queue(call, asked.name()).inspect_err(|_| call.session.transaction.refuse())
        }
        // Its errors do not end a transaction.
        Ok(asked) => (asked.command.run)(call),
        Err(failed) => {
            call.session.transaction.refuse();
            Err(failed)
        }
    };
    if was_open || call.session.transaction.is_open() {
        let Session { client, transaction, .. } = &*call.session;
        client.queues(transaction.queued().map(<[_]>::len));
    }
    done
}

/// The command that is asked for, if it may be carried out here.
fn take_up(call: &mut Call<'_, '_>) -> Result<Asked> {
    let Some(asked) = Asked::of(call.args) else { return Err(unknown(call.args)) };
    if call.tx.is_none() {
        call.session.client.asks(asked.number, call.clock.now_ms);
    }
    if !asked.takes(call.args.len()) {
        return Err(Failed(format!("ERR wrong number of arguments for '{}' command", asked.name())));
    }
    match call.session.standing {
        Standing::Known => {}
        Standing::Unknown if asked.facts().needs_no_login() => {}
        Standing::Unknown => return Err("NOAUTH Authentication required.".into()),
        Standing::Denied => {
            call.done.close = true;
            return Err(DENIED.into());
        }
    }
    // What belongs to a transaction was looked at before.
    if call.tx.is_none()
        && let Err(elsewhere) = cluster::route(call, asked)
    {
        if asked.name() == "exec" {
            call.session.transaction = Transaction::default();
        }
        return Err(elsewhere);
    }
    Ok(asked)
}

/// True if a command of this server has the name.
pub(crate) fn is_command(name: &[u8]) -> bool {
    table::find(name).is_some()
}

/// Names that end a connection, as in Redis, because they begin a line of HTTP: `post` and `host:`, in any case.
const OF_HTTP: [&[u8]; 2] = [b"post", b"host:"];

/// True if a whole command must end the connection before it, and what follows it, is carried out.
///
/// # Errors
///
/// [`Malformed`]: an inline command cannot be read.
pub(crate) fn ends_connection(command: &[u8], spans: &Spans) -> std::result::Result<bool, Malformed> {
    let is_of_http = |name: &[u8]| OF_HTTP.iter().any(|known| name.eq_ignore_ascii_case(known));
    if let Some(mut arguments) = spans.arguments(command) {
        return Ok(arguments.next().is_some_and(is_of_http));
    }
    if let Some(mut arguments) = Arguments::of(command) {
        return Ok(arguments.next().is_some_and(is_of_http));
    }
    Ok(resp::inline(command)?.first().is_some_and(|name| is_of_http(name)))
}

/// The error for a first line that has no command, in the words of Redis; `None`: the connection ends without one.
pub(crate) fn unknown_line(line: &[u8]) -> Option<String> {
    if ends_connection(line, &Spans::default()).unwrap_or(true) {
        return None;
    }
    let arguments = resp::inline(line).ok()?;
    let arguments: Vec<&[u8]> = arguments.iter().map(|argument| &argument[..]).collect();
    if arguments.is_empty() { None } else { Some(unknown(&arguments).0) }
}

/// As Redis says it.
fn unknown(args: &[&[u8]]) -> Failed {
    let short = |argument: &[u8]| String::from_utf8_lossy(&argument[..argument.len().min(128)]).into_owned();
    if table::find(args[0]).is_some() && args.len() > 1 {
        let name = short(args[0]).to_ascii_uppercase();
        return Failed(format!("ERR unknown subcommand '{}'. Try {name} HELP.", short(args[1])));
    }
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
    fn numbers_are_as_strict_as_those_of_redis() {
        for (text, number) in [("0", Some(0)), ("-5", Some(-5)), ("+5", None), ("05", None), (" 5", None), ("", None)] {
            assert_eq!(integer(text.as_bytes()), number, "{text}");
        }
    }
}
