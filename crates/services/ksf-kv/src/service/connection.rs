//! One connection: its protocol, its share of a turn, and the commands of it that wait.

use ksf::Reply;
use ksf::error::FramingError;
use ksf::logged::{After, Logged};
use ksf::service::ConnKey;
use ksf_proto::resp::{self, Malformed, Progress, RespLimits, Scan, Writer};

use super::queue::{At, Queue, Resumed, Waiting};
use super::{Asked, EMPTIES_MAX, KvShard, LITTLE_WORK, TURN_WORK_MAX, now_ns};
use crate::commands::{self, Session, Standing};
use crate::http::{self, STRANGER_BYTES_MAX};

/// Most arguments of a command before `AUTH`, as in Redis.
const STRANGER_ARGUMENTS_MAX: usize = 10;
/// Bytes of a reply that is a status or a number.
const SHORT_REPLY_BYTES: usize = 64;
/// What a command that waits takes beside its bytes: nodes of a tree are half full at least, and the allocator adds to each piece.
const WAITING_BYTES: usize = size_of::<Resumed>() + 2 * (size_of::<At>() + size_of::<Waiting>()) + 3 * 16;

/// One connection.
#[derive(Debug, Default)]
pub struct KvConn {
    pub(super) protocol: Protocol,
    /// Empty lines of a stranger that has not told its protocol.
    pub(super) empties: u8,
    pub(super) progress: Progress,
    pub(super) session: Session,
    /// Commands of it that wait for room in the log, for the medium, for memory, or for values: those behind them wait, too.
    pub(super) waiting: usize,
    /// Units of work that its commands took, and the turn in which they did.
    pub(super) worked: (u64, u64),
    /// Its name among what waits, once something of it did.
    pub(super) key: Option<ConnKey>,
}

/// What a connection speaks.
#[derive(Debug, Default)]
pub(super) enum Protocol {
    /// Its first bytes have not told yet.
    #[default]
    Unknown,
    Resp,
    Http(Box<http::Reader>),
    /// Neither: the connection ends, with this error if there is one.
    Neither(Option<Vec<u8>>),
}

impl KvConn {
    /// True before `AUTH`, where a password or a near peer is needed. While commands of it wait, which none of a stranger
    /// do, what they change is not known.
    pub(super) fn is_stranger(&self) -> bool {
        self.session.standing != Standing::Known && self.waiting == 0
    }

    /// True for a command before `AUTH`, as that is one: it is refused, or changes the limits of those behind it.
    pub(super) fn never_waits(&self, asked: Asked<'_>) -> bool {
        asked.http.is_none() && self.is_stranger()
    }

    /// A stranger sent an empty line, or a command without words.
    pub(super) fn count_empty(&mut self) -> Result<(), FramingError> {
        self.empties += 1;
        if self.empties > EMPTIES_MAX {
            // Without a reply.
            self.protocol = Protocol::Neither(None);
            return Err(FramingError::Malformed);
        }
        Ok(())
    }

    /// True if its commands have taken their share of this turn, which is smaller in one that is full.
    pub(super) fn has_worked(&self, turn: u64, is_full: bool) -> bool {
        let (last, units) = self.worked;
        last == turn && units >= TURN_WORK_MAX || is_full && last + 1 >= turn && units >= LITTLE_WORK
    }

    /// A command of it took so many units.
    pub(super) fn work(&mut self, turn: u64, units: u64) {
        let before = if self.worked.0 == turn { self.worked.1 } else { 0 };
        self.worked = (turn, before + units);
    }

    /// What cuts its requests.
    pub(super) fn reader(&self) -> http::Reader {
        match self.session.standing {
            Standing::Known => http::Reader::default(),
            Standing::Unknown => http::Reader::of_stranger(401),
            Standing::Denied => http::Reader::of_stranger(403),
        }
    }

    /// Has a command wait in its place.
    pub(super) fn wait(
        &mut self,
        shard: &mut KvShard,
        key: ConnKey,
        resumed: Box<Resumed>,
        reply: &mut Reply<'_, Logged>,
        add: impl FnOnce(&mut Queue, At, Waiting),
    ) {
        self.waiting += 1;
        self.key = Some(key);
        let deferred = reply.defer_for(self.waiting_bytes(resumed.command.asked()));
        add(&mut shard.queue, (key, resumed.place), Waiting { deferred, resumed });
    }

    /// Answers a command that cannot be carried out.
    pub(super) fn fail(&mut self, asked: Asked<'_>, why: &str, reply: &mut Reply<'_, Logged>) {
        let mut out = Vec::new();
        let goes_on = match asked.http {
            Some(request) => http::fail(request, why, now_ns(), &mut out),
            None => {
                if self.session.takes_reply() {
                    Writer::new(&mut out, self.session.version).error(&format!("ERR {why}"));
                }
                true
            }
        };
        if !out.is_empty() {
            reply.after(After::Nothing).bytes(&out);
        }
        if !goes_on {
            reply.close();
        }
    }

    /// Bytes that a command is counted with beside its own while it waits: its reply, and its place in the queue. What is told
    /// of keys may be as long as a reply may be: then the connection is not read on, so that it never gets more replies at once
    /// than its limits allow.
    fn waiting_bytes(&self, asked: Asked<'_>) -> usize {
        let (is_short, short) = match asked.http {
            Some(request) => (request.has_short_reply(), http::SHORT_REPLY_BYTES),
            None => (commands::tells_little(asked.bytes), SHORT_REPLY_BYTES),
        };
        let long = if is_short { 0 } else { self.session.reply_bytes_max };
        // The command is counted, too, until it is answered.
        let reply = long.saturating_sub(asked.bytes.len()).max(short);
        reply + WAITING_BYTES + asked.http.map_or(0, size_of_val)
    }
}

/// [`resp::scan`] of a peer that has not authenticated, within the listener's limits, [`STRANGER_ARGUMENTS_MAX`], and
/// [`STRANGER_BYTES_MAX`] for the whole command.
///
/// # Errors
///
/// [`Malformed`], in the words of Redis: above the limits of a stranger other ones than above the listener's.
pub(super) fn scan_of_stranger(
    buf: &[u8],
    of_listener: &RespLimits,
    progress: &mut Progress,
) -> Result<Scan, Malformed> {
    let limits = RespLimits {
        arguments_max: STRANGER_ARGUMENTS_MAX,
        command_bytes_max: STRANGER_BYTES_MAX.min(of_listener.command_bytes_max),
        ..*of_listener
    };
    let is_inline = buf.first().is_some_and(|first| *first != b'*');
    match resp::scan(buf, &limits, progress) {
        Ok(Scan::Command(bytes)) if bytes > limits.command_bytes_max => Err(Malformed::LongInline),
        Ok(Scan::Incomplete(_)) if is_inline && buf.len() >= limits.command_bytes_max => Err(Malformed::LongInline),
        Err(malformed) if resp::scan(buf, of_listener, &mut Progress::default()) != Err(malformed) => {
            Err(match malformed {
                Malformed::Count => Malformed::UnauthenticatedCount,
                _ => Malformed::UnauthenticatedLength,
            })
        }
        scanned => scanned,
    }
}
