//! What a log looks like on its medium, byte by byte: batches of records.
//!
//! ```text
//!   block 0          block 1 ...
//!   ┌──────────────────────────────┬──────────────────────┬───────── ─ ─
//!   │ segment header  0...         │ batch header         │ batch header
//!   │ (one block)                  │ records, links, 0... │ ...
//!   └──────────────────────────────┴──────────────────────┴───────── ─ ─
//! ```
//!
//! A batch is what one write makes durable: whole or not at all, because its body has one checksum. It begins on a block
//! of its own, so that no block of an earlier batch is ever written again. All numbers are little-endian.
//!
//! `docs/formats/store.md` has the same as tables.

use std::num::NonZeroUsize;

/// Bytes of a segment header and of a batch header.
pub const HEADER_BYTES: usize = 64;
/// Bytes of one link in a batch.
pub const LINK_BYTES: usize = 16;
/// Bytes of a record before its optional fields, its key, its subkey and its value.
pub const RECORD_BYTES: usize = 32;
/// Records begin at a multiple of this.
pub const RECORD_ALIGN: usize = 8;

const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"ksfB");
const SEGMENT_MAGIC: u32 = u32::from_le_bytes(*b"ksfS");

/// Logs of one store: one for each shard it ever had.
pub const LOGS_MAX: usize = 256;

/// A place in a log: bytes from its beginning, as if all of its segments, also those that were cleaned, lay one behind
/// the other. It grows with every batch, so it is also the number that replies wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

/// The first block of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store that the segment belongs to.
    pub store: u64,
    /// The log.
    pub log: u16,
    /// Number of the segment in its log, from 0.
    pub number: u64,
    /// Starts of the store before the segment was begun: batches of an earlier one, left by what was in this place before,
    /// do not belong to it.
    pub epoch: u32,
    /// Bytes of the segment, its header among them.
    pub segment_bytes: u64,
    /// Bytes of a block: what the medium writes whole.
    pub block_bytes: u32,
    /// Whether what is in it counts.
    pub standing: Standing,
    /// Earlier segments of the log that counted when this one was begun, by their numbers. One that is named here and
    /// found neither whole nor erased is lost. `None` if the list was not written whole: then the segment was not begun,
    /// or is being erased. Its head lies in one sector, which no medium tears.
    pub live: Option<Vec<u64>>,
}

/// Whether what is in a segment counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Standing {
    /// It does.
    Counts = 0,
    /// Its records were written anew in a later segment, or are out of date.
    Cleaned = 1,
    /// A crash cut the log before it.
    GivenUp = 2,
}

/// The head of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    /// The store that the batch belongs to.
    pub store: u64,
    /// The log.
    pub log: u16,
    /// Where the batch begins.
    pub lsn: Lsn,
    /// How far replies may have told of this log when the batch was made: all of it is durable, and all that it saw.
    pub promised: Lsn,
    /// Starts of the store before this one. Never smaller than that of the batch before.
    pub epoch: u32,
    /// Records at the front of the body.
    pub records: u32,
    /// Links behind them.
    pub links: u16,
    /// Bytes of the body.
    pub body_bytes: u32,
    /// CRC-32C of the body.
    pub body_crc: u32,
    /// When it was made: nanoseconds since 1970.
    pub time_ns: u64,
    /// The last batch of its segment: the log goes on in the next one.
    pub ends_segment: bool,
}

/// What a batch saw of another log, written since the same start: it counts only if that log is whole up to there. What
/// was there at the start already needs no link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The other log.
    pub log: u16,
    /// The end of what was seen.
    pub lsn: Lsn,
}

/// What a record does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RecordKind {
    /// The key is a string with this value; whatever it was before is gone.
    String = 1,
    /// The key, with all that belongs to it, is gone.
    Drop = 2,
    /// A field of a hash has this value; the field is the subkey.
    Field = 3,
    /// The subkey is a member of a set.
    Member = 4,
    /// An element of a list; the subkey is its place, eight bytes in big-endian order, of which the first bit is inverted.
    Element = 5,
    /// The subkey is a member of a sorted set; the value is its score.
    Scored = 6,
    /// The subkey of a hash, set, list or sorted set is gone.
    Remove = 7,
    /// The key ends at the record's expiry time, or no longer ends if it has none.
    Expire = 8,
    /// Every key is gone: no record of a smaller version counts, in any log. It has no key.
    Flush = 9,
}

impl RecordKind {
    fn from_byte(byte: u8) -> Option<Self> {
        const ALL: [RecordKind; 9] = [
            RecordKind::String,
            RecordKind::Drop,
            RecordKind::Field,
            RecordKind::Member,
            RecordKind::Element,
            RecordKind::Scored,
            RecordKind::Remove,
            RecordKind::Expire,
            RecordKind::Flush,
        ];
        // In the order of their numbers, from 1.
        ALL.get(usize::from(byte).wrapping_sub(1)).copied()
    }
}

/// A record in a batch, or one to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// What it does.
    pub kind: RecordKind,
    /// The order of the writes to one key, over all logs: the largest counts.
    pub version: u64,
    /// When the key ends: milliseconds since 1970.
    pub expires_ms: Option<u64>,
    /// When the request was received: nanoseconds since 1970.
    pub received_ns: Option<u64>,
    /// The key.
    pub key: &'a [u8],
    /// The part of the key that is meant, as [`RecordKind`] says; empty otherwise.
    pub subkey: &'a [u8],
    /// The value; empty where [`RecordKind`] names none.
    pub value: &'a [u8],
}

/// Longest key and longest subkey, in bytes.
pub const KEY_BYTES_MAX: usize = u16::MAX as usize;

const HAS_EXPIRY: u8 = 1;
const HAS_RECEIVED: u8 = 2;
const ENDS_SEGMENT: u32 = 1;

/// Why bytes are no header, no batch or no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end before what they announce.
    #[error("the bytes end early")]
    Short,
    /// There is something else, or nothing.
    #[error("no magic number")]
    Magic,
    /// The checksum of the header is wrong.
    #[error("the checksum of the header is wrong")]
    HeaderChecksum,
    /// The checksum of the body, or of the value, is wrong.
    #[error("the checksum of the data is wrong")]
    DataChecksum,
    /// The checksums are right, and the content makes no sense: another version of the format.
    #[error("unknown content")]
    Content,
}

/// Reads numbers from a slice that was checked to be long enough.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let mut number = [0; 2];
    number.copy_from_slice(&bytes[at..at + 2]);
    u16::from_le_bytes(number)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

/// Bytes at the front of what a log has written that a reader looks at: the header of a segment with its list, or a batch. Behind
/// them are zeros up to a whole block. Of anything else, all of it.
pub fn meaningful_bytes(written: &[u8]) -> usize {
    let bytes = match (BatchHeader::decode(written), SegmentHeader::decode(written)) {
        (Ok(batch), _) => HEADER_BYTES + batch.body_bytes as usize,
        (_, Ok(SegmentHeader { live: Some(live), .. })) => HEADER_BYTES + 8 * live.len(),
        _ => written.len(),
    };
    bytes.min(written.len())
}

impl SegmentHeader {
    /// The first block of the segment.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = Vec::with_capacity(self.block_bytes as usize);
        block.extend_from_slice(&[0; 4]);
        block.extend_from_slice(&SEGMENT_MAGIC.to_le_bytes());
        block.extend_from_slice(&self.number.to_le_bytes());
        block.extend_from_slice(&self.store.to_le_bytes());
        block.extend_from_slice(&self.segment_bytes.to_le_bytes());
        block.extend_from_slice(&self.block_bytes.to_le_bytes());
        let live = self.live.as_deref().unwrap_or_default();
        block.extend_from_slice(&(live.len() as u32).to_le_bytes());
        block.extend_from_slice(&self.log.to_le_bytes());
        block.extend_from_slice(&(self.standing as u16).to_le_bytes());
        block.extend_from_slice(&[0; 4]);
        block.extend_from_slice(&self.epoch.to_le_bytes());
        block.resize(HEADER_BYTES, 0);
        live.iter().for_each(|number| block.extend_from_slice(&number.to_le_bytes()));
        let list_crc = crc32c::crc32c(&block[HEADER_BYTES..]);
        block[44..48].copy_from_slice(&list_crc.to_le_bytes());
        let crc = crc32c::crc32c(&block[4..HEADER_BYTES]);
        block[..4].copy_from_slice(&crc.to_le_bytes());
        block.resize(self.block_bytes as usize, 0);
        block
    }

    /// Reads the first block of a segment.
    ///
    /// # Errors
    ///
    /// The bytes are no segment header, or not a whole one.
    pub fn decode(block: &[u8]) -> Result<Self, Malformed> {
        let head = block.get(..HEADER_BYTES).ok_or(Malformed::Short)?;
        if u32_at(head, 4) != SEGMENT_MAGIC {
            return Err(Malformed::Magic);
        }
        if crc32c::crc32c(&head[4..]) != u32_at(head, 0) {
            return Err(Malformed::HeaderChecksum);
        }
        let list = block.get(HEADER_BYTES..HEADER_BYTES + 8 * u32_at(head, 36) as usize).unwrap_or_default();
        let list = (crc32c::crc32c(list) == u32_at(head, 44)).then_some(list);
        Ok(Self {
            store: u64_at(block, 16),
            log: u16_at(block, 40),
            number: u64_at(block, 8),
            epoch: u32_at(block, 48),
            segment_bytes: u64_at(block, 24),
            block_bytes: u32_at(block, 32),
            standing: match u16_at(block, 42) {
                0 => Standing::Counts,
                1 => Standing::Cleaned,
                2 => Standing::GivenUp,
                _ => return Err(Malformed::Content),
            },
            live: list.map(|list| list.chunks_exact(8).map(|number| u64_at(number, 0)).collect()),
        })
    }
}

impl BatchHeader {
    /// Bytes of the batch on the medium: whole blocks.
    pub fn total_bytes(&self, block_bytes: NonZeroUsize) -> usize {
        (HEADER_BYTES + self.body_bytes as usize).next_multiple_of(block_bytes.get())
    }

    /// Writes the header to the front of a batch.
    pub fn encode(&self, to: &mut [u8]) {
        to[4..8].copy_from_slice(&BATCH_MAGIC.to_le_bytes());
        to[8..16].copy_from_slice(&self.lsn.0.to_le_bytes());
        to[16..24].copy_from_slice(&self.promised.0.to_le_bytes());
        to[24..32].copy_from_slice(&self.store.to_le_bytes());
        to[32..40].copy_from_slice(&self.time_ns.to_le_bytes());
        to[40..44].copy_from_slice(&self.epoch.to_le_bytes());
        to[44..48].copy_from_slice(&self.records.to_le_bytes());
        to[48..52].copy_from_slice(&self.body_bytes.to_le_bytes());
        to[52..56].copy_from_slice(&self.body_crc.to_le_bytes());
        to[56..58].copy_from_slice(&self.log.to_le_bytes());
        to[58..60].copy_from_slice(&self.links.to_le_bytes());
        to[60..64].copy_from_slice(&(if self.ends_segment { ENDS_SEGMENT } else { 0 }).to_le_bytes());
        let crc = crc32c::crc32c(&to[4..HEADER_BYTES]);
        to[..4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads the header at the front of `bytes`.
    ///
    /// # Errors
    ///
    /// There is no batch, or its header was not written whole.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let head = bytes.get(..HEADER_BYTES).ok_or(Malformed::Short)?;
        if u32_at(head, 4) != BATCH_MAGIC {
            return Err(Malformed::Magic);
        }
        if crc32c::crc32c(&head[4..]) != u32_at(head, 0) {
            return Err(Malformed::HeaderChecksum);
        }
        Ok(Self {
            store: u64_at(head, 24),
            log: u16_at(head, 56),
            lsn: Lsn(u64_at(head, 8)),
            promised: Lsn(u64_at(head, 16)),
            epoch: u32_at(head, 40),
            links: u16_at(head, 58),
            records: u32_at(head, 44),
            body_bytes: u32_at(head, 48),
            body_crc: u32_at(head, 52),
            time_ns: u64_at(head, 32),
            ends_segment: u32_at(head, 60) & ENDS_SEGMENT != 0,
        })
    }
}

impl Record<'_> {
    /// Bytes of the record, up to where the next one may begin.
    pub fn encoded_bytes(&self) -> usize {
        let times = 8 * (usize::from(self.expires_ms.is_some()) + usize::from(self.received_ns.is_some()));
        (RECORD_BYTES + times + self.key.len() + self.subkey.len() + self.value.len()).next_multiple_of(RECORD_ALIGN)
    }

    /// [`Record::encoded_bytes`] of a record without subkey and time of receipt.
    pub fn bytes_of(key_bytes: usize, value_bytes: usize, expires: bool) -> usize {
        (RECORD_BYTES + 8 * usize::from(expires) + key_bytes + value_bytes).next_multiple_of(RECORD_ALIGN)
    }

    /// Writes the record behind what `to` has. The key and the subkey have at most [`KEY_BYTES_MAX`] bytes, the value has
    /// less than 4 GiB: the caller checked that before it took the request.
    pub fn encode(&self, to: &mut Vec<u8>) {
        const TIMES_BYTES: usize = 2 * size_of::<u64>();
        let start = to.len();
        let expires = if self.expires_ms.is_some() { HAS_EXPIRY } else { 0 };
        let received = if self.received_ns.is_some() { HAS_RECEIVED } else { 0 };
        let mut head = [0; RECORD_BYTES + TIMES_BYTES];
        head[4..8].copy_from_slice(&crc32c::crc32c(self.value).to_le_bytes());
        head[8..16].copy_from_slice(&self.version.to_le_bytes());
        head[16..20].copy_from_slice(&(self.value.len() as u32).to_le_bytes());
        head[20..22].copy_from_slice(&(self.key.len() as u16).to_le_bytes());
        head[22..24].copy_from_slice(&(self.subkey.len() as u16).to_le_bytes());
        (head[24], head[25]) = (self.kind as u8, expires | received);
        let mut head_bytes = RECORD_BYTES;
        for time in [self.expires_ms, self.received_ns].into_iter().flatten() {
            head[head_bytes..][..8].copy_from_slice(&time.to_le_bytes());
            head_bytes += 8;
        }
        to.reserve(self.encoded_bytes());
        to.extend_from_slice(&head[..head_bytes]);
        to.extend_from_slice(self.key);
        to.extend_from_slice(self.subkey);
        let crc = crc32c::crc32c(&to[start + 4..]);
        to[start..start + 4].copy_from_slice(&crc.to_le_bytes());
        to.extend_from_slice(self.value);
        to.resize(start + (to.len() - start).next_multiple_of(RECORD_ALIGN), 0);
    }
}

impl<'a> Record<'a> {
    /// Reads the record at the front of `bytes`, whose header is checked; with `check_value` the value is, too. A batch
    /// whose body was checked needs no second look at its values.
    ///
    /// # Errors
    ///
    /// The bytes are no record, or not a whole one.
    pub fn decode(bytes: &'a [u8], check_value: bool) -> Result<Self, Malformed> {
        Self::decode_with(bytes, true, check_value)
    }

    fn decode_with(bytes: &'a [u8], check_head: bool, check_value: bool) -> Result<Self, Malformed> {
        let head = bytes.get(..RECORD_BYTES).ok_or(Malformed::Short)?;
        let flags = head[25];
        let (has_expiry, has_received) = (flags & HAS_EXPIRY != 0, flags & HAS_RECEIVED != 0);
        let times = 8 * (usize::from(has_expiry) + usize::from(has_received));
        let key_at = RECORD_BYTES + times;
        let subkey_at = key_at + usize::from(u16_at(head, 20));
        let value_at = subkey_at + usize::from(u16_at(head, 22));
        let end = value_at + u32_at(head, 16) as usize;
        let bytes = bytes.get(..end).ok_or(Malformed::Short)?;
        if check_head && crc32c::crc32c(&bytes[4..value_at]) != u32_at(head, 0) {
            return Err(Malformed::HeaderChecksum);
        }
        if check_value && crc32c::crc32c(&bytes[value_at..]) != u32_at(head, 4) {
            return Err(Malformed::DataChecksum);
        }
        let expires_ms = has_expiry.then(|| u64_at(bytes, RECORD_BYTES));
        let received_ns = has_received.then(|| u64_at(bytes, key_at - 8));
        Ok(Self {
            kind: RecordKind::from_byte(head[24]).ok_or(Malformed::Content)?,
            version: u64_at(head, 8),
            expires_ms,
            received_ns,
            key: &bytes[key_at..subkey_at],
            subkey: &bytes[subkey_at..value_at],
            value: &bytes[value_at..],
        })
    }
}

/// A batch as it was read, with a body whose checksum is right.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Its head.
    pub header: BatchHeader,
    body: &'a [u8],
}

impl<'a> Batch<'a> {
    /// Reads the batch at the front of `bytes`.
    ///
    /// # Errors
    ///
    /// There is none, or it was not written whole.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let header = BatchHeader::decode(bytes)?;
        let body = bytes.get(HEADER_BYTES..HEADER_BYTES + header.body_bytes as usize).ok_or(Malformed::Short)?;
        if crc32c::crc32c(body) != header.body_crc {
            return Err(Malformed::DataChecksum);
        }
        if body.len() < usize::from(header.links) * LINK_BYTES {
            return Err(Malformed::Content);
        }
        Ok(Self { header, body })
    }

    /// What it saw of other logs.
    pub fn links(&self) -> impl Iterator<Item = Link> + use<'a> {
        let links = &self.body[self.body.len() - usize::from(self.header.links) * LINK_BYTES..];
        links.chunks_exact(LINK_BYTES).map(|link| Link { log: u16_at(link, 0), lsn: Lsn(u64_at(link, 8)) })
    }

    /// Its records, each with its place in the log.
    pub fn records(&self) -> Records<'a> {
        let records_bytes = self.body.len() - usize::from(self.header.links) * LINK_BYTES;
        let (left, base) = (self.header.records, self.header.lsn);
        Records { body: &self.body[..records_bytes], at: 0, left, base, check_heads: true }
    }

    /// The same of a batch whose records were checked before: that it is the same one, the checksum of its body says.
    pub(crate) fn known_records(&self) -> Records<'a> {
        Records { check_heads: false, ..self.records() }
    }
}

/// The records of a batch; ends after one that is malformed.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    body: &'a [u8],
    at: usize,
    left: u32,
    base: Lsn,
    /// Whether the checksum of each record is held against it.
    check_heads: bool,
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<(Lsn, Record<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let lsn = Lsn(self.base.0 + (HEADER_BYTES + self.at) as u64);
        let record = Record::decode_with(self.body.get(self.at..).unwrap_or_default(), self.check_heads, false);
        match record {
            Ok(record) => {
                self.at += record.encoded_bytes();
                Some(Ok((lsn, record)))
            }
            Err(malformed) => {
                self.left = 0;
                Some(Err(malformed))
            }
        }
    }
}

/// Puts a batch together in one buffer, which is written as it is.
#[derive(Debug)]
pub struct BatchBuilder {
    bytes: Vec<u8>,
    links: Vec<Link>,
    records: u32,
}

impl BatchBuilder {
    /// An empty batch in `buffer`, whose contents are forgotten and whose memory is used.
    pub fn new(mut buffer: Vec<u8>) -> Self {
        buffer.clear();
        buffer.resize(HEADER_BYTES, 0);
        Self { bytes: buffer, links: Vec::new(), records: 0 }
    }

    /// True if nothing is to be written.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Records that it has.
    pub fn records(&self) -> u32 {
        self.records
    }

    /// Bytes that it takes on the medium, before padding.
    pub fn len(&self) -> usize {
        self.bytes.len() + self.links.len() * LINK_BYTES
    }

    /// Adds a record. Returns where it begins in the batch.
    pub fn push(&mut self, record: &Record<'_>) -> u32 {
        let at = self.bytes.len();
        record.encode(&mut self.bytes);
        self.records += 1;
        at as u32
    }

    /// What it saw of other logs.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The batch saw what the other log wrote up to there.
    pub fn link(&mut self, link: Link) {
        match self.links.iter_mut().find(|known| known.log == link.log) {
            Some(known) => known.lsn = known.lsn.max(link.lsn),
            None => self.links.push(link),
        }
    }

    /// The batch, padded to whole blocks. `header` is completed with what the batch knows itself.
    pub fn finish(mut self, mut header: BatchHeader, block_bytes: NonZeroUsize) -> (BatchHeader, Vec<u8>) {
        for link in &self.links {
            self.bytes.extend_from_slice(&link.log.to_le_bytes());
            self.bytes.extend_from_slice(&[0; 6]);
            self.bytes.extend_from_slice(&link.lsn.0.to_le_bytes());
        }
        header.links = self.links.len() as u16;
        header.records = self.records;
        header.body_bytes = (self.bytes.len() - HEADER_BYTES) as u32;
        header.body_crc = crc32c::crc32c(&self.bytes[HEADER_BYTES..]);
        header.encode(&mut self.bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(block_bytes.get()), 0);
        (header, self.bytes)
    }
}
