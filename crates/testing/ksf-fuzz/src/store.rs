//! The store: commands are cut in one way however they arrive, and a log gives back what was written to it or says that
//! it is damaged.

use std::num::NonZeroUsize;

use ksf::framing::Frame;
use ksf::limits::Limits;
use ksf_kv::Requests;
use ksf_proto::resp::{self, Arguments, Malformed, Progress, RespLimits, Scan, Version, Writer};
use ksf_store::format::{Batch, HEADER_BYTES, Lsn, RECORD_ALIGN, RECORD_BYTES, Record, RecordKind, SegmentHeader};
use ksf_store::log::{Geometry, Log, News};
use ksf_store::recover::{Found, Places};

use crate::input::{Choices, Cuts};

/// Commands of RESP are the same however they arrive, and what was read writes back to the same arguments.
pub fn resp(input: &[u8]) {
    let mut choices = Choices::new(input);
    let seed = choices.byte();
    let stream = choices.rest();
    let at_once = commands(std::iter::once(stream));
    assert_eq!(at_once, commands(Cuts::new(seed).cut(stream)));
    for arguments in at_once.0.into_iter().flatten() {
        let mut written = Vec::new();
        let mut to = Writer::new(&mut written, Version::Resp2);
        to.array(arguments.len());
        arguments.iter().for_each(|argument| to.bulk(argument));
        let read = Arguments::of(&written).expect("an array was written");
        assert!(read.eq(arguments.iter().map(Vec::as_slice)), "{}", written.escape_ascii());
    }
}

/// The arguments of a command; `None`: quotes of an inline command do not match.
type Command = Option<Vec<Vec<u8>>>;

/// What arrives in these pieces, as the server cuts it.
fn commands<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Command>, Option<Malformed>) {
    // Small, so that inputs of a fuzzer's length reach them.
    let limits = RespLimits { arguments_max: 16, argument_bytes_max: 64, command_bytes_max: 200 };
    let (mut buf, mut progress, mut commands) = (Vec::new(), Progress::default(), Vec::new());
    for piece in pieces {
        buf.extend_from_slice(piece);
        loop {
            match resp::scan(&buf, &limits, &mut progress) {
                Ok(Scan::Incomplete(need)) => {
                    assert!(need > buf.len(), "no more is wanted than the {} bytes there are", buf.len());
                    break;
                }
                Ok(Scan::Command(bytes)) => {
                    let command: Vec<u8> = buf.drain(..bytes).collect();
                    commands.push(match Arguments::of(&command) {
                        Some(arguments) => {
                            let count = arguments.len();
                            let arguments: Vec<_> = arguments.map(<[u8]>::to_vec).collect();
                            assert_eq!(arguments.len(), count, "{}", command.escape_ascii());
                            if let Some(kept) = progress.spans().arguments(&command) {
                                assert!(kept.eq(arguments.iter().map(Vec::as_slice)), "{}", command.escape_ascii());
                            }
                            Some(arguments)
                        }
                        None => resp::inline(&command).ok(),
                    });
                }
                Err(malformed) => return (commands, Some(malformed)),
            }
        }
    }
    (commands, None)
}

/// Requests of HTTP are the same however they arrive, also where their client waits before it sends a body.
pub fn store_requests(input: &[u8]) {
    let mut choices = Choices::new(input);
    let seed = choices.byte();
    let stream = choices.rest();
    assert_eq!(requests(std::iter::once(stream)), requests(Cuts::new(seed).cut(stream)));
}

/// What arrives in these pieces, up to what ends the connection, and whether something did.
fn requests<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<String>, bool) {
    // Small, so that inputs of a fuzzer's length reach it.
    let limits = Limits { message_bytes_max: 300, ..Limits::default() };
    let (mut buf, mut scanned, mut reader, mut shown) = (Vec::new(), 0, Requests::default(), Vec::new());
    for piece in pieces {
        buf.extend_from_slice(piece);
        loop {
            match reader.cut(&buf, scanned, &limits) {
                Ok(Frame::Incomplete { need_bytes }) => {
                    assert!(need_bytes.is_none_or(|need| need > buf.len()), "no more is wanted than there is");
                    scanned = buf.len();
                    break;
                }
                Ok(Frame::Part(part)) if part.total_bytes() > buf.len() => break,
                Ok(Frame::Part(part)) => {
                    let message: Vec<u8> = buf.drain(..part.total_bytes()).collect();
                    shown.extend(reader.show(&message));
                    scanned = 0;
                }
                Err(_) => return (shown, true),
            }
        }
    }
    (shown, false)
}

const BLOCK_BYTES: usize = 512;
const SEGMENT_BYTES: usize = 16 * BLOCK_BYTES;
const PLACES: usize = 6;
const RECORDS: u8 = 12;

/// Blocks of a log with any bytes, and a whole log with bytes that changed: what is read is what was written, also where
/// checksums are right.
pub fn store_log(input: &[u8]) {
    let mut choices = Choices::new(input);
    let flags = choices.byte();
    let mut bytes = choices.rest().to_vec();
    read_header(&bytes);
    read_batch(&bytes);
    if flags & 1 != 0 {
        seal(&mut bytes);
        read_header(&bytes);
        read_batch(&bytes);
    }
    recover(choices.rest(), flags & 2 != 0);
}

fn read_header(block: &[u8]) {
    let Ok(header) = SegmentHeader::decode(block) else { return };
    // Any size may be named: as long as what was read is enough.
    let header = SegmentHeader { block_bytes: block.len() as u32, ..header };
    if header.live.is_some() {
        assert_eq!(SegmentHeader::decode(&header.encode()), Ok(header));
    }
}

fn read_batch(bytes: &[u8]) {
    let Ok(batch) = Batch::decode(bytes) else { return };
    let mut head = [0; HEADER_BYTES];
    batch.header.encode(&mut head);
    assert_eq!(ksf_store::format::BatchHeader::decode(&head), Ok(batch.header));
    assert_eq!(batch.links().count(), usize::from(batch.header.links));
    for (_, record) in batch.records().map_while(Result::ok) {
        let mut written = Vec::new();
        record.encode(&mut written);
        assert_eq!(Record::decode(&written, true), Ok(record));
        assert_eq!(written.len(), record.encoded_bytes());
    }
}

/// Makes the checksums right of what lies at the front: a header of a segment, or a batch.
fn seal(bytes: &mut [u8]) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    let (head, body) = bytes.split_at_mut(HEADER_BYTES);
    if &head[4..8] == b"ksfB" {
        let body_bytes = body.len().min(number(head, 48, 4));
        let body = &mut body[..body_bytes];
        seal_records(body);
        head[52..56].copy_from_slice(&crc32c::crc32c(body).to_le_bytes());
    } else {
        let list_bytes = body.len().min(number(head, 36, 4).saturating_mul(8));
        head[44..48].copy_from_slice(&crc32c::crc32c(&body[..list_bytes]).to_le_bytes());
    }
    let crc = crc32c::crc32c(&head[4..]);
    head[..4].copy_from_slice(&crc.to_le_bytes());
}

fn seal_records(mut rest: &mut [u8]) {
    while rest.len() >= RECORD_BYTES {
        let times = 8 * (rest[25] & 3).count_ones() as usize;
        let value_at = RECORD_BYTES + times + number(rest, 20, 2) + number(rest, 22, 2);
        let bytes = (value_at + number(rest, 16, 4)).next_multiple_of(RECORD_ALIGN);
        if value_at > rest.len() {
            return;
        }
        let crc = crc32c::crc32c(&rest[4..value_at]);
        rest[..4].copy_from_slice(&crc.to_le_bytes());
        let bytes = bytes.min(rest.len());
        rest = &mut rest[bytes..];
    }
}

fn number(bytes: &[u8], at: usize, width: usize) -> usize {
    bytes[at..at + width].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// Places in memory.
struct Medium(Vec<Vec<u8>>);

impl Places for Medium {
    fn places(&self) -> u32 {
        self.0.len() as u32
    }

    fn read(&self, place: u32, into: &mut Vec<u8>) -> std::io::Result<()> {
        into.clone_from(&self.0[place as usize]);
        Ok(())
    }
}

/// Reads a log in which each four bytes of `changes` changed one: place, where, and what it is now.
fn recover(changes: &[u8], is_sealed: bool) {
    let block_bytes = NonZeroUsize::new(BLOCK_BYTES).expect("above 0");
    let geometry = Geometry { store: 5, block_bytes, segment_bytes: SEGMENT_BYTES as u64 };
    let mut medium = written(geometry);
    for change in changes.chunks_exact(4) {
        let [place, low, high, byte] = [change[0], change[1], change[2], change[3]].map(usize::from);
        let at = (low | high << 8) % SEGMENT_BYTES;
        medium.0[place % PLACES][at] = byte as u8;
        if is_sealed {
            seal(&mut medium.0[place % PLACES][at / BLOCK_BYTES * BLOCK_BYTES..]);
        }
    }
    let Ok(mut found) = Found::read(0, geometry, &medium) else { return };
    let records = found.records(&medium, |_, record| {
        let is_written = record.key == [record.version as u8] && record.value == value(record.version as u8);
        assert!(is_written || is_sealed, "{record:?} was never written");
    });
    assert!(records.is_ok(), "what was read once is read again: {records:?}");
    found.repairs(found.epoch().saturating_add(1));
}

fn value(number: u8) -> Vec<u8> {
    vec![number; 100 * usize::from(number)]
}

/// A log of some segments.
fn written(geometry: Geometry) -> Medium {
    let mut medium = Medium(vec![vec![0; SEGMENT_BYTES]; PLACES]);
    let mut log = Log::create(geometry, 0, PLACES as u32);
    for number in 0..RECORDS {
        let (key, value) = ([number], value(number));
        let record = Record {
            kind: RecordKind::String,
            version: number.into(),
            expires_ms: None,
            received_ns: None,
            key: &key,
            subkey: &[],
            value: &value,
        };
        log.append(&[record], [], |_, _| {}).expect("there is room");
        while let Some(write) = log.next_write(8, 0) {
            let at = write.offset as usize;
            medium.0[write.place as usize][at..at + write.bytes.len()].copy_from_slice(&write.bytes);
            let mut end = Lsn::default();
            log.written(write.id, true, write.bytes, |news| {
                if let News::Durable { end: durable, .. } = news {
                    end = durable;
                }
            });
            log.promise(end);
        }
    }
    medium
}
