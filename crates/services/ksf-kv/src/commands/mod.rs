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
mod pattern;
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
use ksf_store::log::{AppendError, Purpose};
use ksf_store::store::{Clock, Got, Needs, UpdateError};
use ksf_store::update::{Update, View};
use ksf_store::work;
use smallvec::SmallVec;

pub(crate) use self::table::purpose;
use self::table::{Asked, has_short_reply};
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
    /// Bytes that the connection may keep beyond what it keeps now, for a transaction.
    pub(crate) room_bytes: usize,
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
        let too_long =
            || Failed::from(format!("ERR the reply has more than {} bytes: ask for a part of it", self.bytes_max));
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
    /// The reply leaves at this time by [`monotonic_ms`](crate::clients::monotonic_ms), and the commands behind it wait for it.
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
    /// What the command takes room in the log for, if it does.
    purpose: Option<Purpose>,
}

/// Longest part in bytes of an argument that an error quotes: that of Redis' "unknown command".
const QUOTED_BYTES_MAX: usize = 128;

/// Text of the error reply of a command that was not executed. It may quote an argument, which has any bytes.
#[derive(Debug)]
pub(crate) struct Failed(Vec<u8>);

impl Failed {
    /// An error that quotes an argument, as Redis prints one: as a string of C, up to a byte 0. Of a long one the start is quoted.
    /// Line ends at the end are left out; the writer makes spaces of others.
    fn quoting(front: &str, argument: &[u8], behind: &str) -> Self {
        let mut text = [front.as_bytes(), quoted(argument, QUOTED_BYTES_MAX), behind.as_bytes()].concat();
        let bytes = text.iter().rposition(|byte| !matches!(byte, b'\r' | b'\n')).map_or(0, |last| last + 1);
        text.truncate(bytes);
        Self(text)
    }
}

/// The part of an argument that an error quotes.
fn quoted(argument: &[u8], bytes_max: usize) -> &[u8] {
    let text = argument.split(|byte| *byte == 0).next().unwrap_or_default();
    &text[..text.len().min(bytes_max)]
}

impl From<&str> for Failed {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for Failed {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<UpdateError> for Failed {
    fn from(error: UpdateError) -> Self {
        match error {
            UpdateError::Append(AppendError::Full) => {
                "OOM the log is full: nothing can be written until keys are deleted".into()
            }
            UpdateError::Memory { .. } => NO_MEMORY.into(),
            error => format!("ERR {error}").into(),
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
        let mut call = Call { shard, session, clock, args: &args, out, done: Done::default(), tx: None, purpose: None };
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
        call.write().error_bytes(&text);
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
        Ok(asked) => {
            call.purpose = asked.command.purpose;
            let start = call.out.len();
            let done = (asked.command.run)(call);
            count_reply(asked, call.out.len() - start);
            done
        }
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

/// Bytes of a reply that was put together from small parts, which take as long as one unit of [`work`].
const BYTES_PER_UNIT: usize = 8;

/// Counts what a command wrote as work, whether it leaves or not.
fn count_reply(asked: Asked, bytes: usize) {
    // Those of the commands of a transaction are counted.
    if asked.name() != "exec" {
        let is_of_values = !asked.facts().keys.is_empty();
        work::add(if is_of_values { work::of_bytes(bytes) } else { (bytes / BYTES_PER_UNIT) as u64 });
    }
}

/// The command that is asked for, if it may be carried out here.
fn take_up(call: &mut Call<'_, '_>) -> Result<Asked> {
    let Some(asked) = Asked::of(call.args) else { return Err(Failed(unknown_text(call.args))) };
    if call.tx.is_none() {
        call.session.client.asks(asked.number, call.clock.now_ms);
    }
    if !asked.takes(call.args.len()) {
        if asked.name() == "exec" {
            call.session.transaction = Transaction::default();
            return Err(
                "EXECABORT Transaction discarded because of: wrong number of arguments for 'exec' command".into()
            );
        }
        return Err(Failed::from(format!("ERR wrong number of arguments for '{}' command", asked.name())));
    }
    match call.session.standing {
        Standing::Known => {}
        Standing::Unknown if asked.facts().needs_no_login() => {}
        Standing::Unknown if asked.name() == "exec" => {
            return Err("EXECABORT Transaction discarded because of: NOAUTH Authentication required.".into());
        }
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

/// Commands without keys whose replies are short. Of those that are not here a reply may have any length.
const SHORT_WITHOUT_KEYS: [&str; 19] = [
    "asking",
    "auth",
    "dbsize",
    "discard",
    "flushall",
    "flushdb",
    "hello",
    "lastsave",
    "multi",
    "ping",
    "quit",
    "readonly",
    "readwrite",
    "reset",
    "save",
    "select",
    "time",
    "unwatch",
    "wait",
];

/// Whether the reply to a command is short, or has no more bytes than the command, as far as its name tells.
pub(crate) fn tells_little(command: &[u8]) -> bool {
    has_short_reply(command) || table::named(command).is_some_and(|(found, _)| SHORT_WITHOUT_KEYS.contains(&found.name))
}

/// Most bytes that the reply to a command may have, from what the index knows of its keys.
pub(crate) fn reply_bytes(shard: &mut KvShard, session: &Session, command: &[u8], now_ms: u64) -> usize {
    let bytes_max = session.reply_bytes_max;
    if has_short_reply(command) {
        return 0;
    }
    let Some(args) = Arguments::of(command).map(|args| args.collect::<SmallVec<[&[u8]; SPANS_MAX]>>()) else {
        // A line: there are no long ones.
        return if command.len() < 16 && !session.transaction.is_open() { 0 } else { bytes_max };
    };
    let Some(asked) = Asked::of(&args).filter(|asked| asked.takes(args.len())) else { return 0 };
    let name = asked.name();
    if session.transaction.is_open() && !NEVER_QUEUED.contains(&name) || SHORT_WITHOUT_KEYS.contains(&name) {
        // What it was sent, at most.
        return command.len();
    }
    let keys: SmallVec<[&[u8]; SPANS_MAX]> = asked.keys(&args).collect();
    if keys.is_empty() {
        return bytes_max;
    }
    /// Of an element, around its bytes.
    const AROUND_BYTES: usize = 32;
    let (values, _) = shard.shard.read(&keys, now_ms, |view| {
        keys.iter().fold(0_usize, |sum, key| sum.saturating_add(value_bytes(view.get(key), bytes_max) + AROUND_BYTES))
    });
    values.saturating_add(command.len()).min(bytes_max)
}

/// Most bytes of a value in a reply, of which the index knows the length only if it is a string.
pub(crate) fn value_bytes(got: Option<Got<'_>>, bytes_max: usize) -> usize {
    match got {
        None => 0,
        Some(got) if got.shape == Shape::String => got.value_bytes(),
        Some(_) => bytes_max,
    }
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

/// True for an empty line, and for an array without elements.
pub(crate) fn is_empty(command: &[u8], spans: &Spans) -> bool {
    if let Some(arguments) = spans.arguments(command) {
        return arguments.len() == 0;
    }
    match Arguments::of(command) {
        Some(mut arguments) => arguments.next().is_none(),
        None => command.trim_ascii().is_empty(),
    }
}

/// The error for a first line that has no command, in the words of Redis; `None`: the connection ends without one.
pub(crate) fn unknown_line(line: &[u8]) -> Option<Vec<u8>> {
    if ends_connection(line, &Spans::default()).unwrap_or(true) {
        return None;
    }
    let arguments = resp::inline(line).ok()?;
    let arguments: Vec<&[u8]> = arguments.iter().map(|argument| &argument[..]).collect();
    if arguments.is_empty() { None } else { Some(unknown_text(&arguments)) }
}

/// The error for a command or subcommand that is not in the table, in the words of Redis.
fn unknown_text(args: &[&[u8]]) -> Vec<u8> {
    let name = quoted(args[0], QUOTED_BYTES_MAX);
    if table::find(args[0]).is_some() && args.len() > 1 {
        let (subcommand, name) = (quoted(args[1], QUOTED_BYTES_MAX), name.to_ascii_uppercase());
        return [b"ERR unknown subcommand '", subcommand, b"'. Try ", &name, b" HELP."].concat();
    }
    let mut others = Vec::new();
    for argument in &args[1..] {
        let Some(left) = QUOTED_BYTES_MAX.checked_sub(others.len()).filter(|left| *left > 0) else { break };
        others.extend_from_slice(&[b"'", quoted(argument, left), b"' "].concat());
    }
    [b"ERR unknown command '", name, b"', with args beginning with: ", &others].concat()
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
        let purpose = self.purpose;
        let change = |update: &mut Update<'_, 'a>| {
            purpose.into_iter().for_each(|purpose| update.takes_room_for(purpose));
            change(update)
        };
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

/// A number with a fraction as Redis takes it: decimal or hexadecimal, and not one that is too large or too small for 64 bits.
pub(crate) fn float(bytes: &[u8]) -> Option<f64> {
    let (number, is_in_range) = strtod(bytes)?;
    is_in_range.then_some(number)
}

/// A bound of scores as Redis takes it: also with spaces in front, of any size, and nothing for 0. What is behind a byte 0 is not
/// looked at.
pub(crate) fn float_bound(bytes: &[u8]) -> Option<f64> {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let is_space = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0x0b;
    let number_at = text.iter().position(|byte| !is_space(byte)).unwrap_or(0);
    if text.is_empty() { Some(0.0) } else { strtod(&text[number_at..]).map(|(number, _)| number) }
}

/// What strtod(3) reads, if that is the whole text and a number; false if it is too large or too small.
fn strtod(text: &[u8]) -> Option<(f64, bool)> {
    let (sign, rest) = match text {
        [b'-', rest @ ..] => (-1.0, rest),
        [b'+', rest @ ..] => (1.0, rest),
        rest => (1.0, rest),
    };
    if rest.eq_ignore_ascii_case(b"inf") || rest.eq_ignore_ascii_case(b"infinity") {
        return Some((sign * f64::INFINITY, true));
    }
    let (number, is_zero): (f64, _) = match rest {
        [b'0', b'x' | b'X', digits @ ..] => {
            let Hexadecimal { mantissa, exponent } = hexadecimal(digits)?;
            (scaled(mantissa as f64, exponent), mantissa == 0)
        }
        _ => {
            if !rest.iter().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'E' | b'+' | b'-')) {
                return None;
            }
            let mut mantissa = rest.split(|byte| byte.eq_ignore_ascii_case(&b'e')).next()?.iter();
            let is_zero = mantissa.all(|byte| matches!(byte, b'0' | b'.'));
            // A second sign is none.
            let unsigned = std::str::from_utf8(rest).ok().filter(|text| !text.starts_with(['+', '-']))?;
            (unsigned.parse().ok()?, is_zero)
        }
    };
    Some((sign * number, number.is_finite() && (number != 0.0 || is_zero)))
}

/// `mantissa * 2^exponent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hexadecimal {
    mantissa: u64,
    exponent: i64,
}

/// Largest power that is looked at, up or down: more than any number has.
const EXPONENT_MAX: i64 = 1 << 32;

/// What is behind the `0x`: digits, of which some may be behind a point, and a power of two. What does not fit into 64 bits is in the lowest
/// one, as far as rounding is concerned.
fn hexadecimal(text: &[u8]) -> Option<Hexadecimal> {
    let power_at = text.iter().position(|byte| byte.eq_ignore_ascii_case(&b'p'));
    let (digits, mut exponent) = match power_at {
        Some(at) => {
            let power = std::str::from_utf8(&text[at + 1..]).ok()?;
            let number = power.strip_prefix(['+', '-']).unwrap_or(power);
            if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            let number = number.parse().unwrap_or(EXPONENT_MAX).min(EXPONENT_MAX);
            (&text[..at], if power.starts_with('-') { -number } else { number })
        }
        None => (text, 0),
    };
    let (mut mantissa, mut is_behind, mut count) = (0_u64, false, 0);
    for byte in digits {
        if *byte == b'.' && !is_behind {
            is_behind = true;
            continue;
        }
        let digit = u64::from(char::from(*byte).to_digit(16)?);
        count += 1;
        if mantissa >> 60 == 0 {
            mantissa = mantissa << 4 | digit;
            exponent -= 4 * i64::from(is_behind);
        } else {
            mantissa |= u64::from(digit != 0);
            exponent += 4 * i64::from(!is_behind);
        }
    }
    (count > 0).then_some(Hexadecimal { mantissa, exponent })
}

fn scaled(mut number: f64, exponent: i64) -> f64 {
    // In steps, of which each factor is exact.
    let mut left = exponent.clamp(-3000, 3000) as i32;
    while left != 0 {
        let step = left.clamp(-900, 900);
        number *= 2_f64.powi(step);
        left -= step;
    }
    number
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

    #[test]
    fn fractions_are_as_strict_as_those_of_redis() {
        let (none, inf) = (None, Some(f64::INFINITY));
        for (text, number, bound) in [
            ("1.", Some(1.0), Some(1.0)),
            (".5", Some(0.5), Some(0.5)),
            ("-0x1.8p1", Some(-3.0), Some(-3.0)),
            ("0x10", Some(16.0), Some(16.0)),
            ("0x1p-1074", Some(5e-324), Some(5e-324)),
            ("0x1p-1080", none, Some(0.0)),
            ("0x1p99999999999999999999", none, inf),
            ("0x0p9999", Some(0.0), Some(0.0)),
            ("Infinity", inf, inf),
            ("1e400", none, inf),
            ("1e-400", none, Some(0.0)),
            ("0e400", Some(0.0), Some(0.0)),
            ("", none, Some(0.0)),
            (" 1", none, Some(1.0)),
            ("  ", none, none),
            ("1 ", none, none),
            ("1\x002", none, Some(1.0)),
            ("--1", none, none),
            ("nan", none, none),
            ("0x", none, none),
            ("0x1p", none, none),
            ("0x.p1", none, none),
            ("1_0", none, none),
            ("1e", none, none),
        ] {
            assert_eq!(float(text.as_bytes()), number, "{text}");
            assert_eq!(float_bound(text.as_bytes()), bound, "{text}");
        }
    }
}
