//! Messages of 9P2000.L: what is read writes back to the bytes it was read from.

use ksf_proto::p9::{DirEntry, Reply, Request};

/// A message of either direction, without the size in front of it.
pub fn p9(input: &[u8]) {
    let mut message = (input.len() as u32 + 4).to_le_bytes().to_vec();
    message.extend_from_slice(input);
    let mut written = Vec::new();
    if let Ok((tag, request)) = Request::parse(&message) {
        if let Request::Walk { names, .. } = request {
            assert_eq!(names.iter().count(), names.len());
        }
        request.put(tag, &mut written).expect("what was read fits");
        assert_eq!(written, message);
    } else if let Ok((tag, reply)) = Reply::parse(&message) {
        if let Reply::Readdir { data } = reply {
            entries(data.0);
        }
        reply.put(tag, &mut written).expect("what was read fits");
        assert_eq!(written, message);
    }
}

/// Entries up to an error are the bytes that they were read from.
fn entries(data: &[u8]) {
    let mut written = Vec::new();
    for entry in DirEntry::all(data) {
        let Ok(entry) = entry else { return assert!(data.starts_with(&written)) };
        entry.put(&mut written).expect("what was read fits");
    }
    assert_eq!(written, data);
}
