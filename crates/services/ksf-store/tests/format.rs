//! The format as `docs/formats/store.md` has it, against what is written.

use std::num::NonZeroUsize;

use ksf_store::format::{
    BatchBuilder, BatchHeader, HEADER_BYTES, LINK_BYTES, Link, Lsn, RECORD_BYTES, Record, RecordKind, SegmentHeader,
    Standing,
};

const DOCS: &str = include_str!("../../../../docs/formats/store.md");
const BLOCK_BYTES: usize = 512;

/// The rows of a table: where each field begins, its bytes, and what it is.
fn rows(table: &str) -> Vec<(usize, usize, &'static str)> {
    let head = format!("| {table}, byte | bytes | field |");
    let lines = DOCS.lines().skip_while(|line| *line != head).skip(2).take_while(|line| line.starts_with('|'));
    let rows = lines.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        (cells[0].parse().unwrap(), cells[1].trim_end_matches(" each").parse().unwrap(), cells[2])
    });
    let rows: Vec<_> = rows.collect();
    assert!(!rows.is_empty(), "no table of the {table}");
    rows
}

/// Each field of the table has the value of the first name that it begins with, and the fields do not overlap.
fn compare(table: &str, bytes: &[u8], values: &[(&str, u64)]) {
    let rows = rows(table);
    assert_eq!(rows.len(), values.len(), "{table}: fields");
    for ((at, length, field), (name, value)) in rows.iter().zip(values) {
        assert!(field.starts_with(name), "{table}: {field} is not {name}");
        assert_eq!(bytes[*at..at + length], value.to_le_bytes()[..*length], "{table}: {field}");
    }
    assert!(rows.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{table}: fields overlap");
}

fn magic(text: &[u8; 4]) -> u64 {
    u32::from_le_bytes(*text).into()
}

#[test]
fn a_segment_header_is_as_described() {
    let header = SegmentHeader {
        store: 0x1122_3344_5566_7788,
        log: 0x0a0b,
        number: 0x2233_4455_6677_8899,
        epoch: 0x0102_0304,
        segment_bytes: 0x0040_0000,
        block_bytes: BLOCK_BYTES as u32,
        standing: Standing::GivenUp,
        live: Some(vec![0x3344_5566_7788_99aa]),
    };
    let bytes = header.encode();
    assert_eq!(bytes.len(), BLOCK_BYTES);
    compare(
        "segment",
        &bytes,
        &[
            ("checksum of bytes 4 to 63", crc32c::crc32c(&bytes[4..64]).into()),
            ("`ksfS`", magic(b"ksfS")),
            ("number of the segment", header.number),
            ("number of the store", header.store),
            ("bytes of a segment", header.segment_bytes),
            ("bytes of a block", BLOCK_BYTES as u64),
            ("segments in the list", 1),
            ("number of the log", header.log.into()),
            ("standing: 0 it counts, 1 it was cleaned, 2 a crash cut", 2),
            ("checksum of the list", crc32c::crc32c(&bytes[64..72]).into()),
            ("epoch", header.epoch.into()),
            ("the list", 0x3344_5566_7788_99aa),
        ],
    );
    assert_eq!((Standing::Counts as u16, Standing::Cleaned as u16), (0, 1));
    assert_eq!(SegmentHeader::decode(&bytes), Ok(header));
}

#[test]
fn a_batch_with_its_records_and_links_is_as_described() {
    let (key, subkey, value) = (&b"key"[..], &b"subkey"[..], &b"a value"[..]);
    let (version, expires_ms, received_ns) = (0x4455_6677_8899_aabb, 0x0000_0199_8877_6655, 0x1888_7777_6666_5555);
    let record = Record {
        kind: RecordKind::Drop,
        version,
        expires_ms: Some(expires_ms),
        received_ns: Some(received_ns),
        key,
        subkey,
        value,
    };
    let mut batch = BatchBuilder::new(Vec::new());
    batch.push(&record);
    let second_at = batch.push(&record) as usize;
    let link = Link { log: 0x0c0d, lsn: Lsn(0x5566_7788_99aa_bbcc) };
    batch.link(link);
    let header = BatchHeader {
        store: 0x1122_3344_5566_7788,
        log: 0x0a0b,
        lsn: Lsn(0x0000_0777_0000_0200),
        promised: Lsn(0x0000_0776_0000_0200),
        epoch: 0x0102_0304,
        records: 0,
        links: 0,
        body_bytes: 0,
        body_crc: 0,
        time_ns: 0x6677_8899_aabb_ccdd,
        ends_segment: true,
    };
    let (header, bytes) = batch.finish(header, NonZeroUsize::new(BLOCK_BYTES).unwrap());
    assert_eq!(bytes.len() % BLOCK_BYTES, 0);
    let body = &bytes[HEADER_BYTES..HEADER_BYTES + header.body_bytes as usize];
    compare(
        "batch",
        &bytes,
        &[
            ("checksum of bytes 4 to 63", crc32c::crc32c(&bytes[4..64]).into()),
            ("`ksfB`", magic(b"ksfB")),
            ("LSN", header.lsn.0),
            ("promised", header.promised.0),
            ("number of the store", header.store),
            ("time", header.time_ns),
            ("epoch", header.epoch.into()),
            ("records", 2),
            ("bytes of the body", body.len() as u64),
            ("checksum of the body", crc32c::crc32c(body).into()),
            ("number of the log", header.log.into()),
            ("links", 1),
            ("flags; 1: it is the last batch", 1),
        ],
    );
    let links = body.len() - LINK_BYTES;
    compare("link", &body[links..], &[("number of the other log", link.log.into()), ("LSN", link.lsn.0)]);
    assert_eq!((LINK_BYTES, RECORD_BYTES, HEADER_BYTES), (16, 32, 64));

    let one = &body[..second_at - HEADER_BYTES];
    let value_at = RECORD_BYTES + 16 + key.len() + subkey.len();
    compare(
        "record",
        one,
        &[
            ("checksum of byte 4 up to the value", crc32c::crc32c(&one[4..value_at]).into()),
            ("checksum of the value", crc32c::crc32c(value).into()),
            ("version", version),
            ("bytes of the value", value.len() as u64),
            ("bytes of the key", key.len() as u64),
            ("bytes of the subkey", subkey.len() as u64),
            ("kind", RecordKind::Drop as u64),
            ("flags; 1: it has a time of expiry, 2: it has a time of receipt", 3),
        ],
    );
    let mut rest = [expires_ms.to_le_bytes(), received_ns.to_le_bytes()].concat();
    [key, subkey, value].iter().for_each(|part| rest.extend_from_slice(part));
    rest.resize(rest.len().next_multiple_of(8), 0);
    assert_eq!(one[RECORD_BYTES..], rest, "behind the fields of every record");
    assert_eq!((RecordKind::String as u8, RecordKind::Flush as u8), (1, 9));
}
