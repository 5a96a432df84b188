//! Properties of HTTP/1: any split of a stream gives the same messages, and no bytes make a reader panic.

use ksf_proto::http1::{Body, BodyLength, Request, Response, head_bytes};
use proptest::prelude::*;

/// A stream of requests as a client may send them, and the lengths of their heads and bodies.
fn requests() -> impl Strategy<Value = (Vec<u8>, Vec<(usize, usize)>)> {
    let body = prop_oneof![
        Just((String::new(), Vec::new())),
        prop::collection::vec(any::<u8>(), 0..300)
            .prop_map(|body| (format!("Content-Length: {}\r\n", body.len()), body)),
        prop::collection::vec(prop::collection::vec(any::<u8>(), 1..90), 0..4).prop_map(|chunks| {
            let mut body = Vec::new();
            for chunk in chunks {
                body.extend_from_slice(format!("{:x};a\r\n", chunk.len()).as_bytes());
                body.extend_from_slice(&chunk);
                body.extend_from_slice(b"\r\n");
            }
            body.extend_from_slice(b"0\r\nT: 1\r\n\r\n");
            ("Transfer-Encoding: chunked\r\n".to_owned(), body)
        }),
    ];
    let empty_lines = prop::sample::select(vec!["", "\r\n", "\n"]);
    let fields = prop::collection::vec("X-[a-z]{1,9}: [ -~]{0,20}", 0..4);
    prop::collection::vec((empty_lines, fields, body), 1..5).prop_map(|all| {
        let mut stream = Vec::new();
        let mut lengths = Vec::new();
        for (empty, fields, (length, body)) in all {
            let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
            let head = format!("{empty}POST /x HTTP/1.1\r\nHost: h\r\n{fields}{length}\r\n");
            stream.extend_from_slice(head.as_bytes());
            stream.extend_from_slice(&body);
            lengths.push((head.len(), body.len()));
        }
        (stream, lengths)
    })
}

/// Reads a stream that arrives in these pieces: the lengths of heads and bodies, or `None` where it is refused.
fn read(stream: &[u8], pieces: &[usize]) -> Option<Vec<(usize, usize)>> {
    let mut found = Vec::new();
    let (mut kept, mut scanned) = (Vec::new(), 0);
    let mut body: Option<(Body, usize, usize)> = None;
    let mut rest = stream;
    for length in pieces.iter().copied().chain([usize::MAX]) {
        let (mut piece, behind) = rest.split_at(length.min(rest.len()));
        rest = behind;
        while !piece.is_empty() {
            if let Some((state, head, taken)) = &mut body {
                let bytes = state.take(piece).ok()?;
                *taken += bytes;
                piece = &piece[bytes..];
                if state.is_done() {
                    found.push((*head, *taken));
                    body = None;
                }
                continue;
            }
            let before = kept.len();
            kept.extend_from_slice(piece);
            let Some(end) = head_bytes(&kept, scanned) else {
                scanned = kept.len();
                break;
            };
            piece = &piece[end - before..];
            let request = Request::parse(&kept[..end]).ok()?;
            let state = Body::new(request.body);
            if state.is_done() {
                found.push((end, 0));
            } else {
                body = Some((state, end, 0));
            }
            kept.clear();
            scanned = 0;
        }
    }
    Some(found)
}

proptest! {
    #[test]
    fn any_split_gives_the_same_messages((stream, lengths) in requests(), pieces in prop::collection::vec(1..40usize, 0..60)) {
        prop_assert_eq!(read(&stream, &[]), Some(lengths.clone()));
        prop_assert_eq!(read(&stream, &pieces), Some(lengths.clone()));
        let ones = vec![1; stream.len()];
        prop_assert_eq!(read(&stream, &ones), Some(lengths));
    }

    #[test]
    fn damage_is_seen_alike_in_any_split(
        (mut stream, _) in requests(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        pieces in prop::collection::vec(1..40usize, 0..60),
    ) {
        let at = at.index(stream.len());
        stream[at] = byte;
        prop_assert_eq!(read(&stream, &[]), read(&stream, &pieces));
    }

    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), split in 0..200usize) {
        let split = split.min(bytes.len());
        let _ = head_bytes(&bytes, split);
        let _ = Request::parse(&bytes);
        let _ = Response::parse(&bytes, false);
        for length in [BodyLength::Chunked, BodyLength::Fixed(split as u64), BodyLength::UntilClose] {
            let mut body = Body::new(length);
            let whole = Body::new(length).take(&bytes);
            let parts = body.take(&bytes[..split]).and_then(|first| {
                if first < split { Ok(first) } else { body.take(&bytes[split..]).map(|second| first + second) }
            });
            prop_assert_eq!(whole, parts);
        }
    }
}
