//! Snapshots that Redis wrote, and such as no Redis writes.

use proptest::prelude::*;

use super::*;

/// Written by Redis 7.0.15: every kind of key, small ones and such as need another encoding.
const EVERY_KIND: &[u8] = include_bytes!("../../../../../fuzz/corpus/rdb/every_kind");

/// A snapshot as lines, read in pieces of so many bytes.
fn lines(bytes: &[u8], piece_bytes: usize, string_bytes_max: usize) -> Result<Vec<String>, BadRdb> {
    let (mut reader, mut lines, mut from, mut to) = (Reader::new(string_bytes_max), Vec::new(), 0, 0);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    loop {
        while let Some((part, used)) = reader.read(&bytes[from..to])? {
            from += used;
            match part {
                Part::Nothing => {}
                Part::Database(number) => lines.push(format!("database {number}")),
                Part::Key { key, kind, expires_ms } => lines.push(format!("{} {kind:?} {expires_ms:?}", text(&key))),
                Part::Strings(strings) => strings.each(|string| lines.push(text(string))),
                Part::KeyEnd => lines.push("whole".into()),
                Part::End => lines.push("end".into()),
            }
        }
        if to == bytes.len() {
            return Ok(lines);
        }
        to = (to + piece_bytes).min(bytes.len());
    }
}

#[test]
fn what_redis_wrote_is_read_however_it_is_cut() {
    let whole = lines(EVERY_KIND, usize::MAX / 2, 1 << 20).unwrap();
    let of = |key: &str| -> Vec<&str> {
        let at = whole.iter().position(|line| line.starts_with(&format!("{key} "))).unwrap();
        whole[at..].iter().map(|line| &line[..]).take_while(|line| *line != "whole").collect()
    };
    assert_eq!(of("s"), ["s String None", "hello"]);
    assert_eq!(of("n"), ["n String None", "12345"]);
    assert_eq!(of("n8"), ["n8 String None", "-5"]);
    assert_eq!(of("n16"), ["n16 String None", "300"]);
    assert_eq!(of("big"), ["big String None", "12345678901"]);
    assert_eq!(of("lz"), ["lz String None", &"a".repeat(200)]);
    assert!(of("ttl")[0].starts_with("ttl String Some(") && of("ttl")[1] == "x");
    assert_eq!(of("l"), ["l List None", "a", "b", "1", "300", "70000", "-1", "5000000000", "9000000000000", ""]);
    assert_eq!(of("is"), ["is Set None", "1", "2", "3"]);
    assert_eq!(of("is32"), ["is32 Set None", "1", "70000"]);
    assert_eq!(of("is64"), ["is64 Set None", "1", "9000000000"]);
    assert_eq!(of("h"), ["h Hash None", "f", "v", "g", "1"]);
    assert_eq!(of("hb"), ["hb Hash None", "f", &"b".repeat(100)]);
    assert_eq!(of("z"), ["z SortedSet None", "d", "-inf", "a", "1.5", "b", "2", "c", "inf"]);
    assert_eq!(of("zb"), ["zb SortedSet None", &"c".repeat(100), "1.25"]);
    let mut members = of("st");
    members.sort_unstable();
    assert_eq!(members, ["a", "b", "st Set None"]);
    assert_eq!((&whole[0][..], whole.last().unwrap().as_str()), ("database 0", "end"));
    for piece_bytes in [1, 2, 7, 100] {
        assert_eq!(lines(EVERY_KIND, piece_bytes, 1 << 20).unwrap(), whole);
    }
    for cut in 0..EVERY_KIND.len() {
        let cut = lines(&EVERY_KIND[..cut], 1 << 10, 1 << 20).unwrap();
        assert!(cut.last().is_none_or(|last| last != "end"));
    }
}

#[test]
fn no_byte_may_change_but_that_is_told() {
    for at in 0..EVERY_KIND.len() {
        let mut changed = EVERY_KIND.to_vec();
        changed[at] ^= 1 << (at % 8);
        let read = lines(&changed, 1 << 10, 1 << 20);
        let is_whole = read.as_ref().is_ok_and(|lines| lines.last().is_some_and(|last| last == "end"));
        assert!(!is_whole, "byte {at}: {read:?}");
    }
}

/// A snapshot with nothing but this, and a checksum that was switched off.
fn snapshot(body: &[u8]) -> Vec<u8> {
    [b"REDIS0010", body, &[opcode::END], &[0; 8]].concat()
}

#[test]
fn what_cannot_be_taken_is_refused_by_its_name() {
    let told = |body: &[u8]| lines(&snapshot(body), 1 << 10, 100).map_err(|bad| bad.to_string());
    assert_eq!(told(&[]), Ok(vec!["end".into()]));
    assert_eq!(told(b"\xfe\x03"), Ok(vec!["database 3".into(), "end".into()]));
    assert_eq!(told(b"\xfd\x01\0\0\0\0\x01k\x01v").unwrap()[0], "k String Some(1000)");
    assert_eq!(told(b"\xf8\x05\xf9\x07\0\x01k\x01v").unwrap()[0], "k String None");
    assert_eq!(told(b"\x01\x01k\x02\x01a\x01b").unwrap(), ["k List None", "a", "b", "whole", "end"]);
    assert_eq!(told(b"\x12\x01k\x01\x01\x03abc").unwrap(), ["k List None", "abc", "whole", "end"]);
    for (body, part) in [
        (&b"\xf5\x03lib"[..], "it has functions, which cannot be taken"),
        (b"\xf7\x01", "it has data of a module"),
        (b"\x0f\x03log", "the key \"log\" is a stream"),
        (b"\x13\x03log", "the key \"log\" is a stream"),
        (b"\x07\x01m", "the key \"m\" is a value of a module"),
        (b"\x0e\x01l", "no longer writes"),
        (b"\x18\x01h", "fields have times"),
        (b"\xc8\x01h", "200 is no opcode"),
        (b"\0\x40\x65", "a string has 101 bytes, and at most 100 are taken"),
        (b"\0\x81\0\0\0\x01\0\0\0\0", "a string has 4294967296 bytes"),
        (b"\0\x82", "a length makes no sense"),
        (b"\0\xc4", "the length of a string makes no sense"),
        (b"\0\xc3\x02\x3f\x20\x00", "a compressed string makes no sense"),
        (b"\0\xc3\x02\x40\x65\x20\x00", "a string has 101 bytes"),
        (b"\x05\x01z\x01\x01m\0\0\0\0\0\0\xf8\x7f", "a score makes no sense"),
        (b"\x11\x01z\x0b\x0b\0\0\0\x02\0\x81m\x02\x81", "a listpack makes no sense"),
        (b"\x11\x01z\x0d\x0d\0\0\0\x02\0\x81m\x02\x81x\x02\xff", "a score makes no sense"),
        (b"\x10\x01h\x0a\x0a\0\0\0\x01\0\x81m\x02\xff", "a listpack makes no sense"),
        (b"\x0b\x01s\x02\0\0", "an intset makes no sense"),
        (b"\x12\x01k\x01\x03\x03abc", "a node of a list makes no sense"),
        (b"\xfe\xc0\x01", "a number makes no sense"),
    ] {
        let told = told(body).unwrap_err();
        assert!(told.contains(part), "{}: {told}", body.escape_ascii());
    }
    let read = |bytes: &[u8]| lines(bytes, 3, 100).map_err(|bad| bad.to_string());
    assert!(read(b"REDIS0004").unwrap_err().contains("version 4 of the format"));
    assert!(read(b"REDIS0013").unwrap_err().contains("version 13 of the format"));
    assert!(read(b"REDIS00x0").unwrap_err().contains("does not begin"));
    assert!(read(b"RESP").unwrap_err().contains("does not begin"));
    assert_eq!(read(b"REDIS"), Ok(Vec::new()));
    let wrong = [b"REDIS0010\xff", &[1; 8][..]].concat();
    assert!(read(&wrong).unwrap_err().contains("the checksum is wrong: 0101010101010101"));
}

#[test]
fn what_follows_the_end_is_left() {
    let bytes = [&snapshot(b"")[..], b"*1\r\n"].concat();
    let mut reader = Reader::new(100);
    let (mut at, mut ended) = (0, false);
    while let Some((part, used)) = reader.read(&bytes[at..]).unwrap() {
        at += used;
        ended = part == Part::End;
    }
    assert!(ended && reader.is_ended());
    assert_eq!(&bytes[at..], b"*1\r\n");
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = lines(&bytes, 17, 50);
        let _ = lines(&[b"REDIS0010", &bytes[..]].concat(), 17, 50);
    }
}
