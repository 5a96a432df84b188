//! Snapshots of Redis: the way they are cut does not matter, and no more comes out than their bytes can say.

use ksf_proto::rdb::{BadRdb, Part, Reader};

/// Bytes of a string that is taken.
const STRING_BYTES_MAX: usize = 1 << 16;
/// Bytes that one byte can say at most: LZF says 88, and a listpack in it says 20 digits by 9 bytes.
const RATIO: usize = 88 * 3;

/// What is read, and how many bytes it took, of a snapshot that comes in pieces.
fn read(input: &[u8], piece_bytes: usize) -> (Vec<Part>, usize, Option<BadRdb>) {
    let (mut reader, mut parts, mut from, mut to) = (Reader::new(STRING_BYTES_MAX), Vec::new(), 0, 0);
    loop {
        loop {
            match reader.read(&input[from..to]) {
                Ok(Some((part, used))) => {
                    from += used;
                    parts.push(part);
                }
                Ok(None) => break,
                Err(bad) => return (parts, from, Some(bad)),
            }
        }
        if to == input.len() {
            return (parts, from, None);
        }
        to = (to + piece_bytes).min(input.len());
    }
}

/// A snapshot.
pub fn rdb(input: &[u8]) {
    let (parts, used, bad) = read(input, input.len().max(1));
    let mut bytes = 0;
    for part in &parts {
        match part {
            Part::Key { key, .. } => bytes += key.len(),
            Part::Strings(strings) => strings.each(|string| bytes += string.len()),
            Part::Nothing | Part::Database(_) | Part::KeyEnd | Part::End => {}
        }
    }
    assert!(bytes <= used * RATIO, "{bytes} bytes of {used}");
    for piece_bytes in [1, 5, 64] {
        assert!(read(input, piece_bytes) == (parts.clone(), used, bad.clone()), "in pieces of {piece_bytes}");
    }
}
