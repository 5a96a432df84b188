//! The requests that the reader cuts are those of another parser, with the same bodies, as far as that one reads.

use std::fmt::Write as _;

use ksf::framing::Frame;
use ksf::limits::Limits;
use proptest::prelude::*;

use super::{Reader, Taken};

#[path = "../../../../../core/ksf-proto/tests/second_reader/node.rs"]
mod node;

/// Requests of a stream that arrives in pieces of `step` bytes, up to the last one of its connection, as the other parser shows them.
fn cut(stream: &[u8], step: usize) -> Vec<String> {
    let (mut reader, mut buf, mut shown) = (Reader::default(), Vec::new(), Vec::new());
    for piece in stream.chunks(step) {
        buf.extend_from_slice(piece);
        loop {
            let part = match reader.cut(&buf, 0, &Limits::default(), |_, _| true) {
                Ok(Frame::Part(part)) if part.total_bytes() <= buf.len() => part,
                Ok(_) => break,
                Err(_) => return shown,
            };
            let message: Vec<u8> = buf.drain(..part.total_bytes()).collect();
            let (request, message) = match reader.take(&message) {
                Some(Taken::Whole(request)) => (request, message),
                Some(Taken::Joined(request, whole)) => (request, whole),
                Some(Taken::Head(_)) | None => continue,
            };
            let method = message.split(|byte| *byte == b' ').next().unwrap_or_default();
            let mut text = format!("{}:", method.escape_ascii());
            request.body(&message).iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
            shown.push(text);
            if !request.keep_alive() {
                return shown;
            }
        }
    }
    shown
}

#[test]
fn second_reader_finds_each_request_that_is_cut() {
    let streams = (node::stream(node::request()), 1..200usize);
    node::with_node(1000, 100, streams, |node, (stream, step)| {
        let (theirs, end) = node.read('q', &stream);
        let mut ours = cut(&stream, step);
        if end.starts_with("bad") {
            // Of its methods and targets the other reader knows fewer.
            ours.truncate(theirs.len());
        }
        prop_assert!(theirs.starts_with(&ours), "{ours:?}, not {theirs:?} {end}: {}", stream.escape_ascii());
        Ok((ours.len(), ours.iter().filter(|request| !request.ends_with(':')).count()))
    });
}
