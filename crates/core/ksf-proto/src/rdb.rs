//! RDB: the snapshots of Redis, as Redis 7.0 writes them (version 10 of the format; rdb.h and rdb.c have its numbers).
//!
//! ```text
//!   REDIS0010 ─► auxiliary fields ─► database ─► (time of the end) kind, key, value ... ─► 0xff, checksum
//! ```
//!
//! [`Reader`] takes the bytes as they come, and says what those at the front are. No more than one string, or one part of a
//! key that Redis keeps packed, must be there at a time, and a length is held against its bound before memory is taken.
//!
//! What has no place in a key-value store of strings, lists, sets, sorted sets and hashes is refused by its name: streams,
//! modules and their data, functions. So are the encodings that Redis 7.0 reads and no longer writes.

use std::borrow::Cow;

mod checksum;
mod packed;

use crate::resp::format_double;

/// What a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    /// A string, which is one string.
    String,
    /// A list: its elements.
    List,
    /// A set: its members.
    Set,
    /// A sorted set: a member, its score, the next member.
    SortedSet,
    /// A hash: a field, its value, the next field.
    Hash,
}

impl KeyType {
    fn has_pairs(self) -> bool {
        matches!(self, Self::SortedSet | Self::Hash)
    }
}

/// What was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Nothing that is to be kept: the head, an auxiliary field, a hint.
    Nothing,
    /// What follows belongs to this database.
    Database(u64),
    /// A key begins. [`Part::Strings`] follow, and [`Part::KeyEnd`].
    Key {
        /// The key.
        key: Vec<u8>,
        /// What it is.
        kind: KeyType,
        /// When it ends: milliseconds since 1970.
        expires_ms: Option<u64>,
    },
    /// Strings of the key, as [`KeyType`] says; pairs come whole.
    Strings(Strings),
    /// The key is whole.
    KeyEnd,
    /// The snapshot is whole, and its checksum is right. What follows is something else.
    End,
}

/// Strings of a key, as they came: packed or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strings(EncodedStrings);

#[derive(Clone, Debug, PartialEq, Eq)]
enum EncodedStrings {
    One(Vec<u8>),
    Two(Vec<u8>, Vec<u8>),
    Listpack(Vec<u8>),
    Intset(Vec<u8>),
}

impl Strings {
    /// Hands out each of them, in order.
    pub fn each(&self, mut take: impl FnMut(&[u8])) {
        match &self.0 {
            EncodedStrings::One(string) => take(string),
            EncodedStrings::Two(one, other) => {
                take(one);
                take(other);
            }
            // They were looked at when they were read: none ends early.
            EncodedStrings::Listpack(bytes) => {
                let _ = packed::listpack(bytes, |entry| take(&entry.text()));
            }
            EncodedStrings::Intset(bytes) => {
                let _ = packed::intset(bytes, |number| take(number.to_string().as_bytes()));
            }
        }
    }
}

/// Why bytes are no snapshot that can be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRdb {
    /// It does not begin as one.
    #[error("it does not begin with REDIS and a version of four digits")]
    Magic,
    /// It was written by another version.
    #[error("it has version {found} of the format, and {VERSION_MIN} to {VERSION_MAX} are read")]
    Version {
        /// What it has.
        found: u32,
    },
    /// Something is announced that there is not.
    #[error("{0} is no opcode and no kind of a key that is known")]
    Opcode(u8),
    /// A length, a packed string or a number makes no sense.
    #[error("{0} makes no sense")]
    Content(&'static str),
    /// A string is longer than the limit.
    #[error("a string has {bytes} bytes, and at most {limit} are taken")]
    LongString {
        /// What was announced.
        bytes: u64,
        /// The limit.
        limit: usize,
    },
    /// The checksum is wrong.
    #[error("the checksum is wrong: {told:016x} is written, and the bytes have {found:016x}")]
    Checksum {
        /// What is written.
        told: u64,
        /// What the bytes have.
        found: u64,
    },
    /// It has something that cannot be taken.
    #[error("it has {0}, which cannot be taken")]
    Refused(&'static str),
    /// A key is something that cannot be taken.
    #[error("the key \"{key}\" is {what}, which cannot be taken")]
    RefusedKey {
        /// The key, as far as it is text.
        key: String,
        /// What it is.
        what: &'static str,
    },
}

/// Checksums came with version 5, and no encoding that is read is older; Redis 7.4 writes 12.
const VERSION_MIN: u32 = 5;
const VERSION_MAX: u32 = 12;
const HEAD_BYTES: usize = 9;

mod opcode {
    pub(super) const FUNCTION: u8 = 245;
    pub(super) const FUNCTION_BEFORE_RELEASE: u8 = 246;
    pub(super) const MODULE_AUX: u8 = 247;
    pub(super) const IDLE: u8 = 248;
    pub(super) const FREQUENCY: u8 = 249;
    pub(super) const AUX: u8 = 250;
    pub(super) const SIZES: u8 = 251;
    pub(super) const EXPIRES_MS: u8 = 252;
    pub(super) const EXPIRES_S: u8 = 253;
    pub(super) const DATABASE: u8 = 254;
    pub(super) const END: u8 = 255;
}

/// How the value of a key is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    /// One string.
    String,
    /// So many strings, or pairs of them.
    Plain(KeyType),
    /// So many members, each with a score of eight bytes.
    Scored,
    /// One string that is a listpack.
    Listpack(KeyType),
    /// One string that is an intset.
    Intset,
    /// So many nodes: an element, or a listpack of them.
    Quicklist,
}

impl Encoding {
    /// `Err`: what it is that is not taken; `None`: nobody knows.
    fn of(number: u8) -> Option<Result<Self, &'static str>> {
        const OLD: &str = "in an encoding that Redis 7.0 reads and no longer writes (have it write the file anew)";
        Some(match number {
            0 => Ok(Self::String),
            1 => Ok(Self::Plain(KeyType::List)),
            2 => Ok(Self::Plain(KeyType::Set)),
            4 => Ok(Self::Plain(KeyType::Hash)),
            5 => Ok(Self::Scored),
            11 => Ok(Self::Intset),
            16 => Ok(Self::Listpack(KeyType::Hash)),
            17 => Ok(Self::Listpack(KeyType::SortedSet)),
            18 => Ok(Self::Quicklist),
            20 => Ok(Self::Listpack(KeyType::Set)),
            3 | 9 | 10 | 12 | 13 | 14 => Err(OLD),
            6 | 7 => Err("a value of a module"),
            15 | 19 | 21 => Err("a stream"),
            22..=25 => Err("a hash whose fields have times of their own"),
            _ => return None,
        })
    }

    fn kind(self) -> KeyType {
        match self {
            Self::String => KeyType::String,
            Self::Plain(kind) | Self::Listpack(kind) => kind,
            Self::Scored => KeyType::SortedSet,
            Self::Intset => KeyType::Set,
            Self::Quicklist => KeyType::List,
        }
    }

    /// Whether the number of parts is written in front of them.
    fn is_counted(self) -> bool {
        matches!(self, Self::Plain(_) | Self::Scored | Self::Quicklist)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Between {
        expires_ms: Option<u64>,
    },
    /// So many parts of a key are left.
    Inside {
        encoding: Encoding,
        left: u64,
    },
    Ended,
}

/// Reads a snapshot.
#[derive(Clone, Debug)]
pub struct Reader {
    state: State,
    checksum: u64,
    string_bytes_max: usize,
}

/// Why a look at the bytes gave nothing.
enum Stop {
    /// There are too few of them.
    Short,
    Bad(BadRdb),
}

impl From<BadRdb> for Stop {
    fn from(bad: BadRdb) -> Self {
        Self::Bad(bad)
    }
}

impl Reader {
    /// For a snapshot whose strings have at most so many bytes; those that are parts of keys which Redis keeps packed count
    /// as strings.
    pub fn new(string_bytes_max: usize) -> Self {
        Self { state: State::Head, checksum: 0, string_bytes_max }
    }

    /// True behind [`Part::End`].
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// What lies at the front of `input`, and how many bytes it takes, which may be none. `None`: it is not whole yet, or
    /// the snapshot has [ended](Self::is_ended).
    ///
    /// # Errors
    ///
    /// [`BadRdb`]: nothing that follows can be read.
    pub fn read(&mut self, input: &[u8]) -> Result<Option<(Part, usize)>, BadRdb> {
        let mut cursor = Cursor { rest: input, string_bytes_max: self.string_bytes_max };
        match self.step(&mut cursor) {
            Ok((part, next)) => {
                let used = input.len() - cursor.rest.len();
                self.checksum = checksum::crc64(self.checksum, &input[..used]);
                self.state = next;
                Ok(Some((part, used)))
            }
            Err(Stop::Short) => Ok(None),
            Err(Stop::Bad(bad)) => Err(bad),
        }
    }

    fn step(&self, cursor: &mut Cursor<'_>) -> Result<(Part, State), Stop> {
        match self.state {
            State::Head => {
                head(cursor)?;
                Ok((Part::Nothing, State::Between { expires_ms: None }))
            }
            State::Between { expires_ms } => self.between(cursor, expires_ms),
            State::Inside { left: 0, .. } => Ok((Part::KeyEnd, State::Between { expires_ms: None })),
            State::Inside { encoding, left } => {
                Ok((Part::Strings(strings(cursor, encoding)?), State::Inside { encoding, left: left - 1 }))
            }
            State::Ended => Err(Stop::Short),
        }
    }

    fn between(&self, cursor: &mut Cursor<'_>, expires_ms: Option<u64>) -> Result<(Part, State), Stop> {
        let same = State::Between { expires_ms };
        let number = cursor.byte()?;
        match number {
            opcode::AUX => {
                cursor.string()?;
                cursor.string()?;
                Ok((Part::Nothing, same))
            }
            opcode::SIZES => {
                cursor.count()?;
                cursor.count()?;
                Ok((Part::Nothing, same))
            }
            opcode::IDLE => cursor.count().map(|_| (Part::Nothing, same)),
            opcode::FREQUENCY => cursor.byte().map(|_| (Part::Nothing, same)),
            opcode::EXPIRES_MS => {
                // Before 1970 is as good as then: it has ended.
                let ms = u64::try_from(i64::from_le_bytes(*cursor.array()?)).unwrap_or(0);
                Ok((Part::Nothing, State::Between { expires_ms: Some(ms) }))
            }
            opcode::EXPIRES_S => {
                let seconds = u32::from_le_bytes(*cursor.array()?);
                Ok((Part::Nothing, State::Between { expires_ms: Some(u64::from(seconds) * 1000) }))
            }
            opcode::DATABASE => cursor.count().map(|number| (Part::Database(number), same)),
            opcode::END => {
                let found = checksum::crc64(self.checksum, &[opcode::END]);
                // 0 says that it was switched off.
                match u64::from_le_bytes(*cursor.array()?) {
                    told if told == found || told == 0 => Ok((Part::End, State::Ended)),
                    told => Err(BadRdb::Checksum { told, found }.into()),
                }
            }
            opcode::FUNCTION | opcode::FUNCTION_BEFORE_RELEASE => Err(BadRdb::Refused("functions").into()),
            opcode::MODULE_AUX => Err(BadRdb::Refused("data of a module").into()),
            number => {
                let encoding = Encoding::of(number).ok_or(BadRdb::Opcode(number))?;
                let key = cursor.string()?.into_owned();
                let encoding = encoding
                    .map_err(|what| BadRdb::RefusedKey { key: String::from_utf8_lossy(&key).into_owned(), what })?;
                let left = if encoding.is_counted() { cursor.count()? } else { 1 };
                Ok((Part::Key { key, kind: encoding.kind(), expires_ms }, State::Inside { encoding, left }))
            }
        }
    }
}

fn head(cursor: &mut Cursor<'_>) -> Result<(), Stop> {
    const MAGIC: &[u8] = b"REDIS";
    let there = &cursor.rest[..cursor.rest.len().min(MAGIC.len())];
    if !MAGIC.starts_with(there) {
        return Err(BadRdb::Magic.into());
    }
    let head = cursor.take(HEAD_BYTES)?;
    let digits = &head[MAGIC.len()..];
    let found = std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()));
    let found = found.and_then(|digits| digits.parse().ok()).ok_or(BadRdb::Magic)?;
    if (VERSION_MIN..=VERSION_MAX).contains(&found) { Ok(()) } else { Err(BadRdb::Version { found }.into()) }
}

/// The next part of a key.
fn strings(cursor: &mut Cursor<'_>, encoding: Encoding) -> Result<Strings, Stop> {
    Ok(Strings(match encoding {
        Encoding::Plain(kind) if kind.has_pairs() => {
            let one = cursor.string()?.into_owned();
            EncodedStrings::Two(one, cursor.string()?.into_owned())
        }
        Encoding::String | Encoding::Plain(_) => EncodedStrings::One(cursor.string()?.into_owned()),
        Encoding::Scored => {
            let member = cursor.string()?.into_owned();
            let score = f64::from_le_bytes(*cursor.array()?);
            if score.is_nan() {
                return Err(BadRdb::Content("a score").into());
            }
            EncodedStrings::Two(member, format_double(score).into_bytes())
        }
        Encoding::Listpack(kind) => EncodedStrings::Listpack(listpack(cursor, kind)?),
        Encoding::Intset => {
            let bytes = cursor.string()?.into_owned();
            packed::intset(&bytes, |_| {}).ok_or(BadRdb::Content("an intset"))?;
            EncodedStrings::Intset(bytes)
        }
        Encoding::Quicklist => match cursor.count()? {
            1 => EncodedStrings::One(cursor.string()?.into_owned()),
            2 => EncodedStrings::Listpack(listpack(cursor, KeyType::List)?),
            _ => return Err(BadRdb::Content("a node of a list").into()),
        },
    }))
}

/// A string that is a listpack for a key of this kind.
fn listpack(cursor: &mut Cursor<'_>, kind: KeyType) -> Result<Vec<u8>, Stop> {
    let bytes = cursor.string()?.into_owned();
    let (mut count, mut scores_are_right) = (0_u64, true);
    let walked = packed::listpack(&bytes, |entry| {
        count += 1;
        scores_are_right &= kind != KeyType::SortedSet || count % 2 == 1 || entry.is_score();
    });
    if walked.is_none() || kind.has_pairs() && count % 2 == 1 {
        return Err(BadRdb::Content("a listpack").into());
    }
    if scores_are_right { Ok(bytes) } else { Err(BadRdb::Content("a score").into()) }
}

/// What is left of the bytes.
struct Cursor<'b> {
    rest: &'b [u8],
    string_bytes_max: usize,
}

/// A length, or how a string is written that has none.
enum Length {
    Plain(u64),
    Encoded(u8),
}

impl<'b> Cursor<'b> {
    fn take(&mut self, bytes: usize) -> Result<&'b [u8], Stop> {
        let (front, rest) = self.rest.split_at_checked(bytes).ok_or(Stop::Short)?;
        self.rest = rest;
        Ok(front)
    }

    fn array<const N: usize>(&mut self) -> Result<&'b [u8; N], Stop> {
        let (front, rest) = self.rest.split_first_chunk().ok_or(Stop::Short)?;
        self.rest = rest;
        Ok(front)
    }

    fn byte(&mut self) -> Result<u8, Stop> {
        self.array::<1>().map(|byte| byte[0])
    }

    fn length(&mut self) -> Result<Length, Stop> {
        let first = self.byte()?;
        Ok(match first >> 6 {
            0 => Length::Plain(u64::from(first & 0x3f)),
            1 => Length::Plain(u64::from(first & 0x3f) << 8 | u64::from(self.byte()?)),
            2 => match first {
                0x80 => Length::Plain(u32::from_be_bytes(*self.array()?).into()),
                0x81 => Length::Plain(u64::from_be_bytes(*self.array()?)),
                _ => return Err(BadRdb::Content("a length").into()),
            },
            _ => Length::Encoded(first & 0x3f),
        })
    }

    fn count(&mut self) -> Result<u64, Stop> {
        match self.length()? {
            Length::Plain(count) => Ok(count),
            Length::Encoded(_) => Err(BadRdb::Content("a number").into()),
        }
    }

    /// The length of a string, within the limit.
    fn limited(&self, bytes: u64) -> Result<usize, Stop> {
        let limit = self.string_bytes_max;
        let fits = usize::try_from(bytes).ok().filter(|bytes| *bytes <= limit);
        fits.ok_or_else(|| BadRdb::LongString { bytes, limit }.into())
    }

    fn string(&mut self) -> Result<Cow<'b, [u8]>, Stop> {
        const LZF: u8 = 3;
        let number = |number: i64| Ok(Cow::Owned(number.to_string().into_bytes()));
        match self.length()? {
            Length::Plain(bytes) => {
                let bytes = self.limited(bytes)?;
                self.take(bytes).map(Cow::Borrowed)
            }
            Length::Encoded(0) => number(i8::from_le_bytes(*self.array()?).into()),
            Length::Encoded(1) => number(i16::from_le_bytes(*self.array()?).into()),
            Length::Encoded(2) => number(i32::from_le_bytes(*self.array()?).into()),
            Length::Encoded(LZF) => {
                let packed_bytes = self.count()?;
                let packed_bytes = self.limited(packed_bytes)?;
                let bytes = self.count()?;
                let bytes = self.limited(bytes)?;
                let unpacked = packed::lzf(self.take(packed_bytes)?, bytes);
                unpacked.map(Cow::Owned).ok_or_else(|| BadRdb::Content("a compressed string").into())
            }
            Length::Encoded(_) => Err(BadRdb::Content("the length of a string").into()),
        }
    }
}

#[cfg(test)]
mod tests;
